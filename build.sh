#!/bin/sh
# build.sh - builds ./toka, and nothing else in the tree.
#   ./build.sh          CPU, and with nvcc and toka_kernels.cu the GPU too
#   ./build.sh check    only the mechanical checks of toka.c
# From the environment: CC, CFLAGS, NVCC (empty: no GPU), ARCHS.
set -eu
cd "$(dirname "$0")"
CC=${CC:-cc}
NVCC=${NVCC-$(command -v nvcc || true)}
ARCHS=${ARCHS:-80 89 90a} # GPU architectures that go into the one binary
MODEL=test/model          # the folder whose model becomes part of the program
WARN="-Wall -Wextra -Wshadow -Wvla -Wmissing-prototypes -Wstrict-prototypes -Wconversion -Wno-sign-conversion
      -Wno-float-conversion -Werror"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT INT TERM

die() {
    echo "build.sh: $*" >&2
    exit 1
}

# The contents list at the top of a file and the banners below it say the same.
check() {
    sed -n 's/^ \* *\([0-9]*\. .*\[[a-z]*\]\)$/\1/p' "$1" >"$tmp/contents"
    sed -n 's/^ \* MARK: \(.*\)$/\1/p' "$1" >"$tmp/banners"
    diff "$tmp/contents" "$tmp/banners" >&2 || die "the contents list of $1 differs from its banners"
}

# Nothing leaves an object file but toka_* and main.
exports() {
    bad=$(nm -g --defined-only "$1" | awk '{print $3}' | grep -v -x -e 'toka_.*' -e main || true)
    [ -z "$bad" ] || die "exported symbols that are not toka_*: $bad"
}

# The GPU half: one object for all architectures. Warnings of ptxas that cost speed (serialised wgmma, spills) are errors.
cuda() {
    gencode=
    for a in $ARCHS; do gencode="$gencode -gencode arch=compute_$a,code=sm_$a"; done
    # shellcheck disable=SC2086
    "$NVCC" -std=c++20 -O3 --threads 0 -Xcompiler -fno-exceptions $gencode -Xptxas -v -c toka_kernels.cu -o "$tmp/kernels.o" >"$tmp/nvcc" 2>&1 || {
        cat "$tmp/nvcc" >&2
        die "nvcc failed"
    }
    grep -E 'C75[0-9][0-9]|[1-9][0-9]* bytes spill' "$tmp/nvcc" >&2 && die "nvcc serialised or spilled"
    nm -g --defined-only "$tmp/kernels.o" | awk '$2 == "W" {print $3}' >"$tmp/weak" # before 13.0 nvcc exports what launches a template
    [ ! -s "$tmp/weak" ] || objcopy --localize-symbols="$tmp/weak" "$tmp/kernels.o"
    exports "$tmp/kernels.o"
}

check toka.c
check toka_kernels.cu
[ "${1:-}" = check ] && exit 0
flags=
[ -f "$MODEL/model.safetensors" ] && flags="-DTOKA_EMBED=\"$MODEL\""
if [ -n "$NVCC" ] && [ -f toka_kernels.cu ]; then
    cuda
    flags="$flags -DTOKA_WITH_CUDA"
    link="$NVCC $tmp/toka.o $tmp/kernels.o"
    # C++'s runtime guards tables of the GPU half: taken in where there is a libstdc++.a, so that no library is needed later
    case $(c++ -print-file-name=libstdc++.a 2>/dev/null) in /*) link="$link -Xcompiler -static-libstdc++,-static-libgcc" ;; esac
else
    link="$CC $tmp/toka.o"
fi
# shellcheck disable=SC2086
$CC -std=c11 -O3 -fno-trapping-math $WARN ${CFLAGS:-} -DTOKA_MAIN $flags -c toka.c -o "$tmp/toka.o"
exports "$tmp/toka.o"
$link -o toka -lm -lpthread
echo "built ./toka, $(($(wc -c <toka) / 1024)) KB"
