"""The parts of `make quickstart`: a corpus that every machine has, and the commands."""
