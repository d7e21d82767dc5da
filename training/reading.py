"""Examples that teach a very small model to answer from its prompt: documented code or a manual, then questions.

An answer is copied from the text: the first sentence of a name's documentation, or its signature.  Half of the texts are
put together from the entries of many modules under exchanged names, so that only the text in the prompt tells the answer.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

Message = dict[str, str]

INTRODUCTIONS: Final = (
    "Answer questions about this module.",
    "Answer questions about this module.",
    "Answer questions about this code.",
    "Answer questions about this manual.",
    "You are a helpful assistant. Use this text.",
    "",
)
EXPLAIN: Final = (
    "What does {name} do?",
    "What does {name} do?",
    "And what does {name} do?",
    "What is {name} for?",
    "What is {name}?",
    "What does {name} mean?",
    "Explain {name}.",
    "Describe {name}.",
    "Tell me about {name}.",
    "What does `{name}` do?",
)
SIGNATURE: Final = (
    "Which arguments does {name} take?",
    "What is the signature of {name}?",
    "How is {name} called?",
    "Show me the signature of {name}.",
)
SOURCE: Final = ("Show me {name}.", "How does {name} begin?")
CHARACTERS_PER_TOKEN: Final = 3.0
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`'\"*(])|:\s*$")


@dataclass(frozen=True)
class Entry:
    """A documented definition: `start` and `end` are the characters of its text up to the docstring's end."""

    name: str
    signature: str
    sentence: str
    body: str
    start: int
    end: int


@dataclass(frozen=True)
class Text:
    """The text of a prompt with the entries that can be asked about, each with its source up to the sentence's end."""

    content: str
    entries: tuple[Entry, ...]
    manual: bool = False


def first_sentence(doc: str) -> str:
    """The first sentence of a docstring on one line, or nothing if it is not fit for an answer."""
    paragraph = " ".join(inspect.cleandoc(doc).split("\n\n")[0].split())
    sentence = _SENTENCE_END.split(paragraph)[0].strip()
    fit = 12 <= len(sentence) <= 160 and sentence.isascii() and sentence.count(" ") >= 2
    return sentence if fit and "->" not in sentence and ">>>" not in sentence else ""


def entries_of(text: str) -> list[Entry]:
    """The documented definitions of a source file whose signature stands on one line, in the order of the text."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))
    return sorted(_entries(tree, lines, offsets), key=lambda entry: entry.start)


def _entries(tree: ast.AST, lines: Sequence[str], offsets: Sequence[int]) -> Iterator[Entry]:
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        signature, doc = lines[node.lineno - 1].strip(), ast.get_docstring(node)
        sentence = first_sentence(doc or "")
        if not sentence or not signature.endswith(":") or len(signature) > 100 or node.name.startswith("__"):
            continue
        last = node.body[0].end_lineno or node.lineno
        body = textwrap.dedent("".join(lines[last : min(node.end_lineno or last, last + 6)])).rstrip()
        yield Entry(node.name, signature, sentence, body, offsets[node.lineno - 1], offsets[last])


def excerpt(text: str, entries: Sequence[Entry], limit: int, rng: random.Random) -> Text | None:
    """About `limit` characters of a file, at a random place, with the entries that lie in them and are unambiguous."""
    if not entries:
        return None
    begin = max(0, rng.choice(entries).start - rng.randrange(limit))
    if begin and rng.random() < 0.5:
        begin = text.find("\n", begin) + 1
    inside = [entry for entry in entries if begin <= entry.start and entry.end <= begin + limit]
    names = [entry.name for entry in inside]
    asked = tuple(entry for entry in inside if names.count(entry.name) == 1)
    return Text(text[begin : begin + limit], asked) if asked else None


def assembled(pool: Sequence[Entry], limit: int, rng: random.Random) -> Text:
    """About `limit` characters of definitions, or of a manual, from entries of many modules, names exchanged."""
    manual, asked, size, parts = rng.random() < 0.35, [], 0, []
    style, names = rng.randrange(5), set()
    indent, filler = rng.choice(("", "", "    ")), rng.random()
    while size < limit:
        entry, other = rng.choice(pool), rng.choice(pool)
        if rng.random() < 0.7:
            head = re.sub(rf"\b{re.escape(entry.name)}\b", other.name, entry.signature, count=1)
            entry = replace(entry, name=other.name, signature=head)
        if entry.name in names:
            continue
        names.add(entry.name)
        part = _manual_part(entry, style, rng) if manual else _code_part(entry, indent, filler, rng)
        parts.append(part)
        size += len(part)
        asked.append(entry)
    return Text("".join(parts).rstrip(), tuple(asked), manual)


def _code_part(entry: Entry, indent: str, filler: float, rng: random.Random) -> str:
    tail = rng.choice(("", "", "\n", f"\n\n    {rng.choice(entry.sentence.split())} is used here."))
    opening = '"""' if rng.random() < 0.85 else '"""\n    '
    doc = textwrap.fill(entry.sentence, rng.randint(50, 74), initial_indent=" " * 7, subsequent_indent="    ").lstrip()
    body = f"\n{textwrap.indent(entry.body, '    ')}" if rng.random() < filler else "\n    pass"
    part = f'{entry.signature}\n    {opening}{doc}{tail}"""{body}'
    return f"{textwrap.indent(part, indent)}\n{rng.choice(chr(10) * 2 + chr(10))}"


def _manual_part(entry: Entry, style: int, rng: random.Random) -> str:
    heads = (
        f"{entry.name}\n    ",
        f"  {entry.name} (default: {rng.choice(('True', 'False', 'None', '0', '70'))})\n    ",
        f"``{entry.name}``\n    ",
        f".. function:: {entry.name}\n\n    ",
        f"{entry.name} : {rng.choice(('int', 'str', 'bool', 'list'))}\n    ",
    )
    text = textwrap.fill(entry.sentence, rng.randint(50, 74), initial_indent="    ", subsequent_indent="    ").lstrip()
    return f"{heads[style]}{text}\n{rng.choice(('', chr(10)))}"


def question(entry: Entry, manual: bool, rng: random.Random) -> tuple[str, str]:
    """A question about an entry and its answer."""
    draw = 0.0 if manual else rng.random()
    if draw < 0.7:
        return rng.choice(EXPLAIN).format(name=entry.name), entry.sentence
    if draw < 0.9:
        return rng.choice(SIGNATURE).format(name=entry.name), entry.signature
    return rng.choice(SOURCE).format(name=entry.name), f'{entry.signature}\n    """{entry.sentence}'


def conversation(text: Text, turns: int, rng: random.Random) -> list[Message]:
    """A conversation about a text: a system message, or the begin of the first question, then questions and answers."""
    introduction = rng.choice(INTRODUCTIONS)
    content = f"{introduction}\n\n{text.content}" if introduction else text.content
    order = list(text.entries)
    rng.shuffle(order)
    pairs = [question(entry, text.manual, rng) for entry in (order * 3)[:turns]]
    if rng.random() < 0.85:
        messages = [{"role": "system", "content": content}]
    else:
        messages, pairs[0] = [], (f"{content}\n\n{pairs[0][0]}", pairs[0][1])
    for asked, answer in pairs:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return messages
