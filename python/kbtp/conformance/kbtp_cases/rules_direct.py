"""Rules of the direct modes, of rings and tickets as a peer sees them."""

from __future__ import annotations

from kbtp.conformance.rule import Rule

DIRECT_RULES: tuple[Rule, ...] = (
    Rule("KX1", "profile 2", "Table and Pool STag (remote read) are non-zero only with DIRECT_LOAD"),
    Rule(
        "KX2", "draft 3.2; profile 5", "An entry has Flags, Generation, Data Length and Block Offset, in network order"
    ),
    Rule("KX3", "draft 3.1; draft 6.6", "A block lies at its Block Offset under the Pool STag"),
    Rule(
        "KX4",
        "draft 6.3 step 4; draft 6.4 step 2",
        "The entry shows VALID, SEALED and the Generation of every bind and free",
    ),
    Rule("KX5", "draft 6.6; profile 2", "Table and Pool STag are read-only"),
    Rule("KX6", "profile 2; profile 8.11", "The STags of HELLO_ACK are scoped to the one stream: 0/1/03 on another"),
    Rule("KX7", "draft 3.2; profile 2", "The Table STag covers the table, the Pool STag the pool, and nothing else"),
    Rule("KX8", "profile 3", "Direct modes need an initiator ORD of at least 1"),
    Rule(
        "KX9",
        "profile 6.4; draft 6.6",
        "DIRECT_LOAD only where Table and Pool STag cover blocks of the requester's domain alone",
    ),
    Rule("KX10", "draft 6.6", "Direct modes are offered only to initiators that the target trusts"),
    Rule("KX11", "profile 2", "DIRECT_ALLOC: Partition, Ring and Head STag, Ticket Timeout, Ring Order 1 to 28"),
    Rule(
        "KX12",
        "draft 3.3; profile 5",
        "The ring begins with {s, block} for s < F, {s - N, all ones} for the rest; N is at least 2",
    ),
    Rule("KX13", "draft 3.3", "One FetchAdd returns Ticket and Slot Offset and advances both, wrapping"),
    Rule("KX14", "draft 6.6", "BIND verifies the ticket, writes the entry and completes"),
    Rule("KX15", "draft 6.6; draft 3.3", "BIND marks the slot consumed"),
    Rule("KX16", "profile 1", "The checks of a BIND come in their order"),
    Rule("KX17", "profile 6.11", "A refused BIND leaves its ticket outstanding"),
    Rule(
        "KX18",
        "profile 1; profile 8.10",
        "TICKET_MISMATCH: never taken, bound already, or another Block Offset in its slot",
    ),
    Rule("KX19", "profile 6.10", "A session with DIRECT_ALLOC allocates from its own ring alone"),
    Rule(
        "KX20", "draft 6.4 step 3; profile 6.10", "A block returns to the ring it came from, with the next Tail ticket"
    ),
    Rule("KX21", "draft 3.4; profile 8.10", "Tickets taken and not bound count as usage; BIND counts its own once"),
    Rule(
        "KX22", "draft 3.3; profile 6.2", "A free whose slot is not consumed is deferred; it never overwrites the slot"
    ),
    Rule("KX23", "profile 6.2", "FREE completes once its Tail ticket is taken"),
    Rule(
        "KX24",
        "profile 2; profile 8.11",
        "Partition STag is remote write, Ring STag remote read, Head STag remote atomic, no more",
    ),
    Rule("KX25", "draft 3.4; profile 2", "The Partition STag covers the initiator's own partition alone"),
    Rule("KX26", "draft 3.2", "Data Length is the number of valid octets, whatever else lies in the block"),
    Rule(
        "KX31",
        "draft 3.4",
        "A ticket that is not bound within the Ticket Timeout is abandoned: BIND is TICKET_ABANDONED",
    ),
    Rule("KX32", "draft 3.4", "Its block returns to the ring with a new ticket"),
    Rule("KX33", "draft 3.4", "A reclaimed ticket releases one unit of usage"),
    Rule(
        "KX34",
        "draft 3.4; profile 6.11",
        "Before that Head and Partition STag are invalidated: direct allocation is over",
    ),
    Rule("KX35", "profile 6.11", "The timeout counts from the target's first sight of the moved Head"),
    Rule("KX36", "profile 6.9; profile 8.10", "A Head that no FetchAdd of the draft makes ends the stream with 0/2/07"),
    Rule("KX37", "profile 6.9", "It ends nobody else's stream"),
    Rule("KX38", "profile 3", "At the end of a stream unbound tickets are reclaimed"),
    Rule("KX39", "profile 6.10", "On RESUMED, DIRECT_ALLOC is granted only if all bound blocks lie in the partition"),
    Rule(
        "KX40",
        "draft 3.3",
        "Counters are in the target's memory byte order",
        unobservable="an atomic returns a value in network order, whatever the memory's is",
    ),
    Rule(
        "KX41",
        "draft 3.3; profile 6.2",
        "Of two deferred frees that meet on one slot the earlier is written first",
        unobservable="it needs more frees than the ring has blocks while one ticket is out, which no quota allows",
    ),
    Rule(
        "KX42",
        "profile 6.9",
        "The target computes no address from Head",
        unobservable="what it computes does not show; KX36 shows what it does about a Head that lies",
    ),
    Rule(
        "KX43",
        "draft 3.4",
        "An allocation that is seen to exceed the quota is NO_SPACE, and may end the session",
        unobservable="quota and ring are one: what exceeds it is a Head of KX36",
    ),
    Rule(
        "KX44",
        "draft 3.3",
        "A free writes the Block Offset of a slot before its Sequence",
        unobservable="the two writes of one slot are not told apart by a peer; initiators read it twice",
    ),
)
