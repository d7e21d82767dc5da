"""The contract of leases in the stores, for all that keep some: named prefixes and retentions of an engine, of another
one on the same store, and of vLLM's two processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from example_counts import represented
from servers import wait_until
from tiny import greedy

from foreword.blocks.keys import TokenChain
from foreword.blocks.resume import GroupKind, KVGroup
from foreword.blocks.salt import NO_SALT
from foreword.entrypoints.llm import LLM
from foreword.integrations.vllm_extras.retentions import CacheAction, ConnectorRetentions
from foreword.offload.search import StoredGroup
from foreword.prefixes.book import Content
from foreword.prefixes.pins import StorePins
from foreword.prefixes.prefix_service import PrefixService
from foreword.prefixes.stored_names import PrefixStorage
from foreword.store.urls import open_store

BLOCK = 4
COMMON = "What both texts begin with. "
ONE, OTHER = COMMON + "And one of them goes on.", COMMON + "Like this."


class Keeper(ABC):
    """Keeps texts whose blocks are in the store."""

    @abstractmethod
    def keep(self, text: str) -> None: ...

    @abstractmethod
    def end(self, text: str) -> None: ...


class EngineNames(Keeper):
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def keep(self, text: str) -> None:
        self.llm.add_prefix(f"p{len(text)}", text)
        assert self.llm.flush()

    def end(self, text: str) -> None:
        self.llm.remove_prefix(f"p{len(text)}")
        assert self.llm.flush()


class EngineRetentions(EngineNames):
    def keep(self, text: str) -> None:
        assert self.llm.retain(self.llm.tokenizer.encode(text), 600.0).status == "accepted"
        assert self.llm.flush()

    def end(self, text: str) -> None:
        assert len(self.llm.release(self.llm.tokenizer.encode(text))) == 1
        assert self.llm.flush()


class ConnectorKeeper(Keeper):
    """vLLM's engine process, as its scheduler side keeps what requests ask for."""

    def __init__(self, llm: LLM, url: str, group: StoredGroup) -> None:
        self._llm = llm
        self._store = open_store([url])
        model = bytes.fromhex(llm.info.namespace)
        self._retentions = ConnectorRetentions(self._store, [group], model, BLOCK, BLOCK, 1)

    def _apply(self, text: str, action: CacheAction) -> None:
        tokens = self._llm.tokenizer.encode(text)
        root = self._llm._core.cache.scope(NO_SALT).root()
        chain = TokenChain(root, BLOCK, tokens)
        keys = chain.keys_to(len(tokens) // BLOCK)[: len(tokens) // BLOCK]
        [answer] = self._retentions.apply([action], root, keys, len(tokens), b"")
        assert answer.tokens == len(keys) * BLOCK
        assert self._retentions._stored.flush(60)

    def keep(self, text: str) -> None:
        self._apply(text, CacheAction("retain", ttl=600.0))

    def end(self, text: str) -> None:
        self._apply(text, CacheAction("release"))

    def close(self) -> None:
        self._retentions.close()
        self._store.close()


class ServerNames(Keeper):
    """Names of a process that has no engine, as vLLM's API server has them."""

    def __init__(self, llm: LLM, url: str, group: StoredGroup) -> None:
        self._store = open_store([url])

        def tokenize(content: Content) -> list[int]:
            assert isinstance(content, str)
            return llm.tokenizer.encode(content)

        pins = StorePins(self._store, llm.info.namespace, [group])
        storage = PrefixStorage(self._store, pins, "m", BLOCK)
        self._service = PrefixService(tokenize, lambda name, tokens: None, storage)

    def keep(self, text: str) -> None:
        with self._service.register(f"server{len(text)}", text) as one:
            assert one.finish() is not None

    def end(self, text: str) -> None:
        self._service.remove(f"server{len(text)}")

    def close(self) -> None:
        self._store.close()


class Site:
    """A store, and all that keeps prefixes in it."""

    def __init__(self, make: Callable[..., LLM], url: str, stack: ExitStack) -> None:
        # As in a connector and its server, the weights' fingerprint names the KV.
        self.llm, other = (stack.enter_context(make("llama", store=url, batch_invariant="off")) for _ in range(2))
        for text in (ONE, OTHER):
            self.llm.generate(text, greedy(1))
        assert self.llm.flush() and self.llm.offload is not None and other.offload is not None
        layout = self.llm.offload.units[0].layouts[0]
        group = StoredGroup(KVGroup(GroupKind.FULL, BLOCK), (layout.fingerprint,))
        connector, server = ConnectorKeeper(self.llm, url, group), ServerNames(self.llm, url, group)
        stack.callback(connector.close)
        stack.callback(server.close)
        self.keepers: dict[str, Keeper] = {
            "names": EngineNames(self.llm),
            "retentions": EngineRetentions(self.llm),
            "names of another engine": EngineNames(other),
            "retentions of another engine": EngineRetentions(other),
            "connector": connector,
            "names of a server": server,
        }
        self._status = self.llm.offload.store.status
        status = self._status()
        self._block = status.bytes // status.blocks

    def keeps(self, *texts: str) -> None:
        """Exactly the blocks of these texts are pinned, or will be soon: pins are set and taken in the background."""
        tokens = [self.llm.tokenizer.encode(text) for text in texts]
        blocks = len({tuple(one[:end]) for one in tokens for end in range(BLOCK, len(one) + 1, BLOCK)})
        wait_until(lambda: self._status().pinned_bytes == blocks * self._block, f"{blocks} blocks to be pinned")


NAMES = ("names", "names of another engine", "names of a server")
RETENTIONS = ("retentions", "retentions of another engine", "connector")


@pytest.fixture(scope="module")
def site(engine: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with ExitStack() as stack:
        yield Site(engine, f"disk://{tmp_path_factory.mktemp('kept')}/store?size=64MiB", stack)


@pytest.mark.parametrize("second", represented([*NAMES, *RETENTIONS], *NAMES))
@pytest.mark.parametrize("first", [*NAMES, *RETENTIONS])
def test_what_another_one_needs_stays(site: Site, first: str, second: str) -> None:
    """Ending one of two leases that begin alike, in any two processes, unpins only what the other does not need; ending both
    leaves nothing."""
    one, other = site.keepers[first], site.keepers[second]
    kept = [(one, ONE), (other, OTHER)]
    for (ends, text), (stays, left) in (kept, kept[::-1]):
        one.keep(ONE)
        other.keep(OTHER)
        site.keeps(ONE, OTHER)
        ends.end(text)
        site.keeps(left)
        stays.end(left)
        site.keeps()


@pytest.mark.parametrize("second", RETENTIONS)
@pytest.mark.parametrize("first", NAMES)
def test_the_same_prefix_with_and_without_a_name(site: Site, first: str, second: str) -> None:
    """A release does not end a name, and a name that is removed does not end the retention of the same prefix."""
    named, retained = site.keepers[first], site.keepers[second]
    for ends_first, stays in ((named, retained), (retained, named)):
        named.keep(ONE)
        retained.keep(ONE)
        ends_first.end(ONE)
        site.keeps(ONE)
        stays.end(ONE)
        site.keeps()
