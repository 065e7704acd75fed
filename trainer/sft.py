"""Supervised fine-tuning, to give reinforcement learning a model that already solves some prompts.

The step is that of reinforcement learning (`Learner`), with the likelihood as its objective and one response per
prompt. The order of the rows is a function of seed and step, so a resume needs only the checkpoint.

While training runs, lock, metrics and checkpoints are in `OUT.work`, next to the directory `OUT` of the model, which
appears atomically at the end.

A file of demonstrations (`tba.common.data_files`) has rows of `tba buffer export`, whose token ids are used as they
are, or of two other kinds; other columns are ignored:

    {"prompt": "47+38=", "response": "85"}                      without `response`, the reference `answer`
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}

Prompts are rendered as a searcher does it (`task.template`), and responses end with the end token that stops its
engine, so the model learns what it will be sampled for. The chat template gets all fields of the messages, and
`system`, `tools`, `documents` and `chat_template_kwargs` of the row.
"""

import bisect
import contextlib
import hashlib
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tba.common import data_files, run_files
from tba.common.config import Config, LoraSection, MetricsSection, ReferenceSection
from tba.common.errors import CheckpointError, ConfigError, TaskError, TrainingBroken, UsageError
from tba.common.log import get_logger
from tba.common.rendering import Message, PromptRenderer, as_map, asked_in, instructed, message_of, variables_of
from tba.common.system.durable import exclusive_lock, new_directory
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import end_tokens, load_tokenizer
from tba.common.wire.fields import MAX_PROMPT_TEXT
from tba.common.wire.trajectory import STOP_EOS
from tba.trainer import checkpoint
from tba.trainer.batch.batch import Row, TrainBatch, plain_row
from tba.trainer.distributed import ALONE, Ranks, join, release_gathered, until_lost
from tba.trainer.metrics.metrics_log import MetricsLog
from tba.trainer.model.adapters import MERGED, gathered
from tba.trainer.objectives.from_config import Objective
from tba.trainer.objectives.policy_gradient import negative_log_likelihood
from tba.trainer.preflight.check import Report
from tba.trainer.preflight.shape import meta_model
from tba.trainer.publishing.snapshot_writer import as_saved, write_model
from tba.trainer.step.build import build, prepare, require_memory

log = get_logger(__name__)

_OBJECTIVE = Objective("likelihood", negative_log_likelihood, needs_reference=False)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train on, for how long (`steps` or, if None, `epochs`), in which batches, and where the model goes."""

    data: Sequence[Path]
    out: Path
    held_out: Path | None = None
    epochs: int = 1
    steps: int | None = None
    batch_size: int = 64

    @property
    def work(self) -> Path:
        """The directory of lock, metrics and checkpoints during training."""
        return self.out.with_name(f"{self.out.name}.work")


@dataclass(frozen=True, slots=True)
class _Prompt:
    text: str = ""
    messages: Sequence[Message] = ()
    ids: Sequence[int] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Encoder:
    """The renderer of prompts, and the limits of the model: ids below `vocabulary`, `longest` tokens per row.

    Any of `end_ids` ends a response, and any text in `stop`; the first id is appended to a response that has none.
    """

    renderer: PromptRenderer
    end_ids: Sequence[int]
    vocabulary: int
    longest: int
    stop: Sequence[str] = ()


def sft(
    config: Config,
    plan: Plan,
    *,
    resume: bool,
    device: str,
    stop: Callable[[], bool],
    on_step: Callable[[dict[str, float]], None],
) -> bool:
    """Train the model and write it to `plan.out`. Returns False if `stop()` came first, after saving a checkpoint.

    Every rank calls this. `on_step` is called with the metrics of each step. Of the configuration, `model`, `run.seed`,
    `sft`, the templates of `task` and the other optimiser settings of `train` apply. Nothing is left behind if it fails
    before the first step. Raises UsageError, ConfigError, TaskError for data, CheckpointError, TrainingBroken,
    RankLost, OutOfMemory.
    """
    if plan.out.exists():
        raise UsageError(f"{plan.out} exists already: name another --out")
    train = config.train.model_copy(update={"learning_rate": config.sft.learning_rate})
    config = config.model_copy(update={"train": train})
    prepare(config, device)
    with until_lost(), contextlib.ExitStack() as stack:
        ranks = join(torch.device(device), stop)
        if ranks.rank == 0:
            missing = [directory for directory in (plan.work, *plan.work.parents) if not directory.exists()]
            stack.callback(_remove_unused, plan.work, missing)
            lock, holder = plan.work / run_files.TRAINER_LOCK, f"another process makes {plan.out}: stop it first"
            stack.enter_context(exclusive_lock(lock, holder))
        report = require_memory(config, torch.device(device), ranks, supervised=True)
        job = Job(config, plan, resume=resume, device=torch.device(device), ranks=ranks, report=report)
        with contextlib.closing(job):
            finished = job.run(stop, on_step)
        if finished:
            job.publish()
        ranks.close()
        if finished and ranks.rank == 0:
            shutil.rmtree(plan.work)
    return finished


def _remove_unused(work: Path, created: Sequence[Path]) -> None:
    """Delete the work directory if no step was recorded in it, and those above it that were created for it."""
    found = {path.name: path for path in work.glob("*")}
    metrics = found.get(run_files.METRICS)
    if found.keys() - {run_files.TRAINER_LOCK, run_files.METRICS} or (metrics is not None and metrics.stat().st_size):
        return
    shutil.rmtree(work, ignore_errors=True)
    for directory in created:
        with contextlib.suppress(OSError):
            directory.rmdir()


class Job:
    """One start of supervised fine-tuning, on one of the ranks. All have the same rows; rank 0 writes the files."""

    def __init__(
        self,
        config: Config,
        plan: Plan,
        *,
        resume: bool,
        device: torch.device,
        ranks: Ranks = ALONE,
        report: Report | None = None,
    ) -> None:
        self._files = files = model_directory(config.model.path)
        self._plan, self._ranks = plan, ranks
        tokenizer: PreTrainedTokenizerBase = load_tokenizer(files)
        encoder = _encoder(files, PromptRenderer(tokenizer, config.task), meta_model(files), config.search.stop)
        self._rows = read_rows(plan.data, encoder)
        self._held_out = read_rows([plan.held_out], encoder) if plan.held_out else []
        self._name = _data_digest(self._rows, config.run.seed, plan.batch_size)
        if not ranks.agree(self._name):
            raise UsageError("the nodes have other data or another --batch-size: give all of them the same")
        found, saved = None, plan.work / run_files.CHECKPOINTS
        if ranks.rank == 0:
            found = checkpoint.find(saved, resume=resume, otherwise=f"delete {plan.work}")
        found = checkpoint.share(found, ranks)
        if found is not None and found.run != self._name:
            raise UsageError(f"{found.path} is of other data, another seed or another --batch-size: name another --out")
        self._seed = config.run.seed
        self._dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.steps = plan.steps or math.ceil(plan.epochs * len(self._rows) / plan.batch_size)
        self._train = config.train.model_copy(update={"steps": self.steps})
        # The whole model is trained, without a reference policy.
        own = {"train": self._train, "lora": LoraSection(), "reference": ReferenceSection()}
        config = config.model_copy(update=own | {"metrics": MetricsSection(entropy=False)})
        self.learner, self._unwrapped = build(config, files, device, ranks, report, objective=_OBJECTIVE)
        if found is not None:
            checkpoint.restore(found, self.learner)
            log.info("resumed", checkpoint=found.path, step=found.step)
        self._saved_step = self.learner.steps_done
        self._metrics: MetricsLog | None = None
        if ranks.rank == 0:
            self._metrics = MetricsLog(plan.work, first_step=self.learner.steps_done)

    def run(self, stop: Callable[[], bool], on_step: Callable[[dict[str, float]], None]) -> bool:
        """Train to the last step. Returns False if `stop()` came first."""
        while self.learner.steps_done < self.steps and not self._ranks.any(stop()):
            on_step(self._step())
            if self.learner.steps_done % self._train.checkpoint_every == 0:
                self._save()
        self._save()
        return self.learner.steps_done >= self.steps

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def publish(self) -> None:
        """Write the model directory, weights in `model.dtype`, together with the metrics of its training."""
        weights = {name: tensor.to(self._dtype).cpu() for name, tensor in gathered(self.learner.policy, MERGED)}
        if self._ranks.rank:
            return
        try:
            with new_directory(self._plan.out) as temporary:
                write_model(temporary, as_saved(self._unwrapped, weights), self._files, self._unwrapped, self._dtype)
                shutil.copyfile(self._plan.work / run_files.METRICS, temporary / f"sft_{run_files.METRICS}")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{self._plan.out} cannot be written: {error}; --resume continues from the last checkpoint"
            ) from error
        log.info("model saved", path=self._plan.out)

    def _step(self) -> dict[str, float]:
        """Make one update. Returns its metrics, with the held-out loss after it when that is due."""
        started = time.monotonic()
        step = self.learner.steps_done
        measured = {"held_out_loss_before": self._held_out_loss()} if step == 0 and self._held_out else {}
        rows = self.rows_of(step)
        # Groups of one row. The likelihood uses neither rewards nor reference.
        zero_B1 = torch.zeros(len(rows), 1, dtype=torch.float64)
        batch = TrainBatch(step, rows, zero_B1, torch.full_like(zero_B1, math.nan), zero_B1)
        made = self.learner.step_in_memory(batch)
        if made.skipped:
            why = f"step {step} was skipped, {made.skipped} (rows are counted from 0)"
            raise TrainingBroken(f"{why}: --resume continues from the newest checkpoint, a smaller rate may help")
        seconds = time.monotonic() - started
        done = self.learner.steps_done
        if self._held_out and (done == self.steps or done % self._train.checkpoint_every == 0):
            measured["held_out_loss"] = self._held_out_loss()
        kept = {name: made.metrics[name] for name in ("loss", "grad_norm", "learning_rate", "tokens")}
        speed = {"tokens_per_second": made.metrics["tokens"] / max(seconds, 1e-9)}
        if self._metrics is not None:
            self._metrics.record(step, time.time(), kept | speed | measured)
        return {"step": done, "steps": self.steps, **kept, **speed, **measured}

    def rows_of(self, step: int) -> list[Row]:
        """Return the rows of a step. Each epoch has its own shuffled order; a batch may span two epochs."""
        rows, size = len(self._rows), self._plan.batch_size
        last = math.inf if self._plan.steps else self._plan.epochs * rows
        positions = [at for at in range(step * size, (step + 1) * size) if at < last]
        epochs = {at // rows for at in positions}
        orders = {epoch: np.random.default_rng([self._seed, epoch]).permutation(rows) for epoch in epochs}
        return [self._rows[orders[at // rows][at % rows]] for at in positions]

    @torch.no_grad()
    def _held_out_loss(self) -> float:
        """Return the mean negative log-likelihood of the held-out rows, in nats per token."""
        total = torch.zeros((), dtype=torch.float64)
        for micro_batch in self.learner.plan(self._held_out, 1):
            # A group of one row is never split.
            (chunk,) = micro_batch.chunks
            scores = self.learner.scorer.score([self._held_out[index] for index in micro_batch.rows], chunk.passes)
            total -= scores.logprob_R.double().sum().cpu()
        release_gathered(self.learner.scorer)
        return float(self._ranks.sum(total)) / sum(len(row.response_ids) for row in self._held_out)

    def _save(self) -> None:
        if self.learner.steps_done == self._saved_step:
            return
        if self._metrics is not None:
            self._metrics.sync()
            keep = run_files.KEEP_CHECKPOINTS
            checkpoint.save(self._plan.work / run_files.CHECKPOINTS, self.learner, run=self._name, keep=keep)
        else:
            for _ in checkpoint.tensors_of(self.learner):
                pass
        self._saved_step = self.learner.steps_done


def _encoder(files: Path, renderer: PromptRenderer, model: PreTrainedModel, stop: Sequence[int | str] = ()) -> Encoder:
    ends, strings = end_tokens(files, stop, renderer.tokenizer)
    if not ends:
        raise ConfigError(f"{files} names no end token: set eos_token_id in its config.json")
    vocabulary = model.get_input_embeddings().num_embeddings
    longest = getattr(model.config, "max_position_embeddings", None) or 1 << 30
    return Encoder(renderer, ends, vocabulary, longest, strings)


def _data_digest(rows: Sequence[Row], seed: int, batch_size: int) -> str:
    """Return a name for everything that determines the rows of a step. A resume must have the same."""
    digest = hashlib.sha256(repr((seed, batch_size)).encode())
    for row in rows:
        for tokens in (row.prompt_ids, row.response_ids):
            digest.update(len(tokens).to_bytes(4, "little") + tokens.tobytes())
    return f"sft-{digest.hexdigest()[:16]}"


def read_rows(paths: Sequence[Path], encoder: Encoder) -> list[Row]:
    """Read the rows of some files in order, numbered from 0. Raises TaskError, with file and line."""
    rows: list[Row] = []
    for place, value in (row for path in paths for row in data_files.read(path)):
        try:
            if isinstance(value, dict) and value.get("response_ids") is not None:
                prompt, tokens = _exported(value, encoder)
            else:
                prompt, response = _read_row(value)
                tokens = _tokens(prompt, response, encoder)
            _check_row(*tokens, encoder)
        # Raised by the functions below or by a chat template.
        except ValueError as error:
            raise TaskError(f"{place}: {error}") from error
        if not rows:
            encoder.renderer.warn_of_date(prompt)
        rows.append(plain_row(len(rows), *tokens))
    if not rows:
        raise TaskError(f"{', '.join(map(str, paths))}: no rows")
    return rows


def _exported(row: dict[str, Any], encoder: Encoder) -> tuple[_Prompt, tuple[list[int], list[int]]]:
    """Return prompt and tokens of a row of `tba buffer export`. Raises ValueError."""
    prompt_ids, ids, text = row.get("prompt_ids") or [], row["response_ids"], row.get("text")
    lists = [prompt_ids, ids, mask := row.get("loss_mask") or []]
    known = range(encoder.vocabulary)
    if not all(isinstance(one, list) and all(type(id_) is int and id_ in known for id_ in one) for one in lists):
        raise ValueError(f"`prompt_ids` and `response_ids` are lists of token ids below {encoder.vocabulary}")
    if row.get("error"):
        raise ValueError('it has an error: export with --where "error IS NULL"')
    if 0 in mask:
        raise ValueError("it is an episode, with tokens that were not sampled: leave it out")
    if (stop := row.get("stop_reason", STOP_EOS)) != STOP_EOS:
        raise ValueError(f"its response is not finished ({stop}): export with --where \"stop_reason = 'eos'\"")
    if not isinstance(text, str) or not isinstance(said := row.get("prompt"), str):
        raise ValueError("it has no `prompt` or no `text`, which tell whether this tokenizer made its tokens")
    _require_spelt(said, text, prompt_ids, ids, encoder)
    return _Prompt(ids=prompt_ids), (prompt_ids, _ended(ids, ("assistant", text), encoder))


def _require_spelt(prompt: str, text: str, prompt_ids: list[int], ids: list[int], encoder: Encoder) -> None:
    """Raise ValueError unless the ids are a prompt and a response to the last character."""
    renderer, decode = encoder.renderer, encoder.renderer.tokenizer.decode
    spelt = decode(prompt_ids, skip_special_tokens=False)
    # A run records no more of a long prompt.
    is_cut = len(prompt) == MAX_PROMPT_TEXT and spelt.startswith(prompt)
    if spelt != prompt and not is_cut and prompt_ids not in (renderer.encode(prompt), renderer.raw_ids(prompt)):
        raise ValueError(f"its tokens do not spell its prompt, {prompt!r:.80}: another tokenizer made them")
    # What ended a response, a token or a string, is not part of its text.
    said = decode(ids[:-1] if ids and ids[-1] in encoder.end_ids else ids, skip_special_tokens=True)
    if said != text and not any(said.startswith(f"{text}{end}") for end in encoder.stop):
        why = "another tokenizer made them, or search.stop lacks the string that ended it"
        raise ValueError(f"its tokens do not spell its text, {text!r:.80}: {why}")


def _read_row(value: Any) -> tuple[_Prompt, Message]:
    """Return prompt and response of a row. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("a row is a JSON object")
    variables = variables_of(value)
    said, asked = (asked_in(value.get(name)) for name in ("messages", "prompt"))
    if said is None:
        column = "answer" if value.get("response") is None else "response"
        answer = value.get(column)
        if isinstance(answer, int | float | Decimal) and not isinstance(answer, bool):
            answer = data_files.as_text(answer, column)
        asked = instructed(value, asked) if isinstance(asked, str) else asked
        if isinstance(asked, list) and isinstance(answer, str):
            said = [*asked, {"role": "assistant", "content": answer}]
    if said is not None:
        *before, response = _messages(instructed(value, said) if isinstance(said, list) else said)
        prompt = _Prompt(messages=before, template_kwargs=variables)
    else:
        if not isinstance(asked, str) or not isinstance(answer, str):
            raise ValueError(
                "a row has `messages`, or `prompt` (text or messages) and `response` or `answer` (text); this one has "
                + ", ".join(f"{key} ({type(one).__name__})" for key, one in value.items())
                + f": rename the columns{data_files.rows_within(value)}"
            )
        prompt, response = _Prompt(asked, template_kwargs=variables), ("assistant", answer)
    data_files.require_unicode([prompt.text, prompt.messages, response, variables])
    if not any(inner for key, inner in as_map(response).items() if key != "role"):
        raise ValueError("the response is empty")
    return prompt, response


def _messages(said: Any) -> list[Message]:
    if not isinstance(said, list) or not all(isinstance(message, dict) for message in said):
        raise ValueError("`messages` is a list of objects with the strings `role` and `content`")
    if len(said) < 2 or said[-1].get("role") != "assistant":
        raise ValueError("`messages` ends with the assistant's, after at least one other")
    # Whether a message is trained on, in the format of OpenAI.
    weights = [message.get("weight") for message in said]
    if any(weights[:-1]) or weights[-1] not in (None, 1):
        raise ValueError(
            f"the weights of its messages are {weights}: the last message alone is trained on, so its weight is 1 and "
            "that of the others 0; write one row for each message to train on"
        )
    return [message_of({key: inner for key, inner in message.items() if key != "weight"}) for message in said]


def _tokens(prompt: _Prompt, response: Message, encoder: Encoder) -> tuple[list[int], list[int]]:
    """Tokenise prompt and response, the response with its end token. Raises ValueError."""
    renderer = encoder.renderer
    prompt_ids, text = renderer.ids(prompt), renderer.text_with(prompt, response)
    if text is None:
        return prompt_ids, _ended(renderer.response_ids(prompt.text, response[1]), response, encoder)
    renderer.require_complete(prompt, response)
    ids = renderer.encode(text)
    if ids[: len(prompt_ids)] == prompt_ids:
        return prompt_ids, _ended(ids[len(prompt_ids) :], response, encoder)
    # Tokens of the whole may span both: two line breaks are often one token. A run generates after the prompt's ids.
    rest = text.removeprefix(renderer.text(prompt))
    if rest == text:
        raise ValueError(
            "the chat template renders the prompt differently once the response follows it: set the variables of the "
            "template that fit the row, such as task.template_kwargs = { enable_thinking = false }, or write the row "
            'with `prompt` and `response` as the model is to see them, for task.template = "raw"'
        )
    # After an end token, since some tokenizers put a space before the first word of a text.
    own = renderer.encode(renderer.tokenizer.decode([encoder.end_ids[0]], skip_special_tokens=False) + rest)[1:]
    whole, apart = (renderer.tokenizer.decode(one, skip_special_tokens=False) for one in (ids, [*prompt_ids, *own]))
    if whole != apart:
        raise ValueError(f"its response cannot be tokenised apart from the prompt: {whole!r:.80} becomes {apart!r:.80}")
    return prompt_ids, _ended(own, response, encoder)


def _ended(ids: list[int], response: Message, encoder: Encoder) -> list[int]:
    """Cut a response where an engine would end it: templates add line breaks after that which it would not sample.

    Raises ValueError if more follows because the response itself spells what ends one.
    """
    end = next((n + 1 for n, id_ in enumerate(ids) if id_ in encoder.end_ids), None)
    if encoder.stop and _completes(ids[:end], encoder):
        end = bisect.bisect_left(range(len(ids)), True, lo=1, key=lambda n: _completes(ids[:n], encoder))
    if not ids or ids[0] in encoder.end_ids:
        raise ValueError("nothing is left of the response but its end token")
    if end is None:
        return [*ids, encoder.end_ids[0]]
    if encoder.renderer.tokenizer.decode(ids[end:], skip_special_tokens=False).strip():
        said = " ".join(response[1:])
        spelt = set(encoder.renderer.encode(said)) & set(encoder.end_ids)
        tokens = [encoder.renderer.tokenizer.decode([id_], skip_special_tokens=False) for id_ in spelt]
        if found := [*tokens, *(one for one in encoder.stop if one in said)]:
            raise ValueError(f"the response contains {found[0]!r}, at which the engines stop: remove or respell it")
        kept, whole = (encoder.renderer.tokenizer.decode(one, skip_special_tokens=True) for one in (ids[:end], ids))
        if response[1].strip() in whole and response[1].strip() not in kept:
            raise ValueError(
                f"the engines would stop after {kept!r:.60}, which the chat template writes before the response: "
                "correct search.stop or the variables of the template"
            )
    return ids[:end]


def _completes(ids: list[int], encoder: Encoder) -> bool:
    text = encoder.renderer.tokenizer.decode(ids, skip_special_tokens=True)
    return any(one in text for one in encoder.stop)


def _check_row(prompt: Sequence[int], response: Sequence[int], encoder: Encoder) -> None:
    if not prompt:
        raise ValueError("the prompt has no tokens: nothing predicts the first token of the response")
    if (length := len(prompt) + len(response)) > encoder.longest:
        raise ValueError(f"{length} tokens, of at most {encoder.longest} that the model takes")
    if (largest := max(*prompt, *response)) >= encoder.vocabulary:
        raise ValueError(f"the tokenizer gives id {largest}, but the model has {encoder.vocabulary}: is it another's?")
