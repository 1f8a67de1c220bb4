"""What the tests of the self-check share: a tiny model in numpy, and an HTTP server that serves it as SGLang with the
tap does, on as many 'ranks' as are asked for. A test breaks what is written by a ``Break``."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import Rid, SkipRecord, Writer, norm_name
from fleetdump.agent.jsonl import append_lines
from fleetdump.agent.procfs import start_time
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import SelfCheckArgs, SelfCheckResult
from fleetdump.agent.selfcheck import selfcheck
from fleetdump.agent.selfcheck_prompts import LARGE
from fleetdump.agent.server import ServerRecord, load_record, save_record
from fleetdump.agent.shardwriter import NewPiece, ShardWriter
from fleetdump.agent.specs import CaptureSpec
from fleetdump.agent.tensorfile import ids_sha256

VOCABULARY, HIDDEN, DEPTH = 256, 32, 6
EPS = 1e-6
LAUNCH = "1f0c77aa"
Array = Any


class TinyModel:
    """A residual stream without attention: what enters a layer depends on token and position alone."""

    def __init__(self, seed: int = 5):
        source = np.random.default_rng(seed)
        self.embeddings = source.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
        self.weights = [source.normal(size=(HIDDEN, HIDDEN)).astype(np.float32) / 4 for _ in range(DEPTH)]
        self.norm = 1 + 0.1 * source.normal(size=HIDDEN).astype(np.float32)
        self.head = source.normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)

    def streams(self, ids: list[int]) -> list[Array]:
        """What enters each layer, and at the end what leaves the last: ``[tokens, hidden]`` each."""
        stream = self.embeddings[ids]
        position = np.sin(np.arange(len(ids))[:, None] * np.arange(1, HIDDEN + 1) / 7).astype(np.float32)
        found = [stream]
        for weight in self.weights:
            stream = stream + np.tanh((stream + position) @ weight)
            found.append(stream)
        return found

    def logits(self, state: Array) -> Array:
        normed = state / np.sqrt((state**2).mean(-1, keepdims=True) + EPS) * self.norm
        return normed @ self.head.T

    def save(self, folder: Path, **config: Any) -> None:
        """A checkpoint as transformers writes it; ``config`` goes into config.json."""
        from safetensors.numpy import save_file

        folder.mkdir(parents=True, exist_ok=True)
        settings = {"vocab_size": VOCABULARY, "num_hidden_layers": DEPTH, "tie_word_embeddings": False, **config}
        (folder / "config.json").write_text(json.dumps(settings))
        tensors = {"model.embed_tokens.weight": self.embeddings, "lm_head.weight": self.head}
        # The embeddings of a further-token layer, as DeepSeek-V3 has them, are not the model's.
        tensors["model.layers.6.embed_tokens.weight"] = self.embeddings[::-1].copy()
        save_file(tensors, folder / "model.safetensors")


@dataclass
class Written:
    """What one rank is about to write of one prompt: ``rows`` is ``[tokens, slots, hidden]`` float32, from position
    ``start`` on. A break changes it; with a ``skip`` the reason is journalled instead."""

    rid: Rid
    rank: int
    forward_tokens: int
    ids: list[int]
    rows: Array
    start: int = 0
    skip: str = ""


Break = Callable[[Written], "Written | None"]
"""Returns what is written, None for nothing."""


@dataclass
class Tapped:
    """A server with its files; ``check()`` is the whole verb."""

    root: Path
    layers: list[int] = field(default_factory=lambda: [0, 3, 5])
    ranks: int = 1
    stages: int = 1
    """Pipeline stages, each with its share of the slots and its own writers."""
    dtype: str = "F32"
    context: int = 4096
    config: dict[str, Any] = field(default_factory=dict)
    broken: Break = lambda written: written
    batch_noise: float = 0.0
    """Relative error of every value that depends on the size of the forward, as kernels' rounding does."""
    refuse: Callable[[list[Rid]], bool] = lambda rids: False
    logprobs: bool = True
    writing_ranks: int = 0
    """So many of the ranks write; 0: all."""
    python: str = sys.executable
    model: TinyModel = field(default_factory=TinyModel)

    def __post_init__(self) -> None:
        self.state = State.of(str(self.root / "state"))
        self.capture = CaptureSpec(self.layers, str(self.root / "capture"))
        self.writers: list[list[ShardWriter]] = []
        """Of each rank that writes, one a stage, while a check sends."""
        self.model_path = self.root / "model"
        self.model.save(self.model_path, **self.config)

    def check(self) -> SelfCheckResult:
        """Run the verb against a server that lives as long as that takes."""
        with self.serving():
            return selfcheck(SelfCheckArgs("main", self.capture), self.agent_context())

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The server answers, and is registered as launched."""
        handler = type("Handler", (_Handler,), {"tapped": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        try:
            self.register(server.server_address[1])
            yield
        finally:
            server.shutdown()
            server.server_close()

    def agent_context(self) -> AgentContext:
        return AgentContext(Request("selfcheck", {}, deadline=120.0), self.state)

    def register(self, port: int) -> None:
        """The server's record, with a process as its launcher that surely lives."""
        pid = 1
        record = ServerRecord(
            name="main", pid=pid, start_time=start_time(pid) or 0, launch_id=LAUNCH, port=port, host="127.0.0.1",
            python=self.python, model_path=str(self.model_path), tp=self.ranks, argv=[], env=[], log="",
            identity="", started_at=0.0, capture_layers=self.layers, capture_dir=self.capture.dir,
        )  # fmt: skip
        save_record(self.state, record)

    def record(self) -> ServerRecord:
        record = load_record(self.state, "main")
        assert record is not None
        return record

    # ------------------------------------------------------------------ what the server does
    def generate(self, rids: list[Rid], prompts: list[list[int]]) -> list[dict[str, Any]]:
        together = sum(map(len, prompts))
        answers = []
        journals = self.writers = self.writers or self._writers(rids[0].run)
        for rid, ids in zip(rids, prompts, strict=True):
            streams = self.model.streams(ids)
            rows = np.stack([*(streams[layer] for layer in self.layers), streams[-1]], axis=1)
            rows = self._noisy(rows, together)
            answers.append(self._answer(rows[-1, -1]))
            for rank, writers in enumerate(journals):
                written = self.broken(Written(rid, rank, together, ids, rows.copy()))
                for stage, slots in enumerate(np.array_split(range(rows.shape[1]), self.stages)):
                    if written is not None:
                        self._write(writers[stage], written, [int(slot) for slot in slots])
        if rids[0].sample.startswith(LARGE):  # the last request
            self._close_writers()
        return answers

    def _close_writers(self) -> None:
        for writer in [writer for writers in self.writers for writer in writers]:
            writer.close()
        self.writers = []

    def _noisy(self, rows: Array, together: int) -> Array:
        noise = np.random.default_rng(together).normal(size=rows.shape).astype(np.float32)
        return rows * (1 + self.batch_noise * noise)

    def _answer(self, state: Array) -> dict[str, Any]:
        logits = self.model.logits(state).astype(np.float64)
        logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
        token = int(logprobs.argmax())
        meta = {"output_token_logprobs": [[float(logprobs[token]), token, None]]} if self.logprobs else {}
        return {"text": "x", "meta_info": meta}

    def _writers(self, run: str) -> list[list[ShardWriter]]:
        directory = Path(self.capture.dir) / run
        self._write_norm(directory)

        def writer(rank: int, stage: int) -> ShardWriter:
            name = Writer("main", LAUNCH, f"r{stage * self.ranks + rank}")
            return ShardWriter(directory / "ranks" if rank else directory, name)

        ranks = range(self.writing_ranks or self.ranks)
        return [[writer(rank, stage) for stage in range(self.stages)] for rank in ranks]

    def _write_norm(self, directory: Path) -> None:
        from safetensors.numpy import save_file

        directory.mkdir(parents=True, exist_ok=True)
        metadata = {"format": "fleetdump-1", "eps": str(EPS), "kind": "rms"}
        save_file({"weight": self.model.norm}, directory / norm_name("main", LAUNCH), metadata)

    def _write(self, writer: ShardWriter, written: Written, slots: list[int]) -> None:
        rid = str(written.rid)
        if written.skip:
            append_lines(writer._journal, [SkipRecord(rid, written.skip, "as told", time.time())])
            return
        rows = written.rows[:, slots]
        shape = list(rows.shape)
        digest = ids_sha256(written.ids[written.start : written.start + shape[0]])
        piece = NewPiece(f"{rid}:{written.start}", rid, written.start, shape[0], digest, self.dtype, shape, slots)
        writer.add((piece, stored(rows, self.dtype)))


def stored(rows: Array, dtype: str) -> bytes:
    """The bytes of float32 ``rows`` in a safetensors dtype, rounded to nearest."""
    if dtype == "F32":
        return np.ascontiguousarray(rows, "<f4").tobytes()
    if dtype == "F16":
        return np.ascontiguousarray(rows, "<f2").tobytes()
    bits = np.ascontiguousarray(rows, "<f4").view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


class _Handler(BaseHTTPRequestHandler):
    tapped: Tapped

    def do_GET(self) -> None:
        tapped = self.tapped
        self._reply(200, {"context_length": tapped.context, "tp_size": tapped.ranks, "dp_size": 1})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        rids = [rid for rid in map(Rid.parse, body["rid"]) if rid is not None]
        assert body["extra_key"] == body["rid"][0]
        if self.tapped.refuse(rids):
            self._reply(500, {"error": "as told"})
        else:
            self._reply(200, self.tapped.generate(rids, body["input_ids"]))

    def _reply(self, status: int, data: Any) -> None:
        body = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
