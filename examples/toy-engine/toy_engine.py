"""A toy engine over Foreword's stores, as docs/guides/own-engine.md describes it: identity, groups, positions, copy, events.

Its model is a small random network in numpy with two KV groups, as hybrid models have them: keys and values of all tokens, in
blocks of 8 tokens, and a recurrent state, of which the blocks keep what it was after each 16 tokens.

    python toy_engine.py disk:///tmp/toy?size=1GiB "The quick brown fox jumps over the lazy dog."      # twice
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.layout import ROOT_BYTES, LayerLayout, Layout
from foreword.blocks.resume import GroupKind, KVGroup, alignment
from foreword.blocks.salt import Salt
from foreword.conformance.engine_contract import EngineRun
from foreword.errors import StoreError
from foreword.offload.search import StoredGroup, find_resumable
from foreword.store.base import Name
from foreword.store.frame import HEADER_BYTES, RAW, Header, frame
from foreword.store.layout_records import LAYOUTS, LayoutRecord
from foreword.store.shared_records import SharedRecords
from foreword.store.store_keys import keys_from_environment
from foreword.store.tier import used_once
from foreword.store.tiered import TieredStore, TierSearch
from foreword.store.urls import open_store

if TYPE_CHECKING:
    from foreword.store.key_interfaces import StoreKeys

Array = np.ndarray[Any, np.dtype[np.float32]]
log = logging.getLogger("toy")

WIDTH, HEADS, DIM, VOCABULARY = 32, 2, 8, 256
GROUPS = (KVGroup(GroupKind.FULL, 8), KVGroup(GroupKind.STATE, 16))
LOOKUP_SECONDS, LOAD_SECONDS = 2.0, 5.0


class Model:
    """A random network: each token changes a state, and has a key and a value that follow from the state."""

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        shapes = ((VOCABULARY, WIDTH), (WIDTH, WIDTH), (2, WIDTH, HEADS * DIM), (HEADS * DIM + WIDTH, VOCABULARY))
        self.weights = [draw.standard_normal(shape).astype(np.float32) for shape in shapes]

    def step(self, state: Array, token: int) -> tuple[Array, Array, Array]:
        """The next state, and the token's key and value, `[HEADS, DIM]` each."""
        embedding, recurrence, projections, _ = self.weights
        state = np.tanh(state @ recurrence * np.float32(0.2) + embedding[token])
        key, value = ((state @ one).reshape(HEADS, DIM) for one in projections)
        return state, key, value

    def next_token(self, state: Array, keys: Array, values: Array) -> int:
        """Attention of the last key over all keys, and the most likely token after it."""
        scores = np.einsum("thd,hd->ht", keys, keys[-1]) / np.float32(DIM**0.5)
        scores = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed = np.einsum("ht,thd->hd", scores / scores.sum(axis=1, keepdims=True), values)
        return int((np.concatenate([mixed.ravel(), state]) @ self.weights[3]).argmax())

    @property
    def fingerprint(self) -> bytes:
        """Of the content of the weights, and of the program whose results may have other bits."""
        digest = sha256(f"toy engine 1, numpy {np.__version__}".encode())
        for one in self.weights:
            digest.update(one.tobytes())
        return digest.digest()


class Prompt:
    """One prompt in the engine."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.state: Array = np.zeros(WIDTH, np.float32)
        self.keys: Array = np.zeros((len(tokens), HEADS, DIM), np.float32)
        self.values: Array = np.zeros((len(tokens), HEADS, DIM), np.float32)
        self.states: dict[int, Array] = {}  # by the number of tokens before
        self.length = 0

    def block(self, group: int, end: int) -> bytes:
        """The bytes of the block that ends after `end` tokens, in the order that the layout names."""
        if GROUPS[group].kind is GroupKind.STATE:
            return self.states[end].tobytes()
        part = slice(end - GROUPS[group].block_size, end)
        return self.keys[part].tobytes() + self.values[part].tobytes()

    def set_block(self, group: int, end: int, data: bytes | memoryview) -> None:
        found = np.frombuffer(data, np.float32)
        if GROUPS[group].kind is GroupKind.STATE:
            self.states[end] = self.state = found.copy()
            return
        size = GROUPS[group].block_size
        keys, values = found.reshape(2, size, HEADS, DIM)
        self.keys[end - size : end], self.values[end - size : end] = keys, values


class ToyEngine:
    """Computes prompts, and keeps their KV in the stores."""

    def __init__(self, store: TieredStore, seed: int = 0, keys: StoreKeys | None = None) -> None:
        self.model, self._store, self._keys = Model(seed), store, keys
        # Identity: the weights' content names the model; a layout says what the bytes of a block mean.
        self._fingerprint = self.model.fingerprint
        layer, state = LayerLayout(HEADS, DIM, DIM), {"order": "state", "opaque_bytes": 4 * WIDTH}
        self._layouts = [
            Layout(self._fingerprint, GROUPS[0].block_size, (layer,), "float32", group="0"),
            Layout(self._fingerprint, GROUPS[1].block_size, (), "float32", group="1", **state),  # type: ignore[arg-type]
        ]
        # Positions: a key for each 8 tokens; a state is kept under the key at which it ends.
        self._key_size = GROUPS[0].block_size
        self._stored = [
            StoredGroup(group, (layout.fingerprint,), group.block_size // self._key_size)
            for group, layout in zip(GROUPS, self._layouts, strict=True)
        ]
        for group, layout in zip(GROUPS, self._layouts, strict=True):
            record = LayoutRecord(
                "toy", layout.describe(), self._fingerprint.hex(), group.kind, key_size=self._key_size
            )
            try:
                SharedRecords(store, LAYOUTS).put(LAYOUTS.key(layout.fingerprint.hex()), record)
            except StoreError as error:  # tools miss it; blocks are found all the same
                log.warning("the layout is not recorded: %s", error.message)

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        """Compute a prompt and save its blocks."""
        sequence, cached = self._prefill(tokens, tenant)
        kv = {
            (number, end): sequence.block(number, end)
            for number, group in enumerate(GROUPS)
            for end in range(group.block_size, len(tokens) + 1, group.block_size)
            if group.whole or end in sequence.states
        }
        return EngineRun(cached, kv)

    def generate(self, tokens: Sequence[int], count: int, tenant: str = "") -> tuple[list[int], int]:
        """The next `count` tokens, and how many of the prompt's were cached."""
        sequence, cached = self._prefill(tokens, tenant)
        made: list[int] = []
        while len(made) < count:
            made.append(self.model.next_token(sequence.state, sequence.keys, sequence.values))
            sequence.state, key, value = self.model.step(sequence.state, made[-1])
            sequence.keys = np.concatenate([sequence.keys, key[None]])
            sequence.values = np.concatenate([sequence.values, value[None]])
        return made, cached

    def _prefill(self, tokens: Sequence[int], tenant: str) -> tuple[Prompt, int]:
        salt = tenant.encode() if self._keys is None else self._keys.current(tenant.encode())
        root = Scope(self._fingerprint, self._key_size, Salt(salt)).root()
        keys = chain_keys(root, tokens, self._key_size)
        sequence = Prompt(tokens)
        self._load(sequence, root, keys)
        cached = sequence.length
        for number in range(cached, len(tokens)):
            sequence.state, sequence.keys[number], sequence.values[number] = self.model.step(
                sequence.state, tokens[number]
            )
            if (number + 1) % GROUPS[1].block_size == 0:
                sequence.states[number + 1] = sequence.state
        sequence.length = len(tokens)
        self._save(sequence, root, keys, cached)
        return sequence, cached

    def _load(self, sequence: Prompt, root: bytes, keys: Sequence[bytes]) -> None:
        """Load the longest prefix from which every group can continue. The last token is always computed."""
        search = TierSearch(time.monotonic() + 2 * LOOKUP_SECONDS, LOOKUP_SECONDS, LOOKUP_SECONDS)
        limit = (len(sequence.tokens) - 1) // alignment(GROUPS) * alignment(GROUPS)
        found = find_resumable(self._store, self._stored, root, keys, 0, limit, search)
        loaded: dict[tuple[int, int], memoryview] = {}
        wanted = list(found.places)  # (group, block)
        names, rows = [], []
        for number, block in wanted:
            names += self._stored[number].names(root, self._stored[number].keys(keys, [block]))
            rows.append(memoryview(bytearray(self._layouts[number].block_bytes + HEADER_BYTES)))
        deadline = time.monotonic() + LOAD_SECONDS
        # Copy: `fetch` has verified what it gives; only then it goes into the engine's own memory.
        blocks = self._store.fetch(names, rows, deadline=deadline, on_late=used_once) if names else []
        for (number, block), one in zip(wanted, blocks, strict=True):
            if (
                one is None
                or one.frame.header.codec != RAW
                or len(one.frame.payload) != self._layouts[number].block_bytes
            ):
                return  # one block is missing, so the position is not resumable: all is computed
            loaded[number, (block + 1) * GROUPS[number].block_size] = one.frame.payload
        for (number, end), payload in loaded.items():
            sequence.set_block(number, end, payload)
        sequence.length = found.position

    def _save(self, sequence: Prompt, root: bytes, keys: Sequence[bytes], cached: int) -> None:
        """Save every full block behind what was loaded, in chain order. A store that fails saves fewer."""
        for number, (group, layout) in enumerate(zip(GROUPS, self._layouts, strict=True)):
            per_block = group.block_size // self._key_size
            frames = []
            for end in range(cached + group.block_size, len(sequence.tokens) + 1, group.block_size):
                at = end // self._key_size
                parent = keys[at - per_block - 1] if at > per_block else root
                data = sequence.block(number, end)
                facts = layout.fingerprint, root[:ROOT_BYTES], keys[at - 1], parent, at // per_block - 1
                frames.append(frame(Header(*facts, RAW, len(data), len(data), number), data))
            if frames:
                self._store.put(frames, deadline=time.monotonic() + LOAD_SECONDS)


def note(tier: int, stored: bool, names: Sequence[Name]) -> None:
    """Events: what this process has stored in a tier, or removed from it. A router would learn it."""
    print(f"tier {tier}: {len(names)} blocks {'stored' if stored else 'removed'}", file=sys.stderr)


def main() -> None:
    url, text = sys.argv[1:]
    keys = keys_from_environment()
    with closing(open_store([url], keys=keys)) as store:
        store.subscribe(note)
        made, cached = ToyEngine(store, keys=keys).generate(list(text.encode()), 8)
        print(f"{cached} of {len(text.encode())} tokens were cached; next tokens: {made}")


if __name__ == "__main__":
    main()
