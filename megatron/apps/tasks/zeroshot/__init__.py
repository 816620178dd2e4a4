"""Tasks that need no training: perplexities, and the last words of LAMBADA."""
