"""The peak rate of a processor."""
