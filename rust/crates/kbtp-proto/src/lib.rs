//! iWARP without I/O and without memory: RFC 5044 (MPA), RFC 5041 (DDP), RFC 5040 (RDMAP), RFC 6581 and RFC 7306.
//!
//! The twin of the Python package `kbtp.iwarp`, file by file and name by name; `stag` is the twin of
//! `kbtp.verbs.stag_table`, and above iWARP `wire`, `blocks`, `target` and `initiator` are those of the packages of these
//! names, as far as an RNIC executes sequences and carries requests. What a peer sends never makes anything in here panic.
#![forbid(unsafe_code)]

pub mod atomics;
pub mod blocks;
pub mod crc32c;
pub mod ddp;
pub mod fpdu;
pub mod initiator;
pub mod known_crcs;
pub mod limits;
pub mod memory;
pub mod mpa;
pub mod own_maps;
pub mod rdmap;
pub mod stag;
pub mod stream;
pub mod target;
pub mod terminate;
pub mod types;
pub mod wire;
