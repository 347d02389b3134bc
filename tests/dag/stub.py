"""Stands in for every program of `workflow/scripts`: writes what its rule declares, its settings inside."""

import os
import sys
from pathlib import Path

RUN_FILES = ["metrics.parquet", "timing.parquet", "config.yaml", "run.json"]
PLOTS = [
    "reward",
    "k3_kl",
    "reward_vs_k3",
    "validation_reward",
    "clean_reward",
    "response_length",
    "head_mass",
    "drift_meter",
    "timing",
]
FIGURES = [f"figures/{name}.{kind}" for name in PLOTS for kind in ("png", "svg", "pdf")]
PRODUCTS = {
    "dataset": ["train.parquet", "test.parquet", "manifest.json"],
    "quantise": ["config.json", "manifest.json"],
    "figures": [*FIGURES, "summary.parquet", "summary.md"],
}


def products(program: str, options: dict[str, str]) -> list[Path]:
    """Files that `program` promises under these options."""
    if program == "model":
        return [Path(options["--manifest"])]
    if program == "validate":
        return [Path(options["--output"]).with_suffix(suffix) for suffix in (".json", ".png", ".svg", ".pdf")]
    if program == "train":
        return [Path(options["--run-dir"]) / name for name in (["run.json"] if "--smoke" in options else RUN_FILES)]
    if "--output" in options:
        return [Path(options["--output"])]
    return [Path(options["--output-dir"]) / name for name in PRODUCTS[program]]


def main() -> int:
    program, arguments = Path(sys.argv[0]).stem, sys.argv[1:]
    options = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    if program != "audit":
        for path in products(program, options):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(options["--settings"])
    if os.environ.get("STUB_FAILS") == program:
        print(f"error: {program} fails as asked", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
