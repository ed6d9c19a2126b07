"""The scheduler's half of the connector: which blocks the workers are to load, and which to save.

Look-ups are done by a thread of its own; until one has ended vLLM is told to ask again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kbtp.cache import Cache
from kbtp.connectors.troubles import Troubles
from kbtp.connectors.vllm.worker import Block, Shard

LOOK_AGAIN_S = 0.005
LATE = ("look-ups given up that took too long", "the index does not answer, or those before them took all the time")
ANNOUNCED = "kbtp_prompt_blocks"
"""In kv_transfer_params: how many blocks of the prompt the prefill instance saves."""


@dataclass
class Work(KVConnectorMetadata):
    """For the workers, each step."""

    loads: list[tuple[str, list[Block]]] = field(default_factory=list)
    saves: list[Block] = field(default_factory=list)


@dataclass
class Tracked:
    """A request, and what is known of its blocks."""

    request: Request
    give_up_at_s: float
    lookup: Future[list[bool]] | None = None
    look_again_at_s: float = 0.0
    found: list[bool] = field(default_factory=list)
    """By the last look-up that has ended."""
    present: list[bool] | None = None
    """Which of its blocks the cache has, once that is decided; what is behind the last one it has not."""
    local_blocks: int = 0
    loaded: bool = False
    """Asked for once: what failed then would be promised again, and fail again."""
    offered_blocks: int = 0


class Plans:
    """All requests of a scheduler. `shards` are those of its workers, none before they have told them."""

    def __init__(self, cache: Cache, block_tokens: int, timeout_s: float, troubles: Troubles) -> None:
        self.shards: list[Shard] = []
        self._cache = cache
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._troubles = troubles
        self._looking = ThreadPoolExecutor(1, "kbtp-vllm-lookup")
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[tuple[str, list[Block]]] = []

    def track(self, request: Request) -> Tracked:
        if request.request_id not in self._tracked:
            self._tracked[request.request_id] = Tracked(request, time.monotonic() + self._timeout_s)
        return self._tracked[request.request_id]

    # --- loads ---------------------------------------------------------------------------------

    def loadable_tokens(self, tracked: Tracked, computed_tokens: int) -> int | None:
        """How many tokens behind the computed ones can be loaded; None: that is not known yet."""
        if tracked.loaded:
            return 0
        present = self._present(tracked)
        if present is None:
            return None
        tracked.local_blocks = computed_tokens // self._block_tokens
        last = (tracked.request.num_tokens - 1) // self._block_tokens  # a token is left to compute
        found = present[tracked.local_blocks : last]
        return (found.index(False) if False in found else len(found)) * self._block_tokens

    def _present(self, tracked: Tracked) -> list[bool] | None:
        """None also while blocks that were announced are on their way."""
        if tracked.present is not None:
            return tracked.present
        now_s, lookup = time.monotonic(), tracked.lookup
        if lookup is not None and lookup.done():
            tracked.found = lookup.result() or tracked.found
            tracked.lookup, tracked.look_again_at_s = None, now_s + LOOK_AGAIN_S
            if all(tracked.found[: _announced(tracked.request)]):
                tracked.present = tracked.found
                return tracked.present
        if now_s >= tracked.give_up_at_s:
            self._give_up(tracked)
        elif tracked.lookup is None and now_s >= tracked.look_again_at_s:
            hashes = [bytes(one) for one in tracked.request.block_hashes]
            tracked.lookup = self._looking.submit(self._contains, hashes, tracked.give_up_at_s)
        return tracked.present

    def _give_up(self, tracked: Tracked) -> None:
        """What is not known by now is missing."""
        if tracked.lookup is not None:
            tracked.lookup.cancel()
            if not tracked.found:
                self._troubles.count(*LATE)
        tracked.present = tracked.found

    def _contains(self, hashes: Sequence[bytes], begin_by_s: float) -> list[bool]:
        """Which blocks all workers can load; nothing if its turn comes too late. Raises nothing."""
        if time.monotonic() > begin_by_s:
            self._troubles.count(*LATE)
            return []
        if not self.shards:
            return [False] * len(hashes)
        try:
            items = self._cache.contains_many([shard.key_of(one) for one in hashes for shard in self.shards])
            step = len(self.shards)
            return [all(item.ok for item in items[at : at + step]) for at in range(0, len(items), step)]
        except Exception as error:
            self._troubles.count("look-ups that failed", repr(error))
            return [False] * len(hashes)

    def load(self, request: Request, places: Sequence[int], tokens: int) -> None:
        """vLLM has blocks for so many of the `loadable_tokens`: all blocks of the request are at `places`."""
        tracked = self.track(request)
        tracked.loaded = True
        wanted = range(tracked.local_blocks, tracked.local_blocks + tokens // self._block_tokens)
        self._loads.append((request.request_id, [(bytes(request.block_hashes[at]), places[at]) for at in wanted]))

    # --- saves ---------------------------------------------------------------------------------

    def work(self, step: SchedulerOutput, *, saves: bool) -> Work:
        work, self._loads = Work(self._loads), []
        try:
            if saves:
                before = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
                again = step.scheduled_cached_reqs
                before.update(zip(again.req_ids, again.num_computed_tokens, strict=True))
                for request_id, computed_tokens in before.items():
                    work.saves += self._to_save(request_id, computed_tokens, step)
        except Exception as error:
            self._troubles.count("steps whose blocks are not saved", repr(error))
        return work

    def _to_save(self, request_id: str, computed_tokens: int, step: SchedulerOutput) -> list[Block]:
        """Blocks of the prompt that are full after this step, those of them that the cache has not."""
        tracked, state = self._tracked.get(request_id), step.kv_connector_block_state
        if tracked is None or state is None:
            return []
        request, present = tracked.request, tracked.present or []
        end_tokens = min(computed_tokens + step.num_scheduled_tokens[request_id], request.num_prompt_tokens)
        first, end = tracked.offered_blocks, min(end_tokens // self._block_tokens, len(request.block_hashes))
        if end <= first:
            return []
        tracked.offered_blocks = end
        places = state.get_block_ids(request_id)[0]
        computed = computed_tokens // self._block_tokens
        # What the cache has and is computed nevertheless could not be loaded.
        missing = [at for at in range(first, end) if not (at < computed and at < len(present) and present[at])]
        return [(bytes(request.block_hashes[at]), places[at]) for at in missing]

    def finished(self, request: Request, *, saves: bool) -> dict[str, Any] | None:
        """What its decode instance is to be told."""
        tracked = self._tracked.pop(request.request_id, None)
        return {ANNOUNCED: tracked.offered_blocks} if tracked is not None and saves else None

    def close(self) -> None:
        self._looking.shutdown(cancel_futures=True)


def _announced(request: Request) -> int:
    """What it says comes from whoever sent the request."""
    parameters = request.kv_transfer_params
    said = parameters.get(ANNOUNCED) if isinstance(parameters, Mapping) else None
    return said if isinstance(said, int) and said > 0 else 0
