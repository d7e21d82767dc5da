"""Orders a prompt so that sessions of an agent share more of it: tools first, and lines that change behind those that do not.

Templates render the system prompt before the tools. A line in it that names the session's folder or the date separates all that
follows, tools included, from every other session. Here such lines become a system message of their own, behind the others:

    system | tools | user ...           as it comes; the first line that differs ends the common prefix
    stable lines of system | tools | lines that change | user ...               `--volatile-lines`
    tools | stable lines of system | lines that change | user ...               and `--template-order tools-first`

For tools first, an empty system message comes before the others: the template renders the tools behind it. The model sees a
prompt in an order for which it was not trained, so this is off unless it is configured.

Works on messages and tools as they are in a body of chat completions and as templates take them, so a router, which rewrites
bodies, and a server, which renders them, do the same. Applying it twice changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from foreword.errors import BadRequest, ConfigError, did_you_mean

if TYPE_CHECKING:
    from foreword.process_config import ServerConfig

# Characters of the first system message in which an agent says who it is.
_MARKED_CHARACTERS: Final = 1000
# Longer texts stay as they are: those of agents are shorter, and a line takes half a microsecond on the event loop.
_MOST_CHARACTERS: Final = 1 << 18
# Longer lines stay: the time of an operator's expression may grow with the square of a line.
_LONGEST_LINE: Final = 2000
_SYSTEM: Final = ("system", "developer")
_FIRST: Final = "tools-first"
_PROFILES: Final = "profiles"
# How lines begin that most agents have, behind marks of a list.
_USUAL: Final = (
    r"(?:primary |current )?working directory:",
    r"(?:workspace root|additional working directories)\b.*:",
    r"is (?:a|directory a) git repo",
    r"(?:platform|shell|os version):",
    r"today's date",
    r"(?:current|main) branch\b.*:",
)
# Whether a line moves.
_Test = Callable[[str], object]


# Without a last line it goes on to the end of its message.
_Block = tuple[re.Pattern[str], re.Pattern[str] | None]


class AgentProfile(NamedTuple):
    """A client whose prompts are known.

    Attributes:
        mark: found near the start of its system prompt.
        lines: those that differ between its sessions, beside the usual ones.
        block: the first line of a part that does, such as a status of git, and its last; None without.
    """

    name: str
    mark: re.Pattern[str]
    lines: _Test
    block: _Block | None = None


def _lines(*patterns: str) -> _Test:
    # It matches at the start of a line only: a search would try each of its characters.
    return re.compile("|".join((rf"\W*(?:{'|'.join(_USUAL)})", *patterns)), re.IGNORECASE).match


# As recorded with the versions in docs/guides/agents.md.
AGENTS: Final = (
    AgentProfile(
        "claude-code",
        re.compile(r"^x-anthropic-billing-header:|\bClaude Code\b|\bClaude Agent SDK\b", re.MULTILINE),
        _lines(r"x-anthropic-billing-header:", r"(?>.*?\bmemory\b).*\bat `?[~/]"),
        (re.compile(r"^gitStatus:"), None),
    ),
    AgentProfile("codex", re.compile(r"\bCodex\b"), _lines(r"\W*r\d+\W+/", r"\s*<cwd>")),
    AgentProfile("opencode", re.compile(r"\bopencode\b", re.IGNORECASE), _lines()),
    AgentProfile("qwen-code", re.compile(r"\bQwen Code\b"), _lines(r".*\bmemory system at `?[~/]", r".*/MEMORY\.md\b")),
    AgentProfile(
        "continue",
        re.compile(r"\bContinue CLI\b"),
        _lines(r".*from the current working directory \("),
        (re.compile(r"^<context name=\"gitStatus\">"), re.compile(r"</context>")),
    ),
)  # fmt: skip
_NAMES: Final = tuple(agent.name for agent in AGENTS)

Parts = Sequence[Mapping[str, Any]]


class TemplateRenderer(Protocol):
    """The part of `tokens.tokenizer.Tokenizer` that a check needs."""

    def chat_text(self, messages: Parts) -> str: ...


@dataclass(frozen=True, slots=True)
class _Rule:
    """For which requests something holds. `client`: an agent's name, `model`: a model's; None for all."""

    client: str | None
    model: str | None

    def holds(self, agent: AgentProfile | None, model: str) -> bool:
        named = self.client is None or (agent is not None and agent.name == self.client)
        return named and self.model in (None, model)


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The configured order. Without rules it changes nothing.

    Attributes:
        first: for which requests tools come first.
        lines: lines that move, for some requests; None for those of the agent's profile.
    """

    first: tuple[_Rule, ...] = ()
    lines: tuple[tuple[_Rule, _Test | None], ...] = ()

    @classmethod
    def parse(cls, template_order: Sequence[str], volatile_lines: Sequence[str]) -> PromptOrder:
        """From the options. Raises ConfigError."""
        first, lines = list[_Rule](), list[tuple[_Rule, _Test | None]]()
        for text in template_order:
            value, rule = _parsed(text, "--template-order")
            if value != _FIRST:
                raise ConfigError(f"--template-order: {value!r} is not an order; there is {_FIRST}")
            first.append(rule)
        for text in volatile_lines:
            value, rule = _parsed(text, "--volatile-lines")
            lines.append((rule, None if value == _PROFILES else _pattern(value)))
        return cls(tuple(first), tuple(lines))

    @classmethod
    def of(cls, config: ServerConfig) -> PromptOrder:
        """The order that is configured. Raises ConfigError."""
        return cls.parse(config.template_order, config.volatile_lines)

    def __bool__(self) -> bool:
        return bool(self.first or self.lines)

    def check(self, tokenizer: TemplateRenderer) -> None:
        """Raises ConfigError if the model's template does not show several system messages."""
        said = [{"role": "system", "content": "first"}, {"role": "system", "content": "second"}]
        try:
            shown = "second" in tokenizer.chat_text([*said, {"role": "user", "content": "third"}]) if self else True
        except BadRequest:
            shown = False
        if not shown:
            raise ConfigError(
                "the model's chat template shows one system message only: --template-order and --volatile-lines need several"
            )

    def arranged(self, messages: Parts, tools: Parts, model: str) -> tuple[Parts, Parts]:
        """Messages and tools in this order; the same objects if nothing changes."""
        leading = list(takewhile(lambda one: one.get("role") in _SYSTEM, messages))
        agent = _agent(leading) if leading else None
        patterns = list(self._patterns(agent, model))
        moved = list[str]()
        kept = (
            [left for one in leading if (left := _without(one, patterns, moved)) is not None] if patterns else leading
        )
        described = [_described(tool, patterns, moved) for tool in tools] if patterns else tools
        first = bool(tools) and bool(leading) and any(rule.holds(agent, model) for rule in self.first)
        role = leading[0]["role"] if leading else _SYSTEM[0]
        if first:
            kept = [{"role": role, "content": ""}, *(one for one in kept if one.get("content"))]
        if moved:
            kept = [*kept, {"role": role, "content": "\n".join(moved)}]
        if kept == leading and described == list(tools):
            return messages, tools
        return [*kept, *messages[len(leading) :]], described

    def _patterns(self, agent: AgentProfile | None, model: str) -> Iterator[tuple[_Test, _Block | None]]:
        for rule, pattern in self.lines:
            if not rule.holds(agent, model):
                continue
            if pattern is not None:
                yield pattern, None
            elif agent is not None:
                yield agent.lines, agent.block


def _parsed(text: str, option: str) -> tuple[str, _Rule]:
    """A value and, at its end, for which requests it holds."""
    words, found = text.split(" "), dict[str, str]()
    while len(words) > 1 and (given := re.fullmatch(r"(client|model)=(\S+)", words[-1])) is not None:
        found[given[1]] = given[2]
        words.pop()
    client = found.get("client")
    if client is not None and client not in _NAMES:
        raise ConfigError(f"{option}: no client named {client!r} is known{did_you_mean(client, _NAMES)}")
    return " ".join(words), _Rule(client, found.get("model"))


def _pattern(text: str) -> _Test:
    if len(text) < 3 or not text.startswith("/") or not text.endswith("/"):
        raise ConfigError(f"--volatile-lines takes {_PROFILES} or /REGULAR EXPRESSION/, not {text!r}")
    try:
        return re.compile(text[1:-1]).search
    except re.error as error:
        raise ConfigError(f"--volatile-lines: {text} is not a regular expression: {error}") from None


def _agent(leading: Parts) -> AgentProfile | None:
    start = "\n".join(text for one in leading for text in texts_of(one))[:_MARKED_CHARACTERS]
    return next((agent for agent in AGENTS if agent.mark.search(start)), None)


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content}]
    yield from (text for part in parts if isinstance(part, dict) and isinstance(text := part.get("text"), str))


_Patterns = Sequence[tuple[_Test, _Block | None]]


def _split(text: str, patterns: _Patterns, moved: list[str]) -> str:
    """The lines that stay; the others are added to `moved`."""
    if len(text) > _MOST_CHARACTERS:
        return text
    stays = list[str]()
    block: _Block | None = None
    for line in text.split("\n"):
        block = block or next((one for _, one in patterns if one is not None and one[0].match(line)), None)
        if block is None and (len(line) > _LONGEST_LINE or not any(moves(line) for moves, _ in patterns)):
            stays.append(line)
            continue
        moved.append(line)
        if block is not None and block[1] is not None and block[1].search(line):
            block = None
    return "\n".join(stays)


def _without(message: Mapping[str, Any], patterns: _Patterns, moved: list[str]) -> Mapping[str, Any] | None:
    """A system message without its lines that move; None if nothing stays."""
    content, before = message.get("content"), len(moved)
    if isinstance(content, str):
        left: Any = _split(content, patterns, moved)
    elif isinstance(content, list) and all(
        isinstance(part, dict) and isinstance(part.get("text"), str) for part in content
    ):
        left = [{**part, "text": _split(part["text"], patterns, moved)} for part in content]
        left = [part for part in left if part["text"].strip()]
    else:
        return message
    if len(moved) == before:
        return message
    return {**message, "content": left} if (left.strip() if isinstance(left, str) else left) else None


def _described(tool: Mapping[str, Any], patterns: _Patterns, moved: list[str]) -> Mapping[str, Any]:
    """A tool without lines that move in its description."""
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(text := function.get("description"), str):
        return tool
    before = len(moved)
    left = _split(text, patterns, moved)
    return tool if len(moved) == before else {**tool, "function": {**function, "description": left}}
