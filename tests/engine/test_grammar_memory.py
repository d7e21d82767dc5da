"""Compiled grammars are kept within a limit in bytes, of which each tenant has a share; what they take is not undercounted."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

import foreword
from foreword.engine.structured.compiler import CompiledOutput, GrammarCompiler
from foreword.engine.structured.vocabulary import Vocabulary
from foreword.errors import BadRequest
from foreword.request_errors import QueueFull
from foreword.tokens.structured_output import StructuredOutput

FOLDER = Path(foreword.__file__).parent / "models" / "stdlib-nano"
SMALL, LARGE = 24 << 20, 68 << 20  # what is counted at most for one of each kind


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    size = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    return Vocabulary((FOLDER / "tokenizer.json").read_text(), size, [0])


def small(number: int) -> StructuredOutput:
    return StructuredOutput("regex", f"[a-z]{{1,9}}{number}")


def large(number: int) -> StructuredOutput:
    return StructuredOutput("json_schema", {"enum": [f"{i:x}" for i in range(number, number + 8_000)]})


def is_kept(compiler: GrammarCompiler, output: StructuredOutput, tenant: bytes = b"") -> bool:
    """Whether the next request would find it: two results are one object."""
    gc.collect()
    seen: list[str] = []
    build = compiler._build

    def noted(*arguments: object) -> CompiledOutput:
        seen.append("compiled")
        return build(*arguments)  # type: ignore[arg-type]

    compiler._build = noted  # type: ignore[method-assign]
    try:
        compiler.compile(output, tenant)
    finally:
        compiler._build = build  # type: ignore[method-assign]
    return not seen


@pytest.mark.extended
def test_what_is_counted_is_not_less_than_what_is_taken() -> None:
    """In a process of its own, over grammars that take much when they are compiled, or when texts are generated."""
    script = Path(__file__).with_name("grammar_memory.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=300)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    measured = [line for line in lines if "error" not in line]
    assert len(measured) >= 8 and max(line["used"] for line in measured) > 8 << 20, lines
    for line in measured:
        assert line["compiled"] <= line["compiled at most"] and line["used"] <= line["at most"], line
    [refused] = [line for line in lines if "error" in line]
    assert refused["name"] == "repeated too often" and "too large" in refused["error"]


def test_a_tenant_cannot_push_out_what_others_keep(vocabulary: Vocabulary) -> None:
    """Ann keeps her few grammars while Bob asks for many; of his own the oldest leave."""
    compiler = GrammarCompiler(lambda: vocabulary, kept_bytes=6 * SMALL)
    for number in range(3):
        compiler.compile(small(number), b"ann")
    for number in range(20):
        compiler.compile(small(number), b"bob")
    assert all(is_kept(compiler, small(number), b"ann") for number in range(3))
    assert all(is_kept(compiler, small(number), b"bob") for number in range(17, 20))
    assert not is_kept(compiler, small(0), b"bob")


def test_tenants_do_not_share_what_is_compiled(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.compile(small(1), b"ann")
    assert not is_kept(compiler, small(1), b"bob")


def test_a_grammar_in_use_is_found_though_it_is_not_kept(vocabulary: Vocabulary) -> None:
    """And is gone when nothing uses it."""
    compiler = GrammarCompiler(lambda: vocabulary, kept_bytes=SMALL // 2)
    constraint = compiler.compile(small(1)).open()
    assert is_kept(compiler, small(1))
    del constraint
    assert not is_kept(compiler, small(1))


def test_a_failed_grammar_is_compiled_anew(vocabulary: Vocabulary) -> None:
    """The states of its lexer, which sequences share, had come to their limit: the next sequence would fail at once."""
    compiler = GrammarCompiler(lambda: vocabulary)
    output = StructuredOutput("regex", "([ab]*a[ab]{100}c|[ab]*b[ab]{99}d)*", complete=False)
    letters = [vocabulary.tokens.greedy_tokenize(letter)[0] for letter in "ab"]
    first, draw = compiler.compile(output).open(), Random(1)
    for _ in range(4_000):
        first.matcher.compute_bitmask()
        if first.error() is not None:
            break
        first.accept(draw.choice(letters), 10_000)
    assert "too many states" in (first.error() or "")
    again = compiler.compile(output).open()
    again.matcher.compute_bitmask()
    assert again.error() is None and again.accept(letters[0], 10_000)


def test_large_grammars_in_use_are_limited(vocabulary: Vocabulary) -> None:
    """A tenant may use half of the limit; what is only kept makes room; a small one is always compiled."""
    compiler = GrammarCompiler(lambda: vocabulary, large_bytes=8 * (24 << 20))
    used = [compiler.compile(large(number), b"ann") for number in range(2)]
    assert all(one.is_large for one in used)
    with pytest.raises(QueueFull, match="large grammars are in use"):
        compiler.compile(large(2), b"ann")
    compiler.compile(small(2), b"ann")
    kept = compiler.compile(large(3), b"bob")
    del kept  # only kept from here on
    used.append(compiler.compile(large(4), b"bob"))
    used.append(compiler.compile(large(5), b"bob"))
    with pytest.raises(QueueFull):
        compiler.compile(large(6), b"eve")
    del used
    gc.collect()
    assert compiler.compile(large(7), b"eve").is_large


def test_a_grammar_beyond_the_limit_is_refused_before_its_memory_is_taken(vocabulary: Vocabulary) -> None:
    compiler = GrammarCompiler(lambda: vocabulary)
    for pattern in ("b{100000}", "b{250000}", "b{100000}c{100000}", "(b{400}){400}"):
        with pytest.raises(BadRequest, match="too large") as caught:
            compiler.compile(StructuredOutput("regex", pattern))
        assert caught.value.param == "structured_outputs"


def test_the_thread_of_a_compiler_ends_with_it(vocabulary: Vocabulary) -> None:
    """A compiler has one thread for all its grammars, which ends when the compiler is gone."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "foreword-grammar"}

    before = threads()  # of compilers of other tests, which may end at any time
    compiler = GrammarCompiler(lambda: vocabulary)
    compiler.compile(small(1))
    compiler.compile(small(2))
    [mine] = threads() - before
    del compiler
    gc.collect()
    mine.join(60)
    assert not mine.is_alive()
