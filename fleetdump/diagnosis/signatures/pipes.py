"""Pipes and rings that cannot move: nobody can write, nobody reads."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_process import ProcessFacts, Stack
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.types import DIRECT, MEASURED, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import name_of

_WRITES = frozenset({"1", "20"})
"""x86-64 system calls write and writev."""
_RING_WRITER = re.compile(r"\bacquire_write\b")


@signature(Step.PIPES)
def end_of_file_impossible(view: View) -> Verdict | None:
    """Somebody reads a pipe whose only writing end is its own."""
    for process in view.members:
        waits = {process.syscall_fd, *process.polled_fds} - {-1}
        ends = [p for p in process.pipes if p.mode == "r" and p.own_writer and p.fd in waits]
        if not ends or view.healthy:
            continue
        who = name_of(process)
        return Verdict(
            "PIPE_EOF_IMPOSSIBLE",
            f"{who} reads a pipe that only it could write to: neither data nor end of file can come",
            DIRECT,
            phase=view.phase_of(process),
            rank=process.rank,
            evidence=[f"{who} waits on fd {p.fd}: pipe {p.inode} has no other writer than itself" for p in ends],
            next_steps=["restart the server; the writer died while the launcher still held its end (update SGLang)"],
        )
    return None


@signature(Step.PIPES)
def output_pipe_full(view: View) -> Verdict | None:
    """A process sleeps in a write to its standard output, a pipe that nobody empties."""
    held = mute(view)
    if not held or view.healthy:
        return None
    first = held[0]
    facts = []
    for process in held:
        fd = process.syscall_fd
        target = process.stderr if fd == 2 else process.stdout
        end = next((p for p in process.pipes if p.fd == fd), None)
        readers = f"read by {end.peers}, state {end.peer_states}" if end and end.peers else "read by nobody known"
        facts.append(f"{name_of(process)} sleeps in a write to fd {fd} ({target}, {readers})")
    return Verdict(
        "STDOUT_PIPE_FULL",
        f"{name_of(first)} cannot write its log: the pipe's reader is stopped or does not read",
        DIRECT,
        phase=view.phase_of(first),
        rank=first.rank,
        evidence=facts,
        next_steps=["let the reader (tee, ssh, a log shipper) go on; launch with the output in a file"],
    )


def mute(view: View) -> list[ProcessFacts]:
    """Processes of the server that sleep until somebody reads what they say: whoever waits, waits for that."""
    return [p for p in view.members if _blocked_in_output(p)]


def _blocked_in_output(process: ProcessFacts) -> bool:
    main = process.main
    if main is None or main.cpu > 0.05 or process.syscall_fd not in (1, 2) or process.state in "Tt":
        return False  # who is stopped may have been in any call
    target = process.stderr if process.syscall_fd == 2 else process.stdout
    writes = main.syscall.split()[:1]
    return target.startswith("pipe:") and ("pipe_write" in main.wchan or (bool(writes) and writes[0] in _WRITES))


@signature(Step.PIPES)
def ring_full(view: View) -> Verdict | None:
    """A writer waits for room in a shared-memory ring, and one of the ring's readers is gone."""
    writers = [s for s in view.evidence.stacks if any(_RING_WRITER.search(frame) for frame in _frames(s))]
    line = view.trouble("ring_full")
    if not view.missing_ranks or not (writers or (line and view.spinning_engines)):
        return None
    rank = view.missing_ranks[0]
    who = ", ".join(f"TP{n}" for n in view.missing_ranks)
    facts = [f"{s.label or s.role} is in {s.frames[0]}, {s.state}" for s in writers]
    facts.append(f"{who}: no such process (or a zombie)")
    return Verdict(
        "DEAD_READER_RING_FULL",
        f"the engine waits for room in a ring that {who} should read, and {who} is dead",
        DIRECT if writers else MEASURED,
        phase=view.phase,
        rank=rank if len(view.missing_ranks) == 1 else None,
        evidence=[*facts, *([f"log: {line}"] if line else [])],
        next_steps=["look for what killed that worker (kernel log, operator)", "restart the server"],
    )


def _frames(stack: Stack) -> list[str]:
    return stack.frames[:8]
