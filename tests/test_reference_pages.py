"""The generated pages of the reference."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

GENERATE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "generate.py"))


@pytest.mark.parametrize("name", ["cli.md", "configuration.md"])
def test_reference_is_up_to_date(name: str) -> None:
    """The pages about the command line and the configuration are what `python docs/generate.py` writes."""
    [(path, text)] = [(path, text) for path, text in GENERATE["pages"]().items() if path.name == name]
    assert path.read_text(encoding="utf-8") == text, "run: python docs/generate.py"
