"""The middleware for vLLM's API server: named prefixes, versions of weights. vLLM's engine imports none of it; users name
`foreword.integrations.vllm.NamedPrefixes`."""
