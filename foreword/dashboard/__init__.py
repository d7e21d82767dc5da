"""A page that shows what the cache does: `/ui` on a server and on a router."""
