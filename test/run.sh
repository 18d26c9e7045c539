#!/bin/bash
# test/run.sh - builds toka, then runs tests. The last line is 'N passed, N failed, N skipped'. The exit status is 1 if a test
# failed.
#
#   test/run.sh                   tests of every kind, in some 10 minutes on two cores. It leaves out tests that take more than
#                                 3 s each, TSan, the server under sanitizers, GPU architectures but sm_90a, and other toolkits
#   TOKA_TESTS=all test/run.sh    everything, in about 70 minutes on two cores
#   TOKA_TESTS=peers test/run.sh  comparisons with PyTorch, transformers, vLLM and Jinja2, as far as their packages are installed
#                                 for python3 (or for $PYTHON); the table is written to test/.build/peers.md
#   test/run.sh unit              one group of parts: build, unit, san, py, fuzz or gpu
#   GPU_ARCH=90a test/run.sh gpubuild   only compiles the GPU tests; needs no GPU. Then gpu does not compile them again, also
#                                 on another machine that has the same sources, ./toka and test/.build/gpu.tar
#   GPU_PART=2/3 test/run.sh gpu  the second of three shares of the GPU tests; with gpubuild: only the programs of this share
#   GPU_PART=2/3 test/run.sh gpushare   prints the tests of this share and their seconds
#
# Environment: TOKA_TESTS     fast (default), all or peers
#              LANES          number of parts that run at the same time (default 3)
#              FUZZ_SECONDS   seconds for each fuzzer (default: fast 5, all 10)
#              GPU_JOBS       number of GPU test programs that run at the same time, except for tests that measure time
#                             (default: the number of cores, at most 12)
#              TOKA_TEST_DATA  folder of the public test data (default ../shared/data); without it, tests that need it are skipped
# A C compiler is required. The other parts run if their tools are installed:
#   clang     the sanitizers and the fuzzers
#   python3   comparisons with Hugging Face tokenizers and jinja2, in the virtual environment test/.venv. It needs a package
#             index, or pytest, tokenizers, numpy and jinja2 already installed.
#   nvcc      builds the CUDA file. With a GPU, all also tests each kernel and whole models.
set -u
cd "$(dirname "$0")/.." || exit
export TOKA_TEST_DATA=${TOKA_TEST_DATA:-../shared/data}
CC=${CC:-cc}
TESTS=${TOKA_TESTS:-fast}
case $TESTS in
fast) FUZZ_SECONDS=${FUZZ_SECONDS:-5} ;;
all) FUZZ_SECONDS=${FUZZ_SECONDS:-10} ;;
peers) ;;
*) echo "TOKA_TESTS=$TESTS: expected fast, all or peers" >&2 && exit 2 ;;
esac
export TOKA_TESTS=$TESTS
GPU_JOBS=${GPU_JOBS:-$(($(nproc) > 12 ? 12 : $(nproc) > 2 ? $(nproc) : 2))}
WANT=${1:-all}
B=test/.build
PART=main               # the part that runs in this process
LOG=$B/step-$PART.log   # output of its step that runs
WARN="-std=c11 -Wall -Wextra -Wshadow -Wvla -Wmissing-prototypes -Wstrict-prototypes -Wconversion -Wno-sign-conversion
      -Wno-float-conversion -Werror"
SAN="-g -O1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer"
export ASAN_OPTIONS=allocator_may_return_null=1 # some tests make an allocation fail
mkdir -p $B
passed=0 failed=0 skipped=0
failures=$B/failures # the names of all tests that failed, for the end of the output
: >$failures

fast() { [ "$TESTS" = fast ]; }
result() { # NAME STATUS [SECONDS]
    if [ "$2" = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)) && echo "$1" >>$failures; fi
    printf '%-6s %s%s\n' "$([ "$2" = 0 ] && echo ok || echo FAIL)" "$1" "${3:+, $3 s}"
}
skip() { skipped=$((skipped + $1)); echo "skipped $1: $2"; }
add() { # PASSED FAILED SKIPPED: adds the counts that a test program printed
    passed=$((passed + $1)) failed=$((failed + $2)) skipped=$((skipped + $3))
}
name_failures() { # FILE: notes the failed tests that a test program or pytest named in its output
    sed -nE 's/^(FAIL|FAILED|ERROR) +([^ ].*)/\2/p' "$1" | cut -c1-150 >>$failures
}
step() { # NAME COMMAND...: runs a command as one test; prints its output if it fails
    local name=$1 status TIMEFORMAT=%1R
    shift
    { time "$@" >$LOG 2>&1; } 2>$LOG.seconds
    status=$?
    if [ $status != 0 ]; then cat $LOG && name_failures $LOG; fi
    result "$name" $status "$(tail -1 $LOG.seconds)"
}

# ---- Parts: two run at the same time. A part is a function named part_NAME. Its output is printed when it has ended ----

counted() { # NAME: runs a part, which may exit; its counts go to a file
    PART=$1 LOG=$B/step-$1.log passed=0 failed=0 skipped=0
    (part_"$1"; echo "$passed $failed $skipped" >$B/parts/$1.counts)
}
part() { # NAME: runs a part; its output, seconds and counts go to files
    local at=$B/parts/$1 TIMEFORMAT='%0R s, %0U + %0S s of CPU'
    { time counted "$1" >$at.log 2>&1; } 2>$at.time
    [ -f $at.counts ] || { result "part $1 ended early" 1 >>$at.log && echo "0 1 0" >$at.counts; }
    mv $at.counts $at.end
}
after() { # PART: waits for a part, if it runs at all
    case " $parts " in *" $1 "*) until [ -f $B/parts/$1.end ]; do sleep 0.5; done ;; esac
}
lane() { # takes parts that no other lane has taken
    for name in $parts; do
        if mkdir $B/parts/$name.taken 2>/dev/null; then part $name; fi
    done
}
show_part() { # NAME
    [ ! -s $B/parts/$1.log ] || { echo "---- $1: $(tail -1 $B/parts/$1.time)" && cat $B/parts/$1.log; }
    # shellcheck disable=SC2046
    add $(cat $B/parts/$1.end)
}
show_progress() { # a line about the parts that run
    local name line="$SECONDS s"
    for name in $parts; do
        if [ -d $B/parts/$name.taken ] && [ ! -f $B/parts/$name.end ]; then
            line="$line | $name: $(tail -1 $B/parts/$name.log 2>/dev/null | tr -s ' ' | cut -c1-60)"
        fi
    done
    echo "$line"
}
run_parts() { # PART...: in this order, as many at a time as LANES says
    local i shown='' told=$SECONDS every=60 name lanes=()
    [ ! -t 1 ] || every=10
    parts=$*
    rm -rf $B/parts && mkdir -p $B/parts
    set -m # each lane is a process group, which can be ended
    for ((i = 0; i < ${LANES:-3}; i++)); do
        lane </dev/null &
        lanes+=($!)
    done
    set +m
    trap 'for lane in "${lanes[@]}"; do kill -- -$lane 2>/dev/null; done' EXIT
    trap 'exit 130' INT TERM
    while :; do
        i=$(jobs -rp | wc -l)
        for name in $parts; do
            case " $shown " in *" $name "*) continue ;; esac
            if [ -f $B/parts/$name.end ]; then shown="$shown $name" && show_part $name; fi
        done
        [ $i != 0 ] || break
        [ $((SECONDS - told)) -lt $every ] || { told=$SECONDS && show_progress; }
        sleep 1
    done
    trap - EXIT INT TERM
}

# ---- The program, the library and checks of the source ----

without_fast_math() { ! $CC -O2 -ffast-math -fsyntax-only toka.c 2>$B/fast.log && grep -q "needs infinities and NaN" $B/fast.log; }
only_libc() { # ./toka needs no shared library except those of libc
    # Without a static libstdc++, ./toka links the shared one: nothing to check.
    case $(c++ -print-file-name=libstdc++.a 2>/dev/null) in /*) ;; *) return 0 ;; esac
    ! readelf -d toka | grep NEEDED | grep -v -e 'libc\.so' -e 'libm\.so' -e 'libpthread' -e 'libdl' -e 'librt' -e 'ld-linux'
}
copy_tree() { # copies tracked files, and untracked files that git does not ignore, to $B/copy_PART
    copy=$B/copy_$PART
    rm -rf $copy && mkdir -p $copy && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t $copy
}
only_the_binary() { # in a copy of the tree, build.sh creates ./toka, the link ./toka-ping and no other file; it is the ./toka of all tests
    copy_tree || return 1
    (cd $copy && find . ! -type d | sort >../before && ./build.sh && find . ! -type d | sort >../after) && mv $copy/toka $copy/toka-ping . || return 1
    rm -rf $copy
    [ "$(comm -13 $B/before $B/after | xargs)" = "./toka ./toka-ping" ] && [ -z "$(comm -23 $B/before $B/after)" ]
}
links_with_sanitizer() { # build.sh passes CFLAGS and LDFLAGS to the link, and prints each stage before it runs
    copy_tree || return 1
    (cd $copy && CC=clang CFLAGS="-O0 -fsanitize=address,undefined" LDFLAGS=-Wl,-z,now NVCC='' ./build.sh >../log.build &&
        readelf -d toka | grep -q NOW && nm toka | grep -q __asan_init && ./toka -p "Tom has 12 apples." --max-tokens 2) || return 1
    rm -rf $copy
    [ "$(grep -c -e '^build.sh: compiling toka.c with clang (.*)$' -e '^build.sh: linking ./toka (.*)$' $B/log.build)" = 2 ]
}
links_with_nvcc() { # a fake nvcc makes an empty object file and writes the arguments of the link to a log
    local bin=$B/fake_nvcc
    copy_tree && mkdir -p $bin || return 1
    cat >$bin/nvcc <<'EOF'
#!/bin/sh
case " $* " in *" -c "*) echo | cc -x c -c - -o "${0%/*}/empty.o" && for last; do :; done && exec cp "${0%/*}/empty.o" "$last" ;; esac
printf '%s\n' "$@" >"${0%/*}/nvcc.log"
exit 1
EOF
    chmod +x $bin/nvcc
    (cd $copy &&
        CC=gcc CFLAGS="-O0 -Wa,--noexecstack" LDFLAGS=-Wl,-z,now NVCC="$OLDPWD/$bin/nvcc" ./build.sh >../log.build)
    if [ ! -e /dev/nvidiactl ]; then # the CPU half comes first, and runs although the other one failed
        [ "$(grep -n -e '^built ./toka, .* the GPU half follows)$' -e '^build.sh: compiling toka_kernels.cu ' $B/log.build | cut -d: -f2 | cut -d' ' -f1 | paste -sd' ')" = "built build.sh" ] &&
            $copy/toka -p "Tom has 12 apples." -n 2 || return 1
    fi
    rm -rf $copy
    grep -q '^build.sh: compiling toka_kernels.cu with .* (.* minutes)$' $B/log.build &&
        grep -qx -e '-Wa\\,--noexecstack' $bin/nvcc.log &&
        grep -qx -e '-Wl\\,-z\\,now' $bin/nvcc.log && grep -qx 'g++' $bin/nvcc.log && [ "$(grep -cx -e -Xcompiler $bin/nvcc.log)" -ge 3 ]
}
library_is_small() { # code and tables of the library as in the README's section on vendoring, with gcc's -O3 on x86-64
    local limit=655360 text
    text=$(size $B/toka.o | awk 'NR == 2 {print $1}') || return 1
    echo "text: $text bytes, at most $limit expected"
    [ "$text" ] && [ "$text" -le $limit ]
}
table_names_models() { # README.md lists the rows of mf_archs, and nothing else in chapters 11 to 32 and in the kernels names a model
    local names types name others
    names=$(sed -n 's/^ *{\.name = "\([A-Za-z0-9]*\)ForCausalLM", .*/\1/p' toka.c) && [ "$names" ] || return 1
    types=$(grep -oE '\.(model|other)_type = "[a-z0-9_]+"' toka.c | cut -d'"' -f2 | paste -sd'|') && [ "$types" ] || return 1
    for name in $names; do
        grep -q "^| .*[| ]$name[, ]" README.md || { echo "README.md does not list $name"; return 1; }
    done
    others=$(awk '/MARK: 11\. /, /MARK: 33\. /' toka.c | awk '/^static const mf_arch mf_archs/, /^};/ { next } { print "toka.c: " $0 }' &&
        sed 's/^/toka_kernels.cu: /' toka_kernels.cu) || return 1
    ! { grep -E '[A-Za-z0-9]For[A-Z][A-Za-z]*"' <<<"$others" # a class, and a model type or a part of one; "gemm" is a product of matrices
        grep -oE '"[a-z0-9_]{2,}"' <<<"$others" | sort -u | tr -d '"' | grep -vx gemm |
            while read -r name; do case $types in *"$name"*) echo "\"$name\" is a part of a model type" ;; esac; done; } | grep .
}
scripts_are_executable() { # each file that begins with #!
    ! git ls-files -z test | xargs -0 grep -lZ -m 1 '^#!' |
        xargs -0 -I{} sh -c 'head -c 2 "{}" | grep -q "^#!" && [ ! -x "{}" ] && echo "{} is not executable"' | grep .
}
part_program() {
    if fast; then export ARCHS="${ARCHS:-90a}"; fi # the kernels are compiled once
    step "build.sh builds ./toka and its link without a warning, and creates no other file" only_the_binary
    step "./toka needs no shared library but libc's" only_libc
}
library() { # $B/toka.o, unless it is new
    [ $B/toka.o -nt toka.c ] && [ $B/toka.o -nt toka.h ] || step "toka.c compiles alone as a library" $CC $WARN -O3 -c toka.c -o $B/toka.o
}
part_source() {
    step "build.sh builds the CPU half first where there is no GPU, and passes CFLAGS and LDFLAGS to the link by nvcc" links_with_nvcc
    step "toka.c compiles alone as a library" $CC $WARN -O3 -c toka.c -o $B/toka.o
    if [ "$(uname -m)" = x86_64 ] && $CC --version | grep -q 'Free Software'; then
        step "the library has at most 640 KB of code and tables" library_is_small
    else skip 1 "no gcc on x86-64: the bound on the library's size is for that"; fi
    step "toka.c compiles with -Wpedantic" $CC $WARN -Wpedantic -fsyntax-only toka.c
    step "toka.c compiles with the chapters of the server" $CC $WARN -Wpedantic -DTOKA_SERVER -fsyntax-only toka.c
    step "toka.c compiles without asserts" $CC $WARN -O2 -DNDEBUG -fsyntax-only toka.c
    step "toka.c refuses -ffast-math, which would change its results" without_fast_math
    step "a program that includes only toka.h links with toka.o" $CC $WARN -I. test/example.c $B/toka.o -lm -lpthread -o $B/example
    step "this program runs" $B/example test/model "Tom has 12 apples."
    if command -v clang >/dev/null; then
        step "build.sh passes CFLAGS and LDFLAGS to the link" links_with_sanitizer
        step "clang compiles toka.c without a warning" clang $WARN -Wpedantic -fsyntax-only -DTOKA_MAIN toka.c
    else skip 2 "no clang"; fi
    if command -v c++ >/dev/null; then
        step "toka.h compiles as C++" c++ -Wall -Wextra -Werror -fsyntax-only -x c++ toka.h
    fi
    step "each script in test/ is executable" scripts_are_executable
    step "only the table of architectures names models, and README.md lists its rows" table_names_models
    step "the shares of the GPU tests are the whole" gpu_shares_are_whole
    if command -v python3 >/dev/null; then step "the mutants of the GPU tests apply to the kernels" python3 test/gpu_mutants.py check; fi
}

# ---- C unit tests: optimised, and with the sanitizers ----

unit() { # NAME FLAGS... [TESTS...]
    local name=$1 flags=()
    shift
    while [ $# -gt 0 ] && [ "${1#-}" != "$1" ]; do flags+=("$1") && shift; done
    step "unit tests compile ($name)" $CC $WARN -Wno-alloc-size-larger-than -Wno-maybe-uninitialized -Wno-missing-field-initializers "${flags[@]}" \
        -o $B/unit_$name test/unit.c -lm -lpthread || return
    [ -x $B/unit_$name ] || return
    $B/unit_$name "$@" | tee $LOG
    local status=${PIPESTATUS[0]} line
    name_failures $LOG
    line=$(grep '^unit: ' $LOG | tail -1 | tr -dc '0-9 ')
    if [ -z "$line" ] || { [ "$status" != 0 ] && [ "$(echo $line | cut -d' ' -f2)" = 0 ]; }; then
        result "unit tests print their counts ($name, exit $status)" 1
    fi
    # shellcheck disable=SC2086
    [ -n "$line" ] && add $line
}
part_unit() { unit fast -O2; }
part_san() { unit san $SAN; }
part_tsan() {
    unit tsan -g -O1 -fsanitize=thread -Wno-tsan engine: cpu_pool ranks_shapes ranks_lost ranks_abort "tokenizer: threads" "constraints: workers" "constraints: only" "constraints: forced"
}

# ---- Python: tests of the whole program, with the clients and libraries that users have ----

part_venv() {
    command -v python3 >/dev/null && [ ! -x test/.venv/bin/pytest ] || return 0
    rm -rf test/.venv
    python3 -m venv test/.venv && test/.venv/bin/pip install -q --disable-pip-version-check -r test/requirements.txt || rm -rf test/.venv
}
find_python() { # sets py, or skips N tests
    after venv
    py=test/.venv/bin/python
    [ -x $py ] || py=python3
    command -v python3 >/dev/null || { skip $1 "no python3" && return 1; }
    $py -c 'import pytest, tokenizers, numpy, jinja2' 2>/dev/null ||
        { skip $1 "python packages of test/requirements.txt cannot be installed" && return 1; }
}
python_tests() { # MARKS: the tests that these marks choose
    local py status counts
    find_python 1 || return
    after program
    TOKA_DEVICE=cpu $py -m pytest -q -rfEs -p no:cacheprovider --junitxml=$B/$PART.xml -m "$1" test 2>&1 | tee $LOG
    status=${PIPESTATUS[0]}
    name_failures $LOG
    counts=$($py - $B/$PART.xml <<'PY'
import sys, xml.etree.ElementTree as E
s = E.parse(sys.argv[1]).getroot().find("testsuite").attrib
bad, skip = int(s["failures"]) + int(s["errors"]), int(s["skipped"])
print(int(s["tests"]) - bad - skip, bad, skip)
PY
    ) || counts="0 1 0"
    [ $status -gt 1 ] && [ "$(echo "$counts" | cut -d' ' -f2)" = 0 ] && counts="0 1 0"
    [ "$counts" != "0 1 0" ] || echo "$PART: pytest ended with status $status" >>$failures
    # shellcheck disable=SC2086
    add $counts
}
part_py() { if fast; then python_tests "not slow"; else python_tests "not alone"; fi; }
part_alone() { python_tests alone; } # tests that measure time
part_nvcc() {
    local py status
    find_python 1 || return
    if ! command -v nvcc >/dev/null; then skip 1 "no nvcc"; return; fi
    if nvcc --help | grep -q -e --fdevice-syntax-only; then
        step "the CUDA tests and all mutants of the kernels are well formed" python3 test/gpu_mutants.py parse
    else
        skip 1 "this nvcc has no --fdevice-syntax-only"
    fi
    $py test/nvcc_versions.py --recorded 12.4 2>&1
    status=$?
    if [ $status = 3 ]; then skip 1 "no ptxas 12.4 in the package index"; else
        result "the oldest supported toolkit compiles the kernels without spills" $status
    fi
}

# ---- The library with the sanitizers, for the soak and the server tests. Only clang has an ignore list for sanitizers; it
# keeps the model's arithmetic fast. ----

sanitized() { # NAME FLAGS...: compiles $B/toka_NAME.o
    local name=$1
    shift
    step "toka compiles ($name)" clang -std=c11 -g -O2 -fsanitize-ignorelist=test/fuzz.ignore -DTOKA_EMBED='"test/model"' "$@" -c toka.c \
        -o "$B/toka_$name.o"
}

# ---- Soak: random requests to the library. Some requests are repeated alone; their results must be equal. ----

soak() { # NAME: runs $B/soak_NAME for 15 seconds: the embedded model, then smaller models, which end more requests per second
    local seed=1 model
    for model in test/model test/fixtures/llama-tied "$TOKA_TEST_DATA/weights/stories260K"; do
        if [ ! -d "$model" ]; then skip 1 "no public test data"; continue; fi
        step "soak of $(basename "$model"), seed $seed ($1)" "$B/soak_$1" --model "$model" --seconds 5 --seed $seed
        grep '^soak: seed' $LOG | sed 's/^/       /'
        seed=$((seed + 1))
    done
}
soak_kinds() { # NAME: the same for a model with windows, of whose pages there are fewer than of the others, and for one with states
    local model
    for model in gptoss qwen3next; do
        mkdir -p $B/soak_$1_$model && $py test/model_weights.py $model $B/soak_$1_$model || { skip 1 "no weights of $model"; continue; }
        step "soak of $model ($1)" "$B/soak_$1" --model $B/soak_$1_$model --seconds 5 --seed 4 \
            --max-num-seqs 5 --max-num-batched-tokens 24 --kv-tokens 500 --max-model-len 333
        grep '^soak: seed' $LOG | sed 's/^/       /'
    done
}
part_soak() {
    local py
    after source
    library
    step "soak compiles" $CC $WARN -O2 -I. -o $B/soak_fast test/soak.c $B/toka.o -lm -lpthread
    soak fast
    find_python 2 && soak_kinds fast
}

# ---- Soak and server tests with the sanitizers ----

sanitized_tests() { # NAME FLAGS...: compiles the library, then the soak and the server with it; sets py
    local name=$1
    shift
    if ! command -v clang >/dev/null; then skip 7 "no clang"; return 1; fi
    sanitized $name -DTOKA_SERVER "$@"
    step "soak compiles ($name)" clang -std=c11 -g -O1 -I. "$@" -o $B/soak_$name test/soak.c $B/toka_$name.o -lm -lpthread
    soak $name
    echo 'int toka_main(int, char **); int main(int argc, char **argv) { return toka_main(argc, argv); }' >$B/main_$name.c
    step "toka links ($name)" clang "$@" -o $B/toka_$name $B/main_$name.c $B/toka_$name.o -lm -lpthread
    find_python 1
}
part_asan() {
    local py
    sanitized_tests asan -fsanitize=address,undefined -fno-sanitize-recover=undefined || return
    soak_kinds asan
    step "server tests (asan)" env ASAN_OPTIONS=quarantine_size_mb=2 TOKA_BINARY="$PWD/$B/toka_asan" $py \
        -m pytest -q -p no:cacheprovider test/test_server.py test/test_faults.py
}
part_race() {
    local py
    sanitized_tests tsan -fsanitize=thread || return
    rm -f $B/tsan.log.*
    step "server tests (tsan)" env TSAN_OPTIONS="log_path=$PWD/$B/tsan.log" TOKA_BINARY="$PWD/$B/toka_tsan" $py -m pytest -q \
        -p no:cacheprovider test/test_server.py test/test_faults.py \
        -k "sigterm or pipelining or many_streams or disconnect or full_queue or leaks or keys or metrics or split or fails or hangs"
    step "no data race in the server" no_files $B/tsan.log.*
}
no_files() { # FILE...: no such file exists. If a pattern matches nothing, bash passes the pattern itself
    [ ! -e "$1" ] || { cat "$@"; false; }
}

# ---- Fuzzers: they start from test/corpus; new inputs are written to test/.build ----

part_fuzzers() {
    if ! command -v clang >/dev/null || ! echo 'int LLVMFuzzerTestOneInput(void){return 0;}' |
        clang -x c -fsanitize=fuzzer - -o $B/fuzz_probe 2>/dev/null; then
        skip $(($(ls test/fuzz_*.c | wc -l) + 1)) "no clang with libFuzzer"
        return
    fi
    step "the fuzzers compile" clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
        -fsanitize-ignorelist=test/fuzz.ignore -fsanitize-coverage-ignorelist=test/fuzz.ignore -Wno-unused-function \
        -o $B/fuzz test/fuzz.c -lm -lpthread
}
fuzz() { # I: runs every second fuzzer, from the Ith on
    local source name
    after fuzzers
    [ -x $B/fuzz ] || return
    for source in $(ls test/fuzz_*.c | sed -n "$1~2p"); do
        name=$(basename "$source" .c)
        mkdir -p $B/corpus_$name
        step "$name" env TOKA_FUZZ="${name#fuzz_}" $B/fuzz -max_total_time="$FUZZ_SECONDS" -timeout=10 \
            -rss_limit_mb=3000 -verbosity=0 -print_final_stats=1 -artifact_prefix=$B/ $B/corpus_$name "test/corpus/${name#fuzz_}"
        grep -h 'number_of_executed_units' $LOG | sed "s/^stat::/       $name:/"
    done
}
part_fuzz1() { fuzz 1; }
part_fuzz2() { fuzz 2; }

# ---- GPU: each op against float64, whole models against the reference, the kernels with compute-sanitizer ----

gpu_n=0 gpu_counted=0 # number of jobs started, and number of jobs whose results were added
# KIND NAME SECONDS COMMAND...: starts a job that runs at the same time as other jobs; SECONDS is its time limit (0: none).
# KIND counts: the command's last line is 'N passed, N failed, N skipped'. KIND one: the command is one test.
# With gpu_list set, a job is only written into that file; with gpu_share set, only jobs named in that file start. With
# gpu_missing set, jobs are skipped for this reason.
gpu_list= gpu_share= gpu_missing= gpu_group=0
gpu_job() {
    local at=$B/jobs/$gpu_n kind=$1 limit=$3
    if [ "$gpu_list" ]; then
        printf '%s\t%s\t%s\n' "$gpu_group" "$2" "$(gpu_uses "$@")" >>"$gpu_list"
        return
    fi
    if [ "$gpu_share" ] && ! grep -qxF -e "$2" "$gpu_share"; then return; fi
    if [ "$gpu_missing" ]; then skip 1 "$2: $gpu_missing"; return; fi
    gpu_n=$((gpu_n + 1))
    mkdir -p $B/jobs && echo "$kind $2" >"$at.name" && rm -f "$at.end"
    shift 3
    while [ "$(jobs -rp | wc -l)" -ge "$GPU_JOBS" ]; do wait -n; done
    {
        SECONDS=0
        if [ "$limit" = 0 ]; then "$@"; else timeout "$limit" "$@"; fi >"$at.log" 2>&1
        echo "$? $SECONDS" >"$at.end"
    } &
}
gpu_collect() { # waits for all jobs and adds their results in the order of their start; their logs stay in test/.build/jobs
    local i kind name status took line
    gpu_group=$((gpu_group + 1))
    [ -z "$gpu_list" ] || return
    wait
    for ((i = gpu_counted; i < gpu_n; i++)); do
        read -r kind name <"$B/jobs/$i.name"
        status=1 took=0 # for a job that was killed before it wrote its status
        [ ! -f "$B/jobs/$i.end" ] || read -r status took <"$B/jobs/$i.end"
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$B/jobs/$i.log" | tail -1)
        printf '%s\t%s\n' "$took" "$name" >>$B/gpu-seconds.tsv
        if grep -q 'Device not supported' "$B/jobs/$i.log"; then skip 1 "$name: compute-sanitizer does not know this device"
        elif [ $kind = one ]; then
            [ "$status" = 0 ] || tail -40 "$B/jobs/$i.log"
            result "$name ($took s)" "$status"
        else
            { # print the first failures; if the program printed no counts, print the end of its log
                grep -v '^ok ' "$B/jobs/$i.log" | grep -vxF "$line" | head -40
                if [ -n "$line" ]; then echo "$line"; else tail -20 "$B/jobs/$i.log"; fi
            } | sed "s/^/       /"
            echo "       $name: $took s"
            if [ -z "$line" ]; then result "$name prints its counts (exit $status)" 1; continue; fi
            # shellcheck disable=SC2046
            add $(echo "$line" | tr -dc '0-9 ' | cut -d' ' -f1-5)
            name_failures "$B/jobs/$i.log"
        fi
    done
    gpu_counted=$gpu_n
}
gpu_uses() { # WORD...: the test programs among the words of a command
    local word
    for word in "$@"; do
        case $word in
        $B/mutants) echo mutants/mutants ;;
        $B/*) echo "${word#$B/}" ;;
        esac
    done | tr '\n' ' '
}
gpu_shares() { # N: divides the tests into N shares of about equal length: lines 'SHARE<tab>SECONDS<tab>TEST<tab>PROGRAMS'
    # A long test goes first, to the share that has the least. Up to four tests of a group run at a time; in a share of its own
    # group, one takes a fourth of its time. A test without a measured time counts as 30 s.
    (
        gpu_list=$B/gpu_list && : >$gpu_list
        gpu_all
    )
    awk -F'\t' -v OFS='\t' 'NR == FNR {if (!/^#/) seconds[$2] = $1; next}
        {group[FNR] = $1; name[FNR] = $2; uses[FNR] = $3; n[$1]++; last = FNR}
        END {for (i = 1; i <= last; i++) {
            s = name[i] in seconds ? seconds[name[i]] : 30
            k = n[group[i]] < 4 ? n[group[i]] : 4
            printf "%.1f\t%s\t%s\n", s / k, name[i], uses[i]
        }}' test/results/gpu-seconds.tsv $B/gpu_list | LC_ALL=C sort -t "$(printf '\t')" -k1,1nr -k2,2 |
        awk -F'\t' -v OFS='\t' -v shares="$1" '{
            best = 1
            for (i = 2; i <= shares; i++) if (load[i] < load[best]) best = i
            load[best] += $1
            print best, $1, $2, $3
        }'
}
gpu_shares_are_whole() { # every test is in one share and only in one; three shares have about the same length
    local n
    for n in 1 2 3 7; do
        gpu_shares $n >$B/gpu_shares || return 1
        [ "$(cut -f3 $B/gpu_shares | sort)" = "$(cut -f2 $B/gpu_list | sort)" ] || return 1
        [ -z "$(cut -f3 $B/gpu_shares | sort | uniq -d)" ] || return 1
        [ "$(cut -f1 $B/gpu_shares | sort -u | wc -l)" = $n ] || return 1
        [ "$(gpu_shares $n)" = "$(cat $B/gpu_shares)" ] || return 1
    done
    gpu_shares 3 | awk -F'\t' '{sum[$1] += $2; all += $2} END {for (i in sum) if (sum[i] > 0.4 * all) exit 1}' || return 1
    for n in test/gpu_*.cu; do grep -q "$(basename "$n" .cu)" $B/gpu_list || return 1; done
}
gpu_choose_share() { # reads GPU_PART; writes the names of its tests and of the programs that they need
    local i=${GPU_PART%/*} n=${GPU_PART#*/}
    if ! [ "$i" -ge 1 ] 2>/dev/null || ! [ "$n" -ge "$i" ] 2>/dev/null; then
        echo "GPU_PART=$GPU_PART: expected a share and their number, such as 2/3" >&2
        exit 2
    fi
    gpu_shares "$n" | awk -F'\t' -v share="$i" '$1 == share' >$B/gpu_chosen
    cut -f3 $B/gpu_chosen >$B/gpu_share_tests
    cut -f4 $B/gpu_chosen | tr ' ' '\n' | sort -u >$B/gpu_share_programs
}
gpu_sources() { # what a test program is made of, as one hash
    echo "$GPU_ARCH $(cat toka_kernels.cu toka.h toka.c test/gpu*.[ch]* test/soak.c test/gpu_mutants.py test/check.h test/state.h | sha256sum)"
}
gpu_is_new() { # FILE: it is there and made of the present sources
    [ -f "$B/$1" ] && [ "$(cat "$B/$1.made" 2>/dev/null)" = "$(gpu_sources)" ]
}
gpu_must_build() { # FILE: it is needed and not there
    { [ -z "${GPU_PART-}" ] || grep -qxF -e "$1" $B/gpu_share_programs; } && ! gpu_is_new "$1"
}
gpu_build() { # FILE
    rm -f "$B/$1.made"
    gpu_make "$1" && gpu_sources >"$B/$1.made"
}
gpu_make() { # FILE: builds a test program for GPU_ARCH
    local nvcc="nvcc -std=c++20 -O3 -Xcompiler -fno-exceptions -gencode arch=compute_$GPU_ARCH,code=sm_$GPU_ARCH"
    local c="$CC -std=c11 -O2 -w -I. -DTOKA_WITH_CUDA" half=$B/toka_gpu.o # a test that includes toka_kernels.cu needs the rank runtime of toka.c
    rm -f "$B/$1" # if the build fails, no old program must run
    case $1 in
    kernels.o) $nvcc -c toka_kernels.cu -o $B/kernels.o ;;
    mutants/mutants) GPU_ARCH=$GPU_ARCH python3 test/gpu_mutants.py build ;;
    gpu_ops | gpu_model | gpu_ranks) # these include toka.c
        $c -c "test/$1.c" -o "$B/$1.o" && $nvcc -o "$B/$1" "$B/$1.o" $B/kernels.o -lm -lpthread ;;
    toka_gpu.o) $c -c toka.c -o $B/toka_gpu.o ;;
    soak_gpu)
        $c -c test/soak.c -o $B/soak.o &&
            $nvcc -o $B/soak_gpu $B/soak.o $B/toka_gpu.o $B/kernels.o -lm -lpthread ;;
    *_1204) $nvcc -DNVCC_VERSION=1204 -o "$B/$1" "test/${1%_1204}.cu" $half -lm -lpthread ;; # the code paths for older toolkits
    *)
        if [ -f "test/$1.c" ]; then half="$B/$1.o" && $c -c "test/$1.c" -o "$half" || return; fi # it includes toka.c
        $nvcc -o "$B/$1" "test/$1.cu" $half -lm -lpthread ;;
    esac
}
gpu_programs() {
    local name linked='' alone=''
    for name in gpu_ops gpu_model gpu_ranks soak_gpu; do ! gpu_must_build $name || linked="$linked $name"; done
    for name in mutants/mutants gpu_attn_1204 $(cd test && for name in gpu_*.cu; do echo "${name%.cu}"; done); do
        ! gpu_must_build "$name" || alone="$alone $name"
    done
    [ -z "$linked$alone" ] || gpu_is_new toka_gpu.o || gpu_job one "toka_gpu.o compiles" 0 gpu_build toka_gpu.o
    gpu_collect
    [ -z "$linked" ] || gpu_is_new kernels.o || gpu_job one "kernels.o compiles" 0 gpu_build kernels.o
    for name in $alone; do gpu_job one "$name compiles" 0 gpu_build "$name"; done
    gpu_collect
    for name in $linked; do gpu_job one "$name compiles" 0 gpu_build "$name"; done
    gpu_collect
}
gpu_pack() { # puts the programs into one file, which can be taken to another machine
    local name made=()
    [ -z "${GPU_PART-}" ] || gpu_choose_share
    gpu_programs
    for name in $B/*.made $B/mutants/*.made; do
        name=${name%.made}
        case $name in *.o | *'*'*) continue ;; esac
        [ -n "${GPU_PART-}" ] && ! grep -qxF -e "${name#$B/}" $B/gpu_share_programs || made+=("$name" "$name.made")
    done
    step "the programs are packed" tar -cf $B/gpu.tar "${made[@]}"
}
gpu_sanitize() {
    local source name tool size
    # 4096 barriers per block: with its default, synccheck tracks too few barriers for gpu_attn, and a launch fails.
    local -A flags=([synccheck]="--num-cuda-barriers 4096")
    command -v compute-sanitizer >/dev/null || gpu_missing="no compute-sanitizer"
    for tool in racecheck memcheck synccheck; do
        for source in test/gpu_*.cu; do
            name=$(basename "$source" .cu) size=small
            [ $tool = racecheck ] && grep -q '"tiny"' "$source" && size=tiny # racecheck makes a test of seconds take minutes
            gpu_job one "$name, $tool" 300 compute-sanitizer --tool $tool ${flags[$tool]-} --error-exitcode 9 "$B/$name" $size
        done
    done
    gpu_missing=
}
gpu_soak() { # NAME SEED FLAGS...
    local model=$1 seed=$2
    shift 2
    gpu_job one "soak of $(basename "$model"), seed $seed" 300 $B/soak_gpu --device cuda --model "$model" --seconds 15 --seed "$seed" "$@"
}
gpu_shared() { # all tests that may share the GPU with other programs, the longest first
    local source name
    gpu_sanitize
    gpu_job counts "accuracy compared with the CPU" 600 python3 test/gpu_accuracy.py
    gpu_job counts "the program on the GPU" 600 python3 test/gpu_cli.py
    gpu_job counts "adapters on the GPU" 600 python3 test/gpu_lora.py
    python3 -c 'import torch, transformers' 2>/dev/null || gpu_missing="no torch and transformers"
    gpu_job counts "comparison with transformers" 600 python3 test/gpu_hf.py $B/gpu_model
    gpu_missing=
    gpu_job counts "models of test/models" 300 python3 test/gpu_models.py $B/gpu_model
    gpu_soak test/model 1
    gpu_soak test/model 2 --kv-tokens 40000 --max-model-len 1024 --max-num-seqs 512
    gpu_soak test/fixtures/llama-tied 3
    mkdir -p $B/gptoss && python3 test/model_weights.py gptoss $B/gptoss >/dev/null 2>&1 || gpu_missing="no numpy"
    gpu_soak $B/gptoss 4 --max-num-seqs 5 --max-num-batched-tokens 24 --kv-tokens 2000 --max-model-len 512 # its windows give pages back
    gpu_missing=
    for source in test/gpu_*.cu test/gpu_attn_1204.cu test/gpu_ops.c test/gpu_model.c; do
        [ "$source" != test/gpu_samp.c ] || continue
        name=$(basename "${source%.*}")
        gpu_job counts "$name" 600 "$B/$name"
    done
    gpu_collect
}
gpu_ranks() { # on all GPUs; if there is only one GPU, all ranks share it
    local share=() # load kernels at the start and use many queues, so that no rank's kernel waits behind another rank's kernel
    [ "$(nvidia-smi -L 2>/dev/null | wc -l)" -gt 1 ] || share=(TOKA_DEBUG_SHARE_GPU=1 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
    gpu_job counts gpu_ranks 600 env "${share[@]}" $B/gpu_ranks
    gpu_job counts "the program on several GPUs" 600 env "${share[@]}" python3 test/gpu_ranks.py batches server
    gpu_job counts "gpu_ranks without peer access" 600 env "${share[@]}" TOKA_DEBUG_NO_PEER=1 $B/gpu_ranks model,eight,wide,llama-tied
    gpu_job counts "the program without peer access" 600 env "${share[@]}" TOKA_DEBUG_NO_PEER=1 python3 test/gpu_ranks.py batches
    gpu_collect
    python3 -c 'import sys, torch; sys.exit(torch.cuda.device_count() < 2)' 2>/dev/null || gpu_missing="no torch, or one GPU"
    gpu_job one "weights over NCCL" 600 python3 test/gpu_nccl.py
    gpu_missing=
    gpu_collect
    # these run alone: they cause faults of the GPU
    gpu_job counts "ranks that fail" 600 env "${share[@]}" python3 test/gpu_ranks.py faults
    gpu_collect
    gpu_job counts "ranks that fail without peer access" 600 env "${share[@]}" TOKA_DEBUG_NO_PEER=1 python3 test/gpu_ranks.py faults
    gpu_collect
}
gpu_tests() {
    if ! ./toka devices | grep -q '^cuda.*compute capability'; then skip 1 "no GPU"; return; fi
    GPU_ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$GPU_ARCH" = 90 ] && GPU_ARCH=90a
    if [ "${GPU_PART-}" ]; then
        [ ! -f $B/gpu.tar ] || tar -xf $B/gpu.tar
        gpu_choose_share
        gpu_programs
        gpu_share=$B/gpu_share_tests
    else gpu_programs; fi
    : >$B/gpu-seconds.tsv # the seconds of each test, for test/results/gpu-seconds.tsv
    gpu_all
}
gpu_all() { # all tests, in the order in which they run
    gpu_job counts "start to first token" 300 python3 test/gpu_start.py # runs alone: it measures time
    gpu_collect
    gpu_ranks
    gpu_shared
    # Runs alone: some mutants cause faults of the GPU.
    gpu_job counts "mutants of the kernels are caught" 600 python3 test/gpu_mutants.py run $B/mutants --timeout 200
    gpu_collect
}

# ---- Peers: comparisons with programs that most machines do not have. They are run by hand; test/results/peers.md has a table ----

peer() { # NAME NEEDS COMMAND...: runs a comparison, or says what to install. NEEDS: python packages, gpu, data, nvcc
    local name=$1 needs=$2 need missing='' outcome
    shift 2
    for need in $needs; do
        case $need in
        gpu) ./toka devices | grep -q '^cuda.*compute capability' || missing="$missing, a GPU and ./toka built with nvcc" ;;
        nvcc) command -v nvcc >/dev/null || missing="$missing, nvcc" ;;
        data) [ -d "$TOKA_TEST_DATA/datasets" ] || missing="$missing, the public test data in TOKA_TEST_DATA" ;;
        *) $PYTHON -c "import $need" 2>/dev/null || missing="$missing, $need (pip install $need)" ;;
        esac
    done
    if [ "$missing" ]; then
        skip 1 "$name: it needs ${missing#, }"
        outcome="not run: it needs ${missing#, }"
    else
        step "$name" "$@"
        outcome=$(tail -1 $LOG)
        { echo && echo "$name:" && echo && sed 's/^/    /' $LOG; } >>$B/peers.log
    fi
    echo "| $name | ${outcome//|/,} |" >>$B/peers.md
}
peers_gemm() { gpu_must_build gpu_gemm && { gpu_build gpu_gemm || return; }; $PYTHON test/bench_peers.py $B/gpu_gemm --min-M 256; }
peers_logits() {
    local name
    for name in kernels.o gpu_model; do gpu_is_new $name || gpu_build $name || return; done
    $PYTHON test/gpu_hf.py $B/gpu_model
}
peers_dataset() { # KIND MODEL FLAGS...: the same dataset through toka and vLLM
    local kind=$1 model=$2
    shift 2
    $PYTHON test/make_dataset.py $kind $B/$kind.jsonl "$@" &&
        $PYTHON test/bench_peers_e2e.py $B/$kind.jsonl --model $model --engines toka,vllm
}
peers_ray() { NVCC= ./build.sh lib && $PYTHON test/ray_judge.py; }
peers_tests() {
    PYTHON=${PYTHON:-python3}
    GPU_ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)
    [ "$GPU_ARCH" = 90 ] && GPU_ARCH=90a
    [ -x ./toka ] || ./build.sh
    {
        echo "# Comparisons with other programs"
        echo
        echo "\`TOKA_TESTS=peers test/run.sh\`, $(date -u +%F), commit $(git rev-parse --short HEAD), $(nproc) cores," \
            "$(nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | head -1 | grep . || echo no GPU)."
        echo
        echo "| comparison | outcome |"
        echo "|---|---|"
    } >$B/peers.md
    : >$B/peers.log
    peer "texts of test/templates.json and those of Jinja2" jinja2 $PYTHON test/check_templates.py
    peer "logits of test/fixtures and those of transformers" "torch transformers safetensors" $PYTHON test/make_fixtures.py --check
    peer "logits of test/models and those of transformers" "torch transformers safetensors" $PYTHON test/make_models.py --check
    peer "weights of test/models and the formats' packers" "torch transformers safetensors compressed_tensors" \
        $PYTHON test/make_models.py --packers
    peer "typed answers and forced calls in client libraries" \
        "openai anthropic litellm langchain_openai instructor pydantic_ai outlines lm_eval" $PYTHON test/clients.py
    peer "test/recipes/ray_map.py, two workers, one of them killed" "ray numpy" peers_ray
    peer "texts, chats and scores through TRL's own client" "trl torch transformers" $PYTHON test/trl_judge.py
    peer "two servers behind routers and nginx, one of them killed" "vllm_router sglang_router" $PYTHON test/router_judge.py
    peer "logits on the GPU and those of transformers" "gpu nvcc torch transformers" peers_logits
    peer "GEMMs and those of PyTorch" "gpu nvcc torch" peers_gemm
    peer "prefill attention of PyTorch" "gpu torch" $PYTHON test/bench_peers_attn.py
    peer "GSM8K prompts x 24 samples, toka and vLLM" "gpu data vllm" peers_dataset monkeys llama-3.2-1b --samples 24
    peer "conversations, toka and vLLM" "gpu data vllm" peers_dataset chat llama-3.1-8b --requests 600
    cat $B/peers.log >>$B/peers.md
    cat $B/peers.md
}

# ---- Which parts run ----

run_gpu() { # on a GPU, which no other test may use meanwhile
    [ -x ./toka ] || ./build.sh
    gpu_tests
}
program=$([ -x ./toka ] || echo program) # for a group that needs ./toka, new or not
case $WANT-$TESTS in
*-peers) peers_tests ;;
all-fast) run_parts program san venv py fuzzers source soak fuzz1 fuzz2 ;;
all-all)
    run_parts program san venv py tsan fuzzers asan source race unit nvcc soak fuzz1 fuzz2
    run_parts alone
    run_gpu
    ;;
build-*) run_parts program source ;;
unit-fast) run_parts san soak ;; # one build for bugs of both kinds
unit-all) run_parts unit soak ;;
san-fast) run_parts san ;;
san-all) run_parts $program venv san tsan asan race ;;
py-fast) run_parts $program venv py ;;
py-all) run_parts $program venv py nvcc && run_parts alone ;;
fuzz-*) run_parts fuzzers fuzz1 fuzz2 ;;
gpu-*) run_gpu ;;
gpubuild-*) gpu_pack ;;
gpushare-*)
    gpu_choose_share
    cut -f2,3 $B/gpu_chosen
    exit
    ;;
*) echo "test/run.sh: $WANT: expected build, unit, san, py, fuzz, gpu, gpubuild or gpushare" >&2 && exit 2 ;;
esac
if [ -s $failures ]; then
    echo "These failed:"
    sed 's/^/    /' $failures
fi
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
