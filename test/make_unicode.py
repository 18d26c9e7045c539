#!/usr/bin/env python3
"""Writes the table text of chapter 5 (Unicode) of toka.c.

    python3 test/make_unicode.py UnicodeData.txt [toka.c]

reads UnicodeData.txt of Unicode 17.0 and prints five C strings. With toka.c as the second argument, it replaces the text between the
two marker comments in this file. The tables must give the results of Hugging Face `tokenizers`, whose parts use different versions of
Unicode:

* Categories are those of Unicode 16.0, as in the Oniguruma library that runs the patterns. This script removes the 4,803 characters
  that 17.0 added, and takes back the one category of a letter that 17.0 changed (U+0295 was Ll and became Lo).
* Normal form C is that of Unicode 9.0. The tables mark later combining classes and decompositions, so toka.c can compute the old
  and the present form C.
* Letter case is that of Unicode 16.0. Python's str methods give mappings to more than one character (no such mapping was added since
  Unicode 5.0).

Encoding: a number has leading digits of base 28 ('@' to '[') and one final digit of base 34 (']' to '~'), so the text needs no
escapes. Signed numbers are zigzag coded.
"""
import sys

NEW_IN_17 = [
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x20C1, 0x20C1), (0x2B96, 0x2B96),
    (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4), (0xA7F1, 0xA7F1), (0xFBC3, 0xFBD2), (0xFD90, 0xFD91),
    (0xFDC8, 0xFDCE), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x10ED0, 0x10ED8), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67),
    (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9), (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF),
    (0x18D09, 0x18D1E), (0x18D80, 0x18DF2), (0x1CCFA, 0x1CCFC), (0x1CEBA, 0x1CED0), (0x1CEE0, 0x1CEF0), (0x1E6C0, 0x1E6DE),
    (0x1E6E0, 0x1E6F5), (0x1E6FE, 0x1E6FF), (0x1F6D8, 0x1F6D8), (0x1F777, 0x1F77A), (0x1F8D0, 0x1F8D8), (0x1FA54, 0x1FA57),
    (0x1FA8A, 0x1FA8A), (0x1FA8E, 0x1FA8E), (0x1FAC8, 0x1FAC8), (0x1FACD, 0x1FACD), (0x1FAEA, 0x1FAEA), (0x1FAEF, 0x1FAEF),
    (0x1FBFA, 0x1FBFA), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479)]

# Characters added in 10.0 to 16.0 that have a combining class or a canonical decomposition.
AFTER_9 = [
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ACE), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x105C9, 0x105C9), (0x105E4, 0x105E4),
    (0x10D24, 0x10D27), (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50), (0x10F82, 0x10F85),
    (0x11070, 0x11070), (0x1133B, 0x1133B), (0x11383, 0x113D0), (0x1145E, 0x1145E), (0x11839, 0x1183A), (0x11938, 0x11943),
    (0x119E0, 0x119E0), (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45),
    (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x16121, 0x1612F), (0x16D68, 0x16D6A), (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F),
    (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE), (0x1E2EC, 0x1E2EF), (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF)]

# CompositionExclusions.txt, sections 1 and 2: characters that decompose but are never composed.
EXCLUDED = set(range(0x958, 0x960)) | {
    0x9DC, 0x9DD, 0x9DF, 0xA33, 0xA36, 0xA59, 0xA5A, 0xA5B, 0xA5E, 0xB5C, 0xB5D, 0xF43, 0xF4D, 0xF52, 0xF57, 0xF5C, 0xF69,
    0xF76, 0xF78, 0xF93, 0xF9D, 0xFA2, 0xFA7, 0xFAC, 0xFB9, 0x2ADC, 0xFB1D, 0xFB1F}
EXCLUDED |= set(range(0xFB2A, 0xFB4F)) | set(range(0x1D15E, 0x1D165)) | set(range(0x1D1BB, 0x1D1C1))

# PropList.txt, Other_Lowercase and Other_Uppercase.
OTHER_LOWER = [
    (0xAA, 0xAA), (0xBA, 0xBA), (0x2B0, 0x2B8), (0x2C0, 0x2C1), (0x2E0, 0x2E4), (0x345, 0x345),
    (0x37A, 0x37A), (0x10FC, 0x10FC), (0x1D2C, 0x1D6A), (0x1D78, 0x1D78), (0x1D9B, 0x1DBF),
    (0x2071, 0x2071), (0x207F, 0x207F), (0x2090, 0x209C), (0x2170, 0x217F), (0x24D0, 0x24E9),
    (0x2C7C, 0x2C7D), (0xA69C, 0xA69D), (0xA770, 0xA770), (0xA7F2, 0xA7F4), (0xA7F8, 0xA7F9),
    (0xAB5C, 0xAB5F), (0xAB69, 0xAB69), (0x10780, 0x10780), (0x10783, 0x10785), (0x10787, 0x107B0),
    (0x107B2, 0x107BA), (0x1E030, 0x1E06D)]
OTHER_UPPER = [
    (0x2160, 0x216F), (0x24B6, 0x24CF), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189)]

# WordBreakProperty.txt: MidLetter, MidNumLet and Single_Quote. The rule of the final sigma ignores them.
MID_WORD = {
    0x27, 0x2E, 0x3A, 0xB7, 0x387, 0x55F, 0x5F4, 0x2018, 0x2019, 0x2024, 0x2027, 0xFE13, 0xFE52,
    0xFE55, 0xFF07, 0xFF0E, 0xFF1A}

CATEGORIES = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl No Pc Pd Ps Pe Pi Pf Po Sm Sc Sk So Zs Zl Zp Cc Cf Cs Co Cn".split()
SPACE_CONTROL, LINE_END = 30, 31  # two extra classes: \t \v \f U+0085, and \r \n


def number(v):
    out = chr(93 + v % 34)
    v //= 34
    while v:
        out = chr(64 + v % 28) + out
        v //= 28
    return out


def zigzag(v):
    return number(v * 2 if v >= 0 else -v * 2 - 1)


def within(c, ranges):
    return any(a <= c <= b for a, b in ranges)


def read(path):
    data, first = {}, None
    for line in open(path, encoding="ascii"):
        f = line.rstrip("\n").split(";")
        c = int(f[0], 16)
        for x in range(first if f[1].endswith(", Last>") else c, c + 1):
            data[x] = (f[2] if x != 0x295 else "Ll", int(f[3]), f[5], f[12:15])
        first = c
    return {c: v for c, v in data.items() if not within(c, NEW_IN_17)}


def classes(data):
    def one(c):
        if c in (0xA, 0xD):
            return LINE_END
        if c in (0x9, 0xB, 0xC, 0x85):
            return SPACE_CONTROL
        return CATEGORIES.index(data.get(c, ("Cn",))[0])

    out, start = "", 0
    for c in range(1, 0x110001):
        if c == 0x110000 or one(c) != one(start):
            out += number((c - 1 - start) * 32 + one(start))
            start = c
    return out


def combining(data):
    out, end = "", 0
    marks = [(c, data[c][1], within(c, AFTER_9)) for c in sorted(data) if data[c][1]]
    while marks:
        c, k, after_9 = marks[0]
        n = 1
        while n < len(marks) and marks[n] == (c + n, k, after_9):
            n += 1
        out += number(c - end) + number(n - 1) + number(k * 2 + after_9)
        end, marks = c + n, marks[n:]
    return out


def decompositions(data):
    out, prev, a0, b0 = "", 0, 0, 0
    for c in sorted(data):
        d = data[c][2]
        if not d or d[0] == "<":
            continue
        d = [int(x, 16) for x in d.split()]
        nonstarter = data[c][1] or data[d[0]][1]
        kind = 2 if len(d) == 1 else 1 if c in EXCLUDED or nonstarter else 0
        out += number((c - prev) * 6 + kind * 2 + within(c, AFTER_9)) + zigzag(d[0] - a0)
        prev, a0 = c, d[0]
        if len(d) == 2:
            out += zigzag(d[1] - b0)
            b0 = d[1]
    return out


UPPER, LOWER, TITLE = range(3)  # the order of UnicodeData.txt and of enum uni_case
KINDS = ["lower", "upper", "title", "ignored", "lower ignored", "pairs", "lower untitled"]


def simple(data, c, to):
    """The mapping of a character to one character."""
    x = int(data[c][3][to] or "%X" % c, 16)
    return x if x in data else c


def case_kind(data, c):
    lower = data[c][0] == "Ll" or within(c, OTHER_LOWER)
    upper = data[c][0] == "Lu" or within(c, OTHER_UPPER)
    ignored = data[c][0] in "Mn Me Cf Lm Sk".split() or c in MID_WORD
    untitled = lower and simple(data, c, UPPER) != c == simple(data, c, TITLE)
    names = ["lower"] * lower + ["upper"] * upper + ["title"] * (data[c][0] == "Lt")
    return " ".join(names + ["ignored"] * ignored + ["untitled"] * untitled)


def case_runs(data):
    """Rows (first, n, kind, difference to the other case). Kind "pairs": an upper-case letter, its lower-case letter, and so on."""
    rows = {}
    for c in data:
        kind = case_kind(data, c)
        if kind:
            rows[c] = kind, simple(data, c, UPPER if kind.startswith("lower") else LOWER) - c
    c, runs = 0, []
    while c < 0x110000:
        n = 0
        while rows.get(c + n) == ("upper", 1) and rows.get(c + n + 1) == ("lower", -1):
            n += 2
        kind = ("pairs", 0) if n else rows.get(c)
        while not n or (kind and kind[0] != "pairs" and rows.get(c + n) == kind):
            n += 1
        if kind:
            runs.append((c, n, *kind))
        c += n
    return runs


def cases(data):
    out, end = "", 0
    for c, n, kind, delta in case_runs(data):
        out += number((c - end) * len(KINDS) + KINDS.index(kind)) + number(n - 1)
        out += "" if kind in ("ignored", "pairs") else zigzag(delta)
        end = c + n
    return out


def case_rule(data, c, to):
    """The mapping of c by the rules of toka.c, without its table of exceptions."""
    kind = case_kind(data, c)
    if to == LOWER:
        return chr(simple(data, c, LOWER) if "upper" in kind or kind == "title" else c)
    stays = "lower" not in kind or (to == TITLE and "untitled" in kind)
    return chr(c if stays else simple(data, c, UPPER))


def case_of(data, c, to):
    """The right mapping of c: Python's if it has more than one character, else that of UnicodeData.txt."""
    python = (str.upper, str.lower, str.title)[to](chr(c))
    return python if len(python) > 1 else chr(simple(data, c, to))


def exceptions(data):
    out, prev = "", 0
    for c in sorted(data):
        for to in range(3):
            chars = case_of(data, c, to)
            if chars != case_rule(data, c, to):
                out += number((c * 4 + to - prev) * 3 + len(chars) - 1)
                out += "".join(zigzag(ord(x) - c) for x in chars)
                prev = c * 4 + to
    return out


def c_string(name, what, text):
    lines = [text[i:i + 117] for i in range(0, len(text), 117)]
    body = "\n".join('    "%s"' % x for x in lines)
    return "/* %s */\nstatic const char %s[] =\n%s;\n" % (what, name, body)


def main():
    data = read(sys.argv[1])
    text = c_string("uni_class_text", "(run length - 1) * 32 + class", classes(data))
    text += c_string("uni_mark_text", "gap, run length - 1, combining class * 2 + after_9", combining(data))
    what = "gap * 6 + kind * 2 + after_9, first, second (not for kind 2, one alone)"
    text += c_string("uni_pair_text", what, decompositions(data))
    what = "gap * 7 + kind, run length - 1, difference to the other case (not for kinds 3 and 5)"
    text += c_string("uni_case_text", what, cases(data))
    what = "(gap of code point * 4 + uni_case) * 3 + n - 1, n differences"
    text += c_string("uni_exception_text", what, exceptions(data))
    if len(sys.argv) < 3:
        print(text, end="")
        return
    begin, end = "/* begin of test/make_unicode.py's text */\n", "/* end of test/make_unicode.py's text */\n"
    source = open(sys.argv[2], encoding="utf-8").read()
    head, rest = source.split(begin)
    tail = rest.split(end)[1]
    open(sys.argv[2], "w", encoding="utf-8").write(head + begin + text + end + tail)


main()
