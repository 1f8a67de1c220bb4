"""Probes of a server that stand behind ``agent.evidence``: one subject a file, each read-only and bounded in time."""
