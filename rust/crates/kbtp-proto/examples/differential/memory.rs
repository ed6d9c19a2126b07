//! Registered memory of one stream: an `StagTable`, and the octets that it speaks of.

use std::cell::RefCell;
use std::rc::Rc;

use kbtp_proto::crc32c;
use kbtp_proto::memory::{Octets, RegionId, Span, StreamMemory};
use kbtp_proto::stag::{Access, PdId, Registered, Registration, StagTable, StreamId};
use kbtp_proto::types::{ApiMisuse, PeerMisbehaved};
use serde::Deserialize;

use crate::octets::Hex;

/// Regions lie so far apart, at addresses that are multiples of 8.
const REGION_SPACING: u64 = 1 << 20;
const STAG_STEP: u32 = 0x1111;

#[derive(Deserialize)]
pub(crate) struct Region {
    octets: Hex,
    access: u8,
    base_to: u64,
    scope: Scope,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Scope {
    Domain,
    Stream,
    OtherStream,
    OtherDomain,
}

/// The octets of every region, and those of receive buffers and sinks, which are no region's.
#[derive(Clone, Default)]
pub(crate) struct Contents {
    regions: Rc<RefCell<Vec<Vec<u8>>>>,
    still: bool,
}

impl Contents {
    pub(crate) fn add(&self, octets: Vec<u8>) -> Span {
        let mut regions = self.regions.borrow_mut();
        let (region, len) = (RegionId(regions.len() as u64), octets.len() as u32);
        regions.push(octets);
        Span { region, offset: 0, len }
    }

    pub(crate) fn octets(&self, span: Span) -> Vec<u8> {
        self.with(span, |octets| octets.to_vec())
    }

    fn with<R>(&self, span: Span, act: impl FnOnce(&mut [u8]) -> R) -> R {
        let region = &mut self.regions.borrow_mut()[span.region.0 as usize];
        act(&mut region[span.offset as usize..][..span.len as usize])
    }
}

impl Octets for Contents {
    fn write(&mut self, span: Span, data: &[u8]) {
        self.with(span, |octets| octets.copy_from_slice(data));
    }

    fn crc32c(&self, state: u32, span: Span) -> u32 {
        self.with(span, |octets| crc32c::update(state, octets))
    }

    fn read(&self, span: Span, into: &mut Vec<u8>) {
        self.with(span, |octets| into.extend_from_slice(octets));
    }

    fn is_still(&self, _: Span) -> bool {
        self.still
    }
}

/// What the stream under test may reach.
pub(crate) struct Rights {
    table: StagTable,
    stream: StreamId,
    other_stream: StreamId,
    other_domain: PdId,
    next_stag: u32,
    granted: Vec<(Registered, Span)>,
    pub(crate) contents: Contents,
}

impl Rights {
    pub(crate) fn new(first_stag: u32, still: bool, regions: &[Region]) -> Result<Self, ApiMisuse> {
        let mut table = StagTable::new();
        let (domain, other_domain) = (table.allocate_pd(), table.allocate_pd());
        let (stream, other_stream) = (table.open_stream(domain)?, table.open_stream(domain)?);
        let contents = Contents {
            regions: Rc::default(),
            still,
        };
        let mut rights = Self {
            table,
            stream,
            other_stream,
            other_domain,
            next_stag: first_stag,
            granted: Vec::new(),
            contents,
        };
        regions.iter().try_for_each(|region| rights.grant(region))?;
        Ok(rights)
    }

    fn grant(&mut self, region: &Region) -> Result<(), ApiMisuse> {
        let span = self.contents.add(region.octets.0.clone());
        let domain = self.stream.pd();
        let (pd, scope) = match region.scope {
            Scope::Domain => (domain, None),
            Scope::Stream => (domain, Some(self.stream)),
            Scope::OtherStream => (domain, Some(self.other_stream)),
            Scope::OtherDomain => (self.other_domain, None),
        };
        let registration = Registration {
            region: span.region,
            address: REGION_SPACING * (1 + span.region.0),
            len: span.len.into(),
            writable: true,
            access: Access::from_bits_retain(region.access),
            pd,
            scope,
            base_to: region.base_to,
        };
        let next_stag = &mut self.next_stag;
        let registered = self.table.register(&registration, &mut || draw(next_stag))?;
        self.granted.push((registered, span));
        Ok(())
    }

    /// What the peer may be told of each region, and its octets as they are now.
    pub(crate) fn regions(&self) -> impl Iterator<Item = (u32, bool, Vec<u8>)> {
        self.granted.iter().map(|(registered, span)| {
            let valid = self.table.is_valid(registered.stag, span.region);
            (registered.stag, valid, self.contents.octets(*span))
        })
    }

    pub(crate) fn revoke(&mut self, index: usize) {
        if let Some((registered, span)) = self.granted.get(index) {
            self.table.revoke(registered.stag, span.region);
        }
    }

    /// The other stream of the domain ends.
    pub(crate) fn close_other_stream(&mut self) {
        self.table.close_stream(self.other_stream);
    }
}

/// In place of randomness: both sides of a comparison draw the same.
fn draw(next_stag: &mut u32) -> u32 {
    let stag = *next_stag;
    *next_stag = stag.wrapping_add(STAG_STEP);
    stag
}

impl StreamMemory for Rights {
    fn place(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.table.place(self.stream, stag, to, len)
    }

    fn read_source(&mut self, stag: u32, to: u64, len: u32) -> Result<Span, PeerMisbehaved> {
        self.table.read_source(self.stream, stag, to, len)
    }

    fn atomic(&mut self, stag: u32, to: u64, operate: &mut dyn FnMut(u64) -> u64) -> Result<u64, PeerMisbehaved> {
        let span = self.table.atomic(self.stream, stag, to)?;
        Ok(self.contents.with(span, |octets| {
            let mut word = [0; size_of::<u64>()];
            word.copy_from_slice(octets);
            let old = u64::from_ne_bytes(word);
            octets.copy_from_slice(&operate(old).to_ne_bytes());
            old
        }))
    }

    fn invalidate(&mut self, stag: u32) -> Result<(), PeerMisbehaved> {
        let region = self.table.invalidate(self.stream, stag)?;
        self.table.revoke(stag, region);
        Ok(())
    }

    fn lend_sink_stag(&mut self) -> u32 {
        let next_stag = &mut self.next_stag;
        self.table.lend_stag(&mut || draw(next_stag)).unwrap_or_default()
    }

    fn return_sink_stag(&mut self, stag: u32) {
        self.table.return_stag(stag);
    }
}
