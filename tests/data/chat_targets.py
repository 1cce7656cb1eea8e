"""Chat templates, and the tiny tokenizer with their special tokens."""

from typing import Any

from tokenizers import processors

from tests import tiny

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRIMMING = "{{ bos_token }}" + CHATML.replace(
    "m['content']", "m['content'] | trim"
)  # like Llama 3's
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    + CHATML
)
# Only the answer after the last question keeps its thinking; it always begins with a think block.
THINK_DROPPING = """
{%- set last = namespace(user=0) -%}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m['role'] + '\\n' -}}
{%- if m['role'] == 'assistant' and loop.index0 > last.user -%}
{{- '<think>\\n' + (m['reasoning_content'] or '') + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- m['content'] + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}
"""
# The generation prompt opens the thinking; an answer without it is rendered without the block.
THINK_OPENING = CHATML.replace("assistant\\n", "assistant\\n<think>\\n").replace(
    "{{ '<|im_start|>'",
    "{% set thought = m['reasoning_content'] %}"
    "{% set block = '<think>\\n' + thought + '\\n</think>\\n\\n' if thought else '' %}"
    "{{ '<|im_start|>'",
    1,
)
THINK_OPENING = THINK_OPENING.replace("m['content']", "block + m['content']")


def build_tokenizer(template: str | None, eos: str, trim_offsets: bool = True) -> Any:
    """The tiny tokenizer; trimmed offsets leave out blanks, as in GPT-2 and Llama 3."""
    made = tiny.tokenizer(chat_template=template)
    made.add_special_tokens(
        {
            "bos_token": "<s>",
            "eos_token": eos,
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        }
    )
    made.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    return made
