"""Structured output: what the mask costs in a decode step, and whether every answer parses and validates.

    python -m benchmarks.engine.structured_output cost [--vocab 150000] [--batch 1 8 32]
    python -m benchmarks.engine.structured_output valid [--prompts 1000] [--max-tokens 64]

`cost` makes a model of 88 million parameters with random weights and the embeddings of a vocabulary of the given size, and a
byte-level BPE tokenizer trained on Python's standard library. It decodes the same batch in turn free and with a JSON schema,
both at temperature 1, and compares the steps. The schema's text cannot end within the measured steps.

`valid` answers each prompt with each of 20 schemas by the embedded model at temperature 1, and counts the answers that
`jsonschema` accepts.
"""

import argparse
import dataclasses
import itertools
import json
import statistics
import sysconfig
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped, unused-ignore]

from benchmarks.engine.random_model import SIZES, make
from benchmarks.harness import machine, set_up, table
from foreword import LLM, SamplingParams
from foreword.blocks.salt import NO_SALT
from foreword.engine.request import Request
from foreword.tokens.structured_output import StructuredOutput

END = "<|endoftext|>"
STEPS, WARM, ROUNDS = 40, 8, 5


def text(**limits: Any) -> dict[str, Any]:
    return {"type": "string", **limits}


def record(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def items(of: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": of, **limits}


INTEGER, NUMBER, BOOLEAN = {"type": "integer"}, {"type": "number"}, {"type": "boolean"}
PERSON = record(name=text(), age=INTEGER, tags=items(text()))
SCHEMAS: dict[str, Any] = {
    "any object": {"type": "object"},
    "any value": {},
    "string": text(),
    "short string": text(minLength=3, maxLength=12),
    "integer": {"type": "integer", "minimum": -50, "maximum": 1000},
    "number": NUMBER,
    "boolean": BOOLEAN,
    "enumeration": {"enum": ["red", "green", "dark blue", 4, None]},
    "constant": {"const": {"version": 1}},
    "strings": items(text(), minItems=2, maxItems=9),
    "person": PERSON,
    "people": items(PERSON, minItems=1),
    "optional": record(["id"], id=INTEGER, note=text(), score=NUMBER, open=BOOLEAN),
    "nullable": record(value={"anyOf": [text(), {"type": "null"}]}, unit={"type": ["string", "null"]}),
    "nested": record(a=record(b=record(c=items(record(d=INTEGER, e=text()))))),
    "union": {"anyOf": [record(kind={"const": "a"}, size=INTEGER), record(kind={"const": "b"}, label=text())]},
    "pattern": record(code=text(pattern="^[A-Z]{2}-[0-9]{4}$"), host=text(pattern=r"^([a-z]+\.)+(com|org)$")),
    "formats": record(day=text(format="date"), id=text(format="uuid"), at=text(format="time")),
    "tuple": {"type": "array", "prefixItems": [INTEGER, text(), BOOLEAN], "items": False, "minItems": 3},
    "tree": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": record(["v"], v=INTEGER, left={"$ref": "#/$defs/tree"}, right=items({"$ref": "#/$defs/tree"}))
        },
    },
}
# Far more text than is measured.
ENDLESS = items(
    record(name=text(), kind={"enum": ["a", "b"]}, size=NUMBER, tags=items(text(), minItems=3)), minItems=400
)


def train_tokenizer(folder: Path, size: int) -> int:
    """A tokenizer of `size` tokens in the folder. Where the texts have too few, pairs of tokens fill the vocabulary. Returns
    the number of tokens that were trained."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, min_frequency=1, show_progress=False
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    own = (path for path in sources if "site-packages" not in path.parts)
    tokenizer.train_from_iterator((path.read_text("utf-8", errors="ignore") for path in own), trainer)
    stored = json.loads(tokenizer.to_str())
    vocabulary = stored["model"]["vocab"]
    trained = len(vocabulary)
    words = [word for word in vocabulary if 3 < len(word) < 9 and word != END]
    for first, second in itertools.product(words[:500], words):
        if len(vocabulary) == size:
            break
        vocabulary.setdefault(first + second, len(vocabulary))
    (folder / "tokenizer.json").write_text(json.dumps(stored), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return trained


def steps(llm: LLM, batch: int, structured: StructuredOutput | None) -> list[float]:
    """Seconds of the decode steps of a batch."""
    params = SamplingParams(max_tokens=16_000, seed=1, ignore_eos=True, structured=structured)
    names = [f"r{number}" for number in range(batch)]
    for number, name in enumerate(names):
        llm._core.add(Request(name, (number + 1, 2, 3, 4), params))
    llm._core.step()
    taken = []
    for _ in range(WARM + STEPS):
        started = time.perf_counter()
        llm._core.step()
        taken.append(time.perf_counter() - started)
    for name in names:
        llm._core.abort(name)
    llm.clear_cache()
    return taken[WARM:]


def cost(vocab: int, batches: list[int]) -> None:
    structured = StructuredOutput("json_schema", ENDLESS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        parameters = make(dataclasses.replace(SIZES["88m"], vocabulary=vocab), path)
        tokens = train_tokenizer(path, vocab)
        llm = LLM(folder, kv_memory="65536 tokens", self_check=False)
        facts = {"model": f"random, {parameters:,} parameters, {llm.info.dtype}", "vocabulary": f"{vocab:,} logits"}
        trained = f"{llm.tokenizer.vocab_size:,} tokens, {tokens:,} of them trained"
        print(set_up({**machine(), **facts, "tokenizer": trained, "rounds": f"{ROUNDS} of {STEPS} steps"}))
        llm._core.compile(SamplingParams(structured=structured), NO_SALT)
        rows = []
        for batch in batches:
            free, bound = [], []
            for _ in range(ROUNDS):
                free.append(statistics.mean(steps(llm, batch, None)))
                bound.append(statistics.mean(steps(llm, batch, structured)))
            before, after = statistics.median(free), statistics.median(bound)
            cells = (f"{before * 1e3:.2f} ms", f"{after * 1e3:.2f} ms", f"{(after / before - 1) * 100:+.1f} %")
            rows.append((str(batch), *cells))
    print(table(("sequences", "free step", "constrained step", "difference"), rows))


def check(answer: str, schema: Any) -> str:
    try:
        jsonschema.validate(json.loads(answer), schema)
    except (ValueError, jsonschema.ValidationError) as error:
        return type(error).__name__
    return "valid"


def valid(prompts: int, max_tokens: int) -> None:
    rows = []
    with LLM(kv_memory="65536 tokens") as llm:
        facts = {"model": llm.info.name, "prompts": str(prompts), "max_tokens": str(max_tokens), "temperature": "1"}
        print(set_up({**machine(), **facts}))
        total: Counter[str] = Counter()
        for name, schema in SCHEMAS.items():
            structured = StructuredOutput("json_schema", schema)
            params = [
                SamplingParams(max_tokens=max_tokens, seed=seed, structured=structured) for seed in range(prompts)
            ]
            outputs = llm.generate([f"Question {number}: " for number in range(prompts)], params)
            answers = [output.outputs[0] for output in outputs]
            found = Counter(check(answer.text, schema) for answer in answers)
            total += found
            mean = statistics.mean(len(answer.tokens) for answer in answers)
            distinct = len({answer.text for answer in answers})
            rows.append((name, f"{found['valid'] / prompts:.1%}", f"{mean:.0f}", str(distinct)))
    print(table(("schema", "valid", "mean tokens", "distinct answers"), rows))
    count = prompts * len(SCHEMAS)
    print(f"\n{total['valid']:,} of {count:,} answers parse and validate; others: {dict(total - Counter(valid=count))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "valid"))
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=1_000)
    parser.add_argument("--max-tokens", type=int, default=64)
    given = parser.parse_args()
    if given.what == "cost":
        cost(given.vocab, given.batch)
    else:
        valid(given.prompts, given.max_tokens)


if __name__ == "__main__":
    main()
