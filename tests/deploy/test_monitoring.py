"""Dashboard and alert rules: a real Prometheus scrapes a gateway and is asked everything that they ask."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gateway.sim import SimServer, SimSettings
from tests import ports
from tests.docs_tables import exported
from tests.harness import Gate, gateway, pool

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules" / "detgate.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "detgate.json"
MODEL = "sim-model"


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: apt-get install prometheus"
    return found


def promtool(*arguments: str | Path) -> None:
    ended = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def rules() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    return found


def panels() -> Iterator[tuple[str, str]]:
    """The title and one expression of each panel, Grafana's variables filled in."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$pool", ".*").replace("$__rate_interval", "1m").replace("$__range", "1h")
            assert "$" not in text, text
            yield panel["title"], text


def test_promtool_reads_configuration_and_rules() -> None:
    promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")


def test_promtool_reads_the_configuration_for_tls(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "prometheus-tls.yml").read_text()
    authority = ROOT / "tests" / "shared" / "tls" / "certificate.pem"
    file = tmp_path / "prometheus.yml"
    file.write_text(
        text.replace("/etc/detgate-tls/ca.crt", str(authority)).replace("rules/", f"{DEPLOY}/prometheus/rules/")
    )
    promtool("check", "config", file)


def test_alerts_fire_on_what_they_name_and_on_nothing_else() -> None:
    promtool("test", "rules", ROOT / "tests" / "deploy" / "alerts.yml")


def test_each_alert_is_tried_on_its_event() -> None:
    tried = yaml.safe_load((ROOT / "tests" / "deploy" / "alerts.yml").read_text())["tests"]
    firing = json.dumps([test["promql_expr_test"] for test in tried if "promql_expr_test" in test])
    for rule in rules():
        assert f'alertname=\\"{rule["alert"]}\\"' in firing, rule["alert"]


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for panel in board["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())) - {"__rate_interval", "__range", "__all"} <= variables
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/detgate.yml").read_text())["providers"][0]
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"


@asynccontextmanager
async def prometheus(folder: Path, port: int) -> AsyncIterator[httpx.AsyncClient]:
    """Prometheus with the project's own rules, scraping a gateway four times a second."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    config["rule_files"] = [str(RULES)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(config))
    own = ports.free()
    process = await asyncio.create_subprocess_exec(
        *(program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{own}", "--log.level=warn"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{own}", timeout=10) as http:
            yield http
    finally:
        process.kill()
        await process.wait()


async def asked(
    http: httpx.AsyncClient, path: str, holds: Callable[[Any], object] = lambda _: True, **params: str
) -> Any:
    """What Prometheus answers once it answers, and `holds` of it."""
    async with asyncio.timeout(30):
        while True:
            with suppress(httpx.TransportError):
                answer = await http.get(f"/api/v1/{path}", params=params)
                if answer.status_code != 503:
                    assert answer.json()["status"] == "success", (params, answer.text)
                    if holds(answer.json()["data"]):
                        return answer.json()["data"]
            await asyncio.sleep(0.1)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]} | fields


async def some_of_everything(gate: Gate) -> None:
    """Requests that leave a trace in every series there is."""
    http = gate.http
    assert (await http.post("/v1/chat/completions", json=chat())).status_code == 200
    unseeded = chat(messages=[{"role": "user", "content": "hello"}])
    assert (await http.post("/v1/messages", json=unseeded)).status_code == 200
    assert (await http.post("/v1/chat/completions", json=chat(seed="x"))).status_code == 400
    answers = ({"model": "sim-reward", "input": f"answer {number}"} for number in range(4))
    await asyncio.gather(*(http.post("/classify", json=body) for body in answers))
    one, other = (chat(max_tokens=200, messages=[{"role": "user", "content": text}]) for text in ("one", "other"))
    await asyncio.gather(*(http.post("/sessions/racers/v1/chat/completions", json=body) for body in (one, other)))
    group = (await http.post("/sessions", json={"identity": "g", "group_size": 2})).json()
    for session in group["sessions"]:
        await http.post(
            "/v1/chat/completions",
            json=chat(seed=5, temperature=1),
            headers={"authorization": f"Bearer {session['api_key']}"},
        )


async def test_every_series_of_every_panel_and_rule_exists(tmp_path: Path) -> None:
    async with (
        SimServer(SimSettings(engine="vllm", model=MODEL)) as policy,
        SimServer(SimSettings(engine="vllm", model="sim-reward", role="reward", prefix_cache=False)) as reward,
        gateway(
            pool("policy", policy.url, models=[MODEL]),
            pool("reward", reward.url, models=["sim-reward"], role="reward"),
        ) as gate,
        prometheus(tmp_path, gate.port) as http,
    ):
        await some_of_everything(gate)
        # The guard's series comes with the last of these requests.
        await asked(http, "series", bool, **{"match[]": "detgate_guard_total"})
        expressions = [*panels(), *((rule["alert"], rule["expr"]) for rule in rules())]
        assert len(expressions) > 30
        for title, text in expressions:
            await asked(http, "query", lambda found: found["resultType"] == "vector", query=text)
            for name in set(re.findall(r"\b(?:detgate_\w+|up)\b", text)):
                if name in TAKES_SEVERAL:
                    assert labels(name, text) <= declared(name), (title, name)
                    continue
                series = await asked(http, "series", **{"match[]": name})
                assert series, (title, name)
                for label in labels(name, text):
                    assert any(label in each for each in series), (title, name, label)
        shown = dict(panels())
        for title, value in (("Unseeded", "1"), ("Guard hits", "1"), ("Racing indices", "2"), ("Fenced", "0")):
            await asked(http, "query", partial(shows, value), query=shown[title])
        told = await asked(http, "rules", lambda told: "unknown" not in healths(told))
        assert {name for name, _ in told_rules(told)} == {rule["alert"] for rule in rules()}
        assert healths(told) == {"ok"}
        await asked(http, "alerts", lambda told: firing(told) >= {"DetgateUnseeded", "DetgateGuard"})


def firing(told: Any) -> set[str]:
    """The alerts that fire."""
    return {alert["labels"]["alertname"] for alert in told["alerts"] if alert["state"] == "firing"}


def shows(value: str, found: Any) -> bool:
    """A single number was found, and it is this."""
    return [each["value"][1] for each in found["result"]] == [value]


TAKES_SEVERAL = {"detgate_lane_takeovers_total"}
"""Series that begin when one of several gateways dies."""


def declared(name: str) -> set[str]:
    """The labels with which a gateway declares a counter."""
    [family] = [each for each in exported() if f"{each.name}_total" == name]
    return set(family._labelnames)


def told_rules(told: Any) -> list[tuple[str, str]]:
    """The rules that Prometheus evaluates: name and health."""
    return [(rule["name"], rule["health"]) for group in told["groups"] for rule in group["rules"]]


def healths(told: Any) -> set[str]:
    return {health for _, health in told_rules(told)}


def labels(name: str, text: str) -> set[str]:
    """The labels by which an expression picks or groups the series of a name; le is Prometheus's own."""
    matchers = {
        label
        for found in re.findall(rf"\b{name}\{{([^}}]*)\}}", text)
        for label in re.findall(r"(\w+)\s*(?:=~|=|!=|!~)", found)
    }
    terms = [term for term in re.split(r" or | unless |\bcount\b", text) if name in term]
    grouped = {
        label.strip()
        for term in terms
        for found in re.findall(r"by \(([^)]*)\)", term)
        for label in found.split(",")
        if len(set(re.findall(r"\bdetgate_\w+", term))) == 1
    }
    return matchers | grouped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('sum by (pool, le) (rate(detgate_x_bucket{pool=~".*"}[1m]))', {"pool", "le"}),
        ("max by (pool) (detgate_x_bucket) == 0", {"pool"}),
    ],
)
def test_labels_are_found_in_an_expression(text: str, expected: set[str]) -> None:
    assert labels("detgate_x_bucket", text) == expected
