"""Builds the library that stands in for CUDA, for a CUDA build of torch, with gcc.

    python tests/nullgpu/build.py
    python tests/nullgpu/build.py benchmarks/gpu.py --groups graphs --results /tmp/null

The first prints where it is; the second runs a program of this project on one null GPU.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

SOURCE = Path(__file__).with_name("null_cuda.c")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron-null-gpu"
LIBRARY = "libcuda.so.1"
"""Name of the driver's library, which Triton and torch look for."""

_OF_THE_CPU = ("DS_ACCELERATOR", "PYTORCH_NVML_BASED_CUDA_CHECK")
"""Variables with which DeepSpeed remembers that a process has no GPU."""
_WANTED = re.compile(r"(__cuda|cuda|cublas|cusparse|cudnn|nccl|cu[A-Z])\w*$")
_HANDLES = re.compile(r"(cublas|cusparse|cudnn|nccl)\w*Create")
_DEFINED = re.compile(r"^(?:[\w*]+ )+\**(\w+)\(|^GEMM\((\w+)\)", re.MULTILINE)


def missing() -> str | None:
    """Return the reason for which nothing can be built here; None if everything is there."""
    if find_spec("torch") is None:
        return "torch is not installed"
    if not (_torch() / "lib" / "libtorch_cuda.so").is_file():
        return "torch is a build for CPUs: the null GPU needs one for CUDA (make null-gpu)"
    if find_spec("triton") is None:
        return "triton is not installed"
    for program in ("gcc", "nm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return None


def build() -> Path:
    """Return the library; it is built once for each version of torch and of the source."""
    symbols = sorted(_undefined())
    headers, crt = _headers()
    source = SOURCE.read_text(encoding="utf-8")
    defined = {name for pair in _DEFINED.findall(source) for name in pair if name}
    text = source + "".join(_stub(name) for name in symbols if name not in defined)
    version = int(re.search(r"#define CUDA_VERSION (\d+)", _read(headers / "cuda.h"))[1])
    key = hashlib.sha256(f"{headers} {version} {text}".encode()).hexdigest()[:16]
    library = CACHE / key / LIBRARY
    if library.is_file():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        code, output = Path(folder, "null.c"), Path(folder, LIBRARY)
        code.write_text(text, encoding="utf-8")
        subprocess.run(
            [
                *("gcc", "-shared", "-fPIC", "-O1", "-w", f"-DNULL_CUDA_VERSION={version}"),
                *(f"-I{headers}", f"-I{crt}", str(code), f"-Wl,-soname,{LIBRARY}"),
                *("-o", str(output)),
            ],
            check=True,
        )
        output.replace(library)  # whole, also where two build at once
    return library


def variables(library: Path, devices: int, tree: Path, before: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a process that sees so many null GPUs, with packages of ``tree``
    first."""
    paths = filter(None, [str(tree), before.get("PYTHONPATH")])
    kept = {name: value for name, value in before.items() if name not in _OF_THE_CPU}
    return {
        **kept,
        "NULL_GPU_DEVICES": str(devices),
        "LD_PRELOAD": str(library),
        "LD_LIBRARY_PATH": str(library.parent),
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "MEGATRON_IGNORE_MEMORY": "1",  # of the host, which holds nothing of this
        # Segments that grow are mapped by functions of the driver, which are not counted here.
        "PYTORCH_ALLOC_CONF": "expandable_segments:False",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN plans need the real library
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(library.parent / "inductor"),
        "TRITON_CACHE_DIR": str(library.parent / "triton"),
    }


def _torch() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _undefined() -> set[str]:
    """Functions of CUDA's libraries that torch and Triton's launcher call."""
    found = set(re.findall(r"\bcu[A-Z]\w*", _read(_triton() / "driver.c")))
    found = {name for name in found if not name.endswith("_t")}
    for library in (_torch() / "lib").glob("*.so"):
        listed = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True
        )
        found |= {line.split()[-1].partition("@")[0] for line in listed.stdout.splitlines()}
    return {name for name in found if _WANTED.match(name)}


def _headers() -> tuple[Path, Path]:
    """Folders of driver_types.h, of the CUDA that torch was built with, and of crt/."""
    packages = _torch().parent / "nvidia"
    return next(packages.rglob("driver_types.h")).parent, _triton() / "include"


def _triton() -> Path:
    spec = find_spec("triton")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "backends" / "nvidia"


def _stub(name: str) -> str:
    if _HANDLES.match(name):
        return f"int {name}(void **h) {{ if (h) *h = (void *)1; return 0; }}\n"
    return f"int {name}(void) {{ return 0; }}\n"


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def main() -> None:
    """Print the library, or become a program that runs on it."""
    reason = missing()
    if reason is not None:
        raise SystemExit(f"build.py: {reason}")
    if len(sys.argv) == 1:
        print(build())
        return
    tree = Path(__file__).resolve().parents[2]
    os.execve(
        sys.executable, [sys.executable, *sys.argv[1:]], variables(build(), 1, tree, os.environ)
    )


if __name__ == "__main__":
    main()
