"""Rendering of conversations: tools, calls, unfinished messages, variables of the client; what a template rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import foreword
from foreword.api.request import Message, Tool, ToolCall, template_messages, template_tools
from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest
from foreword.tokens.tokenizer import Tokenizer

MODEL = str(Path(foreword.__file__).parent / "models" / "stdlib-nano")
TOOLS = (
    Tool("weather", "Weather of a city", {"type": "object", "properties": {"city": {"type": "string"}}}),
    Tool("time"),
)
CONVERSATION = (
    Message("system", "Be kind."),
    Message("user", "Is it cold in Øslo?"),
    Message("assistant", "", tool_calls=(ToolCall("1", "weather", '{"city":"Øslo"}'), ToolCall("2", "time", ""))),
    Message("tool", "4 degrees", tool_call_id="1"),
    Message("tool", "12:30", tool_call_id="2"),
    Message("assistant", "Yes.", reasoning="4 is cold"),
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def render(tokenizer: Tokenizer, messages: tuple[Message, ...], **options: Any) -> str:
    return tokenizer.chat_text(template_messages(messages), tools=template_tools(TOOLS), **options)


def test_tools_and_calls_are_part_of_the_prompt(tokenizer: Tokenizer) -> None:
    """The embedded model's template shows the tools, the calls with their arguments as objects, and their results."""
    text = render(tokenizer, CONVERSATION)
    assert '"name": "weather"' in text.partition("</tools>")[0]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Øslo"}}\n</tool_call>' in text
    assert '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>' in text
    assert text.count("<tool_response>") == 2
    assert text.index("Be kind.") < text.index("<tools>") < text.index("Øslo") < text.index("4 degrees")
    assert text.count("Be kind.") == 1


def test_the_first_messages_are_a_prefix(tokenizer: Tokenizer) -> None:
    """A conversation with tools renders to a continuation of its first messages, so that their KV is found again."""
    whole = tokenizer.render_chat(
        template_messages(CONVERSATION), tools=template_tools(TOOLS), add_generation_prompt=False
    )
    for length in range(1, len(CONVERSATION)):
        part = tokenizer.render_chat(
            template_messages(CONVERSATION[:length]), tools=template_tools(TOOLS), add_generation_prompt=False
        )
        assert whole[: len(part)] == part


def test_an_unfinished_message_stays_open(tokenizer: Tokenizer) -> None:
    """`continue_final_message` ends the prompt with the assistant's text; there must be such a message."""
    text = render(tokenizer, (Message("user", "Hello"), Message("assistant", "Good mor")), continue_final_message=True)
    assert text.endswith("Good mor")
    with pytest.raises(BadRequest) as caught:
        render(tokenizer, (Message("user", "Hello"),), continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    "options",
    [{"messages": []}, {"tools": []}, {"eos_token": "x"}, {f"v{i}": i for i in range(100)}, {"text": "x" * 100_000}],
    ids=["messages", "tools", "eos_token", "many", "large"],
)
def test_variables_of_a_client_are_limited(options: dict[str, Any], tokenizer: Tokenizer) -> None:
    """A client cannot replace what the engine sets, nor send a large number of variables."""
    with pytest.raises(BadRequest) as caught:
        render(tokenizer, CONVERSATION, options=options)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages | map('nothing') | list }}",
        "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
        "{{ ''.__class__.__mro__ }}{% for x in range(10000000) %}{% endfor %}",
        "{% if %}",
    ],
)
def test_a_template_that_fails_is_a_bad_request(template: str) -> None:
    """Whatever goes wrong while a template renders is the request's error, not the server's."""
    made = Tokenizer.load(MODEL)
    made._inner.chat_template = template
    with pytest.raises(BadRequest) as caught:
        made.chat_text([{"role": "user", "content": "a"}])
    assert caught.value.param == "messages"


def test_variables_reach_the_template() -> None:
    """`chat_template_kwargs` are variables of the template."""
    made = Tokenizer.load(MODEL)
    made._inner.chat_template = "{% if enable_thinking %}<think>{% endif %}{{ messages[0].content }}"
    texts = [
        made.chat_text([{"role": "user", "content": "a"}], options={"enable_thinking": on}) for on in (True, False)
    ]
    assert texts == ["<think>a", "a"]


def test_chat_with_tools_and_a_named_prefix() -> None:
    """`LLM.chat` takes tools, also behind a named prefix of messages, whose first message is then followed by the tools."""
    with LLM(kv_memory="2048 tokens", threads=1) as llm:
        llm.add_prefix("kind", messages=[{"role": "system", "content": "Be kind. " * 30}])
        params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        [output] = llm.chat([{"role": "user", "content": "Hi"}], params, tools=template_tools(TOOLS), prefix="kind")
        rest = [{"role": "system", "content": "Be kind. " * 30}, {"role": "user", "content": "Hi"}]
        assert list(output.prompt_tokens) == llm.tokenizer.render_chat(rest, tools=template_tools(TOOLS))
        assert output.cached_tokens > 30
