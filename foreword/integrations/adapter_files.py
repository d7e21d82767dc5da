"""The files of LoRA adapters, by content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from foreword.integrations.tensor_files import file_digest


def adapter_files(folder: Path) -> list[Path]:
    """Raises FileNotFoundError for a folder without an adapter."""
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)]
    if not weights:
        raise FileNotFoundError(folder)
    return sorted([*weights, folder / "adapter_config.json"])


def digest_of_files(paths: Iterable[Path]) -> bytes:
    digest = hashlib.sha256(b"foreword/adapter\x00")
    for path in paths:
        name = path.name.encode()
        digest.update(len(name).to_bytes(4, "little") + name + file_digest(path))
    return digest.digest()
