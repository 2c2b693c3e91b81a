"""Keys: who may use the data plane, who may administer. What is compared are digests, in constant time."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from hashlib import sha256

from gateway.core.errors import Forbidden, Unauthorized
from gateway.settings import Auth, Settings
from gateway.settings.checks import is_loopback


def given(fields: Mapping[bytes, bytes]) -> bytes:
    """The key that a request carries, as a Bearer token or in x-api-key; nothing where there is none."""
    authorization = fields.get(b"authorization", b"")
    if authorization[:7].lower() == b"bearer ":
        return authorization[7:].strip()
    return fields.get(b"x-api-key", b"")


def digest(key: bytes) -> bytes:
    """What is kept of a key. To find one by it tells nothing of the key, however long it takes."""
    return sha256(key).digest()


class Keys:
    """The keys of the data plane. Without any in the configuration everyone who reaches the port may ask."""

    def __init__(self, auth: Auth) -> None:
        self._digests = {digest(key.get_secret_value().encode()) for key in auth.api_keys}
        self.open = not self._digests
        """None is needed."""

    def holds(self, key: bytes) -> bool:
        """Whether a key is one of them."""
        return bool(self._digests) and digest(key) in self._digests

    def check(self, key: bytes) -> None:
        """Raise `Unauthorized` unless none is needed or this is one of them."""
        if self._digests and digest(key) not in self._digests:
            raise Unauthorized("A key is needed: send it as a Bearer token or in x-api-key.")


class AdminKey:
    """Opens the routes that administer. Without one they are open on a loopback bind, and closed on any other."""

    def __init__(self, settings: Settings) -> None:
        key = settings.auth.admin_key
        self._digest = None if key is None else digest(key.get_secret_value().encode())
        self._open = is_loopback(settings.host)

    @property
    def needed(self) -> bool:
        """There is one."""
        return self._digest is not None

    def holds(self, key: bytes) -> bool:
        """Whether a key is the admin key."""
        return self._digest is not None and hmac.compare_digest(self._digest, digest(key))

    def check(self, key: bytes) -> None:
        """Raise `Forbidden` where the routes are closed, `Unauthorized` where the key is not the one."""
        if self._digest is None and not self._open:
            raise Forbidden("Admin routes are closed off loopback until auth.admin_key is set.", code="admin_closed")
        if self._digest is not None and not self.holds(key):
            raise Unauthorized("This needs the admin key, as a Bearer token or in x-api-key.")
