"""Evaluation of long contexts on documents that are generated: RULER's synthetic tasks, passkey;
and the loss by position."""
