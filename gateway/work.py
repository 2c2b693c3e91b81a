"""What is known of a request on its way: as it was asked, and as it goes on."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.answers import Answer
from gateway.bodies import Heard
from gateway.core import canonical, identity, plan
from gateway.core.document import Document
from gateway.core.errors import Fault
from gateway.core.indexing import Ask, Claim
from gateway.core.resume import Origin
from gateway.core.types import Api, Handling, Request
from gateway.fleet import Pool
from gateway.runs import Run
from gateway.sending import Job
from gateway.session import Interaction, Session
from gateway.stores import ScopeKey
from gateway.tracing import Trace


@dataclass(slots=True)
class Asked:
    """A request that was read and found good, before anything is taken for it."""

    request: Request
    caller: identity.Caller
    route: str
    pool: Pool
    handling: Handling
    document: Document
    wish: plan.Wish
    run: str
    session: Session | None = None
    """The session, if it was created."""
    origin: Origin | None = None
    """The sample that it goes on with, by X-Detgate-Resume."""
    resumes: tuple[str, int] | None = None
    """Effective identity and index of the request that X-Detgate-Resume names."""
    priority: int | None = None
    """From X-Detgate-Priority, where the pool goes by it; lower goes first."""
    digest: str | None = None
    """Digest of its content, where it was taken."""

    def content(self) -> str:
        """The digest of its content, taken when it is first asked for."""
        if self.digest is None:
            self.digest = canonical.content(self.document, self.route)
        return self.digest


@dataclass(slots=True)
class Work:
    """What is known of a request while it runs, and what the record says of it at the end."""

    since: float
    request: Request
    api: Api = "openai"
    user: str | None = None
    """Who has the key that it came with, where the configuration says so."""
    asked: Asked | None = None
    run: Run | None = None
    claim: Claim | None = None
    plan: plan.Plan | None = None
    job: Job | None = None
    scope: ScopeKey | None = None
    session: Session | None = None
    """The session that counts this request among its open ones."""
    interaction: Interaction | None = None
    """What that session remembers of it."""
    ask: Ask | None = None
    heard: Heard | None = None
    """What was said to the client, where bodies are kept."""
    raced: bool = False
    """Another request raced with this one, as far as is known yet."""
    completed: bool = False
    answer: Answer = field(default_factory=Answer)
    fault: Fault | None = None
    trace: Trace | None = None
    """Its spans, where requests are traced."""

    def told(self) -> dict[str, str]:
        """What each line of the log says of the request that it is about."""
        told = {}
        if self.plan is not None:
            told["request_id"] = self.plan.request_id
        elif (given := self.request.fields.get(b"x-request-id")) is not None:
            told["client_request_id"] = given.decode("latin-1")
        if self.user is not None:
            told["user"] = self.user
        if self.trace is not None:
            told["trace_id"] = self.trace.id
        return told
