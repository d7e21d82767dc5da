"""Extras of the router: the endpoint picker for gateways, replicas from Kubernetes Services, the audit of hits, and
APIs for a whole fleet: named prefixes, cache control, erasures, the dashboard."""

from foreword.router_extras.installed import InstalledExtras

EXTRAS = InstalledExtras()
