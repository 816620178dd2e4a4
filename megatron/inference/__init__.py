"""Generation: from a checkpoint in any layout to text that is asked for.

:mod:`opening` makes a :mod:`runner` of a checkpoint, which computes steps (:mod:`step`); the
:mod:`engine` makes steps of requests (:mod:`request`).
"""
