# Copyright: onprem.vllm founders
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
"""How properties are tried: the same examples in every `make unit`; new ones, and more, in `make unit-slow`.

A property that fails for one example in ten thousand would fail a change that has nothing to do with it. No example
has a time limit: the machine is shared.
"""

from hypothesis import HealthCheck, settings

settings.register_profile("same", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("search", settings.get_profile("same"), derandomize=False, print_blob=True)
settings.load_profile("same")
