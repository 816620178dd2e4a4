"""Fine-tuning in one command: from the folder of a Hugging Face model and files of examples to the
folder of another, over the trainer of pretraining."""
