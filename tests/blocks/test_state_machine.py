"""PrefixCache against a slow and obvious model of it, with a simulated KV memory: a wrong block must be impossible.

The model knows a block by the *whole token prefix* that its KV stands for, not by a key. The memory is a dictionary from
(block, slot) to the prefix of the token whose KV lies there; it is written when a step runs, copied on `Copy`, and filled
with garbage when a step fails. Steps are made and run as the scheduler makes and runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import permutations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from foreword.blocks.keys import chain_keys
from foreword.blocks.prefix_cache import BlockTable, Copy, Match, PrefixCache
from foreword.blocks.salt import Salt

Prefix = tuple[int, ...]  # the tenant's number, then tokens from the first one on
GARBAGE: Prefix = (-1,)
MAX_SEQUENCES = 5
MAX_TOKENS = 14

tokens = st.integers(0, 1)
picks = st.integers(0, 60)
tenants = st.sampled_from([0, 0, 0, 1])
prompts = st.lists(tokens, min_size=1, max_size=6)
budgets = st.sampled_from([MAX_TOKENS, MAX_TOKENS, 1, 2, 3, 5])
sampled_tokens = st.lists(tokens, min_size=MAX_SEQUENCES, max_size=MAX_SEQUENCES)


def in_rows(blocks: list[int]) -> list[int]:
    """Runs of four and more numbers, each one less than the last, the other way round."""
    runs: list[list[int]] = []
    for block in blocks:
        if runs and block == runs[-1][-1] - 1:
            runs[-1].append(block)
        else:
            runs.append([block])
    return [block for run in runs for block in (reversed(run) if len(run) >= 4 else run)]


class Model:
    """The pool and the noted partial blocks in plain lists and dictionaries."""

    def __init__(self, num_blocks: int, size: int, lookahead: int) -> None:
        self.size = size
        self.lookahead = lookahead
        self.empty = list(range(num_blocks))
        self.cached: list[int] = []  # free blocks with a name, the least recently used first
        self.owner: list[int | None] = [None] * num_blocks  # the tenant of blocks that are cached or in use
        self.clock = 0
        self.used_at: dict[int, int] = {}  # of tenants that own blocks, the oldest tenant first
        self.refs = [0] * num_blocks
        self.name: list[Prefix | None] = [None] * num_blocks
        self.holders: dict[Prefix, list[int]] = {}  # who holds a prefix; lookups find the first
        self.partials: list[tuple[Prefix, int, Prefix]] = []  # (what comes before, block, its tokens), latest last

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    def take(self, count: int, order: list[int], tenant: int) -> list[int]:
        """The next blocks to be evicted; in which order a table gets the blocks of one allocation is the pool's business."""
        self.clock += count
        self.used_at[tenant] = self.clock
        taken = []
        for _ in range(count):
            block = self.empty.pop(0) if self.empty else self.evict(tenant, count)
            taken.append(block)
        assert sorted(order) == sorted(taken)
        for block in taken:
            self.refs[block] = 1
            self.owner[block] = tenant
            self.unname(block)
            self.partials = [partial for partial in self.partials if partial[1] != block]
        return order

    def evict(self, tenant: int, count: int) -> int:
        """The least recently used block of a tenant with more than its share or, if there is none, of the one that has most."""
        amounts = {one: self.owner.count(one) + (count if one == tenant else 0) for one in self.used_at}
        idle = {one for one, used_at in self.used_at.items() if self.clock - used_at >= 64 * len(self.refs)}
        share = len(self.refs) / max(len(self.used_at) - len(idle), 1)
        victims = [one for one in self.used_at if any(self.owner[block] == one for block in self.cached)]
        over = [one for one in victims if amounts[one] > share or one in idle] or [
            max(victims, key=amounts.__getitem__)
        ]
        block = next(block for block in self.cached if self.owner[block] in over)
        self.cached.remove(block)
        self.disown(block, tenant)
        return block

    def disown(self, block: int, *keep: int) -> None:
        owner, self.owner[block] = self.owner[block], None
        if owner is not None and owner not in self.owner and owner not in keep:
            del self.used_at[owner]

    def unname(self, block: int) -> None:
        name = self.name[block]
        if name is not None:
            self.name[block] = None
            self.holders[name].remove(block)
            if not self.holders[name]:
                del self.holders[name]

    def give_name(self, block: int, name: Prefix) -> None:
        self.name[block] = name
        self.holders.setdefault(name, []).append(block)

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                (self.empty if block in self.empty else self.cached).remove(block)
            self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        self.clock += 1
        unnamed: list[int] = []
        for block in reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block]:
                continue
            name = self.name[block]
            if name is not None and self.holders[name][0] != block:
                first = self.holders[name][0]
                if self.refs[first]:  # the first is in use and stays; this copy is worth nothing
                    self.unname(block)
                else:  # of two free ones the one used last stays
                    self.unname(first)
                    self.holders[name].remove(block)
                    self.holders[name].insert(0, block)
                    self.cached.remove(first)
                    self.empty.insert(0, first)
                    self.disown(first)
            if self.name[block] is None:
                unnamed.append(block)
                self.disown(block)
            else:
                self.cached.append(block)
        self.empty = [*reversed(unnamed), *self.empty]

    def clear(self, tenant: int | None) -> int:
        named = [block for block in self.cached if tenant in (None, self.owner[block])]
        for block in named:
            self.unname(block)
            self.cached.remove(block)
            self.empty.append(block)
            self.disown(block)
        self.partials = [partial for partial in self.partials if tenant not in (None, partial[0][0])]
        return len(named)

    def note_partial(self, before: Prefix, block: int, held: Prefix) -> None:
        self.partials = [partial for partial in self.partials if partial[0] != before and partial[1] != block]
        self.partials.append((before, block, held))

    def lookup(self, prefix: Prefix) -> Match:
        """The longest prefix whose blocks are all held, and how far a partial block continues it, except for the last token."""
        full = 0
        while 1 + (full + 1) * self.size <= len(prefix) and prefix[: 1 + (full + 1) * self.size] in self.holders:
            full += 1
        end = 1 + full * self.size
        blocks = [self.holders[prefix[: 1 + (n + 1) * self.size]][0] for n in range(full)]
        for before, block, held in self.partials:
            if before == prefix[:end]:
                same = 0
                while same < len(held) and end + same < len(prefix) - 1 and prefix[end + same] == held[same]:
                    same += 1
                if same:
                    return Match(blocks, block, same, full * self.size + same)
        return Match(blocks, -1, 0, full * self.size)


@dataclass(eq=False)
class Seq:
    """A sequence: the real table and what the model thinks of it."""

    tenant: int
    table: BlockTable
    blocks: list[int] = field(default_factory=list)
    published: int = 0
    computed: int = 0
    running: bool = False

    def prefix(self, num_tokens: int) -> Prefix:
        return (self.tenant, *self.table.chain.tokens[:num_tokens])

    @property
    def missing(self) -> int:
        return len(self.table) - self.computed


@dataclass
class Chunk:
    seq: Seq
    start: int
    count: int
    published_before: int


class PrefixCacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, fail, are preempted and end; after every rule the cache is what the model is."""

    @initialize(
        size=st.sampled_from([3, 4, 2, 5, 1]),
        num_blocks=st.integers(4, 12),
        lookahead=st.sampled_from([0, 0, 1, 2]),
        partial=st.sampled_from([True, True, True, False]),
        enabled=st.sampled_from([True, True, True, True, True, False]),
    )
    def make(self, size: int, num_blocks: int, lookahead: int, partial: bool, enabled: bool) -> None:
        self.size = size
        self.enabled = enabled
        self.partial = partial and enabled
        self.known: set[bytes] = set()  # according to the hooks
        self.cache = PrefixCache(
            num_blocks,
            size,
            model=b"model",
            enabled=enabled,
            partial_reuse=partial,
            lookahead_blocks=lookahead,
            on_published=self.on_published,
            on_removed=self.on_removed,
        )
        self.model = Model(num_blocks, size, lookahead)
        self.memory: dict[tuple[int, int], Prefix] = {}
        self.seqs: list[Seq] = []
        self.pins: list[list[int]] = []
        self.chunks: list[Chunk] = []
        self.copies: list[Copy] = []
        self.admitted: list[Seq] = []  # in the step that is being made
        self.calm = 0  # steps that ran since something was torn down
        self.seen: list[Prefix] = [(0, 0, 1, 0)]  # latest sequences, to draw related prompts from

    def on_published(self, table: BlockTable, start: int, end: int) -> None:
        parent, keys = table.chain.key_before(start), table.chain.keys_to(end)[start:end]
        assert parent in self.known or parent in {self.root(0), self.root(1)}
        self.known.update(keys)

    def on_removed(self, keys: list[bytes]) -> None:
        assert self.known.issuperset(keys)
        self.known.difference_update(keys)

    # Helpers

    def root(self, tenant: int) -> bytes:
        return self.cache.root(Salt(bytes([tenant])))

    def key(self, name: Prefix) -> bytes:
        return chain_keys(self.root(name[0]), name[1:], self.size)[-1]

    def open(self, tenant: int, prompt: list[int]) -> Seq:
        return Seq(tenant, self.cache.open(prompt, salt=Salt(bytes([tenant]))))

    def related(self, pick: int, kept: int, fresh: list[int]) -> list[int]:
        """A prompt that begins like one seen before."""
        old = self.seen[pick % len(self.seen)][1:]
        return [*old[:kept], *fresh][:MAX_TOKENS]

    def running(self, idle: bool) -> list[Seq]:
        """Running sequences; the idle ones are those that the step in the making does not contain."""
        busy = [chunk.seq for chunk in self.chunks]
        return [seq for seq in self.seqs if seq.running and not (idle and seq in busy)]

    def look_up(self, seq: Seq) -> Match:
        match = self.cache.lookup(seq.table)
        expected = self.model.lookup(seq.prefix(len(seq.table)))
        assert (list(match.blocks), match.partial_block, match.partial_tokens) == (
            expected.blocks,
            expected.partial_block,
            expected.partial_tokens,
        )
        assert match.cached_tokens == expected.cached_tokens
        return match

    def advance(self, seq: Seq, num_tokens: int) -> bool:
        """Advance table and model."""
        model, size = self.model, self.size
        before = seq.published
        done = self.cache.advance(seq.table, num_tokens)
        missing = -(-num_tokens // size) - len(seq.blocks)
        if missing > 0:
            assert done == (missing <= model.num_free)
            if not done:
                return False
            ahead = model.lookahead if missing + model.lookahead <= model.num_free else 0
            seq.blocks += model.take(missing + ahead, seq.table.blocks[len(seq.blocks) :], seq.tenant)
        assert done
        if self.enabled:
            while (seq.published + 1) * size <= num_tokens:
                model.give_name(seq.blocks[seq.published], seq.prefix((seq.published + 1) * size))
                seq.published += 1
        assert seq.published >= before
        return True

    def retract(self, seq: Seq, num_blocks: int) -> None:
        self.cache.retract(seq.table, num_blocks)
        for block in seq.blocks[num_blocks : seq.published]:
            self.model.unname(block)
        seq.published = min(seq.published, num_blocks)

    def note_partial(self, seq: Seq) -> None:
        self.cache.note_partial(seq.table, seq.computed)
        depth, held = divmod(seq.computed, self.size)
        withdrawn = depth < seq.published and self.model.name[seq.blocks[depth]] is None
        if self.partial and held and not withdrawn:
            start = depth * self.size
            before = seq.prefix(start)
            self.model.note_partial(before, seq.blocks[depth], seq.prefix(seq.computed)[1 + start :])

    def release(self, seq: Seq) -> None:
        self.cache.release(seq.table)
        self.model.release(seq.blocks)
        seq.blocks, seq.published, seq.computed, seq.running = [], 0, 0, False

    def remember(self, prefix: Prefix) -> None:
        self.seen = [*(known for known in self.seen if known != prefix), prefix][-6:]

    # Making a step

    @rule(tenant=tenants, fresh=prompts, budget=budgets)
    def come(self, tenant: int, fresh: list[int], budget: int) -> None:
        self.arrive(tenant, fresh, budget)

    @rule(pick=picks, fresh=prompts, budget=budgets)
    def come_again(self, pick: int, fresh: list[int], budget: int) -> None:
        """The next turn of a conversation, with a few tokens more than before."""
        old = self.seen[pick % len(self.seen)]
        self.arrive(old[0], [*old[1 : MAX_TOKENS - 1], *fresh], budget)

    @rule(
        tenant=tenants, pick=picks, kept=st.integers(1, MAX_TOKENS), fresh=prompts, budget=budgets, twins=st.booleans()
    )
    def come_alike(self, tenant: int, pick: int, kept: int, fresh: list[int], budget: int, twins: bool) -> None:
        """A prompt that begins like an earlier one, or two of them at once, so that both fill the same blocks."""
        prompt = self.related(pick, kept, fresh)
        self.arrive(tenant, prompt, budget)
        if twins:
            self.arrive(tenant, prompt, MAX_TOKENS)

    def arrive(self, tenant: int, prompt: list[int], budget: int) -> None:
        if len(self.seqs) >= MAX_SEQUENCES:
            oldest = self.seqs[0]
            if not oldest.running:
                self.seqs.remove(oldest)
            elif oldest in self.running(idle=True):
                self.end(oldest)
            else:
                return
        seq = self.open(tenant, prompt)
        self.seqs.append(seq)
        self.remember(seq.prefix(len(prompt)))
        self.admit(seq, budget)

    @precondition(lambda self: any(not seq.running for seq in self.seqs))
    @rule(pick=picks, budget=budgets)
    def resume(self, pick: int, budget: int) -> None:
        waiting = [seq for seq in self.seqs if not seq.running]
        self.admit(waiting[pick % len(waiting)], budget)

    def admit(self, seq: Seq, budget: int) -> None:
        """Put the first chunk of a waiting sequence into the step, if there is room."""
        length = len(seq.table)
        match = self.look_up(seq)
        start = min(match.cached_tokens, length - 1)
        count = min(budget, length - start)
        needed = self.cache.new_blocks(seq.table, match, start + count)
        free = self.cache.pool.num_free
        if needed > free:
            return
        self.cache.admit(seq.table, match)
        self.model.share(list(match.blocks))
        seq.blocks, seq.published, seq.computed, seq.running = list(match.blocks), len(match.blocks), start, True
        assert self.advance(seq, start + count)
        assert free - self.cache.pool.num_free in range(needed, needed + self.model.lookahead + 1)
        copy = self.cache.copy_partial(seq.table, match)
        if match.partial_tokens and seq.blocks[len(match.blocks)] != match.partial_block:
            assert copy == Copy(match.partial_block, seq.blocks[len(match.blocks)], match.partial_tokens)
            self.copies.append(copy)
        else:
            assert copy is None
        self.chunks.append(Chunk(seq, start, count, len(match.blocks)))
        self.admitted.append(seq)

    @precondition(lambda self: self.running(idle=True))
    @rule(pick=picks, budget=budgets)
    def grow(self, pick: int, budget: int) -> None:
        idle = self.running(idle=True)
        self.extend(idle[pick % len(idle)], budget)

    def extend(self, seq: Seq, budget: int) -> bool:
        """Put a chunk of a running sequence into the step, if there is room."""
        count = min(budget, seq.missing)
        named = seq.published
        done = self.advance(seq, seq.computed + count)
        if done:
            self.chunks.append(Chunk(seq, seq.computed, count, named))
        return done

    @precondition(lambda self: self.running(idle=bool(self.admitted)))
    @rule(pick=picks)
    def preempt_any(self, pick: int) -> None:
        """Preempts as the scheduler does: out of a step in the making only before it admits anybody."""
        candidates = self.running(idle=bool(self.admitted))
        self.preempt(candidates[pick % len(candidates)])

    def preempt(self, seq: Seq) -> None:
        for chunk in [chunk for chunk in self.chunks if chunk.seq is seq]:
            self.retract(seq, chunk.published_before)
            self.chunks.remove(chunk)
        self.note_partial(seq)
        self.release(seq)

    # Ending a step

    def write(self, fail: bool) -> None:
        """Acts as the device: the copies in their order, then the KV of all chunks. A failing one leaves garbage."""
        size = self.size
        for copy in self.copies:
            for slot in range(copy.tokens):
                self.memory[copy.target, slot] = GARBAGE if fail else self.memory[copy.source, slot]
        for chunk in self.chunks:
            write_from = max(chunk.start, chunk.published_before * size)
            for position in range(write_from, chunk.start + chunk.count):
                place = chunk.seq.blocks[position // size], position % size
                self.memory[place] = GARBAGE if fail else chunk.seq.prefix(position + 1)
        self.copies = []

    @rule(sampled=sampled_tokens, note=st.sampled_from([False, False, True]))
    def run_step(self, sampled: list[int], note: bool) -> None:
        self.run(sampled, note)

    def run(self, sampled: list[int], note: bool) -> None:
        """Sequences that are not in the step yet advance by one token, if need be by preempting others; then the step runs."""
        for seq in self.running(idle=True):
            while seq.running and not self.extend(seq, 1):
                self.preempt(self.running(idle=bool(self.admitted))[-1])
        self.write(fail=False)
        self.calm += 1
        for chunk in self.chunks:  # what attention reads
            for position in range(chunk.start + chunk.count):
                held = self.memory.get((chunk.seq.blocks[position // self.size], position % self.size))
                assert held == chunk.seq.prefix(position + 1), "a step read the KV of another prefix"
        for chunk, token in zip(self.chunks, sampled, strict=False):
            seq = chunk.seq
            seq.computed = chunk.start + chunk.count
            if seq.missing == 0:
                if chunk.count > 1 or note:
                    self.note_partial(seq)
                seq.table.append(token)
        self.chunks, self.admitted = [], []
        for seq in self.running(idle=True):
            if len(seq.table) > MAX_TOKENS:
                self.end(seq)

    @precondition(lambda self: self.chunks and self.calm >= 2)
    @rule()
    def fail(self) -> None:
        """The step fails: its blocks are withdrawn, then its sequences end as the scheduler ends them."""
        self.write(fail=True)
        for chunk in self.chunks:
            self.retract(chunk.seq, chunk.published_before)
            chunk.seq.computed = min(chunk.seq.computed, chunk.published_before * self.size)
        for chunk in self.chunks:
            self.end(chunk.seq)
        self.chunks, self.admitted = [], []
        self.calm = 0

    # Between chunks

    @precondition(lambda self: self.running(idle=True))
    @rule(pick=picks)
    def finish(self, pick: int) -> None:
        idle = self.running(idle=True)
        self.end(idle[pick % len(idle)])

    def end(self, seq: Seq) -> None:
        self.remember(seq.prefix(len(seq.table)))
        self.note_partial(seq)
        self.release(seq)
        self.seqs.remove(seq)

    @precondition(lambda self: self.running(idle=True) and not self.pins)
    @rule(pick=picks, count=st.integers(1, 4))
    def pin(self, pick: int, count: int) -> None:
        idle = self.running(idle=True)
        seq = idle[pick % len(idle)]
        pinned = self.cache.pin(seq.table, count)
        assert pinned == seq.blocks[: min(count, seq.published)]
        self.model.share(pinned)
        self.pins.append(pinned)

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        blocks = self.pins.pop()
        self.cache.unpin(blocks)
        self.model.release(blocks)

    @precondition(lambda self: self.calm >= 8)
    @rule(tenant=st.none() | tenants)
    def clear(self, tenant: int | None) -> None:
        assert self.cache.clear(None if tenant is None else Salt(bytes([tenant]))) == self.model.clear(tenant)
        self.calm = 0

    @rule(tenant=tenants, pick=picks, kept=st.integers(0, MAX_TOKENS), fresh=prompts)
    def probe(self, tenant: int, pick: int, kept: int, fresh: list[int]) -> None:
        """A lookup finds the longest cached prefix, and where the memory is settled it holds exactly that prefix."""
        seq = self.open(tenant, self.related(pick, kept, fresh))
        match = self.look_up(seq)
        blocks = [*match.blocks, match.partial_block]
        if not self.chunks:
            for position in range(match.cached_tokens):
                assert self.memory[blocks[position // self.size], position % self.size] == seq.prefix(position + 1)

    # After every rule

    @invariant()
    def sound(self) -> None:
        """The cache's own proof of its invariants."""
        self.cache.check()

    @invariant()
    def agree(self) -> None:
        """Free list in eviction order, references, names and tables are the model's."""
        pool, model = self.cache.pool, self.model
        by_tenant = [[block for block in model.cached if model.owner[block] == one] for one in (0, 1)]
        assert pool.free_blocks() in [[*model.empty, *first, *second] for first, second in permutations(by_tenant)]
        assert [pool.references(block) for block in range(pool.num_blocks)] == model.refs
        names = [None if name is None else self.key(name) for name in model.name]
        assert [pool.key(block) for block in range(pool.num_blocks)] == names
        assert pool.num_cached == len(model.holders)
        assert self.known == {self.key(name) for name in model.holders}
        for seq in self.seqs:
            assert seq.table.blocks == seq.blocks
            assert seq.table.published == seq.published

    @invariant()
    def counted(self) -> None:
        """A block has as many references as tables and pins contain it."""
        tables = [*(seq.blocks for seq in self.seqs), *self.pins]
        for block, count in enumerate(self.model.refs):
            assert count == sum(blocks.count(block) for blocks in tables)

    @invariant()
    def no_orphans(self) -> None:
        """A parent is never evicted before its children: whatever is cached can be found."""
        for name in self.model.holders:
            parent = name[: -self.size]
            assert len(parent) == 1 or parent in self.model.holders

    @invariant()
    def contents(self) -> None:
        """Every published block that is not being filled by the step in the making holds the prefix of its name, and every
        noted partial block holds its tokens."""
        pending = {block for c in self.chunks for block in c.seq.blocks[c.published_before : c.seq.published]}
        for block, name in enumerate(self.model.name):
            if name is not None and block not in pending:
                for slot in range(self.size):
                    assert self.memory[block, slot] == name[: len(name) - self.size + slot + 1]
        for before, block, held in self.model.partials:
            for slot in range(len(held)):
                assert self.memory[block, slot] == (*before, *held[: slot + 1])


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


class TestAgainstTheModel(PrefixCacheMachine.TestCase):
    """After any sequence of operations, the cache is in the state of the model."""

    settings = examples(30)


@pytest.mark.slow
class TestAgainstTheModelLong(PrefixCacheMachine.TestCase):
    """Many more sequences of operations against the same model."""

    settings = examples(500)
