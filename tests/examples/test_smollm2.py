"""The model writes English, and a loaded cache is worth exactly what a computed one is."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import smollm2
from tokenizer import Tokenizer, chat

PROMPT = (
    "The keeper of the lighthouse is Marta, the baker is Oskar, the goat is Admiral and the doctor is Imre. "
    "Once more: the keeper of the lighthouse is"
)


def prefilled(model: smollm2.Model, prompt: list[int], new_token_count: int) -> smollm2.KvCache:
    cache = smollm2.KvCache(model.shape, len(prompt), new_token_count)
    model.extend(prompt[: cache.full_token_count], cache, 0)
    return cache


def written(model: smollm2.Model, prompt: list[int], cache: smollm2.KvCache, new_token_count: int) -> list[int]:
    tail = prompt[cache.full_token_count :]
    return list(islice(smollm2.greedy(model, tail, cache, cache.full_token_count), new_token_count))


def test_a_question_gets_its_answer(model: smollm2.Model, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(chat("What is the capital of France?"))
    answer = tokenizer.decode(written(model, prompt, prefilled(model, prompt, 8), 8))
    assert answer.startswith("The capital of France is Paris.")


def test_the_continuation_depends_on_the_first_blocks(model: smollm2.Model, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    cache = prefilled(model, prompt, 4)
    assert tokenizer.decode(written(model, prompt, cache, 4)).startswith(" Marta")


def test_octets_of_full_blocks_are_all_that_a_second_cache_needs(model: smollm2.Model, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    computed = prefilled(model, prompt, 4)
    moved = [block.tobytes() for block in computed.full_blocks]

    loaded = smollm2.KvCache(model.shape, len(prompt), 4)
    for block, octets in zip(loaded.full_blocks, moved, strict=True):
        memoryview(block).cast("B")[:] = octets

    assert written(model, prompt, loaded, 4) == written(model, prompt, computed, 4)
    assert loaded.blocks.tobytes() == computed.blocks.tobytes(), "K and V of the tail and the new tokens as well"


def test_behind_a_prefix_of_whole_chunks_all_is_computed_to_the_same_octets(
    model: smollm2.Model, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode(" ".join([PROMPT] * 5))
    computed = prefilled(model, prompt, 4)
    prefix = smollm2.CHUNK_TOKENS
    assert prefix < computed.full_token_count and computed.full_token_count % prefix

    continued = smollm2.KvCache(model.shape, len(prompt), 4)
    blocks = prefix // smollm2.BLOCK_TOKENS
    continued.blocks[:blocks] = computed.blocks[:blocks]
    model.extend(prompt[prefix : continued.full_token_count], continued, prefix)

    assert written(model, prompt, continued, 4) == written(model, prompt, computed, 4)
    assert continued.blocks.tobytes() == computed.blocks.tobytes()


def test_without_the_cached_blocks_the_text_is_another(model: smollm2.Model, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode(PROMPT)
    empty = smollm2.KvCache(model.shape, len(prompt), 4)
    assert written(model, prompt, empty, 4) != written(model, prompt, prefilled(model, prompt, 4), 4)


def test_progress_is_told_at_every_chunk(model: smollm2.Model) -> None:
    cache = smollm2.KvCache(model.shape, 80, 0)
    told: list[int] = []
    model.extend([1] * 20, cache, 56, told.append)
    assert told == [8, 20], "a chunk ends at each multiple of 64 positions"


def test_nothing_to_compute_is_refused(model: smollm2.Model) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        model.extend([], smollm2.KvCache(model.shape, 1, 0), 0)


def test_a_block_is_one_contiguous_piece_of_memory(model: smollm2.Model) -> None:
    cache = smollm2.KvCache(model.shape, 64, 1)
    assert model.shape.block_bytes == 368_640
    for index, block in enumerate(cache.full_blocks):
        assert block.flags.c_contiguous and block.nbytes == model.shape.block_bytes
        assert np.shares_memory(block, cache.blocks[index])


@pytest.mark.parametrize(
    ("prompt_token_count", "full", "tail"), [(1, 0, 1), (16, 0, 16), (17, 1, 1), (32, 1, 16), (33, 2, 1), (498, 31, 2)]
)
def test_the_last_prompt_token_is_never_cached(
    model: smollm2.Model, prompt_token_count: int, full: int, tail: int
) -> None:
    cache = smollm2.KvCache(model.shape, prompt_token_count, 32)
    assert cache.full_block_count == full
    assert prompt_token_count - cache.full_token_count == tail


def test_the_namespace_tells_model_dtype_and_layout(model: smollm2.Model) -> None:
    name = smollm2.namespace(smollm2.model_path(), model.shape)
    assert name.endswith("/float16/30x2x16x3x64")
    assert len(name.encode()) <= 255, "profile 2, NAMESPACE"
