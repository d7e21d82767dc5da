"""Request bodies as pydantic models.

Types are strict (`"16"` is not a number). An unknown field is ignored, as OpenAI and vLLM do. A known field that
would change the answer and that this server does not support is refused.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from foreword.engine.request import MAX_LOGPROBS
from foreword.errors import BadRequest

logger = logging.getLogger(__name__)

MAX_STOP_STRINGS = 64

Prompt = str | tuple[int, ...]


def _expected(what: str) -> PydanticCustomError:
    return PydanticCustomError("expected", "must be {what}", {"what": what})


def _refused(param: str, reason: str) -> PydanticCustomError:
    """An error that concerns several fields. `param` names the offending one."""
    return PydanticCustomError("refused", "{reason}", {"param": param, "reason": reason})


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _to_prompts(value: Any) -> tuple[Prompt, ...]:
    """OpenAI's four shapes of `prompt` as a tuple of prompts."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return (tuple(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(_is_token_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise _expected("a string, a list of strings, a list of token ids, or a list of such lists, and not empty")


def _to_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) and item for item in strings):
        raise _expected("a string or a list of strings, none of them empty")
    if len(strings) > MAX_STOP_STRINGS:
        raise _expected(f"at most {MAX_STOP_STRINGS} strings")
    return tuple(strings)


def _to_text(value: Any) -> str:
    """The content of a chat message: text, or parts that are all text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _expected("a string or a list of text parts")
    return "".join(_part_text(part) for part in value)


def _part_text(part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise _expected('a string or a list of parts like {"type": "text", "text": "..."}')
    if part["type"] != "text":
        raise _expected(f"text; a part of type {part['type'][:40]!r} is not supported")
    if not isinstance(part.get("text"), str):
        raise _expected('made of parts like {"type": "text", "text": "..."}')
    return str(part["text"])


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise _expected("a finite number")
    return value


Prompts = Annotated[tuple[Prompt, ...], PlainValidator(_to_prompts, str | list[str] | list[int] | list[list[int]])]
StopStrings = Annotated[tuple[str, ...], PlainValidator(_to_stop, str | list[str] | None)]
Content = Annotated[str, PlainValidator(_to_text, str | list[dict[str, str]])]
Bias = Annotated[float, Field(ge=-100, le=100)]
# Python's integers are unbounded; the code that uses these fields is not.
Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# Unsupported fields: the name, the values that mean "not used", and the reason.
_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tool calls are not supported by this server"),
    "tool_choice": (("none", "auto"), "tool calls are not supported by this server"),
    "functions": (([],), "tool calls are not supported by this server"),
    "function_call": (("none", "auto"), "tool calls are not supported by this server"),
    "response_format": (({"type": "text"},), 'only {"type": "text"} is supported'),
    "guided_json": ((), "structured output is not supported by this server"),
    "guided_regex": ((), "structured output is not supported by this server"),
    "guided_choice": ((), "structured output is not supported by this server"),
    "guided_grammar": ((), "structured output is not supported by this server"),
    "structured_outputs": ((), "structured output is not supported by this server"),
    "suffix": (("",), "text after the completion is not supported by this server"),
    "prompt_logprobs": ((), "a cached prefix has no logits, so log-probabilities of the prompt are not offered"),
    "prompt_embeds": ((), "only text and token ids are supported as a prompt"),
    "use_beam_search": ((False,), "beam search is not supported by this server"),
    "truncate_prompt_tokens": ((), "prompts are never shortened; send a shorter one"),
    "allowed_token_ids": ((), "use logit_bias instead"),
    "bad_words": (([],), "use logit_bias instead"),
    "logits_processors": (([],), "custom logits processors are not supported by this server"),
    "skip_special_tokens": ((True,), "special tokens are never part of the text"),
    "continue_final_message": ((False,), "continuing an assistant's message is not supported by this server"),
    "chat_template": ((), "the model's own chat template is used"),
    "chat_template_kwargs": (({},), "the model's chat template is used without arguments"),
    "modalities": ((["text"],), "only text is supported"),
    "audio": ((), "only text is supported"),
    "web_search_options": ((), "this server cannot search the web"),
}


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> Body:
        for name, value in (self.model_extra or {}).items():
            neutral, reason = _UNSUPPORTED.get(name, ((value,), ""))
            if value is not None and value not in neutral:
                raise _refused(name, reason)
        return self


class StreamOptions(Body):
    include_usage: bool | None = None


class TransferParams(Body):
    prefill: str | None = Field(None, description="Transfer address of the instance that computes the prompt.")


class SamplingBody(Body):
    """The fields of completions and chat. None means the default."""

    model: str | None = None
    max_tokens: Whole | None = None
    min_tokens: Whole | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Whole | None = None
    stop: StopStrings = ()
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, Bias] | None = None
    n: Whole | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prefix: str | None = Field(None, description="A named prefix before the prompt.")
    cache_report: bool | None = Field(None, description="Report where the prompt's KV came from.")
    return_token_ids: bool | None = Field(None, description="Show the token ids of prompt and answer (vLLM's fields).")
    kv_transfer_params: TransferParams | None = Field(None, description="Set by a router.")
    prompt_cache_key: str | None = Field(None, description="Accepted without effect: prefixes are found by content.")

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise _refused("stream_options", "may be set only together with stream")
        return self


class CompletionRequest(SamplingBody):
    """`POST /v1/completions`."""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Whole | None = None
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _check_supported(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise _refused("best_of", "not supported by this server; use n")
        if self.echo and self.logprobs is not None:
            raise _refused("echo", "cannot be combined with logprobs, because a cached prefix has no logits")
        return self


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content
    name: str | None = None

    @model_validator(mode="after")
    def _no_tool_calls(self) -> Message:
        for name in ("tool_calls", "function_call"):
            if (self.model_extra or {}).get(name):
                raise _refused(name, "tool calls are not supported by this server")
        return self

    def plain(self) -> dict[str, Any]:
        """As chat templates expect it. They know `system`; `developer` is OpenAI's newer name for it."""
        role = "system" if self.role == "developer" else self.role
        named = {"name": self.name} if self.name is not None else {}
        return {"role": role, "content": self.content, **named}


class ChatRequest(SamplingBody):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise _refused("top_logprobs", "needs logprobs to be true")
        return self


class TokenizeRequest(Body):
    """`POST /v1/tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _refused("prompt", "give either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """`POST /v1/detokenize`."""

    model: str | None = None
    tokens: list[int]


class MigrateBody(Body):
    """`POST /v1/requests/{id}/migrate`."""

    to: str = Field(description="URL of the server that continues the request.")


class DrainBody(Body):
    """`POST /v1/drain`."""

    to: list[str] = Field(default_factory=list, description="URLs of servers to migrate to; --drain-to by default.")


class PrefixContent(Body):
    """`PUT /v1/prefixes/{name}`: text for completions, or messages for chat."""

    content: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_of_two(self) -> PrefixContent:
        if (self.content is None) == (self.messages is None):
            raise _refused("content", "give either content (text, for completions) or messages (for chat)")
        return self


class NewPrefix(PrefixContent):
    """`POST /v1/prefixes`."""

    name: str
    replace: bool = False


AnyBody = TypeVar("AnyBody", bound=Body)


def parse(kind: type[AnyBody], body: bytes) -> AnyBody:
    """Parse a JSON body. Raises BadRequest, which names the parameter."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _explain(error) from None
    unknown = sorted(parsed.model_extra or {})
    if unknown:
        logger.debug("fields without effect in a request: %s", ", ".join(unknown))
    return parsed


def _explain(error: ValidationError) -> BadRequest:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return BadRequest(f"The body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if first["type"] == "model_type" and not first["loc"]:
        return BadRequest("The body must be a JSON object")
    if first["type"] == "refused":
        where = (*first["loc"], first["ctx"]["param"])
        return BadRequest(f"{_path(where)}: {first['msg']}", param=str(where[0]))
    return BadRequest(f"{_path(first['loc'])}: {_complaint(first)}", param=str(first["loc"][0]))


def _path(where: tuple[int | str, ...]) -> str:
    path = ""
    for part in where:
        if part == "[key]":
            continue
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path


def _complaint(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "is required"
    text = detail["msg"][:1].lower() + detail["msg"][1:]
    text = text.replace("input should be", "must be")
    given = detail["input"]
    if given is None or isinstance(given, bool | int | float | str):
        shown = json.dumps(given, ensure_ascii=False)
        text += f", not {shown if len(shown) <= 40 else shown[:40] + '...'}"
    return text
