# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What a model is, from config.json and the files beside it: read only, nothing is executed, no tensor is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..module_utils.model_files import look

_MAPS = ("text_config", "llm_config", "quantization_config", "rope_scaling", "rope_parameters", "auto_map")
# Names of the number of routed experts.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class Model:
    """A model's architecture.

    Attributes:
        config: config.json, or the part of it that a profile holds.
        weight_bytes: of all weight files; None where only a configuration is known.
        missing: what would keep vLLM from loading it with no network, in words.
        source: where the configuration is from.
        code: files whose ``auto_map`` takes classes from Python files of the model's own, with those classes.
    """

    config: Mapping[str, Any]
    weight_bytes: int | None = None
    missing: tuple[str, ...] = ()
    source: str = ""
    quantisation: str | None = None
    code: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def text(self) -> Mapping[str, Any]:
        """The language model's part of the configuration, which multimodal models nest."""
        return self.config.get("text_config") or self.config.get("llm_config") or self.config

    @property
    def architectures(self) -> list[str]:
        """The classes that vLLM looks up in its registry."""
        return list(self.config.get("architectures") or [])

    @property
    def heads(self) -> int | None:
        """Attention heads of the language model."""
        return whole(self.text.get("num_attention_heads"))

    @property
    def families(self) -> list[str]:
        """What kind of model it is; reasons are given by these, not by names."""
        text = self.text
        found = []
        if is_gdn(text):
            found += ["GDN", "hybrid"]
        elif "mamba" in str(text.get("layer_types", "")) or text.get("mamba_d_state") or text.get("ssm_cfg"):
            found.append("hybrid")
        if text.get("kv_lora_rank"):
            found.append("MLA")
        if text.get("index_topk"):
            found.append("sparse attention")
        if any(text.get(key) for key in EXPERTS):
            found.append("MoE")
        if any(key in self.config for key in ("vision_config", "audio_config")):
            found.append("multimodal")
        if self.quantisation:
            found.append(f"quantised ({self.quantisation})")
        return found


# What the class of a draft, or its model type, holds, and the method of speculative decoding for it.
_DRAFTS = {"eagle3": "eagle3", "eagle": "eagle", **{word: word for word in ("dflash", "dspark", "medusa", "mtp")}}
_MTP_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def drafted_by(model: Model) -> str | None:
    """The method that a draft model was trained for, None for one that says nothing of it.

    Source: SpeculativeConfig.__post_init__ and hf_config_override in vllm/config/speculative.py (0.28.0), which go by
    architecture and model type.
    """
    kind = str(model.config.get("model_type") or "").lower()
    if kind in _MTP_TYPES:
        return "mtp"
    named = " ".join([*model.architectures, kind]).lower()
    if "peagle" in named:
        return None
    return next((method for word, method in _DRAFTS.items() if word in named), None)


def is_gdn(text: Mapping[str, Any]) -> bool:
    """Whether some layers are gated delta networks: linear attention with a state instead of a KV cache."""
    return bool(text.get("linear_num_value_heads") and text.get("linear_key_head_dim"))


def model_of(config: Mapping[str, Any], weight_bytes: int | None, source: str) -> Model:
    """A model of which only a configuration is known."""
    config = _sound(config)
    return Model(config, weight_bytes, (), source, _quantisation(config, {}))


def whole(value: Any) -> int | None:
    """A whole number above 0, None for anything else that a file may hold in its place."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _sound(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration without maps and lists that are none: a file may hold anything."""
    found = {key: value for key, value in config.items() if key not in _MAPS or isinstance(value, Mapping)}
    for key in ("text_config", "llm_config"):
        if key in found:
            found[key] = _sound(found[key])
    named = found.get("architectures")
    return {**found, "architectures": [str(one) for one in named] if isinstance(named, list) else []}


def model_at(directory: Path, draft: bool = False) -> Model | None:
    """The model in a directory, or None where there is no readable config.json."""
    try:
        stamp = (directory / "config.json").stat().st_mtime_ns
    except (OSError, ValueError):  # a name with a null character
        return None
    return _model_at(directory, draft, stamp)


@lru_cache(maxsize=256)
def _model_at(directory: Path, draft: bool, _stamp: int) -> Model | None:
    found = look(directory, draft=draft)
    return None if found is None else model_from(found)


def model_from(found: Mapping[str, Any]) -> Model:
    """The model that module_utils/model_files.py has looked at, here or on a host."""
    config = _sound(found["config"])
    return Model(
        config,
        found["weight_bytes"],
        tuple(found["missing"]),
        f"{found['directory']}/config.json",
        _quantisation(config, found["modelopt"]),
        {owner: tuple(classes) for owner, classes in found["code"].items()},
    )


def _quantisation(config: Mapping[str, Any], modelopt: Mapping[str, Any]) -> str | None:
    """The weights' quantisation: config.json's own word, or that of NVIDIA's ModelOpt in a file beside it."""
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or {}
    named = found.get("quant_algo") or found.get("quant_method")
    named = named or (modelopt.get("quantization") or {}).get("quant_algo")
    return str(named).lower() if named else None
