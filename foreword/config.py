"""Configuration: one frozen dataclass per section, read from a TOML file, the environment and flags.

Flags override the environment, the environment overrides the file. The file has a table per section (`[engine]`,
`[server]`, ...). An environment variable is named after section and key: `FOREWORD_ENGINE_BLOCK_SIZE=16`. An unknown key or a
wrong value is an error that says what was expected.

The docstring of a key is the help text of its flag. Keys with `repr=False` are secret or may contain a secret: neither the
`repr` of a configuration nor an error message shows their values. A secret may be written `file:PATH`, so that it is neither on
the command line nor in the environment.
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import math
import os
import re
import tempfile
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, TypeVar, cast

from foreword.errors import ConfigError, ModelNotFound, StoreConfigError, did_you_mean, reason_of

T = TypeVar("T")

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
ENV_PREFIX = "FOREWORD_"
# Text, escapes, roles and tools. A token of text has about four bytes, a token id up to eight.
_BODY_BYTES_PER_TOKEN = 64
# As browsers send it: in lower case, without a path.
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
ROLES = ("prefill", "decode", "both")
KV_MEMORY_FORMS = "write auto, a size such as 4GiB, or a number of tokens such as 65536 tokens"


def parse_bytes(text: str, where: str = "") -> int:
    """`"4GiB"`, `"500MB"`, `"4g"` or `"1048576"` as a number of bytes. Raises ConfigError, which names the key `where`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        name = f"{where}: " if where else ""
        raise ConfigError(f"{name}{text!r} is not a size in bytes; write for example 4GiB, 500MB or 1048576")
    # Exact for any size: a float could overflow or lose bytes.
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# Keys with a rule: `_check` applies it.


def _checked(default: T, rule: str, accepts: Callable[[Any], bool]) -> T:
    """A key whose value, unless it is None, must be as `rule` says."""
    return field(default=default, metadata={"rule": rule, "accepts": accepts})


def _at_least(low: int, default: T) -> T:
    return _checked(default, f"at least {low}", lambda value: value >= low)


def _between(low: float, high: float, default: T) -> T:
    return _checked(default, f"between {low} and {high}", lambda value: low <= value <= high)


def _positive(default: float) -> float:
    return _checked(default, "more than 0", lambda value: 0 < value < math.inf)


def _not_negative(default: float) -> float:
    return _checked(default, "0 or more", lambda value: 0 <= value < math.inf)


def _one_of(choices: tuple[str, ...], default: T) -> T:
    return _checked(default, f"{', '.join(choices[:-1])} or {choices[-1]}", lambda value: value in choices)


def _check(section: str, config: Any) -> None:
    """Apply the rules of a section's keys. Raises ConfigError."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if value is not None and "rule" in item.metadata and not item.metadata["accepts"](value):
            raise ConfigError(f"{section}.{item.name} must be {item.metadata['rule']}, not {value!r}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine: model, device, KV memory, and the size of steps.

    Attributes:
        model: folder or Hugging Face name of the model; by default the embedded model.
        served_model_name: model name in the API; by default the last part of `model`.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: `auto` (CUDA if available), `cpu`, `cuda` or `cuda:N`.
        kv_memory: memory for KV blocks: `auto`, a size (`4GiB`) or a number of tokens (`65536 tokens`).
        block_size: tokens per block.
        max_model_len: longest prompt plus output in tokens; by default the model's.
        max_batch_tokens: maximum number of tokens computed in a step; longer prompts are prefilled in chunks.
        max_num_seqs: maximum number of sequences in a step.
        reserve: share of the blocks that admission of new requests leaves free for the growth of running ones.
        lookahead_blocks: extra blocks to allocate per sequence while enough are free, so that its blocks are consecutive.
        enable_prefix_caching: reuse cached blocks between requests.
        partial_reuse: also reuse partly filled blocks, by copying them.
        shared_prefix_attention: read a prefix that several decoding sequences share once per step.
        threads: CPU threads for computation; by default the number of cores.
        linear_memory: on CPUs, memory for packed copies of the weights, which replace them: `auto` (at most half of the free
            memory), a size, or `0`.
        kernels: `native` (compiled from C++ at first start), `torch` (PyTorch's operators), `triton` (on CUDA), or `auto`
            (Triton on CUDA; on CPUs for each shape the faster of native and torch, measured at the first start).
        quantization: `none`, or `int8`: on CPUs, weights of linear layers as 8-bit integers with one scale for each output.
            KV is not shared with the unquantized model.
        batch_invariant: compute each token's KV and logits with the same bits in whatever chunks and batch, so that a hit
            equals the computation bit for bit: `auto` (wherever the engine can keep it: on CPUs, by the compiled kernels), `on`
            (an error where it cannot be kept) or `off` (the fastest kernels; KV is shared with other processors and builds).
        self_check: compare the engine with the model's own forward pass at start, and refuse a model that differs.
        trust_remote_code: run Python code that a checkpoint contains.
        generation_config: sampling where a request says nothing: `model` (temperature, top_p, top_k, min_p and
            repetition_penalty of the model's generation_config.json) or `openai` (temperature 1 and no filters).
        seed: seed for requests without one; by default random.
        history_tokens: tokens of recent prompts kept to explain cache misses in cache reports.
        report_other_tenants: let a cache report say that another tenant has a prefix cached. This reveals that it does.
        audit_every: recompute one prefix hit in N while the engine is idle, and compare its KV; 0 for none.
        audit_budget: share of the time that audits may take.
        audit_reports: folder for a report of each hit that differs.
        audit_evidence: put the tokens and the wrong KV into these reports, for `foreword audit rerun`. Both reveal the prompt.
    """

    model: str | None = None
    served_model_name: str | None = None
    dtype: str = _one_of(("auto", "float32", "bfloat16", "float16"), "auto")
    device: str = _checked(
        "auto", "auto, cpu, cuda or cuda:N", lambda value: re.fullmatch(r"auto|cpu|cuda(:\d+)?", value) is not None
    )
    kv_memory: str = "auto"
    block_size: int = _at_least(1, 16)
    max_model_len: int | None = _at_least(2, None)
    max_batch_tokens: int = _at_least(1, 512)
    max_num_seqs: int = _at_least(1, 64)
    reserve: float = _checked(0.01, "a share of the blocks, from 0 to below 1", lambda value: 0 <= value < 1)
    lookahead_blocks: int = _at_least(0, 4)
    enable_prefix_caching: bool = True
    partial_reuse: bool = True
    shared_prefix_attention: bool = True
    threads: int | None = _at_least(1, None)
    linear_memory: str = "auto"
    kernels: str = _one_of(("auto", "native", "torch", "triton"), "auto")
    quantization: str = _one_of(("none", "int8"), "none")
    batch_invariant: str = _one_of(("auto", "on", "off"), "auto")
    self_check: bool = True
    trust_remote_code: bool = False
    generation_config: str = _one_of(("model", "openai"), "model")
    seed: int | None = None
    history_tokens: int = _at_least(0, 1 << 20)
    report_other_tenants: bool = False
    audit_every: int = _at_least(0, 0)
    audit_budget: float = _between(0.0, 1.0, 0.1)
    audit_reports: str | None = None
    audit_evidence: bool = False

    def __post_init__(self) -> None:
        _check("engine", self)
        self.kv_size()
        if self.linear_memory != "auto":
            parse_bytes(self.linear_memory, "engine.linear_memory (--linear-memory)")

    def kv_size(self) -> tuple[int, Literal["bytes", "tokens"]] | None:
        """`kv_memory` as a number of bytes or tokens; None for `auto`. Raises ConfigError."""
        text = self.kv_memory.strip()
        if text == "auto":
            return None
        tokens = text.endswith("tokens")
        number = text.removesuffix("tokens").strip().replace("_", "").replace(",", "")
        try:
            if (size := int(number) if tokens else parse_bytes(text)) < 1:
                raise ValueError
            return size, "tokens" if tokens else "bytes"
        except (ConfigError, ValueError):
            raise ConfigError(f"engine.kv_memory (--kv-memory) is {text!r}; {KV_MEMORY_FORMS}") from None


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The HTTP server.

    Attributes:
        host: address to listen on; 0.0.0.0 for all interfaces.
        port: port to listen on; 0 takes a free one.
        allowed_hosts: names under which clients may reach a server without any keys, for a name with a dot that others could
            register (against DNS rebinding); `*` for all. Addresses, short names and the server's own are always allowed.
        allowed_origins: origins of web pages that may send requests and read the answers, such as `https://chat.example.org`;
            `*` for all. By default browsers let no page of another address do so.
        api_keys: accepted API keys, each as `KEY` or `TENANT=KEY`; without any, no key is required and there is one tenant.
        api_key_file: file with one `KEY` or `TENANT=KEY` per line; `#` starts a comment.
        max_queue: maximum number of requests that wait for admission; further requests are answered with status 429.
        drain_seconds: seconds that running requests may take after SIGTERM.
        log_level: lowest level of log lines: debug, info, warning or error.
        tenant_secret: secret from which each tenant's cache salt is derived; by default random, different for each server.
        role: `prefill` (computes prompts for others), `decode` (takes prompts computed by others, and migrated requests) or
            `both`; each listens for transfers at --transfer-bind. By default the server works alone.
        admin_key: key for draining the server and for migrating requests of all tenants; required for that if there are API
            keys.
        drain_to: URLs of servers to which this one migrates its requests when it shuts down.
        peers: other servers that a request may name for prefill or migration: `HOST`, `HOST:PORT`, a URL, `*.DOMAIN`, a
            network such as `10.0.0.0/8`, `*`, or `unix:/FOLDER`. Those in drain_to and of `peer://` stores are always allowed,
            and without keys any port of this host.
        otlp_endpoint: URL of an OpenTelemetry collector (OTLP over HTTP, such as http://collector:4318) that gets traces; by
            default there are none. OpenTelemetry's variables set the rest (OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME).
        router_key: key of a router that authenticates callers and names their cache salts.
        kv_events: address to publish KV events on, in vLLM's format, such as `tcp://127.0.0.1:5557` (`*` for all interfaces,
            port 0 for a free one). With router_key they are encrypted for that router; without it, other addresses than
            loopback need kv_events_open.
        kv_events_replay: address for subscribers that ask for missed events; by default the port after that of kv_events.
        kv_events_open: publish KV events in plain text although other hosts can read them, for a network that keeps others
            away. They contain the token ids of all prompts.
        record: new file for a trace of the traffic without text, for `foreword simulate`.
        record_salt: salt of the recorded hashes; recordings with equal salts can be combined. By default random.
        usage_ledger: file to which each request of a tenant adds a line of JSON with its tokens, for `foreword bill`.
        quotas: limits of a tenant as `TENANT requests=N tokens=N concurrent=N`: requests and tokens per minute, and requests
            at a time; TENANT is `*` for all others. By default there are none.
        max_body: largest body of a request: a size, or `auto` for 64 bytes per token of the longest prompt, at least 1MiB, and
            at a router in front of other servers than Foreword's 64MiB with images.
        unknown_fields: fields of a body that have no effect: `report` names them in the answer's header `x-foreword-ignored`,
            `refuse` answers 400, `ignore` says nothing.
        max_connections: maximum number of connections; at the limit an idle one is closed for a new one.
        head_timeout: seconds that a client may take to send the head of a request.
        body_timeout: seconds that a client may take to send a body, or longer if it sends at least 16 KiB per second.
        write_timeout: seconds that a client may read nothing of its response before its connection is closed.
        keep_alive: seconds that an idle connection stays open.
        stream_keep_alive: seconds without an event after which a stream sends a comment, so that proxies keep it open.
        tool_parser: how the model writes tool calls: `auto` (as its chat template does), `none`, hermes, llama3_json, mistral,
            harmony, qwen3_coder, or a format of an installed package.
        reasoning_parser: how the model writes reasoning: `auto`, `none`, think or mistral_think.
        response_memory: memory for responses that clients may continue (`/v1/responses` with `store`); one tenant uses at most
            a quarter of it.
        response_ttl: seconds that a stored response is kept after its last use.
    """

    host: str = "127.0.0.1"
    port: int = _between(0, 65535, 8000)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    max_queue: int = _at_least(1, 256)
    drain_seconds: float = _not_negative(30.0)
    log_level: str = _one_of(("debug", "info", "warning", "error"), "info")
    tenant_secret: str | None = field(default=None, repr=False)
    role: str | None = _one_of(ROLES, None)
    admin_key: str | None = field(default=None, repr=False)
    drain_to: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    router_key: str | None = field(default=None, repr=False)
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_open: bool = False
    record: str | None = None
    record_salt: str | None = field(default=None, repr=False)
    usage_ledger: str | None = None
    quotas: tuple[str, ...] = ()
    max_body: str = "auto"
    unknown_fields: str = _one_of(("ignore", "report", "refuse"), "report")
    max_connections: int = _at_least(1, 4096)
    head_timeout: float = _positive(10.0)
    body_timeout: float = _positive(30.0)
    write_timeout: float = _positive(60.0)
    keep_alive: float = _positive(65.0)
    stream_keep_alive: float = _positive(15.0)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    response_memory: str = "64MiB"
    response_ttl: float = _positive(86_400.0)

    def __post_init__(self) -> None:
        _check("server", self)
        if self.body_limit(1) < 1:
            raise ConfigError("server.max_body (--max-body) must be at least one byte")
        if self.tenant_secret is not None:
            check_secret("server.tenant_secret", self.tenant_secret)
        for key, text in (("admin_key", self.admin_key), ("router_key", self.router_key)):
            if text is not None:
                self.check_key(f"server.{key}", text)
        for origin in self.allowed_origins:
            if not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"{origin!r} is not an origin; write it as https://chat.example.org (--allowed-origins)"
                )
        parse_bytes(self.response_memory, "server.response_memory (--response-memory)")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ConfigError("server.kv_events_replay needs server.kv_events")

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can connect."""
        return is_loopback(self.host)

    def check_key(self, key: str, text: str) -> None:
        """Raises ConfigError for a key of callers that can be guessed, where other hosts can try. On the loopback interface
        keys only tell callers apart."""
        if not self.is_local and len(text) < _SHORTEST_SECRET:
            raise ConfigError(
                f"{key} must have at least {_SHORTEST_SECRET} characters where other hosts can connect (--host {self.host}); "
                "create one with `openssl rand -hex 32`"
            )

    def body_limit(self, max_model_len: int) -> int:
        """The largest body in bytes for prompts of up to `max_model_len` tokens."""
        if self.max_body != "auto":
            return parse_bytes(self.max_body, "server.max_body (--max-body)")
        return max(max_model_len * _BODY_BYTES_PER_TOKEN, 1 << 20)


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Kept prefixes: named ones, and those that requests keep (cache control).

    Attributes:
        budget: KV memory that may be kept: a size (`1GiB`) or a share of the pool (`25%`).
        retain_budget: what cache control may keep of it, where named prefixes leave as much: a size or a share of the pool.
        retain_tenant_share: share of retain_budget that one tenant may keep.
        retain_entries: maximum number of prefixes that a tenant keeps with cache control.
        retain_seconds: longest time to live of a kept prefix, counted from its last use.
    """

    budget: str = "50%"
    retain_budget: str = "25%"
    retain_tenant_share: float = _between(0.0, 1.0, 1.0)
    retain_entries: int = _between(1, 1024, 128)
    retain_seconds: float = _positive(86_400.0)

    def __post_init__(self) -> None:
        _check("prefixes", self)
        self.budget_bytes(0)
        self.retain_bytes(0)

    def budget_bytes(self, pool_bytes: int) -> int:
        """The budget of all that is kept in a pool of `pool_bytes`."""
        return _share_of(self.budget, pool_bytes, "budget")

    def retain_bytes(self, pool_bytes: int) -> int:
        """What cache control may keep of it."""
        return _share_of(self.retain_budget, pool_bytes, "retain_budget")


def _share_of(text: str, pool_bytes: int, key: str) -> int:
    """A size, or a share of the pool, in bytes. Raises ConfigError."""
    if not text.endswith("%"):
        return parse_bytes(text, f"prefixes.{key} (--prefix-{key.replace('_', '-')})")
    try:
        share = float(text[:-1])
    except ValueError:
        share = -1.0
    if not 0 <= share <= 90:
        raise ConfigError(f"prefixes.{key} must be between 0% and 90% of the pool, not {text!r}")
    return int(pool_bytes * share / 100)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Stores for blocks off the device.

    Attributes:
        urls: URLs of stores, fastest first, such as `memory://?size=4GiB` and `disk:///var/cache/foreword?size=200GiB`.
        staging: host memory for copies between the device and the stores, half of it for the write queue: 1 GiB with a GPU,
            which fills blocks faster than stores take them, and 256 MiB without if it is `auto`. A GPU has a copy of it.
        lookup_timeout: seconds that a request waits for a lookup in remote stores, or a tenth of the time to compute the prompt
            if that is longer. Memory and disks, which answer late only on a busy machine, have 8 times as long, or the whole
            time to compute the prompt.
        load_timeout: maximum seconds for loading blocks; loading ends earlier if computing them is faster.
        flush_seconds: seconds that the process waits at exit for blocks that are not written yet.
        integrity_secrets: secrets that authenticate what is written to shared stores, each as `ID:SECRET` with a number: the
            first signs, all verify. What is not signed with one of them is refused.
    """

    urls: tuple[str, ...] = field(default=(), repr=False)  # they may contain passwords
    staging: str = "auto"
    lookup_timeout: float = _positive(0.25)
    load_timeout: float = _positive(30.0)
    flush_seconds: float = _not_negative(20.0)
    integrity_secrets: tuple[str, ...] = field(default=(), repr=False)

    def integrity_keys(self) -> list[tuple[int, str]]:
        """The numbers and texts of `integrity_secrets`. Raises ConfigError."""
        found = []
        for entry in self.integrity_secrets:
            number, _, text = entry.partition(":")
            if not number.isascii() or not number.isdecimal() or not 0 < int(number[:12]) < 1 << 31:
                raise ConfigError("store.integrity_secrets are written ID:SECRET, with a number from 1 as ID")
            check_secret("store.integrity_secrets", text)
            found.append((int(number), text))
        if len({number for number, _ in found}) < len(found):
            raise ConfigError("store.integrity_secrets has a number twice")
        return found

    def __post_init__(self) -> None:
        self.integrity_keys()
        if not self.staging_bytes("cpu"):
            raise ConfigError("store.staging (--store-staging) must have room for a block")
        _check("store", self)

    def staging_bytes(self, device: str) -> int:
        """Bytes of `staging` for KV on a device of this type."""
        if self.staging == "auto":
            return (256 << 20) if device in ("cpu", "none") else (1 << 30)
        return parse_bytes(self.staging, "store.staging (--store-staging)")


@dataclass(frozen=True, slots=True)
class EncryptionConfig:
    """Encryption of blocks and records in stores that outlive the process. Needs stores, a key store and master keys.

    Attributes:
        key_store: folder, or URL of a store, that keeps each tenant's data key, encrypted by a master key; without it nothing
            is encrypted. It is none of the stores for blocks, and has no copies that outlive a deletion.
        master_keys: keys that encrypt data keys, each as `ID:KEY`, 64 hexadecimal digits: the first encrypts, all decrypt.
        master_key_file: file with one such entry per line; it is read again when a data key names an unknown one.
        master_key_command: command that prints such lines, for a key management service; it is run when they are needed.
        read_plain: also read blocks and records that are not encrypted, while encryption is switched on in a fleet.
        check_seconds: seconds after which a server looks again whether a data key exists.
        outage_seconds: seconds for which data keys are used while the key store does not answer.
    """

    key_store: str | None = field(default=None, repr=False)  # it may contain a password
    master_keys: tuple[str, ...] = field(default=(), repr=False)
    master_key_file: str | None = None
    master_key_command: str | None = field(default=None, repr=False)
    read_plain: bool = False
    check_seconds: float = _between(0.01, 60.0, 1.0)
    outage_seconds: float = _between(0.0, 3600.0, 30.0)

    def __post_init__(self) -> None:
        sources = [one for one in (self.master_keys, self.master_key_file, self.master_key_command) if one]
        if len(sources) != (1 if self.key_store else 0):
            raise ConfigError(
                "encryption needs key_store, and exactly one of master_keys, master_key_file and master_key_command"
            )
        _check("encryption", self)

    @classmethod
    def from_environment(cls, given: Mapping[str, Any] = MappingProxyType({})) -> EncryptionConfig:
        """The section as FOREWORD_ENCRYPTION_* give it, for tools and connectors without a configuration file. What is given
        here has precedence. Raises ConfigError."""
        prefix = f"{ENV_PREFIX}ENCRYPTION_"
        values = {name[len(prefix) :].lower(): text for name, text in os.environ.items() if name.startswith(prefix)}
        return build(cls, "encryption", {**values, **given})


ALL_RIGHTS = frozenset({"pull", "push", "get"})
_SHORTEST_SECRET = 16


def is_loopback(host: str) -> bool:
    """Whether it is a name or address of the loopback interface."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class SharedSecret:
    """A secret that peers may prove, and what a peer that proves it may begin."""

    text: str = field(repr=False)
    rights: frozenset[str] = ALL_RIGHTS

    @classmethod
    def parse(cls, entry: str) -> SharedSecret:
        """`SECRET` or `RIGHTS=SECRET`; RIGHTS are `pull`, `push` and `get`, joined by `+`."""
        rights, equals, text = entry.partition("=")
        names = frozenset(rights.split("+"))
        return cls(text, names) if equals and names <= ALL_RIGHTS else cls(entry)


def check_secret(key: str, text: str) -> None:
    """Raises ConfigError for a secret that can be guessed, without repeating it."""
    if len(text) < _SHORTEST_SECRET:
        raise ConfigError(
            f"{key} must have at least {_SHORTEST_SECRET} characters; create one with `openssl rand -hex 32`"
        )


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """KV transfer between instances.

    Attributes:
        bind: address to listen on: `host:port` (port 0 takes a free one) or `unix:/path`. Other addresses than loopback
            require a secret.
        advertise: address under which other instances reach this one; by default the one in bind.
        secret: secret shared by all instances, at least 16 characters; without one, only peers on this host are accepted.
        secret_file: file with the secret, one per line: the first is `secret`, further ones are `previous_secrets`, and
            those written `RIGHTS=SECRET` are `limited_secrets`.
        previous_secrets: secrets that are accepted besides `secret`, while it is being changed on all instances.
        limited_secrets: secrets of peers that may do less, each as `RIGHTS=SECRET`: they may begin a remote prefill (`pull`),
            a migration to this instance (`push`) or a read of its blocks (`get`), for example `get=...` or `pull+get=...`.
        tls: encrypt connections over TCP with TLS 1.3; all instances or none. It needs a secret, and where this instance
            listens a certificate.
        tls_certificate_file: certificate in PEM; it may be self-signed, because the secret authenticates it.
        tls_key_file: its private key in PEM; by default in the same file.
        links: links to use for payloads, of shm and tcp: the first one that both sides support, in the order of the side
            that connects. tcp is required and ends the list.
        ring: receive buffer per connection and direction; also the limit for the size of a part (half of it with shared
            memory).
        queue: bytes per connection that may wait to be sent.
        connect_timeout: seconds to establish a connection.
        answer_timeout: seconds for a peer to accept or refuse a transfer.
        progress_timeout: seconds without progress after which a transfer or a stalled link ends.
        lease_seconds: seconds that blocks are kept for a peer that gives no sign of life.
        beat_seconds: interval of heartbeats on idle connections; a connection ends after five missed ones.
        max_transfers: maximum number of transfers at a time; further ones are refused.
        max_connections: maximum number of connections at a time; further ones are refused.
        min_tokens: prompts with fewer tokens to compute are prefilled locally, even if a router asks for remote prefill.
    """

    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    previous_secrets: tuple[str, ...] = field(default=(), repr=False)
    limited_secrets: tuple[str, ...] = field(default=(), repr=False)
    tls: bool = False
    tls_certificate_file: str | None = None
    tls_key_file: str | None = None
    links: tuple[str, ...] = ("shm", "tcp")
    ring: str = "32MiB"
    queue: str = "32MiB"
    connect_timeout: float = _between(0.05, 3600, 5.0)
    answer_timeout: float = _between(0.05, 3600, 10.0)
    progress_timeout: float = _between(0.05, 3600, 30.0)
    lease_seconds: float = _between(0.05, 3600, 60.0)
    beat_seconds: float = _between(0.05, 3600, 2.0)
    max_transfers: int = _at_least(1, 256)
    max_connections: int = _at_least(1, 64)
    min_tokens: int = _at_least(1, 64)

    def __post_init__(self) -> None:
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError("give transfer.secret or transfer.secret_file, not both")
        for secret in self.shared_secrets():
            check_secret("transfer.secret", secret.text)
        if any(SharedSecret.parse(entry).rights == ALL_RIGHTS for entry in self.limited_secrets):
            raise ConfigError(
                "transfer.limited_secrets are written RIGHTS=SECRET, with fewer rights than pull+push+get"
            )
        if self.secret is None and self.secret_file is None and (self.tls or self.shared_secrets()):
            raise ConfigError("transfer.tls, previous_secrets and limited_secrets need transfer.secret")
        if not self.tls and (self.tls_certificate_file or self.tls_key_file):
            raise ConfigError("transfer.tls_certificate_file and tls_key_file need transfer.tls")
        unknown = [link for link in self.links if link not in ("shm", "tcp")]
        if unknown:
            raise ConfigError(f"transfer.links: unknown link {', '.join(unknown)}; the known links are shm and tcp")
        if "tcp" not in self.links:
            raise ConfigError(f"transfer.links must contain tcp; it is {', '.join(self.links) or 'empty'}")
        ring = parse_bytes(self.ring, "transfer.ring (--transfer-ring)")
        if ring < 1 << 16 or parse_bytes(self.queue, "transfer.queue (--transfer-queue)") < 1:
            raise ConfigError("transfer.ring must be at least 64KiB and transfer.queue at least one byte")
        _check("transfer", self)

    def with_secret(self) -> TransferConfig:
        """The configuration with the secret read from its file. Raises ConfigError."""
        if self.secret_file is None:
            return self
        try:
            text = Path(self.secret_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read transfer.secret_file {self.secret_file}: {reason_of(error)}") from error
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        limited = tuple(line for line in lines if SharedSecret.parse(line).rights != ALL_RIGHTS)
        full = [line for line in lines if line not in limited]
        if not full:
            raise ConfigError(f"transfer.secret_file {self.secret_file} contains no secret")
        return dataclasses.replace(
            self,
            secret=full[0],
            secret_file=None,
            previous_secrets=(*full[1:], *self.previous_secrets),
            limited_secrets=(*limited, *self.limited_secrets),
        )

    def shared_secrets(self) -> tuple[SharedSecret, ...]:
        """All secrets that peers may prove, this instance's own first."""
        full = (SharedSecret(text) for text in (self.secret, *self.previous_secrets) if text is not None)
        return (*full, *map(SharedSecret.parse, self.limited_secrets))


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router. Its address, API keys and logs are in `ServerConfig`.

    Attributes:
        replicas: servers to route to: a `URL`, optionally followed by `role=prefill`, `role=decode`,
            `events=tcp://HOST:PORT`, `replay=tcp://HOST:PORT` or `max_waiting=N`, separated by spaces.
        prefill: URLs of servers that only prefill prompts.
        replica_file: file with one replica per line, watched for changes; `#` starts a comment.
        replica_dns: `http://NAME:PORT`: every address of the name is a replica. The name is resolved periodically.
        replica_services: `NAMESPACE/SERVICE[:PORT]`, optionally followed by options as for `replicas`: the pods of a Kubernetes
            Service, watched through its EndpointSlices.
        kubernetes_api: URL of the Kubernetes API server; by default that of the cluster in which the router runs.
        kubernetes_credentials: folder with the files `token` and `ca.crt` for the Kubernetes API; read again when they change.
        replica_key: API key for calls to replicas; by default the caller's key.
        policy: routing policy: cost (lowest expected time to first token), random, round-robin, least-loaded, least-tokens,
            consistent-hashing, longest-prefix, two-choices, or a policy of an installed package.
        tokenizer: folder or Hugging Face name of the tokenizer; by default the replicas tokenize.
        max_waiting: maximum number of requests per replica that wait for their first token; further requests queue in the
            router. Of prompts that wait for a prefix that is being computed, 16 count as one.
        max_in_flight: maximum number of requests per replica; further requests queue in the router.
        max_queue: maximum number of requests that queue in the router; further requests are answered with status 429.
        tenant_weights: weights in the queue as `TENANT=WEIGHT`; other tenants have weight 1.
        tenant_priorities: the most urgent `priority` that a tenant may ask for, as `TENANT=NUMBER`; lower numbers are more
            urgent, as in vLLM. Other tenants may ask for 0 and above.
        prefix_file: file that keeps the named prefixes of clients over restarts of the router.
        request_timeout: maximum seconds for a request, including its time in the queue; for a stream, until its first token.
        stall_timeout: seconds without data after which a replica that streams a response counts as failed. A replica that is
            silent before the first token gets a small test request, and counts as failed if it does not answer that.
        max_attempts: maximum number of replicas that a request is sent to.
        connect_timeout: seconds to connect to a replica.
        health_interval: seconds between health checks of a replica.
        health_timeout: seconds that a health check may take.
        failures: consecutive failures that open a replica's circuit breaker.
        decisions: number of placement decisions kept for /v1/router/decisions.
        session_ttl: seconds that an idle session keeps its replica.
        warm_seconds: seconds that a replica that joins may take to load the prefixes that are used most from its stores, before
            it gets requests; 0: none.
        min_prefill: prompts with fewer tokens to compute are never sent to a prefill replica.
        directory_blocks: maximum number of blocks in the directory of all replicas, about 16 bytes each.
        tokenize_timeout: seconds to tokenize a prompt; after that it is compared as text. If a response can only be continued
            with a replica's tokenizer, replicas get up to 25 times as long.
        picker: `HOST:PORT` on which a gateway, such as Envoy, asks where to send requests that it forwards itself (external
            processing over gRPC); by default none may.
        picker_timeout: seconds that a gateway's request may wait until a replica is chosen.
        picker_streams: maximum number of open gRPC streams of gateways; a request has one or two.
        picker_open: let the gateway choose where no replica takes a request, instead of refusing the request. Without effect
            where API keys are configured.
        picker_tls_certificate_file: file with a TLS certificate for the picker; by default it speaks plain text.
        picker_tls_key_file: file with the key of that certificate.
        audit_every: repeat one request in N that hit, with its cache and without, while no client waits, and compare; 0: none.
        audit_budget: prompt tokens of repeated requests, as a share of those of all requests.
        audit_reports: folder for a report of each hit that differs, and for the salts that the router has changed then.
    """

    replicas: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    replica_file: str | None = None
    replica_dns: tuple[str, ...] = ()
    replica_services: tuple[str, ...] = ()
    kubernetes_api: str | None = None
    kubernetes_credentials: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    replica_key: str | None = field(default=None, repr=False)
    policy: str = "cost"
    tokenizer: str | None = None
    max_waiting: int = _at_least(1, 32)
    max_in_flight: int = _at_least(1, 512)
    max_queue: int = _at_least(1, 1024)
    tenant_weights: tuple[str, ...] = ()
    tenant_priorities: tuple[str, ...] = ()
    prefix_file: str | None = None
    request_timeout: float = _positive(600.0)
    stall_timeout: float = _positive(60.0)
    max_attempts: int = _at_least(1, 3)
    connect_timeout: float = _positive(2.0)
    health_interval: float = _positive(2.0)
    health_timeout: float = _positive(2.0)
    failures: int = _at_least(1, 3)
    decisions: int = _at_least(1, 1000)
    session_ttl: float = _positive(3600.0)
    warm_seconds: float = _between(0.0, 600.0, 10.0)
    min_prefill: int = _at_least(0, 512)
    directory_blocks: int = _at_least(1, 4_000_000)
    tokenize_timeout: float = _positive(1.0)
    picker: str | None = None
    picker_timeout: float = _positive(10.0)
    picker_streams: int = _at_least(1, 8192)
    picker_open: bool = False
    picker_tls_certificate_file: str | None = None
    picker_tls_key_file: str | None = None
    audit_every: int = _at_least(0, 0)
    audit_budget: float = _between(0.0, 1.0, 0.01)
    audit_reports: str | None = None

    def __post_init__(self) -> None:
        _check("router", self)
        if self.picker is None and (self.picker_open or self.picker_tls_certificate_file or self.picker_tls_key_file):
            raise ConfigError("router.picker_open and the picker's certificate need router.picker (--picker)")


@dataclass(frozen=True, slots=True)
class Config:
    """All sections."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prefixes: PrefixConfig = field(default_factory=PrefixConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    encryption: EncryptionConfig = field(default_factory=EncryptionConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def role(self) -> str | None:
        """The server's role in transfers. None if it works alone. A server with an address for transfers takes part in them."""
        if self.server.role is None and self.transfer.bind != TransferConfig().bind:
            return "both"
        return self.server.role


_CHANGE_CLIENT: Final = "let the client send what it sent before (docs/guides/misses.md)"
_REMOVED: Final = {
    "compile": "simulate a part of a large fleet, with --sample",
    **dict.fromkeys(("drop_lines", "sort_tools", "keep_answers"), _CHANGE_CLIENT),
}
_SECTIONS: Mapping[str, type[Any]] = typing.get_type_hints(Config)


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read the configuration from file, environment and flags (`{"engine": {"block_size": 32}}`), the last one strongest.

    Raises ConfigError for an unreadable file, an unknown table or key, or a wrong value.
    """
    layers = [_read_file(path), _read_environment(os.environ if environ is None else environ), flags or {}]
    sections: dict[str, Any] = {}
    for name, kind in _SECTIONS.items():
        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= layer.get(name, {})
        sections[name] = build(kind, name, merged)
    return Config(**sections)


def _read_file(path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    if path is None:
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name, table in data.items():
        if name not in _SECTIONS:
            raise ConfigError(f"{path}: unknown table [{name}]{did_you_mean(name, _SECTIONS)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, written [{name}]")
    return data


def _read_environment(environ: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """Variables `FOREWORD_<SECTION>_<KEY>`. Any other variable that starts with FOREWORD_ is an error, so typos are found."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        section, _, key = name[len(ENV_PREFIX) :].lower().partition("_")
        if section not in _SECTIONS:
            known = did_you_mean(section, _SECTIONS)
            raise ConfigError(f"environment variable {name}: unknown section {section!r}{known}")
        found.setdefault(section, {})[key] = value
    return found


def removed(key: str) -> str:
    """What to do without an option that there was, as the rest of an error; empty for all others."""
    advice = _REMOVED.get(key)
    return f", which was removed: {advice}" if advice else ""


def build(kind: type[T], where: str, values: Mapping[str, Any]) -> T:
    """Create a configuration dataclass from untyped values. Raises ConfigError for an unknown key or a wrong value."""
    hints = typing.get_type_hints(kind)
    secret = {item.name for item in dataclasses.fields(cast(Any, kind)) if not item.repr}
    values = {
        key: _from_file(f"{where}.{key}", hints.get(key), value) if key in secret else value
        for key, value in values.items()
    }
    for key in values:
        if key not in hints:
            raise ConfigError(f"unknown configuration key {where}.{key}{removed(key) or did_you_mean(key, hints)}")
    return kind(**{key: _coerce(f"{where}.{key}", hints[key], values[key], secret=key in secret) for key in values})


def _from_file(where: str, hint: Any, value: Any) -> Any:
    """A secret that is written `file:PATH` is what that file contains: a list of secrets has one a line. Raises ConfigError."""
    if typing.get_origin(hint) is tuple and isinstance(value, str):
        value = value.split(",")
    if isinstance(value, list | tuple):
        lists = [_from_file(where, str, item) for item in value]
        return [line for one in lists for line in (one.splitlines() if isinstance(one, str) else [one])]
    # `file://` is the URL of a store.
    if not isinstance(value, str) or not value.startswith("file:") or value.startswith("file://"):
        return value
    return read_secret(value, where)


def read_secret(text: str, where: str) -> str:
    """A secret as given to a command: `file:PATH` is what that file contains. Raises ConfigError."""
    if not text.startswith("file:"):
        return text
    path = text.removeprefix("file:")
    try:
        found = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {where} from {path}: {reason_of(error)}") from None
    if not found:
        raise ConfigError(f"cannot read {where} from {path}: the file is empty")
    return found


def check_source(source: str, what: str) -> bool:
    """Whether it is a folder; otherwise it may be a name on the hub. Raises ModelNotFound if it can be neither."""
    if Path(source).expanduser().is_dir():
        return True
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", source) is None:
        raise ModelNotFound(f"{source!r} is not a folder with {what}; give a folder, or a hub name such as owner/name")
    return False


def check_file(option: str, path: Path | None) -> None:
    """Raises ConfigError for a file that cannot be written where it should be. None: there is none."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(
            f"{option} {path}: {'it is a folder' if path.is_dir() else f'there is no folder {path.parent}'}"
        )


def check_folder(folder: str) -> None:
    """Raises StoreConfigError if the folder does not exist and cannot be created. Does not create it."""
    place = os.path.abspath(folder)
    if os.path.isdir(place):
        return  # one that cannot be written is only read
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    try:
        # The system alone can tell: a folder is made beside it and removed.
        os.rmdir(tempfile.mkdtemp(prefix=".foreword-", dir=place))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):  # then the store waits for room
            reason = f"the folder {folder} cannot be created: {error.strerror}: {place}"
            raise StoreConfigError(reason) from None


def _coerce(where: str, hint: Any, value: Any, *, secret: bool) -> Any:
    """`value` as type `hint`. Text, as from the environment, is parsed; other values must already have the right type."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and (value is None or value == ""):
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, str | list | tuple):
            raise ConfigError(f"{where} must be a list of strings, not {_shown(value, secret=secret)}")
        items = value.split(",") if isinstance(value, str) else [str(item) for item in value]
        return tuple(item.strip() for item in items if item.strip())
    try:
        return _scalar(wanted, value)
    except (ValueError, TypeError, OverflowError):
        raise ConfigError(f"{where} must be of type {wanted.__name__}, not {_shown(value, secret=secret)}") from None


def _shown(value: Any, *, secret: bool) -> str:
    return f"a {type(value).__name__}" if secret else repr(value)


def _scalar(wanted: type, value: Any) -> Any:
    if wanted is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("1", "true", "yes", "on", "0", "false", "no", "off"):
            return value.lower() in ("1", "true", "yes", "on")
        raise ValueError(value)
    if isinstance(value, bool) or (wanted is int and isinstance(value, float)):
        raise ValueError(value)
    if wanted is str and not isinstance(value, str | int | float):
        raise ValueError(value)
    return wanted(value)
