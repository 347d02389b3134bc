"""Short trainings with one known fault each, from the project's own engine, objective and masters: labelled logs.

Each run is a line of `RUNS`: its name, the verdict it must get, and what is wrong with it. The faults are planted
between engine and trainer, where they happen in practice; nothing in the package knows of them.

    python docs/results/diagnosis/plant.py --model MODEL_DIR --problems FILE.jsonl --w8a8 FILE.json --out DIR [NAME …]

MODEL_DIR: a warm-started model with its tokenizer; FILE.jsonl: `prompt` and `answer` a line; the JSON names the INT8
layers. DIR gets <name>.jsonl (a row a step) and <name>.tokens.parquet (both log-probs of the last step's tokens).
"""

import argparse
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from kinds import RUNS

from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.model.sources import load_folder
from score_centering.objectives import Objective
from score_centering.objectives import advantages as group_advantages
from score_centering.precision import listed_linears, requantise
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.precision.noise import WeightNoise
from score_centering.rollout import LocalEngine, Rollout
from score_centering.rollout.engine import Sampling
from score_centering.rollout.local import sampling as engine_sampling
from score_centering.rollout.local.cache_faults import CacheFaults
from score_centering.settings.training_blocks import Actor, Optim
from score_centering.training.masters import MasterWeights
from score_centering.training.update import Updater

PROMPTS, SAMPLES, HEAD = 12, 6, 32
CLEAN_EVERY = 5  # steps between two looks at the weights in BF16, where the sampler is coarser
INSTRUCTION = "Reason step by step and put the final answer in \\boxed{}."
BOX = re.compile(r"\\boxed\{\s*(-?\d+)\s*\}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--model", "--problems", "--w8a8", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("names", nargs="*", default=list(RUNS), help="default: every run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    problems = [json.loads(line) for line in arguments.problems.read_text().splitlines()]
    w8a8 = json.loads(arguments.w8a8.read_text())
    for name in arguments.names:
        target = arguments.out / f"{name}.jsonl"
        if not target.exists():
            rows, tokens = train(arguments.model, problems, w8a8, **RUNS[name][1])
            pq.write_table(pa.table(tokens), arguments.out / f"{name}.tokens.parquet")
            target.write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(
    model_dir: Path,
    problems: list[dict],
    w8a8: dict,
    *,
    seed: int,
    steps: int = 30,
    lr: float = 0.5,
    int8: bool = False,
    kv: str = "auto",
    noise: float = 0.0,
    fault: tuple[float, str, bool] | None = None,
    centering: bool = False,
    sync_every: int = 1,
    sampler_temperature: float = 1.0,
    trainer_temperature: float = 1.0,
    top_p: float = 1.0,
    uniform: float = 0.0,
    shift: int = 0,
    dropped: float = 0.0,
    logprobs_of: int = 0,
    raw: bool = False,
    summed: bool = False,
) -> tuple[list[dict], dict[str, np.ndarray]]:
    """One run: its rows, and both log-probs of its last step's tokens."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model, tokenizer = load_folder(model_dir)
    model.requires_grad_(True)
    install_cpu_kernels(model)
    objective = Objective(name="planted", centering=centering, is_mode="none", reduction="token-mean")
    optim = Optim(name="sgd", lr=lr or 1.0)
    actor = Actor.model_construct(
        optim=optim, policy_loss="planted", mini_batches=1, ppo_epochs=1, ppo_micro_batch_size_per_gpu=72, grad_clip=1e9
    )
    masters = MasterWeights(model, optim)
    updater = Updater(model, masters, objective, actor, trainer_temperature, "skip")
    prompts = [tuple(encode_prompt(tokenizer, problem["prompt"], INSTRUCTION, True)) for problem in problems]
    listed = listed_linears(w8a8, model) if int8 else {}
    engine = LocalEngine(
        model.config,
        quantised_config=w8a8 if int8 else None,
        kv_cache=kv,
        max_batch=PROMPTS * SAMPLES,
        max_prompt_length=max(map(len, prompts)),
        max_response_length=48,
        faults=CacheFaults(*fault, seed=seed) if fault else None,
    )
    clean = LocalEngine(
        model.config,
        quantised_config=None,
        kv_cache="auto",
        max_batch=PROMPTS * SAMPLES,
        max_prompt_length=max(map(len, prompts)),
        max_response_length=48,
    )
    stop_ids = stop_token_ids(tokenizer, model.generation_config.eos_token_id)
    sampling = Sampling(temperature=sampler_temperature, max_tokens=48, greedy=False, stop_token_ids=stop_ids)
    whole = engine_sampling.log_probabilities
    engine_sampling.log_probabilities = lambda logits, temperature: mixed(
        nucleus(whole(logits, temperature), top_p), uniform
    )
    rows, tokens, history = [], {}, []
    try:
        for step in range(1, steps + 1):
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
            history = [*history, weights][-(logprobs_of + 1) :]
            if (step - 1) % sync_every == 0:
                coarse = WeightNoise(noise, seed).apply(weights) if noise else weights
                engine.sync(requantise(coarse, listed), step)
            chosen = rng.choice(len(prompts), PROMPTS, replace=False)
            draw = int(rng.integers(2**31))
            sampled = engine.generate([prompts[i] for i in chosen], SAMPLES, sampling, draw, HEAD if centering else 0)
            answers = [str(problems[i]["answer"]) for i in np.repeat(chosen, SAMPLES)]
            rewards = judged(tokenizer, sampled, answers)
            if int8 and (step - 1) % CLEAN_EVERY == 0:
                clean.sync(weights, step)
                again = clean.generate([prompts[i] for i in chosen], SAMPLES, sampling, draw, 0)
                rows.append({"step": step, "clean_reward_mean": judged(tokenizer, again, answers).mean()})
            groups = torch.from_numpy(np.repeat(np.arange(PROMPTS), SAMPLES))
            advantages = group_advantages(torch.from_numpy(rewards), groups, "mean")
            lengths = np.array([len(rollout.token_ids) for rollout in sampled])
            if logprobs_of:  # of the weights of so many updates ago
                model.load_state_dict(history[0])
                scores, _ = updater._score(sampled, advantages)
                model.load_state_dict(weights)
                sampled = rescored(sampled, scores)
            if raw:  # before the temperature, though the tokens were drawn after it
                unscaled = Updater(model, masters, objective, actor, 1.0, "skip")
                scores, _ = unscaled._score(sampled, advantages)
                sampled = rescored(sampled, scores)
            sampled = [spoiled(rollout, rng, shift, dropped) for rollout in sampled]
            scores, _ = updater._score(sampled, advantages)
            advantages_used = advantages * float(lengths.sum()) if summed else advantages
            if lr:
                metrics = updater.update(sampled, advantages_used, step)
            else:
                before = [master.clone() for master in masters.masters.values()]
                metrics = updater.update(sampled, advantages_used, step) | {"learning_rate": 0.0}
                model.load_state_dict(weights)
                for master, old in zip(masters.masters.values(), before, strict=True):
                    master.copy_(old)
            q = np.concatenate([rollout.logprobs for rollout in sampled]).astype(np.float64)
            p = np.concatenate([score.float().numpy() for score in scores]).astype(np.float64)
            rows.append(
                {
                    **metrics,
                    "step": step,
                    "reward_mean": rewards.mean(),
                    "response_length_mean": lengths.mean(),
                    "truncated_share": np.mean([rollout.finish_reason == "length" for rollout in sampled]),
                    "generated_tokens": int(lengths.sum()),
                    "advantage_abs_mean": advantages.abs().mean().item(),
                    "sampler_age": (step - 1) % sync_every,
                    "sampler_nll": -q.mean(),
                    "trainer_nll": -p.mean(),
                }
            )
            owner = np.repeat(np.arange(len(sampled)), [len(rollout.token_ids) for rollout in sampled])
            tokens = {
                "rollout": owner,
                "position": np.concatenate([np.arange(len(rollout.token_ids)) for rollout in sampled]),
                "token_id": np.concatenate([rollout.token_ids for rollout in sampled]),
                "sampler_logprob": q,
                "trainer_logprob": p,
                "advantage": advantages.numpy()[owner].astype(np.float64),
            }
    finally:
        engine_sampling.log_probabilities = whole
        engine.close()
        clean.close()
    return rows, tokens


def judged(tokenizer, rollouts: list[Rollout], answers: list[str]) -> np.ndarray:
    """1 for a finished rollout whose last box holds the answer, else 0."""
    texts = tokenizer.batch_decode([rollout.token_ids for rollout in rollouts], skip_special_tokens=True)
    return np.array(
        [
            rollout.finish_reason == "stop" and BOX.findall(text)[-1:] == [answer]
            for rollout, text, answer in zip(rollouts, texts, answers, strict=True)
        ],
        np.float64,
    )


def nucleus(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """(B, V) of the smallest set of mass `top_p`, renormalised; the others get a log-prob that is never drawn."""
    if top_p >= 1:
        return logprobs
    ordered, index = logprobs.sort(dim=-1, descending=True)
    outside = ordered.exp().cumsum(-1) - ordered.exp() >= top_p
    ordered = ordered.masked_fill(outside, -1e4)
    ordered = ordered - ordered.logsumexp(-1, keepdim=True)
    return torch.empty_like(logprobs).scatter_(-1, index, ordered)


def mixed(logprobs: torch.Tensor, uniform: float) -> torch.Tensor:
    """(B, V) of (1 − `uniform`)·q + `uniform`/V: now and then any token, and its log-prob is told truly."""
    if not uniform:
        return logprobs
    floor = torch.full_like(logprobs, math.log(uniform / logprobs.shape[-1]))
    return torch.logaddexp(logprobs + math.log1p(-uniform), floor)


def rescored(rollouts: list[Rollout], scores: list[torch.Tensor]) -> list[Rollout]:
    return [replace(rollout, logprobs=score.float().numpy()) for rollout, score in zip(rollouts, scores, strict=True)]


def spoiled(rollout: Rollout, rng: np.random.Generator, shift: int, dropped: float) -> Rollout:
    """Log-probs moved by `shift` positions; or, in a share `dropped`, one token lost so that the rest is misaligned."""
    if shift:
        return replace(rollout, logprobs=np.roll(rollout.logprobs, shift))
    if dropped and rng.random() < dropped and len(rollout.token_ids) > 3:
        gone = int(rng.integers(1, len(rollout.token_ids) - 1))
        return replace(rollout, token_ids=np.delete(rollout.token_ids, gone), logprobs=rollout.logprobs[:-1])
    return rollout


if __name__ == "__main__":
    main()
