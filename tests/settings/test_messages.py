from typing import Any

import pytest

from gateway.settings import InvalidSettings, Settings
from gateway.settings.messages import dotted

REPLICA = {"name": "a-0", "url": "http://h"}
POOL = {"name": "a", "engine": "vllm", "replicas": [REPLICA]}


def lines(**flags: Any) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(None, {}, flags)
    assert str(caught.value) == "\n".join(caught.value.lines)
    return caught.value.lines


def test_a_place_is_written_as_in_python() -> None:
    assert dotted(("pools", 0, "replicas", 1, "url")) == "pools[0].replicas[1].url"
    assert dotted(("", "x")) == '"".x'


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"sede": 1}, "sede: unknown key; did you mean seed?"),
        ({"Profile": "off"}, "Profile: unknown key; did you mean profile?"),
        ({"slack": 1}, "slack: unknown key; did you mean routing.slack?"),
        ({"dp_rank": 1}, "dp_rank: unknown key; did you mean pools[].replicas[].dp_rank?"),
        ({"log": {"zzz": 1}}, "log.zzz: unknown key; there are format, level"),
        ({"timeouts": {"conect": 1}}, "timeouts.conect: unknown key; did you mean connect?"),
        ({"pools": [{**POOL, "modles": []}]}, "pools[0].modles: unknown key; did you mean models?"),
        (
            {"pools": [{**POOL, "replicas": [{**REPLICA, "ulr": ""}]}]},
            "pools[0].replicas[0].ulr: unknown key; did you mean url?",
        ),
        (
            {"pools": [{**POOL, "lane": {"scop": "pool"}}]},
            "pools[0].lane.scop: unknown key; did you mean scope?",
        ),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(flags: dict[str, Any], expected: str) -> None:
    assert lines(**flags) == [expected]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"profile": "stirct"}, "profile: 'stirct' is unknown; did you mean strict?"),
        ({"profile": "x"}, "profile: 'x' is unknown; there are balanced, off, strict"),
        ({"scheme": "v2"}, "scheme: 'v2' is unknown; there are areal, offset, v1"),
        ({"scheme": "arael"}, "scheme: 'arael' is unknown; did you mean areal?"),
        (
            {"pools": [{**POOL, "engine": "tgi"}]},
            "pools[0].engine: 'tgi' is unknown; there are openai, sglang, vllm",
        ),
        ({"pools": [{**POOL, "engine": "vlm"}]}, "pools[0].engine: 'vlm' is unknown; did you mean vllm?"),
        ({"guards": {"clones": "refuze"}}, "guards.clones: 'refuze' is unknown; did you mean refuse?"),
    ],
)
def test_an_unknown_choice_is_named_with_those_there_are(flags: dict[str, Any], expected: str) -> None:
    assert lines(**flags) == [expected]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"timeouts": 3}, "timeouts: a mapping of keys to values is needed (not 3)"),
        ({"routing": "x"}, "routing: a mapping of keys to values is needed (not 'x')"),
        ({"pools": {"a": 1}}, "pools: a list is needed"),
        ({"pools": ["a"]}, "pools[0]: a mapping of keys to values is needed (not 'a')"),
        (
            {"pools": [{**POOL, "routing": 1}]},
            "pools[0].routing: a mapping of keys to values is needed (not 1)",
        ),
        (
            {"pools": [{**POOL, "lane": "pool"}]},
            "pools[0].lane: a mapping of keys to values is needed (not 'pool')",
        ),
        ({"pools": [{**POOL, "replicas": []}]}, "pools[0].replicas: at least one is needed"),
        ({"pools": [{**POOL, "replicas": [{"name": "x"}]}]}, "pools[0].replicas[0].url: is missing"),
        ({"pools": [{"name": "a", "replicas": [REPLICA]}]}, "pools[0].engine: is missing"),
    ],
)
def test_a_wrong_shape_is_named(flags: dict[str, Any], expected: str) -> None:
    assert lines(**flags) == [expected]


def test_each_fault_has_a_line_and_no_pool_repeats_one_that_it_took_over() -> None:
    pools = [POOL, {**POOL, "routing": {"slack": "y"}}]
    assert lines(sede=1, routing={"slack": "x", "kee": 1}, pools=pools) == [
        "routing.slack: a whole number from 0, or inf, is needed (not 'x')",
        "routing.kee: unknown key; did you mean key?",
        "sede: unknown key; did you mean seed?",
    ]


def test_no_secret_is_repeated() -> None:
    found = lines(
        state="redis://:s-1@",
        auth={"api_keys": {"s-2": 1}, "admin_key": ["s-3"]},
        pools=[{**POOL, "api_key": 4, "replicas": [{"name": "x", "url": "http://u:s-4@h"}]}],
    )
    assert len(found) == 5
    assert not any("s-" in line or "4" in line for line in found)
    assert lines(auth="s-5") == ["auth: a mapping of keys to values is needed"]
