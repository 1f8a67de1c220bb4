"""Messages about a patch: its state, apply, revert. Shared with the controller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List

from fleetdump.agent.specs import PatchSpec


@dataclass
class PatchState:
    """State of the patched modules of one engine install. ``state``: clean, ours, other (a patch of another name or
    version of ours), unknown (edited by somebody else) or absent (the engine or a module is missing)."""

    state: str
    patch: str = ""
    version: str = ""
    sha256: str = ""
    files: List[str] = field(default_factory=list)
    detail: str = ""


@dataclass
class PatchArgs:
    """Apply (or only plan) a patch to the engine that ``python`` imports with ``env`` set. Applying twice changes
    nothing. ``force``: a file that somebody else edited is taken as it is, and one that was edited after our patch is
    put aside in the state directory. ``delivery`` import-hook is planned only: ``launch`` delivers it."""

    python: str
    patch: PatchSpec
    dry_run: bool = False
    env: Dict[str, str] = field(default_factory=dict)
    """As in ``Interpreter``."""
    force: bool = False
    delivery: str = "in-place"
    models: List[str] = field(default_factory=list)
    """Model directories of the servers that import this engine: only the modules that they run are patched. Empty,
    or a model that has no directory here: every module of the patch."""


@dataclass
class PatchResult:
    """``untested`` are the modules or files that no test has run on this release: the self-check then decides."""

    before: PatchState
    after: PatchState
    changed: bool
    engine: str
    untested: List[str]
    diff: str = ""
    kept: List[str] = field(default_factory=list)
    """Copies of files that ``force`` overwrote."""
    guessed: bool = False
    """No config.json said what the models run, so the patch is for all modules of the release."""
    delivery: str = "in-place"

    @property
    def verified(self) -> bool:
        return not self.untested

    @property
    def doubts(self) -> str:
        """What no test has run, in words; empty when all of it was."""
        if self.verified:
            return ""
        text = f"no test has run it on {self.engine} in {', '.join(self.untested)}"
        return (
            f"{text} (no config.json says which model is served, so the files of all count)" if self.guessed else text
        )


@dataclass
class RevertArgs:
    """Restore the engine that ``python`` imports with ``env`` set, byte for byte; refused while a server that was
    started since the patch runs there, another state directory's too. ``force``: files that were edited
    after our patch are put aside in the state directory and restored too."""

    python: str
    env: Dict[str, str] = field(default_factory=dict)
    """As in ``Interpreter``."""
    force: bool = False


@dataclass
class RevertResult:
    """``changed`` is False when there was nothing of ours; ``verified`` lists files whose hash equals the original."""

    changed: bool
    before: PatchState
    after: PatchState
    verified: List[str] = field(default_factory=list)
