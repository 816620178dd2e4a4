"""Tools that turn text into indexed files: collection, cleaning and tokenization."""
