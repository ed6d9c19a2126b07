"""`python -m interop.guest`: build the guest, have it up, run commands in it, take it down."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from interop.guest import image
from interop.guest.machine import Boot, Driver, Guest, GuestFailed
from interop.guest.packages import PackagesMissing
from interop.progress import Progress


def main() -> int:
    arguments = _parsed()
    folder = (arguments.state or image.OUTPUT / "guests" / "shell").absolute()
    try:
        match arguments.verb:
            case "build":
                image.build(arguments.images, Progress())
            case "up":
                return _up(arguments, folder)
            case "run":
                with Guest.attach(folder).start(arguments.script or sys.stdin.read()) as call:
                    return call.relay()
            case "port":
                print(Guest.attach(folder).port(arguments.port))
            case "freeze":
                Guest.attach(folder).freeze()
            case "thaw":
                Guest.attach(folder).thaw()
            case "down":
                Guest.attach(folder).down()
    except (GuestFailed, image.BuildFailed, PackagesMissing) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _up(arguments: argparse.Namespace, folder: Path) -> int:
    progress = Progress()
    built = image.build(arguments.images, progress)
    boot = Boot(
        driver=Driver(arguments.driver),
        forwards=arguments.forward,
        share=arguments.share and arguments.share.absolute(),
        siw={name: int(value) for name, _, value in (one.partition("=") for one in arguments.siw)},
        mtu=arguments.mtu,
        memory_mib=arguments.memory_mib,
        cpus=arguments.cpus,
        kvm=False if arguments.tcg else None,
        recording=arguments.record and arguments.record.absolute(),
    )
    guest = Guest.boot(built, folder, boot, outlive=True)
    progress.tell("the guest is up")
    for port in boot.forwards:
        print(f"its port {port} is 127.0.0.1:{guest.port(port)}")
    return 0


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m interop.guest", description=__doc__)
    parser.add_argument("--images", type=Path, default=image.images_folder(), help="folder where the guest is built")
    parser.add_argument("--state", type=Path, help="folder of the guest that runs; default build/interop/guests/shell")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("build", help="kernel and initramfs, unless they are there")
    up = verbs.add_parser("up", help="build, and boot in the background")
    up.add_argument("--driver", choices=[driver.value for driver in Driver], default=Driver.NONE.value)
    up.add_argument("--share", type=Path, help="folder that is /mnt in the guest")
    up.add_argument("--forward", type=int, action="append", default=[], help="port of the guest; may be repeated")
    up.add_argument("--siw", action="append", default=[], metavar="NAME=VALUE", help="a parameter of siw")
    up.add_argument("--mtu", type=int, default=1500)
    up.add_argument("--memory-mib", type=int, default=1024)
    up.add_argument("--cpus", type=int, default=1)
    up.add_argument("--tcg", action="store_true", help="no KVM even where there is one")
    up.add_argument("--record", type=Path, help="pcap file of the beginning of each packet")
    run = verbs.add_parser("run", help="run a shell script in the guest; its status is this program's")
    run.add_argument("script", nargs="?", help="default: from standard input")
    port = verbs.add_parser("port", help="the port here that leads to a forwarded port of the guest")
    port.add_argument("port", type=int)
    for verb in ("freeze", "thaw", "down"):
        verbs.add_parser(verb)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
