"""Implementation of `make quickstart`: a corpus that exists on every machine, and the commands."""
