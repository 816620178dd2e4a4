"""Operators for GPUs: a Triton kernel, and the same formula in torch for everything else.

A file has one subject: its formula in torch, its operator (``define`` in ``operators.py``) and the
function that other packages call. The Triton source is in a file named ``..._triton.py``, imported
when a kernel first runs, because triton is not installed everywhere. Callers ask ``uses``
(``switches.py``) whether a tensor goes through an operator. On a CPU none does.
"""
