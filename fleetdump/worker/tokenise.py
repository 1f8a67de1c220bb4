"""Rows of a data set into token ids and loss masks, by the model's own tokenizer and chat template.

Run by the driver with the server's interpreter: ``python -m fleetdump.worker.tokenise``, one JSON object
(``TokeniseJob``) on stdin. It writes ``work.jsonl`` (docs/formats.md) under a temporary name, fsyncs and renames it; on
stdout come JSON lines: ``{"rows": n}`` now and then, at the end ``{"done": true, "head": {...}}``.

A mask has one entry a token, 1 where an assistant wrote the token, and is not shifted. A wrong mask is worse than a
missing sample: what cannot be masked with certainty is rejected with reason ``template_error``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleetdump.agent.formats import Row
from fleetdump.agent.protocol import ProtocolError, from_json, to_json

GENERATION_TAG = re.compile(r"\{%-?\s*generation\b")
SPANS_SHOWN = 3
SPAN_CHARACTERS = 160
PROGRESS_ROWS = 200
UNLIMITED = 1 << 40


@dataclass
class TokeniseJob:
    """What to do. ``max_tokens`` 0 means no limit of the user's; ``context_length`` 0 means that the server did not say
    and the model's own ``max_position_embeddings`` counts."""

    model_path: str
    rows: str
    work: str
    max_tokens: int = 0
    context_length: int = 0


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
    spans: list[str] = field(default_factory=list)
    kind: str = "head"
    v: int = 1


class RejectRow(Exception):
    """A row that cannot become a sample; ``reason`` is one of docs/formats.md's."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason = reason


@dataclass
class Encoded:
    """Ids and mask (equal lengths) and the method that found the mask."""

    ids: list[int]
    mask: list[int]
    method: str


class RowEncoder:
    """Encodes rows with one tokenizer. ``limit``: most tokens that a sample may have."""

    def __init__(self, tokenizer: Any, vocab_size: int, limit: int = UNLIMITED):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.limit = limit
        template = tokenizer.chat_template
        self.template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
        self.marks_generation = bool(template) and bool(GENERATION_TAG.search(self.template))

    def encode(self, row: Row) -> Encoded:
        """Ids and mask of ``row``; raises ``RejectRow``."""
        if row.input_ids is not None:
            encoded = self._given(row.input_ids, row.loss_mask)
        elif row.text is not None:
            ids = self._ids(row.text)
            encoded = Encoded(ids, [1] * len(ids), "text")
        else:
            encoded = self._conversation(row.messages or [], row.tools)
        if not encoded.ids:
            raise RejectRow("empty", "no token")
        if len(encoded.ids) > self.limit:
            raise RejectRow("too_long", f"{len(encoded.ids)} tokens, limit {self.limit}")
        return encoded

    def _given(self, ids: list[int], mask: list[int] | None) -> Encoded:
        mask = [1] * len(ids) if mask is None else mask
        if len(mask) != len(ids):
            raise RejectRow("template_error", f"loss_mask has {len(mask)} entries, input_ids {len(ids)}")
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise RejectRow("template_error", f"id {outside} is outside the vocabulary of {self.vocab_size}")
        if any(entry not in (0, 1) for entry in mask):
            raise RejectRow("template_error", "loss_mask has entries other than 0 and 1")
        return Encoded(ids, mask, "given")

    def _conversation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Encoded:
        if not messages:
            raise RejectRow("empty", "a conversation without messages")
        if not self.tokenizer.chat_template:
            raise RejectRow("template_error", "the model's tokenizer has no chat template")
        try:
            if self.marks_generation:
                return self._by_generation(messages, tools)
            return self._by_prefix(messages, tools)
        except RejectRow:
            raise
        except Exception as error:  # templates raise what they like: jinja errors, raise_exception(), KeyError
            raise RejectRow("template_error", f"{type(error).__name__}: {error}"[:300]) from error

    def _by_generation(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Encoded:
        """The template itself marks what an assistant writes."""
        out = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return Encoded(list(out["input_ids"]), list(out["assistant_masks"]), "generation")

    def _by_prefix(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> Encoded:
        """Supervised is what each assistant message adds to the conversation before it (with the generation prompt).

        Sound only where growing the conversation grows the token sequence at its end, which is checked for each
        message; where tokens merge across a boundary, but the texts do grow, character offsets decide.
        """
        text = self._render(messages, tools, prompt=False)
        bounds = []
        for n, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(messages[:n], tools, prompt=True) if n else ""
            after = self._render(messages[: n + 1], tools, prompt=False)
            bounds.append((before, after))
        ids = self._ids(text)
        mask = self._mask_by_ids(ids, bounds)
        if mask is not None:
            return Encoded(ids, mask, "prefix")
        return self._mask_by_offsets(text, bounds)

    def _mask_by_ids(self, ids: list[int], bounds: list[tuple[str, str]]) -> list[int] | None:
        mask = [0] * len(ids)
        for before, after in bounds:
            start, end = self._ids(before), self._ids(after)
            if ids[: len(start)] != start or ids[: len(end)] != end or len(end) <= len(start):
                return None
            mask[len(start) : len(end)] = [1] * (len(end) - len(start))
        return mask

    def _mask_by_offsets(self, text: str, bounds: list[tuple[str, str]]) -> Encoded:
        for before, after in bounds:
            if not (text.startswith(before) and text.startswith(after) and len(after) > len(before)):
                raise RejectRow(
                    "template_error",
                    "the chat template renders earlier messages differently as the conversation grows and has no "
                    "{% generation %} marks, so assistant tokens cannot be told apart",
                )
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask = [0] * len(out["input_ids"])
        for n, (left, right) in enumerate(out["offset_mapping"]):
            if any(len(before) <= left and right <= len(after) for before, after in bounds) and right > left:
                mask[n] = 1
        return Encoded(list(out["input_ids"]), mask, "offsets")

    def _render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, prompt: bool) -> str:
        return str(
            self.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt)
        )

    def _ids(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, UnicodeError) as error:  # a lone surrogate has no UTF-8 form
            raise RejectRow("template_error", f"cannot be tokenised: {error}"[:300]) from error

    def spans(self, encoded: Encoded) -> Iterator[str]:
        """Each run of supervised tokens, decoded and cut to what a screen shows."""
        start = None
        for n, entry in enumerate([*encoded.mask, 0]):
            if entry and start is None:
                start = n
            elif not entry and start is not None:
                yield self.tokenizer.decode(encoded.ids[start:n])[:SPAN_CHARACTERS]
                start = None


def tokenise(job: TokeniseJob, encoder: RowEncoder, report: Any = None) -> WorkHead:
    """Write ``job.work`` from ``job.rows``; ``report(rows)`` is called now and then."""
    head = WorkHead(tokenizer_sha256(Path(job.model_path)), hashlib.sha256(encoder.template.encode()).hexdigest())
    body = Path(f"{job.work}.{os.getpid()}.body.tmp")
    with open(job.rows, "rb") as rows, open(body, "wb") as out:
        for n, line in enumerate(rows):
            out.write(_line(_sample(line, encoder, head)))
            if report is not None and (n + 1) % PROGRESS_ROWS == 0:
                report(n + 1)
    _publish(head, body, Path(job.work))
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
        return {"v": 1, "id": identity, "reason": reason, "detail": str(error)}
    supervised = sum(encoded.mask)
    head.samples += 1
    head.tokens += len(encoded.ids)
    head.supervised += supervised
    head.methods[encoded.method] = head.methods.get(encoded.method, 0) + 1
    head.unsupervised_samples += supervised == 0
    head.all_supervised_samples += supervised == len(encoded.ids) and row.messages is not None
    if len(head.spans) < SPANS_SHOWN:
        head.spans.extend(list(encoder.spans(encoded))[: SPANS_SHOWN - len(head.spans)])
    return {"v": 1, "id": row.id, "ids": encoded.ids, "mask": encoded.mask}


def _publish(head: WorkHead, body: Path, work: Path) -> None:
    """Head and body under one name, at once and durably: a ``work.jsonl`` that exists is complete. Temporary names have
    the pid: the tokeniser of a driver that was killed may still run."""
    temporary = work.with_name(f"{work.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as out:
        out.write(_line(to_json(head)))
        with open(body, "rb") as source:
            shutil.copyfileobj(source, out, 1 << 20)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, work)
    body.unlink(missing_ok=True)


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
    return RowEncoder(tokenizer, int(config.get("vocab_size", 0)) or len(tokenizer), limit)


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
