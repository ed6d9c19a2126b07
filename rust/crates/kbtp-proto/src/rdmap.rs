//! RDMAP messages (RFC 5040 4, RFC 7306 5 and 6): opcodes, where each travels, and the headers of fixed size.

use crate::ddp::{Fields, SegmentHeader};
use crate::limits::{ATOMIC_REQUEST_BYTES, ATOMIC_RESPONSE_BYTES, IMMEDIATE_DATA_BYTES, READ_REQUEST_BYTES};
use crate::types::{PeerMisbehaved, TerminateCause};

/// The version spoken (RFC 5040 4.1).
pub const RDMAP_VERSION: u8 = 1;
/// Sends and Immediate Data.
pub const QN_SEND: u32 = 0;
/// Read and Atomic Requests.
pub const QN_REQUEST: u32 = 1;
/// Terminates.
pub const QN_TERMINATE: u32 = 2;
/// Atomic Responses.
pub const QN_ATOMIC_RESPONSE: u32 = 3;
/// What FetchAdd sends as its Compare Mask (RFC 7306 5.2.1).
pub const COMPARE_MASK_UNUSED: u64 = u64::MAX;

const AOPCODE_MASK: u32 = 0xF; // the 28 bits before it are reserved and not looked at

/// RFC 5040 4.1 and RFC 7306 4.1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum RdmapOpcode {
    /// RDMA Write.
    Write = 0x0,
    /// RDMA Read Request.
    ReadRequest = 0x1,
    /// RDMA Read Response.
    ReadResponse = 0x2,
    /// Send.
    Send = 0x3,
    /// Send with Invalidate.
    SendInvalidate = 0x4,
    /// Send with Solicited Event.
    SendSolicited = 0x5,
    /// Send with Solicited Event and Invalidate.
    SendSolicitedInvalidate = 0x6,
    /// Terminate.
    Terminate = 0x7,
    /// Immediate Data.
    Immediate = 0x8,
    /// Immediate Data with Solicited Event.
    ImmediateSolicited = 0x9,
    /// Atomic Request.
    AtomicRequest = 0xA,
    /// Atomic Response.
    AtomicResponse = 0xB,
}

impl RdmapOpcode {
    /// Every opcode there is, by its number.
    pub const ALL: [RdmapOpcode; 12] = [
        Self::Write,
        Self::ReadRequest,
        Self::ReadResponse,
        Self::Send,
        Self::SendInvalidate,
        Self::SendSolicited,
        Self::SendSolicitedInvalidate,
        Self::Terminate,
        Self::Immediate,
        Self::ImmediateSolicited,
        Self::AtomicRequest,
        Self::AtomicResponse,
    ];

    /// The opcode with this number.
    pub fn from_number(number: u8) -> Option<RdmapOpcode> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The name it has in `kbtp.iwarp.rdmap.RdmapOpcode`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Write => "WRITE",
            Self::ReadRequest => "READ_REQUEST",
            Self::ReadResponse => "READ_RESPONSE",
            Self::Send => "SEND",
            Self::SendInvalidate => "SEND_INVALIDATE",
            Self::SendSolicited => "SEND_SOLICITED",
            Self::SendSolicitedInvalidate => "SEND_SOLICITED_INVALIDATE",
            Self::Terminate => "TERMINATE",
            Self::Immediate => "IMMEDIATE",
            Self::ImmediateSolicited => "IMMEDIATE_SOLICITED",
            Self::AtomicRequest => "ATOMIC_REQUEST",
            Self::AtomicResponse => "ATOMIC_RESPONSE",
        }
    }

    /// The queue it travels on; None: it is tagged.
    pub const fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::ReadRequest | Self::AtomicRequest => Some(QN_REQUEST),
            Self::Terminate => Some(QN_TERMINATE),
            Self::AtomicResponse => Some(QN_ATOMIC_RESPONSE),
            Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::Immediate
            | Self::ImmediateSolicited => Some(QN_SEND),
        }
    }

    /// The size of a message that has only one: it fits any segment, so it is one segment.
    pub const fn fixed_bytes(self) -> Option<usize> {
        match self {
            Self::ReadRequest => Some(READ_REQUEST_BYTES),
            Self::AtomicRequest => Some(ATOMIC_REQUEST_BYTES),
            Self::AtomicResponse => Some(ATOMIC_RESPONSE_BYTES),
            Self::Immediate | Self::ImmediateSolicited => Some(IMMEDIATE_DATA_BYTES),
            _ => None,
        }
    }

    /// It asks for an event at delivery.
    pub const fn is_solicited(self) -> bool {
        matches!(
            self,
            Self::SendSolicited | Self::SendSolicitedInvalidate | Self::ImmediateSolicited
        )
    }

    /// It takes an STag away.
    pub const fn is_invalidating(self) -> bool {
        matches!(self, Self::SendInvalidate | Self::SendSolicitedInvalidate)
    }
}

/// RFC 7306 5.2.1 AOpCodes; 1 is reserved, there is no unconditional swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum AtomicOperation {
    /// Add, field by field.
    FetchAdd = 0,
    /// Compare and swap under masks.
    CompareSwap = 2,
}

/// The control octet of a message: RDMAP's version and the opcode.
pub const fn control_octet(opcode: RdmapOpcode) -> u8 {
    RDMAP_VERSION << 6 | opcode as u8
}

/// The opcode of a Send of this kind.
pub const fn send_opcode(invalidate: bool, solicited: bool) -> RdmapOpcode {
    match (invalidate, solicited) {
        (true, true) => RdmapOpcode::SendSolicitedInvalidate,
        (true, false) => RdmapOpcode::SendInvalidate,
        (false, true) => RdmapOpcode::SendSolicited,
        (false, false) => RdmapOpcode::Send,
    }
}

/// The opcode of a segment whose version, T bit and queue fit it.
pub fn opcode_of(header: &SegmentHeader) -> Result<RdmapOpcode, PeerMisbehaved> {
    let version = header.control() >> 6;
    if version != RDMAP_VERSION {
        return Err(PeerMisbehaved::new(
            TerminateCause::RdmapInvalidVersion,
            format!("RDMAP version {version} came, {RDMAP_VERSION} is spoken"),
        ));
    }
    let number = header.control() & 0xF;
    let opcode = RdmapOpcode::from_number(number).ok_or_else(|| {
        PeerMisbehaved::new(
            TerminateCause::RdmapUnexpectedOpcode,
            format!("RDMAP opcode {number:#x} is not known"),
        )
    })?;
    match (header, opcode.queue()) {
        (SegmentHeader::Tagged(_), None) => Ok(opcode),
        (SegmentHeader::Untagged(untagged), Some(queue)) if untagged.qn == queue => Ok(opcode),
        (SegmentHeader::Untagged(untagged), Some(queue)) => Err(PeerMisbehaved::new(
            TerminateCause::DdpInvalidQn,
            format!("{} came on queue {}, it belongs on {queue}", opcode.name(), untagged.qn),
        )),
        (_, queue) => Err(PeerMisbehaved::new(
            TerminateCause::RdmapUnexpectedOpcode,
            format!(
                "{} came with T={}, which never fits it",
                opcode.name(),
                u8::from(queue.is_some())
            ),
        )),
    }
}

/// RFC 5040 4.4: sink first, the size between sink and source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRequest {
    /// Where the response goes, to be sent back uninterpreted.
    pub sink_stag: u32,
    /// The response's first TO.
    pub sink_to: u64,
    /// Octets asked for.
    pub size: u32,
    /// Where they lie.
    pub source_stag: u32,
    /// Tagged offset of the first of them.
    pub source_to: u64,
}

impl ReadRequest {
    /// Its octets.
    pub fn pack(&self) -> [u8; READ_REQUEST_BYTES] {
        let mut octets = [0; READ_REQUEST_BYTES];
        octets[..4].copy_from_slice(&self.sink_stag.to_be_bytes());
        octets[4..12].copy_from_slice(&self.sink_to.to_be_bytes());
        octets[12..16].copy_from_slice(&self.size.to_be_bytes());
        octets[16..20].copy_from_slice(&self.source_stag.to_be_bytes());
        octets[20..].copy_from_slice(&self.source_to.to_be_bytes());
        octets
    }

    /// What `octets` say.
    pub fn parse(octets: &[u8; READ_REQUEST_BYTES]) -> Self {
        let mut fields = Fields(octets);
        Self {
            sink_stag: fields.u32(),
            sink_to: fields.u64(),
            size: fields.u32(),
            source_stag: fields.u32(),
            source_to: fields.u64(),
        }
    }

    /// What is left after `sent_bytes` (at most `size`) of the response; a Terminate quotes it so (RFC 5040 4.8).
    #[must_use]
    pub const fn advanced(&self, sent_bytes: u32) -> Self {
        Self {
            sink_to: self.sink_to.wrapping_add(sent_bytes as u64),
            size: self.size.saturating_sub(sent_bytes),
            source_to: self.source_to.wrapping_add(sent_bytes as u64),
            ..*self
        }
    }
}

/// RFC 7306 5.2.1. `data` and `mask` are Add Data and Add Mask, or Swap Data and Swap Mask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// What to do.
    pub operation: AtomicOperation,
    /// Echoed in the response.
    pub request_id: u32,
    /// The region of the value.
    pub stag: u32,
    /// Its tagged offset.
    pub to: u64,
    /// Add Data or Swap Data.
    pub data: u64,
    /// Add Mask or Swap Mask.
    pub mask: u64,
    /// 0 for FetchAdd.
    pub compare_data: u64,
    /// `COMPARE_MASK_UNUSED` for FetchAdd.
    pub compare_mask: u64,
}

impl AtomicRequest {
    /// Its octets.
    pub fn pack(&self) -> [u8; ATOMIC_REQUEST_BYTES] {
        let mut octets = [0; ATOMIC_REQUEST_BYTES];
        octets[3] = self.operation as u8;
        octets[4..8].copy_from_slice(&self.request_id.to_be_bytes());
        octets[8..12].copy_from_slice(&self.stag.to_be_bytes());
        octets[12..20].copy_from_slice(&self.to.to_be_bytes());
        octets[20..28].copy_from_slice(&self.data.to_be_bytes());
        octets[28..36].copy_from_slice(&self.mask.to_be_bytes());
        octets[36..44].copy_from_slice(&self.compare_data.to_be_bytes());
        octets[44..].copy_from_slice(&self.compare_mask.to_be_bytes());
        octets
    }

    /// What `octets` say. Refuses an AOpCode that names no operation.
    pub fn parse(octets: &[u8; ATOMIC_REQUEST_BYTES]) -> Result<Self, PeerMisbehaved> {
        let mut fields = Fields(octets);
        let operation = match fields.u32() & AOPCODE_MASK {
            0 => AtomicOperation::FetchAdd,
            2 => AtomicOperation::CompareSwap,
            other => {
                return Err(PeerMisbehaved::new(
                    TerminateCause::RdmapUnexpectedOpcode,
                    format!("AOpCode {other} names no atomic operation"),
                ));
            }
        };
        Ok(Self {
            operation,
            request_id: fields.u32(),
            stag: fields.u32(),
            to: fields.u64(),
            data: fields.u64(),
            mask: fields.u64(),
            compare_data: fields.u64(),
            compare_mask: fields.u64(),
        })
    }
}

/// RFC 7306 5.2.2: the request's identifier and the value before the operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicResponse {
    /// The request's.
    pub request_id: u32,
    /// What was there before.
    pub value: u64,
}

impl AtomicResponse {
    /// Its octets.
    pub fn pack(&self) -> [u8; ATOMIC_RESPONSE_BYTES] {
        let mut octets = [0; ATOMIC_RESPONSE_BYTES];
        octets[..4].copy_from_slice(&self.request_id.to_be_bytes());
        octets[4..].copy_from_slice(&self.value.to_be_bytes());
        octets
    }

    /// What `octets` say.
    pub fn parse(octets: &[u8; ATOMIC_RESPONSE_BYTES]) -> Self {
        let mut fields = Fields(octets);
        Self {
            request_id: fields.u32(),
            value: fields.u64(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ddp::{TaggedHeader, UntaggedHeader};
    use proptest::prelude::*;

    fn tagged(control: u8) -> SegmentHeader {
        SegmentHeader::Tagged(TaggedHeader {
            control,
            stag: 0,
            to: 0,
            last: true,
        })
    }

    fn untagged(control: u8, qn: u32) -> SegmentHeader {
        SegmentHeader::Untagged(UntaggedHeader {
            control,
            ulp_word: 0,
            qn,
            msn: 1,
            mo: 0,
            last: true,
        })
    }

    fn cause_of(header: &SegmentHeader) -> Option<TerminateCause> {
        opcode_of(header).err().map(|error| error.cause)
    }

    #[test]
    fn every_opcode_on_every_way() {
        for opcode in RdmapOpcode::ALL {
            assert_eq!(RdmapOpcode::from_number(opcode as u8), Some(opcode));
            let control = control_octet(opcode);
            let by_tag = opcode_of(&tagged(control));
            match opcode.queue() {
                None => {
                    assert_eq!(by_tag, Ok(opcode));
                    assert_eq!(
                        cause_of(&untagged(control, 0)),
                        Some(TerminateCause::RdmapUnexpectedOpcode)
                    );
                }
                Some(queue) => {
                    let error = by_tag.unwrap_err();
                    assert_eq!(error.cause, TerminateCause::RdmapUnexpectedOpcode);
                    assert_eq!(
                        error.message,
                        format!("{} came with T=1, which never fits it", opcode.name())
                    );
                    assert_eq!(opcode_of(&untagged(control, queue)), Ok(opcode));
                    for qn in [queue ^ 1, 4, 7, u32::MAX] {
                        assert_eq!(cause_of(&untagged(control, qn)), Some(TerminateCause::DdpInvalidQn));
                    }
                }
            }
        }
    }

    #[test]
    fn r1_r2_r3_versions_and_numbers_that_are_not_known() {
        for version in [0, 2, 3] {
            assert_eq!(
                cause_of(&untagged(version << 6 | 3, 0)),
                Some(TerminateCause::RdmapInvalidVersion)
            );
        }
        for number in 0xC..=0xF {
            assert_eq!(
                cause_of(&untagged(0x40 | number, 0)),
                Some(TerminateCause::RdmapUnexpectedOpcode)
            );
        }
        assert_eq!(
            opcode_of(&untagged(0x73, 0)),
            Ok(RdmapOpcode::Send),
            "Rsv is not looked at"
        );
    }

    #[test]
    fn send_opcodes_say_what_they_do() {
        for (invalidate, solicited) in [(false, false), (false, true), (true, false), (true, true)] {
            let opcode = send_opcode(invalidate, solicited);
            assert_eq!(
                (opcode.is_invalidating(), opcode.is_solicited()),
                (invalidate, solicited)
            );
            assert_eq!((opcode.queue(), opcode.fixed_bytes()), (Some(QN_SEND), None));
        }
    }

    #[test]
    fn x3_x5_reserved_bits_and_aopcodes() {
        let mut octets = [0; ATOMIC_REQUEST_BYTES];
        octets[..4].copy_from_slice(&[0xFF, 0xFF, 0xFF, 0xF2]);
        assert_eq!(
            AtomicRequest::parse(&octets).unwrap().operation,
            AtomicOperation::CompareSwap
        );
        for aopcode in (0..16).filter(|aopcode| ![0, 2].contains(aopcode)) {
            octets[3] = aopcode;
            assert_eq!(
                AtomicRequest::parse(&octets).unwrap_err().cause,
                TerminateCause::RdmapUnexpectedOpcode
            );
        }
    }

    proptest! {
        #[test]
        fn read_requests_round_trip(octets: [u8; READ_REQUEST_BYTES]) {
            prop_assert_eq!(ReadRequest::parse(&octets).pack(), octets);
        }

        #[test]
        fn r23_a_read_request_advances(request: [u8; READ_REQUEST_BYTES], part in 0u32..) {
            let request = ReadRequest::parse(&request);
            let sent = part.min(request.size);
            let left = request.advanced(sent);
            prop_assert_eq!(left.size + sent, request.size);
            prop_assert_eq!(left.source_to.wrapping_sub(u64::from(sent)), request.source_to);
            prop_assert_eq!(left.sink_to.wrapping_sub(u64::from(sent)), request.sink_to);
            prop_assert_eq!((left.sink_stag, left.source_stag), (request.sink_stag, request.source_stag));
        }

        #[test]
        fn atomic_requests_round_trip(mut octets in any::<[u8; 32]>(), more: [u8; 20], swap: bool) {
            octets[..4].copy_from_slice(&[0, 0, 0, if swap { 2 } else { 0 }]);
            let octets: [u8; ATOMIC_REQUEST_BYTES] = [&octets[..], &more].concat().try_into().unwrap();
            prop_assert_eq!(AtomicRequest::parse(&octets).unwrap().pack(), octets);
        }

        #[test]
        fn atomic_responses_round_trip(octets: [u8; ATOMIC_RESPONSE_BYTES]) {
            prop_assert_eq!(AtomicResponse::parse(&octets).pack(), octets);
        }
    }
}
