"""What retrieval gives a model: its perplexity with and without neighbours, on which chunks."""
