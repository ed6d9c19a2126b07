"""Faults in what the target decides: sessions, checks, sequences, identities."""

from mutants.plant import Mutant

_CHECKS = "python/kbtp/target/checks.py"
_SEQUENCES = "python/kbtp/target/sequences.py"
_SESSION = "python/kbtp/target/session.py"
_IDENTITY = "python/kbtp/target/identity.py"
_TURNS = "python/kbtp/target/turns.py"
_TARGET = "python/kbtp/target/target.py"

MUTANTS = (
    Mutant(
        "profile 1 LENGTH_ERROR",
        "data longer than a block is taken",
        _CHECKS,
        "return request.data.length <= block_size_bytes",
        "return request.data.length <= block_size_bytes + 1",
        ("tests/target/test_order_of_checks.py", "tests/target/test_completions.py"),
    ),
    Mutant(
        "profile 1 LENGTH_ERROR",
        "inline data of another length than the descriptor says is taken",
        _CHECKS,
        "if request.flags & RequestFlag.INLINE and request.data.length != len(request.inline_data):",
        "if request.flags & RequestFlag.INLINE and request.data.length < len(request.inline_data):",
        ("tests/target/test_order_of_checks.py", "tests/target/test_completions.py"),
    ),
    Mutant(
        "draft 6.1 step 1",
        "an unsealed block is loaded without being asked to",
        _CHECKS,
        "if not entry.sealed and not request.flags & RequestFlag.ALLOW_UNSEALED:",
        "if not entry.sealed and request.flags & RequestFlag.ALLOW_UNSEALED:",
        ("tests/target/test_order_of_checks.py", "tests/target/test_completions.py"),
    ),
    Mutant(
        "draft 6.1 step 2",
        "a LOAD writes past the buffer its descriptor names",
        _CHECKS,
        "if entry.data_length > request.data.length:  # draft 6.1 step 2",
        "if entry.data_length > request.data.length + 512:",
        ("tests/target/test_order_of_checks.py", "tests/target/test_completions.py"),
    ),
    Mutant(
        "draft 6.2 step 1",
        "a sealed block is stored to",
        _CHECKS,
        "    if isinstance(request, Store) and entry.sealed:",
        "    if isinstance(request, Store) and entry.sealed and not entry.valid:",
        ("tests/target/test_order_of_checks.py", "tests/target/test_completions.py"),
    ),
    Mutant(
        "draft 5.1",
        "the Generation a request expects is not looked at",
        _CHECKS,
        "if request.generation not in (0, entry.generation):",
        "if request.generation > 0xFFFF:",
        ("tests/target/test_order_of_checks.py",),
    ),
    Mutant(
        "profile 1",
        "GENERATION_MISMATCH is found before NOT_BOUND",
        _CHECKS,
        "    elif not entry.valid:  # draft 6.1, 6.2 and 6.4 step 1\n",
        "    elif not entry.valid and request.generation in (0, entry.generation):\n",
        ("tests/target/test_order_of_checks.py",),
    ),
    Mutant(
        "draft 6.5",
        "RECORD is served on a binding without ordered placement",
        _CHECKS,
        "        return False  # draft 6.5\n",
        "        pass\n",
        ("tests/target/test_order_of_checks.py",),
    ),
    Mutant(
        "profile 1 HANDLE_OUT_OF_RANGE",
        "an initiator may free what another one owns",
        _SEQUENCES,
        "allowed = self._identity.handles.contains(request.handle)",
        "allowed = self._store.domain_of(request.handle) is not None",
        ("tests/target/test_order_of_checks.py", "tests/target/test_random_sessions.py"),
    ),
    Mutant(
        "profile 1 HANDLE_OUT_OF_RANGE",
        "a LOAD reaches handles that are assigned to nobody of its domain",
        _SEQUENCES,
        "allowed = self._store.domain_of(request.handle) == self._identity.domain",
        "allowed = self._store.domain_of(request.handle) is not None or request.generation == 0",
        ("tests/target/test_order_of_checks.py", "tests/target"),
    ),
    Mutant(
        "draft 6.5",
        "the completion of a LOAD is sent before its RDMA Write",
        _SEQUENCES,
        "            self._port.write(task, Sge(self._memory.pool, position, pin.data_length))  # draft 6.1 step 2\n",
        "            self._port.complete(task, Status.SUCCESS, entry, data=True)\n"
        "            self._port.write(task, Sge(self._memory.pool, position, pin.data_length))\n"
        "            return True\n",
        ("tests/target/test_completions.py", "tests/target/test_races.py"),
    ),
    Mutant(
        "profile 6.1",
        "a LOAD lets go of its block as soon as the Write is posted",
        _SEQUENCES,
        "        if not pin.data_length:\n            self.written(task)\n",
        "        self._unpin(task)\n        if not pin.data_length:\n            self.written(task)\n",
        ("tests/target/test_races.py",),
    ),
    Mutant(
        "draft 6.3 step 3",
        "an ALLOC_STORE binds the entry before its data has come",
        _SEQUENCES,
        "            self._port.read(task, Sge(self._memory.pool, position, request.data.length))\n",
        "            self._port.read(task, Sge(self._memory.pool, position, request.data.length))\n"
        "            self._commit_alloc_store(task, request)\n",
        ("tests/target/test_races.py", "tests/target/test_end_of_stream.py"),
    ),
    Mutant(
        "profile 6.5",
        "an ALLOC_STORE whose stream ends keeps its block",
        _SEQUENCES,
        "        if block_offset is not None:\n            self._store.abort_alloc_store(",
        "        if block_offset is not None and task.pin:\n            self._store.abort_alloc_store(",
        ("tests/target/test_end_of_stream.py",),
    ),
    Mutant(
        "profile 3 Same handle, same session",
        "a LOAD does not wait for an earlier STORE of its handle",
        _TURNS,
        "            if task.mutates:\n                return None\n",
        "",
        ("tests/target/test_turns.py",),
    ),
    Mutant(
        "profile 3 Same handle, same session",
        "a mutating request does not wait for the LOADs before it",
        _TURNS,
        "return task if position == 0 or not task.mutates else None",
        "return task",
        ("tests/target/test_turns.py",),
    ),
    Mutant(
        "profile 3 Credits",
        "a completion releases its credit before the buffer is there again",
        _SESSION,
        '            self._repost(slot)  # profile 3 "Credits": before the Send that releases the credit\n'
        "            self._act(Send(wr_id=_COMPLETION, inline=message.pack(), invalidate_stag=invalidate_stag))\n",
        "            self._act(Send(wr_id=_COMPLETION, inline=message.pack(), invalidate_stag=invalidate_stag))\n"
        "            self._repost(slot)\n",
        ("tests/target/test_completions.py", "tests/target/test_hello.py"),
    ),
    Mutant(
        "profile 3 RDMA Reads",
        "more Reads are posted than the depth",
        _SESSION,
        "while self._waiting_reads and self._reads_posted < self._read_depth and not self._ending:",
        "while self._waiting_reads and not self._ending:",
        ("tests/target/test_turns.py", "tests/target/test_completions.py", "tests/target/test_races.py"),
    ),
    Mutant(
        "profile 2 COMPLETION",
        "a refused LOAD tells where the block is",
        _SESSION,
        "block_offset=entry.block_offset if data and entry is not None and not size_only else 0,",
        "block_offset=entry.block_offset if entry is not None else 0,",
        ("tests/target/test_completions.py", "tests/target/test_order_of_checks.py"),
    ),
    Mutant(
        "profile 2 INVALIDATE",
        "a completion does not invalidate the STag it was asked to",
        _SESSION,
        "    if isinstance(request, Free | Bind) or not request.flags & RequestFlag.INVALIDATE:\n",
        "    if isinstance(request, Free | Bind) or request.flags & RequestFlag.INVALIDATE:\n",
        ("tests/target/test_completions.py",),
    ),
    Mutant(
        "profile 8.2",
        "any number of requests is answered before HELLO",
        _SESSION,
        "        if self.identity is None and self._refused_before_hello:  # profile 8.2\n",
        "        if self.ended and self._refused_before_hello:\n",
        ("tests/target/test_hello.py",),
    ),
    Mutant(
        "profile 8.8",
        "an RDMA Read may stay unanswered for ever",
        _SESSION,
        "        elif self._read_deadline_s <= now_s:  # profile 8.8\n",
        "        elif self._read_deadline_s < 0:\n",
        ("tests/target/test_races.py", "tests/target/test_turns.py", "tests/target/test_end_of_stream.py"),
    ),
    Mutant(
        "profile 6.1",
        "a reader that does not drain holds a block for ever",
        _TARGET,
        "            elif deadline_s <= now_s:\n",
        "            elif deadline_s < 0:\n",
        ("tests/target/test_races.py",),
    ),
    Mutant(
        "profile 3 Identity",
        "an anonymous initiator's blocks outlive its stream",
        _IDENTITY,
        "        if identity.anonymous or self._config.linger_s == 0:\n",
        "        if self._config.linger_s == 0:\n",
        ("tests/target/test_end_of_stream.py", "tests/target/test_hello.py"),
    ),
    Mutant(
        "profile 3 Identity",
        "what an identity owns is kept beyond its linger time",
        _IDENTITY,
        "for identity in [one for one in self._lingering if _expiry_s(one) <= now_s]:",
        "for identity in [one for one in self._lingering if _expiry_s(one) < 0]:",
        ("tests/target/test_end_of_stream.py",),
    ),
)
