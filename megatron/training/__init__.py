"""The training loop: schedules, evaluation, metrics, checkpoints and early stopping."""
