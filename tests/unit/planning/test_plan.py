"""What a plan counts against transformers' own model, the engine's own bytes, and the measured peak of real updates."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5_moe import Qwen3_5MoeTextConfig

from score_centering.planning.plan import Planner, model_config, verdict
from score_centering.planning.throughput import decoding_seconds
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine
from score_centering.settings import Settings, UserError, load_settings
from score_centering.settings.model_blocks import HubModel, Model

ROOT = Path(__file__).parents[3]
FILES = [ROOT / "config/config.yaml", ROOT / "config/b200.yaml"]
SHAPE = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
CASE = {
    "shape": SHAPE, "micro_batch": 32, "ignore": ["lm_head", "re:.*in_proj_[ab]$"], "max_num_seqs": 32, "prompt": 16,
    "response": 48, "prompts": 8, "n": 4,
}  # fmt: skip


def settings_of(case: dict, clean_reward: bool = False) -> Settings:
    return load_settings(
        FILES[:1],
        [
            f"data.train_batch_size={case['prompts']}",
            f"data.max_prompt_length={case['prompt']}",
            f"data.max_response_length={case['response']}",
            f"trainer.clean_reward={str(clean_reward).lower()}",
            f"actor_rollout_ref.rollout.n={case['n']}",
            f"actor_rollout_ref.rollout.max_num_seqs={case['max_num_seqs']}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={case['micro_batch']}",
        ],
    )


@pytest.fixture(scope="module")
def nine_billion():
    """One planner for all, since it counts a pass over the model once; and the settings of an arm."""
    config, source = model_config(load_settings(FILES).model, None)
    assert source.startswith("transformers' Qwen3_5TextConfig")
    return Planner(config, "h200"), load_settings(FILES, arm="sc")


def test_nine_billion_parameters_fit_a_b200_and_no_h200(nine_billion, monkeypatch):
    planner, arm = nine_billion
    assert planner.parameters == 8_953_803_264
    memory = planner.memory(arm)
    state = sum(memory.phases[0].held[name] for name in ("weights, FP32", "gradients, FP32", "AdamW, FP32"))
    assert state == 16 * planner.parameters
    refused = verdict(memory, "H200", planner.memory_bytes, arm)
    assert refused.startswith("does not fit H200: 1") and "AdamW alone are 143.26 GB. It takes more GPUs" in refused
    assert memory.peak.total > planner.memory_bytes > state
    monkeypatch.setattr(planner, "device", "b200")
    assert verdict(planner.memory(arm), "B200", planner.memory_bytes, arm).startswith("fits B200: at most 1")


def test_the_validation_is_a_stage_of_the_plan(nine_billion):
    """Sizes by hand: a head of 248,320 × 4,096; 16 positions of drift and as many of one rollout more."""
    planner, arm = nine_billion
    phases = {phase.name: phase.held for phase in planner.validation([arm]).phases}
    assert list(phases) == ["validation, engine", "validation, log-probs", "validation, exact drift"]
    assert all(held["weights, BF16"] == 2 * 8_953_803_264 for held in phases.values())
    assert phases["validation, exact drift"]["LM head and its bias, FP64"] == 16 * 248_320 * 4_096
    assert phases["validation, exact drift"]["log-probs of trainer and sampler"] == 12 * 32 * 248_320
    assert phases["validation, log-probs"]["log-probs of a chunk"] == 1 << 30
    longer = load_settings(FILES, ["data.max_response_length=30000"], arm="sc")
    grown = planner.validation([longer]).phases[1].held["forward"] / phases["validation, log-probs"]["forward"]
    assert 0.9 < grown < 1.2, "a forward of one rollout of 31,024 tokens takes what one of three of 9,216 does"


def test_a_mixture_is_planned_as_one():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": None}
    overrides = ["model.scratch.architecture=qwen3_5_moe_text"]
    overrides += [f"model.scratch.parameters.{name}={value}" for name, value in experts.items() if value]
    overrides += ["model.scratch.parameters.intermediate_size=null"]
    config, _ = model_config(load_settings(FILES[:1], overrides).model, None)
    assert (config.model_type, config.num_experts) == ("qwen3_5_moe_text", 4)
    dense, _ = model_config(load_settings(FILES[:1]).model, None)
    layers, width = config.num_hidden_layers, config.hidden_size
    expected = 4 * 3 * width * 64  # gate, up and down of the experts
    planner = Planner(config, "cpu")
    assert planner.parameters > Planner(dense, "cpu").parameters - layers * 3 * width * dense.intermediate_size + (
        layers * expected
    )


@pytest.mark.parametrize(("preset", "device"), [("h200_x2", "h200"), ("node8", "h100"), ("node8", "h200")])
def test_the_presets_of_several_gpus_fit_them(nine_billion, preset, device):
    planner = Planner(nine_billion[0].config, device)
    files = [*FILES, ROOT / f"config/{preset}.yaml"]
    arms = [load_settings(files, arm=arm) for arm in load_settings(files).run.arms]
    for arm in arms:
        assert planner.memory(arm).peak.total < planner.memory_bytes
    assert planner.validation(arms).peak.total < planner.memory_bytes
    alone = planner.memory(load_settings(FILES, arm="sc")).peak.total
    assert planner.memory(arms[0]).peak.total < alone and alone > planner.memory_bytes


def test_two_gpus_share_the_state(nine_billion):
    planner, arm = nine_billion
    two = planner.memory(load_settings(FILES, ["trainer.n_gpus_per_node=2"], arm="sc"))
    assert two.phases[0].held["AdamW, FP32"] == planner.memory(arm).phases[0].held["AdamW, FP32"] // 2
    assert verdict(two, "H200", planner.memory_bytes, arm).startswith("fits H200")


def test_offloading_leaves_the_rollouts_more_room(nine_billion):
    planner, arm = nine_billion
    overrides = [f"actor_rollout_ref.actor.fsdp_config.{what}_offload=true" for what in ("param", "optimizer")]
    offloaded, memory = planner.memory(load_settings(FILES, overrides, arm="sc")), planner.memory(arm)
    assert memory.phases[-1].total - offloaded.phases[-1].total == 12 * planner.parameters
    assert offloaded.phases[0] == memory.phases[0], "verl brings both back for the update"


def test_an_engine_that_can_not_sleep_is_held_during_the_update_too(nine_billion):
    planner, arm = nine_billion
    asleep = planner.memory(arm)
    awake = planner.memory(load_settings(FILES, ["actor_rollout_ref.rollout.name=local"], arm="sc"))
    engine = {name: size for name, size in awake.phases[-1].held.items() if name.startswith("rollout engine: ")}
    assert sum(engine.values()) > planner.parameters
    for with_engine, without in zip(awake.phases[:2], asleep.phases[:2], strict=True):
        assert with_engine.total - without.total == sum(engine.values())


def test_the_engine_holds_what_it_says():
    settings, config = settings_of(CASE, clean_reward=True), Qwen3_5TextConfig(**SHAPE)
    held = Planner(config, "cpu").memory(settings).phases[0].held
    scheme = {"quantization_config": INT8.quantization_config(["Linear"], CASE["ignore"])}
    engine = LocalEngine(
        AutoModelForCausalLM.from_config(config).config,
        quantised_config=scheme,
        kv_cache="int4_per_token_head",
        max_batch=CASE["max_num_seqs"],
        max_prompt_length=CASE["prompt"],
        max_response_length=CASE["response"],
    )
    found = engine.nbytes()
    assert held["rollout engine: KV cache"] == found["kv_cache"]
    assert held["rollout engine: states of linear attention"] == found["linear_attention"]
    weights = found["linear_values"] + found["linear_scales"] + found["other_weights"]
    assert held["rollout engine: weights"] == pytest.approx(weights, rel=0.01)
    engine.close()
    clean = LocalEngine(
        AutoModelForCausalLM.from_config(config).config,
        quantised_config=None,
        kv_cache="auto",
        max_batch=CASE["max_num_seqs"],
        max_prompt_length=CASE["prompt"],
        max_response_length=CASE["response"],
    )
    prompts = sum(clean._prompts.nbytes().values())
    assert held["engine of the clean reward"] == pytest.approx(sum(clean.nbytes().values()) + prompts, rel=0.01)


def test_the_plan_is_within_15_percent_of_a_measured_peak():
    program = Path(__file__).with_name("measure_local_memory.py")
    command = [sys.executable, str(program), json.dumps(CASE), "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    planner = Planner(Qwen3_5TextConfig(**SHAPE), "cpu")
    planner.process = measured["process_bytes"]  # this process has imported more
    planned = planner.memory(settings_of(CASE)).peak
    assert planned.name == "backward"
    print(f"planned {planned.total:,}, measured {measured['peak_bytes'] + measured['process_bytes']:,}")
    assert planned.total == pytest.approx(measured["peak_bytes"] + measured["process_bytes"], rel=0.15)


def test_hours_name_their_sources(nine_billion):
    planner, arm = nine_billion
    hours = planner.hours(arm, (1024, 4096))
    assert all("measured" in source or "assumed" in source for source in hours.sources)
    assert planner.hours(arm, (1024, 8192)).parts["rollout"] == pytest.approx(2 * hours.parts["rollout"])
    scored = planner.hours(load_settings(FILES, arm="grpo"), (1024, 4096))
    assert scored.parts["update"] == pytest.approx(1.25 * hours.parts["update"]), "GRPO scores the old policy"


def test_a_measured_decoding_speed_is_returned_as_measured():
    seconds, source = decoding_seconds("vllm", "h200", 8.95e9, 256, 128, bf16=False)
    assert 256 / seconds == pytest.approx(9_830) and "assumed" not in source
    slower, source = decoding_seconds("vllm", "h100", 8.95e9, 256, 128, bf16=False)
    assert slower > seconds and "assumed: scaled by memory bandwidth" in source


def test_an_unknown_hub_model_needs_its_config(monkeypatch, tmp_path):
    model = Model(source="hub", hub=HubModel(repo="someone/model", revision="main"))
    monkeypatch.setattr("score_centering.planning.plan.try_to_load_from_cache", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"^model\.hub: config\.json of someone/model is not in the hub client's cache"):
        model_config(model, None)
    Qwen3_5TextConfig(**SHAPE).save_pretrained(tmp_path)
    config, source = model_config(model, tmp_path / "config.json")
    assert config.hidden_size == 192 and source == str(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"^--model-config: .* is no config\.json"):
        model_config(model, tmp_path)


def test_the_config_of_a_mixture_counts_every_expert(tmp_path):
    """Given as the file of a hub's model: 2 layers of 3 experts, each of gate, up and down, 16 wide on 32 inputs."""
    sizes = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, layer_types=["full_attention"] * 2, head_dim=16)
    sizes |= dict(num_attention_heads=2, num_key_value_heads=1, num_experts_per_tok=2, tie_word_embeddings=True)
    counted = {}
    for experts in (3, 4):
        shape = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=experts)
        Qwen3_5MoeTextConfig(**sizes, **shape).save_pretrained(tmp_path)
        config, _ = model_config(load_settings(FILES).model, tmp_path / "config.json")
        assert (config.model_type, config.num_experts) == ("qwen3_5_moe_text", experts)
        counted[experts] = Planner(config, "cpu").parameters
    # one expert more in each of 2 layers: its 3 matrices, and its row of the router
    assert counted[4] - counted[3] == 2 * (3 * 16 * 32 + 32)


def test_the_program_prints_every_arm(monkeypatch, capsys):
    import runpy

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["workflow/scripts/plan.py", "data.max_response_length=8"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("workflow/scripts/plan.py", run_name="__main__")
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny on this machine's CPU: 396,008 parameters (model.scratch.parameters)"
    assert sum(line.startswith("    fits this machine's CPU") for line in lines) == 4, "three kinds of arm, validation"
    assert sum(line.startswith("    the most of all stages: ") for line in lines) == 1
    assert {line.split()[0] for line in lines if "rollout 0." in line} >= {"grpo_bf16", "grpo", "sc", "sc_mis"}
