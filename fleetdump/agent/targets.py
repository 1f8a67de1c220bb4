"""Which server to look at: one of ours by its record, any by its port, a pid, its processes' titles or arguments."""

from __future__ import annotations

import os
import re
from typing import List, Optional, Tuple

from fleetdump.agent import procfs
from fleetdump.agent.arguments import option_value
from fleetdump.agent.context import AgentContext
from fleetdump.agent.evidence_types import Target
from fleetdump.agent.procfs import ProcSample
from fleetdump.agent.protocol import AgentFailure
from fleetdump.agent.records import in_words
from fleetdump.agent.scrub import scrub_argv
from fleetdump.agent.server import ServerRecord, load_record, readable_records, server_states
from fleetdump.agent.servermessages import EvidenceArgs

DEFAULT_PORT = 30000
"""SGLang's own."""
TENSOR_PARALLEL = ("--tp-size", "--tp", "--tensor-parallel-size")
_INTERPRETER = re.compile(r"^(?:python|pypy|sglang|vllm)")
"""What a launcher's program is called; a shell, an editor or a grep that only names one is none."""


def find_target(args: EvidenceArgs, ctx: AgentContext) -> Target:
    """The server that ``args`` name; without any name the only one of ours, or else the only one of this host.

    A server of ours that was never launched here is looked for by ``args.port`` where that is given too. Raises
    ``AgentFailure`` (not_found, usage).
    """
    if args.server:
        record = load_record(ctx.state, args.server)
        if record is not None:
            return target_of(record)
        try:
            return by_port(args.port)
        except AgentFailure as failure:
            raise _never_launched(args, ctx, failure.error.what) from failure
    if args.port:
        return by_port(args.port)
    if args.pid:
        return target_of_pid(args.pid)
    records, unreadable = readable_records(ctx.state)
    if len(records) == 1 and not unreadable:
        return target_of(records[0])
    if not records and not unreadable:
        return _by_title()
    names = ", ".join(r.name for r in records) or "none"
    why = "; ".join([f"servers of ours: {names}", *map(in_words, unreadable.values())])
    raise AgentFailure("usage", "which server?", why=why, next_step="use --server or --port")


def _never_launched(args: EvidenceArgs, ctx: AgentContext, otherwise: str) -> AgentFailure:
    known = ", ".join(one.name for one in server_states(ctx.state)) or "none"
    by_hand = f"; {otherwise}, so nobody started it by hand either" if args.port else ""
    return AgentFailure(
        "not_found",
        f"server {args.server} was never launched here",
        why=f"servers of ours on this host: {known}{by_hand}",
        next_step="launch it with `fleetdump deploy`, or name any other server with --port or --pid",
    )


def by_port(port: int) -> Target:
    """Who listens on ``port``, or who was told to: a server that hangs in its start has not opened it, and one whose
    port somebody else has taken never will."""
    owner = procfs.port_owner(port) if port else None
    if owner and owner.pid:
        found = target_of_pid(owner.pid, port)
        sample = procfs.read_process(found.pid)
        if sample and sample.role == "launcher":
            return found
    told = [sample for sample in launchers() if _port_of(sample.cmdline) == port]
    if len(told) == 1:
        return target_of_pid(told[0].pid, port)
    if owner and owner.pid and not told:
        return target_of_pid(owner.pid, port)
    raise AgentFailure(
        "usage" if told else "not_found",
        f"the owner of port {port} is hidden" if owner and not told else f"nobody listens on port {port}",
        why=f"launchers with that port: {_listed(told)}" if told else "",
        next_step="name a server of ours with --server, or the launcher's process with --pid",
    )


def _by_title() -> Target:
    """The only server of the host, by its launcher's command line or, when that is dead, by its ranks' titles."""
    found = launchers()
    if len(found) == 1:
        return target_of_pid(found[0].pid)
    if found:
        raise AgentFailure("usage", "which server?", why=_listed(found), next_step="use --pid or --port")
    orphans = [one for one in procfs.all_processes() if one.role == "scheduler"]
    sessions = {one.sid for one in orphans}
    if len(sessions) == 1:
        sid = sessions.pop()
        ranks = 1 + max(one.rank.tp if one.rank else 0 for one in orphans)
        return Target(sid, session=sid, ranks=ranks, log=_log_of(orphans[0].pid), root=procfs.root_of(orphans[0].pid))
    why = f"ranks of sessions {', '.join(map(str, sorted(sessions)))} have no launcher" if sessions else ""
    raise AgentFailure(
        "usage",
        "no server is found here",
        why=why or "no record of ours, and no process is called as SGLang's launcher or ranks are",
        next_step="name the launcher's process with --pid; inside a container, set exec_prefix in the inventory",
    )


def launchers() -> List[ProcSample]:
    """Launchers of all servers on this host. Wrappers (a shell, nohup, timeout) that hold one are left out."""
    named = [one for one in procfs.all_processes() if one.role == "launcher" and _is_interpreter(one.cmdline)]
    parents = {one.ppid for one in named}
    return [one for one in named if one.pid not in parents and one.pid != os.getpid()]


def _is_interpreter(cmdline: List[str]) -> bool:
    return bool(_INTERPRETER.match(os.path.basename(cmdline[0])))


def _listed(found: List[ProcSample]) -> str:
    return "; ".join(
        f"pid {one.pid}, port {_port_of(one.cmdline)} ({' '.join(scrub_argv(one.cmdline))[:120]})" for one in found[:8]
    )


def target_of(record: ServerRecord) -> Target:
    """A server of ours, by its record."""
    return Target(
        pid=record.pid,
        start_time=record.start_time,
        session=record.pid,
        server=record.name,
        port=record.port,
        host=record.host,
        log=record.log,
        ranks=record.tp,
        python=record.python,
        watched_paths=[record.capture_dir] if record.capture_dir else [],
        stopped_at=record.stopped_at,
    )


def target_of_pid(pid: int, port: int = 0) -> Target:
    """Any server: ``pid`` is its launcher or one of its processes; the rest comes from its command line.

    Raises ``AgentFailure`` when there is no such process.
    """
    sample = procfs.read_process(pid)
    if sample is None:
        next_step = "name the launcher's pid, or leave --pid out: then the host is searched for its server"
        raise AgentFailure("not_found", f"no process {pid} here", next_step=next_step)
    sample = _launcher_above(sample) or sample
    words = sample.cmdline
    return Target(
        pid=sample.pid,
        start_time=sample.start_time,
        session=sample.pid if sample.sid == sample.pid else 0,
        port=port or _port_of(words),
        host=option_value(words, ("--host",), "127.0.0.1"),
        log=_log_of(sample.pid),
        ranks=_number(words, TENSOR_PARALLEL, 1),
        nodes=_number(words, ("--nnodes",), 1),
        node_rank=_number(words, ("--node-rank",), 0),
        python=os.path.join(procfs.read_link(f"{procfs.PROC}/{sample.pid}/cwd") or "", (words or [""])[0]),
        root=procfs.root_of(sample.pid),
    )


def _launcher_above(sample: ProcSample) -> Optional[ProcSample]:
    """The nearest launcher among ``sample`` and its ancestors."""
    current: Optional[ProcSample] = sample
    while current is not None and current.role != "launcher":
        current = procfs.read_process(current.ppid) if current.ppid > 1 else None
    return current


def _log_of(pid: int) -> str:
    """The file that its standard output goes to, also through a ``tee``; empty for a terminal or a service's pipe."""
    target = procfs.read_link(f"{procfs.PROC}/{pid}/fd/1") or ""
    inside = procfs.read_link(f"{procfs.PROC}/{pid}/root") or "/"
    if inside != "/" and target.startswith(f"{inside}/"):  # a changed root shows from outside; a pivoted one does not
        target = target[len(inside) :]
    if target.startswith("pipe:["):
        target = _written_by_reader(pid, target)
    return target if target.startswith("/") and not target.startswith("/dev/") else ""


def _written_by_reader(pid: int, pipe: str) -> str:
    """The one regular file that the pipe's reader (``tee``) writes; empty when that is not clear."""
    for reader in procfs.pids():
        targets = procfs.fd_targets(reader) if reader != pid else {}
        if targets.get(0) == pipe:
            files = {target for fd, target in targets.items() if fd > 2 and target.startswith("/")}
            return files.pop() if len(files) == 1 else ""
    return ""


def _port_of(words: List[str]) -> int:
    return _number(words, ("--port",), DEFAULT_PORT)


def _number(words: List[str], names: Tuple[str, ...], default: int) -> int:
    text = option_value(words, names, str(default))
    return int(text) if text.isdigit() else default
