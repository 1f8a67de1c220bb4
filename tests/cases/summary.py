"""Pass pytest's output through and end it with one line: ``N passed, M failed``. Exits 1 when anything failed."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable


def main(before_summary: Callable[[], None] = lambda: None) -> int:
    last = ""
    for line in sys.stdin:
        print(line, end="")
        last = line if re.search(r"\b(passed|failed|errors?)\b.* in [\d.]+s", line) else last
    counts = {word.rstrip("s"): int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)\b", last)}
    passed, failed = counts.get("passed", 0), counts.get("failed", 0) + counts.get("error", 0)
    before_summary()
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    raise SystemExit(main())
