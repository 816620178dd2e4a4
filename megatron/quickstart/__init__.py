"""The parts of `make quickstart`: a corpus that is on every machine, steps, measures."""
