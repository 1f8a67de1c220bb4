"""Evidence in, ranked verdicts out: a pure function over the table of signatures."""

from __future__ import annotations

from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import signatures
from fleetdump.diagnosis.references import REFERENCES
from fleetdump.diagnosis.registry import SIGNATURES, Step
from fleetdump.diagnosis.types import HIGH, LOW, MEDIUM, Verdict
from fleetdump.diagnosis.view import View

_CONFIDENCE = {HIGH: 0, MEDIUM: 1, LOW: 2}

__all__ = ["diagnose", "signatures"]


def diagnose(evidence: Evidence) -> list[Verdict]:
    """All verdicts that the evidence supports, best first: by decision order, then by confidence; never empty."""
    view = View(evidence)
    found = [(step, verdict) for step, check in SIGNATURES if (verdict := check(view))]
    found = [item for item in found if item[0] == Step.ENDED] or found
    found.sort(key=lambda item: (item[0], _CONFIDENCE[item[1].confidence]))
    causes = any(step < Step.NOTES for step, _ in found)
    verdicts = [verdict for _, verdict in found]
    if not causes:
        verdicts.insert(0, _unknown(view))
    for verdict in verdicts:
        verdict.server = evidence.target.server
        verdict.ruled_out = _ruled_out(view)
        verdict.references = list(REFERENCES.get(verdict.code, ()))
        verdict.evidence = [*verdict.evidence, *_blind(view)]
    return verdicts


def _unknown(view: View) -> Verdict:
    evidence = view.evidence
    http = ", ".join(f"GET {h.path}: {h.status or h.error}" for h in evidence.http)
    port = f"port {evidence.target.port} is {'open' if evidence.port.open else 'closed'}"
    facts = [
        *(view.progress[:1] or [f"nothing moved in two samples {evidence.seconds:.0f} s apart"]),
        f"{port}; {http}" if http else port,
        ", ".join(f"{p.label or p.role}: state {p.state}, {p.cpu:.0%} CPU" for p in view.members) or "no process seen",
    ]
    return Verdict(
        "UNKNOWN",
        f"no known signature fits (phase {view.phase})",
        LOW,
        phase=view.phase,
        evidence=facts,
        next_steps=[_deciding_probe(view)],
    )


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
    if not evidence.memory.oom_lines and not evidence.memory.oom_kills:
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


def _blind(view: View) -> list[str]:
    """Probes of stage 2 that failed: why the verdict rests on /proc alone."""
    failed = [p for p in view.evidence.probes if not p.ok and p.name.startswith(("py-spy", "strace"))]
    return [f"{p.name} failed: {p.detail}" for p in failed]
