//! Non-blocking TCP sockets as MPA wants them (RFC 5044 5 and 7).

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use kbtp_proto::limits;
use socket2::{Domain, Protocol, SockAddr, Socket, TcpKeepalive, Type};

use crate::event_loop::{Poller, Token, Watch};

/// No delay, since an FPDU is written whole; and a peer that is lost without a FIN is noticed.
pub(crate) fn set_stream_options(sock: &Socket, user_timeout: Duration) -> io::Result<()> {
    sock.set_nonblocking(true)?;
    sock.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(limits::TCP_KEEPALIVE_IDLE_S.into()))
        .with_interval(Duration::from_secs(limits::TCP_KEEPALIVE_INTERVAL_S.into()))
        .with_retries(limits::TCP_KEEPALIVE_PROBES);
    sock.set_tcp_keepalive(&keepalive)?;
    sock.set_tcp_user_timeout(Some(user_timeout.max(Duration::from_millis(1))))
}

/// Within one machine there is no path whose rate would have to be found out. BBR, where it is the system's choice, spaces
/// segments by a timer all the same, and halves what goes through; Reno is always there and allowed.
pub(crate) fn unpace_within_machine(sock: &Socket) {
    let address = |end: io::Result<SockAddr>| end.ok().and_then(|end| end.as_socket()).map(|end| end.ip());
    let local = address(sock.local_addr());
    if local.is_some() && local == address(sock.peer_addr()) {
        // Without it the connection works as well.
        let _ = sock.set_tcp_congestion(b"reno");
    }
}

/// A socket that begins to connect to `address`.
pub(crate) fn begin_connect(address: SocketAddr, user_timeout: Duration) -> io::Result<Socket> {
    let sock = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    set_stream_options(&sock, user_timeout)?;
    match sock.connect(&SockAddr::from(address)) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => Err(error),
        _ => Ok(sock),
    }
}

/// A connected socket and the octets that wait to go out on it.
#[derive(Debug)]
pub(crate) struct Link {
    sock: Socket,
    pub(crate) peer: String,
    /// Octets sent and received so far: a measure of progress.
    pub(crate) moved_bytes: u64,
    pub(crate) send_finished: bool,
    pub(crate) receive_finished: bool,
    unsent: Vec<u8>,
    /// How many of `unsent` are out.
    unsent_from: usize,
    /// Where in `unsent` TCP segments are to end.
    segment_ends: VecDeque<usize>,
    watch: Watch,
}

impl Link {
    pub(crate) fn new(sock: Socket, peer: String) -> Self {
        Self {
            sock,
            peer,
            moved_bytes: 0,
            send_finished: false,
            receive_finished: false,
            unsent: Vec::new(),
            unsent_from: 0,
            segment_ends: VecDeque::new(),
            watch: Watch::default(),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.sock.as_fd()
    }

    pub(crate) fn watch(&mut self, poller: &Poller, token: Token, read: bool, write: bool) -> io::Result<()> {
        self.watch.set(poller, self.sock.as_fd(), token, read, write)
    }

    pub(crate) fn unwatch(&mut self, poller: &Poller) {
        // The socket is registered, so this cannot fail; closing it would do the same.
        let _ = self.watch.clear(poller, self.sock.as_fd());
    }

    /// How an attempt to connect ended.
    pub(crate) fn connected(&self) -> io::Result<()> {
        match self.sock.take_error()? {
            None => {
                unpace_within_machine(&self.sock);
                Ok(())
            }
            Some(error) => Err(error),
        }
    }

    pub(crate) fn has_unsent(&self) -> bool {
        self.unsent_from < self.unsent.len()
    }

    pub(crate) fn queue(&mut self, octets: &[u8]) {
        self.queue_segment(|unsent| unsent.extend_from_slice(octets));
    }

    /// What `append` adds goes out behind all else, and a TCP segment ends behind it.
    pub(crate) fn queue_segment(&mut self, append: impl FnOnce(&mut Vec<u8>)) {
        append(&mut self.unsent);
        self.segment_ends.push_back(self.unsent.len());
    }

    pub(crate) fn drop_unsent(&mut self) {
        self.unsent.clear();
        self.unsent_from = 0;
        self.segment_ends.clear();
    }

    /// Send until all is out or the socket takes no more.
    pub(crate) fn send_queued(&mut self) -> io::Result<()> {
        while let Some(end) = self.segment_ends.front().copied() {
            let rest = self.unsent.get(self.unsent_from..end).unwrap_or_default();
            if rest.is_empty() {
                self.segment_ends.pop_front();
                continue;
            }
            match self.sock.send_with_flags(rest, libc::MSG_NOSIGNAL | libc::MSG_EOR) {
                Ok(sent) => {
                    self.unsent_from += sent;
                    self.moved_bytes += sent as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.drop_unsent();
        Ok(())
    }

    /// Octets read into `buffer`, 0 at the peer's FIN, None if there are none now.
    pub(crate) fn receive(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let result = (&self.sock).read(buffer);
        self.received(result)
    }

    /// Take note of what a read from the socket gave.
    pub(crate) fn received(&mut self, result: io::Result<usize>) -> io::Result<Option<usize>> {
        match result {
            Ok(received) => {
                self.moved_bytes += received as u64;
                self.receive_finished |= received == 0;
                Ok(Some(received))
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The effective maximum segment size now; it changes with the path (RFC 5044 4.5).
    pub(crate) fn emss_bytes(&self) -> io::Result<u32> {
        self.sock.tcp_mss()
    }

    /// Send a FIN.
    pub(crate) fn finish_sending(&mut self) -> io::Result<()> {
        self.send_finished = true;
        self.sock.shutdown(Shutdown::Write)
    }

    /// Close with a RST, so that the peer cannot take it for an orderly end.
    pub(crate) fn reset(self) {
        // If it fails the connection is broken already.
        let _ = self.sock.set_linger(Some(Duration::ZERO));
    }
}
