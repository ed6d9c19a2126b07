"""What limits, memory and processors mean for a target or an initiator. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

from kbtp import limits
from kbtp.doctor.facts import Limit, MachineFacts, RdmaFacts, RnicFacts, Unknown
from kbtp.doctor.verdicts import POOL_BYTES, Finding, note, ok, problem

OPEN_FILES_MIN = 256
OPEN_FILES_PLENTY = 2 * limits.DEFAULT_MAX_SESSIONS
SPINNING_PROCESSORS_MIN = 2.0


def judge_machine(facts: MachineFacts, rdma: RdmaFacts, rnics: RnicFacts) -> list[Finding]:
    return [
        ok("kernel", f"Linux {facts.kernel} on {facts.architecture}"),
        _memlock(facts, has_devices=bool(rdma.devices) and not isinstance(rdma.devices, Unknown)),
        _open_files(facts.open_files),
        *_memory(facts),
        *_huge_pages(facts),
        *_processors(facts, rnics),
    ]


def mebibytes(octets: int) -> str:
    return f"{octets / (1 << 20):,.0f} MiB" if octets >= 1 << 20 else f"{octets} octets"


def _amount(value: int | None) -> str:
    return "unlimited" if value is None else mebibytes(value)


def _memlock(facts: MachineFacts, *, has_devices: bool) -> Finding:
    about, limit = "locked memory", facts.memlock_bytes
    said = f"{_amount(limit.soft)}, at most {_amount(limit.hard)}"
    if facts.may_lock_any is True:
        return ok(about, f"{said}; without effect, since this process has CAP_IPC_LOCK")
    if limit.soft is None:
        return ok(about, said)
    do = "`ulimit -l unlimited`; memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a systemd service"
    if not has_devices:
        return ok(about, f"{said}; user-space iWARP locks none")
    if limit.soft < POOL_BYTES:
        return problem(about, f"{said}: less than a pool of {mebibytes(POOL_BYTES)}, which an RDMA device locks", do)
    return note(about, f"{said}: a pool and what is registered have to fit on an RDMA device", do)


def _open_files(limit: Limit) -> Finding:
    about, do = (
        "open files",
        "`ulimit -n 65536`; nofile in /etc/security/limits.conf, LimitNOFILE= of a systemd service",
    )
    said = f"{'unlimited' if limit.soft is None else limit.soft}, at most {limit.hard or 'unlimited'}"
    if limit.soft is None or limit.soft >= OPEN_FILES_PLENTY:
        return ok(about, said)
    said += "; a target takes one for each session"
    return problem(about, said, do) if limit.soft < OPEN_FILES_MIN else note(about, said, do)


def _memory(facts: MachineFacts) -> Iterator[Finding]:
    if isinstance(facts.memory_bytes, Unknown) or isinstance(facts.available_memory_bytes, Unknown):
        why = facts.memory_bytes if isinstance(facts.memory_bytes, Unknown) else facts.available_memory_bytes
        yield note("memory", str(why))
    else:
        yield ok("memory", f"{mebibytes(facts.memory_bytes)}, {mebibytes(facts.available_memory_bytes)} available")
    limit = facts.cgroup_memory_bytes
    if isinstance(limit, Unknown):
        yield note("memory of the control group", str(limit))
    elif limit is None:
        yield ok("memory of the control group", "not limited")
    elif limit < POOL_BYTES:
        yield problem(
            "memory of the control group",
            f"{mebibytes(limit)}: less than a pool of {mebibytes(POOL_BYTES)}",
            "give it more, or `kbtp serve --pool-size` less",
        )
    else:
        yield ok("memory of the control group", f"at most {mebibytes(limit)}")


def _huge_pages(facts: MachineFacts) -> Iterator[Finding]:
    total, free, size = facts.huge_pages, facts.free_huge_pages, facts.huge_page_bytes
    if isinstance(total, Unknown) or isinstance(free, Unknown) or isinstance(size, Unknown):
        yield note("huge pages", "unknown: /proc/meminfo does not tell of them")
    else:
        yield ok("huge pages", f"{total} set aside, {free} free, of {mebibytes(size)} each; kbtp needs none")
    what, mode = "transparent huge pages", facts.transparent_huge_pages
    if isinstance(mode, Unknown):
        yield note(what, str(mode))
    elif mode == "never":
        yield note(what, "never: blocks of a target take longer to find; `madvise` is enough for its pool")
    else:
        yield ok(what, f"{mode}: the pool of a target is made of them")


def _processors(facts: MachineFacts, rnics: RnicFacts) -> Iterator[Finding]:
    online, usable, limit = facts.processors, facts.usable_processors, facts.cgroup_processors
    if isinstance(limit, Unknown):
        bound = f"; what the control group allows is {limit}"
    else:
        bound = "" if limit is None else f"; the control group allows the time of {limit:g}"
    yield ok("processors", f"{online} online, {usable} for this process{bound}")
    about = "looking before blocking"
    if isinstance(rnics.native_build, Unknown):
        yield ok(about, "the reference RNIC never does")
    elif rnics.setting_error:
        yield note(about, "unknown: the setting is wrong")
    elif not rnics.native_build["spins"]:
        yield ok(about, "not done on one processor, whatever KBTP_SPIN_US says")
    elif rnics.asked_spin_us == "0":
        yield ok(about, "switched off by KBTP_SPIN_US")
    else:
        share = min(float(usable), limit if isinstance(limit, int | float) else float(usable))
        said = f"{rnics.asked_spin_us or rnics.default_spin_us} us"
        if share < SPINNING_PROCESSORS_MIN:
            yield note(
                about,
                f"{said}, on the time of {share:g} processors: it keeps others from working",
                "KBTP_SPIN_US=0 for every process of kbtp here",
            )
        else:
            yield ok(about, f"{said}: less latency for some processor time")
