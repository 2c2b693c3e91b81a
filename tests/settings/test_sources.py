from pathlib import Path
from typing import Any

import pytest

from gateway.settings import InvalidSettings, Settings
from gateway.settings.sources import from_file, from_text, nested


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "gateway.yaml"


def lines(config: Path | None, env: dict[str, str], flags: dict[str, Any]) -> list[str]:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(config, env, flags)
    return caught.value.lines


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("a: [1\nb: 2", "2:2", "expected ',' or ']', but got ':'"),
        ("seed: 1\n- a", "2:1", "expected <block end>, but found '-'"),
        ("a: 'x", "1:6", "found unexpected end of stream"),
        ("a: !!python/name:os.system", "1:4", "could not determine a constructor for the tag"),
        ("a: *b", "1:4", "found undefined alias 'b'"),
        ("- 1", "1:1", "a mapping of settings is needed"),
        ("seed", "1:1", "a mapping of settings is needed"),
        ("seed: 1\nlog: {}\nseed: 2", "3:1", "the key seed stands twice"),
        ("pools:\n  - name: a\n    name: b", "3:5", "the key name stands twice"),
        ("a: 1\n---\nb: 1", "2:1", "but found another document"),
        ("seed: 1\n5: x", "2:1", "the key 5 is no text"),
        ("log:\n  true: x", "2:3", "the key true is no text"),
        ("log: {<<: {~: x}}", "1:12", "the key ~ is no text"),
    ],
)
def test_broken_yaml_is_named_with_line_and_column(config: Path, text: str, place: str, problem: str) -> None:
    config.write_text(text)
    (line,) = lines(config, {}, {})
    assert line.startswith(f"{config}:{place}: {problem}")


def test_a_file_that_cannot_be_read_is_named(config: Path) -> None:
    assert lines(config, {}, {}) == [f"{config}: No such file or directory"]
    config.write_bytes(b"run: \xff")
    assert lines(config, {}, {}) == [f"{config}: is not UTF-8"]
    config.write_bytes(b"run: \x00")
    assert lines(config, {}, {}) == [f"{config}: unacceptable character #x0000: special characters are not allowed"]


def test_an_empty_file_says_nothing(config: Path) -> None:
    config.write_text("# nothing yet\n")
    assert from_file(config) == {}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("off", "off"),
        ("no", "no"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("2026-11-01", "2026-11-01"),
        ("1_000", "1_000"),
        ("inf", "inf"),
        (".inf", float("inf")),
        ("true", True),
        ("~", None),
        ("", None),
        ("-7", -7),
        ("0", 0),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("'7'", "7"),
        ("{a: [1, x]}", {"a": [1, "x"]}),
    ],
)
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    read = from_text(text, "t")
    assert read == value
    assert type(read) is type(value)


def test_merge_keys_work() -> None:
    text = "base: &b {engine: vllm, role: reward}\npool: {<<: *b, role: generate}"
    assert from_text(text, "t")["pool"] == {"engine": "vllm", "role": "generate"}


def test_the_profile_off_is_a_word(config: Path) -> None:
    config.write_text("profile: off\n")
    assert Settings.load(config, {}, {}).profile == "off"


def test_the_environment_holds_lists_and_mappings_as_json() -> None:
    env = {
        "DETGATE_POOLS": '[{"name": "a", "engine": "vllm", "replicas": [{"name": "a-0", "url": "http://h"}]}]',
        "DETGATE_ROUTING": '{"slack": 2, "key": "session"}',
        "DETGATE_ROUTING__SLACK": "3",
    }
    told = Settings.load(None, env, {})
    assert told.pools[0].replicas[0].name == "a-0"
    assert (told.routing.slack, told.routing.key) == (3, "session")


def test_keys_stand_in_the_environment_as_words() -> None:
    env = {"DETGATE_AUTH__API_KEYS": "123, abc  d"}
    keys = Settings.load(None, env, {}).auth.api_keys
    assert [key.get_secret_value() for key in keys] == ["123", "abc", "d"]


def test_a_key_may_begin_as_json_does() -> None:
    keys = Settings.load(None, {"DETGATE_AUTH__API_KEYS": "[abc {d"}, {}).auth.api_keys
    assert [key.get_secret_value() for key in keys] == ["[abc", "{d"]


def test_an_empty_variable_is_absent_and_null_is_none(config: Path) -> None:
    config.write_text("seed: 1\ntimeouts: {idle: 5}\n")
    env = {"DETGATE_SEED": "", "DETGATE_RUN": "", "DETGATE_WORKER_URLS": "", "DETGATE_TIMEOUTS__IDLE": "null"}
    told = Settings.load(config, env, {})
    assert (told.seed, told.run, told.pools, told.timeouts.idle) == (1, None, (), None)


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"DETGATE_SEDE": "1"}, "DETGATE_SEDE: unknown setting; did you mean DETGATE_SEED?"),
        (
            {"DETGATE_ROUTNG__SLACK": "1"},
            "DETGATE_ROUTNG__SLACK: unknown setting; did you mean DETGATE_ROUTING?",
        ),
        (
            {"DETGATE_ROUTING__SLAK": "1"},
            "routing.slak: unknown key; did you mean slack? (from DETGATE_ROUTING__SLAK)",
        ),
        ({"DETGATE_POOLS": "a"}, "pools: a list is needed (not 'a') (from DETGATE_POOLS)"),
        (
            {"DETGATE_POOLS": '[{"name": '},
            "pools: is no JSON: expecting value, at character 11 (from DETGATE_POOLS)",
        ),
        (
            {"DETGATE_AUTH": '{"admin_key": "secret"'},
            "auth: is no JSON: expecting ',' delimiter, at character 23 (from DETGATE_AUTH)",
        ),
        (
            {"DETGATE_AUTH__API_KEYS": '["secret", "secret'},
            "auth.api_keys: is no JSON: unterminated string starting at, at character 12 (from DETGATE_AUTH__API_KEYS)",
        ),
        ({"DETGATE_SEED__X": "1"}, "DETGATE_SEED__X: seed is no section; set DETGATE_SEED"),
        (
            {"DETGATE_POOLS__0__NAME": "a"},
            "DETGATE_POOLS__0__NAME: pools is no section; set DETGATE_POOLS",
        ),
        (
            {"DETGATE_TIMEOUTS": "5"},
            "timeouts: a mapping of keys to values is needed (not '5') (from DETGATE_TIMEOUTS)",
        ),
    ],
)
def test_a_mistake_in_the_environment_is_named(env: dict[str, str], expected: str) -> None:
    assert lines(None, env, {}) == [expected]


def test_what_kubernetes_tells_of_a_service_named_detgate_is_no_setting() -> None:
    env = {
        "DETGATE_PORT": "tcp://10.0.0.1:8000",
        "DETGATE_SERVICE_HOST": "10.0.0.1",
        "DETGATE_SERVICE_PORT": "8000",
        "DETGATE_SERVICE_PORT_HTTP": "8000",
        "DETGATE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "DETGATE_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert Settings.load(None, env, {}) == Settings()


@pytest.mark.parametrize(
    "urls", ["http://a:1 b=http://b:2/v1", "http://a:1,b=http://b:2", ["http://a:1", "b=http://b:2"]]
)
def test_worker_urls_are_one_pool(urls: str | list[str]) -> None:
    env = {"DETGATE_WORKER_URLS": urls} if isinstance(urls, str) else {}
    flags = {} if env else {"worker_urls": urls}
    (pool,) = Settings.load(None, env, flags).pools
    assert (pool.name, pool.engine) == ("default", "vllm")
    assert [(replica.name, replica.url) for replica in pool.replicas] == [
        ("default-0", "http://a:1"),
        ("b", "http://b:2"),
    ]


def test_the_engine_of_worker_urls_may_come_from_elsewhere() -> None:
    env = {"DETGATE_ENGINE": "sglang"}
    assert Settings.load(None, env, {"worker_urls": ["http://a"]}).pools[0].engine == "sglang"
    assert Settings.load(None, env, {"worker_urls": ["http://a"], "engine": "openai"}).pools[0].engine == "openai"


def test_the_stronger_source_says_what_pools_there_are(config: Path) -> None:
    config.write_text("pools: [{name: f, engine: vllm, replicas: [{name: f-0, url: 'http://f'}]}]\n")
    pools = [{"name": "g", "engine": "vllm", "replicas": [{"name": "g-0", "url": "http://g"}]}]
    env = {"DETGATE_WORKER_URLS": "http://e"}
    assert [pool.name for pool in Settings.load(config, env, {}).pools] == ["default"]
    assert [pool.name for pool in Settings.load(config, env, {"pools": pools}).pools] == ["g"]
    assert Settings.load(config, env, {"worker_urls": ["http://x"]}).pools[0].replicas[0].url == "http://x"


def test_pools_given_twice_by_one_source_are_refused() -> None:
    env = {"DETGATE_WORKER_URLS": "http://e", "DETGATE_POOLS": "[]"}
    assert lines(None, env, {}) == ["pools: given twice, as pools and as worker URLs; leave one out"]


def test_an_engine_alone_is_refused() -> None:
    assert lines(None, {"DETGATE_ENGINE": "vllm"}, {})[0].startswith("engine: says what runs at the worker URLs")


def test_a_bad_worker_url_is_named_by_its_place() -> None:
    assert lines(None, {}, {"worker_urls": ["http://a", "b:80"]}) == [
        "pools[0].replicas[1].url: needs http:// or https:// in front (not 'b:80')"
    ]


def test_dotted_keys_nest_and_the_later_wins() -> None:
    pairs: list[tuple[str, Any]] = [("a.b", 1), ("c", 2), ("a.d.e", 3), ("a.b", 4)]
    assert nested(pairs) == {"a": {"b": 4, "d": {"e": 3}}, "c": 2}
