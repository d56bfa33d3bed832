"""Tokenizers with chat templates that behave as those of three families do, written anew and small."""

from transformers import PreTrainedTokenizerFast

from proximo.models import tiny_tokenizer

SMOLLM = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m.content.split('</think>')[-1] }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n' }}{{ c.function | tojson }}{{ '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}{% set call = m.tool_calls[0].function %}"
    '{{ \'<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "\' + call.name + \'", "parameters": \' }}'
    "{{ call.arguments | tojson }}{{ '}<|eot_id|>' }}"
    "{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\n\n' }}{{ {'output': m.content} | tojson }}{{ '<|eot_id|>' }}"
    "{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{% if loop.first and tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
ENDS = {"smollm": "<|im_end|>", "qwen": "<|im_end|>", "llama": "<|eot_id|>"}
TEMPLATES = {"smollm": SMOLLM, "qwen": QWEN, "llama": LLAMA}


def chat_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """A character is a token, and so is each mark of the family's template."""
    tokenizer = tiny_tokenizer()
    end = ENDS[family]
    marks = ["<|im_start|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer.add_special_tokens({"eos_token": end, "bos_token": "<|begin_of_text|>", "extra_special_tokens": marks})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # which are not special in Qwen's vocabulary either
    tokenizer.chat_template = TEMPLATES[family]
    return tokenizer
