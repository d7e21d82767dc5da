"""The guard that keeps an error in the connector from vLLM.

vLLM ends when a call of a connector raises, and a request waits for ever when the connector loses it. So each call that vLLM
makes is a `hook`: after the first error that it lets through, this side is *degraded*. It saves and loads nothing until the
server restarts, says so once, and answers all calls as a connector without stores would.

What vLLM waits for is noted here, apart from the code that may fail. Loads are then reported as failed, so that vLLM computes
what they would have brought, and blocks that it keeps for the connector are given back.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar, cast

from foreword.errors import ConfigError, ModelUnsupported, StoreConfigError
from foreword.integrations.vllm.step_messages import BlockLoad, ForewordConnectorMetadata, LeaseRevocation
from foreword.offload.load import GroupBlocks

logger = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

# Mistakes in the settings end the start of a server, with their message.
_MISTAKES = (ConfigError, ModelUnsupported, StoreConfigError)


class Degradable(Protocol):
    """Either side of the connector. `degraded`: why it does nothing any more; empty while it works."""

    degraded: str


def hook(instead: Callable[..., Any], *, at_start: bool = False, always: bool = False) -> Callable[[Method], Method]:
    """A call that vLLM makes. `instead` answers it on a degraded side, and if the call has just failed: it may be asked twice.

    Args:
        at_start: vLLM calls it while it starts. Mistakes of the operator are raised.
        always: it is made on a degraded side, too.
    """

    def guard(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: Degradable, *args: Any, **kwargs: Any) -> Any:
            if always or not self.degraded:
                try:
                    return method(self, *args, **kwargs)
                except Exception as error:  # the edge to vLLM's process
                    if at_start and isinstance(error, _MISTAKES):
                        raise
                    if not self.degraded:
                        degrade(self, f"{type(error).__name__} in {method.__name__}: {error}", error)
            return instead(self, *args, **kwargs)

        guarded.__dict__["is_hook"] = True
        return cast(Method, guarded)

    return guard


def quick(method: Method) -> Method:
    """A call that vLLM makes and that nothing guards: it reads attributes only. What may fail is in a `hook` behind it."""
    method.__dict__["is_hook"] = True
    return method


def statistic(instead: Callable[..., Any]) -> Callable[[Method], Method]:
    """A call that vLLM makes for its statistics, outside of the connector. Where it fails they are lost, which is said once,
    and `instead` answers, with the same arguments."""

    def guard(method: Method) -> Method:
        said: list[str] = []

        @functools.wraps(method)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:  # the edge to vLLM's process
                if not said:
                    said.append(method.__name__)
                    logger.exception("Foreword: statistics are lost in %s", method.__qualname__)
            return instead(*args, **kwargs)

        return cast(Method, guarded)

    return guard


def degrade(side: Degradable, reason: str, error: Exception | None = None) -> None:
    """`error`: that this side has had; None if it follows the other one, which has said so."""
    side.degraded = reason
    if error is not None:
        logger.error(
            "Foreword is degraded: %s. vLLM serves on; no KV is saved or loaded until this server restarts",
            reason,
            exc_info=error,
        )


class Loads:
    """Loads of the worker side: the loads, and the kept blocks, whose end was not reported to vLLM. What was reported in a
    step is dropped with the next one, so an answer that was lost can be given again."""

    def __init__(self) -> None:
        self._open: dict[str, BlockLoad] = {}
        self._ended: set[str] = set()
        self._kept: set[str] = set()
        self._sent: set[str] = set()

    def begin_step(self, metadata: ForewordConnectorMetadata) -> None:
        if self._ended or self._sent:
            for request_id in self._ended:
                self._open.pop(request_id, None)
            self._kept -= self._sent
            self._ended, self._sent = set(), set()
        if metadata.loads or metadata.refused or metadata.finished:
            self._open.update({load.request_id: load for load in (*metadata.loads, *metadata.refused)})
            self._kept.update(metadata.finished)

    def note(self, received: Iterable[str], sent: Iterable[str]) -> None:
        """Note that vLLM knows of the end of these requests."""
        self._ended.update(received)
        self._sent.update(sent)

    def end(self, request_ids: Iterable[str]) -> set[str]:
        """End the requests among these that have an open load: vLLM hears of them at once and not by a step's report."""
        names = set(request_ids)
        found = self._open.keys() & names - self._ended
        for request_id in found:
            del self._open[request_id]
        return found | self._end_kept(names)

    def _end_kept(self, names: set[str]) -> set[str]:
        """End the requests among these whose blocks vLLM keeps: it hears of them at once, too."""
        found = self._kept & names - self._sent
        self._kept -= found
        return found

    def give_up(self) -> tuple[set[str], set[str]]:
        """The requests whose loads end now, and those whose blocks are given back."""
        received, sent = set(self._open), set(self._kept)
        self.note(received, sent)
        return received, sent

    def blocks(self) -> set[int]:
        """vLLM's ids of all blocks that loads were to fill whose end was reported in this step."""
        ended = (load for request_id, load in self._open.items() if request_id in self._ended)
        return {block for load in ended for part in load.parts for block in part.blocks}


class Expectations:
    """Loads that the scheduler side expects: what vLLM expects and the workers do not know yet."""

    def __init__(self) -> None:
        self._loads: dict[str, BlockLoad] = {}
        self._kept: list[str] = []

    def load(self, request_id: str, held: int, tokens: int, block_size: int, ids: tuple[list[int], ...]) -> None:
        """vLLM waits for `tokens` tokens behind the first `held`. `ids`: all blocks of the request, by group. Blocks are only
        named where there is one group; with several the whole request is computed."""
        blocks: tuple[int, ...] = ()
        if len(ids) == 1:
            blocks = tuple(ids[0][held // block_size : -(-(held + tokens) // block_size)])
        part = GroupBlocks(0, (), (), (), blocks)
        self._loads[request_id] = BlockLoad(request_id, b"", held, held + tokens, (part,))

    def keep(self, request_id: str) -> None:
        """vLLM keeps a finished request's blocks until a worker says that they were sent."""
        self._kept.append(request_id)

    def given_back(self, request_ids: Iterable[str]) -> None:
        """vLLM keeps the blocks of these requests no longer."""
        self._kept = [one for one in self._kept if one not in set(request_ids)]

    def sent(self) -> None:
        """The workers know what to do with all of it."""
        if self._loads or self._kept:
            self._loads, self._kept = {}, []

    def give_up(self, tokens: int) -> ForewordConnectorMetadata:
        """For the workers: fail the loads and give back the blocks. `tokens`: of the step. Never 0 there, as workers wait for
        loads in a step without tokens, which delays the next one."""
        metadata = ForewordConnectorMetadata(
            tokens=max(tokens, 1),
            refused=list(self._loads.values()),
            finished=list(self._kept),
            revoked=[LeaseRevocation(request_id) for request_id in self._kept],
        )
        self.sent()
        return metadata
