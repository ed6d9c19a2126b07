//! Which status a request gets, in the order of profile 1: the first check that fails names it.
//!
//! UNSUPPORTED and MALFORMED are found when a request arrives, and left to Python; the rest when its turn comes, because
//! the requests before it on the same handle may change the answer.

use super::actions::BindingTerms;
use crate::blocks::Entry;
use crate::types::{RequestFlag, Status};
use crate::wire::{CommonHeader, Operation, Request};

/// False if `header`, that of one of the four operations, asks for what no session here has: UNSUPPORTED, found with the
/// flags.
///
/// `read_depth` is how many RDMA Reads the target may have outstanding towards this initiator.
pub(super) fn granted(header: &CommonHeader, read_depth: u32, binding: BindingTerms) -> bool {
    let flags = RequestFlag::from_bits_retain(header.flags);
    if flags.contains(RequestFlag::RECORD) && !binding.records {
        return false; // draft 6.5
    }
    if flags.contains(RequestFlag::INVALIDATE) && !binding.invalidates {
        return false;
    }
    let stores = Operation::of_opcode(header.opcode).is_some_and(Operation::stores);
    let fetches = stores && !flags.contains(RequestFlag::INLINE);
    !(fetches && read_depth == 0) // profile 3 "RDMA Reads", 8.7
}

/// The status that refuses `request`, or None; `entry` is None where the handle is out of range.
///
/// NO_SPACE comes after these and needs the ring's owner.
pub(super) fn refusal(request: &Request, entry: Option<&Entry>, block_size_bytes: u32) -> Option<Status> {
    let Some(entry) = entry else {
        return Some(Status::HandleOutOfRange);
    };
    let operation = request.operation;
    if operation == Operation::AllocStore {
        // draft 6.3 step 1
        if entry.valid() {
            return Some(Status::AlreadyBound);
        }
    } else if !entry.valid() {
        return Some(Status::NotBound); // draft 6.1, 6.2 and 6.4 step 1
    }
    if request.generation != 0 && request.generation != entry.generation {
        return Some(Status::GenerationMismatch); // draft 5.1: zero means any
    }
    if operation == Operation::Store && entry.sealed() {
        return Some(Status::Sealed); // draft 6.2 step 1
    }
    if operation == Operation::Load {
        // draft 6.1 step 1
        if !entry.sealed() && !request.flags.contains(RequestFlag::ALLOW_UNSEALED) {
            return Some(Status::NotSealed);
        }
        // draft 6.1 step 2
        if entry.data_length > request.data.length {
            return Some(Status::LengthError);
        }
    }
    if operation.stores() && !data_fits(request, block_size_bytes) {
        return Some(Status::LengthError);
    }
    None
}

fn data_fits(request: &Request, block_size_bytes: u32) -> bool {
    if request.is_inline() && request.data.length != request.inline_bytes {
        return false;
    }
    request.data.length <= block_size_bytes
}
