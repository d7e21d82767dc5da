"""A model by its content: its tensors, and its configuration without what says nothing about KV.

The embedded engine, Transformers, vLLM and SGLang have this in common. Where the tensors are (in memory, in which files) is no
part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
import xxhash

# Keys of config.json that say nothing about KV: names, tools, and what a generation or a head behind all KV does.
IGNORED_KEYS: Final = frozenset({
    "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "_attn_implementation", "architectures",
    "auto_map", "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class",
    "transformers.js_config", "unsloth_version", "unsloth_fixed", "gradient_checkpointing", "torchscript", "return_dict",
    "output_attentions", "output_hidden_states", "initializer_range", "classifier_dropout", "attention_dropout",
    "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob", "attn_pdrop", "embd_pdrop", "resid_pdrop",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
    "bad_words_ids", "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "exponential_decay_length_penalty", "remove_invalid_values", "prefix", "generation_config",
})  # fmt: skip
# Keys of those that say which code computes: they count where nothing else names the code.
CODE_KEYS: Final = frozenset({"architectures", "auto_map"})


class TensorContent(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: `digest` is XXH3-128 of its bytes in row-major order, 16 bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: bytes


def digest_of_tensors(tensors: Iterable[TensorContent]) -> bytes:
    """32 bytes: SHA-256 over tensors in this order."""
    digest = hashlib.sha256(b"foreword/tensors\x00")
    for one in tensors:
        part = json.dumps([one.name, one.dtype, one.shape]).encode()
        digest.update(len(part).to_bytes(4, "little") + part + one.digest)
    return digest.digest()


def tensor_content(name: str, tensor: Any) -> TensorContent:
    """A tensor of torch in memory."""
    import torch

    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    shape = tuple(int(size) for size in tensor.shape)
    return TensorContent(name, str(tensor.dtype).removeprefix("torch."), shape, xxhash.xxh3_128_digest(data))


def is_config(key: str) -> bool:
    """Whether a key of a configuration holds that of a part of the model, in which the same keys say nothing."""
    return key.endswith("config")


def plain_config(config: Mapping[str, Any], ignored: frozenset[str] = IGNORED_KEYS) -> dict[str, Any]:
    """A configuration without the keys that say nothing about KV, also in the configurations of parts of the model."""
    return {
        key: plain_config(value, ignored) if isinstance(value, Mapping) and is_config(key) else value
        for key, value in config.items()
        if key not in ignored
    }
