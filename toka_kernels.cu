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
 *   weights     W [N][K] row-major bf16, as in the file; E, F and V are rounded up to multiples of 8 with zeros. q, k and v lie behind each other as one [(H+2K)*D][E]; gate and up are one
 *               [2F][E] in which 8 rows of gate and the same 8 of up take turns, so that silu(gate)*up meets in one thread
 *   x           [T][E] bf16, E rounded up: zeros behind the model's own
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
 *  11. The card, opening and closing [host]
 *  12. Measuring the ops [host]
 *  13. The op table [host]
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
    cudaEvent_t sent; /* host may be filled again */
} stage;

typedef struct weight { /* a matrix on the device; N and K are multiples of 8 */
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
    int E, F, V;             /* of the shape, rounded up to multiples of 8: what lies behind is 0 */
    int ordinal;             /* of the GPU */
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
    int fault_in;            /* debugging: this many steps from now a kernel fails; 0: none */
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
static inline int up_8(int n) { return (n + 7) & ~7; }

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
    if (d->error.code) return;
    latch(d, cudaHostAlloc((void **)&s->host, cap, cudaHostAllocDefault), "pinned step buffer");
    latch(d, cudaEventCreateWithFlags(&s->sent, cudaEventDisableTiming), "pinned step buffer");
}
static void stage_begin(toka_device *d, stage *s) { /* waits until the transfer before has left the host's buffer */
    latch(d, cudaEventSynchronize(s->sent), "step upload");
    s->used = 0;
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
    latch(d, cudaEventRecord(s->sent, d->stream), "step upload");
}

/* ---- Weights: mapped file -> pinned buffers -> device ----
 *
 * A piece is a run of elements of one tensor. LOAD_THREADS workers take pieces in turn; each copies from the mapped file (where the
 * page faults happen, so that several are under way) into one of its two pinned buffers and queues the transfer on its own
 * stream, with the kernel that converts and places. There is no second copy on the host beyond those buffers. Bound by the slower
 * of page cache and bus. */

enum { LOAD_THREADS = 8, LOAD_BYTES = 8 << 20 };

typedef struct load_job { /* one tensor and where it goes */
    const toka_tensor *from;
    void *to;      /* matrices bf16 [.][stride], vectors float32 */
    int stride;    /* columns of the target: those of the tensor rounded up */
    bool f32;
    int row0;      /* first row in the target */
    bool by_turns; /* rows go to row0 + r/8*16 + r%8: 8 of gate, 8 of up */
} load_job;

typedef struct loader {
    toka_device *d;
    load_job *jobs;
    int n_jobs, cap;
    size_t bytes, done;      /* of the file; done and what follows under the lock */
    int job;                 /* the next piece: job and its first element */
    size_t at;
    toka_err error;
    pthread_mutex_t lock;
} loader;

static void load_add(loader *l, const toka_tensor *from, void *to, int stride, bool f32, int row0, bool by_turns) {
    if (!from->rows) return;
    if (l->n_jobs == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 256;
        l->jobs = (load_job *)realloc(l->jobs, (size_t)l->cap * sizeof *l->jobs);
        if (!l->jobs) abort();
    }
    l->jobs[l->n_jobs++] = load_job{from, to, stride, f32, row0, by_turns};
    l->bytes += (size_t)from->rows * from->cols * (from->dtype == TOKA_F32 ? 4 : 2);
}

/* Elements at .. at+n-1 of a tensor, in raw: converted to the target's type and put into its rows. A thread an element. */
__global__ static void __launch_bounds__(256) load_place(const void *raw, size_t at, size_t n, int cols, toka_dtype type, load_job j) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int r = (int)((at + i) / cols), c = (int)((at + i) % cols);
    size_t to = (size_t)(j.row0 + (j.by_turns ? r / 8 * 16 + r % 8 : r)) * j.stride + c;
    float v = type == TOKA_F32   ? ((const float *)raw)[i]
              : type == TOKA_F16 ? __half2float(((const __half *)raw)[i])
                                 : __bfloat162float(((const bf16 *)raw)[i]);
    if (j.f32) ((float *)j.to)[to] = v;
    else ((bf16 *)j.to)[to] = __float2bfloat16(v);
}

/* Takes the next piece; false: none is left, or something failed. */
static bool load_next(loader *l, load_job *job, size_t *at, size_t *n) {
    pthread_mutex_lock(&l->lock);
    bool more = l->job < l->n_jobs && !l->error.code;
    if (more) {
        *job = l->jobs[l->job], *at = l->at;
        size_t size = job->from->dtype == TOKA_F32 ? 4 : 2, all = (size_t)job->from->rows * job->from->cols;
        *n = all - *at < LOAD_BYTES / size ? all - *at : LOAD_BYTES / size;
        l->at += *n, l->done += *n * size;
        if (l->at == all) l->job++, l->at = 0;
        if (l->d->options.progress) l->d->options.progress(l->d->options.user, "loading weights", (double)l->done / l->bytes);
    }
    pthread_mutex_unlock(&l->lock);
    return more;
}

static cudaError_t load_piece(const load_job *j, size_t at, size_t n, char *host, char *dev, cudaStream_t stream) {
    size_t size = j->from->dtype == TOKA_F32 ? 4 : 2;
    memcpy(host, (const char *)j->from->data + at * size, n * size);
    if (j->from->dtype == TOKA_BF16 && !j->f32 && !j->by_turns && j->stride == j->from->cols)
        return cudaMemcpyAsync((bf16 *)j->to + (size_t)j->row0 * j->stride + at, host, n * size, cudaMemcpyHostToDevice, stream);
    cudaError_t code = cudaMemcpyAsync(dev, host, n * size, cudaMemcpyHostToDevice, stream);
    if (code) return code;
    load_place<<<(unsigned)((n + 255) / 256), 256, 0, stream>>>(dev, at, n, j->from->cols, j->from->dtype, *j);
    return cudaGetLastError();
}

static void *load_thread(void *arg) {
    loader *l = (loader *)arg;
    cudaStream_t stream = NULL;
    cudaEvent_t free_again[2] = {NULL, NULL};
    char *host = NULL, *dev = NULL;
    load_job job;
    size_t at, n;
    cudaError_t code = cudaSetDevice(l->d->ordinal);
    if (!code) code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && !code; i++) code = cudaEventCreateWithFlags(&free_again[i], cudaEventDisableTiming);
    if (!code) code = cudaHostAlloc((void **)&host, 2 * LOAD_BYTES, cudaHostAllocDefault);
    if (!code) code = cudaMalloc((void **)&dev, 2 * LOAD_BYTES);
    for (int i = 0; !code && load_next(l, &job, &at, &n); i ^= 1) {
        code = cudaEventSynchronize(free_again[i]);
        if (!code) code = load_piece(&job, at, n, host + i * LOAD_BYTES, dev + i * LOAD_BYTES, stream);
        if (!code) code = cudaEventRecord(free_again[i], stream);
    }
    if (!code) code = cudaStreamSynchronize(stream);
    if (code) {
        pthread_mutex_lock(&l->lock);
        if (!l->error.code) {
            l->error.code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
            snprintf(l->error.msg, sizeof l->error.msg, "GPU: loading weights: %s", cudaGetErrorString(code));
        }
        pthread_mutex_unlock(&l->lock);
    }
    cudaFree(dev), cudaFreeHost(host);
    for (cudaEvent_t e : free_again)
        if (e) cudaEventDestroy(e);
    if (stream) cudaStreamDestroy(stream);
    return NULL;
}

/* Runs all jobs and frees the list. */
static void load_run(loader *l) {
    pthread_t threads[LOAD_THREADS];
    int n = 0;
    pthread_mutex_init(&l->lock, NULL);
    while (n < LOAD_THREADS && !pthread_create(&threads[n], NULL, load_thread, l)) n++;
    if (!n) load_thread(l);
    for (int i = 0; i < n; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&l->lock);
    if (l->error.code && !l->d->error.code) l->d->error = l->error;
    free(l->jobs);
}

/* ---- The model on the device ---- */

/* [rows][cols], both rounded up to 8, the room between set to 0. */
static weight weight_room(toka_device *d, int rows, int cols) {
    weight w = {NULL, NULL, up_8(rows), up_8(cols)};
    size_t bytes = (size_t)w.N * w.K * sizeof(bf16);
    w.p = (bf16 *)dev_alloc(d, bytes, "weights");
    if (w.p && (w.N > rows || w.K > cols)) latch(d, cudaMemset(w.p, 0, bytes), "weights");
    return w;
}
/* n floats rounded up to 8, zeros until something is loaded. */
static float *vector_room(toka_device *d, int n) {
    float *p = (float *)dev_alloc(d, (size_t)up_8(n) * sizeof(float), "weights");
    if (p) latch(d, cudaMemset(p, 0, (size_t)up_8(n) * sizeof(float)), "weights");
    return p;
}
static float *weight_vector(toka_device *d, loader *l, const toka_tensor *t) { /* a norm or bias; NULL: absent */
    if (!t->rows) return NULL;
    float *p = vector_room(d, t->cols);
    load_add(l, t, p, t->cols, true, 0, false);
    return p;
}
static weight weight_plain(toka_device *d, loader *l, const toka_tensor *from, const toka_tensor *bias) {
    weight to = weight_room(d, from->rows, from->cols);
    if (bias) to.bias = weight_vector(d, l, bias);
    load_add(l, from, to.p, to.K, false, 0, false);
    return to;
}

/* q, k and v behind each other, and their biases; a bias that only some of them have is 0 for the others. */
static weight weight_qkv(toka_device *d, loader *l, const toka_layer *from) {
    const toka_tensor *w[3] = {&from->q, &from->k, &from->v}, *b[3] = {&from->q_bias, &from->k_bias, &from->v_bias};
    weight to = weight_room(d, from->q.rows + from->k.rows + from->v.rows, from->q.cols);
    float *bias = b[0]->rows || b[1]->rows || b[2]->rows ? vector_room(d, to.N) : NULL;
    for (int i = 0, row = 0; i < 3; row += w[i++]->rows) {
        load_add(l, w[i], to.p, to.K, false, row, false);
        if (bias) load_add(l, b[i], bias + row, b[i]->cols, true, 0, false);
    }
    to.bias = bias;
    return to;
}
/* By turns of 8 rows; where F was rounded up, the last turn of each has rows of zeros. */
static weight weight_gate_up(toka_device *d, loader *l, const toka_layer *from) {
    int F = up_8(from->gate.rows);
    weight to = weight_room(d, 2 * F, from->gate.cols);
    if (F > from->gate.rows) latch(d, cudaMemset(to.p, 0, (size_t)to.N * to.K * sizeof(bf16)), "weights");
    load_add(l, &from->gate, to.p, to.K, false, 0, true);
    load_add(l, &from->up, to.p, to.K, false, 8, true);
    return to;
}

/* All weights to the device; a tied LM head is the embedding. */
static void weights_open(toka_device *d) {
    const toka_weights *w = d->weights;
    loader l = {};
    l.d = d;
    d->layers = (layer_weights *)calloc((size_t)d->shape->L, sizeof *d->layers);
    if (!d->layers) abort();
    d->embed = weight_plain(d, &l, &w->embed, NULL).p;
    d->norm = weight_vector(d, &l, &w->norm);
    bool tied = w->lm_head.data == w->embed.data;
    d->lm_head = tied ? weight{d->embed, NULL, d->V, d->E} : weight_plain(d, &l, &w->lm_head, NULL);
    for (int i = 0; i < d->shape->L && !d->error.code; i++) {
        const toka_layer *from = &w->layers[i];
        layer_weights *to = &d->layers[i];
        to->attn_norm = weight_vector(d, &l, &from->attn_norm), to->mlp_norm = weight_vector(d, &l, &from->mlp_norm);
        to->q_norm = weight_vector(d, &l, &from->q_norm), to->k_norm = weight_vector(d, &l, &from->k_norm);
        to->qkv = weight_qkv(d, &l, from), to->gate_up = weight_gate_up(d, &l, from);
        to->o = weight_plain(d, &l, &from->o, &from->o_bias), to->down = weight_plain(d, &l, &from->down, NULL);
        to->window = from->window;
    }
    if (d->error.code) free(l.jobs);
    else load_run(&l);
}

/* ===========================================================================
 * MARK: 4. Embedding, norms, RoPE [kernel]
 * =========================================================================== */

/* ---- embed ----
 * x[t][:] = E[ids[t]][:], bf16. Grid T, block 128, 16 bytes a thread and turn. Moves 2*T*E*2 bytes: copy speed. */
__global__ static void __launch_bounds__(128) embed_kernel(const int *ids, const bf16 *table, bf16 *x, int E) {
    grid_launch_dependents();
    grid_wait();
    const uint4 *from = (const uint4 *)(table + (size_t)ids[blockIdx.x] * E);
    uint4 *to = (uint4 *)(x + (size_t)blockIdx.x * E);
    for (int i = threadIdx.x; i < E / 8; i += blockDim.x) to[i] = from[i];
}

/* ---- RMSNorm ----
 * y[t][i] = x[r][i] * w[i] / sqrt(mean(x[r]^2) + eps), r = rows ? rows[t] : t. x, y bf16 [.][E], w float32, one rounding at the end.
 * Grid T, block 128; the row is read twice, the second time from L1. Reads 2*T*E, writes 2*T*E bytes: copy speed. Sums: each
 * thread over its own elements, then a tree over lanes and warps: one order for every T. */
__device__ static inline float block_sum_128(float v) { /* to all threads */
    __shared__ float part[4];
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = v;
    __syncthreads();
    return (part[0] + part[1]) + (part[2] + part[3]);
}
__device__ static inline void unpack_8(uint4 v, float f[8]) {
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = bf16_low(w[i]), f[2 * i + 1] = bf16_high(w[i]);
}
__global__ static void __launch_bounds__(128) rmsnorm_kernel(const bf16 *x, const int *rows, const float *w, bf16 *y, int E,
                                                            float per_E, float eps) { /* E rounded up; 1 / the model's own */
    grid_launch_dependents();
    grid_wait();
    const uint4 *from = (const uint4 *)(x + (size_t)(rows ? rows[blockIdx.x] : blockIdx.x) * E);
    uint4 *to = (uint4 *)(y + (size_t)blockIdx.x * E);
    float f[8], sum = 0;
    for (int i = threadIdx.x; i < E / 8; i += 128) {
        unpack_8(from[i], f);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += f[j] * f[j];
    }
    float scale = rsqrtf(block_sum_128(sum) * per_E + eps);
    for (int i = threadIdx.x; i < E / 8; i += 128) {
        const float4 *g = (const float4 *)w + 2 * i;
        float4 a = g[0], b = g[1];
        unpack_8(from[i], f);
        to[i] = make_uint4(pack_bf16(f[0] * scale * a.x, f[1] * scale * a.y), pack_bf16(f[2] * scale * a.z, f[3] * scale * a.w),
                           pack_bf16(f[4] * scale * b.x, f[5] * scale * b.y), pack_bf16(f[6] * scale * b.z, f[7] * scale * b.w));
    }
}
static void rmsnorm(toka_device *d, const bf16 *x, const int *rows, const float *w, bf16 *y, int n_rows) {
    launch_dependent(d, "RMSNorm", rmsnorm_kernel, dim3(n_rows), 128, 0, 1, x, rows, w, y, d->E, 1.0f / d->shape->E, d->shape->eps);
}

/* ---- RoPE ---- */

/* table[p][i] = (cos, sin)(p * freq[i]) * scale for p < max_len, i < D/2. The angle is rounded to float32 as Hugging Face does and
 * as the CPU backend does. */
__global__ static void rope_table_kernel(float2 *table, const float *freq, float scale, int half, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        double s, c, angle = (float)(i / half) * freq[i % half];
        sincos(angle, &s, &c);
        table[i] = make_float2((float)c * scale, (float)s * scale);
    }
}
static void rope_open(toka_device *d) {
    int half = d->shape->D / 2;
    size_t n = (size_t)d->shape->max_len * half;
    float *freq = (float *)dev_alloc(d, (size_t)half * sizeof(float), "RoPE");
    d->rope = (float2 *)dev_alloc(d, n * sizeof *d->rope, "RoPE table");
    if (d->error.code) return;
    latch(d, cudaMemcpy(freq, d->shape->rope_freq, (size_t)half * sizeof *freq, cudaMemcpyHostToDevice), "RoPE");
    rope_table_kernel<<<1024, 256, 0, d->stream>>>(d->rope, freq, d->shape->rope_scale, half, n);
    LAUNCHED(d, "RoPE table");
}

/* ---- QK-norm, RoPE, K and V to their pages ----
 * qkv[t] = {q [H][D], k [K][D], v [K][D]} bf16, biases added. Each head of q and k: RMSNorm over D where the model has it, then the
 * pair (i, i + D/2) turned by the angle of pos[t]. q goes to q[t][h], k and v to the page of slot[t]. All in float32.
 * One warp a head: lane l has the pairs 2l, 2l+1, 2l+64 ..., so a warp reads 128 bytes of each half at once. Grid
 * T*(H+2K)/8, block 256. Moves 4*T*(H+2K)*D bytes: copy speed. D/2 is even, D at most 256. */
typedef struct rope_args {
    const bf16 *qkv;
    bf16 *q, *kv; /* kv: the layer's pool */
    const int *pos, *slot;
    const float2 *table;
    const float *q_norm, *k_norm;
    int T, H, K, D, B;
    float eps;
} rope_args;

__device__ static inline void store_pair(bf16 *to, float a, float b) { *(uint32_t *)to = pack_bf16(a, b); }

__global__ static void __launch_bounds__(256) rope_kernel(rope_args a) {
    grid_launch_dependents();
    grid_wait();
    int heads = a.H + 2 * a.K, w = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = w / heads, h = w % heads, half = a.D / 2;
    if (t >= a.T) return;
    const bf16 *from = a.qkv + (size_t)w * a.D;
    float lo[4], hi[4], sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        uint32_t u = i < half ? *(const uint32_t *)(from + i) : 0, v = i < half ? *(const uint32_t *)(from + half + i) : 0;
        lo[2 * k] = bf16_low(u), lo[2 * k + 1] = bf16_high(u), hi[2 * k] = bf16_low(v), hi[2 * k + 1] = bf16_high(v);
    }
    const float *norm = h < a.H ? a.q_norm : a.k_norm;
    if (norm && h < a.H + a.K) {
#pragma unroll
        for (int k = 0; k < 4; k++) sum += lo[k] * lo[k] + hi[k] * hi[k];
        for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        float scale = rsqrtf(sum / a.D + a.eps);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            int i = 2 * lane + 64 * (k / 2) + k % 2;
            if (i < half) lo[k] *= scale * norm[i], hi[k] *= scale * norm[half + i];
        }
    }
    int slot = a.slot[t], kv_head = h < a.H + a.K ? h - a.H : h - a.H - a.K;
    bf16 *to = h < a.H ? a.q + ((size_t)t * a.H + h) * a.D
                       : a.kv + ((((size_t)(slot / a.B) * a.K + kv_head) * 2 + (h >= a.H + a.K)) * a.B + slot % a.B) * a.D;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        if (i >= half) break;
        float4 cs = h < a.H + a.K ? *(const float4 *)(a.table + (size_t)a.pos[t] * half + i) : make_float4(1, 0, 1, 0);
        float u = lo[2 * k], v = hi[2 * k], y = lo[2 * k + 1], z = hi[2 * k + 1];
        store_pair(to + i, u * cs.x - v * cs.y, y * cs.z - z * cs.w);
        store_pair(to + half + i, v * cs.x + u * cs.y, z * cs.z + y * cs.w);
    }
}

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
    ATTN_TILE_Q = 64,    /* queries of a tile on mma.sync */
    ATTN_SMALL_Q = 16, /* queries of a small item, and the unit of the split-KV buffer */
    ATTN_MIN_PART = 128, /* kv positions of a part, at least */
    ATTN_WARPS = 16    /* small items that an SM works on at a time, roughly */
};

enum { ATTN_MAP_8, ATTN_MAP_16, ATTN_MAP_32, ATTN_MAP_64, ATTN_MAPS }; /* tensor maps of a layer's K and V, by rows of the box */
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
    int merge_nq; /* most queries of a merge */
} attn_level;

typedef struct attn_span { /* of a toka_span, for the time of planning */
    int level, page0, where;
    bool small;
} attn_span;

struct attn_plan {
    int G, small_rows, tile_q; /* query heads of a kv head; rows of a small span at most; queries of a tile */
    int max_items, max_merges, max_spans, max_levels, max_slots;
    bool hopper;                /* the kernels with tensor maps */
    CUtensorMap *maps;          /* [L][ATTN_MAPS] or NULL */
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
        p->spans[i].level = level, p->spans[i].small = sp->n_rows <= p->small_rows;
        p->n_levels = attn_max(p->n_levels, level + 1);
    }
    assert(p->n_levels <= p->max_levels);
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        attn_span *a = &p->spans[i];
        bool last = p->row_level[sp->row0] == a->level + 1;
        a->where = (a->level ? ATTN_SEED : 0) | (last ? ATTN_TO_O : ATTN_TO_STATE);
        if (last && a->small) a->level = p->n_levels - 1;
    }
}

/* The page table entries of all spans, one behind the other. */
static bool attn_plan_pages(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    int64_t n = 0;
    void *host;
    int B = d->shape->B, shift = __builtin_ctz(B);
    for (int i = 0; i < s->n_spans; i++) p->spans[i].page0 = (int)n, n += (s->spans[i].n_kv + B - 1) >> shift;
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
               (size_t)((s->spans[i].n_kv + B - 1) >> shift) * sizeof(int));
    }
    return true;
}

/* How long the parts of small items are: as many as keep all warps at work, if all ranges were cut into parts. */
static int attn_small_part(const toka_device *d, int64_t kv_positions) {
    int64_t len = kv_positions * d->shape->K / (d->n_sms * ATTN_WARPS);
    return len < ATTN_MIN_PART ? ATTN_MIN_PART : len < INT_MAX / 2 ? (int)len : INT_MAX / 2;
}
/* The same of tiles. They run one on an SM, in waves: the number of parts that makes waves times their length least, if it is a good
 * deal less. More than two waves stay as they are. */
static int attn_tile_part(const toka_device *d, int64_t kv_positions, int n_tiles) {
    int items = n_tiles * d->shape->K, len = (int)(kv_positions / attn_max(n_tiles, 1)), best = 1;
    if (items > 2 * d->n_sms) return INT_MAX / 2;
    for (int n = 2; n <= len / (2 * ATTN_MIN_PART); n++)
        if (20LL * ceil_div(items * n, d->n_sms) * best < 19LL * ceil_div(items * best, d->n_sms) * n) best = n;
    return best == 1 ? INT_MAX / 2 : ceil_div(len, best);
}

/* One item, or its parts and their merge. */
static void attn_emit(toka_device *d, attn_level *l, const attn_item *item, int part_len) {
    attn_plan *p = d->attn;
    int len = item->kv1 - item->kv0;
    if (len >= part_len + part_len / 2) {
        int B = d->shape->B, units = ceil_div(item->nq, ATTN_SMALL_Q), part = ceil_div(ceil_div(len, (len + part_len / 2) / part_len), B) * B;
        int n = ceil_div(len, part);
        if (n > 1 && p->n_slots + n * units <= p->max_slots && p->n_items + n <= p->max_items && p->n_merges < p->max_merges) {
            p->merges[p->n_merges++] = attn_merge{item->q0, item->nq, p->n_slots, n, item->where};
            l->merge_nq = attn_max(l->merge_nq, item->nq);
            for (int i = 0; i < n; i++, p->n_slots += units) {
                attn_item *a = &p->items[p->n_items++];
                *a = *item;
                a->kv0 = item->kv0 + i * part, a->kv1 = attn_min(a->kv0 + part, item->kv1);
                a->page0 = item->page0 + i * (part / B), a->where = p->n_slots << ATTN_SLOT;
            }
            return;
        }
    }
    if (p->n_items < p->max_items) p->items[p->n_items] = *item;
    p->n_items++;
}

/* The items of one span; the last rows, which see most, come first. */
static void attn_emit_span(toka_device *d, const toka_step *s, int i, attn_level *l, int part_len) {
    const toka_span *sp = &s->spans[i];
    const attn_span *a = &d->attn->spans[i];
    int G = d->attn->G, end = (sp->row0 + sp->n_rows) * G;
    int tile = a->small ? ATTN_SMALL_Q : d->attn->tile_q, n = a->small ? 1 : ceil_div(sp->n_rows * G, tile);
    for (int t = n - 1; t >= 0; t--) {
        attn_item item = {.q0 = sp->row0 * G + t * tile, .kv0 = sp->kv0, .page0 = a->page0, .pos_lo = INT_MAX, .pos_hi = -1,
                          .where = a->where};
        item.nq = attn_min(tile, end - item.q0);
        int r = a->small ? sp->row0 : item.q0 / G, last = a->small ? sp->row0 + sp->n_rows - 1 : (item.q0 + item.nq - 1) / G;
        for (; r <= last; r++) {
            item.pos_lo = attn_min(item.pos_lo, s->pos[r]);
            item.pos_hi = attn_max(item.pos_hi, s->pos[r]);
        }
        item.kv1 = attn_max(sp->kv0, attn_min(sp->kv0 + sp->n_kv, item.pos_hi + 1));
        attn_emit(d, l, &item, part_len);
    }
}

/* All items of a level of one kind. */
static void attn_plan_kind(toka_device *d, const toka_step *s, int level, bool small) {
    attn_plan *p = d->attn;
    int64_t work = 0;
    int n = 0, part_len;
    for (int i = 0; i < s->n_spans; i++) {
        if (p->spans[i].level != level || p->spans[i].small != small) continue;
        int tiles = small ? 1 : ceil_div(s->spans[i].n_rows * p->G, p->tile_q);
        work += (int64_t)s->spans[i].n_kv * tiles, n += tiles;
    }
    part_len = small ? attn_small_part(d, work) : attn_tile_part(d, work, n);
    for (int i = 0; work && i < s->n_spans; i++)
        if (p->spans[i].level == level && p->spans[i].small == small) attn_emit_span(d, s, i, &p->levels[level], part_len);
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
        l->merge0 = p->n_merges, l->tile0 = p->n_items, l->merge_nq = p->n_slots = 0;
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
    static constexpr int TOK = DP == 256 ? 16 : WARPS == 1 ? 2048 / DP : 64;
    static constexpr int STAGES = WARPS == 1 ? 3 : 2;
    static constexpr int BYTES = STAGES * 2 * TOK * DP * 2;
};

/* A tile in shared memory: panels of 64 columns, each [rows][64] in rows of 128 bytes, 16-byte pieces at piece ^ (row % 8): what the
 * copy engine writes and wgmma reads with 128-byte swizzle; ldmatrix meets no bank twice. Element of a piece: */
__device__ static inline int attn_piece_at(int rows, int row, int piece) {
    return ((piece >> 3) * rows + row) * 64 + ((piece ^ row) & 7) * 8;
}

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
        cp_async_16(smem_at(to + is_v * TOK * DP + attn_piece_at(TOK, row, piece)), from, there ? 16 : 0);
    }
}

/* s[8-column block][4] = Q K^T of one warp: 16 queries, TOK positions. */
template <int DP, int TOK>
__device__ static inline void attn_qk(float (&s)[TOK / 2], const uint32_t (&q)[DP / 16][4], const bf16 *k, int D) {
    int lane = threadIdx.x % 32, row = (lane & 7) + (lane >> 4) * 8, piece = lane >> 3 & 1;
#pragma unroll
    for (int n = 0; n < TOK / 2; n++) s[n] = 0;
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
        if (c * 16 >= D) break;
#pragma unroll
        for (int n = 0; n < TOK / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, smem_at(k + attn_piece_at(TOK, n * 16 + row, c * 2 + piece)));
            mma_16816(s + 8 * n, q[c], b);
            mma_16816(s + 8 * n + 4, q[c], b + 2);
        }
    }
}

/* P as the A operand of the second product. */
template <int N> __device__ static inline void attn_pack(uint32_t (&p)[N / 8][4], const float (&s)[N]) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[n][i] = pack_bf16(s[8 * n + 2 * i], s[8 * n + 2 * i + 1]);
}

/* acc[8-column block][4] += P V of one warp. */
template <int DP, int TOK>
__device__ static inline void attn_pv(float (&acc)[DP / 2], const float (&s)[TOK / 2], const bf16 *v, int D) {
    int lane = threadIdx.x % 32, row = lane & 15, piece = lane >> 4;
    uint32_t p[TOK / 16][4];
    attn_pack(p, s);
#pragma unroll
    for (int n = 0; n < TOK / 16; n++)
#pragma unroll
        for (int c = 0; c < DP / 16; c++) {
            if (c * 16 >= D) break;
            uint32_t b[4];
            ldmatrix_x4_trans(b, smem_at(v + attn_piece_at(TOK, n * 16 + row, c * 2 + piece)));
            mma_16816(acc + 8 * c, p[n], b);
            mma_16816(acc + 8 * c + 4, p[n], b + 2);
        }
}

/* Scores of positions that a query must not see become -inf. i: the thread's first query; kv: position of column 0. */
template <int N>
__device__ static inline void attn_mask(const attn_args &a, const attn_item &it, float (&s)[N], int i, int kv) {
    int from[2], to[2]; /* the first position seen and the first not seen */
    kv += threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int pos = i + 8 * r < it.nq ? a.pos[(it.q0 + i + 8 * r) / a.G] : -1;
        from[r] = a.window ? pos - a.window + 1 : 0, to[r] = min(pos + 1, it.kv1);
    }
#pragma unroll
    for (int j = 0; j < N; j++) {
        int t = kv + j / 4 * 8 + (j & 1), r = j >> 1 & 1;
        if (t < from[r] || t >= to[r]) s[j] = -INFINITY;
    }
}

/* Online softmax of the thread's two queries (one, if `rows` is 1): s becomes 2^(scale s - m), m and l go on; fade is what the
 * sums so far are to be multiplied by. */
template <int N>
__device__ static inline void attn_soften(float (&s)[N], float m[2], float l[2], float fade[2], float scale, int rows = 2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        fade[r] = 1;
        if (r >= rows) break;
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < N; i += 4) top = fmaxf(top, fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
        top = fmaxf(m[r], quad_max(top) * scale);
        float base = top == -INFINITY ? 0 : top;
        fade[r] = ex2(m[r] - base);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            s[i + 2 * r] = ex2(fmaf(s[i + 2 * r], scale, -base));
            s[i + 2 * r + 1] = ex2(fmaf(s[i + 2 * r + 1], scale, -base));
            sum += s[i + 2 * r] + s[i + 2 * r + 1];
        }
        m[r] = top, l[r] = l[r] * fade[r] + sum;
    }
}
template <int N> __device__ static inline void attn_fade(float (&acc)[N], const float fade[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] *= fade[i >> 1 & 1];
}

/* First position that some row of the item sees through the window, down to a whole number of tiles from kv0. */
__device__ static inline int attn_first(const attn_args &a, const attn_item &it, int tile) {
    int first = a.window ? it.pos_lo - a.window + 1 - it.kv0 : 0;
    return it.kv0 + (first > 0 ? first / tile * tile : 0);
}
/* Tiles x .. y-1 from `first` on are seen whole by all rows of the item: no mask. */
__device__ static inline int2 attn_open_tiles(const attn_args &a, const attn_item &it, int first, int tile) {
    int hidden = it.pos_hi - a.window - first; /* position, counted from `first`, that some row does not see any more */
    return make_int2(a.window && hidden >= 0 ? hidden / tile + 1 : 0, max(0, min(it.pos_lo + 1, it.kv1) - first) / tile);
}

typedef struct attn_rows { /* a thread's two queries: i and i + 8 of the item */
    int i;
    float m[2], l[2];
} attn_rows;

/* All of a warp together. */
template <int N> __device__ static inline void attn_rows_end(const attn_args &a, const attn_item &it, const attn_rows &w, int h,
                                                             const float (&acc)[N]) {
    int quad = threadIdx.x % 4;
    float old[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (w.i + 8 * r < it.nq) old[r] = attn_old_lse(a, it, w.i + 8 * r, h);
    __syncwarp(); /* all have read it */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(w.l[r]);
        if (w.i + 8 * r >= it.nq) continue;
        attn_exit e = attn_leave(a, it, w.i + 8 * r, h, w.m[r], sum, old[r], quad == 0);
#pragma unroll
        for (int c = 0; c < N / 4; c++)
            if (c * 8 < a.D) attn_leave_pair(e, c * 8 + quad * 2, acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]);
    }
}

/* The A operand of the first product, 16 queries of one warp, from global memory; what is not there is 0. */
template <int DP>
__device__ static inline void attn_load_q(const attn_args &a, const attn_item &it, int i, int h, uint32_t (&q)[DP / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bf16 *from = a.q + attn_head_at(a, it.q0 + i + 8 * r, h) * a.D + threadIdx.x % 4 * 2;
        bool there = i + 8 * r < it.nq;
#pragma unroll
        for (int c = 0; c < DP / 8; c++)
            q[c / 2][r + c % 2 * 2] = there && c * 8 < a.D ? *(const uint32_t *)(from + c * 8) : 0;
    }
}

template <int DP, int WARPS> __global__ void __launch_bounds__(WARPS * 32, 1) attn_mma(const __grid_constant__ attn_args a) {
    typedef attn_tile_shape<DP, WARPS> shape;
    constexpr int TOK = shape::TOK, STAGES = shape::STAGES;
    extern __shared__ __align__(1024) char attn_smem[];
    bf16 *ring = (bf16 *)attn_smem;
    grid_launch_dependents();
    grid_wait();
    const attn_item it = a.items[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, i0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    int first = attn_first(a, it, TOK), n_tiles = it.kv1 > first ? (it.kv1 - first + TOK - 1) / TOK : 0;
    int2 open = attn_open_tiles(a, it, first, TOK);
    for (int i = 0; i < STAGES - 1; i++) {
        if (i < n_tiles) attn_load_tile<DP, WARPS>(a, it, h, first + i * TOK, ring + i * 2 * TOK * DP);
        cp_async_commit();
    }
    uint32_t q[DP / 16][4];
    float acc[DP / 2] = {}, fade[2];
    attn_rows w = {i0, {-INFINITY, -INFINITY}};
    attn_load_q<DP>(a, it, i0, h, q);
    for (int i = 0; i < n_tiles; i++) {
        int next = i + STAGES - 1, kv = first + i * TOK;
        if (next < n_tiles) attn_load_tile<DP, WARPS>(a, it, h, first + next * TOK, ring + next % STAGES * 2 * TOK * DP);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
        const bf16 *k = ring + i % STAGES * 2 * TOK * DP;
        float s[TOK / 2];
        attn_qk<DP, TOK>(s, q, k, a.D);
        if (i < open.x || i >= open.y) attn_mask(a, it, s, w.i, kv);
        attn_soften(s, w.m, w.l, fade, a.scale);
        attn_fade(acc, fade);
        attn_pv<DP, TOK>(acc, s, k + TOK * DP, a.D);
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
    }
    attn_rows_end(a, it, w, h, acc);
}

template <int DP, int WARPS> static void attn_mma_launch(toka_device *d, const attn_args &a, int n) {
    launch_dependent(d, "attention", attn_mma<DP, WARPS>, dim3((unsigned)(n * a.K)), WARPS * 32, attn_tile_shape<DP, WARPS>::BYTES, 1, a);
}
/* ---- Small items on Hopper: one warp, fed by the copy engine ----
 * In and out as above. Grid: (item, kv head), 32 threads. Shared: STAGES tiles of TOK positions, K and V, each [D/64 panels][TOK][64].
 * Bytes: K and V of the item's positions, rounded up to 8 positions; FLOPs: 4 * 16 * D * kv, of which G/16 are wanted.
 * Why: the limit is the bytes of K and V, so what counts is that many are under way: 9 warps of 24 KB on an SM, none of which
 * ever waits for another; the card itself hands the next item to the next free place. One lane asks for a tile of a ring with
 * two to eight copies, the page numbers of 32 pages lie in the lanes of the warp. */
template <int DP, int TOK, int STAGES>
__global__ void __launch_bounds__(32) attn_small(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap whole,
                                                 const __grid_constant__ CUtensorMap fine) {
#if HOPPER
    constexpr int HALF = TOK * DP; /* elements of K's or V's tile */
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[STAGES];
    bf16 *ring = (bf16 *)attn_smem;
    const attn_item it = a.items[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, lane = threadIdx.x, first = attn_first(a, it, TOK), ids = 0, ids_at = -32;
    int n_tiles = it.kv1 > first ? (it.kv1 - first + TOK - 1) / TOK : 0;
    int2 open = attn_open_tiles(a, it, first, TOK);
    if (lane == 0) {
        for (int i = 0; i < STAGES; i++) mbar_init(smem_at(&full[i]), 1);
        mbar_init_fence();
    }
    __syncwarp();
    grid_launch_dependents();
    auto ask = [&](int i) {
        int t = first + i * TOK - it.kv0, n = min(TOK, it.kv1 - it.kv0 - t), page = t >> a.log2_B;
        if (page - ids_at >= 32) ids_at = page, ids = a.pages[it.page0 + min(page + lane, (it.kv1 - it.kv0 - 1) >> a.log2_B)];
        int row = ((__shfl_sync(~0u, ids, page - ids_at) * a.K + h) * 2 << a.log2_B) + (t & ((1 << a.log2_B) - 1));
        if (lane) return;
        uint32_t to = smem_at(ring + i % STAGES * 2 * HALF), bar = smem_at(&full[i % STAGES]);
        int pieces = n == TOK ? 1 : (n + 7) / 8;
        mbar_expect_tx(bar, 2 * DP * 2 * (n == TOK ? TOK : pieces * 8));
        for (int v = 0; v < 2; v++)
            for (int panel = 0; panel < DP / 64; panel++)
                for (int j = 0; j < pieces; j++)
                    tma_load_2d(to + (v * HALF + panel * TOK * 64 + j * 8 * 64) * 2, n == TOK ? &whole : &fine, bar, panel * 64,
                                row + (v << a.log2_B) + j * 8);
    };
    grid_wait();
    for (int i = 0; i < STAGES && i < n_tiles; i++) ask(i);
    uint32_t q[DP / 16][4];
    float acc[DP / 2] = {}, fade[2];
    attn_rows w = {lane / 4, {-INFINITY, -INFINITY}};
    attn_load_q<DP>(a, it, lane / 4, h, q);
    int rows = it.nq > 8 ? 2 : 1;
    for (int i = 0; i < n_tiles; i++) {
        int kv = first + i * TOK, n = it.kv1 - kv;
        bf16 *k = ring + i % STAGES * 2 * HALF;
        float s[TOK / 2];
        mbar_wait(smem_at(&full[i % STAGES]), i / STAGES & 1);
        attn_qk<DP, TOK>(s, q, k, DP == 64 ? 64 : a.D);
        if (n < TOK) { /* 0 times what lies behind the last position must be 0 */
            for (int j = lane + n * (DP / 8); j < TOK * (DP / 8); j += 32)
                *(uint4 *)(k + HALF + attn_piece_at(TOK, j / (DP / 8), j % (DP / 8))) = uint4{};
            __syncwarp();
        }
        if (i < open.x || i >= open.y) attn_mask(a, it, s, w.i, kv);
        attn_soften(s, w.m, w.l, fade, a.scale, rows);
        attn_fade(acc, fade);
        attn_pv<DP, TOK>(acc, s, k + HALF, DP == 64 ? 64 : a.D);
        __syncwarp();
        if (i + STAGES < n_tiles) ask(i + STAGES);
    }
    attn_rows_end(a, it, w, h, acc);
#else
    __trap();
#endif
}

/* ---- Tiles on Hopper: wgmma, after FlashAttention-3 ----
 * In and out as above. Grid: (item, kv head); WGS warpgroups of 64 queries each, and one of which a single warp works: it asks the copy
 * engine for K and V. Shared: Q [panels][64 WGS][64] and STAGES tiles of N positions of K and of V, each [panels][N][64].
 * FLOPs: 4 * 64 WGS * D * kv.
 * Why: S = Q K^T of tile j is under way together with P V of tile j-1, and the softmax of j runs beside the latter; P goes from
 * accumulators to the A operand within the registers. The warpgroups take turns in giving out products, so that one computes
 * exponentials while the tensor cores work for another.
 * Retired (H100, causal prefill of 4,096 rows at D = 64 / 128, where this one does 406 / 500 TFLOP/s): no warp of its own for loading,
 * warp 0 asked between its products: 290 / 323; blocks that stay and take items in turn: 384 / 484, as the card deals out
 * blocks of unequal length better. */
template <int DP, int WGS, int N, int STAGES> struct attn_wg_shape {
    static constexpr int PANELS = (DP + 63) / 64, THREADS = WGS * 128 + 128;
    static constexpr int REGS = WGS == 2 ? 240 : 160, FEED_REGS = WGS == 2 ? 24 : 32;
    static constexpr int Q = PANELS * WGS * 64 * 128, TILE = PANELS * N * 128, BYTES = Q + STAGES * 2 * TILE;
};

template <int DP, int N> __device__ static inline void attn_wg_qk(float (&s)[N / 2], uint32_t q, int q_panel, uint32_t k) {
#if HOPPER
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DP / 16; c++)
        wgmma_ss<N>(s, wgmma_desc(q + c / 4 * q_panel) + c % 4 * 2, wgmma_desc(k + c / 4 * N * 128) + c % 4 * 2, c > 0);
    wgmma_commit();
#endif
}
template <int DP, int N> __device__ static inline void attn_wg_pv(float (&acc)[DP / 2], const uint32_t (&p)[N / 16][4], uint32_t v) {
#if HOPPER
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < N / 16; n++) wgmma_rs<DP, 1>(acc, p[n], wgmma_desc_trans(v, N * 128) + n * 128, 1);
    wgmma_commit();
#endif
}

/* The feeding warp: K and V of all tiles, in the order in which they are used, in blocks of 64 positions; blocks behind the last
 * position are left out. */
template <int DP, int WGS, int N, int STAGES>
__device__ static inline void attn_wg_feed(const attn_args &a, const CUtensorMap *map, const attn_item &it, int h, int first, int n_tiles,
                                           uint32_t ks, uint32_t bars) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    int lane = threadIdx.x % 32, last = it.kv1 - it.kv0 - 1, ids = 0, ids_at = -32; /* page numbers ids_at .. ids_at+31, one per lane */
    for (int i = 0; i < 2 * n_tiles; i++) { /* K0, K1, V0, K2, V1 ... */
        int v = i == 2 * n_tiles - 1 || (i > 1 && i % 2 == 0), j = v ? (i - 1) / 2 : (i + 1) / 2, at = v * STAGES + j % STAGES;
        int t = first + j * N - it.kv0, blocks = min(N / 64, (last - t) / 64 + 1);
        uint32_t to = ks + at * shape::TILE, full = bars + 8 * at;
        mbar_wait(full + 16 * STAGES, (j / STAGES & 1) ^ 1);
        if (lane == 0) mbar_expect_tx(full, blocks * 64 * shape::PANELS * 128);
        for (int b = 0; b < blocks; b++, t += 64, to += 64 * 128) {
            int page = t >> a.log2_B;
            if (page - ids_at >= 32 || page < ids_at) ids_at = page, ids = a.pages[it.page0 + min(page + lane, last >> a.log2_B)];
            int row = (((__shfl_sync(~0u, ids, page - ids_at) * a.K + h) * 2 + v) << a.log2_B) + (t & ((1 << a.log2_B) - 1));
            for (int panel = 0; panel < shape::PANELS && lane == 0; panel++) tma_load_2d(to + panel * N * 128, map, full, panel * 64, row);
        }
    }
#endif
}

/* Q of one warpgroup to shared memory, swizzled; what is not there is 0. */
template <int DP, int WGS> __device__ static inline void attn_wg_load_q(const attn_args &a, const attn_item &it, int h, int wg, bf16 *to) {
#if HOPPER
    constexpr int PIECES = (DP + 63) / 64 * 8;
    int piece = threadIdx.x % PIECES, row0 = wg * 64 + threadIdx.x % 128 / PIECES;
    uint4 x[PIECES / 2];
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++) {
        int row = row0 + i * (128 / PIECES);
        x[i] = uint4{};
        if (row < it.nq && piece * 8 < a.D) x[i] = *(const uint4 *)(a.q + attn_head_at(a, it.q0 + row, h) * a.D + piece * 8);
    }
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++) *(uint4 *)(to + attn_piece_at(WGS * 64, row0 + i * (128 / PIECES), piece)) = x[i];
    fence_async_smem();
    named_sync(1 + wg, 128);
#endif
}

/* Rows n .. N-1 of a tile of V become 0, as 0 times what lies there must be 0. By one warpgroup; another may do the same. */
template <int DP, int N> __device__ static inline void attn_wg_clear(bf16 *v, int n, int wg) {
#if HOPPER
    for (int i = threadIdx.x % 128 + n * 8; i < N * 8; i += 128)
        for (int panel = 0; panel < (DP + 63) / 64; panel++) *(uint4 *)(v + attn_piece_at(N, i / 8, panel * 8 + i % 8)) = uint4{};
    fence_async_smem();
    named_sync(1 + wg, 128);
#endif
}

/* x is at least 0. ptxas would move the softmax behind the wgmma_wait that follows it, and nothing would run beside the product: a
 * store that never happens, but has to wait for x and may not pass the wait. */
__device__ static inline void attn_hold(float x, uint32_t at) {
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.b32 [%1], %1;}" ::"f"(x), "r"(at) : "memory");
}

/* One warpgroup: its 64 queries against all tiles. */
template <int DP, int WGS, int N, int STAGES>
__device__ static inline void attn_wg_work(const attn_args &a, const attn_item &it, int h, int wg, int first, int n_tiles, uint32_t qs,
                                           uint32_t full_k, char *smem) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    int lane = threadIdx.x % 32, at = 0, parity = 0; /* of the tile that is next for P V */
    uint32_t ks = qs + shape::Q, vs = ks + STAGES * shape::TILE, full_v = full_k + 8 * STAGES;
    uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;
    attn_rows w = {wg * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, {-INFINITY, -INFINITY}};
    float s[N / 2], acc[DP / 2] = {}, fade[2];
    uint32_t p[N / 16][4];
    int2 open = attn_open_tiles(a, it, first, N);
    auto soften = [&](int j) {
        if (j < open.x || j >= open.y) attn_mask(a, it, s, w.i, first + j * N);
        attn_soften(s, w.m, w.l, fade, a.scale);
    };
    attn_wg_load_q<DP, WGS>(a, it, h, wg, (bf16 *)smem);
    qs += wg * 64 * 128;
    if (n_tiles) {
        mbar_wait(full_k, 0);
        attn_wg_qk<DP, N>(s, qs, WGS * 64 * 128, ks);
        wgmma_wait<0>();
        wgmma_keep(s);
        if (lane == 0) mbar_arrive(empty_k);
        soften(0);
        attn_pack(p, s);
    }
    if (wg == WGS - 1) named_arrive(1 + WGS, 256);
    for (int j = 1; j < n_tiles; j++) {
        int was = at, was_parity = parity;
        if (++at == STAGES) at = 0, parity ^= 1;
        mbar_wait(full_k + 8 * at, parity);
        named_sync(1 + WGS + wg, 256); /* this warpgroup's turn */
        attn_wg_qk<DP, N>(s, qs, WGS * 64 * 128, ks + at * shape::TILE);
        mbar_wait(full_v + 8 * was, was_parity);
        attn_wg_pv<DP, N>(acc, p, vs + was * shape::TILE);
        named_arrive(wg == WGS - 1 ? 1 + WGS : 2 + WGS + wg, 256);
        wgmma_wait<1>();
        wgmma_keep(s);
        if (lane == 0) mbar_arrive(empty_k + 8 * at);
        soften(j);
        attn_hold(w.l[0] + w.l[1], empty_k);
        wgmma_wait<0>();
        wgmma_keep(acc);
        if (lane == 0) mbar_arrive(empty_v + 8 * was);
        attn_fade(acc, fade);
        attn_pack(p, s);
    }
    if (n_tiles) {
        int n = it.kv1 - first - (n_tiles - 1) * N;
        mbar_wait(full_v + 8 * at, parity);
        if (n < N) attn_wg_clear<DP, N>((bf16 *)(smem + shape::Q + (STAGES + at) * shape::TILE), n, wg);
        attn_wg_pv<DP, N>(acc, p, vs + at * shape::TILE);
        wgmma_wait<0>();
        wgmma_keep(acc);
    }
    attn_rows_end(a, it, w, h, acc);
#endif
}

template <int DP, int WGS, int N, int STAGES>
__global__ void __launch_bounds__(attn_wg_shape<DP, WGS, N, STAGES>::THREADS, 1)
    attn_wg(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap map) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t bars[4 * STAGES]; /* full K, full V, empty K, empty V */
    __shared__ attn_item it;
    uint32_t qs = smem_at(attn_smem), full_k = smem_at(bars);
    int h = blockIdx.x % a.K;
    if (threadIdx.x == 0) {
        it = a.items[blockIdx.x / a.K];
        for (int i = 0; i < 2 * STAGES; i++) mbar_init(full_k + 8 * i, 1), mbar_init(full_k + 8 * (2 * STAGES + i), 4 * WGS);
        mbar_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_wait();
    int first = attn_first(a, it, N), n_tiles = it.kv1 > first ? (it.kv1 - first + N - 1) / N : 0;
    if (threadIdx.x < 128) {
        regs_give<shape::FEED_REGS>();
        if (threadIdx.x < 32) attn_wg_feed<DP, WGS, N, STAGES>(a, &map, it, h, first, n_tiles, qs + shape::Q, full_k);
    } else {
        regs_take<shape::REGS>();
        attn_wg_work<DP, WGS, N, STAGES>(a, it, h, threadIdx.x / 128 - 1, first, n_tiles, qs, full_k, attn_smem);
    }
#else
    __trap();
#endif
}

template <int DP, int TOK, int STAGES> static void attn_small_launch(toka_device *d, const attn_args &a, int n, const CUtensorMap *map) {
    launch_dependent(d, "attention", attn_small<DP, TOK, STAGES>, dim3((unsigned)(n * a.K)), 32, STAGES * 2 * TOK * DP * 2, 1, a,
                     map[TOK == 16 ? ATTN_MAP_16 : TOK == 32 ? ATTN_MAP_32 : ATTN_MAP_64], map[ATTN_MAP_8]);
}
template <int DP, int WGS, int N, int STAGES>
static void attn_wg_launch(toka_device *d, const attn_args &a, int n, const CUtensorMap *map) {
    typedef attn_wg_shape<DP, WGS, N, STAGES> room;
    launch_dependent(d, "attention", attn_wg<DP, WGS, N, STAGES>, dim3((unsigned)(n * a.K)), room::THREADS, room::BYTES, 1, a,
                     map[ATTN_MAP_64]);
}

/* ---- Merge of the parts of split-KV ----
 * In: merges (grid.x: merge, kv head; grid.y: query), n parts each. Out: as the item that was cut would have written. Block: 128 threads;
 * D/4 of them hold a row, so 128 / (D/4) parts are read at a time; the sums of these groups are added in a fixed order. Bytes: n * D * 4
 * per query. */
__global__ void __launch_bounds__(128) attn_join(const __grid_constant__ attn_args a, const attn_merge *merges) {
    __shared__ float4 sums[128];
    __shared__ float tops[4], weights[128];
    const attn_merge me = merges[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, i = blockIdx.y, row = a.D / 4, groups = 128 / row, group = threadIdx.x / row, col = threadIdx.x % row * 4;
    grid_launch_dependents();
    grid_wait();
    if (i >= me.nq) return;
    size_t first = attn_part_at(a, me.slot, i, h), step = attn_part_at(a, (me.nq + ATTN_SMALL_Q - 1) / ATTN_SMALL_Q, 0, 0);
    attn_item it = {};
    it.q0 = me.q0, it.nq = me.nq, it.where = me.where;
    float m = -INFINITY, l = 0, old = attn_old_lse(a, it, i, h);
    float4 acc = {};
    for (int j = threadIdx.x; j < me.n; j += 128) m = fmaxf(m, a.part_lse[first + j * step]);
    for (int k = 16; k; k /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, k));
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = m;
    __syncthreads(); /* all have read the old LSE too */
    m = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
#pragma unroll 4
    for (int j = group; j < me.n; j += groups) {
        if (group >= groups || m == -INFINITY) break;
        float w = ex2(a.part_lse[first + j * step] - m);
        float4 x = *(const float4 *)(a.part_o + (first + j * step) * a.D + col);
        l += w, acc.x += w * x.x, acc.y += w * x.y, acc.z += w * x.z, acc.w += w * x.w;
    }
    sums[threadIdx.x] = acc, weights[threadIdx.x] = l;
    __syncthreads();
    if (group) return;
    for (int j = 1; j < groups; j++) {
        float4 x = sums[j * row + threadIdx.x];
        l += weights[j * row], acc.x += x.x, acc.y += x.y, acc.z += x.z, acc.w += x.w;
    }
    attn_exit e = attn_leave(a, it, i, h, m, l, old, threadIdx.x == 0);
    attn_leave_pair(e, col, acc.x, acc.y), attn_leave_pair(e, col + 2, acc.z, acc.w);
}

/* ---- The op ---- */

static void attn_sizes(const toka_device *d, attn_plan *p) {
    const toka_shape *sh = d->shape;
    int T = d->options.max_tokens, G = sh->H / sh->K, seq_pages = ceil_div(sh->max_len, sh->B);
    int64_t pages = (int64_t)T * seq_pages;
    p->hopper = d->hopper && sh->B >= 64 && sh->D >= 64 && sh->D <= 128 && d->kv_layer / sh->D < INT_MAX;
    p->G = G, p->small_rows = ATTN_SMALL_Q / G;
    p->tile_q = !p->hopper ? ATTN_TILE_Q : sh->D == 64 ? 192 : 128;
    p->max_spans = 2 * T + 64;
    p->max_levels = seq_pages + 1;
    p->max_pages = (size_t)(pages < 1 << 24 ? pages : 1 << 24);
    /* the parts of split-KV: what attn_small_part and attn_tile_part make of it; beyond, ranges stay whole */
    p->max_slots = d->n_sms * (ATTN_WARPS + p->tile_q / ATTN_SMALL_Q) * 3 / 2 / sh->K + 64;
    p->max_merges = 2 * p->max_slots;
    p->max_items = p->max_spans + p->max_slots + 8 * ceil_div(T * G, p->tile_q);
}

/* Tensor maps of K and V in pages, 64 columns wide and 8, 16, 32 and 64 rows high, where the Hopper kernels can run. */
static void attn_open_maps(toka_device *d) {
    const toka_shape *sh = d->shape;
    attn_plan *p = d->attn;
    if (!p->hopper || d->error.code) return;
    p->maps = (CUtensorMap *)aligned_alloc(64, (size_t)sh->L * ATTN_MAPS * sizeof *p->maps);
    if (!p->maps) abort();
    for (int i = 0; i < sh->L * ATTN_MAPS; i++) {
        cuuint64_t size[2] = {(cuuint64_t)sh->D, d->kv_layer / sh->D}, stride = (cuuint64_t)sh->D * sizeof(bf16);
        cuuint32_t box[2] = {64, 8u << i % ATTN_MAPS}, step[2] = {1, 1};
        CUresult code = d->encode_map(p->maps + i, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, d->kv + (size_t)(i / ATTN_MAPS) * d->kv_layer,
                                      size, &stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        latch(d, code ? cudaErrorInvalidValue : cudaSuccess, "tensor map of the KV cache");
    }
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
    attn_open_maps(d);
}

static void attn_close(toka_device *d) { /* host memory; the device's goes with all blocks */
    if (!d->attn) return;
    free(d->attn->spans), free(d->attn->levels), free(d->attn->merges), free(d->attn->maps), free(d->attn->row_level), free(d->attn);
    d->attn = NULL;
}

/* Bytes of d->up that attn_plan_step takes at most. */
static size_t attn_stage_bytes(const toka_device *d) {
    const attn_plan *p = d->attn;
    return (size_t)p->max_items * sizeof(attn_item) + (size_t)p->max_merges * sizeof(attn_merge) + p->max_pages * sizeof(int) + 64;
}

static void attn_launch_items(toka_device *d, int layer, attn_args a, int item0, int n, bool small) {
    const attn_plan *p = d->attn;
    dim3 grid((unsigned)(n * a.K));
    const CUtensorMap *map = p->maps ? p->maps + ATTN_MAPS * layer : NULL;
    if (!n) return;
    a.items = p->dev_items + item0;
    if (map && small) a.D <= 64 ? attn_small_launch<64, 32, 3>(d, a, n, map) : attn_small_launch<128, 16, 3>(d, a, n, map);
    else if (map && a.D <= 64) attn_wg_launch<64, 3, 128, 3>(d, a, n, map);
    else if (map && a.D <= 96) attn_wg_launch<96, 2, 128, 3>(d, a, n, map);
    else if (map) attn_wg_launch<128, 2, 128, 3>(d, a, n, map);
    else if (a.D <= 64) small ? attn_mma_launch<64, 1>(d, a, n) : attn_mma_launch<64, 4>(d, a, n);
    else if (a.D <= 128) small ? attn_mma_launch<128, 1>(d, a, n) : attn_mma_launch<128, 4>(d, a, n);
    else small ? attn_mma_launch<256, 1>(d, a, n) : attn_mma_launch<256, 4>(d, a, n);
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
        attn_launch_items(d, layer, a, l->tile0, l->n_tiles, false);
        attn_launch_items(d, layer, a, l->small0, l->n_small, true);
        if (!l->n_merges) continue;
        launch_dependent(d, "attention, parts", attn_join,
                         dim3((unsigned)(l->n_merges * a.K), (unsigned)l->merge_nq), 128, 0, 1, a,
                         p->dev_merges + l->merge0);
    }
}

/* ===========================================================================
 * MARK: 10. LM head and sampling [kernel]
 * =========================================================================== */

/* ===========================================================================
 * MARK: 11. The card, opening and closing [host]
 * =========================================================================== */

/* ---- The card ---- */

/* What the driver says about GPU i in one line; 0 when there is none, with the reason in the line. */
static int cuda_probe(int i, char *line, size_t bytes) {
    int n = 0, driver = 0;
    cudaDeviceProp p;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (!code && i >= n) code = cudaErrorNoDevice;
    if (!code) code = cudaGetDeviceProperties(&p, i);
    cudaGetLastError();
    if (code) {
        snprintf(line, bytes, "%s", cudaGetErrorString(code));
        return 0;
    }
    cudaDriverGetVersion(&driver);
    bool runs = p.major >= 8;
    snprintf(line, bytes, "%s, %.0f GB, %d multiprocessors, compute capability %d.%d, driver for CUDA %d.%d%s", p.name,
             p.totalGlobalMem / 1e9, p.multiProcessorCount, p.major, p.minor, driver / 1000, driver % 1000 / 10,
             runs ? "" : ": too old, 8.0 or later is needed");
    return runs;
}

/* Which kernels can run, and the encoder of tensor maps from the driver (libcuda is not linked). */
static void card_open(toka_device *d) {
    cudaDeviceProp p;
    latch(d, cudaSetDevice(d->ordinal), "cudaSetDevice");
    latch(d, cudaGetDeviceProperties(&p, d->ordinal), "cudaGetDeviceProperties");
    if (d->error.code) return;
    d->arch = 10 * p.major + p.minor, d->n_sms = p.multiProcessorCount, d->hopper = d->arch == 90;
    snprintf(d->about, sizeof d->about, "%s, %.0f GB, %s kernels", p.name, p.totalGlobalMem / 1e9, d->hopper ? "wgmma" : "mma.sync");
    latch(d, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    if (!d->hopper) return;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    latch(d, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&d->encode_map, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
#else
    latch(d, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void **)&d->encode_map, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
#endif
}

/* ---- Memory, counted before it is taken ---- */

static size_t weights_bytes(const toka_shape *s, const toka_weights *w) {
    size_t n = (size_t)up_8(w->embed.rows) * up_8(w->embed.cols) * (w->lm_head.data != w->embed.data ? 2 : 1);
    for (int i = 0; i < s->L; i++) {
        const toka_layer *l = &w->layers[i];
        const toka_tensor *t[] = {&l->q, &l->k, &l->v, &l->o, &l->gate, &l->up, &l->down};
        for (const toka_tensor *m : t) n += (size_t)up_8(m->rows) * up_8(m->cols);
    }
    return n * sizeof(bf16);
}

/* What all but the weights and the KV pool takes, with what the driver and the libraries' code take. */
static size_t scratch_bytes(const toka_shape *s, const toka_device_options *o) {
    size_t heads = (size_t)(s->H + 2 * s->K) * s->D, row = 2 * (size_t)s->E + 2 * (size_t)s->H * s->D + heads + s->F;
    return (size_t)o->max_tokens * row * sizeof(bf16) + (size_t)s->max_len * s->D / 2 * sizeof(float2) + ((size_t)1536 << 20);
}

/* Bytes that the KV pool may take on this card beside the model and a step of this size. Only asks. */
static int64_t cuda_kv_bytes(const toka_shape *s, const toka_weights *w, const toka_device_options *o) {
    size_t free_bytes = 0, total = 0;
    cudaGetLastError();
    if (cudaMemGetInfo(&free_bytes, &total)) return 0;
    double share = o->memory_utilization > 0 ? o->memory_utilization : 0.9;
    return (int64_t)(share * free_bytes) - (int64_t)weights_bytes(s, w) - (int64_t)scratch_bytes(s, o);
}

/* ---- Open and close ---- */

static int cuda_check(const toka_device_options *o, const toka_shape *s, toka_err *e) {
    e->code = 0;
    if (s->D % 8 || s->D > 256)
        snprintf(e->msg, sizeof e->msg, "GPU: head size %d, expected a multiple of 8 up to 256", s->D), e->code = TOKA_E_INPUT;
    else if (o->max_tokens < 1 || o->max_out < 1 || o->n_pages < 1 || o->n_pages > INT_MAX / s->B)
        snprintf(e->msg, sizeof e->msg, "GPU: %d tokens and %d outputs a step, %d pages: out of range", o->max_tokens, o->max_out,
                 o->n_pages), e->code = TOKA_E_USE;
    return e->code;
}

static void cuda_close(toka_device *d) {
    if (!d) return;
    if (d->stream) cudaStreamSynchronize(d->stream);
    for (int i = 0; i < d->n_blocks; i++) cudaFree(d->blocks[i]);
    cudaFreeHost(d->up.host);
    if (d->up.sent) cudaEventDestroy(d->up.sent);
    attn_close(d);
    samp_close(d);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d->layers);
    free(d->blocks);
    free(d);
}

static void cuda_take_memory(toka_device *d) {
    const toka_shape *s = d->shape;
    size_t T = (size_t)d->options.max_tokens, HD = (size_t)(s->H + 2 * s->K) * s->D;
    d->xn = (bf16 *)dev_alloc(d, T * d->E * sizeof(bf16), "activations");
    d->qkv = (bf16 *)dev_alloc(d, T * HD * sizeof(bf16), "activations");
    d->act = (bf16 *)dev_alloc(d, T * d->F * sizeof(bf16), "activations");
    d->kv_layer = (size_t)d->options.n_pages * s->K * 2 * s->B * s->D;
    d->kv = (bf16 *)dev_alloc(d, (size_t)s->L * d->kv_layer * sizeof(bf16), "KV cache");
    if (!d->error.code) latch(d, cudaMemsetAsync(d->kv, 0, (size_t)s->L * d->kv_layer * sizeof(bf16), d->stream), "KV cache");
    if (!d->error.code) attn_open(d);
    if (!d->error.code) samp_open(d);
    if (!d->error.code) stage_open(d, &d->up, 3 * T * sizeof(int) + attn_stage_bytes(d) + samp_stage_bytes(d) + 4096);
}

static int cuda_open(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights, toka_err *e) {
    if (cuda_check(o, shape, e)) return e->code;
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    if (!d) abort();
    d->options = *o, d->shape = shape, d->weights = weights;
    d->E = up_8(shape->E), d->F = up_8(shape->F), d->V = up_8(shape->V);
    const char *fault = getenv("TOKA_DEBUG_GPU_FAULT");
    d->fault_in = fault ? atoi(fault) : 0;
    card_open(d);
    if (!d->error.code) weights_open(d);
    if (!d->error.code) rope_open(d);
    if (!d->error.code) cuda_take_memory(d);
    if (!d->error.code) latch(d, cudaStreamSynchronize(d->stream), "opening the model");
    if (d->error.code) {
        *e = d->error;
        cuda_close(d);
        return e->code;
    }
    *out = d;
    return 0;
}

static const char *cuda_describe(const toka_device *d) { return d->about; }

static int cuda_status(toka_device *d, toka_err *e) {
    if (d->error.code) *e = d->error;
    return d->error.code;
}
static toka_dev cuda_alloc(toka_device *d, size_t bytes) { return toka_dev{(uint64_t)dev_alloc(d, bytes, "activations")}; }
static void cuda_upload(toka_device *d, toka_dev to, const void *from, size_t bytes) {
    latch(d, cudaMemcpyAsync((void *)to.at, from, bytes, cudaMemcpyHostToDevice, d->stream), "upload");
    latch(d, cudaStreamSynchronize(d->stream), "upload");
}
static void cuda_download(toka_device *d, void *to, toka_dev from, size_t bytes) {
    latch(d, cudaMemcpyAsync(to, (const void *)from.at, bytes, cudaMemcpyDeviceToHost, d->stream), "download");
    latch(d, cudaStreamSynchronize(d->stream), "download");
}

/* ===========================================================================
 * MARK: 12. Measuring the ops [host]
 * `toka bench ops`: each op at the shapes of well-known models, inside a captured graph, on buffers that together are larger than the
 * L2 cache and filled with random numbers. What the caller gets is time, arithmetic and bytes; it draws the table.
 * =========================================================================== */

enum { BENCH_CACHE_BYTES = 256 << 20, BENCH_MAX_SETS = 64, BENCH_REPLAYS = 15 };

typedef struct bench {
    toka_device *d;
    toka_bench_fn *row;
    void *user;
} bench;

/* Uniform in (-scale, scale), from a counter. */
__global__ static void bench_fill_kernel(bf16 *p, size_t n, uint64_t seed, float scale) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = (seed << 40) + i * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        p[i] = __float2bfloat16(scale * ((float)(z >> 40) * 0x1p-23f - 1));
    }
}
static bf16 *bench_random(toka_device *d, size_t n, float scale) {
    bf16 *p = (bf16 *)dev_alloc(d, n * sizeof(bf16), "buffers");
    if (!p) return NULL;
    bench_fill_kernel<<<1024, 256, 0, d->stream>>>(p, n, (uint64_t)d->n_blocks, scale);
    LAUNCHED(d, "random numbers");
    return p;
}
static void bench_free(toka_device *d, int keep) { /* all blocks taken since there were `keep` */
    latch(d, cudaStreamSynchronize(d->stream), "bench");
    while (d->n_blocks > keep) cudaFree(d->blocks[--d->n_blocks]);
}

/* Median microseconds of op(arg, i): i = 0 .. per_graph-1 are captured once and replayed. */
static double bench_time(toka_device *d, int per_graph, void (*op)(void *arg, int i), void *arg) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaEvent_t at[2] = {NULL, NULL};
    float ms[BENCH_REPLAYS] = {0};
    op(arg, 0);
    for (cudaEvent_t &e : at) latch(d, cudaEventCreate(&e), "bench");
    latch(d, cudaStreamSynchronize(d->stream), "bench");
    latch(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < per_graph; i++) op(arg, i);
    latch(d, cudaStreamEndCapture(d->stream, &graph), "capture");
    if (!d->error.code) latch(d, cudaGraphInstantiate(&exec, graph, 0), "capture");
    for (int i = -3; i < BENCH_REPLAYS && !d->error.code; i++) {
        latch(d, cudaEventRecord(at[0], d->stream), "bench");
        latch(d, cudaGraphLaunch(exec, d->stream), "bench");
        latch(d, cudaEventRecord(at[1], d->stream), "bench");
        latch(d, cudaEventSynchronize(at[1]), "bench");
        if (i >= 0) latch(d, cudaEventElapsedTime(&ms[i], at[0], at[1]), "bench");
    }
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    for (cudaEvent_t e : at) cudaEventDestroy(e);
    for (int i = 1; i < BENCH_REPLAYS; i++) /* insertion sort */
        for (int j = i; j && ms[j] < ms[j - 1]; j--) {
            float t = ms[j];
            ms[j] = ms[j - 1], ms[j - 1] = t;
        }
    return ms[BENCH_REPLAYS / 2] * 1000.0 / per_graph;
}

/* ---- Read bandwidth: the ceiling of everything that is bound by memory ---- */

__global__ static void __launch_bounds__(512) bench_read_kernel(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = __ldcs(p + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (sum == 0x12345678u) *out = sum; /* keeps the loads; random data makes it rare, and harmless */
}
typedef struct bench_read_arg {
    toka_device *d;
    const uint4 *p;
    size_t n;
    uint32_t *out;
} bench_read_arg;
static void bench_read_op(void *arg, int) {
    bench_read_arg *a = (bench_read_arg *)arg;
    bench_read_kernel<<<a->d->n_sms * 4, 512, 0, a->d->stream>>>(a->p, a->n, a->out);
}
static void bench_read(bench *b) {
    size_t n = (size_t)2 << 30;
    int keep = b->d->n_blocks;
    bench_read_arg a = {b->d, (const uint4 *)bench_random(b->d, n / 2, 1), n / 16, (uint32_t *)dev_alloc(b->d, 4, "buffers")};
    if (!b->d->error.code) {
        double us = bench_time(b->d, 1, bench_read_op, &a);
        toka_bench_row r = {"read", "", "2 GiB", us, 0, (double)n};
        b->row(b->user, &r);
    }
    bench_free(b->d, keep);
}

/* ---- GEMM ---- */

typedef struct bench_shape { /* the matrices of a model: qkv, o, gate_up, down, lm_head as N x K follow from these */
    const char *model;
    int E, H, K, D, F, V;
} bench_shape;
static const bench_shape bench_shapes[] = {{"Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256},
                                           {"Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256},
                                           {"Llama-3.1-70B", 8192, 64, 8, 128, 28672, 0},
                                           {"Qwen2.5-0.5B", 896, 14, 2, 64, 4864, 151936}};
static const int bench_rows[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192};

typedef struct bench_gemm_arg {
    toka_device *d;
    gemm_args g[BENCH_MAX_SETS];
    int n;
} bench_gemm_arg;
static void bench_gemm_op(void *arg, int i) {
    bench_gemm_arg *a = (bench_gemm_arg *)arg;
    gemm(a->d, &a->g[i % a->n]);
}
static void bench_gemm(bench *b, const char *name, const char *model, int M, int N, int K, enum epilogue epi) {
    toka_device *d = b->d;
    int keep = d->n_blocks, ldy = epi == EPI_SWIGLU ? N / 2 : N;
    size_t set = ((size_t)N * K + (size_t)M * K + (size_t)M * ldy) * sizeof(bf16);
    bench_gemm_arg a = {};
    weight w[BENCH_MAX_SETS];
    a.d = d, a.n = (int)(BENCH_CACHE_BYTES / set) + 1;
    if (a.n > BENCH_MAX_SETS) a.n = BENCH_MAX_SETS;
    for (int i = 0; i < a.n; i++) {
        w[i] = weight{bench_random(d, (size_t)N * K, sqrtf(3.0f / K)), NULL, N, K};
        a.g[i] = gemm_args{M, bench_random(d, (size_t)M * K, 1.7f), K, &w[i], bench_random(d, (size_t)M * ldy, 1), ldy, epi};
    }
    if (!d->error.code) {
        char shape[64];
        double us = bench_time(d, a.n < 8 ? 8 : a.n, bench_gemm_op, &a);
        snprintf(shape, sizeof shape, "M=%d %dx%d", M, N, K);
        double bytes = ((double)N * K + (double)M * K + (double)M * ldy * (epi == EPI_RESIDUAL ? 2 : 1)) * sizeof(bf16);
        toka_bench_row r = {name, model, shape, us, 2.0 * M * N * K, bytes};
        b->row(b->user, &r);
    }
    bench_free(d, keep);
}
static void bench_gemms(bench *b) {
    for (const bench_shape &s : bench_shapes)
        for (int M : bench_rows) {
            if (b->d->error.code) return;
            bench_gemm(b, "qkv", s.model, M, (s.H + 2 * s.K) * s.D, s.E, EPI_STORE);
            bench_gemm(b, "o", s.model, M, s.E, s.H * s.D, EPI_RESIDUAL);
            bench_gemm(b, "gate_up", s.model, M, 2 * s.F, s.E, EPI_SWIGLU);
            bench_gemm(b, "down", s.model, M, s.E, s.F, EPI_RESIDUAL);
        }
}

/* Runs every measurement; row is told of each as it is done. */
static int cuda_bench(toka_bench_fn *row, void *user, toka_err *e) {
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    if (!d) abort();
    bench b = {d, row, user};
    card_open(d);
    if (!d->error.code) bench_read(&b);
    if (!d->error.code) bench_gemms(&b);
    *e = d->error;
    cuda_close(d);
    return e->code;
}

/* ===========================================================================
 * MARK: 13. The op table [host]
 * =========================================================================== */

/* ---- The ops. After a failure they do nothing: the engine learns of it from status() ---- */

static bf16 *dev_bf16(toka_dev a) { return (bf16 *)a.at; }

/* A kernel that fails as a bug or a broken card would, for the test of what happens then. */
__global__ static void fault_kernel() { __trap(); }

/* Begins the step: everything it needs goes up, in one transfer. */
static void cuda_embed(toka_device *d, const toka_step *s, toka_dev x) {
    if (d->error.code) return;
    stage_begin(d, &d->up);
    d->rows.T = s->T;
    d->rows.ids = (const int *)stage_put(&d->up, s->ids, (size_t)s->T * sizeof(int));
    d->rows.pos = (const int *)stage_put(&d->up, s->pos, (size_t)s->T * sizeof(int));
    d->rows.slot = (const int *)stage_put(&d->up, s->slot, (size_t)s->T * sizeof(int));
    attn_plan_step(d, s);
    samp_plan_step(d, s);
    stage_send(d, &d->up);
    if (d->fault_in && !--d->fault_in) fault_kernel<<<1, 1, 0, d->stream>>>();
    launch_dependent(d, "embedding", embed_kernel, dim3(s->T), 128, 0, 1, d->rows.ids, d->embed, dev_bf16(x), d->E);
}

static void cuda_norm_qkv_rope_kv(toka_device *d, const toka_step *s, int layer, toka_dev x, toka_dev q) {
    if (d->error.code) return;
    const toka_shape *sh = d->shape;
    const layer_weights *l = &d->layers[layer];
    rmsnorm(d, dev_bf16(x), NULL, l->attn_norm, d->xn, s->T);
    gemm_args g = {s->T, d->xn, d->E, &l->qkv, d->qkv, l->qkv.N, EPI_STORE};
    gemm(d, &g);
    rope_args a = {d->qkv, dev_bf16(q), d->kv + (size_t)layer * d->kv_layer, d->rows.pos, d->rows.slot, d->rope,
                   l->q_norm, l->k_norm, s->T, sh->H, sh->K, sh->D, sh->B, sh->eps};
    launch_dependent(d, "RoPE", rope_kernel, dim3(ceil_div(s->T * (sh->H + 2 * sh->K), 8)), 256, 0, 1, a);
}

static void cuda_attention(toka_device *d, const toka_step *s, int layer, toka_dev q, toka_dev o) {
    if (!d->error.code) attention(d, s, layer, dev_bf16(q), dev_bf16(o));
}

static void cuda_out_residual(toka_device *d, const toka_step *s, int layer, toka_dev o, toka_dev x) {
    if (d->error.code) return;
    const weight *w = &d->layers[layer].o;
    gemm_args g = {s->T, dev_bf16(o), w->K, w, dev_bf16(x), d->E, EPI_RESIDUAL};
    gemm(d, &g);
}

static void cuda_norm_mlp_residual(toka_device *d, const toka_step *s, int layer, toka_dev x) {
    if (d->error.code) return;
    const layer_weights *l = &d->layers[layer];
    rmsnorm(d, dev_bf16(x), NULL, l->mlp_norm, d->xn, s->T);
    gemm_args up = {s->T, d->xn, d->E, &l->gate_up, d->act, d->F, EPI_SWIGLU};
    gemm(d, &up);
    gemm_args down = {s->T, d->act, d->F, &l->down, dev_bf16(x), d->E, EPI_RESIDUAL};
    gemm(d, &down);
}

static void cuda_norm_logits_sample(toka_device *d, const toka_step *s, toka_dev x, toka_pick *picks) {
    if (!d->error.code) norm_logits_sample(d, s, dev_bf16(x), picks);
}

extern "C" const toka_backend toka_cuda = {
    .name = "cuda",
    .probe = cuda_probe,
    .kv_bytes = cuda_kv_bytes,
    .open = cuda_open,
    .close = cuda_close,
    .describe = cuda_describe,
    .status = cuda_status,
    .alloc = cuda_alloc,
    .upload = cuda_upload,
    .download = cuda_download,
    .embed = cuda_embed,
    .norm_qkv_rope_kv = cuda_norm_qkv_rope_kv,
    .attention = cuda_attention,
    .out_residual = cuda_out_residual,
    .norm_mlp_residual = cuda_norm_mlp_residual,
    .norm_logits_sample = cuda_norm_logits_sample,
    .bench = cuda_bench,
    .activation_bytes = sizeof(bf16),
    .page_tok = 64,
    .default_tokens = 8448, /* whole waves of 128-row tiles on 132 multiprocessors, for every N that is a multiple of 1,024 */
    .default_seqs = 4096,
    .merge_tok = 16,
    .span_tok = 64,
    .tile_rows = 16,
};
