"""Public prefixes on Foreword's engine: what tenants share, and that they share nothing else."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from example_counts import represented
from patience import patient, unhurried
from tiny import VOCAB, greedy

from foreword.blocks.keys import FINGERPRINT_BYTES
from foreword.blocks.layout import PREFIX_BYTES
from foreword.blocks.public_blocks import public_keys
from foreword.blocks.salt import PUBLIC, Salt, derive_salt
from foreword.engine.request import CacheReport, Request
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.prefixes import prefix_service
from foreword.prefixes.book import NamedPrefix
from foreword.prefixes.erasure import forget_chain, forget_prefix
from foreword.prefixes.errors import UnknownPrefix
from foreword.store.base import Name
from foreword.store.tiered import TieredStore
from foreword.store.urls import open_store
from foreword.store_config import EncryptionConfig

BLOCK = 4
OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "2048 tokens", "block_size": BLOCK, "threads": 1}
TEXT = " ".join(f"w{number}" for number in range(3, 15)) + " a"
TENANTS = [Salt(derive_salt(b"a secret of these tests", name)) for name in ("ann", "bob", "cyd")]


class Server:
    """An engine that several tenants use."""

    def __init__(self, model: Path, store: str | None = None, encryption: EncryptionConfig | None = None) -> None:
        config, stores = EngineConfig(model=str(model), **OPTIONS), patient(store) if store else None
        self.engine = unhurried(AsyncEngine.from_config(config, store=stores, encryption=encryption))
        self._requests = 0

    def close(self) -> None:
        self.engine.close()

    async def mark(self, text: str = TEXT, name: str = "system", **more: Any) -> list[int]:
        return list((await self.engine.prefixes.add(name, content=text, salt=PUBLIC.tenant, **more)).tokens)

    async def ask(self, salt: Salt, tokens: Sequence[int], count: int = 6) -> tuple[list[int], CacheReport]:
        """Output tokens and cache report of a prompt."""
        self._requests += 1
        request = Request(f"r{self._requests}", tuple(tokens), greedy(count), salt, want_cache_report=True)
        deltas = [delta async for delta in self.engine.generate(request)]
        await self.engine.check_integrity()
        report = next(delta.cache_report for delta in deltas if delta.cache_report is not None)
        return [token for delta in deltas for token in delta.tokens], report

    async def cached(self, salt: Salt, tokens: Sequence[int]) -> int:
        return (await self.ask(salt, tokens))[1].cached_tokens

    async def flush(self) -> None:
        assert self.engine.offload is not None
        assert await asyncio.to_thread(self.engine.offload.flush, 60.0)


def private(seed: int, count: int = 21) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(3, VOCAB) for _ in range(count)]


@pytest.mark.parametrize("family", represented(["llama", "gemma3", "deepseek_v3"], "llama"))
def test_tenants_share_the_marked_blocks_only(folder: Callable[[str], Path], family: str) -> None:
    """Each tenant has the full blocks of a marked text cached, and only its own text behind them. Every answer has the tokens
    that an engine without marks computes."""

    async def run(plain: Server, server: Server) -> None:
        marked = await server.mark()
        assert len(marked) % BLOCK, "its last block is partial"
        shared, own = len(marked) // BLOCK * BLOCK, private(1)
        for turn, salt in enumerate(TENANTS * 2):
            prompt = marked + own
            tokens, report = await server.ask(salt, prompt)
            expected, known = await plain.ask(salt, prompt)
            assert tokens == expected
            assert report.public_tokens == shared and report.computed_tokens == len(prompt) - report.cached_tokens
            if turn < len(TENANTS):
                assert report.cached_tokens == shared and known.cached_tokens == 0
            else:
                assert report.cached_tokens == known.cached_tokens == len(prompt) - 1
        others = [*marked[: 5 * BLOCK + 2], *private(2)]
        assert await server.cached(TENANTS[0], others) == 5 * BLOCK, "a text that shares some first blocks with it"
        assert await server.cached(TENANTS[1], others) == 5 * BLOCK

    model = folder(family)
    with closing(Server(model)) as plain, closing(Server(model)) as server:
        asyncio.run(run(plain, server))


def test_nothing_is_public_by_itself(folder: Callable[[str], Path]) -> None:
    """Before a text is marked and after the mark is removed it is every tenant's own. A tenant's name for it marks nothing."""

    async def run(server: Server) -> None:
        made = await server.engine.prefixes.add("system", content=TEXT, salt=TENANTS[0].tenant)
        prompt = [*made.tokens, *private(3)]
        assert await server.cached(TENANTS[0], prompt) and not await server.cached(TENANTS[1], prompt)
        marked = await server.mark(name="all")
        assert server.engine.prefixes.service.book.use("all", "text", salt=TENANTS[2].tenant).tokens == tuple(marked)
        assert await server.cached(TENANTS[2], prompt) == len(marked) // BLOCK * BLOCK
        with pytest.raises(UnknownPrefix):
            await server.engine.prefixes.remove("all", salt=TENANTS[2].tenant)
        await server.engine.prefixes.remove("all", salt=PUBLIC.tenant)
        _, report = await server.ask(TENANTS[2], prompt)
        assert report.cached_tokens == report.public_tokens == 0
        assert await server.cached(TENANTS[1], prompt) == len(prompt) - 1, "what it computed as its own"

    with closing(Server(folder("llama"))) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "disk"),
        *(pytest.param(*other, marks=pytest.mark.slow) for other in (("gemma3", "disk"), ("llama", "file"))),
    ],
)
def test_other_instances_and_erasures(folder: Callable[[str], Path], tmp_path: Path, family: str, kind: str) -> None:
    """Instances on one store, and one that starts later, learn what is public and load it, for every tenant. Erasing a tenant
    removes its blocks and no public one. One whose mark is removed is erased by its name."""
    store = f"disk://{tmp_path}/store?size=64MiB" if kind == "disk" else f"file://{tmp_path}/store"

    async def run() -> None:
        with closing(Server(folder(family), store)) as first, closing(Server(folder(family), store)) as second:
            marked = await first.mark()
            shared, prompt = len(marked) // BLOCK * BLOCK, marked + private(4)
            expected, _ = await first.ask(TENANTS[0], prompt)
            await first.flush()
            await second.engine.prefixes.refresh(PUBLIC.tenant)
            tokens, report = await second.ask(TENANTS[1], prompt)
            assert (tokens, report.cached_tokens, report.public_tokens) == (expected, shared, shared)
            assert await second.cached(TENANTS[0], prompt) > shared, "its own blocks behind public ones are loaded"
            await second.flush()
            receipt = await first.engine.forget(TENANTS[0])
            assert receipt["complete"] and sum(receipt["removed"].values()) > 0
            assert await first.cached(TENANTS[0], prompt) == shared
        with closing(Server(folder(family), store)) as third:
            assert await third.cached(TENANTS[2], prompt) == shared
            await third.flush()
        with closing(open_store([store])) as found:
            roots = Counter(one[FINGERPRINT_BYTES:PREFIX_BYTES] for one in names_in(found))
            assert roots.keys() == {salt.digest for salt in (PUBLIC, *TENANTS)}
            assert forget_prefix(found, "system").complete
            left = Counter(one[FINGERPRINT_BYTES:PREFIX_BYTES] for one in names_in(found))
            assert left == {root: count for root, count in roots.items() if root != PUBLIC.digest}
        with closing(Server(folder(family), store)) as fourth:
            assert await fourth.cached(TENANTS[1], prompt) == 0, "it is not public any more"

    asyncio.run(run())


def test_the_first_requests_of_a_server(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """The first requests of a server wait until its store has told what is public, so that they find it, and do not keep it as
    their tenant's own. A store that does not tell it is waited for once, and not for long."""
    store, told, asked = f"disk://{tmp_path}/store?size=64MiB", threading.Event(), threading.Event()

    def hold(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
        """The server's records are not read before they are `told`."""
        read = server.engine.prefixes.service.refresh

        def late(*given: Any) -> list[NamedPrefix]:
            asked.set()
            assert told.wait(60.0)
            return read(*given)

        monkeypatch.setattr(server.engine.prefixes.service, "refresh", late)

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        with closing(Server(folder("llama"), store)) as first:
            marked = await first.mark()
            prompt, shared = [*marked, *private(8)], len(marked) // BLOCK * BLOCK
            await first.flush()
        with closing(Server(folder("llama"), store)) as second:
            hold(monkeypatch, second)
            monkeypatch.setattr(prefix_service, "_FIRST_PUBLIC_WAIT", 60.0)
            waiting = [asyncio.create_task(second.cached(salt, prompt)) for salt in TENANTS[:2]]
            assert await asyncio.to_thread(asked.wait, 60.0)
            steps = second.engine.status().steps
            await second.engine.check_integrity()  # what came before it would be there by now
            assert second.engine.status().steps == steps and not any(one.done() for one in waiting)
            told.set()
            assert await asyncio.gather(*waiting) == [shared, shared]
        with closing(Server(folder("llama"), store)) as third:
            told.clear()
            hold(monkeypatch, third)
            monkeypatch.setattr(prefix_service, "_FIRST_PUBLIC_WAIT", 0.01)
            assert [await third.cached(salt, prompt) for salt in TENANTS[:2]] == [0, 0]
            told.set()

    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(run(patch))


@pytest.mark.extended
def test_encrypted(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Where stores are encrypted, public blocks have a data key of their own: after the keys of tenants were destroyed, a
    server that starts loads them."""
    store = f"disk://{tmp_path}/store?size=64MiB"
    keys = EncryptionConfig(key_store=str(tmp_path / "keys"), master_keys=(f"test:{'7' * 64}",))

    async def run() -> None:
        with closing(Server(folder("llama"), store, keys)) as first:
            marked = await first.mark()
            for salt in TENANTS[:2]:
                assert await first.cached(salt, marked + private(7)) == len(marked) // BLOCK * BLOCK
            await first.flush()
            for salt in TENANTS[:2]:
                receipt = await first.engine.forget(salt)
                assert receipt["complete"] and len(receipt["keys"]) == 1
            await first.engine.clear_cache()
            assert _pinned(store).keys() == {PUBLIC.digest}
        with closing(Server(folder("llama"), store, keys)) as second:
            assert await second.cached(TENANTS[2], marked + private(7)) == len(marked) // BLOCK * BLOCK
            assert second.engine.offload is not None
            assert second.engine.offload.status().loaded == len(marked) // BLOCK, "it was not recomputed"

    asyncio.run(run())


def test_a_wrong_public_block(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A wrong block that is public is repaired by the audit of hits: every tenant's blocks behind it go, from the stores and
    from the device, and none before it in the stores."""
    store = f"disk://{tmp_path}/store?size=64MiB"

    async def run() -> None:
        with closing(Server(folder("llama"), store)) as server:
            marked = await server.mark()
            for salt in TENANTS:
                assert await server.cached(salt, marked + private(6)) == len(marked) // BLOCK * BLOCK
            await server.flush()
            cache = server.engine._core.cache
            keys = public_keys(cache.scope(PUBLIC), marked)
            with closing(open_store([store])) as found:
                receipt = forget_chain(found, PUBLIC.digest, keys[3], 3)
                assert receipt.complete and {one[-32:] for one in names_in(found)} == set(keys[:3])
            await server.engine._call(lambda: cache.drop(cache.root(PUBLIC)))
            assert cache.pool.num_cached == 0
            await server.engine.check_integrity()

    asyncio.run(run())


def test_a_tenants_name_for_public_blocks(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """A tenant may give a name to a text that is public, and remove it: the public blocks stay, pinned for their own name."""
    store = f"disk://{tmp_path}/store?size=64MiB"

    async def run() -> None:
        with closing(Server(folder("llama"), store)) as server:
            marked = await server.mark()
            await server.engine.prefixes.add("mine", content=TEXT + " b", salt=TENANTS[0].tenant)
            await server.flush()
            pinned = _pinned(store)
            assert len(pinned[PUBLIC.digest]) == len(marked) // BLOCK and pinned[TENANTS[0].digest]
            await server.engine.prefixes.remove("mine", salt=TENANTS[0].tenant)
            await server.flush()
            assert _pinned(store) == {PUBLIC.digest: pinned[PUBLIC.digest]}
            await server.engine.prefixes.add("mine", content=TEXT, salt=TENANTS[0].tenant)
            await server.flush()
            with closing(open_store([store])) as found:
                assert forget_prefix(found, "mine").complete
            assert _pinned(store) == {PUBLIC.digest: pinned[PUBLIC.digest]}

    asyncio.run(run())


def test_tenants_keep_the_same_public_text(folder: Callable[[str], Path]) -> None:
    """Each tenant that keeps a public text has a retention of its own, which it sees, and which only its own release ends."""

    async def run(server: Server) -> None:
        marked = await server.mark()
        engine, (ann, bob, _) = server.engine, TENANTS
        for salt in (ann, bob):
            assert (await engine.retain(marked, 600.0, salt=salt)).status == "accepted"
        assert [len(engine.release(salt=ann)), len(engine.retentions(ann.tenant))] == [1, 0]
        assert [len(engine.retentions(bob.tenant)), len(engine.release(salt=bob))] == [1, 1]
        assert engine.status().retained_blocks == 0

    with closing(Server(folder("llama"))) as server:
        asyncio.run(run(server))


def names_in(store: TieredStore) -> list[Name]:
    return [
        one for tier in store.tiers for names in tier.store.list_names(deadline=time.monotonic() + 60) for one in names
    ]


def _pinned(url: str) -> dict[bytes, set[Name]]:
    """The pinned blocks of a store by the root in their names."""
    found: dict[bytes, set[Name]] = {}
    with closing(open_store([url])) as store:
        for tier in store.tiers:
            for one in tier.store.scan(deadline=time.monotonic() + 60):
                if one.pinned:
                    found.setdefault(one.name[FINGERPRINT_BYTES:PREFIX_BYTES], set()).add(one.name)
    return found
