"""Keys are any octets; equal names mean equal keys of one namespace."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.cache.keys import Names
from kbtp.errors import ApiMisuse

KEYS = [b"\x00", b"/", b"../", b"@", b"\xff\xfe", b"a", b"a\x00", b"{a}", b"}{", bytes(65536), bytes(65535) + b"\x01"]


def test_every_key_has_a_name_of_its_own() -> None:
    assert len({Names().of(key) for key in KEYS}) == len(KEYS)


@given(st.binary(min_size=1, max_size=64), st.binary(max_size=32))
def test_names_have_one_length_and_one_hash_tag(key: bytes, namespace: bytes) -> None:
    name = Names(namespace).of(key)
    assert len(name) == len(Names().of(b"x"))
    assert name.count(b"{") == name.count(b"}") == 1


@given(
    st.binary(max_size=8), st.binary(min_size=1, max_size=8), st.binary(max_size=8), st.binary(min_size=1, max_size=8)
)
def test_namespace_and_key_never_run_together(one: bytes, key: bytes, other: bytes, other_key: bytes) -> None:
    same = Names(one).of(key) == Names(other).of(other_key)
    assert same == ((one, key) == (other, other_key))


def test_any_buffer_of_the_same_octets_is_the_same_key() -> None:
    names = Names("model")
    assert names.of(b"key") == names.of(bytearray(b"key")) == names.of(memoryview(b"key"))
    assert names.of(b"key") == Names(b"model").of(b"key")


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (b"", "key of 0 octets: 1 to 65536"),
        (bytes(65537), "key of 65537 octets"),
        ("text", "encode text first"),
        (7, "got int"),
        (np.array([1], "M8[s]"), "cannot be had"),
    ],
)
def test_what_is_no_key_is_refused(key: object, why: str) -> None:
    with pytest.raises(ApiMisuse, match=why):
        Names().of(key)


def test_a_key_that_was_released_is_refused() -> None:
    key = memoryview(b"key")
    key.release()
    with pytest.raises(ApiMisuse, match="released"):
        Names().of(key)


def test_a_namespace_too_long_is_refused() -> None:
    with pytest.raises(ApiMisuse, match="namespace of 256 octets: at most 255"):
        Names(bytes(256))


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_names_are_the_same_in_every_process(seed: str) -> None:
    code = "from kbtp.cache.keys import Names; print(Names('model').of(b'key').decode())"
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip().encode() == Names("model").of(b"key")
