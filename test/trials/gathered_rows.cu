/* gathered_rows.cu - the cost of an expert's tokens being scattered.
 *
 * Question. In a mixture of experts the token rows of a GEMM are given by an index list. TMA loads
 * boxes of consecutive rows. Scattered rows need cp.async by the producer warps, one TMA box for
 * each row, or a kernel that copies the rows first. What do these cost, compared with dense boxes?
 *
 * Method. The swapped tile (tile_bf16.cuh): 128 rows of W by 64, 128 or 256 tokens. X experts have
 * the same number of rows each. Every launch uses other experts, so that W comes from memory. Each
 * expert's rows are a sorted random choice of the tokens (T = rows X / top k). "copy" is the time
 * of a kernel that writes the gathered rows, next to the dense GEMM.
 *
 * Build:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o trial_gathered_rows \
 *        test/trials/gathered_rows.cu
 * Run: ./trial_gathered_rows (about a minute; exit code 1 if a check fails)
 *
 * Decides: how gate_up of toka's expert layers gets its tokens. Results:
 * test/results/trials-gathered-rows.md. */
#include "tile_bf16.cuh"

#include <numeric>
#include <random>

/* One warp copies a row of K elements. */
__global__ static void copy_rows_kernel(const bf16 *x, const int *list, bf16 *to, int n, int K) {
    int p = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
    if (p >= n) return;
    const uint4 *from = (const uint4 *)(x + (size_t)list[p] * K);
    for (int i = lane; i < K / 8; i += 32) ((uint4 *)(to + (size_t)p * K))[i] = from[i];
}
/* Each expert gets `rows` different tokens of T, in rising order. */
static std::vector<int> random_list(int experts, int rows, int T) {
    std::mt19937 random(7);
    std::vector<int> tokens((size_t)T), list;
    std::iota(tokens.begin(), tokens.end(), 0);
    for (int e = 0; e < experts; e++) {
        std::shuffle(tokens.begin(), tokens.end(), random);
        std::vector<int> mine(tokens.begin(), tokens.begin() + rows);
        std::sort(mine.begin(), mine.end());
        list.insert(list.end(), mine.begin(), mine.end());
    }
    return list;
}

struct times { /* microseconds */
    double dense, fence, lag, boxes;
};
template <int BN>
static times time_ways(const tile_problem &gathered, const tile_problem &dense, buffer<bf16> &y) {
    times t;
    t.dense = time_tile<tile_form<128, BN, true>>(dense, y, "dense");
    t.fence =
        time_tile<tile_form<128, BN, true, 1, false, GATHER_FENCE>>(gathered, y, "gather, fence");
    t.lag = time_tile<tile_form<128, BN, true, 1, false, GATHER_LAG>>(gathered, y, "gather, lag");
    t.boxes =
        time_tile<tile_form<128, BN, true, 1, false, GATHER_BOXES>>(gathered, y, "boxes of a row");
    return t;
}

struct model_shape {
    const char *name;
    int N, K, top_k;
};
static void run_shape(const model_shape &s, buffer<bf16> &x, buffer<bf16> &w, buffer<bf16> &copied,
                      buffer<bf16> &y) {
    printf("\n%s: N %d, K %d. TFLOP/s; in brackets: TB/s of W when dense\n", s.name, s.N, s.K);
    printf("experts  rows  tile   dense          gather, fence  gather, lag  boxes of a row  dense "
           "and copy\n");
    for (int X : {8, 32, 128})
        for (int rows : {64, 128, 256, 1024}) {
            const int T = std::max(rows, rows * X / s.top_k), pairs = rows * X,
                      BN = std::min(rows, 256);
            std::vector<int> host_list = random_list(X, rows, T);
            buffer<int> list(host_list.size());
            list.set(host_list);
            tile_problem gathered = {X, rows, s.N, s.K, T, x.p, w.p, 128, list.p}, dense = gathered;
            dense.list = NULL, dense.x = copied.p, dense.n_x = pairs;
            auto copy = [&](int, cudaStream_t stream) {
                copy_rows_kernel<<<ceil_div(pairs, 8), 256, 0, stream>>>(x.p, list.p, copied.p,
                                                                         pairs, s.K);
            };
            double copy_us = time_us(8, 9, copy);
            times t = BN == 64    ? time_ways<64>(gathered, dense, y)
                      : BN == 128 ? time_ways<128>(gathered, dense, y)
                                  : time_ways<256>(gathered, dense, y);
            const double flop = 2.0 * pairs * s.N * s.K, bytes = 2.0 * X * s.N * s.K;
            auto rate = [&](double us) { return flop / us * 1e-6; };
            printf("%7d  %4d  %4d  %6.0f (%.2f)  %6.0f %.3f  %6.0f %.3f  %6.0f %.3f  %6.0f %.3f\n",
                   X, rows, BN, rate(t.dense), bytes / t.dense * 1e-6, rate(t.fence),
                   t.dense / t.fence, rate(t.lag), t.dense / t.lag, rate(t.boxes),
                   t.dense / t.boxes, rate(t.dense + copy_us), t.dense / (t.dense + copy_us));
        }
}

int main() {
    const model_shape shapes[4] = {{"Qwen3-30B-A3B gate_up", 1536, 2048, 8},
                                   {"Qwen3-30B-A3B down", 2048, 768, 8},
                                   {"GPT-OSS gate_up", 5760, 2880, 4},
                                   {"GPT-OSS down", 2880, 2880, 4}};
    print_card();
    buffer<bf16> x((size_t)131072 * 2880), w((size_t)128 * 5760 * 2880),
        copied((size_t)131072 * 2880), y((size_t)131072 * 5760);
    x.normal(31), w.normal(32, 0.05f);
    for (const model_shape &s : shapes) run_shape(s, x, w, copied, y);
    return report();
}
