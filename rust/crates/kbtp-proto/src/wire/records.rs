//! COMPLETION (profile 2): how a request ends.

use super::header::{CommonHeader, Fields, WireFormatError};
use crate::limits::{COMMON_HEADER_BYTES, COMPLETION_BYTES, COMPLETION_RECORD_BYTES, KBTP_VERSION};
use crate::types::{Opcode, Status};

/// Profile 2: the message that completes one request. Profile 8.6 says what it carries for which operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Completion {
    pub request_id: u64,
    pub handle: u64,
    pub generation: u16,
    pub status: Status,
    pub data_length: u32,
    pub block_offset: u64,
}

impl Completion {
    /// The COMPLETION that `message` is, from its first octet to its last.
    ///
    /// In profile 1's order: version, opcode, flags, size; then a status that profile 1 does not know.
    pub fn parse(message: &[u8]) -> Result<Self, WireFormatError> {
        const CUT_SHORT: WireFormatError = WireFormatError::malformed("message");
        let header = CommonHeader::parse(message).ok_or(CUT_SHORT)?;
        header.require_version()?;
        if header.opcode != Opcode::Completion as u8 {
            return Err(WireFormatError::unsupported("opcode"));
        }
        if header.flags != 0 {
            return Err(WireFormatError::unsupported("flags"));
        }
        if message.len() != COMPLETION_BYTES {
            return Err(CUT_SHORT);
        }
        let mut body = Fields(message.get(COMMON_HEADER_BYTES..).ok_or(CUT_SHORT)?);
        let data_length = u32::from_be_bytes(body.next().ok_or(CUT_SHORT)?);
        let _reserved: [u8; 4] = body.next().ok_or(CUT_SHORT)?; // ignored (profile, preamble)
        let block_offset = u64::from_be_bytes(body.next().ok_or(CUT_SHORT)?);
        Ok(Self {
            request_id: header.request_id,
            handle: header.handle,
            generation: header.generation,
            status: Status::from_value(header.status).ok_or(WireFormatError::malformed("status"))?,
            data_length,
            block_offset,
        })
    }

    /// The 40 octets.
    #[must_use]
    pub fn pack(&self) -> [u8; COMPLETION_BYTES] {
        let header = CommonHeader {
            version: KBTP_VERSION,
            opcode: Opcode::Completion as u8,
            flags: 0,
            request_id: self.request_id,
            handle: self.handle,
            generation: self.generation,
            status: self.status as u16,
        };
        let mut octets = [0; COMPLETION_BYTES];
        octets[..COMMON_HEADER_BYTES].copy_from_slice(&header.pack());
        octets[24..28].copy_from_slice(&self.data_length.to_be_bytes());
        octets[32..40].copy_from_slice(&self.block_offset.to_be_bytes());
        octets
    }

    /// The 24 octets of a completion record (draft 6.5), which has the same fields but for the handle.
    #[must_use]
    pub fn pack_record(&self) -> [u8; COMPLETION_RECORD_BYTES] {
        let mut octets = [0; COMPLETION_RECORD_BYTES];
        octets[..8].copy_from_slice(&self.request_id.to_be_bytes());
        octets[8..10].copy_from_slice(&(self.status as u16).to_be_bytes());
        octets[10..12].copy_from_slice(&self.generation.to_be_bytes());
        octets[12..16].copy_from_slice(&self.data_length.to_be_bytes());
        octets[16..24].copy_from_slice(&self.block_offset.to_be_bytes());
        octets
    }
}
