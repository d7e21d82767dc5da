"""Why a prompt missed the cache: the first message or field that differs from the nearest earlier conversation.

Works on requests, not on tokens, so that server and router can use it in front of any engine. It keeps hashes, no text.
"""
