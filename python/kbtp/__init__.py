"""KBTP: blocks of KV cache, stored and moved between prefill instances, decode instances and cache servers.

    import kbtp

    with kbtp.connect("kbtp://127.0.0.1:5287") as client:
        block = client.alloc_store(b"what a block holds")
        buffer = bytearray(block.length_bytes)
        client.load(block, into=buffer)
        client.free(block)

`kbtp.connect_async` gives the same for asyncio. `kbtp serve` on a shell runs a target.
"""

from __future__ import annotations

import os

from kbtp import limits
from kbtp.address import Address
from kbtp.cache import AsyncCache, Cache, CacheSettings, Item, Outcome
from kbtp.errors import (
    AccessDenied,
    AlreadyBound,
    ApiMisuse,
    ConnectionLost,
    DeadlineExceeded,
    GenerationMismatch,
    HandleOutOfRange,
    KbtpError,
    LengthError,
    NoSpace,
    NotBound,
    NotSealed,
    OperationRefused,
    PeerIncompatible,
    PeerMisbehaved,
    Sealed,
    TargetError,
    Unsupported,
)
from kbtp.initiator.aio import AsyncClient
from kbtp.initiator.batches import Results
from kbtp.initiator.client import Client
from kbtp.initiator.operations import Result
from kbtp.initiator.session import InitiatorConfig
from kbtp.initiator.view import Mode, SessionTerms
from kbtp.key_file import read_key
from kbtp.keys import Key, parse_direct
from kbtp.rnic import AUTO, open_rnic
from kbtp.types import BlockRef, Feature, Status
from kbtp.verbs.api import Rnic

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AlreadyBound",
    "ApiMisuse",
    "AsyncCache",
    "AsyncClient",
    "BlockRef",
    "Cache",
    "CacheSettings",
    "Client",
    "ConnectionLost",
    "DeadlineExceeded",
    "Feature",
    "GenerationMismatch",
    "HandleOutOfRange",
    "Item",
    "KbtpError",
    "Key",
    "LengthError",
    "Mode",
    "NoSpace",
    "NotBound",
    "NotSealed",
    "OperationRefused",
    "Outcome",
    "PeerIncompatible",
    "PeerMisbehaved",
    "Result",
    "Results",
    "Sealed",
    "SessionTerms",
    "Status",
    "TargetError",
    "Unsupported",
    "connect",
    "connect_async",
    "open_rnic",
]


def connect(
    url: str,
    *,
    initiator_id: bytes | None = None,
    quota: int = 0,
    handles: int = 0,
    name: str | None = None,
    namespace: str | bytes | None = None,
    key: Key | None = None,
    key_file: str | os.PathLike[str] | None = None,
    direct: str = "",
    records: bool = False,
    timeout_s: float = limits.DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = limits.DEFAULT_CONNECT_TIMEOUT_S,
    rnic: Rnic | str | None = None,
) -> Client:
    """Open a session with the target at `url` (`kbtp://HOST[:PORT]`).

    Args:
        initiator_id: 16 octets of your choice: blocks then outlive the connection by the target's linger time and are
            yours again when you connect with the same octets. None: blocks are freed when the connection ends.
        quota: how many blocks you want to allocate at most; 0 takes the target's default.
        handles: how many handles you want; 0 takes the target's default, two a block.
        name: shown in the target's log.
        namespace: must equal the target's, when it has one: a fingerprint of model, dtype and layout.
        key: what to authenticate with, for a target that has keys; the target then has to prove that it has it too.
        key_file: where to read that key, instead of `key`: a file of one key that only its owner can read.
        direct: direct modes to ask for: "load", "alloc", "load,alloc" or "none"; `Client.features` says what was
            granted. A session that has one carries its other requests in Python too: ask only where you use
            `mode="direct"`.
        records: have requests completed by completion records, where RNIC and target can (draft 6.5: not on RDMAP). A
            session that has them carries its requests in Python.
        timeout_s: default time limit of every call, in seconds.
        connect_timeout_s: time limit of connecting, in seconds.
        rnic: the RNIC to use, to share one between clients, or the name of one to open, such as "rdma_core", which the
            target then has to be served on too; None opens the best there is for TCP.

    Raises `ConnectionLost`, `DeadlineExceeded`, `PeerIncompatible`, `PeerMisbehaved`, the `OperationRefused` of a
    refused HELLO, or `ApiMisuse` for arguments that cannot work.
    """
    config = _config(initiator_id, quota, handles, name, namespace, key, key_file, direct, records)
    return Client(
        Address.parse(url),
        config,
        open_rnic(rnic or AUTO) if rnic is None or isinstance(rnic, str) else rnic,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
    )


async def connect_async(
    url: str,
    *,
    initiator_id: bytes | None = None,
    quota: int = 0,
    handles: int = 0,
    name: str | None = None,
    namespace: str | bytes | None = None,
    key: Key | None = None,
    key_file: str | os.PathLike[str] | None = None,
    direct: str = "",
    records: bool = False,
    timeout_s: float = limits.DEFAULT_TIMEOUT_S,
    connect_timeout_s: float = limits.DEFAULT_CONNECT_TIMEOUT_S,
    rnic: Rnic | str | None = None,
) -> AsyncClient:
    """As `connect`, for asyncio."""
    config = _config(initiator_id, quota, handles, name, namespace, key, key_file, direct, records)
    return await AsyncClient.connect(
        Address.parse(url),
        config,
        open_rnic(rnic or AUTO) if rnic is None or isinstance(rnic, str) else rnic,
        timeout_s=timeout_s,
        connect_timeout_s=connect_timeout_s,
    )


def _config(
    initiator_id: bytes | None,
    quota: int,
    handles: int,
    name: str | None,
    namespace: str | bytes | None,
    key: Key | None,
    key_file: str | os.PathLike[str] | None,
    direct: str,
    records: bool,
) -> InitiatorConfig:
    if key is not None and key_file is not None:
        raise ApiMisuse("key and key_file say the same thing; give one of them")
    return InitiatorConfig(
        initiator_id=initiator_id,
        quota=quota,
        handles=handles,
        name=name,
        namespace=namespace.encode() if isinstance(namespace, str) else namespace,
        key=key if key_file is None else read_key(key_file),
        direct=parse_direct(direct),
        records=records,
    )
