"""The search of the documentation's site finds the page that answers a user's question.

The site is built, and its own search worker (mkdocs-material's, lunr) runs in a JavaScript engine over the index of the site,
as in a browser. `make docs` runs this test over the site that it has built (FOREWORD_SITE).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

py_mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer is not installed (dependency group dev)")
pytest.importorskip("mkdocs", reason="mkdocs is not installed (dependency group dev)")

pytestmark = pytest.mark.extended
ROOT = Path(__file__).parents[1]
FIRST = 3
# Questions that users have asked about KV caches for vLLM, in their threads, and the pages that answer each.
ASKED = {
    "which vllm version is supported": ["guides/vllm", "operations/conformance"],
    "external prefix cache hit rate 0": ["operations/troubleshooting"],
    "disk cache exceeds limit": ["guides/stores"],
    "PYTHONHASHSEED": ["guides/vllm", "guides/coming-from"],
    "redis maximum size": ["guides/stores"],
    "pod evicted ephemeral storage": ["guides/kubernetes"],
    "how much host memory": ["operations/sizing"],
    "slower than vllm alone": ["operations/when-it-does-not-pay"],
    "tensor parallel share": ["guides/vllm"],
    "RAG non-prefix chunks": ["guides/coming-from"],
}
# Other questions, written before anything was changed for them.
HELD_OUT = {
    "backup": ["operations/moving-stores"],
    "move store to another disk": ["operations/moving-stores"],
    "api key file": ["operations/security"],
    "log json": ["operations/operating"],
    "install without internet": ["operations/offline"],
    "switch from lmcache": ["guides/coming-from"],
    "server killed out of memory": ["operations/troubleshooting"],
    "new weights without restart": ["guides/vllm"],
    "one customer fills the cache": ["guides/stores"],
    "rolling upgrade keep cache": ["operations/upgrading"],
    "grafana dashboard": ["guides/kubernetes"],
    "delete a customer's data": ["operations/security"],
    "encrypt the cache at rest": ["operations/security"],
    "nothing is cached after a restart": ["operations/troubleshooting"],
    "same prompt different answer": ["operations/troubleshooting"],
    "charge customers per token": ["operations/billing"],
    "share kv cache between machines": ["guides/stores", "guides/vllm"],
    "vllm crashes at startup not enough memory": ["operations/troubleshooting"],
    "run in docker container": ["guides/kubernetes"],
    "stream breaks when server dies": ["guides/router"],
}
# From threads that were read later, each written before the pages were changed for it.
LATER = {
    "wrong tools answer after cache hit": ["operations/troubleshooting", "operations/audit"],
    "connector breaks vllm when cache server down": ["operations/troubleshooting"],
    "other tenant gets my cached prefix": ["operations/security"],
    "weights update rl training stale kv": ["guides/vllm"],
    "ssd wear writes per day": ["operations/sizing"],
    "scale down removes hottest pod": ["guides/kubernetes"],
    "agent compaction fork session cache": ["guides/agents"],
    "price of cached tokens": ["operations/billing"],
    "eagle speculative decoding prefix cache": ["guides/vllm-models"],
    "prompt_logprobs no cache hits": ["operations/troubleshooting"],
    "fp8 kv cache quantized": ["guides/vllm"],
    "mooncake store alternative": ["guides/coming-from"],
    "sleep mode wake up crash": ["operations/upgrading"],
    "kserve kvCacheOffloading": ["guides/kubernetes"],
}
QUESTIONS = {**ASKED, **HELD_OUT, **LATER}
# Globals that the worker has around it in a browser.
_BROWSER = """
var self = globalThis, window = globalThis, answers = [], receive;
self.console = {warn() {}, log() {}, error() {}};
function addEventListener(kind, handler) { receive = handler; }
function postMessage(message) { answers.push(message); }
function importScripts() {}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site."""
    if "FOREWORD_SITE" in os.environ:
        return ROOT / os.environ["FOREWORD_SITE"]
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    return folder


@pytest.fixture(scope="module")
def search(site: Path) -> Iterator[Callable[[str], list[str]]]:
    """The site's search: the pages that it shows for a question, in order."""
    [worker] = (site / "assets" / "javascripts" / "workers").glob("search.*.min.js")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    engine = py_mini_racer.MiniRacer()

    def send(kind: int, data: Any) -> Any:
        engine.eval(f"answers.length = 0; receive({{data: {json.dumps({'type': kind, 'data': data})}}})")
        while True:  # the handler is asynchronous: its answer comes with the engine's next turns
            answers = json.loads(engine.eval("JSON.stringify(answers)"))
            if answers:
                return answers[0].get("data")

    def ask(question: str) -> list[str]:
        return [
            min(one["location"] for one in page).partition("#")[0].strip("/") for page in send(2, question)["items"]
        ]

    engine.eval(_BROWSER)
    engine.eval(worker.read_text(encoding="utf-8"))
    send(0, {**index, "options": {"suggest": False}})
    yield ask
    engine.close()


@pytest.mark.parametrize("question", QUESTIONS)
def test_search_finds_the_page(question: str, search: Callable[[str], list[str]]) -> None:
    """A page that answers the question is among the first three that the search shows."""
    shown = search(question)[:FIRST]
    assert set(shown) & set(QUESTIONS[question]), shown


def test_builders_pages_are_not_found(site: Path, search: Callable[[str], list[str]]) -> None:
    """Decisions, lab notes and campaigns are not in the site, and the reference is behind the guides for a user's word."""
    locations = [
        doc["location"]
        for doc in json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    ]
    assert "guides/vllm/" in locations
    assert not [one for one in locations if one.startswith(("decisions", "lab-notes", "dev/"))]
    assert not search("redis")[0].startswith("reference/")
