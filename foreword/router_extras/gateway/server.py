"""The endpoint picker's gRPC server: Envoy's external processing, and gRPC's health protocol."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from foreword.api.errors import MAX_BODY_BYTES
from foreword.certificate_files import certificate_files
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.router import Router
from foreword.router_extras.gateway.gateway_headers import GatewaySettings
from foreword.router_extras.gateway.picker import FAULTS_OF_CLIENTS, Picker

logger = logging.getLogger(__name__)

_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH: Final = "grpc.health.v1.Health"
# HealthCheckResponse.ServingStatus
_SERVING: Final = 1
_NOT_SERVING: Final = 2
_FLUSH_SECONDS: Final = 2.0
_STREAMS: Final = 8192  # open at a time; a request has one or two
_GIVE_BACK_SECONDS: Final = 5.0
_OPTIONS: Final = (
    # A body in one message, and its envelope.
    ("grpc.max_receive_message_length", MAX_BODY_BYTES + (1 << 20)),
    ("grpc.max_send_message_length", MAX_BODY_BYTES + (1 << 20)),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.so_reuseport", 0),
    # Calls per connection, also those that were cancelled and are not taken yet. A gateway opens one connection more.
    ("grpc.max_concurrent_streams", 100),
    # A gateway that disappeared without a word: its streams end, and with them their requests' load.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A gateway may ping as often as it likes. gRPC would close the connection, and with it all streams, at the third ping
    # between which it sent nothing: while servers compute long prompts.
    ("grpc.http2.max_ping_strikes", 0),
)


@asynccontextmanager
async def picking(router: Router, limits: ServerConfig) -> AsyncIterator[None]:
    """Serve a router's decisions on `config.picker` in this block. Raises ConfigError."""
    config = router.config
    assert config.picker is not None
    try:
        import grpc

        from foreword.router_extras.gateway import envoy_messages as envoy
        from foreword.router_extras.gateway.external_processor import ExternalProcessor
    except ImportError as error:
        raise ConfigError("--picker needs more packages: pip install 'foreword[gateway]'") from error

    async def check(request: Any, context: Any) -> Any:
        if request.service not in ("", "liveness", "readiness", _PROCESSOR):
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        serving = request.service == "liveness" or router.ready() is None
        return envoy.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)

    # It writes a line for each stream at level DEBUG, and a traceback for what a client sent or did not wait for.
    library = logging.getLogger("grpc._cython.cygrpc")
    library.setLevel(logging.INFO)
    library.addFilter(_is_own_fault)
    picker = Picker(router)
    processor = ExternalProcessor(picker)

    async def process(requests: Any, context: Any) -> None:
        if not processor.knows_replicas():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no replica has answered yet")
        await processor.process(requests, context)

    process_handler = grpc.stream_stream_rpc_method_handler(
        process, envoy.ProcessingRequest.FromString, envoy.ProcessingResponse.SerializeToString
    )
    health = grpc.unary_unary_rpc_method_handler(
        check, envoy.HealthCheckRequest.FromString, envoy.HealthCheckResponse.SerializeToString
    )
    server = _make_server(grpc)
    server.add_registered_method_handlers(_PROCESSOR, {"Process": process_handler})
    server.add_registered_method_handlers(_HEALTH, {"Check": health})
    port = _bind(grpc, server, config)
    await server.start()

    async def leave() -> None:
        # The gateway learns it at once (GOAWAY) and opens its next streams elsewhere; those that are open go to their end.
        await router.stopping.wait()
        await server.stop(limits.drain_seconds)

    router.background(leave())
    background = [
        router.background(work) for work in (_give_back(), *picker.settings.watches(router.metrics.watch_failed))
    ]
    logger.info("picks endpoints on %s:%d", config.picker.rpartition(":")[0], port)
    try:
        yield
    finally:
        for task in background:
            task.cancel()
        library.removeFilter(_is_own_fault)
        await server.stop(_FLUSH_SECONDS)


def _is_own_fault(record: logging.LogRecord) -> bool:
    error = record.exc_info and record.exc_info[0]
    if not error or error.__name__ not in FAULTS_OF_CLIENTS:
        return True
    logger.debug("a client of the picker: %s", record.getMessage())
    return False


async def _give_back() -> None:
    """Return memory of ended calls to the system. The library's calls are in reference cycles, with all that their clients sent
    outside Python's heap; and the C library keeps what the library's threads free."""
    with suppress(AttributeError):  # another C library
        trim = ctypes.CDLL(None).malloc_trim
        while True:
            await asyncio.sleep(_GIVE_BACK_SECONDS)
            gc.collect(1)
            await asyncio.to_thread(trim, 0)


def check_config(config: RouterConfig) -> None:
    """Raises ConfigError."""
    assert config.picker is not None
    GatewaySettings(config)
    host, _, port = config.picker.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"--picker is written HOST:PORT, such as 0.0.0.0:9002, not {config.picker!r}")
    if config.picker_tls_certificate_file is not None:
        _pair(config.picker_tls_certificate_file)


def _pair(place: str) -> tuple[bytes, bytes]:
    """Key and certificate. Raises ConfigError."""
    try:
        certificate, key = certificate_files(place)
        # An encrypted key is an error; without a password OpenSSL would ask for it at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
        return Path(key).read_bytes(), Path(certificate).read_bytes()
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot use --picker-tls-certificate-file {place}: certificate and key: {said}") from error


def _credentials(grpc: Any, place: str) -> Any:
    """The files are read again for each connection: certificates are renewed while the picker runs."""

    def configuration() -> Any:
        return grpc.ssl_server_certificate_configuration([_pair(place)])

    def renewed() -> Any:
        try:
            return configuration()
        except ConfigError as error:
            logger.warning("the picker's certificate is unchanged: %s", error)
            return None

    return grpc.dynamic_ssl_server_credentials(configuration(), renewed)


def _make_server(grpc: Any) -> Any:
    try:
        from foreword.router_extras.gateway.grpc_server import RegisteredServer

        return RegisteredServer(_OPTIONS, _STREAMS)
    except (ImportError, AttributeError, TypeError):
        logger.warning(
            "gRPC %s: a call whose method has no valid name would end the picker; let only the gateway reach its port",
            grpc.__version__,
        )
        return grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_STREAMS)


def _bind(grpc: Any, server: Any, config: RouterConfig) -> int:
    try:
        if config.picker_tls_certificate_file is None:
            port: int = server.add_insecure_port(config.picker)
        else:
            credentials = _credentials(grpc, config.picker_tls_certificate_file)
            port = server.add_secure_port(config.picker, credentials)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"cannot serve the endpoint picker on {config.picker}: {error}") from error
    if not port:
        raise ConfigError(f"cannot listen on {config.picker} (--picker)")
    return port
