"""Who takes part in `vllm/offload.py`: a vLLM and what stands behind it, with its servers and folders."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_LMCACHE = (
    "pip install --no-deps lmcache==0.5.6 aiofile caio aiofiles blake3 nvtx sortedcontainers py-cpuinfo awscrt cufile-python "
    "redis opentelemetry-exporter-prometheus grpcio-observability google-api-core"
)
_MOONCAKE = (
    "pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13 nvidia-cuda-runtime-cu12; "
    "apt install libibverbs1 librdmacm1 libnuma1"
)


@dataclass(frozen=True)
class Server:
    """A process that stands beside vLLM. `port`: where it listens when it is ready."""

    command: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class Contender:
    """One way to run vLLM.

    Attributes:
        transfer: vLLM's `kv_transfer_config`; None is vLLM alone.
        python: the interpreter that has vLLM and what it needs.
        servers: started before vLLM, ended after it; they outlive a vLLM that is started again.
        store: the folder or the file that holds what was saved, None if no file does.
        hidden: why saved data cannot be damaged from outside; empty if it can.
        whole: whether a prompt must be computed in one step to be saved right.
    """

    name: str
    about: str
    transfer: dict[str, Any] | None
    python: str
    servers: tuple[Server, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    store: Path | None = None
    imports: tuple[str, ...] = ()
    install: str = ""
    whole: bool = False
    hidden: str = ""


@dataclass(frozen=True)
class Places:
    """Where contenders may write, and the interpreters they run on."""

    disk: Path
    memory: Path
    vllm: str
    lmcache: str
    mooncake: str
    memory_gib: int
    lmcache_chunk: int


def contenders(places: Places) -> list[Contender]:
    """All of them."""
    return [
        Contender("alone", "vLLM and its own prefix cache", None, places.vllm),
        *_forewords(places),
        _lmcache(places),
        _mooncake(places),
        _example(places),
    ]


def _forewords(places: Places) -> list[Contender]:
    size = f"{places.memory_gib}GiB"
    disk, tmpfs = places.disk / "foreword", places.memory / "foreword"
    found = []
    for name, about, store, urls in (
        ("memory", "memory, then disk", disk, [f"memory://?size={size}", f"disk://{disk}?size=8GiB"]),
        ("tmpfs", "a folder on tmpfs", tmpfs, [f"disk://{tmpfs}?size={size}"]),
        ("disk", "a folder on disk", disk, [f"disk://{disk}?size=8GiB"]),
    ):
        transfer = {
            "kv_connector": "ForewordConnector",
            "kv_connector_module_path": "foreword.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"store": urls},
        }
        imports = ("xxhash",)
        found.append(
            Contender(
                f"foreword-{name}",
                f"ForewordConnector over {about}",
                transfer,
                places.vllm,
                store=store,
                imports=imports,
                install="pip install foreword",
                hidden="its memory is that of vLLM's process" if name == "memory" else "",
            )
        )
    return found


def _lmcache(places: Places) -> Contender:
    port, http = free_port(), free_port()
    segment = f"{places.memory.name}-lmcache"
    start = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()"
    command = (
        *(places.lmcache, "-c", start, "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--http-host", "127.0.0.1", "--http-port", str(http), "--disable-observability", "--shm-name", segment),
        *("--l1-size-gb", str(places.memory_gib), "--eviction-policy", "LRU", "--no-l1-use-lazy"),
        *("--chunk-size", str(places.lmcache_chunk), "--supported-transfer-mode", "engine_driven"),
    )
    transfer = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    return Contender(
        "lmcache",
        f"LMCacheMPConnector and a server over shared memory, chunks of {places.lmcache_chunk} tokens",
        transfer,
        places.lmcache,
        (Server(command, port),),
        {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"},
        Path("/dev/shm") / f"lmcache_l1_pool_{segment}",
        ("lmcache.integration.vllm.lmcache_mp_connector",),
        _LMCACHE,
    )


def _mooncake(places: Places) -> Contender:
    master, metrics, pool = free_port(), free_port(), free_port()
    libraries = sorted(Path(places.mooncake).parent.parent.glob("lib/python*/site-packages/nvidia/cuda_runtime/lib"))
    settings = places.disk / "mooncake.json"
    shared = {"metadata_server": "P2PHANDSHAKE", "master_server_address": f"127.0.0.1:{master}", "protocol": "tcp"}
    settings.write_text(
        json.dumps({**shared, "mode": "standalone-store", "global_segment_size": 0, "local_buffer_size": "1GB"})
    )
    run = "import sys; from mooncake.{0} import main; sys.argv[0] = '{0}'; main()"
    servers = (
        Server(
            (
                *(places.mooncake, "-c", run.format("cli"), "--rpc_address=127.0.0.1", f"--rpc_port={master}"),
                *("--metrics_host=127.0.0.1", f"--metrics_port={metrics}", "--logtostderr"),
            ),
            master,
        ),
        Server(
            (
                *(places.mooncake, "-c", run.format("cli_client"), "--host=127.0.0.1", f"--port={pool}"),
                *(f"--{name}={value}" for name, value in shared.items()),
                f"--global_segment_size={places.memory_gib} GB",
                "--logtostderr",
            ),
            pool,
        ),
    )
    return Contender(
        "mooncake",
        "MooncakeStoreConnector, a master and a pool in its own process, over TCP",
        {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"lookup_rpc_port": str(pool)},
        },
        places.mooncake,
        servers,
        {
            "MOONCAKE_CONFIG_PATH": str(settings),
            "VLLM_HOST_IP": "127.0.0.1",
            "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
            "PYTHONHASHSEED": "0",
            "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        },
        imports=("mooncake.store",),
        install=_MOONCAKE,
        hidden="its pool is the memory of a process",
    )


def _example(places: Places) -> Contender:
    folder = places.memory / "example"
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }
    about = "vLLM's ExampleConnector over tmpfs; prompts in one step, as it saves no others right"
    return Contender("example", about, transfer, places.vllm, store=folder, whole=True)


def free_port() -> int:
    """A free port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
