"""Tables that show how the time of a training step is spent, computed from a trace of torch's
profiler."""
