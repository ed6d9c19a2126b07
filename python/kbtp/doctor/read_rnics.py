"""The RNICs of this package: which work here, and which of them `open_rnic("auto")` takes."""

from __future__ import annotations

import os

from kbtp import limits
from kbtp.doctor.facts import RnicFacts, RnicTrial, Text, Unknown
from kbtp.errors import ApiMisuse
from kbtp.rnic import chosen, crc_wanted, native_build, open_rnic, trials

_SPIN_US, _RNIC = "KBTP_SPIN_US", "KBTP_RNIC"


def read_rnics(package_version: str) -> RnicFacts:
    tried, setting_error = [], ""
    try:
        tried = list(trials())
    except (ApiMisuse, ValueError) as error:  # the latter of a setting that is for tests
        setting_error = str(error)
    choice = chosen(tried)
    for trial in tried:
        if trial.rnic is not None:
            trial.rnic.close()
    asked = os.environ.get(_RNIC)
    return RnicFacts(
        package_version,
        native_build=_native_build(),
        reference_crc32c=_reference_crc32c(),
        trials=tuple(RnicTrial(trial.name, trial.rnic is not None, trial.why_not) for trial in tried),
        auto=None if choice.taken is None else choice.taken.name,
        auto_why=choice.why,
        setting_error=setting_error,
        asked_rnic=asked,
        asked_rnic_error="" if not asked or setting_error else _error_of(asked),
        asked_spin_us=os.environ.get(_SPIN_US),
        default_spin_us=limits.RNIC_SPIN_US,
        crc=bool(setting_error) or crc_wanted(),
    )


def _native_build() -> dict[str, str | bool] | Unknown:
    try:
        return native_build()
    except ImportError as error:
        return Unknown(str(error))
    except AttributeError:
        return Unknown("it was built from an older version of its source")


def _reference_crc32c() -> Text:
    try:
        from kbtp.iwarp.crc32c import PATH
    except ImportError as error:
        return Unknown(str(error))
    return PATH


def _error_of(name: str) -> str:
    try:
        open_rnic(name).close()
    except (ApiMisuse, ImportError, OSError, ValueError) as error:
        return str(error)
    return ""
