"""Unattended runs: the watchdog of a rank, who waits for whom, restarts."""
