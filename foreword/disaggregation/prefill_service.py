"""The source's side of prefill elsewhere: prompts of other instances are computed here, and their KV leaves layer by layer.

A wanted prompt is a sequence like any other (chunks, batches, prefix hits), with one token to generate. Before a step is
computed its part of the prompt is noted; the runner tells after each layer that the step's K and V are written; that layer
of the noted blocks is queued then, and travels while the next layers are computed. Blocks that were cached are sent with the
first step: they may be another sequence's of the very same step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foreword.disaggregation import messages as wire
from foreword.disaggregation.sender import Lanes, Outgoing, Port, Ready
from foreword.engine.request import Request, TokenLogprob
from foreword.engine.scheduler import Chunk, SequenceState, Step
from foreword.errors import ForewordError
from foreword.transfer.messages import Reason
from foreword.transfer.transfers import Source


class Export(Outgoing):
    """One wanted prompt. `next_block` is the first whose KV was not queued yet."""

    def __init__(
        self, source: Source, port: Port, sequence: SequenceState, release: Callable[[Outgoing], None]
    ) -> None:
        super().__init__(source, port, release)
        self.sequence = sequence
        self.next_block = source.have
        self.finished = False


@dataclass(slots=True)
class _Due:
    """What of a prompt is written once the step has passed a layer."""

    export: Export
    first: int
    blocks: list[int]
    tokens: int
    keys: list[bytes]
    last: bool


class Exports:
    """All prompts that are computed for others. Everything here runs on the engine's thread.

    Args:
        enter: gives the scheduler a sequence for `(request, seed)`.
        abort: ends a request by its id.
        released: told of each transfer that is over, with its blocks still held.
    """

    def __init__(
        self,
        port: Port,
        lanes: Lanes,
        enter: Callable[[Request, int], SequenceState],
        abort: Callable[[str], object],
        released: Callable[[Outgoing], None],
        hold: Callable[[Outgoing, Sequence[int]], None],
    ) -> None:
        self._port = port
        self._lanes = lanes
        self._enter = enter
        self._abort = abort
        self._released = released
        self._hold = hold
        self._by_sequence: dict[int, Export] = {}
        self._due: list[_Due] = []

    @property
    def count(self) -> int:
        """Prompts that wait or are being computed."""
        return len(self._by_sequence)

    def begin(self, source: Source, task: wire.Task) -> None:
        """Queue a wanted prompt. What is wrong with it ends the transfer with a sentence."""
        params = replace(task.params, n=1, max_tokens=max(task.params.max_tokens or 1, 1))
        try:
            request = Request(f"prefill-{source.id.hex()}", wire.unpack(task.tokens), params, task.salt, task.index)
            sequence = self._enter(replace(request, params=replace(params, max_tokens=1)), task.seed)
        except ForewordError as error:
            source.cancel(Reason.REQUEST, error.message)
            return
        sequence.request = replace(sequence.request, params=params)
        export = Export(source, self._port, sequence, self._released)
        self._by_sequence[id(sequence)] = export
        source.context = export
        if source.outcome is not None:  # it ended before anybody could be told
            self.dropped(export)
            export.end()

    def dropped(self, export: Export) -> None:
        """The other side does not want it any more, or is gone."""
        if self._by_sequence.get(id(export.sequence)) is export:
            self._abort(export.sequence.request.id)

    def preempted(self, sequences: Sequence[SequenceState]) -> None:
        """A prompt that lost its blocks is given up: holding what was sent of it would take the memory that is short."""
        for sequence in sequences:
            export = self._by_sequence.get(id(sequence))
            if export is not None:
                export.source.cancel(Reason.FULL, "memory ran short where the prompt was computed")
                self._abort(sequence.request.id)

    def prepare(self, step: Step) -> None:
        """A step is about to be computed."""
        self._due = []
        if not self._by_sequence:
            return
        for chunk in step.chunks:
            export = self._by_sequence.get(id(chunk.sequence))
            if export is not None and not export.over:
                self._note(export, chunk)

    def _note(self, export: Export, chunk: Chunk) -> None:
        table, size = chunk.sequence.table, self._port.layout.block_size
        end = chunk.start + chunk.count
        last = chunk.samples
        first = export.next_block
        stop = -(-end // size) if last else end // size
        export.next_block = max(first, stop)
        blocks = table.blocks[first:stop]
        self._hold(export, blocks)
        tokens = max(min(end, stop * size) - first * size, 0)
        full = tokens // size
        keys = table.chain.keys_to(first + full)[first : first + full] if full else []
        self._due.append(_Due(export, first, blocks, tokens, keys, last))

    def written(self, layer: int) -> None:
        """The running step has written K and V of a layer."""
        if not self._due:
            return
        number, mark = self._port.position[layer], self._port.mark()
        for due in self._due:
            if due.blocks:
                ready = Ready(due.first, due.blocks, due.tokens, due.keys, number, number + 1, mark)
                self._lanes.put(due.export, ready)
            if due.last and number == self._port.last_layer:
                due.export.computed_at = time.monotonic()

    def working(self) -> None:
        """Give a sign of life for prompts that wait or are being computed."""
        for export in self._by_sequence.values():
            export.source.working()

    def is_export(self, sequence: SequenceState) -> bool:
        return id(sequence) in self._by_sequence

    def finish(self, sequence: SequenceState, token: int, logprob: TokenLogprob | None) -> None:
        """The prompt is computed: the token after it travels behind its KV."""
        export = self._by_sequence[id(sequence)]
        export.finished = True
        result = wire.encode(wire.Computed(token, logprob, max(sequence.cached_tokens, 0)))
        tokens = sequence.num_prompt
        self._lanes.put(export, lambda: export.source.finish(result, tokens))

    def ended(self, sequence: SequenceState, error: str | None) -> None:
        """The sequence has left the engine."""
        export = self._by_sequence.pop(id(sequence), None)
        if export is not None and not export.finished:
            export.source.cancel(Reason.FAILED, error or "the prompt was ended where it was computed")
