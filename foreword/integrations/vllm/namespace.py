"""Whose KV a block is: the namespace of a server's blocks.

Servers share KV exactly if their namespaces are equal. A namespace follows from

- the *base*: the weights, by the content of their tensors, without those that may stand behind the last layer with KV;
- what vLLM *resolved*: the attributes of the model's layers as they are in memory, the configuration that they read, their
  code, dtype and quantization, and the weights of a draft model;
- what a probe *measured*: the KV of fixed tokens, as packed bytes, and the rotary embeddings of far positions (`kv_probe.py`).

No name, folder, file, flag or version counts. Each server keeps what it resolved and measured in the stores, as a record
`namespaces/<base>/<settings>-<layouts>-<namespace>-<values>`. A server that starts compares itself with the records of its
base. What agrees shares a namespace, whatever the version of vLLM; what does not gets a namespace of its own, and the log says
why: all servers with the same weights have one base.

Two versions of vLLM name some attributes differently, so between versions only attributes that both have are compared. The
probe covers the rest.

A server that could not measure shares with no other process: its namespace is random. Its record,
`namespaces/<base>/<settings>-private`, tells the API server which one it is; it is no evidence for others.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import entry_points
from typing import Any, Final, Literal

import msgspec
import numpy as np

from foreword.blocks.layout import Layout
from foreword.config import vllm_batch_invariant
from foreword.errors import BadRecord, StoreError
from foreword.integrations.weight_files import Checkpoint, code_digest, model_folder, read_checkpoint
from foreword.model_content import IGNORED_KEYS, is_config
from foreword.store.shared_records import RecordKind, SharedRecords
from foreword.store.tier import StoreTier
from foreword.store.tiered import TieredStore

# vLLM shows INFO lines only of loggers below its own.
log = logging.getLogger("vllm.foreword")

_LAID_OUT: Final = "blocks are laid out otherwise"
# Attributes of layouts in words, those that explain others first.
_LAYOUT_WORDS: Final = {
    "group": "KV cache groups (layers; --disable-hybrid-kv-cache-manager has to be set everywhere or nowhere)",
    "block_size": "tokens of a block (--block-size)",
    "shard": "ranks (--tensor-parallel-size)",
    "dtype": "dtype (--kv-cache-dtype)",
    "loss": "lossy codecs",
    "order": "packing",
    "layers": "layers, each with its KV heads and dimensions",
    "opaque_bytes": "bytes of a state",
}
# Begin of the attribute with the digest of the layers' code, before the versions for which it can be compared.
CODE: Final = "code in vLLM "
# Ends of the names of records of servers that could not measure.
_PRIVATE, _TRUSTED = "private", "trusted"
# Reading records at start; a store that takes longer is not compared with.
_WITHIN = 5.0
# Variables of the environment that say where a server is, not what it computes.
_PLACES = re.compile(
    r"VLLM_.*(HOST|_IP|PORT|ADDR|URL|PATH|ROOT|DIR|KEY|LOG|TRACE|STAT|TIMEOUT(_\w+)?|CACHE|PROCESS|WORKER|USAGE|CONFIG|"
    r"MEDIA|SERVER|ENGINE|DEBUG|THREADS_BIND|KVCACHE_SPACE|_ID|IDENT|RANK|DEV_MODE)"
)
# The rest of what may change numbers: of torch, its libraries and their kernels.
_NUMERIC = re.compile(
    r"(VLLM|TORCH|ONEDNN|DNNL|MKL|CUBLAS|CUDNN|NVIDIA_TF32|TRITON|FLASHINFER|PYTORCH)_\w+|TF32_OVERRIDE"
)

# Distances that rounding explains, as a share of the norm. Bytes of a format that is not known must be equal.
_TOLERANCE = {"float32": 2e-4, "float16": 3e-3, "bfloat16": 0.01, "float8_e4m3fn": 0.03, "float8_e5m2": 0.06}


# By how much a half row may be longer: this share of the tolerance, or this number of standard deviations of rounding.
_STRETCH, _DEVIATIONS = 0.1, 6.0


def tolerance(dtype: str) -> float:
    """The largest distance of two computations of the same values that counts as equal, as a share of their norm; none where
    vLLM is batch-invariant, so that a hit there gives the bits of a computation."""
    return 0.0 if vllm_batch_invariant() else _TOLERANCE.get(dtype, 0.0)


class ProbeSample(msgspec.Struct, frozen=True):
    """Something measured.

    Attributes:
        shape: `(rows, count)`; a row is a layer's sample, or a position's embedding.
        tolerance: two rows are equal if their distance is at most this share of their norm, and neither half is longer than
            rounding explains.
        open: one server may have more rows than the other, such as more positions.
        values: float32, little-endian.
    """

    shape: tuple[int, int]
    tolerance: float
    open: bool
    values: bytes

    @classmethod
    def of(cls, rows: np.ndarray[Any, np.dtype[np.float32]], tolerance: float, *, open: bool = False) -> ProbeSample:
        """Make a sample of values `[rows, count]`."""
        return cls((len(rows), rows.shape[1]), tolerance, open, np.ascontiguousarray(rows, "<f4").tobytes())

    @property
    def rows(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """float32 `[rows, count]`. Raises ValueError for values of another shape."""
        return np.frombuffer(self.values, "<f4").reshape(self.shape).astype(np.float32)

    def difference(self, other: ProbeSample) -> str:
        """Why the two are not equal, "" if they are."""
        mine, theirs = self.rows, other.rows
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


@dataclass(frozen=True, slots=True)
class Observations:
    """Identity that a server resolved and measured.

    Attributes:
        version: of vLLM and of Transformers, which name attributes and keys of the configuration.
        settings: digest of vLLM's configuration and versions, hexadecimal.
        resolved: attributes of layers, and keys of the configuration, as text.
        measured: by name: `layout <fingerprint>` for the probe's KV, `rotary <number>` for embeddings.
        layouts: what blocks look like, in words by attribute (`layout_words`), to explain layouts that differ.
    """

    version: str
    settings: str
    resolved: Mapping[str, str] = field(default_factory=dict)
    measured: Mapping[str, ProbeSample] = field(default_factory=dict)
    layouts: Mapping[str, str] = field(default_factory=dict)

    def difference(self, other: Observations) -> str:
        """Why KV of `other` is not this server's, "" if it is. An attribute explains more than a measurement."""
        same = self.version == other.version
        names = self.resolved.keys() | other.resolved.keys()
        for name in sorted(names, key=lambda name: (name.startswith(CODE), name)):
            one, two = self.resolved.get(name), other.resolved.get(name)
            if (one is None or two is None) and (not same or name.startswith(CODE)):
                continue
            both = {one or "None", two or "None"}
            # Both may say that it is not set, each in its way; one of them with None, or no such attribute at all.
            if one != two and not {"None"} <= both <= {"None", "null", "0", "0.0", "-1", "False", "false", ""}:
                return f"{name} is {one}, {two} in the store"
        if self.measured.keys() != other.measured.keys():
            first = min(self.measured.keys() ^ other.measured.keys())
            if not first.startswith("layout"):
                return f"other rotary embeddings: {first} is on one side only"
            for name, words in _LAYOUT_WORDS.items():
                mine, theirs = self.layouts.get(name), other.layouts.get(name)
                if mine != theirs and None not in (mine, theirs):
                    return f"{_LAID_OUT}: {words} are {mine}, {theirs} in the store"
            return f"{_LAID_OUT}: {first} is on one side only"
        differences = ((name, mine.difference(other.measured[name])) for name, mine in self.measured.items())
        return next((f"{name}: {why}" for name, why in differences if why), "")

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
            digest.update(name.encode() + b"\x00" + self.measured[name].values)
        return digest.digest()

    def record(self, namespace: bytes) -> NamespaceRecord:
        facts = namespace.hex(), self.version, self.settings, dict(self.resolved), dict(self.measured)
        return NamespaceRecord(*facts, time.time(), layouts=dict(self.layouts))


class NamespaceRecord(msgspec.Struct, frozen=True):
    """The record of a server that wrote into a store: what it resolved and measured, its namespace (hexadecimal), and when it
    started last (Unix time)."""

    namespace: str
    vllm: str
    settings: str
    resolved: dict[str, str]
    measured: dict[str, ProbeSample]
    started: float
    format: Literal[1] = 1
    layouts: dict[str, str] = {}

    def __post_init__(self) -> None:
        bytes.fromhex(self.namespace)
        for one in self.measured.values():
            _ = one.rows

    @property
    def evidence(self) -> Observations:
        return Observations(self.vllm, self.settings, self.resolved, self.measured, self.layouts)


def layout_words(layouts: Iterable[Layout]) -> dict[str, str]:
    """The attributes of a server's layouts in words: the values that they have, for a comparison by `Observations`."""
    found: dict[str, dict[str, None]] = {name: {} for name in _LAYOUT_WORDS}
    for one in layouts:
        described = one.describe()
        # The first two words of "0/3 window <digest>"; the only group has none.
        described["group"] = f"{' '.join(one.group.split()[:2]) or 'the only group'} ({len(one.layers) or 'no'})"
        described["layers"] = ", ".join(f"{count} x {layer}" for layer, count in Counter(one.layers).items())
        for name, values in found.items():
            values[str(described.get(name) or "none")] = None
    return {name: " and ".join(values) for name, values in found.items()}


# A record has up to a MiB for a large model: a row of a sample is 4 KiB.
NAMESPACES: Final = RecordKind("namespaces", NamespaceRecord, most=256)


def base_digest(vllm_config: Any, fingerprint: str | None) -> bytes:
    """32 bytes: the weights, by content. `fingerprint` (hexadecimal) replaces their digest. Raises ModelUnsupported."""
    weights = bytes.fromhex(fingerprint) if fingerprint else checkpoint(vllm_config).weights
    return sha256(b"foreword/base\x00" + weights).digest()


def checkpoint(vllm_config: Any, model: Any = None) -> Checkpoint:
    """The weights of a model, of the served one if none is given. Raises ModelUnsupported."""
    model = vllm_config.model_config if model is None else model
    load = getattr(vllm_config, "load_config", None)
    # Where the files are elsewhere (a bucket), vLLM keeps where it reads them.
    source = getattr(model, "model_weights", "") or model.model
    folder = model_folder(source, getattr(model, "revision", None))
    extra = _plain(getattr(load, "model_loader_extra_config", None))
    return read_checkpoint(folder, str(getattr(load, "load_format", "auto")), extra)


def _draft(vllm_config: Any) -> Any | None:
    """The configuration of a draft model with weights of its own: its layers are among the KV cache's."""
    draft = getattr(getattr(vllm_config, "speculative_config", None), "draft_model_config", None)
    return draft if draft is not None and draft.model != vllm_config.model_config.model else None


def configured_attributes(vllm_config: Any, fingerprint: str | None = None) -> dict[str, str]:
    """Attributes that layers have of no name of theirs: dtypes, quantization, the draft model, and the checkpoint's own code if
    it is run. Raises ModelUnsupported."""
    model, draft = vllm_config.model_config, _draft(vllm_config)
    found = {
        "dtype": str(model.dtype),
        "quantization": str(getattr(model, "quantization", None)),
        "quantization.arguments": short(
            json.dumps(_plain(getattr(model, "quantization_config", None)), sort_keys=True)
        ),
        "batch_invariant": str(vllm_batch_invariant()),
        "draft.weights": "None" if draft is None else checkpoint(vllm_config, draft).weights.hex(),
    }
    if getattr(model, "trust_remote_code", False) and not fingerprint:
        found["code"] = code_digest(model_folder(model.model, getattr(model, "revision", None))).hex()
    return found


def settings_digest(vllm_config: Any) -> str:
    """64 hexadecimal digits: a digest of what may change KV in vLLM's configuration, and of the versions. The API server
    and the engine of one server have the same."""
    import torch
    import transformers
    import vllm
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    draft = _draft(vllm_config)
    names = ("max_model_len", "quantization", "override_generation_config", "disable_sliding_window", "dtype")
    chosen = {name: _plain(getattr(model, name, None)) for name in names}
    chosen["arguments"] = _plain(getattr(model, "quantization_config", None))
    chosen["config"] = resolved_config(model)
    chosen["cache"] = plain_dtype(str(getattr(vllm_config.cache_config, "cache_dtype", None)), model.dtype)
    chosen["batch_invariant"] = vllm_batch_invariant()
    chosen["attention"] = _plain(getattr(vllm_config, "attention_config", None))
    speculative = getattr(vllm_config, "speculative_config", None)
    chosen["draft weights"] = None if draft is None else checkpoint(vllm_config, draft).weights.hex()
    chosen["drafts"] = [str(getattr(speculative, name, None)) for name in ("method", "model", "num_speculative_tokens")]
    chosen["versions"] = [vllm.__version__, transformers.__version__, torch.__version__]
    chosen["device"] = str(current_platform.get_device_name())
    return sha256(json.dumps(chosen, sort_keys=True, default=_plain).encode()).hexdigest()


def trusted(base: bytes, settings: str, vllm_config: Any) -> bytes:
    """The namespace of servers that share KV unmeasured because their operator says so: all that can be read of settings, code
    and environment is equal. Equal numbers do not follow from that."""
    chosen: dict[str, object] = {"environment": _environment(), "plugins": _plugins()}
    for name, keys in (
        ("load_config", ("load_format", "model_loader_extra_config", "quantization")),
        (
            "model_config",
            ("model_impl", "trust_remote_code", "hf_overrides", "enforce_eager", "override_attention_dtype"),
        ),
        ("compilation_config", ("mode", "level", "backend", "custom_ops", "inductor_compile_config")),
        ("kernel_config", ("__dataclass_fields__",)),
    ):
        part = getattr(vllm_config, name, None)
        chosen[name] = (
            _plain(part) if keys[0].startswith("__") else {key: _plain(getattr(part, key, None)) for key in keys}
        )
    chosen["additional"] = _plain(getattr(vllm_config, "additional_config", None))
    text = json.dumps(chosen, sort_keys=True, default=_plain)
    return sha256(unmeasured(base, settings) + text.encode()).digest()


def _environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if _NUMERIC.fullmatch(name) and not _PLACES.fullmatch(name)
    }


def _plugins() -> list[str]:
    """vLLM's plug-ins and the versions of their distributions."""
    found = (one for group in ("vllm.general_plugins", "vllm.platform_plugins") for one in entry_points(group=group))
    return sorted(f"{one.value} {one.dist.version if one.dist is not None else ''}" for one in found)


def plain_dtype(name: str, dtype: object) -> str:
    """A dtype of a KV cache with `auto`, which is the model's, resolved."""
    return (
        str(dtype).removeprefix("torch.") if name == "auto" else {"half": "float16", "float": "float32"}.get(name, name)
    )


def resolved_config(model: Any) -> dict[str, str]:
    """The keys of the configuration that layers read, with overrides and defaults in it."""
    found: dict[str, str] = {}
    for prefix, config in (("config", model.hf_config), ("text", getattr(model, "hf_text_config", None))):
        if config is not None and not (prefix == "text" and config is model.hf_config):
            _flatten(found, prefix, config.to_dict())
    return found


def _flatten(found: dict[str, str], prefix: str, value: object, *, top: bool = True) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            # Every key of other objects, such as RoPE's parameters, counts.
            if key not in IGNORED_KEYS or not (top or is_config(prefix)):
                _flatten(found, f"{prefix}.{key}", inner, top=False)
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
    """A digest of the weights, settings and versions of a server, beside what it measures."""
    return sha256(b"foreword/unmeasured\x00" + base + settings.encode()).digest()


def private(base: bytes, settings: str, engine: str) -> bytes:
    """The namespace of a server that could not measure, and whose processes cannot tell each other a random one. `engine`: a
    text that only they have."""
    return sha256(b"foreword/private\x00" + unmeasured(base, settings) + engine.encode()).digest()


def engine_of(vllm_config: Any) -> str:
    """A text that the API server and all engines of one server have, and no other server."""
    engine = str(getattr(getattr(vllm_config, "kv_transfer_config", None), "engine_id", ""))
    return f"{re.sub('_dp[0-9]+$', '', engine)} {getattr(vllm_config, 'instance_id', '')}"


def note_unmeasured(store: TieredStore, base: bytes, settings: str, namespace: bytes, engine: str) -> None:
    """Record a namespace that follows from no measurement, so that the API server of `engine` finds it, or of any server with
    these settings if it is ""."""
    record = NamespaceRecord(namespace.hex(), "an unmeasured server", settings, {"engine": engine}, {}, time.time())
    _put(store, NAMESPACES.key(folder_of(base), f"{settings[:32]}-{_PRIVATE if engine else _TRUSTED}"), record)


def announce(store: TieredStore, base: bytes, settings: str, namespace: bytes, engine: str) -> None:
    """Record the namespace of `engine` for its scheduler, which no handshake tells (`announced`)."""
    record = NamespaceRecord(namespace.hex(), "a scheduler that waits", settings, {"engine": engine}, {}, time.time())
    _put(store, _announcement(base, settings, engine), record)


def announced(store: TieredStore, base: bytes, settings: str, engine: str) -> bytes:
    """The namespace that the workers of `engine` have announced, which ends the announcement; b"" if there is none."""
    records, key = SharedRecords(store, NAMESPACES), _announcement(base, settings, engine)
    try:
        found = records.get(key)
        records.remove(key)
    except (StoreError, BadRecord):
        return b""
    return bytes.fromhex(found.namespace) if found is not None else b""


def _announcement(base: bytes, settings: str, engine: str) -> str:
    return NAMESPACES.key(folder_of(base), f"{settings[:32]}-{sha256(engine.encode()).hexdigest()[:16]}")


def choose(store: TieredStore, base: bytes, mine: Observations, layouts: Sequence[Layout] = ()) -> bytes:
    """The namespace of this server, 32 bytes: that of a record that agrees with it, or a new one. Writes this server's record.

    Never raises for a store that fails: its records are then not compared, and a namespace of exactly these measurements is
    taken, so that nothing can be shared by mistake. So it is if the new one has blocks in these layouts: their record is lost.
    """
    where = NAMESPACES.key(folder_of(base), "")
    found, complete = records_at(store, where, mine.name)
    compared = [(record, mine.difference(record.evidence)) for record in found if record.measured]
    reasons = [(record, why) for record, why in compared if why]
    # A namespace that a server with other KV has too is not used: both have started at the same time.
    others = {record.namespace for record, _ in reasons}
    equal = next((record for record, why in compared if not why and record.namespace not in others), None)
    if equal is not None:
        _write(store, base, mine, shared := bytes.fromhex(equal.namespace))
        log.info("Foreword: KV in the stores that %s saved is used", equal.vllm)
        return shared
    seen = "\x00".join([json.dumps(dict(mine.resolved), sort_keys=True), *sorted(mine.measured)]).encode()
    fresh = sha256(b"foreword/namespace\x00" + unmeasured(base, mine.settings) + seen).digest()
    held = _may_hold(store, {replace(one, model=fresh).fingerprint for one in layouts})
    if not complete or fresh.hex() in others or held:
        fresh = sha256(fresh + mine.values).digest()
    if reasons:
        # The nearest: another block size says nothing about why KV of this one is not found.
        record, why = min(reasons, key=lambda one: one[1].startswith(_LAID_OUT))
        log.warning("Foreword: KV in the stores that %s saved with these weights is not used: %s", record.vllm, why)
    if not complete or held:
        log.warning("Foreword: KV is not used without a record of who saved it, or in a store that has not answered")
    _write(store, base, mine, fresh)
    written, _ = records_at(store, where + mine.name, mine.name)
    if any(record.namespace == fresh.hex() and mine.difference(record.evidence) for record in written):
        return choose(store, base, mine, layouts)
    return fresh


def _may_hold(store: TieredStore, layouts: Iterable[bytes]) -> bool:
    """Whether a store has blocks of these layouts, or does not say it in time: Redis goes through all of its keys."""

    def held(tier: StoreTier) -> bool:
        return tier.start(lambda: any(any(tier.store.list_names(one, deadline=until)) for one in layouts)).result(until)

    until = time.monotonic() + _WITHIN
    try:
        return any(map(held, store.record_tiers))
    except StoreError:
        return True


def records_at(store: TieredStore, prefix: str, first: str) -> tuple[list[NamespaceRecord], bool]:
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
    name = f"{mine.name}-{namespace.hex()[:16]}-{mine.values.hex()[:8]}"
    _put(store, NAMESPACES.key(folder_of(base), name), mine.record(namespace))


def _put(store: TieredStore, key: str, record: NamespaceRecord) -> None:
    try:
        SharedRecords(store, NAMESPACES).put(key, record)
    except StoreError as error:
        log.warning("Foreword: this server's namespace is not recorded: %s", error.message)


def folder_of(base: bytes) -> str:
    return base.hex()[:32]
