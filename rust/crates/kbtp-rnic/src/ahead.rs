//! Memory that octets will go through next, fetched into the processor's cache while its event loop has nothing else to do.
//!
//! Between a request and the data that it brings about lies a round trip, in which whoever spins only looks at a socket.
//! Nothing but time depends on any of this.

use std::collections::VecDeque;

use kbtp_proto::memory::Span;

use crate::memory::{Memories, Use};

/// More than fits into a cache would drive out what was fetched first.
const AHEAD_MAX_BYTES: u32 = 256 * 1024;

/// Fetched between two looks at the socket.
const PIECE_BYTES: u32 = 16384;

/// What is to be fetched, in the order in which it will be needed.
#[derive(Debug, Default)]
pub(crate) struct Ahead {
    spans: VecDeque<(Span, Use)>,
    bytes: u32,
}

impl Ahead {
    pub(crate) fn add(&mut self, span: Span, for_what: Use) {
        let span = span.part(0, AHEAD_MAX_BYTES - self.bytes);
        if span.len > 0 {
            self.bytes += span.len;
            self.spans.push_back((span, for_what));
        }
    }

    /// What was awaited has begun to come.
    pub(crate) fn clear(&mut self) {
        self.spans.clear();
        self.bytes = 0;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Fetch the next piece; false if there is none.
    pub(crate) fn fetch(&mut self, memories: &Memories) -> bool {
        let Some((span, for_what)) = self.spans.front_mut() else {
            return false;
        };
        let piece = span.part(0, PIECE_BYTES);
        memories.prefetch(piece, *for_what);
        *span = span.part(piece.len, span.len - piece.len);
        if span.len == 0 {
            self.spans.pop_front();
        }
        self.bytes -= piece.len;
        true
    }
}

#[cfg(test)]
mod tests {
    use kbtp_proto::memory::RegionId;

    use super::*;

    fn span(offset: u64, len: u32) -> Span {
        let region = RegionId(7);
        Span { region, offset, len }
    }

    /// How often something is fetched until nothing is left.
    fn pieces(ahead: &mut Ahead) -> usize {
        // The region of these spans is not there, as after it was revoked: there is nothing to fetch, and nothing fails.
        let memories = Memories::default();
        (0..).take_while(|_| ahead.fetch(&memories)).count()
    }

    #[test]
    fn it_is_fetched_in_pieces_in_the_order_in_which_it_was_asked_for() {
        let mut ahead = Ahead::default();
        ahead.add(span(0, PIECE_BYTES + 1), Use::Read);
        ahead.add(span(100, 5), Use::Write);
        ahead.add(span(200, 0), Use::Write);
        assert!(ahead.fetch(&Memories::default()));
        assert_eq!(
            ahead.spans,
            [(span(PIECE_BYTES.into(), 1), Use::Read), (span(100, 5), Use::Write)]
        );
        assert_eq!((pieces(&mut ahead), ahead.bytes), (2, 0));
    }

    #[test]
    fn no_more_is_fetched_than_a_cache_holds() {
        let mut ahead = Ahead::default();
        ahead.add(span(0, AHEAD_MAX_BYTES - 1), Use::Read);
        ahead.add(span(0, 2), Use::Read);
        ahead.add(span(0, 1), Use::Read);
        assert_eq!(ahead.spans.len(), 2);
        assert_eq!(pieces(&mut ahead) as u32, AHEAD_MAX_BYTES / PIECE_BYTES + 1);
    }

    #[test]
    fn what_has_come_is_not_awaited() {
        let mut ahead = Ahead::default();
        ahead.add(span(0, AHEAD_MAX_BYTES), Use::Write);
        ahead.clear();
        assert_eq!(pieces(&mut ahead), 0);
        ahead.add(span(0, 1), Use::Write);
        assert_eq!(pieces(&mut ahead), 1);
    }
}
