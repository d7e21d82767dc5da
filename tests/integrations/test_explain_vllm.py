"""`foreword explain` on real vLLM servers: planted mistakes are named, healthy ones are not accused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from explained import broken, explain, sound
from vllm_process import needs_vllm
from vllm_server import BLOCK, VllmServer, make_byte_model

from foreword.referee.models import KINDS, make_adapter

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("vllm") / "model")


@contextmanager
def serving(
    model: Path, folder: Path, stores: list[str] | None, *flags: str, core: int = 0, **more: Any
) -> Iterator[str]:
    """The URL of a vLLM; without a connector if `stores` is None. `more`: the connector's settings."""
    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": stores, "lookup_timeout": 60.0, "load_timeout": 300.0, **more},
    }
    connector = () if stores is None else ("--kv-transfer-config", json.dumps(transfer))
    server = VllmServer(
        model, folder / f"log{core}", "--max-model-len", "1024", "--block-size", str(BLOCK), "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(64 << 20), *connector, *flags, core=core, VLLM_SERVER_DEV_MODE="1",
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while not server.healthy():
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(0.2)
        yield server.url
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("stores", "flags", "link", "words"),
    [
        (None, (), "stores", "`--kv-transfer-config`"),
        (None, ("--no-enable-prefix-caching",), "device", "`--enable-prefix-caching`"),
        (["disk://{folder}/kv?size=64MiB&min_tokens=100000"], (), "written", "`min_tokens=`"),
    ],
)
def test_a_broken_vllm(
    model: Path, tmp_path: Path, stores: list[str] | None, flags: tuple[str, ...], link: str, words: str
) -> None:
    """The first broken link of a vLLM server, and the setting to change."""
    urls = None if stores is None else [url.replace("{folder}", str(tmp_path)) for url in stores]
    with serving(model, tmp_path, urls, *flags) as url:
        broken(explain(url), link, words)


def test_a_store_that_is_too_small_or_too_slow(model: Path, tmp_path: Path) -> None:
    """Blocks that are gone from the device do not come back where no tier has them any more, or not in time."""
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?size=100KiB"]) as url:
        broken(explain(url, "--reset"), "loaded", "a larger `size=`")
    with serving(model, tmp_path, [f"disk://{tmp_path}/other?size=64MiB"], load_timeout=1e-6) as url:
        broken(explain(url, "--reset"), "loaded", "`load_timeout`")


def test_keys_of_a_vllm(model: Path, tmp_path: Path) -> None:
    """A vLLM that wants a key."""
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?size=64MiB"], "--api-key", "key") as url:
        broken(explain(url), "server", "wants an API key")
        sound(explain(url, "--api-key", "key", "--reset"))


def test_a_store_that_fails(model: Path, tmp_path: Path) -> None:
    """The folder of a store is gone, and a file is in its place."""
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?size=64MiB"]) as url:
        shutil.rmtree(tmp_path / "kv")
        (tmp_path / "kv").write_text("in the way")
        said = explain(url)
        broken(said, "written", "the store")
        assert "disk" in said.last["text"]


def test_a_healthy_vllm(model: Path, tmp_path: Path) -> None:
    """Nothing is called broken, with and without a reset of vLLM's cache; after it the probe comes back from the stores."""
    stores = ["memory://?size=64MiB", f"disk://{tmp_path}/kv?size=64MiB"]
    with serving(model, tmp_path, stores) as url:
        said = explain(url)
        sound(said)
        assert [link["name"] for link in said.links if link["ok"] is None] == ["loaded"]
        said = explain(url, "--reset")
        sound(said)
        assert [link["name"] for link in said.links if not link["ok"]] == []
        assert any(link["name"] == "loaded" and "gone from the device" in link["text"] for link in said.links)


HEALTHY = [
    ("&admit=second", (), {}),
    ("", ("--no-enable-prompt-tokens-details",), {}),
    ("", ("--block-size", "512"), {}),
    ("", ("--prefix-caching-hash-algo", "sha256_cbor"), {}),
    ("", (), {"layout": "portable"}),
    ("", (), {"encryption": {"key_store": "disk://{folder}/keys", "master_key_file": "{folder}/masters"}}),
]


@pytest.mark.parametrize(("options", "flags", "more"), HEALTHY)
def test_other_healthy_set_ups(
    model: Path, tmp_path: Path, options: str, flags: tuple[str, ...], more: dict[str, Any]
) -> None:
    """No other setting is called broken either, and blocks that are gone from the device come back."""
    (tmp_path / "masters").write_text(f"1:{'11' * 32}\n")
    settings = json.loads(json.dumps(more).replace("{folder}", str(tmp_path)))
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?size=64MiB{options}"], *flags, **settings) as url:
        said = explain(url, "--reset")
        sound(said)
        assert [link["text"] for link in said.links if not link["ok"]] == []


def test_a_store_that_is_only_read(model: Path, tmp_path: Path) -> None:
    """A vLLM that may not write is not called broken; that it keeps nothing is said."""
    (tmp_path / "kv").mkdir()
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?read_only=1"]) as url:
        said = explain(url)
        sound(said)
        assert "`read_only=`" in "".join(link["setting"] for link in said.links if link["ok"] is None)


@pytest.mark.parametrize("name", ["LFM2", "Gemma 3"])
def test_models_with_other_layers(tmp_path: Path, name: str) -> None:
    """Convolutions and windows beside attention: blocks of other sizes, and fewer of them that are kept."""
    folder = KINDS[name].build(tmp_path / "model")
    make_byte_model(tmp_path / "bytes")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tmp_path / "bytes" / file, folder / file)
    with serving(folder, tmp_path, [f"disk://{tmp_path}/kv?size=64MiB"]) as url:
        sound(explain(url, "--reset"))


def test_an_adapter(model: Path, tmp_path: Path) -> None:
    """A vLLM with an adapter, asked for that."""
    make_adapter(tmp_path / "adapter", model, 1)
    flags = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"other={tmp_path}/adapter")
    with serving(model, tmp_path, [f"disk://{tmp_path}/kv?size=64MiB"], *flags) as url:
        said = explain(url, "--model", "other", "--reset")
        sound(said)
        assert "serves other" in said.links[0]["text"]
