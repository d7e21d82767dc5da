"""Configuration of a process that serves HTTP: a server, or a router. `engine_config.py` has the engine's sections,
`configuration.py` all together.

`config.py` has the rules of keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from foreword.config import (
    SHORTEST_SECRET,
    at_least,
    between,
    check_secret,
    check_section,
    constant,
    fixed,
    not_negative,
    one_of,
    parse_bytes,
    positive,
)
from foreword.errors import ConfigError
from foreword.host_addresses import is_loopback

# Text, escapes, roles and tools. A token of text has about four bytes, a token id up to eight.
_BODY_BYTES_PER_TOKEN = 64
# As browsers send it: in lower case, without a path.
_HOST = re.compile(r"\*|[\w.-]+")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
ROLES = ("prefill", "decode", "both")


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
        api_keys: accepted API keys, each as `KEY` or `TENANT=KEY`; without any, no key is required and there is one tenant. `#`
            behind a space starts a comment.
        max_queue: maximum number of requests that wait for admission; further requests are answered with status 429.
        drain_seconds: seconds that running requests may take after SIGTERM.
        log_level: lowest level of log lines: debug, info, warning or error.
        log_format: `text`, or `json` for an object per line; that of a request has its id, tenant, model, replica, tokens,
            cached tokens and time to first token.
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
            port 0 for a free one); missed ones are asked for at the next port. With router_key they are encrypted for that
            router; without it, other addresses than loopback need kv_events_open.
        kv_events_open: publish KV events in plain text although other hosts can read them, for a network that keeps others
            away. They contain the token ids of all prompts.
        record: new file for a trace of the traffic without text, for `foreword simulate`. Those of servers with one
            tenant_secret can be combined.
        usage_ledger: file to which each request of a tenant adds a line of JSON with its tokens, for `foreword bill`.
        quotas: limits of a tenant as `TENANT requests=N tokens=N concurrent=N`: requests and tokens per minute, and requests
            at a time; TENANT is `*` for all others. By default there are none.
        max_body: largest body of a request: a size, or `auto` for 64 bytes per token of the longest prompt, at least 1MiB, and
            at a router in front of other servers than Foreword's 64MiB with images.
        unknown_fields: fields of a body that have no effect: `report` names them in the answer's header `x-foreword-ignored`,
            `refuse` answers 400, `ignore` says nothing. A router passes on what another engine than Foreword's may understand.
        max_connections: maximum number of connections; at the limit an idle one is closed for a new one.
        keep_alive: seconds that an idle connection stays open.
        tool_parser: how the model writes tool calls: `auto` (as its chat template does), `none`, hermes, llama3_json, mistral,
            harmony, qwen3_coder, or a format of an installed package.
        reasoning_parser: how the model writes reasoning: `auto`, `none`, think or mistral_think.
        template_order: `tools-first` to render tools before the system prompt, with `client=NAME` or `model=NAME` behind it for
            one client or model; by default as the chat template does. The model was not trained for it.
        volatile_lines: lines of system prompts and tools that are moved behind them into a system message of their own:
            `profiles` for those of known agents (claude-code, codex, opencode, qwen-code, continue), or a regular expression
            as `/^Date: /`; with `client=NAME` or `model=NAME` behind it for one client or model. By default none.
        response_memory: memory for responses that clients may continue (`/v1/responses` with `store`); one tenant uses at most
            a quarter of it. A response is kept for a day after its last use.
    """

    FILES = (("api_keys", "api_key_file"),)
    GONE = (
        *(("response_ttl", fixed("a day")), ("kv_events_replay", fixed("the port after that of kv_events"))),
        ("record_salt", "recordings of servers with one tenant_secret can be combined"),
    )
    host: str = "127.0.0.1"
    port: int = between(0, 65535, 8000)
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_queue: int = at_least(1, 256)
    drain_seconds: float = not_negative(30.0)
    log_level: str = one_of(("debug", "info", "warning", "error"), "info")
    log_format: str = one_of(("text", "json"), "text")
    tenant_secret: str | None = field(default=None, repr=False)
    role: str | None = one_of(ROLES, None)
    admin_key: str | None = field(default=None, repr=False)
    drain_to: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    otlp_endpoint: str | None = None
    router_key: str | None = field(default=None, repr=False)
    kv_events: str | None = None
    kv_events_open: bool = False
    record: str | None = None
    usage_ledger: str | None = None
    quotas: tuple[str, ...] = ()
    max_body: str = "auto"
    unknown_fields: str = one_of(("ignore", "report", "refuse"), "report")
    max_connections: int = at_least(1, 4096)
    keep_alive: float = positive(65.0)
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    template_order: tuple[str, ...] = ()
    volatile_lines: tuple[str, ...] = ()
    response_memory: str = "64MiB"
    # For a head, and while a client reads nothing of an answer: as proxies allow.
    head_timeout: float = constant(10.0, "10 s")
    write_timeout: float = constant(60.0, "60 s")
    # Or longer at 16 KiB per second: a slow line is no reason for another value.
    body_timeout: float = constant(30.0, "30 s, and longer at 16 KiB per second")
    # Comments of a silent stream: as the HTML standard advises; proxies wait for 30 s and more.
    stream_keep_alive: float = constant(15.0, "15 s")

    def __post_init__(self) -> None:
        check_section("server", self)
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
        for name in self.allowed_hosts:
            if not _HOST.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is not the name of a host, such as chat.example.org, or * (--allowed-hosts)"
                )
        parse_bytes(self.response_memory, "server.response_memory (--response-memory)")

    @property
    def is_local(self) -> bool:
        """Whether only programs on this host can connect."""
        return is_loopback(self.host)

    def check_key(self, key: str, text: str) -> None:
        """Raises ConfigError for a key of callers that can be guessed, where other hosts can try. On the loopback interface
        keys only tell callers apart."""
        if not self.is_local and len(text) < SHORTEST_SECRET:
            raise ConfigError(
                f"{key} must have at least {SHORTEST_SECRET} characters where other hosts can connect (--host {self.host}); "
                "create one with `openssl rand -hex 32`"
            )

    def body_limit(self, max_model_len: int) -> int:
        """The largest body in bytes for prompts of up to `max_model_len` tokens."""
        if self.max_body != "auto":
            return parse_bytes(self.max_body, "server.max_body (--max-body)")
        return max(max_model_len * _BODY_BYTES_PER_TOKEN, 1 << 20)


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
        pod_deletion_cost: write into the pods of `replica_services` how many blocks they hold, so that Kubernetes removes the
            pod with the fewest first (`controller.kubernetes.io/pod-deletion-cost`). The router must be allowed to patch pods.
        replica_key: API key for calls to replicas; by default the caller's key.
        policy: routing policy: cost (lowest expected time to first token), random, round-robin, least-loaded, least-tokens,
            consistent-hashing, longest-prefix, two-choices, or a policy of an installed package.
        tokenizer: folder or Hugging Face name of the tokenizer; by default the replicas tokenize.
        max_waiting: maximum number of requests per replica that wait for their first token; further requests queue in the
            router. Of prompts that wait for a prefix that is being computed, 16 count as one.
        max_in_flight: maximum number of requests per replica; further requests queue in the router.
        workers: number of processes that serve the port.
        max_queue: maximum number of requests that queue in the router; further requests are answered with status 429.
        tenant_weights: weights in the queue as `TENANT=WEIGHT`; other tenants have weight 1.
        tenant_priorities: the most urgent `priority` that a tenant may ask for, as `TENANT=NUMBER`; lower numbers are more
            urgent, as in vLLM. Other tenants may ask for 0 and above.
        prefix_file: file that keeps the named prefixes of clients over restarts of the router.
        request_timeout: maximum seconds for a request, including its time in the queue; for a stream, until its first token.
        stall_timeout: seconds without data after which a replica that streams a response counts as failed. A replica that is
            silent before the first token gets a small test request, and counts as failed if it does not answer that.
        max_attempts: maximum number of replicas that a request is sent to.
        health_interval: seconds between health checks of a replica, which may take as long, and at least 2.
        failures: consecutive failures that open a replica's circuit breaker.
        warm_seconds: seconds that a replica that joins may take to load the prefixes that are used most from its stores, before
            it gets requests; 0: none.
        measure_seconds: seconds that a prompt of 2,000 tokens may take with which a replica that joins is measured while it is
            idle, twice; 0: it is not measured, and its costs are those of others until its own requests show them.
        cost_file: file that keeps the learned costs of replicas, by kind of machine, over restarts of the router.
        min_prefill: prompts with fewer tokens to compute are never sent to a prefill replica.
        directory_blocks: maximum number of blocks in the directory of all replicas, about 16 bytes each.
        picker: `HOST:PORT` on which a gateway, such as Envoy, asks by gRPC where to send requests; by default none may.
        picker_objectives: priorities of a gateway's objectives, as `NAME=NUMBER`, higher is more urgent, or `NAMESPACE/POOL`
            for those that the InferenceObjectives of this InferencePool have in the cluster.
        picker_trusts_headers: believe the gateway's headers about objective, fairness id and model: clients cannot set them.
        picker_tls_certificate_file: certificate of the picker with its private key, in PEM, or a folder with `tls.crt` and
            `tls.key`, as a Secret of Kubernetes; by default it speaks plain text.
        audit_every: repeat one request in N that hit, with its cache and without, while no client waits, and compare; 0: none.
            Repeated requests have at most a hundredth of all prompt tokens.
        audit_reports: folder for a report of each hit that differs, and for the salts that the router has changed then.
    """

    GONE = (
        *(("session_ttl", fixed("an hour")), ("picker_timeout", fixed("10 s")), ("picker_streams", fixed("8,192"))),
        *(("decisions", fixed("1,000")), ("picker_open", fixed("off"))),
        ("picker_tls_key_file", "picker_tls_certificate_file names the file of both, or their folder"),
    )
    replicas: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    replica_file: str | None = None
    replica_dns: tuple[str, ...] = ()
    replica_services: tuple[str, ...] = ()
    kubernetes_api: str | None = None
    pod_deletion_cost: bool = False
    replica_key: str | None = field(default=None, repr=False)
    policy: str = "cost"
    tokenizer: str | None = None
    max_waiting: int = at_least(1, 32)
    max_in_flight: int = at_least(1, 512)
    workers: int = at_least(1, 1)
    max_queue: int = at_least(1, 1024)
    tenant_weights: tuple[str, ...] = ()
    tenant_priorities: tuple[str, ...] = ()
    prefix_file: str | None = None
    request_timeout: float = positive(600.0)
    stall_timeout: float = positive(60.0)
    max_attempts: int = at_least(1, 3)
    health_interval: float = positive(2.0)
    failures: int = at_least(1, 3)
    warm_seconds: float = between(0.0, 600.0, 10.0)
    measure_seconds: float = between(0.0, 600.0, 10.0)
    cost_file: str | None = None
    min_prefill: int = at_least(0, 512)
    directory_blocks: int = at_least(1, 4_000_000)
    picker: str | None = None
    picker_objectives: tuple[str, ...] = ()
    picker_trusts_headers: bool = False
    picker_tls_certificate_file: str | None = None
    audit_every: int = at_least(0, 0)
    audit_reports: str | None = None
    # Kubernetes mounts `token` and `ca.crt` there in every pod.
    kubernetes_credentials: str = constant(
        "/var/run/secrets/kubernetes.io/serviceaccount", "the folder of a pod's service account"
    )
    # A replica that accepts no connection for so long is down, also in another region.
    connect_timeout: float = constant(2.0, "2 s")
    health_timeout: float = constant(2.0, "health_interval, and at least 2 s")  # what runs longer meets the next check
    # A replica's time for a prompt, 25 times as long for a broken answer, and the least that a request waits for it: longer
    # while computing what is not known would take longer.
    tokenize_timeout: float = constant(1.0, "1 s")
    tokenize_patience: float = constant(0.05, "50 ms, or what computing the prompt would take")
    audit_budget: float = constant(0.01, "a hundredth of all prompt tokens")  # small beside what clients ask

    def __post_init__(self) -> None:
        check_section("router", self)
        names = (name for name in self.__annotations__ if name.startswith("picker_") and getattr(self, name))
        if self.picker is None and (name := next(names, None)) is not None:
            raise ConfigError(f"router.{name} needs router.picker (--picker)")
        if self.pod_deletion_cost and not self.replica_services:
            raise ConfigError("router.pod_deletion_cost needs router.replica_services (--replica-service)")

    @property
    def health_seconds(self) -> float:
        """Seconds that a health check may take."""
        return max(self.health_interval, self.health_timeout)
