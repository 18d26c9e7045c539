#!/bin/bash
# test/same_code.sh REV: is the machine code of this tree that of REV? For commits that change only names, comments or line breaks.
#   test/same_code.sh HEAD~1        toka.c, as a library and as the program
#   test/same_code.sh HEAD~1 cu     toka_kernels.cu too: SASS of sm_90a, without names (minutes)
# Asserts are left out (-DNDEBUG): they hold line numbers. Exit status 0: bit-equal.
set -u
cd "$(dirname "$0")/.." || exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"; git worktree prune' EXIT
git worktree add -q --detach "$tmp/before" "$1" || exit
code() { # TREE OUT FLAGS...: what the object file holds of code and constants, and where its relocations are
    local tree=$1 out=$2
    shift 2
    (cd "$tree" && ${CC:-cc} -std=c11 -O2 -w -DNDEBUG "$@" -c toka.c -o "$tmp/o") || return
    for section in $(readelf -SW "$tmp/o" | grep -oE ' \.(text|rodata|data)[.a-z0-9]*' | sort -u); do
        objcopy -O binary -j "$section" "$tmp/o" "$tmp/section" && echo "$section $(sha256sum <"$tmp/section")"
    done >"$out"
    readelf -rW "$tmp/o" | awk '/^[0-9a-f]/ {print $1, $3, $4}' | sha256sum >>"$out"
}
sass() { # TREE OUT
    (cd "$1" && nvcc -std=c++20 -O3 -DNDEBUG -Xcompiler -fno-exceptions -gencode arch=compute_90a,code=sm_90a -cubin -o "$tmp/cubin" toka_kernels.cu) || return
    cuobjdump -sass "$tmp/cubin" | grep -E '^\s+/\*[0-9a-f]{4}\*/|^\s+/\* 0x' | sha256sum >"$2"
}
status=0
same() { # NAME
    if cmp -s "$tmp/a" "$tmp/b" && [ -s "$tmp/a" ]; then echo "$1: the same"; else echo "$1: DIFFERENT"; diff "$tmp/a" "$tmp/b"; status=1; fi
}
code "$tmp/before" "$tmp/a" && code . "$tmp/b"
same "toka.c, library"
code "$tmp/before" "$tmp/a" -DTOKA_MAIN -DTOKA_WITH_CUDA '-DTOKA_EMBED="test/model"' && code . "$tmp/b" -DTOKA_MAIN -DTOKA_WITH_CUDA '-DTOKA_EMBED="test/model"'
same "toka.c, program"
if [ "${2:-}" = cu ]; then
    sass "$tmp/before" "$tmp/a" && sass . "$tmp/b"
    same "toka_kernels.cu, sm_90a"
fi
git worktree remove --force "$tmp/before"
exit $status
