"""Averages of weights over the steps of a training: exponential and uniform."""
