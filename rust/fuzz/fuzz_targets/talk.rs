//! What a peer that knows the protocol may say next, so that scripts get far; one octet of it may then be wrong.

use std::collections::VecDeque;

use crate::peer::wire::{self, Untagged};
use crate::peer::{BASE_TO, STAG};
use crate::script::Script;

/// As `peer::Memory` lends them.
const FIRST_SINK_STAG: u32 = 0xABCD_0001;
const SINK_STAG_STEP: u32 = 0x1111;

pub(crate) struct Talk {
    send_msn: u32,
    send_mo: u32,
    request_msn: u32,
    response_msn: u32,
    /// Octets that each Read of the stream's asks for, from the oldest on that is not answered.
    reads: VecDeque<u32>,
    sink_stag: u32,
    sink_to: u32,
    request_id: u32,
}

impl Talk {
    pub(crate) fn new(first_msn: Option<[u32; 4]>) -> Self {
        let [send_msn, request_msn, _, response_msn] = first_msn.unwrap_or([1; 4]);
        Self {
            send_msn,
            send_mo: 0,
            request_msn,
            response_msn,
            reads: VecDeque::new(),
            sink_stag: FIRST_SINK_STAG,
            sink_to: 0,
            request_id: 0,
        }
    }

    /// The stream will ask for `length_bytes` octets.
    pub(crate) fn read_is_posted(&mut self, length_bytes: usize) {
        self.reads.push_back(length_bytes as u32);
    }

    pub(crate) fn next(&mut self, script: &mut Script) -> Vec<u8> {
        let (kind, size) = (script.octet(), script.octet());
        let last = kind & 0x40 == 0;
        let mut ulpdu = match kind % 8 {
            0 | 1 => self.send(kind & 0x20 != 0, last, &vec![kind; 67 * usize::from(size)]),
            2 => wire::tagged(
                wire::WRITE,
                STAG,
                BASE_TO + u64::from(size),
                last,
                &vec![kind; usize::from(255 - size)],
            ),
            3 => wire::read_request(take(&mut self.request_msn), size.into(), STAG, BASE_TO),
            4 => {
                let (operation, to) = (u32::from(size & 1), BASE_TO + u64::from(size & 0xF8));
                let operands = [size.into(), u64::MAX, 0, u64::MAX];
                wire::atomic_request(take(&mut self.request_msn), operation, 5, STAG, to, operands)
            }
            5 => self.read_response(last, size),
            6 => wire::atomic_response(take(&mut self.response_msn), take(&mut self.request_id), 7),
            _ if size == 255 => wire::on_queue(wire::TERMINATE, 2, self.response_msn, &[0x11, 0x03, 0xE0, 0]),
            _ => wire::on_queue(wire::IMM, 0, take(&mut self.send_msn), &[size; 8]),
        };
        if kind & 0x80 != 0 {
            let at = usize::from(script.octet()) % ulpdu.len();
            ulpdu[at] ^= script.octet();
        }
        ulpdu
    }

    fn send(&mut self, invalidate: bool, last: bool, payload: &[u8]) -> Vec<u8> {
        let opcode = if invalidate { wire::SEND_INV } else { wire::SEND };
        let (qn, msn, mo) = (0, self.send_msn, self.send_mo);
        self.send_mo += payload.len() as u32;
        if last {
            take(&mut self.send_msn);
            self.send_mo = 0;
        }
        wire::untagged(
            &Untagged {
                opcode,
                ulp_word: STAG,
                qn,
                msn,
                mo,
                last,
            },
            payload,
        )
    }

    fn read_response(&mut self, last: bool, size: u8) -> Vec<u8> {
        let due = self.reads.front().copied().unwrap_or_default() - self.sink_to;
        let part = if last { due } else { due.min(67 * u32::from(size)) };
        let (stag, to) = (self.sink_stag, self.sink_to);
        self.sink_to += part;
        if last {
            self.reads.pop_front();
            (self.sink_stag, self.sink_to) = (stag.wrapping_add(SINK_STAG_STEP), 0);
        }
        wire::tagged(wire::READ_RESPONSE, stag, to.into(), last, &vec![size; part as usize])
    }
}

fn take(counter: &mut u32) -> u32 {
    let taken = *counter;
    *counter = taken.wrapping_add(1);
    taken
}
