"""`POST /v1/completions`: OpenAI's fields, and those that vLLM adds."""

from __future__ import annotations

from typing import Any, Final

from foreword.api.dialects.decode import Limits, check_length, decode, refuse
from foreword.api.dialects.sampling import (
    Alternatives,
    SamplingBody,
    common,
    output_format,
    refuse_unsupported,
    sampling_of,
)
from foreword.api.request import GenerateRequest, Prompt

DEFAULT_TOKENS: Final = 16
_SHAPES: Final = "must be a string, a list of strings, a list of token ids, or a list of such lists, and not empty"


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[int | str | list[int]]
    logprobs: Alternatives | None = None


def parse(raw: bytes, limits: Limits) -> GenerateRequest:
    """Raises BadRequest, which names the parameter, and BodyTooLarge."""
    body = decode(CompletionBody, raw, limits)
    refuse_unsupported(body)
    return GenerateRequest(
        "completions",
        prompts=_prompts(body.prompt, limits),
        sampling=_sampling(body, limits),
        output_format=output_format(body, limits),
        add_special_tokens=body.add_special_tokens is not False,
        echo=bool(body.echo),
        **common(body, limits),
    )


def _sampling(body: CompletionBody, limits: Limits) -> dict[str, Any]:
    sampling = {"max_tokens": DEFAULT_TOKENS, **sampling_of(body, limits)}
    if body.logprobs is not None:
        sampling["logprobs"] = body.logprobs
    return sampling


def _prompts(prompt: str | list[Any], limits: Limits) -> tuple[Prompt, ...]:
    """OpenAI's four shapes of `prompt` as a tuple of prompts."""
    if isinstance(prompt, str):
        return (prompt,)
    kinds = set(map(type, prompt))
    if len(kinds) != 1:
        raise refuse("prompt", _SHAPES)
    if kinds == {int}:
        check_length(prompt, limits.token_ids, "prompt")
        return (tuple(prompt),)
    check_length(prompt, limits.prompts, "prompt")
    if kinds == {str}:
        return tuple(prompt)
    if sum(map(len, prompt)) > limits.token_ids:
        raise refuse("prompt", f"must have at most {limits.token_ids} token ids")
    return tuple(map(tuple, prompt))
