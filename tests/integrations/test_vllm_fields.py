"""Every field that vLLM's requests have is known to the embedded server, refused by it, or listed here."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Final

import pytest

from foreword.api.dialects.registry import DIALECTS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif("FOREWORD_VLLM_PYTHON" not in os.environ, reason="FOREWORD_VLLM_PYTHON names no interpreter"),
]

_FIELDS: Final = """
import json
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
kinds = dict(chat=ChatCompletionRequest, completions=CompletionRequest, responses=ResponsesRequest,
             messages=AnthropicMessagesRequest)
print(json.dumps({name: sorted(kind.model_fields) for name, kind in kinds.items()}))
"""
# Without effect here, and named in `x-foreword-ignored`: none of them changes which text is the answer.
_LISTED: Final = {
    "ec_transfer_params", "enable_response_messages", "include_reasoning", "include_stop_str_in_output",
    "length_penalty",  # of beams
    "media_io_kwargs", "mm_payload", "mm_processor_kwargs", "request_id", "return_mm_kwargs", "return_prompt_text",
    "return_token_offsets", "return_weight_versions", "routed_experts_prompt_start", "session_id", "skip_special_tokens",
    "spaces_between_special_tokens", "stream_interval",
    "truncation_side",  # of truncate_prompt_tokens, which is refused
}  # fmt: skip


def test_fields_of_vllm() -> None:
    """A field that a release of vLLM adds is noticed."""
    python = os.environ["FOREWORD_VLLM_PYTHON"]
    done = subprocess.run([python, "-c", _FIELDS], capture_output=True, text=True, check=True)
    fields: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    assert fields.keys() == DIALECTS.keys()
    unknown = {
        f"{dialect}: {name}"
        for dialect, names in fields.items()
        for name in set(names) - set(DIALECTS[dialect].body.__struct_encode_fields__) - _LISTED
    }
    assert not unknown
