"""What `benchmarks/train.py` measures: this trainer and its peers, each in a process of its own."""
