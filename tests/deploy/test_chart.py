"""The chart: every example renders, is valid for Kubernetes, and gives a gateway that starts and stays strict."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import helm_python as helm
import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from gateway import __version__, engines
from gateway.cli import _parser
from gateway.core import routing
from gateway.launch import Wish, load
from gateway.settings import Settings
from tests import ports
from tests.deploy import chart, kubernetes
from tests.deploy.chart import CHART, EXAMPLES, ROOT, SECRETS, Manifest, example, rendered
from tests.deploy.test_monitoring import promtool
from tests.harness import FakeWorker, gateway, pool

NAMES = [path.stem for path in EXAMPLES]
CUSTOM = {path.stem: json.loads(path.read_text()) for path in (Path(__file__).parent / "schemas").glob("*.json")}
"""Kinds of the Prometheus operator, which no Kubernetes schema knows, with the operator's own."""

CERTIFICATE = ROOT / "tests" / "shared" / "tls"
"""A certificate for 127.0.0.1 that is its own authority."""

each_example = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def manifests() -> dict[str, list[Manifest]]:
    """Each example, rendered."""
    return {name: rendered(example(name)) for name in NAMES}


def minimal(**more: Any) -> dict[str, Any]:
    servers = [{"name": "policy-0", "url": "http://10.0.0.1:8000"}, {"name": "policy-1", "url": "https://b"}]
    pool = {"name": "policy", "engine": "vllm", "servers": servers}
    return {"auth": {"existingSecret": "keys"}, "pools": [pool]} | more


def refused(values: dict[str, Any]) -> str:
    with pytest.raises(helm.HelmError) as caught:
        rendered(values)
    return str(caught.value)


def test_there_is_an_example_for_each_way() -> None:
    assert set(NAMES) == {"one-node", "ha-redis", "tls", "vllm", "sglang"}


@each_example
def test_helm_finds_nothing(name: str) -> None:
    told = helm.lint(str(CHART), example(name), strict=True)
    assert not told["errors"]
    assert [each for each in told["messages"] if each["severity"] > 1] == []


@each_example
@pytest.mark.parametrize("version", ["1.27", "1.32", "1.37"])
def test_it_is_valid_for_kubernetes(name: str, version: str, manifests: dict[str, list[Manifest]]) -> None:
    known = [each for each in manifests[name] if each["kind"] not in CUSTOM]
    assert len(known) >= 6
    for manifest in known:
        kubernetes.check(manifest, version)


def test_a_field_that_kubernetes_does_not_know_is_found(manifests: dict[str, list[Manifest]]) -> None:
    manifest = copy.deepcopy(chart.gateway(manifests["one-node"]))
    chart.container(manifest)["livenessProbe"]["timeout"] = 5
    with pytest.raises(jsonschema.ValidationError, match="timeout"):
        kubernetes.check(manifest, "1.37")


def monitored(**more: Any) -> dict[str, Any]:
    return minimal(serviceMonitor={"enabled": True}, prometheusRule={"enabled": True}) | more


def closed(schema: Any) -> Any:
    """The schema, such that a field which it does not list is refused: the cluster would drop it in silence."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {key: closed(value) for key, value in schema.items()}
    return inside | {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else inside


def of_operator(manifest: Manifest) -> None:
    """Raises `jsonschema.ValidationError`. The metadata are Kubernetes' own."""
    assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    jsonschema.Draft202012Validator(closed(CUSTOM[manifest["kind"]])).validate(manifest)


@pytest.mark.parametrize(
    "values",
    [
        monitored(),
        monitored(adminPort=9000),
        monitored(tls={"existingSecret": "tls"}),
        monitored(tls={"existingSecret": "tls", "clientCa": "ca.crt"}),
        monitored(
            tls={"existingSecret": "tls"},
            serviceMonitor={"enabled": True, "tlsConfig": {"insecureSkipVerify": True}, "labels": {"release": "mine"}},
        ),
        example("ha-redis"),
        example("tls"),
    ],
)
def test_the_kinds_of_the_operator_are_as_its_schemas_want(values: dict[str, Any]) -> None:
    found = [each for each in rendered(values) if each["kind"] in CUSTOM]
    assert {each["kind"] for each in found} == CUSTOM.keys()
    for manifest in found:
        of_operator(manifest)


def test_a_field_that_the_operator_does_not_know_is_found() -> None:
    [monitor] = chart.of(rendered(monitored()), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["tlsconfig"] = {}
    with pytest.raises(jsonschema.ValidationError, match="tlsconfig"):
        of_operator(monitor)


@pytest.mark.parametrize("name", ["ha-redis", "tls"])
def test_each_gateway_is_scraped_once_where_its_metrics_are(
    name: str, manifests: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    [monitor] = chart.of(manifests[name], "ServiceMonitor")
    [endpoint] = monitor["spec"]["endpoints"]
    [service] = [
        each
        for each in chart.of(manifests[name], "Service")
        if monitor["spec"]["selector"]["matchLabels"].items() <= each["metadata"]["labels"].items()
    ]
    [port] = [port for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
    told = chart.settings(manifests[name], tmp_path)
    reached = chart.port(chart.gateway(manifests[name]), port["targetPort"])
    assert reached == (told.admin_port or told.port)
    assert endpoint.get("scheme", "http") == ("https" if told.tls.cert else "http")


def test_prometheus_reads_the_rules_that_the_operator_gets(
    manifests: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    [rule] = chart.of(manifests["ha-redis"], "PrometheusRule")
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump(rule["spec"]))
    promtool("check", "rules", file)


def test_rules_and_dashboard_are_those_of_deploy() -> None:
    files = CHART / "files"
    assert (files / "rules.yml").read_text() == (ROOT / "deploy/prometheus/rules/detgate.yml").read_text()
    assert (files / "dashboard.json").read_text() == (ROOT / "deploy/grafana/dashboards/detgate.json").read_text()


def test_the_dashboard_arrives_whole(manifests: dict[str, list[Manifest]]) -> None:
    [board] = [each for each in chart.of(manifests["ha-redis"], "ConfigMap") if "detgate.json" in each["data"]]
    assert json.loads(board["data"]["detgate.json"]) == json.loads((CHART / "files" / "dashboard.json").read_text())


def test_the_version_is_the_packages() -> None:
    told = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert told["appVersion"] == __version__
    image = chart.container(chart.gateway(rendered(minimal())))["image"]
    assert image == f"detgate:{__version__}"


# --- the gateway


@each_example
def test_the_gateway_starts_with_its_configuration(
    name: str, manifests: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    told = chart.settings(manifests[name], tmp_path)
    assert told.warnings() == []
    assert [pool.name for pool in told.pools] == ["policy", "reward"]
    container = chart.container(chart.gateway(manifests[name]))
    args = _parser().parse_args(container["args"])
    assert str(args.config) == "/etc/detgate/gateway.yaml"
    assert {"name": "config", "mountPath": "/etc/detgate", "readOnly": True} in container["volumeMounts"]
    assert container["ports"][0]["containerPort"] == told.port
    assert args.resume is (told.state == "memory"), "a pod that takes another's place goes on with its run"


@each_example
def test_its_probes_ask_what_they_should(name: str, manifests: dict[str, list[Manifest]]) -> None:
    container = chart.container(chart.gateway(manifests[name]))
    paths = {probe: container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("liveness", "readiness", "startup")}
    assert paths == {"liveness": "/livez", "readiness": "/readyz", "startup": "/livez"}


@pytest.mark.parametrize(("drain", "least"), [(None, 30), (120, 120), (0.5, 0.5)])
@pytest.mark.parametrize("pause", [0, 5, 20])
def test_it_is_given_longer_than_it_drains(drain: float | None, least: float, pause: int) -> None:
    settings = {} if drain is None else {"timeouts": {"drain": drain}}
    pod = chart.gateway(rendered(minimal(settings=settings, preStopSeconds=pause)))["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > least + pause
    stop = pod["containers"][0].get("lifecycle")
    assert (stop is None) == (pause == 0)


@each_example
def test_pods_may_do_nothing_that_they_need_not(name: str, manifests: dict[str, list[Manifest]]) -> None:
    for workload in chart.of(manifests[name], "StatefulSet"):
        pod = workload["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        inside = pod["containers"][0]["securityContext"]
        assert inside["allowPrivilegeEscalation"] is False
        assert inside["capabilities"] == {"drop": ["ALL"]}
    pod = chart.gateway(manifests[name])["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is True
    writable = [mount for mount in pod["containers"][0]["volumeMounts"] if not mount.get("readOnly")]
    assert [mount["mountPath"] for mount in writable] == ["/var/lib/detgate"]


@each_example
def test_no_secret_stands_in_a_manifest(name: str, manifests: dict[str, list[Manifest]]) -> None:
    text = json.dumps(manifests[name])
    assert not any(f'"{secret}"' in text for secret in SECRETS.values())
    assert chart.of(manifests[name], "Secret") == []


def test_a_password_in_the_address_of_redis_is_refused() -> None:
    assert "redis/url" in refused(minimal(redis={"url": "redis://:secret@redis:6379/0"}, settings={"run": "r"}))


def test_keys_of_pools_come_by_a_secret_of_the_whole_configuration() -> None:
    values = minimal(configSecret={"name": "mine", "key": "g.yaml"}, pools=[])
    found = rendered(values)
    assert chart.of(found, "ConfigMap") == []
    pod = chart.gateway(found)["spec"]["template"]["spec"]
    assert {"name": "config", "secret": {"secretName": "mine"}} in pod["volumes"]
    assert "/etc/detgate/g.yaml" in pod["containers"][0]["args"]


def test_another_configuration_rolls_the_pods() -> None:
    def checksum(seed: int) -> str:
        pod = chart.gateway(rendered(minimal(settings={"seed": seed})))["spec"]["template"]
        return str(pod["metadata"]["annotations"]["checksum/config"])

    assert checksum(1) == checksum(1) != checksum(2)


# --- TLS, and a port for administration


def test_the_gateway_speaks_tls_by_the_secret(manifests: dict[str, list[Manifest]], tmp_path: Path) -> None:
    told = chart.settings(manifests["tls"], tmp_path).tls
    pod = chart.gateway(manifests["tls"])["spec"]["template"]["spec"]
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "tls"]
    assert mount["readOnly"] is True
    assert "subPath" not in mount, "a renewed secret would not be seen"
    assert (str(told.cert), str(told.key)) == (f"{mount['mountPath']}/tls.crt", f"{mount['mountPath']}/tls.key")
    assert {"name": "tls", "secret": {"secretName": "detgate-tls"}} in pod["volumes"]
    probes = [pod["containers"][0][f"{probe}Probe"]["httpGet"] for probe in ("liveness", "readiness", "startup")]
    assert {probe["scheme"] for probe in probes} == {"HTTPS"}


async def test_where_clients_show_certificates_the_probes_do_so_too(tmp_path: Path) -> None:
    container = chart.container(chart.gateway(rendered(minimal(tls={"existingSecret": "t", "clientCa": "ca.crt"}))))
    for name, source in {"tls.crt": "certificate.pem", "tls.key": "key.pem", "ca.crt": "certificate.pem"}.items():
        shutil.copyfile(CERTIFICATE / source, tmp_path / name)
    told = {each["name"]: each.get("value", "") for each in container["env"]}
    tls = {key: told[f"DETGATE_TLS__{key.upper()}"] for key in ("cert", "key", "client_ca")}
    tls = {key: value.replace("/etc/detgate-tls", str(tmp_path)) for key, value in tls.items()}

    async def passes(probe: str, port: int) -> bool:
        [_, *words] = container[f"{probe}Probe"]["exec"]["command"]
        words = [word.replace("/etc/detgate-tls", str(tmp_path)).replace(":8000", f":{port}") for word in words]
        asked = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=asyncio.subprocess.PIPE)
        await asked.communicate()
        return asked.returncode == 0

    async with asyncio.timeout(60):
        async with FakeWorker() as worker, gateway(pool("policy", worker.url), tls=tls) as gate:
            while not await passes("readiness", gate.port):
                pass
        async with gateway(pool("policy", f"http://127.0.0.1:{ports.free()}"), tls=tls) as gate:
            while not await passes("liveness", gate.port):
                pass
            assert not await passes("readiness", gate.port)


@pytest.mark.parametrize("tls", [{}, {"existingSecret": "t", "clientCa": "ca.crt"}])
def test_clients_that_hold_all_connections_have_no_say_in_whether_a_gateway_with_an_admin_port_lives(
    tls: dict[str, str],
) -> None:
    container = chart.container(chart.gateway(rendered(minimal(adminPort=9000, tls=tls))))
    asked = {}
    for probe in ("liveness", "readiness", "startup"):
        told = container[f"{probe}Probe"]
        asked[probe] = "admin" if "httpGet" not in told and ":9000/livez" in told["exec"]["command"][-1] else "http"
        if "httpGet" in told:
            asked[probe] = told["httpGet"]["port"]
    assert asked == {"liveness": "admin", "readiness": "http", "startup": "admin"}


def test_what_the_gateway_may_hold_of_requests_fits_its_memory() -> None:
    container = chart.container(chart.gateway(rendered(minimal())))
    number = container["resources"]["limits"]["memory"].removesuffix("Gi")
    assert int(number) * 2**30 > 2 * Settings().limits.held_bytes + 2**30


def test_administration_is_published_by_a_service_of_its_own() -> None:
    found = rendered(minimal(adminPort=9000, service={"type": "LoadBalancer"}))
    [public] = chart.of(found, "Service", "demo-detgate")
    [inner] = chart.of(found, "Service", "demo-detgate-admin")
    assert [port["name"] for port in public["spec"]["ports"]] == ["http"]
    assert [port["name"] for port in inner["spec"]["ports"]] == ["admin"]
    assert inner["spec"].get("type", "ClusterIP") == "ClusterIP"
    assert inner["spec"]["selector"].items() <= chart.gateway(found)["spec"]["template"]["metadata"]["labels"].items()
    assert chart.of(rendered(minimal()), "Service", "demo-detgate-admin") == []


@pytest.mark.parametrize("metrics", [[], [{"namespaceSelector": {"matchLabels": {"it": "scrapes"}}}]])
@pytest.mark.parametrize("admin", [[], [{"namespaceSelector": {"matchLabels": {"it": "administers"}}}]])
def test_the_port_for_administration_is_reached_by_whom_it_names(metrics: list[Any], admin: list[Any]) -> None:
    found = rendered(minimal(adminPort=9000, networkPolicy={"metricsFrom": metrics, "adminFrom": admin}))
    [policy] = chart.of(found, "NetworkPolicy", "demo-detgate")
    let_in = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    assert let_in.pop("http") == [{"podSelector": {}}], "those who scrape need no more than their port"
    assert let_in == ({"admin": metrics + admin} if metrics + admin else {}), "an empty list would let everyone in"


# --- what cannot work


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (minimal(replicas=2), "redis"),
        (minimal(autoscaling={"enabled": True}), "redis"),
        (minimal(redis={"url": "redis://redis:6379/0"}), "settings.run"),
        ({"pools": minimal()["pools"]}, "auth.existingSecret"),
        (minimal(pools=[]), "pools"),
        (minimal(pools=[{"name": "p", "engine": "vllm"}]), "one of servers"),
        (minimal(pools=[{"name": "p", "engine": "tgi", "servers": []}]), "engine"),
        (minimal(sttings={}), "sttings"),
        (minimal(adminPort=80), "adminPort"),
        (minimal(adminPort=8000), "adminPort"),
        (minimal(settings={"admin_port": 9000}), "settings"),
        (minimal(settings={"tls": {"cert": "a.pem"}}), "settings"),
        (minimal(tls={"clientCa": "ca.crt"}), "tls.existingSecret"),
        (minimal(networkPolicy={"adminFrom": [{"podSelector": {}}]}), "adminPort"),
        (minimal(settings={"state": "memory"}), "settings"),
        (minimal(settings={"auth": {"api_keys": ["one"]}}), "settings"),
    ],
)
def test_what_cannot_work_is_said_at_once(values: dict[str, Any], said: str) -> None:
    assert said in refused(values)


# --- names and addresses


@each_example
def test_replicas_are_named_the_same_wherever_it_is_installed(name: str, tmp_path: Path) -> None:
    def names(release: str, namespace: str) -> list[list[str]]:
        told = chart.settings(rendered(example(name), name=release, namespace=namespace), tmp_path)
        return [[replica.name for replica in pool.replicas] for pool in told.pools]

    here, there = names("demo", "inference"), names("other", "elsewhere")
    assert here == there
    assert all(re.fullmatch(r"[a-z0-9-]+-\d+", replica) for pool in here for replica in pool)
    for key in ("17:3:0", "demo:1"):
        assert routing.best(key, here[0]) == routing.best(key, there[0])


@pytest.mark.parametrize("name", ["one-node", "vllm", "sglang"])
def test_addresses_are_those_of_pods_that_are_started(
    name: str, manifests: dict[str, list[Manifest]], tmp_path: Path
) -> None:
    found = manifests[name]
    for told in chart.settings(found, tmp_path).pools:
        for number, replica in enumerate(told.replicas):
            pod, service, namespace, *rest = replica.url.removeprefix("http://").split(".")
            workload, ordinal = pod.rsplit("-", 1)
            assert (int(ordinal), namespace) == (number, "inference")
            assert ".".join(rest) == "svc.cluster.local:8000"
            [started] = chart.of(found, "StatefulSet", workload)
            assert started["spec"]["serviceName"] == service
            assert started["spec"]["replicas"] == len(told.replicas)
            [headless] = chart.of(found, "Service", service)
            assert headless["spec"]["clusterIP"] == "None"
            assert headless["spec"]["publishNotReadyAddresses"] is True
            labels = started["spec"]["template"]["metadata"]["labels"]
            assert headless["spec"]["selector"].items() <= labels.items()
            assert chart.container(started)["ports"][0]["containerPort"] == 8000
            probe = chart.container(started)["startupProbe"]
            assert probe["httpGet"]["path"] == engines.load(told.engine).PROBE
            if name != "one-node":
                assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_are_started_by_their_launch_profile(engine: str, manifests: dict[str, list[Manifest]]) -> None:
    for name, role, model in (
        ("policy", "generate", "Qwen/Qwen3-8B"),
        ("reward", "reward", "Skywork/Skywork-Reward-V2-Qwen3-0.6B"),
    ):
        [started] = chart.of(manifests[engine], "StatefulSet", f"demo-detgate-{name}")
        container = chart.container(started)
        profile = load(engine).profile(Wish("hopper", role, model))  # type: ignore[arg-type]
        assert container["command"] == profile.arguments
        assert profile.variables.items() <= chart.environment(started).items()
        assert container["image"].endswith(f":v{load(engine).VERSION}")


def test_servers_keep_their_own_names_and_ranks(tmp_path: Path) -> None:
    values = minimal()
    values["pools"][0]["servers"][0]["dpRank"] = 0
    [pool] = chart.settings(rendered(values), tmp_path).pools
    assert [(each.name, each.url, each.dp_rank) for each in pool.replicas] == [
        ("policy-0", "http://10.0.0.1:8000", 0),
        ("policy-1", "https://b", None),
    ]


# --- the network


@each_example
def test_the_gateway_reaches_all_that_it_needs(name: str, manifests: dict[str, list[Manifest]], tmp_path: Path) -> None:
    told = chart.settings(manifests[name], tmp_path)
    [policy] = chart.of(manifests[name], "NetworkPolicy", "demo-detgate")
    ports = {int(port["port"]) for rule in policy["spec"]["egress"] for port in rule["ports"]}
    assert ports == {53, 8000} | ({6379} if told.state != "memory" else set())
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= (
        chart.gateway(manifests[name])["spec"]["template"]["metadata"]["labels"].items()
    )


def test_listed_servers_are_reached_at_their_ports() -> None:
    [policy] = chart.of(rendered(minimal()), "NetworkPolicy", "demo-detgate")
    assert {int(port["port"]) for rule in policy["spec"]["egress"] for port in rule["ports"]} == {53, 8000, 443}


@pytest.mark.parametrize("name", ["one-node", "vllm", "sglang"])
def test_nobody_but_the_gateway_reaches_the_replicas(name: str, manifests: dict[str, list[Manifest]]) -> None:
    mine = chart.gateway(manifests[name])["spec"]["template"]["metadata"]["labels"]
    for each in ("policy", "reward"):
        [policy] = chart.of(manifests[name], "NetworkPolicy", f"demo-detgate-{each}")
        [rule] = policy["spec"]["ingress"]
        [who] = rule["from"]
        assert who["podSelector"]["matchLabels"].items() <= mine.items()
        [started] = chart.of(manifests[name], "StatefulSet", f"demo-detgate-{each}")
        labels = started["spec"]["template"]["metadata"]["labels"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
        assert not who["podSelector"]["matchLabels"].items() <= labels.items()


# --- several gateways


def test_several_gateways_scale_by_what_is_in_flight(manifests: dict[str, list[Manifest]]) -> None:
    found = manifests["ha-redis"]
    mine = chart.gateway(found)
    [scaler] = chart.of(found, "HorizontalPodAutoscaler")
    assert scaler["spec"]["scaleTargetRef"] == {
        "apiVersion": mine["apiVersion"],
        "kind": mine["kind"],
        "name": mine["metadata"]["name"],
    }
    [metric] = scaler["spec"]["metrics"]
    assert metric["pods"]["metric"]["name"] == "detgate_in_flight"
    assert "replicas" not in mine["spec"], "the autoscaler's"
    [budget] = chart.of(found, "PodDisruptionBudget")
    labels = mine["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert mine["spec"]["volumeClaimTemplates"], "its ledger tells what it issued, when Redis has forgotten"


def test_parts_that_are_off_leave_nothing() -> None:
    off = {"enabled": False}
    found = rendered(
        minimal(podDisruptionBudget=off, networkPolicy=off, persistence=off, serviceAccount={"create": False})
    )
    assert {each["kind"] for each in found} == {"StatefulSet", "Service", "ConfigMap"}
    assert {"name": "ledger", "emptyDir": {}} in chart.gateway(found)["spec"]["template"]["spec"]["volumes"]


def test_the_documented_adapter_rule_is_read_by_promtool(tmp_path: Path) -> None:
    text = (ROOT / "docs/deploy/kubernetes.md").read_text()
    [query] = re.findall(r"metricsQuery: (.*)$", text, re.M)
    filled = query.strip("'").replace("<<.Series>>", "detgate_in_flight")
    filled = filled.replace("<<.LabelMatchers>>", 'namespace="n"').replace("<<.GroupBy>>", "pod")
    file = tmp_path / "rule.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": [{"record": "r", "expr": filled}]}]}))
    promtool("check", "rules", file)
