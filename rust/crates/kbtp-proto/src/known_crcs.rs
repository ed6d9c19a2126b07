//! CRCs of memory that does not change, so that it is read once for them and not each time it is sent.

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::crc32c::{Shift, join};
use crate::memory::{Octets, Span};

/// So many pieces are remembered; more come only from streams that cut differently.
const PIECES_MAX: usize = 256;

/// Shorter pieces are not remembered: their CRC is taken as fast as it is looked up and joined.
const PIECE_MIN_BYTES: u32 = 8192;

#[derive(Clone, Copy, Debug)]
struct Piece {
    from: u32,
    len: u32,
    crc: u32,
    shift: Shift,
}

/// Of the pieces of one block for as long as it holds the same data; shared by all who send it.
///
/// The block store makes a new one for each binding, so that none outlives the data it is of. Should that be changed all
/// the same, what is sent has a wrong CRC: the peer refuses it, and nobody takes it for the block.
#[derive(Debug, Default)]
pub struct KnownCrcs(Mutex<Vec<Piece>>);

impl KnownCrcs {
    /// Whether anything is remembered of so many octets.
    pub(crate) fn are_worth_it(length_bytes: u32) -> bool {
        length_bytes >= PIECE_MIN_BYTES
    }

    /// The CRC32c `state` continued over `span`, which begins `from` octets behind the block's first.
    pub(crate) fn continued(&self, state: u32, span: Span, from: u32, octets: &dyn Octets) -> u32 {
        if !Self::are_worth_it(span.len) {
            return octets.crc32c(state, span);
        }
        let is = |piece: &&Piece| (piece.from, piece.len) == (from, span.len);
        let (known, full) = {
            let pieces = self.lock();
            (pieces.iter().find(is).copied(), pieces.len() >= PIECES_MAX)
        };
        if known.is_none() && full {
            return octets.crc32c(state, span);
        }
        let Piece { crc, shift, .. } = known.unwrap_or_else(|| {
            let (len, crc, shift) = (span.len, octets.crc32c(0, span), Shift::of(span.len));
            let piece = Piece { from, len, crc, shift };
            let mut pieces = self.lock();
            // Another event loop may have sent the same meanwhile.
            if pieces.len() < PIECES_MAX && !pieces.iter().any(|piece| is(&piece)) {
                pieces.push(piece);
            }
            piece
        });
        join(state, crc, shift)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Piece>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// It is one or another, whatever it knows.
impl PartialEq for KnownCrcs {
    fn eq(&self, other: &Self) -> bool {
        ptr::eq(self, other)
    }
}

impl Eq for KnownCrcs {}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::crc32c;
    use crate::memory::RegionId;

    /// Octets of which the state that each CRC was continued from is kept.
    struct Asked<F: Fn()> {
        octets: Vec<u8>,
        states: RefCell<Vec<u32>>,
        meanwhile: F,
    }

    fn asked<F: Fn()>(meanwhile: F) -> Asked<F> {
        Asked {
            octets: (0..4 * PIECE_MIN_BYTES).map(|n| (n % 251) as u8).collect(),
            states: RefCell::default(),
            meanwhile,
        }
    }

    impl<F: Fn()> Asked<F> {
        fn of(&self, span: Span) -> &[u8] {
            let from = span.offset as usize;
            &self.octets[from..from + span.len as usize]
        }

        /// What `known` makes of `len` octets from octet `from` on, which is right, and what it asked for.
        fn continued(&self, known: &KnownCrcs, state: u32, from: u32, len: u32) -> Vec<u32> {
            let (region, offset) = (RegionId(0), from.into());
            let span = Span { region, offset, len };
            let crc = known.continued(state, span, from, self);
            assert_eq!(crc, crc32c::update(state, self.of(span)));
            self.states.take()
        }
    }

    impl<F: Fn()> Octets for Asked<F> {
        fn write(&mut self, _: Span, _: &[u8]) {}

        fn crc32c(&self, state: u32, span: Span) -> u32 {
            self.states.borrow_mut().push(state);
            (self.meanwhile)();
            crc32c::update(state, self.of(span))
        }

        fn read(&self, span: Span, into: &mut Vec<u8>) {
            into.extend_from_slice(self.of(span));
        }

        fn is_still(&self, _: Span) -> bool {
            true
        }
    }

    #[test]
    fn long_pieces_are_read_once_and_short_ones_each_time() {
        let (known, octets) = (KnownCrcs::default(), asked(|| ()));
        for (len, again) in [(PIECE_MIN_BYTES, vec![]), (PIECE_MIN_BYTES - 1, vec![9])] {
            octets.continued(&known, 7, 3, len);
            assert_eq!(octets.continued(&known, 9, 3, len), again);
        }
        assert_eq!(known.lock().len(), 1);
    }

    #[test]
    fn of_more_pieces_than_are_remembered_the_crc_is_taken_at_once() {
        let (known, octets) = (KnownCrcs::default(), asked(|| ()));
        for from in 0..PIECES_MAX as u32 {
            assert_eq!(octets.continued(&known, 7, from, PIECE_MIN_BYTES), [0]);
        }
        for _ in 0..2 {
            assert_eq!(octets.continued(&known, 7, PIECES_MAX as u32, PIECE_MIN_BYTES), [7]);
        }
        assert!(octets.continued(&known, 7, 0, PIECE_MIN_BYTES).is_empty());
        assert_eq!(known.lock().len(), PIECES_MAX);
    }

    #[test]
    fn what_two_send_at_the_same_time_is_remembered_once() {
        let (known, other) = (KnownCrcs::default(), asked(|| ()));
        let octets = asked(|| assert_eq!(other.continued(&known, 1, 3, PIECE_MIN_BYTES), [0]));
        assert_eq!(octets.continued(&known, 7, 3, PIECE_MIN_BYTES), [0]);
        assert_eq!(known.lock().len(), 1);
    }
}
