/* fp8_promotion.cu - the cost of correct FP8 MMAs with wgmma.
 *
 * Question. wgmma.f32.e4m3.e4m3 accumulates with fewer bits than float32. How many does it keep?
 * How large is the error at the K of real models? A promotion moves the partial sum to float32
 * registers every P columns of K: which P repairs the error? What does promotion cost in TFLOP/s,
 * with and without the scales of a block-scaled checkpoint (one scale for each 128x128 block of W,
 * one for each token and 128 columns of x)?
 *
 * Method.
 *   (1) Probe: D holds 2^16, then one more product of 2^(16-j) follows. The largest j that changes D
 *       gives the number of bits.
 *   (2) One 64x64 tile with K from 128 to 16,384 against float64, for P = 0 (never) to 512.
 *   (3) MMAs of stages that do not change, next to a warpgroup that only adds: do additions slow
 *       down the tensor cores?
 *   (4) A persistent GEMM with 128 producer threads, A and B by TMA, D stored as bf16, at the four
 *       matrices of Llama-3.1-8B. W rotates over copies that exceed the L2 cache. Forms:
 *         tile      128x128: two warpgroups of 64 rows; 256x128: two of 128 rows, promoted 64 rows
 *                   at a time; 192x128: three of 64 rows
 *         P         columns of K in a partial sum; 0: no promotion
 *         rows      scales; x is A, so a thread needs 2 scales of x for a partial sum of 64 rows
 *         cols      scales; x is B (the swapped tile), so it needs 32
 *         two sets  two partial sums in a thread: the next block's MMAs run during a promotion
 *         halved    A through registers (ldmatrix), two partial sums of 64 columns, promoted in turn
 *         turns     the warpgroups issue MMAs in turn: when the other has issued its own, or (late)
 *                   when the other's MMAs have completed
 *         pair      a cluster of two CTAs shares B by multicast
 *       Each form runs for about 40 ms after a pause of 60 ms, so the power limit counts. A last
 *       table has single launches after pauses of 30 ms.
 *
 * Build:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o trial_fp8_promotion \
 *        test/trials/fp8_promotion.cu
 * Run: ./trial_fp8_promotion [quick] (two minutes; quick: only parts 1 to 3, some seconds). The
 * exit code is 1 if a check fails.
 *
 * Decides: the tile, the orientation and the promotion period of toka's FP8 GEMM. Results:
 * test/results/trials-fp8-promotion.md. */
#include "trial.cuh"

#include <cmath>

/* ---- 1. Accuracy: one CTA, one tile of 64 x 64 ---- */

/* Copies 64 rows of 128 bytes to shared memory, swizzled. */
__device__ static void stage_rows(uint32_t to, const fp8 *from, int K, int k) {
    for (int i = (int)threadIdx.x; i < 64 * 8; i += 128) {
        int row = i / 8, chunk = i % 8;
        smem_store_16(to + row * 128 + ((chunk ^ (row & 7)) << 4),
                      *(const uint4 *)(from + (size_t)row * K + k + 16 * chunk));
    }
}
/* d[64][64] = a b^T. Every `period` columns (a multiple of 128; 0: never) the partial sum is added
 * to float32 sums. */
__global__ static void __launch_bounds__(128)
    accuracy_kernel(const fp8 *a, const fp8 *b, float *d, int K, int period) {
    extern __shared__ __align__(1024) char smem[];
    const uint32_t at_a = smem_at(smem), at_b = at_a + 8192;
    float part[32], sum[32] = {};
    for (int k = 0; k < K; k += 128) {
        bool fresh = k == 0 || (period && k % period == 0);
        __syncthreads();
        stage_rows(at_a, a, K, k);
        stage_rows(at_b, b, K, k);
        fence_async_smem();
        __syncthreads();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
            wgmma_fp8<64>(part, wgmma_desc(at_a) + 2 * i, wgmma_desc(at_b) + 2 * i, !fresh || i);
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_keep(part);
        if (k + 128 == K || (period && (k + 128) % period == 0))
            for (int i = 0; i < 32; i++) sum[i] += part[i];
    }
    int row = (int)threadIdx.x / 32 * 16 + (int)threadIdx.x % 32 / 4;
    for (int i = 0; i < 32; i++)
        d[(row + i % 4 / 2 * 8) * 64 + i / 4 * 8 + (int)threadIdx.x % 4 * 2 + i % 2] = sum[i];
}
static std::vector<float> accuracy_run(const buffer<fp8> &a, const buffer<fp8> &b, int K,
                                       int period) {
    buffer<float> d(64 * 64);
    CUDA_OK(cudaMemset(d.p, 0xFF, d.n * sizeof(float)));
    accuracy_kernel<<<1, 128, 16384>>>(a.p, b.p, d.p, K, period);
    CUDA_OK(cudaGetLastError());
    return d.host();
}

/* Row r: D holds 2^16, then products of 2^(8-r) follow. Columns: 0: one product in the next
 * instruction. 1: one in the same instruction. 2: one of opposite sign in the next. 3: thirty-two
 * of them in the next. 4: 1.5 of it in the next. */
static void probe_bits() {
    const int K = 128;
    std::vector<fp8> a(64 * K, fp8(0.0f)), b(64 * K, fp8(0.0f));
    for (int r = 0; r < 18; r++) {
        a[r * K] = fp8(256.0f);
        a[r * K + 1] = fp8(ldexpf(1, 8 - r));
        for (int k = 32; k < 64; k++) a[r * K + k] = fp8(ldexpf(1, 8 - r));
    }
    const float small[5] = {1, 0, -1, 1, 1.5f};
    for (int c = 0; c < 5; c++) {
        b[c * K] = fp8(256.0f);
        for (int k = 32; k < (c == 3 ? 64 : 33); k++) b[c * K + k] = fp8(small[c]);
    }
    b[K + 1] = fp8(1.0f);
    buffer<fp8> da(a.size()), db(b.size());
    da.set(a), db.set(b);
    std::vector<float> d = accuracy_run(da, db, K, 0);
    const char *name[5] = {"next", "same", "minus", "32x", "1.5x"};
    printf("\nprobe: what 2^16 gains from products of 2^(16-j), in units of 2^(16-j)\n%-6s", "j");
    for (int r = 0; r < 18; r++) printf("%6d", 8 + r);
    for (int c = 0; c < 5; c++) {
        printf("\n%-6s", name[c]);
        for (int r = 0; r < 18; r++) printf("%6.4g", (d[r * 64 + c] - 65536) / ldexp(1, 8 - r));
    }
    printf("\n");
    check(d[0] == 65536 + 256, "probe: 2^16 + 2^8 is %g", d[0]);
}

static void accuracy_table() {
    const int periods[4] = {128, 256, 512, 0};
    printf("\nerror of 64x64 outputs against float64: |error| / |reference| as L2 norms (largest "
           "|error| / sum |a b|)\n");
    for (int positive = 0; positive < 2; positive++)
        for (int K : {128, 512, 1024, 2048, 4096, 8192, 14336, 16384}) {
            buffer<fp8> a(64 * (size_t)K), b(64 * (size_t)K);
            a.normal(1, 1, positive), b.normal(2, 1, positive);
            std::vector<fp8> ha = a.host(), hb = b.host();
            std::vector<double> fa(ha.begin(), ha.end()), fb(hb.begin(), hb.end()), ref(4096),
                mag(4096);
            for (int i = 0; i < 4096; i++)
                for (int k = 0; k < K; k++) {
                    double p = fa[(size_t)(i / 64) * K + k] * fb[(size_t)(i % 64) * K + k];
                    ref[i] += p, mag[i] += fabs(p);
                }
            printf("%s K %6d ", positive ? "one sign " : "both signs", K);
            for (int period : periods) {
                std::vector<float> d = accuracy_run(a, b, K, period);
                double e2 = 0, r2 = 0, worst = 0;
                for (int i = 0; i < 4096; i++) {
                    double e = d[i] - ref[i];
                    e2 += e * e, r2 += ref[i] * ref[i], worst = std::max(worst, fabs(e) / mag[i]);
                }
                printf(" P %3d %.2e (%.1e)", period, sqrt(e2 / r2), worst);
                double bound = period == 128 ? 1.0 / 512
                               : period      ? 1.0 / 64
                                             : 0.3; /* truncation errors all have the same sign */
                check(worst < bound, "K %d, P %d: error %g of sum |a b|", K, period, worst);
            }
            printf("\n");
        }
}

/* ---- 2. Do additions slow down the MMAs? ---- */

enum { NOTHING, ADD, FMA };

/* Two warpgroups multiply 128 x 128 each, again and again; the stages do not change. For each block
 * of 128 columns of K, the third warpgroup runs the 256 additions that a promotion of all sums
 * takes (in each thread the share of one warp scheduler). */
template <int KIND> __device__ static inline float add_up(int rounds) {
    float sum[64] = {}, part[64], row[2] = {(float)threadIdx.x, 2.0f * (float)threadIdx.x}, all = 0;
    for (int i = 0; i < 64; i++) part[i] = (float)(threadIdx.x + i);
    for (int r = 0; r < 4 * rounds; r++)
#pragma unroll
        for (int i = 0; i < 64; i++) {
            if (KIND == ADD) asm volatile("add.rn.f32 %0, %0, %1;" : "+f"(sum[i]) : "f"(part[i]));
            if (KIND == FMA)
                asm volatile("fma.rn.f32 %0, %1, %2, %0;"
                             : "+f"(sum[i])
                             : "f"(part[i]), "f"(row[i / 2 % 2]));
        }
    for (int i = 0; i < 64; i++) all += sum[i];
    return all;
}
template <int KIND>
__global__ static void __launch_bounds__(384, 1)
    beside_kernel(float *out, float *clocks, int rounds) {
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_at(smem);
    const int group = (int)threadIdx.x / 128;
    float sum[2][64] = {}, all = 0;
    for (uint32_t i = threadIdx.x; i < 49152 / 4; i += 384)
        ((uint32_t *)smem)[i] = (uint32_t)mix(i) & 0xBFBFBFBFu;
    fence_async_smem();
    __syncthreads();
    long long begin = clock64();
    if (group == 2) {
        if (KIND != NOTHING) all = add_up<KIND>(rounds);
    } else {
        uint64_t a = wgmma_desc(base + group * 16384), b = wgmma_desc(base + 32768);
        for (int r = 0; r < rounds; r++) {
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 8; i++)
                wgmma_fp8<128>(sum[i % 2], a + i % 2 * 512 + i / 2 * 2, b + i / 2 * 2, 1);
            wgmma_commit();
            wgmma_wait<1>();
        }
        wgmma_wait<0>();
        wgmma_keep(sum[0]);
        wgmma_keep(sum[1]);
        for (int i = 0; i < 128; i++) all += sum[i % 2][i / 2];
        if (threadIdx.x == 0) clocks[blockIdx.x] = (float)(clock64() - begin) / (float)rounds;
    }
    out[blockIdx.x * 384 + threadIdx.x] = all;
}
template <int KIND> static double time_beside() {
    const int sms = sm_count();
    buffer<float> out((size_t)sms * 384), clocks((size_t)sms);
    for (int i = 0; i < 2; i++)
        launch(beside_kernel<KIND>, sms, 384, 49152, 1, (cudaStream_t)0, out.p, clocks.p, 2000);
    CUDA_OK(cudaDeviceSynchronize());
    std::vector<float> h = clocks.host();
    std::sort(h.begin(), h.end());
    return h[h.size() / 2];
}
static void beside_table() {
    double nothing = time_beside<NOTHING>(), add = time_beside<ADD>(), fma = time_beside<FMA>();
    printf("\nclocks of 256x128x128 products, nothing moving: alone %.0f, beside 256 FADD a "
           "scheduler %.0f, FFMA %.0f\n",
           nothing, add, fma);
    check(nothing > 1000 && nothing < 1100, "products alone take %g clocks, not 1,024", nothing);
}

/* ---- 3. Speed: the GEMM ---- */

enum { SCALE_NONE, SCALE_ROWS, SCALE_COLUMNS };

enum {
    HALVED = 3
}; /* instead of the number of sets: two sets of half the columns, A through registers */
enum { UNORDERED, AFTER_ISSUE, AFTER_PRODUCTS };

template <int BM_, int PERIOD_, int SCALE_, int SETS_, int PAIR_, int ORDER_ = UNORDERED>
struct form {
    static constexpr int BM = BM_, PERIOD = PERIOD_, SCALE = SCALE_, SETS = SETS_, PAIR = PAIR_,
                         ORDER = ORDER_;
    static constexpr int GROUPS = BM == 192 ? 3 : 2; /* warpgroups that multiply */
    static constexpr int HALVES = BM / GROUPS / 64;  /* blocks of 64 rows of each warpgroup */
    static constexpr int THREADS = 128 + 128 * GROUPS, GIVE = GROUPS == 3 ? 32 : 40,
                         TAKE = GROUPS == 3 ? 160 : 232;
    static constexpr int BLOCKS = PERIOD > 128 ? PERIOD / 128 : 1, CHUNKS = PERIOD == 64 ? 2 : 1;
    static constexpr int VECTOR = SCALE == SCALE_ROWS      ? BM
                                  : SCALE == SCALE_COLUMNS ? 128
                                                           : 0; /* scales in a stage */
    static constexpr int STAGE = (BM + 128) * 128, SCALE_BYTES = 1024, STAGING = GROUPS * 8192;
    static constexpr int STAGES = (232448 - STAGING - 256) / (STAGE + SCALE_BYTES);
    static constexpr int SCALES_AT = STAGES * STAGE, STAGING_AT = SCALES_AT + STAGES * SCALE_BYTES;
    static constexpr int BARS_AT = STAGING_AT + STAGING, SMEM = BARS_AT + 256;
};
struct job {
    tile_order order; /* with pairs: order of pairs of tiles, one below the other */
    int units, rows_a, rows_b, n_k;
    const float *vector; /* [K/128][rows of x] */
    const float *block;  /* [rows of W / 128][K/128] */
    bf16 *y;             /* [rows_a][rows_b] */
    float *clocks;       /* [CTAs] clocks for a block of 128 columns of K, including everything */
};
struct cta {
    job j;
    uint32_t ring, scales, staging, full, empty;
    int rank, first, stride;
};
template <class F> __device__ static inline tile cta_tile(const cta &c, int u) {
    tile t = tile_at(c.j.order, u);
    return {t.a * F::PAIR + c.rank, t.b};
}

template <class F> __device__ static void produce_b(const cta &c, const CUtensorMap *map) {
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        tile t = cta_tile<F>(c, u);
        for (int k = 0; k < c.j.n_k; k++) {
            uint32_t full = c.full + 8 * r.s, at = c.ring + r.s * F::STAGE + F::BM * 128;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(full, 128 * 128 + F::VECTOR * 4);
            if (F::PAIR == 1) tma_load_2d(at, map, full, k * 128, t.b * 128);
            else
                tma_load_2d_multicast(at + c.rank * 8192, map, full, k * 128,
                                      t.b * 128 + c.rank * 64, 3);
            if (F::SCALE == SCALE_ROWS)
                bulk_load(c.scales + r.s * F::SCALE_BYTES,
                          c.j.vector + (size_t)k * c.j.rows_a + t.a * F::BM, F::BM * 4, full);
            if (F::SCALE == SCALE_COLUMNS)
                bulk_load(c.scales + r.s * F::SCALE_BYTES,
                          c.j.vector + (size_t)k * c.j.rows_b + t.b * 128, 512, full);
            ring_next<F::STAGES>(r);
        }
    }
}
template <class F> __device__ static void produce_a(const cta &c, const CUtensorMap *map) {
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        tile t = cta_tile<F>(c, u);
        for (int k = 0; k < c.j.n_k; k++) {
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(c.full + 8 * r.s, F::BM * 128);
            tma_load_2d(c.ring + r.s * F::STAGE, map, c.full + 8 * r.s, k * 128, t.a * F::BM);
            ring_next<F::STAGES>(r);
        }
    }
}

template <class F> __device__ static inline void release(const cta &c, int s) {
    int tid = threadIdx.x & 127;
    if (F::PAIR == 1 && tid == 0) mbar_arrive(c.empty + 8 * s);
    if (F::PAIR == 2 && tid < 2) mbar_arrive_remote(c.empty + 8 * s, tid);
}

/* The scales of one partial sum. rows: of rows l/4 and l/4 + 8 of the warp's 16. columns: of the
 * thread's 32 columns. */
template <class F> struct scales {
    float block, row[2];
    float2 column[F::SCALE == SCALE_COLUMNS && F::HALVES == 1 ? 16 : 1];
    uint32_t at; /* address of the stage's vector */
};
template <class F>
__device__ static inline void load_scales(scales<F> &s, const cta &c, const float *block, int stage,
                                          int row) {
    s.at = c.scales + stage * F::SCALE_BYTES;
    if constexpr (F::SCALE != SCALE_NONE) s.block = __ldg(block);
    if constexpr (F::SCALE == SCALE_ROWS)
        s.row[0] = smem_load_float(s.at + 4 * row), s.row[1] = smem_load_float(s.at + 4 * row + 32);
    if constexpr (F::SCALE == SCALE_COLUMNS && F::HALVES == 1)
        for (int j = 0; j < 16; j++)
            s.column[j] = smem_load_pair(s.at + 32 * j + (threadIdx.x & 3) * 8);
}
template <class F>
__device__ static inline void promote(float (&sum)[64], float (&part)[64], const scales<F> &s) {
    float row[2] = {s.block * s.row[0], s.block * s.row[1]};
#pragma unroll
    for (int j = 0; j < 16; j++) {
        float2 column = {1, 1};
        if constexpr (F::SCALE == SCALE_COLUMNS) {
            if constexpr (F::HALVES == 1) column = s.column[j];
            else column = smem_load_pair(s.at + 32 * j + (threadIdx.x & 3) * 8);
            column.x *= s.block, column.y *= s.block;
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float p = part[4 * j + i];
            if (F::SCALE == SCALE_NONE) sum[4 * j + i] += p;
            if (F::SCALE == SCALE_ROWS) sum[4 * j + i] += p * row[i / 2];
            if (F::SCALE == SCALE_COLUMNS) sum[4 * j + i] += p * (i % 2 ? column.y : column.x);
        }
    }
}

struct operands {
    uint64_t a, b;
};
template <class F>
__device__ static inline operands stage_operands(const cta &c, int s, int group) {
    uint32_t at = c.ring + s * F::STAGE;
    return {wgmma_desc(at + group * F::HALVES * 64 * 128), wgmma_desc(at + F::BM * 128)};
}
/* N steps of 32 columns, from step `first` on. */
template <int N>
__device__ static inline void multiply(float (&d)[64], operands o, int half, int first, bool add) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < N; i++)
        wgmma_fp8<128>(d, o.a + 512 * half + 2 * (first + i), o.b + 2 * (first + i), add || i > 0);
    wgmma_commit();
}

/* A tile without promotion. */
template <class F>
__device__ static inline void tile_plain(float (&sum)[F::HALVES][64], const cta &c, ring &r,
                                         int group) {
    int last = 0;
    for (int k = 0; k < c.j.n_k; k++) {
        mbar_wait(c.full + 8 * r.s, r.parity);
        operands o = stage_operands<F>(c, r.s, group);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int h = 0; h < F::HALVES; h++)
                wgmma_fp8<128>(sum[h], o.a + 512 * h + 2 * i, o.b + 2 * i, 1);
        wgmma_commit();
        if (k) wgmma_wait<1>(), release<F>(c, last);
        last = r.s;
        ring_next<F::STAGES>(r);
    }
    wgmma_wait<0>();
#pragma unroll
    for (int h = 0; h < F::HALVES; h++) wgmma_keep(sum[h]);
    release<F>(c, last);
}
/* A tile whose partial sums have one set of registers: this warpgroup's MMAs stop during its
 * promotions. ORDER: the two warpgroups issue MMAs in turn (barriers 2 and 3). */
template <class F>
__device__ static inline void tile_one_set(float (&sum)[F::HALVES][64], const cta &c, ring &r,
                                           int group, const float *block, bool started) {
    const int row =
        group * F::HALVES * 64 + (int)(threadIdx.x & 127) / 32 * 16 + (int)(threadIdx.x & 31) / 4;
    float part[64];
    scales<F> s;
    if (F::ORDER && !started && group == 1) named_arrive(2, 256);
    for (int k = 0; k < c.j.n_k; k += F::BLOCKS) {
        ring at = r;
#pragma unroll
        for (int h = 0; h < F::HALVES; h++) {
            const bool last_half = h == F::HALVES - 1;
            int before = 0;
            at = r;
#pragma unroll
            for (int i = 0; i < F::BLOCKS; i++) {
                mbar_wait(c.full + 8 * at.s, at.parity);
                operands o = stage_operands<F>(c, at.s, group);
#pragma unroll
                for (int chunk = 0; chunk < F::CHUNKS; chunk++) {
                    if (F::ORDER) named_sync(2 + group, 256);
                    multiply<4 / F::CHUNKS>(part, o, h, chunk * 2, i > 0);
                    if (F::ORDER == AFTER_ISSUE) named_arrive(3 - group, 256);
                    if (i < F::BLOCKS - 1) continue;
                    load_scales<F>(s, c, block + k, at.s, row + 64 * h);
                    wgmma_wait<0>();
                    wgmma_keep(part);
                    if (F::ORDER == AFTER_PRODUCTS) named_arrive(3 - group, 256);
                    bool done = last_half && chunk == F::CHUNKS - 1;
                    if (done && i > 0) release<F>(c, before);
                    if (done && F::SCALE != SCALE_COLUMNS) release<F>(c, at.s);
                    promote<F>(sum[h], part, s);
                    if (done && F::SCALE == SCALE_COLUMNS) release<F>(c, at.s);
                }
                if (last_half && i > 0 && i < F::BLOCKS - 1) wgmma_wait<1>(), release<F>(c, before);
                before = at.s;
                ring_next<F::STAGES>(at);
            }
        }
        r = at;
    }
}
/* The same with two sets: block k is multiplied while block k - 1 is promoted. n_k is a multiple of
 * 8. If MMAs were in flight at the end of a loop iteration, ptxas would serialize them (C7514), so
 * no MMAs run during every eighth promotion. */
template <class F>
__device__ static inline void promote_block(float (&sum)[64], float (&part)[64], const cta &c,
                                            const float *block, int stage, int row) {
    scales<F> s;
    load_scales<F>(s, c, block, stage, row);
    wgmma_keep(part);
    promote<F>(sum, part, s);
    release<F>(c, stage);
}
template <class F>
__device__ static inline int issue_block(float (&part)[64], const cta &c, ring &r, int group) {
    int s = r.s;
    mbar_wait(c.full + 8 * s, r.parity);
    multiply<4>(part, stage_operands<F>(c, s, group), 0, 0, false);
    ring_next<F::STAGES>(r);
    return s;
}
template <class F>
__device__ static inline void tile_two_sets(float (&sum)[1][64], const cta &c, ring &r, int group,
                                            const float *block) {
    const int row = group * 64 + (int)(threadIdx.x & 127) / 32 * 16 + (int)(threadIdx.x & 31) / 4;
    float part[2][64];
    for (int k = 0; k < c.j.n_k; k += 8) {
        int before = issue_block<F>(part[0], c, r, group);
#pragma unroll
        for (int i = 1; i < 8; i++) {
            int s = issue_block<F>(part[i % 2], c, r, group);
            wgmma_wait<1>();
            promote_block<F>(sum[0], part[(i - 1) % 2], c, block + k + i - 1, before, row);
            before = s;
        }
        wgmma_wait<0>();
        promote_block<F>(sum[0], part[1], c, block + k + 7, before, row);
    }
}

/* 256x128 with scales by rows: A through registers, two partial sums of 64 columns. One is promoted
 * while the MMAs of the other run. After a block the second one stays in registers; its MMAs have
 * completed. */
template <int FIRST>
__device__ static inline void promote_half(float (&sum)[64], const float (&part)[32],
                                           const float (&row)[2]) {
#pragma unroll
    for (int i = 0; i < 32; i++) sum[FIRST + i] += part[i] * row[i / 2 % 2];
}
__device__ static inline void multiply_half(float (&d)[32], const uint32_t (&f)[4][4], uint64_t b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_fp8_rs<64>(d, f[i], b + 2 * i, i > 0);
    wgmma_commit();
}
/* One block of K. `waiting`: the scales of the partial sum in `right`. */
template <class F>
__device__ static inline void block_halved(float (&sum)[2][64], float (&left)[32],
                                           float (&right)[32], float (&waiting)[2], const cta &c,
                                           ring &r, int group, float w_scale, bool right_waits) {
    const int lane = threadIdx.x & 31, row = group * 128 + (int)(threadIdx.x & 127) / 32 * 16;
    const uint32_t stage = c.ring + r.s * F::STAGE, at = stage + (row + (lane & 15)) * 128;
    const uint64_t b = wgmma_desc(stage + F::BM * 128);
    uint32_t f[4][4];
    mbar_wait(c.full + 8 * r.s, r.parity);
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const uint32_t scale_at = c.scales + r.s * F::SCALE_BYTES + 4 * (row + 64 * h + lane / 4);
#pragma unroll
        for (int i = 0; i < 4; i++)
            ldmatrix_x4(f[i], at + h * 8192 + (((2 * i + (lane >> 4)) ^ (lane & 7)) << 4));
        multiply_half(left, f, b);
        if (h || right_waits) promote_half<32>(sum[1 - h], right, waiting);
        multiply_half(right, f, b + 512);
        waiting[0] = w_scale * smem_load_float(scale_at),
        waiting[1] = w_scale * smem_load_float(scale_at + 32);
        wgmma_wait<1>();
        wgmma_keep(left);
        promote_half<0>(sum[h], left, waiting);
        wgmma_wait<0>();
        wgmma_keep(right);
    }
    release<F>(c, r.s);
    ring_next<F::STAGES>(r);
}
/* Four blocks at a time: across the end of a loop iteration ptxas does not see that `right` is
 * complete, and would insert a wait (C7517). */
template <class F>
__device__ static inline void tile_halved(float (&sum)[2][64], const cta &c, ring &r, int group,
                                          const float *block) {
    float left[32], right[32], waiting[2];
    for (int k = 0; k < c.j.n_k; k += 4) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            block_halved<F>(sum, left, right, waiting, c, r, group, __ldg(block + k + i), i > 0);
        promote_half<32>(sum[1], right, waiting);
    }
}

template <class F> __device__ static void consume(const cta &c, int group) {
    const int warp = (int)threadIdx.x / 32 - 4;
    const long long begin = clock64();
    int blocks = 0;
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride, blocks += c.j.n_k) {
        tile t = cta_tile<F>(c, u);
        const float *block = c.j.block;
        if (F::SCALE == SCALE_ROWS) block += (size_t)t.b * c.j.n_k;
        if (F::SCALE == SCALE_COLUMNS)
            block += (size_t)(t.a * F::HALVES + group * (F::HALVES - 1)) * c.j.n_k;
        float sum[F::HALVES][64] = {};
        if constexpr (F::PERIOD == 0) tile_plain<F>(sum, c, r, group);
        else if constexpr (F::SETS == 1) tile_one_set<F>(sum, c, r, group, block, u != c.first);
        else if constexpr (F::SETS == 2) tile_two_sets<F>(sum, c, r, group, block);
        else tile_halved<F>(sum, c, r, group, block);
#pragma unroll
        for (int h = 0; h < F::HALVES; h++)
#pragma unroll
            for (int p = 0; p < 2; p++)
                store_panel(sum[h] + 32 * p, c.staging + warp * 2048, c.j.y,
                            t.a * F::BM + (group * F::HALVES + h) * 64 + warp % 4 * 16,
                            t.b * 128 + 64 * p, c.j.rows_a, c.j.rows_b);
    }
    if (threadIdx.x == 128) c.j.clocks[blockIdx.x] = (float)(clock64() - begin) / (float)blocks;
}

template <class F>
__global__ static void __launch_bounds__(F::THREADS, 1)
    gemm_kernel(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b, job j) {
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_at(smem);
    const int warp = (int)threadIdx.x / 32, lane = threadIdx.x & 31;
    cta c = {j,
             base,
             base + F::SCALES_AT,
             base + F::STAGING_AT,
             base + F::BARS_AT,
             base + F::BARS_AT + 64};
    c.rank = F::PAIR == 2 ? cluster_rank() : 0;
    c.first = (int)blockIdx.x / F::PAIR, c.stride = (int)gridDim.x / F::PAIR;
    if (threadIdx.x == 0) {
        for (int s = 0; s < F::STAGES; s++)
            mbar_init(c.full + 8 * s, 2), mbar_init(c.empty + 8 * s, F::GROUPS * F::PAIR);
        mbar_init_fence();
    }
    __syncthreads();
    if (F::PAIR == 2) cluster_sync();
    if (warp < 4) {
        regs_give<F::GIVE>();
        if (warp == 0 && lane == 0) produce_b<F>(c, &map_b);
        if (warp == 1 && lane == 0) produce_a<F>(c, &map_a);
    } else {
        regs_take<F::TAKE>();
        consume<F>(c, warp / 4 - 1);
    }
    __syncwarp();
    /* until here the peer may write to this CTA or arrive at its barriers */
    if (F::PAIR == 2) cluster_sync();
}

/* ---- 4. References and timing ---- */

struct problem {
    int M, N, K, copies; /* copies: of W */
    const fp8 *x, *w;
    const float *x_scale, *w_scale; /* [K/128][M], [N/128][K/128] */
    float *clocks;
};
/* Warp i computes y of token m, output n in float64, and the sum of the absolute values of the
 * terms. */
__global__ static void reference_kernel(problem p, bool scaled, const int *m_of, const int *n_of,
                                        int n, double *ref, double *mag) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
    if (i >= n) return;
    double sum = 0, sum_mag = 0;
    for (int k = lane; k < p.K; k += 32) {
        double v = (double)float(p.x[(size_t)m_of[i] * p.K + k]) *
                   (double)float(p.w[(size_t)n_of[i] * p.K + k]);
        if (scaled)
            v *= (double)p.x_scale[(size_t)(k / 128) * p.M + m_of[i]] *
                 p.w_scale[(size_t)(n_of[i] / 128) * (p.K / 128) + k / 128];
        sum += v, sum_mag += fabs(v);
    }
    sum = warp_sum(sum), sum_mag = warp_sum(sum_mag);
    if (lane == 0) ref[i] = sum, mag[i] = sum_mag;
}
/* Checks samples of y, [m][n] or, transposed, [n][m]. */
static void check_samples(const problem &p, buffer<bf16> &y, bool scaled, bool transposed,
                          int period, const char *name) {
    const int n = 512;
    std::vector<int> m_of(n), n_of(n);
    for (int i = 0; i < n; i++)
        m_of[i] = (int)(mix(3 * i) % p.M), n_of[i] = (int)(mix(3 * i + 1) % p.N);
    buffer<int> dm(n), dn(n);
    buffer<double> ref(n), mag(n);
    dm.set(m_of), dn.set(n_of);
    reference_kernel<<<n / 8, 256>>>(p, scaled, dm.p, dn.p, n, ref.p, mag.p);
    CUDA_OK(cudaGetLastError());
    std::vector<double> hr = ref.host(), hm = mag.host();
    const double bound = period == 0 ? 1.0 / 512 : period > 128 ? 1.0 / 2048 : 1.0 / 4096;
    double worst = 0;
    for (int i = 0; i < n; i++) {
        bf16 v;
        size_t at = transposed ? (size_t)n_of[i] * p.M + m_of[i] : (size_t)m_of[i] * p.N + n_of[i];
        CUDA_OK(cudaMemcpy(&v, y.p + at, sizeof v, cudaMemcpyDeviceToHost));
        double e = fabs(float(v) - hr[i]) - fabs(hr[i]) / 256;
        worst = e == e ? std::max(worst, e / hm[i]) : 1;
    }
    check(worst < bound, "%s M %d N %d K %d: error %g of sum |a b|", name, p.M, p.N, p.K, worst);
    int unwritten = count_nan(y, (size_t)p.M * p.N);
    check(unwritten == 0, "%s M %d N %d K %d: %d outputs are NaN", name, p.M, p.N, p.K, unwritten);
}

template <class F>
static int run_form(const problem &p, buffer<bf16> &y, int i, cudaStream_t stream) {
    const bool swapped = F::SCALE == SCALE_COLUMNS;
    const fp8 *w = p.w + (size_t)(i % p.copies) * p.N * p.K;
    int rows_a = swapped ? p.N : p.M, rows_b = swapped ? p.M : p.N;
    CUtensorMap map_a = map_of(swapped ? w : p.x, rows_a, p.K, 1, F::BM);
    CUtensorMap map_b = map_of(swapped ? p.x : w, rows_b, p.K, 1, 128 / F::PAIR);
    job j = {{ceil_div(rows_a, F::BM * F::PAIR), rows_b / 128, 8 / F::PAIR},
             0,
             rows_a,
             rows_b,
             p.K / 128,
             p.x_scale,
             p.w_scale,
             y.p,
             p.clocks};
    j.units = j.order.tiles_a * j.order.tiles_b;
    int grid = std::min(j.units, sm_count() / F::PAIR) * F::PAIR;
    launch(gemm_kernel<F>, grid, F::THREADS, F::SMEM, F::PAIR, stream, map_a, map_b, j);
    return grid;
}
struct result {
    double tflops, clocks;
};
template <class F> static result time_form(const problem &p, buffer<bf16> &y, const char *name) {
    const double flop = 2.0 * p.M * p.N * p.K;
    y.poison();
    int grid = run_form<F>(p, y, 0, 0);
    CUDA_OK(cudaDeviceSynchronize());
    check_samples(p, y, F::SCALE != SCALE_NONE, F::SCALE == SCALE_COLUMNS, F::PERIOD, name);
    int launches = std::max(4, std::min(48, (int)(4e9 * 1e3 / flop * 1e3) / 4 * 4));
    usleep(60000); /* the GPU's power limit depends on the last tenths of a second */
    double us = time_us(launches, 9, [&](int i, cudaStream_t s) { run_form<F>(p, y, i, s); });
    std::vector<float> clocks((size_t)grid); /* of the last launch */
    CUDA_OK(
        cudaMemcpy(clocks.data(), p.clocks, clocks.size() * sizeof(float), cudaMemcpyDeviceToHost));
    double sum = 0;
    for (float v : clocks) sum += v;
    return {flop / us * 1e-6, sum / grid};
}

template <class F> static double time_rested(const problem &p, buffer<bf16> &y) {
    double us = time_rested_us(9, [&](int i, cudaStream_t s) { run_form<F>(p, y, i, s); });
    return 2.0 * p.M * p.N * p.K / us * 1e-6;
}

struct entry {
    const char *name;
    result (*time)(const problem &, buffer<bf16> &, const char *);
};
static const entry entries[] = {
    {"128x128 P 0", time_form<form<128, 0, SCALE_NONE, 1, 1>>},
    {"128x128 P 0 pair", time_form<form<128, 0, SCALE_NONE, 1, 2>>},
    {"256x128 P 0", time_form<form<256, 0, SCALE_NONE, 1, 1>>},
    {"256x128 P 0 pair", time_form<form<256, 0, SCALE_NONE, 1, 2>>},
    {"128x128 P 64", time_form<form<128, 64, SCALE_NONE, 1, 1>>},
    {"128x128 P 128", time_form<form<128, 128, SCALE_NONE, 1, 1>>},
    {"128x128 P 256", time_form<form<128, 256, SCALE_NONE, 1, 1>>},
    {"128x128 P 512", time_form<form<128, 512, SCALE_NONE, 1, 1>>},
    {"256x128 P 64", time_form<form<256, 64, SCALE_NONE, 1, 1>>},
    {"256x128 P 128", time_form<form<256, 128, SCALE_NONE, 1, 1>>},
    {"256x128 P 256", time_form<form<256, 256, SCALE_NONE, 1, 1>>},
    {"128x128 P 128 rows", time_form<form<128, 128, SCALE_ROWS, 1, 1>>},
    {"128x128 P 128 rows two sets", time_form<form<128, 128, SCALE_ROWS, 2, 1>>},
    {"128x128 P 128 rows two sets pair", time_form<form<128, 128, SCALE_ROWS, 2, 2>>},
    {"256x128 P 128 rows", time_form<form<256, 128, SCALE_ROWS, 1, 1>>},
    {"256x128 P 128 rows pair", time_form<form<256, 128, SCALE_ROWS, 1, 2>>},
    {"256x128 P 128 rows by turns", time_form<form<256, 128, SCALE_ROWS, 1, 1, AFTER_ISSUE>>},
    {"256x128 P 128 rows late turns", time_form<form<256, 128, SCALE_ROWS, 1, 1, AFTER_PRODUCTS>>},
    {"256x128 P 128 rows halved", time_form<form<256, 128, SCALE_ROWS, HALVED, 1>>},
    {"256x128 P 128 rows halved pair", time_form<form<256, 128, SCALE_ROWS, HALVED, 2>>},
    {"192x128 P 0", time_form<form<192, 0, SCALE_NONE, 1, 1>>},
    {"192x128 P 128", time_form<form<192, 128, SCALE_NONE, 1, 1>>},
    {"192x128 P 128 rows", time_form<form<192, 128, SCALE_ROWS, 1, 1>>},
    {"192x128 P 128 rows pair", time_form<form<192, 128, SCALE_ROWS, 1, 2>>},
    {"128x128 P 128 cols", time_form<form<128, 128, SCALE_COLUMNS, 1, 1>>},
    {"128x128 P 128 cols two sets", time_form<form<128, 128, SCALE_COLUMNS, 2, 1>>},
    {"256x128 P 128 cols", time_form<form<256, 128, SCALE_COLUMNS, 1, 1>>},
    {"256x128 P 128 cols pair", time_form<form<256, 128, SCALE_COLUMNS, 1, 2>>},
};

static const int shapes[4][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}},
                 Ms[3] = {512, 4096, 8192};
static const int n_entries = sizeof entries / sizeof *entries;

static void print_table(const char *what, const std::vector<result> &results,
                        double result::*number) {
    printf("\n%s, N x K above, M below\n%-34s", what, "");
    for (auto &s : shapes) printf("  %5dx%-12d", s[0], s[1]);
    printf("\n%-34s", "");
    for (int i = 0; i < 12; i++) printf("%6d%s", Ms[i % 3], i % 3 == 2 ? "  " : "");
    for (int e = 0; e < n_entries; e++) {
        printf("\n%-34s", entries[e].name);
        for (int i = 0; i < 12; i++)
            printf("%6.0f%s", results[(size_t)e * 12 + i].*number, i % 3 == 2 ? "  " : "");
    }
    printf("\n");
}
static void rested_table(problem p, buffer<bf16> &y, size_t w_pool) {
    const struct {
        const char *name;
        double (*time)(const problem &, buffer<bf16> &);
    } forms[] = {
        {"256x128 P 0 pair", time_rested<form<256, 0, SCALE_NONE, 1, 2>>},
        {"256x128 P 128", time_rested<form<256, 128, SCALE_NONE, 1, 1>>},
        {"256x128 P 256", time_rested<form<256, 256, SCALE_NONE, 1, 1>>},
        {"128x128 P 128 rows two sets pair", time_rested<form<128, 128, SCALE_ROWS, 2, 2>>},
        {"256x128 P 128 rows", time_rested<form<256, 128, SCALE_ROWS, 1, 1>>},
        {"256x128 P 128 rows halved", time_rested<form<256, 128, SCALE_ROWS, HALVED, 1>>},
        {"256x128 P 128 cols", time_rested<form<256, 128, SCALE_COLUMNS, 1, 1>>},
    };
    printf("\none launch after a pause of 30 ms, TFLOP/s, columns as above\n");
    for (auto &form : forms) {
        printf("%-34s", form.name);
        for (int i = 0; i < 12; i++) {
            p.M = Ms[i % 3], p.N = shapes[i / 3][0], p.K = shapes[i / 3][1];
            p.copies = std::min(8, (int)(w_pool / ((size_t)p.N * p.K)));
            printf("%6.0f%s", form.time(p, y), i % 3 == 2 ? "  " : "");
        }
        printf("\n");
    }
}
static void speed_tables() {
    const size_t w_pool = 480u << 20;
    buffer<fp8> x((size_t)8192 * 14336), w(w_pool);
    buffer<float> x_scale(8192 * 112), w_scale(224 * 112), clocks(256);
    buffer<bf16> y((size_t)8192 * 28672);
    std::vector<result> results((size_t)n_entries * 12);
    x.normal(11), w.normal(12);
    fill_uniform_kernel<<<1056, 256>>>(x_scale.p, x_scale.n, 13, 0.5f, 2.0f);
    fill_uniform_kernel<<<1056, 256>>>(w_scale.p, w_scale.n, 14, 0.5f, 2.0f);
    problem p = {0, 0, 0, 0, x.p, w.p, x_scale.p, w_scale.p, clocks.p};
    for (int shape = 0; shape < 4; shape++)
        for (int i = 0; i < 3; i++) {
            p.M = Ms[i], p.N = shapes[shape][0], p.K = shapes[shape][1];
            p.copies = std::min(8, (int)(w_pool / ((size_t)p.N * p.K)));
            for (int e = 0; e < n_entries; e++)
                results[(size_t)e * 12 + shape * 3 + i] = entries[e].time(p, y, entries[e].name);
        }
    print_table("TFLOP/s", results, &result::tflops);
    print_table("clocks a block of 128 columns of K, all included (products alone: 4 BM)", results,
                &result::clocks);
    rested_table(p, y, w_pool);
    p.M = 8192, p.N = 28672, p.K = 4096, p.copies = 4;
    printf("\nwithout a pause, 28672x4096, M = 8192, TFLOP/s in each fifth of two seconds: ");
    for (int i = 0; i < 5; i++) {
        double us = time_us(4, 64, [&](int k, cudaStream_t s) {
            run_form<form<256, 128, SCALE_ROWS, 1, 2>>(p, y, k, s);
        });
        printf(" %.0f", 2.0 * p.M * p.N * p.K / us * 1e-6);
    }
    printf(" (256x128 P 128 rows pair)\n");
}

int main(int n_args, char **) {
    print_card();
    probe_bits();
    accuracy_table();
    beside_table();
    if (n_args == 1) speed_tables();
    return report();
}
