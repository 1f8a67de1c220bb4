"""How big a data set is, about, and what each host gets of it."""

from __future__ import annotations

import json
from pathlib import Path

from fleetdump.agent.specs import ServerSpec
from fleetdump.dataset.rows import read_rows
from fleetdump.dataset.tokens import DataSize, measure
from fleetdump.inventory import HostConfig
from fleetdump.tasks.check import tokens_by_host


def test_a_data_set_is_measured_row_by_row(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]},
        {"text": "x" * 35},
        {"messages": [{"role": "user", "content": "y" * 70}, {"role": "assistant", "content": "z" * 35}]},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "no json\n")
    assert measure(read_rows(path)) == DataSize(rows=3, broken=1, tokens=3 + 11 + 12 + 30)


def test_every_server_takes_the_same_share() -> None:
    def host(name: str, servers: int) -> HostConfig:
        return HostConfig(name, name, servers=tuple(ServerSpec(f"r{n}", "python", "/m", n) for n in range(servers)))

    shares = tokens_by_host([host("a", 1), host("b", 3), host("c", 0)], 1001)
    assert shares == {"a": 251, "b": 751, "c": 0}
    assert tokens_by_host([host("c", 0)], 5) == {"c": 0}
