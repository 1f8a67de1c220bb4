"""What the server says of itself, its log and its port: phase, health, silence."""

from __future__ import annotations

import math
import re
from functools import cached_property

from fleetdump.agent.evidence_engine import HttpProbe
from fleetdump.agent.evidence_types import Evidence
from fleetdump.agent.specs import PHASES
from fleetdump.diagnosis import vllm
from fleetdump.diagnosis.words import asked

SILENCE_OF = {"init": 120.0, "serving": 60.0}
"""Where more is usual: a communicator of 8 GPUs was seen to take 62 s, and a batch of long prompts takes a minute."""
STARVED_LINES = 2
FIRST_CLIENT_ERROR, FIRST_SERVER_ERROR = 400, 500
ENGINE_WAITS_TOLD = 60.0
"""Seconds that vLLM's engine waits until it says so, each time."""
ENGINE_WAITS_EVERY = 90.0
"""Seconds after which what vLLM's engine says every minute, while it waits for its workers, is old."""
USUAL_LINE = 100
"""Bytes of a log line, where the repeated one is not known."""
SILENCE = 30.0
"""Seconds of silence below which nobody says "hung" when no patience is given."""
_REQUEST = re.compile(r"/(?:generate|encode|classify|completions|embeddings|rerank|score|responses|messages)$")
"""Endpoints that need the engine; all others (status, models, metrics) the HTTP server answers by itself."""
_ENGINE_WAITS = re.compile(r"\(EngineCore.*[Nn]o available (?:shared memory broadcast )?block")
"""Said by the engine core once a minute; a worker that has nothing to do says it too."""
_ACCESS = re.compile(r'"(?:GET|POST|HEAD|OPTIONS) /')
_BAR = re.compile(r"(?P<done>\d+)/(?P<total>\d+) \[(?P<spent>[\d:?]+)<(?P<left>[\d:?]+)")


class Answers:
    """An index over one ``Evidence``; nothing here changes it."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence

    @cached_property
    def is_vllm(self) -> bool:
        """The server is vLLM's, which opens its port when its engine is ready and has no request of its own."""
        return vllm.is_vllm(self.evidence)

    @property
    def phase(self) -> str:
        """The phase of the server as a whole."""
        if self.healthy or (self.is_vllm and self.port_open):
            return "serving"
        return self.evidence.log.phase or PHASES[0]

    @property
    def port_open(self) -> bool:
        """The server listens. An owner that this user may not see is taken for it once its log says that it listens,
        and so is a port that could not be looked at once its log says that it is ready."""
        port, log = self.evidence.port, self.evidence.log
        if any(probe.name == "port" and not probe.ok for probe in self.evidence.probes):
            return self.evidence.launcher_alive and log.ready
        hidden = not port.owner_pid and self.evidence.launcher_alive and "port_in_use" not in log.troubles
        told = log.ready or not log.exists or log.phase in ("http", "warmup", "serving")
        return port.open and (port.ours or port.owner_pid == self.evidence.target.pid or (hidden and told))

    @property
    def port_taken(self) -> bool:
        """Somebody else listens on the server's port."""
        port = self.evidence.port
        own = port.ours or port.owner_pid in {self.evidence.target.pid, *(p.pid for p in self.evidence.processes)} - {0}
        return port.open and not own and (port.owner_pid > 0 or "port_in_use" in self.evidence.log.troubles)

    def answer(self, prefix: str) -> HttpProbe | None:
        """The probe of ``/health`` or ``/model_info``."""
        return next((h for h in self.evidence.http if h.path.endswith(prefix)), None)

    @property
    def was_ready(self) -> bool:
        """It has served: its log says so or counts tokens; without a log an open port is taken for that."""
        log = self.evidence.log
        served = not log.exists or bool(log.forwards or log.zero_statistics)
        return log.ready or (self.port_open and (served or self.is_vllm))

    @property
    def healthy(self) -> bool:
        health = self.answer("/health")
        answers = self.port_open and health is not None and health.status == 200
        return answers and not self.starved and not self.unserved

    @property
    def failed_requests(self) -> list[HttpProbe]:
        """Requests for tokens that were not answered, or ended in an error of the server's."""
        asked = (h for h in self.evidence.http if _REQUEST.search(h.path))
        return [h for h in asked if h.status >= FIRST_SERVER_ERROR or not h.status]

    @property
    def unserved(self) -> list[str]:
        """What contradicts an answer of ``/health``: a request that failed, or requests that run while vLLM's log is
        silent, which tells every ten seconds what they get, or an engine whose last word is that its workers
        do not come. Its ``/health`` says only that the API lives."""
        found = [asked(h) for h in self.failed_requests]
        quiet, allowed = self.silence_in("serving")
        running = self.evidence.log.running_requests
        if self.is_vllm and running and not self.forwards and quiet >= allowed:
            found.append(f"{running} requests run by its log, which has said nothing new for {quiet:.0f} s")
        last = self.evidence.log.tail[-1] if self.evidence.log.tail else ""
        if self.is_vllm and _ENGINE_WAITS.search(last) and self.evidence.log.quiet_seconds < ENGINE_WAITS_EVERY:
            found.append(f"its engine waits for its workers: {last.strip()[:100]}")
        return found

    @property
    def starved(self) -> bool:
        """The engine's own statistics say that requests are there and no token comes, whatever ``/health`` says."""
        return self.evidence.log.zero_statistics >= STARVED_LINES

    @property
    def forwards(self) -> int:
        """Batches logged between the samples that computed something."""
        return 0 if self.starved else self.evidence.log.forwards

    def trouble(self, name: str) -> str:
        """The first log line of a known trouble; empty when there is none."""
        return self.evidence.log.troubles.get(name, "")

    @cached_property
    def silence(self) -> tuple[float, float]:
        """Seconds without progress as far as anybody knows, and the seconds that are allowed."""
        return self.silence_in(self.phase)

    def silence_in(self, phase: str) -> tuple[float, float]:
        """The same, were the server in that phase."""
        watch, log = self.evidence.watch, self.evidence.log
        if watch and watch.patience:
            return watch.idle_seconds, watch.patience
        # A log that did not grow between the samples is at least that old: less means that nobody looked.
        known = log.exists and (log.growth or log.quiet_seconds >= self.evidence.seconds)
        quiet = log.quiet_seconds if known else self.evidence.uptime or math.inf
        quiet += self._waits_told * ENGINE_WAITS_TOLD
        if log.news_seconds:
            quiet = max(quiet, log.news_seconds)
        elif log.growth and log.repeated and not log.news:
            lines = max(1.0, log.growth / max(len(log.repeated_line), USUAL_LINE))
            quiet = max(quiet, min(self.evidence.uptime, log.repeated * self.evidence.seconds / lines))
        usual = SILENCE_OF.get(phase, SILENCE)
        given = getattr(watch.patiences, phase, usual) if watch and watch.patiences else usual
        return quiet, given

    @property
    def _waits_told(self) -> int:
        """How often in a row, up to now, vLLM's engine has said that its workers do not come; requests that are logged
        meanwhile do not count."""
        if not self.is_vllm:
            return 0
        lines = [line for line in self.evidence.log.tail if not _ACCESS.search(line)]
        return next((n for n, line in enumerate(reversed(lines)) if not _ENGINE_WAITS.search(line)), len(lines))

    @property
    def within_patience(self) -> bool:
        quiet, allowed = self.silence
        return quiet < allowed

    @cached_property
    def bar(self) -> str:
        """The last progress bar, for instance "3/14, 00:40 left"; empty when there is none."""
        for line in reversed(self.evidence.log.tail):
            matches = list(_BAR.finditer(line))
            if matches:
                last = matches[-1]
                left = "" if "?" in last["left"] else f", {last['left']} left by its own estimate"
                return f"{last['done']} of {last['total']}{left}"
        return ""

    @property
    def bar_is_full(self) -> bool:
        done, _, total = self.bar.partition(",")[0].partition(" of ")
        return bool(total) and done == total
