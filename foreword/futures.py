"""A result that one thread hands to another that waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def complete(future: Future[Result], work: Callable[[], Result]) -> None:
    """Give a future, for which another thread waits, what `work` returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
        future.set_exception(error)
