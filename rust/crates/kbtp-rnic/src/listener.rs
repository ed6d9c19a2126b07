//! The passive side of start-up: accepted connections until their MPA Request is answered (RFC 5044 7.1).

use std::collections::HashSet;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::os::fd::AsFd;

use kbtp_proto::limits;
use kbtp_proto::mpa::PassiveStartup;
use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::core::{Core, Source};
use crate::error::error_text;
use crate::event_loop::{TimerId, Token, Watch, new_token};
use crate::goodbye::Goodbye;
use crate::request::Pending;
use crate::tcp::{Link, set_stream_options, unpace_within_machine};

/// One octet more than the longest Request shows that something came after it.
const REQUEST_READ_BYTES: usize = limits::MPA_FRAME_BYTES + limits::MPA_PRIVATE_DATA_MAX_BYTES + 1;

/// An accepted connection whose MPA Request is not whole yet.
///
/// It simply vanishes when its peer goes, says something else, or takes too long (RFC 5044 7.1.2 rule 10).
pub(crate) struct Incoming {
    listener: Token,
    link: Link,
    startup: PassiveStartup,
    said_something: bool,
    timer: Option<TimerId>,
}

impl Incoming {
    fn start(core: &mut Core, listener: Token, link: Link) -> Token {
        let token = new_token();
        let startup = PassiveStartup::new(&core.options().mpa);
        let timer = Some(core.start_timer(core.options().mpa_request_timeout, token));
        let mut incoming = Self {
            listener,
            link,
            startup,
            said_something: false,
            timer,
        };
        core.watch(&mut incoming.link, token, true, false);
        core.sources.insert(token, Source::Incoming(incoming));
        token
    }

    pub(crate) fn on_ready(mut self, core: &mut Core, token: Token) {
        let mut octets = [0; REQUEST_READ_BYTES];
        match self.link.receive(&mut octets) {
            Err(error) => self.drop_because(core, token, log::Level::Warn, &error_text(&error)),
            Ok(Some(0)) => {
                // One that closes without an octet, such as a probe of the port, did nothing worth a line.
                let level = if self.said_something {
                    log::Level::Warn
                } else {
                    log::Level::Debug
                };
                self.drop_because(core, token, level, "closed before its MPA Request was whole");
            }
            Ok(Some(received)) => {
                self.said_something = true;
                self.receive_request(core, token, octets.get(..received).unwrap_or_default());
            }
            Ok(None) => {
                core.sources.insert(token, Source::Incoming(self));
            }
        }
    }

    pub(crate) fn timed_out(self, core: &mut Core, token: Token) {
        let limit_s = core.options().mpa_request_timeout.as_secs_f64();
        self.drop_because(
            core,
            token,
            log::Level::Warn,
            &format!("no MPA Request within {limit_s:?} s"),
        );
    }

    fn receive_request(mut self, core: &mut Core, token: Token, octets: &[u8]) {
        match self.startup.receive_data(octets) {
            Ok(None) => {
                core.sources.insert(token, Source::Incoming(self));
            }
            Ok(Some(request)) => {
                core.timers.cancel(&mut self.timer);
                self.link.unwatch(core.poller());
                Pending::ask(core, token, self.listener, self.link, self.startup, request);
            }
            Err(error) => {
                // RFC 5044 7.1.2: close TCP, neither Reply nor Terminate
                core.log(log::Level::Warn, format!("{}: no stream: {error}", self.link.peer));
                core.timers.cancel(&mut self.timer);
                ListenerState::forget(core, self.listener, token);
                Goodbye::start(core, token, self.link);
            }
        }
    }

    fn drop_because(mut self, core: &mut Core, token: Token, level: log::Level, why: &str) {
        core.log(level, format!("{}: no stream: {why}", self.link.peer));
        core.timers.cancel(&mut self.timer);
        ListenerState::forget(core, self.listener, token);
    }
}

/// A listening socket.
pub(crate) struct ListenerState {
    sock: Socket,
    watch: Watch,
    address: SocketAddr,
    /// Connections and requests that are not answered yet.
    pending: HashSet<Token>,
    /// Runs after an accept that failed.
    pause: Option<TimerId>,
}

impl ListenerState {
    /// On the first address of `host` ("": the system's wildcard); port 0 takes a free one.
    pub(crate) fn open(core: &mut Core, host: &str, port: u16) -> io::Result<(Token, SocketAddr)> {
        let address = if host.is_empty() {
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))
        } else {
            (host, port)
                .to_socket_addrs()?
                .next()
                .ok_or(io::ErrorKind::AddrNotAvailable)?
        };
        let sock = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
        sock.set_nonblocking(true)?;
        sock.set_reuse_address(true)?;
        sock.bind(&SockAddr::from(address))?;
        sock.listen(limits::RNIC_LISTEN_BACKLOG)?;
        let address = sock.local_addr()?.as_socket().unwrap_or(address);
        let token = new_token();
        let listener = Self {
            sock,
            watch: Watch::default(),
            address,
            pending: HashSet::new(),
            pause: None,
        };
        listener.put_back(core, token);
        Ok((token, address))
    }

    pub(crate) fn on_ready(mut self, core: &mut Core, token: Token) {
        for _ in 0..limits::RNIC_ACCEPT_BATCH {
            if self.pending.len() >= limits::RNIC_PENDING_REQUESTS_MAX {
                break;
            }
            match self.sock.accept() {
                Ok((sock, address)) => {
                    // It fails for one that was reset before it was accepted.
                    if set_stream_options(&sock, core.options().tcp_user_timeout).is_ok() {
                        unpace_within_machine(&sock);
                        let peer = address
                            .as_socket()
                            .map_or_else(String::new, |address| address.to_string());
                        self.pending.insert(Incoming::start(core, token, Link::new(sock, peer)));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => {
                    self.start_pause(core, token, &error);
                    break;
                }
            }
        }
        self.put_back(core, token);
    }

    pub(crate) fn resume(mut self, core: &mut Core, token: Token) {
        self.pause = None;
        self.put_back(core, token);
    }

    /// Stop listening; connections whose request is not answered yet are dropped.
    pub(crate) fn close(core: &mut Core, token: Token) {
        let mut listener = match core.sources.remove(&token) {
            Some(Source::Listener(listener)) => listener,
            Some(Source::VerbsListener(listener)) => return listener.close(core),
            _ => return,
        };
        core.timers.cancel(&mut listener.pause);
        for pending in listener.pending {
            if let Some(Source::Incoming(mut incoming)) = core.sources.remove(&pending) {
                core.timers.cancel(&mut incoming.timer);
            }
        }
    }

    /// `pending` is answered or gone, and makes room for another.
    pub(crate) fn forget(core: &mut Core, token: Token, pending: Token) {
        match core.sources.remove(&token) {
            Some(Source::Listener(mut listener)) => {
                listener.pending.remove(&pending);
                listener.put_back(core, token);
            }
            Some(other) => {
                core.sources.insert(token, other);
            }
            None => {}
        }
    }

    /// Out of file descriptors or the like: trying again at once would spin.
    fn start_pause(&mut self, core: &mut Core, token: Token, error: &io::Error) {
        let (address, error) = (self.address, error_text(error));
        core.log(
            log::Level::Warn,
            format!("cannot accept on {address}: {error}; trying again soon"),
        );
        self.pause = Some(core.start_timer(core.options().accept_pause, token));
    }

    fn put_back(mut self, core: &mut Core, token: Token) {
        let read = self.pending.len() < limits::RNIC_PENDING_REQUESTS_MAX && self.pause.is_none();
        if let Err(error) = self.watch.set(core.poller(), self.sock.as_fd(), token, read, false) {
            core.log(
                log::Level::Error,
                format!("{}: the system does not watch the socket: {error}", self.address),
            );
        }
        core.sources.insert(token, Source::Listener(self));
    }
}
