"""Retrievers for question answering: passage embeddings, evaluation by nearest-neighbour search,
and fine-tuning."""
