"""What moves: bytes, memory, GPUs, compilers and cores between the two samples, and what a short host makes slow."""

from __future__ import annotations

import re
from functools import cached_property

from fleetdump.agent.evidence_host import GpuFacts
from fleetdump.agent.evidence_process import ProcessFacts
from fleetdump.diagnosis.members import Members
from fleetdump.diagnosis.words import size

RCHAR_RATE = 512 << 10
READ_RATE = 64 << 10
RSS_RATE = 1 << 20
"""Bytes a second and process that count as progress, as in ``agent.progress``: an idle scheduler reads up to 100 kB/s
through event descriptors."""
GPU_MEMORY_RATE = 8
"""MiB a second, while weights are loaded; in other phases what grows may be a leak of something tried again."""
LOAD_RATE = 1 << 20
"""Bytes a second of all ranks together that count as loading weights."""
COMPILER_CPU = 0.05
SPIN_CPU = 0.85
"""Share of a core that a spinning main thread uses, or asks for on a crowded host."""
BLOCKED_CPU = 0.05
CROWDED_CPU = 0.01
"""What a spin gets of a core at least that it shares with dozens of others; it wants all of it."""
WORK_POWER = 0.6
"""Share of its limit from which a fully used GPU computes: waiting kernels were seen at a fifth, a light load at a
third."""
WORK_SECONDS = 600.0
"""How long full power alone is believed: no batch takes longer, a computing kernel without end might."""
HALF_POWER_SECONDS = 300.0
LOW_POWER = 0.45
"""Share of its limit below which a fully used GPU only waits in a kernel."""
FULL_USE = 90
FEW_PERIODS = 10
THROTTLED = 0.5
CROWDED = 4
"""Share of scheduling periods, and tasks that want a core for each core, from which CPU time is short."""
BULK_RATE = 20 << 20
"""Bytes a second from a disk that no cache of a standing server reads."""
LOADED_MIB = 4096
FAULTS = 5.0
"""Major page faults a second that show a mapped file being read, however slowly."""
PRESSURE = 5.0
"""Percent of time in which all work waited for memory."""
_TAKES_MEMORY = re.compile(
    r"clear_huge_page|clear_page|folio_zero|prep_new_page|do_anonymous_page|do_huge_pmd|hugetlb_fault|alloc_pages|"
    r"pin_user_pages|gup_longterm|faultin_page|populate_vma|os_lock_user_pages|nv_alloc_\w*pages|shmem_(?:get|alloc)_folio"
)
"""Kernel functions that get pages, clear them and pin them."""
_IN_KERNEL, _KERNEL_ALONE = 0.3, 0.1
"""Shares of user time below which a busy thread works in the kernel, and does nothing else: a wait for a GPU, or one
that yields its core, has more."""
MANY_CORES = 5.0
"""Cores that a rank uses beside its main thread only for work; one that hung was seen to use two."""


class Movement(Members):
    """Adds what moved, and by what it is measured."""

    @cached_property
    def gpus(self) -> list[GpuFacts]:
        """The server's own GPUs, by index: those that its processes are on; else, where the host has more than ranks,
        those with as much memory in use as only a loaded model has, if there are just as many; else all."""
        known = sorted(self.evidence.gpus, key=lambda g: g.index)
        own = [g for g in known if any(p.ours for p in g.processes)]
        loaded = [g for g in known if g.memory_used >= LOADED_MIB]
        if own:
            return own
        return loaded if len(known) > len(self.schedulers) == len(loaded) else known

    def gpu_of(self, process: ProcessFacts) -> GpuFacts | None:
        """A rank's GPU: the one its process is on, else the one in its place among this host's ranks."""
        named = next((g for g in self.gpus if any(p.pid == process.pid for p in g.processes)), None)
        place = (process.rank or 0) - self.local_ranks.start
        counted = len(self.gpus) == len(self.schedulers) and 0 <= place < len(self.gpus)
        return named or (self.gpus[place] if counted else None)

    @property
    def gpus_wait(self) -> bool:
        """Every GPU of the server is fully used at little power: it waits in a kernel."""
        return bool(self.gpus) and all(
            g.utilization >= FULL_USE and (not g.power_limit or g.power < LOW_POWER * g.power_limit) for g in self.gpus
        )

    @property
    def gpus_work(self) -> list[GpuFacts]:
        """GPUs that compute for it: fully used, at a power that no waiting kernel draws, and mostly its own. Half of
        the limit is believed for less long: a kernel without end may draw it."""
        share = LOW_POWER if self.silence[0] < HALF_POWER_SECONDS else WORK_POWER
        busy = [g for g in self.gpus if g.utilization >= FULL_USE and g.power_limit and _is_its_own(g)]
        return [g for g in busy if g.power >= share * g.power_limit]

    @cached_property
    def cpu_short(self) -> list[str]:
        """Why its threads wait for CPU time; empty when they don't."""
        group, cpus = self.evidence.cgroup, self.evidence.cpus
        throttled = group.periods >= FEW_PERIODS and group.throttled >= THROTTLED * group.periods
        facts = (
            [f"its control group was throttled in {group.throttled} of {group.periods} periods"] if throttled else []
        )
        crowded = cpus.cores > 0 and cpus.running >= CROWDED * cpus.cores
        return facts + ([f"{cpus.running} tasks want to run on {cpus.cores} cores"] if crowded else [])

    @cached_property
    def imports_slowly(self) -> list[ProcessFacts]:
        """Processes that work at their imports with as little CPU time as they get. Whoever imports reads files and
        grows; one that does neither may spin, where the log that would tell its phase cannot be read."""
        if not self.cpu_short or self.phase != "imports" or self.evidence.log.ranks:
            return []
        working = [p for p in self.members if p.main and p.main.demand >= SPIN_CPU and p.main.cpu >= CROWDED_CPU]
        return [p for p in working if p.rchar_delta > 0 or p.rss_delta > 0]

    @cached_property
    def disk_rate(self) -> float:
        """Bytes a second that the schedulers read from disks."""
        return sum(p.read_bytes_delta for p in self.schedulers) / max(self.evidence.seconds, 0.001)

    @cached_property
    def read_rate(self) -> float:
        """Bytes a second that the schedulers read, from disk or cache."""
        total = sum(max(p.rchar_delta, p.read_bytes_delta) for p in self.schedulers)
        return total / max(self.evidence.seconds, 0.001)

    @cached_property
    def compilers(self) -> list[ProcessFacts]:
        """Living compiler children that use CPU; torch inductor's pool of workers sleeps until it has work."""
        roles = ("compiler", "compile_worker")
        return [p for p in self.evidence.processes if p.role in roles and p.cpu > COMPILER_CPU]

    @cached_property
    def progress(self) -> list[str]:
        """What counts as progress between the samples, in words; empty: nothing moved."""
        found, log = [], self.evidence.log
        if self.forwards:
            found.append(f"{log.forwards} batches were logged between the samples")
        elif log.news and not self.starved:
            found.append(f"the log has {log.news} new lines that are no repetition")
        seconds = self.evidence.seconds
        # Once it serves, what the launcher reads (a module, a certificate) is no work of the engine.
        working = self.schedulers if self.port_open else self.members
        for process in working:
            name = process.label or process.role
            if process.rchar_delta > RCHAR_RATE * seconds or process.read_bytes_delta > READ_RATE * seconds:
                read = max(process.rchar_delta, process.read_bytes_delta)
                found.append(f"{name} read {size(read)} in {seconds:.0f} s")
            if self.pages_in(process) and not self.port_open:
                found.append(f"{name} had {process.majflt_delta} major page faults in {seconds:.0f} s")
            if process.rss_delta > RSS_RATE * seconds:
                found.append(f"{name} grew by {size(process.rss_delta)} of memory")
        if self.silence[0] < WORK_SECONDS and not self.port_open:
            found += [f"{p.label} fills memory: its main thread is busy in the kernel" for p in self.takes_memory]
        if self.silence[0] < WORK_SECONDS and not self.was_ready:
            found += [f"{p.label} computes on {p.cpu:.0f} cores" for p in self.schedulers if _uses_many_cores(p)]
            found += [f"{p.label or p.role} imports, as fast as it gets CPU time" for p in self.imports_slowly]
        found += [
            f"GPU {g.index}: {g.memory_delta} MiB more memory in use"
            for g in self.gpus
            if g.memory_delta >= GPU_MEMORY_RATE * seconds and self.phase == "weights"
        ]
        if self.silence[0] < WORK_SECONDS and not self.schedulers:
            found += [
                f"process {p.pid}, not named yet, uses {p.cpu:.0%} of a core"
                for p in self.unnamed
                if p.cpu > BLOCKED_CPU
            ]
        if self.silence[0] < WORK_SECONDS:
            found += [f"GPU {g.index} computes: {g.utilization} % at {g.power:.0f} W" for g in self.gpus_work]
        return found

    @cached_property
    def takes_memory(self) -> list[ProcessFacts]:
        """Ranks that fill memory, as a pool on the host of hundreds of gigabytes is made, pinned and registered: busy
        in the kernel and growing, or in the kernel's own code for that (what the GPU driver allocates is not counted as
        theirs), or in the kernel alone. Of a host that is short of memory the same is no progress."""
        short = self.memory_pressure >= PRESSURE
        return [] if short else [p for p in self.schedulers if self._takes_memory(p)]

    def _takes_memory(self, process: ProcessFacts) -> bool:
        main = process.main
        if main is None or main.cpu < SPIN_CPU or main.user_share > _IN_KERNEL:
            return False
        grows = process.rss_delta > RSS_RATE * self.evidence.seconds
        seen = grows or any(map(_TAKES_MEMORY.search, process.kernel_stack))
        return seen or 0.0 < main.user_share <= _KERNEL_ALONE

    def pages_in(self, process: ProcessFacts) -> bool:
        """It reads a mapped file: pages come. Not every network file system counts them as bytes that were read; of a
        host that is short of memory they may be its own code, again and again."""
        counted = process.read_bytes_delta > 0 or self.memory_pressure < PRESSURE
        return counted and process.majflt_delta >= FAULTS * self.evidence.seconds

    @property
    def memory_pressure(self) -> float:
        """Percent of ten seconds in which all work waited for memory, in the server's group or on the host."""
        known = [one.full for one in self.evidence.pressure if one.resource == "memory"]
        return max([self.evidence.memory.pressure_full, *known])


def _uses_many_cores(process: ProcessFacts) -> bool:
    return process.cpu - (process.main.cpu if process.main else 0.0) >= MANY_CORES


def _is_its_own(gpu: GpuFacts) -> bool:
    """No other process holds more of it than this server does, as far as processes are known to be ours or not."""
    own = sum(p.memory for p in gpu.processes if p.ours)
    return not own or own >= sum(p.memory for p in gpu.processes if not p.ours)
