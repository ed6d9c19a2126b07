//! How a stream ends: what the peer or the connection did, what is flushed, and what becomes of the connection.

use std::io;
use std::mem;
use std::sync::atomic::Ordering;

use kbtp_proto::stream::{Event as IwarpEvent, Flushed, WrKind};
use kbtp_proto::types::TerminateInfo;

use crate::api::Event;
use crate::completions::{flushed, flushed_receive};
use crate::core::Core;
use crate::error::{EndReason, error_text};
use crate::goodbye::Goodbye;
use crate::operation::Operation;
use crate::stream_state::{State, StreamState, WorkOwner};

/// What becomes of the TCP connection of a stream that ended.
pub(crate) enum Farewell {
    Goodbye,
    Reset,
    Close,
}

impl StreamState {
    pub(crate) fn take_end(&mut self, core: &mut Core, event: IwarpEvent) {
        let peer = &self.facts.remote_address;
        match event {
            IwarpEvent::TerminateReceived { info } => {
                core.log(
                    log::Level::Debug,
                    format!("{peer} ended the stream with Terminate {info}"),
                );
                if let Some(operation) = self.operation.as_mut() {
                    operation.drop_unsent();
                }
                let message = format!("{peer} ended the stream: {info}");
                let reason = EndReason::ConnectionLost {
                    message,
                    terminate: Some(info.clone()),
                };
                self.end_with(core, Some(reason), Some(info), Farewell::Goodbye, None);
            }
            IwarpEvent::Failed { error } => {
                core.log(
                    log::Level::Debug,
                    format!("{peer} broke the protocol: {error}; its stream ends"),
                );
                self.end(core, Some(EndReason::PeerMisbehaved(error)));
            }
            _ => {}
        }
    }

    pub(crate) fn take_eof(&mut self, core: &mut Core, whole: bool) {
        let (peer, outstanding) = (&self.facts.remote_address, self.held_work.len());
        let reason = if !whole {
            Some(EndReason::lost(format!(
                "{peer} closed the connection in the middle of a message"
            )))
        } else if outstanding > 0 {
            Some(EndReason::lost(format!(
                "{peer} closed the connection with {outstanding} work requests outstanding"
            )))
        } else {
            None
        };
        self.end(core, reason);
    }

    pub(crate) fn take_loss(&mut self, core: &mut Core, error: &io::Error) {
        let (peer, why) = (&self.facts.remote_address, error_text(error));
        let reason = EndReason::lost(format!("the connection to {peer} was lost: {why}"));
        self.end_with(core, Some(reason), None, Farewell::Close, None);
    }

    /// Disconnecting: everything owed to the peer has left; FIN once everything posted is done too.
    pub(crate) fn take_silence(&mut self, core: &mut Core) {
        let busy = !self.held_work.is_empty() || self.is_draining();
        let Some(operation) = self.operation.as_mut() else {
            return;
        };
        if self.state != State::Disconnecting || operation.send_finished() || busy {
            return;
        }
        match operation.finish_sending() {
            Ok(()) => self.watch_disconnect(core),
            Err(error) => self.take_loss(core, &error),
        }
    }

    // --- within ---

    pub(crate) fn set_state(&mut self, state: State) {
        self.state = state;
        self.facts.state.store(state as u8, Ordering::Relaxed);
    }

    pub(crate) fn watch_disconnect(&mut self, core: &mut Core) {
        core.timers.cancel(&mut self.timer);
        self.moved_bytes_seen = self.operation.as_ref().map_or(0, Operation::moved_bytes);
        self.timer = Some(core.start_timer(core.options().disconnect, self.token));
    }

    pub(crate) fn disconnect_timed_out(&mut self, core: &mut Core) {
        let Some(operation) = self.operation.as_ref() else {
            return;
        };
        let peer = &self.facts.remote_address;
        if operation.is_flushed() {
            let reason = EndReason::lost(format!(
                "the connection to {peer} has failed: its queue pair takes no more work"
            ));
            self.end(core, Some(reason));
            return;
        }
        let finished = operation.send_finished();
        if !finished && operation.moved_bytes() != self.moved_bytes_seen {
            self.watch_disconnect(core);
            return;
        }
        let what = if finished {
            "did not close its side"
        } else {
            "did not let the posted work finish"
        };
        let limit_s = core.options().disconnect.as_secs_f64();
        let reason = EndReason::DeadlineExceeded(format!("{peer} {what} within {limit_s:?} s of disconnect"));
        self.end_with(core, Some(reason), None, Farewell::Reset, None);
    }

    pub(crate) fn end(&mut self, core: &mut Core, reason: Option<EndReason>) {
        self.end_with(core, reason, None, Farewell::Goodbye, None);
    }

    /// Make placement impossible, flush, report the end, and let the connection go (profile 3).
    pub(crate) fn end_with(
        &mut self,
        core: &mut Core,
        reason: Option<EndReason>,
        terminate: Option<TerminateInfo>,
        farewell: Farewell,
        event: Option<Event>,
    ) {
        if self.has_ended() {
            return;
        }
        self.set_state(State::Ended);
        core.device.table_mut().close_view(self.facts.view.id);
        core.timers.cancel(&mut self.timer);
        if let Some(mut connector) = self.connector.take() {
            connector.close_now(core);
        }
        for (wr_id, _) in mem::take(&mut self.early_receives) {
            core.report(Event::Completion(flushed_receive(self.facts.id, wr_id)));
        }
        let mut operation = self.operation.take();
        let mut cause = None;
        if let Some(operation) = operation.as_mut() {
            operation.unwatch(core.poller());
            cause = operation.stop(&core.device);
        }
        let foreign_reads = self.end_offloaded(core);
        self.end_initiator(core);
        if let Some(operation) = operation.as_mut() {
            self.flush(core, operation, &foreign_reads);
        }
        self.release_all(core);
        core.report(event.unwrap_or(Event::StreamEnded {
            stream: self.facts.id,
            reason,
            terminate,
            cause,
        }));
        match (operation, farewell) {
            (Some(Operation::Iwarp(operation)), Farewell::Goodbye) => Goodbye::start(core, self.token, operation.link),
            (Some(Operation::Iwarp(operation)), Farewell::Reset) => operation.link.reset(),
            // A queue pair has said goodbye when it stopped.
            (Some(Operation::Verbs(_)), _) | (_, Farewell::Close) | (None, _) => {}
        }
    }

    /// Report what is not done, but for the offloaded session's own; `foreign_reads` had not been posted yet.
    pub(crate) fn flush(&mut self, core: &mut Core, operation: &mut Operation, foreign_reads: &[u64]) {
        let (receives, works): (Vec<_>, Vec<_>) = operation
            .flush(&core.device)
            .into_iter()
            .partition(|work| work.kind == WrKind::Receive);
        // The last of the held work is what is flushed; completions that nobody took come before it.
        let taken = self.held_work.len().saturating_sub(works.len());
        let owners = self.held_work.iter().skip(taken).map(|held| held.owner);
        let own = |owner| matches!(owner, WorkOwner::Caller | WorkOwner::CallersRead);
        let reported: Vec<_> = works
            .into_iter()
            .zip(owners)
            .filter_map(|(work, owner)| own(owner).then_some(work))
            .collect();
        let waiting = foreign_reads.iter().map(|&wr_id| Flushed {
            wr_id,
            kind: WrKind::Read,
        });
        for work in reported.into_iter().chain(waiting).chain(receives) {
            core.report(Event::Completion(flushed(self.facts.id, work)));
        }
    }

    pub(crate) fn release_all(&mut self, core: &mut Core) {
        let table = core.device.table();
        let of_work = self.held_work.drain(..).flat_map(|held| held.regions);
        let of_receives = self.held_receives.drain(..).flatten();
        for region in of_work.chain(of_receives).chain(self.session_regions.drain(..)) {
            table.memories.release(region);
        }
    }
}
