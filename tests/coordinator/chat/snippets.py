"""Short templates, one rule each; make_golden.py records what Jinja renders (an error is null)."""

SNIPPETS = [
    # White space
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n", "a {%- if true -%} b {%- endif -%} c", "{# x #}\n y", "  {# x #}\n y", " {#- x -#} y",
    "{%+ if true %}x{% endif %}", "  {%+ if true +%}\nx{% endif %}", "{{ 1 -}}  \n {{- 2 }}\n", "x {{ 1 }} \n\n", "\n\n", "a\r\nb\rc",
    "{% raw %} {{ x }} {%- y %} {% endraw %}z", "a {%- raw -%} {{ {% endraw -%} b", "}} %} {% set a = 1 %} {{ a }}",
    "a\n {{ 1 }}  {% if 1 %}\n x {% endif %} \n", "{% if 1 %} {% if 1 %}\n   {% endif %}\n  {% endif %}x",
    # Literals
    r"{{ 'a\n\t\\\'\"\x41\u00e9\101\q' }}", r"""{{ "it's" ~ 'a "b"' }}""", "{{ 'a' 'b' }}", "{{ 1.5 }} {{ 2.0 }} {{ 1e0 }} {{ 2.5E-7 }}", "{{ [1, 'a', none, true] }}",
    "{{ (1,) }}{{ () }}{{ (1, 2) }}", "{{ {'a': 1, 'b': [1.0]} }}", "{{ {'a': 1}.a }}{{ {'a': 1}['a'] }}{{ {1: 2}[1] }}", "{{ none }} {{ None }} {{ True }} {{ false }}",
    "{{ [\"it's\", 'a\"b', 'both\\'\"', 'new\\nline\\x01\\u200b', 'é'] }}", "{{ 1, 2 }}",
    # Arithmetic
    "{{ 7 // 2 }} {{ -7 // 2 }} {{ 7 % 3 }} {{ -7 % 3 }} {{ 7 / 2 }} {{ 6 / 2 }}", "{{ 2 ** 10 }} {{ 2 ** -1 }} {{ -2 ** 2 }} {{ 2 ** 3 ** 2 }}", "{{ 1 + 2 * 3 - 4 }}",
    "{{ 1 ~ 2 + 3 }}", "{{ 'a' * 3 }}{{ [1] * 2 }}", "{{ [1] + [2] }}{{ 'a' + 'b' }}", "{{ 'a' + 1 }}", "{{ 1 + none }}", "{{ 1 / 0 }}", "{{ -5 }} {{ - - 5 }} {{ +5 }}",
    "{{ true + 1 }}", "{{ 10 ** 2 }} {{ 7.5 // 2 }} {{ 7.5 % 2 }} {{ -7.5 % 2 }} {{ 0.1 + 0.2 }}", "{{ 1e3 }} {{ 12e+20 }}",
    # Comparisons and logic
    "{{ 1 < 2 < 3 }} {{ 1 < 3 < 2 }}", "{{ 1 == 1.0 }} {{ true == 1 }} {{ 'a' == 'a' }} {{ [1] == [1] }} {{ {'a': 1} == {'a': 1} }}", "{{ 'a' < 'b' }} {{ [1, 2] < [1, 3] }}",
    "{{ 1 < 'a' }}", "{{ 'b' in 'abc' }} {{ 2 in [1, 2] }} {{ 'a' in {'a': 1} }} {{ 'x' not in 'abc' }}", "{{ x == none }} {{ x != 1 }} {{ none == none }}", "{{ 1 in 'a' }}",
    "{{ '' or 'b' }} {{ 'a' and 'b' }} {{ not 1 }} {{ not not 1 }} {{ 0 or none }}", "{{ 1 if true else 2 }}{{ 1 if false }}{{ 1 if false else 2 if false else 3 }}", "{{ 'x' in y }}",
    "{{ not 1 == 2 }} {{ not x is defined }} {{ 1 is defined and 2 }}", "{{ (1 if true else 2) ~ 'x' }}", "{{ 1 != 2 and 'a' or 'b' }}", "{{ 1 == 1 == true }}",
    # Undefined
    "{{ x }}|{{ x.y is defined }}", "{{ x.y }}", "{{ {'a': 1}.b }}|{{ {'a': 1}['b'] is undefined }}", "{{ x | length }} {{ x | default('d') }}", "{{ x + 'a' }}", "{% for a in x %}1{% else %}2{% endfor %}",
    "{{ x() }}", "{{ x is string }} {{ x is none }} {{ x is iterable }}", "{{ [1][5] is defined }} {{ 'abc'[7] is defined }}", "{{ none.a is defined }}", "{{ x is not none }}", "{{ x ~ 'a' }}",
    # Slices and indices
    "{{ 'héllo'[1:3] }} {{ 'héllo'[::-1] }} {{ 'héllo'[-1] }} {{ 'héllo'[:-1] }}", "{{ [1,2,3,4][1:] }} {{ [1,2,3,4][::-1] }} {{ [1,2,3,4][::2] }} {{ [1,2,3][-2:] }} {{ [1,2,3][5:] }}",
    "{{ [1,2,3][2:0:-1] }} {{ [1,2,3][-9:9] }} {{ 'abc'[5:1] }} {{ [1,2,3][::-2] }} {{ (1,2,3)[1:] }}", "{{ [1,2,3][0] }}{{ [1,2,3][-1] }}{{ [1,2].0 }}", "{{ [1,2,3][::0] }}",
    # Loops
    "{% for a in [1,2,3] %}{{ loop.index }}{{ loop.index0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{{ loop.revindex0 }};{% endfor %}",
    "{% for a in [1,2,3] %}{{ loop.previtem }}<{{ a }}>{{ loop.nextitem }};{% endfor %}", "{% for a in [1,2,3] if a != 2 %}{{ a }}/{{ loop.length }}{% endfor %}", "{% for a in 'añ' %}{{ a }}.{% endfor %}",
    "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }},{% endfor %}", "{% for k in {'a': 1, 'b': 2} %}{{ k }}{% endfor %}", "{% for a in [] %}x{% else %}none{% endfor %}",
    "{% for a in [1,2,3,4] %}{% if a == 2 %}{% continue %}{% endif %}{% if a == 4 %}{% break %}{% endif %}{{ a }}{% endfor %}", "{% for a in range(3) %}{% for b in range(a) %}{{ loop.index }}{% endfor %}{{ loop.index }};{% endfor %}",
    "{{ range(5) | list }} {{ range(1, 4) | list }} {{ range(5, 0, -2) | list }}", "{% for a, b in [(1, 2), [3, 4]] %}{{ a + b }},{% endfor %}", "{% for a, b in [1] %}{% endfor %}", "{% for a in 5 %}{% endfor %}",
    # Variables and scopes
    "{% set a = 1 %}{% for x in [1] %}{% set a = 2 %}{{ a }}{% endfor %}{{ a }}", "{% set a = 1 %}{% if true %}{% set a = 2 %}{% endif %}{{ a }}", "{% set ns = namespace(a=1) %}{% for x in [1, 2] %}{% set ns.a = ns.a + x %}{% endfor %}{{ ns.a }}",
    "{% set a %}x{{ 1 }}{% endset %}[{{ a }}]", "{% set a, b = 1, 2 %}{{ a }}{{ b }}", "{% set ns = namespace() %}{% set ns.x = [] %}{% set ns.x = ns.x + [1] %}{{ ns.x }}{{ ns.y is defined }}", "{% set a.b = 1 %}",
    "{% for i in [1,2] %}{% if x is not defined %}{% set x = i %}{% endif %}{{ x }}{% endfor %}", "{% for i in [1] %}{{ i }}{% endfor %}{{ i is defined }}",
    # Macros
    "{% macro m(a, b=2) %}{{ a }}-{{ b }};{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(b=4, a=5) }}{{ m() }}", "{% macro m(a) %}{{ a }}{% if a > 0 %}{{ m(a - 1) }}{% endif %}{% endmacro %}{{ m(3) }}", "{% macro m() %}x{% endmacro %}{{ m() | upper }}{{ m(1) }}",
    "{% set g = 1 %}{% macro m() %}{{ g }}{% set g = 5 %}{% endmacro %}{% set g = 2 %}{{ m() }}{{ g }}", "{% macro m() -%}\n x\n{%- endmacro %}[{{ m() }}]", "{% macro m(a, b=a) %}{{ b }}{% endmacro %}{{ m(1) }}",
    # Filters
    "[{{ ' x ' | trim }}] [{{ 'xxaxx' | trim('x') }}] [{{ 5 | trim }}]", "{{ 'abc' | length }} {{ [1] | length }} {{ {'a': 1} | count }}", "{{ none | length }}", "{{ [1, 'a', 2.5] | join('-') }} {{ 'abc' | join(',') }} {{ [{'a': 1}] | join(attribute='a') }}",
    "{{ [1,2,3,4] | select('odd') | list }} {{ [0,1,''] | select | list }} {{ [1,2] | reject('eq', 1) | list }}", "{{ [{'r': 'a'}, {'r': 'b'}, {}] | selectattr('r', 'equalto', 'a') | list }} {{ [{'r': 1}, {}] | selectattr('r') | list }}",
    "{{ [{'r': 'a'}, {}] | rejectattr('r') | list }} {{ [{'r': 'a'}, {}] | selectattr('r', 'defined') | list }}", "{{ [{'a': {'b': 1}}] | map(attribute='a.b') | list }} {{ ['a'] | map('upper') | list }} {{ [{}] | map(attribute='x', default=3) | list }}",
    "{{ '' | default('d') }}|{{ '' | default('d', true) }}|{{ none | default('d') }}|{{ none | d('d', boolean=true) }}", "{{ 'aBc dE' | upper }} {{ 'aBc dE' | lower }} {{ 'aBc' | capitalize }} {{ 'ab cd' | title }}", "{{ [1,2] | first }}{{ [1,2] | last }}{{ [] | first }}{{ 'abc' | last }}",
    "{{ 'abc' | list }} {{ {'a': 1} | list }} {{ {'a': 1} | items | list }} {{ x | items | list }}", "{{ 5 | string + 'x' }} {{ '<' | safe }}", "{{ '12' | int }} {{ 'x' | int }} {{ 'x' | int(7) }} {{ '3.9' | int }} {{ 3.9 | int }} {{ -3.9 | int }} {{ '1.5' | float }} {{ 'x' | float }}",
    "{{ 2.5 | round }} {{ 2.567 | round(2) }} {{ 2.1 | round(method='ceil') }} {{ 2.9 | round(0, 'floor') }} {{ 7 | round }}", "{{ 'aXbXc' | replace('X', '-') }} {{ 'aXbXc' | replace('X', '-', 1) }} {{ 'aXbXc'.replace('X', '') }}", "{{ [2,1,2,'a','A'] | unique | list }}",
    "{{ [3,1,2] | sort }} {{ ['b','A','c'] | sort }} {{ ['b','A'] | sort(case_sensitive=true) }} {{ [1,2] | sort(reverse=true) }} {{ [{'a': 2}, {'a': 1}] | sort(attribute='a') }}", "{{ [1,'a'] | sort }}", "{{ -5 | abs }} {{ [1,2] | reverse | list }} {{ 'ab' | reverse }}",
    "{{ [1] | select('even') | list | length > 0 }} {{ 'y' if [] | select else 'n' }}", "{{ 5 | nofilter }}", "{{ 'a' | upper ~ 'b' | upper }}", "{{ -1 | abs }}", "{{ ('a' ~ 'b') | upper }}",
    # JSON
    "{{ {'a': [1, 2.0, none, true, 'é\"\\n\\x7f']} | tojson }}", "{{ {'b': 1, 'a': {}, 'c': [], 'd': [1]} | tojson(indent=2) }}", "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", "{{ 'é😀' | tojson(ensure_ascii=true) }}", "{{ x | tojson }}",
    "{{ 'x' | tojson }}{{ 1 | tojson }}{{ none | tojson }}{{ (1, 2) | tojson }}{{ {1: 2, true: 3, none: 4} | tojson }}", "{{ [1e-7 * 1, 1.0, 100000000000000000000.0, 1234567.5] | tojson }}", "{{ {'a': 1} | tojson(indent=none) }}", "{{ '</a>&\\'' | tojson }}",
    # Methods
    "[{{ ' x '.strip() }}] [{{ 'xax'.strip('x') }}] [{{ ' x '.lstrip() }}] [{{ ' x '.rstrip() }}]", "{{ 'a,b,c'.split(',') }} {{ 'a  b c '.split() }} {{ 'a,b,c'.split(',', 1) }} {{ 'a,b,c'.rsplit(',', 1) }} {{ ''.split(',') }} {{ ''.split() }}", "{{ ' a b c'.split(none, 1) }}",
    "{{ 'abc'.startswith('ab') }} {{ 'abc'.endswith(('x', 'c')) }} {{ 'abc'.startswith('') }}", "{{ {'a': 1}.get('a') }} {{ {'a': 1}.get('b') }} {{ {'a': 1}.get('b', 2) }} {{ {'a': 1}.keys() | list }} {{ {'a': 1}.values() | list }}", "{{ 'aB'.upper() }} {{ 'aB'.lower() }} {{ 'ab cd'.title() }} {{ 'aB'.capitalize() }}",
    "{{ 'a'.nomethod() }}", "{{ 'a'.split('') }}", "{{ [1].append(2) }}", "{{ {'a': 1}.items() | list }}",
    # Tests
    "{{ 'a' is string }} {{ 1 is string }} {{ {} is mapping }} {{ [] is mapping }} {{ [] is iterable }} {{ 1 is iterable }} {{ 'a' is sequence }} {{ {} is sequence }}", "{{ 1 is number }} {{ true is number }} {{ 1.5 is float }} {{ 1 is integer }} {{ true is integer }} {{ true is boolean }}",
    "{{ true is true }} {{ 1 is true }} {{ false is false }} {{ none is none }} {{ x is undefined }}", "{{ 3 is odd }} {{ 4 is even }} {{ 1 is eq 1 }} {{ 1 is equalto(2) }} {{ 1 is ne 2 }} {{ 1 is in [1] }} {{ 1 is not in [1] }}", "{{ 1 is notest }}",
    # Statements
    "{% if 0 %}a{% elif 1 %}b{% else %}c{% endif %}", "{% if %}{% endif %}", "{% if 1 %}", "{% endif %}", "{{ 1 }", "{% nope %}", "{{ (1 }}", "{{ 'abc }}", "{# x", "{{ }}", "{% generation %}x{% endgeneration %}", "{{ raise_exception('no') }}", "{{ strftime_now is defined }}",
    "{{ dict(a=1, b='x') }}", "{{ namespace is defined }}",
]
