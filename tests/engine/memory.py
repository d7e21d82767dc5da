"""KV memory without numbers: a slot holds the prefix that its token was computed from, so mistakes are visible."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from foreword.engine.sampling import Draw, Sampled
from foreword.engine.sequence import SequenceState, Step

VOCAB = 50


class FakeMemory:
    """Implements `Runner`. Every chunk writes its tokens' prefixes and then reads all that it attends to.

    The next token is a function of what was *read*: wrong KV gives another output.

    Attributes:
        fail: fail the next step after it has scribbled over everything that it may write.
    """

    bytes_per_block = 1

    def __init__(self, num_blocks: int, block_size: int) -> None:
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
            for offset in range(copy.tokens):
                self._slots[copy.target * self._size + offset] = self._slots[copy.source * self._size + offset]
        written: set[int] = set()
        prefixes = {id(chunk): self._prefixes(chunk.sequence) for chunk in step.chunks}
        for chunk in step.chunks:
            for position in range(max(chunk.start, chunk.write_from), chunk.start + chunk.count):
                slot = self._slot(chunk.sequence, position)
                assert slot not in written, "two tokens of one step in one slot"
                written.add(slot)
                self._slots[slot] = prefixes[id(chunk)][position]
        tokens = {}
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            found = [self._slots.get(self._slot(chunk.sequence, position)) for position in range(end)]
            assert found == prefixes[id(chunk)][:end], f"wrong KV at {chunk}"
            tokens[chunk.sequence] = follow(found[-1] or b"")
        return tokens

    def _slot(self, sequence: SequenceState, position: int) -> int:
        return sequence.table.blocks[position // self._size] * self._size + position % self._size

    def _prefixes(self, sequence: SequenceState) -> list[bytes]:
        """What belongs into the sequence's slots: for every token a digest of salt and tokens up to it."""
        return prefixes(sequence.request.salt, list(sequence.table.chain.tokens))

    def _scribble(self, step: Step) -> None:
        for copy in step.copies:
            for offset in range(self._size):
                self._slots[copy.target * self._size + offset] = b"garbage"
        for chunk in step.chunks:
            for position in range(max(chunk.start, chunk.write_from), chunk.start + chunk.count):
                self._slots[self._slot(chunk.sequence, position)] = b"garbage"


def prefixes(salt: bytes, tokens: list[int]) -> list[bytes]:
    digest = blake2b(salt, digest_size=8)
    found = []
    for token in tokens:
        digest.update(token.to_bytes(4, "little"))
        found.append(digest.copy().digest())
    return found


def follow(prefix: bytes) -> int:
    return prefix[0] % VOCAB


def expected(salt: bytes, prompt: tuple[int, ...], count: int) -> list[int]:
    """The output of a sequence, computed without a cache."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(follow(prefixes(salt, tokens)[-1]))
    return tokens[len(prompt) :]
