//! The part of a target that an RNIC executes by itself: the four sequences of draft 6, after HELLO.
//!
//! The twin of `checks`, `sequences` and `session` of the Python package `kbtp.target`, without I/O and without a clock:
//! messages, completions and the time come in, `Action`s go out. What is not served here is punted to the session in
//! Python, which opened this one with a `SessionGrant` and answers everything that is no well-formed request.
//!
//! ```text
//! received -> wire, checks -> turns -> sequences -> BlockStore
//!                  |            |          |
//!                  +-- Punt ----+----------+--> Write, Read, Repost, Send
//! ```

mod actions;
mod checks;
mod punt;
mod sequences;
mod session;
mod turns;

pub use actions::{Action, BindingTerms, SessionGrant, SessionMemory, SharedStore};
pub use punt::{ForcedPunts, PuntCounters, PuntReason};
pub use session::Session;
pub use turns::TaskId;
