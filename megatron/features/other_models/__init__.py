"""Runs that start from a checkpoint whose model has a different head or other different parts."""
