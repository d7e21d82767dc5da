"""A gRPC server of registered methods alone.

The library's own asks for calls of any method and decodes their names; a name that is not UTF-8, which every stranger can send,
ends it. This one handles calls of registered methods only, and cancels others without looking at them: those that no
method takes would stay in the library's core, also when their clients have left.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

# Calls that the event loop has not taken yet, also of clients that have cancelled them; the core cancels what comes above.
_WAITING: Final = 4096


class _Calls(cygrpc.AioServer):  # type: ignore[misc]
    async def _request_call(self) -> None:
        """Answer a call of any method but the registered ones. Never returns."""
        while True:
            await super()._request_call()  # its state is dropped, and with it the call


class RegisteredServer(grpc.aio._server.Server):  # type: ignore[misc,name-defined]
    """On the running event loop.

    Args:
        streams: calls at a time.

    This uses what the library does not promise to keep. Raises AttributeError or TypeError for a version that has changed it.
    """

    def __init__(self, options: tuple[tuple[str, Any], ...], streams: int) -> None:
        assert _Calls._request_registered_call
        limits = (f"grpc.server.max_pending_requests{end}" for end in ("", "_hard_limit"))
        given = (*options, *((name, _WAITING) for name in limits))
        self._loop = asyncio.get_running_loop()
        arguments = (self._loop, None, (), None, given, streams)
        try:
            self._server = _Calls(*arguments)
        except TypeError:  # later versions have one more, for xDS
            self._server = _Calls(*arguments, False)
