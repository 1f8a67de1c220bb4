"""The checks behind ``probe`` of what a server listens on, and of proxies that would come between."""

from __future__ import annotations

import ipaddress
import os

from fleetdump.agent import engine, procfs
from fleetdump.agent.context import State
from fleetdump.agent.edit import release_within
from fleetdump.agent.findings import Checked
from fleetdump.agent.launchplan import environment_of
from fleetdump.agent.neighbours import describe_port_owner
from fleetdump.agent.probes.net import ANY_ADDRESS
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.scrub import proxy_address
from fleetdump.agent.server import living, readable_records
from fleetdump.agent.specs import ServerSpec

PROXIES = ("http_proxy", "all_proxy")
"""Where SGLang sends its warm-up when it listens on all addresses."""
GRPC_PORT = "SGLANG_GRPC_PORT"
GRPC_RELEASES = ("0.5.11", "0.5.15")
"""First and last that want a valid port for gRPC even where nobody asked for gRPC; the others refuse no HTTP port."""
GRPC_OFFSET = 10000
LAST_PORT = 65535


def check_port(server: ServerSpec, state: State) -> Checked:
    """The server's port is free, or held by that server of ours; another one of ours can be replaced."""
    owner = procfs.port_owner(server.port)
    if owner is None:
        return Checked([Finding("port", "ok", f"port {server.port} is free")])
    for record in readable_records(state)[0]:
        if owner.pid in {member.pid for member in living(record)}:
            text = f"port {server.port} is held by our server {record.name}"
            if record.name == server.name:
                return Checked([Finding("port", "ok", text)])
            return Checked([Finding("port", "warning", text, "fleetdump deploy --replace stops it first")])
    text = f"port {server.port} is taken: {describe_port_owner(owner)}"
    return Checked([Finding("port", "blocker", text, "stop that process, or choose another `port` in the inventory")])


def check_grpc_port(server: ServerSpec) -> Checked:
    """A port whose gRPC neighbour (10000 above it, unless the environment names another) is none ends these releases
    at once."""
    env = environment_of(server)
    given = env.get(GRPC_PORT, "")
    port = int(given) if given.isdigit() else server.port + GRPC_OFFSET
    if 1 <= port <= LAST_PORT:
        return Checked([])
    try:
        release = engine.query(server.python, env=env).release
    except AgentFailure:
        return Checked([])  # check_engine says it
    if not release_within(release, *GRPC_RELEASES):
        return Checked([])
    source = f"{GRPC_PORT} of its environment" if given else f"port {server.port} + {GRPC_OFFSET}"
    text = f"server {server.name} would end at its start: sglang {release} takes {source} for gRPC, which is {port}"
    if given:
        fix = f"give {GRPC_PORT} a free port of 1 to {LAST_PORT} in the server's `env`, or leave it out"
    else:
        highest = LAST_PORT - GRPC_OFFSET
        fix = f"choose a `port` of at most {highest}, or add {GRPC_PORT}: {highest} to the server's `env`"
    return Checked([Finding("port", "blocker", text, fix)])


def check_proxy(server: ServerSpec) -> Checked:
    """A proxy that is not switched off for loopback catches SGLang's own warm-up request."""
    env = {name.lower(): value for name, value in {**os.environ, **server.env}.items()}
    used = [name for name in PROXIES if env.get(name)]
    target = ANY_ADDRESS.get(server.host, server.host)
    if not used or any(_exempts(entry.strip(), target) for entry in env.get("no_proxy", "").split(",")):
        return Checked([])
    text = (
        f"{used[0]} is set ({proxy_address(env[used[0]])}) and no_proxy does not name {target}: the"
        " server's own warm-up request would go to the proxy"
    )
    return Checked(
        [Finding("proxy", "warning", text, f"add NO_PROXY: {target} to the server's `env` in the inventory")]
    )


def _exempts(entry: str, target: str) -> bool:
    """Whether requests, which the warm-up uses, leaves the proxy out for ``target`` by this entry."""
    if entry in ("*", target):
        return True
    try:
        return "/" in entry and ipaddress.ip_address(target) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False
