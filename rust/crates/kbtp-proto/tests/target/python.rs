//! What Python does with a punted request: all of it, at once and as a whole.

use kbtp_proto::blocks::{Entry, FreeToken, Freeing};
use kbtp_proto::memory::Span;
use kbtp_proto::target::SharedStore;
use kbtp_proto::types::{RequestFlag, Status};
use kbtp_proto::wire::{Completion, HEAD_BYTES_MAX, Operation, Request};

use crate::oracle::refusal;
use crate::world::{BLOCK, MAX_MESSAGE, POOL, Punted, World, repost, take};

impl World {
    /// There is a punted message, and no FREE of Python's on its handle that waits for LOADs (profile 3 "Same handle").
    pub(crate) fn can_serve_punt(&self, number: usize) -> bool {
        let Some(punted) = self.peers[number].punted.front() else {
            return false;
        };
        let message = self.message(number, punted);
        let waits =
            |(peer, free, _): &(usize, Request, u64)| *peer == number && free.handle.to_be_bytes() == message[12..20];
        !self.python_frees.values().any(waits)
    }

    /// Serve the oldest punted message, wholly and at once; what it was.
    pub(crate) fn serve_punt(&mut self, number: usize) -> Punted {
        let punted = self.peers[number].punted.pop_front().unwrap();
        let message = self.message(number, &punted);
        let head = &message[..message.len().min(HEAD_BYTES_MAX)];
        let request = Request::parse(head, punted.length_bytes).unwrap();
        let inline = &message[request.inline_at as usize..];
        let grant = self.peers[number].grant.clone();
        let allowed = match request.operation {
            Operation::Load => self.store.with(|store| store.domain_of(request.handle)) == Some(grant.domain),
            _ => grant.handles.contains(request.handle),
        };
        let entry = allowed.then(|| self.entry(request.handle));
        let status = refusal(&request, entry, BLOCK);
        if status == Status::Success {
            match request.operation {
                Operation::Load => self.python_load(number, &request),
                Operation::Store => self.python_store(number, &request, inline),
                Operation::AllocStore => return self.python_alloc_store(number, &request, inline, punted),
                Operation::Free => return self.python_free(number, request, punted),
            }
            let entry = self.entry(request.handle);
            self.answer(number, &request, punted.slot, status, Some(entry));
        } else {
            self.answer(number, &request, punted.slot, status, entry);
        }
        punted
    }

    pub(crate) fn message(&self, number: usize, punted: &Punted) -> Vec<u8> {
        self.regions.octets(Span {
            region: self.peers[number].grant.receives,
            offset: punted.slot * u64::from(MAX_MESSAGE),
            len: punted.length_bytes,
        })
    }

    fn python_load(&mut self, number: usize, request: &Request) {
        let data = self.data(request.handle);
        let buffer = self.peers[number].buffers.get_mut(&request.data.stag).unwrap();
        buffer[..data.len()].copy_from_slice(&data);
    }

    fn source(&self, number: usize, request: &Request, inline: &[u8]) -> Vec<u8> {
        if request.flags.contains(RequestFlag::INLINE) {
            inline.to_vec()
        } else {
            self.peers[number].buffers[&request.data.stag].clone()
        }
    }

    fn python_store(&mut self, number: usize, request: &Request, inline: &[u8]) {
        let data = self.source(number, request, inline);
        let (length, seal) = (data.len() as u32, request.flags.contains(RequestFlag::SEAL));
        let regions = self.regions.clone();
        let copy = |offset| {
            let block = Span {
                region: POOL,
                offset,
                len: length,
            };
            regions.with(block, |octets| octets.copy_from_slice(&data));
        };
        self.store
            .with(|store| store.commit_store(request.handle, length, seal, copy))
            .unwrap();
    }

    fn python_alloc_store(&mut self, number: usize, request: &Request, inline: &[u8], punted: Punted) -> Punted {
        let data = self.source(number, request, inline);
        let holder = self.peers[number].grant.holder;
        let usage = self
            .store
            .with(|store| (store.quotas().usage(holder), store.quotas().quota(holder)));
        let status = if usage.0 == usage.1 {
            Status::NoSpace
        } else {
            self.bind(holder, request.handle, &data, request.flags.contains(RequestFlag::SEAL));
            Status::Success
        };
        let entry = self.entry(request.handle);
        self.answer(number, request, punted.slot, status, Some(entry));
        punted
    }

    fn python_free(&mut self, number: usize, request: Request, punted: Punted) -> Punted {
        self.next_token += 1;
        let (token, holder) = (self.next_token, self.peers[number].grant.holder);
        let freeing = self
            .store
            .with(|store| store.begin_free(request.handle, holder, FreeToken::Python(token), None))
            .unwrap();
        match freeing {
            Freeing::Freed(entry) => self.answer(number, &request, punted.slot, Status::Success, Some(entry)),
            Freeing::Waiting => {
                self.python_frees.insert(token, (number, request, punted.slot));
            }
        }
        punted
    }

    pub(crate) fn answer(&mut self, number: usize, request: &Request, slot: u64, status: Status, entry: Option<Entry>) {
        let entry_told = entry.filter(|_| request.operation != Operation::Free);
        let sized = status == Status::Success || (status == Status::LengthError && !request.mutates());
        let completion = Completion {
            request_id: request.request_id,
            handle: request.handle,
            generation: entry.map_or(0, |entry| entry.generation),
            status,
            data_length: entry_told.filter(|_| sized).map_or(0, |entry| entry.data_length),
            block_offset: entry_told
                .filter(|_| status == Status::Success)
                .map_or(0, |entry| entry.block_offset),
        };
        let peer = &mut self.peers[number];
        repost(peer, &self.regions, slot);
        take(peer, &completion.pack(), request.invalidates());
        self.resolved(number, request.handle);
    }
}
