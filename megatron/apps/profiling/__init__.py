"""Where the time of a training step goes, read from a trace of torch's profiler."""
