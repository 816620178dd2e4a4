"""The tasks of ``tasks/main.py``: zero-shot evaluation and fine-tuning."""
