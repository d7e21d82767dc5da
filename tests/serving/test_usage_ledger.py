"""The usage ledgers of a router and its servers against the engines' own counters (ledger_campaign.py)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ledger_campaign import Fleet, ask_all, native, with_vllm, wrong


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", [native, with_vllm])
def test_ledgers_have_what_engines_count(tmp_path: Path, make: type[Fleet]) -> None:
    """Behind a router, whose ledger has each request once with the tokens that its client was told, the ledgers of the servers
    together have what their engines counted: also of clients that leave, of requests that fail over, and of those that
    migrate."""
    if make is with_vllm and "FOREWORD_VLLM_PYTHON" not in os.environ:
        pytest.skip("FOREWORD_VLLM_PYTHON names no interpreter with vLLM")
    fleet = make(tmp_path)
    try:
        asked = ask_all(fleet, 160, 5)
        assert sum(one.left for one in asked) > 5
        assert fleet.vllm or any(one.moved for one in asked)
        assert not wrong(fleet, asked)
    finally:
        fleet.close()
