#!/bin/bash
# test/same_code.sh REV: is the machine code of this tree that of REV? For commits that change only names, comments or line breaks.
#   test/same_code.sh HEAD~1             toka.c, as a library and as the program
#   test/same_code.sh HEAD~1 cu          toka_kernels.cu too: each kernel's code of sm_90a (minutes)
#   OPT=-O0 test/same_code.sh HEAD~1     a look between two edits: seconds instead of a minute
# Asserts are left out (-DNDEBUG): they hold line numbers. Exit status 0: bit-equal.
set -u
cd "$(dirname "$0")/.." || exit
OPT=${OPT:--O2}
rev=$(git rev-parse --verify "$1^{commit}") || exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/before" test/.build
git archive "$rev" toka.c toka.h toka_kernels.cu test/model | tar -x -C "$tmp/before"

code() { # TREE OUT FLAGS...: what the object file holds of code and constants, and where its relocations are
    local tree=$1 out=$2 section
    shift 2
    (cd "$tree" && ${CC:-cc} -std=c11 "$OPT" -w -DNDEBUG "$@" -c toka.c -o "$tmp/o") || return
    for section in $(readelf -SW "$tmp/o" | grep -oE ' \.(text|rodata|data)[.a-z0-9]*' | sort -u); do
        objcopy -O binary -j "$section" "$tmp/o" "$tmp/section" && echo "$section $(sha256sum <"$tmp/section")"
    done >"$out"
    readelf -rW "$tmp/o" | awk '/^[0-9a-f]/ {print $1, $3, $4}' | sha256sum >>"$out"
}
kernels() { # TREE OUT: a hash for each kernel's machine code, in an order that does not depend on names; then the host's code
    local cubin=$tmp/toka_kernels.cubin
    (cd "$1" && nvcc -std=c++20 -O3 -w -DNDEBUG -Xcompiler -fno-exceptions,-O1 -gencode arch=compute_90a,code=sm_90a -keep -keep-dir "$tmp" \
        -c toka_kernels.cu -o "$tmp/host.o") || return
    readelf -SW "$cubin" 2>/dev/null | sed -n 's/^.* \.text\.[^ ]* *PROGBITS *[0-9a-f]* \([0-9a-f]*\) \([0-9a-f]*\) .*/\1 \2/p' | while read -r at n; do
        tail -c +$((0x$at + 1)) "$cubin" | head -c $((0x$n)) | sha256sum
    done | sort >"$2"
    objcopy -O binary -j .text "$tmp/host.o" "$tmp/section" && echo "host $(sha256sum <"$tmp/section")" >>"$2"
}
status=0
same() { # NAME HOW FLAGS...: of this tree, and of REV, whose result is kept
    local name=$1 how=$2 kept
    shift 2
    kept=test/.build/code-$rev$OPT-$(echo "$name" | tr -dc a-z)
    [ -s "$kept" ] || "$how" "$tmp/before" "$kept" "$@"
    if "$how" . "$tmp/now" "$@" && cmp -s "$kept" "$tmp/now" && [ -s "$kept" ]; then echo "$name: the same"; else
        echo "$name: DIFFERENT"
        diff "$kept" "$tmp/now"
        status=1
    fi
}
same "toka.c, library" code
same "toka.c, program" code -DTOKA_MAIN -DTOKA_WITH_CUDA '-DTOKA_EMBED="test/model"'
[ "${2:-}" != cu ] || same "toka_kernels.cu, sm_90a" kernels
exit $status
