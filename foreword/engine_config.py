"""Configuration of the embedded engine, and of the prefixes that it keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypedDict

from foreword.config import at_least, between, check_section, checked, constant, fixed, one_of, parse_bytes
from foreword.errors import ConfigError

KV_MEMORY_FORMS = "write auto, a size such as 4GiB, or a number of tokens such as 65536 tokens"


# Numbers of the weights and of KV; `auto` is the checkpoint's.
Dtype = Literal["auto", "float32", "bfloat16", "float16"]


class EngineOptions(TypedDict, total=False):
    """The fields of `EngineConfig` but `model`, as keyword arguments: what each means stands there."""

    served_model_name: str | None
    dtype: Dtype
    device: str
    kv_memory: str
    block_size: int
    max_model_len: int | None
    max_batch_tokens: int
    max_num_seqs: int
    reserve: float
    enable_prefix_caching: bool
    threads: int | None
    linear_memory: str
    kernels: Literal["auto", "native", "torch", "triton"]
    quantization: Literal["none", "int8"]
    batch_invariant: Literal["auto", "on", "off"]
    self_check: bool
    trust_remote_code: bool
    generation_config: Literal["model", "openai"]
    seed: int | None
    audit_every: int
    audit_reports: str | None
    audit_evidence: bool


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine: model, device, KV memory, and the size of steps.

    Attributes:
        model: folder or Hugging Face name of the model; by default the embedded model.
        served_model_name: model name in the API; by default the last part of `model`.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: `auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`.
        kv_memory: memory for KV blocks: `auto`, a size (`4GiB`) or a number of tokens (`65536 tokens`).
        block_size: tokens in a block of KV.
        max_model_len: longest prompt plus output in tokens; by default the model's.
        max_batch_tokens: maximum number of tokens computed in a step; longer prompts are prefilled in chunks.
        max_num_seqs: maximum number of sequences in a step.
        reserve: share of the blocks that admission of new requests leaves free for the growth of running ones.
        enable_prefix_caching: reuse cached blocks between requests.
        threads: CPU threads for computation; by default the number of cores.
        linear_memory: on CPUs, memory for packed copies of the weights, which replace them: `auto` (at most half of the free
            memory), a size, or `0`.
        kernels: `native` (compiled from C++ at first start), `torch` (PyTorch's operators), `triton` (on CUDA), or `auto`
            (Triton on CUDA; on CPUs for each shape the faster of native and torch, measured at the first start).
        quantization: `none`, or `int8`: on CPUs, weights of linear layers as 8-bit integers with one scale for each output.
            KV is not shared with the unquantized model.
        batch_invariant: compute each token's KV and logits with the same bits in whatever chunks and batch, so that a hit
            equals the computation bit for bit: `auto` (wherever the engine can keep it: on CPUs, by the compiled kernels), `on`
            (an error where it cannot be kept) or `off` (the fastest kernels; KV is shared with other processors and builds).
        self_check: compare the engine with the model's own forward pass at start, and refuse a model that differs.
        trust_remote_code: run Python code that a checkpoint contains.
        generation_config: sampling where a request says nothing: `model` (temperature, top_p, top_k, min_p and
            repetition_penalty of the model's generation_config.json) or `openai` (temperature 1 and no filters).
        seed: seed for requests without one; by default random.
        audit_every: recompute one prefix hit in N while the engine is idle, in at most a tenth of the time, and compare its KV;
            0 for none.
        audit_reports: folder for a report of each hit that differs.
        audit_evidence: put the tokens and the wrong KV into these reports, for `foreword audit rerun`. Both reveal the prompt.
    """

    GONE = (
        ("shared_prefix_attention", fixed("on")),
        ("report_other_tenants", fixed("off")),
        ("history_tokens", fixed("1,048,576")),
    )
    model: str | None = None
    served_model_name: str | None = None
    dtype: str = one_of(("auto", "float32", "bfloat16", "float16"), "auto")
    device: str = checked(
        "auto", "auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None
    )
    kv_memory: str = "auto"
    block_size: int = at_least(1, 16)
    max_model_len: int | None = at_least(2, None)
    max_batch_tokens: int = at_least(1, 512)
    max_num_seqs: int = at_least(1, 64)
    reserve: float = checked(0.01, "a share of the blocks, from 0 to below 1", lambda value: 0 <= value < 1)
    enable_prefix_caching: bool = True
    threads: int | None = at_least(1, None)
    linear_memory: str = "auto"
    kernels: str = one_of(("auto", "native", "torch", "triton"), "auto")
    quantization: str = one_of(("none", "int8"), "none")
    batch_invariant: str = one_of(("auto", "on", "off"), "auto")
    self_check: bool = True
    trust_remote_code: bool = False
    generation_config: str = one_of(("model", "openai"), "model")
    seed: int | None = None
    audit_every: int = at_least(0, 0)
    audit_reports: str | None = None
    audit_evidence: bool = False
    # Extra blocks per sequence while enough are free, so that its blocks are consecutive.
    lookahead_blocks: int = constant(4, "4")
    # A partly filled block is copied, which is less than computing it.
    partial_reuse: bool = constant(True, "on")
    audit_budget: float = constant(0.1, "a tenth of the time")  # what is idle otherwise

    def __post_init__(self) -> None:
        check_section("engine", self)
        self.kv_size()
        if self.linear_memory != "auto":
            parse_bytes(self.linear_memory, "engine.linear_memory (--linear-memory)")

    def kv_size(self) -> tuple[int, Literal["bytes", "tokens"]] | None:
        """`kv_memory` as a number of bytes or tokens; None for `auto`. Raises ConfigError."""
        text = self.kv_memory.strip()
        if text == "auto":
            return None
        tokens = text.endswith("tokens")
        number = text.removesuffix("tokens").strip().replace("_", "").replace(",", "")
        try:
            # No model has blocks that small: this was meant in another unit.
            if (size := int(number) if tokens else parse_bytes(text)) < (1 if tokens else 1024):
                raise ValueError
            return size, "tokens" if tokens else "bytes"
        except (ConfigError, ValueError):
            raise ConfigError(f"engine.kv_memory (--kv-memory) is {text!r}; {KV_MEMORY_FORMS}") from None


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Leases: named prefixes, and those that requests keep (cache control).

    Attributes:
        budget: KV memory that may be kept: a size (`1GiB`) or a share of the pool (`25%`). Cache control may keep half of it,
            where named prefixes leave as much.
        retain_tenant_share: share of that half which one tenant may keep.
    """

    GONE = (
        ("retain_entries", fixed("128")),
        ("retain_seconds", fixed("a day")),
        ("retain_budget", "it is half of budget"),
    )
    budget: str = "50%"
    retain_tenant_share: float = between(0.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        check_section("prefixes", self)
        self.budget_bytes(0)

    def budget_bytes(self, pool_bytes: int) -> int:
        """The budget of all that is kept in a pool of `pool_bytes`."""
        return _share_of(self.budget, pool_bytes, "budget")


def _share_of(text: str, pool_bytes: int, key: str) -> int:
    """A size, or a share of the pool, in bytes. Raises ConfigError."""
    if not text.endswith("%"):
        return parse_bytes(text, f"prefixes.{key} (--prefix-{key.replace('_', '-')})")
    try:
        share = float(text[:-1])
    except ValueError:
        share = -1.0
    if not 0 <= share <= 90:
        raise ConfigError(f"prefixes.{key} must be between 0% and 90% of the pool, not {text!r}")
    return int(pool_bytes * share / 100)
