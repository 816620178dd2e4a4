"""Trainings of a student with a teacher; imported for runs with ``--kd`` only."""
