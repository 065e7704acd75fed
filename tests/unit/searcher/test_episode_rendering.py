"""The context of an episode is what the chat template gives, around sampled tokens that are kept as they are."""

from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers")

from tba.common.config import TaskSection
from tba.common.rendering import Message, PromptRenderer, as_map, message_of
from tba.searcher.tasks.task import Prompt
from tba.tests.helpers.chat_tokenizers import KINDS, chat_tokenizer
from tba.tests.helpers.sampled_turns import FAMILIES, TRL, play, tokenizer_of

ASK: Message = ("user", "What is 2 + 3?")
HIGHER: Message = ("user", "5 is wrong.")
PROMPT = Prompt("p", messages=[ASK])
# The turns of 40 episodes of which the template changes the history, by design: thoughts are dropped before the next
# message of the user, and an empty thought that the prompt ends with.
BROKEN = {"qwen 3": (0.2, 0.6), "qwen 3 without thinking": (1, 1), "glm 4.5": (0.2, 0.6), "gpt-oss": (0.7, 0.99)}


def squeezed(text: str) -> str:
    return "".join(text.split())


def renderer_of(tokenizer: Any, **settings: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer, TaskSection(**settings))


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_contexts_of_random_episodes_are_those_of_the_template_or_known_to_be_broken(name):
    family = FAMILIES[name]
    if family.template not in KINDS and not TRL:
        pytest.skip("trl is not installed")
    tokenizer, rng, turns = tokenizer_of(family), np.random.default_rng(0), Counter[bool]()
    for turn in (turn for _ in range(40) for turn in play(family, tokenizer, rng)):
        assert turn.context == turn.expected or (turn.spaced and squeezed(turn.context) == squeezed(turn.expected))
        assert turn.broken == (not squeezed(turn.expected).startswith(squeezed(turn.held)))
        turns[turn.broken] += 1
    least, most = BROKEN.get(name, (0, 0))
    assert least <= turns[True] / turns.total() <= most


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_of_turn_is_written_once_whether_it_was_sampled_or_not(kind):
    tokenizer = chat_tokenizer(kind)
    renderer, end = renderer_of(tokenizer), tokenizer.eos_token_id
    first, conversation = renderer.begin(PROMPT)
    sampled = tokenizer.encode("5", add_special_tokens=False)
    ended = renderer.proceed(conversation, "5", [HIGHER], variables_of=PROMPT, ended_by=end)
    cut = renderer.proceed(conversation, "5", [HIGHER], variables_of=PROMPT)
    assert (ended.broken, cut.broken) == (False, False)
    assert [end, *ended.ids] == cut.ids
    maps = [as_map(message) for message in ended.conversation]
    expected = tokenizer.apply_chat_template(maps, tokenize=False, add_generation_prompt=True)
    assert squeezed(tokenizer.decode([*first, *sampled, *cut.ids])) == squeezed(expected)


def test_a_reply_that_another_special_token_ended_breaks_the_context():
    tokenizer = chat_tokenizer("llama 3")
    renderer, other = renderer_of(tokenizer), tokenizer.bos_token_id
    answer = renderer.proceed([ASK], "5", [HIGHER], variables_of=PROMPT, ended_by=other)
    whole = renderer.ids(Prompt("q", messages=[ASK, ("assistant", "5"), HIGHER]))
    assert (answer.broken, answer.ids) == (True, whole)
    # An id of `search.stop` that is an ordinary token is a part of what the model said.
    stop = tokenizer.encode("5", add_special_tokens=False)[-1]
    assert not renderer.proceed([ASK], "4", [HIGHER], variables_of=PROMPT, ended_by=stop).broken


def test_a_template_that_merges_messages_breaks_the_context():
    tokenizer = chat_tokenizer("qwen 2.5")
    merging = "{% if loop.previtem is defined and loop.previtem.role == m.role %} {{ m.content }}{% else %}"
    tokenizer.chat_template = (
        "{% for m in messages %}" + merging + "<|im_start|>{{ m.role }} {{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    renderer, end = renderer_of(tokenizer), tokenizer.eos_token_id
    merged = renderer.proceed([ASK], "5", [("assistant", "and 3")], variables_of=PROMPT, ended_by=end)
    assert merged.broken
    assert "<|im_start|>assistant 5 and 3<|im_start|>assistant " in tokenizer.decode(merged.ids)


def test_system_and_variables_apply_to_every_turn():
    tokenizer = chat_tokenizer("qwen 3")
    settings: dict[str, Any] = {"system": "Be brief.", "template_kwargs": {"enable_thinking": False}}
    renderer = renderer_of(tokenizer, **settings)
    first, conversation = renderer.begin(PROMPT, [HIGHER])
    assert tokenizer.decode(first) == renderer.text(Prompt("q", messages=[ASK, HIGHER]))
    assert "Be brief." in tokenizer.decode(first)
    answer = renderer.proceed(conversation, "5", [HIGHER], variables_of=PROMPT)
    assert tokenizer.decode(answer.ids).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_template_that_writes_the_time_does_not_break_the_context():
    tokenizer = chat_tokenizer("llama 3")
    tokenizer.chat_template = "{{ strftime_now('%S.%f') }}" + tokenizer.chat_template
    renderer = renderer_of(tokenizer)
    _, conversation = renderer.begin(PROMPT)
    assert not renderer.proceed(conversation, "5", [HIGHER], variables_of=PROMPT).broken


@pytest.mark.parametrize("kind", ["llama 3", "mistral"])
def test_without_a_template_contents_follow_as_text_after_one_begin_token(kind):
    tokenizer = chat_tokenizer(kind)
    renderer, prompt = renderer_of(tokenizer, template="raw"), Prompt("p", "What is 2 + 3?")
    first, conversation = renderer.begin(prompt, [("user", "\nAnswer: ")])
    assert first == tokenizer.encode("What is 2 + 3?\nAnswer: ")
    assert first.count(tokenizer.bos_token_id) == 1
    answer = renderer.proceed(conversation, "5", [HIGHER, ("user", "\n")], variables_of=prompt)
    assert not answer.broken
    assert tokenizer.decode([*first, *answer.ids]) == tokenizer.decode(first) + "5 is wrong.\n"
    assert tokenizer.bos_token_id not in answer.ids
    assert answer.conversation[-3:] == [("assistant", "5"), HIGHER, ("user", "\n")]


def test_a_text_prompt_is_a_message_of_the_user_where_there_is_a_template():
    tokenizer = chat_tokenizer("qwen 3")
    renderer = renderer_of(tokenizer)
    assert renderer.begin(Prompt("p", ASK[1])) == renderer.begin(PROMPT) == (renderer.ids(PROMPT), [ASK])
    assert renderer.begin(Prompt("p"), [ASK]) == renderer.begin(PROMPT)


def test_a_role_that_the_template_leaves_out_or_refuses_is_an_error():
    tokenizer = chat_tokenizer("mistral")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% else %}", "{% elif m.role == 'user' %}")
    renderer = renderer_of(tokenizer)
    with pytest.raises(ValueError, match="the chat template does not write messages of the role 'tool'"):
        renderer.proceed([ASK], "5", [("tool", "6")], variables_of=PROMPT)
    with pytest.raises(ValueError, match="the chat template does not write messages of the role 'tool'"):
        renderer.begin(PROMPT, [("tool", "6")])
    with pytest.raises(ValueError, match="the chat template refuses it: System role not supported"):
        renderer_of(chat_tokenizer("gemma")).proceed([ASK], "5", [("system", "6")], variables_of=PROMPT)


def test_a_role_that_the_template_writes_at_the_beginning_alone_is_an_error_later():
    tokenizer = chat_tokenizer("qwen 2.5")
    tokenizer.chat_template = tokenizer.chat_template.replace("{% for m in messages %}", "{% for m in said %}")
    tokenizer.chat_template = (
        "{% set said = messages[:1] + messages[1:] | rejectattr('role', 'eq', 'system') | list %}"
        + (tokenizer.chat_template)
    )
    renderer = renderer_of(tokenizer)
    first, conversation = renderer.begin(Prompt("p"), [("system", "Be brief."), ASK])
    assert "Be brief." in tokenizer.decode(first)
    with pytest.raises(ValueError, match="does not write messages of the role 'system'"):
        renderer.proceed(conversation, "5", [("system", "Be long."), ASK], variables_of=Prompt("p"))


@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_messages_with_calls_alone_may_be_part_of_the_first_context():
    renderer = renderer_of(tokenizer_of(FAMILIES["llama 3.2"]))
    call: Any = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    for content in (None, "", "I add."):
        first, conversation = renderer.begin(
            PROMPT, [message_of({"role": "assistant", "content": content, "tool_calls": [call]}), ("tool", "5")]
        )
        assert '"name": "add"' in renderer.tokenizer.decode(first, skip_special_tokens=False)
        assert not renderer.proceed(conversation, "5", [HIGHER], variables_of=PROMPT).broken


def test_an_episode_without_any_message_is_refused():
    with pytest.raises(ValueError, match="the episode begins without a message"):
        renderer_of(chat_tokenizer("qwen 3")).begin(Prompt("p"))
    tokenizer = chat_tokenizer("qwen 3")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="it has messages and no text"):
        renderer_of(tokenizer).begin(PROMPT)


@pytest.mark.skipif(not TRL, reason="trl is not installed")
def test_of_gpt_oss_the_conversation_keeps_the_answer_of_the_final_channel():
    family = FAMILIES["gpt-oss"]
    tokenizer = tokenizer_of(family)
    renderer, end = renderer_of(tokenizer), tokenizer.convert_tokens_to_ids("<|end|>")
    for frame, end_id, broken in zip(family.frames, (end, None), (False, True), strict=True):
        reply = frame.format(*["it is"] * (frame.count("{}") - 1), "5")
        answer = renderer.proceed([ASK], reply, [HIGHER], variables_of=PROMPT, ended_by=end_id)
        assert (answer.conversation, answer.broken) == ([ASK, ("assistant", "5"), HIGHER], broken)
    # Cut off in a thought, which the template refuses as it is.
    cut = renderer.proceed([ASK], "<|channel|>analysis<|message|>it", [HIGHER], variables_of=PROMPT)
    assert (cut.conversation[1], cut.broken) == (("assistant", "analysisit"), True)
