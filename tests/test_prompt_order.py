"""Prompts in an order that sessions of an agent share: tools first, lines that change behind those that do not."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import BadRequest, ConfigError
from foreword.prompt_order import AGENTS, PromptOrder

RULES = "\n".join(f"Rule {number}: read before you write." for number in range(20))
PROFILES = PromptOrder.parse((), ("profiles",))
BOTH = PromptOrder.parse(("tools-first",), ("profiles",))
# How the system prompts of the agents begin, and the lines that differ between their sessions; the rest is made up.
SESSIONS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "claude-code": (
        "x-anthropic-billing-header: cc_version={0};\nYou are a Claude agent, built on the Claude Agent SDK.",
        (
            "You have notes in your file-based memory at `/home/{0}/.claude/memory/`.",
            " - Primary working directory: /home/{0}",
            " - Is a git repository: {0}",
            "gitStatus: as of now\nM {0}.py\n\nRecent commits:\n{0} fix",
        ),
        (),
    ),
    "codex": ("You are a coding agent in the Codex CLI.", ("- `r0` = `/home/{0}/skills`", "<cwd>/home/{0}</cwd>"), ()),
    "opencode": ("You are opencode.", ("  Working directory: /home/{0}", "  Today's date: {0}"), ()),
    "qwen-code": (
        "You are Qwen Code.",
        ("You have a memory system at `/home/{0}`.", "Add it to `/home/{0}/memory/MEMORY.md`."),
        (),
    ),
    "continue": (
        "You are an agent in the Continue CLI.",
        ("Working directory: /home/{0}", '<context name="gitStatus">as of now\nM {0}.py\n</context>'),
        ("It runs from the current working directory (/home/{0}), so do not change it.",),
    ),
}


def session(agent: str, name: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Messages and tools of a session in the folder `name`."""
    start, lines, described = (SESSIONS[agent][0], *SESSIONS[agent][1:])
    text = "\n".join((start, RULES, *lines[:-1], RULES, lines[-1])).replace("{0}", name)
    functions = [{"name": tool, "description": "\n".join(("Runs.", *described, "Use it."))} for tool in ("run", "read")]
    tools = [
        {"type": "function", "function": {**one, "description": one["description"].replace("{0}", name)}}
        for one in functions
    ]
    return [{"role": "system", "content": text}, {"role": "user", "content": f"Work in {name}."}], tools


def rendered(order: PromptOrder, agent: str, name: str) -> str:
    """Renders as most templates do: tools behind the first system message."""
    messages, tools = order.arranged(*session(agent, name), "m")
    texts = [f"<{one['role']}>{one['content']}" for one in messages]
    return "".join((texts[0], f"<tools>{list(tools)}", *texts[1:]))


def common(first: str, second: str) -> int:
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("order", [PROFILES, BOTH], ids=["lines", "lines and tools"])
@pytest.mark.parametrize("agent", SESSIONS)
def test_sessions_of_known_agents_share_all_but_their_own(agent: str, order: PromptOrder) -> None:
    """Two sessions in folders whose names share nothing begin with the same tools and the same lines of the system prompt, but
    for those that name the folder; as they come they part before the tools."""
    assert agent in {one.name for one in AGENTS}
    one, two = rendered(order, agent, "alpha"), rendered(order, agent, "zulu")
    shared = one[: common(one, two)]
    assert shared.count("Rule 19") == 2 and "<tools>" in shared and "read" in shared.split("<tools>")[1]
    as_is = rendered(PromptOrder(), agent, "alpha")
    assert "<tools>" not in as_is[: common(as_is, rendered(PromptOrder(), agent, "zulu"))]
    assert sorted(as_is.replace("\\n", "\n").split()) != [] and one.count("alpha") == as_is.count("alpha"), (
        "something is lost"
    )


def test_tools_first() -> None:
    """An empty system message holds the place before the tools where tools come first, if there are tools and a system
    prompt."""
    order = PromptOrder.parse(("tools-first",), ())
    messages, tools = session("opencode", "a")
    found, same = order.arranged(messages, tools, "m")
    assert found == [{"role": "system", "content": ""}, *messages] and same == tools
    for given_messages, given_tools in ((messages, []), (messages[1:], tools), ([], [])):
        assert order.arranged(given_messages, given_tools, "m") == (given_messages, given_tools)


def test_rules_hold_for_their_client_and_model() -> None:
    """A rule for one client or model changes nothing for others, and without rules nothing changes."""
    messages, tools = session("codex", "a")
    for values in (
        ("profiles client=opencode",),
        ("profiles model=other",),
        ("profiles client=codex model=other",),
        (),
    ):
        assert PromptOrder.parse((), values).arranged(messages, tools, "m") == (messages, tools)
    for values in (("profiles client=codex",), ("profiles model=m",), ("profiles client=codex model=m",)):
        assert PromptOrder.parse((), values).arranged(messages, tools, "m")[0] != messages
    assert not PromptOrder.parse((), ()) and PROFILES


def test_lines_of_unknown_clients_by_an_expression() -> None:
    """Lines that match an expression with spaces move, in texts and in parts; parts that are no texts stay as they are."""
    order = PromptOrder.parse((), ("/^Date: .* now$/",))
    moved = {"role": "developer", "content": "Date: today now"}
    for content, kept in (
        ("a\nDate: today now\nb", "a\nb"),
        ([{"type": "text", "text": "a\nDate: today now", "x": 1}], [{"type": "text", "text": "a", "x": 1}]),
    ):
        found, _ = order.arranged(
            [{"role": "developer", "content": content}, {"role": "user", "content": "u"}], [], "m"
        )
        assert found == [{"role": "developer", "content": kept}, moved, {"role": "user", "content": "u"}]
    image = [{"role": "system", "content": [{"type": "image_url", "image_url": {}}]}]
    assert order.arranged(image, [], "m") == (image, [])


LINES = st.sampled_from(
    ["a", "", "Working directory: /x", "gitStatus: y", "U 7", "You are opencode", "Claude Code", "</context>"]
)
TEXTS = st.lists(LINES, max_size=5).map("\n".join)
ORDERS = st.tuples(
    st.sampled_from([(), ("tools-first",), ("tools-first client=claude-code",)]),
    st.sampled_from([(), ("profiles",), ("/^U /",), ("/^U /", "profiles"), ("profiles client=opencode", "/7/")]),
)


@settings(max_examples=examples(400), deadline=None)
@given(st.lists(TEXTS, max_size=3), TEXTS, ORDERS)
def test_twice_is_once(systems: list[str], description: str, options: Any) -> None:
    """A router and the replica behind it may both put a prompt into the order: the second one finds nothing to do. No line is
    lost or made up, and what was given is not changed."""
    order = PromptOrder.parse(*options)
    messages: list[Any] = [{"role": "system", "content": text} for text in systems] + [{"role": "user", "content": "u"}]
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": description}}]
    before = copy.deepcopy((messages, tools))
    once = order.arranged(messages, tools, "m")
    assert (messages, tools) == before
    assert order.arranged(*once, "m") == once

    def words(parts: Any) -> list[str]:
        said, offered = parts
        texts = [one["content"] for one in said] + [one["function"]["description"] for one in offered]
        return sorted("\n".join(texts).split())

    assert words(once) == words(before)


@pytest.mark.parametrize(
    ("first", "lines", "named"),
    [
        (("tools",), (), "'tools' is not an order"),
        (("tools-first client=claud-code",), (), "claude-code"),
        ((), ("/(/",), "not a regular expression"),
        ((), ("date",), "profiles or /REGULAR EXPRESSION/"),
    ],
)
def test_mistakes_are_named(first: tuple[str, ...], lines: tuple[str, ...], named: str) -> None:
    """A text that is no order, no client or no expression ends the start, and the message says what there is."""
    with pytest.raises(ConfigError, match=r"template-order|volatile-lines") as error:
        PromptOrder.parse(first, lines)
    assert named in str(error.value)


class _Template:
    """`shown`: system messages that a template shows; 0 if it refuses a second one."""

    def __init__(self, shown: int) -> None:
        self._shown = shown

    def chat_text(self, messages: Any) -> str:
        if not self._shown:
            raise BadRequest("only one system message")
        return "".join(one["content"] for one in messages[: self._shown])


def test_a_template_of_one_system_message_is_refused() -> None:
    """A template that drops or refuses a second system message ends the start where an order is configured."""
    PROFILES.check(_Template(2))
    PromptOrder().check(_Template(0))
    for shown in (0, 1):
        with pytest.raises(ConfigError, match="one system message"):
            PROFILES.check(_Template(shown))


def test_lines_take_a_time_that_grows_as_they_do() -> None:
    """A line of four times the length takes an agent's lines at most eight times as long, whatever words it repeats: with the
    square of its length it would be sixteen times."""

    def seconds(moves: Any, line: str) -> float:
        began = time.thread_time()
        assert not moves(line)
        return time.thread_time() - began

    words = ("memory ", "memory at ", "memory system at ", "branch ", "r1 ", " - ", "/MEMORY.m", "working directory ")
    for agent in AGENTS:
        for word in words:
            short, long = (min(seconds(agent.lines, word * count) for _ in range(5)) for count in (2000, 8000))
            assert long < 8 * max(short, 2e-5), (agent.name, word)


def test_long_lines_and_texts_stay() -> None:
    """An expression is not tried on a line of more than 2,000 characters, and no line of a text of more than 262,144 moves."""
    order = PromptOrder.parse((), ("/^Date: /",))
    for date, others, moves in (
        ("Date: ".ljust(2000, "x"), "a", True),
        ("Date: ".ljust(2001, "x"), "a", False),
        ("Date: now", "a\n" * 131_067, True),
        ("Date: now", "a\n" * 131_067 + "a", False),
    ):
        given = [{"role": "system", "content": f"{date}\n{others}"}]
        found, _ = order.arranged(given, [], "m")
        assert (len(found) == 2) is moves
