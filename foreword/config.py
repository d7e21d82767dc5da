"""Configuration: one frozen dataclass per room, from a TOML file, the environment and flags, in that order of strength.

An unknown key is an error that names close ones; a value of the wrong type is an error that says what was expected. A
file has a table per room (`[engine]`, `[server]`, `[prefixes]`); the environment uses `FOREWORD_ENGINE_BLOCK_SIZE=16`.

What is secret, or may hold a secret, is not shown: neither in the `repr` of a configuration nor in an error about it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar, cast

from foreword.errors import ConfigError, did_you_mean

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
ENV_PREFIX = "FOREWORD_"
ROLES = ("prefill", "decode", "both")


def parse_bytes(text: str) -> int:
    """`"4GiB"`, `"500MB"`, `"4g"` or `"1048576"` as a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{text!r} is not a size in bytes; write for example 4GiB, 500MB or 1048576")
    # Exact for any size: a float would overflow, or lose bytes of a large whole number.
    return int(Fraction(match[1]) * _UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine: model, device, memory for KV, and how steps are made up.

    Attributes:
        model: a folder or a hub name; None is the embedded model.
        served_model_name: the name clients use; None takes the folder's name.
        dtype: `auto` (the checkpoint's), `float32`, `bfloat16` or `float16`.
        device: `auto` (CUDA where there is one), `cpu`, `cuda` or `cuda:N`.
        kv_memory: `auto`, bytes (`4GiB`) or tokens (`65536 tokens`).
        block_size: tokens per block.
        max_model_len: longest prompt plus output, None takes the model's.
        max_batch_tokens: tokens computed in a step at most; longer prompts are prefilled in chunks of it.
        max_num_seqs: sequences in a step at most.
        reserve: share of the blocks that a new admission must leave free, so that running requests can grow (R11).
        lookahead_blocks: blocks taken ahead of need per sequence while there are any, so that they lie in a row (R10).
        enable_prefix_caching: reuse blocks between requests (R14).
        partial_reuse: reuse a partly filled block by copying it (R8).
        shared_prefix_attention: read a prefix that decoding sequences share once per batch.
        threads: CPU threads for computation; None takes the number of cores.
        linear_memory: CPU without bfloat16 units: bytes for float32 copies of the weights that make batches fast
            (`auto`: as much as is needed if it is at most half of what is free; `0` for none).
        kernels: on CPUs, `native` (compiled from C++ at first start), `torch` (PyTorch's operators), or `auto`: native ones
            where there is a C++ compiler.
        self_check: compare with the model's own forward pass at start, and refuse a model that differs.
        trust_remote_code: let a checkpoint bring its own code.
        seed: seed for requests that name none; None draws one.
        history_tokens: tokens of recent prompts remembered for cache reports.
        report_other_tenants: a cache report may say that another tenant has the prefix (this reveals that it has).
    """

    model: str | None = None
    served_model_name: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    kv_memory: str = "auto"
    block_size: int = 16
    max_model_len: int | None = None
    max_batch_tokens: int = 512
    max_num_seqs: int = 64
    reserve: float = 0.01
    lookahead_blocks: int = 4
    enable_prefix_caching: bool = True
    partial_reuse: bool = True
    shared_prefix_attention: bool = True
    threads: int | None = None
    linear_memory: str = "auto"
    kernels: str = "auto"
    self_check: bool = True
    trust_remote_code: bool = False
    seed: int | None = None
    history_tokens: int = 1 << 20
    report_other_tenants: bool = False

    def __post_init__(self) -> None:
        _at_least("engine.block_size", self.block_size, 1)
        _at_least("engine.max_batch_tokens", self.max_batch_tokens, 1)
        _at_least("engine.max_num_seqs", self.max_num_seqs, 1)
        _at_least("engine.lookahead_blocks", self.lookahead_blocks, 0)
        _at_least("engine.history_tokens", self.history_tokens, 0)
        if self.threads is not None:
            _at_least("engine.threads", self.threads, 1)
        if self.max_model_len is not None:
            _at_least("engine.max_model_len", self.max_model_len, 2)
        if not 0.0 <= self.reserve < 1.0:
            raise ConfigError(f"engine.reserve is a share of the blocks, from 0 to below 1, not {self.reserve}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigError(f"engine.dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}")
        if self.kernels not in ("auto", "native", "torch"):
            raise ConfigError(f"engine.kernels must be auto, native or torch, not {self.kernels!r}")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The front door.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        api_keys: `KEY` or `TENANT=KEY` each; none means that no key is asked for and there is one tenant.
        api_key_file: a file with one such entry per line, `#` begins a comment.
        max_queue: requests that may wait for admission; more are answered 429.
        drain_seconds: on SIGTERM, how long running requests may still take.
        log_level: debug, info, warning or error.
        tenant_secret: derives each tenant's salt; None draws one at start (then salts differ between servers).
        role: `prefill` (computes prompts for others), `decode` (takes prompts that others computed, and requests that move),
            or `both`; each opens the door for transfers (`--transfer-bind`). None: this server works alone.
        admin_key: the key that may move everybody's requests and drain the server; where there are API keys, nothing else may.
        drain_to: URLs of servers to which requests are moved when this one is told to stop.
        peers: other servers that a request may name, to have its prompt computed or to move there: `HOST`, `HOST:PORT`, a URL,
            `*.DOMAIN`, a network such as `10.0.0.0/8`, or `*`. This host and those of drain_to may always be named.
        router_key: the key of a router in front, which authenticates callers itself and names their salts.
        kv_events: where to publish what the device holds, in vLLM's format, such as `tcp://127.0.0.1:5557` (`*` for all
            addresses, port 0 for a free one).
        kv_events_replay: where subscribers ask for messages that they missed; None takes the port after that of kv_events.
        record: a new file for a trace of the traffic, without any text (`foreword simulate` reads it).
        record_salt: with the same one several processes' recordings fit together; None draws one.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    max_queue: int = 256
    drain_seconds: float = 30.0
    log_level: str = "info"
    tenant_secret: str | None = field(default=None, repr=False)
    role: str | None = None
    admin_key: str | None = field(default=None, repr=False)
    drain_to: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    router_key: str | None = field(default=None, repr=False)
    kv_events: str | None = None
    kv_events_replay: str | None = None
    record: str | None = None
    record_salt: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.role not in (None, *ROLES):
            raise ConfigError(f"server.role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, not {self.role!r}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"server.port must be between 0 and 65535, not {self.port}")
        _at_least("server.max_queue", self.max_queue, 1)
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ConfigError(f"server.log_level must be debug, info, warning or error, not {self.log_level!r}")
        if self.kv_events_replay is not None and self.kv_events is None:
            raise ConfigError("server.kv_events_replay needs server.kv_events")


@dataclass(frozen=True, slots=True)
class PrefixConfig:
    """Named prefixes.

    Attributes:
        budget: bytes of KV that they may pin: a size (`1GiB`), or a share of the pool (`25%`).
    """

    budget: str = "50%"

    def __post_init__(self) -> None:
        self.budget_bytes(0)

    def budget_bytes(self, pool_bytes: int) -> int:
        """The budget in bytes for a pool of `pool_bytes`."""
        if self.budget.endswith("%"):
            try:
                share = float(self.budget[:-1])
            except ValueError:
                share = -1.0
            if not 0 <= share <= 90:
                raise ConfigError(f"prefixes.budget must be between 0% and 90% of the pool, not {self.budget!r}")
            return int(pool_bytes * share / 100)
        return parse_bytes(self.budget)


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where blocks rest off the device.

    Attributes:
        urls: stores, the fastest first, such as `memory://?size=4GiB` and `disk:///var/cache/foreword?size=200GiB`.
        staging: bytes of host memory through which blocks leave the device and come back.
        lookup_timeout: seconds that a request waits at most for the search in the stores, or a tenth of what computing
            takes, if that is more.
        load_timeout: seconds that loading may take at most, where computing would take longer still.
        flush_seconds: how long the end of the process waits for blocks that are not written yet.
    """

    urls: tuple[str, ...] = field(default=(), repr=False)  # they may hold passwords
    staging: str = "256MiB"
    lookup_timeout: float = 0.25
    load_timeout: float = 30.0
    flush_seconds: float = 20.0

    def __post_init__(self) -> None:
        parse_bytes(self.staging)
        for name in ("lookup_timeout", "load_timeout"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"store.{name} must be more than 0 seconds, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """How KV travels between instances.

    Attributes:
        bind: where to listen: `host:port` (port 0 takes a free one) or `unix:/path`. Anything but loopback needs a secret.
        advertise: the address under which others reach this instance, and only this one; None for the one bound.
        secret: shared by all instances, 16 characters or more. None: only peers on this host are served.
        secret_file: a file with the secret instead.
        links: what may carry payloads, of shm, nixl and tcp; the first that both sides can do does, in the order of the side
            that connects. tcp must be among them and nothing after it is used. nixl needs the package of that name.
        ring: bytes per connection and direction that are under way and not read yet; also the longest part (half of it in
            shared memory and with NIXL).
        queue: bytes per connection that may wait to be sent.
        connect_timeout: seconds for a connection to come about.
        answer_timeout: seconds for a yes or no to a transfer.
        progress_timeout: seconds without any sign of progress after which a transfer, or a link that moves nothing, ends.
        lease_seconds: how long blocks are kept for the other side without a sign of it.
        beat_seconds: an idle connection gives a sign of life so often; five missed ones are the end of it.
        max_transfers, max_connections: at a time; more are refused.
        min_tokens: a prompt with fewer tokens to compute is computed in place, whatever the router says.
    """

    bind: str = "127.0.0.1:0"
    advertise: str | None = None
    secret: str | None = field(default=None, repr=False)
    secret_file: str | None = None
    links: tuple[str, ...] = ("shm", "tcp")
    ring: str = "32MiB"
    queue: str = "32MiB"
    connect_timeout: float = 5.0
    answer_timeout: float = 10.0
    progress_timeout: float = 30.0
    lease_seconds: float = 60.0
    beat_seconds: float = 2.0
    max_transfers: int = 256
    max_connections: int = 64
    min_tokens: int = 64

    def __post_init__(self) -> None:
        if self.secret is not None and self.secret_file is not None:
            raise ConfigError("give transfer.secret or transfer.secret_file, not both")
        if self.secret is not None and len(self.secret) < 16:
            raise ConfigError("transfer.secret has at least 16 characters; `openssl rand -hex 32` makes a good one")
        if "tcp" not in self.links or not set(self.links) <= {"tcp", "shm", "nixl"}:
            raise ConfigError(f"transfer.links are tcp and, if wanted, shm and nixl, not {', '.join(self.links)}")
        if parse_bytes(self.ring) < 1 << 16 or parse_bytes(self.queue) < 1:
            raise ConfigError("transfer.ring is at least 64KiB and transfer.queue at least one byte")
        for name in ("connect_timeout", "answer_timeout", "progress_timeout", "lease_seconds", "beat_seconds"):
            if not 0.05 <= getattr(self, name) <= 3600:
                raise ConfigError(f"transfer.{name} is between 0.05 and 3600 seconds, not {getattr(self, name)}")
        _at_least("transfer.max_transfers", self.max_transfers, 1)
        _at_least("transfer.max_connections", self.max_connections, 1)
        _at_least("transfer.min_tokens", self.min_tokens, 1)

    def with_secret(self) -> TransferConfig:
        """The same with the secret read from its file. Raises ConfigError."""
        if self.secret_file is None:
            return self
        try:
            secret = Path(self.secret_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read transfer.secret_file {self.secret_file}: {error}") from error
        return dataclasses.replace(self, secret=secret, secret_file=None)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The router. Where it listens, its API keys and its logs are in `ServerConfig`.

    Attributes:
        replicas: `URL` of a server, and behind it, if wanted, `role=prefill`, `role=decode`, `events=tcp://HOST:PORT`,
            `replay=tcp://HOST:PORT` or `max_waiting=N`, separated by spaces.
        prefill: URLs of servers that only compute prompts.
        replica_file: a file with a replica per line, watched for changes; `#` begins a comment.
        replica_dns: `http://NAME:PORT`: every address of the name is a replica; resolved again and again.
        replica_key: the key with which the router calls replicas; None passes the caller's own key on.
        policy: cost (the expected time to the first token), or one of those that it is compared with: random, round-robin,
            least-loaded, least-tokens, consistent-hashing, longest-prefix, two-choices.
        tokenizer: a folder or hub name of the tokenizer; None asks the replicas to tokenize.
        max_waiting: requests sent to a replica that have no first token yet; when all have so many, requests queue here.
        max_in_flight: requests of any kind that a replica has from here at most; when all have so many, requests queue here.
        max_queue: requests that may queue here; more are answered 429.
        tenant_weights: `TENANT=WEIGHT`: shares of those who queue; anybody else has 1.
        request_timeout: seconds that a request may take at most, queueing included.
        stall_timeout: seconds without a byte after which a replica counts as lost in the middle of an answer.
        max_attempts: replicas that a request is sent to at most.
        connect_timeout, health_timeout: seconds for a connection; for a health check.
        health_interval: seconds between health checks of a replica.
        failures: failures in a row that open a replica's circuit breaker.
        decisions: decisions kept for /v1/router/decisions.
        session_ttl: seconds that a session stays where it was without a request.
        min_prefill: prompts with fewer tokens to compute are never sent to a prefill replica.
        directory_blocks: blocks remembered of all replicas together, about 16 bytes each.
        tokenize_timeout: seconds; a prompt that is not tokenized by then is compared as text. Where a lost answer can go on
            only with a replica's tokenizer, replicas get up to 25 times as long.
    """

    replicas: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    replica_file: str | None = None
    replica_dns: tuple[str, ...] = ()
    replica_key: str | None = field(default=None, repr=False)
    policy: str = "cost"
    tokenizer: str | None = None
    max_waiting: int = 32
    max_in_flight: int = 512
    max_queue: int = 1024
    tenant_weights: tuple[str, ...] = ()
    request_timeout: float = 600.0
    stall_timeout: float = 60.0
    max_attempts: int = 3
    connect_timeout: float = 2.0
    health_interval: float = 2.0
    health_timeout: float = 2.0
    failures: int = 3
    decisions: int = 1000
    session_ttl: float = 3600.0
    min_prefill: int = 512
    directory_blocks: int = 4_000_000
    tokenize_timeout: float = 1.0

    def __post_init__(self) -> None:
        for name in (
            "max_waiting",
            "max_in_flight",
            "max_queue",
            "max_attempts",
            "failures",
            "decisions",
            "directory_blocks",
        ):
            _at_least(f"router.{name}", getattr(self, name), 1)
        _at_least("router.min_prefill", self.min_prefill, 0)
        for name in ("request", "stall", "connect", "health", "tokenize"):
            if not getattr(self, f"{name}_timeout") > 0:
                raise ConfigError(f"router.{name}_timeout must be more than 0 seconds")
        for name in ("health_interval", "session_ttl"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"router.{name} must be more than 0 seconds")


@dataclass(frozen=True, slots=True)
class Config:
    """All rooms together."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    prefixes: PrefixConfig = field(default_factory=PrefixConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    router: RouterConfig = field(default_factory=RouterConfig)

    @property
    def role(self) -> str | None:
        """What the server does for others; None where it works alone. Who gives an address for transfers takes part in them."""
        if self.server.role is None and self.transfer.bind != TransferConfig().bind:
            return "both"
        return self.server.role


def load_config(
    path: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Read the configuration: file, then environment, then flags (`{"engine": {"block_size": 32}}`).

    Raises ConfigError for an unreadable file, an unknown table or key, or a bad value.
    """
    layers = [_read_file(path), _read_environment(os.environ if environ is None else environ), flags or {}]
    rooms: dict[str, Any] = {}
    for room in dataclasses.fields(Config):
        merged: dict[str, Any] = {}
        for layer in layers:
            merged |= layer.get(room.name, {})
        rooms[room.name] = build(_room_type(room.name), room.name, merged)
    return Config(**rooms)


def _room_type(name: str) -> type[Any]:
    kind = typing.get_type_hints(Config)[name]
    assert isinstance(kind, type)
    return kind


def _read_file(path: Path | None) -> Mapping[str, Mapping[str, Any]]:
    if path is None:
        return {}
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    rooms = {room.name for room in dataclasses.fields(Config)}
    for name, table in data.items():
        if name not in rooms:
            raise ConfigError(f"{path}: unknown table [{name}]{did_you_mean(name, rooms)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table, written [{name}]")
    return data


def _read_environment(environ: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """`FOREWORD_<ROOM>_<KEY>`; other variables that begin with FOREWORD_ are errors, so that a typo is not ignored."""
    found: dict[str, dict[str, Any]] = {}
    rooms = [room.name for room in dataclasses.fields(Config)]
    for name, value in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        room, _, key = name[len(ENV_PREFIX) :].lower().partition("_")
        if room not in rooms:
            raise ConfigError(f"environment variable {name}: unknown room {room!r}{did_you_mean(room, rooms)}")
        found.setdefault(room, {})[key] = value
    return found


Room = TypeVar("Room")


def build(kind: type[Room], where: str, values: Mapping[str, Any]) -> Room:
    """Make a configuration dataclass from untyped values. Raises ConfigError for an unknown key or a bad value."""
    hints = typing.get_type_hints(kind)
    secret = {item.name for item in dataclasses.fields(cast(Any, kind)) if not item.repr}
    for key in values:
        if key not in hints:
            raise ConfigError(f"unknown configuration key {where}.{key}{did_you_mean(key, hints)}")
    return kind(**{key: _coerce(f"{where}.{key}", hints[key], values[key], secret=key in secret) for key in values})


def _coerce(where: str, hint: Any, value: Any, *, secret: bool) -> Any:
    """`value` as `hint`: text (from the environment) is parsed, anything else must already have the right type."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in options and (value is None or value == ""):
        return None
    wanted = next(option for option in options if option is not type(None))
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, str | list | tuple):
            raise ConfigError(f"{where} must be a list of texts, not {_shown(value, secret=secret)}")
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


def _at_least(where: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{where} must be at least {low}, not {value}")
