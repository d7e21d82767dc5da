"""Measurements of what a server computes, made when it starts: the KV of a fixed prompt, and the embeddings of far positions.

The probe is a request that only the worker sees: it computes a few hundred fixed tokens with vLLM's own runner, in blocks that
no request uses yet, before vLLM is ready. A sample of the blocks' packed bytes says what the layout means and what the layers
compute. Positions that a short prompt does not reach are given to the rotary embeddings alone. What neither reaches, such as a
window longer than the prompt, is in the attributes of the layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import CodeType, FrameType, FunctionType
from typing import Any

import numpy as np
import torch
import vllm
from vllm.distributed.ec_transfer import ec_transfer_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

from foreword.blocks.layout import BlockUnits
from foreword.blocks.resume import GroupKind
from foreword.errors import ModelUnsupported
from foreword.integrations.tensor_files import tensors_of
from foreword.integrations.vllm.connector_config import NULL_BLOCK, KVCacheInfo
from foreword.integrations.vllm.groups import ConnectorGroup
from foreword.integrations.vllm.namespace import (
    CODE,
    ProbeSample,
    checkpoint,
    configured_attributes,
    plain_dtype,
    resolved_config,
    short,
    tolerance,
)
from foreword.integrations.weight_files import HEADS, model_folder, weight_paths
from foreword.model_content import digest_of_tensors
from foreword.offload.staging import StagingArena

_NAME = "foreword-probe"
# Tokens: enough for every kind of layer to show what it does, and a fraction of a second on a small model.
_TOKENS = 256
# Elements per layer and block.
_SAMPLE = 1024
_POSITIONS = (
    1,
    17,
    255,
    1_023,
    2_047,
    2_048,
    *(power - at for power in (1 << n for n in range(12, 21)) for at in (1, 0)),
)
# Attributes of layers that do not change KV: names and places, and how tensor parallelism divides a layer. The layouts say
# which heads a rank has.
_NO_MATTER = frozenset({
    "prefix", "layer_name", "layer_idx", "training", "tp_rank", "tp_size", "tp_size_", "num_heads", "num_kv_heads", "q_size",
    "kv_size", "num_local_heads", "total_num_heads", "total_num_kv_heads", "num_queries_per_kv", "output_partition_sizes",
    "input_is_parallel", "reduce_results", "gather_output", "disable_tp", "parallel_group", "isa", "ep_rank", "ep_size",
    "dp_rank", "dp_size", "pcp_rank", "dcp_rank", "total_cp_rank", "num_kv_head_replicas", "use_all_gather",
})  # fmt: skip
_NO_MATTER_ENDS = ("_per_partition", "_per_partition_padded", "_world_size", "_per_rank")
# Names of the longest position: rotary embeddings are measured beyond it.
_LENGTHS = ("max_position_embeddings", "max_position")
# Classes of modules behind a model's last layer.
_BEHIND = (
    "vllm.model_executor.layers.logits_processor.",
    "vllm.model_executor.layers.pooler.",
    "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead",
    "vllm.model_executor.models.utils.StageMissingLayer",  # a head that an embedding server does not load
    "vllm.v1.sample.",
)
# Methods of speculative decoding that have no layers.
_WITHOUT_LAYERS = ("ngram", "ngram_gpu", "suffix", "custom_class")
_REFUSED = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, AssertionError, KeyError)


def calling_worker() -> Any | None:
    """vLLM's worker that is calling this process's connector. vLLM gives connectors no access to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if owner is not None and hasattr(owner, "model_runner") and hasattr(owner, "execute_model"):
            return owner
        frame = frame.f_back
    return None


def calling_multi_connector() -> bool:
    """Whether a connector of vLLM that has several is making this one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and type(frame.f_locals.get("self")).__name__ == "MultiConnector":
            return True
        frame = frame.f_back
    return False


def open_when_warm(worker: Any | None, opened: Callable[[Any], object]) -> None:
    """Call `opened` with vLLM's worker once that is warm. Behind a `MultiConnector` vLLM may ask another connector only for the
    handshake, which is when this connector measures."""
    warm_up = getattr(worker, "compile_or_warm_up_model", None)
    if worker is None or warm_up is None:
        return

    def then_open(*args: Any, **kwargs: Any) -> Any:
        result = warm_up(*args, **kwargs)
        opened(worker)
        return result

    worker.compile_or_warm_up_model = then_open


@dataclass(frozen=True, slots=True)
class ProbeOutcome:
    """The measurement of a rank.

    Attributes:
        samples: of its blocks, by layout; empty if nothing could be measured.
        why: what would have to change so that it can be.
        behind: tensors that this model uses behind its last layer with KV only, by their names in `HEADS`.
    """

    samples: dict[str, ProbeSample] = field(default_factory=dict)
    why: str = ""
    behind: frozenset[str] = frozenset()


def probe_tokens(info: KVCacheInfo) -> tuple[int, str]:
    """How many tokens the probe has: whole blocks of every group. 0 and what has to be larger, if vLLM's KV cache or its steps
    are too small for it."""
    step, longest = info.step, int(info.config.model_config.max_model_len) - 1
    most = min(info.chunk, longest)
    wanted = step if any(one.group.kind is GroupKind.STATE for one in info.groups) else -(-_TOKENS // step) * step
    tokens = min(wanted, most // step * step)
    if not tokens:
        option = "--max-num-batched-tokens" if info.chunk < step else "--max-model-len"
        return (
            0,
            f"{option} allows steps of {most} tokens, shorter than a block: raise it to {step + (longest < step)} at least",
        )
    needed = sum(map(len, _tables(info, tokens))) + 1
    if needed > info.num_blocks:
        return 0, (
            f"the KV cache has {info.num_blocks} blocks, and {tokens} tokens need {needed}: give it more memory "
            "(--gpu-memory-utilization, --kv-cache-memory-bytes)"
        )
    return tokens, ""


def _tables(info: KVCacheInfo, tokens: int) -> list[list[int]]:
    """Block ids of the probe, by group of vLLM, with room for the next tokens. The groups share vLLM's blocks."""
    found, first = [], NULL_BLOCK + 1
    speculative = getattr(info.config, "speculative_config", None)
    ahead = int(getattr(speculative, "num_speculative_tokens", 0) or 0)
    last = min(tokens + 1 + ahead, int(info.config.model_config.max_model_len))
    for one in info.groups:
        count = -(-last // one.block_size) + ahead * (one.group.kind is GroupKind.STATE)
        found.append(list(range(first, first + count)))
        first += count
    return found


def measure(worker: Any, info: KVCacheInfo, staging: StagingArena, units: Sequence[BlockUnits]) -> ProbeOutcome:
    """Compute the probe on this rank, and sample its blocks; all ranks together. Without samples if there is no room for it, or
    if this vLLM's runner takes no such request."""
    tokens, why = probe_tokens(info)
    if not tokens:
        return ProbeOutcome(why=why)
    tables, prompt = _tables(info, tokens), _prompt(info, tokens)

    def computed() -> dict[str, ProbeSample]:
        _compute(worker, prompt, tables)
        found: dict[str, ProbeSample] = {}
        for number, (one, divided, table) in enumerate(zip(info.groups, units, tables, strict=True)):
            for name, values in _samples(one, divided, table, tokens, staging, number):
                found[name] = values
        return found

    try:
        samples = computed()
        behind = _behind(worker.model_runner.get_model(), info.config, samples, computed)
    except _REFUSED as error:
        return ProbeOutcome(why=f"vLLM's runner does not take the probe ({_described(error)}): report this")
    return ProbeOutcome(samples, "", behind)


def _described(error: BaseException) -> str:
    """An error with the line that raised it: vLLM's assertions have no text."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error or last.line}, {last.filename.rpartition('/vllm/')[2]}:{last.lineno}"


def drafts_with_layers(vllm_config: Any) -> bool:
    """Whether speculative decoding has layers of its own, which read what the model's last norm and head give."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return speculative is not None and str(getattr(speculative, "method", "")) not in _WITHOUT_LAYERS


def _behind(
    model: torch.nn.Module,
    vllm_config: Any,
    samples: Mapping[str, ProbeSample],
    computed: Callable[[], Mapping[str, ProbeSample]],
) -> frozenset[str]:
    """Tensors that stand behind all KV of this model, by trial: the last norm gets other values, and no KV changes. The head
    is called behind the model, where its weights are not the input embedding's too."""
    if drafts_with_layers(vllm_config):
        return frozenset()
    text = getattr(vllm_config.model_config, "hf_text_config", vllm_config.model_config.hf_config)
    found = set() if getattr(text, "tie_word_embeddings", False) else {"head"}
    norms = [one for name, one in model.named_parameters() if HEADS["norm"].match(name)]
    kept = [one.detach().clone() for one in norms]
    with torch.inference_mode():
        try:
            for one in norms:
                one.copy_(torch.linspace(1.0, 3.0, one.numel()).reshape(one.shape))
            other = computed() if norms else {}
        finally:
            for one, values in zip(norms, kept, strict=True):
                one.copy_(values)
    if other and not any(sample.difference(other[name]) for name, sample in samples.items()):
        found.add("norm")
    return frozenset(found)


def _prompt(info: KVCacheInfo, tokens: int) -> list[int]:
    """The first tokens of a fixed sequence, from the middle of the vocabulary: special tokens stand at its ends."""
    size = int(info.config.model_config.get_vocab_size())
    draw = random.Random("foreword/probe")
    return [size // 8 + int(draw.random() * (size // 2)) for _ in range(tokens)]


def _compute(worker: Any, prompt: list[int], tables: list[list[int]]) -> None:
    """Let vLLM's runner compute a prompt in these blocks, and forget the request."""
    pooling = worker.model_config.runner_type == "pooling"
    given: dict[str, Any] = {one.name: None for one in dataclasses.fields(NewRequestData)}
    given |= {
        "req_id": _NAME, "prompt_token_ids": prompt, "prefill_token_ids": prompt, "mm_features": [], "num_computed_tokens": 0,
        "block_ids": tuple(tables), "sampling_params": None, "pooling_params": None, "replay_start": 0,
    }  # fmt: skip
    given["pooling_params" if pooling else "sampling_params"] = _parameters(worker, pooling)
    known = {one.name for one in dataclasses.fields(NewRequestData)}
    request = NewRequestData(**{name: value for name, value in given.items() if name in known})
    step = dataclasses.replace(
        SchedulerOutput.make_empty(),
        scheduled_new_reqs=[request],
        num_scheduled_tokens={_NAME: len(prompt)},
        total_num_scheduled_tokens=len(prompt),
    )
    end = dataclasses.replace(SchedulerOutput.make_empty(), finished_req_ids={_NAME})
    for one in (step, end):
        one.num_common_prefix_blocks = [0] * len(tables)
    with _without_connectors(worker):
        try:
            output = worker.execute_model(step)
            if output is None and not pooling:
                output = worker.sample_tokens(None)
            if hasattr(output, "get_output"):
                output.get_output()  # asynchronous scheduling
        except BaseException:
            with contextlib.suppress(*_REFUSED):  # or the request would stay in the runner's batch
                worker.execute_model(end)
            raise
        worker.execute_model(end)


def _parameters(worker: Any, pooling: bool) -> Any:
    from vllm import PoolingParams, SamplingParams

    if not pooling:
        return SamplingParams(temperature=0.0, max_tokens=1)
    tasks = worker.get_supported_tasks() if hasattr(worker, "get_supported_tasks") else ()
    parameters = PoolingParams()
    parameters.task = next(iter(tasks), "embed")
    return parameters


@contextmanager
def _without_connectors(worker: Any) -> Iterator[None]:
    """vLLM's runner computes as if it had no connector, of KV or of encoder outputs: nothing of the probe is loaded or saved,
    and the step needs no metadata of theirs."""
    agent, kv_transfer_state._KV_CONNECTOR_AGENT = kv_transfer_state._KV_CONNECTOR_AGENT, None
    encoder, ec_transfer_state._EC_CONNECTOR_AGENT = ec_transfer_state._EC_CONNECTOR_AGENT, None
    second = getattr(worker.model_runner, "kv_connector", None)  # model runner V2 keeps it
    switch = getattr(second, "set_disabled", lambda _: None)
    switch(True)
    try:
        yield
    finally:
        switch(False)
        kv_transfer_state._KV_CONNECTOR_AGENT = agent
        ec_transfer_state._EC_CONNECTOR_AGENT = encoder


def _samples(
    one: ConnectorGroup, divided: BlockUnits, table: Sequence[int], tokens: int, staging: StagingArena, number: int
) -> Iterator[tuple[str, ProbeSample]]:
    """A sample of one group's blocks, for each of its layouts."""
    size, width = one.block_size, divided.tokens
    if not one.positional:
        table = table[tokens // size - 1 :]
    # The first frame, and one further behind: at the same token for every block size, where blocks are divided.
    behind = _TOKENS * 3 // 4 // width * width if one.positional and tokens >= _TOKENS else 0
    places = sorted({0, behind})
    for head, layout in enumerate(divided.layouts):
        payloads = []
        for slot, place in enumerate(places):
            at = (place % size) // width * len(divided.layouts) + head
            unit = divided.of_blocks([table[place // size]])[at]
            staging.gather([unit], [slot], number)
            payloads.append(bytes(staging.buffer(slot)[: staging.block_bytes[number]]))
        for part, (kind, rows) in enumerate(_typed(one, payloads)):
            yield (
                f"layout {layout.fingerprint.hex()} {part}",
                ProbeSample.of(_chosen(rows), tolerance(kind), open=True),
            )


def _typed(one: ConnectorGroup, payloads: Sequence[bytes]) -> Iterator[tuple[str, torch.Tensor]]:
    """Elements of payloads as tensors `[payloads * layers, elements]` of a dtype each, and its name."""
    data = torch.frombuffer(bytearray(b"".join(payloads)), dtype=torch.uint8).view(len(payloads), -1)
    layers = 1 if one.uneven or data.shape[1] % len(one.specs) else len(one.specs)
    rows = data.view(len(payloads) * layers, -1)
    spec = one.specs[0]
    if not isinstance(spec, MambaSpec):
        kind = one.dtype if tolerance(one.dtype) else "uint8"
        whole = rows.shape[1] % getattr(torch, kind).itemsize == 0
        yield (kind, rows.view(getattr(torch, kind))) if whole else ("uint8", rows)
        return
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
    if layers == 1 or sum(sizes) != rows.shape[1]:
        yield "uint8", rows
        return
    offset = 0
    for size, dtype in zip(sizes, spec.dtypes, strict=True):
        yield str(dtype).removeprefix("torch."), rows[:, offset : offset + size].contiguous().view(dtype)
        offset += size


def _chosen(rows: torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A sample of elements of each row, from all parts of it."""
    count = min(rows.shape[1], _SAMPLE)
    bounds = np.linspace(0, rows.shape[1], count + 1).astype(np.int64)
    draw = np.random.default_rng(0).random(count)
    places = bounds[:-1] + (draw * np.diff(bounds)).astype(np.int64)
    return np.asarray(rows[:, torch.from_numpy(places)].float().numpy(), np.float32)


def rotary_embeddings(model: torch.nn.Module, longest: int, dtype: torch.dtype) -> dict[str, ProbeSample]:
    """Fixed vectors rotated to near and far positions below `longest`, by each rotary embedding of the model."""
    found: dict[str, ProbeSample] = {}
    modules = {id(one): one for one in model.modules() if _is_rotary(one)}
    for number, module in enumerate(modules.values()):
        found[f"rotary {number}"] = _rotated(module, longest, dtype)
    return found


@torch.inference_mode()
def _rotated(module: Any, longest: int, dtype: torch.dtype) -> ProbeSample:
    tables = [one for one in module.buffers() if one.dim() >= 2]
    longest = min(longest, *(len(one) for one in tables)) if tables else longest
    positions = [position for position in _POSITIONS if position < longest]
    device = tables[0].device if tables else torch.device("cpu")
    vector = torch.randn(int(module.head_size), generator=torch.Generator().manual_seed(0)).to(device, dtype)
    query = vector.repeat(len(positions), 1)
    try:
        rotated, _ = module(torch.tensor(positions, device=device), query.clone(), query.clone())
        values = rotated.reshape(len(positions), -1).float().cpu().numpy()
    except _REFUSED:  # another signature; the tables say at least what it multiplies with
        rows = [one[positions].reshape(len(positions), -1).float().cpu() for one in tables]
        values = torch.cat(rows, 1).numpy() if rows else np.zeros((len(positions), 1), np.float32)
    return ProbeSample.of(np.asarray(values, np.float32), tolerance(str(dtype).removeprefix("torch.")), open=True)


def resolved_attributes(model: torch.nn.Module, vllm_config: Any) -> dict[str, str]:
    """The plain attributes and scalar buffers of all layers by class and name, the code of the layers, and the keys of the
    configuration they read. Nothing of what is called behind the last layer: logits, pooling."""
    model_config = vllm_config.model_config
    collected: dict[str, list[str]] = {}
    plain = set(vars(torch.nn.Module()))
    inputs = _input_embedding(model)
    positions = any(_is_rotary(module) for module in model.modules())
    codes: dict[str, bytes] = {}
    for module in model.modules():
        if _is_behind(module) and module is not inputs:
            continue
        for owner in (module, getattr(module, "impl", None)):
            # Wrappers of vLLM for adapters change nothing without one; requests with one have keys of their own.
            if owner is None or not hasattr(owner, "__dict__") or type(owner).__module__.startswith("vllm.lora."):
                continue
            if module is not model and (forward := getattr(type(owner), "forward", None)) is not None:
                codes.setdefault(str(getattr(forward, "__qualname__", type(owner).__qualname__)), code_digest(forward))
            for name, value in vars(owner).items():
                if name in plain or not _matters(name) or not _is_plain(value) or (positions and name in _LENGTHS):
                    continue
                text = plain_dtype(_text(value), model_config.dtype) if name == "kv_cache_dtype" else _text(value)
                # An embedding server's model is of a class that vLLM makes of the generating one.
                owned = "model" if owner is model else type(owner).__name__
                collected.setdefault(f"{owned}.{name}", []).append(text)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer is not None and buffer.dim() == 0:
                collected.setdefault(f"{type(module).__name__}.{name}", []).append(repr(buffer.item()))
    found = {
        name: short(values[0] if len(set(values)) == 1 else ", ".join(values)) for name, values in collected.items()
    }
    config = resolved_config(model_config)
    if positions:  # measured, by rotating at far positions
        config = {key: value for key, value in config.items() if key.rpartition(".")[2] not in _LENGTHS}
    if model_config.dtype == torch.float32:
        found["torch.float32_matmul_precision"] = torch.get_float32_matmul_precision()
    digest = sha256(b"".join(name.encode() + codes[name] for name in sorted(codes))).hexdigest()[:32]
    found[f"{CODE}{vllm.__version__} {sys.version_info.major}.{sys.version_info.minor}"] = digest
    return found | config


def weight_attributes(
    vllm_config: Any, fingerprint: str | None, model: torch.nn.Module, behind: Collection[str]
) -> dict[str, str]:
    """Attributes beside the layers': what is configured, weights that are not proven to be behind the last layer with KV, and
    those that the model reads from other files. Raises ModelUnsupported."""
    found = configured_attributes(vllm_config, fingerprint)
    if fingerprint:
        return found
    read = checkpoint(vllm_config)
    known = set(behind) if read.embeds else set(behind) - {"head"}
    found |= {f"weights.{name}": one.hex() for name, one in read.heads.items() if one and name not in known}
    model_config, revision = vllm_config.model_config, getattr(vllm_config.model_config, "revision", None)
    names = ("model_or_path", "revision", "subfolder", "allow_patterns_overrides")
    own = getattr(model, "allow_patterns_overrides", None)
    sources: list[tuple[Any, ...]] = [(model_config.model, revision, None, own)] if own else []
    for one in getattr(model, "secondary_weights", None) or ():
        sources.append(tuple(getattr(one, name, None) for name in names))
    for number, (source, version, subfolder, patterns) in enumerate(sources):
        try:
            folder = model_folder(str(source), version) / (subfolder or "")
            digest = digest_of_tensors(tensors_of(weight_paths(folder, "auto", patterns))).hex()
        except ModelUnsupported:  # a part that a checkpoint need not have
            digest = "None"
        found[f"weights.other {number}"] = digest
    return found


def _input_embedding(model: torch.nn.Module) -> object:
    try:
        found = model.get_input_embeddings()  # type: ignore[operator]
    except (*_REFUSED, NotImplementedError):
        found = None
    return found if isinstance(found, torch.nn.Module) else getattr(getattr(model, "model", None), "embed_tokens", None)


def _is_behind(module: torch.nn.Module) -> bool:
    """Whether a module computes logits or pools: vLLM calls it with what the model returns."""
    return any(f"{kind.__module__}.{kind.__qualname__}".startswith(_BEHIND) for kind in type(module).__mro__)


def _is_rotary(module: torch.nn.Module) -> bool:
    return ".rotary_embedding" in type(module).__module__ and hasattr(module, "head_size")


def code_digest(function: Any) -> bytes:
    """16 bytes: a digest of what a function's bytecode does, and of functions and plain values in its closure."""
    digest = sha256()
    _add_code(digest, function, 4)
    return digest.digest()[:16]


def _add_code(digest: Any, function: Any, depth: int) -> None:
    code = getattr(function, "__code__", function)
    if not isinstance(code, CodeType) or not depth:
        return
    digest.update(code.co_code + repr((code.co_names, code.co_argcount)).encode())
    for value in code.co_consts:
        if isinstance(value, CodeType):
            _add_code(digest, value, depth - 1)
        elif _is_plain(value) and not (isinstance(value, str) and value == code.co_consts[0]):
            digest.update(repr(value).encode())
    for cell in getattr(function, "__closure__", None) or ():
        try:
            value = cell.cell_contents
        except ValueError:  # not set yet
            continue
        if isinstance(value, FunctionType):
            _add_code(digest, value, depth - 1)
        elif isinstance(value, bool | int | float):
            digest.update(repr(value).encode())


def _matters(name: str) -> bool:
    """False also for what torch's and vLLM's compilers leave at a module: the probe runs what they made."""
    compiler = "compile" in name or "aot_" in name or name == "_dynamic_arg_dims"
    return not compiler and name not in _NO_MATTER and not name.endswith(_NO_MATTER_ENDS)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _text(value: object) -> str:
    return value if isinstance(value, str) else repr(value)
