"""Every error has OpenAI's format, the right status and a helpful message."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from shared_server import SharedServer, SharedServers, slow, until, words

CHAT = [{"role": "user", "content": "hi"}]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return dict(error)


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({}, "prompt", "is required"),
        ({"prompt": 3}, "prompt", "must be a string"),
        ({"prompt": []}, "prompt", "not empty"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string"),
        ({"prompt": [[1], "a"]}, "prompt", "must be a string"),
        ({"prompt": [-1]}, "prompt", "token id -1 is not between"),
        ({"prompt": [10**30]}, "prompt", "is not between"),
        ({"prompt": "x", "max_tokens": "16"}, "max_tokens", 'not "16"'),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", "at least 0"),
        ({"prompt": "x", "max_tokens": 10**400}, None, "JSON|max_tokens"),
        ({"prompt": "x", "temperature": -0.1}, "temperature", "at least 0"),
        ({"prompt": "x", "top_p": 0}, "top_p", "greater than 0"),
        ({"prompt": "x", "top_p": 1.1}, "top_p", "between"),
        ({"prompt": "x", "min_p": 2}, "min_p", "between"),
        ({"prompt": "x", "top_k": -2}, "top_k", "at least 0"),
        ({"prompt": "x", "n": 0}, "n", "between 1"),
        ({"prompt": "x", "n": 129}, "n", "between 1"),
        ({"prompt": ["x"] * 100, "n": 100}, "n", "server.max_queue"),
        ({"prompt": "x", "presence_penalty": 3}, "presence_penalty", "between"),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", "between 0.01 and 100"),
        ({"prompt": "x", "stop": ""}, "stop", "none of them empty"),
        ({"prompt": "x", "stop": ["a", 1]}, "stop", "list of strings"),
        ({"prompt": "x", "stop": ["a"] * 65}, "stop", "at most 64"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", "20"),
        ({"prompt": "x", "logprobs": True}, "logprobs", "integer"),
        ({"prompt": "x", "best_of": 4, "n": 2}, "best_of", "take the likeliest"),
        ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "integer"),
        ({"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias", "100"),
        ({"prompt": "x", "logit_bias": {"99999999": 1}}, "logit_bias", "is not between"),
        ({"prompt": "x", "stop_token_ids": [99999999]}, "stop_token_ids", "is not between"),
        ({"prompt": "x", "response_format": {"type": "xml"}}, "response_format", "only"),
        ({"prompt": "x", "guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "cannot be combined"),
        ({"prompt": "x", "priority": 1}, "priority", "order of their arrival"),
        ({"prompt": "x", "stream_options": {}}, "stream_options", "together with stream"),
        ({"prompt": "x", "seed": 2**64}, "seed", "less than or equal"),
        ({"prompt": "x", "prefix": 3}, "prefix", "string"),
    ],
)
def test_bad_completion(client: httpx.Client, body: dict[str, Any], param: str | None, sentence: str) -> None:
    """A bad completion request is a 400 that names the parameter and says what is wrong, also if it asks to stream."""
    for request in (body, {**body, "stream": True}):
        if "stream_options" in body and "stream" in request:
            continue
        answer = client.post("/v1/completions", json=request)
        error = error_of(answer)
        assert answer.status_code == 400 and error["type"] == "invalid_request_error"
        assert any(part in error["message"] for part in sentence.split("|"))
        assert param is None or error["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({}, "messages", "is required"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0].content: is required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "image_url"),
        ({"messages": CHAT, "tools": [{"type": "function"}]}, "tools", "tools[0].function: is required"),
        ({"messages": CHAT, "functions": [{}]}, "functions", "not supported"),
        ({"messages": CHAT, "tool_choice": "required"}, "tool_choice", "tools"),
        ({"messages": CHAT, "response_format": {"type": "json_schema"}}, "response_format", "is required"),
        ({"messages": CHAT, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ({"messages": CHAT, "logprobs": 2}, "logprobs", "boolean"),
        ({"messages": CHAT, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"messages": CHAT, "modalities": ["audio"]}, "modalities", "only text"),
    ],
)
def test_bad_chat(client: httpx.Client, body: dict[str, Any], param: str, sentence: str) -> None:
    """A bad chat request is a 400 that names the parameter and says what is wrong."""
    answer = client.post("/v1/chat/completions", json=body)
    error = error_of(answer)
    assert (answer.status_code, error["param"]) == (400, param) and sentence in error["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/tokenize", "/v1/prefixes"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": "\\ud800"}', b"[" * 100_000])
def test_malformed_json(client: httpx.Client, path: str, body: bytes) -> None:
    """A body that is not a JSON object is a 400, however it is broken."""
    answer = client.post(path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert any(words in error_of(answer)["message"] for words in ("JSON", "more values, objects or arrays"))


def test_other_media_types(client: httpx.Client) -> None:
    """A body that is not declared as JSON is refused: a web page could send it without its reader's knowledge."""
    for media_type in ("text/plain", "application/x-www-form-urlencoded", ""):
        answer = client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"content-type": media_type})
        assert answer.status_code == 415 and "application/json" in error_of(answer)["message"]
    with_charset = {"content-type": "application/json; charset=utf-8"}
    body = b'{"prompt": "x", "max_tokens": 1}'
    assert client.post("/v1/completions", content=body, headers=with_charset).status_code == 200


def test_body_too_large(client: httpx.Client) -> None:
    """A body without end is cut off with a 413."""
    chunk = b" " * (1 << 20)
    answer = client.post(
        "/v1/completions", content=(chunk for _ in range(70)), headers={"content-type": "application/json"}
    )
    assert answer.status_code == 413 and error_of(answer)["code"] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_too_long(client: httpx.Client, server: SharedServer, stream: bool) -> None:
    """A prompt that does not fit is a 400 with OpenAI's code, before a stream begins."""
    longest = server.engine.info.max_model_len
    for prompt, max_tokens in (([5] * (longest + 1), 1), ([5] * 10, longest), ("x " * longest * 300, 1)):
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": stream}
        answer = client.post("/v1/completions", json=body)
        assert (answer.status_code, error_of(answer)["code"]) == (400, "context_length_exceeded")


def test_unknown_model(client: httpx.Client, ai: openai.OpenAI, server: SharedServer) -> None:
    """An unknown model is a 404 that names the one that is served, as OpenAI's client understands it."""
    with pytest.raises(openai.NotFoundError) as caught:
        ai.completions.create(model=server.model + "x", prompt="x")
    assert caught.value.code == "model_not_found" and server.model in caught.value.message
    assert error_of(client.get("/v1/models/nothing"))["code"] == "model_not_found"


def test_unknown_routes_and_methods(client: httpx.Client) -> None:
    """An unknown route is a 404 with close names; a wrong method is a 405 that says which ones are right; from a path with a
    slash too many a client is sent to the right one, as by vLLM."""
    answer = client.post("/v1/chat/completion", json={})
    assert answer.status_code == 404 and "/v1/chat/completions" in error_of(answer)["message"]
    answer = client.put("/v1/completions", json={})
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert "PUT" in error_of(answer)["message"]
    moved = client.get("/v1/completions/?a=b")
    assert moved.status_code == 307 and moved.headers["location"] == "/v1/completions?a=b"
    assert client.get("//v1/completions/").status_code == client.get("/v1/completion/").status_code == 404
    assert "main paths are /v1/chat/completions" in error_of(client.get("/elsewhere"))["message"]
    assert client.get("/v1/models/").json() == client.get("/v1/models").json()


def test_escapes_in_a_path(client: httpx.Client, server: SharedServer) -> None:
    """Escapes of characters that need none are another spelling of the same path; a slash is not such a character."""
    name = "".join(f"%{ord(letter):02x}" for letter in server.model)
    assert client.get("/v1/%6Dodel%73").json()["data"][0]["id"] == client.get(f"/v1/models/{name}").json()["id"]
    assert client.post("/deto%6benize", json={"tokens": [1]}).json().keys() == {"prompt"}
    answer = client.get("/v1%2Fmodels")
    assert answer.status_code == 404 and "/v1%2Fmodels" in error_of(answer)["message"]


def test_request_ids(client: httpx.Client, server: SharedServer) -> None:
    """The client's request id comes back in the header and in the answer's id; without one the server draws one."""
    body = {"prompt": "x", "max_tokens": 1}
    answer = client.post("/v1/completions", json=body, headers={"x-request-id": "abc-123"})
    assert (answer.headers["x-request-id"], answer.json()["id"]) == ("abc-123", "cmpl-abc-123")
    assert answer.headers["request-id"] == "abc-123"  # where Anthropic's clients look
    drawn = {client.get("/health").headers["x-request-id"] for _ in range(2)}
    assert len(drawn) == 2
    for bad in ("x" * 200, "a b", "é"):
        answer = client.get("/nope", headers=[(b"x-request-id", bad.encode())])
        assert answer.status_code == 404 and len(answer.headers["x-request-id"]) == 32


def test_the_same_request_id_twice_at_once(server: SharedServer) -> None:
    """Two requests with the same id at the same time do not disturb each other."""
    texts: list[str] = []

    def ask() -> None:
        body = {"prompt": words("twin", 4), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        with server.http() as client:
            answer = client.post("/v1/completions", json=body, headers={"x-request-id": "twin"})
        texts.append(answer.json()["choices"][0]["text"])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3 and len(set(texts)) == 1


def test_queue_full(shared: SharedServers, metric: Callable[..., float]) -> None:
    """When the queue is full, further requests get 429 with Retry-After and are counted. Later requests succeed."""
    body = {"prompt": words("queue", 4), "stream": True, "n": 10, "ignore_eos": True, "max_tokens": 1000}
    body["max_tokens"] = min(1000, shared.open.engine.info.max_model_len - 100)
    with shared.open.http() as busy, shared.short.http() as client:
        with slow(shared.open), busy.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            until(lambda: shared.open.engine.status().waiting >= 2)
            for asks in ({"stream": False}, {"stream": True}):
                answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **asks})
                assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
                assert error_of(answer)["code"] == "queue_full"
        until(lambda: shared.open.engine.status().running == shared.open.engine.status().waiting == 0)
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
        assert metric("foreword:http_responses_total", route="/v1/completions", status="429") >= 2


def test_openai_client_sees_its_own_exceptions(ai: openai.OpenAI, server: SharedServer) -> None:
    """OpenAI's client raises the exception that belongs to each error."""
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        ai.completions.create(model=server.model, prompt="x", max_tokens=-1)
    with pytest.raises(openai.BadRequestError, match="is required"):
        ai.chat.completions.create(model=server.model, messages=CHAT, tools=[{"type": "function"}])  # type: ignore
