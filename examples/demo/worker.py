"""What the processes with a model have in common: the model, and how it continues a text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import islice

import events
import smollm2
from tokenizer import Tokenizer


class Worker:
    """A loaded model. Tells the parent process as soon as it is ready."""

    def __init__(self) -> None:
        path = smollm2.model_path()
        reader = smollm2.open_gguf(path)
        self.model = smollm2.Model(reader)
        self.tokenizer = Tokenizer(reader)
        self.namespace = smollm2.namespace(path, self.model.shape)
        events.send(events.Ready(self.namespace, self.model.shape.block_bytes))

    def write(self, tail: Sequence[int], cache: smollm2.KvCache, new_token_count: int) -> events.Written:
        """Compute `tail`, which stands right behind the cached blocks, and the tokens that follow it."""
        began = time.perf_counter()
        writer = smollm2.greedy(self.model, tail, cache, cache.full_token_count)
        written = [next(writer)]
        first_token_s = time.perf_counter() - began
        written += islice(writer, new_token_count - 1)
        return events.Written(written, self.tokenizer.decode(written), first_token_s)
