"""Where the store is and how to get in: what a `redis://` or `rediss://` URL says."""

from __future__ import annotations

import ssl
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit

OPTIONS = ("db", "username", "password", "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")


class Address(NamedTuple):
    """A server. Shown without what opens it."""

    host: str
    port: int
    db: int
    username: str | None
    password: str | None
    tls: ssl.SSLContext | None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}/{self.db}"

    def __repr__(self) -> str:
        return str(self)


def parse(url: str) -> Address:
    """Read `redis[s]://[[user]:password@]host[:port][/db][?option=value…]`.

    Options: `db`, `username`, `password`; of TLS `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` (files) and
    `ssl_cert_reqs=none`, which trusts any server. Raises `ValueError`, whose words hold no secret.
    """
    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query))
    for name in options:
        if name not in OPTIONS:
            raise ValueError(f"{name} is no option of a store's URL; there are {', '.join(OPTIONS)}")
    db = options.get("db") or parts.path.strip("/") or "0"
    if not db.isdecimal():
        raise ValueError("the database is no number")
    tls = _tls(options) if parts.scheme == "rediss" else None
    if tls is None and any(name.startswith("ssl_") for name in options):
        raise ValueError("ssl_ options need rediss://")
    return Address(
        parts.hostname or "",
        parts.port or 6379,
        int(db),
        options.get("username") or unquote(parts.username or "") or None,
        options.get("password") or unquote(parts.password or "") or None,
        tls,
    )


def _tls(options: dict[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ssl_ca_certs"))
        if "ssl_certfile" in options:
            context.load_cert_chain(options["ssl_certfile"], options.get("ssl_keyfile"))
    except OSError as error:
        raise ValueError(f"a certificate cannot be read: {error.strerror or error}") from None
    if options.get("ssl_cert_reqs", "required") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
