"""Makes the corpora that fuzzing starts from: seeds.py FOLDER writes FOLDER/<target>/<seed> from the test vectors.

Each is a script as the target of that name reads it, see fuzz_targets/.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

VECTORS = Path(__file__).resolve().parents[2] / "vectors"

# stream: options are bits (0: CRC, 2: markers come in, 3: active, 4 and 5: RTR kind), depths, MULPDU and first MSN.
_CRC, _MARKERS, _ACTIVE = 0x01, 0x04, 0x08
_DEPTHS, _MULPDU = 0x44, 0x01
_HEAR_RAW, _TALK, _HEAR_ULPDU, _POST_RECEIVE, _POST, _SEND = 0, 2, 5, 7, 9, 12
_WANTS = (0, 2, 4, 6, 7, 15)  # Send, Write, Read, Immediate, CompareSwap, FetchAdd

# request: options are bits (0 and 1: punts, 2 and 3: read depth, 4: completions leave), commands carry the peer on top.
_SENDS, _READ_DEPTH = 0x10, 0x08
_MESSAGE, _FINISH, _SERVE_PUNT = 0, 16, 23


def _hex(vector: dict[str, str]) -> bytes:
    return bytes.fromhex(vector["hex"])


def _hear(octets: bytes, piece_bytes: int) -> bytes:
    """The octets as they are, in as many commands as they need."""
    parts = [octets[at : at + 255] for at in range(0, len(octets), 255)]
    return b"".join(bytes((_HEAR_RAW, piece_bytes - 1, len(part))) + part for part in parts)


def _hear_ulpdu(ulpdu: bytes, filler: int = 0) -> bytes:
    return bytes((_HEAR_ULPDU, 0x05, 0xDC, filler, len(ulpdu))) + ulpdu


def stream_seeds() -> Iterator[bytes]:
    receives = bytes((_POST_RECEIVE, 8, _POST_RECEIVE, 255, _POST_RECEIVE, 8))
    work = b"".join(bytes((_POST, want, length)) for length in (3, 200) for want in _WANTS)
    for first in range(8):
        talk = b"".join(bytes((_TALK, 0x05, 0xDC, kind, size)) for size in (30, 150) for kind in (first, *range(8)))
        for options in range(16):
            yield bytes((options, _DEPTHS, _MULPDU)) + receives + work + bytes((_SEND, 20)) + talk + bytes((_SEND, 20))
    for vector in json.loads((VECTORS / "iwarp.json").read_text()):
        octets = _hex(vector)
        if "MPA" in vector["name"].upper() and octets[:4] == b"MPA ":
            continue
        ulpdu = octets[2 : 2 + int.from_bytes(octets[:2], "big")]
        for active in (0, _ACTIVE):
            for markers in (0, _MARKERS):
                options = bytes((_CRC | active | markers, _DEPTHS, _MULPDU))
                busy = options + receives + work + bytes((_SEND, 20))
                yield options + receives + _hear(octets, 5) + bytes((_SEND, 20))
                if len(ulpdu) < 256:
                    yield busy + _hear_ulpdu(ulpdu) + bytes((_SEND, 20))
                    yield busy + _hear_ulpdu(ulpdu, filler=30) + _hear_ulpdu(ulpdu) + bytes((_SEND, 20))


def request_seeds() -> Iterator[bytes]:
    for vector in json.loads((VECTORS / "kbtp.json").read_text()):
        octets = _hex(vector)[:255]
        message = bytes((_MESSAGE, len(octets))) + octets
        after = bytes((_FINISH, 0)) * 3 + bytes((_SERVE_PUNT,)) * 3
        for punts in range(4):
            options = bytes((punts | _READ_DEPTH | _SENDS,))
            yield options + message + after
            yield options + message + message + after + message + after


def session_seeds() -> Iterator[bytes]:
    """ALLOC_STORE, LOAD, STORE and FREE of a handle by its owner, LOADs by the other, RDMA operations between."""
    operations = ((0x02, 0x08, 50), (0x02, 0x00, 90), (0x00, 0x10, 250), (0x01, 0x02, 40), (0x03, 0x00, 0))
    steps = [bytes((peer << 7, *operation)) for peer in (0, 1) for operation in operations]
    between = b"".join(bytes((peer << 7 | step, 0)) for peer in (0, 1) for step in (18, 22, 25))
    for punts in (0, 180, 255):
        options = bytes((punts, 255 - punts, 1, 1))
        yield options + between.join(steps)
        yield options + b"".join(steps)
        yield options + between.join(bytes((step[0], step[1] | 0x04, *step[2:])) for step in steps)


def main(folder: Path) -> None:
    targets = {"stream": stream_seeds, "request": request_seeds, "sessions": session_seeds}
    for target, seeds in targets.items():
        corpus = folder / target
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(seeds()):
            (corpus / f"seed-{number:04}").write_bytes(seed)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
