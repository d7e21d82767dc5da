"""Formats of requests and responses: chat completions, completions, responses, messages.

A dialect parses a body into a `GenerateRequest`, and its writer turns output into a response or into server-sent events.
"""
