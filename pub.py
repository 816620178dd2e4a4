# kill between the two renames of layout.publish (deepspeed format, same tag saved again)
import os, shutil
from pathlib import Path
from megatron.checkpoint.deepspeed import layout
from megatron.checkpoint.formats import locate_checkpoint
from megatron.checkpoint.folder import remove_incomplete
src=Path("/tmp/review/d1"); dst=Path("/tmp/review/d1k"); shutil.rmtree(dst,ignore_errors=True); shutil.copytree(src,dst)
shutil.copytree(dst/"global_step2", dst/".global_step2.incomplete")
real=os.rename; n=[0]
def rename(a,b):
    n[0]+=1
    if n[0]==2: raise KeyboardInterrupt("killed")
    real(a,b)
layout.os.rename=rename
try: layout.publish(dst/".global_step2.incomplete", dst/"global_step2", None)
except KeyboardInterrupt: pass
layout.os.rename=real
print(sorted(p.name for p in dst.iterdir()))
remove_incomplete(dst)
print(sorted(p.name for p in dst.iterdir()))
try: print(locate_checkpoint(dst))
except Exception as e: print("locate:", e)
