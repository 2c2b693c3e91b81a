"""What the chart takes for settings is what the gateway takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import InvalidSettings, Settings
from tests.deploy import chart, values
from tests.deploy.chart import rendered
from tests.deploy.test_chart import minimal, refused


def with_pool(**more: Any) -> dict[str, Any]:
    """The chart's values for a pool."""
    given = minimal(settings=more.pop("settings", {}))
    given["pools"][0] |= more
    return given


def test_the_schema_is_made_from_the_settings() -> None:
    text = values.FILE.read_text()
    assert text == values.written(values.current(json.loads(text))), "python -m tests.deploy.values"


def test_whatever_is_in_force_in_a_gateway_can_be_written_into_the_chart(tmp_path: Path) -> None:
    pool = {"name": "policy", "engine": "vllm", "replicas": [{"name": "r", "url": "http://10.0.0.1:8000"}]}
    told = Settings.load(None, {}, {"profile": "strict", "timeouts": {"idle": 0.5}, "pools": [pool]}).masked()
    ours = {name: value for name, value in told.items() if name not in values.THE_CHARTS}
    of_pool = {name: told["pools"][0][name] for name in values.OF_POOLS}
    made = chart.settings(rendered(with_pool(settings=ours, **of_pool)), tmp_path).masked()
    for of_its_own in ("ledger", "log"):  # where the image has them
        del ours[of_its_own]
    assert {name: made[name] for name in ours} == ours
    assert {name: made["pools"][0][name] for name in of_pool} == of_pool


@pytest.mark.parametrize("seed", [0, 2**53 - 1, str(2**53 - 1), str(2**53 + 1), str(2**63 - 1)])
def test_a_seed_arrives_to_the_last_digit(tmp_path: Path, seed: int | str) -> None:
    assert chart.settings(rendered(minimal(settings={"seed": seed})), tmp_path).seed == int(seed)


@pytest.mark.parametrize("seed", [2**53, 2**53 + 1, 2**60 + 1, 1.5, -1, "x", "1e3"])
def test_a_seed_that_helm_would_round_is_refused(seed: Any) -> None:
    assert "/settings/seed" in refused(minimal(settings={"seed": seed}))


SERVERS = [{"name": name, "url": "http://10.0.0.1:8000"} for name in ("007", "1e4", "0x10", "true", "null", "1.0")]


def test_names_that_look_like_something_else_stay_names(tmp_path: Path) -> None:
    made = rendered(minimal(pools=[{"name": "no", "engine": "vllm", "servers": SERVERS}]))
    [pool] = chart.settings(made, tmp_path).pools
    assert (pool.name, [each.name for each in pool.replicas]) == ("no", [each["name"] for each in SERVERS])
    start = {"replicas": 1, "image": "i:1", "command": ["a"], "probe": "/health"}
    for manifest in rendered(minimal(pools=[{"name": "true", "engine": "vllm", "start": start}])):
        assert all(isinstance(label, str) for label in manifest["metadata"]["labels"].values())


STRICT = {"profile": "strict"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (with_pool(settings={"bogus": 9}), "bogus"),
        (with_pool(settings={"profile": "Strict"}), "/settings/profile"),
        (with_pool(settings={"scheme": "v9"}), "/settings/scheme"),
        (with_pool(settings={"run": "a b"}), "/settings/run"),
        (with_pool(settings={"limits": {"queue": 0}}), "/settings/limits/queue"),
        (with_pool(settings={"timeouts": {"drain": -1}}), "/settings/timeouts/drain"),
        (with_pool(settings={"timeouts": {"drian": 1}}), "drian"),
        (with_pool(settings={"routing": {"slack": "much"}}), "/settings/routing/slack"),
        (with_pool(settings={"workers": 2}), "settings.workers"),
        (with_pool(lane={"scop": "none"}), "scop"),
        (with_pool(lane={"limit": 1}), "lane.limit of policy bounds nothing"),
        (with_pool(lane={"scope": "pool"}), "lane.limit of policy is needed"),
        (with_pool(lane={"scope": "pool", "limit": 1, "members": "episode"}), "needs scope group"),
        (with_pool(lane={"scope": "group"}), "settings.sessions.required"),
        (with_pool(routing={"slak": 1}), "slak"),
        (with_pool(engine="openai", settings=STRICT), "engine openai"),
        (with_pool(role="reward", lane={"scope": "none"}, settings=STRICT), "share a batch"),
        (with_pool(role="reward", lane={"limit": 2}, settings=STRICT), "share a batch"),
        (with_pool(servers=[SERVERS[0], SERVERS[0]]), "two replicas have the name 007"),
        (with_pool(servers=[{"name": "a b", "url": "http://10.0.0.1:8000"}]), "/servers/0/name"),
        (with_pool(servers=[{"name": "a", "url": "http://u:p@10.0.0.1:8000"}]), "/servers/0/url"),
        (minimal(pools=minimal()["pools"] * 2), "two have the name policy"),
    ],
)
def test_what_the_gateway_would_refuse_is_refused_by_the_chart(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    assert said in refused(given)
    pools = [{("replicas" if key == "servers" else key): each for key, each in pool.items()} for pool in given["pools"]]
    (tmp_path / "gateway.yaml").write_text(yaml.safe_dump({**given.get("settings", {}), "pools": pools}))
    with pytest.raises(InvalidSettings):
        Settings.load(tmp_path / "gateway.yaml", {}, {})


@pytest.mark.parametrize(
    "given",
    [
        with_pool(lane={"scope": "pool", "limit": 4}),
        with_pool(lane={"scope": "group", "members": "episode"}, settings={"sessions": {"required": True}}),
        with_pool(role="reward", lane={"scope": "pool"}, settings=STRICT),
        with_pool(role="reward", settings=STRICT),
        with_pool(settings={"profile": "off", "routing": {"slack": "inf"}, "timeouts": {"drain": "60.5"}}),
        with_pool(priority="index", models=["m"]),
    ],
)
def test_what_the_gateway_takes_the_chart_takes(tmp_path: Path, given: dict[str, Any]) -> None:
    chart.settings(rendered(given), tmp_path)


def test_the_least_gateways_are_not_more_than_the_most() -> None:
    scaled = {"enabled": True, "minReplicas": 9, "maxReplicas": 3}
    given = minimal(redis={"url": "redis://redis:6379/0"}, settings={"run": "r"}, autoscaling=scaled)
    assert "autoscaling.minReplicas: 9 is more than maxReplicas, 3" in refused(given)


def grace(given: dict[str, Any]) -> int:
    return int(chart.gateway(rendered(given))["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def test_a_drain_that_the_chart_cannot_see_has_a_value_of_its_own() -> None:
    env = [{"name": "DETGATE_TIMEOUTS__DRAIN", "value": "300"}]
    secret = {"name": "s", "key": "gateway.yaml"}
    assert grace(minimal()) == 45
    assert grace(minimal(configSecret=secret, drainSeconds=300)) == 315
    assert grace(minimal(env=env, drainSeconds=300, settings={"timeouts": {"drain": 1}})) == 315
    assert grace(minimal(drainSeconds=0)) == 15
    assert "drainSeconds: is needed" in refused(minimal(env=env))


def egress(given: dict[str, Any]) -> list[Any]:
    [policy] = chart.of(rendered(given), "NetworkPolicy", "demo-detgate")
    rules: list[Any] = policy["spec"]["egress"]
    return rules


def test_replicas_that_a_secret_names_can_be_reached() -> None:
    secret = {"configSecret": {"name": "s", "key": "gateway.yaml"}}
    rule = {"ports": [{"port": 8000, "protocol": "TCP"}]}
    assert egress(minimal(pools=[], **secret))[1:] == [{}], "everything, since nobody tells"
    assert egress(minimal(pools=[], networkPolicy={"egress": [rule]}, **secret))[1:] == [rule]
    assert {} not in egress(minimal(**secret))
    assert {} not in egress(minimal())


def test_spans_can_be_sent() -> None:
    rules = egress(minimal(settings={"tracing": {"endpoint": "http://collector:4318/v1/traces"}}))
    assert {"ports": [{"port": 4318, "protocol": "TCP"}]} in rules
