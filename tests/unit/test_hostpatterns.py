"""Host patterns: expansion, globs, comma lists and destinations."""

from __future__ import annotations

import contextlib
import string
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetdump.hostpatterns import (
    MAX_HOSTS,
    Destination,
    PatternError,
    compress,
    expand,
    is_address,
    is_host_name,
    matches,
    split_selection,
)

NAMES = st.builds(
    lambda head, number, tail: f"{head}{number}{tail}",
    st.text(string.ascii_lowercase + "-.0123456789", max_size=6),
    st.one_of(st.just(""), st.integers(0, 120).map(str), st.integers(0, 120).map("{:03d}".format)),
    st.text(string.ascii_lowercase, max_size=3),
).filter(bool)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[02-03,10]", ["gpu02", "gpu03", "gpu10"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[0-2]", ["gpu0", "gpu1", "gpu2"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("r[1-2]n[1-2].x", ["r1n1.x", "r1n2.x", "r2n1.x", "r2n2.x"]),
        ("gpu[1,1]", ["gpu1"]),
        ("gpu[1-2]*", ["gpu1*", "gpu2*"]),
        ("10.0.0.[1-2]", ["10.0.0.1", "10.0.0.2"]),
    ],
)
def test_expand(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("gpu[3-1]", "backwards"),
        ("gpu[01-8]", "same number of digits"),
        ("gpu[8-010]", "same number of digits"),
        ("gpu[]", "not a number"),
        ("gpu[a-b]", "not a number"),
        ("gpu[1-]", "not a number"),
        ("gpu[-1]", "not a number"),
        ("gpu[1--2]", "not a number"),
        ("gpu[١]", "not a number"),
        ("gpu[1", "brackets"),
        ("gpu1]", "brackets"),
        ("gpu[[1]]", "brackets"),
        ("]1[", "brackets"),
        (f"gpu[1-{MAX_HOSTS + 1}]", "more than"),
        ("gpu[1-999999999]", "more than"),
        ("[0-99][0-99][0-99]", "more than"),
        ("[1-9999,1-9999]", "more than"),
        ("[0-9999]" * 10_000, "more than"),
    ],
)
def test_expand_refuses(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        expand(pattern)


def test_expand_reaches_its_bound() -> None:
    assert len(expand(f"gpu[1-{MAX_HOSTS}]")) == MAX_HOSTS


@settings(deadline=None)
@given(st.lists(NAMES, max_size=40))
def test_compress_round_trip(names: list[str]) -> None:
    expanded = [name for pattern in compress(names) for name in expand(pattern)]
    assert sorted(expanded) == sorted(set(names))


def test_compress_is_short() -> None:
    assert compress([f"gpu{n:02d}" for n in range(1, 12)] + ["db", "gpu20"]) == ["gpu[01-11,20]", "db"]
    assert compress(f"n{n}" for n in range(13)) == ["n[0-12]"]
    assert compress(["gpu", "gpu0", "gpu1"]) == ["gpu", "gpu[0-1]"], "a name without a number stands alone"


@pytest.mark.parametrize("parse", [expand, split_selection, Destination.parse])
@settings(deadline=None)
@given(text=st.text("[]-,01ag@:.*% ", max_size=12) | st.text(max_size=12))
def test_any_text_is_read_or_refused(parse: Callable[[str], object], text: str) -> None:
    with contextlib.suppress(PatternError):
        assert parse(text)


def test_split_selection() -> None:
    assert split_selection("gpu[01,03-04], @small ,db*") == ["gpu[01,03-04]", "@small", "db*"]


@pytest.mark.parametrize("text", ["", "a,", ",a", "a,,b", "gpu[1,2", "gpu]1", "g[[1]]"])
def test_split_selection_refuses(text: str) -> None:
    with pytest.raises(PatternError):
        split_selection(text)


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [("gpu*", True), ("gpu0?", True), ("gpu01", True), ("GPU01", False), ("gpu", False), ("?pu1", False)],
)
def test_matches(pattern: str, matching: bool) -> None:
    assert matches(pattern, ("gpu01", "10.0.0.1")) is matching


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu01", ("gpu01", None, None)),
        ("root@gpu01", ("gpu01", "root", None)),
        ("root@10.0.0.1:2222", ("10.0.0.1", "root", 2222)),
        ("2001:db8::1", ("2001:db8::1", None, None)),
        ("me@[2001:db8::1]:22", ("2001:db8::1", "me", 22)),
        ("fe80::1%eth0", ("fe80::1%eth0", None, None)),
    ],
)
def test_destination(text: str, parts: tuple[str, str | None, int | None]) -> None:
    destination = Destination.parse(text)
    assert (destination.host, destination.user, destination.port) == parts


@pytest.mark.parametrize(
    "text",
    [
        "",
        "@h",
        "-oProxyCommand=x",
        "a b",
        "a;reboot",
        "$(id)",
        "h:",
        "h:0",
        "h:65536",
        "h:ssh",
        "h:٢٢",
        "u@",
        "a..b",
        "h\n",
        "..",
        "[::1",
        "[::1]22",
        "[gpu01]:22x",
        "fe80::1%a;b",
        "-u@h",
        "h/../x",
    ],
)
def test_destination_refuses(text: str) -> None:
    with pytest.raises(PatternError):
        Destination.parse(text)


def test_names_and_addresses() -> None:
    assert is_host_name("gpu-01.cluster_a")
    assert not is_host_name("2001:db8::1")
    assert is_address("2001:db8::1")
    assert not is_address("*")
