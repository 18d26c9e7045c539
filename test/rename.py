#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Renames declarations of the three source files, and all their uses there and in the C and CUDA files of test/; changes nothing else.

    pip install libclang                      also needs clang, for its headers
    python3 test/rename.py NAMES.tsv          applies the rows in order
    python3 test/rename.py --check NAMES.tsv  only reports rows that would fail
    python3 test/rename.py --cuda NAMES.tsv   rows of toka_kernels.cu: does not change C files, which may have the same names

A row is OLD <tab> NEW; text after a second tab is a remark. OLD is one of
    kv_match_prefix     a function, a type, a macro, an enumerator or a variable of file scope
    kv_cache.tail       a field, a method or a constant of a struct or union
    kv_match_prefix:p   the parameters (also of a template) and variables of this name in a function
A name of file scope with an underscore is also changed in comments and documents. Names without an underscore, fields and variables
are changed only in code, because a word in a comment can have several meanings.

clang finds the uses, so the same name may have many declarations. Code that clang does not see (inside an #if that is off) fails to
compile afterwards. Compare the machine code to prove that nothing else changed: `test/same_code.sh BEFORE`.
In a CUDA template clang does not know the struct of a member. There, a member is renamed by its name; if two rows give different new
names, the place is printed and not changed.

test/gpu_mutants.py quotes lines of toka_kernels.cu: the names in its texts are changed as in the quoted lines.
"""
import argparse
import bisect
import collections
import ctypes
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

import clang.cindex as cindex

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UNITS = ["toka.c", "test/unit.c", "test/bench_cpu.c", "test/soak.c", "test/example.c", "test/gpu_ops.c", "test/gpu_model.c",
         "test/gpu_ranks.c", "test/gpu_samp.c", "test/tok_driver.c", "test/fuzz.c",
         "toka_kernels.cu", *sorted(glob.glob("test/gpu_*.cu", root_dir=ROOT))]
MUTANTS = os.path.join(ROOT, "test/gpu_mutants.py")
SOURCES = [os.path.join(ROOT, name) for name in ("toka.h", "toka.c", "toka_kernels.cu")]
KERNELS = SOURCES[-1]
KINDS = cindex.CursorKind
MEMBERS = (KINDS.FIELD_DECL, KINDS.CXX_METHOD)
VARIABLES = (KINDS.PARM_DECL, KINDS.VAR_DECL, KINDS.TEMPLATE_TYPE_PARAMETER, KINDS.TEMPLATE_NON_TYPE_PARAMETER)
FUNCTIONS = (KINDS.FUNCTION_DECL, KINDS.FUNCTION_TEMPLATE, KINDS.CXX_METHOD, KINDS.CONSTRUCTOR)
RECORDS = (KINDS.STRUCT_DECL, KINDS.UNION_DECL, KINDS.CLASS_TEMPLATE, KINDS.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION)

# Declarations of newer toolkits that clang's CUDA headers lack. They give each expression a type.
SHIM = """
#define __CUDACC_VER_MAJOR__ 13
#define __CUDACC_VER_MINOR__ 0
#define __CUDA_ARCH_LIST__ 900
template <class A, class B> static inline __host__ __device__ auto min(A a, B b) { return a < b ? a : b; }
template <class A, class B> static inline __host__ __device__ auto max(A a, B b) { return a > b ? a : b; }
template <class T> static inline __host__ __device__ T __ldcg(const T *p) { return *p; }
template <class T> static inline __host__ __device__ T __ldcs(const T *p) { return *p; }
template <class T> static inline __host__ __device__ T __reduce_add_sync(unsigned, T x) { return x; }
template <class T> static inline __host__ __device__ T __reduce_max_sync(unsigned, T x) { return x; }
"""


def arguments(unit, folder):
    """clang's arguments for a unit. libclang does not contain the compiler's headers, so those of clang are used."""
    found = subprocess.run(["clang", "-print-resource-dir"], capture_output=True, text=True)
    own = ["-w", f"-I{ROOT}", *(["-resource-dir", found.stdout.strip()] if found.returncode == 0 else [])]
    if not unit.endswith(".cu"):
        return [*own, "-std=c11", "-DTOKA_MAIN", "-DTOKA_WITH_CUDA", '-DTOKA_EMBED="test/model"']
    cuda = os.path.dirname(os.path.dirname(os.path.realpath(shutil.which("nvcc"))))
    shim = os.path.join(folder, "shim.h")
    with open(shim, "w") as f:
        f.write(SHIM)
    open(os.path.join(folder, "texture_fetch_functions.h"), "w").close()  # clang's header includes it; new toolkits do not have it
    return [*own, "-x", "cuda", "--cuda-host-only", "-std=c++20", f"--cuda-path={cuda}", f"-I{cuda}/include", f"-I{folder}",
            "-include", shim]


def spelling(location):
    """(file, offset) of a token, also in a macro or in its arguments."""
    file, line, column, offset = ctypes.c_void_p(), ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    f = cindex.c_object_p()
    cindex.conf.lib.clang_getSpellingLocation(location, ctypes.byref(f), ctypes.byref(line), ctypes.byref(column), ctypes.byref(offset))
    return (os.path.realpath(str(cindex.File(f).name)) if f else None), offset.value


def owner(cursor):
    """The name of the struct of a field: its tag or its typedef; for an anonymous struct, the name of the struct around it."""
    parent = cursor.semantic_parent
    while parent and (parent.is_anonymous() or not parent.spelling or "(" in parent.spelling):
        parent = parent.semantic_parent
    return parent.spelling if parent and parent.kind != KINDS.TRANSLATION_UNIT else ""


def plain_name(key):
    return re.split("[.:]", key)[-1]


def is_global(key):
    return not re.search("[.:]", key)


def in_record(cursor):
    """True for a constant of a struct: a static member, or a constant of an enum in it."""
    parent = cursor.semantic_parent
    if parent and parent.kind == KINDS.ENUM_DECL:
        parent = parent.semantic_parent
    return bool(parent) and parent.kind in RECORDS


class Uses:
    """The uses of all names: `at` maps a key, as in a row, to the set of (file, offset) of its uses."""

    def __init__(self, wanted):
        self.at = collections.defaultdict(set)
        self.seen = set()  # (file, offset) of each use that clang resolved
        self.names = {plain_name(key) for key in wanted}
        self.files = set()  # each file is read once, although tests include toka.c
        index = cindex.Index.create()
        with tempfile.TemporaryDirectory() as folder:
            for unit in UNITS:
                files = set()
                for cursor in index.parse(os.path.join(ROOT, unit), args=arguments(unit, folder)).cursor.get_children():
                    file = spelling(cursor.location)[0]
                    if file and file.startswith(ROOT) and file not in self.files:
                        files.add(file)
                        self.walk(cursor, "")
                self.files |= files

    def walk(self, cursor, around):
        """around: the name of the function or struct that contains the cursor."""
        if cursor.kind in FUNCTIONS or cursor.kind in RECORDS and not cursor.is_anonymous():
            around = cursor.spelling
        self.look(cursor, around)
        for child in cursor.get_children():
            self.walk(child, around)

    def look(self, cursor, around):
        target = cursor if cursor.kind.is_declaration() else cursor.referenced
        if not target or target.spelling not in self.names or cursor.kind != KINDS.TYPE_REF and target.spelling != cursor.spelling:
            return
        file, offset = spelling(cursor.location)
        if not file or not file.startswith(ROOT):
            return
        if target.kind in MEMBERS or in_record(target):
            key = f"{owner(target)}.{target.spelling}"
        elif target.kind in VARIABLES:
            key = f"{around}:{target.spelling}"
        else:
            key = target.spelling
        self.seen.add((file, offset))
        self.at[key].add((file, offset))


def read(path):
    with open(path, "rb") as f:
        return f.read()


def code_only(text):
    """The text with spaces in place of string and character literals, at the same offsets; #include and comments stay."""
    blank = lambda m: m[0] if m[0][:2] in (b"/*", b"//") else b" " * len(m[0])
    return re.sub(rb'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', blank, text, flags=re.S)


def without_comments(text):
    return re.sub(rb"/\*.*?\*/|//[^\n]*", lambda m: b" " * len(m[0]), text, flags=re.S)


def files_of_names():
    """The files that mention names of file scope."""
    patterns = [f":(glob)test/*.{ending}" for ending in ("c", "h", "cu", "cuh", "py")]
    out = subprocess.run(["git", "ls-files", "toka.c", "toka.h", "toka_kernels.cu", *patterns, "test/run.sh", "README.md"],
                         capture_output=True, text=True, cwd=ROOT, check=True).stdout.split()
    return [os.path.join(ROOT, name) for name in out]


def rename_global(old, new, texts):
    pattern = re.compile(rb"(?<![\w.])" + old.encode() + rb"(?!\w)")
    fields = re.compile(rb"(?:->|\.)$")
    n = 0
    for path, text in texts.items():
        if path == MUTANTS:
            continue
        seen = text if path.endswith((".py", ".md", ".sh")) else code_only(text)
        out, last = [], 0
        for m in pattern.finditer(seen):
            if fields.search(text[max(0, m.start() - 2):m.start()]):
                continue
            out += [text[last:m.start()], new.encode()]
            last, n = m.end(), n + 1
        texts[path] = b"".join(out) + text[last:]
    return n


def unresolved(rows, uses, texts):
    """Members in CUDA templates, which clang does not resolve: (file, offset, old, new), found only by their names."""
    by_name = collections.defaultdict(set)
    for old, new in rows:
        if "." in old and any(path.endswith(".cu") for path, _ in uses.at[old]):
            by_name[plain_name(old)].add(new)
    for path in uses.files & set(texts):
        if not path.endswith((".cu", ".cuh")):
            continue
        text = texts[path]
        code = re.sub(rb"#include[^\n]*", lambda m: b" " * len(m[0]), without_comments(code_only(text)))
        for m in re.finditer(rb"(?:->|\.|::)\s*(?:template\s+)?([A-Za-z_]\w*)", code):
            name, offset = m[1].decode(), m.start(1)
            if name not in by_name or len(name) == 1 or (path, offset) in uses.seen:  # len 1: vectors have .x, too
                continue
            if len(by_name[name]) == 1:
                yield path, offset, name, next(iter(by_name[name]))
            else:
                print(f"{os.path.relpath(path, ROOT)}:{text[:offset].count(10) + 1}: {name}: one of {sorted(by_name[name])}",
                      file=sys.stderr)


def rename_uses(rows, texts):
    """Renames the uses that clang finds, for all rows at once: offsets are valid only before the first change. Returns the keys that
    were not found."""
    uses = Uses([old for old, _ in rows])
    edits, missing = collections.defaultdict(dict), []
    for old, new in rows:
        name = plain_name(old)
        if not uses.at[old]:
            missing.append(old)
        in_source = any(path in SOURCES for path, _ in uses.at[old])
        for path, offset in uses.at[old]:
            if ":" in old and in_source and path not in SOURCES:  # a test has a function of the same name
                continue
            if path in texts and texts[path][offset:offset + len(name)] == name.encode():
                edits[path][offset] = (len(name), new.encode())
    for path, offset, name, new in unresolved(rows, uses, texts):
        edits[path][offset] = (len(name), new.encode())
    for path, found in edits.items():
        text, out, last = texts[path], [], 0
        for offset, (n, new) in sorted(found.items()):
            out += [text[last:offset], new]
            last = offset + n
        texts[path] = b"".join(out) + text[last:]
    return missing


WORD = re.compile(rb"[A-Za-z_]\w*")


def follow_mutants(before, after, rows, source):
    """The text of gpu_mutants.py for the renamed kernels. Only names differ, so the words of both texts correspond one to one."""
    import gpu_mutants  # in the folder of this file
    old_words, new_words = list(WORD.finditer(before)), list(WORD.finditer(after))
    assert len(old_words) == len(new_words)
    starts = [m.start() for m in old_words]
    renamed = dict(rows)

    def mapped(at, length):
        """The new text in place of `length` bytes at `at` of the old text."""
        first, last = bisect.bisect_left(starts, at), bisect.bisect_left(starts, at + length)
        if first == last:
            return before[at:at + length]
        begin = new_words[first].start() - (old_words[first].start() - at)
        return after[begin:new_words[last - 1].end() + (at + length - old_words[last - 1].end())]

    def names_around(at):
        """The names in the function around a place: {old: new}."""
        begin = before.rfind(b"\n}", 0, at) + 1
        end = before.find(b"\n}", at)
        first, last = bisect.bisect_left(starts, begin), bisect.bisect_left(starts, end)
        return {old_words[i][0]: new_words[i][0] for i in range(first, last)}

    for m in gpu_mutants.MUTANTS:
        old = m.old.replace("`", "").encode()
        at = before.find(old)
        if at < 0:
            print(f"mutant {m.name!r} of {m.kernel}: not in the file", file=sys.stderr)
            continue
        names = {**{k.encode(): v.encode() for k, v in renamed.items()}, **names_around(at)}
        to_old = mapped(at, len(old))
        if "`" in m.old:  # the part between backticks stays between them
            head, part, tail = m.old.split("`")
            to_old = b"`".join(mapped(at + begin, len(piece)) for begin, piece in (
                (0, head), (len(head), part), (len(head) + len(part), tail)))
        to_new = WORD.sub(lambda w: names.get(w[0], w[0]), m.new.encode())
        at = source.find(literal(m.old))
        for text, to in ((m.old, to_old), (m.new, to_new)):
            if text.encode() == to:
                continue
            at = source.find(literal(text), at)
            if at < 0:
                print(f"mutant {m.name!r} of {m.kernel}: its text is not written as one string", file=sys.stderr)
                break
            source = source[:at] + literal(to.decode()) + source[at + len(literal(text)):]
    for old, new in rows:
        source = re.sub(rb'(?<=")' + old.encode() + rb'(?=\W)', new.encode(), source)
    return source


def literal(text):
    return ('"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"').encode()


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--check", action="store_true")
    p.add_argument("--cuda", action="store_true")
    p.add_argument("names", nargs="+")
    a = p.parse_args()
    rows = [line.rstrip("\n").split("\t")[:2] for name in a.names for line in open(name) if line.strip() and not line.startswith("#")]
    rows = [(old.strip(), new.strip()) for old, new in rows]
    texts = {path: read(path) for path in {*files_of_names(), *(os.path.join(ROOT, u) for u in UNITS)}
             if not a.cuda or not path.endswith((".c", ".h"))}
    before = dict(texts)
    by_text = [row for row in rows if is_global(row[0]) and "_" in row[0]]
    bad = rename_uses([row for row in rows if row not in by_text], texts)
    everything = b"\n".join(texts[path] for path in texts if path.endswith((".c", ".h", ".cu")))
    for old, new in by_text:
        if re.search(rb"(?<!\w)" + new.encode() + rb"(?!\w)", code_only(everything)):
            print(f"{old}: {new} is there already", file=sys.stderr)
        if not rename_global(old, new, texts):
            bad.append(old)
    texts[MUTANTS] = follow_mutants(before[KERNELS], texts[KERNELS], [row for row in rows if is_global(row[0])], texts[MUTANTS])
    for key in bad:
        print(f"{key}: not found", file=sys.stderr)
    for path, text in texts.items():
        if text != before[path] and not a.check:
            with open(path, "wb") as f:
                f.write(text)
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
