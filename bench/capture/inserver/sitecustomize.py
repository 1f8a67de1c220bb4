"""The bench inside the server: its processes find this file as ``sitecustomize`` on PYTHONPATH.

One process holds several forwards of the model: SGLang's own, and for each entry of ``arms.json`` (in the folder that
FLEETDUMP_BENCH names) the one of an edited source. A thread answers on the Unix socket ``control`` in that folder: it
puts one of them into the class, times the tap's calls, and reads the process's memory. Between commands it sleeps in
``accept``, so no arm pays for it. Only a process that makes a model has it.

Standard library and torch alone; nothing of this is in what fleetdump ships.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

ORIGINAL = "original"


class Finder(MetaPathFinder):
    """Has the module of ``arms.json`` loaded from its own file, and its arms added."""

    def __init__(self, folder: str, arms: dict[str, Any]):
        self._folder = folder
        self._arms = arms

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self._arms["module"]:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin:
            spec.loader = Loader(fullname, spec.origin, self._folder, self._arms)
        return spec


class Loader(SourceFileLoader):
    def __init__(self, fullname: str, path: str, folder: str, arms: dict[str, Any]):
        super().__init__(fullname, path)
        self._folder = folder
        self._arms = arms

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        Arms(module, self._arms, self._folder).prepare()


class Arms:
    """The forwards of one class, and the thread that swaps them."""

    def __init__(self, module: ModuleType, description: dict[str, Any], folder: str):
        self._module = module
        self._description = description
        self._class = getattr(module, description["class"])
        self._socket = os.path.join(folder, "control")
        self._forwards = {ORIGINAL: self._class.forward}
        self._times: list[list[int]] = []
        self._syncs: set[str] = set()

    def prepare(self) -> None:
        for name, arm in self._description["arms"].items():
            self._module.__dict__[arm["import"]] = importlib.import_module(arm["import"])
            self._forwards[name] = forward_of(self._module, arm["source"], self._class.__name__)
        made, self_ = self._class.__init__, self

        def make(model: Any, *args: Any, **more: Any) -> None:
            made(model, *args, **more)
            threading.Thread(target=self_._serve, name="bench-control", daemon=True).start()

        self._class.__init__ = make

    def _serve(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._socket)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rwb") as stream:
                for line in stream:
                    command = json.loads(line)
                    answer = getattr(self, "do_" + command.pop("do"))(**command)
                    stream.write(json.dumps(answer).encode() + b"\n")
                    stream.flush()

    def do_arm(self, name: str) -> None:
        """Serve the next forwards by ``name``."""
        self._class.forward = self._forwards[name]

    def do_time(self, name: str, on: bool, empty: bool = False) -> None:
        """Time the calls of arm ``name``'s module, or no longer; ``empty``: the timer alone, without the calls."""
        attribute = self._description["arms"][name]["import"]
        tap = sys.modules[attribute]
        self._module.__dict__[attribute] = Timed(None if empty else tap, self._times) if on else tap

    def do_times(self) -> list[list[int]]:
        """What was timed since the last call; see ``Timed``."""
        taken = list(self._times)
        del self._times[: len(taken)]
        return taken

    def do_note_syncs(self, on: bool) -> None:
        """Have torch warn of each call that waits for the GPU, and note those that come from the tap."""
        import torch

        if not torch.cuda.is_available():
            return
        torch.cuda.set_sync_debug_mode("warn" if on else "default")
        if on:
            warnings.filterwarnings("always", message="called a synchronizing CUDA operation")
            warnings.showwarning = self._note_sync

    def _note_sync(self, *_: Any, **__: Any) -> None:
        stack = traceback.extract_stack()
        self._syncs |= {f"{os.path.basename(f.filename)}:{f.lineno}" for f in stack if "fleetdump_tap" in f.filename}

    def do_syncs(self) -> list[str]:
        """Lines of the tap where the GPU was waited for, and those that called them."""
        return sorted(self._syncs)

    def do_memory(self) -> dict[str, int]:
        """Bytes of this process: resident on the host, and what torch has of the device and of pinned memory."""
        import torch

        found = {"pid": os.getpid(), "resident": resident_bytes()}
        if torch.cuda.is_available():
            stats = torch.cuda.memory_stats()
            found["allocated_peak"] = stats["allocated_bytes.all.peak"]
            found["reserved"] = stats["reserved_bytes.all.current"]
            found["mallocs"] = stats["num_device_alloc"]
            found["retries"] = stats["num_alloc_retries"]
            found["pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
            torch.cuda.reset_peak_memory_stats()
        return found


def forward_of(module: ModuleType, path: str, class_name: str) -> FunctionType:
    """``forward`` of ``class_name`` in the source ``path``, as a function with the globals of ``module``."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name]
    [forward] = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    made: dict[str, FunctionType] = {}
    exec(compile(ast.Module([forward], []), path, "exec", dont_inherit=True), module.__dict__, made)
    return made["forward"]


class Timed:
    """A tap whose lines are timed. For each forward one record is added to ``records``: requests in the batch, then the
    nanoseconds of each layer's line (the look at ``idle``, and ``before_layer`` where it is called) and, last, of
    ``after_layers``. Without a tap the calls are those of a forward in which nothing is captured, do nothing, and the
    times are the timer's own."""

    def __init__(self, tap: Any, records: list[list[int]]):
        self._tap = tap if tap is not None else NoTap()
        self._records = records
        self._spent: list[int] = []

    @property
    def idle(self) -> Any:
        tap = self._tap
        start = time.perf_counter_ns()
        found = tap.idle
        self._spent.append(time.perf_counter_ns() - start)
        return found

    def before_layer(
        self, model: Any, layer_id: int, hidden_states: Any, forward_batch: Any, residual: Any = None
    ) -> None:
        call = self._tap.before_layer
        start = time.perf_counter_ns()
        call(model, layer_id, hidden_states, forward_batch, residual=residual)
        self._spent[-1] += time.perf_counter_ns() - start

    def after_layers(self, model: Any, hidden_states: Any, forward_batch: Any, residual: Any = None) -> None:
        call = self._tap.after_layers
        start = time.perf_counter_ns()
        call(model, hidden_states, forward_batch, residual=residual)
        spent = time.perf_counter_ns() - start
        self._records.append([len(getattr(forward_batch, "rids", None) or ()), *self._spent, spent])
        self._spent = []


class NoTap:
    """Does nothing, and is called as the tap is in a forward in which nothing is captured."""

    idle: Any = None

    def before_layer(self, *given: Any, **_: Any) -> None:
        self.idle = given[3]

    def after_layers(self, *_: Any, **__: Any) -> None:
        self.idle = None


def resident_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields["VmRSS"].split()[0]) * 1024


if __name__ == "sitecustomize" and "FLEETDUMP_BENCH" in os.environ:
    _folder = os.environ["FLEETDUMP_BENCH"]
    with open(os.path.join(_folder, "arms.json"), encoding="utf-8") as _file:
        sys.meta_path.insert(0, Finder(_folder, json.load(_file)))
