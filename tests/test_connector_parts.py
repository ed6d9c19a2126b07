"""What connectors share, and needs none of their frameworks."""

from __future__ import annotations

import logging
from itertools import combinations

import pytest

from kbtp.connectors.names import key_of
from kbtp.connectors.opening import OPTIONS, open_cache
from kbtp.connectors.troubles import REPEAT_S, Troubles
from kbtp.errors import ApiMisuse

FIELDS = [
    (),
    ("",),
    ("", ""),
    ("model@1", "2"),
    ("model", "1@2"),
    ("model", "1", "2"),
    ("model", 1, 2),
    ("model", 12),
    ("model", b"12"),
    ("model", -12),
    ("model\0", b""),
    ("model", b"\0"),
    ("\udcff",),
    (b"\xff",),
    ("model" * 100_000, "1"),
]


def test_what_differs_in_a_field_has_a_different_key() -> None:
    keys = [key_of(*fields) for fields in FIELDS]
    for one, other in combinations(keys, 2):
        assert one != other
    assert [key_of(*fields) for fields in FIELDS] == keys


def test_a_trouble_is_counted_each_time_and_told_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    troubles = Troubles(logging.getLogger("kbtp.connectors.test"), clock=lambda: now_s[0])
    for _ in range(3):
        troubles.count("away", "refused", times=2)
    troubles.count("full")
    now_s[0] = REPEAT_S
    troubles.count("away", "refused")
    assert troubles.as_dict() == {"away": 7, "full": 1}
    assert caplog.messages == ["away (2 so far): refused", "full (1 so far): ", "away (7 so far): refused"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url of None"),
        ({"url": "http://host"}, "names no index"),
        ({"url": "kbtp://host", "quotas": 5}, "there is no option quotas; there are connect_timeout_s"),
        ({"url": "kbtp://host", "copies": 0}, "0 copies"),
    ],
)
def test_what_an_operator_mistypes_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(ApiMisuse, match=said):
        open_cache(options)


def test_every_option_is_one_of_the_cache_s() -> None:
    values = {"namespace": "llama", "writer": "engine-1", "quota": 5, "copies": 2, "ttl_s": 60.0, "eviction": "s3-fifo"}
    values |= {"read_only": False, "targets": ["kbtp://host"], "timeout_s": 1.0, "connect_timeout_s": 1.0}
    assert values.keys() == OPTIONS
    open_cache({"url": "kbtp://host", **values}).close()
