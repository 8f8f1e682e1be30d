#!/usr/bin/env bash
# setup.sh DIR: an environment in DIR that can run the examples of Agent Lightning 0.3.0, and agentrig from this checkout.
# It starts as a copy of .venv (hard links where the file system has them), so that torch and the rest are not
# downloaded again, and installs plugins/agentrig-lightning/tests/upstream/requirements.txt on top.
set -euo pipefail
root=$(cd "$(dirname "$0")/../../../.." && pwd)
target=${1:?usage: plugins/agentrig-lightning/tests/upstream/setup.sh DIR}
[ -x "$root/.venv/bin/python" ] || { echo "there is no $root/.venv; run make setup first" >&2; exit 2; }
[ ! -e "$target" ] || { echo "$target exists already; remove it or name another folder" >&2; exit 2; }
mkdir -p "$(dirname "$target")"
target=$(cd "$(dirname "$target")" && pwd)/$(basename "$target")
cp -al "$root/.venv" "$target" 2>/dev/null || { rm -rf "$target"; cp -a "$root/.venv" "$target"; }
# The copied scripts name the interpreter of .venv. sed writes new files, so the originals stay as they are.
{ grep -rlI --null "$root/.venv" "$target/bin" "$target/pyvenv.cfg" || true; } | xargs -0 -r sed -i "s#$root/.venv#$target#g"
"$target/bin/python" -m uv pip install -q --python "$target/bin/python" --link-mode copy --no-deps \
  -r "$root/plugins/agentrig-lightning/tests/upstream/requirements.txt"
# The examples start their calculator with `uvx mcp-server-calculator`. uvx would download it at every first use; this
# one starts the pinned package that is installed here.
cat > "$target/bin/uvx.new" <<UVX
#!$target/bin/python
import os, sys
os.execv(os.path.join("$target/bin", sys.argv[1]), sys.argv[1:])
UVX
chmod +x "$target/bin/uvx.new"
mv "$target/bin/uvx.new" "$target/bin/uvx"
"$target/bin/python" -c "import agentrig; print('agentrig:', agentrig.__file__)"
