"""Debian packages: those that this machine needs to build and run the guest, and those the guest is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

from interop.progress import Progress

RELEASE = "bookworm"
"""The guest's. This machine's has to be the same: siw.ko is compiled here for the guest's kernel."""

HOST_PACKAGES = ("qemu-system-x86", "mmdebstrap", "cpio", "make", "gcc-12", "kmod", "libelf1", "xz-utils")

GUEST_PACKAGES = (
    "busybox-static",
    "dash",
    "iproute2",
    "kmod",
    "libc-bin",
    "libstdc++6",
    "ibverbs-providers",
    "ibverbs-utils",
    "perftest",
    "rdma-core",
    "rdmacm-utils",
    "python3",
    "python3-pyverbs",
)


class PackagesMissing(Exception):
    """Something of Debian's is not here and cannot be installed; the text says what to do."""


def install_host_packages(progress: Progress) -> None:
    """Raises PackagesMissing where it may not, or on another system than Debian's release."""
    release = _release_here()
    if release != RELEASE:
        raise PackagesMissing(f"the guest is built on Debian {RELEASE} only, and this is {release}")
    missing = [name for name in HOST_PACKAGES if not _is_installed(name)]
    if not missing:
        return
    if os.geteuid() != 0:
        raise PackagesMissing(f"packages are missing: apt-get install --no-install-recommends {' '.join(missing)}")
    progress.tell(f"installing {' '.join(missing)}")
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *missing]):
        _checked(["apt-get", *command], environment=quiet)


class Kernel:
    """The kernel that Debian's linux-image-amd64 stands for now, and the packages that belong to it."""

    def __init__(self) -> None:
        if not _output(["apt-cache", "show", "linux-image-amd64"], may_fail=True) and os.geteuid() == 0:
            _checked(["apt-get", "update", "-qq"])
        depends = _field("linux-image-amd64", "Depends")
        image = depends.split()[0]
        self.release = image.removeprefix("linux-image-")
        self.version = _field(image, "Version")
        flavourless, series = self.release.removesuffix("-amd64"), ".".join(self.release.split(".")[:2])
        self.image = image
        self.headers = f"linux-headers-{self.release}"
        self.common_headers = f"linux-headers-{flavourless}-common"
        self.kbuild = f"linux-kbuild-{series}"
        self.source = f"linux-source-{series}"
        """What is within /usr/src too: NAME.tar.xz, with the folder NAME."""

    def download(self, folder: Path) -> dict[str, Path]:
        """All packages, by name; what is in `folder` already is not downloaded again."""
        folder.mkdir(parents=True, exist_ok=True)
        names = (self.image, self.headers, self.common_headers, self.kbuild, self.source)
        version = self.version.replace(":", "%3a")
        missing = [name for name in names if not list(folder.glob(f"{name}_{version}_*.deb"))]
        if missing:
            command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download"]
            _checked([*command, *(f"{name}={self.version}" for name in missing)], folder=folder)
        return {name: next(folder.glob(f"{name}_{version}_*.deb")) for name in names}


GUEST_PYTHON = "3.11"


def install_python_packages(folder: Path) -> None:
    """What kbtp depends on, as the guest's Python needs it."""
    dependencies = [text for text in requires("kbtp") or () if "extra ==" not in text]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(folder)]
    command += ["--python-version", GUEST_PYTHON, "--only-binary", ":all:", "--no-compile"]
    command += ["--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    _checked([*command, *dependencies])


def mirror() -> str:
    """Where this machine's apt gets the release from; the guest's packages come from there too."""
    found = _output(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", f"Codename: {RELEASE}"]
    ).split()
    if not found:
        raise PackagesMissing(f"apt has no list of the packages of {RELEASE}: apt-get update")
    return found[0]


def _release_here() -> str:
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME":
            return value.strip('"')
    return "another system"


def _is_installed(package: str) -> bool:
    status = _output(["dpkg-query", "--show", "--showformat=${db:Status-Status}", package], may_fail=True)
    return status == "installed"


def _field(package: str, field: str) -> str:
    """Of the version that apt would install, which is the first one shown."""
    for line in _output(["apt-cache", "show", package], may_fail=True).splitlines():
        name, _, value = line.partition(": ")
        if name == field:
            return value
    raise PackagesMissing(f"apt knows no {package}: apt-get update")


def _output(command: list[str], *, may_fail: bool = False) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and not may_fail:
        raise PackagesMissing(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout if done.returncode == 0 else ""


def _checked(command: list[str], *, folder: Path | None = None, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise PackagesMissing(f"{' '.join(command)} failed: {done.stderr.strip()}")
