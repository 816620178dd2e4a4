"""Fine-tuning: data of the tasks, what is computed of their predictions, and the run."""
