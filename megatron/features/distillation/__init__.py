"""Training of a student with a teacher. Imported only by runs with ``--kd``."""
