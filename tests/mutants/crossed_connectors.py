"""Broken connectors whose defects need two things at once, and the claim of `foreword conform` that must catch each.

What needs one thing only is in `connectors.py`. Each is right while its two things do not meet.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from connectors import Mutant
from vllm.v1.request import RequestStatus

from foreword.integrations.vllm.request_identity import RequestIdentity
from foreword.integrations.vllm.step_messages import BlockLoad, BlockSave, ForewordConnectorMetadata


class Watching(Mutant):
    """A connector that knows what has happened so far.

    Attributes:
        asked: on the scheduler side, all requests by name; `opened`: those whose KV is being loaded.
        victim: the last request that was aborted while its KV was being loaded.
        preempted: names of the requests that were.
        open_loads: loads by the names of their requests, as a defect has noted them.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked: dict[str, Any] = {}
        self.opened: dict[str, Any] = {}
        self.victim: Any = None
        self.preempted: set[str] = set()
        self.open_loads: dict[str, BlockLoad] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self.asked[request.request_id] = request
        if request.num_preemptions:
            self.preempted.add(request.request_id)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.opened[request.request_id] = request

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        for name in connector_output.finished_recving or ():
            self.opened.pop(name, None)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.request_id in self.opened and request.status is RequestStatus.FINISHED_ABORTED:
            self.victim = request
        return super().request_finished_all_groups(request, block_ids)

    def without(self, request: Any) -> None:
        """A request is asked again as another one."""
        self._scheduler._requests.pop(request.request_id, None)


# Salts and adapters, preempted or aborted


class SaltLostAfterPreemption(Watching):
    """A request that is scheduled again after a preemption is looked up and saved without its salt."""

    claim = "crossed.salts-preempted"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.num_preemptions and request.cache_salt:
            request.cache_salt = None
            self.without(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class OfSaltedPreempted(Watching):
    """A mutant that changes what a request with a salt saves after a preemption."""

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        roots = {
            state.chain.root
            for name in self.preempted
            if (state := self._scheduler._requests.get(name)) is not None and self.asked[name].cache_salt
        }
        metadata.saves = [changed for one in metadata.saves for changed in self.saved(one, one.root in roots)]

    def saved(self, save: BlockSave, preempted: bool) -> list[BlockSave]:
        """Blocks to save in place of these."""
        return [save]


class StaleBlocksOfSaltedPreempted(OfSaltedPreempted):
    """After a preemption, a request with a salt saves from other blocks than its own."""

    claim = "crossed.salts-preempted"

    def saved(self, save: BlockSave, preempted: bool) -> list[BlockSave]:
        return [replace(save, blocks=tuple(max(one - 7, 1) for one in save.blocks))] if preempted else [save]


class NothingSavedAfterSaltedPreemption(OfSaltedPreempted):
    """After a preemption, a request with a salt saves nothing."""

    claim = "crossed.salts-preempted"

    def saved(self, save: BlockSave, preempted: bool) -> list[BlockSave]:
        return [] if preempted else [save]


class SaltLostAfterAbort(Watching):
    """Once a load was aborted, the same prompt is looked up and saved under the salt of the aborted request."""

    claim = "crossed.salts-aborted"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        old = self.victim
        if old is not None and list(old.prompt_token_ids) == list(request.prompt_token_ids):
            request.cache_salt = old.cache_salt
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SaltOfOpenLoad(Watching):
    """While KV is being loaded, what is asked is looked up under the salt of the request that loads."""

    claim = "crossed.salts-aborted"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        others = [one for name, one in self.opened.items() if name != request.request_id]
        if others and request.request_id not in self.asked:
            request.cache_salt = others[0].cache_salt
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class LoadOfAnotherSalt(Watching):
    """While a load under another salt is under way, a load of as many blocks reads that one's."""

    claim = "crossed.salts-aborted"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        for number, load in enumerate(metadata.loads):
            salt = self.asked[load.request_id].cache_salt
            others = [one for name, one in self.open_loads.items() if name in self.opened]
            self.open_loads[load.request_id] = load
            for other in others:
                same = [len(one.blocks) for one in other.parts] == [len(one.blocks) for one in load.parts]
                if same and self.asked[other.request_id].cache_salt != salt:
                    metadata.loads[number] = replace(_into(other, load), request_id=load.request_id)


class LoadShiftedByAbort(Watching):
    """Once a load was aborted, loads under another salt write each block into the place of the next, the last two into one.

    (A permutation alone would change nothing: attention with rotary positions is a sum over the keys.)
    """

    claim = "crossed.salts-aborted"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        for number, load in enumerate(metadata.loads):
            if self.victim is not None and self.asked[load.request_id].cache_salt != self.victim.cache_salt:
                parts = (replace(one, blocks=(*one.blocks[1:], one.blocks[-1])) for one in load.parts)
                metadata.loads[number] = replace(load, parts=tuple(parts))


def _into(load: BlockLoad, other: BlockLoad) -> BlockLoad:
    parts = zip(load.parts, other.parts, strict=True)
    return replace(load, parts=tuple(replace(one, blocks=two.blocks) for one, two in parts))


class AdapterLostAfterPreemption(Watching):
    """A request that is scheduled again after a preemption is looked up and saved as one without its adapter."""

    claim = "crossed.adapters-preempted"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if not request.num_preemptions or request.lora_request is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        adapter, request.lora_request = request.lora_request, None
        self.without(request)
        try:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        finally:
            request.lora_request = adapter
            state = self._scheduler._requests.get(request.request_id)
            if state is not None:
                RequestIdentity.describes = lambda self, request: True  # or it would be found anew in the next step


class SaltLostUnderAdapter(Watching):
    """A request with an adapter that was preempted has no salt."""

    claim = "crossed.adapters-preempted"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if request.num_preemptions and request.lora_request is not None and request.cache_salt:
            request.cache_salt = "bob"
            self.without(request)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


# Loads under way, and aborts or preemptions


class AbortFreesEarly(Watching):
    """The load of an aborted request is reported as ended while its threads still write."""

    claim = "crossed.loads-aborted"

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        early = {name for name in self.early(finished_req_ids) if self._under_way.pop(name, None) is not None}
        for name in early:
            self._worker_side._loading.pop(name, None)  # type: ignore[union-attr]
        results = super().get_transfer_results(finished_req_ids)
        return replace(results, finished_recving={*(results.finished_recving or ()), *early}) if early else results

    def early(self, aborted: Collection[str]) -> Collection[str]:
        """Requests whose loads are reported as ended."""
        return aborted


class WindowsFreeEarly(AbortFreesEarly):
    """A mutant that frees the blocks of aborted loads early, of models with windows only."""

    claim = "crossed.loads-aborted-windows"

    def early(self, aborted: Collection[str]) -> Collection[str]:
        return () if self._info.whole else aborted


class AbortDeletesStored(Watching):
    """An abort during a load deletes what was to be loaded."""

    claim = "crossed.loads-aborted"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        for name in [one for one in self.open_loads if one in self.cut]:
            load = self.open_loads.pop(name)
            for part in load.parts:
                metadata.deletes = [*metadata.deletes, *((part.group, load.root, key) for key in part.keys)]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        if request.request_id in self.opened and request.status is RequestStatus.FINISHED_ABORTED:
            self.cut = {*self.cut, request.request_id}
        return super().request_finished_all_groups(request, block_ids)

    cut: Collection[str] = ()

    def build_connector_meta(self, scheduler_output: Any) -> ForewordConnectorMetadata:
        self.open_loads.update(self._scheduler._loading)
        return super().build_connector_meta(scheduler_output)


class AbortedLoadSkipped(Watching):
    """After an abort, the load of the same prompt is taken as done."""

    claim = "crossed.shared-aborted"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        old = self.victim
        for number, load in enumerate(metadata.loads):
            asked = self.asked[load.request_id]
            if old is not None and list(old.prompt_token_ids) == list(asked.prompt_token_ids):
                part = load.parts[0]
                elsewhere = replace(part, blocks=(part.blocks[0],) * len(part.blocks))
                metadata.loads[number] = replace(load, parts=(elsewhere, *load.parts[1:]))


class AbortEndsSharedLoads(AbortFreesEarly):
    """The abort of one of several loads of the same prefix ends the others."""

    claim = "crossed.shared-aborted"

    def early(self, aborted: Collection[str]) -> Collection[str]:
        roots = {self._under_way[name].root for name in aborted if name in self._under_way}
        return [name for name, load in self._under_way.items() if load.root in roots and name not in aborted]


class LoadEndsAtPreemption(AbortFreesEarly):
    """A preemption ends the loads that are under way."""

    claim = "crossed.loads-pressed"
    met: Collection[str] = ()

    def build_connector_meta(self, scheduler_output: Any) -> ForewordConnectorMetadata:
        if scheduler_output.preempted_req_ids and self.opened:
            type(self).met = set(self.opened)
        return super().build_connector_meta(scheduler_output)

    def early(self, aborted: Collection[str]) -> Collection[str]:
        return type(self).met


class LoadShiftedByPreemption(LoadEndsAtPreemption):
    """The blocks of a load are shifted by one where a request was preempted while it was under way."""

    claim = "crossed.loads-pressed"

    def early(self, aborted: Collection[str]) -> Collection[str]:
        return ()

    def loaded(self, load: BlockLoad) -> None:
        if load.request_id in type(self).met:
            contents = self.contents(load)
            for (row, _), (_, copy) in zip(contents[1:], contents, strict=False):
                if row.shape == copy.shape:
                    row.copy_(copy)


# Updates of weights, and what is under way


class ResetForgetsRunning(Watching):
    """After a reset, requests that run save under the keys of the new weights what they compute from KV of the old ones."""

    claim = "crossed.updated-running"

    def reset_cache(self) -> Any:
        running = dict(self._scheduler._requests)
        done = super().reset_cache()
        self._scheduler._version.stale = False
        for name, state in running.items():
            state.saves = True
            state.chain = self._scheduler._chain(self.asked[name], state.identity, state.chain.tokens)
        return done


class ResetSkippedAfterPreemption(Watching):
    """A reset does nothing while preempted requests wait."""

    claim = "crossed.updated-preempted"

    def reset_cache(self) -> Any:
        if any(one.num_preemptions and name in self._scheduler._requests for name, one in self.asked.items()):
            return True
        return super().reset_cache()


class PreemptedUnderOldWeights(Watching):
    """Requests that a reset preempts are looked up under the names of the weights before it."""

    claim = "crossed.updated-preempted"

    def reset_cache(self) -> Any:
        before = {name: state.chain for name, state in self._scheduler._requests.items()}
        done = super().reset_cache()
        for name, chain in before.items():
            self._scheduler._requests[name].chain = chain
        return done


class ResetSkippedWhileLoading(Watching):
    """A reset does nothing while KV is being loaded."""

    claim = "crossed.updated-loading"

    def reset_cache(self) -> Any:
        return True if self.opened else super().reset_cache()


class ResetOnceAfterRefusal(Watching):
    """A reset behind loads that were under way in the one before does nothing."""

    claim = "crossed.updated-refused"

    def reset_cache(self) -> Any:
        loaded = any(name not in self._scheduler._requests for name in self.loaded_ever)
        return True if loaded else super().reset_cache()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            self.loaded_ever = {*self.loaded_ever, request.request_id}

    loaded_ever: Collection[str] = ()


class ResetSkipsWindows(Watching):
    """A reset of a model with windows changes no names."""

    claim = "crossed.updated.Gemma 3"

    def reset_cache(self) -> Any:
        windows = any(one.positional and not one.group.whole for one in self._info.groups)
        return True if windows else super().reset_cache()


class ResetSkipsStates(Watching):
    """A reset of a model with recurrent states changes no names."""

    claim = "crossed.updated.Granite 4"

    def reset_cache(self) -> Any:
        return True if not all(one.positional for one in self._info.groups) else super().reset_cache()
