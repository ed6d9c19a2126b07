//! The four sequences of the draft's section 6, as the RNIC executes them.
//!
//! | operation | draft | steps here |
//! |---|---|---|
//! | LOAD | 6.1 | pin, RDMA Write + completion, unpin when the Write has left the block |
//! | STORE | 6.2 | pin, RDMA Read into the block (or inline), update the entry, unpin, completion |
//! | ALLOC_STORE | 6.3 | quota, block from the ring, RDMA Read into it (or inline), bind, completion |
//! | FREE | 6.4 | clear the entry, wait for pins, clear, back to the ring, completion |
//!
//! What is read of an entry and what is begun because of it are one critical section of the store: another session could
//! free the block between them.

use super::actions::{Action, SessionMemory, SharedStore};
use super::checks::refusal;
use super::session::Session;
use super::turns::TaskId;
use crate::blocks::{Allocation, BlockStore, Entry, FreeToken, Freeing, Pin};
use crate::known_crcs::KnownCrcs;
use crate::memory::Span;
use crate::stream::Piece;
use crate::types::{ApiMisuse, RequestFlag, Status};
use crate::wire::{Operation, Request};

/// One request on its way through its sequence.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) request: Request,
    /// Which receive buffer holds it; the inline data stays there until the completion.
    pub(super) slot: u64,
    pub(super) length_bytes: u32,
    /// Of the block that a LOAD reads or a STORE changes.
    pin: Option<Pin>,
    /// Some of the data of a STORE may be in its block.
    pub(super) placed: bool,
    /// The block an ALLOC_STORE took from the ring and has not bound yet.
    block_offset: Option<u64>,
}

impl Task {
    pub(super) fn new(request: Request, slot: u64, length_bytes: u32) -> Self {
        Self {
            request,
            slot,
            length_bytes,
            pin: None,
            placed: false,
            block_offset: None,
        }
    }
}

/// How far a sequence got in the critical section that began it.
enum Begun<T> {
    /// With this status, and what the entry was.
    Refused(Status, Option<Entry>),
    Done(T),
}

impl<S: SharedStore> Session<S> {
    /// Run `task` up to its first wait or its end.
    pub(super) fn start(&mut self, task: TaskId, memory: &mut dyn SessionMemory) -> Result<(), ApiMisuse> {
        let Some(request) = self.tasks.get(&task).map(|task| task.request) else {
            return Ok(());
        };
        match request.operation {
            Operation::Load => self.load(task, &request),
            Operation::Store => self.store_mapped(task, &request, memory),
            Operation::AllocStore => self.store_unmapped(task, &request, memory),
            Operation::Free => self.free(task, &request),
        }
    }

    /// Judge `request` by its entry, and `begin` it if nothing refuses it, in one critical section.
    fn begin<T>(
        &self,
        request: &Request,
        begin: impl FnOnce(&mut BlockStore, Entry) -> Result<Begun<T>, ApiMisuse>,
    ) -> Result<Begun<T>, ApiMisuse> {
        self.store.with(|store| {
            let entry = self.entry(store, request)?;
            let status = refusal(request, entry.as_ref(), store.pool().block_size_bytes());
            match (status, entry) {
                (None, Some(entry)) => begin(store, entry),
                (status, entry) => Ok(Begun::Refused(status.unwrap_or(Status::HandleOutOfRange), entry)),
            }
        })
    }

    /// The entry `request` may touch, None if its handle is out of range (profile 1, HANDLE_OUT_OF_RANGE).
    fn entry(&self, store: &BlockStore, request: &Request) -> Result<Option<Entry>, ApiMisuse> {
        let handle = request.handle;
        let allowed = match request.operation {
            Operation::Load => store.domain_of(handle) == Some(self.grant.domain),
            _ => self.grant.handles.contains(handle),
        };
        if allowed {
            store.read(handle).map(Some)
        } else {
            Ok(None)
        }
    }

    fn in_block(&self, store: &BlockStore, block_offset: u64, len: u32) -> Result<Span, ApiMisuse> {
        let offset = store
            .pool()
            .position(block_offset)
            .ok_or_else(|| ApiMisuse(format!("block offset {block_offset:#x} is not a block of this pool")))?;
        let region = self.grant.pool;
        Ok(Span { region, offset, len })
    }

    fn task_mut(&mut self, task: TaskId) -> Result<&mut Task, ApiMisuse> {
        self.tasks
            .get_mut(&task)
            .ok_or_else(|| ApiMisuse(format!("{task:?} is none of this session")))
    }

    // --- LOAD ---

    fn load(&mut self, task: TaskId, request: &Request) -> Result<(), ApiMisuse> {
        let begun = self.begin(request, |store, entry| {
            let octets = self.in_block(store, entry.block_offset, entry.data_length)?;
            let pin = store.begin_load(request.handle, self.grant.stream)?; // draft 6.1 step 1, profile 6.1
            let known = KnownCrcs::are_worth_it(octets.len)
                .then(|| store.known_crcs(&entry))
                .flatten();
            let source = match known {
                Some(known) => Piece::Known(octets, known),
                None if store.stays_still(&entry) => Piece::Still(octets),
                // profile 6.1: a STORE of its owner's may come between; draft 6.6: or its holder write it.
                None => Piece::Changing(octets),
            };
            Ok(Begun::Done((pin, entry, source)))
        })?;
        match begun {
            Begun::Refused(status, entry) => {
                // profile 2: LENGTH_ERROR of a LOAD says how large a buffer it takes.
                self.finish(task, status, entry.as_ref(), status == Status::LengthError);
                Ok(())
            }
            Begun::Done((pin, entry, source)) => {
                self.task_mut(task)?.pin = Some(pin);
                let empty = entry.data_length == 0; // profile 6.6: it moves nothing
                if !empty {
                    self.write(task, request, source); // draft 6.1 step 2
                }
                // The Send is posted behind the Write, so its delivery says the data is there (RFC 5040 5.5 rule 5).
                self.complete(task, Status::Success, Some(&entry), true); // draft 6.1 step 3
                if empty { self.load_written(task) } else { Ok(()) }
            }
        }
    }

    /// The last octet of a LOAD has left the block.
    pub(super) fn load_written(&mut self, task: TaskId) -> Result<(), ApiMisuse> {
        let pin = self.task_mut(task)?.pin.take();
        self.resolve(task);
        self.unpin(pin)
    }

    fn unpin(&mut self, pin: Option<Pin>) -> Result<(), ApiMisuse> {
        let Some(pin) = pin else { return Ok(()) };
        if let Some(finished) = self.store.with(|store| store.end_load(&pin))? {
            self.act(Action::Freed(finished));
        }
        Ok(())
    }

    // --- STORE ---

    fn store_mapped(
        &mut self,
        task: TaskId,
        request: &Request,
        memory: &mut dyn SessionMemory,
    ) -> Result<(), ApiMisuse> {
        if let Some(source) = self.data_at_hand(task, request) {
            return self.store_at_hand(task, request, source, memory);
        }
        let begun = self.begin(request, |store, _| {
            let pin = store.begin_store(request.handle, self.grant.stream)?;
            let sink = self.in_block(store, pin.block_offset, request.data.length)?;
            Ok(Begun::Done((pin, sink)))
        })?;
        match begun {
            Begun::Refused(status, entry) => self.finish(task, status, entry.as_ref(), false),
            Begun::Done((pin, sink)) => {
                self.task_mut(task)?.pin = Some(pin);
                self.read(task, sink); // draft 6.2 step 2
            }
        }
        Ok(())
    }

    /// The data of a STORE or ALLOC_STORE that brought it along, or has none (profile 6.6: that truncates or binds an
    /// empty block).
    fn data_at_hand(&self, task: TaskId, request: &Request) -> Option<Span> {
        let Task { slot, length_bytes, .. } = self.tasks.get(&task)?;
        let at_hand = request.is_inline() || request.data.length == 0;
        let message = self.message(*slot, *length_bytes);
        at_hand.then(|| message.part(request.inline_at, request.inline_bytes))
    }

    /// The data is in the message, or there is none.
    fn store_at_hand(
        &mut self,
        task: TaskId,
        request: &Request,
        source: Span,
        memory: &mut dyn SessionMemory,
    ) -> Result<(), ApiMisuse> {
        let begun = self.begin(request, |store, _| {
            let pin = store.begin_store(request.handle, self.grant.stream)?;
            let block = self.in_block(store, pin.block_offset, source.len)?;
            Ok(Begun::Done((pin, block)))
        })?;
        match begun {
            Begun::Refused(status, entry) => {
                self.finish(task, status, entry.as_ref(), false);
                Ok(())
            }
            Begun::Done((pin, block)) => {
                self.task_mut(task)?.pin = Some(pin);
                if source.len > 0 {
                    // Not within the critical section, for that may take long and other sessions wait meanwhile: the pin
                    // keeps the block from being freed, and the turns on the handle keep all else away.
                    memory.copy(source, block);
                }
                self.commit_store(task, request, source.len)
            }
        }
    }

    /// All data is in the block.
    fn commit_store(&mut self, task: TaskId, request: &Request, len: u32) -> Result<(), ApiMisuse> {
        let (handle, seal) = (request.handle, seals(request));
        let pin = self.task_mut(task)?.pin.take();
        // draft 6.2 step 3
        let committed = self.store.with(|store| store.commit_store(handle, len, seal, |_| ()));
        self.unpin(pin)?;
        let entry = committed?;
        self.finish(task, Status::Success, Some(&entry), true); // draft 6.2 step 4
        Ok(())
    }

    // --- ALLOC_STORE ---

    fn store_unmapped(
        &mut self,
        task: TaskId,
        request: &Request,
        memory: &mut dyn SessionMemory,
    ) -> Result<(), ApiMisuse> {
        let begun = self.begin(request, |store, entry| {
            // draft 6.3 step 2
            match store.begin_alloc_store(request.handle, self.grant.holder)? {
                Allocation::Refused(status) => Ok(Begun::Refused(status, Some(entry))),
                Allocation::Block(block_offset) => {
                    let sink = self.in_block(store, block_offset, request.data.length)?;
                    Ok(Begun::Done((block_offset, sink)))
                }
            }
        })?;
        let (block_offset, sink) = match begun {
            Begun::Done(begun) => begun,
            Begun::Refused(status, entry) => {
                self.finish(task, status, entry.as_ref(), false);
                return Ok(());
            }
        };
        self.task_mut(task)?.block_offset = Some(block_offset);
        // draft 6.3 step 3
        let Some(source) = self.data_at_hand(task, request) else {
            self.read(task, sink);
            return Ok(());
        };
        if source.len > 0 {
            // Nobody knows of this block before it is bound.
            memory.copy(source, sink);
        }
        self.commit_alloc_store(task, request)
    }

    fn commit_alloc_store(&mut self, task: TaskId, request: &Request) -> Result<(), ApiMisuse> {
        let block_offset = self.task_mut(task)?.block_offset;
        let block_offset = block_offset.ok_or_else(|| ApiMisuse(format!("{task:?} has no block")))?;
        let (length, seal) = (request.data.length, seals(request));
        // draft 6.3 step 4
        let entry = self
            .store
            .with(|store| store.commit_alloc_store(request.handle, block_offset, length, seal))?;
        self.finish(task, Status::Success, Some(&entry), true); // draft 6.3 step 5
        Ok(())
    }

    /// The RDMA Read of a STORE or ALLOC_STORE has placed all of its data.
    pub(super) fn store_fetched(&mut self, task: TaskId) -> Result<(), ApiMisuse> {
        let request = self.task_mut(task)?.request;
        match request.operation {
            Operation::Store => self.commit_store(task, &request, request.data.length),
            _ => self.commit_alloc_store(task, &request),
        }
    }

    // --- FREE ---

    fn free(&mut self, task: TaskId, request: &Request) -> Result<(), ApiMisuse> {
        let token = FreeToken::Stream {
            stream: self.grant.stream,
            request: task.0,
        };
        let deadline = self.drain_deadline(); // profile 6.1
        let begun = self.begin(request, |store, _| {
            let freeing = store.begin_free(request.handle, self.grant.holder, token, deadline)?;
            Ok(Begun::Done(freeing))
        })?;
        match begun {
            Begun::Refused(status, entry) => self.finish(task, status, entry.as_ref(), false),
            // draft 6.4 step 4, profile 8.6
            Begun::Done(Freeing::Freed(entry)) => self.finish(task, Status::Success, Some(&entry), false),
            Begun::Done(Freeing::Waiting) => {}
        }
        Ok(())
    }

    // --- the end of the stream ---

    /// Resolve a task as not done: whatever it holds goes back (profile 6.5).
    pub(super) fn abandon(&mut self, task: Task) -> Result<(), ApiMisuse> {
        if task.request.operation == Operation::Store && task.placed {
            // The block holds neither the old nor the new (profile 6.5, 8.9).
            let handle = task.request.handle;
            self.store.with(|store| store.commit_store(handle, 0, false, |_| ()))?;
        }
        if let Some(block_offset) = task.block_offset {
            let (handle, holder) = (task.request.handle, self.grant.holder);
            self.store
                .with(|store| store.abort_alloc_store(handle, block_offset, holder))?;
        }
        self.unpin(task.pin)
    }
}

fn seals(request: &Request) -> bool {
    request.flags.contains(RequestFlag::SEAL)
}
