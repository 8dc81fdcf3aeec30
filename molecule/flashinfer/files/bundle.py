# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Two releases of wheels that weigh nothing and have the form of vLLM's and FlashInfer's: one sound, one broken.

The sound one's API server writes down, when it is imported, in what sandbox it was; its `vllm` serves like the stand-in
of molecule/vllm_service.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "tests"))

from release_bundle import UV_VERSION, make_uv_wheel, make_wheel, sha256, write_index, write_lock  # noqa: E402

SEEN = """
import json, os
with open("/proc/self/status") as stream:
    status = dict(line.strip().split(":\\t", 1) for line in stream if ":\\t" in line)
with open("/proc/self/mounts") as stream:
    mounts = sorted({line.split()[1] for line in stream if "ro" in line.split()[3].split(",")})
seen = {key: status[key] for key in ("Uid", "Gid", "NoNewPrivs", "Seccomp", "CapBnd", "CapEff")}
with open(os.environ["VLLM_CACHE_ROOT"] + "/seen.json", "w") as stream:
    json.dump({"status": seen, "read-only": mounts, "tmp": os.listdir("/tmp"), "environment": dict(os.environ)}, stream)
"""
# vLLM's own rule (vllm/utils/flashinfer.py, 0.25.0 to 0.31.0).
HAS_FLASHINFER = """
import importlib.util, shutil
def has_flashinfer():
    if importlib.util.find_spec("flashinfer") is None:
        return False
    return importlib.util.find_spec("flashinfer_cubin") is not None or shutil.which("nvcc") is not None
"""
PLATFORM = """
class Platform:
    def get_device_capability(self):
        return (12, 0)
current_platform = Platform()
"""
DECODE = "def trtllm_batch_decode_with_kv_cache_mla(query, kv_cache{}): pass\n"
# The link to the cubins' headers, made where FlashInfer before 0.6.16 makes it and where it does since.
FUSED_MOE = """
import os, pathlib
import flashinfer_cubin
def ensure_symlink(link, target): pathlib.Path(link).symlink_to(target)
def get_artifact(name, sha256): return b""
def get_meta_hash(checksums, name=""): return ""
def gen_trtllm_gen_fused_moe_sm100_module():
    assert get_artifact("checksums.txt", get_meta_hash(b""))
    ensure_symlink(pathlib.Path({}) / "flashinfer/trtllm/batched_gemm/trtllmGen_bmm_export", "include")
"""
IN_PACKAGE, IN_CACHE = "flashinfer_cubin.__file__", "os.environ['FLASHINFER_WORKSPACE_BASE']"


def wheels(
    folder: Path, vllm_version: str, version: str, cubin: str, parameter: str, place: str, server: str
) -> list[Path]:
    """vLLM and FlashInfer of one release."""
    flashinfer = {
        "flashinfer/__init__.py": b"",
        "flashinfer/decode.py": DECODE.format(parameter).encode(),
        "flashinfer/jit/__init__.py": b"",
        "flashinfer/jit/fused_moe.py": FUSED_MOE.format(place).encode(),
    }
    stand_in = (HERE.parents[1] / "vllm_service" / "files" / "stand_in_vllm.py").read_bytes()
    vllm = {
        "vllm/__init__.py": b"",
        "vllm/entrypoints/openai/api_server.py": server.encode(),
        "vllm/platforms.py": PLATFORM.encode(),
        "vllm/utils/flashinfer.py": HAS_FLASHINFER.encode(),
        "vllm/stand_in.py": stand_in,
        "vllm/cli.py": b"import runpy\ndef main():\n    runpy.run_module('vllm.stand_in', run_name='__main__')\n",
    }
    return [
        make_wheel(folder, "vllm", vllm_version, vllm, scripts={"vllm": "vllm.cli:main"}),
        make_wheel(folder, "flashinfer-python", version, flashinfer),
        make_wheel(folder, "flashinfer-cubin", cubin, {"flashinfer_cubin/__init__.py": b""}),
    ]


def main(bundle: Path) -> None:
    folder = bundle / "wheels"
    uv = make_uv_wheel(folder, Path(shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"))
    sound = wheels(folder, "0.28.0", "0.6.16.post3", "0.6.16.post3", ", kv_scale_format=None", IN_CACHE, SEEN)
    broken = wheels(folder, "0.25.0", "0.6.13", "0.6.12", "", IN_PACKAGE, "import a_library_that_is_gone\n")
    decided = {
        "flashinfer": {"overrides": {}, "reason": "To be seen in the status.", "disable_version_check": True},
        "environment": {"FLASHINFER_DISABLE_VERSION_CHECK": "1"},
    }
    releases = {
        "sound": write_lock(bundle, "sound", sound, **decided),
        "broken": write_lock(bundle, "broken", broken),
    }
    write_index(bundle)
    pinned = {"version": UV_VERSION, "file": uv.name, "sha256": sha256(uv.read_bytes())}
    bundle.with_suffix(".json").write_text(json.dumps({"uv": pinned, "releases": releases}))


if __name__ == "__main__":
    target = Path(sys.argv[1])
    shutil.rmtree(target, ignore_errors=True)
    main(target)
