"""Programs that generate text, measured by benchmarks/generate.py."""
