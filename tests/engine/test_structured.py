"""Structured output: every text matches what was asked for and ends in time; other requests of the batch do not notice."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from example_counts import represented
from tiny import EOS, prompt

from foreword.api.dialects.decode import Limits, bounded_object, check_depth
from foreword.engine.request import Completion, RequestOutput, SamplingParams
from foreword.engine.structured.compiler import check_schema
from foreword.engine_config import EngineConfig
from foreword.entrypoints.async_engine import AsyncEngine
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest
from foreword.request_errors import GrammarTooComplex
from foreword.tokens.structured_output import MAX_FORMAT_CHARACTERS, MAX_FORMAT_DEPTH, StructuredOutput

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "home": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "size": {"type": "number"}},
            "required": ["city", "size"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
PATTERNS = {
    "type": "object",
    "properties": {
        "host": {"type": "string", "pattern": r"^([a-z]+\.)+(com|org)$"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    },
    "required": ["host", "code"],
    "additionalProperties": False,
}
CHOICES = ("yes", "no", 'a "quoted" \\ one\n', "été")
LARK = 'start: "<" WORD ">" start* "</" WORD ">"\nWORD: /[a-z]{1,8}/'
# The examples of vLLM's documentation are in this syntax.
EBNF = 'root ::= "<" name-of-it ">" root* "</" name-of-it ">"  # start: ...\n name-of-it ::= [a-z]{1,8}'


def of_schema(schema: dict[str, Any]) -> Callable[[str], None]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def full_match(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def one_of(text: str) -> None:
    assert text in CHOICES


def balanced(text: str) -> None:
    assert re.fullmatch(r"(</?[a-z]{1,8}>)+", text), text
    depth = 0
    for mark in re.findall(r"<(/?)", text):
        depth += -1 if mark else 1
        assert depth >= 0
    assert depth == 0


KINDS: dict[str, tuple[StructuredOutput, Callable[[str], None]]] = {
    "json_object": (StructuredOutput("json_object"), of_schema({"type": "object"})),
    "person": (StructuredOutput("json_schema", PERSON), of_schema(PERSON)),
    "tree": (StructuredOutput("json_schema", TREE), of_schema(TREE)),
    "patterns": (StructuredOutput("json_schema", PATTERNS), of_schema(PATTERNS)),
    "any": (StructuredOutput("json_schema", {}), of_schema({})),
    "regex": (StructuredOutput("regex", r"(ab|[0-9]{2,3})+(x|yz)*end"), full_match(r"(ab|[0-9]{2,3})+(x|yz)*end")),
    "choice": (StructuredOutput("choice", CHOICES), one_of),
    "grammar": (StructuredOutput("grammar", LARK), balanced),
    "EBNF": (StructuredOutput("grammar", EBNF), balanced),
}


@pytest.fixture(scope="module")
def llama(engine: Callable[..., LLM]) -> LLM:
    return engine("llama")


@pytest.fixture(scope="module")
def embedded() -> Iterator[LLM]:
    with LLM(kv_memory="4096 tokens", threads=1) as llm:
        yield llm


def completions(outputs: list[RequestOutput]) -> list[Completion]:
    return [one for output in outputs for one in output.outputs]


@pytest.mark.parametrize("kind", represented(KINDS, "any"))
def test_texts_match_and_end_in_time(kind: str, llama: LLM, embedded: LLM) -> None:
    """At temperature 1 and with few tokens, every text is complete and matches, whatever the model prefers."""
    structured, check = KINDS[kind]
    for llm, budget in ((llama, 150), (embedded, 60)):
        params = [SamplingParams(max_tokens=budget, seed=seed, structured=structured) for seed in range(12)]
        for one in completions(llm.generate(["def ", "["] * 6, params)):
            assert one.finish_reason == "stop", one
            check(one.text)


def test_special_tokens_in_a_grammar(embedded: LLM) -> None:
    """A grammar names tokens by their ids or names; a text with them is completed in time, like any other."""
    [marker] = embedded.tokenizer.encode("<|user|>", add_special_tokens=False)
    for named in (f"<[{marker}]>", "<|user|>"):
        structured = StructuredOutput("grammar", f"start: {named} object {named}\nobject: %json {json.dumps(PERSON)}")
        params = [
            SamplingParams(max_tokens=50, seed=seed, structured=structured, skip_special_tokens=False)
            for seed in range(6)
        ]
        for one in completions(embedded.generate(["x"] * 6, params)):
            assert one.finish_reason == "stop"
            assert one.tokens[0] == one.tokens[-1] == marker
            of_schema(PERSON)(one.text.removeprefix("<|user|>").removesuffix("<|user|>"))


def test_without_completion_a_text_may_be_cut(embedded: LLM) -> None:
    """`complete=False` leaves the model its own way, and a text that reaches `max_tokens` is cut."""
    structured = StructuredOutput("json_schema", PERSON, complete=False)
    params = [SamplingParams(max_tokens=30, seed=seed, structured=structured) for seed in range(8)]
    ends = {one.finish_reason for one in completions(embedded.generate(["import "] * 8, params))}
    assert "length" in ends


def test_a_budget_below_the_shortest_text_cuts_it(embedded: LLM) -> None:
    """A text that cannot be completed in time is cut at `max_tokens`, as any other."""
    params = SamplingParams(max_tokens=5, seed=1, structured=StructuredOutput("json_schema", PERSON))
    [one] = completions(embedded.generate("import ", params))
    assert (one.finish_reason, len(one.tokens)) == ("length", 5)


def test_other_rows_of_a_batch_do_not_change(llama: LLM) -> None:
    """A free request gives the same tokens beside constrained ones as alone, and so do the constrained ones."""
    free = SamplingParams(max_tokens=40, seed=5, ignore_eos=True, logprobs=1)
    bound = SamplingParams(max_tokens=120, seed=5, structured=StructuredOutput("json_schema", PERSON), logprobs=1)
    greedy = SamplingParams(max_tokens=60, temperature=0.0, structured=StructuredOutput("regex", "[a-f]{1,50}"))
    prompts, params = [prompt(20, seed) for seed in range(6)], [free, bound, greedy] * 2
    together = [one.tokens for one in completions(llama.generate(prompts, params))]
    llama.clear_cache()
    alone = [llama.generate(one, each)[0].outputs[0].tokens for one, each in zip(prompts, params, strict=True)]
    assert together == alone


@pytest.mark.extended
def test_several_sequences_of_a_prompt_keep_their_own_place(llama: LLM) -> None:
    """The sequences of one prompt match, and differ."""
    structured, check = KINDS["person"]
    [output] = llama.generate("x", SamplingParams(max_tokens=150, seed=3, n=6, structured=structured))
    for one in output.outputs:
        check(one.text)
    assert len({one.text for one in output.outputs}) > 1


@pytest.mark.extended
def test_preemption_keeps_the_constraint(engine: Callable[..., LLM]) -> None:
    """Sequences that lose their blocks continue in the middle of their text, with the same tokens as in a large pool."""
    structured, check = KINDS["person"]
    params = [SamplingParams(max_tokens=100, seed=seed, structured=structured) for seed in range(6)]
    prompts = [f"{seed} and a long prompt" for seed in range(6)]
    small, large = engine("llama", kv_memory="256 tokens"), engine("llama")
    found = completions(small.generate(prompts, params))
    assert small._core.scheduler.num_preemptions > 0
    assert [one.tokens for one in found] == [one.tokens for one in completions(large.generate(prompts, params))]
    for one in found:
        check(one.text)


def test_ends_stops_and_minimum(llama: LLM) -> None:
    """End tokens come only where the text is complete, and then end it, also with `ignore_eos` and below `min_tokens`. A stop
    string ends the text anywhere."""
    digits = StructuredOutput("regex", "[0-9]{3,6}")
    for seed in range(6):
        params = SamplingParams(max_tokens=50, seed=seed, structured=digits, ignore_eos=True, min_tokens=20)
        [one] = completions(llama.generate("x", params))
        assert one.finish_reason == "stop"
        assert re.fullmatch("[0-9]{3,6}", one.text)
        assert one.tokens.count(EOS) <= 1
    params = SamplingParams(max_tokens=200, seed=1, structured=StructuredOutput("regex", "[ab]{100}"), stop=("b",))
    [one] = completions(llama.generate("x", params))
    assert (one.finish_reason, one.stop_match) == ("stop", "b")
    assert set(one.text) <= {"a"}


def test_a_grammar_comes_before_other_exclusions(llama: LLM) -> None:
    """Where the other exclusions leave no token that the grammar allows, the grammar decides."""
    allowed = tuple(llama.tokenizer.encode("az"))
    for pattern, expected in (("[ab]{4}", "aaaa"), ("b{4}", "bbbb")):
        structured = StructuredOutput("regex", pattern)
        params = SamplingParams(max_tokens=20, seed=2, structured=structured, allowed_token_ids=allowed)
        assert completions(llama.generate("x", params))[0].text == expected


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Definitions of which each refers to the next."""
    definitions = {f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "string"}}}


_HALVES: list[tuple[Any, Any]] = [("regex", "a\ud800"), ("choice", ("a\ud800",)), ("grammar", 'start: "a\ud800"')]
REFUSED: dict[str, StructuredOutput] = {
    "deep": StructuredOutput("json_schema", nested(1000)),
    "large": StructuredOutput("json_schema", {"enum": [f"value {i}" for i in range(20_000)]}),
    "not a schema": StructuredOutput("json_schema", "text"),
    "unknown keyword": StructuredOutput("json_schema", {"type": "array", "uniqueItems": True}),
    "nothing matches": StructuredOutput("json_schema", {"$ref": "#"}),
    "false": StructuredOutput("json_schema", False),
    "exponential": StructuredOutput("json_schema", {"allOf": [{"anyOf": [{"const": i} for i in range(40)]}] * 40}),
    "huge number": StructuredOutput("json_schema", {"type": "integer", "multipleOf": 999_999_937}),
    "look-around": StructuredOutput("regex", "(?=a)b"),
    "brackets": StructuredOutput("regex", "(" * 100_000 + ")" * 100_000),
    "long regex": StructuredOutput("regex", "a" * 1_000_000),
    "broken grammar": StructuredOutput("grammar", "start: nothing"),
    "broken EBNF": StructuredOutput("grammar", "root ::= nothing"),
    "deep EBNF": StructuredOutput("grammar", "root ::= " + "(" * 100 + '"a' + ")" * 100),
    "many rules": StructuredOutput("grammar", "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)) + 'root ::= "a"'),
    "deep grammar": StructuredOutput("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
    **{f"half a character, {kind}": StructuredOutput(kind, value) for kind, value in _HALVES},
    "no choices": StructuredOutput("choice", ()),
    "many choices": StructuredOutput("choice", tuple(f"choice {i}" for i in range(10_000))),
}
SURVIVED: dict[str, StructuredOutput] = {
    "chain of references": StructuredOutput("json_schema", chain(2500, lambda ref: {"$ref": ref})),
    "chain of arrays": StructuredOutput(
        "json_schema", chain(2500, lambda ref: {"type": "array", "items": {"$ref": ref}})
    ),
    "chain of objects": StructuredOutput("json_schema", chain(2000, lambda ref: {"properties": {"a": {"$ref": ref}}})),
    "doubling": StructuredOutput("json_schema", chain(30, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})),
    "exponential regex": StructuredOutput("regex", "(a|a|aa)*" * 40 + "b"),
    "repeated regex": StructuredOutput("regex", "((a{0,1000}){0,1000}){0,1000}b"),
    "backtracking": StructuredOutput("regex", "(.*a.*b.*c.*d){5,20}"),
    "ambiguous": StructuredOutput("grammar", 'start: s\ns: "a" | s s | s s s'),
    "many items": StructuredOutput("json_schema", {"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_formats_are_refused_before_the_request_waits(name: str, llama: LLM) -> None:
    """A format that is malformed, too large or impossible is a BadRequest; nothing of the request is left."""
    with pytest.raises(BadRequest):
        llama.generate("x", SamplingParams(max_tokens=8, structured=REFUSED[name]))
    assert not llama._core.has_work()
    assert llama.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", represented(SURVIVED, *(set(SURVIVED) - {"chain of objects"})))
def test_expensive_formats_stay_within_limits(name: str, llama: LLM) -> None:
    """A format that a compiler could drown in is compiled within its limits or refused, and the engine continues."""
    try:
        outputs = llama.generate("x", SamplingParams(max_tokens=8, seed=1, structured=SURVIVED[name]))
    except BadRequest:
        outputs = []
    assert all(one.finish_reason in ("stop", "length") for one in completions(outputs))
    assert llama.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason == "length"


def test_a_grammar_that_becomes_too_complex(embedded: LLM) -> None:
    """A grammar whose steps exceed their limit ends its request with an error of the client. Others are not affected."""
    ambiguous = StructuredOutput("grammar", "start: e\ne: e e | /[a-z ]/")
    params = SamplingParams(max_tokens=300, seed=1, structured=ambiguous)
    with pytest.raises(GrammarTooComplex, match="cannot be followed further") as caught:
        embedded.generate("x", params)
    assert (caught.value.status, caught.value.fault) == (400, "client")
    assert not embedded._core.has_work()
    assert embedded.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].finish_reason == "length"


def test_the_limits_of_a_request_are_those_of_the_engine() -> None:
    """A format that a dialect lets through as small and flat enough is not refused by the compiler for its size or depth."""
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(MAX_FORMAT_DEPTH // 2):
        nested = {"properties": {"a": nested}}
    check_depth(nested, "schema", Limits())
    check_schema(nested)
    for wide in ({"enum": [1] * 65_000}, {"const": "x" * (MAX_FORMAT_CHARACTERS - 12)}, {"enum": [1e300] * 20_000}):
        raw = msgspec.json.encode(wide)
        assert len(raw) <= Limits().schema_bytes
        bounded_object(msgspec.Raw(raw), "schema", Limits())
        check_schema(wide)
    for bad in ({"const": "x" * MAX_FORMAT_CHARACTERS}, {"properties": {"a": nested}}):
        with pytest.raises(BadRequest):
            bounded_object(msgspec.Raw(msgspec.json.encode(bad)), "schema", Limits())
        with pytest.raises(BadRequest):
            check_schema(bad)


def test_keywords_that_cannot_be_enforced(llama: LLM) -> None:
    """A format that is not strict ignores them; the rest of the schema holds."""
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    structured = StructuredOutput("json_schema", schema, strict=False)
    [one] = completions(llama.generate("x", SamplingParams(max_tokens=40, seed=1, structured=structured)))
    assert all(isinstance(item, int) for item in json.loads(one.text))


def test_a_server_compiles_off_its_threads(folder: Callable[[str], Any]) -> None:
    """`AsyncEngine.compile` refuses a bad format before anything is queued; `generate` uses what was compiled."""

    async def work(engine: AsyncEngine) -> str:
        with pytest.raises(BadRequest):
            await engine.compile(SamplingParams(structured=REFUSED["look-around"]))
        with pytest.raises(BadRequest):
            async for _ in engine.generate(_request(REFUSED["look-around"])):
                pass
        assert engine.status().waiting == engine.status().running == 0
        return "".join([delta.text async for delta in engine.generate(_request(StructuredOutput("choice", CHOICES)))])

    engine = AsyncEngine.from_config(
        EngineConfig(str(folder("llama")), dtype="float32", kv_memory="1024 tokens", block_size=4, threads=1)
    )
    try:
        assert asyncio.run(work(engine)) in CHOICES
    finally:
        engine.close()


def test_a_text_is_continued_by_another_engine() -> None:
    """Wherever a text breaks near its limit, an engine that gets its tokens so far writes the same rest, and ends in time."""
    from foreword.engine.request import Request

    params = SamplingParams(max_tokens=20, seed=1, structured=StructuredOutput("regex", "([a-z]{3,9} ){4}END"))

    async def tokens(engine: AsyncEngine, before: tuple[int, ...]) -> tuple[int, ...]:
        request = Request(f"after {len(before)}", tuple(engine.tokenizer.encode("def dump(")), params, output=before)
        return before + tuple([token async for delta in engine.generate(request) for token in delta.tokens])

    async def work(engine: AsyncEngine) -> None:
        whole = await tokens(engine, ())
        full_match("([a-z]{3,9} ){4}END")(engine.tokenizer.decode(whole))
        for count in range(1, len(whole) - 1):
            assert await tokens(engine, whole[:count]) == whole

    # By default only where it costs little: with AMX it does not.
    engine = AsyncEngine.from_config(EngineConfig(kv_memory="1024 tokens", threads=1, batch_invariant="on"))
    try:
        asyncio.run(work(engine))
    finally:
        engine.close()


def _request(structured: StructuredOutput) -> Any:
    from foreword.engine.request import Request

    return Request("r", (1, 2, 3), SamplingParams(max_tokens=40, seed=1, structured=structured))
