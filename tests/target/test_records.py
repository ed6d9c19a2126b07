"""Completion records (draft 6.5, profile 7), and what else depends on the binding (draft 9)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kbtp.rnic import open_rnic
from kbtp.target.hello import RDMAP_FEATURES, binding_features
from kbtp.types import Feature, RequestFlag, Status
from kbtp.verbs.api import Capabilities, RdmaWriteImmediate, Send, WcOpcode, WcStatus, WorkCompletion
from kbtp.wire import AllocStore, CompletionDescriptor, CompletionRecord, DataDescriptor, Free

RDMAP = open_rnic("reference").capabilities
INFINIBAND = replace(RDMAP, write_with_immediate=True, masked_atomics=False)
SLOT = CompletionDescriptor(9, 0x1234)


@pytest.mark.parametrize(
    ("capabilities", "features"),
    [
        (RDMAP, RDMAP_FEATURES),
        (INFINIBAND, RDMAP_FEATURES | Feature.RECORD_COMPLETION),
        (replace(INFINIBAND, ordered_placement=False), RDMAP_FEATURES),
        (replace(RDMAP, atomics=False), Feature.DIRECT_LOAD | Feature.INVALIDATE),
        (replace(INFINIBAND, send_with_invalidate=False), Feature.DIRECT_LOAD | Feature.DIRECT_ALLOC | Feature(1)),
    ],
)
def test_what_a_binding_lets_a_target_grant(capabilities: Capabilities, features: Feature) -> None:
    assert binding_features(capabilities) == features


def joined(new_world: Callable[..., Any], binding: Feature, **config: Any) -> Any:
    world = new_world(**config)
    world.target.binding = binding
    return world.connect(requested_features=0x1F)


def posts_of(peer: Any, octets: bytes) -> list[Any]:
    """What the session does about a request, taken before the world looks at it."""
    peer.session.actions.clear()
    lent = peer.lent.pop(0)
    view = lent.sge.region.view[lent.sge.offset : lent.sge.offset + len(octets)]
    view[:] = octets
    completion = WorkCompletion(peer, lent.wr_id, WcOpcode.RECV, WcStatus.SUCCESS, len(octets))
    peer.session.received(completion, peer.world.now_s)
    actions, peer.session.actions = peer.session.actions, []
    return [action for action in actions if isinstance(action, Send | RdmaWriteImmediate)]


def alloc_store(peer: Any, request_id: int) -> bytes:
    flags = RequestFlag.INLINE | RequestFlag.RECORD
    return AllocStore(request_id, peer.handle(), 0, flags, DataDescriptor(0, 0, 3), SLOT, b"abc").pack()


def test_a_record_says_what_a_completion_would(new_world: Callable[..., Any]) -> None:
    peer = joined(new_world, binding_features(INFINIBAND))
    assert peer.ack.granted_features & Feature.RECORD_COMPLETION
    (post,) = posts_of(peer, alloc_store(peer, 0xA_0000_0007))
    entry = peer.entry(peer.handle())
    assert isinstance(post, RdmaWriteImmediate)
    assert (post.remote_stag, post.remote_to, post.immediate) == (SLOT.stag, SLOT.to, 7)
    assert CompletionRecord.parse(post.inline) == CompletionRecord(
        0xA_0000_0007, Status.SUCCESS, entry.generation, 3, entry.block_offset
    )


def test_a_refusal_is_recorded_too_but_not_of_what_was_not_understood(new_world: Callable[..., Any]) -> None:
    peer = joined(new_world, binding_features(INFINIBAND))
    (post,) = posts_of(peer, Free(1, peer.handle(), 0, RequestFlag.RECORD, SLOT).pack())
    assert CompletionRecord.parse(post.inline).status is Status.NOT_BOUND
    (post,) = posts_of(peer, Free(2, peer.handle(), 0, RequestFlag.RECORD, SLOT).pack() + b"more")  # profile 7
    assert isinstance(post, Send)


@pytest.mark.parametrize(
    ("binding", "asked", "understood"),
    [
        (RDMAP_FEATURES, RequestFlag.INVALIDATE, True),  # profile 8.3: whether or not it was asked for
        (binding_features(INFINIBAND), RequestFlag.INVALIDATE, True),
        (binding_features(replace(INFINIBAND, send_with_invalidate=False)), RequestFlag.INVALIDATE, False),
        (RDMAP_FEATURES, RequestFlag.RECORD, False),
    ],
)
def test_flags_go_by_what_the_binding_has(
    new_world: Callable[..., Any], binding: Feature, asked: RequestFlag, understood: bool
) -> None:
    peer = joined(new_world, binding)
    slot = SLOT if asked & RequestFlag.RECORD else None
    (post,) = posts_of(peer, AllocStore(1, peer.handle(), 0, asked, DataDescriptor(5, 0, 0), slot).pack())
    status = int.from_bytes(post.inline[22:24], "big")
    assert (status == Status.UNSUPPORTED) is not understood


def test_where_only_the_device_may_move_head_the_target_takes_no_ticket(new_world: Callable[..., Any]) -> None:
    """IBTA: atomics are atomic among those of one device; a ticket that is taken here could be a peer's too."""
    world = new_world(direct=Feature.DIRECT_ALLOC, direct_blocks=2, quota=2)
    world.target.head_of_device = True
    peer = world.connect(requested_features=Feature.DIRECT_ALLOC | Feature.MASKED_ATOMICS)
    refused = peer.alloc_store(peer.handle(), b"abc", flags=RequestFlag.INLINE)
    assert peer.status(refused) is Status.TARGET_ERROR and not peer.entry(peer.handle()).valid
    bound = peer.answers[peer.bind_ticket(peer.handle(), *peer.take_block(b"abc"))]
    assert bound.status is Status.SUCCESS
