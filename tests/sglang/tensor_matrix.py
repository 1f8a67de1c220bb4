"""What the tap captures on real servers of several SGLang releases, against transformers, in float32.

``python -m tests.sglang.tensor_matrix --engines DIR --models DIR [--releases ...] [--tp N]``: ENGINES holds unpacked
wheels by release (``DIR/0.5.14/sglang``), MODELS tiny models by name. Each release serves each model once, with the
patch, the flags that it chooses and chunks of 64 tokens. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from demo.sglang_cpu import recipe
from fleetdump.agent.applicable import choose_edits
from fleetdump.agent.edit import apply_edits
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.shards import close_dead
from fleetdump.patches import find_patch, load_patch
from tests.sglang.cpuserver import SglangEnv, session_pids, start_server
from tests.sglang.test_tap_real import generate, some_prompts, tap_json, wait_for_rows

HERE = Path(__file__).parent
LAYERS = [0, 3, 6]
PROMPTS = 16
SPEC = load_patch(find_patch("hidden-states"))


@contextmanager
def patched(engine: Path, release: str, architecture: str) -> Iterator[dict[str, int]]:
    """The unpacked wheel with our patch in it; gives the number of lines that went into each module."""
    originals: dict[Path, bytes] = {}
    lines = {}
    try:
        edits = choose_edits(SPEC, release, [architecture])
        for module in dict.fromkeys(edit.module for edit in edits):
            path = engine / (module.replace(".", "/") + ".py")
            originals[path] = path.read_bytes()
            mine = [edit for edit in edits if edit.module == module]
            edited = apply_edits(originals[path].decode(), mine, release, "fleetdump:").source
            lines[module] = edited.count("# fleetdump:")
            path.write_text(edited)
        for name, text in SPEC.files.items():
            (engine / name).write_text(text)
        yield lines
    finally:
        for path, data in originals.items():
            path.write_bytes(data)
        for name in SPEC.files:
            (engine / name).unlink(missing_ok=True)


def serve(env: SglangEnv, engine: Path, tp: int, folder: Path) -> dict[str, Any]:
    """One server's life: prompts in one batch, then death, then the comparison."""
    architecture = json.loads((env.model / "config.json").read_text())["architectures"][0]
    variables = {"FLEETDUMP_TAP_CONFIG": str(tap_json(folder, LAYERS, tp)), "PYTHONPATH": str(engine)}
    flags = [*patch_arguments(SPEC, env.version), "--chunked-prefill-size", "64"]
    prompts, run = some_prompts("r1", PROMPTS), folder / "cap" / "r1"
    with patched(engine, env.version, architecture) as lines:
        with start_server(env, folder / "server.log", tp, flags, variables) as server:
            marks = (folder / "server.log").read_text().count(SPEC.mark)
            generate(server, prompts)
            wait_for_rows(run / "journal-main-1f0c77aa-r0.jsonl", sum(map(len, prompts.values())))
            for pid in session_pids(server.pid):
                os.kill(pid, signal.SIGKILL)
        finish(run)
    (folder / "prompts.json").write_text(json.dumps(prompts))
    command = [str(env.python), str(HERE / "compare_hidden_states.py"), str(env.model), str(run)]
    done = subprocess.run([*command, str(folder / "prompts.json")], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(done.stderr[-600:])
    return {**json.loads(done.stdout), "marks": marks, "inserted_lines": lines, "start_seconds": round(server.seconds)}


def finish(run: Path) -> None:
    """Close what the dead writer left. A killed process holds its locks until its last thread is gone."""
    end = time.monotonic() + 30
    while list(run.glob("*.part")):
        assert time.monotonic() < end, "a shard cannot be closed"
        close_dead(run)
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--releases", nargs="+", required=True)
    parser.add_argument("--only", nargs="*", default=[], help="names of models, instead of all")
    parser.add_argument("--tp", type=int, default=1)
    arguments = parser.parse_args()
    python = Path(os.environ.get("FLEETDUMP_SGLANG_PYTHON") or recipe.PYTHON)
    result: dict[str, Any] = {}
    for release in arguments.releases:
        for model in sorted(arguments.models.iterdir()):
            if arguments.only and model.name not in arguments.only:
                continue
            env = replace(SglangEnv(python, model, release), args=recipe.SERVER_ARGS)
            folder = Path(tempfile.mkdtemp(prefix="fleetdump-matrix-"))
            try:
                row = serve(env, arguments.engines / release, arguments.tp, folder)
                shutil.rmtree(folder)
            except (AssertionError, OSError, subprocess.SubprocessError) as error:
                row = {"error": str(error)[-1500:], "folder": str(folder)}
            print(release, model.name, json.dumps(row)[:300], file=sys.stderr, flush=True)
            result.setdefault(release, {})[model.name] = row
    print(json.dumps({"tp": arguments.tp, "layers": LAYERS, "detail": result}, indent=1))


if __name__ == "__main__":
    main()
