import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loading import load
from score_centering.diagnosis.corrections import BOUNDS, ICEPOP, NEEDS_ADVANTAGES, RULES, effects
from score_centering.diagnosis.tokens import Tokens, by_bin, drift_share, read_tokens, regressions, shift_correlations
from score_centering.settings import UserError

batch = load("unit/diagnosis/diagnosis_simulation.py").batch


def tokens_of(ratios: list[list[float]], advantages: list[float] | None = None, p: float = 0.5) -> Tokens:
    """Rollouts with the given p/q of each token, p being the same for all."""
    owner = np.repeat(np.arange(len(ratios)), [len(row) for row in ratios])
    flat = np.array([ratio for row in ratios for ratio in row])
    logp = np.full(len(flat), np.log(p))
    position = np.concatenate([np.arange(len(row)) for row in ratios])
    gains = None if advantages is None else np.asarray(advantages, float)[owner]
    return Tokens(owner, position, logp - np.log(flat), logp, gains)


def test_what_each_correction_would_do_by_hand():
    """Three rollouts of 2 tokens. Their ratios: 1·1 = 1, 4·1 = 4, 0.25·0.9 = 0.225; geometric means: 1, 2, 0.474."""
    tokens = tokens_of([[1, 1], [4, 1], [0.25, 0.9]], advantages=[1, 1, -1], p=0.2)
    found = {effect.correction: effect for effect in effects(tokens)}

    def shares(correction):
        effect = found[correction]
        return pytest.approx((effect.masked, effect.bounded, effect.masked_rollouts))

    assert shares("tis") == (0, 1 / 6, 0)  # 4
    assert shares("mis") == (1 / 6, 0, 1 / 3)  # 0.25 is below 0.5; 4 is inside
    assert shares("icepop") == (2 / 6, 0, 2 / 3)  # 4 and 0.25
    assert shares("cispo") == (0, 0, 0)  # 0 to 5
    assert shares("seq_tis") == (0, 2 / 6, 0)  # 4
    assert shares("seq_mis") == (2 / 6, 0, 1 / 3)  # 0.225
    assert shares("geo_mask") == (4 / 6, 0, 2 / 3)  # 2 and 0.474
    assert shares("opsm") == (2 / 6, 0, 1 / 3)  # A < 0 and a mean of −d of 0.747, above 0.5
    assert shares("gspo") == (4 / 6, 0, 2 / 3)  # A > 0 and 2; A < 0 and 0.474
    # p − q: 0.15 for ratio 4 with A > 0, not above 0.2; −0.6 for 0.25 with A < 0
    assert shares("dppo_tv") == (1 / 6, 0, 1 / 3)
    # binary KL of p 0.2 against q 0.05: 0.2·log 4 + 0.8·log(0.8/0.95) = 0.140 > 0.1; against 0.8: larger still
    assert shares("kpop") == (2 / 6, 0, 2 / 3)
    weights = np.array([1, 1, 2, 1, 0.25, 0.9])
    assert found["tis"].effective == pytest.approx(weights.sum() ** 2 / (6 * (weights**2).sum()))


@pytest.mark.parametrize("noise", [0.1, 1.0])
def test_the_objective_weighs_the_same_tokens_alike(noise):
    """The corrections of `objectives.weights`, in torch and written by others, are the reference for these in NumPy."""
    import torch

    from score_centering.objectives.batch import TokenBatch
    from score_centering.objectives.weights import build_weight

    tokens, _ = batch(0, 60, noise=noise)

    def tensor(values):
        return torch.from_numpy(np.asarray(values, np.float64))

    rows = TokenBatch(
        target_ids=torch.from_numpy(tokens.token),
        sampler_logprobs=tensor(tokens.q),
        advantages=tensor(tokens.advantage),
        loss_weights=torch.ones(len(tokens.q), dtype=torch.float64),
        mask=torch.ones(len(tokens.q), dtype=torch.bool),
        sequence_ids=torch.from_numpy(tokens.rollout),
    )
    for name, (_, weigh) in RULES.items():
        bounds = BOUNDS | ({"mis_max": ICEPOP} if name == "icepop" else {})
        expected = build_weight(name, bounds).of_sampled(tensor(tokens.p), rows)
        assert weigh(tokens)[0] == pytest.approx(expected.numpy(), rel=1e-9), name


def test_corrections_that_need_advantages_are_left_out_without_them():
    assert {effect.correction for effect in effects(tokens_of([[1, 1]]))}.isdisjoint(NEEDS_ADVANTAGES)


def test_equal_sides_keep_everything():
    tokens, _ = batch(0)
    for effect in effects(tokens):
        assert (effect.masked, effect.bounded, effect.effective) == pytest.approx((0, 0, 1))


def test_regression_recovers_a_planted_slope():
    """|d| = 0.1 + 0.02·position: one standard deviation of 0 … 19 is √33.25 = 5.766 positions, so 0.1153 nats."""
    rng = np.random.default_rng(0)
    position = np.tile(np.arange(20), 50)
    gap = (0.1 + 0.02 * position) * rng.choice([-1, 1], 1000)
    p = rng.normal(-1, 0.5, 1000)
    size = next(r for r in regressions(Tokens(np.repeat(np.arange(50), 20), position, p - gap, p)) if r.target == "|d|")
    assert size.coefficients["position"][0] == pytest.approx(0.1153, rel=0.02)
    assert abs(size.coefficients["log-prob"][1]) < 4 < size.coefficients["position"][1]
    assert size.explained > 0.98


def test_bins_of_equal_size():
    gap = np.log(np.array([1.0, 1.0, 2.0, 2.0]))  # K3 of ratio 2: 2 − 1 − log 2
    assert by_bin(np.array([3.0, 1.0, 7.0, 5.0]), gap, 2) == [(3.0, 0.0), (7.0, pytest.approx(1 - np.log(2)))]


def test_shift_is_found_on_either_side():
    for shift in (1, -2):
        found = shift_correlations(batch(0, shift=shift)[0])
        assert max(found, key=lambda s: found[s]) == shift


def test_drift_share_by_hand():
    """One token, V = 2 in the head: p (0.6, 0.3), q (0.7, 0.2), so ρ = 1; drift (0.1, −0.1); signal (1, 0) − p."""
    tokens = Tokens(
        np.array([0]), np.array([0]), np.log([0.7]), np.log([0.6]), np.array([2.0]), None, np.array([5]),
        np.array([[5, 9]]), np.log([[0.7, 0.2]]), np.log([[0.6, 0.3]]),
    )  # fmt: skip
    found = drift_share(tokens)
    assert found.drift == pytest.approx(2 * np.hypot(0.1, 0.1))
    assert found.signal == pytest.approx(2 * np.hypot(0.4, 0.3))
    assert drift_share(tokens_of([[1, 1]])) is None


def test_drift_is_zero_where_both_sides_agree():
    found = drift_share(batch(0)[0])
    assert found.share < 1e-9


@pytest.mark.parametrize("kind", ["tokens.parquet", "rollouts.parquet", "rollouts.jsonl"])
def test_the_same_tokens_from_each_shape(tmp_path, kind):
    q, p = [[-1.0, -2.0, -3.0], [-0.5]], [[-1.1, -2.1, -2.9], [-0.4]]
    if kind == "tokens.parquet":
        table = {"rollout": [7, 7, 7, 9], "sampler_logprob": [*q[0], *q[1]], "trainer_logprob": [*p[0], *p[1]]}
        pq.write_table(pa.table(table), tmp_path / kind)
    elif kind == "rollouts.parquet":
        pq.write_table(pa.table({"rollout_log_probs": q, "old_log_probs": p}), tmp_path / kind)
    else:  # verl's dump pads responses and masks the padding
        rows = [
            {"rollout_log_probs": [*a, 0.0], "old_log_probs": [*b, 0.0], "response_mask": [1] * len(a) + [0]}
            for a, b in zip(q, p, strict=True)
        ]
        (tmp_path / kind).write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokens = read_tokens(tmp_path)
    assert tokens.rollout.tolist() == [0, 0, 0, 1]
    assert tokens.position.tolist() == [0, 1, 2, 0]
    assert tokens.gap.tolist() == pytest.approx([-0.1, -0.1, 0.1, 0.1])


def test_files_are_joined_without_mixing_their_rollouts(tmp_path):
    for name in ("a", "b"):
        pq.write_table(
            pa.table({"logprobs": [[-1.0], [-2.0]], "log_probs": [[-1.0], [-2.0]]}), tmp_path / f"{name}.parquet"
        )
    assert read_tokens(tmp_path).rollout.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"old_log_probs": [[-1.0]]}, "no column with the sampler's log-probs; known names are sampler_logprob"),
        ({"rollout_log_probs": [[-1.0]]}, "no column with the trainer's log-probs"),
        (
            {"rollout_log_probs": [[-1.0, -2.0]], "old_log_probs": [[-1.0]]},
            "row 1: old_log_probs has 1 entries, must be 2",
        ),
        ({"sampler_logprob": [-1.0], "trainer_logprob": [-1.0]}, "needs a column that tells rollouts apart"),
    ],
)
def test_bad_rollouts_in_one_line(tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=message):
        read_tokens(tmp_path)


def test_no_rollouts(tmp_path):
    with pytest.raises(UserError, match=r"no \*\.parquet or \*\.jsonl with rollouts"):
        read_tokens(tmp_path)
