"""Fine-tuning on tasks: data, training, predictions and scores."""
