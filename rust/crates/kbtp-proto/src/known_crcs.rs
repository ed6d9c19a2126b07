//! CRCs of memory that does not change, so that it is read once for them and not each time it is sent.

use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::crc32c::{Shift, join};
use crate::memory::{Octets, Span};

/// So many pieces are remembered; more come only from streams that cut differently.
const PIECES_MAX: usize = 256;

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
    /// The CRC32c `state` continued over `span`, which begins `from` octets behind the block's first.
    pub(crate) fn continued(&self, state: u32, span: Span, from: u32, octets: &dyn Octets) -> u32 {
        let is = |piece: &&Piece| (piece.from, piece.len) == (from, span.len);
        let known = self.lock().iter().find(is).copied();
        let Piece { crc, shift, .. } = known.unwrap_or_else(|| {
            let (len, crc, shift) = (span.len, octets.crc32c(0, span), Shift::of(span.len));
            let piece = Piece { from, len, crc, shift };
            let mut pieces = self.lock();
            if pieces.len() < PIECES_MAX {
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
