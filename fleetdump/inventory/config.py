"""What the inventory says about one host, complete and immutable."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleetdump.agent.specs import CaptureSpec, Patience, ServerSpec
from fleetdump.errors import UsageError
from fleetdump.suggest import did_you_mean

MOST_STARTS = 8
"""Servers of one host that may start at a time: each is watched in a session of its own, and OpenSSH allows ten on one
connection (MaxSessions)."""


@dataclass(frozen=True)
class CaptureConfig:
    """What to capture and where to; without ``layers`` and ``dir`` the host captures nothing.

    ``layers`` are as written, in the convention of ``layer_ids``: ``input`` j is the stream that enters layer j,
    ``output`` j the one that leaves it.
    """

    layers: tuple[int, ...] = ()
    layer_ids: str = "input"
    dir: str = ""
    shard_bytes: int = CaptureSpec.shard_bytes
    header_bytes: int = CaptureSpec.header_bytes
    idle_close_seconds: float = CaptureSpec.idle_close_seconds
    ring_bytes: int = CaptureSpec.ring_bytes
    device_bytes: int = CaptureSpec.device_bytes
    threads: int = CaptureSpec.threads
    fsync: str = CaptureSpec.fsync
    max_wait_seconds: float = CaptureSpec.max_wait_seconds

    def spec(self) -> CaptureSpec:
        """The same with entry ids, as the tap wants it. Raises ``UsageError`` when nothing is to be captured."""
        if not self.layers:
            raise UsageError(
                "the inventory does not say what to capture",
                why="this command needs capture.layers and capture.dir",
                next_step="add for instance capture: {layers: [3, 31, 59], layer_ids: input, dir: /nvme/hs}",
            )
        shift = 1 if self.layer_ids == "output" else 0
        return CaptureSpec(
            layers=[layer + shift for layer in self.layers],
            dir=self.dir,
            shard_bytes=self.shard_bytes,
            header_bytes=self.header_bytes,
            idle_close_seconds=self.idle_close_seconds,
            ring_bytes=self.ring_bytes,
            device_bytes=self.device_bytes,
            threads=self.threads,
            fsync=self.fsync,
            max_wait_seconds=self.max_wait_seconds,
        )


@dataclass(frozen=True)
class HostConfig:
    """One host with defaults, groups and its own settings applied.

    ``user``, ``port``, ``identity_file`` and ``proxy_jump`` are None where the inventory is silent: ssh_config decides.
    ``host_key`` is a pin (``SHA256:...``) or "". ``exec_prefix`` is put before the agent's command. ``python`` is the
    interpreter that imports sglang, ``agent_python`` any Python >= 3.8. ``connect_timeout`` is in seconds.
    ``parallel_starts`` of its servers start at a time. Secrets in ``servers`` are references; ``resolve_secrets``
    replaces them.
    """

    name: str
    address: str
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    proxy_jump: str | None = None
    host_key: str = ""
    connection: str = "ssh"
    exec_prefix: tuple[str, ...] = ()
    agent_python: str = "python3"
    python: str = ""
    state_dir: str = "~/.fleetdump"
    connect_timeout: float = 10.0
    parallel_starts: int = MOST_STARTS
    servers: tuple[ServerSpec, ...] = ()
    capture: CaptureConfig = CaptureConfig()
    patience: Patience = field(default_factory=Patience)
    groups: tuple[str, ...] = ()

    def server(self, name: str) -> ServerSpec:
        """The server called ``name``; raises ``UsageError`` naming the nearest one."""
        for server in self.servers:
            if server.name == name:
                return server
        raise UsageError(
            f"no server is called {name!r}{did_you_mean(name, (server.name for server in self.servers))}",
            self.name,
            next_step="give one of the host's servers in the inventory",
        )
