"""Turns the folder of a recorded sample (text files of /proc, py-spy, strace, nvidia-smi …) into an evidence bundle.

Usage, from the folder ``tests``: python -m cases.convert SAMPLES_FOLDER NAME ...

``SAMPLES`` says which folder a case comes from, and for how long the server had been silent when a person would ask:
the samples were taken seconds after the fault, and a fault of these kinds stays as it is.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from cases import sampletext as text
from fleetdump.agent.evidence_engine import LogFacts, PortFacts
from fleetdump.agent.evidence_process import ProcessFacts, ThreadFacts
from fleetdump.agent.evidence_types import Evidence, Target
from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.probes.ras import only, parse_ras
from fleetdump.agent.probes.stacks import group
from fleetdump.agent.protocol import to_json

LOG = "/srv/server.log"
RECORDED = Path(__file__).parent / "recorded"
_STAMP = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
_SIZE = re.compile(r"--tp(?:-size)? (\d+)")
_PORT = re.compile(r"--port (\d+)")


@dataclass(frozen=True)
class Sample:
    """``folder`` below the samples; ``silent``: seconds of silence at the time of the question. ``before``: the log is
    cut at the first line with this text, since it was copied at the end of a sample."""

    folder: str
    silent: float = 60.0
    before: str = ""


SAMPLES = {
    "h200_loading": Sample("h200-tp2/S1_healthy/loading", 1.0),
    "h200_idle": Sample("h200-tp2/S1_healthy/idle"),
    "h200_load": Sample("h200-tp2/S1_healthy/load", 1.0),
    "h200_idle_graphs": Sample("h200-tp2/S1c_healthy_default/idle"),
    "h200_spin_warmup": Sample("h200-tp2/S2_spin_warmup/hung"),
    "h200_extra_allreduce": Sample("h200-tp2/S3_extra_allreduce/hung"),
    "h200_sigkill": Sample("h200-tp2/S4_sigkill/after25"),
    "h200_sigkill_after5": Sample("h200-tp2/S4_sigkill/after5", 0.2),
    "h200_sigstop": Sample("h200-tp2/S5_sigstop/stopped"),
    "h200_resumed": Sample("h200-tp2/S5_sigstop/resumed", 1.0),
    "h200_gpu_spin": Sample("h200-tp2/S6_gpu_spin/hung"),
    "h200_raise": Sample("h200-tp2/S7a_raise_rank1/after3", 2.0),
    "h200_import_error": Sample("h200-tp2/S7b_import_error/state", 2.0, before="Scheduler hit an exception"),
    "h200_import_error_raised": Sample("h200-tp2/S7b_import_error/state", 2.0),
    "h200_bad_port": Sample("h200-tp2/S0_bad_port/server.log.final.txt"),
    "h200_jit_sources_missing": Sample("h200/crash-jit-missing-sources.log"),
    "h200_patch_raised": Sample("h200/crash-patch-none-guard.log"),
    "h200_spin_capture": Sample("h200-tp2/S8_spin_graph_capture/hung"),
    "cpu_barrier_tp2": Sample("hang-tp2-barrier0", 40.0),
    "cpu_forward_spin_tp1": Sample("hang-tp1-spin", 40.0),
}


def main(samples: Path, names: list[str]) -> None:
    for name in names or SAMPLES:
        evidence = convert(samples, SAMPLES[name])
        (RECORDED / f"{name}.json").write_text(json.dumps(to_json(evidence), indent=1) + "\n")


def convert(samples: Path, sample: Sample) -> Evidence:
    """The evidence that a sample's text files hold; which kind of folder it is shows in its files."""
    folder = samples / sample.folder
    if folder.is_file():
        return log_alone(folder, sample)
    if (folder / "meta.json").exists():
        return two_looks(folder, sample)
    return one_look(folder, sample)


def log_alone(path: Path, sample: Sample) -> Evidence:
    """A server of which nothing is left but its log."""
    found = text.read(path)
    ranks, port = re.search(r"tp_size=(\d+)", found), re.search(r"[, (]port=(\d+)", found)
    evidence = Evidence(Target(100, 500, 100, "main"), 0.0, 5.0, "gpu-a", launcher_alive=False)
    evidence.target.ranks, evidence.target.port = int(ranks[1]) if ranks else 1, int(port[1]) if port else 0
    evidence.target.log, evidence.port = LOG, PortFacts(evidence.target.port)
    evidence.log = _log(path, evidence.target.ranks, sample)
    return evidence


# ------------------------------------------------------------------ two looks at one server, one file a probe
def two_looks(folder: Path, sample: Sample) -> Evidence:
    meta = json.loads((folder / "meta.json").read_text())
    first_at, first = text.looks(text.read(folder / "proc_t1.txt"))
    second_at, second = text.looks(text.read(folder / "proc_t2.txt"))
    seconds = round(second_at - first_at, 3)
    statics = {pid: text.static(text.read(folder / f"static_{pid}.txt")) for pid in first}
    evidence = Evidence(Target(meta["sid"], session=meta["sid"], port=meta["port"]), meta["t_start"], seconds, "gpu-a")
    evidence.processes = [
        text.process(look, second.get(pid), seconds, statics[pid].cmdline) for pid, look in first.items() if look.stat
    ]
    for facts in evidence.processes:
        if facts.pid not in second and facts.pid not in meta.get("pids_at_end", first):
            facts.state = "X"
    text.join_pipes(evidence.processes, statics, LOG)
    evidence.http = list(text.answers(text.read(folder / "http.txt")))
    evidence.gpus = text.gpus(
        text.read(folder / "smi_query.txt"), text.read(folder / "smi_apps.txt"), [p.pid for p in evidence.processes]
    )
    ras = text.read(folder / "ras.txt")
    evidence.ras = only(parse_ras(ras), [p.pid for p in evidence.processes])
    evidence.memory.pressure_full = text.pressure(text.read(folder / "misc.txt"))
    for facts in evidence.processes:
        _look_inside(evidence, facts, folder)
    return _finish(evidence, folder / "server.log.txt", sample)


def _look_inside(evidence: Evidence, facts: ProcessFacts, folder: Path) -> None:
    """Stacks and system calls of launcher and ranks."""
    if facts.role not in ("launcher", "scheduler"):
        return
    stack = text.stack(text.read(folder / f"pyspy_{facts.pid}.txt"), facts)
    if stack:
        native = text.stack(text.read(folder / f"pyspy_native_{facts.pid}.txt"), facts)
        stack.native = native.frames if native else []
        evidence.stacks.append(stack)
    trace = text.trace(text.read(folder / f"strace_c_main_{facts.pid}.txt"), facts)
    if trace:
        evidence.traces.append(trace)


# ------------------------------------------------------------------ one look, one folder a process
def one_look(folder: Path, sample: Sample) -> Evidence:
    """One look says nothing of rates: a main thread that runs (state R) counts as spinning when strace saw no call."""
    pid = int(text.read(folder / "pid"))
    evidence = Evidence(Target(pid, session=pid), 0.0, 5.0, "gpu-a")
    statics = {}
    for part in sorted(folder.glob("[0-9]*-*")):
        look = text.Look(int(part.name.partition("-")[0]), "")
        for name in ("stat", "status", "stack"):
            look.sections[name] = text.read(part / f"{name}.txt").splitlines()
        look.title = "launcher" if look.pid == pid else _title(part.name)
        facts = text.process(look, None, 5.0, look.title)
        statics[facts.pid] = text.static("--- fd\n" + text.read(part / "fd.txt"))
        facts.main = _main_thread(part, facts)
        evidence.processes.append(facts)
        if facts.role in ("launcher", "scheduler"):
            _look_inside_folder(evidence, facts, part)
    text.join_pipes(evidence.processes, statics, LOG)
    return _finish(evidence, folder / "server.log", sample)


def _title(folder: str) -> str:
    """ "696-sglang_scheduler_TP0_" was sglang::scheduler_TP0."""
    words = folder.partition("-")[2].strip("_")
    return words.replace("sglang_", "sglang::", 1) if words.startswith("sglang_") else words


def _main_thread(part: Path, facts: ProcessFacts) -> ThreadFacts:
    wchan, syscall = text.read(part / "wchan.txt").strip(), text.read(part / "syscall.txt").strip()
    main = ThreadFacts(facts.pid, facts.name, facts.state, wchan="" if wchan == "0" else wchan, syscall=syscall)
    if facts.state == "R":
        main.cpu = main.demand = main.user_share = facts.cpu = 1.0
    return main


def _look_inside_folder(evidence: Evidence, facts: ProcessFacts, part: Path) -> None:
    stack = text.stack(text.read(part / "pyspy.txt"), facts)
    if stack:
        native = text.stack(text.read(part / "pyspy-native.txt"), facts)
        stack.native = native.frames if native else []
        evidence.stacks.append(stack)


# ------------------------------------------------------------------ what all have
def _finish(evidence: Evidence, log: Path, sample: Sample) -> Evidence:
    target = evidence.target
    launcher = next(p for p in evidence.processes if p.pid == target.pid)
    command = text.read(next(iter(log.parent.parent.glob("command.txt")), log.parent / "none")) + text.read(
        log.parent / "ps.txt"
    )
    ranks = [p.rank for p in evidence.processes if p.rank is not None]
    size = _SIZE.search(command)
    target.ranks = int(size[1]) if size else max([*ranks, 1 if "tp2" in str(log) else 0]) + 1
    port = _PORT.search(command)
    target.port = target.port or (int(port[1]) if port else 0)
    target.server, target.log = "main", LOG
    evidence.launcher_alive = launcher.state not in "ZX"
    evidence.log = _log(log, target.ranks, sample)
    evidence.uptime = _uptime(log, evidence.taken_at) + sample.silent
    evidence.stack_groups = group(evidence.stacks)
    evidence.deep = bool(evidence.stacks or evidence.traces)
    opened = any(answer.error != "refused" for answer in evidence.http) or "http open" in evidence.log.server_marks
    alive = evidence.launcher_alive
    evidence.port = PortFacts(
        target.port, opened and alive, target.pid if opened and alive else 0, "", opened and alive
    )
    return evidence


def _log(path: Path, ranks: int, sample: Sample) -> LogFacts:
    """The agent's own reading of the log, under the neutral path."""
    with tempfile.NamedTemporaryFile(suffix=".log") as copy:
        whole = path.read_bytes()
        end = whole.find(sample.before.encode()) if sample.before else -1
        copy.write(whole[: whole.rfind(b"\n", 0, end) + 1] if end >= 0 else whole)
        copy.flush()
        reader = LogReader(copy.name, ranks)
        reader.first()
        facts = reader.second()
    facts.path, facts.quiet_seconds, facts.news_seconds = LOG, sample.silent, 0.0
    return facts


def _uptime(log: Path, now: float) -> float:
    """From the log's first stamp on; its clock is UTC."""
    stamps = _STAMP.findall(text.read(log))
    if not stamps:
        return 0.0
    began, last = (datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S") for stamp in (stamps[0], stamps[-1]))
    ended = datetime.fromtimestamp(now, timezone.utc).replace(tzinfo=None) if now else last
    return round((ended - began).total_seconds(), 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
