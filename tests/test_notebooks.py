"""The notebooks of `examples/notebooks` run from top to bottom and print what they show."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_print_what_the_notebook_shows(path: Path) -> None:
    """Each cell runs after those before it, and its output is the one that the file shows to readers who run nothing."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and any(cell["outputs"] for cell in code)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert printed.getvalue() == shown, f"cell {number}"
