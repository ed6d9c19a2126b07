//! Memory for the data of STOREs until all of it is there (profile 6.5), kept for the next ones: the system clears fresh
//! memory page by page, which costs more than the data's way through the network's stack.

use std::collections::BTreeMap;
use std::sync::Mutex;

use kbtp_proto::memory::{RegionId, Span};

use crate::core::lock;
use crate::device::DeviceShared;
use crate::memory::Buffer;

/// What is kept by a device at most, all sizes together.
const KEPT_MAX_BYTES: u64 = 32 * 1024 * 1024;

const SMALLEST_BYTES: u32 = 4096;

/// Staging memory of a device that nobody uses. Its lock is taken last.
#[derive(Debug, Default)]
pub(crate) struct Staging(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// By the binary logarithm of their size.
    regions: BTreeMap<usize, Vec<RegionId>>,
    bytes: u64,
}

/// The binary logarithm of the size of a piece that has room for `length_bytes`: sizes are powers of two.
fn size_of_piece(length_bytes: u32) -> usize {
    u64::from(length_bytes.max(SMALLEST_BYTES)).next_power_of_two().ilog2() as usize
}

impl Staging {
    fn take(&self, size: usize) -> Option<RegionId> {
        let mut kept = lock(&self.0);
        let region = kept.regions.get_mut(&size)?.pop()?;
        kept.bytes -= 1 << size;
        Some(region)
    }

    /// False if there is enough already.
    fn keep(&self, size: usize, region: RegionId) -> bool {
        let mut kept = lock(&self.0);
        let fits = kept.bytes + (1 << size) <= KEPT_MAX_BYTES;
        if fits {
            kept.regions.entry(size).or_default().push(region);
            kept.bytes += 1 << size;
        }
        fits
    }
}

impl DeviceShared {
    /// Memory for `length_bytes` octets that no peer reaches, with anything in it; None if the system gives none.
    pub(crate) fn take_staging(&self, length_bytes: u32) -> Option<Span> {
        let size = size_of_piece(length_bytes);
        let region = match self.staging.take(size) {
            Some(region) => region,
            None => {
                let buffer = Buffer::try_zeroed(1 << size)?;
                self.table_mut().memories.insert(buffer, false)
            }
        };
        Some(Span {
            region,
            offset: 0,
            len: length_bytes,
        })
    }

    /// `staging` from `take_staging` is not needed any more.
    pub(crate) fn give_staging(&self, staging: Span) {
        if !self.staging.keep(size_of_piece(staging.len), staging.region) {
            self.table().memories.release(staging.region);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;
    use crate::options::Options;

    #[test]
    fn what_is_given_back_is_used_again_for_what_fits_it() {
        let device = Device::open(Options::default()).shared;
        let first = device.take_staging(5000).unwrap();
        let second = device.take_staging(5000).unwrap();
        assert_ne!(first.region, second.region);
        device.give_staging(first);
        let smaller = device.take_staging(4096).unwrap();
        assert_ne!(smaller.region, first.region);
        let again = device.take_staging(8192).unwrap();
        assert_eq!((again.region, again.len), (first.region, 8192));
    }

    #[test]
    fn only_so_much_is_kept() {
        let device = Device::open(Options::default()).shared;
        let pieces: Vec<_> = (0..5).map(|_| device.take_staging(16 << 20).unwrap()).collect();
        pieces.into_iter().for_each(|piece| device.give_staging(piece));
        assert_eq!(lock(&device.staging.0).bytes, KEPT_MAX_BYTES);
        assert!(device.table().memories.unheld().any());
    }
}
