"""HELLO at the target: which are refused and why, what is granted, and the HELLO_ACK that says so (profile 2, 8.1).

| step | here | what it may refuse with |
|---|---|---|
| the message | `parse_hello` | UNSUPPORTED, MALFORMED, NO_SESSION, UNSUPPORTED (an option) |
| who it is | `trust_of` | ACCESS_DENIED |
| identity, range, quota | `Identities.admit` | ACCESS_DENIED, NO_SPACE |
| features | `granted_features`, `kbtp.target.direct` | |
| the answer | `accepting`, `packed`, `refusing` | |
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kbtp.errors import WireFormatError
from kbtp.keys import DEFAULT_DOMAIN, Key
from kbtp.target.identity import Admission
from kbtp.types import DIRECT_MODES, Feature, HelloAckFlag, Status
from kbtp.verbs.api import Capabilities
from kbtp.wire import CommonHeader, Hello, HelloAck, Nonces, key_of_hello, parse_request, sign_hello_ack

if TYPE_CHECKING:
    from kbtp.target.target import Target

_GRANTABLE = Feature.INVALIDATE | Feature.RECORD_COMPLETION
"""As far as the binding has them. Direct modes: `kbtp.target.direct`."""

RDMAP_FEATURES = Feature.INVALIDATE | DIRECT_MODES
"""What RDMAP lets a target grant, with atomics (draft 9.1): RECORD_COMPLETION must not be there (draft 6.5)."""


def binding_features(capabilities: Capabilities) -> Feature:
    """What an RNIC lets a target grant (draft 9, profile 7)."""
    features = Feature.DIRECT_LOAD
    if capabilities.send_with_invalidate:
        features |= Feature.INVALIDATE
    if capabilities.write_with_immediate and capabilities.ordered_placement:  # draft 6.5
        features |= Feature.RECORD_COMPLETION
    if capabilities.atomics:
        features |= Feature.DIRECT_ALLOC
    return features


def served_features(granted: Feature, binding: Feature) -> Feature:
    """Those whose flags requests may have: on RDMAP INVALIDATE is served whether or not it was asked for (8.3)."""
    on_rdmap = not binding & Feature.RECORD_COMPLETION
    return granted | (binding & Feature.INVALIDATE if on_rdmap else Feature.NONE)


def parse_hello(message: memoryview, *, in_session: bool) -> Hello:
    """The checks of profile 8.1 that need nothing but the message, in their order; `in_session`: it is a second HELLO.

    Raises `WireFormatError` with the status that refuses it.
    """
    hello = parse_request(message)
    assert isinstance(hello, Hello)
    if in_session:
        raise WireFormatError("opcode", "a second HELLO", Status.NO_SESSION)
    hello.check_options()
    return hello


@dataclass(frozen=True, slots=True)
class Trust:
    """What a HELLO has proved."""

    domain: str
    key: Key | None
    """None: the target has no keys, and nothing was proved."""

    @property
    def direct(self) -> Feature:
        """Direct modes that may be granted, as far as the target offers them."""
        return DIRECT_MODES if self.key is None else self.key.direct


def trust_of(target: Target, hello: Hello, octets: bytes, nonces: Nonces) -> Trust | None:
    """None: ACCESS_DENIED. A live identity is left to `Identities.admit`. `octets` are those of `hello`."""
    namespace = target.config.namespace
    if not target.keys:
        trust = Trust(DEFAULT_DOMAIN, None) if hello.auth is None else None  # profile 4: a target without keys
    else:
        key = key_of_hello(octets, hello.auth, target.keys, nonces)
        trust = None if key is None else Trust(key.domain, key)
    if namespace and hello.namespace != namespace:  # profile 2 NAMESPACE
        return None
    return trust


def granted_features(hello: Hello, offered: Feature, binding: Feature, *, partition: bool) -> Feature:
    """What was asked for, as far as there is and goes together (profile 8.3).

    `offered`: what of the direct modes may be granted. `binding`: what the RNIC lets be granted. `partition`: the
    identity has one, as direct allocation needs.
    """
    if not partition:
        offered &= ~(Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS)
    return hello.requested_features & _GRANTABLE & binding | offered


def accepting(
    target: Target,
    hello: Hello,
    admission: Admission,
    *,
    features: Feature,
    request_credits: int,
    direct: Mapping[str, Any],
) -> HelloAck:
    """The HELLO_ACK that opens a session; `direct` is what direct modes add."""
    config, identity = target.config, admission.identity
    return HelloAck(
        request_id=hello.request_id,
        status=Status.SUCCESS,
        flags=HelloAckFlag.RESUMED if admission.resumed else HelloAckFlag.NONE,
        granted_features=features,
        block_size=config.block_size_bytes,
        pool_blocks=config.pool_blocks,
        allocation_quota=identity.quota,
        request_credits=request_credits,
        max_message=config.max_message_bytes,
        counter_byte_order=int(sys.byteorder == "big"),
        incarnation=target.incarnation,
        first_handle=identity.handles.first,
        handle_count=identity.handles.count,
        table_base_handle=target.table_base_handle,
        table_handles=config.handle_count,
        bound_blocks=target.store.bound_count(identity.handles),
        pool_base=config.pool_base,
        name=config.name or None,
        namespace=config.namespace or None,
        **direct,
    )


def packed(ack: HelloAck, trust: Trust, hello: bytes, nonces: Nonces) -> bytes:
    """`ack` with everything that is granted in it, as it leaves: the MAC covers all of it (profile 4)."""
    return ack.pack() if trust.key is None else sign_hello_ack(ack, trust.key, nonces, hello)


def refusing(header: CommonHeader, status: Status) -> HelloAck:
    """Octets 24 to 151 are zero; the stream ends after it (profile 2)."""
    return HelloAck(request_id=header.request_id, status=status)
