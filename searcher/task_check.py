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
from dataclasses import astuple
from pathlib import Path
from typing import Any

from tba.common.config import Config, TaskSection
from tba.common.errors import TaskError, TbaError
from tba.searcher.build import context_of, load
from tba.searcher.engines.stopping import unstopped_turn
from tba.searcher.scoring.rewards import Rewards
from tba.searcher.scoring.scoring import Scored, storable
from tba.searcher.tasks import load_task
from tba.searcher.tasks import task as tasks
from tba.searcher.tasks.task import CORRECT, Prompt, Task

Finding = dict[str, str]

# Prompts whose responses are scored, from the first.
_SAMPLED = 8
_SIGNS = "\N{MINUS SIGN}\N{GREEK SMALL LETTER PI}\x00"
# Responses that no task should fail on, besides the answer of the prompt.
_ODD = ("", " ", "0", "-1e999", "nan", "I do not know.", "\\boxed{", _SIGNS, "9" * 10_000)
# Turns that an answer is given in an episode.
_ANSWERED_TURNS = 3
_CHILD_SECONDS = 900
_WAIT_SECONDS = 1.0
# The hash seed of the process that plays episodes one by one.
_ALONE = "2"
# What is compared between processes: of responses, and of episodes.
_REWARDS, _OBSERVATIONS = "rewards", "observations"


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
    scripts = _scripts(task)
    results = {kind: _in_workers(config.task, task, some) for kind, some in scripts.items()}
    all_returned = not any(map(_interrupted, results.values()))
    plays_luck = tasks.has_environment(task) and tasks.is_random(task)
    yield _same_everywhere(config.task, [*scripts], all_returned=all_returned, is_random=plays_luck)
    for kind, some in scripts.items():
        yield from _results(config.task, task, some, results[kind], plays=kind == _OBSERVATIONS)
    yield _rendering(config, task, [*training[:_SAMPLED], *held_out[:_SAMPLED]])


def _found(check: str, result: str, detail: str) -> Finding:
    return {"check": check, "result": result, "detail": detail}


def _prompts(task: Task, training: Sequence[Prompt], held_out: Sequence[Prompt]) -> Finding:
    for prompt in (*training, *held_out):
        texts = [getattr(prompt, name, None) for name in ("key", "text", "answer")]
        if not isinstance(prompt, Prompt) or not all(isinstance(text, str) for text in texts):
            return _found("prompts", "fail", f"{prompt!r:.200} is not a Prompt whose key, text and answer are texts")
    try:
        tasks.check_prompts(task)
    except TaskError as error:
        return _found("prompts", "fail", str(error))
    detail = f"{len(training)} for training, {len(held_out)} held out"
    trained = {(prompt.text, prompt.messages, prompt.ids) for prompt in training}
    # The environment of an episode may differ although the prompt does not.
    single = [prompt for prompt in held_out if not tasks.has_environment(task, prompt)]
    if both := sum((prompt.text, prompt.messages, prompt.ids) in trained for prompt in single):
        return _found("prompts", "warn", f"{detail}; {both} of these are training prompts: accuracy would be too high")
    return _found("prompts", "ok" if held_out else "warn", detail if held_out else f"{detail}: `tba eval` needs some")


def _same_everywhere(section: TaskSection, kinds: Sequence[str], *, all_returned: bool, is_random: bool) -> Finding:
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
                return _found(name, "fail", f"reading its {' and '.join(what)} takes longer than {_CHILD_SECONDS} s")
            if child.returncode or not file.exists():
                last = child.stderr.strip().rpartition("\n")[2]
                return _found(name, "fail", f"a process that loads it ends with code {child.returncode}: {last}")
            outputs.append(json.loads(file.read_text(encoding="utf-8")))
    first, second = outputs
    different = [part for part in first if first[part] != second[part]]
    if different:
        advice = "use no hash(), no order of a set, no time and no random number without a seed"
        if _OBSERVATIONS in different:
            advice += "; seed an environment with its prompt's key, share no state, or declare random = True"
        return _found(name, "fail", f"{', '.join(different)} differ between two processes: {advice}")
    both = " and ".join(kinds)
    if not all_returned:
        detail = f"two processes load the same prompts; {both} are not compared, because a response ended its worker"
        return _found(name, "unchecked", detail)
    detail = f"two processes load the same prompts and give the same {both}"
    if is_random:
        return _found(name, "unchecked", f"{detail}; random environments are not compared")
    return _found(name, "ok", detail)


# A prompt, and the responses to it in one episode, or the only one.
_Script = tuple[Prompt, Sequence[str]]


def _scripts(task: Task) -> dict[str, list[_Script]]:
    """Return what to score and what to play, for the first prompts: answers, odd responses, and the task's examples."""
    found: dict[str, list[_Script]] = {}
    prompts = (task.prompts() or task.held_out())[:_SAMPLED]
    answers = [storable(prompt.answer) for prompt in prompts]
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if tasks.has_environment(task, prompt):
            # The answers of other prompts are well-formed, and mostly wrong.
            others = [*answers[number + 1 :], *answers[:number]]
            episodes = ([answer] * _ANSWERED_TURNS, others, _ODD, getattr(task, "example_replies", ()))
            found.setdefault(_OBSERVATIONS, []).extend((prompt, replies) for replies in episodes if any(replies))
        else:
            found.setdefault(_REWARDS, []).extend((prompt, [text]) for text in (answer, *_ODD))
    return found


def _in_workers(section: TaskSection, task: Task, scripts: Sequence[_Script]) -> Sequence[Sequence[Scored]]:
    """Score or play in workers, with their limits: the first one alone, and all unless that ends its worker."""
    rewards = Rewards(task, section)
    try:
        first = _run(rewards, task, scripts[:1])
        return first if _interrupted(first) else _run(rewards, task, scripts)
    finally:
        rewards.close()


def _interrupted(results: Sequence[Sequence[Scored]]) -> bool:
    return any(one[-1].interrupted for one in results)


def _run(rewards: Rewards, task: Task, scripts: Sequence[_Script]) -> list[list[Scored]]:
    """Score responses, or play episodes together, each to its end or that of its script."""
    found: list[list[Scored]] = [[] for _ in scripts]
    for ticket, (prompt, replies) in enumerate(scripts):
        if tasks.has_environment(task, prompt):
            rewards.play(ticket, prompt, [])
        else:
            rewards.submit(ticket, prompt, replies[0], True)
    while rewards.waiting:
        for one in rewards.wait(_WAIT_SECONDS):
            found[one.ticket].append(one)
            (prompt, replies), turns = scripts[one.ticket], len(found[one.ticket])
            if one.turn is not None and not one.turn.done and turns <= len(replies):
                given = [(reply, True) for reply in replies[:turns]]
                rewards.play(one.ticket, prompt, given, last=turns == len(replies))
    return found


def _results(
    section: TaskSection, task: Task, scripts: Sequence[_Script], results: Sequence[Sequence[Scored]], *, plays: bool
) -> Iterator[Finding]:
    """Yield what responses or episodes show: errors, the range of the rewards, and their speed if all returned."""
    errors = [
        f"prompt {prompt.key!r} after {len(some) - 1} answers: {some[-1].error}"
        if plays
        else f"to prompt {prompt.key!r} the response {replies[0]!r:.60}: {some[-1].error}"
        for (prompt, replies), some in zip(scripts, results, strict=False)
        if some[-1].error
    ]
    detail = f"{len(errors)} of {len(results)} {'episodes' if plays else 'responses'}"
    yield _found("errors", "fail" if errors else "ok", ": ".join([detail, *filter(None, ["; ".join(errors[:3])])]))
    if len(errors) < len(results):
        yield _rewards(task, results, plays=plays)
    # Here nothing would end what its worker was ended for.
    if not _interrupted(results):
        count, seconds = _own_speed(section, task, scripts)
        speed = f"{count / seconds:.0f} turns per second, resets included"
        yield _found("speed", "ok", speed if plays else f"{seconds / count * 1000:.3g} ms per response")


def _own_speed(section: TaskSection, task: Task, scripts: Sequence[_Script]) -> tuple[int, float]:
    """Return the number of scores or turns and their seconds in this process: asking a worker would take longer."""
    rewards = Rewards(task, section.model_copy(update={"reward_workers": 0}))
    # The first score may import and compile.
    _run(rewards, task, scripts[:1])
    begin = time.monotonic()
    results = _run(rewards, task, scripts)
    return sum(map(len, results)), time.monotonic() - begin


def _rewards(task: Task, found: Sequence[Sequence[Scored]], *, plays: bool) -> Finding:
    """Return what the rewards without error show: of an episode their sum, and the last value of `correct`."""
    good = [results for results in found if not results[-1].error]
    totals = [sum(one.reward.total for one in results) for results in good]
    least = tasks.least_reward(task)
    if not plays and min(totals) < least - 1e-9:
        return _found("rewards", "fail", f"{min(totals):g} is below least_reward = {least:g}: correct it")
    parts = sorted({name for results in good for one in results for name in one.reward.parts})
    given = [[one.reward.parts[CORRECT] for one in results if CORRECT in one.reward.parts] for results in good]
    if plays:
        done = sum(results[-1].turn is not None and results[-1].turn.done for results in good)
        more = f"the environment ended {done} of {len(good)} episodes"
    else:
        own = found[:: len(_ODD) + 1]
        right = sum(one.reward.parts.get(CORRECT) == 1 for (one,) in own)
        more = f"{right} of {len(own)} answers are correct"
    place = getattr(task, "place_of_parts", "the parts of its rewards")
    warning = "" if CORRECT in parts else f"; without {CORRECT!r} in {place} there is no accuracy"
    if fractions := {values[-1] for values in given if values} - {0.0, 1.0}:
        warning = f"; the part {CORRECT!r} is {min(fractions):g}, and accuracy needs 1 or 0"
    detail = f"{min(totals):g} to {max(totals):g}, parts {', '.join(parts) or 'none'}; {more}{warning}"
    return _found("rewards", "warn" if warning else "ok", detail)


def _rendering(config: Config, task: Task, prompts: Sequence[Prompt]) -> Finding:
    """Show the first prompt as the model gets it, if the model is on this machine."""
    if not config.model.path or not Path(config.model.path).is_dir():
        return _found("rendering", "unchecked", "model.path names no directory: set it to see prompts as tokens")
    try:
        _, renderer, stopping = load(config, task)
        tasks.check_rendering(task, prompts, renderer, context_of(config))
        tokens = [len(renderer.ids(prompt)) for prompt in prompts]
        # Decoded: what the model reads, whatever the text was.
        text = renderer.tokenizer.decode(renderer.ids(prompts[0]), skip_special_tokens=False)
        unstopped = unstopped_turn(stopping, renderer, prompts)
        unknown = renderer.unknown_tokens(prompts, config.model.path)
        warnings = list(filter(None, (renderer.warn_of_date(prompts[0]), unstopped, unknown)))
    except (TbaError, ValueError) as error:
        return _found("rendering", "fail", str(error))
    detail = f"{min(tokens)} to {max(tokens)} tokens; the model reads the first prompt as {text!r:.500}"
    return _found("rendering", "warn" if warnings else "ok", "; ".join([*warnings, detail]))


def _main() -> None:
    section = TaskSection.model_validate_json(sys.stdin.read())
    task = load_task(section)
    lists = {"training prompts": task.prompts(), "held-out prompts": task.held_out()}
    found: dict[str, Any] = {name: tasks.fingerprint(prompts) for name, prompts in lists.items()}
    rewards = Rewards(task, section.model_copy(update={"reward_workers": 0}))
    for kind, scripts in _scripts(task).items():
        repeatable = [script for script in scripts if not tasks.is_random(task, script[0])]
        if kind not in sys.argv[2:]:
            continue
        if os.environ.get("PYTHONHASHSEED") == _ALONE:
            results = [_run(rewards, task, [script])[0] for script in reversed(repeatable)][::-1]
        else:
            results = _run(rewards, task, repeatable)
        found[kind] = [[(one.error, astuple(one.reward), one.turn) for one in some] for some in results]
    # Not printed: a task may print, too.
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    _main()
