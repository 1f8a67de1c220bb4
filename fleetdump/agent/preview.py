"""``preview``: tokenise a few rows as an extraction would, so that a person can look before anything runs."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Dict, Iterator

from fleetdump.agent.access import authorization
from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.driver import worker_environment
from fleetdump.agent.formats import row_line
from fleetdump.agent.generate import context_length
from fleetdump.agent.procfs import is_alive
from fleetdump.agent.protocol import AgentFailure, from_json
from fleetdump.agent.runmessages import PreviewArgs, PreviewReject, PreviewResult, SampleSpans
from fleetdump.agent.server import load_record
from fleetdump.agent.specs import ServerSpec

MARGIN_SECONDS = 5.0
TAIL_LINES = 8


def preview(args: PreviewArgs, ctx: AgentContext) -> PreviewResult:
    """Run the tokeniser on the request's body; what it writes is removed again. Raises ``AgentFailure`` when it cannot
    run (no such interpreter, no transformers, no such model) or takes too long."""
    with tempfile.TemporaryDirectory(prefix="fleetdump-preview-") as folder:
        rows, work = Path(folder, "rows.jsonl"), Path(folder, "work.jsonl")
        with open(rows, "wb") as out:
            for row in ctx.body():
                out.write(row_line(row))
        job = {
            "model_path": args.server.model_path,
            "rows": str(rows),
            "work": str(work),
            "max_tokens": args.max_tokens,
            "context_length": _context_length(ctx.state, args.server.name),
            "too_long": args.too_long,
        }
        _tokenise(args.server, job, max(1.0, ctx.remaining() - MARGIN_SECONDS))
        return _result(work)


def _context_length(state: State, server: str) -> int:
    """Of the server as it runs, 0 when it does not."""
    record = load_record(state, server)
    if record is None or not is_alive(record.pid, record.start_time):
        return 0
    return context_length(record.port, authorization(record.pid, record.start_time))


def _tokenise(server: ServerSpec, job: Dict[str, Any], seconds: float) -> None:
    env = worker_environment(server.interpreter.env, server.model_path)
    command = [server.python, "-m", "fleetdump.worker.tokenise"]
    try:
        done = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, env=env, cwd="/", timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise AgentFailure("timeout", f"the tokeniser did not end within {seconds:.0f} s", server.python) from error
    except OSError as error:
        raise AgentFailure(
            "not_found", "the server's python cannot be run", server.python, error.strerror or str(error), _NEXT_STEP
        ) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-TAIL_LINES:]
        why = "\n".join(said) or f"it ended with status {done.returncode}"
        raise AgentFailure("failed", "the rows cannot be tokenised", server.model_path, why, _NEXT_STEP)


_NEXT_STEP = "fleetdump check; `python` and `model_path` of the inventory decide what tokenises"


def _result(work: Path) -> PreviewResult:
    lines = _lines(work)
    head = next(lines)
    result = PreviewResult(
        lengths=[],
        tokens=head["tokens"],
        supervised=head["supervised"],
        limit=head["limit"],
        template_sha256=head["template_sha256"],
        tokenizer_sha256=head["tokenizer_sha256"],
        methods=head["methods"],
        shown=[from_json(SampleSpans, sample) for sample in head["shown"]],
        rejected=[],
        unsupervised_samples=head["unsupervised_samples"],
        all_supervised_samples=head["all_supervised_samples"],
        truncated=head["truncated"],
    )
    for line in lines:
        result.lengths.append(len(line.get("ids", [])))
        if "reason" in line:
            result.rejected.append(PreviewReject(line["id"], line["reason"], line["detail"]))
    return result


def _lines(path: Path) -> Iterator[Dict[str, Any]]:
    with open(path, "rb") as file:
        for line in file:
            yield json.loads(line)
