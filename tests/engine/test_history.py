"""Why did it miss? Each reason, its bounds, and the common prefix it rests on."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.common_prefixes import common_prefix_length
from foreword.blocks.salt import NO_SALT, Salt
from foreword.engine.cache_report import Explanation, MissHistory

SIZE = 4
ME, THEM = Salt(b"me"), Salt(b"them")


def of(*tokens: int) -> array[int]:
    return array("I", tokens)


def explain(
    prompt: list[int],
    cached: int,
    *seen: list[int],
    salt: Salt = ME,
    other: Salt = ME,
) -> Explanation:
    history = MissHistory(1000)
    for tokens in seen:
        history.add(other, of(*tokens))
    return history.explain(salt, of(*prompt), cached, SIZE)


small = st.lists(st.integers(0, 1), max_size=50)


@given(small, small, small)
def test_common_prefix_is_the_naive_one(first: list[int], second: list[int], shared: list[int]) -> None:
    """The binary search finds what counting one by one finds."""
    a, b = of(*shared, *first), of(*shared, *second)
    naive = 0
    while naive < min(len(a), len(b)) and a[naive] == b[naive]:
        naive += 1
    assert common_prefix_length(a, b) == common_prefix_length(b, a) == naive


def test_common_prefix_lets_go_of_the_arrays() -> None:
    """Both arrays can grow afterwards: no view of them is left."""
    a, b = of(1, 2, 3), of(1, 2, 4)
    assert common_prefix_length(a, b) == 2
    a.append(4)
    b.append(5)


def test_cached_to_the_last_full_block() -> None:
    """A prompt that this history has not seen, and of which all full blocks were cached: the detail says so."""
    found = explain(list(range(2 * SIZE + SIZE - 1)), 2 * SIZE)
    assert found.reason == "never_seen"
    assert found.detail == f"All full blocks were cached; the last {SIZE - 1} tokens do not fill a block."


@pytest.mark.parametrize(("length", "cached"), [(8, 8), (8, 7), (1, 0), (9, 8)])
def test_all_cached(length: int, cached: int) -> None:
    """A prompt of which only the last token is computed was cached whole."""
    assert explain(list(range(length)), cached) == Explanation(
        "all_cached", None, "Everything but the last token, which gives the logits, was cached."
    )


def test_shorter_than_a_block() -> None:
    """A prompt that does not fill a block cannot be shared."""
    found = explain([1, 2, 3], 0, [1, 2, 3, 4, 5])
    assert (found.reason, found.diverged_at) == ("shorter_than_block", None)


def test_the_rest_is_shorter_than_a_block() -> None:
    """A prompt seen whole, whose rest does not fill a block, missed nothing that could have been shared."""
    found = explain([1, 2, 3, 4, 5, 6, 7], 4, [1, 2, 3, 4, 5, 6, 7, 8])
    assert (found.reason, found.diverged_at) == ("shorter_than_block", None)
    assert "last 3 tokens" in found.detail


def test_never_seen() -> None:
    """Nothing that begins like the prompt was seen."""
    for seen in ([], [[9, 9, 9, 9, 9]]):
        found = explain([1, 2, 3, 4, 5, 6], 0, *seen)
        assert (found.reason, found.diverged_at) == ("never_seen", None)


def test_diverged() -> None:
    """The nearest of the sequences seen says where the prompt went its own way."""
    found = explain([1, 2, 3, 4, 5, 6, 7, 8], 4, [1, 2, 9], [1, 2, 3, 4, 5, 9, 9, 9], [1, 2, 3, 4, 9])
    assert (found.reason, found.diverged_at) == ("diverged", 5)
    assert "matches 5 tokens and differs at position 5" in found.detail


def test_diverged_before_the_first_block() -> None:
    """A divergence inside the first block is named by its position."""
    found = explain([1, 2, 9, 9, 9], 0, [1, 2, 3, 4, 5])
    assert (found.reason, found.diverged_at) == ("diverged", 2)


@pytest.mark.parametrize("cached", [0, 4, 5])
def test_evicted(cached: int) -> None:
    """Tokens that were computed before and are not cached any more have been evicted."""
    found = explain(list(range(12)), cached, list(range(10)))
    assert (found.reason, found.diverged_at) == ("evicted", None)
    assert "Tokens up to 10" in found.detail
    assert f"after token {cached}" in found.detail


def test_the_newest_token_of_a_sequence_was_not_evicted() -> None:
    """The next turn finds all that the last one computed; its very last token was never computed, so nothing was evicted."""
    found = explain(list(range(12)), 7, list(range(8)))
    assert (found.reason, found.diverged_at) == ("diverged", 8)


def test_what_was_reused_is_older_than_the_memory() -> None:
    """Where the cache knows more of the prompt than the memory does, no divergence before the reused tokens is claimed."""
    for seen in ([], [[0, 1, 9]], [[9]]):
        found = explain(list(range(12)), 8, *seen)
        assert (found.reason, found.diverged_at) == ("never_seen", None)
        assert bool("8 tokens" in found.detail)


def test_other_tenants_are_not_mentioned() -> None:
    """A prefix of another tenant was never seen."""
    assert explain(list(range(9)), 0, list(range(9)), other=THEM).reason == "never_seen"


def test_own_eviction_before_other_tenants() -> None:
    """A prefix that the tenant itself had computed was evicted, even if another tenant has it."""
    history = MissHistory(1000)
    history.add(ME, of(*range(9)))
    history.add(THEM, of(*range(9)))
    assert history.explain(ME, of(*range(9)), 0, SIZE).reason == "evicted"


def test_a_prompt_is_not_compared_with_itself() -> None:
    """The array under question does not count, even if it was remembered already."""
    history, prompt = MissHistory(1000), of(*range(9))
    history.add(ME, prompt)
    assert history.explain(ME, prompt, 0, SIZE).reason == "never_seen"
    assert history.explain(ME, prompt[:], 0, SIZE).reason == "evicted"


def test_tokens_generated_later_are_remembered() -> None:
    """The array that was added is the sequence's own, so what is appended to it counts."""
    history, tokens = MissHistory(1000), of(0, 1, 2)
    history.add(ME, tokens)
    tokens.extend(range(3, 10))
    assert history.explain(ME, of(*range(12)), 0, SIZE).reason == "evicted"


def test_a_salts_texts_are_forgotten() -> None:
    """Texts of a salt that is forgotten are neither returned nor compared any more, and take no capacity; without a client's
    salt these are all of the tenant's. Later texts are remembered as before."""
    history = MissHistory(64)
    own, with_client, other = Salt(b"ann"), Salt(b"ann", b"x"), Salt(b"bob")
    for number in range(8):
        history.add((own, with_client, other)[number % 3], of(*[number] * 8))
    history.forget(with_client)
    assert [len(history.recent(one, 9)) for one in (own, with_client, other)] == [3, 0, 2]
    assert history.explain(with_client, of(*[1] * 9), 0, 2).reason == "never_seen"
    history.forget(own)
    assert [len(history.recent(one, 9)) for one in (own, with_client, other)] == [0, 0, 2]
    for number in range(6):
        history.add(own, of(*[10 + number] * 8))
    assert [len(history.recent(one, 9)) for one in (own, other)] == [6, 2]


def test_the_oldest_are_forgotten() -> None:
    """More tokens than the capacity are not kept; the latest sequence is kept in any case."""
    history = MissHistory(10)
    history.add(ME, of(*range(8)))
    assert history.explain(ME, of(*range(9)), 0, SIZE).reason == "evicted"
    history.add(ME, of(*range(100, 104)))
    assert history.explain(ME, of(*range(9)), 0, SIZE).reason == "never_seen"
    assert history.explain(ME, of(*range(100, 105)), 0, SIZE).reason == "evicted"
    history.add(ME, of(*range(200, 250)))
    assert history.explain(ME, of(*range(200, 220)), 0, SIZE).reason == "evicted"
    assert history.explain(ME, of(*range(100, 105)), 0, SIZE).reason == "never_seen"


@given(st.integers(0, 30), st.lists(st.integers(0, 12), max_size=12))
def test_memory_is_bounded(capacity: int, lengths: list[int]) -> None:
    """The history holds at most `capacity` tokens, or one sequence. With capacity 0 it holds nothing."""
    history = MissHistory(capacity)
    for length in lengths:
        history.add(NO_SALT, of(*range(length)))
        held = [len(tokens) for tokens in history.recent(NO_SALT, 100)]
        assert sum(held) <= capacity or len(held) == 1
        if not capacity:
            assert not held


def test_the_number_of_short_sequences_is_bounded() -> None:
    """The newest 4,096 sequences are kept where all are far shorter than the capacity."""
    history = MissHistory(1 << 20)
    for number in range(5_000):
        history.add(NO_SALT, of(number, 1))
    kept = history.recent(NO_SALT, 10_000)
    assert len(kept) == 4_096 and (kept[0][0], kept[-1][0]) == (4_999, 904)


def test_tokens_generated_later_count() -> None:
    """Tokens that are appended to remembered arrays count: the history does not grow beyond its capacity by them."""
    history = MissHistory(1_000)
    for _ in range(1_000):
        tokens = of(1)
        history.add(NO_SALT, tokens)
        tokens.extend(range(99))
    assert 500 <= sum(len(tokens) for tokens in history.recent(NO_SALT, 1_000)) <= 1_500


def test_adding_does_not_depend_on_what_is_remembered() -> None:
    """Adding a sequence measures a few others, not all that are remembered."""
    history = MissHistory(1 << 20)
    measured = 0

    class Counted(array):  # type: ignore[type-arg]
        def __len__(self) -> int:
            nonlocal measured
            measured += 1
            return super().__len__()

    for _ in range(1_000):
        history.add(NO_SALT, Counted("I", (1, 2, 3)))
    assert measured <= 20_000


@given(small, small, st.integers(0, 50), st.integers(1, 6))
def test_every_explanation_is_true(prompt: list[int], seen: list[int], reused: int, size: int) -> None:
    """Whatever is asked, a divergence lies where the nearest sequence ends to agree, and never before the reused tokens."""
    if not prompt:
        return
    history = MissHistory(1000)
    history.add(NO_SALT, of(*seen))
    cached = min(reused, len(prompt))
    found = history.explain(NO_SALT, of(*prompt), cached, size)
    same = common_prefix_length(of(*prompt), of(*seen))
    if cached >= len(prompt) - 1:
        assert found.reason == "all_cached"
    elif found.reason == "diverged":
        assert found.diverged_at == same
        assert cached <= same < len(prompt)
    elif found.reason == "evicted":
        assert same >= (cached // size + 1) * size
    elif found.reason == "never_seen":
        assert same == 0 or same < cached
    else:
        assert found.reason == "shorter_than_block"
        assert len(prompt) < size or same == len(prompt)
