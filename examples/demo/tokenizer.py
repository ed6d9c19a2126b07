"""The byte-level BPE tokenizer of SmolLM2, built from the vocabulary inside its GGUF file.

Text comes back from its tokens as it was. The exceptions: the vocabulary has no token for 21 octets that no
text it was made from held (some control characters, and lead octets of UTF-8 that no character needs).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import gguf
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Bpe
from tokenizers.models import BPE

# What SmolLM2 was trained to see before a conversation that has no system message of its own; it stands in
# the GGUF file's chat template.
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class TokenType(IntEnum):
    """GGUF `tokenizer.ggml.token_type`: the kinds that must be matched whole, before any merging."""

    CONTROL = 3
    USER_DEFINED = 4


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, reader: gguf.GGUFReader) -> None:
        tokens: list[str] = _strings(reader, "tokenizer.ggml.tokens")
        merges = [_pair(line) for line in _strings(reader, "tokenizer.ggml.merges")]
        self._bpe = Bpe(BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
        # llama.cpp's name for this pre-tokenizer is "smollm": each digit alone, then GPT-2's regular expression.
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self._bpe.decoder = decoders.ByteLevel()
        types = _field(reader, "tokenizer.ggml.token_type").contents()
        whole = {TokenType.CONTROL, TokenType.USER_DEFINED}
        self._bpe.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, kind in zip(tokens, types, strict=True)
                if kind in whole
            ]
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._bpe.decode(list(tokens), skip_special_tokens=False)
        return text


def chat(user: str) -> str:
    """One question in ChatML, ready for the assistant's answer."""
    turns = ("system", _SYSTEM), ("user", user)
    asked = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
    return asked + "<|im_start|>assistant\n"


def _field(reader: gguf.GGUFReader, key: str) -> gguf.ReaderField:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"this GGUF file has no {key!r}: no byte-level BPE tokenizer can be built from it")
    return field


def _strings(reader: gguf.GGUFReader, key: str) -> list[str]:
    return [str(value) for value in _field(reader, key).contents()]


def _pair(merge: str) -> tuple[str, str]:
    left, right = merge.split(" ")
    return left, right
