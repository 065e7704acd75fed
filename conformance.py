"""Check that an engine keeps the promises of `tba.searcher.engines.engine.Engine`; `tba task check` checks tasks.

    from tba import conformance

    for finding in conformance.check_engine(my_engine, "path/to/model"):
        print(finding)

The engine begins with the weights of that Hugging Face model directory. What is right is computed by transformers, in
float32 on the CPU: take a small model. `python -m tba.conformance MODULE:FUNCTION MODEL [TOLERANCE]` calls
FUNCTION(MODEL) for the engine, prints the findings, and exits with 1 if a promise is broken, with 2 if it cannot check.
"""

import argparse
import copy
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tba.common.errors import EngineError, SnapshotError, TbaError, named
from tba.common.system.durable import temporary_directory
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import causal_model, from_directory
from tba.common.weights.snapshot import Canary, Manifest, Snapshot, describe_files, directory_name, read, seal
from tba.common.wire.trajectory import Float32, Int32
from tba.searcher.engines.engine import Engine, Generation, GenerationRequest, SamplingSettings

Float64 = NDArray[np.float64]

_TOKENS = 12
_GREEDY = SamplingSettings(temperature=0.0, top_p=1.0, max_tokens=_TOKENS)
_SAMPLINGS = (
    SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=_TOKENS),
    SamplingSettings(temperature=0.7, top_p=1.0, max_tokens=_TOKENS),
    SamplingSettings(temperature=1.3, top_p=0.8, max_tokens=_TOKENS),
)
# Steps without an answer after which an engine is taken to have lost a request.
_MOST_STEPS = 10_000
# Change of the weights between two snapshots, relative to each tensor's standard deviation: far above any tolerance.
_CHANGE = 0.3


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise, and how it was broken. `error` is empty for a promise that was kept."""

    promise: str
    error: str = ""

    def __str__(self) -> str:
        return f"broken: {self.promise}: {self.error}" if self.error else f"kept: {self.promise}"


def check_engine(engine: Engine, model: str | Path, *, tolerance: float = 1e-3) -> Iterator[Finding]:
    """Yield a finding for each promise. The engine ends with other weights; the caller closes it.

    `tolerance` is the largest accepted difference of a log-probability in nats: 1e-3 fits float32, bfloat16 needs more.
    """
    with tempfile.TemporaryDirectory() as directory:
        trial = _Trial(engine, Path(model), Path(directory), tolerance)
        for promise, check in _PROMISES.items():
            try:
                check(trial)
            except Exception as error:  # noqa: BLE001
                yield Finding(promise, named(error).splitlines()[0])
            else:
                yield Finding(promise)


class Broken(Exception):
    """A promise was not kept."""


class _Trial:
    """An engine, the model that it serves, and snapshots of changed weights."""

    def __init__(self, engine: Engine, source: Path, directory: Path, tolerance: float) -> None:
        import torch

        self.engine, self.source, self.tolerance = engine, source, tolerance
        self.model = causal_model(source, torch.float32)
        self.vocabulary: int = self.model.config.get_text_config().vocab_size
        self._directory, self._random, self._requests = directory, np.random.default_rng(0), 0

    def tokens(self, count: int) -> list[int]:
        ids: list[int] = self._random.integers(0, self.vocabulary, count).tolist()
        return ids

    def submit(self, prompt: Sequence[int], sampling: SamplingSettings) -> GenerationRequest:
        self._requests += 1
        request = GenerationRequest(self._requests, np.asarray(prompt, np.int32), sampling)
        self.engine.submit(request)
        return request

    def finish(self) -> list[Generation]:
        found: list[Generation] = []
        for _ in range(_MOST_STEPS):
            if not self.engine.in_flight:
                return found
            found += self.engine.step()
        raise Broken(f"{self.engine.in_flight} requests are unanswered after {_MOST_STEPS} steps")

    def generate(self, prompt: Sequence[int], sampling: SamplingSettings) -> Generation:
        self.submit(prompt, sampling)
        (generation,) = self.finish()
        return generation

    def logits(self, ids: Sequence[int], model: Any = None) -> Float64:
        """Return transformers' logits [T, V] in float64."""
        import torch

        with torch.no_grad():
            logits: Float64 = (model or self.model)(torch.tensor([list(ids)])).logits[0].double().numpy()
        return logits

    def logprobs(self, ids: Sequence[int], model: Any = None) -> Float64:
        """Return log p(token t + 1 | tokens up to t) at temperature 1: [T - 1]."""
        return _chosen(_log_softmax(self.logits(ids, model)[:-1]), ids[1:])

    def changed_model(self) -> Any:
        import torch

        model, generator = copy.deepcopy(self.model), torch.Generator().manual_seed(self._requests)
        for parameter in model.parameters():
            size = _CHANGE * (parameter.std().item() if parameter.numel() > 1 else 1.0)
            parameter.data += size * torch.randn(parameter.shape, generator=generator)
        return model

    def snapshot(self, model: Any, *, canary_error: float = 0.0, incomplete: bool = False) -> Snapshot:
        """Write a snapshot of the next version; its canary is wrong by `canary_error`, or a tensor is missing."""
        from safetensors.torch import load_file, save_file

        version = self.engine.weights_version + 1
        final = self._directory / f"{self._requests}-{canary_error}-{incomplete}" / directory_name(version)
        final.parent.mkdir()
        temporary = temporary_directory(final)
        # The dtype of the directory that the engine knows: an engine may refuse another one.
        _save_as(model, self.source, temporary)
        if incomplete:
            weights = load_file(temporary / "model.safetensors")
            del weights[min(weights, key=lambda name: weights[name].numel())]
            save_file(weights, temporary / "model.safetensors")
        sequences = [self.tokens(length) for length in (8, 40)]
        expected = [(self.logprobs(ids, model) + canary_error).tolist() for ids in sequences]
        manifest = Manifest(
            "conformance", version, version, 0.0, describe_files(temporary), Canary(sequences, expected)
        )
        seal(temporary, final, manifest)
        return read(final)

    def expect(self, found: Float64 | Float32, right: Float64, what: str) -> None:
        if found.shape != right.shape:
            raise Broken(f"{what} have the shape {found.shape} instead of {right.shape}")
        difference = float(np.abs(found - right).max(initial=0.0))
        if not difference <= self.tolerance:
            raise Broken(f"{what} differ by {difference:.2g} nats from those of transformers")

    def expect_served(self, version: int) -> None:
        """Raise Broken unless the engine serves the weights of `model` as this version."""
        if self.engine.weights_version != version:
            raise Broken(f"the engine says version {self.engine.weights_version} instead of {version}")
        ids = self.tokens(30)
        self.expect(self.engine.score([ids])[0], self.logprobs(ids), "scores")


def _save_as(model: Any, source: Path, directory: Path) -> None:
    """Save a model as the weights of `source` are saved: with its dtype, as one file."""
    from transformers import AutoConfig

    dtype = from_directory(AutoConfig, source).dtype
    saved = copy.deepcopy(model).to(dtype) if dtype else model
    saved.save_pretrained(directory, max_shard_size="1TB")


def _log_softmax(logits: Float64) -> Float64:
    shifted = logits - logits.max(-1, keepdims=True)
    normalized: Float64 = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalized


def _chosen(logprobs: Float64, ids: Sequence[int] | Int32) -> Float64:
    chosen: Float64 = logprobs[np.arange(len(ids)), np.asarray(ids)]
    return chosen


def _sampling_logprobs(logits: Float64, sampling: SamplingSettings) -> Float64:
    """Return log-probabilities [T, V] with temperature and top-p: the fewest tokens whose probabilities reach top-p."""
    logprobs = _log_softmax(logits / (sampling.temperature or 1.0))
    for row in logprobs:
        order = np.argsort(-row)
        before = np.cumsum(np.exp(row[order])) - np.exp(row[order])
        row[order[before >= sampling.top_p]] = -np.inf
    return _log_softmax(logprobs)


def _answers_each_request_once(trial: _Trial) -> None:
    if trial.engine.step():
        raise Broken("an idle engine returned a response")
    # More than it generates at once, of different lengths.
    count = min(trial.engine.max_in_flight, 64) + 3
    asked = [trial.submit(trial.tokens(1 + number % 9), _GREEDY).id for number in range(count)]
    if trial.engine.in_flight != count:
        raise Broken(f"{trial.engine.in_flight} requests in flight after {count} were submitted")
    found = sorted(generation.id for generation in trial.finish())
    if found != asked:
        raise Broken(
            f"{count} requests were submitted, {len(found)} answered, {len(set(found) & set(asked))} of them asked"
        )


def _describes_its_responses(trial: _Trial) -> None:
    version = trial.engine.weights_version
    for sampling in _SAMPLINGS:
        one = trial.generate(trial.tokens(5), sampling)
        length = len(one.response_ids)
        if not 1 <= length <= _TOKENS or one.stop_reason not in ("eos", "length"):
            raise Broken(f"{length} tokens of at most {_TOKENS}, stopped by {one.stop_reason!r}")
        if one.stop_reason == "length" and length != _TOKENS:
            raise Broken(f"a response of {length} tokens is said to have reached the limit of {_TOKENS}")
        if one.version_runs.tolist() != [[version, length]]:
            raise Broken(f"version runs {one.version_runs.tolist()} for {length} tokens of version {version}")


def _tells_the_log_probabilities_of_its_sampling(trial: _Trial) -> None:
    for sampling in (_GREEDY, *_SAMPLINGS):
        prompt = trial.tokens(7)
        one = trial.generate(prompt, sampling)
        logits = trial.logits([*prompt, *one.response_ids.tolist()])[len(prompt) - 1 : -1]
        what = f"log-probabilities with temperature {sampling.temperature} and top-p {sampling.top_p}"
        trial.expect(one.logprobs, _chosen(_sampling_logprobs(logits, sampling), one.response_ids), what)


def _takes_the_most_probable_token(trial: _Trial) -> None:
    prompt = trial.tokens(7)
    one = trial.generate(prompt, _GREEDY)
    logprobs = _log_softmax(trial.logits([*prompt, *one.response_ids.tolist()])[len(prompt) - 1 : -1])
    trial.expect(_chosen(logprobs, one.response_ids), logprobs.max(-1), "greedy tokens")


def _scores_sequences(trial: _Trial) -> None:
    sequences = [trial.tokens(length) for length in (2, 33, 17)]
    for ids, found in zip(sequences, trial.engine.score(sequences), strict=True):
        trial.expect(found, trial.logprobs(ids), f"scores of {len(ids)} tokens")


def _refuses_what_no_response_fits(trial: _Trial) -> None:
    for prompt in ([], [trial.vocabulary], [-1]):
        try:
            trial.submit(prompt, _GREEDY)
        except EngineError:
            continue
        raise Broken(f"the prompt {prompt} of a vocabulary of {trial.vocabulary} was taken")


def _continues_with_new_weights(trial: _Trial) -> None:
    version = trial.engine.weights_version
    model = trial.changed_model()
    trial.submit(trial.tokens(5), _GREEDY)
    done = trial.engine.step() + trial.engine.step()
    snapshot = trial.snapshot(model)
    trial.engine.prepare(snapshot)
    trial.engine.load_weights(snapshot)
    trial.model = model
    trial.expect_served(version + 1)
    (one,) = [*done, *trial.finish()]
    runs = one.version_runs.tolist()
    # A model that ends its first tokens has been answered by the old weights alone.
    if runs[0][0] != version or sum(count for _, count in runs) != len(one.response_ids):
        raise Broken(f"version runs {runs} for {len(one.response_ids)} tokens that versions {version} and later made")
    if len(one.response_ids) == _TOKENS and [number for number, _ in runs] != [version, version + 1]:
        raise Broken(f"version runs {runs} of a response that was in flight during the swap to {version + 1}")


def _keeps_its_weights_if_a_snapshot_is_refused(trial: _Trial) -> None:
    version, model = trial.engine.weights_version, trial.changed_model()
    refused = {
        "a wrong canary": trial.snapshot(model, canary_error=1.0),
        "a tensor less": trial.snapshot(model, incomplete=True),
    }
    for what, snapshot in refused.items():
        trial.submit(trial.tokens(5), _GREEDY)
        try:
            trial.engine.load_weights(snapshot)
        except SnapshotError:
            trial.expect_served(version)
        else:
            raise Broken(f"a snapshot with {what} was loaded")
        if [one.version_runs[-1][0] for one in trial.finish()] != [version]:
            raise Broken(f"a request in flight was lost, or answered by refused weights with {what}")


_PROMISES: dict[str, Callable[[_Trial], None]] = {
    "each request is answered once": _answers_each_request_once,
    "a response tells its length, its end and its versions": _describes_its_responses,
    "log-probabilities are those of the sampling distribution": _tells_the_log_probabilities_of_its_sampling,
    "temperature 0 takes the most probable token": _takes_the_most_probable_token,
    "score is teacher-forced at temperature 1": _scores_sequences,
    "a prompt that cannot be answered is refused": _refuses_what_no_response_fits,
    "new weights serve, and requests in flight go on": _continues_with_new_weights,
    "a refused snapshot changes nothing": _keeps_its_weights_if_a_snapshot_is_refused,
}


def main(arguments: Sequence[str]) -> int:
    """Check the engine that `MODULE:FUNCTION` makes of a model directory; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tba.conformance", description="Check an engine of your own.")
    parser.add_argument("engine", help="MODULE:FUNCTION, called with the model directory")
    parser.add_argument("model", help="a Hugging Face model directory")
    parser.add_argument("tolerance", nargs="?", type=float, default=1e-3, help="largest difference in nats")
    asked = parser.parse_args(arguments)
    module, _, function = asked.engine.partition(":")
    try:
        model = model_directory(asked.model, setting="MODEL")
        make_engine = getattr(importlib.import_module(module), function)
    except (TbaError, ImportError, AttributeError) as error:
        parser.error(str(error))
    engine: Engine = make_engine(str(model))
    try:
        findings = list(check_engine(engine, model, tolerance=asked.tolerance))
    finally:
        engine.close()
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return int(any(finding.error for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
