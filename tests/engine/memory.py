"""KV memory without numbers: a slot holds the prefix that its token was computed from, so mistakes are visible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

from foreword.blocks.resume import KVGroup
from foreword.blocks.salt import Salt
from foreword.engine.sequence import Chunk, Draw, Sampled, SequenceState, Step

VOCAB = 50


class FakeMemory:
    """Implements `Runner`. Every chunk writes its tokens' prefixes in each KV group and then reads all that it attends to.

    The next token is a function of what was *read*: wrong KV gives another output. Layers of a window group see one token less
    than their group keeps.

    Attributes:
        fail: fail the next step after it has scribbled over everything that it may write.
    """

    bytes_per_block = 1

    def __init__(self, num_blocks: int, block_size: int, groups: Sequence[KVGroup] = ()) -> None:
        self._windows = [None if group.whole else group.span - 1 for group in groups] or [None]
        self.num_blocks = num_blocks
        self.fail = False
        self.steps: list[Step] = []
        self._size = block_size
        self._slots: dict[int, bytes] = {}

    def run(self, step: Step, draws: Mapping[SequenceState, Draw]) -> dict[SequenceState, Sampled]:
        return {one: Sampled(token, None) for one, token in self.compute(step).items() if one in draws}

    def compute(self, step: Step) -> dict[SequenceState, int]:
        """The token that follows each chunk."""
        self.steps.append(step)
        if self.fail:
            self.fail = False
            self._scribble(step)
            raise RuntimeError("the device is on fire")
        for copy in step.copies:
            pairs = [(copy.source, copy.target), *copy.others]
            offsets = range(copy.tokens)
            read = [[self._slots[source * self._size + offset] for offset in offsets] for source, _ in pairs]
            for (_, target), found in zip(pairs, read, strict=True):
                self._slots.update({target * self._size + offset: found[offset] for offset in offsets})
        written: set[int] = set()
        prefixes = {id(chunk): self._prefixes(chunk.sequence) for chunk in step.chunks}
        for chunk in step.chunks:
            for group, slot, position in self._written(chunk):
                assert slot not in written, "two tokens of one step in one slot"
                written.add(slot)
                self._slots[slot] = bytes([group]) + prefixes[id(chunk)][position]
        tokens = {}
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            for group, window in enumerate(self._windows):
                seen = range(0 if window is None else max(chunk.start - window + 1, 0), end)
                found = [self._slots.get(self._slot(chunk.sequence, group, position)) for position in seen]
                right = [bytes([group]) + prefixes[id(chunk)][position] for position in seen]
                assert found == right, f"wrong KV in group {group} at {chunk}"
                tokens[chunk.sequence] = follow((found[-1] or b"")[1:])
        return tokens

    def _written(self, chunk: Chunk) -> Iterator[tuple[int, int, int]]:
        """Group, slot and position of everything that a chunk writes."""
        for group in range(len(self._windows)):
            for position in range(max(chunk.start, chunk.write_from), chunk.start + chunk.count):
                yield group, self._slot(chunk.sequence, group, position), position

    def _slot(self, sequence: SequenceState, group: int, position: int) -> int:
        block = sequence.table.groups[group][position // self._size]
        assert block >= 0, "a block that the sequence needs is not held"
        return block * self._size + position % self._size

    def _prefixes(self, sequence: SequenceState) -> list[bytes]:
        """Contents of the sequence's slots: for every token a digest of salt and tokens up to it."""
        return prefixes(sequence.request.salt, list(sequence.table.chain.tokens))

    def _scribble(self, step: Step) -> None:
        for copy in step.copies:
            for target in (copy.target, *(target for _, target in copy.others)):
                self._slots.update({target * self._size + offset: b"garbage" for offset in range(self._size)})
        for chunk in step.chunks:
            self._slots.update({slot: b"garbage" for _, slot, _ in self._written(chunk)})


def prefixes(salt: Salt, tokens: list[int]) -> list[bytes]:
    digest = blake2b(b"".join(salt), digest_size=8)
    found = []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        found.append(digest.copy().digest())
    return found


def follow(prefix: bytes) -> int:
    return prefix[0] % VOCAB


def expected(salt: Salt, prompt: tuple[int, ...], count: int) -> list[int]:
    """The output of a sequence, computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follow(prefixes(salt, tokens)[-1]))
    return tokens[len(prompt) :]
