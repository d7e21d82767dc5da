"""Public blocks, and the chains that begin with them (`keys.py` has the form of their keys)."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import Final

from foreword.blocks.keys import MARK, MARKED, PUBLIC_ROOT, Scope, TokenChain, chain_keys
from foreword.blocks.salt import PUBLIC

_MOST_LEARNED: Final = 1 << 16


def as_public(digest: bytes) -> bytes:
    """The key of a public block, given the digest of its contents."""
    return digest[: MARKED.start] + MARK + digest[MARKED.stop :]


def roots_behind(root: bytes) -> bytes:
    """The first bytes of the roots of all blocks that may continue one with this root: any root for a public block."""
    return b"" if root.startswith(PUBLIC_ROOT) else root


def public_keys(
    scope: Scope, tokens: Sequence[int], extras: Sequence[bytes] = (), known: Container[bytes] | None = None
) -> list[bytes]:
    """Keys of the leading full blocks of a text as public ones: those that are `known`, or all."""
    return public_chain(public_root(scope), tokens, scope.block_size, extras, known)


def public_chain(
    parent: bytes,
    tokens: Sequence[int],
    size: int,
    extras: Sequence[bytes] = (),
    known: Container[bytes] | None = None,
) -> list[bytes]:
    """The chain behind a public block, or the root of public chains."""
    keys = list[bytes]()
    for block in range(len(tokens) // size):
        [digest] = chain_keys(parent, tokens[block * size : (block + 1) * size], size, extras[block : block + 1])
        parent = as_public(digest)
        if known is not None and parent not in known:
            break
        keys.append(parent)
    return keys


def public_root(scope: Scope) -> bytes:
    """The root key of public chains in a scope."""
    return replace(scope, salt=PUBLIC).root()


class PublicBlocks:
    """The blocks of one model that are public here: none at first.

    Attributes:
        keys: of all public blocks. It is replaced as a whole, from any thread.
    """

    def __init__(self) -> None:
        self.keys: frozenset[bytes] = frozenset()

    def set(self, chains: Iterable[Iterable[bytes]]) -> None:
        """From now on the blocks of these public chains are public, and no others."""
        self.keys = frozenset(key for chain in chains for key in chain)

    def add(self, keys: Sequence[bytes]) -> None:
        """Make these blocks public too, as long as there are not too many."""
        if not self.keys.issuperset(keys) and len(self.keys) + len(keys) <= _MOST_LEARNED:
            self.keys = self.keys.union(keys)

    def leading(self, scope: Scope, tokens: Sequence[int], extras: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the public blocks with which a prompt begins. With the salt PUBLIC, that of an administrator who marks
        a text, these are all."""
        if scope.salt == PUBLIC:
            return public_keys(scope, tokens, extras)
        return public_keys(scope, tokens, extras, self.keys) if self.keys else []

    def chain(self, root: bytes, scope: Scope, tokens: Iterable[int], extras: Sequence[bytes] = ()) -> TokenChain:
        """The chain of a prompt, given its scope and the root key of that."""
        chain = TokenChain(root, scope.block_size, tokens, extras)
        self.begin(chain, scope, extras)
        return chain

    def begin(self, chain: TokenChain, scope: Scope, extras: Sequence[bytes] = ()) -> None:
        """Give a new chain the public blocks with which its prompt begins."""
        if public := self.leading(scope, chain.tokens, extras):
            chain.begin(public, public_root(scope))

    def keys_of(self, scope: Scope, tokens: Iterable[int], extras: Sequence[bytes] = ()) -> list[bytes]:
        """Keys of the full blocks of a prompt."""
        chain = self.chain(scope.root(), scope, tokens, extras)
        return chain.keys_to(len(chain) // scope.block_size)
