"""The KV cache of a worker as rows: of one block the pages of all layers, one behind the other.

The engine's memory may be an accelerator's, and has the pages of a block far apart. So rows are copied, by torch, to
and from a staging area in host memory, which is registered once; so the engine may use its blocks again at once, too.
"""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from kbtp.connectors.names import fingerprint_of
from kbtp.errors import ApiMisuse

LANES = 4  # of the staging area: as many transfers go on at a time


class Pages:
    """Raises `ApiMisuse` for a KV cache that does not have a run of octets for each block and layer.

    num_blocks: as many as vLLM's scheduler counts, whose numbers are the rows here.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        layers: dict[int, torch.Tensor] = {}  # by address: layers may share one
        fields: list[str | int] = []
        for name, tensor in kv_caches.items():
            if not isinstance(tensor, torch.Tensor):
                raise ApiMisuse(f"{name} has a state that is no KV cache of blocks: its model is not supported")
            if tensor.shape[0] != num_blocks:  # an attention backend may split blocks: all ids would mean other rows
                raise ApiMisuse(
                    f"{name} has {tensor.shape[0]} blocks where vLLM's scheduler counts {num_blocks}: set block_size to"
                    " what its attention backend works with"
                )
            layers.setdefault(tensor.data_ptr(), _octets_of(name, tensor))
            fields += [name, list(layers).index(tensor.data_ptr()), str(tensor.dtype)]
            fields += [*tensor.shape[1:], *tensor.stride()[1:]]
        self._layers = list(layers.values())
        self.device = self._layers[0].device
        self.row_bytes = sum(layer.shape[1] for layer in self._layers)
        self.layout = fingerprint_of("pages", *fields)
        """Equal where the octets of a row mean the same."""
        self._aside = torch.Stream(self.device) if self.device.type != "cpu" else None

    def gather(self, blocks: Sequence[int], rows: torch.Tensor) -> Any:
        """Copies in the order of the engine's own work; what it returns is to be waited for, if it is not None."""
        index = torch.tensor(blocks, device=self.device)
        at = 0
        for layer in self._layers:
            end = at + layer.shape[1]
            rows[: len(blocks), at:end].copy_(layer[index], non_blocking=True)
            at = end
        return self.now()

    def now(self) -> Any:
        """What the accelerator has been given to do until now; None if there is none."""
        return torch.accelerator.current_stream(self.device).record_event() if self._aside is not None else None

    def scatter(self, rows: torch.Tensor, blocks: Sequence[int], after: Any) -> None:
        """Copies beside the engine's work, but behind `after`, and is done when it returns."""
        if self._aside is not None:
            self._aside.wait_event(after)
        with self._aside or nullcontext():
            index = torch.tensor(blocks, device=self.device)
            at = 0
            for layer in self._layers:
                end = at + layer.shape[1]
                layer.index_copy_(0, index, rows[: len(blocks), at:end].to(self.device, non_blocking=True))
                at = end
        if self._aside is not None:
            self._aside.synchronize()


def _octets_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """(blocks, octets of a page), the same memory."""
    page = tensor[0]
    reach = 1 + sum((size - 1) * stride for size, stride in zip(page.shape, page.stride(), strict=True))
    if reach != page.numel():
        raise ApiMisuse(f"{name} has gaps within a block, strides {tensor.stride()}: this layout is not supported")
    flat = tensor.as_strided((tensor.shape[0], page.numel()), (tensor.stride(0), 1), tensor.storage_offset())
    return flat.view(torch.uint8)


class Lane:
    """A part of the staging area, for as many rows as `rows` has."""

    def __init__(self, rows: torch.Tensor, octets: memoryview) -> None:
        self.rows = rows
        row_bytes = rows.shape[1]
        self.slices = [octets[at : at + row_bytes] for at in range(0, len(octets), row_bytes)]


class Staging:
    """Lanes to take and give back; `octets` is all of it, to be registered."""

    def __init__(self, pages: Pages, size_bytes: int) -> None:
        """Raises `ApiMisuse` if there is no room for a row in each lane."""
        self.lane_rows = size_bytes // LANES // pages.row_bytes
        if self.lane_rows < 1:
            raise ApiMisuse(f"staging_bytes of {size_bytes}: at least {LANES} rows of {pages.row_bytes} are needed")
        shape = (LANES * self.lane_rows, pages.row_bytes)
        rows = torch.empty(shape, dtype=torch.uint8, pin_memory=pages.device.type != "cpu")
        self.octets = memoryview(rows.numpy()).cast("B")
        self._free: queue.SimpleQueue[Lane] = queue.SimpleQueue()
        lane_bytes = self.lane_rows * pages.row_bytes
        for number in range(LANES):
            part = rows[number * self.lane_rows : (number + 1) * self.lane_rows]
            self.give(Lane(part, self.octets[number * lane_bytes : (number + 1) * lane_bytes]))

    def take(self, timeout_s: float) -> Lane | None:
        """None if all are busy for so long."""
        try:
            return self._free.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def give(self, lane: Lane) -> None:
        self._free.put(lane)
