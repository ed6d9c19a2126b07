//! The block pool (draft 3.1, profile 5).

use kbtp_proto::blocks::Pool;

const BASE: u64 = 0x10040;

#[test]
fn block_offsets_are_pool_base_plus_multiples_of_block_size() {
    let pool = Pool::new(576, 3, BASE).unwrap();
    for (k, offset) in [(0, BASE), (1, BASE + 576), (2, BASE + 1152)] {
        assert_eq!(pool.offset_of(k), Some(offset));
        assert_eq!(pool.index_of(offset), Some(k));
        assert_eq!(pool.position(offset), Some(576 * u64::from(k)));
    }
    assert_eq!(pool.offset_of(3), None);
    assert_eq!((pool.pool_base(), pool.length_bytes()), (BASE, 3 * 576));
}

#[test]
fn other_offsets_are_no_blocks() {
    let pool = Pool::new(576, 3, BASE).unwrap();
    for offset in [0, BASE - 576, BASE + 1, BASE + 575, BASE + 3 * 576, u64::MAX] {
        assert!(!pool.contains(offset));
        assert_eq!((pool.index_of(offset), pool.position(offset)), (None, None));
    }
}

#[test]
fn numbers_outside_the_profile_are_refused() {
    for (size, count, base, words) in [
        (448, 1, 0, "block size 448"),
        ((1 << 30) + 64, 1, 0, "block size"),
        (520, 1, 0, "multiple of 64"),
        (512, 0, 0, "block count 0"),
        (512, (1 << 28) + 1, 0, "block count"),
        (512, 1, 32, "pool base 0x20"),
        (512, 2, 0_u64.wrapping_sub(512), "below 2^64"),
    ] {
        let error = Pool::new(size, count, base).unwrap_err();
        assert!(error.0.contains(words), "{error}");
    }
}

#[test]
fn the_last_octets_below_two_to_the_sixty_four_can_be_a_pool() {
    let pool = Pool::new(512, 2, 0_u64.wrapping_sub(1024)).unwrap();
    assert_eq!(pool.offset_of(1), Some(0_u64.wrapping_sub(512)));
    assert!(!pool.contains(0));
}

#[test]
fn a_part_has_the_block_offsets_of_the_whole() {
    let pool = Pool::new(576, 5, BASE).unwrap();
    let part = pool.part(2, 2).unwrap();
    assert_eq!((part.block_count(), part.pool_base()), (2, BASE + 1152));
    assert_eq!(
        [0, 1, 2].map(|k| part.offset_of(k)),
        [pool.offset_of(2), pool.offset_of(3), None]
    );
    assert!(!part.contains(BASE + 576) && !part.contains(BASE + 4 * 576));
    assert_eq!(pool.part(0, 5), Ok(pool));
    for (first, count) in [(0, 0), (0, 6), (4, 2), (5, 1), (u32::MAX, 1), (1, u32::MAX)] {
        assert!(pool.part(first, count).is_err(), "{count} from {first}");
    }
}
