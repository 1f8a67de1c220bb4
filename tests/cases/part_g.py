"""Part G, as far as it shows on the server: how it was started and what that start does to it."""

from __future__ import annotations

from cases import builder as b
from cases.table import HANGS, HEALTHY, case
from fleetdump.agent.evidence_process import PipeEnd
from fleetdump.agent.evidence_types import Evidence


@case("G1", "fabric/fabric#1815", first="IDLE_OK", also="CHANNEL_HELD", never=HANGS)
def standard_error_is_the_pipe_of_an_ssh_session() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.launcher(e).stderr = "pipe:[4400]"
    b.launcher(e).pipes.append(PipeEnd(2, 4400, "w", [900], peer_names=["sshd-session"]))
    return e


@case("G1 tee", "look-alike of fabric/fabric#1815", first="IDLE_OK", never=HANGS | {"CHANNEL_HELD"})
def standard_error_goes_to_a_pager() -> Evidence:
    e = b.server(2)
    b.serving(e)
    b.launcher(e).pipes.append(PipeEnd(2, 4400, "w", [900], peer_names=["tee"]))
    return e


def gone() -> Evidence:
    """It served, and no process is left; the log ends without an error, five minutes ago."""
    e = b.server(2)
    b.serving(e)
    b.dead(e)
    e.port.open = e.port.ours = False
    e.http, e.log.quiet_seconds = [], 300.0
    return e


@case("G2", "fabric/fabric#1158", first="PTY_SIGHUP", never=HEALTHY | {"OOM_KILLED", "LOGIND_KILL"})
def terminal_closed_and_hung_up_the_launcher() -> Evidence:
    e = gone()
    e.processes = [b.process(b.LAUNCHER, "launcher", ppid=1, state="Z", exit_signal=1)]
    return e


@case("G2 ended otherwise", "look-alike of fabric/fabric#1158", first="LAUNCHER_DIED", never=HEALTHY | {"PTY_SIGHUP"})
def launcher_was_terminated() -> Evidence:
    e = gone()
    e.processes = [b.process(b.LAUNCHER, "launcher", ppid=1, state="Z", exit_signal=15)]
    return e


@case("G11", "systemd/systemd#8486", first="LOGIND_KILL", never=HEALTHY | {"PTY_SIGHUP", "NOT_RUNNING"})
def manager_killed_the_scope_of_a_session() -> Evidence:
    e = gone()
    e.host.logins = [
        f"{e.taken_at - 301:.3f} systemd[1]: session-9.scope: Killing process 100 (python3) with signal SIGTERM.",
        f"{e.taken_at - 301:.3f} systemd-logind[600]: Removed session 9.",
    ]
    return e


@case(
    "G11 another session", "look-alike of systemd/systemd#8486", first="LAUNCHER_DIED", never=frozenset({"LOGIND_KILL"})
)
def session_of_an_hour_before() -> Evidence:
    e = gone()
    e.host.logins = [f"{e.taken_at - 3900:.3f} systemd-logind[600]: Removed session 8."]
    return e
