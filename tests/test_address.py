"""Profile 9: addresses of targets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kbtp.address import Address
from kbtp.errors import ApiMisuse


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("kbtp://127.0.0.1", Address("127.0.0.1", 5287)),
        ("kbtp://127.0.0.1/", Address("127.0.0.1", 5287)),
        ("kbtp://127.0.0.1:", Address("127.0.0.1", 5287)),
        ("kbtp://127.0.0.1:80", Address("127.0.0.1", 80)),
        ("kbtp://[::1]", Address("::1", 5287)),
        ("kbtp://[fe80::1%eth0]:1", Address("fe80::1%eth0", 1)),
        ("KBTP://Cache-0.Example", Address("cache-0.example", 5287)),
    ],
)
def test_what_an_address_may_look_like(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "not a KBTP URL"),
        ("127.0.0.1", "not a KBTP URL"),
        ("127.0.0.1:5287", "not a KBTP URL"),
        ("http://127.0.0.1", "not a KBTP URL"),
        ("kbtp:127.0.0.1", "not a KBTP URL"),
        ("kbtp://", "not a KBTP URL"),
        ("kbtp://:5287", "not a KBTP URL"),
        ("kbtp://host:port", "not a KBTP URL"),
        ("kbtp://host:65536", "not a KBTP URL"),
        ("kbtp://[::1", "not a KBTP URL"),
        ("kbtp://\ud800", "not a KBTP URL"),
        ("kbtp://host/blocks", "more than a host and a port"),
        ("kbtp://host?quota=3", "more than a host and a port"),
        ("kbtp://host#part", "more than a host and a port"),
        ("kbtp://me@host", "more than a host and a port"),
    ],
)
def test_what_it_may_not_look_like(url: str, said: str) -> None:
    with pytest.raises(ApiMisuse, match=rf"{said}.*expected kbtp://HOST\[:PORT\]"):
        Address.parse(url)


@given(st.text(max_size=40).map("kbtp://".__add__) | st.text(max_size=40))
def test_nothing_else_is_raised(url: str) -> None:
    try:
        address = Address.parse(url)
    except ApiMisuse:
        return
    assert address.host
    assert 0 <= address.port <= 0xFFFF
