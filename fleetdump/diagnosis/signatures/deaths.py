"""Processes that are gone: the launcher, a rank, and what killed them."""

from __future__ import annotations

import re

from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.diagnosis.registry import Step, signature
from fleetdump.diagnosis.signatures.network import port_race
from fleetdump.diagnosis.types import DIRECT, LOG_ONLY, MEASURED, PATTERN, Verdict
from fleetdump.diagnosis.view import View
from fleetdump.diagnosis.words import is_are, listed, name_of, size

SIGKILL = 9
_KILLED = re.compile(r"Killed process (?P<pid>\d+) \((?P<name>[^)]*)\)")

TITLE_TEXT = 120
_EXCEPTION = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Interrupt)\b(?::|$)")
_COMPILER = re.compile(r"(?:nvcc|cicc|ptxas|cudafe|ninja|cc1|clang)")


@signature(Step.HOST)
def out_of_memory(view: View) -> Verdict | None:
    """The kernel killed something for memory while this server lived, and a process of it is gone."""
    memory = view.evidence.memory
    kills = max(memory.oom_kills, view.evidence.cgroup.memory_events.get("oom_kill", 0))
    killed = [match for line in memory.oom_lines if (match := _KILLED.search(line))]
    # A launcher that has lost its only engine before a rank named itself looks like one that has not started any.
    engines = any(m["name"].startswith(("sglang::", "VLLM::")) for m in killed)
    alone = view.crash_is_of_a_kill or (engines and not view.schedulers and not view.within_patience)
    if not (view.gone or not view.evidence.launcher_alive or alone) or not (memory.oom_lines or kills):
        return None
    ours = [m for m in killed if m["name"].startswith(("sglang", "python", "pt_main", "VLLM", "vllm", "ray::"))]
    compilers = [m for m in killed if _COMPILER.match(m["name"])]
    others = bool(killed) and not ours and not compilers and not kills
    follows = view.crash_is_of_a_peer or view.crash_is_of_a_kill
    explained = bool(view.evidence.log.crash) and not follows and not (ours or compilers)
    if others or explained:
        return None
    facts = [*memory.oom_lines[:4]]
    facts += [f"{len(compilers)} of the killed are compilers: kernels were being built"] if compilers else []
    if kills:
        facts.append(f"the server's cgroup counts {kills} out-of-memory kills")
    facts += [f"log, which only saw the end of it: {view.evidence.log.crash}"] if view.crash_is_of_a_kill else []
    engine = bool(ours) and all(m["name"].startswith("VLLM::Engine") for m in ours) and view.evidence.target.ranks > 1
    rank = view.missing_ranks[0] if len(view.missing_ranks) == 1 and not engine else None
    fewer = not killed and kills < len(view.missing_ranks)
    victim = "the engine core" if engine else "a process of this server" if fewer else _victim(view, rank)
    during = " while kernels were compiled" if compilers or view.compilers else ""
    return Verdict(
        "OOM_KILLED",
        f"the kernel killed {victim} for memory{during}; {_consequence(view)}",
        DIRECT if ours or (kills and any(p.exit_signal == SIGKILL for p in view.zombies)) else MEASURED,
        phase=view.phase,
        rank=rank,
        evidence=facts,
        next_steps=[
            "lower host memory use (smaller hierarchical cache, fewer parallel compilers: MAX_JOBS) and deploy again"
        ],
    )


def _victim(view: View, rank: int | None) -> str:
    if rank is not None:
        return f"rank {rank}"
    if view.evidence.launcher_alive and view.missing_ranks:
        return f"ranks {listed(map(str, view.missing_ranks))}"
    return "a process of this server"


@signature(Step.PROCESSES)
def launcher_died(view: View) -> Verdict | None:
    """The launcher is gone; the log's first exception says whose fault it was."""
    evidence = view.evidence
    if evidence.launcher_alive or view.port_taken or evidence.log.bad_argument:
        return None
    log = evidence.log
    facts = [f"process {evidence.target.pid} (launcher) does not exist any more"]
    left = [p.label or p.role for p in view.members]
    facts.append(f"still there: {', '.join(left)}" if left else "no process of the server is left")
    facts += _crash_facts(view)
    facts += [f"its last words: {words}"] if not log.crash and (words := _last_words(view)) else []
    rank = view.crash_rank
    if rank is not None:
        lost = view.crash_is_of_a_peer or not log.crash
        title = f"the server died: rank {rank} {'was lost first' if lost else f'raised first, {short(log.crash)}'}"
    else:
        words = log.crash or _last_words(view)
        complaint = next(iter(log.troubles.values()), "")
        silent = f"its log complains of this: {short(complaint)}" if complaint else "and its log names no reason"
        title = f"the server died: {short(words)}" if words else f"the server died, {silent}"
    return Verdict(
        "LAUNCHER_DIED",
        title,
        DIRECT,
        phase=view.phase,
        rank=rank,
        evidence=facts,
        next_steps=[f"read the end of {log.path or 'the log'}", "deploy again once the cause is removed"],
    )


@signature(Step.PROCESSES)
def argument_refused(view: View) -> Verdict | None:
    """The server ended at once: its own parser did not take one of its arguments."""
    log = view.evidence.log
    if view.evidence.launcher_alive or not log.bad_argument:
        return None
    meant = f"; it knows {log.nearest_argument}" if log.nearest_argument else ""
    return Verdict(
        "LAUNCHER_DIED",
        f"the server ended at once, its arguments are wrong: {_few_choices(log.bad_argument)}{meant}",
        DIRECT,
        phase=view.phase,
        evidence=[f"log: {log.bad_argument}", "the parser of arguments ends a server before anything else is tried"],
        next_steps=[
            "correct it in the inventory's args (or where the command is written), then deploy again",
            "python3 -m sglang.launch_server --help lists what this release takes",
        ],
    )


def _few_choices(text: str) -> str:
    """Without the list of everything that would have been taken."""
    return short(text.partition(" (choose from ")[0])


@signature(Step.PROCESSES)
def rank_crashed(view: View) -> Verdict | None:
    """A rank raised: SGLang now takes up to 65 s until it ends itself, and accepts requests without answering."""
    log = view.evidence.log
    if not view.evidence.launcher_alive or not log.crash:
        return None
    rank = view.crash_rank
    who = f"rank {rank}" if rank is not None else "a rank"
    if rank is None and view.crash_is_of_a_kill:
        who = "a process of the server"
    killed = "was killed" if view.crash_is_of_a_kill else f"raised {short(log.crash)}"
    verb = "was lost" if view.crash_is_of_a_peer else killed
    return Verdict(
        "RANK_CRASHED",
        f"{who} {verb}; the launcher has not ended yet, and for about a minute every request hangs",
        PATTERN if view.crash_is_of_a_peer else DIRECT,
        phase=view.phase,
        rank=rank,
        evidence=[*_crash_facts(view), *_gone_facts(view)],
        next_steps=[
            "the first exception in the log is the cause, later ones follow from it",
            "stop the server, then deploy again",
        ],
    )


@signature(Step.PROCESSES)
def writes_core(view: View) -> Verdict | None:
    """A rank was ended by a signal, and looks alive as long as the kernel writes its core."""
    dying = view.dying
    if not dying or view.evidence.log.crash:
        return None
    first = dying[0]
    lines = [line for line in view.kernel_since_start if f"[{first.pid}]" in line or f"pid={first.pid}," in line]
    written = sum(max(p.write_bytes_delta, p.wchar_delta) for p in dying)
    facts = [f"{name_of(p)}: state {p.state}, the kernel writes its core ({p.kernel_stack[0]})" for p in dying[:8]]
    facts += (
        [f"{size(written)} of it in {view.evidence.seconds:.0f} s, of {size(first.rss)} in memory"] if written else []
    )
    return Verdict(
        "RANK_CRASHED",
        f"{listed(map(name_of, dying))} crashed and {is_are(dying)} not gone yet: the kernel writes a core dump",
        DIRECT,
        phase=view.phase_of(first),
        rank=first.rank if len(dying) == 1 else None,
        evidence=[*facts, *lines[-2:]],
        next_steps=[
            "stop the server, or wait until the core is complete if you want to read it (coredumpctl, core_pattern)",
            "start it with ulimit -c 0: a core of a rank is as large as its memory",
        ],
    )


@signature(Step.PROCESSES)
def dead_rank(view: View) -> Verdict | None:
    """A rank is gone without a word while the launcher lives: it waits for it, or answers for a dead engine."""
    if not view.evidence.launcher_alive or not view.gone or view.evidence.log.crash:
        return None
    several = len(view.missing_ranks) > 1
    who = _who_is_gone(view)
    verb = "are" if several and not view.engine_dead else "is"
    rank = view.crash_rank if len(view.missing_ranks) != 1 else view.missing_ranks[0]
    known = _trouble(view, "rank_died")
    facts = [*_gone_facts(view), *(known or ["the log names no exception: killed from outside, or by the kernel"])]
    if view.port_open:
        code, title = "API_ALIVE_ENGINE_DEAD", f"{who} {verb} dead; {_consequence(view)}"
    else:
        code, title = "PARENT_WAITS_DEAD_RANK", f"{who} {verb} dead; {_consequence(view)}"
        facts.append(f"port {view.evidence.target.port} is closed")
    return Verdict(
        code,
        title,
        DIRECT if view.zombies or view.schedulers else MEASURED,
        phase=view.phase,
        rank=rank,
        evidence=facts,
        next_steps=[
            "look for who killed it: kernel log, cgroup limits, an operator",
            "stop the server, then deploy again",
        ],
    )


def _consequence(view: View) -> str:
    """What the death of a process means for the rest."""
    if not view.evidence.launcher_alive:
        return "the server died with it"
    if view.port_open:
        return "the HTTP server still answers, and no request will end"
    ends = [end.fd for end in view.launcher.pipes] if view.launcher else []
    pipe = " on a pipe" if view.launcher and view.launcher.syscall_fd in ends else ""
    whom = "them" if len(view.missing_ranks) > 1 else "it"
    return f"the launcher waits for {whom}{pipe} and will wait for ever"


def _who_is_gone(view: View) -> str:
    numbers = ", ".join(map(str, view.missing_ranks))
    if view.engine_dead:
        return "the engine core"
    if numbers:
        return f"{'ranks' if len(view.missing_ranks) > 1 else 'rank'} {numbers}"
    return "a scheduler" if view.zombies else "the detokenizer"


@signature(Step.PROCESSES)
def port_in_use(view: View) -> Verdict | None:
    """Another process listens on the server's port."""
    port, log = view.evidence.port, view.evidence.log
    if view.port_taken:
        owner = f"process {port.owner_pid} ({port.owner})" if port.owner_pid else "a process that this user cannot see"
        return Verdict(
            "PORT_IN_USE",
            f"port {port.port} belongs to {owner}",
            DIRECT if port.owner_pid else MEASURED,
            phase=view.phase,
            evidence=[f"the listening socket of port {port.port} is held by {owner}", *_trouble(view, "port_in_use")],
            next_steps=["stop that process or choose another port in the inventory"],
        )
    if "port_in_use" in log.troubles and not view.evidence.launcher_alive and not port_race(view):
        return Verdict(
            "PORT_IN_USE",
            f"the server found an address in use (port {port.port} or one of its internal ports)",
            LOG_ONLY,
            phase=view.phase,
            evidence=_trouble(view, "port_in_use"),
            next_steps=["deploy again; if it comes back, give internal ports outside net.ipv4.ip_local_port_range"],
        )
    return None


def _trouble(view: View, name: str) -> list[str]:
    line = view.evidence.log.troubles.get(name)
    return [f"log: {line}"] if line else []


def short(text: str) -> str:
    """The beginning of an exception's line, for a sentence."""
    return text if len(text) <= TITLE_TEXT else f"{text[:TITLE_TEXT].rstrip()} ..."


def _last_words(view: View) -> str:
    """The last line of the log that looks like an exception; of a launcher that failed before any rank."""
    return next((line.strip() for line in reversed(view.evidence.log.tail) if _EXCEPTION.match(line)), "")


def _crash_facts(view: View) -> list[str]:
    log = view.evidence.log
    if not log.crash:
        return _trouble(view, "rank_died") or ["the log names no exception"]
    facts = [f"first exception in the log{f' ({log.crash_label})' if log.crash_label else ''}: {log.crash}"]
    if view.crash_is_of_a_peer:
        facts.append(f"{log.crash_label or 'that rank'} only lost its connection: the rank at the other end went first")
    return facts


def _gone_facts(view: View) -> list[str]:
    facts = [f"rank {rank}: no such process (or a zombie)" for rank in view.missing_ranks]
    facts += [f"process {p.pid} ({p.label or p.name}) was ended by signal {p.exit_signal}" for p in _signalled(view)]
    if view.schedulers:
        facts.append("alive: " + ", ".join(f"{p.label} ({p.state})" for p in view.schedulers))
    return facts


def _signalled(view: View) -> list[ProcessFacts]:
    return [p for p in view.evidence.processes if p.state in "ZX" and p.exit_signal]
