"""Faults in the native RNIC: its stream, its STag table, its block structures and its sequences."""

from mutants.plant import Mutant

_FRAME = "rust/crates/kbtp-proto/src/stream/frame.rs"
_INTAKE = "rust/crates/kbtp-proto/src/stream/intake.rs"
_STAG = "rust/crates/kbtp-proto/src/stag.rs"
_CHECKS = "rust/crates/kbtp-proto/src/target/checks.rs"
_SEQUENCES = "rust/crates/kbtp-proto/src/target/sequences.rs"
_TURNS = "rust/crates/kbtp-proto/src/target/turns.rs"
_STREAM_TESTS = ("-p", "kbtp-proto", "--test", "stream")
_STAG_TESTS = ("-p", "kbtp-proto", "--test", "stag_table")
_TARGET_TESTS = ("-p", "kbtp-proto", "--test", "target")

MUTANTS = (
    Mutant(
        "docs/protocol.md 8",
        "an FPDU with PAD leaves with what is before it",
        _FRAME,
        "        if stands_alone {\n            out.end_segment();\n        }\n"
        "        out.own.extend_from_slice(&length_field",
        "        if stands_alone && start > usize::MAX / 2 {\n            out.end_segment();\n        }\n"
        "        out.own.extend_from_slice(&length_field",
        _STREAM_TESTS,
    ),
    Mutant(
        "docs/protocol.md 8",
        "a long FPDU has PAD",
        "rust/crates/kbtp-proto/src/ddp.rs",
        "            size -= size % 4;\n",
        "            size -= size % 1;\n",
        _STREAM_TESTS,
    ),
    Mutant(
        "docs/protocol.md 8",
        "what is sent behind an FPDU with PAD may join its TCP segment",
        "rust/crates/kbtp-rnic/src/memory.rs",
        "let end = if ends_segment && parts.next().is_none() {",
        "let end = if ends_segment && parts.next().is_some() {",
        ("-p", "kbtp-rnic", "--lib"),
    ),
    Mutant(
        "RFC 5044 4.4",
        "a long FPDU with a wrong CRC counts",
        _INTAKE,
        "if crc && came.first_chunk() != Some(&crc32c::wire(crc32c::update(unpadded, pad))) {",
        "if crc && came.first_chunk::<4>().is_none() && pad.len() > unpadded as usize {",
        _STREAM_TESTS,
    ),
    Mutant(
        "RFC 5044 4.4",
        "a short FPDU with a wrong CRC counts",
        _INTAKE,
        "            if crc32c::wire(crc) != *came {",
        "            if crc32c::wire(crc) != *came && body.is_empty() {",
        _STREAM_TESTS,
    ),
    Mutant(
        "never silently wrong",
        "what was written to watched memory besides does not spoil its checksum",
        "rust/crates/kbtp-proto/src/stream/watched.rs",
        "            _ => self.ranges.values_mut().for_each(|range| range.crc = None),\n",
        "            _ => {}\n",
        ("-p", "kbtp-proto", "--lib"),
    ),
    Mutant(
        "RFC 5041 7",
        "a segment after a failure still has an effect",
        _INTAKE,
        "        while !data.is_empty() && !to.state.failed {\n            data = match &mut self.long {",
        "        while !data.is_empty() {\n            data = match &mut self.long {",
        _STREAM_TESTS,
    ),
    Mutant(
        "RFC 5040 8.1.1",
        "a region is reached through an STag after its revocation",
        _STAG,
        "let invalidated = |region: &&Region| region.invalidated.load(Ordering::Acquire);",
        "let invalidated = |region: &&Region| region.len == 0;",
        _STAG_TESTS,
    ),
    Mutant(
        "RFC 5042 6.3.6",
        "two STags let peers change the same octets",
        _STAG,
        "        below.is_some_and(|(_, &below_end)| below_end > start)\n"
        "            || above.is_some_and(|(&above_start, _)| above_start < end)\n",
        "        below.is_some_and(|(_, &below_end)| below_end > start)\n"
        "            && above.is_some_and(|(&above_start, _)| above_start < end)\n",
        _STAG_TESTS,
    ),
    Mutant(
        "RFC 5041 7.1",
        "memory granted for reading can be written",
        _STAG,
        "        if !region.access.contains(Access::REMOTE_WRITE) {\n",
        "        if region.access.is_empty() {\n",
        _STAG_TESTS,
    ),
    Mutant(
        "draft 6.1 step 2",
        "a LOAD writes past the buffer its descriptor names",
        _CHECKS,
        "        if entry.data_length > request.data.length {\n",
        "        if entry.data_length > request.data.length.saturating_add(512) {\n",
        _TARGET_TESTS,
    ),
    Mutant(
        "draft 5.1",
        "the Generation a request expects is not looked at",
        _CHECKS,
        "if request.generation != 0 && request.generation != entry.generation {",
        "if request.generation == u16::MAX && request.generation != entry.generation {",
        _TARGET_TESTS,
    ),
    Mutant(
        "profile 1 HANDLE_OUT_OF_RANGE",
        "a LOAD reaches another trust domain's blocks",
        _SEQUENCES,
        "Operation::Load => store.domain_of(handle) == Some(self.grant.domain),",
        "Operation::Load => store.domain_of(handle).is_some(),",
        _TARGET_TESTS,
    ),
    Mutant(
        "profile 6.5",
        "a STORE that was cut short leaves what came of it",
        _SEQUENCES,
        "if task.request.operation == Operation::Store && task.placed {",
        "if task.request.operation == Operation::Store && task.placed && task.pin.is_none() {",
        _TARGET_TESTS,
    ),
    Mutant(
        "profile 6.5",
        "an ALLOC_STORE whose stream ends keeps its block",
        _SEQUENCES,
        "        if let Some(block_offset) = task.block_offset {\n            let (handle, holder)",
        "        if let Some(block_offset) = task.block_offset.filter(|&at| at == u64::MAX) {\n"
        "            let (handle, holder)",
        _TARGET_TESTS,
    ),
    Mutant(
        "profile 3 Same handle, same session",
        "a LOAD does not wait for an earlier STORE of its handle",
        _TURNS,
        "            if turn.mutates {\n                return None;\n            }\n",
        "",
        _TARGET_TESTS,
    ),
    Mutant(
        "profile 3 Same handle, same session",
        "a request overtakes one on its handle that was left to Python",
        _TURNS,
        "punt: punt.or(behind.then_some(PuntReason::BehindPunt)),",
        "punt: punt.or((behind && queue.punted.len() > 1 << 20).then_some(PuntReason::BehindPunt)),",
        _TARGET_TESTS,
    ),
    Mutant(
        "draft 6.6",
        "a sealed block that the holder of its partition can write is sent from where it lies",
        "rust/crates/kbtp-proto/src/blocks/store.rs",
        "entry.sealed() && !self.partitions.set_aside(entry.block_offset)",
        "entry.sealed() || self.partitions.set_aside(entry.block_offset)",
        _TARGET_TESTS,
    ),
)
