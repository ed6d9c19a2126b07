//! The sending half of a stream: posted work and owed responses become messages, segments and FPDUs.
//!
//! One message is under way at a time. Posted work keeps its order, and so do responses; the two take turns, so that
//! neither a peer that reads nor a caller that writes without pause holds the other up. A Read or an atomic that finds
//! ORD requests outstanding waits, and everything posted after it waits behind it (RFC 5040 5.5 rule 13).

use std::collections::VecDeque;

use super::frame::{Framer, Outgoing};
use super::state::StreamState;
use super::watched::Watched;
use super::work::{Awaiting, Gather, Job, OpenRead, Owed, What, WorkId};
use crate::ddp::{Cut, Segment, TaggedHeader, UntaggedHeader, cut, pack_tagged, pack_untagged};
use crate::limits::{
    DDP_TAGGED_HEADER_BYTES, DDP_UNTAGGED_HEADER_BYTES, MULPDU_MIN_BYTES, PADDED_PAYLOAD_MAX_BYTES, ULPDU_MAX_BYTES,
};
use crate::memory::{Octets, StreamMemory};
use crate::mpa::RtrKind;
use crate::rdmap::{QN_ATOMIC_RESPONSE, QN_REQUEST, QN_SEND, QN_TERMINATE, RdmapOpcode, ReadRequest, control_octet};
use crate::terminate::Offender;
use crate::types::PeerMisbehaved;

/// A lent STag names one sink, counted from its first octet.
const SINK_TO: u64 = 0;

/// The message under way.
#[derive(Debug)]
struct Message {
    body: Body,
    segments: Cut,
    finish: Finish,
}

#[derive(Debug)]
enum Body {
    Untagged {
        opcode: RdmapOpcode,
        ulp_word: u32,
        queue: u32,
        msn: u32,
        payload: Gather,
    },
    Write {
        stag: u32,
        to: u64,
        payload: Gather,
    },
    ReadResponse(ReadRequest),
}

/// What happens when the last FPDU of a message is built.
#[derive(Clone, Copy, Debug)]
enum Finish {
    /// The work completes when that FPDU was sent.
    Work(Option<WorkId>),
    /// The IRD slot is free, and the next response may begin.
    Owed,
    /// A request is not finished when it has left: its response finishes it.
    Nothing,
}

#[derive(Debug)]
pub(super) struct Outbound {
    framer: Framer,
    queue: VecDeque<Job>,
    message: Option<Message>,
    response_is_due: bool,
    next_msn: [u32; 4],
    next_request_id: u32,
    mulpdu: u32,
    padded_max_bytes: u32,
}

impl Outbound {
    pub(super) fn new(state: &StreamState, mulpdu: u32, first_msn: [u32; 4]) -> Self {
        let pad_stands_alone = state.negotiated.pad_stands_alone();
        let mut outbound = Self {
            framer: Framer::new(&state.negotiated),
            queue: VecDeque::new(),
            message: None,
            response_is_due: true,
            next_msn: first_msn,
            next_request_id: 0,
            mulpdu: 0,
            padded_max_bytes: if pad_stands_alone {
                PADDED_PAYLOAD_MAX_BYTES
            } else {
                u32::MAX
            },
        };
        outbound.set_mulpdu(mulpdu);
        if state.active
            && let Some(what) = ready_to_receive(state.negotiated.rtr)
        {
            outbound.queue.push_back(Job { id: None, what });
        }
        outbound
    }

    pub(super) fn set_mulpdu(&mut self, mulpdu: u32) {
        self.mulpdu = mulpdu.clamp(MULPDU_MIN_BYTES, ULPDU_MAX_BYTES);
    }

    pub(super) fn keep_sources_still(&mut self) {
        self.framer.keep_sources_still();
    }

    pub(super) fn post(&mut self, id: WorkId, what: What) {
        self.queue.push_back(Job { id: Some(id), what });
    }

    /// Forget what has not left; the work itself is flushed by the state.
    pub(super) fn drop_work(&mut self) {
        self.queue.clear();
        self.message = None;
    }

    pub(super) fn wants_to_send(&self, state: &StreamState) -> bool {
        if state.failed {
            return state.terminate_payload.is_some();
        }
        state.may_send && (self.message.is_some() || !state.owed.is_empty() || self.may_begin_work(state))
    }

    /// Append the next FPDU to `out`; false if nothing may be sent now.
    pub(super) fn build_fpdu(
        &mut self,
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
        octets: &dyn Octets,
        out: &mut Outgoing,
    ) -> bool {
        if !state.failed {
            if !state.may_send {
                return false;
            }
            if self.message.is_none() {
                self.message = self.begin_message(state, memory);
            }
            match self.next_segment(state, memory, octets, out) {
                None => return false,
                Some(Ok(())) => return true,
                Some(Err((error, offender))) => state.fail(error, offender.as_ref()),
            }
        }
        self.build_terminate(state, out)
    }

    /// None if no message is under way.
    fn next_segment(
        &mut self,
        state: &mut StreamState,
        memory: &mut dyn StreamMemory,
        octets: &dyn Octets,
        out: &mut Outgoing,
    ) -> Option<Result<(), (PeerMisbehaved, Option<Offender>)>> {
        let message = self.message.as_mut()?;
        let segment = message.segments.next()?;
        let built = message
            .body
            .build(segment, &mut self.framer, &mut state.watched, memory, octets, out);
        if let Err((error, left)) = built {
            return Some(Err((error, offender_of(state.owed.front(), &left))));
        }
        if segment.last {
            match message.finish {
                Finish::Work(id) => id.into_iter().for_each(|id| out.completes(id)),
                Finish::Owed => drop(state.owed.pop_front()),
                Finish::Nothing => {}
            }
            self.message = None;
        }
        Some(Ok(()))
    }

    /// RFC 5040 4.8: queue 2, MSN 1, one segment; nothing follows it.
    fn build_terminate(&mut self, state: &mut StreamState, out: &mut Outgoing) -> bool {
        self.message = None;
        let Some(payload) = state.terminate_payload.take() else {
            return false;
        };
        let msn = self.take_msn(QN_TERMINATE);
        let control = control_octet(RdmapOpcode::Terminate);
        let header = pack_untagged(&UntaggedHeader {
            control,
            ulp_word: 0,
            qn: QN_TERMINATE,
            msn,
            mo: 0,
            last: true,
        });
        let append = |own: &mut Vec<u8>| own.extend_from_slice(&payload);
        self.framer.copied(&header, payload.len() as u32, out, None, append);
        true
    }

    // --- which message is next ---

    fn may_begin_work(&self, state: &StreamState) -> bool {
        match self.queue.front() {
            None => false,
            Some(Job {
                id: Some(_),
                what: What::Read { .. } | What::Atomic(_),
            }) => state.awaiting.len() < usize::from(state.negotiated.ord),
            Some(_) => true,
        }
    }

    fn begin_message(&mut self, state: &mut StreamState, memory: &mut dyn StreamMemory) -> Option<Message> {
        let may_begin_work = self.may_begin_work(state);
        if (self.response_is_due || !may_begin_work)
            && let Some(response) = self.begin_response(state)
        {
            self.response_is_due = false;
            return Some(response);
        }
        if !may_begin_work {
            return None;
        }
        self.response_is_due = true;
        let job = self.queue.pop_front()?;
        Some(self.begin_work(job, state, memory))
    }

    fn begin_response(&mut self, state: &StreamState) -> Option<Message> {
        match state.owed.front()? {
            Owed::Read { request, .. } => Some(Message {
                segments: self.cut(request.size, DDP_TAGGED_HEADER_BYTES),
                body: Body::ReadResponse(*request),
                finish: Finish::Owed,
            }),
            Owed::Atomic(response) => {
                let payload = Gather::of_octets(&response.pack());
                Some(self.untagged(
                    RdmapOpcode::AtomicResponse,
                    QN_ATOMIC_RESPONSE,
                    payload,
                    0,
                    Finish::Owed,
                ))
            }
        }
    }

    fn begin_work(&mut self, job: Job, state: &mut StreamState, memory: &mut dyn StreamMemory) -> Message {
        let id = job.id;
        match job.what {
            What::Send {
                opcode,
                ulp_word,
                payload,
            } => self.untagged(opcode, QN_SEND, payload, ulp_word, Finish::Work(id)),
            What::Write { payload, stag, to } => Message {
                segments: self.cut(payload.length_bytes(), DDP_TAGGED_HEADER_BYTES),
                body: Body::Write { stag, to, payload },
                finish: Finish::Work(id),
            },
            What::Read {
                sink,
                source_stag,
                source_to,
            } => {
                let sink_stag = id.map(|_| memory.lend_sink_stag());
                let read = OpenRead {
                    id,
                    sink,
                    sink_stag,
                    placed_bytes: 0,
                };
                state.awaiting.push_back(Awaiting::Read(read));
                let request = ReadRequest {
                    sink_stag: sink_stag.unwrap_or(0),
                    sink_to: SINK_TO,
                    size: read.sink_bytes(),
                    source_stag,
                    source_to,
                };
                self.request(RdmapOpcode::ReadRequest, &request.pack())
            }
            What::Atomic(mut request) => {
                request.request_id = self.next_request_id;
                self.next_request_id = self.next_request_id.wrapping_add(1);
                state.awaiting.push_back(Awaiting::Atomic {
                    id,
                    request_id: request.request_id,
                });
                self.request(RdmapOpcode::AtomicRequest, &request.pack())
            }
        }
    }

    fn request(&mut self, opcode: RdmapOpcode, payload: &[u8]) -> Message {
        self.untagged(opcode, QN_REQUEST, Gather::of_octets(payload), 0, Finish::Nothing)
    }

    fn untagged(&mut self, opcode: RdmapOpcode, queue: u32, payload: Gather, ulp_word: u32, finish: Finish) -> Message {
        Message {
            segments: self.cut(payload.length_bytes(), DDP_UNTAGGED_HEADER_BYTES),
            body: Body::Untagged {
                opcode,
                ulp_word,
                queue,
                msn: self.take_msn(queue),
                payload,
            },
            finish,
        }
    }

    /// RFC 5041 5.2, by the MULPDU of now.
    fn cut(&self, message_bytes: u32, header_bytes: usize) -> Cut {
        let segment_bytes = self.mulpdu.saturating_sub(header_bytes as u32);
        cut(message_bytes, segment_bytes, self.padded_max_bytes)
    }

    fn take_msn(&mut self, queue: u32) -> u32 {
        let next = &mut self.next_msn[queue as usize & 3];
        let msn = *next;
        *next = msn.wrapping_add(1);
        msn
    }
}

impl Body {
    /// Append the FPDU of a segment. The error is that of a Read whose source is refused, with what was left of it.
    fn build(
        &mut self,
        segment: Segment,
        framer: &mut Framer,
        watched: &mut Watched,
        memory: &mut dyn StreamMemory,
        octets: &dyn Octets,
        out: &mut Outgoing,
    ) -> Result<(), (PeerMisbehaved, ReadRequest)> {
        let Segment { offset, size, last } = segment;
        match self {
            Self::Untagged {
                opcode,
                ulp_word,
                queue,
                msn,
                payload,
            } => {
                let (control, ulp_word, qn, msn) = (control_octet(*opcode), *ulp_word, *queue, *msn);
                let header = pack_untagged(&UntaggedHeader {
                    control,
                    ulp_word,
                    qn,
                    msn,
                    mo: offset,
                    last,
                });
                framer.gather(&header, payload, size, octets, out);
            }
            Self::Write { stag, to, payload } => {
                let (control, to) = (control_octet(RdmapOpcode::Write), to.wrapping_add(offset.into()));
                let header = pack_tagged(&TaggedHeader {
                    control,
                    stag: *stag,
                    to,
                    last,
                });
                framer.gather(&header, payload, size, octets, out);
            }
            Self::ReadResponse(request) => {
                let left = request.advanced(offset);
                let control = control_octet(RdmapOpcode::ReadResponse);
                let header = pack_tagged(&TaggedHeader {
                    control,
                    stag: left.sink_stag,
                    to: left.sink_to,
                    last,
                });
                if size == 0 {
                    framer.copied(&header, 0, out, None, |_| {}); // looks at no STag (RFC 5040 5.2.1)
                    return Ok(());
                }
                // The source is looked up before each segment, for all that is left: a revoked STag gives nothing more
                // away. Unless its owner keeps it still it is copied, for nobody tells the owner how long it is being
                // read, and what was built must be what its CRC says.
                let source = match memory.read_source(left.source_stag, left.source_to, left.size) {
                    Ok(source) => source.part(0, size),
                    Err(error) => return Err((error, left)),
                };
                let apart = (!watched.is_empty()).then(|| watched.shift(size));
                let crc = framer.lent(&header, source, octets, out, apart);
                watched.read(left.source_stag, left.source_to, size, crc);
            }
        }
        Ok(())
    }
}

fn offender_of(owed: Option<&Owed>, left: &ReadRequest) -> Option<Offender> {
    match owed {
        Some(Owed::Read { ulpdu, .. }) => Offender::of(ulpdu.len() as u16, ulpdu, Some(left.pack())),
        _ => None,
    }
}

/// RFC 6581 9.2: one zero-length message of the chosen kind before all else.
fn ready_to_receive(kind: RtrKind) -> Option<What> {
    let payload = Gather::of_octets(&[]);
    match kind {
        RtrKind::SEND => Some(What::Send {
            opcode: RdmapOpcode::Send,
            ulp_word: 0,
            payload,
        }),
        RtrKind::WRITE => Some(What::Write {
            payload,
            stag: 0,
            to: 0,
        }),
        RtrKind::READ => Some(What::Read {
            sink: None,
            source_stag: 0,
            source_to: 0,
        }),
        _ => None,
    }
}
