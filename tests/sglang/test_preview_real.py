"""The tokeniser with the real transformers and a real fast tokenizer: masks by two methods agree, tools and reasoning
reach the template, and broken rows are refused by name. No server is started."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.context import AgentContext, State
from fleetdump.agent.formats import row_line
from fleetdump.agent.preview import preview
from fleetdump.agent.protocol import Request
from fleetdump.agent.runmessages import PreviewArgs, PreviewResult
from fleetdump.agent.specs import ServerSpec
from tests.sglang.cpuserver import SglangEnv

pytestmark = pytest.mark.sglang

CHATS: list[dict[str, Any]] = [
    {
        "id": f"chat-{turns}",
        "messages": [
            {"role": role, "content": f"{text} {n} Grüße!"}
            for n in range(turns)
            for role, text in (("user", "What is that?"), ("assistant", "It is nothing."))
        ],
    }
    for turns in (1, 2, 5)
]
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content is defined %}[{{ m.reasoning_content }}]{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETFUL_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.reasoning_content is defined %}"
    "[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Preview = Callable[..., PreviewResult]


@pytest.fixture
def ask(sglang_installed: SglangEnv, tmp_path: Path) -> Preview:
    """Previews rows with the demo's tokenizer, with its own template or another."""

    def run(rows: list[dict[str, Any]], template: str = "") -> PreviewResult:
        model = sglang_installed.model
        if template:
            model = tmp_path / "model"
            shutil.rmtree(model, ignore_errors=True)
            model.mkdir()
            for path in sglang_installed.model.iterdir():
                if path.suffix == ".json":
                    shutil.copy(path, model)
            (model / "chat_template.jinja").write_text(template)
        server = ServerSpec("main", str(sglang_installed.python), str(model), 1, env=dict(sglang_installed.env))
        request = Request("preview", {}, deadline=300.0, body_lines=len(rows))
        body = io.BytesIO(b"".join(row_line(row) for row in rows))
        context = AgentContext(request, State(tmp_path / "state"), stdin=body, stdout=io.BytesIO())
        return preview(PreviewArgs(server), context)

    return run


def test_the_prefix_method_finds_what_generation_marks_say(ask: Preview, sglang_installed: SglangEnv) -> None:
    own = (sglang_installed.model / "chat_template.jinja").read_text()
    marked = ask(CHATS)
    unmarked = ask(CHATS, own.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    assert (marked.methods, unmarked.methods) == ({"generation": 3}, {"prefix": 3})
    assert marked.lengths == unmarked.lengths
    assert 0 < marked.supervised < marked.tokens
    assert marked.supervised == unmarked.supervised
    assert [sample.spans for sample in marked.shown] == [sample.spans for sample in unmarked.shown]
    assert marked.shown[1].spans == ["It is nothing. 0 Grüße!<|end|>", "It is nothing. 1 Grüße!<|end|>"]
    assert marked.template_sha256 != unmarked.template_sha256


def test_tools_calls_and_reasoning_reach_the_template(ask: Preview) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    row = {
        "id": "a",
        "tools": [{"type": "function", "function": {"name": "weather"}}],
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "reasoning_content": "I ask.", "tool_calls": [call]},
        ],
    }
    result = ask([row], TOOLS_TEMPLATE)
    assert result.rejected == []
    assert result.shown[0].spans == ['[I ask.]weather{"city": "Ulm"}<|end|>']


def test_a_template_that_forgets_reasoning_is_refused_where_the_mask_would_be_wrong(ask: Preview) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"}
    question = {"role": "user", "content": "2 + 2?"}
    rows = [{"id": "one", "messages": [question, thought]}, {"id": "two", "messages": [question, thought] * 2}]
    result = ask(rows, FORGETFUL_TEMPLATE)
    assert result.shown[0].spans == ["[2 + 2]4<|end|>"]
    assert [(row.id, row.reason) for row in result.rejected] == [("two", "template_error")]


def test_rows_that_only_the_model_can_refuse(ask: Preview, sglang_installed: SglangEnv) -> None:
    config = json.loads((sglang_installed.model / "config.json").read_bytes())
    vocabulary, context = config["vocab_size"], config["max_position_embeddings"]
    rows = [
        {"id": "outside", "input_ids": [5, vocabulary], "loss_mask": [1, 1]},
        {"id": "long", "input_ids": [5] * context, "loss_mask": [1] * context},
        {"id": "fits", "input_ids": [5] * (context - 1), "loss_mask": [1] * (context - 1)},
        {"id": "last", "input_ids": [5, vocabulary - 1], "loss_mask": [1, 1]},
        {"id": "surrogate", "text": "half \ud800"},
        {"id": "one", "input_ids": [5], "loss_mask": [1]},
    ]
    result = ask(rows)
    reasons = {row.id: row.reason for row in result.rejected}
    expected = {"outside": "not_in_vocabulary", "long": "too_long", "surrogate": "template_error", "one": "too_short"}
    assert reasons == expected
    assert result.lengths == [0, 0, context - 1, 2, 0, 0]
