//! libibverbs and librdmacm of rdma-core, loaded at run time: this builds without their headers, and runs without them
//! until somebody opens a device.
//!
//! `abi` has their structures, `library` their functions, `device` and `endpoint` what is made of these, `work` and
//! `events` what goes in and comes out, `machine` what there is on this machine and what is wrong with it.
//!
//! The crate is a binding: `library`, `device` and `endpoint` are where C is called, and all `unsafe`. Why it is sound:
//! every structure of the libraries has one owner here, which gives it back once, in the order in which they depend on
//! each other (`Drop`); the libraries and the contexts of devices are never given back. A device reaches memory through
//! keys alone and checks them, so that a wrong `Sge` is an error of the device's and no access. Whoever registers memory
//! has to promise that it stays (`Pd::register`); nothing else is asked of a caller.
#![deny(unsafe_code)]

pub mod abi;
#[allow(unsafe_code, reason = "calls libibverbs; see the head of the crate")]
mod device;
#[allow(unsafe_code, reason = "calls librdmacm and libibverbs; see the head of the crate")]
mod endpoint;
mod events;
#[allow(unsafe_code, reason = "loads libibverbs and librdmacm; see the head of the crate")]
mod library;
mod machine;
mod work;

pub use abi::Sge;
pub use device::{Context, Mr, Pd};
pub use endpoint::Endpoint;
pub use events::{CmEvent, Completion, Failure, Parameters, refusal};
pub use machine::{Atomics, Device, GidKind, Missing, Port, Survey, explain_registration, open, survey};
pub use work::{Depths, Kind, SendWork};
