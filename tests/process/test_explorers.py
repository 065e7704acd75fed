"""A run with a searcher of its policy and an explorer: who sampled which rows, and what the trainer makes of them."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tba.tests.conftest import EXAMPLE_MODEL
from tba.tests.helpers.checks import wait_until
from tba.tests.helpers.whole_run import small_sections
from tba.tests.process.conftest import changed

pytestmark = [pytest.mark.torch]
_STEPS = 12
_TEMPERATURE = 1.3
# Float32 on the CPU: the rows of a batch may round otherwise than one row alone.
_ROUNDING = 1e-4
_TOKENS = """SELECT y.prompt_ids, y.response_ids, y.logprobs FROM payloads y JOIN trajectories t ON t.id = y.trajectory
    WHERE t.policy IS NOT NULL ORDER BY t.id LIMIT 20"""


def other_model(path):
    """Save a model of the same tokenizer with other weights, and return it."""
    shutil.copytree(EXAMPLE_MODEL, path)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE_MODEL, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(path)
    return model


def test_rows_of_policy_and_explorer_are_trained_on_and_each_names_its_sampler(make_config, start_tba, tmp_path):
    explorer = other_model(tmp_path / "explorer")
    run = make_config(**small_sections(train={"steps": _STEPS, "learning_rate": 1e-5}))
    start_tba("buffer", "serve", "--config", run.file)
    sets = changed(f"search.policy={tmp_path / 'explorer'}", f"search.temperature={_TEMPERATURE}")
    searchers = start_tba("search", "--config", run.file), start_tba("search", "--config", run.file, *sets)
    logs = [tmp_path / f"tba{number}.log" for number in (1, 2)]
    wait_until(lambda: all("joined" in log.read_text() for log in logs), what="both joined")
    trainer = start_tba("train", "--config", run.file)
    assert trainer.wait(300) == 0
    assert [searcher.wait(60) for searcher in searchers] == [0, 0]

    counts = run.query(
        """SELECT policy, temperature, policy_version >= 0, searcher LIKE '%-explorer.%', SUM(times_trained) > 0
        FROM trajectories GROUP BY 1, 2, 3, 4 ORDER BY 1"""
    )
    assert counts == [(None, 1.0, 1, 0, 1), (str(tmp_path / "explorer"), _TEMPERATURE, 0, 1, 1)]
    for row in run.query(_TOKENS):
        prompt, response, logprobs = (
            np.frombuffer(blob, kind) for blob, kind in zip(row, ("i4", "i4", "f4"), strict=True)
        )
        with torch.no_grad():
            logits = explorer(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
        own = (logits / _TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(response).long()[:, None])[:, 0]
        assert np.allclose(own.numpy(), logprobs, atol=_ROUNDING)
    # Its age is that of the run's newest weights when it was begun, not that of step 0.
    ages = run.query(
        """SELECT b.step - c.staleness, (SELECT n.step FROM snapshots n WHERE n.run = t.run
            AND n.version = json_extract(t.metadata, '$.newest_version'))
        FROM consumption_rows c JOIN batches b ON b.id = c.batch JOIN trajectory_rows t ON t.id = c.trajectory
        WHERE t.policy_version < 0"""
    )
    assert ages
    assert all(counted_from == step for counted_from, step in ages)
    shares = [line.get("explored_share", 0.0) for line in run.lines()]
    assert len(shares) == _STEPS
    assert 0 < max(shares) <= 1
