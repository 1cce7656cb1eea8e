"""A byte-level BPE tokenizer and the chat templates that the tests of this package share."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>",
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
)  # fmt: skip
CORPUS = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful answers.",
    "user assistant system USER: ASSISTANT: hello there, how are you today? I am fine, thank you very much.",
    "The answer is four, because two and two make four. Hello hello the the answer answer is is fine fine.",
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
DATED = "{{ 'Today: ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML
# Only the answer after the last question keeps its thinking, and always opens with a think block.
THINK_DROPPING = """
{%- set last = namespace(user=0) -%}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' -}}
{%- if m['role'] == 'assistant' and loop.index0 > last.user -%}
{{- '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# The generation prompt opens the thinking; an answer without any is rendered without the block.
THINK_OPENING = """
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' -}}
{%- if m['reasoning_content'] %}{{ '<think>\\n' + m['reasoning_content'] + '\\n</think>\\n\\n' }}{% endif -%}
{{- m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif -%}
"""
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHATML
)


def build_tokenizer(template: str | None, eos: str, trim_offsets: bool = True) -> Any:
    """A tokenizer of about 450 tokens; trimmed offsets leave out blanks, as those of GPT-2 and Llama 3 do."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token=eos,
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
