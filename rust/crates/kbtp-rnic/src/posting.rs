//! Work requests: checked as a whole before any is queued, then handed to the iWARP stream.
//!
//! What passes here never fails later on this side, so that a post is all or none.

use std::sync::Arc;

use kbtp_proto::limits::RNIC_READ_DEPTH_MAX;
use kbtp_proto::memory::Span;
use kbtp_proto::stag::StreamId as ViewId;
use kbtp_proto::stream::{Inline, Payload, Piece, Work};
use kbtp_verbs::{Atomics, Device, Parameters};

use crate::api::{Recv, Sge, WorkRequest};
use crate::device::{DeviceShared, Pd};
use crate::error::Error;

const TOP_BIT: u64 = 1 << 63;

/// What a stream may name in its posts.
#[derive(Clone)]
pub(crate) struct View {
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) id: ViewId,
}

pub(crate) fn check_domain(pd: &Pd, device: &Arc<DeviceShared>) -> Result<(), Error> {
    if Arc::ptr_eq(&pd.device, device) {
        Ok(())
    } else {
        Err(Error::misuse("the protection domain must be allocated from this RNIC"))
    }
}

pub(crate) fn check_depths(ird: u32, ord: u32) -> Result<(u16, u16), Error> {
    Ok((checked_depth("ird", ird)?, checked_depth("ord_", ord)?))
}

fn checked_depth(name: &str, depth: u32) -> Result<u16, Error> {
    match u16::try_from(depth) {
        Ok(depth @ 0..=RNIC_READ_DEPTH_MAX) => Ok(depth),
        _ => Err(Error::misuse(format!(
            "{name} must be 0 to {RNIC_READ_DEPTH_MAX}; got {depth}"
        ))),
    }
}

/// What this side tells the peer; no more of IRD and ORD than the device has.
pub(crate) fn parameters(private_data: &[u8], (ird, ord): (u16, u16), hardware: &Device) -> Parameters {
    let depth = |wanted: u16, most: u8| u8::try_from(wanted).unwrap_or(u8::MAX).min(most);
    Parameters {
        private_data: private_data.to_vec(),
        responder_resources: depth(ird, hardware.max_ird),
        initiator_depth: depth(ord, hardware.max_ord),
    }
}

/// The octets of `sge`, or `Error::ApiMisuse`. Called with the device locked for reading, so that a valid region stays
/// one until its memory is held.
fn span_of(sge: &Sge, view: &View) -> Result<Span, Error> {
    let region = &sge.region;
    if !Arc::ptr_eq(&region.shared.device, &view.device) {
        return Err(Error::misuse("the region of an Sge must be registered with this RNIC"));
    }
    if !region.valid() {
        let stag = region.stag();
        return Err(Error::misuse(format!(
            "the region of STag {stag:#010x} is revoked: register the buffer again"
        )));
    }
    if !region
        .shared
        .scope
        .map_or(region.shared.pd == view.id.pd(), |scope| scope == view.id)
    {
        return Err(Error::misuse(
            "the region of an Sge must be of the stream's protection domain, and not of another stream",
        ));
    }
    if sge
        .offset
        .checked_add(sge.length)
        .is_none_or(|end| end > region.length())
    {
        return Err(Error::misuse(format!(
            "an Sge must lie within its region of {} octets; got {} octets from offset {}",
            region.length(),
            sge.length,
            sge.offset
        )));
    }
    // Who sends more than a message has is refused by `check_total`; who receives cannot get more.
    let len = u32::try_from(sge.length).unwrap_or(u32::MAX);
    Ok(Span {
        region: region.shared.id,
        offset: sge.offset,
        len,
    })
}

fn writable_span_of(sge: &Sge, view: &View, what: &str) -> Result<Span, Error> {
    let span = span_of(sge, view)?;
    if !sge.region.shared.writable {
        return Err(Error::misuse(format!(
            "the {what} must be writable memory; this region's buffer is read-only"
        )));
    }
    Ok(span)
}

/// The buffers of `receives` with their wr_id. Called with the device locked for reading.
pub(crate) fn receive_buffers(receives: &[Recv], view: &View) -> Result<Vec<(u64, Span)>, Error> {
    receives
        .iter()
        .map(|receive| Ok((receive.wr_id, writable_span_of(&receive.sge, view, "buffer of a Recv")?)))
        .collect()
}

/// What `request` asks of the iWARP stream. Refuses anything that could never work. Called with the device locked for reading.
pub(crate) fn prepare(request: WorkRequest, view: &View, ord: u16) -> Result<Work, Error> {
    Ok(match request {
        WorkRequest::Send {
            wr_id,
            inline,
            sges,
            invalidate_stag,
            solicited,
        } => {
            let payload = payload_of(Some(inline).filter(|inline| !inline.is_empty()), &sges, view)?;
            Work::Send {
                wr_id,
                payload,
                invalidate_stag,
                solicited,
            }
        }
        WorkRequest::Write {
            wr_id,
            sges,
            remote_stag,
            remote_to,
        } => Work::Write {
            wr_id,
            payload: payload_of(None, &sges, view)?,
            stag: remote_stag,
            to: remote_to,
        },
        WorkRequest::WriteImmediate {
            wr_id,
            inline,
            remote_stag,
            remote_to,
            immediate,
        } => Work::WriteImmediate {
            wr_id,
            octets: Inline::from_vec(inline),
            stag: remote_stag,
            to: remote_to,
            immediate,
        },
        WorkRequest::Read {
            wr_id,
            sink,
            remote_stag,
            remote_to,
        } => {
            let span = writable_span_of(&sink, view, "sink of an RdmaRead")?;
            check_total(sink.length)?;
            check_depth(ord)?;
            Work::Read {
                wr_id,
                sink: span,
                source_stag: remote_stag,
                source_to: remote_to,
            }
        }
        atomic @ (WorkRequest::FetchAdd { .. } | WorkRequest::CompareSwap { .. }) => prepare_atomic(atomic, ord)?,
        WorkRequest::Immediate { wr_id, data, solicited } => Work::Immediate { wr_id, data, solicited },
    })
}

fn prepare_atomic(request: WorkRequest, ord: u16) -> Result<Work, Error> {
    check_depth(ord)?;
    Ok(match request {
        WorkRequest::FetchAdd {
            wr_id,
            remote_stag,
            remote_to,
            add_data,
            add_mask,
        } => Work::FetchAdd {
            wr_id,
            stag: remote_stag,
            to: remote_to,
            add_data,
            add_mask,
        },
        WorkRequest::CompareSwap {
            wr_id,
            remote_stag,
            remote_to,
            swap_data,
            swap_mask,
            compare_data,
            compare_mask,
        } => Work::CompareSwap {
            wr_id,
            stag: remote_stag,
            to: remote_to,
            swap_data,
            swap_mask,
            compare_data,
            compare_mask,
        },
        _ => return Err(Error::misuse("a work request that is no atomic came as one")),
    })
}

/// The spans of `work`, whose memory it holds until it is complete.
pub(crate) fn spans_of(work: &Work) -> impl Iterator<Item = Span> {
    let (payload, sink) = match work {
        Work::Send { payload, .. } | Work::Write { payload, .. } => (payload.as_slice(), None),
        Work::Read { sink, .. } => (&[][..], Some(*sink)),
        Work::FetchAdd { .. } | Work::CompareSwap { .. } | Work::Immediate { .. } | Work::WriteImmediate { .. } => {
            (&[][..], None)
        }
    };
    payload.iter().filter_map(Piece::span).chain(sink)
}

/// Refuses what the device of `view` has no message for.
pub(crate) fn check_capabilities(work: &Work, view: &View) -> Result<(), Error> {
    let Some(hardware) = &view.device.hardware else {
        return match work {
            Work::WriteImmediate { .. } => Err(Error::misuse("RDMAP has no RDMA Write with Immediate")),
            _ => Ok(()),
        };
    };
    let name = &hardware.name;
    let lacks = |what: &str| {
        Err(Error::misuse(format!(
            "{name} has no {what}: see the RNIC's capabilities"
        )))
    };
    match work {
        Work::Immediate { .. } => lacks("Immediate Data (RFC 7306 6)"),
        Work::WriteImmediate { .. } if hardware.iwarp => lacks("RDMA Write with Immediate"),
        Work::Send {
            invalidate_stag: Some(_),
            ..
        } if !hardware.send_with_invalidate => lacks("Send with Invalidate"),
        Work::FetchAdd { .. } | Work::CompareSwap { .. } if hardware.atomics == Atomics::None => lacks("atomics"),
        // The carry out of the last bit goes nowhere anyway.
        Work::FetchAdd { add_mask, .. } if add_mask & !TOP_BIT != 0 => lacks("masked FetchAdd: add_mask must be 0"),
        Work::CompareSwap {
            swap_mask,
            compare_mask,
            ..
        } if (*swap_mask, *compare_mask) != (u64::MAX, u64::MAX) => {
            lacks("masked CmpSwap: both masks must be all ones")
        }
        _ => Ok(()),
    }
}

fn payload_of(inline: Option<Vec<u8>>, sges: &[Sge], view: &View) -> Result<Payload, Error> {
    let inline_bytes = inline.as_ref().map_or(0, Vec::len) as u64;
    let mut payload = Payload::new();
    payload.extend(inline.map(|inline| Piece::Inline(Inline::from_vec(inline))));
    for sge in sges {
        payload.push(Piece::Span(span_of(sge, view)?));
    }
    // No region is longer than the address space, so the sum of those few does not wrap.
    check_total(
        sges.iter()
            .fold(inline_bytes, |total, sge| total.saturating_add(sge.length)),
    )?;
    Ok(payload)
}

fn check_total(total: u64) -> Result<(), Error> {
    if total > u64::from(u32::MAX) {
        // RFC 5040 4: a message has at most 2^32-1 octets
        return Err(Error::misuse(format!(
            "a message has at most 2^32-1 octets; got {total}"
        )));
    }
    Ok(())
}

fn check_depth(ord: u16) -> Result<(), Error> {
    if ord < 1 {
        // it would wait in the send queue for ever (RFC 5040 6.1)
        return Err(Error::misuse(
            "RDMA Reads and atomics need an ORD of at least 1; this stream has 0",
        ));
    }
    Ok(())
}
