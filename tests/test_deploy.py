"""The examples in deploy/: their flags are the server's, their ports, probes and times fit together."""

import configparser
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from serve.__main__ import build_parser
from serve.http import MAX_BODY_BYTES
from serve.server import SERVICE

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
DEPLOY = Path(__file__).parents[1] / "deploy"


def documents(name: str) -> dict[tuple[str, str], Any]:
    found = [one for one in yaml.safe_load_all((DEPLOY / name).read_text()) if one]
    named = {(one["kind"], one["metadata"]["name"]): one for one in found}
    assert len(named) == len(found) and all(one["apiVersion"] for one in found)
    return named


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], Any]:
    return documents("kubernetes.yaml")


@pytest.fixture(scope="module")
def pod(manifests: dict[tuple[str, str], Any]) -> Any:
    deployment = manifests["Deployment", "dflash"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels == manifests["Service", "dflash"]["spec"]["selector"]
    return deployment["template"]["spec"]


def test_the_pod_runs_the_server_with_its_flags(pod: Any) -> None:
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-m", "serve"]
    args = build_parser().parse_args(container["args"])  # an unknown flag ends the test
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": args.port, "http": args.http_port} and args.host == "0.0.0.0"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == args.tp
    # Probes ask what answers: gRPC's health by number, as Kubernetes wants it, HTTP's by name.
    startup, ready, live = (container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness"))
    assert startup["grpc"]["port"] == live["grpc"]["port"] == args.port
    assert "service" not in startup["grpc"] and live["grpc"]["service"] == SERVICE
    assert ready["httpGet"] == {"path": "/health", "port": "http"}
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    # The end: no new calls, then the drain, then the end.
    (_, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] >= int(pause) + args.drain_seconds + 10
    # What it reads and writes is mounted; nothing else can be written.
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert container["securityContext"]["readOnlyRootFilesystem"] and "/tmp" in mounts
    for path, writes in ((args.model, False), (args.draft_model, False), (args.compile_cache_dir, True)):
        (mount,) = [mounts[str(p)] for p in [PurePosixPath(path), *PurePosixPath(path).parents] if str(p) in mounts]
        assert mount.get("readOnly", False) is not writes
    assert str(args.token_file.parent) in mounts


def test_volumes_are_claimed(pod: Any, manifests: dict[tuple[str, str], Any]) -> None:
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == set(volumes)
    claimed = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claimed == {name for kind, name in manifests if kind == "PersistentVolumeClaim"} and len(claimed) == 2
    shared = manifests["PersistentVolumeClaim", "dflash-compile-cache"]["spec"]["accessModes"]
    assert shared == ["ReadWriteMany"]  # more replicas than one write there


def test_the_service_and_its_hash(pod: Any, manifests: dict[tuple[str, str], Any]) -> None:
    service = manifests["Service", "dflash"]["spec"]
    names = {port["name"]: port["containerPort"] for port in pod["containers"][0]["ports"]}
    assert {port["targetPort"]: port["port"] for port in service["ports"]} == names
    rule = documents("istio.yaml")["DestinationRule", "dflash"]["spec"]
    assert ("Service", rule["host"]) in manifests
    header = rule["trafficPolicy"]["loadBalancer"]["consistentHash"]["httpHeaderName"]
    # nginx has the same key, and knows the ports.
    nginx = (DEPLOY / "nginx.conf").read_text()
    assert f"map $http_{header.replace('-', '_')} $conversation" in nginx
    upstreams = dict(re.findall(r"upstream (\w+) \{([^}]*)\}", nginx))
    assert len(upstreams) == 2 and nginx.count("{") == nginx.count("}")
    for name, body in upstreams.items():
        assert "hash $conversation consistent;" in body
        assert {int(port) for port in re.findall(r"server [\d.]+:(\d+)", body)} == {names[name.removeprefix("dflash_")]}
        assert re.search(rf"_pass \w+://{name};", nginx)
    assert f"location /{SERVICE}/" in nginx and "proxy_buffering off;" in nginx
    assert f"client_max_body_size {MAX_BODY_BYTES >> 20}m;" in nginx
    assert header in (DEPLOY.parent / "docs/serving.md").read_text()


def test_the_unit_runs_the_server_with_its_flags() -> None:
    unit = configparser.RawConfigParser(comment_prefixes=("#",))
    unit.optionxform = str  # type: ignore[method-assign,assignment]
    unit.read_string((DEPLOY / "dflash.service").read_text().replace("\\\n", " "))
    service = unit["Service"]
    python, *command = shlex.split(service["ExecStart"])
    assert python.startswith("/") and command[:2] == ["-m", "serve"]
    args = build_parser().parse_args(command[2:])
    assert float(service["TimeoutStopSec"]) >= args.drain_seconds + 10
    assert f"http://{args.host}:{args.http_port}/health" in service["ExecStartPost"].split()
    retries = re.search(r"--retry (\d+) --retry-delay 1", service["ExecStartPost"])
    assert retries is not None and float(service["TimeoutStartSec"]) > int(retries[1])
    assert args.compile_cache_dir == f"/var/cache/{service['CacheDirectory']}"
    assert service["LoadCredential"].partition(":")[0] == args.token_file.name


def test_what_the_page_says_of_flags_is_so() -> None:
    """Every flag in docs/serving.md is one of the server's or its clients'."""
    page = (DEPLOY.parent / "docs/serving.md").read_text()
    known = {flag for action in build_parser()._actions for flag in action.option_strings}
    for path in (DEPLOY.parent / "serve").glob("*.py"):
        known |= set(re.findall(r'"(--[a-z-]+)"', path.read_text()))
    found = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page))
    assert found - known == set() and len(found) > 15
    assert all(f"deploy/{path.name}" in page for path in DEPLOY.iterdir())
