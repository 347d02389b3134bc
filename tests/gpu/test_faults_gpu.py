"""The fault injector on a GPU: the entries that the CPU damages, also under a captured graph."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from score_centering.precision import int4_kv, requantise
from score_centering.precision.int8 import FORMAT as INT8
from score_centering.rollout import LocalEngine, Sampling
from score_centering.rollout.local.cache_faults import CacheFaults

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CONFIG = LlamaConfig(
    vocab_size=3000,
    hidden_size=192,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    initializer_range=0.1,
)
W8A8 = {"quantization_config": INT8.quantization_config(["Linear"], ["lm_head"])}
SAMPLING = Sampling(temperature=1.0, max_tokens=16, greedy=False, stop_token_ids=(3,))


@pytest.mark.parametrize("kind", ["codes", "scale", "nan"])
def test_the_same_entries_as_on_the_cpu(kind):
    torch.manual_seed(0)
    packed = int4_kv.encode(torch.randn(64, 4, 3, 32).bfloat16())
    owner, positions = torch.arange(64), torch.arange(3).expand(64, 3)
    damaged = []
    for device in ("cpu", "cuda"):
        faults = CacheFaults(0.2, kind, True, seed=5)
        faults.begin(2, 11, torch.device(device))
        damaged.append(faults.damage(packed.to(device), owner.to(device), positions.to(device), 1).cpu())
    assert torch.equal(*damaged) and not torch.equal(damaged[0], packed)


def test_captured_steps_meet_new_transient_faults_in_every_call():
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16)

    def calls(faults: CacheFaults | None) -> list[list[list[float]]]:
        engine = LocalEngine(
            CONFIG, quantised_config=W8A8, kv_cache="int4_per_token_head", max_batch=16,
            max_prompt_length=8, max_response_length=16, device="cuda", faults=faults,
        )  # fmt: skip
        weights = {name: p.detach().cuda() for name, p in model.named_parameters()}
        engine.sync(requantise(weights, engine.listed), 0)
        prompts = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
        return [[r.logprobs.tolist() for r in engine.generate(prompts, 8, SAMPLING, 1, 0)] for _ in range(3)]

    healthy, transient, persistent = (
        calls(faults) for faults in (None, CacheFaults(0.3, "codes", True, 0), CacheFaults(0.3, "codes", False, 0))
    )
    assert healthy[0] == healthy[1] == healthy[2]
    assert persistent[0] == persistent[1] == persistent[2] != healthy[0]
    assert transient[0] != transient[1] != transient[2]
