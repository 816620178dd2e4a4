"""Run lengths given as a number of epochs."""
