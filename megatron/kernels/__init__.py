"""Operators for GPUs, each with a Triton kernel and the same formula in torch for other devices.

Each file has one subject: its formula in torch, its operator (``define`` in ``operators.py``)
and the function that other packages call. Triton sources are in files named ``..._triton.py``,
which are imported when a kernel first runs, because triton is not installed everywhere. Callers
use ``uses`` (``switches.py``) to find out whether an operator handles a tensor. On a CPU it
never does.
"""
