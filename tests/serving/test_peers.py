"""The allow-list of servers that a request may name."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from foreword.configuration import Config
from foreword.errors import BadRequest, ConfigError
from foreword.process_config import ServerConfig
from foreword.request_errors import Forbidden
from foreword.server.peers import Peers
from foreword.store_config import StoreConfig
from foreword.transfer_config import TransferConfig

OPEN = ("127.0.0.1:9100", "127.8.9.1:1", "localhost:9100", "[::1]:9100", "[::ffff:127.0.0.1]:9100")


def allows(peers: Peers, address: str) -> bool:
    """Both ways to write the place must be judged alike."""
    try:
        peers.check_address(address, "prefill")
    except Forbidden as error:
        assert error.status == 403 and "--peer" in error.message and "server.peers" in error.message
        with pytest.raises(Forbidden):
            peers.check_url(f"http://{address}", "to")
        return False
    if not address.startswith("unix:"):
        peers.check_url(f"http://{address}/", "to")
    return True


def test_this_host_is_allowed() -> None:
    """Without keys, and without configuration, only servers of this host may be named, in any notation of loopback."""
    peers = Peers.from_config(Config())
    assert all(allows(peers, address) for address in OPEN)
    closed = ("10.0.0.7:9100", "169.254.169.254:80", "example.org:443", "0.0.0.0:9100", "[fe80::1]:9100", "127.1:80")
    closed += (
        "localhost.example.org:80",
        "2130706433:80",
        "0x7f.0.0.1:80",
        "[::ffff:10.0.0.7]:9100",
        "notlocalhost:80",
        "unix:/run/kv.sock",
    )
    assert not any(allows(peers, address) for address in closed)


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        ("10.0.0.7", ["10.0.0.7:1", "[::ffff:10.0.0.7]:2"], ["10.0.0.8:1", "10.0.0.7.example.org:1"]),
        ("10.0.0.7:9100", ["10.0.0.7:9100"], ["10.0.0.7:22"]),
        ("10.1.0.0/16", ["10.1.255.1:5"], ["10.2.0.1:5", "[::1:10.1.0.1]:5"]),
        ("fd00::/8", ["[fd00::5]:9100"], ["[fe80::5]:9100"]),
        ("[fd00::5]:9100", ["[fd00::5]:9100"], ["[fd00::5]:9101"]),
        ("KV.example.org", ["kv.example.org:1", "kv.Example.org.:1"], ["a.kv.example.org:1", "kvXexample.org:1"]),
        ("http://kv:8000", ["kv:8000"], ["kv:9100"]),
        ("https://kv/", ["kv:443"], ["kv:80"]),
        (
            "*.svc.local",
            ["a.svc.local:1", "a.b.svc.local:1"],
            ["svc.local:1", "asvc.local:1", "a.svc.local.evil.org:1"],
        ),
        ("decode-*", ["decode-1:1"], ["decode-1.evil.org:1", "decode:1"]),
        ("*", ["10.0.0.7:1", "[fd00::5]:1", "example.org:1"], []),
    ],
)
def test_rules(rule: str, inside: list[str], outside: list[str]) -> None:
    """A host, a host with a port, a URL, a network and a pattern of names each allow what they match and nothing
    else."""
    peers = Peers([rule])
    assert all(allows(peers, address) for address in inside)
    assert not any(allows(peers, address) for address in outside)
    assert allows(peers, "127.0.0.1:5") == (rule == "*")


@pytest.mark.parametrize(
    "wrong", ["10.0.0.*", "10.0.0.0/33", "http://kv/path", "ftp://kv", "a b", "kv:port", "192.168", ""]
)
def test_malformed_rules(wrong: str) -> None:
    """A malformed entry is an error at start that says what to write."""
    with pytest.raises(ConfigError, match=r"server\.peers.*10\.0\.0\.0/8"):
        Peers([wrong])


def test_hosts_of_the_configuration() -> None:
    """Servers of --drain-to and stores of other instances are allowed without --peer, at their ports; without keys also the
    host of the server's own transfer address."""
    config = Config(
        server=ServerConfig(drain_to=("http://drained-to:8000",), peers=("10.9.0.0/16",)),
        store=StoreConfig(urls=("memory://?size=1MiB", "peer://10.0.0.3:9100?label=x")),
        transfer=TransferConfig(bind="0.0.0.0:9100", advertise="10.0.0.4:9100"),
    )
    peers = Peers.from_config(config)
    for address in ("drained-to:8000", "10.0.0.3:9100", "10.0.0.4:9200", "10.9.8.7:1"):
        assert allows(peers, address)
    for address in ("0.0.0.0:1", "10.0.0.5:1", "drained-to:9100", "10.0.0.3:22"):
        assert not allows(peers, address)
    with pytest.raises(ConfigError, match="--drain-to"):
        Peers.from_config(Config(server=ServerConfig(drain_to=("10.0.0.8:8000",))))


@pytest.mark.parametrize("key", ["api_keys", "router_key"])
def test_tenants_name_known_servers_only(key: str) -> None:
    """Where keys are required, a tenant reaches no port of this host that the configuration does not name."""
    value = {"api_keys": ("alice=alices-key",), "router_key": "the key of a router"}[key]
    given = ServerConfig(**{key: value}, drain_to=("http://127.0.0.1:8001",), peers=("localhost:9100",))
    peers = Peers.from_config(Config(server=given, transfer=TransferConfig(bind="127.0.0.1:9200")))
    assert allows(peers, "127.0.0.1:8001") and allows(peers, "localhost:9100")
    assert not any(map(partial(allows, peers), ("127.0.0.1:6379", "127.0.0.1:9200", "localhost:8001", "[::1]:8001")))


def test_unix_sockets_are_in_a_known_folder(tmp_path: Path) -> None:
    """A socket may be named in the folder of the server's own or of a peer's, or in one of --peer: not in another, not below,
    and not through a link or `..`."""
    names = ("own", "store", "named", "other")
    own, store, named, other = (tmp_path / name for name in names)
    for folder in (own, store, named, other, named / "below"):
        folder.mkdir()
    (other / "socket").touch()
    (named / "link").symlink_to(other / "socket")
    given = Config(
        server=ServerConfig(peers=(f"unix:{named}",)),
        store=StoreConfig(urls=(f"peer://{store}/s",)),
        transfer=TransferConfig(bind=f"unix:{own}/s"),
    )
    peers = Peers.from_config(given)
    for folder in (own, store, named):
        assert allows(peers, f"unix:{folder}/any")
    for path in (
        other / "socket",
        named / "below" / "s",
        named / "link",
        f"{named}/../other/socket",
        "/var/run/docker.sock",
    ):
        with pytest.raises(Forbidden, match="--peer unix:/"):
            peers.check_address(f"unix:{path}", "prefill")
    with pytest.raises(ConfigError, match="unix:/FOLDER"):
        Peers(["unix:relative"])


@pytest.mark.parametrize(
    "wrong",
    [
        "file:///etc/passwd",
        "10.0.0.7:8000",
        "http://",
        "http://a@10.0.0.7",
        "http://10.0.0.7/?x=1",
        "http://x:99999",
        "http://a b",
    ],
)
def test_malformed_urls(wrong: str) -> None:
    """A malformed URL or address is an error of the client."""
    with pytest.raises(BadRequest) as caught:
        Peers(["*"]).check_url(wrong, "to")
    assert caught.value.param == "to" and not isinstance(caught.value, Forbidden)
    with pytest.raises(BadRequest):
        Peers(["*"]).check_address("nonsense", "prefill")


@pytest.mark.parametrize(
    "trick",
    [
        "http://127.0.0.1\\@10.0.0.7/",
        "http://127.0.0.1#@10.0.0.7/",
        "http://10.0.0.7\t:80",
        "http://127.0.0.1%2e10.0.0.7",
    ],
)
def test_ambiguous_addresses(trick: str) -> None:
    """A text that two parsers could read as two different hosts is refused."""
    with pytest.raises((BadRequest, Forbidden)):
        Peers.from_config(Config()).check_url(trick, "to")
