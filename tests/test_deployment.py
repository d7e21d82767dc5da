"""Files in deploy/: the Helm chart, the systemd units and the images. Without a cluster, and without building images."""

from __future__ import annotations

import configparser
import copy
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml
from example_counts import represented
from typer.testing import CliRunner

import foreword
from foreword.cli.flags import config_flags, load_config, with_config, with_router_config
from foreword.config_layers import is_service_variable
from foreword.configuration import Config
from foreword.router.discovery import configured_replicas
from foreword.router_extras.gateway.gateway_headers import GatewaySettings
from foreword.router_extras.kubernetes import ServiceSpec
from foreword.store.urls import check_stores
from foreword.store_config import EncryptionConfig

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
# Not in Kubernetes itself, so without a schema here.
CUSTOM = {"InferencePool", "ScaledObject"}
STORES = ["memory://?size=1GiB", "disk:///cache?size=2GiB&pin_share=0.25"]
EVERYTHING = {
    "router": {"services": ["/old:http", "llm/vllm"], "existingSecret": "keys", "args": ["--tokenizer", "/models/m"]},
    "picker": {
        "enabled": True,
        "tlsSecret": "tls",
        "inferencePool": {"create": True, "selector": {"app": "vllm"}},
    },
    "servers": {
        "llama": {
            "kind": "vllm",
            "image": "vllm-foreword",
            "args": ["m"],
            "stores": STORES,
            "kvEvents": True,
            "cache": {"sizeLimit": "3Gi"},
            "resources": {"limits": {"nvidia.com/gpu": 1}},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
        "own": {
            "kind": "foreword",
            "image": "foreword-server",
            "replicas": 2,
            "stores": STORES,
            "kvEvents": True,
            "role": "prefill",
            "cache": {"persistentVolumeClaim": {"claimName": "shared"}},
            "existingSecret": "keys",
            "env": [{"name": "HF_HOME", "value": "/cache/huggingface"}],
            "drainSeconds": 7,
        },
    },
    "networkPolicy": {"from": [{"podSelector": {"matchLabels": {"app": "gateway"}}}]},
    "autoscaling": {"enabled": True, "server": "llama", "model": "m"},
}
# A router in front of servers that exist already.
PLAIN = {"router": {"services": ["llm/vllm:8000"]}}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The chart's objects, by Helm's own engine."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(DEPLOY / "chart")) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    manifests = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    return [found for text in manifests for found in yaml.safe_load_all(text) if found]


def notes(values: dict[str, Any]) -> str:
    """Notes of Helm after an installation."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(DEPLOY / "chart")) as chart:
        files = chart.render(values, name="demo", namespace="prod")
    [text] = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    return str(text)


def workloads(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pods' specifications of all Deployments."""
    return {one["metadata"]["name"]: one["spec"]["template"] for one in objects if one["kind"] == "Deployment"}


def container(template: dict[str, Any]) -> dict[str, Any]:
    [one] = template["spec"]["containers"]
    assert isinstance(one, dict)
    return one


def parsed(wrap: Any, arguments: list[str]) -> Config:
    """The configuration that a command has with these arguments."""
    seen: list[Config] = []
    app = typer.Typer()
    app.command()(wrap(lambda config: seen.append(config)))
    environ = {key: None for key in os.environ if key.startswith("FOREWORD_")}
    result = CliRunner().invoke(app, arguments, env=environ, catch_exceptions=False)
    assert seen, result.output
    return seen[0]


@pytest.mark.parametrize("values", represented([PLAIN, EVERYTHING], EVERYTHING), ids=["plain", "everything"])
def test_objects_are_valid(values: dict[str, Any]) -> None:
    """Every object follows the schema of Kubernetes 1.29 and of the newest version known, without unknown fields."""
    schemas = pytest.importorskip("kubernetes_validate")
    objects = rendered(values)
    for one in objects:
        if one["kind"] not in CUSTOM:
            for version in ("1.29", schemas.latest_version()):
                schemas.validate(one, version, strict=True)
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in objects]
    assert len(set(names)) == len(names)
    assert {"Deployment", "Service", "Role", "RoleBinding", "ServiceAccount"} <= {one["kind"] for one in objects}


def server_of(**more: Any) -> dict[str, Any]:
    """Values with one server."""
    return {"servers": {"llama": {"kind": "vllm", "image": "x", **more}}}


def routers(**more: Any) -> dict[str, Any]:
    """Values with a router in front of servers that exist."""
    return {"router": {**PLAIN["router"], **more}}


CANNOT_RUN = [
    ({"servers": {"Llama_3": {"kind": "vllm", "image": "x"}}}, "Llama_3"),
    (server_of(stores=["dsk:///cache"]), "stores"),
    (server_of(stores=["disk:///data?size=1GiB"]), "stores"),
    (server_of(stores=["disk:///cachefolder"]), "stores"),
    (server_of(stores=["disk:///cache?size=300GiB"], cache={"sizeLimit": "220Gi"}), "cache.sizeLimit 220Gi"),
    (
        server_of(stores=["disk:///cache?size=2GiB", "disk:///cache/b?size=2GiB"], cache={"sizeLimit": "3Gi"}),
        "evict the pod",
    ),
    (server_of(stores=["disk:///cache"], cache={"sizeLimit": "20Gi"}), "evict the pod"),
    ({**server_of(), "autoscaling": {"enabled": True, "server": "llama"}}, "model"),
    (
        {**server_of(), "autoscaling": {"enabled": True, "server": "llama", "model": "m", "minReplicas": 9}},
        "minReplicas",
    ),
    ({**PLAIN, "router": {**PLAIN["router"], "service": {"port": 99999}}}, "port"),
    ({**PLAIN, "router": {**PLAIN["router"], "service": {"type": "Loadbalancer"}}}, "type"),
    (routers(autoscaling={"enabled": True, "minReplicas": 9}), "minReplicas"),
    (routers(autoscaling={"enabled": True}, resources={"requests": {"cpu": None}}), "resources"),
    (server_of(role="prefill", replicas=0), "replicas"),
    (server_of(surge=-1), "surge"),
    ({**server_of(), "autoscaling": {"namespaceLabel": "a-b"}}, "namespaceLabel"),
    # Keys that the chart writes itself would stand twice.
    (server_of(pod={"securityContext": {}}), "securityContext"),
    (server_of(pod={"volumes": []}), "volumes"),
    (routers(pod={"terminationGracePeriodSeconds": 5}), "terminationGracePeriodSeconds"),
    ({"servers": {"router": {"kind": "vllm", "image": "x"}}}, "router"),
    ({**PLAIN, "picker": {"enabled": True, "objectives": ["llama"]}}, "objectives"),
    ({**PLAIN, "picker": {"enabled": True, "objectives": ["llm/a", "batch=-1", "batch=2"]}}, "has batch twice"),
    # The chart's flags would replace it.
    (
        {
            "router": {
                **PLAIN["router"],
                "env": [{"name": "FOREWORD_ROUTER_PICKER_OBJECTIVES", "value": "premium=10"}],
            },
            "picker": {"enabled": True, "inferencePool": {"create": True, "selector": {"app": "vllm"}}},
        },
        "picker.objectives",
    ),
]


@pytest.mark.parametrize(("values", "named"), CANNOT_RUN, ids=[f"{number}" for number in range(len(CANNOT_RUN))])
def test_values_that_cannot_run(values: dict[str, Any], named: str) -> None:
    """Values that Kubernetes refuses, or with which a server could not start or would be evicted, are refused by name."""
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError) as error:
        rendered(values)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "more",
    [
        {"stores": ["disk:///cache?size=2GiB&owner=any", "disk:///cache/b?size=1GB"], "cache": {"sizeLimit": "3Gi"}},
        {"stores": ["disk:///dev/shm/kv?size=9GiB", "s3://b/p", "redis+sentinel://a/m"], "cache": {"sizeLimit": "3Gi"}},
        {"stores": ["disk:///cache?size=1.5TiB"]},
        {"home": {"sizeLimit": "100Gi"}, "env": [{"name": "HOME", "value": "/cache"}]},
    ],
)
def test_values_that_can_run(more: dict[str, Any]) -> None:
    """A disk that fits, one in memory, one on a volume without a limit, and a limited HOME in another place are rendered. Each
    volume has a kind, and no variable stands twice."""
    schemas = pytest.importorskip("kubernetes_validate")
    objects = rendered({**server_of(**more), "router": {"autoscaling": None}})
    for one in objects:
        schemas.validate(one, "1.29", strict=True)
    [template] = [
        one["spec"]["template"]
        for one in objects
        if one["metadata"]["name"].endswith("-llama") and "template" in one["spec"]
    ]
    assert all(len(volume) == 2 for volume in template["spec"]["volumes"])
    names = [one["name"] for one in container(template)["env"]]
    assert len(set(names)) == len(names)


def test_chart_without_replicas() -> None:
    """Helm's linter has no complaint, and the chart's version is Foreword's. Without replicas an installation is refused."""
    helm = pytest.importorskip("helm_python")
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text())
    assert foreword.__version__.startswith(chart["version"]) and chart["appVersion"] == chart["version"]
    assert helm.lint(str(DEPLOY / "chart"))["errors"] == []
    with pytest.raises(helm.HelmError, match=r"router\.services"):
        rendered({})


@pytest.mark.parametrize(
    "values",
    [
        {**PLAIN, "picker": {"inferencePool": {"create": True, "selector": {"app": "vllm"}}}},
        {**PLAIN, "autoscaling": {"enabled": True, "server": "llama", "model": "m"}},
        {"router": {"services": ["name-without-namespace"]}},
        {"router": {**PLAIN["router"], "nodeSelectors": {}}},
        {"servers": {"llama": {"kind": "vllm"}}},
    ],
)
def test_values_that_fit_nothing(values: dict[str, Any]) -> None:
    """Unknown values, and values that would make objects without effect, are refused by name."""
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError, match=r"inferencePool|autoscaling\.server|services|nodeSelectors|image"):
        rendered(values)


def test_number_of_replicas() -> None:
    """Zero is a number, for seconds too. Where KEDA sets the number, an upgrade of the release does not."""
    server = {"kind": "vllm", "image": "i", "replicas": 0, "drainSeconds": 0, "pod": {"runtimeClassName": "nvidia"}}
    scale = {"autoscaling": {"enabled": True, "server": "llama", "model": "m"}}
    for values, expected in (({}, 0), (scale, None)):
        objects = rendered({"servers": {"llama": server}, **values})
        [spec] = [one["spec"] for one in objects if one["kind"] == "Deployment" and "llama" in one["metadata"]["name"]]
        assert spec.get("replicas") == expected
        assert spec["template"]["spec"]["runtimeClassName"] == "nvidia"
        assert "--shutdown-timeout=0" in container(spec["template"])["args"]


def test_selectors_ports_and_times() -> None:
    """Services select one workload each and name its ports; probes too; a pod may live as long as its drain takes."""
    objects = rendered(EVERYTHING)
    pods = workloads(objects)
    assert set(pods) == {"demo-router", "demo-llama", "demo-own"}
    for one in objects:
        if one["kind"] == "Service":
            selector = one["spec"]["selector"].items()
            [name] = [name for name, pod in pods.items() if selector <= pod["metadata"]["labels"].items()]
            assert name == one["metadata"]["name"]
            ports = {port["name"] for port in container(pods[name])["ports"]}
            assert {port["targetPort"] for port in one["spec"]["ports"]} <= ports
    for template in pods.values():
        one = container(template)
        ports = {port["name"] for port in one["ports"]}
        probes = [one[name] for name in ("startupProbe", "livenessProbe", "readinessProbe") if name in one]
        assert all(probe["httpGet"]["port"] in ports for probe in probes)
        flags = re.findall(r"--(?:drain-seconds|shutdown-timeout)=(\d+)", " ".join(one["args"]))
        pause = float(one["lifecycle"]["preStop"]["exec"]["command"][1])
        assert template["spec"]["terminationGracePeriodSeconds"] >= int(flags[0]) + pause + 5


def test_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """The containers' arguments are those of Foreword's commands; vLLM's JSON names the connector and stores as written."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    pods = workloads(rendered(EVERYTHING))
    config = parsed(with_router_config, container(pods["demo-router"])["args"])
    assert configured_replicas(config.router) == []
    services = [ServiceSpec.parse(text) for text in config.router.replica_services]
    assert [(str(one), one.port, one.replica.role) for one in services] == [
        ("prod/old", "http", "both"),
        ("llm/vllm", None, "both"),
        ("prod/demo-llama", "http", "both"),
        ("prod/demo-own", "http", "prefill"),
    ]
    assert config.router.picker == "0.0.0.0:9002" and config.server.host == "0.0.0.0"
    assert config.router.picker_objectives == ("prod/demo",)
    assert GatewaySettings(config.router)
    config = parsed(with_config, container(pods["demo-own"])["args"])
    assert list(config.store.urls) == STORES and config.server.drain_seconds == 7

    settings = dict(
        text[2:].split("=", 1) for text in container(pods["demo-llama"])["args"] if text.startswith("--kv-")
    )
    transfer, events = json.loads(settings["kv-transfer-config"]), json.loads(settings["kv-events-config"])
    package = ROOT / Path(*transfer["kv_connector_module_path"].split("."), "__init__.py")
    assert transfer["kv_connector"] in package.read_text()
    assert transfer["kv_connector_extra_config"] == {"store": STORES}
    ports = {port["containerPort"] for port in container(pods["demo-llama"])["ports"]}
    assert {int(events[name].rpartition(":")[2]) for name in ("endpoint", "replay_endpoint")} <= ports


def kubelet_variables(*services: dict[str, Any]) -> dict[str, str]:
    """The variables that the kubelet sets for Services (kubernetes, pkg/kubelet/envvars/envvars.go)."""
    found: dict[str, str] = {}
    for number, service in enumerate(services):
        name, address = service["metadata"]["name"].upper().replace("-", "_"), f"10.96.0.{number + 1}"
        first, *_ = ports = service["spec"]["ports"]
        found |= {f"{name}_SERVICE_HOST": address, f"{name}_SERVICE_PORT": str(first["port"])}
        found |= {
            f"{name}_SERVICE_PORT_{one['name'].upper().replace('-', '_')}": str(one["port"])
            for one in ports
            if "name" in one
        }
        found[f"{name}_PORT"] = f"tcp://{address}:{first['port']}"
        for one in ports:
            protocol, port = one.get("protocol", "TCP"), one["port"]
            place = f"{name}_PORT_{port}_{protocol}"
            found |= {place: f"{protocol.lower()}://{address}:{port}", f"{place}_PROTO": protocol.lower()}
            found |= {f"{place}_PORT": str(port), f"{place}_ADDR": address}
    return found


def service(name: str, *ports: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"ports": list(ports or ({"port": 80},))}}


def test_pods_get_no_variables_of_services() -> None:
    """No pod of the chart gets the kubelet's variables for the Services of its namespace, unless its values say so."""
    for values in (PLAIN, EVERYTHING):
        assert [one["spec"]["enableServiceLinks"] for one in workloads(rendered(values)).values()] == [False] * (
            1 + len(values.get("servers", {}))
        )
    asked = {**PLAIN, "router": {**PLAIN["router"], "pod": {"enableServiceLinks": True}}}
    assert [one["spec"]["enableServiceLinks"] for one in workloads(rendered(asked)).values()] == [True]


SERVICES = (
    service("foreword"),
    service("foreword-x", {"name": "http", "port": 80}, {"name": "dns-udp", "port": 53, "protocol": "UDP"}),
    *(service(f"foreword-{name}", {"name": "port", "port": 8000}) for name in ("serve", "server", "store", "engine")),
    *(
        service(f"foreword-{name}")
        for name in ("encryption", "transfer", "prefixes", "router-metrics", "server-max-queue")
    ),
)
# The workflows that this repository's Makefile, tests and guides use.
OTHERS = dict.fromkeys(("FOREWORD_VLLM_PYTHON", "FOREWORD_SEED", "FOREWORD_DEBUG", "FOREWORD_WHEEL_CXX"), "x")


@pytest.mark.parametrize("command", ["route --replica http://127.0.0.1:1", "serve"])
def test_a_start_among_services(command: str) -> None:
    """A router and a server start with the kubelet's variables for Services of their names, the chart's own among them: one
    warning names the variables, and none has an effect."""
    objects = [one for one in rendered(EVERYTHING) if one["kind"] == "Service"]
    own = [service(one["metadata"]["name"].replace("demo", "foreword"), *one["spec"]["ports"]) for one in objects]
    given = {**kubelet_variables(*own, *SERVICES), **OTHERS, "FOREWORD_SERVER_LOG_LEVEL": "info"}
    environ = {key: text for key, text in os.environ.items() if not key.startswith("FOREWORD_")} | given
    line = [sys.executable, "-m", "foreword", *command.split(), "--port", "0"]
    with subprocess.Popen(line, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for text in process.stderr:
            said.append(text)
            if " on http://127.0.0.1:" in text:
                break
        process.kill()
    warnings = [text for text in said if "environment" in text]
    assert len(warnings) == 1 and "WARNING" in warnings[0] and "on http" in said[-1], said
    named = re.findall(r"FOREWORD_\w+", warnings[0])
    assert set(named) <= {*given} - {"FOREWORD_SERVER_LOG_LEVEL"} and {*OTHERS, "FOREWORD_PORT"} <= {*named}


GUIDE = (ROOT / "docs" / "guides" / "kubernetes.md").read_text()


def of_the_guide() -> list[dict[str, Any]]:
    """The values in the Kubernetes guide, by section, in order."""
    known = json.loads((DEPLOY / "chart" / "values.schema.json").read_text())["properties"]
    found = []
    for section in GUIDE.split("\n## "):
        blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", section, re.DOTALL)]
        assert all(set(one) <= set(known) for one in blocks)
        found += [functools.reduce(merged, blocks)] if blocks else []
    assert len(found) >= 4
    return found


def merged(base: Any, more: Any) -> Any:
    """Values upon others, as Helm merges them."""
    if not (isinstance(base, dict) and isinstance(more, dict)):
        return more
    return base | {name: merged(base.get(name), value) for name, value in more.items()}


def test_the_values_of_the_guide() -> None:
    """The values of each section of the guide upon those before make objects that follow the schemas of Kubernetes."""
    schemas = pytest.importorskip("kubernetes_validate")
    values: dict[str, Any] = {}
    kinds = set()
    for step in of_the_guide():
        values = merged(values, step)
        for one in rendered(values):
            kinds.add(one["kind"])
            if one["kind"] not in CUSTOM:
                schemas.validate(one, schemas.latest_version(), strict=True)
    assert {"ScaledObject", "InferencePool", "HorizontalPodAutoscaler", "NetworkPolicy"} <= kinds


def installed() -> tuple[list[dict[str, Any]], str]:
    """The objects that the guide's `helm install` makes, and their namespace."""
    helm = pytest.importorskip("helm_python")
    [line] = re.findall(r"^helm install (.*)$", GUIDE, re.MULTILINE)
    name, path, *flags = shlex.split(line)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    [values] = [yaml.safe_load(text) for text in re.findall(rf"```yaml\n# {given['-f']}\n(.*?)```", GUIDE, re.DOTALL)]
    with helm.Chart.load(str(ROOT / path)) as chart:
        files = chart.render(values, name=name, namespace=given["-n"])
    manifests = [text for file, text in files.items() if not file.endswith("NOTES.txt")]
    return [one for text in manifests for one in yaml.safe_load_all(text) if one], given["-n"]


def test_the_guides_install_starts(tmp_path: Path) -> None:
    """The router that the guide installs starts with its container's arguments and Secret, and with the variables that the
    kubelet would set for the Services of its namespace: the guide's own, vLLM's, and that of the Kubernetes API."""
    objects, namespace = installed()
    one = container(workloads(objects)["foreword-router"])
    said = " ".join(re.findall(r"--from-literal=(\w+)=", GUIDE))
    secret = dict.fromkeys(said.split(), "a key of the guide, of enough characters")
    assert one["envFrom"] == [{"secretRef": {"name": "foreword-router"}}] and len(secret) == 2
    own = [found for found in objects if found["kind"] == "Service"]
    api = {"metadata": {"name": "kubernetes"}, "spec": {"ports": [{"name": "https", "port": 443}]}}
    vllm = service("vllm", {"name": "http", "port": 8000})
    environ = {key: text for key, text in os.environ.items() if not key.startswith("FOREWORD_")}
    environ |= {**kubelet_variables(api, vllm, *own), **secret, "HOME": str(tmp_path)}
    assert environ["FOREWORD_ROUTER_PORT"].startswith("tcp://") and environ["KUBERNETES_SERVICE_HOST"]
    # The address of the container, and a tokenizer that is here.
    replaced = {"--host=0.0.0.0": "--host=127.0.0.1", "--port=8000": "--port=0"}
    tokenizer = str(ROOT / "foreword" / "models" / "stdlib-nano")
    arguments = [replaced.get(text, text).replace("owner/name", tokenizer) for text in one["args"]]
    assert f"--replica-service={namespace}/vllm:http" in arguments and tokenizer in arguments
    line = [sys.executable, "-m", "foreword", "route", *arguments]
    with subprocess.Popen(line, env=environ, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stderr is not None
        lines = []
        for text in process.stderr:
            lines.append(text)
            if " on http://127.0.0.1:" in text:
                break
        process.kill()
    assert lines and "routes on" in lines[-1], lines
    [warning] = [text for text in lines if "environment" in text]
    assert "FOREWORD_ROUTER_PORT" in warning and "ADMIN_KEY" not in warning


def test_variables_of_services_are_no_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration is the same without and with the kubelet's variables for Services of any name below `foreword`; it has
    no key of a name that only Kubernetes uses."""
    given = kubelet_variables(*SERVICES)
    assert load_config(environ=given) == Config()
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert EncryptionConfig.from_environment() == EncryptionConfig()
    for flag in config_flags():
        name = f"{flag.section}_{flag.key}".upper()
        assert not is_service_variable(name, "1"), name
        assert is_service_variable(f"{name}_PORT", "tcp://10.0.0.1:80")


def test_rights() -> None:
    """The router may list and watch EndpointSlices in the namespaces of its Services, and patch pods there if it writes what
    they hold; the objectives of the pool that its picker follows; and nothing else."""
    for values, more in ((EVERYTHING, []), (with_router(podDeletionCost=True), [PATCH_PODS])):
        objects = rendered(values)
        roles = {
            (one["metadata"]["namespace"], one["metadata"]["name"]): one for one in objects if one["kind"] == "Role"
        }
        followed = roles.pop(("prod", "prod-demo-router-objectives"))
        assert followed["rules"] == [OBJECTIVES]
        assert set(roles) == {("prod", "prod-demo-router"), ("llm", "prod-demo-router")}
        for one in roles.values():
            slices, *rest = one["rules"]
            assert slices == {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            }
            assert rest == more
        router = workloads(objects)["demo-router"]
        assert ("--pod-deletion-cost" in container(router)["args"]) == bool(more)
        account = router["spec"]["serviceAccountName"]
        for one in objects:
            if one["kind"] == "RoleBinding":
                assert one["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "prod"}]
                role = one["metadata"]["namespace"], one["roleRef"]["name"]
                assert role in roles or one["roleRef"]["name"] == followed["metadata"]["name"]
        bound = [one["roleRef"]["name"] for one in objects if one["kind"] == "RoleBinding"]
        assert sorted(bound) == ["prod-demo-router", "prod-demo-router", "prod-demo-router-objectives"]


OWN_POOL = {"create": True, "selector": {"app": "vllm"}}


@pytest.mark.parametrize(
    ("picker", "known", "read"),
    [
        ({"enabled": True}, [], []),
        ({"enabled": False, "objectives": ["pools/llama"]}, [], []),
        ({"enabled": True, "objectives": ["pools/llama"]}, ["pools/llama"], ["pools"]),
        ({"enabled": True, "objectives": ["premium=10", "low=-1"]}, ["premium=10", "low=-1"], []),
        (
            {"enabled": True, "objectives": ["premium=10", "a/x", "a/y"], "inferencePool": OWN_POOL},
            ["premium=10", "a/x", "a/y", "prod/demo"],
            ["a", "prod"],
        ),
        ({"enabled": True, "inferencePool": {**OWN_POOL, "objectives": False}}, [], []),
    ],
)
def test_whose_objectives_are_followed(picker: dict[str, Any], known: list[str], read: list[str]) -> None:
    """A picker knows the objectives that its values name, and follows those of the chart's pool unless they say not to. In the
    namespaces of the pools that it follows it may read them, and nowhere else."""
    objects = rendered({**PLAIN, "picker": picker})
    flags = [one for one in container(workloads(objects)["demo-router"])["args"] if "objectives" in one]
    assert flags == [f"--picker-objectives={one}" for one in known]
    reads = [one["metadata"]["namespace"] for one in objects if one["kind"] == "Role" and OBJECTIVES in one["rules"]]
    assert reads == read
    bound = [one["metadata"]["namespace"] for one in objects if one["kind"] == "RoleBinding"]
    assert sorted(bound) == sorted(["llm", *read])


OBJECTIVES = {
    "apiGroups": ["inference.networking.x-k8s.io", "llm-d.ai"],
    "resources": ["inferenceobjectives"],
    "verbs": ["list", "watch"],
}
PATCH_PODS = {"apiGroups": [""], "resources": ["pods"], "verbs": ["patch"]}


def with_router(**more: Any) -> dict[str, Any]:
    """All that the chart has, with further values of the router."""
    return {**EVERYTHING, "router": {**EVERYTHING["router"], **more}}


def test_containers_have_no_privileges() -> None:
    """No container of the chart runs as root, gains privileges, has capabilities, a writable root or an unconfined profile, and
    each has a writable /tmp; values add to this and take it back."""
    pods = workloads(rendered(EVERYTHING))
    for template in pods.values():
        one, spec = container(template), template["spec"]
        assert spec["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        mounted = {mount["mountPath"]: mount["name"] for mount in one["volumeMounts"]}
        assert "/tmp" in mounted and set(mounted.values()) == {volume["name"] for volume in spec["volumes"]}
        homes = [variable["value"] for variable in one.get("env", []) if variable["name"] == "HOME"]
        assert all(home in mounted for home in homes)
    own = {"podSecurity": {"runAsNonRoot": False, "runAsUser": 0}}
    own |= {"containerSecurity": {"capabilities": {"add": ["IPC_LOCK"]}}}
    changed = workloads(rendered(server_of(**own)))["demo-llama"]
    assert changed["spec"]["securityContext"]["runAsUser"] == 0
    assert container(changed)["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_disruptions_and_spread() -> None:
    """A pod of each workload may leave at a time, and a pod that is not ready may always; pods are spread where there is room,
    unless their values say how."""
    objects = rendered(EVERYTHING)
    pods = workloads(objects)
    budgets = {one["metadata"]["name"]: one["spec"] for one in objects if one["kind"] == "PodDisruptionBudget"}
    assert set(budgets) == set(pods)
    for name, template in pods.items():
        labels = template["metadata"]["labels"]
        assert budgets[name]["maxUnavailable"] == 1
        assert budgets[name]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        spread = template["spec"]["topologySpreadConstraints"]
        assert [one["topologyKey"] for one in spread] == ["kubernetes.io/hostname", "topology.kubernetes.io/zone"]
        for selector in (budgets[name]["selector"], *(one["labelSelector"] for one in spread)):
            assert selector["matchLabels"].items() <= labels.items()
            matching = [
                other
                for other in pods.values()
                if selector["matchLabels"].items() <= other["metadata"]["labels"].items()
            ]
            assert matching == [template]
    own = [{"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}]
    changed = workloads(rendered(server_of(pod={"topologySpreadConstraints": own})))["demo-llama"]
    assert changed["spec"]["topologySpreadConstraints"] == own


def test_routers_scale_by_processor_time() -> None:
    """An upgrade does not set the number of routers where an autoscaler does, and the autoscaler is that of their
    Deployment."""
    plain = [one for one in rendered(PLAIN) if one["kind"] in ("Deployment", "HorizontalPodAutoscaler")]
    assert [one["spec"].get("replicas") for one in plain] == [2]
    objects = rendered(routers(autoscaling={"enabled": True, "maxReplicas": 5}))
    [scaler] = [one for one in objects if one["kind"] == "HorizontalPodAutoscaler"]
    [workload] = [one for one in objects if one["kind"] == "Deployment"]
    assert "replicas" not in workload["spec"]
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": workload["metadata"]["name"]}
    assert scaler["spec"]["scaleTargetRef"] == target
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 5)
    assert scaler["spec"]["metrics"][0]["resource"]["name"] == "cpu"
    assert container(workload["spec"]["template"])["resources"]["requests"]["cpu"]


def test_the_query_is_of_one_release() -> None:
    """Servers are scaled by the work of this release's routers: another one may serve a model of the same name."""
    values = {**EVERYTHING, "autoscaling": {**EVERYTHING["autoscaling"], "podLabel": "kubernetes_pod_name"}}
    [one] = [one for one in rendered(values) if one["kind"] == "ScaledObject"]
    [trigger] = one["spec"]["triggers"]
    query = trigger["metadata"]["query"]
    labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', query))
    assert labels == {"model_name": "m", "namespace": "prod", "kubernetes_pod_name": "demo-router-.+"}
    assert re.fullmatch(labels["kubernetes_pod_name"], "demo-router-7d9f-x") and query.startswith("sum(")


def test_an_upgrade_of_one_replica() -> None:
    """Helm says of one replica without surge that an upgrade is an outage, and how to have none; with a surge a replica leaves
    after its successor has come."""
    for more, warns, strategy in (
        ({}, True, {"maxUnavailable": 1, "maxSurge": 0}),
        ({"replicas": 2}, False, {"maxUnavailable": 1, "maxSurge": 0}),
        ({"surge": 1}, False, {"maxUnavailable": 0, "maxSurge": 1}),
    ):
        values = server_of(**more)
        [one] = [one for one in rendered(values) if one["kind"] == "Deployment" and "llama" in one["metadata"]["name"]]
        assert one["spec"]["strategy"]["rollingUpdate"] == strategy
        said = notes(values)
        assert ("servers.llama.surge" in said) == warns and "demo-router.prod" in said


def test_network_policies() -> None:
    """Pods of the release reach all ports of its servers, those of `from` the HTTP port, and no other pods any. A gateway
    that asks the picker must be listed, since it sends to the servers itself."""
    policies = [one for one in rendered(EVERYTHING) if one["kind"] == "NetworkPolicy"]
    pods = workloads(rendered(EVERYTHING))
    assert {one["metadata"]["name"] for one in policies} == {"demo-llama", "demo-own"}
    for one in policies:
        labels = pods[one["metadata"]["name"]]["metadata"]["labels"]
        assert one["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        own, listed = one["spec"]["ingress"]
        [peer] = own["from"]
        wanted = peer["podSelector"]["matchLabels"].items()
        assert "ports" not in own and all(wanted <= pod["metadata"]["labels"].items() for pod in pods.values())
        assert listed == {**EVERYTHING["networkPolicy"], "ports": [{"port": "http", "protocol": "TCP"}]}
    assert "--kv-events-open" in container(pods["demo-own"])["args"]
    off = rendered({**EVERYTHING, "networkPolicy": {"enabled": False}})
    assert not [one for one in off if one["kind"] == "NetworkPolicy"]
    assert "--kv-events-open" not in container(workloads(off)["demo-own"])["args"]
    with pytest.raises(Exception, match=r"give networkPolicy\.from"):
        rendered({**EVERYTHING, "networkPolicy": {"from": []}})


@pytest.mark.parametrize("name", ["foreword-router", "foreword-server"])
def test_systemd_units(name: str, tmp_path: Path) -> None:
    """systemd knows every key of a unit; its command exists; it waits longer than a drain takes."""
    text = (DEPLOY / "systemd" / f"{name}.service").read_text()
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    command = unit["Service"]["ExecStart"].split()
    assert command[0].endswith("/foreword")
    config = tmp_path / "config.toml"
    config.write_text("[server]\nport = 1\n")
    wrap = {"route": with_router_config, "serve": with_config}[command[1]]
    found = parsed(wrap, [str(config) if part.endswith(".toml") else part for part in command[2:]])
    assert found.server.port == 1
    assert float(unit["Service"]["TimeoutStopSec"]) > found.server.drain_seconds
    if shutil.which("systemd-analyze"):
        copy = tmp_path / f"{name}.service"
        copy.write_text(text.replace(command[0], "/bin/true"))
        checked = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
        assert checked.returncode == 0 and name not in checked.stderr, checked.stderr


def wheels_of(requirements: list[str], found: set[str]) -> set[str]:
    """Names of the folders of `packages/` whose wheels these requirements install, beside those that were found before."""
    for text in requirements:
        match = re.match(r"foreword(?:-([a-z-]+))?(?:\[([\w,-]+)\])?(?===|$)", text)
        if match is None:
            continue
        product = match[1] or "cache"
        asked = {f"{product}[{extra}]" for extra in (match[2] or "").split(",")} - found
        if not asked:
            continue
        found |= asked
        project = tomllib.loads((ROOT / "packages" / product / "pyproject.toml").read_text())["project"]
        wheels_of(project["dependencies"], found)
        for extra in match[2].split(",") if match[2] else ():
            wheels_of(project["optional-dependencies"][extra], found)
    return {name.partition("[")[0] for name in found}


@pytest.mark.parametrize(("target", "command"), [("router", "route"), ("server", "serve"), ("vllm", ""), ("tools", "")])
def test_images(target: str, command: str) -> None:
    """An image installs all wheels that its extras need and no others, by their paths, and runs the command of its chart.

    A wheel that is missing would be asked of a package index, where somebody else may have its name.
    """
    text = (DEPLOY / "Containerfile").read_text()
    stages = dict(re.findall(r"^FROM [^\n]* AS ([\w-]+)\n(.*?)(?=^FROM|\Z)", text, re.MULTILINE | re.DOTALL))
    images = ("router", "server", "vllm", "tools")
    assert set(stages) == {"sources", *images, *(f"{name}-wheels" for name in images)}
    [extras] = re.findall(r"/wheels/\*\.whl \"\$\(ls /wheels/foreword-\[0-9\]\*\.whl\)\[([\w,]+)\]\"", stages[target])
    [built] = re.findall(r"for product in ([\w -]+); do", stages[f"{target}-wheels"])
    assert wheels_of([f"foreword[{extras}]"], set()) == set(built.split())
    if command:
        assert f'ENTRYPOINT ["foreword", "{command}"]' in stages[target]


def test_context_of_images() -> None:
    """Files that the images copy are in the context of their build, and nothing else: no environment, no tests."""
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Containerfile").read_text(), re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert sources == kept and all((ROOT / name).exists() for name in sources)


# Files of deploy/ by the names of their schemas (tests/schemas/prune.py).
ORCHESTRATORS = {
    "rayservice": "kuberay/rayservice.yaml",
    "llminferenceservice": "kserve/llminferenceservice.yaml",
    "inferenceservice": "kserve/inferenceservice.yaml",
    "llm-d-modelservice": "llm-d/values.yaml",
}


# Those with vLLM's own offloading, and Foreword's stores behind it.
OFFLOADING = {
    "llminferenceservice": "kserve/llminferenceservice-offloading.yaml",
    "llm-d-modelservice": "llm-d/values-offloading.yaml",
}


def orchestrated(name: str, files: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Content of a file of deploy/, and its schema."""
    found = yaml.safe_load((DEPLOY / files[name]).read_text())
    return found, json.loads((ROOT / "tests" / "schemas" / f"{name}.json").read_text())


def pods(schema: Any, found: Any) -> Iterator[dict[str, Any]]:
    """The pods in an object, where its schema leaves them to Kubernetes."""
    if isinstance(schema, dict) and schema.get("pod"):
        yield {key: found[key] for key in ("containers", "terminationGracePeriodSeconds", "volumes") if key in found}
    if isinstance(found, dict):
        for key, one in found.items():
            yield from pods((schema or {}).get("properties", {}).get(key), one)
    elif isinstance(found, list):
        for one in found:
            yield from pods((schema or {}).get("items"), one)


def vllm_arguments(name: str, found: dict[str, Any]) -> list[str]:
    """The arguments that vLLM gets."""
    spec = found.get("spec", {})
    if name == "rayservice":
        [application] = yaml.safe_load(spec["serveConfigV2"])["applications"]
        [llm] = application["args"]["llm_configs"]
        return [f"--kv-transfer-config={json.dumps(llm['engine_kwargs']['kv_transfer_config'])}"]
    if name == "llminferenceservice":  # KServe's template gives the variable to `eval`
        [variable] = spec["template"]["containers"][0]["env"]
        script = "eval \"printf '%s\\n' ${VLLM_ADDITIONAL_ARGS}\""
        done = subprocess.run(["bash", "-c", script], env={variable["name"]: variable["value"]}, capture_output=True)
        *some, flag, value = done.stdout.decode().splitlines()
        return [*some, f"{flag}={value}"]
    containers = spec["predictor"]["containers"] if spec else found["decode"]["containers"]
    return [str(argument) for argument in containers[0]["args"]]


@pytest.mark.parametrize("name", OFFLOADING)
def test_offloading_under_orchestrators(name: str) -> None:
    """Files with vLLM's own offloading hold to it too: vLLM gets the tier with a store that exists, in a mounted folder, and no
    more host memory than is mounted for it."""
    transfer, found = checked(name, OFFLOADING)
    extra = transfer.pop("kv_connector_extra_config")
    assert transfer == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    [tier] = extra.pop("secondary_tiers")
    assert extra == {"spec_name": "TieringOffloadingSpec"}
    [url] = check_stores(tier.pop("store"))
    assert tier == {"type": "ForewordTier", "module_path": "foreword.integrations.vllm"}
    pod = found["decode"] if "decode" in found else found["spec"]["template"]
    [container] = pod["containers"]
    mounts = {one["mountPath"]: one["name"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one for one in pod["volumes"]}
    assert url.path in mounts and set(mounts.values()) == set(volumes)
    arguments = " ".join(vllm_arguments(name, found)).replace("=", " ").split()
    gibibytes = int(arguments[arguments.index("--kv-offloading-size") + 1])
    assert int(volumes[mounts["/dev/shm"]]["emptyDir"]["sizeLimit"].removesuffix("Gi")) > gibibytes
    assert arguments[arguments.index("--kv-offloading-backend") + 1] == "native"


@pytest.mark.parametrize("name", ORCHESTRATORS)
def test_orchestrators(name: str) -> None:
    """The files for KubeRay, KServe and llm-d follow their schemas, their pods those of Kubernetes; vLLM gets the connector's
    configuration with stores that exist; and an unknown field is noticed."""
    transfer, _ = checked(name, ORCHESTRATORS)
    extra = transfer.pop("kv_connector_extra_config")
    assert transfer == {
        "kv_connector": "ForewordConnector",
        "kv_connector_module_path": "foreword.integrations.vllm",
        "kv_role": "kv_both",
    }
    assert [url.scheme for url in check_stores(extra["store"])] == ["memory", "redis"]


def checked(name: str, files: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Check a file against its schemas. Returns vLLM's `kv_transfer_config` in it, and all of it."""
    schemas = pytest.importorskip("kubernetes_validate")
    found, schema = orchestrated(name, files)
    jsonschema.validate(found, schema)
    for spec in pods(schema, found):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": spec}
        schemas.validate(pod, schemas.latest_version(), strict=True)
    [text] = [one for one in vllm_arguments(name, found) if one.startswith("--kv-transfer-config=")]
    transfer = json.loads(text.partition("=")[2])
    wrong = copy.deepcopy(found)
    part = wrong["modelArtifacts"] if "modelArtifacts" in wrong else wrong["spec"]
    part["unknownField"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknownField"):
        jsonschema.validate(wrong, schema)
    return transfer, found
