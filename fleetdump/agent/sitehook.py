"""The import hook, as it runs inside the server: its process finds this file as ``sitecustomize`` on PYTHONPATH.

``hook.json`` beside it names, for each module, the SHA-256 of the file that its edit was made from, and the edited
source. When that module is imported, the edited source runs in its place; every other import goes its usual way. A
module whose file has changed since is not imported at all: it would run without the patch, or with the wrong one.
Children inherit PYTHONPATH and so the hook. A ``sitecustomize`` that stands further back on the path runs as before.

This file is copied out of the agent's bundle: standard library only, and nothing of fleetdump.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any, Dict, Optional, Sequence

HERE = os.path.dirname(os.path.abspath(__file__))


class Finder(MetaPathFinder):
    """Finds the modules of ``hook.json`` where Python would, and has them loaded from their edited source."""

    def __init__(self, modules: Dict[str, Dict[str, str]], folder: str):
        self._modules = modules
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        entry = self._modules.get(fullname)
        if entry is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin:
            spec.loader = Loader(fullname, spec.origin, entry["sha256"], os.path.join(self._folder, entry["edited"]))
            spec.cached = None
        return spec


class Loader(SourceFileLoader):
    """Runs ``edited`` instead of the module's own file, if that one is still what it was edited from."""

    def __init__(self, fullname: str, path: str, sha256: str, edited: str):
        super().__init__(fullname, path)
        self._sha256 = sha256
        self._edited = edited

    def get_code(self, fullname: str) -> CodeType:
        found = hashlib.sha256(self.get_data(self.path)).hexdigest()
        if found != self._sha256:
            text = f"fleetdump: {self.path} has changed since the server was launched; deploy again"
            print(text, file=sys.stderr, flush=True)
            raise ImportError(text, name=fullname, path=self.path)
        # The code bears the edited file's name: tracebacks and inspect then show the lines that really run.
        code: CodeType = compile(self.get_data(self._edited), self._edited, "exec", dont_inherit=True)
        return code


def install(folder: str) -> None:
    """Put the hook of ``folder`` in front of every other finder."""
    with open(os.path.join(folder, "hook.json"), encoding="utf-8") as file:
        description: Dict[str, Any] = json.load(file)
    sys.meta_path.insert(0, Finder(description["modules"], folder))


def run_next(folder: str) -> None:
    """Run the ``sitecustomize`` that ours hides, under its own name, if there is one."""
    path = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != folder]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    install(HERE)
    run_next(HERE)
