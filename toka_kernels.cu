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
/* The same without making earlier writes visible there (a fence that costs as much as a block of products): the reads of wgmma that
 * it reports have ended. */
__device__ static inline void mbar_arrive_remote_read(uint32_t bar, int cta) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}"
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

/* ---- wgmma: d[64][N] (+)= a[64][16] b[N][16]^T by one warpgroup ----
 *
 * Warp w of the four holds rows 16w .. 16w+15; of each block j of 8 columns, lane l holds d[4j], d[4j+1] = (row l/4, columns
 * 8j + 2(l%4) + {0,1}) and d[4j+2], d[4j+3] = the same of row l/4 + 8. The packed bf16 of two blocks j, j+1 are the fragment a of
 * one k16. Order: wgmma_fence, any number of wgmma_ss and wgmma_rs, wgmma_commit, wgmma_wait; nobody touches d (or a) between.
 * scale_d 0: d is written, not added to. */

#define WG_REGS_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_REGS_40 WG_REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_REGS_48 WG_REGS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_REGS_64 WG_REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_REGS_80 WG_REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_REGS_96 WG_REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_REGS_112 WG_REGS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_REGS_128 WG_REGS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_ACC_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WG_ACC_16(i) WG_ACC_8(i), WG_ACC_8(i + 8)
#define WG_ACC_32 WG_ACC_16(0), WG_ACC_16(16)
#define WG_ACC_40 WG_ACC_32, WG_ACC_8(32)
#define WG_ACC_48 WG_ACC_32, WG_ACC_16(32)
#define WG_ACC_64 WG_ACC_48, WG_ACC_16(48)
#define WG_ACC_80 WG_ACC_64, WG_ACC_16(64)
#define WG_ACC_96 WG_ACC_80, WG_ACC_16(80)
#define WG_ACC_112 WG_ACC_96, WG_ACC_16(96)
#define WG_ACC_128 WG_ACC_112, WG_ACC_16(112)
/* H = n / 2 registers, then the numbers of the operands behind them. */
#define WG_SS(n, H, A, B, S, T)                                                                                               \
    if constexpr (N == n)                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16"         \
                 " {" WG_REGS_##H "}, %" #A ", %" #B ", p, 1, 1, 0, %" #T ";}"                                                \
                 : WG_ACC_##H : "l"(a), "l"(b), "r"(scale_d), "n"(TRANS_B))
#define WG_RS(n, H, A0, A1, A2, A3, B, S, T)                                                                                  \
    if constexpr (N == n)                                                                                                     \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S ", 0; wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16"         \
                 " {" WG_REGS_##H "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1, %" #T ";}"                     \
                 : WG_ACC_##H : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(TRANS_B))

/* Both from shared memory by descriptor. TRANS_B 1: b lies as [16][N], rows of N (wgmma_desc_trans). */
template <int N, int TRANS_B = 0> __device__ static inline void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 160 || N == 192 || N == 224 || N == 256);
    WG_SS(64, 32, 32, 33, 34, 35);
    WG_SS(80, 40, 40, 41, 42, 43);
    WG_SS(96, 48, 48, 49, 50, 51);
    WG_SS(128, 64, 64, 65, 66, 67);
    WG_SS(160, 80, 80, 81, 82, 83);
    WG_SS(192, 96, 96, 97, 98, 99);
    WG_SS(224, 112, 112, 113, 114, 115);
    WG_SS(256, 128, 128, 129, 130, 131);
}
/* a from registers. */
template <int N, int TRANS_B> __device__ static inline void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d) {
    static_assert(N == 64 || N == 80 || N == 96 || N == 128 || N == 160 || N == 192 || N == 224 || N == 256);
    WG_RS(64, 32, 32, 33, 34, 35, 36, 37, 38);
    WG_RS(80, 40, 40, 41, 42, 43, 44, 45, 46);
    WG_RS(96, 48, 48, 49, 50, 51, 52, 53, 54);
    WG_RS(128, 64, 64, 65, 66, 67, 68, 69, 70);
    WG_RS(160, 80, 80, 81, 82, 83, 84, 85, 86);
    WG_RS(192, 96, 96, 97, 98, 99, 100, 101, 102);
    WG_RS(224, 112, 112, 113, 114, 115, 116, 117, 118);
    WG_RS(256, 128, 128, 129, 130, 131, 132, 133, 134);
}
/* Keeps the compiler from moving reads of d above the wgmma_wait before it. */
template <int N> __device__ static inline void wgmma_keep(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
/* Matrix descriptor of b for TRANS_B: rows of 64 columns in 128 bytes with 128-byte swizzle, base aligned to 1,024 bytes; 8 rows every
 * 1,024 bytes; panels of 64 columns lie `panel_bytes` apart. The next 16 rows are 2,048 bytes on: + 128. */
__device__ static inline uint64_t wgmma_desc_trans(uint32_t at, int panel_bytes) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
/* Address, usable by cluster_store_v4, of the same offset in CTA `cta` of the cluster. */
__device__ static inline uint32_t cluster_smem(uint32_t at, int cta) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(cta));
    return r;
}
__device__ static inline void cluster_store_v4(uint32_t to, const float v[4]) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
__device__ static inline uint4 smem_load_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}
/* Four 8x8 matrices of 2-byte elements to shared memory; lane 8i+j gives the address of row j of matrix i, 16 bytes each. */
__device__ static inline void stmatrix_x4(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
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
 *
 * y[M][N] = x[M][K] W[N][K]^T for M from about 100 rows up, and what is done to the accumulators before they leave (epi_*).
 *
 * One CTA of 384 threads works on tiles of 128 rows by BN columns, K in blocks of 64 (one 128-byte row of the swizzle). Warpgroup 0
 * gives its registers away; its first thread feeds a ring of stages by TMA. Warpgroups 1 and 2 multiply: 64 rows each, BN/2
 * float32 accumulators a thread.
 *
 *   ring of stages in shared memory, each [128 rows of x][64] and [BN rows of W][64], 128-byte swizzle
 *     full[s]   1 arrival (expect_tx) + the bytes;            waited for by both consumers
 *     empty[s]  one arrival per consumer warpgroup and CTA;   waited for by the producer
 *   behind the ring: staging of the output, 16 rows per warp, so that each of the 8 warps stores (and for EPI_RESIDUAL has loaded)
 *   its own rows by TMA and waits for no other warp: res[w]
 *
 * Persistent: the grid is one CTA per multiprocessor, a unit of work is `mc` tiles below each other. mc = 2: a cluster of two CTAs
 * shares W's rows, each loads half of them into both. Units go down `group` rows of units, then right, so that a wave's part of
 * x and W stays in L2. The ring runs on across tiles: while the consumers are in the epilogue, the next tile's stages fill.
 *
 * SPLIT > 1: few tiles. The CTAs of a cluster share one tile and each takes a part of K; then each gets BN/SPLIT columns of all
 * partial sums through the cluster's shared memory, adds them in order of K and runs the epilogue on them. One unit per cluster.
 *
 * FLOPs 2MNK. L2 to shared memory per tile (128 + BN/mc) K 2 bytes; that, not the tensor cores, bounds narrow tiles. Shared memory is read
 * 2 (64 + BN) 128 bytes per block of K and written (128 + BN) 128 bytes: at BN = 256 both together take as long as the mma.
 * Any M >= 1; N a multiple of 8 (EPI_SWIGLU 16), K of 8: TMA reads zeros beyond the edges and stores nothing there.
 * =========================================================================== */

struct gemm_job { /* what the kernel is told */
    int M, N, K;
    int units_m, tiles_n; /* ceil(M / (128 mc)), ceil(N / BN) */
    int group, mc;
};

/* Shared memory of one instance: OUT output columns are staged, 0 none. */
template <int BN, int OUT> struct gemm_smem {
    static constexpr int stage_bytes = (128 + BN) * 128;
    static constexpr int out_bytes = 128 * OUT * 2;
    static constexpr int room = 232448 - 1024 - 256 - out_bytes; /* alignment, barriers */
    static constexpr int stages = room / stage_bytes < 6 ? room / stage_bytes : 6;
    static constexpr int bytes = 1024 + 256 + out_bytes + stages * stage_bytes;
    static constexpr int out_at = stages * stage_bytes, bars_at = out_at + out_bytes;
};

/* Staged output lies in panels of 16 rows by this many columns, swizzled over their 128, 64 or 32 bytes. */
__host__ __device__ constexpr int gemm_panel(int cols) { return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16; }

/* One warp's part of a tile, as epilogues get it: the accumulators of C columns from col0 on of rows row0 .. row0+15; lane l has rows
 * row0 + l/4 and + 8, columns col0 + 8j + 2(l%4) + {0,1} in acc[4j .. 4j+3] (see wgmma). */
struct gemm_tile {
    int M, N;       /* rows and columns that exist */
    int row0, col0;
    int lane;
    uint32_t out;   /* the warp's staging */
    uint32_t bar;   /* barrier of its loads */
    int turn;       /* tiles before this one: parity of the barrier */
};

#if HOPPER
/* ---- The staged output ---- */

/* Where lane l's address for the 16x16 block `jj` of C columns is (stmatrix and ldmatrix: matrices row 0-7, 8-15, then the right
 * 8 columns). */
template <int C> __device__ static inline uint32_t gemm_out_at(uint32_t out, int lane, int jj) {
    constexpr int P = gemm_panel(C);
    int row = lane & 15, col = 16 * jj + (lane >> 4) * 8;
    uint32_t byte = (uint32_t)(col / P * (32 * P) + row * (2 * P) + col % P * 2);
    return out + (byte ^ (byte >> 7 & (P / 8 - 1)) << 4);
}

/* The warp's 16 rows of C staged columns go to y at (row0, col0). */
template <int C> __device__ static inline void gemm_out_store(const gemm_tile &t, const CUtensorMap *my, int col0, int n_cols) {
    constexpr int P = gemm_panel(C);
    fence_async_smem();
    __syncwarp();
    if (t.lane == 0 && t.row0 < t.M) {
#pragma unroll
        for (int p = 0; p < C / P; p++)
            if (col0 + p * P < n_cols) tma_store_2d(my, t.out + p * 32 * P, col0 + p * P, t.row0);
        tma_store_commit();
    }
}
/* Until the staging may be written again. */
__device__ static inline void gemm_out_wait(const gemm_tile &t) {
    if (t.lane == 0) tma_store_wait_read<0>();
    __syncwarp();
}

template <int C> __device__ static inline void gemm_add_bias(float (&acc)[C / 2], const gemm_tile &t, const float *bias) {
    if (!bias) return;
#pragma unroll
    for (int j = 0; j < C / 8; j++) {
        int col = t.col0 + 8 * j;
        if (col >= t.N) continue;
        float2 b = *(const float2 *)(bias + col + 2 * (t.lane & 3));
        acc[4 * j] += b.x, acc[4 * j + 1] += b.y, acc[4 * j + 2] += b.x, acc[4 * j + 3] += b.y;
    }
}
#endif

/* ---- Epilogues: a type with
 *        params      what the kernel takes as its last argument
 *        out(C)      columns to stage of C columns of accumulators
 *        begin<C>    runs under the first products of a tile
 *        run<C>      takes the accumulators of C columns; all 32 lanes come, also where rows or columns are beyond the edge ---- */

struct epi_store { /* y = acc + bias */
    struct params {
        const float *bias; /* or NULL */
    };
    __host__ __device__ static constexpr int out(int c) { return c; }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C> __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &p) {
        gemm_add_bias<C>(acc, t, p.bias);
        gemm_out_wait(t);
#pragma unroll
        for (int jj = 0; jj < C / 16; jj++) {
            const float *v = acc + 8 * jj;
            stmatrix_x4(gemm_out_at<C>(t.out, t.lane, jj), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                        pack_bf16(v[6], v[7]));
        }
        gemm_out_store<C>(t, my, t.col0, t.N);
    }
#endif
};

struct epi_residual { /* y += acc + bias: y's rows come into the staging while the products run */
    struct params {
        const float *bias; /* or NULL */
    };
    __host__ __device__ static constexpr int out(int c) { return c; }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &t, const CUtensorMap *my, const params &) {
        constexpr int P = gemm_panel(C);
        if (t.lane != 0) return;
        int n = t.row0 < t.M && t.col0 < t.N ? min(C / P, (t.N - t.col0 + P - 1) / P) : 0;
        tma_store_wait_read<0>();
        mbar_expect_tx(t.bar, n * 32 * P);
        for (int i = 0; i < n; i++) tma_load_2d(t.out + i * 32 * P, my, t.bar, t.col0 + i * P, t.row0);
    }
    template <int C> __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &p) {
        gemm_add_bias<C>(acc, t, p.bias);
        mbar_wait(t.bar, t.turn & 1);
#pragma unroll
        for (int jj = 0; jj < C / 16; jj++) {
            float *v = acc + 8 * jj;
            uint32_t at = gemm_out_at<C>(t.out, t.lane, jj), r[4];
            ldmatrix_x4(r, at);
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = pack_bf16(v[2 * i] + bf16_low(r[i]), v[2 * i + 1] + bf16_high(r[i]));
            stmatrix_x4(at, r[0], r[1], r[2], r[3]);
        }
        gemm_out_store<C>(t, my, t.col0, t.N);
    }
#endif
};

struct epi_swiglu { /* y[M][N/2] = silu(gate) up: of two blocks of 8 columns the left one is gate, the right one up */
    struct params {
        int unused;
    };
    __host__ __device__ static constexpr int out(int c) { return c / 2; }
#if HOPPER
    __device__ static inline float one(float gate, float up) { return __fdividef(gate * up, 1 + ex2(-1.44269504f * gate)); }
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C> __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &) {
        gemm_out_wait(t);
#pragma unroll
        for (int jj = 0; jj < C / 32; jj++) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* rows 0-7 and 8-15 of the left, then of the right 8 columns of output */
                const float *v = acc + 16 * jj + 8 * (i >> 1) + 2 * (i & 1);
                r[i] = pack_bf16(one(v[0], v[4]), one(v[1], v[5]));
            }
            stmatrix_x4(gemm_out_at<C / 2>(t.out, t.lane, jj), r[0], r[1], r[2], r[3]);
        }
        gemm_out_store<C / 2>(t, my, t.col0 / 2, t.N / 2);
    }
#endif
};

/* ---- QKV: bias, RMSNorm over each head, RoPE; q in rows, K and V to their pages ---- */

struct qkv_params {
    const float *bias;            /* [(H+2K)*D] or NULL */
    const float *q_norm, *k_norm; /* [D] or NULL */
    float eps;
    int H, K, B;
    const int *pos, *slot;        /* [T]; slot = page * B + offset */
    const float2 *rope;           /* [max_len][D/2] cosine and sine */
    bf16 *q;                      /* [T][H][D] */
    bf16 *kv;                     /* the layer's pages: [page][K][K, V][B][D] */
};

/* C columns are whole heads. All arithmetic is float32 on the accumulators, rounded once. RoPE's pairs (i, i + D/2) are in one thread. The
 * bf16 rows go through the warp's staging, so that each head's row leaves in whole 16-byte chunks, D/8 lanes side by side. */
template <int D> struct epi_qkv {
    typedef qkv_params params;
    __host__ __device__ static constexpr int out(int c) { return c; }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}

    template <int C> __device__ static inline void norm(float (&acc)[C / 2], const gemm_tile &t, const params &p) {
#pragma unroll
        for (int h = 0; h < C / D; h++) {
            int head = t.col0 / D + h;
            const float *w = head < p.H ? p.q_norm : p.k_norm;
            if (!w || head >= p.H + p.K) continue;
            float *v = acc + h * (D / 2), s0 = 0, s1 = 0;
#pragma unroll
            for (int i = 0; i < D / 2; i += 4) s0 += v[i] * v[i] + v[i + 1] * v[i + 1], s1 += v[i + 2] * v[i + 2] + v[i + 3] * v[i + 3];
            s0 += __shfl_xor_sync(~0u, s0, 1), s1 += __shfl_xor_sync(~0u, s1, 1);
            s0 += __shfl_xor_sync(~0u, s0, 2), s1 += __shfl_xor_sync(~0u, s1, 2);
            s0 = rsqrtf(s0 * (1.0f / D) + p.eps), s1 = rsqrtf(s1 * (1.0f / D) + p.eps);
#pragma unroll
            for (int i = 0; i < D / 2; i += 4) {
                float2 g = *(const float2 *)(w + 2 * i + 2 * (t.lane & 3));
                v[i] *= s0 * g.x, v[i + 1] *= s0 * g.y, v[i + 2] *= s1 * g.x, v[i + 3] *= s1 * g.y;
            }
        }
    }

    template <int C> __device__ static inline void rope(float (&acc)[C / 2], const gemm_tile &t, const params &p) {
        int r0 = min(t.row0 + t.lane / 4, t.M - 1), r1 = min(t.row0 + t.lane / 4 + 8, t.M - 1);
        const float2 *at0 = p.rope + (size_t)p.pos[r0] * (D / 2) + 2 * (t.lane & 3);
        const float2 *at1 = p.rope + (size_t)p.pos[r1] * (D / 2) + 2 * (t.lane & 3);
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            float4 c0 = *(const float4 *)(at0 + 8 * j), c1 = *(const float4 *)(at1 + 8 * j);
#pragma unroll
            for (int h = 0; h < C / D; h++) {
                if (t.col0 / D + h >= p.H + p.K) continue;
                float *a = acc + h * (D / 2) + 4 * j, *b = a + D / 4;
                turn(a[0], b[0], c0.x, c0.y), turn(a[1], b[1], c0.z, c0.w);
                turn(a[2], b[2], c1.x, c1.y), turn(a[3], b[3], c1.z, c1.w);
            }
        }
    }
    __device__ static inline void turn(float &a, float &b, float cosine, float sine) {
        float x = a, y = b;
        a = x * cosine - y * sine, b = y * cosine + x * sine;
    }

    /* Where a row of a head goes. */
    __device__ static inline bf16 *home(const params &p, int row, int head) {
        if (head < p.H) return p.q + ((size_t)row * p.H + head) * D;
        int kv = head - p.H, value = kv >= p.K, slot = p.slot[row], page = slot / p.B;
        size_t block = ((size_t)page * p.K + (kv - value * p.K)) * 2 + value;
        return p.kv + (block * p.B + (slot - page * p.B)) * D;
    }

    template <int C> __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *, const params &p) {
        static_assert(C % D == 0 && D % 64 == 0, "a tile is whole heads");
        gemm_add_bias<C>(acc, t, p.bias);
        norm<C>(acc, t, p);
        rope<C>(acc, t, p);
        __syncwarp();
#pragma unroll
        for (int jj = 0; jj < C / 16; jj++) {
            const float *v = acc + 8 * jj;
            stmatrix_x4(gemm_out_at<C>(t.out, t.lane, jj), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                        pack_bf16(v[6], v[7]));
        }
        __syncwarp();
        constexpr int per_row = D / 8, rows = 32 / per_row;
        int chunk = t.lane % per_row;
#pragma unroll 1
        for (int i = t.lane / per_row; i < 16 && t.row0 + i < t.M; i += rows)
#pragma unroll
            for (int h = 0; h < C / D; h++) {
                if (t.col0 + h * D >= t.N) continue;
                uint32_t byte = (uint32_t)((h * D / 64 + chunk / 8) * 2048 + i * 128 + chunk % 8 * 16);
                uint4 v = smem_load_16(t.out + (byte ^ (byte >> 7 & 7) << 4));
                *(uint4 *)(home(p, t.row0 + i, t.col0 / D + h) + chunk * 8) = v;
            }
    }
#endif
};

#if HOPPER
/* ---- The ring ---- */

struct gemm_ring {
    int s, parity; /* the next stage and its phase */
};
template <int STAGES> __device__ static inline void gemm_next(gemm_ring &r) {
    if (++r.s == STAGES) r.s = 0, r.parity ^= 1;
}

struct gemm_unit {
    int m, n; /* tile indices */
};
/* Unit u of the job; `row` of the cluster's tiles below each other. */
__device__ static inline gemm_unit gemm_unit_at(const gemm_job &j, int u, int row) {
    int per_group = j.group * j.tiles_n, g = u / per_group, i = u - g * per_group;
    int height = min(j.group, j.units_m - g * j.group);
    return {(g * j.group + i % height) * j.mc + row, i / height};
}

/* Block range of K for part `part` of SPLIT. */
template <int SPLIT> __device__ static inline int gemm_k_from(const gemm_job &j, int part) {
    return SPLIT == 1 ? part * ((j.K + 63) / 64) : part * ((j.K + 63) / 64) / SPLIT;
}

/* The producer thread: all stages of all units. W does not depend on the kernels ahead, so the first stages' W comes before grid_wait. */
template <int BN, int SPLIT, int STAGES>
__device__ static inline void gemm_produce(const gemm_job &j, const CUtensorMap *mx, const CUtensorMap *mw, uint32_t ring, uint32_t full,
                                           uint32_t empty, int part, int row) {
    constexpr int stage_bytes = (128 + BN) * 128;
    int stride = gridDim.x / (j.mc * SPLIT), first = blockIdx.x / (j.mc * SPLIT), units = j.units_m * j.tiles_n;
    int k0 = gemm_k_from<SPLIT>(j, part), k1 = gemm_k_from<SPLIT>(j, part + 1);
    int w_row = row * (BN / 2), ahead = min(STAGES, k1 - k0), done = 0;
    uint16_t both = (uint16_t)(3 << part * 2);
    gemm_ring r = {0, 0};
    auto load_w = [&](int s, int n, int k) {
        uint32_t at = ring + s * stage_bytes + 128 * 128;
        mbar_expect_tx(full + 8 * s, stage_bytes);
        if (j.mc == 1) tma_load_2d(at, mw, full + 8 * s, k * 64, n * BN);
        else tma_load_2d_multicast(at + w_row * 128, mw, full + 8 * s, k * 64, n * BN + w_row, both);
    };
    if (first < units)
        for (int i = 0; i < ahead; i++) load_w(i, gemm_unit_at(j, first, row).n, k0 + i);
    grid_wait();
    for (int u = first; u < units; u += stride) {
        gemm_unit t = gemm_unit_at(j, u, row);
        if (u + stride >= units) grid_launch_dependents();
        for (int k = k0; k < k1; k++, done++) {
            if (done >= ahead) {
                mbar_wait(empty + 8 * r.s, r.parity ^ 1);
                load_w(r.s, t.n, k);
            }
            tma_load_2d(ring + r.s * stage_bytes, mx, full + 8 * r.s, k * 64, t.m * 128);
            gemm_next<STAGES>(r);
        }
    }
}

/* The products of one tile by one warpgroup; `row` is its first row of the stage's 128. */
template <class EPI, int BN, int C, int STAGES>
__device__ static inline void gemm_multiply(float (&acc)[BN / 2], gemm_ring &r, int n_k, const gemm_job &j, const gemm_tile &t,
                                            const CUtensorMap *my, const typename EPI::params &p, uint32_t ring, uint32_t full,
                                            uint32_t empty, int row, int cta0) {
    constexpr int stage_bytes = (128 + BN) * 128;
    int tid = threadIdx.x & 127, last = 0;
    auto release = [&](int s) {
        if (j.mc == 1) {
            if (tid == 0) mbar_arrive(empty + 8 * s);
        } else if (tid < 2) mbar_arrive_remote_read(empty + 8 * s, cta0 + tid);
    };
    for (int k = 0; k < n_k; k++) {
        mbar_wait(full + 8 * r.s, r.parity);
        uint64_t a = wgmma_desc(ring + r.s * stage_bytes + row * 128), b = wgmma_desc(ring + r.s * stage_bytes + 128 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_ss<BN>(acc, a + 2 * i, b + 2 * i, i || k);
        wgmma_commit();
        if (k) {
            wgmma_wait<1>();
            release(last);
        } else EPI::template begin<C>(t, my, p);
        last = r.s;
        gemm_next<STAGES>(r);
    }
    wgmma_wait<0>();
    wgmma_keep(acc);
    release(last);
}

/* Adds the partial sums of a cluster's SPLIT CTAs, always in the order of K; this CTA's columns are those of slice `part`. The ring has been
 * read by everyone when the first cluster_sync is through, so partial sums lie in it: [part][warpgroup][C/8][128 threads] x 16 bytes. */
template <int BN, int SPLIT>
__device__ static inline void gemm_reduce(const float (&acc)[BN / 2], float (&sum)[BN / SPLIT / 2], uint32_t ring, int part, int group,
                                          int row, int mc) {
    constexpr int C = BN / SPLIT;
    uint32_t mine = ring + (uint32_t)(group * (C / 8) * 128 + (threadIdx.x & 127)) * 16;
    constexpr uint32_t part_bytes = 2 * (C / 8) * 128 * 16;
    cluster_sync();
#pragma unroll
    for (int s = 0; s < SPLIT; s++) {
        uint32_t to = cluster_smem(mine + part * part_bytes, s * mc + row);
#pragma unroll
        for (int i = 0; i < C / 8; i++) cluster_store_v4(to + i * 2048, acc + s * (C / 2) + 4 * i);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < C / 2; i++) sum[i] = 0;
    for (int q = 0; q < SPLIT; q++)
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            uint4 v = smem_load_16(mine + q * part_bytes + i * 2048);
            sum[4 * i] += __uint_as_float(v.x), sum[4 * i + 1] += __uint_as_float(v.y);
            sum[4 * i + 2] += __uint_as_float(v.z), sum[4 * i + 3] += __uint_as_float(v.w);
        }
}
#endif

template <class EPI, int BN, int SPLIT>
__global__ void __launch_bounds__(384, 1)
gemm_kernel(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mw, const __grid_constant__ CUtensorMap my,
            const __grid_constant__ gemm_job j, const __grid_constant__ typename EPI::params p) {
#if HOPPER
    extern __shared__ char smem[];
    constexpr int C = BN / SPLIT;
    typedef gemm_smem<BN, EPI::out(C)> L;
    uint32_t ring = (smem_at(smem) + 1023) & ~1023u, full = ring + L::bars_at, empty = full + 8 * L::stages, res = empty + 8 * L::stages;
    int rank = cluster_rank(), part = rank / j.mc, row = rank % j.mc, group = threadIdx.x / 128 - 1;
    if (threadIdx.x == 0) {
        tma_prefetch_map(&mx), tma_prefetch_map(&mw), tma_prefetch_map(&my);
        for (int s = 0; s < L::stages; s++) mbar_init(full + 8 * s, 1), mbar_init(empty + 8 * s, 2 * j.mc);
        for (int w = 0; w < 8; w++) mbar_init(res + 8 * w, 1);
        mbar_init_fence();
    }
    cluster_sync();
    if (group < 0) {
        regs_give<40>();
        if (threadIdx.x == 0) gemm_produce<BN, SPLIT, L::stages>(j, &mx, &mw, ring, full, empty, part, row);
        __syncwarp();
        if constexpr (SPLIT > 1) cluster_sync(), cluster_sync();
    } else {
        regs_take<232>();
        int warp = threadIdx.x / 32 - 4, stride = gridDim.x / (j.mc * SPLIT), units = j.units_m * j.tiles_n;
        int n_k = gemm_k_from<SPLIT>(j, part + 1) - gemm_k_from<SPLIT>(j, part);
        gemm_ring r = {0, 0};
        gemm_tile t = {.M = j.M, .N = j.N, .lane = (int)threadIdx.x & 31, .out = ring + L::out_at + warp * (L::out_bytes / 8),
                       .bar = res + 8 * warp, .turn = 0};
        grid_wait();
        for (int u = blockIdx.x / (j.mc * SPLIT); u < units; u += stride, t.turn++) {
            gemm_unit at = gemm_unit_at(j, u, row);
            float acc[BN / 2];
            t.row0 = at.m * 128 + warp * 16, t.col0 = at.n * BN + part * C;
            gemm_multiply<EPI, BN, C, L::stages>(acc, r, n_k, j, t, &my, p, ring, full, empty, group * 64, part * j.mc);
            if constexpr (SPLIT == 1) EPI::template run<C>(acc, t, &my, p);
            else {
                float sum[C / 2];
                gemm_reduce<BN, SPLIT>(acc, sum, ring, part, group, row, j.mc);
                EPI::template run<C>(sum, t, &my, p);
            }
        }
        if (t.lane == 0) tma_store_wait_read<0>();
        __syncwarp();
    }
    if (SPLIT == 1) cluster_sync(); /* nobody leaves while a peer writes to it */
#else
    __trap();
#endif
}

/* ---- All instances, and the choice among them ---- */

enum { GEMM_QKV64 = EPI_SWIGLU + 1, GEMM_QKV128 }; /* kinds of epilogue behind those of enum epilogue */

typedef struct gemm_variant {
    int kind, bn, split;
    int out, smem; /* staged columns; bytes */
    const void *kernel;
} gemm_variant;

#define GEMM_VARIANT(kind, EPI, BN, SPLIT)                                                                                    \
    {kind, BN, SPLIT, EPI::out(BN / SPLIT), gemm_smem<BN, EPI::out(BN / SPLIT)>::bytes, (const void *)gemm_kernel<EPI, BN, SPLIT>}
static const gemm_variant gemm_variants[] = {
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 1),       GEMM_VARIANT(EPI_STORE, epi_store, 128, 2),
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 4),       GEMM_VARIANT(EPI_STORE, epi_store, 160, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 192, 1),       GEMM_VARIANT(EPI_STORE, epi_store, 256, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 1), GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 2),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 4), GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 192, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 256, 1), GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 128, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 160, 1),     GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 224, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 256, 1),     GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 2),    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 192, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 256, 1),    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 128, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 256, 1),
};
enum { N_GEMM_VARIANTS = sizeof gemm_variants / sizeof *gemm_variants };

typedef struct gemm_plan {
    const gemm_variant *v;
    int mc, group;
} gemm_plan;

/* Estimated clocks of a variant. */
static double gemm_cost(const toka_device *d, const gemm_variant *v, int mc, int M, int N, int K) {
    int units = ceil_div(M, 128 * mc) * ceil_div(N, v->bn), at_once = d->n_sms / (mc * v->split);
    int waves = ceil_div(units, at_once), ctas = (units < at_once ? units : at_once) * mc * v->split;
    double math = 4.0 * v->bn + 30, l2 = (128.0 + v->bn / mc) * 128 * ctas / 6154, k = ceil_div(ceil_div(K, 64), v->split);
    return waves * (k * (math > l2 ? math : l2) + 800 + 5 * v->bn) + (v->split > 1 ? 2500 : 0);
}

/* The cheapest variant of a kind; v NULL: none can do it. */
static gemm_plan gemm_pick(const toka_device *d, int kind, int M, int N, int K) {
    gemm_plan best = {.group = 8};
    double least = 0;
    for (int i = 0; i < N_GEMM_VARIANTS; i++)
        for (int mc = 1; mc <= 2; mc++) {
            const gemm_variant *v = &gemm_variants[i];
            if (v->kind != kind || v->split > ceil_div(K, 64) || (mc == 2 && M <= 128)) continue;
            double cost = gemm_cost(d, v, mc, M, N, K);
            if (!best.v || cost < least) best.v = v, best.mc = mc, least = cost;
        }
    return best;
}

/* The map of a row-major bf16 matrix, read or written in boxes of box_rows x box_cols; box_cols 64, 32 or 16, swizzled over the box's row. */
static CUtensorMap gemm_map(toka_device *d, const bf16 *p, int rows, int cols, int ld, int box_rows, int box_cols) {
    CUtensorMap m;
    cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, stride[1] = {(cuuint64_t)ld * 2};
    cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, step[2] = {1, 1};
    CUtensorMapSwizzle swizzle = box_cols == 64 ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
    CUresult r = d->encode_map(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, dims, stride, box, step,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch(d, r ? cudaErrorInvalidValue : cudaSuccess, "tensor map of a GEMM");
    return m;
}

/* Launches any instance: also the LM head's, whose epilogue stands in chapter 10. `params` is the epilogue's; a->y is used only where
 * the instance stages output for it. */
static void gemm_start(toka_device *d, gemm_plan plan, const gemm_args *a, const void *params) {
    const gemm_variant *v = plan.v;
    int M = a->M, N = a->w->N, K = a->w->K, cols = v->kind == EPI_SWIGLU ? N / 2 : N, per_cluster = plan.mc * v->split;
    assert(M > 0 && N % 8 == 0 && K % 8 == 0 && a->ldx % 8 == 0 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w->p % 16 == 0);
    gemm_job job = {M, N, K, ceil_div(M, 128 * plan.mc), ceil_div(N, v->bn), plan.group, plan.mc};
    int units = job.units_m * job.tiles_n, clusters = v->split > 1 ? units : min(units, d->n_sms / per_cluster);
    CUtensorMap mx = gemm_map(d, a->x, M, K, a->ldx, 128, 64), mw = gemm_map(d, a->w->p, N, K, K, v->bn / plan.mc, 64), my = mx;
    if (a->y) {
        assert(a->ldy % 8 == 0 && (uintptr_t)a->y % 16 == 0 && cols % 8 == 0);
        my = gemm_map(d, a->y, M, cols, a->ldy, 16, gemm_panel(v->out));
    }
    cudaLaunchAttribute attr[2] = {};
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = (unsigned)per_cluster, attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = dim3((unsigned)(clusters * per_cluster)), cfg.blockDim = dim3(384), cfg.dynamicSmemBytes = (size_t)v->smem;
    cfg.stream = d->stream, cfg.attrs = attr, cfg.numAttrs = 2;
    void *args[] = {&mx, &mw, &my, &job, (void *)params};
    if (d->error.code) return;
    latch(d, cudaLaunchKernelExC(&cfg, v->kernel, args), "GEMM");
}

/* Once per device, before the first launch. */
static void gemm_open(toka_device *d) {
    for (int i = 0; i < N_GEMM_VARIANTS && d->hopper; i++)
        latch(d, cudaFuncSetAttribute(gemm_variants[i].kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, gemm_variants[i].smem),
              "shared memory of a GEMM");
}

/* y = epilogue(x W^T), chapter 5's terms. */
static void gemm_wgmma_by(toka_device *d, const gemm_args *a, gemm_plan plan) {
    epi_store::params p = {a->w->bias}; /* epi_residual's too */
    assert(a->epi != EPI_SWIGLU || (!a->w->bias && a->w->N % 16 == 0));
    gemm_start(d, plan, a, &p);
}
static void gemm_wgmma(toka_device *d, const gemm_args *a) {
    gemm_wgmma_by(d, a, gemm_pick(d, a->epi, a->M, a->w->N, a->w->K));
}

/* q, K and V of M rows; head size D 64 or 128, a->y not used. */
static gemm_plan gemm_qkv_pick(const toka_device *d, int M, const weight *w, int D) {
    return gemm_pick(d, D == 64 ? GEMM_QKV64 : GEMM_QKV128, M, w->N, w->K);
}
static void gemm_wgmma_qkv(toka_device *d, int M, const bf16 *x, int ldx, const weight *w, const qkv_params *p, gemm_plan plan) {
    gemm_args a = {.M = M, .x = x, .ldx = ldx, .w = w};
    gemm_start(d, plan, &a, p);
}

/* ===========================================================================
 * MARK: 7. GEMM for few rows, and the choice [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 8. Attention: the work list [host]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 9. Attention: the kernels [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 10. LM head and sampling [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 11. The op table [host]
 * =========================================================================== */
