"""Configurations of other trainers as commands of this one (``tools/migrate.py``)."""
