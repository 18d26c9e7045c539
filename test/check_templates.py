"""Checks test/templates.json with Jinja2, configured as in Hugging Face's apply_chat_template.

  python3 test/check_templates.py            checks that Jinja2 gives the same output for each case, and an error if an error is expected
  python3 test/check_templates.py --write    writes Jinja2's outputs into the cases that expect no error

The file is {"context": the variables of all templates, "cases": [...]}. A case is {"template", "output"} or {"template", "error": a
part of toka's message}. "only_here": true marks an error of toka that Jinja2 does not have (a limit, or an unsupported feature).
Needs: pip install jinja2==3.1.6
"""
import datetime
import json
import os
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2025, 7, 4, 12, 34, 56)
PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates.json")


class Generation(jinja2.ext.Extension):
    """{% generation %} marks the text of the assistant; the text is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("text"), [], [], body).set_lineno(line)

    def text(self, caller):
        return caller()


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise jinja2.exceptions.TemplateError(message)


def environment():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = NOW.strftime
    return env


def render(template, context):
    """(output, None) or (None, error)."""
    try:
        return environment().from_string(template).render(**context), None
    except Exception as e:
        return None, f"{type(e).__name__}: {e}"


def main():
    with open(PATH, encoding="utf-8") as f:
        table = json.load(f)
    cases, wrong = table["cases"], 0
    for i, case in enumerate(cases):
        output, error = render(case["template"], table["context"]) if not case.get("only_here") else (None, "")
        if "error" in case:
            bad = error is None
        elif "--write" in sys.argv:
            bad = error is not None
            case["output"] = output
        else:
            bad = output != case.get("output")
        if bad:
            wrong += 1
            print(f"case {i}: {case['template']!r}\n  has {case.get('output', case.get('error'))!r}\n  Jinja2 {output!r} {error}")
    if "--write" in sys.argv and not wrong:
        with open(PATH, "w", encoding="utf-8") as f:
            lines = ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases)
            f.write('{"context": ' + json.dumps(table["context"], ensure_ascii=False) + ',\n"cases": [\n' + lines + "\n]}\n")
    print(f"{len(cases)} cases, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
