"""Keys: who may use the data plane, who may administer. What is compared are digests, in constant time."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from hashlib import sha256
from ipaddress import ip_address

from pydantic import SecretStr

from gateway.core.errors import Forbidden, Unauthorized
from gateway.settings import Auth, Settings, hashed
from gateway.settings.checks import is_loopback

PREFIX = "dg-"
"""What a new key begins with, so that it is known for one where it should not be."""


def given(fields: Mapping[bytes, bytes]) -> bytes:
    """The key that a request carries, as a Bearer token or in x-api-key; nothing where there is none."""
    authorization = fields.get(b"authorization", b"")
    if authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return fields.get(b"x-api-key", b"")


def digest(key: bytes) -> bytes:
    """What is kept of a key. To find one by it tells nothing of the key, however long it takes."""
    return sha256(key).digest()


def new() -> str:
    """A key that nobody guesses: 256 bits of chance."""
    return PREFIX + secrets.token_urlsafe(32)


def entry(key: str, name: str | None = None) -> str:
    """A key as the configuration may hold it without being one: its hash, and who has it."""
    return f"{'' if name is None else f'{name}='}sha256:{digest(key.encode()).hex()}"


def _kept(configured: SecretStr) -> tuple[bytes, str | None]:
    """Digest and name of a key in the configuration."""
    text = configured.get_secret_value()
    known = hashed(text)
    return (digest(text.encode()), None) if known is None else (known.digest, known.name)


class Keys:
    """The keys of the data plane. Without any in the configuration everyone who reaches the port may ask."""

    def __init__(self, auth: Auth) -> None:
        self._names = dict(map(_kept, auth.api_keys))
        self.open = not self._names
        """None is needed."""

    def holds(self, key: bytes) -> bool:
        """Whether a key is one of them."""
        return bool(self._names) and digest(key) in self._names

    def name(self, key: bytes) -> str | None:
        """Who has a key, if the configuration says so."""
        return self._names.get(digest(key))

    def check(self, key: bytes) -> None:
        """Raise `Unauthorized` unless none is needed or this is one of them."""
        if self._names and digest(key) not in self._names:
            raise Unauthorized("A key is needed: send it as a Bearer token or in x-api-key.")


class AdminKey:
    """Opens the routes that administer. Without one they are open on a loopback bind, and closed on any other."""

    def __init__(self, settings: Settings) -> None:
        key = settings.auth.admin_key
        self._digest = None if key is None else _kept(key)[0]
        self._open = is_loopback(settings.host) and is_loopback(settings.admin_host or settings.host)

    @property
    def needed(self) -> bool:
        """There is one."""
        return self._digest is not None

    def holds(self, key: bytes) -> bool:
        """Whether a key is the admin key."""
        return self._digest is not None and hmac.compare_digest(self._digest, digest(key))

    def check_host(self, host: str) -> None:
        """Raise `Forbidden` where no key is needed and the gateway was called by a name that is not this machine's.

        A site elsewhere may have its name lead here, and a browser then takes the gateway for a part of it.
        """
        if self._digest is None and not _is_address(host):
            raise Forbidden(
                "Without an admin key this is for this machine: use http://127.0.0.1 or localhost, "
                "or set auth.admin_key.",
                code="admin_closed",
            )

    def check(self, key: bytes) -> None:
        """Raise `Forbidden` where the routes are closed, `Unauthorized` where the key is not the one."""
        if self._digest is None and not self._open:
            raise Forbidden("Admin routes are closed off loopback until auth.admin_key is set.", code="admin_closed")
        if self._digest is not None and not self.holds(key):
            raise Unauthorized("This needs the admin key, as a Bearer token or in x-api-key.")


def _is_address(host: str) -> bool:
    """Whether a host is named by an address, or as this machine: no name that somebody else's server answers for."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
