"""The second attempt at the confirmation: candidates, choice and confirmation in one session of a GPU, declared before.

python second.py explore > LIST             runs of the candidates, for benchmarks/side_by_side.sh
python second.py choose FOLDER > LIST       the chosen candidate's six arms with new seeds

The candidates differ from `config/collapse.yaml` as of seeds 10 to 14 only as written below; each is tried with three
uncorrected runs, two of score centering and one control. A run is *dead* if the mean reward of its last 20 steps is
below a quarter of its own peak (means of 20 steps) and of the control's last. Chosen is the candidate with most dead
uncorrected runs; among equals the one whose score centering ends higher, as a share of the control. Left out is a
candidate whose control ends below 90 % of its own peak, or whose score centering ends below 95 % of the control's (mean
of two runs); if all are, the second condition is dropped.
"""

import sys
from pathlib import Path

import pandas as pd

LONGER = (
    "model.warm_start.filler.before_step=0.8 model.warm_start.filler.before_answer=0.85 data.max_response_length=80 "
    "--dataset-manifest results/collapse_filler/dataset/manifest.json "
    "--model-manifest results/collapse_filler/model/manifest.json "
    "--quantised-config results/collapse_filler/model/w8a8/config.json"
)
CANDIDATES = {
    "a": (0.25, 1.5, 0.3, ""),
    "b": (0.3, 1.5, 0.3, ""),
    "c": (0.25, 1.5, 0.5, ""),
    "d": (0.3, 1.5, 0.5, ""),
    "e": (0.25, 1.25, 0.3, LONGER),
    "f": (0.25, 1.5, 0.3, LONGER),
}
EXPLORED = {"grpo": (20, 21, 22), "sc": (20, 21), "grpo_bf16": (20,)}
ARMS, SEEDS = ("grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis"), (30, 31, 32, 33, 34)
STEPS, WINDOW = 400, 20


def line(candidate: str, arm: str, seed: int) -> str:
    """A line of the list: name, arm, seed and what differs from the preset."""
    noise, rate, clip, further = CANDIDATES[candidate]
    mismatch = "" if arm == "grpo_bf16" else f"perturbation.weight_noise={noise} "
    return (
        f"{candidate}-{arm}-s{seed} {arm} {seed} --configfile config/collapse.yaml {mismatch}"
        f"actor_rollout_ref.actor.optim.lr={rate} actor_rollout_ref.actor.grad_clip={clip} "
        f"trainer.test_freq=40 trainer.save_freq={STEPS} trainer.total_training_steps={STEPS} {further}"
    ).rstrip()


def ends(folder: Path, candidate: str, arm: str) -> list[tuple[float, float]]:
    """Of each seed's run: mean reward of the last 20 steps, and the run's own peak (means of 20 steps)."""
    pairs = []
    for seed in EXPLORED[arm]:
        reward = pd.read_parquet(folder / f"{candidate}-{arm}-s{seed}" / "metrics.parquet").reward_mean.dropna()
        means = reward.rolling(WINDOW).mean().dropna()
        pairs.append((float(means.iloc[-1]), float(means.max())))
    return pairs


def choose(folder: Path) -> str:
    """The candidate's letter, by the rule above; every candidate's numbers go to stderr."""
    rows = []
    for candidate in CANDIDATES:
        (control, control_peak), *_ = ends(folder, candidate, "grpo_bf16")
        uncorrected, centred = ends(folder, candidate, "grpo"), ends(folder, candidate, "sc")
        dead = sum(last < min(peak, control) / 4 for last, peak in uncorrected)
        kept = sum(last for last, _ in centred) / len(centred) / control
        healthy = control >= 0.9 * control_peak
        rows.append((healthy and kept >= 0.95, healthy, dead, kept, candidate))
        lasts = " ".join(f"{last:.3f}" for last, _ in uncorrected)
        print(f"{candidate}: control {control:.3f}, grpo {lasts} ({dead} dead), sc keeps {kept:.3f}", file=sys.stderr)
    chosen = max(rows)
    print(f"chosen: {chosen[-1]}", file=sys.stderr)
    return chosen[-1]


if __name__ == "__main__":
    if sys.argv[1] == "explore":
        print("\n".join(line(c, arm, seed) for c in CANDIDATES for arm, seeds in EXPLORED.items() for seed in seeds))
    else:
        chosen = choose(Path(sys.argv[2]))
        print("\n".join(line(chosen, arm, seed) for seed in SEEDS for arm in ARMS))
