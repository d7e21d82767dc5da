"""Digests of what a request asks of the model: the same for each client, and for each retry of a client.

Retries differ in transport details: ids, `user`, `metadata`, `stream`, a `seed`. They ask the same all the same. A digest has
the fields that reach the model, in whatever order, and no others. Requests that differ in a counter or a time near the end of
their prompt share the digest of its start.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final, NamedTuple

import msgspec

from foreword.api.request import GenerateRequest
from foreword.decoders import decode_json
from foreword.router.replica_body import ROUTER_FIELDS

# Smaller fields are compared without white space and the order of their keys, larger ones as they are written.
_MOST_REWRITTEN: Final = 64 << 10
# A shorter prompt has too little left at its start to tell it from others.
_LEAST_START: Final = 512
# The prompt, in the order in which templates render it.
_PROMPT: Final = ("system", "instructions", "messages", "prompt", "input")
# Other fields that the model, its template or its sampler sees.
_SEEN: Final = frozenset(_PROMPT) | frozenset(
    name
    for names in (
        "suffix documents prompt_embeds prompt_token_ids conversation prefix mm_processor_kwargs media_io_kwargs",
        "tools tool_choice functions function_call parallel_tool_calls thinking reasoning reasoning_effort modalities",
        "include_reasoning thinking_token_budget chat_template chat_template_kwargs add_generation_prompt",
        "continue_final_message add_special_tokens echo truncate_prompt_tokens truncation",
        "response_format text structured_outputs output_config output_format guided_json guided_regex guided_choice",
        "guided_grammar guided_decoding_backend json_schema regex ebnf grammar structural_tag vllm_xargs",
        "logits_processors n best_of use_beam_search length_penalty temperature top_p top_k top_a min_p typical_p",
        "presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids bad_words stop",
        "stop_sequences stop_token_ids include_stop_str_in_output stop_in_reasoning ignore_eos max_tokens",
        "max_completion_tokens max_output_tokens min_tokens logprobs top_logprobs prompt_logprobs",
        "skip_special_tokens spaces_between_special_tokens repetition_detection",
    )
    for name in names.split()
)
# Fields of other requests, such as embeddings, that say nothing to the model.
_UNSEEN: Final = ROUTER_FIELDS | {"user", "seed", "stream", "stream_options", "metadata", "store"}
_GENERATING: Final = frozenset(("chat", "completions", "responses", "messages"))


class AskDigests(NamedTuple):
    """Digests of what a request asks: `whole`, and of the `start` of its prompt, between three and six eighths of it; None if
    that is short."""

    whole: bytes
    start: bytes | None


def asked_of(request: GenerateRequest, model: str) -> AskDigests:
    """The digests of a request to this model."""
    where = f"{request.path or request.dialect}\0{request.model or model}".encode()
    given, generates = request.body.fields, request.dialect in _GENERATING
    seen = [name for name in sorted(given) if (name in _SEEN if generates else name not in _UNSEEN)]
    fields = {name: _plain(given[name]) for name in seen}
    whole = blake2b(where, digest_size=16)
    for name, value in fields.items():
        whole.update(b"%b %d %b" % (name.encode(), len(value), value))
    prompt = b"".join([fields[name] for name in _PROMPT if name in fields])
    length = 1 << max((3 * len(prompt) // 4).bit_length() - 1, 0)
    start = blake2b(where + prompt[:length], digest_size=16).digest() if length >= _LEAST_START else None
    return AskDigests(whole.digest(), start)


def _plain(raw: msgspec.Raw) -> bytes:
    value = bytes(raw)
    if len(value) > _MOST_REWRITTEN or (value[:1] == b'"' and b"\\" not in value) or value.isdigit():
        return value  # a text without escapes, or a number: there is one way to write it
    try:
        return msgspec.json.encode(decode_json(value, Any), order="deterministic")
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # such as 1e999, which other servers may take
        return value
