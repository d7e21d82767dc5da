"""`LLM`: batches without a server, and named prefixes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tiny import Reference, greedy, prompt

from foreword.engine.request import SamplingParams
from foreword.entrypoints.llm import LLM
from foreword.errors import BadRequest, ConfigError
from foreword.prefixes.errors import PrefixBudgetExceeded, UnknownPrefix
from foreword.request_errors import EngineFailed, PromptTooLong

Make = Callable[..., LLM]
Find = Callable[[str], Reference]

RULES = "You are a careful librarian. Answer in the words of the catalogue, and name the shelf."
SHORT = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@contextlib.contextmanager
def breaking(llm: LLM, error: BaseException) -> Iterator[None]:
    """Let the device fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._core._runner, "run", Mock(side_effect=error))
        yield


def free(llm: LLM) -> int:
    return llm._core.cache.pool.num_free


def test_forms_of_prompts(engine: Make) -> None:
    """Text and tokens, one prompt and many, give the same; outputs come in the order of the prompts."""
    llm = engine("llama")
    text = "the shelf"
    tokens = llm.tokenizer.encode(text)
    [one] = llm.generate(text, SHORT)
    assert one.prompt_tokens == tuple(tokens)
    found = llm.generate([text, tokens, tokens[:3]], SHORT)
    assert found[0].outputs == found[1].outputs == one.outputs
    assert [output.prompt_tokens for output in found] == [tuple(tokens), tuple(tokens), tuple(tokens[:3])]
    assert llm.generate(tokens, SHORT)[0].outputs == one.outputs
    assert llm.generate([], SHORT) == []
    assert one.time_to_first_token > 0


def test_loading_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On a terminal lines on standard error name the steps; with logging on level INFO they are log lines, and nothing is
    printed; a program whose output goes elsewhere prints nothing."""
    small = {"kv_memory": "64 tokens", "threads": 1, "self_check": False, "kernels": "torch"}
    LLM(**small)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    LLM(**small)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "foreword: loading the embedded model" and any("allocating 4 blocks" in line for line in said)
    with caplog.at_level(logging.INFO, "foreword"):
        LLM(**small)
    assert "loading the embedded model" in caplog.messages and capsys.readouterr().err == ""


def test_repr_is_short(engine: Make) -> None:
    """A notebook shows an LLM and an output in two lines, which say what was cached."""
    llm = engine("llama")
    [output] = llm.generate(prompt(100, 1), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert repr(llm).startswith("LLM(") and f"{llm.info.kv_tokens:,} tokens" in repr(llm)
    shown = repr(output)
    assert "100 prompt tokens, 0 cached" in shown and "20 tokens, finish_reason='length'" in shown
    assert max(len(repr(llm)), len(shown)) < 240


def test_params_for_each_prompt(engine: Make) -> None:
    """Parameters hold for all prompts, or are a list with one set for each."""
    llm = engine("llama")
    found = llm.generate([prompt(5, i) for i in range(3)], [greedy(count) for count in (1, 4, 2)])
    assert [len(output.outputs[0].tokens) for output in found] == [1, 4, 2]
    assert len(llm.generate([prompt(5, 1)], None)[0].outputs) == 1
    with pytest.raises(BadRequest, match="3 prompts, but 2 sets"):
        llm.generate([prompt(5, i) for i in range(3)], [SHORT] * 2)


def test_one_bad_prompt_computes_nothing(engine: Make) -> None:
    """A batch with a prompt that is too long is refused before anything is computed."""
    llm = engine("llama")
    with pytest.raises(PromptTooLong):
        llm.generate([prompt(20, 1), prompt(600, 2)], SHORT)
    assert llm._core.steps == 0
    assert not llm._core.has_work()


def test_progress(engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """A bar counts finished prompts with `progress`; without it nothing is printed."""
    llm = engine("llama")
    capsys.readouterr()
    llm.generate([prompt(5, i) for i in range(3)], SamplingParams(max_tokens=2, n=2), progress=True)
    shown = capsys.readouterr()
    assert "prompts: 100%" in shown.err
    assert "3/3" in shown.err
    llm.generate([prompt(5, 1)], SHORT)
    assert capsys.readouterr() == ("", "")


def test_chat(engine: Make) -> None:
    """A conversation is rendered with the model's template and asks for an answer; one or many may be given."""
    llm = engine("llama")
    messages = [{"role": "user", "content": "Where is it?"}]
    [one] = llm.chat(messages, SHORT)
    assert llm.tokenizer.decode(one.prompt_tokens) == "[user] Where is it?\n[assistant] "
    assert [output.outputs for output in llm.chat([messages, messages], SHORT)] == [one.outputs] * 2


def test_failed_step(engine: Make) -> None:
    """A failed step is an error of the call; the next call is right."""
    llm = engine("llama")
    expected = llm.generate([prompt(20, 1)], SHORT)[0].outputs
    llm.clear_cache()

    with breaking(llm, RuntimeError("out of memory")), pytest.raises(EngineFailed, match="out of memory"):
        llm.generate([prompt(20, 1), prompt(9, 2)], SHORT)
    assert not llm._core.has_work()
    llm.check()
    assert llm.generate([prompt(20, 1)], SHORT)[0].outputs == expected


@pytest.mark.parametrize("several", [{}, {"n": 2}], ids=str)
def test_one_failed_request_of_a_batch(several: dict[str, int], engine: Make) -> None:
    """A request that fails has an error in its output, all its sequences have ended, and the other outputs are as ever."""
    llm = engine("llama", max_num_seqs=2, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=3, **several)
    prompts = [prompt(length, length) for length in (20, 14, 9)]
    expected = llm.generate(prompts, params)
    run = llm._core._runner.run

    def fail_once(step: Any, draws: Any) -> Any:
        if any(len(sequence.table) == 9 + 3 and sequence.num_prompt == 9 for sequence in draws):
            raise RuntimeError("out of memory")
        return run(step, draws)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._core._runner, "run", fail_once)
        found = llm.generate(prompts, [SHORT, SHORT, params])
    assert [len(output.outputs[0].tokens) for output in found[:2]] == [3, 3]
    assert found[0].error is found[1].error is None
    assert isinstance(found[2].error, EngineFailed)
    assert "out of memory" in found[2].error.message
    assert [one.finish_reason for one in found[2].outputs] == ["error"] * params.n
    assert found[2].outputs[0].tokens == expected[2].outputs[0].tokens[:3]
    assert not llm._core.has_work()
    llm.check()
    assert [one.outputs for one in llm.generate(prompts, params)] == [one.outputs for one in expected]


def test_unknown_option(llama: Path) -> None:
    """A misspelt option is an error that names close ones."""
    with pytest.raises(ConfigError, match="block_size"):
        LLM(str(llama), blocksize=16)


def test_named_prefix(engine: Make, reference: Find) -> None:
    """A request that names a prefix gets what the whole text would give, and the prefix is a cache hit."""
    llm = engine("llama")
    made = llm.add_prefix("rules", RULES)
    tokens = llm.tokenizer.encode(RULES)
    whole = len(tokens) // 4
    assert (made.name, made.version, made.kind, made.content, made.ready) == ("rules", 1, "text", RULES, True)
    assert made.tokens == tuple(tokens)
    assert made.bytes == whole * llm.info.kv_bytes_per_block
    for question in ("Where?", llm.tokenizer.encode("Where?")):
        [output] = llm.generate([question], greedy(8), prefix="rules")
        assert output.prompt_tokens == (*tokens, *llm.tokenizer.encode("Where?"))
        assert output.cached_tokens >= whole * 4
        reference("llama").check(output.prompt_tokens, output.outputs[0], 8)
    [known] = llm.list_prefixes()
    assert (known.uses, known.hit_tokens > 2 * whole * 4 - 1) == (2, True)
    assert known.last_used is not None


def test_prefix_of_messages(engine: Make) -> None:
    """A prefix of messages stands before a chat's messages, in the template; it does not serve plain prompts."""
    llm = engine("llama")
    llm.add_prefix("rules", messages=[{"role": "system", "content": RULES}])
    [output] = llm.chat([{"role": "user", "content": "Where?"}], SHORT, prefix="rules")
    assert llm.tokenizer.decode(output.prompt_tokens) == f"[system] {RULES}\n[user] Where?\n[assistant] "
    assert output.cached_tokens >= len(RULES) // 4 * 4 - 8
    with pytest.raises(BadRequest, match="was registered with 'messages'"):
        llm.generate("Where?", SHORT, prefix="rules")
    llm.add_prefix("plain", RULES)
    with pytest.raises(BadRequest, match="was registered with 'content'"):
        llm.chat([{"role": "user", "content": "Where?"}], SHORT, prefix="plain")
    for wrong in ({}, {"content": "a", "messages": []}):
        with pytest.raises(BadRequest, match="either 'content'"):
            llm.add_prefix("wrong", **wrong)  # type: ignore[arg-type]


def test_unknown_prefix(engine: Make) -> None:
    """An unregistered name is an error that lists similar names."""
    llm = engine("llama")
    with pytest.raises(UnknownPrefix, match="None is known yet"):
        llm.generate("a", SHORT, prefix="rules")
    llm.add_prefix("library-rules", RULES)
    with pytest.raises(UnknownPrefix, match=r"'library-rule' is registered\. Did you mean 'library-rules'"):
        llm.generate("a", SHORT, prefix="library-rule")
    with pytest.raises(UnknownPrefix):
        llm.remove_prefix("zzz")


def test_pinned_prefix_survives_pressure(engine: Make) -> None:
    """A named prefix is never evicted from the device; an unnamed one is."""
    llm = engine("llama", kv_memory="256 tokens", prefix_budget="50%")
    llm.add_prefix("rules", RULES)
    unnamed = prompt(60, 1)
    llm.generate([unnamed], SHORT)
    for seed in range(10):
        llm.generate([prompt(120, 10 + seed)], SHORT)
    assert llm.generate([unnamed], SHORT)[0].cached_tokens < 60
    assert llm.generate(["Where?"], SHORT, prefix="rules")[0].cached_tokens >= len(RULES) // 4 * 4 - 4
    assert llm.clear_cache() > 0
    assert llm.generate(["Where?"], SHORT, prefix="rules")[0].cached_tokens >= len(RULES) // 4 * 4 - 4


def test_budget(engine: Make) -> None:
    """Named prefixes never pin more than their budget: one that does not fit is refused before it is computed."""
    room, per_block = 40, 3072
    llm = engine("llama", prefix_budget=str(room * per_block))
    assert llm.info.kv_bytes_per_block == per_block
    llm.add_prefix("half", "a" * (4 * room // 2))
    steps = llm._core.steps
    with pytest.raises(PrefixBudgetExceeded, match=r"are left; remove one, or raise prefixes\.budget"):
        llm.add_prefix("more", "x" * (4 * room // 2 + 4))
    assert llm._core.steps == steps
    llm.add_prefix("rest", "x" * (4 * (room - room // 2)))
    assert llm._core.leases.book.named_bytes == room * per_block == llm._core.leases.book.budget
    llm.remove_prefix("half")
    llm.add_prefix("again", "y" * (4 * room // 2))
    assert [prefix.name for prefix in llm.list_prefixes()] == ["again", "rest"]


def test_replace(engine: Make, reference: Find) -> None:
    """A prefix is replaced only when asked; its next version has the new content and frees the blocks of the old one."""
    llm = engine("llama")
    llm.add_prefix("rules", RULES)
    with pytest.raises(BadRequest, match="exists; replace it"):
        llm.add_prefix("rules", "Other rules.")
    new = llm.add_prefix("rules", "Other rules, and shorter ones.", replace=True)
    assert (new.version, new.content, new.uses) == (2, "Other rules, and shorter ones.", 0)
    assert llm.list_prefixes() == [new]
    assert free(llm) == llm.info.num_blocks - len(new.tokens) // 4
    [output] = llm.generate(["Where?"], greedy(6), prefix="rules")
    assert llm.tokenizer.decode(output.prompt_tokens) == "Other rules, and shorter ones.Where?"
    reference("llama").check(output.prompt_tokens, output.outputs[0], 6)
    # Two names with the same text pin the same blocks.
    llm.add_prefix("twin", "Other rules, and shorter ones.")
    assert free(llm) == llm.info.num_blocks - len(new.tokens) // 4


def test_remove(engine: Make) -> None:
    """A removed prefix frees its blocks, which stay cached until they are evicted, and its name is unknown."""
    llm = engine("llama")
    made = llm.add_prefix("rules", RULES)
    assert free(llm) == llm.info.num_blocks - len(made.tokens) // 4
    assert llm.remove_prefix("rules").name == "rules"
    assert free(llm) == llm.info.num_blocks
    assert llm.list_prefixes() == []
    with pytest.raises(UnknownPrefix):
        llm.generate("a", SHORT, prefix="rules")
    assert llm.generate(RULES + "Where?", SHORT)[0].cached_tokens >= len(made.tokens) // 4 * 4
    llm.check()


def test_prefix_that_is_not_computed(engine: Make) -> None:
    """A prefix whose computation fails leaves no reservation in the budget, and its name stays free."""
    llm = engine("llama", max_model_len=64)
    with pytest.raises(PromptTooLong):
        llm.add_prefix("rules", "x" * 65)

    with breaking(llm, RuntimeError("out of memory")), pytest.raises(EngineFailed):
        llm.add_prefix("rules", "x" * 40)
    with breaking(llm, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
        llm.add_prefix("rules", "x" * 40)
    assert llm.list_prefixes() == []
    assert not llm._core.has_work()
    assert llm.add_prefix("rules", "x" * 64).version == 1
    llm.remove_prefix("rules")
    assert llm._core.leases.book.free == llm._core.leases.book.budget
    llm.check()


def test_prefix_without_caching(engine: Make, reference: Find) -> None:
    """Without prefix caching a named prefix still works; it is computed each time."""
    llm = engine("llama", enable_prefix_caching=False)
    assert llm.add_prefix("rules", RULES).bytes == 0
    [output] = llm.generate(["Where?"], greedy(6), prefix="rules")
    assert output.cached_tokens == 0
    reference("llama").check(output.prompt_tokens, output.outputs[0], 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory": "7 bytes"}, "--kv-memory.*65536 tokens"),
        ({"kv_memory": "many tokens"}, "--kv-memory.*65536 tokens"),
        ({"kv_memory": "4 tokens"}, "less than two blocks"),
        ({"kv_memory": "1KiB"}, "less than two blocks"),
        ({"block_size": 0}, "must be at least 1"),
        ({"dtype": "int8"}, "must be auto, float32"),
        ({"device": "tpu"}, "must be auto, cpu, cuda or cuda:N"),
        ({"max_model_len": 513}, "supports only 512"),
        ({"reserve": 1.0}, "share of the blocks"),
    ],
    ids=str,
)
def test_bad_configuration(options: dict[str, Any], message: str, engine: Make) -> None:
    """A configuration that cannot work is an error that says what was expected."""
    with pytest.raises(ConfigError, match=message):
        engine("llama", **options)


def test_memory_in_all_units(engine: Make) -> None:
    """KV memory can be given in bytes, tokens, or as a share of free memory; the pool has the matching number of
    blocks, and no more than are useful."""
    per_block = engine("llama").info.kv_bytes_per_block
    assert per_block == 4 * 3 * 2 * 2 * 16 * 4  # tokens, layers, K and V, heads, dimension, float32
    assert engine("llama", kv_memory=str(per_block * 10 + 1)).info.num_blocks == 10
    assert engine("llama", kv_memory="41 tokens").info.num_blocks == 11
    assert engine("llama", kv_memory="auto", max_num_seqs=2).info.num_blocks == 2 * 512 // 4
