"""Small chat templates of the kinds that are about, and tokenizers that write them."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from whet.data.tokenizer import byte_tokenizer

QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# leaves earlier thinking out, and shows none as an empty block
QWEN3 = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set think = m.reasoning_content or '' %}{% if '</think>' in c %}"
    "{% set think = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.last %}<think>\n{{ think }}\n</think>\n\n{% endif %}{% endif %}{{ c }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start|>{{ m.role }}<|end|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# folds the system turn into the first user turn, and calls the assistant model
GEMMA = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|start|>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ first if loop.first else '' }}{{ m.content }}<|eot|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
# has no header, and puts the system turn into the last user turn
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set sys = messages[0].content ~ '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set sys = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ sys if loop.index0 >= rest | length - 2 else '' }}"
    "{{ m.content }}[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# has a system turn of its own, and leaves out tools
SMOLLM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nYou are a helpful AI "
    "assistant named SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "smollm": SMOLLM, "qwen": QWEN, "qwen3": QWEN3, "llama": LLAMA, "gemma": GEMMA, "mistral": MISTRAL,
    "marked": MARKED,
}  # fmt: skip


def tokenizer_with(template):
    """A byte tokenizer with the chat template, or the one of that name, and a bos token."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"bos_token": "<|bos|>", "additional_special_tokens": ["<|im_start|>", "<|start|>", "<|end|>", "<|eot|>"]}
    )
    tokenizer.chat_template = TEMPLATES.get(template, template)
    return tokenizer


def merging_tokenizer(*merges, blank=False):
    """A tokenizer that joins the pairs given; blank: it writes a blank before every text, as SentencePiece does."""
    letters = sorted({*map(chr, range(32, 127)), "\n", "▁", *(p for pair in merges for p in pair)})
    names = [*letters, *(a + b for a, b in merges), "</s>"]
    inner = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(dict.fromkeys(names))}, merges=list(merges)))
    if blank:
        inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
        inner.decoder = decoders.Metaspace(prepend_scheme="always", split=False)
    else:
        inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False)


def user(content):
    return {"role": "user", "content": content}


def said(content, **more):
    return {"role": "assistant", "content": content, **more}


def bracketed(tokenizer, sequence):
    """The text of a sequence with [[ ]] around what is trained."""
    ids = [*sequence.prefix.tolist(), *sequence.tokens.tolist()]
    mask = [*[False] * len(sequence.prefix), *sequence.mask.tolist()]
    text, start = "", 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or mask[place] != mask[start]:
            run = tokenizer.decode(ids[start:place])
            text, start = text + (f"[[{run}]]" if mask[start] else run), place
    return text


TOOLS = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user
<tool_response>
{{ m.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ m.role }}
{{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Calls and answers as Qwen's templates write them."""
