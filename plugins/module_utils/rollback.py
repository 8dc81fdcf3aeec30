# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""An earlier generation of an instance back, whole (unit, configuration, environment, release), from the host alone.

Nothing is asked of the mirror, the bundle or the inventory. What cannot work is refused before anything stops.
"""

from __future__ import annotations

import os
from pathlib import Path

from .generation import GENERATION_VARIABLE, Content, Generations
from .host_lock import HostLocked, host_lock
from .instance import Host, Instance, InstancesFailed, InstancesRefused, Outcome, Step, unit_name
from .systemd_environment import hidden
from .systemd_unit import SystemdError, process_environment, unit_state
from .venv import tree_problems


def roll_back(
    host: Host,
    instance: str | None = None,
    generation: int | None = None,
    *,
    full: bool = False,
    check_mode: bool = False,
) -> dict[str, object]:
    """Bring earlier generations back, or predict it; what the module returns.

    Args:
        instance: None for every instance of the host.
        generation: None for the last one that was ready before the current one.
        full: read every file of the release instead of comparing sizes and times.

    Raises:
        InstancesFailed: refused before anything stopped, or not ready and the current one brought back.
    """
    result: dict[str, object] = {"changed": False, "instances": []}
    secrets: list[str] = []
    try:
        if check_mode:
            steps = plan_steps(host, instance, generation, full=full)
            outcomes = [
                Outcome(step.instance.name, step.number, step.changes, bool(step.restart), reason=step.restart)
                for step in steps
            ]
        else:
            with host_lock("rollback"):
                steps = plan_steps(host, instance, generation, full=full)
                secrets = [value for step in steps for value in step.generations.secrets(step.number)]
                result["changed"] = any(step.changes for step in steps)
                outcomes = host.apply(steps, stop_at_failure=True)
    except (InstancesRefused, HostLocked, SystemdError, OSError) as error:
        raise InstancesFailed(hidden(str(error), secrets), result) from None
    result["changed"] = any(step.changes for step in steps)
    result["instances"] = [
        {**outcome.returned(), "before": step.current, "port": step.instance.content.port}
        for outcome, step in zip(outcomes, steps, strict=True)
    ]
    if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
        raise InstancesFailed(hidden("\n".join(failures), secrets), result)
    return result


def plan_steps(host: Host, instance: str | None, generation: int | None, *, full: bool) -> list[Step]:
    """What each instance needs; changes nothing.

    Raises:
        InstancesRefused: with every obstacle and its remedy.
    """
    ours = host.ours()
    names = ours if instance is None else [instance]
    if not names:
        raise InstancesRefused("This host has no instance.")
    if instance is not None and instance not in ours:
        raise InstancesRefused(f"There is no instance {instance!r} here; there are: {', '.join(ours) or 'none'}.")
    if generation is not None and len(names) > 1:
        raise InstancesRefused(
            f"Generations are counted for each instance: say which one shall go to {generation} (vllm_instance), of "
            f"{', '.join(names)}."
        )
    problems: list[str] = []
    steps = []
    for name in names:
        generations = Generations(host.places.etc / name)
        target = generations.rollback_target() if generation is None else generation
        if found := obstacles(name, generations, target, full=full):
            problems += found
        elif target is not None:
            steps.append(_step(host, name, generations, target))
    if problems:
        raise InstancesRefused("\n".join(problems))
    return steps


def obstacles(name: str, generations: Generations, target: int | None, *, full: bool) -> list[str]:
    """Why an instance cannot go to a generation, each with what to do; empty where it can."""
    there = generations.numbers()
    others = f"the generations here are {', '.join(map(str, there)) or 'none'}, the current one {generations.current()}"
    if target is None:
        return [f"instance {name!r}: no other generation of it was ever ready; name one (vllm_generation): {others}."]
    where = f"instance {name!r}: generation {target}"
    if target not in there:
        return [f"{where} is not on this host: {others}."]
    if altered := generations.altered(target):
        changed = f"{where} was changed by hand since it was written ({', '.join(altered)})"
        return [f"{changed}; choose another ({others}), or set the inventory as it was and run the playbook upgrade."]
    release = Path(generations.read(target)[1])
    again = (
        "Install it again beside what serves: name that release in the inventory and run the playbook upgrade with"
        " the mirror, or choose another generation"
    )
    if not release.is_dir():
        return [f"{where}: its release {release} is gone. {again} ({others})."]
    if problems := tree_problems(release, full=full):
        few = "; ".join(problems[:3]) + (f" and {len(problems) - 3} more" if len(problems) > 3 else "")
        return [f"{where}: its release {release} is not as it was installed ({few}). {again} ({others})."]
    if not os.access(release / "bin" / "python", os.X_OK):
        gone = os.path.realpath(release / "bin" / "python")
        return [
            f"{where}: the interpreter {gone} of its release is gone. Install it again, or choose another: {others}."
        ]
    return []


def stored(name: str, generations: Generations, number: int) -> Instance:
    """A generation on the host as an instance that can be carried out; its secrets stay in its own file."""
    files, release = generations.read(number)
    manifest = generations.manifest(number)
    gpus, port = manifest.get("gpus"), manifest.get("port")
    content = Content(
        serve=files["serve.yaml"].decode(),
        unit=files["unit"].decode(),
        release=release,
        environment={},
        port=port if isinstance(port, int) else 0,
        gpus=tuple(map(str, gpus)) if isinstance(gpus, list) else (),
    )
    return Instance(name, "", "", content)


def _step(host: Host, name: str, generations: Generations, target: int) -> Step:
    instance = stored(name, generations, target)
    current = generations.current()
    state = unit_state(unit_name(name))
    served = process_environment(state.main_pid, GENERATION_VARIABLE) if state.main_pid else None
    installed = host.installed_unit(name) == instance.content.unit
    restart = ""
    if served != str(target) or current != target:
        restart = f"back to generation {target} from {current}"
    elif state.active != "active" and not state.starting:
        restart = f"it was {state.active}"
    return Step(
        instance=instance,
        generations=generations,
        current=current,
        changed=["generation"] if current != target else [],
        number=target,
        install_unit=not installed or state.stale,
        enable=not host.is_enabled(name),
        restart=restart,
        wait=state.starting and not restart,
        loose=[] if current != target else generations.loose(target),
        state=state,
        stored=True,
    )
