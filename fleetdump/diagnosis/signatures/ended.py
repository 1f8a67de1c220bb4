"""Servers that something outside ended: a login session that closed, a terminal that hung up, a limit of time."""

from __future__ import annotations

import re

from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.compiling import compiles
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, PATTERN, WAIT, Verdict
from fleetdump.diagnosis.view import View

SIGHUP = 1
NEAR = 30.0
"""Seconds between the server's last line and the end of a session that may have taken it along."""
_SESSION_END = re.compile(r"(?:[Ss]ession (?P<a>[\w-]+) (?:logged out|closed)|Removed session (?P<b>[\w-]+))")
_KILLING = re.compile(r"(?:session-|user@)[\w.-]+\.(?:scope|service).*[Kk]illing process (?P<pid>\d+)")
_STAMP = re.compile(r"^\[?(?P<at>\d{9,}(?:\.\d+)?)")
_WORKING_PHASES = ("weights", "jit", "capture")
_BARRIER_ENDED = re.compile(r"other ranks that didn't finish loading|Timed out waiting \d+ ?ms")
"""What a rank says that had to wait too long for those that still load."""
_TIMED_OUT = re.compile(r"Read timed out|ReadTimeout|TimeoutError|\btimed out\b")
LIMITS = ("startup_timeout", "watchdog", "nccl_watchdog")
"""Troubles that name a limit of the server or of its starter."""


@signature(Step.HOST)
def session_ended(view: View) -> Verdict | None:
    """logind ended the login session that the server was started in, and all of its processes."""
    evidence = view.evidence
    if evidence.launcher_alive or evidence.log.crash:
        return None
    pid = str(evidence.target.pid)
    killed = [line for line in evidence.host.logins if (match := _KILLING.search(line)) and match["pid"] == pid]
    last = evidence.taken_at - evidence.log.quiet_seconds
    ends = [line for line in evidence.host.logins if _SESSION_END.search(line) and abs(_at(line) - last) <= NEAR]
    if not killed and not ends:
        return None
    facts = [*killed[-2:], *ends[-2:]]
    facts.append("the log ends at that time without an error" if ends else "the log names no error")
    return Verdict(
        "LOGIND_KILL",
        "the server was ended with the login session that it was started in",
        DIRECT if killed else PATTERN,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            "start it with fleetdump deploy, or in a unit of its own (systemd-run --user --scope, a system service)",
            "or let the user's processes stay: loginctl enable-linger, KillUserProcesses=no",
        ],
    )


def _at(line: str) -> float:
    match = _STAMP.match(line)
    return float(match["at"]) if match else float("-inf")


@signature(Step.HOST)
def hung_up(view: View) -> Verdict | None:
    """The launcher died of SIGHUP: its terminal or SSH connection went away."""
    evidence = view.evidence
    signals = [p.exit_signal for p in evidence.processes if p.pid == evidence.target.pid and p.state in "ZX"]
    if evidence.launcher_alive or signals != [SIGHUP]:
        return None
    return Verdict(
        "PTY_SIGHUP",
        "the server was hung up: it died of SIGHUP when its terminal or SSH connection closed",
        DIRECT,
        phase=view.phase,
        evidence=[f"process {evidence.target.pid} (launcher) was ended by signal 1 (SIGHUP)"],
        next_steps=["start it without a terminal, in a session of its own (setsid nohup ... </dev/null >log 2>&1 &)"],
    )


@signature(Step.HOST)
def limit_too_short(view: View) -> Verdict | None:
    """A limit of its own ended a server that was still at work."""
    evidence = view.evidence
    lines = [line for name in LIMITS if (line := view.trouble(name))]
    late = view.phase in _WORKING_PHASES and bool(_BARRIER_ENDED.search(evidence.log.crash))
    lines += [evidence.log.crash] if late or _own_request_timed_out(view) else []
    if not lines or view.healthy:
        return None
    # A starter that gives up says so itself, and it ends a start that has not failed by any other reason.
    given_up = bool(view.trouble("startup_timeout")) and not evidence.log.crash and view.phase in _WORKING_PHASES
    # What outlives its starter and still reads or compiles had not hung.
    left = bool(view.trouble("startup_timeout")) and bool(view.schedulers) and bool(view.progress or view.compilers)
    moving = given_up or left or _moved_until_the_end(view)
    slow = evidence.log.running_requests and compiles(view)
    if evidence.launcher_alive or not (moving or slow):
        return None
    facts = [f"log: {line}" for line in lines]
    facts += [f"progress bar when it ended: {view.bar}"] if view.bar else []
    facts.append(f"it was in phase {view.phase}, where work goes on without batches")
    facts += [f"outlives it: {fact}" for fact in view.progress[:3]] if left else []
    return Verdict(
        "TIMEOUT_TOO_SHORT",
        f"a time limit ended the server while it still worked{f' ({view.bar})' if view.bar else ''}",
        PATTERN if view.bar else LOG_ONLY,
        phase=view.phase,
        evidence=facts,
        next_steps=[
            "raise that limit (--watchdog-timeout, the starter's own) to twice what a cold start takes",
            "or fill the kernel cache before the start (python3 -m sglang.compile_deep_gemm with the same arguments)",
        ],
    )


def _moved_until_the_end(view: View) -> bool:
    """A bar that had not ended, or news up to the last line, in a phase that has no batches."""
    log = view.evidence.log
    done, _, rest = view.bar.partition(" of ")
    unfinished = bool(rest) and done != rest.split(",")[0]
    fresh = bool(log.news_seconds) and log.news_seconds - log.quiet_seconds < NEAR
    begun = unfinished and done != "0" and _own_request_timed_out(view)
    return begun or (view.phase in _WORKING_PHASES and (unfinished or fresh))


def _own_request_timed_out(view: View) -> bool:
    """The server's own first request was not answered in time, and for that it ended itself."""
    return view.phase == "warmup" and bool(_TIMED_OUT.search(view.evidence.log.crash))


@signature(Step.NOTES)
def channel_held(view: View) -> Verdict | None:
    """A process of the server holds the pipe of the SSH session that started it: that session can't end."""
    held = [(p, e) for p in view.members for e in p.pipes if e.fd in (0, 1, 2) and "sshd" in " ".join(e.peer_names)]
    if not held:
        return None
    end = held[0][1]
    return Verdict(
        "CHANNEL_HELD",
        f"the server holds the SSH channel that started it (fd {end.fd}): that command returns when the server ends",
        DIRECT,
        WAIT,
        view.phase,
        evidence=[f"process {p.pid}: fd {e.fd} is a pipe to {', '.join(e.peer_names)}" for p, e in held[:4]],
        next_steps=["redirect all three standard streams when it is started (>log 2>&1 </dev/null)"],
    )
