"""Commands of ``tools/convert_checkpoint.py``.

Each command has a frozen config class, which defines its flags, and a function that runs it.
"""
