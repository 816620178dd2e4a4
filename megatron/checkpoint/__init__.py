"""Checkpoint formats, readable on one CPU process without the trainer."""
