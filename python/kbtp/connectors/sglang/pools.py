"""SGLang's host pools: where the segments of a page lie, and what its keys are made of.

A page is one segment of memory, one for K and one for V, or these for each layer: as the pool is laid out. Each segment
is a value of its own; a page is there if all of its segments are.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from kbtp.connectors.names import key_of

log = logging.getLogger("kbtp.sglang")

_SHAPE = "layout dtype page_size start_layer end_layer head_num head_dim v_head_dim".split()


def is_sharded(config: Any, host: Any) -> bool:
    """Whether each tensor parallel rank has pages of its own; otherwise all have the same, and one stores them."""
    return not config.is_mla_model or isinstance(host, MHATokenToKVPoolHost | MambaPoolHost)


@dataclass(frozen=True, slots=True)
class Pool:
    host: Any
    prefix: bytes
    segments: tuple[bytes, ...]
    """What the key of each segment of a page ends with; none for a pool that holds nothing."""
    in_place: bool
    """Otherwise its pages are copied: this pool does not say where they lie."""

    @classmethod
    def of(cls, config: Any, model: bytes, name: str, host: Any) -> Pool:
        sizes, in_place = _cut(name, host)
        ranks = [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size]
        ranks += [config.dcp_rank, config.dcp_size]
        ranks += [config.tp_rank, config.tp_size] if is_sharded(config, host) else []
        shape = [f"{field}={getattr(host, field, None)}" for field in _SHAPE]
        form = (type(host).__name__, key_of(*shape), key_of(*sizes), int(in_place))
        segments = tuple(key_of(number) for number in range(len(sizes)))
        return cls(host, key_of(model, str(name), key_of(*ranks), *form), segments, in_place)

    def names(self, keys: Sequence[str]) -> list[bytes]:
        pages = [self.prefix + key_of(key) for key in keys]
        return [page + segment for page in pages for segment in self.segments]

    def pages(self, flags: Sequence[bool], count: int) -> list[bool]:
        """Which of `count` pages have all of their segments."""
        each = len(self.segments)
        return [all(flags[at * each : (at + 1) * each]) for at in range(count)]

    def views(self, indices: Any, count: int) -> list[memoryview]:
        """The segments of pages, in the pool's own memory."""
        if not self.segments:
            return []
        addresses, sizes = self.host.get_page_buffer_meta(indices)
        if len(addresses) != count * len(self.segments):
            raise ValueError(f"{len(addresses)} segments for {count} pages of {len(self.segments)}")
        return [_octets_at(address, size) for address, size in zip(addresses, sizes, strict=True)]

    def starts(self, indices: Any, count: int) -> list[int]:
        """The place of each page's first token."""
        places: list[int] = indices.tolist()
        if len(places) != count * self.host.page_size:
            raise ValueError(f"{len(places)} tokens for {count} pages of {self.host.page_size}")
        return places[:: self.host.page_size]

    def memory(self) -> Iterator[tuple[Any, memoryview]]:
        """All that its pages lie in: what keeps it, and its octets."""
        if not (self.in_place and self.segments):
            return
        held = (
            self.host.get_hybrid_pool_buffer() if hasattr(self.host, "get_hybrid_pool_buffer") else self.host.kv_buffer
        )
        for tensor in held if isinstance(held, list | tuple) else [held]:
            storage = tensor.untyped_storage()
            if tensor.device.type == "cpu" and storage.nbytes():
                yield storage, _octets_at(storage.data_ptr(), storage.nbytes())


def _octets_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _cut(name: str, host: Any) -> tuple[list[int], bool]:
    """Octets of each segment of a page, and whether they are used in place."""
    if getattr(host, "kv_buffer", True) is None:
        return [], True  # it gives out numbers for pages that lie in other pools
    try:
        _, sizes = host.get_page_buffer_meta(torch.arange(host.page_size))
        return list(sizes), True
    except Exception as error:
        log.info("pages of %s are copied, for %s does not say where they lie: %r", name, type(host).__name__, error)
        return [host.get_dummy_flat_data_page().nbytes], False
