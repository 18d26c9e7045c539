/* tile_bf16.cuh - the bf16 GEMM of the trials "swapped_tile" and "gathered_rows": persistent, 128
 * producer threads, one consumer warpgroup for each 64 rows of A, a ring buffer of stages of 64
 * columns of K.
 *
 *   straight   A = tokens x, B = rows of W:  y[a][b]
 *   swapped    A = rows of W, B = tokens x:  y[b][a], transposed in the staging buffer
 *
 * Rows of x are loaded in one of these ways:
 *   DENSE           one TMA box for each stage, of consecutive rows
 *   GATHER_FENCE    cp.async by all 128 producer threads, 16 bytes each. The hardware arrives at the
 *                   barrier when the bytes are complete. Each consumer thread runs fence.proxy.async
 *                   after its wait
 *   GATHER_LAG      the same, but a producer thread waits for its own copies of two stages before,
 *                   runs the fence and arrives
 *   GATHER_BOXES    TMA boxes of one row each, issued by all lanes of the producer warps
 * A gathered row p is row list[p] of x. */
#pragma once
#include "trial.cuh"

enum row_source { DENSE, GATHER_FENCE, GATHER_LAG, GATHER_BOXES };

template <int BM_, int BN_, bool SWAPPED_, int PAIR_ = 1, bool RS_ = false,
          row_source ROWS_ = DENSE, int CTAS_ = 1>
struct tile_form {
    static constexpr int BM = BM_, BN = BN_, PAIR = PAIR_,
                         CTAS = CTAS_;                  /* CTAS: per SM */
    static constexpr bool SWAPPED = SWAPPED_, RS = RS_; /* RS: A through ldmatrix and registers */
    static constexpr row_source ROWS = ROWS_;
    static constexpr int GROUPS = BM / 64, THREADS = 128 + 128 * GROUPS;
    static constexpr int ROUND = BN < 64 ? BN : 64; /* columns that are staged at a time */
    static constexpr int STAGE = (BM + BN) * 128,
                         STAGING = SWAPPED ? GROUPS * 2 * ROUND * 128 : GROUPS * 8192;
    static constexpr int ROOM = (CTAS == 1 ? 232448 : 233472 / CTAS - 1024) - STAGING - 256;
    static constexpr int STAGES = ROOM / STAGE < 12 ? ROOM / STAGE : 12;
    static constexpr int STAGING_AT = STAGES * STAGE, BARS_AT = STAGING_AT + STAGING,
                         SMEM = BARS_AT + 256;
    static constexpr int FULL_ARRIVALS = ROWS == GATHER_FENCE || ROWS == GATHER_LAG ? 129 : 2;
    static_assert(!(PAIR == 2 && ROWS != DENSE) && !(ROWS != DENSE && !SWAPPED),
                  "x is B where it is gathered");
};
struct tile_job {
    tile_order order;        /* of one expert; with pairs: of pairs of tiles of A */
    int units;               /* of all experts */
    int rows_a, rows_b, n_k; /* of one expert */
    int first_expert;        /* the expert whose W is the first */
    const bf16 *x;
    const int *list;
    bf16 *y;
};
struct tile_cta {
    tile_job j;
    uint32_t ring, staging, full, empty;
    int rank, first, stride;
};
struct tile_place {
    int expert, a, b; /* first rows in the expert */
};
template <class F> __device__ static inline tile_place place_at(const tile_cta &c, int u) {
    int per_expert = c.j.order.tiles_a * c.j.order.tiles_b, e = u / per_expert;
    tile t = tile_at(c.j.order, u - e * per_expert);
    return {e, (t.a * F::PAIR + c.rank) * F::BM, t.b * F::BN};
}

/* ---- Producers ---- */

/* The first row of the operand in its matrix. The experts of W are stored one after another, and so
 * are their rows of x. */
template <class F> __device__ static inline int row_of_a(const tile_cta &c, const tile_place &t) {
    return (t.expert + (F::SWAPPED ? c.j.first_expert : 0)) * c.j.rows_a + t.a;
}
template <class F> __device__ static inline int row_of_b(const tile_cta &c, const tile_place &t) {
    return (t.expert + (F::SWAPPED ? 0 : c.j.first_expert)) * c.j.rows_b + t.b;
}
template <class F> __device__ static void produce_a(const tile_cta &c, const CUtensorMap *map) {
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        int row = row_of_a<F>(c, place_at<F>(c, u));
        for (int k = 0; k < c.j.n_k; k++) {
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(c.full + 8 * r.s, F::BM * 128);
            tma_load_2d(c.ring + r.s * F::STAGE, map, c.full + 8 * r.s, k * 64, row);
            ring_next<F::STAGES>(r);
        }
    }
}
template <class F> __device__ static void produce_b(const tile_cta &c, const CUtensorMap *map) {
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        int row = row_of_b<F>(c, place_at<F>(c, u));
        for (int k = 0; k < c.j.n_k; k++) {
            uint32_t full = c.full + 8 * r.s, at = c.ring + r.s * F::STAGE + F::BM * 128;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(full, F::BN * 128);
            if (F::PAIR == 1) tma_load_2d(at, map, full, k * 64, row);
            else
                tma_load_2d_multicast(at + c.rank * (F::BN / 2 * 128), map, full, k * 64,
                                      row + c.rank * (F::BN / 2), 3);
            ring_next<F::STAGES>(r);
        }
    }
}
/* All 128 producer threads: thread t copies chunk t % 8 of rows t / 8 + 16 i. Thread 0 also loads
 * A. */
template <class F> __device__ static void gather(const tile_cta &c, const CUtensorMap *map_a) {
    constexpr int ROWS = F::BN / 16, LAG = F::ROWS == GATHER_LAG ? 2 : 0;
    const int t = threadIdx.x, chunk = t % 8, K = c.j.n_k * 64;
    const uint32_t to = F::BM * 128 + t / 8 * 128 + ((chunk ^ (t / 8 & 7)) << 4);
    ring r = {0, 0}, late = {0, 0};
    int issued = 0;
    for (int u = c.first; u < c.j.units; u += c.stride) {
        tile_place place = place_at<F>(c, u);
        const int *list = c.j.list + place.expert * c.j.rows_b + place.b + t / 8;
        uint32_t from[ROWS]; /* offsets in units of 16 bytes */
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            from[i] = (uint32_t)list[16 * i] * (uint32_t)(K / 8) + (uint32_t)chunk;
        for (int k = 0; k < c.j.n_k; k++) {
            uint32_t full = c.full + 8 * r.s, stage = c.ring + r.s * F::STAGE;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            if (t == 0) {
                mbar_expect_tx(full, F::BM * 128);
                tma_load_2d(stage, map_a, full, k * 64, row_of_a<F>(c, place));
            }
            const uint4 *x = (const uint4 *)c.j.x + k * 8;
#pragma unroll
            for (int i = 0; i < ROWS; i++) cp_async_16(stage + to + i * 2048, x + from[i]);
            if (LAG == 0) cp_async_arrive(full);
            else {
                cp_async_commit();
                if (issued++ >= LAG) {
                    cp_async_wait<LAG>();
                    fence_async_smem();
                    mbar_arrive(c.full + 8 * late.s);
                    ring_next<F::STAGES>(late);
                }
            }
            ring_next<F::STAGES>(r);
        }
    }
    if (LAG == 0) return;
    cp_async_wait<0>();
    fence_async_smem();
    for (int i = issued < LAG ? issued : LAG; i > 0; i--) {
        mbar_arrive(c.full + 8 * late.s);
        ring_next<F::STAGES>(late);
    }
}
/* Boxes of one row: lane l of the warps loads rows t, t + 128 ... */
template <class F>
__device__ static void gather_boxes(const tile_cta &c, const CUtensorMap *map_a,
                                    const CUtensorMap *map_row) {
    constexpr int ROWS = ceil_div(F::BN, 128);
    const int t = threadIdx.x;
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        tile_place place = place_at<F>(c, u);
        const int *list = c.j.list + place.expert * c.j.rows_b + place.b;
        int from[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) from[i] = t + 128 * i < F::BN ? list[t + 128 * i] : 0;
        for (int k = 0; k < c.j.n_k; k++) {
            uint32_t full = c.full + 8 * r.s, stage = c.ring + r.s * F::STAGE;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            if (t == 0) {
                mbar_expect_tx(full, F::BM * 128);
                tma_load_2d(stage, map_a, full, k * 64, row_of_a<F>(c, place));
                mbar_expect_tx(full, F::BN * 128);
            }
#pragma unroll
            for (int i = 0; i < ROWS; i++)
                if (t + 128 * i < F::BN)
                    tma_load_2d(stage + (F::BM + t + 128 * i) * 128, map_row, full, k * 64,
                                from[i]);
            ring_next<F::STAGES>(r);
        }
    }
}

/* ---- Consumers ---- */

template <class F> __device__ static inline void release(const tile_cta &c, int s) {
    int tid = threadIdx.x & 127;
    if (F::PAIR == 1 && tid == 0) mbar_arrive(c.empty + 8 * s);
    if (F::PAIR == 2 && tid < 2) mbar_arrive_remote(c.empty + 8 * s, tid);
}
template <class F> __device__ static inline void wait_full(const tile_cta &c, const ring &r) {
    mbar_wait(c.full + 8 * r.s, r.parity);
    if (F::ROWS == GATHER_FENCE) fence_async_smem();
}
template <class F>
__device__ static inline void multiply_ss(float (&acc)[F::BN / 2], const tile_cta &c, ring &r,
                                          int group) {
    int last = 0;
    for (int k = 0; k < c.j.n_k; k++) {
        wait_full<F>(c, r);
        uint32_t stage = c.ring + r.s * F::STAGE;
        uint64_t a = wgmma_desc(stage + group * 8192), b = wgmma_desc(stage + F::BM * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_bf16<F::BN>(acc, a + 2 * i, b + 2 * i, 1);
        wgmma_commit();
        if (k) wgmma_wait<1>(), release<F>(c, last);
        last = r.s;
        ring_next<F::STAGES>(r);
    }
    wgmma_wait<0>();
    wgmma_keep(acc);
    release<F>(c, last);
}
/* Loads A's 64 x 64 of a stage into registers: fragments of four steps of 16 columns. */
__device__ static inline void load_fragments(uint32_t (&f)[4][4], uint32_t at) {
    const int lane = threadIdx.x & 31, row = (int)(threadIdx.x & 127) / 32 * 16 + (lane & 15);
#pragma unroll
    for (int i = 0; i < 4; i++)
        ldmatrix_x4(f[i], at + row * 128 + ((2 * i + (lane >> 4) ^ (row & 7)) << 4));
}
template <class F>
__device__ static inline int issue_rs(float (&acc)[F::BN / 2], uint32_t (&f)[4][4],
                                      const tile_cta &c, ring &r, int group) {
    int s = r.s;
    wait_full<F>(c, r);
    load_fragments(f, c.ring + s * F::STAGE + group * 8192);
    uint64_t b = wgmma_desc(c.ring + s * F::STAGE + F::BM * 128);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) wgmma_bf16_rs<F::BN>(acc, f[i], b + 2 * i, 1);
    wgmma_commit();
    ring_next<F::STAGES>(r);
    return s;
}
/* n_k is a multiple of 4. The wait for each fourth block has no other block in flight (see
 * fp8_promotion.cu). */
template <class F>
__device__ static inline void multiply_rs(float (&acc)[F::BN / 2], const tile_cta &c, ring &r,
                                          int group) {
    uint32_t f[2][4][4];
    for (int k = 0; k < c.j.n_k; k += 4) {
        int before = issue_rs<F>(acc, f[0], c, r, group);
#pragma unroll
        for (int i = 1; i < 4; i++) {
            int s = issue_rs<F>(acc, f[i % 2], c, r, group);
            wgmma_wait<1>();
            release<F>(c, before);
            before = s;
        }
        wgmma_wait<0>();
        wgmma_keep(acc);
        release<F>(c, before);
    }
}
/* y[b][a]: ROUND columns of D at a time become rows of 128 bytes, staged by the warpgroup. Two
 * buffers alternate, so one barrier for each round is enough. */
template <class F>
__device__ static inline void store_transposed(const float (&acc)[F::BN / 2], const tile_cta &c,
                                               const tile_place &t, int group) {
    const int lane = threadIdx.x & 31, tid = threadIdx.x & 127, warp = tid / 32,
              chunk = 2 * warp + (lane >> 3 & 1);
#pragma unroll
    for (int round = 0; round < F::BN / F::ROUND; round++) {
        const uint32_t at = c.staging + (group * 2 + round % 2) * (F::ROUND * 128);
        const float *v = acc + round * (F::ROUND / 2);
        if constexpr (F::ROUND >= 16) {
#pragma unroll
            for (int jj = 0; jj < F::ROUND / 16; jj++, v += 8) {
                int row = 16 * jj + (lane >> 4) * 8 + (lane & 7);
                stmatrix_x4_trans(at + row * 128 + ((chunk ^ (row & 7)) << 4),
                                  pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]),
                                  pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
            }
        } else
            stmatrix_x2_trans(at + (lane & 7) * 128 + ((chunk ^ (lane & 7)) << 4),
                              pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]));
        named_sync(1 + group, 128);
#pragma unroll
        for (int i = 0; i < ceil_div(F::ROUND, 16); i++) {
            int row = tid / 8 + 16 * i, part = tid % 8, b = t.b + round * F::ROUND + row,
                a = t.a + group * 64 + 8 * part;
            if (row >= F::ROUND) continue;
            uint4 out = smem_load_16(at + row * 128 + ((part ^ (row & 7)) << 4));
            if (b < c.j.rows_b && a < c.j.rows_a)
                *(uint4 *)(c.j.y + (size_t)(t.expert * c.j.rows_b + b) * c.j.rows_a + a) = out;
        }
    }
    if (F::BN / F::ROUND % 2)
        named_sync(1 + group,
                   128); /* the next tile begins with the buffer that this one ended with */
}
template <class F> __device__ static void consume(const tile_cta &c, int group) {
    const int warp = (int)(threadIdx.x & 127) / 32;
    ring r = {0, 0};
    for (int u = c.first; u < c.j.units; u += c.stride) {
        tile_place t = place_at<F>(c, u);
        float acc[F::BN / 2] = {};
        if constexpr (F::RS) multiply_rs<F>(acc, c, r, group);
        else multiply_ss<F>(acc, c, r, group);
        if constexpr (F::SWAPPED) store_transposed<F>(acc, c, t, group);
        else {
#pragma unroll
            for (int p = 0; p < F::BN / 64; p++)
                store_panel(acc + 32 * p, c.staging + (group * 4 + warp) * 2048, c.j.y,
                            t.a + group * 64 + warp * 16, t.b + 64 * p, c.j.rows_a, c.j.rows_b);
        }
    }
}

template <class F>
__global__ static void __launch_bounds__(F::THREADS, F::CTAS)
    tile_kernel(const __grid_constant__ CUtensorMap map_a,
                const __grid_constant__ CUtensorMap map_b, tile_job j) {
    extern __shared__ __align__(1024) char smem[];
    const uint32_t base = smem_at(smem);
    const int warp = (int)threadIdx.x / 32, lane = threadIdx.x & 31;
    tile_cta c = {j, base, base + F::STAGING_AT, base + F::BARS_AT, base + F::BARS_AT + 128};
    c.rank = F::PAIR == 2 ? cluster_rank() : 0;
    c.first = (int)blockIdx.x / F::PAIR, c.stride = (int)gridDim.x / F::PAIR;
    if (threadIdx.x == 0) {
        for (int s = 0; s < F::STAGES; s++)
            mbar_init(c.full + 8 * s, F::FULL_ARRIVALS),
                mbar_init(c.empty + 8 * s, F::GROUPS * F::PAIR);
        mbar_init_fence();
    }
    __syncthreads();
    if (F::PAIR == 2) cluster_sync();
    if (warp < 4) {
        if constexpr (F::BN > 64) regs_give<56>();
        if constexpr (F::ROWS == GATHER_FENCE || F::ROWS == GATHER_LAG) gather<F>(c, &map_a);
        else if constexpr (F::ROWS == GATHER_BOXES) gather_boxes<F>(c, &map_a, &map_b);
        else if (warp == 0 && lane == 0) produce_b<F>(c, &map_b);
        else if (warp == 1 && lane == 0) produce_a<F>(c, &map_a);
    } else {
        if constexpr (F::BN > 64) regs_take<224>();
        consume<F>(c, warp / 4 - 1);
    }
    __syncwarp();
    /* until here the peer may write to this CTA or arrive at its barriers */
    if (F::PAIR == 2) cluster_sync();
}

/* ---- Host ---- */

struct tile_problem {
    int experts, M, N, K; /* M: rows of each expert */
    int n_x;              /* rows of x */
    const bf16 *x, *w;    /* W of all experts, [expert][N][K] */
    int w_experts;        /* the number of experts in W: launches rotate over them */
    const int *list;      /* or NULL: row p of the pairs is row p of x */
};
template <class F>
static void run_tile(const tile_problem &p, buffer<bf16> &y, int turn, cudaStream_t stream) {
    const int copies = p.w_experts / p.experts, rows_a = F::SWAPPED ? p.N : p.M,
              rows_b = F::SWAPPED ? p.M : p.N;
    CUtensorMap map_w =
        map_of(p.w, p.w_experts * p.N, p.K, 2, F::SWAPPED ? F::BM : F::BN / F::PAIR);
    CUtensorMap map_x = map_of(p.x, p.n_x, p.K, 2,
                               F::ROWS == GATHER_BOXES ? 1
                               : F::SWAPPED            ? F::BN / F::PAIR
                                                       : F::BM);
    tile_job j = {{ceil_div(rows_a, F::BM * F::PAIR), ceil_div(rows_b, F::BN), 16 / F::PAIR},
                  0,
                  rows_a,
                  rows_b,
                  p.K / 64};
    j.units = j.order.tiles_a * j.order.tiles_b * p.experts;
    j.first_expert = turn % copies * p.experts, j.x = p.x, j.list = p.list, j.y = y.p;
    int grid = std::min(j.units, sm_count() * F::CTAS / F::PAIR) * F::PAIR;
    launch(tile_kernel<F>, grid, F::THREADS, F::SMEM, F::PAIR, stream, F::SWAPPED ? map_w : map_x,
           F::SWAPPED ? map_x : map_w, j);
}

/* Warp i computes y of row p_of[i] of the pairs and output n_of[i] in float64, with the first
 * experts of W. */
__global__ static void tile_reference_kernel(tile_problem p, const int *p_of, const int *n_of,
                                             int n, double *ref, double *mag) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
    if (i >= n) return;
    const bf16 *x = p.x + (size_t)(p.list ? p.list[p_of[i]] : p_of[i]) * p.K;
    const bf16 *w = p.w + ((size_t)(p_of[i] / p.M) * p.N + n_of[i]) * p.K;
    double sum = 0, sum_mag = 0;
    for (int k = lane; k < p.K; k += 32) {
        double v = (double)__bfloat162float(x[k]) * (double)__bfloat162float(w[k]);
        sum += v, sum_mag += fabs(v);
    }
    sum = warp_sum(sum), sum_mag = warp_sum(sum_mag);
    if (lane == 0) ref[i] = sum, mag[i] = sum_mag;
}
static void check_tile(const tile_problem &p, buffer<bf16> &y, const char *name) {
    const int n = 512;
    std::vector<int> p_of(n), n_of(n);
    for (int i = 0; i < n; i++)
        p_of[i] = (int)(mix(5 * i) % (p.M * p.experts)), n_of[i] = (int)(mix(5 * i + 1) % p.N);
    buffer<int> dp(n), dn(n);
    buffer<double> ref(n), mag(n);
    dp.set(p_of), dn.set(n_of);
    tile_reference_kernel<<<n / 8, 256>>>(p, dp.p, dn.p, n, ref.p, mag.p);
    CUDA_OK(cudaGetLastError());
    std::vector<double> hr = ref.host(), hm = mag.host();
    double worst = 0;
    for (int i = 0; i < n; i++) {
        bf16 v;
        CUDA_OK(cudaMemcpy(&v, y.p + (size_t)p_of[i] * p.N + n_of[i], sizeof v,
                           cudaMemcpyDeviceToHost));
        double e = fabs((double)__bfloat162float(v) - hr[i]) - fabs(hr[i]) / 256;
        worst = e == e ? std::max(worst, e / hm[i]) : 1;
    }
    check(worst < 1.0 / 65536, "%s X %d M %d N %d K %d: error %g of sum |x w|", name, p.experts,
          p.M, p.N, p.K, worst);
    int unwritten = count_nan(y, (size_t)p.M * p.experts * p.N);
    check(unwritten == 0, "%s X %d M %d N %d K %d: %d outputs are NaN", name, p.experts, p.M, p.N,
          p.K, unwritten);
}
/* Checks one launch, then returns the median microseconds of a launch. */
template <class F>
static double time_tile(const tile_problem &p, buffer<bf16> &y, const char *name) {
    const double flop = 2.0 * p.M * p.experts * p.N * p.K, bytes = 2.0 * p.experts * p.N * p.K;
    CUDA_OK(cudaMemset(y.p, 0xFF, (size_t)p.M * p.experts * p.N * 2));
    run_tile<F>(p, y, 0, 0);
    CUDA_OK(cudaDeviceSynchronize());
    check_tile(p, y, name);
    double guess = std::max(flop / 600e6, bytes / 2.5e6); /* microseconds */
    int launches = std::max(4, std::min(64, (int)(4000 / guess) / 4 * 4));
    return time_us(launches, 9, [&](int i, cudaStream_t s) { run_tile<F>(p, y, i, s); });
}
