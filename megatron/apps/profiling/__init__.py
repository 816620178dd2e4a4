"""A table of the time of a training step, read from a trace of torch's profiler."""
