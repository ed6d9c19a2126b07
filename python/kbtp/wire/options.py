"""The options of HELLO and HELLO_ACK (profile 2)."""

from __future__ import annotations

from dataclasses import dataclass

from kbtp.errors import ApiMisuse, WireFormatError
from kbtp.limits import (
    AUTH_MAC_BYTES,
    AUTH_VALUE_BYTES,
    NAME_MAX_BYTES,
    NAMESPACE_MAX_BYTES,
    OPTION_ALIGN_BYTES,
    OPTION_HEADER_BYTES,
    OPTION_SKIPPABLE_FROM,
)
from kbtp.types import OptionType, Status
from kbtp.wire.header import Octets, check_octets
from kbtp.wire.layouts import AUTH_VALUE, OPTION_HEADER


@dataclass(frozen=True, slots=True)
class Auth:
    """Profile 4: which key, and the HMAC-SHA256 made with it (32 octets)."""

    key_id: int
    mac: bytes

    def pack(self) -> bytes:
        """The 36 octets of the option's value. Raises `ApiMisuse` for a value that does not fit its field."""
        check_octets("mac", self.mac, AUTH_MAC_BYTES)
        return AUTH_VALUE.pack(self.key_id, self.mac)


@dataclass(frozen=True, slots=True)
class Options:
    """What the options of one message say; None: the option is not there."""

    name: str | None
    namespace: bytes | None
    auth: Auth | None
    unknown: tuple[int, ...]
    """Types below 0x8000 that profile 2 does not know, in the order they came."""


def parse_options(data: Octets, at: int) -> Options:
    """Everything from octet `at` to the end of the message.

    Raises `WireFormatError` with status MALFORMED and never for an unknown type: that is judged later in the order
    of checks (profile 8.1), by `check_unknown`.
    """
    values = _split(data, at)
    name = namespace = auth = None
    if OptionType.NAME in values:
        name = _parse_name(values[OptionType.NAME])
    if OptionType.NAMESPACE in values:
        namespace = bytes(values[OptionType.NAMESPACE])
        if len(namespace) > NAMESPACE_MAX_BYTES:
            raise WireFormatError("namespace", f"{len(namespace)} octets, at most {NAMESPACE_MAX_BYTES} may be")
    if OptionType.AUTH in values:
        auth = _parse_auth(values[OptionType.AUTH])
        if next(reversed(values)) != OptionType.AUTH:
            raise WireFormatError("auth", "AUTH is not the last option")
    known = {option.value for option in OptionType}
    unknown = tuple(option for option in values if option not in known and option < OPTION_SKIPPABLE_FROM)
    return Options(name, namespace, auth, unknown)


def pack_options(name: str | None, namespace: bytes | None, auth: Auth | None) -> bytes:
    """The options that are not None, AUTH last. Raises `ApiMisuse` for a value the option cannot carry."""
    packed = []
    if name is not None:
        packed.append(_pack_option(OptionType.NAME, _encode_name(name)))
    if namespace is not None:
        if len(namespace) > NAMESPACE_MAX_BYTES:
            raise ApiMisuse(f"namespace: {len(namespace)} octets, at most {NAMESPACE_MAX_BYTES} fit")
        packed.append(_pack_option(OptionType.NAMESPACE, namespace))
    if auth is not None:
        packed.append(_pack_option(OptionType.AUTH, auth.pack()))
    return b"".join(packed)


def check_unknown(unknown: tuple[int, ...]) -> None:
    """Profile 2: a type that is unknown and not skippable is UNSUPPORTED."""
    if unknown:
        types = ", ".join(f"0x{option:04x}" for option in unknown)
        raise WireFormatError("options", f"unknown type {types}", Status.UNSUPPORTED)


def _split(data: Octets, at: int) -> dict[int, memoryview]:
    """Values by type, in order. The framing must account for every octet; what is in the padding is ignored."""
    view = memoryview(data)
    values: dict[int, memoryview] = {}
    while at < len(view):
        if len(view) - at < OPTION_HEADER_BYTES:
            raise WireFormatError("options", f"{len(view) - at} octets are left at {at}, too few for an option")
        option, length = OPTION_HEADER.unpack_from(view, at)
        at += OPTION_HEADER_BYTES
        padded = length + -length % OPTION_ALIGN_BYTES
        if len(view) - at < padded:
            raise WireFormatError(
                "options", f"type 0x{option:04x} needs {padded} octets at {at}, only {len(view) - at} are there"
            )
        if option in values:
            raise WireFormatError("options", f"type 0x{option:04x} is there twice")
        values[option] = view[at : at + length]
        at += padded
    return values


def _pack_option(option: OptionType, value: bytes) -> bytes:
    return OPTION_HEADER.pack(option, len(value)) + value + bytes(-len(value) % OPTION_ALIGN_BYTES)


def _parse_name(value: memoryview) -> str:
    if len(value) > NAME_MAX_BYTES:
        raise WireFormatError("name", f"{len(value)} octets, at most {NAME_MAX_BYTES} may be")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError as fault:
        raise WireFormatError("name", f"not UTF-8: {fault.reason} at octet {fault.start}") from None


def _encode_name(name: str) -> bytes:
    try:
        value = name.encode("utf-8")
    except UnicodeEncodeError as fault:
        raise ApiMisuse(f"name: {fault.reason} at character {fault.start}") from None
    if len(value) > NAME_MAX_BYTES:
        raise ApiMisuse(f"name: {len(value)} octets of UTF-8, at most {NAME_MAX_BYTES} fit")
    return value


def _parse_auth(value: memoryview) -> Auth:
    if len(value) != AUTH_VALUE_BYTES:
        raise WireFormatError("auth", f"{len(value)} octets, AUTH has {AUTH_VALUE_BYTES}")
    return Auth(*AUTH_VALUE.unpack_from(value))
