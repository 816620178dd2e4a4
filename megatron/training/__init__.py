"""The training loop and what it reports: schedules, evaluation, metrics, checkpoints, stops."""
