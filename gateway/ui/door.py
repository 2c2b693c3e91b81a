"""Who may see the pages: whoever holds the admin key, by header, or by a cookie that the log-in form gave for it.

The cookie is no key: it says until when it is good, sealed by the admin key. So every worker and gateway with that key
knows it, none keeps it, and another admin key ends all. Without an admin key the pages are open on a loopback bind, to
those alone who call the gateway by an address: a site elsewhere whose name was made to lead here is kept out.
"""

from __future__ import annotations

import hmac
import time
from hashlib import sha256

from starlette.requests import Request
from starlette.responses import Response

from gateway.core.errors import Forbidden, Unauthorized
from gateway.keys import AdminKey, given
from gateway.settings import Settings

COOKIE = "detgate_ui"

SECONDS = 12 * 3600
"""How long a visitor stays logged in."""


class Door:
    """Lets visitors in."""

    def __init__(self, settings: Settings) -> None:
        key = settings.auth.admin_key
        self._admin = AdminKey(settings)
        self._secret = b"" if key is None else key.get_secret_value().encode()

    def check(self, request: Request) -> None:
        """Raise `Unauthorized` where the key is needed, `Forbidden` where there is none and they are closed."""
        key = given(dict(request.headers.raw))
        if not key and self.logged_in(request):
            return
        self._admin.check(key)
        self._admin.check_host(request.url.hostname or "")

    def logged_in(self, request: Request) -> bool:
        """Whether the visitor comes with a good cookie."""
        until, _, seal = request.cookies.get(COOKIE, "").partition(".")
        if not self._admin.needed or not until.isascii() or not until.isdecimal() or len(until) > 12:
            return False
        return hmac.compare_digest(seal.encode(), self._seal(until).encode()) and time.time() < int(until)

    def enter(self, request: Request, key: str, answer: Response) -> None:
        """Let a visitor in by the form. Raises `Unauthorized` for a wrong key, `Forbidden` from another site's form."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise Forbidden("This form is for its own page alone.", code="cross_site")
        if not self._admin.holds(key.encode(errors="replace")):
            raise Unauthorized("That is not the admin key.")
        until = str(int(time.time()) + SECONDS)
        secure = request.url.scheme == "https" or request.headers.get("x-forwarded-proto") == "https"
        answer.set_cookie(
            COOKIE,
            f"{until}.{self._seal(until)}",
            max_age=SECONDS,
            path=request.scope.get("root_path") or "/",
            secure=secure,
            httponly=True,
            samesite="strict",
        )

    def leave(self, request: Request, answer: Response) -> None:
        """Forget the visitor's cookie."""
        answer.delete_cookie(COOKIE, path=request.scope.get("root_path") or "/", httponly=True, samesite="strict")

    def _seal(self, until: str) -> str:
        return hmac.new(self._secret, b"detgate ui until " + until.encode(), sha256).hexdigest()
