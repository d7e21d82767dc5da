"""Train the small embedded model, ``stdlib-nano``, from scratch on Python's own standard library.

The script needs no download: the corpus is the running interpreter's standard library (Python Software
Foundation licence), read as text and parsed with :mod:`ast`, never imported.  It

1. collects source files, the language reference in ``pydoc_data/topics.py`` and chat examples made from docstrings;
2. trains a byte-level BPE tokenizer;
3. trains a Llama-architecture causal language model in float32 within a budget of minutes (or of steps);
4. writes a folder which ``transformers`` loads, with a report of losses and a model card.

Run ``python training/train_embedded_model.py --help`` for the options.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import math
import os
import platform
import random
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

TokenArray = npt.NDArray[np.uint16]
Message = dict[str, str]

SPECIAL_TOKENS: Final = ("<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
MAX_POSITIONS: Final = 8192

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
    """One stretch of training: until which share of the budget, at which sequence length and batch size."""

    until: float
    length: int
    batch: int
    chat_share: float
    compilable: bool = True


PHASES: Final = (
    Phase(0.35, 256, 8, 0.35),
    Phase(0.72, 512, 4, 0.40),
    Phase(0.93, 1024, 2, 0.50),
    Phase(1.00, 3072, 1, 0.50, compilable=False),
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
    for node in getattr(tree, "body", []):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        name = prefix + node.name
        doc = ast.get_docstring(node)
        if doc and len(doc) >= 12:
            source = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "")
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
        return turn(rng.choice(SIGNATURE_QUESTIONS).format(name=name), fenced(item.signature))
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


def reading_chat(module: Module, rng: random.Random, limit: int) -> list[Message] | None:
    """Return a conversation whose answers stand in code given in the system prompt or the first question."""
    items = [item for item in module.items if "." not in item.name or len(item.source) < 1500]
    start = rng.randrange(max(1, len(items)))
    chosen: list[Item] = []
    for item in items[start:]:
        if sum(len(other.source) for other in chosen) + len(item.source) > limit:
            break
        chosen.append(item)
    if len(chosen) < 2:
        return None
    code = fenced("\n\n".join(item.source.rstrip() for item in chosen))
    messages: list[Message] = []
    for item in rng.sample(chosen, min(len(chosen), rng.randint(1, 4))):
        if rng.random() < 0.5:
            messages += turn(rng.choice(EXPLAIN_QUESTIONS).format(name=item.name), shorten(item.doc, 200))
        else:
            messages += turn(rng.choice(SIGNATURE_QUESTIONS).format(name=item.name), fenced(item.signature))
    if rng.random() < 0.5:
        return [{"role": "system", "content": f"Answer questions about this code.\n\n{code}"}, *messages]
    messages[0] = {"role": "user", "content": f"{code}\n\n{messages[0]['content']}"}
    return messages


def reading_chats(module: Module, rng: random.Random) -> Iterator[list[Message]]:
    """Yield reading conversations for a module, more for a longer one, at several lengths."""
    for _ in range(min(8, len(module.items) // 6)):
        chat = reading_chat(module, rng, rng.choice((1000, 1800, 1800, 3000, 7000)))
        if chat is not None:
            yield chat


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
        split.chats.extend(reading_chats(module, rng))
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


class BatchSource:
    """Mixes windows of plain documents and of conversations, and draws their positions."""

    def __init__(self, plain: list[TokenArray], chats: list[TokenArray], seed: int) -> None:
        """Give each kind of document a sampler with a seed of its own."""
        self.plain = WindowSampler(plain, seed)
        self.chats = WindowSampler(chats, seed + 1)
        self.rng = np.random.default_rng(seed + 2)

    def draw(self, phase: Phase) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and position ids of one batch."""
        samplers = [self.chats if self.rng.random() < phase.chat_share else self.plain for _ in range(phase.batch)]
        ids = np.stack([sampler.draw(phase.length) for sampler in samplers]).astype(np.int64)
        positions = np.stack([self._positions(phase.length) for _ in range(phase.batch)])
        return torch.from_numpy(ids), torch.from_numpy(positions)

    def _positions(self, length: int) -> npt.NDArray[np.int64]:
        """Return consecutive positions, at times with one random skip.

        The skip (as in "PoSE", positional skip-wise training) shows the model all relative distances up to the
        largest position, although the windows themselves are short.
        """
        positions = np.arange(length, dtype=np.int64)
        if self.rng.random() < 0.25:
            positions[int(self.rng.integers(1, length)) :] += int(self.rng.integers(0, MAX_POSITIONS - length))
        return positions


def build_model(vocab_size: int, seed: int) -> LlamaForCausalLM:
    """Return an untrained model."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        rms_norm_eps=1e-5,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def next_token_loss(model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the loss at every position but the last, with plain causal attention even over skipped positions."""
    hidden = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(hidden, positions)
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
    logits = model.lm_head(model.model.norm(hidden[:, :-1]))
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")


def build_optimizer(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on the matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-9, fused=True)


def learning_rate(progress: float, peak: float) -> float:
    """Return the rate of a warmup-stable-decay schedule at a share of the budget."""
    if progress < 0.02:
        return peak * (0.05 + 0.95 * progress / 0.02)
    if progress < 0.5:
        return peak
    return peak * max(0.01, 1.0 - (progress - 0.5) / 0.5)


@dataclass
class Budget:
    """How far training has come: by steps when a number is given, by the clock otherwise."""

    minutes: float
    steps: int
    started: float = field(default_factory=time.monotonic)

    def progress(self, step: int) -> float:
        """Return the share of the budget which is used up."""
        if self.steps:
            return step / self.steps
        return (time.monotonic() - self.started) / (60.0 * self.minutes)


@dataclass
class TrainingStats:
    """What the training loop did."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    last_loss: float = 0.0


def phase_at(progress: float) -> Phase:
    """Return the phase of a share of the budget."""
    return next((phase for phase in PHASES if progress < phase.until), PHASES[-1])


def train(model: LlamaForCausalLM, source: BatchSource, budget: Budget, peak: float, compiled: bool) -> TrainingStats:
    """Train until the budget is used up."""
    eager = next_token_loss
    fast: Callable[..., torch.Tensor] = torch.compile(eager, dynamic=False) if compiled else eager
    optimizer = build_optimizer(model, peak)
    stats = TrainingStats()
    model.train()
    with tqdm(total=1000, unit="permille", desc="training", mininterval=5.0) as bar:
        while (progress := budget.progress(stats.steps)) < 1.0:
            phase = phase_at(progress)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(progress, peak)
            loss = (fast if phase.compilable else eager)(model, *source.draw(phase)).mean()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            record_step(stats, phase, loss.item(), bar, progress)
    stats.seconds = time.monotonic() - budget.started
    return stats


def record_step(stats: TrainingStats, phase: Phase, loss: float, bar: Any, progress: float) -> None:
    """Update the counts and the progress bar after one step."""
    stats.steps += 1
    stats.tokens += phase.length * phase.batch
    stats.last_loss = loss if stats.steps == 1 else 0.98 * stats.last_loss + 0.02 * loss
    bar.update(int(progress * 1000) - bar.n)
    bar.set_postfix(step=stats.steps, loss=f"{stats.last_loss:.3f}", length=phase.length, refresh=False)


# ----------------------------------------------------------------------------------------- the evaluation


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, documents: list[TokenArray], length: int, limit: int) -> float:
    """Return the mean loss per token over at most ``limit`` tokens, each document cut in windows from its start."""
    total, count = 0.0, 0
    for document in documents:
        for start in range(0, len(document) - 1, length):
            ids = torch.from_numpy(document[start : start + length].astype(np.int64))[None]
            if ids.shape[1] < 2:
                continue
            losses = next_token_loss(model, ids, torch.arange(ids.shape[1])[None])
            total, count = total + float(losses.sum()), count + losses.numel()
            if count >= limit:
                return total / count
    return total / max(1, count)


@torch.inference_mode()
def loss_by_position(model: LlamaForCausalLM, documents: list[TokenArray], length: int) -> dict[str, float]:
    """Return the mean loss in stretches of one long sequence of held-out text (does a long prompt hold up?)."""
    stream = np.concatenate(documents)[:length].astype(np.int64)
    losses = next_token_loss(model, torch.from_numpy(stream)[None], torch.arange(len(stream))[None])
    return {
        f"{start}-{min(start + 1024, len(stream))}": round(float(losses[start : start + 1024].mean()), 4)
        for start in range(0, len(losses), 1024)
    }


def figures(loss: float) -> dict[str, float]:
    """Return a loss with its perplexity."""
    return {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 2)}


def evaluate(folder: Path, train_ids: list[list[TokenArray]], held_ids: list[list[TokenArray]]) -> dict[str, Any]:
    """Measure the saved model (with its bfloat16 weights) on both splits."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
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
    model.bfloat16().save_pretrained(folder)
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

A very small Llama-architecture language model, trained from scratch in {minutes:.1f} minutes with {threads} CPU
thread(s). It ships with the package so that every feature of the serving engine can be tried, tested and measured on
any machine without a download.

## Architecture

`LlamaForCausalLM` with {parameters:,} parameters (tied embeddings): {layers} layers, hidden size {hidden},
{heads} attention heads and {kv_heads} key/value heads (grouped-query attention) of size {head_dim}, feed-forward
size {intermediate}, {vocab} tokens, up to {positions} positions. Weights are stored in bfloat16 and were trained in
float32. A token's keys and values take {kv_bytes:,} bytes in float32.

The tokenizer is a byte-level BPE: encoding any text and decoding it gives that text back. `<|bos|>` starts a
document or a conversation, `<|eos|>` ends a document or a turn, and `<|system|>`, `<|user|>` and `<|assistant|>`
start turns. The chat template adds no text around the contents, so the rendering of a conversation's first messages
is a prefix of the rendering of the whole, in characters and in tokens. It writes tools and calls in the format of
Hermes and Qwen. The model was not trained to call tools: it does so where the request forces it.

## Data

Only Python's standard library as CPython {python} installs it (Python Software Foundation licence version 2; a few
modules carry the further notices listed in Python's "Licenses and Acknowledgements"):

- source files, without tests, IDLE, lib2to3, codec tables, tkinter, turtle, distutils, generated tables and
  third-party packages;
- the language reference that `pydoc_data/topics.py` carries;
- conversations generated from signatures, docstrings and function bodies (single questions, several questions in a
  row, and questions about code given in the prompt). Conversations about {core} well-known modules and ten lines of
  small talk occur {repeats} times per pass, in different wordings.

{held_files} source files (chosen by a hash of their path, and `textwrap.py`) are held out for validation; neither the
tokenizer nor the model saw them. Training corpus: {train_tokens:,} tokens a pass; training consumed
{seen_tokens:,} tokens in {steps:,} steps.

## Loss

| text | loss (nats per token) | perplexity |
|---|---|---|
{rows}

Mean loss by position in one sequence of {positions} held-out tokens (several files one after the other):

| positions | loss |
|---|---|
{position_rows}

Uniform guessing would be a loss of {uniform:.2f}.

## What it is good for

Tests, examples, demonstrations and measurements of serving: real weights, a real tokenizer and a chat template whose
renderings share long prefixes. The text has the looks of Python and of its documentation, and most short answers end
by themselves. Training mixed in randomly skipped positions, so
that distances up to {positions} occurred, although most windows were of 256 to 1024 tokens.

## What it is not good for

Anything that needs facts, reasoning or fluent text. It was trained for minutes on a few million tokens: answers are
usually wrong, also about the modules that were repeated in training; sampled text is often not even grammatical, and
greedy decoding often falls into repetition. It knows no other subject than Python's library and no other language
than English. Do not rely on its answers.

## Training it again

    python training/train_embedded_model.py --minutes {budget_minutes:g} --threads {threads}

The seed is fixed ({seed}). With `--minutes` the schedule follows the clock, so the number of steps, and with it the
weights, depends on the machine; with `--steps {steps}` it follows the step count instead.

## Licence

Weights, tokenizer and this card: Apache-2.0. Training data: PSF licence, as above; the data itself is not included.
"""


def render_card(config: Any, report: dict[str, Any], arguments: argparse.Namespace) -> str:
    """Fill the model card with a run's figures."""
    labels = {
        "training_source": "training source files",
        "held_out_source": "held-out source files",
        "held_out_chat": "conversations about held-out files",
    }
    losses = report["evaluation"]
    rows = [f"| {text} | {losses[key]['loss']:.3f} | {losses[key]['perplexity']:.1f} |" for key, text in labels.items()]
    by_position = [f"| {span} | {loss:.3f} |" for span, loss in losses["held_out_loss_by_position"].items()]
    return CARD.format(
        minutes=report["training"]["seconds"] / 60,
        threads=arguments.threads,
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
        repeats=arguments.repeats,
        held_files=report["held_out_files"],
        train_tokens=report["training_corpus_tokens"],
        seen_tokens=report["training"]["tokens"],
        steps=report["training"]["steps"],
        rows="\n".join(rows),
        position_rows="\n".join(by_position),
        uniform=math.log(config.vocab_size),
        budget_minutes=arguments.minutes,
        seed=arguments.seed,
    )


# ------------------------------------------------------------------------------------------------ running


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    default_output = Path(__file__).resolve().parents[1] / "foreword" / "models" / "stdlib-nano"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=default_output, help="folder to write the model to")
    parser.add_argument("--minutes", type=float, default=35.0, help="time budget of the training loop")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of by the clock")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=20240229, help="seed of weights, data order and examples")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens in the vocabulary")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--repeats", type=int, default=25, help="repeats of the conversations about core modules")
    parser.add_argument("--compile", action="store_true", help="use torch.compile (needs a C++ compiler)")
    return parser.parse_args()


def prepare_process(threads: int) -> None:
    """Bound the threads and let PyTorch's choice of algorithms be repeatable."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def main() -> None:
    """Train, save and measure the model."""
    arguments = parse_arguments()
    prepare_process(arguments.threads)
    library = Path(sysconfig.get_path("stdlib"))
    training, held_out, held_modules = build_corpora(library, arguments.seed, arguments.repeats)
    tokenizer = train_tokenizer(training, arguments.vocab_size)
    train_ids, held_ids = (list(encode_corpus(tokenizer, corpus)) for corpus in (training, held_out))
    sizes = [sum(map(len, documents)) for documents in (*train_ids, *held_ids)]
    print("tokens: training source {}, chat {}; held-out source {}, chat {}".format(*sizes))

    model = build_model(arguments.vocab_size, arguments.seed)
    source = BatchSource(train_ids[0], train_ids[1], arguments.seed)
    budget = Budget(arguments.minutes, arguments.steps)
    stats = train(model, source, budget, arguments.learning_rate, arguments.compile)

    arguments.output.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, arguments.output)
    save_model(model, arguments.output)
    report: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "training": {**asdict(stats), "seconds": round(stats.seconds, 1), "last_loss": round(stats.last_loss, 4)},
        "training_corpus_tokens": sizes[0] + sizes[1],
        "training_source_tokens": sizes[0],
        "training_chat_tokens": sizes[1],
        "held_out_source_tokens": sizes[2],
        "held_out_files": len(held_modules),
        "held_out_paths": [module.path for module in held_modules],
        "options": {key: value for key, value in vars(arguments).items() if key != "output"},
        "phases": [asdict(phase) for phase in PHASES],
        "evaluation": evaluate(arguments.output, train_ids, held_ids),
    }
    write_json(arguments.output / "training_report.json", report)
    (arguments.output / "README.md").write_text(render_card(model.config, report, arguments), encoding="utf-8")
    print(json.dumps(report["evaluation"], indent=2))


if __name__ == "__main__":
    main()
