# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""Everything that shall be true on one host, from the inventory and the catalogue alone (docs/design.md, "The plan").

Nothing here stops at the first thing that is wrong: what cannot be composed is left out, and said in ``problems``.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from . import serve_catalogue
from .catalogue import COLLECTION, inventory_spec, read_yaml
from .flashinfer_set import CUBIN, VERSION_CHECK_SWITCH
from .memory_estimate import CPU_CACHE, UNSURE_SHARE, UTILISATION, cpu_cache_gib, host_memory_gib, settings_of
from .patch_catalogue import Patch, PatchCatalogueError, load_patches, patches_for
from .plan_conflicts import (
    account_problems,
    directories,
    directory_problems,
    instance_ports,
    monitoring_ports,
    port_problems,
    role_ports,
)
from .plan_facts import left_to_facts
from .plan_layers import Branch, Layer, Leaf, layer, leaves, merge_all, removals, resolve
from .plan_models import ModelShelf
from .plan_origins import following, host_origins
from .plan_proxy import database_packages, database_problem, proxy_part
from .probes import PROBES, is_probe, is_tensor_parallel, probes_of, settings_without_toolchain
from .profile import Profile, load_profiles, reaches
from .release_definition import Release, ReleaseError, load_release, load_uv, shipped_releases
from .role_variables import (
    Problem,
    checked,
    default_of,
    known_variables,
    misspelt,
    nearest,
    not_computed,
    problem,
    sentence,
)
from .routes import API_KEY
from .sealed import Sealed
from .serve_paths import named_paths

INSTANCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")
SERVED_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._:/@+-]{0,126}[A-Za-z0-9])?")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SECRET_NAME = re.compile(r"(.*_)?(API_KEY|TOKEN|PASSWORD|SECRET)")

# Arguments that the plan sets from settings of their own, or that may not be set at all.
RESERVED_SERVE = {
    "model": "Set `model` of the instance, the name of the model.",
    "host": "Set `host` of the instance.",
    "port": "Set `port` of the instance, so that the firewall opens the same one.",
    "served-model-name": "Set `served_model_name` of the instance.",
    "api-key": "Put VLLM_API_KEY into vllm_secrets: what stands in arguments is world-readable.",
    "hf-token": "Remove it: hosts ask the mirror alone.",
    "config": "Write the arguments of that file below `serve`.",
    "spec-method": "Write it as method of serve.speculative-config.",
    "spec-model": "Set draft_model of the instance.",
    "spec-tokens": "Write it as num_speculative_tokens of serve.speculative-config.",
}
# A process that reaches for the internet hangs for minutes in an air gap (rule 1): these are not open to settings.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "FLASHINFER_NO_DOWNLOAD": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
# The key that an instance takes beside VLLM_API_KEY while it is changed.
PREVIOUS_KEY = "PREVIOUS_VLLM_API_KEY"
PROGRAMS = "/opt/vllm/libexec"
# Set from settings of an instance: as a variable of the environment it would bypass what compares them.
RESERVED_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "Set `gpus` of the instance, so that no other one and no check overlooks it.",
}
# The finding of preflight about a GPU that is too small: who waives it knows better than the estimate, too.
MEMORY_FINDING = "gpu-memory-small"
# Beyond any host, and far from what no number may be.
LARGEST_SIZE = 1024
PARALLEL_SIZES = ("tensor-parallel-size", "pipeline-parallel-size", "data-parallel-size")
BATCH = re.compile(r"[1-9][0-9]*|([1-9][0-9]?|100)%")
OWNED_PREFIX = "ONPREM_VLLM_"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CUDA_BIN = "/usr/local/cuda/bin"
# Settings of the unit (vllm_service_*) that the plan shows.
UNIT_SETTINGS = (
    *("start_timeout_s", "stop_timeout_s", "shutdown_timeout_s", "restart_delay_s", "start_limit_burst"),
    *("device_timeout_s", "nofile", "oom_score_adjust", "memory_high", "memory_max", "keep_generations"),
)
# Beginnings of origins, uppermost layer first.
_UPPER = ("instance ", "vllm_host_overrides", "vllm_group_overrides", "vllm_profiles.")
# What is left of the unit's start limit for the readiness step after the engine is up, in seconds.
READINESS_RESERVE_S = 60


def compose_plan(
    host: str,
    groups: Sequence[str],
    variables: Mapping[str, Any],
    unreadable: Mapping[str, str] | None = None,
    names: Iterable[str] = (),
) -> dict[str, Any]:
    """The plan of one host.

    Args:
        host: the host's name in the inventory.
        groups: the groups it is in.
        variables: the collection's variables that are set for it, as plain data.
        unreadable: variables whose value could not be computed, with the reason.
        names: the names of all its variables, to find misspelt ones.

    Returns:
        The plan as docs/design.md has it.
    """
    return _Composition(host, groups, variables, unreadable or {}, names).plan()


class _Composition:
    def __init__(
        self,
        host: str,
        groups: Sequence[str],
        variables: Mapping[str, Any],
        unreadable: Mapping[str, str],
        names: Iterable[str],
    ) -> None:
        self.host = host
        self.groups = groups
        self.problems: list[Problem] = []
        self.warnings: list[Problem] = []
        self.wrong_sizes: set[str] = set()  # parallel sizes that are no number: said once
        self.removed: set[str] = set()  # maps of instances that some layer sets to null as a whole
        self.uncatalogued: dict[str, str] = {}  # vLLM versions whose arguments nobody has looked at, with the release
        self.claims: list[dict[str, Any]] = []  # ports and GPUs of every instance, of those that are wrong, too
        self.origins: dict[str, str] = {}
        self.set: dict[str, Any] = {}
        self.problems.extend(misspelt(sorted({*names, *variables})))
        for name, reason in unreadable.items():
            self.problems.append(not_computed(name, reason))
        known = known_variables()
        for name, value in variables.items():
            if name in known and value is None and known[name].get("range") and known[name].get("default") is not None:
                self._wrong(name, "is null, and the role would take it for a value", "Remove the line for the default.")
            elif name in known and value is not None:
                result = checked(value, known[name], name, self.problems)
                if result is not None:
                    self.set[name] = result
        planned = read_yaml(COLLECTION / "catalogue" / "inventory.yml")["planned"]
        for name in sorted(planned.keys() & {*variables, *unreadable}):
            remedy = f"Set {planned[name]}, or remove it." if planned[name] else "Remove it."
            self._warn(name, "changes nothing: the playbooks set it, from the plan", remedy, "catalogue/inventory.yml")
        self.misread = [found["where"] for found in self.problems]
        self.profiles: dict[str, Profile | None] = load_profiles(self.value("vllm_profiles"), self.problems)
        self.patches = self._patches()
        self.read: dict[str, Release | None] = {}
        self.releases: dict[str, Release | None] = {}
        for name in self.value("vllm_releases"):
            self._read_release(name, f"vllm_releases.{name}")
        self.releases_root = self.value("uv_venv_root").rstrip("/") + "/releases"
        self.models_root = self.value("hf_cache_root").rstrip("/")
        self.caches_root = self.value("cache_dirs_root").rstrip("/")
        self.shelf = ModelShelf(self.value("vllm_models"), self.set.get("wheel_mirror_bundle"))

    def plan(self) -> dict[str, Any]:
        """Compose all parts, in the order in which their problems are best read."""
        catalogue = read_yaml(COLLECTION / "catalogue" / "inventory.yml")
        roles = [entry["role"] for entry in catalogue["roles"] if set(entry["groups"]) & set(self.groups)]
        mirror = self._mirror()
        instances: list[dict[str, Any]] = []
        if "vllm" in self.groups:  # variables of group `all` reach the mirror as well, and mean nothing there
            if "vllm_instances" not in self.set and not self._is_wrong("vllm_instances"):
                self._wrong(
                    "vllm_instances",
                    "is not set, so every instance that the host has would be removed",
                    "Define some; write {} where the host shall serve nothing.",
                )
            instances = [found for name in self.value("vllm_instances") if (found := self._instance(name)) is not None]
            self._check_hidden()
            self._check_shared_gpus()
            self._check_secrets()
        elif "vllm_instances" in self.set and not {"mirror", "proxy"} & {*self.groups}:
            self._wrong(
                "vllm_instances",
                "the host is not in group vllm, so nothing would start them",
                "Add the host, or its group as a child, to group vllm.",
            )
        if "proxy" in self.groups:
            self._release("litellm_proxy_release", self.value("litellm_proxy_release"), {}, "litellm")
        self._check_conflicts(instances)
        self._check_batches()
        self._check_models()
        releases = [release for release in self.releases.values() if release is not None]
        plan = {
            "host": self.host,
            "roles": roles,
            "mirror": {**mirror, "bundle": self.value("wheel_mirror_bundle") if "mirror" in self.groups else ""},
            "service": {"user": self.value("vllm_service_user"), "group": self.value("vllm_service_group")},
            "unit": self._unit() if "vllm" in self.groups else {},
            "proxy": self._proxy() if "proxy" in self.groups else {},
            "paths": {
                "releases": self.releases_root,
                "models": self.models_root,
                "caches": self.caches_root,
                "share": self.value("hf_cache_share"),
            },
            "uv": self._uv(releases),
            "releases": [release.as_plan() for release in releases],
            "models": self._models(instances),
            "instances": [{key: value for key, value in found.items() if key[0] != "_"} for found in instances],
            "packages": self._packages(instances, releases, catalogue),
            "firewall": {"ports": self._firewall_ports(instances), "ssh": self._ssh()},
            "needs": self._needs(instances, releases, catalogue),
            "estimates": [self._estimate(found) for found in instances],
            "waived": self._waived(),
            "notes": self._notes(instances, releases),
            "warnings": self.warnings,
            "problems": self.problems,
            "origins": self.origins,
        }
        self.origins |= host_origins(plan, self.set, self.groups, self.origins)
        return plan

    def value(self, name: str) -> Any:
        """A variable as the inventory sets it, else its default."""
        return self.set[name] if name in self.set else default_of(name)

    def _wrong(self, where: str, what: str, remedy: str) -> None:
        found = problem(where, what, remedy)
        if found not in self.problems:  # all instances of a group have what is wrong with it
            self.problems.append(found)

    def _warn(self, where: str, what: str, remedy: str, source: str) -> None:
        found = {**problem(where, what, remedy), "source": source}
        if found not in self.warnings:
            self.warnings.append(found)

    def _is_wrong(self, where: str) -> bool:
        """Whether a problem names this place or one within it: what follows from it is not said again."""
        return any(re.match(re.escape(where) + r"($|[.\[])", found["where"]) for found in self.problems)

    def _is_misread(self, where: str) -> bool:
        """Whether what is written at a place could not be read, so that it is not as if nothing stood there."""
        return self._is_wrong(where) or any(re.match(re.escape(place) + r"[.\[]", where) for place in self.misread)

    def _is_setting_misread(self, where: str, key: str, profile: Profile | None = None) -> bool:
        """Whether a setting of an instance could not be read in one of its layers."""
        chain = profile.chain if profile is not None else ()
        layers = (where, "vllm_host_overrides", "vllm_group_overrides", *(f"vllm_profiles.{name}" for name in chain))
        return any(self._is_misread(f"{layer}.{key}") for layer in layers)

    def _patches(self) -> dict[str, Patch]:
        """The shipped patches, and the site's where they are right: one that is wrong harms what names it alone."""
        right: dict[str, Any] = {}
        for name, definition in self.value("vllm_patches").items():
            try:
                load_patches({name: definition})
            except PatchCatalogueError as error:
                self.problems.extend(error.problems)
            else:
                right[name] = definition
        return load_patches(right)

    # -- one instance ----------------------------------------------------------------------------------------------

    def _instance(self, name: str) -> dict[str, Any] | None:
        where = f"vllm_instances.{name}"
        if not INSTANCE_NAME.fullmatch(name):
            self._wrong(
                where,
                f"{name!r} is no unit name",
                "Use letters, digits, hyphens and underscores, at most 63, the first a letter or digit.",
            )
            return None
        own = self.set["vllm_instances"].get(name)
        upper = (
            layer(self.value("vllm_group_overrides"), "vllm_group_overrides"),
            layer(self.value("vllm_host_overrides"), "vllm_host_overrides"),
            layer(own or {}, f"instance {name}"),
        )
        chosen, chosen_from = resolve(merge_all(*upper))
        if own is None and chosen.get("profile") is None and not self._is_wrong(where):
            self._wrong(
                where, "is empty", "Write profile and port below it; without its line there is no such instance."
            )
            return None
        named = self._profile(where, chosen.get("profile"), chosen_from)
        release = self._release(where, chosen.get("release"), chosen_from)
        # One that names no profile is checked as far as it goes, so that all its problems are told in one run.
        profile = named or Profile("", {}, Branch())
        decided = layer({}, "")
        if release is not None and (own := release.flashinfer.environment()):
            decided = layer({"environment": own}, f"release {release.name}")
        toolchain = None if release is None or release.variant == "cpu" else self.value("vllm_toolchain")
        asked = chosen.get("model") or self._designed(profile.name).get("model")
        about = profile.about if self._describes(profile, asked) else {**profile.about, "numbers": {}}
        family = self.shelf.families(str(asked), about)
        written = merge_all(profile.settings, decided, *upper)
        alone, _unused = resolve(written)
        several = is_tensor_parallel((alone or {}).get("serve") or {})
        without = settings_without_toolchain(family, several)
        off = without if toolchain == "none" else {}
        base = (self._base(name, release), layer(off, "toolchain none"))
        merged = merge_all(*base, written)
        settings, origins = resolve(merged)
        # For messages: what is missing because a layer takes it away is to be corrected there.
        told = ChainMap(origins, removals(merged))
        self._check_removed(where, merge_all(*base, profile.settings, decided), upper, release)
        if release is not None and named is not None:
            self._check_fit(where, profile, release)
        self._check_probes(where, profile, release, toolchain)

        model = self._model_name(where, settings, "model")
        draft = self._model_name(where, settings, "draft_model")
        if model is None and named is not None and not self._is_setting_misread(where, "model", profile):
            self._wrong(f"{where}.model", "is missing", "Name the model to serve; profile and instance name none.")
        port = self._port(where, settings)
        address = settings.get("host") or "0.0.0.0"  # noqa: S104 - the firewall stands before it
        self._check_address(where, address)
        networks = self._networks(where, settings, origins, address)
        gpus = self._gpus(where, settings, release)
        gpus_read = not self._is_setting_misread(where, "gpus")
        served = settings.get("served_model_name") or model
        origins.setdefault(("served_model_name",), origins.get(("model",), ""))
        self._check_served(where, settings, origins)
        serve = self._serve(where, settings.get("serve") or {}, told, gpus, release)
        self._check_size(where, profile, serve, origins)
        environment = self._environment(where, settings.get("environment") or {}, told, release)
        result = {"serve": serve, "environment": environment}
        self._check_toolchain(where, off, result, told)
        secrets = self._secrets(name, environment)
        self._take_previous_key(name, secrets, serve, environment, origins)
        self._check_draft(where, profile, settings, told, serve)
        speculative = serve.get("speculative-config")
        if draft is not None and isinstance(speculative, dict) and "model" not in speculative:
            serve["speculative-config"] = {**speculative, "model": f"{self.models_root}/{draft}"}
            origins["serve", "speculative-config", "model"] = origins["draft_model",]
        if release is not None:
            self._check_version(where, release, result, told, self.shelf.context(str(model), about))
        named_draft, beside = self._named_models(where, serve, origins)
        draft = draft or (named_draft if named_draft != model else None)  # its own MTP layers are part of its files
        if model is not None:
            self._check_model(where, model, draft, release, result, told, about)
        kind = profile.about.get("accelerator") or ("cpu" if release and release.variant == "cpu" else None)
        claim = {"name": name, "port": port, "gpus": gpus, "gpus_read": gpus_read, "accelerator": kind, "serve": serve}
        self.claims.append(claim)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu) for gpu in gpus)
            origins["environment", "CUDA_VISIBLE_DEVICES"] = origins["gpus",]
        if release is None or named is None or model is None or port is None:
            return None

        root = self.models_root
        fixed = {"model": f"{root}/{model}", "served-model-name": served, "host": address, "port": port}
        for flag, key, otherwise in (
            ("model", "model", ""),
            ("port", "port", ""),
            ("host", "host", "collection"),
            ("served-model-name", "served_model_name", ""),
        ):
            origins["serve", flag] = origins.get((key,), otherwise)
        origins["release",] = origins["release_id",] = chosen_from["release",]
        for part, otherwise in (
            ("host", "collection"),
            ("gpus", "collection"),
            ("probes", f"profile {profile.name}, release {release.name}"),
            ("secrets", f"vllm_secrets.{name}" if secrets else "collection"),
        ):
            origins.setdefault((part,), otherwise)
        gpu_memory = _gpu_memory(serve, release)
        if gpu_memory:
            origins["gpu_memory",] = origins.get(("serve", "gpu-memory-utilization"), f"release {release.name}")
        for path, origin in origins.items():
            self.origins[".".join(("instances", name, *path))] = origin
        return {
            "name": name,
            "profile": profile.name,
            "release": release.name,
            "release_id": release.id,
            "model": model,
            "served_model_name": served,
            "host": address,
            "port": port,
            "gpus": gpus,
            **gpu_memory,
            "serve": {**fixed, **serve},
            "environment": dict(sorted(environment.items())),
            "secrets": secrets,
            "probes": probes_of(profile.about.get("probes") or (), family, toolchain, serve),
            "_decide": left_to_facts(
                written,
                self.set.get("vllm_toolchain", "toolkit" if self._needs_flashinfer(profile, release) else None),
                release.variant,
                release.vllm,
                "gdn" in family,
                self.shelf.gdn_key_head_dim(model, profile.about),
            ),
            "_draft": draft,
            "_toolkit": toolchain == "toolkit"
            and (self._needs_flashinfer(profile, release) or _is_against(without, result, removals(merged))),
            "_models": list(dict.fromkeys(found for found in (model, draft, *beside) if found is not None)),
            "_networks": networks,
            "_profile": profile,
            "_release": release,
        }

    def _profile(self, where: str, name: str | None, origins: Mapping[tuple[str, ...], str]) -> Profile | None:
        if name is None:
            if not self._is_setting_misread(where, "profile"):
                self._wrong(f"{where}.profile", "is missing", "Name a profile: " + nearest("", self.profiles))
            return None
        if name not in self.profiles:
            if not self._is_misread(f"vllm_profiles.{name}"):
                self._wrong(
                    self._place(where, "profile", origins),
                    f"there is no profile {name!r}",
                    sentence(nearest(name, self.profiles)) + " The site's own stand in vllm_profiles.",
                )
            return None
        return self.profiles[name]

    def _designed(self, name: str) -> dict[str, Any]:
        """The settings of a profile itself."""
        profile = self.profiles.get(name)
        return profile.designed if profile is not None else {}

    def _describes(self, profile: Profile, model: Any) -> bool:
        """Whether a profile's numbers are those of a model: a site's profile may take them over with another's name."""
        same = [name for name in profile.chain if self._numbers(name) == profile.about.get("numbers")]
        own = [name for name in same if name not in self.value("vllm_profiles") or name == same[-1]]
        return any(self._designed(name).get("model") == model for name in own)

    def _numbers(self, name: str) -> Any:
        profile = self.profiles.get(name)
        return profile.about.get("numbers") if profile is not None else None

    def _release(
        self, where: str, name: str | None, origins: dict[tuple[str, ...], str], package: str = "vllm"
    ) -> Release | None:
        place = where if package == "litellm" else self._place(where, "release", origins)
        if name is None:
            name = self.value("vllm_release")
            place = "vllm_release"
            origins["release",] = place
        if name is None:
            if not self._is_wrong("vllm_release") and not self._is_setting_misread(where, "release"):
                self._wrong(f"{where}.release", "is missing", "Set it, or vllm_release for all instances.")
            return None
        if name in self.releases:
            return self.releases[name]
        self.releases[name] = None
        site = self.value("vllm_releases")
        known = {*shipped_releases(), *site}
        if name not in known:
            if not self._is_misread(f"vllm_releases.{name}"):
                self._wrong(place, f"there is no release {name!r}", sentence(nearest(name, known)))
            return None
        release = self._read_release(name, place)
        if release is None:
            return None
        if release.package != package:
            self._wrong(place, f"release {name} is one of {release.package}", f"Name a release of {package}.")
            return None
        if release.lock_sha256 is None:
            self._wrong(
                place,
                f"release {name} has no lock, so nothing says which files it is made of",
                f"Make it where its indexes can be reached (make lock RELEASE={release.lock_of}), or use a release "
                "with one.",
            )
            return None
        try:
            self.problems.extend(release.set_problems())
        except ReleaseError as error:
            self._wrong(place, str(error), "Correct the lock.")
            return None
        self.releases[name] = release
        return release

    def _read_release(self, name: str, place: str) -> Release | None:
        """A release as it is defined, None where that is wrong, which is said once."""
        if name not in self.read:
            self.read[name] = None
            site = self.value("vllm_releases")
            try:
                self.read[name] = load_release(name, site, patches=self.patches)
            except (ReleaseError, OSError, TypeError) as error:
                wanted = _named_patches(site.get(name))
                if not any(self._is_misread(f"vllm_patches.{patch}") for patch in wanted):
                    problems = (error.problems if isinstance(error, ReleaseError) else []) or [("", str(error))]
                    for key, what in problems:
                        self._wrong(f"{place}.{key}" if key else place, what, "Correct the definition.")
        return self.read[name]

    @staticmethod
    def _place(where: str, key: str, origins: Mapping[tuple[str, ...], str]) -> str:
        """The variable in which a setting was written, for a message."""
        origin = origins.get((key,), "")
        return f"{origin}.{key}" if origin.startswith("vllm_") else f"{where}.{key}"

    def _base(self, instance: str, release: Release | None) -> Layer:
        """The lowest layer: what every instance has, from paths and limits."""
        serve = layer(
            {"serve": {"shutdown-timeout": self.value("vllm_service_shutdown_timeout_s")}},
            self._derived("vllm_service_shutdown_timeout_s"),
        )
        if release is None:
            return serve
        caches = self.caches_root
        own = f"{caches}/vllm/{instance}/{release.id}"
        programs = f"{self.releases_root}/{release.id}/bin"
        ready_s = self.value("vllm_service_start_timeout_s") - READINESS_RESERVE_S
        cuda = [] if release.variant == "cpu" else [CUDA_BIN]
        # Each by what it comes from, for whoever asks why it is so.
        environment = {
            # <release>/bin first: FlashInfer runs a bare `ninja`, which is there and nowhere else.
            f"{self._derived('uv_venv_root')}, release": {"PATH": ":".join([programs, *cuda, SYSTEM_PATH])},
            f"{self._derived('cache_dirs_root')}, release": {
                "HOME": own,
                "XDG_CACHE_HOME": f"{own}/xdg",
                "VLLM_CACHE_ROOT": own,
                # FlashInfer heeds neither XDG_CACHE_HOME nor the others: it takes this or HOME.
                "FLASHINFER_WORKSPACE_BASE": f"{caches}/flashinfer/{release.id}",
                "TRITON_CACHE_DIR": f"{caches}/triton/{release.id}",
                "TORCHINDUCTOR_CACHE_DIR": f"{caches}/torchinductor/{release.id}",
                "CUDA_CACHE_PATH": f"{caches}/nv/{release.id}",
                "HF_HOME": f"{caches}/huggingface/{release.id}",
            },
            f"{self._derived('vllm_service_start_timeout_s')} less {READINESS_RESERVE_S} s": {
                "VLLM_ENGINE_READY_TIMEOUT_S": str(ready_s)
            },
            "collection": {
                # An instance lives on one host. Without this torch's store listens on the address that a route to the
                # internet would have, which is a wrong one or none in an air gap.
                "VLLM_HOST_IP": "127.0.0.1",
                **OFFLINE,
            },
        }
        return merge_all(serve, *(layer({"environment": names}, origin) for origin, names in environment.items()))

    def _derived(self, name: str) -> str:
        return following(name, self.set)

    def _check_fit(self, where: str, profile: Profile, release: Release) -> None:
        carried = [chosen.patch.name for chosen in release.patches.apply]
        refusals = profile.refusals(release.vllm, carried, release.locked())
        for refusal in refusals:
            remedy = "Choose another release, or a profile in vllm_profiles that extends this one with its own range."
            if refusal.patch:
                remedy = self._patched_release(refusal.patch, release, profile)
            self._wrong(
                f"{where}.release",
                f"profile {profile.name} does not work with vLLM {release.vllm} of release {release.name}: "
                f"{refusal.reason}",
                remedy,
            )
        self._check_patches(where, profile, release, {refusal.patch for refusal in refusals})
        accelerator = profile.about.get("accelerator")
        if accelerator and accelerator != release.accelerator:
            self._wrong(
                f"{where}.release",
                f"profile {profile.name} is for {accelerator}, release {release.name} is a {release.variant} build",
                f"Choose a release for {accelerator}.",
            )

    def _check_patches(self, where: str, profile: Profile, release: Release, said: Collection[str | None]) -> None:
        """Whether the release carries what the profile needs with this vLLM; ``said`` is known to be missing."""
        wanted = [name for name in profile.patches if name not in said]
        if any(self._is_misread(f"vllm_patches.{name}") for name in wanted):
            return
        place = f"vllm_profiles.{profile.name}.patches" if profile.name in self.value("vllm_profiles") else ""
        try:
            needed = patches_for(
                release.vllm, wanted, self.patches, release.locked(), place or f"profile {profile.name}.patches"
            )
        except PatchCatalogueError as error:
            self.problems.extend(found for found in error.problems if found not in self.problems)
            return
        for chosen in needed.apply:
            if not release.carries(chosen.patch.name):
                self._wrong(
                    f"{where}.release",
                    f"profile {profile.name} needs patch {chosen.patch.name} with {chosen.patch.package} "
                    f"{chosen.version}, and release {release.name} lacks it: {chosen.patch.why.strip()}",
                    self._patched_release(chosen.patch.name, release, profile),
                )

    def _check_probes(self, where: str, profile: Profile, release: Release | None, toolchain: str | None) -> None:
        listed = profile.about.get("probes") or []
        site = f"vllm_profiles.{profile.name}" if profile.name in self.value("vllm_profiles") else ""
        for name in listed:
            if not is_probe(name) and not self._is_wrong(place := f"{site or f'profile {profile.name}'}.probes"):
                known = [*PROBES, "signature:<module.function>:<parameter>"]
                self._wrong(place, f"there is no probe {name!r}", sentence(nearest(name, known)))
        if release is not None and toolchain == "none" and self._needs_flashinfer(profile, release):
            self._wrong(
                f"{where}.release",
                f"profile {profile.name} needs FlashInfer, which vLLM does not use where there is neither a compiler "
                f"(vllm_toolchain is none) nor {CUBIN} (release {release.name} locks none)",
                f"Choose a release with {CUBIN}, or set vllm_toolchain: toolkit on a host with a CUDA toolkit.",
            )

    @staticmethod
    def _needs_flashinfer(profile: Profile, release: Release) -> bool:
        """Whether the profile needs FlashInfer, which vLLM uses where there is nvcc or flashinfer-cubin."""
        return "has-flashinfer" in (profile.about.get("probes") or []) and CUBIN not in release.locked()

    def _check_toolchain(
        self,
        where: str,
        off: Mapping[str, Any],
        found: Mapping[str, Mapping[str, Any]],
        origins: Mapping[tuple[str, ...], str],
    ) -> None:
        """Whether what a host without a toolchain needs is set, and nothing above it says otherwise."""
        for path, wanted in leaves(off):
            if len(path) < 2:
                continue
            if (value := _at(found, path)) == wanted:
                continue
            place = self._setting(where, path, origins)
            if not self._is_wrong(place):
                self._wrong(
                    place,
                    f"is {'removed' if value is None else value}, and vllm_toolchain none needs {wanted}: FlashInfer "
                    "would compile a kernel at run time, and the engine ends",
                    "Remove it, or set vllm_toolchain: toolkit on a host with a CUDA toolkit.",
                )

    def _patched_release(self, patch: str, release: Release, profile: Profile) -> str:
        """How to come to a release with a patch."""
        known = self.patches.get(patch)
        if known is None:
            return f"The profile names patch {patch}, which does not exist: {nearest(patch, self.patches)}"
        carrying = [name for name in shipped_releases() if patch in _shipped_patches(name)]
        past = [str(versions) for versions, _reason in known.needless if reaches(versions, profile)]
        return (
            "Choose a release that carries the patch"
            + (f" ({', '.join(carrying)})" if carrying else "")
            + (f", or one that does not need it ({' or '.join(past)})" if past else "")
            + f"; or define one in vllm_releases with patches: [{patch}] and the lock of {release.name}."
        )

    def _model_name(self, where: str, settings: Mapping[str, Any], key: str) -> str | None:
        name: str | None = settings.get(key)
        if name is None:
            return None
        models = self.value("vllm_models")
        if not MODEL_NAME.fullmatch(name):
            self._wrong(
                f"{where}.{key}",
                f"{name!r} is no model name",
                "Give a name of your own (letters, digits, dots, hyphens, underscores); the repository or directory "
                "stands in vllm_models.<name>.",
            )
            return None
        if name not in models and not self._is_misread(f"vllm_models.{name}"):
            self._wrong(
                f"{where}.{key}",
                f"vllm_models does not say where {name} comes from",
                f"Add vllm_models.{name} with repository and revision, or directory; {nearest(name, models)}",
            )
        return name

    def _port(self, where: str, settings: Mapping[str, Any]) -> int | None:
        port: int | None = settings.get("port")
        if port is None and not self._is_setting_misread(where, "port"):
            self._wrong(f"{where}.port", "is missing", "Set a port from 1024 to 65535.")
        return port

    def _check_address(self, where: str, address: str) -> None:
        try:
            ipaddress.ip_address(address)
        except ValueError:
            if address != "localhost":
                self._wrong(
                    f"{where}.host",
                    f"{address!r} is no address to listen on",
                    "Give an IP address of the host, 127.0.0.1, or 0.0.0.0 for all (the firewall stands before it).",
                )

    def _check_served(self, where: str, settings: Mapping[str, Any], origins: Mapping[tuple[str, ...], str]) -> None:
        """The name that clients ask for: it stands in LiteLLM's and HAProxy's configuration, in URLs and in logs."""
        name = settings.get("served_model_name")
        if name is None:
            return
        place = self._setting(where, ("served_model_name",), origins)
        if not SERVED_NAME.fullmatch(name) or "//" in name or name.startswith("os.environ/"):
            self._wrong(
                place,
                f"{name!r} is no name that a proxy passes on as it is",
                "Use letters, digits and ._:/@+- (as in org/model:tag), at most 128, the first and last a letter or "
                "digit. * would be every name, and os.environ/ a variable.",
            )

    def _networks(
        self, where: str, settings: Mapping[str, Any], origins: dict[tuple[str, ...], str], address: str
    ) -> list[str]:
        own = settings.get("networks")
        # Where a proxy stands before the instances, clients have no way past it.
        names = ("vllm_instance_networks", "vllm_client_networks")
        general = next((name for name in names if name in self.set or self._is_wrong(name)), None)
        if own is None and self._is_setting_misread(where, "networks"):
            return []
        if own is None and general is not None:
            own = self.value(general)
            origins["networks",] = general
            where = general
        elif own is None:
            if address not in ("localhost", "127.0.0.1", "::1"):
                self._wrong(
                    "vllm_client_networks",
                    "is not set: nobody could reach the instances through the firewall",
                    "List the clients' networks, or set `networks` of the instance ([] for nobody).",
                )
            return []
        else:
            where = f"{where}.networks"
        return self._merged_networks(where, own)

    def _merged_networks(self, where: str, networks: Sequence[Any]) -> list[str]:
        from .networks import split_networks  # noqa: PLC0415 - netaddr is the slowest import of the plan

        if self._is_wrong(where):
            return []
        try:
            four, six = split_networks(networks)
        except ValueError as error:
            self._wrong(where, str(error), "Correct the networks named.")
            return []
        return [*four, *six]

    def _gpus(self, where: str, settings: Mapping[str, Any], release: Release | None) -> list[int | str]:
        gpus: list[int | str] = []
        for gpu in settings.get("gpus") or []:
            if isinstance(gpu, str) and gpu.isdecimal():
                gpus.append(int(gpu))
            elif (isinstance(gpu, int) and not isinstance(gpu, bool) and gpu >= 0) or (
                isinstance(gpu, str) and re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{8,}", gpu)
            ):
                gpus.append(gpu)
            else:
                self._wrong(f"{where}.gpus", f"{gpu!r} is no GPU", "Name GPUs by index (0, 1) or UUID (GPU-…).")
        twice = sorted({str(gpu) for gpu in gpus if gpus.count(gpu) > 1})
        if twice:
            self._wrong(f"{where}.gpus", f"GPU {', '.join(twice)} stands twice", "Name each GPU once.")
        if gpus and release is not None and release.variant == "cpu":
            self._wrong(
                f"{where}.gpus", f"release {release.name} runs on the CPU", "Remove gpus, or choose a CUDA release."
            )
        return gpus

    def _serve(
        self,
        where: str,
        serve: Any,
        origins: Mapping[tuple[str, ...], str],
        gpus: Sequence[int | str],
        release: Release | None,
    ) -> dict[str, Any]:
        result: dict[str, Any] = {}
        if not isinstance(serve, dict):
            return result
        for flag, value in serve.items():
            place = self._setting(where, ("serve", flag), origins)
            if flag in RESERVED_SERVE or flag.replace("_", "-") in RESERVED_SERVE:
                self._wrong(place, "is not set here", RESERVED_SERVE[flag.replace("_", "-")])
            elif not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", flag):
                written = re.sub(r"[^a-z0-9]+", "-", flag.lower()).strip("-")
                remedy = f"Write {written}." if written else "Remove it."
                self._wrong(place, f"{flag!r} is not the long name of an argument", remedy)
            elif not _is_json(value):
                self._wrong(
                    place, f"{value!r} cannot be passed to vLLM", "Give text, a number, a boolean, a list or a map."
                )
            else:
                result[flag] = value
        if release is not None:
            result = serve_catalogue.plainly(release.vllm, result)
        # null in place of all arguments took it away, too, which has been said.
        if f"{where}.serve" not in self.removed:
            self._check_shutdown(where, result.get("shutdown-timeout"), origins)
        choice, parser = ("serve", "enable-auto-tool-choice"), ("serve", "tool-call-parser")
        if result.get(choice[1]) is True and not result.get(parser[1]):
            if parser in origins and parser[1] not in serve:
                self._wrong(
                    self._setting(where, parser, origins),
                    f"is removed, and vLLM refuses to start without it where {choice[1]} is set "
                    f"({self._setting(where, choice, origins)})",
                    f"Leave the parser of the model's family, or set serve.{choice[1]} to null as well.",
                )
            elif not self._is_wrong(self._setting(where, parser, origins)):
                self._wrong(
                    self._setting(where, choice, origins),
                    f"vLLM refuses to start with it when {parser[1]} is not set",
                    f"Set serve.{parser[1]} to the parser of the model's family.",
                )
        self._check_parallel(where, result, gpus)
        return result

    def _check_shutdown(self, where: str, shutdown_s: Any, origins: Mapping[tuple[str, ...], str]) -> None:
        """Whether vLLM ends by itself before systemd kills it."""
        stop_s = self.value("vllm_service_stop_timeout_s")
        origin = origins.get(("serve", "shutdown-timeout"), "")
        place = self._setting(where, ("serve", "shutdown-timeout"), origins)
        place = "vllm_service_shutdown_timeout_s" if origin.startswith("from ") else place
        if not isinstance(shutdown_s, int) or isinstance(shutdown_s, bool) or shutdown_s < 0:
            what = "is removed" if shutdown_s is None else f"is {shutdown_s!r}"
            self._wrong(place, f"{what}, no whole number of seconds", f"Give one from 0 to {stop_s - 1}.")
        elif shutdown_s >= stop_s and not self._is_wrong("vllm_service_stop_timeout_s"):
            self._wrong(
                place,
                f"is {shutdown_s}, not below the stop limit of {stop_s} s: requests in flight would be killed",
                "Lower it, or raise vllm_service_stop_timeout_s.",
            )

    def _check_parallel(self, where: str, serve: Mapping[str, Any], gpus: Sequence[int | str]) -> None:
        for flag in PARALLEL_SIZES:
            size = serve.get(flag, 1)
            if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= LARGEST_SIZE:
                self.wrong_sizes.add(f"{where}.{flag}")
                shown = repr(size)[:80]
                self._wrong(f"{where}.serve.{flag}", f"is {shown}", f"Give a whole number from 1 to {LARGEST_SIZE}.")
                return
        needed = gpus_of(serve)
        if gpus and len(gpus) != needed and not self._is_wrong(f"{where}.gpus"):
            self._wrong(
                f"{where}.gpus",
                f"names {len(gpus)} GPUs, the parallel sizes in serve make {needed}",
                "Name as many GPUs, or set serve.tensor-parallel-size.",
            )

    def _check_size(
        self, where: str, profile: Profile, serve: Mapping[str, Any], origins: Mapping[tuple[str, ...], str]
    ) -> None:
        """Whether the parallel sizes make more GPUs than the profile is for."""
        meant, needed = (profile.about.get("hardware") or {}).get("gpus"), gpus_of(serve)
        if not meant or needed <= meant or self.wrong_sizes:
            return
        own = self._designed(profile.name).get("serve") or {}
        changed = next((flag for flag in PARALLEL_SIZES if serve.get(flag, 1) != own.get(flag, 1)), PARALLEL_SIZES[0])
        self._warn(
            self._setting(where, ("serve", changed), origins),
            f"the parallel sizes in serve make {needed} GPUs, and profile {profile.name} is for {meant}",
            "Lower them, or say hardware.gpus in a profile of your own that extends this one.",
            f"hardware of profile {profile.name}",
        )

    def _setting(self, where: str, path: tuple[str, ...], origins: Mapping[tuple[str, ...], str]) -> str:
        """Where a setting was written: the variable's path, or the profile's. Of a map, what lies uppermost in it."""
        found = [origins[path]] if path in origins else [origins[key] for key in origins if key[: len(path)] == path]
        origin = min(
            found, key=lambda one: next((at for at, name in enumerate(_UPPER) if one.startswith(name)), 9), default=""
        )
        dotted = ".".join(path)
        if origin.startswith(("vllm_", "profile ", "release ")):
            return f"{origin}.{dotted}"
        return f"{where}.{dotted}"

    def _check_removed(self, where: str, below: Layer, layers: Sequence[Layer], release: Release | None) -> None:
        """null in place of a whole map takes away the profile's arguments or PATH without a word; misspelt, nothing."""
        for upper in layers:
            for key in ("serve", "environment"):
                found = upper.children.get(key) if isinstance(upper, Branch) else None
                place = f"{found.origin}.{key}" if found and found.origin.startswith("vllm_") else f"{where}.{key}"
                if isinstance(found, Leaf) and found.value is None:
                    self.removed.add(f"{where}.{key}")
                    if not self._is_wrong(place):  # once for all instances of a group
                        self._wrong(
                            place,
                            "is null, which takes away all of it, what profile and collection set included",
                            f"Remove the line, or set single entries below {key} to null.",
                        )
                elif isinstance(found, Branch) and release is not None:
                    there = (resolve(below)[0].get(key) or {}).keys()
                    gone = (name for name, one in found.children.items() if isinstance(one, Leaf) and one.value is None)
                    self._check_void(place, key, [name for name in gone if name not in there], there, release)
            below = merge_all(below, upper)

    def _check_void(self, place: str, key: str, names: Sequence[str], there: Collection[str], release: Release) -> None:
        """null for what is not set and vLLM does not know: another one was meant, and stays as it is."""
        unknown = serve_catalogue.unknown_flags if key == "serve" else serve_catalogue.unknown_environment
        for name in unknown(release.vllm, names):
            if not self._is_wrong(f"{place}.{name}"):
                self._wrong(
                    f"{place}.{name}",
                    f"is null, which takes out nothing: vLLM {release.vllm} knows no such name, and none is set",
                    f"Write the name of what shall go, or remove the line: {nearest(name, there)}",
                )

    def _check_draft(
        self,
        where: str,
        profile: Profile,
        settings: Mapping[str, Any],
        origins: Mapping[tuple[str, ...], str],
        serve: Mapping[str, Any],
    ) -> None:
        """Whether draft model and speculative-config belong together."""
        draft, speculative = settings.get("draft_model"), serve.get("speculative-config")
        designed = self._designed(profile.name)
        place = self._setting(where, ("serve", "speculative-config"), origins)
        removed = f"{where}.draft_model"
        if (
            draft is None
            and designed.get("draft_model")
            and isinstance(speculative, dict)
            and "model" not in speculative
        ):
            self._wrong(
                self._setting(where, ("draft_model",), origins),
                f"is removed, and serve.speculative-config still asks for the draft of profile {profile.name}",
                "Set serve.speculative-config to null as well, or leave draft_model.",
            )
        if draft is None or self._is_wrong(place):
            return
        if speculative is None and f"{where}.serve" not in self.removed:
            self._warn(
                removed,
                f"{draft} is staged, and no speculative-config uses it",
                "Set draft_model to null as well, or serve.speculative-config.",
                "vLLM drafts nothing without --speculative-config",
            )
        if not isinstance(speculative, dict):
            return  # no map, which the version's own check says
        kind, by = self._drafted_by(draft, profile)
        method = serve_catalogue.speculative_method(speculative)
        if kind is not None and method != kind:
            self._wrong(
                self._setting(where, ("serve", "speculative-config", "method"), origins),
                f"is {method!r}, and the draft {draft} is of the kind {kind!r} by {by}: vLLM stops at an assertion "
                "while it loads the draft",
                f"Write {kind}, or name another draft_model.",
            )
        elif serve_catalogue.drafts_alone(speculative):
            self._warn(
                removed,
                f"{draft} is staged, and method {method} of speculative-config uses no draft model",
                "Set draft_model to null, or another method.",
                "vllm/config/speculative.py, SpeculativeConfig.__post_init__",
            )

    def _drafted_by(self, draft: str, profile: Profile) -> tuple[str | None, str]:
        """The method that a draft is made for, and who says so: its own files, or the profile that pairs the two."""
        if (kind := self.shelf.drafted_by(draft)) is not None:
            return kind, "its config.json"
        for name in reversed(profile.chain):  # what a site lays over a shipped profile changes no draft
            designed = self._designed(name) if name == profile.name or name not in self.value("vllm_profiles") else {}
            kind = serve_catalogue.speculative_method((designed.get("serve") or {}).get("speculative-config"))
            if kind is not None and draft == designed.get("draft_model"):
                return kind, f"profile {name}"
        return None, ""

    def _check_version(
        self,
        where: str,
        release: Release,
        settings: Mapping[str, Mapping[str, Any]],
        origins: Mapping[tuple[str, ...], str],
        longest: int | None,
    ) -> None:
        """The arguments against the vLLM that will run; ``longest`` is the model's own context."""
        if serve_catalogue.serve_catalogue(release.vllm) is None:
            self.uncatalogued.setdefault(release.vllm, release.name)
        for found in serve_catalogue.findings(release.vllm, settings["serve"], longest):
            place = self._setting(where, ("serve", found.flag), origins)
            if found.stops and f"{where}.{found.flag}" not in self.wrong_sizes and not self._is_wrong(place):
                self._wrong(place, found.what, found.remedy)
            elif not found.stops:
                self._warn(place, found.what, found.remedy, found.source)
        for name, kind, remedy in serve_catalogue.wrong_environment(release.vllm, settings["environment"]):
            self._wrong(
                self._setting(where, ("environment", name), origins),
                f"is {settings['environment'][name]!r}, which vLLM {release.vllm} reads as {kind}, and ends",
                remedy,
            )
        for name in serve_catalogue.unknown_environment(release.vllm, list(settings["environment"])):
            self._warn(
                self._setting(where, ("environment", name), origins),
                f"vLLM {release.vllm} knows no environment variable of this name",
                serve_catalogue.nearest_environment(release.vllm, name),
                f"vllm/envs.py of {release.vllm}",
            )

    def _named_models(
        self, where: str, serve: Mapping[str, Any], origins: Mapping[tuple[str, ...], str]
    ) -> tuple[str | None, list[str]]:
        """The draft and all models that arguments name by their paths: they have to be staged like the model itself."""
        draft: str | None = None
        models: list[str] = []
        for named in named_paths(serve):
            place = self._setting(where, ("serve", *named.at), origins)
            name = named.below(self.models_root)
            argument = self._setting(where, ("serve", named.at[0]), origins)
            if any(self._is_wrong(one) for one in (argument, place, "hf_cache_root")):
                continue
            if not named.absolute or ".." in named.path.split("/"):
                hub = ", and vLLM would ask the Hub for it, which no host reaches" if named.repository else ""
                self._wrong(
                    place,
                    f"is {named.path!r}, no absolute path{hub}",
                    f"Stage it with vllm_models and write {self.models_root}/<name>, or the file's whole path.",
                )
            elif name is None:
                self._warn(
                    place,
                    f"is {named.path}, where nothing of the collection puts anything",
                    f"See that it is there and that the service user may read it, or stage it with vllm_models below "
                    f"{self.models_root}.",
                    "vllm_models is all that a bundle carries",
                )
            elif name not in self.value("vllm_models"):
                if not self._is_misread(f"vllm_models.{name}"):
                    self._wrong(
                        place,
                        f"is {named.path}, and vllm_models does not say where {name} comes from",
                        f"Add vllm_models.{name}; {nearest(name, self.value('vllm_models'))}",
                    )
            else:
                models.append(name)
                draft = name if named.draft else draft
        return draft, models

    def _check_model(
        self,
        where: str,
        model: str,
        draft: str | None,
        release: Release | None,
        settings: Mapping[str, Mapping[str, Any]],
        origins: Mapping[tuple[str, ...], str],
        about: Mapping[str, Any],
    ) -> None:
        """The model's own files, where they are at hand, against arguments and release."""
        for name in filter(None, (model, draft)):
            for found in self.shelf.missing(name, draft=name != model):
                place = f"vllm_models.{name}"
                if all(other["what"] != found or other["where"] != place for other in self.problems):
                    self._wrong(place, found, "Complete the model's directory, or stage it anew.")
        version = release.vllm if release is not None else None
        for finding in self.shelf.findings(model, version, settings["serve"], settings["environment"], about):
            place = self._setting(where, ("serve", finding.flag), origins) if finding.flag else f"{where}.model"
            if finding.stops:
                self._wrong(place, finding.what, finding.remedy)
            else:
                self._warn(place, finding.what, finding.remedy, finding.source)

    def _estimate(self, instance: Mapping[str, Any]) -> dict[str, Any]:
        """Whether the instance fits the memory of the GPUs that its profile is for."""
        about = instance["_profile"].about
        described = self._describes(instance["_profile"], instance["model"])
        settings = instance["serve"], instance["environment"]
        found = self.shelf.estimate(instance["model"], instance["_draft"], *settings, about, described)
        where = f"vllm_instances.{instance['name']}"
        # Whoever has to correct an argument corrects the sum with it.
        sure = not self._is_wrong(where) and not self._is_setting_misread(where, "serve", instance["_profile"])
        if found["verdict"] in ("does not fit", "tight") and sure:
            self._say_estimate(where, instance["profile"], found)
        return {"for": f"instance {instance['name']}", **found}

    def _say_estimate(self, where: str, profile: str, found: Mapping[str, Any]) -> None:
        if (least := found.get("least_gpu_memory_gib")) is not None:
            there = found["gpu_memory_gib"]
            what = f"{least} GiB per GPU are needed for one sequence of full context, and profile {profile} is for "
            otherwise = "Use more or larger GPUs, or a smaller model."
        else:
            least, there = found["full_context_gib"], found["kv_cache_gib"]
            what = f"{least} GiB of KV cache are needed for one sequence of full context, and {CPU_CACHE} gives "
            otherwise = ""
        what = f"{what}{there:g} GiB"
        rung = found.get("remedy")
        remedy = f"{sentence(rung['what'])}: {settings_of(rung)}." if rung else ""
        if found["verdict"] == "tight":
            self._warn(
                where,
                f"fits tightly: {what}: too little stays free beside it",
                remedy or "Expect it to run out of memory under load.",
                "docs/memory.md",
            )
            return
        remedy = remedy or otherwise
        beyond = least > there * (1 + UNSURE_SHARE)
        waived = MEMORY_FINDING in self.value("preflight_waived") or self._is_wrong("preflight_waived")
        if beyond and "doubt" not in found and not waived:
            self._wrong(where, what, f"{remedy} Where you know better, name {MEMORY_FINDING} in preflight_waived.")
        else:
            doubt = f"; {found['doubt']}" if "doubt" in found else ""
            self._warn(where, what + doubt, remedy, "docs/memory.md")

    def _environment(
        self,
        where: str,
        environment: Any,
        origins: Mapping[tuple[str, ...], str],
        release: Release | None,
    ) -> dict[str, str]:
        result: dict[str, str] = {}
        if not isinstance(environment, dict):
            return result
        decided = {} if release is None else release.flashinfer.environment()
        for name in decided.keys() - environment.keys():
            self._wrong(
                self._setting(where, ("environment", name), origins),
                f"is removed, and release {release.name if release else ''} is made to run with it",
                "Leave it, or choose a release whose FlashInfer packages are one set.",
            )
        for name, value in environment.items():
            place = self._setting(where, ("environment", name), origins)
            if name == VERSION_CHECK_SWITCH:
                if origins.get(("environment", name), "").startswith("release "):
                    result[name] = decided[name]
                elif release is not None:
                    self._wrong(
                        place,
                        "is a release's decision: it lets FlashInfer run with parts that do not belong together",
                        "Remove it. If the mix is meant, declare it in a release: flashinfer with overrides, a reason "
                        "and disable_version_check: true.",
                    )
                continue
            if not ENVIRONMENT_NAME.fullmatch(name):
                self._wrong(place, f"{name!r} is no name of an environment variable", "Use letters, digits and _.")
            elif name.startswith(OWNED_PREFIX) or value != OFFLINE.get(name, value):
                self._wrong(place, "is set by the collection and open to nobody", "Remove it.")
            elif name in RESERVED_ENVIRONMENT:
                self._wrong(place, "is not set here", RESERVED_ENVIRONMENT[name])
            elif SECRET_NAME.fullmatch(name):
                self._wrong(place, "looks like a secret", f"Put {name} into vllm_secrets, from a vault.")
            elif isinstance(value, (bool, dict, list)) or not isinstance(value, (str, int, float)):
                self._wrong(place, f"is {value!r}, and an environment is text", 'Write it in quotes, such as "1".')
            elif isinstance(value, str) and ("\0" in value or not value.isprintable()):
                self._wrong(place, "holds control characters", "Write it as one line of printable text.")
            else:
                result[name] = value if isinstance(value, str) else str(value)
        return result

    def _secrets(self, instance: str, environment: Mapping[str, str]) -> list[str]:
        where = f"vllm_secrets.{instance}"
        names: list[str] = []
        for name, value in (self.value("vllm_secrets").get(instance) or {}).items():
            if not ENVIRONMENT_NAME.fullmatch(name):
                self._wrong(f"{where}.{name}", "is no name of an environment variable", "Use letters, digits and _.")
            elif name.startswith(OWNED_PREFIX):
                self._wrong(f"{where}.{name}", "is set by the collection and open to nobody", "Remove it.")
            elif name == VERSION_CHECK_SWITCH:
                self._wrong(f"{where}.{name}", "is a release's decision, and no secret", "Remove it.")
            elif name in RESERVED_ENVIRONMENT:
                self._wrong(f"{where}.{name}", "is no secret", RESERVED_ENVIRONMENT[name])
            elif name in environment or name in OFFLINE:
                self._wrong(f"{where}.{name}", "stands in the environment, too", "Keep one of the two.")
            elif isinstance(value, Sealed):
                names.append(name)
            elif not isinstance(value, str) or not value:
                self._wrong(f"{where}.{name}", "is empty or no text", "Give the value in quotes.")
            elif not value.isprintable():
                self._wrong(f"{where}.{name}", "holds control characters", "Give one line of printable text.")
            else:
                names.append(name)
        return sorted(names)

    # -- the whole host --------------------------------------------------------------------------------------------

    def _mirror(self) -> dict[str, Any]:
        url = self.value("vllm_mirror_url")
        if url is None:
            if not self._is_wrong("vllm_mirror_url") and {"vllm", "proxy"} & {*self.groups}:
                self._wrong(
                    "vllm_mirror_url", "is not set: hosts would have nothing to install from", "Set http://<mirror>."
                )
            return {"url": None}
        try:
            parts = urlsplit(url)
            fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            fits = False
        if not fits or parts.query or parts.fragment or parts.username is not None or re.search(r"\s", url):
            self._wrong(
                "vllm_mirror_url",
                f"{url!r} is no address of a mirror",
                "Write http://<host>[:port][/path], without user, query or fragment.",
            )
        elif "mirror" in self.groups:
            asked = parts.port or {"http": 80, "https": 443}[parts.scheme]
            if asked != (serves := self.value("wheel_mirror_port")):
                self._warn(
                    "vllm_mirror_url",
                    f"asks port {asked}, and the mirror serves on {serves}",
                    "Correct one of the two, unless something between them forwards.",
                    "wheel_mirror_port",
                )
        return {"url": url.rstrip("/")}

    def _uv(self, releases: Sequence[Release]) -> dict[str, Any]:
        uv = load_uv()
        machines = sorted({release.machine for release in releases})
        if len(machines) > 1:
            self._wrong(
                "vllm_instances",
                f"releases for {' and '.join(machines)} on one host",
                "Choose releases of the host's architecture.",
            )
        wheel = uv["wheels"][machines[0] if machines else "x86_64"]
        return {"version": uv["version"], "file": wheel["file"], "sha256": wheel["sha256"]}

    def _models(self, instances: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        root = self.models_root
        known = self.value("vllm_models")
        models: dict[str, dict[str, Any]] = {}
        for name in [name for instance in instances for name in instance["_models"]]:
            source = known.get(name) or {}
            models[name] = {"name": name, "path": f"{root}/{name}", "manifest_sha256": source.get("manifest_sha256")}
        return list(models.values())

    def _packages(
        self,
        instances: Sequence[Mapping[str, Any]],
        releases: Sequence[Release],
        catalogue: Mapping[str, Any],
    ) -> list[dict[str, str]]:
        packages: dict[str, list[str]] = {}
        for entry in catalogue["roles"]:
            if set(entry["groups"]) & set(self.groups):
                for name in entry.get("packages", []):
                    packages.setdefault(name, []).append(f"role {entry['role']}")
        if "proxy" in self.groups:
            for name in database_packages(self.value("litellm_proxy_database")):
                packages.setdefault(name, []).append("keys in PostgreSQL (litellm_proxy_database)")
        for release in releases:
            if release.interpreter is None:
                packages.setdefault(f"python{release.python}", []).append(f"release {release.name}")
            kinds = [release.accelerator]
            if release.accelerator == "cuda":
                kinds.append(f"toolchain_{self.value('vllm_toolchain')}")
            for package in [found for kind in kinds for found in catalogue["packages"].get(kind, [])]:
                name = package["name"].format(python=release.python)
                if name.startswith("python") and release.interpreter is not None:
                    continue  # an interpreter archive brings its headers
                packages.setdefault(name, []).append(f"release {release.name}: {package['for']}")
        for instance in instances:
            for package in instance["_profile"].about.get("packages") or []:
                packages.setdefault(package["name"], []).append(f"profile {instance['profile']}: {package['for']}")
        return [{"name": name, "for": "; ".join(dict.fromkeys(needed))} for name, needed in packages.items()]

    def _firewall_ports(self, instances: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        ports: list[dict[str, Any]] = [
            {
                "port": instance["port"],
                "protocol": "tcp",
                "networks": instance["_networks"],
                "for": f"instance {instance['name']}",
            }
            for instance in instances
            if instance["_networks"]
        ]
        if "mirror" in self.groups:
            networks = self._merged_networks("vllm_mirror_networks", self.value("vllm_mirror_networks"))
            if not networks and not self._is_wrong("vllm_mirror_networks"):
                self._wrong(
                    "vllm_mirror_networks",
                    "is empty: no host could reach the mirror through its firewall",
                    "List the networks of the hosts that the mirror serves.",
                )
            if not self.value("wheel_mirror_bundle") and not self._is_wrong("wheel_mirror_bundle"):
                self._wrong(
                    "wheel_mirror_bundle",
                    "is not set on a host of group mirror",
                    "Name the bundle's directory on the control node, which playbooks/bundle.yml makes.",
                )
            ports.append(
                {"port": self.value("wheel_mirror_port"), "protocol": "tcp", "networks": networks, "for": "mirror"}
            )
        if "proxy" in self.groups:
            networks = self._merged_networks("vllm_client_networks", self.value("vllm_client_networks"))
            if not networks and not self._is_wrong("vllm_client_networks"):
                self._wrong(
                    "vllm_client_networks",
                    "is empty: nobody could reach the proxy through its firewall",
                    "List the clients' networks.",
                )
            port = self.value("litellm_proxy_port")
            ports.append({"port": port, "protocol": "tcp", "networks": networks, "for": "proxy"})
        return ports

    def _waived(self) -> dict[str, list[str]]:
        """Findings that the operator takes on, by the role that would stop at them."""
        waived = {"preflight": "preflight_waived", "flashinfer": "flashinfer_waived"}
        for role, name in waived.items():
            self.origins[f"waived.{role}"] = name if name in self.set else "default"
        return {role: self.value(name) for role, name in waived.items()}

    def _unit(self) -> dict[str, Any]:
        """What the unit of every instance has, from vllm_service_*."""
        settings = {
            name.removeprefix("vllm_service_"): name
            for name, option in known_variables().items()
            if option.get("role") == "vllm_service" and name.removeprefix("vllm_service_") in UNIT_SETTINGS
        }
        for key, name in settings.items():
            self.origins[f"unit.{key}"] = name if name in self.set else "default"
        return {key: self.value(name) for key, name in sorted(settings.items())}

    def _proxy(self) -> dict[str, Any]:
        """What the proxy will be, without its keys."""
        name = "litellm_proxy_database"
        if what := database_problem(self.value(name)):
            self._wrong(name, what, "Correct it; the server's password is litellm_proxy_database_password, in a vault.")
        part, origins = proxy_part(self.value, self.set)
        self.origins |= origins
        return part

    def _ssh(self) -> dict[str, Any]:
        """Who may reach SSH once the firewall stands; port null is the one that the connection came in on."""
        name = "nftables_ssh_networks"
        for path, variable in (("networks", name), ("port", "nftables_ssh_port")):
            self.origins[f"firewall.ssh.{path}"] = variable if variable in self.set else "default"
        return {
            "port": self.value("nftables_ssh_port"),
            "networks": self._merged_networks(name, self.value(name)),
        }

    def _needs(
        self, instances: Sequence[Mapping[str, Any]], releases: Sequence[Release], catalogue: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What preflight compares with the host's facts."""
        hardware = [(found["name"], found["_profile"].about.get("hardware") or {}) for found in instances]
        disk = catalogue["disk"]
        spaces = [
            {
                "path": f"{self.releases_root}/{release.id}",
                "gib": disk["release"][release.accelerator],
                "for": f"release {release.name}",
            }
            for release in releases
        ]
        for instance in instances:
            size = (instance["_profile"].about.get("hardware") or {}).get("model_gib")
            if size:
                spaces.append(
                    {"path": instance["serve"]["model"], "gib": size, "for": f"model {instance['model']} and its draft"}
                )
        if instances:
            spaces.append({"path": f"{self.caches_root}/vllm", "gib": disk["caches"], "for": "caches"})
        listens = [
            {
                "port": found["port"],
                "unit": f"vllm-{found['name']}.service",
                "address": found["host"],
                "for": f"instance {found['name']}",
            }
            for found in instances
        ]
        listens += [
            {"port": port.number, "unit": port.unit, "address": port.address, "for": port.who}
            for port in role_ports(self.groups, self.value)
            if port.unit
        ]
        return {
            "platforms": [
                {"machine": release.machine, "glibc": list(release.glibc), "for": f"release {release.name}"}
                for release in releases
            ],
            "pythons": [
                {"version": release.python, "for": f"release {release.name}"}
                for release in releases
                if release.interpreter is None
            ],
            "drivers": [
                {"version": catalogue["drivers"][release.variant], "variant": release.variant, "for": release.name}
                for release in releases
                if release.variant in catalogue["drivers"]
            ],
            "gpus": [
                {
                    "count": max(wanted.get("gpus", 1), gpus_of(found["serve"])),
                    "named": found["gpus"],
                    "memory_gib": wanted.get("gpu_memory_gib"),
                    "compute_capability": wanted.get("compute_capability"),
                    "architectures": list(found["_release"].architectures),
                    "release": found["release"],
                    "toolkit": found["_toolkit"],
                    "for": f"instance {found['name']}",
                }
                for found, (_unused, wanted) in zip(instances, hardware, strict=True)
                if found["_profile"].about.get("accelerator") == "cuda"
            ],
            "memory_gib": [
                {"gib": gib, "for": f"instance {found['name']}"}
                for found in instances
                if (gib := self._host_memory(found, catalogue["memory"]))
            ],
            "disk": spaces,
            "models": self._models_to_look_at(instances),
            "decide": [{"for": f"instance {found['name']}", **one} for found in instances for one in found["_decide"]],
            "shm_mib": disk["shm_mib"] if instances else 0,
            "ports": listens,
            # A host whose apt has been told no mirror yet cannot say what that mirror will have.
            "apt_source": self.value("host_base_apt_source") is not None,
        }

    def _models_to_look_at(self, instances: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Models whose files are not at hand here: a host may have them, where they are served from or on its share."""
        share = self.value("hf_cache_share")
        found: dict[str, dict[str, Any]] = {}
        for instance in instances:
            for name in instance["_models"]:
                if not self.shelf.is_at_hand(name):
                    paths = [f"{self.models_root}/{name}", *([f"{share.rstrip('/')}/{name}"] if share else [])]
                    draft = name != instance["model"] or bool((self.value("vllm_models").get(name) or {}).get("draft"))
                    entry = found.setdefault(name, {"name": name, "paths": paths, "draft": draft, "for": []})
                    entry["for"].append(f"instance {instance['name']}")
        return list(found.values())

    def _host_memory(self, instance: Mapping[str, Any], floor: Mapping[str, float]) -> float:
        """GiB of the host's memory that an instance needs: what its profile says, and what its settings add."""
        profile, serve, gpus = instance["_profile"], instance["serve"], gpus_of(instance["serve"])
        least = (profile.about.get("hardware") or {}).get("memory_gib")
        if profile.about.get("accelerator") == "cpu":
            ours, own = instance["environment"], self._designed(profile.name).get("environment") or {}
            return (least or 0) + max(cpu_cache_gib(ours) - (cpu_cache_gib(own) if least else 0), 0)
        if least is None:
            least = floor["process_gib"] * (2 + (gpus if gpus > 1 else 0)) + floor["loading_gib"]
        return least + host_memory_gib(serve, gpus)

    def _notes(self, instances: Sequence[Mapping[str, Any]], releases: Sequence[Release]) -> list[dict[str, str]]:
        """What is right and worth knowing."""
        notes = [
            {"where": f"release {release.name}", "what": f"patch {one.name} is left out: {one.reason}"}
            for release in releases
            for one in release.patches.needless
        ]
        notes += [
            {"where": f"release {release.name}", "what": f"FlashInfer is its own choice: {release.flashinfer.reason}"}
            for release in releases
            if release.flashinfer.reason
        ]
        notes += [
            {
                "where": f"release {name}",
                "what": f"the arguments of vLLM {version} are not catalogued, so names, types and parsers are checked "
                f"on the host only; make catalogue VERSION={version} adds them",
            }
            for version, name in self.uncatalogued.items()
        ]
        for instance in instances:
            notes += self.shelf.notes(instance["model"], f"vllm_instances.{instance['name']}.model")
            if PREVIOUS_KEY in instance["secrets"]:
                notes.append(
                    {
                        "where": f"vllm_secrets.{instance['name']}.{PREVIOUS_KEY}",
                        "what": "is taken as well; remove it once every instance and proxy has the new key",
                    }
                )
            if API_KEY not in instance["secrets"] and instance["_networks"]:
                notes.append(
                    {
                        "where": f"vllm_instances.{instance['name']}",
                        "what": f"has no {API_KEY} in vllm_secrets.{instance['name']}: whoever reaches port "
                        f"{instance['port']} may use it",
                    }
                )
            release, profile = instance["_release"], instance["_profile"]
            if release.profiles and not set(release.profiles) & set(profile.chain):
                notes.append(
                    {
                        "where": f"vllm_instances.{instance['name']}.release",
                        "what": f"release {release.name} is made for {', '.join(release.profiles)}; "
                        f"nobody has said that it suits {profile.name}",
                    }
                )
        return notes

    def _check_conflicts(self, instances: Sequence[Mapping[str, Any]]) -> None:
        """What two parts of the host may not both have."""
        ports = [port for port in role_ports(self.groups, self.value) if not self._is_wrong(port.where)]
        for claim in self.claims:
            ports += instance_ports(claim["name"], claim["port"], claim["serve"])
        self.warnings.extend(monitoring_ports(ports))
        models = [name for found in instances for name in found["_models"]]
        for found in (
            *port_problems(ports),
            *directory_problems(directories(self.groups, self.value, models)),
            *account_problems(self.groups, self.value),
        ):
            if not self._is_wrong(found["where"]):
                self.problems.append(found)

    def _check_hidden(self) -> None:
        """What is set for the host and every instance sets itself, which counts: the host's value does nothing."""
        instances = {name: own or {} for name, own in self.value("vllm_instances").items()}
        for path, value in leaves(self.value("vllm_host_overrides")):
            above = {name: _above(own, path, value) for name, own in instances.items()}
            if not above or not all(above.values()):
                continue
            beaten = " and ".join(f"vllm_instances.{name}.{'.'.join(at)}" for name, at in above.items())
            self._warn(
                ".".join(("vllm_host_overrides", *path)),
                f"changes nothing: what counts is {beaten}",
                "Move it from vllm_instances to vllm_group_overrides (below the host's), or remove this line.",
                'docs/design.md, "The plan"',
            )

    def _check_shared_gpus(self) -> None:
        gpus: dict[int | str, str] = {}
        everything: str | None = None
        for claim in self.claims:
            name = claim["name"]
            where = f"vllm_instances.{name}"
            for gpu in claim["gpus"]:
                if (other := gpus.setdefault(gpu, name)) != name:
                    self._wrong(
                        f"{where}.gpus",
                        f"GPU {gpu} is taken by instance {other} on the same host",
                        "Give each instance GPUs of its own.",
                    )
            if claim["accelerator"] != "cuda" or not claim["gpus_read"]:
                continue
            taken = everything or (next(iter(gpus.values()), None) if not claim["gpus"] else None)
            if taken is not None and taken != name:
                self._wrong(
                    f"{where}.gpus",
                    f"instances {taken} and {name} share GPUs: one that names none uses all of the host",
                    "Name the GPUs of each instance.",
                )
            everything = everything or (None if claim["gpus"] else name)

    def _check_models(self) -> None:
        for name, model in self.value("vllm_models").items():
            where = f"vllm_models.{name}"
            if not MODEL_NAME.fullmatch(name):
                self._wrong(where, f"{name!r} is no directory name", "Use letters, digits, dots, hyphens and _.")
            model = model or {}  # noqa: PLW2901 - an entry may be empty
            sources = [key for key in ("repository", "directory") if model.get(key)]
            least = 0 if self.value("hf_cache_share") else 1
            if not least <= len(sources) <= 1 and not self._is_wrong(where) and not self._is_wrong("hf_cache_share"):
                self._wrong(
                    where,
                    f"names {' and '.join(sources) or 'no source'}",
                    "Name exactly one of repository and directory, or set hf_cache_share if the hosts find it there.",
                )
            if model.get("repository"):
                if not re.fullmatch(r"[\w.-]+/[\w.-]+", model["repository"]):
                    self._wrong(f"{where}.repository", f"is {model['repository']!r}", "Write organisation/name.")
                wrong = self._is_wrong(f"{where}.revision")
                if not wrong and not re.fullmatch(r"[0-9a-f]{40}", model.get("revision") or ""):
                    self._wrong(
                        f"{where}.revision",
                        f"is {model.get('revision')!r}, no commit",
                        "Pin all 40 digits of the commit: a branch or tag may move.",
                    )
            if model.get("manifest_sha256") and not re.fullmatch(r"[0-9a-f]{64}", model["manifest_sha256"]):
                self._wrong(f"{where}.manifest_sha256", "is no sha256", "Give 64 hex digits.")

    def _check_batches(self) -> None:
        """Ansible takes 0, -1 and 200% for all hosts at once."""
        for position, batch in enumerate(self.value("vllm_upgrade_batches")):
            if isinstance(batch, bool) or not BATCH.fullmatch(str(batch)):
                self._wrong(
                    f"vllm_upgrade_batches[{position}]",
                    f"{batch!r} is neither a number of hosts nor a share of them",
                    "Write 1 or more, or 1% to 100%.",
                )
        if not self.value("vllm_upgrade_batches"):
            self._wrong(
                "vllm_upgrade_batches", "is empty", "Remove the line for the default, or write [100%] for all at once."
            )

    def _take_previous_key(
        self,
        instance: str,
        secrets: Sequence[str],
        serve: dict[str, Any],
        environment: dict[str, str],
        origins: dict[tuple[str, ...], str],
    ) -> None:
        """While a key is changed, the instance takes the one before too (previous_key.py of vllm_service)."""
        if PREVIOUS_KEY not in secrets:
            return
        where = f"vllm_secrets.{instance}.{PREVIOUS_KEY}"
        own = self.value("vllm_secrets")[instance]
        current = own.get(API_KEY)
        if current is None or (current == own[PREVIOUS_KEY] and not isinstance(current, Sealed)):
            self._wrong(
                where,
                f"is there without another {API_KEY}",
                f"Put the new key into {API_KEY}, and remove this line once every instance and proxy has it.",
            )
        given = serve.get("middleware", [])
        serve["middleware"] = [*(given if isinstance(given, list) else [given]), "previous_key.PreviousKey"]
        environment["PYTHONPATH"] = ":".join(filter(None, [PROGRAMS, environment.get("PYTHONPATH")]))
        origins["serve", "middleware"] = origins["environment", "PYTHONPATH"] = where

    def _check_secrets(self) -> None:
        instances = self.value("vllm_instances")
        for name in self.value("vllm_secrets"):
            if name not in instances and not self._is_misread(f"vllm_instances.{name}"):
                self._wrong(
                    f"vllm_secrets.{name}",
                    "the host has no instance of that name",
                    f"Set secrets where the instance is set; {nearest(name, instances)}",
                )


def _named_patches(definition: Any) -> list[str]:
    names = definition.get("patches") if isinstance(definition, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _shipped_patches(release: str) -> list[str]:
    return _named_patches(read_yaml(COLLECTION / "catalogue" / "releases" / f"{release}.yml"))


def gpus_of(serve: Mapping[str, Any]) -> int:
    """GPUs that an instance takes by its arguments; sizes that are none count as one."""
    sizes = [serve.get(flag) for flag in PARALLEL_SIZES]
    return math.prod(size for size in sizes if isinstance(size, int) and 0 < size <= LARGEST_SIZE)


def _gpu_memory(serve: Mapping[str, Any], release: Release) -> dict[str, Any]:
    """What vLLM asks of the memory of how many GPUs as it starts (vllm/v1/worker/utils.py, request_memory)."""
    if release.variant == "cpu":
        return {}
    share = serve.get("gpu-memory-utilization", UTILISATION)
    return {"gpu_memory": {"gpus": gpus_of(serve), "utilization": share}}


def _at(settings: Any, path: Sequence[str]) -> Any:
    """What stands at a path, or in place of a map on the way there; None for nothing."""
    for step in path:
        if not isinstance(settings, Mapping):
            break
        settings = settings.get(step)
    return settings


def _above(own: Any, path: Sequence[str], value: Any) -> tuple[str, ...]:
    """Where an upper layer replaces a value at a path with another one; empty where it does not."""
    for steps, step in enumerate(path, 1):
        if step not in own:
            return ()
        own = own[step]
        if not isinstance(own, Mapping):
            return () if steps == len(path) and own == value else tuple(path[:steps])
    return () if isinstance(value, Mapping) else tuple(path)


def _is_against(wanted: Mapping[str, Any], settings: Mapping[str, Any], removed: Mapping[tuple[str, ...], str]) -> bool:
    """Whether layers set, or take away, what would be laid below all of them."""
    return any(
        _at(settings, path) not in (None, value) or any(path[: len(gone)] == gone for gone in removed)
        for path, value in leaves(wanted)
    )


def _is_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(child) for key, child in value.items())
    if isinstance(value, list):
        return all(_is_json(child) for child in value)
    return isinstance(value, (str, int, float, bool))


def known_instance_settings() -> list[str]:
    """The settings an instance may have."""
    return sorted(inventory_spec()["vllm_instances"]["each"]["options"])
