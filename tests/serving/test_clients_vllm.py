"""The official clients with a real vLLM behind the router: every dialect is served over its chat completions. Needs
FOREWORD_VLLM_PYTHON, an interpreter with vLLM; skipped without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from router_parts import RouterProcess
from shared_server import until
from test_tools import ASK, WEATHER, Person, check
from tokenizers import Tokenizer
from vllm_behind_router import vllm_behind_router
from vllm_process import needs_vllm
from vllm_waits import WITHIN

import foreword

pytestmark = needs_vllm
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
MODEL = Path(foreword.__file__).parent / "models" / "stdlib-nano"


def _whitespace() -> dict[str, int]:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    blank = [token for token in range(tokenizer.get_vocab_size()) if tokenizer.decode([token]).isspace()]
    return dict.fromkeys(map(str, blank), -100)


# vLLM's grammars for calls allow white space everywhere, and the tiny model would write nothing else. Chats only have this
# field, so calls are tested with them; the router sends the other dialects to vLLM as chats.
DENSE: Any = {"logit_bias": _whitespace()}


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with vllm_behind_router(MODEL, log, *TOOLS, route=("--audit-every", "1", "router.audit_budget=1")) as started:
        yield started


@pytest.fixture
def ai(router: RouterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0, timeout=WITHIN) as made:
        yield made


@pytest.fixture
def claude(router: RouterProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=router.url, api_key="none", max_retries=0, timeout=WITHIN) as made:
        yield made


def test_chats_with_tools(ai: openai.OpenAI) -> None:
    """A forced call is valid, whole and streamed, and the conversation continues with its result."""
    asked: Any = {"model": "tiny", "tools": [WEATHER], "max_tokens": 120, "temperature": 0, "extra_body": DENSE}
    first = ai.chat.completions.create(messages=ASK, tool_choice="required", **asked).choices[0].message
    assert first.tool_calls
    check(first.tool_calls[0].function.arguments)  # type: ignore[union-attr]
    with ai.chat.completions.stream(messages=ASK, tool_choice="required", **asked) as stream:
        streamed = stream.get_final_completion().choices[0].message
    assert streamed.tool_calls
    check(streamed.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    messages: Any = [*ASK, first.model_dump(exclude_none=True), result]
    second = ai.chat.completions.create(messages=messages, tool_choice="none", **asked)
    assert second.choices[0].message.tool_calls in (None, [])


def test_schemas(ai: openai.OpenAI) -> None:
    """`.parse()` gives an object of the client's own type."""
    found = ai.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Person, max_tokens=120, extra_body=DENSE
    )
    assert found.choices[0].message.parsed is not None


def test_responses(ai: openai.OpenAI) -> None:
    """Responses are stored by the router and continued; a streamed one says what the whole one does."""
    asked: Any = {"model": "tiny", "max_output_tokens": 16, "temperature": 0}
    first = ai.responses.create(input="def area(", **asked)
    with ai.responses.stream(input="def area(", store=False, **asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == first.output_text
    second = ai.responses.create(input="And now?", previous_response_id=first.id, **asked)
    assert first.usage is not None and second.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens


def test_messages(claude: anthropic.Anthropic) -> None:
    """Messages, whole and streamed; the second time the prompt is read from vLLM's cache."""
    asked: Any = {"model": "tiny", "max_tokens": 16, "messages": ASK, "system": "Be brief. " * 40}
    first, second = (claude.messages.create(**asked, extra_body={"temperature": 0}) for _ in range(2))
    assert (second.usage.cache_read_input_tokens or 0) > 0
    with claude.messages.stream(**asked, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_text() == "".join(one.text for one in first.content if one.type == "text")


def test_langchain(router: RouterProcess) -> None:
    """`bind_tools` and `with_structured_output`."""
    from langchain_openai import ChatOpenAI  # takes seconds

    chat = ChatOpenAI(
        base_url=f"{router.url}/v1", api_key="none", model="tiny", max_tokens=120, temperature=0, extra_body=DENSE
    )  # type: ignore
    [call, *_] = chat.bind_tools([WEATHER], tool_choice="required").invoke("Weather in Rome?").tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(chat.with_structured_output(Person, method="json_schema").invoke("Who?"), Person)


def test_audit_of_hits(router: RouterProcess, ai: openai.OpenAI) -> None:
    """The router finds that vLLM answers from its cache as it does without."""
    code = "\n".join(f"def area_{number}(radius): return radius * {number}" for number in range(30))
    for _ in range(3):
        ai.completions.create(model="tiny", prompt=code, max_tokens=4)
    until(lambda: router.metric("foreword:router_audits_total", result="equal") >= 1)
    assert router.metric("foreword:router_audits_total", result="different") == 0
