"""The checks of a server's engine behind ``probe``: interpreter, release, patch, arguments, who else runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Optional, Sequence

from fleetdump.agent import engine, patching, patchrecord
from fleetdump.agent.arguments import added_arguments
from fleetdump.agent.configfile import config_arguments
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.findings import Checked, blocked
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.launchplan import environment_of, inherited_environment, refuse_arguments
from fleetdump.agent.neighbours import EngineUser, engine_users, file_system_of, is_network
from fleetdump.agent.patchmessages import PatchArgs
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.server import living, readable_records
from fleetdump.agent.specs import Interpreter, PatchSpec, ServerSpec

USE_HOOK = "--delivery import-hook changes no file: the patch is then in the launched server alone"


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


def check_shared(interpreter: Interpreter, servers: Sequence[ServerSpec], state: State, delivery: str) -> Checked:
    """Who else has the files that an in-place patch changes: other servers that run now, and other hosts."""
    if delivery != patching.IN_PLACE:
        return Checked([])
    try:
        facts = engine.query(interpreter.python, env={**inherited_environment(), **interpreter.env})
    except AgentFailure:
        return Checked([])  # check_engine says it
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
    if others and record is not None:
        text = f"{facts.package} is also run by {_names(others, ours)}, with patch {record.patch} {record.version}"
        fix = "stop them before that patch is replaced or reverted"
        findings.append(Finding("shared", "warning", text, fix))
    elif others:
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
    return "; ".join(user.in_words(ours) for user in users)
