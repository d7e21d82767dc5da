"""Identity of checkpoints: equal in every folder and division into files, different after any change.

A checkpoint is its tensors (`tensor_files.py`): those of the files that the engine's load format reads.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from foreword.errors import ModelUnsupported
from foreword.integrations.tensor_files import file_digest, tensors_of
from foreword.model_content import TensorContent, digest_of_tensors

# Files that each load format of vLLM and SGLang reads: the first pattern that has files. Other formats, also those of
# plug-ins, may read anything.
_HF: Final = ("*.safetensors", "*.bin", "*.pt")
_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": ("consolidated*.safetensors", *_HF),
    "hf": _HF,
    "bitsandbytes": _HF,
    "safetensors": _HF[:1],
    "fastsafetensors": _HF[:1],
    "instanttensor": _HF[:1],
    "runai_streamer": _HF[:1],
    "mistral": ("consolidated*.safetensors",),
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
    "dummy": _HF,
}
_ANY: Final = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.tensors",
    "*.npy",
    "*.npz",
    "*.msgpack",
    "*.h5",
)
# Files of trainers beside the weights.
_TRAINING: Final = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
_CONSOLIDATED: Final = "consolidated"
# Tensors that usually stand behind the last layer with KV: the head, and the norm before it.
_AROUND: Final = r"^(?:(?:model|language_model|text_model|transformer|gpt_neox|backbone|decoder)\.)*"
HEADS: Final[Mapping[str, re.Pattern[str]]] = {
    "head": re.compile(_AROUND + r"(?:lm_head|embed_out|score|output)\."),
    "norm": re.compile(_AROUND + r"(?:norm|ln_f|norm_f|final_norm|final_layernorm|final_layer_norm)\.(?:weight|bias)$"),
}
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|tok_embeddings|word_embeddings|wte|embed_in|token_embd|embeddings?)\."
)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The weights of a model, by content.

    Attributes:
        weights: 32 bytes: a digest of all tensors without `heads`.
        heads: digests of the tensors that usually stand behind the last layer with KV, by the names in `HEADS`; b"" where there
            are none.
        embeds: the checkpoint has an input embedding of its own, so that none is taken from the head.
    """

    weights: bytes
    heads: Mapping[str, bytes]
    embeds: bool


def model_folder(model: str, revision: str | None) -> Path:
    """The folder (or the file) that an engine reads a model from. Raises ModelUnsupported if there is none."""
    path = Path(model)
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (OSError, ValueError, HfHubHTTPError, LocalEntryNotFoundError) as error:
        raise ModelUnsupported(
            f"the files of {model!r} cannot be fingerprinted; give a 'fingerprint' in the settings of the stores"
        ) from error


def weight_paths(folder: Path, load_format: str = "auto", patterns: Iterable[str] | None = None) -> list[Path]:
    """The files that a load format reads the weights from, as vLLM chooses them. `patterns`: instead of the format's. Raises
    ModelUnsupported if there are none."""
    if folder.is_file():
        parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", folder.name)
        return sorted(folder.parent.glob(parts)) if parts != folder.name else [folder]
    chosen = tuple(patterns) if patterns is not None else _PATTERNS.get(load_format)
    if chosen is None:
        found = [path for pattern in _ANY for path in folder.rglob(pattern)]
    else:
        found = next((some for some in (sorted(folder.glob(pattern)) for pattern in chosen) if some), [])
        if patterns is None:
            found = _indexed(folder, found)
        if not found and load_format == "auto":
            found = sorted(folder.glob("*.gguf")) or [path for one in _HF for path in sorted(folder.rglob(one))]
    found = [path for path in found if path.name not in _TRAINING]
    if not found:
        raise ModelUnsupported(f"there are no weights for load format {load_format!r} in {folder}")
    return sorted(found)


def _indexed(folder: Path, found: list[Path]) -> list[Path]:
    """Safetensors files without those that the index of the folder does not name: vLLM does not read them."""
    if not found or found[0].suffix != ".safetensors":
        return found
    before = _CONSOLIDATED if fnmatch.fnmatch(found[0].name, f"{_CONSOLIDATED}*") else "model"
    index = folder / f"{before}.safetensors.index.json"
    if not index.is_file():
        return found
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return found
    return [path for path in found if path.name in named] or found


def read_checkpoint(folder: Path, load_format: str = "auto", extra: object = None) -> Checkpoint:
    """The weights that a load format reads. One that is not known here, such as a plug-in's, is part of them, with its
    configuration `extra`. Raises ModelUnsupported."""
    tensors = tensors_of(weight_paths(folder, load_format))
    heads = {name: [one for one in tensors if pattern.match(one.name)] for name, pattern in HEADS.items()}
    behind = {one.name for some in heads.values() for one in some}
    rest = _without_common([one for one in tensors if one.name not in behind])
    weights = digest_of_tensors(rest)
    if load_format not in _PATTERNS:
        given = json.dumps([load_format, extra], sort_keys=True, default=str).encode()
        weights = hashlib.sha256(b"foreword/load-format\x00" + weights + given).digest()
    found = {name: digest_of_tensors(_without_common(some)) if some else b"" for name, some in heads.items()}
    return Checkpoint(weights, found, any(_EMBEDDING.search(one.name) for one in rest))


def code_digest(folder: Path) -> bytes:
    """32 bytes: a digest of a checkpoint's Python files, also from other repositories ("NAME--MODULE.CLASS", Transformers'
    `auto_map`). Raises ModelUnsupported."""
    config = folder / "config.json"
    classes = json.dumps(json.loads(config.read_bytes()).get("auto_map")) if config.is_file() else ""
    folders = [folder, *(model_folder(name, None) for name in sorted(set(re.findall('"([^"]+)--[^"]*"', classes))))]
    digest = hashlib.sha256(b"foreword/code\x00")
    for path in (path for one in folders if one.is_dir() for path in sorted(one.rglob("*.py"))):
        digest.update(path.name.encode() + b"\x00" + file_digest(path))
    return digest.digest()


def _without_common(tensors: list[TensorContent]) -> list[TensorContent]:
    """Tensors without the parts that all of their names begin with, such as `model.`: an export of the model alone has none."""
    names = [one.name.split(".") for one in tensors]
    common = 0
    while names and all(len(parts) > common + 1 and parts[common] == names[0][common] for parts in names):
        common += 1
    named = [replace(one, name=".".join(parts[common:])) for one, parts in zip(tensors, names, strict=True)]
    return sorted(named, key=lambda one: one.name)
