"""The record of each start of a run, so that a person can repeat it."""
