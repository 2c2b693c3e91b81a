"""Keys: which header carries one, and what each kind opens."""

from __future__ import annotations

import io
from typing import Any

import pytest

from gateway import keys
from gateway.cli import main
from gateway.core.errors import Forbidden, Unauthorized
from gateway.keys import AdminKey, Keys, entry, given
from gateway.settings import InvalidSettings, Settings
from tests.harness import FakeWorker, chat, gateway, pool


def load(**flags: Any) -> Settings:
    return Settings.load(None, {}, flags)


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({}, b""),
        ({b"authorization": b"Bearer abc"}, b"abc"),
        ({b"authorization": b"bearer  abc "}, b"abc"),
        ({b"x-api-key": b"abc"}, b"abc"),
        ({b"authorization": b"Basic xyz", b"x-api-key": b"abc"}, b"abc"),
        ({b"authorization": b"Bearer one", b"x-api-key": b"two"}, b"one"),
    ],
)
def test_a_key_comes_as_a_bearer_token_or_in_x_api_key(fields: dict[bytes, bytes], key: bytes) -> None:
    assert given(fields) == key


def test_without_keys_everyone_may_ask_and_nobody_holds_one() -> None:
    keys = Keys(load().auth)
    keys.check(b"")
    assert not keys.holds(b"")


def test_with_keys_one_of_them_is_needed() -> None:
    keys = Keys(load(auth={"api_keys": ["one", "zwö"]}).auth)
    keys.check(b"one")
    assert keys.holds("zwö".encode())
    for key in (b"", b"on", b"one "):
        assert not keys.holds(key)
        with pytest.raises(Unauthorized):
            keys.check(key)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_without_an_admin_key_a_loopback_bind_is_open(host: str) -> None:
    admin = AdminKey(load(host=host))
    admin.check(b"")
    assert not admin.holds(b"")


def test_without_an_admin_key_any_other_bind_is_closed() -> None:
    with pytest.raises(Forbidden):
        AdminKey(load(host="0.0.0.0", insecure=True)).check(b"")


def test_with_an_admin_key_it_is_needed_everywhere() -> None:
    for host in ("127.0.0.1", "0.0.0.0"):
        admin = AdminKey(load(host=host, insecure=True, auth={"admin_key": "boss"}))
        admin.check(b"boss")
        assert admin.holds(b"boss")
        for key in (b"", b"bos"):
            assert not admin.holds(key)
            with pytest.raises(Unauthorized):
                admin.check(key)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]".strip("[]"), "localhost", "a.localhost", "10.0.0.7"])
def test_without_an_admin_key_calls_by_an_address_are_let_in(host: str) -> None:
    AdminKey(load()).check_host(host)


@pytest.mark.parametrize("host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example"])
def test_a_name_that_leads_here_is_let_in_with_a_key_alone(host: str) -> None:
    AdminKey(load(auth={"admin_key": "boss"})).check_host(host)
    with pytest.raises(Forbidden):
        AdminKey(load()).check_host(host)


def test_an_admin_port_off_loopback_is_closed_without_a_key() -> None:
    with pytest.raises(Forbidden):
        AdminKey(load(admin_port=9000, admin_host="0.0.0.0")).check(b"")
    AdminKey(load(admin_port=9000)).check(b"")


# --- hashes and names


def test_a_hash_opens_to_its_key_and_to_nothing_else() -> None:
    told = load(auth={"api_keys": [entry("one"), entry("two", "bob"), "three"], "admin_key": entry("boss")})
    kept = Keys(told.auth)
    for key in (b"one", b"two", b"three"):
        kept.check(key)
    assert [kept.name(key) for key in (b"one", b"two", b"three", b"four")] == [None, "bob", None, None]
    for text in (entry("one"), entry("two", "bob"), entry("two"), "bob"):
        assert not kept.holds(text.encode())
    admin = AdminKey(told)
    assert admin.holds(b"boss")
    assert not admin.holds(entry("boss").encode())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"auth": {"api_keys": ["sha256:00"]}}, "auth.api_keys[0]: a hash is written [NAME=]sha256:HEX"),
        ({"auth": {"api_keys": ["b b=sha256:00"]}}, "auth.api_keys[0]: a hash is written [NAME=]sha256:HEX"),
        ({"auth": {"api_keys": [entry("a").upper().replace("SHA", "sha")]}}, "auth.api_keys[0]: a hash is written"),
        ({"auth": {"admin_key": entry("a", "bob")}}, "auth.admin_key: takes no name before its hash"),
        ({"auth": {"api_keys": [entry("a", "bob"), entry("b", "bob")]}}, "auth.api_keys: bob stands before two keys"),
        ({"pools": [pool("p", "http://h", api_key=entry("a"))]}, "pools[0].api_key: is sent to the replicas"),
        ({"admin_host": "::1"}, "admin_host: needs an admin_port"),
        ({"admin_port": 8000}, "admin_port: 8000 is the port of the data plane"),
        ({"tls": {"client_ca": "ca.pem"}}, "tls.client_ca: needs tls.cert"),
        ({"pools": [pool("p", "http://h", tls={"key": "k"})]}, "pools[0].tls.key: needs pools[0].tls.cert"),
        ({"tracing": {"endpoint": "collector:4317"}}, "tracing.endpoint: a URL is needed"),
        ({"tracing": {"endpoint": "http://u:secret@h/v1/traces"}}, "tracing.endpoint: holds credentials"),
    ],
)
def test_what_cannot_be_meant_is_refused_without_telling_secrets(given: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidSettings) as found:
        load(**given)
    assert line in str(found.value)
    assert entry("a")[7:] not in str(found.value)
    assert "secret" not in str(found.value)


def test_a_text_in_the_environment_holds_hashes_and_keys_side_by_side() -> None:
    env = {"DETGATE_AUTH__API_KEYS": f"plain {entry('one', 'alice')},a=b="}
    kept = Keys(Settings.load(None, env, {}).auth)
    assert [kept.holds(key) for key in (b"plain", b"one", b"a=b=")] == [True, True, True]
    assert kept.name(b"one") == "alice"


def test_the_command_makes_keys_and_hashes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for _ in range(2):
        assert main(["key", "new", "alice"]) == 0
        told = capsys.readouterr()
        made.append(told.out.strip())
        assert entry(made[-1], "alice") in told.err
    assert made[0] != made[1]
    assert min(map(len, made)) >= 43
    monkeypatch.setattr("sys.stdin", io.StringIO(made[0] + "\n"))
    assert main(["key", "hash"]) == 0
    assert capsys.readouterr().out.strip() == entry(made[0])
    assert Keys(load(auth={"api_keys": [entry(made[0])]}).auth).holds(made[0].encode())
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert main(["key", "hash"]) == 2
    assert made[0].startswith(keys.PREFIX)


async def test_the_ledger_names_who_asked_and_never_the_key() -> None:
    kept = {"api_keys": [entry("key-of-alice", "alice"), "key-of-nobody"]}
    async with FakeWorker() as worker, gateway(pool("policy", worker.url), auth=kept) as gate:
        for key in ("key-of-alice", "key-of-nobody"):
            headers = {"authorization": f"Bearer {key}"}
            answer = await gate.http.post("/v1/chat/completions", json=chat(key[7:]), headers=headers)
            assert answer.status_code == 200
        opened = [record for record in gate.records() if record["event"] == "opened"]
        assert [record["user"] for record in opened] == ["alice", None]
        assert "key-of" not in str(gate.records())
