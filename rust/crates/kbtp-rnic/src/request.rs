//! A connect request: an MPA Request that waits for the ULP's answer (RFC 5044 7.1.2 rule 2).

use std::fmt;
use std::sync::{Arc, Weak};

use kbtp_proto::mpa::{Negotiated, PassiveStartup, PeerRequest};

use crate::api::{Event, Recv};
use crate::core::{ChannelShared, Core, Source};
use crate::device::Pd;
use crate::error::Error;
use crate::event_loop::{Token, new_token};
use crate::goodbye::Goodbye;
use crate::listener::ListenerState;
use crate::posting::{check_depths, check_domain};
use crate::stream::Stream;
use crate::stream_state::StreamState;
use crate::tcp::Link;

/// The request as the channel keeps it.
pub(crate) struct Pending {
    listener: Token,
    link: Link,
    startup: PassiveStartup,
}

impl Pending {
    pub(crate) fn ask(
        core: &mut Core,
        token: Token,
        listener: Token,
        link: Link,
        startup: PassiveStartup,
        request: PeerRequest,
    ) {
        let inner = Inner {
            channel: core.me.clone(),
            token,
            peer: link.peer.clone(),
            request,
        };
        core.sources.insert(
            token,
            Source::Request(Self {
                listener,
                link,
                startup,
            }),
        );
        core.ask(token, Event::ConnectRequest(ConnectRequest { inner: Arc::new(inner) }));
    }

    /// The owner polls again: the answer is no.
    pub(crate) fn reject_unanswered(core: &mut Core, token: Token) {
        if let Some(pending) = Self::take(core, token) {
            let peer = &pending.link.peer;
            core.log(
                log::Level::Warn,
                format!("the connect request of {peer} was neither accepted nor rejected: rejected"),
            );
            // No private data is never too long.
            let reply = pending.startup.reject(&[], 0, 0).unwrap_or_default();
            pending.refuse(core, token, &reply);
        }
    }

    fn take(core: &mut Core, token: Token) -> Option<Self> {
        match core.sources.remove(&token)? {
            Source::Request(pending) => Some(pending),
            other => {
                core.sources.insert(token, other);
                None
            }
        }
    }

    fn refuse(mut self, core: &mut Core, token: Token, reply: &[u8]) {
        ListenerState::forget(core, self.listener, token);
        self.link.queue(reply);
        Goodbye::start(core, token, self.link);
    }

    /// The stream that `answer` asks for, and its Reply; nothing has happened yet.
    fn agree(&self, core: &mut Core, pd: &Pd, answer: &Answer<'_>) -> Result<Agreed, Error> {
        let (ird, ord) = check_depths(answer.ird, answer.ord)?;
        check_domain(pd, &core.device)?;
        let id = new_token();
        let mut stream = Box::new(StreamState::new(core, id, pd, self.link.peer.clone(), ird, ord)?);
        let agreed = stream.post_recv(core, answer.receives).and_then(|()| {
            let (reply, negotiated) = self
                .startup
                .accept(answer.private_data, ird, ord)
                .map_err(|error| Error::misuse(error.0))?;
            let handle = stream
                .handle(core)
                .ok_or_else(|| Error::misuse("the channel is closed"))?;
            Ok((reply, negotiated, handle))
        });
        match agreed {
            Ok((reply, negotiated, handle)) => Ok(Agreed {
                id,
                stream,
                handle,
                reply,
                negotiated,
            }),
            Err(error) => {
                stream.discard(core);
                Err(error)
            }
        }
    }

    /// `core` is that of the stream, and need not be the listener's.
    fn accept(mut self, core: &mut Core, agreed: Agreed) -> Stream {
        let Agreed {
            id,
            mut stream,
            handle,
            reply,
            negotiated,
        } = agreed;
        self.link.queue(&reply);
        stream.open(core, self.link, negotiated, false, &[]);
        if !stream.has_ended() {
            core.sources.insert(id, Source::Stream(stream));
        }
        handle
    }
}

struct Agreed {
    id: Token,
    stream: Box<StreamState>,
    handle: Stream,
    reply: Vec<u8>,
    negotiated: Negotiated,
}

/// What `ConnectRequest::accept` was given.
struct Answer<'a> {
    private_data: &'a [u8],
    ird: u32,
    ord: u32,
    receives: &'a [Recv],
}

struct Inner {
    channel: Weak<ChannelShared>,
    token: Token,
    peer: String,
    request: PeerRequest,
}

/// A peer asks to connect: `kbtp.verbs.api.ConnectRequest`. A handle.
#[derive(Clone)]
pub struct ConnectRequest {
    inner: Arc<Inner>,
}

impl fmt::Debug for ConnectRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectRequest({})", self.inner.peer)
    }
}

impl ConnectRequest {
    /// The peer's.
    #[must_use]
    pub fn private_data(&self) -> &[u8] {
        &self.inner.request.private_data
    }

    /// `host:port` of the peer.
    #[must_use]
    pub fn remote_address(&self) -> &str {
        &self.inner.peer
    }

    /// What the peer can serve.
    #[must_use]
    pub fn peer_ird(&self) -> u32 {
        self.inner.request.peer_ird.into()
    }

    /// What the peer would like to use.
    #[must_use]
    pub fn peer_ord(&self) -> u32 {
        self.inner.request.peer_ord.into()
    }

    /// `receives` are there before the peer's first message can be. The stream may be posted to at once.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse`; unless it says that the request is answered or gone, it can still be answered.
    pub fn accept(&self, pd: &Pd, private_data: &[u8], ird: u32, ord: u32, receives: &[Recv]) -> Result<Stream, Error> {
        let answer = Answer {
            private_data,
            ird,
            ord,
            receives,
        };
        let token = self.inner.token;
        let home = self.inner.channel.upgrade().ok_or_else(|| self.gone())?;
        let taken = home.with(|core| Pending::take(core, token)).flatten();
        let pending = taken.ok_or_else(|| self.gone())?;
        let listener = pending.listener;
        let accepted = home
            .next_loop()
            .with(|core| match pending.agree(core, pd, &answer) {
                Ok(agreed) => Ok(pending.accept(core, agreed)),
                Err(error) => Err(Box::new((pending, error))),
            })
            .ok_or_else(|| self.gone())?;
        match accepted {
            Ok(stream) => {
                home.with(|core| ListenerState::forget(core, listener, token));
                Ok(stream)
            }
            Err(refused) => {
                let (pending, error) = *refused;
                home.with(|core| core.sources.insert(token, Source::Request(pending)));
                Err(error)
            }
        }
    }

    /// Reply with R=1, then close.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for too long private data, and as `accept`.
    pub fn reject(&self, private_data: &[u8]) -> Result<(), Error> {
        let token = self.inner.token;
        self.with(|core| {
            let pending = Pending::take(core, token).ok_or_else(|| self.gone())?;
            match pending.startup.reject(private_data, 0, 0) {
                Ok(reply) => {
                    pending.refuse(core, token, &reply);
                    Ok(())
                }
                Err(error) => {
                    core.sources.insert(token, Source::Request(pending));
                    Err(Error::misuse(error.0))
                }
            }
        })
    }

    pub(crate) fn reject_unanswered(&self) {
        if let Some(home) = self.inner.channel.upgrade() {
            home.with(|core| Pending::reject_unanswered(core, self.inner.token));
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Core) -> Result<R, Error>) -> Result<R, Error> {
        let channel = self.inner.channel.upgrade().ok_or_else(|| self.gone())?;
        channel.with(act).unwrap_or_else(|| Err(self.gone()))
    }

    fn gone(&self) -> Error {
        Error::misuse(format!(
            "the connect request of {} is answered or gone: answer once, before the next poll",
            self.inner.peer
        ))
    }
}
