#!/bin/sh
# build.sh - builds ./toka or ./libtoka.so, and nothing else in the tree.
#   ./build.sh          CPU, and with nvcc and toka_kernels.cu the GPU too; ./toka-ping is a link to ./toka: toka ping
#   ./build.sh lib      ./libtoka.so, the engine for test/toka.py and other programs; CPU, and with nvcc the GPU too
#   ./build.sh check    only the mechanical checks of toka.c
# From the environment: CC, CFLAGS and LDFLAGS (the linker gets both), NVCC (empty: no GPU), ARCHS.
set -eu
cd "$(dirname "$0")"
CC=${CC:-cc}
NVCC=${NVCC-$(command -v nvcc || true)}
ARCHS=${ARCHS:-80 89 90a} # GPU architectures that go into the one binary
MODEL=test/model          # the folder whose model becomes part of the program
# In a file of this length gcc 12 takes 8 seconds for -Wmisleading-indentation; the tests have it.
WARN="-Wall -Wextra -Wshadow -Wvla -Wmissing-prototypes -Wstrict-prototypes -Wconversion -Wno-sign-conversion
      -Wno-float-conversion -Wno-misleading-indentation -Werror"
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT INT TERM

die() {
    echo "build.sh: $*" >&2
    exit 1
}

# The contents list at the top of a file and the banners below it say the same.
check() {
    sed -n 's/^ \* *\([0-9][0-9.]*[a-z]*\. .*\[[a-z]*\]\)$/\1/p' "$1" >"$tmp/contents"
    sed -n 's/^ \* MARK: \(.*\)$/\1/p' "$1" >"$tmp/banners"
    diff "$tmp/contents" "$tmp/banners" >&2 || die "the contents list of $1 differs from its banners"
}

# No line of the three source files has more than 100 columns, but strings and tables of strings.
columns() {
    awk 'length > 100 && !/"/ {print FILENAME ":" FNR ": more than 100 columns"; n++} END {exit n > 0}' \
        toka.c toka.h toka_kernels.cu >&2 || die "a line is too long"
}

# No chapter of the product (34 on) reads a field of the engine or of a backend.
border() {
    awk '/^ \* MARK: 34\./ {behind = 1}
        behind && /(engine|backend)->|lib_backends/ {print FILENAME ":" FNR ": " $0; n++}
        END {exit n > 0 || !behind}' toka.c >&2 || die "a chapter from 34 on reads fields of the engine or of a backend"
}

# No name of the three source files has a word of test/words.txt in it. Comments and texts do not count.
words() {
    bad=$(sed -n 's/^\([a-z][a-z]*\)	.*/\1/p' test/words.txt | paste -sd '|' -)
    awk '{
        line = $0
        out = ""
        while (line != "") {
            if (in_comment) {
                end = index(line, "*/")
                if (!end) break
                line = substr(line, end + 2)
                in_comment = 0
            } else if (match(line, /"([^"\\]|\\.)*"|[/][*]|[/][/]/)) {
                out = out substr(line, 1, RSTART - 1) " "
                mark = substr(line, RSTART, 2)
                if (mark == "//") break
                line = substr(line, RSTART + RLENGTH)
                in_comment = mark == "/*"
            } else {
                out = out line
                line = ""
            }
        }
        print FILENAME ":" FNR ": " out
    }' toka.c toka.h toka_kernels.cu | grep -iE "^[^ ]+ (.*[^a-z0-9])?($bad)([^a-z0-9]|\$)" >&2 &&
        die "a name has a word of test/words.txt in it"
    return 0
}

# Says what runs and about how long it takes on one core of a present machine.
stage() {
    echo "build.sh: $1 ($2)"
}

# Nothing leaves an object file but toka_* and main. Names with __ are the compiler's: sanitizers
# add some.
exports() {
    bad=$(nm -g --defined-only "$1" | awk '{print $3}' | grep -v -x -e 'toka_.*' -e main -e '__.*' || true)
    [ -z "$bad" ] || die "exported symbols that are not toka_*: $bad"
}

# The GPU half: one object for all architectures. Warnings of ptxas that cost speed (serialised wgmma, spills) are errors.
cuda() {
    gencode=
    for a in $ARCHS; do gencode="$gencode -gencode arch=compute_$a,code=sm_$a"; done
    # shellcheck disable=SC2086,SC2090
    "$NVCC" -std=c++20 -O3 --threads 0 -Xcompiler -fno-exceptions ${pic:+-Xcompiler $pic} $gencode -Xptxas -v -c toka_kernels.cu -o "$tmp/kernels.o" >"$tmp/nvcc" 2>&1 || {
        cat "$tmp/nvcc" >&2
        die "nvcc failed"
    }
    grep -E 'C75[0-9][0-9]|[1-9][0-9]* bytes spill' "$tmp/nvcc" >&2 && die "nvcc serialised or spilled"
    nm -g --defined-only "$tmp/kernels.o" | awk '$2 == "W" {print $3}' >"$tmp/weak" # before 13.0 nvcc exports what launches a template
    [ ! -s "$tmp/weak" ] || objcopy --localize-symbols="$tmp/weak" "$tmp/kernels.o"
    exports "$tmp/kernels.o"
}

# 80 seconds for each architecture; nvcc compiles as many at once as there are cores.
cuda_time() {
    cores=$(getconf _NPROCESSORS_ONLN || echo 1)
    # shellcheck disable=SC2086,SC2090
    set -- $ARCHS
    [ "$cores" -lt $# ] || cores=$#
    echo "about $((($# * 80 / cores + 59) / 60)) minutes"
}

# nvcc as a linker hands each flag to the C++ compiler of CC's family: clang's sanitizers need
# clang. A comma would end a flag.
nvcc_link() {
    cxx=$(printf %s "$CC" | sed 's/\(.*\)clang/\1clang++/; t; s/\(.*\)gcc/\1g++/; t; s/cc$/c++/')
    set -- "$NVCC"
    [ "$CC" = cc ] || ! command -v "$cxx" >/dev/null || set -- "$@" -ccbin "$cxx"
    for flag in ${CFLAGS:-} ${LDFLAGS:-}; do
        set -- "$@" -Xcompiler "$(printf %s "$flag" | sed 's/,/\\,/g')"
    done
    # C++'s runtime guards tables of the GPU half: taken in where there is a libstdc++.a, so that no
    # library is needed later
    case $(c++ -print-file-name=libstdc++.a 2>/dev/null) in
    /*) set -- "$@" -Xcompiler -static-libstdc++,-static-libgcc ;;
    esac
    "$@" ${pic:+-shared} "$tmp/toka.o" "$tmp/kernels.o" -o "$out" -lm -lpthread -ldl
}

check toka.c
check toka_kernels.cu
columns
border
[ ! -f test/words.txt ] || words
out=toka main=-DTOKA_MAIN pic=''
case ${1:-} in
check) exit 0 ;;
lib) out=libtoka.so main='' pic=-fPIC ;;
?*) die "$1: expected lib, check or nothing" ;;
esac
flags=
# shellcheck disable=SC2089
[ -f "$MODEL/model.safetensors" ] && flags="-DTOKA_EMBED=\"$MODEL\""
commit=$(git rev-parse --short=8 HEAD 2>/dev/null || true)
[ -z "$commit" ] || flags="$flags -DTOKA_COMMIT=\"$commit\""

# Compiles toka.c. TIME FLAGS...: how long it takes; the flags of the half that it belongs to.
compile() {
    stage "compiling toka.c with $CC" "$1"
    shift
    # shellcheck disable=SC2086,SC2090
    $CC -std=c11 -O3 -fno-trapping-math $WARN ${CFLAGS:-} $main $pic $flags "$@" -c toka.c -o "$tmp/toka.o"
    exports "$tmp/toka.o"
    stage "linking ./$out" "a second"
}
built() {
    [ "$out" != toka ] || ln -sf toka toka-ping # the name that users of Tokasaurus know
    echo "built ./$out, $(($(wc -c <"$out") / 1024)) KB${1:-}"
}
cpu_half() { # TIME FLAGS...
    compile "$@"
    # shellcheck disable=SC2086 # CFLAGS and LDFLAGS are words
    $CC ${CFLAGS:-} ${LDFLAGS:-} ${pic:+-shared} "$tmp/toka.o" -o "$out" -lm -lpthread -ldl
}

if [ -z "$NVCC" ] || [ ! -f toka_kernels.cu ]; then
    cpu_half "about a minute"
    built
    exit 0
fi
if [ ! -e /dev/nvidiactl ]; then # no GPU here: what can run here comes first, and soon
    cpu_half "15 seconds" -Og
    built " (for the CPU: it runs; the GPU half follows)"
fi
stage "compiling toka_kernels.cu with $NVCC for $ARCHS" "$(cuda_time)"
cuda
cuda_version=$("$NVCC" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
compile "about a minute" -DTOKA_WITH_CUDA -DTOKA_CUDA_BUILT="\", CUDA $cuda_version for $ARCHS\""
nvcc_link
built
