//! The receiving half of a stream: segments are checked and placed, messages delivered. `intake` brings the segments.
//!
//! Checks come in this order, and the first that fails names the Terminate: CRC and markers (`intake`), DDP header and
//! version (`ddp`), RDMAP version, opcode, T bit and queue (`rdmap`), then here MSN, MO, the message's size, the buffer,
//! and last the rights (`StreamMemory`). TCP keeps order and a sender must too (RFC 5041 5.3), so MSN and MO are exactly
//! the next ones: a hole would hand old buffer content to the caller.
//!
//! A segment is taken in two steps, because its payload need not be there yet when its header is: `judge` finds out
//! where the payload goes and changes nothing; `commit` makes it count once the payload is placed and the CRC was good.

use std::array::TryFromSliceError;

use super::events::Event;
use super::state::{StreamState, return_sink};
use super::work::{Awaiting, Done, OpenRead, Owed};
use crate::atomics::{compare_swap, fetch_add};
use crate::ddp::{SegmentHeader, TaggedHeader, UntaggedHeader, parse_header};
use crate::limits::DDP_UNTAGGED_HEADER_BYTES;
use crate::memory::{Span, StreamMemory};
use crate::mpa::RtrKind;
use crate::rdmap::{AtomicOperation, AtomicRequest, AtomicResponse, QN_SEND, RdmapOpcode, ReadRequest, opcode_of};
use crate::terminate::parse_terminate;
use crate::types::{PeerMisbehaved, TerminateCause};

/// Where the payload of a segment goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Placement {
    /// To the stream itself: `commit` wants to see it.
    Control,
    /// Into a buffer that was posted for it.
    Posted(Span),
    /// Into memory that the peer may write. `span` was right when it was judged; a later piece must ask again, since the
    /// STag may be revoked at any time.
    Tagged {
        /// The right to ask for.
        stag: u32,
        /// The address of the first octet.
        to: u64,
        /// All of the payload.
        span: Span,
    },
    /// There is none.
    Nothing,
}

#[derive(Debug)]
pub(super) struct Inbound {
    expected_msn: [u32; 4],
    send_rtr_may_come: bool,
    open_send: Option<RdmapOpcode>,
    /// Of the open Send, placed so far.
    send_bytes: u32,
    /// The opcode and STag of the open message.
    open_tagged: Option<(RdmapOpcode, u32)>,
}

impl Inbound {
    pub(super) fn new(state: &StreamState, first_msn: [u32; 4]) -> Self {
        Self {
            expected_msn: first_msn,
            send_rtr_may_come: !state.active && state.negotiated.rtr.contains(RtrKind::SEND),
            open_send: None,
            send_bytes: 0,
            open_tagged: None,
        }
    }

    /// Some segment of a message came and its last one did not.
    pub(super) fn in_message(&self) -> bool {
        self.open_send.is_some() || self.open_tagged.is_some()
    }

    /// Where the payload, of `payload_bytes`, of the segment goes that `ulpdu` begins. Only its header is looked at.
    pub(super) fn judge(
        &self,
        ulpdu: &[u8],
        payload_bytes: u32,
        state: &StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<Placement, PeerMisbehaved> {
        let header = parse_header(ulpdu)?;
        let opcode = opcode_of(&header)?;
        match header {
            SegmentHeader::Tagged(header) => self.judge_tagged(&header, opcode, payload_bytes, state, memory),
            SegmentHeader::Untagged(header) => self.judge_untagged(&header, opcode, payload_bytes, state),
        }
    }

    /// The segment counts from here on. `ulpdu` is its header, followed by its payload if that was for the stream;
    /// `payload_crc` if that was taken by itself.
    pub(super) fn commit(
        &mut self,
        ulpdu: &[u8],
        payload_bytes: u32,
        payload_crc: Option<u32>,
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<(), PeerMisbehaved> {
        let header = parse_header(ulpdu)?;
        let opcode = opcode_of(&header)?;
        let payload = ulpdu.get(header.bytes()..).unwrap_or_default();
        match header {
            SegmentHeader::Tagged(header) => {
                if opcode == RdmapOpcode::Write && payload_bytes > 0 {
                    state
                        .watched
                        .written(header.stag, header.to, payload_bytes, payload_crc);
                }
                self.commit_tagged(&header, opcode, payload_bytes, state, memory)?;
            }
            SegmentHeader::Untagged(header) => match opcode {
                RdmapOpcode::Terminate => state.ended_by_peer(parse_terminate(payload)?),
                _ if opcode.fixed_bytes().is_some() => self.commit_fixed(header.qn, opcode, ulpdu, state, memory)?,
                _ => self.commit_send(&header, opcode, payload_bytes, state, memory)?,
            },
        }
        self.send_rtr_may_come = false;
        Ok(())
    }

    // --- tagged: RDMA Write and Read Response ---

    fn judge_tagged(
        &self,
        header: &TaggedHeader,
        opcode: RdmapOpcode,
        payload_bytes: u32,
        state: &StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<Placement, PeerMisbehaved> {
        if let Some((open_opcode, open_stag)) = self.open_tagged {
            if opcode != open_opcode {
                return Err(inside_another(opcode, open_opcode));
            }
            if payload_bytes > 0 && header.stag != open_stag {
                return Err(refusal(
                    TerminateCause::DdpInvalidStag,
                    "the STag changed inside a message",
                ));
            }
        }
        if opcode == RdmapOpcode::ReadResponse {
            return judge_read_response(header, payload_bytes, state);
        }
        if payload_bytes == 0 {
            return Ok(Placement::Nothing); // its STag and TO are not checked (RFC 5041 5.2)
        }
        let span = memory.place(header.stag, header.to, payload_bytes)?;
        Ok(Placement::Tagged {
            stag: header.stag,
            to: header.to,
            span,
        })
    }

    fn commit_tagged(
        &mut self,
        header: &TaggedHeader,
        opcode: RdmapOpcode,
        payload_bytes: u32,
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<(), PeerMisbehaved> {
        if opcode == RdmapOpcode::ReadResponse {
            commit_read_response(header.last, payload_bytes, state, memory)?;
        }
        if header.last {
            self.open_tagged = None;
        } else if self.open_tagged.is_none() {
            self.open_tagged = Some((opcode, header.stag));
        }
        Ok(())
    }

    // --- untagged: all others ---

    fn judge_untagged(
        &self,
        header: &UntaggedHeader,
        opcode: RdmapOpcode,
        payload_bytes: u32,
        state: &StreamState,
    ) -> Result<Placement, PeerMisbehaved> {
        let expected = self.expected_msn.get(header.qn as usize).copied().unwrap_or_default();
        if header.msn != expected {
            let (msn, qn) = (header.msn, header.qn);
            return Err(refusal(
                TerminateCause::DdpMsnOutOfRange,
                format!("MSN {msn} came on queue {qn}, {expected} is next"),
            ));
        }
        if opcode == RdmapOpcode::Terminate {
            // may cut a Send short
            if header.mo != 0 || !header.last {
                return Err(refusal(
                    TerminateCause::DdpInvalidMo,
                    "a Terminate is one segment (RFC 5040 4.8)",
                ));
            }
            return Ok(Placement::Control);
        }
        if let Some(open) = self.open_send
            && opcode != open
        {
            return Err(inside_another(opcode, open));
        }
        let mo_due = if opcode.fixed_bytes().is_some() {
            0
        } else {
            self.send_bytes
        };
        if header.mo != mo_due {
            let mo = header.mo;
            return Err(refusal(
                TerminateCause::DdpInvalidMo,
                format!("MO {mo} came, {mo_due} is next"),
            ));
        }
        let Some(due) = opcode.fixed_bytes() else {
            return self.judge_send(header, opcode, payload_bytes, state);
        };
        if !header.last || payload_bytes as usize != due {
            // RFC 5040 and 7306 give no code for this.
            return Err(refusal(
                TerminateCause::RdmapUnspecified,
                format!(
                    "{} with {payload_bytes} octets came, it has {due} in one segment",
                    opcode.name()
                ),
            ));
        }
        Ok(Placement::Control)
    }

    /// The RTR indication has its MSN but is not the ULP's (RFC 6581 9.2, profile 3).
    fn is_rtr(&self, header: &UntaggedHeader, opcode: RdmapOpcode, payload_bytes: u32) -> bool {
        self.send_rtr_may_come && opcode == RdmapOpcode::Send && header.last && payload_bytes == 0
    }

    fn judge_send(
        &self,
        header: &UntaggedHeader,
        opcode: RdmapOpcode,
        payload_bytes: u32,
        state: &StreamState,
    ) -> Result<Placement, PeerMisbehaved> {
        if self.is_rtr(header, opcode, payload_bytes) {
            return Ok(Placement::Nothing);
        }
        let receive = state.receives.front().ok_or_else(no_receive_posted)?;
        let end = u64::from(header.mo) + u64::from(payload_bytes);
        if end > u64::from(receive.buffer.len) {
            let has = receive.buffer.len;
            return Err(refusal(
                TerminateCause::DdpMessageTooLong,
                format!("a Send of at least {end} octets came, the receive buffer has {has}"),
            ));
        }
        Ok(Placement::Posted(receive.buffer.part(header.mo, payload_bytes)))
    }

    fn commit_send(
        &mut self,
        header: &UntaggedHeader,
        opcode: RdmapOpcode,
        payload_bytes: u32,
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<(), PeerMisbehaved> {
        if self.is_rtr(header, opcode, payload_bytes) {
            self.delivered(QN_SEND);
            return Ok(());
        }
        let length = header.mo.saturating_add(payload_bytes);
        if !header.last {
            (self.open_send, self.send_bytes) = (Some(opcode), length);
            return Ok(());
        }
        let mut invalidated_stag = None;
        if opcode.is_invalidating() {
            // after placement, before delivery (RFC 5040 5.3)
            memory.invalidate(header.ulp_word)?;
            invalidated_stag = Some(header.ulp_word);
        }
        let receive = state.receives.pop_front().ok_or_else(no_receive_posted)?;
        (self.open_send, self.send_bytes) = (None, 0);
        let solicited = opcode.is_solicited();
        state.events.push_back(Event::Received {
            wr_id: receive.wr_id,
            length,
            invalidated_stag,
            solicited,
        });
        self.delivered(QN_SEND);
        Ok(())
    }

    fn commit_fixed(
        &mut self,
        queue: u32,
        opcode: RdmapOpcode,
        ulpdu: &[u8],
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
    ) -> Result<(), PeerMisbehaved> {
        let payload = ulpdu.get(DDP_UNTAGGED_HEADER_BYTES..).unwrap_or_default();
        match opcode {
            RdmapOpcode::ReadRequest => {
                check_ird(state)?;
                let request = ReadRequest::parse(payload.try_into().map_err(cut_short)?);
                let ulpdu = ulpdu.try_into().map_err(cut_short)?;
                state.owed.push_back(Owed::Read { request, ulpdu });
            }
            RdmapOpcode::AtomicRequest => {
                check_ird(state)?;
                let request = AtomicRequest::parse(payload.try_into().map_err(cut_short)?)?;
                let value = execute(&request, memory)?;
                state.owed.push_back(Owed::Atomic(AtomicResponse {
                    request_id: request.request_id,
                    value,
                }));
            }
            RdmapOpcode::AtomicResponse => {
                atomic_response(AtomicResponse::parse(payload.try_into().map_err(cut_short)?), state)?;
            }
            _ => {
                let data = payload.try_into().map_err(cut_short)?;
                let receive = state.receives.pop_front().ok_or_else(no_receive_posted)?;
                let solicited = opcode.is_solicited();
                state.events.push_back(Event::ImmediateReceived {
                    wr_id: receive.wr_id,
                    data,
                    solicited,
                });
            }
        }
        self.delivered(queue);
        Ok(())
    }

    fn delivered(&mut self, queue: u32) {
        if let Some(msn) = self.expected_msn.get_mut(queue as usize) {
            *msn = msn.wrapping_add(1);
        }
    }
}

/// Responses come in the order of the requests (RFC 5040 5.5 rule 20): only the oldest one's sink is open.
fn judge_read_response(
    header: &TaggedHeader,
    payload_bytes: u32,
    state: &StreamState,
) -> Result<Placement, PeerMisbehaved> {
    let read = oldest_read(state)?;
    if payload_bytes == 0 {
        return Ok(Placement::Nothing);
    }
    if Some(header.stag) != read.sink_stag {
        return Err(refusal(
            TerminateCause::DdpInvalidStag,
            format!("a Read Response came for STag {:#010x}, not the one due", header.stag),
        ));
    }
    let (start, due) = (read.placed_bytes, read.sink_bytes() - read.placed_bytes);
    if header.to != u64::from(start) || payload_bytes > due {
        return Err(refusal(
            TerminateCause::DdpBaseOrBounds,
            format!(
                "{payload_bytes} octets came for TO {}, {due} are due at TO {start}",
                header.to
            ),
        ));
    }
    Ok(read.sink.map_or(Placement::Nothing, |sink| {
        Placement::Posted(sink.part(start, payload_bytes))
    }))
}

fn commit_read_response(
    last: bool,
    payload_bytes: u32,
    state: &mut StreamState,
    memory: &mut dyn StreamMemory,
) -> Result<(), PeerMisbehaved> {
    let Some(Awaiting::Read(read)) = state.awaiting.front_mut() else {
        return Err(no_read_due());
    };
    read.placed_bytes += payload_bytes;
    if !last {
        return Ok(());
    }
    let read = *read;
    if read.placed_bytes != read.sink_bytes() {
        return Err(refusal(
            TerminateCause::DdpBaseOrBounds,
            format!(
                "a Read Response ended after {} of {} octets",
                read.placed_bytes,
                read.sink_bytes()
            ),
        ));
    }
    state.awaiting.pop_front();
    return_sink(&read, memory);
    state.complete(
        read.id,
        Done::Read {
            length: read.placed_bytes,
        },
    );
    Ok(())
}

fn oldest_read(state: &StreamState) -> Result<&OpenRead, PeerMisbehaved> {
    match state.awaiting.front() {
        Some(Awaiting::Read(read)) => Ok(read),
        _ => Err(no_read_due()),
    }
}

fn check_ird(state: &StreamState) -> Result<(), PeerMisbehaved> {
    let ird = state.negotiated.ird;
    if state.owed.len() < usize::from(ird) {
        return Ok(());
    }
    // To DDP this is a message on queue 1 without a buffer (RFC 5040 6.1, RFC 5042 6.4.3.3).
    Err(refusal(
        TerminateCause::DdpNoBuffer,
        format!("a Read or Atomic Request came while {ird} (IRD) are being answered"),
    ))
}

fn execute(request: &AtomicRequest, memory: &mut dyn StreamMemory) -> Result<u64, PeerMisbehaved> {
    let mut operate = |old| match request.operation {
        AtomicOperation::FetchAdd => fetch_add(old, request.data, request.mask),
        AtomicOperation::CompareSwap => compare_swap(
            old,
            request.data,
            request.mask,
            request.compare_data,
            request.compare_mask,
        ),
    };
    memory.atomic(request.stag, request.to, &mut operate)
}

fn atomic_response(response: AtomicResponse, state: &mut StreamState) -> Result<(), PeerMisbehaved> {
    let Some(&Awaiting::Atomic { id, request_id }) = state.awaiting.front() else {
        // No atomic is outstanding as the oldest request, so queue 3 has no buffer for this (RFC 7306 5.2.2).
        return Err(refusal(
            TerminateCause::DdpNoBuffer,
            "an Atomic Response came that no request asked for next",
        ));
    };
    if response.request_id != request_id {
        let came = response.request_id;
        return Err(refusal(
            TerminateCause::RdmapUnspecified,
            format!("an Atomic Response for request {came:#x} came, {request_id:#x} is next"),
        ));
    }
    state.awaiting.pop_front();
    state.complete(id, Done::Atomic { value: response.value });
    Ok(())
}

fn refusal(cause: TerminateCause, message: impl Into<String>) -> PeerMisbehaved {
    PeerMisbehaved::new(cause, message)
}

fn inside_another(opcode: RdmapOpcode, open: RdmapOpcode) -> PeerMisbehaved {
    refusal(
        TerminateCause::RdmapUnexpectedOpcode,
        format!("{} came inside a message of {}", opcode.name(), open.name()),
    )
}

fn no_receive_posted() -> PeerMisbehaved {
    refusal(
        TerminateCause::DdpNoBuffer,
        "a message came but no receive buffer is posted",
    )
}

fn no_read_due() -> PeerMisbehaved {
    refusal(
        TerminateCause::DdpInvalidStag,
        "a Read Response came that no request asked for next",
    )
}

/// Not reached: what is taken apart here had its size judged.
fn cut_short(_: TryFromSliceError) -> PeerMisbehaved {
    refusal(TerminateCause::RdmapUnspecified, "a message is not of its size")
}
