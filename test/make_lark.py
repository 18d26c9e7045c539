#!/usr/bin/env python3
"""Writes test/lark.json: grammars in Lark, texts, and whether llguidance accepts each, which test_constraint.py compares with toka.
  VENV/bin/python test/make_lark.py          VENV has llguidance (pip install llguidance; recorded with 1.9.1)
Texts are examples of the grammars below, mutated, and random texts for random grammars. A recorded number is -1 (accepted), the byte at
which a text is refused, or its length if it ends too early. Random grammars leave out what the two decide differently on purpose: a
terminal that matches nothing, and ignored text that is as long as a terminal at the same place (there llguidance only ignores it)."""
import json
import os
import random

CORPUS = [  # a grammar, texts that it accepts
    ('''?start: sum
?sum: product | sum "+" product -> add | sum "-" product -> sub
?product: atom | product "*" atom -> mul | product "/" atom -> div
?atom: NUMBER -> number | "-" atom -> neg | NAME -> var | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
''', ["1+2*3", "(a - -b) * 2.5e3", "x_1/ (y+1)", "-(-(3))"]),
    ('''start: value
value: object | array | STRING | SIGNED_NUMBER | "true" | "false" | "null"
array: "[" [value ("," value)*] "]"
object: "{" [pair ("," pair)*] "}"
pair: STRING ":" value
STRING: /"([^"\\\\\\x00-\\x1f]|\\\\["\\\\bfnrt\\/]|\\\\u[0-9a-fA-F]{4})*"/
%import common.SIGNED_NUMBER
%import common.WS
%ignore WS
''', ['{"a": [1, -2.5, {"b": null}], "c": "\\n\\u00e9"}', "[]", '[true,false , "x y" ]', '{"":{}}']),
    ('''start: select ";"?
select: "SELECT"i columns "FROM"i NAME where? order?
columns: "*" | column ("," column)*
column: NAME | FUNCTION "(" NAME ")"
FUNCTION: "COUNT" | "SUM" | "AVG"
where: "WHERE"i condition (("AND"i | "OR"i) condition)*
condition: NAME OP (NAME | INT | QUOTED)
order: "ORDER"i "BY"i NAME ("ASC"i | "DESC"i)?
OP: "=" | "<" | ">" | "<=" | ">=" | "!="
QUOTED: /'[^']*'/
NAME: /[a-z_][a-z0-9_]*/
%import common.INT
%ignore / +/
''', ["SELECT * FROM t", "select a, b from t where a >= 10 and b = 'x y' order by a desc;", "SELECT COUNT(x) FROM t WHERE a<b"]),
    ('''// lines of key = value, sections and comments
start: (section | pair | COMMENT? NL)*
section: "[" NAME "]" NL
pair: NAME "=" VALUE? NL
NAME: LETTER (LETTER | DIGIT | "_" | "-")*
VALUE: /[^ \\n#=\\[\\]][^\\n#]*/
COMMENT: "#" /[^\\n]*/
NL: "\\n"
%import common (LETTER, DIGIT)
%ignore " "
''', ["[a-b]\nk = v w\n\n# c\nx=\n", "k=v\n", ""]),
    ('''start: call
call: NAME "(" [args] ")"
args: arg ("," arg)*
arg: [NAME "="] (value | call)
value: ESCAPED_STRING | SIGNED_INT | "True" | "False" | "None" | list
list: "[" [value ("," value)* ","?] "]"
%import common.CNAME -> NAME
%import common (ESCAPED_STRING, SIGNED_INT)
%ignore /[ \\t]+/
''', ['f(x=1, "a\\"b", g())', "print([1, 2, ], None)", "a()"]),
    ('''start: sexp+
sexp: ATOM | "(" sexp* ")" | "'" sexp
ATOM: /[a-zA-Z0-9+*\\/<>=!?-]+/
%ignore /;[^\\n]*\\n/
%ignore /\\s+/
''', ["(define (f x) (+ x 1))", "'(a b) c", "(a ; text )\n b)"]),
    ('''start: YEAR "-" MONTH "-" DAY [("T" | " ") TIME ZONE?]
YEAR: DIGIT~4
MONTH: "0" "1".."9" | "1" "0".."2"
DAY: "0" "1".."9" | ("1" | "2") DIGIT | "3" "0".."1"
TIME: HOUR ":" SIXTY ":" SIXTY
HOUR: ("0" | "1") DIGIT | "2" "0".."3"
SIXTY: "0".."5" DIGIT
ZONE: "Z" | ("+" | "-") HOUR ":" SIXTY
DIGIT: "0".."9"
''', ["2026-11-26", "1999-02-31T23:59:00Z", "2000-10-10 00:00:59+05:30"]),
    ('''start: stmt+
stmt: "if" cond block ["else" block] -> branch
    | "while" cond block
    | NAME ":=" expr ";"
block: "{" stmt* "}"
cond: expr ("==" | "<") expr
expr: expr "+" term | term
term: term "*" factor | factor
factor: NAME | INT | "(" expr ")"
NAME: /[a-z]+/
INT: /[0-9]+/
%ignore /[ \\n]+/
%ignore "//" /[^\\n]*/
''', ["x := 1;", "if a < 2 { b := a+1*c; } else { }", "while x == y {\n // text\n z := (z+1); }"]),
    ('''start: row (NL row)* NL?
row: field ("," field)*
field: QUOTED | PLAIN | ""
QUOTED: "\\"" (/[^"]/ | "\\"\\"")* "\\""
PLAIN: /[^",\\r\\n]+/
NL: /\\r?\\n/
''', ["a,b\n1,\"x, \"\"y\"\"\"\r\n", ",,\n", "a"]),
    ('''start: scheme "://" host [":" PORT] path?
scheme: "http" "s"?
host: LABEL ("." LABEL)*
LABEL: /[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?/
PORT: /[1-9][0-9]{0,4}/
path: ("/" SEGMENT?)+
SEGMENT: /[A-Za-z0-9._~-]+/
''', ["http://a.b-c.com", "https://x:8080/a/b.html/", "http://localhost/"]),
    ('''start: a
a: b "x" | "k"
b: c "y" | a
c: a "z" | "m" b?
''', ["k", "kx", "kzyx", "mkyx", "kxzyxx", "myx"]),
    ('''start: list
list: item | list item
item: "a" | "b" list "e"
%ignore /_+/
''', ["a", "aab_a_ee", "bae", "b_b_a_ea__e"]),
    ('''start: e
e: e "+" e | e "*" e | "-" e | e "!" | "(" e ")" | /[0-9]/
''', ["1+2*3!", "-(1!!)", "--1+2"]),
    ('''start: WORD_A WORD_B? "." | KEY "."
WORD_A: /[a-z]+/
WORD_B: /[0-9]+/
KEY: "key"
%ignore " "
''', ["key.", "abc 12.", "a1 .", "keys 1 ."]),
    ('''start: TEXT
TEXT: (UPPER LOWER* " "?)~2..3 ("!" | "?")
UPPER: /[A-ZÄÖÜ]/
LOWER: "a".."z" | "ä" | "é".."í"
''', ["Ab C!", "Äë Bä C?", "A B C!"]),
]


def atom(rnd, depth, is_terminal, names):
    kind = rnd.randrange(9)
    if kind < 3 or depth > 2:
        return '"' + rnd.choice(["a", "b", "a", "b", "ab", "ba", "aa", "acb", "bc a", "d"]) + '"'
    if kind == 3:
        return rnd.choice(["/[ab]+/", "/a+b?/", "/b/", "/[abd]/", "/a[c ]*b/", '"a".."b"', "/(ab)+|a/", '"A"i', "/a{2,3}/"])
    if kind < 6:
        return "([" [kind - 4] + choices(rnd, depth + 1, is_terminal, names) + ")]"[kind - 4]
    return rnd.choice(names)


def choices(rnd, depth, is_terminal, names):
    return " | ".join(" ".join(atom(rnd, depth, is_terminal, names) + rnd.choices(["", "?", "*", "+", "~2", "~1..2", "{2}"], [68, 10, 6, 8, 3, 3, 2])[0]
                               for _ in range(rnd.choice([1, 1, 2, 2, 3]))) for _ in range(rnd.choice([1, 1, 2, 3])))


def random_grammar(rnd):
    terminals, rules, lines = ["A", "B", "C_1"][: rnd.randint(1, 3)], ["start", "x", "y_z"][: rnd.randint(1, 3)], []
    for i, name in enumerate(terminals):
        first = rnd.choice(['"a"', '"b"', '"ac"'])
        lines.append(f"{name}: {first} ({choices(rnd, 1, True, terminals[i + 1:] or [first])})")
    for name in rules:
        sign = rnd.choice(["", "?", "!"]) if name != "start" else ""
        lines.append(f"{sign}{name}: {choices(rnd, 0, False, terminals + rules + [chr(34) + 'b' + chr(34)])}")
    if rnd.random() < 0.5:
        lines.append("%ignore " + rnd.choice(['" "', "/ +/", '"c"', "/ +|c/", "/c[a ]/", '"c" | " "']))
    rnd.shuffle(lines)
    return "\n".join(lines)


def mutate(rnd, text, alphabet):
    text = list(text)
    for _ in range(rnd.randint(1, 3)):
        at = rnd.randint(0, len(text))
        text[at:at + rnd.randint(0, 2)] = rnd.choices(alphabet, k=rnd.randint(0, 2))
    return "".join(text)


def judge():
    """Returns a function that reads texts by a grammar; None: it refuses the grammar."""
    import llguidance
    tokenizer = llguidance.LLTokenizer("byte")

    def read(grammar, text):
        matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_lark(grammar))
        if matcher.is_error():
            return None
        for i, byte in enumerate(text.encode()):
            if not matcher.try_consume_tokens([byte]):
                return i
        return -1 if matcher.is_accepting() else len(text.encode())
    return read


def cases(seed=1, n_random=150):
    rnd = random.Random(seed)
    for grammar, texts in CORPUS:
        yield grammar, texts + [mutate(rnd, rnd.choice(texts), "".join(texts) + " x1") for _ in range(25)]
    for _ in range(n_random):
        yield random_grammar(rnd), ["".join(rnd.choice("aab bAcd"[: rnd.choice([3, 5, 7, 8])]) for _ in range(rnd.randrange(9))) for _ in range(12)]


def main():
    read = judge()
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "lark.json"), "w", encoding="utf-8") as f:
        lines = []
        for grammar, texts in cases():
            texts = sorted(set(texts))
            got = [read(grammar, t) for t in texts]
            if None not in got:
                lines.append(json.dumps({"grammar": grammar, "texts": texts, "accepted": got}, ensure_ascii=False))
        f.write("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
