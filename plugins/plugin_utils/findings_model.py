# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a model's files on a host say against its plan, where the control node has not got them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from .finding import Facts, Finding, Plan, new_finding
from .memory_estimate import estimate
from .model_knowledge import Model, is_gdn, model_from
from .plan_models import model_findings
from .probes import GDN_BACKEND


def models(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Completeness, registry, remote code, heads, length and family, as far as the host has the files."""
    versions = {release["name"]: release.get("vllm") for release in plan.get("releases", ())}
    instances = {f"instance {found['name']}": found for found in plan.get("instances", ())}
    for wanted in plan["needs"].get("models", ()):
        found = (facts.get("models") or {}).get(wanted["name"])
        if found is None:
            continue
        model = model_from(found)
        for problem in model.missing:
            yield new_finding(
                "model-incomplete",
                f"{found['directory']}: {problem}",
                f"a model that vLLM loads with no network, for {' and '.join(wanted['for'])}",
                "Stage it again where it came from; ansible-playbook onprem.vllm.site --tags hf_cache -e "
                "hf_cache_verify=full brings what the manifest has.",
            )
        for name in wanted["for"]:
            if (instance := instances[name])["model"] == wanted["name"]:
                yield from _against(model, instance, versions.get(instance["release"]))


def estimated_gib(plan: Plan, facts: Facts) -> dict[str, float]:
    """The least memory of a GPU in GiB by instance: the plan's estimate, else one of the files that the host has."""
    instances = {f"instance {found['name']}": found for found in plan.get("instances", ())}
    least: dict[str, float] = {}
    for known in plan.get("estimates", ()):
        instance = instances[known["for"]]
        found = (facts.get("models") or {}).get(instance["model"])
        seen = estimate(model_from(found), instance["serve"], None) if found is not None else {}
        least[known["for"]] = {**seen, **known}.get("least_gpu_memory_gib", 0.0)
    return least


def _against(model: Model, instance: Mapping[str, Any], version: str | None) -> Iterator[Finding]:
    """The plan of an instance against its model."""
    for finding in model_findings(model, version, instance["serve"], instance["environment"]):
        setting = f"serve.{finding.flag} of " if finding.flag else ""
        parts = (
            f"{model.source}: {setting}instance {instance['name']} {finding.what}"
            if finding.flag
            else f"{model.source}: {finding.what}",
            f"arguments and a release that suit the model ({finding.source})",
            finding.remedy,
        )
        yield new_finding("model-refused", *parts) if finding.stops else new_finding("model-doubtful", *parts)
    off = "sampler-off" in instance["probes"]
    if off and is_gdn(model.text) and instance["serve"].get(GDN_BACKEND) != "triton":
        yield new_finding(
            "model-family",
            f"{model.source}: a GDN-based model, and the plan does not know it",
            f"serve.{GDN_BACKEND}: triton on a host without a toolchain; FlashInfer would compile, and the engine ends",
            f"Write family: [gdn] into the profile of instance {instance['name']}.",
        )
