#!/bin/bash
# test/gemm_choices.sh REV: compares the choices of GEMMs of this tree with those of commit REV: kernel, tile, split-K and
# multicast, over a sweep of shapes, rows and GPUs. The choice is made on the host, so it needs nvcc and no GPU. Where the
# choices are equal, the speed is; where they differ, measure. Exit status 0: all choices are equal.
set -u
cd "$(dirname "$0")/.." || exit
rev=$(git rev-parse --verify "$1^{commit}") || exit
tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
mkdir -p "$tmp/before" "$tmp/now"
git archive "$rev" toka.h toka_kernels.cu | tar -x -C "$tmp/before"
cp toka.h toka_kernels.cu "$tmp/now"

for tree in before now; do
    # chapters 1 to 7, for an architecture on which the kernels of Hopper are empty: that compiles in seconds
    sed '/MARK: 8\./,$d' "$tmp/$tree/toka_kernels.cu" | sed '$d' >"$tmp/$tree/choices.cu"
    cat >>"$tmp/$tree/choices.cu" <<'CODE'
static void print_choices(const toka_device *dev, int M, int N, int K) {
    static const int kinds[] = {EPI_STORE, EPI_RESIDUAL, EPI_SWIGLU, EPI_LOGITS, GEMM_SCATTER, GEMM_QKV64, GEMM_QKV128};
    const weight w = {NULL, NULL, N, K};
    printf("%d SMs M %d N %d K %d: family %d split %d;", dev->n_sms, M, N, K, gemm_family(dev, M, &w), gemm_smallm_split(dev, N, K));
    for (int kind : kinds)
        for (int whole_heads = 0; whole_heads < 1 + (kind == GEMM_QKV64 || kind == GEMM_QKV128); whole_heads++) {
            const gemm_plan plan = gemm_choose(dev, kind, M, N, K, whole_heads);
            printf(" %d/%d/%dx%d%s", kind, plan.variant->bn, plan.variant->split, plan.multicast, plan.variant->pingpong ? "p" : "");
        }
    for (int D = 64; D <= 128; D *= 2) {
        qkv_params qkv = {};
        qkv.H = N / D - 2, qkv.K = 1;
        if (qkv.H > 0) printf(" fused %d", gemm_qkv_worth_fusing(dev, M, &w, &qkv));
    }
    puts("");
}
int main() {
    static const int gpus[][2] = {{132, 33}, {132, 32}, {132, 30}, {114, 28}, {78, 19}}; /* SMs, max_clusters_of_4 */
    static const int Ks[] = {64, 128, 256, 512, 896, 1024, 1536, 2048, 2560, 3072, 4096, 4864, 5120, 8192, 9728, 11008, 14336, 18944, 28672};
    static const int Ms[] = {1, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 2048, 3000, 4096,
                             5000, 6144, 7000, 8192, 8448, 12000, 16384, 32768};
    static toka_device dev = {};
    dev.hopper = true, dev.E = 4096;
    for (auto &gpu : gpus) {
        dev.n_sms = gpu[0], dev.max_clusters_of_4 = gpu[1];
        for (int tile = 1; tile <= 1200; tile = tile < 40 ? tile + 1 : tile + tile / 12)
            for (int K : Ks)
                for (int M : Ms) print_choices(&dev, M, tile * 128, K);
    }
}
CODE
    (cd "$tmp/$tree" && nvcc -std=c++20 -O1 -w -gencode arch=compute_80,code=sm_80 -o choices choices.cu) || exit
    "$tmp/$tree/choices" >"$tmp/$tree.txt" || exit
done
differ=$(diff "$tmp/before.txt" "$tmp/now.txt" | grep -c '^>')
diff "$tmp/before.txt" "$tmp/now.txt" | grep '^[<>]' | head -40
echo "$(wc -l <"$tmp/now.txt") shapes, $differ with another choice than in $rev"
[ "$differ" = 0 ]
