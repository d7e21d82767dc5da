"""Secrets in a store URL never appear in an error, a repr or a label."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from ports import free_port
from servers import RedisServer, ScriptedServer

from foreword.errors import StoreConfigError, StoreError, StoreUnavailable
from foreword.server.job import Caller
from foreword.store.redact import redacted
from foreword.store.redis.redis_store import RedisStore
from foreword.store.redis.resp import make_command
from foreword.store.types import Reach
from foreword.store.urls import open_store, parse
from foreword.store_config import StoreConfig
from foreword.transfer.handshake import Identity
from foreword.transfer.peer import opener
from foreword.transfer_config import SharedSecret, TransferConfig

SECRET = "QuietPlease"
# Its halves too: a password that is not percent-encoded is split at the delimiters of a URL.
HALVES = ("Quiet", "Please")


def shown(error: BaseException) -> str:
    """Everything that a log or a terminal shows of an error."""
    return "".join([str(error), repr(error), *traceback.format_exception_only(error)])


def use(url: str) -> None:
    """Open a store and send it a command."""
    store = open_store([url], None, {Reach.INSTANCE: opener(TransferConfig())})
    try:
        store.tiers[0].store.put_record("key", b"data", deadline=time.monotonic() + 60)
    finally:
        store.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:QuietPlease@localhost?ttl=soon",
        "redis://me:QuietPlease@localhost?no_such_option=1",
        "redis://me:QuietPlease@localhost:port",
        "redis://me:QuietPlease@one,two",
        "redis://me:Quiet/Please@localhost:6379",
        "redis://me:Quiet?Please@localhost:6379",
        "redis://me:Quiet?Please@localhost:6379&ttl=soon",
        "redis://me:Quiet#Please@localhost:6379",
        "redis://me:Quiet@Please@localhost:port",
        "redis://me:Quiet Please@localhost?ttl=soon",
        "redis://me:1234/QuietPlease@localhost:6379",
        "redis://me:QuietPlease]@[localhost",
        "redis://localhost?password=QuietPlease&ttl=soon",
        "redis+cluster://me:QuietPlease@one,two/1",
        "unix://me:QuietPlease@/run/redis.sock?ttl=soon",
        "reds://me:QuietPlease@localhost",
        "reds://localhost?password=QuietPlease",
        "memory://me:QuietPlease@localhost",
        "disk://me:QuietPlease@localhost/path",
        "s3://me:QuietPlease@bucket?parallel=many",
        "s3://bucket?secret_access_key=QuietPlease&no_such_option=1",
        "s3://me:QuietPlease]@[bucket",
        "s3://bucket?access_key_id=me&secret_access_key=QuietPlease&allow_http=perhaps",
        "az://container?sas_token=QuietPlease",
        "gs://bucket?service_account_key=QuietPlease",
        "file:///tmp?access_key=QuietPlease",
        "peer://me:QuietPlease@localhost:9100",
        "peer://me:Quiet#Please@localhost:9100",
        "peer://localhost:9100?secret=QuietPlease",
    ],
)
def test_a_wrong_url_keeps_its_secret(url: str) -> None:
    """An error about a URL describes the problem without user info and secret options."""
    with pytest.raises(StoreError) as caught:
        use(url)
    assert isinstance(caught.value, StoreConfigError)
    assert not any(half in shown(caught.value) for half in HALVES)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "unix"])
@pytest.mark.parametrize("user", ["", "me"])
@pytest.mark.parametrize("mark", ["/", "?", "#"])
@pytest.mark.parametrize("end", ["localhost:6379/0", "/run/redis.sock"])
def test_a_password_that_reads_like_a_port(scheme: str, user: str, mark: str, end: str) -> None:
    """A number before /, ? or # in a password is not taken for a port, nor the rest for a path or an option. The error
    says how to encode it and does not repeat it."""
    url = f"{scheme}://{user}:4711{mark}5813@{end}"
    for open_ in (use, RedisStore):
        with pytest.raises(StoreConfigError, match="%2F") as caught:
            open_(url)
        assert not any(half in shown(caught.value) for half in ("4711", "5813"))


def test_an_encoded_password_is_a_password(tmp_path: Path) -> None:
    """A password encoded as the error says works, over TCP and a Unix socket."""
    server = RedisServer(tmp_path / "locked", password="4711/5813?#:@")
    try:
        use(f"redis://:4711%2F5813%3F%23%3A%40@127.0.0.1:{server.port}/0")
        use(f"unix://:4711%2F5813%3F%23%3A%40@{server.socket}")
    finally:
        server.kill()


@pytest.mark.parametrize(
    "url", ["disk:///{path}#2", "file:///{path}#2", "memory://?size=1MiB#2", "redis://localhost:1#2"]
)
def test_an_unencoded_hash(url: str, tmp_path: Path) -> None:
    """An unencoded # raises an error instead of truncating the URL."""
    with pytest.raises(StoreConfigError, match="%23"):
        use(url.format(path=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_server_that_repeats_the_password() -> None:
    """A login command that the server repeats in its error is redacted."""
    liar = ScriptedServer([b"-ERR unknown command 'AUTH', with args beginning with: 'QuietPlease'\r\n"])
    store = RedisStore(f"redis://:QuietPlease@127.0.0.1:{liar.port}")
    try:
        with pytest.raises(StoreConfigError, match="AUTH") as caught:
            store.get_record("key", deadline=time.monotonic() + 60)
        assert SECRET not in shown(caught.value)
    finally:
        store.close()
        liar.close()


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:QuietPlease@127.0.0.1:{port}",
        "redis+cluster://me:QuietPlease@127.0.0.1:{port}",
        "s3://bucket?endpoint=http://me:QuietPlease@127.0.0.1:{port}&access_key_id=me&secret_access_key=QuietPlease&region=here",
    ],
)
def test_an_unreachable_store_keeps_its_secret(url: str) -> None:
    """The error for an unreachable store has its address without user info."""
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1") as caught:
        use(url.format(port=free_port()))
    assert SECRET not in shown(caught.value)


@pytest.mark.parametrize("show", [str, repr])
def test_a_url_is_shown_without_secrets(show: Callable[[object], str]) -> None:
    """A parsed URL and the configuration that contains it can be printed."""
    urls = ("redis://me:QuietPlease@localhost:6379/1?password=QuietPlease", "s3://bucket?secret_access_key=QuietPlease")
    for url in urls:
        assert SECRET not in show(parse(url))
    assert SECRET not in show(StoreConfig(urls=urls))
    store = open_store(
        ["redis://me:QuietPlease@localhost:1", "s3://bucket?access_key_id=me&secret_access_key=QuietPlease&region=here"]
    )
    assert store.label == "redis > objects"
    store.close()


@pytest.mark.parametrize(
    "holder",
    [
        TransferConfig(secret=f"{SECRET * 2}\n{SECRET * 3}\nget={SECRET * 2}"),
        Identity(b"i", (SharedSecret(SECRET),), ("tcp",), None, "127.0.0.1:1", 1.0, 1),
        make_command(b"", b"AUTH", SECRET.encode()),
        Caller.of({"authorization": f"Bearer {SECRET}"}),
    ],
)
def test_objects_with_secrets_can_be_printed(holder: object) -> None:
    """Configuration, connections, the login command and callers can be printed without secrets."""
    assert SECRET not in f"{holder} {holder!r}"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("redis://me:QuietPlease@host:1/2?ttl=3&prefix=p", "redis://***@host:1/2?ttl=3&prefix=p"),
        ("no answer from http://me@host: timed out", "no answer from http://***@host: timed out"),
        ("GET https://host/a?sv=1&sig=QuietPlease&se=2 failed", "GET https://host/a?sv=1&sig=***&se=2 failed"),
        ("disk:///cache@2/kv?size=1GiB", "disk:///cache@2/kv?size=1GiB"),
        ("two: redis://a:QuietPlease@one and s3://b", "two: redis://***@one and s3://b"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_only_secrets_are_hidden(text: str, left: str) -> None:
    """The rest of a URL, and of a sentence with a URL, stays."""
    assert redacted(text) == left
