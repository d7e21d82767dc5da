"""httpx's calls with time for a server that is busy: its own default is five seconds."""

from __future__ import annotations

from functools import partial

import httpx

PATIENCE = 60.0

get = partial(httpx.get, timeout=PATIENCE)
post = partial(httpx.post, timeout=PATIENCE)
put = partial(httpx.put, timeout=PATIENCE)
delete = partial(httpx.delete, timeout=PATIENCE)
request = partial(httpx.request, timeout=PATIENCE)
stream = partial(httpx.stream, timeout=PATIENCE)
