//! A connection in use, whichever way it moves octets: user-space iWARP over TCP, or a queue pair of rdma-core.
//!
//! A stream posts work and takes events; it does not know which of the two it has.

use std::io;
use std::time::Instant;

use kbtp_proto::memory::Span;
use kbtp_proto::stream::{Event, Flushed, Moved, Outgoing, PostError, Work};
use kbtp_proto::types::TerminateCause;

use crate::core::Core;
use crate::device::DeviceShared;
use crate::event_loop::{Poller, Token};
use crate::iwarp_operation::IwarpOperation;
use crate::verbs_operation::VerbsOperation;

/// What one read gave.
pub(crate) enum Received {
    /// Nothing is there now.
    Nothing,
    /// The peer has closed; `whole` says whether between messages.
    Eof { whole: bool },
    /// So many octets, and whether more may be there.
    Octets { bytes: usize, more: bool },
}

/// See the head of this module.
pub(crate) enum Operation {
    Iwarp(Box<IwarpOperation>),
    Verbs(Box<VerbsOperation>),
}

impl Operation {
    // --- from the stream ---

    pub(crate) fn post(&mut self, work: Work) -> Result<(), PostError> {
        match self {
            Self::Iwarp(operation) => operation.iwarp.post(work),
            Self::Verbs(operation) => operation.post(work),
        }
    }

    pub(crate) fn post_receive(&mut self, wr_id: u64, buffer: Span) -> Result<(), PostError> {
        match self {
            Self::Iwarp(operation) => operation.iwarp.post_receive(wr_id, buffer),
            Self::Verbs(operation) => operation.post_receive(wr_id, buffer),
        }
    }

    pub(crate) fn next_event(&mut self) -> Option<Event> {
        match self {
            Self::Iwarp(operation) => operation.iwarp.next_event(),
            Self::Verbs(operation) => operation.next_event(),
        }
    }

    /// It takes no more work, and says why, or has said so.
    pub(crate) fn failed(&self) -> bool {
        match self {
            Self::Iwarp(operation) => operation.iwarp.failed(),
            Self::Verbs(operation) => operation.failed(),
        }
    }

    pub(crate) fn terminate(&mut self, cause: TerminateCause) {
        match self {
            Self::Iwarp(operation) => operation.iwarp.terminate(cause),
            Self::Verbs(operation) => operation.terminate(cause),
        }
    }

    /// What the peer reads stays as it is meanwhile.
    pub(crate) fn keep_sources_still(&mut self) {
        if let Self::Iwarp(operation) = self {
            operation.iwarp.keep_sources_still();
        }
    }

    /// Take the CRC32c of what moves through this memory, where octets pass through this process.
    pub(crate) fn watch_memory(&mut self, stag: u32, to: u64, length: u32) {
        if let Self::Iwarp(operation) = self {
            operation.iwarp.watch(stag, to, length);
        }
    }

    /// What has moved through it; None where nobody knows.
    pub(crate) fn moved(&mut self, stag: u32, to: u64) -> Option<Moved> {
        match self {
            Self::Iwarp(operation) => operation.iwarp.moved(stag, to),
            Self::Verbs(_) => None,
        }
    }

    // --- from the loop ---

    /// The file descriptor that shows completions is readable.
    pub(crate) fn notified(&mut self) {
        if let Self::Verbs(operation) = self {
            operation.notified();
        }
    }

    /// The file descriptor of the connection manager is readable.
    pub(crate) fn managed(&mut self) {
        if let Self::Verbs(operation) = self {
            operation.managed();
        }
    }

    /// One look at what has come, and what it means for the stream.
    pub(crate) fn receive(&mut self, device: &DeviceShared, staging: &mut [u8]) -> io::Result<Received> {
        match self {
            Self::Iwarp(operation) => operation.receive(device, staging),
            Self::Verbs(operation) => operation.receive(),
        }
    }

    /// Octets that were read during start-up.
    pub(crate) fn receive_octets(&mut self, device: &DeviceShared, data: &[u8]) {
        if let Self::Iwarp(operation) = self {
            operation.receive_octets(device, data);
        }
    }

    /// It waits until what was built for it can leave.
    pub(crate) fn has_unsent(&self) -> bool {
        match self {
            Self::Iwarp(operation) => operation.has_unsent(),
            Self::Verbs(_) => false,
        }
    }

    /// Something could leave now.
    pub(crate) fn has_to_send(&self) -> bool {
        match self {
            Self::Iwarp(operation) => operation.has_to_send(),
            Self::Verbs(operation) => operation.has_to_send(),
        }
    }

    /// Hand on what waits; how many octets that was. `spare` is empty, before and after.
    pub(crate) fn send_batch(
        &mut self,
        device: &DeviceShared,
        spare: &mut Outgoing,
        now: Instant,
    ) -> io::Result<usize> {
        match self {
            Self::Iwarp(operation) => operation.send_batch(device, spare, now),
            Self::Verbs(operation) => operation.send_batch(device),
        }
    }

    /// Be told when something has come, or with `write` when more can leave.
    pub(crate) fn watch(&mut self, core: &mut Core, token: Token, write: bool) {
        match self {
            Self::Iwarp(operation) => core.watch(&mut operation.link, token, true, write),
            Self::Verbs(operation) => operation.watch(core, token),
        }
    }

    pub(crate) fn unwatch(&mut self, poller: &Poller) {
        match self {
            Self::Iwarp(operation) => operation.link.unwatch(poller),
            Self::Verbs(operation) => operation.unwatch(poller),
        }
    }

    // --- the end ---

    /// A measure of progress.
    pub(crate) fn moved_bytes(&self) -> u64 {
        match self {
            Self::Iwarp(operation) => operation.link.moved_bytes,
            Self::Verbs(operation) => operation.moved_bytes,
        }
    }

    /// This side has said that it sends nothing more.
    pub(crate) fn send_finished(&self) -> bool {
        match self {
            Self::Iwarp(operation) => operation.link.send_finished,
            Self::Verbs(operation) => operation.send_finished,
        }
    }

    /// The queue pair has failed, and why is not yet known.
    pub(crate) fn is_flushed(&self) -> bool {
        match self {
            Self::Iwarp(_) => false,
            Self::Verbs(operation) => operation.is_flushed(),
        }
    }

    pub(crate) fn finish_sending(&mut self) -> io::Result<()> {
        match self {
            Self::Iwarp(operation) => operation.link.finish_sending(),
            Self::Verbs(operation) => operation.finish_sending(),
        }
    }

    /// Nothing of what was built goes out any more.
    pub(crate) fn drop_unsent(&mut self) {
        if let Self::Iwarp(operation) = self {
            operation.drop_unsent();
        }
    }

    /// Send and receive no more, but for what was built and a Terminate that waits; its cause.
    pub(crate) fn stop(&mut self, device: &DeviceShared) -> Option<TerminateCause> {
        match self {
            Self::Iwarp(operation) => operation.stop(device),
            Self::Verbs(operation) => operation.stop(),
        }
    }

    /// What was posted and is not done.
    pub(crate) fn flush(&mut self, device: &DeviceShared) -> Vec<Flushed> {
        match self {
            Self::Iwarp(operation) => operation.flush(device),
            Self::Verbs(operation) => operation.flush(),
        }
    }
}
