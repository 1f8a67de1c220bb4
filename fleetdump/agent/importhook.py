"""The second delivery of a patch: no file of sglang changes; the launched process alone rewrites the module as it is
imported. ``sitehook`` is what runs in that process; here its folder is made."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Dict, List

from fleetdump.agent import patchrecord
from fleetdump.agent.changes import Change
from fleetdump.agent.context import AgentContext
from fleetdump.agent.jsonl import write_json
from fleetdump.agent.patching import IMPORT_HOOK, plan_on_clean, refuse_for_hook
from fleetdump.agent.patchmessages import PatchArgs
from fleetdump.agent.specs import PatchSpec, ServerSpec

EDITED = "edited-source"
"""No Python name: nothing in that folder can be imported by accident."""


def plan(server: ServerSpec, patch: PatchSpec, force: bool, ctx: AgentContext) -> List[Change]:
    """The edits that the server's process will make. Raises ``AgentFailure``: usage for a patch that changes files by
    a diff or script, conflict for an engine whose files hold a patch of ours or that the patch does not fit."""
    refuse_for_hook(patch)
    interpreter = server.interpreter
    models = [server.model_path]
    args = PatchArgs(interpreter.python, patch, True, interpreter.env, force, IMPORT_HOOK, models)
    return plan_on_clean(args, ctx)


def write(folder: Path, patch: PatchSpec, changes: List[Change]) -> None:
    """Make ``folder``, which is to come first on the server's PYTHONPATH, anew."""
    if folder.is_dir():
        shutil.rmtree(str(folder))
    (folder / EDITED).mkdir(mode=0o700, parents=True)
    for name, text in patch.files.items():
        patchrecord.write_durable(folder / name, text.encode())
    modules = {}
    for change in changes:
        edited = os.path.join(EDITED, *change.module.split(".")) + ".py"
        (folder / edited).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        patchrecord.write_durable(folder / edited, change.edited or b"")
        modules[change.module] = {"sha256": patchrecord.sha256(change.original or b""), "edited": edited}
    write_json(folder / "hook.json", {"v": 1, "patch": f"{patch.name}@{patch.version}", "modules": modules})
    # Last: without it the rest of the folder does nothing.
    source = Path(__file__).with_name("sitehook.py").read_bytes()
    patchrecord.write_durable(folder / "sitecustomize.py", source)


def environment(folder: Path, env: Dict[str, str]) -> Dict[str, str]:
    """``env`` with the hook's folder first on PYTHONPATH."""
    path = os.pathsep.join(filter(None, [str(folder), env.get("PYTHONPATH", "")]))
    return {**env, "PYTHONPATH": path}
