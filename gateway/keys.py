"""Keys of the data plane."""

from __future__ import annotations

from hashlib import sha256

from gateway.core.errors import Unauthorized
from gateway.settings import Auth


class Keys:
    """Who may ask. Without keys in the configuration everyone who reaches the port may."""

    def __init__(self, auth: Auth) -> None:
        self._digests = {_digest(key.get_secret_value().encode()) for key in auth.api_keys}

    def check(self, fields: dict[bytes, bytes]) -> None:
        """Raise `Unauthorized` unless a key is not needed or is there, as a Bearer token or in x-api-key.

        Keys are compared by their digests, so that the time it takes tells nothing of them.
        """
        if not self._digests:
            return
        given = fields.get(b"authorization", b"")
        key = given[7:].strip() if given[:7].lower() == b"bearer " else fields.get(b"x-api-key", b"")
        if _digest(key) not in self._digests:
            raise Unauthorized("A key is needed: send it as a Bearer token or in x-api-key.")


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
