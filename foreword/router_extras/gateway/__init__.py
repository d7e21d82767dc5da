"""Endpoint picker: the router's placement for a gateway that forwards requests itself, such as Envoy."""
