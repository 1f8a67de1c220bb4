"""The ``fleetdump`` command: the group, and the one place where errors become words and exit codes."""

from __future__ import annotations

import io
import sys

import click

from fleetdump import __version__
from fleetdump.cli._interrupt import NOTHING, say_and_leave
from fleetdump.cli.audit import audit
from fleetdump.cli.check import check
from fleetdump.cli.clean import clean
from fleetdump.cli.collect import collect
from fleetdump.cli.deploy import deploy
from fleetdump.cli.diagnose import diagnose
from fleetdump.cli.extract import extract
from fleetdump.cli.init import init
from fleetdump.cli.logs import logs
from fleetdump.cli.patches import patches
from fleetdump.cli.plan import plan
from fleetdump.cli.restart import restart
from fleetdump.cli.revert import revert
from fleetdump.cli.runcontrol import attach, cancel, drain, pause, resume
from fleetdump.cli.selfcheck import selfcheck
from fleetdump.cli.status import status
from fleetdump.cli.stop import stop
from fleetdump.cli.unlock import unlock
from fleetdump.cli.verify import verify
from fleetdump.cli.watch import watch
from fleetdump.errors import ExitCode, FleetdumpError, of_local_file
from fleetdump.views.console import print_error


class _Ordered(click.Group):
    """Commands in the order of the journey, not of the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(self.commands)


@click.group(cls=_Ordered, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="fleetdump")
def cli() -> None:
    """Turn GPU hosts running SGLang into a fleet that writes hidden states.

    \b
    The journey:
      fleetdump init gpu01 gpu02        write a commented inventory.yaml
      fleetdump check                   would it work? nothing is changed
      fleetdump deploy                  patch, launch, watch, self-check
      fleetdump status, watch, logs     what runs; diagnose names the cause of a hang
      fleetdump plan --data d.jsonl     samples, tokens, disk and hours
      fleetdump extract --data d.jsonl  run a data set through the fleet
      fleetdump collect --data          bring manifests and shards home, verified
      fleetdump stop, revert, clean     leave nothing behind
      fleetdump patches                 what can be patched, and a dry run of your own

    \b
    Exit codes: 0 all well, 1 some hosts failed or a server is dead, 2 wrong usage or inventory,
    3 some unreachable, 4 a living server stalls, 5 locked, 130 interrupted.
    """


for _command in (
    init,
    check,
    deploy,
    selfcheck,
    status,
    watch,
    logs,
    diagnose,
    plan,
    extract,
    attach,
    pause,
    drain,
    resume,
    cancel,
    verify,
    collect,
    restart,
    stop,
    revert,
    clean,
    patches,
    audit,
    unlock,
):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; ends the process with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what this locale cannot show is no reason to fail
    try:
        cli.main(standalone_mode=False)
    except FleetdumpError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        say_and_leave(NOTHING)  # what does something there says itself how far it came
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(ExitCode.FAILED)
    except OSError as error:
        print_error(of_local_file(error))
        sys.exit(ExitCode.FAILED)
