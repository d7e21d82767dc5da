"""Encoder outputs (of images, audio, video) in Foreword's stores: an EC connector that vLLM loads by name.

    vllm serve MODEL --ec-transfer-config '{"ec_connector": "ForewordECConnector",
        "ec_connector_module_path": "foreword.integrations.vllm", "ec_role": "ec_both",
        "ec_connector_extra_config": {"store": ["disk:///var/cache/foreword?size=200GiB"]}}'

vLLM makes one connector in its scheduler and one in each worker. vLLM runs no encoder for what the scheduler side says
to have, and has no way back if a load fails. So the scheduler side reads and verifies outputs before it says so, while
the request waits, and sends them to the workers with the step. The first worker saves what its encoder computes.

An output is found by weights, settings, tenant and the content of the processed media, not by the name that a client
gives it.

An encoder has no fixed input that every model takes, so it is measured with what clients send. A server with other settings or
versions than those that filled a store begins a namespace of its own. The first time that it encodes media of which the store
has an output in another namespace of these weights, it compares the two: if they agree, it uses that namespace from then on.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from foreword.blocks.keys import Scope
from foreword.blocks.layout import ROOT_BYTES, Layout, chain_prefix
from foreword.errors import ConfigError, StoreError
from foreword.integrations.vllm.connector_config import ConnectorSettings
from foreword.integrations.vllm.namespace import (
    base_digest,
    log,
    settings_digest,
    tolerance,
    unmeasured,
)
from foreword.integrations.vllm.request_identity import framed, salt_of
from foreword.integrations.vllm.weight_changes import changes_weights
from foreword.integrations.vllm.weights import follow_engine
from foreword.integrations.vllm_extras.encoder_records import ENCODERS, EncoderRecord
from foreword.integrations.vllm_extras.media import MediaDigests
from foreword.store.background_jobs import BackgroundJobs
from foreword.store.frame import HEADER_BYTES, Frame, Header, seal
from foreword.store.layout_records import LAYOUTS, LayoutRecord
from foreword.store.shared_records import SharedRecords
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store, parse

_WRITE_TIMEOUT = 60.0
# A request waits so long for a read that the stores have promised. Encoding takes less.
_READ_SECONDS = 5.0
# An output that was read and not used for so long is dropped.
_UNUSED_SECONDS, _UNUSED_SECONDS_IF_FULL = 60.0, 1.0
# How often a server reads which namespaces there are, and with how many it compares.
_FOLLOW_SECONDS = 5.0
_MOST_OTHERS = 4
# A payload begins with the tensor's dtype and shape: 16 letters, then two uint32.
_SHAPE = struct.Struct("<16sII")


@dataclass(frozen=True, slots=True)
class OutputName:
    """Where an encoder output is stored: the namespace, the key of its frame, and the key before it, the root of its tenant."""

    model: bytes
    key: bytes
    parent: bytes


@dataclass(frozen=True, slots=True)
class EncoderOutput:
    """An encoder output, `[embeddings, width]`: dtype, shape, and its bytes."""

    dtype: str
    shape: tuple[int, int]
    data: bytearray

    def tensor(self, device: torch.device) -> torch.Tensor:
        """The output on a device. On a CPU it shares the memory."""
        flat = torch.frombuffer(self.data, dtype=torch.uint8)
        return flat.view(getattr(torch, self.dtype)).reshape(self.shape).to(device)


@dataclass(slots=True)
class ForewordECMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """Instructions for one step, by vLLM's identifier of the media: outputs to use, where to save computed ones, and where
    other namespaces may have them."""

    loads: dict[str, EncoderOutput] = field(default_factory=dict)
    saves: dict[str, OutputName] = field(default_factory=dict)
    others: dict[str, list[OutputName]] = field(default_factory=dict)


class EncoderStore:
    """Encoder outputs in stores. Raises ConfigError, ModelUnsupported, StoreError."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings) -> None:
        for url in map(parse, settings.store.urls):
            if url.codec != "raw" or not url.persistent:
                raise ConfigError(f"{url.shown}: encoder outputs need stores that processes share, without a codec")
        self._dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
        base = base_digest(vllm_config, settings.fingerprint)
        self.model = self._own = _encoder_digest(vllm_config, base)
        self._folder = ENCODERS.key(base.hex()[:32], "")
        self._store: TieredStore = open_store(settings.store.urls, keys=settings.keys())
        self._records = SharedRecords(self._store, ENCODERS, settings.store.lookup_timeout)
        self._settings = settings
        self._asked = 0.0
        self.others: list[bytes] = []

    def follow(self) -> None:
        """Read which namespaces these weights have, at most every few seconds: this server's, which its other process may have
        changed, and others to compare with. A store that fails changes nothing."""
        if time.monotonic() < self._asked + _FOLLOW_SECONDS:
            return
        self._asked = time.monotonic()
        try:
            found = self._records.scan(self._folder).values
        except StoreError:
            return
        known = {bytes.fromhex(key.rpartition("/")[2]): bytes.fromhex(one.model) for key, one in found.items()}
        self.model = known.get(self._own, self._own)
        self.others = sorted(known.keys() - {self._own, self.model})[:_MOST_OTHERS] if self.model == self._own else []

    def adopt(self, model: bytes) -> None:
        """From now on this server's outputs are those of this namespace."""
        self.model = model
        with contextlib.suppress(StoreError):  # the tier counts the error; the next output is compared again
            self._records.put(self._folder + self._own.hex(), EncoderRecord(model.hex()))

    def _layout(self, model: bytes) -> Layout:
        return Layout(model, 1, (), self._dtype, order="encoder")

    def name(self, request: Any, version: bytes, content: bytes, model: bytes) -> OutputName:
        root = Scope(model, 1, self._settings.current(salt_of(request))).root()
        return OutputName(model, sha256(root + framed(b"foreword/encoder", version, content)).digest(), root)

    def read(self, name: OutputName, rows: int | None, size: int) -> EncoderOutput | None:
        """The verified output with `rows` rows (None: any number); None if there is none. `size`: bytes that it has at most."""
        full, config = chain_prefix(self._layout(name.model).fingerprint, name.parent) + name.key, self._settings.store
        if not self._store.locate([full], deadline=time.monotonic() + config.lookup_timeout):
            return None
        buffer = memoryview(bytearray(HEADER_BYTES + _SHAPE.size + size))
        until = time.monotonic() + config.load_timeout
        found = self._store.fetch([full], [buffer], deadline=until, on_late=used_once)[0]
        output = _unpacked(found.frame.payload) if found is not None else None
        return output if output is not None and rows in (None, output.shape[0]) else None

    def pack(self, name: OutputName, output: torch.Tensor) -> Frame:
        """A frame with a copy of the output."""
        data = memoryview(output.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data)
        size = _SHAPE.size + data.nbytes
        buffer = memoryview(bytearray(HEADER_BYTES + size))
        dtype = str(output.dtype).removeprefix("torch.").encode()
        _SHAPE.pack_into(buffer, 0, dtype, *output.shape)
        buffer[_SHAPE.size : size] = data
        root = name.parent[:ROOT_BYTES]
        return seal(Header(self._layout(name.model).fingerprint, root, name.key, name.parent, 0, 0, size, size), buffer)

    def write(self, frame: Frame) -> None:
        self._store.put([frame], deadline=time.monotonic() + _WRITE_TIMEOUT)

    def describe(self, model: str) -> None:
        """Write the record that tells tools what these frames are. `model`: its name."""
        layout = self._layout(self._own)
        with contextlib.suppress(StoreError):  # the tier counts the error; outputs are found without the record
            record = LayoutRecord(model, layout.describe())
            SharedRecords(self._store, LAYOUTS).put(LAYOUTS.key(layout.fingerprint.hex()), record)
            if self._records.get(self._folder + self._own.hex()) is None:
                self.adopt(self._own)

    def close(self) -> None:
        self._store.close()


def _encoder_digest(vllm_config: Any, base: bytes) -> bytes:
    """The namespace of servers with exactly these weights, settings and versions."""
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    chosen = [getattr(media, name, None) for name in ("video_pruning_rate", "mm_encoder_attn_dtype")]
    parts = (str(one).encode() for one in chosen)
    return sha256(framed(b"foreword/encoder", unmeasured(base, settings_digest(vllm_config)), *parts)).digest()


def _unpacked(payload: memoryview) -> EncoderOutput | None:
    dtype, rows, width = _SHAPE.unpack_from(payload)
    kind = getattr(torch, dtype.rstrip(b"\x00").decode(), None)
    data = payload[_SHAPE.size :]
    if not isinstance(kind, torch.dtype) or len(data) != rows * width * kind.itemsize:
        return None
    return EncoderOutput(str(kind).removeprefix("torch."), (rows, width), bytearray(data))


@dataclass(slots=True)
class _Read:
    """An output that is being read, or was read and waits to be used.

    Attributes:
        name: where: the identifier of its media may be that of others in the next request.
        size: bytes of memory that it takes at most.
    """

    name: OutputName
    future: Future[EncoderOutput | None]
    size: int
    started: float = field(default_factory=time.monotonic)

    @property
    def output(self) -> EncoderOutput | None:
        return self.future.result() if self.future.done() else None

    @property
    def age(self) -> float:
        return time.monotonic() - self.started


class EncoderReader:
    """The scheduler side: reads what requests need, and says what is to be saved. Called from the engine's thread only."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings) -> None:
        self._store = EncoderStore(vllm_config, settings)
        # Read by another thread, the namespace changes at any time. It must not change while vLLM plans a step: what `has` has
        # said to be there would be missing in `allocated`, and vLLM ends at an output that is missing.
        self._model = self._store.model
        self._config = vllm_config
        self._patience = settings.store.lookup_timeout + min(settings.store.load_timeout, _READ_SECONDS)
        self._budget = settings.store.staging_bytes("cpu")
        self._media = MediaDigests()
        self._reads: dict[str, _Read] = {}
        self._in_vllm: set[str] = set()
        self._next = ForewordECMetadata()
        self._pool = BackgroundJobs("encoder", most=None, threads=4)
        lora = getattr(vllm_config, "lora_config", None)
        self._tower_adapters = bool(getattr(lora, "enable_tower_connector_lora", False))
        self._reach = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._version = settings.version_of(vllm_config)
        follow_engine(vllm_config, "set_weight_version", self._version.set)
        follow_engine(vllm_config, "reset_encoder_cache", self.reset)
        follow_engine(vllm_config, "collective_rpc", self.called_workers, before=True)
        self._pool.submit(self._store.describe, str(vllm_config.model_config.model))
        self._followed = self._pool.submit(self._store.follow)
        self._first_asked = 0.0
        self._knows = False

    def ready(self, request: Any, computed: int) -> bool:
        """Start to read what the request's next step may need. Whether all of it was read, or is known to be missing."""
        features = request.mm_features
        last = features[-1].mm_position
        if last.offset + last.length <= computed:
            return True
        if not self._knows_namespaces():
            return False
        ready = True
        for index, feature in enumerate(features):
            place = feature.mm_position
            if place.offset >= computed + self._reach:
                break
            if place.offset + place.length > computed and feature.identifier not in self._in_vllm:
                ready = self._is_read(request, index) and ready
        return ready

    def _knows_namespaces(self) -> bool:
        """Whether the namespaces of these weights were read at the start. The first requests wait for that, within their
        patience: under this server's own name they would miss, and their outputs would be compared with none."""
        if not self._knows:
            now = time.monotonic()
            self._first_asked = self._first_asked or now
            if self._followed.done() or now > self._first_asked + self._patience:
                self._knows, self._model = True, self._store.model
        return self._knows

    def _is_read(self, request: Any, index: int) -> bool:
        identifier = request.mm_features[index].identifier
        name, size = self._name(request, index, self._model), self._size(request, index)
        read = self._reads.get(identifier)
        if read is None or read.name != name:
            self._reads.pop(identifier, None)
            if name is None or not size:
                return True
            if not self._has_memory(size):
                return False
            rows = request.get_num_encoder_embeds(index)
            self._pool.submit(self._store.follow)
            read = self._reads[identifier] = _Read(name, self._pool.submit(self._store.read, name, rows, size), size)
        return read.future.done() or read.age > self._patience

    def _has_memory(self, size: int) -> bool:
        """Whether memory suffices for one more read. Outputs that were not used are dropped."""
        for limit in (_UNUSED_SECONDS, _UNUSED_SECONDS_IF_FULL):
            self._reads = {key: one for key, one in self._reads.items() if not one.future.done() or one.age < limit}
            if not self._reads or sum(one.size for one in self._reads.values()) + size <= self._budget:
                return True
        return False

    def _name(self, request: Any, index: int, model: bytes) -> OutputName | None:
        """In a namespace. None for what cannot be identified, or is no encoder's output."""
        feature = request.mm_features[index]
        if feature.modality == "prompt_embeds" or (self._tower_adapters and request.lora_request is not None):
            return None
        item = self._media.item(feature)
        return self._store.name(request, self._version.salt, item.content, model) if item is not None else None

    def _size(self, request: Any, index: int) -> int:
        """Bytes of an output; 0 if vLLM has not measured its width."""
        widths = self._config.ec_transfer_config.mm_encoder_output_widths
        width = widths.get(request.mm_features[index].modality, 0)
        return int(request.get_num_encoder_embeds(index) * width * self._config.model_config.dtype.itemsize)

    def has(self, identifier: str) -> bool:
        read = self._reads.get(identifier)
        return read is not None and read.output is not None

    def allocated(self, request: Any, index: int, *, saves: bool) -> None:
        """vLLM has allocated memory for an output: it will be loaded if it was read, else computed."""
        identifier = request.mm_features[index].identifier
        name, read = self._name(request, index, self._model), self._reads.pop(identifier, None)
        self._in_vllm.add(identifier)
        output = read.output if read is not None and read.name == name else None
        if output is not None:
            self._next.loads[identifier] = output
            return
        self._version.computed = True
        if name is not None and saves:
            self._next.saves[identifier] = name
            others = (self._name(request, index, model) for model in self._store.others)
            self._next.others[identifier] = [other for other in others if other is not None]

    def step(self, freed: list[str]) -> ForewordECMetadata:
        """The instructions for the step. `freed`: what vLLM drops from its own cache."""
        self._in_vllm.difference_update(freed)
        found, self._next, self._model = self._next, ForewordECMetadata(), self._store.model
        return found

    def reset(self) -> None:
        """The weights may have changed, and vLLM has dropped its own outputs."""
        self._version.reset()
        self._reads.clear()
        self._in_vllm.clear()

    def called_workers(self, core: Any, method: Any, *_: Any, **__: Any) -> None:
        """vLLM is about to call a method of its workers. It keeps the outputs that it has itself."""
        if changes_weights(method) and self._version.changed():
            self._reads.clear()

    def close(self) -> None:
        self._pool.stop()
        self._store.close()


class EncoderWriter:
    """The worker side: saves outputs in the background, while the queue has memory."""

    def __init__(self, vllm_config: Any, settings: ConnectorSettings) -> None:
        self._store = EncoderStore(vllm_config, settings)
        self._flush_seconds = settings.store.flush_seconds
        self._budget = settings.store.staging_bytes("cpu")
        self._pool = BackgroundJobs("encoder-save", most=None)
        self._queue: list[tuple[Future[None], int]] = []  # with the bytes of each; only vLLM's thread looks at it
        self._differ: set[bytes] = set()  # namespaces with other outputs

    def save(self, name: OutputName, output: torch.Tensor, others: Sequence[OutputName] = ()) -> None:
        """`others`: where other namespaces may have this output."""
        size = output.numel() * output.itemsize
        self._queue = [one for one in self._queue if not one[0].done()]
        if output.dim() != 2 or sum(queued for _, queued in self._queue) + size > self._budget:
            return
        written = self._pool.submit(self._write, self._store.pack(name, output), size, name, others)
        self._queue.append((written, size))

    def _write(self, frame: Frame, size: int, name: OutputName, others: Sequence[OutputName]) -> None:
        self._store.write(frame)
        written = _unpacked(frame.payload) if others and name.model == self._store.model else None
        if written is not None:
            self._compare(written, others, size)

    def _compare(self, written: EncoderOutput, others: Sequence[OutputName], size: int) -> None:
        """Use another namespace if it has the output that was just computed, and the two agree."""
        for other in others:
            theirs = self._store.read(other, None, size) if other.model not in self._differ else None
            if theirs is None or theirs.dtype != written.dtype:
                continue
            mine, known = (one.tensor(torch.device("cpu")).float() for one in (written, theirs))
            distance = (
                float((mine - known).norm() / known.norm().clamp(min=1e-30)) if mine.shape == known.shape else 1.0
            )
            if distance <= tolerance(written.dtype):
                self._store.adopt(other.model)
                log.info(
                    "Foreword: encoder outputs in the stores that a server with other settings or versions saved are used"
                )
                return
            self._differ.add(other.model)
            log.warning(
                "Foreword: encoder outputs that a server with other settings or versions saved are not used: distance %.2g",
                distance,
            )

    def close(self) -> None:
        """Write what is queued, within `flush_seconds`."""
        wait([future for future, _ in self._queue], self._flush_seconds)
        self._pool.stop()
        self._store.close()


class ForewordECConnector(ECConnectorBase):  # type: ignore[misc]
    """The connector. vLLM wants both roles in one class; each call goes to the scheduler side or to the worker side."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        settings = ConnectorSettings.read(vllm_config.ec_transfer_config.ec_connector_extra_config or {})
        parallel = vllm_config.parallel_config
        first = parallel.rank % parallel.tensor_parallel_size == 0  # all ranks have the same output
        writes = role == ECConnectorRole.WORKER and first and self.is_producer
        self._reader = EncoderReader(vllm_config, settings) if role == ECConnectorRole.SCHEDULER else None
        self._writer = EncoderWriter(vllm_config, settings) if writes else None

    @property
    def _scheduler(self) -> EncoderReader:
        assert self._reader is not None
        return self._reader

    # Scheduler side

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        return not self.is_consumer or self._scheduler.ready(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        self._scheduler.allocated(request, index, saves=self.is_producer)

    def build_connector_meta(self, scheduler_output: Any) -> ForewordECMetadata:
        return self._scheduler.step(scheduler_output.free_encoder_mm_hashes)

    # Worker side

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        for identifier, output in self._step().loads.items():
            encoder_cache[identifier] = output.tensor(_device())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        name = self._step().saves.get(mm_hash)
        if name is not None and self._writer is not None:
            self._writer.save(name, encoder_cache[mm_hash], self._step().others.get(mm_hash, ()))

    def _step(self) -> ForewordECMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ForewordECMetadata)
        return metadata

    # Both sides

    def shutdown(self) -> None:
        for side in (self._reader, self._writer):
            if side is not None:
                side.close()


def _device() -> torch.device:
    """The device that vLLM computes on."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, current_platform.current_device())
    return torch.device(current_platform.device_type)
