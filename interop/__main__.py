"""`python -m interop`: the guest is built and booted, every check is made: a line each; the status says if all hold."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path

from interop import beside
from interop.checks import Check, Suite
from interop.guest.image import OUTPUT, BuildFailed, build, images_folder
from interop.guest.machine import Guest, GuestFailed, has_kvm
from interop.guest.packages import PackagesMissing
from interop.kbtp_in_guest import prepared
from interop.progress import Progress
from interop.suites import SUITES
from kbtp.testing.bench.process import end_in_order_on_sigterm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop", description=__doc__)
    parser.add_argument("-k", dest="words", action="append", default=[], help="only checks whose name holds this")
    parser.add_argument("--list", action="store_true", help="only name the checks")
    parser.add_argument("--tcg", action="store_true", help="no KVM even where there is one")
    parser.add_argument("--suite", choices=[suite.name for suite in SUITES], help="only checks that share this guest")
    parser.add_argument("--images", type=Path, default=images_folder(), help="folder where the guest is built")
    arguments = parser.parse_args()
    suites = [
        dataclasses.replace(suite, checks=chosen)
        for suite in SUITES
        if arguments.suite in (None, suite.name)
        and (chosen := [one for one in suite.checks if all(word in one.name for word in arguments.words)])
    ]
    bare = arguments.suite is None and all(word in beside.NAME for word in arguments.words)
    if arguments.list:
        print("\n".join([beside.NAME] * bare))
        for suite in suites:
            for check in suite.checks:
                print(check.name)
        return 0
    progress = Progress()
    failed: list[str] = []
    try:
        with beside.bare_install() if bare else nullcontext() as installing:
            if suites:
                image = build(arguments.images, progress)
            # Each guest keeps one processor busy: those of further suites run in processes of their own.
            with ExitStack() as stack:
                others = {one.name: stack.enter_context(beside.suite(one.name, sys.argv[1:])) for one in suites[1:]}
                for suite in suites[:1]:
                    failed += _run(suite, image, progress, tcg=arguments.tcg)
                failed += [f"something of {name}, see above" for name, other in others.items() if other.wait()]
            if installing is not None:
                failed += _told(beside.NAME, installing.why_not(), progress, "beside the others")
    except (BuildFailed, GuestFailed, PackagesMissing) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    count = sum(len(suite.checks) for suite in suites) + bare
    verdict = "not all" if failed else "all"
    progress.tell(f"{verdict} of {count} checks hold" + "".join(f"\n  does not: {name}" for name in failed))
    return 1 if failed or not count else 0


def _run(suite: Suite, image: Path, progress: Progress, *, tcg: bool) -> list[str]:
    """The names of the checks that fail."""
    folder = OUTPUT / "guests" / suite.name
    boot = dataclasses.replace(suite.boot, kvm=has_kvm() and not tcg, recording=folder / "packets.pcap")
    progress.tell(f"booting the guest for {suite.name}, {'with KVM' if boot.kvm else 'without KVM'}")
    failed = []
    with Guest.boot(image, folder, boot) as guest, prepared(guest):
        for check in suite.checks:
            began_s = time.monotonic()
            why = _why_not(check, guest)
            failed += _told(check.name, why, progress, f"{time.monotonic() - began_s:.1f} s")
    return failed


def _told(name: str, why_not: str | None, progress: Progress, took: str) -> list[str]:
    """The name if it fails."""
    if why_not is None:
        progress.tell(f"holds: {name} ({took})")
        return []
    progress.tell(f"FAILS: {name} ({took}): {why_not}")
    return [name]


def _why_not(check: Check, guest: Guest) -> str | None:
    try:
        check.run(guest)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    end_in_order_on_sigterm()
    sys.exit(main())
