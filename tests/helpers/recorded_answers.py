"""Responses to problems of GSM8K and MATH-500 with a known final answer, and scorers that share no code with the tasks.

A response is recorded with its claim: the final answer that a reader would see, None if there is none. The scorers
judge the claim, so they need not find it in the text.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tba.searcher.tasks.task import Prompt


@dataclass(frozen=True, slots=True)
class Recorded:
    """A response to a prompt."""

    prompt: Prompt
    kind: str
    text: str
    claim: str | None
    finished: bool = True


def number(text: str) -> Fraction | None:
    """The exact value of a plain decimal number, None for any other text."""
    try:
        return Fraction(text.replace(",", "")) if len(text) <= 400 and "/" not in text else None
    except ValueError:
        return None


# ---------------------------------------------------------------- GSM8K


def gsm8k_responses(prompts: Sequence[Prompt], seed: int) -> Iterator[Recorded]:
    """One response to each prompt, whose kinds alternate."""
    rng = random.Random(seed)
    for n, prompt in enumerate(prompts):
        gold = prompt.answer.replace(",", "")
        value = Fraction(gold)
        other = str(int(value) + rng.randint(1, 9))
        grouped = f"{int(value) * 1000:,}"
        kinds = [
            ("plain", f"So the answer is {gold}.", gold),
            ("boxed", rf"\boxed{{{gold}}}", gold),
            ("two boxed", rf"\boxed{{{other}}} or rather \boxed{{{gold}}}", gold),
            ("two boxed, wrong", rf"\boxed{{{gold}}} or rather \boxed{{{other}}}", other),
            ("nested", rf"\boxed{{\boxed{{{gold}}}}}", gold),
            ("units", f"It takes {gold} hours", gold),
            ("money", f"${gold}.00", gold),
            ("percent", f"That is {gold}%", gold),
            ("fraction", f"{gold}/7", "7"),
            ("interval", f"in [{other}, {gold}]", gold),
            ("separators", f"exactly {int(value):,}", gold),
            ("latex separators", grouped.replace(",", "{,}"), grouped),
            ("unicode minus", f"it is \N{MINUS SIGN}{gold}", f"-{gold}"),
            ("bare point", "it is .5", "0.5"),
            ("exponent", f"it is {gold}e0", gold),
            ("large exponent", "1e3", "1000"),
            ("refusal", "I cannot help with that.", None),
            ("empty", "", None),
            ("long", "7" * 10_000, "long"),
            ("wrong", f"The answer is {other}", other),
        ]
        kind, text, claim = kinds[n % len(kinds)]
        yield Recorded(prompt, kind, text, claim, finished=rng.random() > 0.05)


def gsm8k_verdict(recorded: Recorded) -> float:
    """1 if the claim is the gold number, by exact arithmetic."""
    claim = None if recorded.claim is None else number(recorded.claim)
    return float(recorded.finished and claim is not None and claim == number(recorded.prompt.answer))


# ---------------------------------------------------------------- MATH-500


def math_responses(prompts: Sequence[Prompt], seed: int) -> Iterator[Recorded]:
    """One response to each prompt, whose kinds alternate."""
    rng = random.Random(seed)
    for n, prompt in enumerate(prompts):
        gold = prompt.answer
        value = number(gold)
        whole = None if value is None or value.denominator > 1 else int(value)
        other = rf"{gold} + 1" if whole is None else str(whole + rng.randint(1, 9))
        grouped = gold if whole is None else f"{whole:,}"
        tenth = r"1e3" if whole is None else f"{whole / 10!r}e1"
        kinds = [
            ("boxed", rf"so $\boxed{{{gold}}}$.", gold),
            ("two boxed", rf"\boxed{{{other}}} or rather \boxed{{{gold}}}", gold),
            ("two boxed, wrong", rf"\boxed{{{gold}}} or rather \boxed{{{other}}}", other),
            ("nested", rf"\boxed{{\boxed{{{gold}}}}}", gold),
            ("units", rf"\boxed{{{gold}\text{{ cm}}}}", rf"{gold}\text{{ cm}}"),
            ("percent", rf"\boxed{{{gold}\%}}", rf"{gold}\%"),
            ("fraction", rf"\boxed{{\frac{{2 \cdot ({gold})}}{{2}}}}", rf"\frac{{2 \cdot ({gold})}}{{2}}"),
            ("interval", rf"\boxed{{({gold}, {gold}]}}", rf"({gold}, {gold}]"),
            ("separators", rf"\boxed{{{grouped}}}", grouped),
            ("latex separators", rf"\boxed{{{grouped.replace(',', '{,}')}}}", grouped),
            ("unicode minus", f"\\boxed{{{gold.replace('-', chr(0x2212))}}}", gold),
            ("negative", f"\\boxed{{\N{MINUS SIGN}{gold}}}", f"-{gold}"),
            ("bare point", r"\boxed{.5}", "0.5"),
            ("exponent", rf"\boxed{{{tenth}}}", "1000" if whole is None else gold),
            ("no box", f"The answer is ${gold}$.", gold),
            ("refusal", "I cannot help with that.", None),
            ("empty", "", None),
            ("long", rf"\boxed{{{'7' * 10_000}}}", "7" * 10_000),
            ("wrong", rf"\boxed{{{other}}}", other),
            ("not closed", r"so it is \boxed{", None),
        ]
        kind, text, claim = kinds[n % len(kinds)]
        yield Recorded(prompt, kind, text, claim, finished=rng.random() > 0.05)


def math_verdict(recorded: Recorded) -> float:
    """1 if the claim is the gold answer: as text, by exact arithmetic for numbers, else by math-verify itself."""
    from math_verify import parse, verify

    gold, claim = recorded.prompt.answer, recorded.claim
    if not recorded.finished or claim is None or len(claim) > 1000:
        return 0.0
    numbers = number(gold), number(claim)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    # A sign of percent or degrees after an answer says nothing about its value.
    gold, claim = (text.removesuffix(r"\%").removesuffix(r"^\circ") for text in (gold, claim))
    same_text = "".join(gold.split()) == "".join(claim.split())
    if same_text or gold.startswith(r"\text"):
        return float(same_text)
    return float(verify(parse(rf"\boxed{{{gold}}}"), parse(rf"\boxed{{{claim}}}")))
