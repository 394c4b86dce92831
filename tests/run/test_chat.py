"""Chat templates against transformers, and templates that mean harm."""

import time
from datetime import datetime

import pytest
import tokenizers

from afl.errors import CheckpointError, RequestError
from afl.run.chat import ChatTemplates, Limits
from afl.run.text import Tokenizer

NOW = datetime(2026, 11, 30, 12, 0)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What's <b>1 & 2</b>? é🤖 "},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "Why?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}}]

CHATML = """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
<|im_start|>system
You help.<|im_end|>
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
INST = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{%- if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]{% else %}{% generation %}{{ m.content }}{{ eos_token }}
{%- endgeneration %}{% endif %}{% if loop.index > 9 %}{% break %}{% endif %}{% endfor %}"""
WITH_TOOLS = """{%- set ns = namespace(n=0) %}{% if tools %}{% for t in tools %}{{ t | tojson(indent=2) }}
{% endfor %}{% endif %}{% for m in messages[::-1] %}{% set ns.n = ns.n + m.content | length %}{% endfor %}{{ ns.n }}
{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}{{ pad_token }}
{% macro f(x) %}({{ x.items() | list | first | first }}){% endmacro %}{{ f(messages[0]) }}{{ enable_thinking }}"""


@pytest.fixture
def chat(request):
    made = []

    def make(source, limits=None, **more):
        made.append(ChatTemplates({"default": source, **more}, TOKENS, limits))
        return made[-1]

    yield make
    for c in made:
        c.close()


@pytest.mark.parametrize("source", [CHATML, INST, WITH_TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(chat, source, prompt):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **TOKENS)
    c = chat(source)
    for tools in (None, TOOLS):
        want = theirs.apply_chat_template(
            MESSAGES, tools=tools, chat_template=source, add_generation_prompt=prompt, tokenize=False,
            enable_thinking=False,
        )
        how = {"tools": tools, "add_generation_prompt": prompt, "variables": {"enable_thinking": False}}
        got = c.render(MESSAGES, now=NOW, **how)
        assert got == want


@pytest.mark.parametrize(("source", "want"), [
    ("{{ messages[0].content | wordwrap(5) }}", "hello\nthere"), ("{{ [1, 'a'] | pprint }}", "[1, 'a']"),
    ("{{ {'b': 1, 'a': 2} | dictsort | tojson }}", '[["a", 2], ["b", 1]]'),
])
def test_filters_that_import_something_on_first_use_work_though_no_file_can_be_opened(chat, source, want):
    assert chat(source).render([{"role": "user", "content": "hello there"}], now=NOW) == want


def test_the_date_is_the_one_passed_in(chat):
    assert chat("{{ strftime_now('%d %b %Y') }}").render(MESSAGES, now=NOW) == "30 Nov 2026"


def test_the_tool_template_is_used_when_there_are_tools(chat):
    c = chat("plain", tool_use="with tools")
    assert c.render(MESSAGES, now=NOW) == "plain" and c.render(MESSAGES, now=NOW, tools=TOOLS) == "with tools"
    with pytest.raises(CheckpointError, match="a, b"):
        ChatTemplates({"a": "", "b": ""}, {}).render(MESSAGES, now=NOW)


def test_messages_that_the_template_refuses_are_the_requests_fault(chat):
    with pytest.raises(RequestError, match="roles must alternate"):
        chat("{{ raise_exception('roles must alternate') }}").render(MESSAGES, now=NOW)


@pytest.mark.parametrize("source", [
    "{% for i in range(10**9) %}a{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**10 }}", "{{ [1] * 10**9 }}", "{{ 'a' | center(10**9) }}", "{{ '%1000000000d' | format(3) }}",
    "{{ '{:>1000000000}'.format(1) }}", "{{ 7 ** (7 ** 20) }}",
    "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(64) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 100000 + ")" * 100000 + " }}",
    "{% if %}", "{{ messages.__class__.__mro__ }}", "{{ messages.append(3) }}", "{% include '/etc/passwd' %}",
    "{{ nothing.at.all }}", "{{ lipsum(n=10**6) }}", "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
])
def test_a_hostile_template_ends_soon_with_a_clear_error(chat, source):
    c, start = chat(source, Limits(seconds=1.0)), time.monotonic()
    with pytest.raises(CheckpointError, match="chat template") as e:
        c.render(MESSAGES, now=NOW)
    assert time.monotonic() - start < 10 and len(str(e.value)) < 700
    c.templates["default"] = "fine"
    assert c.render(MESSAGES, now=NOW) == "fine"    # the next request is served


def test_a_rendered_chat_gets_no_second_begin_token(chat):
    t = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "hi": 1, "<unk>": 2}, unk_token="<unk>"))
    t.add_special_tokens(["<s>"])
    t.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = Tokenizer(t.to_str())
    assert tokenizer.encode("hi", special=True) == [0, 1]
    assert chat("{{ bos_token }}hi").encode(tokenizer, MESSAGES, now=NOW) == [0, 1]
