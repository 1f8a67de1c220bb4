"""Add what was recorded beside a case later on: NCCL RAS and native stacks, from the text files of a sample's folder.

Usage: python -m tests.cases.convert SAMPLE_FOLDER tests/cases/recorded/NAME.json
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.probes.ras import only, parse_ras
from fleetdump.agent.protocol import from_json, to_json

_THREAD = re.compile(r'^Thread (?P<tid>\d+|0x[0-9A-F]+) .*?"(?P<name>[^"]*)"|^Thread (?P<plain>\d+)')
_FRAME = re.compile(r"^\s{4}(?P<name>\S.*?)(?: \((?P<place>[^()]*)\))?$")


def main(folder: Path, case: Path) -> None:
    evidence = from_json(Evidence, json.loads(case.read_text()))
    evidence.ras = only(parse_ras((folder / "ras.txt").read_text()), [p.pid for p in evidence.processes])
    for stack in evidence.stacks:
        native = folder / f"pyspy_native_{stack.pid}.txt"
        stack.native = main_thread(native.read_text(), stack.pid) if native.exists() else []
    case.write_text(json.dumps(to_json(evidence), indent=1) + "\n")


def main_thread(text: str, pid: int) -> list[str]:
    """The main thread's frames in py-spy's own text."""
    frames: list[str] = []
    inside = False
    for line in text.splitlines():
        thread = _THREAD.match(line)
        if thread:
            inside = str(pid) in line.split()[1:2] or "MainThread" in line
            continue
        frame = _FRAME.match(line)
        if inside and frame:
            place = f" ({Path(frame['place']).name})" if frame["place"] else ""
            frames.append(frame["name"] + place)
    return frames[:24]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
