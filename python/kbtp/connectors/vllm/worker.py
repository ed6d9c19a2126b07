"""The worker's half of the connector: blocks of its KV cache to the cache and back, by threads of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from kbtp.cache import Cache
from kbtp.connectors.names import key_of
from kbtp.connectors.troubles import Troubles
from kbtp.connectors.vllm.pages import Lane, Pages, Staging

Block = tuple[bytes, int]
"""The hash of a block's tokens, and where it is in the KV cache."""

THREADS = 2  # of loads and of saves: one waits for a target while the other copies


class Shard(NamedTuple):
    """What one worker has of each block."""

    layout: bytes
    """Equal where its octets mean the same."""
    pipeline_rank: int
    tensor_rank: int

    def key_of(self, block_hash: bytes) -> bytes:
        return key_of(*self, block_hash)


class Transfers:
    """What one worker saves and loads. Methods are called in its own thread, and none raises."""

    def __init__(
        self, cache: Cache, shard: Shard, pages: Pages, staging: Staging, timeout_s: float, troubles: Troubles
    ) -> None:
        self._cache = cache
        self._shard = shard
        self._pages = pages
        self._staging = staging
        self._timeout_s = timeout_s
        self._troubles = troubles
        self._registration = cache.register(staging.octets)
        self._saving = ThreadPoolExecutor(THREADS, "kbtp-vllm-save")
        self._loading = ThreadPoolExecutor(THREADS, "kbtp-vllm-load")
        self._loads: dict[str, Future[list[int]]] = {}
        self._failed: set[int] = set()

    # --- saves ---------------------------------------------------------------------------------

    def save(self, blocks: Sequence[Block]) -> None:
        """The blocks are copied when it returns. Without room for that in time the rest is not saved."""
        give_up_at_s = time.monotonic() + self._timeout_s
        for wave in self._waves(blocks):
            lane = self._staging.take(give_up_at_s - time.monotonic())
            if lane is None:
                self._troubles.count("blocks not saved: the staging area is full", "staging_bytes decides", len(wave))
                continue
            try:
                copied = self._pages.gather([place for _, place in wave], lane.rows)
                self._saving.submit(self._put, lane, [block_hash for block_hash, _ in wave], copied)
            except Exception as error:
                self._staging.give(lane)
                self._troubles.count("blocks not saved", repr(error), len(wave))

    def _put(self, lane: Lane, hashes: Sequence[bytes], copied: Any) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            for item in self._cache.put_many(self._names(hashes), lane.slices[: len(hashes)]):
                if not item.ok:
                    why = item.error or "see the counters of the cache"
                    self._troubles.count(f"blocks not saved: {item.outcome.value}", why)
        except Exception as error:
            self._troubles.count("blocks not saved", repr(error), len(hashes))
        finally:
            self._staging.give(lane)

    # --- loads ---------------------------------------------------------------------------------

    def load(self, request_id: str, blocks: Sequence[Block]) -> None:
        """Begins; `finished` tells when it has ended, `take_failed` what was not loaded.

        What the cache has not been asked for within the timeout is not loaded: the request waits for it.
        """
        begin_by_s = time.monotonic() + self._timeout_s
        try:
            self._loads[request_id] = self._loading.submit(self._get, blocks, self._pages.now(), begin_by_s)
        except Exception as error:
            self._troubles.count("blocks not loaded", repr(error), len(blocks))
            self._loads[request_id] = failed = Future[list[int]]()
            failed.set_result([place for _, place in blocks])

    def _get(self, blocks: Sequence[Block], after: Any, begin_by_s: float) -> list[int]:
        """Blocks that were not loaded. One that is missing makes all behind it worthless."""
        loaded = 0
        try:
            for wave in self._waves(blocks):
                if time.monotonic() > begin_by_s:
                    self._troubles.count("loads given up that took too long", "timeout_s is how long they may wait")
                    break
                good = self._get_wave(wave, after, begin_by_s)
                loaded += good
                if good < len(wave):
                    break
        except Exception as error:
            self._troubles.count("loads that failed", repr(error))
        if loaded < len(blocks):
            self._troubles.count("blocks not loaded", "see the counters of the cache", len(blocks) - loaded)
        return [place for _, place in blocks[loaded:]]

    def _get_wave(self, wave: Sequence[Block], after: Any, begin_by_s: float) -> int:
        lane = self._staging.take(begin_by_s - time.monotonic())
        if lane is None:
            return 0
        try:
            row_bytes = self._pages.row_bytes
            items = self._cache.get_many_into(self._names([one for one, _ in wave]), lane.slices[: len(wave)])
            whole = [item.ok and item.length_bytes == row_bytes for item in items]
            good = whole.index(False) if False in whole else len(whole)
            if good:
                self._pages.scatter(lane.rows, [place for _, place in wave[:good]], after)
            return good
        finally:
            self._staging.give(lane)

    def finished(self) -> set[str]:
        """Requests whose loads have ended since it was asked last."""
        ended = {request_id for request_id, future in self._loads.items() if future.done()}
        for request_id in ended:
            self._failed.update(self._loads.pop(request_id).result())
        return ended

    def take_failed(self) -> set[int]:
        taken, self._failed = self._failed, set()
        return taken

    # --- both ----------------------------------------------------------------------------------

    def _waves(self, blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
        for at in range(0, len(blocks), self._staging.lane_rows):
            yield blocks[at : at + self._staging.lane_rows]

    def _names(self, hashes: Sequence[bytes]) -> list[bytes]:
        return [self._shard.key_of(one) for one in hashes]

    def close(self) -> None:
        """Saves that have begun end, by the deadlines of the cache."""
        self._loading.shutdown(cancel_futures=True)
        self._saving.shutdown()
        self._registration.revoke()
        self._cache.close()
