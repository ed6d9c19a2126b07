"""The guest's kernel and initramfs, built of Debian packages; nothing is installed and nothing of the packages is run.

Debian's kernels have rdma_rxe but no siw, so siw.ko is compiled here from the kernel's own source. Its compile-time
constants (`siw_main.c`) become module parameters with the same defaults; nothing else of it is changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from interop.guest.packages import (
    GUEST_PACKAGES,
    GUEST_PYTHON,
    RELEASE,
    Kernel,
    install_host_packages,
    install_python_packages,
    mirror,
)
from interop.progress import Progress

HERE = Path(__file__).parent
KERNEL = "vmlinuz"
INITRAMFS = "initramfs"
PYTHON_PACKAGES = "python"
"""What kbtp depends on: a folder that every guest has among its Python's packages."""

SIW = "drivers/infiniband/sw/siw"
SIW_CONSTANTS = ("zcopy_tx", "try_gso", "mpa_crc_required", "mpa_crc_strict", "siw_tcp_nagle", "peer_to_peer")

# What the drivers, the network and the shared folder need, relative to the modules' kernel/.
MODULES = (
    "arch/x86/crypto/crc32c-intel.ko",
    "crypto/crc32c_generic.ko",
    "crypto/crc32_generic.ko",
    "drivers/infiniband/core",
    "drivers/infiniband/sw",
    "drivers/net/net_failover.ko",
    "drivers/net/veth.ko",
    "drivers/net/virtio_net.ko",
    "drivers/virtio",
    "fs/9p",
    "fs/configfs",
    "fs/fscache",
    "fs/netfs",
    "lib",
    "net/9p",
    "net/core/failover.ko",
    "net/ipv4/udp_tunnel.ko",
    "net/ipv6/ip6_udp_tunnel.ko",
)

UNNEEDED = (
    "./dev/*",
    "./lib/udev",
    "./usr/share/doc",
    "./usr/share/locale",
    "./usr/share/man",
    "./usr/share/perl*",
    "./usr/share/zoneinfo",
    "./usr/lib/x86_64-linux-gnu/perl*",
    "./var/cache",
)


class BuildFailed(Exception):
    """A step of the build failed; the text has its last words."""


OUTPUT = HERE.parent.parent / "build" / "interop"


def images_folder() -> Path:
    """KBTP_INTEROP_IMAGES, so that several trees can share what is built; else build/interop/images."""
    return Path(os.environ.get("KBTP_INTEROP_IMAGES") or OUTPUT / "images").absolute()


def build(images: Path, progress: Progress) -> Path:
    """The folder of kernel and initramfs, in `images`; they are built unless they are there, of the same parts."""
    install_host_packages(progress)
    kernel = Kernel()
    images.mkdir(parents=True, exist_ok=True)
    with (images / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = images / _stamp(kernel)
        if not folder.exists():
            work = images / "work"
            for part in ("root", "new"):
                shutil.rmtree(work / part, ignore_errors=True)
                (work / part).mkdir(parents=True)
            _build(work, kernel, progress)
            (work / "new").rename(folder)
    return folder


def _build(work: Path, kernel: Kernel, progress: Progress) -> None:
    """In `work` what has been downloaded is kept, for the next time."""
    root, new = work / "root", work / "new"
    with ThreadPoolExecutor(1) as beside:
        progress.tell(f"downloading the guest's packages, and those of kernel {kernel.release} {kernel.version}")
        user_space = beside.submit(_collect_user_space, work / "user-space.tar")
        debs = kernel.download(work / "deb")
        progress.tell("unpacking the kernel")
        _unpack_kernel(kernel, debs[kernel.image], new / KERNEL, root)
        progress.tell("unpacking siw")
        _unpack_siw(debs[kernel.source], work / "siw")
        progress.tell("downloading what kbtp depends on")
        install_python_packages(new / PYTHON_PACKAGES)
        progress.tell("compiling siw.ko")
        _compile_siw(work / "siw", kernel, debs, root)
        user_space.result()
    progress.tell("making the initramfs")
    _make_initramfs(work / "user-space.tar", kernel, root, new / INITRAMFS)
    shutil.rmtree(root)
    progress.tell(f"the guest is built: {(new / INITRAMFS).stat().st_size >> 20} MiB")


def _stamp(kernel: Kernel) -> str:
    """Of all that the images are made of, but for the user space packages' versions."""
    digest = hashlib.sha256(f"{kernel.version} {GUEST_PACKAGES}".encode())
    for name in ("agent.py", "image.py", "init"):
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _unpack_kernel(kernel: Kernel, package: Path, to: Path, root: Path) -> None:
    modules = f"./lib/modules/{kernel.release}"
    image = f"./boot/vmlinuz-{kernel.release}"
    wanted = [f"{modules}/kernel/{name}" for name in MODULES]
    wanted += [f"{modules}/modules.{name}" for name in ("builtin", "builtin.modinfo", "order")]
    with _contents(package) as contents:
        for member in contents:
            if member.name == image:
                _extract_to(contents, member, to)
            elif any(member.name == path or member.name.startswith(f"{path}/") for path in wanted):
                contents.extract(member, root)


def _unpack_siw(package: Path, folder: Path) -> None:
    """Only siw's folder; reading ends behind it, which is long before the end of the kernel's source."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with _contents(package) as contents:
        packed = next(member for member in contents if member.name.endswith(".tar.xz"))
        with tarfile.open(fileobj=contents.extractfile(packed), mode="r|xz") as source:
            for member in source:
                _, _, name = member.name.partition(f"/{SIW}/")
                if name and member.isfile():
                    _extract_to(source, member, folder / name)
                elif not name and (folder / "siw_main.c").exists():
                    return
    raise BuildFailed(f"{package.name} has no {SIW}")


@contextmanager
def _contents(package: Path) -> Iterator[tarfile.TarFile]:
    unpacking = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    try:
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as contents:
            yield contents
    finally:
        unpacking.kill()
        unpacking.wait()


def _extract_to(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
    file = archive.extractfile(member)
    assert file is not None
    with file, path.open("wb") as out:
        shutil.copyfileobj(file, out)


def _compile_siw(source: Path, kernel: Kernel, debs: dict[str, Path], root: Path) -> None:
    for path in (source / "siw_main.c", source / "siw.h"):
        text = re.sub(rf"\bconst bool ({'|'.join(SIW_CONSTANTS)})\b", r"bool \1", path.read_text())
        path.write_text(text)
    with (source / "siw_main.c").open("a") as main:
        main.writelines(f"module_param({name}, bool, 0644);\n" for name in SIW_CONSTANTS)
    headers = source.parent / "headers"
    shutil.rmtree(headers, ignore_errors=True)
    for name in (kernel.headers, kernel.common_headers, kernel.kbuild):
        _run(["dpkg-deb", "--extract", debs[name], headers])
    # The headers' Makefile names the other package's by the path it is installed at.
    makefile = headers / "usr" / "src" / kernel.headers / "Makefile"
    common = headers / "usr" / "src" / kernel.common_headers / "Makefile"
    makefile.write_text(re.sub(r"(?m)^include .*", f"include {common}", makefile.read_text()))
    _run(["make", "-s", f"-j{os.cpu_count()}", "-C", makefile.parent, f"M={source}", "CONFIG_RDMA_SIW=m", "modules"])
    _run(["strip", "--strip-debug", source / "siw.ko", "-o", root / "siw.ko"])


def _collect_user_space(archive: Path) -> None:
    """All packages of one resolution; their scripts are not run, so it needs no root but where unshare is forbidden."""
    mode = "root" if os.geteuid() == 0 else "unshare"
    include = ",".join(GUEST_PACKAGES)
    source = f"deb {mirror()} {RELEASE} main"
    _run(["mmdebstrap", "-q", f"--mode={mode}", "--variant=extract", f"--include={include}", RELEASE, archive, source])


def _make_initramfs(archive: Path, kernel: Kernel, root: Path, initramfs: Path) -> None:
    _run(["tar", "-x", "-f", archive, "-C", root, *(f"--exclude={pattern}" for pattern in UNNEEDED)])
    packages = f"usr/local/lib/python{GUEST_PYTHON}/dist-packages"
    for name in ("dev", "mnt", "proc", "root", "run", "sys", "tmp", packages):
        (root / name).mkdir(parents=True, exist_ok=True)
    applets = _run([root / "bin" / "busybox", "--list"]).split()
    for name in applets:
        if not any((root / folder / name).exists() for folder in ("bin", "sbin", "usr/bin", "usr/sbin")):
            (root / "bin" / name).symlink_to("busybox")
    (root / "bin" / "sh").unlink(missing_ok=True)
    (root / "bin" / "sh").symlink_to("dash")
    (root / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc" / "group").write_text("root:x:0:\n")
    (root / "etc" / "hosts").write_text("127.0.0.1 localhost guest\n10.0.2.2 host\n")
    (root / "etc" / "nsswitch.conf").write_text("hosts: files\n")
    for name in ("init", "agent.py"):
        shutil.copy(HERE / name, root / name)
    (root / "init").chmod(0o755)
    _run(["/sbin/depmod", "-b", root, kernel.release])
    with initramfs.open("wb") as out:
        packing = ["sh", "-c", "find . -print0 | cpio -0 -o -H newc -R 0:0 --quiet"]
        if subprocess.run(packing, cwd=root, stdout=out, check=False).returncode:
            raise BuildFailed("cpio could not make the initramfs")


def _run(command: Sequence[str | Path]) -> str:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        last = "\n".join(done.stdout.splitlines()[-20:])
        raise BuildFailed(f"{Path(command[0]).name} failed with status {done.returncode}:\n{last}")
    return done.stdout
