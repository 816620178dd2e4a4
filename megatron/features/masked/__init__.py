"""BERT and T5: families, layers, masked samples and Hugging Face formats."""
