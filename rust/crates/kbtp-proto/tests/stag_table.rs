//! The STag table: checklist sections S and D25 to D32, R17 to R23, R31 to R33, X17, X18.

use std::collections::HashSet;

use kbtp_proto::memory::{RegionId, Span};
use kbtp_proto::stag::{Access, PdId, Registered, Registration, StagTable, StreamId};
use kbtp_proto::types::{PeerMisbehaved, TerminateCause as Cause};
use proptest::prelude::*;

const R: Access = Access::REMOTE_READ;
const W: Access = Access::REMOTE_WRITE;
const A: Access = Access::REMOTE_ATOMIC;
const NONE: Access = Access::empty();
const ADDRESS: u64 = 0x7000_0000_1000;
const TO_TOP: u64 = u64::MAX;

/// A table with one domain and one stream, and a source of numbers that never repeats itself.
struct Bench {
    table: StagTable,
    pd: PdId,
    stream: StreamId,
    drawn: u32,
    regions: u64,
}

type Verdicts = (Option<Cause>, Option<Cause>, Option<Cause>);

impl Bench {
    fn new() -> Self {
        let mut table = StagTable::new();
        let pd = table.allocate_pd();
        let stream = table.open_stream(pd).expect("its own domain");
        Self {
            table,
            pd,
            stream,
            drawn: 0,
            regions: 0,
        }
    }

    fn registration(&mut self, len: u64, access: Access) -> Registration {
        self.regions += 1;
        Registration {
            region: RegionId(self.regions),
            address: ADDRESS * self.regions,
            len,
            writable: true,
            access,
            pd: self.pd,
            scope: None,
            base_to: 0,
        }
    }

    fn try_register(&mut self, registration: &Registration) -> Result<Registered, String> {
        let drawn = &mut self.drawn;
        let mut next = || {
            *drawn += 1;
            drawn.wrapping_mul(0x9E37_79B1)
        };
        self.table
            .register(registration, &mut next)
            .map_err(|misuse| misuse.to_string())
    }

    /// The STag of a new region.
    fn register(&mut self, registration: &Registration) -> u32 {
        let registered = self.try_register(registration).expect("nothing against it");
        assert!(registered.valid);
        registered.stag
    }

    fn region(&mut self, len: u64, access: Access) -> (u32, RegionId) {
        let registration = self.registration(len, access);
        (self.register(&registration), registration.region)
    }

    fn accesses_from(&self, stream: StreamId, stag: u32, to: u64) -> Verdicts {
        (
            cause_of(self.table.place(stream, stag, to, 8)),
            cause_of(self.table.read_source(stream, stag, to, 8)),
            cause_of(self.table.atomic(stream, stag, to)),
        )
    }

    /// What a Write, a Read and an atomic at `to` would be refused with.
    fn accesses(&self, stag: u32, to: u64) -> Verdicts {
        self.accesses_from(self.stream, stag, to)
    }

    fn place(&self, stag: u32, to: u64, len: u32) -> Option<Cause> {
        cause_of(self.table.place(self.stream, stag, to, len))
    }
}

fn cause_of<T>(result: Result<T, PeerMisbehaved>) -> Option<Cause> {
    result.err().map(|error| error.cause)
}

fn all_of(write: Cause, read: Cause) -> Verdicts {
    (Some(write), Some(read), Some(read))
}

fn unknown() -> Verdicts {
    all_of(Cause::DdpInvalidStag, Cause::RdmapInvalidStag)
}

fn foreign() -> Verdicts {
    all_of(Cause::DdpStagNotAssociated, Cause::RdmapStagNotAssociated)
}

#[test]
fn spans_are_exactly_the_octets_asked_for() {
    let mut bench = Bench::new();
    let registration = Registration {
        base_to: 100,
        ..bench.registration(16, Access::all())
    };
    let stag = bench.register(&registration);
    let span = |offset, len| Span {
        region: registration.region,
        offset,
        len,
    };
    assert_eq!(bench.table.place(bench.stream, stag, 105, 3), Ok(span(5, 3)));
    assert_eq!(bench.table.read_source(bench.stream, stag, 100, 16), Ok(span(0, 16)));
    assert_eq!(bench.table.atomic(bench.stream, stag, 108), Ok(span(8, 8)));
    assert!(bench.table.is_valid(stag, registration.region));
}

// --- S1, S2: association ---

#[test]
fn s1_a_stag_of_another_domain_is_refused() {
    let mut bench = Bench::new();
    let elsewhere = bench.table.allocate_pd();
    let other = bench.table.open_stream(elsewhere).unwrap();
    let (stag, region) = bench.region(8, Access::all());
    assert_eq!(bench.accesses_from(other, stag, 0), foreign());
    let refused = bench.table.invalidate(other, stag).unwrap_err();
    assert_eq!(refused.cause, Cause::RdmapCannotInvalidate);
    assert!(refused.message.ends_with("which is of another stream"));
    assert!(bench.table.is_valid(stag, region));
}

#[test]
fn s2_a_stag_of_another_stream_of_the_same_domain_is_refused() {
    let mut bench = Bench::new();
    let other = bench.table.open_stream(bench.pd).unwrap();
    let registration = Registration {
        scope: Some(bench.stream),
        ..bench.registration(8, Access::all())
    };
    let stag = bench.register(&registration);
    assert_eq!(bench.accesses(stag, 0), (None, None, None));
    assert_eq!(bench.accesses_from(other, stag, 0), foreign());
    assert_eq!(
        cause_of(bench.table.invalidate(other, stag)),
        Some(Cause::RdmapCannotInvalidate)
    );
}

// --- S3, D28: bounds and wrap ---

#[test]
fn s3_one_octet_before_or_after_is_refused() {
    let mut bench = Bench::new();
    let registration = Registration {
        base_to: 0x100,
        ..bench.registration(16, Access::all())
    };
    let stag = bench.register(&registration);
    let refused = all_of(Cause::DdpBaseOrBounds, Cause::RdmapBaseOrBounds);
    assert_eq!(bench.accesses(stag, 0x100), (None, None, None));
    assert_eq!(bench.accesses(stag, 0x108), (None, None, None));
    assert_eq!(bench.accesses(stag, 0xFF), refused);
    assert_eq!(bench.accesses(stag, 0x109), refused);
    assert_eq!(bench.place(stag, 0x100, 17), Some(Cause::DdpBaseOrBounds));
    assert_eq!(bench.place(stag, 0x10F, 1), None);
    assert_eq!(bench.place(stag, 0x110, 1), Some(Cause::DdpBaseOrBounds));
}

#[test]
fn d28_an_access_past_2_to_the_64_wraps() {
    let mut bench = Bench::new();
    let registration = Registration {
        base_to: TO_TOP - 15,
        ..bench.registration(16, Access::all())
    };
    let stag = bench.register(&registration);
    assert_eq!(bench.accesses(stag, TO_TOP - 7), (None, None, None));
    assert_eq!(
        bench.accesses(stag, TO_TOP - 6),
        all_of(Cause::DdpToWrap, Cause::RdmapToWrap)
    );
}

// --- S4: rights; the order of checks ---

#[test]
fn s4_only_granted_rights_work() {
    for bits in 0..8 {
        let (mut bench, granted) = (Bench::new(), Access::from_bits_truncate(bits));
        let (stag, _) = bench.region(8, granted);
        let refused = |right, cause| (!granted.contains(right)).then_some(cause);
        assert_eq!(
            bench.accesses(stag, 0),
            (
                refused(W, Cause::DdpInvalidStag),
                refused(R, Cause::RdmapAccessRights),
                refused(A, Cause::RdmapAccessRights)
            )
        );
    }
}

#[test]
fn checks_run_in_their_order() {
    let mut bench = Bench::new();
    let elsewhere = bench.table.allocate_pd();
    let other = bench.table.open_stream(elsewhere).unwrap();
    let (stag, _) = bench.region(16, NONE);
    let (atomic, _) = bench.region(16, A);
    assert_eq!(
        cause_of(bench.table.place(other, stag, TO_TOP, 8)),
        Some(Cause::DdpStagNotAssociated)
    );
    assert_eq!(bench.place(stag, TO_TOP, 8), Some(Cause::DdpToWrap));
    assert_eq!(bench.place(stag, 12, 8), Some(Cause::DdpBaseOrBounds));
    assert_eq!(bench.accesses(stag, 4).2, Some(Cause::RdmapAccessRights));
    assert_eq!(bench.accesses(atomic, 12).2, Some(Cause::RdmapBaseOrBounds));
    assert_eq!(bench.accesses(atomic, 4).2, Some(Cause::RdmapCatastrophicStream));
}

#[test]
fn x17_it_is_the_address_that_must_be_aligned() {
    for base_to in [0, 3] {
        let mut bench = Bench::new();
        let registration = bench.registration(21, A);
        let stag = bench.register(&Registration {
            address: ADDRESS + 3,
            base_to,
            ..registration
        });
        for skew in 0..14 {
            let expected = (skew % 8 != 5).then_some(Cause::RdmapCatastrophicStream);
            assert_eq!(bench.accesses(stag, base_to + skew).2, expected, "{skew}");
        }
    }
}

// --- S5: revocation ---

#[test]
fn s5_a_revoked_stag_reaches_nothing() {
    let mut bench = Bench::new();
    let (stag, region) = bench.region(8, Access::all());
    bench.table.revoke(stag, RegionId(region.0 + 1));
    assert!(bench.table.is_valid(stag, region), "it was another region's turn");
    bench.table.revoke(stag, region);
    bench.table.revoke(stag, region);
    assert!(!bench.table.is_valid(stag, region));
    assert_eq!(bench.accesses(stag, 0), unknown());
    let refused = bench.table.invalidate(bench.stream, stag).unwrap_err();
    assert!(refused.message.ends_with("which is unknown"));
}

#[test]
fn the_end_of_a_stream_revokes_its_scoped_regions_alone() {
    let mut bench = Bench::new();
    let other = bench.table.open_stream(bench.pd).unwrap();
    let stream = bench.stream;
    let mut scoped_to = |scope| {
        let registration = Registration {
            scope,
            ..bench.registration(8, R)
        };
        (bench.register(&registration), registration.region)
    };
    let (mine, shared, others) = (scoped_to(Some(stream)), scoped_to(None), scoped_to(Some(other)));

    bench.table.close_stream(bench.stream);
    bench.table.close_stream(bench.stream);

    let valid = [mine, shared, others].map(|(stag, region)| bench.table.is_valid(stag, region));
    assert_eq!(valid, [false, true, true]);
    assert_eq!(bench.accesses(shared.0, 0), unknown());
    assert_eq!(
        cause_of(bench.table.invalidate(bench.stream, shared.0)),
        Some(Cause::RdmapCannotInvalidate)
    );
    assert_eq!(bench.accesses_from(other, shared.0, 0).1, None);
}

#[test]
fn closing_the_table_revokes_everything() {
    let mut bench = Bench::new();
    let registration = Registration {
        scope: Some(bench.stream),
        ..bench.registration(8, R)
    };
    let scoped = bench.register(&registration);
    let (shared, region) = bench.region(8, Access::all());
    bench.table.close();
    assert!(!bench.table.is_valid(shared, region) && !bench.table.is_valid(scoped, registration.region));
}

// --- Send with Invalidate ---

#[test]
fn r31_a_peer_invalidates_what_is_its_own() {
    let mut bench = Bench::new();
    bench.table.open_stream(bench.pd).unwrap();
    let registration = Registration {
        scope: Some(bench.stream),
        ..bench.registration(8, W)
    };
    let stag = bench.register(&registration);
    assert_eq!(bench.table.invalidate(bench.stream, stag), Ok(registration.region));
    assert!(!bench.table.is_valid(stag, registration.region));
    assert_eq!(bench.place(stag, 0, 1), Some(Cause::DdpInvalidStag));
    assert!(
        cause_of(bench.table.invalidate(bench.stream, stag)).is_some(),
        "once is enough"
    );
    // Its octets are free again for another STag once it is revoked.
    let again = Registration {
        region: RegionId(77),
        ..registration
    };
    assert!(bench.table.register(&again, &mut || 99).is_err());
    bench.table.revoke(stag, registration.region);
    assert!(bench.table.register(&again, &mut || 99).is_ok());
}

#[test]
fn r33_a_region_of_the_domain_is_invalidated_only_while_one_stream_has_it() {
    let mut bench = Bench::new();
    let (stag, region) = bench.region(8, W);
    let other = bench.table.open_stream(bench.pd).unwrap();
    let refused = bench.table.invalidate(bench.stream, stag).unwrap_err();
    assert!(refused.message.ends_with("which is shared by streams"));
    bench.table.close_stream(other);
    assert_eq!(bench.table.invalidate(bench.stream, stag), Ok(region));
    assert!(!bench.table.is_valid(stag, region));
}

#[test]
fn r32_a_region_without_remote_rights_is_not_the_peers_to_invalidate() {
    let mut bench = Bench::new();
    let registration = Registration {
        scope: Some(bench.stream),
        ..bench.registration(8, NONE)
    };
    let stag = bench.register(&registration);
    let refused = bench.table.invalidate(bench.stream, stag).unwrap_err();
    assert_eq!(refused.cause, Cause::RdmapCannotInvalidate);
    assert!(refused.message.ends_with("which has no remote right"));
    assert!(bench.table.is_valid(stag, registration.region));
}

// --- STags ---

/// A source that gives `numbers` one after the other.
fn drawing(numbers: &[u32]) -> impl FnMut() -> u32 {
    let mut numbers = numbers.iter();
    move || *numbers.next().expect("another number")
}

#[test]
fn a_stag_is_never_zero_nor_one_in_use_nor_one_lent_nor_one_used_before() {
    let mut bench = Bench::new();
    let mut draw = drawing(&[0, 5, 5, 6, 5, 6, 7, 5, 6, 7, 8, 9]);
    let mut register = |table: &mut StagTable, region| {
        let registration = Registration {
            region: RegionId(region),
            address: ADDRESS,
            len: 1,
            writable: true,
            access: R,
            pd: bench.pd,
            scope: None,
            base_to: 0,
        };
        table.register(&registration, &mut draw).expect("a fresh number").stag
    };
    let first = register(&mut bench.table, 1);
    assert_eq!(first, 5);
    let lent = bench.table.lend_stag(&mut drawing(&[5, 6])).unwrap();
    bench.table.revoke(first, RegionId(1));
    let second = register(&mut bench.table, 2);
    bench.table.return_stag(lent);
    let third = register(&mut bench.table, 3);
    let fourth = register(&mut bench.table, 4);
    assert_eq!((lent, second, third, fourth), (6, 7, 8, 9));
}

#[test]
fn a_used_stag_comes_back_only_after_the_history_forgot_it() {
    let mut bench = Bench {
        table: StagTable::with_history(1),
        ..Bench::new()
    };
    bench.pd = bench.table.allocate_pd();
    let mut draw = drawing(&[1, 1, 2, 2, 1]);
    for expected in [1, 2, 1] {
        let registration = bench.registration(1, R);
        let stag = bench.table.register(&registration, &mut draw).unwrap().stag;
        assert_eq!(stag, expected);
        bench.table.revoke(stag, registration.region);
    }
}

#[test]
fn a_source_that_is_not_random_is_noticed() {
    let bench = Bench::new();
    assert_eq!(bench.table.lend_stag(&mut || 4), Ok(4));
    let refused = bench.table.lend_stag(&mut || 4).unwrap_err();
    assert_eq!(
        refused.0,
        "random_u32 gave no fresh STag in 1000 draws: it must be a source of randomness"
    );
}

#[test]
fn a_lent_stag_names_no_memory() {
    let bench = Bench::new();
    let lent = bench.table.lend_stag(&mut || 4).unwrap();
    assert_eq!(bench.accesses(lent, 0), unknown());
    bench.table.return_stag(lent);
    bench.table.return_stag(lent);
    assert!(bench.table.lend_stag(&mut || 4).is_err(), "it is remembered");
}

// --- what is refused at registration ---

#[test]
fn read_only_memory_gets_no_right_to_change_it() {
    let mut bench = Bench::new();
    for access in [W, A, Access::all()] {
        let registration = Registration {
            writable: false,
            ..bench.registration(8, access)
        };
        let refused = bench.try_register(&registration).unwrap_err();
        assert_eq!(
            refused,
            "a remote write or atomic right needs writable memory; this buffer is read-only"
        );
    }
    let registration = Registration {
        writable: false,
        ..bench.registration(8, R)
    };
    bench.register(&registration);
}

#[test]
fn a_foreign_domain_or_scope_is_refused() {
    let (mut bench, mut elsewhere) = (Bench::new(), Bench::new());
    let registration = Registration {
        pd: elsewhere.pd,
        ..bench.registration(1, R)
    };
    let foreign = "the protection domain must be one of this RNIC";
    assert_eq!(bench.try_register(&registration).unwrap_err(), foreign);
    assert_eq!(bench.table.open_stream(elsewhere.pd).unwrap_err().0, foreign);
    let other_pd = bench.table.allocate_pd();
    for (pd, scope) in [(other_pd, bench.stream), (bench.pd, elsewhere.stream)] {
        let registration = Registration {
            pd,
            scope: Some(scope),
            ..bench.registration(1, R)
        };
        let refused = bench.try_register(&registration).unwrap_err();
        assert_eq!(
            refused,
            "the stream a region is scoped to must be in the region's protection domain"
        );
    }
    elsewhere.table.close();
}

#[test]
fn a_region_scoped_to_a_stream_that_has_ended_is_born_revoked() {
    let mut bench = Bench::new();
    bench.table.close_stream(bench.stream);
    let registration = bench.registration(8, W);
    let scoped = Registration {
        scope: Some(bench.stream),
        ..registration
    };
    let born = bench.try_register(&scoped).unwrap();
    assert!(!born.valid && !bench.table.is_valid(born.stag, scoped.region));
    bench.table.revoke(born.stag, scoped.region);
    bench.register(&registration); // it grants nothing that could overlap
}

#[test]
fn a_region_that_is_empty_or_past_2_to_the_64_is_refused() {
    let mut bench = Bench::new();
    for base_to in [TO_TOP - 6, TO_TOP] {
        let registration = Registration {
            base_to,
            ..bench.registration(8, R)
        };
        assert!(
            bench
                .try_register(&registration)
                .unwrap_err()
                .starts_with("base_to must leave room for 8 octets")
        );
    }
    for (address, len) in [(ADDRESS, 0), (u64::MAX, 2)] {
        let registration = Registration {
            address,
            ..bench.registration(len, R)
        };
        assert!(
            bench
                .try_register(&registration)
                .unwrap_err()
                .starts_with("a region must hold at least one octet")
        );
    }
}

#[test]
fn neighbours_may_be_granted() {
    let mut bench = Bench::new();
    for start in [4, 8, 0, 12] {
        let registration = bench.registration(4, W);
        bench.register(&Registration {
            address: ADDRESS + start,
            ..registration
        });
    }
}

// --- everything together, against a model that keeps whole lists and searches them ---

const ARENA_BYTES: u64 = 32;
const BASE_TO: u64 = 1000;
/// Streams 0 and 1 are of domain 0, stream 2 of domain 1.
const DOMAIN_OF: [usize; 3] = [0, 0, 1];

#[derive(Clone, Debug)]
enum Step {
    Register {
        start: u64,
        end: u64,
        access: Access,
        domain: usize,
        scope: Option<usize>,
    },
    Revoke(usize),
    Invalidate {
        number: usize,
        stream: usize,
    },
    End(usize),
    Access {
        number: usize,
        stream: usize,
        offset: i64,
        len: u32,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let access = prop::sample::select(vec![NONE, R, W, A, R | W, Access::all()]);
    prop_oneof![
        (
            0..ARENA_BYTES,
            1..=ARENA_BYTES,
            access,
            0..2usize,
            prop::option::of(0..3usize)
        )
            .prop_map(|(start, len, access, domain, scope)| {
                Step::Register {
                    start,
                    end: ARENA_BYTES.min(start + len),
                    access,
                    domain,
                    scope,
                }
            }),
        (0..30usize).prop_map(Step::Revoke),
        (0..30usize, 0..3usize).prop_map(|(number, stream)| Step::Invalidate { number, stream }),
        (0..3usize).prop_map(Step::End),
        (0..30usize, 0..3usize, -2..ARENA_BYTES as i64, 1..9u32).prop_map(|(number, stream, offset, len)| {
            Step::Access {
                number,
                stream,
                offset,
                len,
            }
        }),
    ]
}

struct Known {
    start: u64,
    end: u64,
    access: Access,
    domain: usize,
    scope: Option<usize>,
    valid: bool,
    stag: u32,
}

struct Model {
    regions: Vec<Known>,
    open: [bool; 3],
}

impl Model {
    fn refuses(&self, start: u64, end: u64, access: Access, domain: usize, scope: Option<usize>) -> bool {
        if scope.is_some_and(|stream| DOMAIN_OF[stream] != domain) {
            return true;
        }
        if scope.is_some_and(|stream| !self.open[stream]) {
            return false; // born revoked
        }
        let changes: HashSet<u64> = self
            .regions
            .iter()
            .filter(|known| known.valid && known.access.intersects(W | A))
            .flat_map(|known| known.start..known.end)
            .collect();
        access.intersects(W | A) && (start..end).any(|octet| changes.contains(&octet))
    }

    fn reaches(&self, number: usize, stream: usize) -> bool {
        let known = &self.regions[number];
        known
            .scope
            .map_or(DOMAIN_OF[stream] == known.domain, |scope| scope == stream)
    }

    fn verdict(&self, number: usize, stream: usize, offset: i64, len: u32, right: Access) -> Option<&'static str> {
        let known = &self.regions[number];
        let bounds = offset >= 0 && offset as u64 + u64::from(len) <= known.end - known.start;
        if !known.valid || !self.open[stream] {
            Some("unknown")
        } else if !self.reaches(number, stream) {
            Some("foreign")
        } else if !bounds {
            Some("bounds")
        } else {
            (!known.access.contains(right)).then_some("right")
        }
    }

    fn may_invalidate(&self, number: usize, stream: usize) -> bool {
        let known = &self.regions[number];
        let streams = (0..3)
            .filter(|&other| self.open[other] && DOMAIN_OF[other] == known.domain)
            .count();
        known.valid
            && self.open[stream]
            && self.reaches(number, stream)
            && !known.access.is_empty()
            && (known.scope.is_some() || streams == 1)
    }
}

fn write_cause(verdict: Option<&str>) -> Option<Cause> {
    verdict.map(|verdict| match verdict {
        "unknown" | "right" => Cause::DdpInvalidStag,
        "foreign" => Cause::DdpStagNotAssociated,
        _ => Cause::DdpBaseOrBounds,
    })
}

fn read_cause(verdict: Option<&str>) -> Option<Cause> {
    verdict.map(|verdict| match verdict {
        "unknown" => Cause::RdmapInvalidStag,
        "right" => Cause::RdmapAccessRights,
        "foreign" => Cause::RdmapStagNotAssociated,
        _ => Cause::RdmapBaseOrBounds,
    })
}

/// Runs `steps` on the table and the model at once.
struct Both {
    bench: Bench,
    domains: [PdId; 2],
    streams: [StreamId; 3],
    model: Model,
}

impl Both {
    fn new() -> Self {
        let mut bench = Bench::new();
        let domains = [bench.table.allocate_pd(), bench.table.allocate_pd()];
        let streams = DOMAIN_OF.map(|domain| bench.table.open_stream(domains[domain]).expect("its own domain"));
        Self {
            bench,
            domains,
            streams,
            model: Model {
                regions: Vec::new(),
                open: [true; 3],
            },
        }
    }

    fn register(&mut self, start: u64, end: u64, access: Access, domain: usize, scope: Option<usize>) {
        let refused = self.model.refuses(start, end, access, domain, scope);
        let registration = Registration {
            region: RegionId(self.model.regions.len() as u64),
            address: ADDRESS + start,
            pd: self.domains[domain],
            scope: scope.map(|stream| self.streams[stream]),
            base_to: BASE_TO,
            ..self.bench.registration(end - start, access)
        };
        match self.bench.try_register(&registration) {
            Err(_) => assert!(refused),
            Ok(Registered { stag, valid }) => {
                assert!(!refused);
                assert_eq!(valid, scope.is_none_or(|stream| self.model.open[stream]));
                self.model.regions.push(Known {
                    start,
                    end,
                    access,
                    domain,
                    scope,
                    valid,
                    stag,
                });
            }
        }
    }

    fn step(&mut self, step: &Step) {
        let known = self.model.regions.len();
        match *step {
            Step::Register {
                start,
                end,
                access,
                domain,
                scope,
            } => self.register(start, end, access, domain, scope),
            Step::Revoke(number) if number < known => {
                self.bench
                    .table
                    .revoke(self.model.regions[number].stag, RegionId(number as u64));
                self.model.regions[number].valid = false;
            }
            Step::Invalidate { number, stream } if number < known => {
                let allowed = self.model.may_invalidate(number, stream);
                let (table, stag) = (&mut self.bench.table, self.model.regions[number].stag);
                let invalidated = table.invalidate(self.streams[stream], stag);
                if let Ok(region) = invalidated {
                    table.revoke(stag, region);
                }
                let refused = cause_of(invalidated);
                assert_eq!(refused, (!allowed).then_some(Cause::RdmapCannotInvalidate));
                self.model.regions[number].valid &= !allowed;
            }
            Step::End(stream) => {
                self.bench.table.close_stream(self.streams[stream]);
                self.model.open[stream] = false;
                for known in self
                    .model
                    .regions
                    .iter_mut()
                    .filter(|known| known.scope == Some(stream))
                {
                    known.valid = false;
                }
            }
            Step::Access {
                number,
                stream,
                offset,
                len,
            } if number < known => {
                let (view, stag) = (self.streams[stream], self.model.regions[number].stag);
                let to = BASE_TO.checked_add_signed(offset).expect("small numbers");
                let verdict = |right| self.model.verdict(number, stream, offset, len, right);
                assert_eq!(
                    cause_of(self.bench.table.place(view, stag, to, len)),
                    write_cause(verdict(W))
                );
                assert_eq!(
                    cause_of(self.bench.table.read_source(view, stag, to, len)),
                    read_cause(verdict(R))
                );
            }
            _ => {}
        }
        for (number, known) in self.model.regions.iter().enumerate() {
            assert_eq!(
                self.bench.table.is_valid(known.stag, RegionId(number as u64)),
                known.valid
            );
        }
    }
}

proptest! {
    #[test]
    fn the_table_agrees_with_the_model(steps in prop::collection::vec(step(), 0..60)) {
        let mut both = Both::new();
        for step in &steps {
            both.step(step);
        }
    }

    #[test]
    fn r6_3_6_octets_that_a_peer_may_change_are_not_granted_twice(
        first in 0u64..40, first_len in 1u64..20, second in 0u64..40, second_len in 1u64..20,
    ) {
        let mut bench = Bench::new();
        let granted = Registration { address: ADDRESS + first, ..bench.registration(first_len, W) };
        let stag = bench.register(&granted);
        let registration = Registration { address: ADDRESS + second, ..bench.registration(second_len, A) };
        let overlap = first < second + second_len && second < first + first_len;
        prop_assert_eq!(bench.try_register(&registration).is_err(), overlap);
        if overlap {
            bench.register(&Registration { access: R, ..registration });
            bench.table.revoke(stag, granted.region);
            bench.register(&registration);
        }
    }
}
