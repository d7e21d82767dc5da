"""Requests and outputs of the engine, and the model that answers: frozen messages, no torch.

A `Request` is one prompt with its `SamplingParams`. The engine answers with a `Delta` for each step that sampled tokens of the
request. The last `Delta` has a `finish_reason`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast

from foreword.blocks.leases import Lease
from foreword.blocks.retention import Retention, RetentionAnswer
from foreword.blocks.salt import NO_SALT, Salt
from foreword.errors import BadRequest, ForewordError
from foreword.request_errors import EngineFailed, GrammarTooComplex, RequestFailed
from foreword.tokens.reasoning_stops import ReasoningSpan
from foreword.tokens.structured_output import StructuredOutput
from foreword.tokens.token_logprob import MAX_LOGPROBS, TokenLogprob

# `moved`: it continues at another instance (`Delta.moved`).
FinishReason = Literal["stop", "length", "abort", "error", "moved"]
MissReason = Literal[
    "all_cached",
    "never_seen",
    "diverged",
    "evicted",
    "checkpoint_missing",
    "shorter_than_block",
    "disabled",
]

MAX_N = 128
MAX_RETENTIONS = 16
MAX_BAD_WORDS = 256
_SHOWN_TEXT = 60
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next tokens are sampled. Defaults are OpenAI's, except `max_tokens` (None: as long as the model allows).

    Attributes:
        max_tokens: new tokens at most; 0 computes the prompt only, so that it is cached.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches this.
        min_p: drop tokens less likely than this share of the likeliest.
        seed: the same seed, prompt and parameters give the same tokens in any batch. (In bfloat16 the rounding of the logits
            depends on the batch and on what was cached, so two nearly equal tokens may swap.)
        stop: a string or several that end the text (they are not part of it unless `include_stop`).
        stop_token_ids: tokens that end it, besides the model's own end tokens.
        min_tokens: tokens before an end token is sampled, or a stop string ends the text.
        reasoning: how the text begins with reasoning, inside of which stop strings do not count. Servers set it for chats.
        ignore_eos: continue after the model's end tokens.
        logprobs: number of alternatives to report per token (0: the chosen token only), None for no log-probabilities.
        prompt_logprobs: the same for the tokens of the prompt; it is then computed, also where it is cached.
        presence_penalty, frequency_penalty: OpenAI's, over generated tokens. repetition_penalty: over prompt and output.
        logit_bias: token id to a number that is added to its logit.
        n: sequences per prompt.
        allowed_token_ids: sample only these; None allows all.
        bad_words: texts that are not generated.
        skip_special_tokens: leave special tokens out of the text.
        structured: what the text must match.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    n: int = 1
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: str | Sequence[str] = ()
    skip_special_tokens: bool = True
    structured: StructuredOutput | None = None
    reasoning: ReasoningSpan | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        _within("max_tokens", self.max_tokens, 0, None)
        _within("min_tokens", self.min_tokens, 0, None)
        _within("temperature", self.temperature, 0.0, None)
        _within("top_k", self.top_k, 0, None)
        _within("top_p", self.top_p, 0.0, 1.0)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _within("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _within("n", self.n, 1, MAX_N)
        if self.top_p == 0.0:
            raise BadRequest("top_p must be greater than 0", param="top_p")
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for bias in self.logit_bias.values():
            _within("logit_bias", bias, -math.inf, None)
        if not all(self.stop_strings):
            raise BadRequest("a stop string must not be empty", param="stop")
        if self.allowed_token_ids == ():
            raise BadRequest("allowed_token_ids must name at least one token", param="allowed_token_ids")
        for name in ("stop", "bad_words"):
            if any(map(_SURROGATE.search, getattr(self, name))):
                raise BadRequest(
                    f"{name} contains an unpaired surrogate (U+D800 to U+DFFF), which UTF-8 cannot encode", param=name
                )
        if any(not text for text in self.bad_words) or len(self.bad_words) > MAX_BAD_WORDS:
            raise BadRequest(f"bad_words must be at most {MAX_BAD_WORDS} texts, none of them empty", param="bad_words")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return cast("tuple[str, ...]", self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        """Whether what was generated changes the logits of the next token."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


def _as_tuple(value: Any) -> Any:
    """A text stands for itself, not for its letters."""
    if value is None or isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, str | int) else tuple(value)


def _within(name: str, value: float | None, low: float, high: float | None) -> None:
    if value is None:
        return
    if not math.isfinite(value) or value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        bounds = "finite" if low == -math.inf else bounds
        raise BadRequest(f"{name} must be {bounds}, not {value}", param=name)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to be continued.

    Attributes:
        id: unique among the requests in flight.
        tokens: the whole prompt, a named prefix included.
        salt: of its tenant and client; equal salts share cached blocks, different ones never do.
        index: which of the `n` sequences of its prompt this is.
        want_cache_report: explain in the final `Delta` where the prompt's KV came from.
        prefill: transfer address of the instance that computes the prompt; "" computes it here.
        retain: which of its prefixes are kept, and how long; in order of their ends.
        output: tokens that another engine has generated after the prompt. Generation continues after them.
        named: the lease of a named prefix, whose text the prompt is.
        session: the session that it belongs to, if the client has opened one of this name.
        supersedes: id of an earlier request whose history this one has in a shorter form.
    """

    id: str
    tokens: tuple[int, ...]
    params: SamplingParams
    salt: Salt = NO_SALT
    index: int = 0
    want_cache_report: bool = False
    prefill: str = ""
    retain: tuple[Retention, ...] = ()
    output: tuple[int, ...] = ()
    named: Lease[int] | None = None
    session: str = ""
    supersedes: str = ""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The part of a prompt that was a prefix cache hit, its source, and why the rest was not.

    Attributes:
        prompt_tokens: length of the prompt.
        cached_tokens: tokens whose KV was reused: `device_tokens` + `copied_tokens` + all of `loaded_tokens`.
        device_tokens: reused from full blocks shared in place.
        copied_tokens: reused by copying a partial block.
        computed_tokens: tokens that were computed.
        reason: why reuse ended where it did.
        diverged_at: for `diverged`, the position of the first token that differs from the nearest cached prompt.
        detail: the same in a sentence.
        loaded_tokens: reused from each tier off the device, by the tier's label; `prefill host:port` is what another instance
            had cached.
        transferred_tokens: sent by another instance, by the same label, cached there or computed for this request. What it
            computed is part of `computed_tokens`.
        retained: what became of the request's cache control, in order of the positions.
        public_tokens: those of `cached_tokens` that are public, shared by all tenants.
    """

    prompt_tokens: int
    cached_tokens: int
    device_tokens: int
    copied_tokens: int
    computed_tokens: int
    reason: MissReason
    diverged_at: int | None
    detail: str
    loaded_tokens: dict[str, int] = field(default_factory=dict)
    transferred_tokens: dict[str, int] = field(default_factory=dict)
    retained: tuple[RetentionAnswer, ...] = ()
    public_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MigratedTo:
    """Where a request continues: at `to` under the id `request_id`, after `tokens` generated tokens."""

    to: str
    request_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Output of one step for one sequence.

    Attributes:
        request_id: the request's id.
        index: which of the prompt's `n` sequences.
        tokens: new tokens, in order, a stop token included.
        text: new text, complete characters only, with stop strings already cut.
        logprobs: one per token if asked for, else empty.
        finish_reason: set on the last delta only. `stop_match` is the stop string or stop token that ended it.
        prompt_tokens, cached_tokens: lengths, known from the first delta on.
        prompt_logprobs: on a sequence's first delta, if they were requested; None for the first token of the prompt.
        error: the message, if `finish_reason` is "error". `client_fault`: the request caused it. `isolated`: only this request
            failed; the engine and the other requests continue.
        moved: where it continues, if that is "moved".
        retained: on the last delta, the answers to `Request.retain`, in order of their ends.
    """

    request_id: str
    index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_match: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_report: CacheReport | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    client_fault: bool = False
    isolated: bool = False
    moved: MigratedTo | None = None
    retained: tuple[RetentionAnswer, ...] = ()

    @property
    def failure(self) -> ForewordError:
        """The error, if `finish_reason` is "error"."""
        message = self.error or "A step of the engine failed"
        if self.client_fault:
            return GrammarTooComplex(message, param="response_format")
        return (
            RequestFailed(f"the engine failed at this request: {message}") if self.isolated else EngineFailed(message)
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sequence of a prompt."""

    index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_match: str | int | None = None

    def __repr__(self) -> str:
        return f"Completion({_short(self.text)}, {len(self.tokens)} tokens, finish_reason={self.finish_reason!r})"


def _short(text: str) -> str:
    """A text as it stands in a `repr`: its start."""
    return repr(text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}...")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The output of one prompt: `n` completions, in order of their index.

    Attributes:
        error: why the request failed; None if it did not. Completions that had not ended by then have the text so far and the
            finish_reason "error".
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    cached_tokens: int
    outputs: tuple[Completion, ...]
    cache_report: CacheReport | None = None
    time_to_first_token: float = 0.0
    retained: tuple[RetentionAnswer, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: ForewordError | None = None

    def __repr__(self) -> str:
        failed = "" if self.error is None else f", error={self.error.message!r}"
        prompt = f"{len(self.prompt_tokens)} prompt tokens, {self.cached_tokens} cached"
        return f"RequestOutput({self.request_id!r}, {prompt}, {list(self.outputs)!r}{failed})"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served. `fingerprint` of the weights and `namespace`, which names their KV, are hexadecimal;
    `max_model_len` counts prompt and output; a block of the pool has the KV of one of the `kv_groups`. `sampling` has the
    model's own values of fields of `SamplingParams`. `backends` says which kernels serve which shapes, and why; `inexact` why
    the bits of KV depend on the batch, and is empty if they do not."""

    name: str
    max_model_len: int
    vocab_size: int
    fingerprint: str
    dtype: str
    device: str
    block_size: int
    num_blocks: int
    kv_bytes_per_block: int
    parameters: int
    kv_groups: int = 1
    sampling: Mapping[str, float] = field(default_factory=dict)
    backends: tuple[str, ...] = ()
    inexact: str = ""
    namespace: str = ""

    def sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Parameters of a request: those given, then the model's, then the defaults. Raises BadRequest."""
        return SamplingParams(**{**self.sampling, **given})

    @property
    def kv_tokens(self) -> int:
        """Tokens that the pool holds at least; window groups free what has left their windows, and leave room for more."""
        return self.num_blocks * self.block_size // self.kv_groups

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that a token takes in all layers."""
        return self.kv_bytes_per_block * self.kv_groups // self.block_size
