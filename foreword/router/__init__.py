"""The router: an OpenAI-compatible proxy that sends a request where its prefix is, unless waiting there costs more."""
