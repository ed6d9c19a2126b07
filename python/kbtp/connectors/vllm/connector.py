"""`KbtpConnector`, a `KVConnectorBase_V1`: what a prefill instance computes of a prompt, decode instances load.

vLLM has one of these in its scheduler, which decides what is loaded and saved (`scheduler.py`), and one in each worker,
which does it (`worker.py`). Both do it beside the engine; a load that fails is reported, and computed instead.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig
from vllm.config.utils import normalize_value
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from kbtp.connectors.names import fingerprint_of
from kbtp.connectors.opening import open_cache
from kbtp.connectors.troubles import Troubles
from kbtp.connectors.vllm.pages import Pages, Staging
from kbtp.connectors.vllm.scheduler import Plans, Work
from kbtp.connectors.vllm.worker import Shard, Transfers
from kbtp.errors import ApiMisuse

log = logging.getLogger("kbtp.connectors.vllm")

TIMEOUT_S = 2.0  # of each exchange with the index or a target, and how long announced blocks are waited for
STAGING_BYTES = 256 << 20


@dataclass
class Layout(KVConnectorHandshakeMetadata):
    """From a worker to the scheduler, before the first request."""

    fingerprint: bytes


def identity_of(config: VllmConfig) -> bytes:
    """Of what engines must have in common, beside how a block lies in memory."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    fields: list[str | int] = ["vllm connector", 1, vllm.__version__, model.model, str(model.revision)]
    fields += [str(model.dtype), str(model.quantization), str(cache.cache_dtype), cache.block_size]
    fields.append(str(normalize_value(model.hf_config)))  # as overridden: --hf-overrides change what a model computes
    fields += [str(cache.prefix_caching_hash_algo), parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    return fingerprint_of(*fields)


class KbtpConnector(KVConnectorBase_V1):
    """`kv_connector="KbtpConnector", kv_connector_module_path="kbtp.connectors.vllm.connector"`

    `kv_connector_extra_config`: `url`, `staging_bytes` of each worker, and the other options of `open_cache`.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raises `ApiMisuse` for what cannot work; an index that is not there is no such thing."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        _check(vllm_config, kv_cache_config)
        transfer, parallel = self._kv_transfer_config, vllm_config.parallel_config
        self._saves, self._loads = transfer.is_kv_producer, transfer.is_kv_consumer
        options = {"timeout_s": TIMEOUT_S, "staging_bytes": STAGING_BYTES, **transfer.kv_connector_extra_config}
        options.setdefault("connect_timeout_s", options["timeout_s"])
        self._staging_bytes = options.pop("staging_bytes")
        if not isinstance(self._staging_bytes, int) or isinstance(self._staging_bytes, bool):
            raise ApiMisuse(f"staging_bytes of {self._staging_bytes!r}: expected a whole number")
        if role is KVConnectorRole.SCHEDULER or not self._saves:
            options.update(read_only=True, writer=None)
        elif isinstance(options.get("writer"), str):  # each worker is a writer of its own
            options["writer"] += f" {parallel.data_parallel_index} {parallel.rank}"
        self.troubles = Troubles(log)
        self.cache = open_cache(options)
        self._timeout_s: float = options["timeout_s"]
        self.plans = Plans(self.cache, vllm_config.cache_config.block_size, self._timeout_s, self.troubles)
        self._layout: Layout | None = None
        self._transfers: Transfers | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what was not saved is computed again

    def shutdown(self) -> None:
        self.plans.close()
        if self._transfers is not None:
            self._transfers.close()
        self.cache.close()

    # --- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Raises `ApiMisuse` for a KV cache that is not supported: the engine does not start."""
        pages = Pages(kv_caches, self._kv_cache_config.num_blocks)
        ranks = (get_pp_group().rank_in_group, get_tp_group().rank_in_group)
        shard = Shard(fingerprint_of(identity_of(self._vllm_config), pages.layout), *ranks)
        staging = Staging(pages, self._staging_bytes)
        self._transfers = Transfers(self.cache, shard, pages, staging, self._timeout_s, self.troubles)
        self._layout = Layout(shard.layout)
        log.info("%d octets a block, %s", pages.row_bytes, shard)

    def get_handshake_metadata(self) -> Layout | None:
        return self._layout

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        for request_id, blocks in self._work().loads:
            if self._transfers is not None:
                self._transfers.load(request_id, blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request is scheduled when all of its loads have ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any) -> None:
        """All layers of a block are saved together, when they are there."""

    def wait_for_save(self) -> None:
        if self._transfers is not None:
            self._transfers.save(self._work().saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._transfers.finished() if self._transfers is not None else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._transfers.take_failed() if self._transfers is not None else set()

    def _work(self) -> Work:
        work = self._get_connector_metadata()
        assert isinstance(work, Work)
        return work

    # --- scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self.plans.shards = [Shard(layout.fingerprint, *ranks) for ranks, layout in sorted(metadata.items())]

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        try:
            tracked = self.plans.track(request)
            tokens = self.plans.loadable_tokens(tracked, num_computed_tokens) if self._loads else 0
        except Exception as error:
            self.troubles.count("requests that were not looked up", repr(error))
            tokens = 0
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens:
            self.plans.load(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Work:
        return self.plans.work(scheduler_output, saves=self._saves)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return False, self.plans.finished(request, saves=self._saves)


def _check(config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raises `ApiMisuse` for a configuration that this connector does not support."""
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    if transfer.is_kv_consumer and transfer.kv_load_failure_policy != "recompute":
        raise ApiMisuse('kv_load_failure_policy must be "recompute": else a block that is gone ends its request')
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise ApiMisuse("context parallelism is not supported")
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1 or groups[0].kv_cache_spec.block_size != config.cache_config.block_size:
        raise ApiMisuse("this model has several groups of KV cache blocks, or blocks of several sizes: not supported")
