#!/usr/bin/env bash
# make demo: from a fresh Debian machine (root, apt) to two groups of hosts that answer completions.
# Every step does only what is not done yet, so a second run, or one after a failure, is quick.
set -euo pipefail
cd "$(dirname "$0")/../.."

steps=6 number=0 title="" advice="" begun=0

step() { # TITLE ADVICE: what to do when it fails
  [ "$number" = 0 ] || printf '      done in %d s\n' $((SECONDS - begun))
  number=$((number + 1)) title=$1 advice=$2 begun=$SECONDS
  printf '\n[%d/%d] %s (%d s so far)\n' "$number" "$steps" "$title" "$SECONDS"
}

finish() {
  status=$?
  [ "$status" = 0 ] || printf '\nStep %d of %d failed after %d s: %s\n%s\n' \
    "$number" "$steps" $((SECONDS - begun)) "$title" "$advice" >&2
  exit "$status"
}
trap finish EXIT

step "Packages of this machine" "The demo needs root and apt, on Debian 12 or newer."
[ "$(id -u)" = 0 ]
tests/lab/packages.sh

step "Tools into .venv, locked by hash" "See pip's message above; pip's configuration says where packages come from."
make --no-print-directory tools
export PATH=$PWD/.venv/bin:$PATH

step "Bundle: what crosses the air gap, into .cache/bundle" \
  "A fetch goes on where it stopped: run make demo again. See playbooks/bundle.yml for sources."
make --no-print-directory bundle

step "Hosts without a way out: glm1, l40s1, mirror1" "See: tests/lab/lab.py status; start over: make demo-down"
python tests/lab/lab.py up glm1 l40s1 mirror1

step "ansible-playbook -i inventory/lab site.yml" \
  "The failed task says what to do; a host's journal: tests/lab/lab.py logs HOST. Run make demo again to go on."
ansible-playbook -i inventory/lab site.yml

step "One chat completion from each group, asked from outside the hosts, through their firewall" \
  "See: tests/lab/lab.py logs HOST, and nft list table inet vllm on the host (make demo-ssh HOST=glm1)."
ansible-inventory -i inventory/lab --list >.cache/lab/demo/inventory.json
python tests/lab/lab.py run python tests/lab/ask.py .cache/lab/demo/inventory.json
leaks=$(python tests/lab/lab.py sink --details)
advice="The hosts tried to reach something beyond the mirror; above is who and where to."
printf '\nPackets that tried to leave the air gap: %s\n' "$leaks"
[ "$leaks" = 0 ]

printf '\nReady in %d s. The hosts stay up: make demo-ssh HOST=glm1 · make demo-down\n' "$SECONDS"
