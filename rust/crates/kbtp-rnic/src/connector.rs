//! The active side of start-up: one TCP address after the other, then the MPA Request and its Reply.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use kbtp_proto::memory::Span;
use kbtp_proto::mpa::{ActiveStartup, Answer, MpaRejected, Negotiated};

use crate::core::Core;
use crate::error::{EndReason, error_text};
use crate::event_loop::{TimerId, Token};
use crate::tcp::{Link, begin_connect};
use crate::verbs_operation::VerbsOperation;

/// A connection that start-up has made.
pub(crate) enum Transport {
    /// `surplus` belongs to the stream.
    Iwarp {
        link: Link,
        negotiated: Negotiated,
        surplus: Vec<u8>,
    },
    /// So many of the receives that were posted before are posted there.
    Verbs {
        operation: Box<VerbsOperation>,
        ird: u16,
        ord: u16,
        private_data: Vec<u8>,
        receives_posted: usize,
    },
}

/// What came of one step.
pub(crate) enum Step {
    /// Not done yet.
    Continue,
    /// Start-up is done.
    Open(Transport),
    /// The peer said no, and MPA is left on `link`.
    Rejected { link: Option<Link>, private_data: Vec<u8> },
    /// It will not be.
    Failed(EndReason),
}

/// Works for one stream until that is open, rejected or failed.
pub(crate) trait Connecting {
    fn start(&mut self, core: &mut Core) -> Step;

    /// `receives` were posted to the stream before.
    fn on_ready(&mut self, core: &mut Core, readable: bool, receives: &[(u64, Span)]) -> Step;

    fn timed_out(&mut self, core: &mut Core) -> Step;

    /// Nobody waits for it any more.
    fn close_now(&mut self, core: &mut Core);
}

/// One address that is being tried.
struct Attempt {
    link: Link,
    connected: bool,
}

/// Works for one stream until that is open, rejected or failed, within `timeout`.
pub(crate) struct Connector {
    token: Token,
    startup: ActiveStartup,
    untried: VecDeque<SocketAddr>,
    timeout: Duration,
    deadline: Instant,
    timer: Option<TimerId>,
    attempt: Option<Attempt>,
    refusals: Vec<String>,
    /// What the caller asked to connect to.
    remote_address: String,
}

impl Connector {
    pub(crate) fn new(
        token: Token,
        startup: ActiveStartup,
        addresses: VecDeque<SocketAddr>,
        timeout: Duration,
        remote_address: String,
    ) -> Self {
        let now = Instant::now();
        Self {
            token,
            startup,
            untried: addresses,
            timeout,
            deadline: now.checked_add(timeout).unwrap_or(now + crate::core::LONGEST_TIMER),
            timer: None,
            attempt: None,
            refusals: Vec::new(),
            remote_address,
        }
    }

    fn try_next_address(&mut self, core: &mut Core) -> Step {
        core.timers.cancel(&mut self.timer);
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        while let Some(address) = self.untried.front().copied() {
            // One that does not answer must leave time for the others.
            let share = remaining / u32::try_from(self.untried.len()).unwrap_or(u32::MAX);
            self.untried.pop_front();
            match begin_connect(address, core.options().tcp_user_timeout) {
                Ok(sock) => {
                    let mut link = Link::new(sock, address.to_string());
                    self.timer = Some(core.start_timer(share, self.token));
                    core.watch(&mut link, self.token, false, true);
                    self.attempt = Some(Attempt { link, connected: false });
                    return Step::Continue;
                }
                Err(error) => self.refusals.push(format!("{address}: {}", error_text(&error))),
            }
        }
        Step::Failed(EndReason::lost(format!(
            "cannot connect to {}: check the address, and that a target listens there",
            self.refusals.join("; ")
        )))
    }

    fn send_request(&mut self, core: &mut Core, mut attempt: Attempt) {
        attempt.connected = true;
        core.timers.cancel(&mut self.timer);
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        self.timer = Some(core.start_timer(remaining, self.token));
        attempt.link.queue(self.startup.request());
        core.watch(&mut attempt.link, self.token, true, true);
        self.attempt = Some(attempt);
    }

    fn receive_reply(&mut self, core: &mut Core, attempt: Attempt, received: usize) -> Step {
        let answer = match self
            .startup
            .receive_data(core.staging.get(..received).unwrap_or_default())
        {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.attempt = Some(attempt);
                return Step::Continue;
            }
            // RFC 5044 7.1.2: close TCP, without a further word
            Err(error) => return Step::Failed(EndReason::PeerIncompatible(format!("{}: {error}", attempt.link.peer))),
        };
        core.timers.cancel(&mut self.timer);
        let mut link = attempt.link;
        link.unwatch(core.poller());
        match answer {
            Answer::Rejected(MpaRejected { private_data, .. }) => Step::Rejected {
                link: Some(link),
                private_data,
            },
            Answer::Negotiated(negotiated) => Step::Open(Transport::Iwarp {
                link,
                negotiated,
                surplus: self.startup.surplus().to_vec(),
            }),
        }
    }
}

impl Connecting for Connector {
    fn start(&mut self, core: &mut Core) -> Step {
        self.try_next_address(core)
    }

    fn close_now(&mut self, core: &mut Core) {
        core.timers.cancel(&mut self.timer);
    }

    fn on_ready(&mut self, core: &mut Core, readable: bool, _receives: &[(u64, Span)]) -> Step {
        let Some(mut attempt) = self.attempt.take() else {
            return Step::Continue;
        };
        if !attempt.connected {
            return match attempt.link.connected() {
                Ok(()) => {
                    self.send_request(core, attempt);
                    Step::Continue
                }
                Err(error) => {
                    self.refusals
                        .push(format!("{}: {}", attempt.link.peer, error_text(&error)));
                    drop(attempt);
                    self.try_next_address(core)
                }
            };
        }
        let received = attempt.link.send_queued().and_then(|()| {
            let write = attempt.link.has_unsent();
            core.watch(&mut attempt.link, self.token, true, write);
            if readable {
                attempt.link.receive(&mut core.staging)
            } else {
                Ok(None)
            }
        });
        match received {
            Ok(None) => {
                self.attempt = Some(attempt);
                Step::Continue
            }
            Ok(Some(0)) => Step::Failed(EndReason::lost(format!(
                "{} closed the connection before its MPA Reply: check that it is an iWARP peer and speaks MPA revision {}",
                attempt.link.peer,
                core.options().mpa.revision
            ))),
            Ok(Some(received)) => self.receive_reply(core, attempt, received),
            Err(error) => Step::Failed(EndReason::lost(format!(
                "{} ended the connection before its MPA Reply: {}",
                attempt.link.peer,
                error_text(&error)
            ))),
        }
    }

    fn timed_out(&mut self, core: &mut Core) -> Step {
        let connected = self.attempt.as_ref().is_some_and(|attempt| attempt.connected);
        if !connected
            && !self.untried.is_empty()
            && let Some(attempt) = self.attempt.take()
        {
            self.refusals.push(format!("{}: no answer", attempt.link.peer));
            drop(attempt);
            return self.try_next_address(core);
        }
        let phase = if connected { "MPA Reply" } else { "TCP connection" };
        let (peer, timeout_s) = (&self.remote_address, self.timeout.as_secs_f64());
        Step::Failed(EndReason::DeadlineExceeded(format!(
            "no {phase} from {peer} within {timeout_s:?} s"
        )))
    }
}
