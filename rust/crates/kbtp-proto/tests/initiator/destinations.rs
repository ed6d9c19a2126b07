use kbtp_proto::initiator::Destinations;
use proptest::prelude::*;

#[test]
fn ranges_that_touch_do_not_overlap() {
    let mut held = Destinations::default();
    assert!(held.claim(100, 200));
    assert!(held.claim(200, 300));
    assert!(held.claim(50, 100));
    for (start, end) in [(199, 201), (0, 51), (120, 130), (0, 1000), (100, 200)] {
        assert!(!held.claim(start, end), "{start}..{end}");
    }
    held.release(100);
    assert!(held.claim(120, 130));
}

proptest! {
    /// Against a set of octets.
    #[test]
    fn a_claim_is_granted_if_none_of_its_octets_is_held(steps in proptest::collection::vec((0usize..60, 1usize..9, any::<bool>()), 0..60)) {
        let mut held = Destinations::default();
        let mut model: Vec<(usize, usize)> = Vec::new();
        for (start, length, release) in steps {
            if release && let Some((start, _)) = model.pop() {
                held.release(start);
                continue;
            }
            let free = model.iter().all(|&(from, to)| to <= start || start + length <= from);
            prop_assert_eq!(held.claim(start, start + length), free);
            if free {
                model.push((start, start + length));
            }
        }
    }
}
