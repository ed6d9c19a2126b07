"""Pages of SGLang's host pool through its own cache controller, in a target that comes and goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import DEADLINE_S, Engine, document
from sglang.srt.environ import envs
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

PAGES = 150  # more than SGLang moves at once
TIMEOUT_S = 2.0


@pytest.fixture
def start_engine(cluster: Any) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as stack:

        def start(**options: Any) -> Engine:
            engine = Engine(cluster.url, **{"timeout_s": TIMEOUT_S, **options})
            stack.callback(engine.close)
            return engine

        yield start


def in_another_process(what: str, url: str, *, number: int, pages: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "engine.py", what, url, str(number), str(pages)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "77"},  # not as here
    )
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


# --- octet for octet -------------------------------------------------------------------------------


@pytest.mark.requirement("exact")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_is_stored_is_loaded(start_engine: Callable[..., Engine], layout: str, dtype: torch.dtype) -> None:
    engine = start_engine(layout=layout, dtype=dtype)
    assert engine.controller.page_get_func == engine.controller._page_get_zero_copy
    tokens = document(1, 20)
    assert engine.store(tokens) == 20
    assert engine.load(tokens + document(2, 5)) == 20
    segments = {"page_first": 2, "page_first_direct": 2, "layer_first": 8}[layout]
    assert engine.counters["stored"] == engine.counters["hits"] == 20 * segments


@pytest.mark.requirement("exact")
def test_more_pages_than_are_moved_at_once(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    assert engine.store(document(1, PAGES)) == PAGES
    assert engine.load(document(1, PAGES)) == PAGES
    assert engine.store(document(1, PAGES)) == PAGES  # once more, as engines do
    assert engine.counters["stored"] == engine.counters["present"] == 2 * PAGES
    assert engine.load(document(2, 3)) == 0


@pytest.mark.requirement("exact")
def test_the_pool_is_registered_once_and_used_in_place(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    storage = engine.controller.storage_backend
    [(_, octets)] = storage._memory.values()
    assert octets.nbytes == engine.host.kv_buffer.nbytes
    index = engine.host.alloc(64)
    views = storage._pools["kv"].views(index, 1)
    views[1][:] = bytes([7]) * len(views[1])
    assert bool((engine.host.v_buffer[int(index[0])].view(torch.uint8) == 7).all())


@pytest.mark.requirement("shared")
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_ranks_that_hold_the_same_store_it_once(start_engine: Callable[..., Engine], layout: str) -> None:
    first = start_engine(mla=True, layout=layout, tp=(0, 2))
    assert first.store(document(1, 20)) == 20
    assert first.controller.storage_backend._memory
    second = start_engine(mla=True, layout=layout, tp=(1, 2))
    assert second.controller.backup_skip
    assert second.load(document(1, 20)) == 20
    assert not second.controller.storage_backend._writes


@pytest.mark.requirement("exact")
def test_a_pool_that_does_not_say_where_its_pages_lie_has_them_copied(
    start_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(MHATokenToKVPoolHost, "get_page_buffer_meta")
    engine = start_engine()
    assert not engine.controller.storage_backend._pools["kv"].in_place
    assert engine.store(document(1, 20)) == engine.load(document(1, 20)) == 20
    assert engine.counters["stored"] == engine.counters["hits"] == 20


@pytest.mark.requirement("shared")
def test_a_second_process_sees_the_first_one_s_prefix(cluster: Any) -> None:
    assert in_another_process("store", cluster.url, number=1, pages=20)["pages"] == 20
    told = in_another_process("load", cluster.url, number=1, pages=30)
    assert told["pages"] == 20
    assert told["counters"]["hits"] == 40


# --- targets that go and come back ------------------------------------------------------------------


class Busy(threading.Thread):
    """An engine that loads the same prefix over and over, and stores it again when it is not there whole."""

    def __init__(self, engine: Engine, tokens: list[int]) -> None:
        super().__init__()
        self.engine, self.tokens = engine, tokens
        self.loaded: list[int] = []
        self.fault: BaseException | None = None
        self.stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self.stopping.is_set():
                self.loaded.append(self.engine.load(self.tokens))
                if not is_hit(self.loaded[-1]):
                    self.engine.store(self.tokens)
        except BaseException as fault:
            self.fault = fault

    def last(self, count: int, what: Callable[[int], bool]) -> bool:
        """Whether its last loads were all so; at once if it has come to grief."""
        return self.fault is not None or (len(self.loaded) >= count and all(map(what, self.loaded[-count:])))

    def since(self) -> Callable[[int, Callable[[int], bool]], bool]:
        """As `last`, of loads from now on."""
        begun = len(self.loaded) + 1

        def last(count: int, what: Callable[[int], bool]) -> bool:
            return self.fault is not None or (len(self.loaded) >= begun + count and self.last(count, what))

        return last

    def __enter__(self) -> Busy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.join(DEADLINE_S * 2)
        assert self.fault is None


def is_hit(pages: int) -> bool:
    return pages == PAGES


def is_miss(pages: int) -> bool:
    return pages == 0


@pytest.mark.requirement("killed")
def test_a_target_that_is_killed_costs_misses(
    cluster: Any, start_engine: Callable[..., Engine], wait_until: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    engine = start_engine()
    with Busy(engine, document(1, PAGES)) as busy:
        assert wait_until(lambda: busy.last(3, is_hit))
        cluster.kill()
        last = busy.since()
        assert wait_until(lambda: last(20, is_miss))
    assert engine.threads_live
    assert engine.counters["index_failures"] >= 20
    told = Counter(record.msg for record in caplog.records if record.name in ("kbtp.cache", "kbtp.sglang"))
    assert told["the index is not available: %s"] == 1
    assert max(told.values()) < 5, told
    assert engine.counters["unavailable"] > 0


@pytest.mark.requirement("killed")
def test_a_target_that_answers_nothing_costs_a_deadline(
    cluster: Any, start_engine: Callable[..., Engine], wait_until: Callable[..., bool]
) -> None:
    engine = start_engine()
    with Busy(engine, document(1, PAGES)) as busy:
        assert wait_until(lambda: busy.last(3, is_hit))
        cluster.freeze()
        last = busy.since()
        assert wait_until(lambda: last(3, is_miss))
        cluster.thaw()
        assert wait_until(lambda: busy.last(3, is_hit))
    assert engine.threads_live


@pytest.mark.requirement("back")
def test_a_target_that_is_back_has_hits_again(
    cluster: Any, start_engine: Callable[..., Engine], wait_until: Callable[..., bool]
) -> None:
    engine = start_engine()
    with Busy(engine, document(1, PAGES)) as busy:
        assert wait_until(lambda: busy.last(3, is_hit))
        cluster.kill()
        last = busy.since()
        assert wait_until(lambda: last(3, is_miss))
        cluster.start()
        assert wait_until(lambda: busy.last(3, is_hit))
    assert engine.threads_live
    assert in_another_process("load", cluster.url, number=1, pages=PAGES)["pages"] == PAGES


@pytest.mark.requirement("back")
def test_an_engine_that_starts_before_its_target(
    start_cluster: Callable[..., Any], start_engine: Callable[..., Engine], cluster: Any,
    wait_until: Callable[..., bool],
) -> None:  # fmt: skip
    cluster.kill()
    engine = start_engine()
    assert engine.load(document(1, 3)) == 0
    assert engine.store(document(1, 3)) == 0
    cluster.start()
    assert wait_until(lambda: engine.store(document(1, 3)) == 3)
    assert engine.load(document(1, 3)) == 3


# --- what is not as it was stored -------------------------------------------------------------------


@pytest.mark.requirement("corrupt")
def test_a_page_that_has_changed_ends_the_prefix(cluster: Any, start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    tokens = document(1, 20)
    assert engine.store(tokens) == 20
    [page_hash] = engine.hashes(tokens)[12:13]
    page = engine.content(page_hash).view(torch.uint8).numpy().tobytes()
    assert cluster.corrupt(page[:4096])
    assert engine.load(tokens) == 12
    assert engine.counters["corrupt_values"] == 1
    assert engine.load(tokens) == 12  # it is not looked at twice
    assert engine.counters["corrupt_values"] == 1
    assert engine.store(tokens) == 20  # and another takes its place
    assert engine.load(tokens) == 20


@pytest.mark.requirement("corrupt")
def test_a_page_that_is_gone_ends_the_prefix(cluster: Any, start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    tokens = document(1, 20)
    assert engine.store(tokens) == 20
    storage = engine.controller.storage_backend
    value = storage._pools["kv"].names(engine.hashes(tokens))[2 * 7 + 1]  # of the eighth page, V
    assert storage._cache.delete(value)
    assert engine.load(tokens) == 7


@pytest.mark.requirement("exact")
def test_a_share_that_is_too_small_keeps_what_was_stored_last(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine(quota=64)  # blocks of 64 KiB: 32 pages
    for number in range(6):
        assert engine.store(document(number, 10)) == 10
    assert engine.counters["evictions"] > 0
    assert [engine.load(document(number, 10)) for number in (0, 3, 4, 5)] == [0, 10, 10, 10]


@pytest.mark.requirement("exact")
def test_a_page_that_does_not_fit_is_told(start_cluster: Callable[..., Any]) -> None:
    engine = Engine(start_cluster("--block-size", "4KiB", "--pool-size", "1MiB").url, quota=8)
    assert engine.store(document(1, 3)) == 0
    assert engine.counters["no space"] == 6
    assert engine.load(document(1, 3)) == 0
    engine.close()


# --- keys -----------------------------------------------------------------------------------------


@pytest.mark.requirement("keys")
@pytest.mark.parametrize(
    "other",
    [
        {"model": "another"},
        {"namespace": "another revision of its weights"},
        {"dtype": torch.bfloat16},
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"tp": (1, 2)},
        {"tp": (0, 2)},
        {"arguments": {"kv_cache_dtype": "fp8_e5m2"}},
        {"arguments": {"revision": "another"}},
        {"arguments": {"json_model_override_args": '{"rope_theta": 1}'}},
    ],
    ids=str,
)
def test_pages_of_another_kind_are_not_there(start_engine: Callable[..., Engine], other: dict[str, Any]) -> None:
    first = start_engine()
    tokens = document(1, 5)
    assert first.store(tokens) == 5
    second = start_engine(**other)
    assert second.load(tokens) == 0
    assert second.store(tokens) == 5
    assert second.counters["stored"] > 0
    assert second.counters["present"] == 0
    assert first.load(tokens) == second.load(tokens) == start_engine().load(tokens) == 5


# --- what an engine is spared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"interface_v1": 0}, "interface_v1"),
        ({"qota": 3}, "no option qota"),
        ({"url": "http://cache-server"}, "cache-server"),
        ({"copies": 0}, "copies of 0"),
        ({"key_file": "nowhere"}, "nowhere"),
        ({"writer": 5}, "writer of 5: expected text"),
        ({"verify": "false"}, "verify of 'false': expected true or false"),
        ({"read_only": "false"}, "read_only of 'false': expected true or false"),
    ],
    ids=str,
)
def test_a_mistake_in_the_configuration_is_told_when_the_engine_starts(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Engine(**{"url": "kbtp://127.0.0.1:1", **wrong})


def test_nothing_is_raised_into_the_threads_of_an_engine(start_engine: Callable[..., Engine]) -> None:
    engine = start_engine()
    storage = engine.controller.storage_backend
    indices = engine.host.alloc(64)
    assert storage.batch_get_v1(["one", "two"], indices) == [False, False]  # and one page's place
    assert storage.batch_set_v1(["one"], None) == [False]
    assert storage.batch_exists_v2(["one"], [object()]).kv_hit_pages == 0
    assert storage.batch_exists(None) == 0
    storage.close()
    assert storage.batch_set_v1(["one"], indices) in ([False], [True])
    assert storage.batch_exists(["two"]) == 0
    storage.clear()
    assert storage.counters["cannot load"] == 1
    assert engine.threads_live


def test_faults_that_sglang_injects(start_engine: Callable[..., Engine]) -> None:
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.3):
        engine = start_engine()
    backend = engine.controller.storage_backend
    assert type(backend).__name__ == "HiCacheStorageFailureInjector"
    tokens = document(1, 5)
    seen = set()
    while len(seen) < 2:
        engine.store(tokens)
        seen.add(engine.load(tokens))
    assert seen == {0, 5}
    assert engine.threads_live


@pytest.mark.requirement("keys")
def test_models_in_one_namespace_have_keys_of_their_own(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(namespace="of the target"), start_engine(namespace="of the target", model="another")
    assert first.store(document(1, 5)) == 5
    assert second.load(document(1, 5)) == 0


def test_an_engine_that_only_reads_stores_nothing(start_engine: Callable[..., Engine]) -> None:
    reader, writer = start_engine(read_only=True), start_engine()
    tokens = document(1, 5)
    assert reader.store(tokens) == 0
    assert reader.counters["stored"] == 0
    assert writer.store(tokens) == 5
    assert reader.load(tokens) == 5


def test_clear_leaves_other_models_alone(start_engine: Callable[..., Engine]) -> None:
    first, second = start_engine(), start_engine(model="another")
    tokens = document(1, 5)
    assert first.store(tokens) == second.store(tokens) == 5
    first.controller.storage_backend.clear()
    assert first.load(tokens) == 0
    assert second.load(tokens) == 5
