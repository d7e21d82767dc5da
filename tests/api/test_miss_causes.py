"""The cause of a cache miss, from requests alone: what changed, where, and how many tokens it cost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from foreword.api.dialects.decode import Limits
from foreword.api.dialects.registry import DIALECTS
from foreword.api.misses.causes import Change, Miss, MissFinder, Outside
from foreword.api.output import CallArguments, CallStart, Reasoning, Text
from foreword.api.request import CacheControl, DialectName, GenerateRequest, Message, Tool, ToolCall
from foreword.errors import BadRequest

CAUSES = (*get_args(Change), *get_args(Outside))

RULES = "\n".join(f"Rule {chr(97 + i)}: be precise, cite what you read and never guess." for i in range(20))
SYSTEM = f"You are a careful agent.\nToday is 2026-03-01.\n{RULES}"
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}}
TOOLS = (
    Tool("read", "Reads a file and gives its text, with line numbers.", SCHEMA),
    Tool("list", "Lists the files of a folder, and of the folders in it.", SCHEMA),
)
LONG = "The file has many lines of text that the agent reads before it answers. " * 12


def read(dialect: DialectName, body: dict[str, Any]) -> GenerateRequest:
    """A body as a router reads it."""
    return DIALECTS[dialect].read(json.dumps(body).encode(), Limits())


def turn(*messages: Message, system: str = SYSTEM, **fields: Any) -> GenerateRequest:
    fields = {"tools": TOOLS, "cache": CacheControl(key="session"), **fields}
    return GenerateRequest("chat", messages=(Message("system", system), *messages), **fields)


def call(arguments: str) -> Message:
    return Message(
        "assistant", "I look.", tool_calls=(ToolCall("1", "read", arguments),), reasoning="Where is it? " * 20
    )


HISTORY = (
    Message("user", f"Please find the bug. {LONG}"),
    call('{"path": "a.py", "depth": 1}'),
    Message("tool", LONG, tool_call_id="1"),
    Message("assistant", f"It is in line seven. {LONG}"),
)
BEFORE = turn(*HISTORY)
NEXT = (*HISTORY, Message("user", "Thanks. And now?"))
TOKENS = 1000

CASES: dict[str, tuple[GenerateRequest, dict[str, Any], str, str]] = {
    "date": (turn(*NEXT, system=SYSTEM.replace("03-01", "03-02")), {}, "volatile_line", "messages[0].content line 2"),
    "nonce": (
        turn(*NEXT, system=SYSTEM + "\nrequest-id: 7f3a-99"),
        {"before": turn(*HISTORY, system=SYSTEM + "\nrequest-id: 81bc-02")},
        "volatile_line",
        "messages[0].content line 23",
    ),
    "order of tools": (turn(*NEXT, tools=TOOLS[::-1]), {}, "tools_reordered", "tools[0]"),
    "keys of a schema": (
        turn(*NEXT, tools=(replace(TOOLS[0], parameters=dict(reversed(SCHEMA.items()))), TOOLS[1])),
        {},
        "json_reordered",
        "tools[0]",
    ),
    "keys of arguments": (
        turn(NEXT[0], call('{"depth":1,"path":"a.py"}'), *NEXT[2:]),
        {},
        "json_reordered",
        "messages[2].tool_calls[0].arguments",
    ),
    "another tool": (turn(*NEXT, tools=(*TOOLS, Tool("write"))), {}, "tools_changed", "tools[2]"),
    "dropped reasoning": (
        turn(NEXT[0], replace(NEXT[1], reasoning=""), *NEXT[2:]),
        {},
        "reasoning_changed",
        "messages[2].reasoning",
    ),
    "summary": (
        turn(Message("user", "Summary of what happened: a bug was found."), NEXT[3], NEXT[4]),
        {},
        "compacted",
        "messages[1]",
    ),
    "cleared tool result": (
        turn(NEXT[0], NEXT[1], replace(NEXT[2], content="[cleared]"), *NEXT[3:]),
        {},
        "compacted",
        "messages[3]",
    ),
    "template option": (
        turn(*NEXT, template_options={"enable_thinking": False}),
        {},
        "template_changed",
        "chat_template_kwargs.enable_thinking",
    ),
    "chat template": (turn(*NEXT), {"template": "other"}, "template_changed", "chat_template"),
    "salt": (turn(*NEXT), {"salt": "mine"}, "salt_changed", "cache_salt"),
    "adapter": (turn(*NEXT), {"model": "adapter"}, "model_changed", "model"),
    "named prefix": (turn(*NEXT, prefix="manual"), {}, "prefix_changed", "prefix"),
    "system prompt": (
        turn(*NEXT, system=SYSTEM.replace("careful", "fast and careless")),
        {},
        "system_prompt_changed",
        "messages[0].content line 1",
    ),
    "edited message": (
        turn(replace(NEXT[0], content=f"Please find the mistake. {LONG}"), *NEXT[1:]),
        {},
        "message_edited",
        "messages[1].content line 1",
    ),
    "nothing": (turn(*NEXT), {}, "new_text", ""),
    "evicted": (turn(*NEXT), {"cached": 64}, "evicted", ""),
    "another replica": (turn(*NEXT), {"replica": "b", "cached": 0}, "other_replica", ""),
    "all": (turn(*NEXT), {"cached": -1}, "all_cached", ""),
    "another conversation": (
        GenerateRequest("chat", messages=(Message("user", "Write a poem about the sea, and let it rhyme."),)),
        {},
        "new_conversation",
        "",
    ),
    "engine: checkpoint": (turn(*NEXT), {"reason": "checkpoint_missing", "cached": 0}, "checkpoint_missing", ""),
    "engine: template": (
        turn(*NEXT),
        {"reason": "diverged", "cached": 300},
        "reasoning_changed",
        "messages[2].reasoning",
    ),
}


def rendered(request: GenerateRequest) -> str:
    """The prompt as the chat templates of Qwen write it, roughly."""
    first, *rest = request.messages
    tools = [f"{tool.name} {tool.description} {json.dumps(tool.parameters)}" for tool in request.tools]
    turns = [f"{one.role} {one.reasoning} {one.content} {[c.arguments for c in one.tool_calls]}" for one in rest]
    return "\n".join([first.content, *tools, *turns])


def tokens(text: str) -> int:
    return len(text) // 4


def find(now: GenerateRequest, options: dict[str, Any]) -> Miss:
    """Send a conversation and then the next one, to an engine that keeps everything; or as `options` say."""
    finder, before = MissFinder(), options.get("before", BEFORE)
    where = {key: value for key, value in options.items() if key in ("salt", "model", "template")}
    finder.explain(finder.begin(before, "tenant"), tokens(rendered(before)), 0, replica="a")
    pairs = zip(rendered(before), rendered(now), strict=False)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) // 64 * 16
    cached = 0 if where or now.template_options or now.prefix else options.get("cached", same)
    second = finder.begin(now, "tenant", **where)
    length = tokens(rendered(now))
    cached = length + cached if cached < 0 else cached
    return finder.explain(second, length, cached, reason=options.get("reason", ""), replica=options.get("replica", "a"))


@pytest.mark.parametrize("name", CASES)
def test_planted_causes(name: str) -> None:
    """Each change of a conversation is named, with the place where it is in the client's body."""
    now, options, cause, where = CASES[name]
    miss = find(now, options)
    assert (miss.cause, miss.where) == (cause, where)
    assert miss.cause in CAUSES and miss.advice
    if cause in ("new_text", "all_cached", "new_conversation"):
        assert miss.tokens_lost == 0
    else:
        assert miss.tokens_lost >= 100, "much of the text was computed before"


def test_a_request_that_is_still_computed() -> None:
    """Text that another request is computing at this moment is not called evicted."""
    finder = MissFinder()
    finder.begin(BEFORE)
    assert finder.explain(finder.begin(BEFORE), 900, 0).cause == "not_computed_yet"


def test_the_answer_is_part_of_the_next_prompt() -> None:
    """An answer whose arguments come back rewritten is found, although no request contained it before."""
    finder = MissFinder()
    first = finder.begin(turn(HISTORY[0]))
    finder.explain(first, 500, 0)
    arguments = f'{{"path": "a.py", "text": "{LONG}"}}'
    pieces = [Reasoning("so"), Text("I look."), CallStart(0, "x", "read"), CallArguments(0, arguments)]
    finder.answered(first, pieces)
    sent = Message(
        "assistant", "I look.", tool_calls=(ToolCall("x", "read", arguments.replace(": ", ":")),), reasoning="so"
    )
    second = finder.begin(turn(HISTORY[0], sent, Message("tool", "ok")))
    miss = finder.explain(second, 900, 500)
    assert (miss.cause, miss.where) == ("json_reordered", "messages[2].tool_calls[0].arguments")


def test_places_in_other_dialects() -> None:
    """The place is named as the client's own dialect does."""
    for dialect, where in (("messages", "system line 2"), ("responses", "instructions line 2")):
        finder = MissFinder()
        now = replace(turn(*NEXT, system=SYSTEM.replace("03-01", "03-02")), dialect=dialect)
        finder.explain(finder.begin(replace(BEFORE, dialect=dialect)), 900, 0)
        assert finder.explain(finder.begin(now), TOKENS, 0).where.replace(".content", "") == where
    finder = MissFinder()
    texts = [GenerateRequest("completions", prompts=(f"It is {hour} o'clock.\n{RULES}",)) for hour in (10, 11)]
    finder.explain(finder.begin(texts[0]), 400, 0)
    miss = finder.explain(finder.begin(texts[1]), 400, 0)
    assert (miss.cause, miss.where) == ("volatile_line", "prompt line 1")
    ids = tuple(range(1000))
    finder.explain(finder.begin(GenerateRequest("completions", prompts=(ids,))), 1000, 0)
    changed = (*ids[:100], 5, *ids[101:])
    assert finder.explain(finder.begin(GenerateRequest("completions", prompts=(changed,))), 1000, 96).tokens_lost > 500


def test_a_difference_without_effect() -> None:
    """Arguments with other spaces are no cause where the template writes them anew: more was cached than what is ahead."""
    finder = MissFinder()
    finder.explain(finder.begin(BEFORE), 900, 0)
    now = turn(NEXT[0], call('{"path":"a.py","depth":1}'), *NEXT[2:], Message("user", LONG))
    assert finder.explain(finder.begin(now), 1100, 880).cause == "new_text"
    assert (
        finder.explain(finder.begin(turn(*NEXT, template_options={"enable_thinking": True})), 1000, 980).cause
        == "new_text"
    )


def test_tenants_are_not_compared() -> None:
    """Nothing about one tenant's conversation depends on another tenant's."""
    finder = MissFinder()
    finder.explain(finder.begin(BEFORE, "a"), 900, 0)
    assert finder.explain(finder.begin(turn(*NEXT), "b"), TOKENS, 0).cause == "new_conversation"


def test_two_salts_that_take_turns() -> None:
    """A conversation is compared with its own earlier turn, not with the newest one of another salt."""
    finder = MissFinder()
    for salt in ("a", "b"):
        finder.explain(finder.begin(BEFORE, salt=salt), 900, 0)
    assert finder.explain(finder.begin(turn(*NEXT), salt="a"), TOKENS, 890).cause == "new_text"


def test_memory_is_bounded() -> None:
    """Requests that never end and long answers are forgotten as well; the limit holds at each step."""
    finder = MissFinder(capacity=20_000)
    draw = random.Random(5)
    for number in range(600):
        text = "\n".join(str(draw.random()) for _ in range(draw.randrange(200)))
        one = finder.begin(GenerateRequest("chat", messages=(Message("user", f"{number % 7}"), Message("user", text))))
        if number % 3:
            finder.explain(one, 100, 0)
            finder.answered(one, [Text(text[::-1])])
        assert finder.size <= 20_000


json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3), lambda v: st.dictionaries(st.text(), v, max_size=2)
)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text(st.sampled_from("a1\n \ud800"), max_size=8),
    reasoning=st.sampled_from(["", "r"]),
    tool_calls=st.lists(
        st.builds(ToolCall, st.just("i"), st.just("f"), st.sampled_from(["{}", "{", "[1]"])), max_size=2
    ).map(tuple),
)
requests = st.builds(
    GenerateRequest,
    st.sampled_from(["chat", "messages", "responses"]),
    messages=st.lists(messages, max_size=5).map(tuple),
    tools=st.lists(
        st.builds(Tool, st.sampled_from("ab"), st.just(""), st.dictionaries(st.text(), json_values)), max_size=2
    ).map(tuple),
    session=st.sampled_from([None, "s"]),
)
choose: Callable[..., Any] = st.integers


@settings(max_examples=examples(75), deadline=None)
@given(
    st.lists(
        st.tuples(requests, choose(0, 50), st.booleans(), st.sampled_from(["", "diverged", "evicted"])), max_size=12
    )
)
def test_any_requests_have_a_cause(steps: list[tuple[GenerateRequest, int, bool, str]]) -> None:
    """Any sequence of requests has a known cause each, and loses no more tokens than were computed."""
    finder = MissFinder(capacity=3_000)
    for request, cached, ends, reason in steps:
        one = finder.begin(request)
        if ends:
            miss = finder.explain(one, 50, cached, reason=reason)
            assert miss.cause in CAUSES
            assert 0 <= miss.tokens_lost <= 50 - cached
            finder.answered(one, [Text("a1")])


def test_any_body_has_a_conversation() -> None:
    """A router compares the bodies of chats and completions that it has not validated."""
    finder = MissFinder()
    parts = [{"type": "text", "text": SYSTEM}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    call = {"id": "1", "function": {"name": "read", "arguments": '{"a": 1}'}}
    tool = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
    messages = [
        {"role": "developer", "content": parts},
        {"role": "user", "content": LONG},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
    ]
    body = {"model": "m", "messages": messages, "tools": [tool], "user": "me"}
    first = read("chat", body)
    assert first.session == "me" and first.messages[2].tool_calls[0].arguments == '{"a": 1}'
    finder.explain(finder.begin(first), 900, 0)
    other = [{"role": "developer", "content": [{"type": "text", "text": SYSTEM.replace("03-01", "03-02")}, parts[1]]}]
    miss = finder.explain(finder.begin(read("chat", {**body, "messages": other + messages[1:]})), 900, 16)
    assert (miss.cause, miss.where) == ("volatile_line", "messages[0].content line 2")


@settings(max_examples=examples(100), deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["model", "messages", "tools", "prompt", "input", "user", "chat_template_kwargs", "prefix"]),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=3),
            lambda v: (
                st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "function", "text"]), v)
            ),
        ),
    ),
    st.sampled_from(list(DIALECTS)),
)
def test_any_body_is_compared(body: dict[str, Any], dialect: Any) -> None:
    """Every body that a router reads is compared, whatever its shape."""
    finder = MissFinder()
    said = {"messages": [{"role": "user", "content": "x"}], "input": "x", "prompt": "x", "max_tokens": 1}
    with suppress(BadRequest):
        request = read(dialect, {**said, **body})
        for _ in range(2):
            assert finder.explain(finder.begin(request), 50, 0).cause in CAUSES
