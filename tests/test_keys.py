"""Keys and their text: profile 3 "Trust domain", 4."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse
from kbtp.keys import DEFAULT_DOMAIN, Key, Keys, direct_text, parse_direct, parse_keys
from kbtp.types import Feature

SECRET = bytes(range(32))
DIRECT = [Feature.NONE, Feature.DIRECT_LOAD, Feature.DIRECT_ALLOC, Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC]
KEYS = st.builds(
    Key,
    st.integers(0, (1 << 32) - 1),
    st.binary(min_size=32, max_size=64),
    st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    st.sampled_from(DIRECT),
)


@given(st.lists(KEYS, unique_by=lambda key: key.key_id), st.sampled_from(["\n", "\n\n", "\n# a remark\n", "\r\n"]))
def test_what_is_written_is_read(keys: list[Key], between: str) -> None:
    read = parse_keys(between.join(key.line for key in keys))
    assert list(read) == keys
    assert [read.get(key.key_id) for key in keys] == keys
    assert read.domains == {key.domain for key in keys}


def test_id_and_secret_are_enough() -> None:
    [key] = parse_keys(f"0000002A {SECRET.hex().upper()}")
    assert (key.key_id, key.secret, key.domain, key.direct) == (42, SECRET, DEFAULT_DOMAIN, Feature.NONE)


@pytest.mark.parametrize(("text", "direct"), list(zip(("none", "load", "alloc", "load,alloc"), DIRECT, strict=True)))
def test_direct_modes(text: str, direct: Feature) -> None:
    assert parse_direct(text) == direct
    assert direct_text(direct) == text


@pytest.mark.parametrize(("text", "direct"), [("", 0), (" ", 0), (" none ", 0), (" alloc, load", DIRECT[3])])
def test_direct_modes_in_other_words(text: str, direct: int) -> None:
    assert parse_direct(text) == direct


@pytest.mark.parametrize(
    "text", ["store", "loadalloc", "load;alloc", "load,", ",", "none,load", "LOAD", None, 2, b"load", ["load"]]
)
def test_direct_modes_that_there_are_not(text: object) -> None:
    with pytest.raises(ApiMisuse, match=r"none, load, alloc or load,alloc expected"):
        parse_direct(text)  # type: ignore[arg-type]


LINE = f"0000002a {SECRET.hex()}"
WRONG = [
    ("2a " + SECRET.hex(), "Key ID of 8"),
    ("zzzzzzzz " + SECRET.hex(), "Key ID of 8"),
    ("0000002a", "secret in hexadecimal"),
    ("0000002a xyz", "secret in hexadecimal"),
    (f"0000002a {SECRET.hex()}a", "secret in hexadecimal"),
    (f"0000002a {SECRET[1:].hex()}", "31 octets: 32 to 64"),
    (f"0000002a {SECRET.hex()}{SECRET.hex()}ff", "65 octets: 32 to 64"),
    (f"{LINE} domain=", "1 to 64"),
    (f"{LINE} domain={'a' * 65}", "1 to 64"),
    (f"{LINE} domain=a/b", "1 to 64"),
    (f"{LINE} domain=a domain=b", "each once"),
    (f"{LINE} realm=a", "only domain=NAME"),
    (f"{LINE} {SECRET.hex()}", "only domain=NAME"),
    (f"{LINE} direct=store", "none, load, alloc"),
]


@pytest.mark.parametrize(("line", "why"), WRONG, ids=[why for _, why in WRONG])
def test_a_wrong_line_is_named_but_not_shown(line: str, why: str) -> None:
    """What is taken for something else may well be a secret."""
    with pytest.raises(ApiMisuse, match=why) as refused:
        parse_keys(f"# fine\n\n00000001 {SECRET.hex()}\n{line}\n")
    assert str(refused.value).startswith("line 4: ")
    assert SECRET.hex()[:16] not in str(refused.value)


def test_an_id_is_there_once() -> None:
    with pytest.raises(ApiMisuse, match=r"^line 4: Key ID 0000002a is there twice, first on line 2; remove one$"):
        parse_keys(f"# fine\n{LINE}\n\n{LINE} domain=b")
    key = Key(42, SECRET)
    with pytest.raises(ApiMisuse, match=r"^Key ID 0000002a is there twice; give each key an ID of its own$"):
        Keys((key, key))


@pytest.mark.parametrize(
    "fields",
    [
        {"key_id": -1},
        {"key_id": 1 << 32},
        {"secret": bytes(31)},
        {"secret": bytes(65)},
        {"domain": ""},
        {"domain": "a b"},
        {"domain": "a\n"},
        {"direct": Feature.INVALIDATE},
    ],
)
def test_a_key_that_no_file_could_have_is_misuse(fields: dict[str, object]) -> None:
    with pytest.raises(ApiMisuse):
        Key(**{"key_id": 1, "secret": SECRET, **fields})  # type: ignore[arg-type]


def test_nothing_that_is_printed_has_the_secret() -> None:
    key = Key(1, SECRET)
    for shown in (repr(key), str(key), repr(Keys((key,))), str(Keys((key,)))):
        assert repr(SECRET)[2:-1] not in shown
        assert SECRET.hex() not in shown
