"""The command line as a user meets it: help, wrong input, exit codes. No host is touched."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from manifests import manifest_line, text_of

from fleetdump.cli.collect import _show_merged
from fleetdump.cli.main import cli
from fleetdump.errors import ExitCode, UsageError
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks.merge import CollectReport

COMMANDS = (
    "init",
    "check",
    "deploy",
    "selfcheck",
    "status",
    "watch",
    "logs",
    "diagnose",
    "plan",
    "extract",
    "attach",
    "pause",
    "drain",
    "resume",
    "cancel",
    "verify",
    "collect",
    "restart",
    "stop",
    "revert",
    "clean",
    "patches",
    "audit",
    "unlock",
)


def fleetdump(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetdump", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)


def test_help_lists_every_command_in_the_order_of_the_journey() -> None:
    result = fleetdump("--help")
    assert result.returncode == 0
    listing = result.stdout[result.stdout.index("Commands:") :].splitlines()[1:]
    assert tuple(line.split()[0] for line in listing if line.strip()) == COMMANDS
    assert "Exit codes" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example(command: str) -> None:
    result = fleetdump(command, "-h")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert f"fleetdump {command}" in result.stdout


def walk(command: click.Command, path: tuple[str, ...] = ("fleetdump",)) -> Iterator[tuple[str, click.Command]]:
    """Each command with all its words, those of groups too."""
    yield " ".join(path), command
    if isinstance(command, click.Group):
        for name, one in command.commands.items():
            yield from walk(one, (*path, name))


EVERY = dict(walk(cli))


@pytest.mark.parametrize("words", EVERY)
def test_every_command_says_what_it_and_its_options_are(words: str) -> None:
    command = EVERY[words]
    told = command.help or ""
    assert words == "fleetdump" or command.short_help, "its line in the list of commands"
    assert len(told.split()) > 5
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            name = "/".join(parameter.opts)
            assert len((parameter.help or "").split()) >= 2, f"{words} {name} has no help"
        else:
            assert parameter.make_metavar(click.Context(command)).strip("[].") in told, f"what is {parameter.name}?"


@pytest.mark.parametrize("words", [words for words, one in EVERY.items() if not isinstance(one, click.Group)])
def test_every_example_is_a_call_that_the_command_takes(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evidence/gpu01").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    examples = [line.strip() for line in (EVERY[words].help or "").partition("\n    Example")[2].splitlines()]
    examples = [line for line in examples if line.startswith("fleetdump ")]
    assert any(line.startswith(f"{words} ") or line == words for line in examples), "one of the command itself"
    for call in (call.strip() for line in examples for call in line.split("&&")):
        name = next(name for name in sorted(EVERY, key=len, reverse=True) if f"{call} ".startswith(f"{name} "))
        with contextlib.suppress(UsageError):  # a patch of the example's is not there
            EVERY[name].make_context(name, shlex.split(call, comments=True)[len(name.split()) :])


WRONG = [("nonsense",), ("deploy", "--on-stall", "explode"), ("check", "--jobs", "0")]
WRONG += [("stop", "--lock-wait", seconds) for seconds in ("nan", "inf", "-1", "1e308")]
WRONG += [("diagnose", "--seconds", "nan"), ("logs", "--phase", "lunch"), ("watch", "--interval", "0")]


@pytest.mark.parametrize("args", WRONG)
def test_wrong_usage_exits_2(args: tuple[str, ...]) -> None:
    result = fleetdump(*args)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


OUTSIDE = "../../../tmp"
SAID: list[tuple[tuple[str, ...], str]] = [
    (("plan", "--data", "x", "--tokens-per-second", "nan"), "not a number"),
    (("plan", "--data", "x", "--tokens-per-second", "inf"), "not a number"),
    (("plan", "--data", "x", "--tokens-per-second", "1e-320"), "not in the range"),
    (("verify", "--run", OUTSIDE), "not a name for a run"),
    (("drain", "--run", "r"), "all hosts cannot leave a run"),
    (("clean", "--data", "--discard", OUTSIDE), "not a name for a run"),
    (("deploy", "--no-patch", "--patch", "hidden-states"), "exclude each other"),
    (("check", "--patch", "hidden-states", "--no-patch"), "exclude each other"),
    *((("deploy", "--fallback", names), "without a name") for names in ("", ",", "none,", ",none")),
]


@pytest.mark.parametrize(("args", "fragment"), SAID)
def test_wrong_usage_is_said_before_anything_is_looked_at(args: tuple[str, ...], fragment: str) -> None:
    result = fleetdump(*args)
    assert (result.returncode, "Traceback" in result.stderr) == (2, False)
    assert fragment in " ".join(result.stderr.split())


WITH_A_SERVER = [name for name, one in cli.commands.items() if "--server" in {o for p in one.params for o in p.opts}]


def test_which_commands_take_a_server() -> None:
    assert {"logs", "watch", "stop", "restart", "selfcheck", "diagnose"} <= set(WITH_A_SERVER)


@pytest.mark.parametrize("command", WITH_A_SERVER)
@pytest.mark.parametrize("name", [OUTSIDE, "/tmp", "..", "a/b", "main\n", "main.1", "\u202emain"])
def test_what_no_server_can_be_called_is_refused_by_every_command(command: str, name: str) -> None:
    done = CliRunner().invoke(cli, [command, "--server", name])
    assert (done.exit_code, "is no server name" in done.output) == (2, True)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in ("init", "plan", "extract", "patches")])
def test_missing_inventory_is_one_screen_with_the_next_step(command: str, tmp_path: Path) -> None:
    run = ("--run", "r") if command in ("attach", "pause", "drain", "resume", "cancel") else ()
    run += ("--host", "gpu01") if command == "drain" else ()
    result = fleetdump(command, *run, *(("--yes",) if command == "cancel" else ()), cwd=tmp_path)
    assert result.returncode == 2
    assert "inventory.yaml" in result.stderr
    assert "fleetdump init" in result.stderr
    assert len(result.stderr.splitlines()) < 25
    assert "Traceback" not in result.stderr


def test_every_inventory_mistake_is_reported_at_once_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "defaults:\n  usr: root\n  servers:\n    - {name: main, model_path: /m, port: 99999}\n"
        "hosts:\n  a: {adress: x}\n"
    )
    result = fleetdump("check", cwd=tmp_path)
    assert result.returncode == 2
    for fragment in ("inventory.yaml:2", "usr", "user", "99999", "adress", "address"):
        assert fragment in result.stderr


def test_init_writes_an_inventory_that_loads_and_never_overwrites(tmp_path: Path) -> None:
    first = fleetdump("init", "root@198.18.0.9", "gpu02", cwd=tmp_path)
    assert first.returncode == 0
    assert "host_key" in first.stderr
    assert "--accept-new" in first.stderr
    text = (tmp_path / "inventory.yaml").read_text()
    assert "gpu02" in text
    again = fleetdump("init", "gpu03", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "inventory.yaml").read_text() == text


def test_a_pattern_that_matches_nothing_is_refused(tmp_path: Path) -> None:
    fleetdump("init", "gpu01", "gpu02", cwd=tmp_path)
    result = fleetdump("deploy", "--host", "gpu1", cwd=tmp_path)
    assert result.returncode == 2
    assert "gpu01" in result.stderr, "the nearest valid name"


def test_an_unknown_patch_names_the_known_ones(tmp_path: Path) -> None:
    fleetdump("init", "gpu01", cwd=tmp_path)
    result = fleetdump("deploy", "--patch", "hiden-states", cwd=tmp_path)
    assert result.returncode == 2
    assert "hidden-states" in result.stderr


def test_an_unreachable_host_exits_3_and_json_says_so(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "defaults:\n  python: /usr/bin/python3\n"
        "  servers:\n    - {name: main, model_path: /m, port: 8000}\n"
        "hosts:\n  nowhere: {address: 127.0.0.1, port: 1}\n"
    )
    result = fleetdump("status", "--json", cwd=tmp_path)
    assert result.returncode == 3
    record = json.loads(result.stdout)
    assert record["host"] == "nowhere"
    assert record["status"] == "unreachable"
    assert record["error"]["next_step"]


def test_hosts_join_a_run_that_is_under_way_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(
        "defaults:\n  python: /usr/bin/python3\n  capture: {layers: [1], dir: /hs}\n"
        "  servers:\n    - {name: main, model_path: /m, port: 8000}\n"
        "hosts:\n  nowhere: {address: 127.0.0.1, port: 1}\n"
    )
    (tmp_path / "d.jsonl").write_text('{"id": "a", "text": "some words"}\n')
    result = fleetdump("extract", "--data", "d.jsonl", "--add-host", "nowhere", cwd=tmp_path)
    assert result.returncode == 2
    assert "run d is not under way here" in result.stderr
    assert "leave it away" in result.stderr


def test_a_broken_bundle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_text("{}")
    result = fleetdump("diagnose", "--bundle", str(tmp_path), cwd=tmp_path)
    assert result.returncode == 2
    assert "evidence" in result.stderr


def test_an_id_that_turns_or_breaks_lines_is_shown_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\u202eb\u2028c"
    _show_merged(CollectReport("r", 1, 3, 0, 2, 0, 5, "m.jsonl", missing=[evil], mismatches=[evil]))
    told = capsys.readouterr().out
    assert not set(told) & set(evil[1::2])
    assert told.count("a\\u202eb\\u2028c") == 2


def test_collect_of_a_run_that_goes_on_counts_what_is_not_done_yet(capsys: pytest.CaptureFixture[str]) -> None:
    _show_merged(CollectReport("r", 64, 624, 0, 0, 0, 5, "m.jsonl", missing=["a (given to h/main)"], not_done=560))
    told = capsys.readouterr().out
    assert "64 of 624 samples, 5 tokens, 560 not done yet, 0 lost" in told
    assert "  not done: a (given to h/main)" in told


def test_a_run_that_no_host_has_is_an_error_and_no_count(tmp_path: Path) -> None:
    (tmp_path / "inventory.yaml").write_text(
        f"defaults: {{connection: local, state_dir: {tmp_path}/state, agent_python: {sys.executable}}}\n"
        "hosts: {here: {}}\n"
    )
    result = fleetdump("collect", "--run", "nosuch", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert "no host that answered has run 'nosuch'" in result.stderr


def test_the_help_of_the_shared_options_is_true() -> None:
    told = " ".join(fleetdump("status", "--help").stdout.split())
    for words in ("FLEETDUMP_INVENTORY", "One JSON object a line", "Also a --host that the inventory does not have"):
        assert words in told
    assert "may be repeated" in " ".join(fleetdump("clean", "--help").stdout.split()).partition("--discard")[2][:150]


def test_what_collect_does_not_list_it_counts(capsys: pytest.CaptureFixture[str]) -> None:
    rejects = [f"a{n}: too_long" for n in range(7)]
    _show_merged(CollectReport("r", 1, 8, 0, 0, 7, 5, "out/r/manifest.jsonl", rejects=rejects))
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == ["  rejected: a4: too_long", "  rejected: and 2 more; out/r/collect.json names the first 7"]


def test_collect_says_whose_files_lie_on_a_host_that_does_not_answer(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = {"address": "127.0.0.1", "port": closed.getsockname()[1], "user": "nobody", "connect_timeout": 5}
        (tmp_path / "inventory.yaml").write_text(json.dumps({"hosts": {"gone": host}}))
        with Ledger(tmp_path / "runs" / "r1" / "ledger.sqlite") as ledger:
            ledger.plan([Planned("a", "d", "gone", "main", line=7)], [("gone", "main", "s")])
            line = manifest_line("a")
            ledger.deliver("gone", line, text_of(line))
        result = fleetdump("collect", "--data", cwd=tmp_path)
    assert result.returncode == ExitCode.UNREACHABLE, result
    assert "run r1: 1 of 1 samples" in result.stdout
    assert "1 of 1 samples have no files here: 1 that gone computed" in result.stdout
    assert "compute anew what missing.jsonl" in result.stderr
    missing = json.loads((tmp_path / "runs" / "r1" / "missing.jsonl").read_text())
    assert missing == {"v": 1, "line": 7, "id": "a", "state": "not_here", "host": "gone"}
    assert json.loads((tmp_path / "runs" / "r1" / "collect.json").read_text())["not_here"] == {"gone": 1}


def test_an_interrupted_watch_of_an_empty_host_says_that_it_is_empty_and_no_more(tmp_path: Path) -> None:
    host = {"connection": "local", "agent_python": sys.executable, "state_dir": str(tmp_path / "state")}
    (tmp_path / "inventory.yaml").write_text(json.dumps({"hosts": {"here": host}}))
    command = [sys.executable, "-m", "fleetdump", "watch"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watch:
        assert watch.stdout is not None
        assert watch.stdout.readline() == "here nothing of ours runs there\n"
        watch.send_signal(signal.SIGINT)
        assert watch.stdout.read() == ""
    assert watch.returncode == 130
