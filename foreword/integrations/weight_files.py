"""Digests of the files of checkpoints and adapters: equal in every folder, different after any change."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from foreword.errors import ModelUnsupported

_READ = 8 << 20
# Keys of config.json that do not change what a model computes.
IGNORED_KEYS = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def model_folder(model: str, revision: str | None) -> Path:
    """The folder that an engine reads a model from. Raises ModelUnsupported if there is none."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelUnsupported(
            f"the files of {model!r} cannot be fingerprinted; give a 'fingerprint' in the settings of the stores"
        ) from error


def weights_digest(folder: Path, *, code: bool = False) -> bytes:
    """32 bytes: SHA-256 over each weight file's name and XXH3-128, and those of Python files where the checkpoint's own `code`
    is run, also from other repositories ("NAME--MODULE.CLASS", Transformers' `auto_map`). Raises ModelUnsupported."""
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not weights:
        raise ModelUnsupported(f"there are no weights (*.safetensors, *.bin) in {folder}")
    config = folder / "config.json"
    classes = json.dumps(json.loads(config.read_bytes()).get("auto_map")) if code and config.is_file() else ""
    folders = [folder, *(model_folder(name, None) for name in sorted(set(re.findall('"([^"]+)--[^"]*"', classes))))]
    sources = [path for one in folders for path in sorted(one.rglob("*.py"))] if code else []
    digest = hashlib.sha256(b"foreword/weights\x00")
    for path in (*weights, *sources):
        digest.update(path.name.encode() + b"\x00" + file_digest(path))
    return digest.digest()


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


def file_digest(path: Path) -> bytes:
    """XXH3-128 of a file, 16 bytes. It is kept in the user's cache until the file's size or a time changes. Raises OSError."""
    status = path.stat()
    # A file that is rewritten in place may keep its size and its modification time (rsync --inplace -t); no tool sets ctime.
    times = f"{status.st_mtime_ns}\x00{status.st_ctime_ns}"
    name = hashlib.sha256(f"{path.resolve()}\x00{status.st_size}\x00{times}\x00{status.st_ino}".encode())
    cached = _cache_folder() / name.hexdigest()
    try:
        known = cached.read_bytes()
    except OSError:
        known = b""
    if len(known) == 16:
        return known
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(_READ):
            state.update(part)
    found = state.digest()
    _write(cached, found)
    return found


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "foreword" / "weights"


def _write(path: Path, found: bytes) -> None:
    """If it cannot be written, the file is read again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_bytes(found)
        draft.replace(path)
    except OSError:
        return
