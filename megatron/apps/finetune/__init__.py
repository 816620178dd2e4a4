"""Fine-tuning in one command, built on the trainer for pretraining: from the folder of a Hugging
Face model and files of examples to the folder of the tuned model."""
