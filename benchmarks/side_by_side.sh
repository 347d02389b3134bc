#!/usr/bin/env bash
# Many small trainings at once on the GPUs of this machine, side by side under CUDA MPS: without it they take turns.
# usage: benchmarks/side_by_side.sh LIST SECONDS OUTPUT
#   LIST     a line a run: NAME ARM SEED [train.py's further arguments], such as `sc-s10 sc 10 --configfile config/collapse.yaml`
#   SECONDS  when runs that have not ended are killed; the same command goes on from their checkpoints
#   OUTPUT   a folder a run, NAME, and its log, NAME.log; NAME may be a path, such as benchmarks/study_list.py's
# On two H200 with 32 cores, 28 runs of config/collapse.yaml made 320 steps each in 85 s.
set -euo pipefail
list=$1 seconds=$2 output=$3
mkdir -p "$output/mps"
export CUDA_MPS_PIPE_DIRECTORY=$output/mps CUDA_MPS_LOG_DIRECTORY=$output/mps
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false SC_RUNS_PER_GPU=${SC_RUNS_PER_GPU:-64}
nvidia-cuda-mps-control -d || echo "an MPS daemon runs already"
gpus=$(nvidia-smi -L | wc -l) index=0
while read -r name arm seed rest; do
    [ -n "$name" ] || continue
    mkdir -p "$output/$(dirname "$name")"
    # shellcheck disable=SC2086
    CUDA_VISIBLE_DEVICES=$((index % gpus)) timeout -s TERM "$seconds" python workflow/scripts/train.py \
        --baseline "$arm" --seed "$seed" --run-dir "$output/$name" $rest >"$output/$name.log" 2>&1 </dev/null &
    index=$((index + 1))
done <"$list"
wait
grep -r --include='*.log' -E "^error|Error" "$output" || echo "no error in $index logs"
