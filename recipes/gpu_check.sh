#!/usr/bin/env bash
# On a machine with a GPU: test the Triton kernel compiled, then benchmark it. About eight minutes on one H200.
# Prints a short table last; writes CSV and PNG to OUT (default: runs/gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-runs/gpu}
mkdir -p "$out"

python -m pytest tests/test_triton_gpu.py | tee "$out/tests.txt"
python -m ssa_hf.recipes.benchmark_attention --device cuda --seconds 1 --output "$out" > "$out/attention.txt"
python -m ssa_hf.recipes.benchmark_training --device cuda --seconds 20 --output "$out" | tee "$out/training.txt"
python - "$out/benchmark_attention.csv" <<'PYTHON'
import csv
import sys

for row in csv.DictReader(open(sys.argv[1])):
    if row["candidate"] in ("ssa triton", "flex_attention ssa", "sdpa flash"):
        print(f"{row['case']:<44} {row['candidate']:<20} {row['ratio_to_softmax']:>7} x softmax {row['tflops']:>8} TFLOP/s")
PYTHON
