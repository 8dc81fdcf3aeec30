#!/usr/bin/env bash
# The Debian packages that test hosts need, installed unless they are there. Root and apt, on Debian 12 or newer.
set -euo pipefail
cd "$(dirname "$0")/../.."
packages=$(python3 tests/lab/lab.py needs || echo python3 python3-venv)
python3 -c 'import ensurepip' 2>/dev/null || packages+=" python3-venv"
[ -n "${packages// /}" ] || exit 0
if [ "$(id -u)" != 0 ]; then
  echo "These packages are missing, and installing them needs root: $packages" >&2
  exit 1
fi
echo "installing: $packages"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086 # a list of words
apt-get install -qq --no-install-recommends $packages >/dev/null
