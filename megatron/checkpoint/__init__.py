"""Checkpoint files and formats, usable in one CPU process without the trainer."""
