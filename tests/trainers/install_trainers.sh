#!/usr/bin/env bash
# Install a trainer into an environment of its own next to .venv, if there is none, and print its
# Python: install_trainers.sh verl|skyrl. TRAINER.txt lists what differs from .venv, without
# dependencies: the trainers pin versions of torch that no test needs.
# Exit 77 with the reason where that is impossible.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
trainer=$1
folder=$root/.venv-trainers/$trainer
python=$folder/bin/python
refuse() { echo "no $trainer: $1" >&2; exit 77; }

cmp --silent "$here/$trainer.txt" "$folder/installed.txt" && { echo "$python"; exit 0; }
shared=$("$root/.venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$folder"
if [ "$trainer" = skyrl ]; then # wants a Python that .venv has not
    for other in python3.12 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12; do
        "$other" -c pass 2>/dev/null && break
        other=
    done
    [ -n "$other" ] || refuse "there is no Python 3.12"
    "$other" -m venv --without-pip "$folder"
else
    "$root/.venv/bin/python" -m venv --without-pip "$folder"
fi
"$root/.venv/bin/uv" pip install --quiet --python "$python" --no-deps \
    --requirement "$here/$trainer.txt" >&2 || refuse "uv cannot install tests/trainers/$trainer.txt"
own=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
if [ "$trainer" = skyrl ]; then # the libraries of torch do not depend on the Python
    ln -s "$shared/nvidia" "$own/nvidia"
else
    echo "$shared" > "$own/shared.pth"
fi
cp "$here/$trainer.txt" "$folder/installed.txt"
echo "$python"
