"""Fields that several dialects share: sampling parameters, those that vLLM adds, and this server's."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw, Struct

from foreword.api.dialects.conversation_body import CacheOptions, openai_ttl
from foreword.api.dialects.decode import NO_JSON, UNSET_RAW, Limits, bounded_object, check_length, is_set, refuse
from foreword.api.request import CacheControl, Continuation, OutputFormat
from foreword.decoders import decode_json
from foreword.tokens.token_logprob import MAX_LOGPROBS

# Python's integers are unbounded; the code that uses these fields is not.
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Alternatives = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]

_DAY: Final = 86_400.0
_RETENTIONS: Final[Mapping[str, float | None]] = {
    "in_memory": None,
    "in-memory": None,
    "5m": 300.0,
    "1h": 3600.0,
    "24h": _DAY,
}
_MOST_RETENTION: Final = 30 * _DAY
_SMALL_BYTES: Final = 64
_NONE: Final = (None,) * 5

# Fields that would change the answer and are not supported: the values that mean "not used", and the reason.
UNSUPPORTED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "functions": (([],), "not supported by this server; use tools"),
    "function_call": (("none", "auto"), "not supported by this server; use tool_choice"),
    "structured_outputs": ((), "not supported in this dialect; use text.format"),
    "suffix": (("",), "text after the completion is not supported by this server"),
    "prompt_embeds": ((), "only text and token ids are supported as a prompt"),
    "use_beam_search": ((False,), "beam search is not supported by this server"),
    "truncate_prompt_tokens": ((), "prompts are never shortened; send a shorter one"),
    "logits_processors": (([],), "custom logits processors are not supported by this server"),
    "chat_template": ((), "the model's own chat template is used"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "web_search_options": ((), "this server cannot search the web"),
    "background": ((False,), "responses are not computed in the background by this server"),
    "conversation": ((), "not supported by this server; use previous_response_id"),
    "prompt": ((), "prompts are not stored on this server; send input"),
    "truncation": (("disabled",), "prompts are never shortened; send a shorter one"),
    "documents": (([],), "not supported by this server; put them into a message"),
    "logprob_token_ids": (([],), "not supported by this server; use logprobs"),
    "mcp_servers": (([],), "not supported by this server; call the tools in the client"),
    "previous_input_messages": (([],), "not supported by this server; send input"),
    "repetition_detection": ((), "not supported by this server; use frequency_penalty"),
    "return_tokens_as_token_ids": ((False,), "not supported by this server; use return_token_ids"),
    "thinking_token_budget": ((), "the length of the reasoning is not limited by this server; use max_tokens"),
    "vllm_xargs": (({},), "belongs to plugins of vLLM"),
    "watermarking": ((False,), "answers are not watermarked by this server"),
}


class StreamOptions(Struct):
    include_usage: bool | None = None


class TransferParams(Struct):
    """Set by a router. `prefill`: transfer address of the instance that computes the prompt."""

    prefill: str | None = None


class ContinuedChoiceBody(Struct):
    """The output of one of several choices, which had not ended."""

    index: Annotated[int, Meta(ge=0)]
    token_ids: list[int]


class ContinuationBody(Struct):
    """Set by a router: another server's prompt, and the output that the client has from it: `token_ids` of the only choice, or
    that of each of several that had not ended; those that had have `ended_tokens`."""

    prompt_token_ids: list[int]
    token_ids: list[int] = []
    choices: list[ContinuedChoiceBody] = []
    ended_tokens: Annotated[int, Meta(ge=0, le=2**31)] = 0


class JsonSchemaBody(Struct):
    name: str | None = None
    schema: Raw = UNSET_RAW
    strict: bool | None = None


class ResponseFormat(Struct):
    type: str
    json_schema: JsonSchemaBody | None = None


class StructuredOutputs(Struct):
    """vLLM's `structured_outputs`."""

    json: Raw = UNSET_RAW
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Raw = UNSET_RAW


class CommonFields(Struct, kw_only=True):
    """Fields that all dialects have: their own, and those of this server. None means the default."""

    model: str | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    seed: Whole | None = None
    ignore_eos: bool | None = None
    stop_in_reasoning: bool | None = None
    stream: bool | None = None
    prefix: str | None = None
    cache_report: bool | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    priority: Whole | None = None
    kv_transfer_params: TransferParams | None = None
    vllm_xargs: Raw = UNSET_RAW
    watermarking: Raw = UNSET_RAW


class OpenAIFields(CommonFields, kw_only=True):
    """Fields that OpenAI's dialects have besides."""

    min_p: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, Bias] | None = None
    prompt_cache_retention: str | float | None = None
    prompt_cache_options: CacheOptions | None = None
    user: str | None = None


class SamplingBody(OpenAIFields, kw_only=True):
    """Fields that chat completions and completions have besides."""

    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: Alternatives | None = None
    n: Whole | None = None
    best_of: Whole | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = UNSET_RAW
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None
    continuation: ContinuationBody | None = None
    suffix: Raw = UNSET_RAW
    prompt_embeds: Raw = UNSET_RAW
    use_beam_search: Raw = UNSET_RAW
    truncate_prompt_tokens: Raw = UNSET_RAW
    logits_processors: Raw = UNSET_RAW
    logprob_token_ids: Raw = UNSET_RAW
    repetition_detection: Raw = UNSET_RAW
    return_tokens_as_token_ids: Raw = UNSET_RAW
    thinking_token_budget: Raw = UNSET_RAW


def refuse_unsupported(body: Struct) -> None:
    """Raises BadRequest for a field in `UNSUPPORTED` that is used."""
    names, values = _unsupported(type(body))
    for name, value in zip(names, values(body), strict=True):
        if value is not NO_JSON and is_set(value) and not _is_neutral(value, UNSUPPORTED[name][0]):
            raise refuse(name, UNSUPPORTED[name][1])


@functools.cache
def _unsupported(kind: type[Struct]) -> tuple[tuple[str, ...], Callable[[Struct], tuple[Raw, ...]]]:
    fields = msgspec.structs.fields(kind)
    names = tuple(one.name for one in fields if one.name in UNSUPPORTED and one.type is Raw)
    return names, operator.attrgetter(*names)


def _is_neutral(value: Raw, neutral: tuple[Any, ...]) -> bool:
    text = bytes(memoryview(value)[: _SMALL_BYTES + 1])
    return len(text) <= _SMALL_BYTES and msgspec.json.decode(text) in neutral


def common_sampling(body: CommonFields, **more: Any) -> dict[str, Any]:
    """Sampling fields that the client gave, of those that all dialects have."""
    given = {
        "temperature": body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "top_p": body.top_p,
        "seed": body.seed,
        "ignore_eos": body.ignore_eos,
        **more,
    }
    return {name: value for name, value in given.items() if value is not None}


def openai_sampling(body: OpenAIFields, limits: Limits, **more: Any) -> dict[str, Any]:
    """Sampling fields that the client gave, of OpenAI's dialects. Raises BadRequest."""
    check_length(body.stop_token_ids or (), limits.stop_tokens, "stop_token_ids")
    check_length(body.logit_bias or (), limits.biases, "logit_bias")
    return common_sampling(
        body,
        min_p=body.min_p,
        stop=stop_strings(body.stop, limits) or None,
        stop_token_ids=_tuple(body.stop_token_ids),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        **more,
    )


def sampling_of(body: SamplingBody, limits: Limits) -> dict[str, Any]:
    """The fields of `SamplingParams` that the client gave. Raises BadRequest."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refuse("best_of", "not supported; ask for n answers with logprobs, and take the likeliest")
    if body.prompt_logprobs is not None and body.stream:
        raise refuse("prompt_logprobs", "cannot be streamed")
    return openai_sampling(
        body,
        limits,
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens,
        include_stop=body.include_stop_str_in_output,
        allowed_token_ids=_tuple(body.allowed_token_ids),
        bad_words=_tuple(body.bad_words),
        skip_special_tokens=body.skip_special_tokens,
        prompt_logprobs=body.prompt_logprobs,
        n=body.n,
    )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def stop_strings(stop: str | list[str] | None, limits: Limits, param: str = "stop") -> tuple[str, ...]:
    """Raises BadRequest."""
    strings = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    check_length(strings, limits.stop_strings, param)
    if not all(strings):
        raise refuse(param, "must be a string or a list of strings, none of them empty")
    return strings


def _retention(given: str | float | None) -> float | None:
    if isinstance(given, str):
        if given not in _RETENTIONS:
            raise refuse("prompt_cache_retention", 'must be "in_memory", "5m", "1h", "24h" or a number of seconds')
        return _RETENTIONS[given]
    if given is not None and not 0 < given <= _MOST_RETENTION:
        raise refuse("prompt_cache_retention", f"must be more than 0 and at most {_MOST_RETENTION:.0f} seconds")
    return given


def _continuation(body: SamplingBody, limits: Limits) -> Continuation | None:
    given = body.continuation
    if given is None:
        return None
    if not body.stream:
        raise refuse("continuation", "needs stream")
    check_length(given.prompt_token_ids, limits.token_ids, "continuation.prompt_token_ids", least=1)
    prompt, count = tuple(given.prompt_token_ids), body.n or 1
    if not given.choices:
        if count > 1:
            raise refuse("continuation", "needs the choices of a request with several")
        check_length(given.token_ids, limits.token_ids, "continuation.token_ids", least=1)
        return Continuation(prompt, tuple(given.token_ids))
    if given.token_ids or len({one.index for one in given.choices if one.index < count}) != len(given.choices):
        raise refuse("continuation", "needs different choices of this request")
    for one in given.choices:
        check_length(one.token_ids, limits.token_ids, "continuation.choices")
    choices = tuple((one.index, tuple(one.token_ids)) for one in given.choices)
    return Continuation(prompt, (), choices, given.ended_tokens)


def own_fields(body: CommonFields) -> dict[str, Any]:
    """Fields of `GenerateRequest` that all dialects say in the same words."""
    transfer = body.kv_transfer_params
    return {
        "model": body.model,
        "stream": bool(body.stream),
        "stop_in_reasoning": bool(body.stop_in_reasoning),
        "prefix": body.prefix,
        "cache_salt": body.cache_salt or "",
        "prefill": (transfer.prefill or "") if transfer is not None else "",
        "priority": body.priority or 0,
    }


def openai_cache(body: OpenAIFields) -> CacheControl:
    """`prompt_cache_key`, `prompt_cache_retention` and `prompt_cache_options`. Raises BadRequest."""
    seconds, options = _retention(body.prompt_cache_retention), body.prompt_cache_options
    if options is not None and options.ttl is not None and options.mode != "explicit":
        seconds = max(seconds or 0.0, openai_ttl(options.ttl, "prompt_cache_options"))
    return CacheControl(body.prompt_cache_key, seconds)


def common(body: SamplingBody, limits: Limits) -> dict[str, Any]:
    """Fields of `GenerateRequest` that chat completions and completions share. Raises BadRequest."""
    if body.stream_options is not None and not body.stream:
        raise refuse("stream_options", "may be set only together with stream")
    return {
        **own_fields(body),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "cache": openai_cache(body),
        "cache_report": bool(body.cache_report),
        "return_token_ids": bool(body.return_token_ids),
        "continuation": _continuation(body, limits),
        "session": body.user or None,
    }


# Structured output


def output_format(body: SamplingBody, limits: Limits) -> OutputFormat | None:
    """The format that the text must match, from whichever field says it. Raises BadRequest."""
    given = body.response_format, body.structured_outputs, body.guided_regex, body.guided_choice, body.guided_grammar
    if given == _NONE and body.guided_json is NO_JSON:
        return None
    found = [
        (name, one)
        for name, one in (
            ("response_format", _response_format(body.response_format, limits)),
            ("structured_outputs", _structured_outputs(body.structured_outputs, limits)),
            ("guided_json", _schema_or_text(body.guided_json, "guided_json", limits)),
            ("guided_regex", _text("regex", body.guided_regex, "guided_regex", limits)),
            ("guided_choice", _choice(body.guided_choice, "guided_choice", limits)),
            ("guided_grammar", _text("grammar", body.guided_grammar, "guided_grammar", limits)),
        )
        if one is not None
    ]
    if len(found) > 1:
        raise refuse(found[1][0], f"cannot be combined with {found[0][0]}")
    return found[0][1] if found else None


def _response_format(given: ResponseFormat | None, limits: Limits) -> OutputFormat | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return OutputFormat("json_object")
    if given.type != "json_schema":
        raise refuse("response_format.type", "only text, json_object and json_schema are supported")
    if given.json_schema is None:
        raise refuse("response_format.json_schema", "is required")
    return schema_format(given.json_schema.schema, "response_format.json_schema.schema", limits)


def schema_format(schema: Raw, param: str, limits: Limits) -> OutputFormat:
    """Raises BadRequest."""
    value = bounded_object(schema, param, limits)
    if value is None:
        raise refuse(param, "is required")
    return OutputFormat("json_schema", value)


def _structured_outputs(given: StructuredOutputs | None, limits: Limits) -> OutputFormat | None:
    if given is None:
        return None
    if is_set(given.structural_tag):
        raise refuse("structured_outputs.structural_tag", "is not supported by this server; use grammar")
    where = "structured_outputs"
    found = [
        one
        for one in (
            _schema_or_text(given.json, f"{where}.json", limits),
            _text("regex", given.regex, f"{where}.regex", limits),
            _choice(given.choice, f"{where}.choice", limits),
            _text("grammar", given.grammar, f"{where}.grammar", limits),
            OutputFormat("json_object") if given.json_object else None,
        )
        if one is not None
    ]
    if len(found) > 1:
        raise refuse(where, "only one of json, regex, choice, grammar and json_object may be set")
    return found[0] if found else None


def _schema_or_text(given: Raw, param: str, limits: Limits) -> OutputFormat | None:
    """A schema, or the JSON text of one."""
    if not is_set(given):
        return None
    if bytes(memoryview(given)[:1]) == b'"':
        given = Raw(decode_json(given, str).encode())
    return schema_format(given, param, limits)


def _text(kind: Any, given: str | None, param: str, limits: Limits) -> OutputFormat | None:
    if given is None:
        return None
    if not 0 < len(given) <= limits.schema_bytes:
        raise refuse(param, f"must not be empty and must have at most {limits.schema_bytes} characters")
    return OutputFormat(kind, given)


def _choice(given: list[str] | None, param: str, limits: Limits) -> OutputFormat | None:
    if given is None:
        return None
    check_length(given, limits.choices, param, least=1)
    if sum(map(len, given)) > limits.schema_bytes:
        raise refuse(param, f"must have at most {limits.schema_bytes} characters")
    return OutputFormat("choice", tuple(given))
