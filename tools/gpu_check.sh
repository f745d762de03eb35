#!/usr/bin/env bash
# Check this library on one CUDA device, from a checkout, with the torch that is installed there.
#
#     bash tools/gpu_check.sh [OUTPUT_FOLDER]
#
# Needs python3 with torch >= 2.11, numpy, pytest and hypothesis; nothing is installed. Stops
# after five and a half minutes. Writes gpu_tests.txt, gpu_bench.txt and gpu_bench.json.
# Exit status 3: no CUDA device.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-runs/gpu}"
python="${PYTHON:-python3}"
mkdir -p "$out"
paths=(packages/*/src tools/shard-testing/src tools)
PYTHONPATH="$(IFS=:; echo "${paths[*]/#/$PWD/}")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1

"$python" - <<'PY'
import sys
import torch

print(f"python {sys.version.split()[0]}, torch {torch.__version__}")
if not torch.cuda.is_available():
    print("no CUDA device: nothing was checked")
    sys.exit(3)
print(f"{torch.cuda.get_device_name()}, {torch.cuda.mem_get_info()[1] / 2**30:.0f} GiB")
PY

status=0
timeout 150 "$python" -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee "$out/gpu_tests.txt" || status=1
timeout 180 "$python" tools/bench_gpu.py --json "$out/gpu_bench.json" 2>&1 | tee "$out/gpu_bench.txt" || status=1
exit "$status"
