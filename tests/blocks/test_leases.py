"""The book of leases: one budget in bytes, names and retentions, priorities, expiry, tenants."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from example_counts import represented

from foreword.blocks.leases import Lease, Leases
from foreword.blocks.retention import Retention, RetentionAnswer

SIZE = 4  # tokens of a block
BYTES = 1000  # of a block


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Device:
    """References that the book holds, per block."""

    references: Counter[int] = field(default_factory=Counter)

    def take(self, blocks: list[int]) -> list[int]:
        self.references.update(blocks)
        return blocks

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.references[block] -= 1
            assert self.references[block] >= 0, "a reference is given back once"
        self.references += Counter()


class Case:
    """Budgets are given in blocks, and some bytes more than these take."""

    def __init__(
        self, budget: int, tenant_budget: int | None = None, retain_budget: int | None = None, **options: float
    ) -> None:
        self.clock, self.device = Clock(), Device()
        self.book = Leases[int](
            budget * BYTES + BYTES - 1,
            (budget if tenant_budget is None else tenant_budget) * BYTES + BYTES - 1,
            block_bytes=BYTES,
            retain_budget=None if retain_budget is None else retain_budget * BYTES + BYTES - 1,
            drop=lambda blocks: self.device.release(list(blocks)),
            clock=self.clock,
            **options,  # type: ignore[arg-type]
        )

    @property
    def retained(self) -> int:
        return self.book.retained_bytes // BYTES

    @property
    def named(self) -> int:
        return self.book.named_bytes // BYTES

    @property
    def free(self) -> int:
        return self.book.free // BYTES

    def retain(
        self, name: str, count: int, ttl: float | None = 60.0, priority: int = 0, tenant: str = "t", whole: bool = False
    ) -> RetentionAnswer:
        """Retain the first `count` blocks of the chain `name`."""
        keys, blocks = keys_of(tenant, name, count), self.device.take(blocks_of(tenant, name, count))
        wish = Retention(count * SIZE, ttl, priority)
        return self.book.retain(tenant, bytes(32), keys, blocks, wish, block_size=SIZE, whole=whole)

    def reserve(self, count: int) -> Lease[int] | None:
        return self.book.reserve("name", count)

    def fill(self, one: Lease[int], name: str, count: int) -> None:
        """The first `count` blocks of the chain `name` are computed."""
        self.book.fill(one, self.device.take(blocks_of("t", name, count)))

    def kept(self, tenant: str = "t") -> dict[bytes, int]:
        return {one.key: len(one.blocks) for one in self.book.of(tenant)}


def keys_of(tenant: str, name: str, count: int) -> list[bytes]:
    return [f"{tenant}/{name}/{i}".encode() for i in range(count)]


def blocks_of(tenant: str, name: str, count: int) -> list[int]:
    """Chains of different names share no block."""
    start = 1000 * (ord(name[0]) - ord("a")) + 100_000 * ord(tenant[0])
    return list(range(start, start + count))


def test_lowest_priority_then_oldest_makes_room() -> None:
    """A new retention takes the place of those with the lowest priority, and of those of equal priority unused for longest."""
    case = Case(10)
    for name, priority in (("a", 0), ("b", 5), ("c", 0)):
        assert case.retain(name, 3, priority=priority) == RetentionAnswer("accepted", 12, 60.0)
    assert case.retain("d", 3).status == "accepted"
    assert set(case.kept()) == {keys_of("t", name, 3)[-1] for name in "bcd"}
    case.book.on_path("t", keys_of("t", "c", 3))
    assert case.retain("e", 3).status == "accepted"
    assert set(case.kept()) == {keys_of("t", name, 3)[-1] for name in "bce"}


def test_what_does_not_fit_is_clipped_or_refused() -> None:
    """Retentions of higher priority stay: a further one is clipped to what they leave, or refused where a part is useless."""
    case = Case(10)
    assert case.retain("a", 7, priority=9).status == "accepted"
    clipped = case.retain("b", 5)
    assert (clipped.status, clipped.tokens) == ("clipped", 3 * SIZE)
    assert "budget" in clipped.reason
    refused = case.retain("c", 5, whole=True)
    assert (refused.status, refused.tokens) == ("refused", 0)
    assert case.retain("d", 12, priority=9).tokens == 10 * SIZE
    assert case.retain("e", 1, ttl=None).status == "accepted", "a pin ranks above every priority"


def test_shared_blocks_count_once() -> None:
    """The breakpoints of a conversation share its blocks, which the budget counts once."""
    case = Case(10)
    for count in (3, 6, 10):
        assert case.retain("a", count).status == "accepted"
    assert case.retained == 10
    assert case.book.count == 3
    case.book.release("t", keys_of("t", "a", 10)[8:])
    assert case.retained == 6
    assert case.device.references == Counter(blocks_of("t", "a", 6)) + Counter(blocks_of("t", "a", 3))


def test_a_ttl_counts_from_the_last_use() -> None:
    """A retention ends its ttl after its last use; a longer ttl than allowed is shortened; pins stay."""
    case = Case(20, longest=100.0)
    assert case.retain("a", 2, ttl=60.0).ttl == 60.0
    assert case.retain("b", 2, ttl=1e9).ttl == 100.0
    assert case.retain("c", 2, ttl=None).ttl is None
    case.clock.now += 59
    assert [one.tokens for one in case.book.on_path("t", keys_of("t", "a", 5))] == [2 * SIZE]
    case.clock.now += 59
    case.book.expire()
    assert case.book.count == 2, "the second one is over, the first one was used"
    case.clock.now += 2
    case.book.expire()
    assert list(case.kept()) == [keys_of("t", "c", 2)[-1]]
    assert case.device.references == Counter(blocks_of("t", "c", 2))


def test_tenants_share_the_budget_fairly() -> None:
    """A tenant may use what others leave; another tenant gets its equal share back whatever priority the first one claims."""
    case = Case(12)
    for name in "abc":
        assert case.retain(name, 4, ttl=None, priority=100, tenant="x").status == "accepted"
    assert case.retain("a", 4, tenant="y").status == "accepted"
    assert case.retained == 12
    clipped = case.retain("b", 9, tenant="y", priority=100)
    assert (clipped.status, clipped.tokens) == ("clipped", 6 * SIZE)
    assert (sum(case.kept("x").values()), sum(case.kept("y").values())) == (4, 6), (
        "x keeps whole retentions of 4 blocks"
    )
    assert case.book.release("y", keys_of("x", "c", 4)) == [], "keys of another tenant release nothing"


def test_a_tenant_has_a_limited_number() -> None:
    """The number of a tenant's retentions is limited; those that rank lowest end first."""
    case = Case(1000, most=5)
    for number in range(8):
        assert case.retain("abcdefgh"[number], 1, priority=number % 2).status == "accepted"
    assert case.book.count == 5
    for name in "pqrst":
        case.retain(name, 1, ttl=None)
    assert case.retain("z", 1).status == "refused"


def test_yielding_takes_the_lowest_rank_first_and_forgets_nothing() -> None:
    """Under memory pressure device blocks are given up by rank; the retentions stay known, and keep blocks again."""
    case = Case(100)
    case.retain("a", 4, priority=1)
    case.retain("b", 4)
    assert case.book.yield_blocks()
    assert case.kept() == {keys_of("t", "a", 4)[-1]: 4, keys_of("t", "b", 4)[-1]: 0}
    assert case.book.yield_blocks()
    assert not case.book.yield_blocks()
    assert not case.device.references
    assert case.retain("b", 4).status == "accepted"
    assert case.retained == 4


def test_a_name_does_not_yield() -> None:
    """A name's blocks are reserved before they are computed. Retentions give up theirs for it, whatever their priority, stay
    known, and share what names leave; another name that does not fit is refused."""
    case = Case(10)
    assert case.retain("a", 4).status == "accepted"
    assert case.retain("b", 4, ttl=None, priority=100).status == "accepted"
    name = case.reserve(6)
    assert name is not None
    assert (case.retained, case.free) == (4, 4)
    assert case.kept() == {keys_of("t", "a", 4)[-1]: 0, keys_of("t", "b", 4)[-1]: 4}
    assert case.reserve(5) is None
    case.fill(name, "n", 5)
    assert (case.named, case.free) == (5, 5), "no more than was computed"
    assert not [case.book.yield_blocks() for _ in range(2)][1], "only what is retained yields"
    assert case.retain("c", 9).tokens == 5 * SIZE
    case.book.end(name)
    case.book.end(name)
    assert (case.named, case.free) == (0, 10)
    assert case.retain("c", 9).status == "accepted"


def test_names_share_blocks() -> None:
    """Blocks that two names share count once, and stay until both have ended. What is computed for a name that has ended is
    given back."""
    case = Case(10)
    one, two, late = (case.reserve(count) for count in (4, 3, 2))
    assert one is not None and two is not None and late is not None
    case.fill(one, "n", 4)
    case.fill(two, "n", 3)
    assert (case.named, case.free) == (4, 4)
    case.book.end(one)
    assert set(case.device.references) == set(blocks_of("t", "n", 3))
    case.book.end(late)
    case.fill(late, "m", 2)
    assert set(case.device.references) == set(blocks_of("t", "n", 3))


def test_retentions_have_a_part_of_the_budget() -> None:
    """Retentions keep their part of the budget at most; names may take all of it."""
    case = Case(10, retain_budget=4)
    assert case.retain("a", 9).tokens == 4 * SIZE
    assert case.reserve(6) is not None
    assert case.retained == 4
    assert case.reserve(4) is not None
    assert case.retained == 0
    assert case.retain("b", 1).status == "refused"


@pytest.mark.parametrize("seed", represented(range(30), *range(10)))
def test_random_histories(seed: int) -> None:
    """Whatever happens, the book holds exactly the references of what it keeps, no budget is exceeded, no retention lives past
    its ttl, no name yields, and a retention is only refused or clipped if what ranks above it leaves no room."""
    chance = random.Random(seed)
    budget = chance.randrange(1, 40)
    tenant_budget, part = chance.randrange(1, budget + 1), chance.randrange(1, budget + 1)
    case = Case(budget, tenant_budget, most=6, retain_budget=part)
    names: list[tuple[Lease[int], int]] = []
    for _ in range(300):
        action = chance.random()
        tenant, name, count = chance.choice("xyz"), chance.choice("abcdef"), chance.randrange(1, 15)
        if action < 0.5:
            ttl = chance.choice([5.0, 50.0, None])
            before = {one.key: (one.rank, set(one.blocks)) for one in case.book.of(tenant)}
            others = [one for one in "xyz" if one != tenant and sum(case.kept(one).values())]
            priority, whole = chance.randrange(3), chance.random() < 0.3
            answer = case.retain(name, count, ttl, priority, tenant, whole)
            if answer.status != "accepted":
                above = [blocks for rank, blocks in before.values() if rank[:2] > (ttl is None, priority)]
                alone = len(set().union(*above, blocks_of(tenant, name, count)))
                share = min(tenant_budget, min(part, case.free) // (len(others) + 1))
                assert alone > share or len(above) >= 6
            if answer.status != "refused":
                assert keys_of(tenant, name, answer.tokens // SIZE)[-1] in case.kept(tenant)
        elif action < 0.55 and (named := case.reserve(count)) is not None:
            names.append((named, count))
        elif action < 0.6 and names:
            number = chance.randrange(len(names))
            if not names[number][0].blocks and chance.random() < 0.5:
                case.fill(names[number][0], name, names[number][1])
            else:
                case.book.end(names.pop(number)[0])
        elif action < 0.7:
            case.book.on_path(tenant, keys_of(tenant, name, count))
        elif action < 0.8:
            case.book.release(tenant, keys_of(tenant, name, count))
            assert not any(key in case.kept(tenant) for key in keys_of(tenant, name, count))
        elif action < 0.9:
            case.book.yield_blocks()
        else:
            case.clock.now += chance.uniform(0, 20)
            case.book.expire()
        _check(case, budget, tenant_budget, part, names)


def _check(case: Case, budget: int, tenant_budget: int, part: int, names: Sequence[tuple[Lease[int], int]]) -> None:
    held = Counter(block for one, _ in names for block in one.blocks)
    assert all(len(one.blocks) + one.reserved == count for one, count in names)
    named = len(held)
    assert (case.named, case.free) == (named, budget - named - sum(one.reserved for one, _ in names))
    retained: set[int] = set()
    for tenant in "xyz":
        mine: set[int] = set()
        entries = case.book.of(tenant)
        assert len(entries) <= 6
        for one in entries:
            held.update(one.blocks)
            mine.update(one.blocks)
            retained.update(one.blocks)
            assert one.ttl is None or case.clock.now <= one.expires <= case.clock.now + one.ttl
        assert len(mine) <= tenant_budget
    assert held == case.device.references
    assert len(retained) == case.retained <= min(part, case.free)


@pytest.mark.parametrize("here", ["first", "there first"])
def test_another_instance_keeps_the_same_prefix_longer(here: str) -> None:
    """A prefix that is retained here for a minute and elsewhere for an hour is kept for an hour behind its last use, with the
    higher priority, whichever is known first; a use never brings an end closer."""
    case = Case(10)
    keys, blocks = keys_of("t", "a", 3), blocks_of("t", "a", 3)
    there = Lease[int]("t", bytes(32), keys, 3 * SIZE, 3600.0, 50, case.clock.now + 3600.0, stored=True)
    for known in ("here", "there") if here == "first" else ("there", "here"):
        if known == "here":
            case.retain("a", 3, 60.0)
        else:
            assert case.book.adopt(there)
    [kept] = case.book.of("t")
    assert (kept.expires, kept.ttl, kept.priority, kept.stored) == (case.clock.now + 3600.0, 3600.0, 50, True)
    assert list(kept.blocks) == blocks
    case.clock.now += 3000.0
    case.book.on_path("t", keys)
    case.clock.now += 3000.0
    case.book.expire()
    assert case.book.of("t") == [kept]
    # A record may say an end that lies behind its ttl.
    case.book.adopt(Lease[int]("t", bytes(32), keys, 3 * SIZE, 10.0, 0, case.clock.now + 9000.0, stored=True))
    case.book.on_path("t", keys)
    assert kept.expires == case.clock.now + 9000.0
