//! An initiator's side of a session after HELLO_ACK: credits, handles, which request a COMPLETION answers.
//!
//! The twin of `kbtp.initiator.session`: no I/O, no memory, no clock. Whoever drives it says where the data of a request
//! lies (`Data`) when there is a credit for it, and takes back what it ends.

mod destinations;
mod handles;
mod session;

pub use destinations::Destinations;
pub use handles::HandleChooser;
pub use session::{Data, Ended, Operation, Ready, Session, Terms};
