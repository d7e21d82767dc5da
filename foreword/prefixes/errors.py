"""Errors of named prefixes."""

from __future__ import annotations

from collections.abc import Iterable

from foreword.errors import ForewordError, NotFound, did_you_mean


class UnknownPrefix(NotFound, code="prefix_not_found"):
    """The request names a prefix that is not registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"No prefix named {name!r} is registered{did_you_mean(name, known)}", param="prefix")


class PrefixBudgetExceeded(ForewordError, status=409, code="prefix_budget_exceeded", fault="client"):
    """A named prefix does not fit into the memory that named prefixes may pin."""
