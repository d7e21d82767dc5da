"""The engine's loop: schedule, run, settle.

`EngineCore` runs on one thread: a server's engine thread, or the caller of `LLM.generate`. It knows neither asyncio nor HTTP.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from foreword.blocks.prefix_cache import BlockTable, PrefixCache
from foreword.blocks.retention import MAX_PRIORITY, PREFETCH_PRIORITY, RetentionAnswer
from foreword.blocks.salt import Salt
from foreword.blocks.session_book import Alone, SessionBook
from foreword.engine.block_saver import BlockSaver
from foreword.engine.cache_report import CacheReports, MissHistory
from foreword.engine.external_kv import MAX_PREFETCHES, EngineStores, RemoteKV
from foreword.engine.prompt_leases import EngineLeases
from foreword.engine.prompt_logprobs import PromptLogprobs
from foreword.engine.request import MAX_RETENTIONS, Delta, FinishReason, MigratedTo, Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import Chunk, OutputText, Runner, Sampled, SequenceState, Step, draw_of
from foreword.errors import BadRequest
from foreword.events import (
    Event,
    FirstToken,
    NextTokens,
    Observer,
    PrefixLookup,
    RequestBroken,
    RequestFinished,
    RequestPreempted,
    StepFinished,
)
from foreword.request_errors import PromptTooLong, QueueFull
from foreword.tokens.token_logprob import TokenLogprob
from foreword.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from foreword.engine.hit_audit import HitAudit
    from foreword.engine.structured.compiler import CompiledOutput, GrammarCompiler
    from foreword.engine.structured.sequence_constraint import Constraint

logger = logging.getLogger(__name__)

# Seconds that a step without work waits for a store, or for another instance.
_STORE_WAIT = 0.005
_PEER_WAIT = 0.05


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of model and configuration that the loop must know."""

    max_model_len: int
    vocab_size: int
    end_tokens: tuple[int, ...]
    seed: int | None = None


@dataclass(slots=True)
class _TextState:
    """The text that a sequence has produced."""

    output: OutputText
    on_finish: Callable[[SequenceState], None] | None


class IdleWork(Protocol):
    """Work for the time in which nothing is scheduled."""

    def pause(self) -> float | None:
        """Seconds until `work` may be called; None if there is nothing to do."""

    def work(self) -> bool:
        """Do a part of it. False if there is nothing to do now."""


@dataclass(slots=True)
class Hooks:
    """Functions of the loop's extensions, by event. Each list has those of the extensions that are switched on, in the order in
    which they were attached; an extension that is off is in none of them. All run on the engine's thread.

    Attributes:
        before_step: a step is about to be scheduled.
        admitted: a sequence was admitted, for the first time or again: its cached tokens are known.
        arrived: KV of a sequence was loaded, or computed by another instance from the given token on (None: loaded).
        stepped: a step has run, for so many seconds.
        computed: the KV of a chunk is computed, and its sequence goes on.
        ended: a sequence has ended, complete or not; its blocks go back behind this. Each is called whatever others raise.
        idle: work for an engine that has nothing else to do.
    """

    before_step: list[Callable[[], object]] = field(default_factory=list)
    admitted: list[Callable[[SequenceState], object]] = field(default_factory=list)
    arrived: list[Callable[[SequenceState, int | None], object]] = field(default_factory=list)
    stepped: list[Callable[[Step, float], object]] = field(default_factory=list)
    computed: list[Callable[[Step, Chunk], object]] = field(default_factory=list)
    ended: list[Callable[[SequenceState, bool], object]] = field(default_factory=list)
    idle: list[IdleWork] = field(default_factory=list)


class KVTransferHooks(Protocol):
    """Sends KV to other instances and gets KV from them (`disaggregation.instance.Instance`). On the engine's thread."""

    @property
    def holds_blocks(self) -> bool:
        """Blocks are held for transfers: they come back without a step of this engine."""
        ...

    def remote_prefill(self, request: Request, sequence: SequenceState) -> RemoteKV | None:
        """The KV of a prompt that another instance computes; None if that is this one."""
        ...

    def remote_prefill_ended(self, sequence: SequenceState) -> None: ...
    def before_step(self, step: Step) -> None: ...
    def prompt_computed(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> bool:
        """A prompt is computed, and the token after it sampled. True if both are for another instance."""
        ...

    def sequence_ended(self, sequence: SequenceState, error: str | None) -> None: ...
    def wait(self, seconds: float) -> None:
        """Sleep until a call for the engine's thread arrives."""
        ...


class EngineCore:
    """Requests in, deltas out, a step at a time.

    Attributes:
        hooks: of the extensions.
        post: has a function called on the engine's thread before the next step. From any thread.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        *,
        history: MissHistory | None = None,
        observers: Iterable[Observer] = (),
        offload: EngineStores | None = None,
        leases: EngineLeases | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.cache = cache
        self.hooks = Hooks()
        self._posted: deque[Callable[[], object]] = deque()
        self.post: Callable[[Callable[[], object]], object] = self._posted.append
        self.leases = leases or EngineLeases(cache, 0, 0)
        self.leases.on_release = lambda: self.post(self.leases.settle)
        self.offload = offload
        self.sessions = SessionBook()
        self.on_superseded: Callable[[bytes, Alone], None] = lambda tenant, alone: None
        self.transfers: KVTransferHooks | None = None
        self.audit: HitAudit | None = None
        self.scheduler = scheduler
        self.limits = limits
        self.steps = 0
        self._runner, self._tokenizer, self._grammars = runner, tokenizer, grammars
        self._history = history or MissHistory(0)
        if offload is not None:
            BlockSaver(cache, offload).attach(self.hooks)
        if history is not None:
            self.hooks.admitted.append(self._remember)
        self._reports = CacheReports(cache, self._history, offload)
        self._observers = tuple(observers)
        self._texts: dict[SequenceState, _TextState] = {}
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
                f"This model's maximum context length is {longest} tokens, but you requested {wanted}", param="prompt"
            )
        given = {
            "prompt": request.tokens,
            "continuation": request.output,
            "logit_bias": request.params.logit_bias,
            "stop_token_ids": request.params.stop_token_ids,
            "allowed_token_ids": request.params.allowed_token_ids or (),
        }
        for name, tokens in given.items():
            bad = next((t for t in tokens if not 0 <= t < self.limits.vocab_size), None)
            if bad is not None:
                raise BadRequest(f"token {bad} is outside the vocabulary of {self.limits.vocab_size}", param=name)
        _check_retentions(request)
        _check_output(request, longest)

    def compile(self, params: SamplingParams, salt: Salt) -> CompiledOutput | None:
        """Compile what the text must match; None if that is any text. From any thread. Raises BadRequest, QueueFull."""
        if params.structured is None:
            return None
        if self._grammars is None:
            raise BadRequest("this engine has no structured output", param="response_format")
        return self._grammars.compile(params.structured, salt.tenant)

    def add(
        self,
        request: Request,
        on_finish: Callable[[SequenceState], None] | None = None,
        compiled: CompiledOutput | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        """Queue a request; it becomes `params.n` sequences, from its index on.

        Args:
            on_finish: called before the sequence's blocks go back.
            compiled: the result of `compile`, which may take seconds; compiled here if not given.
            constraint: the result of `constraint_after`, for a request that comes with output.
        """
        self.validate(request)
        self._check_id(request.id)
        compiled = compiled or self.compile(request.params, request.salt)
        params = request.params
        seed = params.seed if params.seed is not None else self.limits.seed
        seed = secrets.randbits(62) if seed is None else seed % 2**63
        indices = range(request.index, request.index + params.n)
        sequences = [self._open(replace(request, index=index), seed, compiled, on_finish) for index in indices]
        if request.output:
            self._continue(sequences[0], constraint)
        if params.prompt_logprobs is not None:
            prompt = PromptLogprobs(request, params.prompt_logprobs)
            for sequence in sequences:
                sequence.prompt_logprobs = prompt
        elif request.prefill and self.transfers is not None and params.max_tokens != 0:
            remote = self.transfers.remote_prefill(request, sequences[0])
            for sequence in sequences:
                sequence.remote = remote
        for sequence in sequences:
            self.scheduler.add(sequence)

    def open(self, request: Request, seed: int, compiled: CompiledOutput | None = None) -> SequenceState:
        """A sequence of a request that began at another instance, with its seed there; not in any queue yet. `compiled` as in
        `add`."""
        self.validate(request)
        self._check_id(request.id)
        return self._open(request, seed, compiled or self.compile(request.params, request.salt), None)

    def _check_id(self, request_id: str) -> None:
        if request_id in self._by_id:
            raise BadRequest(f"a request with the id {request_id!r} is already running", param="request_id")

    def _open(
        self,
        request: Request,
        seed: int,
        compiled: CompiledOutput | None,
        on_finish: Callable[[SequenceState], None] | None,
    ) -> SequenceState:
        params, longest = request.params, self.limits.max_model_len
        total = longest if params.max_tokens is None else min(longest, len(request.tokens) + params.max_tokens)
        table = self.cache.open(request.tokens, salt=request.salt)
        sequence = SequenceState(request, table, seed, total, arrived=time.monotonic())
        if request.retain or request.named or self.leases.book.count:
            sequence.leases = self.leases.open(request)
        sequence.bad_words = self._tokenizer.bad_words(params.bad_words) if params.bad_words else ()
        sequence.constraint = None if compiled is None else compiled.open()
        self._texts[sequence] = _TextState(OutputText(self._tokenizer, request), on_finish)
        self._by_id.setdefault(request.id, []).append(sequence)
        return sequence

    def abort(self, request_id: str) -> list[Delta]:
        """End a request in any state; its blocks go back. Unknown ids are ignored: the request may just have ended."""
        return [self._end(sequence, "abort") for sequence in list(self._by_id.get(request_id, ()))]

    def discard(self, sequence: SequenceState) -> None:
        """Forget a sequence that never ran here; its blocks go back."""
        self._texts.pop(sequence, None)
        self._by_id.pop(sequence.request.id, None)
        self.scheduler.finish(sequence)

    def forget(self, salt: Salt) -> int:
        """Drop what a tenant, or requests with a client's salt, have cached on the device, and their recent prompts; returns
        how many blocks. What its requests have, and compute until they end, is not found, saved or remembered."""
        sequences = [*itertools.chain.from_iterable(self._by_id.values())]
        for table in [*(one.table for one in sequences), *self.scheduler.prefetches.tables()]:
            if table.chain.root.startswith(salt.prefix):
                self.cache.hide(table)
        for sequence in sequences:
            if sequence.table.hidden:
                sequence.unsaved.clear()
        self._history.forget(salt)
        return self.cache.clear(salt)

    def constraint_after(self, request: Request, compiled: CompiledOutput) -> Constraint:
        """The state of a grammar after the output that the request comes with. Takes about 80 us per token; from any thread.
        Raises BadRequest if nothing can follow it."""
        constraint, tokens = compiled.open(), request.params.max_tokens
        left = self.limits.max_model_len - len(request.tokens) if tokens is None else tokens
        if not constraint.replay(request.output, left):
            raise _complete()
        return constraint

    def _continue(self, sequence: SequenceState, constraint: Constraint | None) -> None:
        """Begin after the output that the request came with. Raises BadRequest if nothing can follow it."""
        sequence.table.chain.tokens.extend(sequence.request.output)
        if constraint is not None:
            sequence.constraint = None
        continues = self.replay_output(sequence)
        sequence.constraint = constraint or sequence.constraint
        if not continues:
            self._end(sequence, "abort")
            raise _complete()

    def replay_output(self, sequence: SequenceState) -> bool:
        """Pass over the text that another instance has sent. False if nothing can follow it: it is complete, or the grammar
        does not allow it."""
        constraint, left = sequence.constraint, sequence.left + sequence.num_output
        if constraint is not None and not constraint.replay(sequence.output, left):
            return False
        text = self._texts[sequence].output
        return all(text.push(token)[1] is None for token in sequence.output)

    def sequence_of(self, request_id: str) -> SequenceState | None:
        """The only sequence of a request; None if there is no such request, or it has several."""
        group = self._by_id.get(request_id, [])
        return group[0] if len(group) == 1 else None

    def end_migrated(self, sequence: SequenceState, to: MigratedTo) -> Delta:
        """End a sequence here that continues at another instance."""
        return replace(self._end(sequence, "moved"), moved=to)

    def end_failed(self, sequence: SequenceState, error: str) -> Delta:
        return self._end(sequence, "error", error=error)

    def recent_texts(self, salt: Salt, count: int) -> list[array[int]]:
        """Copies of a salt's newest remembered prompts, each with its output."""
        return self._history.recent(salt, count)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def step(self) -> list[Delta]:
        """A step. A failure of the device ends the requests of the step, withdraws their blocks, and is not raised."""
        while self._posted:
            self._posted.popleft()()
        for hook in self.hooks.before_step:
            hook()
        arrived = self._collect_kv()
        started = time.monotonic()
        seen = self.offload.changes if self.offload is not None else 0
        step = self.scheduler.schedule()
        self._note_admissions(step)
        if self.transfers is not None:
            self.transfers.before_step(step)
        return arrived + (self._compute(step, started) if step.chunks else self._idle(step, seen))

    def _idle(self, step: Step, seen: int) -> list[Delta]:
        """There is nothing to compute: wait for a store or another instance, or end what can never run."""
        if self.offload is not None and self.scheduler.expects_store():
            self.offload.wait(seen, _STORE_WAIT)
            return []
        held = self.scheduler.num_admitted or self.scheduler.settles
        if self.transfers is not None and (self.transfers.holds_blocks or held):
            self.transfers.wait(_PEER_WAIT)
            return []
        return self._end_stuck(step)

    def _compute(self, step: Step, started: float) -> list[Delta]:
        drawing = [c.sequence for c in step.chunks if c.samples and len(c.sequence.table) < c.sequence.max_total]
        try:
            sampled = self._runner.run(step, {s: draw_of(s, self._end_tokens(s.request.params)) for s in drawing})
        except Exception as error:  # noqa: BLE001 - around the requests of one step, which end with it
            return self._fail(step, error)
        self.scheduler.settle(step)
        now = time.monotonic()
        for hook in self.hooks.stepped:
            hook(step, now - started)
        deltas: list[Delta] = []
        for chunk in step.chunks:
            deltas += self._alone(chunk.sequence, self._settle, step, chunk, sampled, now)
        self.steps += 1
        self._note_step(step, now - started)
        return deltas

    def _keep(self, sequence: SequenceState) -> None:
        assert sequence.leases is not None
        self.leases.computed(sequence.leases, sequence.table, sequence.computed)

    def idle_pause(self) -> float | None:
        """Seconds until there may be work for an idle engine; None if there is none."""
        return min((left for one in self.hooks.idle if (left := one.pause()) is not None), default=None)

    def idle_work(self) -> bool:
        """Do a part of the work for an idle engine. False if there is nothing to do now."""
        return any(one.work() for one in self.hooks.idle)

    def prefetch(self, tokens: Sequence[int], salt: Salt, on_end: Callable[[BlockTable, str], None]) -> None:
        """Load what the stores have of a coming prompt. Raises BadRequest, PromptTooLong, or QueueFull if too many do that."""
        self.validate(Request("prefetch", tuple(tokens), SamplingParams(max_tokens=0)))
        if len(self.scheduler.prefetches) >= MAX_PREFETCHES:
            raise QueueFull(f"{MAX_PREFETCHES} prefetches are waiting already; retry later")
        full = len(tokens) // self.cache.block_size * self.cache.block_size
        self.scheduler.prefetches.add(self.cache.open(tokens[:full], salt=salt), on_end)

    def _collect_kv(self) -> list[Delta]:
        """Sequences that waited for KV run now. A prompt that another instance computed comes with its first token."""
        deltas: list[Delta] = []
        for sequence in self.scheduler.collect():
            deltas += self._alone(sequence, self._arrived, sequence)
        return deltas

    def _arrived(self, sequence: SequenceState) -> list[Delta]:
        arrival = sequence.transferred
        if arrival is not None and self.transfers is not None:
            self.transfers.remote_prefill_ended(sequence)
        self._note_admitted(sequence)
        for hook in self.hooks.arrived:
            hook(sequence, None if arrival is None else arrival.start)
        if arrival is None or arrival.token is None:
            return []
        return [self._extend(sequence, arrival.token, arrival.logprob, time.monotonic())]

    def _alone(
        self, sequence: SequenceState, work: Callable[..., Sequence[Delta]], *arguments: object
    ) -> Sequence[Delta]:
        """Do what concerns one sequence: what raises there ends its request with an error, and no other. Everything behind the
        sampler runs through here."""
        try:
            return work(*arguments)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            logger.exception("request %s: ended by an error of the engine: %s", sequence.request.id, message)
            with contextlib.suppress(Exception):  # an observer may be what raised
                self.notify(RequestBroken(sequence.request.id, type(error).__name__))
            if sequence in self._texts:
                return [replace(self._end(sequence, "error", error=message), isolated=True)]
            self.scheduler.finish(sequence)  # it has raised while it ended; this does what is left
            return [replace(self._last_delta(sequence, "error", error=message), isolated=True)]

    def fail_all(self, message: str) -> list[Delta]:
        """End everything with an error: the engine's thread has failed or is closing."""
        self.scheduler.prefetches.cancel_all(message)
        return [self._end(sequence, "error", error=message) for sequence in list(self._texts)]

    def _fail(self, step: Step, error: BaseException) -> list[Delta]:
        self.scheduler.withdraw(step)
        message = f"the step failed: {type(error).__name__}: {error}"
        return [self._end(chunk.sequence, "error", error=message) for chunk in step.chunks]

    def _end_stuck(self, step: Step) -> list[Delta]:
        """Nothing runs, and pinned blocks leave no room for a sequence in the queue, so waiting would not help. A sequence with
        output ends here; a prompt that cannot be computed is an error. A sequence whose search has just ended is not stuck."""
        scheduler, pool = self.scheduler, self.cache.pool
        sequence = scheduler.short_of_memory
        if scheduler.running or step.preempted or sequence is None:
            return []
        if sequence.num_output:
            text, stop = self._texts[sequence].output.close()
            return [self._end(sequence, "length" if stop is None else "stop", (), text, stop_match=stop)]
        message = (
            f"no room for a text of {len(sequence.table)} tokens: {pool.num_blocks - pool.num_free} of {pool.num_blocks} "
            f"blocks of {self.cache.block_size} tokens are pinned by named prefixes"
        )
        return [self._end(sequence, "error", error=message)]

    def _settle(self, step: Step, chunk: Chunk, sampled: dict[SequenceState, Sampled], now: float) -> list[Delta]:
        sequence = chunk.sequence
        if sequence.broken is not None:
            raise sequence.broken
        for hook in self.hooks.computed:
            hook(step, chunk)
        if sequence.leases is not None:
            self._keep(sequence)
        if not chunk.samples:
            return []
        result = sampled.get(sequence)
        if result is None:  # `max_tokens` is 0
            return [self._end(sequence, "length")]
        if result.error is not None:
            return [self._end_unfollowed(sequence, result.error)]
        if self.transfers is not None and self.transfers.prompt_computed(sequence, result.token, result.logprob):
            return [self._end(sequence, "length")]
        return [self._extend(sequence, result.token, result.logprob, now)]

    def _extend(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None, now: float) -> Delta:
        self._note_token(sequence, now)
        sequence.table.append(token)
        constraint = sequence.constraint
        if constraint is not None and not constraint.accept(token, sequence.left):
            return self._end_unfollowed(sequence, constraint.error() or f"it does not allow token {token}")
        return self._delta(sequence, token, () if logprob is None else (logprob,))

    def _end_unfollowed(self, sequence: SequenceState, reason: str) -> Delta:
        message = f"the grammar cannot be followed further: {reason}"
        return replace(self._end(sequence, "error", error=message), client_fault=True)

    def _delta(self, sequence: SequenceState, token: int, logprobs: tuple[TokenLogprob, ...]) -> Delta:
        """The delta of one new token, which may be the sequence's last."""
        output, params = self._texts[sequence].output, sequence.request.params
        structured = sequence.constraint is not None
        if self._ends(token, params, structured) and (structured or sequence.num_output >= params.min_tokens):
            match = token if token in params.stop_token_ids else None
            text, _ = output.close()
            return self._end(sequence, "stop", (token,), text, logprobs, stop_match=match)
        text, stop = output.push(token)
        if stop is not None:
            return self._end(sequence, "stop", (token,), text, logprobs, stop_match=stop)
        if sequence.constraint is not None and sequence.constraint.ended:
            rest, stop = output.close()
            return self._end(sequence, "stop", (token,), text + rest, logprobs, stop_match=stop)
        if len(sequence.table) >= sequence.max_total:
            rest, stop = output.close()
            reason: FinishReason = "length" if stop is None else "stop"
            return self._end(sequence, reason, (token,), text + rest, logprobs, stop_match=stop)
        return self._make_delta(sequence, (token,), text, logprobs)

    def _end_tokens(self, params: SamplingParams) -> tuple[int, ...]:
        return (*(() if params.ignore_eos else self.limits.end_tokens), *params.stop_token_ids)

    def _ends(self, token: int, params: SamplingParams, structured: bool) -> bool:
        """A grammar allows an end token only where the text is complete, so that it ends the text in any case."""
        model_ends = structured or not params.ignore_eos
        return token in params.stop_token_ids or (model_ends and token in self.limits.end_tokens)

    def _make_delta(
        self,
        sequence: SequenceState,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Delta:
        prompt = sequence.prompt_logprobs
        if prompt is not None and prompt.complete:
            sequence.prompt_logprobs = None
        return Delta(
            request_id=sequence.request.id,
            index=sequence.request.index,
            tokens=tokens,
            text=text,
            logprobs=logprobs,
            prompt_tokens=sequence.num_prompt,
            cached_tokens=max(sequence.cached_tokens, 0),
            prompt_logprobs=tuple(prompt.entries) if prompt is not None and prompt.complete else None,
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
        """Take a sequence out and make its last delta, an error if something raises on the way."""

        def end() -> list[Delta]:
            retained = self._take_out(sequence, reason, error)
            return [self._last_delta(sequence, reason, tokens, text, logprobs, retained, stop_match, error)]

        [delta] = self._alone(sequence, end)
        return delta

    def _take_out(
        self, sequence: SequenceState, reason: FinishReason, error: str | None
    ) -> tuple[RetentionAnswer, ...]:
        """End what a sequence has here. Returns the answers to its retentions."""
        on_finish = self._texts.pop(sequence).on_finish
        group = self._by_id[sequence.request.id]
        group.remove(sequence)
        if not group:
            del self._by_id[sequence.request.id]
        complete = reason in ("stop", "length")
        retired: Sequence[Alone] = ()
        with contextlib.ExitStack() as ends:  # whatever raises, all of these are done, the last one first
            ends.callback(self.scheduler.finish, sequence)
            if self.transfers is not None:
                ends.callback(self.transfers.sequence_ended, sequence, error)
            for hook in self.hooks.ended:
                ends.callback(hook, sequence, complete)
            if complete and sequence.leases is not None:
                self._keep(sequence)
            retained = self.leases.ended(sequence.leases) if sequence.leases is not None else ()
            if complete:
                if on_finish is not None:
                    on_finish(sequence)
                retired = self._note_session(sequence)
        for alone in retired:
            keys = self.cache.unused(alone.keys) if alone.drop else alone.keys
            self.cache.retire(keys, drop=alone.drop)
            self.on_superseded(sequence.request.salt.tenant, replace(alone, keys=keys))
        self._note_end(sequence, reason)
        return retained

    def _last_delta(
        self,
        sequence: SequenceState,
        reason: FinishReason,
        tokens: tuple[int, ...] = (),
        text: str = "",
        logprobs: tuple[TokenLogprob, ...] = (),
        retained: tuple[RetentionAnswer, ...] = (),
        stop_match: str | int | None = None,
        error: str | None = None,
    ) -> Delta:
        delta = self._make_delta(sequence, tokens, text, logprobs)
        report = replace(sequence.report, retained=retained) if sequence.report is not None else None
        return replace(
            delta, finish_reason=reason, stop_match=stop_match, error=error, cache_report=report, retained=retained
        )

    def _note_session(self, sequence: SequenceState) -> Sequence[Alone]:
        request, table = sequence.request, sequence.table
        if request.index or not table.published:
            return ()
        chain, full = table.chain, table.published
        return self.sessions.note(
            request.salt.tenant,
            request.id,
            chain.root,
            chain.keys_to(full)[:full],
            max(sequence.cached_tokens // self.cache.block_size, chain.public),
            session=request.session,
            supersedes=request.supersedes,
            started=time.time() - (time.monotonic() - sequence.arrived),
        )

    def notify(self, event: Event) -> None:
        for observer in self._observers:
            observer.notify(event)

    def _note_admissions(self, step: Step) -> None:
        for sequence in step.admitted:
            try:
                self._note_admitted(sequence)
            except Exception as error:  # noqa: BLE001 - around one request
                sequence.broken = error  # the step writes into its blocks: it ends behind the step
        for sequence in step.preempted:
            self.notify(RequestPreempted(sequence.request.id))

    def _note_admitted(self, sequence: SequenceState) -> None:
        sequence.admitted_at = time.monotonic()
        if sequence.leases is not None:
            self.leases.admitted(sequence.leases, sequence.table, sequence.num_prompt)
        if sequence.request.want_cache_report:
            sequence.report = self._reports.report(sequence)
        for hook in self.hooks.admitted:
            hook(sequence)
        loaded: tuple[tuple[str, int], ...] = ()
        if sequence.loaded is not None or sequence.transferred is not None:
            loaded = tuple(self._reports.loaded_tokens(sequence).items())
        seconds = sequence.loaded.seconds if sequence.loaded is not None else 0.0
        self.notify(PrefixLookup(sequence.request.id, sequence.num_prompt, sequence.cached_tokens, loaded, seconds))

    def _remember(self, sequence: SequenceState) -> None:
        if not sequence.table.hidden:
            self._history.add(sequence.request.salt, sequence.table.chain.tokens)

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
                time.monotonic() - sequence.arrived,
                sequence.table.chain.keys_to(full)[:full],
            )
        )

    def _note_step(self, step: Step, seconds: float) -> None:
        if not self._observers:
            return
        decode, context, pairs = 0, 0, 0
        for chunk in step.chunks:
            if chunk.start >= chunk.sequence.num_prompt:
                decode, context = decode + 1, context + chunk.start
            else:
                pairs += chunk.count * (2 * chunk.start + chunk.count) // 2
        pool = self.cache.pool
        self.notify(
            StepFinished(
                seconds,
                step.num_tokens - decode,
                pairs,
                decode,
                context,
                len(self.scheduler.running),
                len(self.scheduler.waiting),
                1.0 - pool.num_free / pool.num_blocks,
            )
        )


def _complete() -> BadRequest:
    return BadRequest("nothing can follow this output", param="continuation")


def _check_output(request: Request, longest: int) -> None:
    """Raises BadRequest."""
    params, count = request.params, len(request.output)
    if not count:
        return
    if params.n > 1 or params.prompt_logprobs is not None:
        raise BadRequest("only one sequence without prompt_logprobs can be continued", param="continuation")
    if count >= (longest if params.max_tokens is None else params.max_tokens) or len(request.tokens) + count >= longest:
        raise BadRequest(f"an output of {count} tokens has reached its limit", param="continuation")


def _check_retentions(request: Request) -> None:
    """Raises BadRequest."""
    if len(request.retain) > MAX_RETENTIONS:
        raise BadRequest(f"a request has at most {MAX_RETENTIONS} retentions", param="retain")
    for wish in request.retain:
        if not 0 < wish.end <= len(request.tokens):
            raise BadRequest(f"a retention ends within the prompt, not at token {wish.end}", param="retain")
        if wish.ttl is not None and not 0 < wish.ttl < math.inf:
            raise BadRequest(f"a ttl is more than 0 seconds, not {wish.ttl}", param="ttl")
        if not PREFETCH_PRIORITY <= wish.priority <= MAX_PRIORITY:
            raise BadRequest(f"a priority is between 0 and {MAX_PRIORITY}, not {wish.priority}", param="priority")
