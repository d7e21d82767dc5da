"""The generated pages of the reference."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from foreword.api.dialects.chat import ChatBody
from foreword.api.dialects.completions import CompletionBody
from foreword.api.dialects.messages import MessagesBody
from foreword.api.dialects.responses import ResponsesBody
from foreword.api.dialects.sampling import UNSUPPORTED

ROOT = Path(__file__).parents[1]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))
WRITTEN = {path.relative_to(ROOT).as_posix(): text for path, text in GENERATE["pages"]().items()}


@pytest.mark.extended
@pytest.mark.parametrize("page", WRITTEN)
def test_reference_is_up_to_date(page: str) -> None:
    """The pages about commands, configuration, benchmarks, routes and files, and README, are what `python docs/generate.py`
    writes."""
    assert (ROOT / page).read_text(encoding="utf-8") == WRITTEN[page], "run: python docs/generate.py"


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_fields_of_requests_are_documented(kind: type[Any]) -> None:
    """The page about requests names every field that a dialect reads, except those that it only refuses or ignores."""
    page = (ROOT / "docs" / "reference" / "requests.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`([^`]*)`", page))))
    quiet = {*UNSUPPORTED, "model", "parallel_tool_calls", "service_tier", "safety_identifier", "mcp_servers"}
    assert not set(kind.__struct_fields__) - named - quiet
