"""Speed and memory of models of real sizes, against bare torch and the preflight's estimate."""

import gc
import resource
from functools import partial
from typing import Any

import torch

from benchmarks.bare import BareTrainer
from benchmarks.gpu_check.attention import use_kernel
from benchmarks.gpu_check.findings import Findings, Skip
from benchmarks.gpu_check.steps import Trial
from tba.common.clock import SystemClock
from tba.common.config import TrainSection
from tba.common.errors import OutOfMemory
from tba.tests.helpers.gpu_steps import GB, estimate_for, little_memory, qwen, random_model, random_steps, timed
from tba.tests.helpers.trainer import learner_of, objective
from tba.trainer.metrics.flops import Throughput
from tba.trainer.metrics.stopwatch import Stopwatch, wait_for_compute
from tba.trainer.model.packing import packs
from tba.trainer.step.host_optimizer import take_masters

# Prompts, samples, tokens of a prompt, of a response, and of the longest one.
_SHAPE, _LONG, _TINY = (8, 8, 200, 400, 2048), (4, 8, 200, 700, 2048), (2, 4, 8, 12, 30)


def _speed(findings: Findings, options: Any, size: str, ways: tuple[tuple[Any, bool, int], ...]) -> None:
    """Make the same steps bare and in each way: packing, whether activations are recomputed, tokens at a time."""
    config = qwen(size, tiny=options.tiny)
    findings.note("kernel", use_kernel(options.device))
    batches = random_steps(config.vocab_size, 5, _TINY if options.tiny else _SHAPE)
    model = random_model(config, options.device)
    bare = BareTrainer(model, rate=1e-5, tokens=ways[0][2], half=options.device == "cuda")
    expected = _measure(findings, "bare torch", model, bare.step, batches)
    del bare, model
    for packing, recomputed, tokens in ways:
        # What was measured before is freed.
        gc.collect()
        settings: dict[str, Any] = {"packing": packing, "gradient_checkpointing": recomputed}
        train = TrainSection(micro_batch_tokens=tokens, warmup_steps=0, **settings)
        way = f"{packing}, {'recomputed' if recomputed else 'stored'}, {tokens} tokens"
        model = random_model(config, options.device)
        packed = packs(packing, model, options.device, half=options.device == "cuda")
        findings.note(f"{way}: packed", packed)
        _train(findings, way, options, model, train, (batches, expected), packed=packed)
        del model


# Stages.
speed15 = partial(_speed, size="1.5B", ways=(("auto", False, 8192), ("padded", False, 8192), ("auto", True, 16384)))
speed05 = partial(_speed, size="0.5B", ways=(("auto", False, 16384), ("padded", False, 16384)))


def _train(findings: Findings, way: str, options: Any, model: Any, train: Any, steps: Any, **keys: Any) -> None:
    """Make steps with tba, and compare the first with bare torch, and the peak of memory with the estimate."""
    batches, expected = steps
    cuda, estimate = options.device == "cuda", estimate_for(model.config, train, options.work / "shape")
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    watch = Stopwatch(SystemClock(), wait_for_compute(torch.device(options.device)))
    learner = learner_of(model, None, train, objective("rloo"), watch=watch, autocast=cuda, **keys)
    found = _measure(findings, way, model, lambda batch: learner.step_in_memory(batch).metrics, batches)
    findings.note(f"{way}: phases of all steps, s", {k: v for k, v in watch.take().items() if v > 1e-3})
    for name, value in expected.items():
        limit = 1e-4 if not cuda else 0.01 if name == "loss" else 0.05
        findings.relative(f"{way}: {name} of the first step by bare torch", found[name], value, limit)
    findings.note(f"{way}: estimate, GB", {part: size / GB for part, size in estimate.device.items()})
    if cuda:
        findings.note(f"{way}: reserved, GB", torch.cuda.max_memory_reserved() / GB)
        peak, bound = torch.cuda.max_memory_allocated() / GB, sum(estimate.device.values()) / GB
        findings.at_most(f"{way}: peak, GB", peak, bound)


def _measure(findings: Findings, way: str, model: Any, step: Any, batches: list[Any]) -> Any:
    """Make the steps, and note tokens per second and MFU. Returns the metrics of the first step."""
    made = [timed(model.device.type, step, batch) for batch in batches]
    findings.note(f"{way}: seconds of the steps", [seconds for _, seconds in made])
    # The first steps choose kernels and allocate memory.
    steady = list(zip(batches, made, strict=True))[2:]
    rates = [Throughput(model).metrics(batch, seconds) for batch, (_, seconds) in steady]
    findings.note(f"{way}: rates", {key: sum(one[key] for one in rates) / len(rates) for key in rates[0]})
    if "mfu" in rates[0]:
        findings.at_most(f"{way}: largest MFU", max(one["mfu"] for one in rates), 1.0)
    return made[0][0]


def oom(findings: Findings, options: Any) -> None:
    """A step without enough memory says so, and the same learner then makes the step of bare torch, in float32."""
    config, train = qwen("0.5B", tiny=options.tiny), TrainSection(micro_batch_tokens=1 << 20, warmup_steps=0)
    short = learner_of(random_model(config, options.device), None, train, objective("rloo"))
    message = "it has fitted"
    with little_memory(options.device):
        try:
            short.step_in_memory(random_steps(config.vocab_size, 1, (4, 16, 200, 1500, 2048))[0])
        except OutOfMemory as error:
            message = str(error)
    findings.note("message", message)
    findings.check("its first words", message[:23], "out of memory in step 0")
    findings.check("it says what to lower", "lower train.micro_batch_tokens" in message, True)
    # The trainer exits after this error. A caller that goes on drops the gradients of the part that fitted.
    short.optimizer.zero_grad()
    batch = random_steps(config.vocab_size, 1, (2, 4, 32, 32, 64))[0]
    found = short.step_in_memory(batch).metrics
    for name, value in BareTrainer(random_model(config, options.device), rate=1e-5, tokens=1024).step(batch).items():
        findings.relative(f"{name} of the next step by bare torch", found[name], value, 1e-3)


def offload(findings: Findings, options: Any) -> None:
    """Steps of a small model with and without offload, then of as many layers of 7 B as fit into the host."""
    device, cuda, trial = options.device, options.device == "cuda", Trial(options)
    trial.compare(findings, "offload", trial.train(device, offload="optimizer"), trial.train(device), 1e-4)
    tokens = 64 if options.tiny else 16384
    train = TrainSection(micro_batch_tokens=tokens, gradient_checkpointing=True, offload="optimizer", warmup_steps=0)
    for layers in range(2 if options.tiny else 28, 0, -2):
        config = qwen("7B", tiny=options.tiny, num_hidden_layers=layers)
        estimate = estimate_for(config, train, options.work / "shape")
        if estimate.fits:
            break
    else:
        raise Skip("the host has too little memory for two layers")
    findings.note("layers, and the estimate", [layers, estimate.sentence()])
    findings.note("kernel", use_kernel(device))
    policy = random_model(config, device).cpu()
    batches = random_steps(config.vocab_size, 4, _TINY if options.tiny else _LONG)
    packed = packs("auto", policy, device, half=cuda)
    masters = take_masters(policy, torch.device(device), half=cuda)
    # Before the learner takes away each gradient.
    expected = {"loss": BareTrainer(policy, rate=0.0, tokens=tokens, half=cuda).loss(batches[0])}
    _train(findings, "7 B", options, policy, train, (batches, expected), packed=packed, taken=masters)
    findings.note("largest resident memory, GB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB)
