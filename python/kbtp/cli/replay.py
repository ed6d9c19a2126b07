"""`kbtp replay`: a request trace against a cache."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kbtp.cache.announcement import Announcement
from kbtp.cache.announcer import Announcer
from kbtp.cache.cache import Cache
from kbtp.cache.embedded import EmbeddedIndex
from kbtp.cache.eviction import DEFAULT_POLICY, POLICIES
from kbtp.cache.index import open_index
from kbtp.cache.replay import Replay, Request, Tally, paced, read_trace
from kbtp.cache.steps import ListTargets
from kbtp.cli.units import Size, format_size
from kbtp.limits import BLOCK_SIZE_MIN_BYTES, BLOCK_SIZE_MULTIPLE_BYTES, CACHE_TIMEOUT_S
from kbtp.rnic import open_rnic
from kbtp.target.config import TargetConfig
from kbtp.target.server import Server


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("url", required=False)
@click.option("--speed", type=click.FloatRange(min=0), default=0.0, show_default="as fast as it goes",
    help="How much faster than in the trace time goes; 1 is its own pace.")  # fmt: skip
@click.option("--block-bytes", type=Size(), default=4096, show_default="4KiB", help="Octets of a block of 512 tokens.")
@click.option("--pool", metavar="N|N%", help="Blocks the cache may hold, or in % of those the trace has.  "
    "[default: all, or what the target gives]")  # fmt: skip
@click.option("--eviction", type=click.Choice(list(POLICIES)), default=DEFAULT_POLICY, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), help="Stop after so many requests.")
@click.option("--namespace", default="", help="Of the keys.  [default: one of this run alone]")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the hit ratio over time (PNG).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def replay(
    trace: Path, url: str | None, speed: float, block_bytes: int, pool: str | None, eviction: str,
    requests: int | None, namespace: str, plot: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Replay TRACE against the cache at URL, or against a target started for it: look up the longest prefix of each
    request, load it and compare it octet by octet, store what is behind it.

    TRACE has a JSON object a line with timestamp (ms), input_length (tokens) and hash_ids, one for each 512 tokens. The
    exit status is 1 if one octet was wrong.

    \b
    Examples:
      kbtp replay mooncake_trace.jsonl --pool 25%
      kbtp replay mooncake_trace.jsonl kbtp://cache-server --speed 10 --block-bytes 1MiB
    """
    asked = read_trace(trace)[:requests]
    unique = len({block for request in asked for block in request.blocks})
    quota_values = _values(pool, unique)
    with _cluster(url, block_bytes, quota_values or unique) as (index, target_block_bytes):
        per_value = -(-block_bytes // target_block_bytes) if target_block_bytes else 1
        with Cache(
            index,
            namespace=namespace or f"kbtp replay {time.time_ns()}",
            quota=(quota_values or (0 if url else unique)) * per_value,
            eviction=eviction,
        ) as cache:
            tally, took_s = _run(cache, asked, block_bytes, speed)
            counters = cache.counters
    said = {
        "trace": str(trace),
        "unique_blocks": unique,
        "pool_blocks": quota_values,
        "seconds": round(took_s, 3),
        **tally.as_dict(),
        "evictions": counters.evictions,
        "stale_records": counters.stale_records,
        "index_failures": counters.index_failures,
        "target_failures": counters.target_failures,
    }
    if as_json:
        click.echo(json.dumps(said))
    else:
        _print(said)
    if plot is not None:
        _draw(tally, plot)
    if tally.wrong_octets:
        raise SystemExit(1)


def _values(pool: str | None, unique: int) -> int:
    """How many values the cache may hold; 0: as many as there is room for."""
    if pool is None:
        return 0
    try:
        values = int(unique * float(pool[:-1]) / 100) if pool.endswith("%") else int(pool)
    except ValueError:
        values = 0
    if values < 1:
        raise click.UsageError(f"--pool {pool!r}: a number of blocks, or a percentage such as 25%, expected")
    return values


@contextmanager
def _cluster(url: str | None, block_bytes: int, values: int) -> Iterator[tuple[str, int]]:
    """The URL of an index, and the smallest blocks of the targets behind it; 0 if there are none."""
    if url is not None:
        yield url, _block_bytes_at(url)
        return
    size = max(BLOCK_SIZE_MIN_BYTES, block_bytes + -block_bytes % BLOCK_SIZE_MULTIPLE_BYTES)
    server = Server(TargetConfig(block_size_bytes=size, pool_blocks=values), open_rnic())
    address = server.listen(port=0)
    server.start()
    try:
        index = EmbeddedIndex()
        try:
            about = Announcement(server.target.incarnation, str(address), size, values)
            announcer = Announcer(open_index(index.url, CACHE_TIMEOUT_S), about)
            try:
                yield index.url, size
            finally:
                announcer.close()
        finally:
            index.close()
    finally:
        server.stop()


def _block_bytes_at(url: str) -> int:
    index = open_index(url, CACHE_TIMEOUT_S)
    try:
        return min((target.block_bytes for target in index.perform(ListTargets())), default=0)
    finally:
        index.close()


def _run(cache: Cache, requests: list[Request], block_bytes: int, speed: float) -> tuple[Tally, float]:
    replaying = Replay(cache, block_bytes, max((len(request.blocks) for request in requests), default=0))
    began_s = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=len(requests))
        for request in paced(requests, speed, time.monotonic, threading.Event().wait):
            replaying.request(request)
            progress.advance(task)
    took_s = time.monotonic() - began_s
    replaying.close()
    return replaying.tally, took_s


def _print(said: dict[str, object]) -> None:
    table = Table(show_header=False, box=None)
    for key, value in said.items():
        if key in ("bytes_loaded", "bytes_stored") and isinstance(value, int):
            table.add_row(key.replace("_", " "), format_size(value))
        elif key == "latency_us" and isinstance(value, dict):
            for name, percentiles in value.items():
                shown = ", ".join(f"{which} {number:g}" for which, number in percentiles.items())
                table.add_row(f"{name} us", shown)
        elif key.startswith("hit_ratio") and isinstance(value, float):
            table.add_row(key.replace("_", " "), f"{100 * value:.2f} %")
        else:
            table.add_row(key.replace("_", " "), str(value))
    Console().print(table)


def _draw(tally: Tally, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise click.UsageError("--plot needs matplotlib: pip install 'kbtp[bench]'") from None
    figure = Figure(figsize=(8, 4))
    axes = figure.subplots()
    hours = [at_s / 60 for at_s, _, _ in tally.course]
    axes.plot(hours, [100 * hits / max(1, references) for _, hits, references in tally.course])
    axes.set(xlabel="minutes of the trace", ylabel="hits so far, % of block references", ylim=(0, None))
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:  # a format that matplotlib does not have is a ValueError
        raise click.UsageError(
            f"cannot draw --plot {path}: {error}; name a .png file that you may write, in a folder that is there"
        ) from None
