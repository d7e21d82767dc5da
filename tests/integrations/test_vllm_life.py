"""Changes while a server runs: resets, pauses, sleep, weights, under a real vLLM, for every kind of KV groups."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_process import disk, needs_vllm, prompts, run
from vllm_server import VllmServer, make_byte_model
from vllm_waits import WITHIN

from foreword.referee.models import KINDS

pytestmark = needs_vllm

# Dense, latent, windows in all layers and in some, with sinks, chunked, recurrent alone and beside full attention.
NAMES = ("Llama", "MiniCPM 3", "Mistral", "Gemma 3", "gpt-oss", "Llama 4", "Mamba2", "Granite 4")
WHERE = ("one process", "workers", "served")
STARTS = prompts(41, [500, 420, 330])
TURNS = [start + more for start, more in zip(STARTS, prompts(42, [200, 200, 200]), strict=True)]


def lives(name: str, where: str, folder: Path, *runs: tuple[str, bool]) -> list[dict[str, Any]]:
    """Runs a server of this kind once for each of `runs` (its name, and whether it has the store), and returns what each
    says."""
    kind = KINDS[name]
    model = kind.build(folder / "model")
    found = run(
        "vllm_life_script.py",
        {
            "model": str(model),
            "llm": kind.arguments(),
            "where": where,
            "hold": str(folder / "hold"),
            "prompts": STARTS,
            "turns": TURNS,
            "runs": [{"do": do, "store": [disk(folder)] if store else None} for do, store in runs],
        },
    )
    told: list[dict[str, Any]] = found["runs"]
    assert all("done" in one for one in told), next(one for one in told if "done" not in one).get("failed")
    return told


def tokens(found: dict[str, Any], which: str = "answers") -> list[list[int]]:
    return [one["tokens"] for one in found[which]]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", NAMES)
def test_a_training_loop(name: str, where: str, tmp_path: Path) -> None:
    """Directly after an answer every reset, pause and sleep succeeds that succeeds without a connector. After a reset, other
    weights and their name, no answer comes from KV of before; nor on a second server with these weights and their name, which
    loads what the first has saved."""
    runs = (("trainer", False), ("trainer", True), ("second", True))
    alone, trained, second = lives(name, where, tmp_path, *runs)
    assert trained["told"] == alone["told"]
    pairs = zip(tokens(alone, "before"), tokens(alone), strict=True)
    assert all(before != after for before, after in pairs), "the change changes no answer"
    assert tokens(alone, "before") == tokens(trained, "before")
    assert tokens(alone) == tokens(trained) == tokens(second)
    assert any(one["cached"] for one in second["answers"])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3"])
def test_a_name_over_a_cache_that_was_not_reset(name: str, where: str, tmp_path: Path) -> None:
    """Nothing is saved under the name while vLLM's cache may hold KV of other weights; after a reset it is."""
    runs = (("changed", False), ("forgetful", True), ("second", True))
    right, forgetful, second = lives(name, where, tmp_path, *runs)
    assert forgetful["told"] == {"reset": True}
    assert tokens(forgetful) == tokens(second) == tokens(right)
    assert any(one["cached"] for one in second["answers"])


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Mamba2"])
def test_loads_that_are_held_open(name: str, where: str, tmp_path: Path) -> None:
    """While a load is held open, a reset that preempts, a pause and a sleep return, and vLLM answers afterwards: also the
    request that was loading, unless it was aborted."""
    [found] = lives(name, where, tmp_path, ("held", True))
    prompt, other = found["right"]
    assert found["told"] == {"reset running": True, **dict.fromkeys(found["told"].keys() - {"reset running"})}
    assert found["held"] == {name: None if "abort" in name else prompt for name in found["told"]}
    assert set(map(tuple, found["after"].values())) == {tuple(other)}


class Served:
    """`vllm serve` with a store and the middleware. While it `holds`, loads stay open."""

    def __init__(self, folder: Path) -> None:
        self._hold = folder / "hold"
        self._folder = folder / "kv"
        transfer = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "vllm_patient",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": [disk(folder)], "lookup_timeout": 60, "load_timeout": 300},
        }
        self._server = VllmServer(
            make_byte_model(folder / "model"), folder / "log", "--max-model-len", "1024", "--block-size", "32",
            "--kv-cache-memory-bytes", str(64 << 20), "--max-num-seqs", "8", "--seed", "0", "--shutdown-timeout", "30",
            "--kv-transfer-config", json.dumps(transfer), "--middleware", "foreword.integrations.vllm.NamedPrefixes",
            HOLD_LOADS=str(self._hold), VLLM_SERVER_DEV_MODE="1",
        )  # fmt: skip
        self._threads = ThreadPoolExecutor(2)
        self.client = httpx.Client(base_url=self._server.url, timeout=WITHIN)
        self.wait(self._server.healthy)

    @staticmethod
    def wait(happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WITHIN
        while not happened():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.05)

    def post(self, path: str, **body: Any) -> int:
        return self.client.post(path, json=body or None).status_code

    def complete(self, prompt: list[int]) -> Any:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = self.client.post("/v1/completions", json={**body, "return_token_ids": True})
        return answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else answer.status_code

    def complete_later(self, prompt: list[int]) -> Future[Any]:
        return self._threads.submit(self.complete, prompt)

    @property
    def paused(self) -> bool:
        return bool(self.client.get("/is_paused").json()["is_paused"])

    @contextlib.contextmanager
    def loading(self, prompt: list[int]) -> Iterator[Future[Any]]:
        """A request for the prompt, whose load is open until the end."""
        self.complete(prompt)
        sizes = [-2, -1]
        while len(set(sizes[-20:])) > 1 or not sizes[-1]:  # until nothing comes for a second
            time.sleep(0.05)
            sizes.append(sum(one.stat().st_size for one in self._folder.rglob("*") if one.is_file()))
        assert self.post("/reset_prefix_cache") == 200
        self._hold.touch()
        try:
            asked = self.complete_later(prompt)
            self.wait(self._hold.with_suffix(".reached").exists)
            yield asked
        finally:
            self._hold.unlink()
            self._hold.with_suffix(".reached").unlink(missing_ok=True)

    def close(self) -> None:
        self._server.stop()
        self._threads.shutdown(wait=False)


VERSION = "/v1/foreword/weights_version"


def test_pauses_of_a_server_while_it_loads(tmp_path: Path) -> None:
    """While a load is held open, the version is set, vLLM pauses and sleeps; it runs after that, and answers right. A client
    that leaves while its version is being set leaves no pause behind."""
    served, [prompt, other] = Served(tmp_path), [[1 + token % 200 for token in one] for one in prompts(43, [500, 70])]
    calls: list[tuple[str, dict[str, Any], str]] = [
        (VERSION, {"version": "one"}, ""),
        ("/pause?mode=keep", {}, "/resume"),
        ("/pause?mode=abort", {}, "/resume"),
        (VERSION, {"version": "two"}, ""),
        ("/sleep?level=1&mode=keep", {}, "/wake_up"),
        ("/sleep?level=1&mode=abort", {}, "/wake_up"),
    ]
    try:
        right, short = served.complete(prompt), served.complete(other)
        for path, body, undone in calls:
            with served.loading(prompt) as asked:
                assert served.post(path, **body) == 200, path
                if undone:
                    assert served.paused and served.post(undone) == 200
                assert not served.paused
                assert served.complete(other) == short, path
            found = asked.result(120)
            assert found == right or "abort" in path, path
            assert served.complete(prompt) == right, path
        with served.loading(prompt) as asked:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(f"{served.client.base_url}{VERSION}", json={"version": "three"}, timeout=0.002)
            assert served.complete(other) == short
            served.wait(lambda: not served.paused)
        assert asked.result(120) == right and served.complete(prompt) == right
    finally:
        served.close()
