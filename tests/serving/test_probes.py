"""Models, tokenize, probes and metrics."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from shared_server import SharedServer, words

VLLM_NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
}


def test_models(ai: openai.OpenAI, server: SharedServer) -> None:
    """A server lists one model, which can be asked for by its name."""
    listed = ai.models.list().data
    assert [model.id for model in listed] == [server.model]
    one = ai.models.retrieve(server.model)
    assert one.object == "model" and one.max_model_len == server.engine.info.max_model_len  # type: ignore[attr-defined]


def test_tokenize_and_back(client: httpx.Client, server: SharedServer) -> None:
    """Text becomes the tokenizer's token ids, and these become the text again; also on vLLM's paths."""
    text = "def f(x): return 'é𝄞'"
    answer = client.post("/v1/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == server.engine.tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == server.engine.info.max_model_len
    bare = client.post("/v1/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert client.post("/v1/detokenize", json={"tokens": bare}).json()["prompt"] == text
    assert client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json() == answer
    assert client.post("/detokenize", json={"tokens": bare}).json()["prompt"] == text


def test_tokenize_messages(client: httpx.Client, server: SharedServer) -> None:
    """Messages become what the chat template makes of them."""
    messages = [{"role": "user", "content": "hi"}]
    answer = client.post("/v1/tokenize", json={"messages": messages}).json()
    assert answer["tokens"] == server.engine.tokenizer.render_chat(messages, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tokenize", {}),
        ("tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("tokenize", {"prompt": [1]}),
        ("detokenize", {}),
        ("detokenize", {"tokens": ["x"]}),
        ("detokenize", {"tokens": [-1]}),
        ("detokenize", {"tokens": [10**9]}),
    ],
)
def test_bad_tokenize(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    """A body that cannot be tokenized or detokenized is a 400."""
    assert client.post(f"/v1/{path}", json=body).status_code == 400


def test_probes(client: httpx.Client, server: SharedServer) -> None:
    """A loaded server is alive and ready, and says its version."""
    assert client.get("/health").json() == {"status": "alive"}
    assert client.get("/ping").json() == client.post("/ping").json() == {"status": "alive"}
    assert client.get("/ready").json() == {"status": "ready", "model": server.model}
    assert client.get("/version").json()["version"]


def test_openapi_describes_the_bodies(client: httpx.Client) -> None:
    """The interface's description names every route and the fields of every body."""
    paths = client.get("/openapi.json").json()["paths"]
    body = paths["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"prompt", "max_tokens", "prefix"} <= set(body["properties"]) and body["required"] == ["prompt"]


def test_metrics_have_vllms_names(client: httpx.Client, server: SharedServer) -> None:
    """Every metric that vLLM's dashboards use is there under its name and type, with the model's name."""
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    found = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    for name, kind in VLLM_NAMES.items():
        assert found[name].type == kind
        assert all(sample.labels["model_name"] == server.model for sample in found[name].samples)
    reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"].samples}
    assert {"stop", "length", "abort", "error"} <= reasons


def test_metrics_move(client: httpx.Client, server: SharedServer, metric: Callable[..., float]) -> None:
    """A request increases the counters by exactly its tokens, its hits and one request."""
    prompt = words("counted", 60)
    tokens = len(server.engine.tokenizer.encode(prompt))
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).raise_for_status()
    names = ["prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "generation_tokens"]
    before = [metric(f"vllm:{name}_total") for name in names]
    ended = metric("vllm:request_success_total", finished_reason="length")
    firsts = metric("vllm:time_to_first_token_seconds_count")
    gaps = metric("vllm:inter_token_latency_seconds_count")
    answer = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5, "ignore_eos": True}).json()
    after = [metric(f"vllm:{name}_total") for name in names]
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    assert [now - then for now, then in zip(after, before, strict=True)] == [tokens, cached, tokens, 5]
    assert metric("vllm:request_success_total", finished_reason="length") == ended + 1
    assert metric("vllm:time_to_first_token_seconds_count") == firsts + 1
    assert metric("vllm:inter_token_latency_seconds_count") == gaps + 4
    assert metric("foreword:http_responses_total", route="/v1/completions", status="200") >= 2


def test_metrics_in_openmetrics_format(client: httpx.Client) -> None:
    """A scraper that asks for OpenMetrics gets it."""
    answer = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")
