"""``fleetdump diagnose``."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click

from fleetdump.agent.evidence_files import write_files
from fleetdump.agent.evidence_types import EVIDENCE_VERSION, Evidence
from fleetdump.agent.protocol import ProtocolError, from_json, to_json
from fleetdump.cli._fleet import FleetOptions, Report, Seconds, ServerName, Verb, fleet_options, run
from fleetdump.diagnosis import STALL
from fleetdump.diagnosis import diagnose as decide
from fleetdump.errors import ExitCode, UsageError
from fleetdump.fleet import Outcome
from fleetdump.inventory import HostConfig
from fleetdump.tasks.server import Diagnosis, Target, diagnose_host, masked
from fleetdump.views.verdicts import show_diagnoses, show_heard, show_markdown


@click.command(short_help="Name the cause of a hang, from evidence.")
@click.option("--server", type=ServerName(), default="", help="One of our servers; default: each server of the host.")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Any server that listens on this port.")
@click.option("--pid", type=click.IntRange(1), default=None, help="Any server by its launcher's pid.")
@click.option("--seconds", type=Seconds(1, 600), default=10.0, show_default=True, help="Between two samples.")
@click.option("--deep", is_flag=True, help="Take strace and stacks even when the samples show progress.")
@click.option("--save", type=click.Path(path_type=Path), default=None, help="Write the evidence below this folder.")
@click.option("--bundle", type=click.Path(path_type=Path, exists=True), default=None, help="Judge saved evidence.")
@click.option(
    "--anonymise",
    is_flag=True,
    help="Mask user names, addresses and hosts (host-1, host-2 in their order) in what is shown and saved.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown for a bug report.")
@fleet_options
def diagnose(
    options: FleetOptions,
    server: str,
    port: int | None,
    pid: int | None,
    seconds: float,
    deep: bool,
    save: Path | None,
    bundle: Path | None,
    anonymise: bool,
    as_markdown: bool,
) -> None:
    """Collect evidence of a server and say what it waits for. Nothing is signalled, nothing changed.

    Exit code 4 when a living server stalls, 1 when it is dead, 0 when it is healthy, idle, busy, or was stopped by us.

    \b
    Examples:
      fleetdump diagnose --host gpu01 --seconds 5
      fleetdump diagnose --host 10.1.230.174 --port 30000 --deep
      fleetdump diagnose --bundle evidence/gpu01 --anonymise --markdown
    """
    if sum(bool(choice) for choice in (server, port, pid)) > 1:
        raise click.UsageError("--server, --port and --pid exclude each other")
    if bundle is not None:
        _judge_bundle(options, bundle, anonymise, as_markdown)
        return
    target = Target(server, port or 0, pid or 0, seconds, deep)

    def work(host: Any) -> list[Diagnosis]:
        diagnoses = diagnose_host(host, target)
        if anonymise:
            diagnoses = [masked(diagnosis) for diagnosis in diagnoses]
        if save is not None:
            for diagnosis in diagnoses:
                _save(save / host.config.name / diagnosis.server.replace(" ", "-"), diagnosis)
        return diagnoses

    run(_Nameless.like(options) if anonymise else options, _verb(as_markdown), work)


class _Nameless(FleetOptions):
    """The same hosts under numbers, wherever they are shown or saved."""

    @classmethod
    def like(cls, options: FleetOptions) -> _Nameless:
        return cls(**{field.name: getattr(options, field.name) for field in fields(options)})

    def select(self, read_only: bool) -> list[HostConfig]:
        """The hosts that the options name, called host-1, host-2, … in their order."""
        return [replace(config, name=f"host-{n}") for n, config in enumerate(super().select(read_only), 1)]


def _verb(as_markdown: bool) -> Verb:
    if as_markdown:
        return Verb("diagnose", show_markdown, code=_code, data=_data, read_only=True, deadline=900.0)
    return Verb("diagnose", show_heard, show_diagnoses, code=_code, data=_data, read_only=True, deadline=900.0)


def _code(diagnoses: list[Diagnosis]) -> ExitCode:
    """As deploy and status say it: a server that lives and does not go on is a stall, a dead one has failed."""
    ill = [d for d in diagnoses if d.verdicts and d.verdicts[0].severity == STALL]
    if any(d.evidence.get("launcher_alive", True) for d in ill):
        return ExitCode.STALL
    return ExitCode.FAILED if ill else ExitCode.OK


def _data(diagnoses: list[Diagnosis]) -> list[Any]:
    """The evidence itself is in the bundle; a line of JSON should stay readable."""
    return [{"server": d.server, "verdicts": to_json(d.verdicts), "evidence_dir": d.evidence_dir} for d in diagnoses]


def _save(folder: Path, diagnosis: Diagnosis) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_files(from_json(Evidence, diagnosis.evidence), folder)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is not a number that evidence has")


def _load(path: Path) -> Evidence:
    step = "give the folder that diagnose --save wrote, or one written as docs/evidence.md says"
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
        version = data.get("v", EVIDENCE_VERSION) if isinstance(data, dict) else None
        if version != EVIDENCE_VERSION:
            raise ProtocolError(f"its schema is version {version}, this fleetdump reads version {EVIDENCE_VERSION}")
        return from_json(Evidence, data)
    except (OSError, ValueError, ProtocolError, RecursionError) as error:
        raise UsageError("not an evidence bundle that can be read", str(path), str(error), step) from error


def _in_folder(bundle: Path) -> Path:
    """The evidence in a folder, or below it where ``--save`` wrote it: ``<host>/<server>/``."""
    if not bundle.is_dir() or (bundle / "evidence.json").exists():
        return bundle / "evidence.json" if bundle.is_dir() else bundle
    found = sorted(bundle.rglob("evidence.json"))
    if len(found) == 1:
        return found[0]
    why = f"there are {len(found)} below it: {', '.join(str(file.parent) for file in found)}" if found else ""
    raise UsageError("no evidence.json in that folder", str(bundle), why, "give the folder of one server")


def _judge_bundle(options: FleetOptions, bundle: Path, anonymise: bool, as_markdown: bool) -> None:
    evidence = _load(_in_folder(bundle))
    try:
        verdicts = decide(evidence)
    except OverflowError as error:
        raise UsageError("the bundle has a number that nothing has", str(bundle), str(error)) from error
    diagnosis = Diagnosis(evidence.target.server or bundle.name, verdicts, "", to_json(evidence))
    diagnosis = masked(diagnosis) if anonymise else diagnosis
    report = Report(options, _verb(as_markdown))
    report.add("bundle", Outcome([diagnosis], None, 0.0))
    raise SystemExit(report.close())
