"""The commands of ``tools/convert_checkpoint.py``.

Each is a frozen config class, from which its flags come, and a function of the command line.
"""
