"""Evidence in, ranked verdicts out: a pure function over the table of signatures."""

from __future__ import annotations

from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import signatures
from fleetdump.diagnosis.codes import CODES
from fleetdump.diagnosis.registry import SIGNATURES, Step
from fleetdump.diagnosis.suspect import telling_frame
from fleetdump.diagnosis.types import CERTAINTY, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of, rank_names

__all__ = ["diagnose", "signatures"]


def diagnose(evidence: Evidence) -> list[Verdict]:
    """All verdicts that the evidence supports, best first: by decision order, then by confidence; never empty, no
    code twice."""
    view = View(evidence)
    found = [(step, verdict) for step, check in SIGNATURES if (verdict := check(view))]
    found = [item for item in found if item[0] == Step.ENDED] or found
    found.sort(key=lambda item: (item[0], CERTAINTY.index(item[1].confidence)))
    causes = any(step < Step.NOTES for step, _ in found)
    best: dict[str, Verdict] = {}
    for _, verdict in found:
        best.setdefault(verdict.code, verdict)
    verdicts = list(best.values())
    if not causes:
        verdicts.insert(0, _unknown(view))
    for verdict in verdicts:
        verdict.server = evidence.target.server
        verdict.ruled_out = _ruled_out(view)
        verdict.references = list(CODES[verdict.code].reports)
        verdict.evidence = [*verdict.evidence, *_blind(view)]
    return verdicts


def _unknown(view: View) -> Verdict:
    evidence = view.evidence
    http = ", ".join(f"GET {h.path}: {h.status or h.error}" for h in evidence.http)
    port = f"port {evidence.target.port} is {'open' if evidence.port.open else 'closed'}"
    facts = [
        *(view.progress[:1] or [f"nothing moved in two samples {evidence.seconds:.0f} s apart"]),
        f"{port}; {http}" if http else port,
        _where_they_are(view),
    ]
    return Verdict(
        "UNKNOWN",
        f"the cause is not known: {_standstill(view)}, and no known case fits",
        PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=[_deciding_probe(view)],
    )


def _where_they_are(view: View) -> str:
    """Ranks by their stacks where those are known, else all processes by state and CPU."""
    if view.stack_groups:
        return "; ".join(f"{rank_names(g.ranks)} at {telling_frame(g.frames)}" for g in view.stack_groups if g.frames)
    states = ", ".join(f"{name_of(p)}: state {p.state}, {p.cpu:.0%} CPU" for p in view.members)
    return states or "no process could be read"


def _standstill(view: View) -> str:
    """What is the matter, as far as it can be said without a cause."""
    if not view.members:
        return "no process of the server can be seen"
    quiet, _ = view.silence
    since = f" for {quiet:.0f} s" if 0 < quiet < float("inf") else ""
    return f"nothing moves{since} in phase {view.phase}" if not view.progress else f"it moves in phase {view.phase}"


def _deciding_probe(view: View) -> str:
    """What to look at next: the probe that is missing and would tell the remaining causes apart."""
    evidence = view.evidence
    if not view.members:
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
    if evidence.launcher_alive and view.schedulers and not view.missing_ranks:
        found.append("dead process: launcher and every rank live")
    if view.members and not any(p.state in "Tt" or p.tracer_pid for p in view.members):
        found.append("stopped or traced process: none")
    if not view.compilers:
        found.append("compilation: no compiler process uses CPU")
    if not evidence.locks and not any(f.holder == 0 for f in evidence.lock_files):
        found.append("lock: nobody waits in /proc/locks")
    if view.schedulers and not view.progress:
        found.append("slow loading: no rank read or grew")
    return found


TELLING_PROBES = ("py-spy", "strace", "access", "process ")


def _blind(view: View) -> list[str]:
    """Probes that failed and would have made the verdict surer."""
    failed = [p for p in view.evidence.probes if not p.ok and p.name.startswith(TELLING_PROBES)]
    return [f"{p.name} failed: {p.detail}" for p in failed]
