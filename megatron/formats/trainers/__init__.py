"""Other trainers' checkpoints, which are read with the tables of Hugging Face architectures."""
