"""OneFlow GPT's package name; ``training`` is its program."""
