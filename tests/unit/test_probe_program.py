# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""The probes as they run: in another interpreter, on what real wheels hold, with this machine's real compilers."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.onprem.vllm.plugins.module_utils import probe_program
from ansible_collections.onprem.vllm.plugins.module_utils.release_probe import program
from ansible_collections.onprem.vllm.plugins.plugin_utils.catalogue import shipped_profiles
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import OFFLINE
from ansible_collections.onprem.vllm.plugins.plugin_utils.probes import PROBES, is_probe
from ansible_collections.onprem.vllm.tests.wheel_member import wheel_member

ROOT = Path(__file__).parents[2]
DECODE = "flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla"
SIGNATURE = f"signature:{DECODE}:kv_scale_format"


class Release:
    """A virtual environment that stands for a release; packages are put into it."""

    def __init__(self, prefix: Path, python: Path) -> None:
        self.prefix, self.python = prefix, python
        (self.packages,) = prefix.glob("lib/python*/site-packages")

    def put(self, path: str, text: str) -> None:
        target = self.packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def package(self, name: str, version: str, **modules: str) -> None:
        """A package with its metadata, and modules by their dotted names."""
        info = f"{name.replace('-', '_')}-{version}.dist-info"
        self.put(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self.put(f"{info}/top_level.txt", "".join(f"{module.partition('__')[0]}\n" for module in modules))
        for module, text in modules.items():
            self.put(module.replace("__", "/") + ".py", text)

    def run(self, *wanted: str, serve: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.python), "-"],
            input=f"{program()}\nstart(**json.loads({json.dumps({'wanted': wanted, 'serve': serve})!r}))\n",
            env={"PATH": os.environ["PATH"], **OFFLINE, **environment},
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )

    def findings(self, *wanted: str, serve: str = "", **environment: str) -> list[dict[str, str]]:
        done = self.run(*wanted, serve=serve, **environment)
        events = [json.loads(line) for line in done.stdout.splitlines()]
        assert [event["begin"] for event in events if "begin" in event] == list(wanted), done.stderr
        assert [event["end"] for event in events if "end" in event] == list(wanted), done.stderr
        found = [one for event in events for one in event.get("findings", [])]
        for one in found:
            assert set(one) == {"id", "severity", "found", "needed", "remedy"}
            assert one["remedy"].endswith(".")
        return found


@pytest.fixture
def release(tmp_path: Path) -> Release:
    prefix = tmp_path / "release"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages").mkdir(parents=True)
    base = Path(sys.base_prefix, "bin", "python3")
    (prefix / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    (prefix / "bin" / "python").symlink_to(base)
    return Release(prefix, prefix / "bin" / "python")


def test_the_plan_and_the_program_know_the_same_probes_and_switches() -> None:
    assert {*probe_program.PROBES} == {*PROBES, "signature"}
    assert probe_program.OFFLINE == OFFLINE
    listed = [probe for profile in shipped_profiles().values() for probe in profile.get("probes", [])]
    assert SIGNATURE in listed
    assert all(is_probe(probe) for probe in listed)


def test_what_libraries_print_is_not_taken_for_a_report(release: Release) -> None:
    release.put("vllm/__init__.py", "import os\nprint('{\"begin\": \"x\"}')\nos.write(1, b'INFO: loading\\n')\n")
    release.put("vllm/entrypoints/openai/api_server.py", "")
    done = release.run("import")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"begin": "import"},
        {"end": "import", "findings": []},
    ]
    assert "INFO: loading" in done.stderr


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("import a_library_that_is_gone", "No module named 'a_library_that_is_gone'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("open('/nowhere/libnuma.so.1')", "No such file or directory: '/nowhere/libnuma.so.1'"),
    ],
)
def test_an_import_that_fails_is_named_with_its_cause_and_place(release: Release, server: str, found: str) -> None:
    release.put("vllm/__init__.py", "")
    release.put("vllm/entrypoints/openai/api_server.py", server)
    (one,) = release.findings("import")
    assert (one["id"], one["severity"]) == ("import", "error")
    assert found in one["found"]
    assert "api_server.py:1" in one["found"] or "importlib" in one["found"]
    assert "vllm.entrypoints.openai.api_server" in one["needed"]


def test_a_probe_that_takes_the_process_with_it_has_begun_and_not_ended(release: Release) -> None:
    release.put("vllm/__init__.py", "import os\nos._exit(7)\n")
    done = release.run("offline", "import", "has-flashinfer")
    assert done.returncode == 7
    assert json.loads(done.stdout.splitlines()[-1]) == {"begin": "import"}


def test_a_probe_that_breaks_is_a_finding_and_the_next_one_runs(release: Release) -> None:
    found = release.findings("has-flashinfer", "no-such-probe", "sampler-off")
    assert [one["id"] for one in found] == ["has-flashinfer", "no-such-probe", "sampler-off"]
    assert "No module named 'vllm'" in found[0]["found"]


# -- FlashInfer's packages -------------------------------------------------------------------------------------------


def flashinfer(release: Release, python: str | None, **others: str) -> None:
    for name, version in {"python": python, **others}.items():
        if version is not None:
            release.package(f"flashinfer-{name.replace('_', '-')}", version)


@pytest.mark.parametrize(
    ("python", "others", "wrong"),
    [
        (None, {}, False),
        ("0.6.16.post3", {}, False),
        ("0.6.16.post3", {"cubin": "0.6.16.post3", "jit_cache": "0.6.16.post3+cu130"}, False),
        ("0.6.14", {"cubin": "0.6.13"}, True),
        ("0.6.16.post3", {"jit_cache": "0.6.16.post30+cu130"}, True),
        ("0.7.2.post1", {"jit_cache_sm120a": "0.7.2+cu130"}, True),
        (None, {"cubin": "0.6.13"}, True),
    ],
)
def test_installed_versions_are_one_set(release: Release, python: str, others: dict[str, str], wrong: bool) -> None:
    flashinfer(release, python, **others)
    found = release.findings("versions-agree")
    assert [one["severity"] for one in found] == ["error"] * wrong
    for version in [version for version in (python, *others.values()) if version and wrong]:
        assert version in found[0]["found"]


def test_a_release_that_decided_to_mix_gets_a_note(release: Release) -> None:
    flashinfer(release, "0.6.16.post3", cubin="0.6.13")
    (one,) = release.findings("versions-agree", FLASHINFER_DISABLE_VERSION_CHECK="1")
    assert one["severity"] == "warning"
    assert "flashinfer-cubin 0.6.13, flashinfer-python 0.6.16.post3 (FLASHINFER_DISABLE_VERSION_CHECK" in one["found"]


def real_signature(version: str) -> str:
    """FlashInfer's decode function with the real parameters and no body, behind a decorator as the real one is."""
    source = wheel_member("flashinfer-python", version, "flashinfer/mla/_core.py")
    (function,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == DECODE.rpartition(".")[2]
    )
    function.body, function.decorator_list = [ast.Pass()], [ast.Name("decorated")]
    function.args.defaults = [ast.Constant(None) for _unused in function.args.defaults]
    function.args.kw_defaults = [value and ast.Constant(None) for value in function.args.kw_defaults]
    return (
        "from __future__ import annotations\nimport functools\n\ndef decorated(f):\n    @functools.wraps(f)\n"
        f"    def call(*args, **kwargs): return f(*args, **kwargs)\n    return call\n\n{ast.unparse(function)}\n"
    )


@pytest.mark.parametrize(("version", "takes"), [("0.6.13", False), ("0.6.14", True), ("0.6.16.post3", True)])
def test_the_parameter_that_vllm_passes_is_looked_for_in_the_real_function(
    release: Release, version: str, takes: bool
) -> None:
    release.package("flashinfer-python", version, flashinfer__decode=real_signature(version))
    release.put("flashinfer/__init__.py", "")
    found = release.findings(SIGNATURE)
    assert [one["id"] for one in found] == [SIGNATURE] * (not takes)
    if not takes:
        assert f"{DECODE} of flashinfer-python {version} takes no kv_scale_format" in found[0]["found"]


def test_a_function_that_is_not_there_is_named(release: Release) -> None:
    (one,) = release.findings(SIGNATURE)
    assert "No module named 'flashinfer'" in one["found"]
    release.put("flashinfer/__init__.py", "")
    release.put("flashinfer/decode.py", "")
    (one,) = release.findings(SIGNATURE)
    assert "has no attribute 'trtllm_batch_decode_with_kv_cache_mla'" in one["found"]


PLATFORM = """
class Platform:
    def get_device_capability(self): return {}
current_platform = Platform()
"""


def test_flashinfers_import_opens_no_context_on_a_gpu_that_another_process_fills(release: Release) -> None:
    release.put("vllm/__init__.py", "")
    release.put("vllm/platforms.py", PLATFORM.format((9, 0)))
    release.put("flashinfer/__init__.py", "")
    release.put("flashinfer/decode.py", "import os\nraise ValueError(os.environ['FLASHINFER_CUDA_ARCH_LIST'])\n")
    (one,) = release.findings(SIGNATURE)
    assert "ValueError: 9.0 " in one["found"]
    (one,) = release.findings(SIGNATURE, FLASHINFER_CUDA_ARCH_LIST="9.0a")
    assert "ValueError: 9.0a " in one["found"]


STAND_IN = """
class Any(type):
    def __getattr__(cls, name): return name.lower()
"""
ENVIRONMENT = """
import os, pathlib, flashinfer_cubin
FLASHINFER_CUBIN_DIR = pathlib.Path(flashinfer_cubin.__file__).parent / "cubins"
FLASHINFER_GEN_SRC_DIR = pathlib.Path(os.environ["FLASHINFER_WORKSPACE_BASE"]) / "generated"
def __getattr__(name): return pathlib.Path("/") / name.lower()
"""


def real_fused_moe(release: Release, version: str) -> None:
    """FlashInfer's real fused_moe.py, what it imports from its neighbours replaced by names without substance."""
    source = wheel_member("flashinfer-python", version, "flashinfer/jit/fused_moe.py").decode()
    release.package("flashinfer-python", version, flashinfer="")
    release.package("flashinfer-cubin", version)
    for path in ("flashinfer/__init__.py", "flashinfer/jit/__init__.py", "flashinfer_cubin/__init__.py"):
        release.put(path, "")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            folder = "flashinfer/jit/" if node.level == 1 else "flashinfer/"
            path = folder + node.module.replace(".", "/")
            if (release.packages / path).is_dir() or node.module.count("."):
                path += "/__init__"
            names = "".join(f"class {alias.name}(metaclass=Any): pass\n" for alias in node.names)
            known = release.packages / f"{path}.py"
            release.put(f"{path}.py", (known.read_text() if known.exists() else STAND_IN) + names)
    release.put("flashinfer/jit/env.py", ENVIRONMENT)
    release.put("flashinfer/jit/fused_moe.py", source)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(
    ("version", "writes"), [("0.6.13", True), ("0.6.14", True), ("0.6.16.post3", False), ("0.7.2.post1", False)]
)
def test_flashinfer_says_itself_where_it_makes_its_link(
    release: Release, tmp_path: Path, version: str, writes: bool, capability: tuple[int, int]
) -> None:
    real_fused_moe(release, version)
    release.put("vllm/__init__.py", "")
    release.put("vllm/platforms.py", PLATFORM.format(capability))
    found = release.findings("read-only", FLASHINFER_WORKSPACE_BASE=str(tmp_path / "cache"))
    links = [one for one in found if "can write into" not in one["found"]]  # what root may is another finding
    assert [one["severity"] for one in links] == ["error"] * (writes and capability != (9, 0))
    if links:
        place = release.packages / "flashinfer_cubin/cubins/flashinfer/trtllm/batched_gemm"
        assert f"flashinfer-python {version} makes a link below {place}" in links[0]["found"]
    assert not list(release.prefix.rglob("trtllmGen*"))


def test_a_flashinfer_of_another_form_is_not_passed_in_silence(release: Release) -> None:
    real_fused_moe(release, "0.6.13")
    release.put("flashinfer/jit/fused_moe.py", "")
    release.put("vllm/__init__.py", "")
    release.put("vllm/platforms.py", PLATFORM.format((10, 3)))
    found = [one for one in release.findings("read-only") if "can write into" not in one["found"]]
    assert [one["severity"] for one in found] == ["warning"]
    assert "another form" in found[0]["found"]


def test_a_release_that_the_service_user_can_write_into_is_named(release: Release) -> None:
    found = release.findings("read-only")  # the test's own user made it
    assert [str(release.prefix) in one["found"] for one in found] == [True, True]


# -- tools -----------------------------------------------------------------------------------------------------------

# What this machine has is tried for real; what it lacks must be found. The lab's hosts have compilers and no nvcc.
HEADERS = Path(probe_program.headers(), "Python.h").is_file()
LACKING = {
    "compiler": not HEADERS or not (shutil.which("gcc") or shutil.which("clang")),
    "jit-tools:Python.h": not HEADERS,
    "jit-tools:c++": shutil.which("c++") is None,
    "jit-tools:nvcc": probe_program.nvcc() is None,
}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    for name in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def only(folder: Path, *tools: str) -> str:
    """A PATH with these programs of this machine and what compilers start."""
    folder.mkdir()
    for name in ("sh", "as", "ld", "collect2", *tools):
        if found := shutil.which(name):
            (folder / name).symlink_to(Path(found).resolve())
    return str(folder)


def ids(found: Any) -> list[str]:
    return [one["id"] for one in found]


def test_this_machines_compiler_makes_what_triton_makes(caches: Path) -> None:
    assert ids(probe_program.compiler()) == ["compiler"] * LACKING["compiler"]
    assert list(caches.rglob("*.so")) == []


def test_without_a_compiler_or_headers_it_is_said_which(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", only(caches / "bin"))
    (one,) = probe_program.compiler()
    assert "neither gcc nor clang" in one["found"]
    monkeypatch.setenv("CC", "/bin/false")
    (one,) = probe_program.compiler()
    assert "/bin/false ended with 1" in one["found"]
    monkeypatch.setattr(probe_program, "headers", lambda: "/nowhere")
    (one,) = probe_program.compiler()
    assert "no /nowhere/Python.h" in one["found"]
    assert f"python{sys.version_info[0]}.{sys.version_info[1]}-dev" in one["remedy"]


@pytest.mark.usefixtures("caches")
def test_a_cache_that_cannot_be_written_to_is_found_along_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", "/proc/1/cache")
    (one,) = probe_program.run("compiler", "")
    assert "/proc/1/cache" in one["found"]


NINJA = shutil.which("ninja", path=f"{ROOT}/.cache/vllm-0.28.0/bin:{os.environ['PATH']}")


@pytest.mark.parametrize("missing", ["", "ninja", "c++"])
def test_each_tool_of_flashinfer_is_tried_and_named_where_it_lacks(
    caches: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    assert NINJA is not None
    path = only(caches / "bin", *{"c++", "gcc", "nvcc", "cat", "rm"} - {missing})
    if missing != "ninja":
        (caches / "bin" / "ninja").symlink_to(NINJA)
    if missing == "c++":
        monkeypatch.setenv("CXX", "c++-that-is-gone")
    monkeypatch.setenv("PATH", f"{path}:{'' if missing == 'ninja' else os.environ['PATH']}".rstrip(":"))
    found = {one["id"] for one in probe_program.jit_tools()}
    lacking = {name for name, lacks in LACKING.items() if lacks and name != "compiler"}
    # Alone in that PATH nvcc finds none of its own programs: what it says then is the machine's own affair.
    assert found - {"jit-tools:nvcc"} == (lacking | ({f"jit-tools:{missing}"} if missing else set())) - {
        "jit-tools:nvcc"
    }
    assert missing or found == lacking
    assert list(caches.rglob("*.so")) == []


def test_a_compiler_that_fails_is_quoted(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = caches / "broken"
    broken.write_text("#!/bin/sh\necho 'fatal error: no space in the toolchain' >&2\nexit 4\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("CUDA_HOME", str(caches / "cuda"))
    (caches / "cuda/bin").mkdir(parents=True)
    (caches / "cuda/bin/nvcc").symlink_to(broken)
    found = {one["id"]: one["found"] for one in probe_program.jit_tools()}
    assert "no space in the toolchain" in found["jit-tools:c++"]
    assert f"{caches}/cuda/bin/nvcc ended with 4" in found["jit-tools:nvcc"]


@pytest.mark.parametrize(("text", "nodes"), [("0\n", [0]), ("0-2,4\n", [0, 1, 2, 4]), ("\n", [])])
def test_every_node_with_memory_is_bound_to(text: str, nodes: list[int]) -> None:
    assert probe_program.numbers(text) == nodes


def test_a_bind_that_is_refused_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "has_memory").write_text("0-1\n")
    program = tmp_path / "numactl"
    program.write_text(
        '#!/bin/sh\n[ "$1" = --membind=0 ] || { echo "set_mempolicy: Operation not permitted"; exit 1; }\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (one,) = probe_program.numa_bind(tmp_path / "has_memory")
    assert "numactl --membind=1 true ended with 1: set_mempolicy: Operation not permitted" in one["found"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert ids(probe_program.numa_bind(tmp_path / "has_memory")) == ["numa-bind"]


# -- switches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serve", "right"),
    [
        ("gdn-prefill-backend: triton\nport: 8000\n", True),
        ("port: 8000\n", False),
        ("gdn-prefill-backend: flashinfer\n", False),
        ("# gdn-prefill-backend: triton\n", False),
    ],
)
def test_the_backend_of_a_gdn_model_is_read_from_its_arguments(release: Release, serve: str, right: bool) -> None:
    assert ids(release.findings("gdn-triton", serve=serve)) == ["gdn-triton"] * (not right)


def test_the_switches_are_read_where_the_process_runs(release: Release) -> None:
    assert release.findings("sampler-off", "offline", VLLM_USE_FLASHINFER_SAMPLER="0") == []
    assert ids(release.findings("sampler-off", VLLM_USE_FLASHINFER_SAMPLER="1")) == ["sampler-off"]
    (one,) = release.findings("offline", FLASHINFER_NO_DOWNLOAD="0")
    assert "FLASHINFER_NO_DOWNLOAD is '0'" in one["found"]
    release.put("huggingface_hub/__init__.py", "")
    release.put("huggingface_hub/constants.py", "HF_HUB_OFFLINE = False\n")
    (one,) = release.findings("offline")
    assert "huggingface_hub reads HF_HUB_OFFLINE as False" in one["found"]


@pytest.mark.slow
def test_real_vllm_is_imported_and_answers_for_itself(tmp_path: Path) -> None:
    prefix = ROOT / ".cache" / "vllm-0.28.0"
    real = Release(prefix, prefix / "bin/python")
    home = {"HOME": str(tmp_path), "VLLM_CACHE_ROOT": str(tmp_path)}
    found = real.findings("versions-agree", "offline", "import", "has-flashinfer", **home)
    assert ids(found) == ["has-flashinfer"]  # the release for the CPU has none
    assert "no flashinfer-python" in found[0]["found"]
