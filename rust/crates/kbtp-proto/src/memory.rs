//! How registered memory is named here, and what a stream asks of it.
//!
//! Nothing in this crate touches an octet of registered memory: a stream names octets by `Span`, and the RNIC moves them.

use crate::types::PeerMisbehaved;

/// A registered piece of memory. The RNIC gives the number, and never gives one twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// Octets of a registered region: of a receive buffer, a source or a sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The region they lie in.
    pub region: RegionId,
    /// From the region's first octet to theirs.
    pub offset: u64,
    /// How many they are.
    pub len: u32,
}

impl Span {
    /// `len` of its octets, from its octet `from` on; what is outside of it is cut off.
    #[must_use]
    pub fn part(self, from: u32, len: u32) -> Self {
        let from = from.min(self.len);
        let offset = self.offset.saturating_add(u64::from(from));
        Self {
            region: self.region,
            offset,
            len: len.min(self.len - from),
        }
    }
}

/// The registered memory that one stream may reach.
///
/// Every refusal is `PeerMisbehaved` with the Terminate cause to send. Each call checks anew: a region that was
/// revoked between two segments of one message is refused from the next segment on (RFC 5041 8.3).
pub trait StreamMemory {
    /// Where `len` (> 0) octets of an RDMA Write segment go.
    ///
    /// Refuses with DDP_INVALID_STAG, DDP_BASE_OR_BOUNDS, DDP_STAG_NOT_ASSOCIATED or DDP_TO_WRAP (RFC 5041 7).
    fn place(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved>;

    /// The `len` (> 0) octets that are left to send of a Read Response.
    ///
    /// Refuses with one of the RDMAP remote protection causes 00 to 04 (RFC 5040 4.8).
    fn read_source(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved>;

    /// Stores `operate(old)` over the native 64-bit value at `to` and returns `old` (RFC 7306 5).
    ///
    /// No other atomic of this RNIC may come between the load and the store. Refuses with one of the RDMAP remote
    /// protection causes 00 to 04, or RDMAP_CATASTROPHIC_STREAM for an address that is not 8-aligned (RFC 7306 8.1);
    /// memory is then as it was.
    fn atomic(&mut self, stag: u32, to: u64, operate: &mut dyn FnMut(u64) -> u64) -> Result<u64, PeerMisbehaved>;

    /// Makes `stag` unusable for the peer, as a Send with Invalidate asks.
    ///
    /// Refuses with RDMAP_CANNOT_INVALIDATE (RFC 5040 7.2, 8.1.1 item 7).
    fn invalidate(&mut self, stag: u32) -> Result<(), PeerMisbehaved>;

    /// An unpredictable STag, in no table, that names the sink of one Read Request.
    fn lend_sink_stag(&mut self) -> u32;

    /// `stag` from `lend_sink_stag` names nothing any more.
    fn return_sink_stag(&mut self, stag: u32);
}

/// The only way to the octets that a `Span` names.
pub trait Octets {
    /// `data` has `span.len` octets.
    fn write(&mut self, span: Span, data: &[u8]);

    /// The CRC32c `state` continued over the octets of `span` (see `crc32c::update`).
    fn crc32c(&self, state: u32, span: Span) -> u32;

    /// Appends the octets of `span` to `into`.
    fn read(&self, span: Span, into: &mut Vec<u8>);

    /// Nothing but its owner can change the memory of a Send or an RDMA Write before that completes.
    ///
    /// Such a payload is sent from where it lies. Any other is copied first and the CRC is taken over the copy: a change
    /// meanwhile (a peer's Write or atomic) can then tear the payload but never makes the CRC wrong, which would end the
    /// stream.
    fn is_still(&self, span: Span) -> bool;
}
