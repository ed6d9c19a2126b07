"""The RNIC of rdma-core, as far as it needs no device: what is said where there is none."""

from __future__ import annotations

import pytest

from kbtp.errors import ApiMisuse
from kbtp.rnic import open_rnic
from kbtp.rnic.rdma_core import DEVICE_VARIABLE


@pytest.mark.parametrize("name", ["rdma_core:nosuch0", "rdma_core"])
def test_without_the_device_it_says_what_is_missing_and_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "nosuch0")
    with pytest.raises(OSError, match=r"install rdma-core|rdma link add|there is no RDMA device nosuch0; there are "):
        open_rnic(name)


def test_it_is_one_of_the_names_that_are_known() -> None:
    with pytest.raises(ApiMisuse, match=r"known are auto, native, reference, rdma_core$"):
        open_rnic("rdma-core")


def test_auto_never_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is reached through it must have one too."""
    monkeypatch.setenv(DEVICE_VARIABLE, "nosuch0")
    rnic = open_rnic()
    assert rnic.name == "native"
    rnic.close()


def test_the_user_space_rnic_has_no_write_with_immediate() -> None:
    """Draft 6.5 and 9.1: so no target grants RECORD_COMPLETION over it."""
    for name in ("native", "reference"):
        rnic = open_rnic(name)
        assert not rnic.capabilities.write_with_immediate and not rnic.capabilities.own_base
        rnic.close()
