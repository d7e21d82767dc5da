"""Real servers that serve one name with different weights, and are killed while they stream."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import http_client
import httpx
import pytest
import torch
from router_parts import RouterProcess
from safetensors.torch import load_file, save_file
from server_process import ControlledProcess, slow
from shared_server import until, words

import foreword

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"
NUM_STREAMS = 100
BODY = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with so much noise in its matrices that nearly every answer differs."""
    folder = tmp_path_factory.mktemp("models") / "stdlib-nano"
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    for name in [name for name, weight in weights.items() if weight.dim() == 2]:
        weight = weights[name].float()
        weights[name] = (weight * (1 + 0.8 * torch.randn_like(weight))).to(weights[name].dtype).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Fleet:
    """Servers of one name; `right` and `other` have different weights."""

    def __init__(self, right: Path, other: Path) -> None:
        self.folders = {"right": right, "other": other}
        self.started: list[ControlledProcess] = []

    def start(self, weights: str, port: int = 0) -> ControlledProcess:
        flags = ["--dtype", "float32", "--max-num-seqs", "64", "--kv-memory", "40000 tokens", "--port", str(port)]
        folder = str(self.folders[weights])
        process = ControlledProcess(folder, "--served-model-name", "stdlib-nano", *flags)
        self.started.append(process)
        process.wait_ready()
        return process


@pytest.fixture
def fleet(other_weights: Path) -> Iterator[Fleet]:
    made = Fleet(MODEL, other_weights)
    yield made
    for process in made.started:
        process.kill()


def prompts() -> list[str]:
    return [f"# {words(f'stream{number}', 4)}\n" for number in range(NUM_STREAMS)]


def answers_of(process: ControlledProcess) -> list[str]:
    """Asks one server all prompts, and returns its answers."""

    def answer(prompt: str) -> str:
        found = http_client.post(f"{process.url()}/v1/completions", json={"prompt": prompt, **BODY}).raise_for_status()
        return str(found.json()["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(answer, prompts()))


def stream(router: RouterProcess, prompt: str) -> tuple[str, str]:
    """Text, and the message of the error that ended it."""
    body = {"prompt": prompt, "stream": True, "model": "stdlib-nano", **BODY}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    errors = [one["error"]["message"] for one in events if "error" in one]
    assert bool(errors) != answer.text.rstrip().endswith("data: [DONE]")
    text = "".join(choice["text"] for one in events for choice in one.get("choices", ()))
    return text, errors[0] if errors else ""


def while_one_is_killed(router: RouterProcess, victim: ControlledProcess, all_of: list[ControlledProcess]) -> Any:
    """The streams, of which the victim is in the middle of some when it is killed."""
    with slow(*all_of, step=0.5) as fast, ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(stream, router, prompt) for prompt in prompts()]
        url = victim.url()
        until(lambda: router.metric("foreword:router_in_flight", replica=url) >= 30)
        until(lambda: router.metric("foreword:router_waiting", replica=url) == 0)
        victim.popen.kill()
        fast()
        return [one.result(300) for one in streams]


def served_by_all(router: RouterProcess, urls: set[str]) -> None:
    """Send requests until each replica has answered some: one that has just come back gets few until then."""
    left = dict.fromkeys(urls, 4)
    while any(left.values()):
        body = {"prompt": "x", "model": "stdlib-nano", "max_tokens": 1}
        answer = http_client.post(f"{router.url}/v1/completions", json=body).raise_for_status()
        url = answer.headers["x-foreword-route"].partition(": ")[0]
        left[url] = max(left[url] - 1, 0)


def counted(found: list[tuple[str, str]], right: list[str], other: list[str]) -> Counter[str]:
    """Counts the streams by the weights that they are of. One that ended with an error is of those whose answer begins like
    it."""
    counts: Counter[str] = Counter()
    for (text, error), one, two in zip(found, right, other, strict=True):
        kind = "right" if one.startswith(text) else "other" if two.startswith(text) else "SPLICED"
        assert error or kind == "SPLICED" or text == {"right": one, "other": two}[kind]
        counts[f"{kind}, broken off" if error else kind] += 1
    return counts


def test_no_stream_is_spliced_when_a_replica_is_killed(fleet: Fleet) -> None:
    """Two replicas serve one name with different weights, and one of them is killed under 100 streams: each stream is of one of
    the two, to its end or to an error that says why; the operator gets an alarm. With a second replica of the killed one's
    weights, no stream ends with an error either."""
    first, other = fleet.start("right"), fleet.start("other")
    right, wrong = answers_of(first), answers_of(other)
    assert sum(one != two for one, two in zip(right, wrong, strict=True)) >= NUM_STREAMS * 0.9
    named = [argument for one in (first, other) for argument in ("--replica", one.url())]
    router = RouterProcess(*named, "--policy", "round-robin", "--max-waiting", "64").wait_for(2)
    try:
        until(lambda: "its replicas have different weights" in router.text)
        assert router.metric("foreword:router_model_fingerprints", model_name="stdlib-nano") == 2
        counts = counted(while_one_is_killed(router, first, [first, other]), right, wrong)
        print(dict(counts))
        assert not counts["SPLICED"] and counts["right, broken off"] >= 20 and counts["other"] >= 40
        assert not counts["other, broken off"] and counts.total() == NUM_STREAMS
        assert "it has other weights" in router.text
        until(lambda: router.metric("foreword:router_model_fingerprints", model_name="stdlib-nano") == 1)

        # It comes back at its address, and another one with the same weights joins.
        address = re.search(r":(\d+)$", first.url())
        assert address is not None
        again, second = fleet.start("right", int(address[1])), fleet.start("right")
        http_client.post(f"{router.url}/v1/router/replicas", json={"replica": second.url()}).raise_for_status()
        replicas = (again, second, other)
        urls = {one.url() for one in replicas}
        until(lambda: urls == up(router))
        served_by_all(router, urls)
        counts = counted(while_one_is_killed(router, again, list(replicas)), right, wrong)
        print(dict(counts))
        assert set(counts) == {"right", "other"} and counts.total() == NUM_STREAMS
        assert router.metric("foreword:router_continuations_total", outcome="continued") >= 20
    finally:
        router.kill()


def test_another_model_takes_the_address(fleet: Fleet) -> None:
    """The replica that is killed comes back at its address with other weights: it continues no stream that the old ones began,
    and the router knows its new weights before it sends anything there."""
    first, second = fleet.start("right"), fleet.start("right")
    right = answers_of(first)
    named = [argument for one in (first, second) for argument in ("--replica", one.url())]
    router = RouterProcess(*named, "--policy", "round-robin", "--max-waiting", "64").wait_for(2)
    try:
        port = int(first.url().rpartition(":")[2])
        url = first.url()
        found = while_one_is_killed(router, first, [first, second])
        assert found == [(text, "") for text in right]
        back = fleet.start("other", port)
        wrong = answers_of(back)
        until(lambda: up(router) == {url, second.url()})
        until(lambda: "its replicas have different weights" in router.text)
        served_by_all(router, up(router))
        counts = counted(while_one_is_killed(router, second, [back, second]), right, wrong)
        print(dict(counts))
        assert not counts["SPLICED"] and counts["right, broken off"] >= 20 and counts["other"] >= 40
    finally:
        router.kill()


def up(router: RouterProcess) -> set[str]:
    listed = http_client.get(f"{router.url}/v1/router/replicas").json()["data"]
    return {one["replica"] for one in listed if one["takes_requests"]}
