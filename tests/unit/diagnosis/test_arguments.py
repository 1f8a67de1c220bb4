"""A server that its own parser of arguments refused: what was wrong, and what it would have taken."""

from __future__ import annotations

from pathlib import Path

import pytest
from cases import builder as b

from fleetdump.agent.probes.logfile import LogReader
from fleetdump.agent.probes.logusage import Usage
from fleetdump.diagnosis import diagnose

USAGE = """usage: sglang serve [-h] --model-path MODEL_PATH
                    [--tokenizer-mode {auto,slow}] [--tp-size TP_SIZE]
                    [--pp-size PP_SIZE] [--port PORT]
"""
REFUSALS = {
    "unrecognized arguments: --tp-sizze 2": "--tp-size",
    "unrecognized arguments: --porrt=30000 --x": "--port",
    "unrecognized arguments: --nothing-like-it": "",
    "argument --moe-backend: invalid choice: 'tritan' (choose from 'triton', 'flashinfer', 'fa3')": "triton",
    "argument --dtype: invalid choice: 'bf16' (choose from auto, half, bfloat16)": "bfloat16",
    "argument --tp-size: invalid int value: 'two'": "",
    "argument --port: expected one argument": "",
    "the following arguments are required: --model-path/--model": "",
    "ambiguous option: --t could match --tp-size, --tokenizer-mode": "",
}  # fmt: skip


def read(tmp_path: Path, text: str) -> tuple[str, str]:
    (tmp_path / "log").write_text(text)
    reader = LogReader(str(tmp_path / "log"), 1)
    reader.first()
    facts = reader.second()
    return facts.bad_argument, facts.nearest_argument


@pytest.mark.parametrize("program", ["sglang serve", "launch_server.py", "vllm serve"])
@pytest.mark.parametrize(("what", "nearest"), REFUSALS.items())
def test_refusal_and_what_is_like_it(program: str, what: str, nearest: str, tmp_path: Path) -> None:
    assert read(tmp_path, f"{USAGE}{program}: error: {what}\n") == (what, nearest)


@pytest.mark.parametrize(
    "text",
    [
        USAGE,
        "[2026-01-01 00:00:00 TP0] argument --x is deprecated\n",
        "ValueError: error: argument of another kind\n",
        "INFO: a client was told: error: unrecognized arguments: --x\n" * 2,
    ],
)
def test_other_lines_refuse_nothing(text: str, tmp_path: Path) -> None:
    assert read(tmp_path, text) == ("", "")


def test_a_secret_beside_an_unknown_argument_is_scrubbed(tmp_path: Path) -> None:
    refused, _ = read(
        tmp_path, "sglang serve: error: unrecognized arguments: --api-kee x --api-key sk-123456789abcdef\n"
    )
    assert "--api-kee" in refused
    assert "sk-123456789abcdef" not in refused


def test_a_usage_without_end_costs_no_memory() -> None:
    usage = Usage()
    for n in range(20_000):
        usage.feed(f"[--option-{n} X]")
    usage.feed("p: error: unrecognized arguments: --option-1x")
    assert usage.nearest() == "--option-1"


def test_the_sentence_names_the_argument_and_the_nearest() -> None:
    e = b.server(1)
    b.dead(e)
    e.log.bad_argument, e.log.nearest_argument = "unrecognized arguments: --tp-sizze 2", "--tp-size"
    (best,) = diagnose(e)
    assert best.code == "LAUNCHER_DIED"
    assert "--tp-sizze" in best.title
    assert "it knows --tp-size" in best.title
    e.log.bad_argument = "argument --dtype: invalid choice: 'bf16' (choose from 'auto', 'half')"
    assert "choose from" not in diagnose(e)[0].title
