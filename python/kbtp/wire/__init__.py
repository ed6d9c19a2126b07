"""KBTP messages, octets <-> frozen dataclasses: `kbtp.wire.messages` has the map. Many at once: `kbtp.wire.arrays`."""

from kbtp.wire.authentication import (
    Nonces,
    check_hello_ack,
    key_of_hello,
    sign_hello,
    sign_hello_ack,
    sign_hello_ack_octets,
    sign_hello_octets,
)
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
    "Nonces",
    "Octets",
    "Request",
    "Response",
    "Store",
    "check_hello_ack",
    "key_of_hello",
    "parse_request",
    "parse_response",
    "sign_hello",
    "sign_hello_ack",
    "sign_hello_ack_octets",
    "sign_hello_octets",
    "with_zero_mac",
]
