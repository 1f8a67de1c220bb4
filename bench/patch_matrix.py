"""Apply and revert the hidden-states patch on every SGLang release in scope: ``python -m bench.patch_matrix``.

Each release's wheel is downloaded once (``build/wheels``) and its files that the patch may touch are unpacked into a
small virtual environment (``build/matrix``), installed as pip would have done it. For each model file the patch is
made in memory (``agent/edit.py``), then applied and reverted there for a model of a fitting architecture
(``agent/patching.py``). Prints one JSON object; ends with 1 when a pair fails or more lines go into one file than
``MAX_INSERTED_LINES``.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.edit import apply_edits
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.patchsurvey import MARKER
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.specs import PatchSpec
from fleetdump.patches import find_patch, load_patch

BUILD = Path(__file__).resolve().parents[1] / "build"
MAX_INSERTED_LINES = 6
RELEASES = (
    *("0.5.5", "0.5.5.post1", "0.5.5.post2", "0.5.5.post3", "0.5.6", "0.5.6.post1", "0.5.6.post2", "0.5.7", "0.5.8"),
    *("0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11", "0.5.12", "0.5.12.post1", "0.5.13", "0.5.13.post1"),
    *("0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22"),
    "0.5.23",
)
WHEEL_OF = ("--python-version", "3.11", "--implementation", "cp", "--abi", "cp311", "--abi", "none")
PLATFORMS = ("manylinux_2_34_x86_64", "manylinux_2_28_x86_64", "manylinux2014_x86_64")


@dataclass
class Pair:
    """How one model file of one release went; ``inserted_lines`` counts those in that file."""

    applied: bool = False
    compiled: bool = False
    inserted_lines: int = 0
    reverted_identical: bool = False
    also: dict[str, int] | None = None
    """Inserted lines in the other files that serving this model needs."""
    error: str = ""


@dataclass
class Install:
    """A virtual environment that holds a part of one release."""

    root: Path
    release: str

    @property
    def python(self) -> Path:
        return self.root / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

    def file(self, module: str) -> Path:
        return self.site / (module.replace(".", "/") + ".py")

    def tree(self) -> dict[str, str]:
        """SHA-256 of every file."""
        files = [path for path in sorted(self.site.rglob("*")) if path.is_file()]
        return {str(path.relative_to(self.site)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def wheel(release: str) -> Path:
    """The wheel of a release, from the cache or by pip."""
    cache = BUILD / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    if not list(cache.glob(f"sglang-{release}-*.whl")):
        platforms = [word for name in PLATFORMS for word in ("--platform", name)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, *WHEEL_OF, *platforms, "--dest", str(cache), f"sglang=={release}"], check=True)
    return next(cache.glob(f"sglang-{release}-*.whl"))


def unpack(release: str, modules: Sequence[str]) -> Install:
    """Install the files of ``modules``, and what says that a package is there."""
    made = Install(BUILD / "matrix" / release, release)
    shutil.rmtree(made.root, ignore_errors=True)
    (made.root / "bin").mkdir(parents=True, exist_ok=True)
    base = Path(getattr(sys, "_base_executable", sys.executable))
    made.python.symlink_to(base)
    (made.root / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    wanted = {module.replace(".", "/") + ".py" for module in modules} | {"sglang/__init__.py"}
    with zipfile.ZipFile(wheel(release)) as archive:
        names = [n for n in archive.namelist() if n in wanted or n.endswith(("dist-info/METADATA", "dist-info/RECORD"))]
        archive.extractall(made.site, names)
    return made


def model_directory(architecture: str) -> Path:
    """A model directory of that architecture, as far as the agent reads it."""
    folder = BUILD / "matrix" / "models" / architecture
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], "num_hidden_layers": 1}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def try_pair(spec: PatchSpec, made: Install, module: str, architecture: str) -> Pair:
    """Make the edits of a model file in memory, then on disk, and take them out again."""
    edits = choose_edits(spec, made.release, [architecture])
    modules = list(dict.fromkeys(edit.module for edit in edits))
    marker = f"{MARKER}{spec.name}@{spec.version}"
    inserted: dict[str, int] = {}
    result = Pair()
    for name in modules:
        source = made.file(name).read_bytes().decode()
        mine = [edit for edit in edits if edit.module == name]
        edited = apply_edits(source, mine, made.release, marker).source
        compile(edited, name, "exec", dont_inherit=True)
        lines = edited.splitlines(keepends=True)
        assert "".join(line for line in lines if marker not in line) == source, f"{name}: other lines changed"
        inserted[name] = sum(marker in line for line in lines)
    before = made.tree()
    context = AgentContext(Request("matrix", {}), State(made.root / "state"))
    models = [str(model_directory(architecture))]
    done = patch(PatchArgs(python=str(made.python), patch=spec, models=models), context)
    after = made.tree()
    changed = {name for name in before if before[name] != after.get(name)}
    expected = {str(made.file(name).relative_to(made.site)) for name in modules}
    result.applied = done.after.state == "ours" and changed == expected
    for name in modules:
        ast.parse(made.file(name).read_bytes())
        compile(made.file(name).read_bytes(), name, "exec", dont_inherit=True)
    result.compiled = True
    result.inserted_lines = inserted.pop(module)
    result.also = inserted or None
    undone = revert(RevertArgs(python=str(made.python)), context)
    result.reverted_identical = undone.changed and made.tree() == before
    return result


def model_files(spec: PatchSpec) -> dict[str, str]:
    """Each model file in scope, and an architecture that asks for it first."""
    files: dict[str, str] = {}
    for architecture, modules in spec.architectures.items():
        files.setdefault(modules[0], architecture)
    return files


def why_not(spec: PatchSpec, made: Install, module: str, architecture: str) -> str:
    """Why a file is not patched on a release; empty when it is."""
    if not made.file(module).exists():
        return "the release has no such file"
    chosen = {edit.module for edit in choose_edits(spec, made.release, [architecture])}
    if module in chosen:
        return ""
    others = [short(name) for name in spec.architectures[architecture] if name in chosen]
    return f"no loop of its own: {architecture} runs that of {others[0]}"


def short(module: str) -> str:
    return module.rpartition(".")[2]


def run(spec: PatchSpec, releases: Sequence[str]) -> dict[str, Any]:
    """The whole matrix."""
    detail: dict[str, dict[str, Any]] = {}
    skipped: list[dict[str, str]] = []
    for release in releases:
        modules = [edit.module for edit in spec.edits]
        made = unpack(release, modules)
        detail[release] = {}
        for module, architecture in model_files(spec).items():
            reason = why_not(spec, made, module, architecture)
            if reason:
                skipped.append({"release": release, "file": short(module), "reason": reason})
                continue
            try:
                pair = try_pair(spec, made, module, architecture)
            except (AgentFailure, ValueError, SyntaxError, AssertionError) as failure:
                error = failure.error if isinstance(failure, AgentFailure) else None
                pair = Pair(error=f"{error.what}: {error.why}" if error else str(failure))
                made = unpack(release, modules)  # whatever is left of that pair is not the next one's
            detail[release][short(module)] = asdict(pair)
    pairs = list(all_pairs(detail))
    return {
        "pairs": len(pairs),
        "applied": sum(pair["applied"] and pair["compiled"] for pair in pairs),
        "reverted_identical": sum(pair["reverted_identical"] for pair in pairs),
        "max_inserted_lines": max(
            max([pair["inserted_lines"], *(pair["also"] or {}).values()], default=0) for pair in pairs
        ),
        "releases": len(detail),
        "skipped": skipped,
        "detail": detail,
    }


def all_pairs(detail: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for files in detail.values():
        yield from files.values()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--releases", nargs="+", default=RELEASES, help="instead of all in scope")
    arguments = parser.parse_args()
    result = run(load_patch(find_patch("hidden-states")), arguments.releases)
    command = "python -m bench.patch_matrix " + " ".join(sys.argv[1:])
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    print(json.dumps({"command": command.strip(), "date": date, **result}, indent=1))
    good = result["pairs"] == result["applied"] == result["reverted_identical"]
    sys.exit(0 if good and result["max_inserted_lines"] <= MAX_INSERTED_LINES else 1)


if __name__ == "__main__":
    main()
