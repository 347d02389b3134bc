"""One training run with rewards that follow from the texts, so that a model that knows nothing still learns.

`python verl_loop_program.py TRAINER ARM FOLDER RUN_DIR [key=value …]` trains the model in FOLDER; `save` as TRAINER
writes that model instead. With `verl`, RUN_DIR.notes gets a line of JSON for each step's rollouts, and one for what the
rollout servers hold after each hand-over of the weights.
"""

import hashlib
import json
import sys
import warnings
import zlib
from pathlib import Path

import numpy as np

warnings.simplefilter("ignore")

from score_centering.data import Problem  # noqa: E402
from score_centering.precision.int8 import FORMAT as INT8  # noqa: E402
from score_centering.reward.scorer import ScoreResult  # noqa: E402
from score_centering.runs import make_identity, open_run  # noqa: E402
from score_centering.settings import load_settings, run_main  # noqa: E402
from score_centering.settings.stages import TrainStage  # noqa: E402
from score_centering.training.task import Inputs  # noqa: E402

ROOT = Path(__file__).parents[2]
SETTINGS = [ROOT / "config/config.yaml", ROOT / "config/test.yaml"]
OVERRIDES = ["trainer.total_training_steps=3", "trainer.test_freq=2", "trainer.save_freq=1", "data.val_batch_size=3"]
OVERRIDES += ["prompt.instruction=Box it.", "data.max_prompt_length=48", "trainer.clean_reward=false"]
PROBLEMS = [
    Problem(prompt=f"What is {a} + {b}?", answer=str(a + b), id=f"{a}+{b}", source="test")
    for a in range(5)
    for b in range(4)
]
W8A8 = INT8.quantization_config(["Linear"], ["lm_head", "re:.*in_proj_[ab]$"])


class TextScorer:
    """Rewards a third of all texts, whatever they say; like `reward.Scorer`, it gives a truncated one nothing."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "TextScorer":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def score(self, texts: list[str], answers: list[str], truncated: list[bool], thinking: list[bool]) -> ScoreResult:
        rewards = [float(zlib.crc32(text.encode()) % 3 == 0) for text in texts]
        return ScoreResult(np.array(rewards, dtype=np.float32), 0, 0)


def save_model(folder: Path) -> None:
    from score_centering.model.scratch import build_model, train_tokenizer

    scratch = load_settings(SETTINGS).model.scratch
    tokenizer = train_tokenizer([problem.prompt for problem in PROBLEMS], scratch.tokenizer.vocab_size)
    model = build_model(scratch, tokenizer).bfloat16()
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "w8a8.json").write_text(json.dumps({"quantization_config": W8A8}))


def noting(trainer: type, notes: Path) -> type:
    """A VerlTrainer that writes down what its servers sampled and what weights they hold."""
    import ray

    def note(**values: object) -> None:
        with notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    class Noting(trainer):
        def update(self, rollouts, gains, step):
            note(step=step, rollouts=[[r.token_ids.tolist(), r.logprobs.tolist()] for r in rollouts])
            return super().update(rollouts, gains, step)

        def sync(self, step):
            super().sync(step)
            servers = self._ray.llm_server_manager.server_handles
            note(step=step, servers=ray.get([server.__ray_call__.remote(held) for server in servers]))

    return Noting


def held(server) -> dict[str, object]:
    """Runs inside a local rollout server: a digest of its engine's weights, and whether it has generated anything."""
    digest = hashlib.sha256()
    for _, tensor in sorted(server._engine._weights._targets.items()):
        digest.update(tensor.cpu().float().contiguous().numpy().tobytes())
    return {"weights": digest.hexdigest(), "has_generated": bool(server._engine._records)}


def main() -> None:
    trainer, arm, folder, run_dir, *overrides = sys.argv[1:]
    if trainer == "save":
        return save_model(Path(folder))
    settings = load_settings(SETTINGS, [f"trainer.name={trainer}", *OVERRIDES, *overrides], arm)
    stage = TrainStage.of(settings)
    if trainer == "verl":
        from score_centering.training.verl.driver import verl_trainer as module

        train = module.train_with_verl
        module.VerlTrainer = noting(module.VerlTrainer, Path(f"{run_dir}.notes"))
    else:
        from score_centering.training import local as module

        train = module.train_locally
    module.Scorer = TextScorer
    inputs = Inputs(PROBLEMS, PROBLEMS, Path(folder), Path(folder) / "w8a8.json")
    with open_run(run_dir, make_identity("test", arm, 0, stage.identity(), stage.runtime.device, 1)) as run:
        train(run, stage, arm, 0, inputs)
    return None


if __name__ == "__main__":
    run_main(main)
