"""What decides is kept with a run by what is in force, however it was written, and named as it was written."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.settings import Settings
from gateway.settings.deciding import differing


def settings(*pools: dict[str, Any], **more: Any) -> Settings:
    full = []
    for number, pool in enumerate(pools or ({}, {})):
        replicas = [{"name": f"r{number}", "url": "http://10.0.0.1:8000"}]
        full.append({"name": f"p{number}", "engine": "vllm", "replicas": replicas, **pool})
    return Settings.load(None, {}, {"pools": full, **more})


SESSION: dict[str, Any] = {"routing": {"key": "session"}}
REWARD = {"role": "reward"}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (settings(**SESSION), settings(SESSION, SESSION)),
        (settings({"routing": {"key": "request", "slack": 0}}, {"lane": {"scope": "none"}}), settings()),
        (settings(profile="strict", routing={"slack": "inf", "on_home_down": "wait"}), settings(profile="strict")),
        (settings({}, REWARD | {"lane": {"scope": "replica", "limit": 1}}), settings({}, REWARD)),
        (settings({"models": ["a", "b"]}), settings({"models": ["b", "a"]})),
        (settings({"routing": {"retry_sent": False}, "priority": "index", "deterministic": "declared"}), settings({})),
    ],
)
def test_what_is_in_force_counts_and_not_how_it_is_written(written: Settings, meant: Settings) -> None:
    assert written.deciding() == meant.deciding()


@pytest.mark.parametrize(
    ("ours", "theirs", "keys"),
    [
        (settings(**SESSION), settings(), ["routing.key"]),
        (settings(SESSION, {}), settings(), ["pools[p0].routing.key"]),
        (settings({"routing": {"slack": 2}}), settings({}), ["pools[p0].routing.slack"]),
        (settings(), settings(profile="strict"), ["profile"]),
        (settings(profile="strict", routing={"slack": 3}), settings(), ["profile"]),
        (settings({}, REWARD), settings(), ["pools[p1].role"]),
        (settings({}, {"name": "x", **SESSION}), settings(), ["pools"]),
        (
            settings({"lane": {"scope": "pool", "limit": 2}}),
            settings({}),
            ["pools[p0].lane.limit", "pools[p0].lane.scope"],
        ),
    ],
)
def test_what_differs_is_named_by_its_key(ours: Settings, theirs: Settings, keys: list[str]) -> None:
    assert differing(ours.deciding(), theirs.deciding()) == keys
    assert differing(theirs.deciding(), ours.deciding()) == keys
