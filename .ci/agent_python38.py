"""The agent must run on Python 3.8: check its syntax, and, where the machine has one, import all of it there.

The syntax is checked with ``ast.parse(feature_version=(3, 8))``; a real interpreter is looked for on PATH and among
pyenv's versions. With ``--find`` only prints that interpreter's path (nothing when there is none).
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import fleetdump.agent
names = [m.name for m in pkgutil.walk_packages(fleetdump.agent.__path__, "fleetdump.agent.")]
for name in names:
    importlib.import_module(name)
print(len(names), "modules import on", sys.version.split()[0])
"""


def find_python38() -> str | None:
    """A Python 3.8 that really is one (a pyenv shim on PATH may only complain)."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    candidates = [folder / "python3.8" for folder in folders] + sorted(pyenv.glob("versions/3.8*/bin/python3.8"))
    for path in filter(os.path.exists, candidates):
        answer = subprocess.run([path, "--version"], capture_output=True, text=True)
        if answer.returncode == 0 and answer.stdout.startswith("Python 3.8."):
            return str(path)
    return None


def main() -> int:
    if sys.argv[1:] == ["--find"]:
        print(find_python38() or "")
        return 0
    files = [ROOT / "fleetdump" / "__init__.py", *sorted((ROOT / "fleetdump" / "agent").rglob("*.py"))]
    for file in files:
        ast.parse(file.read_text(encoding="utf-8"), str(file), feature_version=(3, 8))
    print(f"{len(files)} files of the agent parse as Python 3.8")
    python = find_python38()
    if python is None:
        print("no Python 3.8 on this machine: only the syntax was checked")
        return 0
    return subprocess.run([python, "-I", "-B", "-c", IMPORT_ALL, str(ROOT)]).returncode


if __name__ == "__main__":
    sys.exit(main())
