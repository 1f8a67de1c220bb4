"""``selfcheck``: send a few prompts to a server that captures, and judge what its tap wrote.

The prompts (``selfcheck_prompts``) make a run of their own, which is removed at the end. The taps' journals say whether
every row came (``selfcheck_capture``), the worker measures the tensors, ``selfcheck_rules`` says what passes, and
``selfcheck_causes`` why the rest does not. Nothing of the server is changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from fleetdump.agent.access import authorization
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.driver import worker_environment
from fleetdump.agent.formats import SELFCHECK_PREFIX, norm_name
from fleetdump.agent.gate import capture_mismatch
from fleetdump.agent.generate import Headers, Reply, context_length, post, server_info
from fleetdump.agent.model import vocabulary_size
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure, from_json, to_json
from fleetdump.agent.runmessages import SelfCheckArgs, SelfCheckResult
from fleetdump.agent.selfcheck_capture import CheckCapture
from fleetdump.agent.selfcheck_causes import causes_of, judge
from fleetdump.agent.selfcheck_facts import CapturedPrompt, Facts, Measured, MeasureJob, PromptFate, RankCopy
from fleetdump.agent.selfcheck_prompts import LARGE, SMALL, Plan, Prompt, plan
from fleetdump.agent.server import PASSED, ServerRecord, load_record, save_record

SETTLE_SECONDS = 10.0
"""Rows of which no journal has said anything new for so long do not come."""
CLOSE_SECONDS = 15.0
"""So long a tap may take to close its shards before the run is removed under it."""
POLL_SECONDS = 0.1
MARGIN_SECONDS = 5.0


def selfcheck(args: SelfCheckArgs, ctx: AgentContext) -> SelfCheckResult:
    """Check one server that is ready; nothing of the check is left behind but its outcome in the server's record."""
    record = capturing_server(args, ctx.state)
    began = time.monotonic()
    with run_of_its_own(record, args, ctx.state) as directory:
        result = _Check(record, args, ctx, directory).result()
    result.seconds = time.monotonic() - began
    current = load_record(ctx.state, args.server)
    if current is not None and current.launch_id == record.launch_id:
        current.selfcheck = PASSED if result.passed else result.detail
        save_record(ctx.state, current)
    return result


def capturing_server(args: SelfCheckArgs, state: State) -> ServerRecord:
    """The record of a server that runs and captures what is wanted; raises ``AgentFailure`` for another."""
    record = load_record(state, args.server)
    if record is None:
        raise AgentFailure("not_found", f"server {args.server} was never launched here", next_step="fleetdump deploy")
    if record.stopped_at or not is_alive(record.pid, record.start_time):
        raise AgentFailure("conflict", f"server {args.server} does not run", next_step="fleetdump deploy")
    mismatch = capture_mismatch(record, args.capture)
    if mismatch:
        raise AgentFailure("conflict", mismatch, next_step="fleetdump deploy --replace --patch hidden-states")
    return record


@contextmanager
def run_of_its_own(record: ServerRecord, args: SelfCheckArgs, state: State) -> Iterator[Path]:
    """Directory of a run that no other check of this server touches, removed at the end; what a check that was killed
    left is removed first. A folder among the state's runs says that it is ours."""
    root = Path(args.capture.dir).expanduser()
    path = state.server(args.server) / "selfcheck.lock"
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise AgentFailure(
                "locked", f"another self-check of {args.server} runs", where=str(path), next_step="wait for its end"
            ) from error
        for left_over in (state.root / "runs").glob(f"{SELFCHECK_PREFIX}*/{args.server}"):
            _remove(root, left_over)
        run = f"{SELFCHECK_PREFIX}{record.launch_id}-{secrets.token_hex(2)}"
        mark = state.share(run, args.server)
        try:
            yield root / run
        finally:
            _remove(root, mark)


def _remove(capture: Path, mark: Path) -> None:
    """The run whose folder ``mark`` is: its tensors first."""
    shutil.rmtree(str(capture / mark.parent.name), ignore_errors=True)
    shutil.rmtree(str(mark.parent), ignore_errors=True)


class _Check:
    """One check of one server."""

    def __init__(self, record: ServerRecord, args: SelfCheckArgs, ctx: AgentContext, directory: Path):
        self._record = record
        self._layers = args.capture.layers
        self._ctx = ctx
        self._headers: Headers = authorization(record.pid, record.start_time)
        context = context_length(record.port, self._headers)
        ranks = attention_ranks(server_info(record.port, self._headers), record.tp)
        self._plan: Plan = plan(vocabulary_size(record.model_path), context)
        self._capture = CheckCapture(directory, record.name, self._plan, args.capture.slots, ranks)
        self._fates = {
            prompt.name: PromptFate(prompt.name, len(prompt.ids), self._plan.forward_tokens(prompt))
            for prompt in self._plan.prompts
        }
        self._answers: Dict[str, Any] = {}

    def result(self) -> SelfCheckResult:
        """Send, wait, measure, judge."""
        for prompt in self._plan.alone():
            self._send([prompt])
        for batch in (SMALL, LARGE):
            self._send(self._plan.batch(batch))
        self._refuse_silence()
        self._wait_for_rows()
        captured = self._captured()
        ranks, copies = self._capture.compare_ranks()
        facts = Facts(self._layers, list(self._fates.values()), ranks, shortened=self._plan.shortened)
        if captured:
            facts.measured = self._measure(captured, copies)
        self._wait_for_closing()
        return _result(facts)

    def _send(self, prompts: List[Prompt]) -> None:
        """One request, with the log-probability of the token that it generates."""
        body = request_body([self._capture.rid(prompt) for prompt in prompts], [prompt.ids for prompt in prompts])
        timeout = max(1.0, self._ctx.remaining() - MARGIN_SECONDS)
        reply = post(self._record.port, "/generate", body, self._headers, timeout)
        answers = reply.data if isinstance(reply.data, list) else []
        for n, prompt in enumerate(prompts):
            if reply.status == 200 and n < len(answers):
                self._answers[prompt.name] = answers[n]
            else:
                self._fates[prompt.name].error = _why(reply)

    def _refuse_silence(self) -> None:
        """A server that answers nothing has not failed its check: there was none."""
        if not self._answers:
            why = next(fate.error for fate in self._fates.values())
            raise AgentFailure(
                "failed",
                f"server {self._record.name} answers no request",
                where=f"port {self._record.port}",
                why=why,
                next_step="fleetdump diagnose; wait for the start to end",
            )

    def _wait_for_rows(self) -> None:
        """Until nothing more is to come, or nothing has come for a while."""
        news = time.monotonic()
        while self._ctx.remaining() > MARGIN_SECONDS:
            if self._capture.poll():
                news = time.monotonic()
            answered = [prompt for prompt in self._plan.prompts if not self._fates[prompt.name].error]
            if all(map(self._capture.is_settled, answered)) or time.monotonic() - news > SETTLE_SECONDS:
                return
            time.sleep(POLL_SECONDS)

    def _captured(self) -> List[CapturedPrompt]:
        """Prompts of which every row is there; the others' fates say why not."""
        found = []
        for prompt in self._plan.prompts:
            fate = self._fates[prompt.name]
            pieces = self._capture.settle_fate(prompt, fate)
            if pieces is not None and fate.whole:
                token, logprob = next_token(self._answers.get(prompt.name))
                found.append(
                    CapturedPrompt(prompt.name, prompt.ids, pieces, token, logprob, prompt.batch, prompt.same_as)
                )
        return found

    def _measure(self, captured: List[CapturedPrompt], copies: List[RankCopy]) -> Measured:
        record = self._record
        norm = norm_name(record.name, record.launch_id)
        directory = str(self._capture.directory)
        job = MeasureJob(record.model_path, directory, self._layers, norm, captured, copies)
        return run_worker(record, job, max(1.0, self._ctx.remaining() - MARGIN_SECONDS / 2))

    def _wait_for_closing(self) -> None:
        """A run that is removed under a tap's open shard would leave errors in the server's log."""
        give_up = time.monotonic() + min(CLOSE_SECONDS, self._ctx.remaining() - MARGIN_SECONDS)
        while self._capture.open_shards() and time.monotonic() < give_up:
            time.sleep(POLL_SECONDS)


def run_worker(record: ServerRecord, job: MeasureJob, seconds: float) -> Measured:
    """The worker's numbers, by the server's interpreter; raises ``AgentFailure`` when it cannot give them in time."""
    try:
        done = subprocess.run(
            [record.python, "-m", "fleetdump.worker.selfcheck"],
            input=json.dumps(to_json(job)).encode(),
            capture_output=True,
            env=worker_environment(record.import_env, record.model_path),
            cwd="/",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailure(
            "timeout", "the numeric check took too long", next_step="deploy with --no-selfcheck"
        ) from error
    if done.returncode:
        tail = "\n".join(done.stderr.decode("utf-8", "replace").splitlines()[-5:])
        raise AgentFailure("failed", "the numeric check could not run", where=record.python, why=tail)
    return from_json(Measured, json.loads(done.stdout.splitlines()[-1]))


def request_body(rids: List[str], ids: List[List[int]]) -> Dict[str, Any]:
    """Several prompts in one request, as ``generate.prefill`` sends each, and their next tokens' log-probabilities. One
    extra key for all: before 0.5.14 SGLang does not tell a list of them apart."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    return {"input_ids": ids, "rid": rids, "extra_key": rids[0], "sampling_params": sampling, "return_logprob": True}


def attention_ranks(info: Dict[str, Any], tp: int) -> int:
    """How many ranks hold each row, from /server_info (``tp`` where it does not say): the tensor-parallel ones over
    the groups that have requests of their own."""

    def number(key: str, default: int = 1) -> int:
        value = info.get(key)
        return value if isinstance(value, int) and value > 0 else default

    # From 0.5.22 on either of the two spellings is there, and the other one is 1.
    groups = max(number("attn_dp_size"), number("dp_size") if info.get("enable_dp_attention") else 1)
    return max(1, number("tp_size", tp) // (groups * number("attn_cp_size")))


def next_token(answer: Any) -> Tuple[int, float]:
    """Token and log-probability of the server's answer; -1 when it has none."""
    try:
        logprob, token = answer["meta_info"]["output_token_logprobs"][0][:2]
        return int(token), float(logprob)
    except (TypeError, KeyError, IndexError, ValueError):
        return -1, 0.0


def _why(reply: Reply) -> str:
    return f"HTTP {reply.status} {reply.detail}".strip() if reply.status else reply.detail


def _result(facts: Facts) -> SelfCheckResult:
    checks = judge(facts)
    bad: Optional[str] = next((check.text for check in checks if check.level == "blocker"), None)
    difference = facts.measured.head.largest_difference if facts.measured else 0.0
    rows = sum(fate.rows for fate in facts.prompts)
    causes = causes_of(facts, checks)
    return SelfCheckResult(bad is None, len(facts.prompts), rows, difference, bad or "", checks, causes)
