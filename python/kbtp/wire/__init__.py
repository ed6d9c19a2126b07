"""KBTP messages, octets <-> frozen dataclasses: `kbtp.wire.messages` has the map. Many at once: `kbtp.wire.arrays`."""

from kbtp.wire.connection_data import ConnectionData
from kbtp.wire.header import CommonHeader, Octets
from kbtp.wire.messages import Request, Response, parse_request, parse_response
from kbtp.wire.options import Auth
from kbtp.wire.records import Completion, CompletionRecord
from kbtp.wire.requests import AllocStore, Bind, CompletionDescriptor, DataDescriptor, Free, Load, Store
from kbtp.wire.session_messages import ANONYMOUS, Hello, HelloAck, with_zero_mac

__all__ = [
    "ANONYMOUS",
    "AllocStore",
    "Auth",
    "Bind",
    "CommonHeader",
    "Completion",
    "CompletionDescriptor",
    "CompletionRecord",
    "ConnectionData",
    "DataDescriptor",
    "Free",
    "Hello",
    "HelloAck",
    "Load",
    "Octets",
    "Request",
    "Response",
    "Store",
    "parse_request",
    "parse_response",
    "with_zero_mac",
]
