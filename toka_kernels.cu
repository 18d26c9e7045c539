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

template <class T> struct as_declared { typedef T type; }; /* keeps a parameter out of template deduction */

/* Launches a kernel in clusters of `cluster` CTAs, with `smem` bytes of dynamic shared memory. On Hopper it may start while the kernel
 * ahead still runs, so in every chain each thread that touches what an earlier kernel wrote, or writes what one reads, must
 * have passed grid_wait(); and each kernel must call it, also one that needs nothing, for "the one ahead has ended" says nothing
 * about those before it. Only what no kernel of the stream writes, weights above all, may be read earlier. */
template <class... P>
static void launch_dependent(toka_device *d, const char *what, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                             int cluster, typename as_declared<P>::type... args) {
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};
    void *pointers[] = {(void *)&args...};
    if (smem > 48 * 1024) latch(d, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)smem), what);
    config.gridDim = grid, config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem, config.stream = d->stream, config.attrs = attributes;
    if (d->hopper) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs].val.clusterDim = {(unsigned)cluster, 1, 1};
        config.numAttrs++;
    }
    latch(d, cudaLaunchKernelExC(&config, (const void *)kernel, pointers), what);
}

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
/* The same for what is read once: it leaves the L2 cache first. */
__device__ static inline void tma_load_2d_once(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1), "l"(0x12F0000000000000ull)
                 : "memory");
}
__device__ static inline void tma_prefetch_2d(const CUtensorMap *m, int c0, int c1) { /* into the L2 cache */
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(m), "r"(c0), "r"(c1) : "memory");
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
__device__ static inline float4 shared_load(uint32_t at) { /* 16 bytes */
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
/* 16 bytes from the same offset of CTA `cta`'s shared memory. */
__device__ static inline float4 cluster_load(uint32_t at, int cta) {
    float4 v;
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %4, %5; ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [r];}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at), "r"(cta) : "memory");
    return v;
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

#define WG_REGS_4 "%0,%1,%2,%3"
#define WG_REGS_8 WG_REGS_4 ",%4,%5,%6,%7"
#define WG_REGS_16 WG_REGS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WG_REGS_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WG_REGS_40 WG_REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define WG_REGS_48 WG_REGS_40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define WG_REGS_64 WG_REGS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WG_REGS_80 WG_REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define WG_REGS_96 WG_REGS_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WG_REGS_112 WG_REGS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define WG_REGS_128 WG_REGS_112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define WG_AT_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WG_AT_16(i) WG_AT_8(i), WG_AT_8(i + 8)
#define WG_ACC_4 "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define WG_ACC_8 WG_AT_8(0)
#define WG_ACC_16 WG_AT_16(0)
#define WG_ACC_32 WG_AT_16(0), WG_AT_16(16)
#define WG_ACC_40 WG_ACC_32, WG_AT_8(32)
#define WG_ACC_48 WG_ACC_32, WG_AT_16(32)
#define WG_ACC_64 WG_ACC_48, WG_AT_16(48)
#define WG_ACC_80 WG_ACC_64, WG_AT_16(64)
#define WG_ACC_96 WG_ACC_80, WG_AT_16(80)
#define WG_ACC_112 WG_ACC_96, WG_AT_16(96)
#define WG_ACC_128 WG_ACC_112, WG_AT_16(112)
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
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 || N == 160 || N == 192 || N == 224 ||
                  N == 256);
    WG_SS(8, 4, 4, 5, 6, 7);
    WG_SS(16, 8, 8, 9, 10, 11);
    WG_SS(32, 16, 16, 17, 18, 19);
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

/* ---- Epilogues, shared by all GEMMs ---- */

typedef struct gemm_call { /* gemm_args as a kernel takes them */
    const bf16 *x, *w;
    const float *bias; /* [N] or NULL */
    bf16 *y;
    int M, N, K, ldx, ldy;
    enum epilogue epi;
} gemm_call;

__device__ static inline float silu(float x) { return x / (1 + ex2(-1.4426950408889634f * x)); }

/* Columns n and n+1 (n even) of row m: STORE and RESIDUAL. */
__device__ static inline void gemm_put_pair(const gemm_call &c, int m, int n, float a0, float a1) {
    uint32_t *to = (uint32_t *)(c.y + (size_t)m * c.ldy + n);
    if (c.bias) a0 += c.bias[n], a1 += c.bias[n + 1];
    if (c.epi == EPI_RESIDUAL) {
        uint32_t old = *to;
        a0 += bf16_low(old), a1 += bf16_high(old);
    }
    *to = pack_bf16(a0, a1);
}
/* SWIGLU: accumulator columns n, n+1 are gates and n+8, n+9 their ups; n % 16 < 8, even. */
__device__ static inline void gemm_put_gated(const gemm_call &c, int m, int n, float g0, float g1, float u0, float u1) {
    if (c.bias) g0 += c.bias[n], g1 += c.bias[n + 1], u0 += c.bias[n + 8], u1 += c.bias[n + 9];
    *(uint32_t *)(c.y + (size_t)m * c.ldy + (n / 16 * 8 + n % 8)) = pack_bf16(silu(g0) * u0, silu(g1) * u1);
}

static gemm_call gemm_checked(const gemm_args *a) {
    const weight *w = a->w;
    assert(a->M > 0 && w->N > 0 && w->K > 0 && w->N % 8 == 0 && w->K % 8 == 0 && a->ldx % 8 == 0 && a->ldy % 8 == 0);
    assert(((uintptr_t)a->x | (uintptr_t)w->p | (uintptr_t)a->y) % 16 == 0);
    assert(a->ldx >= w->K && a->ldy >= (a->epi == EPI_SWIGLU ? w->N / 2 : w->N) && (a->epi != EPI_SWIGLU || w->N % 16 == 0));
    return gemm_call{a->x, w->p, w->bias, a->y, a->M, w->N, w->K, a->ldx, a->ldy, a->epi};
}

/* ---- y[M][N] = x[M][K] W[N][K]^T on mma.sync m16n8k16 ----
 *
 * in   x bf16 [M][ldx], W bf16 [N][K], bias float32 [N] or NULL; any M, N and K multiples of 8      out  y, see enum epilogue
 * One CTA makes a tile of BM x BN, its warps WM x WN each. K goes by in slices of 32 through a ring of four stages that cp.async fills;
 * rows and columns outside the matrices are filled with zeros. A stage is BM rows of x, then BN rows of W, 64 bytes each, and
 * the 16-byte chunk c of row r lies at c ^ (r/2 % 4): eight rows that ldmatrix fetches together fall into eight different
 * groups of banks. CTAs walk down 8 tiles of M before the next tile of N, so that the x and W of a wave fit the L2 cache.
 *
 * grid: tiles; block: 32 threads per warp tile; shared: 4 * (BM + BN) * 64 bytes; 2MNK FLOP. 128 x 128 with warps of 64 x 32 keeps
 * 64 accumulators per thread and lets two CTAs share a multiprocessor; 64 x 64 with warps of 32 x 32 is for launches of few
 * tiles. It is the GEMM of sm_80 and sm_89 and the tests' second opinion on Hopper, where mma.sync reaches about 60 % of wgmma. */

enum { MMA_K = 32, MMA_STAGES = 4, MMA_RASTER = 8 };

/* This thread's part of a slice of `ROWS` rows from row0, matrix [n_rows][ld], columns k0 .. k0+31 of K. */
template <int ROWS, int THREADS>
__device__ static inline void mma_load(uint32_t to, const bf16 *from, int row0, int n_rows, int ld, int k0, int K) {
    int chunk = (int)threadIdx.x % 4, k = k0 + 8 * chunk;
#pragma unroll
    for (int i = 0; i < ROWS / (THREADS / 4); i++) {
        int r = (int)threadIdx.x / 4 + i * (THREADS / 4);
        bool inside = row0 + r < n_rows && k < K;
        cp_async_16(to + r * 64 + (chunk ^ (r / 2 % 4)) * 16, inside ? from + (size_t)(row0 + r) * ld + k : from, inside ? 16 : 0);
    }
}

/* acc[WM/16][WN/8] += the warp's part of one stage. */
template <int WM, int WN>
__device__ static inline void mma_slice(float acc[WM / 16][WN / 8][4], uint32_t x_at, uint32_t w_at, int lane) {
    int xr = lane % 16, wr = lane % 8 + lane / 16 * 8; /* ldmatrix: the row whose address this lane gives; all bases are */
#pragma unroll                                         /* multiples of 16 rows, so the swizzle depends on these alone */
    for (int k16 = 0; k16 < MMA_K / 16; k16++) {
        uint32_t a[WM / 16][4], b[WN / 16][4];
        uint32_t xc = ((2 * k16 + lane / 16) ^ (xr / 2 % 4)) * 16, wc = ((2 * k16 + lane / 8 % 2) ^ (wr / 2 % 4)) * 16;
#pragma unroll
        for (int i = 0; i < WM / 16; i++) ldmatrix_x4(a[i], x_at + (16 * i + xr) * 64 + xc);
#pragma unroll
        for (int j = 0; j < WN / 16; j++) ldmatrix_x4(b[j], w_at + (16 * j + wr) * 64 + wc);
#pragma unroll
        for (int i = 0; i < WM / 16; i++)
#pragma unroll
            for (int j = 0; j < WN / 8; j++) mma_16816(acc[i][j], a[i], b[j / 2] + j % 2 * 2);
    }
}

/* The warp's accumulators through the epilogue; (m0, n0) is its corner. */
template <int WM, int WN>
__device__ static inline void mma_put(const gemm_call &c, float acc[WM / 16][WN / 8][4], int m0, int n0, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * (WM / 16); i++) {
        int m = m0 + 8 * i + lane / 4, h = i % 2 * 2;
        if (m >= c.M) continue;
#pragma unroll
        for (int j = 0; j < WN / 8; j++) {
            int n = n0 + 8 * j + lane % 4 * 2;
            const float *v = acc[i / 2][j] + h, *up = acc[i / 2][j | 1] + h;
            if (n >= c.N) continue;
            if (c.epi != EPI_SWIGLU) gemm_put_pair(c, m, n, v[0], v[1]);
            else if (j % 2 == 0) gemm_put_gated(c, m, n, v[0], v[1], up[0], up[1]);
        }
    }
}

template <int BM, int BN, int WM, int WN>
__global__ static void __launch_bounds__(BM / WM * (BN / WN) * 32) gemm_mma_kernel(const gemm_call c) {
    constexpr int THREADS = BM / WM * (BN / WN) * 32, STAGE = (BM + BN) * MMA_K * 2;
    extern __shared__ __align__(128) char smem[];
    int tiles_m = (c.M + BM - 1) / BM, tiles_n = (c.N + BN - 1) / BN, band = (int)blockIdx.x / (MMA_RASTER * tiles_n);
    int in_band = (int)blockIdx.x - band * MMA_RASTER * tiles_n, height = min(MMA_RASTER, tiles_m - band * MMA_RASTER);
    int m0 = (band * MMA_RASTER + in_band % height) * BM, n0 = in_band / height * BN;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, wm = warp / (BN / WN) * WM, wn = warp % (BN / WN) * WN;
    int slices = (c.K + MMA_K - 1) / MMA_K;
    uint32_t ring = smem_at(smem);
    float acc[WM / 16][WN / 8][4] = {};

    grid_launch_dependents();
    for (int s = 0; s < MMA_STAGES - 1; s++) /* weights need not wait for the kernel ahead */
        mma_load<BN, THREADS>(ring + s * STAGE + BM * 64, c.w, n0, c.N, c.K, s * MMA_K, c.K);
    grid_wait();
    for (int s = 0; s < MMA_STAGES - 1; s++) {
        mma_load<BM, THREADS>(ring + s * STAGE, c.x, m0, c.M, c.ldx, s * MMA_K, c.K);
        cp_async_commit();
    }
    for (int s = 0; s < slices; s++) {
        uint32_t at = ring + s % MMA_STAGES * STAGE, next = ring + (s + MMA_STAGES - 1) % MMA_STAGES * STAGE;
        int k = (s + MMA_STAGES - 1) * MMA_K;
        cp_async_wait<MMA_STAGES - 2>();
        __syncthreads(); /* slice s is there for all, and all are done with s-1, whose stage is filled next */
        mma_load<BM, THREADS>(next, c.x, m0, c.M, c.ldx, k, c.K);
        mma_load<BN, THREADS>(next + BM * 64, c.w, n0, c.N, c.K, k, c.K);
        cp_async_commit();
        mma_slice<WM, WN>(acc, at + wm * 64, at + (BM + wn) * 64, lane);
    }
    mma_put<WM, WN>(c, acc, m0 + wm, n0 + wn, lane);
}

template <int BM, int BN, int WM, int WN> static void gemm_mma_tile(toka_device *d, const gemm_args *a) {
    gemm_call c = gemm_checked(a);
    launch_dependent(d, "GEMM (mma)", gemm_mma_kernel<BM, BN, WM, WN>, dim3((unsigned)(ceil_div(c.M, BM) * ceil_div(c.N, BN))),
                     BM / WM * (BN / WN) * 32, MMA_STAGES * (BM + BN) * MMA_K * 2, 1, c);
}
static void gemm_mma(toka_device *d, const gemm_args *a) {
    if (ceil_div(a->M, 128) * ceil_div(a->w->N, 128) >= d->n_sms) gemm_mma_tile<128, 128, 64, 32>(d, a);
    else gemm_mma_tile<64, 64, 32, 32>(d, a);
}

/* ===========================================================================
 * MARK: 6. GEMM on wgmma [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 7. GEMM for few rows, and the choice [kernel]
 * =========================================================================== */

/* ---- y[M][N] = x[M][K] W[N][K]^T for few rows, on wgmma with the sides swapped ----
 *
 * in, out as in chapter 5; M <= ROWS (8, 16, 32, 64, 128).
 * W is read once and is all that counts: 2NK bytes. So W is the 64-row operand of wgmma and the rows of x are its columns: D[n][m], of
 * which a few rows waste little. A CTA has 64 rows of W, one consumer warpgroup and a producer warp, which keeps a ring of copies of 64
 * columns of K in flight: 64 rows of W, 128 bytes each, then ROWS rows of x, both with the 128-byte swizzle; what lies outside
 * the matrices arrives as zeros. The ring fills with W before grid_wait(), while the kernels ahead still run, some of the rest
 * goes to the L2 cache, and the ring is small enough for the CTAs of the next kernel to do the same beside this one.
 * Where W has too few rows for all multiprocessors, `split` CTAs of a cluster share a tile's K. Each leaves its sums in its own
 * shared memory; then each makes 1/split of the outputs, adding the parts in the order of K: bitwise repeatable. `share` neighbouring
 * tiles in a cluster fetch x together, each 1/share of its rows for all of them.
 *
 * grid: tiles of 64 rows of W times split, in clusters of share * split; block: 160; shared: stages * (8192 + 128 ROWS + 16). */

enum { FEW_K = 64, FEW_N = 64, FEW_THREADS = 160, FEW_W = FEW_N * FEW_K * 2 /* bytes of W in a stage; x lies behind */ };
enum { FEW_PITCH = FEW_N + 4 /* floats from row to row of the sums; + 4: the 32 lanes of a store meet 32 banks */ };

typedef struct few_plan {
    int split, share;
    int stages, l2; /* slices of W that are fetched early: into the ring, behind these into the L2 cache */
} few_plan;

#if HOPPER
typedef struct few_place { /* where a CTA works */
    int n0, kb0, n_kb;     /* its rows of W, its slices of K */
    int part, tile;        /* of split, of share; its rank in the cluster is tile * split + part */
    uint32_t ring, full, empty;
} few_place;

template <int ROWS> __device__ static inline few_place few_where(uint32_t ring, int K, const few_plan &p) {
    int rank = (int)blockIdx.x % (p.split * p.share), slices = (K + FEW_K - 1) / FEW_K;
    few_place w;
    w.part = rank % p.split, w.tile = rank / p.split;
    w.n0 = (int)blockIdx.x / p.split * FEW_N;
    w.kb0 = slices * w.part / p.split, w.n_kb = slices * (w.part + 1) / p.split - w.kb0;
    w.ring = ring, w.full = ring + p.stages * (FEW_W + ROWS * FEW_K * 2), w.empty = w.full + 8 * p.stages;
    return w;
}

/* This CTA's part of slice i of x, into stage s of all CTAs that share it. */
template <int ROWS>
__device__ static inline void few_load_x(const CUtensorMap *map_x, const few_place &w, const few_plan &p, int i, int s) {
    int rows = ROWS / p.share, at = w.ring + s * (FEW_W + ROWS * FEW_K * 2) + FEW_W + w.tile * rows * 128;
    uint32_t all = 0;
    for (int t = 0; t < p.share; t++) all |= 1u << (t * p.split + w.part);
    if (p.share == 1) tma_load_2d(at, map_x, w.full + 8 * s, (w.kb0 + i) * FEW_K, 0);
    else tma_load_2d_multicast(at, map_x, w.full + 8 * s, (w.kb0 + i) * FEW_K, w.tile * rows, (uint16_t)all);
}
/* The producer: one thread. */
template <int ROWS>
__device__ static inline void few_produce(const CUtensorMap *map_w, const CUtensorMap *map_x, const few_place &w, const few_plan &p) {
    constexpr int STAGE = FEW_W + ROWS * FEW_K * 2;
    int ahead = min(p.stages, w.n_kb), s = 0, parity = 0;
    for (int i = 0; i < ahead; i++) {
        mbar_expect_tx(w.full + 8 * i, STAGE);
        tma_load_2d_once(w.ring + i * STAGE, map_w, w.full + 8 * i, (w.kb0 + i) * FEW_K, w.n0);
    }
    for (int i = ahead; i < min(ahead + p.l2, w.n_kb); i++) tma_prefetch_2d(map_w, (w.kb0 + i) * FEW_K, w.n0);
    grid_wait();
    for (int i = 0; i < ahead; i++) few_load_x<ROWS>(map_x, w, p, i, i);
    for (int i = ahead; i < w.n_kb; i++) {
        mbar_wait(w.empty + 8 * s, parity);
        mbar_expect_tx(w.full + 8 * s, STAGE);
        tma_load_2d_once(w.ring + s * STAGE, map_w, w.full + 8 * s, (w.kb0 + i) * FEW_K, w.n0);
        few_load_x<ROWS>(map_x, w, p, i, s);
        if (++s == p.stages) s = 0, parity ^= 1;
    }
}

/* The warpgroup: acc[n][m] = its rows of W times x. A stage goes back to all CTAs whose x lies in it. */
template <int ROWS> __device__ static inline void few_consume(float (&acc)[ROWS / 2], const few_place &w, const few_plan &p) {
    int s = 0, parity = 0, last = 0;
    for (int i = 0; i < w.n_kb; i++) {
        uint32_t at = w.ring + s * (FEW_W + ROWS * FEW_K * 2);
        uint64_t a = wgmma_desc(at), b = wgmma_desc(at + FEW_W);
        mbar_wait(w.full + 8 * s, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < FEW_K / 16; k++) wgmma_ss<ROWS>(acc, a + 2 * k, b + 2 * k, 1);
        wgmma_commit();
        wgmma_wait<1>(); /* the slice before is done with */
        if (i > 0 && p.share > 1 && (int)threadIdx.x < p.share)
            mbar_arrive_remote(w.empty + 8 * last, (int)threadIdx.x * p.split + w.part);
        if (i > 0 && p.share == 1 && threadIdx.x == 0) mbar_arrive(w.empty + 8 * last);
        last = s;
        if (++s == p.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    wgmma_keep(acc);
}

/* ---- Its epilogue: 8 outputs of a row at a time, from the sums [M][FEW_PITCH] of all CTAs that share the tile ---- */

/* The item-th piece of this thread: row *m and column *n of the tile's (gates and ups counted both). False: there is none. */
__device__ static inline bool few_item(const gemm_call &c, const few_place &w, int split, int item, int *m, int *n) {
    int gated = c.epi == EPI_SWIGLU, per_row = FEW_N / 8 >> gated, n_items = c.M * per_row;
    int i = n_items * w.part / split + item * FEW_THREADS + (int)threadIdx.x;
    *m = i / per_row, *n = i % per_row * (8 << gated);
    return i < n_items * (w.part + 1) / split && w.n0 + *n < c.N;
}
/* v = 8 columns at `at` of the parts of K, added in their order. */
__device__ static inline void few_sum(float v[8], uint32_t at, const few_place &w, int split) {
    float4 a[8], b[8];
    if (split == 1) a[0] = shared_load(at), b[0] = shared_load(at + 16);
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < split && split > 1) a[i] = cluster_load(at, w.tile * split + i), b[i] = cluster_load(at + 16, w.tile * split + i);
    v[0] = a[0].x, v[1] = a[0].y, v[2] = a[0].z, v[3] = a[0].w, v[4] = b[0].x, v[5] = b[0].y, v[6] = b[0].z, v[7] = b[0].w;
#pragma unroll
    for (int i = 1; i < 8; i++) {
        if (i >= split) continue;
        v[0] += a[i].x, v[1] += a[i].y, v[2] += a[i].z, v[3] += a[i].w;
        v[4] += b[i].x, v[5] += b[i].y, v[6] += b[i].z, v[7] += b[i].w;
    }
}
__device__ static inline void few_bias(float v[8], const float *bias, int n) {
    if (!bias) return;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] += bias[n + i];
}
__device__ static inline void few_put(const gemm_call &c, const few_place &w, int split, int m, int n, uint32_t sums, uint4 old) {
    int gated = c.epi == EPI_SWIGLU;
    uint32_t at = sums + (m * FEW_PITCH + n) * 4;
    float v[8], up[8];
    few_sum(v, at, w, split);
    few_bias(v, c.bias, w.n0 + n);
    if (gated) {
        few_sum(up, at + 32, w, split);
        few_bias(up, c.bias, w.n0 + n + 8);
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = silu(v[k]) * up[k];
    } else if (c.epi == EPI_RESIDUAL) {
        v[0] += bf16_low(old.x), v[1] += bf16_high(old.x), v[2] += bf16_low(old.y), v[3] += bf16_high(old.y);
        v[4] += bf16_low(old.z), v[5] += bf16_high(old.z), v[6] += bf16_low(old.w), v[7] += bf16_high(old.w);
    }
    *(uint4 *)(c.y + (size_t)m * c.ldy + (w.n0 + n >> gated)) =
        make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
}
#endif

template <int ROWS>
__global__ static void __launch_bounds__(FEW_THREADS)
gemm_few_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, const gemm_call c, const few_plan p) {
#if HOPPER
    constexpr int ITEMS = (ROWS * FEW_N / 8 + FEW_THREADS - 1) / FEW_THREADS;
    extern __shared__ __align__(1024) char few_ring[];
    few_place w = few_where<ROWS>(smem_at(few_ring), c.K, p);
    int m, n, cluster = p.split * p.share;
    uint4 old[ITEMS]; /* what a residual is added to is fetched ahead */

    if (threadIdx.x == 0) {
        for (int i = 0; i < p.stages; i++) mbar_init(w.full + 8 * i, 1), mbar_init(w.empty + 8 * i, p.share);
        mbar_init_fence();
    }
    if (p.share > 1) cluster_sync(); /* the others write to these barriers */
    else __syncthreads();
    grid_launch_dependents();
    if (threadIdx.x / 32 == 4) {
        if (threadIdx.x % 32 == 0) few_produce<ROWS>(&map_w, &map_x, w, p);
        __syncwarp();
    }
    grid_wait();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (c.epi == EPI_RESIDUAL && few_item(c, w, p.split, i, &m, &n)) old[i] = *(uint4 *)(c.y + (size_t)m * c.ldy + w.n0 + n);
    if (threadIdx.x / 32 < 4) {
        float acc[ROWS / 2] = {}, *sums = (float *)few_ring + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
        few_consume<ROWS>(acc, w, p);
        named_sync(1, 128); /* nobody reads the ring any more; with share > 1 nobody writes to it either: all loads have arrived */
#pragma unroll
        for (int i = 0; i < ROWS / 2; i++)
            sums[(i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2) * FEW_PITCH + i % 4 / 2 * 8] = acc[i];
    }
    if (cluster > 1) cluster_sync();
    else __syncthreads();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (few_item(c, w, p.split, i, &m, &n)) few_put(c, w, p.split, m, n, w.ring, old[i]);
    if (cluster > 1) cluster_sync(); /* the others may still read this CTA's sums */
#else
    __trap();
#endif
}

/* Tensor map of a matrix [rows][cols] with `ld` elements from row to row, for boxes of `box` rows of 64 columns. */
static CUtensorMap few_map(toka_device *d, const bf16 *p, int rows, int cols, int ld, int box) {
    CUtensorMap m;
    cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)ld * 2};
    cuuint32_t boxes[2] = {FEW_K, (cuuint32_t)box}, steps[2] = {1, 1};
    CUresult r = d->encode_map(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)p, dims, strides, boxes, steps,
                               CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch(d, r ? cudaErrorInvalidValue : cudaSuccess, "tensor map");
    return m;
}
template <int ROWS> static void gemm_few_tile(toka_device *d, const gemm_args *a, few_plan p) {
    gemm_call c = gemm_checked(a);
    int stage = FEW_W + ROWS * FEW_K * 2 + 16, cluster = p.split * p.share;
    assert(c.M <= ROWS && ROWS / p.share % 8 == 0 && cluster <= 8 && p.stages * (stage - 16) >= ROWS * FEW_PITCH * 4);
    launch_dependent(d, "GEMM (few rows)", gemm_few_kernel<ROWS>, dim3((unsigned)(ceil_div(c.N, FEW_N * p.share) * cluster)),
                     FEW_THREADS, (size_t)(p.stages * stage), cluster, few_map(d, c.w, c.N, c.K, c.K, FEW_N),
                     few_map(d, c.x, c.M, c.K, c.ldx, ROWS / p.share), c, p);
}

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
