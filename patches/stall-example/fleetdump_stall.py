"""Makes a server hang while it starts, to show what fleetdump says about it.

Called by every rank after the weights are loaded and before the KV pool is allocated: the last tensor-parallel rank
never returns, so the others and the launcher wait for it, the port never opens and the log falls silent.
"""

from sglang.srt.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size


def stall_last_rank() -> None:
    """Spin for ever on the last rank; return at once on the others."""
    if get_tensor_model_parallel_rank() != get_tensor_model_parallel_world_size() - 1:
        return
    while True:
        pass
