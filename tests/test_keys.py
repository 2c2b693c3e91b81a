"""Keys: which header carries one, and what each kind opens."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.errors import Forbidden, Unauthorized
from gateway.keys import AdminKey, Keys, given
from gateway.settings import Settings


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
