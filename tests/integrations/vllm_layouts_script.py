"""Runs in an environment with vLLM: builds the KV caches that vLLM's two model runners register, over CPU tensors and with
vLLM's own code, and moves blocks of them through a staging arena.

A layer is a class of vLLM with what its KV cache needs. vLLM asks it for its spec, groups the layers, resolves the KV cache
layout, allocates, and binds to each layer the view that its kernels read. What the arena does is compared with copies through
these views. Every layout is tried for every case; where vLLM refuses one, its message is reported.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from hashlib import sha256
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1")

import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as DTypes
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    compute_layer_kv_cache_shape_bytes,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu import attn_utils
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.utils import (
    AttentionGroup,
    add_kv_sharing_layers_to_kv_cache_groups,
    prepare_kernel_block_sizes,
    select_common_block_size,
)
from vllm.v1.worker.worker_base import get_current_attn_backends

from foreword.integrations.vllm.kv_views import block_views
from foreword.offload.staging import StagingArena

# vLLM has loaded its build for this processor. ROCm's backends import `vllm._C`, the build for AVX-512 with bfloat16, and a
# second build ends the process: it registers the same operators.
sys.modules.setdefault("vllm._C", ModuleType("vllm._C"))

BLOCKS = 53
BLOCK_SIZES = (16, 32, 64, 128)
SIZES = {"DeepSeek V4": (256,), "DeepSeek V4 packed": (256,), "compressed keys": (256, 512)}
CPU = torch.device("cpu")
BF16 = torch.bfloat16

NOT_IMPORTED: dict[str, str] = {}  # backends, and why

Case = Callable[[Any, dict[str, Any]], None]  # adds its layers to a static forward context


# Layers


class AttentionLayer(Attention):
    """vLLM's attention layer without weights: a backend and a spec, or the name of a layer whose KV it shares."""

    def __init__(self, backend: Any, spec: Any, target: str | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.attn_backend, self.spec, self.kv_sharing_target_layer_name = backend, spec, target

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return self.spec


class StateLayer(MambaBase):
    """vLLM's recurrent layer without weights: its kind and its states."""

    def __init__(self, kind: Any, shapes: Any, dtypes: Any) -> None:
        self.kind, self.shapes, self.dtypes = kind, shapes, dtypes

    mamba_type = property(lambda self: self.kind)  # type: ignore[assignment]

    def get_state_shape(self) -> Any:
        return self.shapes

    def get_state_dtype(self) -> Any:
        return self.dtypes


def layer(number: int, name: str = "attn") -> str:
    return f"model.layers.{number}.{name}"


def dense(backend: Any, count: int = 3, **more: Any) -> Case:
    """Layers of full attention."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(count):
            context[layer(number)] = AttentionLayer(backend, full(config, **more))

    return add


def full(config: Any, **more: Any) -> Any:
    given = {"num_kv_heads": 2, "head_size": 32, "dtype": BF16, **more}
    return FullAttentionSpec(block_size=config.cache_config.block_size, **given)


def window(config: Any, **more: Any) -> Any:
    given = {"num_kv_heads": 2, "head_size": 32, "dtype": BF16, "sliding_window": 40, **more}
    return SlidingWindowSpec(block_size=config.cache_config.block_size, **given)


def latent(config: Any, **more: Any) -> Any:
    given = {"num_kv_heads": 1, "head_size": 576, "dtype": BF16, "max_tp_shards": 1, **more}
    return MLAAttentionSpec(block_size=config.cache_config.block_size, **given)


def mla(backend: Any, **more: Any) -> Case:
    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(3):
            context[layer(number)] = AttentionLayer(backend, latent(config, **more))

    return add


def sparse_mla(backend: Any) -> Case:
    """DeepSeek V3.2: a latent cache and an indexer's cache in each layer."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(3):
            context[layer(number)] = AttentionLayer(backend, latent(config))
            DeepseekV32IndexerCache(132, torch.uint8, layer(number, "indexer"), config.cache_config)

    return add


def compressed_keys(backend: Any) -> Case:
    """Full attention that reads keys which an indexer picks; one of the indexer's keys stands for several tokens."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(3):
            context[layer(number)] = AttentionLayer(backend, full(config))
            compressed = latent(config, head_size=128, tokens_per_state=4)
            context[layer(number, "indexer")] = AttentionLayer(DeepseekV4IndexerBackend, compressed)

    return add


def deepseek_v4(backend: Any) -> Case:
    """Compressed latents, indexers, compressors' states and windows, with pages of several sizes."""

    def add(config: Any, context: dict[str, Any]) -> None:
        cache = config.cache_config
        packed = cache.cache_dtype == "fp8_ds_mla"
        dtype, content, alignment = (torch.uint8, 584, 576) if packed else (BF16, None, 512)
        kept = {"head_size": 512, "dtype": dtype, "state_content_bytes": content, "alignment": alignment}
        for number, ratio in enumerate((1, 4, 128, 4, 128)):
            DeepseekV4SWACache(512, 128, dtype, layer(number, "swa"), cache)
            if ratio == 1:
                continue
            spec = latent(config, tokens_per_state=ratio, model_version="deepseek_v4", **kept)
            context[layer(number)] = AttentionLayer(backend, spec)
            CompressorStateCache(512 * 2 * (1 + (ratio == 4)), torch.float32, ratio, layer(number, "compressor"))
            if ratio == 4:
                DeepseekV4IndexerCache(132, torch.uint8, layer(number, "indexer"), cache, ratio)
                CompressorStateCache(128 * 2 * 2, torch.float32, ratio, layer(number, "indexer.compressor"))

    return add


def hybrid(backend: Any, kind: Any, shapes: Any, dtypes: Any) -> Case:
    """Three recurrent layers for each one of attention; the last group of layers is not full."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(7):
            attends = number % 4 == 3
            context[layer(number)] = (
                AttentionLayer(backend, full(config)) if attends else StateLayer(kind, shapes, dtypes)
            )

    return add


def windows(backend: Any, **more: Any) -> Case:
    """Two layers with a window for each one of full attention."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number in range(7):
            spec = full(config) if number % 3 == 2 else window(config, **more)
            context[layer(number)] = AttentionLayer(backend, spec)

    return add


def chunks(backend: Any) -> Case:
    """Llama 4: chunked attention and full attention."""

    def add(config: Any, context: dict[str, Any]) -> None:
        given = {"num_kv_heads": 2, "head_size": 32, "dtype": BF16, "attention_chunk_size": 64}
        for number in range(4):
            chunked = ChunkedLocalAttentionSpec(block_size=config.cache_config.block_size, **given)
            context[layer(number)] = AttentionLayer(backend, full(config) if number == 3 else chunked)

    return add


def unequal(backend: Any) -> Case:
    """Makes a group of layers with different heads, such as a draft model's."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number, heads in enumerate((2, 2, 4, 1)):
            context[layer(number)] = AttentionLayer(backend, full(config, num_kv_heads=heads))

    return add


def shared(backend: Any) -> Case:
    """Gemma 3n: later layers read the KV of earlier ones."""

    def add(config: Any, context: dict[str, Any]) -> None:
        for number, target in enumerate((None, None, 1, 0)):
            context[layer(number)] = AttentionLayer(backend, full(config), None if target is None else layer(target))

    return add


def cases() -> Iterator[tuple[str, str, Case]]:
    """`(kind, backend, case)`, for each backend whose class can be imported here."""
    plain, latents = [], []
    for one in AttentionBackendEnum:
        try:
            backend = one.get_class()
        except (ImportError, AssertionError, AttributeError, ValueError) as error:
            NOT_IMPORTED[one.name] = f"{type(error).__name__}: {error}"
            continue
        (latents if backend.is_mla() else plain).append((one.name, backend))
    by_name = dict(plain + latents)
    for name, backend in plain:
        heads = {"head_size_v": 16} if name.endswith("DIFFKV") else {}
        quant = {"kv_quant_mode": KVQuantMode.TURBOQUANT_4BIT_NC, "dtype": torch.uint8} if name == "TURBOQUANT" else {}
        yield "attention", name, dense(backend, **heads, **quant)
    for name, backend in latents:
        if not name.endswith(("DSV4", "DSV41")):
            yield "latent", name, mla(backend)
    quantized = {"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD, "dtype": torch.int8}
    yield "per-head scales", "TRITON_ATTN", dense(by_name["TRITON_ATTN"], **quantized)
    yield "fp8", "FLASH_ATTN", dense(by_name["FLASH_ATTN"], dtype=torch.float8_e4m3fn)
    packed = {"dtype": torch.uint8, "state_content_bytes": 656, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    yield "packed latent", "FLASHMLA_SPARSE", mla(by_name["FLASHMLA_SPARSE"], cache_dtype_str="fp8_ds_mla", **packed)
    yield "sparse latent", "FLASHMLA_SPARSE", sparse_mla(by_name["FLASHMLA_SPARSE"])
    yield "DeepSeek V4 packed", "FLASHMLA_SPARSE_DSV4", deepseek_v4(by_name["FLASHMLA_SPARSE_DSV4"])
    yield "compressed keys", "FLASH_ATTN", compressed_keys(by_name["FLASH_ATTN"])
    yield "DeepSeek V4", "FLASHINFER_MLA_SPARSE_DSV4", deepseek_v4(by_name["FLASHINFER_MLA_SPARSE_DSV4"])
    for name in ("FLASH_ATTN", "CPU_ATTN", "TRITON_ATTN", "FLEX_ATTENTION", "ROCM_ATTN"):
        backend = by_name[name]
        for kind, *states in recurrent():
            yield kind, name, hybrid(backend, *states)
        yield "window", name, windows(backend)
        yield "window of other heads", name, windows(backend, num_kv_heads=1, head_size=48)
        yield "chunked", name, chunks(backend)
        yield "unequal heads", name, unequal(backend)
        yield "shared KV", name, shared(backend)


def recurrent() -> Iterator[tuple[str, Any, Any, Any]]:
    """`(kind, vLLM's kind, shapes, dtypes)` of recurrent layers' states, as vLLM's models ask for them."""
    kinds = MambaAttentionBackendEnum
    two = DTypes.mamba2_state_dtype(BF16, "auto", "float32")
    yield "Mamba", kinds.MAMBA1, Shapes.mamba1_state_shape(1, 48, 5, 4), DTypes.mamba1_state_dtype(BF16, "auto", "auto")
    yield "Mamba2", kinds.MAMBA2, Shapes.mamba2_state_shape(1, 64, 1, 4, 16, 6, 4), two
    delta = Shapes.gated_delta_net_state_shape(1, 2, 2, 16, 16, 4)
    yield "gated delta net", kinds.GDN_ATTN, delta, DTypes.gated_delta_net_state_dtype(BF16, "auto", "float32")
    kda = DTypes.kda_state_dtype(BF16, "auto")
    yield "delta attention", kinds.GDN_ATTN, Shapes.kda_state_shape(1, 2, 16), kda
    yield "short convolution", kinds.SHORT_CONV, Shapes.short_conv_state_shape(1, 42, 3), (BF16,)
    yield "linear attention", kinds.LINEAR, Shapes.linear_attention_state_shape(2, 1, 16), (torch.float32,)


class Refused(Exception):
    """vLLM does not build this."""


# The work of vLLM's model runners


class Registered:
    """A case: what a model runner registers, and what its layers see."""

    def __init__(self, runner: str, case: Case, layout: KVCacheLayout, config: Any) -> None:
        self.context = config.compilation_config.static_forward_context = {}
        config.cache_config.kv_cache_layout = None
        with set_current_vllm_config(config):
            case(config, self.context)
            try:
                self._build(runner, layout, config)
            except (ValueError, NotImplementedError, AssertionError) as error:
                raise Refused(str(error)) from error

    def _build(self, runner: str, layout: KVCacheLayout, config: Any) -> None:
        # For V1, the methods of its class on an object that has only what they read.
        old = SimpleNamespace(
            device=CPU, vllm_config=config, cache_config=config.cache_config, model_config=config.model_config,
            compilation_config=config.compilation_config, speculative_config=None, shared_kv_cache_layers={},
            runner_only_attn_layers=set(), kv_caches=[],
        )  # fmt: skip
        specs = GPUModelRunner.get_kv_cache_spec(old) if runner == "V1" else attn_utils.get_kv_cache_spec(config)
        supported = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        if layout not in supported:
            raise ValueError(f"the backends support {[one.name for one in supported]}")
        resolve_kv_cache_layout(config, [[layout.name]], specs.values())
        (self.config,) = get_kv_cache_configs(config, [dict(specs)], [1 << 40])
        own = deepcopy(self.config)
        if runner == "V1":
            GPUModelRunner.maybe_add_kv_sharing_layers_to_kv_cache_groups(old, own)
        else:
            targets = attn_utils.get_shared_kv_cache_layers(config)
            add_kv_sharing_layers_to_kv_cache_groups(targets, own.kv_cache_groups)
        by_group = self._attention_groups(own)
        kernel_sizes = prepare_kernel_block_sizes(own, by_group)
        self.groups = [group for groups in by_group for group in groups]
        for group in self.groups:  # as in AttentionGroup.create_metadata_builders
            if not isinstance(self.context[group.layer_names[0]], MambaBase):
                size = kernel_sizes[group.kv_cache_group_id]
                size = select_common_block_size(size, [group.backend], [group.kv_cache_spec])
                group.kernel_block_size = size if size != group.kv_cache_spec.block_size else None
        if runner == "V1":
            old.attn_groups = by_group
            self.caches = GPUModelRunner.initialize_kv_cache_tensors(old, own, kernel_sizes)
        else:
            self.caches = attn_utils.init_kv_cache(
                self.context, own, CPU, kernel_sizes, config, attn_groups=self.groups
            )

    def _attention_groups(self, config: Any) -> list[list[AttentionGroup]]:
        """Layers of a KV cache group by backend and spec."""
        found: list[list[AttentionGroup]] = []
        for number, group in enumerate(config.kv_cache_groups):
            specs: dict[Any, AttentionGroup] = {}
            for name in group.layer_names:
                spec, backend = group.kv_cache_spec, self.context[name].get_attn_backend()
                if isinstance(spec, UniformTypeKVCacheSpecs):
                    spec = spec.kv_cache_specs[name]
                made = AttentionGroup(backend, [], spec, number)
                specs.setdefault((backend.full_cls_name(), spec), made).layer_names.append(name)
            found.append(list(specs.values()))
        return found

    def rows(self, name: str, blocks: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that a layer's kernels read, as bytes, and the indexes of their rows that are these blocks."""
        group = next(group for group in self.groups if name in group.layer_names)
        bound = self.context[name].kv_cache
        for tensor in bound if isinstance(bound, tuple) else (bound,):
            ratio = 1
            if group.kernel_block_size is not None:
                ratio = group.kv_cache_spec.block_size // group.kernel_block_size
            stride = group.kernel_block_stride or ratio
            yield tensor.view(torch.uint8), (blocks[:, None] * stride + torch.arange(ratio)).flatten()

    def bytes_of_a_block(self, number: int) -> int:
        """Bytes of a block of one KV cache group, without padding, as its specs have it."""
        group = self.config.kv_cache_groups[number]
        own = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        specs = [own.get(name, group.kv_cache_spec) for name in group.layer_names]
        return sum(torch.Size(compute_layer_kv_cache_shape_bytes(spec, 1)).numel() for spec in specs)


# The promise


@cache
def _all_noise() -> torch.Tensor:
    return torch.randint(0, 256, (1 << 26,), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))


def noise(shape: torch.Size) -> torch.Tensor:
    """Random bytes, others with each call."""
    start = int(torch.randint(0, 1 << 20, ()))
    return _all_noise()[start : start + shape.numel()].view(shape)


def moved_wrongly(built: Registered) -> str:
    """Describes what is wrong after blocks of every group moved through frames to other blocks; "" if nothing is."""
    draw = torch.Generator().manual_seed(7)
    storage = next(iter(built.caches.values())).untyped_storage()
    memory = torch.empty(0, dtype=torch.uint8).set_(storage)
    memory.copy_(noise(memory.shape))
    names = [group.layer_names for group in built.config.kv_cache_groups]
    arena = StagingArena([block_views(built.caches, one, BLOCKS) for one in names], 12)
    for number, one in enumerate(names):
        if arena.block_bytes[number] != built.bytes_of_a_block(number):
            return (
                f"a block of group {number} has {arena.block_bytes[number]} bytes, not {built.bytes_of_a_block(number)}"
            )
        order = torch.randperm(BLOCKS, generator=draw)
        sources, targets, slots = order[:8].sort().values, order[8:16], torch.randperm(12, generator=draw)[:8]
        arena.gather(sources.tolist(), slots.tolist(), number)
        views = [
            (name, *pair)
            for name in one
            for pair in zip(built.rows(name, sources), built.rows(name, targets), strict=True)
        ]
        kept = [tensor[rows].clone() for _, (tensor, rows), _ in views]
        for _, (tensor, rows), _ in views:
            tensor[rows] = noise(tensor[rows].shape)
        wiped = memory.clone()
        arena.scatter(slots.tolist(), targets.tolist(), number)
        done = memory.clone()
        for (name, _, (tensor, rows)), content in zip(views, kept, strict=True):
            if not torch.equal(tensor[rows], content):
                return f"{name} does not see its content"
        memory.copy_(wiped)
        for (_, _, (tensor, rows)), content in zip(views, kept, strict=True):
            tensor[rows] = content
        if not torch.equal(memory, done):
            return f"group {number}: other bytes than those of its blocks changed"
    return ""


def payloads(built: Registered) -> str:
    """A digest of some blocks' payloads, of all groups, where each layer has a content that does not depend on the layout."""
    digest = sha256()
    names = [group.layer_names for group in built.config.kv_cache_groups]
    arena = StagingArena([block_views(built.caches, one, BLOCKS) for one in names], 3)
    for number, one in enumerate(names):
        for name in one:
            cache = built.caches[name].view(torch.uint8)
            start = len(name) * int(name.split(".")[2])
            cache.copy_(_all_noise()[start : start + cache.numel()].view(cache.shape))
        arena.gather([5, 6, 2], [0, 1, 2], number)
        for slot in range(3):
            digest.update(arena.buffer(slot)[: arena.block_bytes[number]])
        digest.update(repr(one).encode())
    return digest.hexdigest()


def tried(runner: str, case: Case, layout: KVCacheLayout, config: Any) -> dict[str, Any]:
    try:
        built = Registered(runner, case, layout, config)
    except Refused as refusal:
        return {"refused": str(refusal)[:200]}
    return {
        "wrong": moved_wrongly(built),
        "payloads": payloads(built),
        "groups": [group.layer_names for group in built.config.kv_cache_groups],
        "kernel_blocks": any(group.kernel_block_size is not None for group in built.groups),
        "kernel_blocks_apart": any(group.kernel_block_stride for group in built.groups),
        "padded": any(getattr(spec, "page_size_padded", None) for spec in _specs(built)),
    }


def _specs(built: Registered) -> Iterator[Any]:
    for group in built.config.kv_cache_groups:
        own = getattr(group.kv_cache_spec, "kv_cache_specs", None)
        yield from own.values() if own else [group.kv_cache_spec]


def main(job: dict[str, Any]) -> None:
    config = EngineArgs(
        model=job["model"], skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, block_size=32,
        max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4, num_gpu_blocks_override=BLOCKS,
    ).create_engine_config()  # fmt: skip
    found = []
    for kind, backend, case in cases():
        config.cache_config.cache_dtype = "fp8_ds_mla" if kind == "DeepSeek V4 packed" else "auto"
        for size, runner, layout in itertools.product(SIZES.get(kind, BLOCK_SIZES), ("V1", "V2"), KVCacheLayout):
            config.cache_config.block_size = config.cache_config.mamba_block_size = size
            names = {"kind": kind, "backend": backend, "size": size, "runner": runner, "layout": layout.name}
            found.append({**names, **tried(runner, case, layout, config)})
    print("\n" + json.dumps({"found": found, "not_imported": NOT_IMPORTED}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
