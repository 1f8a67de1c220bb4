"""docs/formats.md and pyproject.toml say what is so: examples fit their classes, every agent module has its side."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.sglang_cpu import recipe
from fleetdump.agent import formats, healthy, lock, patchrecord, runmessages, server, share
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.cli.main import cli
from fleetdump.inventory import load
from fleetdump.ledger import SCHEMA
from fleetdump.worker import tokenise

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```json ?([^\n]*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def tap_config() -> type:
    path = ROOT / "patches" / "hidden-states" / "fleetdump_taprecords.py"
    spec = importlib.util.spec_from_file_location("taprecords_of_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    kind: type = module.Config
    return kind


def record_classes() -> dict[str, Any]:
    modules = (formats, healthy, lock, patchrecord, server, share)
    found = {name: kind for module in modules for name, kind in vars(module).items() if dataclasses.is_dataclass(kind)}
    return {**found, "WorkHead": tokenise.WorkHead, "Config": tap_config(), "TapStatus": runmessages.TapStatus}


@pytest.mark.parametrize(("name", "text"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_an_example_fits_its_class_and_has_all_its_fields(name: str, text: str) -> None:
    data = json.loads(text)
    record = from_json(record_classes()[name], data)
    left_out = set(to_json(record)) - set(data)
    assert left_out <= {"path"}, "an example shows every field (but the merged manifest's)"


def test_every_record_that_is_written_has_an_example() -> None:
    wanted = {
        "PieceRecord",
        "ShardRecord",
        "SkipRecord",
        "ManifestLine",
        "RejectedLine",
        "AttemptLine",
        "WithdrawnLine",
        "Row",
        "Holder",
    }
    wanted |= {
        "HealthyStart",
        "ServerRecord",
        "ShareSpec",
        "DriverRecord",
        "Order",
        "RestartLine",
        "WorkHead",
        "Config",
        "PatchRecord",
        "TapStatus",
    }
    assert {name for name, _ in EXAMPLES} == wanted


def test_the_ledgers_tables_are_the_documented_ones() -> None:
    database = sqlite3.connect(":memory:")
    database.executescript(SCHEMA)
    for (table,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        documented = re.search(rf"^\| {table} \| (.*) \|$", TEXT, re.MULTILINE)
        assert documented, f"{table} is not in docs/formats.md"
        for column in database.execute(f"PRAGMA table_info({table})").fetchall():
            assert re.search(rf"\b{column[1]}\b", documented[1]), f"{table}.{column[1]}"


def test_every_agent_module_is_either_shared_or_forbidden_to_the_controller() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contract = text[text.index("the controller sees only the agent's shared modules") :].split("[[tool.")[0]
    forbidden = set(re.findall(r"fleetdump\.agent\.(\w+)", contract.partition("forbidden_modules")[2]))
    shared = {"protocol", "specs", "hostmessages", "patchmessages", "servermessages", "runmessages", "steermessages"}
    shared |= {"formats", "jsonl", "tensorfile", "shardcheck", "unidiff", "scrub", "arguments", "times"}
    shared |= {"evidence_types", "evidence_process", "evidence_engine", "evidence_host", "evidence_files"}
    agent = ROOT / "fleetdump" / "agent"
    modules = {path.stem for path in agent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert forbidden | shared == modules - {"__init__"}
    assert not forbidden & shared


def test_the_readme_and_the_help_say_the_same_of_exit_codes() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    (codes,) = re.findall(r"Exit codes: (.*?)\.", " ".join((cli.help or "").split()))
    assert codes in readme


def test_every_command_on_hosts_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    left_out = {name for name in cli.commands if not re.search(rf"(`|fleetdump ){name}\b", readme)}
    assert left_out == {"patches", "pause", "resume", "cancel"}, "of patches, and of what attach goes with"


def test_the_inventory_to_go_on_playing_with_is_the_demos(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```sh\n(cat > lab.yaml.*?^EOF\n)", text, re.MULTILINE | re.DOTALL)
    subprocess.run(["bash", "-c", block], cwd=tmp_path, check=True)
    (host,) = load(tmp_path / "lab.yaml").select([], [])
    (server,) = host.servers
    assert host.connection == "local"
    assert (server.args, server.env) == (list(recipe.SERVER_ARGS), recipe.server_env())
    build = tmp_path / "build"
    assert (server.python, server.model_path) == (
        str(build / recipe.PYTHON.relative_to(recipe.BUILD)),
        str(build / recipe.MODEL.relative_to(recipe.BUILD)),
    )
