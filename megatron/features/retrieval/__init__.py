"""Retrieval: biencoders, their pretraining by the inverse cloze task, their start from a BERT."""
