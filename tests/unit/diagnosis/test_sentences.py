"""What verdicts say in words: nothing that the evidence does not show, and what it does show."""

from __future__ import annotations

import pytest
from cases import builder as b
from cases import part_aa, part_ab, part_ac, part_ad
from cases.table import CASES, DEAD

from fleetdump.agent.evidence_host import LockFile
from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import Verdict, diagnose

ALL_LIVE = "dead process: launcher and every rank live"


def best(evidence: Evidence) -> Verdict:
    return diagnose(evidence)[0]


def test_who_was_killed_is_who_the_kernel_names() -> None:
    verdict = best(part_ac.two_oom())
    assert verdict.title.startswith("the kernel killed the engine core for memory")
    assert verdict.rank is None
    few = best(part_ad.a5_with_its_launcher())
    assert few.title.startswith("the kernel killed a process of this server"), "one kill, two ranks that are gone"


def test_no_death_is_said_and_ruled_out_at_once() -> None:
    for one in CASES:
        for verdict in diagnose(one.build()):
            if verdict.code in DEAD - {"RANK_CRASHED"}:  # who raised may live on for a minute
                assert ALL_LIVE not in verdict.ruled_out, one.name
    assert ALL_LIVE in best(b.server(2)).ruled_out


def test_why_health_is_not_believed() -> None:
    facts = "; ".join(best(part_ab.d11()).evidence)
    assert "/health answers 200, and yet: /v1/completions: timeout in 10.0 s" in facts
    assert "3 requests run by its log, which has said nothing new for 900 s" in facts
    assert not any("and yet" in fact for fact in best(part_ad.idle_vllm_answers_a_request()).evidence)


def test_a_log_that_was_told_to_be_silent_says_nothing_by_it() -> None:
    evidence = part_ad.d14_without_statistics()
    evidence.log.running_requests = 0
    assert best(evidence).code == "KERNEL_SPIN"
    b.launcher(evidence).cmdline += " --disable-log-stats"
    assert best(evidence).code == "HEALTHY", "a light load looks like this"


def test_a_kernel_without_end_is_no_rank_that_spins() -> None:
    assert [v.code for v in diagnose(part_ab.d14())] == ["KERNEL_SPIN"]


def test_the_only_lock_file_is_named() -> None:
    evidence = part_ab.c7()
    assert "gqa.lock on nfs4" in best(evidence).title
    evidence.lock_files.append(LockFile("/home/u/.cache/flashinfer/0.2.9/90/cached_ops/mla.lock", 4000.0))
    assert "path unknown" in best(evidence).title


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (part_aa.b7(), "at 4 MB/s from fuse.juicefs or its page cache"),
        (part_aa.b4(), "at 104 MB/s from mapped files on lustre"),
        (part_ad.b4_pages_are_reclaimed(), "at 20 MB/s or more from mapped files on lustre"),
    ],
)
def test_rate_and_source_of_weights(evidence: Evidence, words: str) -> None:
    assert words in best(evidence).title


def test_a_command_line_that_could_not_be_read_is_no_strangers() -> None:
    """On a crowded host: the launcher has just started, and the kernel kept its command line back."""
    evidence = b.server(2, lines=0, phase="imports", quiet_seconds=4.0)
    evidence.log.ranks = []
    evidence.processes = [b.process(b.LAUNCHER, "other", ppid=1, name="python")]
    evidence.uptime, evidence.watch = 5.0, None
    assert best(evidence).code == "BUSY_NOT_HUNG"
    evidence.processes[0].cmdline = "python -m http.server"
    assert "is no SGLang or vLLM server" in best(evidence).title


def test_a_dead_server_is_not_said_to_have_said_nothing() -> None:
    (died,) = (v for v in diagnose(part_ad.e2_ended()) if v.code == "LAUNCHER_DIED")
    assert "Response [407]" in died.title
