"""Retrieval: from a corpus to the neighbours of a Retro's samples, and what else looks them up."""
