"""Grammars that force a model to call tools, in the format in which it writes calls."""

from __future__ import annotations

import json
from collections.abc import Sequence

from foreword.api.request import Tool, ToolChoice
from foreword.api.tools.formats import REASONING_TAGS, Markers, TokenId, json_rule
from foreword.api.tools.parser import AnswerFormats
from foreword.errors import BadRequest
from foreword.tokens.structured_output import StructuredOutput


def forced_calls(
    tools: Sequence[Tool],
    choice: ToolChoice,
    formats: AnswerFormats,
    token_id: TokenId,
    *,
    parallel: bool,
    reasoning_open: bool,
) -> StructuredOutput:
    """The grammar of an answer that calls `choice.name`, or at least one of the tools, with valid arguments.

    Reasoning may precede the calls where the model has it, and must be closed if the prompt has opened it.

    Raises BadRequest for a model whose format of calls cannot be forced.
    """
    chosen = [tool for tool in tools if choice.mode != "named" or tool.name == choice.name]
    form = formats.tool_format
    rules = form.grammar(chosen, Markers(token_id), parallel and choice.mode != "named") if form is not None else None
    if form is None or rules is None:
        raise BadRequest(f"tool_choice: calls in the format {formats.tools!r} cannot be forced", param="tool_choice")
    thought = "" if form.whole_answer else _thought(formats, token_id, reasoning_open)
    return StructuredOutput("grammar", f"start: {'thought ' if thought else ''}calls\n{thought}{rules}\n")


def after_reasoning(output: StructuredOutput, formats: AnswerFormats, token_id: TokenId) -> StructuredOutput:
    """This output behind reasoning that the prompt has opened. Only for JSON, which grammars can contain."""
    if output.kind not in ("json_object", "json_schema"):
        return output
    schema = {"type": "object"} if output.kind == "json_object" else output.value
    thought = _thought(formats, token_id, True)
    return StructuredOutput(
        "grammar", f"start: thought answer\n{thought}answer: {json_rule(schema, strict=output.strict)}\n"
    )


def _thought(formats: AnswerFormats, token_id: TokenId, is_open: bool) -> str:
    """The rule of the reasoning, which ends with its closing tag. It is optional where the prompt has not opened it."""
    if formats.reasoning is None:
        return ""
    tags, marker = REASONING_TAGS[formats.reasoning], Markers(token_id)
    closing = f"closing[lazy]: /(?s:.*)/ {json.dumps(tags.close)}\n"
    token = token_id(tags.close)
    if token is not None:
        closing = closing.replace("closing[lazy]", "closing_text[lazy]")
        closing += f"closing: closing_text | /(?s:.*)/ <[{token}]>\n"
    inner = r"closing /\s{0,4}/"
    if is_open:
        return f"thought: {inner}\n{closing}"
    return f"thought: ({marker(tags.open)} {inner})?\n{closing}"
