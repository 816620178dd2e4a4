# two "ranks": the background save has failed; rank 0's thread is done at tell_finished, rank 1's a moment later
from types import SimpleNamespace as N
from megatron.training.saves import Saves
from megatron.engine.saving import SaveResult
from megatron.checkpoint.files import CheckpointError
class W:
    options=N(save="x")
    def __init__(s, fast): s.fast, s.calls = fast, 0
    def save(s,it,c): s.calls+=1
    def finished(s): return [SaveResult(4, CheckpointError("disk full"),0,0)] if s.fast and s.calls==1 else []
for rank, fast in ((0,True),(1,False)):
    w=W(fast); sv=Saves(w, N(say=lambda t:None, save=lambda *a:None))
    sv.save(4,16)      # --save-interval
    sv.save(4,16)      # SIGTERM / --exit-duration at the same step
    print("rank",rank,"enters the collective save",w.calls,"times")
