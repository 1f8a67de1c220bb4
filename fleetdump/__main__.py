"""``python -m fleetdump``."""

from fleetdump.cli.main import main

main()
