"""Translation of other trainers' configurations into commands for this one
(``tools/migrate.py``)."""
