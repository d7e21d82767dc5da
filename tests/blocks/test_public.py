"""Public blocks: which keys they have, what follows them, and that nothing else becomes public."""

from __future__ import annotations

import random
from hashlib import sha256

import pytest
from example_counts import represented
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.blocks.keys import FINGERPRINT_BYTES, Scope, TokenChain, chain_keys, is_public
from foreword.blocks.layout import PREFIX_BYTES, block_names
from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.public_blocks import PublicBlocks, public_keys, public_root
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import PUBLIC, TENANT_BYTES, Salt

SCOPE = Scope(b"model", 4, Salt(b"tenant"))
TOKENS = [0, 1, 2**31, 2**32 - 1, 5, 6, 7, 8, 9, 10, 11, 12]
GOLDEN = [
    "17ca01849b44b5ce2a63857d14021c27609dc62abf4323cfe73c591eb7afc726",
    "200456ec12a7d9149175a07495ec7fef007075626c696300db7c3456e7a2c527",
    "7ca4d01f2129b812b97814603eab683e007075626c696300a5a4c406ea1d4ea8",
    "49da95f9aade9fd8e76ec1ea42087763733cc52e4f4eb47707e5a2b8cb7856d3",
]
SIZE = 4
texts = st.lists(st.integers(0, 1), max_size=40)
tenants = st.sampled_from([b"", b"ann", b"bob"])


def test_golden_vectors() -> None:
    """The keys of dev/formats.md: two public blocks, and the tenant's behind them."""
    public = PublicBlocks()
    public.set([public_keys(SCOPE, TOKENS[:9])])
    keys = public.keys_of(SCOPE, TOKENS)
    assert public_root(SCOPE).hex() == GOLDEN[0]
    assert [key.hex() for key in keys] == GOLDEN[1:]
    mark, parent = b"\x00public\x00", public_root(SCOPE)
    for number in range(2):
        data = b"".join(token.to_bytes(4, "little") for token in TOKENS[4 * number : 4 * number + 4])
        digest = sha256(parent + data).digest()
        parent = digest[:16] + mark + digest[24:]
        assert keys[number] == parent
    behind = sha256(parent + SCOPE.root()).digest()
    assert keys[2] == chain_keys(behind, TOKENS[8:], 4)[0]
    assert [is_public(key) for key in keys] == [True, True, False]
    roots = [name[FINGERPRINT_BYTES:PREFIX_BYTES] for name in block_names(bytes(16), SCOPE.root(), keys)]
    assert roots == [PUBLIC.digest, PUBLIC.digest, SCOPE.salt.digest]


@given(st.lists(texts, max_size=3), texts, st.lists(st.binary(max_size=1), max_size=10), tenants, tenants, st.data())
def test_what_is_shared(
    marked: list[list[int]], text: list[int], extras: list[bytes], one: bytes, other: bytes, data: st.DataObject
) -> None:
    """Two tenants share exactly the leading full blocks that a marked text has too, if no extra changes them. A fork has the
    keys of the chain of which it was made."""
    public, scopes = PublicBlocks(), [Scope(b"m", SIZE, Salt(tenant)) for tenant in (one, other)]
    public.set(public_keys(scopes[0], known) for known in marked)
    full = len(text) // SIZE
    same = 0
    for known in marked:
        blocks = range(min(full, len(known) // SIZE))
        end = next((i for i in blocks if known[: SIZE * (i + 1)] != text[: SIZE * (i + 1)] or any(extras[: i + 1])), -1)
        same = max(same, len(blocks) if end < 0 else end)
    keys, others = (public.keys_of(scope, text, extras) for scope in scopes)
    assert [is_public(key) for key in keys] == [True] * same + [False] * (full - same)
    shared = full if one == other else same
    assert [a == b for a, b in zip(keys, others, strict=True)] == [True] * shared + [False] * (full - shared)
    chain = public.chain(scopes[0].root(), scopes[0], text, extras)
    assert chain.public == same
    cut = data.draw(st.integers(0, len(text)))
    fork = chain.fork(cut)
    assert fork.keys_to(cut // SIZE) == keys[: cut // SIZE]
    if cut // SIZE >= same:
        fork.tokens.extend(text[cut:])
        assert fork.keys_to(full) == keys and fork.own_before(same) == chain.own_before(same)


def test_nothing_is_marked_at_first() -> None:
    """Without marks keys are those of the tenant, as in every version before."""
    chain = PublicBlocks().chain(SCOPE.root(), SCOPE, TOKENS)
    assert chain.keys_to(3) == TokenChain(SCOPE.root(), 4, TOKENS).keys_to(3) == chain_keys(SCOPE.root(), TOKENS, 4)
    assert [chain.key_before(0), chain.own_before(0)] == [SCOPE.root()] * 2


@pytest.mark.parametrize("windows", represented([False, True], True))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_public_blocks_count_for_no_tenant(windows: bool, seed: int) -> None:
    """Whatever requests of three tenants do: the pool's invariants hold, no two tenants have a block in common that is not
    public, each public block in use is counted for the public alone, and clearing a tenant leaves public blocks."""
    drawn = random.Random(seed)
    groups = [KVGroup(GroupKind.FULL, SIZE), KVGroup(GroupKind.WINDOW, SIZE, 6)] if windows else []
    cache = PrefixCache(60, SIZE, groups=groups, model=b"m", lookahead_blocks=drawn.choice([0, 1]))
    text = [drawn.randrange(2) for _ in range(18)]
    running: list[BlockTable] = []
    for step in range(60):
        if step in (10, 40):
            cache.public.set([public_keys(cache.scope(PUBLIC), text)] if step == 10 else [])
        act = drawn.random()
        if act < 0.5:
            prompt = text[: drawn.randrange(19)] + [drawn.randrange(2) for _ in range(drawn.randrange(1, 12))]
            table = cache.open(prompt, salt=Salt(drawn.choice([b"ann", b"bob", b"cyd"])))
            match = cache.lookup(table)
            if cache.new_blocks(table, match, len(table)) <= cache.pool.num_free:
                cache.admit(table, match)
                assert cache.advance(table, len(table))
                cache.copy_partial(table, match)
                if drawn.random() < 0.1:
                    cache.retract(table, len(match.blocks))
                else:
                    cache.note_partial(table, len(table))
                running.append(table)
        elif act < 0.9 and running:
            table = running.pop(drawn.randrange(len(running)))
            cache.trim(table, len(table))
            cache.release(table)
        elif act < 0.95:
            before = {key for key in cache.pool._index if is_public(key)}
            cache.clear(Salt(drawn.choice([b"ann", b"bob"])))
            assert {key for key in cache.pool._index if is_public(key)} == before
        cache.check()
        owners: dict[int, set[bytes]] = {}
        for table in running:
            for blocks in table.groups:
                for number, block in enumerate(blocks):
                    if block >= 0 and number < table.chain.public:
                        assert (cache.pool._owners[block] or b"")[:TENANT_BYTES] == PUBLIC.digest[:TENANT_BYTES]
                    elif block >= 0:
                        owners.setdefault(block, set()).add(table.salt.tenant)
        assert all(len(found) == 1 for found in owners.values())
    for table in running:
        cache.release(table)
    cache.check()


@pytest.mark.parametrize("public", [False, True])
def test_probes(public: bool) -> None:
    """1,000 probes, seeded: another tenant has sent half of the texts before. From what of a probe is cached, which is all that
    its time depends on, that cannot be told: the area under the curve is 0.5. For marked texts it may be; there both halves
    are cached to the last full block, so it is 0.5 too, and the marked text is known to be public."""
    drawn, cache = random.Random(7), PrefixCache(20_000, SIZE, model=b"m")
    texts = [[drawn.randrange(50) for _ in range(30)] for _ in range(1000)]
    if public:
        cache.public.set(public_keys(cache.scope(PUBLIC), text) for text in texts)
    used = [drawn.random() < 0.5 for _ in texts]
    for text, sent in zip(texts, used, strict=True):
        if sent or public:
            run(cache, text, b"" if sent else PUBLIC.tenant)
    cached = [run(cache, text[: drawn.choice([21, 30])], b"bob") for text in texts]
    assert area(cached, used) == pytest.approx(0.5, abs=0.05)
    assert set(cached) == ({20, 28} if public else {0})


def run(cache: PrefixCache, text: list[int], tenant: bytes) -> int:
    """Compute a prompt. Returns its cached tokens."""
    table = cache.open(text, salt=Salt(tenant))
    match = cache.lookup(table)
    cache.admit(table, match)
    assert cache.advance(table, len(text))
    cache.note_partial(table, len(text))
    cache.release(table)
    return match.cached_tokens


def area(values: list[int], used: list[bool]) -> float:
    """The probability that a probe of a text that was used has more cached than one of a text that was not."""
    yes = [value for value, one in zip(values, used, strict=True) if one]
    no = [value for value, one in zip(values, used, strict=True) if not one]
    return sum((a > b) + (a == b) / 2 for a in yes for b in no) / (len(yes) * len(no))
