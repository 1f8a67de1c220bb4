"""Rows of a data set: every accepted form, and every way in which a line can be broken."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.agent.formats import Row
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.dataset.rows import BrokenRow, read_rows
from fleetdump.dataset.rows import jsonl as jsonl_module
from fleetdump.errors import ExitCode, UsageError

HELLO = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


def read(tmp_path: Path, *lines: bytes | str | dict[str, Any]) -> list[Row | BrokenRow]:
    path = tmp_path / "rows.jsonl"
    encoded = [json.dumps(line) if isinstance(line, dict) else line for line in lines]
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in encoded))
    return list(read_rows(path))


def row(tmp_path: Path, line: bytes | str | dict[str, Any]) -> Row:
    (result,) = read(tmp_path, line)
    assert isinstance(result, Row), result
    return result


def broken(tmp_path: Path, line: bytes | str | dict[str, Any]) -> BrokenRow:
    first, last = read(tmp_path, {"id": "before", "text": "x"}, line, {"id": "after", "text": "y"})[0::2]
    assert (getattr(first, "id", ""), getattr(last, "id", "")) == ("before", "after")  # its neighbours survive
    result = read(tmp_path, {"id": "before", "text": "x"}, line)[1]
    assert isinstance(result, BrokenRow), result
    assert result.line == 2
    return result


# --------------------------------------------------------------------------- accepted
def test_messages(tmp_path: Path) -> None:
    assert row(tmp_path, {"id": "a", "messages": HELLO, "other": 1}) == Row("a", messages=HELLO)


def test_sharegpt(tmp_path: Path) -> None:
    conversation = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a", "weight": 1},
        {"from": "tool", "value": "t"},
    ]
    assert row(tmp_path, {"id": "a", "conversations": conversation}).messages == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a", "weight": 1},
        {"role": "tool", "content": "t"},
    ]


def test_conversations_may_use_role_and_content(tmp_path: Path) -> None:
    assert row(tmp_path, {"id": "a", "conversations": HELLO}).messages == HELLO


def test_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    for given_tools in (tools, json.dumps(tools)):
        result = row(tmp_path, {"id": "a", "messages": [*HELLO, call], "tools": given_tools})
        assert (result.tools, result.messages) == (tools, [*HELLO, call])
    for nothing in (None, [], "", " "):
        assert row(tmp_path, {"id": "a", "text": "x", "tools": nothing}).tools is None


def test_reasoning_and_null_keys(tmp_path: Path) -> None:
    thought = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2", "tool_calls": None, "name": None}
    assert row(tmp_path, {"id": "a", "messages": [HELLO[0], thought]}).messages == [
        HELLO[0],
        {"role": "assistant", "content": "4", "reasoning_content": "2 + 2"},
    ]


def test_tool_calls_may_be_a_json_text(tmp_path: Path) -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    message = {"role": "assistant", "content": None, "tool_calls": json.dumps(calls)}
    assert (row(tmp_path, {"messages": [message]}).messages or [])[0]["tool_calls"] == calls


def test_text_parts(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    assert row(tmp_path, {"id": "a", "messages": messages}).messages == messages


def test_ids(tmp_path: Path) -> None:
    result = row(tmp_path, {"id": "a", "input_ids": [0, 5, 7], "loss_mask": [0, 1, 1], "text": "x", "messages": HELLO})
    assert result == Row("a", input_ids=[0, 5, 7], loss_mask=[0, 1, 1])


def test_text(tmp_path: Path) -> None:
    assert row(tmp_path, {"id": "a", "text": "Grüße \U0001f600\n", "messages": None}) == Row(
        "a", text="Grüße \U0001f600\n"
    )


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"id": "x", "uuid": "y"}, "x"),
        ({"conversation_id": "y"}, "y"),
        ({"uuid": "z", "id": None}, "z"),
        ({"id": 17}, "17"),
        ({"id": 0}, "0"),
        ({"id": "ä/ %"}, "ä/ %"),
        ({"id": "x" * 200}, "x" * 200),
    ],
)
def test_own_id(tmp_path: Path, ids: dict[str, Any], expected: str) -> None:
    assert row(tmp_path, {**ids, "text": "x"}).id == expected


def test_content_id_depends_on_the_content_alone(tmp_path: Path) -> None:
    ids = {
        row(tmp_path, line).id
        for line in (
            {"messages": HELLO},
            {"x": 1, "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]},
            json.dumps({"messages": [{"content": m["content"], "role": m["role"]} for m in HELLO]}, indent=None),
        )
    }
    assert ids == {row(tmp_path, {"messages": HELLO}).id}
    assert len(ids.pop()) == 16
    assert row(tmp_path, {"text": "a"}).id != row(tmp_path, {"text": "b"}).id
    assert row(tmp_path, {"text": "a"}).id == "8b853c3fe5ffe87a"  # for ever: a data set read again has the same ids


def test_rows_travel_as_json(tmp_path: Path) -> None:
    result = row(tmp_path, {"messages": HELLO})
    assert from_json(Row, json.loads(json.dumps(to_json(result)))) == result


def test_empty_lines_count_but_are_skipped(tmp_path: Path) -> None:
    results = read(tmp_path, "", {"id": "a", "text": "x"}, "  \r", "nonsense", "", {"id": "b", "text": "x"}, "")
    assert [getattr(r, "id", None) or getattr(r, "line", 0) for r in results] == ["a", 4, "b"]
    assert read(tmp_path, "", " ") == []


def test_byte_order_mark_at_the_start_is_no_content(tmp_path: Path) -> None:
    assert row(tmp_path, b"\xef\xbb\xbf" + b'{"id": "a", "text": "x"}\r').id == "a"


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "x"}\nbroken\n'))
    first, second = read_rows(path)
    assert first == Row("a", text="x")
    assert isinstance(second, BrokenRow)
    assert (second.line, second.reason) == (2, "bad_json")


# --------------------------------------------------------------------------- broken
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "bad_json"),
        ('{"text": "x"} {}', "bad_json"),
        ("{'text': 'x'}", "bad_json"),
        ('{"text": "x", "score": NaN}', "bad_json"),
        ('{"text": "x", "score": -Infinity}', "bad_json"),
        ('{"id": ' + "9" * 5000 + ', "text": "x"}', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("\ufeff{}", "bad_json"),
        (b'{"text": "caf\xe9"}', "not_utf8"),
        ('{"text": "x"}'.encode("utf-16"), "not_utf8"),
        ('{"text": "\\ud800"}', "bad_text"),
        ('{"id": "\\udfff", "text": "x"}', "bad_text"),
        ("[]", "not_an_object"),
        ("null", "not_an_object"),
        ('"text"', "not_an_object"),
        ("1", "not_an_object"),
        ({}, "no_content"),
        ({"prompt": "x"}, "no_content"),
        ({"text": None}, "no_content"),
        ({"text": 5}, "bad_text"),
        ({"text": ["x"]}, "bad_text"),
        ({"text": ""}, "empty"),
        ({"text": " \n"}, "empty"),
        ({"messages": []}, "empty"),
        ({"conversations": []}, "empty"),
        ({"messages": [{"role": "user", "content": " "}]}, "empty"),
        ({"messages": [{"role": "user", "content": []}]}, "empty"),
        ({"messages": "[]"}, "bad_messages"),
        ({"messages": {"role": "user", "content": "x"}}, "bad_messages"),
        ({"messages": ["x"]}, "bad_messages"),
        ({"messages": [None]}, "bad_messages"),
        ({"messages": [{"content": "x"}]}, "bad_messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "bad_messages"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "bad_messages"),
        ({"messages": [{"role": "user"}]}, "bad_messages"),
        ({"messages": [{"role": "user", "value": "x"}]}, "bad_messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "bad_messages"),
        ({"messages": [{"role": "user", "content": None}]}, "bad_messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "image": "x"}]}]}, "multimodal"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "bad_messages"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "bad_messages"),
        ({"messages": [{"role": "user", "content": "x\x00"}]}, "bad_text"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "x", "reasoning_content": 5}]}, "bad_messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": ["f"]}]}, "bad_messages"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "bad_messages"),
        ({"messages": HELLO, "images": ["a.png"]}, "multimodal"),
        ({"input_ids": [1]}, "bad_ids"),
        ({"input_ids": "1", "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [-1], "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [1 << 31], "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [1.0], "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [True], "loss_mask": [1]}, "bad_ids"),
        ({"input_ids": [[1]], "loss_mask": [[1]]}, "bad_ids"),
        ({"input_ids": [1], "loss_mask": [2]}, "bad_ids"),
        ({"input_ids": [1], "loss_mask": [True]}, "bad_ids"),
        ({"input_ids": [], "loss_mask": []}, "empty"),
        ({"input_ids": [1], "loss_mask": [1]}, "too_short"),
        ({"text": "a\x00b"}, "bad_text"),
        ({"text": "x", "tools": "[{"}, "bad_tools"),
        ({"text": "x", "tools": ["f"]}, "bad_tools"),
        ({"text": "x", "tools": {"name": "f"}}, "bad_tools"),
        ({"text": "x", "tools": 0}, "bad_tools"),
        ({"text": "x", "tools": '["\\ud800"]'}, "bad_text"),
        ({"text": "x", "id": ""}, "bad_id"),
        ({"text": "x", "id": "a\nb"}, "bad_id"),
        ({"text": "x", "id": "a\x7fb"}, "bad_id"),
        ({"text": "x", "id": "x" * 201}, "bad_id"),
        ({"text": "x", "id": 1.5}, "bad_id"),
        ({"text": "x", "id": True}, "bad_id"),
        ({"text": "x", "id": ["a"]}, "bad_id"),
        ({"text": "x", "id": "before"}, "duplicate_id"),
    ],
)
def test_broken(tmp_path: Path, line: bytes | str | dict[str, Any], reason: str) -> None:
    result = broken(tmp_path, line)
    assert result.reason == reason
    assert 0 < len(result.detail) < 400


def test_duplicates(tmp_path: Path) -> None:
    results = read(
        tmp_path, {"text": "x"}, {"text": "x", "score": 2}, {"id": 7, "text": "x"}, {"uuid": "7", "text": "z"}
    )
    assert [getattr(r, "reason", "ok") for r in results] == ["ok", "duplicate_id", "ok", "duplicate_id"]
    assert isinstance(results[1], BrokenRow)
    assert "line 1" in results[1].detail


def test_huge_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl_module, "MAX_LINE_BYTES", 100)
    fits = '{"id": "a", "text": "' + "x" * 77 + '"}'
    assert len(fits) == 100
    results = read(tmp_path, fits, '{"text": "' + "x" * 1000 + '"}', {"id": "b", "text": "x"}, "y" * 350)
    assert [getattr(r, "reason", "ok") for r in results] == ["ok", "too_long", "ok", "too_long"]
    assert [r.line for r in results if isinstance(r, BrokenRow)] == [2, 4]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40).map(str.encode), max_size=5))
def test_any_bytes_are_rows_or_broken_rows(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("any") / "x.jsonl"
    path.write_bytes(b"#\n" + b"\n".join(lines))
    results = list(read_rows(path))
    assert results[0] == BrokenRow(1, "bad_json", getattr(results[0], "detail", ""))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner),
    max_leaves=6,
)
KEYS = st.sampled_from(["id", "messages", "conversations", "text", "input_ids", "loss_mask", "tools"])


@settings(deadline=None)
@given(st.dictionaries(KEYS, JSON, min_size=1))
def test_any_object_is_a_row_or_a_broken_row(tmp_path_factory: pytest.TempPathFactory, data: dict[str, Any]) -> None:
    path = tmp_path_factory.mktemp("object") / "x.jsonl"
    path.write_text(json.dumps(data))
    (result,) = read_rows(path)
    if isinstance(result, Row):
        contents = (result.messages, result.text, result.input_ids)
        assert sum(content is not None for content in contents) == 1
        assert 1 <= len(result.id) <= 200


# --------------------------------------------------------------------------- the file
def test_missing_file_and_directory_are_told_at_once(tmp_path: Path) -> None:
    for path, fragment in ((tmp_path / "none.jsonl", "cannot be read"), (tmp_path, "holds no data set")):
        with pytest.raises(UsageError, match=fragment) as caught:
            read_rows(path)  # without a single next()
        assert caught.value.exit_code == ExitCode.USAGE
        assert caught.value.next_step


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_file(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}")
    path.chmod(0)
    with pytest.raises(UsageError, match="cannot be read"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "content", "fragment"),
    [
        ("x.zip", b"PK\x03\x04...", "zip file"),
        ("x.json", b'[\n{"text": "x"}\n]', "one JSON list"),
        ("x.parquet", b"PAR1....", "damaged"),
        ("x.arrow", b"ARROW1..", "damaged"),
        ("x.arrow", b"\xff\xff\xff\xff\x10", "damaged"),
    ],
)
def test_other_formats_and_damaged_files_are_named_at_once(
    tmp_path: Path, name: str, content: bytes, fragment: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UsageError, match=fragment) as caught:
        read_rows(path)
    assert caught.value.next_step


@pytest.mark.parametrize("damage", [lambda data: data[:-12], lambda data: data[:40] + b"\0\0\0\0" + data[44:]])
def test_damaged_gzip_is_an_error_not_fewer_rows(tmp_path: Path, damage: Any) -> None:
    path = tmp_path / "x.jsonl.gz"
    lines = b"".join(b'{"text": "%s"}\n' % os.urandom(20).hex().encode() for _ in range(50))
    path.write_bytes(damage(gzip.compress(lines)))
    with pytest.raises(UsageError, match="damaged"):
        list(read_rows(path))
