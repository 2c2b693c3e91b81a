"""Certificates: what the gateway shows to clients and to replicas, and by whom it believes others."""

from __future__ import annotations

import ssl
from pathlib import Path

from gateway.settings import InvalidSettings, ReplicaTls, Tls


class Certificate:
    """What clients are shown. Raises `InvalidSettings` where its files cannot be used."""

    def __init__(self, settings: Tls) -> None:
        assert settings.cert is not None
        self._cert, self._key = settings.cert, settings.key
        self._stamp: list[int] = []
        self.context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        _show(self.context, "tls.cert", self._cert, self._key)
        self._stamp = self._written()
        if settings.client_ca is not None:
            _believe(self.context, "tls.client_ca", settings.client_ca)
            self.context.verify_mode = ssl.CERT_REQUIRED

    def renewed(self) -> bool:
        """Show what is in the files, if they were written since; connections that are open stay as they are.

        Raises `InvalidSettings`, once for each time that they were written.
        """
        stamp = self._written()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        # Tried first where it does no harm: half a pair would be shown too, and fit no handshake.
        _show(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "tls.cert", self._cert, self._key)
        _show(self.context, "tls.cert", self._cert, self._key)
        return True

    def _written(self) -> list[int]:
        """When the files were written last. Files that are away say nothing new."""
        try:
            return [file.stat().st_mtime_ns for file in (self._cert, self._key) if file is not None]
        except OSError:
            return self._stamp


def of_replicas(settings: ReplicaTls) -> ssl.SSLContext:
    """How the replicas of a pool are spoken to. Raises `InvalidSettings` where its files cannot be used."""
    context = ssl.create_default_context()
    if settings.ca is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        _believe(context, "pools[].tls.ca", settings.ca)
    if settings.cert is not None:
        _show(context, "pools[].tls.cert", settings.cert, settings.key)
    return context


def _believe(context: ssl.SSLContext, setting: str, file: Path) -> None:
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise InvalidSettings([f"{setting}: {file}: {_why(error)}"]) from None


def _show(context: ssl.SSLContext, setting: str, cert: Path, key: Path | None) -> None:
    try:
        # A key behind a password would be asked for on the terminal: nobody answers there.
        context.load_cert_chain(cert, key, password=lambda: b"")
    except OSError as error:
        files = f"{cert}" if key is None else f"{cert} with {key}"
        raise InvalidSettings([f"{setting}: {files}: {_why(error)}"]) from None


def _why(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return f"is no certificate and key in PEM that fit ({error.reason or 'no reason is told'})"
    return error.strerror or str(error)
