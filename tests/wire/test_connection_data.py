"""Profile 3: connection data."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.types import Status
from kbtp.wire import ConnectionData

NONCE = bytes(range(16))


def test_24_octets() -> None:
    assert ConnectionData(NONCE).pack() == b"KBTP\x01\x00\x00\x00" + NONCE


@given(nonce=st.binary(min_size=16, max_size=16), padding=st.binary(max_size=600))
def test_what_a_cm_pads_is_ignored(nonce: bytes, padding: bytes) -> None:
    assert ConnectionData.parse(ConnectionData(nonce).pack() + padding) == ConnectionData(nonce)


@pytest.mark.parametrize("length", range(24))
def test_cut_anywhere_it_is_not_there(length: int) -> None:
    with pytest.raises(WireFormatError, match=r"^connection_data: ") as refusal:
        ConnectionData.parse(ConnectionData(NONCE).pack()[:length])
    assert refusal.value.status is Status.MALFORMED


@pytest.mark.parametrize("octet", range(4))
def test_another_magic(octet: int) -> None:
    data = bytearray(ConnectionData(NONCE).pack())
    data[octet] ^= 0x20

    with pytest.raises(WireFormatError, match=r"^magic: "):
        ConnectionData.parse(data)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version(version: int) -> None:
    with pytest.raises(WireFormatError, match=rf"^version: {version}, spoken here is 1") as refusal:
        ConnectionData.parse(ConnectionData(NONCE, version).pack())
    assert refusal.value.status is Status.UNSUPPORTED


@given(st.binary(max_size=64))
def test_any_octets_parse_or_raise_the_one_error(data: bytes) -> None:
    try:
        parsed = ConnectionData.parse(data)
    except WireFormatError:
        return
    assert parsed.pack()[8:] == data[8:24]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nonce", ConnectionData(NONCE[:-1])),
        ("nonce", ConnectionData(NONCE + b"\x00")),
        ("nonce", ConnectionData(7)),  # type: ignore[arg-type]
        ("version", ConnectionData(NONCE, 256)),
        ("version", ConnectionData(NONCE, -1)),
    ],
)
def test_a_value_that_does_not_fit_is_misuse(field: str, value: ConnectionData) -> None:
    with pytest.raises(ApiMisuse, match=rf"^{field}: "):
        value.pack()
