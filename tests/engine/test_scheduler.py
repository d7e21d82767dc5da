"""The scheduler without a model and without tensors: continuous batching, chunked prefill, preemption, hits within a
step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from example_counts import examples, represented
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import FakeMemory, expected

from foreword.blocks.layout import chain_prefix
from foreword.blocks.prefix_cache import HOLE, PrefixCache
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import NO_SALT, Salt
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import SequenceState, Step
from foreword.offload.load import LoadPlan
from foreword.offload.policy import LoadCosts
from foreword.offload.search import Found, StoredGroup, find_resumable
from foreword.store.tier_counters import LookupOutcome
from foreword.store.tiered import TierSearch

SIZE = 4


@dataclass
class Plant:
    """A scheduler at work: schedules, computes in fake memory, appends tokens, finishes."""

    num_blocks: int = 64
    block_size: int = SIZE
    cache_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.memory = FakeMemory(self.num_blocks, self.block_size, self.cache_options.get("groups", ()))
        self.cache = PrefixCache(self.num_blocks, self.block_size, **self.cache_options)
        self.scheduler = Scheduler(self.cache, **({"reserve": 0.0} | self.options))
        self.finished: dict[str, list[int]] = {}
        self._names = itertools.count()

    def add(self, tokens: Iterable[int], count: int, salt: Salt = NO_SALT) -> SequenceState:
        prompt = tuple(tokens)
        request = Request(f"r{next(self._names)}", prompt, SamplingParams(), salt=salt)
        sequence = SequenceState(request, self.cache.open(prompt, salt=salt), 0, len(prompt) + count)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Step:
        step = self.scheduler.schedule()
        following = self.memory.compute(step)
        self.scheduler.settle(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if not chunk.samples:
                continue
            if len(sequence.table) < sequence.max_total:
                sequence.table.append(following[sequence])
            if len(sequence.table) >= sequence.max_total:
                self.finish(sequence)
        return step

    def finish(self, sequence: SequenceState) -> None:
        self.finished[sequence.request.id] = sequence.output
        self.scheduler.finish(sequence)

    def run(self, limit: int = 10_000) -> list[Step]:
        steps = []
        while self.scheduler.has_work():
            steps.append(self.step())
            assert len(steps) < limit, "no end"
        self.cache.check()
        assert self.cache.pool.num_free == self.num_blocks
        return steps


def sizes(steps: Iterable[Step], sequence: SequenceState) -> list[int]:
    """How many tokens of a sequence each step computed."""
    return [sum(chunk.count for chunk in step.chunks if chunk.sequence is sequence) for step in steps]


def test_chunks() -> None:
    """A long prompt is computed in chunks of the step's budget, and each step takes only the blocks of its chunk."""
    plant = Plant(options={"max_batch_tokens": 10})
    sequence = plant.add(range(100, 134), 2)
    held = []
    for count in (10, 10, 10, 4):
        step = plant.step()
        assert [(chunk.start, chunk.count) for chunk in step.chunks] == [(sum([10] * len(held)), count)]
        held.append(len(sequence.table.blocks))
    assert held == [3, 5, 8, 9]
    plant.run()


def test_lookahead() -> None:
    """A sequence with lookahead holds a few more blocks than it needs, and gives all of them back."""
    plant = Plant(cache_options={"lookahead_blocks": 2}, options={"max_batch_tokens": 8})
    sequence = plant.add(range(20), 9)
    plant.step()
    assert len(sequence.table.blocks) == 4
    plant.run()
    # Only while there are free blocks: the last ones go to the sequences that need them.
    tight = Plant(num_blocks=6, cache_options={"lookahead_blocks": 5})
    tight.add(range(20), 3)
    tight.run()


def test_decoding_is_not_starved() -> None:
    """While a long prompt is prefilled, every decoding sequence gets its token in every step, within the budget."""
    plant = Plant(num_blocks=200, options={"max_batch_tokens": 8})
    decoding = [plant.add(range(50 * i, 50 * i + 3), 60) for i in range(4)]
    for _ in range(3):
        plant.step()
    long = plant.add(range(1000, 1100), 1)
    while long.computed < 100:
        step = plant.step()
        assert step.num_tokens == min(8, 4 + 100 - long.computed + sizes([step], long)[0])
        assert all(sizes([step], sequence) == [1] for sequence in decoding)
        assert sizes([step], long)[0] > 0
    plant.run()


def test_order_of_arrival() -> None:
    """Requests are admitted in order of arrival: one that does not fit is not overtaken by one that would."""
    plant = Plant(num_blocks=10)
    first, large, small = plant.add(range(20), 8), plant.add(range(50, 86), 2), plant.add(range(90, 92), 2)
    plant.step()
    assert plant.scheduler.running == [first]
    assert list(plant.scheduler.waiting) == [large, small]
    plant.run()


def test_number_of_sequences() -> None:
    """No more than `max_num_seqs` sequences run at once."""
    plant = Plant(options={"max_num_seqs": 3})
    for i in range(7):
        plant.add(range(10 * i, 10 * i + 5), 4)
    assert max(len(step.chunks) for step in plant.run()) == 3


def test_preemption_takes_the_last_admitted() -> None:
    """When memory runs out, the sequence admitted last loses its blocks, waits at the front of the queue, and resumes
    with the same output."""
    plant = Plant(num_blocks=10)
    prompts = [tuple(range(100 * i, 100 * i + 11)) for i in range(3)]
    first, second, third = (plant.add(prompt, 14) for prompt in prompts)
    waiting = plant.add(range(900, 908), 5)
    steps = []
    while waiting not in plant.scheduler.running and plant.scheduler.has_work():
        steps.append(plant.step())
    # A preempted sequence comes before one that only waited.
    assert third in plant.scheduler.running or third.request.id in plant.finished
    preempted = [sequence for step in (*steps, *plant.run()) for sequence in step.preempted]
    assert preempted[0] is third
    assert second in preempted
    assert first not in preempted
    assert plant.scheduler.num_preemptions == len(preempted) == third.preemptions + second.preemptions
    for sequence, prompt in zip((first, second, third), prompts, strict=True):
        assert plant.finished[sequence.request.id] == expected(NO_SALT, prompt, 14)


def test_resumed_from_the_cache() -> None:
    """A preempted sequence finds those of its blocks that were not evicted, partial ones too."""
    plant = Plant(num_blocks=9)
    first, second = plant.add(range(13), 12), plant.add(range(100, 113), 12)
    step = plant.step()
    while not step.preempted:
        step = plant.step()
    assert step.preempted == (second,)
    had = len(second.table) - 1
    plant.finish(first)
    step = plant.step()
    [chunk] = step.chunks
    # All but the block that the first sequence took when it ran out.
    assert chunk.start == had // SIZE * SIZE - SIZE or chunk.start >= had - SIZE
    plant.run()
    assert plant.finished[second.request.id] == expected(NO_SALT, tuple(range(100, 113)), 12)


def test_reserve() -> None:
    """A reserve keeps an admission from taking the last blocks while others run, but never leaves the engine idle."""
    free = Plant(num_blocks=20)
    kept = Plant(num_blocks=20, options={"reserve": 0.25})
    for plant in (free, kept):
        for i in range(2):
            plant.add(range(100 * i, 100 * i + 37), 20)
        plant.step()
    assert [len(plant.scheduler.running) for plant in (free, kept)] == [2, 1]
    free.run()
    kept.run()
    assert (free.scheduler.num_preemptions > 0, kept.scheduler.num_preemptions) == (True, 0)
    full = Plant(num_blocks=20, options={"reserve": 0.9})
    full.add(range(76), 4)
    full.run()


def test_prefills_in_progress_count() -> None:
    """Blocks that running prefills have yet to take are not given to a newcomer."""
    plant = Plant(num_blocks=12, options={"max_batch_tokens": 8})
    plant.add(range(40), 2)
    plant.add(range(100, 108), 2)
    steps = plant.run()
    assert plant.scheduler.num_preemptions == 0
    assert [len(step.admitted) for step in steps[:5]] == [1, 0, 0, 0, 0]


def test_hit_in_the_same_step() -> None:
    """A block that one request fills in a step is a cache hit for the next request of the same step."""
    plant = Plant()
    first, second = plant.add(range(12), 3), plant.add([*range(8), 99, 98], 3)
    step = plant.step()
    assert sizes([step], first) == [12]
    assert sizes([step], second) == [2]
    assert second.cached_tokens == second.shared_tokens == 8
    assert first.table.blocks[:2] == second.table.blocks[:2]
    plant.run()


def test_no_hit_on_what_is_not_scheduled() -> None:
    """Only blocks that the step fills are hit in it: a chunk's end is where sharing ends."""
    plant = Plant(options={"max_batch_tokens": 20})
    first, second = plant.add(range(17), 2), plant.add(range(40), 2)
    step = plant.step()
    assert sizes([step], first) == [17]
    # Four blocks are shared; the second sequence computes what follows within the budget.
    assert (second.cached_tokens, sizes([step], second)) == (16, [3])
    plant.run()


@pytest.mark.parametrize("length", [16, 17, 18])
def test_fully_cached_prompt(length: int) -> None:
    """A prompt cached to its last token computes one token, and writes nothing into shared blocks."""
    plant = Plant()
    plant.add(range(length), 3)
    plant.run()
    again = plant.add(range(length), 3)
    step = plant.step()
    [chunk] = step.chunks
    assert (chunk.start, chunk.count, chunk.samples) == (length - 1, 1, True)
    assert again.cached_tokens == length - 1
    if length == 16:
        assert chunk.write_from >= 16  # nothing is written
        assert not step.copies
    else:
        assert chunk.write_from <= length - 1
    plant.run()
    assert plant.finished[again.request.id] == expected(NO_SALT, tuple(range(length)), 3)


def test_partial_block_is_copied() -> None:
    """A partial block is reused by copying it; without partial reuse its tokens are computed."""
    for partial in (True, False):
        plant = Plant(cache_options={"partial_reuse": partial})
        running = plant.add(range(14), 30)
        plant.step()
        second = plant.add([*range(14), 77, 78], 2)
        step = plant.step()
        assert len(step.copies) == partial
        assert (second.cached_tokens, second.shared_tokens) == (14 if partial else 12, 12)
        assert running.table.blocks[3] != second.table.blocks[3]
        plant.run()


def fail(plant: Plant) -> Step:
    """A step that breaks in the middle, and its sequences' end."""
    step = plant.scheduler.schedule()
    plant.memory.fail = True
    with pytest.raises(RuntimeError, match="on fire"):
        plant.memory.compute(step)
    plant.scheduler.withdraw(step)
    for chunk in step.chunks:
        plant.scheduler.finish(chunk.sequence)
    return step


def test_failed_prefill_leaves_nothing() -> None:
    """The blocks that a failed step would have filled are never found, not even by sequences that hit them in the same
    step."""
    plant = Plant(options={"max_batch_tokens": 12})
    plant.add(range(9), 3)
    plant.add([*range(8), 50, 51, 52], 3)
    assert len(fail(plant).chunks) == 2
    plant.cache.check()
    third = plant.add(range(14), 3)
    plant.step()
    assert third.cached_tokens == 0
    # Blocks that earlier steps computed stay.
    fail(plant)
    fourth = plant.add(range(14), 3)
    plant.step()
    assert fourth.cached_tokens == 12
    plant.run()
    assert plant.finished[fourth.request.id] == expected(NO_SALT, tuple(range(14)), 3)


def test_failed_copy_leaves_nothing() -> None:
    """A partly filled block that a failed step should have copied is not copied from."""
    plant = Plant()
    plant.add(range(14), 20)
    plant.step()
    plant.add([*range(14), 77, 78], 2)
    assert len(fail(plant).copies) == 1
    again = plant.add([*range(14), 77, 78], 2)
    plant.run()
    assert plant.finished[again.request.id] == expected(NO_SALT, (*range(14), 77, 78), 2)


def test_caching_off() -> None:
    """A scheduler with caching off shares nothing, and everything is right."""
    plant = Plant(num_blocks=16, cache_options={"enabled": False})
    for _ in range(4):
        plant.add(range(15), 10)
    steps = plant.run()
    assert sum(step.num_tokens for step in steps) >= 4 * 24
    assert plant.cache.pool.num_cached == 0
    assert all(output == expected(NO_SALT, tuple(range(15)), 10) for output in plant.finished.values())


def test_nothing_to_do() -> None:
    """Without requests a step is empty."""
    plant = Plant()
    assert not plant.scheduler.has_work()
    assert plant.scheduler.schedule() == Step(())


prompts = st.builds(
    lambda family, length, end: tuple([family] * length) + tuple(end),
    st.integers(0, 2),
    st.integers(0, 20),
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
who = (st.integers(0, 5), st.integers(0, 14), st.sampled_from([NO_SALT, NO_SALT, Salt(b"other")]))
actions = st.one_of(
    st.tuples(st.just("add"), *who),
    st.tuples(st.just("add"), *who),
    st.tuples(st.just("add and fail"), *who),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("fail"), st.just(0)),
    st.tuples(st.just("clear"), st.just(0)),
)


FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW
# Windows of 1 token and more, alone, several alike, and beside full attention. A group keeps one token more.
groups = st.sampled_from(
    [
        (),
        (),
        ((WINDOW, 2),),
        ((WINDOW, 5),),
        ((FULL, 0), (WINDOW, 4)),
        ((FULL, 0), (WINDOW, 9), (WINDOW, 9)),
        ((FULL, 0), (FULL, 0), (WINDOW, 3)),
        ((WINDOW, 8), (WINDOW, 3)),
    ]
)


def check_windows(plant: Plant) -> None:
    """A table holds no more than its windows, what the last step computed, and what was allocated ahead."""
    size, ahead = plant.block_size, plant.cache_options["lookahead_blocks"]
    for sequence in plant.scheduler.running:
        for number in plant.cache.windows:
            held = sum(block != HOLE for block in sequence.table.groups[number])
            kept = plant.cache.groups[number].span - 1
            assert held <= -(-kept // size) + -(-plant.options["max_batch_tokens"] // size) + 1 + ahead


@settings(max_examples=examples(600), deadline=None)
@given(
    texts=st.lists(prompts, min_size=1, max_size=4),
    plan=st.lists(actions, min_size=1, max_size=30),
    num_blocks=st.integers(24, 60),
    block_size=st.integers(1, 5),
    kinds=groups,
    cache_options=st.fixed_dictionaries(
        {
            "enabled": st.sampled_from([True, True, True, False]),
            "partial_reuse": st.booleans(),
            "lookahead_blocks": st.integers(0, 2),
        }
    ),
    options=st.fixed_dictionaries(
        {
            "max_batch_tokens": st.integers(1, 40),
            "max_num_seqs": st.integers(1, 8),
            "reserve": st.sampled_from([0.0, 0.1, 0.5]),
        }
    ),
)
def test_everyone_reads_the_right_kv(
    texts: list[tuple[int, ...]],
    plan: list[tuple[Any, ...]],
    kinds: tuple[tuple[GroupKind, int], ...],
    options: dict[str, Any],
    **shape: Any,
) -> None:
    """Every token attends to its own prefix under random arrivals, aborts, failures and preemptions, and with any KV groups;
    all requests end, no block leaks, and window groups hold little."""
    groups = tuple(KVGroup(kind, shape["block_size"], span) for kind, span in kinds)
    shape["cache_options"]["groups"] = groups
    plant = Plant(options=options, **shape)
    longest = plant.cache.longest(1000, options["max_batch_tokens"])
    alive: list[SequenceState] = []
    known: dict[str, list[int]] = {}
    for action, *details in plan:
        if action.startswith("add"):
            which, count, salt = details
            tokens = texts[which % len(texts)]
            count = min(count, longest - len(tokens))
            if count >= 0:
                alive.append(plant.add(tokens, count, salt))
                known[alive[-1].request.id] = expected(salt, tokens, count)
        if action == "cancel" and alive:
            gone = alive.pop(details[0] % len(alive))
            known.pop(gone.request.id)
            plant.scheduler.finish(gone)
        elif action == "clear":
            plant.cache.clear()
        elif action.endswith("fail"):
            for chunk in fail(plant).chunks:
                known.pop(chunk.sequence.request.id)
        elif action == "step":
            for _ in range(details[0]):
                step = plant.step()
                assert step.num_tokens <= options["max_batch_tokens"]
                assert len(plant.scheduler.running) <= options["max_num_seqs"]
                check_windows(plant)
        plant.cache.check()
        left = {*plant.scheduler.running, *plant.scheduler.waiting}
        alive = [sequence for sequence in alive if sequence in left]
    plant.run()
    for name, output in known.items():
        assert plant.finished[name] == output


class Search:
    """A search that has ended."""

    answered = True

    def __init__(self, found: Found | None) -> None:
        self.found = found


class Load:
    """A load that takes some looks."""

    def __init__(self, tiers: list[int], looks: int) -> None:
        self.tiers = tiers
        self.looks = looks

    @property
    def done(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def close(self) -> list[int]:
        return self.tiers


class Shelf:
    """Stores that have lost some blocks, and break off some loads. They read and write the fake memory's slots."""

    def __init__(self, memory: FakeMemory, size: int, draw: random.Random, groups: Sequence[StoredGroup]) -> None:
        self._memory, self._size, self._draw = memory, size, draw
        self.groups = groups
        self._kept: dict[bytes, list[bytes]] = {}
        self.loads = self.broken = 0

    def save(self, name: bytes, block: int) -> None:
        if self._draw.random() < 0.9:
            slots = range(block * self._size, (block + 1) * self._size)
            self._kept[name] = [self._memory._slots[slot] for slot in slots]

    def locate(
        self, names: Sequence[bytes], *, search: TierSearch, inline: bool = False, before: Sequence[bytes] = ()
    ) -> list[int]:
        return [0 for _ in itertools.takewhile(self._kept.__contains__, names)]

    def find(
        self, names: Sequence[bytes], *, search: TierSearch, inline: bool = False, before: Sequence[bytes] = ()
    ) -> Any:
        return [0 if name in self._kept else -1 for name in names]

    def search(self, root: bytes, keys: Sequence[bytes], held: int, limit: int, *, patient: bool) -> Search:
        return Search(find_resumable(self, self.groups, root, keys, held, limit, TierSearch(0.0)))  # type: ignore[arg-type]

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        pass

    @property
    def costs(self) -> Shelf:
        return self

    def best(self, found: Found, held: int, *, patient: bool) -> LoadPlan | None:
        plan = LoadPlan(held, found.position, found.places) if found.position > held else None
        return self._draw.choice([plan, plan, plan, None])

    def note_load(self, blocks: Iterable[tuple[int, int]], seconds: float, *, whole: bool) -> None:
        assert all(place == 0 for _, place in blocks) and seconds >= 0.0

    def load(self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], *, patient: bool) -> Load:
        size, free = self._size, iter(blocks)
        parts = plan.blocks(self.groups, keys, lambda group, block: next(free))
        wanted = [(part.group, *pair) for part in parts for pair in zip(part.keys, part.blocks, strict=True)]
        assert len(wanted) == len(blocks)
        count = len(wanted) if self._draw.random() < 0.7 else self._draw.randrange(len(wanted))
        for group, key, block in wanted[:count]:
            content = self._kept[chain_prefix(self.groups[group].layouts[0], root) + key]
            self._memory._slots.update(zip(range(block * size, (block + 1) * size), content, strict=True))
        self.loads += 1
        self.broken += count < len(wanted)
        return Load([0] * count, self._draw.randrange(3))


@pytest.mark.parametrize(
    "kinds",
    represented(
        [((WINDOW, 6),), ((FULL, 0), (WINDOW, 5)), ((FULL, 0), (WINDOW, 9), (WINDOW, 9))], ((FULL, 0), (WINDOW, 5))
    ),
)
def test_windows_over_stores(kinds: tuple[tuple[GroupKind, int], ...]) -> None:
    """Every token attends to its own prefix in each KV group although stores lose blocks and break off loads, in a small pool;
    all requests end, and no block leaks."""
    loads = broken = preempted = 0
    for seed in range(60):
        draw, size = random.Random(seed), 1 + seed % 4
        groups = tuple(KVGroup(kind, size, span) for kind, span in kinds)
        blocks = len(kinds) * (48 // size)
        plant = Plant(blocks, size, {"groups": groups}, {"max_batch_tokens": draw.choice([3, 8, 40])})
        stored = [StoredGroup(group, (bytes([number]),)) for number, group in enumerate(groups)]
        shelf = Shelf(plant.memory, size, draw, stored)
        plant.scheduler = Scheduler(
            plant.cache,
            reserve=0.0,
            offload=shelf,  # type: ignore[arg-type]
            **plant.options,
        )
        known: dict[str, list[int]] = {}
        heads = [tuple(draw.randrange(3) for _ in range(30)) for _ in range(2)]
        for _ in range(60):
            action = draw.choice(["add", "step", "step", "step", "clear", "cancel"])
            if action == "add":
                tokens = (*draw.choice(heads)[: draw.randrange(1, 30)], draw.randrange(3))
                one = plant.add(tokens, draw.randrange(1, 12))
                known[one.request.id] = expected(NO_SALT, tokens, one.max_total - len(tokens))
            elif action == "clear":
                plant.cache.clear()
            elif action == "cancel" and plant.scheduler.waiting_for_kv:
                gone = next(iter(plant.scheduler.waiting_for_kv))
                known.pop(gone.request.id)
                plant.scheduler.finish(gone)
            else:
                step_and_save(plant, shelf, stored)
            plant.cache.check()
        for _ in range(2000):
            if not plant.scheduler.has_work():
                break
            step_and_save(plant, shelf, stored)
        assert {name: plant.finished[name] for name in known} == known
        assert plant.cache.pool.num_free == blocks
        loads, broken, preempted = (
            loads + shelf.loads,
            broken + shelf.broken,
            preempted + plant.scheduler.num_preemptions,
        )
    assert loads > 100 and broken > 20
    assert preempted or not groups[0].whole


def step_and_save(plant: Plant, shelf: Shelf, stored: Sequence[StoredGroup]) -> None:
    """A step, and what it filled goes to the stores."""
    plant.scheduler.collect()
    finish = plant.finish
    ended: list[SequenceState] = []
    plant.finish = ended.append  # type: ignore[method-assign]
    try:
        step = plant.step()
    finally:
        plant.finish = finish  # type: ignore[method-assign]
    for chunk in step.chunks:
        table, size = chunk.sequence.table, plant.block_size
        full = min((chunk.start + chunk.count) // size, table.published)
        keys = table.chain.keys_to(full)
        for i in range(chunk.published_before, full):
            for number, blocks in enumerate(table.groups):
                shelf.save(chain_prefix(stored[number].layouts[0], table.chain.root) + keys[i], blocks[i])
    for sequence in ended:
        finish(sequence)


class FullStores:
    """Stores that have every block of prompts of a number of blocks, and never finish a load."""

    def __init__(self, blocks: int, size: int) -> None:
        self._blocks, self._size = blocks, size
        self.groups = [StoredGroup(KVGroup(GroupKind.FULL, size), ())]
        self.costs = LoadCosts([1], [size], list, lambda: 0.0)
        self.loading: list[int] = []

    def search(self, root: bytes, keys: Sequence[bytes], held: int, limit: int, *, patient: bool) -> Search:
        count = len(keys) if len(keys) == self._blocks else 0
        return Search(Found(count * self._size, 0, {(0, block): 0 for block in range(count)}, step=self._size))

    def refuse_lookup(self, outcome: LookupOutcome, tokens: int) -> None:
        pass

    def load(self, plan: LoadPlan, root: bytes, keys: Sequence[bytes], blocks: Sequence[int], *, patient: bool) -> Load:
        self.loading += blocks
        return Load([], 1000)


def test_a_load_spares_blocks_that_are_still_to_be_copied() -> None:
    """A load begins while the step is made, and copies are made in the step: a load gets no block that a sequence of the same
    step copies its partial block from."""
    stores, cache = FullStores(4, 4), PrefixCache(32, 4, lookahead_blocks=0)
    scheduler = Scheduler(cache, reserve=0.0, offload=stores)  # type: ignore[arg-type]

    def add(tokens: Sequence[int]) -> SequenceState:
        request = Request(f"r{tokens[0]}", tuple(tokens), SamplingParams())
        scheduler.add(SequenceState(request, cache.open(tokens), 0, len(tokens) + 8))
        return scheduler.waiting[-1]

    first = [add(range(10 * number, 10 * number + 6)) for number in range(1, 5)]
    scheduler.settle(scheduler.schedule())
    for sequence in first:
        scheduler.finish(sequence)
    add([10, 11, 12, 13, 14, 15, 77, 78])
    add(range(200, 217))
    free = cache.pool.num_free
    step = scheduler.schedule()
    [copy] = step.copies
    assert len(stores.loading) == 4
    assert copy.source not in stores.loading
    scheduler.settle(step)
    cache.check()
    assert cache.pool.references(copy.source) == 0
    assert cache.pool.num_free == free - 6  # the cached block, the copy's target, and the load
