#!/bin/bash
# test/bench.sh - repeats the figures of the README, each a ratio of two things timed in one run on this machine.
#   test/bench.sh [cpu|json|tokenizer|accuracy|memory ...]     default: all
# tokenizer and json need the public test data (TOKA_TEST_DATA), tokenizer also the virtual environment of test/run.sh.
set -eu
cd "$(dirname "$0")/.."
export TOKA_TEST_DATA=${TOKA_TEST_DATA:-../shared/data}
CC=${CC:-cc}
B=test/.build
mkdir -p $B
FLAGS="-std=c11 -O3 -fno-trapping-math"
unit() {
    [ -x $B/unit_bench ] || $CC $FLAGS -o $B/unit_bench test/unit.c -lm -lpthread
    $B/unit_bench "$@"
}
rm -f $B/unit_bench
for what in ${*:-cpu json tokenizer accuracy memory}; do
    echo "== $what"
    case $what in
    cpu) # decode against a plain read loop, prefill against a loop of multiply-adds, shared prefix on against off
        $CC $FLAGS -o $B/bench_cpu test/bench_cpu.c -lm -lpthread
        $B/bench_cpu ;;
    json) unit json_tokenizers ;;
    tokenizer) test/.venv/bin/python -m pytest -q -s -p no:cacheprovider test/test_tokenizer_hf.py -k speed ;;
    accuracy) unit "held-out accuracy" ;;
    memory) # resident memory of a run, against the weights
        /usr/bin/env bash -c './toka -q -p "Tom has 3 boxes with 4 apples each and buys 5 more apples. How many apples does he have?" &
            pid=$!; peak=0; while [ -r /proc/$pid/status ]; do
            now=$(sed -n "s/VmHWM:[^0-9]*\([0-9]*\).*/\1/p" /proc/$pid/status 2>/dev/null || true); [ -n "$now" ] && peak=$now; done
            echo "peak resident memory: $((peak / 1024)) MB, of which the model is $(($(stat -c %s test/model/model.safetensors) / 1048576)) MB"' ;;
    *) echo "bench.sh: no figure called $what" >&2; exit 1 ;;
    esac
done
