//! BIND (draft 6.6), as far as it is judged where it is left to others: who asks, for which handle, under which ticket.

use super::header::{CommonHeader, Fields, WireFormatError};
use crate::limits::{COMMON_HEADER_BYTES, COMPLETION_DESCRIPTOR_BYTES};
use crate::types::{Opcode, RequestFlag, Ticket};

/// Ticket, Data Length and Block Offset (profile 2).
const BODY_BYTES: usize = 16;

/// A well-formed BIND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bind {
    /// Which handle is to be bound.
    pub handle: u64,
    /// To the block of this ticket.
    pub ticket: Ticket,
}

impl Bind {
    /// The BIND that a message of `length_bytes` octets is; `head` is its beginning, `HEAD_BYTES_MAX` or all of it.
    ///
    /// In profile 1's order: UNSUPPORTED for version, opcode and flags, then MALFORMED. Whether RECORD was granted is the
    /// session's matter.
    pub fn parse(head: &[u8], length_bytes: u32) -> Result<Self, WireFormatError> {
        const CUT_SHORT: WireFormatError = WireFormatError::malformed("message");
        let header = CommonHeader::parse(head).ok_or(CUT_SHORT)?;
        header.require_version()?;
        if header.opcode != Opcode::Bind as u8 {
            return Err(WireFormatError::unsupported("opcode"));
        }
        let record = header.flags & RequestFlag::RECORD.bits() != 0;
        if header.flags & !RequestFlag::SEAL.union(RequestFlag::RECORD).bits() != 0 {
            return Err(WireFormatError::unsupported("flags"));
        }
        let mut body = Fields(head.get(COMMON_HEADER_BYTES..).ok_or(CUT_SHORT)?);
        let ticket = u32::from_be_bytes(body.next().ok_or(CUT_SHORT)?);
        let record_bytes = if record { COMPLETION_DESCRIPTOR_BYTES } else { 0 };
        if length_bytes as usize != COMMON_HEADER_BYTES + BODY_BYTES + record_bytes {
            return Err(CUT_SHORT);
        }
        Ok(Self {
            handle: header.handle,
            ticket,
        })
    }
}
