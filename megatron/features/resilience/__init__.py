"""Runs that nobody watches: the watchdog of a rank, who waits for whom, restarts."""
