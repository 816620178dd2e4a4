"""Averages of the weights over training steps: exponential and uniform."""
