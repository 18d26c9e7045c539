#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renames declarations of toka.c and toka.h wherever they are used, in the C files of test/ too, and changes nothing else.

    pip install libclang                      and clang, for its headers
    python3 test/rename.py NAMES.tsv          applies the rows, in order
    python3 test/rename.py --check NAMES.tsv  only says what would fail

A row is OLD <tab> NEW; what follows a second tab is a remark. OLD is one of
    kv_match_prefix          a function, a type, a macro, an enumerator or a variable of file scope
    kv_cache.tail     a field of a struct or union
    kv_match_prefix:p        a parameter or a variable of a function, all of that name in it
A name of file scope changes in comments and documents too; fields and variables change in the code alone, since
a word in a comment does not say which of them it means.

clang finds the uses, so a name that means 28 things is no danger. What clang did not see (code behind an #if that is
off) fails to compile afterwards; what compiles is proven by comparing machine code: `test/same_code.sh BEFORE`.
"""
import argparse
import collections
import ctypes
import glob
import os
import re
import subprocess
import sys

import clang.cindex as cindex

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNITS = ["toka.c", "test/unit.c", "test/bench_cpu.c", "test/soak.c", "test/example.c", "test/gpu_ops.c", "test/gpu_model.c",
         "test/gpu_ranks.c", "test/gpu_samp.c", "test/tok_driver.c", *sorted(glob.glob("test/fuzz_*.c", root_dir=ROOT))]
KINDS = cindex.CursorKind
VARIABLES = (KINDS.PARM_DECL, KINDS.VAR_DECL)


def headers():
    """The compiler's own headers, which libclang does not bring along."""
    found = subprocess.run(["clang", "-print-resource-dir"], capture_output=True, text=True)
    return ["-resource-dir", found.stdout.strip()] if found.returncode == 0 else []


def spelling(location):
    """(file, offset) at which a token stands, also inside a macro or its arguments."""
    file, line, column, offset = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    f = cindex.c_object_p()
    cindex.conf.lib.clang_getSpellingLocation(location, ctypes.byref(f), ctypes.byref(line), ctypes.byref(column), ctypes.byref(offset))
    return (os.path.realpath(str(cindex.File(f).name)) if f else None), offset.value


def owner(cursor):
    """The name of the struct of a field: its tag, its typedef, or that of the struct around an anonymous one."""
    parent = cursor.semantic_parent
    while parent and (parent.is_anonymous() or not parent.spelling or "(" in parent.spelling):
        parent = parent.semantic_parent
    return parent.spelling if parent else ""


def function(cursor):
    parent = cursor.semantic_parent
    while parent and parent.kind != KINDS.FUNCTION_DECL:
        parent = parent.semantic_parent
    return parent.spelling if parent else ""


class Uses:
    """Where each field and each local variable stands: by its key as in a row, (file, offset) of every use."""

    def __init__(self, wanted):
        self.at = collections.defaultdict(set)
        self.names = {key.replace(":", ".").split(".")[1] for key in wanted}
        index = cindex.Index.create()
        for unit in UNITS:
            args = ["-std=c11", "-w", "-DTOKA_MAIN", "-DTOKA_WITH_CUDA", '-DTOKA_EMBED="test/model"', f"-I{ROOT}", *headers()]
            for cursor in index.parse(os.path.join(ROOT, unit), args=args).cursor.walk_preorder():
                self.look(cursor)

    def look(self, cursor):
        if cursor.spelling not in self.names:
            return
        target = cursor if cursor.kind in (KINDS.FIELD_DECL, *VARIABLES) else cursor.referenced
        if not target or target.spelling != cursor.spelling:
            return
        if target.kind == KINDS.FIELD_DECL:
            key = f"{owner(target)}.{target.spelling}"
        elif target.kind in VARIABLES and function(target):
            key = f"{function(target)}:{target.spelling}"
        else:
            return
        file, offset = spelling(cursor.location)
        if file and file.startswith(ROOT):
            self.at[key].add((file, offset))


def read(path):
    with open(path, "rb") as f:
        return f.read()


def code_only(text):
    """The text with its string and character literals blanked, at the same offsets; #include and comments stay."""
    blank = lambda m: m[0] if m[0][:2] in (b"/*", b"//") else b" " * len(m[0])
    return re.sub(rb'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def files_of_names():
    """Files in which names of file scope are spoken of."""
    out = subprocess.run(["git", "ls-files", "toka.c", "toka.h", "toka_kernels.cu", "test/*.c", "test/*.h", "test/*.cu", "test/*.cuh", "test/*.py",
                          "test/run.sh", "README.md"], capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    return [os.path.join(ROOT, name) for name in out]


def rename_global(old, new, texts):
    pattern = re.compile(rb"(?<![\w.])" + old.encode() + rb"(?!\w)")
    fields = re.compile(rb"(?:->|\.)$")
    n = 0
    for path, text in texts.items():
        seen = text if path.endswith((".py", ".md", ".sh")) else code_only(text)
        out, last = [], 0
        for m in pattern.finditer(seen):
            if fields.search(text[max(0, m.start() - 2):m.start()]):
                continue
            out += [text[last:m.start()], new.encode()]
            last, n = m.end(), n + 1
        texts[path] = b"".join(out) + text[last:]
    return n


def rename_uses(rows, texts):
    """Fields and variables, all rows at once, since offsets hold only before the first change. Returns the keys not found."""
    uses = Uses([old for old, _ in rows])
    edits, missing = collections.defaultdict(dict), []
    for old, new in rows:
        name = old.replace(":", ".").split(".")[1]
        if not uses.at[old]:
            missing.append(old)
        for path, offset in uses.at[old]:
            if texts[path][offset:offset + len(name)] == name.encode():
                edits[path][offset] = (len(name), new.encode())
    for path, found in edits.items():
        text, out, last = texts[path], [], 0
        for offset, (n, new) in sorted(found.items()):
            out += [text[last:offset], new]
            last = offset + n
        texts[path] = b"".join(out) + text[last:]
    return missing


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true")
    p.add_argument("names", nargs="+")
    a = p.parse_args()
    rows = [line.rstrip("\n").split("\t")[:2] for name in a.names for line in open(name) if line.strip() and not line.startswith("#")]
    rows = [(old.strip(), new.strip()) for old, new in rows]
    texts = {path: read(path) for path in {*files_of_names(), *(os.path.join(ROOT, u) for u in UNITS)}}
    before = dict(texts)
    bad = rename_uses([(old, new) for old, new in rows if "." in old or ":" in old], texts)
    everything = b"\n".join(texts.values())
    for old, new in rows:
        if "." in old or ":" in old:
            continue
        if re.search(rb"(?<!\w)" + new.encode() + rb"(?!\w)", code_only(texts[os.path.join(ROOT, "toka.c")])):
            print(f"{old}: {new} is there already", file=sys.stderr)
        if not rename_global(old, new, texts):
            bad.append(old)
    for key in bad:
        print(f"{key}: not found", file=sys.stderr)
    for path, text in texts.items():
        if text != before[path] and not a.check:
            with open(path, "wb") as f:
                f.write(text)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
