"""LoRA adapters: which one a request asks for, by its files, and which ones vLLM has in memory.

Implements the connector's interface for them (`foreword.integrations.vllm.connector_extras`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foreword.errors import ModelUnsupported
from foreword.integrations.adapter_files import adapter_files, digest_of_files
from foreword.integrations.vllm.connector_extras import LoadedAdapters
from foreword.integrations.vllm.request_identity import Adapter
from foreword.integrations.weight_files import model_folder

_Signature = tuple[tuple[str, int, int, int, int], ...]


class AdapterFiles:
    """Digests of adapters, from their files. They are read again when they change."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[_Signature, bytes]] = {}

    def digest(self, path: str) -> bytes | None:
        """32 bytes for a folder, or a name on the Hugging Face hub as vLLM accepts it; None if files are missing or change."""
        try:
            folder = model_folder(os.path.expanduser(path), None)
            signature = _signature(folder)
            known = self._known.get(path)
            if known is None or known[0] != signature:
                known = signature, digest_of_files(adapter_files(folder))
                if _signature(folder) != signature:
                    return None
                self._known[path] = known
        except (OSError, ModelUnsupported):
            return None
        return known[1]


def _signature(folder: Path) -> _Signature:
    """Changes with any change of the adapter's files."""
    found = [(path, path.stat()) for path in adapter_files(folder)]
    return tuple((str(path), one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for path, one in found)


class AdaptersInMemory(LoadedAdapters):
    """The adapters that vLLM has in memory, in a worker's process.

    The scheduler side identifies an adapter by its files. vLLM loads it once, at another time, and keeps KV of it by name and
    path in its own cache. So if the files of a path change while the server runs, files, memory and cache may disagree. The
    adapter is then not saved or loaded any more, until the server restarts. A new path has no such doubt.
    """

    def __init__(self) -> None:
        self._in_memory: dict[int, tuple[str, bytes]] = {}
        self._by_path: dict[str, bytes] = {}  # b"": had several

    def record(self, number: int, path: str, digest: bytes | None) -> None:
        """vLLM has loaded an adapter. `digest` is None if its files could not be read."""
        before = self._in_memory.get(number)
        if before is not None and before != (path, digest):
            self._by_path[before[0]] = b""  # its requests may run on with the new weights
        if self._by_path.setdefault(path, digest or b"") != digest:
            self._by_path[path] = b""
        self._in_memory[number] = path, digest or b""

    def may_save(self, adapter: Adapter | None) -> bool:
        return adapter is None or self._is_loaded(adapter)

    def may_load(self, adapter: Adapter | None) -> bool:
        """True for one that is in memory, or will be loaded from its files."""
        return adapter is None or adapter.number not in self._in_memory or self._is_loaded(adapter)

    def _is_loaded(self, adapter: Adapter) -> bool:
        path, digest = self._in_memory.get(adapter.number, ("", b""))
        return digest == adapter.digest and self._by_path.get(path) == digest


_loaded = AdaptersInMemory()


def loaded_adapters() -> AdaptersInMemory:
    """The adapters in this process's memory, recorded from the first call on.

    vLLM tells connectors nothing about adapters, so this wraps the method that reads an adapter's files. In a vLLM without this
    method nothing is recorded, and no KV of adapters is saved.
    """
    try:
        from vllm.lora.lora_model import LoRAModel
    except ImportError:
        return _loaded
    load = getattr(LoRAModel, "from_local_checkpoint", None)
    if load is not None and not hasattr(load, "foreword"):
        LoRAModel.from_local_checkpoint = classmethod(_recorded(load.__func__))
    return _loaded


def _recorded(load: Callable[..., Any]) -> Callable[..., Any]:
    files = AdapterFiles()

    def from_local_checkpoint(cls: Any, lora_dir: str, *args: Any, **kwargs: Any) -> Any:
        before = files.digest(lora_dir)
        model = load(cls, lora_dir, *args, **kwargs)
        _loaded.record(model.id, lora_dir, before if files.digest(lora_dir) == before else None)
        return model

    from_local_checkpoint.foreword = True  # type: ignore[attr-defined]
    return from_local_checkpoint
