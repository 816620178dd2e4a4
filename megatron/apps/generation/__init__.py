"""Generation: from a checkpoint in any layout to requested text.

:mod:`opening` makes a runner of a checkpoint (:mod:`execution`), which computes steps
(:mod:`step`); an engine (:mod:`scheduling`) makes steps of requests (:mod:`request`), and tokens
and text of their results (:mod:`decoding`). :mod:`server` and :mod:`generation` are its users.
"""
