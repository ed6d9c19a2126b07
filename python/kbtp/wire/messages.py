"""Every KBTP message, and where to find it: draft 5 and profile 1 and 2 as octets.

All integers are unsigned and in network byte order; offsets are octets from the start of the message.

Common header (24), at the head of every message. `CommonHeader`, header.py

    0  Version (8)   1  Opcode (8)   2  Flags (16)   4  Request ID (64)   12  Block Handle (64)
    20 Generation (16)   22  Status (16)

| opcode | class | octets | after the common header | file |
|---|---|---|---|---|
| 1 HELLO | `Hello` | 64, options | the table below | session_messages.py |
| 2 HELLO_ACK | `HelloAck` | 152, options | the table below | session_messages.py |
| 3 LOAD | `Load` | 40, 56 with RECORD | 24 Data Descriptor, 40 Completion Descriptor | requests.py |
| 4 STORE | `Store` | 40, 56 with RECORD, inline data | as LOAD, then the data if INLINE | requests.py |
| 5 ALLOC_STORE | `AllocStore` | as STORE | as STORE | requests.py |
| 6 FREE | `Free` | 24, 40 with RECORD | 24 Completion Descriptor | requests.py |
| 7 BIND | `Bind` | 40, 56 with RECORD | 24 Ticket (32), 28 Data Length (32), 32 Block Offset (64), \
40 Completion Descriptor | requests.py |
| 8 COMPLETION | `Completion` | 40 | 24 Data Length (32), 28 reserved (32), 32 Block Offset (64) | records.py |

Data Descriptor (16): STag (32), Tagged Offset (64), Length (32). `DataDescriptor`, requests.py
Completion Descriptor (16): STag (32), Tagged Offset (64), reserved (32). `CompletionDescriptor`, requests.py
Completion record (24), not a message but written to a Completion Descriptor: Request ID (64), Status (16),
Generation (16), Data Length (32), Block Offset (64). `CompletionRecord`, records.py

    HELLO                              HELLO_ACK
    24 Requested Features (32)         24 Granted Features (32)     80 Table Base Handle (64)
    28 Requested Quota (32)            28 Block Size (32)           88 Table Handles (64)
    32 Requested Handles (64)          32 Pool Blocks (32)          96 Table Offset (64)
    40 Completion Credits (32)         36 Allocation Quota (32)    104 Table STag (32)
    44 Max Message (32)                40 Request Credits (32)     108 Pool STag (32)
    48 Initiator ID (128)              44 Max Message (32)         112 Partition STag (32)
    64 options                         48 Ticket Timeout, ms (32)  116 Ring STag (32)
                                       52 Ring Order (8)           120 Ring Offset (64)
                                       53 Counter Byte Order (8)   128 Head Offset (64)
                                       54 reserved (16)            136 Head STag (32)
                                       56 Incarnation (64)         140 Bound Blocks (32)
                                       64 First Handle (64)        144 Pool Base (64)
                                       72 Handle Count (64)        152 options

Options: Type (16), Length of the value (16), value, padding to 4. 1 NAME, 2 NAMESPACE, 3 AUTH (Key ID (32),
MAC (256), the last option). options.py

The same layouts as data, for dataclasses and numpy alike: layouts.py. Arrays of messages: arrays.py. What travels
before any message, in the connection's private data: connection_data.py.
"""

from __future__ import annotations

from typing import Final, TypeAlias

from kbtp.types import Opcode
from kbtp.wire.header import CommonHeader, Octets
from kbtp.wire.records import Completion
from kbtp.wire.requests import AllocStore, Bind, Free, Load, Store
from kbtp.wire.session_messages import Hello, HelloAck

Request: TypeAlias = Load | Store | AllocStore | Free | Bind | Hello
"""What an initiator sends."""
Response: TypeAlias = Completion | HelloAck
"""What a target sends."""

_REQUESTS: Final[dict[int, type[Load | Store | AllocStore | Free | Bind | Hello]]] = {
    Opcode.HELLO: Hello,
    Opcode.LOAD: Load,
    Opcode.STORE: Store,
    Opcode.ALLOC_STORE: AllocStore,
    Opcode.FREE: Free,
    Opcode.BIND: Bind,
}
_RESPONSES: Final[dict[int, type[Completion | HelloAck]]] = {
    Opcode.COMPLETION: Completion,
    Opcode.HELLO_ACK: HelloAck,
}


def parse_request(data: Octets) -> Request:
    """The request that `data` is, from its first octet to its last.

    Raises `WireFormatError` and nothing else. Its `status` is what a target answers, found in profile 1's order:
    UNSUPPORTED for version, opcode (COMPLETION and HELLO_ACK too, profile 8.3) and flags, then MALFORMED. Under 24
    octets there is no header to answer to, and the stream ends (profile 8.5): the field is "message" then.
    Unknown options of a HELLO come back in `Hello.unknown_options`.
    """
    header = CommonHeader.parse(data)
    header.require(_REQUESTS)
    return _REQUESTS[header.opcode].parse_body(header, data)


def parse_response(data: Octets) -> Response:
    """The COMPLETION or HELLO_ACK that `data` is, from its first octet to its last.

    Raises `WireFormatError` and nothing else, also for a status that profile 1 does not know, and for an unknown
    option below 0x8000 if nothing is malformed.
    """
    header = CommonHeader.parse(data)
    header.require(_RESPONSES)
    return _RESPONSES[header.opcode].parse_body(header, data)
