"""Real processes that really hang, on real sshd hosts: the whole way from ``diagnose`` to the verdict.

``hangs/launch.py`` says what each does. Nothing but python3 is on such a host; strace is this machine's, py-spy comes
along with the diagnosis. The server is found in three ways by turns: by pid, by a port that is closed, by its titles.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hosts import Lab, LabHost, wait_for

from fleetdump.agent import procfs
from fleetdump.agent.evidence_types import Target as EvidenceTarget
from fleetdump.agent.probes import net
from fleetdump.agent.specs import Patience
from fleetdump.diagnosis import STALL, Verdict
from fleetdump.fleet import ConnectOptions, connect
from fleetdump.fleet.pyspy import Program, PySpyMissing, py_spy
from fleetdump.tasks.server import Diagnosis, Target, diagnose_host, status
from tests.liverecord import FALSE_ALARM_RUNS, NEVER_HUNG, Tally, loaded, record

HERE = Path(__file__).parent
PROGRAMS = (HERE / "hangs" / "launch.py", HERE / "hangs" / "crowd.c")
PORT = 31000
AT_A_TIME = 6
SECONDS = 2.0
PATIENCE = Patience(*[1.0] * 9)
"""The programs are there to hang: nobody has to wait two minutes for it."""
MEMORY_LIMIT = 150 << 20
FILE_MB = 64
RUNS = 20
_this_thread = threading.local()


@dataclass
class Stage:
    """A host on which a case is played. ``wrap`` is a command around the launcher, ``environment`` is its own;
    ``finish`` undoes what lies outside the host."""

    host: LabHost
    case: str
    wrap: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    finish: list[Callable[[], object]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def spawn(self, *argv: str, wait: str = "") -> subprocess.Popen[bytes]:
        """A process of the host that goes with it; with ``wait`` once that file is there."""
        enter = ["nsenter", "-t", str(self.host.sshd_pid), "-m", "-u", "-n", "-p", "-i", "-r", "-w", "--", *argv]
        process = subprocess.Popen(
            [*self.wrap, *enter],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        if wait:
            wait_for(lambda: self.host.path(wait).exists(), 60.0, f"{self.case}: {wait}")
        return process

    def rank_pid(self, rank: int) -> int:
        """Of a rank, on this machine."""
        title = f"sglang::scheduler_TP{rank}\0".encode()
        found = [pid for pid in self.host.pids() if _cmdline(pid).startswith(title)]
        assert len(found) == 1, f"{self.case}: {found}"
        return found[0]


Prepare = Callable[[Stage], None]


@dataclass(frozen=True)
class Case:
    """``codes``: what may come first. ``program`` is a case of ``hangs/launch.py`` (empty: this one's name).

    ``before`` acts before the launcher starts, ``after`` when all hang. ``config`` changes the host's entry in the
    inventory; ``outside`` diagnoses from this machine, to which the host is a container.
    """

    name: str
    codes: tuple[str, ...]
    rank: int | None = None
    before: Prepare | None = None
    after: Prepare | None = None
    output: str = ">> /srv/server.log 2>&1"
    program: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    outside: bool = False
    bring: bool = False
    """py-spy is not on the host; the diagnosis brings it along."""


def _hold_the_lock(stage: Stage) -> None:
    code = "import fcntl, time; f = open('/run/hang/build.lock', 'w'); fcntl.flock(f, 2); open('/run/hang/held', 'w')"
    code += "; time.sleep(1e6)"
    stage.spawn("/usr/bin/python3", "-S", "-c", code, wait="/run/hang/held")


def _leave_a_lock(stage: Stage) -> None:
    lock = stage.host.path("/root/.cache/torch_extensions/py311_cu128/fused/lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 7200, time.time() - 7200))


def _stop_rank_1(stage: Stage) -> None:
    os.kill(stage.rank_pid(1), 19)


def _trace_rank_1(stage: Stage) -> None:
    pid = stage.rank_pid(1)
    inside = stage.host.run("pgrep", "-f", "sglang::scheduler_TP1").split()[0]
    stage.spawn("strace", "-p", inside, "-o", "/dev/null")
    wait_for(lambda: "TracerPid:\t0\n" not in Path(f"/proc/{pid}/status").read_text(), 60.0)


def _file_on_a_disk(stage: Stage) -> None:
    """On this machine's own disk: what is read from the hosts' memory disks is no disk read."""
    path = Path(f"/var/tmp/fleetdump-{stage.host.name}.safetensors")
    path.write_bytes(os.urandom(FILE_MB << 20))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    stage.finish.append(path.unlink)
    stage.environment["HANG_FILE"] = str(path)


def _memory_limit(stage: Stage) -> None:
    group = cgroup_parent() / f"fleetdump-{stage.host.name}"
    group.mkdir()
    limit = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / limit).write_text(str(MEMORY_LIMIT))
    kind = ["cgroup2"] if limit == "memory.max" else ["cgroup", "-o", "memory"]
    place = "/sys/fs/cgroup" if limit == "memory.max" else "/sys/fs/cgroup/memory"
    stage.host.run("sh", "-c", f"mkdir -p {place} && mount -t {' '.join(kind)} cgroup {place}")
    stage.wrap = ["sh", "-c", f'echo 0 > {group}/cgroup.procs; exec "$@"', "sh"]
    stage.finish.append(lambda: wait_for(lambda: _removed(group), 60.0, str(group)))


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):
        group.rmdir()
    return not group.exists()


def cgroup_parent() -> Path | None:
    """Where a memory cgroup can be made; None where none can."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if os.access(first / "memory.limit_in_bytes", os.W_OK):
        return first
    delegated = second / "cgroup.subtree_control"
    if os.access(delegated, os.W_OK) and "memory" in delegated.read_text().split():
        return second
    return None


def _fill_the_disk(stage: Stage) -> None:
    """Once the agent is there, as it is after a deploy."""
    with connect(stage.host.config(), ConnectOptions(operator="tester@here")) as connection:
        status(connection)
    stage.host.fill_disk()


def _take_the_port(stage: Stage) -> None:
    code = f"import socket,time; s=socket.create_server(('127.0.0.1',{PORT})); open('/run/taken','w'); time.sleep(1e6)"
    stage.spawn("/usr/bin/python3", "-S", "-c", code, wait="/run/taken")


def _silent_address(stage: Stage) -> None:
    """A neighbour whose hardware address is nobody's: what is sent there is lost without a word."""
    network = stage.host.address.rpartition(".")[0]
    stage.host.run(
        "ip", "neigh", "add", f"{network}.250", "lladdr", "02:00:00:00:00:fa", "dev", "lan0", "nud", "permanent"
    )
    stage.environment["HANG_ADDRESS"] = f"{network}.250:443"


def _guest(stage: Stage) -> None:
    """An account that is neither root nor the server's."""
    with stage.host.path("/etc/passwd").open("a") as file:
        file.write("guest:x:4242:4242::/tmp:/bin/sh\n")
    stage.host.path("/lab").chmod(0o755)
    stage.host.path("/lab/authorized_keys").chmod(0o644)


def _hostile(stage: Stage) -> None:
    """All at once: reads that block, a tool that never returns, a huge log full of junk, thousands of processes."""
    host = stage.host
    pid = host.run("pgrep", "-f", "sglang::scheduler_TP0").split()[0]
    for name in ("cmdline", "environ"):
        host.run("mkfifo", f"/run/{name}")
        host.run("mount", "--bind", f"/run/{name}", f"/proc/{pid}/{name}")
    tool = host.path("/usr/local/bin/nvidia-smi")
    tool.write_text("#!/bin/sh\ntrap '' TERM INT\nwhile :; do sleep 1; done\n")
    tool.chmod(0o755)
    log = host.path("/srv/server.log")
    os.truncate(log, 20 << 30)
    with log.open("ab") as file:
        file.write(b"\n\x1b]0;owned\x07\x1b[2J\x1b[31mred\x9b31m\xff\xfe\x00\r\n" + os.urandom(1 << 20) + b"\n")
    stage.spawn(
        "sh", "-c", f"gcc -O1 -o /run/crowd /lab/crowd.c && exec setsid /run/crowd {CROWD}", wait="/run/crowded"
    )


def _check_hostile(diagnosis: Diagnosis) -> None:
    evidence = diagnosis.evidence
    assert evidence["log"]["bytes"] > 20 << 30
    text = json.dumps(evidence, ensure_ascii=False)
    assert not [c for c in text if c < " " or "\x7f" <= c < "\xa0"], "nothing that a terminal obeys"
    failed = {probe["name"]: probe["detail"] for probe in evidence["probes"] if not probe["ok"]}
    assert "nvidia-smi" in failed
    assert any(name.startswith("process ") for name in failed), failed
    assert [p["rank"] for p in evidence["processes"] if p["role"] == "scheduler"] == [0, 1], (
        "the blocked one by elimination"
    )


def _check_left_alone(diagnosis: Diagnosis) -> None:
    """Neither of our tracers went near the process that has one."""
    said = {probe["name"]: probe["detail"] for probe in diagnosis.evidence["probes"]}
    assert "already traced" in said["strace TP1"]
    assert "already traced" in said["py-spy TP1"]
    assert said["strace TP0"] == said["py-spy TP0"] == ""


def _check_brought(diagnosis: Diagnosis) -> None:
    """py-spy came along, and its frames are in the bundle."""
    (frames,) = (stack["frames"] for stack in diagnosis.evidence["stacks"] if stack["label"] == "TP1")
    assert frames[0].startswith("spin (launch.py:")
    assert [group["ranks"] for group in diagnosis.evidence["stack_groups"]] == [["TP0"], ["TP1"]]


def _check_access(diagnosis: Diagnosis) -> None:
    assert any("another user" in probe["detail"] for probe in diagnosis.evidence["probes"] if probe["name"] == "access")
    assert "access" in _told(diagnosis) or "another user" in _told(diagnosis)


def _check_blind(diagnosis: Diagnosis) -> None:
    assert any("ot permitted" in probe["detail"] for probe in diagnosis.evidence["probes"] if not probe["ok"])
    assert "DIAG_BLIND" in [verdict.code for verdict in diagnosis.verdicts]


def _check_no_tools(diagnosis: Diagnosis) -> None:
    failed = {probe["name"]: probe["detail"] for probe in diagnosis.evidence["probes"] if not probe["ok"]}
    assert {"nvidia-smi", "py-spy", "strace TP1"} <= set(failed), failed
    assert "no index here" in failed["py-spy"]
    assert "py-spy" in _told(diagnosis)
    assert "strace" in _told(diagnosis)


def _check_container(diagnosis: Diagnosis) -> None:
    """What belongs to the container was read in the container."""
    evidence = diagnosis.evidence
    assert evidence["target"]["root"]
    assert evidence["target"]["log"] == "/srv/server.log"
    assert evidence["log"]["lines"] > 5
    assert {disk["fstype"] for disk in evidence["disks"] if disk["use"] == "log"} == {"overlay"}
    assert all(p["writes_log"] for p in evidence["processes"] if p["role"] == "launcher")
    assert any("spin " in stack["frames"][0] for stack in evidence["stacks"] if stack["frames"])


def _told(diagnosis: Diagnosis) -> str:
    return "\n".join(diagnosis.verdicts[0].evidence)


CROWD = 3000
CASES = (
    Case("dead-writer", ("PARENT_WAITS_DEAD_RANK",), 0),
    Case("living-writer", ("PARENT_WAITS_READY",), 1),
    Case("own-pipe", ("PIPE_EOF_IMPOSSIBLE",)),
    Case("spin", ("PARENT_WAITS_READY",), 1, bring=True),
    Case("zero-poll", ("PARENT_WAITS_READY",), 1),
    Case("all-futex", ("PARENT_WAITS_READY",)),
    Case("flock", ("LOCK_WAIT",), 1, before=_hold_the_lock),
    Case("stale-lock", ("JIT_STALE_LOCK",), 0, before=_leave_a_lock),
    Case("stopped", ("STOPPED_PROCESS",), 1, after=_stop_rank_1),
    Case("trickle", ("LOADING_SLOW",), before=_file_on_a_disk),
    Case("out-of-memory", ("OOM_KILLED",), 1, before=_memory_limit),
    Case("full-disk", ("DISK_FULL",), after=_fill_the_disk),
    Case("full-pipe", ("STDOUT_PIPE_FULL",), 0, output="2>&1 | sleep 1000000"),
    Case("port-taken", ("PORT_IN_USE",), before=_take_the_port),
    Case("compiling", ("JIT_COMPILING",), 1),
    Case("no-answer", ("HUB_BLOCKED",), 0, before=_silent_address),
    Case("dead-launcher", ("LAUNCHER_DIED",)),
    Case("traced", ("TRACER_ATTACHED",), 1, after=_trace_rank_1),
)
NO_PTRACE = ("setpriv", "--bounding-set", "-sys_ptrace")
BARE = ("env", "PATH=/nowhere")
SPINS = ("PARENT_WAITS_READY",)
HOSTS = (
    Case("hostile", SPINS, 1, after=_hostile, program="spin"),
    Case(
        "another-user",
        SPINS,
        1,
        before=_guest,
        program="spin",
        config={"user": "guest", "state_dir": "/tmp/state"},
    ),
    Case("no-ptrace", SPINS, 1, program="spin", config={"exec_prefix": NO_PTRACE}),
    Case("no-tools", SPINS, 1, program="spin", config={"exec_prefix": BARE}),
    Case("container", SPINS, 1, program="spin", outside=True),
)
"""Hosts on which little may be seen, or everything goes wrong; the hang itself is the same."""
WORKING = ("trickle", "compiling")
"""Cases that are slow and do not hang."""
CHECKS: dict[str, Callable[[Diagnosis], None]] = {
    "traced": _check_left_alone,
    "spin": _check_brought,
    "hostile": _check_hostile,
    "another-user": _check_access,
    "no-ptrace": _check_blind,
    "no-tools": _check_no_tools,
    "container": _check_container,
}


def _cmdline(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# --------------------------------------------------------------------------- playing a case
def play(host: LabHost, case: Case, scratch: Path) -> Diagnosis:
    """Start it, wait until it hangs, and diagnose it over ssh."""
    stage = Stage(host, case.name)
    _this_thread.case = case.name
    host.path("/run/hang").mkdir(parents=True, exist_ok=True)
    for program in PROGRAMS:
        shutil.copy(program, host.path("/lab") / program.name)
    if not case.bring and not case.outside and case.name != "no-tools":
        tool = host.path("/usr/local/bin/py-spy")
        tool.write_bytes(py_spy(os.uname().machine).data)
        tool.chmod(0o755)
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: [act() for act in reversed(stage.finish)])
        if case.before:
            case.before(stage)
        undo.callback(_end, stage)
        _launch(stage, case)
        if case.after:
            case.after(stage)
            time.sleep(0.5)
        return diagnosed(host, case, scratch)


def _launch(stage: Stage, case: Case) -> None:
    words = f"sglang.launch_server --model-path /models/m --tp-size 2 --port {PORT} --hang {case.program or case.name}"
    command = f"/usr/bin/python3 /lab/launch.py {words} {case.output}"
    command = command if "|" in case.output else f"exec {command}"
    variables = [f"{name}={value}" for name, value in stage.environment.items()]
    stage.process = stage.spawn("env", *variables, "setsid", "sh", "-c", command, wait="/run/hang/hung-launcher")
    stage.wrap = []
    time.sleep(1.5)


def _end(stage: Stage) -> None:
    stage.host.kill()
    if stage.process:
        stage.process.wait(60)


def diagnosed(host: LabHost, case: Case, scratch: Path) -> Diagnosis:
    """One diagnosis, with the evidence kept in ``scratch``; how the server is named alternates over the cases."""
    config = host.config(patience=PATIENCE, **case.config)
    if case.outside:
        config = replace(config, connection="local", state_dir=str(scratch / "state"))
    with connect(config, ConnectOptions(operator="tester@here")) as connection:
        (diagnosis,) = diagnose_host(connection, target_of(host, case))
    (scratch / f"{case.name}.json").write_text(json.dumps(diagnosis.evidence, indent=1))
    return diagnosis


def target_of(host: LabHost, case: Case) -> Target:
    """By the port that is closed, by the launcher's pid, or by nothing: the agent looks for the only server."""
    if case.outside:
        (pid,) = (pid for pid in host.pids() if b"\0sglang.launch_server\0" in _cmdline(pid)[:99])
        return Target(pid=pid, seconds=SECONDS)
    way = [one.name for one in (*CASES, *HOSTS)].index(case.name) % 3
    if case.name == "dead-launcher" or way == 2:
        return Target(seconds=SECONDS)
    if way == 0:
        return Target(port=PORT, seconds=SECONDS)
    return Target(pid=int(host.run("pgrep", "-f", "launch.py sglang.launch_server").split()[-1]), seconds=SECONDS)


def judge(case: Case, diagnosis: Diagnosis) -> str:
    """Empty when the verdict is right, else what is wrong."""
    best: Verdict = diagnosis.verdicts[0]
    if best.code in case.codes and best.rank == case.rank:
        return ""
    listed = ", ".join(f"{v.code} rank {v.rank} ({v.confidence})" for v in diagnosis.verdicts)
    return f"{case.name}: expected {' or '.join(case.codes)} rank {case.rank}, got {listed}"


def play_all(lab: Lab, cases: Sequence[Case], scratch: Path) -> dict[str, Diagnosis | BaseException]:
    """Every case, a few at a time, each on a host of its own."""
    hosts = lab.start(len(cases))
    try:
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            pending = [pool.submit(play, host, case, scratch) for host, case in zip(hosts, cases, strict=True)]
        return {case.name: one.exception() or one.result() for case, one in zip(cases, pending, strict=True)}
    finally:
        lab.remove(hosts)


def playable() -> list[Case]:
    """All cases that can be played on this machine."""
    return [case for case in (*CASES, *HOSTS) if case.name != "out-of-memory" or cgroup_parent()]


@pytest.fixture(scope="module")
def played(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Diagnosis | BaseException]:
    """All cases played once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetdump.tasks.evidence.py_spy", _py_spy_of_this_case)
        return play_all(lab, playable(), tmp_path_factory.mktemp("evidence"))


def _py_spy_of_this_case(machine: str) -> Program:
    """One case has a controller that cannot get py-spy either."""
    if _this_thread.case == "no-tools":
        raise PySpyMissing("no index here")
    return py_spy(machine)


@pytest.mark.parametrize("case", [*CASES, *HOSTS], ids=lambda case: case.name)
def test_live_hang(case: Case, played: dict[str, Diagnosis | BaseException]) -> None:
    if case.name not in played:
        pytest.skip("no memory cgroup can be made here")
    diagnosis = played[case.name]
    if isinstance(diagnosis, BaseException):
        raise diagnosis
    wrong = judge(case, diagnosis)
    assert not wrong, wrong
    CHECKS.get(case.name, lambda _: None)(diagnosis)


def test_a_container_s_loopback_is_asked_from_outside(lab_host: LabHost) -> None:
    """The status endpoints of a server in another network namespace, without a process of ours going in for good."""
    stage = Stage(lab_host, "loopback")
    code = f"import http.server as h; h.HTTPServer(('127.0.0.1', {PORT}), h.SimpleHTTPRequestHandler).serve_forever()"
    stage.spawn("/usr/bin/python3", "-S", "-c", code)
    wait_for(lambda: PORT in procfs.listeners(lab_host.sshd_pid), 60.0)
    target = EvidenceTarget(lab_host.sshd_pid, port=PORT)
    with ThreadPoolExecutor(1) as pool:  # its thread stays in the namespace, and ends
        answer = pool.submit(net.status_endpoint, target, lab_host.sshd_pid, ("/absent", "/"), 30.0).result()
    assert (answer.path, answer.status) == ("/", 200)
    assert net.get(target, "/", 30.0).status == 0, "this thread is where it was"


@pytest.mark.nightly
def test_twenty_of_twenty_on_a_loaded_machine(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every case again and again, each time from its start; none that works is ever called hung."""
    tallies = {case.name: Tally() for case in playable()}
    never_hung = Tally()
    with loaded(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fleetdump.tasks.evidence.py_spy", _py_spy_of_this_case)
        for _ in range(RUNS):
            found = play_all(lab, playable(), tmp_path_factory.mktemp("evidence"))
            for case in playable():
                diagnosis = found[case.name]
                failed = isinstance(diagnosis, BaseException)
                tallies[case.name].count(f"{diagnosis!r}"[:300] if failed else judge(case, diagnosis))
                if case.name in WORKING and not failed:
                    never_hung.count(stalls(diagnosis))
            record("lab hosts, loaded machine", {**tallies, NEVER_HUNG: never_hung})
        working = [case for case in playable() if case.name in WORKING]
        while never_hung.runs < FALSE_ALARM_RUNS:
            for diagnosis in play_all(lab, working, tmp_path_factory.mktemp("evidence")).values():
                assert isinstance(diagnosis, Diagnosis), diagnosis
                never_hung.count(stalls(diagnosis))
            record("lab hosts, loaded machine", {**tallies, NEVER_HUNG: never_hung})
    assert not [name for name, tally in tallies.items() if tally.wrong], tallies
    assert not never_hung.wrong


def stalls(diagnosis: Diagnosis) -> str:
    """Empty when nothing is called hung."""
    return ", ".join(f"{v.code}: {v.title}" for v in diagnosis.verdicts if v.severity == STALL)
