#!/usr/bin/env bash
# What stage 1 of a diagnosis costs a busy SGLang server on one GPU: diagnose_cost.sh RESULTS [bench argument...]
#   PYTHON   the interpreter that imports SGLang, torch and transformers (default python3)
#   PORT     a free port (default 31000); a server that listens there already is used as it is
# Starts a server of random weights (5 layers of DeepSeek-V3's widths), measures, ends it: about 5 minutes.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} port=${PORT:-31000} results=${1:?the file for the figures}
shift
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
answers() { "$python" -c "import urllib.request as r; r.urlopen('http://127.0.0.1:$port/health', timeout=20)" 2>/dev/null; }
if ! answers; then
  work=$(mktemp -d)
  "$python" bench/h200/make_model.py "$work/model" 5 32
  setsid "$python" -m sglang.launch_server --model-path "$work/model" --load-format dummy --host 127.0.0.1 --port "$port" \
    --attention-backend triton --sampling-backend pytorch --moe-runner-backend triton --grammar-backend none \
    --mem-fraction-static 0.6 --cuda-graph-max-bs-decode 8 >"$work/server.log" 2>&1 &
  server=$!
  trap 'kill -TERM -- -$server 2>/dev/null || true; rm -rf "$work"' EXIT
  until answers; do
    kill -0 "$server" 2>/dev/null || { tail -30 "$work/server.log" >&2; exit 1; }
    sleep 2
  done
fi
"$python" -m bench.diagnose_cost --port "$port" --results "$results" "$@"
