"""Loading a model from a folder or the hub: refusals, weights, fingerprint, kernels, self-check."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import nn

from foreword.compiled_code import CannotBuild, is_compiled
from foreword.config import parse_bytes
from foreword.engine import batch_invariance, decoder, linear
from foreword.engine.attention import backend as attention
from foreword.engine.attention.backend import LayerRecorder
from foreword.engine.kernels import native
from foreword.engine.kernels.kernel_choice import COMPILED, AttentionChoice
from foreword.engine.kernels.native import Kernels
from foreword.engine.kv_groups import GroupedLayers, group_layers
from foreword.engine.linear import quantize
from foreword.engine.measure import Measured, describe, measure
from foreword.engine.preflight import check_model
from foreword.engine.request import SamplingParams
from foreword.engine.torch_runner import TorchRunner, record_layers
from foreword.engine_config import EngineConfig
from foreword.errors import BadRequest, ConfigError, ModelUnsupported
from foreword.integrations.model_identity import earlier_fingerprint, fingerprint_model, fixed_rope_length
from foreword.request_errors import ModelNotFound
from foreword.texts import readable

log = logging.getLogger(__name__)

EMBEDDED = "stdlib-nano"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Fields of `generation_config.json` that `SamplingParams` has too.
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# Supported `layer_types`. Layers of any other type keep state outside attention (linear attention, state spaces,
# convolutions), or attend in a way that the attention interface does not say (in chunks, sparsely, compressed), some of
# them only beyond a length that no short check reaches.
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
# Shares of the fastest mode's speed that batch invariance costs, by what is measured at load: from where on the log says so,
# and from where on `auto` does without it. Between them lies what varies from one measurement to the next; beyond the second
# are processors whose own units the compiled kernels do not use (AMX).
_WORTH_SAYING, _MOST_LOST = 0.03, 0.6
# Errors that a forward pass raises where a model and this engine do not fit.
FORWARD_ERRORS = (TypeError, AttributeError, RuntimeError, ValueError, LookupError, ArithmeticError, AssertionError)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that was loaded for the engine.

    Attributes:
        fingerprint: SHA-256 over configuration and weights (not their path).
        layers: by KV group, with what each keeps per token in numbers of `kv_dtype`.
        end_tokens: end-of-sequence tokens, from the generation configuration.
        sampling: fields of `SamplingParams` from the same file.
        kernels: the compiled kernels; None where they are not used.
        triton: the Triton kernels compute attention.
        choice: which attention the compiled kernels serve; None for all.
        decode: computes steps that only decode, where the kernels compute all of the model.
        backends: which kernels serve which shapes, in words.
        inexact: why the bits of a token's KV depend on the batch; empty if they do not.
        namespace: part of every block's key: the fingerprint, and under batch invariance what the bits depend on as well.
        earlier: the fingerprint that earlier builds gave the model, if it was to be computed; else b"".
    """

    model: Any
    name: str
    source: str
    fingerprint: bytes
    layers: GroupedLayers
    kv_dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    parameters: int
    end_tokens: tuple[int, ...]
    sampling: Mapping[str, float]
    kernels: Kernels | None = None
    triton: bool = False
    choice: AttentionChoice | None = None
    decode: decoder.WholeDecode | None = None
    backends: tuple[str, ...] = ()
    inexact: str = ""
    namespace: bytes = b""
    earlier: bytes = b""

    def runner(self, num_blocks: int, block_size: int) -> TorchRunner:
        """The runner of its steps, with KV memory of its own for a number of blocks of `block_size` tokens."""
        return TorchRunner(
            self.model,
            self.layers,
            self.kv_dtype,
            num_blocks,
            block_size,
            kernels=self.kernels,
            triton=self.triton,
            choice=self.choice,
            decode=self.decode,
            undivided=not self.inexact,
        )


def embedded_model() -> Path:
    """The folder of the model that ships with the package."""
    return Path(str(files("foreword") / "models" / EMBEDDED))


def load_model(
    config: EngineConfig, progress: Callable[[str], None] = lambda _: None, *, named: Collection[str] = ()
) -> LoadedModel:
    """Load, check and fingerprint a model.

    `progress` is called with a message before each phase. `named`: the first 32 digits of fingerprints that stores have records
    of; if one is another model's, or this one's in an earlier build, `earlier` is computed. Raises ModelNotFound,
    ModelUnsupported or ConfigError.
    """
    source = config.model or str(embedded_model())
    device = _device(config.device)
    progress(f"reading {source}")
    settings = _read_config(source, config)
    _refuse_foreign(settings)
    dtype = _dtype(config.dtype, settings, device)
    model = _read_weights(source, settings, dtype, config)
    return prepare_model(model, settings, source, dtype, device, config, progress, named=named)


def prepare_model(
    model: Any,
    settings: Any,
    source: str,
    dtype: torch.dtype,
    device: torch.device,
    config: EngineConfig,
    progress: Callable[[str], None] = lambda _: None,
    *,
    named: Collection[str] = (),
) -> LoadedModel:
    """Check and fingerprint a Transformers model, in evaluation mode and with `attention.NAME` as its attention, and prepare
    it for the engine. `settings` are its configuration. Raises ModelUnsupported or ConfigError."""
    if config.quantization != "none":
        progress("quantizing the weights")
        _quantize(model, dtype, device)
    progress("fingerprinting the weights")
    fingerprint = fingerprint_model(model)
    earlier = earlier_fingerprint(model) if set(named) - {fingerprint.hex()[:32]} else b""
    model = model.to(device)
    if any(one.dim() == 3 and one.stride(1) * one.itemsize % 16 for one in model.parameters()):
        # PyTorch's grouped product of experts takes rows of whole 16 bytes.
        model.set_experts_implementation("eager")
    vocab_size = int(model.get_output_embeddings().weight.shape[0])
    recorder = _record(model, settings)
    kernels, inexact = open_kernels(config, device, progress)
    if device.type == "cpu":
        linear.replace_transposed(model)
    if kernels is not None and not inexact:
        inexact = batch_invariance.obstacle(model, recorder)
    inexact = _decided(config, inexact)
    trial = decoder.watch(model, recorder, vocab_size) if kernels is not None else None
    measured = None
    if device.type == "cpu":
        measured, inexact = _pack(model, config, recorder, kernels, inexact, progress)
    max_model_len = _max_model_len(settings.get_text_config(), recorder, config)
    decode = None
    if kernels is not None and trial is not None:
        decode = decoder.fuse(model, recorder, kernels, trial, max_model_len)
    triton = use_triton(config, device)
    if triton:
        decoder.fuse_norms(model)
    if not inexact:
        assert kernels is not None
        inexact = _decided(config, batch_invariance.prepare(model, kernels))
    windows = {layer: params.window for layer, params in recorder.params.items()}
    return LoadedModel(
        model=model,
        name=readable(config.served_model_name or Path(source).name or source),
        source=source,
        fingerprint=fingerprint,
        layers=group_layers(recorder.layouts, windows, max_model_len),
        kv_dtype=recorder.dtype,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        dtype=dtype,
        device=device,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        end_tokens=_end_tokens(model),
        sampling=_sampling(source) if config.generation_config == "model" else {},
        kernels=kernels,
        triton=triton,
        choice=_attention_choice(inexact, measured, recorder),
        decode=decode,
        backends=describe(model, measured),
        inexact=inexact,
        namespace=fingerprint,
        earlier=earlier,
    )


def _decided(config: EngineConfig, inexact: str) -> str:
    """Why the engine is not batch-invariant, in the words of its status; empty if it is. Raises ConfigError if it must be and
    cannot."""
    if config.batch_invariant == "off":
        return "engine.batch_invariant is off"
    if inexact and config.batch_invariant == "on":
        raise ConfigError(f"engine.batch_invariant is on (--batch-invariant), but it cannot be kept here: {inexact}")
    return inexact


def _quantize(model: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError where there are no kernels for it, and ModelUnsupported for a model without linear layers."""
    if device.type != "cpu":
        raise ConfigError("engine.quantization is int8, which needs a CPU")
    if not quantize(linear.packable(model)):
        raise ModelUnsupported("engine.quantization is int8, but this model has no plain linear layers")


def _attention_choice(inexact: str, measured: Measured | None, recorder: LayerRecorder) -> AttentionChoice | None:
    if not inexact:
        return AttentionChoice({})
    return None if measured is None else measured.attention_choice(recorder)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device is cuda, but torch sees no CUDA device here; use --device cpu")
    return device


def _read_config(source: str, config: EngineConfig) -> Any:
    check_model(source)
    try:
        return transformers.AutoConfig.from_pretrained(
            Path(source).expanduser() if Path(source).expanduser().is_dir() else source,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise ModelNotFound(f"cannot read a model configuration from {source!r}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refuse_foreign(settings: Any) -> None:
    """Refuse, by their configuration, families that would load without an error and compute a wrong result."""
    text = settings.get_text_config()
    if getattr(settings, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{settings.model_type} is an encoder-decoder model; Foreword runs decoder-only models")
    kinds = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    foreign = sorted(str(kind) for kind in kinds - _KNOWN_LAYERS)
    if foreign:
        raise ModelUnsupported(
            f"{settings.model_type} has layers of type {', '.join(foreign)}; paged KV holds only what full and sliding "
            "attention keep"
        )
    if getattr(text, "attention_chunk_size", None):
        raise ModelUnsupported(f"{settings.model_type} attends in chunks, which the attention interface does not say")


def _dtype(name: str, settings: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        return DTYPES[name]
    known = getattr(settings.get_text_config(), "dtype", None) or getattr(settings, "dtype", None)
    if known not in DTYPES.values() or (known == torch.float16 and device.type == "cpu"):
        return torch.float32
    assert isinstance(known, torch.dtype)
    return known


def _read_weights(source: str, settings: Any, dtype: torch.dtype, config: EngineConfig) -> Any:
    path = Path(source).expanduser()
    quiet = transformers.utils.logging
    was_shown = quiet.is_progress_bar_enabled()
    quiet.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path if path.is_dir() else source,
            config=settings,
            dtype=dtype,
            attn_implementation=attention.NAME,
            trust_remote_code=config.trust_remote_code,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        if isinstance(error, KeyError) and error.args == (attention.NAME,):
            raise ModelUnsupported(
                f"{settings.model_type} does not go through Transformers' attention interface, which the engine needs"
            ) from error
        raise ModelNotFound(f"cannot load the model {source!r}: {first_line(error)}") from error
    except (*FORWARD_ERRORS, ImportError) as error:
        raise ModelUnsupported(f"Transformers cannot build this {settings.model_type}: {first_line(error)}") from error
    finally:
        if was_shown:
            quiet.enable_progress_bar()
    return model.eval().requires_grad_(False)


def _record(model: Any, settings: Any) -> LayerRecorder:
    """The model's layers; refuses a model whose layers do not all use the attention interface."""
    try:
        recorder, keeps_rows = record_layers(model)
    except FORWARD_ERRORS as error:
        raise ModelUnsupported(
            f"{settings.model_type} does not run through paged attention: {first_line(error)}"
        ) from error
    found = len(recorder.layouts)
    expected = int(getattr(settings.get_text_config(), "num_hidden_layers", found))
    if found != expected:
        raise ModelUnsupported(
            f"{settings.model_type} has {expected} layers, but only {found} of them attend through the interface; "
            "the others keep state that paged KV does not hold"
        )
    if not keeps_rows:
        raise ModelUnsupported(f"{settings.model_type} does not take logits_to_keep, which the engine needs")
    return recorder


def open_kernels(
    config: EngineConfig, device: torch.device, progress: Callable[[str], None] = lambda _: None
) -> tuple[Kernels | None, str]:
    """The compiled kernels, if the configuration and this machine allow them; else why not, which the log says too. Raises
    ConfigError if `native` is configured and there are none."""
    if config.kernels in ("torch", "triton"):
        return None, f"engine.kernels is {config.kernels}"
    if device.type != "cpu":
        reason = f"they are for CPUs, and the model is on {device.type}"
    else:
        try:
            if is_compiled():
                progress("loading the compiled kernels")
            else:
                progress("compiling the kernels, which takes some seconds at the first start")
            return native.load(), ""
        except CannotBuild as error:
            reason = str(error)
    if config.kernels == "native":
        raise ConfigError(f"engine.kernels is native, but native kernels are not available: {reason}")
    if device.type == "cpu":
        log.warning("the native kernels are not in use (PyTorch's operators compute instead, slower): %s", reason)
    return None, f"the native kernels are not available: {reason}"


def use_triton(config: EngineConfig, device: torch.device) -> bool:
    """Whether Triton kernels compute attention: on CUDA, if there is Triton. Raises ConfigError if `triton` is configured
    and cannot be."""
    if config.kernels == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("engine.kernels is triton, but there is no package triton here")
        if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            raise ConfigError("engine.kernels is triton, which needs a GPU (or, for tests, TRITON_INTERPRET=1)")
        return True
    if device.type != "cuda" or config.kernels != "auto":
        return False
    found = importlib.util.find_spec("triton") is not None  # pragma: no cover - needs a GPU
    if not found:
        log.warning("there is no package triton: PyTorch's operators compute attention, much slower")
    return found


def _pack(
    model: Any,
    config: EngineConfig,
    recorder: LayerRecorder,
    kernels: Kernels | None,
    inexact: str,
    progress: Callable[[str], None],
) -> tuple[Measured | None, str]:
    """Give linear layers packed copies of their weights, within `linear_memory`. Returns what was measured to choose the
    kernels, nothing where the configuration names them, and `inexact`, which is what measurement and memory say too."""
    auto = config.linear_memory == "auto"
    budget = psutil.virtual_memory().available // 2 if auto else parse_bytes(config.linear_memory)
    siblings = linear.find_siblings(model, lambda: record_layers(model))
    groups = linear.groups(model, siblings)
    measured = None
    if config.kernels != "native":
        progress("choosing kernels")
        measured = measure(model, siblings, recorder, kernels)
    if not inexact:
        inexact = _decided(config, _too_costly(config, groups, budget, recorder, measured))
    progress("packing the weights")
    released = linear.replaceable(model, lambda: record_layers(model), FORWARD_ERRORS)
    times = measured.products if measured is not None and inexact else None
    linear.pack(model, budget, siblings, kernels, times, released)
    return measured, inexact


def _too_costly(
    config: EngineConfig,
    groups: Sequence[Sequence[nn.Linear]],
    budget: int,
    recorder: LayerRecorder,
    measured: Measured | None,
) -> str:
    """Why memory or time speak against batch invariance; empty if they do not."""
    if sum(linear.size_of(COMPILED, group) for group in groups) > budget:
        return "engine.linear_memory (--linear-memory) is too small for packed copies of all weights"
    lost, where = (0.0, "") if measured is None else measured.cost(groups, recorder)
    said = f"batch invariance costs {lost:.0%} of the speed of {where} here, as measured at load"
    if config.batch_invariant == "auto" and lost > _MOST_LOST:
        return said
    if lost > _WORTH_SAYING:
        log.warning("%s; engine.batch_invariant (--batch-invariant) off is faster", said)
    return ""


def trim_heap() -> None:
    """Give free memory back to the system, as that of weights that were replaced: glibc keeps pieces below 32 MiB otherwise."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _max_model_len(text: Any, recorder: LayerRecorder, config: EngineConfig) -> int:
    """The longest sequence that is computed right. Where the rotary embedding changes with the sequence length, KV of
    one length is wrong for another: such models are limited to the length up to which it does not change. A model that
    applies its sliding window in a mask only, not through the attention interface, is limited to the window: up to
    there it is full attention."""
    length = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    length = min(length, fixed_rope_length(text) or length)
    if has_window(text) and not any(params.window for params in recorder.params.values()):
        length = min(length, int(text.sliding_window))
    if config.max_model_len is not None:
        if config.max_model_len > length:
            raise ConfigError(
                f"engine.max_model_len is {config.max_model_len}, but the model supports only {length} tokens"
            )
        return config.max_model_len
    return int(length)


def has_window(text: Any) -> bool:
    """Whether the configuration says that at least one layer has a sliding window."""
    kinds = getattr(text, "layer_types", None)
    slides = "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    return bool(slides and getattr(text, "sliding_window", None))


def _end_tokens(model: Any) -> tuple[int, ...]:
    given = (getattr(one, "eos_token_id", None) for one in (model.generation_config, model.config))
    known = next((one for one in given if one is not None), ())
    return (int(known),) if isinstance(known, int) else tuple(int(token) for token in known)


def _sampling(source: str) -> dict[str, float]:
    """Sampling defaults of `generation_config.json`. Raises ConfigError for values that no request may have."""
    try:
        file = transformers.utils.cached_file(source, "generation_config.json", local_files_only=Path(source).is_dir())
        found = json.loads(Path(file).read_bytes())
    except (OSError, ValueError):  # there is none, or none that Transformers would read
        return {}
    if not isinstance(found, dict):
        return {}
    given = {name: found[name] for name in _SAMPLING if isinstance(found.get(name), int | float)}
    if given.get("top_k") == -1:
        del given["top_k"]
    try:
        SamplingParams(**given)
    except BadRequest as error:
        raise ConfigError(
            f"generation_config.json: {error.message}; use --generation-config openai to ignore it"
        ) from error
    return given
