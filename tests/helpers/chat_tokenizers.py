"""Small tokenizers with the special tokens and the chat formats of well-known families of models."""

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

_TEXTS = ["What is 2 + 3?", "You are a helpful assistant. Answer with a number.", "The answer is 5.\n\nQuestion: "]

_LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_25 = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}" + _CHATML
# Without thinking, the thought is empty; in a conversation, the last answer has one.
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_QWEN_3 = _CHATML.replace(
    "{{ m.content }}", "{% if loop.last and m.role == 'assistant' %}" + _NO_THOUGHT + "{% endif %}{{ m.content }}"
).replace("assistant\n{%", "assistant\n{% if enable_thinking is false %}" + _NO_THOUGHT + "{% endif %}{%")
_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
    "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
)
_PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# The pieces of SentencePiece, or bytes; the chat template; the begin token, if the tokenizer adds one to a text; the
# end token; the other special tokens.
KINDS: dict[str, tuple[str, str, str | None, str, list[str]]] = {
    "llama 3": ("bytes", _LLAMA_3, "<|begin_of_text|>", "<|eot_id|>", ["<|start_header_id|>", "<|end_header_id|>"]),
    "qwen 2.5": ("bytes", _QWEN_25, None, "<|im_end|>", ["<|im_start|>"]),
    "qwen 3": ("bytes", _QWEN_3, None, "<|im_end|>", ["<|im_start|>"]),
    "gemma": ("pieces", _GEMMA, "<bos>", "<end_of_turn>", ["<start_of_turn>"]),
    "mistral": ("pieces", _MISTRAL, "<s>", "</s>", ["[INST]", "[/INST]"]),
    # Its template writes no begin token, which its tokenizer adds to a text.
    "phi 3": ("pieces", _PHI_3, "<s>", "<|end|>", ["<|user|>", "<|assistant|>", "<|system|>"]),
}


def chat_tokenizer(kind: str) -> Any:
    """Return a tokenizer of one of the `KINDS`."""
    pieces, template, begin, end, others = KINDS[kind]
    special = [*([begin] if begin else []), end, *others]
    tokenizer = Tokenizer(models.BPE())
    if pieces == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        alphabet = ["\n", *map(chr, range(32, 127))]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
        )
    loaded = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, additional_special_tokens=others
    )
    if kind == "qwen 3":
        loaded.add_tokens([AddedToken("<think>"), AddedToken("</think>")])
    loaded.chat_template = template
    return loaded
