"""Rows of a data set into token ids and loss masks, by the model's own tokenizer and chat template.

Run by the driver with the server's interpreter: ``python -m fleetdump.worker.tokenise``, one JSON object
(``TokeniseJob``) on stdin. It writes ``work.jsonl`` (docs/formats.md) under a temporary name, fsyncs and renames it; on
stdout come JSON lines: ``{"rows": n}`` now and then, at the end ``{"done": true, "head": {...}}``.

What becomes of one row is ``rowencoder``'s.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import Row
from fleetdump.agent.jsonl import replacing
from fleetdump.agent.protocol import ProtocolError, from_json, to_json
from fleetdump.agent.runmessages import TOO_LONG, SampleSpans
from fleetdump.worker.rowencoder import UNLIMITED, Encoded, RejectRow, RowEncoder

SAMPLES_SHOWN = 3
SPANS_SHOWN = 4
"""Of one sample."""
PROGRESS_ROWS = 200


@dataclass
class TokeniseJob:
    """What to do. ``max_tokens`` 0 means no limit of the user's; ``context_length`` 0 means that the server did not say
    and the model's own ``max_position_embeddings`` counts. ``too_long``: one of ``runmessages.TOO_LONG``, what
    becomes of a longer sample."""

    model_path: str
    rows: str
    work: str
    max_tokens: int = 0
    context_length: int = 0
    too_long: str = TOO_LONG[0]


@dataclass
class WorkHead:
    """First line of ``work.jsonl``: who tokenised, what came out, and what a person should look at."""

    tokenizer_sha256: str
    template_sha256: str
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    rejected: int = 0
    unsupervised_samples: int = 0
    """Conversations without one supervised token."""
    all_supervised_samples: int = 0
    """Conversations of which every token is supervised."""
    methods: dict[str, int] = field(default_factory=dict)
    """How masks were found: generation, prefix, offsets, text, given."""
    shown: list[SampleSpans] = field(default_factory=list)
    """The first samples that have supervised tokens."""
    dropped: int = 0
    """Of the rejected those that were too long."""
    truncated: int = 0
    """Of the samples those that were cut at the limit."""
    limit: int = 0
    """Most tokens of a sample; 0: there is no limit."""
    kind: str = "head"
    v: int = 1


def tokenise(job: TokeniseJob, encoder: RowEncoder, report: Any = None) -> WorkHead:
    """Write ``job.work`` from ``job.rows``; ``report(rows)`` is called now and then."""
    head = WorkHead(tokenizer_sha256(Path(job.model_path)), hashlib.sha256(encoder.template.encode()).hexdigest())
    head.limit = encoder.limit if encoder.limit < UNLIMITED else 0
    body = Path(f"{job.work}.{os.getpid()}.body.tmp")
    try:
        with open(job.rows, "rb") as rows, open(body, "wb") as out:
            for n, line in enumerate(rows):
                out.write(_line(_sample(line, encoder, head)))
                if report is not None and (n + 1) % PROGRESS_ROWS == 0:
                    report(n + 1)
        _publish(head, body, Path(job.work))
    finally:
        body.unlink(missing_ok=True)
    return head


def _sample(line: bytes, encoder: RowEncoder, head: WorkHead) -> dict[str, Any]:
    data = json.loads(line)
    identity = str(data.get("id"))
    try:
        row = from_json(Row, data)
        encoded = encoder.encode(row)
    except (RejectRow, ProtocolError) as error:
        head.rejected += 1
        reason = error.reason if isinstance(error, RejectRow) else "template_error"
        head.dropped += reason == "too_long"
        return {"v": 1, "id": identity, "reason": reason, "detail": str(error)}
    _count(row, encoded, head)
    if len(head.shown) < SAMPLES_SHOWN and any(encoded.mask):
        spans = list(itertools.islice(encoder.spans(encoded), SPANS_SHOWN))
        head.shown.append(SampleSpans(row.id, len(encoded.ids), sum(encoded.mask), spans))
    return {"v": 1, "id": row.id, "ids": encoded.ids, "mask": encoded.mask}


def _count(row: Row, encoded: Encoded, head: WorkHead) -> None:
    supervised = sum(encoded.mask)
    head.samples += 1
    head.tokens += len(encoded.ids)
    head.supervised += supervised
    head.truncated += encoded.cut > 0
    head.methods[encoded.method] = head.methods.get(encoded.method, 0) + 1
    head.unsupervised_samples += supervised == 0
    head.all_supervised_samples += supervised == len(encoded.ids) and row.messages is not None


def _publish(head: WorkHead, body: Path, work: Path) -> None:
    """Head and body under one name, at once and durably: a ``work.jsonl`` that exists is complete. Temporary names have
    the pid: the tokeniser of a driver that was killed may still run."""
    with replacing(work) as out, open(body, "rb") as source:
        out.write(_line(to_json(head)))
        shutil.copyfileobj(source, out, 1 << 20)


def _line(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode() + b"\n"


def tokenizer_sha256(model: Path) -> str:
    """Over the tokenizer's files by name and content: what decides the ids of a text."""
    digest = hashlib.sha256()
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
    for name in (*names, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"):
        path = model / name
        if path.exists():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def load_encoder(job: TokeniseJob) -> RowEncoder:
    """The model's tokenizer, with the tightest of the limits that the job and the model's config state."""
    from transformers import AutoTokenizer

    model = Path(job.model_path)
    config = json.loads((model / "config.json").read_bytes())
    config = {**config, **config.get("text_config", {})}
    tokenizer = AutoTokenizer.from_pretrained(str(model), trust_remote_code=_needs_own_code(model))
    context = job.context_length or int(config.get("max_position_embeddings", 0)) or UNLIMITED
    limit = min(context - 1, job.max_tokens or UNLIMITED)  # one position is for the token that is generated
    vocabulary = int(config.get("vocab_size", 0)) or len(tokenizer)
    return RowEncoder(tokenizer, vocabulary, limit, truncate=job.too_long == "truncate")


def _needs_own_code(model: Path) -> bool:
    """A tokenizer class that lies in the checkpoint; the server runs the same code with --trust-remote-code."""
    try:
        return "auto_map" in json.loads((model / "tokenizer_config.json").read_bytes())
    except FileNotFoundError:
        return False


def local_model(path: str) -> str:
    """The folder of a model given as a folder or by its name on the Hub (from the cache when HF_HUB_OFFLINE is set)."""
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "*.model", "*.txt", "tokenization*.py"]
    return str(snapshot_download(path, allow_patterns=patterns))


def main() -> None:
    """Entry point of ``python -m fleetdump.worker.tokenise``."""
    job = from_json(TokeniseJob, json.load(sys.stdin))
    job.model_path = local_model(job.model_path)

    def report(rows: int) -> None:
        print(json.dumps({"rows": rows}), flush=True)

    head = tokenise(job, load_encoder(job), report)
    print(json.dumps({"done": True, "head": to_json(head)}), flush=True)


if __name__ == "__main__":
    main()
