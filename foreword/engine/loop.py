"""The engine's loop: schedule, run, settle.

`EngineCore` is driven by one thread (a server's engine thread, or the caller of `LLM.generate`). It knows nothing of asyncio
and nothing of HTTP.
"""

from __future__ import annotations

import secrets
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

from foreword.blocks import PrefixCache
from foreword.blocks.miss_history import MissHistory
from foreword.engine.cache_report import Reports
from foreword.engine.request import Delta, Departure, FinishReason, Request, SamplingParams, TokenLogprob
from foreword.engine.runner import Runner, draw_of
from foreword.engine.sampling import Sampled
from foreword.engine.scheduler import Chunk, Pull, Scheduler, SequenceState, Step
from foreword.engine.tokenizer import StopFinder, TextStream, Tokenizer
from foreword.errors import BadRequest, PromptTooLong
from foreword.events import (
    Event,
    FirstToken,
    NextTokens,
    Observer,
    PrefixLookup,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from foreword.offload.manager import OffloadManager

# Seconds that the engine sleeps at most when it has nothing to do but to wait for a store, or for another instance.
_NEWS_WITHIN = 0.005
_PEERS_WITHIN = 0.05
# Steps with fewer tokens of prompts say little about the speed of prefill.
_MEASURED_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loop must know of model and configuration."""

    max_model_len: int
    vocab_size: int
    end_tokens: tuple[int, ...]
    seed: int | None = None
    tell_other_tenants: bool = False


@dataclass(slots=True)
class _Running:
    """A sequence and the text that comes out of it."""

    sequence: SequenceState
    text: TextStream
    stops: StopFinder
    on_finish: Callable[[SequenceState], None] | None


class Handoff(Protocol):
    """What the loop does together with other instances (`engine.instance.Instance`). On the engine's thread."""

    @property
    def expects(self) -> bool: ...
    def pull(self, request: Request, sequence: SequenceState) -> Pull | None: ...
    def pulled(self, sequence: SequenceState, pull: Pull) -> None: ...
    def prepare(self, step: Step) -> None: ...
    def is_export(self, sequence: SequenceState) -> bool: ...
    def computed(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> None: ...
    def sequence_ended(self, sequence: SequenceState, error: str | None) -> None: ...
    def look(self) -> None: ...
    def rest(self, seconds: float) -> None: ...


class EngineCore:
    """Sequences in, deltas out, a step at a time."""

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        history: MissHistory | None = None,
        observers: Iterable[Observer] = (),
        clock: Callable[[], float] = time.monotonic,
        offload: OffloadManager | None = None,
    ) -> None:
        self.cache = cache
        self.offload = offload
        self.handoff: Handoff | None = None
        self.scheduler = scheduler
        self.limits = limits
        self.steps = 0
        self._runner = runner
        self._tokenizer = tokenizer
        self._history = history or MissHistory(0)
        self._reports = Reports(cache, self._history, offload, tell_other_tenants=limits.tell_other_tenants)
        self._observers = tuple(observers)
        self._clock = clock
        self._running: dict[int, _Running] = {}
        self._by_id: dict[str, list[SequenceState]] = {}

    def validate(self, request: Request) -> None:
        """Raises PromptTooLong or BadRequest."""
        length, longest = len(request.tokens), self.limits.max_model_len
        if length == 0:
            raise BadRequest("the prompt is empty; give at least one token", param="prompt")
        asked = request.params.max_tokens or 0
        if length + (0 if request.params.max_tokens == 0 else 1) > longest or length + asked > longest:
            wanted = f"{length} tokens in the prompt" + (f" and {asked} to generate" if asked else "")
            raise PromptTooLong(
                f"This model's longest text is {longest} tokens, but you asked for {wanted}.", param="prompt"
            )
        bad = next((t for t in request.tokens if not 0 <= t < self.limits.vocab_size), None)
        if bad is not None:
            raise BadRequest(f"token {bad} is outside the vocabulary of {self.limits.vocab_size}", param="prompt")
        for name, tokens in (
            ("logit_bias", request.params.logit_bias),
            ("stop_token_ids", request.params.stop_token_ids),
        ):
            bad = next((t for t in tokens if not 0 <= t < self.limits.vocab_size), None)
            if bad is not None:
                raise BadRequest(f"token {bad} is outside the vocabulary of {self.limits.vocab_size}", param=name)

    def add(self, request: Request, on_finish: Callable[[SequenceState], None] | None = None) -> None:
        """Queue a request; it becomes `params.n` sequences. `on_finish` is called before the sequence's blocks go back."""
        self.validate(request)
        self._check_id(request.id)
        params = request.params
        seed = params.seed if params.seed is not None else self.limits.seed
        seed = secrets.randbits(62) if seed is None else seed % 2**63
        sequences = [self._open(replace(request, index=index), seed, on_finish) for index in range(params.n)]
        if request.prefill and self.handoff is not None and params.max_tokens != 0:
            sequences[0].pull = self.handoff.pull(request, sequences[0])
            for sequence in sequences[1:]:
                sequence.leader = sequences[0]
        for sequence in sequences:
            self.scheduler.add(sequence)

    def enter(self, request: Request, seed: int) -> SequenceState:
        """Queue one sequence of a request that began elsewhere, with the seed that it has there."""
        sequence = self.open(request, seed)
        self.scheduler.add(sequence)
        return sequence

    def _check_id(self, request_id: str) -> None:
        if request_id in self._by_id:
            raise BadRequest(f"a request with the id {request_id!r} is already running", param="request_id")

    def _open(self, request: Request, seed: int, on_finish: Callable[[SequenceState], None] | None) -> SequenceState:
        params, longest = request.params, self.limits.max_model_len
        total = longest if params.max_tokens is None else min(longest, len(request.tokens) + params.max_tokens)
        table = self.cache.open(request.tokens, salt=request.salt)
        sequence = SequenceState(request, table, seed, total, arrived=self._clock())
        text = self._tokenizer.stream(request.tokens)
        stops = StopFinder(params.stop, include=params.include_stop)
        self._running[id(sequence)] = _Running(sequence, text, stops, on_finish)
        self._by_id.setdefault(request.id, []).append(sequence)
        return sequence

    def abort(self, request_id: str) -> list[Delta]:
        """End a request wherever it is; its blocks go back. Unknown ids are ignored: the request may just have ended."""
        return [self._end(sequence, "abort") for sequence in list(self._by_id.get(request_id, ()))]

    def recent_texts(self, salt: bytes, count: int) -> list[array[int]]:
        """Copies of a tenant's newest prompts with what was generated after them, as far as they are remembered."""
        return self._history.recent(salt, count)

    def open(self, request: Request, seed: int) -> SequenceState:
        """A sequence that began elsewhere, not in any queue yet. Raises BadRequest."""
        self.validate(request)
        self._check_id(request.id)
        return self._open(request, seed, None)

    def discard(self, sequence: SequenceState) -> None:
        """Forget a sequence that never ran here; its blocks go back."""
        self._running.pop(id(sequence), None)
        self._by_id.pop(sequence.request.id, None)
        self.scheduler.finish(sequence)

    def replay(self, sequence: SequenceState) -> None:
        """Its text so far was sent by whoever had it before: go on after it."""
        running = self._running[id(sequence)]
        for token in sequence.output:
            running.stops.push(running.text.push(token))

    def sequence_of(self, request_id: str) -> SequenceState | None:
        """The only sequence of a request; None if there is no such request, or it has several."""
        group = self._by_id.get(request_id, [])
        return group[0] if len(group) == 1 else None

    def depart(self, sequence: SequenceState, departure: Departure) -> Delta:
        """The sequence goes on elsewhere."""
        return replace(self._end(sequence, "moved"), moved=departure)

    def end(self, sequence: SequenceState, error: str) -> Delta:
        """End a sequence with an error."""
        return self._end(sequence, "error", error=error)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[Delta]:
        """One step. A failure of the device ends the requests of the step, withdraws their blocks, and is not raised."""
        arrived = self._arrive() if self.scheduler.pulling else []
        started = self._clock()
        seen = self.offload.changes if self.offload is not None else 0
        step = self.scheduler.schedule()
        self._note_admissions(step)
        if self.handoff is not None:
            self.handoff.look()
            self.handoff.prepare(step)
        return arrived + (self._compute(step, started) if step.chunks else self._rest(step, seen))

    def _rest(self, step: Step, seen: int) -> list[Delta]:
        """There is nothing to compute: wait for what is to come, or see that nothing will."""
        if self.offload is not None and self.scheduler.expects():
            self.offload.wait(seen, _NEWS_WITHIN)
            return []
        if self.handoff is not None and (self.handoff.expects or self.scheduler.in_blocks):
            self.handoff.rest(_PEERS_WITHIN)
            return []
        return self._end_stuck(step)

    def _compute(self, step: Step, started: float) -> list[Delta]:
        drawing = [c.sequence for c in step.chunks if c.samples and len(c.sequence.table) < c.sequence.max_total]
        try:
            sampled = self._runner.run(step, {id(s): draw_of(s, self._end_tokens(s.request.params)) for s in drawing})
        except (RuntimeError, MemoryError, LookupError, ValueError) as error:
            return self._fail(step, error)
        self.scheduler.settle(step)
        if self.offload is not None:
            self._save(step, self.offload, self._clock() - started)
        now = self._clock()
        deltas = [delta for chunk in step.chunks if chunk.samples for delta in self._settle(chunk, sampled, now)]
        self.steps += 1
        self._note_step(step, now - started)
        return deltas

    def _arrive(self) -> list[Delta]:
        """Prompts that another instance was asked for: go on with what has come of them."""
        assert self.handoff is not None
        pulls = {id(sequence): sequence.pull for sequence in self.scheduler.pulling}
        deltas: list[Delta] = []
        for sequence in self.scheduler.collect_pulls():
            pull, arrival = pulls[id(sequence)], sequence.arrival
            assert pull is not None and arrival is not None
            self.handoff.pulled(sequence, pull)
            self._note_admitted(sequence)
            self._save_blocks(sequence, sequence.arrived_from // self.cache.block_size, sequence.table.published)
            if arrival.token is not None:
                deltas.append(self._extend(sequence, arrival.token, arrival.logprob, self._clock()))
        return deltas

    def _save(self, step: Step, offload: OffloadManager, seconds: float) -> None:
        """Hand over the blocks that this step filled, of prompts and of answers (R19)."""
        prefill = sum(chunk.count for chunk in step.chunks if chunk.count > 1)
        if prefill >= _MEASURED_TOKENS:
            offload.prefill_rate.note(step.num_tokens, seconds)
        for chunk in step.chunks:
            full = min((chunk.start + chunk.count) // self.cache.block_size, chunk.sequence.table.published)
            self._save_blocks(chunk.sequence, chunk.published_before, full)

    def _save_blocks(self, sequence: SequenceState, first: int, full: int) -> None:
        table = sequence.table
        if full > first and self.offload is not None:
            keys = table.chain.keys_to(full)[first:full]
            self.offload.save(keys, table.chain.key_before(first), first, table.blocks[first:full])

    def fail_all(self, message: str) -> list[Delta]:
        """End everything with an error (the engine's thread cannot go on)."""
        return [self._end(running.sequence, "error", error=message) for running in list(self._running.values())]

    def _fail(self, step: Step, error: BaseException) -> list[Delta]:
        self.scheduler.withdraw(step)
        message = f"the step failed: {type(error).__name__}: {error}"
        return [self._end(chunk.sequence, "error", error=message) for chunk in step.chunks]

    def _end_stuck(self, step: Step) -> list[Delta]:
        """Nothing runs, and the first in the queue finds no room: pinned blocks hold it, so waiting would not help. A text
        that has begun ends here; a prompt that cannot be computed is an error."""
        scheduler, pool = self.scheduler, self.cache.pool
        if scheduler.running or step.preempted or not scheduler.waiting:
            return []
        sequence = scheduler.waiting[0]
        if sequence.num_output:
            text, stop = self._last_text(self._running[id(sequence)])
            return [self._end(sequence, "length" if stop is None else "stop", (), text, stop_match=stop)]
        message = (
            f"no room for a text of {len(sequence.table)} tokens: {pool.num_blocks - pool.num_free} of {pool.num_blocks} "
            f"blocks of {self.cache.block_size} tokens are pinned by named prefixes"
        )
        return [self._end(sequence, "error", error=message)]

    def _settle(self, chunk: Chunk, sampled: dict[int, Sampled], now: float) -> list[Delta]:
        sequence = chunk.sequence
        result = sampled.get(id(sequence))
        if result is None:  # the prompt was all that was asked for
            return [self._end(sequence, "length")]
        if self.handoff is not None and self.handoff.is_export(sequence):
            self.handoff.computed(sequence, result.token, result.logprob)
            return [self._end(sequence, "length")]
        return [self._extend(sequence, result.token, result.logprob, now)]

    def _extend(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None, now: float) -> Delta:
        self._note_token(sequence, now)
        sequence.table.append(token)
        return self._delta(self._running[id(sequence)], token, () if logprob is None else (logprob,))

    def _delta(self, running: _Running, token: int, logprobs: tuple[TokenLogprob, ...]) -> Delta:
        """The delta of one new token, which may be the sequence's last."""
        sequence, params = running.sequence, running.sequence.request.params
        if self._ends(token, params) and sequence.num_output >= params.min_tokens:
            match = token if token in params.stop_token_ids else None
            text = running.stops.push(running.text.flush())[0] + running.stops.flush()
            return self._end(sequence, "stop", (token,), text, logprobs, stop_match=match)
        text, stop = running.stops.push(running.text.push(token))
        if stop is not None:
            return self._end(sequence, "stop", (token,), text, logprobs, stop_match=stop)
        if len(sequence.table) >= sequence.max_total:
            rest, stop = self._last_text(running)
            reason: FinishReason = "length" if stop is None else "stop"
            return self._end(sequence, reason, (token,), text + rest, logprobs, stop_match=stop)
        return self._make_delta(sequence, (token,), text, logprobs)

    def _last_text(self, running: _Running) -> tuple[str, str | None]:
        """What was held back, now that no more tokens come, and the stop string that it completes."""
        text, stop = running.stops.push(running.text.flush())
        return text + (running.stops.flush() if stop is None else ""), stop

    def _end_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids if params.ignore_eos else (*self.limits.end_tokens, *params.stop_token_ids)

    def _ends(self, token: int, params: SamplingParams) -> bool:
        return token in params.stop_token_ids or (not params.ignore_eos and token in self.limits.end_tokens)

    def _make_delta(
        self,
        sequence: SequenceState,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Delta:
        return Delta(
            request_id=sequence.request.id,
            index=sequence.request.index,
            tokens=tokens,
            text=text,
            logprobs=logprobs,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=max(sequence.cached_tokens, 0),
        )

    def _end(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        *,
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> Delta:
        """Take a sequence out and make its last delta."""
        running = self._running.pop(id(sequence))
        if running.on_finish is not None and reason in ("stop", "length"):
            running.on_finish(sequence)
        if self.handoff is not None:
            self.handoff.sequence_ended(sequence, error)
        self.scheduler.finish(sequence)
        group = self._by_id[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._by_id[sequence.request.id]
        self._note_end(sequence, reason)
        delta = self._make_delta(sequence, tokens, text, logprobs)
        return replace(delta, finish_reason=reason, stop_match=stop_match, error=error, cache_report=sequence.report)

    def notify(self, event: Event) -> None:
        for observer in self._observers:
            observer.notify(event)

    def _note_admissions(self, step: Step) -> None:
        for sequence in step.admitted:
            self._note_admitted(sequence)
        for sequence in step.preempted:
            self.notify(RequestPreempted(sequence.request.id))

    def _note_admitted(self, sequence: SequenceState) -> None:
        sequence.admitted_at = self._clock()
        if sequence.request.want_cache_report:
            sequence.report = self._reports.report(sequence)
        self._history.add(sequence.request.salt, sequence.table.chain.tokens)
        loaded = tuple(self._reports.loaded_tokens(sequence).items())
        self.notify(PrefixLookup(sequence.request.id, sequence.num_prompt, sequence.cached_tokens, loaded))

    def _note_token(self, sequence: SequenceState, now: float) -> None:
        if sequence.last_token_at < 0:
            queued = sequence.admitted_at - sequence.arrived
            self.notify(FirstToken(sequence.request.id, now - sequence.arrived, queued))
        elif self._observers:
            self.notify(NextTokens((now - sequence.last_token_at,)))
        sequence.last_token_at = now

    def _note_end(self, sequence: SequenceState, reason: FinishReason) -> None:
        if not self._observers:
            return
        full = len(sequence.table) // self.cache.block_size
        self.notify(
            RequestFinished(
                sequence.request.id,
                reason,
                sequence.num_prompt,
                max(sequence.cached_tokens, 0),
                sequence.num_output,
                self._clock() - sequence.arrived,
                sequence.table.chain.keys_to(full)[:full],
            )
        )

    def _note_step(self, step: Step, seconds: float) -> None:
        if not self._observers:
            return
        decode = sum(1 for chunk in step.chunks if chunk.start >= chunk.sequence.num_prompt)
        pool = self.cache.pool
        self.notify(
            StepFinished(
                seconds,
                step.num_tokens - decode,
                decode,
                len(self.scheduler.running),
                len(self.scheduler.waiting),
                1.0 - pool.num_free / pool.num_blocks,
            )
        )
