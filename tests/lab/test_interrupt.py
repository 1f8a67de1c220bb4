"""Ctrl-C at the worst moments: the terminal is back, with what was done, what runs on and how to go on.

``make test`` presses it in a few of them, ``make test-nightly`` in all, and records how long it took in
bench/results/interrupt.json; the table of docs/deploy.md is made of that.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from capturefleet import CAPTURE_CONFIG, make_hosts, write_data
from fleetengine import Fleet, install, write_patch
from hosts import LabHost, wait_for

INTERRUPTED = 130
AGENT = "sys.stdin.buffer"
PATIENT = {"patience": dict.fromkeys(("imports", "init", "weights", "kv_pool"), 600)}
GENEROUS = 30.0
"""Seconds after which the terminal counts as lost: the test says whether it comes back, the record how soon."""
RESULTS = Path(__file__).parents[2] / "bench" / "results" / "interrupt.json"
SYN_SENT = "02"
NOTHING = "nothing was changed"
AGAIN = "the same command again"


@dataclass(frozen=True)
class Case:
    """Ctrl-C when ``command`` has said ``words`` (empty: as soon as its agent runs on the host), with all sshd of the
    host stopped if ``frozen``: nothing answers, nothing is closed. ``told`` is what must be said then."""

    name: str
    command: tuple[str, ...]
    words: str
    told: tuple[str, ...]
    frozen: bool = True
    needs: str = ""
    """server: one that runs. deploy: another one at work. hole: a host where packets vanish."""


DEPLOY = ("deploy", "--patch", "./slow")
CASES = (
    Case("status, a host does not answer", ("status",), "", (NOTHING, "no answer yet from"), needs="hole"),
    Case("deploy, connecting", DEPLOY, "", (NOTHING, AGAIN), needs="hole"),
    Case("deploy, waits for the lock", (*DEPLOY, "--lock-wait", "600"), "waiting for the host's lock", (NOTHING, AGAIN),
         frozen=False, needs="deploy"),
    Case("deploy, first look", DEPLOY, "", (NOTHING, AGAIN)),
    Case("deploy, plan told", DEPLOY, "plan:", ("patching /opt/engine/bin/python with slow@1 was under way", AGAIN)),
    Case("deploy, launches", ("deploy", "--no-patch"), "plan:", ("launching main was under way", AGAIN)),
    Case("deploy, watches", DEPLOY, "main: init after", ("main goes on without this command", AGAIN), frozen=False),
    Case("deploy, watches a host that is gone", DEPLOY, "main: init after", ("main goes on without", AGAIN)),
    Case("check", ("check", "--no-patch"), "", (NOTHING, "no answer yet from")),
    Case("plan", ("plan", "--data", "data.jsonl"), "looking at", (NOTHING,)),
    Case("selfcheck", ("selfcheck",), "self-check of main", ("selfcheck was under way", AGAIN), needs="server"),
    Case("watch", ("watch",), "main ready", (), frozen=False, needs="server"),
    Case("watch of a host that is gone", ("watch",), "main ready", (), needs="server"),
    Case("logs -f", ("logs", "-f"), "", (), frozen=False, needs="server"),
    Case("logs -f of a host that is gone", ("logs", "-f"), "", (), needs="server"),
    Case("stop", ("stop",), "stopping our servers", ("stop was under way", AGAIN, "fleetdump status"), needs="server"),
    Case("restart", ("restart",), "launching it again", ("restart was under way", AGAIN), needs="server"),
    Case("clean --check", ("clean", "--check"), "", (NOTHING,)),
)  # fmt: skip
QUICK = ("status, a host does not answer", "deploy, plan told", "watch of a host that is gone")


@pytest.fixture
def fleet(tmp_path: Path, start_hosts: Callable[[int], list[LabHost]]) -> Fleet:
    """Two hosts with an engine; nothing runs."""
    hosts = start_hosts(2)
    made = Fleet(tmp_path, hosts)
    for host in hosts:
        install(host)
    capture = {"layers": [1, 3], "dir": "/capture/hs"}
    made.write_inventory(server={"tp": 2}, capture=capture, connect_timeout=60, **PATIENT)
    write_patch(tmp_path, "slow", "time.sleep(600)")
    (tmp_path / "data.jsonl").write_text('{"id": "a", "text": "a row"}\n')
    return made


def interrupt(process: subprocess.Popen[str]) -> tuple[float, str]:
    """Seconds until the terminal was back, and what was said from now on."""
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.wait(timeout=GENEROUS)
    seconds = time.monotonic() - pressed
    assert process.stderr is not None
    said = process.stderr.read()
    assert process.returncode == INTERRUPTED, said
    assert "Traceback" not in said
    return seconds, said


def until(stream: IO[str] | None, words: str) -> None:
    assert stream is not None
    said = []
    for line in stream:
        said.append(line)
        if words in line:
            return
    raise AssertionError(f"it never said {words!r}:\n{''.join(said)}")


def play(case: Case, fleet: Fleet) -> float:
    """Seconds that one case took, on the first of the hosts."""
    host = fleet.hosts[0]
    alone = ("--host", host.name)
    if case.needs == "server" and fleet.run("deploy", "--no-patch", *alone).code:
        raise AssertionError("no server")
    if case.needs == "hole":
        _answer(host, False)
    first = fleet.start(*DEPLOY, *alone) if case.needs == "deploy" else None
    if first is not None:
        wait_for(lambda: host.count("sglang::"), 60, "no server")
    process = fleet.start(*case.command, *alone)
    try:
        if case.needs == "hole":
            wait_for(lambda: _is_asked(host), 60, "nobody connects")
        elif case.words:
            until(process.stdout if "watch" in case.command else process.stderr, case.words)
        else:
            wait_for(lambda: host.count(AGENT) or process.poll() is not None, 60, "no agent")
        if case.frozen and case.needs != "hole":
            host.stop_sshd()
            time.sleep(0.5)
        seconds, said = interrupt(process)
    finally:
        process.kill()
        if first is not None:
            first.kill()
            first.communicate()
        host.continue_sshd()
        if case.needs == "hole":
            _answer(host, True)
    assert all(text in said for text in case.told), said
    assert case.told or not said.strip(), said
    wait_for(lambda: not host.count(AGENT), 60, "an agent lives on")
    return seconds


def _answer(host: LabHost, does: bool) -> None:
    """Whether the host answers this machine's packets, or swallows them."""
    first, second, third, _ = host.address.split(".")
    host.run("ip", "route", "del" if does else "add", "blackhole", f"{first}.{second}.{int(third) // 8 * 8}.1")


def _is_asked(host: LabHost) -> bool:
    """Whether a connection to the host has begun that it has not answered."""
    remote = socket.inet_aton(host.address)[::-1].hex().upper()
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[2].startswith(remote) and row[3] == SYN_SENT for row in rows)


@pytest.mark.parametrize("case", [case for case in CASES if case.name in QUICK], ids=lambda case: case.name)
def test_the_terminal_is_back(case: Case, fleet: Fleet) -> None:
    assert play(case, fleet) < GENEROUS


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_terminal_is_back_at_every_moment(case: Case, fleet: Fleet) -> None:
    _record({case.name: round(play(case, fleet), 2)})


def _record(seconds: dict[str, float]) -> None:
    known = json.loads(RESULTS.read_text())["seconds"] if RESULTS.exists() else {}
    record = {
        "at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "load": round(os.getloadavg()[0], 1),
        "seconds": {**known, **seconds},
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


# --------------------------------------------------------------------------- a run
@pytest.fixture
def running(tmp_path: Path, start_hosts: Callable[[int], list[LabHost]]) -> Iterator[Fleet]:
    """A host whose server takes its time."""
    (host,) = make_hosts(start_hosts, 1)
    fleet = Fleet(tmp_path, [host.lab])
    fleet.write_inventory(capture=CAPTURE_CONFIG)
    write_data(tmp_path / "data.jsonl", {f"s{n:03}": 100 for n in range(60)})
    host.set(delay=4.0)
    return fleet


@pytest.mark.nightly
def test_a_run_goes_on_without_who_watches_it(running: Fleet) -> None:
    (host,) = running.hosts
    told = ("the hosts go on with what they have of run r", "fleetdump attach --run r")
    seconds = {}
    extract = running.start("extract", "--data", "data.jsonl", "--run", "r", "--allow-full-disk")
    until(extract.stderr, "samples,")
    for name, process in (("extract", extract), ("attach", running.start("attach", "--run", "r"))):
        if process is not extract:
            until(process.stderr, "samples,")
        host.stop_sshd()
        time.sleep(0.5)
        seconds[f"{name} of a host that is gone"], said = interrupt(process)
        host.continue_sshd()
        assert all(text in said for text in told), said
    _record({name: round(value, 2) for name, value in seconds.items()})
    status = running.run("status", "--json")
    assert "r" in status.out
