//! CRC32c of values whose parts have theirs.

use kbtp_proto::crc32c::{Shift, join};
use pyo3::prelude::*;

/// The CRC32c over octets with CRC32c `first` and then `second_bytes` others with `second`.
#[pyfunction]
pub(crate) fn joined_checksum(first: u32, second: u32, second_bytes: u32) -> u32 {
    join(first, second, Shift::of(second_bytes))
}
