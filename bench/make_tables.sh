#!/usr/bin/env bash
# Makes every shipped commitment table again, from calibration prompts only:
#     bench/make_tables.sh [TARGET...]
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_WAIT_POLICY=PASSIVE
targets=("$@")
[ ${#targets[@]} -gt 0 ] || targets=(tiny-qwen3-moe tiny-olmoe tiny-gpt-oss)
for target in "${targets[@]}"; do
  for drafter in assistant eagle3 ngram; do
    acceptmoe calibrate --target "$target" --drafter "$drafter" --count 200 \
      --out "tables/${target}__${drafter}.json"
  done
done
