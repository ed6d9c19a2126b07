"""What a client tells of its session: the granted terms, the same for both kinds of client."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

from kbtp.errors import ApiMisuse
from kbtp.initiator.connection import Connection
from kbtp.initiator.session import InitiatorSession
from kbtp.types import Feature, Handle, HelloAckFlag

Mode: TypeAlias = Literal["request", "direct"]
"""How a block is loaded or allocated: by the target on request, or directly, by RDMA Reads and atomics (draft 6.6)."""


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """HELLO_ACK as far as it concerns a user (profile 2). Sizes in octets."""

    url: str
    target_name: str
    namespace: str
    incarnation: int
    """Random for each life of the target's table: references made under another one are void."""
    resumed: bool
    block_size_bytes: int
    pool_blocks: int
    quota_blocks: int
    bound_blocks: int
    """Blocks this identity had bound when the session began."""
    first_handle: Handle
    handle_count: int
    request_credits: int
    max_message_bytes: int
    inline_max_bytes: int
    features: tuple[str, ...]

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class SessionView:
    """The terms of the session behind a client."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def terms(self) -> SessionTerms:
        session = self._session
        ack = session.ack
        return SessionTerms(
            url=str(self._connection.address),
            target_name=ack.name or "",
            namespace=(ack.namespace or b"").decode(errors="backslashreplace"),
            incarnation=ack.incarnation,
            resumed=bool(ack.flags & HelloAckFlag.RESUMED),
            block_size_bytes=ack.block_size,
            pool_blocks=ack.pool_blocks,
            quota_blocks=ack.allocation_quota,
            bound_blocks=ack.bound_blocks,
            first_handle=ack.first_handle,
            handle_count=ack.handle_count,
            request_credits=ack.request_credits,
            max_message_bytes=ack.max_message,
            inline_max_bytes=session.inline_max_bytes,
            features=tuple(feature.name or "" for feature in Feature if feature & ack.granted_features),
        )

    @property
    def features(self) -> Feature:
        """What the target has granted. DIRECT_ALLOC is gone once a ticket ran out: `mode="direct"` then allocates on
        request."""
        granted = self._session.ack.granted_features
        return granted & ~Feature.DIRECT_ALLOC if self._session.direct_alloc_is_over else granted

    @property
    def block_size_bytes(self) -> int:
        return self._session.ack.block_size

    @property
    def incarnation(self) -> int:
        return self._session.ack.incarnation

    @property
    def quota_blocks(self) -> int:
        return self._session.ack.allocation_quota

    @property
    def closed(self) -> bool:
        """True once the session has ended, for whatever reason."""
        return self._connection.error is not None

    def _is_direct(self, mode: Mode, feature: Feature) -> bool:
        """Whether `mode` is "direct". Raises `ApiMisuse` if that was not granted, and for a mode there is not."""
        if mode not in ("request", "direct"):
            raise ApiMisuse(f'mode {mode!r}: expected "request" or "direct"')
        if mode == "direct" and not self._session.ack.granted_features & feature:
            name = "load" if feature is Feature.DIRECT_LOAD else "alloc"
            raise ApiMisuse(
                f'mode="direct" needs {feature.name}, which this session does not have: connect with direct="{name}" '
                f"to a target that grants it (`kbtp serve --direct {name}`)"
            )
        return mode == "direct"

    @property
    def _session(self) -> InitiatorSession:
        if self._connection.session is None:
            raise self._connection.error or RuntimeError("the session is not open yet")
        return self._connection.session
