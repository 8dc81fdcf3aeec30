# Onprem vLLM: `make` lists what can be done. Sections: tools, demo, lab; then checks and tests.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
export PATH := $(CURDIR)/.venv/bin:$(PATH)
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

demo-down: ## take the demo's hosts away without a trace
	@$(LAB) down

# --- lab ---------------------------------------------------------------------------------------------------------------

.PHONY: lab-image
lab-image: tools ## build the image of the test hosts, unless it is there
	@$(LAB) image

