#!/bin/sh
# build.sh - builds ./toka, and nothing else in the tree.
#   ./build.sh            with nvcc: CPU and GPU; without: CPU only. CC, CFLAGS, NVCC, ARCHS may be set in the environment
#   ./build.sh check      only the mechanical checks of toka.c
set -eu
cd "$(dirname "$0")"
CC=${CC:-cc}
NVCC=${NVCC:-$(command -v nvcc || true)}
MODEL=test/model # the folder whose model becomes part of the program
WARN="-Wall -Wextra -Wshadow -Wvla -Wmissing-prototypes -Wstrict-prototypes -Wconversion -Wno-sign-conversion
      -Wno-float-conversion -Werror"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT INT TERM

# The contents list at the top of toka.c and the banners below say the same.
check() {
    sed -n 's/^ \* *\([0-9]*\. .*\[[a-z]*\]\)$/\1/p' toka.c | grep -v MARK >"$tmp/contents"
    sed -n 's/^ \* MARK: \(.*\)$/\1/p' toka.c >"$tmp/banners"
    if ! diff "$tmp/contents" "$tmp/banners" >&2; then
        echo "build.sh: the contents list of toka.c differs from its banners" >&2
        exit 1
    fi
}

# Nothing leaves the program but toka_* (and main).
exports() {
    bad=$(nm -g --defined-only "$1" | awk '{print $3}' | grep -v -x -e 'toka_.*' -e main || true)
    if [ -n "$bad" ]; then
        echo "build.sh: exported symbols that are not toka_*: $bad" >&2
        exit 1
    fi
}

check
[ "${1:-}" = check ] && exit 0
EMBED=
[ -f "$MODEL/model.safetensors" ] && EMBED="-DTOKA_EMBED=\"$MODEL\""
# shellcheck disable=SC2086
$CC -std=c11 -O3 $WARN ${CFLAGS:-} -DTOKA_MAIN $EMBED -c toka.c -o "$tmp/toka.o"
exports "$tmp/toka.o"
if [ -n "$NVCC" ] && [ -f toka_kernels.cu ]; then
    echo "build.sh: toka_kernels.cu is not part of this version" >&2
    exit 1
fi
$CC "$tmp/toka.o" -o toka -lm -lpthread
echo "built ./toka ($(wc -c <toka) bytes)"
