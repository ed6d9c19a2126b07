//! The common header of every KBTP message (draft 5.1), and what is judged by it alone.

use std::fmt;

use crate::limits::{COMMON_HEADER_BYTES, KBTP_VERSION};
use crate::types::Status;

/// Octets that are not the request they claim to be: the `field` at fault and the `status` a target answers with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WireFormatError {
    /// As in `kbtp.errors.WireFormatError`.
    pub field: &'static str,
    /// UNSUPPORTED or MALFORMED.
    pub status: Status,
}

impl WireFormatError {
    pub(super) const fn unsupported(field: &'static str) -> Self {
        Self {
            field,
            status: Status::Unsupported,
        }
    }

    pub(super) const fn malformed(field: &'static str) -> Self {
        Self {
            field,
            status: Status::Malformed,
        }
    }
}

impl fmt::Display for WireFormatError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}: {}", self.field, self.status.name())
    }
}

impl std::error::Error for WireFormatError {}

/// Draft 5.1, field by field and unjudged: every value is the raw number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CommonHeader {
    pub version: u8,
    pub opcode: u8,
    pub flags: u16,
    pub request_id: u64,
    pub handle: u64,
    pub generation: u16,
    pub status: u16,
}

impl CommonHeader {
    /// The first 24 octets of a message; None if they are not there.
    #[must_use]
    pub fn parse(data: &[u8]) -> Option<Self> {
        let mut fields = Fields(data.get(..COMMON_HEADER_BYTES)?);
        Some(Self {
            version: u8::from_be_bytes(fields.next()?),
            opcode: u8::from_be_bytes(fields.next()?),
            flags: u16::from_be_bytes(fields.next()?),
            request_id: u64::from_be_bytes(fields.next()?),
            handle: u64::from_be_bytes(fields.next()?),
            generation: u16::from_be_bytes(fields.next()?),
            status: u16::from_be_bytes(fields.next()?),
        })
    }

    /// The 24 octets.
    #[must_use]
    pub fn pack(&self) -> [u8; COMMON_HEADER_BYTES] {
        let mut octets = [0; COMMON_HEADER_BYTES];
        octets[0] = self.version;
        octets[1] = self.opcode;
        octets[2..4].copy_from_slice(&self.flags.to_be_bytes());
        octets[4..12].copy_from_slice(&self.request_id.to_be_bytes());
        octets[12..20].copy_from_slice(&self.handle.to_be_bytes());
        octets[20..22].copy_from_slice(&self.generation.to_be_bytes());
        octets[22..24].copy_from_slice(&self.status.to_be_bytes());
        octets
    }

    /// Profile 1: before all other checks.
    pub(super) fn require_version(&self) -> Result<(), WireFormatError> {
        if self.version == KBTP_VERSION {
            Ok(())
        } else {
            Err(WireFormatError::unsupported("version"))
        }
    }
}

/// Takes fields of fixed size from the front of octets.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    /// None if fewer octets are left.
    pub(super) fn next<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (field, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*field)
    }
}
