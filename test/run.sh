#!/bin/bash
# test/run.sh - builds toka, then runs every test there is. Last line: 'N passed, N failed, N skipped'; exit 1 if one failed.
#
#   test/run.sh              everything
#   test/run.sh unit         only the C unit tests          (also: build, san, py, fuzz, gpu)
#   GPU_ARCH=90a test/run.sh gpubuild   only compiles the GPU's tests, on a machine without one
#
# Environment: FUZZ_SECONDS   time for each fuzzer (10)
#              GPU_JOBS        programs side by side on the GPU, where no time is measured (the cores, at most 12)
#              TOKA_TEST_DATA  folder of the public test data (../shared/data); tests that need it are skipped without it
# Needs a C compiler. With clang: fuzzers too. With python3 and a package index (or pytest, tokenizers, numpy and jinja2 already
# there): comparisons with Hugging Face tokenizers and jinja2, in a virtual environment under test/.venv. With nvcc: the CUDA file
# is built for all architectures; with a GPU too: the tests of every kernel and of whole models on it.
set -u
cd "$(dirname "$0")/.." || exit
export TOKA_TEST_DATA=${TOKA_TEST_DATA:-../shared/data}
CC=${CC:-cc}
FUZZ_SECONDS=${FUZZ_SECONDS:-10}
GPU_JOBS=${GPU_JOBS:-$(($(nproc) > 12 ? 12 : $(nproc) > 2 ? $(nproc) : 2))}
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

without_fast_math() { ! $CC -O2 -ffast-math -fsyntax-only toka.c 2>$B/fast.log && grep -q "needs infinities and NaN" $B/fast.log; }
only_libc() { # libraries that ./toka asks for
    case $(c++ -print-file-name=libstdc++.a 2>/dev/null) in /*) ;; *) return 0 ;; esac # without it C++'s is one
    ! readelf -d toka | grep NEEDED | grep -v -e 'libc\.so' -e 'libm\.so' -e 'libpthread' -e 'libdl' -e 'librt' -e 'ld-linux'
}
copy_tree() { # to $B/copy: what git knows or would
    rm -rf $B/copy && mkdir -p $B/copy && git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t $B/copy
}
only_the_binary() { # in a copy of the tree, build.sh adds ./toka and nothing else
    copy_tree || return 1
    (cd $B/copy && find . -type f | sort >../before && ./build.sh && find . -type f | sort >../after) || return 1
    rm -rf $B/copy
    [ "$(comm -13 $B/before $B/after)" = ./toka ] && [ -z "$(comm -23 $B/before $B/after)" ]
}
links_with_sanitizer() { # CFLAGS and LDFLAGS reach the link; each stage is told before it runs
    copy_tree || return 1
    (cd $B/copy && CC=clang CFLAGS="-O1 -fsanitize=address,undefined" LDFLAGS=-Wl,-z,now NVCC='' ./build.sh >../log.build &&
        readelf -d toka | grep -q NOW && nm toka | grep -q __asan_init && ./toka -p "Tom has 12 apples." --max-tokens 2) || return 1
    rm -rf $B/copy
    [ "$(grep -c -e '^build.sh: compiling toka.c with clang (.*)$' -e '^build.sh: linking ./toka (.*)$' $B/log.build)" = 2 ]
}
links_with_nvcc() { # a program in nvcc's place: makes an object, and says what it was to link with
    local bin=$B/false_nvcc
    copy_tree && mkdir -p $bin || return 1
    cat >$bin/nvcc <<'EOF'
#!/bin/sh
case " $* " in *" -c "*) echo | cc -x c -c - -o "${0%/*}/empty.o" && for last; do :; done && exec cp "${0%/*}/empty.o" "$last" ;; esac
printf '%s\n' "$@" >"${0%/*}/nvcc.log"
exit 1
EOF
    chmod +x $bin/nvcc
    (cd $B/copy && CC=gcc CFLAGS="-O0 -fsanitize=address,undefined" LDFLAGS=-Wl,-z,now NVCC="$OLDPWD/$bin/nvcc" ./build.sh >../log.build)
    rm -rf $B/copy
    grep -q '^build.sh: compiling toka_kernels.cu with .* (.* minutes)$' $B/log.build && grep -qx -e '-fsanitize=address\\,undefined' $bin/nvcc.log &&
        grep -qx -e '-Wl\\,-z\\,now' $bin/nvcc.log && grep -qx 'g++' $bin/nvcc.log && [ "$(grep -cx -e -Xcompiler $bin/nvcc.log)" -ge 3 ]
}
runnable() { # every script with a #! line
    ! git ls-files -z test | xargs -0 grep -lZ -m 1 '^#!' | xargs -0 -I{} sh -c 'head -c 2 "{}" | grep -q "^#!" && [ ! -x "{}" ] && echo "{} cannot be run"' | grep .
}
build_tests() {
    step "build.sh builds ./toka without a warning" ./build.sh
    step "build.sh leaves nothing but the binary" only_the_binary
    step "the program needs no library but libc's" only_libc
    step "CFLAGS and LDFLAGS reach nvcc where it links" links_with_nvcc
    step "toka.c compiles alone as a library" $CC $WARN -O2 -c toka.c -o $B/toka.o
    step "and with all warnings of a project that takes it in" $CC $WARN -Wpedantic -fsyntax-only toka.c
    step "and with the chapters of the server" $CC $WARN -Wpedantic -DTOKA_SERVER -fsyntax-only toka.c
    step "and without asserts" $CC $WARN -O2 -DNDEBUG -fsyntax-only toka.c
    step "and refuses -ffast-math, with which it would compute something else" without_fast_math
    step "a program that only includes toka.h links it" $CC $WARN -I. test/example.c $B/toka.o -lm -lpthread -o $B/example
    step "and runs" $B/example test/model "Tom has 12 apples."
    if command -v clang >/dev/null; then
        step "CFLAGS and LDFLAGS reach the link" links_with_sanitizer
        step "clang compiles it without a warning" clang $WARN -Wpedantic -fsyntax-only -DTOKA_MAIN toka.c
    else skip 2 "no clang"; fi
    if command -v c++ >/dev/null; then
        step "toka.h is C++ too" c++ -Wall -Wextra -Werror -fsyntax-only -x c++ toka.h
    fi
    step "what says how it is run can be run" runnable
    if command -v python3 >/dev/null; then step "the mutations of the GPU tests fit the kernels" python3 test/gpu_mutants.py check; fi
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
    TOKA_DEVICE=cpu $py -m pytest -q -rs -p no:cacheprovider --junitxml=$B/pytest.xml test
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
    if ! command -v nvcc >/dev/null; then skip 1 "no nvcc"; return; fi
    $py test/nvcc_versions.py 12.4 2>&1
    status=$?
    if [ $status = 3 ]; then skip 1 "no ptxas 12.4 in the package index"; else result "the oldest toolkit compiles the kernels without spills" $status; fi
}

# ---- The library under the sanitizers (clang: it can leave the model's arithmetic fast), for the soak and the server ----

sanitized() { # NAME FLAGS...: $B/toka_NAME.o
    local name=$1
    shift
    step "toka compiles ($name)" clang -std=c11 -g -O2 -fsanitize-ignorelist=test/fuzz.ignore -DTOKA_EMBED='"test/model"' "$@" -c toka.c \
        -o "$B/toka_$name.o"
}
sanitize() {
    if ! command -v clang >/dev/null; then skip 15 "no clang"; return; fi
    sanitized asan -DTOKA_SERVER -fsanitize=address,undefined -fno-sanitize-recover=undefined
    sanitized tsan -DTOKA_SERVER -fsanitize=thread
    soak_san
    server_san
}

# ---- Soak: an adversarial mix on the library, a part of it run again alone and compared ----

soak() { # NAME: $B/soak_NAME, 15 seconds: the embedded model; smaller ones, for more turnover
    local seed=1 model
    for model in test/model test/fixtures/llama-tied "$TOKA_TEST_DATA/weights/stories260K"; do
        if [ ! -d "$model" ]; then skip 1 "no public test data"; continue; fi
        step "soak of $(basename "$model"), seed $seed ($1)" "$B/soak_$1" --model "$model" --seconds 5 --seed $seed
        grep '^soak: seed' $B/log | sed 's/^/       /'
        seed=$((seed + 1))
    done
}
soak_tests() {
    [ $B/toka.o -nt toka.c ] && [ $B/toka.o -nt toka.h ] || step "toka.c compiles as a library" $CC $WARN -O2 -c toka.c -o $B/toka.o
    step "soak compiles" $CC $WARN -O2 -I. -o $B/soak_fast test/soak.c $B/toka.o -lm -lpthread
    soak fast
}
soak_san() {
    step "soak compiles (asan)" clang -std=c11 -g -O1 -I. -fsanitize=address,undefined -o $B/soak_asan test/soak.c $B/toka_asan.o -lm -lpthread
    soak asan
    step "soak compiles (tsan)" clang -std=c11 -g -O1 -I. -fsanitize=thread -o $B/soak_tsan test/soak.c $B/toka_tsan.o -lm -lpthread
    soak tsan
}

# ---- The server under the sanitizers, against the same tests ----

server_san() {
    local py=test/.venv/bin/python
    if [ ! -x $py ]; then skip 3 "no test/.venv yet"; return; fi
    echo 'int toka_main(int, char **); int main(int argc, char **argv) { return toka_main(argc, argv); }' >$B/main.c
    step "toka links (asan)" clang -fsanitize=address,undefined -o $B/toka_asan $B/main.c $B/toka_asan.o -lm -lpthread
    step "server tests (asan)" env ASAN_OPTIONS=quarantine_size_mb=2 TOKA_BINARY="$PWD/$B/toka_asan" $py \
        -m pytest -q -p no:cacheprovider test/test_server.py test/test_faults.py
    step "toka links (tsan)" clang -fsanitize=thread -o $B/toka_tsan $B/main.c $B/toka_tsan.o -lm -lpthread
    rm -f $B/tsan.log.*
    step "server tests (tsan)" env TSAN_OPTIONS="log_path=$PWD/$B/tsan.log" TOKA_BINARY="$PWD/$B/toka_tsan" $py -m pytest -q \
        -p no:cacheprovider test/test_server.py test/test_faults.py \
        -k "sigterm or pipelining or many_streams or disconnect or full_queue or leaks or keys or metrics or split or fails or hangs"
    step "no data race in the server" no_files $B/tsan.log.*
}
no_files() { # the pattern itself is what is left when nothing matches
    [ ! -e "$1" ] || { cat "$@"; false; }
}

# ---- Fuzzers: a corpus kept in test/corpus, new findings go to test/.build ----

fuzz_tests() {
    if ! command -v clang >/dev/null || ! echo 'int LLVMFuzzerTestOneInput(void){return 0;}' |
        clang -x c -fsanitize=fuzzer - -o $B/fuzz_probe 2>/dev/null; then
        skip "$(ls test/fuzz_*.c | wc -l)" "no clang with libFuzzer"
        return
    fi
    for source in test/fuzz_*.c; do
        local name size
        name=$(basename "$source" .c)
        step "$name compiles" clang -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined \
            -fsanitize-ignorelist=test/fuzz.ignore -fsanitize-coverage-ignorelist=test/fuzz.ignore -Wno-unused-function -o $B/$name "$source" -lm -lpthread
        mkdir -p $B/corpus_$name
        step "$name, $FUZZ_SECONDS s" $B/$name -max_total_time="$FUZZ_SECONDS" -timeout=10 -rss_limit_mb=3000 -verbosity=0 \
            -print_final_stats=1 -artifact_prefix=$B/ $B/corpus_$name "test/corpus/${name#fuzz_}"
        grep -h 'number_of_executed_units' $B/log | sed "s/^stat::/       $name:/"
    done
}

# ---- The GPU: every op against float64, whole models against the reference, under compute-sanitizer too ----

gpu_n=0 gpu_counted=0 # jobs begun, and those whose results were counted
gpu_job() { # KIND NAME SECONDS COMMAND...: runs it beside others; KIND counts: its last line is 'N passed, N failed, N skipped'; one: it is a test
    local at=$B/jobs/$gpu_n kind=$1 limit=$3
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
gpu_collect() { # waits for all jobs, and counts them in the order in which they were given; their logs stay in test/.build/jobs
    local i kind name status took line
    wait
    for ((i = gpu_counted; i < gpu_n; i++)); do
        read -r kind name <"$B/jobs/$i.name"
        status=1 took=0 # of a job that was killed before it could say
        [ ! -f "$B/jobs/$i.end" ] || read -r status took <"$B/jobs/$i.end"
        line=$(grep -E '^[0-9]+ passed, [0-9]+ failed, [0-9]+ skipped' "$B/jobs/$i.log" | tail -1)
        if grep -q 'Device not supported' "$B/jobs/$i.log"; then skip 1 "$name: compute-sanitizer does not know this device"
        elif [ $kind = one ]; then
            [ "$status" = 0 ] || tail -40 "$B/jobs/$i.log"
            result "$name ($took s)" "$status"
        else
            { # what failed first, and how a program ended that did not say
                grep -v '^ok ' "$B/jobs/$i.log" | grep -vxF "$line" | head -40
                if [ -n "$line" ]; then echo "$line"; else tail -20 "$B/jobs/$i.log"; fi
            } | sed "s/^/       /"
            echo "       $name: $took s"
            if [ -z "$line" ]; then result "$name ends (exit $status)" 1; continue; fi
            # shellcheck disable=SC2046
            add $(echo "$line" | tr -dc '0-9 ' | cut -d' ' -f1-5)
        fi
    done
    gpu_counted=$gpu_n
}
gpu_is_new() { # FILE...: all are there, and newer than what they are made of
    local file
    for file in "$@"; do
        [ -f "$B/$file" ] && [ -z "$(find toka_kernels.cu toka.h toka.c test/gpu*.[ch]* test/soak.c test/gpu_mutants.py -newer "$B/$file")" ] || return
    done
}
gpu_make() { # FILE: a test program for GPU_ARCH
    local nvcc="nvcc -std=c++20 -O3 -Xcompiler -fno-exceptions -gencode arch=compute_$GPU_ARCH,code=sm_$GPU_ARCH"
    local c="$CC -std=c11 -O2 -w -I. -DTOKA_WITH_CUDA" half=
    rm -f "$B/$1" # nobody runs an old one where this fails
    case $1 in
    kernels.o) $nvcc -c toka_kernels.cu -o $B/kernels.o ;;
    mutants/mutants) GPU_ARCH=$GPU_ARCH python3 test/gpu_mutants.py build ;;
    gpu_ops | gpu_model | gpu_ranks) # these include toka.c
        $c -c "test/$1.c" -o "$B/$1.o" && $nvcc -o "$B/$1" "$B/$1.o" $B/kernels.o -lm -lpthread ;;
    soak_gpu) $c -c toka.c -o $B/toka_gpu.o && $c -c test/soak.c -o $B/soak.o && $nvcc -o $B/soak_gpu $B/soak.o $B/toka_gpu.o $B/kernels.o -lm -lpthread ;;
    *_1204) $nvcc -DNVCC_VERSION=1204 -o "$B/$1" "test/${1%_1204}.cu" -lm -lpthread ;; # what older toolkits compile
    *)
        if [ -f "test/$1.c" ]; then half="$B/$1.o" && $c -c "test/$1.c" -o "$half" || return; fi
        $nvcc -o "$B/$1" "test/$1.cu" $half -lm -lpthread ;;
    esac
}
gpu_programs() {
    local name with_kernels="gpu_ops gpu_model gpu_ranks soak_gpu" apart
    apart=$(cd test && for name in gpu_*.cu; do echo "${name%.cu}"; done)
    # shellcheck disable=SC2086
    gpu_is_new $with_kernels kernels.o || apart="kernels.o $apart"
    apart="$apart gpu_attn_1204"
    for name in mutants/mutants $apart; do gpu_is_new $name || gpu_job one "$name compiles" 0 gpu_make $name; done
    gpu_collect
    for name in $with_kernels; do gpu_is_new $name || gpu_job one "$name compiles" 0 gpu_make $name; done
    gpu_collect
}
gpu_sanitize() {
    local source name tool size
    local -A flags=([synccheck]="--num-cuda-barriers 4096") # of a block; without, the tool counts too few of gpu_attn's, and a launch fails
    if ! command -v compute-sanitizer >/dev/null; then skip 1 "no compute-sanitizer"; return; fi
    for tool in racecheck memcheck synccheck; do
        for source in test/gpu_*.cu; do
            name=$(basename "$source" .cu) size=small
            [ $tool = racecheck ] && grep -q '"tiny"' "$source" && size=tiny # racecheck takes minutes for what takes seconds
            gpu_job one "$name, $tool" 300 compute-sanitizer --tool $tool ${flags[$tool]-} --error-exitcode 9 "$B/$name" $size
        done
    done
}
gpu_soak() { # NAME SEED FLAGS...
    local model=$1 seed=$2
    shift 2
    gpu_job one "soak of $(basename "$model"), seed $seed" 300 $B/soak_gpu --device cuda --model "$model" --seconds 15 --seed "$seed" "$@"
}
gpu_beside() { # all that may run beside other programs on the GPU, the longest first
    local source name
    gpu_sanitize
    gpu_job counts "accuracy beside the CPU" 600 python3 test/gpu_accuracy.py
    gpu_job counts "the program on the GPU" 600 python3 test/gpu_cli.py
    if python3 -c 'import torch, transformers' 2>/dev/null; then
        gpu_job counts "against transformers" 600 python3 test/gpu_hf.py $B/gpu_model
    else skip 1 "no torch and transformers"; fi
    gpu_soak test/model 1
    gpu_soak test/model 2 --kv-tokens 40000 --max-model-len 1024 --max-num-seqs 512
    gpu_soak test/fixtures/llama-tied 3
    for source in test/gpu_*.cu test/gpu_attn_1204.cu test/gpu_ops.c test/gpu_model.c; do
        [ "$source" != test/gpu_samp.c ] || continue
        name=$(basename "${source%.*}")
        gpu_job counts "$name" 600 "$B/$name"
    done
    gpu_collect
}
gpu_ranks() { # over all GPUs that there are; where there is one, all ranks on it. Ranks that wait for each other are given up after some time
    local share=()
    [ "$(nvidia-smi -L | wc -l)" -gt 1 ] || share=(TOKA_DEBUG_SHARE_GPU=1 CUDA_MODULE_LOADING=EAGER CUDA_DEVICE_MAX_CONNECTIONS=32)
    gpu_job counts gpu_ranks 600 env "${share[@]}" $B/gpu_ranks
    gpu_job counts "the program on several GPUs" 600 env "${share[@]}" python3 test/gpu_ranks.py batches server
    gpu_collect
    gpu_job counts "ranks that fail" 600 env "${share[@]}" python3 test/gpu_ranks.py faults # alone: they make the GPU fault
    gpu_collect
}
gpu_tests() {
    if ! ./toka devices | grep -q '^cuda.*compute capability'; then skip 1 "no GPU"; return; fi
    GPU_ARCH=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
    [ "$GPU_ARCH" = 90 ] && GPU_ARCH=90a
    gpu_programs
    gpu_job counts "start to first token" 300 python3 test/gpu_start.py # alone: a time
    gpu_collect
    gpu_ranks
    gpu_beside
    gpu_job counts "mutants of the kernels are caught" 600 python3 test/gpu_mutants.py run --timeout 200 # alone: some make the GPU fault
    gpu_collect
}

wants build && build_tests
wants unit && unit fast -O2
wants unit && soak_tests
wants san && unit san $SAN
wants san && unit tsan -g -O1 -fsanitize=thread -Wno-tsan engine: cpu_pool ranks_shapes ranks_lost ranks_abort "tokenizer: threads"
[ -x ./toka ] || ./build.sh
wants gpu && gpu_tests
[ "$WANT" = gpubuild ] && gpu_programs
wants py && python_tests
wants san && sanitize
wants fuzz && fuzz_tests
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
