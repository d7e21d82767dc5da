"""Engines with encrypted stores: hits, and what is left on any server once a tenant was forgotten on one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from patience import patient
from tiny import greedy, prompt

from foreword.api.rights import Tenant, Tenants
from foreword.blocks.salt import Salt
from foreword.engine.preflight import check
from foreword.engine.request import Request
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.errors import ConfigError, NotFound
from foreword.store.data_keys import data_keys_of
from foreword.store_config import EncryptionConfig, StoreConfig

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_memory": "2048 tokens", "block_size": 4, "threads": 1}
ANN, BOB = "Bearer ann's-key", "Bearer bob's-key"
PATIENCE = 60.0


class Server:
    """An engine, and the tenants that its front knows. `seconds` tells its data keys from those of another server in this
    process."""

    def __init__(self, model: Path, folder: Path, seconds: float) -> None:
        config = EncryptionConfig(
            key_store=str(folder / "keys"), master_keys=(f"test:{'7' * 64}",), check_seconds=seconds
        )
        keys = data_keys_of(config)
        assert keys is not None
        entries = [(header[7:].encode(), Tenant(header[7:10], header[7:].encode())) for header in (ANN, BOB)]
        self.keys, self.tenants = keys, Tenants(entries, current=keys.current)
        self.engine = AsyncEngine.from_config(
            EngineConfig(model=str(model), **OPTIONS),
            store=patient(f"disk://{folder}/store?size=64MiB"),
            encryption=config,
        )

    def close(self) -> None:
        self.engine.close()

    async def cached(self, key: str, text: list[int], name: str) -> int:
        """How many tokens of a caller's prompt are cached."""
        request = Request(name, tuple(text), greedy(1), Salt(self.tenants.authenticate(key).salt))
        deltas = [delta async for delta in self.engine.generate(request)]
        return next(delta.cached_tokens for delta in deltas if delta.cached_tokens is not None)

    async def flush(self) -> bool:
        assert self.engine.offload is not None
        return await asyncio.to_thread(self.engine.offload.flush, PATIENCE)

    async def forget(self, key: str) -> dict[str, Any]:
        return await self.engine.forget(Salt(self.tenants.authenticate(key).salt))


@pytest.mark.extended
def test_forgotten_everywhere(folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Blocks of a tenant are a hit on every server until the tenant is forgotten on one. Then none of it is, in no store and on
    no device, and what it sends from then on is a hit again. Another tenant loses nothing."""

    async def run(first: Server, second: Server) -> None:
        text = prompt(81, 1)
        for key in (ANN, BOB):
            assert await first.cached(key, text, f"a{key}") == 0
        assert await first.flush()
        for key in (ANN, BOB):
            assert await second.cached(key, text, f"b{key}") == 80, "loaded from the encrypted store"
            assert await second.cached(key, text, f"c{key}") == 80
        files = [path for path in (tmp_path / "store").glob("?" * 32 + "/*/*/*") if path.is_file()]
        assert len(files) >= 40 and all(path.read_bytes()[-192 + 131] & 0x80 for path in files)
        before = first.tenants.authenticate(ANN).salt
        receipt = await first.forget(ANN)
        assert receipt["complete"] and len(receipt["keys"]) == 1 and receipt["removed"]["disk"] >= 20
        assert receipt["keys"][0].startswith(Salt(before).prefix.hex())
        assert first.tenants.authenticate(ANN).salt != before
        now = Salt(first.tenants.authenticate(ANN).salt)
        assert first.engine.erasure(receipt["id"], now)["keys"] == receipt["keys"]
        with pytest.raises(NotFound):
            first.engine.erasure(receipt["id"], Salt(first.tenants.authenticate(BOB).salt))
        deadline = time.monotonic() + PATIENCE
        while second.tenants.authenticate(ANN).salt == before:
            assert time.monotonic() < deadline
        for server in (first, second):
            assert await server.cached(ANN, text, "d") == (0 if server is first else 80)
            assert await server.flush()
            assert await server.cached(BOB, text, "e") == 80
        old = Request("f", tuple(text), greedy(1), Salt(before))
        async for delta in second.engine.generate(old):
            assert not delta.cached_tokens, "not by the old salt either: the second server has dropped it"
        again = await second.forget(ANN)
        assert again["complete"] and len(again["keys"]) == 1 and again["keys"] != receipt["keys"]

    model = folder("llama")
    with closing(Server(model, tmp_path, 0.02)) as first, closing(Server(model, tmp_path, 0.01)) as second:
        asyncio.run(run(first, second))


def test_what_is_sent_is_encrypted_too(tmp_path: Path) -> None:
    """A store of another instance needs an encrypted connection if the stores are encrypted."""
    encryption = EncryptionConfig(key_store=str(tmp_path / "keys"), master_keys=(f"test:{'7' * 64}",))
    from foreword.transfer_config import TransferConfig

    for url, fine in (("peer://127.0.0.1:9100?tls=1", True), ("peer://127.0.0.1:9100", False)):
        transfer = TransferConfig(secret="a secret of these tests")
        if fine:
            check(EngineConfig(), StoreConfig(urls=(url,)), transfer, encryption)
        else:
            with pytest.raises(ConfigError, match="tls"):
                check(EngineConfig(), StoreConfig(urls=(url,)), transfer, encryption)
