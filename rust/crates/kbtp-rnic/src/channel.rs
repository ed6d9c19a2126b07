//! The event channel and completion channel of a native RNIC: `kbtp.verbs.api.Channel`.

use std::collections::VecDeque;
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kbtp_proto::mpa::ActiveStartup;
use kbtp_verbs::Parameters;

use crate::api::{Event, Recv};
use crate::connector::{Connecting, Connector};
use crate::core::{ChannelShared, Core, LONGEST_TIMER, LONGEST_WAIT, Source};
use crate::crew::Crew;
use crate::device::Pd;
use crate::error::{EndReason, Error, error_text};
use crate::event_loop::{ReadyBuffer, Token, new_token};
use crate::listener::ListenerState;
use crate::posting::{check_depths, check_domain, parameters};
use crate::stream::Stream;
use crate::stream_state::StreamState;
use crate::verbs_connector::VerbsConnector;
use crate::verbs_listener::VerbsListener;

/// One owner's streams and listeners, and everything that happens to them. A handle; the last one to go closes it.
#[derive(Clone)]
pub struct Channel {
    /// The only loop, which `poll` runs, or the first one of the crew.
    pub(crate) shared: Arc<ChannelShared>,
    pub(crate) crew: Option<Arc<Crew>>,
}

impl Channel {
    /// Listen on the first address of `host` ("": the system's wildcard); port 0 takes a free one.
    ///
    /// # Errors
    ///
    /// `Error::Io` as the system gives it.
    pub fn listen(&self, host: &str, port: u16) -> Result<Listener, Error> {
        let (token, address) = self.with(|core| match core.device.hardware {
            Some(_) => VerbsListener::open(core, host, port),
            None => ListenerState::open(core, host, port),
        })??;
        Ok(Listener {
            channel: Arc::downgrade(&self.shared),
            token,
            address,
        })
    }

    /// Start connecting; `Established`, `Rejected` or `StreamEnded` follows within `timeout`, whatever fails from here
    /// on.
    ///
    /// A name is looked up by the system's resolver, which blocks this thread and knows no time limit of ours: where
    /// that matters, give an address.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` for what could never work.
    #[allow(clippy::too_many_arguments, reason = "those of kbtp.verbs.api.Channel.connect")]
    pub fn connect(
        &self,
        host: &str,
        port: u16,
        pd: &Pd,
        private_data: &[u8],
        ird: u32,
        ord: u32,
        timeout: Duration,
        receives: &[Recv],
    ) -> Result<Stream, Error> {
        let (ird, ord) = check_depths(ird, ord)?;
        check_domain(pd, &self.shared.device)?;
        let start = self.active_start(pd, private_data, ird, ord)?;
        let remote_address = if host.contains(':') {
            format!("[{host}]:{port}")
        } else {
            format!("{host}:{port}")
        };
        let (token, stream) = self.with(|core| {
            let token = new_token();
            let mut stream = Box::new(StreamState::new(core, token, pd, remote_address.clone(), ird, ord)?);
            if let Err(error) = stream.post_recv(core, receives) {
                stream.discard(core);
                return Err(error);
            }
            let handle = stream.handle(core).ok_or_else(closed)?;
            core.sources.insert(token, Source::Stream(stream));
            Ok((token, handle))
        })??;
        // Not under the lock: this can take a while.
        let addresses = (host, port).to_socket_addrs().map(VecDeque::from_iter);
        self.with(|core| {
            core.with_stream(token, |stream, core| match addresses {
                Ok(addresses) => {
                    stream.connect_through(core, start.connector(token, addresses, timeout, remote_address));
                }
                Err(error) => {
                    let text = error_text(&error);
                    let why = text
                        .strip_prefix("failed to lookup address information: ")
                        .unwrap_or(&text);
                    let reason = format!("cannot look up {host}: {why}: check the name");
                    stream.fail_connecting(core, EndReason::lost(reason));
                }
            })
        })?;
        Ok(stream)
    }

    fn active_start(&self, pd: &Pd, private_data: &[u8], ird: u16, ord: u16) -> Result<ActiveStart, Error> {
        if let (Some(hardware), Some(pd)) = (&self.shared.device.hardware, &pd.hardware) {
            let parameters = parameters(private_data, (ird, ord), hardware);
            return Ok(ActiveStart::Verbs(Arc::clone(pd), parameters));
        }
        let startup = ActiveStartup::new(&self.shared.device.options.mpa, private_data, ird, ord);
        let startup = startup.map_err(|error| Error::misuse(error.0))?;
        Ok(ActiveStart::Iwarp(Box::new(startup)))
    }

    /// Do the I/O that is due and reap events; wait up to `timeout` (0: not at all) while there are none. With threads
    /// they do the I/O, and this only waits.
    ///
    /// The channel is not locked while this waits. A signal ends the wait.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` once the channel is closed.
    pub fn poll(&self, timeout: Duration) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        self.poll_into(timeout, &mut events)?;
        Ok(events)
    }

    /// As `poll`, with the allocation of `events`, which is emptied first.
    ///
    /// # Errors
    ///
    /// As `poll`.
    pub fn poll_into(&self, timeout: Duration, events: &mut Vec<Event>) -> Result<(), Error> {
        if let Some(crew) = &self.crew {
            return if crew.poll_into(timeout, events)? {
                Ok(())
            } else {
                Err(closed())
            };
        }
        let begin = Instant::now();
        let deadline = begin.checked_add(timeout).unwrap_or(begin + LONGEST_TIMER);
        let spin_until = begin + self.shared.device.spin;
        let poller = self.shared.poller().ok_or_else(closed)?;
        let begun = self.with(|core| {
            core.begin_poll();
            (!core.reap_at_once(events)).then(|| core.next_timeout())
        })?;
        let Some(mut due) = begun else { return Ok(()) };
        let (mut ready, mut now) = (ReadyBuffer::new(), begin);
        loop {
            let spins = now < spin_until;
            let wait = if spins {
                Duration::ZERO
            } else {
                let until_due = due.unwrap_or(LONGEST_WAIT).min(LONGEST_WAIT);
                deadline.saturating_duration_since(now).min(until_due)
            };
            poller.wait(&mut ready, wait)?;
            let next = self.with(|core| {
                let come = core.turn(&ready) || (spins && core.probe());
                if come || ready.interrupted() || core.now >= deadline {
                    core.reap(events);
                    return None;
                }
                Some((core.next_timeout(), core.now))
            })?;
            match next {
                None => return Ok(()),
                Some(next) => (due, now) = next,
            }
            if spins {
                std::thread::yield_now();
            }
        }
    }

    /// The epoll file descriptor: readable when `poll` has I/O to do.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` once the channel is closed.
    pub fn fd(&self) -> Result<RawFd, Error> {
        match &self.crew {
            Some(crew) => self.with(|_| crew.show()),
            None => self.with(|core| core.show()),
        }
    }

    /// How long until `poll` must be called even if `fd` stays quiet; None: no timer runs, or a thread sees to it.
    ///
    /// # Errors
    ///
    /// `Error::ApiMisuse` once the channel is closed.
    pub fn next_timeout(&self) -> Result<Option<Duration>, Error> {
        let next = self.with(Core::next_timeout)?;
        Ok(next.filter(|_| self.crew.is_none()))
    }

    /// Make a `poll` in another thread return now.
    pub fn wake(&self) {
        if let Some(crew) = &self.crew {
            crew.outbox().wake();
        } else if let Some(poller) = self.shared.poller() {
            poller.wake();
        }
    }

    /// Abort every stream, close every listener. Idempotent.
    pub fn close(&self) {
        match &self.crew {
            Some(crew) => crew.close(),
            None => self.shared.close(),
        }
    }

    fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> Result<R, Error> {
        self.shared.with(act).ok_or_else(closed)
    }
}

/// What a connection is started with.
enum ActiveStart {
    Iwarp(Box<ActiveStartup>),
    Verbs(Arc<kbtp_verbs::Pd>, Parameters),
}

impl ActiveStart {
    fn connector(
        self,
        token: Token,
        addresses: VecDeque<SocketAddr>,
        timeout: Duration,
        remote_address: String,
    ) -> Box<dyn Connecting + Send> {
        match self {
            Self::Iwarp(startup) => Box::new(Connector::new(token, *startup, addresses, timeout, remote_address)),
            Self::Verbs(pd, parameters) => Box::new(VerbsConnector::new(
                token,
                pd,
                parameters,
                addresses,
                timeout,
                remote_address,
            )),
        }
    }
}

fn closed() -> Error {
    Error::misuse("the channel is closed: open another one")
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({:p})", Arc::as_ptr(&self.shared))
    }
}

/// `kbtp.verbs.api.Listener`. A handle: dropping it closes nothing.
#[derive(Clone, Debug)]
pub struct Listener {
    channel: Weak<ChannelShared>,
    token: Token,
    address: SocketAddr,
}

impl Listener {
    /// Host and port really bound.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stop listening; connections whose request is not answered yet are dropped. Idempotent.
    pub fn close(&self) {
        if let Some(channel) = self.channel.upgrade() {
            channel.with(|core| ListenerState::close(core, self.token));
        }
    }
}
