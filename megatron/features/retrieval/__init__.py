"""Retrieval: bi-encoders, pretraining on the inverse cloze task, and initialisation from a BERT."""
