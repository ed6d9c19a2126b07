//! KBTP messages that an RNIC reads and writes by itself: LOAD, STORE, ALLOC_STORE, FREE and COMPLETION;
//! of BIND it reads as much as it needs to leave it to others.
//!
//! The twin of a part of the Python package `kbtp.wire`, where `messages` draws every message. All integers are
//! unsigned and in network byte order; offsets are octets from the start of the message:
//!
//! ```text
//! common header (24)   0 Version (8)   1 Opcode (8)   2 Flags (16)   4 Request ID (64)   12 Block Handle (64)
//!                     20 Generation (16)   22 Status (16)
//!
//! LOAD                40, 56 with RECORD   24 Data Descriptor, 40 Completion Descriptor
//! STORE, ALLOC_STORE  as LOAD              then the data if INLINE
//! FREE                24, 40 with RECORD   24 Completion Descriptor
//! BIND                40, 56 with RECORD   24 Ticket (32), 28 Data Length (32), 32 Block Offset (64), 40 as above
//! COMPLETION          40                   24 Data Length (32), 28 reserved (32), 32 Block Offset (64)
//!
//! Data Descriptor (16)        STag (32), Tagged Offset (64), Length (32)
//! Completion Descriptor (16)  STag (32), Tagged Offset (64), reserved (32)
//! ```
//!
//! Nothing in here needs the inline data: a message is its first octets and its length.

mod bind;
mod header;
mod records;
mod requests;

pub use bind::Bind;
pub use header::{CommonHeader, WireFormatError};
pub use records::Completion;
pub use requests::{CompletionDescriptor, DataDescriptor, HEAD_BYTES_MAX, Operation, Packed, Request};
