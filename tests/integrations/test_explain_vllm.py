"""`foreword explain` on real vLLM servers: planted mistakes are named, healthy ones are not accused."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from explained import broken, explain, sound
from vllm_process import needs_vllm
from vllm_server import BLOCK, VllmServer, make_byte_model

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_model(tmp_path_factory.mktemp("vllm") / "model")


@contextmanager
def serving(model: Path, folder: Path, stores: list[str] | None, *flags: str) -> Iterator[str]:
    transfer = {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"store": stores, "lookup_timeout": 60.0, "load_timeout": 300.0},
    }
    connector = () if stores is None else ("--kv-transfer-config", json.dumps(transfer))
    server = VllmServer(
        model, folder / "log", "--max-model-len", "1024", "--block-size", str(BLOCK), "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(64 << 20), *connector, *flags, VLLM_SERVER_DEV_MODE="1",
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
