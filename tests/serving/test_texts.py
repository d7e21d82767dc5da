"""Answers of models with byte tokens, through servers and routers (text_campaign.py has more of them)."""

from __future__ import annotations

import pytest
import text_campaign


@pytest.mark.extended
def test_any_ids_over_http() -> None:
    """Whatever a model with byte tokens writes, whatever a prompt ends with: each answer has the text of its bytes, streamed
    and whole, by a server, a router and `LLM`; no process ends."""
    found = text_campaign.run("byte fallback", 30, seed=7)
    assert sum(count for name, count in found.items() if name.endswith("answers")) == 90
    assert not sum(count for name, count in found.items() if not name.endswith("answers")), found
