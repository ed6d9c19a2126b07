"""Which RNIC `open_rnic` opens."""

from __future__ import annotations

import logging

import pytest

import kbtp.rnic
from kbtp import limits
from kbtp.errors import ApiMisuse
from kbtp.rnic import open_rnic


@pytest.mark.parametrize(("name", "opened"), [("auto", "native"), ("native", "native"), ("reference", "reference")])
def test_each_is_opened_by_its_name_and_the_native_one_is_the_best(name: str, opened: str) -> None:
    rnic = open_rnic(name)
    assert rnic.name == opened
    rnic.close()


def test_auto_logs_which_it_took(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kbtp.rnic")
    open_rnic().close()
    assert "using RNIC native" in caplog.text


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ApiMisuse, match="no RNIC named 'quantum'; known are auto, native, reference"):
        open_rnic("quantum")


def _missing(_asked: object) -> None:
    raise ImportError("no module named that")


def test_auto_passes_over_one_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kbtp.rnic")
    missing = kbtp.rnic._Entry("missing", _missing)
    monkeypatch.setattr(kbtp.rnic, "_BEST_FIRST", (missing, *kbtp.rnic._BEST_FIRST[1:]))

    rnic = open_rnic()
    rnic.close()

    assert rnic.name == "reference"
    assert "missing is not there: no module named that" in caplog.text
    with pytest.raises(ImportError):
        open_rnic("missing")
    monkeypatch.setattr(kbtp.rnic, "_BEST_FIRST", (missing,))
    with pytest.raises(ApiMisuse, match="no RNIC works"):
        open_rnic()


@pytest.mark.parametrize("name", ["auto", "native", "reference"])
def test_a_crc_is_asked_for_unless_somebody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def crc(**asked: bool) -> bool:
        caplog.clear()
        rnic = open_rnic(name, **asked)
        rnic.close()
        said: bool = rnic.options.mpa.crc
        assert ("asks for no CRC" in caplog.text) is not said
        return said

    monkeypatch.delenv("KBTP_CRC", raising=False)
    assert [crc(), crc(crc=True), crc(crc=False)] == [True, True, False]
    for value, said in (("off", False), ("0", False), ("No", False), ("on", True), ("", True), ("true", True)):
        monkeypatch.setenv("KBTP_CRC", value)
        assert [crc(), crc(crc=True), crc(crc=False)] == [said, True, False]


def test_a_crc_setting_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiMisuse, match="rdma_core has no say in CRCs"):
        open_rnic("rdma_core", crc=False)
    monkeypatch.setenv("KBTP_CRC", "maybe")
    with pytest.raises(ApiMisuse, match="KBTP_CRC is 'maybe': expected on or off"):
        open_rnic()


def test_how_long_it_looks_before_it_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KBTP_SPIN_US", raising=False)
    opened = [open_rnic("native"), open_rnic("native", spin_us=7)]
    monkeypatch.setenv("KBTP_SPIN_US", "12")
    opened += [open_rnic("native"), open_rnic("native", spin_us=0)]
    assert [rnic.options.spin_us for rnic in opened] == [limits.RNIC_SPIN_US, 7, 12, 0]
    for rnic in opened:
        rnic.close()
    for wrong in ("soon", "-1", "1.5"):
        monkeypatch.setenv("KBTP_SPIN_US", wrong)
        with pytest.raises(ApiMisuse, match=f"KBTP_SPIN_US is '{wrong}'"):
            open_rnic("native")
