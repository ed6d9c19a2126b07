//! A peer that builds and reads its octets by itself, and a small registered memory.
//!
//! `wire` follows the figures of RFC 5040, 5041, 5044 and 7306 and shares no code with the crate, so that an error there
//! cannot hide on both sides.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use kbtp_proto::crc32c;
use kbtp_proto::memory::{Octets, RegionId, Span, StreamMemory};
use kbtp_proto::mpa::{Negotiated, RtrKind};
use kbtp_proto::stream::{Event, Inline, IwarpStream, Outgoing, Part, Payload, Piece};
use kbtp_proto::types::{PeerMisbehaved, TerminateCause};

pub(crate) const STAG: u32 = 0x1122_3344;
pub(crate) const BASE_TO: u64 = 0x1000;

pub(crate) mod wire {
    pub(crate) const WRITE: u8 = 0;
    pub(crate) const READ_REQUEST: u8 = 1;
    pub(crate) const READ_RESPONSE: u8 = 2;
    pub(crate) const SEND: u8 = 3;
    pub(crate) const SEND_INV: u8 = 4;
    pub(crate) const TERMINATE: u8 = 7;
    pub(crate) const IMM: u8 = 8;
    pub(crate) const ATOMIC_REQUEST: u8 = 0xA;
    pub(crate) const ATOMIC_RESPONSE: u8 = 0xB;

    pub(crate) fn crc(octets: &[u8]) -> [u8; 4] {
        let mut crc = u32::MAX;
        for octet in octets {
            crc ^= u32::from(*octet);
            for _ in 0..8 {
                crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 };
            }
        }
        (!crc).to_le_bytes()
    }

    pub(crate) fn fpdu(ulpdu: &[u8]) -> Vec<u8> {
        let mut body = (ulpdu.len() as u16).to_be_bytes().to_vec();
        body.extend_from_slice(ulpdu);
        while !body.len().is_multiple_of(4) {
            body.push(0);
        }
        let crc = crc(&body);
        body.extend(crc);
        body
    }

    fn control(tagged: bool, last: bool, opcode: u8) -> Vec<u8> {
        vec![u8::from(tagged) << 7 | u8::from(last) << 6 | 1, 1 << 6 | opcode]
    }

    pub(crate) struct Untagged {
        pub(crate) opcode: u8,
        pub(crate) ulp_word: u32,
        pub(crate) qn: u32,
        pub(crate) msn: u32,
        pub(crate) mo: u32,
        pub(crate) last: bool,
    }

    pub(crate) fn untagged(header: &Untagged, payload: &[u8]) -> Vec<u8> {
        let mut out = control(false, header.last, header.opcode);
        for field in [header.ulp_word, header.qn, header.msn, header.mo] {
            out.extend(field.to_be_bytes());
        }
        out.extend_from_slice(payload);
        out
    }

    pub(crate) fn on_queue(opcode: u8, qn: u32, msn: u32, payload: &[u8]) -> Vec<u8> {
        untagged(
            &Untagged {
                opcode,
                ulp_word: 0,
                qn,
                msn,
                mo: 0,
                last: true,
            },
            payload,
        )
    }

    pub(crate) fn send(msn: u32, payload: &[u8]) -> Vec<u8> {
        on_queue(SEND, 0, msn, payload)
    }

    pub(crate) fn part_of_send(msn: u32, mo: u32, last: bool, payload: &[u8]) -> Vec<u8> {
        untagged(
            &Untagged {
                opcode: SEND,
                ulp_word: 0,
                qn: 0,
                msn,
                mo,
                last,
            },
            payload,
        )
    }

    pub(crate) fn tagged(opcode: u8, stag: u32, to: u64, last: bool, payload: &[u8]) -> Vec<u8> {
        let mut out = control(true, last, opcode);
        out.extend(stag.to_be_bytes());
        out.extend(to.to_be_bytes());
        out.extend_from_slice(payload);
        out
    }

    pub(crate) fn write(stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
        tagged(WRITE, stag, to, true, payload)
    }

    pub(crate) fn read_header(sink_stag: u32, sink_to: u64, size: u32, source_stag: u32, source_to: u64) -> Vec<u8> {
        let mut out = sink_stag.to_be_bytes().to_vec();
        out.extend(sink_to.to_be_bytes());
        out.extend(size.to_be_bytes());
        out.extend(source_stag.to_be_bytes());
        out.extend(source_to.to_be_bytes());
        out
    }

    pub(crate) fn read_request(msn: u32, size: u32, source_stag: u32, source_to: u64) -> Vec<u8> {
        on_queue(READ_REQUEST, 1, msn, &read_header(7, 100, size, source_stag, source_to))
    }

    pub(crate) fn atomic_request(
        msn: u32,
        operation: u32,
        request_id: u32,
        stag: u32,
        to: u64,
        operands: [u64; 4],
    ) -> Vec<u8> {
        let mut payload = operation.to_be_bytes().to_vec();
        payload.extend(request_id.to_be_bytes());
        payload.extend(stag.to_be_bytes());
        payload.extend(to.to_be_bytes());
        for operand in operands {
            payload.extend(operand.to_be_bytes());
        }
        on_queue(ATOMIC_REQUEST, 1, msn, &payload)
    }

    pub(crate) fn atomic_response(msn: u32, request_id: u32, value: u64) -> Vec<u8> {
        let mut payload = request_id.to_be_bytes().to_vec();
        payload.extend(value.to_be_bytes());
        on_queue(ATOMIC_RESPONSE, 3, msn, &payload)
    }

    /// One FPDU taken apart.
    #[derive(Debug, PartialEq, Eq)]
    pub(crate) struct Seen {
        pub(crate) opcode: u8,
        pub(crate) last: bool,
        pub(crate) header: Vec<u8>,
        pub(crate) payload: Vec<u8>,
    }

    impl Seen {
        pub(crate) fn u32_at(&self, at: usize) -> u32 {
            u32::from_be_bytes(self.header[at..at + 4].try_into().unwrap())
        }
    }

    /// Checks length, padding and CRC of an FPDU without markers and takes it apart.
    pub(crate) fn see(fpdu: &[u8], with_crc: bool) -> Seen {
        let length = usize::from(u16::from_be_bytes([fpdu[0], fpdu[1]]));
        let (body, crc_field) = fpdu.split_at(fpdu.len() - 4);
        assert!(fpdu.len().is_multiple_of(4) && body.len() - 2 - length < 4);
        assert!(body[2 + length..].iter().all(|octet| *octet == 0));
        assert_eq!(crc_field, if with_crc { crc(body) } else { [0; 4] });
        let ulpdu = &body[2..2 + length];
        assert_eq!((ulpdu[0] & 0x3F, ulpdu[1] & 0xF0), (1, 0x40));
        let header = if ulpdu[0] & 0x80 != 0 { 14 } else { 18 };
        Seen {
            opcode: ulpdu[1] & 0xF,
            last: ulpdu[0] & 0x40 != 0,
            header: ulpdu[..header].to_vec(),
            payload: ulpdu[header..].to_vec(),
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Regions {
    pub(crate) octets: Vec<Vec<u8>>,
    /// STag to region, base TO and whether it may be read, written and operated on.
    pub(crate) granted: BTreeMap<u32, (RegionId, u64, bool)>,
    pub(crate) lent: BTreeSet<u32>,
    pub(crate) next_sink_stag: u32,
    pub(crate) still: bool,
    pub(crate) placed_calls: usize,
}

/// `StreamMemory` and `Octets` over a few regions. A span that is not wholly in its region panics.
#[derive(Clone, Debug)]
pub(crate) struct Memory(pub(crate) Rc<RefCell<Regions>>);

impl Memory {
    pub(crate) fn new(octets: Vec<u8>) -> Self {
        let memory = Self(Rc::new(RefCell::new(Regions {
            next_sink_stag: 0xABCD_0001,
            still: true,
            ..Regions::default()
        })));
        let region = memory.add(octets);
        memory.0.borrow_mut().granted.insert(STAG, (region, BASE_TO, true));
        memory
    }

    pub(crate) fn add(&self, octets: Vec<u8>) -> RegionId {
        let mut regions = self.0.borrow_mut();
        regions.octets.push(octets);
        RegionId(regions.octets.len() as u64 - 1)
    }

    pub(crate) fn span(&self, octets: Vec<u8>) -> Span {
        let len = octets.len() as u32;
        Span {
            region: self.add(octets),
            offset: 0,
            len,
        }
    }

    pub(crate) fn region(&self, region: RegionId) -> Vec<u8> {
        self.0.borrow().octets[region.0 as usize].clone()
    }

    pub(crate) fn revoke(&self, stag: u32) {
        self.0.borrow_mut().granted.remove(&stag);
    }

    /// What the kernel does with `direct`: copy without a CRC.
    pub(crate) fn copy_in(&self, span: Span, data: &[u8]) {
        let at = span.offset as usize;
        self.0.borrow_mut().octets[span.region.0 as usize][at..at + data.len()].copy_from_slice(data);
    }

    fn find(&self, causes: [TerminateCause; 4], stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        let [invalid, bounds, wrap, access] = causes;
        let regions = self.0.borrow();
        assert!(len > 0);
        let refusal = |cause| PeerMisbehaved::new(cause, "refused");
        let &(region, base, allowed) = regions.granted.get(&stag).ok_or_else(|| refusal(invalid))?;
        let wraps = to.checked_add(u64::from(len) - 1).is_none();
        let offset = to
            .checked_sub(base)
            .filter(|_| !wraps)
            .ok_or_else(|| refusal(if wraps { wrap } else { bounds }))?;
        if offset + u64::from(len) > regions.octets[region.0 as usize].len() as u64 {
            return Err(refusal(bounds));
        }
        if !allowed {
            return Err(refusal(access));
        }
        Ok(Span { region, offset, len })
    }
}

const DDP: [TerminateCause; 4] = [
    TerminateCause::DdpInvalidStag,
    TerminateCause::DdpBaseOrBounds,
    TerminateCause::DdpToWrap,
    TerminateCause::DdpInvalidStag,
];
const RDMAP: [TerminateCause; 4] = [
    TerminateCause::RdmapInvalidStag,
    TerminateCause::RdmapBaseOrBounds,
    TerminateCause::RdmapToWrap,
    TerminateCause::RdmapAccessRights,
];

impl StreamMemory for Memory {
    fn place(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.0.borrow_mut().placed_calls += 1;
        self.find(DDP, stag, to, len)
    }

    fn read_source(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.find(RDMAP, stag, to, len)
    }

    fn atomic(&mut self, stag: u32, to: u64, operate: &mut dyn FnMut(u64) -> u64) -> Result<u64, PeerMisbehaved> {
        let span = self.find(RDMAP, stag, to, 8)?;
        if !to.is_multiple_of(8) {
            return Err(PeerMisbehaved::new(
                TerminateCause::RdmapCatastrophicStream,
                "not aligned",
            ));
        }
        let mut octets = Vec::new();
        self.read(span, &mut octets);
        let old = u64::from_ne_bytes(octets.try_into().unwrap());
        self.write(span, &operate(old).to_ne_bytes());
        Ok(old)
    }

    fn invalidate(&mut self, stag: u32) -> Result<(), PeerMisbehaved> {
        let removed = self.0.borrow_mut().granted.remove(&stag);
        removed
            .map(|_| ())
            .ok_or_else(|| PeerMisbehaved::new(TerminateCause::RdmapCannotInvalidate, "unknown"))
    }

    fn lend_sink_stag(&mut self) -> u32 {
        let mut regions = self.0.borrow_mut();
        let stag = regions.next_sink_stag;
        regions.next_sink_stag += 0x1111;
        regions.lent.insert(stag);
        stag
    }

    fn return_sink_stag(&mut self, stag: u32) {
        assert!(self.0.borrow_mut().lent.remove(&stag));
    }
}

impl Octets for Memory {
    fn write(&mut self, span: Span, data: &[u8]) {
        assert_eq!(span.len as usize, data.len());
        self.copy_in(span, data);
    }

    fn crc32c(&self, state: u32, span: Span) -> u32 {
        let mut octets = Vec::new();
        self.read(span, &mut octets);
        crc32c::update(state, &octets)
    }

    fn read(&self, span: Span, into: &mut Vec<u8>) {
        let range = span.offset as usize..span.offset as usize + span.len as usize;
        into.extend_from_slice(&self.0.borrow().octets[span.region.0 as usize][range]);
    }

    fn is_still(&self, _: Span) -> bool {
        self.0.borrow().still
    }
}

pub(crate) fn negotiated() -> Negotiated {
    Negotiated {
        crc: true,
        tx_markers: false,
        rx_markers: false,
        ird: 4,
        ord: 4,
        peer_ird: 4,
        peer_ord: 4,
        revision: 2,
        private_data: Vec::new(),
        rtr: RtrKind::empty(),
        failure: None,
    }
}

pub(crate) fn inline(octets: &[u8]) -> Payload {
    Payload::from_iter([Piece::Inline(Inline::from_slice(octets))])
}

/// A stream under test and what its peer says to it and sees of it.
pub(crate) struct End {
    pub(crate) stream: IwarpStream,
    pub(crate) memory: Memory,
    crc: bool,
}

impl End {
    pub(crate) fn new(settled: Negotiated, active: bool, mulpdu: u32, initial_msn: Option<[u32; 4]>) -> Self {
        let crc = settled.crc;
        let octets = (0..=255).collect();
        Self {
            stream: IwarpStream::new(settled, active, mulpdu, initial_msn),
            memory: Memory::new(octets),
            crc,
        }
    }

    pub(crate) fn active() -> Self {
        Self::new(negotiated(), true, 1454, None)
    }

    pub(crate) fn take(&mut self, octets: &[u8]) {
        self.stream.receive(octets, &mut self.memory.clone(), &mut self.memory);
    }

    pub(crate) fn hears(&mut self, ulpdus: &[Vec<u8>]) -> Vec<Event> {
        for ulpdu in ulpdus {
            self.take(&wire::fpdu(ulpdu));
        }
        self.events()
    }

    pub(crate) fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.stream.next_event()).collect()
    }

    pub(crate) fn next_fpdu(&mut self) -> Option<Outgoing> {
        let mut out = Outgoing::default();
        self.build_into(&mut out).then_some(out)
    }

    pub(crate) fn build_into(&mut self, out: &mut Outgoing) -> bool {
        self.stream.build_fpdu(&mut self.memory.clone(), &self.memory, out)
    }

    /// What is left of `out`.
    pub(crate) fn octets_of(&self, out: &Outgoing) -> Vec<u8> {
        let mut octets = Vec::new();
        for part in out.parts() {
            let before = octets.len();
            match part {
                Part::Own(own) => octets.extend_from_slice(own),
                Part::Registered(span) => self.memory.read(span, &mut octets),
            }
            assert_eq!(octets.len() - before, part.length_bytes());
        }
        assert_eq!(octets.len(), out.left_bytes());
        octets
    }

    pub(crate) fn sent(&mut self, mut out: Outgoing) {
        let bytes = out.left_bytes();
        self.stream.sent(&mut out, bytes);
        assert!(out.is_empty());
    }

    /// Build the next FPDU and send it at once.
    pub(crate) fn send_next(&mut self) -> Option<Vec<u8>> {
        let out = self.next_fpdu()?;
        let octets = self.octets_of(&out);
        self.sent(out);
        Some(octets)
    }

    pub(crate) fn says(&mut self) -> Vec<wire::Seen> {
        let crc = self.crc;
        std::iter::from_fn(|| self.send_next())
            .map(|octets| wire::see(&octets, crc))
            .collect()
    }

    pub(crate) fn receive(&mut self, wr_id: u64, len: usize) -> Span {
        let buffer = self.memory.span(vec![0; len]);
        self.stream.post_receive(wr_id, buffer).unwrap();
        buffer
    }

    /// What the Terminate says that is the only answer left.
    pub(crate) fn terminates(&mut self) -> (u8, u8, u8) {
        let seen = self.says();
        let [terminate] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!(terminate.opcode, wire::TERMINATE);
        assert!(self.stream.failed() && self.stream.terminate_sent() && self.stream.ended());
        (
            terminate.payload[0] >> 4,
            terminate.payload[0] & 0xF,
            terminate.payload[1],
        )
    }

    pub(crate) fn refuses(&mut self, ulpdus: &[Vec<u8>]) -> (u8, u8, u8) {
        for ulpdu in ulpdus {
            self.take(&wire::fpdu(ulpdu));
        }
        self.terminates()
    }
}
