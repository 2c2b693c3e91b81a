"""The compose files: valid, pinned, published on loopback alone, and such that the gateway starts with them."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__, engines
from gateway.cli import _parser
from gateway.launch import Wish, load
from gateway.settings import Settings
from tests.deploy import image
from tests.deploy.compose import ROOT, Missing, seconds, together
from tests.harness import FakeWorker, chat, gateway, pool

BASE = "docker-compose.yml"
MODELS = {"POLICY_MODEL": "org/policy", "REWARD_MODEL": "org/reward"}
CLOSED = {"DETGATE_TLS_FOLDER": "./deploy", "DETGATE_AUTH__API_KEYS": "one two", "DETGATE_AUTH__ADMIN_KEY": "three"}
EXTERNAL = {"DETGATE_WORKER_URLS": "policy-0=http://vllm-a:8000 http://vllm-b:8000", "DETGATE_NETWORK": "engines"}
PROJECTS: dict[str, tuple[list[str], dict[str, str]]] = {
    "simulated": ([BASE], {}),
    "vllm": ([BASE, "deploy/compose/vllm.yml"], MODELS),
    "sglang": ([BASE, "deploy/compose/sglang.yml"], MODELS),
    "vllm-cpu": ([BASE, "deploy/compose/vllm-cpu.yml"], MODELS),
    "external": ([BASE, "deploy/compose/external.yml"], EXTERNAL),
    "tls": ([BASE, "deploy/compose/tls.yml"], CLOSED),
}
HARDWARE = {"vllm": ("vllm", "hopper"), "sglang": ("sglang", "hopper"), "vllm-cpu": ("vllm", "cpu")}

each_project = pytest.mark.parametrize("name", PROJECTS)
each_engine = pytest.mark.parametrize("name", HARDWARE)


def project(name: str) -> dict[str, Any]:
    return together(*PROJECTS[name])


def settings(name: str, **variables: str) -> Settings:
    """The gateway's settings in its container."""
    files, told = PROJECTS[name]
    service = together(files, told | variables)["services"]["gateway"]
    env = image.environment(image.stages()[1]) | service["environment"]
    [mounted] = [volume.split(":")[0] for volume in service["volumes"] if "/etc/detgate/" in volume]
    args = _parser().parse_args(service["command"])
    assert str(args.config) in str(service["volumes"])
    return Settings.load(ROOT / mounted, env, {})


def test_every_overlay_is_tried() -> None:
    overlays = {f"deploy/compose/{path.name}" for path in (ROOT / "deploy" / "compose").glob("*.yml")}
    assert overlays == {file for files, _ in PROJECTS.values() for file in files} - {BASE}


def test_they_are_valid_by_the_schema_of_compose_files(tmp_path: Path) -> None:
    for name in PROJECTS:
        (tmp_path / f"{name}.json").write_text(json.dumps(project(name)))
    checker = Path(sys.executable).parent / "check-jsonschema"
    command = [str(checker), "--builtin-schema", "vendor.compose-spec", *map(str, tmp_path.glob("*.json"))]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@each_project
def test_images_are_pinned(name: str) -> None:
    for service in project(name)["services"].values():
        repository, _, tag = service["image"].rpartition(":")
        assert re.fullmatch(r"v?\d+\.\d+\.\d+(-[\w.]+)?", tag), service["image"]
        assert repository != "detgate" or tag == __version__


@each_project
def test_ports_are_published_on_loopback_alone(name: str) -> None:
    published = {service: port for service, told in project(name)["services"].items() for port in told.get("ports", [])}
    assert published.keys() == {"gateway", "prometheus", "grafana"}
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port) for port in published.values())


@each_project
def test_services_are_checked_and_awaited(name: str) -> None:
    services = project(name)["services"]
    for service in services.values():
        check = service["healthcheck"]
        assert check["test"][0] == "CMD"
        assert seconds(check["start_period"]) >= 10
        for other, how in service.get("depends_on", {}).items():
            assert other in services
            assert how == {"condition": "service_healthy"}
    replicas = {"policy-0", "policy-1", "reward-0"} & services.keys()
    assert services["gateway"]["depends_on"].keys() == {"redis", *replicas}


@each_project
def test_what_is_mounted_is_there(name: str) -> None:
    told = project(name)
    for service in told["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (ROOT / source).exists(), source
                assert volume.endswith(":ro")
            else:
                assert source in told["volumes"], source


@each_project
def test_the_gateway_can_write_its_ledger_and_nothing_else(name: str) -> None:
    service = project(name)["services"]["gateway"]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    writable = [volume.split(":")[1] for volume in service["volumes"] if not volume.endswith(":ro")]
    [home] = image.of(image.stages()[1], "VOLUME")
    assert writable == [home]
    assert settings(name).ledger.path.is_relative_to(home)


@each_project
def test_the_gateway_starts_with_its_configuration(name: str) -> None:
    told = settings(name)
    assert told.warnings() == []
    assert told.host == "0.0.0.0"
    assert told.insecure == (name != "tls")
    assert told.state == "redis://redis:6379/0"
    service = project(name)["services"]["gateway"]
    assert seconds(service["stop_grace_period"]) > told.timeouts.drain
    assert service["ports"][0] == f"127.0.0.1:8000:{told.port}"
    other = settings(name, DETGATE_PROFILE="strict", DETGATE_SEED="7", DETGATE_RUN="second", DETGATE_WORKERS="4")
    assert (other.profile, other.seed, other.run, other.workers) == ("strict", 7, "second", 4)


@pytest.mark.parametrize("name", [name for name in PROJECTS if name != "external"])
def test_replicas_are_services_of_their_own_names(name: str) -> None:
    services = project(name)["services"]
    for told in settings(name).pools:
        for replica in told.replicas:
            assert replica.url == f"http://{replica.name}:8000"
            words = services[replica.name]["command"]
            assert words[words.index("--port") + 1] == "8000"
            assert words[words.index("--host") + 1] == "0.0.0.0"
            health = services[replica.name]["healthcheck"]["test"][-1]
            assert f"http://127.0.0.1:8000{engines.load(told.engine).PROBE}" in health


def test_the_simulated_replicas_understand_their_commands() -> None:
    services = project("simulated")["services"]
    for name in ("policy-0", "policy-1", "reward-0"):
        args = _parser().parse_args(services[name]["command"])
        assert args.role == "reward" if name == "reward-0" else not hasattr(args, "role")


@each_engine
def test_the_engines_are_started_by_their_launch_profile(name: str) -> None:
    engine, hardware = HARDWARE[name]
    services = project(name)["services"]
    for service, role, model in (
        ("policy-0", "generate", "org/policy"),
        ("policy-1", "generate", "org/policy"),
        ("reward-0", "reward", "org/reward"),
    ):
        told = services[service]
        profile = load(engine).profile(Wish(hardware, role, model))  # type: ignore[arg-type]
        assert told["entrypoint"] + told["command"] == profile.arguments
        assert profile.variables.items() <= told["environment"].items()
        assert told["image"].endswith(f":v{load(engine).VERSION}")
        assert seconds(told["healthcheck"]["start_period"]) >= 600


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_each_engine_has_a_gpu_of_its_own(name: str) -> None:
    services = project(name)["services"]
    gpus = [
        device["device_ids"]
        for service in ("policy-0", "policy-1", "reward-0")
        for device in services[service]["deploy"]["resources"]["reservations"]["devices"]
    ]
    assert gpus == [["0"], ["1"], ["2"]]


@pytest.mark.parametrize("name", [name for name, (_, told) in PROJECTS.items() if told])
def test_what_must_be_named_is_asked_for(name: str) -> None:
    with pytest.raises(Missing, match=r"names"):
        together(PROJECTS[name][0], {})


def test_servers_that_run_already_are_named_by_one_variable() -> None:
    told = settings("external")
    assert [(each.name, each.url) for each in told.pools[0].replicas] == [
        ("policy-0", "http://vllm-a:8000"),
        ("default-1", "http://vllm-b:8000"),
    ]
    services = project("external")
    assert services["networks"]["engines"] == {"name": "engines", "external": True}
    assert services["services"]["gateway"]["networks"] == ["default", "engines"]
    assert settings("external", DETGATE_ENGINE="sglang").pools[0].engine == "sglang"


async def test_a_dummy_key_opens_the_data_plane_and_no_key_the_admin_routes(tmp_path: Path) -> None:
    told = settings("simulated")
    async with (
        FakeWorker() as worker,
        gateway(pool("policy", worker.url), host=told.host, insecure=told.insecure) as gate,
    ):
        dummy = {"authorization": "Bearer dummy"}
        assert (await gate.http.post("/v1/chat/completions", json=chat(), headers=dummy)).status_code == 200
        assert (await gate.http.get("/admin/replicas", headers=dummy)).status_code == 403


def test_keys_close_it_again() -> None:
    told = settings("simulated", DETGATE_AUTH__API_KEYS="one two", DETGATE_AUTH__ADMIN_KEY="three")
    assert len(told.auth.api_keys) == 2
    assert told.auth.admin_key is not None


def test_the_closed_gateway_speaks_tls_and_administers_on_another_port() -> None:
    told = settings("tls")
    service = project("tls")["services"]["gateway"]
    assert (str(told.tls.cert), str(told.tls.key)) == ("/etc/detgate-tls/tls.crt", "/etc/detgate-tls/tls.key")
    assert "./deploy:/etc/detgate-tls:ro" in service["volumes"]
    assert "https://127.0.0.1:8000/readyz" in service["healthcheck"]["test"][-1]
    assert service["ports"] == ["127.0.0.1:8000:8000", f"127.0.0.1:9000:{told.admin_port}"]
    files, variables = PROJECTS["tls"]
    opened = together(files, variables | {"DETGATE_PUBLISHED_ADDRESS": "10.0.0.5"})["services"]["gateway"]["ports"]
    assert opened == ["10.0.0.5:8000:8000", "127.0.0.1:9000:9000"], "administration stays where it is"


@pytest.mark.parametrize("variable", CLOSED)
def test_a_closed_gateway_does_not_start_open(variable: str) -> None:
    with pytest.raises(Missing, match=variable):
        together(PROJECTS["tls"][0], {name: value for name, value in CLOSED.items() if name != variable})


async def test_its_health_check_passes_over_tls() -> None:
    certificate = ROOT / "tests" / "shared" / "tls" / "certificate.pem"
    tls = {"cert": str(certificate), "key": str(certificate.with_name("key.pem"))}
    [_, _, *words] = project("tls")["services"]["gateway"]["healthcheck"]["test"]
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), tls=tls) as gate:
        words = [word.replace(":8000", f":{gate.port}") for word in words]
        async with asyncio.timeout(30):
            while await (await asyncio.create_subprocess_exec(sys.executable, *words)).wait() != 0:
                pass


@each_project
def test_prometheus_scrapes_the_port_that_has_metrics(name: str) -> None:
    service, told = project(name)["services"]["prometheus"], settings(name)
    assert "./deploy/prometheus:/etc/prometheus:ro" in service["volumes"]
    [file] = [word.partition("=")[2] for word in service["command"] if word.startswith("--config.file=")]
    config = yaml.safe_load((ROOT / "deploy/prometheus" / Path(file).name).read_text())
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"gateway:{told.admin_port or told.port}"]}]
    assert job.get("scheme", "http") == ("https" if told.tls.cert else "http")
    mounted = [volume.split(":")[1] for volume in service["volumes"]]
    assert ("tls_config" in job) == bool(told.tls.cert)
    if "tls_config" in job:
        assert str(Path(job["tls_config"]["ca_file"]).parent) in mounted
    assert list((ROOT / "deploy/prometheus").glob(config["rule_files"][0]))


def test_grafana_finds_what_is_mounted() -> None:
    services = project("simulated")["services"]
    dashboards = yaml.safe_load((ROOT / "deploy/grafana/provisioning/dashboards/detgate.yml").read_text())
    folder = dashboards["providers"][0]["options"]["path"]
    assert f"./deploy/grafana/dashboards:{folder}:ro" in services["grafana"]["volumes"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (ROOT / "deploy/grafana/dashboards" / Path(home).name).exists()
