"""`/v1/chat/completions` through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
from shared_server import SharedServer, words


def say(topic: str, count: int = 6) -> list[Any]:
    return [{"role": "system", "content": "You are brief."}, {"role": "user", "content": words(topic, count)}]


def joined(chunks: list[Any], index: int = 0) -> str:
    pieces = (choice.delta.content for chunk in chunks for choice in chunk.choices if choice.index == index)
    return "".join(piece or "" for piece in pieces)


def test_streaming_equals_not_streaming(ai: openai.OpenAI, server: SharedServer) -> None:
    """The deltas of a stream, put together, are the message that is given without streaming; usage included."""
    body: dict[str, Any] = {"model": server.model, "messages": say("talk"), "max_tokens": 20, "temperature": 0}
    whole = ai.chat.completions.create(**body)
    chunks = list(ai.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks) == whole.choices[0].message.content
    assert whole.choices[0].message.role == chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage is not None and chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_stream_without_usage_has_none(ai: openai.OpenAI, server: SharedServer) -> None:
    """A stream that did not ask for usage gets no usage and no chunk without a choice."""
    chunks = list(ai.chat.completions.create(model=server.model, messages=say("quiet"), max_tokens=3, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)


def test_n_answers(ai: openai.OpenAI, server: SharedServer) -> None:
    """n=3 gives three choices, each with its own role and finish reason in a stream."""
    body: dict[str, Any] = {"model": server.model, "messages": say("three"), "max_tokens": 5, "n": 3, "seed": 1}
    whole = ai.chat.completions.create(**body)
    chunks = list(ai.chat.completions.create(**body, stream=True))
    for index in range(3):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason
        assert joined(chunks, index) == whole.choices[index].message.content


def test_prompt_is_the_rendered_template(ai: openai.OpenAI, server: SharedServer) -> None:
    """The prompt is what the model's chat template makes of the messages; text parts count as their text."""
    messages = say("render")
    tokens = server.engine.tokenizer.render_chat(messages, add_generation_prompt=True)
    parts = [{"role": item["role"], "content": [{"type": "text", "text": item["content"]}]} for item in messages]
    for given in (messages, parts):
        usage = ai.chat.completions.create(model=server.model, messages=given, max_tokens=1).usage  # type: ignore[arg-type]
        assert usage is not None and usage.prompt_tokens == len(tokens)


def test_without_a_limit_it_ends(ai: openai.OpenAI, server: SharedServer) -> None:
    """Without `max_tokens` an answer ends by itself or at the model's maximum length."""
    longest, count = server.engine.info.max_model_len, 10
    while len(server.engine.tokenizer.render_chat(say("endless", count), add_generation_prompt=True)) < longest - 60:
        count += 10
    body: dict[str, Any] = {"model": server.model, "messages": say("endless", count), "temperature": 0}
    whole = ai.chat.completions.create(**body, extra_body={"ignore_eos": True})
    assert whole.usage is not None and whole.usage.total_tokens == longest
    assert whole.choices[0].finish_reason == "length"


def test_logprobs_have_openais_shape(ai: openai.OpenAI, server: SharedServer) -> None:
    """Each token comes with its log-probability, its bytes and the likeliest alternatives, streamed or not."""
    body: dict[str, Any] = {"model": server.model, "messages": say("odds"), "max_tokens": 6, "temperature": 0}
    body |= {"logprobs": True, "top_logprobs": 4, "extra_body": {"ignore_eos": True}}
    choice = ai.chat.completions.create(**body).choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert len(content) == 6 and all(len(entry.top_logprobs) == 4 for entry in content)
    for entry in content:
        assert entry.top_logprobs[0].logprob == entry.logprob <= 0
        assert entry.token.startswith("bytes:") or bytes(entry.bytes or ()).decode() == entry.token
    spoken = b"".join(bytes(entry.bytes or ()) for entry in content if not entry.token.startswith("<|"))
    assert spoken.decode(errors="replace").startswith((choice.message.content or "").rstrip("\ufffd"))
    chunks = list(ai.chat.completions.create(**body, stream=True))
    shown = [c.logprobs.content for chunk in chunks for c in chunk.choices if c.logprobs and c.logprobs.content]
    assert [entry.token for entries in shown for entry in entries] == [entry.token for entry in content]


def test_logprobs_without_alternatives(ai: openai.OpenAI, server: SharedServer) -> None:
    """`logprobs` alone reports the chosen tokens; without it nothing is reported."""
    body: dict[str, Any] = {"model": server.model, "messages": say("alone"), "max_tokens": 2}
    shown = ai.chat.completions.create(**body, logprobs=True, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert shown is not None and shown.content is not None and len(shown.content) == 2
    assert all(entry.top_logprobs == [] for entry in shown.content)
    assert ai.chat.completions.create(**body).choices[0].logprobs is None


def test_multi_turn_reuses_the_answer(ai: openai.OpenAI, server: SharedServer) -> None:
    """The second turn of a conversation hits the first turn's prompt and answer in the cache."""
    messages = say("turns", 60)
    first = ai.chat.completions.create(model=server.model, messages=messages, max_tokens=20, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = ai.chat.completions.create(model=server.model, messages=messages, max_tokens=2, temperature=0)
    assert first.usage is not None and second.usage is not None and second.usage.prompt_tokens_details is not None
    block = server.engine.info.block_size
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens // block * block - block
