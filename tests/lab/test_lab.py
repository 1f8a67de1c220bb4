"""The lab itself: what it makes is real, apart from this machine, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts import RUN, Lab, LabHost, wait_for

_MAKER = """
import time
from hosts import Lab
with Lab() as lab:
    lab.start(1)
    print(lab.bridge, flush=True)
    time.sleep(600)
"""


GONE_SECONDS = 60.0
"""The kernel takes network namespaces down in the background, one after another: many hosts that ended just before
delay the next."""


def devices() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def is_running(pid: int) -> bool:
    """Not so for a zombie: whoever adopts the host's first process may reap it late."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_hosts_see_only_themselves(start_hosts: Callable[[int], list[LabHost]]) -> None:
    one, other = start_hosts(2)
    assert one.run("hostname").strip() == one.name
    assert len(one.run("ps", "-e", "-o", "pid=").splitlines()) < 4
    one.path("/only-here").write_text("x")
    assert not other.path("/only-here").exists()
    assert not Path("/only-here").exists()
    assert "lan0" in one.run("ip", "-brief", "link")


def test_full_disk_is_the_hosts_alone(lab_host: LabHost) -> None:
    lab_host.fill_disk()
    with pytest.raises(OSError, match="No space left"):
        lab_host.path("/more").write_bytes(bytes(1 << 20))
    lab_host.free_disk()
    lab_host.path("/more").write_bytes(bytes(1 << 20))


def test_killed_host_is_gone_with_all_in_it(lab_host: LabHost) -> None:
    sleeper = lab_host.path("/lab/started")
    lab_host.run("sh", "-c", "sleep 600 </dev/null >/dev/null 2>&1 & touch /lab/started")
    assert sleeper.exists()
    pids = lab_host.pids()
    assert len(pids) >= 2
    lab_host.kill()
    wait_for(lambda: not any(is_running(pid) for pid in pids), GONE_SECONDS, "processes outlive their host")
    wait_for(lambda: lab_host.link not in devices(), GONE_SECONDS, "the link outlives its host")


def test_two_labs_at_once_and_nothing_left(lab: Lab) -> None:
    before = devices()
    with Lab() as second:
        assert second.bridge != lab.bridge
        second.start(1)
        directory = second.directory
    wait_for(lambda: devices() <= before, GONE_SECONDS, "something of the second lab is left")
    assert not directory.exists()


def test_killed_lab_leaves_no_process_and_its_bridge_goes_with_the_next(lab: Lab) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKER],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert maker.stdout
    bridge = maker.stdout.readline().strip()
    assert bridge in devices()
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    maker.stdout.close()
    slot = bridge.removeprefix("flb")
    wait_for(
        lambda: not any(name.startswith(f"flv{slot}-") for name in devices()), GONE_SECONDS, "hosts outlive their lab"
    )
    with Lab() as heir:
        assert heir.bridge == bridge
        assert not [path for path in (RUN / slot).iterdir() if path.name.startswith("lab")]
    assert bridge not in devices()
