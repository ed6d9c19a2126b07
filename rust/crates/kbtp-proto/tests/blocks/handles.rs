//! Assigned handle ranges (profile 3 "Handle ranges are disjoint").

use kbtp_proto::blocks::{AssignedRanges, HandleRange};
use proptest::prelude::*;

const fn range(first: u64, count: u64) -> HandleRange {
    HandleRange { first, count }
}

#[test]
fn the_range_test_is_unsigned() {
    let handles = range(100, 10);
    assert_eq!(
        [99, 100, 109, 110].map(|handle| handles.contains(handle)),
        [false, true, true, false]
    );
    assert!(range(u64::MAX, 2).contains(0));
}

#[test]
fn the_domain_of_a_handle() {
    let mut ranges = AssignedRanges::new(range(u64::MAX - 1, 6));
    ranges.assign(range(u64::MAX - 1, 3), 7).unwrap();
    ranges.assign(range(1, 2), 8).unwrap();
    let handles = [u64::MAX - 2, u64::MAX - 1, u64::MAX, 0, 1, 2, 3, 4];
    let domains = [None, Some(7), Some(7), Some(7), Some(8), Some(8), None, None];
    assert_eq!(handles.map(|handle| ranges.domain_of(handle)), domains);
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let mut ranges = AssignedRanges::new(range(1000, 9));
    ranges.assign(range(1003, 3), 1).unwrap();
    for wrong in [
        range(1000, 0),
        range(999, 2),
        range(1006, 4),
        range(1000, u64::MAX),
        range(1003, 3),
        range(1000, 4),
        range(1005, 1),
        range(1000, 9),
    ] {
        assert!(ranges.assign(wrong, 2).is_err(), "{wrong:?}");
    }
    for wrong in [range(1003, 2), range(1004, 2), range(1000, 3), range(0, 3)] {
        assert!(ranges.release(wrong).unwrap_err().0.contains("is not assigned"));
    }
    assert_eq!(ranges.domain_of(1005), Some(1));
    ranges.release(range(1003, 3)).unwrap();
    assert!(ranges.release(range(1003, 3)).is_err());
    ranges.assign(range(1000, 9), 2).unwrap();
}

proptest! {
    /// Any order of assign and release, against one domain a handle.
    #[test]
    fn ranges_stay_disjoint_and_none_is_lost(
        base in prop::sample::select(vec![0, 5000, u64::MAX - 6, u64::MAX - 11]),
        steps in prop::collection::vec((any::<bool>(), 0_u64..12, 1_u64..8), 0..60),
    ) {
        let mut ranges = AssignedRanges::new(range(base, 12));
        let mut model = [None; 12];
        let mut assigned: Vec<(u64, u64)> = Vec::new();
        for (number, (assigns, position, count)) in steps.into_iter().enumerate() {
            let piece = range(base.wrapping_add(position), count);
            let places = position as usize..((position + count) as usize).min(12);
            if assigns {
                let fits = position + count <= 12 && model[places.clone()].iter().all(Option::is_none);
                prop_assert_eq!(ranges.assign(piece, number as u64).is_ok(), fits);
                if fits {
                    assigned.push((position, count));
                    model[places].fill(Some(number as u64));
                }
            } else if let Some(&(position, count)) = assigned.get(position as usize) {
                assigned.retain(|&other| other != (position, count));
                ranges.release(range(base.wrapping_add(position), count)).unwrap();
                model[position as usize..(position + count) as usize].fill(None);
            }
            for (position, &domain) in model.iter().enumerate() {
                prop_assert_eq!(ranges.domain_of(base.wrapping_add(position as u64)), domain);
            }
        }
    }
}
