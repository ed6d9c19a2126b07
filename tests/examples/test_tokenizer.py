"""The tokenizer built from the GGUF vocabulary loses nothing and cuts text as SmolLM2 was trained to see it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer import Tokenizer, chat

TEXTS = [
    "The lighthouse stands on the northern cliff.",
    "  two leading spaces, a\ttab,\n\na blank line and trailing space ",
    "don't we'll they've I'M: English contractions",
    "def f(x):\n    return x**2  # code",
    "ångström, naïve, Ελλάδα, поезд, 日本語, 🙂👩‍👩‍👧",
    "0, 12, 1871 and 3.14159",
    "",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_text_comes_back(tokenizer: Tokenizer) -> None:
    # Planes 4 and beyond, where no character is, and some control characters need octets the vocabulary lacks.
    characters = st.characters(codec="utf-8", max_codepoint=0x3FFFF, exclude_categories=["Cc"])

    @given(st.text(characters | st.sampled_from("\n\t"), max_size=40))
    def comes_back(text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text)) == text

    comes_back()


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("in 1871")] == ["in", " ", "1", "8", "7", "1"]


def test_frequent_words_are_one_token_with_their_space(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([token]) for token in tokenizer.encode("the old light")] == ["the", " old", " light"]


def test_control_tokens_are_matched_whole(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]


def test_chat_marks_the_turns_and_leaves_the_last_one_open(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(chat("Hello!"))
    assert (tokens.count(1), tokens.count(2)) == (3, 2)
    assert tokenizer.decode(tokens).endswith("<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n")
