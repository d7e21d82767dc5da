"""The endpoint picker's gRPC server: Envoy's external processing, and gRPC's health protocol."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from foreword.certificate_files import certificate_files
from foreword.errors import ConfigError
from foreword.process_config import RouterConfig, ServerConfig
from foreword.router.router import Router
from foreword.router_extras.gateway.gateway_headers import GatewaySettings
from foreword.router_extras.gateway.picker import Picker

logger = logging.getLogger(__name__)

_PROCESSOR: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
_HEALTH: Final = "grpc.health.v1.Health"
# HealthCheckResponse.ServingStatus
_SERVING: Final = 1
_NOT_SERVING: Final = 2
_FLUSH_SECONDS: Final = 2.0


@asynccontextmanager
async def picking(router: Router, limits: ServerConfig) -> AsyncIterator[None]:
    """Serve a router's decisions on `config.picker` in this block. Raises ConfigError."""
    config = router.config
    assert config.picker is not None
    try:
        from foreword.router_extras.gateway import envoy_messages as envoy
        from foreword.router_extras.gateway.external_processor import ExternalProcessor
        from foreword.router_extras.gateway.grpc_server import NOT_FOUND, GrpcCall, GrpcError, GrpcServer
    except ImportError as error:
        raise ConfigError("--picker needs more packages: pip install 'foreword[gateway]'") from error

    async def check(call: GrpcCall) -> None:
        async for asked in call:
            if asked.service not in ("", "liveness", "readiness", _PROCESSOR):
                raise GrpcError(NOT_FOUND, "there is no such service")
            serving = asked.service == "liveness" or router.ready() is None
            answer = envoy.HealthCheckResponse(status=_SERVING if serving else _NOT_SERVING)
            await call.write(answer.SerializeToString())
            return

    picker = Picker(router)
    processor = ExternalProcessor(picker)
    server = GrpcServer(
        {
            f"/{_PROCESSOR}/Process": (envoy.decoder_of(envoy.ProcessingRequest), processor.process),
            f"/{_HEALTH}/Check": (envoy.decoder_of(envoy.HealthCheckRequest), check),
        }
    )
    listener = _listen(config.picker)
    certificate = config.picker_tls_certificate_file
    await server.start(listener, renewed_context(certificate) if certificate is not None else None)

    async def leave() -> None:
        # The gateway learns it at once (GOAWAY) and opens its next streams elsewhere; those that are open go to their end.
        await router.stopping.wait()
        await server.stop(limits.drain_seconds)

    router.background(leave())
    background = [router.background(work) for work in picker.settings.watches(router.metrics.watch_failed)]
    logger.info("picks endpoints on %s:%d", config.picker.rpartition(":")[0], listener.getsockname()[1])
    try:
        yield
    finally:
        for task in background:
            task.cancel()
        await server.stop(_FLUSH_SECONDS)


def check_config(config: RouterConfig) -> None:
    """Raises ConfigError."""
    assert config.picker is not None
    GatewaySettings(config)
    host, _, port = config.picker.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ConfigError(f"--picker is written HOST:PORT, such as 0.0.0.0:9002, not {config.picker!r}")
    if config.picker_tls_certificate_file is not None:
        _context(config.picker_tls_certificate_file)


def renewed_context(place: str) -> ssl.SSLContext:
    """A context whose connections have the certificate that is in the files now: it is renewed while the picker runs. Raises
    ConfigError."""
    files = _read(place)
    current = _context(place)

    def renew(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        nonlocal files, current
        try:
            if (found := _read(place)) != files:
                files, current = found, _context(place)
        except ConfigError as error:
            logger.warning("the picker's certificate is unchanged: %s", error)
        connection.context = current

    listening = _context(place)
    listening.sni_callback = renew
    return listening


def _read(place: str) -> list[bytes]:
    """The certificate's files. Raises ConfigError."""
    try:
        return [Path(one).read_bytes() for one in certificate_files(place)]
    except OSError as error:
        raise _unusable(place, error) from error


def _context(place: str) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["h2"])
    try:
        # An encrypted key is an error; without a password OpenSSL would ask for it at the terminal.
        context.load_cert_chain(*certificate_files(place), password="")
    except (OSError, ValueError) as error:
        raise _unusable(place, error) from error
    return context


def _unusable(place: str, error: OSError | ValueError) -> ConfigError:
    said = getattr(error, "strerror", None) or error
    return ConfigError(f"cannot use --picker-tls-certificate-file {place}: certificate and key: {said}")


def _listen(where: str) -> socket.socket:
    """A listening socket; for all addresses of IPv4, also those of IPv6 where there are some. Raises ConfigError."""
    host, _, number = where.rpartition(":")
    host, port = host.removeprefix("[").removesuffix("]"), int(number)
    try:
        if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
            with suppress(OSError):
                return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"cannot listen on {where} (--picker): {getattr(error, 'strerror', None) or error}"
        ) from error
