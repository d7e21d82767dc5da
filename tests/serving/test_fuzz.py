"""Arbitrary requests never get status 500, and the server keeps working."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from example_counts import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from shared_server import SharedServer, SharedServers, shared_servers, until

from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.responses import ResponsesBody
from foreword.server.app import NewPrefixBody
from foreword.server.model_api import TokenizeBody

FUZZ = settings(max_examples=examples(120), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def servers() -> Iterator[SharedServers]:
    """An engine of its own: if a request should break it, the other tests do not suffer."""
    with shared_servers() as made:
        yield made


text = st.text(st.characters(codec="utf-8"), max_size=12)
numbers = st.integers(-3, 30) | st.integers() | st.floats() | st.sampled_from([0, 1, -1, 1e-300, 1e300, 10**25])
scalars = st.none() | st.booleans() | numbers | text
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4), max_leaves=12
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]), "content": text | anything}
    ),
    max_size=4,
)
sampling = {
    "temperature": st.floats(0, 5) | st.sampled_from([0, 1e-300, 1e-12, 1e300]),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2**40),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 5),
    "stop": st.text("ab \n", min_size=1, max_size=3) | st.lists(text, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0, 10) | st.sampled_from([1e-300, 1e-30, 1e30, 1e300]),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "min_tokens": st.integers(0, 8),
    "stream": st.booleans(),
    "ignore_eos": st.booleans(),
    "include_stop_str_in_output": st.booleans(),
    "cache_report": st.booleans(),
}
# Valid enough to reach the engine; every body is small, or the test would take for ever.
small = {"max_tokens": st.integers(0, 3)}
for_completion = st.fixed_dictionaries(small, optional={**sampling, "logprobs": st.integers(0, 20)}) | (
    st.fixed_dictionaries({**small, "echo": st.booleans()}, optional=sampling)
)
for_chat = st.fixed_dictionaries(small, optional={**sampling, "logprobs": st.booleans()}) | st.fixed_dictionaries(
    {**small, "logprobs": st.just(True), "top_logprobs": st.integers(0, 20)}, optional=sampling
)
spoken = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": text})


def fields_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Any value for any known field."""
    names = st.sampled_from([*kind.__struct_fields__, "salt"])
    return st.dictionaries(names, anything, max_size=6).map(
        lambda body: {**body, "max_tokens": body.get("max_tokens", 2)}
    )


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    # json.dumps writes NaN and Infinity, as careless clients do.
    return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})


def check(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        assert {"message", "type"} <= set(answer.json()["error"])
    else:
        assert '"error":{' not in answer.text[-300:]


@FUZZ
@given(
    prompt=text | st.lists(st.integers(0, 300), min_size=1, max_size=20) | st.lists(text, max_size=3),
    body=for_completion,
)
@example(prompt="x", body={"max_tokens": 2, "temperature": 1e-300, "n": 2})
@example(prompt="x", body={"max_tokens": 2, "repetition_penalty": 1e-300})
@example(prompt="x", body={"max_tokens": 2, "top_p": 1e-46})
@example(prompt="x", body={"max_tokens": 2, "logit_bias": {str(token): -100 for token in range(300)}})
def test_reasonable_completions(client: httpx.Client, prompt: Any, body: dict[str, Any]) -> None:
    """Every completion with parameters that are allowed is answered, and no stream breaks off with an error."""
    check(post(client, "/v1/completions", {"prompt": prompt, **body}))


@FUZZ
@given(st.lists(spoken, min_size=1, max_size=4) | messages, for_chat)
def test_reasonable_chats(client: httpx.Client, messages: list[Any], body: dict[str, Any]) -> None:
    """Every chat with parameters that are allowed is answered, or refused with a 400."""
    check(post(client, "/v1/chat/completions", {"messages": messages, **body}))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/completions", CompletionBody),
        ("/v1/chat/completions", ChatBody),
        ("/v1/responses", ResponsesBody),
        ("/v1/messages", MessagesBody),
        ("/v1/tokenize", TokenizeBody),
        ("/v1/prefixes", NewPrefixBody),
    ],
)
@FUZZ
@given(data=st.data())
def test_unreasonable_bodies(client: httpx.Client, path: str, kind: Any, data: st.DataObject) -> None:
    """A body of known fields with any values is answered or refused, never a 500."""
    body = data.draw(fields_of(kind))
    if path == "/v1/chat/completions":
        body = {**body, "max_completion_tokens": 2}
    if path == "/v1/responses":
        body = {**body, "max_output_tokens": 2}
    check(post(client, path, body))


@FUZZ
@given(
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions", "/v1/detokenize", "/v1/prefixes"]),
    body=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()),
)
def test_unreasonable_bytes(client: httpx.Client, path: str, body: bytes) -> None:
    """Any bytes as a body are answered or refused, never a 500."""
    check(client.post(path, content=body, headers={"content-type": "application/json"}))


@FUZZ
@given(method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]), name=st.text(max_size=20))
def test_unreasonable_paths(client: httpx.Client, method: str, name: str) -> None:
    """Any name in a path, with any method, is answered or refused, never a 500."""
    from urllib.parse import quote

    for base in ("/v1/prefixes/", "/v1/models/", "/"):
        path = base + quote(name, safe="", errors="replace")
        assert client.request(method, path).status_code < 500


def test_afterwards_it_still_works(client: httpx.Client, server: SharedServer) -> None:
    """After all of this nothing is left running, and the server answers."""
    until(lambda: server.engine.status().running == server.engine.status().waiting == 0)
    assert post(client, "/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
