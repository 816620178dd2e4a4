"""torch's compiler stays out of a process that compiles nothing.

Importing it (torch._dynamo, torch._inductor) takes as much CPU time as importing torch. torch's
optimizers import it to keep it from tracing them, and DeepSpeed's ZeRO by a decorator of an
optimizer that is not used. Where torch or DeepSpeed come to do this in another way, nothing here
has an effect but that the start takes longer; tests/unit/engine/test_uncompiled.py notices.
ZeRO 3 imports it all the same: it wraps hooks of its own at run time.
"""

from __future__ import annotations

import inspect
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

# Where torch keeps a method's version that its compiler does not trace (torch._compile).
_UNTRACED = "__dynamo_disable"


def keep_compiler_from_optimizers() -> None:
    """Has methods of torch's optimizers not import the compiler; call it before one is made.

    When first called they import it, ask it for a version of themselves that it will not trace, and
    keep that. Nothing here traces an optimizer, so the method itself is put there.
    """
    for method in (
        Optimizer.add_param_group,
        Optimizer.zero_grad,
        Optimizer.state_dict,
        Optimizer.load_state_dict,
    ):
        function = getattr(method, "__wrapped__", None)
        if function is not None and not hasattr(function, _UNTRACED):
            setattr(function, _UNTRACED, function)


def keep_compiler_from_steps(optimizer: Optimizer) -> None:
    """Has this optimizer's ``step`` not import the compiler.

    torch wraps ``step`` to turn gradients off and to tell the compiler where a graph ends. Here it
    is wrapped again, to turn gradients off; its hooks and its name in profiles stay.
    """
    plain: Any = torch.no_grad()(inspect.unwrap(type(optimizer).step))
    hooked = Optimizer.profile_hook_step(plain)
    optimizer.step = MethodType(hooked, optimizer)  # type: ignore[method-assign]


def import_muon_uncompiled() -> None:
    """Imports DeepSpeed's Muon without handing it to torch.compile.

    ZeRO imports it to see whether it is the optimizer, which here it never is. DeepSpeed's own
    decorator for a torch that has no compiler takes the place of torch.compile meanwhile.
    """
    from deepspeed.runtime import compiler

    decorator = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = decorator
