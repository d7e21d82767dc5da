"""Whose KV a block is: the namespace of a server's blocks.

Servers share KV exactly if their namespaces are equal. A namespace follows from

- the *base*: the digest of the weights, and what the user configured (config.json with the overrides, dtype, quantization,
  and whether vLLM is to be batch-invariant);
- what vLLM *resolved*: the attributes of the model's layers as they are in memory, and the configuration that they read;
- what a probe *measured*: the KV of fixed tokens, as packed bytes, and the rotary embeddings of far positions (`kv_probe.py`).

No name, folder, flag or version counts. Each server keeps what it resolved and measured in the stores, as a record
`namespaces/<base>/<settings>-<layouts>-<namespace>-<values>`. A server that starts compares itself with the records of its
base. What agrees shares a namespace, whatever the version of vLLM; what does not gets a namespace of its own, and the log says
why.

Two versions of vLLM name some attributes differently, so between versions only attributes that both have are compared. The
probe covers the rest.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from foreword.config import vllm_batch_invariant
from foreword.errors import StoreError
from foreword.integrations.weight_files import IGNORED_KEYS, model_folder, weights_digest
from foreword.store.shared_records import RecordKind, SharedRecords
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore

# vLLM shows INFO lines only of loggers below its own.
log = logging.getLogger("vllm.foreword")

# Reading records at start; a store that takes longer is not compared with.
_WITHIN = 5.0
# Files of a model's folder that vLLM reads its configuration from.
_CONFIGS = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json")


# Distances that rounding explains, as a share of the norm. Bytes of a format that is not known must be equal.
_TOLERANCE = {"float32": 2e-4, "float16": 3e-3, "bfloat16": 0.01, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}


# By how much a half row may be longer: this share of the tolerance, or this number of standard deviations of rounding.
_STRETCH, _DEVIATIONS = 0.1, 6.0


def tolerance(dtype: str) -> float:
    """The largest distance of two computations of the same values that counts as equal, as a share of their norm; none where
    vLLM is batch-invariant, so that a hit there gives the bits of a computation."""
    return 0.0 if vllm_batch_invariant() else _TOLERANCE.get(dtype, 0.0)


@dataclass(frozen=True, slots=True)
class ProbeSample:
    """Something measured.

    Attributes:
        values: float32 `[rows, count]`; a row is a layer's sample, or a position's embedding.
        tolerance: two rows are equal if their distance is at most this share of their norm, and neither half is longer than
            rounding explains.
        open: one server may have more rows than the other, such as more positions.
    """

    values: np.ndarray[Any, np.dtype[np.float32]]
    tolerance: float
    open: bool = False

    def difference(self, other: ProbeSample) -> str:
        """Why the two are not equal, "" if they are."""
        mine, theirs = self.values, other.values
        if mine.shape[1:] != theirs.shape[1:] or (len(mine) != len(theirs) and not self.open):
            return f"{mine.shape} values, {theirs.shape} in the store"
        rows = min(len(mine), len(theirs))
        mine, theirs = mine[:rows].astype(np.float64), theirs[:rows].astype(np.float64)
        if not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
            return "" if np.array_equal(mine, theirs, equal_nan=True) else "values that are not finite"
        norms = np.maximum(np.linalg.norm(mine, axis=1), np.linalg.norm(theirs, axis=1))
        distances = np.linalg.norm(mine - theirs, axis=1) / np.maximum(norms, 1e-30)
        worst = int(distances.argmax()) if rows else 0
        if rows and distances[worst] > self.tolerance:
            return f"distance {distances[worst]:.2g} in row {worst}, {self.tolerance:.2g} counts as equal"
        # Rounding errors have any direction, so together they change the length of many values by their root as a share of the
        # distance. A change of meaning, such as longer keys, has one direction. Keys and values are halves of most layouts.
        half = mine.shape[1] // 2
        for part in (slice(0, half), slice(half, None)) if half else ():
            squares = np.maximum((mine[:, part] ** 2).sum(axis=1), 1e-30)
            stretched = np.abs((mine[:, part] * theirs[:, part]).sum(axis=1) / squares - 1.0) * (squares > 1e-20)
            allowed = np.maximum(_STRETCH * self.tolerance, _DEVIATIONS * distances / np.sqrt(half))
            longest = int((stretched - allowed).argmax()) if rows else 0
            if rows and stretched[longest] > allowed[longest]:
                return f"a half of row {longest} is {stretched[longest]:.2%} longer or shorter"
        return ""


class SampleRecord(msgspec.Struct, frozen=True):
    """A sample in a record. `values`: little-endian."""

    shape: tuple[int, int]
    tolerance: float
    open: bool
    values: bytes

    @classmethod
    def of(cls, sample: ProbeSample) -> SampleRecord:
        rows, count = sample.values.shape
        values = np.ascontiguousarray(sample.values, "<f4").tobytes()
        return cls((rows, count), sample.tolerance, sample.open, values)

    @property
    def sample(self) -> ProbeSample:
        """Raises ValueError for values of another shape."""
        values = np.frombuffer(self.values, "<f4").reshape(self.shape).astype(np.float32)
        return ProbeSample(values, self.tolerance, self.open)


@dataclass(frozen=True, slots=True)
class Observations:
    """What a server resolved and measured.

    Attributes:
        version: of vLLM and of Transformers, which name attributes and keys of the configuration.
        settings: digest of vLLM's configuration and versions, hexadecimal.
        resolved: attributes of layers, and keys of the configuration, as text.
        measured: by name: `layout <fingerprint>` for the probe's KV, `rotary <number>` for embeddings.
    """

    version: str
    settings: str
    resolved: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, ProbeSample] = field(default_factory=dict)

    def difference(self, other: Observations) -> str:
        """Why KV of `other` is not this server's, "" if it is."""
        if self.measured.keys() != other.measured.keys():
            names = sorted(self.measured.keys() ^ other.measured.keys())
            return f"{names[0]} is on one side only"
        for name, mine in self.measured.items():
            why = mine.difference(other.measured[name])
            if why:
                return f"{name}: {why}"
        same = self.version == other.version
        for name in sorted(self.resolved.keys() | other.resolved.keys()):
            one, two = self.resolved.get(name), other.resolved.get(name)
            if not same and (one is None or two is None):
                continue
            both = {one or "None", two or "None"}
            # Both may say that it is not set, each in its way; one of them with None, or no such attribute at all.
            if one != two and not {"None"} <= both <= {"None", "null", "0", "0.0", "-1", "False", "false", ""}:
                return f"{name} is {one}, {two} in the store"
        return ""

    @property
    def name(self) -> str:
        """The record's name, before its namespace."""
        layouts = sha256("\x00".join(sorted(self.measured)).encode()).hexdigest()
        return f"{self.settings[:32]}-{layouts[:16]}"

    @property
    def values(self) -> bytes:
        """A digest of exactly what was measured."""
        digest = sha256()
        for name in sorted(self.measured):
            digest.update(name.encode() + b"\x00" + self.measured[name].values.tobytes())
        return digest.digest()

    def record(self, namespace: bytes) -> NamespaceRecord:
        measured = {name: SampleRecord.of(one) for name, one in self.measured.items()}
        facts = namespace.hex(), self.version, self.settings, dict(self.resolved), measured
        return NamespaceRecord(*facts, time.time())


class NamespaceRecord(msgspec.Struct, frozen=True):
    """What a server that wrote into a store resolved and measured, its namespace (hexadecimal), and when it started last (Unix
    time)."""

    namespace: str
    vllm: str
    settings: str
    resolved: dict[str, str]
    measured: dict[str, SampleRecord]
    started: float
    format: Literal[1] = 1

    def __post_init__(self) -> None:
        bytes.fromhex(self.namespace)
        for one in self.measured.values():
            _ = one.sample

    @property
    def evidence(self) -> Observations:
        measured = {name: one.sample for name, one in self.measured.items()}
        return Observations(self.vllm, self.settings, self.resolved, measured)


# A record has up to a MiB for a large model: a row of a sample is 4 KiB.
NAMESPACES: Final = RecordKind("namespaces", NamespaceRecord, most=256)


class EncoderRecord(msgspec.Struct, frozen=True):
    """Which namespace's encoder outputs are used by servers with the namespace after which the record is named. `model`:
    hexadecimal."""

    model: str

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.model)) != sha256().digest_size:
            raise ValueError("model")


ENCODERS: Final = RecordKind("encoders", EncoderRecord)


def base_digest(vllm_config: Any, fingerprint: str | None) -> bytes:
    """32 bytes: a digest of the weights and of what the user configured about them. `fingerprint` (hexadecimal) replaces the
    digest of the weights. Raises ModelUnsupported."""
    model = vllm_config.model_config
    weights = bytes.fromhex(fingerprint) if fingerprint else _checkpoint(model)
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    # A draft's layers are among the KV cache's.
    drafts = _checkpoint(draft) if draft is not None and draft.model != model.model else b""
    given = {
        "config": _merged(_configured(model), getattr(model, "hf_overrides", None)),
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "arguments": _plain(getattr(model, "quantization_config", None)),
        **({"batch_invariant": True} if vllm_batch_invariant() else {}),
    }
    text = json.dumps(given, sort_keys=True, default=_plain).encode()
    return sha256(b"foreword/base\x00" + weights + drafts + text).digest()


def _checkpoint(model: Any) -> bytes:
    folder = model_folder(model.model, getattr(model, "revision", None))
    return weights_digest(folder, code=bool(getattr(model, "trust_remote_code", False)))


def _configured(model: Any) -> dict[str, Any]:
    """The configuration files that vLLM reads, as one object, without what says nothing about KV."""
    path = getattr(model, "hf_config_path", None) or model.model
    folder = model_folder(path, getattr(model, "revision", None)) if not Path(path).is_dir() else Path(path)
    found: dict[str, Any] = {}
    for name in _CONFIGS:
        file = folder / name
        if file.is_file():
            found |= json.loads(file.read_text(encoding="utf-8"))
    return found


def _merged(config: Mapping[str, Any], overrides: object) -> object:
    """The configuration with overrides in it, without keys that do not change what a model computes."""
    merged = {key: value for key, value in config.items() if key not in IGNORED_KEYS}
    if not isinstance(overrides, Mapping):
        return merged | ({"": repr(overrides)} if overrides else {})
    for key, value in overrides.items():
        before = merged.get(key)
        nested = isinstance(before, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(before, value) if nested else value  # type: ignore[arg-type]
    return merged


def settings_digest(vllm_config: Any) -> str:
    """64 hexadecimal digits: a digest of what may change KV in vLLM's configuration, and of the versions. The API server
    and the engine of one server have the same."""
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    names = ("max_model_len", "quantization", "override_generation_config", "disable_sliding_window", "dtype")
    chosen = {name: _plain(getattr(model, name, None)) for name in names}
    chosen["arguments"] = _plain(getattr(model, "quantization_config", None))
    chosen["config"] = resolved_config(model)
    chosen["cache"] = str(getattr(vllm_config.cache_config, "cache_dtype", None))
    chosen["attention"] = _plain(getattr(vllm_config, "attention_config", None))
    speculative = getattr(vllm_config, "speculative_config", None)
    chosen["drafts"] = [str(getattr(speculative, name, None)) for name in ("method", "model", "num_speculative_tokens")]
    chosen["versions"] = [vllm.__version__, transformers.__version__, torch.__version__]
    chosen["device"] = str(current_platform.get_device_name())
    return sha256(json.dumps(chosen, sort_keys=True, default=_plain).encode()).hexdigest()


def resolved_config(model: Any) -> dict[str, str]:
    """The keys of the configuration that layers read, with overrides and defaults in it."""
    found: dict[str, str] = {}
    for prefix, config in (("config", model.hf_config), ("text", getattr(model, "hf_text_config", None))):
        if config is not None and not (prefix == "text" and config is model.hf_config):
            _flatten(found, prefix, config.to_dict())
    return found


def _flatten(found: dict[str, str], prefix: str, value: object) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in IGNORED_KEYS:
                _flatten(found, f"{prefix}.{key}", inner)
    else:
        found[prefix] = short(json.dumps(value, sort_keys=True, default=_plain))


def short(text: str) -> str:
    """A text, or a digest of a long one."""
    return text if len(text) <= 80 else sha256(text.encode()).hexdigest()[:32]


def _plain(value: object) -> object:
    """A value of vLLM's configuration as JSON. Objects as their type's name and their fields, without addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        found = [_plain(one) for one in value]
        return sorted(found, key=str) if isinstance(value, set | frozenset) else found
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name, None)) for name in fields}
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text


def unmeasured(base: bytes, settings: str) -> bytes:
    """The namespace of a server that could not measure: that of servers with the same settings and versions."""
    return sha256(b"foreword/unmeasured\x00" + base + settings.encode()).digest()


def choose(store: TieredStore, base: bytes, mine: Observations) -> bytes:
    """The namespace of this server, 32 bytes: that of a record that agrees with it, or a new one. Writes this server's record.

    Never raises for a store that fails: its records are then not compared, and a namespace of exactly these measurements is
    taken, so that nothing can be shared by mistake.
    """
    where = NAMESPACES.key(_folder(base), "")
    known, complete = _records(store, where, mine.name)
    compared = [(record, mine.difference(record.evidence)) for record in known]
    reasons = [(record, why) for record, why in compared if why]
    # A namespace that a server with other KV has too is not used: both have started at the same time.
    others = {record.namespace for record, _ in reasons}
    equal = next((record for record, why in compared if not why and record.namespace not in others), None)
    if equal is not None:
        shared = bytes.fromhex(equal.namespace)
        _write(store, base, mine, shared)
        log.info("Foreword: KV in the stores that %s saved is used", equal.vllm)
        return shared
    resolved = json.dumps(dict(mine.resolved), sort_keys=True)
    names = "\x00".join(sorted(mine.measured))
    fresh = sha256(
        b"foreword/namespace\x00" + unmeasured(base, mine.settings) + f"{resolved}\x00{names}".encode()
    ).digest()
    if not complete or fresh.hex() in others:
        fresh = sha256(fresh + mine.values).digest()
    if reasons:
        record, why = reasons[0]
        log.warning(
            "Foreword: KV in the stores that %s saved with these weights is not used: %s",
            record.vllm,
            why,
        )
    if not complete:
        log.warning("Foreword: not every store answered at start; KV that it has is not used before the next start")
    _write(store, base, mine, fresh)
    written, _ = _records(store, where + mine.name, mine.name)
    if any(record.namespace == fresh.hex() and mine.difference(record.evidence) for record in written):
        return choose(store, base, mine)
    return fresh


def _records(store: TieredStore, prefix: str, first: str) -> tuple[list[NamespaceRecord], bool]:
    """The records with these keys, that named `first` before others; and whether every tier answered, within a few seconds."""
    late: list[str] = []

    def failed(tier: StoreTier, error: StoreError) -> None:
        if tier.label not in late:
            log.warning("Foreword: %s does not answer: %s", tier.label, error.message)
        late.append(tier.label)

    records = SharedRecords(store, NAMESPACES)
    found = records.scan(prefix, failed=failed, unread=failed, within=_WITHIN).values
    ordered = sorted(found, key=lambda key: (f"/{first}-" not in key, key))
    return [found[key] for key in ordered], not late


def _write(store: TieredStore, base: bytes, mine: Observations, namespace: bytes) -> None:
    # Servers that start at the same time do not overwrite each other's records, so that each sees what the other measured.
    key = NAMESPACES.key(_folder(base), f"{mine.name}-{namespace.hex()[:16]}-{mine.values.hex()[:8]}")
    try:
        SharedRecords(store, NAMESPACES).put(key, mine.record(namespace))
    except StoreError as error:
        log.warning("Foreword: this server's namespace is not recorded: %s", error.message)


def _folder(base: bytes) -> str:
    return base.hex()[:32]


def recorded(store: TieredStore, base: bytes, settings: str) -> bytes | None:
    """The namespace of the server with these settings, as its engine has recorded it; None if there is no record."""
    records, _ = _records(store, NAMESPACES.key(_folder(base), "") + f"{settings[:32]}-", "")
    latest = max(records, key=lambda one: one.started, default=None)
    return bytes.fromhex(latest.namespace) if latest is not None else None
