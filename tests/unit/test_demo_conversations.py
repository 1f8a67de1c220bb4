"""The demo's text: enough conversations, of all lengths, in the roles and scripts that break naive code."""

import itertools
import json

import pytest

from demo.sglang_cpu import recipe


@pytest.fixture(scope="module")
def conversations():
    return [json.loads(line) for line in recipe.CONVERSATIONS.open(encoding="utf-8")]


def tokens(messages):
    """The demo's tokenizer has one token a byte, one for each role and one that ends an assistant's turn."""
    return sum(len(m["content"].encode()) + 1 + (m["role"] == "assistant") for m in messages)


def test_there_are_enough_with_ids_of_their_own(conversations):
    assert len(conversations) >= 72
    assert len({row["id"] for row in conversations}) == len(conversations)


def test_lengths_spread_from_five_to_fifteen_hundred_tokens(conversations):
    lengths = sorted(tokens(row["messages"]) for row in conversations)
    assert lengths[0] == 5
    assert 1400 <= lengths[-1] <= 1550
    for low, high in itertools.pairwise((5, 50, 200, 500, 1000, 1551)):
        assert sum(low <= length < high for length in lengths) >= 5


def test_turns_alternate_and_end_with_the_assistant(conversations):
    for row in conversations:
        roles = [m["role"] for m in row["messages"] if m["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2), row["id"]
        assert all(m["role"] != "system" for m in row["messages"][1:]), row["id"]


def test_kinds(conversations):
    text = [row["messages"] for row in conversations]
    assert sum(m[0]["role"] == "system" for m in text) >= 5
    assert sum(len(m) >= 4 for m in text) >= 10
    assert sum(not "".join(t["content"] for t in m).isascii() for m in text) >= 10
