//! The structures a target keeps its blocks in, one file each; see the Python package `tests/blocks`.
#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers of tests too

mod counter;
mod direct;
mod handles;
mod interleavings;
mod pool;
mod quota;
mod ring;
mod store;
mod store_machine;
mod table;
mod words;
