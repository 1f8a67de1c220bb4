"""The parts of ``bench.capture_overhead``: one server with three forwards, load on it, and its limits."""
