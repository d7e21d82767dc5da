"""A cache for llama-cpp-python over Foreword's stores: a prefix is computed once, for several processes and after restarts.

    llm = Llama("model.gguf", n_ctx=8192)
    llm.set_cache(ForewordCache(llm, "disk:///var/cache/foreword?size=20GiB"))

llama.cpp writes a state layer by layer: K of all tokens, and then V, which is transposed without flash attention. Each is an
array `[rows, tokens, bytes]`. So a state is cut into blocks of tokens. Some blocks make a state again, which llama.cpp loads as
another sequence; its cells then become cells of the first one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, cast

import llama_cpp
import numpy as np

from foreword.blocks.layout import Layout
from foreword.errors import BadRequest, ModelUnsupported, StoreError
from foreword.integrations.tensor_files import file_digest
from foreword.store.engine_store import BATCH_BLOCKS, EngineStore
from foreword.store.frame import HEADER_BYTES
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TieredStore

log = logging.getLogger(__name__)

BLOCK_SIZE = 32
# Bytes per call of the store that loads blocks.
_BATCH_BYTES = 8 << 20
_OTHER_SEQUENCE = 1
_PROBE_TOKENS = 32
# Parameters of a context that change KV. What else does, such as the device or an adapter, the probe shows.
_PARAMETERS = (
    "rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast",
    "yarn_beta_slow", "yarn_orig_ctx", "attention_type", "flash_attn_type",
)  # fmt: skip
_SPLIT: Final = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class _Part:
    """K or V of one layer in a state: `head`, which llama.cpp writes before it, and then `[rows, tokens, width]` bytes."""

    head: bytes
    rows: int
    width: int


class _UnknownState(Exception):
    """A state that is not what `_read` knows."""


def _read(state: memoryview) -> tuple[list[list[_Part]], list[Bytes], int]:
    """The parts of a state by cache (a model with windows has two), the array of each part, and the number of tokens, which are
    those from position 0 on. Raises _UnknownState."""
    caches: list[list[_Part]] = []
    arrays: list[Bytes] = []
    at, counts = 0, set()
    try:
        while at < len(state):
            streams, tokens = struct.unpack_from("<2I", state, at)
            cells = np.frombuffer(state, "<i4", 3 * tokens, at + 8).reshape(tokens, 3)
            if streams != 1 or not np.array_equal(cells, _cells(0, tokens)):
                raise _UnknownState("other sequences or positions")
            counts.add(tokens)
            begin = at + 8 + cells.nbytes
            transposed, layers = struct.unpack_from("<2I", state, begin)
            at = begin + 8
            caches.append([])
            for number in range(2 * layers):
                rows = 1
                if number < layers or not transposed:
                    _, width = struct.unpack_from("<iQ", state, at)
                else:
                    _, width, rows = struct.unpack_from("<iII", state, at)
                at += 12
                caches[-1].append(_Part(bytes(state[begin:at]), rows, width))
                part = np.frombuffer(state, np.uint8, rows * tokens * width, at)
                arrays.append(part.reshape(rows, tokens, width))
                begin = at = at + part.nbytes
    except (struct.error, ValueError) as error:
        raise _UnknownState(str(error)) from error
    if len(counts) != 1:
        raise _UnknownState("the caches of this model have different tokens")
    return caches, arrays, counts.pop()


def _cells(first: int, tokens: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Position, number of sequences, and sequence of each token from position `first` on."""
    cells = np.zeros((tokens, 3), "<i4")
    cells[:, 0] = np.arange(first, first + tokens)
    cells[:, 1] = 1
    return cells


@dataclass(frozen=True, slots=True)
class _StateFormat:
    """How this llama.cpp writes the state of this model.

    Attributes:
        whole: what is before the caches in the state of a context (`save_state`).
        sequence: what is before them in the state of a sequence.
        caches: as `_read` returns them.
    """

    whole: bytes
    sequence: bytes
    caches: list[list[_Part]]

    @property
    def token_bytes(self) -> int:
        return sum(part.rows * part.width for parts in self.caches for part in parts)

    def cut(self, state: bytes) -> tuple[list[Bytes], int]:
        """The arrays and the number of tokens of a context's state. Raises _UnknownState."""
        if not state.startswith(self.whole):
            raise _UnknownState("the state of another model")
        caches, arrays, tokens = _read(memoryview(state)[len(self.whole) :])
        if caches != self.caches:
            raise _UnknownState("the state of another model or other settings")
        return arrays, tokens

    def join(self, payloads: Bytes, size: int, first: int) -> Bytes:
        """The state of a sequence whose blocks, of `size` tokens, are the rows of `payloads`, from position `first` on."""
        blocks, tokens, at, offset = len(payloads), len(payloads) * size, 0, 0
        cells = struct.pack("<2I", 1, tokens) + _cells(first, tokens).tobytes()
        heads = len(self.sequence) + sum(len(cells) + sum(len(part.head) for part in one) for one in self.caches)
        state = np.empty(heads + tokens * self.token_bytes, np.uint8)

        def write(data: bytes) -> None:
            nonlocal at
            state[at : at + len(data)] = np.frombuffer(data, np.uint8)
            at += len(data)

        write(self.sequence)
        for parts in self.caches:
            write(cells)
            for part in parts:
                write(part.head)
                run = size * part.width
                end, after = at + blocks * part.rows * run, offset + part.rows * run
                _runs(state[at:end], part.rows, blocks, run)[:] = _runs(
                    payloads[:, offset:after], blocks, part.rows, run
                ).T
                at, offset = end, after
        return state


def _payloads(arrays: Sequence[Bytes], low: int, high: int, size: int, spare: int = 0) -> Bytes:
    """The payloads of blocks `low` to `high`, one per row, with `spare` bytes behind each."""
    width = size * sum(len(array) * array.shape[2] for array in arrays)
    found, offset = np.empty((high - low, width + spare), np.uint8), 0
    for array in arrays:
        rows, run = len(array), size * array.shape[2]
        part = _runs(array[:, low * size : high * size], rows, high - low, run)
        _runs(found[:, offset : offset + rows * run], high - low, rows, run)[:] = part.T
        offset += rows * run
    return found


def _runs(data: Bytes, rows: int, columns: int, run: int) -> np.ndarray[Any, Any]:
    """A view `[rows, columns]` of runs of bytes, which numpy copies faster than single ones."""
    runs: np.ndarray[Any, Any] = data.reshape(rows, columns, run).view(np.dtype((np.void, run)))[..., 0]
    return runs


class ForewordCache(llama_cpp.BaseLlamaCache):  # type: ignore[misc]
    """A cache of llama-cpp-python: `llm.set_cache(ForewordCache(llm, store))`.

    Before a completion, the blocks of its prompt that the stores have and the model's context has not are loaded straight into
    the context. Afterwards each full block that the stores do not have is saved. A store that fails or is slow saves and loads
    less and raises no error.

    Args:
        llm: the `Llama` that gets this cache, whose layers all keep keys and values. Its context is cleared. Weights, adapters
            and settings must not change afterwards.
        store: one URL, several (the fastest first), or an open `TieredStore`, which the caller closes.
        block_size: tokens per block. Only caches with the same one share blocks.
        salt: of the tenant; blocks with different salts are never shared.
        timeout: limit of each load and each save in seconds.

    Attributes:
        loaded_tokens: tokens of the last prompt that were loaded from the stores.
        lookups: how many prompts were looked up, by outcome.
        unsaved: how many states were not saved, by reason.

    Raises:
        BadRequest: a block has less than a token.
        ModelUnsupported: the state of this model cannot be cut by tokens, or it may not be reused.
        StoreError: a wrong URL.
    """

    def __init__(
        self,
        llm: Any,
        store: str | Sequence[str] | TieredStore,
        *,
        block_size: int = BLOCK_SIZE,
        salt: bytes = b"",
        timeout: float = 10.0,
    ) -> None:
        if block_size < 1:
            raise BadRequest(f"block_size is {block_size}; a block has at least one token", param="block_size")
        _check(llm)
        self._llm = llm
        self._timeout = timeout
        self._format, fingerprint = _measure(llm)
        length = block_size * self._format.token_bytes
        layout = Layout(fingerprint, block_size, (), "uint8", order="llama.cpp", opaque_bytes=length)
        self._chains = EngineStore(layout, store, salt)
        self.store = self._chains.store
        super().__init__(self.store.status().budget)
        self.loaded_tokens = 0
        self.lookups = self._chains.lookups
        self.unsaved: Counter[str] = Counter()

    @property
    def saved_blocks(self) -> int:
        """How many blocks were saved."""
        return self._chains.saved_blocks

    @property
    def cache_size(self) -> int:
        """Bytes in the stores, 0 if they do not answer."""
        with contextlib.suppress(StoreError):
            return self.store.status().bytes
        return 0

    def __contains__(self, key: Sequence[int]) -> bool:
        """Whether the stores seem to have the first block of these tokens."""
        names = self._chains.names(self._chains.keys(key)[:1])
        return bool(self.store.lookup(names, deadline=time.monotonic() + self._timeout))

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Load the longest stored prefix of a prompt into the model. Its last token is always computed.

        Returns a `LlamaState` of the tokens that the context has now, without data, which `load_state` refuses. Raises KeyError
        if nothing was loaded.
        """
        self.loaded_tokens = self._load(list(key))
        log.info("%d of %d tokens loaded from the stores", self.loaded_tokens, len(key))
        if not self.loaded_tokens:
            raise KeyError("not in the stores")
        tokens = np.array(key[: self._llm.n_tokens], np.intc)
        return llama_cpp.LlamaState(tokens, np.empty((0, 0), np.single), len(tokens), b"", 0, 0)

    def __setitem__(self, key: Sequence[int], value: Any) -> None:
        """Save the full blocks of the state that the model has now, with the tokens that the state names."""
        deadline = time.monotonic() + self._timeout
        tokens = value.input_ids[: value.n_tokens].tolist()
        try:
            if _sees_images():
                raise _UnknownState("images")
            if self._present(tokens) < max(len(tokens), self._llm.n_tokens):
                raise _UnknownState("the state of another model")
            arrays, count = self._format.cut(value.llama_state)
        except _UnknownState as reason:
            self.unsaved[str(reason)] += 1
            return
        keys, size = self._chains.keys(tokens[:count]), self._chains.layout.block_size
        known = self.store.lookup(self._chains.names(keys), deadline=deadline)
        for low in range(known, len(keys), BATCH_BLOCKS):
            payloads = _payloads(arrays, low, min(low + BATCH_BLOCKS, len(keys)), size, HEADER_BYTES)
            if not self._chains.save(keys, low, _rows(payloads), deadline):
                self.unsaved["no time was left"] += 1
                return

    def close(self) -> None:
        """Close the stores, unless the caller opened them."""
        self._chains.close()

    def _load(self, tokens: list[int]) -> int:
        """How many tokens were loaded."""
        size, deadline = self._chains.layout.block_size, time.monotonic() + self._timeout
        keys = self._chains.keys(tokens[:-1])
        if _sees_images() and keys:
            self.lookups[LookupOutcome.NOT_ALLOWED] += 1
            return 0
        known = self._present(tokens) // size
        if keys and len(keys) <= known:
            return 0
        found = self._chains.find(keys, deadline)
        length = HEADER_BYTES + self._chains.layout.block_bytes
        # Fresh memory is slow: it is used again after a batch that was read as a whole, when nothing more is written into it.
        memory, end = np.empty((max(min(_BATCH_BYTES // length, found - known), 1), length), np.uint8), known
        while end < found:
            asked = keys[end : min(end + len(memory), found)]
            count = self._chains.load(asked, _rows(memory[: len(asked)]), deadline)
            payloads = memory[:count, :-HEADER_BYTES]
            if not count or not _append(self._llm, self._format.join(payloads, size, end * size), end * size):
                break
            end += count
            _hold(self._llm, tokens[: end * size])
            if count < len(asked):
                break
        return (end - known) * size

    def _present(self, tokens: Sequence[int]) -> int:
        """How many of these tokens the model's context begins with."""
        count = min(len(tokens), self._llm.n_tokens)
        other = np.flatnonzero(self._llm.input_ids[:count] != np.array(tokens[:count], np.intc))
        return int(other[0]) if len(other) else count


def _rows(memory: Bytes) -> list[memoryview]:
    return [memoryview(cast(Any, row)) for row in memory]


def _sees_images() -> bool:
    """Whether a model of this process may see images. Its tokens then do not say what its KV is of."""
    return "llama_cpp.mtmd_cpp" in sys.modules


def _check(llm: Any) -> None:
    """Raises ModelUnsupported for models whose prefixes cannot be reused, or not without computing them."""
    reasons = {
        "it keeps a recurrent state, which is not of single tokens": llama_cpp.llama_model_is_recurrent(llm.model)
        or llama_cpp.llama_model_is_hybrid(llm.model),
        "its decoder's KV depends on what its encoder has read": llama_cpp.llama_model_has_encoder(llm.model),
        "it was loaded for embeddings; load it with embedding=False": llm.context_params.embeddings,
        "it keeps the logits of all tokens, which are not stored; load it with logits_all=False, and without a draft model": (
            llm._logits_all
        ),
        "a model of this process sees images, which its tokens do not name": _sees_images(),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ModelUnsupported(f"prefixes of this model cannot be cached: {reason}")


def _measure(llm: Any) -> tuple[_StateFormat, bytes]:
    """The format of a model's state, which is tried out, and the fingerprint of the model: of its weights, what changes KV in
    its settings, and the KV of a probe. Clears the context. Raises ModelUnsupported."""
    files = _weights(Path(llm.model_path))
    adapter = Path(llm.lora_path).resolve() if llm.lora_path else None
    settings = {
        "parameters": {name: getattr(llm.context_params, name) for name in _PARAMETERS},
        "overrides": llm.kv_overrides,
        "adapter": [file_digest(adapter).hex(), llm.lora_scale] if adapter else None,
    }
    _clear(llm)
    llm.eval([(37 * number + 1) % llm.n_vocab() for number in range(min(_PROBE_TOKENS, len(llm.input_ids)))])
    try:
        state = _state(llm)
        whole = state[: 4 + int.from_bytes(state[:4], "little")]
        caches, arrays, tokens = _read(memoryview(state)[len(whole) :])
        found = _StateFormat(whole, _sequence_head(llm), caches)
        _clear(llm)
        half = tokens // 2
        for low, high in ((0, half), (half, tokens)):
            if not _append(llm, found.join(_payloads(arrays, low, high, 1), 1, low), low):
                raise _UnknownState("it cannot be loaded")
        if _state(llm) != state:
            raise _UnknownState("it is not the same once it was loaded")
    except _UnknownState as error:
        raise ModelUnsupported(f"the state that llama.cpp keeps of this model is not known: {error}") from error
    finally:
        _clear(llm)
    digest = sha256(b"foreword/llama.cpp\x00" + json.dumps(settings, sort_keys=True, default=str).encode())
    for part in (*map(file_digest, files), sha256(state).digest()):
        digest.update(part)
    return found, digest.digest()


def _weights(path: Path) -> list[Path]:
    """The files of a model, in order: a GGUF may be split."""
    split = _SPLIT.search(path.name)
    if split is None:
        return [path]
    stem, count = path.name[: split.start()], int(split[1])
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _clear(llm: Any) -> None:
    llm._ctx.kv_cache_clear()
    llm.reset()


def _state(llm: Any) -> bytes:
    """The state of a context."""
    buffer = (ctypes.c_uint8 * llama_cpp.llama_state_get_size(llm.ctx))()
    written = llama_cpp.llama_state_get_data(llm.ctx, buffer, len(buffer))
    return bytes(buffer)[:written]


def _sequence_head(llm: Any) -> bytes:
    """The bytes before the caches in the state of a sequence: a mark and its number, 8 bytes."""
    buffer = (ctypes.c_uint8 * llama_cpp.llama_state_seq_get_size(llm.ctx, 0))()
    llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, len(buffer), 0)
    return bytes(buffer[:8])


def _append(llm: Any, state: Bytes, first: int) -> bool:
    """Replace what a context has from position `first` on by the state of a sequence. False if llama.cpp refuses it."""
    llm._ctx.kv_cache_seq_rm(0, first, -1)
    buffer = (ctypes.c_uint8 * len(state)).from_buffer(cast(Any, state))
    done = llama_cpp.llama_state_seq_set_data(llm.ctx, buffer, len(state), _OTHER_SEQUENCE) == len(state)
    if done:
        llm._ctx.kv_cache_seq_cp(_OTHER_SEQUENCE, 0, -1, -1)
    llm._ctx.kv_cache_seq_rm(_OTHER_SEQUENCE, -1, -1)
    llm.n_tokens = min(llm.n_tokens, first)
    return bool(done)


def _hold(llm: Any, tokens: Sequence[int]) -> None:
    """A context has these tokens now."""
    llm.input_ids[: len(tokens)] = tokens
    llm.n_tokens = len(tokens)
    llm._requires_eval = True  # its logits are not those of the last token
