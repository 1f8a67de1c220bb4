"""The check of ``probe`` that compares a server's largest forward with the tap's buffers."""

from __future__ import annotations

from typing import Optional

from fleetdump.agent.checks_gpu import is_on_cpu
from fleetdump.agent.configfile import config_arguments
from fleetdump.agent.findings import Checked
from fleetdump.agent.forwardsize import judge, largest_forward, row_bytes
from fleetdump.agent.hostmessages import ProbeArgs
from fleetdump.agent.launchplan import environment_of
from fleetdump.agent.model import read_model
from fleetdump.agent.probes.bounded import ProbeFailed, run_command
from fleetdump.agent.protocol import AgentFailure, Finding
from fleetdump.agent.specs import ServerSpec


def check_forward(server: ServerSpec, args: ProbeArgs) -> Checked:
    """Whether the tap's buffers take the server's largest forward; nothing where the model does not tell."""
    try:
        model = read_model(server.model_path, needs_weights=False)
        argv = [*config_arguments(server, environment_of(server)), *server.args]
        forward = largest_forward(argv, server.dp, _gpu_mib(server))
    except AgentFailure:
        return Checked([])  # check_model and check_arguments say it
    except ValueError as error:
        return Checked(
            [Finding("forward", "blocker", f"a size in the server's args is no number: {error}", "correct it")]
        )
    row = row_bytes(server, model, len(args.layers) + 1)
    return Checked(judge(forward, row, args.device_bytes, args.ring_bytes) if row else [])


def _gpu_mib(server: ServerSpec) -> Optional[int]:
    """Memory of the smallest GPU; None on the CPU, 0 when nobody knows."""
    if is_on_cpu(server):
        return None
    try:
        output = run_command(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], 10.0)
        return min([int(line) for line in output.stdout.splitlines()], default=0)
    except (ProbeFailed, ValueError):
        return 0
