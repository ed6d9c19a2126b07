//! The active side of start-up over rdma-core: one address after the other, to device, route and connection.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kbtp_proto::memory::Span;
use kbtp_verbs::{CmEvent, Device, Endpoint, Parameters, Pd, refusal};

use crate::connector::{Connecting, Step, Transport};
use crate::core::{Core, LONGEST_TIMER};
use crate::error::{EndReason, error_text};
use crate::event_loop::{TimerId, Token, Watch, of_manager};
use crate::verbs_operation::VerbsOperation;

/// An address or a route that the system does not find by then.
const RESOLVE_MS: i32 = 2000;

/// One address that is being tried.
struct Attempt {
    endpoint: Option<Endpoint>,
    /// From the route on, with the endpoint in it.
    operation: Option<Box<VerbsOperation>>,
    watch: Watch,
    peer: SocketAddr,
    receives_posted: usize,
}

/// Works for one stream until that is open, rejected or failed, within `timeout`.
pub(crate) struct VerbsConnector {
    token: Token,
    pd: Arc<Pd>,
    parameters: Parameters,
    untried: VecDeque<SocketAddr>,
    timeout: Duration,
    deadline: Instant,
    timer: Option<TimerId>,
    attempt: Option<Attempt>,
    refusals: Vec<String>,
    /// What the caller asked to connect to.
    remote_address: String,
}

impl VerbsConnector {
    pub(crate) fn new(
        token: Token,
        pd: Arc<Pd>,
        parameters: Parameters,
        addresses: VecDeque<SocketAddr>,
        timeout: Duration,
        remote_address: String,
    ) -> Self {
        let now = Instant::now();
        Self {
            token,
            pd,
            parameters,
            untried: addresses,
            timeout,
            deadline: now.checked_add(timeout).unwrap_or(now + LONGEST_TIMER),
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
            match self.begin(core, address) {
                Ok(attempt) => {
                    self.timer = Some(core.start_timer(share, self.token));
                    self.attempt = Some(attempt);
                    return Step::Continue;
                }
                Err(error) => self.refusals.push(format!("{address}: {}", error_text(&error))),
            }
        }
        Step::Failed(EndReason::lost(format!(
            "cannot connect to {}: check the address, and that a target listens there on an RDMA device",
            self.refusals.join("; ")
        )))
    }

    fn begin(&self, core: &mut Core, peer: SocketAddr) -> io::Result<Attempt> {
        let hardware = core.device.hardware.as_ref().ok_or(io::ErrorKind::Unsupported)?;
        let mut endpoint = Endpoint::new(hardware)?;
        let mut watch = Watch::default();
        watch.set(core.poller(), endpoint.fd(), of_manager(self.token), true, false)?;
        endpoint.resolve_address(peer, RESOLVE_MS)?;
        Ok(Attempt {
            endpoint: Some(endpoint),
            operation: None,
            watch,
            peer,
            receives_posted: 0,
        })
    }

    /// This attempt is over; the next address may do.
    fn refused(&mut self, core: &mut Core, peer: SocketAddr, why: &str) -> Step {
        self.refusals.push(format!("{peer}: {why}"));
        self.try_next_address(core)
    }

    fn take(&mut self, core: &mut Core, mut attempt: Attempt, event: CmEvent, receives: &[(u64, Span)]) -> Step {
        let peer = attempt.peer;
        let done = match event {
            CmEvent::AddressResolved => self.address_resolved(core, &mut attempt),
            CmEvent::RouteResolved => self.route_resolved(core, &mut attempt, receives),
            CmEvent::Established(parameters) => {
                core.timers.cancel(&mut self.timer);
                return self.established(attempt, parameters);
            }
            CmEvent::Rejected(status, parameters) => {
                return match refusal(status, &parameters.private_data) {
                    None => {
                        core.timers.cancel(&mut self.timer);
                        Step::Rejected {
                            link: None,
                            private_data: parameters.private_data,
                        }
                    }
                    Some(why) => self.refused(core, peer, &why),
                };
            }
            CmEvent::Failed(what, status) => return self.refused(core, peer, &with_status(what, status)),
            CmEvent::DeviceRemoved => Err("the RDMA device is gone".into()),
            CmEvent::Disconnected => Err("it closed the connection at once".into()),
            CmEvent::ConnectRequest(..) | CmEvent::Other => Ok(()),
        };
        match done {
            Ok(()) => {
                self.attempt = Some(attempt);
                Step::Continue
            }
            Err(why) => {
                drop(attempt);
                self.refused(core, peer, &why)
            }
        }
    }

    fn address_resolved(&self, core: &Core, attempt: &mut Attempt) -> Result<(), String> {
        let Some(endpoint) = &mut attempt.endpoint else {
            return Ok(());
        };
        let hardware = core.device.hardware.as_ref().ok_or("no RDMA device is open")?;
        check_way(endpoint, hardware, attempt.peer)?;
        endpoint
            .resolve_route(RESOLVE_MS)
            .map_err(|error| format!("there is no way to it: {}", error_text(&error)))
    }

    fn route_resolved(&self, core: &mut Core, attempt: &mut Attempt, receives: &[(u64, Span)]) -> Result<(), String> {
        let Some(endpoint) = attempt.endpoint.take() else {
            return Ok(());
        };
        attempt.watch.clear(core.poller(), endpoint.fd()).map_err(text)?;
        let hardware = core.device.hardware.as_ref().ok_or("no RDMA device is open")?;
        let made = VerbsOperation::new(endpoint, &self.pd, hardware)
            .map_err(|error| format!("{} has no queue pair for it: {}", hardware.name, error_text(&error)))?;
        let operation = attempt.operation.insert(Box::new(made));
        for (wr_id, span) in receives {
            // Refused only by a queue pair that has failed, which this one has not.
            let _ = operation.post_receive(*wr_id, *span);
        }
        attempt.receives_posted = receives.len();
        operation.post_receives(&core.device).map_err(text)?;
        operation.watch(core, self.token);
        operation.endpoint().connect(&self.parameters).map_err(|error| {
            // iWARP devices may find at once that there is nobody.
            let status = error.raw_os_error().unwrap_or(0).saturating_neg();
            refusal(status, &[]).unwrap_or_else(|| text(error))
        })
    }

    fn established(&self, attempt: Attempt, agreed: Parameters) -> Step {
        let Some(operation) = attempt.operation else {
            return Step::Failed(EndReason::lost("the connection came before its queue pair"));
        };
        // What the peer lets this side do, and what it may do here; its answer never exceeds what was asked for.
        let ord = u16::from(agreed.initiator_depth.min(self.parameters.initiator_depth));
        let ird = u16::from(agreed.responder_resources.min(self.parameters.responder_resources));
        Step::Open(Transport::Verbs {
            operation,
            ird,
            ord,
            private_data: agreed.private_data,
            receives_posted: attempt.receives_posted,
        })
    }
}

impl Connecting for VerbsConnector {
    fn start(&mut self, core: &mut Core) -> Step {
        self.try_next_address(core)
    }

    fn on_ready(&mut self, core: &mut Core, _readable: bool, receives: &[(u64, Span)]) -> Step {
        let Some(mut attempt) = self.attempt.take() else {
            return Step::Continue;
        };
        let event = match (&mut attempt.endpoint, &mut attempt.operation) {
            (Some(endpoint), _) => endpoint.event(),
            (None, Some(operation)) => operation.endpoint().event(),
            (None, None) => Ok(None),
        };
        match event {
            Ok(Some(event)) => self.take(core, attempt, event, receives),
            Ok(None) => {
                self.attempt = Some(attempt);
                Step::Continue
            }
            Err(error) => {
                let peer = attempt.peer;
                drop(attempt);
                self.refused(core, peer, &error_text(&error))
            }
        }
    }

    fn timed_out(&mut self, core: &mut Core) -> Step {
        if !self.untried.is_empty()
            && let Some(attempt) = self.attempt.take()
        {
            let peer = attempt.peer;
            drop(attempt);
            return self.refused(core, peer, "no answer");
        }
        let (peer, timeout_s) = (&self.remote_address, self.timeout.as_secs_f64());
        Step::Failed(EndReason::DeadlineExceeded(format!(
            "no RDMA connection to {peer} within {timeout_s:?} s"
        )))
    }

    fn close_now(&mut self, core: &mut Core) {
        core.timers.cancel(&mut self.timer);
        self.attempt = None;
    }
}

/// The way to `peer` leads through the device that is open, and not by accident through a name of this link alone.
fn check_way(endpoint: &Endpoint, hardware: &Device, peer: SocketAddr) -> Result<(), String> {
    let found = endpoint.context();
    if found != Some(hardware.context) {
        let other = found.map_or_else(|| "no RDMA device".into(), |context| context.name());
        return Err(format!(
            "the way there is through {other}, not through {}: open that device, or give an address on the network of this one",
            hardware.name
        ));
    }
    let (gid, _) = endpoint.local_gid();
    let link_local = |address: IpAddr| matches!(address, IpAddr::V6(six) if six.is_unicast_link_local());
    if !hardware.iwarp && link_local(IpAddr::from(gid)) && !link_local(peer.ip()) {
        return Err(format!(
            "{} would speak from a link-local GID, which the peer cannot answer: give its network interface an IPv4 or IPv6 \
             address",
            hardware.name
        ));
    }
    Ok(())
}

fn with_status(what: &str, status: i32) -> String {
    match status {
        0 => what.into(),
        number => {
            let error = io::Error::from_raw_os_error(number.saturating_abs());
            format!("{what}: {}", error_text(&error))
        }
    }
}

fn text(error: io::Error) -> String {
    error_text(&error)
}
