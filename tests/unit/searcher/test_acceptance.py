"""Comparing an engine's log-probabilities with the trainer's."""

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tba.common.errors import CanaryMismatch, SnapshotRefused
from tba.common.weights.snapshot import Canary, Manifest, Snapshot
from tba.searcher.engines.acceptance import Acceptance, mismatch, routes_or_quantizes
from tba.searcher.engines.engine import Mismatch


def scoring(*scores):
    """A `Score` function that returns these log-probabilities."""
    return lambda sequences: [
        np.asarray(score, np.float32)[: len(ids) - 1] for score, ids in zip(scores, sequences, strict=True)
    ]


def acceptance(tolerance, *, routed=False):
    return Acceptance({}, vocabulary=2, tolerance=tolerance, routed=routed)


def snapshot(logprobs):
    sequences = [[1] * (len(one) + 1) for one in logprobs]
    return Snapshot(Path("v1"), Manifest("run", 1, 1, 0.0, {}, Canary(sequences, logprobs)), [])


def test_the_mismatch_of_a_hand_computed_case():
    kl = ((math.exp(0.5) - 1.5) + (math.exp(-0.1) - 0.9)) / 3
    found = mismatch(np.array([-1.0, -2.0, -3.0]), np.array([-1.0, -2.5, -2.9]))
    assert found == pytest.approx(Mismatch(0.5, 0.2, kl))


@pytest.mark.parametrize(
    ("scores", "refused"),
    [
        # One token is off by rounding.
        ([-1.0, -1.0, -1.0, -1.9], False),
        ([-1.0, -1.0, -1.0, -2.1], True),
        # No token is far off, but all of them a little.
        ([-1.3, -1.3, -1.3, -1.3], True),
        ([-1.0, -1.0, -1.0, float("nan")], True),
    ],
)
def test_the_largest_and_the_mean_difference_are_bounded(scores, refused):
    one = snapshot([[-1.0, -1.0], [-1.0, -1.0]])
    score = scoring(scores[:2], scores[2:])
    with pytest.raises(CanaryMismatch, match="v1 does not match") if refused else contextlib.nullcontext():
        assert acceptance(1.0).check_canary(score, one, context=100).maximum == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize(
    ("canary", "problem"),
    [
        (Canary([[1, 0], [1, 0, 1]], [[-1.0], [-1.0]]), "sequence 2 has 3 tokens and 1 log-probabilities"),
        (Canary([[1]], [[]]), "sequence 1 has 1 token and 0 log-probabilities: it needs one"),
        (Canary([[1, 0], [1, 2]], [[-1.0], [-1.0]]), "sequence 2 has token ids outside 0 to 1"),
        (Canary([[1, 0]], []), "it has logprobs for 0 of 1 sequence"),
        (Canary([], []), "it has logprobs for 0 of 0 sequences"),
    ],
)
def test_a_canary_that_cannot_be_scored_is_refused_and_its_first_bad_sequence_named(canary, problem, tmp_path):
    save_file({}, tmp_path / "model.safetensors")
    manifest = Manifest("run", 1, 1, 0.0, {}, canary)
    with pytest.raises(SnapshotRefused, match=f"v1 has an unusable canary: {problem}"):
        acceptance(1.0).check(Snapshot(tmp_path, manifest, [tmp_path / "model.safetensors"]))


def test_the_beginning_of_a_sequence_that_fills_the_context_is_compared():
    one = snapshot([[-1.0] * 9])
    score = scoring([-1.0, -1.0, -1.0] + [-9.0] * 6)
    assert acceptance(0.1).check_canary(score, one, context=5).maximum == 0


# The tokens of a trainer's canary: three texts of 6 for a dense model, four of 16 with routed experts.
DENSE_TOKENS, TOKENS = 3 * 5, 4 * 15


def dense(generator, size=DENSE_TOKENS):
    """Differences of log-probabilities of a dense model in bfloat16, as published: root mean square 0.03 nats."""
    return generator.normal(0, 0.03, size)


def routed(generator, size=TOKENS):
    """Those of a mixture of experts whose routing was not replayed, as published: mean 0.37, at most 3.6 nats."""
    return generator.choice([-1, 1], size) * generator.exponential(0.37, size).clip(max=3.6)


def found(difference):
    return mismatch(difference, np.zeros_like(difference))


def accepted(one, difference, *, calibrate=False):
    try:
        one.accept(found(difference), 1, calibrate=calibrate)
    except CanaryMismatch:
        return False
    return True


def test_published_differences_of_dense_models_are_within_their_limits_without_calibration_and_those_of_mixtures_not():
    generator = np.random.default_rng(0)
    one = acceptance(0.5)
    assert all(accepted(one, dense(generator)) for _ in range(1000))
    assert not accepted(one, routed(generator))


@pytest.mark.slow
def test_mixtures_are_accepted_once_calibrated_and_wrong_weights_of_them_are_not():
    """Wrong weights: log-probabilities that have nothing to do with the trainer's, several nats apart."""
    generator = np.random.default_rng(0)
    for _ in range(200):
        one = acceptance(0.5, routed=True)
        assert accepted(one, routed(generator), calibrate=True)
        assert all(accepted(one, routed(generator)) for _ in range(20))
        assert not accepted(one, generator.normal(-3.0, 2.0, TOKENS))
        assert not accepted(one, np.full(TOKENS, np.nan))


def test_wrong_weights_of_a_mixture_do_not_calibrate_and_a_calibration_never_lowers_the_limits():
    one = acceptance(0.5, routed=True)
    assert not accepted(one, np.random.default_rng(0).normal(-3.0, 2.0, TOKENS), calibrate=True)
    assert not accepted(one, np.random.default_rng(1).normal(-1.0, 0.3, TOKENS))
    one = acceptance(0.5)
    assert accepted(one, np.zeros(DENSE_TOKENS), calibrate=True)
    assert accepted(one, np.full(DENSE_TOKENS, 0.12))
    assert not accepted(one, np.full(DENSE_TOKENS, 0.13))


def test_a_dense_model_that_differs_more_than_usual_on_the_same_weights_is_accepted_from_then_on():
    difference = np.tile([0.2, -0.2, 0.7, 0.1], TOKENS // 4)
    one = acceptance(0.5)
    with pytest.raises(
        CanaryMismatch, match=r"v7 .* by 0.7 on the canary .* KL divergence of .*; 0\.5, 0\.125 and 0\.125"
    ):
        one.accept(found(difference), 7)
    assert accepted(one, difference, calibrate=True)
    assert accepted(one, difference * 1.5)
    assert not accepted(one, difference * 4)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 8}, False),
        ({"num_local_experts": 8}, True),
        ({"text_config": {"n_routed_experts": 64}}, True),
        ({"quantization_config": {"quant_method": "fp8"}}, True),
        ({"num_experts": None, "text_config": None}, False),
    ],
)
def test_models_with_experts_or_quantized_weights_are_recognized(config, expected):
    assert routes_or_quantizes(config) == expected
