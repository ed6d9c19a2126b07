"""Rules of blocks: LOAD, STORE, ALLOC_STORE and FREE, descriptors, turns and races."""

from __future__ import annotations

from kbtp.conformance.rule import SHOULD, Rule

BLOCK_RULES: tuple[Rule, ...] = (
    Rule("KB1", "draft 3.1; profile 2", "Block Offsets are Pool Base + k * Block Size, 0 <= k < Pool Blocks"),
    Rule("KB2", "draft 3.2", "Generation never takes the value zero"),
    Rule("KB3", "draft 3.3", "No block is handed out twice"),
    Rule("KB4", "draft 3.3", "No block is lost, over any number of rounds"),
    Rule("KG1", "draft 6.3 step 4; draft 6.4 step 2", "Bind and free increment the Generation by one"),
    Rule("KG2", "draft 6.3 step 4; profile 5", "The increment skips zero: 65535 is followed by 1"),
    Rule("KG3", "profile 5", "Generations are never reset within an incarnation"),
    Rule("KQ1", "draft 3.4; profile 6.8", "An allocation beyond the quota is NO_SPACE, never the end of the session"),
    Rule("KQ2", "draft 3.4", "A FREE that is completed releases one unit of usage"),
    Rule("KQ3", "profile 6.5", "A failed ALLOC_STORE returns its block and its unit of quota"),
    Rule("KQ4", "draft 3.4", "The sum of quotas is not larger than F"),
    # operations
    Rule("KL1", "draft 6.1 step 2", "A LOAD brings Data Length octets of the block"),
    Rule("KL2", "draft 6.1 step 2", "They are written to the Data Descriptor's Tagged Offset"),
    Rule("KL3", "draft 6.1 step 2", "Data Length does not exceed the descriptor Length"),
    Rule(
        "KL4",
        "draft 6.1 step 3; draft 6.5",
        "It is completed with Block Offset, Data Length and Generation, behind the data",
    ),
    Rule("KL5", "profile 6.6; profile 8.7", "LOAD with Data Length 0 moves nothing and succeeds"),
    Rule("KL6", "draft 6.1 step 1", "The entry must be SEALED unless ALLOW_UNSEALED is set"),
    Rule("KT1", "draft 6.2 step 2", "A STORE writes inline data, or what it reads from the descriptor, into the block"),
    Rule("KT2", "draft 6.2 step 3; profile 6.6", "It updates Data Length, also to 0"),
    Rule("KT3", "draft 6.2 step 3", "With SEAL it sets SEALED"),
    Rule("KT4", "profile 1", "Data longer than Block Size is not stored"),
    Rule(
        "KA1",
        "draft 6.3 step 3; draft 6.3 step 5",
        "ALLOC_STORE stores, and is completed with Block Offset and Generation",
    ),
    Rule("KA2", "profile 1", "Data longer than Block Size binds nothing"),
    Rule("KA3", "draft 6.3 step 4", "The entry is VALID, SEALED if requested, with the next Generation"),
    Rule("KA4", "draft 6.3 step 1", "The entry must not be VALID"),
    Rule("KF1", "draft 6.4 step 2", "FREE clears VALID and SEALED"),
    # descriptors
    Rule("KD1", "draft 5.2", "Without INLINE the source is read from the Data Descriptor"),
    Rule("KD2", "draft 5.2", "With INLINE the data follows the message"),
    Rule("KD3", "draft 5.2; draft 9.1", "Stores without INLINE use RDMA Reads within the descriptor"),
    Rule("KD4", "draft 5.1; draft 6.5; draft 9.1", "With INVALIDATE the target completes with Send with Invalidate"),
    Rule("KD5", "profile 8.7", "NO_SESSION completions invalidate too"),
    Rule("KD6", "profile 2", "Completions of UNSUPPORTED and MALFORMED do not invalidate"),
    Rule("KD7", "profile 2", "Every completion of a well-formed request invalidates, success or error"),
    Rule("KD8", "profile 6.7", "Data Descriptors are checked by the RDMA layer: a bad STag is no KBTP status"),
    Rule("KD9", "profile 3", "At most min(ORD, the initiator's IRD) RDMA Reads are posted; further STOREs wait"),
    Rule(
        "KD10",
        "profile 8.7",
        "A LOAD or STORE of zero octets posts no RDMA operation; INVALIDATE uses the STag as given",
    ),
    Rule("KD11", "draft 5.2", "With INLINE STag and Tagged Offset mean nothing"),
    # turns
    Rule("KW1", "profile 3", "A mutating request waits for every earlier one of its session on its handle"),
    Rule("KW2", "profile 3", "A LOAD waits for earlier mutating requests on its handle"),
    Rule("KW3", "profile 3", "Requests on other handles do not wait"),
    Rule("KW4", "profile 3", "As many requests as there are credits may be outstanding"),
    Rule("KW5", "draft 6.1", "LOADs of one handle do not disturb each other"),
    Rule("KW6", "profile 6.1", "A LOAD whose completion has come holds up no FREE", SHOULD),
    # races
    Rule("KR1", "profile 6.1", "A SUCCESS of a LOAD is never a mixture"),
    Rule(
        "KR2", "profile 6.1; draft 6.4 step 2", "A FREE clears the entry at once, and completes when the pins are gone"
    ),
    Rule("KR3", "profile 6.1", "Setting SEALED does not disturb a LOAD"),
    Rule("KR4", "profile 6.1", "A reader that does not drain has its stream ended"),
    Rule("KR5", "profile 6.5", "A failed ALLOC_STORE leaves the entry unbound"),
    Rule("KR6", "profile 6.5; profile 8.9", "A failed STORE leaves the block as it was or empty, and never sealed"),
    Rule("KR7", "profile 3", "STOREs beyond the read depth come to their turn"),
    Rule("KR8", "profile 3", "STOREs that wait for the read depth hold no completion up"),
    Rule(
        "KR9",
        "profile 3; profile 8.7",
        "With a read depth of 0 a store without INLINE is UNSUPPORTED, found with the flags",
    ),
    Rule("KR10", "profile 8.8", "An RDMA Read that is not answered in time ends the stream"),
    Rule("KR11", "profile 6.1", "A slow reader in nobody's way gets its block"),
    Rule("KR12", "draft 6.3; draft 6.4 step 3", "What was completed is seen by every session"),
    Rule("KR13", "profile 6.1", "Blocks that are reused are never mistaken for one another"),
    Rule(
        "KR14",
        "draft 3.2; draft 6.3",
        "When it binds, the target writes Data Length and Block Offset before Flags and Generation",
        unobservable="the writes of one 16-octet entry are not told apart by a peer",
    ),
)
