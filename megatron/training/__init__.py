"""The training loop: schedules, evaluation, metrics, checkpoints, early stops."""
