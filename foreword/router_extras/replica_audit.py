"""The audit of hits from the router: for engines whose KV cannot be looked at.

One in N requests that hit is repeated while no client waits: on the same replica, greedy, a few tokens, once as it was and once
with a salt of its own, so that its prompt is computed. If tokens or log-probabilities differ, and differ again, the cached KV
is wrong. The tenant's salt is then changed for all replicas: no instance and no tier of any engine finds what was cached until
then.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from foreword.api.dialects.answer_reader import AnswerReader, UsageCounts
from foreword.api.request import GenerateRequest
from foreword.api.rights import Tenant
from foreword.blocks.salt import Salt, tenant_digest
from foreword.errors import BadRequest, ConfigError, reason_of
from foreword.request_errors import ReplicaFailed
from foreword.router.auth import RouterAuth
from foreword.router.extras import Audit
from foreword.router.replica_body import PATHS
from foreword.router.replicas import CONNECTION_ERRORS, Upstream, read_whole
from foreword.tasks import log_failure

logger = logging.getLogger(__name__)

_SUFFIX: Final = ".salt"
_CHANGE: Final = re.compile(r"[0-9a-f]{32}")
# Natural log-probabilities of likely tokens differ by less than this in two right computations in bfloat16.
TOLERANCE: Final = 0.5
_LIKELY: Final = -4.0
_TOKENS: Final = 8
_LOGPROBS: Final[Mapping[str, Mapping[str, Any]]] = {
    "chat": {"logprobs": True, "top_logprobs": 5},
    "completions": {"logprobs": 5},
}
_MAX_PENDING: Final = 16
_MAX_BODY: Final = 1 << 20
_IDLE_SECONDS: Final = 0.25
_TIMEOUT: Final = aiohttp.ClientTimeout(total=120.0)
# The fields that determine the prompt; the rest of a body, such as retentions and sampling, is left out.
_PROMPT_FIELDS: Final = (
    "model", "messages", "prompt", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort", "prefix",
)  # fmt: skip

# Position by position: the token's text, and the likeliest texts with their log-probabilities.
Output = list[tuple[str, dict[str, float]]]


class ChangedSalts:
    """Salts whose cached KV was wrong: the `cache_salt` that their requests have instead, by a digest of the salt, shared by
    routers through a folder. A changed salt is of the same tenant.

    A change is a file of its own, which is created once and never written again. So routers need no lock, and none of them can
    undo what another one has changed.

    Args:
        folder: where the changes are kept, and where those of other routers are found; None keeps them in memory only.

    Raises ConfigError if a change cannot be read: without it the router would use what was found to be wrong.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._changes: dict[str, str] = {}
        self._saved: set[str] = set()
        self._failure = ""
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read the changed salts in {folder}: {reason_of(error)}") from error

    def __len__(self) -> int:
        return len(self._changes)

    def all_of(self, tenant: bytes, cache_salt: str | None) -> list[str | None]:
        """Salts that requests of a tenant with this `cache_salt` have had in its place: first itself, and from now on the
        last."""
        found = [cache_salt]
        while self._changes and (change := self._changes.get(_digest(Salt.of(tenant, found[-1])))) is not None:
            found.append(change)
        return found

    def change(self, salt: Salt) -> None:
        """Never again use this salt; `sync` tells the other routers."""
        self._changes.setdefault(_digest(salt), secrets.token_hex(16))

    def sync(self) -> None:
        """Write new changes and read those of other routers; the first change of a salt holds. On any thread, one at a time. A
        failure is logged, and the next call tries again."""
        try:
            for digest in self._changes.keys() - self._saved:
                self._write(digest)
            self._read()
            self._failure = ""
        except (OSError, ValueError) as error:
            if str(error) != self._failure:
                logger.error("the changed salts in %s cannot be read or written: %s", self._folder, error)
            self._failure = str(error)

    def _read(self) -> None:
        if self._folder is None or not self._folder.exists():
            return
        damaged = ""
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem not in self._saved:
                with path.open(encoding="ascii") as file:
                    change = file.read(33)
                if not _CHANGE.fullmatch(change):
                    damaged = path.name
                    continue
                self._changes[path.stem] = change
                self._saved.add(path.stem)
        if damaged:
            raise ValueError(f"{damaged} is damaged")

    def _write(self, digest: str) -> None:
        if self._folder is None:
            return
        path, new = self._folder / f"{digest}{_SUFFIX}", self._folder / f"{digest}.{secrets.token_hex(4)}.new"
        self._folder.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(self._changes[digest])
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # another router has changed it
                os.link(new, path)
        finally:
            new.unlink(missing_ok=True)


def _digest(salt: Salt) -> str:
    """32 hexadecimal digits, which reveal nothing of the salt."""
    return sha256(salt.text.encode()).hexdigest()[:32] if salt.client else tenant_digest(salt.tenant)


@dataclass(frozen=True, slots=True)
class _Hit:
    """A request that hit, to be repeated. `cache_salt`: as in `RoutedRequest`. `weights`: the replica's at that time."""

    upstream: Upstream
    weights: str | None
    tenant: Tenant
    cache_salt: str | None
    model: str | None
    path: str
    body: Mapping[str, Any]
    tokens: int


class ReplicaAudit(Audit):
    """Repeats hits and compares. On the router's event loop.

    Args:
        is_idle: whether no client waits for a response.
        every: one hit in N; 0 for none.
        budget: prompt tokens of repeated requests, as a share of those of all requests.
        folder: for reports, and for the changed salts, which must outlive the router; None keeps nothing.

    Raises ConfigError if changed salts cannot be read.
    """

    def __init__(
        self, auth: RouterAuth, is_idle: Callable[[], bool], every: int, budget: float, folder: str | None
    ) -> None:
        super().__init__()
        self.hits = 0
        self._auth = auth
        self._is_idle = is_idle
        self._every = every
        self._budget = budget
        self._folder = None if folder is None else Path(folder)
        self._salts = ChangedSalts(self._folder)
        self._routed = self._spent = 0
        self._chosen = 0
        self._random = random.Random()  # which hits are audited is no secret
        self._pending: deque[_Hit] = deque()

    @property
    def quarantined(self) -> int:
        return len(self._salts)

    def salts_of(self, tenant: bytes, cache_salt: str | None) -> list[str | None]:
        return self._salts.all_of(tenant, cache_salt)

    def finished(
        self, request: GenerateRequest, tenant: Tenant, cache_salt: str | None, upstream: Upstream, counts: UsageCounts
    ) -> None:
        """Some of the requests that hit are taken for an audit."""
        if not self._every:
            return
        self._routed += counts.prompt or 0
        if not counts.cached:
            return
        number = self.hits % self._every
        self.hits += 1
        if not number:
            self._chosen = self._random.randrange(self._every)
        if number != self._chosen:
            return
        # The replica must take the tenant from the router, and must not charge the client for it.
        salted = upstream.kind == "vllm" or (upstream.kind == "foreword" and self._auth.uses_own_key)
        fits = request.dialect in _LOGPROBS and len(request.body.raw) <= _MAX_BODY
        if not salted or not fits or len(self._pending) >= _MAX_PENDING:
            self.results["skipped"] += 1
            return
        body: dict[str, Any] = dict(request.body.only(*_PROMPT_FIELDS))
        body |= {"max_tokens": _TOKENS, "temperature": 0, "stream": False, **_LOGPROBS[request.dialect]}
        model, path = request.model or upstream.model, PATHS[request.dialect]
        hit = _Hit(upstream, upstream.weights, tenant, cache_salt, model, path, body, counts.prompt or 0)
        self._pending.append(hit)

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Audit while the fleet is idle, and follow the salts that other routers have changed, until cancelled."""
        while True:
            await asyncio.sleep(_IDLE_SECONDS)
            if self._folder is not None:
                await asyncio.to_thread(self._salts.sync)
            if not self._pending or not self._is_idle() or self._spent > self._budget * self._routed:
                continue
            work = asyncio.ensure_future(self._audit(session, self._pending[0]))
            try:
                while not work.done() and self._is_idle():
                    await asyncio.wait((work,), timeout=_IDLE_SECONDS / 5)
            finally:
                if work.cancel():  # a client's request comes first; this one is repeated later
                    log_failure(work, f"the audit of a hit at {self._pending[0].upstream.url}")
            if work.done() and not work.cancelled():
                hit, error = self._pending.popleft(), work.exception()
                if error is not None:
                    logger.error("the audit of a hit at %s failed", hit.upstream.url, exc_info=error)
                self.results["failed" if error is not None else work.result()] += 1

    async def _audit(self, session: aiohttp.ClientSession, hit: _Hit) -> str:
        """Repeat a request, and once more if it differs. Returns the result."""
        figures = []
        for _ in range(2):
            try:
                cached, output = await self._ask(session, hit, hit.cache_salt)
                _, expected = await self._ask(session, hit, secrets.token_hex(16))
            except (*CONNECTION_ERRORS, ReplicaFailed, TimeoutError) as error:
                logger.info("audit: %s did not answer: %s", hit.upstream.url, error)
                return "skipped"
            if not cached or hit.upstream.weights != hit.weights:
                return "skipped"
            figures.append(difference(output, expected))
            if figures[-1] <= TOLERANCE:
                return "equal"
        self._quarantine(hit, figures, output, expected)
        return "different"

    async def _ask(self, session: aiohttp.ClientSession, hit: _Hit, cache_salt: str | None) -> tuple[int, Output]:
        """Cached tokens and output. Raises what aiohttp raises, and ReplicaFailed."""
        self._spent += hit.tokens
        kind = hit.upstream.kind
        given = Salt.of(hit.tenant.salt, cache_salt).text if kind == "vllm" else cache_salt
        body = {**hit.body, "cache_salt": given} if given else hit.body
        headers = {**self._auth.headers(hit.tenant, None, kind), "content-type": "application/json"}
        url, data = hit.upstream.url + hit.path, msgspec.json.encode(body)
        async with session.post(url, data=data, headers=headers, timeout=_TIMEOUT, allow_redirects=False) as response:
            content = await read_whole(response)
            if response.status != 200:
                raise ReplicaFailed(f"status {response.status}")
        return read_output(content)

    def _quarantine(self, hit: _Hit, figures: list[float], output: Output, expected: Output) -> None:
        """Never use again what the tenant has cached, on any replica, and report it."""
        salt = Salt.of(hit.tenant.salt, hit.cache_salt)
        self._salts.change(salt)
        # The tenant's other entries were computed with the KV that is not used any more: it would be found wrong again.
        kept = [one for one in self._pending if one is hit or Salt.of(one.tenant.salt, one.cache_salt) != salt]
        self._pending = deque(kept)
        url, prompt = hit.upstream.url, msgspec.json.encode(hit.body)
        logger.error(
            "audit: %s answers from its cache otherwise than without it (log-probabilities differ by %.2g); nothing that "
            "tenant %s has cached with this cache_salt is used any more", url, min(figures), hit.tenant.name,
        )  # fmt: skip
        if self._folder is None:
            return
        now = int(time.time())
        report = {
            "format": 1,
            "kind": "router",
            "time": now,
            "replica": url,
            "model": hit.model,
            "tenant": salt.digest.hex(),
            "prompt_tokens": hit.tokens,
            "prompt_sha256": sha256(prompt).hexdigest(),
            "differences": [one if math.isfinite(one) else None for one in figures],
            "cached": output,
            "computed": expected,
        }
        _write(self._folder / f"audit-{now}-{secrets.token_hex(4)}.json", report)


def difference(output: Output, expected: Output) -> float:
    """The largest difference of the log-probabilities of likely tokens, as long as both outputs had the same tokens before. A
    token that is not among an output's candidates counts as the last of them. Infinite if one output is shorter."""
    worst = 0.0
    for (token, found), (other, right) in zip(output, expected, strict=False):
        for name in {*found, *right}:
            pair = [each.get(name, min(each.values(), default=-math.inf)) for each in (found, right)]
            if max(pair) >= _LIKELY:
                worst = max(worst, abs(pair[0] - pair[1]))
        if token != other:
            return worst
    return worst if len(output) == len(expected) else math.inf


def read_output(data: bytes) -> tuple[int, Output]:
    """Cached tokens and output of a whole response with log-probabilities. Raises ReplicaFailed for anything else."""
    reader = AnswerReader()
    try:
        choices = reader.read(data).choices or ()
    except BadRequest as error:
        raise ReplicaFailed(error.message) from None
    found = choices[0].read_logprobs() if len(choices) == 1 else None
    if found is None:
        raise ReplicaFailed("a response without log-probabilities")
    output = [(one.text, {name: value for name, value, _ in one.top}) for one in found.entries()]
    return reader.counts.cached or 0, output


def _write(path: Path, content: object) -> None:
    """Write a new file that only its owner can read. A failure is logged."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    except OSError as error:
        logger.error("the audit cannot write %s: %s", path, error)
