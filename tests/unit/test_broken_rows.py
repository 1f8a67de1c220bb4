"""500 broken rows among good ones, from the file to rejected.jsonl: each has its line and reason there."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from brokenrows import KINDS, LIMIT, VOCABULARY, lines

from fleetdump.agent.formats import RejectedLine
from fleetdump.dataset.intake import take_in
from fleetdump.dataset.rows import numbered_rows
from fleetdump.errors import UsageError
from fleetdump.ledger import Ledger
from fleetdump.tasks.assignment import open_run
from fleetdump.tasks.rejected import write_rejected
from fleetdump.worker.rowencoder import RowEncoder
from fleetdump.worker.tokenise import TokeniseJob, tokenise

BROKEN = 500


class Tokenizer:
    """One token a character."""

    chat_template = "plain"

    def __call__(self, text: str, **_: Any) -> dict[str, Any]:
        return {"input_ids": [ord(character) % VOCABULARY for character in text]}

    def apply_chat_template(self, messages: list[dict[str, Any]], tokenize: bool, **_: Any) -> Any:
        text = "".join(message["content"] for message in messages)
        if text.endswith("raise"):
            raise ValueError("no such message")
        return self(text) if tokenize else text

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_500_broken_rows(tmp_path: Path) -> None:
    made = list(lines(BROKEN))
    assert sum(bool(line.reason) for line in made) == BROKEN
    assert len({line.kind for line in made if line.kind}) == len(KINDS) >= 40
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(line.data for line in made))
    with pytest.raises(UsageError, match="more than 100 of the first"):
        take_in(numbered_rows(path))

    data = take_in(numbered_rows(path), max_rejects=BROKEN)
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        share = open_run(ledger, "r1", data, [("h1", "main")]).shares["h1", "main"]
        (tmp_path / "rows").write_text("".join(share.lines))
        encoder = RowEncoder(Tokenizer(), VOCABULARY, LIMIT)
        tokenise(TokeniseJob(str(tmp_path), str(tmp_path / "rows"), str(tmp_path / "work")), encoder)
        for line in (tmp_path / "work").read_text().splitlines()[1:]:
            record = json.loads(line)
            if "reason" in record:
                ledger.reject(
                    "h1", RejectedLine(record["id"], "r1", "main", record["reason"], record["detail"], 0, 0.0)
                )
        rejected = [json.loads(line) for line in write_rejected(ledger, tmp_path).read_text().splitlines()]

    expected = {number: line.reason for number, line in enumerate(made, 1) if line.reason}
    assert {row["line"]: row["reason"] for row in rejected} == expected
    assert len(rejected) == BROKEN
    assert all(row["detail"] for row in rejected)
    assert not [row for row in rejected if len(row["detail"]) > 400]
    samples = [json.loads(line)["id"] for line in (tmp_path / "work").read_text().splitlines()[1:] if '"ids"' in line]
    assert samples == [f"good {n}" for n in range(BROKEN)]


def test_kinds_have_names_of_their_own() -> None:
    assert [name for name, count in Counter(kind.name for kind in KINDS).items() if count > 1] == []
