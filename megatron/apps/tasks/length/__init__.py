"""Evaluation of long contexts: RULER's synthetic tasks and passkey retrieval on generated
documents, and the loss by position."""
