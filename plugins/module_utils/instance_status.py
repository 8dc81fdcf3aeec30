# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""What the instances of a host are, and where that is not what their files say. Reads alone; no secret is returned."""

from __future__ import annotations

import http.client
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from .generation import GENERATION_VARIABLE, Generations
from .instance import Host, unit_name
from .release_manifest import ManifestError, compare_by_hash, compare_by_stat, read_manifest
from .systemd_environment import read_environment
from .systemd_unit import process_environment, systemctl, unit_state

HEALTH_TIMEOUT_S = 5
SWITCH = "FLASHINFER_DISABLE_VERSION_CHECK"


def status(host: Host, wanted: Mapping[str, str] | None = None, verify: str = "stat") -> list[dict[str, object]]:
    """Every instance of the host, and every one that it should have.

    Args:
        wanted: release id by instance, as the inventory asks; None where that is not to be compared.
        verify: how releases are compared with their manifest, ``none``, ``stat`` or ``full``.

    Raises:
        SystemdError: systemd does not answer.
    """
    releases: dict[str, dict[str, object]] = {}
    found = []
    ours = host.ours()
    for name in ours:
        entry = _instance(host, name, verify, releases)
        drift: list[str] = entry["drift"]  # type: ignore[assignment]
        if wanted is not None and name not in wanted:
            drift.append("the inventory does not know this instance")
        elif wanted is not None and wanted[name] != _id(entry["release"]):
            drift.append(f"the inventory asks for release {wanted[name]}")
        found.append(entry)
    for name in sorted(set(wanted or ()) - set(ours)):
        found.append({"name": name, "unit": unit_name(name), "generation": None, "serves": None, "rollback": None})
        found[-1] |= {
            "generations": [],
            "release": None,
            "port": None,
            "activated": None,
            "since": None,
            "state": "missing",
        }
        found[-1] |= {"ready": False, "restarts": 0, "logs": [], "drift": ["the inventory asks for it; it is not here"]}
    return found


def _id(release: object) -> str:
    return str(release["id"]) if isinstance(release, dict) else ""


def _instance(host: Host, name: str, verify: str, releases: dict[str, dict[str, object]]) -> dict[str, object]:
    generations = Generations(host.places.etc / name)
    current = generations.current()
    state = unit_state(unit_name(name))
    served = process_environment(state.main_pid, GENERATION_VARIABLE) if state.main_pid else None
    started = process_started(state.main_pid) if state.main_pid else None
    files, path = generations.read(current) if current is not None else ({}, "")
    variables = read_environment(files.get("environment", b"").decode(errors="replace"))
    release = None
    drift: list[str] = []
    if current is None:
        drift.append("no generation is active")
    else:
        if path not in releases:
            releases[path] = describe_release(Path(path), verify)
        release = {**releases[path], "version_check_disabled": variables.get(SWITCH) == "1"}
        drift += _drift(host, name, generations, current, state.stale)
        problems: list[str] = release.pop("problems")  # type: ignore[assignment]
        drift += [f"release {release['id']}: {problem}" for problem in problems]
        if started is not None:
            written = {f"{file} of generation {current}": generations.path(current) / file for file in files}
            written["its release"] = Path(path) / "manifest.json"
            drift += [f"the process is older than {what}" for what, place in written.items() if _newer(place, started)]
    if state.main_pid and served != str(current):
        drift.append(f"the process serves generation {served or 'unknown'}, not {current}")
    listening = state.active == "active"
    url = process_environment(state.main_pid, "ONPREM_VLLM_URL") if listening else None
    certificate = process_environment(state.main_pid, "ONPREM_VLLM_TLS_CERTIFICATE") if listening else None
    return {
        "name": name,
        "unit": unit_name(name),
        "generation": current,
        "serves": int(served) if served and served.isdigit() else None,
        "rollback": generations.rollback_target(),
        "generations": generations.numbers(),
        "release": release,
        "port": generations.manifest(current).get("port") or None,
        "activated": _when(_changed(generations.directory / "current")),
        "since": _when(started),
        "state": f"{state.active}/{state.sub}",
        "ready": listening and url is not None and healthy(url, certificate),
        "restarts": state.restarts,
        "logs": sorted(map(str, host.places.log(name, 0).parent.glob("failed-*.log"))),
        "drift": drift,
    }


def _drift(host: Host, name: str, generations: Generations, current: int, stale: bool) -> list[str]:
    """What of an instance's files is not as it was written."""
    where = f"of generation {current}"
    found = [f"{file} {where} was changed by hand" for file in generations.altered(current)]
    found += [f"{file} {where} has another mode or owner" for file in generations.loose(current)]
    files, _unused = generations.read(current)
    installed = host.installed_unit(name)
    if installed is None:
        found.append("its unit is gone")
    elif installed.encode() != files.get("unit"):
        found.append(f"its unit is not that {where}: changed by hand")
    if stale:
        found.append("systemd has not read its unit since that changed")
    dropped = systemctl("show", "--property", "DropInPaths", "--value", unit_name(name)).split()
    found += [f"{path} changes its unit" for path in dropped if f"/{unit_name(name)}.d/" in path]
    if not host.is_enabled(name):
        found.append("it does not start at boot")
    return found


def describe_release(path: Path, verify: str) -> dict[str, object]:
    """What a release's manifest says of it, and under ``problems`` where its files say otherwise."""
    about: dict[str, object] = {"id": path.name, "path": str(path), "vllm": None, "variant": None, "patches": []}
    about |= {"flashinfer": {}, "flashinfer_decision": None, "problems": []}
    try:
        manifest = read_manifest(path)
    except ManifestError as error:
        return {**about, "problems": [str(error)]}
    release = manifest.about.get("release") or {}
    packages = manifest.about.get("packages") or {}
    problems: list[str] = []
    if verify != "none":
        problems = compare_by_hash(path, manifest) if verify == "full" else compare_by_stat(path, manifest)
    if not os.access(path / "bin" / "python", os.X_OK):
        problems.append(f"its interpreter {os.path.realpath(path / 'bin' / 'python')} is gone")
    more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
    return {
        **about,
        "vllm": release.get("vllm"),
        "variant": release.get("variant"),
        "patches": [patch["name"] for patch in release.get("patches") or ()],
        "flashinfer": {name: version for name, version in packages.items() if name.startswith("flashinfer-")},
        "flashinfer_decision": manifest.about.get("flashinfer"),
        "problems": problems[:5] + more,
    }


def process_started(pid: int) -> float | None:
    """When a process was started, in seconds since the epoch; None where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def healthy(url: str, certificate: str | None) -> bool:
    """Whether ``/health`` answers 200: 503 is a dead engine. No completion is asked, which would cost users theirs."""
    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    try:
        if parts.scheme == "https":
            # Its own certificate is the one trusted; that carries the host's name, not the loopback's.
            trust = ssl.create_default_context(cafile=certificate)
            trust.check_hostname = False
            connection = http.client.HTTPSConnection(
                parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S, context=trust
            )
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        finally:
            connection.close()
    except (OSError, http.client.HTTPException):
        return False


def _changed(path: Path) -> float | None:
    try:
        return path.lstat().st_mtime
    except OSError:
        return None


def _newer(path: Path, started: float) -> bool:
    # A clock tick: the process of a generation is started right after its files are written.
    changed = _changed(path)
    return changed is not None and changed > started + 0.1


def _when(moment: float | None) -> str | None:
    return None if moment is None else time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(moment))
