"""How much a test tries in `make test`, and what only `make test-extended` tries."""

import os
from collections.abc import Iterable
from typing import Any

import pytest

_EXPLORES = os.environ.get("HYPOTHESIS_PROFILE") == "explore"


def examples(most: int) -> int:
    """The most with `HYPOTHESIS_PROFILE=explore`, else a fifth: the same ones in every run, which find nothing new."""
    return most if _EXPLORES else -(-most // 5)


def represented(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of a test: `make test` tries those that stand for the others, `make test-extended` the rest."""
    values = list(values)
    assert fast and all(one in values for one in fast)
    return [value if value in fast else pytest.param(value, marks=pytest.mark.extended) for value in values]
