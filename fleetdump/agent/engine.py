"""Questions to the server's interpreter about the engine it would import, asked without importing the engine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from fleetdump.agent.protocol import AgentFailure, from_json

ENGINE = "sglang"

# find_spec of a top-level package runs none of its code. The distribution counts only where it installed that very
# folder: PYTHONPATH may put an unpacked package in front of an installed one.
_QUERY = r"""
import base64, csv, importlib.metadata, importlib.util, json, os, re, sys, sysconfig
sys.path[:] = [p for p in sys.path if p]
asked = json.load(sys.stdin)
name = asked["package"]
answer = {"python_version": "%d.%d.%d" % sys.version_info[:3]}
spec = importlib.util.find_spec(name)
if spec is not None and spec.submodule_search_locations:
    package = os.path.realpath(list(spec.submodule_search_locations)[0])
    answer["package"] = package
    parent = os.path.dirname(package)
    on_path = any(os.path.realpath(p) == parent for p in sys.path)
    answer["site"] = parent if on_path else os.path.realpath(sysconfig.get_paths()["purelib"])
    recorded = {}
    release = ""
    for dist in importlib.metadata.distributions(name=name):
        if os.path.realpath(str(dist.locate_file(name))) == package:
            release = dist.version
            for row in csv.reader((dist.read_text("RECORD") or "").splitlines()):
                if len(row) > 1 and row[1].startswith("sha256="):
                    recorded[row[0]] = row[1][7:]
            break
    if not release:
        for file in ("_version.py", "version.py"):
            try:
                with open(os.path.join(package, file)) as f:
                    found = re.search(r"^__version__\b.*=\s*['\"]([^'\"]+)['\"]", f.read(), re.M)
            except OSError:
                continue
            if found:
                release = found.group(1)
                break
    if not release:
        try:
            release = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    answer["release"] = release
    modules = answer["modules"] = {}
    hashes = answer["recorded"] = {}
    for module in asked["modules"]:
        relative = module.replace(".", "/")
        for candidate in [module] if "/" in module else [relative + ".py", relative + "/__init__.py"]:
            path = os.path.join(parent, candidate)
            if os.path.isfile(path):
                modules[module] = path
                if candidate in recorded:
                    text = recorded[candidate]
                    hashes[module] = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
                break
json.dump(answer, sys.stdout)
"""


@dataclass
class EngineFacts:
    """The engine that ``python`` would import, asked in environment ``env`` (None: our own). ``package`` is its folder,
    ``site`` the folder on ``sys.path`` where modules beside it are found. ``modules`` has the file of each module asked
    for that exists, ``recorded`` the SHA-256 that the wheel's RECORD gives for it (none for an editable install); any
    file of the package may be asked for by its path, such as ``sglang/srt/x.json``."""

    python: str
    python_version: str
    package: str
    site: str
    release: str
    env: Optional[Dict[str, str]] = field(default=None, repr=False)
    modules: Dict[str, str] = field(default_factory=dict)
    recorded: Dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For people and manifests, for instance ``sglang 0.5.20``."""
        return f"{ENGINE} {self.release or '(release unknown)'}"


def find_python(python: str) -> str:
    """The absolute path of an interpreter; raises ``AgentFailure`` not_found."""
    path = shutil.which(os.path.expanduser(python))
    if path is None:
        raise AgentFailure(
            "not_found",
            "the server's Python interpreter does not exist or may not be run",
            where=python,
            next_step="set `python` in the inventory to the interpreter that imports sglang",
        )
    # Not resolved: a virtual environment's interpreter is a link, and its own path is what makes it that environment.
    return os.path.abspath(path)


def query(
    python: str, modules: Sequence[str] = (), *, env: Optional[Mapping[str, str]] = None, timeout: float = 30.0
) -> EngineFacts:
    """Ask ``python`` where sglang, its release and ``modules`` are; raises ``AgentFailure`` (not_found, timeout,
    failed). ``env`` replaces the environment."""
    path = find_python(python)
    answer = run_json(path, ["-B", "-c", _QUERY], {"package": ENGINE, "modules": list(modules)}, env, timeout)
    if "package" not in answer:
        raise AgentFailure(
            "not_found",
            f"{ENGINE} is not installed for this interpreter",
            where=path,
            why=f"Python {answer.get('python_version')} finds no package {ENGINE}",
            next_step=f"install it there (`{path} -m pip install sglang`) or set `python` in the inventory",
        )
    return from_json(EngineFacts, {"python": path, "env": None if env is None else dict(env), **answer})


def run_json(
    python: str, args: Sequence[str], request: Any, env: Optional[Mapping[str, str]] = None, timeout: float = 30.0
) -> Any:
    """Run the server's interpreter with a JSON request on stdin and return the JSON that it prints."""
    try:
        done = subprocess.run(
            [python, *args],
            input=json.dumps(request).encode(),
            capture_output=True,
            env=dict(env) if env is not None else None,
            cwd="/",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailure(
            "timeout",
            f"the server's interpreter did not answer within {timeout:.0f} s",
            where=python,
            next_step="see whether its file system (NFS?) answers: run the interpreter by hand",
        ) from error
    except OSError as error:
        raise AgentFailure("not_found", "the interpreter cannot be run", where=python, why=str(error)) from error
    lines = done.stdout.decode(errors="replace").strip().splitlines()
    try:
        # The last line: a .pth file or sitecustomize of the environment may print too.
        return json.loads(lines[-1])
    except (IndexError, ValueError) as error:
        raise AgentFailure(
            "failed",
            "the server's interpreter did not answer a plain question",
            where=python,
            why=done.stderr.decode(errors="replace").strip()[-600:] or f"it ended with status {done.returncode}",
            next_step="run the interpreter by hand and repair its installation",
        ) from error


def bundle_root() -> Path:
    """The folder that holds our ``fleetdump`` package, for interpreters that run a module of it."""
    return Path(__file__).resolve().parents[2]
