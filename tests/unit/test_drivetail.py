"""The bench's figure of a run's tail."""

from __future__ import annotations

import pytest

from bench.drivetail import RATES, TAIL, tail_of


def test_a_run_in_which_nobody_rests_has_the_ideal_tail() -> None:
    tokens, rate = 65, sum(RATES)
    lines = [(1000.0 + n * tokens / rate, tokens) for n in range(1, 2001)]
    tail = tail_of(lines[::-1], moved=3)
    assert tail.ideal == pytest.approx(TAIL * 2000 * tokens / rate)
    assert tail.figures()["tail_ratio"] == pytest.approx(1.0, abs=0.02)
    assert tail.run_s == pytest.approx(tail.run_ideal, rel=0.01)
    assert tail.figures()["tail_moves"] == 3


def test_a_slow_host_that_ends_alone_makes_the_tail_long() -> None:
    tokens, rate = 65, sum(RATES)
    lines = [(n * tokens / rate, tokens) for n in range(1901)]
    end = lines[-1][0]
    alone = [(end + n * tokens / RATES[-1], tokens) for n in range(1, 101)]
    assert tail_of(lines + alone, moved=0).figures()["tail_ratio"] == pytest.approx(rate / RATES[-1], rel=0.02)
