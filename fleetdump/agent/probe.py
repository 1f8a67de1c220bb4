"""``check``: would this host serve, capture and be diagnosed? Each question about it has its own time limit."""

from __future__ import annotations

import os
import platform
import time
from functools import partial
from typing import Callable, List, NamedTuple

from fleetdump.agent import (
    checks,
    checks_disk,
    checks_forward,
    checks_gpu,
    checks_host,
    checks_model,
    checks_net,
    healthy,
)
from fleetdump.agent.context import AgentContext, machine_id
from fleetdump.agent.findings import Checked
from fleetdump.agent.hostmessages import ProbeArgs, ProbeResult
from fleetdump.agent.probes.bounded import Probes
from fleetdump.agent.protocol import Finding
from fleetdump.agent.server import server_states
from fleetdump.agent.specs import interpreters, models_of

WORDS = {
    "engine": "the server's interpreter",
    "shared": "who else runs this sglang",
    "forward": "the size of the largest forward",
    "capture": "the memory that capture takes",
    "writes": "the disk's speed",
    "shm": "shared memory",
    "orphans": "what is left of earlier servers",
    "tools": "the tools of a diagnosis",
    "ptrace": "whether processes may be traced",
}
"""What a question is about, where its key does not say it."""


class Question(NamedTuple):
    """One check and the seconds that it may take."""

    key: str
    seconds: float
    ask: Callable[[], Checked]


def probe(args: ProbeArgs, ctx: AgentContext) -> ProbeResult:
    """Facts and findings of this host, each once; a question without an answer is a warning, never an error."""
    result = ProbeResult(os.uname().nodename, machine_id(), platform.python_version(), [], time=time.time())
    result.cpus = os.cpu_count() or 0
    result.findings.append(Finding("agent", "ok", f"agent runs on Python {result.agent_python}, {result.cpus} CPUs"))
    for checked in ask_all(questions_for(args, ctx), ctx):
        told = {(one.level, one.text) for one in result.findings}  # by whichever question
        result.findings += [finding for finding in checked.findings if (finding.level, finding.text) not in told]
        for name, value in checked.facts.items():
            setattr(result, name, value)
    result.servers = server_states(ctx.state)
    result.healthy = healthy.profiles(ctx.state)
    return result


def questions_for(args: ProbeArgs, ctx: AgentContext) -> List[Question]:
    """All checks that apply to ``args``, in the order in which people read them."""
    engines = interpreters(args.servers)
    ask = partial(checks.check_engine, spec=args.patch, ctx=ctx, delivery=args.delivery)
    questions = [Question("engine", 60.0, partial(ask, e, models_of(args.servers, e))) for e in engines]
    for one in engines:
        mine = [server for server in args.servers if server.interpreter == one]
        shared = partial(checks.check_shared, one, mine, ctx.state, args.delivery)
        questions += [Question("shared", 20.0, shared)] if args.patch is not None else []
    for server in args.servers:
        if args.patch is not None:
            questions.append(Question("arguments", 20.0, partial(checks.check_arguments, server, args.patch)))
        if args.layers and args.device_bytes:
            questions.append(Question("forward", 20.0, partial(checks_forward.check_forward, server, args)))
        questions.append(Question("model", 20.0, partial(checks_model.check_model, server, args.layers)))
        questions.append(Question("port", 10.0, partial(checks_net.check_port, server, ctx.state)))
        questions.append(Question("port", 20.0, partial(checks_net.check_grpc_port, server)))
        questions.append(Question("proxy", 5.0, partial(checks_net.check_proxy, server)))
    if args.capture_dir:
        questions.append(Question("disk", 10.0, partial(checks_disk.check_disk, args)))
        questions.append(Question("capture", 5.0, partial(checks_host.check_capture_memory, args)))
    if args.capture_dir and args.measure_writes:
        questions.append(Question("writes", 20.0, partial(checks_disk.check_writes, args)))
    questions.append(Question("memory", 5.0, checks_host.check_memory))
    questions.append(Question("shm", 5.0, partial(checks_host.check_shm, args.servers)))
    questions.append(Question("gpus", 20.0, partial(checks_gpu.check_gpus, args.servers, ctx.state)))
    questions.append(Question("orphans", 5.0, partial(checks_gpu.check_orphans, ctx.state)))
    questions.append(Question("tools", 5.0, checks_host.check_tools))
    questions.append(Question("ptrace", 5.0, checks_host.check_ptrace))
    questions.append(Question("limits", 5.0, checks_host.check_limits))
    return questions


def ask_all(questions: List[Question], ctx: AgentContext) -> List[Checked]:
    """Ask all at once; what does not answer in time, or fails, becomes a warning."""
    probes = Probes()
    most = max(1.0, ctx.remaining() - 2.0)
    pending = [(q.key, probes.start(q.key, q.ask, Checked([]), min(q.seconds, most))) for q in questions]
    answers = []
    for key, started in pending:
        checked = probes.result(started)
        record = probes.records[-1]
        if not record.ok:
            checked = Checked([Finding(key, "warning", f"{WORDS.get(key, key)} could not be checked: {record.detail}")])
        answers.append(checked)
    return answers
