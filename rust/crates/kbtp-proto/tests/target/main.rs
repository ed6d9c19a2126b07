//! The native session against initiators, registered memory and a Python that are made here: see `world`.
#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers of tests too

mod binds;
mod completions;
mod ends;
mod oracle;
mod order_of_checks;
mod punts;
mod python;
mod random_sessions;
mod records;
mod turns;
mod world;
