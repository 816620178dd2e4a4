"""Evaluation of long contexts on generated documents: RULER's synthetic tasks, passkey; and the
loss by position."""
