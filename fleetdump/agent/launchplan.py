"""What a launch would run: the full command line and environment, and what stands in its way before anything starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Set, Tuple

from fleetdump.agent import engine, flagrules, procfs
from fleetdump.agent.arguments import added_arguments, merge_arguments, refuse_own_options
from fleetdump.agent.configfile import config_arguments, config_path
from fleetdump.agent.neighbours import describe_port_owner
from fleetdump.agent.patching import IMPORT_HOOK
from fleetdump.agent.protocol import AgentFailure, to_json
from fleetdump.agent.servermessages import LaunchArgs
from fleetdump.agent.specs import CaptureSpec, Expectation, PatchSpec, ServerSpec

NOT_INHERITED = ("SSH_", "SUDO_", "FLEETDUMP_", "OLDPWD", "PWD", "_")


@dataclass
class LaunchPlan:
    """The full command line and environment; they may hold secrets and are neither logged nor stored."""

    argv: List[str]
    env: Dict[str, str]
    identity: str
    added: List[str]
    """Of ``argv``, what the patch added to the server's own arguments."""
    expected: List[Expectation] = field(default_factory=list)
    """What the server must say of itself."""
    hook: str = ""
    """The import hook's folder, where the patch is delivered so."""


def plan(args: LaunchArgs) -> LaunchPlan:
    """Raises ``AgentFailure``: usage for arguments that fields of the inventory stand for, conflict for
    what the patch cannot be right with, and what ``engine.query`` raises."""
    spec = args.server
    refuse_own_options(spec.args)
    argv = [
        engine.find_python(spec.python),
        "-m",
        "sglang.launch_server",
        "--model-path",
        os.path.expanduser(spec.model_path),
    ]
    argv += ["--host", spec.host, "--port", str(spec.port), "--tp-size", str(spec.tp)]
    overrides = bool(config_path(spec))  # an option of the command line wins over the same one in a file of --config
    if spec.dp > 1 or overrides:
        argv += ["--dp-size", str(spec.dp)]
    if spec.pp > 1 or overrides:
        argv += ["--pp-size", str(spec.pp)]
    wanted, expected = _wishes(args)
    argv += merge_arguments(spec.args, wanted)
    env = own_environment(spec)
    identity = identity_of(argv, env, args.patch.sha256 if args.patch else "", args.capture, args.delivery)
    return LaunchPlan(argv, env, identity, added_arguments(spec.args, wanted), expected)


def own_environment(spec: ServerSpec) -> Dict[str, str]:
    """The variables that are this server's own; they may be secrets."""
    env = dict(spec.env)
    if spec.gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, spec.gpus))
    return env


def identity_of(
    argv: List[str], env: Dict[str, str], patch_sha256: str, capture: Optional[CaptureSpec], delivery: str
) -> str:
    """``ServerRecord.identity`` of such a launch."""
    what = [argv, env, patch_sha256, to_json(capture)]
    if delivery == IMPORT_HOOK:
        what.append(delivery)
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _wishes(args: LaunchArgs) -> Tuple[List[str], List[Expectation]]:
    """What the patch wants on the command line, and what the server must say of itself then."""
    patch, server = args.patch, args.server
    if patch is None:
        return [], []
    refuse_arguments(patch, server)
    release = engine.query(server.python, env=environment_of(server)).release
    wanted = flagrules.patch_arguments(patch, release, server.without)
    return wanted, flagrules.expectations(patch, release, server.without)


def refuse_arguments(patch: PatchSpec, server: ServerSpec) -> None:
    """Raise ``AgentFailure`` conflict for arguments with which the patch would be wrong, wherever they stand. What a
    file of ``--config`` that cannot be read holds shows once the server runs."""
    wrong = list(flagrules.refused(patch, server.args))
    place = "its `args` in the inventory"
    if not wrong and patch.refused_args:
        with contextlib.suppress(AgentFailure):
            wrong = list(flagrules.refused(patch, config_arguments(server, environment_of(server))))
            place = config_path(server)
    if wrong:
        raise AgentFailure(
            "conflict",
            f"server {server.name} has arguments that patch {patch.name} cannot be right with",
            where=place,
            why="; ".join(wrong),
            next_step="leave them out there, or launch it as it is without the patch (--no-patch)",
        )


def inherited_environment() -> Dict[str, str]:
    """Our own environment without what belongs to the SSH session; bytecode of sglang is read but never written,
    so that the installed package stays as it is."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED[:3]) and k not in NOT_INHERITED}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    return env


def environment_of(server: ServerSpec) -> Dict[str, str]:
    """What a launched server finds in its environment, but for what the launch itself adds."""
    return {**inherited_environment(), **server.env}


def check(args: LaunchArgs, own: Set[int]) -> None:
    """Everything that would make the server fail at once, before anything is started or stopped."""
    spec = args.server
    engine.query(spec.python, env=environment_of(spec))
    model = os.path.expanduser(spec.model_path)
    if spec.model_path.startswith(("/", "~", ".")) and not os.path.isdir(model):
        raise AgentFailure(
            "not_found",
            "the model directory does not exist",
            where=model,
            next_step="set `model_path` in the inventory",
        )
    owner = procfs.port_owner(spec.port)
    if owner is not None and owner.pid not in own:
        raise AgentFailure(
            "conflict",
            f"port {spec.port} is taken",
            where=f"server {spec.name}",
            why=describe_port_owner(owner),
            next_step="stop that process, or give the server another `port` in the inventory",
        )
