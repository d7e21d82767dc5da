"""Claims about settings of vLLM: pairs of which the second must not be given the first's KV, or must find it all.

`PAIRS` is the table; another pair is another row. Pairs with the same first server share its prompts and what it has stored,
so their second servers must differ from each other too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from foreword.referee.models import KINDS
from foreword.referee.session import Check, Evidence, RandomPrompts, Session, arguments

# The least share of the tokens that an equal server finds.
_SHARE: Final = 0.95


@dataclass(frozen=True)
class Pair:
    """Two settings of one model.

    Attributes:
        changes: whether KV that was computed with `a` is wrong for `b`.
        kind: the kind of model.
        a, b: vLLM's arguments of the two servers. Besides, `config_file` is a dictionary of keys of a `config.json` in
            another folder, given as `hf_config_path`; `folder`: the model is a copy in another folder; `variables` are
            for the environment; `extra` are keys of Foreword's `kv_connector_extra_config`.
        config: keys of the model's `config.json` that are other than the kind's, for both.
        standard: whether the pair is in the standard set.
    """

    name: str
    changes: bool
    kind: str
    b: Mapping[str, Any]
    a: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    standard: bool = False

    @property
    def text(self) -> str:
        """The value in words."""
        both = f" (with other {', '.join(self.config)})" if self.config else ""
        return f"{self.kind}{both}: {_words(self.a) or 'as usual'}, then {_words(self.b)}"


def _words(settings: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {{{_words(value)}}}" if isinstance(value, Mapping) else f"{key} {value}"
        for key, value in settings.items()
    )


def _rope(kind: str, theta: float = 1e4, **more: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


_LONG: Final = {
    **_rope("longrope", original_max_position_embeddings=1024),
    "original_max_position_embeddings": 1024,
}
_LONG["rope_parameters"] |= {
    "short_factor": [1 + 0.05 * i for i in range(16)],
    "long_factor": [1.0 + i for i in range(16)],
}
_TEMPERATURE: Final = {"floor_scale": 16, "attn_scale": 0.5, "max_position_embeddings": 65_536}
_BF16: Final = {"dtype": "bfloat16"}
_E4M3: Final = {**_BF16, "kv_cache_dtype": "fp8_e4m3"}
_FP8: Final = {**_BF16, "quantization": "fp8_per_channel"}
_SHORTEST: Final = 40
_ONE_THREAD: Final = {"VLLM_CPU_OMP_THREADS_BIND": "0"}
_SAME: Final = {
    "served_model_name": "another",
    "folder": True,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 192,
    "max_model_len": 1_000,
    "kv_cache_memory_bytes": 64 << 20,
    "variables": _ONE_THREAD,
    "seed": 7,
}


def _override(**keys: Any) -> dict[str, Any]:
    return {"hf_overrides": keys}


PAIRS: Final = (
    # RoPE
    Pair("longrope", True, "Phi-3", {"max_model_len": 1024}, config=_LONG, standard=True),
    Pair("config-path", True, "Llama", {"config_file": _rope("default", 500.0)}, standard=True),
    Pair("overrides", True, "Llama", _override(**_rope("default", 700.0)), standard=True),
    Pair("linear", True, "Llama", _override(**_rope("linear", factor=2.0))),
    Pair("dynamic", True, "Llama", _override(**_rope("dynamic", alpha=4.0))),
    Pair("theta", True, "Cohere 2", _override(**_rope("default", 500.0))),
    Pair(
        "yarn",
        True,
        "Qwen3",
        _override(**_rope("yarn", factor=4.0, original_max_position_embeddings=512)),
        _override(**_rope("yarn", factor=2.0, original_max_position_embeddings=1024)),
    ),
    Pair(
        "yarn-experts",
        True,
        "gpt-oss",
        _override(
            **_rope("yarn", 500.0, factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
        ),
    ),
    # Windows, chunks, temperature
    Pair("window-off", True, "Mistral", _override(sliding_window=None), standard=True),
    Pair("window", True, "Gemma 3", _override(sliding_window=64)),
    Pair("window-norms", True, "OLMo 3", _override(sliding_window=64)),
    Pair("window-sinks", True, "gpt-oss", _override(sliding_window=64)),
    Pair("chunk", True, "Llama 4", _override(attention_chunk_size=128)),
    Pair("temperature", True, "Llama 4", {"max_model_len": 40_000}, config=_TEMPERATURE),
    Pair(
        "temperature-generation",
        True,
        "Llama 4",
        {"override_generation_config": {"attn_temperature_tuning": True}},
        config={**_TEMPERATURE, "floor_scale": 32},
    ),
    # Numbers
    Pair("kv-dtype", True, "Llama", _E4M3, _BF16),
    Pair("kv-dtype-8-bit", True, "Llama", {**_BF16, "kv_cache_dtype": "fp8_e5m2"}, _E4M3),
    Pair("dtype-8-bit", True, "Llama", {**_E4M3, "dtype": "float16"}, _E4M3, standard=True),
    Pair("kv-dtype-layers", True, "Llama", {**_E4M3, "kv_cache_dtype_skip_layers": ["0"]}, _E4M3),
    Pair("quantization", True, "Llama", _FP8, _BF16),
    Pair(
        "quantization-arguments",
        True,
        "Llama",
        {**_FP8, "quantization_config": {"ignore": ["re:.*layers\\.0\\..*"]}},
        _FP8,
        standard=True,
    ),
    # The rest of a configuration
    Pair("norm", True, "Qwen3", _override(rms_norm_eps=0.1)),
    Pair("experts-per-token", True, "Qwen3-MoE", _override(num_experts_per_tok=1)),
    Pair("attention-scale", True, "Gemma 3", _override(query_pre_attn_scalar=64)),
    Pair("keys", True, "Falcon-H1", _override(key_multiplier=0.5)),
    Pair("residual", True, "Granite 4", _override(residual_multiplier=0.5)),
    # Options that change no KV
    Pair("same", False, "Llama", _SAME, standard=True),
    Pair("name", False, "Llama", {"served_model_name": "another"}),
    Pair("folder", False, "Llama", {"folder": True}),
    Pair("batches", False, "Llama", {"max_num_seqs": 3, "max_num_batched_tokens": 192}),
    Pair("length", False, "Llama", {"max_model_len": 1_000}),
    Pair("memory", False, "Llama", {"kv_cache_memory_bytes": 64 << 20}),
    Pair("threads", False, "Llama", {"variables": _ONE_THREAD}),
    Pair("same-windows", False, "Gemma 3", _SAME),
    Pair("same-sinks", False, "gpt-oss", _SAME),
    Pair("same-experts", False, "Qwen3-MoE", _SAME),
    Pair(
        "portable-block-size",
        False,
        "Llama",
        {"block_size": 64, "extra": {"layout": "portable"}},
        {"extra": {"layout": "portable"}},
    ),
)


def pair_claim(pair: Pair) -> Check:
    """The claim that the second server of a pair finds nothing of the first, or as much as an equal one."""

    def check(session: Session, draw: RandomPrompts, evidence: Evidence) -> None:
        name = f"{pair.kind} {pair.a} {pair.config}"
        lengths = draw.lengths
        if "quantization" in {*pair.a, *pair.b}:
            # vLLM multiplies 8-bit weights slowly on most CPUs: prompts of one block at least, for a hit.
            lengths = tuple(min(length, _SHORTEST + length // 8) for length in lengths)
        asked = RandomPrompts(draw.seed.replace(pair.name, name), lengths).prompts()
        model, first = _settings(session, pair, pair.a)
        other_model, second = _settings(session, pair, pair.b)
        before, equal = session.written(asked, model, **first)
        evidence.must_hit(equal, "with equal settings")
        worker = session.connected(other_model, **second)
        found = worker.ask_all(asked)
        if pair.changes:
            right = session.computed(worker, asked, other_model, **second)
            evidence.must_compute(found, "of the other server", right)
            if not Evidence.differ(before, right):
                evidence.missing.append("the settings change no answer")
        else:
            evidence.must_find(found, [one["cached"] for one in equal], "of the other server", _SHARE)
            evidence.same(found, before)

    want = "must miss" if pair.changes else "must hit"
    check.__doc__ = f"{pair.text}: {want}."
    return check


def _settings(session: Session, pair: Pair, given: Mapping[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The folder of the model and vLLM's arguments."""
    model = session.model(pair.kind, config=pair.config)
    settings = arguments(KINDS[pair.kind], **given)
    config = settings.pop("config_file", None)
    if config is not None:
        settings["hf_config_path"] = str(session.copy(model, config))
    if settings.pop("folder", False):
        model = session.copy(model, {"_name_or_path": "another"})
    return model, settings
