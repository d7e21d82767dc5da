"""Requests at which replicas die.

Blame follows the effect, not the form: a request whose connection breaks, or that is answered with an error, is blamed if its
replica died just then, however the failure looked. Deaths are remembered across requests and clients by what the requests ask
(`asked_of`). With the second death a request is refused, since a third replica would die, too.

The invariant of each ask that was not served yet: the replicas that died at it, and those where it runs or its failure is not
judged yet, are two at most. So no number of clients at once loses more. An ask that a replica has served is free of it.

What a request asks is the same for each client, and for each retry of a client. Retries differ in transport details: ids,
`user`, `metadata`, `stream`, a `seed`. A digest has the fields that reach the model, in whatever order, and no others. Requests
that differ in a counter or a time near the end of their prompt share the digest of its start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from foreword.api.request import GenerateRequest
from foreword.decoders import decode_json
from foreword.newest import Newest
from foreword.request_errors import NoReplica, ReplicaFailed
from foreword.router.replica_body import ROUTER_FIELDS
from foreword.router.replicas import CONNECTION_ERRORS, ReplicaProbe, Upstream, clock, is_refusal

# Smaller fields are compared without white space and the order of their keys, larger ones as they are written.
_MOST_REWRITTEN: Final = 64 << 10
# A shorter prompt has too little left at its start to tell it from others.
_LEAST_START: Final = 512
# The prompt, in the order in which templates render it.
_PROMPT: Final = ("system", "instructions", "messages", "prompt", "input")
# Other fields that the model, its template or its sampler sees.
_SEEN: Final = frozenset(_PROMPT) | frozenset(
    name
    for names in (
        "suffix documents prompt_embeds prompt_token_ids conversation prefix mm_processor_kwargs media_io_kwargs",
        "tools tool_choice functions function_call parallel_tool_calls thinking reasoning reasoning_effort modalities",
        "include_reasoning thinking_token_budget chat_template chat_template_kwargs add_generation_prompt",
        "continue_final_message add_special_tokens echo truncate_prompt_tokens truncation",
        "response_format text structured_outputs output_config output_format guided_json guided_regex guided_choice",
        "guided_grammar guided_decoding_backend json_schema regex ebnf grammar structural_tag vllm_xargs",
        "logits_processors n best_of use_beam_search length_penalty temperature top_p top_k top_a min_p typical_p",
        "presence_penalty frequency_penalty repetition_penalty logit_bias allowed_token_ids bad_words stop",
        "stop_sequences stop_token_ids include_stop_str_in_output stop_in_reasoning ignore_eos max_tokens",
        "max_completion_tokens max_output_tokens min_tokens logprobs top_logprobs prompt_logprobs",
        "skip_special_tokens spaces_between_special_tokens repetition_detection",
    )
    for name in names.split()
)
# Fields of other requests, such as embeddings, that say nothing to the model.
_UNSEEN: Final = ROUTER_FIELDS | {"user", "seed", "stream", "stream_options", "metadata", "store"}
_GENERATING: Final = frozenset(("chat", "completions", "responses", "messages"))
_MESSAGE: Final = {"role": "user", "content": "a"}
_BODIES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": [_MESSAGE], "max_tokens": 1}),
)
# Replicas that one ask may cost.
MOST_DEATHS: Final = 2
# Deaths are forgotten after this time without a request that asks the same, and in any case after the longer one.
_SECONDS: Final = 300.0
_MOST_SECONDS: Final = 3600.0
# A stream that has come this much further, in tokens, since its replica died has not caused that.
_PROGRESS: Final = 16
_MOST_SUSPECTS: Final = 4096
_MOST_SERVED: Final = 4096
# A death where more suspects than this were together says too little about each of them: a node was lost, most likely.
_CROWD: Final = 4
# Suspects are sent to replicas without another suspect, so that a death tells which one it was; they wait for that so long.
_APART_SECONDS: Final = 5.0


async def is_alive(probe: ReplicaProbe, upstream: Upstream, seconds: float) -> bool:
    """Whether the replica answers a request for one token within this time, in whatever way."""
    for path, body in _BODIES:
        data = msgspec.json.encode({"model": upstream.model, **body})
        try:
            status, _ = await probe.post(upstream.url + path, data, aiohttp.ClientTimeout(total=seconds))
        except (*CONNECTION_ERRORS, ReplicaFailed):
            return False
        if status not in (404, 405):
            return is_refusal(status)
    return True


class SuspiciousRequest(NoReplica, code="suspicious_request", retry=False):
    """Two replicas died at this request, so it is not sent to another one."""


class Death(NamedTuple):
    """The death of a replica: its URL, which of its deaths, and when."""

    replica: str
    number: int
    at: float


class _Suspicion:
    """Knowledge of one digest.

    Attributes:
        whole: it is not only of the start of a prompt.
        deaths: the last ones. flights: attempts that run, or whose failure is not judged yet.
        until: when the deaths are forgotten.
    """

    __slots__ = ("deaths", "flights", "until", "whole")

    def __init__(self, whole: bool) -> None:
        self.whole = whole
        self.deaths: list[Death] = []
        self.flights: set[Flight] = set()
        self.until = 0.0

    @property
    def flying(self) -> set[str]:
        """Replicas that may still die at it."""
        return set[str]().union(*(one.urls for one in self.flights))

    @property
    def spare(self) -> int:
        """How many replicas more may get it."""
        return max(MOST_DEATHS - len(self.deaths) - len(self.flying), 0)


class Flight:
    """An attempt at an ask, from its placement until it is known what became of it.

    Attributes:
        urls: the replicas that may have it.
        waits: it has no first token. judged: it failed, and what became of its replicas is not known yet.
    """

    __slots__ = ("_ask", "judged", "urls", "waits")

    def __init__(self, ask: Ask, urls: Iterable[str]) -> None:
        self._ask = ask
        self.urls = set(urls)
        self.waits = True
        self.judged = False

    def served(self) -> None:
        """The attempt was answered to its end, and will be released."""
        self._ask.served()

    def left(self) -> None:
        """The attempt has ended, in whatever way; unless it is judged, which releases it."""
        if not self.judged:
            self.release()

    def release(self) -> None:
        """Nothing of it is open any more. May be called again."""
        self._ask.release(self)


class Ask:
    """The share of a client's request in deaths of replicas.

    Args:
        name: its id, for the log.
    """

    def __init__(self, suspects: Suspects, asked: AskDigests, name: str) -> None:
        self._suspects = suspects
        self._asked = asked
        self._name = name
        # Its own last death, and the tokens that its client had then.
        self._last: tuple[Death, int] | None = None

    @property
    def _keys(self) -> list[bytes]:
        # A served prefix is innocent: the start of a common system prompt, for one.
        return [one for one in self._asked if one is not None and not self._suspects.was_served(one)]

    def _known(self) -> list[_Suspicion]:
        """Digests that are known, of the whole ask in any case, of its start once a replica has died at it: prompts that have
        a new start in common are not held together before."""
        if not self._suspects.accused:
            one = self._suspects.find(self._asked.whole)
            return [] if one is None else [one]
        found = [(key, self._suspects.find(key)) for key in self._keys]
        return [one for key, one in found if one is not None and (key == self._asked.whole or one.deaths)]

    @property
    def quiet(self) -> bool:
        """Nothing is known of it: any replica may get it at once."""
        return not self._suspects.accused and self._asked.whole not in self._suspects

    def _suspicion(self, key: bytes) -> _Suspicion:
        return self._suspects.get(key, whole=key == self._asked.whole)

    @property
    def deaths(self) -> int:
        """Replicas that have died at it."""
        return max((len(one.deaths) for one in self._known()), default=0) if self._suspects.accused else 0

    @property
    def judged(self) -> bool:
        """Whether a failure of it is not judged yet."""
        return any(flight.judged for one in self._known() for flight in one.flights)

    @property
    def spare(self) -> int:
        """How many replicas more may get it."""
        return min((one.spare for one in self._known()), default=MOST_DEATHS)

    def check(self) -> None:
        """Raises SuspiciousRequest."""
        for one in self._known() if self._suspects.accused else ():
            if len(one.deaths) >= MOST_DEATHS:
                # A client that tries again and again does not get through.
                one.until = max(one.until, min(clock() + _SECONDS, one.deaths[-1].at + _MOST_SECONDS))
                self._suspects.refused += 1
                urls = " and ".join(sorted({death.replica for death in one.deaths}))
                logger.warning("request %s is refused: %s died at requests that asked the same", self._name, urls)
                raise SuspiciousRequest(
                    "Replicas died at requests that asked the same as this one; it is not sent to another one for now"
                )

    def allowed(self) -> frozenset[str] | None:
        """The only replicas that may get it now; None for any. Raises SuspiciousRequest."""
        self.check()
        allowed: frozenset[str] | None = None
        for one in self._known():
            if not one.spare:
                running = frozenset(one.flying - {death.replica for death in one.deaths} or one.flying)
                allowed = running if allowed is None else allowed & running or allowed
        return allowed

    def carriers(self) -> set[str]:
        """Replicas that have another suspect without a first token."""
        return self._suspects.carriers()

    def sent(self, *urls: str) -> Flight:
        """The ask is sent to these replicas."""
        flight, suspects, whole = Flight(self, urls), self._suspects, self._asked.whole
        for key in self._asked:
            if key is not None and not suspects.was_served(key):
                suspects.add(key, flight, whole=key == whole)
        return flight

    def died(self, upstream: Upstream, tokens: int = 0) -> None:
        """A replica died while it was there, and its client had these tokens of it."""
        now = clock()
        if self.deaths and upstream.crowd > _CROWD:
            return
        death = Death(upstream.url, upstream.deaths, now)
        innocent = self._last[0] if self._last is not None and tokens >= self._last[1] + _PROGRESS else None
        self._last = death, tokens
        self._suspects.accuse(self._asked.whole)
        for key in self._keys:
            one = self._suspicion(key)
            one.deaths = [old for old in one.deaths if old[:2] != death[:2] and old is not innocent]
            one.deaths.append(death)
            one.until = now + _SECONDS
        logger.warning("request %s was at %s when it died: %d in all", self._name, upstream.url, self.deaths)
        self._suspects.keep_newest()

    def served(self) -> None:
        """A replica served it to its end."""
        for key in self._asked:
            if key is not None:
                self._suspects.clear(key)

    def release(self, flight: Flight) -> None:
        """An attempt is over."""
        for key in self._asked:
            if key is not None:
                self._suspects.release(key, flight)
        self._suspects.notify()

    async def wait(self, avoid: Collection[str], able: Callable[[], Collection[str]]) -> None:
        """Wait until its failures are judged that leave only replicas to `avoid`; and, if a replica has died at it, a while for
        one of the `able` ones that has no other suspect. Raises SuspiciousRequest."""
        while self.judged and (only := self.allowed()) is not None and only <= set(avoid):
            await self._suspects.changed()
        limit = clock() + _APART_SECONDS
        while self.deaths and self.allowed() is None and (urls := able()) and self.carriers().issuperset(urls):
            if clock() >= limit:
                return
            await self._suspects.changed(limit - clock())


class Suspects:
    """Asks that are at replicas now, and replicas that have died. Runs on the event loop.

    Args:
        on_change: called when requests may have become free to be placed, also from within a change of a pool.

    Attributes:
        refused: number of requests that were refused.
        accused: whether a replica may have died at an ask that is known here; false as long as none has.
    """

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._suspicions: dict[bytes, _Suspicion] = {}
        self._served: Newest[bytes, float] = Newest(_MOST_SERVED)
        self._on_change = on_change
        self.refused = 0
        self.accused = False
        self._waiting = set[asyncio.Future[None]]()

    def __len__(self) -> int:
        """Digests at which replicas have died."""
        return sum(bool(one.deaths) for one in self._suspicions.values())

    def __contains__(self, key: bytes) -> bool:
        """Whether a request with this digest runs, or replicas have died at one."""
        return key in self._suspicions

    def find(self, key: bytes) -> _Suspicion | None:
        """Knowledge of a digest, without what is forgotten."""
        if self.was_served(key):
            return None
        one = self._suspicions.get(key)
        if one is not None and one.deaths and one.until <= clock():
            one.deaths.clear()
        return one

    def get(self, key: bytes, *, whole: bool) -> _Suspicion:
        """Knowledge of a digest, to be changed."""
        one = self._suspicions.get(key)
        if one is None:
            one = self._suspicions[key] = _Suspicion(whole)
        return one

    def was_served(self, key: bytes) -> bool:
        until = self._served.get(key)
        return until is not None and until > clock()

    def accuse(self, key: bytes) -> None:
        """A replica died at it, although others have served it."""
        self.accused = True
        self._served.pop(key, None)

    def clear(self, key: bytes) -> None:
        """A replica served it."""
        self._served[key] = clock() + _MOST_SECONDS
        one = self._suspicions.get(key)
        if one is not None:
            one.deaths.clear()

    def add(self, key: bytes, flight: Flight, *, whole: bool) -> None:
        self.get(key, whole=whole).flights.add(flight)

    def release(self, key: bytes, flight: Flight) -> None:
        one = self._suspicions.get(key)
        if one is not None:
            one.flights.discard(flight)
            if not (one.flights or one.deaths):
                del self._suspicions[key]

    def carriers(self) -> set[str]:
        """Replicas that have a suspect without a first token."""
        flights = (flight for one in self._suspicions.values() if one.deaths for flight in one.flights if flight.waits)
        return set[str]().union(*(flight.urls for flight in flights))

    def crowd(self, url: str) -> int:
        """How many suspects a replica has."""
        found = (one for one in self._suspicions.values() if one.whole and one.deaths)
        return sum(url in one.flying for one in found)

    def forget_old(self, now: float) -> None:
        """Forget deaths of long ago."""
        for key, one in list(self._suspicions.items()):
            if one.deaths and one.until <= now:
                one.deaths.clear()
            if not (one.deaths or one.flights):
                del self._suspicions[key]
        self.accused = any(one.deaths for one in self._suspicions.values())

    def keep_newest(self) -> None:
        """Forget the oldest deaths if there are too many."""
        if len(self._suspicions) <= _MOST_SUSPECTS:
            return
        dead = sorted((one for one in self._suspicions.values() if one.deaths), key=lambda one: one.deaths[-1].at)
        for one in dead[: -_MOST_SUSPECTS // 2]:
            one.deaths.clear()
        self.forget_old(clock())

    # Waiting

    def notify(self) -> None:
        """An attempt is over, or a death was noted."""
        if self._waiting:
            for future in self._waiting:
                if not future.done():
                    future.set_result(None)
            self._waiting.clear()
        self._on_change()

    async def changed(self, seconds: float | None = None) -> None:
        """Wait for the next change, at most so long."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        await asyncio.wait((future,), timeout=seconds)


class AskDigests(NamedTuple):
    """Digests of what a request asks: `whole`, and of the `start` of its prompt, between three and six eighths of it; None if
    that is short."""

    whole: bytes
    start: bytes | None


def asked_of(request: GenerateRequest, model: str) -> AskDigests:
    """The digests of a request to this model."""
    where = f"{request.path or request.dialect}\0{request.model or model}".encode()
    given, fields, parts = request.body.fields, dict[str, bytes](), [where]
    for name in sorted(given.keys() & _SEEN if request.dialect in _GENERATING else given.keys() - _UNSEEN):
        value = fields[name] = _plain(given[name])
        parts += name.encode(), b" %d " % len(value), value
    prompt = b"".join(filter(None, map(fields.get, _PROMPT)))
    length = 1 << max((3 * len(prompt) // 4).bit_length() - 1, 0)
    start = blake2b(where + prompt[:length], digest_size=16).digest() if length >= _LEAST_START else None
    return AskDigests(blake2b(b"".join(parts), digest_size=16).digest(), start)


def _plain(raw: msgspec.Raw) -> bytes:
    value = bytes(raw)
    if len(value) > _MOST_REWRITTEN or (value[:1] == b'"' and b"\\" not in value) or value.isdigit():
        return value  # a text without escapes, or a number: there is one way to write it
    try:
        return msgspec.json.encode(decode_json(value, Any), order="deterministic")
    except (msgspec.DecodeError, UnicodeError, RecursionError):  # such as 1e999, which other servers may take
        return value


logger = logging.getLogger(__name__)
