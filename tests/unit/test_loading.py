"""How far the weights are, and which lines of a log are a rank's or a phase's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetdump.agent.loading import LoadMeter, model_bytes
from fleetdump.agent.logfilter import LineFilter
from fleetdump.agent.logmarks import Bar
from fleetdump.agent.procfs import ProcSample

GB = 10**9
LOGS = Path(__file__).parent / "fixtures" / "logs"


def rank(pid: int, rchar: float = 0, read: float = 0) -> ProcSample:
    return ProcSample(pid, 1, 1, 7, "S", "x", [], "scheduler", None, rchar=int(rchar), read_bytes=int(read))


def meter(samples: list[list[ProcSample]], bar: Bar | None = None, total: int = 100 * GB) -> tuple[float, float, float]:
    """(done, rate, eta) after samples 2 s apart, of which the first comes before the weights."""
    made = LoadMeter(total)
    assert made.observe(0.0, "init", samples[0], None) is None
    for place, sample in enumerate(samples[1:], 1):
        found = made.observe(2.0 * place, "weights", sample, bar)
    assert found is not None
    return found.done, found.rate, found.eta


def test_a_loader_that_reads_copies_the_model_into_each_rank() -> None:
    done, rate, eta = meter(
        [[rank(n, 5 * GB) for n in (2, 3)], *([rank(2, x * GB), rank(3, x * GB)] for x in (5, 11, 15))]
    )
    assert (done, rate, eta) == (10 * GB, 2.5 * GB, 36.0)


def test_a_loader_that_maps_reads_each_page_once() -> None:
    """rchar stands still: what counts is read_bytes of all ranks together."""
    done, rate, eta = meter([[rank(2), rank(3)], *([rank(2, 0, x * GB), rank(3, 0, x * GB)] for x in (0, 3, 5))])
    assert (done, rate, eta) == (10 * GB, 2.5 * GB, 36.0)


def test_from_a_warm_cache_the_shard_bar_tells() -> None:
    idle = [rank(2), rank(3)]
    assert meter([idle, idle, idle], Bar("Loading safetensors checkpoint shards", 3, 12))[0] == 25 * GB
    assert meter([idle, idle, idle], Bar("Capturing batches", 3, 12))[0] == 0


def test_without_a_known_size_there_is_a_rate_and_no_end() -> None:
    assert meter([[rank(2)], [rank(2)], [rank(2, 4 * GB)]], total=0) == (4 * GB, 2 * GB, 0.0)


def test_the_size_of_a_model(tmp_path: Path) -> None:
    (tmp_path / "model-1.safetensors").write_bytes(bytes(70))
    (tmp_path / "model-2.safetensors").write_bytes(bytes(30))
    (tmp_path / "config.json").write_text("{}")
    assert model_bytes(str(tmp_path)) == 100
    assert model_bytes("org/model") == 0


# --------------------------------------------------------------------------- lines of a log
def lines_of(name: str, rank: int, phase: str, ranks: int = 2) -> list[str]:
    wanted = LineFilter(rank, phase, ranks)
    text = (LOGS / name).read_text(errors="replace")
    return [line for line in text.split("\n") if wanted.keeps(line)]


@pytest.mark.parametrize("rank", [0, 1])
def test_lines_of_a_rank(rank: int) -> None:
    found = lines_of("healthy-tp2-0.5.20.log", rank, "")
    stamped = [line for line in found if line.startswith("[20")]
    assert stamped
    assert all(f" TP{rank}]" in line for line in stamped)


def test_a_traceback_belongs_to_the_rank_that_logged_it() -> None:
    """Both ranks end in one: rank 1 raised, rank 0 lost its peer."""
    for rank in (0, 1):
        found = lines_of("rank1-raises-tp2.log", rank, "")
        assert sum("Scheduler hit an exception" in line for line in found) == 1
        assert any(line.startswith('  File "') for line in found)


def test_a_server_of_one_rank_logs_none() -> None:
    assert any("Load weight begin" in line for line in lines_of("healthy-tp1-0.5.20.log", 0, "", ranks=1))


def test_lines_of_a_phase() -> None:
    found = lines_of("healthy-tp2-0.5.20.log", -1, "weights")
    assert sum("Load weight begin" in line for line in found) == 2
    assert sum("Load weight end" in line for line in found) == 2
    assert not any("server_args=" in line or "fired up" in line for line in found)
    assert any("fired up" in line for line in lines_of("healthy-tp2-0.5.20.log", -1, "serving"))
    assert any("server_args=" in line for line in lines_of("healthy-tp2-0.5.20.log", -1, "imports"))
