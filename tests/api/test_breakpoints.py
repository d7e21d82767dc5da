"""Cache control of requests: positions of breakpoints, and what counts as written."""

from __future__ import annotations

import pytest
from jinja2 import Template

from foreword.api.breakpoints import retentions, written_tokens
from foreword.api.dialects.conversation_body import MOST_BREAKPOINTS
from foreword.api.request import CacheBreakpoint, CacheControl, GenerateRequest, Message, Tool, template_tools
from foreword.blocks.retention import Retention, RetentionAnswer
from foreword.entrypoints.llm import LLM
from foreword.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The tokenizer of the model that ships with Foreword, with a chat template that shows reasoning of the last turn only."""
    made = LLM(kv_memory="64 tokens", block_size=4, threads=1, self_check=False).tokenizer
    made._inner.chat_template = (
        "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]\n{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>\n"
        "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}</end>\n"
        "{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
    )
    assert Template(made._inner.chat_template)
    return made


def positions(tokenizer: Tokenizer, *messages: Message, **options: object) -> tuple[tuple[Retention, ...], list[int]]:
    request = GenerateRequest("messages", messages=messages, **options)  # type: ignore[arg-type]
    text = tokenizer.chat_text(
        [{"role": m.role, "content": m.content} for m in messages], tools=template_tools(request.tools)
    )
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return retentions(tokenizer, request, len(tokens), text), tokens


def kept(role: str, content: str, ttl: float | None = None, **options: object) -> Message:
    point = None if ttl is None else CacheBreakpoint(ttl)
    return Message(role, content, breakpoint=point, **options)  # type: ignore[arg-type]


def test_a_breakpoint_is_the_end_of_its_message(tokenizer: Tokenizer) -> None:
    """The tokens before a position are the conversation up to the message, also with letters of several bytes."""
    texts = ["You are a helpful assistant. ünïcödé 🙂 " * 5, "Read def f(x): return x", "Well."]
    found, tokens = positions(
        tokenizer, kept("system", texts[0], 3600.0), kept("user", texts[1], 300.0), kept("assistant", texts[2])
    )
    assert [one.ttl for one in found] == [3600.0, 300.0]
    assert tokenizer.decode(tokens[: found[0].end]) == f"<system>\n{texts[0]}</end>\n"
    assert tokenizer.decode(tokens[: found[1].end]).endswith(f"{texts[1]}</end>\n")


def test_a_message_that_is_rendered_otherwise_later(tokenizer: Tokenizer) -> None:
    """A position never lies behind what the whole conversation has in common with its part."""
    found, tokens = positions(
        tokenizer,
        kept("user", "one two three"),
        kept("assistant", "four five", 300.0, reasoning="I think of numbers"),
        kept("user", "six"),
    )
    assert tokenizer.decode(tokens[: found[0].end]).rstrip() in "<user>\none two three</end>\n<assistant>\n"
    assert found[0].end > 5


def test_tools(tokenizer: Tokenizer) -> None:
    """A breakpoint at a tool is the end of that tool; at the last one, all of them are before it."""
    tools = (Tool("add", "adds", breakpoint=CacheBreakpoint(300.0)), Tool("sub", "subtracts a number"))
    found, tokens = positions(tokenizer, kept("user", "one and two"), tools=tools)
    assert tokenizer.decode(tokens[: found[0].end]).startswith("[add: adds]")
    assert "subtr" not in tokenizer.decode(tokens[: found[0].end])
    last = (Tool("add", "adds"), Tool("sub", "subtracts a number", breakpoint=CacheBreakpoint(300.0)))
    found, tokens = positions(tokenizer, kept("user", "one and two"), tools=last)
    assert "subtracts a number]" in tokenizer.decode(tokens[: found[0].end])
    assert "one" not in tokenizer.decode(tokens[: found[0].end])


def test_limits_and_the_whole_prompt(tokenizer: Tokenizer) -> None:
    """The last ones of many breakpoints count; a retention of the whole prompt ends at its last token."""
    many = [kept("user" if i % 2 == 0 else "assistant", f"message {i}", 300.0) for i in range(9)]
    found, tokens = positions(tokenizer, *many, cache=CacheControl(retention=86_400.0), tools=(Tool("f"),))
    assert len(found) == MOST_BREAKPOINTS + 1
    assert (found[-1].end, found[-1].ttl) == (len(tokens), 86_400.0)
    assert positions(tokenizer, kept("user", "plain"))[0] == ()


def test_written_tokens() -> None:
    """Tokens that were cached are not counted as written; nor are those that were clipped or refused."""
    wishes = [Retention(100, 3600.0), Retention(200, 300.0), Retention(300, 300.0)]

    def answers(*tokens: int) -> list[RetentionAnswer]:
        return [RetentionAnswer("accepted" if one else "refused", one) for one in tokens]

    assert written_tokens(wishes, answers(96, 192, 288), 0) == {3600.0: 96, 300.0: 192}
    assert written_tokens(wishes, answers(96, 192, 288), 150) == {300.0: 138}
    assert written_tokens(wishes, answers(96, 0, 224), 96) == {300.0: 128}
    assert written_tokens(wishes, answers(96, 192, 288), 300) == {}
