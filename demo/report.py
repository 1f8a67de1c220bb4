"""What the demo measured, the bars it must clear, and the table at its end."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

MIN_SAMPLES = 64
MAX_REL_ERR = 1e-4
MAX_EXCLUDED_SHARE = 1e-3
MAX_SECONDS_TO_VERDICT = 30.0


@dataclass
class Report:
    """build/demo/report.json. Errors are over all samples, layers and rows that were not excluded; ``max_rel_err`` is
    the error over the largest absolute value of its row. ``stall_seconds_to_verdict`` counts from the end of the
    phase's patience, ``left_over`` processes and files of ours after clean."""

    samples: int = 0
    tokens: int = 0
    lost: int = -1
    duplicated: int = -1
    max_abs_err: float = -1.0
    max_rel_err: float = -1.0
    rows_excluded: int = -1
    healthy_log_lines: int = 0
    stalled_log_lines: int = 0
    stall_verdict: str = ""
    stall_phase: str = ""
    stall_rank: int = -1
    stall_seconds_to_verdict: float = -1.0
    server_start_seconds: float = 0.0
    bytes_written: int = 0
    reverted: bool = False
    left_over: int = -1

    def missed(self, ranks: int) -> list[str]:
        """The bars that were missed, in words; empty when all is well."""
        bars = [
            (self.samples >= MIN_SAMPLES, f"samples {self.samples} < {MIN_SAMPLES}"),
            (self.lost == 0, f"{self.lost} samples lost"),
            (self.duplicated == 0, f"{self.duplicated} samples twice"),
            (0 <= self.max_rel_err <= MAX_REL_ERR, f"max_rel_err {self.max_rel_err:.2g} > {MAX_REL_ERR}"),
            (0 <= self.rows_excluded <= MAX_EXCLUDED_SHARE * self.tokens, f"{self.rows_excluded} rows excluded"),
            (bool(self.stall_verdict), "no verdict on the stall"),
            (self.stall_rank == ranks - 1, f"the stall was put on rank {self.stall_rank}, not {ranks - 1}"),
            (self.stall_phase == "kv_pool", f"the stall was put into phase {self.stall_phase!r}, not 'kv_pool'"),
            (
                0 <= self.stall_seconds_to_verdict <= MAX_SECONDS_TO_VERDICT,
                f"the verdict took {self.stall_seconds_to_verdict:.1f} s",
            ),
            (self.reverted, "the installed SGLang differs from what it was"),
            (self.left_over == 0, f"{self.left_over} processes or files of ours are left"),
        ]
        return [text for good, text in bars if not good]

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    def table(self, steps: list[tuple[str, float]]) -> str:
        """One screen: how long each step took, and what was measured."""
        lines = ["", "step                                                        seconds"]
        lines += [f"{name[:58]:58} {seconds:8.1f}" for name, seconds in steps]
        lines += [f"{'all':58} {sum(seconds for _, seconds in steps):8.1f}", ""]
        lines += [f"{name:26} {_short(value)}" for name, value in asdict(self).items()]
        return "\n".join(lines)


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
