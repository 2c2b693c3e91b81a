from hashlib import sha256
from typing import Any

import pytest

from gateway.settings import InvalidSettings, Settings

URL = "http://10.0.0.{}:8000"
POOL: dict[str, Any] = {"name": "a", "engine": "vllm", "replicas": [{"name": "a-0", "url": URL.format(1)}]}
OTHER: dict[str, Any] = {"name": "b", "engine": "vllm", "replicas": [{"name": "b-0", "url": URL.format(2)}]}


def load(**flags: Any) -> Settings:
    return Settings.load(None, {}, flags)


def refused(**flags: Any) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        load(**flags)
    return caught.value.lines


def pool(**changes: Any) -> list[dict[str, Any]]:
    return [{**POOL, **changes}]


def test_names_are_unique_over_all_pools() -> None:
    twin = {**OTHER, "name": "a", "replicas": [{"name": "b-0", "url": URL.format(3)}, POOL["replicas"][0]]}
    assert refused(pools=[POOL, twin]) == [
        "pools[1].name: a is the name of pools[0] already",
        "pools[1].replicas[1].name: a-0 is the name of pools[0].replicas[0] already",
    ]


def test_a_run_has_a_name_where_gateways_share_it() -> None:
    assert refused(state="redis://h")[0].startswith("run: a name is needed with redis")
    load(state="redis://h", run="a")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "gateway.example", "127.evil"])
def test_a_bind_that_others_reach_needs_keys(host: str) -> None:
    assert refused(host=host)[0].startswith(f"host: {host} can be reached from elsewhere")
    load(host=host, auth={"api_keys": ["k"]})
    load(host=host, insecure=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]"])
def test_loopback_needs_no_keys(host: str) -> None:
    load(host=host)


def test_strict_refuses_an_engine_that_promises_nothing() -> None:
    load(pools=pool(engine="openai"))
    assert refused(profile="strict", pools=pool(engine="openai")) == [
        "pools[0].engine: openai promises nothing that profile strict could hold it to"
    ]


@pytest.mark.parametrize(
    ("lane", "expected"),
    [
        ({"limit": 2}, "pools[0].lane.limit: bounds nothing while scope is none"),
        ({"scope": "pool"}, "pools[0].lane.limit: is needed with scope pool"),
        ({"members": "episode"}, "pools[0].lane.members: episode needs scope group"),
        (
            {"scope": "pool", "limit": 1, "members": "episode"},
            "pools[0].lane.members: episode needs scope group",
        ),
    ],
)
def test_a_lane_that_bounds_nothing_is_refused(lane: dict[str, Any], expected: str) -> None:
    assert refused(pools=pool(lane=lane)) == [expected]


@pytest.mark.parametrize("scope", ["session", "group"])
def test_lanes_of_sessions_need_sessions(scope: str) -> None:
    pools = pool(lane={"scope": scope, "limit": 1})
    assert refused(pools=pools)[0].startswith(f"pools[0].lane.scope: {scope} needs sessions.required: true")
    load(pools=pools, sessions={"required": True})


@pytest.mark.parametrize(
    ("lane", "named"),
    [
        ({"limit": 4}, "pools[0].lane.limit: 4 "),
        ({"scope": "none"}, "pools[0].lane.scope: none "),
        ({"scope": "group"}, "pools[0].lane.scope: group "),
        ({"scope": "pool", "limit": 2}, "pools[0].lane.limit: 2 "),
    ],
)
def test_a_reward_lane_that_shares_batches_is_warned_of_and_refused_in_strict(lane: dict[str, Any], named: str) -> None:
    rest: dict[str, Any] = {"pools": pool(role="reward", lane=lane), "sessions": {"required": True}}
    (warning,) = load(**rest).warnings()
    assert warning.startswith(named)
    (line,) = refused(profile="strict", **rest)
    assert line.startswith(named)
    assert load(profile="off", **rest).warnings() == []


@pytest.mark.parametrize("lane", [{}, {"scope": "pool"}, {"scope": "pool", "limit": 1}])
@pytest.mark.parametrize("profile", ["balanced", "strict"])
def test_one_at_a_time_is_not_warned_of(lane: dict[str, Any], profile: str) -> None:
    assert load(profile=profile, pools=pool(role="reward", lane=lane)).warnings() == []


def test_a_generate_lane_is_not_warned_of() -> None:
    assert load(pools=pool(lane={"scope": "replica", "limit": 8})).warnings() == []


@pytest.mark.parametrize("profile", ["off", "strict"])
def test_a_body_that_could_never_be_held_is_warned_of(profile: str) -> None:
    limits = {"body_bytes": 1001, "held_bytes": 1000}
    assert load(profile=profile, limits=limits).warnings() == [
        "limits.body_bytes: 1001 is never taken, since limits.held_bytes is 1000"
    ]
    assert load(profile=profile, limits=limits | {"held_bytes": 1001}).warnings() == []


@pytest.mark.parametrize("key", ["a", f"alice=sha256:{sha256(b'a').hexdigest()}"])
def test_an_admin_key_that_opens_the_data_plane_too_is_warned_of(key: str) -> None:
    for admin in ("a", f"sha256:{sha256(b'a').hexdigest()}"):
        assert load(auth={"api_keys": ["b", key], "admin_key": admin}).warnings() == [
            "auth.admin_key: is one of auth.api_keys too, so who may ask may administer"
        ]
    assert load(auth={"api_keys": ["b", key], "admin_key": "c"}).warnings() == []


def test_the_offset_scheme_is_warned_of() -> None:
    (warning,) = load(scheme="offset").warnings()
    assert warning.startswith("scheme: offset gives every prompt the same seeds")


def test_a_home_without_slack_inf_is_warned_of_where_it_is_written() -> None:
    (top,) = load(routing={"on_home_down": "fail"}, pools=pool()).warnings()
    assert top.startswith("routing.on_home_down: fail has no effect while slack is 0")
    (own,) = load(pools=pool(routing={"on_home_down": "wait", "slack": 3})).warnings()
    assert own.startswith("pools[0].routing.on_home_down: wait has no effect while slack is 3")
    assert load(profile="strict", routing={"slack": 2}).warnings() == []
    assert load(routing={"slack": "inf", "on_home_down": "fail"}).warnings() == []


def test_one_server_in_two_places_is_warned_of() -> None:
    twin = {**OTHER, "replicas": [{"name": "b-0", "url": f"{URL.format(1)}/v1/"}]}
    (warning,) = load(pools=[POOL, twin]).warnings()
    assert warning.startswith("pools[1].replicas[0].url: pools[0].replicas[0] is the same server")
    ranks = [{"name": f"a-{rank}", "url": URL.format(1), "dp_rank": rank} for rank in range(2)]
    assert load(pools=pool(replicas=ranks)).warnings() == []


@pytest.mark.parametrize(
    ("engine", "role", "key", "value", "does"),
    [
        ("openai", "generate", "isolate_cache", "request", "sample"),
        ("sglang", "reward", "isolate_cache", "run", "score"),
        ("openai", "generate", "priority", "index", "sample"),
        ("vllm", "reward", "priority", "header", "score"),
    ],
)
def test_what_no_route_of_the_pool_would_read_is_refused(
    engine: str, role: str, key: str, value: str, does: str
) -> None:
    [line] = refused(pools=pool(engine=engine, role=role, **{key: value}))
    assert line.startswith(f"pools[0].{key}: {engine} takes no ")
    assert line.endswith(f" with requests to {does}; set off")
    load(pools=pool(engine=engine, role=role, **{key: "off"}))


@pytest.mark.parametrize("key", ["isolate_cache", "priority"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_engines_that_read_them_may_be_told(engine: str, key: str) -> None:
    load(pools=pool(engine=engine, **{key: "request" if key == "isolate_cache" else "index"}))
