#!/bin/bash
# test/bench.sh - measures the figures of the README again. Each is a ratio of two times of the same run on this machine.
#   test/bench.sh [cpu|sharing|json|masks|tokenizer|accuracy|memory ...]     default: all
# tokenizer, json and masks need the public test data (TOKA_TEST_DATA); tokenizer also needs the virtual environment of test/run.sh.
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
for what in ${*:-cpu sharing json masks tokenizer accuracy memory}; do
    echo "== $what"
    case $what in
    cpu) # decode compared with a loop that only reads; prefill with a loop of multiply-adds; shared prefix on with off
        $CC $FLAGS -o $B/bench_cpu test/bench_cpu.c -lm -lpthread
        $B/bench_cpu ;;
    sharing) # CPU time of the whole engine: 256 samples of one 1,000-token prompt, with and without prefix sharing; a model of
             # the embedded model's shape
        echo 'wide nobody/wide - {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 6, "hidden_size": 256,' \
            '"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 448, "vocab_size": 1024,' \
            '"max_position_embeddings": 2048, "tie_word_embeddings": true, "rms_norm_eps": 1e-5}' >$B/wide.txt
        python3 - $B <<'EOF'
import json, resource, subprocess, sys
B = sys.argv[1]
def cpu_s(n, *flags):
    with open(f"{B}/wide.jsonl", "w") as f:
        json.dump({"prompt_token_ids": [i * 7 % 1000 for i in range(1000)], "output_lengths": [n] * 256}, f)
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run(["./toka", "bench", "throughput", "-q", "--json", "-t", "1", "-m", "wide", "--models-file", f"{B}/wide.txt",
                    "--dummy-weights", "--dataset", f"{B}/wide.jsonl", *flags], check=True, stdout=subprocess.DEVNULL)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
on, off = ([cpu_s(n, *flags) for n in (1, 65)] for flags in ([], ["--no-enable-prefix-caching"]))
for what, a, b in (("256 x (1,000 + 65) tokens", on[1], off[1]), ("prompts and first tokens", on[0], off[0]),
                   ("the other 64 of each", on[1] - on[0], off[1] - off[0])):
    print(f"{what}: shared {a:.2f} s, not shared {b:.2f} s: {b / a:.1f}x")
EOF
        ;;
    json) unit json_tokenizers ;;
    masks) # CPU time of a worker for the masks of a step; then the whole engine with a schema for each row, and without
        $CC $FLAGS -o $B/bench_con test/bench_con.c -lm -lpthread
        python3 test/make_dataset.py json $B/json.jsonl --length 256
        python3 test/make_dataset.py json $B/plain.jsonl --length 256 --plain
        $B/bench_con "$TOKA_TEST_DATA/tokenizers/llama-3.1/tokenizer.json" $B/json.jsonl 1000
        for i in 1 2 3; do
            for data in plain json; do
                printf '%s: ' $data
                ./toka bench throughput -m test/model --max-num-seqs 64 --device cpu --dataset $B/$data.jsonl 2>$B/bench.log | head -1
                grep 'masks of' $B/bench.log || true
            done
        done ;;
    tokenizer) test/.venv/bin/python -m pytest -q -s -p no:cacheprovider test/test_tokenizer_hf.py -k speed ;;
    accuracy) unit "held-out accuracy" ;;
    memory) # peak resident memory of a run, and the size of the weights
        /usr/bin/env bash -c './toka -q -p "Tom has 3 boxes with 4 apples each and buys 5 more apples. How many apples does he have?" &
            pid=$!; peak=0; while [ -r /proc/$pid/status ]; do
            now=$(sed -n "s/VmHWM:[^0-9]*\([0-9]*\).*/\1/p" /proc/$pid/status 2>/dev/null || true); [ -n "$now" ] && peak=$now; done
            model=$(stat -c %s test/model/model.safetensors)
            echo "peak resident memory: $((peak / 1024)) MB, of which the model is $((model / 1048576)) MB"' ;;
    *) echo "bench.sh: no figure called $what" >&2; exit 1 ;;
    esac
done
