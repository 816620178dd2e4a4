"""Contestants of `benchmarks/train.py`: this trainer and its peers, each in a process of its
own."""
