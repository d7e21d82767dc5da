"""Block keys: the specified format, its golden vectors, and what changes a key."""

from __future__ import annotations

import hmac
import os
import struct
import subprocess
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.blocks.keys import KEY_BYTES, KEY_FORMAT, Scope, TokenChain, chain_keys, token_bytes
from foreword.blocks.layout import chain_prefix
from foreword.blocks.salt import NO_SALT, Salt, tenant_digest
from foreword.errors import BadRequest

ROOT = Path(__file__).resolve().parents[2]

PLAIN = Scope(b"", 16)
PLAIN_ROOT = "67026fb5c7a6f2431dee06d950ea0c468c4a27a344561de4c10c86280ea4103d"
PLAIN_KEYS = [  # tokens 0..31
    "f8c2a8d1e98d0205cac4a6acb373ae6759efbc82321f513cb8c4b8c4aaafaf54",
    "4851824bdbec73ca074cd8f1eb37b87c2e2709f944f14963360e63eb7adb799d",
]
TENANT = Scope(b"model", 4, Salt(b"tenant"))
TENANT_SCOPE = "666f7265776f72642f6b6579000200000004000000050000006d6f64656c0600000074656e616e74"
TENANT_ROOT = "ccf1a2befabfa4946db6744a600354e93ce2c3098515621b4ee9565053b97469"
TENANT_TOKENS = [0, 1, 2**31, 2**32 - 1, 5, 6, 7, 8]
TENANT_KEYS = [
    "00302a132d712f9f9a62f17c5060ced0b1b5e9876af0c68d5a8bc0e6ffc6b6ff",
    "c6694ee870ca8300f64b5683f556b4928423da9a592e04536562c9c7df70cdb3",
]
ADAPTER_KEY = "f0c48a8550c5ceb3d1eeeef22dd3b5191a884a3eaef0e521e78dc8729404a08f"  # block 1, its extra b"adapter"

CLIENT = Scope(b"model", 4, Salt.of(b"tenant", "session 1"))
CLIENT_SALT = "3a0b5ac40eb2bbb743fcda1f48bc4d21"
CLIENT_ROOT = "ccf1a2befabfa4946db6744a848322eff3eb05104873e68e89a7468b8d75f783"
CLIENT_KEY = "1bb53d1fc5d349ce06008e27e4d93ad57cca0ace7511b7d0ad2af0e18a3acad2"  # block 0 of TENANT_TOKENS

tokens_of = st.lists(st.integers(0, 2**32 - 1), max_size=40)
small_tokens = st.lists(st.integers(0, 3), max_size=40)
block_sizes = st.integers(1, 7)
extras_of = st.lists(st.binary(max_size=3), max_size=12)
tenants = st.sampled_from([b"", b"\x00", b"ann", b"bob", b"ann/bob"]) | st.binary(max_size=40)
# Also what looks like the text of a salt, which a client may send.
given_salts = (
    st.sampled_from([None, "", "x", "/", "foreword:", "foreword:616e6e"])
    | st.builds(
        lambda tenant, given: Salt.of(tenant, given).text, tenants, st.sampled_from([None, "x"]) | st.text(max_size=9)
    )
    | st.text(max_size=9)
)
salts = st.builds(Salt.of, tenants, given_salts)


def written_scope(scope: Scope) -> bytes:
    """The scope as dev/formats.md writes it, made without the code under test."""
    text = b"foreword/key\x00" + (2).to_bytes(4, "little") + scope.block_size.to_bytes(4, "little")
    for part in (scope.model, scope.salt.tenant, *[scope.salt.client] * bool(scope.salt.client)):
        text += len(part).to_bytes(4, "little") + part
    return text


def written_root(scope: Scope) -> bytes:
    """The root as dev/formats.md writes it."""
    salt = sha256(b"foreword/tenant\x00" + scope.salt.tenant).digest()[:16]
    if scope.salt.client:
        salt = salt[:12] + sha256(b"foreword/salt\x00" + scope.salt.client).digest()[:4]
    return salt + sha256(written_scope(scope)).digest()[:16]


def written_keys(root: bytes, tokens: Sequence[int], block_size: int, extras: Sequence[bytes] = ()) -> list[bytes]:
    """The chain as dev/formats.md writes it, made without the code under test."""
    keys, parent = [], root
    for number in range(len(tokens) // block_size):
        block = tokens[number * block_size : (number + 1) * block_size]
        extra = extras[number] if number < len(extras) else b""
        parent = sha256(parent + struct.pack(f"<{block_size}I", *block) + extra).digest()
        keys.append(parent)
    return keys


def hexes(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def test_golden_vectors() -> None:
    """The keys of three written-down chains never change; a change of the format must change KEY_FORMAT and these."""
    assert (KEY_FORMAT, KEY_BYTES) == (2, 32)
    assert PLAIN.root().hex() == PLAIN_ROOT
    assert hexes(chain_keys(PLAIN.root(), range(32), 16)) == PLAIN_KEYS
    assert TENANT.encode().hex() == TENANT_SCOPE
    assert TENANT.root().hex() == TENANT_ROOT
    assert hexes(chain_keys(TENANT.root(), TENANT_TOKENS, 4)) == TENANT_KEYS
    assert hexes(chain_keys(TENANT.root(), TENANT_TOKENS, 4, [b"", b"adapter"])) == [TENANT_KEYS[0], ADAPTER_KEY]
    assert (CLIENT.salt.client.hex(), CLIENT.root().hex()) == (CLIENT_SALT, CLIENT_ROOT)
    assert chain_keys(CLIENT.root(), TENANT_TOKENS, 4)[0].hex() == CLIENT_KEY


def test_golden_vectors_agree_with_the_written_format() -> None:
    """The golden vectors are what the written format gives when it is followed by hand."""
    assert hexes(written_keys(written_root(PLAIN), range(32), 16)) == PLAIN_KEYS
    root = written_root(TENANT)
    assert hexes(written_keys(root, TENANT_TOKENS, 4)) == TENANT_KEYS
    assert written_keys(root, TENANT_TOKENS, 4, [b"", b"adapter"])[1].hex() == ADAPTER_KEY
    assert hmac.digest(b"tenant", b"cache_salt\x00session 1", "sha256")[:16].hex() == CLIENT_SALT
    assert written_keys(written_root(CLIENT), TENANT_TOKENS, 4)[0].hex() == CLIENT_KEY


def test_the_documented_vectors_are_the_tested_ones() -> None:
    """dev/formats.md quotes exactly the golden vectors."""
    text = (ROOT / "dev" / "formats.md").read_text(encoding="utf-8")
    for vector in (
        PLAIN_ROOT,
        *PLAIN_KEYS,
        TENANT_SCOPE,
        TENANT_ROOT,
        *TENANT_KEYS,
        ADAPTER_KEY,
        CLIENT_SALT,
        CLIENT_ROOT,
        CLIENT_KEY,
    ):
        assert vector in text


@given(st.binary(max_size=40), st.integers(1, 2**32 - 1), salts)
def test_scope_follows_the_written_format(model: bytes, block_size: int, salt: Salt) -> None:
    """Every scope is encoded as written, and its root has the digests of the salt and of that."""
    scope = Scope(model, block_size, salt)
    assert scope.encode() == written_scope(scope)
    assert scope.root() == written_root(scope)


@given(tokens_of, block_sizes, extras_of)
def test_chain_follows_the_written_format(tokens: list[int], block_size: int, extras: list[bytes]) -> None:
    """Every chain is encoded as written, with and without extras, and a partial last block has no key."""
    root = Scope(b"model", block_size).root()
    assert chain_keys(root, tokens, block_size) == written_keys(root, tokens, block_size)
    assert chain_keys(root, tokens, block_size, extras) == written_keys(root, tokens, block_size, extras)


@pytest.mark.parametrize("seed", ["0", "1", "4294967295"])
def test_same_keys_in_a_fresh_process(seed: str) -> None:
    """Another process with another hash seed computes the same keys."""
    program = (
        "from foreword.blocks.keys import Scope, chain_keys\n"
        "from foreword.blocks.salt import Salt\n"
        "scope = Scope(b'model', 4, Salt(b'tenant'))\n"
        "keys = chain_keys(scope.root(), [0, 1, 2**31, 2**32 - 1, 5, 6, 7, 8], 4)\n"
        "print(scope.root().hex(), *(key.hex() for key in keys))\n"
    )
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [TENANT_ROOT, *TENANT_KEYS]


@pytest.mark.parametrize(
    "other", [Scope(b"model2", 4, TENANT.salt), Scope(b"model", 4, Salt(b"other")), Scope(b"model", 4)]
)
def test_model_and_salt_change_every_key(other: Scope) -> None:
    """A chain of another model or another tenant has no key in common."""
    mine = {TENANT.root(), *chain_keys(TENANT.root(), TENANT_TOKENS, 4)}
    theirs = {other.root(), *chain_keys(other.root(), TENANT_TOKENS, 4)}
    assert not mine & theirs


@given(tenants, given_salts, tenants, given_salts)
def test_tenants_and_salts_never_share(tenant: bytes, given: str | None, other: bytes, another: str | None) -> None:
    """Whatever a client sends as its salt: another tenant's chain has no key in common with its own, nor has one of its tenant
    with another salt. The names of all its blocks say whose they are, and those of its salt."""
    one, two = Salt.of(tenant, given), Salt.of(other, another)
    same = (tenant, given or "") == (other, another or "")
    roots = [Scope(b"model", 4, salt).root() for salt in (one, two)]
    keys = [{root, *chain_keys(root, TENANT_TOKENS, 4)} for root in roots]
    assert bool(keys[0] & keys[1]) == same == (one == two)
    named = [chain_prefix(bytes(16), root)[16:] for root in roots]
    assert named == [one.digest, two.digest]
    assert named[0].startswith(Salt(tenant).prefix) and named[0].startswith(one.prefix)
    assert named[1].startswith(Salt(tenant).prefix) == (tenant == other)
    if one.client:
        assert (one.prefix, named[1].startswith(one.prefix)) == (named[0], same)


@given(tenants, given_salts, given_salts)
def test_an_engine_without_tenants_reads_what_a_router_writes(
    tenant: bytes, given: str | None, raw: str | None
) -> None:
    """The text of a salt stands for it, and no other text does. What a client sends itself divides the cache of those without
    a tenant, unless it is such a text, for which it has to know the tenant's salt."""
    salt, read = Salt.of(tenant, given), Salt.parse(raw)
    assert Salt.parse(salt.text) == salt
    if read.text != raw:
        assert read == Salt.of(b"", raw)


def test_a_salt_says_nothing() -> None:
    """Without tenant and salt a request has the keys that it always had, and the digest of the tenant is that of records."""
    assert (Salt.of(b"", None), Salt.of(b"", ""), Salt.parse(None), Salt.parse("")) == (NO_SALT,) * 4
    assert not NO_SALT and NO_SALT.text == "" and NO_SALT.digest.hex() == tenant_digest(b"")
    assert Salt(b"x") and Salt(b"", b"x")


@given(st.integers(1, 6), st.integers(1, 6))
def test_block_size_changes_every_key(first: int, second: int) -> None:
    """Chains of the same tokens under different block sizes have no key in common."""
    a, b = Scope(b"model", first), Scope(b"model", second)
    mine = {a.root(), *chain_keys(a.root(), range(24), first)}
    theirs = {b.root(), *chain_keys(b.root(), range(24), second)}
    assert bool(mine & theirs) == (first == second)


parts = st.binary(max_size=6)


@given(parts, st.builds(Salt, parts, parts), parts, st.builds(Salt, parts, parts))
def test_scope_has_one_reading(model: bytes, salt: Salt, other_model: bytes, other_salt: Salt) -> None:
    """No bytes can wander from the model to the salt, or within it: equal encodings mean equal scopes."""
    first, second = Scope(model, 4, salt), Scope(other_model, 4, other_salt)
    assert (first.encode() == second.encode()) == (first == second)


@given(small_tokens, small_tokens, block_sizes)
def test_a_key_names_the_whole_prefix(first: list[int], second: list[int], block_size: int) -> None:
    """Two chains share the keys of exactly the leading blocks in which they agree, and never find each other later."""
    root = Scope(b"model", block_size).root()
    mine, theirs = chain_keys(root, first, block_size), chain_keys(root, second, block_size)
    for number, key in enumerate(mine):
        end = (number + 1) * block_size
        assert (key in theirs) == (len(second) >= end and first[:end] == second[:end])


def test_an_extra_changes_its_block_and_all_that_follow() -> None:
    """An extra behind block 1 changes the keys of blocks 1, 2, ... and leaves block 0 alone."""
    root = TENANT.root()
    plain = chain_keys(root, range(16), 4)
    marked = chain_keys(root, range(16), 4, [b"", b"adapter"])
    assert plain[0] == marked[0]
    assert not set(plain[1:]) & set(marked[1:])


@given(small_tokens, block_sizes, st.integers(0, 12))
def test_an_empty_extra_is_none(tokens: list[int], block_size: int, count: int) -> None:
    """b"" as an extra, any number of times, is the same as no extra."""
    root = Scope(b"model", block_size).root()
    assert chain_keys(root, tokens, block_size, [b""] * count) == chain_keys(root, tokens, block_size)


@given(tokens_of, block_sizes, extras_of, st.lists(st.integers(0, 40), max_size=6), st.integers(0, 40))
def test_a_chain_grown_lazily_is_the_chain_made_at_once(
    tokens: list[int], block_size: int, extras: list[bytes], asks: list[int], given_first: int
) -> None:
    """However tokens are appended and keys are asked for, a TokenChain has the keys that `chain_keys` makes at once."""
    root = Scope(b"model", block_size).root()
    expected = chain_keys(root, tokens, block_size, extras)
    chain = TokenChain(root, block_size, tokens[:given_first], extras)
    for ask in asks:
        full = len(chain) // block_size
        assert chain.keys_to(min(ask, full))[:full] == expected[: max(min(ask, full), len(chain.keys))]
        if len(chain) < len(tokens):
            chain.tokens.append(tokens[len(chain)])
    for token in tokens[len(chain) :]:
        chain.tokens.append(token)
    assert chain.keys_to(len(tokens) // block_size) == expected
    assert [chain.key_before(number) for number in range(len(expected) + 1)] == [root, *expected]


@given(small_tokens, block_sizes, st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_a_forked_chain_is_a_chain_of_its_own(
    tokens: list[int], block_size: int, kept: int, asked: int, extra: bool
) -> None:
    """A fork has the keys of the tokens it kept, and what is appended to one of the two does not reach the other."""
    root, extras = Scope(b"model", block_size).root(), [b"x"] if extra else []
    parent = TokenChain(root, block_size, tokens, extras)
    parent.keys_to(min(asked, len(tokens) // block_size))
    child = parent.fork(kept)
    child.tokens.extend([9] * block_size)
    mine = [*tokens[:kept], *[9] * block_size]
    assert child.tokens.tolist() == mine
    assert child.keys_to(len(mine) // block_size) == chain_keys(root, mine, block_size, extras)
    assert parent.tokens.tolist() == tokens
    assert parent.keys_to(len(tokens) // block_size) == chain_keys(root, tokens, block_size, extras)


def test_a_chain_does_not_keep_the_callers_array() -> None:
    """The caller's array stays the caller's: a chain appends to a copy."""
    given_tokens = array("I", [1, 2, 3])
    chain = TokenChain(TENANT.root(), 4, given_tokens)
    chain.tokens.append(4)
    assert given_tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("bad", [-1, 2**32, 10**30, 1.5, "7", None])
def test_a_token_out_of_range_is_a_bad_request(bad: object) -> None:
    """Whatever is not an integer of 32 bits is refused as the client's mistake, wherever tokens come in."""
    tokens: list[int] = [1, 2, 3, bad]  # type: ignore[list-item]
    with pytest.raises(BadRequest, match="0 to 4294967295") as caught:
        token_bytes(tokens)
    assert caught.value.param == "prompt"
    with pytest.raises(BadRequest):
        chain_keys(TENANT.root(), tokens, 4)
    with pytest.raises(BadRequest):
        TokenChain(TENANT.root(), 4, tokens)


@pytest.mark.parametrize(
    "make", [list, tuple, bytes, bytearray, iter, lambda t: array("I", t), lambda t: array("q", t)]
)
def test_tokens_mean_the_same_in_every_container(make: type) -> None:
    """A token is one item of the iterable, whatever the iterable is; bytes are tokens below 256."""
    assert token_bytes(make([1, 0, 0, 255, 7])) == struct.pack("<5I", 1, 0, 0, 255, 7)
