"""Tensors in weight files, by content: name, dtype, shape and a digest of the bytes, whatever file holds them.

Safetensors files are read as they lie on the disk. Files of torch are mapped, and unpickled as `torch.load` does with
`weights_only`. Any other file, and a damaged one, counts as one tensor with the file's name; a GGUF file, which also has the
configuration, as one without a name.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import xxhash

from foreword.decoders import decode_msgpack
from foreword.model_content import TensorContent, tensor_content
from foreword.store.background import at_once

_READ: Final = 8 << 20
_TORCH: Final = (".bin", ".pt", ".pth", ".ckpt")
# Files that are read at the same time: hashing and reading leave the interpreter.
_THREADS: Final = 4
# A file that was changed so recently may change again without a change of its times, so its digest is not kept.
_SETTLED_NS: Final = 2_000_000_000
# Names of dtypes in safetensors headers, as torch has them. Others are taken as they are.
_DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U16": "uint16",
    "U32": "uint32", "U64": "uint64", "C64": "complex64", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip


_Found = list[TensorContent]


def tensors_of(paths: Iterable[Path]) -> list[TensorContent]:
    """The tensors of files, sorted. A name that several files have with other content has the file's name before it. Raises
    OSError."""
    files = list(paths)
    read = at_once([partial(file_tensors, file) for file in files], _THREADS)
    contents: dict[str, set[tuple[str, tuple[int, ...], bytes]]] = {}
    for one in (tensor for found in read for tensor in found):
        contents.setdefault(one.name, set()).add((one.dtype, one.shape, one.digest))
    known: dict[tuple[str, bytes], TensorContent] = {}
    for path, found in zip(files, read, strict=True):
        for one in found:
            several = len(contents[one.name]) > 1
            named = msgspec.structs.replace(one, name=f"{path.name}\x00{one.name}") if several else one
            known[named.name, named.digest] = named
    return sorted(known.values(), key=lambda one: (one.name, one.dtype, one.shape, one.digest))


def file_tensors(path: Path) -> list[TensorContent]:
    """The tensors of one file. They are kept in the user's cache until the file's size, a time or its inode changes. Raises
    OSError."""
    cached = _cached(path, "tensors")
    try:
        return decode_msgpack(cached.read_bytes(), _Found)
    except (OSError, msgspec.DecodeError):
        found = _read(path)
        _keep(path, cached, msgspec.msgpack.encode(found))
        return found


def file_digest(path: Path) -> bytes:
    """XXH3-128 of a file, 16 bytes, kept as its tensors are. Raises OSError."""
    cached = _cached(path, "")
    try:
        known = cached.read_bytes()
    except OSError:
        known = b""
    if len(known) == 16:
        return known
    with path.open("rb") as file:
        found = _hashed(file, 0, path.stat().st_size)
    _keep(path, cached, found)
    return found


def _read(path: Path) -> list[TensorContent]:
    try:
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix in _TORCH:
            return _torch(path)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, EOFError):
        pass  # not such a file: its bytes count
    return [TensorContent("" if path.suffix == ".gguf" else path.name, "file", (), file_digest(path))]


def _hashed(file: BinaryIO, start: int, size: int) -> bytes:
    """Raises ValueError for a file that ends before."""
    state = xxhash.xxh3_128()
    file.seek(start)
    while size:
        part = file.read(min(size, _READ))
        if not part:
            raise ValueError("the file ends before its tensors")
        state.update(part)
        size -= len(part)
    return state.digest()


def _safetensors(path: Path) -> list[TensorContent]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("no safetensors file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        found = []
        for name, one in sorted(header.items(), key=lambda pair: pair[1]["data_offsets"]):
            first, last = one["data_offsets"]
            digest = _hashed(file, 8 + length + first, last - first)
            found.append(TensorContent(name, _DTYPES.get(one["dtype"], one["dtype"]), tuple(one["shape"]), digest))
        return found


def _torch(path: Path) -> list[TensorContent]:
    """Raises ValueError for a file that is not a dictionary of tensors."""
    import pickle

    import torch

    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"  # a zip file; others are of torch before 1.6
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except (RuntimeError, pickle.UnpicklingError, AttributeError, AssertionError) as error:
        raise ValueError("not read by torch") from error
    if not isinstance(state, Mapping):
        raise ValueError("no dictionary")
    return list(_entries(state))


def _entries(state: Mapping[Any, Any], before: str = "") -> Iterator[TensorContent]:
    import torch

    for key, value in state.items():
        name = f"{before}{key}"
        if isinstance(value, torch.Tensor):
            yield tensor_content(name, value)
        elif isinstance(value, Mapping):
            yield from _entries(value, f"{name}\x00")
        else:
            yield TensorContent(name, type(value).__name__, (), xxhash.xxh3_128_digest(repr(value).encode()))


def _cached(path: Path, kind: str) -> Path:
    """Where the digest of a file is kept, in its present state."""
    status = path.stat()
    # A file that is rewritten in place may keep its size and its modification time (rsync --inplace -t); no tool sets ctime.
    times = f"{status.st_mtime_ns}\x00{status.st_ctime_ns}"
    name = f"{kind}{path.resolve()}\x00{status.st_size}\x00{times}\x00{status.st_ino}"
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "foreword" / "weights" / hashlib.sha256(name.encode()).hexdigest()


def _keep(path: Path, cached: Path, found: bytes) -> None:
    """Write a digest into the cache, unless the file may still change. If it cannot be written, the file is read again next
    time."""
    try:
        if time.time_ns() - path.stat().st_ctime_ns < _SETTLED_NS:
            return
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft = cached.with_suffix(f".{os.getpid()}")
        draft.write_bytes(found)
        draft.replace(cached)
    except OSError:
        return
