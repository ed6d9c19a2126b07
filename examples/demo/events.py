"""What the demo's processes say to each other: one JSON object a line, on stdin and stdout.

What goes to the decode process (`DecodeJob`) is the whole point of the demo, so look there: the target's
address, names of blocks, and the few tokens after the last full block. The prompt is not in it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TypeAlias, TypeVar, get_args

BlockName: TypeAlias = tuple[int, int, int]
"""Handle, Generation and Data Length (octets) of one block in the target."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A child has loaded the model; what a target for its blocks must be like."""

    namespace: str
    block_bytes: int


@dataclass(frozen=True, slots=True)
class PrefillJob:
    url: str
    prompt_path: str
    new_token_count: int


@dataclass(frozen=True, slots=True)
class Progress:
    done_tokens: int
    total_tokens: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The prompt's full blocks are in the target: which, in order, and what is left to compute."""

    prompt_token_count: int
    incarnation: int
    blocks: list[BlockName]
    tail: list[int]
    prefill_s: float
    store_s: float


@dataclass(frozen=True, slots=True)
class DecodeJob:
    url: str
    incarnation: int
    blocks: list[BlockName]
    tail: list[int]
    new_token_count: int


@dataclass(frozen=True, slots=True)
class Loaded:
    """The blocks are in the decode process's cache. `connect_s` is what happens once a session, not once a prompt."""

    connect_s: float
    load_s: float


@dataclass(frozen=True, slots=True)
class Written:
    """The new tokens. `first_token_s` is the time from the start of the tail to the first of them."""

    tokens: list[int]
    text: str
    first_token_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """A question about a document, for an instance with the keyed cache; if it is to `compare`, once more without."""

    index_url: str
    document_path: str
    question: str
    new_token_count: int
    compare: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """What a request came to. Its first token took looking up, loading and computing, all of them together."""

    prompt_token_count: int
    cached_token_count: int
    stored_token_count: int
    loaded_bytes: int
    look_up_s: float
    load_s: float
    compute_s: float
    store_s: float
    tokens: list[int]
    text: str

    @property
    def first_token_s(self) -> float:
        return self.look_up_s + self.load_s + self.compute_s


Message: TypeAlias = Ready | PrefillJob | Progress | Stored | DecodeJob | Loaded | Written | Request | Answered
M = TypeVar("M", bound=Message)

_CLASSES = {cls.__name__: cls for cls in get_args(Message)}


def to_line(message: Message) -> str:
    return json.dumps({"type": type(message).__name__, **asdict(message)}) + "\n"


def from_line(line: str | bytes) -> Message:
    fields = json.loads(line)
    message: Message = _CLASSES[fields.pop("type")](**fields)
    return message


def send(message: Message) -> None:
    """Tell the parent process."""
    sys.stdout.write(to_line(message))
    sys.stdout.flush()


def receive(expected: type[M]) -> M:
    """Wait for the parent process. Its death ends this process too, so that none is left behind."""
    line = sys.stdin.readline()
    if not line:
        sys.exit("the process that started this one is gone")
    message = from_line(line)
    if not isinstance(message, expected):
        raise TypeError(f"expected a {expected.__name__}, got {line.strip()}")
    return message
