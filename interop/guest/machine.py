"""One QEMU that runs the guest: boot, commands, forwarded ports, stopping and ending it."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import TracebackType

from interop.guest import agent
from interop.guest.calls import Call, Finished
from interop.guest.image import INITRAMFS, KERNEL, PYTHON_PACKAGES

BOOT_S = 120.0
COMMAND_S = 60.0
GUEST_ADDRESS = "10.0.2.15"
HOST_ADDRESS = "10.0.2.2"
"""This machine as the guest sees it."""

_KVM_CREATE_VM = 0xAE01
_READ_BYTES = 65536
_RECORDED_BYTES = 256


class Driver(Enum):
    """The RDMA driver of a boot: the kernel crashes now and then with both."""

    SIW = "siw"
    RXE = "rxe"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Boot:
    """`forwards` are ports of the guest; `share` is /mnt there; `siw` sets siw's parameters, as `peer_to_peer=1`;
    `recording` gets the beginning of each packet, as pcap. `kvm` None: where this machine has it."""

    driver: Driver = Driver.NONE
    forwards: Sequence[int] = ()
    share: Path | None = None
    siw: Mapping[str, int] = field(default_factory=dict)
    mtu: int = 1500
    memory_mib: int = 1024
    cpus: int = 1
    kvm: bool | None = None
    recording: Path | None = None


class GuestFailed(Exception):
    """The guest did not come up or does not answer; the text has its last words."""


def has_kvm() -> bool:
    """/dev/kvm can be there and not work: without the processor's extensions, or in a container."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if not flags & {"vmx", "svm"}:
        return False
    try:
        device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(device, _KVM_CREATE_VM, 0))
    except OSError:
        return False
    finally:
        os.close(device)
    return True


class Guest:
    """A guest that runs. As a context manager it ends with the block, and with this process whatever becomes of that.

    `folder` has its console (`console.log`), what QEMU says (`qemu.log`) and, for `attach`, how to reach it.
    """

    def __init__(self, folder: Path, pid: int, ports: Mapping[int, int], recording: Path | None = None) -> None:
        self.recording = recording
        self._folder = folder
        self._pid = pid
        self._ports = ports

    @classmethod
    def boot(cls, image: Path, folder: Path, boot: Boot, *, outlive: bool = False) -> Guest:
        """Boot what `build` made; returns when commands can be run.

        With `outlive` the guest stays when this process ends, until `down`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as console:
            name = f"kbtp-interop-{secrets.token_hex(8)}"
            console.bind(f"\0{name}")
            console.listen(1)
            ports = {port: _free_port() for port in (agent.PORT, *boot.forwards)}
            command = _command(image, folder, boot, ports, console=name)
            if not outlive:
                command = ["setpriv", "--pdeathsig", "KILL", *command]
            with (folder / "qemu.log").open("wb") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            guest = cls(folder, process.pid, ports, boot.recording)
            try:
                guest._await_agent(console)
            except BaseException:
                guest.down()
                raise
        (folder / "guest.json").write_text(json.dumps({"pid": process.pid, "ports": ports}))
        return guest

    @classmethod
    def attach(cls, folder: Path) -> Guest:
        """The guest that `boot` with `outlive` left in `folder`. Raises GuestFailed if there is none."""
        try:
            state = json.loads((folder / "guest.json").read_text())
            command = Path(f"/proc/{state['pid']}/cmdline").read_bytes()
        except OSError:
            raise GuestFailed("no guest is up") from None
        if str(folder).encode() not in command:
            raise GuestFailed("no guest is up")
        return cls(folder, state["pid"], {int(port): here for port, here in state["ports"].items()})

    def __enter__(self) -> Guest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def port(self, guest_port: int) -> int:
        """The port of 127.0.0.1 that leads to `guest_port`."""
        return self._ports[guest_port]

    def start(self, script: str) -> Call:
        """Run `script` by the guest's /bin/sh; it is killed when the call is closed."""
        return Call(("127.0.0.1", self.port(agent.PORT)), script)

    def run(self, script: str, *, timeout_s: float = COMMAND_S) -> Finished:
        """Run `script` to its end. What it leaves in the background must not keep its output: `>FILE 2>&1 &`."""
        with self.start(script) as call:
            return call.finish(timeout_s)

    def freeze(self) -> None:
        """Stop the whole guest, as if its machine were gone."""
        os.kill(self._pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)

    def down(self) -> None:
        """End it at once: there is nothing in it to save. Idempotent."""
        (self._folder / "guest.json").unlink(missing_ok=True)
        try:
            process = os.pidfd_open(self._pid)
        except ProcessLookupError:
            return
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [])
            os.waitpid(self._pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass
        finally:
            os.close(process)

    def console(self) -> str:
        """What the guest's kernel has said so far."""
        return (self._folder / "console.log").read_text(errors="replace")

    def _await_agent(self, listener: socket.socket) -> None:
        """QEMU connects the guest's console to `listener`."""
        deadline_s = time.monotonic() + BOOT_S
        process = os.pidfd_open(self._pid)
        console: socket.socket | None = None
        said = b""
        try:
            while agent.READY.encode() not in said:
                source: socket.socket = console or listener
                ready, _, _ = select.select([source.fileno(), process], [], [], max(0.0, deadline_s - time.monotonic()))
                if source.fileno() not in ready:
                    raise GuestFailed(self._last_words("ended" if ready else f"is not up after {BOOT_S:.0f} s"))
                if console is None:
                    console, _ = listener.accept()
                    continue
                octets = console.recv(_READ_BYTES)
                if not octets:
                    raise GuestFailed(self._last_words("ended"))
                said += octets
        finally:
            os.close(process)
            if console is not None:
                console.close()

    def _last_words(self, what: str) -> str:
        logs = [self._folder / "qemu.log", self._folder / "console.log"]
        lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines()]
        return "\n".join([f"the guest {what}; its last words:", *lines[-20:]])


def _command(image: Path, folder: Path, boot: Boot, ports: Mapping[int, int], *, console: str) -> list[str]:
    kvm = has_kvm() if boot.kvm is None else boot.kvm
    accelerator = ["-accel", "kvm", "-cpu", "host"] if kvm else ["-accel", "tcg,thread=multi", "-cpu", "max"]
    forwards = "".join(f",hostfwd=tcp:127.0.0.1:{here}-:{there}" for there, here in ports.items())
    line = "console=ttyS0 quiet panic=-1 mitigations=off nokaslr random.trust_cpu=on tsc=reliable"
    line += f" kbtp.driver={boot.driver.value} kbtp.mtu={boot.mtu}"
    if boot.siw:
        line += " kbtp.siw=" + ",".join(f"{name}={value}" for name, value in boot.siw.items())
    shares = {"python": image / PYTHON_PACKAGES}
    if boot.share is not None:
        line += " kbtp.share=1"
        shares["share"] = boot.share
    mounts = [
        part
        for tag, path in shares.items()
        for part in ("-virtfs", f"local,path={path},mount_tag={tag},security_model=none,multidevs=remap")
    ]
    recording = ["-object", f"filter-dump,id=dump,netdev=net,file={boot.recording},maxlen={_RECORDED_BYTES}"]
    return [
        "qemu-system-x86_64",
        *accelerator,
        *("-machine", "q35,hpet=off", "-smp", str(boot.cpus), "-m", str(boot.memory_mib)),
        *("-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"),
        *("-kernel", str(image / KERNEL), "-initrd", str(image / INITRAMFS), "-append", line),
        *("-chardev", f"socket,id=console,path={console},abstract=on,logfile={folder / 'console.log'}"),
        *("-serial", "chardev:console", "-device", "virtio-rng-pci"),
        *("-netdev", f"user,id=net,ipv6=off{forwards}"),
        *("-device", f"virtio-net-pci,netdev=net,host_mtu={boot.mtu}"),
        *mounts,
        *(recording if boot.recording is not None else []),
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
