"""Prompts are recognized by their bytes: where they were sent, and how long they are, while their tokens are not known."""

from __future__ import annotations

import json
import random
from array import array
from typing import Any

from foreword.api.dialects.decode import Limits
from foreword.blocks.salt import Salt
from foreword.router.prompt_chain import prompt_chain
from foreword.router.replica_body import parse_request
from foreword.routing.known_prompts import KnownPrompts, PromptChain

NOW = 10.0


def of(body: bytes, salt: bytes = b"", model: str = "m") -> PromptChain:
    made = prompt_chain(parse_request("chat", body, Limits()), model, Salt(salt))
    assert made is not None
    return made


def chain(*texts: str, salt: bytes = b"", model: str = "m", tool: str = "") -> PromptChain:
    """The chain of a chat whose first message is the system's."""
    roles = ["system", *["user", "assistant"] * len(texts)]
    body: dict[str, Any] = {
        "messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    }
    if tool:
        body["tools"] = [{"type": "function", "function": {"name": "read", "description": tool, "parameters": {}}}]
    return of(json.dumps(body).encode(), salt, model)


def tokens(count: int, start: int = 0) -> array[int]:
    return array("I", range(start, start + count))


def test_a_next_turn_has_the_tokens_of_the_one_before() -> None:
    """All tokens of an earlier prompt are known exactly in one that continues it; those behind them are counted by its bytes.
    Another salt, model or system prompt shares nothing."""
    known = KnownPrompts()
    known.learn(chain("s" * 400, "u" * 400), tokens(200))
    found = known.find(chain("s" * 400, "u" * 400, "a" * 400, "u" * 400), NOW)
    assert found is not None and found.exact and found.tokens == tokens(200) and found.length == 200
    assert 350 <= found.total <= 450
    for other in (
        chain("s" * 400, "u" * 400, salt=b"b"),
        chain("s" * 400, "u" * 400, model="n"),
        chain("t", "u" * 400),
    ):
        assert known.find(other, NOW) is None


def test_a_shared_system_prompt_is_shorter_than_its_share() -> None:
    """A prompt that shares only the first messages has fewer known tokens than the bytes of these stand for: a template makes
    only whole prompts exact."""
    known = KnownPrompts()
    known.learn(chain("s" * 900, "u" * 100), tokens(500))
    found = known.find(chain("s" * 900, "v" * 100), NOW)
    assert found is not None and not found.exact
    assert 350 < found.length == len(found.tokens) < 450


def test_tools_come_after_the_system_prompt() -> None:
    """A prompt with the same system prompt and other tools shares the system prompt, and one with another system prompt and the
    same tools nothing: so templates render them."""
    known = KnownPrompts()
    known.learn(chain("s" * 1000, "u", tool="x" * 1000), tokens(500))
    same = known.find(chain("s" * 1000, "u", tool="y" * 1000), NOW)
    assert same is not None and 0 < same.length < 300
    assert known.find(chain("t" * 1000, "u", tool="x" * 1000), NOW) is None


def test_what_was_sent_without_its_tokens_is_remembered_by_its_bytes() -> None:
    """A replica that was sent a prompt whose tokens were not known has it, for the time to live and until it is removed, and a
    prompt that was sent with its tokens is left to its blocks."""
    known = KnownPrompts(ttl=60.0)
    first, second = chain("s" * 400, "u" * 400), chain("s" * 400, "u" * 400, "a" * 400)
    known.placed(first, 200, "r", NOW, by_keys=False)
    found = known.find(second, NOW + 1)
    assert found is not None and found.held.keys() == {"r"} and not found.tokens
    assert 150 < found.held["r"] <= 200
    late = known.find(second, NOW + 61)
    assert late is not None and not late.held
    known.learn(first, tokens(210))  # late
    found = known.find(second, NOW + 1)
    assert found is not None and found.held == {"r": 210} and len(found.tokens) == 210
    known.interrupted("r", True)
    found = known.find(second, NOW + 1)
    assert found is not None and not found.held
    known.placed(second, 300, "r", NOW, by_keys=True)
    found = known.find(second, NOW + 1)
    assert found is not None and not found.held


def test_a_conversation_is_at_home_where_its_last_prompt_was_sent() -> None:
    """The first prompt that goes on from a whole earlier one is of its conversation. One that only shares a beginning, goes on
    from one that another has continued, or repeats one is not, nor one whose replica was removed or is not believed any more.
    So a system prompt that was sent alone gathers no conversations."""
    known, system = KnownPrompts(ttl=60.0), chain("s" * 400)
    turns = [chain("s" * 400, *["u" * 400, "a" * 40] * number, "v" * 40) for number in range(3)]

    def home(prompt: PromptChain, now: float = NOW) -> str:
        found = known.find(prompt, now)
        assert found is not None
        return found.home

    known.placed(system, 100, "r", NOW, by_keys=True)
    assert home(turns[0]) == "r"
    known.placed(turns[0], 210, "q", NOW, by_keys=True)
    assert home(chain("s" * 400, "w" * 40)) == "", "another conversation behind the same system prompt"
    assert home(turns[0]) == "", "the same prompt again"
    known.placed(turns[1], 330, "r", NOW, by_keys=False)
    assert home(chain("s" * 400, "u" * 400, "a" * 40, "v" * 40, "b", "c")) == "r"
    assert home(chain("s" * 400, "u" * 400, "a" * 40, "w" * 40, "b", "c")) == "", "an edited message"
    assert home(chain("s" * 400, "v" * 40, "b", "c")) == "q", "the other one goes on, too"
    assert home(chain("s" * 400, "v" * 40, "b", "c"), NOW + 61) == ""
    known.interrupted("q", True)
    assert home(chain("s" * 400, "v" * 40, "b", "c")) == ""


def test_a_replicas_count_is_exact() -> None:
    """A replica's usage for a prompt that was not tokenized is the prompt's length from then on."""
    known = KnownPrompts()
    one = chain("s" * 400, "u" * 400)
    known.placed(one, 200, "r", NOW, by_keys=False)
    known.computed(one, 123, named=False)
    found = known.find(one, NOW)
    assert found is not None and (found.length, found.exact, found.held) == (123, True, {"r": 123})


def test_late_tokens_of_an_earlier_turn_help() -> None:
    """Tokens of a prompt that come after its next turn was placed are known for the turns behind it."""
    known = KnownPrompts()
    texts = [f"{number} " * 200 for number in range(5)]
    known.learn(chain(*texts[:2]), tokens(100))
    for end in (3, 4):
        known.placed(chain(*texts[:end]), 100 * end, "r", NOW, by_keys=False)
    known.learn(chain(*texts[:3]), tokens(150))
    found = known.find(chain(*texts), NOW)
    assert found is not None and found.tokens == tokens(150) and found.held.keys() == {"r"}


def test_the_memory_is_bounded_and_shared() -> None:
    """However many and however long the conversations, at most the limit is kept, and a tenant with one conversation keeps it
    beside one with thousands."""
    rng, known = random.Random(5), KnownPrompts(1 << 18)
    quiet = chain("quiet", "u" * 100, salt=b"q")
    known.learn(quiet, tokens(50))
    for number in range(600):
        texts = ["s", *(f"{number} {turn}" for turn in range(rng.randrange(1, 150)))]
        for end in range(2, len(texts), 40):
            known.learn(chain(*texts[:end]), tokens(rng.randrange(4000)))
            assert known.held_bytes <= 1 << 18
    assert known.find(quiet, NOW) is not None
    assert 64 < len(known) < 1000, "links of dropped conversations stay"


def test_a_long_conversation_is_found_at_its_end_and_at_its_start() -> None:
    """A conversation of 300 messages is found by its last turns and by its system prompt, with few links."""
    known = KnownPrompts()
    texts = [f"message {number}" for number in range(302)]
    for end in range(2, 301, 2):
        known.learn(chain(*texts[:end]), tokens(10 * end))
    assert len(known) <= 64
    found = known.find(chain(*texts), NOW)
    assert found is not None and found.exact and found.length == 3000
    branched = known.find(chain(*texts[:280], "another"), NOW)
    assert branched is not None and branched.exact and branched.length == 2800
    start = known.find(chain(texts[0], "another"), NOW)
    assert start is not None and 0 < start.length < 15


def test_a_long_system_message_stays_known_in_a_long_conversation() -> None:
    """However long a conversation, a new one finds all of the system message and tools that both have."""
    known = KnownPrompts()
    system, tools = "rules " * 8000, "x" * 40_000
    texts = [system, *(f"message {number}" for number in range(120))]
    for end in range(2, 120, 2):
        known.learn(chain(*texts[:end], tool=tools), tokens(10_000 + 10 * end))
        found = known.find(chain(system, "another", tool=tools), NOW)
        assert found is not None and 8900 < found.length < 10_000 + 10 * end


def test_bytes_count_as_they_came() -> None:
    """Messages that mean the same and are written otherwise are two prompts: nothing is read into them."""

    known = KnownPrompts()
    known.learn(of(b'{"messages": [{"role": "user", "content": "x"}]}'), tokens(5))
    assert known.find(of(b'{"messages": [{"role": "user", "content": "x"}]}'), NOW) is not None
    assert known.find(of(b'{"messages": [{"content": "x", "role": "user"}]}'), NOW) is None
