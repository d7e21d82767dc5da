"""httpx with a timeout of a minute instead of five seconds, for servers on a busy machine."""

from __future__ import annotations

from functools import partial

import httpx

TIMEOUT = 60.0

get = partial(httpx.get, timeout=TIMEOUT)
post = partial(httpx.post, timeout=TIMEOUT)
put = partial(httpx.put, timeout=TIMEOUT)
delete = partial(httpx.delete, timeout=TIMEOUT)
request = partial(httpx.request, timeout=TIMEOUT)
stream = partial(httpx.stream, timeout=TIMEOUT)
