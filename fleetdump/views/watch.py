"""A live watch: on a terminal a line a server, kept up to date in place; elsewhere a line on each change, on stdout:
what is watched is the command's output."""

from __future__ import annotations

import json
import threading

from rich.console import Group
from rich.live import Live
from rich.text import Text

from fleetdump.agent.protocol import to_json
from fleetdump.agent.servermessages import Fault, Vitals
from fleetdump.hostpatterns import compress
from fleetdump.tasks.watch import load_rates, slow_loaders, usual
from fleetdump.views.console import duration, err, out, quoted, size, visible
from fleetdump.views.progress import outlier_words

GB = 1e9
NOTHING = "nothing of ours runs there"
SOON = 86400.0
_STYLES = {"ready": "green", "starting": "yellow", "stopped": "dim", "died": "bold red", "broken": "bold red"}


class WatchView:
    """Shows ``update``s from any thread; a context manager. It keeps lines up to date where both stdout and stderr are
    a terminal; else lines go to stdout as they come. ``as_json`` prints each as an object on stdout instead:
    ``vitals`` when something has changed, ``fault`` and ``cleared`` when a fault comes and goes, ``empty`` for a host
    that has no server, ``lost`` and ``back`` for one whose link is cut and stands again."""

    def __init__(self, as_json: bool = False) -> None:
        self._as_json = as_json
        self._servers: dict[tuple[str, str], Vitals] = {}
        self._told: dict[tuple[str, str], str] = {}
        self._outliers: set[str] = set()
        self._empty: set[str] = set()
        self._lost: dict[str, str] = {}
        """Hosts whose link is cut, and why."""
        self._lock = threading.Lock()
        live = err.is_terminal and out.is_terminal and not as_json
        self._live = Live(get_renderable=self._render, console=err, refresh_per_second=2) if live else None

    def __enter__(self) -> WatchView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, host: str, server: Vitals) -> None:
        """A server's newest state."""
        with self._lock:
            self._empty.discard(host)
            self._tell_back(host)
            before = self._servers.get((host, server.server))
            self._servers[host, server.server] = server
            if self._as_json:
                out.print(json.dumps({"host": host, "event": "vitals", **to_json(server)}), markup=False)
            self._tell_faults(host, before, server)
            if self._live is None and not self._as_json:
                self._tell_change(host, server)
                self._tell_outliers()

    def empty(self, host: str) -> None:
        """A host has been looked at, and nothing of ours runs there."""
        with self._lock:
            self._tell_back(host)
            self._empty.add(host)
            if self._as_json:
                out.print(json.dumps({"host": host, "event": "empty"}), markup=False)
            elif self._live is None:
                out.print(f"[bold]{quoted(host)}[/] {NOTHING}")

    def lost(self, host: str, why: str) -> None:
        """The link to a host is cut, and is tried again: what is shown of its servers is from before."""
        with self._lock:
            if self._lost.get(host) == why:
                return  # it has been tried once more
            self._lost[host] = why
            if self._as_json:
                out.print(json.dumps({"host": host, "event": "lost", "why": why}), markup=False)
            elif self._live is None:
                out.print(f"[bold]{quoted(host)}[/] {_lost(why)}")

    def _tell_back(self, host: str) -> None:
        if self._lost.pop(host, None) is None:
            return
        if self._as_json:
            out.print(json.dumps({"host": host, "event": "back"}), markup=False)
        elif self._live is None:
            out.print(f"[bold]{quoted(host)}[/] is back")

    # ------------------------------------------------------------------ lines
    def _tell_faults(self, host: str, before: Vitals | None, server: Vitals) -> None:
        old = {fault.code: fault for fault in before.faults} if before is not None else {}
        new = {fault.code: fault for fault in server.faults}
        for kind, faults in (
            ("fault", [new[code] for code in new if code not in old or (old[code].note and not new[code].note)]),
            ("cleared", [old[code] for code in old if code not in new]),
        ):
            for fault in faults:
                if self._as_json:
                    event = {"host": host, "event": kind, "server": server.server, "fault": to_json(fault)}
                    out.print(json.dumps(event), markup=False)
                elif self._live is None:
                    out.print(f"{_name(host, server)} {'' if kind == 'fault' else 'over: '}{_fault(fault)}")

    def _tell_change(self, host: str, server: Vitals) -> None:
        tenth = int(10 * server.load_bytes / server.load_total) if server.load_total else 0
        told = f"{server.state} {server.phase} {tenth} {server.errors} {server.run.partition(',')[0]}"
        if self._told.get((host, server.server)) != told:
            self._told[host, server.server] = told
            out.print(f"{_name(host, server)} {self._facts(server)}")

    def _tell_outliers(self) -> None:
        for text in self._slow():
            name = text.partition(" ")[0]
            if name not in self._outliers:
                self._outliers.add(name)
                out.print(quoted(text), style="yellow")

    def _slow(self) -> list[str]:
        servers = {f"{host}/{name}": one for (host, name), one in self._servers.items()}
        return [outlier_words(one) for one in slow_loaders(load_rates(servers))]

    def _facts(self, server: Vitals) -> str:
        return ", ".join([_state(server), *(quoted(part) for part in facts(server, list(self._servers.values())))])

    def _render(self) -> Group:
        with self._lock:
            lines = []
            for (host, _), server in sorted(self._servers.items()):
                lines.append(f"{_name(host, server)} {self._facts(server)}")
                lines += [f"  {_fault(fault)}" for fault in server.faults]
            lines += [f"[yellow]{quoted(text)}[/]" for text in self._slow()]
            lines += [f"[bold]{quoted(host)}[/] {_lost(why)}" for host, why in sorted(self._lost.items())]
            if self._empty:
                lines.append(f"[bold]{quoted(', '.join(compress(sorted(self._empty))))}[/] [dim]{NOTHING}[/]")
        lines = lines or ["[dim]looking ...[/]"]
        return Group(*(Text.from_markup(visible(line), emoji=False) for line in lines))


def facts(server: Vitals, others: list[Vitals]) -> list[str]:
    """A server in words, what matters in its state: a start by its progress, one that serves by what it captures."""
    if server.state == "starting":
        return _of_a_start(server, others)
    if server.state != "ready":
        return []
    parts = [f"up {duration(server.uptime)}"]
    if server.ring_bytes:
        parts.append(f"captures {server.bytes_per_second / GB:.2f} GB/s, {server.rows} rows")
        parts.append(f"queue {server.queue_bytes / server.ring_bytes:.0%}")
    if server.disk_free >= 0:
        full = f" (full in {duration(server.disk_eta)})" if 0 < server.disk_eta < SOON else ""
        parts.append(f"disk {size(server.disk_free)}{full}")
    parts.append(f"{server.forwards} forwards" + (f", {server.in_flight} in flight" if server.in_flight else ""))
    if server.errors:
        parts.append(f"{server.errors} errors" + (f" ({server.last_error})" if server.last_error else ""))
    return [*parts, server.run] if server.run else parts


def _of_a_start(server: Vitals, others: list[Vitals]) -> list[str]:
    profile = usual(server, others)
    parts = [f"{server.lines} lines" + (f"; healthy starts {profile.lines_span}" if profile else "")]
    if server.load_bytes:
        of = f" of {size(server.load_total)}" if server.load_total else ""
        eta = f", ETA {duration(server.load_eta)}" if server.load_eta else ""
        parts.append(f"weights {size(server.load_bytes)}{of} at {server.load_rate / GB:.2g} GB/s{eta}")
    spent = profile.phase_seconds.get(server.phase) if profile else None
    if spent:
        parts.append(f"healthy starts spend {duration(spent)} in {server.phase}")
    if server.behind:
        parts.append(f"behind the others: {', '.join(server.behind)}")
    if server.idle_seconds >= 5:
        parts.append(f"nothing moves for {server.idle_seconds:.0f} of {server.patience:.0f} s")
    elif server.moves:
        parts.append(server.moves[0])
    return [f"up {duration(server.uptime)}", *parts]


def _state(server: Vitals) -> str:
    state = f"{server.state} {server.phase}" if server.state == "starting" else server.state
    return f"[{_STYLES.get(server.state, 'dim')}]{quoted(state)}[/]"


def _name(host: str, server: Vitals) -> str:
    return f"[bold]{quoted(f'{host}/{server.server}')}[/]"


def _lost(why: str) -> str:
    return f"[magenta]link lost[/], trying again: {quoted(why)}"


def _fault(fault: Fault) -> str:
    style = "cyan" if fault.note else "bold red"
    return f"[{style}]{quoted(fault.code)}[/]: {quoted(fault.text)}"
