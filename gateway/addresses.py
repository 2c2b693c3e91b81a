"""Whether the gateway can listen where its settings say, found out before a run is begun in vain."""

from __future__ import annotations

import errno
import socket

from gateway.settings import InvalidSettings, Settings
from gateway.tls import Certificate


def check(settings: Settings) -> None:
    """Raises `InvalidSettings` where a host is not this machine's, a port is another's or a certificate is none.

    Other gateways' workers share their port with whoever asks for that: here nobody asks.
    """
    if settings.tls.cert is not None:
        Certificate(settings.tls)
    listens("host", settings.host, "port", settings.port)
    if settings.admin_port is not None:
        key = "host" if settings.admin_host is None else "admin_host"
        listens(key, settings.admin_host or settings.host, "admin_port", settings.admin_port)


def listens(of_host: str, host: str, of_port: str, port: int) -> None:
    """Raises `InvalidSettings` where nobody can listen there. `of_host`, `of_port`: the settings that say where."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise InvalidSettings([f"{of_host}: nobody has the name {host}: {str(error.strerror).lower()}"]) from None
    foreign = 0
    for family, _, _, _, address in found:
        try:
            with socket.socket(family) as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                tried.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                why = str(error.strerror).lower()
                raise InvalidSettings(
                    [f"{of_port}: cannot listen on {host}:{port}: {why}; choose another port"]
                ) from None
            foreign += error.errno == errno.EADDRNOTAVAIL
    if foreign == len(found):
        raise InvalidSettings([f"{of_host}: {host} is no address of this machine"])
