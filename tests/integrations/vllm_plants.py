"""Changes of meaning that a new version of vLLM might bring, planted into the vLLM of this process before a model is loaded.

Each but the last leaves the configuration, the attributes of the layers, names and versions as they are, and vLLM consistent
with itself. Only what is computed, or how a block is packed, becomes something else.
"""

from __future__ import annotations

import dataclasses
from typing import Any


def rope_base() -> None:
    """Rotary embeddings turn by frequencies of another base: 2 % more."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    inner = RotaryEmbedding._compute_inv_freq
    RotaryEmbedding._compute_inv_freq = lambda self, base: inner(self, base * 1.02)


def one_layer() -> None:
    """The keys of one attention layer are 1 % longer."""
    from vllm.model_executor.layers.attention import Attention

    begin, forward = Attention.__init__, Attention.forward
    names: dict[str, None] = {}  # of layers; a process may make several models, one after the other

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        names[self.layer_name] = None

    def longer(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        planted = self.layer_name == list(names)[:2][-1]
        return forward(self, query, key * 1.01 if planted else key, value, *args, **kwargs)

    Attention.__init__, Attention.forward = __init__, longer


def packing() -> None:
    """The CPU backend's blocks have values before keys."""
    from vllm import _custom_ops as ops

    write, read = ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache

    def exchanged(key: Any, value: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> None:
        write(key, value, values, keys, *args, **kwargs)

    def attention(*args: Any, key_cache: Any, value_cache: Any, **kwargs: Any) -> Any:
        return read(*args, key_cache=value_cache, value_cache=key_cache, **kwargs)

    ops.cpu_attn_reshape_and_cache, ops.cpu_attention_with_kv_cache = exchanged, attention


def usual_kernels() -> None:
    """VLLM_BATCH_INVARIANT=1 replaces no operators: vLLM's CPU build lacks those of that mode, and does not start with it."""
    from vllm.model_executor.determinism import batch_invariant

    batch_invariant.init_batch_invariance = lambda: None


def norms() -> None:
    """RMS norms give values that are 1 % larger."""
    from vllm.model_executor.layers.layernorm import RMSNorm

    inner = RMSNorm.forward

    def larger(self: Any, x: Any, residual: Any = None, *args: Any, **kwargs: Any) -> Any:
        found = inner(self, x, residual, *args, **kwargs)
        return (found[0] * 1.01, found[1]) if isinstance(found, tuple) else found * 1.01

    RMSNorm.forward = larger


def load_format() -> None:
    """A load format `planted`, as a plug-in would register it, gives the embeddings of a few tokens other values."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader("planted")
    class Planted(DefaultModelLoader):  # type: ignore[misc]
        def __init__(self, load_config: Any) -> None:
            super().__init__(dataclasses.replace(load_config, load_format="safetensors"))

        def load_weights(self, model: Any, model_config: Any) -> None:
            super().load_weights(model, model_config)
            model.model.embed_tokens.weight.data[:40] *= 1.5


PLANTS = {one.__name__: one for one in (rope_base, one_layer, packing, usual_kernels, norms, load_format)}
