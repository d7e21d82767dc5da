"""The state of a request on the connector's scheduler side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.blocks.checkpoints import CheckpointPlan
from foreword.blocks.keys import TokenChain
from foreword.blocks.runs import consecutive_runs
from foreword.integrations.vllm.connector_config import NULL_BLOCK, KVCacheInfo
from foreword.integrations.vllm.request_identity import RequestIdentity
from foreword.integrations.vllm.step_messages import BlockSave
from foreword.offload.load import LoadPlan
from foreword.offload.lookups import StoreSearch
from foreword.offload.search import Found

BlockIds = Sequence[Sequence[int]]


@dataclass(slots=True)
class RequestState:
    """A request.

    Attributes:
        identity: what besides tokens its KV depends on.
        held: tokens that vLLM had itself when it last asked.
        cached: tokens that were cached, in vLLM or in the stores, before the request first ran.
        search: a search in the stores for what follows the first `searched_from` tokens; `found` is its result, and `load` what
            is loaded of that.
        saved: by group, how many leading blocks have been saved or need not be saved.
        saves: False if nothing more of this request may be saved.
        offered: the blocks that it found were offered to tiers that have refused them before.
        plan: which blocks of windows and recurrent states are saved; None before the request computes.
        ends: position and key of the recurrent states that were saved at the ends of the prompt and of the turn.
        no_more_loads: a load of this request has failed, and another would fail again.
        tiers: tokens loaded when it was last scheduled anew, by the label of the tier; until a load ends, those that it is to
            load.
        awaited: tokens that the last lookup has found and that are neither loaded nor counted as not loaded.
        actions: the request's cache control, as the extra reads it; `retained` are the positions that it keeps.
    """

    request: Any
    chain: TokenChain
    identity: RequestIdentity
    search: StoreSearch | None = None
    searched_from: int = 0
    found: Found | None = None
    load: LoadPlan | None = None
    held: int = 0
    cached: int = 0
    reach: int = 0
    saved: list[int] = field(default_factory=list)
    saves: bool = True
    offered: bool = False
    plan: CheckpointPlan | None = None
    ends: dict[int, bytes] = field(default_factory=dict)
    no_more_loads: bool = False
    tiers: dict[str, int] = field(default_factory=dict)
    awaited: int = 0
    actions: Sequence[Any] = ()
    retained: Sequence[int] = ()

    def start_over(self, info: KVCacheInfo, held: int) -> None:
        """vLLM is about to schedule the request with the first `held` tokens from its own cache."""
        self.held = self.reach = held
        self.note_cached(held)
        self.plan, self.saves, self.ends, self.tiers = None, True, {}, {}
        self.skip_to(info, held)

    def note_cached(self, tokens: int) -> None:
        """The number of tokens that were cached. A request that was preempted finds its own."""
        if not self.request.num_preemptions:
            self.cached = tokens

    def skip_to(self, info: KVCacheInfo, tokens: int) -> None:
        """The blocks of the first `tokens` tokens need not be saved."""
        self.saved = [tokens // one.block_size for one in info.groups]

    def cut_to(self, info: KVCacheInfo, tokens: int) -> None:
        """The blocks behind the first `tokens` tokens will have other contents."""
        self.saved = [min(done, tokens // one.block_size) for done, one in zip(self.saved, info.groups, strict=True)]

    def next_full(self, info: KVCacheInfo) -> int:
        """Tokens at which the next block is full."""
        return min((done + 1) * one.block_size for done, one in zip(self.saved, info.groups, strict=True))

    def planned(self, info: KVCacheInfo) -> CheckpointPlan:
        """The plan, made when the request first computes."""
        if self.plan is None:
            request = self.request
            resumed = min(request.num_computed_tokens, len(self.chain))
            self.plan = CheckpointPlan(
                [one.group for one in info.groups],
                [one.block_bytes for one in info.groups],
                request.num_tokens,
                resumed=resumed,
                cached=max(self.reach, getattr(request, "shared_prefix_boundary", 0) or 0),
            )
            for position in self.retained:
                self.plan.add(position)
        return self.plan

    def filled(self, info: KVCacheInfo, known: int, ids: BlockIds) -> Iterator[BlockSave]:
        """Blocks to save that are full when the request has `known` tokens."""
        plan = None if info.whole else self.planned(info)
        if plan is None and info.selective and not self.offered:
            self.offered = True
            for number, one in enumerate(info.groups):
                for found in self.runs(info, number, range(self.saved[number]), ids[one.index]):
                    yield replace(found, again=True)
        for number, one in enumerate(info.groups):
            first, full = self.saved[number], known // one.block_size
            self.saved[number] = max(first, full)
            if not one.positional:
                continue
            numbers: Iterable[int] = range(first, full)
            if plan is not None and not one.group.whole:
                numbers = (block for block in numbers if plan.wanted(number, block))
            yield from self.runs(info, number, numbers, ids[one.index])

    def runs(self, info: KVCacheInfo, group: int, numbers: Iterable[int], ids: Sequence[int]) -> Iterator[BlockSave]:
        """Saves of those of a group's blocks that vLLM still has."""
        chosen = [block for block in numbers if block < len(ids) and ids[block] != NULL_BLOCK]
        for low, high in consecutive_runs(chosen):
            yield self.save(info, group, chosen[low:high], ids[chosen[low] : chosen[high - 1] + 1])

    def save(self, info: KVCacheInfo, group: int, numbers: Sequence[int], ids: Sequence[int]) -> BlockSave:
        """A save of consecutive blocks."""
        size = info.groups[group].block_size
        keys, depth = self.frame_keys(info, group, numbers), numbers[0] * info.keys_before(group)
        parent = self.key_at(info, numbers[0] * size)
        prompt = self.request.num_prompt_tokens
        # A window's blocks, and recurrent states, change while their request runs.
        owner = self.request.request_id if info.groups[group].group.whole else ""
        adapter = self.identity.adapter
        return BlockSave(group, self.chain.root, keys, parent, depth, tuple(ids), adapter, prompt, request_id=owner)

    def frame_keys(self, info: KVCacheInfo, group: int, numbers: Iterable[int]) -> tuple[bytes, ...]:
        """Keys of the frames of a group's blocks."""
        size, count = info.groups[group].block_size, info.keys_before(group)
        ends = ((block + 1) * size for block in numbers)
        return tuple(self.key_at(info, end - back * info.key_size) for end in ends for back in range(count - 1, -1, -1))

    def key_at(self, info: KVCacheInfo, tokens: int) -> bytes:
        """The key of the block that ends after `tokens` tokens; the root at 0."""
        return self.chain.key_before(tokens // info.key_size)
