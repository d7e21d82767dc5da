"""Measures how fast a replica is, before its first requests: the time of a prompt that no request has.

The prompt is drawn at random and has a salt of its own, so nothing of it is cached before and no request hits it later. It
asks for one token, as the least urgent request where the server knows priorities. The faster of two is what counts: the first
prompt of a process may wait for kernels to be compiled.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import Callable
from typing import Any, Final

import aiohttp
import msgspec

from foreword.api.dialects.answer_reader import AnswerReader
from foreword.errors import BadRequest
from foreword.request_errors import ReplicaFailed
from foreword.router.extras import SpeedProbes
from foreword.router.logprobs_probe import TEXT
from foreword.router.replica_pool import machine_of
from foreword.router.replicas import CONNECTION_ERRORS, ReplicaInfo, ReplicaProbe, Upstream, clock
from foreword.routing.cost_kinds import MEASURED_TOKENS, Measurement
from foreword.routing.fleet import Fleet
from foreword.tasks import shared

logger = logging.getLogger(__name__)

# Bytes of the prompt per token of `MEASURED_TOKENS`: a little more than usual, for tokenizers of code.
_TOKEN_BYTES: Final = 4
# Tokens of a context beside those of the text.
_RESERVED: Final = 8
_RUNS: Final = 2
# How often a replica that has joined is looked at until it is idle, and seconds between.
_TRIES: Final = 30
_IDLE_SECONDS: Final = 2.0
# Less urgent than what a client may be expected to send. Lower numbers are more urgent, as in vLLM.
_PRIORITY: Final = 1000
# Shorter prompts say little about the cost of a token.
_MIN_TOKENS: Final = 128


def _body(info: ReplicaInfo, *, priority: bool) -> bytes:
    length = MEASURED_TOKENS * _TOKEN_BYTES
    if info.max_model_len is not None:  # a token has at least a byte
        length = min(length, max(info.max_model_len - _RESERVED, 1))
    words, rng = TEXT.split(), random.Random(secrets.randbits(64))
    text = " ".join(rng.choices(words, k=length // 2))[:length]
    asked: dict[str, Any] = {"model": info.models[0], "prompt": text, "max_tokens": 1, "temperature": 0}
    asked["cache_salt"] = secrets.token_hex(16)
    return msgspec.json.encode(asked | ({"priority": _PRIORITY} if priority else {}))


async def measured(probe: ReplicaProbe, url: str, info: ReplicaInfo, limit: float) -> Measurement:
    """The faster of two prompts at a replica, which should be idle. `limit`: seconds for each. Raises ReplicaFailed with the
    reason if it cannot be measured.

    Cancelling ends the request at the replica too, since the connection closes.
    """
    found = [await _one(probe, url, info, limit) for _ in range(_RUNS)]
    return min(found, key=lambda one: one.seconds / one.tokens)


async def _one(probe: ReplicaProbe, url: str, info: ReplicaInfo, limit: float) -> Measurement:
    timeout = aiohttp.ClientTimeout(total=limit)
    try:
        for priority in (True, False):
            began = clock()
            status, data = await probe.post(f"{url}/v1/completions", _body(info, priority=priority), timeout)
            seconds = clock() - began
            if status != 400:
                break  # else it schedules in order of arrival, and takes no priorities
    except TimeoutError:
        raise ReplicaFailed(f"a prompt was not computed within {limit:g} s") from None
    except CONNECTION_ERRORS as error:
        raise ReplicaFailed(f"a prompt failed: {type(error).__name__}") from None
    if status != 200:
        raise ReplicaFailed(f"/v1/completions says {status}")
    reader = AnswerReader()
    try:
        reader.read(data)
    except BadRequest as error:
        raise ReplicaFailed(f"its answer cannot be read: {error}") from None
    tokens = (reader.counts.prompt or 0) - (reader.counts.cached or 0)
    if tokens < _MIN_TOKENS:
        raise ReplicaFailed("it does not say how long the prompt was, or its prompts are too short to tell")
    return Measurement(tokens, seconds)


class ReplicaSpeedProbes(SpeedProbes):
    """Measures the replicas of a router.

    Args:
        seconds: that a prompt may take; 0 turns it off.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def measures(self, info: ReplicaInfo) -> bool:
        # Not what may be another company's server, which charges for it.
        return self._seconds > 0 and info.kind in ("foreword", "vllm")

    async def measure_before(self, probe: ReplicaProbe, upstream: Upstream, info: ReplicaInfo) -> bool:
        upstream.problem = "the time of a prompt is measured"
        try:
            upstream.measured = await self._result(probe, upstream, info)
        except ReplicaFailed:  # it refuses or is too slow, and would be again
            return False
        return upstream.measured is None

    async def measure_idle(self, probe: ReplicaProbe, upstream: Upstream, joined: Callable[[], Fleet | None]) -> None:
        for _ in range(_TRIES):
            info, fleet = upstream.info, joined()
            if info is None or fleet is None or upstream.measured is not None:
                return
            if not upstream.in_flight:
                try:
                    found = await self._result(probe, upstream, info)
                except ReplicaFailed:
                    return
                if found is not None and joined() is fleet:
                    upstream.measured = found
                    fleet.measured(upstream.url, machine_of(info), found)
                    return
            await asyncio.sleep(_IDLE_SECONDS)

    async def _result(self, probe: ReplicaProbe, upstream: Upstream, info: ReplicaInfo) -> Measurement | None:
        """None if it is busy or does not say whether it is, or a request came. Raises ReplicaFailed if it refuses or is too
        slow."""
        try:
            requests = (await probe.metrics(upstream)).requests
        except CONNECTION_ERRORS:
            return None
        if requests != 0 or upstream.in_flight:
            return None
        task = upstream.measuring = shared(measured(probe, upstream.url, info, self._seconds))
        try:
            await asyncio.wait((task,))
        finally:
            upstream.measuring = None
            task.cancel()  # without effect unless this was cancelled itself
        if task.cancelled():
            return None
        if isinstance(error := task.exception(), ReplicaFailed):
            logger.info("replica %s was not measured: %s", upstream.url, error.message)
            raise error
        found = task.result()
        logger.info("replica %s computed a prompt of %d tokens in %.3f s", upstream.url, found.tokens, found.seconds)
        return found
