"""Each bar of the demo can be missed, and a missed one is named."""

import json

import pytest

from demo.report import Report

GOOD = {
    "samples": 78,
    "tokens": 33_662,
    "lost": 0,
    "duplicated": 0,
    "max_abs_err": 1e-5,
    "max_rel_err": 1e-6,
    "rows_excluded": 0,
    "healthy_log_lines": 66,
    "stalled_log_lines": 40,
    "stall_verdict": "scheduler_spin",
    "stall_phase": "kv_pool",
    "stall_rank": 1,
    "stall_seconds_to_verdict": 12.0,
    "server_start_seconds": 40.0,
    "bytes_written": 68_000_000,
    "reverted": True,
    "left_over": 0,
}


def test_a_good_report_misses_nothing():
    assert Report(**GOOD).missed(ranks=2) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples", 63),
        ("lost", 1),
        ("duplicated", 1),
        ("max_rel_err", 2e-4),
        ("max_rel_err", float("nan")),
        ("rows_excluded", 34),
        ("stall_verdict", ""),
        ("stall_rank", 0),
        ("stall_phase", "weights"),
        ("stall_seconds_to_verdict", 31.0),
        ("reverted", False),
        ("left_over", 1),
    ],
)
def test_each_bar_can_be_missed(field, value):
    assert len(Report(**{**GOOD, field: value}).missed(ranks=2)) == 1


def test_an_empty_report_misses_all_bars():
    assert len(Report().missed(ranks=1)) == 11


def test_the_file_has_the_issues_keys(tmp_path):
    Report(**GOOD).write(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == GOOD


def test_the_table_names_steps_and_figures():
    table = Report(**GOOD).table([("check", 1.5), ("deploy", 40.0)])
    assert "41.5" in table
    assert "33,662" in table
    assert "max_rel_err" in table
