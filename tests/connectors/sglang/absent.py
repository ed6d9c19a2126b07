"""Inert stand-ins for what SGLang imports and has no build without a GPU. Importing this puts them in place."""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any, ClassVar

ABSENT = frozenset("datasets pandas pyarrow sgl_kernel torchaudio torchcodec torchvision".split())


class _Anything(type):
    """Its classes have every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_Inert,), {})()


class _Inert(metaclass=_Anything):
    """Can be made and called with anything, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __call__(self, *_: object, **__: object) -> _Inert:
        return _Inert()

    def __getattr__(self, name: str) -> _Inert:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Inert()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (_Inert,), {}) if name[:1].isupper() else _Inert()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        wanted = fullname.partition(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


def _transformers_look_first() -> None:
    """What transformers finds out about these it finds out once: before they seem to be there."""
    from transformers.utils import import_utils

    for name in dir(import_utils):
        if name.startswith(("is_torchvision", "is_torchaudio", "is_torchcodec")):
            with contextlib.suppress(Exception):  # some want arguments
                getattr(import_utils, name)()


_transformers_look_first()
sys.meta_path.append(_Finder())  # the last: what is installed wins
