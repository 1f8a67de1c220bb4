"""Reads the text files of a recorded sample: /proc, py-spy, strace, nvidia-smi, HTTP answers, as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_host import GpuFacts, GpuProcess
from fleetdump.agent.evidence_process import (
    PipeEnd,
    ProcessFacts,
    Stack,
    SyscallCount,
    ThreadFacts,
    Trace,
)
from fleetdump.agent.procfs import rank_of, role_of

TICKS = 100
POWER_LIMIT = 700.0
"""Of an H200, in watts; the samples did not ask for it."""
FRAMES = 24
_THREAD_LINE = re.compile(
    r"^(?P<tid>\d+) \[(?P<name>.*)\] (?P<state>\w) (?P<user>\d+) (?P<system>\d+) (?P<wchan>\S*) \| (?P<syscall>.*?) \| "
    r"(?P<run>\d+) (?P<wait>\d+) \d+ \| (?P<voluntary>\d+) \d+"
)
_PIPE = re.compile(r"^(?:.* )?(?P<fd>\d+) -> pipe:\[(?P<inode>\d+)\]")
_FLAGS = re.compile(r"flags:\s*0*(?P<flags>[0-7]+);")
_PY_THREAD = re.compile(r'^Thread (?P<tid>\d+|0x[0-9A-F]+)(?: \((?P<state>[^)]*)\))?(?:: "(?P<name>[^"]*)")?')
_PY_FRAME = re.compile(r"^\s{4}(?P<name>\S.*?)(?: \((?P<place>[^()]*)\))?$")
_CALL = re.compile(r"^\s*[\d.]+\s+[\d.]+\s+\d+\s+(?P<count>\d+)(?:\s+\d+)?\s+(?P<name>[a-z_]\w*)$")
_HTTP = re.compile(
    r"^GET (?P<path>\S+) -> (?:(?P<status>\d{3}) in (?P<seconds>[\d.]+)|(?P<error>\w+).*? after (?P<after>[\d.]+))"
)


@dataclass
class Look:
    """One process at one moment: the sections of its part of ``proc_t1.txt``."""

    pid: int
    title: str
    sections: dict[str, list[str]] = field(default_factory=dict)

    def text(self, name: str) -> str:
        return "\n".join(self.sections.get(name, [])).strip()

    def fields(self, name: str) -> dict[str, str]:
        pairs = (line.partition(":") for line in self.sections.get(name, []))
        return {key.strip(): value.strip() for key, _, value in pairs}

    @property
    def stat(self) -> list[str]:
        """Fields of /proc/<pid>/stat from the state on."""
        return self.text("stat").rpartition(")")[2].split()

    @property
    def threads(self) -> dict[int, re.Match[str]]:
        lines = next((v for k, v in self.sections.items() if k.startswith("threads")), [])
        return {int(match["tid"]): match for line in lines if (match := _THREAD_LINE.match(line))}


def looks(text: str) -> tuple[float, dict[int, Look]]:
    """The time of a sample and its processes."""
    at, found, section = 0.0, {}, ""
    current: Look | None = None
    for line in text.splitlines():
        if line.startswith("# time "):
            at = float(line.split()[2])
        elif line.startswith("===== pid "):
            _, _, pid, *title = line.split(maxsplit=3)
            current = found[int(pid)] = Look(int(pid), title[0] if title else "")
        elif line.startswith("--- ") and current:
            section = line[4:]
            current.sections[section] = []
        elif current:
            current.sections[section].append(line)
    return at, found


def process(first: Look, second: Look | None, seconds: float, cmdline: str) -> ProcessFacts:
    """What two looks at a process tell; one that is gone in the second has the first's state and no deltas."""
    second = second if second and second.stat else None
    now = second or first
    status, stat = now.fields("status"), now.stat
    words = cmdline.split() if cmdline else []
    role = "launcher" if first.title == "launcher" else role_of(words or [first.title], status.get("Name", ""))
    rank = rank_of([first.title])
    facts = ProcessFacts(
        first.pid, int(stat[1]), role, status.get("Name", ""), int(stat[19]), stat[0],
        rank=rank.tp if rank else None, label=str(rank) if rank else "", cmdline=cmdline, state_before=first.stat[0],
    )  # fmt: skip
    facts.rss = int(status.get("VmRSS", "0").split()[0]) * 1024
    facts.thread_count = int(status.get("Threads", "1"))
    facts.tracer_pid = int(status.get("TracerPid", "0"))
    facts.exit_signal = int(stat[-1]) & 0x7F if stat[0] in "ZX" else 0
    facts.kernel_stack = [line.split()[1].partition("+")[0] for line in now.text("stack").splitlines() if "]" in line]
    threads = [_thread(tid, first.threads.get(tid), line, seconds) for tid, line in now.threads.items()]
    facts.main = next((t for t in threads if t.tid == first.pid), None)
    facts.cpu = round(sum(t.cpu for t in threads), 3)
    others = sorted((t for t in threads if t.tid != first.pid), key=lambda t: -t.cpu)
    facts.threads = others[:2]
    if second:
        before, io = first.fields("io"), second.fields("io")
        rss_before = int(first.fields("status").get("VmRSS", "0").split()[0]) * 1024
        facts.rss_delta = facts.rss - rss_before
        facts.rchar_delta = _delta(before, io, "rchar")
        facts.read_bytes_delta = _delta(before, io, "read_bytes")
        facts.wchar_delta = _delta(before, io, "wchar")
        facts.majflt_delta = int(stat[9]) - int(first.stat[9])
    return facts


def _delta(before: dict[str, str], now: dict[str, str], name: str) -> int:
    return int(now.get(name, 0)) - int(before.get(name, 0))


def _thread(tid: int, before: re.Match[str] | None, now: re.Match[str], seconds: float) -> ThreadFacts:
    def grown(name: str) -> int:
        return int(now[name]) - int(before[name]) if before else 0

    user, system = grown("user"), grown("system")
    syscall = now["syscall"]
    return ThreadFacts(
        tid, now["name"], now["state"],
        cpu=round((user + system) / TICKS / seconds, 3),
        demand=round(min(1.0, (grown("run") + grown("wait")) / 1e9 / seconds), 3),
        user_share=round(user / (user + system), 3) if user + system else 0.0,
        voluntary=round(grown("voluntary") / seconds, 1),
        wchan="" if now["wchan"] == "0" else now["wchan"],
        syscall="running" if syscall.startswith("running") else syscall,
    )  # fmt: skip


@dataclass
class Static:
    """What ``static_<pid>.txt`` (or ``fd.txt``) says once of a process."""

    cmdline: str = ""
    fd_limit: int = 0
    descriptors: dict[int, str] = field(default_factory=dict)
    pipes: dict[int, tuple[int, str]] = field(default_factory=dict)
    """By descriptor: inode and direction."""


def static(text: str) -> Static:
    """Command line, limit of open files, descriptors and the directions of pipes."""
    found, section, fd = Static(), "", -1
    for line in text.splitlines():
        if line.startswith("--- "):
            section = line[4:]
        elif section == "cmdline" and line.strip():
            found.cmdline = line.strip()
        elif line.startswith("Max open files"):
            found.fd_limit = int(line.split()[3])
        elif section == "fd":
            fd = _descriptor(found, line, fd)
    return found


def _descriptor(found: Static, line: str, fd: int) -> int:
    if " -> " in line and not line.startswith(" "):
        number, _, target = line.rpartition(" -> ")
        fd = int(number.split()[-1])
        found.descriptors[fd] = target
        pipe = _PIPE.match(line)
        if pipe:
            letter = "w" if line.startswith("l-w") else "r"
            found.pipes[fd] = (int(pipe["inode"]), letter)
    elif fd in found.pipes and (flags := _FLAGS.search(line)):
        found.pipes[fd] = (found.pipes[fd][0], "w" if int(flags["flags"], 8) & 1 else "r")
    return fd


def join_pipes(processes: list[ProcessFacts], statics: dict[int, Static], log: str) -> None:
    """Give each process its pipes with the pids at their other ends, and its standard streams."""
    ends = [(pid, inode, mode) for pid, one in statics.items() for inode, mode in one.pipes.values()]
    for facts in processes:
        own = statics.get(facts.pid, Static())
        facts.fd_limit, facts.fd_count = own.fd_limit, len(own.descriptors)
        facts.stdout, facts.stderr = (_neutral(own.descriptors.get(fd, ""), log) for fd in (1, 2))
        facts.writes_log = facts.stdout == log if facts.stdout else None
        if facts.role not in ("launcher", "scheduler", "detokenizer"):
            continue
        for fd, (inode, mode) in own.pipes.items():
            peers = sorted({pid for pid, other, way in ends if other == inode and way != mode} - {facts.pid})
            alone = mode == "r" and not peers and (facts.pid, inode, "w") in ends
            if peers:
                facts.pipes.append(PipeEnd(fd, inode, mode, peers, own_writer=alone))


def _neutral(target: str, log: str) -> str:
    return log if target.endswith(".log") else target


def stack(text: str, facts: ProcessFacts) -> Stack | None:
    """The main thread of py-spy's own text; None when it has none."""
    found = Stack(facts.pid, facts.role, facts.label, "", [])
    thread = ""
    for line in text.splitlines():
        begins = _PY_THREAD.match(line)
        if begins:
            main = begins["name"] == "MainThread" or begins["tid"] == str(facts.pid)
            thread = "main" if main else begins["name"] or ""
            if main:
                found.state = begins["state"] or ""
            elif not (begins["state"] or "").startswith("active"):
                thread = ""
            continue
        frame = _PY_FRAME.match(line)
        if frame and thread:
            place = f" ({frame['place']})" if frame["place"] else ""
            target = found.frames if thread == "main" else found.active.setdefault(thread, [])
            target.append(frame["name"] + place)
    found.frames = found.frames[:FRAMES]
    return found if found.frames else None


def trace(text: str, facts: ProcessFacts, seconds: float = 2.0) -> Trace | None:
    """Calls of the main thread, from ``strace -c`` without ``-f``; None when it did not attach."""
    if "attached" not in text:
        return None
    calls = [
        SyscallCount(facts.name, True, m["name"], int(m["count"]))
        for line in text.splitlines()
        if (m := _CALL.match(line))
    ]
    return Trace(facts.pid, facts.label or facts.role, seconds, [call for call in calls if call.name != "total"])


def gpus(query: str, apps: str, pids: list[int]) -> list[GpuFacts]:
    """The first reading of nvidia-smi's query, with the processes of its second."""
    rows = [line.split(", ") for line in query.splitlines() if re.match(r"^\d+, \d+ %", line)]
    found: dict[int, GpuFacts] = {}
    for row in rows:
        index = int(row[0])
        used = int(row[4].split()[0])
        power = float(row[3].split()[0])
        if index not in found:
            found[index] = GpuFacts(index, int(row[1].split()[0]), used, power, POWER_LIMIT, processes_known=bool(apps))
    buses: list[str] = []
    for line in apps.splitlines():
        row = line.split(", ")
        if len(row) == 4 and row[0].isdigit():
            buses += [row[2]] if row[2] not in buses else []
            gpu = found.get(sorted([*buses, row[2]]).index(row[2]))
            if gpu:
                pid = int(row[0])
                gpu.processes.append(GpuProcess(pid, int(row[1].split()[0]), row[3][:15], ours=pid in pids))
    return list(found.values())


def answers(text: str) -> Iterator[HttpProbe]:
    """What /health and /model_info answered."""
    for match in filter(None, map(_HTTP.match, text.splitlines())):
        if match["path"] in ("/health", "/model_info"):
            error = {"ConnectionRefusedError": "refused"}.get(match["error"] or "", "timeout" if match["error"] else "")
            yield HttpProbe(match["path"], int(match["status"] or 0), float(match["seconds"] or match["after"]), error)


def pressure(text: str) -> float:
    """Percent of ten seconds in which all work waited for memory."""
    match = re.search(r"-- memory\.pressure\n.*\nfull avg10=([\d.]+)", text)
    return float(match[1]) if match else 0.0


def read(path: Path) -> str:
    """A file's text; empty when it is not there."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


TWO_LOADED = "".join(
    f"[2026-05-01 10:00:{10 + n} TP{n}] Init torch distributed begin.\n"
    f"[2026-05-01 10:00:{20 + n} TP{n}] Init torch distributed ends. mem usage=0.9 GB\n"
    f"[2026-05-01 10:00:{30 + n} TP{n}] Load weight begin. avail mem=140.1 GB\n"
    f"[2026-05-01 10:03:{10 + n} TP{n}] Load weight end. type=Qwen3MoeForCausalLM, "
    f"dtype=torch.bfloat16, mem usage=61.0 GB.\n"
    for n in range(2)
)
VLLM_LOADING = """INFO 05-01 10:00:01 [api_server.py:1800] vLLM API server version 0.11.0
INFO 05-01 10:00:20 [core.py:80] Initializing a V1 LLM engine (v0.11.0) with config: model='/models/x'
(VLLM::Worker_TP0 pid=1) INFO 05-01 10:00:31 [gpu_model_runner.py:2300] Starting to load model /models/x...
Loading safetensors checkpoint shards:   0% Completed | 0/30 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  10% Completed | 3/30 [01:10<10:30, 23.3s/it]
"""
SERVING = (
    "INFO:     Uvicorn running on http://127.0.0.1:9123\n[2026-05-01 10:09:00] The server is "
    "fired up and ready to roll!\n"
)
