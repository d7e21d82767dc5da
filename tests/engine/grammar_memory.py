"""Measures what compiled grammars take, with glibc's count of what it has given out, in a process with nothing beside:

    python grammar_memory.py

Prints a line of JSON for each grammar: bytes after compilation, and after texts were generated until a limit was met, with what
`CompiledOutput` says that it takes at most, or the error.
"""

from __future__ import annotations

import ctypes
import gc
import json
from pathlib import Path
from random import Random

from llguidance import LLMatcher

import foreword
from foreword.engine.structured.compiler import GrammarCompiler
from foreword.engine.structured.vocabulary import Vocabulary
from foreword.errors import BadRequest
from foreword.tokens.structured_output import StructuredOutput

FOLDER = Path(foreword.__file__).parent / "models" / "stdlib-nano"
STEPS = 1500
SLOW_STEPS = 20  # of grammars whose steps take long

LARGE = {
    "type": "object",
    "properties": {f"p{i}": {"type": "string", "pattern": f"^[a-z]{{1,{30 + i}}}$"} for i in range(150)},
    "required": [f"p{i}" for i in range(150)],
}
# The texts that make most states, or states of the largest expressions: the letters that a text is made of.
GRAMMARS: dict[str, tuple[StructuredOutput, str]] = {
    "object": (StructuredOutput("json_object"), ""),
    "large schema": (StructuredOutput("json_schema", LARGE), ""),
    "values": (StructuredOutput("json_schema", {"enum": [f"{i:x}" for i in range(12_000)]}), ""),
    "repeated": (StructuredOutput("regex", "b{10000}"), "b"),
    "repeated often": (StructuredOutput("regex", "b{25000}"), "b"),
    "repeated too often": (StructuredOutput("regex", "b{100000}"), "b"),
    "quadratic": (StructuredOutput("regex", "[ab]*a[ab]{5000}"), "a"),
    "two automata": (StructuredOutput("regex", "([ab]*a[ab]{100}c|[ab]*b[ab]{99}d)*"), "ab"),
    "nested": (StructuredOutput("regex", "(.*a.{1,3000}b.{1,3000}c){3}"), ""),
    "letters": (StructuredOutput("regex", r"(\p{L}\d){1,3000}"), ""),
}


class _Info(ctypes.Structure):
    _fields_ = [(f"n{number}", ctypes.c_size_t) for number in range(10)]


def given_out() -> int:
    """Bytes that malloc has given out."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Info
    info = libc.mallinfo2()
    return int(info.n7 + info.n4)


def _generate(matcher: LLMatcher, letters: str, draw: Random, vocabulary: Vocabulary) -> None:
    wanted = [vocabulary.tokens.greedy_tokenize(letter)[0] for letter in letters]
    for _ in range(SLOW_STEPS if letters == "b" else STEPS):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            return
        allowed = [token for token in wanted if mask >> token & 1]
        allowed = allowed or [token for token in range(vocabulary.size) if mask >> token & 1]
        if not allowed or not matcher.consume_token(draw.choice(allowed)):
            return


def main() -> None:
    size = json.loads((FOLDER / "config.json").read_text())["vocab_size"]
    vocabulary = Vocabulary((FOLDER / "tokenizer.json").read_text(), size, [0])
    compiler = GrammarCompiler(lambda: vocabulary, kept_bytes=0)
    compiler.compile(StructuredOutput("choice", ("a", "b")))
    for name, (output, letters) in GRAMMARS.items():
        before, line = given_out(), {"name": name}
        try:
            compiled = compiler.compile(output)
        except BadRequest as error:
            print(json.dumps(line | {"error": error.message}), flush=True)
            continue
        line |= {"compiled": given_out() - before, "compiled at most": compiled.compiled_bytes}
        for seed in range(2):
            _generate(compiled.open().matcher, letters, Random(seed), vocabulary)
        print(json.dumps(line | {"used": given_out() - before, "at most": compiled.most_bytes}), flush=True)
        del compiled


if __name__ == "__main__":
    main()
