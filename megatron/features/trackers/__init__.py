"""Experiment trackers that a run reports to."""
