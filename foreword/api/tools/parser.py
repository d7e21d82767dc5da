"""The formats that a model writes, and a parser that turns its text into text, reasoning and tool calls while it streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from foreword.api.output import Piece
from foreword.api.request import Tool
from foreword.api.tools.coder_calls import Qwen3Coder
from foreword.api.tools.formats import REASONING_TAGS, ReasoningFormat, ReasoningTags, ToolFormat
from foreword.api.tools.harmony import Harmony
from foreword.api.tools.json_calls import Hermes, Llama3Json, Mistral
from foreword.api.tools.reader import SPACE, PieceCollector, Reading, TextReader, call_id
from foreword.errors import ConfigError
from foreword.plugins import Plugins
from foreword.tokens.reasoning_stops import ReasoningSpan

_BUILTIN: Final[dict[str, ToolFormat]] = {
    "harmony": Harmony(),
    "qwen3_coder": Qwen3Coder(),
    "hermes": Hermes(),
    "mistral": Mistral(),
    "llama3_json": Llama3Json(),
}
TOOL_FORMATS: Final = Plugins("foreword.tool_formats", "tool parser", ToolFormat, _BUILTIN)


@dataclass(frozen=True, slots=True)
class AnswerFormats:
    """How a model writes tool calls (a name in `TOOL_FORMATS`) and reasoning; None where it has neither.

    Attributes:
        tool_format: the format of tool calls.
        special_tokens: markers are special tokens, which must stay in the text.
        divided: an answer has parts also where the client gives no tools, so that it is parsed.

    Raises ConfigError for a name that is not known.
    """

    tools: str | None = None
    reasoning: ReasoningFormat | None = None
    tool_format: ToolFormat | None = field(init=False, repr=False, compare=False)
    special_tokens: bool = field(init=False, repr=False, compare=False)
    divided: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        form = None if self.tools is None else TOOL_FORMATS[self.tools]
        tags = None if self.reasoning is None else REASONING_TAGS[self.reasoning]
        object.__setattr__(self, "tool_format", form)
        special = [one.special_tokens for one in (form, tags) if one is not None]
        object.__setattr__(self, "special_tokens", any(special))
        object.__setattr__(self, "divided", tags is not None or (form is not None and form.whole_answer))

    def stops_behind(self, is_open: bool) -> ReasoningSpan | None:
        """The part of an answer in which stop strings do not count. `is_open`: the prompt ends inside of it."""
        form = self.tool_format
        if form is not None and form.whole_answer:
            return form.reasoning
        tags = None if self.reasoning is None else REASONING_TAGS[self.reasoning]
        return None if tags is None else ReasoningSpan(tags.open, (tags.close,), is_open)


def formats_named(tools: str | None, reasoning: str | None) -> AnswerFormats:
    """The formats of these names. Raises ConfigError."""
    if reasoning is not None and reasoning not in REASONING_TAGS:
        raise ConfigError(f"unknown reasoning parser {reasoning!r}; known: {', '.join(REASONING_TAGS)}")
    return AnswerFormats(tools, reasoning)


def detect(chat_template: str, model_type: str = "") -> AnswerFormats:
    """The formats that a chat template writes for earlier turns, which are the ones that the model writes."""
    found = (name for name in TOOL_FORMATS if TOOL_FORMATS[name].detects(chat_template, model_type))
    reasoning = (name for name, tags in REASONING_TAGS.items() if tags.close in chat_template)
    return AnswerFormats(next(found, None), next(reasoning, None))


def opens_reasoning(prompt: str, reasoning: ReasoningFormat | None) -> bool:
    """Whether the rendered prompt ends inside the reasoning, so that the answer starts with it."""
    return reasoning is not None and prompt.rstrip().endswith(REASONING_TAGS[reasoning].open)


def leaves_reasoning_open(message: str, reasoning: ReasoningFormat | None) -> bool:
    """Whether a message of the assistant ends inside of its reasoning, so that what continues it starts with that."""
    tags = None if reasoning is None else REASONING_TAGS[reasoning]
    return tags is not None and message.lstrip().startswith(tags.open) and tags.close not in message


class AnswerParser:
    """Feed it the text of one choice; it gives the pieces as they become certain.

    No text is lost or reordered, except for white space next to a marker. A start of a marker is held back until the next
    characters decide. A call that turns out malformed is text; once its name is known it is a call, whatever follows.

    Args:
        formats: how the model writes calls and reasoning.
        tools: what the client lets the model call. Without tools, calls are not parsed.
        reasoning_open: the prompt ends inside the reasoning (`opens_reasoning`, `leaves_reasoning_open`).
        new_id: makes the ids of calls.
    """

    def __init__(
        self,
        formats: AnswerFormats,
        tools: Sequence[Tool] = (),
        *,
        reasoning_open: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> None:
        self._reader = TextReader()
        form = formats.tool_format
        self._pieces = PieceCollector(new_id or (call_id if form is None else form.new_id))
        self._reading: Reading[None] | None = _answer(self._reader, self._pieces, formats, tools, reasoning_open)
        self._advance()

    @property
    def buffered(self) -> int:
        """Characters that wait for the next ones."""
        return self._reader.buffered

    def feed(self, text: str) -> list[Piece]:
        self._reader.add(text)
        self._advance()
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """The text is complete: what was held back is text."""
        self._reader.closed = True
        self._advance()
        self._pieces.end()
        return self._pieces.take()

    def _advance(self) -> None:
        if self._reading is not None and next(self._reading, self) is self:
            self._reading = None


def _answer(
    reader: TextReader, pieces: PieceCollector, formats: AnswerFormats, tools: Sequence[Tool], reasoning_open: bool
) -> Reading[None]:
    form = formats.tool_format
    if formats.reasoning and not (form is not None and form.whole_answer):
        yield from _reasoning(reader, pieces, REASONING_TAGS[formats.reasoning], reasoning_open)
    if form is not None and (tools or form.whole_answer):
        yield from form.read(reader, pieces, tools)
    while (yield from reader.peek()):
        pieces.text(reader.available())


def _reasoning(reader: TextReader, pieces: PieceCollector, tags: ReasoningTags, is_open: bool) -> Reading[None]:
    """Reasoning at the start of the answer. Its opening tag may be the end of the prompt."""
    yield from reader.run(SPACE, pieces.text)
    if not (yield from reader.literal(tags.open)) and not is_open:
        return
    pieces.marker()
    if (yield from reader.until((tags.close,), pieces.reasoning)):
        pieces.marker()


def parse(
    text: str, formats: AnswerFormats, tools: Sequence[Tool] = (), *, reasoning_open: bool = False
) -> list[Piece]:
    """The pieces of a complete text."""
    parser = AnswerParser(formats, tools, reasoning_open=reasoning_open)
    return [*parser.feed(text), *parser.finish()]
