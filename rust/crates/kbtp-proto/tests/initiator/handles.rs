use std::collections::HashSet;

use kbtp_proto::initiator::HandleChooser;
use proptest::prelude::*;

#[test]
fn every_handle_is_given_out_once() {
    let mut handles = HandleChooser::new(500, 3);
    assert_eq!(
        (handles.take(), handles.take(), handles.take()),
        (Some(500), Some(501), Some(502))
    );
    assert_eq!(handles.take(), None);
    handles.free(501);
    assert_eq!((handles.take(), handles.take()), (Some(501), None));
}

#[test]
fn handles_of_somebody_else_do_not_count() {
    let mut handles = HandleChooser::new(500, 1);
    handles.bound(499);
    handles.bound(501);
    handles.free(7);
    assert_eq!((handles.take(), handles.take()), (Some(500), None));
}

#[test]
fn a_range_at_the_end_of_all_handles() {
    let mut handles = HandleChooser::new(u64::MAX, 1);
    assert_eq!((handles.take(), handles.take()), (Some(u64::MAX), None));
}

proptest! {
    #[test]
    fn what_is_taken_was_free(steps in proptest::collection::vec((0u8..3, 0u64..8), 0..80)) {
        let mut handles = HandleChooser::new(10, 6);
        let mut bound = HashSet::new();
        for (step, place) in steps {
            match step {
                0 => match handles.take() {
                    Some(handle) => prop_assert!((10..16).contains(&handle) && bound.insert(handle)),
                    None => prop_assert_eq!(bound.len(), 6),
                },
                1 => {
                    handles.bound(10 + place);
                    if place < 6 {
                        bound.insert(10 + place);
                    }
                }
                _ => {
                    handles.free(10 + place);
                    bound.remove(&(10 + place));
                }
            }
        }
    }
}
