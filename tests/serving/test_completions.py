"""`/v1/completions` through OpenAI's own client and over plain HTTP."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from shared_server import SharedServer, words

GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def stream(ai: openai.OpenAI, **body: Any) -> list[Any]:
    return list(ai.completions.create(stream=True, stream_options={"include_usage": True}, **body))


def joined(chunks: list[Any], index: int) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


@pytest.mark.parametrize("max_tokens", [1, 24])
def test_streaming_equals_not_streaming(ai: openai.OpenAI, server: SharedServer, max_tokens: int) -> None:
    """The chunks of a stream, put together, are the answer that is given without streaming; usage included."""
    body: dict[str, Any] = dict(model=server.model, prompt=words("equal", 8), max_tokens=max_tokens, **GREEDY)
    whole = ai.completions.create(**body)
    chunks = stream(ai, **body)
    assert joined(chunks, 0) == whole.choices[0].text != ""
    finish = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finish == [whole.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == max_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {chunk.id for chunk in chunks} == {chunks[0].id} != {whole.id}


def test_usage_counts_and_cached_tokens(ai: openai.OpenAI, server: SharedServer) -> None:
    """Usage counts the prompt's tokens, and the second time says how many of them were cached."""
    prompt = words("usage", 60)
    tokens = server.engine.tokenizer.encode(prompt)
    first, second = (
        ai.completions.create(model=server.model, prompt=prompt, max_tokens=3, **GREEDY).usage for _ in range(2)
    )
    assert first is not None and second is not None
    assert first.prompt_tokens == second.prompt_tokens == len(tokens)
    assert first.total_tokens == first.prompt_tokens + first.completion_tokens
    assert first.prompt_tokens_details is not None and second.prompt_tokens_details is not None
    # A prompt that begins with the same token as another may reuse it from a partly equal block.
    assert (first.prompt_tokens_details.cached_tokens or 0) < server.engine.info.block_size
    cached = second.prompt_tokens_details.cached_tokens
    block = server.engine.info.block_size
    assert cached is not None and (len(tokens) - 1) // block * block <= cached < len(tokens)


def test_all_shapes_of_prompt(ai: openai.OpenAI, server: SharedServer) -> None:
    """A string, a list of strings, token ids and lists of token ids mean the same prompt."""
    text, other = words("shape", 5), words("form", 5)
    ids, other_ids = server.engine.tokenizer.encode(text), server.engine.tokenizer.encode(other)
    body: dict[str, Any] = dict(model=server.model, max_tokens=5, **GREEDY)
    one = [choice.text for choice in ai.completions.create(prompt=text, **body).choices]
    both = [choice.text for choice in ai.completions.create(prompt=[text, other], **body).choices]
    assert len(both) == 2 and both[:1] == one
    assert [choice.text for choice in ai.completions.create(prompt=ids, **body).choices] == one
    assert [choice.text for choice in ai.completions.create(prompt=[ids, other_ids], **body).choices] == both
    chunks = stream(ai, prompt=[text, other], **body)
    assert [joined(chunks, index) for index in range(2)] == both


def test_n_sequences_per_prompt(ai: openai.OpenAI, server: SharedServer) -> None:
    """Two prompts with n=2 give four choices in order; usage counts each prompt once and every sequence's tokens."""
    prompts = [words("many", 4), words("lots", 4)]
    body: dict[str, Any] = {"model": server.model, "prompt": prompts, "n": 2, "max_tokens": 6, "seed": 7}
    body["extra_body"] = {"ignore_eos": True}
    whole = ai.completions.create(**body)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.usage is not None and whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == sum(len(server.engine.tokenizer.encode(prompt)) for prompt in prompts)
    chunks = stream(ai, **body)
    assert [joined(chunks, choice.index) for choice in whole.choices] == [choice.text for choice in whole.choices]


def test_seed_repeats(ai: openai.OpenAI, server: SharedServer) -> None:
    """A seed gives the same text each time."""
    body: dict[str, Any] = {
        "model": server.model,
        "prompt": words("seed", 4),
        "max_tokens": 12,
        "seed": 3,
        "temperature": 1.0,
    }
    assert ai.completions.create(**body).choices[0].text == ai.completions.create(**body).choices[0].text


def test_logprobs_have_openais_shape(ai: openai.OpenAI, server: SharedServer) -> None:
    """Log-probabilities come as parallel lists whose offsets point at each token in the text, streamed or not."""
    body: dict[str, Any] = dict(model=server.model, prompt=words("odds", 6), max_tokens=8, logprobs=3, **GREEDY)
    choice = ai.completions.create(**body).choices[0]
    shown = choice.logprobs
    assert shown is not None and shown.tokens and shown.token_logprobs and shown.top_logprobs and shown.text_offset
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(shown.text_offset) == 8
    assert shown.text_offset[0] == 0 and shown.text_offset == sorted(shown.text_offset)
    for token, logprob, top in zip(shown.tokens, shown.token_logprobs, shown.top_logprobs, strict=True):
        assert logprob <= 0 and top[token] == logprob == max(top.values())
        assert 1 <= len(top) <= 3
    special = [token for token in shown.tokens if token.startswith("<|")]
    if not any(token.startswith("bytes:") for token in shown.tokens):
        assert "".join(token for token in shown.tokens if token not in special) == choice.text
        placed = zip(shown.tokens, shown.text_offset, strict=True)
        assert all(choice.text[offset:].startswith(token) for token, offset in placed if token not in special)
    chunks = [each for chunk in stream(ai, **body) for each in chunk.choices if each.logprobs]
    assert [token for each in chunks for token in each.logprobs.tokens] == shown.tokens
    assert [offset for each in chunks for offset in each.logprobs.text_offset] == shown.text_offset


def test_zero_logprobs_is_the_chosen_token_only(ai: openai.OpenAI, server: SharedServer) -> None:
    """`logprobs: 0` reports the chosen token and nothing beside it."""
    choice = ai.completions.create(model=server.model, prompt="x = ", max_tokens=3, logprobs=0, **GREEDY).choices[0]
    assert choice.logprobs is not None and choice.logprobs.top_logprobs is not None
    assert [len(top) for top in choice.logprobs.top_logprobs] == [1, 1, 1]


def test_echo_puts_the_prompt_before_the_text(ai: openai.OpenAI, server: SharedServer) -> None:
    """`echo` repeats the prompt, streamed or not, from text or from token ids."""
    prompt = words("echo", 3)
    body: dict[str, Any] = dict(model=server.model, max_tokens=4, **GREEDY)
    plain = ai.completions.create(prompt=prompt, **body).choices[0].text
    assert ai.completions.create(prompt=prompt, echo=True, **body).choices[0].text == prompt + plain
    assert joined(stream(ai, prompt=prompt, echo=True, **body), 0) == prompt + plain
    ids = server.engine.tokenizer.encode(prompt)
    assert ai.completions.create(prompt=ids, echo=True, **body).choices[0].text.endswith(prompt + plain)


def test_echo_with_logprobs_scores_the_prompt(ai: openai.OpenAI, server: SharedServer) -> None:
    """Entries of the prompt precede those of the text with `echo` and `logprobs`, also where nothing is generated and where the
    prompt is cached; a stream has the same."""
    prompt = words("score", 12)
    body: dict[str, Any] = dict(model=server.model, prompt=prompt, echo=True, logprobs=2, **GREEDY)
    ids = server.engine.tokenizer.encode(prompt)
    ai.completions.create(model=server.model, prompt=prompt, max_tokens=1)
    scored = ai.completions.create(max_tokens=0, **body).choices[0].logprobs
    assert scored is not None and scored.tokens and scored.token_logprobs and scored.top_logprobs and scored.text_offset
    assert len(scored.tokens) == len(scored.token_logprobs) == len(ids)
    assert scored.token_logprobs[0] is None and scored.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scored.token_logprobs[1:])
    assert "".join(token for token in scored.tokens if not token.startswith("<|")) == prompt
    answered = ai.completions.create(max_tokens=3, **body).choices[0]
    assert answered.logprobs is not None and answered.logprobs.tokens and answered.logprobs.text_offset
    assert answered.logprobs.tokens[: len(ids)] == scored.tokens
    assert len(answered.logprobs.tokens) == len(ids) + 3
    assert answered.logprobs.text_offset[len(ids)] == len(prompt)
    chunks = [each for chunk in stream(ai, max_tokens=3, **body) for each in chunk.choices if each.logprobs]
    assert [token for each in chunks for token in each.logprobs.tokens] == answered.logprobs.tokens


def test_prompt_logprobs(client: httpx.Client, server: SharedServer) -> None:
    """vLLM's `prompt_logprobs`: by token id, None for the first token; each choice of several prompts has its own."""
    prompts = [words("first", 4), words("second", 7)]
    body = {"model": server.model, "prompt": prompts, "max_tokens": 1, "prompt_logprobs": 1, "n": 2}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert len(choices) == 4
    for number, choice in enumerate(choices):
        ids = server.engine.tokenizer.encode(prompts[number // 2])
        first, *rest = choice["prompt_logprobs"]
        assert first is None and len(rest) == len(ids) - 1
        assert all(str(token) in entry for token, entry in zip(ids[1:], rest, strict=True))


def test_max_tokens_zero_computes_the_prompt_only(ai: openai.OpenAI, server: SharedServer) -> None:
    """`max_tokens: 0` returns no text and warms the cache for later requests."""
    prompt = words("warm", 60)
    body: dict[str, Any] = dict(model=server.model, prompt=prompt, **GREEDY)
    warm = ai.completions.create(max_tokens=0, **body)
    assert warm.choices[0].text == "" and warm.usage is not None and warm.usage.completion_tokens == 0
    usage = ai.completions.create(max_tokens=1, **body).usage
    assert usage is not None and usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) > 0
    assert joined(stream(ai, prompt=prompt, model=server.model, max_tokens=0), 0) == ""


def test_stop_string_is_cut_and_named(ai: openai.OpenAI, server: SharedServer) -> None:
    """A stop string ends the text, is not part of it unless asked for, and is named in `stop_reason`."""
    body: dict[str, Any] = {"model": server.model, "prompt": words("halt", 4), "max_tokens": 24, "temperature": 0}
    text = ai.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[5:8]
    choice = ai.completions.create(**body, stop=[stop], extra_body={"ignore_eos": True}).choices[0]
    assert choice.finish_reason == "stop" and choice.text == text[: text.index(stop)]
    assert choice.stop_reason == stop
    kept = {"ignore_eos": True, "include_stop_str_in_output": True}
    assert ai.completions.create(**body, stop=stop, extra_body=kept).choices[0].text.endswith(stop)
    chunks = list(ai.completions.create(**body, stop=stop, stream=True, extra_body={"ignore_eos": True}))
    assert joined(chunks, 0) == choice.text


def test_cache_report(client: httpx.Client) -> None:
    """`cache_report` explains where the prompt's KV came from: in the answer, and in a stream's last chunks."""
    body = {"prompt": words("report", 60), "max_tokens": 2, "cache_report": True, "ignore_eos": True}
    first = client.post("/v1/completions", json=body).json()["cache_report"]
    second = client.post("/v1/completions", json=body).json()["cache_report"]
    assert first["cached_tokens"] < 16 < second["cached_tokens"] and first["detail"] and second["detail"]
    for report in (first, second):
        assert report["cached_tokens"] + report["computed_tokens"] == report["prompt_tokens"]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = client.post("/v1/completions", json={**body, **options}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert "cache_report" not in chunks[0]
    finished = next(chunk for chunk in chunks if chunk["choices"] and chunk["choices"][0]["finish_reason"])
    assert finished["cache_report"]["cached_tokens"] > 0
    assert chunks[-1]["usage"] and chunks[-1]["cache_report"] == finished["cache_report"]
    both = {**body, "prompt": [words("report", 60), words("report", 61)]}
    assert len(client.post("/v1/completions", json=both).json()["cache_report"]) == 2


def test_stream_is_server_sent_events(client: httpx.Client) -> None:
    """A stream has the media type of server-sent events, one JSON object per event, and ends with [DONE]."""
    answer = client.post("/v1/completions", json={"prompt": "x", "stream": True, "max_tokens": 3})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert json.loads(event.removeprefix("data: "))["object"] == "text_completion"


def test_fields_without_effect_are_tolerated(client: httpx.Client) -> None:
    """Fields that this server does not know, or that ask for what it does anyway, do no harm."""
    extra = {
        "user": "u",
        "prompt_cache_key": "k",
        "metadata": {},
        "tools": [],
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": None,
        "cache_salt": "mine",
        "x": 1,
    }
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **extra}).status_code == 200


def test_hopelessly_long_prompts_are_refused_early(client: httpx.Client, server: SharedServer) -> None:
    """A prompt with many more characters than fit is refused after its beginning; one of long words still fits."""
    longest = server.engine.info.max_model_len
    text = "ab cd " * (longest * 10)
    for path, body in (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        error = client.post(path, json={**body, "max_tokens": 1}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "has more than" in error["message"]
    spaces = {"prompt": " " * (longest * 9), "max_tokens": 1}
    assert client.post("/v1/completions", json=spaces).status_code == 200
