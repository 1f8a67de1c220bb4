"""Evidence in, ranked verdicts out: a pure function over the table of signatures."""

from __future__ import annotations

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import signatures
from fleetdump.diagnosis.codes import CODES
from fleetdump.diagnosis.members import is_held
from fleetdump.diagnosis.plausible import plausible
from fleetdump.diagnosis.registry import SIGNATURES, Step
from fleetdump.diagnosis.suspect import telling_frame
from fleetdump.diagnosis.types import CERTAINTY, PATTERN, STALL, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of, rank_names, size

__all__ = ["diagnose", "signatures"]


def diagnose(evidence: Evidence) -> list[Verdict]:
    """All verdicts that the evidence supports, best first: by decision order, then by confidence; never empty, no
    code twice."""
    view = View(plausible(evidence))
    found = [(step, verdict) for step, check in SIGNATURES if (verdict := check(view))]
    found = [item for item in found if item[0] == Step.ENDED] or found
    if view.foreign:
        found = [item for item in found if item[1].code in OF_ANY_PROCESS]
    if any(verdict.severity == STALL for _, verdict in found):
        found = [item for item in found if not _only_waits(item[1])]
    found = [item for item in found if not _follows(item[1], found)]
    found.sort(key=lambda item: (item[0], CERTAINTY.index(item[1].confidence)))
    causes = any(step < Step.NOTES for step, _ in found)
    best: dict[str, Verdict] = {}
    for _, verdict in found:
        best.setdefault(verdict.code, verdict)
    verdicts = list(best.values())
    if not causes:
        verdicts.insert(0, _unknown(view))
    if view.foreign:
        verdicts[0].title = f"{_no_server(view.foreign)}: {verdicts[0].title}"
        for verdict in verdicts:
            verdict.phase = ""
    for verdict in verdicts:
        verdict.server = evidence.target.server
        verdict.ruled_out = _ruled_out(view)
        verdict.references = list(CODES[verdict.code].reports)
        verdict.evidence = [*verdict.evidence, *_against_health(view), *_blind(view)]
    return verdicts


def _only_waits(verdict: Verdict) -> bool:
    """It says no more than that it is too early to say more."""
    return verdict.code == "BUSY_NOT_HUNG" and verdict.confidence == PATTERN


SYMPTOMS = frozenset({"PARENT_WAITS_READY", "RANK_SPIN", "WARMUP_STALL"})
"""What is said of a standstill for want of its cause."""


def _follows(verdict: Verdict, found: list[tuple[Step, Verdict]]) -> bool:
    """A symptom that names nobody, or the rank that a cause beside it names too: it says nothing more."""
    causes = [one for step, one in found if step < Step.WAITING and one.severity == STALL]
    return verdict.code in SYMPTOMS and any(verdict.rank in (None, one.rank) for one in causes)


OF_ANY_PROCESS = frozenset({
    "STOPPED_PROCESS", "TRACER_ATTACHED", "STDOUT_PIPE_FULL", "PIPE_EOF_IMPOSSIBLE", "LOCK_WAIT", "REMOTE_FS_HANG",
    "DRIVER_D_STATE", "NOFILE", "DISK_FULL", "CPU_STARVED", "DIAG_BLIND",
})  # fmt: skip
"""What can be the matter with a process that is no server; everything else is said of servers alone."""


def _no_server(process: ProcessFacts) -> str:
    command = " ".join((process.cmdline or process.name).split())
    return f"process {process.pid} ({command[:60]}) is no SGLang or vLLM server"


def _unknown(view: View) -> Verdict:
    evidence = view.evidence
    if view.foreign:
        return _unknown_process(view, view.foreign)
    http = ", ".join(f"GET {h.path}: {h.status or h.error}" for h in evidence.http)
    port = f"port {evidence.target.port} is {'open' if evidence.port.open else 'closed'}"
    still = f"nothing moved in two samples {evidence.seconds:.0f} s apart"
    if view.unreadable:
        still = "neither its log nor what its processes read, hold and wait for may be seen by this user"
    elif view.starved:
        still = f"{evidence.log.zero_statistics} lines of statistics in a row say 0 tokens a second with requests there"
    facts = [
        *(view.progress[:1] or [still]),
        f"{port}; {http}" if http else port,
        _where_they_are(view),
    ]
    return Verdict(
        "UNKNOWN",
        f"{_what(view)}the cause is not known: {_standstill(view)}, and no known case fits",
        PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=[_deciding_probe(view)],
    )


def _unknown_process(view: View, process: ProcessFacts) -> Verdict:
    """What a process does of which nothing is known but that."""
    main, stack = process.main, view.stack(process)
    facts = [f"{process.name}: state {process.state}, {process.cpu:.0%} CPU, {process.thread_count} threads"]
    if main and main.wchan:
        facts.append(f"its main thread sleeps in {main.wchan}, woken {main.voluntary:.0f} times a second")
    elif main:
        facts.append(f"its main thread uses {main.cpu:.0%} of a core ({main.user_share:.0%} of that in user code)")
    facts += [f"it is at {stack.frames[0]}, {stack.state}"] if stack and stack.frames else []
    read, written = (size(count) for count in (process.rchar_delta, process.wchar_delta))
    facts.append(f"in {view.evidence.seconds:.0f} s it read {read} and wrote {written}")
    return Verdict(
        "UNKNOWN",
        "only what it does can be told",
        PATTERN,
        evidence=facts,
        next_steps=["name the server's launcher with --pid, or its port; without either the host is searched for it"],
    )


def _where_they_are(view: View) -> str:
    """Ranks by their stacks where those are known, else all processes by state and CPU."""
    if view.stack_groups:
        return "; ".join(f"{rank_names(g.ranks)} at {telling_frame(g.frames)}" for g in view.stack_groups if g.frames)
    return ", ".join(map(_state, view.members)) or "no process could be read"


def _state(process: ProcessFacts) -> str:
    where = f" in {process.main.wchan}" if process.main and process.main.wchan else ""
    return f"{name_of(process)}: state {process.state}{where}, {process.cpu:.0%} CPU"


def _what(view: View) -> str:
    """What is seen from outside, before the cause."""
    stuck = view.port_open and not view.healthy and view.complete and not view.progress
    return f"{'a request' if view.was_ready else 'the warm-up request'} never ends, and " if stuck else ""


def _standstill(view: View) -> str:
    """What is the matter, as far as it can be said without a cause."""
    if not view.members:
        return "no process of the server can be seen"
    if view.unreadable:
        return "nothing of the server can be read but that its processes live"
    quiet, _ = view.silence
    since = f" for {quiet:.0f} s" if 0 < quiet < float("inf") else ""
    return f"nothing moves{since} in phase {view.phase}" if not view.progress else f"it moves in phase {view.phase}"


def _deciding_probe(view: View) -> str:
    """What to look at next: the probe that is missing and would tell the remaining causes apart."""
    evidence = view.evidence
    if not view.members or view.unreadable:
        return "look as root, or from the host outside the container: no process of the server can be read"
    if not evidence.deep:
        return "take the evidence again with --deep: the stacks of all ranks decide"
    if not evidence.stacks:
        return "install py-spy beside the server's interpreter (or allow ptrace) and diagnose again"
    if view.gpus_wait and not evidence.ras.status:
        return "ask NCCL RAS (port 28028) while it hangs: counts tell parted ranks from a kernel without end"
    return "take the evidence a second time a minute later and compare the stacks of all ranks"


def _ruled_out(view: View) -> list[str]:
    """What the same evidence excludes, in words."""
    evidence, found = view.evidence, []
    if view.launcher and view.launcher.writes_log:
        found.append("log elsewhere: fd 1 of the launcher is the watched log")
    if evidence.disks and all(d.free_bytes >= 1 << 20 and d.free_inodes != 0 for d in evidence.disks):
        found.append("disk full: every file system in use has space and inodes")
    if not (evidence.memory.oom_lines or evidence.memory.oom_kills or evidence.cgroup.memory_events.get("oom_kill")):
        found.append("out of memory: no kill in the kernel log or the cgroup")
    if evidence.launcher_alive and len(view.schedulers) >= len(view.local_ranks) and not view.gone:
        found.append("dead process: launcher and every rank live")
    if view.members and not any(is_held(p) or p.tracer_pid for p in view.members):
        found.append("stopped or traced process: none")
    if not view.compilers:
        found.append("compilation: no compiler process uses CPU")
    if not evidence.locks and not any(f.holder == 0 for f in evidence.lock_files):
        found.append("lock: nobody waits in /proc/locks")
    if view.schedulers and not view.progress:
        found.append("slow loading: no rank read or grew")
    return found


def _against_health(view: View) -> list[str]:
    """Why an answer of ``/health`` is not believed."""
    health = view.answer("/health")
    answers = view.port_open and health is not None and health.status == 200
    return [f"/health answers 200, and yet: {fact}" for fact in view.unserved] if answers else []


TELLING_PROBES = ("py-spy", "strace", "access", "process ")


def _blind(view: View) -> list[str]:
    """Probes that failed and would have made the verdict surer."""
    failed = [p for p in view.evidence.probes if not p.ok and p.name.startswith(TELLING_PROBES)]
    return [f"{p.name} failed: {p.detail}" for p in failed]
