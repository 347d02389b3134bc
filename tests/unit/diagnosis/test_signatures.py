import numpy as np
import pytest

from loading import load
from score_centering.diagnosis.signatures import signatures
from score_centering.diagnosis.tokens import token_signatures

simulation = load("unit/diagnosis/diagnosis_simulation.py")
batch, log_from, log_of, log_softmax = (
    simulation.batch, simulation.log_from, simulation.log_of, simulation.log_softmax
)  # fmt: skip

FAULTS = {  # fault: (its settings, cause from the log, cause from tokens)
    "temperature 0.7": ({"sampler_temperature": 0.7}, "temperature", "temperature"),
    "temperature 1.3": ({"sampler_temperature": 1.3}, "temperature", "temperature"),
    "top-p 0.9": ({"top_p": 0.9}, "top-p or top-k", "top-p or top-k"),
    "shift 1": ({"shift": 1}, "shifted or re-tokenised log-probs", "shifted log-probs"),
    "log-probs before temperature": (
        {"sampler_temperature": 0.7, "trainer_temperature": 0.7, "recorded": log_softmax},
        "log-probs of another distribution",
        None,
    ),
}
HONEST = {
    "exact": {},
    "a little noise": {"noise": 0.05},
    "noise": {"noise": 0.3},
    "much noise": {"noise": 0.8},
    "the same temperature on both sides": {"sampler_temperature": 0.7, "trainer_temperature": 0.7, "noise": 0.2},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_signature(fault):
    settings, cause, _ = FAULTS[fault]
    assert signatures(log_of(**settings))[0].cause == cause
    assert cause in {bug.cause for bug in signatures(log_of(**settings, noise=0.1))}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_shows_in_its_tokens(fault):
    settings, _, cause = FAULTS[fault]
    found = token_signatures(batch(0, 200, **settings)[0])
    assert found and (cause is None or found[0].cause == cause)


def test_lost_tokens_are_seen_in_the_rollouts():
    found = token_signatures(batch(0, 200, cut=0.2, noise=0.02)[0])
    assert found[0].cause == "re-tokenised responses"


@pytest.mark.parametrize("settings", HONEST.values(), ids=HONEST)
def test_an_honest_mismatch_has_none(settings):
    """Whatever the size of the mismatch: several seeds each would show a rule that fires by chance."""
    assert signatures(log_of(20, **settings)) == []
    assert [token_signatures(batch(seed, 200, **settings)[0]) for seed in range(3)] == [[]] * 3


@pytest.mark.parametrize("scale", [0.5, 0.7, 1.4])
def test_heads_give_the_temperature_exactly(scale):
    (found,) = token_signatures(batch(1, 100, sampler_temperature=scale)[0])
    assert f"a factor of {scale:.2f}" in found.evidence


def test_the_mass_that_top_p_keeps():
    """log p − log q = log(kept mass) for each token: by hand from the sampled nuclei."""
    log = log_of(top_p=0.8)
    kept = np.exp(-log.series["k1_kl"].values.mean())
    assert 0.8 < kept < 0.9
    assert f"over {kept:.0%} of the mass" in signatures(log)[0].evidence


def test_learning_rate_zero():
    (found,) = signatures(log_from(learning_rate=np.zeros(10), reward=0.5))
    assert found.cause == "learning rate 0"
    assert signatures(log_from(learning_rate=[0.0] * 3 + [1e-6] * 7, reward=0.5)) == []


def test_a_policy_ratio_that_moves_while_nothing_is_trained():
    warm = [0.0] * 3 + [1e-6] * 7
    (found,) = signatures(log_from(learning_rate=warm, policy_kl=[2e-3] * 10))
    assert found.cause == "old log-probs of other weights"
    assert signatures(log_from(learning_rate=warm, policy_kl=[0.0] * 3 + [2e-3] * 7)) == []


def test_a_sampler_that_moves_while_nothing_is_trained():
    still = {"learning_rate": [0.0] * 8 + [1e-6] * 4}
    (found,) = signatures(log_from(**still, k3_kl=[1e-4] * 4 + [1e-2] * 8))
    assert found.cause == "a sampler that moves while nothing is trained"
    assert signatures(log_from(**still, k3_kl=[1e-3] * 8 + [1e-1] * 4)) == []


def test_sum_for_mean():
    """A mean over tokens of A·log p with |A| 0.3 and 0.8 nats can't be 68; nor can a first gradient norm be 5000."""
    assert signatures(log_from(loss=[-68.0] * 5, advantage=0.3, entropy=0.8))[0].cause == "sum for mean"
    assert signatures(log_from(grad_norm=[5000.0] * 5, reward=0.5))[0].cause == "sum for mean"
    assert signatures(log_from(loss=[-0.3] * 5, grad_norm=[5.0] * 5, advantage=0.3, entropy=0.8)) == []
    assert signatures(log_from(grad_norm=[2.0] * 5 + [1e5] * 5, reward=0.5)) == []  # it exploded later: no sum


def test_log_probs_that_are_not_finite():
    assert signatures(log_from(k3_kl=[np.nan] * 6, reward=0.5))[0].cause == "log-probs are not finite"


def test_uncorrelated_probabilities():
    assert "0.04" in signatures(log_from(correlation=[0.04] * 5, reward=0.5))[0].evidence
    assert signatures(log_from(correlation=[0.97] * 5, reward=0.5)) == []
