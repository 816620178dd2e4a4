"""The energy counter of an NVIDIA GPU, by the driver's own library."""

from __future__ import annotations

import ctypes

import torch

_LIBRARY = "libnvidia-ml.so.1"


class NvmlCounter:
    """The energy that one GPU has used since its driver was loaded. Raises OSError, whose message
    says why, if the driver's library is not there or the GPU has no counter: those before Volta and
    parts of a GPU (MIG) have none."""

    def __init__(self, uuid: str, library: str = _LIBRARY) -> None:
        self._nvml = ctypes.CDLL(library)
        self._call("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(self._device))
        self.joules()

    def joules(self) -> float:
        """Since the driver was loaded."""
        millijoules = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(millijoules))
        return millijoules.value / 1000

    def _call(self, name: str, *arguments: object) -> None:
        try:
            status = getattr(self._nvml, name)(*arguments)
        except AttributeError:
            raise OSError(f"{_LIBRARY} has no {name}: the driver is too old") from None
        if status:
            raise OSError(f"{name} gives {status} ({self._meaning(status)})")

    def _meaning(self, status: int) -> str:
        text = self._nvml.nvmlErrorString
        text.restype = ctypes.c_char_p
        meaning: bytes = text(status)
        return meaning.decode(errors="replace")


def uuid_of(device: torch.device) -> str:
    """The name by which NVML knows a CUDA device."""
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
