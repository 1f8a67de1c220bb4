"""Which hosts a command means: names, addresses, globs, ranges, ``@group`` and comma lists over a loaded inventory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fleetdump.errors import UsageError
from fleetdump.hostpatterns import Destination, PatternError, compress, expand, has_glob, matches, split_selection
from fleetdump.inventory.config import HostConfig
from fleetdump.suggest import did_you_mean


@dataclass(frozen=True)
class Selection:
    """The hosts a command means; ``unlisted`` names those that the inventory does not have (they use its defaults)."""

    hosts: list[HostConfig]
    unlisted: list[str]


@dataclass(frozen=True)
class Inventory:
    """A loaded inventory: hosts in the order of the file, groups as host names, and what an unlisted host gets."""

    path: Path
    hosts: tuple[HostConfig, ...]
    groups: Mapping[str, tuple[str, ...]]
    defaults: HostConfig

    def select(self, patterns: Sequence[str], exclude: Sequence[str] = (), ad_hoc: bool = False) -> list[HostConfig]:
        """The hosts that ``patterns`` mean (all when empty) without ``exclude``, in the inventory's order.

        With ``ad_hoc`` a ``[user@]host[:port]`` that the inventory does not have gets its defaults and comes last.
        Raises ``UsageError`` naming every pattern that matches nothing, each with the nearest valid name.
        """
        selection = self._select(patterns, exclude, unlisted=lambda _: ad_hoc)
        for host in selection.hosts:
            if host.name in selection.unlisted and any(not server.python for server in host.servers):
                raise UsageError(
                    "the defaults do not say which Python imports sglang",
                    f"{self.path}: {host.name}",
                    "the host is not in the inventory, so only defaults apply",
                    "set defaults.python, or add the host to the inventory",
                )
        return selection.hosts

    def select_read_only(self, patterns: Sequence[str], exclude: Sequence[str] = ()) -> Selection:
        """Like ``select`` for verbs that change nothing: an unlisted address is allowed, and the caller is told. A bare
        name is not: it is more likely a slip of the pen."""
        return self._select(patterns, exclude, unlisted=lambda piece: any(mark in piece for mark in ".:@"))

    def _select(self, patterns: Sequence[str], exclude: Sequence[str], unlisted: Callable[[str], bool]) -> Selection:
        wanted, unmatched = self._match(patterns)
        unwanted, unmatched_exclude = self._match(exclude)
        extra = self._destinations([piece for piece in unmatched if unlisted(piece)])
        unknown = [piece for piece in unmatched if piece not in extra] + unmatched_exclude
        if unknown:
            raise self._nothing_matches(unknown)
        if not patterns:
            wanted = {host.name for host in self.hosts}
        hosts = [host for host in self.hosts if host.name in wanted - unwanted]
        others = {destination.host: self._unlisted(destination) for destination in extra.values()}
        if not hosts and not others:
            raise UsageError("no host is left", str(self.path), "--exclude takes away all that was selected")
        return Selection([*hosts, *others.values()], list(others))

    def _match(self, patterns: Sequence[str]) -> tuple[set[str], list[str]]:
        """Names of the hosts that patterns stand for, and the pieces that match nothing."""
        index: dict[str, list[str]] = {}
        for host in self.hosts:
            for key in {host.name, host.address}:
                index.setdefault(key, []).append(host.name)
        names: set[str] = set()
        unmatched: list[str] = []
        for piece in _pieces(patterns):
            if piece.startswith("@"):
                found: Sequence[str] = self.groups.get(piece[1:], ())
            elif has_glob(piece):
                found = [host.name for host in self.hosts if matches(piece, (host.name, host.address))]
            else:
                found = index.get(piece, ())
            names.update(found)
            if not found:
                unmatched.append(piece)
        return names, unmatched

    def _destinations(self, pieces: Sequence[str]) -> dict[str, Destination]:
        """The pieces that can be connected to; a listed host with a user or port before or behind it is not one."""
        listed = {name for host in self.hosts for name in (host.name, host.address)}
        destinations: dict[str, Destination] = {}
        for piece in pieces:
            with contextlib.suppress(PatternError):
                destination = Destination.parse(piece)
                if destination.host not in listed:
                    destinations[piece] = destination
        return destinations

    def _unlisted(self, destination: Destination) -> HostConfig:
        return replace(
            self.defaults,
            name=destination.host,
            address=destination.host,
            user=destination.user or self.defaults.user,
            port=destination.port or self.defaults.port,
        )

    def _nothing_matches(self, unknown: list[str]) -> UsageError:
        valid = [f"@{group}" for group in self.groups]
        valid += [name for host in self.hosts for name in dict.fromkeys((host.name, host.address))]
        known = [*compress(host.name for host in self.hosts), *(f"@{group}" for group in self.groups)]
        return UsageError(
            "; ".join(f"no host matches {pattern!r}{did_you_mean(pattern, valid)}" for pattern in unknown[:10]),
            str(self.path),
            f"the inventory has {', '.join(known[:20])}{' ...' if len(known) > 20 else ''}",
            "correct the pattern, or add --ad-hoc for a host that the inventory does not have",
        )


def _pieces(patterns: Sequence[str]) -> Iterator[str]:
    """The pieces of all patterns, ranges expanded."""
    try:
        for pattern in patterns:
            for piece in split_selection(pattern):
                literal = piece.startswith("@") or "::" in piece  # a group, or an IPv6 address with its brackets
                yield from [piece] if literal else expand(piece)
    except PatternError as error:
        raise UsageError(str(error), next_step="see the patterns at the end of inventory/example.yaml") from None
