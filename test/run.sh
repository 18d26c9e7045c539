#!/bin/bash
# test/run.sh - builds toka, then runs every test there is. Last line: 'N passed, N failed, N skipped'; exit 1 if one failed.
#
#   test/run.sh              everything
#   test/run.sh unit         only the C unit tests          (also: build, san, py, fuzz)
#
# Environment: FUZZ_SECONDS   time for each fuzzer (10)
#              TOKA_TEST_DATA  folder of the public test data (../shared/data); tests that need it are skipped without it
# Needs a C compiler. With clang: fuzzers too. With python3 and a package index (or pytest, tokenizers, numpy and jinja2 already
# there): comparisons with Hugging Face tokenizers and jinja2, in a virtual environment under test/.venv.
set -u
cd "$(dirname "$0")/.."
export TOKA_TEST_DATA=${TOKA_TEST_DATA:-../shared/data}
CC=${CC:-cc}
FUZZ_SECONDS=${FUZZ_SECONDS:-10}
WANT=${1:-all}
B=test/.build
WARN="-std=c11 -Wall -Wextra -Wshadow -Wvla -Wmissing-prototypes -Wstrict-prototypes -Wconversion -Wno-sign-conversion
      -Wno-float-conversion -Werror"
SAN="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
export ASAN_OPTIONS=allocator_may_return_null=1 # being out of memory is tested
mkdir -p $B
passed=0 failed=0 skipped=0

wants() { [ "$WANT" = all ] || [ "$WANT" = "$1" ]; }
result() { # NAME STATUS
    if [ "$2" = 0 ]; then passed=$((passed + 1)); echo "ok     $1"; else failed=$((failed + 1)); echo "FAIL   $1"; fi
}
skip() { skipped=$((skipped + $1)); echo "skipped $1: $2"; }
add() { # PASSED FAILED SKIPPED, of a program that counted its own
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}
step() { # NAME COMMAND...: one test that is a command; its output is shown when it fails
    local name=$1
    shift
    if "$@" >$B/log 2>&1; then result "$name" 0; else
        cat $B/log
        result "$name" 1
    fi
}

# ---- the program, the library, the checks of the source ----

only_the_binary() { # in a copy of the tree, build.sh adds ./toka and nothing else
    rm -rf $B/copy && mkdir -p $B/copy || return 1
    git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t $B/copy || return 1
    (cd $B/copy && find . -type f | sort >../before && ./build.sh && find . -type f | sort >../after) || return 1
    rm -rf $B/copy
    [ "$(comm -13 $B/before $B/after)" = ./toka ] && [ -z "$(comm -23 $B/before $B/after)" ]
}
build_tests() {
    step "build.sh builds ./toka without a warning" ./build.sh
    step "build.sh leaves nothing but the binary" only_the_binary
    step "toka.c compiles alone as a library" $CC $WARN -O2 -c toka.c -o $B/toka.o
    step "a program that only includes toka.h links it" $CC $WARN -I. test/example.c $B/toka.o -lm -lpthread -o $B/example
    step "and runs" $B/example test/model "Tom has 12 apples."
    if command -v clang >/dev/null; then
        step "clang compiles it without a warning" clang $WARN -fsyntax-only -DTOKA_MAIN toka.c
    else skip 1 "no clang"; fi
    if command -v c++ >/dev/null; then
        step "toka.h is C++ too" c++ -Wall -Wextra -Werror -fsyntax-only -x c++ toka.h
    fi
}

# ---- C unit tests, optimised and under the sanitizers ----

unit() { # NAME FLAGS... [TESTS...]
    local name=$1 flags=()
    shift
    while [ $# -gt 0 ] && [ "${1#-}" != "$1" ]; do flags+=("$1") && shift; done
    step "unit tests compile ($name)" $CC $WARN -Wno-alloc-size-larger-than -Wno-maybe-uninitialized "${flags[@]}" -o $B/unit_$name test/unit.c -lm -lpthread || return
    [ -x $B/unit_$name ] || return
    $B/unit_$name "$@" | tee $B/unit.log
    local status=${PIPESTATUS[0]} line
    line=$(grep '^unit: ' $B/unit.log | tail -1 | tr -dc '0-9 ')
    if [ -z "$line" ] || { [ "$status" != 0 ] && [ "$(echo $line | cut -d' ' -f2)" = 0 ]; }; then
        result "unit tests end ($name, exit $status)" 1
    fi
    # shellcheck disable=SC2086
    [ -n "$line" ] && add $line
}

# ---- Python: whole programs against what users have ----

python_tests() {
    if ! command -v python3 >/dev/null; then skip 1 "no python3"; return; fi
    if [ ! -x test/.venv/bin/pytest ]; then
        rm -rf test/.venv
        python3 -m venv test/.venv && test/.venv/bin/pip install -q --disable-pip-version-check -r test/requirements.txt ||
            rm -rf test/.venv
    fi
    local py=test/.venv/bin/python
    [ -x $py ] || py=python3
    if ! $py -c 'import pytest, tokenizers, numpy, jinja2' 2>/dev/null; then
        skip 1 "python packages of test/requirements.txt cannot be installed"
        return
    fi
    $py -m pytest -q -rs -p no:cacheprovider --junitxml=$B/pytest.xml test
    local status=$? counts
    counts=$($py - $B/pytest.xml <<'PY'
import sys, xml.etree.ElementTree as E
s = E.parse(sys.argv[1]).getroot().find("testsuite").attrib
bad, skip = int(s["failures"]) + int(s["errors"]), int(s["skipped"])
print(int(s["tests"]) - bad - skip, bad, skip)
PY
    ) || counts="0 1 0"
    [ $status -gt 1 ] && [ "$(echo "$counts" | cut -d' ' -f2)" = 0 ] && counts="0 1 0"
    # shellcheck disable=SC2086
    add $counts
}

# ---- Fuzzers: a corpus kept in test/corpus, new findings go to test/.build ----

fuzz_tests() {
    if ! command -v clang >/dev/null || ! echo 'int LLVMFuzzerTestOneInput(void){return 0;}' |
        clang -x c -fsanitize=fuzzer - -o $B/fuzz_probe 2>/dev/null; then
        skip "$(ls test/fuzz_*.c | wc -l)" "no clang with libFuzzer"
        return
    fi
    for source in test/fuzz_*.c; do
        local name
        name=$(basename "$source" .c)
        step "$name compiles" clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
            -fsanitize-ignorelist=test/fuzz.ignore -fsanitize-coverage-ignorelist=test/fuzz.ignore -Wno-unused-function -o $B/$name "$source" -lm -lpthread
        mkdir -p $B/corpus_$name
        step "$name, $FUZZ_SECONDS s" $B/$name -max_total_time="$FUZZ_SECONDS" -timeout=10 -rss_limit_mb=3000 -verbosity=0 \
            -print_final_stats=1 -artifact_prefix=$B/ $B/corpus_$name "test/corpus/${name#fuzz_}"
        grep -h 'number_of_executed_units' $B/log | sed "s/^stat::/       $name:/"
    done
}

wants build && build_tests
wants unit && unit fast -O2
wants san && unit san $SAN
wants san && unit tsan -g -O1 -fsanitize=thread -Wno-tsan engine: cpu_pool "tokenizer: threads"
[ -x ./toka ] || ./build.sh
wants py && python_tests
wants fuzz && fuzz_tests
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
