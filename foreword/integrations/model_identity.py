"""The identity of a model of Transformers that is in memory: its configuration, code and weights, wherever they came from."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers.dynamic_module_utils import get_relative_import_files

from foreword.integrations.weight_files import code_digest, read_checkpoint
from foreword.model_content import CODE_KEYS, IGNORED_KEYS, digest_of_tensors, plain_config, tensor_content
from foreword.store.background import at_once

# Settings of a configuration that do not change the KV.
_VOLATILE = IGNORED_KEYS - CODE_KEYS
_EARLIER_VOLATILE = {
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "_attn_implementation",
}
# Packages whose classes are no part of a model.
_LIBRARIES = {"torch", "transformers", "foreword", *sys.stdlib_module_names}
# Attributes that every module has: its tensors and hooks, which count by themselves; and those that say where a model was
# loaded from, and where its parts lie.
_OF_MODULES = frozenset(vars(nn.Module())) | {"name_or_path", "warnings_issued"}
_OF_LOADING = ("hf_", "_hf_", "_is_hf_")
_OBJECT = "an object"
_in_no_file: WeakKeyDictionary[Any, bytes] = WeakKeyDictionary()


def fingerprint_model(model: nn.Module) -> bytes:
    """SHA-256 over the configuration, the source of classes that neither PyTorch nor Transformers contains, and, in order of
    name, every parameter's name, dtype, shape and bytes (`model_content.py`).

    A copy of a model elsewhere has the same fingerprint, also with other names or settings of generation in its configuration;
    other weights under the same path have another.
    """
    digest = _digest_of_code(model, plain_config(model.config.to_dict(), _VOLATILE))  # type: ignore[operator, union-attr]
    calls = [functools.partial(tensor_content, *one) for one in sorted(model.state_dict().items())]
    digest.update(digest_of_tensors(at_once(calls, torch.get_num_threads())))
    return digest.digest()


def _digest_of_code(model: nn.Module, settings: Mapping[str, Any]) -> hashlib._Hash:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    own = {kind: b"".join(code_of(kind)) for module in model.modules() for kind in type(module).__mro__}
    for name, module in model.named_modules():
        digest.update(b"".join(name.encode() + own[kind] for kind in type(module).__mro__ if own[kind]))
    return digest


def earlier_fingerprint(model: nn.Module) -> bytes:
    """The fingerprint of builds before the content of tensors identified a model: nearly all keys of its configuration counted,
    and SHA-256 of tensors. Records of named prefixes of those builds have it in their keys."""
    config = model.config.to_dict()  # type: ignore[operator, union-attr]
    digest = _digest_of_code(model, {key: value for key, value in config.items() if key not in _EARLIER_VOLATILE})
    tensors = sorted(model.state_dict().items())

    def hashed(one: tuple[str, Tensor]) -> bytes:
        flat = one[1].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return hashlib.sha256(flat.numpy().data).digest()

    parts = at_once([functools.partial(hashed, one) for one in tensors], torch.get_num_threads())
    for (name, tensor), part in zip(tensors, parts, strict=True):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode() + part)
    return digest.digest()


def code_of(kind: Any) -> list[bytes]:
    """A name for the code of a class or function: its place in its file, a digest of that, and of files that it imports if a
    checkpoint contains them. Nothing for a library's. One that is in no file, as in a notebook, is another one each time it is
    defined."""
    while isinstance(kind, functools.partial):
        kind = kind.func
    kind = kind if hasattr(kind, "__qualname__") else type(kind)
    package = str(kind.__module__).partition(".")[0]
    if is_of_library(kind):
        return []
    try:
        file = inspect.getfile(kind)
        more = get_relative_import_files(file) if package == "transformers_modules" else []
        place = kind.__qualname__, getattr(getattr(kind, "__code__", None), "co_firstlineno", 0)
        return [repr(place).encode(), *sorted(hashlib.sha256(Path(one).read_bytes()).digest() for one in (file, *more))]
    except (OSError, TypeError):
        return [_in_no_file.setdefault(kind, os.urandom(32))]


def is_of_library(kind: Any) -> bool:
    """Whether a class or function is of a package whose code is no part of a model."""
    return str(kind.__module__).partition(".")[0] in _LIBRARIES


def own_attributes(module: nn.Module) -> dict[str, object]:
    """A module's attributes that are texts, numbers and collections, such as an active adapter's name and scale."""
    found = {name: _plain(one) for name, one in sorted(vars(module).items()) if name not in _OF_MODULES}
    return {name: one for name, one in found.items() if one is not _OBJECT and not name.startswith(_OF_LOADING)}


def replaced_forward(module: nn.Module) -> Any:
    """Return what replaces the `forward` of a module's class. The wrapper of accelerate, which moves tensors between devices,
    is none. None if nothing replaces it."""
    one = vars(module).get("forward")
    if isinstance(one, functools.partial) and str(getattr(one.func, "__module__", "")).startswith("accelerate."):
        one = vars(module).get("_old_forward")
    return None if getattr(one, "__func__", None) is type(module).forward else one


def _plain(value: object) -> object:
    """A value without addresses: objects are all one."""
    if isinstance(value, Mapping):
        return sorted(((str(key), _plain(one)) for key, one in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(one) for one in value), key=repr)
    return value if value is None or isinstance(value, bool | int | float | complex | str | bytes) else _OBJECT


def fixed_rope_length(text: Any) -> int | None:
    """The length up to which a model's rotary embedding does not change with a sequence's length. None if it never does."""
    rope = getattr(text, "rope_parameters", None) or {}
    lengths = [
        int(
            part.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None) or 0
        )
        for part in [rope, *[value for value in rope.values() if isinstance(value, dict)]]
        if part.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(filter(None, lengths), default=None)


def weights_digest(folder: Path, load_format: str = "auto", *, code: bool = False) -> bytes:
    """32 bytes: a digest of all tensors that a load format reads, and of Python files where the checkpoint's own `code` is run.
    Raises ModelUnsupported."""
    read = read_checkpoint(folder, load_format)
    digest = hashlib.sha256(b"foreword/weights\x00" + read.weights)
    for name in sorted(read.heads):
        digest.update(name.encode() + read.heads[name])
    return hashlib.sha256(digest.digest() + code_digest(folder)).digest() if code else digest.digest()
