"""Tasks that need no fine-tuning: perplexities, and LAMBADA's prediction of last words."""
