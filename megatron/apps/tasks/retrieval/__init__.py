"""Retrievers on questions: vectors of passages, answers among the nearest, fine-tuning."""
