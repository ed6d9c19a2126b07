//! LOAD, STORE, ALLOC_STORE and FREE (draft 5 and 6, profile 2), and their descriptors.
//!
//! `Request::parse` judges what can be judged from the octets alone. Which flags were granted, and whether Length is
//! that of the inline data (LENGTH_ERROR comes late in the order of checks), is the session's matter.

use smallvec::SmallVec;

use super::header::{CommonHeader, Fields, WireFormatError};
use crate::limits::{COMMON_HEADER_BYTES, COMPLETION_DESCRIPTOR_BYTES, DATA_DESCRIPTOR_BYTES, KBTP_VERSION};
use crate::stag::Access;
use crate::types::{Opcode, RequestFlag};

/// As many octets of a message as `Request::parse` may look at.
pub const HEAD_BYTES_MAX: usize = COMMON_HEADER_BYTES + DATA_DESCRIPTOR_BYTES + COMPLETION_DESCRIPTOR_BYTES;

/// A request's octets, without an allocation if no data is inline.
pub type Packed = SmallVec<[u8; 64]>;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Draft 6.1: write the block of the handle to the initiator.
    Load,
    /// Draft 6.2: write data into the block of a bound handle.
    Store,
    /// Draft 6.3: bind the handle to a free block and write data into it.
    AllocStore,
    /// Draft 6.4: unbind the handle and return its block.
    Free,
}

impl Operation {
    /// None for every opcode that is none of the four.
    #[must_use]
    pub fn of_opcode(opcode: u8) -> Option<Self> {
        [Self::Load, Self::Store, Self::AllocStore, Self::Free]
            .into_iter()
            .find(|operation| operation.opcode() as u8 == opcode)
    }

    /// Profile 1.
    #[must_use]
    pub const fn opcode(self) -> Opcode {
        match self {
            Self::Load => Opcode::Load,
            Self::Store => Opcode::Store,
            Self::AllocStore => Opcode::AllocStore,
            Self::Free => Opcode::Free,
        }
    }

    /// What the target needs to be let do with the memory that its Data Descriptor names.
    #[must_use]
    pub const fn access(self) -> Access {
        match self {
            Self::Load => Access::REMOTE_WRITE,
            Self::Store | Self::AllocStore => Access::REMOTE_READ,
            Self::Free => Access::empty(),
        }
    }

    /// It brings data from the initiator.
    #[must_use]
    pub const fn stores(self) -> bool {
        matches!(self, Self::Store | Self::AllocStore)
    }

    /// Profile 1: the opcode table's last column.
    #[must_use]
    pub const fn flags_allowed(self) -> RequestFlag {
        let (record, invalidate) = (RequestFlag::RECORD, RequestFlag::INVALIDATE);
        match self {
            Self::Load => record.union(invalidate).union(RequestFlag::ALLOW_UNSEALED),
            Self::Store | Self::AllocStore => {
                let data = RequestFlag::INLINE.union(RequestFlag::SEAL);
                record.union(invalidate).union(data)
            }
            Self::Free => record,
        }
    }

    /// `flags`, or None if they may not come with this operation (profile 1 and 2).
    fn checked_flags(self, flags: u16) -> Option<RequestFlag> {
        let flags = RequestFlag::from_bits(flags).filter(|flags| self.flags_allowed().contains(*flags))?;
        // Profile 2: INVALIDATE needs a descriptor that is not INLINE, and a completion that is a Send.
        let excluded = RequestFlag::INLINE | RequestFlag::RECORD;
        if flags.contains(RequestFlag::INVALIDATE) && flags.intersects(excluded) {
            return None;
        }
        Some(flags)
    }

    /// Octets before the inline data.
    fn fixed_bytes(self, flags: RequestFlag) -> usize {
        let data = if self == Self::Free { 0 } else { DATA_DESCRIPTOR_BYTES };
        let record = flags.contains(RequestFlag::RECORD);
        COMMON_HEADER_BYTES + data + if record { COMPLETION_DESCRIPTOR_BYTES } else { 0 }
    }
}

/// Draft 5.2: a buffer of the initiator, `length` octets at tagged offset `to` of `stag`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct DataDescriptor {
    pub stag: u32,
    pub to: u64,
    pub length: u32,
}

/// Draft 5.2: where a 24-octet completion record goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct CompletionDescriptor {
    pub stag: u32,
    pub to: u64,
}

/// A well-formed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What it asks for.
    pub operation: Operation,
    /// Echoed in the completion.
    pub request_id: u64,
    /// Of which entry.
    pub handle: u64,
    /// 0 means any.
    pub generation: u16,
    /// Those of the operation.
    pub flags: RequestFlag,
    /// All zero in a FREE. With INLINE only `length` means something, the rest is ignored (profile 8.6) and zero here.
    pub data: DataDescriptor,
    /// Present if and only if RECORD is set.
    pub completion: Option<CompletionDescriptor>,
    /// Where in the message the inline data begins.
    pub inline_at: u32,
    /// Octets of inline data that are there; 0 without INLINE.
    pub inline_bytes: u32,
}

impl Request {
    /// The request that a message of `length_bytes` octets is; `head` is its beginning, `HEAD_BYTES_MAX` or all of it.
    ///
    /// In profile 1's order: UNSUPPORTED for version, opcode (those that this module does not know included) and flags,
    /// then MALFORMED. Under 24 octets there is no header to answer to (profile 8.5): the field is "message" then.
    pub fn parse(head: &[u8], length_bytes: u32) -> Result<Self, WireFormatError> {
        const CUT_SHORT: WireFormatError = WireFormatError::malformed("message");
        let header = CommonHeader::parse(head).ok_or(CUT_SHORT)?;
        header.require_version()?;
        let operation = Operation::of_opcode(header.opcode).ok_or(WireFormatError::unsupported("opcode"))?;
        let flags = operation
            .checked_flags(header.flags)
            .ok_or(WireFormatError::unsupported("flags"))?;
        let fixed_bytes = operation.fixed_bytes(flags);
        let inline = flags.contains(RequestFlag::INLINE);
        let inline_at = fixed_bytes as u32; // 24, 40 or 56
        let inline_bytes = length_bytes.checked_sub(inline_at).ok_or(CUT_SHORT)?;
        if inline_bytes > 0 && !inline {
            return Err(CUT_SHORT); // octets follow where none may
        }
        let mut fields = Fields(head.get(COMMON_HEADER_BYTES..fixed_bytes).ok_or(CUT_SHORT)?);
        let mut data = DataDescriptor::default();
        if operation != Operation::Free {
            let described = parse_data(&mut fields).ok_or(CUT_SHORT)?;
            data.length = described.length;
            if !inline {
                data = described;
            }
        }
        Ok(Self {
            operation,
            request_id: header.request_id,
            handle: header.handle,
            generation: header.generation,
            flags,
            data,
            completion: parse_completion(&mut fields),
            inline_at,
            inline_bytes,
        })
    }

    /// The message, with `inline_data` behind it. Whether that and the flags go together is not judged: a target does.
    #[must_use]
    pub fn pack(&self, inline_data: &[u8]) -> Packed {
        let header = CommonHeader {
            version: KBTP_VERSION,
            opcode: self.operation.opcode() as u8,
            flags: self.flags.bits(),
            request_id: self.request_id,
            handle: self.handle,
            generation: self.generation,
            status: 0,
        };
        let mut octets = Packed::from_slice(&header.pack());
        if self.operation != Operation::Free {
            octets.extend_from_slice(&self.data.stag.to_be_bytes());
            octets.extend_from_slice(&self.data.to.to_be_bytes());
            octets.extend_from_slice(&self.data.length.to_be_bytes());
        }
        if let Some(completion) = self.completion {
            octets.extend_from_slice(&completion.stag.to_be_bytes());
            octets.extend_from_slice(&completion.to.to_be_bytes());
            octets.extend_from_slice(&[0; 4]);
        }
        octets.extend_from_slice(inline_data);
        octets
    }

    /// It changes its entry; only a LOAD does not.
    #[must_use]
    pub fn mutates(&self) -> bool {
        self.operation != Operation::Load
    }

    /// It brings its data along.
    #[must_use]
    pub fn is_inline(&self) -> bool {
        self.flags.contains(RequestFlag::INLINE)
    }

    /// Which STag its completion invalidates (draft 5.1 INVALIDATE, profile 2).
    #[must_use]
    pub fn invalidates(&self) -> Option<u32> {
        self.flags.contains(RequestFlag::INVALIDATE).then_some(self.data.stag)
    }
}

fn parse_data(fields: &mut Fields<'_>) -> Option<DataDescriptor> {
    Some(DataDescriptor {
        stag: u32::from_be_bytes(fields.next()?),
        to: u64::from_be_bytes(fields.next()?),
        length: u32::from_be_bytes(fields.next()?),
    })
}

/// What is left of the fixed part is a Completion Descriptor or nothing.
fn parse_completion(fields: &mut Fields<'_>) -> Option<CompletionDescriptor> {
    Some(CompletionDescriptor {
        stag: u32::from_be_bytes(fields.next()?),
        to: u64::from_be_bytes(fields.next()?),
    })
}
