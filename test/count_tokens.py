#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the C tokens of toka.c: of the library (chapters 1 to 33) and of the rest (34 to 54), or with --chapters of each chapter.

    python3 test/count_tokens.py [--chapters] [FILE ...]

Comments, white space, line breaks, lengths of names and the division of one text into several string literals do not count. A
preprocessor line counts as its tokens.
"""
import re
import sys

TOKEN = re.compile(r"""
    (?P<skip> /\*.*?\*/ | //[^\n]* | \\\n | \s+ )
  | (?P<string> "(?:\\.|[^"\\\n])*" )
  | '(?:\\.|[^'\\\n])*'
  | [A-Za-z_]\w*
  | \.?\d(?:[eEpP][+-]|[\w.])*
  | \.\.\. | <<= | >>= | -> | \+\+ | -- | << | >> | [<>=!+\-*/%&|^]= | && | \|\| | \#\#
  | \S
""", re.S | re.X)
LIBRARY_ENDS = 33


def count(text):
    """The number of tokens; string literals that only white space separates are one."""
    n, in_string = 0, False
    for match in TOKEN.finditer(text):
        if match["skip"] is None:
            n += not (in_string and match["string"])
            in_string = match["string"] is not None
    return n


def chapters(text):
    """[(title, number of tokens)]; what stands before the first banner belongs to chapter 1."""
    parts = re.split(r"/\* =+\n \* MARK: (\d+\. [^\[]*) \[\w+\]\n.*?\*/", text, flags=re.S)
    counts = [(title, count(body)) for title, body in zip(parts[1::2], parts[2::2])]
    return [(counts[0][0], counts[0][1] + count(parts[0]))] + counts[1:] if counts else [("0. no chapters", count(text))]


def main():
    names = [name for name in sys.argv[1:] if name != "--chapters"] or ["toka.c"]
    for name in names:
        counts = chapters(open(name, encoding="utf-8").read())
        if "--chapters" in sys.argv:
            print("".join(f"{n:8,d}  {title}\n" for title, n in counts), end="")
        library = sum(n for title, n in counts if int(title.split(".")[0]) <= LIBRARY_ENDS)
        total = sum(n for _, n in counts)
        print(f"{name}: {library:,} tokens in chapters 1 to {LIBRARY_ENDS}, {total - library:,} in the others, {total:,} in all")


if __name__ == "__main__":
    main()
