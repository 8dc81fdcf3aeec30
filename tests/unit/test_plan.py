# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import yaml
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan import compose_plan
from ansible_collections.onprem.vllm.plugins.plugin_utils.plan_report import plan_rows, plan_table, problem_report
from ansible_collections.onprem.vllm.plugins.plugin_utils.release_definition import load_release
from ansible_collections.onprem.vllm.tests.unit.plan_inputs import (
    CPU_RELEASE,
    CUDA_RELEASE,
    GPU,
    MIRROR,
    MIXED,
    PROFILE,
    RELEASE,
    RELEASE_ID,
    SM120,
    TINY,
    instance,
    plan,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st


def test_a_right_inventory_has_no_problem_and_a_whole_plan() -> None:
    made = plan(vllm_secrets={"glm": {"VLLM_API_KEY": "s3cret-value"}})
    assert made["problems"] == []
    assert made["roles"] == [
        *("preflight", "host_base", "flashinfer", "uv_venv", "cache_dirs", "hf_cache", "nftables", "vllm_service"),
    ]
    assert made["mirror"] == {"url": "http://mirror1", "bundle": ""}
    assert made["releases"] == [RELEASE.as_plan()]
    assert made["models"] == [{"name": "tiny-qwen3", "path": "/models/tiny-qwen3", "manifest_sha256": None}]
    assert made["firewall"]["ports"] == [
        {"port": 8000, "protocol": "tcp", "networks": ["10.77.0.0/24"], "for": "instance glm"}
    ]
    found = made["instances"][0]
    assert {key: found[key] for key in ("name", "profile", "release", "release_id", "model", "port", "gpus")} == {
        "name": "glm",
        "profile": "tiny-cpu",
        "release": "0.28.0-cpu",
        "release_id": RELEASE_ID,
        "model": "tiny-qwen3",
        "port": 8000,
        "gpus": [],
    }
    assert found["serve"] == {
        "model": "/models/tiny-qwen3",
        "served-model-name": "tiny-qwen3",
        "host": "0.0.0.0",
        "port": 8000,
        "shutdown-timeout": 60,
        "max-model-len": 1024,
        "max-num-seqs": 4,
        "max-num-batched-tokens": 1024,
        "enforce-eager": True,
    }
    assert found["secrets"] == ["VLLM_API_KEY"]
    assert "s3cret-value" not in json.dumps(made)


def test_environment_is_complete_and_names_real_paths() -> None:
    environment = plan()["instances"][0]["environment"]
    release = f"/opt/vllm/releases/{RELEASE_ID}"
    assert environment == {
        "PATH": f"{release}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": f"/var/cache/vllm/glm/{RELEASE_ID}",
        "XDG_CACHE_HOME": f"/var/cache/vllm/glm/{RELEASE_ID}/xdg",
        "VLLM_CACHE_ROOT": f"/var/cache/vllm/glm/{RELEASE_ID}",
        "FLASHINFER_WORKSPACE_BASE": f"/var/cache/flashinfer/{RELEASE_ID}",
        "TRITON_CACHE_DIR": f"/var/cache/triton/{RELEASE_ID}",
        "TORCHINDUCTOR_CACHE_DIR": f"/var/cache/torchinductor/{RELEASE_ID}",
        "CUDA_CACHE_PATH": f"/var/cache/nv/{RELEASE_ID}",
        "HF_HOME": f"/var/cache/huggingface/{RELEASE_ID}",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "FLASHINFER_NO_DOWNLOAD": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": "840",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    moved = plan(cache_dirs_root="/fast/cache/", vllm_service_start_timeout_s=3600)["instances"][0]["environment"]
    assert moved["HF_HOME"] == f"/fast/cache/huggingface/{RELEASE_ID}"
    assert moved["VLLM_ENGINE_READY_TIMEOUT_S"] == "3540"
    made = plan(uv_venv_root="/srv/vllm", hf_cache_root="/srv/models")
    assert made["instances"][0]["environment"]["PATH"].startswith(f"/srv/vllm/releases/{RELEASE_ID}/bin:")
    assert made["instances"][0]["serve"]["model"] == made["models"][0]["path"] == "/srv/models/tiny-qwen3"
    assert made["paths"] == {
        "releases": "/srv/vllm/releases",
        "models": "/srv/models",
        "caches": "/var/cache",
        "share": "",
    }


def test_the_reference_glm_command_comes_out_argument_by_argument() -> None:
    made = plan(GPU)
    assert made["problems"] == []
    assert made["instances"][0]["serve"] == {
        "model": "/models/glm-5.2-nvfp4",
        "served-model-name": "glm-5.2",
        "host": "0.0.0.0",
        "port": 8000,
        "shutdown-timeout": 60,
        "tensor-parallel-size": 8,
        "enable-expert-parallel": True,
        "kv-cache-dtype": "fp8",
        "max-model-len": 262144,
        "gpu-memory-utilization": 0.95,
        "enable-auto-tool-choice": True,
        "tool-call-parser": "glm47",
        "reasoning-parser": "glm45",
    }
    assert made["instances"][0]["environment"]["PATH"].split(":")[1] == "/usr/local/cuda/bin"
    assert "CUDA_VISIBLE_DEVICES" not in made["instances"][0]["environment"]
    assert {"numactl", "gcc", "python3.12-dev"} <= {package["name"] for package in made["packages"]}


def test_a_draft_model_is_staged_and_its_path_passed() -> None:
    made = plan(GPU, vllm_instances={"gemma": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [3]}})
    assert made["problems"] == []
    assert [model["name"] for model in made["models"]] == ["gemma-4-26b-a4b-it", "gemma-4-26b-a4b-it-assistant"]
    found = made["instances"][0]
    assert found["serve"]["speculative-config"] == {
        "method": "mtp",
        "num_speculative_tokens": 4,
        "model": "/models/gemma-4-26b-a4b-it-assistant",
    }
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert made["origins"]["instances.gemma.serve.speculative-config.model"] == "profile gemma-4-26b-l40s"
    assert made["origins"]["instances.gemma.environment.CUDA_VISIBLE_DEVICES"] == "instance gemma"


def test_precedence_and_origins() -> None:
    made = plan(
        vllm_group_overrides={"serve": {"max-num-seqs": 2, "seed": 1, "max-model-len": 512}, "release": "0.31.0-cpu"},
        vllm_host_overrides={"serve": {"max-num-seqs": 3, "seed": None, "enforce-eager": None}},
        **instance(serve={"max-num-seqs": 5}, environment={"OMP_NUM_THREADS": 2}),
    )
    assert made["problems"] == []
    found, origins = made["instances"][0], made["origins"]
    assert found["release"] == "0.31.0-cpu"
    assert found["serve"]["max-num-seqs"] == 5
    assert found["serve"]["max-model-len"] == 512
    assert "seed" not in found["serve"]
    assert "enforce-eager" not in found["serve"]
    assert found["environment"]["OMP_NUM_THREADS"] == "2"
    assert origins["instances.glm.serve.max-num-seqs"] == "instance glm"
    assert origins["instances.glm.serve.max-model-len"] == "vllm_group_overrides"
    assert origins["instances.glm.serve.max-num-batched-tokens"] == "profile tiny-cpu"
    assert origins["instances.glm.release"] == "vllm_group_overrides"
    assert origins["instances.glm.serve.shutdown-timeout"] == "from vllm_service_shutdown_timeout_s (default)"
    assert origins["instances.glm.serve.port"] == "instance glm"


def test_what_a_start_asks_of_the_memory_of_its_gpus() -> None:
    gemma = {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [3]}
    of_two = {**gemma, "gpus": [2, 3], "serve": {"tensor-parallel-size": 2, "gpu-memory-utilization": None}}
    for wanted, asked in ((gemma, {"gpus": 1, "utilization": 0.93}), (of_two, {"gpus": 2, "utilization": 0.92})):
        made = plan(GPU, vllm_instances={"gemma": wanted})
        assert made["instances"][0]["gpu_memory"] == asked
        assert made["origins"]["instances.gemma.gpu_memory"]
    assert "gpu_memory" not in plan(TINY, ("vllm",), **SITE)["instances"][0]


def test_every_leaf_of_an_instance_has_an_origin() -> None:
    made = plan(GPU, vllm_instances={"gemma": {"profile": "gemma-4-26b-l40s", "port": 8000, "gpus": [3]}})
    for part in ("serve", "environment"):
        for key, value in made["instances"][0][part].items():
            names = [f"{key}.{inner}" for inner in value] if isinstance(value, dict) else [key]
            for name in names:
                assert made["origins"][f"instances.gemma.{part}.{name}"], name


def test_a_profile_of_the_site_extends_a_shipped_one() -> None:
    made = plan(
        vllm_profiles={"mine": {"extends": "tiny-cpu", "serve": {"max-num-seqs": 1, "enforce-eager": None}}},
        **instance(profile="mine"),
    )
    assert made["problems"] == []
    serve = made["instances"][0]["serve"]
    assert (serve["max-num-seqs"], serve["max-model-len"], "enforce-eager" in serve) == (1, 1024, False)
    assert made["origins"]["instances.glm.serve.max-num-seqs"] == "vllm_profiles.mine"
    assert made["origins"]["instances.glm.serve.max-model-len"] == "profile tiny-cpu"


def test_text_that_can_mean_only_one_thing_is_converted() -> None:
    """INI inventories and -e give text for numbers and booleans; a port "8000" is the port 8000."""
    made = plan(**instance(port="8000"), vllm_service_stop_timeout_s="200")
    assert made["problems"] == []
    assert made["instances"][0]["port"] == 8000
    assert made["firewall"]["ports"][0]["port"] == 8000


def test_two_instances_share_a_release_and_a_model() -> None:
    made = plan(vllm_instances={"a": {"profile": "tiny-cpu", "port": 8000}, "b": {"profile": "tiny-cpu", "port": 8001}})
    assert made["problems"] == []
    assert len(made["releases"]) == len(made["models"]) == 1
    assert [found["name"] for found in made["instances"]] == ["a", "b"]
    assert made["instances"][0]["environment"]["HOME"] != made["instances"][1]["environment"]["HOME"]


def test_a_serving_host_without_instances_keeps_its_roles() -> None:
    """What an earlier run started there must be taken away by vllm_service."""
    made = plan(vllm_instances={})
    assert made["problems"] == []
    assert "vllm_service" in made["roles"]
    assert made["instances"] == made["releases"] == made["models"] == []


def test_the_mirror_host() -> None:
    made = plan(MIRROR, groups=("mirror",))
    assert made["problems"] == []
    assert made["roles"] == ["preflight", "host_base", "nftables", "wheel_mirror"]
    assert made["firewall"]["ports"] == [
        {"port": 80, "protocol": "tcp", "networks": ["10.77.0.0/24", "fd77::/64"], "for": "mirror"}
    ]


@pytest.mark.parametrize("missing", sorted(MIRROR))
def test_a_mirror_host_needs_bundle_and_networks(missing: str) -> None:
    assert [found["where"] for found in plan(MIRROR, ("mirror",), **{missing: ...})["problems"]] == [missing]


@pytest.mark.parametrize(
    ("url", "port", "differs"),
    [
        ("http://m", 80, False),
        ("http://m/x", 8080, True),
        ("http://m:8080", 8080, False),
        ("http://m:8080", 80, True),
        ("https://m", 443, False),
    ],
)
def test_hosts_ask_the_port_that_the_mirror_serves_on(url: str, port: int, differs: bool) -> None:
    made = plan({**TINY, **MIRROR}, ("mirror",), vllm_mirror_url=url, wheel_mirror_port=port)
    assert [one["where"] for one in made["warnings"]] == ["vllm_mirror_url"] * differs


def test_null_for_what_is_known_and_not_set_is_right() -> None:
    """In a group's overrides it takes out of one profile what another has not."""
    nothing = {"serve": {"enable-expert-parallel": None}, "environment": {"VLLM_LOGGING_LEVEL": None, "OTHER": None}}
    assert plan(vllm_group_overrides=nothing)["problems"] == []


def test_networks_are_merged_and_an_empty_list_closes_the_port() -> None:
    made = plan(vllm_client_networks=["10.0.1.0/24", "10.0.0.0/24", "fd00::1/128"])
    assert made["firewall"]["ports"][0]["networks"] == ["10.0.0.0/23", "fd00::1"]
    closed = plan(**instance(networks=[]))
    assert closed["problems"] == []
    assert closed["firewall"]["ports"] == []


def test_all_problems_at_once() -> None:
    made = plan(
        vllm_client_networks=["nowhere"],
        vllm_mirrorurl="http://m",
        vllm_instances={
            "a b": {},
            "c": {"profile": "none"},
            "d": {"profile": "tiny-cpu", "port": 1},
            "e": {"profile": "tiny-cpu", "port": 8000, "serve": {"api-key": "x"}},
        },
    )
    assert {found["where"] for found in made["problems"]} == {
        "vllm_mirrorurl",
        "vllm_client_networks",
        "vllm_instances.a b",
        "vllm_instances.c.profile",
        "vllm_instances.c.port",
        "vllm_instances.d.port",
        "vllm_instances.e.serve.api-key",
    }


def test_a_secret_is_never_shown() -> None:
    made = plan(
        vllm_secrets={"glm": {"A": ["leak-1"], "B": 4711, "C": "leak-2\n"}, "other": {"D": "leak-3"}, "third": "leak-4"}
    )
    assert len(made["problems"]) >= 5
    text = json.dumps(made)
    assert "leak" not in text
    assert "4711" not in text


def test_variables_that_cannot_be_computed_are_said_once() -> None:
    made = compose_plan("glm1", ["vllm"], {"vllm_instances": {}}, {"vllm_mirror_url": "'nope' is undefined"})
    assert [found["where"] for found in made["problems"]] == ["vllm_mirror_url"]


def test_instances_outside_group_vllm() -> None:
    made = plan(groups=("glm_8gpu",))
    assert [found["where"] for found in made["problems"]] == ["vllm_instances"]


def test_instances_of_group_all_mean_nothing_on_the_mirror() -> None:
    made = plan(TINY | MIRROR, ("mirror",), vllm_secrets={"glm": {"VLLM_API_KEY": "x"}})
    assert (made["problems"], made["instances"], made["releases"]) == ([], [], [])


def test_report_names_each_problem_once_with_its_hosts() -> None:
    plans = [
        {"host": name, "problems": [{"where": "vllm_release", "what": "is wrong", "remedy": "Correct it."}]}
        for name in ("a", "b")
    ]
    plans[0]["problems"].append({"where": "x", "what": "y", "remedy": "z"})
    text = problem_report(plans)
    assert text.startswith("2 problems")
    assert text.count("is wrong") == 1
    assert "[a, b]" in text
    assert problem_report([{"host": "a", "problems": []}]) == ""


def test_table_shows_values_and_origins() -> None:
    lines = plan_table(plan(**instance(serve={"seed": 3}))).splitlines()
    assert any(line.split() == ["instances.glm.serve.seed", "instance", "glm", "3"] for line in lines)
    assert any(line.split() == ["mirror.url", "vllm_mirror_url", "http://mirror1"] for line in lines)
    patched = plan_table(on("0.28.0-cu130-sm120")).splitlines()
    release = "0.28.0-cu130-sm120"
    assert any(line.split() == [f"releases.{release}.patches", "release", release, SM120] for line in patched)


SITE = {
    "vllm_releases": {"mine": CPU_RELEASE},
    "vllm_release": "mine",
    "hf_cache_root": "/data/models",
    "vllm_service_user": "llm",
    "preflight_waived": ["gpu-busy"],
    "vllm_secrets": {"glm": {"VLLM_API_KEY": "a"}},
}


# Its model is served under the model's own name.
UNNAMED = {"extends": "tiny-cpu", "served_model_name": None}


@pytest.mark.parametrize(
    ("base", "groups", "changes"),
    [
        (TINY, ("vllm",), {}),
        (TINY, ("vllm",), SITE),
        (TINY, ("vllm",), instance(networks=["10.1.0.0/16"], host="127.0.0.1")),
        (GPU, ("vllm",), {}),
        (GPU, ("vllm",), {"vllm_group_overrides": {"serve": {"compilation-config": '{"mode": 3, "pass_config": {}}'}}}),
        (TINY, ("vllm",), {"vllm_profiles": {"mine": UNNAMED}, **instance(profile="mine")}),
        (MIRROR, ("mirror",), {}),
        (TINY, ("proxy",), {"vllm_instances": ...}),
        ({**TINY, **MIRROR}, ("vllm", "mirror", "proxy"), {}),
    ],
)
def test_every_row_of_the_table_says_where_it_comes_from(base: dict, groups: tuple[str, ...], changes: dict) -> None:
    made = plan(base, groups, **changes)
    assert made["problems"] == []
    said = [row for row in plan_rows(made) if not row[0].startswith(("warnings.", "notes."))]
    assert [row for row in said if not row[1]] == []
    assert len(said) > 10


def test_origins_of_what_is_no_setting_of_an_instance() -> None:
    origins = {row[0]: row[1] for row in plan_rows(plan(TINY, ("vllm",), **SITE, nftables_ssh_port=2222))}
    assert origins["roles"] == "groups vllm"
    assert (origins["firewall.ssh.port"], origins["firewall.ssh.networks"]) == ("nftables_ssh_port", "default")
    assert origins["service.user"] == "vllm_service_user"
    assert origins["service.group"] == "default"
    assert origins["paths.models"] == "from hf_cache_root"
    assert origins["models.tiny-qwen3.path"] == "from hf_cache_root"
    assert origins["models.tiny-qwen3.manifest_sha256"] == "vllm_models.tiny-qwen3"
    assert origins["paths.caches"] == "from cache_dirs_root (default)"
    assert origins["releases.mine.vllm"] == "vllm_releases.mine"
    assert origins["packages.libnuma1"] == "release mine"
    assert origins["packages.nftables"] == "role nftables"
    assert origins["firewall.tcp.8000"] == "vllm_client_networks"
    assert origins["instances.glm.secrets"] == "vllm_secrets.glm"
    assert origins["instances.glm.gpus"] == "collection"
    assert origins["waived.preflight"] == "preflight_waived"
    mirror = {row[0]: row[1] for row in plan_rows(plan(MIRROR, ("mirror",)))}
    assert mirror["firewall.tcp.80"] == "vllm_mirror_networks"


def on(release: str, profile: str = "glm-5.2-nvfp4-8gpu", **changes: Any) -> dict[str, Any]:
    return plan(GPU, vllm_release=release, vllm_instances={"glm": {"profile": profile, "port": 8000}}, **changes)


@pytest.mark.parametrize(
    ("release", "profile"),
    [
        ("0.25.0-cu130-gemma4", "gemma-4-26b-l40s"),
        ("0.25.0-cu130-sm120", "glm-5.2-nvfp4-8gpu"),
        ("0.28.0-cu130-sm120", "glm-5.2-nvfp4-8gpu"),
    ],
)
def test_a_release_made_for_a_profile_serves_it_and_its_plain_sibling_does_not(release: str, profile: str) -> None:
    made = on(release, profile)
    assert made["problems"] == []
    assert made["releases"] == [load_release(release).as_plan()]
    plain = on(release.rpartition("-")[0], profile)
    (found,) = plain["problems"]
    assert found["where"] == "vllm_instances.glm.release"


def test_a_refusal_names_the_patch_its_releases_and_the_versions_without_the_fault() -> None:
    (found,) = on("0.28.0-cu130")["problems"]
    assert "its sparse MLA class for SM120 promises a dense prefill" in found["what"]
    for part in ("0.28.0-cu130-sm120", "0.28.0-cu130-cubin", ">=0.29.0", f"patches: [{SM120}]", "lock of 0.28.0-cu130"):
        assert part in found["remedy"], part


def test_what_the_remedy_says_to_define_works() -> None:
    mine = {**yaml.safe_load(load_release("0.28.0-cu130").lock_path.with_suffix(".yml").read_text(encoding="utf-8"))}
    mine |= {"lock": "0.28.0-cu130", "patches": [SM120]}
    made = on("mine", vllm_releases={"mine": mine})
    assert made["problems"] == []
    assert [patch["name"] for patch in made["releases"][0]["patches"]] == [SM120]


def test_a_needed_patch_is_asked_for_only_where_the_version_has_the_fault() -> None:
    profiles = {"mine": {"extends": "tiny-cpu", "patches": [SM120]}}
    assert plan(vllm_profiles=profiles, vllm_release="0.31.0-cpu", **instance(profile="mine"))["problems"] == []
    (found,) = plan(vllm_profiles=profiles, **instance(profile="mine"))["problems"]
    assert f"needs patch {SM120} with vllm 0.28.0, and release 0.28.0-cpu lacks it" in found["what"]
    mine = {"patched": {**CPU_RELEASE, "patches": [SM120]}}
    made = plan(vllm_profiles=profiles, vllm_release="patched", vllm_releases=mine, **instance(profile="mine"))
    assert made["problems"] == []


def test_one_that_is_refused_and_lacks_the_patch_is_told_once() -> None:
    both = {"mine": {"extends": "glm-5.2-nvfp4-8gpu", "patches": [SM120]}}
    assert len(on("0.28.0-cu130", "mine", vllm_profiles=both)["problems"]) == 1
    assert on("0.28.0-cu130-sm120", "mine", vllm_profiles=both)["problems"] == []


def test_a_patch_of_the_site_makes_a_release_of_the_site() -> None:
    own = {
        "package": "vllm",
        "file": "vllm/version.py",
        "why": "It breaks.",
        "upstream": "ticket 12",
        "edit": [{"find": "a", "replace": "b"}],
        "entries": [{"versions": "==0.28.0", "before": "1" * 64, "after": "2" * 64}],
    }
    made = plan(
        vllm_patches={"mine": own},
        vllm_release="patched",
        vllm_releases={"patched": {**CPU_RELEASE, "patches": ["mine"]}},
    )
    assert made["problems"] == []
    assert made["releases"][0]["patches"] == [
        {key: own[key] for key in ("package", "file", "edit")}
        | {"name": "mine", "before": "1" * 64, "after": "2" * 64, "edit": [{"find": "a", "replace": "b", "times": 1}]}
    ]


def test_what_a_release_decides_lies_between_profile_and_group_and_is_named() -> None:
    made = plan(MIXED)
    assert made["problems"] == []
    name = "FLASHINFER_DISABLE_VERSION_CHECK"
    assert made["instances"][0]["environment"][name] == "1"
    assert made["origins"][f"instances.glm.environment.{name}"] == "release mixed"
    assert {"where": "release mixed", "what": "FlashInfer is its own choice: Measured on our GPUs."} in made["notes"]
    assert name not in plan()["instances"][0]["environment"]


def test_what_is_left_out_and_who_a_release_is_not_made_for_is_told() -> None:
    mine = {"mine": {**CPU_RELEASE, "patches": ["gemma-4-mtp-embeddings"], "for": {"profiles": ["glm"]}}}
    made = plan(vllm_release="mine", vllm_releases=mine)
    assert made["problems"] == []
    assert [(note["where"], note["what"].split(":")[0].split(",")[0]) for note in made["notes"]] == [
        ("release mine", "patch gemma-4-mtp-embeddings is left out"),
        ("vllm_instances.glm.model", "the files of tiny-qwen3 are not at hand on this machine"),
        ("vllm_instances.glm", "has no VLLM_API_KEY in vllm_secrets.glm"),
        ("vllm_instances.glm.release", "release mine is made for glm; nobody has said that it suits tiny-cpu"),
    ]
    table = plan_table(made)
    assert "patch gemma-4-mtp-embeddings is left out: vllm 0.28.0 does not need it" in table
    keyed = {"vllm_secrets": {"glm": {"VLLM_API_KEY": "x"}}}
    assert [note["where"] for note in plan(**keyed)["notes"]] == ["vllm_instances.glm.model"]
    heirs = {"heir": {"extends": "tiny-cpu"}}
    heir = plan(vllm_profiles=heirs, **instance(profile="heir"), **keyed)
    assert [note["where"] for note in heir["notes"]] == ["vllm_instances.glm.model"]


def test_a_mixed_set_is_told_with_all_other_problems() -> None:
    made = on("site-cu130", vllm_releases={"site-cu130": {**CUDA_RELEASE, "vllm": "0.33.0"}}, vllm_mirror_url="nowhere")
    assert {found["where"] for found in made["problems"]} == {"release site-cu130", "vllm_mirror_url"}


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=6,
)
NAMES = [
    *sorted(TINY),
    *("vllm_profiles", "vllm_releases", "vllm_patches", "vllm_secrets", "vllm_group_overrides", "vllm_host_overrides"),
    *("vllm_service_stop_timeout_s", "cache_dirs_root", "vllm_mirror_networks"),
]
KEYS = st.sampled_from(["profile", "release", "model", "draft_model", "host", "port", "gpus", "networks"])


@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(NAMES), ANYTHING, max_size=4), st.dictionaries(KEYS, ANYTHING), ANYTHING, ANYTHING
)
def test_nothing_crashes_the_plan(changes: dict, settings_: dict, serve: Any, environment: Any) -> None:
    base = instance(**settings_, serve=serve, environment=environment)
    made = compose_plan("h", ["vllm", "mirror"], {**copy.deepcopy(TINY), **base, **changes})
    json.dumps(made)
    for found in made["problems"]:
        assert all(isinstance(text, str) for text in found.values())


ODD = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
)
CONFIG_KEYS = [
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", "vocab_size"),
    *("sliding_window", "use_sliding_window", "layer_types", "kv_lora_rank", "qk_rope_head_dim", "index_topk"),
    *("linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "text_config"),
    *("intermediate_size", "num_experts_per_tok", "max_position_embeddings", "rope_scaling", "rope_parameters"),
    *("full_attention_interval", "quantization_config", "architectures", "auto_map", "torch_dtype", "dtype"),
    *("index_head_dim", "moe_intermediate_size", "num_global_key_value_heads", "global_head_dim", "mamba_ssm_dtype"),
]
SIZES = ["max-model-len", "gpu-memory-utilization", "max-num-seqs", "max-num-batched-tokens", "tensor-parallel-size"]
SIZES += ["pipeline-parallel-size", "data-parallel-size", "cpu-offload-gb", "kv-cache-dtype", "quantization"]


@settings(max_examples=300, deadline=None)
@pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
@given(
    st.dictionaries(st.sampled_from(CONFIG_KEYS), ODD | st.dictionaries(st.sampled_from(CONFIG_KEYS), ODD)),
    st.dictionaries(st.sampled_from(SIZES), ODD),
    ODD,
)
@example({"num_hidden_layers": float("nan"), "head_dim": float("inf")}, {}, 1)
@example({"hidden_size": 10**400, "num_hidden_layers": 1}, {"max-model-len": 10**400}, 1)
@example({"linear_num_value_heads": 1, "linear_key_head_dim": 1, "num_hidden_layers": 4}, {}, 1)
@example({"text_config": 5, "quantization_config": "fp8", "layer_types": {"a": 1}}, {}, 1)
def test_no_number_crashes_the_estimate_and_none_of_its_own_is_odd(
    accelerator: str, config: dict, serve: dict, weights: Any
) -> None:
    profile = {
        "accelerator": accelerator,
        "environment": {"VLLM_CPU_KVCACHE_SPACE": "1"} if accelerator == "cpu" else {},
        "model": "tiny-qwen3",
        "serve": serve,
        "hardware": {"gpu_memory_gib": 80},
        "numbers": {"config": config, "weights_gib": weights, "source": "a test"},
    }
    made = plan(
        GPU if accelerator == "cuda" else TINY,
        vllm_profiles={"odd": profile},
        vllm_models=TINY["vllm_models"],
        vllm_instances={"glm": {"profile": "odd", "port": 8000}},
    )
    [found] = made["estimates"] or [{"verdict": "unknown"}]
    assert found["verdict"] in ("fits", "tight", "does not fit", "unknown")
    json.dumps(made["estimates"], allow_nan=False)


def test_the_origin_of_what_follows_from_a_variable_names_it() -> None:
    origins = plan()["origins"]
    environment = "instances.glm.environment."
    assert (
        origins[f"{environment}VLLM_ENGINE_READY_TIMEOUT_S"] == "from vllm_service_start_timeout_s (default) less 60 s"
    )
    assert origins[f"{environment}PATH"] == "from uv_venv_root (default), release"
    assert origins[f"{environment}HF_HOME"] == "from cache_dirs_root (default), release"
    assert origins[f"{environment}HF_HUB_OFFLINE"] == "collection"
    made = plan(vllm_service_start_timeout_s=600, vllm_service_shutdown_timeout_s=5, cache_dirs_root="/fast/cache")
    origins = made["origins"]
    assert origins[f"{environment}VLLM_ENGINE_READY_TIMEOUT_S"] == "from vllm_service_start_timeout_s less 60 s"
    assert made["instances"][0]["environment"]["VLLM_ENGINE_READY_TIMEOUT_S"] == "540"
    assert origins["instances.glm.serve.shutdown-timeout"] == "from vllm_service_shutdown_timeout_s"
    assert origins[f"{environment}HOME"] == "from cache_dirs_root, release"
    own = instance(environment={"VLLM_ENGINE_READY_TIMEOUT_S": "7"}, serve={"shutdown-timeout": 1})
    origins = plan(**own)["origins"]
    assert origins[f"{environment}VLLM_ENGINE_READY_TIMEOUT_S"] == "instance glm"
    assert origins["instances.glm.serve.shutdown-timeout"] == "instance glm"


# -- toolchain and probes ------------------------------------------------------------------------------------------

GDN: dict[str, Any] = {
    **GPU,
    "vllm_toolchain": "none",
    "vllm_profiles": {"next": {"accelerator": "cuda", "model": "glm-5.2-nvfp4", "family": ["gdn"]}},
    "vllm_instances": {"glm": {"profile": "next", "port": 8000}},
}


def only(made: dict[str, Any]) -> dict[str, Any]:
    [found] = made["instances"]
    return found


def test_a_host_without_a_toolchain_gets_both_switches_and_says_where_they_come_from() -> None:
    made = plan(GDN)
    assert made["problems"] == []
    assert only(made)["environment"]["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert only(made)["serve"]["gdn-prefill-backend"] == "triton"
    for path in ("environment.VLLM_USE_FLASHINFER_SAMPLER", "serve.gdn-prefill-backend"):
        assert made["origins"][f"instances.glm.{path}"] == "toolchain none"
    assert {"sampler-off", "gdn-triton"} <= {*only(made)["probes"]}
    assert "jit-tools" not in only(made)["probes"]
    assert "g++" not in [package["name"] for package in made["packages"]]


ALL_REDUCE = {"pass_config": {"fuse_allreduce_rms": False}}


def test_several_gpus_without_a_toolchain_add_and_normalise_in_two_steps() -> None:
    """FlashInfer's kernel for both is compiled at run time: two H200 without nvcc ended at profiling."""

    def two(**serve: Any) -> dict[str, Any]:
        settings = {"serve": {"tensor-parallel-size": 2, **serve}}
        return plan({**GDN, "vllm_instances": {"glm": {"profile": "next", "port": 8000, **settings}}})

    assert only(two())["serve"]["compilation-config"] == ALL_REDUCE
    origin = two()["origins"]["instances.glm.serve.compilation-config.pass_config.fuse_allreduce_rms"]
    assert origin == "toolchain none"
    beside = two(**{"compilation-config": {"mode": 3}})
    assert only(beside)["serve"]["compilation-config"] == {"mode": 3, **ALL_REDUCE}
    assert "compilation-config" not in only(plan(GDN))["serve"]
    against = two(**{"compilation-config": {"pass_config": {"fuse_allreduce_rms": True}}})
    [said] = [one for one in against["problems"] if "fuse_allreduce_rms" in one["where"]]
    assert "is True, and vllm_toolchain none needs False" in said["what"]


def test_only_a_gdn_model_gets_its_backend() -> None:
    found = only(plan({**GDN, "vllm_profiles": {"next": {"accelerator": "cuda", "model": "glm-5.2-nvfp4"}}}))
    assert "gdn-prefill-backend" not in found["serve"]
    assert found["environment"]["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert "gdn-triton" not in found["probes"]


def test_a_host_with_a_toolkit_or_on_the_cpu_gets_neither() -> None:
    for made in (plan({**GDN, "vllm_toolchain": "toolkit"}), plan(TINY, vllm_toolchain="none")):
        assert made["problems"] == []
        assert "gdn-prefill-backend" not in only(made)["serve"]
        assert "VLLM_USE_FLASHINFER_SAMPLER" not in only(made)["environment"]
    toolkit = plan({**GDN, "vllm_toolchain": ...})
    assert "jit-tools" in only(toolkit)["probes"]
    assert "g++" in [package["name"] for package in toolkit["packages"]]


@pytest.mark.parametrize(
    ("settings", "place", "says"),
    [
        ({"serve": {"gdn-prefill-backend": "flashinfer"}}, "serve.gdn-prefill-backend", "is flashinfer"),
        ({"serve": {"gdn-prefill-backend": None}}, "serve.gdn-prefill-backend", "is removed"),
        ({"serve": None}, "serve.gdn-prefill-backend", "is removed"),
        ({"environment": {"VLLM_USE_FLASHINFER_SAMPLER": "1"}}, "environment.VLLM_USE_FLASHINFER_SAMPLER", "is 1"),
        (
            {"environment": {"VLLM_USE_FLASHINFER_SAMPLER": None}},
            "environment.VLLM_USE_FLASHINFER_SAMPLER",
            "is removed",
        ),
    ],
)
def test_what_contradicts_a_host_without_a_toolchain_is_named_with_it(
    settings: dict[str, Any], place: str, says: str
) -> None:
    made = plan({**GDN, "vllm_instances": {"glm": {"profile": "next", "port": 8000, **settings}}})
    found = [one for one in made["problems"] if one["where"].endswith(place)]
    assert len(found) == 1, made["problems"]
    assert says in found[0]["what"]
    assert "vllm_toolchain none needs" in found[0]["what"]
    assert "vllm_toolchain: toolkit" in found[0]["remedy"]


def test_a_profile_that_contradicts_is_named_as_the_place() -> None:
    profile = {**GDN["vllm_profiles"]["next"], "serve": {"gdn-prefill-backend": "cutedsl"}}
    [found] = plan({**GDN, "vllm_profiles": {"next": profile}})["problems"]
    assert found["where"] == "vllm_profiles.next.serve.gdn-prefill-backend"


def test_flashinfer_that_a_profile_needs_has_to_come_from_somewhere() -> None:
    [found] = plan({**GPU, "vllm_toolchain": "none"})["problems"]
    assert found["where"] == "vllm_instances.glm.release"
    for part in ("glm-5.2-nvfp4-8gpu needs FlashInfer", "vllm_toolchain is none", "site-cu130 locks none"):
        assert part in found["what"]


def test_probes_are_those_of_the_profile_and_what_follows_from_the_rest() -> None:
    assert only(plan())["probes"] == ["offline", "import", "read-only"]
    found = only(plan(GPU))["probes"]
    signature = "signature:flashinfer.decode.trtllm_batch_decode_with_kv_cache_mla:kv_scale_format"
    cuda = ["versions-agree", "compiler", "jit-tools", "offline", "import", "has-flashinfer", "read-only"]
    assert found == [*cuda, signature]
    bound = plan({**GPU, "vllm_host_overrides": {"serve": {"numa-bind": True}}})
    assert "numa-bind" in only(bound)["probes"]


def test_a_probe_or_family_that_does_not_exist_is_refused() -> None:
    profile = {**PROFILE, "probes": ["improt", "signature:x"], "family": ["gnd"]}
    made = plan(**instance(profile="mine"), vllm_profiles={"mine": profile})
    said = {found["where"]: found["what"] + found["remedy"] for found in made["problems"]}
    assert "there is no probe 'improt'" in said["vllm_profiles.mine.probes"]
    assert "mport" in said["vllm_profiles.mine.probes"]
    assert any(where.startswith("vllm_profiles.mine.family") for where in said)
    assert plan(vllm_toolchain="toolkid")["problems"][0]["where"] == "vllm_toolchain"


@pytest.mark.parametrize(
    ("batches", "wrong"),
    [
        ([1, "25%"], []),
        (["100%"], []),
        ([0, -1, 2, "200%", "abc", "0%", True], [0, 1, 3, 4, 5, 6]),
        ([], None),
    ],
)
def test_batches_that_would_be_all_hosts_at_once_are_refused(batches: list[Any], wrong: list[int] | None) -> None:
    made = compose_plan("glm1", ["vllm"], {"vllm_instances": {}, "vllm_upgrade_batches": batches})
    found = [one["where"] for one in made["problems"] if one["where"].startswith("vllm_upgrade_batches")]
    places = [f"vllm_upgrade_batches[{at}]" for at in wrong] if wrong is not None else ["vllm_upgrade_batches"]
    assert found == places


@pytest.mark.parametrize("given", [{}, {"vllm_instances": None}])
def test_a_serving_host_without_the_variable_is_a_problem_and_an_empty_one_an_intention(given: dict[str, Any]) -> None:
    assert "vllm_instances" in [one["where"] for one in compose_plan("glm1", ["vllm"], given)["problems"]]
    empty = compose_plan("glm1", ["vllm"], {"vllm_instances": {}})
    assert "vllm_instances" not in [one["where"] for one in empty["problems"]]
