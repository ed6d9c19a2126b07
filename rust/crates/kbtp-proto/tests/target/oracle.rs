//! Profile 1, the order of checks, written down a second time.

use kbtp_proto::blocks::Entry;
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{Operation, Request};

/// The status of a well-formed request to an entry, None where it may not touch it; all but the quota.
pub(crate) fn refusal(request: &Request, entry: Option<Entry>, block: u32) -> Status {
    let has = |flag| request.flags.contains(flag);
    let (load, store) = (
        request.operation == Operation::Load,
        request.operation == Operation::Store,
    );
    let alloc = request.operation == Operation::AllocStore;
    match entry {
        None => Status::HandleOutOfRange,
        Some(entry) if alloc && entry.valid() => Status::AlreadyBound,
        Some(entry) if !alloc && !entry.valid() => Status::NotBound,
        Some(entry) if ![0, entry.generation].contains(&request.generation) => Status::GenerationMismatch,
        Some(entry) if store && entry.sealed() => Status::Sealed,
        Some(entry) if load && !entry.sealed() && !has(RequestFlag::ALLOW_UNSEALED) => Status::NotSealed,
        Some(entry) if load && request.data.length < entry.data_length => Status::LengthError,
        Some(_) if (store || alloc) && request.data.length > block => Status::LengthError,
        Some(_) if has(RequestFlag::INLINE) && request.data.length != request.inline_bytes => Status::LengthError,
        Some(_) => Status::Success,
    }
}
