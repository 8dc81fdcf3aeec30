# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""A host's facts compared with its plan: every finding at once, each with what was found, what is needed, a remedy.

Which findings there are, and how much each weighs, stands in catalogue/findings.yml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ..module_utils.finding_report import finding_report
from . import findings_gpu, findings_model, findings_system
from .finding import ERROR, SEVERITIES, WAIVED, Facts, Finding, Plan, known_causes, known_findings, new_finding
from .plan_facts import NODE_UNKNOWN, decisions, resolve, what_is_decided
from .role_variables import nearest

# Less than what a token or a certificate allows, more than what a slow connection takes.
_SKEW_S = 10.0


def compare(plan: Plan, facts: Facts, waived: Iterable[str] = (), now: float | None = None) -> list[Finding]:
    """All findings, errors first and waived ones last.

    Args:
        plan: the host's plan; ``needs``, ``packages``, ``releases`` and ``instances`` are read. What the facts decide
            of it, they have decided before it is compared.
        facts: what the module ``host_probe`` returned for it.
        waived: identifiers of findings that the operator takes on.
        now: the control node's clock, not before the facts came back; without it clocks are not compared.

    Raises:
        ValueError: ``waived`` names a finding that does not exist.
    """
    plan = resolve(plan, facts)
    found = _unreadable(facts)
    for parts, check in _CHECKS:
        if not set(parts) & set(facts.get("unknown") or {}):
            found += check(plan, facts)
    if now is not None and not (facts.get("unknown") or {}).get("time"):
        found += _clock(facts, now)
    return weighed(found, waived)


def weighed(findings: Iterable[Finding], waived: Iterable[str] = ()) -> list[Finding]:
    """Findings by severity, those that the operator takes on marked and last.

    Raises:
        ValueError: ``waived`` names a finding that does not exist.
    """
    taken_on = set(waived)
    known = known_findings()
    for name in sorted(taken_on - known.keys()):
        raise ValueError(f"preflight_waived names {name!r}, and there is no such finding: {nearest(name, known)}")
    marked = [{**finding, "severity": WAIVED} if finding["id"] in taken_on else finding for finding in findings]
    return sorted(marked, key=lambda finding: SEVERITIES.index(finding["severity"]))


def diagnose(plan: Plan, probe: Mapping[str, Any], waived: Iterable[str], now: float) -> list[Finding]:
    """What is wrong with one host: its inventory, its connection, and its facts against its plan.

    Args:
        plan: the host's plan, problems and all.
        probe: the result of the module ``host_probe``, or of Ansible where it could not run.
        waived: identifiers of findings that the operator takes on; of one that does not exist the plan's problems tell.
        now: the control node's clock, not before the facts came back.
    """
    waived = known_findings().keys() & set(waived)
    found = [
        new_finding(kind, f"{entry['where']} {entry['what']}", "an inventory that composes and suits", entry["remedy"])
        for kind, part in (("inventory", "problems"), ("inventory-doubtful", "warnings"))
        for entry in plan.get(part, ())
    ]
    if "host" not in probe:
        found.append(
            new_finding(
                "host-unreachable",
                str(probe.get("msg") or "Ansible did not reach it"),
                "a host that Ansible reaches as root",
                "Try `ansible <host> -b -m ansible.builtin.ping`; correct its address, user or key.",
            )
        )
        return weighed(found, waived)
    try:
        found += compare(plan, probe["host"], (), now)
    except ValueError as error:  # what one host's inventory says must not keep the others' findings back
        what = f"what it says cannot be compared with the host: {error}"
        found.append(new_finding("inventory", what, "values that can be", "Correct what the message names."))
    return weighed(found, waived)


def report(host: str, findings: Iterable[Finding]) -> str:
    """Findings as text for a person, empty where there is none."""
    return "\n".join(finding_report(finding, host) for finding in findings)


def table(findings: Iterable[Finding], hosts: int) -> str:
    """Findings of several hosts as text: each once, with its hosts; errors first, then how many there are.

    Args:
        findings: as diagnose() returns them, each with ``host``.
        hosts: how many hosts were looked at.
    """
    by_content: dict[tuple[str, ...], list[str]] = {}
    for finding in sorted(findings, key=lambda finding: SEVERITIES.index(finding["severity"])):
        content = tuple(finding[key] for key in ("severity", "id", "found", "needed", "remedy"))
        by_content.setdefault(content, []).append(finding["host"])
    lines: list[str] = []
    width = max((len(identifier) for _severity, identifier, *_rest in by_content), default=0)
    for (severity, identifier, found, needed, remedy), names in by_content.items():
        lines.append(f"{severity:<7}  {identifier:<{width}}  {', '.join(names)}")
        lines += [f"         found:  {found}", f"         needed: {needed}", f"         -> {remedy}"]
    counts = {severity: sum(content[0] == severity for content in by_content) for severity in SEVERITIES}
    said = [
        f"{count} {severity}{'s' if severity != WAIVED and count != 1 else ''}" for severity, count in counts.items()
    ]
    return "\n".join([*lines, f"{hosts} host{'s' if hosts != 1 else ''}: {', '.join(said)}"])


def _unreadable(facts: Facts) -> list[Finding]:
    return [
        new_finding(
            "host-unreadable",
            f"{part}: {reason}",
            "a look at it, to say whether it fits the plan",
            "Run as root (become: true); else correct what the reason names.",
        )
        for part, reason in (facts.get("unknown") or {}).items()
    ]


def _undecided(plan: Plan, facts: Facts) -> Iterator[Finding]:
    """What is left to the facts, and they do not say."""
    for entry, decision in decisions(plan, facts):
        # Of a node that is unknown, and was before, numa-unknown tells.
        if decision.doubt and (decision.settings or decision.doubt != NODE_UNKNOWN):
            setting = what_is_decided(entry)
            yield new_finding(
                "facts-missing",
                f"{setting} of {entry['for']} cannot be decided: {decision.doubt}",
                "facts that decide it; what the current generation has of it stays, else it is left to vLLM",
                f"Look at what hides them, or set {setting}.",
            )


def _clock(facts: Facts, now: float) -> Iterator[Finding]:
    """The clocks' difference is known within the time that the question took; only what lies outside it counts."""
    clock = facts["time"]
    remedy = "Install chrony, with a server that this host reaches (an air gap has one of its own), on every host."
    if clock["control"] is not None:
        behind, ahead = clock["control"] - clock["host"], clock["host"] - now
        if (difference := max(behind, ahead)) > _SKEW_S:
            yield new_finding(
                "clock-skew",
                f"the clock is {difference:.0f} s {'behind' if behind > ahead else 'ahead of'} the control node's",
                f"less than {_SKEW_S:.0f} s",
                remedy,
            )
            return
    if clock["synchronised"] is False and facts.get("container") is None:  # a container has its machine's clock
        yield new_finding(
            "clock-unsynchronised", "no time service keeps the kernel's clock in step", "one that does", remedy
        )


def _instances(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Instances that do not serve, with the causes that their journal names."""
    causes = {cause["id"]: cause for cause in known_causes()}
    for name, found in (facts.get("instances") or {}).items():
        for one in (found or {}).get("probes", ()):  # an error that let the rollout go on was waived
            severity = WAIVED if one["severity"] == ERROR else one["severity"]
            yield {**one, "severity": severity, "needed": f"{one['needed']}, for instance {name}"}
        if found is None or found["active"] in ("active", "reloading"):
            continue
        if found["active"] is None:
            yield new_finding(
                "host-unreadable",
                found["unreadable"],
                f"the state of vllm-{name}.service",
                "Run as root (become: true).",
            )
            continue
        restarts = f", started again {found['restarts']} times" if found["restarts"] else ""
        state = f"vllm-{name}.service is {found['active']} ({found['sub']}{restarts})"
        for cause in found["causes"]:
            known = causes[cause["id"]]
            yield {
                "id": cause["id"],
                "severity": ERROR,
                "found": f"{state}: {cause['line']}",
                "needed": known["what"],
                "remedy": known["remedy"].replace("<instance>", name),
            }
        if not found["causes"]:
            yield _without_cause(name, state, found)


def _without_cause(name: str, state: str, found: Mapping[str, Any]) -> Finding:
    failed = found["active"] == "failed" or found["restarts"] or found["result"] not in ("success", "", None)
    if failed:
        said = found["unreadable"] or " | ".join(found["lines"])
        return new_finding(
            "instance-failed",
            f"{state}: {said}",
            "an instance that serves",
            f"journalctl -u vllm-{name}, or `ansible-playbook onprem.vllm.site` to start it again.",
        )
    if found["active"] == "activating":
        return new_finding("instance-starting", state, "an instance that serves", "Ask again once it has loaded.")
    return new_finding(
        "instance-stopped",
        state,
        "an instance that serves",
        f"systemctl start vllm-{name}, or remove it from vllm_instances.",
    )


def _proxy(_plan: Plan, facts: Facts) -> Iterator[Finding]:
    """A proxy that does not run whole, and instances that it sends no requests."""
    found = facts.get("proxy")
    if not found:
        return
    for unit, state in found["units"].items():
        if state["active"] not in ("active", "reloading"):
            yield new_finding(
                "proxy-failed",
                f"{unit} is {state['active']} ({state['sub']}, {state['result']})",
                "a proxy all of whose units run",
                f"journalctl -u {unit}, or `ansible-playbook onprem.vllm.site --limit <this host>` to start it again.",
            )
    if found["silent"] and all(state["active"] == "active" for state in found["units"].values()):
        yield new_finding(
            "proxy-failed",
            found["silent"],
            "a HAProxy that says whom it sends requests",
            "systemctl restart onprem-vllm-haproxy; requests under way then are cut off.",
        )
    if found.get("keys"):
        yield new_finding(
            "proxy-keys-old",
            f"the keys of the database do not reach the proxy: {found['keys']}",
            "keys as the database has them; those that were known before go on until then",
            "Look at litellm_proxy_database, and at that server's log.",
        )
    for model in sorted({one["model"] for one in found["instances"]}):
        instances = [one for one in found["instances"] if one["model"] == model]
        away = [one for one in instances if not one["up"]]
        said = ", ".join(f"{one['name']} is " + ": ".join(filter(None, (one["status"], one["check"]))) for one in away)
        needed = f"requests for {model} to all of its {len(instances)} instances"
        if away and len(away) == len(instances):
            yield new_finding("proxy-model-away", said, needed, _back(away))
        elif away:
            yield new_finding("proxy-instance-away", said, needed, _back(away))


def _back(away: Iterable[Mapping[str, Any]]) -> str:
    """How instances come into the routes again."""
    ordered = [one["name"] for one in away if one["status"].startswith(("DRAIN", "MAINT"))]
    others = [one["name"] for one in away if one["name"] not in ordered]
    said = []
    if others:
        said.append(
            f"See what doctor says of the host of {', '.join(others)}; where nothing, whether its firewall "
            "(vllm_instance_networks) lets this one in."
        )
    if ordered:
        said.append(f"Once nothing works on it, the next site.yml of its host puts {', '.join(ordered)} back.")
    return " ".join(said)


# Each check with the parts of the facts that it cannot do without.
_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Plan, Facts], Iterable[Finding]]], ...] = (
    (("os", "machine", "glibc"), findings_system.system),
    (("systemd",), findings_system.systemd),
    (("selinux",), findings_system.selinux),
    (("pythons", "packages"), findings_system.python),
    (("packages",), findings_system.packages),
    (("programs", "packages"), findings_system.programs),
    (("programs", "packages"), findings_system.numa),
    (("disks",), findings_system.disk),
    (("tmp",), findings_system.tmp),
    (("memory",), findings_system.memory),
    (("shm",), findings_system.shm),
    (("listeners",), findings_system.ports),
    (("firewall",), findings_system.firewall),
    (("gpu",), findings_gpu.driver),
    (("gpu",), findings_gpu.gpus),
    (("gpu",), findings_gpu.shared),
    (("gpu",), findings_gpu.links),
    (("gpu",), findings_gpu.fabric),
    (("models",), findings_model.models),
    ((), _undecided),
    (("instances",), _instances),
    (("proxy",), _proxy),
)
