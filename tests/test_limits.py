"""limits.py and the registries hold each number of the protocol once, and the numbers fit together."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import numpy as np
import pytest

import kbtp
from kbtp import _native, errors, limits
from kbtp.types import EntryFlag, Feature, HelloAckFlag, OptionType, RequestFlag, Status, TerminateCause
from kbtp.wire import arrays

PACKAGE = Path(kbtp.__file__).resolve().parent
NAMES = sorted(name for name in vars(limits) if name.isupper())

# Numbers so much the protocol's own that a second place spelling one is a copy.
UNMISTAKABLE = ("DEFAULT_PORT", "ULPDU_MAX_BYTES", "IRD_ORD_MAX")


def _other_sources() -> list[tuple[Path, str]]:
    return [(path, path.read_text()) for path in sorted(PACKAGE.rglob("*.py")) if path.name != "limits.py"]


@pytest.mark.parametrize("name", NAMES)
def test_every_limit_is_a_number_that_can_be(name: str) -> None:
    value = getattr(limits, name)
    assert isinstance(value, int | float)
    assert value > 0


def test_every_limit_is_used() -> None:
    """A number nothing reads says something about the program that is not true."""
    used = {
        token.string
        for _, source in _other_sources()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.NAME
    }
    assert [name for name in NAMES if name not in used] == []


def test_the_native_rnic_goes_by_the_same_numbers() -> None:
    twins = _native.limits()
    assert twins == {name: getattr(limits, name) for name in twins}
    source = (PACKAGE.parents[1] / "rust" / "crates" / "kbtp-proto" / "src" / "limits.rs").read_text()
    assert sorted(twins) == sorted(re.findall(r"^pub const (\w+):", source, re.MULTILINE))


def test_no_second_place_spells_a_number_of_the_protocol() -> None:
    values = {getattr(limits, name): name for name in UNMISTAKABLE}
    copies = [
        f"{path.relative_to(PACKAGE)}:{node.lineno} spells limits.{values[node.value]}"
        for path, source in _other_sources()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and type(node.value) is int and node.value in values
    ]
    assert copies == []


@pytest.mark.parametrize(
    ("layout", "octets"),
    [
        (arrays.HEADER, limits.COMMON_HEADER_BYTES),
        (arrays.DATA_DESCRIPTOR, limits.DATA_DESCRIPTOR_BYTES),
        (arrays.COMPLETION_DESCRIPTOR, limits.COMPLETION_DESCRIPTOR_BYTES),
        (arrays.COMPLETION, limits.COMPLETION_BYTES),
        (arrays.COMPLETION_RECORD, limits.COMPLETION_RECORD_BYTES),
        (arrays.TABLE_ENTRY, limits.ENTRY_BYTES),
        (arrays.RING_SLOT, limits.SLOT_BYTES),
    ],
)
def test_layouts_have_the_octets_the_limits_say(layout: np.dtype[np.void], octets: int) -> None:
    assert layout.itemsize == octets


def test_a_ring_of_every_order_fits_its_counter() -> None:
    """Draft 3.3: Slot Offset is the low n+4 bits, and bit 31 stays a field top of its own."""
    assert limits.RING_ORDER_MAX + 4 <= 32
    assert 1 << limits.RING_ORDER_MIN == 2  # profile 5: N is at least 2


def test_every_status_but_success_has_its_exception() -> None:
    for status in Status:
        if status is not Status.SUCCESS:
            refused = errors.refused(status, "why")
            assert refused.status is status
            assert str(refused) == f"{status.name}: why"


@pytest.mark.parametrize("flags", [RequestFlag, HelloAckFlag, Feature, EntryFlag])
def test_flags_are_single_bits(flags: type[RequestFlag | HelloAckFlag | Feature | EntryFlag]) -> None:
    bits = [flag.value for flag in flags if flag.value]
    assert all(bit & (bit - 1) == 0 for bit in bits)
    assert len(set(bits)) == len(bits)


def test_known_options_may_not_be_skipped() -> None:
    assert all(option < limits.OPTION_SKIPPABLE_FROM for option in OptionType)


def test_terminate_causes_fit_their_fields() -> None:
    """RFC 5040 4.8: Layer and EType are 4 bits, Error Code 8."""
    for cause in TerminateCause:
        assert 0 <= cause.layer <= 2
        assert 0 <= cause.etype < 16
        assert 0 <= cause.code < 256
        assert TerminateCause((cause.layer, cause.etype, cause.code)) is cause
