//! The block table (draft 3.2, 6.2 to 6.4, profile 5), looked at as words in memory.

use std::sync::atomic::{AtomicBool, Ordering};

use kbtp_proto::blocks::{BlockTable, Entry, HandleRange, next_generation};
use kbtp_proto::types::EntryFlag;

use crate::words::{Shared, Watched, filled, network, zeroed};

const BASE: u64 = 7000;

fn table_at(base_handle: u64) -> (BlockTable, Shared) {
    let words = filled(8, 0xEEEE_EEEE_EEEE_EEEE);
    let table = BlockTable::new(Box::new(words.clone()), base_handle, 4).unwrap();
    (table, words)
}

fn unbound(generation: u16) -> Entry {
    Entry {
        flags: EntryFlag::empty(),
        generation,
        data_length: 0,
        block_offset: 0,
    }
}

#[test]
fn entries_start_unbound_with_generation_one() {
    let (table, words) = table_at(BASE);
    assert_eq!(network(&words), [0x0000_0001_0000_0000, 0].repeat(4));
    assert_eq!(table.read(BASE + 3), Ok(unbound(1)));
}

#[test]
fn the_octets_of_a_bound_entry() {
    let (mut table, words) = table_at(BASE);
    let entry = table.bind(BASE + 2, 0x1122_3344_5566_7788, 0x1234, true).unwrap();
    assert_eq!(network(&words)[4..6], [0x0003_0002_0000_1234, 0x1122_3344_5566_7788]);
    assert_eq!(table.read(BASE + 2), Ok(entry));
    assert_eq!((entry.valid(), entry.sealed(), entry.generation), (true, true, 2));
}

#[test]
fn generations_go_round_without_zero() {
    let (mut table, words) = table_at(BASE);
    assert_eq!(table.bind(BASE, 64, 1, false).unwrap().generation, 2);
    assert_eq!(table.unbind(BASE).unwrap().generation, 3);
    words[0].store(0x0000_FFFE_0000_0000_u64.to_be(), Ordering::SeqCst);
    assert_eq!(table.bind(BASE, 64, 1, false).unwrap().generation, 65535);
    assert_eq!(table.unbind(BASE).unwrap().generation, 1);
    assert_eq!([1, 65534, 65535].map(next_generation), [2, 65535, 1]);
}

#[test]
fn update_changes_data_length_and_sets_sealed_but_nothing_else() {
    let (mut table, words) = table_at(BASE);
    table.bind(BASE, 0x40, 10, false).unwrap();
    table.update(BASE, 0, false).unwrap();
    assert_eq!(network(&words)[..2], [0x0001_0002_0000_0000, 0x40]);
    table.update(BASE, u32::MAX, true).unwrap();
    assert_eq!(network(&words)[..2], [0x0003_0002_FFFF_FFFF, 0x40]);
}

#[test]
fn an_unbound_entry_keeps_its_generation_alone() {
    let (mut table, words) = table_at(BASE);
    table.bind(BASE, 0x40, 10, true).unwrap();
    assert_eq!(table.unbind(BASE), Ok(unbound(3)));
    assert_eq!(network(&words)[..2], [0x0000_0003_0000_0000, 0]);
}

/// Draft 3.2: Block Offset before the rest; profile 5: the rest in one store.
#[test]
fn a_reader_between_any_two_stores_sees_valid_only_with_the_block_it_means() {
    let watched = Watched::new(zeroed(8));
    let mut table = BlockTable::new(Box::new(watched.clone()), BASE, 4).unwrap();
    watched.take_states();
    table.bind(BASE, 0xAB40, 10, true).unwrap();
    table.unbind(BASE).unwrap();
    table.bind(BASE, 0xCD40, 20, false).unwrap();
    table.update(BASE, 30, true).unwrap();
    let seen: Vec<_> = watched.take_states().iter().map(|state| (state[0], state[1])).collect();
    assert_eq!(
        seen,
        [
            (0x0000_0001_0000_0000, 0xAB40),
            (0x0003_0002_0000_000A, 0xAB40),
            (0x0000_0003_0000_0000, 0xAB40),
            (0x0000_0003_0000_0000, 0),
            (0x0000_0003_0000_0000, 0xCD40),
            (0x0001_0004_0000_0014, 0xCD40),
            (0x0003_0004_0000_001E, 0xCD40),
        ]
    );
}

#[test]
fn the_range_test_is_unsigned_and_a_table_may_pass_two_to_the_sixty_four() {
    let (mut table, words) = table_at(u64::MAX - 1);
    let handles = [u64::MAX - 2, u64::MAX - 1, 0, 1, 2];
    assert_eq!(
        handles.map(|handle| table.contains(handle)),
        [false, true, true, true, false]
    );
    table.bind(1, 0x40, 10, false).unwrap();
    assert_eq!(network(&words)[6] >> 48, 1);
    let range = HandleRange {
        first: u64::MAX,
        count: 3,
    };
    assert_eq!(table.bound_handles(range).unwrap().collect::<Vec<_>>(), [1]);
}

#[test]
fn bound_handles_of_a_range() {
    let (mut table, _) = table_at(BASE);
    for handle in [BASE, BASE + 1, BASE + 3] {
        table.bind(handle, 0x40, 0, handle == BASE).unwrap();
    }
    let bound = |first, count| {
        let handles = table.bound_handles(HandleRange { first, count });
        handles.map(Iterator::collect::<Vec<_>>).map_err(|error| error.0)
    };
    assert_eq!(bound(BASE, 4).unwrap(), [BASE, BASE + 1, BASE + 3]);
    assert_eq!(bound(BASE + 1, 2).unwrap(), [BASE + 1]);
    for (first, count) in [(BASE + 1, 4), (BASE - 1, 2), (BASE + 1, u64::MAX)] {
        assert!(bound(first, count).unwrap_err().contains("not inside the table"));
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let (mut table, words) = table_at(BASE);
    assert!(table.update(BASE, 0, false).unwrap_err().0.contains("not bound"));
    assert!(table.unbind(BASE).unwrap_err().0.contains("not bound"));
    table.bind(BASE, 0x40, 8, true).unwrap();
    let before = network(&words);
    assert!(table.bind(BASE, 0x80, 8, true).unwrap_err().0.contains("is bound"));
    assert!(table.update(BASE, 0, false).unwrap_err().0.contains("is sealed"));
    for handle in [BASE - 1, BASE + 4, 0, u64::MAX] {
        assert!(table.read(handle).unwrap_err().0.contains("not in the table"));
    }
    assert_eq!(network(&words), before);
}

#[test]
fn memory_that_does_not_fit() {
    assert!(BlockTable::new(Box::new(zeroed(6)), 0, 4).is_err());
    assert!(BlockTable::new(Box::new(zeroed(0)), 0, 0).is_err());
    assert!(BlockTable::new(Box::new(zeroed(8)), 0, u64::MAX).is_err());
}

#[test]
fn unknown_flags_are_kept() {
    let (mut table, words) = table_at(BASE);
    words[0].store(0x8001_0005_0000_0007_u64.to_be(), Ordering::SeqCst);
    let entry = table.read(BASE).unwrap();
    assert_eq!(
        (entry.flags.bits(), entry.generation, entry.data_length),
        (0x8001, 5, 7)
    );
    assert_eq!(table.update(BASE, 1, true).unwrap().flags.bits(), 0x8003);
}

/// A reader that finds the same state word before and after the Block Offset has read a whole entry.
#[test]
fn a_reader_in_another_thread_never_takes_a_mixture_for_an_entry() {
    const TURNS: u32 = 30_000; // fewer than there are Generations for
    let (mut table, words) = table_at(BASE);
    let load = |i: usize| u64::from_be(words[i].load(Ordering::Acquire));
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !done.load(Ordering::Acquire) {
                let (before, block_offset, after) = (load(0), load(1), load(0));
                if before == after && before >> 48 != 0 {
                    assert_eq!(block_offset, 64 * (before & 0xFFFF_FFFF));
                }
            }
        });
        for turn in 1..=TURNS {
            table.bind(BASE, 64 * u64::from(turn), turn, true).unwrap();
            table.unbind(BASE).unwrap();
        }
        done.store(true, Ordering::Release);
    });
}
