#!/usr/bin/env bash
# Install a headless browser for tests from Debian's packages, if there is none, and print its path.
# Exit 77 with the reason where that is impossible.
set -euo pipefail

refuse() { echo "no chromium: $1" >&2; exit 77; }

for name in chromium chromium-browser; do
    command -v "$name" && exit 0
done
[ "$(id -u)" = 0 ] || refuse "installing it needs root"
command -v apt-get >/dev/null || refuse "this is no Debian"
export DEBIAN_FRONTEND=noninteractive
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 \
    || refuse "apt-get cannot install it"
command -v chromium
