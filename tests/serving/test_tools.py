"""Tools and schemas, as OpenAI's client, LangChain and the Agents SDK use them. Calls are forced: the model is too small to
choose them."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pydantic
import pytest
from example_counts import represented
from shared_server import SharedServer

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "days": {"enum": [1, 3, 7]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
CLOCK: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
ASK: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    kind: str = pydantic.Field(pattern="^(cat|dog)$")


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"city", "days"} and found["days"] in (1, 3, 7) and len(found["city"]) <= 10


@pytest.mark.parametrize(
    "choice", represented(["required", {"type": "function", "function": {"name": "get_weather"}}], "required")
)
def test_forced_call_and_its_result(ai: openai.OpenAI, server: SharedServer, choice: Any) -> None:
    """A forced call has a known name and valid arguments. With the tool's result the conversation continues."""
    asked: Any = {"model": server.model, "tools": [WEATHER], "max_tokens": 80}
    first = ai.chat.completions.create(messages=ASK, tool_choice=choice, parallel_tool_calls=False, **asked).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.content is None
    assert first.message.tool_calls is not None
    [call] = first.message.tool_calls
    assert call.type == "function" and call.function.name == "get_weather"
    check(call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    messages = [*ASK, first.message.model_dump(exclude_none=True), result]
    second = ai.chat.completions.create(messages=messages, tool_choice="none", **asked).choices[0]
    assert second.message.tool_calls is None and second.finish_reason in ("stop", "length")


def test_streamed_call_is_the_same(ai: openai.OpenAI, server: SharedServer) -> None:
    """The client's accumulation of a streamed call gives the call that is not streamed."""
    asked: Any = {
        "model": server.model,
        "messages": ASK,
        "tools": [WEATHER, CLOCK],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 80,
    }
    whole = ai.chat.completions.create(**asked).choices[0]
    with ai.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert whole.message.tool_calls and streamed.message.tool_calls
    assert streamed.finish_reason == whole.finish_reason == "tool_calls"
    assert [one.function.arguments for one in streamed.message.tool_calls] == [
        one.function.arguments
        for one in whole.message.tool_calls  # type: ignore[union-attr]
    ]


def test_tools_are_in_the_prompt(ai: openai.OpenAI, server: SharedServer) -> None:
    """The chat template shows the tools, and the second request finds them cached."""
    asked: Any = {"model": server.model, "messages": ASK, "max_tokens": 1}
    without = ai.chat.completions.create(**asked).usage
    first, second = (ai.chat.completions.create(**asked, tools=[WEATHER, CLOCK]).usage for _ in range(2))
    assert first is not None and without is not None and first.prompt_tokens > without.prompt_tokens + 50
    assert second is not None and second.prompt_tokens_details is not None
    assert (second.prompt_tokens_details.cached_tokens or 0) > without.prompt_tokens


def test_parsed_schema(ai: openai.OpenAI, server: SharedServer) -> None:
    """`.parse()` returns an object of the client's own type."""
    found = ai.chat.completions.parse(model=server.model, messages=ASK, response_format=Person, max_tokens=80).choices[
        0
    ]
    assert found.message.parsed is not None and found.message.parsed.kind in ("cat", "dog")
    answer = ai.responses.parse(model=server.model, input="Who?", text_format=Person, max_output_tokens=80)
    assert answer.output_parsed is not None and answer.output_parsed.kind in ("cat", "dog")


@pytest.mark.parametrize(
    ("field", "fits"),
    [
        ({"structured_outputs": {"regex": "[ab]{3,5}"}}, lambda text: 3 <= len(text) <= 5 and set(text) <= set("ab")),
        ({"structured_outputs": {"choice": ["red", "green"]}}, lambda text: text in ("red", "green")),
        ({"guided_grammar": 'start: "x" "y"'}, lambda text: text == "xy"),
        ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ],
)
def test_structured_outputs(ai: openai.OpenAI, server: SharedServer, field: Any, fits: Any) -> None:
    """Regular expressions, choices, grammars and JSON objects hold at temperature 1."""
    found = ai.chat.completions.create(model=server.model, messages=ASK, max_tokens=60, temperature=1, extra_body=field)
    text = found.choices[0].message.content
    assert text is not None and fits(text), text


def test_bad_schema_is_a_400(ai: openai.OpenAI, server: SharedServer) -> None:
    """A schema that cannot be compiled is refused before a stream begins."""
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            ai.chat.completions.create(model=server.model, messages=ASK, response_format=schema, stream=stream)


def langchain(server: SharedServer) -> ChatOpenAI:
    from langchain_openai import ChatOpenAI  # takes seconds

    return ChatOpenAI(base_url=f"{server.url}/v1", api_key="none", model=server.model, max_tokens=80)  # type: ignore


@pytest.mark.extended
def test_langchain(server: SharedServer) -> None:
    """`bind_tools` and `with_structured_output` work, whole and streamed."""
    bound = langchain(server).bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    [call] = bound.invoke("Weather in Rome?").tool_calls
    check(json.dumps(call["args"]))
    pieces = list(bound.stream("Weather in Rome?"))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    check(json.dumps(whole.tool_calls[0]["args"]))
    for method in ("json_schema", "function_calling"):
        found = langchain(server).with_structured_output(Person, method=method).invoke("Who?")
        assert isinstance(found, Person)


@pytest.mark.slow
@pytest.mark.parametrize("api", ["responses", "chat"])
def test_agents_sdk(server: SharedServer, api: str) -> None:
    """OpenAI's agent framework runs unchanged: it calls the tool and continues with the result, over several turns."""
    import agents  # takes seconds

    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather of a city."""
        called.append(city)
        return "sunny"

    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
    kind = agents.OpenAIResponsesModel if api == "responses" else agents.OpenAIChatCompletionsModel
    agent = agents.Agent(
        name="weather",
        instructions="Ask the tool.",
        tools=[get_weather],
        output_type=Person,
        model=kind(model=server.model, openai_client=client),
        # After a call the framework lets the model choose; the schema makes its answer end in time.
        model_settings=agents.ModelSettings(tool_choice="required", max_tokens=60, parallel_tool_calls=False),
    )

    async def run() -> None:
        said: Any = "What is the weather in Rome?"
        for turn in range(3):
            result = await agents.Runner.run(agent, said, max_turns=8)
            assert len(called) > turn and isinstance(result.final_output, Person)
            said = [*result.to_input_list(), {"role": "user", "content": "And now?"}]

    asyncio.run(run())


@pytest.mark.extended
def test_a_grammar_that_becomes_too_complex(ai: openai.OpenAI, server: SharedServer) -> None:
    """The client learns that its grammar is the reason, by status 400, or with an event in a stream."""
    fields: Any = {"prompt": "x", "model": server.model, "max_tokens": 300, "seed": 1}
    fields["extra_body"] = {"structured_outputs": {"grammar": "start: e\ne: e e | /[a-z ]/"}}
    with pytest.raises(openai.BadRequestError) as whole:
        ai.completions.create(**fields)
    assert whole.value.code == "grammar_too_complex" and "cannot be followed" in whole.value.message
    with pytest.raises(openai.APIError) as streamed:
        for _ in ai.completions.create(stream=True, **fields):
            pass
    assert (streamed.value.code, streamed.value.type) == ("grammar_too_complex", "invalid_request_error")
