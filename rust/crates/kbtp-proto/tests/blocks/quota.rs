//! Allocation quotas (draft 3.4, profile 6.8).

use kbtp_proto::blocks::QuotaLedger;
use proptest::prelude::*;

#[test]
fn the_sum_of_quotas_is_not_larger_than_the_pool() {
    let mut ledger = QuotaLedger::new(10).unwrap();
    assert_eq!([1, 2, 3].map(|holder| ledger.grant(holder, 6).unwrap()), [6, 4, 0]);
    assert_eq!(ledger.left(), 0);
}

#[test]
fn what_a_released_holder_still_uses_returns_unit_by_unit() {
    let mut ledger = QuotaLedger::new(5).unwrap();
    ledger.grant(1, 4).unwrap();
    assert_eq!([ledger.charge(1, 0), ledger.charge(1, 0)], [Ok(true), Ok(true)]);
    ledger.release(1).unwrap();
    assert_eq!((ledger.left(), ledger.quota(1), ledger.usage(1)), (3, 2, 2));
    assert_eq!(ledger.charge(1, 0), Ok(false));
    ledger.credit(1).unwrap();
    assert_eq!(ledger.left(), 4);
    ledger.credit(1).unwrap();
    assert_eq!((ledger.left(), ledger.quota(1), ledger.usage(1)), (5, 0, 0));
    assert_eq!(ledger.grant(1, 5), Ok(5));
}

#[test]
fn tickets_that_are_not_bound_count() {
    let mut ledger = QuotaLedger::new(5).unwrap();
    ledger.grant(1, 3).unwrap();
    ledger.charge(1, 0).unwrap();
    for (tickets, room) in [(1, true), (2, false), (u32::MAX, false)] {
        assert_eq!(ledger.is_reached(1, tickets), !room);
    }
    assert_eq!(ledger.charge(1, 2), Ok(false));
    assert_eq!((ledger.charge(1, 1), ledger.usage(1)), (Ok(true), 2));
    assert!(ledger.is_reached(2, 0), "who has no account has no room");
}

#[test]
fn a_quota_that_is_set_apart_is_taken_from_no_other() {
    let mut ledger = QuotaLedger::new(5).unwrap();
    assert_eq!(ledger.grant(1, 4), Ok(4));
    ledger.set_apart(1, 3).unwrap();
    ledger.set_apart(2, 2).unwrap();
    assert_eq!((ledger.left(), ledger.quota(1), ledger.quota(2)), (5, 3, 2));
    assert_eq!((ledger.charge(1, 0), ledger.usage(1)), (Ok(true), 1));
    ledger.release(2).unwrap();
    ledger.release(1).unwrap();
    assert_eq!((ledger.left(), ledger.quota(1), ledger.quota(2)), (5, 1, 0));
    ledger.credit(1).unwrap();
    assert_eq!((ledger.left(), ledger.quota(1)), (5, 0));
}

#[test]
fn what_is_used_released_or_apart_is_not_set_apart() {
    let mut ledger = QuotaLedger::new(5).unwrap();
    for (holder, spoil) in [(1, 0), (2, 1), (3, 2)] {
        ledger.grant(holder, 1).unwrap();
        match spoil {
            0 => drop(ledger.charge(holder, 0)),
            1 => ledger.set_apart(holder, 1).unwrap(),
            _ => {
                ledger.charge(holder, 0).unwrap();
                ledger.release(holder).unwrap();
            }
        }
        let before = (ledger.left(), ledger.quota(holder), ledger.usage(holder));
        assert!(
            ledger
                .set_apart(holder, 2)
                .unwrap_err()
                .0
                .contains("in use, released or set apart")
        );
        assert_eq!((ledger.left(), ledger.quota(holder), ledger.usage(holder)), before);
    }
}

#[test]
fn misuse_is_refused() {
    let mut ledger = QuotaLedger::new(5).unwrap();
    ledger.grant(1, 4).unwrap();
    let words = |result: Result<(), kbtp_proto::types::ApiMisuse>| result.unwrap_err().0;
    assert!(words(ledger.credit(1)).contains("more often than charged"));
    assert!(words(ledger.grant(1, 1).map(drop)).contains("has a quota already"));
    assert!(words(ledger.charge(2, 0).map(drop)).contains("has no quota"));
    assert!(words(ledger.credit(2)).contains("has no quota"));
    assert!(words(ledger.release(2)).contains("has no quota"));
    ledger.charge(1, 0).unwrap();
    ledger.release(1).unwrap();
    assert!(words(ledger.release(1)).contains("released already"));
    assert!(QuotaLedger::new(0).is_err());
}

#[derive(Clone, Copy, Default)]
struct Account {
    open: bool,
    released: bool,
    quota: u32,
    usage: u32,
}

proptest! {
    /// Any order of calls against a model of three accounts.
    #[test]
    fn no_unit_is_lost(steps in prop::collection::vec((0..4, 0_usize..3, 0_u32..10), 0..80)) {
        let mut ledger = QuotaLedger::new(7).unwrap();
        let mut accounts = [Account::default(); 3];
        for (step, holder, requested) in steps {
            let left = 7 - accounts.iter().map(|account| account.quota).sum::<u32>();
            let account = &mut accounts[holder];
            let id = holder as u64;
            match step {
                0 if !account.open => {
                    let quota = requested.min(left);
                    prop_assert_eq!(ledger.grant(id, requested), Ok(quota));
                    *account = Account { open: true, quota, ..Account::default() };
                }
                1 if account.open => {
                    prop_assert_eq!(ledger.charge(id, 0), Ok(account.usage < account.quota));
                    account.usage += u32::from(account.usage < account.quota);
                }
                2 if account.open && account.usage > 0 => {
                    ledger.credit(id).unwrap();
                    account.usage -= 1;
                    account.quota -= u32::from(account.released);
                }
                3 if account.open && !account.released => {
                    ledger.release(id).unwrap();
                    account.released = true;
                    account.quota = account.usage;
                }
                _ => {}
            }
            if account.released && account.usage == 0 {
                *account = Account::default();
            }
            for (id, account) in accounts.iter().enumerate() {
                prop_assert_eq!((ledger.quota(id as u64), ledger.usage(id as u64)), (account.quota, account.usage));
            }
            prop_assert_eq!(ledger.left(), 7 - accounts.iter().map(|account| account.quota).sum::<u32>());
        }
    }
}
