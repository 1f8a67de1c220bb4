"""Stand-in for the CPU build of sgl_kernel, which has no wheel.

The one function that SGLang's CPU branches really call without AMX is here in plain torch; every other name imports,
and raises when called. Submodules other than ``SUBMODULES`` raise ImportError, which SGLang's own fallbacks expect.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.0.0+cpu.standin"

SUBMODULES = ("sgl_kernel.mamba", "sgl_kernel.speculative", "sgl_kernel.kvcacheio")


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, _pool_len):
    """Write each request's new cache locations into its row ``[start, end)`` of the request-to-token table."""
    position = 0
    rows = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in rows:
        req_to_token[row, start:end] = out_cache_loc[position : position + end - start].to(req_to_token.dtype)
        position += end - start


def _unavailable(name):
    def function(*args, **kwargs):
        raise NotImplementedError(f"{name}: this stand-in for sgl_kernel has no kernels")

    function.__name__ = name.rsplit(".", 1)[-1]
    return function


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _unavailable(f"{__name__}.{name}")


class _Submodule(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _unavailable(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, _path=None, _target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name in SUBMODULES else None

    def create_module(self, spec):
        return _Submodule(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
