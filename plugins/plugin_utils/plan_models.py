# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the plan knows of models: from the files where they are at hand on the control node, else from the profile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .memory_estimate import GIB, estimate, estimate_on_cpu
from .model_knowledge import Model, drafted_by, model_at, model_of, whole
from .serve_catalogue import Finding, catalogued_versions, serve_catalogue, size


class ModelShelf:
    """The models of one host by name.

    Args:
        sources: ``vllm_models``.
        bundle: the bundle's directory, where the host's variables name one.
    """

    def __init__(self, sources: Mapping[str, Any], bundle: str | None) -> None:
        self._sources = sources
        self._bundle = bundle
        self._seen: dict[tuple[str, bool], Model | None] = {}

    def _at_hand(self, name: str, draft: bool = False) -> Model | None:
        if (name, draft) not in self._seen:
            self._seen[name, draft] = self._found(name, draft)
        return self._seen[name, draft]

    def _found(self, name: str, draft: bool) -> Model | None:
        directories = [(self._sources.get(name) or {}).get("directory")]
        directories.append(f"{self._bundle}/models/{name}" if self._bundle else None)
        found = (model_at(Path(one), draft) for one in directories if one)
        return next((model for model in found if model is not None), None)

    def missing(self, name: str, draft: bool = False) -> tuple[str, ...]:
        """What would keep vLLM from loading it offline; nothing where its files are not at hand."""
        model = self._at_hand(name, draft or bool((self._sources.get(name) or {}).get("draft")))
        return model.missing if model is not None else ()

    def drafted_by(self, name: str) -> str | None:
        """The method of speculative decoding that a draft was trained for, where its files say so."""
        model = self._at_hand(name, draft=True)
        return drafted_by(model) if model is not None else None

    def families(self, name: str, about: Mapping[str, Any]) -> set[str]:
        """Families of a model in lower case, by its files or a profile's numbers, and those that the profile says."""
        model = self._known(name, about)
        return {*(about.get("family") or ()), *(family.lower() for family in (model.families if model else ()))}

    def context(self, name: str, about: Mapping[str, Any]) -> int | None:
        """The longest context that a model was made for, in tokens."""
        model = self._known(name, about)
        return whole(model.text.get("max_position_embeddings")) if model is not None else None

    def notes(self, name: str, where: str) -> list[dict[str, str]]:
        """What is worth knowing of a model whose files are at hand, or that they are not."""
        model = self._at_hand(name)
        if model is None:
            what = f"the files of {name} are not at hand on this machine, so nothing could be read from them"
            return [{"where": where, "what": what}]
        found = []
        if model.families:
            found.append({"where": where, "what": f"{name} is {', '.join(model.families)}"})
        if model.code and not model.missing:
            owners = "; ".join(f"{owner} asks for {', '.join(classes)}" for owner, classes in model.code.items())
            what = f"{name} brings Python code of its own, all of its files are local: {owners}"
            found.append({"where": where, "what": what})
        return found

    def findings(
        self,
        name: str,
        version: str | None,
        serve: Mapping[str, Any],
        environment: Mapping[str, str],
        about: Mapping[str, Any],
    ) -> list[Finding]:
        """Arguments and release against the model.

        Args:
            version: vLLM's, None where the release is wrong.
            about: the profile's ``numbers`` stand in for files that are not at hand.
        """
        model = self._known(name, about)
        return [] if model is None else model_findings(model, version, serve, environment)

    def is_at_hand(self, name: str) -> bool:
        """Whether its files are, so that all has been read from them that there is to know."""
        return self._at_hand(name) is not None

    def _known(self, name: str, about: Mapping[str, Any]) -> Model | None:
        """The model from its files, else from the numbers of a profile."""
        numbers = about.get("numbers") or {}
        # A profile whose numbers are incomplete is a problem of its own.
        if not isinstance(numbers.get("config"), dict) or not numbers.get("weights_gib"):
            return self._at_hand(name)
        return self._at_hand(name) or model_of(
            numbers["config"], int(numbers["weights_gib"] * GIB), str(numbers.get("source"))
        )

    def gdn_key_head_dim(self, name: str, about: Mapping[str, Any]) -> int | None:
        """Width of the key heads of a GDN-based model; None where neither its files nor the profile tell."""
        model = self._known(name, about)
        return whole(model.text.get("linear_key_head_dim")) if model is not None else None

    def estimate(
        self,
        name: str,
        draft: str | None,
        serve: Mapping[str, Any],
        environment: Mapping[str, str],
        about: Mapping[str, Any],
        described: bool,
    ) -> dict[str, Any]:
        """The memory estimate of an instance; ``about`` is its profile's, ``described`` whether for this very model."""
        numbers, hardware = about.get("numbers") or {}, about.get("hardware") or {}
        model, helper = self._known(name, about), self._at_hand(draft, True) if draft else None
        if draft and helper is None and numbers.get("draft_gib") and self._at_hand(name) is None:
            helper = model_of({}, int(numbers["draft_gib"] * GIB), str(numbers.get("source")))
        if model is None:
            return {
                "verdict": "unknown",
                "source": f"neither the files of {name} are at hand nor numbers in the profile",
            }
        found = (
            estimate_on_cpu(model, serve, environment, helper)
            if about.get("accelerator") == "cpu"
            else estimate(model, serve, hardware.get("gpu_memory_gib"), helper, hardware.get("gpus"))
        )
        if found["verdict"] in ("tight", "does not fit") and not described and self._at_hand(name) is None:
            found["doubt"] = f"the numbers are those of another model than {name}"
        return found


def model_findings(
    model: Model, version: str | None, serve: Mapping[str, Any], environment: Mapping[str, str]
) -> list[Finding]:
    """Arguments and release against a model, by its configuration; ``version`` is vLLM's, None where not known."""
    found = [*_registration(model, version, serve), *_code(model, version, serve), *_parallel(model, serve)]
    # vllm/envs.py: whoever sets it takes wrong answers beyond the model's own positions on.
    return found if environment.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN") == "1" else [*found, *_length(model, serve)]


def _registration(model: Model, version: str | None, serve: Mapping[str, Any]) -> list[Finding]:
    """Whether vLLM has an implementation of its own for one of the architectures."""
    if _implemented(model, version) is not False or serve.get("model-impl") == "transformers":
        return []
    having = [one for one in catalogued_versions() if _registered(model, serve_catalogue(one) or {})]
    return [
        Finding(
            "",
            f"vLLM {version} registers no {' or '.join(model.architectures)}"
            + (f"; {', '.join(having)} do" if having else "; no catalogued version does"),
            "Choose a release of such a version." if having else "See whether its own Transformers backend can run it.",
            stops=serve.get("model-impl") == "vllm",
            source=f"vllm/model_executor/models/registry.py of {version}, catalogue/serve/{version}.json",
        )
    ]


def _code(model: Model, version: str | None, serve: Mapping[str, Any]) -> Iterator[Finding]:
    """Python code of the model's own that vLLM would have to run, and may not."""
    if serve.get("trust-remote-code") is True:
        return
    source = "vllm/transformers_utils/config.py, HFConfigParser"
    remedy = "Read that code, then set trust-remote-code: true."
    for owner, classes in model.code.items():
        named = ", ".join(classes)
        if owner != "config.json":
            what = (
                f"is not set, and {owner} names code of the model's own ({named}), which vLLM may need and then stops"
            )
            yield Finding("trust-remote-code", what, remedy, False, source)
        elif _implemented(model, version) is False:
            classes_of = " or ".join(model.architectures)
            what = f"is not set, and vLLM {version} has nothing for {classes_of} but the model's own code ({named})"
            yield Finding("trust-remote-code", what, remedy, source=source)


def _implemented(model: Model, version: str | None) -> bool | None:
    """Whether a version of vLLM has an implementation of its own; None where that is not known."""
    known = serve_catalogue(version) if version else None
    return _registered(model, known) if known is not None and model.architectures else None


def _registered(model: Model, known: Mapping[str, Any]) -> bool:
    names = {name for kind in known.get("architectures", {}).values() for name in kind}
    return any(name in names for name in model.architectures)


def _parallel(model: Model, serve: Mapping[str, Any]) -> list[Finding]:
    tensor, heads = serve.get("tensor-parallel-size", 1), model.heads
    if not isinstance(tensor, int) or isinstance(tensor, bool) or tensor < 1 or not heads or heads % tensor == 0:
        return []
    fitting = [str(count) for count in range(1, min(heads, 2 * tensor) + 1) if heads % count == 0]
    return [
        Finding(
            "tensor-parallel-size",
            f"is {tensor}, and the model has {heads} attention heads, which vLLM does not divide by it",
            f"Use one of {', '.join(fitting)}.",
            source="vllm/config/model.py, verify_with_parallel_config",
        )
    ]


def _length(model: Model, serve: Mapping[str, Any]) -> list[Finding]:
    wanted, longest = size(serve.get("max-model-len")), whole(model.text.get("max_position_embeddings"))
    scaled = (model.text.get("rope_scaling") or model.text.get("rope_parameters") or {}).get("factor")
    if wanted is None or not longest or scaled or serve.get("hf-overrides") or wanted <= longest:
        return []
    return [
        Finding(
            "max-model-len",
            f"is {wanted:,}, and the model was made for {longest:,}: vLLM refuses it",
            f"Use at most {longest}, or scale its positions with hf-overrides.",
            source="vllm/config/model.py, _get_and_verify_max_len",
        )
    ]
