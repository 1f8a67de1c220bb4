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

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.protocol import to_json
from fleetdump.diagnosis import Verdict, anonymise, diagnose
from fleetdump.diagnosis.references import REFERENCES
from fleetdump.tasks.server import Diagnosis
from fleetdump.views.verdicts import fold, markdown, odd_one_out


def named() -> Evidence:
    e = kimi()
    e.hostname = "train-07.example.net"
    e.log.path = e.target.log = "/home/alice/logs/train-07.log"
    e.log.tail = ["alice@train-07.example.net started it", "/home/bob.b/models from 10.4.7.19:443, fe80:1::7"]
    e.proxy = {"http_proxy": "proxy.example.net:3128", "no_proxy": "localhost"}
    b.connecting(b.rank(e, 0), "10.4.7.19:29500", "ESTABLISHED")
    return e


def test_names_and_addresses_are_masked_everywhere() -> None:
    text = json.dumps(to_json(anonymise(named())))
    for secret in ("alice", "bob", "train-07", "example.net", "10.4.7.19", "fe80:1::7"):
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
    text = markdown("gpu01", Diagnosis("main", [Verdict("X", "<b>a</b>", "high", evidence=["`x` ![](y)\n# z"])]))
    first, *rest = text.splitlines()
    assert first == r"### \<b\>a\</b\>"
    assert "- `'x' ![](y)" in "\n".join(rest)
    assert not any(line.startswith("# ") for line in rest)


def test_hosts_with_one_verdict_are_folded_and_the_odd_one_is_named() -> None:
    hosts = {f"gpu{n:02}": [diagnosis(kimi())] for n in range(1, 8)}
    hosts["gpu08"] = [diagnosis(hostname_resolves_to_loopback())]
    groups = fold(hosts)
    assert [len(places) for places in groups] == [7, 1]
    odd = odd_one_out(groups)
    assert odd
    assert odd[0] == "gpu08"


def test_two_unlike_hosts_have_no_odd_one() -> None:
    groups = fold({"a": [diagnosis(kimi())], "b": [diagnosis(hostname_resolves_to_loopback())]})
    assert odd_one_out(groups) is None


def test_references_are_repository_and_number_only() -> None:
    every = [reference for of in REFERENCES.values() for reference in of]
    assert every
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", reference) for reference in every)


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
