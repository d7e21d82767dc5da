"""The dashboard: the page `/ui` of a server and of a router."""
