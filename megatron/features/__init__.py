"""Subjects that a run can have next to pretraining, a folder each."""
