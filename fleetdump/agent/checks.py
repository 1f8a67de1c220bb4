"""The single checks behind ``probe``: each reads one thing and says ok, warning or blocker, with the next step."""

from __future__ import annotations

import os
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from fleetdump.agent import engine, patching, patchrecord, procfs
from fleetdump.agent.arguments import added_arguments, option_value
from fleetdump.agent.configfile import config_arguments
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.forwardsize import judge, largest_forward, row_bytes
from fleetdump.agent.launchplan import environment_of, inherited_environment, refuse_arguments
from fleetdump.agent.model import read_model
from fleetdump.agent.neighbours import EngineUser, describe_port_owner, engine_users, file_system_of, is_network
from fleetdump.agent.probes import host
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.probes.stacks import find_py_spy
from fleetdump.agent.protocol import AgentFailure, Finding, Interpreter, PatchArgs, PatchSpec, ProbeArgs, ServerSpec
from fleetdump.agent.scrub import proxy_address
from fleetdump.agent.server import living, readable_records

GIB = 1 << 30
LOW_MEMORY = 4 * GIB
LOW_SHM = GIB
LEAST_DISK = 64 << 20
"""Free bytes below which no capture can begin: a few pieces of one long prompt."""
LOW_INODES = 10_000
NOFILE = 65_535
"""SGLang raises its own soft limit to this."""
CAP_SYS_PTRACE = 19
PROXIES = ("http_proxy", "all_proxy")
USE_HOOK = "--delivery import-hook changes no file: the patch is then in the launched server alone"


@dataclass
class Checked:
    """What one check found, and the fields of ``ProbeResult`` that it knows."""

    findings: List[Finding]
    facts: Dict[str, Any] = field(default_factory=dict)


def blocked(key: str, failure: AgentFailure) -> Finding:
    """A verb's failure as a finding: what would stop a deploy."""
    error = failure.error
    text = " ".join(part for part in (error.what, f"({error.where})" if error.where else "") if part)
    return Finding(key, "blocker", f"{text}: {error.why}" if error.why else text, error.next_step)


# --------------------------------------------------------------------------- engine, patch, model
def check_engine(
    interpreter: Interpreter,
    models: Sequence[str],
    spec: Optional[PatchSpec],
    ctx: AgentContext,
    delivery: str = patching.IN_PLACE,
) -> Checked:
    """The server's interpreter, its sglang, and whether ``spec`` is applied, or would apply, for ``models``."""
    try:
        facts = engine.query(interpreter.python, env={**inherited_environment(), **interpreter.env})
    except AgentFailure as failure:
        return Checked([blocked("engine", failure)])
    found = Checked(
        [Finding("engine", "ok", f"{facts.name} on Python {facts.python_version} ({facts.package})")],
        {"engine": facts.name, "engine_path": facts.package},
    )
    try:
        found.facts["patch"] = state = patching.read_state(interpreter.python, spec, interpreter.env, models=models)
        if spec is None:
            level = "warning" if state.state == "unknown" else "ok"
            found.findings.append(Finding("patch", level, f"patch state: {state.state} {state.patch}".strip()))
        elif state.state == "ours" and delivery == patching.IN_PLACE:
            found.findings.append(Finding("patch", "ok", f"patch {spec.name} {spec.version} is applied"))
        else:
            wanted = PatchArgs(
                interpreter.python,
                spec,
                dry_run=True,
                env=interpreter.env,
                delivery=delivery,
                models=list(models),
            )
            found.findings.append(_would_apply(wanted, ctx))
    except AgentFailure as failure:
        found.findings.append(blocked("patch", failure))
    return found


def _would_apply(args: PatchArgs, ctx: AgentContext) -> Finding:
    spec, delivery = args.patch, args.delivery
    plan = patching.patch(args, ctx)
    text = f"patch {spec.name} {spec.version} would apply"
    if delivery == patching.IMPORT_HOOK:
        text += " through the import hook"
    elif plan.before.state == "other":
        text += f", replacing {plan.before.patch} {plan.before.version}"
    if plan.verified:
        return Finding("patch", "ok", text)
    return Finding(
        "patch",
        "warning",
        f"{text}; {plan.doubts}",
        "the self-check of deploy decides; do not use --no-selfcheck",
    )


def check_arguments(server: ServerSpec, spec: PatchSpec) -> Checked:
    """Whether the patch can be right with the server's arguments, those in a file of ``--config`` included."""
    findings = []
    try:
        config_arguments(server, environment_of(server))
    except AgentFailure as failure:
        text = f"{blocked('arguments', failure).text}; what it sets shows once the server runs"
        findings.append(Finding("arguments", "warning", text, failure.error.next_step))
    try:
        refuse_arguments(spec, server)
        release = engine.query(server.python, env=environment_of(server)).release
        added = added_arguments(server.args, patch_arguments(spec, release, server.without))
    except AgentFailure as failure:
        return Checked([*findings, blocked("arguments", failure)])
    text = f"server {server.name} gets {' '.join(added) or 'no flags'} from patch {spec.name}"
    return Checked([*findings, Finding("arguments", "ok", text)])


def check_forward(server: ServerSpec, args: ProbeArgs) -> Checked:
    """Whether the tap's buffers take the server's largest forward; nothing where the model does not tell."""
    try:
        model = read_model(server.model_path, needs_weights=False)
        argv = [*config_arguments(server, environment_of(server)), *server.args]
        forward = largest_forward(argv, server.dp, _gpu_mib(server))
    except AgentFailure:
        return Checked([])  # check_model and check_arguments say it
    except ValueError as error:
        return Checked(
            [Finding("forward", "blocker", f"a size in the server's args is no number: {error}", "correct it")]
        )
    row = row_bytes(server, model, len(args.layers) + 1)
    return Checked(judge(forward, row, args.device_bytes, args.ring_bytes) if row else [])


def _gpu_mib(server: ServerSpec) -> Optional[int]:
    """Memory of the smallest GPU; None on the CPU, 0 when nobody knows."""
    if _on_cpu(server):
        return None
    try:
        output = run_command(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], 10.0)
        return min([int(line) for line in output.stdout.splitlines()], default=0)
    except (ProbeFailed, ValueError):
        return 0


def check_shared(interpreter: Interpreter, servers: Sequence[ServerSpec], state: State, delivery: str) -> Checked:
    """Who else has the files that an in-place patch changes: other servers that run now, and other hosts."""
    if delivery != patching.IN_PLACE:
        return Checked([])
    facts = engine.query(interpreter.python, env={**inherited_environment(), **interpreter.env})
    users = engine_users(facts)
    mine = {server.name for server in servers}
    ours = {record.pid: record.name for record in readable_records(state)[0] if living(record)}
    record = patchrecord.load(Path(facts.site))
    findings = []
    old = [user for user in users if record is not None and user.started_at < record.applied_at]
    if old and record is not None:
        text = f"{_names(old, ours)} started before patch {record.patch} {record.version} and run the code from before"
        findings.append(Finding("shared", "warning", text, "start them anew where they are to have the patch"))
    others = [user for user in users if ours.get(user.pid) not in mine and user not in old]
    if others:
        text = (
            f"{facts.package} is also run by {_names(others, ours)}: patched in place, they get it at their next start"
        )
        findings.append(Finding("shared", "warning", text, USE_HOOK))
    kind = file_system_of(facts.package)
    if is_network(kind):
        text = f"{facts.package} lies on {kind}: every host that mounts it gets a patch in place"
        findings.append(Finding("shared", "warning", text, USE_HOOK))
    return Checked(findings)


def _names(users: Sequence[EngineUser], ours: Mapping[int, str]) -> str:
    return ", ".join(
        f"our server {ours[user.pid]} (pid {user.pid})" if user.pid in ours else str(user) for user in users
    )


def check_model(server: ServerSpec, layers: Sequence[int]) -> Checked:
    """The model's directory, and whether the wanted entry ids exist in it."""
    key = "model"
    if not server.model_path.startswith(("/", "~", ".")) and not os.path.isdir(server.model_path):
        text = f"model {server.model_path} is a hub name; it is not looked at"
        return Checked([Finding(key, "warning", text, "prefer a local directory: hosts then cannot differ")])
    try:
        model = read_model(server.model_path, option_value(server.args, ("--load-format",)) != "dummy")
    except AgentFailure as failure:
        return Checked([blocked(key, failure)])
    text = f"model {model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, {model.dtype}"
    findings = [Finding(key, "ok", text)]
    wrong = [layer for layer in layers if not 0 <= layer <= model.num_layers]
    if wrong:
        findings.append(
            Finding(
                "layers",
                "blocker",
                f"entry ids {wrong} do not exist: the model has {model.num_layers} layers",
                f"choose from 0 to {model.num_layers} with layer_ids: input, to {model.num_layers - 1} with output",
            )
        )
    return Checked(findings, {"model": model})


# --------------------------------------------------------------------------- ports and network
def check_port(server: ServerSpec, state: State) -> Checked:
    """The server's port is free, or held by that server of ours; another one of ours can be replaced."""
    owner = procfs.port_owner(server.port)
    if owner is None:
        return Checked([Finding("port", "ok", f"port {server.port} is free")])
    for record in readable_records(state)[0]:
        if owner.pid in {member.pid for member in living(record)}:
            text = f"port {server.port} is held by our server {record.name}"
            if record.name == server.name:
                return Checked([Finding("port", "ok", text)])
            return Checked([Finding("port", "warning", text, "fleetdump deploy --replace stops it first")])
    text = f"port {server.port} is taken: {describe_port_owner(owner)}"
    return Checked([Finding("port", "blocker", text, "stop that process, or choose another `port` in the inventory")])


def check_proxy(server: ServerSpec) -> Checked:
    """A proxy that is not switched off for loopback catches SGLang's own warm-up request."""
    env = {name.lower(): value for name, value in {**os.environ, **server.env}.items()}
    used = [name for name in PROXIES if env.get(name)]
    exempt = {entry.strip() for entry in env.get("no_proxy", "").split(",")}
    if not used or exempt & {"*", server.host}:
        return Checked([])
    return Checked(
        [
            Finding(
                "proxy",
                "warning",
                f"{used[0]} is set ({proxy_address(env[used[0]])}) and no_proxy does not name {server.host}: the"
                " server's own warm-up request would go to the proxy",
                f"add NO_PROXY: {server.host} to the server's `env` in the inventory",
            )
        ]
    )


# --------------------------------------------------------------------------- disk and memory
def check_disk(path: str, need_bytes: int) -> Checked:
    """Space and inodes where shards will lie, at the nearest folder that exists."""
    target = os.path.abspath(os.path.expanduser(path))
    facts = host.disk("capture", target)
    existing = target
    while not os.path.exists(existing):
        existing = os.path.dirname(existing)
    findings = []
    if not os.access(existing, os.W_OK | os.X_OK):
        findings.append(Finding("disk", "blocker", f"{existing} may not be written", "choose another capture.dir"))
    need_bytes = max(need_bytes, LEAST_DISK)
    if facts.free_bytes < need_bytes:
        text = f"{facts.free_bytes / GIB:.2f} GiB free at {existing}, {need_bytes / GIB:.2f} GiB needed"
        findings.append(Finding("disk", "blocker", text, "free space, or choose another capture.dir"))
    if 0 <= facts.free_inodes < LOW_INODES:
        findings.append(Finding("disk", "warning", f"only {facts.free_inodes} inodes free at {existing}", "free some"))
    if not findings:
        findings.append(Finding("disk", "ok", f"{facts.free_bytes / GIB:.1f} GiB free at {existing} ({facts.fstype})"))
    return Checked(findings, {"disk_free_bytes": facts.free_bytes})


def check_capture_memory(args: ProbeArgs) -> Checked:
    """What the taps of all servers take: for each replica of a server, or group of its attention, one in each pipeline
    stage writes."""
    writers = sum(server.dp * server.pp for server in args.servers)
    if not writers:
        return Checked([])
    ring, device = args.ring_bytes / GIB, args.device_bytes / GIB
    text = (
        f"capture takes at most {ring:.1f} GiB of pinned memory for each of {writers} writing processes, and "
        f"{device:.1f} GiB of its GPU beside SGLang's pool"
    )
    free = _memory()[1]
    if free < writers * args.ring_bytes + LOW_MEMORY:
        text += f"; {free / GIB:.1f} GiB of memory are available"
        return Checked([Finding("capture", "warning", text, "set a smaller capture.ring_bytes")])
    return Checked([Finding("capture", "ok", text)])


def _memory() -> Tuple[int, int]:
    """Bytes of main memory, and how many of them are available, from /proc/meminfo."""
    lines = procfs.parse_fields(procfs.read_text("/proc/meminfo") or "")
    total, free = (int(lines.get(name, "0 kB").split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return total, free


def check_memory() -> Checked:
    """Main memory."""
    total, free = _memory()
    text = f"{free / GIB:.1f} of {total / GIB:.1f} GiB memory available"
    low = free < LOW_MEMORY
    finding = Finding("memory", "warning" if low else "ok", text, "end what uses it" if low else "")
    return Checked([finding], {"memory_bytes": total})


def check_shm(servers: Sequence[ServerSpec]) -> Checked:
    """Shared memory (/dev/shm), which tensor parallelism uses; a container often gets 64 MiB of it."""
    facts = host.disk("shm", "/dev/shm")  # noqa: S108 (asks for its size, writes nothing)
    text = f"shared memory has {facts.free_bytes / GIB:.1f} GiB free"
    if facts.free_bytes < LOW_SHM and any(server.ranks > 1 for server in servers):
        return Checked([Finding("shm", "warning", text, "start the container with --ipc=host or a larger --shm-size")])
    return Checked([Finding("shm", "ok", text)])


# --------------------------------------------------------------------------- GPUs
def check_gpus(servers: Sequence[ServerSpec]) -> Checked:
    """GPUs by nvidia-smi; none is fine where every server runs on the CPU."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        output = run_command(query, 10.0)
        if output.status:
            raise ProbeFailed(
                f"nvidia-smi ended with {output.status}: {(output.stderr or output.stdout).strip()[:200]}"
            )
    except ProbeFailed as failure:
        if servers and all(_on_cpu(server) for server in servers):
            return Checked([Finding("gpus", "ok", "no GPU, and none is asked for")])
        return Checked([Finding("gpus", "warning", f"no GPU seen: {failure}", "check the driver, or the container's")])
    rows = [[cell.strip() for cell in line.split(",")] for line in output.stdout.splitlines() if line.count(",") == 2]
    names = [f"{name} {total} MiB" for name, total, _ in rows]
    findings = [Finding("gpus", "ok", f"{len(names)} GPUs: {names[0] if names else 'none'}")]
    for server in servers:
        findings += _gpu_findings(server, len(names))
    return Checked(findings, {"gpus": names})


def _gpu_findings(server: ServerSpec, count: int) -> List[Finding]:
    missing = [gpu for gpu in server.gpus if gpu >= count]
    if missing:
        text = f"server {server.name} wants GPUs {missing}, the host has {count}"
        return [Finding("gpus", "blocker", text, "correct `gpus` in the inventory")]
    if server.ranks > (len(server.gpus) or count) and not _on_cpu(server) and "--nnodes" not in server.args:
        text = f"server {server.name} has {server.ranks} ranks for {len(server.gpus) or count} GPUs"
        return [Finding("gpus", "blocker", text, "correct `tp`, `dp`, `pp` or `gpus` in the inventory")]
    return []


def _on_cpu(server: ServerSpec) -> bool:
    return "--device=cpu" in server.args or ["--device", "cpu"] in [
        server.args[n : n + 2] for n in range(len(server.args))
    ]


# --------------------------------------------------------------------------- means of diagnosis, limits
def check_tools(pythons: Sequence[str]) -> Checked:
    """Tools that make a verdict on a hang surer; without them the evidence is from /proc alone."""
    findings = []
    if shutil.which("strace") is None:
        findings.append(Finding("tools", "warning", "strace is missing: no system calls in evidence", "install strace"))
    try:
        find_py_spy(os.path.expanduser(pythons[0]) if pythons else "")
    except ProbeFailed:
        text = "py-spy is missing: no Python stacks in evidence"
        findings.append(Finding("tools", "warning", text, "pip install py-spy beside sglang"))
    return Checked(findings or [Finding("tools", "ok", "strace and py-spy are there")])


def check_ptrace() -> Checked:
    """May this user look into its own processes? Yama's scope and the ptrace capability decide."""
    scope = (procfs.read_text("/proc/sys/kernel/yama/ptrace_scope") or "0").strip()
    status = procfs.parse_fields(procfs.read_text("/proc/self/status") or "")
    capable = bool(int(status.get("CapEff", "0"), 16) >> CAP_SYS_PTRACE & 1)
    if scope == "0" or (capable and scope != "3"):
        return Checked([Finding("ptrace", "ok", "processes may be traced")])
    fix = "run as root, or sysctl kernel.yama.ptrace_scope=0, or give the container CAP_SYS_PTRACE"
    return Checked([Finding("ptrace", "warning", f"tracing is not allowed (ptrace_scope {scope})", fix)])


def check_nofile() -> Checked:
    """The limit of open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < NOFILE:
        fix = "raise nofile in limits.conf, or --ulimit nofile of the container"
        return Checked([Finding("nofile", "warning", f"at most {hard} open files; SGLang wants {NOFILE}", fix)])
    return Checked([Finding("nofile", "ok", f"{soft} open files, up to {hard}")])
