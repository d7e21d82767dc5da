"""Which weights a server computes with: fingerprints of checkpoints and adapters, and versions of weights updated in place.

A fingerprint comes from the files: equal in every folder, different after any change.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import xxhash

from foreword.errors import ModelUnsupported

_READ = 8 << 20
# Keys of config.json that do not change what a model computes.
_IGNORED = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})


def model_folder(model: str, revision: str | None) -> Path:
    """The folder that vLLM reads a model from. Raises ModelUnsupported if there is none."""
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelUnsupported(
            f"the files of {model!r} cannot be fingerprinted; give a 'fingerprint' in kv_connector_extra_config"
        ) from error


def fingerprint_folder(folder: Path) -> bytes:
    """32 bytes: SHA-256 over the relevant keys of config.json and over each weight file's name and XXH3-128.

    A file's digest is kept in the user's cache until its size or time changes. Raises ModelUnsupported.
    """
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if not weights:
        raise ModelUnsupported(f"there are no weights (*.safetensors, *.bin) in {folder}")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kept = {key: value for key, value in config.items() if key not in _IGNORED}
    digest = hashlib.sha256(b"foreword/weights\x00" + json.dumps(kept, sort_keys=True).encode())
    for path in weights:
        digest.update(path.name.encode() + b"\x00" + _digest_of(path))
    return digest.digest()


_Signature = tuple[tuple[str, int, int, int, int], ...]


class AdapterDigests:
    """Digests of LoRA adapters, by their files.

    vLLM loads an adapter once and knows it by its number. If the files change later, they differ from what is in memory, so the
    adapter is not identified any more, until it is loaded again under a new number.

    Args:
        settings: of vLLM, which change what an adapter does.
    """

    def __init__(self, settings: bytes = b"") -> None:
        self._settings = settings
        self._known: dict[int, tuple[str, _Signature, bytes] | None] = {}

    def digest(self, adapter: Any) -> bytes | None:
        """32 bytes for a `LoRARequest`; None if the adapter cannot be identified."""
        number, path = int(adapter.lora_int_id), os.path.expanduser(adapter.lora_path)
        try:
            signature = _signature(Path(path))
            known = self._known.get(number, ("", (), b""))
            if known is None or adapter.load_inplace:
                self._known[number] = None
                return None
            if known[2] and known[:2] != (path, signature):
                self._known[number] = None
                return None
            if not known[2]:
                found = self._digest_of_folder(Path(path), bool(getattr(adapter, "is_3d_lora_weight", False)))
                known = self._known[number] = (path, signature, found) if _signature(Path(path)) == signature else None
        except OSError:
            return None
        return known[2] if known is not None else None

    def _digest_of_folder(self, folder: Path, is_3d: bool) -> bytes:
        digest = hashlib.sha256(b"foreword/adapter\x00" + hashlib.sha256(self._settings).digest() + bytes([is_3d]))
        for path in _adapter_files(folder):
            name = path.name.encode()
            digest.update(len(name).to_bytes(4, "little") + name + _digest_of(path))
        return digest.digest()


def _adapter_files(folder: Path) -> list[Path]:
    """Raises FileNotFoundError for a folder without an adapter."""
    weights = [path for pattern in ("*.safetensors", "*.bin", "*.pt") for path in folder.glob(pattern)]
    if not weights:
        raise FileNotFoundError(folder)
    return sorted([*weights, folder / "adapter_config.json"])


def _signature(folder: Path) -> _Signature:
    """Changes with any change of the adapter's files."""
    found = [(path, path.stat()) for path in _adapter_files(folder)]
    return tuple((path.name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for path, one in found)


class WeightsVersion:
    """The version of weights that are updated in place, as part of the keys.

    At first it is that of the files. A reset begins a version without a name, which only this process knows. A name that is set
    before anything is computed with the new weights takes its place: under it, KV is found again when the same name returns.

    Attributes:
        salt: for `chain_salt`; b"" for the weights in the files.
    """

    def __init__(self, name: str = "") -> None:
        self.salt = _named(name) if name else b""
        self._computed = False

    def reset(self) -> None:
        """The weights may have changed, and vLLM has dropped its own cache."""
        self.salt, self._computed = b"\x00reset\x00" + os.urandom(16), False

    def set(self, name: str) -> bool:
        """The weights are those of version `name`. False if vLLM's cache may hold KV of others: it was not reset, or computed
        since; the version is then one without a name."""
        if self.salt == _named(name):
            return True
        if self._computed:
            self.salt = b"\x00reset\x00" + os.urandom(16)
            return False
        self.salt = _named(name)
        return True

    def note_computed(self) -> None:
        """vLLM computes with the present weights."""
        self._computed = True


def _named(name: str) -> bytes:
    return b"\x00version\x00" + name.encode()


def _digest_of(path: Path) -> bytes:
    status = path.stat()
    name = hashlib.sha256(f"{path.resolve()}\x00{status.st_size}\x00{status.st_mtime_ns}\x00{status.st_ino}".encode())
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
