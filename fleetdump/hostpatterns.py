"""Host names and the patterns that stand for many of them; pure.

Grammar::

    selection   = piece {"," piece}             commas inside brackets do not separate
    piece       = "@" group | pattern
    pattern     = text with any number of "[" range {"," range} "]" and of "*" and "?"
    range       = number | number "-" number    a leading zero fixes the width: [01-08]
    destination = [user "@"] host [":" port]    an IPv6 address with a port stands in brackets: [2001:db8::1]:22
"""

from __future__ import annotations

import fnmatch
import ipaddress
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_HOSTS = 10_000
"""Largest number of names that one pattern may stand for."""

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?\Z")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}\$?\Z")
_SCOPE = re.compile(r"[A-Za-z0-9._-]{1,32}\Z")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?\Z")
_PORT = re.compile(r"[1-9][0-9]{0,4}\Z")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_IPV6_PORT = re.compile(r"\[([^\[\]]*)\](?::(.*))?\Z")
_NUMBERED = re.compile(r"(.*?)([0-9]{1,9})([^0-9]*)\Z")


class PatternError(ValueError):
    """A pattern, name or destination that cannot be read; the text says why."""


# --------------------------------------------------------------------------- patterns
def split_selection(text: str) -> list[str]:
    """The pieces of a comma list; raises ``PatternError`` for an empty piece or an open bracket."""
    pieces: list[str] = []
    depth = start = 0
    for n, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        if depth not in (0, 1):
            raise PatternError(f"{text!r}: brackets do not match")
        if char == "," and not depth:
            pieces.append(text[start:n].strip())
            start = n + 1
    if depth:
        raise PatternError(f"{text!r}: a bracket is not closed")
    pieces.append(text[start:].strip())
    if "" in pieces:
        raise PatternError(f"{text!r}: an empty name in the list")
    return pieces


def expand(pattern: str) -> list[str]:
    """Names that a pattern with ranges stands for, in order and each once: ``gpu[01-02,10]`` gives gpu01, gpu02, gpu10.

    A pattern without brackets is its own only name; ``*`` and ``?`` stay. Raises ``PatternError`` for a bad range or
    more than ``MAX_HOSTS`` names.
    """
    parts = _BRACKETS.split(pattern)  # literal, inside of a bracket, literal, ...
    if any("[" in literal or "]" in literal for literal in parts[::2]):
        raise PatternError(f"{pattern!r}: brackets do not match")
    choices: list[list[str]] = []
    for n, part in enumerate(parts):
        choices.append(_numbers(part, pattern) if n % 2 else [part])
        if math.prod(map(len, choices)) > MAX_HOSTS:
            raise PatternError(f"{pattern!r}: stands for more than {MAX_HOSTS} hosts")
    return list(dict.fromkeys("".join(combination) for combination in itertools.product(*choices)))


def _numbers(part: str, pattern: str) -> list[str]:
    numbers: list[str] = []
    for item in part.split(","):
        match = _RANGE.match(item.strip())
        if match is None:
            raise PatternError(f"{pattern!r}: {item.strip()!r} is not a number or a range such as 01-08")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise PatternError(f"{pattern!r}: the range {first}-{last} runs backwards")
        if len(last) != len(first) and (_padded(first) or _padded(last)):
            raise PatternError(f"{pattern!r}: the ends of {first}-{last} must have the same number of digits")
        if len(numbers) + int(last) - int(first) >= MAX_HOSTS:
            raise PatternError(f"{pattern!r}: stands for more than {MAX_HOSTS} hosts")
        width = len(first) if _padded(first) else 0
        numbers.extend(f"{n:0{width}d}" for n in range(int(first), int(last) + 1))
    return numbers


def _padded(number: str) -> bool:
    return len(number) > 1 and number.startswith("0")


def compress(names: Iterable[str]) -> list[str]:
    """Patterns that ``expand`` to exactly ``names`` (a set): names that differ in their last number share a bracket.

    Names hold no pattern characters. Groups keep the order of their first name; inside one, numbers ascend.
    """
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for name in dict.fromkeys(names):
        match = _NUMBERED.match(name)  # a name without a number shares no bracket with those that add one to it
        key, number = ((match[1], match[3], True), match[2]) if match else ((name, "", False), "")
        groups.setdefault(key, []).append(number)
    return [f"{head}{_bracket(numbers)}{tail}" for (head, tail, _), numbers in groups.items()]


def _bracket(numbers: list[str]) -> str:
    if len(numbers) == 1:
        return numbers[0]
    ranges: list[list[str]] = []
    for number in sorted(numbers, key=lambda n: (len(n), n)):
        if ranges and _follows(ranges[-1][0], ranges[-1][-1], number):
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return f"[{','.join('-'.join(ends) for ends in ranges)}]"


def _follows(first: str, last: str, number: str) -> bool:
    same_form = len(first) == len(number) or not (_padded(first) or _padded(number))
    return same_form and int(last) + 1 == int(number)


def has_glob(pattern: str) -> bool:
    """Whether a pattern has ``*`` or ``?``."""
    return "*" in pattern or "?" in pattern


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether one expanded pattern is, or as a glob matches, one of ``names``; case counts, brackets are literal."""
    if not has_glob(pattern):
        return pattern in names
    glob = pattern.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(name, glob) for name in names)


# --------------------------------------------------------------------------- destinations
@dataclass(frozen=True)
class Destination:
    """``[user@]host[:port]`` taken apart; what was not written is None."""

    host: str
    user: str | None = None
    port: int | None = None

    @classmethod
    def parse(cls, text: str) -> Destination:
        """Raises ``PatternError`` for anything but a host name, IPv4 or IPv6 address with optional user and port."""
        user, at, rest = text.rpartition("@")
        if at and not is_user_name(user):
            raise PatternError(f"{text!r}: {user!r} is not a user name")
        host, port = _split_port(rest)
        if not is_host_name(host) and not _is_ipv6(host):
            raise PatternError(f"{text!r}: {host!r} is not a host name or address")
        if port is not None and (not _PORT.match(port) or int(port) > 65535):
            raise PatternError(f"{text!r}: port {port!r} is not in 1..65535")
        return cls(host, user or None, int(port) if port else None)


def _split_port(text: str) -> tuple[str, str | None]:
    bracketed = _IPV6_PORT.match(text)
    if bracketed:
        return bracketed[1], bracketed[2]
    if text.count(":") == 1:
        host, _, port = text.partition(":")
        return host, port
    return text, None


def is_host_name(text: str) -> bool:
    """Whether ``text`` may name a host: letters, digits, ``._-``, no ``..``, a letter or digit at both ends."""
    return bool(_NAME.match(text)) and ".." not in text


def is_user_name(text: str) -> bool:
    """Whether ``text`` may be a login name."""
    return bool(_USER.match(text))


def _is_ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return not address.scope_id or bool(_SCOPE.match(address.scope_id))


def is_address(text: str) -> bool:
    """Whether ``text`` can be connected to: a host name, an IPv4 or an IPv6 address."""
    return is_host_name(text) or _is_ipv6(text)
