from typing import Any

import pytest

from gateway.settings import InvalidSettings, Settings
from gateway.settings.schema import base_url


def line(**flags: Any) -> str:
    with pytest.raises(InvalidSettings) as caught:
        Settings.load(None, {}, flags)
    (only,) = caught.value.lines
    return only


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h:8000/v1/", "http://h:8000"),
        ("http://h:8000//v1//", "http://h:8000"),
        ("HTTPS://Host/base/v1", "https://host/base"),
        ("http://[::1]:80/v1", "http://[::1]:80"),
        ("http://h/v10", "http://h/v10"),
    ],
)
def test_one_address_however_it_is_written(written: str, address: str) -> None:
    assert base_url(written) == address


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("ftp://h", "needs http:// or https:// in front (not 'ftp://h')"),
        ("h:8000", "needs http:// or https:// in front (not 'h:8000')"),
        ("//h", "needs http:// or https:// in front (not '//h')"),
        ("http:h", "needs http:// or https:// in front (not 'http:h')"),
        ("http://", "names no host (not 'http://')"),
        ("http:///v1", "names no host (not 'http:///v1')"),
        ("http://a b", "holds a character that no URL has (not 'http://a b')"),
        ("http://a/b c", "holds a character that no URL has (not 'http://a/b c')"),
        ("http://a\x00b", "holds a character that no URL has (not 'http://a\\x00b')"),
        ("http://a/\u00e9", "holds a character that no URL has (not 'http://a/\u00e9')"),
        ("http://a..b", "names a host that no name server can know (not 'http://a..b')"),
        (f"http://{'a' * 64}.b", f"names a host that no name server can know (not 'http://{'a' * 64}.b')"),
        ("http://h:0", "has a port that none can listen on (not 'http://h:0')"),
        ("http://h:65536", "not a URL, such as http://10.0.0.1:8000 (not 'http://h:65536')"),
        ("http://[::1", "not a URL, such as http://10.0.0.1:8000 (not 'http://[::1')"),
        ("http://u:secret@h", "holds credentials: put them into the pool's api_key"),
        ("http://h?a=1", "has a query or fragment, which no replica's address has (not 'http://h?a=1')"),
        ("http://h#a", "has a query or fragment, which no replica's address has (not 'http://h#a')"),
    ],
)
def test_a_bad_url_is_refused_with_its_key(url: str, fault: str) -> None:
    pool = {"name": "a", "engine": "vllm", "replicas": [{"name": "a-0", "url": url}]}
    assert line(pools=[pool]) == f"pools[0].replicas[0].url: {fault}"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"seed": True}, "seed: a number is needed (not True)"),
        ({"seed": -1}, "seed: at least 0 is needed (not -1)"),
        ({"seed": 2**63}, f"seed: is too large: 2⁶³−1 is the largest (not {2**63})"),
        ({"seed": 1.5}, "seed: a whole number is needed (not 1.5)"),
        ({"port": 65536}, "port: at most 65535 is possible (not 65536)"),
        ({"host": ""}, "host: must not be empty"),
        (
            {"run": "a/b"},
            "run: may hold letters, digits, `.`, `_` and `-`, 128 at most, and begins with a letter or a"
            " digit (not 'a/b')",
        ),
        ({"run": 7}, "run: a text is needed; write it in quotes (not 7)"),
        ({"insecure": "perhaps"}, "insecure: true or false is needed (not 'perhaps')"),
        ({"ledger": {"path": ""}}, "ledger.path: must not be empty"),
        ({"ledger": {"path": 5}}, "ledger.path: a text is needed; write it in quotes (not 5)"),
        ({"tls": {"cert": ""}}, "tls.cert: must not be empty"),
        ({"limits": {"attempts": 0}}, "limits.attempts: at least 1 is needed (not 0)"),
        ({"timeouts": {"idle": -1}}, "timeouts.idle: more than 0 is needed (not -1)"),
        ({"timeouts": {"connect": 0}}, "timeouts.connect: more than 0 is needed (not 0)"),
        ({"timeouts": {"settle": -1}}, "timeouts.settle: at least 0 is needed (not -1)"),
        ({"timeouts": {"idle": "inf"}}, "timeouts.idle: a number is needed (not 'inf')"),
        ({"timeouts": {"idle": False}}, "timeouts.idle: a number is needed (not False)"),
        ({"routing": {"slack": -1}}, "routing.slack: a whole number from 0, or inf, is needed (not -1)"),
        ({"routing": {"slack": 0.5}}, "routing.slack: a whole number from 0, or inf, is needed (not 0.5)"),
        (
            {"routing": {"slack": "nan"}},
            "routing.slack: a whole number from 0, or inf, is needed (not 'nan')",
        ),
        ({"routing": {"slack": True}}, "routing.slack: a whole number from 0, or inf, is needed (not True)"),
        ({"state": "redis:host"}, "state: memory, or a URL such as redis://host:6379/0, is needed"),
        ({"state": "http://host"}, "state: memory, or a URL such as redis://host:6379/0, is needed"),
        ({"state": "redis://h:99999"}, "state: memory, or a URL such as redis://host:6379/0, is needed"),
        ({"auth": {"admin_key": ""}}, "auth.admin_key: an empty key would open to everyone"),
        ({"auth": {"api_keys": ["a", ""]}}, "auth.api_keys[1]: an empty key would open to everyone"),
        (
            {"auth": {"admin_key": "a\n"}},
            "auth.admin_key: a key has no space or line end around it, and no control character",
        ),
    ],
)
def test_a_value_out_of_its_range_is_refused(flags: dict[str, Any], expected: str) -> None:
    assert line(**flags) == expected


@pytest.mark.parametrize("value", ["inf", float("inf"), "3", 3, 3.0, 0])
def test_slack_is_a_whole_number_or_inf(value: object) -> None:
    assert Settings.load(None, {}, {"routing": {"slack": value}}).routing.slack == float(str(value))


def test_the_largest_seed_and_no_time_at_all_are_possible() -> None:
    told = Settings.load(None, {}, {"seed": 2**63 - 1, "timeouts": {"settle": 0}})
    assert (told.seed, told.timeouts.settle) == (2**63 - 1, 0)
