"""Compiles what a text must match, with limits on size, memory and time, and keeps the last results."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from typing import Final

import msgspec
from llguidance import LLMatcher, LLParserLimits

from foreword.engine.request import StructuredOutput
from foreword.engine.structured.closing import ClosingPath
from foreword.engine.structured.constraint import Constraint
from foreword.engine.structured.examples import examples
from foreword.engine.structured.grammar import grammar_text
from foreword.engine.structured.vocabulary import Vocabulary
from foreword.errors import BadRequest, QueueFull

_MAX_KEPT: Final = 32
# Seconds until a grammar is refused. The limits below end a compilation soon after.
_MAX_SECONDS: Final = 10.0
# The compiler calls itself once for each level of a schema, references included.
_STACK_BYTES: Final = 256 << 20
_MAX_WAITING: Final = 32
# A state of the lexer takes up to 2 kB; sequences of one grammar share them. A step of 10,000 items takes up to 20 ms, and all
# sequences of the batch wait for it.
_LIMITS: Final = LLParserLimits(
    max_lexer_states=8_000, max_grammar_size=100_000, step_max_items=10_000, verbose_errors=False
)


class CompiledOutput:
    """A grammar that is ready for use. Sequences get copies of its state at the start of a text."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, closing: ClosingPath | None) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._closing = closing
        self._lock = threading.Lock()

    def open(self) -> Constraint:
        """The constraint of a new sequence."""
        with self._lock:
            closing = None if self._closing is None else self._closing.copy()
            return Constraint(self._vocabulary, self._matcher.deep_copy(), closing)


class GrammarCompiler:
    """Compiles for one model, one at a time, on a thread of its own. From any thread.

    Args:
        load: makes the model's vocabulary, at the first use.
    """

    def __init__(self, load: Callable[[], Vocabulary]) -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._kept: OrderedDict[bytes, CompiledOutput] = OrderedDict()
        self._lock = threading.Lock()
        self._turn = threading.Semaphore()
        self._waiting = 0

    def compile(self, output: StructuredOutput) -> CompiledOutput:
        """Blocks for milliseconds to seconds, unless it was compiled before. Raises BadRequest for a grammar that is wrong or
        too complex, QueueFull if too many wait."""
        text = grammar_text(output)
        key = msgspec.json.encode((text, output.complete))
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._kept.move_to_end(key)
                return kept
            if self._waiting >= _MAX_WAITING:
                raise QueueFull("too many grammars wait to be compiled; try again")
            self._waiting += 1
        try:
            compiled = self._compile_apart(text, output)
        finally:
            with self._lock:
                self._waiting -= 1
        with self._lock:
            self._kept[key] = compiled
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile_apart(self, text: str, output: StructuredOutput) -> CompiledOutput:
        """On a thread with a large stack, which has its turn until it ends, whether someone waits for it or not."""
        future: Future[CompiledOutput] = Future()

        def work() -> None:
            try:
                future.set_result(self._build(text, output))
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                future.set_exception(error)
            finally:
                self._turn.release()

        if not self._turn.acquire(timeout=_MAX_SECONDS):
            raise QueueFull("other grammars are being compiled; try again")
        _start(work)
        try:
            return future.result(_MAX_SECONDS)
        except TimeoutError:
            raise BadRequest(
                f"the grammar takes more than {_MAX_SECONDS:g} s to compile", param="structured_outputs"
            ) from None

    def _build(self, text: str, output: StructuredOutput) -> CompiledOutput:
        if self._vocabulary is None:
            self._vocabulary = self._load()
        vocabulary = self._vocabulary
        matcher = LLMatcher(vocabulary.tokens, text, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()
        if matcher.is_error():
            raise BadRequest(f"the grammar is refused: {_first_line(matcher.get_error())}", param="structured_outputs")
        if matcher.is_stopped() and not matcher.is_accepting():
            raise BadRequest("no text matches the grammar", param="structured_outputs")
        if output.kind == "grammar":
            text = LLMatcher.grammar_from_lark(vocabulary.grammar_in_bytes(str(output.value)))
        closing = _closing(vocabulary, text, examples(output)) if output.complete else None
        return CompiledOutput(vocabulary, matcher, closing)


def _closing(vocabulary: Vocabulary, text: str, found: Sequence[bytes]) -> ClosingPath | None:
    matcher = LLMatcher(vocabulary.bytes, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        return None
    closing = ClosingPath(matcher, vocabulary.end_symbol, found)
    return None if closing.path is None else closing


def _first_line(error: str) -> str:
    return error.strip().partition("\n")[0][:300]


def _start(work: Callable[[], None]) -> None:
    """Run on a new thread with a large stack. Threads that start at the same time get one too, which is harmless."""
    before = threading.stack_size(_STACK_BYTES)
    try:
        threading.Thread(target=work, name="foreword-grammar", daemon=True).start()
    finally:
        threading.stack_size(before)
