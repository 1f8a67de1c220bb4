"""What a host is asked before a run: a preview of the tokens, a burst for the rate; and limits that come too late."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from extraction import LAYERS, StandIn, wait_for

from fleetdump.agent.burst import burst
from fleetdump.agent.context import AgentContext
from fleetdump.agent.drive import submit
from fleetdump.agent.formats import row_line
from fleetdump.agent.preview import preview
from fleetdump.agent.protocol import AgentFailure, Request
from fleetdump.agent.runmessages import BurstArgs, PreviewArgs, PreviewReject, SampleSpans, SubmitArgs
from fleetdump.agent.specs import CaptureSpec, ServerSpec

TRANSFORMERS = '''
class Tokenizer:
    """One token a character; assistants answer after a colon."""

    chat_template = "plain"

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=False, **_):
        text = "".join(m["role"][0] + ":" + m["content"] + ";" for m in messages)
        text += "a:" if add_generation_prompt else ""
        return self(text) if tokenize else text

    def decode(self, ids):
        return "".join(map(chr, ids))


class AutoTokenizer:
    @staticmethod
    def from_pretrained(path, **_):
        return Tokenizer()
'''


@pytest.fixture
def host(tmp_path: Path) -> Iterator[StandIn]:
    standin = StandIn(tmp_path)
    yield standin
    standin.kill()


@pytest.fixture
def server(tmp_path: Path) -> ServerSpec:
    """A server with an interpreter and a model that can tokenise; it is not launched."""
    package = tmp_path / "site" / "transformers"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TRANSFORMERS)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"vocab_size": 1000, "max_position_embeddings": 101}))
    return ServerSpec("main", sys.executable, str(model), 1, env={"PYTHONPATH": str(package.parent)})


def context(host: StandIn, rows: list[dict[str, Any]], deadline: float = 120.0) -> AgentContext:
    request = Request("x", {}, deadline=deadline, body_lines=len(rows))
    body = io.BytesIO(b"".join(row_line(row) for row in rows))
    return AgentContext(request, host.state, stdin=body, stdout=io.BytesIO())


# --------------------------------------------------------------------------- preview
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
ROWS: list[dict[str, Any]] = [
    {"id": "none", "messages": CHAT[:1]},
    {"id": "chat", "messages": CHAT},
    {"id": "long", "text": "x" * 200},
    {"id": "ids", "input_ids": [65, 66, 67], "loss_mask": [1, 0, 1]},
    {"id": "text", "text": "hello"},
    {"id": "more", "text": "not shown"},
]


def test_a_preview_says_what_an_extraction_would_make_of_the_rows(host: StandIn, server: ServerSpec) -> None:
    result = preview(PreviewArgs(server), context(host, ROWS))
    assert result.lengths == [5, 10, 0, 3, 5, 9]
    assert (result.tokens, result.supervised, result.limit) == (32, 3 + 2 + 5 + 9, 100)
    assert result.shown == [
        SampleSpans("chat", 10, 3, ["yo;"]),
        SampleSpans("ids", 3, 2, ["A", "C"]),
        SampleSpans("text", 5, 5, ["hello"]),
    ]
    assert result.rejected == [PreviewReject("long", "too_long", "200 tokens, limit 100")]
    assert result.template_sha256 == hashlib.sha256(b"plain").hexdigest()
    assert (result.methods, result.unsupervised_samples) == ({"prefix": 2, "given": 1, "text": 2}, 1)
    assert not [path for path in host.state.root.rglob("*") if path.is_file()] if host.state.root.exists() else True


def test_the_context_of_a_server_that_runs_is_the_limit(host: StandIn, server: ServerSpec) -> None:
    host.start()
    assert preview(PreviewArgs(server), context(host, ROWS)).limit == 2047
    result = preview(PreviewArgs(server, max_tokens=8, too_long="truncate"), context(host, ROWS))
    assert (result.lengths, result.truncated, result.limit) == ([5, 8, 8, 3, 5, 8], 3, 8)


def test_a_preview_that_cannot_be_made_says_why(host: StandIn, server: ServerSpec, tmp_path: Path) -> None:
    server.python = str(tmp_path / "nowhere")
    with pytest.raises(AgentFailure) as caught:
        preview(PreviewArgs(server), context(host, ROWS))
    assert (caught.value.error.code, caught.value.error.where) == ("not_found", server.python)
    server.python, server.model_path = sys.executable, str(tmp_path / "no-model")
    Path(server.model_path).mkdir()
    with pytest.raises(AgentFailure) as caught:
        preview(PreviewArgs(server), context(host, ROWS))
    assert caught.value.error.code == "failed"
    assert "config.json" in caught.value.error.why
    assert "fleetdump check" in caught.value.error.next_step


# --------------------------------------------------------------------------- burst
def test_a_burst_gives_the_rate_and_leaves_nothing(host: StandIn) -> None:
    host.set_faults(delay=0.2)
    host.start()
    args = BurstArgs(["main"], host.capture, [50] * 20, token_budget=100, seconds=60.0)
    rate = burst(args, context(host, [])).tokens_per_second["main"]
    # Two prompts at a time, each at least 0.2 s: 1000 tokens take 2 s or, on a busy machine, more.
    assert 0 < rate <= 500
    requests = host.requests()
    assert len(requests) == 1 + 20
    assert max(int(beside) for *_, beside in requests) == 1
    assert not list(Path(host.capture.dir).iterdir())
    assert not list((host.state.root / "runs").iterdir())


def test_a_burst_ends_in_time(host: StandIn) -> None:
    host.set_faults(delay=0.2)
    host.start()
    burst(BurstArgs(["main"], host.capture, [50] * 1000, token_budget=50, seconds=1.0), context(host, []))
    assert len(host.requests()) < 20


@pytest.mark.parametrize(
    ("faults", "layers", "fragment"),
    [
        ({"error": [f"burst-{n}" for n in range(9)]}, LAYERS, "refused a request"),
        ({}, [2], "capture"),
        (None, LAYERS, "never launched"),
    ],
)
def test_a_burst_that_measures_nothing_is_an_error(
    host: StandIn, faults: dict[str, Any] | None, layers: list[int], fragment: str
) -> None:
    if faults is not None:
        host.set_faults(**faults)
        host.start()
    capture = CaptureSpec(layers=layers, dir=host.capture.dir)
    with pytest.raises(AgentFailure) as caught:
        burst(BurstArgs(["main"], capture, [50] * 4), context(host, []))
    assert fragment in caught.value.error.what


# --------------------------------------------------------------------------- limits
@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"max_tokens": 4096, "too_long": "truncate"}, ""),
        ({"max_tokens": 2048}, "begun with --max-tokens 4096, not 2048"),
        ({"max_tokens": 0}, "begun with --max-tokens 4096, not 0"),
        ({"too_long": "drop"}, "begun with --too-long truncate, not drop"),
    ],
)
def test_a_run_keeps_the_limits_that_it_was_begun_with(host: StandIn, changes: dict[str, Any], refused: str) -> None:
    host.start()
    rows = [{"id": "x0", "input_ids": [1]}]
    digest = hashlib.sha256(row_line(rows[0])).hexdigest()
    share = host.share({"x0": 1})
    (share.root / "share.json").unlink()
    submit(SubmitArgs("r1", "main", digest, host.capture, 4096, "truncate"), context(host, rows))
    wait_for(lambda: share.progress().state == "done", 60)
    again = SubmitArgs("r1", "main", digest, host.capture, **changes)
    if not refused:
        assert submit(again, context(host, rows)).state == "done"
        return
    with pytest.raises(AgentFailure) as caught:
        submit(again, context(host, rows))
    assert refused in caught.value.error.what
    assert "--run" in caught.value.error.next_step
