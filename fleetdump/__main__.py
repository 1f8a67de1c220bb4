"""``fleetdump`` and ``python -m fleetdump``: an interrupt ends quietly even while the modules are being imported."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the console script."""
    try:
        from fleetdump.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
