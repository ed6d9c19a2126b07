//! Full operation over user-space iWARP (RFC 5044 3 to 6): octets between one TCP connection and its `IwarpStream`, both ways.
//!
//! Each step holds the device's lock, as one of its readers, from the checks of an STag to the last octet that the system
//! has copied, so that a revocation in another thread comes before or after it, never within. What the socket does not take
//! of FPDUs that were built waits as it is: what it names in registered memory belongs to posted work, which holds it until
//! its last octet has left, and what is left of a Read Response is copied while its STag is known to be good.

use std::io;
use std::mem;
use std::time::{Duration, Instant};

use kbtp_proto::fpdu::mulpdu_for_emss;
use kbtp_proto::limits;
use kbtp_proto::memory::StreamMemory;
use kbtp_proto::mpa::Negotiated;
use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::stream::{Flushed, IwarpStream, Outgoing};
use kbtp_proto::types::TerminateCause;

use crate::device::DeviceShared;
use crate::memory::{PARTS_MAX, RegisteredOctets, receive_into, send_parts};
use crate::operation::Received;
use crate::tcp::Link;

/// Read behind a payload that goes straight to its place: the end of its FPDU, the short ones that follow, and the header
/// of the next long one, so that a stream of these takes one read each.
const PREFETCH_BYTES: usize = 4096;

/// Read into the staging buffer at first: a block of 4 KiB and its COMPLETION. More only while that fills up with short
/// FPDUs: of a long one everything that is read here has to be copied once more.
const APPETITE_BYTES: usize = 8 * 1024;
const APPETITE_GROWTH: usize = 4;

/// Built before the first `sendmsg` of a burst, a block of 64 KiB or 16 of 4 KiB, so that the peer begins while this side goes
/// on. Later ones take as much as was sent before them, which makes fewer of them. A burst lasts until nothing is left to send.
const FIRST_BATCH_BYTES: usize = 64 * 1024;

/// Built in excess of that: heads, and the completions behind the last block. One by itself costs both sides one call more.
const COMPLETIONS_BYTES: usize = 4 * 1024;

/// Parts that one more FPDU adds, if it is sent from where it lies: head, one or two spans, tail.
const PARTS_OF_FPDU: usize = 4;

/// The path changes its MTU seldom, and an FPDU that is cut for the former one arrives as well (RFC 5044 4.5).
const EMSS_CHECK_PERIOD: Duration = Duration::from_millis(100);

/// A connection in use.
pub(crate) struct IwarpOperation {
    pub(crate) link: Link,
    pub(crate) iwarp: IwarpStream,
    view: ViewId,
    markers: bool,
    /// Each batch then ends a TCP segment, not only one with PAD: whatever the socket still holds, that starts one as well.
    pad_stands_alone: bool,
    emss_bytes: u32,
    emss_check_at: Instant,
    appetite_bytes: usize,
    /// FPDUs that were built, and that the socket has not taken wholly.
    unsent: Option<Outgoing>,
    /// Octets sent in this burst.
    burst_bytes: usize,
}

impl IwarpOperation {
    pub(crate) fn new(link: Link, view: ViewId, negotiated: Negotiated, active: bool) -> io::Result<Self> {
        let (markers, pad_stands_alone) = (negotiated.tx_markers, negotiated.pad_stands_alone());
        let emss_bytes = link.emss_bytes()?;
        let iwarp = IwarpStream::new(negotiated, active, mulpdu_for_emss(emss_bytes, markers), None);
        Ok(Self {
            link,
            iwarp,
            view,
            markers,
            pad_stands_alone,
            emss_bytes,
            emss_check_at: Instant::now() + EMSS_CHECK_PERIOD,
            appetite_bytes: APPETITE_BYTES,
            unsent: None,
            burst_bytes: 0,
        })
    }

    /// Octets that were read during start-up.
    pub(crate) fn receive_octets(&mut self, device: &DeviceShared, data: &[u8]) {
        device.lend(self.view, |memory, octets| self.iwarp.receive(data, memory, octets));
    }

    /// One read from the socket, and what it means for the stream.
    pub(crate) fn receive(&mut self, device: &DeviceShared, staging: &mut [u8]) -> io::Result<Received> {
        device.lend(self.view, |memory, octets| self.receive_with(memory, octets, staging))
    }

    fn receive_with(
        &mut self,
        memory: &mut dyn StreamMemory,
        octets: &mut RegisteredOctets<'_>,
        staging: &mut [u8],
    ) -> io::Result<Received> {
        let direct = self.iwarp.direct(memory);
        let (direct_bytes, wanted) = match direct {
            Some(span) => (span.len as usize, PREFETCH_BYTES),
            None => (0, self.appetite_bytes),
        };
        let end = wanted.min(staging.len());
        let staging = &mut staging[..end];
        let result = match direct {
            Some(span) => {
                let received = receive_into(self.link.fd(), octets.0, span, staging);
                self.link.received(received)
            }
            None => self.link.receive(staging),
        };
        let Some(bytes) = result? else {
            return Ok(Received::Nothing);
        };
        if bytes == 0 {
            return Ok(Received::Eof {
                whole: self.iwarp.receive_eof(),
            });
        }
        if direct.is_some() {
            self.iwarp.direct_received(bytes.min(direct_bytes) as u32, octets);
        }
        let staged = staging.get(..bytes.saturating_sub(direct_bytes)).unwrap_or_default();
        self.iwarp.receive(staged, memory, octets);
        let more = bytes == direct_bytes + staging.len();
        let long_bytes = self.iwarp.direct(memory).map_or(0, |span| span.len as usize);
        if long_bytes >= APPETITE_BYTES {
            self.appetite_bytes = APPETITE_BYTES;
        } else if more && direct.is_none() {
            let grown_bytes = self.appetite_bytes.saturating_mul(APPETITE_GROWTH);
            self.appetite_bytes = grown_bytes.min(limits::RNIC_READ_BUFFER_BYTES);
        }
        Ok(Received::Octets { bytes, more })
    }

    /// The socket has not taken all that was built for it.
    pub(crate) fn has_unsent(&self) -> bool {
        self.link.has_unsent() || self.unsent.is_some()
    }

    /// Something could be built and sent now, if the socket took it.
    pub(crate) fn has_to_send(&self) -> bool {
        !self.has_unsent() && !self.link.send_finished && self.iwarp.wants_to_send()
    }

    /// Hand the system what waits, or else FPDUs that are built now; how many octets it took. `spare` is empty, before and
    /// after.
    pub(crate) fn send_batch(
        &mut self,
        device: &DeviceShared,
        spare: &mut Outgoing,
        now: Instant,
    ) -> io::Result<usize> {
        self.link.send_queued()?;
        if self.link.has_unsent() {
            return Ok(0);
        }
        let mut out = self.unsent.take().unwrap_or_else(|| mem::take(spare));
        self.check_emss(now)?;
        let result = device.lend(self.view, |memory, octets| {
            if out.is_empty() {
                let ahead_bytes = self.burst_bytes.clamp(FIRST_BATCH_BYTES, limits::RNIC_UNSENT_MAX_BYTES);
                self.build(memory, octets, ahead_bytes + COMPLETIONS_BYTES, &mut out);
            }
            let sent = self.send_built(octets, &mut out);
            out.keep_lent(octets);
            sent
        });
        self.burst_bytes += result.as_ref().map_or(0, |sent_bytes| *sent_bytes);
        if out.is_empty() {
            *spare = out;
            if !self.iwarp.wants_to_send() {
                self.burst_bytes = 0;
            }
        } else {
            self.unsent = Some(out);
        }
        result
    }

    fn check_emss(&mut self, now: Instant) -> io::Result<()> {
        if now >= self.emss_check_at {
            self.emss_check_at = now + EMSS_CHECK_PERIOD;
            let emss_bytes = self.link.emss_bytes()?;
            if emss_bytes != self.emss_bytes {
                self.emss_bytes = emss_bytes;
                self.iwarp.set_mulpdu(mulpdu_for_emss(emss_bytes, self.markers));
            }
        }
        Ok(())
    }

    fn build(
        &mut self,
        memory: &mut dyn StreamMemory,
        octets: &RegisteredOctets<'_>,
        ahead_bytes: usize,
        out: &mut Outgoing,
    ) {
        while out.left_bytes() < ahead_bytes
            && out.part_count() + PARTS_OF_FPDU <= PARTS_MAX
            && self.iwarp.build_fpdu(memory, octets, out)
        {}
    }

    fn send_built(&mut self, octets: &RegisteredOctets<'_>, out: &mut Outgoing) -> io::Result<usize> {
        let mut sent_bytes = 0;
        while !out.is_empty() {
            let batch_bytes = out.batch_bytes();
            let sent = match send_parts(self.link.fd(), octets.0, out.batch(), self.pad_stands_alone) {
                Ok(sent) => sent,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
                // Nothing was taken: what it was for is flushed.
                Err(error) => return Err(error),
            };
            self.link.moved_bytes += sent as u64;
            self.iwarp.sent(out, sent);
            sent_bytes += sent;
            if sent < batch_bytes {
                break;
            }
        }
        Ok(sent_bytes)
    }

    /// Nothing of what was built goes out any more.
    pub(crate) fn drop_unsent(&mut self) {
        self.link.drop_unsent();
        self.unsent = None;
    }

    /// Send and receive no more, but for what was built and a Terminate that waits; its cause. No registered memory is needed
    /// for that any more.
    pub(crate) fn stop(&mut self, device: &DeviceShared) -> Option<TerminateCause> {
        if self.link.send_finished {
            return None;
        }
        let cause = self.iwarp.sent_cause();
        let mut out = self.unsent.take().unwrap_or_default();
        device.lend(self.view, |memory, octets| {
            while cause.is_some() && self.iwarp.build_fpdu(memory, octets, &mut out) {}
            while !out.is_empty() {
                self.link.queue_segment(|unsent| out.copy_batch(octets, unsent));
            }
        });
        cause
    }

    /// What was posted and is not done.
    pub(crate) fn flush(&mut self, device: &DeviceShared) -> Vec<Flushed> {
        device.lend(self.view, |memory, _| self.iwarp.flush(memory))
    }
}
