"""How many KV blocks a pool gets."""

from __future__ import annotations

import gc

import psutil
import torch

from foreword.blocks.prefix_cache import PrefixCache
from foreword.config import KV_MEMORY_FORMS, EngineConfig
from foreword.engine.model import LoadedModel
from foreword.engine.request import Request, SamplingParams
from foreword.engine.scheduler import Scheduler
from foreword.engine.sequence import SequenceState
from foreword.engine.torch_runner import bytes_per_block
from foreword.errors import ConfigError

# Shares of the memory that is free. What a GPU's pool leaves is for sampling, CUDA graphs and fragmentation.
_HOST_SHARE = 1 / 3
_DEVICE_SHARE = 0.9


def kv_blocks(config: EngineConfig, loaded: LoadedModel) -> int:
    """Number of blocks in the pool, from `kv_memory` (bytes, tokens in all layers, or auto: a share of the free memory).
    Raises ConfigError if that is less than two blocks for each KV group."""
    per_block = bytes_per_block(loaded.layers, loaded.kv_dtype, config.block_size)
    groups = len(loaded.layers.groups)
    size = config.kv_size()
    if size is None:
        useful = config.max_num_seqs * -(-loaded.max_model_len // config.block_size) * groups
        blocks = min(_free_bytes(config, loaded) // per_block, useful)
    else:
        number, unit = size
        blocks = number // per_block if unit == "bytes" else -(-number // config.block_size) * groups
    if blocks < 2 * groups:
        raise ConfigError(
            f"engine.kv_memory (--kv-memory) is {config.kv_memory!r}, which is less than two blocks of "
            f"{per_block * groups} bytes; {KV_MEMORY_FORMS}"
        )
    return int(blocks)


def _free_bytes(config: EngineConfig, loaded: LoadedModel) -> int:
    """Memory for the pool: a third of the free host memory; on a GPU most of what the largest step leaves."""
    if loaded.device.type != "cuda":
        return int(psutil.virtual_memory().available * _HOST_SHARE)
    gc.collect()  # pragma: no cover - needs a GPU
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(loaded.device)
    before = torch.cuda.memory_allocated(loaded.device)
    run_largest_step(config, loaded)
    needed = torch.cuda.max_memory_allocated(loaded.device) - before
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(loaded.device)
    return int((free - needed) * _DEVICE_SHARE)


def run_largest_step(config: EngineConfig, loaded: LoadedModel) -> None:
    """A forward pass over a prompt of `max_batch_tokens` tokens, with logits of as many rows as sequences may run."""
    count = min(config.max_batch_tokens, loaded.max_model_len)
    groups = loaded.layers.kv_groups(config.block_size)
    blocks = (-(-count // config.block_size) + 2) * len(groups)
    runner = loaded.runner(blocks, config.block_size)
    cache = PrefixCache(blocks, config.block_size, groups=groups)
    scheduler = Scheduler(cache, max_batch_tokens=count)
    request = Request("memory", (0,) * count, SamplingParams())
    sequence = SequenceState(request, cache.open(request.tokens), 0, count)
    scheduler.add(sequence)
    step = scheduler.schedule()
    runner.logits(step, rows=range(min(count, config.max_num_seqs)))
    scheduler.settle(step)
    scheduler.finish(sequence)
