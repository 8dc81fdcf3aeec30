# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Compilers and tools as an instance's unit would find them, and the Python interpreters of a host."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .host_probe_command import ENVIRONMENT, run

Facts = dict[str, Any]

_PYTHON_PROBE = (
    "import platform, sysconfig, os;"
    "print(platform.python_version());"
    "print(int(os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))))"
)
_NVCC_OTHERWISE = "/usr/local/cuda"
# What decides which programs a unit finds; two instances with the same are looked at once.
DECISIVE = ("PATH", "CC", "CXX", "CUDA_HOME", "CUDA_PATH")


def programs(environment: Mapping[str, str]) -> Facts:
    """The programs that vLLM's parts start, each as they search for it in this environment.

    cc: Triton takes CC, else gcc, else clang. c++: FlashInfer and torch take CXX, else c++. nvcc: FlashInfer takes
    CUDA_HOME or CUDA_PATH, else PATH, else /usr/local/cuda. ninja (FlashInfer) and numactl (vLLM) come from PATH.

    Returns:
        For each ``{path, version}``; None where it is missing, version None where it does not run.
    """
    path = environment.get("PATH") or os.defpath
    cuda = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    sought = {
        "cc": [environment["CC"]] if environment.get("CC") else ["gcc", "clang"],
        "c++": [environment.get("CXX") or "c++"],
        "nvcc": [f"{cuda}/bin/nvcc"] if cuda else ["nvcc", f"{_NVCC_OTHERWISE}/bin/nvcc"],
        "ninja": ["ninja"],
        "numactl": ["numactl"],
    }
    return {name: _program(names, path) for name, names in sought.items()}


def _program(names: list[str], path: str) -> Facts | None:
    found = next((place for name in names if (place := shutil.which(name, path=path))), None)
    if found is None:
        return None
    # numactl has no version to tell; nvcc's stands after "release", all others' in the first line.
    status, text, _unused = run(found, "--show" if Path(found).name == "numactl" else "--version")
    version = re.search(r"release (\d[\d.]*)", text) or re.search(r"\b(\d+\.\d[\d.]*)", text.partition("\n")[0])
    return {"path": found, "runs": status == 0, "version": version[1] if version else None}


def python(version: str) -> Facts | None:
    """Path, exact version and presence of headers of an interpreter on the system's PATH; None where there is none."""
    path = shutil.which(f"python{version}", path=ENVIRONMENT["PATH"])
    if path is None:
        return None
    status, text, _unused = run(path, "-I", "-c", _PYTHON_PROBE)
    lines = text.split()
    if status != 0 or len(lines) != 2:
        return None
    return {"path": path, "version": lines[0], "headers": lines[1] == "1"}
