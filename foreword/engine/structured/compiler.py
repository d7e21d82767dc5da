"""Compiles what a text must match to a grammar of llguidance, with limits on size, memory and time; keeps some of the results.

llguidance does not say how large a grammar is. Its *fuel* bounds that: an expression that the compiler builds costs fuel, and
takes at most about 100 bytes per unit. So a grammar is compiled with the fuel of a small one first, and with more only if that
did not do. A larger one than that is refused. While texts are generated, the states of the grammar's lexer add to it, all
sequences of the grammar together at most `_GROWTH`. `tests/engine/grammar_memory.py` measures both.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import replace
from functools import partial
from hashlib import sha256
from queue import SimpleQueue
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary, finalize

import msgspec
from llguidance import LLMatcher, LLParserLimits
from llguidance.gbnf_to_lark import gbnf_to_lark

from foreword.allocator import release_unused
from foreword.blocks.bounded import Bounded
from foreword.engine.structured.closing import ClosingPath, examples
from foreword.engine.structured.sequence_constraint import Constraint
from foreword.engine.structured.vocabulary import Vocabulary
from foreword.errors import BadRequest
from foreword.futures import complete
from foreword.request_errors import QueueFull
from foreword.store.background import background_thread
from foreword.tokens.structured_output import (
    MAX_CHOICES,
    MAX_FORMAT_CHARACTERS,
    MAX_FORMAT_DEPTH,
    StructuredOutput,
)

# The parsers of grammars and of regular expressions call themselves for each level of brackets.
_MAX_BRACKETS: Final = 100
# In the EBNF of llama.cpp and XGrammar, which vLLM takes too.
_RULES: Final = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_MAX_RULES: Final = 1_000
# One space, or a new line with its indent: a model could fill its budget with more.
_JSON_OPTIONS: Final = {"whitespace_pattern": r"( |\n[ \t]{0,32})?"}


def grammar_text(output: StructuredOutput) -> str:
    """The grammar, as `LLMatcher` reads it. Raises BadRequest for a value of the wrong type or beyond the limits."""
    try:
        text = _WRITERS[output.kind](output)
        text.encode()
    except UnicodeEncodeError:
        what = f"the {output.kind} contains an unpaired surrogate (U+D800 to U+DFFF), which UTF-8 cannot encode"
        raise BadRequest(what, param="response_format") from None
    return text


def _json_schema(output: StructuredOutput) -> str:
    schema = output.value
    if not isinstance(schema, Mapping | bool):
        raise BadRequest("a JSON schema must be an object", param="response_format")
    return _from_schema(schema, strict=output.strict)


def _from_schema(schema: Mapping[str, Any] | bool, *, strict: bool) -> str:
    check_schema(schema)
    whole = {"x-guidance": {**_JSON_OPTIONS, "lenient": not strict}, **(_without_options(schema))}
    return str(LLMatcher.grammar_from_json_schema(json.dumps(whole)))


def _without_options(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema without options of the compiler: those are the engine's, not the client's."""
    if isinstance(schema, bool):
        return {} if schema else {"enum": []}
    return {name: value for name, value in schema.items() if name != "x-guidance"}


def check_schema(schema: object) -> None:
    """Raises BadRequest for a schema that is too large or too deep to be compiled."""
    size = 0
    for depth, text in _texts(schema):
        size += len(text) + 1
        if depth > MAX_FORMAT_DEPTH:
            raise BadRequest(f"a JSON schema may be nested {MAX_FORMAT_DEPTH} levels deep", param="response_format")
        if size > MAX_FORMAT_CHARACTERS:
            raise BadRequest(
                f"a JSON schema may have at most {MAX_FORMAT_CHARACTERS} characters", param="response_format"
            )


def _texts(schema: object) -> Iterator[tuple[int, str]]:
    """All keys and values of a JSON value, with the depth of the object or array around them. Without recursion; together no
    more text than the JSON has."""
    left: list[tuple[int, object]] = [(0, schema)]
    while left:
        depth, value = left.pop()
        if isinstance(value, Mapping):
            for name, inner in value.items():
                yield depth, str(name)
                left.append((depth + 1, inner))
        elif isinstance(value, list | tuple):
            yield depth, ""
            left.extend((depth + 1, inner) for inner in value)
        else:
            yield depth - 1, value if isinstance(value, str) else ""


def _in_lark(output: StructuredOutput) -> StructuredOutput:
    """The grammar in Lark's syntax, if it is in EBNF. Raises BadRequest."""
    rules = len(_RULES.findall(_checked(output.value, "grammar"))) if output.kind == "grammar" else 0
    if not rules:
        return output
    if rules > _MAX_RULES:  # the time to convert them grows with their square
        raise BadRequest(f"grammar may have {_MAX_RULES} rules in EBNF", param="structured_outputs")
    try:
        return replace(output, value=gbnf_to_lark(str(output.value)))
    except Exception as error:  # noqa: BLE001 - it has no class for all of its errors
        raise BadRequest(f"the grammar is refused: {_first_line(str(error))}", param="structured_outputs") from None


def _checked(value: object, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name} must be a text that is not empty", param="structured_outputs")
    if len(value) > MAX_FORMAT_CHARACTERS:
        raise BadRequest(f"{name} may have at most {MAX_FORMAT_CHARACTERS} characters", param="structured_outputs")
    if _deepest(value) > _MAX_BRACKETS:
        raise BadRequest(f"{name} may have brackets {_MAX_BRACKETS} levels deep", param="structured_outputs")
    return value


def _deepest(text: str) -> int:
    """How deep brackets are nested at most. Quoted brackets count too."""
    depth = deepest = 0
    for char in text:
        if char in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif char in ")]}":
            depth = max(depth - 1, 0)
    return deepest


def _choice(output: StructuredOutput) -> str:
    choices = output.value
    if not isinstance(choices, tuple | list) or not choices or not all(isinstance(one, str) for one in choices):
        raise BadRequest("choice must be a list of texts that is not empty", param="structured_outputs")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_FORMAT_CHARACTERS:
        raise BadRequest(
            f"choice may have at most {MAX_CHOICES} texts and {MAX_FORMAT_CHARACTERS} characters",
            param="structured_outputs",
        )
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(one) for one in choices)))


_WRITERS: Final[dict[str, Callable[[StructuredOutput], str]]] = {
    "json_object": lambda output: _from_schema({"type": "object"}, strict=True),
    "json_schema": _json_schema,
    "regex": lambda output: str(LLMatcher.grammar_from_regex(_checked(output.value, "regex"))),
    "choice": _choice,
    "grammar": lambda output: str(LLMatcher.grammar_from_lark(_checked(output.value, "grammar"))),
}


# Seconds until a grammar is refused. The limits below end a compilation soon after.
_MAX_SECONDS: Final = 10.0
# The compiler calls itself once for each level of a schema, references included.
_STACK_BYTES: Final = 256 << 20
_MAX_WAITING: Final = 32
# Compilations after which free memory is given back.
_RELEASE_EVERY: Final = 16


class _Room(NamedTuple):
    """Fuel for a compilation, and the bytes that a grammar takes which was compiled with it."""

    fuel: int
    bytes: int


_SMALL, _LARGE = _Room(20_000, 2 << 20), _Room(250_000, 24 << 20)
# Bytes that the lexer's states add to a grammar while texts are generated, and to that of its endings.
_GROWTH, _CLOSING_GROWTH = 16 << 20, 4 << 20
# Bytes of the grammars that are kept for the next request with the same, and of large ones in use. A tenant may use half of
# the latter.
KEPT_BYTES: Final = 512 << 20
LARGE_BYTES: Final = 1 << 30


def _limits(room: _Room, states: int, step_fuel: int) -> LLParserLimits:
    """A state of the lexer takes up to 2 kB; sequences of one grammar share them. A step of 10,000 items takes up to 20 ms,
    and all sequences of the batch wait for it."""
    return LLParserLimits(
        initial_lexer_fuel=room.fuel,
        step_lexer_fuel=step_fuel,
        max_lexer_states=states,
        max_grammar_size=100_000,
        step_max_items=10_000,
        verbose_errors=False,
    )


_LIMITS: Final = {room: _limits(room, 8_000, 50_000) for room in (_SMALL, _LARGE)}
_CLOSING_LIMITS: Final = {room: _limits(room, 2_000, 20_000) for room in (_SMALL, _LARGE)}
_OUT_OF_FUEL: Final = re.compile("too many expressions|initial lexer configuration .* too big")


class CompiledOutput:
    """A grammar that is ready for use. Sequences get copies of its state at the start of a text.

    Attributes:
        compiled_bytes: that it takes before a text is generated, at most.
        most_bytes: that it can take.
        has_failed: a sequence has come to a limit of its states, which all of them share. The next request needs another.
    """

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, closing: ClosingPath | None, room: _Room = _SMALL
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._closing = closing
        self._lock = threading.Lock()
        self.is_large = room is _LARGE
        self.has_failed = False
        self.compiled_bytes = room.bytes * (1 if closing is None else 2)
        self.most_bytes = self.compiled_bytes + _GROWTH + (0 if closing is None else _CLOSING_GROWTH)

    def open(self) -> Constraint:
        """The constraint of a new sequence."""
        with self._lock:
            closing = None if self._closing is None else self._closing.copy()
            return Constraint(self._vocabulary, self._matcher.deep_copy(), closing, self._failed)

    def _failed(self) -> None:
        self.has_failed = True


_Key = tuple[bytes, bytes]


class GrammarCompiler:
    """Compiles for one model, one at a time, on a thread of its own. From any thread.

    A grammar is found again while a sequence uses it, and after that while it is kept. Tenants share neither: how long a
    compilation takes says nothing about the formats of others.

    Args:
        load: makes the model's vocabulary, at the first use.
        kept_bytes: limit of the grammars that are kept, whose tenants have equal shares.
        large_bytes: limit of large grammars in use.
    """

    def __init__(
        self, load: Callable[[], Vocabulary], *, kept_bytes: int = KEPT_BYTES, large_bytes: int = LARGE_BYTES
    ) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._kept: Bounded[_Key, CompiledOutput] = Bounded(
            kept_bytes, size=lambda _, compiled: compiled.most_bytes, owner=lambda key: key[0]
        )
        self._used: WeakValueDictionary[_Key, CompiledOutput] = WeakValueDictionary()
        self._large_bytes = large_bytes
        self._changed = threading.Condition()  # guards all of it; nothing is compiled under it
        self._compiling = False
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._has_thread = False
        finalize(self, self._work.put, None)
        self._waiting = 0

    def compile(self, output: StructuredOutput, tenant: bytes = b"") -> CompiledOutput:
        """Blocks for milliseconds to seconds, unless it was compiled before. Raises BadRequest for a grammar that is wrong,
        too large or too complex, QueueFull if too many wait or are in use."""
        output = _in_lark(output)
        text = grammar_text(output)
        key = tenant, sha256(msgspec.json.encode((text, output.complete))).digest()
        with self._changed:
            found = self._kept.use(key) or self._used.get(key)
            if found is not None and not found.has_failed:
                return found
            if self._waiting >= _MAX_WAITING:
                raise QueueFull("too many grammars wait to be compiled; try again")
            self._waiting += 1
        try:
            compiled = self._compile_apart(text, output, tenant)
        finally:
            with self._changed:
                self._waiting -= 1
        with self._changed:
            self._kept[key] = self._used[key] = compiled
        return compiled

    def _compile_apart(self, text: str, output: StructuredOutput, tenant: bytes) -> CompiledOutput:
        """On a thread with a large stack, which has its turn until it ends, whether someone waits for it or not."""
        future: Future[CompiledOutput] = Future()

        def work() -> None:
            complete(future, lambda: self._build(text, output, tenant))
            with self._changed:
                self._compiling = False
                self._changed.notify()

        with self._changed:
            if not self._changed.wait_for(lambda: not self._compiling, _MAX_SECONDS):
                raise QueueFull("other grammars are being compiled; try again")
            self._compiling, first, self._has_thread = True, not self._has_thread, True
        if first:
            _start(partial(_run, self._work))
        self._work.put(work)
        try:
            return future.result(_MAX_SECONDS)
        except TimeoutError:
            raise BadRequest(
                f"the grammar takes more than {_MAX_SECONDS:g} s to compile", param="structured_outputs"
            ) from None

    def _build(self, text: str, output: StructuredOutput, tenant: bytes) -> CompiledOutput:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        vocabulary, room = self._vocabulary, _SMALL
        matcher, error = _matcher(vocabulary, text, room)
        if _OUT_OF_FUEL.search(error):
            del matcher
            self._check_large(tenant)
            self._work.put(release_unused)  # when this one is done, and perhaps refused
            room = _LARGE
            matcher, error = _matcher(vocabulary, text, room)
        if error:
            del matcher  # an error has its frames, and so what they have, until the collector comes
        if _OUT_OF_FUEL.search(error):
            raise BadRequest(
                f"the grammar is too large: its expressions may take {room.bytes >> 20} MiB when they are compiled; "
                "repeat less, or allow any number of repetitions",
                param="structured_outputs",
            )
        if error:
            raise BadRequest(f"the grammar is refused: {_first_line(error)}", param="structured_outputs")
        if matcher.is_stopped() and not matcher.is_accepting():
            raise BadRequest("no text matches the grammar", param="structured_outputs")
        if output.kind == "grammar":
            text = LLMatcher.grammar_from_lark(vocabulary.grammar_in_bytes(str(output.value)))
        closing = _closing(vocabulary, text, examples(output), room) if output.complete else None
        return CompiledOutput(vocabulary, matcher, closing, room)

    def _check_large(self, tenant: bytes) -> None:
        """Room for one more large grammar. Those that are only kept make room."""
        more = 2 * _LARGE.bytes
        with self._changed:
            large = [(key, one.compiled_bytes) for key, one in self._used.items() if one.is_large]
            if sum(size for _, size in large) + more > self._large_bytes:
                for key, _ in large:
                    self._kept.pop(key, None)
                large = [(key, one.compiled_bytes) for key, one in self._used.items() if one.is_large]
        own = sum(size for (owner, _), size in large if owner == tenant)
        if sum(size for _, size in large) + more > self._large_bytes or own + more > self._large_bytes // 2:
            raise QueueFull("too many large grammars are in use; try again, or ask for a smaller one")


def _matcher(vocabulary: Vocabulary, text: str, room: _Room) -> tuple[LLMatcher, str]:
    """A matcher, and why it cannot be used. Its lexer, which copies share, may say that only when a token follows."""
    matcher = LLMatcher(vocabulary.tokens, text, log_level=0, limits=_LIMITS[room])
    allowed = int.from_bytes(matcher.compute_bitmask(), "little")
    if matcher.is_error() or matcher.is_stopped() or not allowed:
        return matcher, matcher.get_error()
    copy = matcher.deep_copy()
    copy.consume_token((allowed & -allowed).bit_length() - 1)
    return matcher, matcher.get_error() or copy.get_error()


def _closing(vocabulary: Vocabulary, text: str, found: Sequence[bytes], room: _Room) -> ClosingPath | None:
    matcher = LLMatcher(vocabulary.bytes, text, log_level=0, limits=_CLOSING_LIMITS[room])
    if matcher.is_error():
        return None
    closing = ClosingPath(matcher, vocabulary.end_symbol, found)
    return None if closing.path is None else closing


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0][:300]


def _run(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    """All compilations of a compiler, as long as it exists. One thread, because malloc gives each an arena of its own, which
    does not use what is free in others. Grammars leave holes between what stays, so these are given back from time to time."""
    compiled = 0
    while (work := queue.get()) is not None:
        work()
        del work
        compiled += 1
        if compiled >= _RELEASE_EVERY:
            compiled = 0
            release_unused()


def _start(work: Callable[[], None]) -> None:
    """Run on a new thread with a large stack. Threads that start at the same time get one too, which is harmless."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        background_thread(work, "grammar", bound=False)
    finally:
        threading.stack_size(before)
