//! The end of a connection that still has something to say.
//!
//! A last Terminate or rejecting Reply reaches the peer only if the connection ends with a FIN: closing a socket with
//! unread input sends a RST, which can overtake it. So: what is queued leaves, FIN, read until the peer's FIN or a
//! time-out, close (RFC 5040 6.2.1).

use std::io;

use crate::core::{Core, Source};
use crate::event_loop::{TimerId, Token};
use crate::tcp::Link;

const LAST_READS: usize = 16;

/// Owns the connection from here on; nobody waits for it.
pub(crate) struct Goodbye {
    link: Link,
    timer: Option<TimerId>,
}

impl Goodbye {
    pub(crate) fn start(core: &mut Core, token: Token, link: Link) {
        let timer = Some(core.start_timer(core.options().goodbye, token));
        Self { link, timer }.proceed(core, token);
    }

    pub(crate) fn on_ready(mut self, core: &mut Core, token: Token, readable: bool) {
        if readable && self.link.receive(&mut core.staging).is_err() {
            self.close_now(core);
            return;
        }
        self.proceed(core, token);
    }

    /// Time is up, or the connection is broken, or the channel closes: what can be read is, to avoid a RST.
    pub(crate) fn close_now(mut self, core: &mut Core) {
        core.timers.cancel(&mut self.timer);
        for _ in 0..LAST_READS {
            if !matches!(self.link.receive(&mut core.staging), Ok(Some(1..))) {
                break;
            }
        }
    }

    fn proceed(mut self, core: &mut Core, token: Token) {
        if self.send_last().is_err() || (self.link.send_finished && self.link.receive_finished) {
            self.close_now(core);
            return;
        }
        let (read, write) = (!self.link.receive_finished, !self.link.send_finished);
        core.watch(&mut self.link, token, read, write);
        core.sources.insert(token, Source::Goodbye(self));
    }

    fn send_last(&mut self) -> io::Result<()> {
        self.link.send_queued()?;
        if !self.link.has_unsent() && !self.link.send_finished {
            self.link.finish_sending()?;
        }
        Ok(())
    }
}
