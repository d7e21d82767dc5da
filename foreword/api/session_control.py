"""`/v1/sessions`: a client tells how the sessions of its agents live, on Foreword's server and its router."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Final, Literal

from msgspec import Meta

from foreword.api.dialects.decode import Body, Limits, refuse
from foreword.api.front import Handler
from foreword.api.routes import NO_BODY, JsonBody, Meter, Query, Right, Routes

PATH = "/v1/sessions"
LONGEST_NAME: Final = 256
Name = Annotated[str, Meta(min_length=1, max_length=LONGEST_NAME)]


class SessionBody(Body, kw_only=True):
    """An action on a session. `parent_session_id` is for a fork, `timeout` (seconds without a request after which it is
    forgotten) for one that begins, `keep_tokens` for one that is compacted."""

    action: Literal["open", "fork", "compact", "end"]
    session_id: Name
    parent_session_id: Name | None = None
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None
    keep_tokens: Annotated[int, Meta(ge=0)] = 0

    def check(self, limits: Limits) -> None:
        if (self.action == "fork") != (self.parent_session_id is not None):
            raise refuse(
                "parent_session_id", "names the session that a fork continues; it is needed there, and only there"
            )


def add_routes(
    routes: Routes[Handler],
    act: Handler,
    listed: Handler,
    body: type[SessionBody] = SessionBody,
    query: type[Query] = Query,
) -> None:
    """Add the routes of sessions. A tenant sees and changes its own.

    Args:
        act: carries out a `body`.
        listed: the open sessions of the caller. query: what it takes.
    """

    add = partial(routes.add, right=Right.TENANT, meter=Meter.FREE, tag="sessions")
    add("POST", PATH, body=JsonBody.of(body, closed=True))(act)
    add("GET", PATH, body=NO_BODY, query=query)(listed)
