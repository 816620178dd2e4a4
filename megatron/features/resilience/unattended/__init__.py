"""Callbacks for runs that nobody watches: copies that differ, faulty steps, spikes, slow ranks,
restarts and checkpoints in memory."""
