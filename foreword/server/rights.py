"""Who may do what: operators, who drain servers and clear the cache of all tenants, and tenants."""

from __future__ import annotations

import hmac

from starlette.requests import Request

from foreword.api.callers import credentials, is_local
from foreword.api.tenants import SALT_HEADER, Tenant, Tenants
from foreword.config import ServerConfig
from foreword.errors import Forbidden


class Rights:
    """The rights of callers.

    With an admin key its owners are operators. Without any key at all, callers on this host are.
    """

    def __init__(self, tenants: Tenants, config: ServerConfig) -> None:
        self._tenants = tenants
        self._admin_key = None if config.admin_key is None else config.admin_key.encode()
        self._open = self._admin_key is None and not tenants.require_keys

    def tenant(self, request: Request) -> Tenant:
        """The caller's tenant. Raises Unauthorized."""
        return self._tenants.authenticate(credentials(request.headers), request.headers.get(SALT_HEADER))

    def is_operator(self, request: Request) -> bool:
        if self._admin_key is None:
            return self._open and is_local(request.client.host if request.client else None, request.headers)
        scheme, _, key = (credentials(request.headers) or "").strip().partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(
            self._admin_key, key.strip().encode("latin-1", "replace")
        )

    def check_operator(self, request: Request, what: str) -> None:
        """Raises Unauthorized or Forbidden if the caller may not do `what`."""
        if self.is_operator(request):
            return
        self.tenant(request)
        if self._open:
            raise Forbidden(f"{what} is possible from the server's own host only, or with --admin-key")
        raise Forbidden(f"{what} takes the key of the server's operator (--admin-key)")

    def check_own(self, request: Request, what: str) -> Tenant:
        """The caller's tenant, for changes to what belongs to it. Where no keys are required, everything belongs to all
        callers, so only operators may change it. Raises Unauthorized or Forbidden."""
        tenant = self.tenant(request)
        if tenant.source == "none" and not self.is_operator(request):
            self.check_operator(request, what)
        return tenant
