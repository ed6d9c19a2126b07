"""`kbtp replay`, and the cut of a published trace it is tested with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.eviction import hit_percent, requests_of, unique_of
from kbtp.cache import Cache
from kbtp.cache.announcement import Announcement
from kbtp.cache.embedded import EmbeddedIndex
from kbtp.cache.eviction import Lru
from kbtp.cache.index import open_index
from kbtp.cache.replay import Replay, Request, paced, read_trace, write_contents, wrong_octets
from kbtp.cache.steps import Announce
from kbtp.cli import cli
from kbtp.errors import ApiMisuse
from kbtp.limits import CACHE_TIMEOUT_S

from .conftest import BLOCK_BYTES, WatchedServer

TRACE = Path(__file__).with_name("mooncake_cut.jsonl")
REQUESTS = requests_of(TRACE)
UNIQUE = unique_of(REQUESTS)


@pytest.fixture
def replayed(serve: Callable[..., WatchedServer], open_cache: Callable[..., Cache]) -> Callable[[int], Replay]:
    """`replayed(values)`: the whole trace, with room for so many values."""

    def run(values: int) -> Replay:
        cache = open_cache(targets=[serve(pool_blocks=values, quota=values).url])
        asked = read_trace(TRACE)
        replay = Replay(cache, BLOCK_BYTES, max(len(request.blocks) for request in asked))
        for request in asked:
            replay.request(request)
        replay.close()
        return replay

    return run


def test_with_room_for_all_every_prefix_is_hit(replayed: Callable[[int], Replay]) -> None:
    tally = replayed(UNIQUE).tally
    assert 100 * tally.hit_blocks / tally.references == hit_percent(REQUESTS, Lru(), UNIQUE, end_first=True)
    assert (tally.wrong_octets, tally.not_stored) == (0, 0)


@pytest.mark.parametrize("percent", [10, 25, 50])
def test_with_less_room_it_does_what_the_simulation_does(replayed: Callable[[int], Replay], percent: int) -> None:
    values = UNIQUE * percent // 100
    tally = replayed(values).tally
    plain = hit_percent(REQUESTS, Lru(), values, end_first=False)
    assert 100 * tally.hit_blocks / tally.references >= plain
    assert tally.wrong_octets == 0


def test_the_command_starts_what_it_needs(tmp_path: Path) -> None:
    command = [
        "replay",
        str(TRACE),
        "--pool",
        "50%",
        "--block-bytes",
        "1KiB",
        "--json",
        "--plot",
        str(tmp_path / "x.png"),
    ]
    result = CliRunner().invoke(cli, command)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert (said["requests"], said["unique_blocks"], said["wrong_octets"]) == (40, UNIQUE, 0)
    assert said["evictions"] > 0
    assert said["stale_records"] == 0
    assert set(said["latency_us"]) == {"lookup", "load", "store"}
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_is_for_people_too() -> None:
    result = CliRunner().invoke(cli, ["replay", str(TRACE), "--requests", "5"])
    assert result.exit_code == 0, result.output
    assert "hit ratio blocks" in result.stdout


def test_a_pool_is_counted_in_values_however_many_blocks_the_target_has_for_each(
    serve: Callable[..., WatchedServer],
) -> None:
    target = serve(block_size_bytes=1024, pool_blocks=4 * UNIQUE, quota=1)
    embedded = EmbeddedIndex()
    try:
        index = open_index(embedded.url, CACHE_TIMEOUT_S)
        index.perform(Announce(Announcement(target.target.incarnation, target.url, 1024, 4 * UNIQUE)))
        index.close()
        command = ["replay", str(TRACE), "--pool", "50%", "--block-bytes", "4KiB", "--json"]
        told = [CliRunner().invoke(cli, [*command, *where]) for where in ([embedded.url], [])]
        here, started = (json.loads(result.stdout) for result in told)
        assert 0 < here["hit_blocks"] == started["hit_blocks"]
        assert here["wrong_octets"] == 0
    finally:
        embedded.close()


@pytest.mark.parametrize("pool", ["0", "x", "-5%"])
def test_a_pool_that_is_none(pool: str) -> None:
    result = CliRunner().invoke(cli, ["replay", str(TRACE), "--pool", pool])
    assert (result.exit_code, "a number of blocks, or a percentage" in result.stderr) == (2, True)


def test_what_is_no_trace_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 5, "hash_ids": [1]}\n{"timestamp": 0}\n')
    with pytest.raises(ApiMisuse, match=r"trace.jsonl, line 2, is none of a trace: KeyError\('hash_ids'\)"):
        read_trace(file)


def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pytest.raises(ApiMisuse, match=r"No such file or directory: .*; give a trace, a JSON object a line"):
        read_trace(file)
    file.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ApiMisuse, match=r"can't decode byte 0xff .*; give a trace, a JSON object a line"):
        read_trace(file)


@pytest.mark.parametrize("name", ["no such folder/plot.png", "plot.trace"], ids=["folder", "format"])
def test_a_plot_that_cannot_be_drawn_costs_nothing_else(tmp_path: Path, name: str) -> None:
    arguments = ["replay", str(TRACE), "--speed", "0", "--requests", "2", "--json", "--plot", str(tmp_path / name)]
    result = CliRunner().invoke(cli, arguments)
    assert json.loads(result.stdout)["requests"] == 2
    assert (result.exit_code, "name a .png file that you may write" in result.stderr) == (2, True), result.stderr


def test_contents_say_what_they_are() -> None:
    one, other = np.zeros(8, np.uint64), np.zeros(8, np.uint64)
    write_contents(1, one)
    write_contents(2, other)
    assert wrong_octets(1, one) == wrong_octets(2, other) == 0
    assert wrong_octets(2, one) > 32
    one.view(np.uint8)[13] ^= 1
    assert wrong_octets(1, one) == 1


def test_requests_wait_for_their_time() -> None:
    waited: list[float] = []
    requests = [Request(at_s, 1, ()) for at_s in (0.0, 10.0, 15.0)]
    assert list(paced(requests, 5, lambda: 100.0 + sum(waited), waited.append)) == requests
    assert waited == [2.0, 1.0]


def test_blocks_of_no_whole_words_are_refused(open_cache: Callable[..., Cache]) -> None:
    with pytest.raises(ApiMisuse, match="blocks of 12 octets"):
        Replay(open_cache(), 12, 1)
