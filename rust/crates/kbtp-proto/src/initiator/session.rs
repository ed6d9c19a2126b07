//! From HELLO_ACK to the end of the stream: requests go out as there are credits, completions come back.

use std::collections::VecDeque;

use super::handles::HandleChooser;
use crate::own_maps::OwnMap;
use crate::types::{Generation, Handle, PeerMisbehaved, RequestFlag, Status, TerminateCause};
use crate::wire::{Completion, DataDescriptor, Operation as Kind, Packed, Request};

/// HELLO has Request ID 0 (profile 2).
const FIRST_REQUEST_ID: u64 = 1;

/// What HELLO_ACK granted, as far as requests depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Requests outstanding at most.
    pub request_credits: u32,
    /// Of the session's own range.
    pub first_handle: Handle,
    /// How many handles that has.
    pub handle_count: u64,
    /// The target sends with Invalidate when asked to (Granted Features).
    pub invalidate: bool,
}

/// One request of a caller's. `context` comes back when it ends.
#[derive(Debug)]
pub struct Operation<C> {
    /// What it asks for.
    pub kind: Kind,
    /// None: the session chooses a free one (ALLOC_STORE only).
    pub handle: Option<Handle>,
    /// 0 means any.
    pub generation: Generation,
    /// SEAL or ALLOW_UNSEALED; the session adds those that say how the data travels.
    pub flags: RequestFlag,
    /// The caller's own.
    pub context: C,
}

/// An operation there is a credit for. Hand it to `Session::send` or `Session::withdraw`.
#[derive(Debug)]
pub struct Ready<C> {
    /// What is to be sent.
    pub operation: Operation<C>,
    handle: Handle,
}

/// How the data of a request travels.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    /// A FREE has none.
    None,
    /// So many octets, which the caller sends behind the request in the same message.
    Inline(u32),
    /// The target moves it.
    Described {
        /// Where it lies, or goes.
        descriptor: DataDescriptor,
        /// The STag is for this request alone, so that its completion may invalidate it (draft 5.1).
        alone: bool,
    },
}

/// What became of an operation.
#[derive(Debug)]
pub enum Ended<C> {
    /// The target's answer.
    Answered(Operation<C>, Completion),
    /// Its handle was bound, and another is tried: `Session::ready` gives it out again.
    Again,
    /// All handles of the session's own range are bound.
    NoHandle(Operation<C>),
}

/// A request without its completion.
#[derive(Debug)]
struct Outstanding<C> {
    operation: Operation<C>,
    handle: Handle,
    length_bytes: u32,
}

/// Decides everything about an initiator's requests on one stream.
#[derive(Debug)]
pub struct Session<C> {
    terms: Terms,
    handles: HandleChooser,
    queue: VecDeque<Operation<C>>,
    outstanding: OwnMap<u64, Outstanding<C>>,
    next_request_id: u64,
}

impl<C> Session<C> {
    /// The session that a HELLO_ACK of `terms` opened.
    #[must_use]
    pub fn new(terms: Terms) -> Self {
        Self {
            terms,
            handles: HandleChooser::new(terms.first_handle, terms.handle_count),
            queue: VecDeque::new(),
            outstanding: OwnMap::default(),
            next_request_id: FIRST_REQUEST_ID,
        }
    }

    /// Requests that are sent and not answered.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// Queue `operation`.
    pub fn submit(&mut self, operation: Operation<C>) {
        self.queue.push_back(operation);
    }

    /// The next operation if there is a credit for it (profile 3 "Credits"), or one that ends without having been sent.
    pub fn ready(&mut self) -> Option<Result<Ready<C>, Ended<C>>> {
        if self.outstanding.len() >= self.terms.request_credits as usize {
            return None;
        }
        let operation = self.queue.pop_front()?;
        Some(match operation.handle.or_else(|| self.handles.take()) {
            Some(handle) => Ok(Ready { operation, handle }),
            None => Err(Ended::NoHandle(operation)),
        })
    }

    /// The message of `ready`, up to its inline data; it is outstanding from here on.
    pub fn send(&mut self, ready: Ready<C>, data: Data) -> Packed {
        let Ready { operation, handle } = ready;
        let request_id = self.next_request_id;
        self.next_request_id = self.next_request_id.wrapping_add(1);
        let (mut flags, mut described) = (operation.flags, DataDescriptor::default());
        match data {
            Data::None => {}
            Data::Inline(length_bytes) => {
                flags |= RequestFlag::INLINE;
                described.length = length_bytes;
            }
            Data::Described { descriptor, alone } => {
                if alone && self.terms.invalidate {
                    flags |= RequestFlag::INVALIDATE;
                }
                described = descriptor;
            }
        }
        let request = Request {
            operation: operation.kind,
            request_id,
            handle,
            generation: operation.generation,
            flags,
            data: described,
            completion: None,
            inline_at: 0,
            inline_bytes: 0,
        };
        let length_bytes = described.length;
        self.outstanding.insert(
            request_id,
            Outstanding {
                operation,
                handle,
                length_bytes,
            },
        );
        request.pack(&[])
    }

    /// `ready` will not be sent; its operation.
    pub fn withdraw(&mut self, ready: Ready<C>) -> Operation<C> {
        if ready.operation.handle.is_none() {
            self.handles.free(ready.handle);
        }
        ready.operation
    }

    /// What the target's `message` ends.
    ///
    /// Refuses anything but a COMPLETION of an outstanding request.
    pub fn received(&mut self, message: &[u8]) -> Result<Ended<C>, PeerMisbehaved> {
        let completion = Completion::parse(message).map_err(|error| misbehaved(format!("COMPLETION: {error}")))?;
        let id = completion.request_id;
        let Some(request) = self.outstanding.get(&id) else {
            return Err(misbehaved(format!(
                "COMPLETION for Request ID {id}, which is not outstanding"
            )));
        };
        if completion.handle != request.handle {
            let (named, asked) = (completion.handle, request.handle);
            return Err(misbehaved(format!(
                "COMPLETION names handle {named}, asked was {asked}"
            )));
        }
        let success = completion.status == Status::Success;
        if request.operation.kind == Kind::Load && success && completion.data_length > request.length_bytes {
            let (came, asked) = (completion.data_length, request.length_bytes);
            return Err(misbehaved(format!("LOAD of {came} octets into {asked}")));
        }
        let Some(Outstanding { operation, handle, .. }) = self.outstanding.remove(&id) else {
            return Ok(Ended::Again); // looked up above
        };
        if operation.handle.is_none() && completion.status == Status::AlreadyBound {
            self.queue.push_front(operation); // its handle stays marked, so that it gets another
            return Ok(Ended::Again);
        }
        self.note_handle(&operation, handle, completion.status);
        Ok(Ended::Answered(operation, completion))
    }

    fn note_handle(&mut self, operation: &Operation<C>, handle: Handle, status: Status) {
        match (operation.kind, status) {
            (Kind::AllocStore, Status::Success | Status::AlreadyBound) => self.handles.bound(handle),
            (Kind::AllocStore, _) if operation.handle.is_none() => self.handles.free(handle),
            (Kind::Free, Status::Success | Status::NotBound) => self.handles.free(handle),
            _ => {}
        }
    }

    /// The stream has ended: everything that was submitted and is not answered, what was sent first.
    pub fn fail(&mut self) -> Vec<Operation<C>> {
        let mut sent: Vec<_> = self.outstanding.drain().collect();
        sent.sort_unstable_by_key(|(request_id, _)| *request_id);
        let sent = sent.into_iter().map(|(_, request)| request.operation);
        sent.chain(self.queue.drain(..)).collect()
    }
}

fn misbehaved(message: String) -> PeerMisbehaved {
    PeerMisbehaved::new(TerminateCause::RdmapUnspecified, message)
}
