#!/usr/bin/env bash
# All figures of bench/results/capture_overhead-h200.json, on a machine with one H200: measure.sh
#   PYTHON     the interpreter that imports SGLang 0.5.14, torch, transformers, PyYAML (default python3)
#   RESULTS    the results file (default bench/results/capture_overhead-h200.json)
#   FAST_DIR, DISK_DIR   a folder in memory (20 GB) and one on a disk (20 GB) for captured rows
# Takes about 11 minutes. docs/performance.md says what is measured.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
models=$(mktemp -d)
trap 'rm -rf "$models"' EXIT

measure() { # LAYERS EXPERTS MEMORY_FRACTION ARGUMENT...
  local layers=$1 experts=$2 fraction=$3
  shift 3
  "$python" bench/h200/make_model.py "$models/$layers" "$layers" "$experts"
  "$python" -m bench.capture_overhead --device cuda --python "$(command -v "$python")" --model "$models/$layers" \
    --server-args "--mem-fraction-static $fraction --cuda-graph-max-bs-decode 8" --fast-dir "${FAST_DIR:-/dev/shm}" \
    --disk-dir "${DISK_DIR:-/tmp}" --results "${RESULTS:-bench/results/capture_overhead-h200.json}" "$@"
}

# Five layers: 2.8 GB/s, more than the disk takes, so all parts but `limit` write into memory.
measure 5 32 0.6 --layers 1,2,4 --seconds 1
# Sixteen: 0.85 GB/s, to the disk.
measure 16 32 0.7 --layers 3,8,14 --seconds 2 --long-seconds 60 --write-to disk --parts check,alternate,long
