"""A client's request in one form, whatever dialect it came in, and its conversation as chat templates expect it.

A dialect (`foreword.api.dialects`) parses a body into a `GenerateRequest`; server and router know nothing else of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Raw, Struct

from foreword.decoders import decode_json
from foreword.errors import BadRequest
from foreword.tokens.structured_output import StructuredOutput as OutputFormat

if TYPE_CHECKING:
    from foreword.tokens.tokenizer import Tokenizer

# Kinds of servers behind a router.
ReplicaKind = Literal["foreword", "vllm", "openai"]
DialectName = Literal["chat", "completions", "responses", "messages", "embeddings", "other"]
Role = Literal["system", "user", "assistant", "tool"]
Prompt = str | tuple[int, ...]

__all__ = [
    "CacheBreakpoint",
    "CacheControl",
    "ClientBody",
    "DialectName",
    "GenerateRequest",
    "Message",
    "OutputFormat",
    "Prompt",
    "ReplicaKind",
    "Role",
    "Tool",
    "ToolCall",
    "ToolChoice",
]


class ToolCall(Struct, frozen=True, gc=False):
    """A call that the model made. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


class CacheBreakpoint(Struct, frozen=True):
    """Keep the KV of everything up to and including a message for `ttl` seconds after its last use."""

    ttl: float
    priority: int = 0


class Message(Struct, frozen=True, gc=False):
    """A message of a conversation.

    Attributes:
        content: the text; a dialect joins text parts.
        tool_calls: of an assistant's message. `tool_call_id`: the call that a tool's message answers.
        reasoning: what the assistant thought before the content.
        breakpoint: cache control at the end of this message.
    """

    role: Role
    content: str
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning: str = ""
    breakpoint: CacheBreakpoint | None = None


class Tool(Struct, frozen=True):
    """A function that the model may call. `parameters` is a JSON schema of its arguments.

    Attributes:
        breakpoint: cache control at the end of this tool.
        namespace: of the Responses API. The name begins with it and `__`.
        free_text: of the Responses API: its client gets the argument `input` as it is, not JSON.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = {}
    strict: bool = False
    breakpoint: CacheBreakpoint | None = None
    namespace: str = ""
    free_text: bool = False

    @property
    def own_name(self) -> str:
        """The name within its namespace."""
        return self.name.removeprefix(f"{self.namespace}__") if self.namespace else self.name


class ToolChoice(Struct, frozen=True):
    """Whether the model calls tools: `named` calls the tool `name`, `required` at least one."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None


class CacheControl(Struct, frozen=True):
    """Cache control that a client asks for, for the whole request.

    Attributes:
        key: requests with the same key belong together (`prompt_cache_key`); a router keeps them on one replica.
        retention: seconds to keep the whole prompt (`prompt_cache_retention`); None for the normal eviction order.
    """

    key: str | None = None
    retention: float | None = None


class Continuation(Struct, frozen=True):
    """Where another server's stream broke: its prompt, and the output that the client has, as token ids.

    Attributes:
        output: of the only choice. Empty where a request has several.
        choices: of several, those that had not ended, each with its index and its output, which may be empty.
        ended_tokens: tokens of the choices that had ended.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...] = ()
    choices: tuple[tuple[int, tuple[int, ...]], ...] = ()
    ended_tokens: int = 0

    @property
    def parts(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The choices to continue: index and output."""
        return self.choices or ((0, self.output),)

    @property
    def sent_tokens(self) -> int:
        """Output tokens that other servers have sent."""
        return self.ended_tokens + sum(len(output) for _, output in self.parts)


@dataclass(frozen=True, eq=False)
class ClientBody:
    """A JSON object as the client sent it. Its fields can be passed on without decoding them."""

    raw: bytes = field(default=b"", repr=False)

    @cached_property
    def fields(self) -> Mapping[str, Raw]:
        """Each field as JSON. Raises BadRequest if it is not an object."""
        try:
            found: dict[str, Raw] = decode_json(self.raw, dict[str, Raw])
        except msgspec.ValidationError:
            raise BadRequest("The body must be a JSON object") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(f"The body is not valid JSON: {error}") from None
        except RecursionError:
            raise BadRequest("The body is nested too deeply") from None
        return found

    def text(self, name: str) -> str | None:
        """A field that is a string; None for everything else."""
        found = self.fields.get(name)
        return decode_json(found, str) if found is not None and _first(found) == b'"' else None

    def only(self, *names: str) -> dict[str, Raw]:
        """These fields, without those that are null, in this order."""
        get = self.fields.get
        return {name: raw for name in names if (raw := get(name)) is not None and _first(raw) != b"n"}


def _first(raw: Raw) -> bytes:
    return bytes(memoryview(raw)[:1])


class GenerateRequest(Struct, frozen=True, omit_defaults=True):
    """A request to generate text.

    Attributes:
        dialect: the format of the response. path: where replicas take it, if that is not the path of its dialect.
        model: None for the only model served.
        messages: of a conversation; empty for `completions`.
        prompts: of `completions`; empty for a conversation.
        sampling: fields of `engine.request.SamplingParams` that the client gave (`max_tokens`, `temperature`, `stop` as a
            tuple, ...), under those names. A missing field has the model's or the server's default.
        tools, tool_choice, parallel_tool_calls: functions that the model may call.
        output_format: what the text must match; None for any text.
        reasoning: the client wants to see reasoning apart from the content.
        template_options: `chat_template_kwargs`.
        continue_final_message: the answer continues the last message, which is the assistant's.
        add_generation_prompt, add_special_tokens, echo: as in vLLM.
        stop_in_reasoning: stop strings count inside of the reasoning, too.
        stream, include_usage: server-sent events, with the usage at the end.
        prefix: a named prefix before the prompt.
        cache: cache control of the whole request. Breakpoints are in the messages.
        cache_salt: the client's own; requests with different ones share no cached blocks.
        cache_report, return_token_ids: what the client wants to see beside the text.
        prefill: transfer address of the instance that computes the prompt; set by a router only.
        continuation: continue after the output of another server; set by a router only. It replaces the prompt.
        session: names a conversation for routing (`user`, `metadata.user_id`).
        priority: the client's own; limited by what its tenant may ask.
        store, previous: of the Responses API: keep the conversation, and continue the one with this id.
        extra: the dialect's own fields that its response repeats.
        body: as it came; set at a router only.
        left_out: the tools that only the provider of a model runs, such as `tools[8]`. They are not among `tools`.
        refusal: why this server would not take it, at a router whose replicas may. Then only what is understood is here.
    """

    dialect: DialectName
    path: str = ""
    model: str | None = None
    messages: tuple[Message, ...] = ()
    prompts: tuple[Prompt, ...] = ()
    sampling: Mapping[str, Any] = {}
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_format: OutputFormat | None = None
    reasoning: bool = True
    template_options: Mapping[str, Any] = {}
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    add_special_tokens: bool = True
    echo: bool = False
    stop_in_reasoning: bool = False
    stream: bool = False
    include_usage: bool = False
    prefix: str | None = None
    cache: CacheControl = CacheControl()
    cache_salt: str = ""
    cache_report: bool = False
    return_token_ids: bool = False
    prefill: str = ""
    continuation: Continuation | None = None
    session: str | None = None
    priority: int = 0
    store: bool = False
    previous: str | None = None
    extra: Mapping[str, Any] = {}
    body: ClientBody = ClientBody()
    left_out: tuple[str, ...] = ()
    refusal: BadRequest | None = None

    @property
    def single(self) -> bool:
        """Whether there is one prompt and one choice, so that another replica can continue the response."""
        return self.sampling.get("n", 1) == 1 and len(self.prompts) <= 1

    def session_name(self, headers: Mapping[str, str]) -> str | None:
        """The session as the client names it."""
        return self.cache.key or self.session or headers.get("x-session-id") or None


def chat_text(tokenizer: Tokenizer, request: GenerateRequest, before: Sequence[Mapping[str, Any]] = ()) -> str:
    """A conversation as the model sees it, to be encoded without special tokens. `before`: messages of a named prefix.

    Raises BadRequest if the template rejects it.
    """
    return tokenizer.chat_text(
        [*before, *template_messages(request.messages)],
        tools=template_tools(request.tools),
        options=request.template_options,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages for `Tokenizer.render_chat`."""
    return [_message(message) for message in messages]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools for `Tokenizer.render_chat`."""
    described = (
        {"name": one.name, "description": one.description, "parameters": dict(one.parameters)} for one in tools
    )
    return [{"type": "function", "function": one} for one in described]


def _message(message: Message) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        plain["reasoning_content"] = message.reasoning
    return plain


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}


def _arguments(text: str) -> Any:
    """Templates expect an object. What is not one is shown as the model wrote it."""
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
