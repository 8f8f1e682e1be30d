#!/usr/bin/env bash
# Build the GPU environment from the lock: .venv-gpu, or the folder given. Needs uv, Python 3.12 and a CUDA 13 driver.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
target=${1:-$root/.venv-gpu}
uv venv --quiet --python 3.12 "$target"
uv pip install --python "$target/bin/python" --overrides "$here/overrides.txt" -r "$here/requirements.txt"
uv pip install --python "$target/bin/python" --no-deps --no-build-isolation -e "$root" \
  $(for plugin in "$root"/plugins/*/; do printf -- '-e %s ' "$plugin"; done)
"$target/bin/agentrig" doctor fast --hardware cuda || true
echo "ready: $target/bin/agentrig train fast --hardware cuda"
