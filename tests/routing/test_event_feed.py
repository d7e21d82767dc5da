"""KV events in vLLM's format, applied to the directory."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.blocks.keys import Scope, chain_keys
from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.public_blocks import public_keys
from foreword.blocks.salt import NO_SALT, PUBLIC, Salt
from foreword.routing.directory import NOTHING, CacheTier, Directory
from foreword.routing.event_feed import KeyTable, KvEventFeed

BLOCK = 4
ROOT = Scope(b"m", BLOCK).root()
Event = dict[str, object]


def keys_of(tokens: list[int], salt: Salt = NO_SALT) -> list[bytes]:
    return chain_keys(Scope(b"m", BLOCK, salt).root(), tokens, BLOCK)


def hashes_of(tokens: list[int]) -> list[int]:
    """A replica's own 64-bit hashes for each full block of a text."""
    return [hash(tuple(tokens[: end + BLOCK])) & (2**64 - 1) for end in range(0, len(tokens) - BLOCK + 1, BLOCK)]


def stored(tokens: list[int], first: int = 0, **more: object) -> Event:
    """The event for a text's blocks from number `first` on."""
    hashes = hashes_of(tokens)
    return {
        "type": "BlockStored",
        "block_hashes": hashes[first:],
        "parent_block_hash": hashes[first - 1] if first else None,
        "token_ids": tokens[first * BLOCK :],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: list[int], **more: object) -> Event:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", **more}


def feed() -> tuple[Directory, KvEventFeed]:
    directory = Directory(10_000)
    return directory, KvEventFeed(directory, "r", b"m", BLOCK)


TEXT = list(range(100, 140))


def test_blocks_are_found_by_router_keys() -> None:
    """Hashes are translated to keys by tokens and parents, and removed by the hash alone."""
    directory, one = feed()
    one.receive(0, [stored(TEXT[:20]), stored(TEXT, 5)])
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 10
    one.receive(1, [removed(hashes_of(TEXT)[7:])])
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 7
    one.receive(2, [{"type": "AllBlocksCleared"}])
    assert directory.lookup(keys_of(TEXT)).of("r") == NOTHING


def test_long_hashes_and_lists() -> None:
    """Hashes of 32 bytes, and events as lists (from older versions), are understood."""
    directory, one = feed()
    names = [bytes([i]) * 32 for i in range(1, 4)]
    one.apply(["BlockStored", names, None, TEXT[:12], BLOCK, None])
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 3
    one.apply(["BlockRemoved", names[2:]])
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 2


def test_media_are_tiers() -> None:
    """Blocks that were offloaded to host memory or storage are found there."""
    directory, one = feed()
    one.receive(0, [stored(TEXT[:8]), stored(TEXT[:16], medium="CPU"), stored(TEXT, medium="STORAGE")])
    assert directory.lookup(keys_of(TEXT)).of("r") == (2, 4, 10, 10)
    one.receive(1, [removed(hashes_of(TEXT)[2:], medium="CPU")])
    assert directory.lookup(keys_of(TEXT)).of("r") == (2, 2, 10, 10)


def test_remote_storage_is_shared() -> None:
    """Blocks in remote storage count for all replicas until they are removed."""
    directory, one = feed()
    one.receive(0, [stored(TEXT[:8]), stored(TEXT, medium="STORAGE", locality="REMOTE", ownership="redis")])
    held = directory.lookup(keys_of(TEXT))
    assert held.of("r") == (2, 2, 2, 10)
    assert held.of("another") == (0, 0, 0, 10)
    one.receive(1, [removed(hashes_of(TEXT)[4:], medium="STORAGE", locality="REMOTE")])
    assert directory.lookup(keys_of(TEXT)).of("another") == (0, 0, 0, 4)


def test_salts_are_distinguished() -> None:
    """A block stored with a salt, which the router has written or a client, is not found without it or with another salt; the
    same holds for the blocks after it."""
    salts = [Salt.of(tenant, given) for tenant in (b"", b"ann", b"bob") for given in (None, "x", "y")]
    for salt, text in [*((salt, salt.text) for salt in salts[1:]), (salts[1], "x")]:
        directory, one = feed()
        salted = [(text,)] + [None] * 4
        one.receive(0, [stored(TEXT[:20], extra_keys=salted), stored(TEXT, 5)])
        for other in salts:
            found = directory.lookup(keys_of(TEXT, other)).of("r")
            assert found[CacheTier.DEVICE] == 10 if other == salt else found == NOTHING


def test_blocks_without_a_key_are_skipped() -> None:
    """Adapters, images, unknown parents, other block sizes and unknown media are counted and not stored."""
    directory, one = feed()
    one.receive(
        0,
        [
            stored(TEXT, lora_name="adapter"),
            stored(TEXT, extra_keys=[(("image", 3),)] + [None] * 9),
            stored(TEXT, extra_keys=[None, (("image", 3),)] + [None] * 8),
            stored(TEXT, 5),
            stored(TEXT, block_size=8),
            stored(TEXT, medium="TAPE"),
        ],
    )
    assert len(directory) == 0
    assert one.counters.skipped_blocks == 55
    assert one.counters.malformed == 0


@settings(max_examples=100, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.binary(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium"]),
                inner,
            )
        ),
    ),
    st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "New"]),
)
def test_malformed_events_are_counted(junk: object, kind: str) -> None:
    """Whatever a replica sends, the feed continues and the directory stays intact."""
    directory, one = feed()
    one.apply(junk)
    one.apply({"type": kind, **(junk if isinstance(junk, dict) else {"block_hashes": junk})})
    one.apply([kind, junk, junk, junk, junk])
    one.apply(stored(TEXT))
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 10


def publish(one: KvEventFeed, number: int, *events: Event) -> bool:
    """A published message without a replay of missing ones. Returns whether messages before it were missing."""
    missing = one.published(number)
    one.receive(number, events)
    return missing


def test_a_gap_is_replayed() -> None:
    """Message 1 is missing and is replayed before message 2 is applied; messages that arrive twice count once."""
    directory, one = feed()
    assert not publish(one, 0, stored(TEXT[:8]))
    assert one.published(2)
    assert one.next == 1
    for number, event in ((1, stored(TEXT[:12], 2)), (2, stored(TEXT[:16], 3)), (3, stored(TEXT[:20], 4))):
        one.receive(number, [event])
    one.receive(2, [stored(TEXT[:16], 3)])
    assert not publish(one, 3, removed(hashes_of(TEXT[:20])[4:])), "it was replayed already"
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 5
    assert not publish(one, 4, removed(hashes_of(TEXT[:20])[4:]))
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 4
    assert (one.counters.gaps, one.counters.clears) == (1, 0)


def test_a_gap_without_replay_proves_no_loss() -> None:
    """Blocks known before the gap stay known, with what follows them: the replica does not report it again."""
    directory, one = feed()
    publish(one, 0, stored(TEXT[:20]))
    assert publish(one, 5, stored(TEXT, 5))
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 10


def test_a_snapshot_replaces_what_was_known() -> None:
    """The first message that a Foreword server replays after a gap says all that it has."""
    directory = Directory(10_000)
    one = KvEventFeed(directory, "r", b"m", BLOCK, counts_copies=False)
    publish(one, 0, stored(TEXT))
    one.receive(4, [stored(TEXT[:8])], replayed=True)
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 2


def test_a_late_subscriber_uses_what_is_replayed() -> None:
    """The first message has number 900: the replay counts as far as it reaches, and unknown parents are skipped."""
    directory, one = feed()
    assert one.published(900)
    one.receive(899, [stored(TEXT)])
    one.receive(900, [stored(TEXT[:8] + [7] * 8, 2)])
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 10
    assert directory.lookup(keys_of(TEXT[:8] + [7] * 8)).of("r")[CacheTier.DEVICE] == 4


def test_what_is_known_otherwise_of_a_cleared_replica_is_told_to_be_gone() -> None:
    """The feed says when a replica has lost its blocks: when it clears them, and at a restart. It does not when blocks are
    stored or removed, nor after a gap, of which it says that there was one."""
    told = list[bool]()
    one = KvEventFeed(Directory(10_000), "r", b"m", BLOCK, on_doubt=lambda replica, lost: told.append(lost))
    one.receive(0, [stored(TEXT)])
    one.receive(1, [removed(hashes_of(TEXT)[5:])])
    assert told == []
    one.receive(2, [{"type": "AllBlocksCleared"}])
    assert told == [True]
    one.receive(5, [])
    assert told == [True, False]
    assert not one.published(6)
    one.receive(6, [])
    one.published(0)
    assert told == [True, False, True]
    one.receive(0, [{"type": "AllBlocksCleared"}], replayed=True)
    assert told == [True, False, True, False], "an old clear says nothing of what the replica was sent since"


def test_a_restart_clears_the_replica() -> None:
    """A published message with an earlier number means that the replica restarted and holds nothing."""
    directory, one = feed()
    for number in range(4):
        publish(one, number, *([] if number else [stored(TEXT)]))
    assert not publish(one, 0, stored(TEXT[:8]))
    assert directory.lookup(keys_of(TEXT)).of("r")[CacheTier.DEVICE] == 2
    assert one.published(2)


def test_a_real_pool_is_followed() -> None:
    """Events of Foreword's own block pool under pressure: the directory holds what the pool holds."""
    directory, one = feed()
    sent: list[Event] = []
    names: dict[bytes, int] = {}
    texts: dict[bytes, list[int]] = {}

    def name(key: bytes) -> int:
        return names.setdefault(key, int.from_bytes(key[:8], "big"))

    def on_published(table: BlockTable, start: int, end: int) -> None:
        parent, keys = table.chain.key_before(start), table.chain.keys_to(end)[start:end]
        tokens = [token for key in keys for token in texts[key]]
        above = None if parent == cache.root(NO_SALT) else name(parent)
        hashes = [name(key) for key in keys]
        sent.append(stored([]) | {"block_hashes": hashes, "parent_block_hash": above, "token_ids": tokens})

    cache = PrefixCache(
        64,
        BLOCK,
        model=b"m",
        on_published=on_published,
        on_removed=lambda keys: sent.append(removed([*map(name, keys)])),
    )
    rng = random.Random(4)
    asked = []
    for number in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(8, 80))]
        asked.append(keys_of(tokens))
        texts |= {key: tokens[i * BLOCK : (i + 1) * BLOCK] for i, key in enumerate(asked[-1])}
        table = cache.open(tokens)
        cache.admit(table, cache.lookup(table))
        assert cache.advance(table, len(tokens))
        cache.release(table)
        one.receive(number, sent)
        sent.clear()
        for keys in asked[-20:]:
            held = len(cache.pool.lookup(keys))
            assert abs(directory.lookup(keys).of("r")[CacheTier.DEVICE] - held) <= 0


def test_the_table_of_hashes_is_bounded() -> None:
    """At most a hundred of a thousand hashes are kept, each with its own key, among them the last one."""
    table = KeyTable(100)
    names = [(i * 0x9E3779B97F4A7C15 & (2**64 - 1)).to_bytes(8, "big") for i in range(1000)]
    for name in names:
        table.put(name, name * 4)
    found = Counter(table.get(name) == name * 4 for name in names if table.get(name) is not None)
    assert found[False] == 0 < found[True] <= 100
    assert table.get(names[-1]) is not None


def test_public_blocks_and_what_follows_them() -> None:
    """Blocks with the salt PUBLIC are known to be public. What follows them is its tenant's, whose salt is in the extra keys of
    the first block, also an empty one."""
    directory, one = feed()
    scopes = [Scope(b"m", BLOCK, Salt(tenant)) for tenant in (b"", b"ann", b"bob")]
    names = hashes_of(TEXT)
    public = stored(TEXT[:12]) | {"extra_keys": [[PUBLIC.text], None, None]}
    more = stored(TEXT[:20], 3)
    one.receive(0, [public, more])
    assert len(directory.public.keys) == 5, "a public block behind others needs no salt"
    one.receive(1, [removed(names[3:5])])
    for number, scope in enumerate(scopes):
        behind = stored(TEXT, 3) | {
            "block_hashes": [name + number for name in names[3:]],
            "extra_keys": [[scope.salt.text], *[None] * 6],
        }
        one.receive(2 + number, [behind])
    directory.public.set([sorted(directory.public.keys - set(public_keys(scopes[0], TEXT[:20])[3:]))])
    for scope in scopes:
        keys = directory.public.keys_of(scope, TEXT)
        assert directory.lookup(keys).of("r")[CacheTier.DEVICE] == 10
    assert directory.lookup(directory.public.keys_of(Scope(b"m", BLOCK, Salt(b"cyd")), TEXT)).of("r")[0] == 3
    assert directory.lookup(keys_of(TEXT)).of("r") == NOTHING
    assert one.counters.skipped_blocks == one.counters.malformed == 0
