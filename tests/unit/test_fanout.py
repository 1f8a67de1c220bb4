"""Fan-out without a network: the bound, each host's own deadline, errors, interrupts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from fleetdump.errors import HostError, UnreachableError
from fleetdump.fleet import Host, fan_out
from fleetdump.inventory import HostConfig


def hosts(count: int) -> list[HostConfig]:
    return [HostConfig(name=f"h{n}", address="localhost", connection="local") for n in range(count)]


def test_outcomes_keep_the_order_of_the_hosts() -> None:
    def work(host: Host) -> str:
        time.sleep(0.5 if host.config.name == "h0" else 0)
        return host.config.name

    seen: list[str] = []
    outcomes = fan_out(hosts(5), work, on_outcome=lambda name, _: seen.append(name))
    assert [(name, outcome.value) for name, outcome in outcomes.items()] == [(f"h{n}", f"h{n}") for n in range(5)]
    assert seen[-1] == "h0"
    assert sorted(seen) == list(outcomes)


def test_no_hosts() -> None:
    assert fan_out([], lambda host: None) == {}


def test_at_most_limit_at_work() -> None:
    lock, now, most = threading.Lock(), [0], [0]

    def work(_: Host) -> None:
        with lock:
            now[0] += 1
            most[0] = max(most[0], now[0])
        time.sleep(0.02)
        with lock:
            now[0] -= 1

    fan_out(hosts(20), work, limit=3)
    assert most[0] == 3


def test_more_hosts_than_threads() -> None:
    assert len(fan_out(hosts(300), lambda host: host.config.name)) == 300


def test_one_failure_hides_no_other() -> None:
    def work(host: Host) -> int:
        if host.config.name == "h1":
            raise HostError("it failed", "h1", code="conflict")
        if host.config.name == "h2":
            raise ZeroDivisionError("oops")
        return 1

    outcomes = fan_out(hosts(4), work)
    assert [outcome.value for outcome in outcomes.values()] == [1, None, None, 1]
    assert str(outcomes["h1"].error) == "h1: it failed"
    unexpected = outcomes["h2"].error
    assert isinstance(unexpected, HostError)
    assert unexpected.code == "bug"
    assert "test_fanout.py" in unexpected.why


def test_stuck_host_is_given_up_and_gives_its_turn_to_the_next() -> None:
    never = threading.Event()

    def work(host: Host) -> int:
        if host.config.name == "h0":
            never.wait(20)
        return 1

    began = time.monotonic()
    outcomes = fan_out(hosts(4), work, limit=1, deadline=1)
    never.set()
    assert time.monotonic() - began < 6
    assert isinstance(outcomes["h0"].error, UnreachableError)
    assert [outcomes[f"h{n}"].value for n in (1, 2, 3)] == [1, 1, 1]


def test_interrupt_closes_what_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = threading.Event()
    close: Callable[[Host], None] = Host.close
    monkeypatch.setattr(Host, "close", lambda self: (closed.set(), close(self))[1])

    def interrupt(name: str, _: object) -> None:
        raise KeyboardInterrupt

    def work(host: Host) -> None:
        if host.config.name == "h1":
            closed.wait(20)

    with pytest.raises(KeyboardInterrupt):
        fan_out(hosts(2), work, on_outcome=interrupt)
    assert closed.wait(5)


def test_hosts_that_come_later_and_once_more() -> None:
    """``later`` is asked until nobody is at work and it has nobody left."""
    first, second = hosts(2)
    tries: list[str] = []
    came = [[second], [first], []]

    def work(host: Host) -> int:
        tries.append(host.config.name)
        if len(tries) == 1:
            raise UnreachableError("lost", "h0")
        return len(tries)

    ended: list[str] = []

    def later() -> list[HostConfig]:
        return came.pop(0) if came and (len(came) == 3 or "h0" in ended) else []

    outcomes = fan_out([first], work, on_outcome=lambda name, _: ended.append(name), later=later)
    assert list(outcomes) == ["h0", "h1"]
    assert sorted(tries) == ["h0", "h0", "h1"]
    assert outcomes["h0"].error is None, "its last outcome counts"
