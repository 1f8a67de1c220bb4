"""Planning a run: rows taken in, estimates put right by a sample, disk and hours by host; and what is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fleetdump.agent.formats import Row, row_line
from fleetdump.agent.hostmessages import ModelFacts, ProbeResult
from fleetdump.agent.protocol import to_json
from fleetdump.agent.runmessages import PreviewReject, PreviewResult
from fleetdump.agent.servermessages import ServerState
from fleetdump.agent.specs import ServerSpec
from fleetdump.cli import _preflight
from fleetdump.cli._fleet import FleetOptions
from fleetdump.dataset.intake import DataSet, take_in
from fleetdump.dataset.rows import BrokenRow
from fleetdump.errors import FleetdumpError, UsageError
from fleetdump.inventory import HostConfig
from fleetdump.ledger import Ledger, Planned
from fleetdump.tasks.plan import (
    Estimate,
    Limits,
    corrections,
    estimate,
    histogram,
    require_deployed,
    require_fit,
    require_usable,
    sample_of,
)
from fleetdump.tasks.rejected import write_rejected
from fleetdump.views.plan import show_estimate, warnings

GIB = 1 << 30


def data_of(*rows: Row | BrokenRow, max_rejects: int = 100) -> DataSet:
    return take_in(enumerate(rows, 1), max_rejects)


def ids(name: str, tokens: int) -> Row:
    return Row(name, input_ids=[5] * tokens, loss_mask=[1] * tokens)


def text(name: str, characters: int) -> Row:
    return Row(name, text="x" * characters)


# --------------------------------------------------------------------------- rows taken in
def test_lines_come_back_as_they_were_whatever_their_length(tmp_path: Path) -> None:
    rows = [text(str(n), size) for n, size in enumerate((0, 1, 8190, 8192, 20_000, 100_000, 5))]
    data = data_of(*rows)
    lines = data.lines(["4", "0", "6", "5"])
    assert len(lines) == 4
    assert list(lines) == [row_line(to_json(rows[n])).decode() for n in (4, 0, 6, 5)]
    read: list[list[str]] = []
    threads = [threading.Thread(target=lambda: read.append(list(data.lines(list(data.rows))))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [[row_line(to_json(row)).decode() for row in rows]] * 4


def test_rows_keep_their_line_and_form() -> None:
    data = data_of(ids("a", 7), BrokenRow(2, "bad_json", "x"), text("b", 350), Row("c", messages=[{"content": "hi"}]))
    assert [(row.line, row.form) for row in data.rows.values()] == [(1, "ids"), (3, "text"), (4, "messages")]
    assert data.rows["a"].tokens == 7
    assert data.rows["b"].tokens == 101


def test_more_broken_rows_than_allowed_stop_with_reasons_and_what_to_do() -> None:
    broken = [BrokenRow(n, "bad_json" if n < 4 else "empty", f"detail {n}") for n in range(2, 6)]
    assert len(data_of(text("a", 5), *broken, max_rejects=4).broken) == 4
    with pytest.raises(UsageError, match="more than 3 of the first 5 rows are broken") as caught:
        data_of(text("a", 5), *broken, max_rejects=3)
    assert "bad_json 2, empty 2; line 2 (bad_json): detail 2; line 3" in caught.value.why
    assert "--max-rejects" in caught.value.next_step


# --------------------------------------------------------------------------- the estimate
MODEL = ModelFacts("X", 61, 7168, "bfloat16", "m")


def host_of(
    config: HostConfig, name: str, servers: int, free: int, dtype: str = "bfloat16"
) -> tuple[HostConfig, ProbeResult]:
    specs = tuple(ServerSpec(f"s{n}", "python3", "/m", 8000 + n) for n in range(servers))
    capture = replace(config.capture, layers=(3, 31, 59), layer_ids="input", dir="/nvme")
    states = [ServerState(spec.name, "ready") for spec in specs]
    probe = ProbeResult(
        "h", name, "", [], engine="sglang", model=replace(MODEL, dtype=dtype), disk_free_bytes=free, servers=states
    )
    return replace(config, name=name, servers=specs, capture=capture), probe


def test_bytes_samples_and_hours_by_host(local_config: HostConfig) -> None:
    hosts = {"h1": host_of(local_config, "h1", 1, 100 * GIB), "h2": host_of(local_config, "h2", 3, 100 * GIB)}
    rates = {("h1", "s0"): 100.0, **{("h2", f"s{n}"): 50.0 for n in range(3)}}
    found = estimate(data_of(*(ids(str(n), 1000) for n in range(8))), hosts, {}, Limits(), rates)
    assert (found.samples, found.tokens, found.exact, found.bytes_per_token) == (8, 8000, True, 57_344 + 5)
    h1, h2 = found.hosts
    assert (h1.servers, h1.samples, h1.tokens) == (1, 2, 2000)
    assert (h2.servers, h2.samples, h2.tokens) == (3, 6, 6000)
    assert (h1.seconds, h2.seconds, found.seconds) == (20.0, 40.0, 40.0)
    assert h1.bytes == 2000 * (57_344 + 5) + 2 * 2048
    assert found.bytes == h1.bytes + h2.bytes


def test_what_is_computed_in_float32_takes_twice_as_much(local_config: HostConfig) -> None:
    hosts = {"h1": host_of(local_config, "h1", 1, GIB, dtype="float32")}
    assert estimate(data_of(ids("a", 2)), hosts, {}, Limits(), {}).bytes_per_token == 2 * 57_344 + 5


@pytest.mark.parametrize(("truncate", "expected"), [(False, (2, 1, 0, 300)), (True, (3, 0, 1, 500))])
def test_a_limit_drops_or_cuts(local_config: HostConfig, truncate: bool, expected: tuple[int, ...]) -> None:
    hosts = {"h1": host_of(local_config, "h1", 1, GIB)}
    data = data_of(ids("a", 100), ids("b", 200), ids("c", 900))
    found = estimate(data, hosts, {}, Limits(200, truncate), {})
    assert (found.samples, found.dropped, found.cut, found.tokens) == expected


def preview_of(*lengths: int, **changes: Any) -> PreviewResult:
    result = PreviewResult(list(lengths), sum(lengths), 1, 0, "t", "k", {"prefix": len(lengths)}, [], [])
    return replace(result, **changes)


def test_a_sample_puts_the_estimates_of_its_form_right(local_config: HostConfig) -> None:
    data = data_of(ids("i", 10), *(text(f"t{n}", 346) for n in range(4)), Row("m", messages=[{"content": "x" * 346}]))
    chosen = ["i", "t0", "t1", "t2", "m"]
    assert [data.rows[row_id].tokens for row_id in chosen] == [10, 99, 99, 99, 104]
    factors = corrections(data, chosen, preview_of(10, 198, 198, 0, 52))  # t2 was rejected: it says nothing
    assert factors == {"text": 2.0, "messages": 0.5}
    found = estimate(data, {"h1": host_of(local_config, "h1", 1, GIB)}, factors, Limits(), {})
    assert found.tokens == 10 + 4 * 198 + 52
    assert not found.exact


def test_the_sample_is_spread_over_the_data_and_bounded() -> None:
    data = data_of(*(ids(str(n), 10) for n in range(1000)))
    assert sample_of(data, 4) == ["0", "250", "500", "750"]
    assert len(sample_of(data, 5000)) == 1000
    huge = data_of(*(ids(str(n), 1 << 19) for n in range(5)))
    assert sample_of(huge, 5) == ["0", "1"]


def test_histogram() -> None:
    buckets = list(histogram([2, 128, 129, 600, 100_000]))
    assert [(b.up_to, b.samples, b.tokens) for b in buckets][:4] == [
        (128, 2, 130),
        (256, 1, 129),
        (512, 0, 0),
        (1024, 1, 600),
    ]
    assert (buckets[-1].up_to, buckets[-1].samples) == (0, 1)
    assert sum(bucket.samples for bucket in buckets) == 5
    assert list(histogram([])) == []


# --------------------------------------------------------------------------- what is refused
@pytest.fixture
def too_large(local_config: HostConfig) -> Estimate:
    hosts = {"h1": host_of(local_config, "h1", 1, GIB), "h2": host_of(local_config, "h2", 1, GIB // 8)}
    return estimate(data_of(*(ids(str(n), 1000) for n in range(8))), hosts, {}, Limits(), {})


def test_a_run_that_does_not_fit_is_refused_by_the_host_s_name(too_large: Estimate) -> None:
    assert [need.fits for need in too_large.hosts] == [True, False]
    with pytest.raises(UsageError, match="does not fit on 1 of 2 hosts") as caught:
        require_fit(too_large.hosts)
    assert caught.value.where == "h2"
    assert "0.2 GiB would be written" in caught.value.why
    assert "--allow-full-disk" in caught.value.next_step
    require_fit(too_large.hosts[:1])


def test_a_server_that_was_never_launched_is_named(local_config: HostConfig) -> None:
    hosts = {name: host_of(local_config, name, 2, GIB) for name in ("h1", "h2")}
    require_deployed(hosts)
    del hosts["h2"][1].servers[1]
    with pytest.raises(UsageError, match="1 of 4 servers was never launched") as caught:
        require_deployed(hosts)
    assert caught.value.where == "h2/s1"
    assert "fleetdump deploy" in caught.value.next_step


def test_data_of_which_no_row_that_was_tried_can_be_a_sample() -> None:
    reject = PreviewReject("a", "template_error", "KeyError: 'content'")
    require_usable(preview_of(0, 5, rejected=[reject]))
    with pytest.raises(UsageError, match="none of the 2 rows") as caught:
        require_usable(preview_of(0, 0, rejected=[reject, reject]))
    assert (caught.value.where, caught.value.why) == ("a", "template_error: KeyError: 'content'")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"supervised": 5}, []),
        ({"supervised": 0}, ["no token is supervised"]),
        ({"supervised": 10}, ["every token is supervised"]),
        ({"supervised": 10, "methods": {"text": 2}}, []),
        ({"supervised": 5, "unsupervised_samples": 1}, ["1 of these samples has no supervised token"]),
        ({"supervised": 5, "all_supervised_samples": 1}, ["in 1 of these conversations every token is supervised"]),
    ],
)
def test_odd_masks_are_a_warning(changes: dict[str, Any], expected: list[str]) -> None:
    assert warnings(preview_of(4, 6, **changes)) == expected


def test_the_view_says_what_counts(too_large: Estimate, capsys: pytest.CaptureFixture[str]) -> None:
    show_estimate(replace(too_large, seconds=7200.0, dropped=3, broken=2, broken_by_reason={"empty": 2}))
    shown = capsys.readouterr().out
    for fragment in (
        "8 samples, 8,000 tokens",
        "2 broken rows left out: empty 2",
        "3 samples too long",
        "1,024",
        "2h00m",
    ):
        assert fragment in shown
    assert next(line for line in shown.splitlines() if "does not fit" in line).startswith("h2")


# --------------------------------------------------------------------------- rejected.jsonl
def test_every_rejected_row_has_its_line_and_reason(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        samples = [Planned("a", "d", "h1", "main", line=1), Planned("c", "d", "h1", "main", line=3)]
        ledger.plan(samples, [("h1", "main", "s")], [(2, "bad_json: no JSON: x")])
        lines = write_rejected(ledger, tmp_path).read_text().splitlines()
        assert [json.loads(line)["line"] for line in lines] == [2]
        ledger._run("UPDATE samples SET state = 'rejected', reason = 'too_long: 5 tokens: limit 4' WHERE id = 'c'")
        lines = write_rejected(ledger, tmp_path).read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"v": 1, "line": 2, "id": "", "reason": "bad_json", "detail": "no JSON: x"},
        {"v": 1, "line": 3, "id": "c", "reason": "too_long", "detail": "5 tokens: limit 4"},
    ]


def test_the_wait_for_the_tokeniser_is_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the host is asked: its answer takes half a minute."""
    error = FleetdumpError("cannot tokenise")
    said = []

    def ask(_options: object, configs: Sequence[HostConfig], *_: object) -> dict[str, tuple[None, FleetdumpError]]:
        said.append(capsys.readouterr().err)
        return {config.name: (None, error) for config in configs}

    monkeypatch.setattr(_preflight, "ask", ask)
    options = FleetOptions(Path("inventory.yaml"), (), (), False, False, False, 1)
    host = HostConfig("lab", "lab")
    with pytest.raises(FleetdumpError):
        _preflight.look_at(options, [host])
    with pytest.raises(FleetdumpError):
        _preflight.preview_on(options, host, take_in([(1, Row("a", text="x"))]), ["a"], Limits(0, False))
    assert said == ["looking at 1 host\n", "tokenising 1 row on lab\n"]


@pytest.mark.parametrize("name", ["da\udcffta.jsonl", "a\nnext: run this", "\x1b[2Jx", "a\u202eb"])
def test_the_name_of_a_data_file_is_one_harmless_line_for_others(name: str) -> None:
    told = DataSet(name).mark.in_words
    assert told.isprintable()
    assert told.encode("utf-8")
