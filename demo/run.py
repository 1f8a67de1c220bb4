"""The demo: from an untouched SGLang to verified hidden states and back. `python3 -m demo.run [--tp N]` (`make demo`).

Every command is fleetdump's own and goes over SSH to an sshd of the demo's. Ends with a table and
build/demo/report.json; the exit status is 0 when every bar is cleared.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo import leftovers
from demo.layout import PATIENCE, Layout, write_inventory
from demo.report import Report
from demo.sglang_cpu import recipe
from demo.sshd import SshdError, run_sshd
from demo.story import Story, StoryError, say, say_lines

RUN = "demo"
KILL_AT = 0.3
"""Share of the samples done at which the controller is killed."""
STALL_EXIT = 4


class Demo:
    """The journey's steps; each fills in its part of the report."""

    def __init__(self, layout: Layout, ranks: int):
        self.layout = layout
        self.ranks = ranks
        self.story = Story(layout)
        self.report = Report()
        self._sessions: set[int] = set()
        self._installed = leftovers.hash_site_packages()
        self._conversations = recipe.CONVERSATIONS.read_bytes().count(b"\n")

    def tell(self) -> None:
        """All steps in order."""
        self.check()
        self.healthy_start()
        self.stall()
        self.patched_start()
        self.extract()
        self.collect()
        self.compare()
        self.leave()

    def check(self) -> None:
        with self.story.step("check: would it work here?"):
            record = self.story.fleetdump("check")
            say_lines([f"{f['level']:8} {f['text']}" for f in record["data"]["findings"]])

    def healthy_start(self) -> None:
        with self.story.step("deploy as shipped, so that a healthy start is remembered"):
            server = self._deploy("--no-patch")
            self.report.healthy_log_lines = server["lines"]
            self.report.server_start_seconds = server["seconds"]

    def stall(self) -> None:
        with self.story.step("deploy a patch that makes the last rank hang after the weights"):
            arguments = ("--replace", "--patch", "stall-example", "--on-stall", "revert")
            server = self._deploy(*arguments, expect=STALL_EXIT)
            verdict = server["verdicts"][0]
            self.report.stalled_log_lines = server["lines"]
            self.report.stall_verdict = verdict["code"]
            self.report.stall_phase = verdict["phase"] or server["phase"]
            self.report.stall_rank = -1 if verdict["rank"] is None else verdict["rank"]
            self.report.stall_seconds_to_verdict = self._seconds_to_verdict(server)
            say_lines([verdict["title"], *verdict["evidence"][:8]])

    def patched_start(self) -> None:
        with self.story.step("deploy the hidden-states patch"):
            server = self._deploy("--replace", "--patch", "hidden-states")
            check = server["selfcheck"]
            say_lines(
                [f"self-check: {check['prompts']} prompts, log-probabilities within {check['max_logprob_diff']:.2g}"]
            )
        with self.story.step("diagnose the healthy server"):
            verdict = self.story.fleetdump("diagnose")["data"][0]["verdicts"][0]
            say_lines([verdict["title"]])
            if verdict["severity"] != "ok":
                raise StoryError(f"the healthy server was judged {verdict['code']}: {verdict['title']}")

    def extract(self) -> None:
        arguments = ("extract", "--data", str(recipe.CONVERSATIONS), "--run", RUN, "--runs-dir", str(self.layout.runs))
        with self.story.step(f"extract; the controller is killed with -9 at {KILL_AT:.0%}"):
            with self.story.start(*arguments) as command:
                while command.process.poll() is None and self._share_done() < KILL_AT:
                    time.sleep(0.05)
                done = self._share_done()
                if command.process.poll() is not None:
                    raise StoryError(
                        f"extract ended by itself, with {done:.0%} of the samples done\n{command.output()}"
                    )
                command.process.send_signal(signal.SIGKILL)
            self._note_sessions()
            say(f"  (controller killed with {done:.0%} of the samples done)")
        with self.story.step("extract again: it goes on"):
            self.story.fleetdump(*arguments)

    def collect(self) -> None:
        with self.story.step("collect manifests and shards, verified"):
            where = ("--runs-dir", str(self.layout.runs), "--to", str(self.layout.data))
            self.story.fleetdump("collect", "--run", RUN, "--data", *where)

    def compare(self) -> None:
        with self.story.step("compare with transformers, outside fleetdump's code"):
            found = reference_check(self.layout)
            self.report.samples, self.report.tokens = found["samples"], found["tokens"]
            self.report.lost, self.report.duplicated = len(found["lost"]), len(found["duplicated"])
            self.report.max_abs_err, self.report.max_rel_err = found["max_abs_err"], found["max_rel_err"]
            self.report.rows_excluded, self.report.bytes_written = found["rows_excluded"], found["bytes"]
            say_lines([f"{key}: {value}" for key, value in found.items()])
            wrong = found["wrong_ids"] + found["wrong_masks"]
            if wrong:
                raise StoryError(f"token ids or loss masks differ from transformers' in {', '.join(wrong[:5])}")

    def leave(self) -> None:
        with self.story.step("stop, revert, clean: nothing is left"):
            self._note_sessions()
            self.story.fleetdump("stop")
            self.story.fleetdump("revert")
            self.story.fleetdump("clean", "--data", "--runs-dir", str(self.layout.runs))
            left = leftovers.processes_of(self._sessions, self.layout.host) + leftovers.files_below(self.layout.host)
            changed = set(self._installed.items()) ^ set(leftovers.hash_site_packages().items())
            self.report.left_over, self.report.reverted = len(left), not changed
            say_lines([*left, *(f"changed: {name}" for name, _ in sorted(changed))])

    def _deploy(self, *arguments: str, expect: int = 0) -> dict[str, Any]:
        """Deploy; the one server's report."""
        record = self.story.fleetdump("deploy", *arguments, expect=expect)
        self._note_sessions()
        server: dict[str, Any] = record["data"]["servers"][0]
        say_lines([f"{server['outcome']} after {server['seconds']:.0f} s and {server['lines']} log lines"])
        return server

    def _note_sessions(self) -> None:
        self._sessions |= leftovers.launched_sessions(self.layout.state_dir)

    def _share_done(self) -> float:
        """Share of the conversations that the driver has committed, by its manifest."""
        manifests = self.layout.state_dir.glob(f"*/runs/{RUN}/*/manifest.jsonl")
        return sum(path.read_bytes().count(b"\n") for path in manifests) / self._conversations

    def _seconds_to_verdict(self, server: dict[str, Any]) -> float:
        """From the end of the phase's patience to the moment the watch had its evidence, by the host's own files."""
        folder = next(self.layout.state_dir.glob(f"*/servers/{server['server']}"))
        started = json.loads((folder / "server.json").read_text())["started_at"]
        events = [json.loads(line) for line in (folder / "timeline.jsonl").read_text().splitlines()]
        seen = next(event["t"] for event in reversed(events) if event["event"] == "outcome")
        usual = server["healthy"]["phase_seconds"].get(server["phase"], 0.0)
        patience = max(PATIENCE[server["phase"]], 2 * usual)  # stretched where healthy starts took long
        patience_over = started + server["seconds"] - server["idle_seconds"] + patience
        return round(float(seen - patience_over), 1)


def reference_check(layout: Layout) -> dict[str, Any]:
    """Run demo/reference_check.py by the SGLang venv's interpreter."""
    command = [
        str(recipe.PYTHON),
        str(Path(__file__).with_name("reference_check.py")),
        *("--manifest", str(layout.data / RUN / "manifest.jsonl"), "--data", str(layout.data / RUN)),
        *("--model", str(recipe.MODEL), "--conversations", str(recipe.CONVERSATIONS)),
    ]
    environment = {**os.environ, **recipe.server_env()}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise StoryError(f"the independent check failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def tidy(layout: Layout) -> None:
    """Leave nothing running and nothing patched, whatever happened; says what fleetdump itself could not do."""
    story = Story(layout)
    sessions = leftovers.launched_sessions(layout.state_dir)
    _attempt(story, "stop")
    leftovers.kill_sessions(sessions)
    _attempt(story, "revert")


def _attempt(story: Story, verb: str) -> None:
    try:
        story.fleetdump(verb)
    except StoryError as error:
        say(f"  {error}")


def begin_anew(layout: Layout) -> None:
    """Clear what an interrupted demo left."""
    patched = list((recipe.VENV / "lib").glob("python3*/site-packages/fleetdump-patch"))
    if patched or leftovers.launched_sessions(layout.state_dir):
        say("clearing what an earlier demo left")
        tidy(layout)
    for folder in (layout.host, layout.runs, layout.data, layout.logs):
        shutil.rmtree(folder, ignore_errors=True)


def run(layout: Layout, ranks: int) -> int:
    """The whole demo; its exit status."""
    layout.root.mkdir(parents=True, exist_ok=True)
    with run_sshd(layout.ssh) as sshd:
        write_inventory(layout, sshd, ranks)
        begin_anew(layout)
        demo = Demo(layout, ranks)
        try:
            demo.tell()
        except BaseException:
            say(f"\nThe demo was cut short; tidying up. Logs: {layout.logs} and {layout.state_dir}")
            tidy(layout)
            raise
    demo.report.write(layout.report)
    say(demo.report.table(demo.story.steps))
    missed = demo.report.missed(ranks)
    say_lines([f"MISSED: {text}" for text in missed] or [f"all bars cleared; {layout.report}"])
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tp", type=int, default=1, choices=(1, 2), help="tensor-parallel ranks (default 1)")
    ranks = parser.parse_args().tp
    if not (recipe.PYTHON.exists() and (recipe.MODEL / "config.json").exists()):
        say("The CPU build of SGLang or its model is missing: run `make setup` first.")
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # tidy up then, too
    try:
        return run(Layout(), ranks)
    except (StoryError, SshdError) as error:
        say(f"\nFAILED: {error}")
        return 1
    except KeyboardInterrupt:
        say("\ninterrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
