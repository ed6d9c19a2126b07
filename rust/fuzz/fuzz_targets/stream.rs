//! One RDMAP stream against a peer that sends anything, while its owner posts, sends, revokes and ends.
//!
//! An input is three octets of options and then commands, see `Command`. Each is executed twice, once with octets whole
//! and once in pieces and read straight to where they belong: both must come to the same. The peer's octets may be raw, or
//! a ULPDU that is framed with a right CRC and markers, so that what lies behind the CRC is reached; that ULPDU is any, or
//! what an honest peer might say, see `talk`.
#![no_main]

#[allow(dead_code)]
#[path = "../../crates/kbtp-proto/tests/stream/peer.rs"]
mod peer;
mod script;
mod talk;

use kbtp_proto::fpdu::FpduEncoder;
use kbtp_proto::mpa::{Negotiated, RtrKind};
use kbtp_proto::stream::{Event, Inline, Payload, Piece, PostError, Work, WrKind};
use kbtp_proto::types::TerminateCause;
use libfuzzer_sys::fuzz_target;

use peer::{BASE_TO, End, Memory, STAG, negotiated};
use script::Script;
use talk::Talk;

/// A script cannot ask for more of it, so that each ends soon.
const FILLER_MAX_BYTES: usize = 1 << 15;

#[derive(Clone, Debug)]
enum Command {
    Hear { octets: Vec<u8>, piece_bytes: usize },
    PostReceive { length_bytes: usize },
    Post(Want),
    Send { fpdus: usize },
    SetMulpdu(u32),
    Revoke,
    Terminate,
    Eof,
}

#[derive(Clone, Copy, Debug)]
enum Want {
    Send { length_bytes: usize, invalidate: bool },
    Write { length_bytes: usize, inline: bool },
    Read { length_bytes: usize },
    FetchAdd,
    CompareSwap,
    Immediate,
}

struct Options {
    negotiated: Negotiated,
    active: bool,
    mulpdu: u32,
    first_msn: Option<[u32; 4]>,
    still: bool,
}

impl Options {
    fn of(script: &mut Script) -> Self {
        let (bits, depths, more) = (script.octet(), script.octet(), script.octet());
        let bit = |n: u8| bits >> n & 1 == 1;
        let rtr = [RtrKind::empty(), RtrKind::SEND, RtrKind::WRITE, RtrKind::READ][usize::from(bits >> 4 & 3)];
        Self {
            negotiated: Negotiated {
                crc: bit(0),
                tx_markers: bit(1),
                rx_markers: bit(2),
                ird: u16::from(depths & 7),
                ord: u16::from(depths >> 4 & 7),
                rtr,
                failure: (more & 0xF0 == 0xF0).then_some(TerminateCause::MpaInsufficientIrd),
                ..negotiated()
            },
            active: bit(3),
            mulpdu: [128, 1454, 8192, 64768][usize::from(more & 3)],
            first_msn: (more & 4 != 0).then_some([u32::MAX; 4]),
            still: bit(6),
        }
    }
}

fn commands(script: &mut Script, options: &Options) -> Vec<Command> {
    let mut encoder = FpduEncoder::new(options.negotiated.crc, options.negotiated.rx_markers);
    let mut talk = Talk::new(options.first_msn);
    let mut filler_left = FILLER_MAX_BYTES;
    let mut commands = Vec::new();
    while !script.is_over() {
        commands.push(match script.octet() % 16 {
            0..2 => {
                let piece_bytes = 1 + script.below(64);
                let length = usize::from(script.octet());
                Command::Hear {
                    octets: script.octets(length).to_vec(),
                    piece_bytes,
                }
            }
            2..5 => {
                let piece_bytes = 1 + usize::from(wide(script)) % 9000;
                let mut octets = Vec::new();
                encoder.encode(&[&talk.next(script)], &mut octets);
                Command::Hear { octets, piece_bytes }
            }
            5..7 => {
                let (piece_bytes, filler_bytes) = (1 + usize::from(wide(script)) % 9000, usize::from(script.octet()));
                let length = usize::from(script.octet());
                let mut ulpdu = script.octets(length).to_vec();
                let filler_bytes = (filler_bytes * 251).min(filler_left);
                filler_left -= filler_bytes;
                ulpdu.resize((ulpdu.len() + filler_bytes).min(64768), 0x5A);
                let mut octets = Vec::new();
                encoder.encode(&[&ulpdu], &mut octets);
                Command::Hear { octets, piece_bytes }
            }
            7..9 => Command::PostReceive {
                length_bytes: 128 * usize::from(script.octet()),
            },
            9..12 => {
                let want = want(script);
                if let Want::Read { length_bytes } = want {
                    talk.read_is_posted(length_bytes);
                }
                Command::Post(want)
            }
            12 => Command::Send {
                fpdus: usize::from(script.octet()),
            },
            13 => Command::SetMulpdu(u32::from(wide(script))),
            14 => Command::Revoke,
            _ => [Command::Terminate, Command::Eof, Command::Revoke][script.below(3)].clone(),
        });
    }
    commands
}

fn wide(script: &mut Script) -> u16 {
    u16::from_be_bytes([script.octet(), script.octet()])
}

fn want(script: &mut Script) -> Want {
    let (kind, length_bytes) = (script.octet(), 96 * usize::from(script.octet()));
    match kind % 8 {
        0 | 1 => Want::Send {
            length_bytes,
            invalidate: kind & 8 != 0,
        },
        2 | 3 => Want::Write {
            length_bytes,
            inline: kind & 8 != 0,
        },
        4 | 5 => Want::Read { length_bytes },
        6 => Want::Immediate,
        _ if kind & 8 != 0 => Want::FetchAdd,
        _ => Want::CompareSwap,
    }
}

/// A stream, and what is known to come out of it.
struct Run {
    end: End,
    in_pieces: bool,
    next_wr_id: u64,
    posted: Vec<u64>,
    receives: Vec<u64>,
    events: Vec<Event>,
    fpdus: Vec<Vec<u8>>,
    half_received: bool,
}

impl Run {
    fn new(options: &Options, in_pieces: bool) -> Self {
        let end = End::new(
            options.negotiated.clone(),
            options.active,
            options.mulpdu,
            options.first_msn,
        );
        end.memory.0.borrow_mut().still = options.still;
        let mut run = Self {
            end,
            in_pieces,
            next_wr_id: 1,
            posted: Vec::new(),
            receives: Vec::new(),
            events: Vec::new(),
            fpdus: Vec::new(),
            half_received: false,
        };
        run.take_events();
        run
    }

    fn execute(&mut self, command: &Command) {
        match command {
            Command::Hear { octets, piece_bytes } if self.in_pieces => self.hear_in_pieces(octets, *piece_bytes),
            Command::Hear { octets, .. } => self.end.take(octets),
            Command::PostReceive { length_bytes } => {
                let buffer = self.end.memory.span(vec![0; *length_bytes]);
                self.next_wr_id += 1;
                let result = self.end.stream.post_receive(self.next_wr_id, buffer);
                assert_eq!(result.is_err(), self.end.stream.failed());
                if result.is_ok() {
                    self.receives.push(self.next_wr_id);
                }
            }
            Command::Post(want) => self.post(*want),
            Command::Send { fpdus } => (0..*fpdus).for_each(|_| self.send_next()),
            Command::SetMulpdu(mulpdu) => self.end.stream.set_mulpdu(*mulpdu),
            Command::Revoke => self.end.memory.revoke(STAG),
            Command::Terminate => self.end.stream.terminate(TerminateCause::RdmapCatastrophicStream),
            Command::Eof => self.half_received |= !self.end.stream.receive_eof(),
        }
        self.take_events();
    }

    /// As an event loop does: straight to where they belong if the stream says so, else through a staging buffer.
    fn hear_in_pieces(&mut self, mut octets: &[u8], piece_bytes: usize) {
        while !octets.is_empty() {
            let (piece, rest) = octets.split_at(piece_bytes.min(octets.len()));
            let direct = self.end.stream.direct(&mut self.end.memory);
            let direct_bytes = direct.map_or(0, |span| span.len as usize).min(piece.len());
            if let Some(span) = direct {
                self.end
                    .memory
                    .copy_in(span.part(0, direct_bytes as u32), &piece[..direct_bytes]);
                self.end.stream.direct_received(direct_bytes as u32, &self.end.memory);
            }
            self.end.take(&piece[direct_bytes..]);
            octets = rest;
        }
    }

    fn post(&mut self, want: Want) {
        self.next_wr_id += 1;
        let wr_id = self.next_wr_id;
        let memory = &self.end.memory;
        let span = |length_bytes| memory.span((0..length_bytes).map(|n| n as u8).collect());
        let payload = |length_bytes| Payload::from_iter([Piece::Span(span(length_bytes)), Piece::Span(span(3))]);
        let needs_ord = matches!(want, Want::Read { .. } | Want::FetchAdd | Want::CompareSwap);
        let work = match want {
            Want::Send {
                length_bytes,
                invalidate,
            } => {
                let invalidate_stag = invalidate.then_some(7);
                Work::Send {
                    wr_id,
                    payload: payload(length_bytes),
                    invalidate_stag,
                    solicited: length_bytes == 96,
                }
            }
            Want::Write {
                length_bytes,
                inline: false,
            } => Work::Write {
                wr_id,
                payload: payload(length_bytes),
                stag: STAG,
                to: u64::MAX - 5,
            },
            Want::Write {
                length_bytes,
                inline: true,
            } => {
                let octets = Piece::Inline(Inline::from_elem(9, length_bytes));
                let payload = Payload::from_iter([octets, Piece::Span(span(length_bytes))]);
                Work::Write {
                    wr_id,
                    payload,
                    stag: STAG,
                    to: BASE_TO,
                }
            }
            Want::Read { length_bytes } => Work::Read {
                wr_id,
                sink: span(length_bytes),
                source_stag: STAG,
                source_to: BASE_TO,
            },
            Want::FetchAdd => Work::FetchAdd {
                wr_id,
                stag: STAG,
                to: BASE_TO,
                add_data: 1,
                add_mask: 0,
            },
            Want::CompareSwap => {
                let (swap_data, compare_data) = (1, 2);
                let (swap_mask, compare_mask) = (u64::MAX, u64::MAX);
                Work::CompareSwap {
                    wr_id,
                    stag: STAG,
                    to: BASE_TO,
                    swap_data,
                    swap_mask,
                    compare_data,
                    compare_mask,
                }
            }
            Want::Immediate => Work::Immediate {
                wr_id,
                data: [7; 8],
                solicited: wr_id % 2 == 0,
            },
        };
        match self.end.stream.post(work) {
            Ok(()) => self.posted.push(wr_id),
            Err(PostError::OrdIsZero) => assert!(needs_ord),
            Err(error) => assert!(error == PostError::Ended && self.end.stream.failed()),
        }
    }

    fn send_next(&mut self) {
        let (wanted, failed) = (self.end.stream.wants_to_send(), self.end.stream.failed());
        let sent = self.end.send_next();
        assert!(wanted || sent.is_none());
        // A response whose source is refused still leaves a Terminate to send.
        assert!(sent.is_some() || !wanted);
        assert!(!failed || sent.is_none() || self.end.stream.terminate_sent());
        self.fpdus.extend(sent);
        self.take_events();
    }

    /// Completions in the order of posting, deliveries in the order of receives, nothing after the end.
    fn take_events(&mut self) {
        for event in self.end.events() {
            assert!(!self.events.iter().any(is_end), "{event:?} after {:?}", self.events);
            let (completed, received) = match event {
                Event::SendCompleted { wr_id }
                | Event::WriteCompleted { wr_id }
                | Event::ImmediateCompleted { wr_id }
                | Event::ReadCompleted { wr_id, .. }
                | Event::AtomicCompleted { wr_id, .. } => (Some(wr_id), None),
                Event::Received { wr_id, .. } | Event::ImmediateReceived { wr_id, .. } => (None, Some(wr_id)),
                Event::TerminateReceived { .. } | Event::Failed { .. } => (None, None),
            };
            completed
                .into_iter()
                .for_each(|wr_id| assert_eq!(self.posted.remove(0), wr_id));
            received
                .into_iter()
                .for_each(|wr_id| assert_eq!(self.receives.remove(0), wr_id));
            assert!(!is_end(&event) || self.end.stream.failed());
            self.events.push(event);
        }
        assert_eq!(self.end.stream.outstanding(), self.posted.len());
    }

    /// All that may still leave does, and every post is accounted for.
    fn finish(&mut self) {
        while self.end.stream.wants_to_send() {
            self.send_next();
        }
        self.send_next();
        let stream = &mut self.end.stream;
        let failures = self
            .events
            .iter()
            .filter(|event| matches!(event, Event::Failed { .. }))
            .count();
        assert!(failures == 0 || stream.terminate_sent());
        assert_eq!(stream.failed(), stream.ended());
        let flushed = stream.flush(&mut self.end.memory);
        let outstanding = self.posted.iter().chain(&self.receives);
        assert!(flushed.iter().map(|flushed| &flushed.wr_id).eq(outstanding));
        let receives = flushed.iter().skip(self.posted.len());
        assert!(receives.into_iter().all(|flushed| flushed.kind == WrKind::Receive));
        assert!(self.end.memory.0.borrow().lent.is_empty());
        assert!(self.end.next_fpdu().is_none() && self.end.stream.direct(&mut self.end.memory).is_none());
    }
}

fn is_end(event: &Event) -> bool {
    matches!(event, Event::Failed { .. } | Event::TerminateReceived { .. })
}

/// At most one Terminate, and nothing behind it. Without markers, where the opcode is easy to find.
fn check_terminates(options: &Options, fpdus: &[Vec<u8>]) {
    let is_terminate = |fpdu: &Vec<u8>| fpdu[2] & 0x80 == 0 && fpdu[3] & 0xF == peer::wire::TERMINATE;
    if !options.negotiated.tx_markers {
        fpdus
            .iter()
            .for_each(|fpdu| drop(peer::wire::see(fpdu, options.negotiated.crc)));
        let first = fpdus.iter().position(is_terminate);
        assert!(first.is_none_or(|at| at == fpdus.len() - 1));
    }
}

fn memory_of(memory: &Memory) -> Vec<Vec<u8>> {
    memory.0.borrow().octets.clone()
}

fuzz_target!(|data: &[u8]| {
    let mut script = Script::new(data);
    let options = Options::of(&mut script);
    let commands = commands(&mut script, &options);
    let mut runs = [false, true].map(|in_pieces| Run::new(&options, in_pieces));
    for run in &mut runs {
        commands.iter().for_each(|command| run.execute(command));
        run.finish();
        check_terminates(&options, &run.fpdus);
    }
    let [whole, pieces] = runs;
    assert_eq!(whole.events, pieces.events);
    assert_eq!(whole.fpdus, pieces.fpdus);
    assert_eq!(whole.half_received, pieces.half_received);
    // The payload of a long FPDU is placed before its CRC is known, as far as it has come (see `intake`).
    if !whole.end.stream.failed() || !whole.events.iter().any(is_end) {
        assert_eq!(memory_of(&whole.end.memory), memory_of(&pieces.end.memory));
    }
});
