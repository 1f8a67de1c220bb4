"""The verdict does not hang on what a case happens to be called or numbered: every case again, in other clothes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from cases import parts
from cases.table import CASES
from fleetdump.agent.evidence_types import Evidence
from fleetdump.diagnosis import diagnose

KERNELS = {
    "futex_do_wait": "futex_wait_queue_me", "futex_wait_queue_me": "futex_wait_queue", "pipe_wait": "anon_pipe_read",
    "anon_pipe_read": "pipe_read", "do_epoll_wait": "ep_poll", "ep_poll": "do_epoll_wait",
    "locks_lock_inode_wait": "flock_lock_inode_wait", "anon_pipe_write": "pipe_write",
}  # fmt: skip
"""Where a thread sleeps, as another release of the kernel calls it."""
PIDS = ("pid", "ppid", "tid", "holder", "waiter", "owner_pid", "peer", "tracer_pid", "session", "peers", "silent_pids")
SHIFT = 7000
LOST = 0.12
"""Share of the fields that are missing."""
_NAMED_PID = re.compile(r"(?P<word>Killed process |pid=|illing process )(?P<pid>\d+)")
_LINE = re.compile(r":(?P<line>\d+)\)")


def each(whole: Any, change: Callable[[str, Any], Any]) -> None:
    """Put ``change(name, value)`` in place of every field, however deep."""
    if dataclasses.is_dataclass(whole):
        for field in dataclasses.fields(whole):
            setattr(whole, field.name, change(field.name, getattr(whole, field.name)))
            each(getattr(whole, field.name), change)
    elif isinstance(whole, (list, dict)):
        for part in whole.values() if isinstance(whole, dict) else whole:
            each(part, change)


def another_kernel(e: Evidence) -> None:
    each(e, lambda name, value: KERNELS.get(value, value) if name == "wchan" else value)


def other_pids(e: Evidence) -> None:
    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(one) for one in value]
        return value + SHIFT if value > 1 else value

    def in_text(lines: list[str]) -> list[str]:
        return [_NAMED_PID.sub(lambda m: f"{m['word']}{moved(int(m['pid']))}", line) for line in lines]

    each(e, lambda name, value: moved(value) if name in PIDS else value)
    e.memory.oom_lines, e.kernel_log, e.host.logins = map(in_text, (e.memory.oom_lines, e.kernel_log, e.host.logins))


def other_order(e: Evidence) -> None:
    e.processes = e.processes[:1] + e.processes[:0:-1]
    e.stacks, e.gpus = e.stacks[::-1], e.gpus[::-1]


def other_places(e: Evidence) -> None:
    def moved(name: str, value: Any) -> Any:
        is_path = name in ("path", "log", "stdout", "stderr") and isinstance(value, str)
        return value.replace("/srv/", "/opt/x/").replace("/var/log/", "/data/y/") if is_path else value

    each(e, moved)


def other_lines_of_code(e: Evidence) -> None:
    def moved(name: str, value: Any) -> Any:
        if name not in ("frames", "native"):
            return value
        return [_LINE.sub(lambda m: f":{int(m['line']) + 137})", frame) for frame in value]

    each(e, moved)


def longer_between_the_samples(e: Evidence) -> None:
    e.seconds *= 2
    counted = ("growth", "forwards", "news")
    each(e, lambda name, value: value * 2 if name.endswith("_delta") or name in counted else value)


def a_little_less_of_everything(e: Evidence) -> None:
    """CPU, switches and power, within what two looks at the same server differ by."""
    factors = {"cpu": 0.96, "voluntary": 0.8, "power": 1.04}
    each(e, lambda name, value: value * factors.get(name, 1) if isinstance(value, float) else value)


def groups_left_out(e: Evidence) -> None:
    e.stack_groups, e.native_groups = [], []


def command_lines_hidden(e: Evidence) -> None:
    each(e, lambda name, value: "" if name == "cmdline" else value)


VARIATIONS = (
    another_kernel,
    other_pids,
    other_order,
    other_places,
    other_lines_of_code,
    longer_between_the_samples,
    a_little_less_of_everything,
    groups_left_out,
    command_lines_hidden,
)


def lessened(whole: Any, random: Random) -> None:
    """Set some fields back to their defaults and drop some items of lists: a probe that failed, a bundle by hand."""
    for field in dataclasses.fields(whole):
        given = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        if given and random.random() < LOST:
            empty = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            setattr(whole, field.name, empty)
        value = getattr(whole, field.name)
        if isinstance(value, list) and value and random.random() < LOST:
            value.pop(random.randrange(len(value)))
        for part in value if isinstance(value, list) else [value]:
            if dataclasses.is_dataclass(part):
                lessened(part, random)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_comes_whatever_is_left_out(seed: int) -> None:
    random = Random(seed)
    for one in CASES:
        evidence = one.build()
        lessened(evidence, random)
        best = diagnose(evidence)[0]
        assert best.title, one.name
        assert best.evidence, one.name


@pytest.mark.parametrize("vary", VARIATIONS, ids=lambda one: one.__name__)
def test_every_case_in_other_clothes(vary: Callable[[Evidence], None]) -> None:
    assert parts.PARTS, "they fill the table"
    wrong = []
    for one in CASES:
        evidence = one.build()
        vary(evidence)
        verdicts = diagnose(evidence)
        codes = {verdict.code for verdict in verdicts}
        right_rank = one.rank is None or verdicts[0].rank == one.rank
        if verdicts[0].code not in one.first or one.never & codes or not right_rank:
            wrong.append((one.name, [verdict.code for verdict in verdicts], verdicts[0].rank))
    assert not wrong
