"""Processes of a run that no launcher has started."""
