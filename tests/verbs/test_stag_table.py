"""The STag table: checklist sections S and D25 to D32, R17 to R23, R31 to R33, X17, X18, against plain memory."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse, PeerMisbehaved
from kbtp.types import TerminateCause as Cause
from kbtp.verbs.api import Access
from kbtp.verbs.stag_table import Domain, Region, StagTable, StreamView

R, W, A = Access.REMOTE_READ, Access.REMOTE_WRITE, Access.REMOTE_ATOMIC
ALL = R | W | A
TO_END = 1 << 64


def counting(start: int = 1) -> Callable[[], int]:
    numbers: Iterator[int] = iter(range(start, 1 << 40))
    return lambda: next(numbers)


def seeded(seed: int) -> Callable[[], int]:
    source = random.Random(seed)
    return lambda: source.getrandbits(32)


@pytest.fixture
def table() -> StagTable:
    return StagTable(seeded(7))


@pytest.fixture
def pd(table: StagTable) -> Domain:
    return table.allocate_pd()


@pytest.fixture
def view(table: StagTable, pd: Domain) -> StreamView:
    return table.memory_for("stream", pd)


def cause_of(act: Callable[..., object], *arguments: object) -> Cause | None:
    try:
        act(*arguments)
    except PeerMisbehaved as error:
        return error.cause
    return None


def accesses(view: StreamView, stag: int, to: int, length: int = 8) -> tuple[Cause | None, Cause | None, Cause | None]:
    """What a Write, a Read and an atomic at `to` would be refused with."""
    return (
        cause_of(view.place, stag, to, length),
        cause_of(view.read_source, stag, to, length),
        cause_of(view.atomic, stag, to, lambda old: old),
    )


# --- what a region is ---


def test_a_region_says_what_it_is(table: StagTable, pd: Domain) -> None:
    values = np.arange(4, dtype=np.uint32)

    region = table.register(values, R | W, pd=pd, base_to=0x1000)

    assert (region.length, region.base_to, region.access, region.valid) == (16, 0x1000, R | W, True)
    assert region.address == values.ctypes.data
    assert region.view == values.tobytes()
    assert (region.pd, region.scope) == (pd, None)
    assert 0 < region.stag < 1 << 32


def test_place_gives_exactly_the_octets_asked_for(table: StagTable, pd: Domain, view: StreamView) -> None:
    memory = bytearray(16)
    region = table.register(memory, W, pd=pd, base_to=100)

    view.place(region.stag, 105, 3)[:] = b"abc"

    assert memory == b"\0" * 5 + b"abc" + b"\0" * 8


def test_read_source_gives_exactly_the_octets_asked_for(table: StagTable, pd: Domain, view: StreamView) -> None:
    region = table.register(b"0123456789", R, pd=pd)

    assert view.read_source(region.stag, 3, 4) == b"3456"


# --- S1, S2: association ---


def test_s1_a_stag_of_another_domain_is_refused(table: StagTable, pd: Domain) -> None:
    other = table.memory_for("other", table.allocate_pd())
    region = table.register(bytearray(8), ALL, pd=pd)

    assert accesses(other, region.stag, 0) == (
        Cause.DDP_STAG_NOT_ASSOCIATED,
        Cause.RDMAP_STAG_NOT_ASSOCIATED,
        Cause.RDMAP_STAG_NOT_ASSOCIATED,
    )
    assert cause_of(other.invalidate, region.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert region.valid


def test_s2_a_stag_of_another_stream_of_the_same_domain_is_refused(
    table: StagTable, pd: Domain, view: StreamView
) -> None:
    other = table.memory_for("other", pd)
    region = table.register(bytearray(8), ALL, pd=pd, scope=view)

    assert accesses(view, region.stag, 0) == (None, None, None)
    assert accesses(other, region.stag, 0) == (
        Cause.DDP_STAG_NOT_ASSOCIATED,
        Cause.RDMAP_STAG_NOT_ASSOCIATED,
        Cause.RDMAP_STAG_NOT_ASSOCIATED,
    )
    assert cause_of(other.invalidate, region.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert region.valid


# --- S3: bounds; wrap ---


def test_s3_one_octet_before_or_after_is_refused(table: StagTable, pd: Domain, view: StreamView) -> None:
    aligned = np.zeros(4, np.uint64)
    region = table.register(aligned.view(np.uint8)[8:24], ALL, pd=pd, base_to=0x100)

    refused = (Cause.DDP_BASE_OR_BOUNDS, Cause.RDMAP_BASE_OR_BOUNDS, Cause.RDMAP_BASE_OR_BOUNDS)
    assert accesses(view, region.stag, 0x100) == (None, None, None)
    assert accesses(view, region.stag, 0x108) == (None, None, None)
    assert accesses(view, region.stag, 0xFF) == refused
    assert accesses(view, region.stag, 0x109) == refused
    assert cause_of(view.place, region.stag, 0x100, 17) is Cause.DDP_BASE_OR_BOUNDS
    assert not aligned.any()


def test_d28_an_access_past_2_to_the_64_wraps(table: StagTable, pd: Domain, view: StreamView) -> None:
    region = table.register(bytearray(16), ALL, pd=pd, base_to=TO_END - 16)

    assert accesses(view, region.stag, TO_END - 8) == (None, None, None)
    assert accesses(view, region.stag, TO_END - 7) == (Cause.DDP_TO_WRAP, Cause.RDMAP_TO_WRAP, Cause.RDMAP_TO_WRAP)


# --- S4: rights ---


@pytest.mark.parametrize("granted", [Access.NONE, R, W, A, R | W, R | A, W | A, ALL])
def test_s4_only_granted_rights_work(table: StagTable, pd: Domain, view: StreamView, granted: Access) -> None:
    region = table.register(np.zeros(1, np.uint64), granted, pd=pd)

    assert accesses(view, region.stag, 0) == (
        None if granted & W else Cause.DDP_INVALID_STAG,
        None if granted & R else Cause.RDMAP_ACCESS_RIGHTS,
        None if granted & A else Cause.RDMAP_ACCESS_RIGHTS,
    )


def test_checks_run_in_their_order(table: StagTable, pd: Domain, view: StreamView) -> None:
    """Foreign before wrap before bounds before rights before alignment."""
    other = table.memory_for("other", table.allocate_pd())
    region = table.register(np.zeros(2, np.uint64), Access.NONE, pd=pd)
    atomic = table.register(np.zeros(2, np.uint64), A, pd=pd)

    assert cause_of(other.place, region.stag, TO_END - 1, 8) is Cause.DDP_STAG_NOT_ASSOCIATED
    assert cause_of(view.place, region.stag, TO_END - 1, 8) is Cause.DDP_TO_WRAP
    assert cause_of(view.place, region.stag, 12, 8) is Cause.DDP_BASE_OR_BOUNDS
    assert cause_of(view.atomic, region.stag, 4, int) is Cause.RDMAP_ACCESS_RIGHTS
    assert cause_of(view.atomic, atomic.stag, 12, int) is Cause.RDMAP_BASE_OR_BOUNDS
    assert cause_of(view.atomic, atomic.stag, 4, int) is Cause.RDMAP_CATASTROPHIC_STREAM


# --- atomics ---


def test_x16_an_atomic_works_on_a_native_integer(table: StagTable, pd: Domain, view: StreamView) -> None:
    counters = np.array([5, 7], np.uint64)
    region = table.register(counters, A, pd=pd)

    old = view.atomic(region.stag, 8, lambda value: value + 100)

    assert old == 7
    assert counters.tolist() == [5, 107]


@pytest.mark.parametrize("base_to", [0, 3])
def test_x17_it_is_the_address_that_must_be_aligned(
    table: StagTable, pd: Domain, view: StreamView, base_to: int
) -> None:
    octets = np.zeros(3, np.uint64).view(np.uint8)
    region = table.register(octets[3:], A, pd=pd, base_to=base_to)

    assert cause_of(view.atomic, region.stag, base_to + 5, lambda old: old) is None
    for skew in (0, 1, 4, 6, 8):
        assert cause_of(view.atomic, region.stag, base_to + skew, int) is Cause.RDMAP_CATASTROPHIC_STREAM
    assert not octets.any()


def test_x23_atomics_of_many_threads_sum_exactly(table: StagTable, pd: Domain) -> None:
    counter = np.zeros(1, np.uint64)
    region = table.register(counter, A, pd=pd)
    views = [table.memory_for(number, pd) for number in range(4)]

    def add(view: StreamView) -> None:
        for _ in range(500):
            view.atomic(region.stag, 0, lambda old: old + 1)

    threads = [threading.Thread(target=add, args=(view,)) for view in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert counter[0] == 2000


# --- S5: revocation ---


def test_s5_a_revoked_stag_reaches_nothing(table: StagTable, pd: Domain, view: StreamView) -> None:
    memory = np.zeros(1, np.uint64)
    region = table.register(memory, ALL, pd=pd)

    region.revoke()
    region.revoke()

    assert not region.valid
    assert accesses(view, region.stag, 0) == (
        Cause.DDP_INVALID_STAG,
        Cause.RDMAP_INVALID_STAG,
        Cause.RDMAP_INVALID_STAG,
    )
    assert cause_of(view.invalidate, region.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert region.view == bytes(8), "the owner still sees its octets"


def test_s5_revoke_waits_for_whoever_holds_the_lock(table: StagTable, pd: Domain, view: StreamView) -> None:
    """An RNIC places octets under the lock, so that none is placed after `revoke` returned."""
    region = table.register(bytearray(8), W, pd=pd)
    revoked = threading.Event()

    def revoke() -> None:
        region.revoke()
        revoked.set()

    thread = threading.Thread(target=revoke)
    with table.lock:
        target = view.place(region.stag, 0, 8)
        thread.start()
        target[:] = b"in time!"
        assert region.valid
        assert not revoked.is_set()
    thread.join()
    assert not region.valid


def test_the_end_of_a_stream_revokes_its_scoped_regions_alone(table: StagTable, pd: Domain, view: StreamView) -> None:
    other = table.memory_for("other", pd)
    mine = table.register(bytearray(8), R, pd=pd, scope=view)
    shared = table.register(bytearray(8), R, pd=pd)
    others = table.register(bytearray(8), R, pd=pd, scope=other)

    view.close()
    view.close()

    assert (mine.valid, shared.valid, others.valid) == (False, True, True)
    assert cause_of(view.read_source, shared.stag, 0, 1) is Cause.RDMAP_INVALID_STAG
    assert cause_of(view.invalidate, shared.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert cause_of(other.read_source, shared.stag, 0, 1) is None


def test_closing_the_table_revokes_everything(table: StagTable, pd: Domain, view: StreamView) -> None:
    regions = [table.register(bytearray(8), ALL, pd=pd), table.register(bytearray(8), R, pd=pd, scope=view)]

    table.close()

    assert [region.valid for region in regions] == [False, False]


# --- Send with Invalidate ---


def test_r31_a_peer_invalidates_what_is_its_own(table: StagTable, pd: Domain, view: StreamView) -> None:
    table.memory_for("other", pd)
    region = table.register(bytearray(8), W, pd=pd, scope=view)

    view.invalidate(region.stag)

    assert not region.valid
    assert cause_of(view.place, region.stag, 0, 1) is Cause.DDP_INVALID_STAG


def test_r33_a_region_of_the_domain_is_invalidated_only_while_one_stream_has_it(
    table: StagTable, pd: Domain, view: StreamView
) -> None:
    region = table.register(bytearray(8), W, pd=pd)
    other = table.memory_for("other", pd)

    assert cause_of(view.invalidate, region.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert region.valid
    other.close()
    view.invalidate(region.stag)
    assert not region.valid


def test_r32_a_region_without_remote_rights_is_not_the_peers_to_invalidate(
    table: StagTable, pd: Domain, view: StreamView
) -> None:
    region = table.register(bytearray(8), Access.NONE, pd=pd, scope=view)

    assert cause_of(view.invalidate, region.stag) is Cause.RDMAP_CANNOT_INVALIDATE
    assert region.valid


# --- STags ---


def test_s6_stags_show_no_step_and_no_early_reuse() -> None:
    table = StagTable(seeded(2024))
    pd = table.allocate_pd()
    stags: list[int] = []

    for _ in range(1000):
        region = table.register(bytearray(1), R, pd=pd)
        stags.append(region.stag)
        region.revoke()

    assert len(set(stags)) == 1000
    steps = {(after - before) % (1 << 32) for before, after in itertools.pairwise(stags)}
    assert len(steps) > 990
    for bit in range(32):  # 1,000 fair coins are within 8 standard deviations
        assert abs(sum(stag >> bit & 1 for stag in stags) - 500) < 8 * 16


def test_a_stag_is_never_zero_nor_one_in_use_nor_one_lent_nor_one_used_before() -> None:
    draws = iter([0, 5, 5, 6, 5, 6, 7, 5, 6, 7, 8, 1 << 32 | 9])
    table = StagTable(lambda: next(draws))
    pd = table.allocate_pd()
    view = table.memory_for("stream", pd)

    first = table.register(bytearray(1), R, pd=pd)
    lent = view.lend_sink_stag()
    first.revoke()
    second = table.register(bytearray(1), R, pd=pd)
    view.return_sink_stag(lent)
    third = table.register(bytearray(1), R, pd=pd)
    fourth = table.register(bytearray(1), R, pd=pd)

    assert (first.stag, lent, second.stag, third.stag, fourth.stag) == (5, 6, 7, 8, 9)


def test_a_used_stag_comes_back_only_after_the_history_forgot_it() -> None:
    draws = iter([1, 1, 2, 2, 1])
    table = StagTable(lambda: next(draws), history=1)
    pd = table.allocate_pd()

    for expected in (1, 2, 1):
        region = table.register(bytearray(1), R, pd=pd)
        assert region.stag == expected
        region.revoke()


def test_a_source_that_is_not_random_is_noticed() -> None:
    table = StagTable(lambda: 4)
    pd = table.allocate_pd()
    table.register(bytearray(1), R, pd=pd)

    with pytest.raises(ApiMisuse, match="must be a source of randomness"):
        table.register(bytearray(1), R, pd=pd)


def test_a_lent_stag_names_no_memory(table: StagTable, view: StreamView) -> None:
    lent = view.lend_sink_stag()

    assert accesses(view, lent, 0)[0] is Cause.DDP_INVALID_STAG
    view.return_sink_stag(lent)
    view.return_sink_stag(lent)


# --- what is refused at registration ---


@pytest.mark.parametrize("access", [W, A, ALL])
def test_read_only_memory_gets_no_right_to_change_it(table: StagTable, pd: Domain, access: Access) -> None:
    with pytest.raises(ApiMisuse, match="this buffer is read-only"):
        table.register(b"12345678", access, pd=pd)
    assert table.register(b"12345678", R, pd=pd).valid


def test_a_foreign_domain_or_scope_is_refused(table: StagTable, pd: Domain, view: StreamView) -> None:
    elsewhere = StagTable(counting())

    with pytest.raises(ApiMisuse, match="one of this RNIC"):
        table.register(bytearray(1), R, pd=elsewhere.allocate_pd())
    with pytest.raises(ApiMisuse, match="one of this RNIC"):
        table.memory_for("stream", elsewhere.allocate_pd())
    with pytest.raises(ApiMisuse, match="in the region's protection domain"):
        table.register(bytearray(1), R, pd=table.allocate_pd(), scope=view)


def test_a_region_scoped_to_a_stream_that_has_ended_is_born_revoked(
    table: StagTable, pd: Domain, view: StreamView
) -> None:
    """The end of a stream may always come first; that is nobody's mistake."""
    memory = bytearray(8)
    view.close()

    region = table.register(memory, W, pd=pd, scope=view)

    assert not region.valid
    assert table.region(region.stag) is None
    region.revoke()
    assert table.register(memory, W, pd=pd).valid, "it grants nothing that could overlap"


@pytest.mark.parametrize("base_to", [-1, TO_END - 7, TO_END])
def test_a_region_past_2_to_the_64_is_refused(table: StagTable, pd: Domain, base_to: int) -> None:
    with pytest.raises(ApiMisuse, match="base_to"):
        table.register(bytearray(8), R, pd=pd, base_to=base_to)


@pytest.mark.parametrize("first", [W, A])
@pytest.mark.parametrize("second", [W, A])
@pytest.mark.parametrize("span", [(0, 4), (2, 6), (4, 5), (0, 16), (7, 12)])
def test_6_3_6_octets_that_a_peer_may_change_are_not_granted_twice(
    table: StagTable, pd: Domain, first: Access, second: Access, span: tuple[int, int]
) -> None:
    memory = memoryview(bytearray(16))
    granted = table.register(memory[3:8], first, pd=pd)

    with pytest.raises(ApiMisuse, match="already lets a peer change"):
        table.register(memory[span[0] : span[1]], second, pd=pd)
    assert table.register(memory[span[0] : span[1]], R, pd=pd).valid
    granted.revoke()
    assert table.register(memory[span[0] : span[1]], second, pd=pd).valid


def test_neighbours_may_be_granted(table: StagTable, pd: Domain) -> None:
    memory = memoryview(bytearray(16))
    for start, end in ((4, 8), (8, 12), (0, 4), (12, 16)):
        table.register(memory[start:end], W, pd=pd)


# --- everything together, against a model that keeps whole lists and searches them ---

_ARENA_BYTES = 32
_SPAN = st.tuples(st.integers(0, _ARENA_BYTES - 1), st.integers(1, _ARENA_BYTES)).map(
    lambda pair: (pair[0], min(_ARENA_BYTES, pair[0] + pair[1]))
)
_ACCESS = st.sampled_from([Access.NONE, R, W, A, R | W, ALL])
_STEP = st.one_of(
    st.tuples(st.just("register"), _SPAN, _ACCESS, st.integers(0, 1), st.sampled_from([None, 0, 1, 2])),
    st.tuples(st.just("revoke"), st.integers(0, 30)),
    st.tuples(st.just("invalidate"), st.integers(0, 30), st.integers(0, 2)),
    st.tuples(st.just("end"), st.integers(0, 2)),
    st.tuples(
        st.just("access"), st.integers(0, 30), st.integers(0, 2), st.integers(-2, _ARENA_BYTES), st.integers(1, 9)
    ),
)


class Model:
    """Streams 0 and 1 are of domain 0, stream 2 of domain 1."""

    domain_of = (0, 0, 1)

    def __init__(self) -> None:
        self.regions: list[tuple[int, int, Access, int, int | None]] = []
        self.valid: list[bool] = []
        self.open = [True, True, True]

    def refuses(self, start: int, end: int, access: Access, domain: int, stream: int | None) -> bool:
        if stream is not None and self.domain_of[stream] != domain:
            return True
        if stream is not None and not self.open[stream]:
            return False  # born revoked
        changes = [
            octet
            for (low, high, granted, _, _), valid in zip(self.regions, self.valid, strict=True)
            if valid and granted & (W | A)
            for octet in range(low, high)
        ]
        return bool(access & (W | A)) and any(octet in changes for octet in range(start, end))

    def reaches(self, number: int, stream: int) -> bool:
        _, _, _, domain, scope = self.regions[number]
        return scope == stream if scope is not None else self.domain_of[stream] == domain

    def verdict(self, number: int, stream: int, offset: int, length: int, right: Access) -> str | None:
        start, end, granted, _, _ = self.regions[number]
        if not self.valid[number] or not self.open[stream]:
            return "unknown"
        if not self.reaches(number, stream):
            return "foreign"
        if not set(range(offset, offset + length)) <= set(range(end - start)):
            return "bounds"
        return None if granted & right else "right"

    def may_invalidate(self, number: int, stream: int) -> bool:
        _, _, granted, domain, scope = self.regions[number]
        if not self.valid[number] or not self.open[stream] or not self.reaches(number, stream) or not granted:
            return False
        alone = sum(opened for other, opened in enumerate(self.open) if self.domain_of[other] == domain) == 1
        return scope is not None or alone


_WRITE = {
    Cause.DDP_INVALID_STAG: ("unknown", "right"),
    Cause.DDP_STAG_NOT_ASSOCIATED: ("foreign",),
    Cause.DDP_BASE_OR_BOUNDS: ("bounds",),
    None: (None,),
}
_READ = {
    Cause.RDMAP_INVALID_STAG: ("unknown",),
    Cause.RDMAP_STAG_NOT_ASSOCIATED: ("foreign",),
    Cause.RDMAP_BASE_OR_BOUNDS: ("bounds",),
    Cause.RDMAP_ACCESS_RIGHTS: ("right",),
    None: (None,),
}
_BASE_TO = 1000


@settings(max_examples=150, deadline=None)
@given(st.lists(_STEP, max_size=40))
def test_the_table_agrees_with_the_model(steps: list[tuple[object, ...]]) -> None:
    arena = memoryview(bytearray(_ARENA_BYTES))
    table = StagTable(seeded(1))
    domains = [table.allocate_pd(), table.allocate_pd()]
    views = [table.memory_for(stream, domains[Model.domain_of[stream]]) for stream in range(3)]
    regions: list[Region] = []
    model = Model()

    for step in steps:
        match step:
            case ("register", (int(start), int(end)), Access() as access, int(domain), stream):
                assert stream is None or isinstance(stream, int)
                scope = None if stream is None else views[stream]
                refused = model.refuses(start, end, access, domain, stream)
                try:
                    region = table.register(arena[start:end], access, pd=domains[domain], scope=scope, base_to=_BASE_TO)
                except ApiMisuse:
                    assert refused
                else:
                    assert not refused
                    regions.append(region)
                    model.regions.append((start, end, access, domain, stream))
                    model.valid.append(stream is None or model.open[stream])
            case ("revoke", int(number)) if number < len(regions):
                regions[number].revoke()
                model.valid[number] = False
            case ("invalidate", int(number), int(stream)) if number < len(regions):
                allowed = model.may_invalidate(number, stream)
                refused_with = cause_of(views[stream].invalidate, regions[number].stag)
                assert refused_with is (None if allowed else Cause.RDMAP_CANNOT_INVALIDATE)
                model.valid[number] = model.valid[number] and not allowed
            case ("end", int(stream)):
                views[stream].close()
                model.open[stream] = False
                for number, (_, _, _, _, scoped_to) in enumerate(model.regions):
                    model.valid[number] = model.valid[number] and scoped_to != stream
            case ("access", int(number), int(stream), int(offset), int(length)) if number < len(regions):
                view, stag, to = views[stream], regions[number].stag, _BASE_TO + offset
                wrote = cause_of(view.place, stag, to, length)
                read = cause_of(view.read_source, stag, to, length)
                assert model.verdict(number, stream, offset, length, W) in _WRITE[wrote]
                assert model.verdict(number, stream, offset, length, R) in _READ[read]
        assert [region.valid for region in regions] == model.valid
