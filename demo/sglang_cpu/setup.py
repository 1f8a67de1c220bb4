"""Install the real SGLang for the CPU and make the demo's model: `python3 -m demo.sglang_cpu.setup`.

Idempotent and resumable: each step leaves the hash of what it was made from, and runs again only when that changes.
Where torch comes from is one variable, FLEETDUMP_TORCH_SPEC (default ``torch==2.13.0``; a wheel's path or URL works
too); FLEETDUMP_PIP_ARGS are further arguments for every pip call, for instance an index with CPU wheels.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from demo.sglang_cpu import recipe

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
SHIM = HERE / "shim"
STAMPS = recipe.VENV / "fleetdump-recipe.json"
TORCH_SPEC = os.environ.get("FLEETDUMP_TORCH_SPEC") or "torch==2.13.0"
PIP_ARGS = shlex.split(os.environ.get("FLEETDUMP_PIP_ARGS", ""))


class SetupError(Exception):
    """Something that the user must do first; the text says what."""


def find_python() -> Path:
    """A Python for which all pinned wheels exist; raises SetupError naming what to install."""
    for version in recipe.PYTHON_VERSIONS:
        for name in (f"python{version}", "python3", sys.executable):
            path = shutil.which(name)
            if path and _can_make_venv(path, version):
                return Path(path)
    wanted = " or ".join(recipe.PYTHON_VERSIONS)
    raise SetupError(
        f"SGLang {recipe.SGLANG_VERSION} needs Python {wanted} with the venv module, and there is none on PATH.\n"
        f"Debian 12: apt-get install python3 python3-venv    Ubuntu 24.04: the same    elsewhere: pyenv install 3.11"
    )


def _can_make_venv(python: str, version: str) -> bool:
    probe = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    answer = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    return answer.returncode == 0 and answer.stdout.strip() == version


def digest(*parts: str | Path) -> str:
    """SHA-256 over texts and files (folders with all that is in them)."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            whole.update(part.encode() + b"\0")
            continue
        files = [part] if part.is_file() else sorted(part.rglob("*.py"))
        for file in files:
            whole.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return whole.hexdigest()


def make_venv() -> None:
    python = find_python()
    shutil.rmtree(recipe.VENV, ignore_errors=True)
    recipe.VENV.parent.mkdir(parents=True, exist_ok=True)
    run([str(python), "-m", "venv", str(recipe.VENV)])


def install_torch() -> None:
    pip("install", TORCH_SPEC)


def install_packages() -> None:
    pip("install", "--no-deps", "-r", str(REQUIREMENTS))


def install_shim() -> None:
    site_packages = next((recipe.VENV / "lib").glob("python3*/site-packages"))
    shutil.copytree(SHIM, site_packages, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (site_packages / "sglang_cpu_shim.pth").write_text("import sglang_cpu_shim\n")
    check = "import sglang, torch, transformers; print('sglang', sglang.__version__, 'torch', torch.__version__)"
    run([str(recipe.PYTHON), "-c", check], env=recipe.server_env())


def make_model() -> None:
    shutil.rmtree(recipe.MODEL, ignore_errors=True)
    run([str(recipe.PYTHON), str(HERE / "make_model.py"), str(recipe.MODEL)], env=recipe.server_env())


def pip(*arguments: str) -> None:
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    run([str(recipe.PYTHON), "-m", "pip", arguments[0], *quiet, *PIP_ARGS, *arguments[1:]])


def run(argv: list[str], env: dict[str, str] | None = None) -> None:
    print("  $", shlex.join(argv), flush=True)
    subprocess.run(argv, check=True, env={**os.environ, **(env or {})})


def read_stamps() -> dict[str, str]:
    try:
        stamps: dict[str, str] = json.loads(STAMPS.read_text())
    except (OSError, ValueError):
        return {}
    return stamps


def main() -> int:
    """Run the steps whose inputs changed; a changed step makes those after it run again."""
    steps: list[tuple[str, str, Callable[[], None]]] = [
        ("venv", digest(*recipe.PYTHON_VERSIONS), make_venv),
        ("torch", digest(TORCH_SPEC), install_torch),
        ("packages", digest(REQUIREMENTS), install_packages),
        ("shim", digest(SHIM), install_shim),
        ("model", digest(HERE / "make_model.py"), make_model),
    ]
    began = time.monotonic()
    key = ""
    for name, inputs, step in steps:
        key = digest(key, inputs)
        if read_stamps().get(name) == key and (name != "model" or (recipe.MODEL / "config.json").exists()):
            continue
        step_began = time.monotonic()
        print(f"sglang-cpu: {name} ...", flush=True)
        step()
        STAMPS.write_text(json.dumps({**read_stamps(), name: key}, indent=1))
        print(f"sglang-cpu: {name} took {time.monotonic() - step_began:.1f} s", flush=True)
    where = f"{recipe.PYTHON} and {recipe.MODEL}"
    print(f"sglang-cpu: SGLang {recipe.SGLANG_VERSION} is ready ({where}; {time.monotonic() - began:.1f} s)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SetupError as error:
        sys.exit(f"sglang-cpu: {error}")
    except subprocess.CalledProcessError as error:
        command = shlex.join(map(str, error.cmd))
        print(f"sglang-cpu: status {error.returncode} from: {command}", file=sys.stderr)
        sys.exit("Fix the cause above and run setup again: it goes on with that step.")
