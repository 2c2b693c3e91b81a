"""Reads a request: who asks, for what, of whom. Nothing is taken yet, so everything may still be refused."""

from __future__ import annotations

from collections.abc import Collection

from gateway.core import identity, plan, priority, resume
from gateway.core.document import Document, DuplicateField, Malformed
from gateway.core.errors import Busy, CallerFault, Fault, WrongMethod
from gateway.core.types import Handling, Request
from gateway.fleet import Fleet, Pool
from gateway.routes import READ_FIELDS
from gateway.session import Session
from gateway.sessions import Sessions
from gateway.settings import Settings
from gateway.work import Asked


class Reader:
    """What a request must be, under the settings in force."""

    def __init__(self, settings: Settings, run: str, sessions: Sessions, fleet: Fleet) -> None:
        self._settings = settings
        self._run = run
        self._sessions = sessions
        self._fleet = fleet
        self._off = settings.profile == "off"
        self._strict = settings.profile == "strict"
        self._choosy = self._strict or settings.sessions.required or settings.scheme == "offset"

    def read(self, request: Request, route: str, names: identity.Named, session: Session | None) -> Asked:
        """The request, found good. Raises `CallerFault`, or `Busy` where it is the fleet's fault."""
        known = session.known if session is not None else None
        caller = identity.identify(names, request.fields, self._settings.index_order, known)
        document = self._document(request)
        wanted = request.fields.get(b"x-detgate-pool")
        model = document.value.get("model")
        try:
            pool, handling = self._fleet.find(
                route, model if type(model) is str else None, None if wanted is None else wanted.decode("latin-1")
            )
        except Fault as fault:
            _check_method(request.method, route, self._fleet.methods(route))
            raise self._explained(fault, request) from None
        if request.method not in handling.methods:
            _check_method(request.method, route, handling.methods)
        wish = plan.Wish()
        if handling.computes and not self._off:
            if self._choosy:
                self._admissible(request, caller, pool, handling, route)
                self._has_member(caller, handling)
            wish = self._wish(pool, handling, document)
            pool.engine.check(route, document, pool.facts, wish.samples)
        asked = Asked(request, caller, route, pool, handling, document, wish, caller.run or self._run, session)
        if (given := request.fields.get(b"x-detgate-priority")) is not None:
            number = identity.integer(given, "X-Detgate-Priority", priority.LARGEST)
            asked.priority = number if pool.settings.priority == "header" else None
        if (named := request.fields.get(b"x-detgate-resume")) is not None and handling.kind == "sample":
            self._resumes(asked, named)
        return asked

    def _resumes(self, asked: Asked, name: bytes) -> None:
        """Note what a request says it goes on with."""
        if self._off:
            return
        if asked.wish.samples > 1 or asked.wish.each or len(asked.wish.calls) > 1:
            raise CallerFault(
                "A request that goes on with a sample asks for one prompt and one sample. Send one for each.",
                code="invalid_resume",
                param="X-Detgate-Resume",
            )
        named = resume.read(name.decode("latin-1").strip(), asked.caller.identity, asked.caller.ordinal)
        if named is None:
            raise CallerFault(
                "X-Detgate-Resume must be the X-Detgate-Request-Id of an earlier answer of this session and identity, "
                "with .{sample} behind it for another sample than the first.",
                code="invalid_resume",
                param="X-Detgate-Resume",
            )
        asked.origin, asked.resumes = named.origin, (named.identity, named.index)

    def _document(self, request: Request) -> Document:
        if not request.body and request.method != "POST":
            return Document(b"{}")
        try:
            return Document(request.body)
        except Malformed as error:
            if self._off:
                return Document.opaque(request.body)
            raise CallerFault(str(error), code="invalid_json") from None

    def _explained(self, fault: Fault, request: Request) -> Fault:
        """The same; where the body names no model because it was not read, that is said too."""
        if self._off and isinstance(fault, CallerFault) and fault.code == "ambiguous_pool" and request.body:
            try:
                Document(request.body)
            except Malformed as error:
                return CallerFault(f"{fault.message} {error}", code="ambiguous_pool", param="model")
        return fault

    def _admissible(
        self, request: Request, caller: identity.Caller, pool: Pool, handling: Handling, route: str
    ) -> None:
        if self._settings.sessions.required and not caller.named:
            raise CallerFault(
                "This gateway takes no request without a session: send X-Session-ID, or use /sessions/{id}/….",
                code="session_required",
                param="X-Session-ID",
            )
        if not self._strict:
            return
        if caller.random_session and not self._settings.sessions.allow_random:
            given = b"x-detgate-identity" in request.fields
            raise CallerFault(
                f"This {'identity' if given else 'session id'} holds a random id, so no other run could repeat it. "
                "Send the session's logical name in X-Detgate-Identity, or set sessions.allow_random.",
                code="random_session",
                param="X-Detgate-Identity" if given else "X-Session-ID",
            )
        if handling.kind == "sample" and handling.seed is None:
            raise CallerFault(
                f"{route} takes no seed on this engine, so its answers cannot repeat. Use /v1/chat/completions, or "
                "profile balanced, which serves it without the promise.",
                code="unseeded_route",
            )
        if (against := pool.contradicts) is not None:
            raise Busy(
                f"Pool {pool.name} cannot keep the promise: {against}. Mend it, or use profile balanced.",
                code="not_deterministic",
                retry_after=10,
            )

    def _has_member(self, caller: identity.Caller, handling: Handling) -> None:
        """Where seeds follow from the member, a group's name alone would make clones of its members."""
        if self._settings.scheme != "offset" or handling.kind != "sample" or caller.member is not None:
            return
        run = caller.run or self._run
        for name in (caller.session, caller.identity):
            group = self._sessions.group(run, name)
            if group is not None and group.size > 1:
                raise CallerFault(
                    f"{name} is a group of {group.size}, whose members have seeds of their own. "
                    "Use a member's session, or send X-Member-Index.",
                    code="member_required",
                    param="X-Member-Index",
                )

    def _wish(self, pool: Pool, handling: Handling, document: Document) -> plan.Wish:
        try:
            document.check_unique(READ_FIELDS)
        except DuplicateField as error:
            raise CallerFault(str(error), code="duplicate_field", param=error.field) from None
        wish = plan.read_wish(handling, document, split=pool.role == "reward")
        if wish.seeded and self._settings.client_seed == "reject":
            raise CallerFault(
                "This gateway gives the seeds itself (client_seed: reject). Send none.",
                code="client_seed_rejected",
                param="seed",
            )
        return wish


def _check_method(method: str, route: str, methods: Collection[str]) -> None:
    """Raise `WrongMethod` where some are taken and this is none of them."""
    if methods and method not in methods:
        raise WrongMethod(f"{route} takes {' or '.join(methods)}, not {method}.", ", ".join(methods))
