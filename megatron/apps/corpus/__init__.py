"""From text to indexed files: collected, cleaned, tokenized. Training imports none of it."""
