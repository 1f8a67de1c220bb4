"""What leaves a diagnosis: masked evidence, Markdown, hosts folded by verdict, links to public reports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases import builder as b
from cases.part_d import hostname_resolves_to_loopback
from cases.part_h import kimi
from cases.table import CASES, Case

from fleetdump.agent.evidence_files import write_files
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.hostmessages import StatusResult
from fleetdump.agent.protocol import from_json, to_json
from fleetdump.agent.servermessages import ServerState
from fleetdump.cli.status import _code as status_code
from fleetdump.diagnosis import Verdict, anonymise, diagnose
from fleetdump.diagnosis.codes import CODES
from fleetdump.errors import ExitCode
from fleetdump.tasks.server import Diagnosis
from fleetdump.views.verdicts import fold, markdown, odd_ones_out, show_diagnoses


def named() -> Evidence:
    e = kimi()
    e.hostname = "train-07.example.net"
    e.log.path = e.target.log = "/home/alice/logs/train-07.log"
    e.log.tail = ["alice@train-07.example.net started it", "/home/bob.b/models from 10.4.7.19:443, fe80:1::7"]
    e.proxy = {"http_proxy": "proxy.example.net:3128", "no_proxy": "localhost"}
    b.connecting(b.rank(e, 0), "10.4.7.19:29500", "ESTABLISHED")
    e.host.logins = ["1796000000.1 train-07 systemd-logind[1]: New session 3 of user carol."]
    return e


def test_names_and_addresses_are_masked_everywhere() -> None:
    text = json.dumps(to_json(anonymise(named())))
    for secret in ("alice", "bob", "carol", "train-07", "example.net", "10.4.7.19", "fe80:1::7"):
        assert secret not in text
    assert "host-1" in text
    assert "/home/user-1/logs/host-1.log" in text
    assert "proxy-1:3128" in text


def test_one_address_keeps_one_name() -> None:
    masked = anonymise(named())
    remote = b.rank(masked, 0).sockets[0].remote.rpartition(":")[0]
    assert f"from {remote}:443" in masked.log.tail[1]


@pytest.mark.parametrize("one", CASES, ids=lambda one: one.name.replace(" ", "-"))
def test_masked_evidence_gives_the_same_verdict(one: Case) -> None:
    evidence = one.build()
    assert [v.code for v in diagnose(anonymise(evidence))] == [v.code for v in diagnose(evidence)]


def test_masking_leaves_the_evidence_alone() -> None:
    evidence = named()
    anonymise(evidence)
    assert evidence == named()


def diagnosis(evidence: Evidence) -> Diagnosis:
    return Diagnosis("main", diagnose(evidence), "", to_json(evidence))


def test_markdown_has_the_sentence_first_and_no_markup_of_the_host() -> None:
    text = markdown("gpu01", Diagnosis("main", [Verdict("X", "<b>a</b>", "direct", evidence=["`x` ![](y)\n# z"])]))
    first, *rest = text.splitlines()
    assert first == r"### \<b\>a\</b\>"
    assert "- `'x' ![](y)" in "\n".join(rest)
    assert not any(line.startswith("# ") for line in rest)


def test_hosts_with_one_verdict_are_folded_and_the_odd_one_is_named() -> None:
    hosts = {f"gpu{n:02}": [diagnosis(kimi())] for n in range(1, 8)}
    hosts["gpu08"] = [diagnosis(hostname_resolves_to_loopback())]
    groups = fold(hosts)
    assert [len(places) for places in groups] == [7, 1]
    assert [host for host, _ in odd_ones_out(groups)] == ["gpu08"]


def test_two_unlike_hosts_have_no_odd_one() -> None:
    groups = fold({"a": [diagnosis(kimi())], "b": [diagnosis(hostname_resolves_to_loopback())]})
    assert odd_ones_out(groups) == []


def test_folded_hosts_keep_the_ranks_that_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    other = kimi()
    for process in (b.rank(other, 3), b.rank(other, 7)):
        process.rank = {3: 7, 7: 3}[process.rank or 0]
        process.label = f"TP{process.rank}"
    other.stacks, other.stack_groups = [], []
    show_diagnoses({"gpu01": [diagnosis(kimi())], "gpu02": [diagnosis(kimi())], "gpu03": [diagnosis(other)]})
    assert "the same verdict: gpu03 (rank 3); gpu02 (rank 7)" in capsys.readouterr().out


def test_references_are_repository_and_number_only() -> None:
    every = [report for code in CODES.values() for report in code.reports]
    assert every
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", report) for report in every)


def fleetdump(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "fleetdump", *args], capture_output=True, text=True, timeout=60)


def test_a_bundle_is_judged_off_line(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_text(json.dumps(to_json(named())))
    plain = fleetdump("diagnose", "--bundle", str(tmp_path))
    assert plain.returncode == 4
    assert "waits for the ready message of rank 7" in plain.stdout
    report = fleetdump("diagnose", "--bundle", str(tmp_path), "--anonymise", "--markdown")
    assert report.returncode == 4
    assert report.stdout.startswith("### ")
    assert "alice" not in report.stdout


def test_what_is_saved_gives_the_same_verdict(tmp_path: Path) -> None:
    """Evidence with terminal escapes and a secret's place holder, saved as the command saves it, then judged."""
    evidence = named()
    evidence.log.tail.append("\x1b[2J\u202e junk")
    write_files(evidence, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"evidence.json", "processes.txt", "host.txt", "log-tail.txt"}
    assert all("\x1b" not in path.read_text() for path in tmp_path.iterdir())
    assert all(path.stat().st_mode & 0o077 == 0 for path in tmp_path.iterdir())
    judged = fleetdump("diagnose", "--bundle", str(tmp_path), "--json")
    assert judged.returncode == 4
    verdicts = json.loads(judged.stdout)["data"][0]["verdicts"]
    live = [(v.code, v.rank, v.title, v.confidence) for v in diagnose(evidence)]
    assert [(v["code"], v["rank"], v["title"], v["confidence"]) for v in verdicts] == live


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"v": 99}', "version 99"),
        ("[]", "version None"),
        ('{"target": {"pid": 1}, "taken_at": 1.0, "seconds": 5.0, "colour": "red"}', "colour"),
        ("{", "Expecting"),
    ],
)
def test_what_is_no_bundle_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "evidence.json").write_text(text)
    refused = fleetdump("diagnose", "--bundle", str(tmp_path))
    assert refused.returncode == 2
    assert why in refused.stderr
    assert "docs/evidence.md" in refused.stderr


@pytest.mark.parametrize(
    ("name", "code"),
    [("h200_idle", 0), ("h200_load", 0), ("h200_loading", 0), ("h200_sigstop", 4), ("h200_sigkill", 1)],
)
def test_exit_code_tells_a_stall_from_death_and_the_rest(name: str, code: int) -> None:
    recorded = Path(__file__).parents[2] / "cases" / "recorded" / f"{name}.json"
    judged = fleetdump("diagnose", "--bundle", str(recorded))
    assert judged.returncode == code
    sentence = judged.stdout.splitlines()[1].strip()
    assert sentence == diagnose(from_json(Evidence, json.loads(recorded.read_text())))[0].title


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["ready", "stopped"], ExitCode.OK),
        (["ready", "died"], ExitCode.FAILED),
        ([], ExitCode.OK),
        (["starting"], ExitCode.OK),
    ],
)
def test_status_counts_a_dead_server_as_diagnose_does(states: list[str], code: ExitCode) -> None:
    found = StatusResult("h1", [ServerState(f"s{n}", state) for n, state in enumerate(states)], [])
    assert status_code(found) == code
