//! What the native session leaves to the session in Python, and why.
//!
//! A request is punted whole and untouched: nothing of it was begun, its receive buffer is not reposted.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::ApiMisuse;

macro_rules! punt_reasons {
    ($($(#[$doc:meta])* $variant:ident = $name:literal;)*) => {
        /// Why a message is not served here.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum PuntReason {
            $($(#[$doc])* $variant,)*
        }

        impl PuntReason {
            /// Every reason there is, each at the place `self as usize`.
            pub const ALL: &[PuntReason] = &[$(PuntReason::$variant,)*];

            /// The name that counters have.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(PuntReason::$variant => $name,)*
                }
            }
        }
    };
}

punt_reasons! {
    /// A message that is too short, or whose opcode is none of LOAD, STORE, ALLOC_STORE, FREE and, if granted, BIND.
    NotARequest = "NOT_A_REQUEST";
    /// Its version or flags are answered with UNSUPPORTED.
    Unsupported = "UNSUPPORTED";
    /// Its size is answered with MALFORMED.
    Malformed = "MALFORMED";
    /// A BIND: what becomes of tickets is Python's to decide.
    Bind = "BIND";
    /// An earlier request on its handle was punted and is not resolved.
    BehindPunt = "BEHIND_PUNT";
    /// An ALLOC_STORE of a session whose Head only its device may move: Python knows whether its peer still can.
    HeadOfDevice = "HEAD_OF_DEVICE";
    /// A test asked for it.
    Forced = "FORCED";
}

impl fmt::Display for PuntReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// How many messages were punted for which reason, over all sessions of a target.
#[derive(Debug, Default)]
pub struct PuntCounters([AtomicU64; PuntReason::ALL.len()]);

impl PuntCounters {
    /// One more.
    pub fn count(&self, reason: PuntReason) {
        if let Some(counter) = self.0.get(reason as usize) {
            counter.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each reason with its number so far.
    pub fn read(&self) -> impl Iterator<Item = (PuntReason, u64)> {
        PuntReason::ALL
            .iter()
            .zip(&self.0)
            .map(|(reason, counter)| (*reason, counter.load(Ordering::Relaxed)))
    }
}

/// Punts well-formed requests at random, so that tests see both ways and every mixture of them.
#[derive(Clone, Debug)]
pub struct ForcedPunts {
    probability: f64,
    state: u64,
}

impl ForcedPunts {
    /// `probability` is that of a punt, for each request; equal seeds draw equally.
    pub fn new(probability: f64, seed: u64) -> Result<Self, ApiMisuse> {
        if !(0.0..=1.0).contains(&probability) {
            let message = format!("probability of a forced punt {probability}: 0 to 1 expected");
            return Err(ApiMisuse(message));
        }
        Ok(Self {
            probability,
            state: seed,
        })
    }

    /// Whether the next request is punted.
    pub(super) fn draw(&mut self) -> bool {
        // SplitMix64 (Steele, Lea, Flood 2014): any seed will do, also small ones in a row.
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.state;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        bits ^= bits >> 31;
        let below_one = (bits >> 11) as f64 / (1u64 << 53) as f64;
        below_one < self.probability
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(probability: f64, seed: u64) -> f64 {
        let mut punts = ForcedPunts::new(probability, seed).unwrap();
        (0..10_000).filter(|_| punts.draw()).count() as f64 / 10_000.0
    }

    #[test]
    fn none_all_and_about_as_many_as_asked_for_are_punted() {
        assert_eq!((share(0.0, 1), share(1.0, 1)), (0.0, 1.0));
        for seed in 0..20 {
            assert!((share(0.25, seed) - 0.25).abs() < 0.03);
        }
    }

    #[test]
    fn equal_seeds_draw_equally() {
        let draws = |seed| {
            let mut punts = ForcedPunts::new(0.5, seed).unwrap();
            (0..64).map(|_| punts.draw()).collect::<Vec<_>>()
        };
        assert_eq!(draws(7), draws(7));
        assert_ne!(draws(7), draws(8));
    }

    #[test]
    fn what_is_no_probability_is_refused() {
        for wrong in [-0.1, 1.1, f64::NAN, f64::INFINITY] {
            assert!(ForcedPunts::new(wrong, 0).is_err());
        }
    }

    #[test]
    fn reasons_are_counted_apart() {
        let counters = PuntCounters::default();
        PuntReason::ALL
            .iter()
            .enumerate()
            .for_each(|(n, reason)| (0..n).for_each(|_| counters.count(*reason)));
        let read: Vec<_> = counters.read().collect();
        assert_eq!(read.len(), 7);
        for (n, (reason, count)) in read.into_iter().enumerate() {
            assert_eq!((reason, count), (PuntReason::ALL[n], n as u64));
        }
        assert_eq!(PuntReason::BehindPunt.to_string(), "BEHIND_PUNT");
    }
}
