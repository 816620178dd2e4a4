"""Checks of training steps: spikes, faulty ranks, stragglers and replicas that differ."""
