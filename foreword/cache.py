"""The KV cache as a library: KV of prefixes in stores, by the tokens that it belongs to; without an engine, torch or HTTP."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from hashlib import sha256
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from foreword.blocks.layout import Layout
from foreword.errors import BadRequest
from foreword.prefixes.erasure import Receipt, forget_chains
from foreword.store.engine_store import BATCH_BLOCKS, EngineStore
from foreword.store.frame import HEADER_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

_FIELD_NAME: Final = re.compile(":[^:]*:")  # in the format of a buffer
_LARGEST_BLOCK_TOKENS: Final = 2**32 - 1
# A batch is copied once before it is saved, and lies in memory once while it is loaded.
_BATCH_BYTES: Final = 32 << 20


class Cache:
    """KV of prefixes in stores, by the tokens that it belongs to.

    A block is the KV of `block_tokens` consecutive tokens, `block_bytes` bytes in any order that the engine likes. It is found
    by its tokens *and all tokens before them*, so equal text behind another start is another block. What is loaded was
    verified: it has the bytes that were saved for these tokens, this model and this tenant. A store that fails, is slow or has
    a damaged block finds, loads and saves less, and raises nothing. Any number of threads may use a cache, and any number of
    processes its stores.

    Args:
        stores: URLs, the fastest first: `memory://?size=1GiB`, `disk:///var/cache/kv?size=20GiB`, `redis://host:6379/0`.
        model: names the weights and everything else that KV depends on, such as its dtype and arrangement. Other names share
            no blocks.
        block_tokens: tokens per block.
        block_bytes: bytes of KV per block.
        tenant: whose KV it is. Tenants share no blocks.
        timeout: limit of each call in seconds. What is not found, loaded or saved by then is a miss.

    Raises:
        BadRequest: a size is no positive integer, the timeout no positive number, the model or the tenant no text.
        StoreError: a wrong URL, or a store that cannot be opened.

    After `close` every call but `close` raises BadRequest.
    """

    def __init__(
        self,
        *stores: str,
        model: str,
        block_tokens: int,
        block_bytes: int,
        tenant: str = "",
        timeout: float = 10.0,
    ) -> None:
        self.block_tokens = _size("block_tokens", block_tokens, _LARGEST_BLOCK_TOKENS)
        self.block_bytes = _size("block_bytes", block_bytes)
        if not model:
            raise BadRequest("the model has no name: KV of different models must never be mixed up", param="model")
        for url in stores:
            if not isinstance(url, str):
                raise BadRequest(
                    f"a store is {url!r}; give URLs one by one, each a text: Cache('memory://', 'disk:///var/cache/kv')",
                    param="stores",
                )
        self._timeout = _seconds("timeout", timeout)
        self._open = True
        digest = sha256(b"foreword/cache\x00" + _encoded("model", model)).digest()
        layout = Layout(digest, self.block_tokens, (), "uint8", order="opaque", opaque_bytes=self.block_bytes)
        self._blocks = EngineStore(layout, stores, _encoded("tenant", tenant))
        self._model = model

    def __repr__(self) -> str:
        tiers = ", ".join(tier.label for tier in self._blocks.store.tiers)
        return f"Cache({self._model!r}, blocks of {self.block_tokens} tokens and {self.block_bytes:,} bytes; {tiers})"

    def find(self, tokens: Sequence[int]) -> int:
        """How many of the leading tokens the stores have KV for, a multiple of `block_tokens`. Nothing is read or verified."""
        return self._blocks.find(self._keys(tokens), self._deadline()) * self.block_tokens

    def load(self, tokens: Sequence[int]) -> list[memoryview]:
        """The verified KV of the leading blocks of these tokens, up to the first that the stores do not have."""
        keys, deadline = self._keys(tokens), self._deadline()
        found: list[memoryview] = []
        left = keys[: self._blocks.find(keys, deadline)]
        while batch := left[: self._batch]:
            rows = self._rows(len(batch))
            count = self._blocks.load(batch, rows, deadline)
            found += [row[: self.block_bytes].toreadonly() for row in rows[:count]]
            if count < len(batch):
                break
            left = left[len(batch) :]
        return found

    def save(self, tokens: Sequence[int], blocks: Sequence[Buffer], *, first: int = 0) -> bool:
        """Save the KV of consecutive full blocks of these tokens, from block number `first` on. It is copied, and in the stores
        when the call returns, except where a store is full, fails, or is configured to wait. False if the time was over before
        all were given to the stores.

        Raises BadRequest for more blocks than the tokens fill, and for a block of another size or without contiguous bytes;
        blocks before it may have been saved.
        """
        keys, deadline = self._keys(tokens), self._deadline()
        if first < 0 or first + len(blocks) > len(keys):
            raise BadRequest(
                f"{len(tokens)} tokens fill {len(keys)} blocks of {self.block_tokens}; got blocks {first} to"
                f" {first + len(blocks) - 1}",
                param="blocks",
            )
        for low, batch in self._batches(blocks):
            rows = self._rows(len(batch))
            for number, (row, block) in enumerate(zip(rows, batch, strict=True), first + low):
                row[: self.block_bytes] = _bytes_of(block, number, self.block_bytes)
            if not self._blocks.save(keys, first + low, rows, deadline):
                return False
        self._check_open()  # what was given to a store that another thread has closed may be lost
        return True

    def keep(self, tokens: Sequence[int]) -> int:
        """Let no store evict the leading blocks of these tokens, until `release`. Returns the tokens that are kept: stores keep
        no more than a part of their size, and what they do not have is not kept."""
        return self._pin(tokens, pinned=True)

    def release(self, tokens: Sequence[int]) -> int:
        """Let stores evict these blocks again. Returns the tokens that are no longer kept."""
        return self._pin(tokens, pinned=False)

    def forget(self, tokens: Sequence[int] | None = None) -> Receipt:
        """Erase the KV of these tokens from all stores: of their full blocks those that no other stored prefix needs, and all
        that continues them. Without tokens: all KV of this model, block size and tenant. Other processes may still write, which
        the receipt then says. Raises BadRequest for tokens that fill no block."""
        self._check_open()
        keys = None if tokens is None else self._keys(tokens)
        if keys == []:
            raise BadRequest(f"these tokens fill no block of {self.block_tokens}", param="tokens")
        return forget_chains(self._blocks.store, self._blocks.layout, self._blocks.root, keys or ())

    def close(self) -> None:
        """Write what stores still have to write, and close them."""
        self._open = False
        self._blocks.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._open:
            raise BadRequest("this cache is closed; open another one on the same stores")

    def _keys(self, tokens: Sequence[int]) -> list[bytes]:
        self._check_open()
        if isinstance(tokens, Set | Mapping):
            raise BadRequest(f"tokens are in the order of the text; a {type(tokens).__name__} has none", param="tokens")
        return self._blocks.keys(tokens)

    @property
    def _batch(self) -> int:
        return max(min(BATCH_BLOCKS, _BATCH_BYTES // self.block_bytes), 1)

    def _batches(self, blocks: Sequence[Buffer]) -> Iterator[tuple[int, Sequence[Buffer]]]:
        for low in range(0, len(blocks), self._batch):
            yield low, blocks[low : low + self._batch]

    def _rows(self, count: int) -> list[memoryview]:
        """Memory for blocks, each with room for its header."""
        size = self.block_bytes + HEADER_BYTES
        memory = memoryview(bytearray(count * size))
        return [memory[low : low + size] for low in range(0, len(memory), size)]

    def _pin(self, tokens: Sequence[int], *, pinned: bool) -> int:
        deadline = self._deadline()
        keys = self._keys(tokens)
        names = self._blocks.names(keys[: self._blocks.find(keys, deadline)])
        return self._blocks.store.pin(names, pinned=pinned, deadline=deadline) * self.block_tokens if names else 0

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout


def _size(name: str, value: int, most: int | None = None) -> int:
    """A size as an `int`, also one of numpy. Raises BadRequest."""
    try:
        size = operator.index(value)
    except TypeError:
        raise BadRequest(f"{name} is {value!r}; it must be an integer", param=name) from None
    if size < 1 or (most is not None and size > most):
        limit = "at least 1" if most is None else f"from 1 to {most}"
        raise BadRequest(f"{name} is {size}; it must be {limit}", param=name)
    return size


def _seconds(name: str, value: float) -> float:
    """A time as a `float`, also one of numpy. Raises BadRequest."""
    try:
        if not isinstance(value, str | bytes | bool) and float(value) > 0:
            return float(value)
    except (TypeError, ValueError):
        pass
    raise BadRequest(f"{name} is {value!r}; it must be a number of seconds above 0", param=name)


def _encoded(name: str, text: str) -> bytes:
    """Raises BadRequest for what is no text of Unicode characters."""
    try:
        return text.encode()
    except (AttributeError, UnicodeEncodeError):
        raise BadRequest(f"{name} is {text!r}; it must be a text", param=name) from None


def _bytes_of(block: Buffer, number: int, length: int) -> memoryview:
    """The bytes of a block, without a copy. Raises BadRequest.

    An array of Python objects has a contiguous buffer, too: of addresses, which say nothing in another process.
    """
    try:
        data = memoryview(block)
        if "O" in _FIELD_NAME.sub("", data.format):
            raise TypeError("its items are Python objects, which have no bytes of their own")
        if data.nbytes == length:
            return data.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise BadRequest(
            f"block {number}, a {type(block).__name__}, has no contiguous bytes: {error}. Give bytes or an array in C order; of"
            " a tensor on the CPU tensor.contiguous().view(torch.uint8).numpy()",
            param="blocks",
        ) from None
    raise BadRequest(f"block {number} has {data.nbytes} bytes, not {length}", param="blocks")
