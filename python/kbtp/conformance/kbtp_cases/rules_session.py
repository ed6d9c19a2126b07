"""Rules of sessions: messages, order of checks, connections, HELLO, identity, authentication, bindings."""

from __future__ import annotations

from kbtp.conformance.rule import Rule

SESSION_RULES: tuple[Rule, ...] = (
    # messages
    Rule(
        "KM1",
        "profile 2; draft 5.1",
        "A COMPLETION has 40 octets, no flags, zeros where reserved, and echoes its request",
    ),
    Rule("KM2", "profile 8.6", "A FREE's COMPLETION has zeros and the Generation after the increment"),
    Rule("KM3", "profile 8.6", "A COMPLETION with SUCCESS carries the entry's Data Length and Block Offset"),
    Rule(
        "KM4", "draft 5.1", "Generation in a request is what is expected, 0 any; in a completion it is the current one"
    ),
    Rule("KM5", "draft 5.1", "Request ID is the initiator's to choose and is echoed"),
    Rule("KM6", "draft 9.1", "A message may come in any segmentation by DDP and TCP"),
    # order of checks
    Rule("KO1", "profile 1", "Before HELLO: UNSUPPORTED, MALFORMED, then NO_SESSION"),
    Rule("KO2", "profile 1", "The checks of a LOAD come in their order"),
    Rule("KO3", "profile 1", "The checks of a STORE come in their order"),
    Rule("KO4", "profile 1", "The checks of an ALLOC_STORE come in their order"),
    Rule("KO5", "profile 1", "The checks of a FREE come in their order"),
    Rule("KO6", "profile 8.3", "BIND without DIRECT_ALLOC, COMPLETION, HELLO_ACK: UNSUPPORTED, and the stream stays"),
    Rule("KO7", "profile 8.6", "Status in a request, and STag and Tagged Offset with INLINE, are ignored"),
    Rule("KO8", "profile 2", "LENGTH_ERROR of a LOAD carries the entry's Data Length, other errors carry zeros"),
    Rule("KO9", "profile 2", "INVALIDATE with INLINE or RECORD is UNSUPPORTED"),
    # statuses
    Rule("KS1", "profile 1; draft 6.1 step 1; draft 6.2 step 1; draft 6.4 step 1", "NOT_BOUND: the entry is not VALID"),
    Rule("KS2", "profile 1; draft 6.1 step 1", "NOT_SEALED: LOAD of an unsealed block without ALLOW_UNSEALED"),
    Rule("KS3", "profile 1; draft 6.2 step 1", "SEALED: STORE to a sealed block"),
    Rule("KS4", "profile 1; draft 6.3 step 1", "ALREADY_BOUND: ALLOC_STORE or BIND of a VALID entry"),
    Rule("KS5", "profile 1", "GENERATION_MISMATCH: a Generation that is neither 0 nor the entry's"),
    Rule(
        "KS6",
        "profile 1; draft 6.2 step 1; draft 6.3 step 1; draft 6.4 step 1",
        "HANDLE_OUT_OF_RANGE: no such entry, or not the session's to change",
    ),
    Rule(
        "KS7",
        "profile 1; draft 6.1 step 2",
        "LENGTH_ERROR: more than Block Size, a LOAD's short buffer, inline data of another length",
    ),
    Rule("KS8", "profile 1", "NO_SPACE: the quota is reached"),
    Rule("KS11", "profile 1", "MALFORMED: the fixed part is not there, or octets follow where none may"),
    Rule("KS12", "profile 1", "UNSUPPORTED: version, opcode or flags"),
    Rule("KS14", "profile 1", "NO_SESSION: a request before HELLO"),
    Rule(
        "KS15",
        "profile 1",
        "TARGET_ERROR: a reason of the target's own, the entry is as it was",
        unobservable="nothing from outside makes a target have a reason of its own",
    ),
    # connections and credits
    Rule(
        "KC1",
        "profile 3",
        "The Reply's private data begins with the 24 octets of the connection data, a fresh nonce in them",
    ),
    Rule("KC2", "profile 3", "Octets behind the connection data are ignored"),
    Rule(
        "KC3",
        "profile 3; profile 8.2",
        "A Request without good connection data is refused with R=1 and the target's own",
    ),
    Rule("KC4", "profile 3", "A peer that sends an RTR is served; a Send RTR is hidden and lent a receive buffer"),
    Rule("KC5", "profile 3", "Every request gets exactly one completion"),
    Rule("KC6", "profile 3", "More than Request Credits outstanding: 1/2/02"),
    Rule("KC7", "profile 3", "An initiator that breaks a rule ends its own stream and nobody else's"),
    Rule("KC8", "profile 3", "A buffer is there again before the completion that releases its credit"),
    Rule("KC9", "profile 2", "The target sends no more than the initiator's Completion Credits take"),
    Rule(
        "KC10",
        "profile 3; profile 2",
        "Messages of up to Max Message octets are served, inline data of Max Message - 40",
    ),
    Rule("KC11", "profile 3", "Request IDs are unique among those outstanding only"),
    Rule("KC12", "profile 3", "Requests on different handles are completed in any order, each once"),
    # HELLO
    Rule(
        "KH1",
        "profile 2; profile 8.1",
        "HELLO_ACK: Version 1, Request ID echoed, Handle and Generation 0, at most 1024 octets",
    ),
    Rule(
        "KH2", "profile 2; profile 5", "Block Size is 512 octets to 1 GiB, a multiple of 64; Pool Base is aligned to 64"
    ),
    Rule("KH3", "profile 2", "Request Credits are 1 to Completion Credits, Max Message is at least 1024"),
    Rule("KH4", "profile 2", "Bound Blocks and RESUMED tell what the identity had bound"),
    Rule("KH5", "profile 2", "STags, Ticket Timeout and Ring Order are zero without the direct mode they are for"),
    Rule("KH6", "profile 1", "Granted Features are a subset of the requested ones"),
    Rule(
        "KH7", "draft 6.5; draft 9.1; profile 1", "A target must not advertise RECORD_COMPLETION in the RDMAP binding"
    ),
    Rule("KH8", "profile 8.3", "Unknown feature bits are ignored"),
    Rule(
        "KH9",
        "profile 8.3; profile 1",
        "Contradictory features are not granted: DIRECT_ALLOC without MASKED_ATOMICS on RDMAP",
    ),
    Rule("KH10", "profile 8.3", "The INVALIDATE flag is served whether or not the feature was asked for"),
    Rule("KH11", "profile 2", "Request Credits are no more than Completion Credits"),
    Rule("KH12", "profile 2; profile 8.4", "Requested Quota and Handles of 0 take the target's default"),
    Rule("KH13", "profile 8.4", "Requested Handles: what there is is granted"),
    Rule("KH14", "profile 3", "Handle ranges are disjoint"),
    Rule(
        "KH15",
        "profile 1; profile 8.4",
        "NO_SPACE at HELLO: nothing of a non-zero Requested Quota can be granted; 0 may be granted 0",
    ),
    Rule("KV1", "profile 8.1", "HELLO of another version or with flags: UNSUPPORTED"),
    Rule("KV2", "profile 8.1", "HELLO that is malformed: MALFORMED"),
    Rule("KV3", "profile 2", "An unknown option below 0x8000 is UNSUPPORTED, from there on it is skipped"),
    Rule("KV4", "profile 1; profile 8.1", "A second HELLO: HELLO_ACK with NO_SESSION, then the stream ends"),
    Rule("KV5", "profile 8.1", "The checks of HELLO come in their order"),
    Rule("KV6", "profile 8.1", "HELLO of more than 1024 octets: 1/2/05"),
    Rule("KV7", "profile 8.2", "A request before HELLO gets one COMPLETION, the next one ends the stream"),
    Rule("KV8", "profile 8.2", "HELLO may still follow the one request that came too early"),
    Rule("KV9", "profile 8.5", "A message under 24 octets: 0/2/ff"),
    Rule("KV10", "profile 1", "A message shorter than 24 octets ends the stream"),
    Rule("KV11", "profile 3; profile 8.2", "HELLO must come in time"),
    Rule("KV12", "profile 8.2", "The MPA Request must come in time"),
    Rule("KV13", "profile 2", "Nothing is sent between HELLO and HELLO_ACK, nor before HELLO"),
    Rule("KV14", "profile 8.5", "Too long a Send: 1/2/05"),
    Rule("KP1", "profile 2", "Options of their greatest length are served"),
    Rule("KP2", "profile 2", "NAMESPACE must equal the target's when it has one, else ACCESS_DENIED"),
    # identity
    Rule(
        "KI1",
        "profile 3",
        "An Initiator ID owns range, quota and blocks beyond its stream and gets them back with RESUMED",
    ),
    Rule("KI2", "profile 8.4", "With RESUMED the old range and quota win"),
    Rule("KI3", "profile 3", "An anonymous initiator's blocks are freed when its stream ends"),
    Rule("KI4", "profile 3", "Without keys a live session is not replaced: ACCESS_DENIED until it has ended"),
    Rule("KI5", "profile 2", "Initiator ID zero is anonymous: each such session is an initiator of its own"),
    Rule("KI6", "profile 3", "After the linger time what an identity owned is free"),
    Rule(
        "KI7",
        "profile 3; draft 6.2 step 1; draft 6.4 step 1",
        "Every initiator may LOAD any handle of its domain, and change only its own",
    ),
    Rule("KI8", "profile 2", "Range tests are handle - first < count, unsigned"),
    Rule("KI9", "profile 3; profile 8.9", "At the end of a stream each outstanding request is wholly done or not done"),
    Rule("KI10", "profile 3", "What lingers keeps its Generation, length and seal"),
    # authentication
    Rule("KU1", "profile 4", "A HELLO with a good MAC is served, and its HELLO_ACK proves the same key"),
    Rule("KU2", "profile 4", "A bad MAC, an unknown Key ID and no AUTH at all are refused alike, with ACCESS_DENIED"),
    Rule("KU3", "profile 4", "A HELLO that was recorded does not serve a second time: the nonces are in the MAC"),
    Rule("KU4", "profile 4", "A target without keys answers AUTH with ACCESS_DENIED"),
    Rule("KU5", "profile 2", "AUTH is the last option and has 36 octets, else MALFORMED"),
    Rule(
        "KU6",
        "profile 3",
        "With keys a new session of the same identity replaces a live one, after every check has passed",
    ),
    Rule(
        "KU7",
        "profile 3; profile 1",
        "Nothing is learnt of blocks of another trust domain: HANDLE_OUT_OF_RANGE, Generation 0",
    ),
    Rule("KU8", "profile 3; draft 6.4", "A block that changes domain is cleared before it returns to the ring"),
    Rule(
        "KU9",
        "profile 4",
        "Comparison of MACs takes constant time, keys come from a file that others cannot read",
        unobservable="times that small drown in those of the network, and files are not on the wire",
    ),
    Rule("KU10", "profile 3", "Identity is the pair of trust domain and Initiator ID, never the ID alone"),
    # bindings
    Rule("KY1", "draft 9.1", "HELLO and requests are carried in Send or Send with Solicited Event"),
    Rule(
        "KY2",
        "draft 9.2; profile 7",
        "InfiniBand and RoCEv2: records come by RDMA Write with Immediate, the low 32 bits of the Request ID",
    ),
    Rule(
        "KY5", "draft 6.5", "A record says what a COMPLETION would, and is not visible before the data of its request"
    ),
    Rule(
        "KY6", "profile 7; profile 2", "A MALFORMED or UNSUPPORTED request is answered by COMPLETION even with RECORD"
    ),
    Rule("KY7", "draft 6.5", "Records are written only where RECORD_COMPLETION was granted"),
    Rule(
        "KY8", "draft 9.2; profile 1", "Without MASKED_ATOMICS Head holds the Ticket above, and zero in its low 32 bits"
    ),
    Rule(
        "KY3",
        "draft 9.1",
        "When the network is not trusted, IPsec is used as RFC 5042 says",
        unobservable="what is below TCP does not show in it",
    ),
    Rule(
        "KY4",
        "profile 9",
        "Nothing listens beyond loopback unless told to",
        unobservable="where else a target listens does not show on the address that was given",
    ),
)
