"""HiCache's storage contract over Foreword, with SGLang's own host pools in CPU memory and its own file backend beside.

`test_sglang.py` runs this in an environment with SGLang.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sglang_case as case
import torch
from documented_page import steps
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import prepare_server_args

import foreword.integrations.sglang as integration
from foreword.conformance import FlakyStore
from foreword.conformance.engine_contract import EngineContract, EngineRun, Start
from foreword.errors import ConfigError, ForewordError, StoreError
from foreword.integrations.sglang import ForewordStorage
from foreword.integrations.sglang.hicache_identity import server_namespace
from foreword.store.memory.memory_store import MemoryStore
from foreword.store.tiered import TieredStore

ENGINES = {
    "SGLang": {
        "tests": "TestContract",
        "guide": "sglang.md",
        "how": "storage backend of HiCache",
        "variable": "FOREWORD_SGLANG_PYTHON",
        "package": "sglang",
    }
}
KINDS = {"mha": case.mha, "mla": case.mla, "mamba": case.mamba}
ORDERS = ("layer_first", "page_first", "page_first_direct", "page_head")
POOLS: dict[str, Callable[[], Any]] = {
    f"{kind} {order}": partial(make, order)
    for kind, make in KINDS.items()
    for order in ORDERS[kind == "mamba" : 4 if kind == "mha" else 3]
}
POOLS |= {f"mha {dtype}": partial(case.mha, dtype=dtype) for dtype in (torch.float32, torch.float8_e4m3fn)}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"disk://{tmp_path}/store?size=64MiB"


def run(code: str, *arguments: str) -> str:
    """The last line that another process prints."""
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("kind", POOLS)
def test_bytes_after_eviction_and_restart(kind: str, url: str) -> None:
    """A page has the same bytes when it is read again after the host pool has lost it, and by a server that starts later."""
    pool, names = POOLS[kind](), case.keys(6)
    name = PoolName.MAMBA if "mamba" in kind else PoolName.SWA
    first = case.backend(url, pools={name: pool})
    indices = case.fill(pool, names)
    assert first.batch_set_v2([case.window(names, pool, indices, name)]) == {name: [True] * 6}
    case.blank(pool)
    moved = case.slots(pool, range(5, 11))
    assert first.batch_get_v2([case.window(names, pool, moved, name)]) == {name: [True] * 6}
    assert all(case.holds(pool, moved, names))
    first.close()
    again = POOLS[kind]()
    second = case.backend(url, pools={name: again})
    assert second.batch_get_v2([case.window(names, again, indices, name)]) == {name: [True] * 6}
    assert all(case.holds(again, indices, names))
    second.close()


def test_both_interfaces(url: str) -> None:
    """Pages written through one of SGLang's interfaces (flat pages, v1, v2) are read through each of them."""
    kv = case.mha()
    backend = case.backend(url, kv)
    chains = {way: case.keys(3, way) for way in ("flat", "v1", "v2")}
    indices = {way: case.fill(kv, names, at) for at, (way, names) in zip((0, 3, 6), chains.items(), strict=True)}
    assert backend.batch_set(chains["flat"], [case.content(kv, name) for name in chains["flat"]])
    assert backend.batch_set_v1(chains["v1"], indices["v1"]) == [True] * 3
    assert backend.batch_set_v2([PoolTransfer(PoolName.KV, indices["v2"], keys=chains["v2"])]) == {
        PoolName.KV: [True] * 3
    }
    for way, names in chains.items():
        case.blank(kv)
        assert backend.batch_exists([*names, *case.keys(1, "other")]) == 3
        assert backend.exists(names[0])
        assert backend.batch_get_v1(names, indices[way]) == [True] * 3
        assert all(case.holds(kv, indices[way], names))
        pages = backend.batch_get(names, [kv.get_dummy_flat_data_page() for _ in names])
        for page, name in zip(pages, names, strict=True):
            assert torch.equal(page.view(torch.uint8), case.content(kv, name).view(torch.uint8))
            assert torch.equal(backend.get(name).view(torch.uint8), page.view(torch.uint8))
    assert backend.get(case.keys(1, "other")[0], kv.get_dummy_flat_data_page()) is None
    assert backend.batch_get_v1(case.keys(1, "other"), indices["v1"][: case.PAGE]) == [False]
    assert backend.batch_get_v1(chains["v1"], indices["v1"][:-1]) == [False] * 3  # not the indices of so many pages


@pytest.mark.parametrize("seed", range(6))
def test_like_sglangs_own_backend(seed: int, tmp_path: Path) -> None:
    """Any sequence of calls has the results that SGLang's own file backend gives: hits, hits of windows and states, pages."""
    choose = random.Random(seed)
    pools = {PoolName.SWA: case.mha("page_first_direct"), PoolName.MAMBA: case.mamba()}
    kv = case.mha()
    mine = case.backend(f"disk://{tmp_path}/store?size=64MiB", kv, pools)
    theirs = HiCacheFile(case.config(), file_path=str(tmp_path / "files"))
    for name, pool in {PoolName.KV: kv, **pools}.items():
        theirs.register_mem_host_pool_v2(pool, name)
    names = case.keys(8)
    for _ in range(60):
        policy = choose.choice([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES])
        if choose.random() < 0.4:
            pool_name, pool = choose.choice([(PoolName.KV, kv), *pools.items()])
            chosen = names[choose.randrange(8) :][: choose.randint(1, 3)]
            transfer = PoolTransfer(pool_name, case.fill(pool, chosen, choose.randrange(9)), keys=chosen)
            assert mine.batch_set_v2([transfer]) == theirs.batch_set_v2([transfer])
        elif choose.random() < 0.5:
            window = names[: choose.randint(1, 3)]
            chosen = choose.sample(list(pools), choose.randrange(3))
            wanted = [PoolTransfer(one, keys=window, hit_policy=policy) for one in chosen]
            asked = names[: choose.randint(1, 8)]
            assert mine.batch_exists_v2(asked, wanted) == theirs.batch_exists_v2(asked, wanted)
            assert mine.batch_exists(asked) == theirs.batch_exists(asked)
        else:
            pool_name, pool = choose.choice([(PoolName.KV, kv), *pools.items()])
            chosen = names[: choose.randint(1, 4)]
            case.blank(pool)
            transfer = PoolTransfer(pool_name, case.slots(pool, range(len(chosen))), keys=chosen)
            found = mine.batch_get_v2([transfer])[pool_name]
            held = case.holds(pool, transfer.host_indices, chosen)
            expected = theirs.batch_get_v2([transfer])[pool_name]
            assert found == expected
            assert held == expected
    mine.close()


def test_another_process(url: str) -> None:
    """Another process finds the pages, with the same bytes."""
    kv, names = case.mha(), case.keys(5)
    backend = case.backend(url, kv)
    assert all(backend.batch_set_v1(names, case.fill(kv, names)))
    backend.close()
    code = (
        "import json, sys; import sglang_case as case; url, names = json.loads(sys.argv[1]); kv = case.mha(); "
        "found = case.backend(url, kv).batch_get_v1(names, case.slots(kv, range(5))); "
        "print(json.dumps([found, case.holds(kv, case.slots(kv, range(5)), names)]))"
    )
    assert json.loads(run(code, json.dumps([url, names]))) == [[True] * 5] * 2


def test_tenants(url: str) -> None:
    """Requests with the same tokens and another `cache_salt` or `extra_key` have other keys in SGLang: no tenant finds pages of
    another."""
    kv = case.mha()
    backend = case.backend(url, kv)
    callers = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "b"}]
    hashes = [get_storage_hash_str(case.tokens(20, **caller), page_size=case.PAGE) for caller in callers]
    for number, mine in enumerate(hashes):
        assert len(mine) == 5
        assert backend.batch_exists(mine) == 0
        assert backend.batch_get_v1(mine, case.slots(kv, range(5))) == [False] * 5
        assert all(backend.batch_set_v1(mine, case.fill(kv, mine)))
        assert not any(backend.exists(key) for other in hashes[number + 1 :] for key in other)
    for mine in hashes:
        assert backend.batch_get_v1(mine, case.slots(kv, range(5))) == [True] * 5
        assert all(case.holds(kv, case.slots(kv, range(5)), mine))


OTHERS: dict[str, Any] = {
    "weights": {"extra": {"fingerprint": "cd" * 32}},
    "rank": {"tp_rank": 1, "tp_size": 2},
    "number of ranks": {"tp_size": 2},
    "stage": {"pp_rank": 1, "pp_size": 2},
    "part of a context": {"attn_cp_rank": 1, "attn_cp_size": 2},
    "dtype": {"kv": lambda: case.mha(dtype=torch.float16)},
    "order": {"kv": lambda: case.mha("page_first_direct")},
    "heads": {"kv": lambda: case.mha(heads=4)},
    "tokens of a page": {"kv": lambda: case.mha(page=8)},
    "layers": {"kv": lambda: case.mha(start=2)},
    "kind": {"kv": case.mla},
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_identity_shares_nothing(what: str, url: str) -> None:
    """Pages of other weights, ranks or layouts are not found, also where they have the same size."""
    kv, names = case.mha(), case.keys(3)
    first = case.backend(url, kv)
    assert all(first.batch_set_v1(names, case.fill(kv, names)))
    given = dict(OTHERS[what])
    other = given.pop("kv", case.mha)()
    second = case.backend(url, other, **given)
    assert second.batch_exists(names) == 0
    assert second.batch_get_v1(names, case.slots(other, range(3))) == [False] * 3
    assert case.backend(url, case.mha()).batch_exists(names) == 3


def test_ranks_share_what_is_replicated(url: str) -> None:
    """Ranks of a model with latent attention share keys and values, which one of them writes; states are each rank's."""
    kv, states, names = case.mla(), case.mamba(), case.keys(2)
    ranks = [
        case.backend(url, kv, {PoolName.MAMBA: states}, tp_rank=rank, tp_size=2, is_mla_model=True) for rank in (0, 1)
    ]
    assert all(ranks[0].batch_set_v1(names, case.fill(kv, names)))
    ranks[0].batch_set_v2([case.window(names, states, case.fill(states, names), PoolName.MAMBA)])
    wanted = [case.window(names[-1:], states, None, PoolName.MAMBA)]
    assert ranks[1].batch_exists(names) == 2
    assert ranks[0].batch_exists_v2(names, wanted).kv_hit_pages == 2
    assert ranks[1].batch_exists_v2(names, wanted).kv_hit_pages == 0


def test_damaged_pages_are_misses(url: str, tmp_path: Path) -> None:
    """A page whose bytes changed in the store is a counted miss. The host pool gets nothing of it; it can be stored again."""
    kv, names = case.mha(), case.keys(4)
    backend = case.backend(url, kv)
    assert all(backend.batch_set_v1(names, case.fill(kv, names)))
    [file] = [path for path in (tmp_path / "store").rglob("*") if path.name == names[2]]
    data = bytearray(file.read_bytes())
    data[7] ^= 1
    file.write_bytes(data)
    case.blank(kv)
    indices = case.slots(kv, range(4))
    assert backend.batch_get_v1(names, indices) == [True, True, False, True]
    assert case.page_bytes(kv, 2 * case.PAGE) == bytes(len(case.page_bytes(kv, 0)))
    assert sum(backend._store.tiers[0].counters.bad.values()) == 1
    assert backend.batch_exists(names) == 2
    assert all(backend.batch_set_v1(names, case.fill(kv, names)))
    assert backend.batch_get_v1(names, indices) == [True] * 4
    assert all(case.holds(kv, indices, names))


def test_a_store_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a store does, SGLang gets misses: no error, and within the time that was set."""
    flaky = FlakyStore(MemoryStore(1 << 24))
    kv, names = case.mha(), case.keys(4)
    backend = case.backend(TieredStore([flaky]), kv, extra={"lookup_timeout": 0.05, "load_timeout": 0.3})
    indices = case.fill(kv, names)
    assert all(backend.batch_set_v1(names, indices))
    flaky.inject("fail")
    calls = (
        lambda: backend.batch_exists(names),
        lambda: backend.batch_exists_v2(names, [case.window(names, kv, None, PoolName.KV)]).kv_hit_pages,
        lambda: any(backend.batch_get_v1(names, indices)),
        lambda: any(backend.batch_set_v1(case.keys(2, "new"), indices[: 2 * case.PAGE])),
        lambda: backend.get(names[0]) is not None,
    )
    assert not any(call() for call in calls)
    assert backend.clear() is False
    flaky.inject("fail", 0.0)
    flaky.stick()
    try:
        for call in calls:
            began = time.monotonic()
            assert not call()
            assert time.monotonic() - began < 20  # a call that waits for the store would not end
    finally:
        flaky.release()


def test_clear_erases_this_model(url: str) -> None:
    """`clear` erases all pages of the server's model, of every pool, and no others."""
    kv, swa, names = case.mha(), case.mha("page_first_direct"), case.keys(3)
    one, other = (case.backend(url, kv, {PoolName.SWA: swa}, extra={"fingerprint": text * 32}) for text in ("ab", "cd"))
    for backend in (one, other):
        assert all(backend.batch_set_v1(names, case.fill(kv, names)))
        backend.batch_set_v2([case.window(names, swa, case.fill(swa, names))])
    assert one.clear() is True
    wanted = [case.window(names[-1:], swa, None)]
    assert one.batch_exists(names) == 0
    assert one.batch_get_v2([case.window(names, swa, case.slots(swa, range(3)))]) == {PoolName.SWA: [False] * 3}
    assert other.batch_exists_v2(names, wanted).kv_hit_pages == 3


def foreword(*arguments: str) -> str:
    command = [sys.executable, "-m", "foreword", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_forgetting_and_tools(url: str) -> None:
    """`foreword inspect` shows the model of the pages, and `foreword forget` erases them."""
    kv, names = case.mha(), case.keys(3)
    backend = case.backend(url, kv)
    assert all(backend.batch_set_v1(names, case.fill(kv, names)))
    backend.close()
    assert "tiny" in foreword("inspect", url)
    foreword("forget", url, "--no-tenant")
    assert case.backend(url, case.mha()).batch_exists(names) == 0


def test_encryption(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are encrypted with keys in the environment, and forgetting the keys ends the use of the pages in a server that
    runs."""
    for name, value in {
        "KEY_STORE": str(tmp_path / "keys"),
        "MASTER_KEYS": f"a:{'5a' * 32}",
    }.items():
        monkeypatch.setenv(f"FOREWORD_ENCRYPTION_{name}", value)
    kv, names = case.mha(), case.keys(3)
    backend = case.backend(url, kv)
    indices = case.fill(kv, names)
    assert all(backend.batch_set_v1(names, indices))
    backend.close()
    stored = b"".join(path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert not any(bytes(case.content(kv, name).view(torch.uint8).numpy())[:32] in stored for name in names)
    backend = case.backend(url, kv)
    case.blank(kv)
    assert backend.batch_get_v1(names, indices) == [True] * 3
    assert all(case.holds(kv, indices, names))
    foreword("forget", url, "--no-tenant")
    while backend.batch_exists(names):  # it looks at the keys again each second
        pass
    assert all(backend.batch_set_v1(names, case.fill(kv, names)))
    assert backend.batch_get_v1(names, indices) == [True] * 3


def test_chains_are_evicted_from_their_ends(tmp_path: Path) -> None:
    """A store that is too small keeps the starts of chains, if SGLang tells which pages come before."""
    kv = case.mha()
    backend = case.backend("memory://?size=12KiB", kv)
    for low in range(0, 24, 4):
        names = case.keys(24)
        more = HiCacheStorageExtraInfo(prefix_keys=names[:low])
        backend.batch_set_v1(names[low : low + 4], case.fill(kv, names[low : low + 4]), more)
    found = backend.batch_exists(case.keys(24))
    assert 8 <= found < 24
    assert backend.batch_get_v1(case.keys(found)[:8], case.slots(kv, range(8))) == [True] * 8
    assert all(case.holds(kv, case.slots(kv, range(8)), case.keys(8)))


def test_weights_updated_in_place(url: str) -> None:
    """When SGLang's scheduler updates weights, the backend stores and finds nothing from then on; other servers do."""
    kv, names = case.mha(), case.keys(3)
    backend = case.backend(url, kv)
    indices = case.fill(kv, names)
    assert all(backend.batch_set_v1(names, indices))
    manager = SchedulerWeightUpdaterManager.__new__(SchedulerWeightUpdaterManager)
    with pytest.raises(AttributeError):  # it has no worker; what matters is what comes before
        manager.update_weights_from_disk(None)
    assert backend.batch_exists(names) == 0
    assert backend.batch_get_v1(names, indices) == [False] * 3
    assert backend.batch_set_v1(case.keys(1, "new"), indices[: case.PAGE]) == [False]
    assert backend.batch_exists_v2(names, [case.window(names, kv, None)]).kv_hit_pages == 0
    assert case.backend(url, case.mha()).batch_exists(names) == 3


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "store"),
        ({"store": "disk:///tmp/x", "stores": "x"}, "Did you mean 'store'"),
        ({"store": 7}, "URL"),
        ({"store": "dsk:///tmp/x"}, "disk"),
        ({"store": "memory://?codec=zstd"}, "codec"),
        ({"store": "memory://", "fingerprint": "xyz"}, "hexadecimal"),
        ({"store": "memory://", "fingerprint": ""}, "fingerprint"),
        ({"store": "memory://", "load_timeout": "soon"}, "load_timeout"),
    ],
)
def test_mistakes(extra: dict[str, Any], says: str) -> None:
    """A wrong configuration is refused at start, with what to do."""
    made = case.config()
    made.extra_config = {"fingerprint": case.FINGERPRINT, **extra}
    with pytest.raises((ConfigError, StoreError), match=says):
        ForewordStorage(made, {})


@pytest.mark.parametrize("interface", [0, 1])
def test_sglangs_controller(interface: int, url: str) -> None:
    """SGLang's own controller and threads save pages and load them: in a later server, for the same tenant only."""
    extra = {"fingerprint": case.FINGERPRINT, "interface_v1": interface, "store": url}
    mine, names = case.tokens(20, cache_salt="a"), []
    kv = case.mha()
    with case.controller(kv, dict(extra)) as first:
        assert isinstance(first.storage_backend, ForewordStorage)
        names = get_storage_hash_str(mine, page_size=case.PAGE)
        indices = case.fill(kv, names, at=3)
        first.write_storage(indices, mine, names, [])
        assert first.ack_backup_queue.get(timeout=60).completed_tokens == 20
    kv = case.mha()
    with case.controller(kv, dict(extra)) as second:
        for caller in ({}, {"cache_salt": "b"}, {"extra_key": "a"}):
            assert len(case.prefetched(second, case.tokens(20, **caller))) == 0
        loaded = case.prefetched(second, mine)
        assert len(loaded) == 20
        assert all(case.holds(kv, loaded, names))


def test_sglangs_controller_of_hybrid_models(url: str) -> None:
    """SGLang's controller continues, with windows and recurrent states, where all pools can: a later server loads the pages of
    each pool, with their bytes."""

    def pools() -> dict[PoolName, Any]:
        return {PoolName.SWA: case.mha("page_first_direct"), PoolName.MAMBA: case.mamba()}

    def windows(pools: dict[PoolName, Any], end: int, filled: bool) -> list[PoolTransfer]:
        """Two pages of the window and one state, which end after `end` pages."""
        found = []
        for (name, pool), wanted in zip(pools.items(), (names[end - 2 : end], names[end - 1 : end]), strict=True):
            indices = pool.alloc(len(wanted) * pool.page_size)
            for index, key in zip(indices[:: pool.page_size].tolist(), wanted, strict=True) if filled else ():
                pool.set_from_flat_data_page(index, case.content(pool, key))
            found.append(case.window(wanted, pool, indices, name))
        return found

    extra = {"fingerprint": case.FINGERPRINT, "interface_v1": 1, "store": url}
    request = case.tokens(7 * case.PAGE)
    names, kv, others = get_storage_hash_str(request, page_size=case.PAGE), case.mha(), pools()
    with case.controller(kv, dict(extra), others) as first:
        for low, end in ((0, 4), (4, 6)):  # two steps of one request, each with what ends there
            part = case.tokens(28)[low * case.PAGE : end * case.PAGE]
            indices = case.fill(kv, names[low:end], low)
            first.write_storage(indices, part, names[low:end], names[:low], windows(others, end, True))
            assert first.ack_backup_queue.get(timeout=60).completed_tokens == (end - low) * case.PAGE
    kv, others = case.mha(), pools()
    with case.controller(kv, dict(extra), others) as second:
        for tokens, end in ((28, 6), (20, 4)):
            needed = windows(others, tokens // case.PAGE, False)
            loaded = case.prefetched(second, case.tokens(tokens), needed)
            assert len(loaded) == end * case.PAGE
            assert all(case.holds(kv, loaded, names[:end]))
            for one, pool in zip(needed, others.values(), strict=True):
                assert one.keys == names[end - len(one.keys) : end]
                assert all(case.holds(pool, one.host_indices, one.keys))


class Server:
    """The backend of a server with pools of two kinds, whose model gives each page bytes that follow from the tokens."""

    def __init__(self, store: TieredStore, seed: int) -> None:
        self._kv, self._states = case.mha(page=8), case.mamba()
        extra = {"fingerprint": f"{seed:02x}" * 32, "lookup_timeout": 0.25, "load_timeout": 5.0}
        self._backend = case.backend(store, self._kv, {PoolName.MAMBA: self._states}, extra=extra)

    def run(self, tokens: Sequence[int], tenant: str = "") -> EngineRun:
        names = get_storage_hash_str(RadixKey(array("q", tokens), cache_salt=tenant or None), page_size=8)
        computed = get_storage_hash_str(array("q", tokens), page_size=8)
        case.blank(self._kv)
        case.blank(self._states)
        found = self._backend.batch_exists_v2(names, [case.window(names[-1:], self._states, None, PoolName.MAMBA)])
        cached = found.kv_hit_pages
        if cached:
            loads = [
                PoolTransfer(PoolName.KV, case.slots(self._kv, range(cached)), keys=names[:cached]),
                PoolTransfer(PoolName.MAMBA, case.slots(self._states, [cached - 1]), keys=[names[cached - 1]]),
            ]
            if not all(all(results) for results in self._backend.batch_get_v2(loads).values()):
                cached = 0
        kv = {}
        for number, pool in enumerate((self._kv, self._states)):
            for page, text in enumerate(computed):
                index = page * pool.page_size
                if page >= cached:
                    pool.set_from_flat_data_page(index, case.content(pool, text))
                if page >= cached - 1 or number == 0:
                    kv[number, 8 * (page + 1)] = case.page_bytes(pool, index)
        for name, pool in ((PoolName.KV, self._kv), (PoolName.MAMBA, self._states)):
            rest = case.slots(pool, range(cached, len(names)))
            self._backend.batch_set_v2([PoolTransfer(name, rest, keys=names[cached:])])
        return EngineRun(8 * cached, kv)


class TestContract(EngineContract):
    @pytest.fixture
    def start(self) -> Start:
        return Server


def make_model(folder: Path, seed: int, **config: Any) -> Path:
    """The files of a model, as far as its identity goes."""
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(random.Random(seed).randbytes(1000))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2, **config}))
    return folder


def namespace(path: Path, fingerprint: str = "", **server: Any) -> bytes:
    with get_context().override_server_args(model_path=str(path), **server):
        return server_namespace(fingerprint)


def test_identity_of_a_server(tmp_path: Path) -> None:
    """Servers with the same weights and options share, whatever their folders, ports and schedules; others do not."""
    one = make_model(tmp_path / "one", 1)
    copy = make_model(tmp_path / "copy", 1, _name_or_path="elsewhere")
    mine = namespace(one)
    assert (
        namespace(copy, port=31000, host="::", max_running_requests=7, mem_fraction_static=0.5, served_model_name="x")
        == mine
    )
    others = [
        namespace(make_model(tmp_path / "weights", 2)),
        namespace(make_model(tmp_path / "config", 1, rope_theta=5e5)),
        namespace(make_model(tmp_path / "dtype", 1, dtype="float16")),
        namespace(one, "ab" * 32),
        *(
            namespace(one, **{name: value})
            for name, value in {
                "dtype": "float16", "kv_cache_dtype": "fp8_e4m3", "quantization": "fp8", "json_model_override_args": '{"a": 1}',
                "context_length": 99, "attention_backend": "torch_native", "weight_version": "step-2", "tp_size": 2,
            }.items()
        ),
    ]  # fmt: skip
    assert len({mine, *others}) == len(others) + 1
    for limit in ("100", "200"):
        (copy / "modeling_own.py").write_text(f"LIMIT = {limit}")
        assert namespace(copy) == mine, "code that is not run"
        others.append(namespace(copy, trust_remote_code=True))
    assert len({mine, *others}) == len(others) + 1
    code = "import sys; from sglang_suite import namespace; from pathlib import Path; print(namespace(Path(sys.argv[1])).hex())"
    done = subprocess.run(
        [sys.executable, "-c", code, str(one)], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    assert done.stdout.split()[-1] == mine.hex(), done.stderr[-2000:]


def test_what_has_no_identity_is_refused(tmp_path: Path) -> None:
    """Random weights need a fingerprint, and so do weights without files; clients may not name the content of images."""
    one = make_model(tmp_path / "one", 1)
    for given in ({"load_format": "dummy"}, {"trust_mm_content_hashes": True}):
        with pytest.raises(ForewordError, match=r"fingerprint|trust"):
            namespace(one, **given)
    with pytest.raises(ForewordError, match="fingerprint"):
        namespace(tmp_path / "nothing")
    assert namespace(one, "ab" * 32, load_format="dummy")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    found = set()
    for text in ("1", "2"):
        (adapter / "adapter_model.safetensors").write_text(text)
        (adapter / "adapter_config.json").write_text("{}")
        for given in (f"mine={adapter}", LoRARef(lora_id="1", lora_name="mine", lora_path=str(adapter))):
            found.add(namespace(one, enable_lora=True, lora_paths=[given]))
    assert len(found) == 2
    first, other = (tmp_path / name for name in ("adapter", "other"))
    shutil.copytree(first, other)
    (other / "adapter_model.safetensors").write_text("1")
    before = namespace(one, lora_paths=[str(first), str(other)])
    for source, target in ((first, "swapped"), (other, "adapter"), (tmp_path / "swapped", "other")):
        source.rename(tmp_path / target)
    assert namespace(one, lora_paths=[str(other), str(first)]) != before
    with pytest.raises(ForewordError, match="adapter"):
        namespace(one, lora_paths=[str(one)])  # a model's folder


def test_versions_whose_keys_have_no_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """A SGLang whose keys of pages do not have the request's salt in them is refused, in one sentence."""
    monkeypatch.delattr("sglang.srt.mem_cache.utils.storage_namespace_seed")
    with pytest.raises(ConfigError, match=r"needs SGLang 0\.5\.23; this is "):
        _ = integration.ForewordStorage


def test_the_guide(tmp_path: Path) -> None:
    """The guide's commands: SGLang's own parser takes the start, its controller saves and loads pages, and the tools show
    and erase them."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "sglang.md"
    folder = str(tmp_path / "store")
    blocks = [step.text.replace("/var/cache/foreword", folder) for step in steps(page.read_text()) if step.kind == "sh"]
    [start] = [shlex.split(block.replace("\\\n", " ")) for block in blocks if "launch_server" in block]
    model = make_model(tmp_path / "model", 1, architectures=["LlamaForCausalLM"], hidden_size=64, num_attention_heads=4)
    words = [
        str(model) if word == "Qwen/Qwen3-0.6B" else word for word in start[start.index("sglang.launch_server") + 1 :]
    ]
    server = prepare_server_args([*words, "--device", "cpu"]).resolved_dict()
    assert server["hicache_storage_backend"] == "dynamic"
    parsed = HybridCacheController.parse_storage_backend_extra_config(server["hicache_storage_backend_extra_config"])
    kv, mine = case.mha(), case.tokens(20)
    names = get_storage_hash_str(mine, page_size=case.PAGE)
    with case.controller(kv, parsed[0], model_path=str(model)) as made:
        made.write_storage(case.fill(kv, names), mine, names, [])
        assert made.ack_backup_queue.get(timeout=60).completed_tokens == 20
        case.blank(kv)
        assert all(case.holds(kv, case.prefetched(made, mine), names))
    [inspect, forget] = [
        shlex.split(line) for block in blocks for line in block.splitlines() if line.startswith("foreword ")
    ]
    assert "tiny" in foreword(*inspect[1:])
    foreword(*forget[1:])
    assert "tiny" not in foreword(*inspect[1:])


def test_metrics(url: str) -> None:
    """SGLang's own metrics have pages and GB per second of each call; each tier's counters are beside them."""
    from prometheus_client import REGISTRY

    kv, names = case.mha(), case.keys(3)
    backend = case.backend(url, kv)
    indices = case.fill(kv, names)
    assert all(backend.batch_set_v1(names, indices))
    assert all(backend.batch_get_v1(names, indices))
    stats = backend.get_stats()
    assert (stats.prefetch_pgs, stats.backup_pgs) == ([3], [3])
    assert stats.prefetch_bandwidth[0] > 0
    assert stats.backup_bandwidth[0] > 0
    assert REGISTRY.get_sample_value("sglang:foreword_loaded_blocks_total", {"tier": "disk"}) >= 3
    assert backend.get_stats().prefetch_pgs == []


@pytest.mark.parametrize("seed", range(int(os.environ.get("SGLANG_CAMPAIGNS", "4"))))
def test_fault_campaign(seed: int) -> None:
    """No page ever has other bytes than those of its key under faults in each tier, and no call raises."""
    choose = random.Random(seed)
    often, seldom = ("fail", "corrupt", "truncate", "swap", "lose"), ("bad", "block_fails", "unreadable")
    plan: dict[Any, float] = {**dict.fromkeys(often, 0.05), **dict.fromkeys(seldom, 0.03)}
    tiers = [FlakyStore(MemoryStore(size), seed=seed + size, plan=plan) for size in (1 << 14, 1 << 20)]
    pools = {PoolName.KV: case.mha(), PoolName.SWA: case.mha("layer_first"), PoolName.MAMBA: case.mamba()}
    ticks = itertools.count(step=10)  # a circuit breaker that has opened tries again soon
    store = TieredStore(tiers, clock=lambda: float(next(ticks)))
    backend = case.backend(store, pools[PoolName.KV], pools, extra={"lookup_timeout": 1.0})
    read = 0
    for _ in range(1500):
        name, pool = choose.choice(list(pools.items()))
        names = case.keys(8, choose.randrange(6))[: choose.randint(1, 8)]
        if choose.random() < 0.4:
            backend.batch_set_v2([PoolTransfer(name, case.fill(pool, names), keys=names)])
        else:
            case.blank(pool)
            indices = case.slots(pool, range(len(names)))
            found = backend.batch_get_v2([PoolTransfer(name, indices, keys=names)])[name]
            assert case.holds(pool, indices, names) == found
            read += sum(found)
        if choose.random() < 0.1:
            for one in tiers:
                one.inject("fail", choose.choice([0.0, 0.05, 0.5]))
    assert read > 300
    assert sum(sum(one.injected.values()) for one in tiers) > 300
