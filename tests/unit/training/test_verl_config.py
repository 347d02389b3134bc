"""verl's configuration: the full recipe's against a golden file, nothing started, and what is refused."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from score_centering.settings import UserError, load_settings
from score_centering.settings.stages import TrainStage
from score_centering.training.verl.driver import verl_config

if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is not installed (requirements/test.lock has it)", allow_module_level=True)

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).with_name("golden") / "verl_b200_sc.yaml"
B200 = ["config/config.yaml", "config/b200.yaml"]


def stage(arm: str = "sc", *overrides: str, smoke: bool = False) -> TrainStage:
    return TrainStage.of(load_settings([ROOT / file for file in B200], overrides, arm, smoke))


def resolved(stage: TrainStage) -> dict:
    made = verl_config.verl_config(stage, "sc", 0, Path("model"), Path("w8a8/config.json"))
    return OmegaConf.to_container(made)


def test_print_config_of_the_full_recipe_is_the_golden_file():
    """WRITE_GOLDEN=1 writes the file."""
    program = ["workflow/scripts/train.py", "--baseline", "sc", "--print-config", "--configfile", "config/b200.yaml"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SC_")}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"verl", "ray", "hydra", "vllm"}, "printing starts nothing"
    if os.environ.get("WRITE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(done.stdout, encoding="utf-8")
    assert done.stdout == GOLDEN.read_text(encoding="utf-8"), "intended? WRITE_GOLDEN=1 pytest tests/unit/training"


def test_the_golden_file_is_the_published_recipe():
    golden = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    actor, rollout = golden["actor_rollout_ref"]["actor"], golden["actor_rollout_ref"]["rollout"]
    assert golden["trainer"]["total_training_steps"] == 200
    assert (golden["trainer"]["test_freq"], golden["trainer"]["val_before_train"]) == (16, False)
    assert (golden["data"]["train_batch_size"], golden["data"]["max_response_length"]) == (32, 8192)
    assert (actor["optim"]["lr"], actor["ppo_micro_batch_size_per_gpu"], actor["strategy"]) == (1e-6, 1, "fsdp2")
    assert not actor["fsdp_config"]["param_offload"] and not actor["fsdp_config"]["optimizer_offload"]
    assert (rollout["name"], rollout["n"], rollout["temperature"], rollout["top_p"], rollout["top_k"]) == (
        "vllm", 4, 1.0, 1, -1,
    )  # fmt: skip
    assert (rollout["quantization"], rollout["dtype"]) == ("int8", "bfloat16")
    assert rollout["quantization_config_file"] == "results/b200/model/w8a8/config.json"
    engine = rollout["engine_kwargs"]["vllm"]
    assert (engine["kv_cache_dtype"], engine["max_logprobs"]) == ("int4_per_token_head", 128)
    assert not rollout["enable_chunked_prefill"] and not rollout["enable_prefix_caching"]
    assert rollout["max_num_batched_tokens"] == rollout["max_model_len"] == 10240
    assert (rollout["logprobs_mode"], rollout["val_kwargs"]["do_sample"]) == ("processed_logprobs", False)


def test_smoke_preset():
    smoke = resolved(stage(smoke=True))
    assert (smoke["data"]["train_batch_size"], smoke["actor_rollout_ref"]["rollout"]["n"]) == (2, 4)
    assert (smoke["trainer"]["total_training_steps"], smoke["trainer"]["save_freq"]) == (3, -1)
    assert smoke["trainer"]["test_freq"] == -1


def test_grpo_asks_for_sampled_log_probs_only():
    engine = resolved(stage("grpo"))["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]
    assert engine["max_logprobs"] == 1


def test_no_gradient_clip_is_an_infinite_bound_for_verl():
    made = resolved(stage("sc", "actor_rollout_ref.actor.grad_clip=null"))["actor_rollout_ref"]["actor"]
    assert made["grad_clip"] == made["optim"]["clip_grad"] == float("inf")


def test_several_nodes_by_verls_own_settings():
    wide = resolved(stage("sc", "trainer.nnodes=2", "trainer.n_gpus_per_node=8"))
    assert (wide["trainer"]["nnodes"], wide["trainer"]["n_gpus_per_node"]) == (2, 8)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (
            "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
            "must be 1, because gated linear attention carries",
        ),
        ("actor_rollout_ref.actor.use_fused_kernels=true", "must be false, because verl's fused LM head returns"),
    ],
)
def test_what_the_loss_or_the_model_can_not_take_is_refused_with_a_reason(override, reason):
    with pytest.raises(UserError, match=reason):
        stage("sc", override)


def test_gpus_that_do_not_divide_an_update_are_refused():
    with pytest.raises(UserError, match=r"n_gpus_per_node = 3: must divide the 128 rollouts of an update"):
        resolved(stage("sc", "trainer.n_gpus_per_node=3"))


def test_another_verl_is_refused(monkeypatch):
    monkeypatch.setattr(verl_config, "version", lambda _: "0.9.0")
    with pytest.raises(UserError, match=r"verl 0\.9\.0 is installed, this project is made for verl 0\.8\.0"):
        resolved(stage())


def test_micro_batches_are_equal():
    assert [verl_config.micro_batch_size(rows, 8) for rows in (8, 12, 7, 13, 5)] == [8, 6, 7, 1, 5]
