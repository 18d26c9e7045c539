#!/bin/bash
# test/same_code.sh REV: compares the machine code of this tree with that of commit REV. For commits that change only names,
# comments or line breaks.
#   test/same_code.sh HEAD~1             toka.c, as a library and as the program
#   test/same_code.sh HEAD~1 cu          also toka_kernels.cu: the sm_90a code of each kernel (takes minutes)
#   OPT=-O0 test/same_code.sh HEAD~1     a quick check between two edits: seconds instead of a minute
# -DNDEBUG removes asserts, because they contain line numbers. Exit status 0: the code is equal, bit for bit.
set -u
cd "$(dirname "$0")/.." || exit
OPT=${OPT:--O2}
rev=$(git rev-parse --verify "$1^{commit}") || exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/before" test/.build
git archive "$rev" toka.c toka.h toka_kernels.cu test/model | tar -x -C "$tmp/before"

code() { # TREE OUT FLAGS...: writes hashes of the object file's code sections, constants and relocations
    local tree=$1 out=$2 section
    shift 2
    (cd "$tree" && ${CC:-cc} -std=c11 "$OPT" -w -DNDEBUG "$@" -c toka.c -o "$tmp/o") || return
    for section in $(readelf -SW "$tmp/o" | grep -oE ' \.(text|rodata|data)[.a-z0-9]*' | sort -u); do
        objcopy -O binary -j "$section" "$tmp/o" "$tmp/section" && echo "$section $(sha256sum <"$tmp/section")"
    done >"$out"
    readelf -rW "$tmp/o" | awk '/^[0-9a-f]/ {print $1, $3, $4}' | sha256sum >>"$out"
}
kernels() { # TREE OUT: writes a hash of each kernel's machine code, sorted so that names do not matter; then one of the host code
    local cubin=$tmp/toka_kernels.cubin
    (cd "$1" && nvcc -std=c++20 -O3 -w -DNDEBUG -Xcompiler -fno-exceptions,-O1 -gencode arch=compute_90a,code=sm_90a \
        -keep -keep-dir "$tmp" -c toka_kernels.cu -o "$tmp/host.o") || return
    readelf -SW "$cubin" 2>/dev/null |
        sed -n 's/^.* \.text\.[^ ]* *PROGBITS *[0-9a-f]* \([0-9a-f]*\) \([0-9a-f]*\) .*/\1 \2/p' | while read -r at n; do
        tail -c +$((0x$at + 1)) "$cubin" | head -c $((0x$n)) | sha256sum
    done | sort >"$2"
    objcopy -O binary -j .text "$tmp/host.o" "$tmp/section" && echo "host $(sha256sum <"$tmp/section")" >>"$2"
}
status=0
same() { # NAME FUNCTION FLAGS...: runs FUNCTION on this tree and on REV, and compares. The result of REV is kept for the next call
    local name=$1 hash=$2 kept
    shift 2
    kept=test/.build/code-$rev$OPT-$(echo "$name" | tr -dc a-z)
    [ -s "$kept" ] || "$hash" "$tmp/before" "$kept" "$@"
    if "$hash" . "$tmp/now" "$@" && cmp -s "$kept" "$tmp/now" && [ -s "$kept" ]; then echo "$name: the same"; else
        echo "$name: DIFFERENT"
        diff "$kept" "$tmp/now"
        status=1
    fi
}
same "toka.c, library" code
same "toka.c, program" code -DTOKA_MAIN -DTOKA_WITH_CUDA '-DTOKA_EMBED="test/model"'
[ "${2:-}" != cu ] || same "toka_kernels.cu, sm_90a" kernels
exit $status
