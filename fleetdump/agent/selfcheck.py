"""``selfcheck``: send a few prompts through the server and its tap, and judge what was written.

The prompts go the whole way of an extraction, as a run of their own that is removed at the end: so rows, ids and hashes
are checked by the driver itself. The worker then computes log-probabilities from the captured final state and compares
them with the server's own. That proves the final state; the layers before it are compared with each other.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from fleetdump.agent.access import authorization
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.driver import work, worker_environment
from fleetdump.agent.formats import SELFCHECK_PREFIX, row_line
from fleetdump.agent.gate import capture_mismatch
from fleetdump.agent.generate import post
from fleetdump.agent.jsonl import read_lines
from fleetdump.agent.loop import Timing
from fleetdump.agent.protocol import AgentFailure, Finding, SelfCheckArgs, SelfCheckResult
from fleetdump.agent.server import ServerRecord, load_record
from fleetdump.agent.share import Share, ShareSpec

TOP_LOGPROBS = 5
MARGIN_SECONDS = 5.0
SENTENCE = "The lighthouse keeper wrote down the weather every evening, and in spring the ships came back. "
DEFAULT_PROMPTS = [
    "A",
    "Hello there!",
    SENTENCE,
    SENTENCE * 3,
    "Numbers: " + " ".join(map(str, range(120))),
    SENTENCE * 12,
]
"""From one token to about 1,200 characters."""


def selfcheck(args: SelfCheckArgs, ctx: AgentContext) -> SelfCheckResult:
    """Check one server that is ready; nothing of the check is left behind."""
    record = _capturing_server(args, ctx.state)
    run = f"{SELFCHECK_PREFIX}{record.launch_id}-{secrets.token_hex(2)}"
    _remove_old(args, ctx.state)
    share = Share(ctx.state.share(run, args.server))
    try:
        prompts = args.prompts or DEFAULT_PROMPTS
        _put_prompts(share, args, prompts)
        work(ctx.state, share, Timing(settle=20.0, give_up=time.monotonic() + ctx.remaining() - MARGIN_SECONDS))
        lines, _ = read_lines(share.manifest)
        checks = [_captured(share, lines, prompts)]
        diff = 0.0
        if lines:
            verdict = _judge(record, share, lines, args, ctx)
            diff = float(verdict["max_logprob_diff"])
            checks += [Finding(**finding) for finding in verdict["findings"]]
        return _result(checks, len(prompts), sum(line["tokens"] for line in lines), diff)
    finally:
        _remove(share, Path(args.capture.dir).expanduser() / run)


def _capturing_server(args: SelfCheckArgs, state: State) -> ServerRecord:
    record = load_record(state, args.server)
    if record is None:
        raise AgentFailure("not_found", f"server {args.server} was never launched here", next_step="fleetdump deploy")
    mismatch = capture_mismatch(record, args.capture)
    if mismatch:
        raise AgentFailure("conflict", mismatch, next_step="fleetdump deploy --replace --patch hidden-states")
    return record


def _put_prompts(share: Share, args: SelfCheckArgs, prompts: List[str]) -> None:
    rows = b"".join(row_line({"id": f"prompt-{n}", "text": text}) for n, text in enumerate(prompts))
    share.rows.write_bytes(rows)
    share.save_spec(
        ShareSpec(
            run=share.run,
            server=share.server,
            share_sha256=hashlib.sha256(rows).hexdigest(),
            rows=len(prompts),
            capture=args.capture,
            max_tokens=0,
            token_budget=1 << 30,
            max_attempts=2,
            engine="",
            patch_sha256="",
            model_sha256="",
            submitted_at=time.time(),
        )
    )


def _captured(share: Share, lines: List[Dict[str, Any]], prompts: List[str]) -> Finding:
    """Did every prompt come out with all its rows, under its own ids?"""
    if len(lines) == len(prompts):
        tokens = sum(line["tokens"] for line in lines)
        return Finding("captured", "ok", f"{len(lines)} prompts, {tokens} rows, each under the ids that were sent")
    rejected, _ = read_lines(share.rejected)
    reasons = [f"{line['id']}: {line['reason']} ({line['detail']})" for line in rejected]
    why = "; ".join(reasons[:3]) or share.progress().detail
    text = f"{len(lines)} of {len(prompts)} prompts were captured: {why}"
    return Finding("captured", "blocker", text, "look at the server's log for 'fleetdump-tap'")


def _judge(
    record: ServerRecord, share: Share, lines: List[Dict[str, Any]], args: SelfCheckArgs, ctx: AgentContext
) -> Dict[str, Any]:
    """The worker's findings on the captured tensors."""
    spec = share.spec()
    assert spec is not None
    ids = {sample.id: data["ids"] for sample, data in share.scan_work() if sample is not None}
    job = {
        "model_path": record.model_path,
        "directory": str(spec.directory),
        "tolerance": args.tolerance,
        "samples": [
            {
                "id": line["id"],
                "pieces": [[piece["shard"], piece["name"]] for piece in line["pieces"]],
                "norm": line["norm"],
                "top": _server_logprobs(record, ids[line["id"]]),
            }
            for line in lines
        ],
    }
    try:
        done = subprocess.run(
            [record.python, "-m", "fleetdump.worker.selfcheck"],
            input=json.dumps(job).encode(),
            capture_output=True,
            env=worker_environment(record),
            cwd="/",
            timeout=max(1.0, ctx.remaining() - MARGIN_SECONDS / 2),
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailure(
            "timeout", "the numeric check took too long", next_step="deploy with --no-selfcheck"
        ) from error
    if done.returncode:
        tail = "\n".join(done.stderr.decode("utf-8", "replace").splitlines()[-5:])
        raise AgentFailure("failed", "the numeric check could not run", where=record.python, why=tail)
    verdict: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return verdict


def _server_logprobs(record: ServerRecord, ids: List[int]) -> List[Tuple[float, int]]:
    """The server's own best next tokens after ``ids``: (log-probability, token id). The request has no rid of ours, so
    the tap leaves it alone; only output log-probabilities are asked for."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": TOP_LOGPROBS,
    }
    headers = authorization(record.pid, record.start_time)
    reply = post(record.port, "/generate", body, headers, timeout=120.0)
    try:
        top = reply.data["meta_info"]["output_top_logprobs"][0]
        return [(float(entry[0]), int(entry[1])) for entry in top]
    except (TypeError, KeyError, IndexError, ValueError) as error:
        why = f"HTTP {reply.status} {reply.detail}".strip()
        raise AgentFailure("failed", "the server gives no log-probabilities to compare with", why=why) from error


def _result(checks: List[Finding], prompts: int, rows: int, diff: float) -> SelfCheckResult:
    bad: Optional[Finding] = next((check for check in checks if check.level == "blocker"), None)
    return SelfCheckResult(bad is None, prompts, rows, diff, bad.text if bad else "", checks)


def _remove_old(args: SelfCheckArgs, state: State) -> None:
    """What a check that was killed left of this server."""
    for root in (state.root / "runs").glob(f"{SELFCHECK_PREFIX}*/{args.server}"):
        _remove(Share(root), Path(args.capture.dir).expanduser() / root.parent.name)


def _remove(share: Share, directory: Path) -> None:
    shutil.rmtree(str(directory), ignore_errors=True)
    shutil.rmtree(str(share.root.parent), ignore_errors=True)
