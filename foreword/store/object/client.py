"""The obstore client of an object store: opened from a URL, called on an event loop in a thread, with errors as
StoreError."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlunsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import LocalStore, from_url

from foreword.errors import StoreConfigError, StoreError, StoreFull, StoreTimeout, StoreUnavailable
from foreword.store.background import background_thread
from foreword.store.base import copy_error, time_left
from foreword.store.redact import redacted, split_url

_CLIENT: Final = {"connect_timeout": "5s", "timeout": "120s"}  # deadlines are shorter; these end abandoned requests
_CLIENT_OPTION = re.compile(
    "allow_http|allow_invalid_certificates|default_content_type|http[12]_.+|pool_.+|proxy_.+|randomize_addresses|root_certificate|"
    "((connect|read)_)?timeout|user_agent"
)
_RETRIES: Final = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=1), "base": 2},
}
_SCHEMES: Final = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "file"}
_FORBIDDEN = re.compile("status code: 40[13]")  # a forbidden listing has no specific exception
_FULL = re.compile("No space left|os error 28|status code: 507")

T = TypeVar("T")

# The process that has the threads of obstore. They begin with its first call; in a forked child there are none, and no others
# begin, also for a client that is opened there.
_process = 0


class ClientLoop:
    """An event loop in a background thread. It ends with the store, at the latest with the program.

    Args:
        parallel: concurrent requests of one call. For requests without a body it is four times as many.
    """

    def __init__(self, label: str, parallel: int = 16) -> None:
        self._label = label
        self._opened_in = os.getpid()
        self._parallel = parallel
        self._loop = asyncio.new_event_loop()
        thread = background_thread(self._loop.run_forever, label)
        self.close = weakref.finalize(self, _stop, self._loop, thread)

    def check_open(self) -> None:
        if not self.close.alive:
            raise StoreUnavailable(f"the store {self._label!r} is closed")
        if {self._opened_in, _process or os.getpid()} != {os.getpid()}:  # a call would wait for its deadline
            raise StoreUnavailable(
                "this process was forked from one that uses object stores, and cannot use them: fork before they are opened,"
                " or start processes with 'spawn'"
            )

    def start(self, call: Coroutine[Any, Any, T], deadline: float) -> Future[T]:
        """Start a coroutine on the loop. Raises StoreTimeout, or StoreUnavailable if the store is closed."""
        global _process
        try:
            time_left(deadline)
            self.check_open()
            _process = os.getpid()
            return asyncio.run_coroutine_threadsafe(call, self._loop)
        except (StoreError, RuntimeError) as error:
            call.close()
            if isinstance(error, StoreError):
                raise
            raise StoreUnavailable(f"the store {self._label!r} is closed") from None  # since the check

    def results(
        self,
        calls: Iterable[Coroutine[Any, Any, T]],
        deadline: float,
        denied: type[StoreError] = StoreConfigError,
        *,
        light: bool = False,
    ) -> Iterator[T | StoreError]:
        """Run calls with bounded concurrency and yield results or errors in order. Running calls are cancelled at the end.

        Args:
            denied: the exception if the service forbids a call.
            light: the calls transfer no bodies.
        """
        width = self._parallel * 4 if light else self._parallel
        todo = iter(calls)
        running: deque[Future[T] | StoreError] = deque()
        try:
            while True:
                while len(running) < width and (call := next(todo, None)) is not None:
                    running.append(self._started(call, deadline))
                if not running:
                    return
                result = _result(running[0], deadline, denied)
                running.popleft()
                yield result
        finally:
            for future in running:
                if isinstance(future, Future):
                    future.cancel()

    def _started(self, call: Coroutine[Any, Any, T], deadline: float) -> Future[T] | StoreError:
        try:
            return self.start(call, deadline)
        except StoreError as error:
            return error

    def each(
        self,
        calls: Iterable[Coroutine[Any, Any, T]],
        deadline: float,
        denied: type[StoreError] = StoreConfigError,
        *,
        light: bool = False,
    ) -> Iterator[T]:
        """Run calls as `results` does, but raises the first error."""
        for result in self.results(calls, deadline, denied, light=light):
            if isinstance(result, StoreError):
                raise copy_error(result)
            yield result

    def one(self, call: Coroutine[Any, Any, T], deadline: float, denied: type[StoreError] = StoreConfigError) -> T:
        [result] = self.each([call], deadline, denied)
        return result


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    """Cancel running tasks, then end the loop. A forked child has no thread that runs it."""
    if not thread.is_alive():
        return

    async def cancel() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*others, return_exceptions=True), 1)

    with contextlib.suppress(TimeoutError):
        asyncio.run_coroutine_threadsafe(cancel(), loop).result(2)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(2)
    if not thread.is_alive():
        loop.close()


def _result(future: Future[T] | StoreError, deadline: float, denied: type[StoreError]) -> T | StoreError:
    if isinstance(future, StoreError):
        return future
    try:
        return result_of(future, deadline, denied)
    except StoreError as error:
        future.cancel()
        return error


def result_of(future: Future[T], deadline: float, denied: type[StoreError]) -> T:
    """Wait for the result of a call. Raises StoreError; `denied` if the service forbids it."""
    try:
        return future.result(max(deadline - time.monotonic(), 0))  # also at the deadline, if it has ended
    except TimeoutError:
        raise StoreTimeout("the object store did not reply in time") from None
    except CancelledError:
        raise StoreUnavailable("the store was closed during the call") from None
    except (BaseError, OSError, NotImplementedError) as error:
        text = error_text(error)
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or _FORBIDDEN.search(text):
            raise denied(f"the object store forbids it: {text}") from None
        if _FULL.search(text):
            raise StoreFull(f"the object store is full: {text}") from None
        raise StoreUnavailable(f"the object store failed: {text}") from None


def error_text(error: Exception) -> str:
    """The first line of a client's error, redacted: it may contain an endpoint with a user name, or a signed URL."""
    return redacted(str(error).partition("\n")[0])


def open_client(url: str, options: dict[str, str]) -> Any:
    """Create the obstore client for a URL. Raises StoreConfigError."""
    parts = split_url(url)
    if parts.scheme not in _SCHEMES:
        raise StoreConfigError(
            f"an object store URL starts with s3://, gs://, az:// or file://, unlike {redacted(url)!r}"
        )
    if parts.scheme != "file" and not parts.netloc:
        raise StoreConfigError(f"the URL names no bucket; write {parts.scheme}://BUCKET/PATH")
    location = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    try:
        if parts.scheme == "file":
            if options or parts.query:
                raise StoreConfigError("a folder has no options")
            return from_url(location, mkdir=True)
        config: dict[str, Any] = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        config |= options
        client = _client(config)
        return from_url(location, config=config, client_options=client, retry_config=_RETRIES)
    except (BaseError, ValueError, OSError) as error:
        raise StoreConfigError(f"the object store's URL or options are wrong: {error_text(error)}") from None


def remove_leftovers(store: Any, folder: str, part: str = "") -> None:
    """Remove what killed processes have left in a folder of a `file://` store, of objects with this part in their names, and
    empty folders: obstore writes an object beside its place, under its name with `#` and a number, which no listing shows.
    Raises StoreUnavailable."""
    if not isinstance(store, LocalStore):
        return
    base = Path(str(store.prefix), folder)
    for path in [*sorted(base.rglob("*"), reverse=True), base]:
        if path.is_dir():
            with contextlib.suppress(OSError):  # not empty
                path.rmdir()
        elif "#" in path.name and part in path.name:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise StoreUnavailable(f"{path.name} cannot be removed: {error}") from error


def _client(config: dict[str, Any]) -> dict[str, Any]:
    """The options of the HTTP client. Those in `config` are removed from it: obstore panics if it finds them there.

    Plain HTTP is allowed only if an endpoint starts with http://.
    """
    endpoints = [value for name, value in config.items() if "endpoint" in name.lower()]
    endpoints += [os.environ.get(name, "") for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")]
    http = {"allow_http": True} if any(endpoint.startswith("http://") for endpoint in endpoints) else {}
    given = {name: plain for name in config if _CLIENT_OPTION.fullmatch(plain := name.lower().removeprefix("aws_"))}
    return {**_CLIENT, **http, **{plain: config.pop(name) for name, plain in given.items()}}
