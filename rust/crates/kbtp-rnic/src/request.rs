//! A connect request: an MPA Request that waits for the ULP's answer (RFC 5044 7.1.2 rule 2).

use std::fmt;
use std::io;
use std::sync::{Arc, Weak};

use kbtp_proto::mpa::{PassiveStartup, PeerRequest};
use kbtp_verbs::{Endpoint, Parameters};

use crate::api::{Event, Recv};
use crate::connector::Transport;
use crate::core::{ChannelShared, Core, Source};
use crate::device::Pd;
use crate::error::Error;
use crate::event_loop::{Token, new_token};
use crate::goodbye::Goodbye;
use crate::listener::ListenerState;
use crate::posting::{check_depths, check_domain, parameters};
use crate::stream::Stream;
use crate::stream_state::StreamState;
use crate::tcp::Link;
use crate::verbs_operation::VerbsOperation;

/// The peer that waits for an answer.
enum Peer {
    Iwarp { link: Link, startup: PassiveStartup },
    Verbs { endpoint: Endpoint, name: String },
}

impl Peer {
    fn name(&self) -> &str {
        match self {
            Self::Iwarp { link, .. } => &link.peer,
            Self::Verbs { name, .. } => name,
        }
    }
}

/// The request as the channel keeps it.
pub(crate) struct Pending {
    listener: Token,
    peer: Peer,
    /// What it can serve, and what it would like to use.
    peer_depths: (u16, u16),
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
        let pending = Self {
            listener,
            peer: Peer::Iwarp { link, startup },
            peer_depths: (request.peer_ird, request.peer_ord),
        };
        pending.wait(core, token, request.private_data);
    }

    /// As `ask`, of a request that the connection manager has brought.
    pub(crate) fn ask_verbs(core: &mut Core, listener: Token, endpoint: Endpoint, parameters: Parameters) {
        let address = endpoint.remote_address();
        let name = address.map_or_else(|| "an unknown peer".into(), |address| address.to_string());
        let pending = Self {
            listener,
            peer: Peer::Verbs { endpoint, name },
            peer_depths: (parameters.initiator_depth.into(), parameters.responder_resources.into()),
        };
        pending.wait(core, new_token(), parameters.private_data);
    }

    fn wait(self, core: &mut Core, token: Token, private_data: Vec<u8>) {
        let inner = Inner {
            channel: core.me.clone(),
            token,
            peer: self.peer.name().to_owned(),
            private_data,
            peer_depths: self.peer_depths,
        };
        core.sources.insert(token, Source::Request(self));
        core.ask(token, Event::ConnectRequest(ConnectRequest { inner: Arc::new(inner) }));
    }

    /// The owner polls again: the answer is no.
    pub(crate) fn reject_unanswered(core: &mut Core, token: Token) {
        if let Some(pending) = Self::take(core, token) {
            let peer = pending.peer.name();
            core.log(
                log::Level::Warn,
                format!("the connect request of {peer} was neither accepted nor rejected: rejected"),
            );
            // No private data is never too long.
            let _ = pending.refuse(core, token, &[]);
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

    /// Back with why, if the answer cannot be given.
    fn refuse(mut self, core: &mut Core, token: Token, private_data: &[u8]) -> Result<(), Box<(Self, Error)>> {
        let refused = match &mut self.peer {
            Peer::Iwarp { startup, .. } => startup
                .reject(private_data, 0, 0)
                .map_err(|error| Error::misuse(error.0)),
            Peer::Verbs { endpoint, .. } => endpoint.reject(private_data).map(|()| Vec::new()).map_err(Error::from),
        };
        match refused {
            Err(error) => Err(Box::new((self, error))),
            Ok(reply) => {
                ListenerState::forget(core, self.listener, token);
                if let Peer::Iwarp { mut link, .. } = self.peer {
                    link.queue(&reply);
                    Goodbye::start(core, token, link);
                }
                Ok(())
            }
        }
    }

    /// Make the stream that `answer` asks for, on `core`, which need not be the listener's. Back with why that cannot be, if
    /// there may be another answer.
    fn accept(self, core: &mut Core, pd: &Pd, answer: &Answer<'_>) -> Result<Stream, Refused> {
        let (mut stream, handle) = match new_stream(core, pd, self.peer.name(), answer) {
            Ok(made) => made,
            Err(error) => return Err(Box::new((Some(self), error))),
        };
        let transport = match self.agree(core, &stream, pd, answer) {
            Ok(transport) => transport,
            Err(refused) => {
                stream.discard(core);
                return Err(refused);
            }
        };
        let token = stream.token();
        stream.open(core, transport, false);
        if !stream.has_ended() {
            core.sources.insert(token, Source::Stream(stream));
        }
        Ok(handle)
    }

    fn agree(self, core: &Core, stream: &StreamState, pd: &Pd, answer: &Answer<'_>) -> Result<Transport, Refused> {
        let (ird, ord) = stream.depths();
        let Self {
            listener,
            peer,
            peer_depths,
        } = self;
        match peer {
            Peer::Iwarp { mut link, startup } => match startup.accept(answer.private_data, ird, ord) {
                Ok((reply, negotiated)) => {
                    link.queue(&reply);
                    Ok(Transport::Iwarp {
                        link,
                        negotiated,
                        surplus: Vec::new(),
                    })
                }
                Err(error) => {
                    let pending = Self {
                        listener,
                        peer: Peer::Iwarp { link, startup },
                        peer_depths,
                    };
                    Err(Box::new((Some(pending), Error::misuse(error.0))))
                }
            },
            Peer::Verbs { endpoint, name } => {
                let (peer_ird, peer_ord) = peer_depths;
                let depths = (ird.min(peer_ord), ord.min(peer_ird));
                accept_verbs(core, endpoint, stream, pd, answer.private_data, depths).map_err(|error| {
                    let why = format!("{name} cannot be accepted: {error}");
                    Box::new((None, Error::Io(io::Error::other(why))))
                })
            }
        }
    }
}

/// Why a request was not accepted; and the request, if there may be another answer.
type Refused = Box<(Option<Pending>, Error)>;

/// A stream to `peer` with the receives of `answer`.
fn new_stream(core: &mut Core, pd: &Pd, peer: &str, answer: &Answer<'_>) -> Result<(Box<StreamState>, Stream), Error> {
    let (ird, ord) = check_depths(answer.ird, answer.ord)?;
    check_domain(pd, &core.device)?;
    let mut stream = Box::new(StreamState::new(core, new_token(), pd, peer.to_owned(), ird, ord)?);
    let posted = stream.post_recv(core, answer.receives);
    let handle = posted.and_then(|()| {
        let handle = stream.handle(core);
        handle.ok_or_else(|| Error::misuse("the channel is closed"))
    });
    match handle {
        Ok(handle) => Ok((stream, handle)),
        Err(error) => {
            stream.discard(core);
            Err(error)
        }
    }
}

/// The receives of `stream` are posted before the peer can know that it was accepted.
fn accept_verbs(
    core: &Core,
    endpoint: Endpoint,
    stream: &StreamState,
    pd: &Pd,
    private_data: &[u8],
    depths: (u16, u16),
) -> io::Result<Transport> {
    let (Some(hardware), Some(pd)) = (&core.device.hardware, &pd.hardware) else {
        return Err(io::ErrorKind::Unsupported.into());
    };
    if endpoint.context() != Some(hardware.context) {
        let other = endpoint.context().map_or_else(String::new, |context| context.name());
        let name = &hardware.name;
        return Err(io::Error::other(format!(
            "it comes through {other}, and {name} is open"
        )));
    }
    let mut operation = Box::new(VerbsOperation::new(endpoint, pd, hardware)?);
    for (wr_id, span) in &stream.early_receives {
        // Refused only by a queue pair that has failed, which this one has not.
        let _ = operation.post_receive(*wr_id, *span);
    }
    operation.post_receives(&core.device)?;
    let agreed = parameters(private_data, depths, hardware);
    operation.endpoint().accept(&agreed)?;
    Ok(Transport::Verbs {
        operation,
        ird: agreed.responder_resources.into(),
        ord: agreed.initiator_depth.into(),
        private_data: Vec::new(),
        receives_posted: stream.early_receives.len(),
    })
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
    private_data: Vec<u8>,
    peer_depths: (u16, u16),
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
        &self.inner.private_data
    }

    /// `host:port` of the peer.
    #[must_use]
    pub fn remote_address(&self) -> &str {
        &self.inner.peer
    }

    /// What the peer can serve.
    #[must_use]
    pub fn peer_ird(&self) -> u32 {
        self.inner.peer_depths.0.into()
    }

    /// What the peer would like to use.
    #[must_use]
    pub fn peer_ord(&self) -> u32 {
        self.inner.peer_depths.1.into()
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
            .with(|core| pending.accept(core, pd, &answer))
            .ok_or_else(|| self.gone())?;
        match accepted {
            Ok(stream) => {
                home.with(|core| ListenerState::forget(core, listener, token));
                Ok(stream)
            }
            Err(refused) => {
                let (pending, error) = *refused;
                home.with(|core| match pending {
                    Some(pending) => {
                        core.sources.insert(token, Source::Request(pending));
                    }
                    None => ListenerState::forget(core, listener, token),
                });
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
            pending.refuse(core, token, private_data).map_err(|refused| {
                let (pending, error) = *refused;
                core.sources.insert(token, Source::Request(pending));
                error
            })
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
