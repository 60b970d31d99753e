#!/usr/bin/env bash
# Install the agent frameworks of framework_agents.py into an environment next to .venv, if there is
# none, and print its Python. They need other versions of openai, anthropic, protobuf and websockets
# than SGLang pins, so only these differ: everything else is that of .venv.
# Exit 77 with the reason where that is impossible.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=$root/.venv-frameworks
python=$folder/bin/python
refuse() { echo "no agent frameworks: $1" >&2; exit 77; }

cmp --silent "$here/frameworks.txt" "$folder/installed.txt" && { echo "$python"; exit 0; }
shared=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$folder"
"$root/.venv/bin/python" -m venv --without-pip "$folder"
grep -vE '^(openai|anthropic|protobuf|websockets)==' "$root/constraints.txt" > "$folder/constraints.txt"
"$root/.venv/bin/uv" pip install --quiet --python "$python" --constraint "$folder/constraints.txt" \
    --requirement "$here/frameworks.txt" >&2 || refuse "uv cannot install tests/agent/frameworks.txt"
echo "$shared" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
cp "$here/frameworks.txt" "$folder/installed.txt"
echo "$python"
