"""Two small fixes for SGLang without a GPU, applied as the modules concerned are imported.

A ``.pth`` file loads this at interpreter start; it does nothing until one of those modules is imported, and SGLang's
files stay as shipped.

1. torchvision's wheel is linked against CUDA, so its C++ operators do not load beside a CPU torch. Its Python code only
   needs the schemas of ``torchvision::nms`` and ``::qnms`` to exist.
2. SGLang takes the multi-head prefill path for DeepSeek on any attention backend without a handler, and torch_native
   (the only one that needs no CPU kernels) cannot run that path: register absorbed MLA for it.
"""

import importlib.abc
import importlib.util
import sys


def _declare_torchvision_operators():
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._sglang_cpu_shim_library = library  # kept alive: its operators go away with it


def _register_absorbed_mla(module):
    registry = module.AttentionBackendRegistry
    if "torch_native" not in registry._handlers:
        registry.register("torch_native", lambda attn, batch: module._dispatch_mla_subtype(attn, batch))


BEFORE = {"torchvision": _declare_torchvision_operators}
AFTER = {"sglang.srt.models.deepseek_common.attention_backend_handler": _register_absorbed_mla}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner, name):
        self._inner = inner
        self._name = name

    def create_module(self, spec):
        return self._inner.create_module(spec)

    def exec_module(self, module):
        if self._name in BEFORE:
            BEFORE[self._name]()
        self._inner.exec_module(module)
        if self._name in AFTER:
            AFTER[self._name](module)

    def __getattr__(self, attribute):
        return getattr(self._inner, attribute)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._busy = False

    def find_spec(self, name, _path=None, _target=None):
        if self._busy or name not in {*BEFORE, *AFTER}:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, name)
        return spec


sys.meta_path.insert(0, _Finder())
