"""Stands in for flashinfer, which compiles its kernels from 76 MB of sources at the first prefill.

SGLang 0.5.14 imports these names even where it is told to use other backends; whatever is called raises."""

from __future__ import annotations

from typing import NoReturn

__version__ = "0.6.12"


def absent(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("this is a stand-in for flashinfer")
