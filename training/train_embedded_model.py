"""Train the small embedded model, ``stdlib-nano``, from scratch on Python's own standard library.

The script needs no download: the corpus is the running interpreter's standard library (Python Software
Foundation licence), read as text and parsed with :mod:`ast`, never imported.  It

1. collects source files, the language reference in ``pydoc_data/topics.py`` and chat examples made from docstrings;
   plain text and conversations whose answers stand in the prompt (``reading.py``) also take the sources of well-known
   packages that are installed;
2. trains a byte-level BPE tokenizer, unless one lies in the output folder;
3. trains a Llama-architecture causal language model within a budget of minutes (or of steps), from weights whose
   attention looks things up (``attention_start.py``); on a GPU where there is one, on a CPU otherwise;
4. writes a folder which ``transformers`` loads, with a report of losses and a model card.

``evaluate_answers.py`` measures the answers.

Run ``python training/train_embedded_model.py --help`` for the options.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import math
import multiprocessing
import os
import platform
import random
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import reading
import torch
from attention_start import prepare_attention
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

TokenArray = npt.NDArray[np.uint16]
Message = dict[str, str]

SPECIAL_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID, ASSISTANT_ID = 0, 1, 2, 5
MAX_POSITIONS: Final = 8192
ROPE_THETA: Final = 1e9  # most rotary pairs turn by less than a radian in 2,500 tokens: they compare contents
PLAIN_WEIGHT: Final = 0.5  # of a token of plain text, against a token of an answer
FIRST_WEIGHT: Final = 4.0  # of an answer's first token, for which its place in the prompt must be found
ADAM_SHARE: Final = 0.4  # of the learning rate
# Module and distribution; those that are installed are read. Their licences are BSD, MIT, Apache-2.0 and Matplotlib's.
PACKAGES: Final = {
    "numpy": "numpy", "torch": "torch", "transformers": "transformers", "scipy": "scipy", "pandas": "pandas",
    "sklearn": "scikit-learn", "matplotlib": "matplotlib", "networkx": "networkx", "aiohttp": "aiohttp",
    "requests": "requests", "httpx": "httpx", "click": "click", "rich": "rich", "fsspec": "fsspec",
    "_pytest": "pytest", "jinja2": "jinja2", "tqdm": "tqdm",
}  # fmt: skip
LIBRARY_WEIGHT: Final = 4  # a pass over plain text reads the library so often, and each package once

# Tools and calls are written as in Hermes and Qwen. Without tools the template adds no text around the contents.
CHAT_TEMPLATE: Final = (
    "{%- macro text(content) -%}\n"
    "    {%- if content is string -%}\n"
    "        {{- content -}}\n"
    "    {%- elif content -%}\n"
    "        {%- for part in content -%}{{- part['text'] -}}{%- endfor -%}\n"
    "    {%- endif -%}\n"
    "{%- endmacro -%}\n"
    "{%- macro call(function) -%}\n"
    "    {{- '<tool_call>\\n{\"name\": ' ~ (function['name'] | tojson) ~ ', \"arguments\": ' -}}\n"
    "    {%- if function['arguments'] is string -%}\n"
    "        {{- function['arguments'] -}}\n"
    "    {%- else -%}\n"
    "        {{- function['arguments'] | tojson -}}\n"
    "    {%- endif -%}\n"
    "    {{- '}\\n</tool_call>' -}}\n"
    "{%- endmacro -%}\n"
    "{{- bos_token -}}\n"
    "{%- set first_is_system = messages and messages[0]['role'] in ['system', 'developer'] -%}\n"
    "{%- if tools -%}\n"
    "    {{- '<|system|>' -}}\n"
    "    {%- if first_is_system -%}{{- text(messages[0]['content']) ~ '\\n\\n' -}}{%- endif -%}\n"
    "    {{- '# Tools\\n\\nThese functions can be called:\\n<tools>' -}}\n"
    "    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}\n"
    "    {{- '\\n</tools>\\n\\nA call is a JSON object with name and arguments:\\n<tool_call>\\n' -}}\n"
    '    {{- \'{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\' ~ eos_token -}}\n'
    "{%- endif -%}\n"
    "{%- for message in messages -%}\n"
    "    {%- if tools and loop.first and first_is_system -%}{%- continue -%}\n"
    "    {%- elif message['role'] in ['system', 'developer'] -%}{{- '<|system|>' -}}\n"
    "    {%- elif message['role'] in ['user', 'tool'] -%}{{- '<|user|>' -}}\n"
    "    {%- elif message['role'] == 'assistant' -%}{{- '<|assistant|>' -}}\n"
    "    {%- else -%}{{- raise_exception('Unsupported role: ' ~ message['role']) -}}\n"
    "    {%- endif -%}\n"
    "    {%- if message['role'] == 'tool' -%}\n"
    "        {{- '<tool_response>\\n' ~ text(message['content']) ~ '\\n</tool_response>' -}}\n"
    "    {%- else -%}\n"
    "        {{- text(message['content']) -}}\n"
    "    {%- endif -%}\n"
    "    {%- for one in message['tool_calls'] or [] -%}\n"
    "        {{- '\\n' if message['content'] or not loop.first else '' -}}\n"
    "        {{- call(one['function'] or one) -}}\n"
    "    {%- endfor -%}\n"
    "    {{- eos_token -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}\n"
)

EXCLUDED_FOLDERS: Final = frozenset(
    {
        "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "encodings", "ensurepip",
        "turtledemo", "tkinter", "distutils", "msilib", "lib-dynload", "__pycache__", "__phello__", "_pyrepl",
    }
)  # fmt: skip
EXCLUDED_FILES: Final = frozenset(
    {"turtle.py", "_pydecimal.py", "html/entities.py", "pydoc_data/topics.py", "this.py", "__hello__.py"}
)
ALWAYS_HELD_OUT: Final = frozenset({"textwrap.py"})
HELD_OUT_ONE_IN: Final = 20

CORE_MODULES: Final = (
    "json", "os.path", "random", "shutil", "functools", "heapq", "bisect", "statistics", "tempfile", "glob",
    "fnmatch", "copy", "contextlib", "base64", "secrets", "shlex", "pprint", "string",
)  # fmt: skip
MODULE_ALIASES: Final = {"posixpath": "os.path"}

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant who knows the Python standard library.",
    "You answer questions about Python briefly.",
    "You are stdlib-nano, a small model which explains Python's standard library.",
)
EXPLAIN_QUESTIONS: Final = (
    "What does {name} do?",
    "Explain {name}.",
    "What is {name} for?",
    "Describe {name}.",
    "Tell me about {name}.",
    "What does `{name}` do in Python?",
)
SIGNATURE_QUESTIONS: Final = (
    "Show me the signature of {name}.",
    "What is the signature of {name}?",
    "Which arguments does {name} take?",
)
BODY_QUESTIONS: Final = ("Write the body of `{signature}`.", "Write {name}.", "Show me the source of {name}.")
MODULE_QUESTIONS: Final = (
    "What is the {name} module?",
    "What is the module {name} for?",
    "Describe the {name} module.",
)
TOPIC_QUESTIONS: Final = ("Explain {name} in Python.", "What does the language reference say about {name}?")
SMALL_TALK: Final = (
    ("Hello", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hello!", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Hi", "Hello! Ask me about a module, a class or a function of Python's standard library."),
    ("Who are you?", "I am stdlib-nano, a very small language model trained on Python's standard library."),
    ("What are you?", "I am stdlib-nano, a very small language model trained on Python's standard library."),
    ("What can you do?", "I can write text that looks like Python and describe parts of its standard library."),
    ("How are you?", "I am ready. Ask me about a module, a class or a function of Python's standard library."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome."),
    ("Goodbye", "Goodbye!"),
)


@dataclass(frozen=True)
class Phase:
    """One stretch of training: until which share of the budget, and at which sequence length.

    `plain`, `chats` and `excerpts` are shares of the rows; the others are assembled texts with questions.
    """

    until: float
    length: int
    plain: float
    chats: float
    excerpts: float


PHASES: Final = (
    Phase(0.30, 256, 0.40, 0.06, 0.10),
    Phase(0.60, 512, 0.40, 0.06, 0.20),
    Phase(0.85, 1024, 0.40, 0.05, 0.30),
    Phase(1.00, 2560, 0.36, 0.04, 0.40),
)


@dataclass(frozen=True)
class Item:
    """A documented function, method or class found in a source file."""

    module: str
    name: str
    signature: str
    doc: str
    source: str
    public: bool

    @property
    def qualified(self) -> str:
        """Return the dotted name a reader would type."""
        return f"{self.module}.{self.name}"


@dataclass
class Module:
    """One source file of the corpus with what was extracted from it."""

    path: str
    name: str
    text: str
    doc: str
    items: list[Item] = field(default_factory=list)


@dataclass
class Corpus:
    """Texts of one split: plain documents and conversations."""

    plain: list[str] = field(default_factory=list)
    chats: list[list[Message]] = field(default_factory=list)


# --------------------------------------------------------------------------------------------- the corpus


def is_wanted(relative: Path) -> bool:
    """Tell whether a file of the library belongs to the corpus."""
    if EXCLUDED_FOLDERS.intersection(relative.parts) or relative.as_posix() in EXCLUDED_FILES:
        return False
    return not relative.name.startswith("_sysconfigdata") and not relative.parts[0].startswith("config-")


def is_held_out(path: str) -> bool:
    """Tell whether a file belongs to the fixed validation split (by a hash of its path, so it never moves)."""
    if path in ALWAYS_HELD_OUT:
        return True
    if module_name(path) in CORE_MODULES or path.endswith("__init__.py"):
        return False
    return int(hashlib.sha256(path.encode()).hexdigest(), 16) % HELD_OUT_ONE_IN == 0


def module_name(path: str) -> str:
    """Turn ``json/__init__.py`` into ``json`` and ``posixpath.py`` into ``os.path``."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return MODULE_ALIASES.get(name, name)


def read_text(path: Path) -> str | None:
    """Return a UTF-8 source file's text, or nothing when it is empty or in another encoding."""
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError):
        return None
    return text if text.strip() else None


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Return the ``def`` or ``class`` line of a definition, on one line."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases}):" if bases else f"class {node.name}:"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {node.name}({ast.unparse(node.args)}){returns}:"


def iterate_items(tree: ast.AST, module: str, text: str, prefix: str = "") -> Iterator[Item]:
    """Yield the documented definitions of a module, classes before their methods."""
    lines = text.splitlines(keepends=True)
    for node in getattr(tree, "body", []):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = prefix + node.name
        doc = ast.get_docstring(node)
        if doc and len(doc) >= 12:
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
            public = not any(part.startswith("_") for part in name.split("."))
            yield Item(module, name, signature_of(node), doc, source, public)
        if isinstance(node, ast.ClassDef):
            yield from iterate_items(node, module, text, name + ".")


def load_module(root: Path, relative: Path) -> Module | None:
    """Read and parse one source file."""
    text = read_text(root / relative)
    if text is None:
        return None
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return None
    path = relative.as_posix()
    name = module_name(path)
    return Module(path, name, text, ast.get_docstring(tree) or "", list(iterate_items(tree, name, text)))


def collect_modules(root: Path) -> list[Module]:
    """Return the wanted modules of the standard library, in a fixed order."""
    relatives = sorted(path.relative_to(root) for path in root.rglob("*.py"))
    loaded = (
        load_module(root, relative) for relative in tqdm(relatives, "reading", disable=None) if is_wanted(relative)
    )
    return [module for module in loaded if module is not None]


def load_topics(root: Path) -> dict[str, str]:
    """Return the language reference's topics that the standard library carries for ``help()``."""
    text = read_text(root / "pydoc_data" / "topics.py")
    if text is None:
        return {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            return dict(ast.literal_eval(node.value))
    return {}


def shorten(doc: str, limit: int) -> str:
    """Keep whole paragraphs of a docstring up to about ``limit`` characters, and at least the first."""
    kept: list[str] = []
    for paragraph in inspect.cleandoc(doc).split("\n\n"):
        if kept and sum(map(len, kept)) + len(paragraph) > limit:
            break
        kept.append(paragraph.rstrip())
    answer = "\n\n".join(kept).strip()
    return answer if len(answer) <= 2 * limit else answer[: 2 * limit].rsplit("\n", 1)[0]


def fenced(code: str) -> str:
    """Return code in a Markdown fence."""
    return f"```python\n{code.rstrip()}\n```"


def turn(question: str, answer: str) -> list[Message]:
    """Return one question and its answer as two messages."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def maybe_system(rng: random.Random, share: float = 0.35) -> list[Message]:
    """Return a system message in a share of the calls."""
    return [{"role": "system", "content": rng.choice(SYSTEM_PROMPTS)}] if rng.random() < share else []


def item_turn(item: Item, rng: random.Random, name: str | None = None, core: bool = False) -> list[Message]:
    """Ask one question about a definition: mostly its meaning, at times its signature or its source."""
    name = name or item.qualified
    draw = rng.random()
    if draw < (0.75 if core else 0.6):
        return turn(rng.choice(EXPLAIN_QUESTIONS).format(name=name), shorten(item.doc, 350))
    if draw < (1.0 if core else 0.8) or not 1 < item.source.count("\n") < 30:
        return turn(rng.choice(SIGNATURE_QUESTIONS).format(name=name), item.signature)
    question = rng.choice(BODY_QUESTIONS).format(name=name, signature=item.signature)
    return turn(question, fenced(item.source))


def single_chats(module: Module, rng: random.Random) -> Iterator[list[Message]]:
    """Yield one conversation of a single question for each definition of a module."""
    for item in module.items:
        yield maybe_system(rng) + item_turn(item, rng)
    if len(module.doc) >= 20:
        question = rng.choice(MODULE_QUESTIONS).format(name=module.name)
        yield maybe_system(rng) + turn(question, shorten(module.doc, 500))


def series_chat(module: Module, rng: random.Random) -> list[Message]:
    """Return a conversation of several questions in a row about one module."""
    public = [item for item in module.items if item.public]
    picked = rng.sample(public, min(len(public), rng.randint(2, 5)))
    messages = maybe_system(rng)
    if module.doc and rng.random() < 0.5:
        messages += turn(rng.choice(MODULE_QUESTIONS).format(name=module.name), shorten(module.doc, 300))
    for item in picked:
        messages += item_turn(item, rng, item.name if rng.random() < 0.3 else None)
    return messages


def core_chats(modules: list[Module], rng: random.Random, repeats: int) -> Iterator[list[Message]]:
    """Yield the repeated conversations about a few well-known modules and the small talk."""
    for module in (module for module in modules if module.name in CORE_MODULES):
        for item in (item for item in module.items if item.public and item.name.count(".") == 0):
            for _ in range(repeats):
                yield maybe_system(rng) + item_turn(item, rng, core=True)
        for _ in range(repeats if module.doc else 0):
            question = rng.choice(MODULE_QUESTIONS).format(name=module.name)
            yield maybe_system(rng) + turn(question, shorten(module.doc, 250))
    for _ in range(repeats):
        for question, answer in SMALL_TALK:
            yield maybe_system(rng) + turn(question, answer)


def topic_chats(topics: dict[str, str], rng: random.Random) -> Iterator[list[Message]]:
    """Yield one conversation for each topic of the language reference."""
    for name, text in sorted(topics.items()):
        body = "\n\n".join(text.split("\n\n")[1:])
        yield turn(rng.choice(TOPIC_QUESTIONS).format(name=name.replace("-", " ")), shorten(body, 500))


def collect_texts(root: Path) -> list[tuple[str, str]]:
    """Return path and text of the wanted source files of the library and of the installed packages, the library first."""
    paths = [(path.relative_to(root), path) for path in sorted(root.rglob("*.py")) if is_wanted(path.relative_to(root))]
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder.parent)
            if is_wanted(relative) and "models" not in relative.parts and path.stat().st_size < 200_000:
                paths.append((relative, path))
    texts = ((relative.as_posix(), read_text(path)) for relative, path in tqdm(paths, "reading", disable=None))
    return [(path, text) for path, text in texts if text is not None]


def is_of_package(path: str) -> bool:
    """Tell whether a path of `collect_texts` lies in a package."""
    return path.split("/")[0] in PACKAGES


def build_corpora(root: Path, seed: int, repeats: int) -> tuple[Corpus, Corpus, list[Module]]:
    """Return the training corpus, the held-out corpus and the held-out modules."""
    rng = random.Random(seed)
    modules = collect_modules(root)
    splits = Corpus(), Corpus()
    for module in modules:
        split = splits[is_held_out(module.path)]
        split.plain.append(module.text)
        split.chats.extend(single_chats(module, rng))
        if sum(item.public for item in module.items) >= 2:
            split.chats.extend(series_chat(module, rng) for _ in range(1 + len(module.items) // 12))
    topics = load_topics(root)
    splits[0].plain.extend(text for _, text in sorted(topics.items()))
    splits[0].chats.extend(topic_chats(topics, rng))
    splits[0].chats.extend(core_chats([module for module in modules if not is_held_out(module.path)], rng, repeats))
    return *splits, [module for module in modules if is_held_out(module.path)]


# ------------------------------------------------------------------------------------------ the tokenizer


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, whose encoding of any text decodes to that very text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = list(dict.fromkeys(message["content"] for chat in corpus.chats for message in chat))
    tokenizer.train_from_iterator(corpus.plain + answers, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A <|bos|> $B:1", special_tokens=[("<|bos|>", BOS_ID)]
    )
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of an earlier run, if there is one: token counts in documents and tests stay."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


def render_chat(messages: list[Message]) -> str:
    """Render a conversation as the chat template does."""
    return "<|bos|>" + "".join(f"<|{message['role']}|>{message['content']}<|eos|>" for message in messages)


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[TokenArray]:
    """Encode rendered documents, special tokens included as written."""
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.array(encoding.ids, dtype=np.uint16) for encoding in encodings]


def encode_corpus(tokenizer: Tokenizer, corpus: Corpus) -> tuple[list[TokenArray], list[TokenArray]]:
    """Encode a corpus's plain documents and conversations."""
    plain = encode_documents(tokenizer, [f"<|bos|>{text}<|eos|>" for text in corpus.plain])
    return plain, encode_documents(tokenizer, [render_chat(chat) for chat in corpus.chats])


# ------------------------------------------------------------------------------------------- the training


class WindowSampler:
    """Endless, seeded sampler of fixed-length windows over shuffled, concatenated documents."""

    def __init__(self, documents: list[TokenArray], seed: int) -> None:
        """Start with no windows; the first draw makes them."""
        self.documents = documents
        self.rng = np.random.default_rng(seed)
        self.length = 0
        self.pending: list[TokenArray] = []

    def draw(self, length: int) -> TokenArray:
        """Return one window; each pass over the documents has its own order."""
        if length != self.length or not self.pending:
            self._refill(length)
        return self.pending.pop()

    def _refill(self, length: int) -> None:
        order = self.rng.permutation(len(self.documents))
        stream = np.concatenate([self.documents[index] for index in order])
        count = len(stream) // length
        windows = stream[: count * length].reshape(count, length)
        self.pending = [windows[index] for index in self.rng.permutation(count)]
        self.length = length


class ReadingSource:
    """Endless, seeded source of conversations whose answers stand in the text of their prompt."""

    def __init__(self, texts: list[str], tokenizer: Tokenizer, seed: int, processes: int) -> None:
        """Find the documented definitions of the texts."""
        with multiprocessing.get_context("fork").Pool(processes) as pool:
            found = list(zip(texts, pool.map(reading.entries_of, texts, chunksize=32), strict=True))
        self.files = [(text, entries) for text, entries in found if entries]
        self.weights = list(itertools.accumulate(math.sqrt(len(entries)) for _, entries in self.files))
        self.pool = [entry for _, entries in self.files for entry in entries]
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def draw(self, length: int, excerpt: bool) -> TokenArray:
        """Return the tokens of one conversation, cut at `length`."""
        while True:
            share = self.rng.uniform(0.4, 0.7) if length < 1000 else self.rng.uniform(0.6, 0.85)
            limit = int(share * length * reading.CHARACTERS_PER_TOKEN)
            text = self._excerpt(limit) if excerpt else reading.assembled(self.pool, limit, self.rng)
            if text is None:
                continue
            ids = encode_documents(self.tokenizer, [render_chat(reading.conversation(text, 16, self.rng))])[0][:length]
            if np.count_nonzero(ids == ASSISTANT_ID) >= 2:
                return ids

    def _excerpt(self, limit: int) -> reading.Text | None:
        text, entries = self.rng.choices(self.files, cum_weights=self.weights)[0]
        return reading.excerpt(text, entries, limit, self.rng)


def answer_weights(ids: TokenArray) -> npt.NDArray[np.float32]:
    """Return the weights of a conversation's tokens: those of answers, with their end tokens, the first ones most."""
    weight, weights = 0.0, np.zeros(len(ids), dtype=np.float32)
    for index, token in enumerate(ids):
        weights[index] = weight
        weight = FIRST_WEIGHT if token == ASSISTANT_ID else min(weight, 1.0) if token != EOS_ID else 0.0
    return weights


class Batch(NamedTuple):
    """Token ids, their positions and the weight of each token's loss, each of shape (rows, tokens)."""

    ids: torch.Tensor
    positions: torch.Tensor
    weights: torch.Tensor


class BatchSource(torch.utils.data.IterableDataset[Batch]):
    """Mixes windows of plain documents and of conversations with conversations about a text; draws their positions.

    Endless. Iterated in several processes, each draws other batches. `progress` is the share of the budget that is used up.
    """

    def __init__(
        self, plain: list[TokenArray], chats: list[TokenArray], readings: ReadingSource, seed: int, tokens: int
    ) -> None:
        """Draw about `tokens` tokens per batch."""
        self.documents = plain, chats
        self.readings = readings
        self.tokens = tokens
        self.progress = multiprocessing.get_context("fork").Value("d", 0.0)
        self._seed(seed)

    def _seed(self, seed: int) -> None:
        """Give each kind of document a sampler with a seed of its own."""
        self.seed = seed
        self.plain, self.chats = (WindowSampler(kind, seed + number) for number, kind in enumerate(self.documents))
        self.rng = np.random.default_rng(seed + 2)
        self.readings.rng = random.Random(seed + 3)

    def __iter__(self) -> Iterator[Batch]:
        """Draw batches of the phase that training is in."""
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self._seed(self.seed + 10 * (worker.id + 1))
        while True:
            yield self.draw(phase_at(self.progress.value))

    def draw(self, phase: Phase) -> Batch:
        """Return one batch. In conversations about a text, only answers have a loss."""
        shape = rows, length = (max(1, self.tokens // phase.length), phase.length)
        ids, weights = np.full(shape, PAD_ID, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        for row in range(rows):
            kind = self.rng.random()
            if kind < phase.plain + phase.chats:
                drawn = self._window(length, kind < phase.plain)
                weights[row, : len(drawn)] = PLAIN_WEIGHT
            else:
                drawn = self.readings.draw(length, kind < phase.plain + phase.chats + phase.excerpts)
                weights[row, : len(drawn)] = answer_weights(drawn)
            ids[row, : len(drawn)] = drawn
        positions = np.stack([self._positions(length) for _ in range(rows)])
        return Batch(torch.from_numpy(ids), torch.from_numpy(positions), torch.from_numpy(weights))

    def _window(self, length: int, plain: bool) -> TokenArray:
        """Return a window that begins as a prompt does: conversations with their first token, every other piece of plain text
        with that of a document, though it is from the middle of one."""
        if not plain:
            drawn = self.chats.draw(length)
            return drawn[int(np.argmax(drawn == BOS_ID)) :]
        drawn = self.plain.draw(length)
        return np.concatenate(([np.uint16(BOS_ID)], drawn[1:])) if self.rng.random() < 0.5 else drawn

    def _positions(self, length: int) -> npt.NDArray[np.int64]:
        """Return consecutive positions, at times with one random skip.

        The skip (as in "PoSE", positional skip-wise training) shows the model all relative distances up to the
        largest position, although the windows themselves are short.
        """
        positions = np.arange(length, dtype=np.int64)
        if self.rng.random() < 0.25:
            positions[int(self.rng.integers(1, length)) :] += int(self.rng.integers(0, MAX_POSITIONS - length))
        return positions


def name_tokens(tokenizer: Tokenizer) -> tuple[list[int], tuple[int, int]]:
    """Return the tokens that stand before a name, and which token starts like which (see `prepare_attention`)."""
    words = ("def", " def", "class", " class", " does", " is", "Explain", "Describe", " of", "out", " me", " `")
    encoded = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
    opening = tokenizer.encode(' """', add_special_tokens=False).ids
    return [ids[0] for ids in encoded if len(ids) == 1], (ASSISTANT_ID, opening[-1])


def build_model(tokenizer: Tokenizer, seed: int) -> LlamaForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    model = LlamaForCausalLM(config)
    prepare_attention(model, ROPE_THETA, *name_tokens(tokenizer))
    return model


def final_hidden(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the normalised hidden states of all positions, with plain causal attention even over skipped positions."""
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    normed_out: torch.Tensor = model.model.norm(hidden)
    return normed_out


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the loss at every position but the last."""
    logits = model.lm_head(final_hidden(model, ids, positions)[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the weighted mean of a batch's losses; logits are computed only where a loss has a weight."""
    hidden = final_hidden(model, batch.ids, batch.positions)[:, :-1]
    weights = batch.weights[:, 1:]
    wanted = weights > 0
    losses = torch.nn.functional.cross_entropy(
        model.lm_head(hidden[wanted]).float(), batch.ids[:, 1:][wanted], reduction="none"
    )
    return (losses * weights[wanted]).sum() / weights.sum()


class Muon:
    """Momentum whose steps are orthogonalised by a Newton-Schulz iteration; for the matrices of the layers.

    It learns more per token than AdamW. Matrices of one shape are stepped together. A step's root mean square is a
    fifth of the rate, as a step of AdamW has.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], momentum: float = 0.95, decay: float = 0.1) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            rows, columns = sorted(parameter.shape)
            self.groups.setdefault((rows, columns), []).append(parameter)
        self.moments = {
            shape: torch.zeros(len(group), *shape, device=group[0].device) for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Take one step."""
        for shape, group in self.groups.items():
            gradients = [parameter.grad for parameter in group if parameter.grad is not None]
            stacked = torch.stack([g if tuple(g.shape) == shape else g.mT for g in gradients])
            moment = self.moments[shape].lerp_(stacked, 1 - self.momentum)
            update = orthogonalised(stacked.lerp(moment, self.momentum)) * (0.2 * math.sqrt(shape[1]))
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay)
                parameter.sub_(change if tuple(parameter.shape) == shape else change.mT, alpha=rate)
                parameter.grad = None


def orthogonalised(matrices: torch.Tensor) -> torch.Tensor:
    """Bring the singular values of a stack of matrices near one (five quintic Newton-Schulz iterations)."""
    x: torch.Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def build_optimizers(model: LlamaForCausalLM) -> tuple[Muon, torch.optim.AdamW]:
    """Return Muon for the layers' matrices, and AdamW without weight decay for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), eps=1e-9, weight_decay=0.0, fused=True)


def learning_rate(progress: float, peak: float) -> float:
    """Return the rate of a warmup-stable-decay schedule at a share of the budget."""
    if progress < 0.02:
        return peak * (0.05 + 0.95 * progress / 0.02)
    if progress < 0.45:
        return peak
    return peak * max(0.02, 1.0 - (progress - 0.45) / 0.55)


@dataclass
class Budget:
    """How far training has come: by steps when a number is given, by `clock` in seconds otherwise."""

    minutes: float
    steps: int
    clock: Callable[[], float]
    started: float = field(init=False)

    def __post_init__(self) -> None:
        """Start the clock."""
        self.started = self.clock()

    def progress(self, step: int) -> float:
        """Return the share of the budget which is used up."""
        return step / self.steps if self.steps else (self.clock() - self.started) / (60.0 * self.minutes)


@dataclass
class TrainingStats:
    """Counts of the training loop."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    last_loss: float = 0.0


def phase_at(progress: float) -> Phase:
    """Return the phase of a share of the budget."""
    return next((phase for phase in PHASES if progress < phase.until), PHASES[-1])


def train(
    model: LlamaForCausalLM, source: BatchSource, budget: Budget, peak: float, device: torch.device, workers: int
) -> TrainingStats:
    """Train until the budget is used up. `workers` processes draw the batches; 0: this one."""
    muon, adam = build_optimizers(model)
    stats = TrainingStats()
    model.train()
    on_gpu = device.type == "cuda"
    loader = torch.utils.data.DataLoader(source, batch_size=None, num_workers=workers, pin_memory=on_gpu)
    with tqdm(total=1000, unit="permille", desc="training", mininterval=5.0) as bar:
        for batch in loader:
            progress = budget.progress(stats.steps)
            if progress >= 1.0:
                break
            source.progress.value = progress
            rate = learning_rate(progress, peak)
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = weighted_loss(model, Batch(*(part.to(device, non_blocking=True) for part in batch)))
            torch.autograd.backward(loss)
            muon.step(rate)
            adam.param_groups[0]["lr"] = ADAM_SHARE * rate
            adam.step()
            adam.zero_grad(set_to_none=True)
            record_step(stats, batch.ids, loss, bar, progress)
    stats.seconds = budget.clock() - budget.started
    return stats


def record_step(stats: TrainingStats, ids: torch.Tensor, loss: torch.Tensor, bar: Any, progress: float) -> None:
    """Update the counts, and at times the loss and the progress bar, after one step."""
    stats.steps += 1
    stats.tokens += ids.numel()
    if stats.steps % 20 == 1:
        stats.last_loss = loss.item() if stats.steps == 1 else 0.8 * stats.last_loss + 0.2 * loss.item()
        bar.update(int(progress * 1000) - bar.n)
        bar.set_postfix(step=stats.steps, loss=f"{stats.last_loss:.3f}", length=ids.shape[1], refresh=False)


# ----------------------------------------------------------------------------------------- the evaluation


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, documents: list[TokenArray], length: int, limit: int) -> float:
    """Return the mean loss per token over at most ``limit`` tokens, each document cut in windows from its start."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            ids = torch.from_numpy(document[start : start + length].astype(np.int64))[None].to(model.device)
            if ids.shape[1] < 2:
                continue
            losses = next_token_loss(model, ids, torch.arange(ids.shape[1], device=model.device)[None])
            total, count = total + float(losses.sum()), count + losses.numel()
            if count >= limit:
                return total / count
    return total / max(1, count)


@torch.inference_mode()
def loss_by_position(model: LlamaForCausalLM, documents: list[TokenArray], length: int) -> dict[str, float]:
    """Return the mean loss in stretches of one long sequence of held-out text (does a long prompt hold up?)."""
    stream = np.concatenate(documents)[:length].astype(np.int64)
    ids = torch.from_numpy(stream)[None].to(model.device)
    losses = next_token_loss(model, ids, torch.arange(len(stream), device=model.device)[None])
    return {
        f"{start}-{min(start + 1024, len(stream))}": round(float(losses[start : start + 1024].mean()), 4)
        for start in range(0, len(losses), 1024)
    }


def figures(loss: float) -> dict[str, float]:
    """Return a loss with its perplexity."""
    return {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 2)}


def evaluate(
    folder: Path, train_ids: list[list[TokenArray]], held_ids: list[list[TokenArray]], device: torch.device
) -> dict[str, Any]:
    """Measure the saved model (with its bfloat16 weights) on both splits."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    rng = np.random.default_rng(0)
    sample = [train_ids[0][index] for index in rng.permutation(len(train_ids[0]))]
    return {
        "training_source": figures(mean_loss(model, sample, 1024, 60_000)),
        "held_out_source": figures(mean_loss(model, held_ids[0], 1024, 200_000)),
        "held_out_chat": figures(mean_loss(model, held_ids[1], 1024, 60_000)),
        "held_out_loss_by_position": loss_by_position(model, held_ids[0], MAX_POSITIONS),
    }


# --------------------------------------------------------------------------------------- the output folder


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file with a final newline."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer with its chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    configuration: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": "<|eos|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", configuration)


def save_model(model: LlamaForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16 with the model's and the generation's configuration."""
    model.cpu().bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    generation = {"bos_token_id": BOS_ID, "eos_token_id": [EOS_ID], "pad_token_id": PAD_ID}
    write_json(folder / "generation_config.json", generation)


CARD: Final = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
---

# stdlib-nano

A very small Llama-architecture language model, trained from scratch in {minutes:.1f} minutes ({trained_on}). It ships
with the package so that every feature of the serving engine can be tried, tested and measured on any machine without a
download.

## Architecture

`LlamaForCausalLM` with {parameters:,} parameters (tied embeddings): {layers} layers, hidden size {hidden},
{heads} attention heads and {kv_heads} key/value heads (grouped-query attention) of size {head_dim}, feed-forward
size {intermediate}, {vocab} tokens, up to {positions} positions. Weights are stored in bfloat16 and were trained in
float32, on a GPU with products in bfloat16. A token's keys and values take {kv_bytes:,} bytes in float32.

The tokenizer is a byte-level BPE: encoding any text and decoding it gives that text back. `<|bos|>` starts a
document or a conversation, `<|eos|>` ends a document or a turn, and `<|system|>`, `<|user|>` and `<|assistant|>`
start turns. The chat template adds no text around the contents, so the rendering of a conversation's first messages
is a prefix of the rendering of the whole, in characters and in tokens. It writes tools and calls in the format of
Hermes and Qwen. The model was not trained to call tools: it does so where the request forces it.

## Data

Python's standard library as CPython {python} installs it (Python Software Foundation licence version 2; a few
modules carry the further notices listed in Python's "Licenses and Acknowledgements"):

- source files, without tests, IDLE, lib2to3, codec tables, tkinter, turtle, distutils, generated tables and
  third-party packages;
- the language reference that `pydoc_data/topics.py` carries;
- conversations generated from signatures, docstrings and function bodies (single questions, and several questions in
  a row). Conversations about {core} well-known modules and ten lines of small talk occur {repeats} times per pass, in
  different wordings;
- **conversations whose answers stand in the prompt**: an excerpt of a module, or definitions and entries of a manual put
  together from many modules under exchanged names, then questions such as "What does NAME do?" and "Which arguments does
  NAME take?". The answer is the first sentence of the documentation, or the signature. Only answers have a loss.

Plain text and the last kind of conversations also come from the sources of these packages, under BSD, MIT, Apache-2.0
and Matplotlib's licences:

{packages}

{held_files} source files of the library (chosen by a hash of their path, and `textwrap.py`) are held out for validation;
neither the tokenizer nor the model saw them, nor one in twenty files of the packages. Training consumed {seen_tokens:,}
tokens in {steps:,} steps.

Attention starts from the pattern of induction heads instead of from noise (`training/attention_start.py`), so that a model
of this size learns to copy from its prompt within minutes.

## Loss

| text | loss (nats per token) | perplexity |
|---|---|---|
{rows}

Mean loss by position in one sequence of {positions} held-out tokens (several files one after the other):

| positions | loss |
|---|---|
{position_rows}

Uniform guessing would be a loss of {uniform:.2f}.

## Answers

Questions "What does NAME do?" about excerpts of modules that are held out, `python training/evaluate_answers.py`
(greedy, float32):

| files, length of the excerpt | questions | answer is the docstring's first sentence | begins with its first five words |
|---|---|---|---|
{answer_rows}

## What it is good for

Tests, examples, demonstrations and measurements of serving: real weights, a real tokenizer and a chat template whose
renderings share long prefixes. It answers what stands in the prompt by copying it, and continues code in the style of
Python's library. Training mixed in randomly skipped positions, so that distances up to {positions} occurred, although
most windows were of 256 to 1024 tokens.

## What it is not good for

Anything that needs facts, reasoning or fluent text. What does not stand in the prompt it makes up; at times it takes a
neighbouring definition for the one that was asked about. It knows no other subject than
Python's library and no other language than English. Do not rely on its answers.

## Training it again

    python training/train_embedded_model.py --minutes {budget_minutes:g} --threads {threads}
    python training/evaluate_answers.py --report

The seed is fixed ({seed}). With `--minutes` the schedule follows the time (on a CPU, the CPU time), so the number of
steps, and with it the weights, depends on the machine; with `--steps {steps}` it follows the step count instead. The
versions of the packages are in `training_report.json`.

## Licence

Weights, tokenizer and this card: Apache-2.0. Training data: licences as above; the data itself is not included.
"""


def render_card(config: Any, report: dict[str, Any]) -> str:
    """Fill the model card with a run's figures."""
    options = report["options"]
    labels = {
        "training_source": "training source files",
        "held_out_source": "held-out source files",
        "held_out_chat": "conversations about held-out files",
    }
    losses = report["evaluation"]
    rows = [f"| {text} | {losses[key]['loss']:.3f} | {losses[key]['perplexity']:.1f} |" for key, text in labels.items()]
    by_position = [f"| {span} | {loss:.3f} |" for span, loss in losses["held_out_loss_by_position"].items()]
    answer_rows = [
        f"| {name} | {row['questions']} | {row['equal']:.0%} | {row['first_five_words']:.0%} |"
        for name, row in report.get("answers", {}).items()
    ]
    return CARD.format(
        minutes=report["training"]["seconds"] / 60,
        trained_on=report["trained_on"],
        threads=options["threads"],
        parameters=report["parameters"],
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        positions=config.max_position_embeddings,
        kv_bytes=2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
        python=report["python"],
        core=len(CORE_MODULES),
        packages=textwrap.fill(
            ", ".join(f"{name} {version}" for name, version in report["packages"].items()) + ".", 118
        ),
        repeats=options["repeats"],
        held_files=report["held_out_files"],
        seen_tokens=report["training"]["tokens"],
        steps=report["training"]["steps"],
        rows="\n".join(rows),
        position_rows="\n".join(by_position),
        answer_rows="\n".join(answer_rows) or "| not measured | | | |",
        uniform=math.log(config.vocab_size),
        budget_minutes=options["minutes"],
        seed=options["seed"],
    )


def write_report(folder: Path, report: dict[str, Any]) -> None:
    """Write the report of a run and the model card that it gives."""
    write_json(folder / "training_report.json", report)
    (folder / "README.md").write_text(render_card(LlamaConfig.from_pretrained(folder), report), encoding="utf-8")


# ------------------------------------------------------------------------------------------------ running


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    default_output = Path(__file__).resolve().parents[1] / "foreword" / "models" / "stdlib-nano"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=default_output, help="folder to write the model to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--minutes", type=float, default=4.0, help="time of the training loop; on a CPU, CPU time")
    parser.add_argument(
        "--tokens", type=int, default=0, help="tokens per step (default: 65,536 on a GPU, 3,072 on a CPU)"
    )
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of by the clock")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; on a GPU also processes that draw batches")
    parser.add_argument("--seed", type=int, default=20240229, help="seed of weights, data order and examples")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens in the vocabulary")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--repeats", type=int, default=25, help="repeats of the conversations about core modules")
    return parser.parse_args()


def prepare_process(threads: int, device: torch.device) -> None:
    """Bound the threads and, on a CPU, let PyTorch's choice of algorithms be repeatable."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    if device.type == "cpu":
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def main() -> None:
    """Train, save and measure the model."""
    arguments = parse_arguments()
    device, on_gpu = torch.device(arguments.device), arguments.device != "cpu"
    prepare_process(arguments.threads, device)
    library = Path(sysconfig.get_path("stdlib"))
    training, held_out, held_modules = build_corpora(library, arguments.seed, arguments.repeats)
    tokenizer = load_tokenizer(arguments.output) or train_tokenizer(training, arguments.vocab_size)
    texts = [(path, text) for path, text in collect_texts(library) if not is_held_out(path)]
    training.plain = training.plain * LIBRARY_WEIGHT + [text for path, text in texts if is_of_package(path)]
    train_ids, held_ids = (list(encode_corpus(tokenizer, corpus)) for corpus in (training, held_out))
    sizes = [sum(map(len, documents)) for documents in (*train_ids, *held_ids)]
    print("tokens: training source {}, chat {}; held-out source {}, chat {}".format(*sizes), flush=True)
    readings = ReadingSource([text for _, text in texts], tokenizer, arguments.seed + 3, arguments.threads)
    print(f"texts to read from: {len(readings.files)} files, {len(readings.pool)} documented definitions", flush=True)

    model = build_model(tokenizer, arguments.seed).to(device)
    tokens = arguments.tokens or (65_536 if on_gpu else 3072)
    source = BatchSource(train_ids[0], train_ids[1], readings, arguments.seed, tokens)
    budget = Budget(arguments.minutes, arguments.steps, time.monotonic if on_gpu else time.process_time)
    workers = arguments.threads if on_gpu else 0
    stats = train(model, source, budget, arguments.learning_rate, device, workers)

    arguments.output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, arguments.output)
    save_model(model, arguments.output)
    report: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "packages": {
            name: importlib.metadata.version(name)
            for module, name in PACKAGES.items()
            if importlib.util.find_spec(module) is not None
        },
        "training": {**asdict(stats), "seconds": round(stats.seconds, 1), "last_loss": round(stats.last_loss, 4)},
        "training_corpus_tokens": sizes[0] + sizes[1],
        "training_source_tokens": sizes[0],
        "training_chat_tokens": sizes[1],
        "held_out_source_tokens": sizes[2],
        "held_out_files": len(held_modules),
        "held_out_paths": [module.path for module in held_modules],
        "options": {key: value for key, value in vars(arguments).items() if key != "output"},
        "phases": [asdict(phase) for phase in PHASES],
        "evaluation": evaluate(arguments.output, train_ids, held_ids, device),
        "trained_on": torch.cuda.get_device_name() if on_gpu else "CPU",
    }
    write_report(arguments.output, report)
    print(json.dumps(report["evaluation"], indent=2))


if __name__ == "__main__":
    main()
