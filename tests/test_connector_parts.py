"""What connectors share, and needs none of their frameworks."""

from __future__ import annotations

import logging
from itertools import combinations

import pytest

from kbtp.cache import CacheSettings
from kbtp.connectors.names import fingerprint_of, key_of
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


def test_and_a_different_fingerprint_of_fixed_length() -> None:
    fingerprints = [fingerprint_of(*fields) for fields in FIELDS]
    assert len(set(fingerprints)) == len(FIELDS)
    assert {len(one) for one in fingerprints} == {16}
    assert [fingerprint_of(*fields) for fields in FIELDS] == fingerprints


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


MISTYPED: list[tuple[str, object, str]] = [
    ("namespace", 5, "namespace of 5: expected text or octets"),
    ("writer", ["engine"], r"writer of \['engine'\]: expected text or octets, or None"),
    ("read_only", "false", "read_only of 'false': expected true or false"),
    ("key_file", 5, "key_file of 5: expected a path"),
    ("quota", "5", "quota of '5': expected a whole number"),
    ("quota", 1.5, "quota of 1.5: expected a whole number"),
    ("quota", True, "quota of True: expected a whole number"),
    ("quota", -1, "quota of -1: expected 0 to 4294967295"),
    ("quota", 1 << 32, "quota of 4294967296: expected 0 to 4294967295"),
    ("copies", "2", "copies of '2': expected a whole number"),
    ("copies", 0, "copies of 0: expected 1 to 16"),
    ("copies", 17, "copies of 17: expected 1 to 16"),
    ("ttl_s", "60", "ttl_s of '60': expected a number, or None"),
    ("ttl_s", 0, "ttl_s of 0 s: must be more than 0"),
    ("eviction", ["lru"], r"eviction of \['lru'\]: expected text"),
    ("eviction", "fifo", "eviction 'fifo': one of lru, s3-fifo expected"),
    ("targets", "kbtp://host", "targets of 'kbtp://host': expected a list of URLs, or None"),
    ("targets", [5], "targets of 5: expected a URL, kbtp://HOST"),
    ("targets", ["kbtp://host", "host"], "targets: 'host' is not a KBTP URL"),
    ("timeout_s", "2", "timeout_s of '2': expected a number"),
    ("timeout_s", None, "timeout_s of None: expected a number"),
    ("timeout_s", 0, "timeout_s of 0: expected more than 0, and 86400 at most"),
    ("timeout_s", float("nan"), "timeout_s of nan: expected more than 0"),
    ("timeout_s", float("inf"), "timeout_s of inf: expected more than 0"),
    ("connect_timeout_s", -1, "connect_timeout_s of -1: expected more than 0"),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "url of None"),
        ({"url": "http://host"}, "names no index"),
        ({"url": "kbtp://host", "quotas": 5}, "there is no option quotas; there are connect_timeout_s"),
        ({"url": "kbtp://[bad"}, r"'kbtp://\[bad' is not a KBTP URL"),
        ({"url": "kbtp://host:x"}, "'kbtp://host:x' is not a KBTP URL"),
        *(({"url": "kbtp://host", name: value}, said) for name, value, said in MISTYPED),
    ],
)
def test_what_an_operator_mistypes_is_said(options: dict[str, object], said: str) -> None:
    with pytest.raises(ApiMisuse, match=said):
        open_cache(options)


def test_what_is_no_key_is_not_shown() -> None:
    with pytest.raises(ApiMisuse) as said:
        CacheSettings(key="a secret")  # type: ignore[arg-type]
    assert str(said.value) == "key of type str: expected what kbtp.key_file.read_key returns, or None"


def test_every_option_is_one_of_the_cache_s() -> None:
    values = {"namespace": "llama", "writer": "engine-1", "quota": 5, "copies": 2, "ttl_s": 60.0, "eviction": "s3-fifo"}
    values |= {"read_only": False, "targets": ["kbtp://host"], "timeout_s": 1.0, "connect_timeout_s": 1.0}
    assert values.keys() == OPTIONS
    open_cache({"url": "kbtp://host", **values}).close()
