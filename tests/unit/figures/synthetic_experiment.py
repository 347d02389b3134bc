"""Writes the run folders of an invented experiment, for tests of figures, tables and the report."""

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa

from score_centering.runs import schema

ARMS = ("grpo_bf16", "grpo", "sc", "sc_mis", "sc_tis", "grpo_mis")
CENTERED = ("sc", "sc_mis", "sc_tis")


def reward_curve(arm: str, progress: np.ndarray) -> np.ndarray:
    """Expected reward at `progress` (S,) from 0 to 1: every arm learns, `grpo` and `grpo_mis` then fall."""
    learned = 0.32 + 0.45 * (1 - np.exp(-3 * progress))
    fall = {"grpo": (0.55, 22.0), "grpo_mis": (0.8, 14.0)}.get(arm)
    if fall is None:
        return learned + {"sc_tis": 0.03, "sc_mis": -0.02}.get(arm, 0.0)
    return learned / (1 + np.exp(fall[1] * (progress - fall[0])))


def metric_rows(arm: str, seed: int, steps: int) -> dict[str, list]:
    random = np.random.default_rng([ARMS.index(arm) if arm in ARMS else 99, seed])
    progress = np.arange(1, steps + 1) / steps
    reward = np.clip(reward_curve(arm, progress) + random.normal(0, 0.04, steps), 0, 1)
    k3 = 4e-3 * np.exp(random.normal(0, 0.25, steps) + (1.5 - 4.5 * (reward - 0.3)) * progress)
    rows: dict[str, list] = {name: [0.0] * steps for name in schema.METRICS.names}
    rows |= {
        name: [None] * steps
        for name in schema.METRICS.names
        if name.startswith(("val_", "clean_", "head_", "correction_"))
    }
    rows["step"] = list(range(1, steps + 1))
    rows["reward_mean"] = reward.tolist()
    rows["k3_kl"] = np.where(random.random(steps) < 0.2, 0.0, k3 * 1e-5).tolist() if arm == "grpo_bf16" else k3.tolist()
    length = 14 + 10 * np.clip(0.6 - reward, 0, 1) + random.normal(0, 0.3, steps)
    rows["response_length_mean"] = length.tolist()
    rows["truncated_share"] = np.clip((length - 14) / 12, 0, 1).tolist()
    for step in range(8, steps + 1, 8):
        rows["val_reward_mean"][step - 1] = float(np.clip(reward[step - 1] + 0.05, 0, 1))
        rows["clean_reward_mean"][step - 1] = float(np.clip(reward[step - 1] - 0.05, 0, 1))
    if arm in CENTERED:
        rows["head_mass_sampler"] = (0.95 + 0.02 * progress + random.normal(0, 0.002, steps)).tolist()
        rows["head_mass_trainer"] = (0.948 + 0.02 * progress + random.normal(0, 0.002, steps)).tolist()
        scale = {"sc": 0.05, "sc_mis": 0.01, "sc_tis": 0.006}[arm]
        rows["correction_abs_mean"] = (scale * np.exp(random.normal(0, 0.1, steps))).tolist()
    return rows


def timing_rows(arm: str, seed: int, steps: int) -> dict[str, list]:
    random = np.random.default_rng([seed, steps])
    phases = {
        "rollout_s": 0.42,
        "reward_s": 0.05,
        "update_s": 0.3,
        "sync_s": 0.02,
        "validation_s": 0.06,
        "checkpoint_s": 0.03,
    }
    rows: dict[str, list] = {name: (mean * random.uniform(0.9, 1.1, steps)).tolist() for name, mean in phases.items()}
    rows["step"] = list(range(1, steps + 1))
    within = [name for name in phases if name != "checkpoint_s"]  # that one is the step before's
    rows["step_s"] = [sum(rows[name][index] for name in within) + 0.01 for index in range(steps)]
    rows["tokens_per_s"] = random.uniform(3000, 4000, steps).tolist()
    rows["peak_rss_bytes"] = [700_000_000] * steps
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows["started_at"] = [start + timedelta(seconds=index) for index in range(steps)]
    return rows


def write_run(folder: Path, arm: str, seed: int, steps: int, changes: dict[str, list] | None = None) -> Path:
    """One run below the experiment's `folder`; `changes` replaces whole columns of metrics.parquet."""
    run = folder / "runs" / arm / f"seed{seed}"
    run.mkdir(parents=True)
    metadata = {"experiment": folder.name, "arm": arm, "seed": str(seed)}
    rows = metric_rows(arm, seed, steps) | (changes or {})
    columns = {
        field.name: pa.array([int(value) if value is not None else None for value in rows[field.name]], field.type)
        if pa.types.is_integer(field.type)
        else pa.array(rows[field.name], field.type)
        for field in schema.METRICS
    }
    for name, values, layout in (
        ("metrics.parquet", columns, schema.METRICS),
        ("timing.parquet", timing_rows(arm, seed, steps), schema.TIMING),
    ):
        (run / name).write_bytes(schema.table_bytes(pa.table(values, schema=layout), metadata))
    (run / "config.yaml").write_text(f"experiment: {folder.name}\nscore_centering:\n  is_mode: none\narm: {arm}\n")
    config = {
        "experiment": folder.name,
        "score_centering": {"centering": arm in CENTERED, "is_mode": "none"},
        "actor_rollout_ref": {
            "rollout": {
                "quantization": None if arm == "grpo_bf16" else "int8",
                "engine_kwargs": {"vllm": {"kv_cache_dtype": "auto" if arm == "grpo_bf16" else "int4_per_token_head"}},
            }
        },
        "seed": 42,
        "data": {"train_batch_size": 32, "val_batch_size": 64},
    }
    identity = {
        "arm": arm,
        "seed": seed,
        "config": config,
        "config_sha256": hashlib.sha256(json.dumps(config).encode()).hexdigest(),
        "dataset_manifest_sha256": "d" * 64,
        "model_manifest_sha256": "e" * 64,
        "quantised_config_sha256": None if arm == "grpo_bf16" else "f" * 64,
        "trainer_revision": 1,
        "device": "cpu",
        "package_sha256": "a" * 64,
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
    }
    (run / "run.json").write_text(json.dumps({"schema_version": 1, "identity": identity}))
    return run


def write_json(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def write_stages(folder: Path, arms: Sequence[str]) -> None:
    """Gates and manifests of the stages before training."""
    limits = {"k3_kl": {"max": 0.01}, "top1_agreement": {"min": 0.9}, "head_mass": {"min": 0.9, "max": 0.995}}
    numbers = {"k3_kl": 0.0031, "top1_agreement": 0.974, "head_mass": 0.953, "prompts": 64}
    numbers |= {"bf16.entropy": 1.274, "bf16.response_length_mean": 22.9, "task.answerable_share": 0.625}
    numbers |= {"int8_int4kv.entropy": 1.281, "int8_int4kv.response_length_mean": 23.04}
    gate = {"schema_version": 1, "passed": True, "failures": [], "limits": limits, "numbers": numbers}
    write_json(folder / "precision" / "gate.json", gate)
    drawing = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 36"><circle cx="18" cy="18" r="9"/></svg>'
    (folder / "precision" / "validation.svg").write_text(drawing)
    for arm in arms:
        limits = {"k3_kl_max": {"max": 0.05}, "nonfinite_updates": {"max": 0}}
        numbers = {"k3_kl_max": 0.004, "nonfinite_updates": 0, "steps": 3}
        if arm in CENTERED:
            limits, numbers = (
                limits | {"head_mass_sampler_min": {"min": 0.8}},
                numbers | {"head_mass_sampler_min": 0.94},
            )
        gate = {"schema_version": 1, "passed": True, "failures": [], "limits": limits, "numbers": numbers}
        write_json(folder / "smoke" / arm / "gate.json", gate)
    source = {"kind": "reasoning_gym", "task": "chain_sum", "package_version": "0.1.25", "parameters": {"min_terms": 2}}
    files = {name: {"rows": rows, "sha256": "b" * 64} for name, rows in (("train.parquet", 2000), ("test.parquet", 50))}
    dataset = {"source": source, "files": files, "split": {"seed": 42}}
    write_json(folder / "dataset" / "manifest.json", dataset)
    model = {"source": {"kind": "init"}, "parameters": 1_100_000, "files": {"model.safetensors": "c" * 64}}
    write_json(folder / "model" / "manifest.json", model)


def write_experiment(folder: Path, arms: Sequence[str] = ARMS, seeds: Sequence[int] = (0,), steps: int = 60) -> Path:
    for arm in arms:
        for seed in seeds:
            write_run(folder, arm, seed, steps)
    write_stages(folder, arms)
    return folder
