//! The native RNIC: user-space iWARP over TCP in Rust, the twin of `kbtp.rnic.reference`; and the same over queue pairs of
//! rdma-core (`kbtp_verbs`).
//!
//! From below: `memory` (registered octets), `tcp` (sockets), `event_loop` (readiness and timers), `goodbye` (the end of
//! a connection), `posting` (checks of work requests), `operation` and `completions` (a connection in use): over TCP
//! `iwarp_operation`, over rdma-core `verbs_operation` with `verbs_requests` and `staging`. Then `stream_state`,
//! `stream_end` and `stream`, `connector` and `verbs_connector` (active start-up), `listener`, `verbs_listener` and
//! `request` (passive start-up), `core`, `channel` and `crew`, `device`, `blocks` (the structures of a target), `offload`
//! (its sequences), `initiator` and `requester` (an initiator's requests).
//!
//! Log records go through the `log` crate with target "kbtp.rnic", never while a lock of this crate is held.
#![deny(unsafe_code)]

mod ahead;
pub mod api;
pub mod blocks;
pub mod channel;
mod completions;
mod connector;
mod core;
mod crew;
pub mod device;
pub mod error;
mod event_loop;
mod goodbye;
pub mod initiator;
mod iwarp_operation;
mod listener;
#[allow(unsafe_code, reason = "registered memory is somebody else's; see there")]
pub mod memory;
pub mod offload;
mod operation;
pub mod options;
mod posting;
pub mod request;
pub mod requester;
mod staging;
pub mod stream;
mod stream_end;
mod stream_state;
mod tcp;
mod verbs_connector;
mod verbs_listener;
mod verbs_operation;
mod verbs_outstanding;
mod verbs_requests;

pub use event_loop::{EVENTS, one_processor};
