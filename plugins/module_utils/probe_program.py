# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# pylint: disable=ansible-bad-function  # this runs in a release's own Python, far from any AnsibleModule
"""Probes of a release, run by its own Python where the unit would run vLLM: environment, user and sandbox are its own.

The text of this file goes to ``<release>/bin/python -`` (module_utils/release_probe.py), so it imports nothing of the
collection. It reports one JSON object a line: ``{"begin": id}`` and ``{"end": id, "findings": [...]}``; a probe that
has begun and not ended has taken the process with it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

Finding = dict[str, str]
ERROR, WARNING = "error", "warning"
COMMAND_TIMEOUT_S = 120.0
# What keeps a process from the internet; a test compares it with the plan.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "FLASHINFER_NO_DOWNLOAD": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# Three lines that need Python.h, a compiler and a linker; as C it is what Triton does, as C++ what FlashInfer does.
EXTENSION = """#include <Python.h>
static struct PyModuleDef probe = {PyModuleDef_HEAD_INIT, "onprem_probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_onprem_probe(void) { return PyModule_Create(&probe); }
"""
KERNEL = (
    '__global__ void onprem_probe(int *x) { *x = 1; }\nextern "C" void run(int *x) { onprem_probe<<<1, 1>>>(x); }\n'
)
TOOLKIT = (
    "Install the CUDA toolkit of the release's variant with a C++ compiler; or set vllm_toolchain: none, where the plan"
    " accepts it."
)


def finding(identifier: str, found: str, needed: str, remedy: str, severity: str = ERROR) -> Finding:
    """One thing that keeps the release from serving, in the form of preflight's findings."""
    return {"id": identifier, "severity": severity, "found": found, "needed": needed, "remedy": remedy}


def run(identifier: str, serve: str) -> list[Finding]:
    """The findings of one probe; one that cannot be carried out is a finding as well.

    Args:
        identifier: a name of PROBES, or ``signature:<module.function>:<parameter>``.
        serve: text of the file for ``vllm serve --config``.
    """
    kind, *arguments = identifier.split(":")
    if kind not in PROBES or len(arguments) != (2 if kind == "signature" else 0):
        return [finding(identifier, "no such probe", "a probe that exists", f"Known are {', '.join(PROBES)}.")]
    try:
        return list(PROBES[kind](*(arguments or ([serve] if kind == "gdn-triton" else []))))
    except Exception as error:  # noqa: BLE001 - whatever a library raises is what was found
        return [finding(identifier, cause(error), "the probe to end", "Look at the error; it is the library's own.")]


def cause(error: BaseException) -> str:
    """An exception in a line, with the place it comes from."""
    text = " ".join(traceback.format_exception_only(error)[-1].split())
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text[:500]} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text[:500]


# -- packages --------------------------------------------------------------------------------------------------------


def flashinfer_versions() -> dict[str, str]:
    """FlashInfer's packages in this environment with their versions, as their metadata says."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if re.fullmatch(r"flashinfer-(python|cubin|jit-cache(-[a-z0-9]+)?)", name):
            found[name] = distribution.version
    return found


def versions_agree() -> Iterator[Finding]:
    """python == cubin == jit-cache, whose version has the CUDA variant behind a plus sign."""
    found = flashinfer_versions()
    python = found.get("flashinfer-python")
    if python is None and not found:
        return
    wrong = [name for name, version in found.items() if version.partition("+")[0] != (python or "").partition("+")[0]]
    if not wrong:
        return
    disabled = os.environ.get("FLASHINFER_DISABLE_VERSION_CHECK")
    yield finding(
        "versions-agree",
        ", ".join(f"{name} {version}" for name, version in sorted(found.items()))
        + (" (FLASHINFER_DISABLE_VERSION_CHECK is set: the release decided so)" if disabled else ""),
        f"one set, {', '.join(f'{name} {python}' for name in sorted(found))}" if python else "flashinfer-python",
        "Choose a release whose FlashInfer packages are one set; the environment was changed since it was locked.",
        WARNING if disabled else ERROR,
    )


def signature(function: str, parameter: str) -> Iterator[Finding]:
    """Whether a function takes a parameter that vLLM passes."""
    identifier = f"signature:{function}:{parameter}"
    module, _unused, name = function.rpartition(".")
    spare_the_gpu()
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - an import raises whatever it likes
        yield finding(identifier, cause(error), f"{function}, which vLLM calls", other_release(function))
        return
    parameters = inspect.signature(found).parameters
    if parameter in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
        return
    yield finding(
        identifier,
        f"{function} of {version_of(module)} takes no {parameter}",
        f"{parameter}, which vLLM passes",
        other_release(function),
    )


def version_of(module: str) -> str:
    """The package of a module with its version, as far as its metadata says."""
    top = module.partition(".")[0]
    names = importlib.metadata.packages_distributions().get(top, [])
    return f"{names[0]} {importlib.metadata.version(names[0])}" if names else top


def other_release(function: str) -> str:
    return (
        f"Choose a release with a {function.partition('.')[0]} that fits its vLLM. Leaving the argument out is no cure."
    )


def spare_the_gpu() -> None:
    """Keep FlashInfer's import from opening a CUDA context: another process may have taken the GPU's memory.

    Without a list of architectures its CompilationContext asks torch for each device's.
    """
    if "FLASHINFER_CUDA_ARCH_LIST" not in os.environ and (capability := compute_capability()) is not None:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = ".".join(map(str, capability))


def compute_capability() -> tuple[int, int] | None:
    """That of the first GPU, asked of the driver (NVML) and not of CUDA; None without one."""
    with contextlib.suppress(Exception):  # no vLLM, no NVML or no GPU: nobody to ask
        found = importlib.import_module("vllm.platforms").current_platform.get_device_capability()
        return None if found is None else (int(found[0]), int(found[1]))
    return None


# -- imports ---------------------------------------------------------------------------------------------------------


def imports() -> Iterator[Finding]:
    """vLLM and its API server, as bin/vllm imports them."""
    for module in ("vllm", "vllm.entrypoints.openai.api_server"):
        try:
            importlib.import_module(module)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an import raises whatever it likes
            yield finding(
                "import",
                cause(error),
                f"import {module} to succeed in the unit's environment",
                "Mend what the error names (a library of the host, a patch, a variable), or choose another release.",
            )
            return


def offline() -> Iterator[Finding]:
    """Whether nothing that is imported here will look for the internet, by the switches as the libraries read them."""
    for name, value in OFFLINE.items():
        if os.environ.get(name) != value:
            yield finding(
                "offline",
                f"{name} is {os.environ.get(name)!r}",
                f"{name}={value}: in an air gap a look for the internet hangs for minutes",
                "Take out what sets it otherwise: a drop-in of the unit, or the release's own start-up files.",
            )
    if importlib.util.find_spec("huggingface_hub") is not None:
        constants = importlib.import_module("huggingface_hub.constants")
        if constants.HF_HUB_OFFLINE is not True:
            yield finding(
                "offline",
                f"huggingface_hub reads HF_HUB_OFFLINE as {constants.HF_HUB_OFFLINE}",
                "True",
                "Choose a release whose huggingface_hub knows the switch.",
            )


def has_flashinfer() -> Iterator[Finding]:
    """vLLM's own verdict on whether it can use FlashInfer."""
    if importlib.import_module("vllm.utils.flashinfer").has_flashinfer():
        return
    versions = flashinfer_versions()
    lacking = [name for name in ("flashinfer-python", "flashinfer-cubin") if name not in versions]
    if shutil.which("nvcc") is None:
        lacking.append(f"nvcc on PATH ({os.environ.get('PATH')})")
    yield finding(
        "has-flashinfer",
        f"vLLM cannot use FlashInfer: there is no {', no '.join(lacking) or 'reason given'}",
        "flashinfer-python, and either flashinfer-cubin or nvcc",
        "Install the CUDA toolkit so that nvcc is in /usr/local/cuda/bin, or choose a release with flashinfer-cubin.",
    )


def read_only() -> Iterator[Finding]:
    """Whether the release can stay as it is while it serves."""
    for path in dict.fromkeys([sys.prefix, sysconfig.get_paths()["purelib"]]):
        if os.access(path, os.W_OK):
            yield finding(
                "read-only",
                f"the service user can write into {path}",
                "a release that nobody but root can change",
                "Give the directory back to root with mode 0755, and leave ProtectSystem=strict in the unit.",
            )
    capability = compute_capability()
    # The kernels in question are for these (supported_major_versions in the function asked below).
    if "flashinfer-cubin" in flashinfer_versions() and capability is not None and capability[0] in (10, 12):
        yield from written_links()


def written_links() -> Iterator[Finding]:
    """Where FlashInfer would make the link to its cubins' headers: asked of the function that makes it, and not made.

    Before 0.6.16 that is in the package flashinfer_cubin itself, behind a lock file beside it, so that making the link
    beforehand does not help (flashinfer issue 2834).
    """

    class Asked(Exception):
        """The link's place is known."""

    places: list[Path] = []

    def asked(link: str | Path, target: str | Path) -> None:  # noqa: ARG001 - its place in FlashInfer's code
        places.append(Path(link))
        raise Asked

    spare_the_gpu()
    fused_moe: Any = importlib.import_module("flashinfer.jit.fused_moe")
    stand_ins: dict[str, Any] = {
        "ensure_symlink": asked,
        "get_artifact": lambda *_unused, **_also: b"0",
        "get_meta_hash": lambda *_unused, **_also: "0",
    }
    make = getattr(fused_moe, "gen_trtllm_gen_fused_moe_sm100_module", None)
    if make is None or not all(hasattr(fused_moe, name) for name in stand_ins):
        yield finding(
            "read-only",
            f"{version_of('flashinfer')} has another form than those that were looked at",
            "a FlashInfer that is known to write nothing into its packages",
            "Watch the first start for PermissionError in flashinfer_cubin.",
            WARNING,
        )
        return
    for name, stand_in in stand_ins.items():
        setattr(fused_moe, name, stand_in)
    with contextlib.suppress(Asked):
        make()
    for place in places:
        if place.is_relative_to(sys.prefix):
            yield finding(
                "read-only",
                f"{version_of('flashinfer')} makes a link below {place.parent} for its fused MoE kernels",
                "a release that is read-only while it serves",
                "Choose a release with FlashInfer 0.6.16 or newer, which makes it in its cache. For a model without "
                "MoE layers the probe can be waived (flashinfer_waived: [read-only]).",
            )


# -- tools -----------------------------------------------------------------------------------------------------------


def command(*words: str, cwd: str | None = None) -> tuple[int, str]:
    """Status of a program and the last lines it said; 127 where it cannot be run, 124 where it does not end."""
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"no end after {COMMAND_TIMEOUT_S:.0f} s"
    except OSError as error:
        return 127, f"{error.strerror}"
    return done.returncode, " / ".join(line.strip() for line in done.stdout.splitlines()[-4:] if line.strip())[:500]


def headers() -> str:
    """The directory in which Python.h is looked for."""
    return sysconfig.get_paths()["include"]


@contextlib.contextmanager
def scratch(variable: str) -> Iterator[str]:
    """A directory where the compiled thing would come to lie: that the cache can be written to is proven along."""
    base = os.environ.get(variable)
    if base:
        Path(base).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".probe-", dir=base or None) as directory:
        yield directory


def load(path: Path) -> None:
    """Import the compiled extension.

    Raises:
        ImportError: it cannot be loaded, from a file system mounted noexec for one.
    """
    loader = importlib.machinery.ExtensionFileLoader("onprem_probe", str(path))
    spec = importlib.util.spec_from_file_location("onprem_probe", path, loader=loader)
    if spec is None:
        raise ImportError(f"{path} is no extension")
    importlib.util.module_from_spec(spec)


def without_headers(identifier: str) -> Iterator[Finding]:
    if not (Path(headers()) / "Python.h").is_file():
        yield finding(
            identifier,
            f"no {headers()}/Python.h",
            "Python.h, which compiled launchers and kernels include",
            f"Install python{sys.version_info[0]}.{sys.version_info[1]}-dev.",
        )


def compiler() -> Iterator[Finding]:
    """Triton's way: a C compiler makes a launcher, which this Python loads."""
    if missing := list(without_headers("compiler")):
        yield from missing
        return
    program = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if program is None:
        yield finding(
            "compiler",
            f"neither gcc nor clang on PATH ({os.environ.get('PATH')})",
            "a C compiler, with which Triton makes its launchers at run time",
            "Install gcc.",
        )
        return
    with scratch("TRITON_CACHE_DIR") as directory:
        source = Path(directory) / "probe.c"
        source.write_text(EXTENSION, encoding="utf-8")
        yield from built(
            "compiler",
            [program, "-shared", "-fPIC", f"-I{headers()}", str(source), "-o", "onprem_probe.so"],
            directory,
            "Mend the compiler: Triton makes its launchers with it at run time.",
        )


def built(identifier: str, words: Sequence[str], directory: str, remedy: str) -> Iterator[Finding]:
    """Run a build of the extension in ``directory`` and load what it made."""
    status, said = command(*words, cwd=directory)
    if status != 0:
        yield finding(identifier, f"{words[0]} ended with {status}: {said}", "an extension that compiles", remedy)
        return
    try:
        load(Path(directory) / "onprem_probe.so")
    except ImportError as error:
        yield finding(identifier, f"{error}", "a compiled extension that Python loads", remedy)


def nvcc() -> str | None:
    """The nvcc that FlashInfer runs: CUDA_HOME or CUDA_PATH, then PATH, then /usr/local/cuda."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return (
        shutil.which(f"{home}/bin/nvcc") if home else shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    )


def jit_tools() -> Iterator[Finding]:
    """FlashInfer's way: a bare ninja runs a C++ compiler and nvcc."""
    cxx = os.environ.get("CXX", "c++")
    tools = {"ninja": shutil.which("ninja"), "nvcc": nvcc(), "c++": shutil.which(cxx)}
    for name, path in tools.items():
        if path is None:
            where = f"PATH ({os.environ.get('PATH')})" + (" and in /usr/local/cuda/bin" if name == "nvcc" else "")
            remedy = "Leave <release>/bin first in PATH, where ninja is." if name == "ninja" else TOOLKIT
            yield finding(f"jit-tools:{name}", f"no {name} on {where}", "what FlashInfer compiles with", remedy)
    yield from without_headers("jit-tools:Python.h")
    with scratch("FLASHINFER_WORKSPACE_BASE") as directory:
        folder = Path(directory)
        (folder / "probe.cc").write_text(EXTENSION, encoding="utf-8")
        (folder / "probe.cu").write_text(KERNEL, encoding="utf-8")
        if tools["nvcc"] is not None:
            status, said = command(tools["nvcc"], "-c", "probe.cu", "-o", "probe.o", cwd=directory)
            if status != 0:
                found = f"{tools['nvcc']} ended with {status}: {said}"
                yield finding("jit-tools:nvcc", found, "a kernel of one line that compiles", TOOLKIT)
        if tools["c++"] is not None and (Path(headers()) / "Python.h").is_file():
            words = [tools["c++"], "-shared", "-fPIC", f"-I{headers()}", "probe.cc", "-o", "onprem_probe.so"]
            if tools["ninja"] is not None:
                rule = "rule cxx\n  command = " + " ".join(words) + "\nbuild onprem_probe.so: cxx probe.cc\n"
                (folder / "build.ninja").write_text(rule, encoding="utf-8")
                words = ["ninja"]
            yield from built("jit-tools:c++", words, directory, TOOLKIT)


def sampler_off() -> Iterator[Finding]:
    """Whether vLLM will sample without FlashInfer, on a host that cannot compile its sampler."""
    value = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER")
    if value != "0":
        yield finding(
            "sampler-off",
            f"VLLM_USE_FLASHINFER_SAMPLER is {value!r}",
            "0 where vllm_toolchain is none: the first request would compile FlashInfer's sampler",
            "Take out what sets it otherwise, or set vllm_toolchain: toolkit.",
        )


def gdn_triton(serve: str) -> Iterator[Finding]:
    """Whether a GDN model will prefill without FlashInfer, on a host that cannot compile its kernel."""
    found = re.search(r"^gdn-prefill-backend: *(\S+)$", serve, re.MULTILINE)
    if found is None or found[1].strip("'\"") != "triton":
        yield finding(
            "gdn-triton",
            f"gdn-prefill-backend is {found[1] if found else 'not set'}",
            "triton where vllm_toolchain is none: automatic choice takes FlashInfer without asking if it can build",
            "Take out what sets it otherwise, or set vllm_toolchain: toolkit.",
        )


def numa_bind(nodes: Path = Path("/sys/devices/system/node/has_memory")) -> Iterator[Finding]:
    """Whether memory can be bound to each NUMA node from inside the sandbox; vLLM goes on silently where it cannot."""
    if shutil.which("numactl") is None:
        yield finding("numa-bind", "no numactl on PATH", "numactl, with which vLLM binds workers", "Install numactl.")
        return
    for node in numbers(nodes.read_text(encoding="utf-8")):
        status, said = command("numactl", f"--membind={node}", "true")
        if status != 0:
            yield finding(
                "numa-bind",
                f"numactl --membind={node} true ended with {status}: {said}",
                "set_mempolicy and mbind, allowed in the unit's sandbox",
                "Allow them in the container the host runs in; in a drop-in of the unit leave SystemCallFilter= alone.",
            )


def numbers(text: str) -> list[int]:
    """The numbers of a kernel list such as ``0-1,4``."""
    found: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _unused, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


PROBES: dict[str, Callable[..., Iterator[Finding]]] = {
    "versions-agree": versions_agree,
    "sampler-off": sampler_off,
    "gdn-triton": gdn_triton,
    "compiler": compiler,
    "jit-tools": jit_tools,
    "numa-bind": numa_bind,
    "offline": offline,
    "import": imports,
    "has-flashinfer": has_flashinfer,
    "read-only": read_only,
    "signature": signature,
}


def main(wanted: Sequence[str], serve: str, report: TextIO) -> None:
    """Run the probes in their order and report each."""

    def say(**event: Any) -> None:
        report.write(json.dumps(event) + "\n")
        report.flush()

    for identifier in wanted:
        say(begin=identifier)
        say(end=identifier, findings=run(identifier, serve))


def start(wanted: Sequence[str], serve: str) -> None:
    """Run the probes with standard output for the report alone: vLLM and its libraries log there."""
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = [entry for entry in sys.path if entry]  # `python -` puts the working directory first
    main(wanted, serve, report)
    report.flush()
    os._exit(0)  # threads that an import has started do not hold the end up
