/* toka_kernels.cu - toka's CUDA backend: every kernel is written here.  SPDX-License-Identifier: Apache-2.0
 *
 * WHAT IT IS. The second instance of `struct toka_backend` (toka.h); the first is chapter 16 of toka.c. It needs the CUDA runtime
 * and nothing else. One binary holds code for sm_80, sm_89 and sm_90a: Hopper runs the wgmma and TMA kernels, older cards the
 * mma.sync kernels, which also run on Hopper and there serve the tests as a second opinion.
 *
 * HOW A STEP RUNS. Plans are integers made on the host (toka.c chapters 13 and 14). `embed` copies what the step needs into one
 * pinned buffer and up in one transfer (struct stage), with the work lists of attention (chapter 8) and of sampling
 * (chapter 10); all other ops only launch kernels on one stream. `norm_logits_sample` ends the step: it waits for the picks.
 *
 * NUMBERS. Weights and activations are bf16, accumulators, norms, softmax and log-probabilities float32. The residual stream x is
 * bf16 between ops. Every sum has a fixed order, so a step repeated is equal to the bit; a row's result may differ by
 * rounding with the number of rows beside it, because another tile shape sums in another order.
 *
 * MEMORY. Everything is taken by cuda_open and cuda_alloc. Layouts:
 *
 *   weights     W [N][K] row-major bf16, as in the file. q, k and v lie behind each other as one [(H+2K)*D][E]; gate and up are one
 *               [2F][E] in which 8 rows of gate and the same 8 of up take turns, so that silu(gate)*up meets in one thread
 *   x           [T][E] bf16, row stride E
 *   q, o        [T][H][D] bf16
 *   K and V     pool[layer][page][kv head][K, V][B tokens][D] bf16
 *   norms       float32
 *
 * LETTERS as in toka.h: T tokens, S sequences, L layers, H query heads, K kv heads, D head size, E width, F mlp width, V vocabulary,
 * B tokens per page. In GEMMs y[M][N] = x[M][K] W[N][K]^T has its own M, N, K.
 *
 * CONTENTS (build.sh checks it against the banners)
 *
 *   1. Types and the device [host]
 *   2. PTX [device]
 *   3. Memory, transfers, weights [host]
 *   4. Embedding, norms, RoPE [kernel]
 *   5. GEMM on mma.sync [kernel]
 *   6. GEMM on wgmma [kernel]
 *   7. GEMM for few rows, and the choice [kernel]
 *   8. Attention: the work list [host]
 *   9. Attention: the kernels [kernel]
 *  10. LM head and sampling [kernel]
 *  11. The op table [host]
 */
#define TOKA_INTERNAL
#include "toka.h"

#include <cuda.h> /* types only: nothing of libcuda is linked */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define HOPPER 1 /* bodies that need sm_90a; elsewhere they compile to a trap and are never launched */
#else
#define HOPPER 0
#endif

/* ===========================================================================
 * MARK: 1. Types and the device [host]
 * =========================================================================== */

typedef __nv_bfloat16 bf16;

/* Memory that goes up once per step: a pinned host buffer and a device buffer of the same layout. put() returns where the bytes
 * will lie on the device once stage_send has run. */
typedef struct stage {
    char *host, *dev;
    size_t used, cap;
} stage;

typedef struct weight { /* a matrix on the device */
    bf16 *p;            /* [N][K] */
    const float *bias;  /* [N] or NULL */
    int N, K;
} weight;

typedef struct layer_weights {
    weight qkv, o, gate_up, down;
    const float *attn_norm, *mlp_norm; /* [E] */
    const float *q_norm, *k_norm;      /* [D] or NULL */
    int window;                        /* 0: all */
} layer_weights;

typedef struct step_rows { /* the running step, on the device */
    int T;
    const int *ids, *pos, *slot; /* [T] */
} step_rows;

struct attn_plan; /* chapter 8 */
struct samp_plan; /* chapter 10 */

struct toka_device {
    toka_device_options options;
    const toka_shape *shape;
    const toka_weights *weights;
    toka_err error; /* the first failure; code 0: none */
    char about[200];
    int arch, n_sms;         /* 80, 89, 90 ...; multiprocessors */
    bool hopper;             /* wgmma and TMA kernels run */
    cudaStream_t stream;
    CUresult (*encode_map)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,
                           const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    layer_weights *layers;   /* [L], host */
    bf16 *embed;             /* [V][E] */
    const float *norm;       /* [E] */
    weight lm_head;          /* [V][E] */
    float2 *rope;            /* [max_len][D/2] cosine and sine, rope_scale included */
    bf16 *kv;                /* pool */
    size_t kv_layer;         /* elements of one layer */
    bf16 *xn, *qkv, *act;    /* scratch: [T][E] normed rows, [T][(H+2K)*D], [T][F] */
    stage up;
    step_rows rows;
    attn_plan *attn;
    samp_plan *samp;
    void **blocks;           /* what cudaMalloc gave */
    int n_blocks;
};

/* Latches the first failure; later ones are its consequences. */
static void latch(toka_device *d, cudaError_t code, const char *what) {
    if (code == cudaSuccess || d->error.code) return;
    d->error.code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(d->error.msg, sizeof d->error.msg, "GPU: %s: %s", what, cudaGetErrorString(code));
}
#define LAUNCHED(d, what) latch(d, cudaGetLastError(), what) /* behind every <<<>>> */

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* ===========================================================================
 * MARK: 2. PTX [device]
 * One small function per instruction, named as the PTX manual names it. Addresses of shared memory are 32-bit (smem_at).
 * =========================================================================== */

__device__ static inline uint32_t smem_at(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

/* ---- Arithmetic ---- */

__device__ static inline float ex2(float x) { /* 2^x, relative error 2^-22, 0 for -inf */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ static inline uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ static inline float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ static inline float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

/* ---- mma.sync and its feeding (sm_80 and later) ---- */

/* d[16][8] += a[16][16] b[16][8]. Lane l holds d(l/4, 2(l%4)+{0,1}) and d(l/4+8, same columns). */
__device__ static inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Four 8x8 matrices of 2-byte elements; lane 8i+j gives the address of row j of matrix i, 16 bytes each. */
__device__ static inline void ldmatrix_x4(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
/* 16 bytes to shared memory; bytes 0 .. n-1 are read, the rest becomes 0 (n: 0 to 16). */
__device__ static inline void cp_async_16(uint32_t to, const void *from, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
__device__ static inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ static inline void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

/* ---- Dependent launches: a kernel may start before the one ahead has ended ---- */

__device__ static inline void grid_wait() { /* until all memory of the kernels ahead can be seen */
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ static inline void grid_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if HOPPER
/* ---- mbarrier ---- */

__device__ static inline void mbar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ static inline void mbar_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ static inline void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ static inline void mbar_expect_tx(uint32_t bar, int bytes) { /* arrives too */
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
/* The barrier of the same offset in CTA `cta` of the cluster. */
__device__ static inline void mbar_arrive_remote(uint32_t bar, int cta) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r];}"
                 ::"r"(bar), "r"(cta) : "memory");
}
/* Until the phase of this parity has completed; a fresh barrier has completed parity 1. */
__device__ static inline void mbar_wait(uint32_t bar, int parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(bar), "r"(parity) : "memory");
}

/* ---- The copy engine ---- */

__device__ static inline void tma_prefetch_map(const CUtensorMap *m) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
__device__ static inline void tma_load_2d(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1) : "memory");
}
/* Into the same offset of every CTA in `mask`, each CTA's barrier at the same offset is told. */
__device__ static inline void tma_load_2d_multicast(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1,
                                                    uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"(mask) : "memory");
}
__device__ static inline void tma_store_2d(const CUtensorMap *m, uint32_t from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(m), "r"(from), "r"(c0), "r"(c1) : "memory");
}
__device__ static inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ static inline void tma_store_wait_read() { /* shared memory may be written again */
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* A run of bytes: both addresses and n multiples of 16. */
__device__ static inline void bulk_load(uint32_t to, const void *from, int n, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(n), "r"(bar) : "memory");
}
/* Ordinary stores to shared memory become visible to wgmma and the copy engine; each writing thread, before the barrier. */
__device__ static inline void fence_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- Warpgroups and clusters ---- */

template <int N> __device__ static inline void regs_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ static inline void regs_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
__device__ static inline void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ static inline void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ static inline int cluster_rank() {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ static inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ static inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ static inline void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }

/* Matrix descriptor of a K-major tile in 128-byte rows with 128-byte swizzle, base aligned to 1,024 bytes: 8 rows every 1,024
 * bytes. The next 16 columns are 32 bytes on: + 2. */
__device__ static inline uint64_t wgmma_desc(uint32_t at) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
#endif

/* ===========================================================================
 * MARK: 3. Memory, transfers, weights [host]
 * =========================================================================== */

/* Memory that cuda_close frees; NULL latches the failure. */
static void *dev_alloc(toka_device *d, size_t bytes, const char *what) {
    void *p = NULL;
    if (d->error.code) return NULL;
    cudaError_t code = cudaMalloc(&p, bytes ? bytes : 1);
    if (code == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        d->error.code = TOKA_E_MEMORY;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: %s: %.2f GB asked for, %.2f of %.2f GB are free", what, bytes / 1e9,
                 free_bytes / 1e9, total / 1e9);
        return NULL;
    }
    latch(d, code, what);
    if (code) return NULL;
    void **blocks = (void **)realloc(d->blocks, (size_t)(d->n_blocks + 1) * sizeof *blocks);
    if (!blocks) abort();
    d->blocks = blocks;
    d->blocks[d->n_blocks++] = p;
    return p;
}

/* ---- The step's way up ---- */

static void stage_open(toka_device *d, stage *s, size_t cap) {
    *s = stage{.cap = cap};
    s->dev = (char *)dev_alloc(d, cap, "step buffer");
    if (!d->error.code) latch(d, cudaHostAlloc((void **)&s->host, cap, cudaHostAllocDefault), "pinned step buffer");
}

/* Room for `bytes`, 16-byte aligned: *host to fill, and the address on the device. The caller has sized the stage so that it fits. */
static void *stage_room(stage *s, size_t bytes, void **host) {
    size_t at = (s->used + 15) & ~(size_t)15;
    assert(at + bytes <= s->cap);
    s->used = at + bytes;
    *host = s->host + at;
    return s->dev + at;
}
static void *stage_put(stage *s, const void *from, size_t bytes) {
    void *host, *dev = stage_room(s, bytes, &host);
    if (bytes) memcpy(host, from, bytes);
    return dev;
}
static void stage_send(toka_device *d, stage *s) {
    latch(d, cudaMemcpyAsync(s->dev, s->host, s->used, cudaMemcpyHostToDevice, d->stream), "step upload");
}

/* ===========================================================================
 * MARK: 4. Embedding, norms, RoPE [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 5. GEMM on mma.sync [kernel]
 * =========================================================================== */

/* What every GEMM here does: y[M][N] = x[M][K] W[N][K]^T, float32 accumulators, and an epilogue on them. K is a multiple of 8. */
enum epilogue {
    EPI_STORE,    /* y = acc + bias, bf16 [M][N] */
    EPI_RESIDUAL, /* y += acc + bias, bf16 [M][N]; the sum in float32, rounded once */
    EPI_SWIGLU    /* W is gate and up by turns of 8 rows: y[M][N/2] = silu(gate) * up in float32, rounded once */
};

typedef struct gemm_args {
    int M;
    const bf16 *x; /* [M][K], row stride ldx, 16-byte aligned */
    int ldx;
    const weight *w;
    bf16 *y;       /* row stride ldy */
    int ldy;
    enum epilogue epi;
} gemm_args;

/* ===========================================================================
 * MARK: 6. GEMM on wgmma [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 7. GEMM for few rows, and the choice [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 8. Attention: the work list [host]
 * Turns the spans of a step into lists of items that kernels take one by one: plain integers, made once per step, used by all
 * layers. A query is one head of one row; the G query heads of a kv head read the same K and V, so they are counted together:
 * query q of kv head h is row q / G, head h*G + q % G. An item is a run of queries of one span against a run of kv positions, for
 * every kv head:
 *
 *      span with at most 16 queries  ->  one small item: a warp, bound by the bytes of K and V
 *      span with more                ->  tiles of tile_q queries: a block, bound by the tensor cores
 *
 * A row that lies in several spans (shared prefix, own part) is done level by level, a level behind the other on the stream: its
 * first span leaves a state (O and LSE, float32), the next begins with it, the last writes o. So nothing is merged twice, every
 * row has one state no matter how many spans it lies in, and the order of sums is fixed.
 *
 * Few items do not fill the GPU: then kv ranges are cut (split-KV), the parts go to part_o and part_lse and one merge per row
 * follows in the same level. The length of a part follows from the sum of kv positions in the level alone.
 *
 * What is expected of the spans: for each row they come in rising kv0, and two spans that have a row in common have all rows of the
 * later one in common (a tree of intervals). Cost: O(spans + rows + pages in use).
 * =========================================================================== */

enum {
    ATTN_TILE_Q = 64,    /* queries of a tile */
    ATTN_SMALL_Q = 16, /* queries of a small item, and the unit of the split-KV buffer */
    ATTN_MIN_PART = 256, /* kv positions of a part, at least */
    ATTN_WARPS = 16    /* small items that an SM works on at a time, roughly */
};

enum { ATTN_SEED = 1, ATTN_TO_O = 2, ATTN_TO_STATE = 4, ATTN_SLOT = 3 /* shift */ }; /* attn_item.where; neither TO: a part */

typedef struct attn_item {
    int q0, nq;         /* queries row*G + g, for every kv head */
    int kv0, kv1;       /* positions; kv0 is a multiple of B */
    int page0;          /* of attn_plan.pages, page of kv0 */
    int pos_lo, pos_hi; /* lowest and highest position of the rows */
    int where;          /* ATTN_SEED: begin with the rows' state; ATTN_TO_O, ATTN_TO_STATE, or slot << ATTN_SLOT of part_o */
} attn_item;

typedef struct attn_merge { /* the n parts of one item, slot after slot, become one */
    int q0, nq, slot, n, where;
} attn_merge;

typedef struct attn_level {
    int tile0, n_tiles, small0, n_small, merge0, n_merges;
} attn_level;

typedef struct attn_span { /* of a toka_span, for the time of planning */
    int level, page0, where;
} attn_span;

struct attn_plan {
    int tile_q, max_items, max_merges, max_spans, max_levels, max_slots;
    size_t max_pages;
    float *state_o, *state_lse; /* [T][H][D], [T][H]: base-2 LSE */
    float *part_o, *part_lse;   /* [slots][K][16][D], [slots][K][16] */
    attn_span *spans;           /* [max_spans] */
    attn_level *levels;         /* [max_levels] */
    uint16_t *row_level;        /* [max_tokens] levels that the row has behind it; while planning */
    int n_levels, n_items, n_merges, n_slots;
    attn_merge *merges;         /* [max_merges] this step's, on the host while planning ... */
    attn_item *items;           /* ... in d->up ... */
    const attn_item *dev_items; /* ... and on the device */
    const attn_merge *dev_merges;
    const int *dev_pages;
};

static inline int attn_min(int a, int b) { return a < b ? a : b; }
static inline int attn_max(int a, int b) { return a > b ? a : b; }

static inline bool attn_is_small(const toka_device *d, const toka_span *sp) {
    return sp->n_rows * (d->shape->H / d->shape->K) <= ATTN_SMALL_Q;
}

/* Levels, and which span is the last of its rows. Those that end rows with a small item all go to the last level: one launch. */
static void attn_plan_levels(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    memset(p->row_level, 0, (size_t)s->T * sizeof *p->row_level);
    p->n_levels = 0;
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        int level = p->row_level[sp->row0];
        for (int r = sp->row0; r < sp->row0 + sp->n_rows; r++) {
            assert(p->row_level[r] == level);
            p->row_level[r] = (uint16_t)(level + 1);
        }
        p->spans[i].level = level;
        p->n_levels = attn_max(p->n_levels, level + 1);
    }
    assert(p->n_levels <= p->max_levels);
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        attn_span *a = &p->spans[i];
        bool last = p->row_level[sp->row0] == a->level + 1;
        a->where = (a->level ? ATTN_SEED : 0) | (last ? ATTN_TO_O : ATTN_TO_STATE);
        if (last && attn_is_small(d, sp)) a->level = p->n_levels - 1;
    }
}

/* The page table entries of all spans, one behind the other. */
static bool attn_plan_pages(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    int64_t n = 0;
    void *host;
    for (int i = 0; i < s->n_spans; i++) p->spans[i].page0 = (int)n, n += ceil_div(s->spans[i].n_kv, d->shape->B);
    if (n > (int64_t)p->max_pages) {
        d->error.code = TOKA_E_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: attention: the step names %lld pages, there is room for %zu",
                 (long long)n, p->max_pages);
        return false;
    }
    p->dev_pages = (const int *)stage_room(&d->up, (size_t)n * sizeof(int), &host);
    for (int i = 0; i < s->n_spans; i++) {
        if (i + 8 < s->n_spans) __builtin_prefetch(s->pages + s->spans[i + 8].page0);
        memcpy((int *)host + p->spans[i].page0, s->pages + s->spans[i].page0,
               (size_t)ceil_div(s->spans[i].n_kv, d->shape->B) * sizeof(int));
    }
    return true;
}

/* How long the parts of a level's ranges are: as many as keep `at_once` items at work, if they were all cut into parts. */
static int attn_part_len(const toka_device *d, int64_t kv_positions, int at_once) {
    int64_t len = kv_positions * d->shape->K / at_once;
    return len < ATTN_MIN_PART ? ATTN_MIN_PART : len < INT_MAX / 2 ? (int)len : INT_MAX / 2;
}

/* One item, or its parts and their merge. */
static void attn_emit(toka_device *d, attn_item item, int part_len) {
    attn_plan *p = d->attn;
    int len = item.kv1 - item.kv0, n = (len + part_len / 2) / part_len, units = ceil_div(item.nq, ATTN_SMALL_Q);
    int B = d->shape->B, part = ceil_div(ceil_div(attn_max(len, 1), attn_max(n, 1)), B) * B;
    n = ceil_div(len, part);
    if (n <= 1 || p->n_slots + n * units > p->max_slots || p->n_items + n > p->max_items ||
        p->n_merges == p->max_merges) {
        if (p->n_items < p->max_items) p->items[p->n_items] = item;
        p->n_items++;
        return;
    }
    p->merges[p->n_merges++] = attn_merge{item.q0, item.nq, p->n_slots, n, item.where};
    for (int i = 0; i < n; i++, p->n_slots += units) {
        attn_item *a = &p->items[p->n_items++];
        *a = item;
        a->kv0 = item.kv0 + i * part, a->kv1 = attn_min(a->kv0 + part, item.kv1);
        a->page0 = item.page0 + i * (part / B), a->where = p->n_slots << ATTN_SLOT;
    }
}

/* The items of one span; the last rows, which see most, come first. */
static void attn_emit_span(toka_device *d, const toka_step *s, int i, int part_len) {
    const toka_span *sp = &s->spans[i];
    const attn_span *a = &d->attn->spans[i];
    int G = d->shape->H / d->shape->K, end = (sp->row0 + sp->n_rows) * G;
    int tile = attn_is_small(d, sp) ? ATTN_SMALL_Q : d->attn->tile_q, n = ceil_div(sp->n_rows * G, tile);
    for (int t = n - 1; t >= 0; t--) {
        attn_item item = {.q0 = sp->row0 * G + t * tile, .kv0 = sp->kv0, .page0 = a->page0, .pos_lo = INT_MAX, .pos_hi = -1,
                          .where = a->where};
        item.nq = attn_min(tile, end - item.q0);
        for (int r = item.q0 / G; r <= (item.q0 + item.nq - 1) / G; r++) {
            item.pos_lo = attn_min(item.pos_lo, s->pos[r]);
            item.pos_hi = attn_max(item.pos_hi, s->pos[r]);
        }
        item.kv1 = attn_max(sp->kv0, attn_min(sp->kv0 + sp->n_kv, item.pos_hi + 1));
        attn_emit(d, item, part_len);
    }
}

/* All items of a level of one kind. */
static void attn_plan_kind(toka_device *d, const toka_step *s, int level, bool small) {
    attn_plan *p = d->attn;
    int64_t work = 0;
    for (int i = 0; i < s->n_spans; i++) {
        if (p->spans[i].level != level || attn_is_small(d, &s->spans[i]) != small) continue;
        int tiles = small ? 1 : ceil_div(s->spans[i].n_rows * (d->shape->H / d->shape->K), p->tile_q);
        work += (int64_t)s->spans[i].n_kv * tiles;
    }
    int part_len = attn_part_len(d, work, small ? d->n_sms * ATTN_WARPS : d->n_sms);
    for (int i = 0; work && i < s->n_spans; i++)
        if (p->spans[i].level == level && attn_is_small(d, &s->spans[i]) == small) attn_emit_span(d, s, i, part_len);
}

/* Makes the lists of this step and puts them into d->up. Before stage_send. */
static void attn_plan_step(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    assert(s->n_spans <= p->max_spans && s->T <= d->options.max_tokens);
    attn_plan_levels(d, s);
    if (!attn_plan_pages(d, s)) return;
    p->dev_items = (const attn_item *)stage_room(&d->up, (size_t)p->max_items * sizeof *p->items, (void **)&p->items);
    p->n_items = p->n_merges = 0;
    for (int i = 0; i < p->n_levels; i++) {
        attn_level *l = &p->levels[i];
        l->merge0 = p->n_merges, l->tile0 = p->n_items, p->n_slots = 0;
        attn_plan_kind(d, s, i, false);
        l->n_tiles = p->n_items - l->tile0, l->small0 = p->n_items;
        attn_plan_kind(d, s, i, true);
        l->n_small = p->n_items - l->small0, l->n_merges = p->n_merges - l->merge0;
    }
    d->up.used -= (size_t)(p->max_items - attn_min(p->n_items, p->max_items)) * sizeof *p->items;
    p->dev_merges = (const attn_merge *)stage_put(&d->up, p->merges, (size_t)p->n_merges * sizeof *p->merges);
    if (p->n_items <= p->max_items) return;
    d->error.code = TOKA_E_DEVICE;
    snprintf(d->error.msg, sizeof d->error.msg, "GPU: attention: the step has %d items of work, there is room for %d",
             p->n_items, p->max_items);
}

/* ===========================================================================
 * MARK: 9. Attention: the kernels [kernel]
 * o[row][head] = sum over t of p[t] V[t], p = softmax over t of (q . K[t] / sqrt(D)), t the kv positions that the row sees; in
 * pieces (items of chapter 8), each of which yields O = its own weighted mean and LSE = log2 of its sum of 2^score, with scores
 * times log2(e)/sqrt(D), so that pieces join as
 *
 *      m = max(LSE1, LSE2), w = 2^(LSE - m):   O = (w1 O1 + w2 O2) / (w1 + w2),   LSE = m + log2(w1 + w2)
 *
 * A piece without any key has LSE = -inf and O = 0.
 * =========================================================================== */

typedef struct attn_args {
    const bf16 *q;  /* [T][H][D] */
    bf16 *o;        /* [T][H][D] */
    const bf16 *kv; /* [page][K][K, V][B][D] of this layer */
    const int *pages, *pos;
    const attn_item *items;
    float *state_o, *state_lse, *part_o, *part_lse;
    int K, G, D, log2_B, window;
    float scale; /* log2(e) / sqrt(D) */
} attn_args;

__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Where O and LSE of query q of kv head h go: index of a head in [T][H], or of a row of part_o. */
__device__ static inline size_t attn_head_at(const attn_args &a, int q, int h) {
    return (size_t)(q / a.G) * (a.K * a.G) + h * a.G + q % a.G;
}
__device__ static inline size_t attn_part_at(const attn_args &a, int slot, int i, int h) {
    return ((size_t)(slot + i / ATTN_SMALL_Q) * a.K + h) * ATTN_SMALL_Q + i % ATTN_SMALL_Q;
}

/* How a finished query leaves: weights of what is in registers (`own`, 1 / sum included) and of the state it began with. */
typedef struct attn_exit {
    bf16 *o;                 /* one of the two: rows of D */
    float *o32;
    const float *seed;       /* or NULL */
    float own, old;
} attn_exit;

/* LSE of the state that query i of the item begins with, -inf if none. All threads read it before one writes the new one. */
__device__ static inline float attn_old_lse(const attn_args &a, const attn_item &it, int i, int h) {
    return it.where & ATTN_SEED ? a.state_lse[attn_head_at(a, it.q0 + i, h)] : -INFINITY;
}
/* Query i of the item, with maximum m and sum l of its own keys and `old` of its state: writes LSE (thread `first` of those that
 * hold the query) and says how O leaves. */
__device__ static inline attn_exit attn_leave(const attn_args &a, const attn_item &it, int i, int h, float m, float l, float old,
                                            bool first) {
    attn_exit e = {};
    float lse = l > 0 ? m + log2f(l) : -INFINITY;
    e.own = l > 0 ? 1 / l : 0;
    size_t at = attn_head_at(a, it.q0 + i, h);
    if (!(it.where & (ATTN_TO_O | ATTN_TO_STATE))) {
        size_t part = attn_part_at(a, it.where >> ATTN_SLOT, i, h);
        if (first) a.part_lse[part] = lse;
        e.o32 = a.part_o + part * a.D;
        return e;
    }
    if (old > -INFINITY) {
        float top = fmaxf(lse, old), w = ex2(lse - top), w_old = ex2(old - top), sum = w + w_old;
        e.own *= w / sum, e.old = w_old / sum, lse = top + log2f(sum);
        e.seed = a.state_o + at * a.D;
    }
    if (it.where & ATTN_TO_O) {
        e.o = a.o + at * a.D;
        return e;
    }
    e.o32 = a.state_o + at * a.D;
    if (first) a.state_lse[at] = lse;
    return e;
}
__device__ static inline void attn_leave_pair(const attn_exit &e, int col, float x, float y) { /* columns col, col + 1 */
    x *= e.own, y *= e.own;
    if (e.seed) {
        float2 s = *(const float2 *)(e.seed + col);
        x += e.old * s.x, y += e.old * s.y;
    }
    if (e.o) *(uint32_t *)(e.o + col) = pack_bf16(x, y);
    else *(float2 *)(e.o32 + col) = make_float2(x, y);
}

/* ---- Items on mma.sync: any D, any card ----
 * In: items (grid: item, kv head). Each warp of the block holds 16 queries of the item, all share the tiles of K and V.
 * WARPS 1: small items; WARPS 4: tiles of 64 queries. DP: D rounded up to 64, 128 or 256; what is beyond D is zero and, in steps of
 * 16, not computed. Shared: K and V tiles [TOK][DP] bf16 in a ring of STAGES, 16-byte pieces at piece ^ (row % 8), so that ldmatrix
 * meets no bank twice. Bytes: K and V once per item; FLOPs: 4 * 16 * WARPS * D * kv.
 * Why: m16n8k16 leaves P where PV wants its A operand, V is transposed on its way by ldmatrix, and nothing is synchronised beyond the
 * block. */
template <int DP, int WARPS> struct attn_tile_shape {
    static constexpr int TOK = DP == 256 ? (WARPS == 1 ? 16 : 32) : WARPS == 1 ? 2048 / DP : 64;
    static constexpr int STAGES = WARPS == 1 ? 3 : 2;
    static constexpr int BYTES = STAGES * 2 * TOK * DP * 2;
};

/* Positions kv .. kv+TOK-1 of K and V to stage memory; beyond kv1 and beyond D: zeros. */
template <int DP, int WARPS>
__device__ static inline void attn_load_tile(const attn_args &a, const attn_item &it, int h, int kv, bf16 *to) {
    constexpr int TOK = attn_tile_shape<DP, WARPS>::TOK;
    int pieces = (a.D + 15) / 16 * 2, page_mask = (1 << a.log2_B) - 1;
    for (int i = threadIdx.x; i < 2 * TOK * pieces; i += WARPS * 32) {
        int piece = i % pieces, r = i / pieces, row = r % TOK, is_v = r / TOK, t = kv + row - it.kv0;
        bool there = kv + row < it.kv1 && piece * 8 < a.D;
        const bf16 *from = a.kv;
        if (there) {
            size_t block = ((size_t)a.pages[it.page0 + (t >> a.log2_B)] * a.K + h) * 2 + is_v;
            from += ((block << a.log2_B) + (t & page_mask)) * a.D + piece * 8;
        }
        cp_async_16(smem_at(to + (is_v * TOK + row) * DP + (piece ^ (row & 7)) * 8), from, there ? 16 : 0);
    }
}

/* s = Q K^T of one warp: 16 queries, TOK positions. */
template <int DP, int TOK>
__device__ static inline void attn_qk(float (&s)[TOK / 8][4], const uint32_t (&q)[DP / 16][4], const bf16 *k, int D) {
    int lane = threadIdx.x % 32, row = (lane & 7) + (lane >> 4) * 8, piece = lane >> 3 & 1;
#pragma unroll
    for (int n = 0; n < TOK / 8; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
        if (c * 16 >= D) break;
#pragma unroll
        for (int n = 0; n < TOK / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, smem_at(k + (n * 16 + row) * DP + ((c * 2 + piece) ^ (row & 7)) * 8));
            mma_16816(s[2 * n], q[c], b);
            mma_16816(s[2 * n + 1], q[c], b + 2);
        }
    }
}

/* acc += P V; p as it came out of attn_qk. */
template <int DP, int TOK>
__device__ static inline void attn_pv(float (&acc)[DP / 8][4], const float (&p)[TOK / 8][4], const bf16 *v, int D) {
    int lane = threadIdx.x % 32, row = lane & 15, piece = lane >> 4;
#pragma unroll
    for (int n = 0; n < TOK / 16; n++) {
        uint32_t a[4] = {pack_bf16(p[2 * n][0], p[2 * n][1]), pack_bf16(p[2 * n][2], p[2 * n][3]),
                         pack_bf16(p[2 * n + 1][0], p[2 * n + 1][1]), pack_bf16(p[2 * n + 1][2], p[2 * n + 1][3])};
#pragma unroll
        for (int c = 0; c < DP / 16; c++) {
            if (c * 16 >= D) break;
            uint32_t b[4];
            ldmatrix_x4_trans(b, smem_at(v + (n * 16 + row) * DP + ((c * 2 + piece) ^ (row & 7)) * 8));
            mma_16816(acc[2 * c], a, b);
            mma_16816(acc[2 * c + 1], a, b + 2);
        }
    }
}

/* Scores of positions that a query must not see become -inf. pos: of the thread's two queries; kv: position of s[0][0]. */
template <int N>
__device__ static inline void attn_mask(float (&s)[N][4], const int pos[2], int kv, int kv1, int window) {
    kv += threadIdx.x % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int t = kv + n * 8 + (i & 1), p = pos[i >> 1];
            if (t > p || t >= kv1 || (window && t <= p - window)) s[n][i] = -INFINITY;
        }
}

/* Online softmax: s becomes 2^(scale s - m), m and l go on, acc is scaled to the new m. */
template <int N, int C>
__device__ static inline void attn_soften(float (&s)[N][4], float (&acc)[C][4], float m[2], float l[2], float scale) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int n = 0; n < N; n++) top = fmaxf(top, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        top = fmaxf(m[r], quad_max(top) * scale);
        float base = top == -INFINITY ? 0 : top, fade = ex2(m[r] - base);
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 2 * r; i < 2 * r + 2; i++) {
                s[n][i] = ex2(fmaf(s[n][i], scale, -base));
                sum += s[n][i];
            }
        m[r] = top, l[r] = l[r] * fade + sum;
#pragma unroll
        for (int c = 0; c < C; c++) acc[c][2 * r] *= fade, acc[c][2 * r + 1] *= fade;
    }
}

/* First position that some row of the item sees through the window, down to a whole number of tiles from kv0. */
__device__ static inline int attn_first(const attn_args &a, const attn_item &it, int tile) {
    int first = a.window ? it.pos_lo - a.window + 1 - it.kv0 : 0;
    return it.kv0 + (first > 0 ? first / tile * tile : 0);
}
__device__ static inline bool attn_masked(const attn_args &a, const attn_item &it, int kv, int tile) { /* some score of the tile */
    return kv + tile > it.pos_lo + 1 || kv + tile > it.kv1 || (a.window && kv <= it.pos_hi - a.window);
}

template <int DP, int WARPS> __global__ void __launch_bounds__(WARPS * 32) attn_mma(const __grid_constant__ attn_args a) {
    typedef attn_tile_shape<DP, WARPS> shape;
    constexpr int TOK = shape::TOK, STAGES = shape::STAGES;
    extern __shared__ __align__(1024) char attn_smem[];
    bf16 *ring = (bf16 *)attn_smem;
    grid_wait();
    const attn_item it = a.items[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, lane = threadIdx.x % 32, i0 = threadIdx.x / 32 * 16 + lane / 4;
    int first = attn_first(a, it, TOK), n_tiles = it.kv1 > first ? (it.kv1 - first + TOK - 1) / TOK : 0;
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < n_tiles) attn_load_tile<DP, WARPS>(a, it, h, first + i * TOK, ring + i * 2 * TOK * DP);
        cp_async_commit();
    }
    uint32_t q[DP / 16][4] = {};
    float acc[DP / 8][4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {};
    float old[2];
    int pos[2] = {-1, -1};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (i0 + 8 * r >= it.nq) continue;
        pos[r] = a.pos[(it.q0 + i0 + 8 * r) / a.G];
        old[r] = attn_old_lse(a, it, i0 + 8 * r, h);
        const bf16 *from = a.q + attn_head_at(a, it.q0 + i0 + 8 * r, h) * a.D;
#pragma unroll
        for (int c = 0; c < DP / 8; c++)
            if (c * 8 < a.D) q[c / 2][r + c % 2 * 2] = *(const uint32_t *)(from + c * 8 + lane % 4 * 2);
    }
    for (int i = 0; i < n_tiles; i++) {
        int next = i + STAGES - 1, kv = first + i * TOK;
        if (next < n_tiles) attn_load_tile<DP, WARPS>(a, it, h, first + next * TOK, ring + next % STAGES * 2 * TOK * DP);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
        const bf16 *k = ring + i % STAGES * 2 * TOK * DP;
        float s[TOK / 8][4];
        attn_qk<DP, TOK>(s, q, k, a.D);
        if (attn_masked(a, it, kv, TOK)) attn_mask(s, pos, kv, it.kv1, a.window);
        attn_soften(s, acc, m, l, a.scale);
        attn_pv<DP, TOK>(acc, s, k + TOK * DP, a.D);
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
    }
    __syncwarp(); /* all have read the old LSE, also without a tile */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(l[r]);
        if (i0 + 8 * r >= it.nq) continue;
        attn_exit e = attn_leave(a, it, i0 + 8 * r, h, m[r], sum, old[r], lane % 4 == 0);
#pragma unroll
        for (int c = 0; c < DP / 8; c++)
            if (c * 8 < a.D) attn_leave_pair(e, c * 8 + lane % 4 * 2, acc[c][2 * r], acc[c][2 * r + 1]);
    }
}

template <int DP, int WARPS> static void attn_mma_launch(toka_device *d, const attn_args &a, int n) {
    attn_mma<DP, WARPS><<<n * a.K, WARPS * 32, attn_tile_shape<DP, WARPS>::BYTES, d->stream>>>(a);
}
template <int DP, int WARPS> static void attn_mma_open(toka_device *d) {
    latch(d, cudaFuncSetAttribute(attn_mma<DP, WARPS>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  attn_tile_shape<DP, WARPS>::BYTES), "attention");
}

/* ---- Merge of the parts of split-KV ----
 * In: merges (grid: merge, kv head), n parts each. Out: as the item that was cut would have written. One warp per query; bytes:
 * n * D * 4 read per query. */
enum { ATTN_MERGE_WARPS = 4 };
__global__ void __launch_bounds__(ATTN_MERGE_WARPS * 32) attn_join(const __grid_constant__ attn_args a, const attn_merge *merges) {
    grid_wait();
    const attn_merge me = merges[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, lane = threadIdx.x % 32, units = (me.nq + ATTN_SMALL_Q - 1) / ATTN_SMALL_Q;
    attn_item it = {};
    it.q0 = me.q0, it.nq = me.nq, it.where = me.where;
    for (int i = threadIdx.x / 32; i < me.nq; i += ATTN_MERGE_WARPS) {
        float m = -INFINITY, l = 0;
        for (int j = 0; j < me.n; j++) m = fmaxf(m, a.part_lse[attn_part_at(a, me.slot + j * units, i, h)]);
        for (int j = 0; j < me.n && m > -INFINITY; j++) l += ex2(a.part_lse[attn_part_at(a, me.slot + j * units, i, h)] - m);
        float old = attn_old_lse(a, it, i, h);
        __syncwarp();
        attn_exit e = attn_leave(a, it, i, h, m, l, old, lane == 0);
        for (int col = lane * 2; col < a.D; col += 64) {
            float x = 0, y = 0;
            for (int j = 0; j < me.n && m > -INFINITY; j++) {
                size_t at = attn_part_at(a, me.slot + j * units, i, h);
                float w = ex2(a.part_lse[at] - m);
                float2 p = *(const float2 *)(a.part_o + at * a.D + col);
                x += w * p.x, y += w * p.y;
            }
            attn_leave_pair(e, col, x, y);
        }
    }
}

/* ---- The op ---- */

static void attn_kernels_open(toka_device *d) {
    attn_mma_open<64, 1>(d), attn_mma_open<128, 1>(d), attn_mma_open<256, 1>(d);
    attn_mma_open<64, 4>(d), attn_mma_open<128, 4>(d), attn_mma_open<256, 4>(d);
}

static void attn_sizes(const toka_device *d, attn_plan *p) {
    const toka_shape *sh = d->shape;
    int T = d->options.max_tokens, G = sh->H / sh->K, seq_pages = ceil_div(sh->max_len, sh->B);
    int64_t pages = (int64_t)T * seq_pages;
    p->tile_q = ATTN_TILE_Q;
    p->max_spans = 2 * T + 64;
    p->max_levels = seq_pages + 1;
    p->max_pages = (size_t)(pages < 1 << 24 ? pages : 1 << 24);
    /* the parts of split-KV: with parts of the length that attn_part_len gives, at most 4/3 of the warps or blocks at work */
    p->max_slots = d->n_sms * (ATTN_WARPS + p->tile_q / ATTN_SMALL_Q) * 3 / 2 / sh->K + 64;
    p->max_merges = 2 * p->max_slots;
    p->max_items = p->max_spans + p->max_slots + 8 * ceil_div(T * G, p->tile_q);
}

/* Takes all memory of attention, in d->attn. shape, options, n_sms and stream are set. Failures are latched. */
static void attn_open(toka_device *d) {
    const toka_shape *sh = d->shape;
    attn_plan *p = (attn_plan *)calloc(1, sizeof *p);
    if (!p) abort();
    assert(sh->D % 8 == 0 && sh->D <= 256 && sh->H % sh->K == 0 && sh->B >= 16 && (sh->B & (sh->B - 1)) == 0);
    d->attn = p;
    attn_sizes(d, p);
    size_t rows = (size_t)d->options.max_tokens * sh->H, parts = (size_t)p->max_slots * sh->K * ATTN_SMALL_Q;
    p->state_o = (float *)dev_alloc(d, rows * sh->D * sizeof(float), "attention state");
    p->state_lse = (float *)dev_alloc(d, rows * sizeof(float), "attention state");
    p->part_o = (float *)dev_alloc(d, parts * sh->D * sizeof(float), "attention parts");
    p->part_lse = (float *)dev_alloc(d, parts * sizeof(float), "attention parts");
    p->spans = (attn_span *)malloc((size_t)p->max_spans * sizeof *p->spans);
    p->levels = (attn_level *)malloc((size_t)p->max_levels * sizeof *p->levels);
    p->merges = (attn_merge *)malloc((size_t)p->max_merges * sizeof *p->merges);
    p->row_level = (uint16_t *)malloc((size_t)d->options.max_tokens * sizeof *p->row_level);
    if (!p->spans || !p->levels || !p->merges || !p->row_level) abort();
    attn_kernels_open(d);
}

static void attn_close(toka_device *d) { /* host memory; the device's goes with all blocks */
    if (!d->attn) return;
    free(d->attn->spans), free(d->attn->levels), free(d->attn->merges), free(d->attn->row_level), free(d->attn);
    d->attn = NULL;
}

/* Bytes of d->up that attn_plan_step takes at most. */
static size_t attn_stage_bytes(const toka_device *d) {
    const attn_plan *p = d->attn;
    return (size_t)p->max_items * sizeof(attn_item) + (size_t)p->max_merges * sizeof(attn_merge) + p->max_pages * sizeof(int) + 64;
}

static void attn_launch_items(toka_device *d, attn_args a, int item0, int n, bool small) {
    if (!n) return;
    a.items = d->attn->dev_items + item0;
    if (a.D <= 64) small ? attn_mma_launch<64, 1>(d, a, n) : attn_mma_launch<64, 4>(d, a, n);
    else if (a.D <= 128) small ? attn_mma_launch<128, 1>(d, a, n) : attn_mma_launch<128, 4>(d, a, n);
    else small ? attn_mma_launch<256, 1>(d, a, n) : attn_mma_launch<256, 4>(d, a, n);
    LAUNCHED(d, "attention");
}

/* q: [T][H][D], o: [T][H][D], both on the device, not the same. Pages and work lists are those of attn_plan_step. */
static void attention(toka_device *d, const toka_step *s, int layer, const bf16 *q, bf16 *o) {
    const toka_shape *sh = d->shape;
    const attn_plan *p = d->attn;
    attn_args a = {.q = q, .o = o, .kv = d->kv + (size_t)layer * d->kv_layer, .pages = p->dev_pages, .pos = d->rows.pos,
                   .state_o = p->state_o, .state_lse = p->state_lse, .part_o = p->part_o, .part_lse = p->part_lse,
                   .K = sh->K, .G = sh->H / sh->K, .D = sh->D, .log2_B = __builtin_ctz(sh->B),
                   .window = d->layers[layer].window, .scale = (float)(M_LOG2E / sqrt((double)sh->D))};
    (void)s;
    if (d->error.code) return;
    for (int i = 0; i < p->n_levels; i++) {
        const attn_level *l = &p->levels[i];
        attn_launch_items(d, a, l->tile0, l->n_tiles, false);
        attn_launch_items(d, a, l->small0, l->n_small, true);
        if (!l->n_merges) continue;
        attn_join<<<l->n_merges * a.K, ATTN_MERGE_WARPS * 32, 0, d->stream>>>(a, p->dev_merges + l->merge0);
        LAUNCHED(d, "attention, parts");
    }
}

/* ===========================================================================
 * MARK: 10. LM head and sampling [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 11. The op table [host]
 * =========================================================================== */
