"""What the tap captures on real servers of many SGLang releases and models, against transformers, in float32.

``python -m tests.sglang.tensor_matrix`` (``make test-matrix``) fetches the releases with pip and makes tiny models,
both in ``build/``, then serves each pair of the covering set once, on the CPU, with the patch as the agent delivers
it. How each went is kept at once in ``bench/results/tensor_matrix.json``: run again, it goes on with what is missing,
failed, or was run with another patch. Two may run side by side on different releases (``--only``). Prints one JSON
object; ends with 1 when a pair failed.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from demo.sglang_cpu import recipe
from demo.sglang_cpu.setup import PIP_ARGS, digest
from fleetdump.agent import sitehook
from fleetdump.agent.protocol import to_json
from tests.sglang.matrix_pair import LIMIT, SPEC, Outcome, Pair, Served, try_pair

HERE = Path(__file__).resolve().parent
RESULTS = recipe.ROOT / "bench" / "results" / "tensor_matrix.json"
ENGINES = recipe.BUILD / "engines"
MODELS = recipe.BUILD / "tiny-models"

RELEASES = ("0.5.9", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23")
FAMILIES = (
    *("deepseek-v3", "llama", "qwen3-moe", "qwen2", "qwen3", "qwen2-moe", "glm4-moe", "glm4-moe-lite"),
    *("minimax-m2", "gpt-oss", "qwen3-next"),
)
REQUIRED = FAMILIES[:2]
"""Of these every release must be right with one rank and with two."""
DELIVERIES = ("in-place", "import-hook")
LAST_RESIDUAL, SNAPSHOT = "0.5.20", "0.5.23"
"""Releases for the two kinds of edit: the loop has a local ``residual``, or asks ``residual_batch.snapshot``."""
COVERING = (
    "each release x model at TP 1, where over a model's releases both deliveries meet the prefix cache on and off;"
    f" at TP 2 {' and '.join(REQUIRED)} on each release, the others on {LAST_RESIDUAL} and {SNAPSHOT} (one release for"
    " each kind of edit), with the other delivery and cache than at TP 1; the overlap scheduler and mixed chunks on"
    " both kinds of edit; always chunked"
)
SPANNING = (
    Pair("0.5.9", "llama", 1, "import-hook"),
    Pair(LAST_RESIDUAL, "qwen3-moe", 1, "in-place", ("radix",)),
    Pair(SNAPSHOT, "deepseek-v3", 1, "import-hook"),
)
"""One server for each release that differs in kind; ``make test`` runs the newest, ``make test-nightly`` all."""
QUICK = (
    *SPANNING,
    Pair("0.5.9", "deepseek-v3", 1, "in-place"),
    Pair("0.5.16", "glm4-moe", 1, "in-place"),
    Pair(LAST_RESIDUAL, "deepseek-v3", 2, "import-hook", ("radix",)),
    Pair(LAST_RESIDUAL, "llama", 1, "in-place", ("overlap",)),
    Pair(SNAPSHOT, "qwen3-moe", 2, "in-place"),
)
"""One of everything: each kind of edit and delivery, TP 2, the prefix cache, the overlap scheduler."""


def covering_set() -> list[Pair]:
    """What ``COVERING`` says, the pairs that tell most first."""
    single = {}
    for model_number, model in enumerate(FAMILIES):
        for number, release in enumerate(RELEASES):
            delivery = DELIVERIES[(number + model_number) % 2]
            settings = ("radix",) if (number + model_number) // 2 % 2 else ()
            single[release, model] = Pair(release, model, 1, delivery, settings)
    double = [
        _opposite(single[release, model])
        for model in FAMILIES
        for release in (RELEASES if model in REQUIRED else (LAST_RESIDUAL, SNAPSHOT))
    ]
    extra = [
        Pair(release, model, 1, DELIVERIES[number], (setting,))
        for number, (release, model) in enumerate([(LAST_RESIDUAL, "llama"), (SNAPSHOT, "deepseek-v3")])
        for setting in ("overlap", "mixed")
    ]
    newest = [single[release, model] for release in (SNAPSHOT, LAST_RESIDUAL) for model in FAMILIES]
    every = list(dict.fromkeys([*newest, *double, *extra, *single.values()]))
    return [*filter(_is_first, every), *(pair for pair in every if not _is_first(pair))]


def _is_first(pair: Pair) -> bool:
    """The families that are asked of every release, and every family on the newest."""
    return pair.model in REQUIRED or (pair.release, pair.tp) == (SNAPSHOT, 1)


def _opposite(pair: Pair) -> Pair:
    delivery = DELIVERIES[1 - DELIVERIES.index(pair.delivery)]
    return replace(pair, tp=2, delivery=delivery, settings=() if pair.settings else ("radix",))


# --------------------------------------------------------------------------- what is served
def engine(release: str) -> Path:
    """The unpacked release, fetched by pip on first use; dependencies are those of the SGLang venv."""
    folder = ENGINES / release
    if not folder.exists():
        part = folder.with_name(f"{release}.part")
        shutil.rmtree(part, ignore_errors=True)
        pip = [str(recipe.PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]
        command = [*pip, *PIP_ARGS, "--no-deps", "--compile", "--target", str(part), f"sglang=={release}"]
        subprocess.run(command, check=True, stdout=sys.stderr)
        part.rename(folder)
    return folder


def model(name: str) -> Path:
    """The tiny model, made on first use and when what makes it has changed."""
    folder = MODELS / name
    made_by = digest(HERE / "tiny_models.py", recipe.ROOT / "demo" / "sglang_cpu" / "make_model.py")
    stamp = folder / "made-by"
    if not stamp.exists() or stamp.read_text() != made_by:
        command = [str(recipe.PYTHON), "-m", "tests.sglang.tiny_models", str(MODELS), name]
        env = {**os.environ, **recipe.server_env()}
        subprocess.run(command, check=True, cwd=recipe.ROOT, env=env, stdout=sys.stderr)
        stamp.write_text(made_by)
    return folder


def identity() -> str:
    """Of all that decides what is captured: edits, flags, the tap's code and the import hook's; the beginning of a
    SHA-256. Comments, docstrings and layout of the code are no part of it, nor what the patch refuses or calls
    verified. Python releases write syntax trees differently: with another one, outcomes count as older."""
    edits = [replace(edit, verified=[]) for edit in SPEC.edits]
    flags = [(arg.flag, arg.first_release, arg.last_release) for arg in SPEC.release_args]
    code = {name: tree_of(text) for name, text in SPEC.files.items()}
    code["sitehook"] = tree_of(Path(sitehook.__file__).read_text())
    decisive = [to_json(edits), SPEC.server_args, flags, SPEC.architectures, code]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]


def tree_of(source: str) -> str:
    """The syntax tree of a module, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # texts that are statements are documentation
            node.body = [  # type: ignore[attr-defined]
                part for part in body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            ]
    return ast.dump(tree)


# --------------------------------------------------------------------------- results
def read_results() -> dict[str, Outcome]:
    """What earlier runs found, by the key of a pair that is still in the covering set."""
    try:
        detail = json.loads(RESULTS.read_text())["detail"]
    except (OSError, ValueError, KeyError):
        return {}
    names, keys = {item.name for item in fields(Outcome)}, {pair.key for pair in covering_set()}
    rows = {key: row for key, row in detail.items() if key in keys}
    return {key: Outcome(**{name: row[name] for name in names & row.keys()}) for key, row in rows.items()}


def summary(results: dict[str, Outcome]) -> dict[str, Any]:
    """The printed object. ``older`` counts outcomes that belong to another patch than the present one."""
    passed = [row for row in results.values() if row.state == "passed"]
    failed = sum(row.state == "failed" for row in results.values())
    errors = [row.max_rel_err for row in passed if row.max_rel_err is not None]
    return {
        "command": "make test-matrix",
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "limit": LIMIT,
        "covering_set": COVERING,
        "pairs": len(passed) + failed,
        "passed": len(passed),
        "failed": failed,
        "worst_max_rel_err": max(errors, default=None),
        "older": sum(row.patch != identity() for row in results.values()),
        "not_run": [pair.key for pair in covering_set() if pair.key not in results],
        "skipped": [{"pair": key, "why": row.why} for key, row in results.items() if row.state == "skipped"],
        "detail": {key: asdict(row) for key, row in results.items()},
    }


def write_results(results: dict[str, Outcome]) -> dict[str, Any]:
    made = summary(results)
    temporary = RESULTS.with_suffix(".part")
    temporary.write_text(json.dumps(made, indent=1) + "\n")
    temporary.replace(RESULTS)
    return made


def keep(key: str, outcome: Outcome) -> dict[str, Any]:
    """Add one outcome to what is there by now: runs of different releases may go on side by side."""
    folder = os.open(RESULTS.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        return write_results({**read_results(), key: outcome})
    finally:
        os.close(folder)


def is_done(row: Outcome, retry: bool) -> bool:
    """Whether a pair needs no server: it was run with the present patch, and did not fail (unless ``retry`` is off)."""
    return row.patch == identity() and not (retry and row.state == "failed")


def run(pairs: Iterable[Pair]) -> None:
    """Serve each pair and keep how it went. No other run may serve the same release: its engine is patched."""
    for pair in pairs:
        folder = Path(tempfile.mkdtemp(prefix="fleetdump-matrix-"))
        outcome = try_pair(Served(pair, recipe.PYTHON, engine(pair.release), model(pair.model), folder))
        outcome.patch = identity()
        outcome.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        keep(pair.key, outcome)
        words = outcome.why or f"max_rel_err {outcome.max_rel_err:.2g}"
        if outcome.state == "failed":
            words += f" (log: {folder})"
        else:
            shutil.rmtree(folder)
        print(f"{pair.key}: {outcome.state}, {words}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=f"{len(QUICK)} pairs that span the kinds, instead of all")
    parser.add_argument("--fresh", action="store_true", help="run again what is done")
    parser.add_argument("--no-retry", action="store_true", help="leave alone what has failed with this patch")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="pairs with all these words in their name"
    )
    parser.add_argument("--limit", type=int, help="stop after so many servers")
    parser.add_argument("--list", action="store_true", help="name the pairs that would be run, and run none")
    arguments = parser.parse_args()
    results = read_results()
    done = {key for key, row in results.items() if not arguments.fresh and is_done(row, not arguments.no_retry)}
    every = QUICK if arguments.quick else covering_set()
    wanted = [pair for pair in every if set(arguments.only) <= set(pair.key.split())]
    missing = [pair for pair in wanted if pair.key not in done][: arguments.limit]
    if arguments.list:
        print("\n".join(pair.key for pair in missing))
        return
    run(missing)
    made = summary(read_results())
    print(json.dumps(made, indent=1))
    sys.exit(1 if made["failed"] else 0)


if __name__ == "__main__":
    main()
