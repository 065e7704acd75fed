"""What `tba task check` finds out about a task. It changes nothing, and starts a worker and two other processes.

`python -m tba.searcher.task_check FILE` is one of the two: it reads [task] as JSON, and writes to FILE what it
loads, scores and plays. Without limits on time and memory: what needs them is scored in a worker alone.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tba.common.config import Config, TaskSection
from tba.common.errors import TaskError, TbaError
from tba.common.rendering import PromptRenderer
from tba.common.weights.model_files import model_directory
from tba.common.weights.pretrained import load_tokenizer
from tba.searcher.build import context_of
from tba.searcher.engines.stopping import read_stopping, unstopped_turn
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, score, storable
from tba.searcher.tasks import load_task
from tba.searcher.tasks.task import (
    CORRECT,
    Prompt,
    Task,
    check_prompts,
    check_rendering,
    fingerprint,
    has_environment,
    is_random,
    least_reward,
)

Finding = dict[str, str]

# Prompts whose responses are scored, from the first.
_SAMPLED = 8
# Responses that no task should fail on, besides the answer of the prompt.
_ODD = (
    "",
    " ",
    "0",
    "-1e999",
    "nan",
    "I do not know.",
    "\\boxed{",
    "\N{MINUS SIGN}\N{GREEK SMALL LETTER PI}\x00",
    "9" * 10_000,
)
# Turns that an answer is given in an episode.
_ANSWERED_TURNS = 3
_CHILD_SECONDS = 900
_WAIT_SECONDS = 1.0
# The hash seed of the process that plays episodes one by one.
_ALONE = "2"
# Responses that took longer together are not scored a second time.
_AGAIN_SECONDS = 10.0


def check(config: Config, task: Task, load_seconds: float) -> Iterator[Finding]:
    """Yield findings: {"check", "result": ok, warn, fail or unchecked, "detail"}."""
    training, held_out = task.prompts(), task.held_out()
    notes = getattr(task, "notes", [])
    yield _found("load", "warn" if notes else "ok", "; ".join([f"task {task.name}, in {load_seconds:.1f} s", *notes]))
    prompts = _prompts(task, training, held_out)
    yield prompts
    # What is not a prompt can neither be scored nor rendered.
    if prompts["result"] == "fail":
        return
    scored, played = _sampled(task)
    scores = _score_in_workers(config.task, task, scored) if scored else None
    episodes, seconds = _play_in_workers(config.task, task, played)
    results = [*(scores.scored if scores else []), *(one for episode in episodes for one in episode)]
    kinds = [name for name, prompts in (("rewards", scored), ("observations", played)) if prompts]
    yield _same_everywhere(config.task, kinds, all_returned=not any(one.interrupted for one in results))
    if scores:
        yield from _scores(config.task, task, scores)
    if played:
        yield from _episodes(_scripts(task, played), episodes, seconds)
    yield _rendering(config, task, [*training[:_SAMPLED], *held_out[:_SAMPLED]])


def _found(check: str, result: str, detail: str) -> Finding:
    return {"check": check, "result": result, "detail": detail}


def _prompts(task: Task, training: Sequence[Prompt], held_out: Sequence[Prompt]) -> Finding:
    for prompt in (*training, *held_out):
        texts = [getattr(prompt, name, None) for name in ("key", "text", "answer")]
        if not isinstance(prompt, Prompt) or not all(isinstance(text, str) for text in texts):
            return _found("prompts", "fail", f"{prompt!r:.200} is not a Prompt whose key, text and answer are texts")
    try:
        check_prompts(task)
    except TaskError as error:
        return _found("prompts", "fail", str(error))
    detail = f"{len(training)} for training, {len(held_out)} held out"
    trained = {(prompt.text, prompt.messages, prompt.ids) for prompt in training}
    # The environment of an episode may differ although the prompt does not.
    single = [prompt for prompt in held_out if not has_environment(task, prompt)]
    if both := sum((prompt.text, prompt.messages, prompt.ids) in trained for prompt in single):
        return _found(
            "prompts", "warn", f"{detail}; {both} of these are training prompts too: accuracy would be too high"
        )
    return _found("prompts", "ok" if held_out else "warn", detail if held_out else f"{detail}: `tba eval` needs some")


def _same_everywhere(section: TaskSection, kinds: Sequence[str], *, all_returned: bool) -> Finding:
    """Load in two processes whose hashes differ, as those of searchers and workers do.

    They also score and play, unless a response was seen not to return. The second one plays each episode alone, so that
    an environment which shares something with another one differs.
    """
    name = "same in every process"
    what = ["prompts", *(kinds if all_returned else [])]
    outputs = []
    with tempfile.TemporaryDirectory() as directory:
        for seed in ("1", _ALONE):
            file = Path(directory, seed)
            command = [sys.executable, "-m", "tba.searcher.task_check", str(file), *what]
            try:
                child = subprocess.run(  # noqa: S603
                    command, input=section.model_dump_json(), text=True, errors="replace", capture_output=True,
                    timeout=_CHILD_SECONDS, env={**os.environ, "PYTHONHASHSEED": seed}, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return _found(
                    name, "fail", f"a process that reads its {' and '.join(what)} takes longer than {_CHILD_SECONDS} s"
                )
            if child.returncode or not file.exists():
                last = child.stderr.strip().rpartition("\n")[2]
                return _found(name, "fail", f"a process that loads it ends with code {child.returncode}: {last}")
            outputs.append(json.loads(file.read_text(encoding="utf-8")))
    first, second = outputs
    different = [part for part in first if first[part] != second[part]]
    if different:
        advice = "use no hash(), no order of a set, no time and no random number without a seed"
        if "observations" in different:
            advice += "; seed an environment with its prompt's key, share no state, or declare random = True"
        return _found(name, "fail", f"{', '.join(different)} differ between two processes: {advice}")
    both = " and ".join(kinds)
    if not all_returned:
        detail = f"two processes load the same prompts; {both} are not compared, because a response ended its worker"
        return _found(name, "unchecked", detail)
    return _found(name, "ok", f"two processes load the same prompts and give the same {both}")


def _sampled(task: Task) -> tuple[list[Prompt], list[Prompt]]:
    """Return the first prompts, those to score and those to play."""
    prompts = (task.prompts() or task.held_out())[:_SAMPLED]
    played = [prompt for prompt in prompts if has_environment(task, prompt)]
    return [prompt for prompt in prompts if prompt not in played], played


def _responses(prompts: Sequence[Prompt]) -> list[tuple[Prompt, str]]:
    return [(prompt, text) for prompt in prompts for text in (storable(prompt.answer), *_ODD)]


@dataclass(frozen=True, slots=True)
class _Scores:
    """The responses that were scored, and the mean time of a score after a first one, 0 if that ended its worker."""

    asked: Sequence[tuple[Prompt, str]]
    scored: Sequence[Scored]
    seconds: float


def _score_in_workers(section: TaskSection, task: Task, prompts: Sequence[Prompt]) -> _Scores:
    """Score answers and odd responses in workers, with their limits; only one if that ends its worker."""
    asked = _responses(prompts)
    rewards = Rewards(task, section)
    try:
        # The time that a worker needs to load is not that of a score.
        scored = _score_all(rewards, asked[:1])
        if scored[0].interrupted:
            return _Scores(asked[:1], scored, 0.0)
        scored, seconds = _timed(rewards, asked)
        # Once more, since the first score in each worker may import and compile.
        if seconds < _AGAIN_SECONDS and not any(one.interrupted for one in scored):
            _, seconds = _timed(rewards, asked)
        return _Scores(asked, scored, seconds / len(asked))
    finally:
        rewards.close()


def _timed(rewards: Rewards, asked: Sequence[tuple[Prompt, str]]) -> tuple[list[Scored], float]:
    """Return the scores, and the seconds that they took together."""
    begin = time.monotonic()
    scored = _score_all(rewards, asked)
    return scored, time.monotonic() - begin


def _scores(section: TaskSection, task: Task, scores: _Scores) -> Iterator[Finding]:
    """Yield what the scores show: errors, the range of the rewards, and their speed."""
    asked, scored = scores.asked, scores.scored
    errors = [(prompt.key, text, one.error) for (prompt, text), one in zip(asked, scored, strict=True) if one.error]
    if errors:
        key, text, error = errors[0]
        detail = f"{len(errors)} of {len(asked)} responses: to prompt {key!r} the response {text!r:.60}: {error}"
        yield _found("errors", "fail", detail)
    else:
        yield _found("errors", "ok", f"none in {len(asked)} responses, such as {', '.join(map(repr, _ODD[:5]))}")
    good = [one.reward for one in scored if one.error is None]
    totals = [reward.total for reward in good]
    parts = sorted({name for reward in good for name in reward.parts})
    if totals and min(totals) < least_reward(task):
        yield _found("rewards", "fail", f"{min(totals):g} is below least_reward = {least_reward(task):g}: correct it")
    elif totals:
        own = scored[:: len(_ODD) + 1]
        right = sum(one.reward.parts.get(CORRECT) == 1 for one in own)
        detail = f"{min(totals):g} to {max(totals):g}, parts {', '.join(parts) or 'none'}"
        warning = "" if CORRECT in parts else f"; without the part {CORRECT!r} there is no accuracy"
        if fractions := {reward.parts.get(CORRECT, 0.0) for reward in good} - {0.0, 1.0}:
            warning = f"; the part {CORRECT!r} is {min(fractions):g}, and accuracy needs 1 or 0"
        yield _found(
            "rewards", "warn" if warning else "ok", f"{detail}; {right} of {len(own)} answers are correct{warning}"
        )
    if scores.seconds:
        workers = max(1, section.reward_workers)
        yield _found("speed", "ok", f"{scores.seconds * 1000:.2f} ms per response, by {workers} workers")


def _score_all(rewards: Rewards, asked: Sequence[tuple[Prompt, str]]) -> list[Scored]:
    for ticket, (prompt, text) in enumerate(asked):
        rewards.submit(ticket, prompt, text, True)
    found: dict[int, Scored] = {}
    while rewards.waiting:
        found |= {one.ticket: one for one in rewards.wait(_WAIT_SECONDS)}
    return [found[ticket] for ticket in range(len(asked))]


_Script = tuple[Prompt, list[str]]


def _scripts(task: Task, prompts: Sequence[Prompt]) -> list[_Script]:
    """Return episodes to play: the answer again and again, the odd responses, and the task's own examples."""
    examples = [*getattr(task, "example_replies", ())]
    return [
        (prompt, replies)
        for prompt in prompts
        for replies in ([storable(prompt.answer)] * _ANSWERED_TURNS, [*_ODD], examples)
        if any(replies)
    ]


def _play_all(rewards: Rewards, scripts: Sequence[_Script]) -> list[list[Scored]]:
    """Play episodes together, each to its end or that of its script. Returns the results of their calls."""
    found: list[list[Scored]] = [[] for _ in scripts]
    for ticket, (prompt, _) in enumerate(scripts):
        rewards.play(ticket, prompt, [])
    while rewards.waiting:
        for one in rewards.wait(_WAIT_SECONDS):
            found[one.ticket].append(one)
            (prompt, replies), turns = scripts[one.ticket], len(found[one.ticket])
            if one.turn is not None and not one.turn.done and turns <= len(replies):
                given = [(reply, True) for reply in replies[:turns]]
                rewards.play(one.ticket, prompt, given, last=turns == len(replies))
    return found


def _play_in_workers(section: TaskSection, task: Task, prompts: Sequence[Prompt]) -> tuple[list[list[Scored]], float]:
    """Play in workers, with their limits. Returns the results, and the seconds after the workers had loaded."""
    scripts = _scripts(task, prompts)
    if not scripts:
        return [], 0.0
    rewards = Rewards(task, section)
    try:
        # The time that workers need to load, and to import for the first episodes, is not that of a turn.
        _play_all(rewards, scripts)
        begin = time.monotonic()
        return _play_all(rewards, scripts), time.monotonic() - begin
    finally:
        rewards.close()


def _episodes(scripts: Sequence[_Script], episodes: Sequence[Sequence[Scored]], seconds: float) -> Iterator[Finding]:
    """Yield what played episodes show: errors by their call, their ends and rewards, and their speed."""
    errors = [
        f"prompt {prompt.key!r} after {len(results) - 1} answers: {results[-1].error}"
        for (prompt, _), results in zip(scripts, episodes, strict=True)
        if results[-1].error
    ]
    detail = f"{len(errors)} of {len(episodes)} episodes"
    yield _found("errors", "fail" if errors else "ok", "; ".join([detail, *errors[:3]]))
    good = [[one.turn for one in results if one.turn] for results in episodes if not results[-1].error]
    if good:
        totals = [sum(turn.reward for turn in turns) for turns in good]
        done = sum(turns[-1].done for turns in good)
        parts = sorted({name for turns in good for turn in turns for name in turn.parts})
        detail = f"{min(totals):g} to {max(totals):g}, parts {', '.join(parts) or 'none'}; the environment ended {done}"
        yield _found("rewards", "ok" if CORRECT in parts else "warn", f"{detail} of {len(good)} episodes")
    turns = sum(map(len, episodes))
    yield _found("speed", "ok", f"{turns / seconds:.0f} turns per second, resets included")


def _rendering(config: Config, task: Task, prompts: Sequence[Prompt]) -> Finding:
    """Show the first prompt as the model gets it, if the model is on this machine."""
    if not config.model.path or not Path(config.model.path).is_dir():
        return _found("rendering", "unchecked", "model.path names no directory: set it to see prompts as tokens")
    try:
        renderer = PromptRenderer(load_tokenizer(model_directory(config.model.path)), config.task)
        check_rendering(task, prompts, renderer, context_of(config))
        tokens = [len(renderer.ids(prompt)) for prompt in prompts]
        # Decoded: what the model reads, whatever the text was.
        text = renderer.tokenizer.decode(renderer.ids(prompts[0]), skip_special_tokens=False)
        unstopped = unstopped_turn(read_stopping(config, renderer.tokenizer), renderer, prompts)
        warnings = list(filter(None, (renderer.warn_of_date(prompts[0]), unstopped)))
    except (TbaError, ValueError) as error:
        return _found("rendering", "fail", str(error))
    detail = f"{min(tokens)} to {max(tokens)} tokens; the model reads the first prompt as {text!r:.500}"
    return _found("rendering", "warn" if warnings else "ok", "; ".join([*warnings, detail]))


def _main() -> None:
    section = TaskSection.model_validate_json(sys.stdin.read())
    task = load_task(section)
    training, held_out = task.prompts(), task.held_out()
    found: dict[str, Any] = {"training prompts": fingerprint(training), "held-out prompts": fingerprint(held_out)}
    scored, played = _sampled(task)
    found["rewards"] = rewards = []
    for prompt, text in _responses(scored) if "rewards" in sys.argv[2:] else []:
        reward, error = score(task, prompt, text, True)
        rewards.append([reward.total, sorted(reward.parts.items()), error])
    if "observations" in sys.argv[2:]:
        found["observations"] = _observations(section, task, played)
    # Not printed: a task may print, too.
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


def _observations(section: TaskSection, task: Task, prompts: Sequence[Prompt]) -> list[Any]:
    """Play here, and return all that environments answered that are not random."""
    rewards = Rewards(task, section.model_copy(update={"reward_workers": 0}))
    scripts = _scripts(task, [prompt for prompt in prompts if not is_random(task, prompt)])
    if os.environ.get("PYTHONHASHSEED") == _ALONE:
        episodes = [_play_all(rewards, [script])[0] for script in reversed(scripts)][::-1]
    else:
        episodes = _play_all(rewards, scripts)
    return [[(one.error, one.turn and astuple(one.turn)) for one in results] for results in episodes]


if __name__ == "__main__":
    _main()
