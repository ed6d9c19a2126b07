"""Faults in direct modes and in authentication, at both sides."""

from mutants.plant import Mutant

_TICKETS = "python/kbtp/target/tickets.py"
_DIRECT = "python/kbtp/target/direct.py"
_CHECKS = "python/kbtp/target/checks.py"
_STORE = "python/kbtp/blocks/store.py"
_PARTITION = "python/kbtp/blocks/partition.py"
_LOAD = "python/kbtp/initiator/direct_load.py"
_ALLOC = "python/kbtp/initiator/direct_alloc.py"
_CARRIER = "python/kbtp/initiator/direct_carrier.py"
_LENT = "python/kbtp/initiator/lent_memory.py"
_AUTHENTICATION = "python/kbtp/wire/authentication.py"
_TICKET_TESTS = ("tests/target/test_direct_tickets.py", "tests/target/test_direct_bind.py")
_GRANT_TESTS = ("tests/target/test_direct_grants.py",)
_PARTITION_TESTS = ("tests/blocks/test_partitions.py",)
_LOAD_TESTS = ("tests/initiator/test_direct_load.py",)
_ALLOC_TESTS = ("tests/initiator/test_direct_alloc.py",)
_CONFIG = "python/kbtp/target/config.py"
_SESSION = "python/kbtp/target/session.py"
_HELLO = "python/kbtp/target/hello.py"
_KEY_FILE = "python/kbtp/key_file.py"
_INITIATOR = "python/kbtp/initiator/session.py"
_CARRIER_TESTS = ("tests/initiator/test_direct_carrier.py",)
_AUTHENTICATION_TESTS = ("tests/target/test_authentication.py", "tests/wire/test_authentication.py")

MUTANTS = (
    Mutant(
        "draft 6.6",
        "a BIND names any block of the partition",
        _STORE,
        "if not outstanding or partition.read_slot(ticket) != block_offset:",
        "if not outstanding:",
        (*_PARTITION_TESTS, *_TICKET_TESTS),
    ),
    Mutant(
        "profile 8.10",
        "a BIND of a ticket that was never taken is served",
        _STORE,
        "if not outstanding or partition.read_slot(ticket) != block_offset:",
        "if partition.read_slot(ticket) != block_offset:",
        (*_PARTITION_TESTS, *_TICKET_TESTS),
    ),
    Mutant(
        "draft 6.6",
        "a BIND leaves its slot as it is",
        _STORE,
        "        partition.ring.consume(ticket)\n        return self.table.bind(",
        "        return self.table.bind(",
        _PARTITION_TESTS,
    ),
    Mutant(
        "profile 6.8",
        "tickets that are out do not count against the quota",
        _STORE,
        "unbound_count = partition.unbound_count if partition is not None else 0",
        "unbound_count = 0",
        (*_PARTITION_TESTS, *_TICKET_TESTS),
    ),
    Mutant(
        "profile 6.10",
        "a block of a partition is freed into the shared ring",
        _STORE,
        "        self._ring_of(holder).free(block_offset)\n",
        "        self.ring.free(block_offset)\n",
        _PARTITION_TESTS,
    ),
    Mutant(
        "profile 3 Trust domain",
        "a partition is given on with what was in it",
        _PARTITION,
        "            self._pool.clear(self._pool.offset_of(index))\n",
        "            self._pool.offset_of(index)\n",
        _PARTITION_TESTS,
    ),
    Mutant(
        "profile 6.11",
        "a ticket is reclaimed while RDMA Writes can still reach its block",
        _TICKETS,
        "        self._invalidate_partition()\n",
        "",
        _TICKET_TESTS,
    ),
    Mutant(
        "profile 6.11",
        "tickets can still be taken while others are reclaimed",
        _TICKETS,
        "        self._invalidate_head()\n",
        "",
        _TICKET_TESTS,
    ),
    Mutant(
        "profile 6.11",
        "a ticket is abandoned before the BINDs that were received are served",
        _TICKETS,
        "        if served.difference(received):\n            self._reclaim(served.difference(received), now_s)\n",
        "        if served:\n            self._reclaim(served, now_s)\n",
        _TICKET_TESTS,
    ),
    Mutant(
        "draft 3.4",
        "a BIND of a reclaimed ticket is TICKET_MISMATCH",
        _TICKETS,
        "            self._abandoned.add(ticket)\n",
        "",
        _TICKET_TESTS,
    ),
    Mutant(
        "draft 3.4",
        "a ticket that runs out is never reclaimed",
        _TICKETS,
        "if seen_at_s + self._timeout_s <= now_s}",
        "if seen_at_s + self._timeout_s < 0}",
        _TICKET_TESTS,
    ),
    Mutant(
        "profile 3 End of a stream",
        "unbound tickets stay taken when their stream has ended",
        _TICKETS,
        "        while tickets := self._partition.outstanding_tickets():\n",
        "        while tickets := self._partition.outstanding_tickets()[:0]:\n",
        _TICKET_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "direct modes are granted to those that are not trusted",
        _DIRECT,
        "features = hello.requested_features & config.direct & trusted & binding & DIRECT_MODES",
        "features = hello.requested_features & config.direct & binding & DIRECT_MODES",
        (*_GRANT_TESTS, "tests/target/test_authentication.py"),
    ),
    Mutant(
        "profile 6.4",
        "DIRECT_LOAD is granted where the pool holds blocks of other domains",
        _DIRECT,
        "    if not config.one_trust_domain:",
        "    if config.one_trust_domain is None:",
        _GRANT_TESTS,
    ),
    Mutant(
        "profile 2",
        "the Table STag lets an initiator write",
        _DIRECT,
        "memory.expose(store.table_memory, Access.REMOTE_READ)",
        "memory.expose(store.table_memory, Access.REMOTE_READ | Access.REMOTE_WRITE)",
        _GRANT_TESTS,
    ),
    Mutant(
        "profile 3 End of a stream",
        "the STags of a session outlive its stream",
        _DIRECT,
        "        for region in self._regions.values():\n            region.revoke()\n",
        "",
        (*_GRANT_TESTS, *_TICKET_TESTS),
    ),
    Mutant(
        "profile 8.3",
        "BIND is served without DIRECT_ALLOC",
        _CHECKS,
        "return bool(features & Feature.DIRECT_ALLOC)  # profile 8.3",
        "return True",
        ("tests/target/test_order_of_checks.py",),
    ),
    Mutant(
        "profile 6.3",
        "a direct load compares Flags and Generation alone",
        _LOAD,
        "        if octets == self._first and within:\n",
        "        if self._first is not None and octets[:4] == self._first[:4] and within:\n",
        _LOAD_TESTS,
    ),
    Mutant(
        "profile 6.3",
        "a direct load believes two entries that agree, torn or not",
        _LOAD,
        "if _has_data(outcome) and not self._seen_again:",
        "if _has_data(outcome) and self._seen_again:",
        _LOAD_TESTS,
    ),
    Mutant(
        "profile 6.3",
        "a direct load takes the second entry however late it comes",
        _LOAD,
        "within = now_s - self._first_posted_s <= DIRECT_LOAD_INTERVAL_S",
        "within = True",
        _LOAD_TESTS,
    ),
    Mutant(
        "profile 6.3",
        "a direct load follows an offset that is none of the pool's",
        _LOAD,
        "or not self._terms.holds(block_offset)",
        "",
        _LOAD_TESTS,
    ),
    Mutant(
        "profile 6.3",
        "a direct load reads past the caller's buffer",
        _LOAD,
        "        if length_bytes > self._buffer_bytes:\n",
        "        if length_bytes > self._terms.ack.block_size:\n",
        _LOAD_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "a slot is believed without the confirming read",
        _ALLOC,
        "            if block_offset == before:\n",
        "            if block_offset:\n",
        _ALLOC_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "a slot of another ticket is taken",
        _ALLOC,
        "if sequence == self._ticket and self._terms.holds(block_offset):",
        "if self._terms.holds(block_offset):",
        _ALLOC_TESTS,
    ),
    Mutant(
        "profile 6.11",
        "an initiator goes on with direct allocation after a ticket ran out",
        _ALLOC,
        "return UseRequest(direct_alloc_is_over=True)",
        "return UseRequest()",
        _ALLOC_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "a direct allocation ends with the answer to BIND, while its RDMA Write is still leaving",
        _CARRIER,
        "if result is not None and not flow.leaving and",
        "if result is not None and",
        _CARRIER_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "a direct load goes through memory that was registered through a read-only view",
        _LENT,
        " and not (sink and one.region.view.readonly)",
        "",
        _CARRIER_TESTS,
    ),
    Mutant(
        "draft 3.4",
        "a ticket is taken beyond the quota",
        _CARRIER,
        "if not (self._session.reserve_handle(operation) and self._session.reserve_block()):",
        "if not self._session.reserve_handle(operation):",
        _CARRIER_TESTS,
    ),
    Mutant(
        "profile 4",
        "any MAC will do",
        _AUTHENTICATION,
        "    return key if right else None\n",
        "    return key if right or key else None\n",
        _AUTHENTICATION_TESTS,
    ),
    Mutant(
        "profile 4",
        "the MAC does not cover the nonces: an old HELLO opens a new session",
        _AUTHENTICATION,
        'b"".join((label, nonces.initiator, nonces.target, *messages))',
        'b"".join((label, *messages))',
        _AUTHENTICATION_TESTS,
    ),
    Mutant(
        "profile 4",
        "HELLO_ACK is signed under the label of HELLO: a target's answer can be made of an initiator's words",
        _AUTHENTICATION,
        '_HELLO_ACK_LABEL = b"KBTP1 HELLO_ACK"',
        '_HELLO_ACK_LABEL = b"KBTP1 HELLO"',
        _AUTHENTICATION_TESTS,
    ),
    Mutant(
        "profile 4",
        "an initiator with a key takes a HELLO_ACK that proves nothing",
        _INITIATOR,
        "    if config.key is not None:\n        try:\n            check",
        "    if config.key is not None and not said.octets:\n        try:\n            check",
        ("tests/initiator/test_keys.py",),
    ),
    Mutant(
        "profile 4",
        "a target without keys opens a session for whoever sends AUTH",
        _HELLO,
        "if hello.auth is None else None",
        "",
        ("tests/target/test_authentication.py",),
    ),
    Mutant(
        "profile 4",
        "a keys file that its group can read is taken",
        _KEY_FILE,
        "_OTHERS = stat.S_IRWXG | stat.S_IRWXO",
        "_OTHERS = stat.S_IRWXO",
        ("tests/test_key_file.py",),
    ),
    Mutant(
        "draft 6.4",
        "with keys of two domains, blocks return to the ring uncleared",
        _CONFIG,
        "return self.clear_on_free or not self.one_trust_domain",
        "return self.clear_on_free",
        ("tests/target/test_authentication.py",),
    ),
    Mutant(
        "profile 3 Identity",
        "without keys, anybody who names its ID takes a live session's place",
        _SESSION,
        "if live is not None and trust.key is not None:",
        "if live is not None:",
        ("tests/target/test_replacement.py",),
    ),
    Mutant(
        "profile 3 A HELLO that is overlooked",
        "HELLO comes right behind the Reply on every connection",
        "python/kbtp/initiator/connection.py",
        "if now_s < self._hello_at_s:",
        "if self._hello_at_s < 0:",
        ("tests/initiator/test_connecting.py",),
    ),
)
