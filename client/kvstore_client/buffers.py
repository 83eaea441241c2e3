"""Callers' buffers as lists of flat byte views. Nothing is copied here.

An entry is one buffer or a list of buffers (slices of one part, in order). Every buffer must be C-contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from kvstore_wire.errors import InvalidArgument

BufferLike: TypeAlias = Any  # Whatever speaks the buffer protocol; Python 3.10 has no type for it.
Entry: TypeAlias = "BufferLike | Sequence[BufferLike]"
Slices: TypeAlias = "list[memoryview]"


def readable(entries: Sequence[Entry], count: int, name: str) -> list[Slices]:
    """Returns the views of `count` entries. Raises InvalidArgument naming the entry at fault."""
    _check_count(entries, count, name)
    return [_slices(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]


def writable(entries: Sequence[Entry], count: int, name: str) -> list[Slices]:
    """As `readable`, for buffers that will be written."""
    made = readable(entries, count, name)
    for i, slices in enumerate(made):
        if any(view.readonly for view in slices):
            raise InvalidArgument("is read-only", field=f"{name}[{i}]")
    return made


def size_of(slices: Slices) -> int:
    """Returns the bytes of one entry."""
    return len(slices[0]) if len(slices) == 1 else sum(map(len, slices))


def check_exact(made: list[Slices], size_bytes: int, name: str) -> None:
    """Raises InvalidArgument for the first entry whose size is not `size_bytes`."""
    for i, slices in enumerate(made):
        if size_of(slices) != size_bytes:
            limit = f"exactly {size_bytes} bytes"
            raise InvalidArgument(f"has {size_of(slices)} bytes", field=f"{name}[{i}]", limit=limit)


def check_most(made: list[Slices], size_bytes: int, name: str) -> None:
    """Raises InvalidArgument for the first entry that is larger than `size_bytes`."""
    for i, slices in enumerate(made):
        if size_of(slices) > size_bytes:
            limit = f"at most {size_bytes} bytes"
            raise InvalidArgument(f"has {size_of(slices)} bytes", field=f"{name}[{i}]", limit=limit)


def _check_count(entries: Sequence[Entry], count: int, name: str) -> None:
    if not isinstance(entries, (list, tuple)):
        raise InvalidArgument(f"must be a list or tuple, not {type(entries).__name__}", field=name)
    if len(entries) != count:
        raise InvalidArgument(f"has {len(entries)} entries", field=name, limit=f"{count}, one for each part")


def _slices(entry: Entry, name: str) -> Slices:
    if isinstance(entry, (list, tuple)):
        return [_view(piece, name) for piece in entry]
    return [_view(entry, name)]


def _view(buffer: BufferLike, name: str) -> memoryview:
    if isinstance(buffer, (bytes, bytearray)):
        return memoryview(buffer)
    if isinstance(buffer, np.ndarray):
        return _array_view(buffer, name)
    try:
        view = memoryview(buffer)
    except TypeError:
        raise InvalidArgument(f"is a {type(buffer).__name__}, not a buffer", field=name) from None
    if not view.c_contiguous:
        raise InvalidArgument("is not contiguous: pass its contiguous slices", field=name)
    if view.nbytes == 0:
        return memoryview(bytearray())
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


def _array_view(array: np.ndarray[Any, Any], name: str) -> memoryview:
    if array.dtype.hasobject:
        raise InvalidArgument("holds Python objects, not bytes", field=name)
    if not array.flags.c_contiguous:
        raise InvalidArgument("is not contiguous: pass its contiguous slices", field=name)
    return array.reshape(-1).view(np.uint8).data
