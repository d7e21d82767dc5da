"""Whose pages are whose: the namespace of an SGLang server, and the layouts of its host pools.

Nothing tells a storage backend of SGLang what the model computes, and it cannot measure it as under vLLM. So everything counts
that is not known to leave KV alone: the files of the weights and of their configuration, adapters, every option that is not its
default (except those in `_NEUTRAL`), and the versions of SGLang, Transformers and torch. What is not equal is a miss.

The layout of a pool is what SGLang has in memory: class and order of the pool, shape and dtype of a page, the layers, and which
rank of how many has it.
"""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any, Final

import sglang.version
import torch
import transformers
from msgspec.structs import fields
from sglang.srt.runtime_context import get_server_args
from sglang.srt.server_args import ServerArgs

from foreword.blocks.layout import ITEM_BYTES, Layout
from foreword.errors import ConfigError, ModelUnsupported
from foreword.integrations.adapter_files import adapter_files, digest_of_files
from foreword.integrations.model_identity import weights_digest
from foreword.integrations.weight_files import model_folder
from foreword.model_content import CODE_KEYS, IGNORED_KEYS, plain_config

_CONFIGS: Final = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json")
# Keys of the configuration that say nothing. `--dtype auto` follows the dtype, and nothing else says which class computes.
_IGNORED: Final = IGNORED_KEYS - CODE_KEYS - {"dtype", "torch_dtype"}
# Options that change no KV: where a server listens, how it batches and schedules, memory, logs, tokens and answers; and those
# whose effect is in the layout or in the digests of files.
_NEUTRAL: Final = re.compile(
    r"(admin_)?api_key|allow_auto_truncate|allowed_media_domains|base_gpu_id|chat_template|chunked_prefill_size|"
    r"completion_template|cuda_graph_\w+|custom_sigquit_handler|decode_log_interval|default_chat_template_kwargs|"
    r"delete_ckpt_after_loading|dist_\w+|download_dir|enable_(cache_report|cudagraph_gc|hierarchical_cache|metrics\w*|mixed_chunk|"
    r"request_time_stats_logging|trace|strict_thinking)|engine_info_bootstrap_port|export_metrics\w+|extra_metric_labels|"
    r"fastapi_root_path|file_storage_path|forward_pass_metrics\w+|gated_launch_port|gc_\w+|gpu_id_step|grammar_backend|grpc_\w+|"
    r"hf_chat_template_name|hicache_\w+|host|http2_\w+|kv_events_config|load_balance_method|load_format|load_snapshot\w+|log_\w+|lora_paths|"
    r"max_\w+|mem_fraction_static|min_free_slots_delay|model_path|nccl_port|nnodes|node_rank|numa_node|otlp_\w+|page_size|port|"
    r"preferred_sampling_params|prefill_(max_requests|decode_interval\w*|delayer_\w+)|radix_\w+|random_seed|reasoning_parser|"
    r"return_(input|output)_ids|revision|sampling_\w+|schedule_\w+|scheduler_recv_interval|served_model_name|show_time_cost|"
    r"sidecar\w*|skip_server_warmup|sleep_on_idle|smg_\w+|soft_watchdog_timeout|speculative_draft_model_(path|revision)|ssl_\w+|"
    r"stat_loggers|stream_\w+|swa_full_tokens_ratio|tokenizer_\w+|tool_\w+|uvicorn_\w+|warmups|watchdog_timeout|"
    r"weight_loader_\w+|_\w+"
)
# Pools whose pages are the same on all ranks where SGLang says that the model's are.
_REPLICATED: Final = (
    "MLATokenToKVPoolHost",
    "DSAIndexerPoolHost",
    "DeepSeekV4PagedHostPool",
    "DeepSeekV4StateHostPool",
)


def server_namespace(fingerprint: str) -> bytes:
    """32 bytes, equal for servers that compute the same KV with the same program.

    `fingerprint` (hexadecimal) replaces the digest of the weights. Raises ConfigError, ModelUnsupported.
    """
    try:
        server = get_server_args().resolved_dict()
    except ValueError as error:  # not in the process of a server
        if not fingerprint:
            raise ConfigError(
                "there is no SGLang server whose weights could be identified: give a 'fingerprint'"
            ) from error
        server = None
    digest = sha256(b"foreword/sglang\x00")
    versions = [sglang.version.__version__, transformers.__version__, torch.__version__]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    facts: dict[str, object] = {"versions": versions, "device": device}
    if server is None:
        digest.update(bytes.fromhex(fingerprint))
    else:
        digest.update(_files(server, fingerprint))
        facts["options"] = options(server)
    digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    return digest.digest()


def options(server: dict[str, Any]) -> dict[str, object]:
    """The options of a server, as SGLang has resolved them, that may change KV and are not their defaults."""
    defaults = {one.name: one.default for one in fields(ServerArgs)}
    return {
        name: value
        for name, value in server.items()
        if not _NEUTRAL.fullmatch(name) and value != defaults.get(name)
    }  # fmt: skip


def _files(server: dict[str, Any], fingerprint: str) -> bytes:
    """Digests of the model, of a draft model and of the adapters that the server starts with. SGLang gives an adapter that is
    loaded later a random name, so its pages are not found again."""
    if server["trust_mm_content_hashes"]:
        raise ConfigError(
            "with --trust-mm-content-hashes clients name the content of images, and one could get another's pages: remove it"
        )
    if fingerprint:
        digest = bytes.fromhex(fingerprint)
    elif server["load_format"] == "dummy":
        raise ModelUnsupported(
            "dummy weights are random: give a 'fingerprint' in --hicache-storage-backend-extra-config"
        )
    else:
        digest = _model(server["model_path"], server["revision"], server["load_format"], server["trust_remote_code"])
    if server["speculative_draft_model_path"] not in (None, server["model_path"]):
        digest += _model(
            server["speculative_draft_model_path"],
            server["speculative_draft_model_revision"],
            server["load_format"],
            server["trust_remote_code"],
        )
    for one in server["lora_paths"] or ():
        path = one["lora_path"] if isinstance(one, dict) else str(one).rpartition("=")[2]
        try:
            # Its requests are named after its path.
            digest += sha256(path.encode()).digest() + digest_of_files(adapter_files(model_folder(path, None)))
        except OSError as error:
            raise ModelUnsupported(f"the files of the adapter {path!r} cannot be read: {error}") from error
    return digest


def _model(path: str, revision: str | None, load_format: str, code: bool) -> bytes:
    folder = model_folder(path, revision)
    config = {name: json.loads((folder / name).read_text("utf-8")) for name in _CONFIGS if (folder / name).is_file()}
    plain = {name: plain_config(found, _IGNORED) for name, found in config.items()}
    found = weights_digest(folder, load_format, code=code)
    return found + sha256(json.dumps(plain, sort_keys=True).encode()).digest()


def page_layout(host: Any, name: str, namespace: bytes, config: Any) -> Layout:
    """The layout of the pages of one host pool. `config`: SGLang's `HiCacheStorageConfig`. Raises ConfigError."""
    kinds = [one.__name__ for one in type(host).__mro__]
    replicated = config.is_mla_model and any(one in kinds for one in _REPLICATED)
    try:
        flat = host.get_dummy_flat_data_page()
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"pages of {kinds[0]} cannot be stored; choose --hicache-mem-layout page_first: {error}"
        ) from error
    shape = tuple(host.get_data_page(0, flat=False).shape) if flat.numel() else ()
    facts = {
        "pool": kinds[0],
        "order": host.layout,
        "shape": list(shape),
        "layers": [getattr(host, "start_layer", 0), getattr(host, "end_layer", 0)],
        "format": getattr(host, "storage_format_tag", None),
        "stages": [config.pp_rank, config.pp_size, config.attn_cp_rank, config.attn_cp_size],
        "parts": [config.dcp_rank, config.dcp_size],
    }
    dtype = str(flat.dtype).removeprefix("torch.")
    return Layout(
        namespace,
        int(host.page_size),
        (),
        dtype if dtype in ITEM_BYTES else "uint8",
        order="sglang " + json.dumps(facts | {"dtype": dtype}, sort_keys=True),
        shard=(0, 1) if replicated else (int(config.tp_rank), int(config.tp_size)),
        group=name,
        opaque_bytes=flat.numel() * flat.element_size(),
    )
