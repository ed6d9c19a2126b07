"""RDMA devices of made-up machines: what is read, and what it is taken for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from kbtp.doctor import read_rdma as reading
from kbtp.doctor.facts import Device, DeviceLimits, GidScope, Library, Port, RdmaFacts, Unknown
from kbtp.doctor.read_rdma import ask_libibverbs, read_rdma
from kbtp.doctor.tree import Tree
from kbtp.doctor.verdicts import Finding, Level, judge_rdma, roce_mtu_bytes, transport_of
from tests.doctor import made_up

NOT_ASKED = Unknown("not asked")
LIMITS = DeviceLimits(1 << 40, 500, 500, 1000, 4096, 16, 16, "of this device")
TOLD = {"mlx5_0": {"limits": asdict(LIMITS), "mtus_bytes": {"1": 1024}}}
THERE = (Library("libibverbs.so.1", True), Library("librdmacm.so.1", True))


def facts_of(root: Path, files: dict[str, str | bytes], told: dict[str, Any] | Unknown = NOT_ASKED) -> RdmaFacts:
    return replace(read_rdma(Tree(made_up.write(root, files)), (), lambda: told), libraries=THERE)


def only_device(facts: RdmaFacts) -> Device:
    assert not isinstance(facts.devices, Unknown)
    (found,) = facts.devices
    return found


def ports_of(device: Device) -> tuple[Port, ...]:
    assert not isinstance(device.ports, Unknown)
    return device.ports


def by_about(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.about: finding for finding in findings}


def problems(findings: list[Finding]) -> list[str]:
    return [finding.about for finding in findings if finding.level is Level.PROBLEM]


def test_a_machine_without_any_of_it_has_no_problem(tmp_path: Path) -> None:
    facts = read_rdma(Tree(tmp_path), ("libnone-of-that-name.so.1",))
    assert facts.devices == ()
    assert facts.may_open_cm == Unknown("there is no /dev/infiniband/rdma_cm")
    (library,) = facts.libraries
    assert not library.loads
    assert "libnone-of-that-name.so.1" in library.why_not
    findings = judge_rdma(facts)
    assert [finding.level for finding in findings] == [Level.NOTE, Level.NOTE]


def test_a_library_that_is_there_loads() -> None:
    assert read_rdma(Tree(), ("libc.so.6",)).libraries == (Library("libc.so.6", True),)


def test_a_roce_device(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS))
    device = only_device(facts)
    assert (device.name, device.node_type, device.firmware) == ("mlx5_0", "CA", "22.35.1012")
    assert (device.model, device.board, device.uverbs) == ("MT4125", "MT_0000000359", "/dev/infiniband/uverbs0")
    assert device.may_open is True
    assert [(netdev.name, netdev.mtu_bytes, netdev.state) for netdev in device.netdevs] == [("enp1s0f0", 1500, "up")]
    (port,) = ports_of(device)
    assert (port.state, port.physical_state, port.link_layer) == ("ACTIVE", "LinkUp", "Ethernet")
    assert transport_of(device, port) == "RoCE"
    assert not isinstance(port.gids, Unknown)
    assert [(gid.index, gid.gid, gid.scope, gid.type) for gid in port.gids] == [
        (0, "fe80::a00:27ff:fe12:3456", GidScope.LINK_LOCAL, "IB/RoCE v1"),
        (1, "fe80::a00:27ff:fe12:3456", GidScope.LINK_LOCAL, "RoCE v2"),
        (2, "10.0.0.7", GidScope.IPV4, "IB/RoCE v1"),
        (3, "10.0.0.7", GidScope.IPV4, "RoCE v2"),
        (5, "2001:db8::7", GidScope.IPV6, "RoCE v2"),
    ]
    findings = by_about(judge_rdma(facts))
    assert problems(list(findings.values())) == []
    assert findings["mlx5_0 port 1"].says == "active, RoCE, 100 Gb/sec (4X EDR)"
    assert "3: 10.0.0.7 RoCE v2 (IPv4)" in findings["mlx5_0 port 1 GIDs"].says
    assert "0: fe80::a00:27ff:fe12:3456 IB/RoCE v1 (link-local)" in findings["mlx5_0 port 1 GIDs"].says
    assert findings["mlx5_0 MTU"].level is Level.NOTE
    assert "1500 octets of enp1s0f0 leave an RDMA MTU of 1024" in findings["mlx5_0 MTU"].says
    assert "ip link set enp1s0f0 mtu 4200" in findings["mlx5_0 MTU"].do


@pytest.mark.parametrize(
    ("mtu", "level", "says"),
    [
        (9000, Level.OK, "carry an RDMA MTU of 4096"),
        (1500, Level.NOTE, "RDMA MTU of 1024"),
        (300, Level.PROBLEM, "too few"),
    ],
)
def test_the_mtu_of_the_netdev(tmp_path: Path, mtu: int, level: Level, says: str) -> None:
    found = by_about(judge_rdma(facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS, mtu=mtu))))["mlx5_0 MTU"]
    assert found.level is level
    assert says in found.says


@pytest.mark.parametrize(("netdev", "rdma"), [(351, None), (352, 256), (1500, 1024), (4191, 2048), (4192, 4096)])
def test_which_rdma_mtu_fits(netdev: int, rdma: int | None) -> None:
    assert roce_mtu_bytes(netdev) == rdma


@pytest.mark.parametrize(
    "rows",
    [(), made_up.MLX5_GIDS[:2], made_up.MLX5_GIDS[:3]],
    ids=["none", "link-local alone", "an address by RoCE v1 alone"],
)
def test_no_gid_that_others_reach_is_a_problem(tmp_path: Path, rows: tuple[tuple[int, str, str], ...]) -> None:
    findings = judge_rdma(facts_of(tmp_path, made_up.mlx5(*rows)))
    assert problems(findings) == ["mlx5_0 port 1 GIDs"]
    assert "dev enp1s0f0" in by_about(findings)["mlx5_0 port 1 GIDs"].do


def test_many_gids_are_cut_for_people(tmp_path: Path) -> None:
    rows = [(index, f"2001:db8::{index + 1:x}", made_up.ROCE_V2) for index in range(12)]
    found = by_about(judge_rdma(facts_of(tmp_path, made_up.mlx5(*rows))))["mlx5_0 port 1 GIDs"]
    assert found.says.endswith("; and 4 more")


def test_what_libibverbs_tells(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS, mtu=9000), TOLD)
    device = only_device(facts)
    assert device.limits == LIMITS
    assert [port.active_mtu_bytes for port in ports_of(device)] == [1024]
    findings = by_about(judge_rdma(facts))
    assert "1000 queue pairs; RDMA Reads at once: 16 of ours, 16 of the peer's" in findings["mlx5_0 limits"].says
    assert findings["mlx5_0 limits"].level is Level.OK
    assert findings["mlx5_0 MTU"].level is Level.NOTE
    assert findings["mlx5_0 MTU"].says.endswith("leave room for 4096, and 1024 is active")


def test_regions_that_hold_no_pool_are_worth_a_note(tmp_path: Path) -> None:
    told = {"mlx5_0": {"limits": {**asdict(LIMITS), "region_bytes": 1 << 20}, "mtus_bytes": {}}}
    facts = facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS), told)
    assert by_about(judge_rdma(facts))["mlx5_0 limits"].level is Level.NOTE


@pytest.mark.parametrize("told", [{}, {"mlx5_0": {"mtus_bytes": {}}}, Unknown("it failed")])
def test_what_libibverbs_does_not_tell_is_unknown(tmp_path: Path, told: dict[str, Any] | Unknown) -> None:
    facts = facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS), told)
    device = only_device(facts)
    assert isinstance(device.limits, Unknown)
    assert isinstance(ports_of(device)[0].active_mtu_bytes, Unknown)
    assert problems(judge_rdma(facts)) == []


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os; os.kill(os.getpid(), 11)", "asking libibverbs failed: status -11"),
        ("raise OSError('libibverbs.so.1: no such file')", "no such file"),
        ("import time, select; select.select([], [], [])", "says nothing within 0.5 s"),
        ("print('{}')", None),
    ],
    ids=["crashes", "not there", "hangs", "no device"],
)
def test_libibverbs_is_asked_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str | None
) -> None:
    made = tmp_path / "program.py"
    made.write_text(program)
    monkeypatch.setattr(reading, "_PROGRAM", made)
    monkeypatch.setattr(reading, "_ASK_TIMEOUT_S", 10.0 if said is None or "0.5" not in said else 0.5)
    told = ask_libibverbs()
    if said is None:
        assert told == {}
    else:
        assert isinstance(told, Unknown)
        assert said in told.why


def test_the_program_itself_answers_or_says_why_not() -> None:
    """Whether or not libibverbs is here; there is no RDMA device below a test, or it is told of."""
    told = ask_libibverbs()
    if isinstance(told, Unknown):
        assert "libibverbs" in told.why
    else:
        assert all(set(of) <= {"limits", "mtus_bytes"} for of in told.values())


def test_siw(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made_up.SIW)
    device = only_device(facts)
    assert device.firmware == Unknown("/sys/class/infiniband/siw0/fw_ver is empty")
    assert [netdev.name for netdev in device.netdevs] == ["eth0"]
    (port,) = ports_of(device)
    assert not isinstance(port.gids, Unknown)
    assert [(gid.gid, gid.scope) for gid in port.gids] == [("52:54:00:12:34:56", GidScope.HARDWARE)]
    findings = by_about(judge_rdma(facts))
    assert problems(list(findings.values())) == []
    assert findings["siw0 port 1"].says.startswith("active, iWARP")
    assert "IP addresses of its netdev" in findings["siw0 port 1 GIDs"].says
    assert "siw0 MTU" not in findings  # iWARP cuts to what TCP carries


def test_rxe_names_its_netdev(tmp_path: Path) -> None:
    files = {
        **made_up.device(
            "rxe0",
            {
                "node_type": "1: CA\n",
                "parent": "lo\n",
                **made_up.port(1, "4: ACTIVE", "5: LinkUp", "Ethernet", "2.5 Gb/sec (1X SDR)"),
                **made_up.gids(1, (0, made_up.IPV4_GID, made_up.ROCE_V2)),
            },
        ),
        "sys/class/net/lo/mtu": "65536\n",
        **made_up.verbs_node(1, "rxe0"),
        **made_up.CM,
    }
    facts = facts_of(tmp_path, files)
    assert [(netdev.name, netdev.mtu_bytes) for netdev in only_device(facts).netdevs] == [("lo", 65536)]
    assert problems(judge_rdma(facts)) == []


def test_an_infiniband_device_that_is_down(tmp_path: Path) -> None:
    findings = judge_rdma(facts_of(tmp_path, made_up.IB_DOWN))
    assert problems(findings) == ["mlx4_0 port 1", "mlx4_0 port 2"]
    found = by_about(findings)
    assert found["mlx4_0 port 1"].says == "DOWN, link Polling, InfiniBand"
    assert "cable" in found["mlx4_0 port 1"].do
    assert "subnet manager" in found["mlx4_0 port 2"].do


def test_a_second_port_that_is_down_is_worth_a_note(tmp_path: Path) -> None:
    down = made_up.device("mlx5_0", made_up.port(2, "1: DOWN", "3: Disabled", "Ethernet", "40 Gb/sec (4X QDR)"))
    findings = judge_rdma(facts_of(tmp_path, {**made_up.mlx5(*made_up.MLX5_GIDS), **down}))
    assert problems(findings) == []
    second = by_about(findings)["mlx5_0 port 2"]
    assert second.level is Level.NOTE
    assert "ip link set enp1s0f0 up" in second.do


def test_garbage_is_unknown_and_says_why(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made_up.GARBAGE)
    assert not isinstance(facts.devices, Unknown)
    empty, odd = facts.devices
    assert empty.ports == Unknown("/sys/class/infiniband/a_file/ports: Not a directory")
    assert odd.node_type == "\ufffd\ufffd??[31m"
    assert isinstance(odd.firmware, str)
    assert len(odd.firmware) < 300
    assert odd.model == Unknown("/sys/class/infiniband/odd/hca_type: Is a directory")
    assert odd.netdevs == ()
    assert isinstance(odd.uverbs, Unknown)
    first, named = ports_of(odd)
    assert first.gids == ()
    assert isinstance(first.state, Unknown)
    assert isinstance(named.gids, Unknown)
    for finding in judge_rdma(facts):
        assert finding.says.isprintable()


def test_what_may_not_be_opened_is_a_problem(tmp_path: Path) -> None:
    facts = facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS))
    closed = replace(facts, devices=(replace(only_device(facts), may_open=False),), may_open_cm=False)
    findings = judge_rdma(closed)
    assert problems(findings) == ["mlx5_0", "rdma_cm"]
    assert all("this user may not open" in finding.says for finding in findings if finding.level is Level.PROBLEM)


def test_devices_without_the_modules_and_libraries_for_programs(tmp_path: Path) -> None:
    files = {name: text for name, text in made_up.SIW.items() if "verbs" not in name and "dev/" not in name}
    facts = replace(facts_of(tmp_path, files), libraries=(Library("libibverbs.so.1", False, "no such file"),))
    findings = judge_rdma(facts)
    assert problems(findings) == ["siw0", "rdma_cm", "libibverbs.so.1"]
    assert "ib_uverbs" in findings[1].says
    assert "rdma-core" in findings[-1].do


def test_a_class_that_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    findings = judge_rdma(facts_of(tmp_path, {"sys/class/infiniband": "a file"}))
    assert problems(findings) == ["devices"]


def test_files_that_fail_to_be_read_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that goes away between the listing and the reading gives ENODEV or EINVAL."""
    facts_of(tmp_path, made_up.mlx5(*made_up.MLX5_GIDS))

    def gone(*_arguments: object) -> object:
        raise OSError(19, os.strerror(19))

    monkeypatch.setattr("builtins.open", gone)
    device = only_device(read_rdma(Tree(tmp_path), (), lambda: NOT_ASKED))
    assert device.firmware == Unknown("/sys/class/infiniband/mlx5_0/fw_ver: No such device")
    (port,) = ports_of(device)
    assert port.gids == ()


@pytest.mark.parametrize("read", [Tree.text, Tree.whole, Tree.number, Tree.names, Tree.may_open])
def test_what_is_not_there_is_unknown(tmp_path: Path, read: Callable[[Tree, str], object]) -> None:
    assert read(Tree(tmp_path), "/sys/nothing") == Unknown("there is no /sys/nothing")
    assert isinstance(read(Tree(tmp_path), "/sys/\0"), Unknown)


def test_what_is_no_number_is_unknown(tmp_path: Path) -> None:
    tree = Tree(made_up.write(tmp_path, {"mtu": "many\n"}))
    assert tree.number("/mtu") == Unknown("/mtu holds 'many', which is no number")
