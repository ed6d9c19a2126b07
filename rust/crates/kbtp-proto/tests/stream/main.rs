//! `IwarpStream` against a peer that is written by hand, against another `IwarpStream`, and against noise.
#![allow(clippy::unwrap_used, clippy::panic)] // in the helpers of tests too

mod exchange;
mod inbound;
mod noise;
mod outbound;
mod peer;
mod vectors;
mod watched;
