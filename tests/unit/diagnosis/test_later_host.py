"""Evidence of a host that has a part of a server's ranks, and lines of kernel and network that a diagnosis needs."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from fleetdump.agent import evidence as collecting
from fleetdump.agent import targets
from fleetdump.agent.context import State
from fleetdump.agent.probes import host
from fleetdump.agent.probes.logtroubles import Troubles


def test_the_phase_is_that_of_the_ranks_of_this_host(tmp_path: Path) -> None:
    """The log of a second host names its own ranks alone: those of the first are not awaited in it."""
    log = tmp_path / "log"
    lines = [f"[2026-11-27 22:14:0{n} TP{n}] Load weight begin. avail mem=77.52 GB" for n in range(2, 4)]
    log.write_text("\n".join(lines) + "\n")
    target = targets.target_of_pid(os.getpid())
    target = dataclasses.replace(target, log=str(log), ranks=4, nodes=2, node_rank=1)
    found = collecting.Collector(target, 0.1, None, State(tmp_path / "state")).stage_one()
    assert found.log.phase == "weights"


@pytest.mark.parametrize(
    "line",
    [
        "nvme nvme2: I/O 311 QID 14 timeout, aborting",
        "blk_update_request: I/O error, dev nvme2n1, sector 881232",
        "LustreError: 11-0: lfs01-OST0004: operation ost_read to node 10.4.0.7@o2ib failed: rc = -107",
        "CIFS: VFS: \\\\files has not responded in 180 seconds. Reconnecting... timeout",
        "libceph: osd3 (1)10.4.0.9:6801 connection timeout",
    ],
)
def test_lines_of_disks_and_file_servers_are_kept(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_kernel_text", lambda: f"[1.0] usb 1-1: new device\n[2.0] {line}\n")
    assert host.kernel_log() == [f"[2.0] {line}"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("NCCL WARN NET/IB : Got completion from peer 10.9.0.3<40021> with error 12, opcode 1, vendor err 129", True),
        ("NCCL WARN NET/IB: Got completion with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_RDMA_WRITE(1)", True),
        ("NCCL WARN NET/IB : mlx5_2:1 Got async event : port error", True),
        ("NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.9.0.4<0>", False),
        ("NCCL INFO NET/Socket : Using [0]eth0:10.9.0.4<0>", False),
    ],
)
def test_a_network_that_failed_is_told_from_one_that_is_chosen(line: str, told: bool) -> None:
    troubles = Troubles()
    troubles.feed(f"gpu-b07:31013:31755 [2] {line}")
    assert ("network_failed" in troubles.first) == told
