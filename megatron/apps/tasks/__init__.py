"""Evaluation of models on tasks, and fine-tuning for them."""
