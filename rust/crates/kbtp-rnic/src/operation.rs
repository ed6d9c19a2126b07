//! Full operation (RFC 5044 3 to 6): octets between one TCP connection and its `IwarpStream`, both ways.
//!
//! Each step holds the device's lock from the checks of an STag to the last octet that the system has copied, so that
//! a revocation in another thread comes before or after it, never within. What the socket does not take of FPDUs that
//! were built is copied under the same lock: nothing that waits names registered memory.

use std::io;
use std::mem;
use std::time::{Duration, Instant};

use kbtp_proto::fpdu::mulpdu_for_emss;
use kbtp_proto::limits;
use kbtp_proto::memory::{Octets, Span, StreamMemory};
use kbtp_proto::mpa::Negotiated;
use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::stream::{Flushed, Fpdu, IwarpStream};
use kbtp_proto::types::TerminateCause;

use crate::core::lock;
use crate::device::DeviceShared;
use crate::memory::{PARTS_MAX, Part, RegisteredOctets, receive_into, send_parts};
use crate::tcp::Link;

/// Read behind a payload that goes straight to its place: the end of its FPDU and the header of the next.
const PREFETCH_BYTES: usize = 128;

/// Read into the staging buffer at first. More only while that fills up with short FPDUs: of a long one everything
/// that is read here has to be copied once more.
const APPETITE_BYTES: usize = 16 * 1024;
const APPETITE_GROWTH: usize = 4;

/// Parts of an FPDU that is sent from where it lies: head, one or two spans, tail.
const PARTS_OF_FPDU: usize = 4;

/// The path changes its MTU seldom, and an FPDU that is cut for the former one arrives as well (RFC 5044 4.5).
const EMSS_CHECK_PERIOD: Duration = Duration::from_millis(100);

/// What one read gave.
pub(crate) enum Received {
    /// Nothing is there now.
    Nothing,
    /// The peer's FIN; `whole` says whether between messages.
    Eof { whole: bool },
    /// So many octets, and whether more may be there.
    Octets { bytes: usize, more: bool },
}

/// A connection in use.
pub(crate) struct Operation {
    pub(crate) link: Link,
    pub(crate) iwarp: IwarpStream,
    view: ViewId,
    markers: bool,
    emss_bytes: u32,
    emss_check_at: Instant,
    appetite_bytes: usize,
    /// FPDUs of one `sendmsg`; here for its allocation.
    batch: Vec<Fpdu>,
}

impl Operation {
    pub(crate) fn new(link: Link, view: ViewId, negotiated: Negotiated, active: bool) -> io::Result<Self> {
        let markers = negotiated.tx_markers;
        let emss_bytes = link.emss_bytes()?;
        let iwarp = IwarpStream::new(negotiated, active, mulpdu_for_emss(emss_bytes, markers), None);
        let batch = Vec::new();
        Ok(Self {
            link,
            iwarp,
            view,
            markers,
            emss_bytes,
            emss_check_at: Instant::now() + EMSS_CHECK_PERIOD,
            appetite_bytes: APPETITE_BYTES,
            batch,
        })
    }

    /// Octets that were read during start-up.
    pub(crate) fn receive_octets(&mut self, device: &DeviceShared, data: &[u8]) {
        lock(&device.table).lend(self.view, |memory, octets| self.iwarp.receive(data, memory, octets));
    }

    /// One read from the socket, and what it means for the stream.
    pub(crate) fn receive(&mut self, device: &DeviceShared, staging: &mut [u8]) -> io::Result<Received> {
        lock(&device.table).lend(self.view, |memory, octets| self.receive_with(memory, octets, staging))
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
        let grows = more && direct.is_none() && self.iwarp.direct(memory).is_none();
        self.appetite_bytes = if grows {
            self.appetite_bytes.saturating_mul(APPETITE_GROWTH)
        } else {
            APPETITE_BYTES
        }
        .min(limits::RNIC_READ_BUFFER_BYTES);
        Ok(Received::Octets { bytes, more })
    }

    /// Something could be sent now, if the socket took it.
    pub(crate) fn has_to_send(&self) -> bool {
        !self.link.has_unsent() && !self.link.send_finished && self.iwarp.wants_to_send()
    }

    /// Build FPDUs and hand them to the system; how many octets. What it does not take waits in `link`.
    pub(crate) fn send_batch(&mut self, device: &DeviceShared) -> io::Result<usize> {
        self.check_emss()?;
        lock(&device.table).lend(self.view, |memory, octets| self.send_batch_with(memory, octets))
    }

    fn check_emss(&mut self) -> io::Result<()> {
        let now = Instant::now();
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

    fn send_batch_with(
        &mut self,
        memory: &mut dyn StreamMemory,
        octets: &mut RegisteredOctets<'_>,
    ) -> io::Result<usize> {
        let mut batch = mem::take(&mut self.batch);
        let (mut bytes, mut parts) = (0, 0);
        while bytes < limits::RNIC_UNSENT_MAX_BYTES && parts + PARTS_OF_FPDU <= PARTS_MAX {
            let Some(fpdu) = self.iwarp.next_fpdu(memory, octets) else {
                break;
            };
            bytes += fpdu.total_len();
            parts += parts_of(&fpdu).count();
            batch.push(fpdu);
        }
        let result = if batch.is_empty() {
            Ok(())
        } else {
            self.send_fpdus(&batch, octets)
        };
        for fpdu in batch.drain(..) {
            // A send that failed has taken nothing: what it was for is flushed.
            if result.is_ok() {
                self.iwarp.fpdu_sent(fpdu);
            }
        }
        self.batch = batch;
        result.map(|()| bytes)
    }

    fn send_fpdus(&mut self, batch: &[Fpdu], octets: &RegisteredOctets<'_>) -> io::Result<()> {
        let sent = match send_parts(self.link.fd(), octets.0, batch.iter().flat_map(parts_of)) {
            Ok(sent) => sent,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            Err(error) => return Err(error),
        };
        self.link.moved_bytes += sent as u64;
        let mut skip = sent;
        for part in batch.iter().flat_map(parts_of) {
            let length = part.length();
            let from = skip.min(length);
            skip -= from;
            copy_rest(part, from, octets, self.link.unsent_mut());
        }
        Ok(())
    }

    /// Send and receive no more, but for a Terminate that waits; its cause.
    pub(crate) fn stop(&mut self, device: &DeviceShared) -> Option<TerminateCause> {
        if self.link.send_finished {
            return None;
        }
        let cause = self.iwarp.sent_cause()?;
        let Self { link, iwarp, view, .. } = self;
        lock(&device.table).lend(*view, |memory, octets| {
            while let Some(fpdu) = iwarp.next_fpdu(memory, octets) {
                for part in parts_of(&fpdu) {
                    copy_rest(part, 0, octets, link.unsent_mut());
                }
            }
        });
        Some(cause)
    }

    /// What was posted and is not done.
    pub(crate) fn flush(&mut self, device: &DeviceShared) -> Vec<Flushed> {
        lock(&device.table).lend(self.view, |memory, _| self.iwarp.flush(memory))
    }
}

fn parts_of(fpdu: &Fpdu) -> impl Iterator<Item = Part<'_>> {
    let head = Part::Own(fpdu.head());
    let tail = Some(fpdu.tail()).filter(|tail| !tail.is_empty()).map(Part::Own);
    std::iter::once(head)
        .chain(fpdu.spans().iter().map(|span| Part::Registered(*span)))
        .chain(tail)
}

fn copy_rest(part: Part<'_>, from: usize, octets: &RegisteredOctets<'_>, into: &mut Vec<u8>) {
    if from == part.length() {
        return;
    }
    match part {
        Part::Own(own) => into.extend_from_slice(own.get(from..).unwrap_or_default()),
        Part::Registered(span) => {
            let from = from as u32; // less than the span's length, which fits
            let rest = Span {
                region: span.region,
                offset: span.offset + u64::from(from),
                len: span.len - from,
            };
            octets.read(rest, into);
        }
    }
}
