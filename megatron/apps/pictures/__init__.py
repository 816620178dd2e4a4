"""Plots and tables of runs' metrics."""
