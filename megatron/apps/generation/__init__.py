"""Text generation from a checkpoint in any layout.

:mod:`opening` opens a checkpoint and builds a runner (:mod:`execution`), which computes one step at
a time for all running sequences. An engine (:mod:`scheduling`) turns requests (:mod:`request`) into
steps, and :mod:`decoding` turns the results into tokens and text. The programs that use the engine
are :mod:`server` and :mod:`generation`.
"""
