"""Ids and masks from rows: each way to find the mask, and every row that must be refused.

The tokenizer here is a small real one, by characters; tests/sglang runs the same code with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.formats import Row
from fleetdump.agent.share import Share
from fleetdump.worker.rowencoder import RejectRow, RowEncoder
from fleetdump.worker.tokenise import TokeniseJob, tokenise, tokenizer_sha256

Render = Callable[[list[dict[str, Any]], bool], str]


class CharacterTokenizer:
    """One token a character, but for ``merges``; the chat template is a Python function."""

    def __init__(self, render: Render | None, template: str = "plain", merges: dict[str, int] | None = None):
        self.render = render
        self.chat_template = template if render else None
        self.merges = merges or {}
        self.extra: list[int] = []

    def __call__(self, text: str, add_special_tokens: bool, return_offsets_mapping: bool = False) -> dict[str, Any]:
        text.encode()  # as the real ones: a lone surrogate raises UnicodeEncodeError
        ids, offsets, at = [], [], 0
        while at < len(text):
            size = 2 if text[at : at + 2] in self.merges else 1
            piece = text[at : at + size]
            ids.append(self.merges.get(piece, ord(piece[0])))
            offsets.append((at, at + size))
            at += size
        return {"input_ids": ids, "offset_mapping": offsets}

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any, tokenize: bool, **options: Any) -> Any:
        assert self.render is not None
        if not tokenize:
            return self.render(messages, options["add_generation_prompt"])
        text = self.render(messages, options.get("add_generation_prompt", True))  # as Kimi's own tokenizer
        ids = [*self(text, False)["input_ids"], *self.extra]
        return {"input_ids": ids, "assistant_masks": [int(c.isupper()) for c in text]}

    def decode(self, ids: list[int]) -> str:
        back = {number: text for text, number in self.merges.items()}
        return "".join(back.get(i) or chr(i) for i in ids)


def plain(messages: list[dict[str, Any]], prompt: bool) -> str:
    text = "".join(f"{m['role'][0]}:{m['content']}\n" for m in messages)
    return text + "a:" if prompt else text


def forgetful(messages: list[dict[str, Any]], prompt: bool) -> str:
    """Drops what was thought in all turns but the last, as some templates do."""
    kept = [{**m, "content": m["content"] if m is messages[-1] else m["content"][-1]} for m in messages]
    return plain(kept, prompt)


def chat(*contents: str) -> Row:
    roles = ("user", "assistant")
    return Row("r", messages=[{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)])


def encoder(tokenizer: CharacterTokenizer, limit: int = 100) -> RowEncoder:
    return RowEncoder(tokenizer, vocab_size=2000, limit=limit)


def supervised(tokenizer: CharacterTokenizer, row: Row) -> tuple[str, list[str]]:
    made = encoder(tokenizer)
    encoded = made.encode(row)
    assert len(encoded.ids) == len(encoded.mask)
    return encoded.method, list(made.spans(encoded))


def test_prefix_method_supervises_each_assistant_turn() -> None:
    assert supervised(CharacterTokenizer(plain), chat("hi", "yo", "so", "ok")) == ("prefix", ["yo\n", "ok\n"])


def test_offsets_decide_where_tokens_merge_across_the_end_of_a_message() -> None:
    tokenizer = CharacterTokenizer(plain, merges={"\nu": 1002})
    assert supervised(tokenizer, chat("hi", "yo", "so", "ok")) == ("offsets", ["yo", "ok\n"])


def test_the_template_s_own_marks_come_first() -> None:
    tokenizer = CharacterTokenizer(plain, template="{%- generation -%}")
    assert supervised(tokenizer, chat("hi", "YO")) == ("generation", ["YO"])


def test_a_conversation_without_an_answer_has_no_supervised_token() -> None:
    assert supervised(CharacterTokenizer(plain), chat("hi")) == ("prefix", [])


def test_text_is_supervised_whole_and_ids_are_taken_as_they_are() -> None:
    made = encoder(CharacterTokenizer(None))
    assert made.encode(Row("r", text="abc")).mask == [1, 1, 1]
    given = made.encode(Row("r", input_ids=[5, 6, 7], loss_mask=[0, 1, 0]))
    assert (given.ids, given.mask, given.method) == ([5, 6, 7], [0, 1, 0], "given")
    assert made.encode(Row("r", input_ids=[5, 6])).mask == [1, 1]


def failing(messages: list[dict[str, Any]], prompt: bool) -> str:
    raise KeyError("content")


@pytest.mark.parametrize(
    ("render", "row", "reason", "detail"),
    [
        (forgetful, chat("hi", "thought yo", "so", "ok"), "template_error", "differently as the conversation grows"),
        (failing, chat("hi", "yo"), "template_error", "KeyError"),
        (None, chat("hi", "yo"), "template_error", "no chat template"),
        (plain, Row("r", messages=[]), "empty", "without messages"),
        (plain, Row("r", text=""), "empty", "no token"),
        (plain, Row("r", input_ids=[]), "empty", "no token"),
        (plain, Row("r", text="x" * 101), "too_long", "101 tokens, limit 100"),
        (plain, Row("r", text="\ud800"), "template_error", "cannot be tokenised"),
        (plain, chat("\ud800", "yo"), "template_error", "cannot be tokenised"),
        (plain, Row("r", text="x"), "too_short", "one token"),
        (plain, Row("r", input_ids=[7]), "too_short", "one token"),
        (plain, Row("r", input_ids=[5, 2000]), "not_in_vocabulary", "outside the vocabulary"),
        (plain, Row("r", input_ids=[-1, 5]), "not_in_vocabulary", "outside the vocabulary"),
        (plain, Row("r", input_ids=[1, 2], loss_mask=[1]), "template_error", "1 entries, input_ids 2"),
        (plain, Row("r", input_ids=[1], loss_mask=[3]), "template_error", "other than 0 and 1"),
    ],
)
def test_rows_that_cannot_be_samples(render: Render | None, row: Row, reason: str, detail: str) -> None:
    with pytest.raises(RejectRow) as caught:
        encoder(CharacterTokenizer(render)).encode(row)
    assert caught.value.reason == reason
    assert detail in str(caught.value)


def test_work_file(tmp_path: Path) -> None:
    rows = [
        {"id": "chat", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]},
        {"id": "none", "messages": [{"role": "user", "content": "hi"}]},
        {"id": "text", "text": "abc"},
        {"id": "ids", "input_ids": [65, 66], "loss_mask": [0, 1]},
        {"id": "long", "text": "x" * 200},
        {"id": "odd", "text": 5},
    ]
    share = Share(tmp_path / "r1" / "main")
    share.root.mkdir(parents=True)
    share.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = TokeniseJob(str(tmp_path), str(share.rows), str(share.work))
    head = tokenise(job, encoder(CharacterTokenizer(plain)))
    assert (head.samples, head.rejected, head.unsupervised_samples) == (4, 2, 1)
    assert head.methods == {"prefix": 2, "text": 1, "given": 1}
    assert list(share.root.glob("*.tmp")) == []
    lines = {line["id"]: (sample, line) for sample, line in share.scan_work()}
    assert lines["long"][1]["reason"] == "too_long"
    assert lines["odd"][1]["reason"] == "template_error"
    sample = lines["chat"][0]
    assert sample is not None
    ids, mask = share.read_sample(sample)
    assert "".join(map(chr, ids)) == "u:hi\na:yo\n"
    assert sum(mask) == 3
    known = share.work_head()
    assert known.notes == [
        f"chat template {head.template_sha256[:12]}; masks by given 1, prefix 2, text 1",
        r"chat: 3 of 10 tokens supervised: 'yo\n'",
        "text: 3 of 3 tokens supervised: 'abc'",
        "ids: 1 of 2 tokens supervised: 'B'",
        "1 samples have more than 100 tokens and were dropped",
        "warning: 1 samples have no supervised token",
    ]
    assert known.template_sha256 == head.template_sha256


def test_a_long_sample_is_cut_or_dropped_as_told_and_both_are_counted(tmp_path: Path) -> None:
    share = Share(tmp_path / "r1" / "main")
    share.root.mkdir(parents=True)
    share.rows.write_text("".join(json.dumps({"id": str(n), "text": "x" * n}) + "\n" for n in (99, 100, 101, 150)))
    job = TokeniseJob(str(tmp_path), str(share.rows), str(share.work))
    dropped = tokenise(job, encoder(CharacterTokenizer(plain)))
    assert (dropped.samples, dropped.dropped, dropped.truncated, dropped.limit) == (2, 2, 0, 100)
    cut = tokenise(job, RowEncoder(CharacterTokenizer(plain), vocab_size=2000, limit=100, truncate=True))
    assert (cut.samples, cut.dropped, cut.truncated, cut.tokens) == (4, 0, 2, 399)
    assert [len(line["ids"]) == len(line["mask"]) <= 100 for _, line in share.scan_work()] == [True] * 4
    assert "2 samples were cut at 100 tokens" in share.work_head().notes


def test_ids_that_the_template_would_not_give_are_refused() -> None:
    tokenizer = CharacterTokenizer(plain)
    tokenizer.extra = [7]
    with pytest.raises(RejectRow, match="other ids than the chat template gives"):
        encoder(tokenizer).encode(chat("hi", "yo"))


def calling(arguments: Any) -> Row:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return Row(
        "r", messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    )


@pytest.mark.parametrize("wants", [dict, str])
def test_arguments_of_tool_calls_come_as_the_template_wants_them(wants: type) -> None:
    """As an object, which SGLang hands to it; as the text that the row has, where the template fails with that."""

    def render(messages: list[dict[str, Any]], prompt: bool) -> str:
        text = ""
        for message in messages:
            for call in message.get("tool_calls") or []:
                arguments = call["function"]["arguments"]
                if not isinstance(arguments, wants):
                    raise TypeError("can only concatenate str")
                text += "object " if isinstance(arguments, dict) else arguments
            text += message["content"]
        return text + ("a:" if prompt else "")

    row = calling('{"x": 1}')
    ids = (
        encoder(CharacterTokenizer(lambda messages, prompt: render(messages, prompt).replace("a:", ""))).encode(row).ids
    )
    assert "".join(map(chr, ids)) == ("hiobject " if wants is dict else 'hi{"x": 1}')
    assert (row.messages or [])[1]["tool_calls"][0]["function"][
        "arguments"
    ] == '{"x": 1}'  # the row itself is untouched


def test_the_tokenizer_s_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    hashes = set()
    for name, text in (("tokenizer.json", "a"), ("tokenizer.json", "b"), ("vocab.json", "b"), ("README.md", "x")):
        (tmp_path / name).write_text(text)
        hashes.add(tokenizer_sha256(tmp_path))
    assert len(hashes) == 3
