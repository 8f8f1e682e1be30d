#!/usr/bin/env bash
# Build the GPU environment from the lock: .venv-gpu, or the folder given. Needs uv, Python 3.12 and a CUDA 13 driver.
# Status 0: doctor passed. 3: it is built, and doctor found what is in the way (in a container's image: no GPU).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
target=${1:-$root/.venv-gpu}
[ -e "$target/pyvenv.cfg" ] || uv venv --quiet --python 3.12 "$target"
uv pip install --python "$target/bin/python" --overrides "$here/overrides.txt" -r "$here/requirements.txt"
ours=(-e "$root")
for plugin in "$root"/plugins/*/; do ours+=(-e "$plugin"); done
uv pip install --python "$target/bin/python" --no-deps --no-build-isolation "${ours[@]}"
if ! "$target/bin/agentrig" doctor fast --hardware cuda; then
  echo "the environment is built ($target); doctor found what is above" >&2
  exit 3
fi
echo "ready: $target/bin/agentrig train fast --hardware cuda"
