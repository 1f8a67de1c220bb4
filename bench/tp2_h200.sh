#!/usr/bin/env bash
# Two H200s, one run: bench/h200/tp2.py with fleetdump on a real SGLang at TP 2 over NCCL. Results in the folder OUT.
# Usage: OUT=results bench/tp2_h200.sh [--parts PART,PART...]   (about 7 minutes; ends what it started)
# Needs: python3 with torch for CUDA, SGLang and what fleetdump imports (PYTHONPATH may name unpacked packages; it is
# handed to the servers), and 2 GPUs of one host. NVLink multicast stays off.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath "${OUT:?the folder for the results}")
work=${WORK:-$(mktemp -d)}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 PYTHONUNBUFFERED=1
export ENGINE_PYTHONPATH=${ENGINE_PYTHONPATH:-${PYTHONPATH:-}}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
python3 bench/h200/make_small_model.py "$work/small" &
python3 bench/h200/make_model.py "$work/wide" 16 32
wait $!
status=0
python3 -m bench.h200.tp2 "$work/run" --model "$work/small" --fast-model "$work/wide" --out "$out/tp2-h200.json" "$@" || status=$?
tar -czf "$out/logs.tgz" -C "$work/run" $(cd "$work/run" && find . -name '*.log' -size -2M)
exit "$status"
