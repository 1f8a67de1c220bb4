"""The way to the hosts: ``connect`` to one, ``fan_out`` over many; a ``Host`` runs the agent's verbs."""

from fleetdump.fleet.fanout import Outcome, fan_out
from fleetdump.fleet.host import ConnectOptions, Host, connect

__all__ = ["ConnectOptions", "Host", "Outcome", "connect", "fan_out"]
