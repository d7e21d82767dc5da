"""Broken connectors: each breaks Foreword's in one way, and the claim of `foreword conform` that it names must fail.

They run inside vLLM (`kv_connector_module_path`: connectors). Where it can be, a defect is planted at vLLM's interface or in
the messages from the scheduler side to the worker side, so that it outlives changes of what lies below.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

from vllm.v1.request import RequestStatus

from foreword.blocks import keys as block_keys
from foreword.blocks.layout import Layout
from foreword.blocks.resume import GroupKind
from foreword.integrations.model_identity import weights_digest
from foreword.integrations.vllm import connector_config, scheduler_side
from foreword.integrations.vllm.connector import ForewordConnector
from foreword.integrations.vllm.kv_views import block_views
from foreword.integrations.vllm.request_identity import RequestIdentity
from foreword.integrations.vllm.step_messages import BlockLoad, BlockSave, ForewordConnectorMetadata
from foreword.integrations.vllm_extras import media
from foreword.integrations.vllm_extras.adapters import AdapterFiles, AdaptersInMemory
from foreword.integrations.vllm_extras.media import MediaDigests
from foreword.offload.load import GroupBlocks
from foreword.store import tier
from foreword.store.base import Store


class Mutant(ForewordConnector):
    """A connector with a defect.

    Attributes:
        claim: the claim that must fail.
        rows: on the worker side, the KV cache: by group, tensors whose rows are blocks.
    """

    claim: ClassVar[str]
    _planted: ClassVar[set[type]] = set()

    def __init__(self, *args: Any, **more: Any) -> None:
        if type(self) not in self._planted:
            self._planted.add(type(self))
            self.plant()
        super().__init__(*args, **more)
        self._under_way: dict[str, BlockLoad] = {}

    @classmethod
    def plant(cls) -> None:
        """Change what both sides use."""

    def loading(self, load: BlockLoad) -> None:
        """A load starts."""

    def loaded(self, load: BlockLoad) -> None:
        """A load has ended. vLLM computes with its blocks from the next step on."""

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        """Change the messages of a step."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        info = self._info
        self.rows = [block_views(kv_caches, one.layer_names, info.num_blocks) for one in info.groups]

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        for load in self._metadata().loads:
            self._under_way[load.request_id] = load
            self.loading(load)
        super().start_load_kv(forward_context, **more)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in sorted(results.finished_recving or ()):
            load = self._under_way.pop(request_id, None)
            if load is not None:
                self.loaded(load)
        return results

    def build_connector_meta(self, scheduler_output: Any) -> ForewordConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        self.edit(metadata)
        return metadata

    def blocks(self, load: BlockLoad) -> Iterator[tuple[int, int, int]]:
        """Yields the blocks that were loaded: group, index in the chain, vLLM's id."""
        for part in load.parts:
            yield from ((part.group, number, block) for number, block in zip(part.numbers, part.blocks, strict=True))

    def contents(self, load: BlockLoad) -> list[tuple[Any, Any]]:
        """The rows of a load's blocks, and copies of them."""
        rows = [row[block] for group, _, block in self.blocks(load) for row in self.rows[group]]
        return [(row, row.clone()) for row in rows]


def put_back(contents: list[tuple[Any, Any]]) -> None:
    """Write copies into the rows that they were made of."""
    for row, copy in contents:
        row.copy_(copy)


def each_block(save: BlockSave) -> list[BlockSave]:
    """Splits saves into saves of one block each."""
    parents = (save.parent, *save.keys[:-1])
    triples = enumerate(zip(save.keys, parents, save.blocks, strict=True))
    return [
        replace(save, keys=(key,), parent=parent, depth=save.depth + i, blocks=(block,))
        for i, (key, parent, block) in triples
    ]


# Loads


class SwappedLayers(Mutant):
    """The first two layers of a loaded block are exchanged."""

    claim = "reuse.reset"

    def loaded(self, load: BlockLoad) -> None:
        for group, _, block in self.blocks(load):
            rows = self.rows[group]
            if len(rows) > 1 and rows[0].shape == rows[1].shape:
                first = rows[0][block].clone()
                rows[0][block], rows[1][block] = rows[1][block], first


class SwappedHeads(Mutant):
    """The two KV heads of a loaded block are exchanged."""

    claim = "reuse.reset"

    def loaded(self, load: BlockLoad) -> None:
        for group, _, block in self.blocks(load):
            for row in self.rows[group]:
                halves = row[block].reshape(2, -1)
                halves.copy_(halves.flip(0))


class FifthIsFourth(Mutant):
    """The fifth block of a load holds the fourth."""

    claim = "reuse.reset"

    def loaded(self, load: BlockLoad) -> None:
        for part in load.parts:
            if len(part.blocks) > 4:
                for row in self.rows[part.group]:
                    row[part.blocks[4]] = row[part.blocks[3]]


class ZeroTail(Mutant):
    """The last quarter of a load's last block is not copied."""

    claim = "reuse.reset"

    def loaded(self, load: BlockLoad) -> None:
        part = load.parts[-1]
        for row in self.rows[part.group]:
            flat = row[part.blocks[-1]].reshape(-1)
            flat[-(len(flat) // 4) :] = 0


class DeepBlocks(Mutant):
    """A mutant that, in long prompts with one KV group, gives each block from number 40 on the content of the one before, as
    after a wrong batch offset."""

    claim = "reuse.long"

    def loaded(self, load: BlockLoad) -> None:
        if len(self.rows) == 1:
            before = 0
            for group, number, block in self.blocks(load):
                if number >= 40:
                    for row in self.rows[group]:
                        row[block] = row[before]
                before = block


class OneInFifty(Mutant):
    """A mutant whose every fiftieth load leaves its last block empty, as in a race."""

    claim = "schedule.many"
    _draw: ClassVar[random.Random] = random.Random(4)

    def loaded(self, load: BlockLoad) -> None:
        if self._draw.random() < 0.02:
            part = load.parts[-1]
            for row in self.rows[part.group]:
                row[part.blocks[-1]] = 0


class StaleLoads(Mutant):
    """Every third load ends as if it had succeeded, and its blocks hold what they held."""

    claim = "reuse.long"
    _count = 0

    def loading(self, load: BlockLoad) -> None:
        self._count += 1
        self._before = {} if self._count == 1 else self._before
        if self._count % 3 == 0:
            self._before[load.request_id] = self.contents(load)

    def loaded(self, load: BlockLoad) -> None:
        put_back(self._before.pop(load.request_id, []))


class EarlyReady(Mutant):
    """A load is reported before its bytes are there; they come two steps later."""

    claim = "reuse.restart"
    _step = 0

    def loading(self, load: BlockLoad) -> None:
        self._before = {**getattr(self, "_before", {}), load.request_id: self.contents(load)}

    def loaded(self, load: BlockLoad) -> None:
        right = self.contents(load)
        put_back(self._before.pop(load.request_id))
        self._late = [*getattr(self, "_late", []), (self._step + 2, right)]

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        self._step += 1
        due = [right for step, right in getattr(self, "_late", []) if step <= self._step]
        self._late = [one for one in getattr(self, "_late", []) if one[0] > self._step]
        for right in due:
            put_back(right)
        super().start_load_kv(forward_context, **more)


class WrongGroup(Mutant):
    """Blocks of the second KV group hold the first group's bytes."""

    claim = "model.gpt-oss"

    def loaded(self, load: BlockLoad) -> None:
        parts = {part.group: part for part in load.parts}
        if 0 in parts and 1 in parts:
            for mine, theirs in zip(self.rows[1], self.rows[0], strict=False):
                for block in parts[1].blocks:
                    if mine[block].shape == theirs[block].shape:
                        mine[block] = theirs[parts[0].blocks[-1]]


class ShortWindow(Mutant):
    """The first block of a window is not loaded."""

    claim = "model.Gemma 3"

    def loaded(self, load: BlockLoad) -> None:
        for part in load.parts:
            if self._info.groups[part.group].group.kind is GroupKind.WINDOW and len(part.blocks) > 1:
                for row in self.rows[part.group]:
                    row[part.blocks[0]] = 0


class OtherState(Mutant):
    """A recurrent state is that of the request before."""

    claim = "model.Granite 4"

    def loaded(self, load: BlockLoad) -> None:
        before = getattr(self, "_before", {})
        for group, _, block in self.blocks(load):
            if self._info.groups[group].group.kind is GroupKind.STATE:
                mine = [row[block].clone() for row in self.rows[group]]
                for row, old in zip(self.rows[group], before.get(group, mine), strict=True):
                    row[block] = old
                before[group] = mine
        self._before = before


class ReversedLoads(Mutant):
    """The blocks of a load are in the wrong order. Of a whole prompt they give the same attention; of a part they do not."""

    claim = "reuse.boundaries"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        metadata.loads = [
            replace(load, parts=tuple(replace(part, blocks=part.blocks[::-1]) for part in load.parts))
            for load in metadata.loads
        ]


class CrossedLoads(Mutant):
    """Two loads that start in one step get each other's blocks."""

    claim = "schedule.many"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        loads = metadata.loads
        for at in range(0, len(loads) - 1, 2):
            one, other = loads[at].parts[0], loads[at + 1].parts[0]
            count = min(len(one.blocks), len(other.blocks))
            loads[at] = _first_part(loads[at], other.blocks[:count] + one.blocks[count:])
            loads[at + 1] = _first_part(loads[at + 1], one.blocks[:count] + other.blocks[count:])


def _first_part(load: BlockLoad, blocks: tuple[int, ...]) -> BlockLoad:
    first: GroupBlocks = replace(load.parts[0], blocks=blocks)
    return replace(load, parts=(first, *load.parts[1:]))


class ErrorsUnreported(Mutant):
    """Blocks that could not be loaded are not reported to vLLM."""

    claim = "fault.flipped"

    def get_block_ids_with_load_errors(self) -> set[int]:
        super().get_block_ids_with_load_errors()
        return set()


# Saves


class LateSaves(Mutant):
    """Blocks are copied two saves later, when vLLM may have given them to another request."""

    claim = "reuse.long"

    def wait_for_save(self) -> None:
        metadata = self._metadata()
        held = self._delayed = getattr(self, "_delayed", [])
        if metadata.saves:
            held.append(metadata.saves)
            metadata.saves = held.pop(0) if len(held) > 2 else []
        super().wait_for_save()


class EarlySaves(Mutant):
    """Blocks are saved before the step that computes them."""

    claim = "reuse.reset"

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker_side is not None:
            super().wait_for_save()

    def wait_for_save(self) -> None:
        """Returns at once: the save is done already."""


class ShiftedSaves(Mutant):
    """Saved blocks are off by one."""

    claim = "reuse.boundaries"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        metadata.saves = [replace(one, blocks=(*one.blocks[1:], one.blocks[0])) for one in metadata.saves]


class ThirdBlockLost(Mutant):
    """Every third block is not saved, so that few tokens are found."""

    claim = "reuse.reset"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        metadata.saves = [one for save in metadata.saves for one in each_block(save) if one.depth % 3 < 2]


class FirstSixteen(Mutant):
    """Only the first 16 blocks of a prompt are saved."""

    claim = "reuse.long"

    def edit(self, metadata: ForewordConnectorMetadata) -> None:
        metadata.saves = [one for save in metadata.saves for one in each_block(save) if one.depth < 16]


class AnswersUnfinished(Mutant):
    """A block that an answer fills is saved without its last tokens."""

    claim = "reuse.turns"

    def wait_for_save(self) -> None:
        kept = []
        for save in self._metadata().saves:
            size = self._info.groups[save.group].block_size
            if save.prompt is not None and (save.depth + len(save.blocks)) * size > save.prompt and self.wanted():
                for row in self.rows[save.group]:
                    flat = row[save.blocks[-1]].reshape(-1)
                    kept.append((flat, flat.clone()))
                    flat[-(len(flat) // 4) :] = 0
        super().wait_for_save()
        put_back(kept)

    def wanted(self) -> bool:
        return True


class DraftsSaved(AnswersUnfinished):
    """A mutant that saves drafted tokens before vLLM accepts them, with speculative decoding only."""

    claim = "schedule.drafted"

    def wanted(self) -> bool:
        return self._info.speculative


class AbortedSaved(Mutant):
    """When a request is aborted, all its blocks are saved as if they were computed."""

    claim = "schedule.aborted"

    def request_finished_all_groups(self, request: Any, block_ids: Sequence[list[int]]) -> Any:
        self._save_all(request, block_ids)
        return super().request_finished_all_groups(request, block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> Any:
        self._save_all(request, (block_ids,))
        return super().request_finished(request, block_ids)

    def _save_all(self, request: Any, block_ids: Sequence[list[int]]) -> None:
        side = self._scheduler
        state = side._requests.get(request.request_id)
        if state is not None and request.status == RequestStatus.FINISHED_ABORTED:
            side._last_saves += state.filled(self._info, request.num_prompt_tokens, block_ids)


class PreemptedSaved(Mutant):
    """A mutant whose saves wait until some steps after a preemption: by then blocks of the preempted belong to others."""

    claim = "schedule.pressed"
    _steps = -1

    def build_connector_meta(self, scheduler_output: Any) -> ForewordConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        waiting = self._waiting = getattr(self, "_waiting", [])
        if scheduler_output.preempted_req_ids and self._steps < 0:  # later ones do not put it off: it would never end
            self._steps = 12
        waiting += metadata.saves
        metadata.saves = []
        if scheduler_output.total_num_scheduled_tokens:
            self._steps -= 1
        if self._steps <= 0 and getattr(self, "_preempted", self._steps == 0):
            self._preempted = True
            metadata.saves, self._waiting = waiting, []
        return metadata


# Keys


class LastTokenIgnored(Mutant):
    """The last token of a block is not in its key."""

    claim = "reuse.boundaries"

    @classmethod
    def plant(cls) -> None:
        right = block_keys.chain_keys

        def chain_keys(parent: bytes, tokens: Any, block_size: int, extras: Sequence[bytes] = ()) -> list[bytes]:
            kept = [0 if i % block_size == block_size - 1 else token for i, token in enumerate(tokens)]
            return right(parent, kept, block_size, extras)

        block_keys.chain_keys = chain_keys


class ParentIgnored(Mutant):
    """A block's key says nothing about the tokens before it."""

    claim = "reuse.position"

    @classmethod
    def plant(cls) -> None:
        def chain_keys(parent: bytes, tokens: Any, block_size: int, extras: Sequence[bytes] = ()) -> list[bytes]:
            data, width = block_keys.token_bytes(tokens), 4 * block_size
            return [sha256(data[at : at + width]).digest() for at in range(0, len(data) - width + 1, width)]

        block_keys.chain_keys = chain_keys


class SaltIgnored(Mutant):
    """`cache_salt` is ignored."""

    claim = "identity.salt"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        request.cache_salt = None
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SaltKept(Mutant):
    """A request without a salt has that of the request before."""

    claim = "identity.salt"
    _last = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        self._last = request.cache_salt = request.cache_salt or self._last
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class SaltOfHybridsIgnored(SaltIgnored):
    """`cache_salt` is ignored for models with several KV groups."""

    claim = "model.gpt-oss"

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        if len(self._info.groups) > 1:
            return super().get_num_new_matched_tokens(request, num_computed_tokens)
        return ForewordConnector.get_num_new_matched_tokens(self, request, num_computed_tokens)


class AdapterIgnored(Mutant):
    """A request's adapter is not in its keys."""

    claim = "identity.adapter"

    @classmethod
    def plant(cls) -> None:
        RequestIdentity.extras = lambda self, version=b"": self.inputs


class AdapterPath(Mutant):
    """An adapter is what is found under its path."""

    claim = "identity.adapter-version"

    @classmethod
    def plant(cls) -> None:
        AdapterFiles.digest = lambda self, path: sha256(path.encode()).digest()
        AdaptersInMemory.may_save = AdaptersInMemory.may_load = lambda self, adapter: True


class AdaptersBeside(Mutant):
    """A mutant that saves what a request without an adapter computes beside adapters, wherever vLLM computes it wrongly."""

    claim = "identity.mixed"

    @classmethod
    def plant(cls) -> None:
        scheduler_side.adapters_spoil_base = lambda: False


class ImagesIgnored(Mutant):
    """Images are not in the keys."""

    claim = "identity.images"

    @classmethod
    def plant(cls) -> None:
        media.media_extras = lambda items, block_size: []


class ImageOrderIgnored(Mutant):
    """The keys have a prompt's images as a set, not their places."""

    claim = "identity.images"

    @classmethod
    def plant(cls) -> None:
        def media_extras(items: Any, block_size: int) -> list[bytes]:
            return [sha256(b"".join(sorted(item.content for item in items))).digest()] if items else []

        media.media_extras = media_extras


class ImageNames(Mutant):
    """An image is what its identifier says, which clients may choose."""

    claim = "identity.images"

    @classmethod
    def plant(cls) -> None:
        MediaDigests._data_digest = lambda self, data: b"any"


# Namespaces


class Namespace(Mutant):
    """The namespace is a digest of `names` instead of what was resolved and measured."""

    @classmethod
    def plant(cls) -> None:
        def settle(info: Any, namespace: bytes = b"") -> None:
            info.model = sha256(repr(cls.names(info.config)).encode()).digest()

        connector_config.KVCacheInfo.settle = settle

    @classmethod
    def names(cls, given: Any) -> object:
        raise NotImplementedError


def _files(given: Any) -> tuple[bytes, str]:
    folder = Path(given.model_config.model)
    return weights_digest(folder), (folder / "config.json").read_text(encoding="utf-8")


class PathOnly(Namespace):
    """A model is what is found under its path."""

    claim = "identity.weights"

    @classmethod
    def names(cls, given: Any) -> object:
        return given.model_config.model


class SizeAndTime(Namespace):
    """Files with their old size and time of modification have their old content."""

    claim = "identity.weights-in-place"

    @classmethod
    def names(cls, given: Any) -> object:
        files = sorted(Path(given.model_config.model).iterdir())
        return [(one.name, one.stat().st_size, one.stat().st_mtime_ns) for one in files]


class FilesOnly(Namespace):
    """A model is its files, whatever vLLM is told to override in them."""

    claim = "identity.settings.overrides"

    @classmethod
    def names(cls, given: Any) -> object:
        return _files(given)


class FilesAndOverrides(Namespace):
    """A model is its files and overrides. What follows from other settings, such as a length, is ignored."""

    claim = "identity.settings.longrope"

    @classmethod
    def names(cls, given: Any) -> object:
        return _files(given), given.model_config.hf_overrides


class ConfigPathIgnored(Namespace):
    """Another folder's `config.json` is ignored."""

    claim = "identity.settings.config-path"

    @classmethod
    def names(cls, given: Any) -> object:
        model = given.model_config
        return _files(given), model.hf_overrides, model.max_model_len, str(model.dtype), model.quantization


class QuantizationName(Namespace):
    """The name of a quantization counts, not its arguments."""

    claim = "identity.settings.quantization-arguments"

    @classmethod
    def names(cls, given: Any) -> object:
        return given.model_config.hf_config.to_json_string(), given.model_config.quantization


class CachedDtype(Namespace):
    """A mutant that, with KV in 8 bits, ignores in which type a model computes."""

    claim = "identity.settings.dtype-8-bit"

    @classmethod
    def names(cls, given: Any) -> object:
        return _files(given)


class DtypeIgnored(FilesOnly):
    """float16 and bfloat16, whose blocks have one size, are one."""

    claim = "identity.dtype"

    @classmethod
    def plant(cls) -> None:
        super().plant()
        _describe_alike({"float16": "bfloat16"})


class CacheDtypeIgnored(FilesOnly):
    """The two kinds of 8 bits are one."""

    claim = "identity.settings.kv-dtype-8-bit"

    @classmethod
    def plant(cls) -> None:
        super().plant()
        _describe_alike({"float8_e5m2": "float8_e4m3fn"})


def _describe_alike(alike: dict[str, str]) -> None:
    right = Layout.describe
    Layout.describe = lambda self: {**right(self), "order": "", "dtype": alike.get(self.dtype, self.dtype)}


class TooMuch(Namespace):
    """Settings that change no KV are in the namespace, so that the cache is lost with them."""

    claim = "identity.settings.same"

    @classmethod
    def names(cls, given: Any) -> object:
        return _files(given), given.model_config.served_model_name


# The rest


class ResetIgnored(Mutant):
    """A reset of the connector does nothing, so that after an update of weights in place old KV is found."""

    claim = "identity.updated"

    def reset_cache(self) -> bool:
        return True


class PoolingLoads(Mutant):
    """KV is loaded where vLLM itself may not continue a prompt."""

    claim = "pooling.mean"

    @classmethod
    def plant(cls) -> None:
        connector_config._continues_prompts = lambda given: True


class ChecksumIgnored(Mutant):
    """Checksums are not compared."""

    claim = "fault.flipped"

    @classmethod
    def plant(cls) -> None:
        Store.authenticates = True


class NameIgnored(Mutant):
    """A valid block under another block's name is taken for it."""

    claim = "fault.swapped"

    @classmethod
    def plant(cls) -> None:
        right = tier.check
        tier.check = lambda data, name=None, **more: right(data, None, **more)
