"""What the weights of a checkpoint are, told from its files: the same wherever they lie, other as soon as one bit is."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import xxhash

from foreword.errors import ModelUnsupported

_READ = 8 << 20
# Of config.json, what does not change what a model computes.
_IGNORED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def model_folder(model: str, revision: str | None) -> Path:
    """Where vLLM has read a model from. Raises ModelUnsupported if there is no such folder."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelUnsupported(
            f"the files of {model!r} are not here to be fingerprinted; give a 'fingerprint' in kv_connector_extra_config"
        ) from error


def fingerprint_folder(folder: Path) -> bytes:
    """32 bytes: SHA-256 of config.json, without what does not matter, and of each weight file's name and XXH3-128. Reading the
    weights takes as long as the disk needs; the digest of a file is kept in the user's cache while its size and time stay.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not weights:
        raise ModelUnsupported(f"no weights (*.safetensors, *.bin) in {folder} to be fingerprinted")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _IGNORED}
    digest = hashlib.sha256(b"foreword/weights\x00" + json.dumps(kept, sort_keys=True).encode())
    for path in weights:
        digest.update(path.name.encode() + b"\x00" + _digest_of(path))
    return digest.digest()


def _digest_of(path: Path) -> bytes:
    status = path.stat()
    name = hashlib.sha256(f"{path.resolve()}\x00{status.st_size}\x00{status.st_mtime_ns}\x00{status.st_ino}".encode())
    note = _notes() / name.hexdigest()
    try:
        known = note.read_bytes()
    except OSError:
        known = b""
    if len(known) == 16:
        return known
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(_READ):
            state.update(part)
    found = state.digest()
    _keep(note, found)
    return found


def _notes() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "foreword" / "weights"


def _keep(note: Path, found: bytes) -> None:
    """A note that cannot be kept is made again next time."""
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_suffix(f".{os.getpid()}")
        draft.write_bytes(found)
        draft.replace(note)
    except OSError:
        return
