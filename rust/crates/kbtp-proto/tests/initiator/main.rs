//! An initiator's session without a stream: what it sends, and what each answer of a target ends.

mod destinations;
mod handles;
mod session;
