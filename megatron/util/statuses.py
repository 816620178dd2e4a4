"""Exit statuses of training programs, which tell those that start them what to do."""

USER_MISTAKE = 2
"""The command, a file or a setting of the machine is wrong: another start ends in the same way."""
LOST = 3
"""A rank is lost, hangs or differs from its replicas: another start continues from the newest
checkpoint."""
