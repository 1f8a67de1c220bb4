"""Does a process that we start survive the end of the login session? (logind's KillUserProcesses)

With ``KillUserProcesses=yes`` logind ends everything in a session's scope at logout, nohup and setsid notwithstanding.
What does survive is a scope below the user's own service manager (``systemd-run --user --scope``), for as long as that
manager does: at the last logout it ends too, unless the user lingers. ``decide`` is pure.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Optional, Tuple

from fleetdump.agent.probes.bounded import ProbeFailed, run_command

CONFIG_FOLDERS = ("usr/lib/systemd", "usr/local/lib/systemd", "run/systemd", "etc/systemd")
"""Later ones outweigh earlier ones, and a drop-in every main file."""
LINGER_SECONDS = 5.0
PLAIN = "nohup and setsid"
_SESSION = re.compile(r"/session-[^/]+\.scope(?:/|$)")
_SETTING = re.compile(r"^\s*(?P<off>#?)\s*(?P<name>Kill\w+)\s*=\s*(?P<value>.*?)\s*$", re.MULTILINE)
_YES = frozenset({"yes", "true", "1", "on", "y", "t"})


@dataclass
class LogindFacts:
    """What decides. ``in_session``: we are in a login session's scope; ``kills`` is KillUserProcesses (None: neither
    said nor shown as the built-in default), ``only`` and ``exclude`` are the users it is limited to and spares.
    ``manager``: the user's service manager runs."""

    user: str
    uid: int
    booted: bool = False
    in_session: bool = False
    kills: Optional[bool] = None
    only: List[str] = field(default_factory=list)
    exclude: List[str] = field(default_factory=lambda: ["root"])
    lingers: bool = False
    manager: bool = False
    systemd_run: str = ""


@dataclass
class Shelter:
    """How to start what must outlive the session: ``prefix`` goes before the command line, ``env`` into its
    environment. ``said`` is for people; ``linger``: the user must be made to linger first. ``warning``: what is left
    to fear, with the step that ends it."""

    said: str
    prefix: List[str] = field(default_factory=list)
    env: Dict[str, str] = field(default_factory=dict)
    linger: bool = False
    warning: str = ""


def shelter() -> Shelter:
    """What this process has to do now; lets its user linger where that is needed and allowed."""
    facts = read_facts()
    chosen = decide(facts)
    if chosen.linger and not _enable_linger(facts.user):
        chosen.warning = (
            f"{facts.user} does not linger, and may not be made to: the server ends with the last logout;"
            f" run `loginctl enable-linger {facts.user}` as root"
        )
    return chosen


def decide(facts: LogindFacts) -> Shelter:
    """The least that keeps a process alive."""
    if not facts.booted:
        return Shelter(f"{PLAIN}; no systemd here")
    if not facts.in_session:
        return Shelter(f"{PLAIN}; not in a login session's scope")
    if not facts.kills or not _is_meant(facts):
        why = "spares this user" if facts.kills else "is off"
        return Shelter(f"{PLAIN}; logind's KillUserProcesses {why}")
    if not facts.systemd_run or not facts.manager:
        lacks = "systemd-run" if not facts.systemd_run else "a service manager of the user"
        warning = (
            f"logind's KillUserProcesses is on, and there is no {lacks}: the server ends at logout;"
            f" set KillUserProcesses=no in /etc/systemd/logind.conf, or add {facts.user} to its KillExcludeUsers"
        )
        return Shelter(PLAIN, warning=warning)
    return Shelter(
        "systemd-run --user --scope, since logind's KillUserProcesses is on" + ("" if facts.lingers else "; linger"),
        prefix=[facts.systemd_run, "--user", "--scope", "--quiet", "--collect", "--"],
        env={"XDG_RUNTIME_DIR": f"/run/user/{facts.uid}"},
        linger=not facts.lingers,
    )


def _is_meant(facts: LogindFacts) -> bool:
    """KillExcludeUsers outweighs KillOnlyUsers, as logind.conf(5) says."""
    return facts.user not in facts.exclude and (not facts.only or facts.user in facts.only)


def read_facts(root: Path = Path("/")) -> LogindFacts:
    """The facts of this process, its files below ``root``."""
    uid = os.getuid()
    facts = LogindFacts(_user(uid), uid)
    facts.booted = (root / "run/systemd/system").is_dir()
    if not facts.booted:
        return facts
    facts.in_session = bool(_SESSION.search(_text(root / "proc/self/cgroup")))
    facts.lingers = (root / "var/lib/systemd/linger" / facts.user).exists()
    facts.manager = (root / f"run/user/{uid}/systemd/private").exists()
    facts.systemd_run = shutil.which("systemd-run") or ""
    settings, shown = parse_config([_text(path) for path in config_files(root)])
    kills = settings.get("KillUserProcesses") or shown.get("KillUserProcesses")
    facts.kills = kills.lower() in _YES if kills else None
    facts.only = settings.get("KillOnlyUsers", "").split()
    if "KillExcludeUsers" in settings:
        facts.exclude = settings["KillExcludeUsers"].split()
    return facts


def config_files(root: Path) -> List[Path]:
    """logind.conf and its drop-ins, those that outweigh others last."""
    folders = [root / folder for folder in CONFIG_FOLDERS]
    drop_ins = {path.name: path for folder in folders for path in (folder / "logind.conf.d").glob("*.conf")}
    return [folder / "logind.conf" for folder in folders] + [drop_ins[name] for name in sorted(drop_ins)]


def parse_config(texts: List[str]) -> Tuple[Dict[str, str], Dict[str, str]]:
    """(what is set, what is shown as a comment) by name. The comments of the file that a distribution ships are the
    defaults that its logind was built with, and those differ."""
    settings: Dict[str, str] = {}
    shown: Dict[str, str] = {}
    for text in texts:
        for match in _SETTING.finditer(text):
            (shown if match["off"] else settings)[match["name"]] = match["value"]
    return settings, shown


def _enable_linger(user: str) -> bool:
    try:
        return run_command(["loginctl", "--no-ask-password", "enable-linger", user], LINGER_SECONDS).status == 0
    except ProbeFailed:
        return False


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
