"""Tokens and their text: tokenizers, detokenizing, stop strings, what a text must match. No torch."""
