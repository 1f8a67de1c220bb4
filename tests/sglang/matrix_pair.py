"""One pair of the tensor matrix: a release that serves a model, what it is asked, and whether the tap was right."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from demo.sglang_cpu import recipe
from fleetdump.agent import importhook
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.flagrules import patch_arguments
from fleetdump.agent.formats import PieceRecord, SkipRecord
from fleetdump.agent.jsonl import read_journal
from fleetdump.agent.patching import patch, revert
from fleetdump.agent.patchmessages import PatchArgs, RevertArgs
from fleetdump.agent.patchrecord import FOLDER
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.specs import ServerSpec
from fleetdump.patches import find_patch, load_patch
from tests.sglang.cpuserver import RunningServer, SglangEnv, no_other_models, session_pids, start_server
from tests.sglang.test_tap_real import close_when_dead, tap_json

SPEC = load_patch(find_patch("hidden-states"))
CHUNK = 64
LIMIT = 1e-4
"""Largest error of a row over the largest absolute value of its reference, in float32."""
LOGPROB_LIMIT = 1e-3
"""Beyond it the engine computes something else than transformers, whatever the tap does."""
PATIENCE = 120.0
SETTING_FLAGS = {"radix": "--disable-radix-cache", "overlap": "--disable-overlap-schedule"}
"""Settings of a pair that are the absence of a flag, which the patch and the recipe would give."""

Prompts = dict[str, list[int]]


@dataclass(frozen=True)
class Pair:
    """``settings`` beside the usual: ``radix`` (the prefix cache is on), ``overlap`` (the overlap scheduler is on),
    ``mixed`` (--enable-mixed-chunk)."""

    release: str
    model: str
    tp: int = 1
    delivery: str = "in-place"
    settings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return " ".join([self.release, self.model, f"tp{self.tp}", self.delivery, *self.settings])

    def flags(self, flags: Sequence[str]) -> list[str]:
        """``flags`` without those that this pair's settings are the absence of."""
        left_out = {SETTING_FLAGS[name] for name in self.settings if name in SETTING_FLAGS}
        return [flag for flag in flags if flag not in left_out]

    def own_flags(self) -> list[str]:
        mixed = ["--enable-mixed-chunk"] if "mixed" in self.settings else []
        return ["--chunked-prefill-size", str(CHUNK), *mixed]


@dataclass
class Outcome:
    """How one pair went. ``state``: passed, failed, or skipped (the engine does not serve that model here without the
    patch either). ``pieces`` beyond ``samples`` are chunks. ``max_logprob_err`` compares what the server itself says of
    its first token with transformers. ``cached``: how the same prompts went again with the prefix cache on."""

    state: str
    why: str = ""
    max_rel_err: float | None = None
    median_rel_err: float | None = None
    samples: int = 0
    rows: int = 0
    pieces: int = 0
    max_logprob_err: float | None = None
    cached: dict[str, int] = field(default_factory=dict)
    start_seconds: int = 0
    patch: str = ""
    date: str = ""


class Wrong(Exception):
    """The tap, or the engine, did not do what it should; the text says what."""


@dataclass
class Served:
    """What a pair is served with: ``python`` imports the engine that lies unpacked in ``engine``."""

    pair: Pair
    python: Path
    engine: Path
    model: Path
    folder: Path
    """For the log, the captured rows and the agent's state; empty."""

    @property
    def environment(self) -> SglangEnv:
        args = tuple(self.pair.flags(recipe.SERVER_ARGS))
        env = no_other_models(self.engine, self.architecture)
        return replace(SglangEnv(self.python, self.model, self.pair.release), args=args, env=env)

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def other_log(self) -> Path:
        """Of the server without the patch."""
        return self.folder / "without-patch.log"

    @property
    def architecture(self) -> str:
        return str(json.loads((self.model / "config.json").read_text())["architectures"][0])

    @property
    def prompts(self) -> Prompts:
        prompts: Prompts = json.loads((self.model / "prompts.json").read_text())
        return prompts

    @property
    def layers(self) -> list[int]:
        with safe_open(self.model / "reference.bin", "np") as reference:
            layers: list[int] = json.loads(reference.metadata()["layers"])
        return layers

    def reference(self, name: str) -> np.ndarray:
        with safe_open(self.model / "reference.bin", "np") as reference:
            made: np.ndarray = reference.get_tensor(name)
        return made


def try_pair(served: Served) -> Outcome:
    """Serve the pair with the patch; where that fails, without it, so that the engine's faults are not taken for the
    patch's. An engine that fails without words of an error (a time-out on a busy machine) proves nothing."""
    try:
        return with_patch(served)
    except AgentFailure as failure:
        return Outcome("failed", f"{failure.error.what}: {failure.error.why}")
    except (AssertionError, OSError, Wrong) as error:
        failed = Outcome("failed", f"{error}; the log says: {last_words(served.log) or 'nothing of an error'}"[:1000])
    try:
        error_of_logprobs = without_patch(served)
    except (AssertionError, OSError, Wrong):
        words = last_words(served.other_log)
        return Outcome("skipped", f"without the patch the engine fails too: {words}") if words else failed
    if error_of_logprobs > LOGPROB_LIMIT:
        words = f"without the patch the server's own logprobs are {error_of_logprobs:.2g} off those of transformers"
        return Outcome("skipped", words)
    return failed


# --------------------------------------------------------------------------- with the patch
@contextmanager
def delivered(served: Served) -> Iterator[dict[str, str]]:
    """The patch in the engine, by the agent's own code; gives the environment that the server needs."""
    context = AgentContext(Request("matrix", {}, deadline=600.0), State(served.folder / "state"))
    env = {"PYTHONPATH": str(served.engine)}
    if (served.engine / FOLDER).is_dir():  # a run that was killed has left its patch
        revert(RevertArgs(str(served.python), env=env), context)
    if served.pair.delivery == "import-hook":
        server = ServerSpec("main", str(served.python), str(served.model), 0, env=env)
        importhook.write(served.folder / "hook", SPEC, importhook.plan(server, SPEC, False, context))
        yield importhook.environment(served.folder / "hook", env)
        return
    patch(PatchArgs(str(served.python), SPEC, env=env, models=[str(served.model)]), context)
    try:
        yield env
    finally:
        revert(RevertArgs(str(served.python), env=env), context)


def with_patch(served: Served) -> Outcome:
    """One server's life: 16 prompts at once, then the same again where prefixes are cached, then death."""
    pair, prompts = served.pair, served.prompts
    tap = {"FLEETDUMP_TAP_CONFIG": str(tap_json(served.folder, served.layers, pair.tp))}
    flags = [*pair.flags(patch_arguments(SPEC, pair.release)), *pair.own_flags()]
    with (
        delivered(served) as env,
        start_server(served.environment, served.log, pair.tp, flags, {**env, **tap}) as server,
    ):
        require_marks(served)
        answers = ask_at_once(server, "r1", prompts)
        written = wait_for_all(served.folder / "cap" / "r1", prompts)
        again = {}
        if "radix" in pair.settings:
            ask_at_once(server, "r2", prompts)
            again = wait_for_all(served.folder / "cap" / "r2", prompts)
        for pid in session_pids(server.pid):
            os.kill(pid, signal.SIGKILL)
    refused = {sample: skip for sample, skip in written.items() if skip}
    if refused:
        raise Wrong(f"samples were refused: {refused}")
    errors, pieces = compare(served, "r1", list(prompts))
    outcome = Outcome("passed", samples=len(prompts), rows=len(errors), pieces=pieces)
    if again:
        outcome.cached = check_cached(served, again)
    outcome.start_seconds = round(server.seconds)
    outcome.max_rel_err, outcome.median_rel_err = float(errors.max()), float(np.median(errors))
    outcome.max_logprob_err = logprob_error(served, answers)
    if outcome.max_rel_err > LIMIT:
        over = int((errors > LIMIT).sum())
        raise Wrong(f"max_rel_err {outcome.max_rel_err:.3g}, {over} of {len(errors)} rows over {LIMIT}")
    if pieces <= len(prompts):
        raise Wrong("no prompt was cut into chunks")
    return outcome


def require_marks(served: Served) -> None:
    """Every rank must have said that its tap is armed, and none may serve another class than the patched one."""
    text = served.log.read_text(errors="replace")
    marks = [f"{SPEC.mark} rank={rank}/{served.pair.tp}" for rank in range(served.pair.tp)]
    missing = [mark for mark in marks if mark not in text]
    if missing:
        raise Wrong(f"the server is healthy and its log has no line {missing[0]!r}")
    if f"type={served.architecture}" not in text:
        raise Wrong(f"the server did not load type={served.architecture}")


def ask_at_once(server: RunningServer, run: str, prompts: Prompts) -> dict[str, Any]:
    """Every prompt as a request of its own, all at the same time; every other one decodes a few tokens, so that prompts
    arrive among decodes. ``extra_key`` keeps one request's prefixes from another's where the prefix cache is on."""
    answers: dict[str, Any] = {}

    def ask(number: int, sample: str) -> None:
        sampling = {"temperature": 0, "max_new_tokens": 4 if number % 2 else 1, "ignore_eos": True}
        body = {"rid": f"fleetdump/{run}/{sample}/1", "input_ids": prompts[sample], "extra_key": sample}
        answers[sample] = post(server.url, {**body, "sampling_params": sampling, "return_logprob": True})

    threads = [threading.Thread(target=ask, args=item, daemon=True) for item in enumerate(prompts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if set(answers) != set(prompts):
        raise Wrong(f"of {len(prompts)} requests {len(answers)} were answered")
    return answers


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/generate", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.loads(answer.read())


def wait_for_all(run: Path, prompts: Prompts) -> dict[str, str]:
    """Wait until each sample has all its rows in the journal, or a reason why not; gives that reason or ""."""
    end = time.monotonic() + PATIENCE
    while True:
        rows, skips = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, "")
        for journal in run.glob("journal-*.jsonl"):
            for record in read_journal(journal)[0]:
                sample = record.rid.split("/")[2] if isinstance(record, (PieceRecord, SkipRecord)) else ""
                if isinstance(record, PieceRecord):
                    rows[sample] += record.rows
                elif isinstance(record, SkipRecord):
                    skips[sample] = f"{record.reason}: {record.detail}"
        unfinished = [sample for sample, ids in prompts.items() if rows[sample] < len(ids) and not skips[sample]]
        if not unfinished:
            return skips
        if time.monotonic() > end:
            raise Wrong(f"rows that did not come: {unfinished}, {rows}")
        time.sleep(0.1)


# --------------------------------------------------------------------------- judging
def compare(served: Served, run_name: str, samples: Sequence[str]) -> tuple[np.ndarray, int]:
    """Relative error of each row ``[rows]`` of ``samples``, and the number of pieces that they came in. Raises Wrong
    for rows that are missing or twice there."""
    run = served.folder / "cap" / run_name
    close_when_dead(run)
    pieces: dict[str, dict[int, np.ndarray]] = {sample: {} for sample in samples}
    for path in run.glob("shard-*.safetensors"):
        with safe_open(path, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                rid, _, start = name.rpartition(":")
                pieces.setdefault(rid.split("/")[2], {})[int(start)] = shard.get_tensor(name)
    errors = []
    for sample in samples:
        want = served.reference(sample).astype(np.float64)
        parts = sorted(pieces[sample].items())
        ends = [start + len(part) for start, part in parts]
        if [start for start, _ in parts] != [0, *ends[:-1]] or ends[-1] != len(want):
            raise Wrong(
                f"{run_name}/{sample}: pieces at {[start for start, _ in parts]} end at {ends}, not {len(want)}"
            )
        got = np.concatenate([part for _, part in parts]).astype(np.float64)
        errors.append((np.abs(got - want).max(2) / np.abs(want).max(2)).max(1))
    return np.concatenate(errors), sum(len(pieces[sample]) for sample in samples)


def check_cached(served: Served, skips: dict[str, str]) -> dict[str, int]:
    """The second round with cached prefixes: a sample is whole, or refused for its prefix; and some must be refused,
    otherwise nothing was cached."""
    whole = [sample for sample, why in skips.items() if not why]
    other = [why for why in skips.values() if why and not why.startswith("prefix_missing")]
    if other:
        raise Wrong(f"a cached prefix was refused for another reason: {other[0]}")
    if len(whole) == len(skips):
        raise Wrong("no prefix was cached")
    errors, _ = compare(served, "r2", whole) if whole else (np.zeros(1), 0)
    if errors.max() > LIMIT:
        raise Wrong(f"with cached prefixes max_rel_err is {errors.max():.3g}")
    return {"whole": len(whole), "prefix_missing": len(skips) - len(whole)}


def logprob_error(served: Served, answers: dict[str, Any]) -> float:
    """Largest difference of the logprob of the server's first token from that of transformers for the same token."""
    worst = 0.0
    for sample, answer in answers.items():
        logprob, token = answer["meta_info"]["output_token_logprobs"][0][:2]
        logits = served.reference(f"{sample}:logits").astype(np.float64)
        expected = logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        worst = max(worst, abs(float(logprob - expected)))
    return worst


# --------------------------------------------------------------------------- without the patch
def without_patch(served: Served) -> float:
    """Serve the pair as SGLang comes; gives the error of its logprobs."""
    env, pair = {"PYTHONPATH": str(served.engine)}, served.pair
    with start_server(served.environment, served.other_log, pair.tp, pair.own_flags(), env) as server:
        if f"type={served.architecture}" not in served.other_log.read_text(errors="replace"):
            raise Wrong("another class was loaded")
        return logprob_error(served, ask_at_once(server, "r0", served.prompts))


FRAME = re.compile(r'^.*File "[^"]*/(sglang/[^"]+)", line \d+, in (\S+)')
ERROR = re.compile(r"^(?:\[[^]]*\] )?((?:[A-Za-z_][\w.]*)?(?:Error|Exception|Unsupported\w*)\b.*)")
NOT_IMPORTED = re.compile(r"^.*(Ignore import error when loading sglang\.srt\.models\..*)")


def last_words(log: Path) -> str:
    """The last line of the log that a Python traceback ends with and the code of SGLang that it went through last, or
    else what SGLang did not import of the model; "" if neither is there."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    place = said = not_imported = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if frame := FRAME.match(line):
            place = f" (in {frame[1]}, {frame[2]}: {following.strip()[:120]})"
        elif error := ERROR.match(line):
            said, place = f"{error[1][:400]}{place}", ""
        elif failed := NOT_IMPORTED.match(line):
            not_imported = failed[1][:400]
    return said or not_imported
