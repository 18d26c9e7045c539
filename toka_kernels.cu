/* toka_kernels.cu - toka's CUDA backend: every kernel is written here.  SPDX-License-Identifier: Apache-2.0
 *
 * WHAT IT IS. The second instance of `struct toka_backend` (toka.h); the first is chapter 20 of toka.c. It needs the CUDA runtime
 * and nothing else. One binary holds code for sm_80, sm_89 and sm_90a: Hopper runs the wgmma and TMA kernels, older cards the
 * mma.sync kernels, which also run on Hopper and there serve the tests as a second opinion.
 *
 * HOW A STEP RUNS. Plans are integers made on the host (toka.c chapters 16 and 17). `begin` copies what the step needs into one
 * pinned buffer and up in one transfer beside the step before (struct stage), with the work lists of attention (chapter 8) and of
 * sampling (chapter 12); the ops only launch kernels on one stream, and `end` puts an event behind them. So the next step can be
 * begun while this one runs: what was drawn last for each slot stays on the device (toka_device.last), where `embed` of the next
 * step finds it. `finish` waits for the event of the oldest step and hands out its picks. What a step needs on the host there is
 * STEPS_AHEAD times. Decode steps of up to 1,024 rows are graphs, captured at open: then the ops launch nothing, and the last of
 * them launches the graph (chapter 15).
 *
 * NUMBERS. Weights and activations are bf16, accumulators, norms, softmax and log-probabilities float32. The residual stream x is
 * bf16 between ops. Every sum has a fixed order, so a step repeated is equal to the bit; a row's result may differ by
 * rounding with the number of rows beside it, because another tile shape sums in another order.
 *
 * MEMORY. Everything is taken by cuda_open and cuda_alloc. Layouts:
 *
 *   weights     W [N][K] row-major bf16; E, F, V zero-padded to multiples of 8. q, k and v are one [(H+2K)*D][E], on Hopper at D
 *               64, 128 with each head's rows in qkv_place's order (chapter 4); gate and up are one [2F][E], 8 rows of gate and
 *               the same 8 of up by turns, so that silu(gate)*up meets in one thread
 *   x           [T][E] bf16, E rounded up: zeros behind the model's own
 *   q, o        [T][H][D] bf16
 *   K and V     pool[layer][page][kv head][K, V][B tokens][D] bf16
 *   norms       float32
 *
 * LETTERS as in toka.h: T tokens, S sequences, L layers, H query heads, K kv heads, D head size, E width, F mlp width, V
 * vocabulary, B tokens per page. In GEMMs y[M][N] = x[M][K] W[N][K]^T has its own M, N, K.
 *
 * KERNELS, and what they reach (NVIDIA H200, 2026-11-22 to 24; reads at 4.4 TB/s; test/results/gpu-h200.md has the whole tables,
 * and at which commit; `toka bench ops` measures them anew)
 *
 *   op                 kernel                shapes                       bound by     reaches
 *   copies of pages    copy_pages_kernel     any                          copy         not measured
 *   embed              embed_kernel          any                          copy         not measured
 *   norms              rmsnorm_kernel        any E; up to 8 rows: GEMMs   copy         not measured
 *   qkv, o, gate_up,   gemm_kernel           M > 64 (some: 32), Hopper    arithmetic   1.04x cuBLAS over 61 shapes, M >= 512
 *   down, logits       gemm_few_kernel       M <= 64, Hopper              W's bytes    M = 64: 80 % (1B gate_up), 40 % (1B o)
 *                      gemm_thin_kernel      M <= 8; 16 on other cards    W's bytes    M = 1: 97 % (8B down), 60 % (1B o)
 *                      gemm_mma_kernel       any M, any card              arithmetic   about 60 % of wgmma's rate (H100)
 *   RoPE, KV append    in GEMMs (D 64, 128, Hopper), rope_kernel else     copy         not measured
 *   attention, decode  attn_small, attn_gang <= 16 queries, Hopper        K, V bytes   84 % (64 x 4,096) to 100 % (2,048 x 900)
 *   samples of prompts attn_both             D 64, 128, Hopper            K, V bytes   84, 79 % (8,192 of 88 own, 675 shared)
 *     few of them      attn_gang, attn_squad D 64 to 128, Hopper          launches     64 of 4 prompts: 10 us a layer, levels 34
 *   prefill, shared    attn_wg               D 64, 96, 128, Hopper        arithmetic   487, 579 TFLOP/s at 16k (cuDNN 437, 566)
 *   all of it          attn_mma              any D, any card              either       prefill half of attn_wg (H100)
 *   parts of it        attn_join             split K and V                copy         not measured
 *   sums over ranks    one_shot_kernel, two_shot_kernel                   links        285 GB/s of two H200's 450; 6.2 us at least
 *     of many rows     gemm_kernel with epi_scatter, sum_norm_kernel      links        255 GB/s for the half not behind products
 *   LM head, sampling  gemm_kernel with epi_sample, samp_reduce_kernel    arithmetic   1.04 to 1.13x of cuBLAS's GEMM alone
 *   filtered rows      samp_filter_kernel, samp_blocks_kernel             either       top_p 0.9: 16 us for a row, 47 us for 512
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
 *  10. Ranks: groups and transfers [kernel]
 *  11. LM head, and sampling of plain rows [kernel]
 *  12. Sampling of filtered rows, and the op [kernel]
 *  13. The card, opening and closing [host]
 *  14. Measuring the ops [host]
 *  15. The op table [host]
 */
#define TOKA_INTERNAL
#define TOKA_WITH_CUDA
#include "toka.h"

#include <cuda.h> /* types only: nothing of libcuda is linked */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <assert.h>
#include <float.h>
#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)
#define HOPPER 1 /* bodies that need sm_90a; elsewhere they compile to a trap and are never launched */
#define IN_CLUSTERS(n) __cluster_dims__(n, 1, 1)
#else
#define HOPPER 0
#define IN_CLUSTERS(n)
#endif
#ifndef NVCC_VERSION /* test/nvcc_versions.py compiles as for others */
#define NVCC_VERSION (__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__)
#endif

/* ===========================================================================
 * MARK: 1. Types and the device [host]
 * =========================================================================== */

typedef __nv_bfloat16 bf16;

/* Steps begun and not finished at most: one runs, the next waits behind it on the stream. NVIDIA H200, 1B, 2026-11-22, output
 * tok/s with 1, 2 and 3 of them: 857, 926, 920 (1 sequence), 29,849, 31,754, 31,624 (64), 134,998, 145,261, 143,932 (8,192). The
 * host's 0.5 to 0.9 ms of launching is hidden. */
enum { STEPS_AHEAD = 2, STEP_RING = STEPS_AHEAD + 1 }; /* one more: idle time counts from the end of the step before */

/* An upload buffer: pinned host buffers used in turn, and device buffers of the same layout. stage_put returns the device
 * address, valid once stage_send has run. A step uploads all that it needs, 9 KB for 64 sequences, 726 KB for 8,192, while the
 * step ahead of it runs: so it goes up for nothing (chapter 3). */
typedef struct stage {
    char *host[STEPS_AHEAD], *dev[STEPS_AHEAD];
    cudaStream_t stream; /* of its own, beside the device's; or NULL: one device buffer, filled on the device's stream */
    int turn;            /* the buffers that are being filled */
    size_t used, cap;
    cudaEvent_t sent[STEPS_AHEAD]; /* host buffer may be filled again */
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
    const toka_copy *copies;
} step_rows;

/* Events around the steps begun and not finished, in rings: `done` is what finish waits for (asleep: to spin for it gained nothing
 * at 1 and 64 sequences). Every TIME_EVERY-th step has events between its ops, too; of those that could be graphs every
 * TIME_GRAPHS-th of these, for launched kernel by kernel one takes 0.4 ms longer. */
enum { TIME_EVERY = 64, TIME_GRAPHS = 4 };
typedef struct step_clock {
    cudaEvent_t begun[STEP_RING], done[STEP_RING];
    cudaEvent_t *at; /* [cap_at] behind the ops of the step whose parts are timed */
    char *part;      /* [cap_at] of TOKA_N_OPS: of which op */
    int n_at, cap_at, timed; /* timed: that step's place in the ring; -1: there is none */
    int64_t n_begun, n_done;
    toka_times t;
} step_clock;

/* Decode steps are CUDA graphs, captured at open (chapter 15): one per size, to which smaller steps are padded with rows that are
 * nobody's, and per number of attention kernels a layer. Small sizes have one more, for squads: a node keeps its cluster size,
 * and other kernels there would lose the CTAs that do not fill a cluster. Before a launch the attention nodes become the kernels
 * of the step's work list, and the last one or two those for plain or for filtered rows. All others stay as captured: what varies
 * lies at fixed places in the stage, and those that read it are given the buffer whose turn it is (graph_reader). */
enum { GRAPH_ROWS = 1024, GRAPH_SIZES = 15, GRAPH_ATTENTIONS = 6, GRAPH_KINDS = GRAPH_ATTENTIONS + 1, GRAPH_DRAWS = 2 };
enum graph_role { GRAPH_LAUNCHES, GRAPH_KEEPS, GRAPH_RENEWS }; /* what becomes of a kernel: see launch_as */
/* Of a kernel: its arguments; addresses in the stage among them; kernels whose arguments are remembered */
enum { GRAPH_ARGUMENTS = 24, GRAPH_WORDS = 8, GRAPH_KNOWN = 16 };
typedef struct graph_reader { /* a node that reads the stage and stays the kernel that it is */
    cudaGraphNode_t node;
    cudaKernelNodeParams params;
    char **block; /* its arguments: where each is, and they themselves, 8-byte aligned */
    char **words[GRAPH_WORDS]; /* [n_words] those in the block that are addresses in the stage */
    int n_words;
} graph_reader;
typedef struct graph_kernel {
    const void *function;
    size_t bytes[GRAPH_ARGUMENTS]; /* [n] of its arguments */
    int n;
} graph_kernel;
typedef struct step_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;   /* NULL: not captured */
    cudaGraphNode_t *nodes; /* [n_nodes] that become other kernels, in the order of their launches: attention's, and ... */
    int n_nodes;            /* ... up to GRAPH_DRAWS of the last op */
    graph_reader *readers;  /* [n_readers] */
    int n_readers, turn;    /* turn: of the stage, which they read now */
    int meetings;           /* of ranks, in the last op (chapter 10) */
} step_graph;
typedef struct step_graphs {
    bool capturing;            /* the step that is begun is captured */
    enum graph_role role;      /* of the kernels that are launched now */
    step_graph *now;           /* of the step that is begun; NULL: it is launched kernel by kernel */
    int at;                    /* its next node to become another kernel */
    int next, n;               /* the next to capture; captured */
    double seconds;            /* that it took */
    size_t free_before;        /* bytes of the GPU, before the first was captured */
    int64_t n_run;             /* steps that were graphs */
    graph_kernel known[GRAPH_KNOWN];
    int n_known;
    toka_step step;            /* the step that is begun, filled up; its rows: */
    int ids[GRAPH_ROWS], pos[GRAPH_ROWS], slot[GRAPH_ROWS];
    toka_sample_row out[GRAPH_ROWS];
    step_graph all[GRAPH_SIZES * GRAPH_KINDS]; /* [size][launches, or 0: squads] */
} step_graphs;

struct attn_plan; /* chapter 8 */
struct samp_plan; /* chapter 11 */
struct group_rank; /* chapter 10 */

enum { MEET_RANKS = TOKA_GPU_MAX_TP };

struct meet_line; /* chapter 10 */
typedef struct meeting { /* what a kernel needs to meet the same kernel of other ranks (chapter 10) */
    int me, n;
    unsigned *count;              /* own, [MEET_CTAS] */
    volatile int *over;           /* host memory: the group is broken */
    volatile unsigned *trace;     /* host memory: number of the meeting that CTA 0 came to, and that it left */
    meet_line *lines[MEET_RANKS]; /* of each rank [MEET_CTAS][MEET_RANKS] */
    char *inbox[MEET_RANKS];      /* of each rank: group_inbox_bytes */
} meeting;

struct toka_device {
    toka_device_options options;
    const toka_shape *shape;
    const toka_weights *weights;
    toka_err error; /* the first failure; code 0: none */
    char about[320];
    int E, F, V;             /* of the shape, rounded up to multiples of 8: what lies behind is 0 */
    int ordinal;             /* of the GPU */
    int arch, n_sms;         /* 80, 89, 90 ...; multiprocessors */
    int smem_most;           /* bytes of shared memory that a CTA can have */
    int n_quads;             /* Hopper: clusters of four large CTAs that run at once */
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
    float *squares;          /* scratch: [FOLD_ROWS][E/16] */
    bool folded;             /* the op before has left what the norm of the next one needs (chapter 4) */
    stage up;
    step_rows rows;
    int *last;               /* [n_slots] the id drawn last for each slot */
    step_clock clock;
    step_graphs graphs;
    const toka_step *step;   /* the one that is begun, as it runs: filled up to a graph's size, if it is one */
    int newest, oldest;      /* places in the rings of STEP_RING: of the step begun last, of the one finished last */
    attn_plan *attn;
    samp_plan *samp;
    size_t free_at_open;     /* bytes of the GPU that were free then */
    int64_t weight_bytes;    /* that the model takes */
    void **blocks;           /* what cudaMalloc gave */
    int n_blocks;
    int fault_in, stall_in;  /* debugging: this many steps from now a kernel fails, or never ends; 0: none */
    int capture_fails;       /* debugging: this many captures from now; 0: none */
    const void *prepared[64]; /* kernels, by launch_prepare */
    int n_prepared;
    toka_group *group;       /* NULL: alone */
    group_rank *rank;        /* this one's place in it */
    char where[72];          /* "rank 1 (stage 0, tensor rank 1): ", or nothing */
    meeting meet;            /* with tensor ranks */
    int meet_ctas;
    unsigned op_at;          /* meetings enqueued when an op was last noted in rank->ops */
    bf16 *scattered;         /* x without a sum, whose parts lie in boxes (chapter 10), or NULL */
    cudaStream_t copies;     /* with stages: what goes to others by copy engine */
    cudaEvent_t drawn;       /* tp rank 0 of the last stage: the table of last tokens can be sent */
};

/* Latches the first failure; later ones are its consequences. */
static void latch(toka_device *d, cudaError_t code, const char *what) {
    if (code == cudaSuccess || d->error.code) return;
    d->error.code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(d->error.msg, sizeof d->error.msg, "GPU: %s%s: %s", d->where, what, cudaGetErrorString(code));
}
#define LAUNCHED(d, what) latch(d, cudaGetLastError(), what) /* behind every <<<>>> */

/* Behind an op, or a part of one, of a step whose parts are timed (chapter 13). */
static void clock_part(toka_device *d, int part) {
    step_clock *c = &d->clock;
    if (c->timed != d->newest || d->error.code) return;
    assert(c->n_at < c->cap_at);
    c->part[c->n_at] = (char)part;
    latch(d, cudaEventRecord(c->at[c->n_at++], d->stream), "step");
}

/* Before a device's first launch of a kernel: opts in to all the shared memory a CTA can have. Beyond 48 KB this is required, and
 * all who use the GPU in this process share the setting, so all set the same maximum. On Hopper it also asks for the largest
 * carveout: an SM must drain to change it, and then no kernel could start beside another. */
static void launch_prepare(toka_device *d, const char *what, const void *kernel) {
    int i = 0, cap = sizeof d->prepared / sizeof *d->prepared;
    while (i < d->n_prepared && d->prepared[i] != kernel) i++;
    if (i < d->n_prepared) return;
    cudaFuncAttributes own = {};
    latch(d, cudaFuncGetAttributes(&own, kernel), what);
    const int rest = d->smem_most - (int)own.sharedSizeBytes;
    latch(d, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, rest), what);
    const cudaFuncAttribute share = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (d->hopper) latch(d, cudaFuncSetAttribute(kernel, share, cudaSharedmemCarveoutMaxShared), what);
    if (i < cap) d->prepared[d->n_prepared++] = kernel; /* else set each time */
}

/* The step that is begun is run by a graph, launched at its end: until then its ops launch nothing. */
static bool graph_runs(const toka_device *d) { return d->graphs.now && !d->graphs.capturing; }

/* Behind the last op that the step's graph has, if there is one: then it runs. */
static void graph_launch(toka_device *d) {
    if (graph_runs(d) && !d->error.code) latch(d, cudaGraphLaunch(d->graphs.now->exec, d->stream), "step");
}

/* A kernel in a graph that other steps need another way: remembered when it is captured, made another one with other arguments
 * before it is replayed. */
static void graph_keep(toka_device *d) {
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *last;
    const cudaGraphEdgeData *edges;
    size_t n = 0;
#if CUDART_VERSION >= 13000
    latch(d, cudaStreamGetCaptureInfo(d->stream, &status, NULL, NULL, &last, &edges, &n), "capture");
#else
    latch(d, cudaStreamGetCaptureInfo_v3(d->stream, &status, NULL, NULL, &last, &edges, &n), "capture");
#endif
    assert(d->error.code || n == 1);
    if (!d->error.code) d->graphs.now->nodes[d->graphs.now->n_nodes++] = *last;
}
static void graph_renew(toka_device *d, const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    step_graph *g = d->graphs.now;
    cudaKernelNodeParams p = {};
    p.func = (void *)kernel, p.gridDim = config->gridDim, p.blockDim = config->blockDim;
    p.sharedMemBytes = (unsigned)config->dynamicSmemBytes, p.kernelParams = arguments;
    assert(d->graphs.at < g->n_nodes);
    latch(d, cudaGraphExecKernelNodeSetParams(g->exec, g->nodes[d->graphs.at++], &p), "step");
}
/* Launches a kernel, keeps its node too, or makes the graph's next node it: as the role of the moment says. */
static void launch_as(toka_device *d, const char *what, const cudaLaunchConfig_t *config, const void *kernel, void **arguments) {
    if (d->graphs.role == GRAPH_RENEWS) graph_renew(d, config, kernel, arguments);
    else latch(d, cudaLaunchKernelExC(config, kernel, arguments), what);
    if (d->graphs.role == GRAPH_KEEPS && !d->error.code) graph_keep(d);
}

template <class T> struct as_declared { typedef T type; }; /* keeps a parameter out of template deduction */

/* Launches a kernel in clusters of `cluster` CTAs, with `smem` bytes of dynamic shared memory. On Hopper it may start while the
 * kernel ahead still runs: a thread that reads what an earlier kernel writes, or writes what one reads, first passes grid_wait().
 * Every kernel must call it, even one that needs nothing: else "the kernel ahead has ended" would say nothing about those before.
 * Only what no kernel of the stream writes, weights above all, may be read earlier.
 *
 * Clusters are placed by load balancing. By the default policy, where CTAs of the next kernel wait beside this one's, the 128 of
 * each soon crowd onto 64 to 70 SMs, two on one, the next kernel's onto the others; now onto 116 to 124 (H200, 2026-11-24, 40
 * launches of gemm_few). Shares of the time to read W: 2048 x 8192, 64 rows 54 -> 67 %, 2048 x 2048, 16 and 32 rows 53 -> 71, 52
 * -> 64, 4096 x 4096 in four parts, 64 rows 50 -> 72. The spread policy changes nothing, nor does this one for gemm_wgmma, whose
 * CTAs have an SM each. */
template <class... P>
static void launch_dependent(toka_device *d, const char *what, void (*kernel)(P...), dim3 grid, int threads, size_t smem,
                             int cluster, typename as_declared<P>::type... args) {
    cudaLaunchAttribute attributes[3] = {};
    cudaLaunchConfig_t config = {};
    void *pointers[] = {(void *)&args...};
    launch_prepare(d, what, (const void *)kernel);
    config.gridDim = grid, config.blockDim = dim3((unsigned)threads);
    config.dynamicSmemBytes = smem, config.stream = d->stream, config.attrs = attributes;
    if (d->hopper) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {(unsigned)cluster, 1, 1};
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
        attributes[config.numAttrs++].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
    }
    launch_as(d, what, &config, (const void *)kernel, pointers);
}

/* For tests with few GPUs: all ranks in turn on the first so many; 0: each has its own. */
static int gpus_shared(void) {
    const char *value = getenv("TOKA_DEBUG_SHARE_GPU");
    return value ? max(0, atoi(value)) : 0;
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
__device__ static inline float lg2(float x) { /* base-2 logarithm, absolute error 2^-22 near 1 */
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
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
/* The transpose of an 8x8 matrix of 2-byte elements, of which lane l holds (l/4, 2(l%4)+{0,1}) before and after. */
__device__ static inline uint32_t transpose_8x8(uint32_t x) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
}
/* 16 bytes to shared memory; bytes 0 .. n-1 are read, the rest becomes 0 (n: 0 to 16). */
__device__ static inline void cp_async_16(uint32_t to, const void *from, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}
/* The same for what is read once, with policy l2_once(): it leaves the L2 cache first. */
__device__ static inline void cp_async_16_once(uint32_t to, const void *from, int n, uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(n), "l"(policy) : "memory");
}
__device__ static inline uint64_t l2_once() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* Of what is small and read last: the other weights of a step have driven it out of the cache. A step of one, 16, 128 sequences
 * with the biases of QKV asked for ahead, H200, 2026-11-25, ms: Qwen2.5-0.5B 0.531 -> 0.523, 0.610 -> 0.605, 0.879 -> 0.876;
 * Qwen2.5-1.5B 1.221 -> 1.204, 1.392 -> 1.383, 1.896 -> 1.868. The weights of QK-norm in GEMMs of 128 rows: nothing gained. */
__device__ static inline void l2_prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }
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

/* A barrier of some warps of a CTA. */
__device__ static inline void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
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
/* Arrives at the barrier of the same offset in CTA `cta` of the cluster: this CTA's wgmma has done reading. Publishes no writes;
 * .release.cluster would, by a fence that costs as much as a block of products. */
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

/* ---- TMA ---- */

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
__device__ static inline void tma_load_5d(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1, int c2, int c3,
                                          int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
__device__ static inline void tma_load_5d_once(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1, int c2, int c3,
                                               int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(0x12F0000000000000ull) : "memory");
}
/* Into the same offset of every CTA in `mask`, each CTA's barrier at the same offset is told. */
__device__ static inline void tma_load_2d_multicast(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0, int c1,
                                                    uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"(mask) : "memory");
}
/* n bytes, a multiple of 16, to the L2 cache. */
__device__ static inline void bulk_prefetch(const void *from, int n) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n) : "memory");
}
__device__ static inline void tma_store_2d(const CUtensorMap *m, uint32_t from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(m), "r"(from), "r"(c0), "r"(c1) : "memory");
}
__device__ static inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int N> __device__ static inline void tma_store_wait_read() { /* shared memory may be written again */
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
__device__ static inline void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); } /* it is written */
/* Makes ordinary stores to shared memory visible to wgmma and TMA (async proxy); each writing thread, before the barrier. */
__device__ static inline void fence_async_smem() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

/* ---- Warpgroups and clusters ---- */

template <int N> __device__ static inline void regs_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ static inline void regs_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
__device__ static inline void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* True in one lane; all 32 must come. The compiler knows that it is one: instructions that want uniform registers need no loop. */
__device__ static inline bool elect_one() {
    uint32_t one;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
    return one != 0;
}
__device__ static inline int cluster_rank() {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ static inline float4 smem_load_floats(uint32_t at) { /* 16 bytes */
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
    return v;
}
__device__ static inline float smem_load_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ static inline void smem_store_float(uint32_t at, float v) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}
__device__ static inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ static inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ static inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

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
template <int N, int TRANS_B>
__device__ static inline void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, int scale_d) {
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
/* Matrix descriptor of b for TRANS_B: rows of 64 columns in 128 bytes with 128-byte swizzle, base aligned to 1,024 bytes; 8 rows
 * every 1,024 bytes; panels of 64 columns lie `panel_bytes` apart. The next 16 rows are 2,048 bytes on: + 128. */
__device__ static inline uint64_t wgmma_desc_trans(uint32_t at, int panel_bytes) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
/* All threads of the cluster meet; orders no memory (barrier.cluster.arrive.release costs a fence of the whole GPU). */
__device__ static inline void cluster_meet_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ static inline void cluster_meet_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ static inline void cluster_meet() { cluster_meet_arrive(), cluster_meet_wait(); }
/* The address of `at` in CTA `cta` of the cluster. */
__device__ static inline uint32_t peer_at(uint32_t at, int cta) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(cta));
    return r;
}
/* 16 bytes from registers to a peer_at address; the barrier `bar` of the same CTA, a peer_at address too, is told. */
__device__ static inline void send_to_peer(uint32_t to, const float v[4], uint32_t bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
                 ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
}
/* The same with 8 bytes. */
__device__ static inline void send_pair_to_peer(uint32_t to, float x, float y, uint32_t bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
                 ::"r"(to), "f"(x), "f"(y), "r"(bar) : "memory");
}
__device__ static inline void smem_store_16(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ static inline void smem_store_floats(uint32_t at, const float v[4]) { /* accumulators go out without a copy */
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
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
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: %s%s: %.2f GB asked for, %.2f of %.2f GB are free", d->where, what,
                 bytes / 1e9, free_bytes / 1e9, total / 1e9);
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

/* beside: transfers go on a stream of its own, and the device's waits for them. So a step is sent while the one before it, which
 * reads the other buffer, still runs; the one before that has been finished. */
static void stage_open(toka_device *d, stage *s, size_t cap, bool beside) {
    *s = stage{.cap = cap};
    if (beside && !d->error.code) latch(d, cudaStreamCreateWithFlags(&s->stream, cudaStreamNonBlocking), "step buffer");
    for (int i = 0; i < STEPS_AHEAD && !d->error.code; i++) {
        s->dev[i] = i && !beside ? s->dev[0] : (char *)dev_alloc(d, cap, "step buffer");
        latch(d, cudaHostAlloc((void **)&s->host[i], cap, cudaHostAllocDefault), "pinned step buffer");
        latch(d, cudaEventCreateWithFlags(&s->sent[i], cudaEventDisableTiming | cudaEventBlockingSync), "pinned step buffer");
    }
}
static void stage_close(stage *s) { /* what lies on the host */
    if (s->stream) cudaStreamDestroy(s->stream);
    for (int i = 0; i < STEPS_AHEAD; i++) {
        cudaFreeHost(s->host[i]);
        if (s->sent[i]) cudaEventDestroy(s->sent[i]);
    }
    *s = stage{};
}
static void stage_begin(toka_device *d, stage *s) { /* waits until the last transfer from the next host buffer has left it */
    s->turn = (s->turn + 1) % STEPS_AHEAD;
    latch(d, cudaEventSynchronize(s->sent[s->turn]), "step upload");
    s->used = 0;
}

/* Room for `bytes`, 16-byte aligned: *host to fill, and the address on the device. The caller has sized the stage so that it
 * fits. */
static void *stage_room(stage *s, size_t bytes, void **host) {
    size_t at = (s->used + 15) & ~(size_t)15;
    assert(at + bytes <= s->cap);
    s->used = at + bytes;
    *host = s->host[s->turn] + at;
    return s->dev[s->turn] + at;
}
static void *stage_put(stage *s, const void *from, size_t bytes) {
    void *host, *dev = stage_room(s, bytes, &host);
    if (bytes) memcpy(host, from, bytes);
    return dev;
}

/* In one transfer. What a step needs goes up beside the step before and costs nothing: in turns with the same steps without any
 * transfer, one sequence of the 1B model took 0.725 and 0.726 ms a step, 8 took 0.827 and 0.826, 64 took 1.281 and 1.280 (H200,
 * 2026-11-25). On the device's own stream, by a kernel ahead of the graph, it was 0.729 and 0.830. So sending less, with state kept
 * on the device slot by slot, has nothing to gain; sampling parameters kept so made small steps 2 us longer, by one more dependent
 * read. Kernels read the stage ahead of grid_wait(), for it is there before the first one of the step starts: the wait for the
 * transfer stands between it and what ran before. */
static void stage_send(toka_device *d, stage *s) {
    const cudaStream_t by = s->stream ? s->stream : d->stream;
    latch(d, cudaMemcpyAsync(s->dev[s->turn], s->host[s->turn], s->used, cudaMemcpyHostToDevice, by), "step upload");
    latch(d, cudaEventRecord(s->sent[s->turn], by), "step upload");
    if (s->stream) latch(d, cudaStreamWaitEvent(d->stream, s->sent[s->turn], 0), "step upload");
}

/* ---- Weights: mapped file -> pinned buffers -> device ----
 *
 * A piece is a run of elements of one tensor. LOAD_THREADS workers take pieces in turn; each copies from the mapped file (where
 * the page faults happen, so that several are under way) into one of its two pinned buffers and queues the transfer on its own
 * stream, with the kernel that converts and places. There is no second copy on the host beyond those buffers. Bound by the slower
 * of page cache and bus. */

enum { LOAD_THREADS = 8, LOAD_BYTES = 2 << 20 };

typedef struct load_job { /* one tensor, or slice of one, and where it goes */
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
__global__ static void __launch_bounds__(256) load_place(const void *raw, size_t at, size_t n, int cols, toka_dtype type,
                                                         load_job j) {
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

/* Takes the next piece, of a slice of columns whole rows; false: none is left, or something failed. */
static bool load_next(loader *l, load_job *job, size_t *at, size_t *n) {
    pthread_mutex_lock(&l->lock);
    bool more = l->job < l->n_jobs && !l->error.code;
    if (more) {
        *job = l->jobs[l->job], *at = l->at;
        const toka_tensor *t = job->from;
        size_t size = t->dtype == TOKA_F32 ? 4 : 2, all = (size_t)t->rows * t->cols, most = LOAD_BYTES / size;
        const bool slice = t->rows > 1 && t->stride != t->cols;
        assert(!slice || most >= (size_t)t->cols);
        if (slice) most -= most % t->cols;
        *n = all - *at < most ? all - *at : most;
        l->at += *n, l->done += *n * size;
        if (l->at == all) l->job++, l->at = 0;
        if (l->d->options.progress) l->d->options.progress(l->d->options.user, "loading weights", (double)l->done / l->bytes);
    }
    pthread_mutex_unlock(&l->lock);
    return more;
}

/* Elements at .. at+n-1 of a tensor, from the mapped file. */
static void load_read(const toka_tensor *t, size_t at, size_t n, char *to) {
    size_t size = t->dtype == TOKA_F32 ? 4 : 2, cols = (size_t)t->cols;
    const char *data = (const char *)t->data;
    if (t->rows == 1 || t->stride == t->cols) memcpy(to, data + at * size, n * size);
    else
        for (size_t i = 0; i < n; i += cols) memcpy(to + i * size, data + (at + i) / cols * t->stride * size, cols * size);
}

static cudaError_t load_piece(const load_job *j, size_t at, size_t n, char *host, char *dev, cudaStream_t stream) {
    size_t size = j->from->dtype == TOKA_F32 ? 4 : 2;
    load_read(j->from, at, n, host);
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
    const int n_threads = l->d->options.n_devices > 4 ? LOAD_THREADS / 2 : LOAD_THREADS; /* several devices load side by side */
    pthread_mutex_init(&l->lock, NULL);
    while (n < n_threads && !pthread_create(&threads[n], NULL, load_thread, l)) n++;
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
    w.p = (bf16 *)dev_alloc(d, bytes, "weights"), d->weight_bytes += (int64_t)bytes;
    if (w.p && (w.N > rows || w.K > cols)) latch(d, cudaMemset(w.p, 0, bytes), "weights");
    return w;
}
/* n floats rounded up to 8, zeros until something is loaded. */
static float *vector_room(toka_device *d, int n) {
    float *p = (float *)dev_alloc(d, (size_t)up_8(n) * sizeof(float), "weights");
    d->weight_bytes += (int64_t)up_8(n) * (int64_t)sizeof(float);
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
        to->o = weight_plain(d, &l, &from->o, d->options.tp_rank ? NULL : &from->o_bias);
        to->down = weight_plain(d, &l, &from->down, NULL);
        to->window = from->window;
    }
    latch(d, cudaStreamSynchronize(cudaStreamLegacy), "weights"); /* the zeros are there before what goes on top of them */
    if (d->error.code) free(l.jobs);
    else load_run(&l);
}

/* ===========================================================================
 * MARK: 4. Embedding, norms, RoPE [kernel]
 * =========================================================================== */

/* ---- Copies of KV pages ----
 * pool[layer][to] = pool[layer][from], 16 bytes a thread and turn. Grid (copies, layers), block 256. Moves 2 * page bytes: copy
 * speed. */
__global__ static void __launch_bounds__(256) copy_pages_kernel(const toka_copy *copies, bf16 *kv, size_t layer, int page) {
    grid_launch_dependents();
    grid_wait();
    toka_copy c = copies[blockIdx.x];
    bf16 *pool = kv + blockIdx.y * layer;
    const uint4 *from = (const uint4 *)(pool + (size_t)c.from * page);
    uint4 *to = (uint4 *)(pool + (size_t)c.to * page);
    for (int i = threadIdx.x; i < page / 8; i += 256) to[i] = from[i];
}

/* ---- RMSNorm ----
 * y[t][i] = x[r][i] * w[i] / sqrt(mean(x[r]^2) + eps), r = rows ? rows[t] : t. x, y bf16 [.][E], w float32, one rounding at the
 * end. Grid T, block 128. A thread keeps its first NORM_HELD runs of x and w in registers, w from before grid_wait(); what is
 * beyond is read twice. Reads 2*T*E, writes 2*T*E bytes: copy speed. Sums: each thread over its own elements, then a tree over
 * lanes and warps: one order for every T. */
enum { NORM_HELD = 4 }; /* runs of 8 columns a thread holds: E up to 4,096 */
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
__device__ static inline uint4 pack_8(const float f[8]) {
    return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]), pack_bf16(f[6], f[7]));
}
__device__ static inline float norm_square(uint4 v, float sum) {
    float f[8];
    unpack_8(v, f);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += f[j] * f[j];
    return sum;
}
__device__ static inline uint4 norm_scaled(uint4 v, float scale, float4 a, float4 b) {
    float f[8];
    unpack_8(v, f);
    return make_uint4(pack_bf16(f[0] * scale * a.x, f[1] * scale * a.y), pack_bf16(f[2] * scale * a.z, f[3] * scale * a.w),
                      pack_bf16(f[4] * scale * b.x, f[5] * scale * b.y), pack_bf16(f[6] * scale * b.z, f[7] * scale * b.w));
}
__global__ static void __launch_bounds__(128) rmsnorm_kernel(const bf16 *x, const int *rows, const float *w, bf16 *y, int E,
                                                            float per_E, float eps) { /* E rounded up; 1 / the model's own */
    const int n = E / 8, t = (int)threadIdx.x;
    const float4 *g = (const float4 *)w;
    float4 held[NORM_HELD][2] = {};
    uint4 v[NORM_HELD] = {};
    float sum = 0;
    grid_launch_dependents();
#pragma unroll
    for (int k = 0; k < NORM_HELD; k++)
        if (t + 128 * k < n) held[k][0] = g[2 * (t + 128 * k)], held[k][1] = g[2 * (t + 128 * k) + 1];
    grid_wait();
    const uint4 *from = (const uint4 *)(x + (size_t)(rows ? rows[blockIdx.x] : blockIdx.x) * E);
    uint4 *to = (uint4 *)(y + (size_t)blockIdx.x * E);
#pragma unroll
    for (int k = 0; k < NORM_HELD; k++)
        if (t + 128 * k < n) v[k] = from[t + 128 * k];
#pragma unroll
    for (int k = 0; k < NORM_HELD; k++) sum = norm_square(v[k], sum);
    for (int i = t + 128 * NORM_HELD; i < n; i += 128) sum = norm_square(from[i], sum);
    float scale = rsqrtf(block_sum_128(sum) * per_E + eps);
#pragma unroll
    for (int k = 0; k < NORM_HELD; k++)
        if (t + 128 * k < n) to[t + 128 * k] = norm_scaled(v[k], scale, held[k][0], held[k][1]);
    for (int i = t + 128 * NORM_HELD; i < n; i += 128) to[i] = norm_scaled(from[i], scale, g[2 * i], g[2 * i + 1]);
}
static void rmsnorm(toka_device *d, const bf16 *x, const int *rows, const float *w, bf16 *y, int n_rows) {
    const float per_E = 1.0f / d->shape->E;
    launch_dependent(d, "RMSNorm", rmsnorm_kernel, dim3(n_rows), 128, 0, 1, x, rows, w, y, d->E, per_E, d->shape->eps);
}

/* ---- RMSNorm folded into GEMMs, for up to 8 rows ----
 * norm(x) W^T = (x w) W^T / rms(x): the kernel that makes x also stores x w and the sums of squares of every 16 columns; the GEMM
 * that reads it scales its output by 1 / rms. One kernel less in the chain is worth more than it costs that every CTA adds up the
 * squares again. */
enum { FOLD_ROWS = 8, FOLD_N = 16, FOLD_HELD = 8 /* in registers: E up to 4,096 */ };
typedef struct norm_fold {
    const float *w;     /* [E] of the norm that follows; NULL: none */
    bf16 *xw;           /* [M][E] */
    float *squares;     /* [M][n] */
    const float *given; /* [M][n], those of x; NULL: x is no norm's */
    int n;
    float per_E, eps;
} norm_fold;
static norm_fold fold_for(const toka_device *d, const float *w, bool given) {
    if (!w && !given) return norm_fold{};
    return norm_fold{w, d->xn, d->squares, given ? d->squares : NULL, ceil_div(d->E, FOLD_N), 1.0f / d->shape->E, d->shape->eps};
}
/* The op before has done its part of it. */
static bool fold_take(toka_device *d) {
    const bool folded = d->folded;
    d->folded = false;
    return folded;
}

/* ---- embed ----
 * x[t][:] = E[ids[t] - v0][:], bf16, zeros for an id that is not among the table's V; an id -1 - q is the one drawn last for slot
 * q. fold.w: and what the norm that follows needs. Grid T, block 128, 32 bytes a thread and turn. Moves 2*T*E*2 bytes: copy
 * speed. */
__global__ static void __launch_bounds__(128) embed_kernel(const int *ids, const int *last, const bf16 *table, int v0, int V,
                                                           bf16 *x, int E, const norm_fold fold) {
    grid_launch_dependents();
    grid_wait();
    int id = ids[blockIdx.x], row = (id < 0 ? last[-1 - id] : id) - v0;
    const uint4 *from = (const uint4 *)(table + (size_t)row * E);
    const float4 *w = (const float4 *)fold.w;
    const size_t to = (size_t)blockIdx.x * (E / 8);
    for (int k = threadIdx.x; k * FOLD_N < E; k += blockDim.x) {
        float sum = 0;
#pragma unroll
        for (int i = 2 * k; i < 2 * k + 2; i++) {
            if (i == E / 8) break;
            const uint4 v = row >= 0 && row < V ? from[i] : make_uint4(0, 0, 0, 0);
            ((uint4 *)x)[to + i] = v;
            sum = norm_square(v, sum);
            if (w) ((uint4 *)fold.xw)[to + i] = norm_scaled(v, 1, w[2 * i], w[2 * i + 1]);
        }
        if (w) fold.squares[blockIdx.x * fold.n + k] = sum;
    }
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
    /* on the stream of its reader: the default stream may still be at a copy from pageable memory when cudaMemcpy returns */
    latch(d, cudaMemcpyAsync(freq, d->shape->rope_freq, (size_t)half * sizeof *freq, cudaMemcpyHostToDevice, d->stream), "RoPE");
    rope_table_kernel<<<1024, 256, 0, d->stream>>>(d->rope, freq, d->shape->rope_scale, half, n);
    LAUNCHED(d, "RoPE table");
}

/* ---- QK-norm, RoPE, K and V to their pages ----
 * qkv[t] = {q [H][D], k [K][D], v [K][D]} bf16, biases added. Each head of q and k: RMSNorm over D where the model has it, then
 * the pair (i, i + D/2) turned by the angle of pos[t]. q goes to q[t][h], k and v to the page of slot[t]. All in float32. One warp
 * a head: lane l has the pairs 2l, 2l+1, 2l+64 ..., so a warp reads 128 bytes of each half at once. Positions, slots, the table and
 * the norms' weights are no kernel's work of this step and are read before the one ahead has ended (the weights, too, H200,
 * 2026-11-25: a step of 16 sequences of Qwen3-0.6B 1.057 -> 1.041 ms, of one 0.730 -> 0.727; if it did nothing 1.039, 0.714). Grid
 * T*(H+2K)/8, block 256. Moves 4*T*(H+2K)*D bytes: copy speed. D/2 is even, D at most 256. */
typedef struct rope_args {
    const bf16 *qkv;
    bf16 *q, *kv; /* kv: the layer's pool */
    const int *pos, *slot;
    const float2 *table;
    const float *q_norm, *k_norm;
    int T, H, K, D, B;
    float eps;
    bool by_turns; /* a head's elements lie as qkv_place says */
} rope_args;

/* Where element i of a head stands when 8 of its first half and the 8 that RoPE pairs them with take turns: in the rows of W that
 * the fused GEMM reads (chapter 6), so that a pair meets in one thread and any 16 columns can be turned by themselves. */
__host__ __device__ static inline int qkv_place(int i, int half) {
    return i < half ? i / 8 * 16 + i % 8 : (i - half) / 8 * 16 + 8 + (i - half) % 8;
}

__device__ static inline void store_pair(bf16 *to, float a, float b) { *(uint32_t *)to = pack_bf16(a, b); }

__global__ static void __launch_bounds__(256) rope_kernel(rope_args a) {
    int heads = a.H + 2 * a.K, w = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    int t = w / heads, h = w % heads, half = a.D / 2;
    float4 turn[2] = {make_float4(1, 0, 1, 0), make_float4(1, 0, 1, 0)}; /* cosines and sines */
    const float *norm = h < a.H ? a.q_norm : h < a.H + a.K ? a.k_norm : NULL;
    float2 norm_lo[2] = {}, norm_hi[2] = {};
    grid_launch_dependents();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        if (norm && i < half) norm_lo[k] = *(const float2 *)(norm + i), norm_hi[k] = *(const float2 *)(norm + half + i);
    }
    if (t < a.T && h < a.H + a.K) {
        const float2 *table = a.table + (size_t)a.pos[t] * half;
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (2 * lane + 64 * k < half) turn[k] = *(const float4 *)(table + 2 * lane + 64 * k);
    }
    int slot = t < a.T ? a.slot[t] : 0;
    grid_wait();
    if (t >= a.T) return;
    const bf16 *from = a.qkv + (size_t)w * a.D;
    float lo[4], hi[4], sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        int i0 = a.by_turns ? qkv_place(i, half) : i, i1 = i0 + (a.by_turns ? 8 : half);
        uint32_t u = i < half ? *(const uint32_t *)(from + i0) : 0, v = i < half ? *(const uint32_t *)(from + i1) : 0;
        lo[2 * k] = bf16_low(u), lo[2 * k + 1] = bf16_high(u), hi[2 * k] = bf16_low(v), hi[2 * k + 1] = bf16_high(v);
    }
    if (norm) {
#pragma unroll
        for (int k = 0; k < 4; k++) sum += lo[k] * lo[k] + hi[k] * hi[k];
        for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
        float scale = rsqrtf(sum / a.D + a.eps);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            lo[2 * k] *= scale * norm_lo[k].x, lo[2 * k + 1] *= scale * norm_lo[k].y;
            hi[2 * k] *= scale * norm_hi[k].x, hi[2 * k + 1] *= scale * norm_hi[k].y;
        }
    }
    int kv_head = h < a.H + a.K ? h - a.H : h - a.H - a.K;
    bf16 *to = h < a.H ? a.q + ((size_t)t * a.H + h) * a.D
                       : a.kv + ((((size_t)(slot / a.B) * a.K + kv_head) * 2 + (h >= a.H + a.K)) * a.B + slot % a.B) * a.D;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        if (i >= half) break;
        float4 cs = turn[k];
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
    EPI_SWIGLU,   /* W is gate and up by turns of 8 rows: y[M][N/2] = silu(gate) * up in float32, rounded once */
    EPI_LOGITS,   /* y = acc, float32 [M][N]; y points to floats */
    EPI_QKV       /* W is q, k and v by turns (qkv_place): RoPE, then q and the pages of K and V; gemm_thin, gemm_few */
};

/* TMA fetches x in boxes of up to 128 rows, and is slower the more of them lie outside the tensor map: down of the 1B model with
 * 160 rows 35 us, with 256 rows 19 (H200, 2026-11-23). So maps extend to the end of the last box: rows behind the last of x are
 * read, whatever they hold, and what comes of them is dropped. */
enum { GEMM_ROOM = 127 }; /* rows */

typedef struct gemm_args {
    int M;
    const bf16 *x; /* [M][K], row stride ldx, 16-byte aligned; with GEMM_ROOM rows behind it */
    int ldx;
    const weight *w;
    bf16 *y;       /* row stride ldy */
    int ldy;
    enum epilogue epi;
    const float *norm;            /* RESIDUAL of gemm_thin, M <= 8, or NULL: the weights of the norm that y goes through next. What
                                     it needs is left in d->xn and d->squares ... */
    bool folded;                  /* ... where the next GEMM of up to 8 rows finds it: x is d->xn */
    const struct qkv_params *qkv; /* of EPI_QKV */
} gemm_args;

/* What a lane adds up for 1 / rms of row m: asked for ahead of the products ... */
typedef struct fold_part {
    float sum[FOLD_HELD]; /* in the order of their columns */
} fold_part;
__device__ static inline fold_part fold_begin(const norm_fold &f, int m, int lane) {
    fold_part p = {};
#pragma unroll
    for (int k = 0; k < FOLD_HELD; k++)
        if (lane + 32 * k < f.n) p.sum[k] = f.given[m * f.n + lane + 32 * k];
    return p;
}
/* ... and needed behind them. To the whole warp, in one order. */
__device__ static inline float fold_end(const norm_fold &f, int m, int lane, const fold_part &p) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < FOLD_HELD; k++) sum += p.sum[k];
    for (int i = lane + 32 * FOLD_HELD; i < f.n; i += 32) sum += f.given[m * f.n + i];
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
    return rsqrtf(sum * f.per_E + f.eps);
}
static norm_fold fold_of(const toka_device *d, const gemm_args *a) {
    assert((!a->norm && !a->folded) || (a->M <= FOLD_ROWS && (!a->norm || a->w->N == d->E)));
    return fold_for(d, a->norm, a->folded);
}

/* ---- Epilogues, shared by all GEMMs ---- */

typedef struct gemm_call { /* gemm_args as a kernel takes them */
    const bf16 *x, *w;
    const float *bias; /* [N] or NULL */
    bf16 *y;
    int M, N, K, ldx, ldy;
    enum epilogue epi;
    norm_fold fold;
} gemm_call;

/* silu(gate) up */
__device__ static inline float swiglu(float gate, float up) { return __fdividef(gate * up, 1 + ex2(-1.4426950408889634f * gate)); }

__device__ static inline uint32_t gemm_old_pair(const gemm_call &c, int m, int n) { /* the pair that RESIDUAL adds to */
    return c.epi == EPI_RESIDUAL ? *(uint32_t *)(c.y + (size_t)m * c.ldy + n) : 0;
}
/* STORE, RESIDUAL and LOGITS: columns n and n+1 (n even) of row m. */
__device__ static inline void gemm_put_pair(const gemm_call &c, int m, int n, float a0, float a1, uint32_t old) {
    if (c.epi == EPI_LOGITS) {
        *(float2 *)((float *)c.y + (size_t)m * c.ldy + n) = float2{a0, a1};
        return;
    }
    if (c.bias) a0 += c.bias[n], a1 += c.bias[n + 1];
    if (c.epi == EPI_RESIDUAL) a0 += bf16_low(old), a1 += bf16_high(old);
    *(uint32_t *)(c.y + (size_t)m * c.ldy + n) = pack_bf16(a0, a1);
}
/* SWIGLU: accumulator columns n, n+1 are gates and n+8, n+9 their ups; n % 16 < 8, even. */
__device__ static inline void gemm_put_gated(const gemm_call &c, int m, int n, float g0, float g1, float u0, float u1) {
    if (c.bias) g0 += c.bias[n], g1 += c.bias[n + 1], u0 += c.bias[n + 8], u1 += c.bias[n + 9];
    *(uint32_t *)(c.y + (size_t)m * c.ldy + (n / 16 * 8 + n % 8)) = pack_bf16(swiglu(g0, u0), swiglu(g1, u1));
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
 * One CTA makes a tile of BM x BN, its warps WM x WN each. K goes by in slices of 32 through a ring of four stages that cp.async
 * fills; rows and columns outside the matrices are filled with zeros. A stage is BM rows of x, then BN rows of W, 64 bytes each,
 * and the 16-byte chunk c of row r lies at c ^ (r/2 % 4): eight rows that ldmatrix fetches together fall into eight different
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
            if (c.epi != EPI_SWIGLU) gemm_put_pair(c, m, n, v[0], v[1], gemm_old_pair(c, m, n));
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
 *
 * y[M][N] = x[M][K] W[N][K]^T for M from 65 rows up (33 for some W, 17 for the LM head: gemm_way), and what is done to the
 * accumulators before they leave (epi_*).
 *
 * One CTA of 384 threads works on tiles of 128 rows by BN columns, K in blocks of 64 (one 128-byte row of the swizzle).
 * Warpgroup 0 gives its registers away; one thread of its warp 0 fetches W by TMA, one of warp 1 x, into a ring of stages.
 * Warpgroups 1 and 2 multiply: 64 rows each, BN/2 float32 accumulators a thread.
 *
 *   ring of stages in shared memory, each [128 rows of x][64] and [BN rows of W][64], 128-byte swizzle
 *     full[s]   2 arrivals (expect_tx of W's and x's bytes) and the bytes;  waited for by the consumers
 *     empty[s]  one arrival per warpgroup that read it and CTA of the pair; waited for by the producers
 *   behind the ring: staging of the output, 16 rows per warp, so that each of the 8 warps stores (and for EPI_RESIDUAL has
 *   loaded) its own rows by TMA and waits for no other warp: res[w]
 *
 * Persistent: the grid is one CTA per multiprocessor, a unit of work is `mc` tiles below each other. mc = 2: a cluster of two
 * CTAs shares W's rows, each loads half of them into both. Units go down `group` rows of units, then right, so that a wave's
 * part of x and W stays in L2. The ring runs on across tiles: while the consumers are in the epilogue, the next tile's stages
 * fill.
 *
 * PINGPONG: warpgroups 1 and 2 take tiles by turns, all 128 rows of each: BN float32 accumulators a thread, two products of 64
 * rows a step of 16 columns of K. While one is in the epilogue, the other multiplies at the rate of both.
 *
 *   fetched     tile 0 | tile 1 | tile 2 | tile 3 ...      one order of stages; each reads its own tiles' and skips the others'
 *   warpgroup 1 products end      products end
 *   warpgroup 2          products end      products ...    begin when the other has asked for its last: named barriers 2, 3
 *
 * gemm_lead: for epilogues that are long beside their products. Each consumer has its 64 rows of every tile, but warpgroup 1 ends
 * first: 2 stops a few blocks of K short and does those during 1's epilogue; 1 begins the next tile during 2's epilogue.
 *
 *   warpgroup 1   products ... products   | epilogue       products (alone)  products ...
 *   warpgroup 2   products ... (stopped)  | products (alone)  epilogue       products ...
 *
 * SPLIT > 1: few tiles. The CTAs of a cluster share one tile and each takes a part of K; then each gets BN/SPLIT columns of all
 * partial sums from the others' registers, adds them in order of K and runs the epilogue on them. One unit per cluster.
 *
 * FLOPs 2MNK; L2 to shared memory (128 + BN/mc) K 2 bytes per tile. Any M >= 1; N a multiple of 8 (EPI_SWIGLU 16), K of 8: TMA
 * reads zeros beyond the edges and stores nothing there. Grid: min(units, multiprocessors / cluster) clusters, or with SPLIT > 1
 * one for each unit; block 384; shared: gemm_smem.
 *
 * Measured on an H100, 2026-11-21, clocks per block of K: BN 128 505 to 530 (tensor cores alone 512), BN 256 1,020 to 1,040
 * (1,024). A launch costs about 3 us around that: 0.6 until the kernel ahead is seen to have ended, 1.2 for the first x, the
 * last epilogue and its store. torch.mm's (cuBLAS) time over ours, test/bench_peers.py, M >= 512, geometric mean of 61 bare
 * products: 1.04 on an H200, 2026-11-23, least 0.957; with RoPE and pages or a residual behind them 0.865 (1B QKV, M = 512) to
 * 1.08 of the bare product. Above 600 TFLOP/s both are held by the card's power. One shape repeated gives +-5 %, and 12 % where
 * the run lasts (70B gate_up, M = 8192).
 * Ping-pong beside the best of the others, H200, 2026-11-22, us: gate_up of Qwen2.5-0.5B, M = 1024 27.3 (29.1), 4096 98.1 (106.5),
 * 8192 188.7 (203.6); of the 1B model 51.2 (48.8, M = 512), 350.0 (361.6, 4096), 695 (713, 8192); its LM head, plain, 695 (711,
 * 1024). Mostly it is power that bounds them then: what is read counts, so BN 192 is 4 to 5 % faster than 128, mc 2 than 1.
 *
 * Retired: releasing a stage of the peer by mbarrier.arrive.release.cluster: a fence of the whole GPU each time, pairs twice as
 * slow. Three stages and 64 KB of staging at BN 256: 1,090 clocks a block, 1,265 in pairs. y of EPI_RESIDUAL as stages of the
 * ring: behind the last block it is waited for 2,400 clocks, ahead of the first it delays x. Sums exchanged by st.shared::cluster
 * between cluster barriers: 3.4 us, by bulk copies 1.4, by st.async now 0.9 (parts of 128 columns). One producer thread for all
 * loads: each takes it 150 to 240 clocks. W of QKV in the model's order, tiles of 1.5 heads fetched as six quarters of heads by
 * three warps: 150 to 260 clocks more a block than one box of rows that lie by turns. gemm_lead of 2, 3, 4 for QKV (H100, M =
 * 1,024 to 8,192 of three models, in turns): 1.02, 1.01, 1.02 of the time without; o with its residual 1.00, 0.99, 0.99, down
 * 1.01, 1.00, 1.01. Ping-pong for EPI_RESIDUAL: 1 to 8 % slower than BN 256, for QKV at BN 128 4 to 6 % (192 has no registers for
 * it), for the LM head with sampling, BN 192 and groups of 48 ids (chapter 11), 0 to 3 % faster at K = 2048, but 10 to 12 % slower
 * at K = 896 (H200): there one's epilogue outlasts the other's products. For o of the 1B model at M = 512 (H200, 9.6 us): two CTAs
 * a multiprocessor, so that the next kernel's W is fetched beside this one, 12.3 (its four stages cover 1.2 us of L2 latency, and
 * the products in flight hold two); each column of tiles from another block of K on, 12.8 (CTAs no longer ask for the same lines
 * together); x shared by two tiles side by side, 10.4; the rest of W or x fetched into L2 ahead, 12.4 and 10.1; descriptors
 * fetched ahead, 9.6 to 10.0. Sums pass from CTA to CTA while the next columns are multiplied: not tried, 96 KB a CTA take longer
 * than the products (12 KB take 1.3 us). Norms without a kernel also for many rows, as chapter 4 has it for few (EPI_RESIDUAL
 * leaves y w, too, and squares; SwiGLU and QKV scale): 8,192 samples of the 1B model 0.2 % faster, 512 1 % slower, 128 3.6 %:
 * staging each tile twice takes as long as the norm, which is launched before the kernel ahead has ended.
 * =========================================================================== */

struct gemm_job { /* what the kernel is told */
    int M, N, K;
    int units_m, tiles_n; /* ceil(M / (128 mc)), ceil(N / BN) */
    int group, mc;
    float per_group, per_height, per_last; /* 1 / (group * tiles_n), 1 / group, 1 / height of the last group */
};

/* Shared memory of one instance, from a multiple of 1,024 on: the ring; staging of OUT columns (0: none); with SPLIT > 1
 * partial sums that come from the other CTAs; barriers full[stages], empty[stages], sums[2], res[8]. */
template <int BN, int SPLIT, int OUT> struct gemm_smem {
    static constexpr int stage_bytes = (128 + BN) * 128;
    static constexpr int out_bytes = 128 * OUT * 2;
    static constexpr int sum_bytes = 128 * (BN / SPLIT) * 4 * (SPLIT - 1);
    static constexpr int rest = 1024 + 256 + out_bytes + sum_bytes;
    static constexpr int stages = (232448 - rest) / stage_bytes < 8 ? (232448 - rest) / stage_bytes : 8;
    static constexpr int bytes = rest + stages * stage_bytes;
    static constexpr int out_at = stages * stage_bytes, sums_at = out_at + out_bytes, bars_at = sums_at + sum_bytes;
};

/* Output of C columns is staged in rounds of this many, so that staging leaves room for four stages. */
__host__ __device__ constexpr int gemm_round(int cols) { return cols > 128 && cols % 128 == 0 ? 128 : cols; }
/* Staged output lies in panels of 16 rows by this many columns, swizzled over their 128, 64 or 32 bytes. */
__host__ __device__ constexpr int gemm_panel(int cols) { return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16; }

/* One warp's part of a tile, as epilogues get it: the accumulators of C columns from col0 on of rows row0 .. row0+15; lane l
 * has rows row0 + l/4 and + 8, columns col0 + 8j + 2(l%4) + {0,1} in acc[4j .. 4j+3] (see wgmma). */
struct gemm_tile {
    int M, N;       /* rows and columns that exist */
    int row0, col0;
    int lane;
    uint32_t out;   /* the warp's staging: 16 rows of the epilogue's out(C) columns */
    uint32_t res;   /* barrier of what is loaded into it */
    int turn;       /* tiles before this one: parity of the barrier */
};
/* Blocks of K by which consumer group 0 leads group 1 at the end of a tile, for long epilogues; 0: both run side by side. */
template <class EPI> constexpr int gemm_lead = 0;
/* What an epilogue fetches while the products run and keeps in registers. */
template <class EPI, int C> struct gemm_held {};
template <class EPI, int C> constexpr bool gemm_holds = sizeof(gemm_held<EPI, C>) > 1;

#if HOPPER
/* ---- The staged output ---- */

/* Lane l's address of the 16x16 block `jj` of C columns (as stmatrix takes it: rows 0-7, 8-15, then the right 8 columns). */
template <int C> __device__ static inline uint32_t gemm_out_at(uint32_t out, int lane, int jj) {
    constexpr int P = gemm_panel(C);
    int row = lane & 15, col = 16 * jj + (lane >> 4) * 8;
    uint32_t byte = (uint32_t)(col / P * (32 * P) + row * (2 * P) + col % P * 2);
    return out + (byte ^ (byte >> 7 & (P / 8 - 1)) << 4);
}
/* Accumulators of C columns to the staging, rounded to bf16. */
template <int C> __device__ static inline void gemm_out_put(const float *acc, const gemm_tile &t) {
#pragma unroll
    for (int jj = 0; jj < C / 16; jj++) {
        const float *v = acc + 8 * jj;
        stmatrix_x4(gemm_out_at<C>(t.out, t.lane, jj), pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                    pack_bf16(v[6], v[7]));
    }
}
/* The warp's 16 rows of C staged columns go to y at (row0, col0), of n_cols. */
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
 *        out(C)      columns to stage at a time of C columns of accumulators
 *        begin<C>    runs in the middle of a tile's products: not before, its loads would delay the first stages; epilogues that
 *                    hold something have a later<C>, too, which may wait for what begin<C> has asked for
 *        run<C>      takes the accumulators of C columns; all 32 lanes come, also where rows or columns are beyond the edge
 *                    ping-pong: begin<C>, later<C> and run<C> come one after the other behind the products, for each half of a
 *                    tile: the other warpgroup's products hide them
 *        ---- */

struct epi_store { /* y = acc + bias */
    struct params {
        const float *bias; /* or NULL */
        const bf16 *y;     /* epi_residual: [M][N], row stride ldy */
        int ldy;
    };
    __host__ __device__ static constexpr int out(int c) { return gemm_round(c); }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &p) {
        constexpr int R = gemm_round(C);
        gemm_add_bias<C>(acc, t, p.bias);
#pragma unroll
        for (int i = 0; i < C / R; i++) {
            gemm_out_wait(t);
            gemm_out_put<R>(acc + i * (R / 2), t);
            gemm_out_store<R>(t, my, t.col0 + i * R, t.N);
        }
    }
#endif
};

/* y is this rank's part of a sum over tensor ranks: rows q share .. (q + 1) share - 1 go to rank q, which adds them up, while the
 * products of other tiles run. */
struct epi_scatter {
    struct params {
        CUtensorMap to[MEET_RANKS]; /* a box [share][N] at each rank; boxes of 16 rows */
        const float *bias;          /* or NULL */
        int share;                  /* a multiple of 16, so that a warp's rows go to one rank */
    };
    __host__ __device__ static constexpr int out(int c) { return gemm_round(c); }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *, const params &p) {
        const int q = t.row0 / p.share;
        gemm_tile at = t;
        at.row0 -= q * p.share, at.M -= q * p.share;
        epi_store::run<C>(acc, at, p.to + q, {p.bias, NULL, 0});
    }
#endif
};
template <class EPI> constexpr bool gemm_far = false; /* y may be in another GPU's memory */
template <> constexpr bool gemm_far<epi_scatter> = true;

/* y += acc + bias. The first out(C) columns of y come into the staging by TMA while the products run, the others into
 * registers while the first are added. */
struct epi_residual {
    typedef epi_store::params params;
    __host__ __device__ static constexpr int out(int c) { return gemm_round(c); }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &t, const CUtensorMap *my, const params &) {
        constexpr int R = gemm_round(C), P = gemm_panel(R);
        if (t.lane != 0) return;
        tma_store_wait_read<0>();
        mbar_expect_tx(t.res, 32 * R);
        for (int i = 0; i < R / P; i++) tma_load_2d(t.out + i * 32 * P, my, t.res, t.col0 + i * P, t.row0);
    }
    /* acc + staged y of R columns goes to the staging and out. */
    template <int R> __device__ static inline void add(const float *acc, const gemm_tile &t, const CUtensorMap *my, int col0) {
#pragma unroll
        for (int jj = 0; jj < R / 16; jj++) {
            const float *v = acc + 8 * jj;
            uint32_t at = gemm_out_at<R>(t.out, t.lane, jj), r[4];
            ldmatrix_x4(r, at);
#pragma unroll
            for (int i = 0; i < 4; i++) r[i] = pack_bf16(v[2 * i] + bf16_low(r[i]), v[2 * i + 1] + bf16_high(r[i]));
            stmatrix_x4(at, r[0], r[1], r[2], r[3]);
        }
        gemm_out_store<R>(t, my, col0, t.N);
    }
    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &p) {
        constexpr int R = gemm_round(C), per_row = R / 8, n = C > R ? 16 * per_row / 32 : 0;
        uint4 y[n + 1];
        int row = t.lane / per_row, chunk = t.lane % per_row, col = t.col0 + R + 8 * chunk;
#pragma unroll
        for (int i = 0; i < n; i++) {
            int r = t.row0 + i * (32 / per_row) + row;
            y[i] = r < t.M && col < t.N ? *(const uint4 *)(p.y + (size_t)r * p.ldy + col) : uint4{};
        }
        gemm_add_bias<C>(acc, t, p.bias);
        mbar_wait(t.res, t.turn & 1);
        add<R>(acc, t, my, t.col0);
        if constexpr (n > 0) {
            static_assert(C == 2 * R && R == 128, "two rounds of two panels of 64 columns");
            gemm_out_wait(t);
#pragma unroll
            for (int i = 0; i < n; i++) {
                uint32_t byte = (uint32_t)(chunk / 8 * 2048 + (i * (32 / per_row) + row) * 128 + chunk % 8 * 16);
                smem_store_16(t.out + (byte ^ (byte >> 7 & 7) << 4), y[i]);
            }
            __syncwarp();
            add<R>(acc + R / 2, t, my, t.col0 + R);
        }
    }
#endif
};

struct epi_swiglu { /* y[M][N/2] = silu(gate) up: of two blocks of 8 columns the left one is gate, the right one up */
    struct params {
        int unused;
    };
    __host__ __device__ static constexpr int out(int c) { return c / 2; }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *my, const params &) {
        gemm_out_wait(t);
#pragma unroll
        for (int jj = 0; jj < C / 32; jj++) {
            uint32_t r[4];
#pragma unroll
            for (int i = 0; i < 4; i++) { /* rows 0-7 and 8-15 of the left, then of the right 8 columns of output */
                const float *v = acc + 16 * jj + 8 * (i >> 1) + 2 * (i & 1);
                r[i] = pack_bf16(swiglu(v[0], v[4]), swiglu(v[1], v[5]));
            }
            stmatrix_x4(gemm_out_at<C / 2>(t.out, t.lane, jj), r[0], r[1], r[2], r[3]);
        }
        gemm_out_store<C / 2>(t, my, t.col0 / 2, t.N / 2);
    }
#endif
};

struct epi_logits { /* y = acc, float32; each 32-byte sector is written by four lanes */
    struct params {
        float *y;
        int ld;
    };
    __host__ __device__ static constexpr int out(int) { return 0; }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &, const CUtensorMap *, const params &) {}
    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, const CUtensorMap *, const params &p) {
        int row = t.row0 + t.lane / 4, col = t.col0 + 2 * (t.lane & 3);
        float *y = p.y + (size_t)row * p.ld + col;
#pragma unroll
        for (int j = 0; j < C / 8; j++) {
            if (t.col0 + 8 * j >= t.N) continue;
            if (row < t.M) *(float2 *)(y + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
            if (row + 8 < t.M) *(float2 *)(y + (size_t)8 * p.ld + 8 * j) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
        }
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
    int D;                        /* where the type does not say it */
};
static bool qkv_has_norms(const qkv_params *p) { return p->q_norm || p->k_norm; }

/* W's rows (and the bias) lie by turns, see qkv_place: a tile may begin and end anywhere in a head, its pairs are whole. Only
 * QK-norm needs the whole head. All arithmetic is float32 on the accumulators, rounded once. The bf16 rows go through the warp's
 * staging, so that each head's row leaves in 16-byte chunks, one panel's side by side. */
template <int D> struct epi_qkv;
template <int D, int C> struct gemm_held<epi_qkv<D>, C> {
    static constexpr int blocks = (C < D ? C : D) / 16; /* the table's values repeat from head to head */
    static constexpr bool early = C + D <= 320;         /* there are registers for them */
    static constexpr int panel = gemm_panel(gemm_round(C)) / 8, step = 32 / panel, chunks = 16 / step; /* see send */
    int pos[2], slot; /* positions of the lane's two rows; slot of row row0 + lane % 16 */
    uint32_t q_at[chunks], kv_at[chunks]; /* where the lane's rows lie in q and in the pages, in units of D elements */
    float4 table[early ? blocks : 1][2]; /* cosines and sines of the lane's two pairs, in either row, of each 16 columns */
};

template <int D> struct epi_qkv {
    typedef qkv_params params;
    template <int C> using held = gemm_held<epi_qkv<D>, C>;
    __host__ __device__ static constexpr int out(int c) { return gemm_round(c); }
#if HOPPER
    template <int C> __device__ static inline void begin(const gemm_tile &t, held<C> &h, const params &p) {
        int r = t.row0 + t.lane / 4, last = t.M - 1;
        h.pos[0] = p.pos[min(r, last)], h.pos[1] = p.pos[min(r + 8, last)];
        h.slot = p.slot[min(t.row0 + (t.lane & 15), last)];
        if (p.bias && 32 * t.lane < min(C, t.N - t.col0)) l2_prefetch(p.bias + t.col0 + 32 * t.lane);
    }
    template <int C>
    __device__ static inline void look_up(float4 to[2], int j, const gemm_tile &t, const held<C> &h, const params &p) {
        int e = (t.col0 + 16 * j) % D / 2 + 2 * (t.lane & 3);
#pragma unroll
        for (int i = 0; i < 2; i++) to[i] = *(const float4 *)(p.rope + (size_t)h.pos[i] * (D / 2) + e);
    }
    template <int C> __device__ static inline void later(const gemm_tile &t, held<C> &h, const params &p) {
        int log2_B = 31 - __clz(p.B);
#pragma unroll
        for (int i = 0; i < held<C>::chunks; i++) {
            int r = t.lane / held<C>::panel + i * held<C>::step, slot = __shfl_sync(~0u, h.slot, r);
            h.q_at[i] = (uint32_t)((t.row0 + r) * p.H);
            h.kv_at[i] = ((uint32_t)(slot >> log2_B) * (uint32_t)(2 * p.K) << log2_B) + (uint32_t)(slot & (p.B - 1));
        }
        if constexpr (held<C>::early) {
            if (t.col0 >= (p.H + p.K) * D) return;
#pragma unroll
            for (int j = 0; j < held<C>::blocks; j++) look_up<C>(h.table[j], j, t, h, p);
        }
    }

    template <int C> __device__ static inline void norm(float (&acc)[C / 2], const gemm_tile &t, const params &p) {
#pragma unroll
        for (int h = 0; h < C / D; h++) {
            int head = t.col0 / D + h;
            const float *w = head < p.H ? p.q_norm : p.k_norm;
            if (!w || head >= p.H + p.K) continue;
            float *v = acc + h * (D / 2), s0 = 0, s1 = 0;
#pragma unroll
            for (int i = 0; i < D / 2; i += 4)
                s0 += v[i] * v[i] + v[i + 1] * v[i + 1], s1 += v[i + 2] * v[i + 2] + v[i + 3] * v[i + 3];
            s0 += __shfl_xor_sync(~0u, s0, 1), s1 += __shfl_xor_sync(~0u, s1, 1);
            s0 += __shfl_xor_sync(~0u, s0, 2), s1 += __shfl_xor_sync(~0u, s1, 2);
            s0 = rsqrtf(s0 * (1.0f / D) + p.eps), s1 = rsqrtf(s1 * (1.0f / D) + p.eps);
#pragma unroll
            for (int i = 0; i < D / 2; i += 4) {
                float2 g = *(const float2 *)(w + i / 8 * 8 + i / 4 % 2 * (D / 2) + 2 * (t.lane & 3));
                v[i] *= s0 * g.x, v[i + 1] *= s0 * g.y, v[i + 2] *= s1 * g.x, v[i + 3] *= s1 * g.y;
            }
        }
    }

    __device__ static inline void turn(float &a, float &b, float cosine, float sine) {
        float x = a, y = b;
        a = x * cosine - y * sine, b = y * cosine + x * sine;
    }
    /* Two rows of 8 pairs at v[0 .. 7]; c0, c1: cosines and sines of the lane's two pairs in either row. */
    __device__ static inline void turn_block(float *v, float4 c0, float4 c1) {
        turn(v[0], v[4], c0.x, c0.y), turn(v[1], v[5], c0.z, c0.w);
        turn(v[2], v[6], c1.x, c1.y), turn(v[3], v[7], c1.z, c1.w);
    }
    template <int C> __device__ static inline void rope(float (&acc)[C / 2], const gemm_tile &t, held<C> &h, const params &p) {
        int turned = (p.H + p.K) * D - t.col0; /* columns of this tile */
#pragma unroll
        for (int j = 0; j < held<C>::blocks; j++) {
            float4 *c = h.table[held<C>::early ? j : 0];
            if (!held<C>::early) look_up<C>(c, j, t, h, p);
#pragma unroll
            for (int b = j; b < C / 16; b += D / 16)
                if (16 * b < turned) turn_block(acc + 8 * b, c[0], c[1]);
        }
    }

    /* R staged columns from col0 on go to q and the pages, panel by panel: a lane has one chunk of 8 columns in every step-th
     * row. */
    template <int C, int R> __device__ static inline void send(const gemm_tile &t, const held<C> &h, const params &p, int col0) {
        constexpr int P = gemm_panel(R);
        int j = t.lane % (P / 8), row = t.lane / (P / 8), log2_B = 31 - __clz(p.B);
#pragma unroll
        for (int panel = 0; panel < R / P; panel++) {
            int col = col0 + panel * P + 8 * j, head = col / D, kv = head - p.H, value = kv >= p.K;
            int e = col % D / 16 * 8 + col / 8 % 2 * (D / 2);
            uint32_t first = kv < 0 ? (uint32_t)head : (uint32_t)((kv - value * p.K) * 2 + value) << log2_B;
            bf16 *to = (kv < 0 ? p.q : p.kv) + e;
#pragma unroll
            for (int i = 0; i < held<C>::chunks; i++) {
                uint32_t byte = (uint32_t)((row + i * held<C>::step) * (2 * P) + j * 16);
                uint32_t from = t.out + panel * 32 * P + (byte ^ (byte >> 7 & (P / 8 - 1)) << 4);
                if (col < t.N && t.row0 + row + i * held<C>::step < t.M)
                    *(uint4 *)(to + (size_t)(first + (kv < 0 ? h.q_at[i] : h.kv_at[i])) * D) = smem_load_16(from);
            }
        }
    }

    template <int C>
    __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, held<C> &h, const params &p) {
        constexpr int R = gemm_round(C);
        gemm_add_bias<C>(acc, t, p.bias);
        if constexpr (C % D == 0) norm<C>(acc, t, p);
        rope<C>(acc, t, h, p);
#pragma unroll
        for (int i = 0; i < C / R; i++) {
            __syncwarp();
            gemm_out_put<R>(acc + i * (R / 2), t);
            __syncwarp();
            send<C, R>(t, h, p, t.col0 + i * R);
        }
    }
#endif
};

/* Rows of q, k and v and their biases from the model's order to qkv_place's; once, in place. One CTA takes 64 columns of a head
 * through shared memory. Grid (N / D, ceil(K / 64)), block 256; D at most 128, K a multiple of 8. */
__global__ static void __launch_bounds__(256) qkv_order_kernel(bf16 *w, float *bias, int K, int D) {
    __shared__ uint4 rows[128 * 8];
    __shared__ float b[128];
    bf16 *head = w + (size_t)blockIdx.x * D * K + blockIdx.y * 64;
    int left = (K - (int)blockIdx.y * 64) / 8, i = (int)threadIdx.x;
    for (int c = i; c < D * 8; c += 256)
        if (c % 8 < left) rows[c] = *(uint4 *)(head + (size_t)(c / 8) * K + c % 8 * 8);
    bool has_bias = bias && blockIdx.y == 0 && i < D;
    if (has_bias) b[i] = bias[blockIdx.x * D + i];
    __syncthreads();
    for (int c = i; c < D * 8; c += 256)
        if (c % 8 < left) *(uint4 *)(head + (size_t)qkv_place(c / 8, D / 2) * K + c % 8 * 8) = rows[c];
    if (has_bias) bias[blockIdx.x * D + qkv_place(i, D / 2)] = b[i];
}
static bool qkv_fuses(const toka_device *d, int D) { return d->hopper && (D == 64 || D == 128); } /* then rows lie by turns */
static void qkv_order(toka_device *d, const weight *w, int D) {
    const dim3 grid((unsigned)(w->N / D), (unsigned)ceil_div(w->K, 64));
    qkv_order_kernel<<<grid, 256, 0, d->stream>>>(w->p, (float *)w->bias, w->K, D);
    LAUNCHED(d, "order of q, k and v");
}

#if HOPPER
/* ---- Who works where ---- */

struct gemm_maps {
    const CUtensorMap *x, *w, *y;
};
struct gemm_cta {
    gemm_job j;
    gemm_maps map;
    uint32_t ring, full, empty, sums, res; /* stages, barriers */
    int part, row;            /* part of K; row of tiles in the unit */
    int k0, n_k;              /* blocks of K */
    int first, stride, units; /* units: first, first + stride ... */
};

/* a / b for a, b < 2^22, per_b = 1 / b: the rounded product is off by one at most. */
__device__ static inline int gemm_divide(int a, int b, float per_b) {
    int q = (int)((float)a * per_b), r = a - q * b;
    return q + (r >= b) - (r < 0);
}
struct gemm_unit {
    int m, n; /* tile indices */
};
__device__ static inline gemm_unit gemm_unit_at(const gemm_cta &c, int u) {
    const gemm_job &j = c.j;
    int size = j.group * j.tiles_n, g = gemm_divide(u, size, j.per_group), i = u - g * size, left = j.units_m - g * j.group;
    int height = min(j.group, left), n = gemm_divide(i, height, left < j.group ? j.per_last : j.per_height);
    return {(g * j.group + i - n * height) * j.mc + c.row, n};
}

struct gemm_ring {
    int s, parity; /* the next stage and its phase */
};
template <int STAGES> __device__ static inline void gemm_next(gemm_ring &r) {
    if (++r.s == STAGES) r.s = 0, r.parity ^= 1;
}
template <int STAGES> __device__ static inline void gemm_skip(gemm_ring &r, int n) { /* n stages that are the other's */
    unsigned to = (unsigned)(r.s + n);
    r.s = (int)(to % STAGES), r.parity ^= (int)(to / STAGES & 1);
}

/* ---- The producers: one thread each of two warps of warpgroup 0 ---- */

/* Warp 0 fetches W, which does not depend on the kernels ahead: it starts at once. */
template <int BN, int STAGES> __device__ static inline void gemm_produce_w(const gemm_cta &c) {
    uint16_t both = (uint16_t)(3 << c.part * 2);
    gemm_ring r = {0, 0};
    for (int u = c.first; u < c.units; u += c.stride) {
        int n = gemm_unit_at(c, u).n;
        for (int k = c.k0; k < c.k0 + c.n_k; k++) {
            uint32_t full = c.full + 8 * r.s, at = c.ring + r.s * ((128 + BN) * 128) + 128 * 128;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(full, BN * 128);
            if (c.j.mc == 1) tma_load_2d(at, c.map.w, full, k * 64, n * BN);
            else tma_load_2d_multicast(at + c.row * (BN / 2 * 128), c.map.w, full, k * 64, n * BN + c.row * (BN / 2), both);
            gemm_next<STAGES>(r);
        }
    }
    for (int i = 0; i < STAGES && c.j.mc > 1; i++) { /* what the peer says it has read must find this CTA here */
        mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
        gemm_next<STAGES>(r);
    }
}
/* Warp 1 fetches x. */
template <int BN, int STAGES> __device__ static inline void gemm_produce_x(const gemm_cta &c) {
    gemm_ring r = {0, 0};
    grid_wait();
    for (int u = c.first; u < c.units; u += c.stride) {
        gemm_unit t = gemm_unit_at(c, u);
        if (u + c.stride >= c.units) grid_launch_dependents();
        for (int k = c.k0; k < c.k0 + c.n_k; k++) {
            uint32_t full = c.full + 8 * r.s;
            mbar_wait(c.empty + 8 * r.s, r.parity ^ 1);
            mbar_expect_tx(full, 128 * 128);
            tma_load_2d(c.ring + r.s * ((128 + BN) * 128), c.map.x, full, k * 64, t.m * 128);
            gemm_next<STAGES>(r);
        }
    }
}

/* ---- The consumers: two warpgroups ---- */

/* This warpgroup has read stage s. */
__device__ static inline void gemm_release(const gemm_cta &c, int s) {
    int tid = threadIdx.x & 127;
    if (c.j.mc == 1) {
        if (tid == 0) mbar_arrive(c.empty + 8 * s);
    } else if (tid < 2) mbar_arrive_remote_read(c.empty + 8 * s, c.part * 2 + tid);
}

template <class EPI, int C>
__device__ static inline void gemm_begin(const gemm_tile &t, gemm_held<EPI, C> &h, const gemm_cta &c,
                                         const typename EPI::params &p) {
    if constexpr (gemm_holds<EPI, C>) EPI::template begin<C>(t, h, p);
    else EPI::template begin<C>(t, c.map.y, p);
}
template <class EPI, int C>
__device__ static inline void gemm_later(const gemm_tile &t, gemm_held<EPI, C> &h, const typename EPI::params &p) {
    if constexpr (gemm_holds<EPI, C>) EPI::template later<C>(t, h, p);
}

/* The products of unit u's tile: 64 rows (H 1) or 128 (H 2, ping-pong). In ping-pong, too, stages are consumed in order: a
 * warpgroup begins when the other has issued its last products, which are still in flight. Waiting for a stage sooner, it could
 * take the phase before last, which has the same parity, for its own. */
template <class EPI, int BN, int C, int STAGES, int H>
__device__ static inline void gemm_multiply(float (&acc)[H][BN / 2], const gemm_cta &c, gemm_ring &r, int group, int u,
                                            const gemm_tile &t, gemm_held<EPI, C> &h, const typename EPI::params &p) {
    constexpr int stage_bytes = (128 + BN) * 128;
    int last = 0;
    /* zeros, and not a first product that does not add: ptxas before 12.9 takes what the epilogue left in acc for its input
     * (C7515) */
#pragma unroll
    for (int i = 0; i < H * (BN / 2); i++) acc[i / (BN / 2)][i % (BN / 2)] = 0;
    if (H == 2 && u != c.first) named_sync(2 + group, 256);
    for (int k = 0; k < c.n_k; k++) {
        mbar_wait(c.full + 8 * r.s, r.parity);
        uint32_t stage = c.ring + r.s * stage_bytes;
        uint64_t a = wgmma_desc(stage + (H == 1 ? group * 64 * 128 : 0)), b = wgmma_desc(stage + 128 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < H; half++) wgmma_ss<BN>(acc[half], a + half * (64 * 128 / 16) + 2 * i, b + 2 * i, 1);
        wgmma_commit();
        if (H == 1 && k == c.n_k / 2) gemm_begin<EPI, C>(t, h, c, p);
        if (H == 1 && k == c.n_k * 3 / 4) gemm_later<EPI, C>(t, h, p);
        if (k) {
            wgmma_wait<1>();
            gemm_release(c, last);
        }
        last = r.s;
        gemm_next<STAGES>(r);
    }
    if (H == 2 && u + c.stride < c.units) named_arrive(3 - group, 256);
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < H; half++) wgmma_keep(acc[half]);
    gemm_release(c, last);
}

/* The same for long epilogues (gemm_lead). Consumer group 1 stops LEAD blocks before a tile's end until group 0 has issued all of
 * its products, then issues its own last ones during 0's epilogue; 0 begins the next tile during 1's epilogue. A group alone must
 * keep the tensor cores busy, so it releases stages and computes the tile's position while products are in flight. */
template <class EPI, int BN, int C, int STAGES>
__device__ static inline void gemm_multiply_apart(float (&acc)[BN / 2], const gemm_cta &c, gemm_ring &r, int group, int u,
                                                  gemm_tile &t, gemm_held<EPI, C> &h, const typename EPI::params &p) {
    constexpr int stage_bytes = (128 + BN) * 128, LEAD = gemm_lead<EPI>;
    static_assert(LEAD <= STAGES, "the ring holds what one warpgroup is ahead");
    const int apart = c.n_k > STAGES ? c.n_k - LEAD : -1; /* else the other could be a whole tile ahead, and arrive twice */
    constexpr bool zeros = NVCC_VERSION < 1209; /* see above */
    int last = 0;
#pragma unroll
    for (int i = 0; zeros && i < BN / 2; i++) acc[i] = 0;
    for (int k = 0; k < c.n_k; k++) {
        const bool stop = group && k == apart;
        if (stop) {
            wgmma_wait<0>();
            gemm_release(c, last);
            named_sync(2, 256);
        }
        mbar_wait(c.full + 8 * r.s, r.parity);
        uint32_t stage = c.ring + r.s * stage_bytes;
        uint64_t a = wgmma_desc(stage + group * 64 * 128), b = wgmma_desc(stage + 128 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; i++) wgmma_ss<BN>(acc, a + 2 * i, b + 2 * i, zeros || k > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* always: in a branch it would serialise the products (C7520) */
        if (k && !stop) gemm_release(c, last);
        wgmma_fence();
#pragma unroll
        for (int i = 2; i < 4; i++) wgmma_ss<BN>(acc, a + 2 * i, b + 2 * i, 1);
        wgmma_commit();
        if (k == c.n_k / 2) {
            gemm_unit at = gemm_unit_at(c, u);
            t.row0 = at.m * 128 + ((int)threadIdx.x / 32 - 4) * 16, t.col0 = at.n * BN;
            gemm_begin<EPI, C>(t, h, c, p);
        }
        if (k == c.n_k * 3 / 4) gemm_later<EPI, C>(t, h, p);
        last = r.s;
        gemm_next<STAGES>(r);
    }
    if (apart >= 0 && !group) named_arrive(2, 256);
    wgmma_wait<0>();
    wgmma_keep(acc);
    gemm_release(c, last);
}

/* Adds the partial sums of a cluster's SPLIT CTAs, always in the order of K; this CTA gets slice `part` of the columns. The
 * slices of the others go from registers to get_at in their CTAs: [SPLIT-1][warpgroup][C/8][128 threads] x 16 bytes;
 * c.sums[warpgroup] counts the bytes that come. */
template <int BN, int SPLIT>
__device__ static inline void gemm_reduce(const float (&acc)[BN / 2], float (&sum)[BN / SPLIT / 2], const gemm_cta &c,
                                          uint32_t get_at, int group) {
    constexpr int C = BN / SPLIT, bytes = C / 8 * 2048;
    int tid = threadIdx.x & 127, part = c.part;
    float own[C / 2];
#pragma unroll
    for (int s = 0; s < SPLIT; s++)
        if (s == part) {
#pragma unroll
            for (int i = 0; i < C / 2; i++) own[i] = acc[s * (C / 2) + i];
        } else {
            int cta = s * c.j.mc + c.row;
            uint32_t to = peer_at(get_at + (2 * (part - (part > s)) + group) * bytes + tid * 16, cta);
            uint32_t bar = peer_at(c.sums + 8 * group, cta);
#pragma unroll
            for (int i = 0; i < C / 8; i++) send_to_peer(to + i * 2048, acc + s * (C / 2) + 4 * i, bar);
        }
    mbar_wait(c.sums + 8 * group, 0);
#pragma unroll
    for (int i = 0; i < C / 2; i++) sum[i] = 0;
#pragma unroll 1
    for (int q = 0; q < SPLIT; q++) {
        uint32_t from = get_at + (2 * (q - (q > part)) + group) * bytes + tid * 16;
#pragma unroll
        for (int i = 0; i < C / 8; i++) {
            float *v = own + 4 * i, *to = sum + 4 * i;
            uint4 other = q == part ? uint4{} : smem_load_16(from + i * 2048);
            to[0] += q == part ? v[0] : __uint_as_float(other.x), to[1] += q == part ? v[1] : __uint_as_float(other.y);
            to[2] += q == part ? v[2] : __uint_as_float(other.z), to[3] += q == part ? v[3] : __uint_as_float(other.w);
        }
    }
}

/* What becomes of a tile's accumulators; two halves use the same staging one after the other. */
template <class EPI, int C, int H>
__device__ static inline void gemm_end(float (&acc)[H][C / 2], gemm_tile &t, gemm_held<EPI, C> &h, const gemm_cta &c,
                                       const typename EPI::params &p) {
#pragma unroll
    for (int half = 0; half < H; half++) {
        if (half) t.row0 += 64, t.turn++;
        if (H == 2) gemm_begin<EPI, C>(t, h, c, p), gemm_later<EPI, C>(t, h, p);
        if constexpr (gemm_holds<EPI, C>) EPI::template run<C>(acc[half], t, h, p);
        else EPI::template run<C>(acc[half], t, c.map.y, p);
    }
}

/* All units of one warpgroup. */
template <class EPI, int BN, int SPLIT, bool PINGPONG>
__device__ static inline void gemm_consume(const gemm_cta &c, int group, const typename EPI::params &p) {
    constexpr int C = BN / SPLIT, H = PINGPONG ? 2 : 1;
    typedef gemm_smem<BN, SPLIT, EPI::out(C)> L;
    int warp = threadIdx.x / 32 - 4;
    gemm_ring r = {0, 0};
    uint32_t out = c.ring + L::out_at + warp * (L::out_bytes / 8);
    gemm_tile t = {c.j.M, c.j.N, 0, 0, (int)threadIdx.x & 31, out, c.res + 8 * warp, 0};
    if (PINGPONG && group) gemm_skip<L::stages>(r, c.n_k);
    grid_wait();
    for (int u = c.first + (PINGPONG ? group * c.stride : 0); u < c.units; u += H * c.stride, t.turn++) {
        float acc[H][BN / 2];
        gemm_held<EPI, C> h;
        if constexpr (gemm_lead<EPI>) {
            static_assert(SPLIT == 1 && !PINGPONG, "both warpgroups have their part of each tile");
            gemm_multiply_apart<EPI, BN, C, L::stages>(acc[0], c, r, group, u, t, h, p);
        } else {
            gemm_unit at = gemm_unit_at(c, u);
            t.row0 = at.m * 128 + (PINGPONG ? warp & 3 : warp) * 16, t.col0 = at.n * BN + c.part * C;
            gemm_multiply<EPI, BN, C, L::stages, H>(acc, c, r, group, u, t, h, p);
        }
        if (PINGPONG) gemm_skip<L::stages>(r, c.n_k);
        if constexpr (SPLIT == 1) gemm_end<EPI, C, H>(acc, t, h, c, p);
        else {
            float sum[1][C / 2];
            gemm_reduce<BN, SPLIT>(acc[0], sum[0], c, c.ring + L::sums_at, group);
            gemm_end<EPI, C, 1>(sum, t, h, c, p);
        }
    }
    if (t.lane == 0) {
        if constexpr (gemm_far<EPI>) tma_store_wait();
        else tma_store_wait_read<0>();
    }
    __syncwarp();
}
#endif

template <class EPI, int BN, int SPLIT, bool PINGPONG = false>
__global__ void __launch_bounds__(384, 1)
gemm_kernel(const __grid_constant__ CUtensorMap mx, const __grid_constant__ CUtensorMap mw,
            const __grid_constant__ CUtensorMap my, const __grid_constant__ gemm_job j,
            const __grid_constant__ typename EPI::params p) {
#if HOPPER
    extern __shared__ char smem[];
    typedef gemm_smem<BN, SPLIT, EPI::out(BN / SPLIT)> L;
    int rank = cluster_rank(), part = rank / j.mc, per_cluster = j.mc * SPLIT, warp = threadIdx.x / 32;
    int blocks = (j.K + 63) / 64, k0 = blocks * part / SPLIT, n_k = blocks * (part + 1) / SPLIT - k0;
    uint32_t ring = (smem_at(smem) + 1023) & ~1023u, full = ring + L::bars_at, empty = full + 8 * L::stages;
    uint32_t sums = empty + 8 * L::stages;
    gemm_cta c = {j, {&mx, &mw, &my}, ring, full, empty, sums, sums + 16, part, rank - part * j.mc, k0, n_k,
                  (int)blockIdx.x / per_cluster, (int)gridDim.x / per_cluster, j.units_m * j.tiles_n};
    if (threadIdx.x == 0) {
        for (int s = 0; s < L::stages; s++) mbar_init(full + 8 * s, 2), mbar_init(empty + 8 * s, (PINGPONG ? 1 : 2) * j.mc);
        for (int w = 0; w < 8; w++) mbar_init(c.res + 8 * w, 1);
        for (int g = 0; g < 2 && SPLIT > 1; g++) mbar_init(sums + 8 * g, 1), mbar_expect_tx(sums + 8 * g, L::sum_bytes / 2);
        mbar_init_fence();
    }
    __syncwarp();
    if (per_cluster > 1) cluster_meet();
    else if (warp == 0) named_arrive(1, 384); /* need not wait for the others */
    else named_sync(1, 384);
    if (warp < 4) {
        regs_give<40>();
        if (warp == 1) {
            if (elect_one()) gemm_produce_x<BN, L::stages>(c);
        } else if (warp == 0) {
            if (elect_one()) gemm_produce_w<BN, L::stages>(c);
        }
        __syncwarp();
    } else {
        regs_take<232>();
        gemm_consume<EPI, BN, SPLIT, PINGPONG>(c, warp / 4 - 1, p);
    }
    /* A CTA may leave before its peers: all that they send it, rows of W, sums, and word of what they have read, it waits for. */
#else
    __trap();
#endif
}

/* ---- All instances, and the choice among them ---- */

enum { GEMM_QKV64 = EPI_LOGITS + 1, GEMM_QKV128, GEMM_SCATTER }; /* kinds of epilogue behind those of enum epilogue */

typedef struct gemm_variant {
    int kind, bn, split;
    bool pingpong;
    int out, smem; /* staged columns; bytes */
    const void *kernel;
} gemm_variant;

#define GEMM_INSTANCE(kind, EPI, BN, SPLIT, PINGPONG)                                                                         \
    {kind, BN, SPLIT, PINGPONG, EPI::out(BN / SPLIT), gemm_smem<BN, SPLIT, EPI::out(BN / SPLIT)>::bytes,                      \
     (const void *)gemm_kernel<EPI, BN, SPLIT, PINGPONG>}
#define GEMM_VARIANT(kind, EPI, BN, SPLIT) GEMM_INSTANCE(kind, EPI, BN, SPLIT, false)
#define GEMM_PINGPONG(kind, EPI, BN) GEMM_INSTANCE(kind, EPI, BN, 1, true)
static const gemm_variant gemm_variants[] = {
    GEMM_VARIANT(EPI_STORE, epi_store, 64, 1),        GEMM_VARIANT(EPI_STORE, epi_store, 64, 2),
    GEMM_VARIANT(EPI_STORE, epi_store, 96, 1),        GEMM_VARIANT(EPI_STORE, epi_store, 128, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 2),       GEMM_VARIANT(EPI_STORE, epi_store, 128, 4),
    GEMM_VARIANT(EPI_STORE, epi_store, 160, 1),       GEMM_VARIANT(EPI_STORE, epi_store, 192, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 256, 1),       GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 2),  GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 2), GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 4),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 192, 1), GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 256, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 64, 4),        GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 4),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 96, 1),      GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 128, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 160, 1),     GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 224, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 256, 1),
    GEMM_VARIANT(EPI_LOGITS, epi_logits, 192, 1),     GEMM_VARIANT(EPI_LOGITS, epi_logits, 256, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 64, 1),     GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 96, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 1),    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 2),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 192, 1),    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 256, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 96, 1),   GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 128, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 128, 2),  GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 160, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 192, 1),  GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 256, 1),
    GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 128, 1),  GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 192, 1),
    GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 256, 1),
    GEMM_PINGPONG(EPI_STORE, epi_store, 192),         GEMM_PINGPONG(EPI_SWIGLU, epi_swiglu, 160),
    GEMM_PINGPONG(EPI_SWIGLU, epi_swiglu, 192),
};
enum { N_GEMM_VARIANTS = sizeof gemm_variants / sizeof *gemm_variants };

typedef struct gemm_plan {
    const gemm_variant *v;
    int mc, group;
} gemm_plan;

/* Estimated clocks of a variant. Constants from sweeps of all variants over the shapes of `toka bench ops` on an H100 and an H200
 * (test/gpu_gemm.cu sweep): a block of K costs 4 BN clocks of tensor core and about 45 of waiting, or the time L2 needs for it, or
 * that of 64 bytes a clock into a multiprocessor; with a long K the CTAs that read the same rows drift apart, so L2 gives less.
 * Over several waves the card's power holds all, of which bytes from L2 take a part, too. A tile ends in an epilogue, the last of
 * ping-pong alone is seen, a split one in the exchange of sums, and every wave of split ones starts from an empty ring. */
static double gemm_cost(const toka_device *d, const gemm_variant *v, int mc, int M, int N, int K) {
    int per_cluster = mc * v->split, units = ceil_div(M, 128 * mc) * ceil_div(N, v->bn);
    int at_once = per_cluster == 4 ? d->n_quads : d->n_sms / per_cluster, waves = ceil_div(units, at_once);
    double ctas = (double)min(units, at_once) * per_cluster, k = ceil_div(ceil_div(K, 64), v->split);
    double math = 4.0 * v->bn + 45, port = (128.0 + v->bn) * 2, bytes = (128.0 + v->bn / mc) * 128 * ctas;
    double l2 = bytes / (K >= 4096 ? 6154 : 8192), block = l2 > math ? l2 : math, end = 1500 + (v->pingpong ? 8 : 4) * v->bn;
    if (block < port) block = port;
    if (waves > 1) block += 0.3 * bytes / 8192;
    if (v->split > 1) end += 1000 + 31 * v->bn;
    return waves * k * block + (v->pingpong ? 1 : waves) * end + (mc == 2 ? 300 : 0);
}

/* Whether QK-norm can follow. */
static bool gemm_holds_heads(const gemm_variant *v) { return v->bn / v->split % (v->kind == GEMM_QKV64 ? 64 : 128) == 0; }

/* The cheapest variant of a kind; whole_heads: QK-norm follows. */
static gemm_plan gemm_pick(const toka_device *d, int kind, int M, int N, int K, bool whole_heads) {
    gemm_plan best = {.group = 8};
    double least = 0;
    for (int i = 0; i < N_GEMM_VARIANTS; i++)
        for (int mc = 1; mc <= 2; mc++) {
            const gemm_variant *v = &gemm_variants[i];
            if (v->kind != kind || v->split > ceil_div(K, 64) || mc * v->split > 4 || (mc == 2 && M <= 128)) continue;
            if (mc * v->split == 4 && !d->n_quads) continue;
            if (whole_heads && !gemm_holds_heads(v)) continue;
            double cost = gemm_cost(d, v, mc, M, N, K);
            if (!best.v || cost < least) best.v = v, best.mc = mc, least = cost;
        }
    return best;
}

/* The map of a row-major bf16 matrix, read or written in boxes of box_rows x box_cols; box_cols 64, 32 or 16, swizzled over
 * the box's row. */
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

/* Launches any instance: also the LM head's, whose epilogue stands in chapter 11. `params` is the epilogue's; a->y is used
 * only where the instance stages output for it. */
static void gemm_start(toka_device *d, gemm_plan plan, const gemm_args *a, const void *params) {
    const gemm_variant *v = plan.v;
    int M = a->M, N = a->w->N, K = a->w->K, cols = v->kind == EPI_SWIGLU ? N / 2 : N, per_cluster = plan.mc * v->split;
    assert(M > 0 && N % 8 == 0 && K % 8 == 0 && a->ldx % 8 == 0 && (uintptr_t)a->x % 16 == 0 && (uintptr_t)a->w->p % 16 == 0);
    gemm_job job = {M, N, K, ceil_div(M, 128 * plan.mc), ceil_div(N, v->bn), plan.group, plan.mc, 0, 0, 0};
    int last = job.units_m % job.group ? job.units_m % job.group : job.group;
    int units = job.units_m * job.tiles_n, clusters = v->split > 1 ? units : min(units, d->n_sms / per_cluster);
    job.per_group = 1.0f / ((float)job.group * job.tiles_n), job.per_height = 1.0f / job.group, job.per_last = 1.0f / last;
    assert(units < 1 << 22);
    CUtensorMap mx = gemm_map(d, a->x, ceil_div(M, 128) * 128, K, a->ldx, 128, 64), my = mx;
    CUtensorMap mw = gemm_map(d, a->w->p, N, K, K, v->bn / plan.mc, 64);
    if (v->out && a->y) {
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
    launch_as(d, "GEMM", &cfg, (const void *)v->kernel, args);
}

/* Once per device, before the first launch. */
static void gemm_open(toka_device *d) {
    for (int i = 0; i < N_GEMM_VARIANTS && d->hopper; i++) {
        const gemm_variant *v = &gemm_variants[i];
        latch(d, cudaFuncSetAttribute(v->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, v->smem),
              "shared memory of a GEMM");
        if (v->split != 4 || d->n_quads) continue;
        cudaLaunchAttribute four = {};
        four.id = cudaLaunchAttributeClusterDimension;
        four.val.clusterDim.x = 4, four.val.clusterDim.y = four.val.clusterDim.z = 1;
        cudaLaunchConfig_t cfg = {};
        cfg.gridDim = dim3(4), cfg.blockDim = dim3(384), cfg.dynamicSmemBytes = (size_t)v->smem;
        cfg.attrs = &four, cfg.numAttrs = 1;
        latch(d, cudaOccupancyMaxActiveClusters(&d->n_quads, v->kernel, &cfg), "clusters of a GEMM");
    }
}

/* y = epilogue(x W^T), chapter 5's terms. */
static void gemm_wgmma_by(toka_device *d, const gemm_args *a, gemm_plan plan) {
    epi_store::params p = {a->w->bias, a->y, a->ldy}; /* epi_residual's too */
    epi_logits::params f = {(float *)a->y, a->ldy};
    assert(a->epi != EPI_SWIGLU || (!a->w->bias && a->w->N % 16 == 0));
    assert(a->epi != EPI_LOGITS || (!a->w->bias && a->ldy % 2 == 0));
    gemm_start(d, plan, a, a->epi == EPI_LOGITS ? (void *)&f : (void *)&p);
}
static void gemm_wgmma(toka_device *d, const gemm_args *a) {
    gemm_wgmma_by(d, a, gemm_pick(d, a->epi, a->M, a->w->N, a->w->K, false));
}

/* q, K and V of M rows; head size D 64 or 128. */
static gemm_plan gemm_qkv_pick(const toka_device *d, int M, const weight *w, const qkv_params *p) {
    int heads = p->H + 2 * p->K;
    return gemm_pick(d, w->N == 64 * heads ? GEMM_QKV64 : GEMM_QKV128, M, w->N, w->K, qkv_has_norms(p));
}
/* Whether that beats EPI_STORE, whose tiles may be of more widths, and a kernel that reads and writes the result once more. */
static bool gemm_qkv_pays(const toka_device *d, int M, const weight *w, const qkv_params *p) {
    gemm_plan fused = gemm_qkv_pick(d, M, w, p), plain = gemm_pick(d, EPI_STORE, M, w->N, w->K, false);
    /* in whole tiles, as all of it: the choice is the same for each M of one */
    double after = 4000 + 4.0 * ceil_div(M, 128) * 128 * w->N / 1500;
    return gemm_cost(d, fused.v, fused.mc, M, w->N, w->K) < gemm_cost(d, plain.v, plain.mc, M, w->N, w->K) + after;
}
static void gemm_wgmma_qkv_by(toka_device *d, int M, const bf16 *x, int ldx, const weight *w, const qkv_params *p,
                              gemm_plan plan) {
    gemm_args a = {.M = M, .x = x, .ldx = ldx, .w = w};
    int D = plan.v->kind == GEMM_QKV64 ? 64 : 128;
    assert(w->N == (p->H + 2 * p->K) * D && (p->B & (p->B - 1)) == 0 && (!qkv_has_norms(p) || gemm_holds_heads(plan.v)));
    (void)D;
    gemm_start(d, plan, &a, p);
}
static void gemm_wgmma_qkv(toka_device *d, int M, const bf16 *x, int ldx, const weight *w, const qkv_params *p) {
    gemm_wgmma_qkv_by(d, M, x, ldx, w, p, gemm_qkv_pick(d, M, w, p));
}

/* x W^T, whose rows go to n boxes, `share` to each (see epi_scatter); a->y and a->epi are not used. */
static void gemm_wgmma_scatter_by(toka_device *d, const gemm_args *a, bf16 *const *boxes, int n, int share, gemm_plan plan) {
    const int M = a->M, N = a->w->N;
    gemm_args product = *a;
    product.y = NULL;
    epi_scatter::params p = {};
    assert(n <= MEET_RANKS && share % 16 == 0 && n * share >= M);
    for (int q = 0; q < n && q * share < M; q++) /* the last box may get less, and those behind it nothing */
        p.to[q] = gemm_map(d, boxes[q], min(share, M - q * share), N, N, 16, gemm_panel(plan.v->out));
    p.bias = a->w->bias, p.share = share;
    gemm_start(d, plan, &product, &p);
}
static void gemm_wgmma_scatter(toka_device *d, const gemm_args *a, bf16 *const *boxes, int n, int share) {
    gemm_wgmma_scatter_by(d, a, boxes, n, share, gemm_pick(d, GEMM_SCATTER, a->M, a->w->N, a->w->K, false));
}

/* ===========================================================================
 * MARK: 7. GEMM for few rows, and the choice [kernel]
 * =========================================================================== */

/* ---- y[M][N] = x[M][K] W[N][K]^T for few rows, on wgmma with the sides swapped ----
 *
 * in, out as in chapter 5; M <= ROWS (8, 16, 32, 64). W is read once and is all that counts: 2NK bytes. So W is the 64-row operand
 * of wgmma and the rows of x are its columns: D[n][m], of which a few rows waste little. A CTA has 64 rows of W, one consumer
 * warpgroup and two producer warps, which keep a ring of slices of 64 columns of K in flight: 64 rows of W, 128 bytes each, then
 * ROWS rows of x, both with the 128-byte swizzle; what lies outside the matrices arrives as zeros. The ring fills with W before
 * grid_wait(), while the kernel ahead still runs, and is small enough for the CTAs of the next kernel to do the same beside this
 * one. Where W has too few rows for all multiprocessors, `split` CTAs of a cluster share a tile's K. Each gets the sums of 1/split
 * of the rows of x from the registers of all others, adds the parts in the order of K (bitwise repeatable) and puts them out. None
 * leaves before what it expects has come, so nobody sends to one that has left.
 *
 * grid: tiles of 64 rows of W times split, in clusters of split; block: 192; shared: the ring and what comes, 112 KB at most, for
 * two CTAs a multiprocessor (256 bytes beside it, declared static, take 1 KB, and leave room for one: 64 rows 8 % slower). On
 * an H200 (2026-11-22) it reads W at 95 to 99 % of what a plain read reaches where that takes 20 us or more and x has few rows. In
 * a chain each launch costs about 2.5 us that nothing hides: 1 from the last CTA's end until grid_wait() returns in the next
 * kernel, 0.3 to 0.5 for the first x, the sum over the cluster, the stores and the end. Retired: sums left in shared memory
 * between cluster barriers and read from there (the barriers fence to the whole GPU): 2 to 3 us for the sum instead of 1. Bulk
 * copies of the sums, into the peers' rings, which first must say that they are free, or into this room: as fast or 2 to 4 %
 * slower (64 rows). Slices of W and of x in rings of their own, so that more of W is fetched ahead: 1 us slower up to 32 rows, for
 * the thread that fetches x then also says how many bytes come, and 5 % where K is long. 128 rows of x (24 to 35 % of the
 * bandwidth where gemm_wgmma has 28 to 45). 128 rows of W a CTA (fewer reads of x, but two thirds of the speed where fewer
 * multiprocessors then work); neighbouring tiles, two or four, that fetch x together by multicast (as fast at best); rings of 54
 * and 72 KB, for three kernels side by side (slower); fetching the start of the next kernel's W into the L2 cache (its ring holds
 * that already), or the rest of a CTA's own while it waits for x (1B, one row, a step: 813 us; 8 KB of each every 0.25 us 820, all
 * at once 832; what the next kernel needs first, behind the last of its own, 821 to 827: the L2 cache gives hardly more bytes than
 * memory does); each tile from another slice of K on (2 to 20 % slower: CTAs no longer read the same x together); the first x
 * asked for by four warps, four sums side by side from 32 rows on (0 to 4 % slower); slices of 128 columns, fetched as two boxes
 * or as one of three dimensions (as fast up to 32 rows, 64 rows 5 to 11 % slower); x as the 64 rows, 16 or 32 rows of W and all of
 * K, so that no sums meet (6.5 us for 5.3: o of the 1B model, 64 rows; 7.2 for 6.0: qkv); one producer for W and x (half the
 * speed: its loop took longer than the copies). With clusters placed as now (2026-11-24): rings and barriers apart for W and x (0
 * to 15 % slower), and such of 72 KB, three CTAs a multiprocessor (slower but for 6144 x 4096 in four parts, 16 rows 77 -> 87 %);
 * norms folded in for more than 8 rows, sums of 64 columns left by this kernel (1B, 64 sequences 58,170 -> 52,720 tokens a second,
 * 32 33,460 -> 31,610, for each CTA of gate_up reads all rows' sums; ahead of qkv alone 57,680 and 34,050). */

/* EPI_QKV, here and in gemm_thin: the row of D elements of q, or of the pages of K and V, that is head h of row m. */
__device__ static inline size_t qkv_row(const qkv_params &p, int m, int h) {
    int slot = p.slot[m], kv_head = h < p.H + p.K ? h - p.H : h - p.H - p.K;
    return h < p.H ? (size_t)m * p.H + h : (((size_t)(slot / p.B) * p.K + kv_head) * 2 + (h >= p.H + p.K)) * p.B + slot % p.B;
}

/* gemm_few_kernel with qkv_params is for EPI_QKV, with few_nothing for all others: as a branch of one kernel it made one row of the
 * 1B model, which does not take it, 0.9 % slower (0.749 -> 0.756 ms a step, H200, 2026-11-24). */
typedef struct few_nothing {
} few_nothing;
template <class P> constexpr bool few_turns = false;
template <> constexpr bool few_turns<qkv_params> = true;

enum { FEW_K = 64, FEW_N = 64, FEW_THREADS = 192, FEW_W = FEW_N * FEW_K * 2 /* bytes of W in a stage; x lies behind */ };
enum { FEW_ROW = FEW_N * 4 /* bytes of sums of a row of x */, FEW_BLOCK = 8 * FEW_ROW /* of 8 rows */ };
enum { FEW_STAGES = 12 /* at most */ };
enum { FEW_NORMED = 4 /* CTAs of a cluster with QK-norm, at most: larger ones do not all run at once */ };
template <int ROWS> struct few_ring {
    enum { STAGE = FEW_W + ROWS * FEW_K * 2, BARS = 16 * FEW_STAGES + 16 /* full and empty per stage, sums */ };
    static_assert(3 * STAGE >= 2 * ROWS * FEW_ROW, "a part's own sums take the ring's place, and what is put out, too");
};
/* What comes from the other parts, for up to `rows` rows of x; stages of the ring beside it. */
__host__ __device__ constexpr int few_guests(int rows, int split) {
    return (split - 1) * ((rows + 8 * split - 1) / (8 * split)) * FEW_BLOCK;
}
template <int ROWS> __host__ __device__ constexpr int few_stages(int split) {
    int fit = (112 * 1024 - few_guests(ROWS, split)) / few_ring<ROWS>::STAGE;
    return fit < FEW_STAGES ? fit : FEW_STAGES;
}

#if HOPPER
typedef struct few_place { /* where a CTA works */
    int n0, kb0, n_kb;     /* its rows of W, its slices of K */
    int part, split;       /* its rank in the cluster, of how many */
    int each, m0, rows;    /* blocks of 8 rows of x whose sums a part adds up and puts out; this one's rows */
    int stages;
    uint32_t ring, guests, full, empty;
    uint32_t sums;         /* barrier: those of the others have come */
    int peer0;             /* rank in the cluster of its tile's first part: not 0 in the second of two tiles of a head */
    uint32_t norms, squares; /* with QK-norm: barrier, and what comes of the head's other tile, 8 bytes a row */
} few_place;

template <int ROWS> __device__ static inline few_place few_where(uint32_t ring, int M, int K, int split) {
    int slices = (K + FEW_K - 1) / FEW_K;
    few_place w;
    w.part = (int)blockIdx.x % split, w.split = split, w.n0 = (int)blockIdx.x / split * FEW_N;
    w.kb0 = slices * w.part / split, w.n_kb = slices * (w.part + 1) / split - w.kb0;
    w.stages = few_stages<ROWS>(split), w.ring = ring, w.guests = ring + w.stages * few_ring<ROWS>::STAGE;
    w.full = w.guests + few_guests(ROWS, split), w.empty = w.full + 8 * FEW_STAGES, w.sums = w.empty + 8 * FEW_STAGES;
    w.norms = w.sums + 8, w.squares = w.sums + 16, w.peer0 = 0;
    w.each = (M + 8 * split - 1) / (8 * split), w.m0 = 8 * w.each * w.part, w.rows = max(min(8 * w.each, M - w.m0), 0);
    return w;
}

/* One thread fetches W: as much as there is room for before the kernel ahead has ended. It also announces the bytes of x. */
template <int ROWS> __device__ static inline void few_fetch_w(const CUtensorMap *map, const few_place &w) {
    int s = 0, parity = 1;
    for (int i = 0; i < w.n_kb; i++) {
        mbar_wait(w.empty + 8 * s, parity);
        mbar_expect_tx(w.full + 8 * s, few_ring<ROWS>::STAGE);
        tma_load_2d_once(w.ring + s * few_ring<ROWS>::STAGE, map, w.full + 8 * s, (w.kb0 + i) * FEW_K, w.n0);
        if (++s == w.stages) s = 0, parity ^= 1;
    }
}
/* Another fetches x. */
template <int ROWS> __device__ static inline void few_fetch_x(const CUtensorMap *map, const few_place &w) {
    int s = 0, parity = 0, ahead = min(w.stages, w.n_kb);
    uint32_t ring = w.ring + FEW_W;
    tma_prefetch_map(map);
    grid_wait();
    for (int i = 0; i < ahead; i++) tma_load_2d(ring + i * few_ring<ROWS>::STAGE, map, w.full + 8 * i, (w.kb0 + i) * FEW_K, 0);
    for (int i = ahead; i < w.n_kb; i++) {
        mbar_wait(w.empty + 8 * s, parity);
        tma_load_2d(ring + s * few_ring<ROWS>::STAGE, map, w.full + 8 * s, (w.kb0 + i) * FEW_K, 0);
        if (++s == w.stages) s = 0, parity ^= 1;
    }
}

/* The warpgroup: acc[n][m] = its rows of W times x. A wgmma of few columns is issued faster than the one before has accumulated,
 * so CHAINS independent sums are kept and added at the end. */
template <int ROWS, int CHAINS> __device__ static inline void few_multiply(float (&acc)[CHAINS][ROWS / 2], const few_place &w) {
    int s = 0, parity = 0, last = 0;
    for (int i = 0; i < w.n_kb; i++) {
        uint32_t at = w.ring + s * few_ring<ROWS>::STAGE;
        uint64_t a = wgmma_desc(at), b = wgmma_desc(at + FEW_W);
        mbar_wait(w.full + 8 * s, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < FEW_K / 16; k++) wgmma_ss<ROWS>(acc[k % CHAINS], a + 2 * k, b + 2 * k, 1);
        wgmma_commit();
        wgmma_wait<1>(); /* the slice before is done with */
        if (i > 0 && threadIdx.x == 0) mbar_arrive(w.empty + 8 * last);
        last = s;
        if (++s == w.stages) s = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < CHAINS; k++) wgmma_keep(acc[k]);
#pragma unroll
    for (int i = 0; i < ROWS / 2 * (CHAINS - 1); i++) acc[0][i % (ROWS / 2)] += acc[1 + i / (ROWS / 2)][i % (ROWS / 2)];
}

/* ---- The sums meet ----
 *
 * Block j is 8 rows of x, 64 of W: acc[4j .. 4j+3] of 128 threads. A part gets the others' of its own blocks as
 * [sender][block][thread] x 16 bytes, in room that is nothing else's: nobody need say that he is ready. What is put out lies as
 * [rows][FEW_N] floats, of row m the groups of 8 exchanged so that the 32 lanes of a store meet 32 banks. */

__device__ static inline uint32_t few_sum_at(int m, int n) { return (uint32_t)(m * FEW_ROW + (n ^ (m >> 1 & 3) << 3) * 4); }

__device__ static inline uint32_t few_guest(const few_place &w, int from, int to) {
    return w.guests + (uint32_t)((from - (from > to)) * w.each * FEW_BLOCK) + threadIdx.x * 16;
}
/* To each other part its blocks. */
template <int ROWS> __device__ static inline void few_send(const float (&acc)[ROWS / 2], const few_place &w, int M) {
    int to = 0, first = 0;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (j == first + w.each) to++, first = j;
        if (to != w.part && 8 * j < M)
            send_to_peer(peer_at(few_guest(w, w.part, to) + (j - first) * FEW_BLOCK, w.peer0 + to), acc + 4 * j,
                         peer_at(w.sums, w.peer0 + to));
    }
}
/* Four sums of block j of this part's to where they are put out from. */
__device__ static inline void few_stage(const few_place &w, int j, const float v[4]) {
    int lane = (int)threadIdx.x % 32, n = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) smem_store_float(w.ring + few_sum_at(j * 8 + lane % 4 * 2 + i % 2, n + i / 2 * 8), v[i]);
}
/* This part's blocks, the parts of K added in their order. Its own lie where the ring was. */
template <int ROWS> __device__ static inline void few_add(const float (&acc)[ROWS / 2], const few_place &w) {
    uint32_t own = w.ring + ROWS * FEW_ROW + threadIdx.x * 16;
    int first = w.part * w.each;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
        if (w.split == 1) few_stage(w, j, acc + 4 * j);
        else if (j >= first && j < first + w.each) smem_store_floats(own + (j - first) * FEW_BLOCK, acc + 4 * j);
    }
    if (w.split == 1) return;
    mbar_wait(w.sums, 0);
    for (int j = 0; 8 * j < w.rows; j++) {
        float v[4] = {};
#pragma unroll 4
        for (int q = 0; q < w.split; q++) {
            float4 p = smem_load_floats((q == w.part ? own : few_guest(w, q, w.part)) + j * FEW_BLOCK);
            v[0] += p.x, v[1] += p.y, v[2] += p.z, v[3] += p.w;
        }
        few_stage(w, j, v);
    }
}

/* ---- Its epilogue: 8 outputs of a row at a time ---- */

/* The item-th piece of this thread: row *m and column *n of the tile's (gates and ups, and both halves of a head, counted both).
 * False: there is none. */
template <class P> __device__ static inline bool few_item(const gemm_call &c, const few_place &w, int item, int *m, int *n) {
    int gated = few_turns<P> || c.epi == EPI_SWIGLU, per_row_log2 = 3 - gated, i = item * FEW_THREADS + (int)threadIdx.x;
    *m = w.m0 + (i >> per_row_log2), *n = (i & (1 << per_row_log2) - 1) * (8 << gated);
    return i < w.rows << per_row_log2 && w.n0 + *n < c.N;
}
/* v = columns n .. n+7 of row m, times scale. */
__device__ static inline void few_sum(float v[8], const few_place &w, int m, int n, float scale) {
    uint32_t at = w.ring + few_sum_at(m - w.m0, n);
    float4 a = smem_load_floats(at), b = smem_load_floats(at + 16);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= scale;
}
__device__ static inline void few_bias(float v[8], const float *bias, int n) {
    if (!bias) return;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] += bias[n + i];
}
/* The sums of 8 outputs; SWIGLU's are final. */
__device__ static inline void few_value(float v[8], const gemm_call &c, const few_place &w, int m, int n, float scale) {
    float up[8];
    few_sum(v, w, m, n, scale);
    if (c.epi != EPI_SWIGLU) return;
    few_sum(up, w, m, n + 8, scale);
    few_bias(v, c.bias, w.n0 + n);
    few_bias(up, c.bias, w.n0 + n + 8);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = swiglu(v[k], up[k]);
}
__device__ static inline void few_put(float v[8], const gemm_call &c, const few_place &w, int m, int n, uint4 old) {
    int gated = c.epi == EPI_SWIGLU;
    if (!gated) few_bias(v, c.bias, w.n0 + n);
    if (c.epi == EPI_RESIDUAL) {
        v[0] += bf16_low(old.x), v[1] += bf16_high(old.x), v[2] += bf16_low(old.y), v[3] += bf16_high(old.y);
        v[4] += bf16_low(old.z), v[5] += bf16_high(old.z), v[6] += bf16_low(old.w), v[7] += bf16_high(old.w);
    }
    *(uint4 *)(c.y + (size_t)m * c.ldy + (w.n0 + n >> gated)) = pack_8(v);
}
/* EPI_QKV: eight elements of the first half of a head of row m, and the eight of its second half: where they go, and how they are
 * turned. Reads nothing that a kernel of the step writes. */
typedef struct few_pair {
    bf16 *to;
    const float4 *turn; /* cosine, sine of each; NULL: of a head of V */
} few_pair;
__device__ static inline few_pair few_pair_at(const qkv_params &p, int m, int n) { /* n: a column of the first half, by turns */
    const int h = n / p.D, i = n % p.D / 16 * 8;
    const size_t row = qkv_row(p, m, h);
    const float4 *turn = (const float4 *)(p.rope + (size_t)p.pos[m] * (p.D / 2) + i);
    return few_pair{(h < p.H ? p.q : p.kv) + row * p.D + i, h < p.H + p.K ? turn : NULL};
}
/* Columns n .. n+7 of row m, and the eight that lie behind them, with the bias. */
__device__ static inline void few_both(float v[8], float u[8], const gemm_call &c, const few_place &w, int m, int n, float scale) {
    few_sum(v, w, m, n, scale);
    few_sum(u, w, m, n + 8, scale);
    few_bias(v, c.bias, w.n0 + n);
    few_bias(u, c.bias, w.n0 + n + 8);
}
__device__ static inline void few_put_turned(float v[8], float u[8], const few_pair &pair, const float4 turn[4], int half) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float cs = k % 2 ? turn[k / 2].z : turn[k / 2].x, sn = k % 2 ? turn[k / 2].w : turn[k / 2].y, a = v[k];
        v[k] = a * cs - u[k] * sn, u[k] = u[k] * cs + a * sn;
    }
    *(uint4 *)pair.to = pack_8(v), *(uint4 *)(pair.to + half) = pack_8(u);
}
__device__ static inline void few_put_logits(const float v[8], const gemm_call &c, const few_place &w, int m, int n) {
    float4 *to = (float4 *)((float *)c.y + (size_t)m * c.ldy + w.n0 + n);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
}

/* QK-norm, for up to 8 rows: a thread has one piece at most, and four of them are a row. The weights of its columns; w NULL: the
 * tile's head has no norm. */
typedef struct few_norm {
    const float *w;
    float lo[8], hi[8];
} few_norm;
__device__ static inline few_norm few_norm_of(const qkv_params &p, int n) { /* n: a column of the first half, by turns */
    const int h = n / p.D, i = n % p.D / 16 * 8;
    few_norm r = {h < p.H ? p.q_norm : h < p.H + p.K ? p.k_norm : NULL};
#pragma unroll
    for (int k = 0; k < 8; k++) r.lo[k] = r.w ? r.w[i + k] : 1, r.hi[k] = r.w ? r.w[p.D / 2 + i + k] : 1;
    return r;
}
/* Of two tiles of a head each sends the other its rows' sums of squares. All threads come; there: this one has a piece of row m. */
__device__ static inline void few_normalize(float v[8], float u[8], bool there, int m, const few_norm &norm, const qkv_params &p,
                                            const few_place &w) {
    const int other = w.split - w.peer0 + w.part;
    const uint32_t at = w.squares + 8 * (m - w.m0);
    const bool two = p.D > FEW_N;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8 && there; k++) sum += v[k] * v[k] + u[k] * u[k];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (two && there && threadIdx.x % 4 == 0) send_pair_to_peer(peer_at(at, other), sum, 0, peer_at(w.norms, other));
    if (two) mbar_wait(w.norms, 0);
    if (two && there) sum += smem_load_float(at);
    const float scale = rsqrtf(sum / p.D + p.eps);
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] *= scale * norm.lo[k], u[k] *= scale * norm.hi[k];
}
#endif

template <int ROWS, class P, bool NORMED>
__global__ static void __launch_bounds__(FEW_THREADS, 2)
gemm_few_kernel(const __grid_constant__ CUtensorMap map_w, const __grid_constant__ CUtensorMap map_x, const gemm_call c,
                int split, const P p) {
#if HOPPER
    constexpr int ITEMS = (ROWS * FEW_N / 8 + FEW_THREADS - 1) / FEW_THREADS;
    constexpr int TURNS = few_turns<P> ? (ROWS * FEW_N / 16 + FEW_THREADS - 1) / FEW_THREADS : 0; /* pieces of EPI_QKV */
    extern __shared__ __align__(1024) char few_smem[];
    few_place w = few_where<ROWS>(smem_at(few_smem), c.M, c.K, split);
    int m, n, tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    uint4 old[ITEMS]; /* what a residual is added to is fetched ahead */
    few_pair pair[TURNS + 1];
    float4 turn[TURNS + 1][4];
    __shared__ float scales[FOLD_ROWS];
    int cluster = split;
    if constexpr (NORMED) cluster = p.D / FEW_N * split, w.peer0 = (int)blockIdx.x % cluster - w.part;

    if (tid == 0) {
        for (int i = 0; i < w.stages; i++) mbar_init(w.full + 8 * i, 1), mbar_init(w.empty + 8 * i, 1);
        mbar_init(w.sums, 1), mbar_init(w.norms, 1);
        mbar_init_fence();
        mbar_expect_tx(w.sums, (split - 1) * ((w.rows + 7) / 8) * FEW_BLOCK);
        if (NORMED) mbar_expect_tx(w.norms, 8 * w.rows);
    }
    __syncthreads();
    grid_launch_dependents();
    if (cluster > 1) cluster_meet_arrive(); /* the others may know that the barriers are there */
    if (warp == 4 && lane == 0) few_fetch_w<ROWS>(&map_w, w);
    if (warp == 5 && lane == 0) few_fetch_x<ROWS>(&map_x, w);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < TURNS; i++)
        if constexpr (few_turns<P>)
            if (few_item<P>(c, w, i, &m, &n)) pair[i] = few_pair_at(p, m, w.n0 + n);
    few_norm norm;
    if constexpr (NORMED) norm = few_norm_of(p, w.n0 + tid % 4 * 16);
    if (c.bias && tid < FEW_N / 32 && w.n0 + 32 * tid < c.N) l2_prefetch(c.bias + w.n0 + 32 * tid);
    grid_wait();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (c.epi == EPI_RESIDUAL && few_item<P>(c, w, i, &m, &n)) old[i] = *(uint4 *)(c.y + (size_t)m * c.ldy + w.n0 + n);
    fold_part squares = {};
    if (ROWS == FOLD_ROWS && c.fold.given && warp < c.M) squares = fold_begin(c.fold, warp, lane);
    constexpr int CHAINS = ROWS <= 16 ? 4 : 2;
    float acc[CHAINS][ROWS / 2] = {};
    if (warp < 4) few_multiply<ROWS, CHAINS>(acc, w);
    for (int i = warp; ROWS == FOLD_ROWS && c.fold.given && i < c.M; i += FEW_THREADS / 32) {
        if (i > warp) squares = fold_begin(c.fold, i, lane);
        float scale = fold_end(c.fold, i, lane, squares);
        if (lane == 0) scales[i] = scale;
    }
    __syncwarp();
    if (cluster > 1) cluster_meet_wait();
    if (split > 1 && warp < 4) few_send<ROWS>(acc[0], w, c.M);
#pragma unroll
    for (int i = 0; i < 4 * TURNS; i++) /* while the sums are on their way */
        if (few_item<P>(c, w, i / 4, &m, &n))
            turn[i / 4][i % 4] = pair[i / 4].turn ? pair[i / 4].turn[i % 4] : make_float4(1, 0, 1, 0);
    __syncthreads(); /* nobody reads the ring any more, and all that was to come has come */
    if (warp < 4) few_add<ROWS>(acc[0], w);
    __syncthreads();
    const bool scaled = ROWS == FOLD_ROWS && c.fold.given;
    if constexpr (few_turns<P>) {
#pragma unroll
        for (int i = 0; i < TURNS; i++) {
            float v[8], u[8];
            const bool there = few_item<P>(c, w, i, &m, &n);
            if (there) few_both(v, u, c, w, m, n, scaled ? scales[m] : 1);
            if constexpr (NORMED)
                if (norm.w) few_normalize(v, u, there, m, norm, p, w);
            if (there) few_put_turned(v, u, pair[i], turn[i], p.D / 2);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            float v[8];
            if (!few_item<P>(c, w, i, &m, &n)) continue;
            few_value(v, c, w, m, n, scaled ? scales[m] : 1);
            if (c.epi == EPI_LOGITS) few_put_logits(v, c, w, m, n);
            else few_put(v, c, w, m, n, old[i]);
        }
    }
#else
    __trap();
#endif
}

template <int ROWS, class P, bool NORMED>
static void gemm_few_start(toka_device *d, const gemm_args *a, int split, int pair, const P &p) {
    gemm_call c = gemm_checked(a);
    c.fold = fold_of(d, a);
    assert(c.M <= ROWS && split * pair <= 8 && !a->norm);
    const int smem = few_stages<ROWS>(split) * few_ring<ROWS>::STAGE + few_guests(ROWS, split) + few_ring<ROWS>::BARS;
    launch_dependent(d, "GEMM (few rows)", gemm_few_kernel<ROWS, P, NORMED>, dim3((unsigned)(ceil_div(c.N, FEW_N) * split)),
                     FEW_THREADS, smem + (NORMED ? 8 * ROWS : 0), split * pair, gemm_map(d, c.w, c.N, c.K, c.K, FEW_N, FEW_K),
                     gemm_map(d, c.x, ROWS, c.K, c.ldx, ROWS, FEW_K), c, split, p);
}
template <int ROWS> static void gemm_few_tile(toka_device *d, const gemm_args *a, int split) {
    const bool normed = a->epi == EPI_QKV && qkv_has_norms(a->qkv);
    assert(!normed || ROWS == FOLD_ROWS);
    if (a->epi != EPI_QKV) gemm_few_start<ROWS, few_nothing, false>(d, a, split, 1, few_nothing{});
    else if (!normed) gemm_few_start<ROWS, qkv_params, false>(d, a, split, 1, *a->qkv);
    else gemm_few_start<FOLD_ROWS, qkv_params, true>(d, a, split, a->qkv->D / FEW_N, *a->qkv);
}
/* How many CTAs share a tile's K: as many as run at once, two a multiprocessor, but eight only where these have one each; and each
 * has three slices of K or more. Where somewhat more tiles than multiprocessors would leave many of these idle, a long K is halved;
 * where a long K's parts would leave more idle than eight do, it is in eight. Shares of the time to read W, 16 rows, in 1, 2, 4 and
 * 8 parts (H200, 2026-11-24 and 25): 50, 67, 69, 48 (3072 x 2048), 37, 46, 71, 35 (2048 x 2048), 66, 82, 77, 70 (6144 x 4096), 69,
 * 74, 83, 62 (4096 x 4096), 20, 35, 46, 54 (896 x 4864), 73, 46, 41, 24 (9728 x 896), 84, 74, 85, 92 (5120 x 17408), 80, 73, 79, 82
 * (5120 x 8192), 41, 59, 65, 73 (1536 x 8960), 73, 79, 88, 92 (3584 x 18944), 68, 68, 80, 76 (3072 x 8192), 82, 85, 91, 78 (4096 x
 * 12288). Eight parts, a step of 16 sequences: Qwen3-14B 7.85 -> 7.78 ms, Qwen2.5-1.5B 1.411 -> 1.381. */
static double few_busy(int ctas, int at_once) { return (double)ctas / (ceil_div(ctas, at_once) * at_once); } /* of the time */
static int gemm_few_split(const toka_device *d, int N, int K) {
    int tiles = ceil_div(N, FEW_N), slices = ceil_div(K, FEW_K), split = 1, two = 2 * d->n_sms;
    while (split < 8 && 2 * split * tiles <= d->n_sms * (split < 4 ? 2 : 1)) split *= 2;
    while (split > 1 && slices < 3 * split) split /= 2;
    if (tiles > d->n_sms) return 2 * tiles < 3 * d->n_sms && slices >= 64 ? 2 : split;
    const int eights = max(two - 24, 8); /* CTAs that run at once in clusters of eight, which do not fill all parts of the GPU */
    return slices >= 128 && few_busy(8 * tiles, eights) > few_busy(split * tiles, two) + 0.075 ? 8 : split;
}
static void gemm_few(toka_device *d, const gemm_args *a) {
    int split = gemm_few_split(d, a->w->N, a->w->K);
    if (a->epi == EPI_QKV && qkv_has_norms(a->qkv)) split = min(split, FEW_NORMED / (a->qkv->D / FEW_N));
    if (a->M <= 8) gemm_few_tile<8>(d, a, split);
    else if (a->M <= 16) gemm_few_tile<16>(d, a, split);
    else if (a->M <= 32) gemm_few_tile<32>(d, a, split);
    else gemm_few_tile<64>(d, a, split);
}

/* ---- y[M][N] = x[M][K] W[N][K]^T for up to 16 rows, on mma.sync with the sides swapped ----
 *
 * in, out as in chapter 5, not LOGITS; M <= ROWS (8, 16). It also does what a chain of few rows needs beside the products: RoPE
 * and the pages of K and V (EPI_QKV), the norms (norm_fold). Where W is read in a few microseconds, what counts is the time from
 * the end of the kernel ahead to the end of this one. So there is no cluster and few steps: a CTA has only 16 rows of W, the
 * side m16 of mma.sync, and all of K, of which its eight warps take slices of 64 columns by turns. Each warp has its own ring of
 * slices, so that nobody waits for anybody until the eight sums meet in shared memory and are added in the order of the warps. The
 * rings hold the whole K up to 2,048 columns (ROWS 8), and are filled with W before grid_wait(). Behind K nothing is fetched:
 * zeros take as long as columns (0.5 to 1 us). A slice is 16 rows of W, then ROWS rows of x, 128 bytes each, 16-byte chunk c of
 * row r at c ^ r%8. That W leaves the L2 cache first gains 3 % of a step (1B, one row, H200, 2026-11-22: 799 -> 777 us; 8 rows 837
 * -> 819), for then everything else stays there. Retired: x from the L2 cache to registers, and six stages of W instead of four of
 * both: 785 us, and 980 with 8 rows.
 *
 * grid: 16 rows of W each; block: 256; shared: 96 KB; 2NK bytes. Rings of 48 KB for four CTAs a multiprocessor: slower but where
 * many CTAs read little each, and there gemm_few is faster still. */

enum { THIN_N = 16, THIN_K = 64, THIN_WARPS = 8, THIN_PITCH = THIN_N + 4 /* floats from row to row of the sums */ };
template <int ROWS> struct thin_ring {
    enum { STAGE = (THIN_N + ROWS) * THIN_K * 2, STAGES = 96 * 1024 / THIN_WARPS / STAGE, SMEM = THIN_WARPS * STAGES * STAGE };
};

/* W's rows row0 .. row0+15, columns k0 .. k0+63 of K, by one warp; and those columns of x. */
__device__ static inline void thin_load_w(uint32_t to, const gemm_call &c, int row0, int k0, int lane, uint64_t once) {
    int k = k0 + lane % 8 * 8;
#pragma unroll
    for (int r = lane / 8; r < THIN_N; r += 4) {
        bool inside = row0 + r < c.N && k < c.K;
        cp_async_16_once(to + r * 128 + ((lane ^ r) % 8) * 16, inside ? c.w + (size_t)(row0 + r) * c.K + k : c.w,
                         inside ? 16 : 0, once);
    }
}
template <int ROWS> __device__ static inline void thin_load_x(uint32_t to, const gemm_call &c, int k0, int lane) {
    int k = k0 + lane % 8 * 8;
#pragma unroll
    for (int r = lane / 8; r < ROWS; r += 4) {
        bool inside = r < c.M && k < c.K;
        cp_async_16(to + r * 128 + ((lane ^ r) % 8) * 16, inside ? c.x + (size_t)r * c.ldx + k : c.x, inside ? 16 : 0);
    }
}
/* acc[m block][.] += one slice. */
template <int ROWS> __device__ static inline void thin_multiply(float acc[ROWS / 8][4], uint32_t at, int lane) {
    uint32_t a[4][4], b[ROWS / 4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix_x4(a[k], at + lane % 16 * 128 + (((2 * k + lane / 16) ^ lane) % 8) * 16);
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) /* 8 rows of x, 32 columns at a time */
#pragma unroll
        for (int k = 0; k < 2; k++)
            ldmatrix_x4(b[2 * i + k], at + (THIN_N + 8 * i + lane % 8) * 128 + (((4 * k + lane / 8) ^ lane) % 8) * 16);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) mma_16816(acc[i], a[k], b[2 * i + k / 2] + k % 2 * 2);
}

/* Columns n and n+1 of row m with RESIDUAL, and what the norm that follows needs of them: w, its two weights. All threads come;
 * the 8 of a row lie side by side. */
__device__ static inline void thin_put_normed(const gemm_call &c, bool puts, int m, int n, float2 v, uint32_t old, float2 w) {
    uint32_t y = 0;
    if (puts) {
        if (c.bias) v.x += c.bias[n], v.y += c.bias[n + 1];
        y = pack_bf16(v.x + bf16_low(old), v.y + bf16_high(old));
        *(uint32_t *)(c.y + (size_t)m * c.ldy + n) = y;
        *(uint32_t *)(c.fold.xw + (size_t)m * c.N + n) = pack_bf16(bf16_low(y) * w.x, bf16_high(y) * w.y);
    }
    float sum = bf16_low(y) * bf16_low(y) + bf16_high(y) * bf16_high(y);
    for (int s = 4; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
    if (threadIdx.x % 8 == 0 && m < c.M) c.fold.squares[m * c.fold.n + (int)blockIdx.x] = sum;
}

/* EPI_QKV: the pairs of element i and i + D/2, and of the next two, of a head of row m: where they go and how they are turned.
 * Reads nothing that a kernel of the step writes. */
typedef struct thin_pair {
    bf16 *to;
    float4 turn; /* cosine, sine of either */
} thin_pair;
__device__ static inline thin_pair thin_pair_at(const qkv_params &p, int m, int n) { /* n: a column of the first half, by turns */
    int h = n / p.D, i = n % p.D / 16 * 8 + n % 8;
    size_t row = qkv_row(p, m, h);
    float4 turn = h < p.H + p.K ? *(const float4 *)(p.rope + (size_t)p.pos[m] * (p.D / 2) + i) : make_float4(1, 0, 1, 0);
    return thin_pair{(h < p.H ? p.q : p.kv) + row * p.D + i, turn};
}
__device__ static inline void thin_put_turned(const thin_pair &p, int half, float2 a, float2 b) {
    float4 t = p.turn;
    store_pair(p.to, a.x * t.x - b.x * t.y, a.y * t.z - b.y * t.w);
    store_pair(p.to + half, b.x * t.x + a.x * t.y, b.y * t.z + a.y * t.w);
}

template <int ROWS>
__global__ static void __launch_bounds__(32 * THIN_WARPS, 2) gemm_thin_kernel(const gemm_call c, const qkv_params p) {
    constexpr int STAGE = thin_ring<ROWS>::STAGE, STAGES = thin_ring<ROWS>::STAGES;
    extern __shared__ __align__(128) char thin_smem[];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n0 = (int)blockIdx.x * THIN_N, step = THIN_WARPS * THIN_K;
    uint32_t ring = smem_at(thin_smem) + warp * STAGES * STAGE;
    const uint64_t once = l2_once(); /* x, K and V and instructions stay in the cache */
    float acc[ROWS / 8][4] = {}, *sums = (float *)thin_smem;
    __shared__ float scales[THIN_WARPS];
    bool turns = c.epi == EPI_QKV, gated = turns || c.epi == EPI_SWIGLU; /* then n is a gate's column, its up's is n + 8 */
    int pairs = gated ? 4 : 8, m = (int)threadIdx.x / pairs, n = (int)threadIdx.x % pairs * 2;
    bool puts = m < c.M && n0 + n < c.N;

    grid_launch_dependents();
#pragma unroll
    for (int i = 0; i < STAGES; i++)
        thin_load_w(ring + i * STAGE, c, n0, warp * THIN_K + i * step, lane, once);
    thin_pair pair = {};
    float2 w = {};
    if (puts && turns) pair = thin_pair_at(p, m, n0 + n);
    if (puts && c.fold.w) w = *(const float2 *)(c.fold.w + n0 + n);
    if (c.bias && threadIdx.x == 0) l2_prefetch(c.bias + n0);
    grid_wait();
#pragma unroll
    for (int i = 0; i < STAGES; i++) {
        thin_load_x<ROWS>(ring + i * STAGE + THIN_N * 128, c, warp * THIN_K + i * step, lane);
        cp_async_commit();
    }
    uint32_t old = puts ? gemm_old_pair(c, m, n0 + n) : 0;
    bool scales_row = c.fold.given && warp < c.M; /* this warp sees to row `warp` */
    fold_part squares = {};
    if (scales_row) squares = fold_begin(c.fold, warp, lane);
    for (int k = warp * THIN_K, s = 0; k < c.K; k += step) {
        uint32_t at = ring + s * STAGE;
        cp_async_wait<STAGES - 1>();
        __syncwarp();
        thin_multiply<ROWS>(acc, at, lane);
        __syncwarp();
        if (k + STAGES * step < c.K) { /* zeros cost as much as columns */
            thin_load_w(at, c, n0, k + STAGES * step, lane, once);
            thin_load_x<ROWS>(at + THIN_N * 128, c, k + STAGES * step, lane);
        }
        cp_async_commit();
        if (++s == STAGES) s = 0;
    }
    cp_async_wait<0>();
    if (scales_row) {
        float scale = fold_end(c.fold, warp, lane, squares);
        if (lane == 0) scales[warp] = scale;
    }
    __syncthreads(); /* the sums take the rings' place */
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        sums[(warp * ROWS + i / 4 * 8 + lane % 4 * 2 + i % 2) * THIN_PITCH + lane / 4 + i % 4 / 2 * 8] = acc[i / 4][i % 4];
    __syncthreads();
    if (!puts && !c.fold.w) return;
    float2 v = {}, up = {};
#pragma unroll
    for (int i = 0; i < THIN_WARPS && puts; i++) {
        const float *part = sums + (i * ROWS + m) * THIN_PITCH + n;
        v.x += part[0], v.y += part[1];
        if (gated) up.x += part[8], up.y += part[9];
    }
    if (puts && c.fold.given) v.x *= scales[m], v.y *= scales[m], up.x *= scales[m], up.y *= scales[m];
    if (c.fold.w) {
        thin_put_normed(c, puts, m, n0 + n, v, old, w);
    } else if (turns) {
        if (c.bias) v.x += c.bias[n0 + n], v.y += c.bias[n0 + n + 1], up.x += c.bias[n0 + n + 8], up.y += c.bias[n0 + n + 9];
        thin_put_turned(pair, p.D / 2, v, up);
    } else if (gated) gemm_put_gated(c, m, n0 + n, v.x, v.y, up.x, up.y);
    else gemm_put_pair(c, m, n0 + n, v.x, v.y, old);
}

template <int ROWS> static void gemm_thin_tile(toka_device *d, const gemm_args *a) {
    gemm_call c = gemm_checked(a);
    c.fold = fold_of(d, a);
    assert(c.M <= ROWS && c.epi != EPI_LOGITS && (!a->norm || c.epi == EPI_RESIDUAL) && (c.epi != EPI_QKV || a->qkv));
    launch_dependent(d, "GEMM (up to 16 rows)", gemm_thin_kernel<ROWS>, dim3((unsigned)ceil_div(c.N, THIN_N)), 32 * THIN_WARPS,
                     thin_ring<ROWS>::SMEM, 1, c, a->qkv ? *a->qkv : qkv_params{});
}
static void gemm_thin(toka_device *d, const gemm_args *a) {
    if (a->M <= 8) gemm_thin_tile<8>(d, a);
    else gemm_thin_tile<16>(d, a);
}

/* ---- The choice ---- */

enum { FEW_ALL = 32, FEW_MAX = 64 }; /* up to so many rows W is best the left operand: at every shape, at some shapes */
enum { SAMP_FEW = 16 }; /* up to so many rows, storing all logits with gemm_few beats sampling from tiles of 128 rows */
enum gemm_way { BY_THIN, BY_FEW /* up to here EPI_QKV is done, too */, BY_MMA, BY_WGMMA };

/* Measured on an H200 in chains of one GEMM over weights that no cache holds; shares of the time to read W. gemm_thin against
 * gemm_few, 8 rows, 2026-11-24: 69 : 72 % (N x K 3072 x 2048), 56 : 73 (2048 x 2048), 80 : 76 (2048 x 8192), 81 : 83 (6144 x
 * 4096), 90 : 85 (4096 x 4096), 98 : 94 (4096 x 14336), 43 : 72 (9728 x 896), 42 : 66 (896 x 4864); but thin brings the norm
 * behind it along, and where gemm_few does so, too, and all of the 1B model's qkv and o go there, a step of one row takes 2 to 5 %
 * longer. More of W, 2026-11-25: 86 : 89 (7168 x 5120), 87 : 84 (10240 x 5120), 74 : 84 (12288 x 2048), 89 : 92 (16384 x 3072), 65
 * : 74 (17920 x 1536), 83 : 83 (19456 x 2560), 79 : 84 (22016 x 2048), 96 : 87 (24576 x 4096), 98 : 92 (37888 x 3584); but what
 * counts is a step, ms, one row and eight: the last, of Qwen2.5-7B, 3.53 : 3.74, 3.79 : 3.97; 22016 x 2048, Qwen2.5-3B, 1.95 :
 * 1.99, 2.19 : 2.22; 19456 x 2560, Qwen3-4B, 2.54 : 2.56, 2.85 : 2.86; 6144 x 4096, 8B, 3.84 : 3.82, 4.17 : 4.16, Qwen3-8B 3.99 :
 * 3.97, 4.35 : 4.32. 16 rows: 63 : 69, 48 : 71, 62 : 76, 72 : 83, 81 : 83, 93 : 94, 40 : 73, 32 : 55. gemm_few against gemm_wgmma,
 * 64 rows: 50 : 45 (3072 x 2048), 67 : 46 (2048 x 8192), 72 : 66 (4096 x 4096), 89 : 78 (4096 x 14336), but 50 : 56 (9728 x 896);
 * 15 : 13 (1152 x 896) and 12 : 11 (896 x 896), yet 64 sequences of that model 1 % slower; us of the least and the most
 * (2026-11-23): 17.8, 18.6 : 19.5 (16384 x 2048), 61, 64 : 59, 60 (28672 x 4096), 229, 257 : 232, 238 (57344 x 8192), 117, 125 :
 * 117, 121 (8192 x 28672). 2026-11-25: 40 : 39 (4096 x 1024), 47 : 41 (6144 x 1024), 76 : 62 (5120 x 17408), 81 : 62 (5120 x
 * 25600). Where tiles of 64 fill a wave and a bit gemm_wgmma is ahead, 70 : 80 (19456 x 2560), 61 : 71 (17920 x 1536), 74 : 78
 * (22016 x 2048), but a step of 64 sequences is not: Qwen3-4B 3.20 : 3.20 ms, Qwen2.5-1.5B 1.54 : 1.57, Qwen2.5-3B 2.45 : 2.53,
 * probably as the kernel behind it starts later. Nor is a gemm_few in whose CTAs take tile after tile, two a multiprocessor: alone
 * 1 to 15 % faster (tiles of 1.06 to 1.45 waves, up to 32 rows), steps of 16 and 32 rows of ten models 0.9 % faster to 2.3 %
 * slower. A gemm_few for 128 rows (2026-11-22): 24 : 28 to 61 : 59. */
static enum gemm_way gemm_way(const toka_device *d, int M, const weight *w) {
    const int tiles = ceil_div(w->N, FEW_N), thins = ceil_div(w->N, THIN_N);
    const bool many = tiles > d->n_sms && w->K >= (thins > 8 * d->n_sms ? 2048 : 4096);
    const bool big = tiles > d->n_sms && (int64_t)w->N * w->K >= 64 << 20;
    if (!d->hopper) return M <= 16 ? BY_THIN : BY_MMA;
    if (M <= 8 && (thins <= 2 * d->n_sms || many || w->N == d->E)) return BY_THIN; /* N = E: a norm follows */
    return M <= FEW_ALL || (M <= FEW_MAX && w->K >= 1024 && !big) ? BY_FEW : BY_WGMMA;
}
/* EPI_QKV is done, and pays. With QK-norm, where two tiles of a head meet, gemm_few does it for up to 8 rows: Qwen3-4B, one
 * sequence 2.506 -> 2.461 ms a step, 8 2.662 -> 2.647, 14B 7.243 -> 7.214, 7.593 -> 7.609; but 16 and 64 rows 2.806 -> 2.838, 4.015
 * -> 4.040 (0.6B 0.933 -> 0.924, 1.500 -> 1.527, 1.7B 1.440 -> 1.466, 2.153 -> 2.250), and one of 0.6B, which is gemm_thin's, 0.703
 * -> 0.783 (H200, 2026-11-25, of a form for any number of rows that read the sums twice). */
static bool gemm_turns(const toka_device *d, int M, const weight *w, const qkv_params *p) {
    const enum gemm_way way = gemm_way(d, M, w);
    return qkv_has_norms(p) ? way == BY_FEW && M <= FOLD_ROWS : way <= BY_FEW;
}
static void gemm(toka_device *d, const gemm_args *a) {
    enum gemm_way way = gemm_way(d, a->M, a->w);
    if (a->epi == EPI_LOGITS) way = !d->hopper ? BY_MMA : a->M <= SAMP_FEW ? BY_FEW : BY_WGMMA;
    if (way == BY_THIN) gemm_thin(d, a);
    else if (way == BY_FEW) gemm_few(d, a);
    else if (way == BY_MMA) gemm_mma(d, a);
    else gemm_wgmma(d, a);
}

/* ===========================================================================
 * MARK: 8. Attention: the work list [host]
 * Turns the spans of a step into lists of items that kernels take one by one: plain integers, made once per step, used by all
 * layers. A query is one head of one row; the G query heads of a kv head read the same K and V, so they are counted together:
 * query q of kv head h is row q / G, head h*G + q % G. An item is a run of queries of one span against a run of kv positions, for
 * every kv head:
 *
 *      span with at most 16 queries  ->  one small item: a warp, bound by the bytes of K and V
 *      span with more                ->  tiles of tile_q queries: a CTA, bound by the tensor cores
 *
 * A row that lies in several spans (shared prefix, own part) is done level by level, a level behind the other on the stream: its
 * first span leaves a state (O and LSE, float32), the next begins with it, the last writes o. So nothing is merged twice, every
 * row has one state no matter how many spans it lies in, and the order of sums is fixed.
 *
 * Many rows that have one span together and then each its own, as in decoding samples of a prompt, need no level: one kernel
 * does both spans (attn_both).
 *
 * Few items do not fill the GPU: then kv ranges are split (split-KV), parts go to part_o and part_lse, and a merge per row
 * follows in the same level. The length of a part depends only on the level's total of kv positions. On Hopper, if no small item
 * of a level needs more than attn_gang_most short parts (attn_gang_part) and some need two, each is a gang: one CTA, a warp per
 * part, merged in shared memory. Where few rows share prefixes, as samples of a few prompts do, a gang does up to six of them with
 * their own parts and all they share (attn_plan_kin): one launch for two or three a level. Its rows are kin, of one prompt; where
 * that would make more gangs than run at once, it takes rows side by side, whatever prompts they are of. Few gangs, and nothing
 * beside them, are squads: the warps of each spread over the four CTAs of a cluster.
 *
 * What is expected of the spans: for each row they come in rising kv0, and of two spans that share a row the earlier one has all
 * rows of the later one (a tree of intervals). Cost: O(spans + rows + pages in use); 8,192 sequences with a shared prefix: 0.15 to
 * 0.3 ms.
 * =========================================================================== */

enum {
    ATTN_TILE_Q = 64,    /* queries of a tile on mma.sync */
    ATTN_SMALL_Q = 16,   /* queries of a small item, and the unit of the split-KV buffer */
    ATTN_MIN_PART = 128, /* kv positions of a part of a small item, at least */
    ATTN_BRIEF = 128,    /* small items with fewer positions than this on average are brief; */
    ATTN_LENGTHY = 3000, /* tiles of spans with as many as this are lengthy */
    ATTN_BOTH_ROWS = 32, ATTN_BOTH_Q = 128, /* rows and queries of an item of attn_both, at most */
    ATTN_BOTH_D = NVCC_VERSION < 1208 ? 64 : 128, /* head sizes up to it, see there */
    ATTN_BOTH_OWN = 1024,                   /* own positions of such a row, at most: a warp does them one behind the other */
    ATTN_OWN_START = 24,                    /* what such a row takes beside them, in positions, roughly */
    ATTN_JOIN_START = 250, /* what it takes to merge parts of tiles at all, in kv positions */
    ATTN_WARPS = 16,     /* small items that an SM works on at a time, roughly */
    ATTN_GANG_PART = 64, /* kv positions of a part of a gang, at least; */
    ATTN_GANG_STEP = 32, /* a multiple of so many */
    ATTN_KIN = 6,        /* rows of kin at most: each has a part at least */
    ATTN_SQUAD = 4,      /* CTAs of a gang that is a squad */
    ATTN_EARLY_ROWS = 8, /* of a step whose K and V are fetched early, at most */
};

/* Warps of a gang at most: what shared memory (D <= 64) or registers allow. */
__host__ __device__ static constexpr int attn_gang_most(int D) { return D <= 64 ? 14 : 12; }

/* A layer's tensor maps, by rows of the box; PAIR: of K and V at once. */
enum { ATTN_MAP_8, ATTN_MAP_16, ATTN_MAP_32, ATTN_MAP_64, ATTN_MAP_PAIR, ATTN_MAPS };
enum { ATTN_SEED = 1, ATTN_TO_O = 2, ATTN_TO_STATE = 4, ATTN_SLOT = 3 /* shift */ }; /* attn_item.where; neither TO: a part */

typedef struct attn_item {
    int q0;             /* queries row*G + g, for every kv head ... */
    short nq, skip;     /* ... so many; the positions kv0 .. kv0+skip-1 are another span's */
    int kv0, kv1;       /* positions; kv0 is a multiple of B */
    int page0;          /* of attn_plan.dev_pages, page of kv0 */
    int pos_lo, pos_hi; /* lowest and highest position of the rows */
    int where;          /* ATTN_SEED: begin with the rows' state; ATTN_TO_O, ATTN_TO_STATE, or slot << ATTN_SLOT of part_o; of
                         * attn_both: number << ATTN_SLOT of the first row's own item */
} attn_item;

typedef struct attn_merge { /* the n parts of one item become one */
    int q0, nq;
    int slot, n; /* parts lie in slot after slot from this one on; a gang's are items, of the level's small ones */
    int where;
} attn_merge;

typedef struct attn_level {
    int tile0, n_tiles, small0, n_small, merge0, n_merges;
    int merge_nq; /* most queries of a merge */
    bool brief, lengthy; /* small items have less than ATTN_BRIEF positions on average; tiles' spans ATTN_LENGTHY or more */
    int gang0, n_gangs, gang_warps; /* of the merges, those that are gangs; then small items are theirs alone. Most parts of one */
    int gang_part;                  /* kv positions of a part of a gang; 0: there are none; while planning */
} attn_level;

typedef struct attn_span { /* of a toka_span, for the time of planning */
    int level, page0, where;
    int parent; /* the span before it of its rows, -1: none */
    bool small, both;
    int n_items; /* of attn_both, that the span leads */
} attn_span;

typedef struct attn_load { /* of a block, or of what it may do next, while planning */
    int load, id;
} attn_load;

struct attn_plan {
    int K, n_sms;              /* kv heads and multiprocessors that work is cut for: see attn_agree */
    int G, small_rows, tile_q; /* query heads of a kv head; rows of a small span at most; queries of a tile */
    int max_items, max_merges, max_spans, max_levels, max_slots;
    bool hopper;                /* the kernels with tensor maps */
    bool has_both;              /* attn_both too */
    CUtensorMap *maps;          /* [L][ATTN_MAPS] or NULL */
    size_t max_pages;
    float *state_o, *state_lse; /* [T][H][D], [T][H]: base-2 LSE */
    float *part_o, *part_lse;   /* [slots][K][16][D], [slots][K][16] */
    float *hubs;                /* of attn_both, D = 128: [n_sms][2][ATTN_BOTH_Q][D] */
    attn_span *spans;           /* [max_spans] */
    attn_level *levels;         /* [max_levels] */
    uint16_t *row_level;        /* [max_tokens] levels that the row has behind it; while planning */
    int *row_span;              /* [max_tokens] the last span of the row */
    int n_levels, n_items, n_merges, n_slots;
    int n_whole;                /* items to come, if none of them is cut: what is cut leaves room for them */
    int64_t kin_work;           /* kv positions that kin read, times kv heads, at most: beyond, others are faster; */
    int64_t kin_work_many;      /* where attn_both could do it */
    int both_least;             /* rows of attn_both, times kv heads, from which on it is taken */
    bool kin, kin_mixed;        /* the step is done by gangs of kin, or of whatever rows lie side by side */
    int kin_least;              /* kv positions of a part of them, at least */
    bool squads, mixes;         /* gangs may be squads, and of rows that are no kin */
    int both0, n_both;          /* items of attn_both; behind them their rows' own */
    attn_load *blocks, *round;  /* [n_sms] */
    int grid, n_rounds;         /* of attn_both: */
    const int *dev_jobs;        /* [n_rounds][grid] what each block does: item * K + kv head, or -1 at the end */
    attn_merge *merges;         /* [max_merges] this step's, on the host while planning ... */
    attn_item *items;           /* ... in d->up ... */
    const attn_item *dev_items; /* ... and on the device */
    const attn_merge *dev_merges;
    const int *dev_pages;
    bool early;                 /* attn_is_early */
};

/* How much there may be of everything. */
static void attn_sizes(const toka_device *d, attn_plan *p) {
    const toka_shape *sh = d->shape;
    int T = d->options.max_tokens, G = sh->H / sh->K, seq_pages = ceil_div(sh->max_len, sh->B);
    int64_t pages = (int64_t)T * (seq_pages + 1); /* a group's tail is read from one more */
    p->hopper = d->hopper && sh->B >= 64 && sh->D >= 64 && sh->D <= 128 && d->kv_layer / sh->D < INT_MAX;
    p->has_both = p->hopper && (sh->D == 64 || sh->D == ATTN_BOTH_D) && G <= 8;
    p->G = G, p->small_rows = ATTN_SMALL_Q / G;
    p->tile_q = !p->hopper ? ATTN_TILE_Q : sh->D == 64 ? 192 : 128;
    p->max_spans = 2 * T + 64;
    p->max_levels = seq_pages + 1;
    p->max_pages = (size_t)(pages < 1 << 24 ? pages : 1 << 24);
    /* about twice what attn_small_part and attn_tile_part aim at; beyond, ranges stay whole */
    p->max_slots = p->n_sms * (ATTN_WARPS + p->tile_q / ATTN_SMALL_Q) * 3 / 2 / p->K + 64;
    p->max_merges = 2 * p->max_slots;
    p->kin_work = (int64_t)p->n_sms * (sh->D <= 64 ? 2400 : 1900);
    p->kin_work_many = (int64_t)p->n_sms * (sh->D <= 64 ? 2400 : 900);
    /* of 67 rows with eight kv heads on. D = 128, 80 rows of four prompts: kin 39 us, attn_both 33, levels 57 (`gpu_attn bench
     * running`, H200, 2026-11-24) */
    p->both_least = p->n_sms * 4;
    p->squads = p->mixes = true;
    /* Levels of all rows, at most: a span that chapter 17 shares saves more than merge_tok positions for each of its R rows, so
     * where r rows leave a chain of them behind g positions, r g > merge_tok R; then the sum of R is at most
     * T sqrt(max_len / merge_tok). */
    const int levels = 12 + (int)sqrt((double)sh->max_len / toka_cuda.merge_tok);
    p->max_items = p->max_spans + p->max_slots + levels * ceil_div(T * G, p->tile_q);
}

/* Host memory of planning, in d->attn. shape, options, n_sms, hopper and kv_layer are set. */
static void attn_plan_open(toka_device *d) {
    const toka_shape *sh = d->shape;
    attn_plan *p = (attn_plan *)calloc(1, sizeof *p);
    if (!p) abort();
    assert(sh->D % 8 == 0 && sh->D <= 256 && sh->H % sh->K == 0 && sh->B >= 16 && (sh->B & (sh->B - 1)) == 0);
    d->attn = p;
    p->K = sh->K, p->n_sms = d->n_sms;
    attn_sizes(d, p);
    p->spans = (attn_span *)malloc((size_t)p->max_spans * sizeof *p->spans);
    p->levels = (attn_level *)malloc((size_t)p->max_levels * sizeof *p->levels);
    p->merges = (attn_merge *)malloc((size_t)p->max_merges * sizeof *p->merges);
    p->row_level = (uint16_t *)malloc((size_t)d->options.max_tokens * sizeof *p->row_level);
    p->row_span = (int *)malloc((size_t)d->options.max_tokens * sizeof *p->row_span);
    p->blocks = (attn_load *)malloc((size_t)d->n_sms * sizeof *p->blocks);
    p->round = (attn_load *)malloc((size_t)d->n_sms * sizeof *p->round);
    if (!p->spans || !p->levels || !p->merges || !p->row_level || !p->row_span || !p->blocks || !p->round) abort();
}

/* Tensor ranks plan alike: for the most kv heads that one of them has, and the fewest multiprocessors. Else some would be a launch
 * short of a graph that others have (chapter 15), and their sums would be of other rows. What was taken for fewer heads is enough
 * for more. */
static void attn_agree(toka_device *d, int K, int n_sms) {
    attn_plan *p = d->attn;
    assert(K >= p->K && n_sms <= p->n_sms);
    p->K = K, p->n_sms = n_sms;
    attn_sizes(d, p);
}

static void attn_close(toka_device *d) { /* host memory; the device's goes with all blocks */
    if (!d->attn) return;
    free(d->attn->spans), free(d->attn->levels), free(d->attn->merges), free(d->attn->maps);
    free(d->attn->row_level), free(d->attn->row_span), free(d->attn->blocks), free(d->attn->round);
    free(d->attn);
    d->attn = NULL;
}

/* Bytes of d->up that attn_plan_step takes at most. */
static size_t attn_stage_bytes(const toka_device *d) {
    const attn_plan *p = d->attn;
    size_t lists = (size_t)p->max_items * sizeof(attn_item) + (size_t)p->max_merges * sizeof(attn_merge);
    if (p->has_both) lists += ((size_t)d->options.max_tokens * d->shape->K + (size_t)d->n_sms) * sizeof(int); /* a row an item */
    return lists + p->max_pages * sizeof(int) + 64;
}

/* Levels, and which span is the last of its rows. Those that end rows with a small item all go to the last level: one launch. */
static void attn_plan_levels(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    memset(p->row_level, 0, (size_t)s->T * sizeof *p->row_level);
    p->n_levels = 0;
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        int level = p->row_level[sp->row0];
        p->spans[i].parent = level ? p->row_span[sp->row0] : -1;
        for (int r = sp->row0; r < sp->row0 + sp->n_rows; r++) {
            assert(p->row_level[r] == level);
            p->row_level[r] = (uint16_t)(level + 1), p->row_span[r] = i;
        }
        p->spans[i].level = level, p->spans[i].small = sp->n_rows <= p->small_rows;
        p->n_levels = max(p->n_levels, level + 1);
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

/* log2 of the rows of an item at most. */
static int attn_both_log2_rows(const attn_plan *p) {
    int n = 0;
    while (2 << n <= ATTN_BOTH_ROWS && 2 * p->G << n <= ATTN_BOTH_Q) n++;
    return n;
}

/* Can attn_both do this span and the rows' own? */
static bool attn_fits_both(const toka_device *d, const toka_step *s, int i) {
    const attn_plan *p = d->attn;
    const toka_span *sp = &s->spans[i];
    if (p->spans[i].where & ATTN_TO_O || !sp->n_kv) return false;
    for (int r = sp->row0; r < sp->row0 + sp->n_rows; r++) {
        const toka_span *own = &s->spans[p->row_span[r]];
        if (p->row_level[r] != p->spans[i].level + 2 || own->n_rows > 1 || own->n_kv > ATTN_BOTH_OWN) return false;
        if (s->pos[r] < sp->kv0 + sp->n_kv) return false;
    }
    return true;
}
/* Or is it the only span of a single row, and short enough for one warp? */
static bool attn_alone(const toka_device *d, const toka_step *s, int i) {
    return s->spans[i].n_rows == 1 && d->attn->row_level[s->spans[i].row0] == 1 && s->spans[i].n_kv <= ATTN_BOTH_OWN;
}

/* Which spans attn_both does: all that it can, if there are rows enough for every SM and no layer has a window. A few rows that
 * share little or nothing ride along: for themselves they would cost a launch or four more. */
static void attn_plan_both(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    int n_large = 0, n_few = 0, rows = 0; /* items; rows of large ones */
    bool wanted = p->has_both;
    for (int i = 0; i < d->shape->L && d->layers; i++) wanted = wanted && !d->layers[i].window;
    for (int i = 0; i < s->n_spans; i++) {
        attn_span *a = &p->spans[i];
        a->both = wanted && (attn_fits_both(d, s, i) || attn_alone(d, s, i));
        a->n_items = a->both ? ceil_div(s->spans[i].n_rows, 1 << attn_both_log2_rows(p)) : 0;
        *(a->small ? &n_few : &n_large) += a->n_items;
        rows += a->both && !a->small ? s->spans[i].n_rows : 0;
    }
    bool any = rows * p->K >= p->both_least, few = any && n_few * 4 <= n_large;
    p->n_both = any ? n_large + few * n_few : 0;
    for (int i = 0; i < s->n_spans; i++) {
        attn_span *a = &p->spans[i];
        if ((a->where & ATTN_TO_O) && (a->where & ATTN_SEED)) continue; /* it goes with the one before it */
        a->both = a->both && (a->small ? few : any);
        for (int r = s->spans[i].row0; !(a->where & ATTN_TO_O) && r < s->spans[i].row0 + s->spans[i].n_rows; r++)
            p->spans[p->row_span[r]].both = a->both && p->row_level[r] == a->level + 2;
    }
}

/* Is it a span that items of attn_both are made of, not that of a row which belongs to one of them? */
static bool attn_leads_both(const attn_plan *p, int i) {
    return p->spans[i].both && !((p->spans[i].where & ATTN_TO_O) && (p->spans[i].where & ATTN_SEED));
}

/* More items of attn_both, of fewer rows, until there is a job for every SM in the last round, too. */
static void attn_plan_rounds(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    auto rows = [&](int i) { return (float)s->spans[i].n_rows / (float)p->spans[i].n_items; };
    while (p->n_both * d->shape->K % d->n_sms) {
        int most = -1;
        for (int i = 0; i < s->n_spans; i++)
            if (!p->spans[i].small && attn_leads_both(p, i) && (most < 0 || rows(i) > rows(most))) most = i;
        if (most < 0 || rows(most) < 2) return;
        p->spans[most].n_items++, p->n_both++;
    }
}

/* The page table entries of all spans, one behind the other. */
static bool attn_plan_pages(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    int64_t n = 0;
    void *host;
    int B = d->shape->B, shift = __builtin_ctz(B);
    auto span_pages = [&](const toka_span *sp) { return ((sp->kv0 & (B - 1)) + sp->n_kv + B - 1) >> shift; };
    for (int i = 0; i < s->n_spans; i++) p->spans[i].page0 = (int)n, n += span_pages(&s->spans[i]);
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
               (size_t)span_pages(&s->spans[i]) * sizeof(int));
    }
    return true;
}

/* How long the parts of small items are: as many as keep all warps at work, if all ranges were cut into parts. */
static int attn_small_part(const toka_device *d, int64_t kv_positions) {
    int64_t len = kv_positions * d->attn->K / (d->attn->n_sms * ATTN_WARPS);
    return len < ATTN_MIN_PART ? ATTN_MIN_PART : len < INT_MAX / 2 ? (int)len : INT_MAX / 2;
}
/* The same of tiles. They run one on an SM, in waves: the number of parts for which waves times their length, and the merge, take
 * least. In kv positions of a tile a merge costs ATTN_JOIN_START, one for every ten queries and one for every 70 parts of a query
 * (H200: 33,792 queries in two parts 50 us, 3,072 queries in 33 parts 15 us more than in 8). More than two waves stay as they
 * are. */
static int attn_tile_part(const toka_device *d, int64_t kv_positions, int n_tiles) {
    const attn_plan *p = d->attn;
    int64_t items = (int64_t)n_tiles * p->K, len = kv_positions / max(n_tiles, 1), best = 1;
    int64_t queries = items * p->tile_q, least = (items + p->n_sms - 1) / p->n_sms * len;
    if (items > 2 * p->n_sms) return INT_MAX / 2;
    for (int64_t n = 2; n <= len / (2 * ATTN_MIN_PART); n++) {
        int64_t waves = (items * n + p->n_sms - 1) / p->n_sms, join = ATTN_JOIN_START + queries / 10 + queries * n / 70;
        int64_t cost = waves * ((len + n - 1) / n) + join;
        if (cost < least) best = n, least = cost;
    }
    return best == 1 ? INT_MAX / 2 : (int)((len + best - 1) / best);
}

static void attn_add(attn_plan *p, const attn_item *item) { /* too many: attn_plan_step says so */
    if (p->n_items < p->max_items) p->items[p->n_items] = *item;
    p->n_items++;
}

/* n parts of `part` positions, and their merge. */
static void attn_emit_parts(attn_plan *p, attn_level *l, const attn_item *item, int n, int part, int part_pages) {
    p->merges[p->n_merges++] = attn_merge{item->q0, item->nq, p->n_slots, n, item->where};
    l->merge_nq = max(l->merge_nq, item->nq);
    for (int i = 0; i < n; i++, p->n_slots += ceil_div(item->nq, ATTN_SMALL_Q)) {
        attn_item *a = &p->items[p->n_items++];
        *a = *item;
        a->kv0 = item->kv0 + i * part, a->kv1 = min(a->kv0 + part, item->kv1), a->skip = i ? 0 : item->skip;
        a->page0 = item->page0 + i * part_pages, a->where = p->n_slots << ATTN_SLOT;
    }
}

/* How long the parts of gangs are; 0: there are to be none. n items, the longest of `most` positions. A warp is at it too long
 * where it has many: one sequence of 4,096 positions, 512 a warp, takes 20 us at D = 64 and 64 us at D = 128 (8 kv heads, H200),
 * where parts that all SMs share, and attn_join, take 9 and 17. At D = 128 parts of 64 at most, so that sequences of more than 768
 * had none: one of 1,100 13.1 us for 10.3, 16 of 1,100 31.2 for 23.5, 64 of 640 57.8 for 49.2, eight of 1,400 17.9 for 18.5. */
static int attn_gang_part(const toka_device *d, int64_t kv_positions, int n, int most) {
    const attn_plan *p = d->attn;
    const int longest = 128, step = ATTN_GANG_STEP, warps = attn_gang_most(d->shape->D);
    int part = (int)(kv_positions * p->K / (p->n_sms * ATTN_WARPS));
    part = max((int)ATTN_GANG_PART, ceil_div(min(part, longest), step) * step);
    if (n * p->K <= p->n_sms) part = max(part, ceil_div(ceil_div(most, warps), step) * step);
    bool fits = p->hopper && part <= longest && most > part && most <= part * warps && n <= p->max_merges - p->n_merges;
    return fits && n * ceil_div(most, part) <= p->max_items - p->n_items - (p->n_whole - n) ? part : 0;
}
static void attn_emit_gang_parts(const toka_device *d, const attn_item *item, int part) {
    attn_plan *p = d->attn;
    for (int i = 0, n = max(1, ceil_div(item->kv1 - item->kv0, part)); i < n; i++) {
        attn_item *a = &p->items[p->n_items++];
        *a = *item;
        const int at = i * part, page = at / d->shape->B;
        a->kv0 = item->kv0 + page * d->shape->B, a->kv1 = min(item->kv0 + at + part, item->kv1);
        a->skip = (short)(i ? at % d->shape->B : item->skip), a->page0 = item->page0 + page;
    }
}
/* The gang of what was emitted from `first` on. */
static void attn_emit_gang(attn_plan *p, attn_level *l, int first, int q0, int nq, int where) {
    const int n = p->n_items - first;
    p->merges[p->n_merges++] = attn_merge{q0, nq, first - l->small0, n, where};
    l->n_gangs++, l->gang_warps = max(l->gang_warps, n);
}

/* One item, whole or in parts of about part_len positions. */
static void attn_emit(toka_device *d, attn_level *l, const attn_item *item, int part_len) {
    attn_plan *p = d->attn;
    int len = item->kv1 - item->kv0;
    p->n_whole--;
    if (l->gang_part) {
        const int first = p->n_items;
        attn_emit_gang_parts(d, item, l->gang_part);
        attn_emit_gang(p, l, first, item->q0, item->nq, item->where);
        return;
    }
    if (len >= part_len + part_len / 2) {
        int pages = ceil_div(ceil_div(len, (len + part_len / 2) / part_len), d->shape->B), part = pages * d->shape->B;
        int n = ceil_div(len, part), slots = p->n_slots + n * ceil_div(item->nq, ATTN_SMALL_Q);
        bool fits = slots <= p->max_slots && p->n_items + n <= p->max_items - p->n_whole && p->n_merges < p->max_merges;
        if (n > 1 && fits) {
            attn_emit_parts(p, l, item, n, part, pages);
            return;
        }
    }
    attn_add(p, item);
}

/* nq queries of a span from q0 on, those of rows row .. last, uncut. */
static attn_item attn_item_of(const toka_device *d, const toka_step *s, int i, int q0, int nq, int row, int last) {
    const toka_span *sp = &s->spans[i];
    const attn_span *a = &d->attn->spans[i];
    int skip = sp->kv0 & (d->shape->B - 1);
    attn_item item = {.q0 = q0, .nq = (short)nq, .skip = (short)skip, .kv0 = sp->kv0 - skip, .page0 = a->page0, .pos_lo = INT_MAX,
                      .pos_hi = -1, .where = a->where};
    for (int r = row; r <= last; r++) {
        item.pos_lo = min(item.pos_lo, s->pos[r]);
        item.pos_hi = max(item.pos_hi, s->pos[r]);
    }
    item.kv1 = max(sp->kv0, min(sp->kv0 + sp->n_kv, item.pos_hi + 1));
    return item;
}

/* Into how many items a span goes, if none is cut. */
static int attn_span_items(const attn_plan *p, const toka_step *s, int i) {
    return p->spans[i].small ? 1 : ceil_div(s->spans[i].n_rows * p->G, p->tile_q);
}

/* The items of one span; the last rows, which see most, come first. */
static void attn_emit_span(toka_device *d, const toka_step *s, int i, attn_level *l, int part_len) {
    const toka_span *sp = &s->spans[i];
    bool small = d->attn->spans[i].small;
    int G = d->attn->G, end = (sp->row0 + sp->n_rows) * G;
    int tile = small ? ATTN_SMALL_Q : d->attn->tile_q;
    for (int t = attn_span_items(d->attn, s, i) - 1; t >= 0; t--) {
        int q0 = sp->row0 * G + t * tile, nq = min(tile, end - q0);
        int row = small ? sp->row0 : q0 / G; /* 8,192 divisions less */
        int last = small ? sp->row0 + sp->n_rows - 1 : (q0 + nq - 1) / G;
        attn_item item = attn_item_of(d, s, i, q0, nq, row, last);
        attn_emit(d, l, &item, part_len);
    }
}

/* All items of a level of one kind. */
static void attn_plan_kind(toka_device *d, const toka_step *s, int level, bool small) {
    attn_plan *p = d->attn;
    int64_t work = 0;
    int n = 0, most = 0, part_len;
    for (int i = 0; i < s->n_spans; i++) {
        if (p->spans[i].level != level || p->spans[i].small != small || p->spans[i].both) continue;
        int tiles = attn_span_items(p, s, i);
        work += (int64_t)s->spans[i].n_kv * tiles, n += tiles;
        most = max(most, s->spans[i].n_kv + (s->spans[i].kv0 & (d->shape->B - 1)));
    }
    p->levels[level].gang_part = small ? attn_gang_part(d, work, n, most) : 0;
    part_len = small ? attn_small_part(d, work) : attn_tile_part(d, work, n);
    if (small) p->levels[level].brief = work < (int64_t)n * ATTN_BRIEF;
    else p->levels[level].lengthy = work >= (int64_t)n * ATTN_LENGTHY;
    for (int i = 0; work && i < s->n_spans; i++) {
        const attn_span *a = &p->spans[i];
        if (a->level == level && a->small == small && !a->both) attn_emit_span(d, s, i, &p->levels[level], part_len);
    }
}

/* Rows from `row` on that one gang does, no more than a small item has: kin, that have all spans but their own in common, or, if
 * `mixed`, whatever they have. */
static int attn_kin(const attn_plan *p, const toka_step *s, int row, bool mixed) {
    const int parent = p->spans[p->row_span[row]].parent, most = min(min(p->small_rows, (int)ATTN_KIN), s->T - row);
    int n = 1;
    while (n < most && (mixed || (parent >= 0 && p->spans[p->row_span[row + n]].parent == parent))) n++;
    return n;
}
/* each(span, its first row that counts, how many) for all spans of n rows. */
template <class F> static void attn_kin_spans(const attn_plan *p, const toka_step *s, int row, int n, F each) {
    for (int r = row; r < row + n; r++)
        for (int i = p->row_span[r]; i >= 0; i = p->spans[i].parent) {
            const toka_span *sp = &s->spans[i];
            if (r == max(row, sp->row0)) each(i, r, min(row + n, sp->row0 + sp->n_rows) - r);
        }
}
/* How long the parts of such a gang are, in kv positions: as short as its warps allow, at least `least`. 0: too long. */
static int attn_kin_part(const toka_device *d, const toka_step *s, int row, int n, int least) {
    const attn_plan *p = d->attn;
    const int B = d->shape->B, longest = 256, step = ATTN_GANG_STEP;
    for (int part = ceil_div(least, step) * step; part <= longest; part += step) {
        int parts = 0;
        attn_kin_spans(p, s, row, n, [&](int i, int, int) {
            parts += max(1, ceil_div((s->spans[i].kv0 & (B - 1)) + s->spans[i].n_kv, part));
        });
        if (parts <= attn_gang_most(d->shape->D)) return part;
    }
    return 0;
}

/* Can gangs do the step? They are for steps whose rows have spans in common, each one of its own behind them, and few of all. */
static bool attn_kin_fits(toka_device *d, const toka_step *s, bool mixed) {
    attn_plan *p = d->attn;
    const int64_t limit = p->has_both && s->T * p->K >= p->both_least ? min(p->kin_work, p->kin_work_many) : p->kin_work;
    int64_t work = 0;
    int n_gangs = 0;
    p->kin_mixed = mixed;
    for (int row = 0, n; row < s->T; row += n, n_gangs++) {
        n = attn_kin(p, s, row, mixed);
        attn_kin_spans(p, s, row, n, [&](int i, int, int) { work += s->spans[i].n_kv; });
        for (int r = row; r < row + n; r++)
            if (s->spans[p->row_span[r]].n_rows > 1) return false;
        if (work * p->K > limit) return false;
    }
    if (n_gangs > p->max_merges || n_gangs * attn_gang_most(d->shape->D) > p->max_items) return false;
    p->kin_least = max((int)ATTN_GANG_PART, (int)(work * p->K / (p->n_sms * ATTN_WARPS)));
    for (int row = 0, n; row < s->T; row += n) {
        n = attn_kin(p, s, row, mixed);
        if (!attn_kin_part(d, s, row, n, p->kin_least)) return false;
    }
    return true;
}
/* Kin, unless their gangs are more CTAs than run at once: the last gang of each prompt is seldom full, mixed gangs all are. */
static bool attn_choose_kin(toka_device *d, const toka_step *s) {
    const attn_plan *p = d->attn;
    const int most = min(p->small_rows, (int)ATTN_KIN);
    if (!p->hopper || p->n_levels < 2 || !most) return false;
    int n_gangs = 0;
    const bool may_mix = p->mixes && ceil_div(s->T, most) * p->K <= p->n_sms;
    for (int row = 0; may_mix && row < s->T; n_gangs++) row += attn_kin(p, s, row, false);
    return (n_gangs * p->K > p->n_sms && attn_kin_fits(d, s, true)) || attn_kin_fits(d, s, false);
}

/* All of a step of kin: one level. */
static void attn_plan_kin(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    const int G = p->G;
    attn_level *l = p->levels;
    p->n_levels = 1, *l = attn_level{};
    for (int row = 0, n; row < s->T; row += n) {
        n = attn_kin(p, s, row, p->kin_mixed);
        const int first = p->n_items, part = attn_kin_part(d, s, row, n, p->kin_least);
        attn_kin_spans(p, s, row, n, [&](int i, int r, int rows) {
            const attn_item item = attn_item_of(d, s, i, r * G, rows * G, r, r + rows - 1);
            attn_emit_gang_parts(d, &item, part);
        });
        attn_emit_gang(p, l, first, row * G, n * G, ATTN_TO_O);
    }
}

/* The items of attn_both, and then those of their rows. Rows by themselves, which take longest, come first: the shared part of
 * their items is empty. */
static void attn_plan_both_items(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    int G = p->G, own = p->n_both;
    p->both0 = p->n_items;
    for (int i = s->n_spans - 1; i >= 0 && p->n_both; i--) {
        const toka_span *sp = &s->spans[i];
        if (!attn_leads_both(p, i)) continue;
        for (int row = sp->row0, n_items = p->spans[i].n_items, j = 0, n; j < n_items; row += n, own += n, j++) {
            n = sp->row0 + (j + 1) * sp->n_rows / n_items - row;
            attn_item item = attn_item_of(d, s, i, row * G, n * G, row, row + n - 1);
            item.where |= own << ATTN_SLOT;
            if (item.where & ATTN_TO_O) item.kv1 = item.kv0, item.skip = 0;
            attn_add(p, &item);
        }
    }
    for (int i = s->n_spans - 1; i >= 0 && p->n_both; i--) {
        const toka_span *sp = &s->spans[i];
        if (!attn_leads_both(p, i)) continue;
        for (int row = sp->row0; row < sp->row0 + sp->n_rows; row++) {
            attn_item item = attn_item_of(d, s, p->row_span[row], row * G, G, row, row);
            attn_add(p, &item);
        }
    }
}

static int attn_by_load(const void *a, const void *b) {
    const attn_load *x = (const attn_load *)a, *y = (const attn_load *)b;
    return x->load != y->load ? (x->load < y->load ? -1 : 1) : x->id < y->id ? -1 : x->id > y->id;
}
/* Which block of attn_both does what: in each round one job, an item and a kv head; the longest of them go to the blocks that have
 * done least so far. In their order the longest of 132 blocks had a tenth more to do than the mean, so it is 1 %. Items of a span
 * stay together, for its K and V are in the cache then. */
static void attn_plan_jobs(toka_device *d) {
    attn_plan *p = d->attn;
    const attn_item *items = p->items + p->both0;
    int K = d->shape->K, n_jobs = p->n_both * K, *jobs;
    p->grid = min(d->n_sms, n_jobs), p->n_rounds = n_jobs ? ceil_div(n_jobs, p->grid) : 0;
    p->dev_jobs = (const int *)stage_room(&d->up, (size_t)p->grid * p->n_rounds * sizeof(int), (void **)&jobs);
    for (int i = 0; i < p->grid; i++) p->blocks[i] = attn_load{0, i};
    for (int first = 0, n; first < n_jobs; first += n, jobs += p->grid) {
        n = min(p->grid, n_jobs - first);
        for (int i = 0; i < n; i++) {
            const attn_item *it = items + (first + i) / K, *own = items + (it->where >> ATTN_SLOT);
            p->round[i] = attn_load{0, first + i};
            if (i && (first + i) % K) p->round[i].load = p->round[i - 1].load;
            else
                for (int r = 0; r < it->nq / p->G; r++)
                    p->round[i].load -= own[r].kv1 - own[r].kv0 - own[r].skip + ATTN_OWN_START;
        }
        qsort(p->round, (size_t)n, sizeof *p->round, attn_by_load);
        qsort(p->blocks, (size_t)p->grid, sizeof *p->blocks, attn_by_load);
        for (int i = 0; i < p->grid; i++) jobs[p->blocks[i].id] = i < n ? p->round[i].id : -1;
        for (int i = 0; i < n; i++) p->blocks[i].load -= p->round[i].load; /* it is below 0 */
    }
}

/* Whether, in a step of few rows, all K and V but what its rows store are in place before its first kernel starts: then they are
 * fetched ahead of q. No row stores into pages that another row reads, and the step copies no pages. */
static bool attn_is_early(const toka_device *d, const toka_step *s) {
    const int B = d->shape->B;
    if (s->T > ATTN_EARLY_ROWS || s->n_copies || !s->kv_slot) return false;
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        for (int r = 0; r < s->T; r++)
            for (int p = 0; p < ((sp->kv0 & (B - 1)) + sp->n_kv + B - 1) / B; p++)
                if (s->pages[sp->page0 + p] == s->kv_slot[r] / B && (r != sp->row0 || sp->n_rows > 1)) return false;
    }
    return true;
}

/* Makes the lists of this step and puts them into d->up. Before stage_send. */
static void attn_plan_step(toka_device *d, const toka_step *s) {
    attn_plan *p = d->attn;
    p->early = attn_is_early(d, s);
    assert(s->n_spans <= p->max_spans && s->T <= d->options.max_tokens);
    attn_plan_levels(d, s);
    p->kin = attn_choose_kin(d, s), p->n_both = 0;
    if (!p->kin) attn_plan_both(d, s), attn_plan_rounds(d, s);
    if (!attn_plan_pages(d, s)) return;
    p->dev_items = (const attn_item *)stage_room(&d->up, (size_t)p->max_items * sizeof *p->items, (void **)&p->items);
    p->n_items = p->n_merges = 0, p->n_whole = p->n_both;
    for (int i = 0; i < s->n_spans && !p->kin; i++)
        p->n_whole += attn_leads_both(p, i) ? s->spans[i].n_rows : p->spans[i].both ? 0 : attn_span_items(p, s, i);
    if (p->kin) attn_plan_kin(d, s);
    for (int i = 0; i < p->n_levels && !p->kin; i++) {
        attn_level *l = &p->levels[i];
        *l = attn_level{.tile0 = p->n_items, .merge0 = p->n_merges};
        p->n_slots = 0;
        attn_plan_kind(d, s, i, false);
        l->n_tiles = p->n_items - l->tile0, l->small0 = p->n_items, l->gang0 = p->n_merges;
        attn_plan_kind(d, s, i, true);
        l->n_small = l->n_gangs ? 0 : p->n_items - l->small0, l->n_merges = p->n_merges - l->merge0 - l->n_gangs;
    }
    attn_plan_both_items(d, s);
    d->up.used -= (size_t)(p->max_items - min(p->n_items, p->max_items)) * sizeof *p->items;
    p->dev_merges = (const attn_merge *)stage_put(&d->up, p->merges, (size_t)p->n_merges * sizeof *p->merges);
    if (p->n_items <= p->max_items) {
        attn_plan_jobs(d);
        return;
    }
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
 *
 * Pages: K and V of a page and kv head are [B][D] rows as they come, so whoever stores a token writes plain rows. TMA
 * swizzles them on their way to shared memory, by a tensor map over all pages of a layer as one matrix of rows of D; columns
 * beyond D become 0. As decode reads at 95 % of what reading alone reaches, an image swizzled in memory could win nothing. B = 64:
 * a block of 64 rows is what one copy takes and what the tiles are made of, and the page table stays short; smaller pages, down
 * to 16, run on mma.sync.
 *
 * Measured on an H200 (reading 2 GiB: 4.6 TB/s), 2026-11-24, H = 32, K = 8, `gpu_attn bench`; prefill beside PyTorch 2.11's cuDNN
 * in the same run (test/bench_peers_attn.py):
 *
 *      kernel      case                                D = 64            D = 96            D = 128
 *      attn_small  4096 sequences of 150..900          95 % of reading                     94 %
 *                  64 sequences of 4096, in parts      87 %                                89 %
 *      attn_wg     causal prefill of 1,024, TFLOP/s    218, cuDNN 191    269, cuDNN 204    345, cuDNN 268
 *                  causal prefill of 4,096             432, cuDNN 379    427, cuDNN 394    553, cuDNN 524
 *                  causal prefill of 16,384            487, cuDNN 437    450, cuDNN 440    579, cuDNN 566
 *                  16 prompts of 512                   171               184               235
 * =========================================================================== */

typedef struct attn_args {
    const bf16 *q;  /* [T][H][D] */
    bf16 *o;        /* [T][H][D] */
    const bf16 *kv; /* [page][K][K, V][B][D] of this layer */
    const int *pages, *pos;
    const attn_item *items;
    float *state_o, *state_lse, *part_o, *part_lse;
    int K, G, D, log2_B, window;
    uint32_t inv_G; /* 2^31 / G, rounded up */
    float scale;    /* log2(e) / sqrt(D) */
    bool early;  /* attn_is_early */
} attn_args;

__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* q / G without a division, for q < 2^31 / G: a thread of attn_wg has up to nine of them before its first product. */
__device__ static inline int attn_row(const attn_args &a, int q) { return (int)__umulhi(2u * (uint32_t)q, a.inv_G); }
/* Where O and LSE of query q of kv head h go: index of a head in [T][H], or of a row of part_o. */
__device__ static inline size_t attn_head_at(const attn_args &a, int q, int h) {
    const int row = attn_row(a, q);
    return (size_t)row * (a.K * a.G) + h * a.G + q - row * a.G;
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
    float lse;               /* of all */
} attn_exit;

/* LSE of the state that query i of the item begins with, -inf if none. All threads read it before one writes the new one. */
__device__ static inline float attn_old_lse(const attn_args &a, const attn_item &it, int i, int h) {
    return it.where & ATTN_SEED ? a.state_lse[attn_head_at(a, it.q0 + i, h)] : -INFINITY;
}
/* What sums of maximum m and sum l of keys, and a state of LSE `old`, count for in the sum of both. */
__device__ static inline attn_exit attn_weigh(float m, float l, float old) {
    attn_exit e = {};
    e.own = l > 0 ? 1 / l : 0, e.lse = l > 0 ? m + log2f(l) : -INFINITY;
    if (old == -INFINITY) return e;
    float top = fmaxf(e.lse, old), w = ex2(e.lse - top), w_old = ex2(old - top), sum = w + w_old;
    e.own *= w / sum, e.old = w_old / sum, e.lse = top + log2f(sum);
    return e;
}
/* Query i of the item, with maximum m and sum l of its own keys and `old` of its state: writes LSE (thread `first` of those that
 * hold the query) and says how O leaves. */
__device__ static inline attn_exit attn_leave(const attn_args &a, const attn_item &it, int i, int h, float m, float l, float old,
                                            bool first) {
    bool is_part = !(it.where & (ATTN_TO_O | ATTN_TO_STATE));
    attn_exit e = attn_weigh(m, l, is_part ? -INFINITY : old);
    size_t at = attn_head_at(a, it.q0 + i, h);
    if (is_part) {
        size_t part = attn_part_at(a, it.where >> ATTN_SLOT, i, h);
        if (first) a.part_lse[part] = e.lse;
        e.o32 = a.part_o + part * a.D;
        return e;
    }
    if (old > -INFINITY) e.seed = a.state_o + at * a.D;
    if (it.where & ATTN_TO_O) {
        e.o = a.o + at * a.D;
        return e;
    }
    e.o32 = a.state_o + at * a.D;
    if (first) a.state_lse[at] = e.lse;
    return e;
}
/* What leaves of columns col and col + 1; seeded: they have a state. */
__device__ static inline float2 attn_leave_sum(const attn_exit &e, bool seeded, int col, float x, float y) {
    x *= e.own, y *= e.own;
    if (seeded) {
        float2 s = *(const float2 *)(e.seed + col);
        x += e.old * s.x, y += e.old * s.y;
    }
    return make_float2(x, y);
}
__device__ static inline void attn_leave_pair(const attn_exit &e, int col, float x, float y) {
    const float2 v = attn_leave_sum(e, e.seed, col, x, y);
    if (e.o) *(uint32_t *)(e.o + col) = pack_bf16(v.x, v.y);
    else *(float2 *)(e.o32 + col) = v;
}

/* ---- Items on mma.sync: any D, any card ----
 * In: items (grid: item, kv head). Each warp of the block holds 16 queries of the item, all share the tiles of K and V.
 * WARPS 1: small items; WARPS 4: tiles of 64 queries. DP: D rounded up to 64, 128 or 256; what is beyond D is zero and, in steps
 * of 16, not computed. Shared: a ring of STAGES tiles of TOK positions of K and V (attn_piece_at). Bytes: K and V once per item;
 * FLOPs: 4 * 16 * WARPS * D * kv.
 * Why: m16n8k16 leaves P where PV wants its A operand, V is transposed on its way by ldmatrix, and nothing is synchronised beyond
 * the block. */
template <int DP, int WARPS> struct attn_tile_shape {
    static constexpr int TOK = DP == 256 ? 16 : WARPS == 1 ? 2048 / DP : 64;
    static constexpr int STAGES = WARPS == 1 ? 3 : 2;
    static constexpr int BYTES = STAGES * 2 * TOK * DP * 2;
};

/* A tile in shared memory: panels of 64 columns, each [rows][64] in rows of 128 bytes, 16-byte pieces at piece ^ (row % 8): what
 * TMA writes and wgmma reads with 128-byte swizzle; ldmatrix meets no bank twice. Element of a piece: */
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

/* Position of query i of the item; -1: there is none. */
__device__ static inline int attn_pos(const attn_args &a, const attn_item &it, int i) {
    return i < it.nq ? a.pos[attn_row(a, it.q0 + i)] : -1;
}
/* Scores of positions that a query must not see become -inf. at: positions of the thread's queries; kv: position of column 0. */
template <int N>
__device__ static inline void attn_mask(const attn_args &a, const attn_item &it, float (&s)[N], int2 at, int kv) {
    const int pos[2] = {at.x, at.y};
    int from[2], to[2]; /* the first position seen and the first not seen */
    kv += threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
        from[r] = max(it.kv0 + it.skip, a.window ? pos[r] - a.window + 1 : 0), to[r] = min(pos[r] + 1, it.kv1);
#pragma unroll
    for (int j = 0; j < N; j++) {
        int t = kv + j / 4 * 8 + (j & 1), r = j >> 1 & 1;
        if (t < from[r] || t >= to[r]) s[j] = -INFINITY;
    }
}

/* s of the thread's query r becomes 2^(scale s - m); their sum. */
template <int N> __device__ static inline float attn_powers(float (&s)[N], int r, float m, float scale) {
    const float base = m == -INFINITY ? 0 : m;
    float sum = 0;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
        s[i] = ex2(fmaf(s[i], scale, -base)), s[i + 1] = ex2(fmaf(s[i + 1], scale, -base));
        sum += s[i] + s[i + 1];
    }
    return sum;
}
template <int N> __device__ static inline float attn_top(const float (&s)[N], int r) { /* the largest of the query's s */
    float top = -INFINITY;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
    return quad_max(top);
}
/* Online softmax of the thread's two queries (one, if `rows` is 1): s becomes 2^(scale s - m), m and l go on; fade is what the
 * sums so far are to be multiplied by. */
template <int N>
__device__ static inline void attn_soften(float (&s)[N], float m[2], float l[2], float fade[2], float scale, int rows = 2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        fade[r] = 1;
        if (r >= rows) break;
        const float top = fmaxf(m[r], attn_top(s, r) * scale);
        fade[r] = ex2(m[r] - (top == -INFINITY ? 0 : top));
        m[r] = top, l[r] = l[r] * fade[r] + attn_powers(s, r, top, scale);
    }
}
/* The same with a maximum that stays behind by up to 8: 2^(scale s - m) is at most 256 then, and the sums so far mostly stay as
 * they are. Whether they are to be multiplied by fade in some thread of the warp. */
template <int N>
__device__ static inline bool attn_soften_lazily(float (&s)[N], float m[2], float l[2], float fade[2], float scale) {
    const float top[2] = {attn_top(s, 0) * scale, attn_top(s, 1) * scale};
    bool grows = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool more = top[r] > m[r] + 8;
        fade[r] = more ? ex2(m[r] - top[r]) : 1, m[r] = more ? top[r] : m[r], grows = grows || more;
        l[r] = l[r] * fade[r] + attn_powers(s, r, m[r], scale);
    }
    return __any_sync(~0u, grows);
}
template <int N> __device__ static inline void attn_fade(float (&acc)[N], const float fade[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] *= fade[i >> 1 & 1];
}

/* First position that some row of the item sees, down to a whole number of tiles from kv0. */
__device__ static inline int attn_first(const attn_args &a, const attn_item &it, int tile) {
    int first = max((int)it.skip, a.window ? it.pos_lo - a.window + 1 - it.kv0 : 0);
    return it.kv0 + first / tile * tile;
}
/* Tiles x .. y-1 from `first` on are seen whole by all rows of the item: no mask. */
__device__ static inline int2 attn_open_tiles(const attn_args &a, const attn_item &it, int first, int tile) {
    /* the last position, counted from `first`, that some row does not see, as it is another span's or behind the window */
    int hidden = max(it.kv0 + it.skip - 1, a.window ? it.pos_hi - a.window : -1) - first;
    return make_int2(hidden >= 0 ? hidden / tile + 1 : 0, max(0, min(it.pos_lo + 1, it.kv1) - first) / tile);
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
        if (i < open.x || i >= open.y) attn_mask(a, it, s, make_int2(attn_pos(a, it, w.i), attn_pos(a, it, w.i + 8)), kv);
        attn_soften(s, w.m, w.l, fade, a.scale);
        attn_fade(acc, fade);
        attn_pv<DP, TOK>(acc, s, k + TOK * DP, a.D);
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
    }
    attn_rows_end(a, it, w, h, acc);
}

template <int DP, int WARPS> static void attn_mma_launch(toka_device *d, const attn_args &a, int n) {
    launch_dependent(d, "attention", attn_mma<DP, WARPS>, dim3((unsigned)(n * a.K)), WARPS * 32,
                     attn_tile_shape<DP, WARPS>::BYTES, 1, a);
}

/* ---- Small items on Hopper: one warp, fed by TMA ----
 * In and out as above. Grid: (item, kv head), 32 threads. Shared: STAGES tiles of TOK positions, K and V, each [panels][TOK][64].
 * Bytes: K and V of the item's positions, rounded up to 8 positions at both ends; FLOPs: 4 * 16 * D * kv, of which G/16 are
 * wanted. Why: the limit is the bytes of K and V, so what counts is that many are under way: 9 or 13 warps of 24 or 16 KB on an
 * SM, none of which ever waits for another; the card itself hands the next item to the next free place. One lane asks for a tile
 * in one copy, for the first and the last one in pieces of 8 positions (D = 72 .. 120: two or four copies); the numbers of 32
 * pages lie in the lanes of the warp. Retired: all tiles in two or four copies (kin, D = 128: 23 us for 20, D = 64 10.4 for 10.0),
 * none in pieces (as fast in gangs, 4,096 of 10 to 300 6 % slower: it reads what nobody sees). At D = 64 more warps
 * help more than longer rings, as what an item costs beside its bytes is waiting: 8,192 samples with 88 positions of their own in
 * 454 us with two stages, 555 with three, 687 with four (H200; 398, 432 and 513 of them without a state to begin with). At D = 128
 * the same (977 and 1,200 to 1,344 us) up to some 128 positions an item, but 64 sequences of 4,096 in parts take 306 and 259. */
#if HOPPER
/* One warp's work, up to what leaves it. full: [STAGES] barriers. */
template <int DP, int TOK, int STAGES>
__device__ static inline void attn_small_work(const attn_args &a, const attn_item &it, int h, const CUtensorMap *whole,
                                              const CUtensorMap *fine, bf16 *ring, uint64_t *full, attn_rows &w,
                                              float (&acc)[DP / 2]) {
    constexpr int HALF = TOK * DP; /* elements of K's or V's tile */
    int lane = threadIdx.x % 32, first = attn_first(a, it, TOK), ids = 0, ids_at = -32;
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
        const bool is_whole = n == TOK && it.skip <= t;
        if (is_whole && (DP == 64 || a.D == DP)) { /* then `whole` is of K and V at once */
            mbar_expect_tx(bar, 2 * HALF * 2);
            tma_load_5d(to, whole, bar, 0, 0, row, 0, 0);
            return;
        }
        const int from = max(0, it.skip - t) / 8, pieces = (n + 7) / 8;
        mbar_expect_tx(bar, 2 * DP * 2 * (pieces - from) * 8);
        for (int v = 0; v < 2; v++)
            for (int panel = 0; panel < DP / 64; panel++)
                for (int j = from; j < (is_whole ? 1 : pieces); j++)
                    tma_load_2d(to + (v * HALF + panel * TOK * 64 + j * 8 * 64) * 2, is_whole ? whole : fine, bar, panel * 64,
                                row + (v << a.log2_B) + j * 8);
    };
    const int t = first - it.kv0, last = it.kv1 - it.kv0 - 1, in_page = t & ((1 << a.log2_B) - 1);
    /* its last row is asked for too early */
    const bool renews = a.early && n_tiles && n_tiles <= STAGES && it.kv1 == it.pos_hi + 1;
    int page = 0; /* of the last position */
    if (n_tiles) { /* no kernel of the step writes page tables; K and V may still change, but in the cache they do no harm */
        ids_at = t >> a.log2_B, ids = a.pages[it.page0 + min(ids_at + lane, last >> a.log2_B)];
        int of = lane / 2 % 2, from = of ? (t | ((1 << a.log2_B) - 1)) + 1 : t; /* two pages, as a gang's warps have at most */
        size_t row = (((size_t)__shfl_sync(~0u, ids, of) * a.K + h) * 2 + lane % 2 << a.log2_B) + (of ? 0 : in_page);
        if (lane < (a.early ? 4 : 2) && from <= last)
            bulk_prefetch(a.kv + row * a.D, min((1 << a.log2_B) - (of ? 0 : in_page), last + 1 - from) * a.D * 2);
        page = __shfl_sync(~0u, ids, min((last >> a.log2_B) - ids_at, 31));
    }
    for (int i = 0; a.early && i < STAGES && i < n_tiles; i++) ask(i);
    grid_wait();
    for (int i = 0; !a.early && i < STAGES && i < n_tiles; i++) ask(i);
    uint4 fresh = {};
    const int is_v = lane / (DP / 8), piece = lane % (DP / 8);
    if (renews && is_v < 2 && piece * 8 < a.D) {
        const size_t row = ((((size_t)page * a.K + h) * 2 + is_v) << a.log2_B) + (last & ((1 << a.log2_B) - 1));
        fresh = *(const uint4 *)(a.kv + row * a.D + piece * 8);
    }
    uint32_t q[DP / 16][4];
    float fade[2];
    w = attn_rows{lane / 4, {-INFINITY, -INFINITY}};
    attn_load_q<DP>(a, it, lane / 4, h, q);
    int rows = it.nq > 8 ? 2 : 1;
    for (int i = 0; i < n_tiles; i++) {
        int kv = first + i * TOK, n = it.kv1 - kv;
        bf16 *k = ring + i % STAGES * 2 * HALF;
        float s[TOK / 2];
        mbar_wait(smem_at(&full[i % STAGES]), i / STAGES & 1);
        if (renews && i == n_tiles - 1) {
            if (is_v < 2) *(uint4 *)(k + is_v * HALF + attn_piece_at(TOK, n - 1, piece)) = fresh;
            __syncwarp();
        }
        attn_qk<DP, TOK>(s, q, k, DP == 64 ? 64 : a.D);
        int from = max(0, it.kv0 + it.skip - kv) / 8 * 8;
        if (n < TOK || from) { /* 0 times what lies around the positions asked for must be 0 */
            for (int j = lane; j < TOK * (DP / 8); j += 32)
                if (j / (DP / 8) < from || j / (DP / 8) >= n)
                    *(uint4 *)(k + HALF + attn_piece_at(TOK, j / (DP / 8), j % (DP / 8))) = uint4{};
            fence_async_smem(); /* TMA will write there again */
            __syncwarp();
        }
        if (i < open.x || i >= open.y) attn_mask(a, it, s, make_int2(attn_pos(a, it, w.i), attn_pos(a, it, w.i + 8)), kv);
        attn_soften(s, w.m, w.l, fade, a.scale, rows);
        attn_fade(acc, fade);
        attn_pv<DP, TOK>(acc, s, k + HALF, DP == 64 ? 64 : a.D);
        __syncwarp();
        if (i + STAGES < n_tiles) ask(i + STAGES);
    }
}
#endif

template <int DP, int TOK, int STAGES>
__global__ void __launch_bounds__(32) attn_small(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap whole,
                                                 const __grid_constant__ CUtensorMap fine) {
#if HOPPER
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[STAGES];
    const attn_item it = a.items[blockIdx.x / a.K];
    attn_rows w;
    float acc[DP / 2] = {};
    attn_small_work<DP, TOK, STAGES>(a, it, blockIdx.x % a.K, &whole, &fine, (bf16 *)attn_smem, full, w, acc);
    attn_rows_end(a, it, w, blockIdx.x % a.K, acc);
#else
    __trap();
#endif
}

/* ---- Gangs: the parts of a small item in one CTA ----
 * In: gangs (grid: gang, kv head), n parts each, a warp for each; items: the level's small ones, of all queries of the gang or of
 * some. Out as above. Shared: STAGES tiles a warp; its sums take their place. Why: with few sequences each launch counts (3 us of
 * attn_join in a layer, H200), and parts that meet in shared memory need none. Sums: in the order of the parts.
 * Rows that share prefixes, by kin, attn_both and levels, us a layer (`gpu_attn bench kin`, H200, 2026-11-24; 704
 * positions of a prompt, of which 640 are common to all, up to 150 of a row's own, H = 32, K = 8):
 *
 *      samples         1 x 16            4 x 8             16 x 4            16 x 8            16 x 16           16 x 64
 *      D = 64     7.0, 17.1, 26.2  8.3, 20.2, 27.7  10.3,   - , 28.6  18.8, 24.7, 35.0  46.1, 30.0, 47.0   - , 72.4, 136
 *      D = 128   16.9, 22.6, 37.2  17.5, 25.3, 38.2  19.6,   - , 44.6  38.4, 37.6, 51.6   109, 47.5, 76.8   - , 134, 242
 *
 * 64 rows as a running job has them, 23, 19, 15 and 7 of four prompts (`gpu_attn bench running`): kin 15.5 and 31.4 us, for 17
 * gangs of eight kv heads are more than there are SMs; mixed, 16 gangs, 10.4 and 20.8.
 */
#if HOPPER
/* The parts of query i of a gang become one, in their order: columns col, col + 1, col + step ... by this thread of those that
 * hold it. marks(j), sums(j): of part j. All threads of a warp come. */
template <int MOST, class Marks, class Sums>
__device__ static inline void attn_gang_meet(const attn_args &a, const attn_merge &me, int i, int h, int col, int step,
                                             const Marks &marks, const Sums &sums) {
    attn_item it = {};
    it.q0 = me.q0, it.nq = (short)me.nq, it.where = me.where;
    bool there = i < me.nq;
    float old = there ? attn_old_lse(a, it, i, h) : -INFINITY, m = -INFINITY, l = 0;
    __syncwarp(); /* all have read it */
    if (!there) return;
    float2 part[MOST];
#pragma unroll
    for (int j = 0; j < MOST; j++) part[j] = j < me.n ? marks(j) : make_float2(-INFINITY, 0), m = fmaxf(m, part[j].x);
    float base = m == -INFINITY ? 0 : m;
#pragma unroll
    for (int j = 0; j < MOST; j++) part[j].x = ex2(part[j].x - base), l += part[j].y * part[j].x;
    attn_exit e = attn_leave(a, it, i, h, m, l, old, col == 0);
    for (; col < a.D; col += step) {
        float x = 0, y = 0;
#pragma unroll
        for (int j = 0; j < MOST; j++) {
            if (j >= me.n) break;
            if (part[j].x == 0) continue; /* it may not have the query: there are no sums */
            float2 v = *(const float2 *)(sums(j) + col);
            x += part[j].x * v.x, y += part[j].x * v.y;
        }
        attn_leave_pair(e, col, x, y);
    }
}
#endif

template <int DP, int TOK, int STAGES>
__global__ void __launch_bounds__(32 * attn_gang_most(DP), 1)
    attn_gang(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap whole,
              const __grid_constant__ CUtensorMap fine, const attn_merge *gangs) {
#if HOPPER
    constexpr int RING = STAGES * 2 * TOK * DP, GANG = attn_gang_most(DP); /* RING: elements */
    static_assert(RING * sizeof(bf16) >= ATTN_SMALL_Q * DP * sizeof(float), "sums take the ring's place");
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[GANG][STAGES];
    __shared__ float2 marks[GANG][ATTN_SMALL_Q]; /* maximum and sum of each query */
    const attn_merge me = gangs[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, warp = threadIdx.x / 32, quad = threadIdx.x % 4;
    if (warp < me.n) {
        const attn_item it = a.items[me.slot + warp];
        attn_rows w;
        float acc[DP / 2] = {}, *sums = (float *)((bf16 *)attn_smem + warp * RING);
        if (threadIdx.x % 32 < ATTN_SMALL_Q) marks[warp][threadIdx.x % 32] = float2{-INFINITY, 0};
        attn_small_work<DP, TOK, STAGES>(a, it, h, &whole, &fine, (bf16 *)attn_smem + warp * RING, full[warp], w, acc);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(w.l[r]);
            const int i = it.q0 - me.q0 + w.i + 8 * r; /* of the gang */
            if (w.i + 8 * r >= it.nq) continue;
            if (quad == 0) marks[warp][i] = float2{w.m[r], sum};
#pragma unroll
            for (int c = 0; c < DP / 8; c++) {
                const float2 pair = {acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]};
                *(float2 *)(sums + i * DP + c * 8 + quad * 2) = pair;
            }
        }
    } else {
        grid_launch_dependents();
        grid_wait();
    }
    __syncthreads();
    for (int at = 0; at < me.nq; at += blockDim.x / 16) { /* 16 threads a query */
        const int i = at + threadIdx.x / 16;
        attn_gang_meet<GANG>(a, me, i, h, threadIdx.x % 16 * 2, 32, [&](int j) { return marks[j][i]; }, [&](int j) {
            return (const float *)((bf16 *)attn_smem + j * RING) + i * DP;
        });
    }
#else
    __trap();
#endif
}

/* ---- Squads: a gang in a cluster ----
 * In and out as attn_gang. Grid: (gang, kv head, rank), in clusters of ATTN_SQUAD; warp w of rank r has part w * ATTN_SQUAD + r;
 * query i is rank i % ATTN_SQUAD's, to which all parts send what they have of it. Shared: STAGES tiles a warp, then the sums that
 * come, [part][row][DP]; added in the order of the parts, to the bit as in attn_gang. Why: 10 parts in one CTA are 160 KB, which
 * fit an SM only when the kernel ahead has left it; so K and V could not be fetched meanwhile, and all came through one SM. 1B, a
 * step: one sequence 759 -> 747 us, eight samples 845 -> 827 (H200, 2026-11-23). Two ranks where four do not fit: eight sequences
 * 829 -> 834. Eight ranks: as four. At least one CTA an SM: else ptxas counts with the whole cluster on one, and spills. */
template <int DP> __host__ __device__ static constexpr int attn_squad_most() { /* parts */
    return (attn_gang_most(DP) + ATTN_SQUAD - 1) / ATTN_SQUAD * ATTN_SQUAD;
}
#if HOPPER
/* How many of the queries 0 .. n-1 are rank c's. */
__device__ static inline int attn_squad_rows(int n, int c) { return (n - c + ATTN_SQUAD - 1) / ATTN_SQUAD; }
#endif
template <int DP, int TOK, int STAGES>
IN_CLUSTERS(ATTN_SQUAD) __global__ void __launch_bounds__(32 * (attn_squad_most<DP>() / ATTN_SQUAD), 1)
    attn_squad(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap whole,
               const __grid_constant__ CUtensorMap fine, const attn_merge *gangs) {
#if HOPPER
    constexpr int CTAS = ATTN_SQUAD, ROWS = ATTN_SMALL_Q / CTAS, MOST = attn_squad_most<DP>();
    constexpr int RING = STAGES * 2 * TOK * DP; /* elements */
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[MOST / CTAS][STAGES], come;
    __shared__ float2 marks[MOST][ROWS]; /* maximum and sum of each query */
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = cluster_rank();
    if (threadIdx.x == 0) mbar_init(smem_at(&come), 1), mbar_init_fence();
    __syncthreads();
    cluster_meet_arrive(); /* the others may know that the barrier is there */
    const int h = blockIdx.x / CTAS % a.K, n = warp * CTAS + rank; /* this warp's part */
    const attn_merge me = gangs[blockIdx.x / CTAS / a.K];
    if (warp == 0) { /* bytes that come here: of each part its marks of this rank's queries, and the sums of those that it has */
        int bytes = 0;
        if (lane < me.n) {
            const attn_item of = a.items[me.slot + lane];
            const int at = of.q0 - me.q0, own = attn_squad_rows(at + of.nq, rank) - attn_squad_rows(at, rank);
            bytes = attn_squad_rows(me.nq, rank) * 8 + own * DP * 4;
        }
        bytes = __reduce_add_sync(~0u, bytes);
        if (lane == 0) mbar_expect_tx(smem_at(&come), bytes);
    }
    const bool works = n < me.n;
    const uint32_t room = smem_at(attn_smem) + warps * RING * 2;
    attn_item it = {};
    attn_rows w;
    float acc[DP / 2] = {};
    if (works) {
        it = a.items[me.slot + n];
        attn_small_work<DP, TOK, STAGES>(a, it, h, &whole, &fine, (bf16 *)attn_smem + warp * RING, full[warp], w, acc);
    } else {
        grid_launch_dependents();
        grid_wait();
    }
    __syncwarp();
    cluster_meet_wait();
    const int q0 = it.q0 - me.q0;
    if (works) {
        if (lane < me.nq && (lane < q0 || lane >= q0 + it.nq)) /* queries that the part does not have */
            send_pair_to_peer(peer_at(smem_at(&marks[n][lane / CTAS]), lane % CTAS), -INFINITY, 0,
                              peer_at(smem_at(&come), lane % CTAS));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(w.l[r]);
            const int i = q0 + w.i + 8 * r, to = i % CTAS;
            if (w.i + 8 * r >= it.nq) continue;
            const uint32_t bar = peer_at(smem_at(&come), to);
            const uint32_t at = peer_at(room + ((n * ROWS + i / CTAS) * DP + lane % 4 * 2) * 4, to);
            if (lane % 4 == 0) send_pair_to_peer(peer_at(smem_at(&marks[n][i / CTAS]), to), w.m[r], sum, bar);
#pragma unroll
            for (int c = 0; c < DP / 8; c++) send_pair_to_peer(at + c * 32, acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1], bar);
        }
    }
    mbar_wait(smem_at(&come), 0); /* also so that nobody sends to a block that has left */
    const float *sums = (const float *)(attn_smem + warps * RING * 2);
    for (int row = warp; row * CTAS + rank < me.nq; row += warps)
        attn_gang_meet<MOST>(a, me, row * CTAS + rank, h, lane * 2, 64, [&](int j) { return marks[j][row]; },
                             [&](int j) { return sums + (j * ROWS + row) * DP; });
#else
    __trap();
#endif
}

/* ---- Tiles on Hopper: wgmma, after FlashAttention-3 ----
 * In and out as above. Grid: (item, kv head); WGS warpgroups of 64 queries each, and one of which a single warp works: it asks the
 * copy engine for K and V. Shared: Q [panels][64 WGS][64] and STAGES tiles of N positions of K and of V, each [panels][N][64].
 * FLOPs: 4 * 64 WGS * D * kv.
 * Why: S = Q K^T of tile j is under way together with P V of tile j-1, and the softmax of j runs beside the latter; P goes from
 * accumulators to the A operand within the registers. The warpgroups take turns in giving out products, so that one computes
 * exponentials while the tensor cores work for another.
 * A tile of 128 positions took a warpgroup 3,250 clocks at D = 128: giving out its own products 1,000 to 1,270, so that nothing
 * else of it runs beside them (P is read from its registers, probably why); exponentials 1,200 to 1,560; the rest turns, fading and
 * packing. So every instruction counts. Sums that mostly need not fade (attn_soften_lazily) and, where spans are long, tiles of 192
 * positions: causal prefill of 16,384 rows, us on an H200, 2026-11-24, D = 64 / 128: 2,328 / 4,204 before, 2,235 / 3,800 with. Few
 * rows a span: what an item took besides its tiles was as much as they take: no divisions ahead of Q, positions fetched along with
 * Q, and rows that leave by way of shared memory instead of four bytes at a time: 16 prompts of 512 rows 115 / 178 -> 101 / 146.
 * Retired (H100, causal prefill of 4,096 rows at D = 64 / 128, where it did 406 / 500 TFLOP/s then): no warp of its own for
 * loading, warp 0 asked between its products: 290 / 323; blocks that stay and take items in turn: 384 / 484, as the card deals out
 * blocks of unequal length better. The same with jobs dealt out by length and each next item fetched ahead (H200, us, 16 x 512 rows
 * / 4,096 / 16,384): D = 64 95 / 162 / 2,324 where it is 101 / 159 / 2,225, D = 128 148 / 263 / 3,930, 146 / 244 / 3,715 (there
 * with 20 bytes spilled in tiles of 192). 16,384 rows, D = 64 / 128: P by way of shared memory, so that nothing waits for products
 * of it, 2,288 / 3,803 -> 2,567 / 4,383 (the latter in tiles of 128, for there is no room; with P in registers those take 3,997);
 * turns that end ahead of P V, or none, 2,222 / 3,675 -> 2,252 / 3,732, 2,246 / 3,755; every eighth, fourth, third of the
 * exponentials as a polynomial, D = 64, 2,249 -> 2,386, 2,475, 2,535; two warpgroups and 192 positions, D = 64, 2,222 -> 2,456.
 * Tiles of 192 positions for short spans, 16 x 512 rows, D = 128: 178 -> 197. */
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
template <int DP, int N>
__device__ static inline void attn_wg_pv(float (&acc)[DP / 2], const uint32_t (&p)[N / 16][4], uint32_t v) {
#if HOPPER
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < N / 16; n++) wgmma_rs<DP, 1>(acc, p[n], wgmma_desc_trans(v, N * 128) + n * 128, 1);
    wgmma_commit();
#endif
}

/* The feeding warp: K and V of all tiles, in the order in which they are used, in blocks of 64 positions; blocks behind the last
 * position are left out. `before`: tiles that have gone through the ring. */
template <int DP, int WGS, int N, int STAGES>
__device__ static inline void attn_wg_feed(const attn_args &a, const CUtensorMap *map, const attn_item &it, int h, int first,
                                           int n_tiles, int before, uint32_t ks, uint32_t bars) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    int lane = threadIdx.x % 32, last = it.kv1 - it.kv0 - 1;
    int ids = 0, ids_at = -32; /* numbers of the pages ids_at .. ids_at+31, one per lane */
    for (int i = 0; i < 2 * n_tiles; i++) { /* K0, K1, V0, K2, V1 ... */
        int v = i == 2 * n_tiles - 1 || (i > 1 && i % 2 == 0), j = v ? (i - 1) / 2 : (i + 1) / 2, turn = before + j;
        int at = v * STAGES + turn % STAGES;
        int t = first + j * N - it.kv0, blocks = min(N / 64, (last - t) / 64 + 1);
        uint32_t to = ks + at * shape::TILE, full = bars + 8 * at;
        mbar_wait(full + 16 * STAGES, (turn / STAGES & 1) ^ 1);
        if (lane == 0) mbar_expect_tx(full, blocks * 64 * shape::PANELS * 128);
        for (int b = 0; b < blocks; b++, t += 64, to += 64 * 128) {
            int page = t >> a.log2_B;
            if (page - ids_at >= 32 || page < ids_at) ids_at = page, ids = a.pages[it.page0 + min(page + lane, last >> a.log2_B)];
            int row = (((__shfl_sync(~0u, ids, page - ids_at) * a.K + h) * 2 + v) << a.log2_B) + (t & ((1 << a.log2_B) - 1));
            for (int panel = 0; panel < shape::PANELS && lane == 0; panel++)
                tma_load_2d(to + panel * N * 128, map, full, panel * 64, row);
        }
    }
#endif
}

/* Q of one warpgroup to shared memory, swizzled, and its queries' positions, if wanted; what is not there is 0, and -1. */
template <int DP, int WGS, bool POS>
__device__ static inline void attn_wg_load_q(const attn_args &a, const attn_item &it, int h, int wg, bf16 *to, int *pos) {
#if HOPPER
    constexpr int PIECES = (DP + 63) / 64 * 8;
    if (POS && threadIdx.x % 128 < 64) pos[wg * 64 + threadIdx.x % 128] = attn_pos(a, it, wg * 64 + threadIdx.x % 128);
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

/* Keeps ptxas from sinking the softmax below the wgmma_wait behind it, where it would overlap no products: a store that never
 * happens (x is at least 0), but needs x and may not move past the wait. */
__device__ static inline void attn_hold(float x, uint32_t at) {
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.b32 [%1], %1;}" ::"f"(x), "r"(at) : "memory");
}

/* One warpgroup: its 64 queries against all tiles. BOTH: for attn_both, where all see the whole span, and where the tensor cores
 * have time to spare, so that lazy maxima would cost more than they save; else pos is room for the queries' positions. end(rows,
 * acc) says what becomes of the sums. */
template <int DP, int WGS, int N, int STAGES, bool BOTH, class End>
__device__ static inline void attn_wg_work(const attn_args &a, const attn_item &it, int h, int wg, int first, int n_tiles,
                                           int before, uint32_t qs, uint32_t full_k, char *smem, int *pos, const End &end) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    int lane = threadIdx.x % 32, at = before % STAGES, parity = before / STAGES & 1; /* of the tile that is next for P V */
    uint32_t ks = qs + shape::Q, vs = ks + STAGES * shape::TILE, full_v = full_k + 8 * STAGES;
    uint32_t empty_k = full_v + 8 * STAGES, empty_v = empty_k + 8 * STAGES;
    attn_rows w = {wg * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4, {-INFINITY, -INFINITY}};
    float s[N / 2], acc[DP / 2] = {}, fade[2];
    uint32_t p[N / 16][4];
    int2 open = attn_open_tiles(a, it, first, N);
    bool fades = true;
    auto soften = [&](int j) {
        if (j < open.x || j >= open.y)
            attn_mask(a, it, s, BOTH ? make_int2(it.kv1, it.kv1) : make_int2(pos[w.i], pos[w.i + 8]), first + j * N);
        if (BOTH) attn_soften(s, w.m, w.l, fade, a.scale);
        else fades = attn_soften_lazily(s, w.m, w.l, fade, a.scale);
    };
    attn_wg_load_q<DP, WGS, !BOTH>(a, it, h, wg, (bf16 *)smem, pos);
    qs += wg * 64 * 128;
    if (n_tiles) {
        mbar_wait(full_k + 8 * at, parity);
        attn_wg_qk<DP, N>(s, qs, WGS * 64 * 128, ks + at * shape::TILE);
        wgmma_wait<0>();
        wgmma_keep(s);
        if (lane == 0) mbar_arrive(empty_k + 8 * at);
        soften(0);
        attn_pack(p, s);
    }
    if (wg == WGS - 1 && !before) named_arrive(1 + WGS, 256); /* the first turn is the first's */
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
        if (fades) attn_fade(acc, fade);
        attn_pack(p, s);
    }
    if (n_tiles) {
        int n = it.kv1 - first - (n_tiles - 1) * N;
        mbar_wait(full_v + 8 * at, parity);
        if (n < N) attn_wg_clear<DP, N>((bf16 *)(smem + shape::Q + (STAGES + at) * shape::TILE), n, wg);
        attn_wg_pv<DP, N>(acc, p, vs + at * shape::TILE);
        wgmma_wait<0>();
        wgmma_keep(acc);
        if (lane == 0) mbar_arrive(empty_v + 8 * at);
    }
    end(w, acc);
#endif
}

/* One warpgroup's queries that are done leave by way of the shared memory where Q was, in pieces of 16 bytes. */
template <int DP, int WGS>
__device__ static inline void attn_wg_leave(const attn_args &a, const attn_item &it, const attn_rows &w, int h, int wg,
                                            const float (&acc)[DP / 2], bf16 *room) {
#if HOPPER
    constexpr int PIECES = (DP + 63) / 64 * 8;
    const int lane = threadIdx.x % 32, quad = lane % 4, row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
    named_sync(1 + wg, 128); /* Q has been read */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int i = w.i + 8 * r;
        const float sum = quad_sum(w.l[r]);
        if (i >= it.nq) continue;
        const attn_exit e = attn_leave(a, it, i, h, w.m[r], sum, attn_old_lse(a, it, i, h), false);
#pragma unroll
        for (int c = 0; c < DP / 8; c++) {
            const float2 v = attn_leave_sum(e, e.seed && c * 8 < a.D, c * 8 + quad * 2, acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]);
            *((uint32_t *)(room + attn_piece_at(WGS * 64, i, c)) + quad) = pack_bf16(v.x, v.y);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PIECES / 2; k++) {
        const int row = row0 + k * (32 / PIECES) + lane / PIECES, piece = lane % PIECES;
        if (row < it.nq && piece * 8 < a.D)
            *(uint4 *)(a.o + attn_head_at(a, it.q0 + row, h) * a.D + piece * 8) =
                *(const uint4 *)(room + attn_piece_at(WGS * 64, row, piece));
    }
#endif
}

template <int DP, int WGS, int N, int STAGES>
__global__ void __launch_bounds__(attn_wg_shape<DP, WGS, N, STAGES>::THREADS, 1)
    attn_wg(const __grid_constant__ attn_args a, const __grid_constant__ CUtensorMap map) {
#if HOPPER
    typedef attn_wg_shape<DP, WGS, N, STAGES> shape;
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t bars[4 * STAGES]; /* full K, full V, empty K, empty V */
    __shared__ attn_item it; /* not in registers, which are scarce */
    __shared__ int pos[WGS * 64];
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
        if (threadIdx.x < 32) attn_wg_feed<DP, WGS, N, STAGES>(a, &map, it, h, first, n_tiles, 0, qs + shape::Q, full_k);
    } else {
        regs_take<shape::REGS>();
        const int wg = threadIdx.x / 128 - 1;
        auto end = [&](const attn_rows &w, const float(&acc)[DP / 2]) {
            if (it.where & ATTN_TO_O) attn_wg_leave<DP, WGS>(a, it, w, h, wg, acc, (bf16 *)attn_smem);
            else attn_rows_end(a, it, w, h, acc);
        };
        attn_wg_work<DP, WGS, N, STAGES, false>(a, it, h, wg, first, n_tiles, 0, qs, full_k, attn_smem, pos, end);
    }
#else
    __trap();
#endif
}

/* ---- A shared prefix and what its rows have of their own, in one block, on Hopper; D = 64, 128 ----
 * In: items (n of them, then their rows' own items, one a row), each at most 128 queries of at most 1 << log2_rows rows against a
 * span that all of them see, or one row against none; each row's next and last span is its own. Out: o. Grid: a CTA per SM, which
 * does the (item, kv head) pairs that attn_plan_jobs gave it. One warp feeds two warpgroups with the
 * shared K and V as in attn_wg; seven warps take own parts, row by row as they come free. Bytes: K and V of the own positions;
 * FLOPs: 4 * 128 * D * shared positions. Why: the shared part is bound by the tensor cores, own parts by the bytes, so side by
 * side both cost what the longer one costs alone. The state between them waits in a hub, of which a block has two, until a warp
 * takes it: at D = 64 in shared memory. At D = 128, where Q takes 32 KB, the shared ring 64 and the own ones 112, there is no room
 * for twice 64 more, and items of half the queries would read the shared K and V twice; so hubs are 17 MB of global memory, a
 * third of the L2 cache. The state joins a row's own sums at their end: a block's first shared part begins when own parts do.
 * Measured on an H200, 2026-11-23 (`gpu_attn bench samples`: 8,192 samples of eight prompts, 675 positions shared, 88 on average
 * of their own): D = 64 395 us, where attn_wg takes 168 and attn_small 466 behind it; D = 128 851 us, 261 and 983. Of a job's 29
 * prompts: 367 and 789. States ahead of own sums: 399 and 854, and for 64 rows of four prompts, D = 128, 35 us instead of 30;
 * ahead where they are there by then: 395 and 846, but then time decides the order of sums, and with it the last bit. Copies that
 * promise the L2 cache 256 bytes: 401 and 873.
 * Retired, all at D = 64: a row's queries as 16 rows of S, half of them 0: 403 where it is 401, and for 256 rows of 16 prompts
 * 34.4 us where it is 29.8. With them: own parts that do not leave the cache first: 431. Own parts by copies of 8, 16 or 32
 * positions, up to 7 too many at both ends, one of K and one of V: 463; in loops over pieces of 8, three divisions a row and six
 * warps: 541; every fourth row to each of four warps, and one hub: 652. Rows that share little as launches of their own: 448 where
 * it was 414 (29 prompts). Jobs as they come to the blocks in turn: 406. A row looked up, or its queries read, while the one
 * before it is worked on: no gain.
 * ptxas before 12.8 spills where D = 64 has 112 registers for a thread of the shared part, and for any split at D = 128; there
 * levels do it, as for other head sizes. */
enum { ATTN_BOTH_N = 64, ATTN_OWN_STAGES = 2, ATTN_OWN_WARPS = 7 };
template <int DP> struct attn_both_shape {
    static constexpr int WGS = 2, N = ATTN_BOTH_N, STAGES = 2, THREADS = 512;
    static constexpr int REGS = DP == 128 ? 144 : NVCC_VERSION < 1208 ? 120 : 112; /* of a thread of the shared part; */
    static constexpr int OWN_REGS = 256 - REGS;                                    /* of others */
    typedef attn_wg_shape<DP, WGS, N, STAGES> shared;
    static constexpr int TOK = 2048 / DP;                         /* own positions of a tile */
    static constexpr int OWN_TILE = TOK * DP * 2;                 /* bytes of K or V */
    static constexpr int OWN_RING = ATTN_OWN_STAGES * 2 * OWN_TILE; /* of a warp */
    static constexpr int HUB = ATTN_BOTH_Q * DP;                  /* floats */
    static constexpr int OWN_AT = shared::BYTES, LSE_AT = OWN_AT + ATTN_OWN_WARPS * OWN_RING;
    static constexpr int HUB_AT = LSE_AT + 2 * ATTN_BOTH_Q * 4, BYTES = HUB_AT + (DP == 64 ? 2 * HUB * 4 : 0);
};

/* hub i % 2: the states of the block's item number i, on their way from the shared part to the own ones */
typedef struct attn_hubs {
    float *o, *lse; /* [2][ATTN_BOTH_Q][DP], of a query as attn_hub_at has it; [2][ATTN_BOTH_Q] */
    uint32_t full;  /* two barriers: an arrival a thread that writes; */
    uint32_t empty; /* and two: a thread of those that read, when its warp has left */
} attn_hubs;
/* Columns 32 j + g + {0, 8, 16, 24} of query i lie together: who wrote them holds all four, and so does who reads. Neither meets a
 * bank twice, and both fill sectors. */
template <int DP> __device__ static inline float4 *attn_hub_at(const attn_hubs &hubs, int round, int i, int j, int g) {
    return (float4 *)(hubs.o + (round & 1) * attn_both_shape<DP>::HUB + i * DP + j * 32 + ((g ^ i) & 7) * 4);
}
__device__ static inline float *attn_hub_lse(const attn_hubs &hubs, int round) { return hubs.lse + (round & 1) * ATTN_BOTH_Q; }

/* A warp of the shared part leaves its queries of the block's item number `round`. */
template <int DP>
__device__ static inline void attn_hub_put(const attn_args &a, const attn_item &it, const attn_rows &w, int h,
                                           const float (&acc)[DP / 2], const attn_hubs &hubs, int round) {
#if HOPPER
    int quad = threadIdx.x % 4;
    mbar_wait(hubs.empty + 8 * (round & 1), (round >> 1 & 1) ^ 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int i = w.i + 8 * r;
        float sum = quad_sum(w.l[r]);
        if (i >= it.nq) continue;
        attn_exit e = attn_leave(a, it, i, h, w.m[r], sum, attn_old_lse(a, it, i, h), false);
        if (quad == 0) attn_hub_lse(hubs, round)[i] = e.lse;
#pragma unroll
        for (int j = 0; j < DP / 16; j++) {
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int c = j / 2 * 4 + k;
                x[k] = acc[4 * c + 2 * r + j % 2] * e.own;
                if (e.seed) x[k] += e.old * e.seed[c * 8 + quad * 2 + j % 2];
            }
            *attn_hub_at<DP>(hubs, round, i, j / 2, quad * 2 + j % 2) = float4{x[0], x[1], x[2], x[3]};
        }
    }
    mbar_arrive(hubs.full + 8 * (round & 1));
#endif
}

typedef struct attn_own_row {
    int round, query;    /* number of the item in this block; the row's first query in it */
    int at;              /* of its queries in q and in o, elements */
    unsigned short from, to; /* positions, counted from its first page's */
} attn_own_row;

/* An item of a row by itself has no shared part. */
__device__ static inline void attn_hub_put_none(const attn_item &it, const attn_hubs &hubs, int round) {
#if HOPPER
    mbar_wait(hubs.empty + 8 * (round & 1), (round >> 1 & 1) ^ 1);
    if ((int)threadIdx.x - 128 < it.nq) attn_hub_lse(hubs, round)[threadIdx.x - 128] = -INFINITY;
    mbar_arrive(hubs.full + 8 * (round & 1));
#endif
}

/* What the blocks do, round by round (attn_plan.dev_jobs). */
typedef struct attn_jobs {
    const int *all;
    int n_rounds;
    __device__ inline int at(int round) const { return all[round * gridDim.x + blockIdx.x]; }
    __device__ inline int rounds() const { return n_rounds - (at(n_rounds - 1) < 0); } /* of this block */
} attn_jobs;

/* Positions of the tile of own positions that begins with t. All lie in one page. */
template <int TOK> __device__ static inline int attn_own_tile(const attn_args &a, int t, int end) {
    return min(min(TOK, end - t), (1 << a.log2_B) - (t & (1 << a.log2_B) - 1));
}

/* The rows that a warp does: it draws them from all of the block's, in their order, and asks for their tiles one behind the other.
 * All of it is time in which the warp computes nothing, so no divisions for a row, and a tile is one copy (attn_open_pair_map): its
 * n positions are the last n rows of K's and of V's part, before them are zeros. */
template <int DP> struct attn_own_feed {
    typedef attn_both_shape<DP> shape;
    const attn_args &a;
    const CUtensorMap *map;
    attn_jobs jobs;
    int n_rounds, log2_rows; /* of this block; rows of an item, at most */
    int *tickets;          /* of the block */
    attn_own_row *drawn;   /* [4] in shared memory */
    uint32_t ring, full;
    int round, own, nq, h; /* the item that the row drawn last is of; the first of its rows' own items; its queries; kv head */
    int n_drawn, n_asked;       /* rows, tiles */
    int t, end, page_ids;       /* the row drawn last: its next tile, and where it ends; its page number `lane` */
    __device__ inline bool draw() {
#if HOPPER
        for (int lane = threadIdx.x % 32;;) {
            int ticket = __shfl_sync(~0u, lane ? 0 : atomicAdd(tickets, 1), 0);
            int n = ticket >> log2_rows, r = ticket & (1 << log2_rows) - 1;
            if (n != round) {
                if (n >= n_rounds) return false;
                int job = jobs.at(n);
                const attn_item &it = a.items[job / a.K];
                round = n, h = job % a.K, own = it.where >> ATTN_SLOT, nq = it.nq;
            }
            if (r * a.G >= nq) continue; /* the item has fewer rows */
            const attn_item &it = a.items[own + r];
            t = it.skip, end = it.kv1 - it.kv0;
            page_ids = a.pages[it.page0 + min(lane, (end - 1) >> a.log2_B)];
            if (lane == 0)
                drawn[n_drawn % 4] = attn_own_row{n, r * a.G, (it.q0 * a.K + h * a.G) * DP, (unsigned short)t,
                                                  (unsigned short)end};
            __syncwarp();
            n_drawn++;
            return true;
        }
#else
        return false;
#endif
    }
    __device__ inline void ask() {
#if HOPPER
        if (t >= end && !draw()) return;
        const int in_page = t & (1 << a.log2_B) - 1, n = attn_own_tile<shape::TOK>(a, t, end), slot = n_asked % ATTN_OWN_STAGES;
        const int row = ((__shfl_sync(~0u, page_ids, t >> a.log2_B) * a.K + h) * 2 << a.log2_B) + in_page;
        const uint32_t to = ring + slot * 2 * shape::OWN_TILE, bar = full + 8 * slot;
        if (elect_one()) {
            mbar_expect_tx(bar, 2 * shape::OWN_TILE); /* zeros count too */
            tma_load_5d_once(to, map, bar, 0, n - shape::TOK, row, 0, 0);
        }
        n_asked++, t += n;
#endif
    }
};

/* Own parts: a row's queries are the columns of S^T = K Q^T and O^T = V^T P^T, eight of them, of which G count. So a thread holds
 * queries 2 (lane % 4) + {0, 1}, of S positions lane/4 + 8 i, of O columns lane/4 + 8 i. With queries as 16 rows it would be twice
 * the products and, at D = 128, more registers than there are. Piece 2 c + i of a row lies at piece i's address ^ c * 32. */

/* Query lane/4 of a row as the B operand. */
template <int DP> __device__ static inline void attn_own_q(const attn_args &a, int at, uint32_t (&q)[DP / 16][2]) {
    const bf16 *from = a.q + at + threadIdx.x % 32 / 4 * DP + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < DP / 8; c++) q[c / 2][c % 2] = threadIdx.x % 32 / 4 < a.G ? *(const uint32_t *)(from + c * 8) : 0;
}

/* s[16-position block][4] = K Q^T, in two chains of products, as one would be long. */
template <int DP, int TOK>
__device__ static inline void attn_own_qk(float (&s)[TOK / 4], const uint32_t (&q)[DP / 16][2], const bf16 *k) {
    const uint32_t at = smem_at(k + attn_piece_at(TOK, threadIdx.x % 16, threadIdx.x % 32 / 16));
    float odd[TOK / 4];
#pragma unroll
    for (int i = 0; i < TOK / 4; i++) s[i] = odd[i] = 0;
#pragma unroll
    for (int i = 0; i < DP * TOK / 256; i += 4) { /* four at a time are under way */
        uint32_t x[4][4];
#pragma unroll
        for (int c = 0; c < 4; c++) ldmatrix_x4(x[c], (at ^ c * 32) + i * 512);
#pragma unroll
        for (int c = 0; c < 4; c++) mma_16816((c % 2 ? odd : s) + (DP == 64 ? i : 0), x[c], q[DP == 64 ? c : i + c]);
    }
#pragma unroll
    for (int i = 0; i < TOK / 4; i++) s[i] += odd[i];
}

/* Scores of a tile's first positions, all but n, become -inf. */
template <int TOK> __device__ static inline void attn_own_trim(float (&s)[TOK / 4], int n) {
#pragma unroll
    for (int i = 0; i < TOK / 4; i++)
        if ((int)threadIdx.x % 32 / 4 + i / 2 * 8 < TOK - n) s[i] = -INFINITY;
}

/* attn_soften of the thread's two queries. A tile has a position at least: the maximum is a number. */
template <int N>
__device__ static inline void attn_own_soften(float (&s)[N], float (&m)[2], float (&l)[2], float (&fade)[2], float scale) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
        float top = s[e];
#pragma unroll
        for (int i = e + 2; i < N; i += 2) top = fmaxf(top, s[i]);
#pragma unroll
        for (int k = 4; k < 32; k *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, k));
        top = fmaxf(m[e], top * scale);
        fade[e] = ex2(m[e] - top), l[e] *= fade[e], m[e] = top;
#pragma unroll
        for (int i = e; i < N; i += 2) s[i] = ex2(fmaf(s[i], scale, -top)), l[e] += s[i];
    }
}

/* acc[16-column block of O][4] += V^T P^T. */
template <int DP, int TOK>
__device__ static inline void attn_own_pv(float (&acc)[DP / 4], const float (&s)[TOK / 4], const bf16 *v) {
    const uint32_t at = smem_at(v + attn_piece_at(TOK, threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, threadIdx.x / 8 % 2));
#pragma unroll
    for (int n = 0; n < TOK / 16; n++) {
        uint32_t p[2];
#pragma unroll
        for (int i = 0; i < 2; i++) p[i] = transpose_8x8(pack_bf16(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
#pragma unroll
        for (int i = 0; i < DP / 16; i += 4) {
            uint32_t x[4][4];
#pragma unroll
            for (int c = 0; c < 4; c++) ldmatrix_x4_trans(x[c], (at ^ c * 32) + i * TOK * 32 + n * 2048);
#pragma unroll
            for (int c = 0; c < 4; c++) mma_16816(acc + 4 * (i + c), x[c], p);
        }
    }
}

/* The row's state joins its sums, like a key of score LSE and value O. */
template <int DP>
__device__ static inline void attn_own_join(const attn_args &a, const attn_own_row &row, float (&acc)[DP / 4], float (&m)[2],
                                            float (&l)[2], const attn_hubs &hubs) {
    int group = threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
        int g = threadIdx.x % 4 * 2 + e, i = row.query + min(g, a.G - 1);
        float lse = g < a.G ? attn_hub_lse(hubs, row.round)[i] : -INFINITY, top = fmaxf(m[e], lse);
        bool there = lse > -INFINITY; /* else what lies in the hub may be no number */
        float w = there ? ex2(m[e] - top) : 1, w_old = there ? ex2(lse - top) : 0;
        m[e] = top, l[e] = l[e] * w + (group == 0 ? w_old : 0); /* of a query's l, eight threads hold a part */
#pragma unroll
        for (int j = 0; j < DP / 32; j++) {
            const float4 *from = attn_hub_at<DP>(hubs, row.round, i, j, group), x = DP == 64 ? *from : __ldcg(from);
            float *to = acc + 8 * j + e;
            to[0] = to[0] * w + (there ? w_old * x.x : 0), to[2] = to[2] * w + (there ? w_old * x.y : 0);
            to[4] = to[4] * w + (there ? w_old * x.z : 0), to[6] = to[6] * w + (there ? w_old * x.w : 0);
        }
    }
}

/* It leaves as o. */
template <int DP> __device__ static inline void attn_own_end(const attn_args &a, const attn_own_row &row,
                                                             const float (&acc)[DP / 4], float (&l)[2]) {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int k = 4; k < 32; k *= 2) l[e] += __shfl_xor_sync(~0u, l[e], k);
        l[e] = __fdividef(1, l[e]);
    }
    bf16 *o = a.o + row.at + g * DP + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < DP / 8; c++) {
        uint32_t x = transpose_8x8(pack_bf16(acc[2 * c] * l[0], acc[2 * c + 1] * l[1]));
        if (g < a.G) *(uint32_t *)(o + c * 8) = x;
    }
}

/* This warp has done with the hub states before number `to`; it released those before `left` already. Each warp releases each,
 * rows or not, once it is full: not having waited for a hub's last state, it would take that one's phase for this one's. */
__device__ static inline void attn_hubs_leave(const attn_hubs &hubs, int &left, int to) {
#if HOPPER
    for (; left < to; left++) {
        mbar_wait(hubs.full + 8 * (left & 1), left >> 1 & 1);
        mbar_arrive(hubs.empty + 8 * (left & 1));
    }
#endif
}

/* One warp: its rows, tile by tile. When one is done, the next is drawn already, for its first tile was asked for; else there is
 * none. */
template <int DP> __device__ static inline void attn_own_work(attn_own_feed<DP> &feed, const attn_hubs &hubs, bf16 *ring) {
#if HOPPER
    typedef attn_both_shape<DP> shape;
    constexpr int TOK = shape::TOK;
    const attn_args &a = feed.a;
    int left = 0;
    for (int i = 0; i < ATTN_OWN_STAGES; i++) feed.ask();
    for (int k = 0, used = 0; k < feed.n_drawn; k++) {
        const attn_own_row row = feed.drawn[k % 4];
        uint32_t q[DP / 16][2];
        float acc[DP / 4] = {}, m[2] = {-INFINITY, -INFINITY}, l[2] = {}, fade[2];
        attn_own_q<DP>(a, row.at, q);
        for (int t = row.from, n; t < row.to; t += n, used++) {
            int slot = used % ATTN_OWN_STAGES;
            bf16 *kt = ring + slot * shape::OWN_TILE, *vt = kt + shape::OWN_TILE / 2;
            float s[TOK / 4];
            n = attn_own_tile<TOK>(a, t, row.to);
            mbar_wait(feed.full + 8 * slot, used / ATTN_OWN_STAGES & 1);
            attn_own_qk<DP, TOK>(s, q, kt);
            if (n < TOK) attn_own_trim<TOK>(s, n);
            attn_own_soften(s, m, l, fade, a.scale);
#pragma unroll
            for (int i = 0; i < DP / 4; i++) acc[i] *= fade[i & 1];
            attn_own_pv<DP, TOK>(acc, s, vt);
            __syncwarp();
            feed.ask();
        }
        attn_hubs_leave(hubs, left, row.round); /* those in which it has no rows */
        mbar_wait(hubs.full + 8 * (row.round & 1), row.round >> 1 & 1);
        attn_own_join<DP>(a, row, acc, m, l, hubs);
        attn_own_end<DP>(a, row, acc, l);
        if (k + 1 == feed.n_drawn || feed.drawn[(k + 1) % 4].round > row.round) attn_hubs_leave(hubs, left, row.round + 1);
    }
    attn_hubs_leave(hubs, left, feed.n_rounds);
#endif
}

/* The two warpgroups and the warp that feeds them go through the block's items. */
template <class Work> __device__ static inline void attn_both_items(const attn_args &a, const attn_jobs &jobs, const Work &work) {
    for (int round = 0, tiles = 0, n_rounds = jobs.rounds(); round < n_rounds; round++) {
        const int job = jobs.at(round);
        const attn_item &it = a.items[job / a.K];
        constexpr int N = ATTN_BOTH_N;
        int first = attn_first(a, it, N), n_tiles = (it.kv1 - first + N - 1) / N;
        work(it, job % a.K, first, n_tiles, tiles, round);
        tiles += n_tiles;
    }
}

template <int DP>
__global__ void __launch_bounds__(attn_both_shape<DP>::THREADS, 1)
    attn_both(const __grid_constant__ attn_args a, const attn_jobs jobs, int log2_rows, float *far_hubs,
              const __grid_constant__ CUtensorMap shared_map, const __grid_constant__ CUtensorMap own_map) {
#if HOPPER
    typedef attn_both_shape<DP> shape;
    constexpr int WGS = shape::WGS, N = shape::N, STAGES = shape::STAGES, OWN = ATTN_OWN_STAGES * ATTN_OWN_WARPS;
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t bars[4 * STAGES + OWN + 4];
    __shared__ attn_own_row drawn[ATTN_OWN_WARPS][4];
    __shared__ int tickets;
    uint32_t qs = smem_at(attn_smem), full_k = smem_at(bars), own_full = full_k + 32 * STAGES, meet = own_full + 8 * OWN;
    attn_hubs hubs = {DP == 64 ? (float *)(attn_smem + shape::HUB_AT) : far_hubs + (size_t)blockIdx.x * 2 * shape::HUB,
                      (float *)(attn_smem + shape::LSE_AT), meet, meet + 16};
    int role = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * STAGES; i++) mbar_init(full_k + 8 * i, 1), mbar_init(full_k + 8 * (2 * STAGES + i), 4 * WGS);
        for (int i = 0; i < OWN; i++) mbar_init(own_full + 8 * i, 1);
        for (int i = 0; i < 2; i++) mbar_init(hubs.full + 8 * i, WGS * 128), mbar_init(hubs.empty + 8 * i, ATTN_OWN_WARPS * 32);
        tickets = 0;
        mbar_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_wait();
    if (role == 1 || role == 2) {
        if constexpr (DP == 64) regs_give<shape::REGS>();
        else regs_take<shape::REGS>();
        attn_both_items(a, jobs, [&](const attn_item &it, int h, int first, int n_tiles, int before, int round) {
            if (!n_tiles) return attn_hub_put_none(it, hubs, round);
            auto put = [&](const attn_rows &w, const float(&acc)[DP / 2]) { attn_hub_put<DP>(a, it, w, h, acc, hubs, round); };
            attn_wg_work<DP, WGS, N, STAGES, true>(a, it, h, role - 1, first, n_tiles, before, qs, full_k, attn_smem, NULL, put);
            named_sync(role, 128); /* Q has been read */
        });
    } else {
        if constexpr (DP == 64) regs_take<shape::OWN_REGS>();
        else regs_give<shape::OWN_REGS>();
        int own = warp < 4 ? warp - 1 : warp - 9; /* warps 1, 2, 3 and 12 .. 15 */
        char *ring = attn_smem + shape::OWN_AT + own * shape::OWN_RING;
        attn_own_feed<DP> feed = {a, &own_map, jobs, jobs.rounds(), log2_rows, &tickets, drawn[max(own, 0)], smem_at(ring),
                                  own_full + 8 * ATTN_OWN_STAGES * own, -1};
        if (own >= 0) attn_own_work<DP>(feed, hubs, (bf16 *)ring);
        if (warp == 0)
            attn_both_items(a, jobs, [&](const attn_item &it, int h, int first, int n_tiles, int before, int) {
                attn_wg_feed<DP, WGS, N, STAGES>(a, &shared_map, it, h, first, n_tiles, before, qs + shape::shared::Q, full_k);
            });
    }
#else
    __trap();
#endif
}

template <int DP> static void attn_both_launch(toka_device *d, const attn_args &a, const CUtensorMap *map) {
    const attn_plan *p = d->attn;
    typedef attn_both_shape<DP> room;
    launch_dependent(d, "attention", attn_both<DP>, dim3((unsigned)p->grid), room::THREADS, room::BYTES, 1, a,
                     attn_jobs{p->dev_jobs, p->n_rounds}, attn_both_log2_rows(p), p->hubs, map[ATTN_MAP_64], map[ATTN_MAP_PAIR]);
}

/* The map of whole tiles of TOK positions: of K and V at once, where their rows fill the panels. */
template <int DP, int TOK> static const CUtensorMap &attn_whole_map(const attn_args &a, const CUtensorMap *map) {
    return map[a.D == DP ? ATTN_MAP_PAIR : TOK == 16 ? ATTN_MAP_16 : ATTN_MAP_32];
}
template <int DP, int TOK, int STAGES>
static void attn_small_launch(toka_device *d, const attn_args &a, int n, const CUtensorMap *map) {
    launch_dependent(d, "attention", attn_small<DP, TOK, STAGES>, dim3((unsigned)(n * a.K)), 32, STAGES * 2 * TOK * DP * 2, 1, a,
                     attn_whole_map<DP, TOK>(a, map), map[ATTN_MAP_8]);
}
template <int DP, int TOK, int STAGES>
static void attn_gang_launch(toka_device *d, const attn_args &a, const attn_level *l, const CUtensorMap *map) {
    launch_dependent(d, "attention", attn_gang<DP, TOK, STAGES>, dim3((unsigned)(l->n_gangs * a.K)), 32 * l->gang_warps,
                     (size_t)l->gang_warps * STAGES * 2 * TOK * DP * 2, 1, a, attn_whole_map<DP, TOK>(a, map),
                     map[ATTN_MAP_8], d->attn->dev_merges + l->gang0);
}
template <int DP, int TOK, int STAGES>
static void attn_squad_launch(toka_device *d, const attn_args &a, const attn_level *l, const CUtensorMap *map) {
    const int warps = ceil_div(l->gang_warps, ATTN_SQUAD);
    launch_dependent(d, "attention", attn_squad<DP, TOK, STAGES>, dim3((unsigned)(l->n_gangs * a.K * ATTN_SQUAD)), 32 * warps,
                     (size_t)warps * (STAGES * 2 * TOK * DP * 2 + ATTN_SMALL_Q * DP * 4), 1, a,
                     attn_whole_map<DP, TOK>(a, map), map[ATTN_MAP_8], d->attn->dev_merges + l->gang0);
}
template <int DP, int WGS, int N, int STAGES>
static void attn_wg_launch(toka_device *d, const attn_args &a, int n, const CUtensorMap *map) {
    typedef attn_wg_shape<DP, WGS, N, STAGES> room;
    launch_dependent(d, "attention", attn_wg<DP, WGS, N, STAGES>, dim3((unsigned)(n * a.K)), room::THREADS, room::BYTES, 1, a,
                     map[ATTN_MAP_64]);
}

/* ---- Merge of the parts of split-KV ----
 * In: merges (grid.x: merge, kv head; grid.y: query), n parts each. Out: as the item that was cut would have written. Block: 128
 * threads; D/4 of them hold a row, so 128 / (D/4) parts are read at a time; the sums of these groups are added in a fixed order.
 * Bytes: n * D * 4 per query.
 * Retired: a warp per query and merge of an item one behind the other; 57 us where this one and the tiles together take 12. */
__global__ static void __launch_bounds__(128) attn_join(const __grid_constant__ attn_args a, const attn_merge *merges) {
    __shared__ float4 sums[128];
    __shared__ float tops[4], weights[128];
    const attn_merge me = merges[blockIdx.x / a.K];
    int h = blockIdx.x % a.K, i = blockIdx.y;
    int row = a.D / 4, groups = 128 / row, group = threadIdx.x / row, col = threadIdx.x % row * 4;
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

static void attn_open_map(toka_device *d, CUtensorMap *map, const bf16 *kv, int rank, const cuuint64_t *size,
                          const cuuint64_t *strides, const cuuint32_t *box) {
    const cuuint32_t step[5] = {1, 1, 1, 1, 1};
    CUresult code = d->encode_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)rank, (void *)kv, size, strides, box, step,
                                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch(d, code ? cudaErrorInvalidValue : cudaSuccess, "tensor map of the KV cache");
}
/* Any number of positions up to TOK of K and V, from any on, in one copy; D 64 or 128. Coordinates (0, i, row, 0, 0), row: of K's
 * first position in the layer. Dimensions 1 and 2 both go from row to row: i = n - TOK is outside of dimension 1 until there are n
 * rows to go, and what is outside is not read, but 0 in shared memory. Dimension 3 goes from panel to panel. */
static void attn_open_pair_map(toka_device *d, CUtensorMap *map, const bf16 *kv) {
    const cuuint64_t D = (cuuint64_t)d->shape->D, row = D * sizeof(bf16), size[5] = {64, 2048 / D, d->kv_layer / D, D / 64, 2};
    const cuuint64_t strides[4] = {row, row, 128, row * (cuuint64_t)d->shape->B};
    const cuuint32_t box[5] = {64, 2048 / (cuuint32_t)D, 1, (cuuint32_t)D / 64, 2};
    attn_open_map(d, map, kv, 5, size, strides, box);
}

/* Tensor maps of K and V, boxes of 64 columns and 8, 16, 32 and 64 rows, where the Hopper kernels can run, and attn_both's. */
static void attn_open_maps(toka_device *d) {
    const toka_shape *sh = d->shape;
    attn_plan *p = d->attn;
    if (!p->hopper || d->error.code) return;
    p->maps = (CUtensorMap *)aligned_alloc(64, (size_t)sh->L * ATTN_MAPS * sizeof *p->maps);
    if (!p->maps) abort();
    for (int i = 0; i < sh->L * ATTN_MAPS; i++) {
        const bf16 *kv = d->kv + (size_t)(i / ATTN_MAPS) * d->kv_layer;
        const cuuint64_t size[2] = {(cuuint64_t)sh->D, d->kv_layer / sh->D}, stride = (cuuint64_t)sh->D * sizeof(bf16);
        const cuuint32_t box[2] = {64, 8u << i % ATTN_MAPS};
        if (i % ATTN_MAPS != ATTN_MAP_PAIR) attn_open_map(d, p->maps + i, kv, 2, size, &stride, box);
        else if (sh->D == 64 || sh->D == 128) attn_open_pair_map(d, p->maps + i, kv);
    }
}

/* Takes all memory of attention. d->kv and stream are set beside what attn_plan_open wants. Failures are latched. */
static void attn_open(toka_device *d) {
    const toka_shape *sh = d->shape;
    attn_plan_open(d);
    attn_plan *p = d->attn;
    size_t rows = (size_t)d->options.max_tokens * sh->H, parts = (size_t)p->max_slots * sh->K * ATTN_SMALL_Q;
    p->state_o = (float *)dev_alloc(d, rows * sh->D * sizeof(float), "attention state");
    p->state_lse = (float *)dev_alloc(d, rows * sizeof(float), "attention state");
    p->part_o = (float *)dev_alloc(d, parts * sh->D * sizeof(float), "attention parts");
    p->part_lse = (float *)dev_alloc(d, parts * sizeof(float), "attention parts");
    if (p->has_both && sh->D == 128) /* else they are in shared memory */
        p->hubs = (float *)dev_alloc(d, (size_t)d->n_sms * 2 * attn_both_shape<128>::HUB * sizeof(float), "attention hubs");
    attn_open_maps(d);
}

static void attn_launch_items(toka_device *d, int layer, attn_args a, const attn_level *l, bool small) {
    const attn_plan *p = d->attn;
    const CUtensorMap *map = p->maps ? p->maps + ATTN_MAPS * layer : NULL;
    const int n = small ? l->n_small : l->n_tiles;
    if (!n) return;
    a.items = p->dev_items + (small ? l->small0 : l->tile0);
    if (map && small && a.D <= 64) attn_small_launch<64, 32, 2>(d, a, n, map);
    else if (map && small) l->brief ? attn_small_launch<128, 16, 2>(d, a, n, map) : attn_small_launch<128, 16, 3>(d, a, n, map);
    else if (map && a.D <= 64) attn_wg_launch<64, 3, 128, 3>(d, a, n, map);
    else if (map && a.D <= 96) attn_wg_launch<96, 2, 128, 3>(d, a, n, map);
    else if (map && l->lengthy && !(a.window && a.window < ATTN_LENGTHY)) attn_wg_launch<128, 2, 192, 2>(d, a, n, map);
    else if (map) attn_wg_launch<128, 2, 128, 3>(d, a, n, map);
    else if (a.D <= 64) small ? attn_mma_launch<64, 1>(d, a, n) : attn_mma_launch<64, 4>(d, a, n);
    else if (a.D <= 128) small ? attn_mma_launch<128, 1>(d, a, n) : attn_mma_launch<128, 4>(d, a, n);
    else small ? attn_mma_launch<256, 1>(d, a, n) : attn_mma_launch<256, 4>(d, a, n);
}

/* Gangs are squads where they are all there is to do, and all blocks run at once. The latter is the same for all tensor ranks. */
static bool attn_is_squad(const attn_plan *p) {
    const attn_level *l = p->levels;
    bool alone = p->squads && p->n_levels == 1 && l->n_gangs && !l->n_tiles && !l->n_merges && !p->n_both;
    return alone && l->n_gangs * p->K * ATTN_SQUAD <= p->n_sms;
}

static void attn_launch_gangs(toka_device *d, int layer, attn_args a, const attn_level *l) {
    const attn_plan *p = d->attn;
    const CUtensorMap *map = p->maps + ATTN_MAPS * layer;
    a.items = p->dev_items + l->small0;
    if (attn_is_squad(p)) a.D <= 64 ? attn_squad_launch<64, 32, 2>(d, a, l, map) : attn_squad_launch<128, 16, 2>(d, a, l, map);
    else a.D <= 64 ? attn_gang_launch<64, 32, 2>(d, a, l, map) : attn_gang_launch<128, 16, 2>(d, a, l, map);
}

/* Are squads captured for T rows? If those can be squads: then the gangs are as few as they can be. */
static bool attn_has_squads(const attn_plan *p, int T) {
    if (!p || !p->hopper || !p->squads || !p->small_rows) return false;
    return ceil_div(T, p->small_rows) * p->K * ATTN_SQUAD <= p->n_sms;
}

/* Kernels that `attention` launches for the plan. */
static int attn_launches(const attn_plan *p) {
    int n = p->n_both > 0;
    for (int i = 0; i < p->n_levels; i++) {
        const attn_level *l = &p->levels[i];
        n += (l->n_tiles > 0) + (l->n_small > 0) + (l->n_gangs > 0) + (l->n_merges > 0);
    }
    return n;
}

/* q: [T][H][D], o: [T][H][D], both on the device, not the same. Pages and work lists are those of attn_plan_step. */
static void attention(toka_device *d, int layer, const bf16 *q, bf16 *o) {
    const toka_shape *sh = d->shape;
    const attn_plan *p = d->attn;
    const int G = sh->H / sh->K;
    attn_args a = {.q = q, .o = o, .kv = d->kv + (size_t)layer * d->kv_layer, .pages = p->dev_pages, .pos = d->rows.pos,
                   .state_o = p->state_o, .state_lse = p->state_lse, .part_o = p->part_o, .part_lse = p->part_lse,
                   .K = sh->K, .G = G, .D = sh->D, .log2_B = __builtin_ctz(sh->B), .window = d->layers[layer].window,
                   .inv_G = (uint32_t)(((1ll << 31) - 1) / G + 1), .scale = (float)(M_LOG2E / sqrt((double)sh->D)),
                   .early = p->early};
    if (d->error.code) return;
    for (int i = 0; i < p->n_levels; i++) {
        const attn_level *l = &p->levels[i];
        attn_launch_items(d, layer, a, l, false);
        attn_launch_items(d, layer, a, l, true);
        if (l->n_gangs) attn_launch_gangs(d, layer, a, l);
        if (!l->n_merges) continue;
        launch_dependent(d, "attention, parts", attn_join, dim3((unsigned)(l->n_merges * a.K), (unsigned)l->merge_nq), 128, 0, 1,
                         a, p->dev_merges + l->merge0);
    }
    if (!p->n_both) return;
    const CUtensorMap *map = p->maps + ATTN_MAPS * layer;
    a.items = p->dev_items + p->both0;
    a.D == 64 ? attn_both_launch<64>(d, a, map) : attn_both_launch<ATTN_BOTH_D>(d, a, map);
}

/* ===========================================================================
 * MARK: 10. Ranks: groups and transfers [kernel]
 * What the ranks of a model share, each a GPU with a thread of its own in this process: sums over the tensor ranks of a stage, x
 * from a stage to the next, drawn ids from the last stage to the first. No op waits for a GPU; where it needs what another rank
 * does it enqueues that its GPU waits.
 *
 *   meeting    CTA b of a kernel and CTA b of the same kernel on the stage's other ranks. Each writes what it has into the memory
 *              of the others, then raises a count in their mailboxes (st.release.sys) and waits until the counts in its own have
 *              come as far (ld.acquire.sys). Counts only rise. Every kernel that meets has the same number of CTAs, so all CTAs of
 *              a rank have met equally often between kernels
 *   sum        one-shot: each rank pushes its x to all others, meets, adds up in the order of the ranks. Two-shot: each pushes to
 *              rank q the q-th part of its x, meets, adds up its own part, pushes the sum into everybody's x, meets. In float32,
 *              rounded once, the same bits on every rank. One-shot has one meeting, two-shot moves 2/n of the bytes
 *   scatter    sums of many rows, on Hopper: two-shot, whose first push is the GEMM's epilogue and hides behind its products. Rank
 *              q adds up the q-th part of the rows, x of which it alone keeps, and pushes what is read next: their norm, or at the
 *              end of a stage x itself
 *   link       x goes into the sender's outbox on its compute stream, from there by a copy engine (its copy stream) into one of
 *              the receiver's TOKA_GPU_LINK_BUFFERS slots, and into x on the receiver's compute stream. Events say when a slot is full,
 *              and when it is free. So a stage computes on while its result travels, and may be some steps ahead of the next
 *   draws      the last stage has the table of the last token of each slot and sends all of it, behind each step that draws, to
 *              the first stage's ranks, with an event per step; embed of a step that `needs` step k waits for k's. A copy may
 *              already hold what a later step m drew for slot q. That is harmless: only steps up to m read the older value, and m
 *              draws only after all first ranks have embedded m
 *
 * Double buffering. What one-shot (and the exchange of samples in chapter 11) writes into the others' memory goes to half c % 2,
 * c the number of the meeting. Who writes there again is at meeting c + 2 or later, so behind meeting c + 1, which is another
 * kernel's: all ranks had ended the kernel of meeting c when they came to it. Two-shot writes to a rank again only behind its
 * second meeting.
 *
 * Why nothing waits for ever. Order all pieces of work by step, within a step by stage, within a stage as the op loop has them
 * (all ranks of a stage run the same ops). A thread waits only for another's enqueueing: receive of step j at stage s for send of
 * j at s - 1; send of j at s for receive of j - TOKA_GPU_LINK_BUFFERS at s + 1; embed of j for the draws of step `needs` < j. A GPU waits
 * for the same, and in a meeting for the same op of its stage. Each waits for what is earlier in the order, or for its equals that
 * wait for earlier ones; so of all that is not done the first can go on. A kernel that spins holds some multiprocessors of its own
 * GPU, of which nobody needs any to come to the meeting. Where a debugging variable puts several ranks on a GPU the kernels that
 * meet are small enough to leave room, and start their dependents only when they have met.
 *
 * Failure. `over` lies in host memory that all GPUs see: whoever spins looks at it now and then and leaves; threads that wait are
 * woken, ops return at once. So after group_abort the streams run empty, with results that nobody reads. Who hangs is found from
 * what the kernels that meet leave in `trace`, from events, and from where the threads are (group_blame).
 * =========================================================================== */

enum {
    GROUP_RANKS = 64,
    MEET_CTAS = 96,             /* of every kernel that meets */
    MEET_SHARED_CTAS = 8,       /* where ranks share a GPU */
    MEET_THREADS = 512,
    MEET_OPS = 1024,            /* more than there are meetings in all steps under way */
    ONE_SHOT_BYTES = 1 << 20,   /* largest message that goes in one shot; less than TOKA_GPU_SCATTER_BYTES, whose sums meet twice */
    EXCHANGE_BYTES = 4096 * 24, /* parts of rows that one rank sends to another at once (chapter 11) */
    DRAW_EVENTS = 128           /* more than there are steps under way */
};
#define GROUP_PATIENCE 30.0 /* seconds in which no rank gets on, until who waits gives up */

typedef struct meet_line { /* mail from one CTA to its namesake on another rank */
    unsigned count;        /* meetings that it came to */
    unsigned unused;
    unsigned long long x;  /* its rank's x */
} meet_line;

enum group_waits { GROUP_RUNS, GROUP_WAITS_OPEN, GROUP_WAITS_BEFORE, GROUP_WAITS_NEXT, GROUP_WAITS_DRAWN };

typedef struct group_rank { /* what others know of a rank */
    toka_device *d;         /* from the time it joined until it closes */
    int ordinal;
    int K, n_sms, arch;     /* kv heads; multiprocessors; 80, 89, 90 ... From the time it joined */
    bool reaches;           /* other ranks' memory: what breaks their GPUs breaks this one */
    bool told;              /* its error says so */
    meet_line *lines;
    char *inbox, *slots;    /* slots: [TOKA_GPU_LINK_BUFFERS] messages from the stage before */
    int *last;              /* the first stage's table of drawn ids */
    float *logits;          /* the last stage's */
    /* for who looks whom to blame; under the lock, but for what is written by atomic stores: */
    enum group_waits waits; /* of its thread */
    const char *op;         /* that its thread is in, or was in last */
    const char *ops[MEET_OPS]; /* [i % MEET_OPS]: the first op behind meeting i */
    unsigned n_meetings;    /* enqueued */
    int64_t asks;           /* steps for which its GPU was told to wait for another rank: for a message, or for draws */
    cudaEvent_t asked[TOKA_GPU_LINK_BUFFERS]; /* [i % TOKA_GPU_LINK_BUFFERS] the GPU has come to the wait; more than there are steps under way */
    int64_t needs[TOKA_GPU_LINK_BUFFERS]; /* the step whose draws it waits for there */
} group_rank;

typedef struct group_link { /* from a rank to the same tp rank of the next stage */
    int64_t sent, taken;    /* messages enqueued to be sent, and to be taken; each raised by one thread, under the lock */
    int rows[TOKA_GPU_LINK_BUFFERS];
    bf16 *outbox;
    cudaEvent_t ready;      /* the outbox is full */
    cudaEvent_t sent_at[TOKA_GPU_LINK_BUFFERS], taken_at[TOKA_GPU_LINK_BUFFERS];
} group_link;

struct toka_group {
    int tp_size, pp_size;
    double patience, quiet; /* quiet: group_watch's seconds without progress, since `seen` */
    uint64_t seen, progress; /* progress: changes while threads get on */
    group_rank ranks[GROUP_RANKS]; /* [pp][tp] */
    group_link links[GROUP_RANKS];
    int n_joined, n_leaving;
    int64_t drawn;          /* the last step whose draws were enqueued to be sent; */
    cudaEvent_t drawn_at[DRAW_EVENTS]; /* [step % DRAW_EVENTS] they have arrived */
    int *over;              /* host memory that GPUs see, as meeting.over ... */
    unsigned *trace;        /* ... and .trace, [ranks][2] */
    char about[320];
    bool no_graphs;         /* a rank could not capture its own */
    bool broken, hangs;     /* hangs: a GPU did not end its work, or a rank did not come: it may still look at what others have */
    pthread_mutex_t lock;
    pthread_cond_t changed;
    toka_err error;         /* why it is broken; code 0: it was told to end */
};

static int tp_size(const toka_device *d) { return d->group ? d->group->tp_size : 1; }
static int pp_size(const toka_device *d) { return d->group ? d->group->pp_size : 1; }
static bool first_stage(const toka_device *d) { return d->options.pp_rank == 0; }
static bool last_stage(const toka_device *d) { return d->options.pp_rank == pp_size(d) - 1; }

/* ---- Meetings ---- */

__device__ static inline void st_release_sys(unsigned *to, unsigned v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ static inline unsigned ld_acquire_sys(const unsigned *from) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

/* The meeting number c of this CTA: what any CTA in it wrote before, all threads of all of them see behind it. The others learn x.
 * False: the group is broken, and they may not have come. All threads call it. */
__device__ static __forceinline__ bool meet(const meeting &m, unsigned c, const void *x) {
    const int q = (int)threadIdx.x, b = (int)blockIdx.x;
    int over = 0;
    __syncthreads();
    if (b == 0 && q == 0) m.trace[0] = c;
    if (q < m.n && q != m.me) {
        meet_line *to = m.lines[q] + b * MEET_RANKS + m.me;
        const meet_line *from = m.lines[m.me] + b * MEET_RANKS + q;
        *(volatile unsigned long long *)&to->x = (unsigned long long)x;
        st_release_sys(&to->count, c);
        for (unsigned spins = 1; (int)(ld_acquire_sys(&from->count) - c) < 0 && !over; spins++)
            over = spins % 1024 == 0 && *m.over;
    }
    over = __syncthreads_or(over);
    if (b == 0 && q == 0) m.trace[1] = c;
    return !over;
}
/* What rank q told in the last meeting; only thread q may ask. */
__device__ static inline uint4 *meet_x(const meeting &m, int q) {
    return (uint4 *)*(volatile unsigned long long *)&m.lines[m.me][blockIdx.x * MEET_RANKS + q].x;
}
__device__ static inline unsigned meet_count(const meeting &m) { return m.count[blockIdx.x]; }
__device__ static inline void meet_done(const meeting &m, unsigned c) { /* c: the last one of the kernel */
    if (threadIdx.x == 0) m.count[blockIdx.x] = c;
}

/* ---- all_reduce ----
 *
 * in/out  x bf16, n vectors of 8, at the same place in the op order on every rank of the stage
 * grid: MEET_CTAS, block: 512. One-shot pushes (ranks - 1) * bytes over each GPU's links, two-shot 2 (ranks - 1) / ranks of them;
 * memory of its own GPU moves about ten times as fast. 4096 columns on two H200 (NVLink, 18 links each; 2026-11-22): 1 to 8 rows
 * 6.2 us, 64 rows 7.6, 256 rows 15, 1024 rows 37, 4096 rows 118 (285 GB/s); NCCL 2.x there, without multicast: 17.6, 21, 27, 46
 * and 141, more at every size, so it is not needed. With 48 CTAs 132 us at 4096 rows; one shot of 2 MB 15.9 us, two 15.3. */

typedef struct sum_8 { /* eight sums in float32 */
    float v[8];
} sum_8;
__device__ static inline void sum_add(sum_8 &s, uint4 x) {
    float f[8];
    unpack_8(x, f);
#pragma unroll
    for (int i = 0; i < 8; i++) s.v[i] += f[i];
}

/* Part `who` of the halves c % 2 of a rank's inbox. */
__device__ static inline uint4 *one_shot_box(const meeting &m, int rank, unsigned c, int who) {
    return (uint4 *)m.inbox[rank] + ((size_t)(c & 1) * m.n + who) * (ONE_SHOT_BYTES / 16);
}
/* Behind those halves: the boxes of two-shot and of scattered sums, one for each rank. */
__host__ __device__ static inline uint4 *two_shot_boxes(const meeting &m, int rank) {
    return (uint4 *)m.inbox[rank] + (size_t)2 * m.n * (ONE_SHOT_BYTES / 16);
}
__global__ static void __launch_bounds__(MEET_THREADS, 1) one_shot_kernel(meeting m, uint4 *x, int n) {
    const int first = (int)(blockIdx.x * MEET_THREADS + threadIdx.x), stride = (int)gridDim.x * MEET_THREADS;
    grid_wait();
    const unsigned c = meet_count(m) + 1;
    for (int i = first; i < n; i += stride) {
        const uint4 own = x[i];
        for (int q = 0; q < m.n; q++)
            if (q != m.me) one_shot_box(m, q, c, m.me)[i] = own;
    }
    meet(m, c, x);
    grid_launch_dependents();
    for (int i = first; i < n; i += stride) {
        sum_8 sum = {};
        for (int q = 0; q < m.n; q++) sum_add(sum, q == m.me ? x[i] : __ldcg(one_shot_box(m, m.me, c, q) + i));
        x[i] = pack_8(sum.v);
    }
    meet_done(m, c);
}

enum { TWO_SHOT_TURN = 4 }; /* vectors that a thread has under way */

/* Of the part that this rank adds up, `share` vectors at most, n of them in x: with the parts that the others sent, into
 * everybody's x. */
__device__ static inline void two_shot_add(const meeting &m, const uint4 *box, uint4 *const *x, int share, int at, int n) {
    const int first = (int)(blockIdx.x * MEET_THREADS + threadIdx.x), stride = (int)gridDim.x * MEET_THREADS;
    for (int i = first; i < n; i += TWO_SHOT_TURN * stride) {
        sum_8 sum[TWO_SHOT_TURN] = {};
        for (int q = 0; q < m.n; q++) {
            const uint4 *from = q == m.me ? x[m.me] + at : box + (size_t)q * share;
#pragma unroll
            for (int k = 0; k < TWO_SHOT_TURN; k++)
                if (i + k * stride < n) sum_add(sum[k], __ldcg(from + i + k * stride));
        }
        for (int q = 0; q < m.n; q++)
#pragma unroll
            for (int k = 0; k < TWO_SHOT_TURN; k++)
                if (i + k * stride < n) x[q][at + i + k * stride] = pack_8(sum[k].v);
    }
}
__global__ static void __launch_bounds__(MEET_THREADS, 1) two_shot_kernel(meeting m, uint4 *x, int n) {
    __shared__ uint4 *everybody[MEET_RANKS];
    const int first = (int)(blockIdx.x * MEET_THREADS + threadIdx.x), stride = (int)gridDim.x * MEET_THREADS;
    const int share = (n + m.n - 1) / m.n;
    grid_wait();
    const unsigned c = meet_count(m) + 1;
    for (int turn = 1; turn < m.n; turn++) { /* each begins with another one */
        const int q = (m.me + turn) % m.n, at = q * share, size = min(share, n - at);
        uint4 *to = two_shot_boxes(m, q) + (size_t)m.me * share;
        for (int i = first; i < size; i += TWO_SHOT_TURN * stride) {
            uint4 v[TWO_SHOT_TURN];
#pragma unroll
            for (int k = 0; k < TWO_SHOT_TURN; k++)
                if (i + k * stride < size) v[k] = x[at + i + k * stride];
#pragma unroll
            for (int k = 0; k < TWO_SHOT_TURN; k++)
                if (i + k * stride < size) to[i + k * stride] = v[k];
        }
    }
    const bool all = meet(m, c, x);
    if ((int)threadIdx.x < m.n)
        everybody[threadIdx.x] = (int)threadIdx.x == m.me ? x : meet_x(m, (int)threadIdx.x);
    __syncthreads();
    if (all) two_shot_add(m, two_shot_boxes(m, m.me), everybody, share, m.me * share, min(share, n - m.me * share));
    meet(m, c + 1, x);
    grid_launch_dependents();
    meet_done(m, c + 1);
}

/* ---- A sum that the GEMM has scattered, and the norm behind it ----
 *
 * in      parts: this rank's boxes [ranks][share][E] bf16, one part of the sum in each; x bf16 [.][E], of which rows
 *         me * share .. + n - 1 are this rank's: without the sum
 * out     those rows of x with the sum, in float32, rounded once; y of everybody [.][E]: their RMSNorm, summed in rmsnorm_kernel's
 *         order. Without w: x of everybody
 * grid: MEET_CTAS, block: 512, of which 128 threads work on a row. A GPU sends (ranks - 1) / ranks of the bytes of x, half of what
 * two shots send, and reads and writes 3 / ranks + 1 of them. Two H200, 8,448 rows of 4,096: 136 us, of which 95 at the 365 GB/s
 * that such stores reach there. Rows made in shared memory that leave by bulk copies, and 128 CTAs: no faster. */
__global__ static void __launch_bounds__(MEET_THREADS, 1) sum_norm_kernel(meeting m, uint4 *x, uint4 *y, const uint4 *parts,
                                                                          int share, int n, const float *w, int E, float per_E,
                                                                          float eps) {
    __shared__ float squares_of[2][MEET_THREADS / 128][4];
    __shared__ uint4 *everybody[MEET_RANKS];
    const int group = (int)threadIdx.x / 128, t = (int)threadIdx.x % 128, groups = (int)gridDim.x * (MEET_THREADS / 128);
    const int each = E / 8;
    grid_wait();
    const unsigned c = meet_count(m) + 1;
    if (!meet(m, c, y)) n = 0;
    if ((int)threadIdx.x < m.n) everybody[threadIdx.x] = (int)threadIdx.x == m.me ? y : meet_x(m, (int)threadIdx.x);
    __syncthreads();
    for (int row = (int)blockIdx.x * (MEET_THREADS / 128) + group, turn = 0; row < n; row += groups, turn ^= 1) {
        const size_t at = ((size_t)m.me * share + row) * each;
        float squares = 0;
        for (int i = t; i < each; i += TWO_SHOT_TURN * 128) {
            sum_8 sum[TWO_SHOT_TURN] = {};
            for (int q = -1; q < m.n; q++) {
                const uint4 *from = q < 0 ? x + at : parts + ((size_t)q * share + row) * each;
#pragma unroll
                for (int k = 0; k < TWO_SHOT_TURN; k++)
                    if (i + k * 128 < each) sum_add(sum[k], __ldcg(from + i + k * 128));
            }
#pragma unroll
            for (int k = 0; k < TWO_SHOT_TURN; k++) {
                const uint4 v = pack_8(sum[k].v);
                if (i + k * 128 >= each) break;
                x[at + i + k * 128] = v;
                squares = norm_square(v, squares);
            }
        }
        for (int lanes = 16; lanes; lanes >>= 1) squares += __shfl_xor_sync(~0u, squares, lanes);
        float *sums = squares_of[turn][group];
        if (t % 32 == 0) sums[t / 32] = squares;
        named_sync(1 + group, 128); /* the row's threads, who have read squares_of[turn] before they come here for the next row */
        const float scale = rsqrtf((sums[0] + sums[1] + (sums[2] + sums[3])) * per_E + eps);
        for (int i = t; i < each; i += 128) {
            const float4 *g = (const float4 *)w + 2 * i;
            const uint4 v = w ? norm_scaled(x[at + i], scale, g[0], g[1]) : x[at + i];
            for (int q = 0; q < m.n; q++) everybody[q][at + i] = v;
        }
    }
    meet(m, c + 1, y);
    grid_launch_dependents();
    meet_done(m, c + 1);
}

/* Does a message go in one shot? It takes (n - 1) B / rate + t, two shots 2 (n - 1) / n B / rate + 2 t, with t of 2.8 us and a
 * rate of 285 GB/s on two H200. For n = 2 both send the same bytes, but from 1.5 MB on two shots are faster, as each rank then
 * adds up only half. */
static bool one_shot_pays(int n, size_t bytes) {
    /* n > 2: n (n - 1) (1 - 2 / n) B <= n t rate */
    const size_t two = (size_t)(n - 1) * (n - 2) * bytes, one = (size_t)n * 800000;
    return bytes <= ONE_SHOT_BYTES && two <= one;
}

/* In an inbox: boxes of one-shot; of two-shot, or of scattered sums; then from *parts on the exchange of samples. */
static size_t group_inbox_bytes(const toka_device *d, size_t *parts) {
    const size_t n = (size_t)tp_size(d);
    *parts = 2 * n * ONE_SHOT_BYTES + ((size_t)d->options.max_tokens + 16 * n) * d->E * sizeof(bf16);
    return *parts + 2 * n * (last_stage(d) ? EXCHANGE_BYTES : 0);
}

/* ---- A group's life ---- */

static void group_close(toka_group *g) {
    if (!g || g->hangs) return;
    if (g->over) cudaFreeHost(g->over);
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->lock);
    free(g);
}

static int group_open(toka_group **out, int tp, int pp, toka_err *e) {
    const char *patience = getenv("TOKA_DEBUG_PATIENCE");
    e->code = 0;
    if (tp < 1 || pp < 1 || tp > MEET_RANKS || tp * pp > GROUP_RANKS) {
        e->code = TOKA_E_USE;
        snprintf(e->msg, sizeof e->msg, "GPU: %d stages of %d tensor ranks, expected at most %d ranks a stage and %d in all", pp,
                 tp, MEET_RANKS, GROUP_RANKS);
        return e->code;
    }
    toka_group *g = (toka_group *)calloc(1, sizeof *g);
    if (!g) abort();
    pthread_condattr_t monotonic;
    g->tp_size = tp, g->pp_size = pp, g->patience = patience && atof(patience) > 0 ? atof(patience) : GROUP_PATIENCE;
    pthread_mutex_init(&g->lock, NULL);
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&g->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    const size_t bytes = sizeof(int) * 16 + sizeof(unsigned) * 2 * (size_t)(tp * pp);
    cudaError_t code = cudaHostAlloc((void **)&g->over, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (code) {
        e->code = TOKA_E_DEVICE;
        snprintf(e->msg, sizeof e->msg, "GPU: memory that the ranks share: %s", cudaGetErrorString(code));
        group_close(g);
        return e->code;
    }
    memset(g->over, 0, bytes);
    g->trace = (unsigned *)(g->over + 16);
    *out = g;
    return 0;
}

static bool group_is_broken(toka_group *g) { return __atomic_load_n(&g->broken, __ATOMIC_ACQUIRE); }
static void group_break(toka_group *g) { /* with the lock held */
    __atomic_store_n(&g->broken, true, __ATOMIC_RELEASE);
    *(volatile int *)g->over = 1;
    pthread_cond_broadcast(&g->changed);
}
static void group_abort(toka_group *g) {
    pthread_mutex_lock(&g->lock);
    group_break(g);
    pthread_mutex_unlock(&g->lock);
}

static void group_rank_name(const toka_group *g, int i, char z[64]) {
    snprintf(z, 64, "rank %d (stage %d, tensor rank %d)", i, i / g->tp_size, i % g->tp_size);
}

/* ---- Who hangs ---- */

static unsigned group_trace(const toka_group *g, int i, int which) { return ((volatile unsigned *)g->trace)[2 * i + which]; }

/* Has what the event marks not happened yet? One of a GPU that failed has. */
static bool group_pending(cudaEvent_t e) { return cudaEventQuery(e) == cudaErrorNotReady; }

/* Whom rank i waits for, its thread or its GPU; i itself: nobody. With the lock held, as the next two. */
static int group_ahead(toka_group *g, int i) {
    const int tp = g->tp_size, stage = i / tp, last = (g->pp_size - 1) * tp;
    const group_rank *r = &g->ranks[i];
    const unsigned came = group_trace(g, i, 0);
    if (came != group_trace(g, i, 1)) /* its GPU is in a meeting; to those who have not come */
        for (int q = stage * tp; q < (stage + 1) * tp; q++)
            if ((int)(group_trace(g, q, 0) - came) < 0) return q;
    for (int64_t k = r->asks < TOKA_GPU_LINK_BUFFERS ? 0 : r->asks - TOKA_GPU_LINK_BUFFERS; k < r->asks; k++) {
        /* it has come there, and does not get on */
        const int at = (int)(k % TOKA_GPU_LINK_BUFFERS);
        if (group_pending(r->asked[at])) continue;
        if (stage > 0 && group_pending(g->links[i - tp].taken_at[at])) return i - tp;
        if (stage == 0 && group_pending(g->drawn_at[r->needs[at] % DRAW_EVENTS])) return last;
    }
    switch (r->waits) {
    case GROUP_WAITS_BEFORE: return i - tp;
    case GROUP_WAITS_NEXT: return i + tp;
    case GROUP_WAITS_DRAWN: return last;
    default: return i;
    }
}

/* The op that a rank's GPU is in, as far as can be told: the first one behind the last meeting it left. */
static const char *group_op(toka_group *g, int i) {
    group_rank *r = &g->ranks[i];
    const unsigned came = group_trace(g, i, 0), left = group_trace(g, i, 1);
    const char *op = __atomic_load_n(&r->op, __ATOMIC_ACQUIRE);
    const char *behind = __atomic_load_n(&r->ops[left % MEET_OPS], __ATOMIC_ACQUIRE);
    if (came != left) return "all_reduce";
    if (g->tp_size > 1 && left < r->n_meetings && behind) return behind;
    return op ? op : "no op";
}

/* Nobody got on for too long. To blame is who waits for nobody, at the end of the chain of those who wait, seen from rank `me`. */
static void group_blame(toka_group *g, int me) {
    const int n = g->tp_size * g->pp_size;
    int who = me, next;
    char name[64], mine[64];
    for (int i = 0; i < n && (next = group_ahead(g, who)) != who; i++) who = next;
    group_rank_name(g, who, name), group_rank_name(g, me, mine);
    g->error.code = TOKA_E_DEVICE;
    if (group_ahead(g, who) != who)
        snprintf(g->error.msg, sizeof g->error.msg, "GPU: all ranks have waited for each other for %g s, %s in %s", g->patience,
                 mine, group_op(g, me));
    else if (who == me)
        snprintf(g->error.msg, sizeof g->error.msg, "GPU: %s has not moved for %g s, last seen in %s", name, g->patience,
                 group_op(g, who));
    else
        snprintf(g->error.msg, sizeof g->error.msg, "GPU: %s has not moved for %g s, last seen in %s; %s waits for it in %s", name,
                 g->patience, group_op(g, who), mine, group_op(g, me));
    group_break(g);
}

/* Has any thread or GPU moved since `seen`? */
static bool group_moved(toka_group *g, uint64_t *seen) {
    uint64_t now = __atomic_load_n(&g->progress, __ATOMIC_ACQUIRE) << 20;
    for (int i = 0; i < g->tp_size * g->pp_size; i++) now += group_trace(g, i, 0) + group_trace(g, i, 1);
    const bool moved = now != *seen;
    *seen = now;
    return moved;
}

static int group_watch(toka_group *g, int who, double slept, toka_err *e) {
    int code = 0;
    g->quiet = group_moved(g, &g->seen) ? 0 : g->quiet + slept;
    if (g->quiet < g->patience) return 0;
    pthread_mutex_lock(&g->lock);
    if (!g->broken) group_blame(g, who), *e = g->error, code = e->code;
    pthread_mutex_unlock(&g->lock);
    return code;
}

/* ---- Threads that wait for threads ---- */

static void group_raise(toka_group *g, int64_t *count, int64_t to) {
    pthread_mutex_lock(&g->lock);
    *count = to;
    __atomic_fetch_add(&g->progress, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

/* Sleeps until something changed, 0.1 s at most; true: it was that long. With the lock held. */
static bool group_nap(toka_group *g) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_nsec += 100000000;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    return pthread_cond_timedwait(&g->changed, &g->lock, &t) != 0;
}

/* Waits until *count has come to `want`. False: it has not, and the group is broken. */
static bool group_wait(toka_device *d, enum group_waits whom, const int64_t *count, int64_t want) {
    toka_group *g = d->group;
    uint64_t seen = 0;
    double quiet = 0;
    pthread_mutex_lock(&g->lock);
    d->rank->waits = whom;
    while (*count < want && !g->broken) {
        const bool slept = group_nap(g);
        quiet = group_moved(g, &seen) ? 0 : quiet + slept * 0.1;
        if (quiet >= g->patience && *count < want && !g->broken) group_blame(g, (int)(d->rank - g->ranks));
    }
    d->rank->waits = GROUP_RUNS;
    const bool there = *count >= want && !g->broken;
    pthread_mutex_unlock(&g->lock);
    return there;
}

/* Every op begins here; NULL: it has no name. False: the device or the group has failed and there is nothing to do. */
static bool op_begins(toka_device *d, const char *op) {
    if (d->error.code) return false;
    if (!d->group) return true;
    if (group_is_broken(d->group)) return false;
    if (!op || d->graphs.capturing) return true;
    const char **behind = &d->rank->ops[d->rank->n_meetings % MEET_OPS];
    if (d->op_at != d->rank->n_meetings) d->op_at = d->rank->n_meetings, __atomic_store_n(behind, op, __ATOMIC_RELEASE);
    __atomic_store_n(&d->rank->op, op, __ATOMIC_RELEASE);
    __atomic_fetch_add(&d->group->progress, 1, __ATOMIC_RELEASE);
    return true;
}

/* The stream waits for another rank's event; draws of step `needs`, or 0: a message. The step begins, as far as time is counted,
 * behind that: what the GPU waits is a pipeline's bubble. */
static void group_ask(toka_device *d, cudaEvent_t event, int64_t needs) {
    group_rank *r = d->rank;
    const int at = (int)(r->asks % TOKA_GPU_LINK_BUFFERS);
    latch(d, cudaEventRecord(r->asked[at], d->stream), "wait for a rank");
    pthread_mutex_lock(&d->group->lock);
    r->needs[at] = needs, r->asks++;
    pthread_mutex_unlock(&d->group->lock);
    latch(d, cudaStreamWaitEvent(d->stream, event, 0), "wait for a rank");
    latch(d, cudaEventRecord(d->clock.begun[d->newest], d->stream), "step");
}

/* A kernel with meetings. Graphs may hold it, as the GPU counts; the host's count is for group_blame, and is raised as graphs are
 * launched. */
template <class... P>
static void launch_meeting(toka_device *d, const char *what, int meetings, void (*kernel)(meeting, P...),
                           typename as_declared<P>::type... args) {
    if (!graph_runs(d)) launch_dependent(d, what, kernel, dim3((unsigned)d->meet_ctas), MEET_THREADS, 0, 1, d->meet, args...);
    if (d->graphs.capturing) d->graphs.now->meetings += meetings;
    else d->rank->n_meetings += (unsigned)meetings;
}

/* ---- Opening: a rank joins ---- */

static cudaEvent_t group_event(toka_device *d) {
    cudaEvent_t e = NULL;
    if (!d->error.code) latch(d, cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "an event");
    return e;
}

/* What this rank has for the others. */
static void group_take_memory(toka_device *d) {
    toka_group *g = d->group;
    group_rank *r = d->rank;
    const size_t x = (size_t)d->options.max_tokens * d->E * sizeof(bf16);
    if (g->tp_size > 1) {
        size_t parts, bytes = group_inbox_bytes(d, &parts);
        size_t lines = (size_t)MEET_CTAS * MEET_RANKS * sizeof(meet_line);
        r->inbox = (char *)dev_alloc(d, bytes, "room for sums");
        r->lines = (meet_line *)dev_alloc(d, lines, "room for sums");
        d->meet.count = (unsigned *)dev_alloc(d, MEET_CTAS * sizeof(unsigned), "room for sums");
        if (d->error.code) return;
        latch(d, cudaMemsetAsync(r->lines, 0, lines, d->stream), "room for sums");
        latch(d, cudaMemsetAsync(d->meet.count, 0, MEET_CTAS * sizeof(unsigned), d->stream), "room for sums");
    }
    r->last = d->last;
    if (g->pp_size > 1) latch(d, cudaStreamCreateWithFlags(&d->copies, cudaStreamNonBlocking), "cudaStreamCreate");
    for (cudaEvent_t &e : r->asked)
        if (g->pp_size > 1) e = group_event(d);
    if (!first_stage(d)) {
        group_link *l = &g->links[r - g->ranks - g->tp_size];
        r->slots = (char *)dev_alloc(d, TOKA_GPU_LINK_BUFFERS * x, "room for messages");
        for (cudaEvent_t &e : l->taken_at) e = group_event(d);
    }
    if (!last_stage(d)) {
        group_link *l = &g->links[r - g->ranks];
        l->outbox = (bf16 *)dev_alloc(d, x, "room for messages");
        l->ready = group_event(d);
        for (cudaEvent_t &e : l->sent_at) e = group_event(d);
    }
    if (last_stage(d) && g->pp_size > 1 && d->options.tp_rank == 0) {
        d->drawn = group_event(d);
        for (cudaEvent_t &e : g->drawn_at) e = group_event(d);
    }
}

/* What it took besides memory. */
static void group_free(toka_device *d) {
    toka_group *g = d->group;
    const int i = (int)(d->rank - g->ranks);
    cudaEvent_t none = NULL;
    auto end = [&](cudaEvent_t &e) {
        if (e) cudaEventDestroy(e);
        e = none;
    };
    if (!first_stage(d))
        for (cudaEvent_t &e : g->links[i - g->tp_size].taken_at) end(e);
    if (!last_stage(d)) {
        end(g->links[i].ready);
        for (cudaEvent_t &e : g->links[i].sent_at) end(e);
    }
    for (cudaEvent_t &e : d->rank->asked) end(e);
    if (d->drawn)
        for (cudaEvent_t &e : g->drawn_at) end(e);
    end(d->drawn);
    if (d->copies) cudaStreamDestroy(d->copies);
}

/* Lets this GPU reach the memory of those that it meets or sends to. */
static void group_reach(toka_device *d) {
    toka_group *g = d->group;
    for (int i = 0; i < g->tp_size * g->pp_size && !d->error.code; i++) {
        const int other = g->ranks[i].ordinal;
        int can = other == d->ordinal;
        if (!can) latch(d, cudaDeviceCanAccessPeer(&can, d->ordinal, other), "peer access");
        d->rank->reaches |= can && &g->ranks[i] != d->rank;
        if (can && other != d->ordinal) {
            cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
            if (code != cudaErrorPeerAccessAlreadyEnabled) latch(d, code, "peer access");
            cudaGetLastError();
        }
        if (can || i / g->tp_size != d->options.pp_rank || d->error.code) continue;
        d->error.code = TOKA_E_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: GPUs %d and %d cannot reach each other's memory (no peer access), which "
                 "tensor ranks need; --pipeline-parallel-size and --data-parallel-size do not", d->ordinal, other);
    }
}

/* Tensor ranks do the same with a step: what they choose by, they choose by what all of them have. With the lock held. */
static void group_agree(toka_device *d) {
    const toka_group *g = d->group;
    const group_rank *r = d->rank - d->options.tp_rank;
    int K = 0, n_sms = INT_MAX, other = 0;
    for (int q = 0; q < g->tp_size; q++) {
        K = max(K, r[q].K), n_sms = min(n_sms, r[q].n_sms);
        if ((r[q].arch == 90) != (r[0].arch == 90)) other = q;
    }
    attn_agree(d, K, n_sms);
    if (!other) return;
    d->error.code = TOKA_E_DEVICE;
    snprintf(d->error.msg, sizeof d->error.msg, "GPU: GPUs %d and %d have compute capability %d.%d and %d.%d, expected 9.0 of all "
             "tensor ranks or of none; --pipeline-parallel-size and --data-parallel-size take both", r->ordinal,
             r[other].ordinal, r->arch / 10, r->arch % 10, r[other].arch / 10, r[other].arch % 10);
}

/* "4 x NVIDIA H200, 150 GB each": all GPUs that this process opens. */
static void group_describe(toka_device *d) {
    toka_group *g = d->group;
    const int n = d->options.n_devices;
    int peers = 1;
    for (int i = 0; i < g->tp_size * g->pp_size; i++) {
        int can = g->ranks[i].ordinal == d->ordinal;
        if (!can) cudaDeviceCanAccessPeer(&can, d->ordinal, g->ranks[i].ordinal);
        peers &= can;
    }
    char said[sizeof g->about]; /* by ranks that have got further */
    pthread_mutex_lock(&g->lock);
    memcpy(said, g->about, sizeof said);
    snprintf(g->about, sizeof g->about, "%d x %s%s%s%s", n, d->about, gpus_shared() ? ", which ranks share" : "",
             g->tp_size * g->pp_size == 1 ? "" : peers ? ", peer access" : ", no peer access: messages go through the host", said);
    pthread_mutex_unlock(&g->lock);
}

/* Takes the device's place in its group, waits until all ranks have theirs, and finds what they have. Last step of opening. */
static void group_join(toka_device *d) {
    toka_group *g = d->group;
    const int tp = g->tp_size, first = d->options.pp_rank * tp;
    pthread_mutex_lock(&g->lock);
    d->rank->d = d, d->rank->waits = GROUP_WAITS_OPEN, g->n_joined++;
    d->rank->K = d->shape->K, d->rank->n_sms = d->n_sms, d->rank->arch = d->arch;
    pthread_cond_broadcast(&g->changed);
    while (g->n_joined < tp * g->pp_size && !g->broken) group_nap(g);
    d->rank->waits = GROUP_RUNS;
    if (g->broken && g->error.code) d->error = g->error;
    else if (g->broken) {
        d->error.code = TOKA_E_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: %sthe ranks were told to end while they opened", d->where);
    } else group_agree(d);
    pthread_mutex_unlock(&g->lock);
    if (!d->error.code) group_reach(d);
    d->meet.me = d->options.tp_rank, d->meet.n = tp, d->meet.over = g->over, d->meet.trace = g->trace + 2 * (d->rank - g->ranks);
    for (int q = 0; q < tp; q++) d->meet.lines[q] = g->ranks[first + q].lines, d->meet.inbox[q] = g->ranks[first + q].inbox;
    d->meet_ctas = gpus_shared() ? MEET_SHARED_CTAS : MEET_CTAS;
    if (first == 0 && d->options.tp_rank == 0) group_describe(d);
}

/* The place of a device that is about to be opened. */
static void group_place(toka_device *d) {
    toka_group *g = d->group = d->options.group;
    const int i = d->options.pp_rank * g->tp_size + d->options.tp_rank;
    assert(i < g->tp_size * g->pp_size && d->options.tp_rank < g->tp_size && !g->ranks[i].d);
    d->rank = &g->ranks[i], d->rank->ordinal = d->ordinal, d->op_at = ~0u;
    char name[64];
    group_rank_name(g, i, name);
    snprintf(d->where, sizeof d->where, "%s: ", name);
}

/* ---- Failure, and closing ---- */

/* A rank that cannot open ends the others, too, which wait for it. */
static void group_fail(toka_group *g, const toka_err *e) {
    pthread_mutex_lock(&g->lock);
    if (!g->error.code) g->error = *e;
    group_break(g);
    pthread_mutex_unlock(&g->lock);
}

/* The group's failure becomes the device's. */
static void group_latch(toka_device *d) {
    toka_group *g = d->group;
    char name[64];
    pthread_mutex_lock(&g->lock);
    d->error = g->error;
    if (!g->error.code) {
        group_rank_name(g, (int)(d->rank - g->ranks), name);
        d->error.code = TOKA_E_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: the ranks were told to end; %s was in %s", name,
                 d->rank->op ? d->rank->op : "no op");
    }
    pthread_mutex_unlock(&g->lock);
}

/* A GPU that faults takes those along that reach its memory, and the rank that looks first has the error: not always the one at
 * fault. What is known beside that: who had not come to a meeting that others of its stage had come to. */
static void group_doubt(toka_device *d) {
    toka_group *g = d->group;
    group_rank *r = d->rank;
    const int me = (int)(r - g->ranks), first = me / g->tp_size * g->tp_size;
    const cudaError_t code = d->stream ? cudaStreamQuery(d->stream) : cudaSuccess;
    if (r->told || !r->reaches || code == cudaSuccess || code == cudaErrorNotReady) return;
    int behind = first, n_ahead = 0;
    char name[64];
    for (int q = first; q < first + g->tp_size; q++)
        if ((int)(group_trace(g, q, 0) - group_trace(g, behind, 0)) < 0) behind = q;
    for (int q = first; q < first + g->tp_size; q++) n_ahead += group_trace(g, q, 0) != group_trace(g, behind, 0);
    const bool known = n_ahead > 0 && n_ahead == g->tp_size - 1;
    r->told = true;
    if (known && behind == me) return;
    const size_t n = strlen(d->error.msg);
    group_rank_name(g, behind, name);
    snprintf(d->error.msg + n, sizeof d->error.msg - n,
             "; it may be another rank's fault, GPUs that reach each other's memory fail together%s%s%s",
             known ? ": " : "", known ? name : "", known ? " is behind, the others waited for it" : "");
}

/* Waits for an event of this rank's stream, or until the group is broken: another rank may be why it never comes. */
static void group_sync(toka_device *d, cudaEvent_t event) {
    cudaError_t code;
    for (int turn = 0; (code = cudaEventQuery(event)) == cudaErrorNotReady && !group_is_broken(d->group); turn++)
        if (turn < 64) sched_yield();
        else usleep(20);
    if (code != cudaErrorNotReady) latch(d, code, "step");
    __atomic_fetch_add(&d->group->progress, 1, __ATOMIC_RELEASE);
}

/* Before anything of a device is freed: it, and all ranks that joined, have ended what they do with one another's memory. False:
 * some GPU has not ended, or a rank has not come for longer than the two streams of one may take; then nobody frees anything. */
static bool group_leave(toka_device *d) {
    toka_group *g = d->group;
    bool ends = true;
    for (cudaStream_t stream : {d->stream, d->copies})
        for (int ms = 0; ends && stream && cudaStreamQuery(stream) == cudaErrorNotReady; ms += group_is_broken(g))
            ends = ms < 2000, usleep(1000);
    pthread_mutex_lock(&g->lock);
    const bool joined = d->rank->d;
    g->n_leaving += joined, g->hangs |= !ends;
    pthread_cond_broadcast(&g->changed);
    for (int naps = 0; joined && g->n_leaving < g->n_joined && naps < (g->broken ? 60 : 100);) naps += group_nap(g);
    g->hangs |= joined && g->n_leaving < g->n_joined;
    const bool hangs = g->hangs;
    pthread_mutex_unlock(&g->lock);
    if (!hangs) group_free(d);
    return !hangs;
}

/* ---- Ops: all_reduce, send, receive ---- */

static bool sum_scatters(const toka_device *d, int rows) {
    const size_t bytes = (size_t)ceil_div(rows, 128) * 128 * d->E * sizeof(bf16); /* of whole tiles, to which graphs fill up */
    return tp_size(d) > 1 && d->hopper && rows > FEW_MAX && bytes >= TOKA_GPU_SCATTER_BYTES;
}
/* Of that many rows those that one rank adds up; the last ranks may have fewer. */
static int sum_share(const toka_device *d, int rows) { return ceil_div(rows, 16 * tp_size(d)) * 16; }
/* y = x W^T on the way to a sum over tensor ranks: in boxes of the ranks that add it up. False: nothing was done. */
static bool sum_scatter(toka_device *d, const gemm_args *a) {
    const int n = tp_size(d), share = sum_share(d, a->M);
    if (!sum_scatters(d, a->M)) return false;
    bf16 *boxes[MEET_RANKS];
    for (int q = 0; q < n; q++) boxes[q] = (bf16 *)two_shot_boxes(d->meet, q) + (size_t)d->meet.me * share * d->E;
    gemm_wgmma_scatter(d, a, boxes, n, share);
    d->scattered = a->y;
    return true;
}
/* Before x is read: it has the sum, each rank its own rows, and its norm by w is in xn; without w the sum is in everybody's x.
 * False: x has it already, and nothing was done. */
static bool sum_norm(toka_device *d, const float *w) {
    if (!d->scattered) return false;
    const int T = d->step->T, share = sum_share(d, T), rows = min(share, T - d->meet.me * share);
    bf16 *x = d->scattered;
    d->scattered = NULL;
    launch_meeting(d, "sum", 2, sum_norm_kernel, (uint4 *)x, w ? (uint4 *)d->xn : (uint4 *)x,
                   (const uint4 *)two_shot_boxes(d->meet, d->meet.me), share, rows, w, d->E, 1.0f / d->shape->E, d->shape->eps);
    if (!d->graphs.capturing)
        d->op_at = d->rank->n_meetings, __atomic_store_n(&d->rank->ops[d->op_at % MEET_OPS], d->rank->op, __ATOMIC_RELEASE);
    clock_part(d, TOKA_OP_ALL_REDUCE);
    return true;
}

static void cuda_all_reduce(toka_device *d, toka_dev_ptr x, int rows) {
    const size_t bytes = (size_t)(d->graphs.now ? d->step->T : rows) * d->E * sizeof(bf16);
    if (tp_size(d) == 1 || !op_begins(d, "all_reduce") || d->scattered) return; /* see sum_norm */
    const bool once = one_shot_pays(d->meet.n, bytes);
    launch_meeting(d, "all-reduce", once ? 1 : 2, once ? one_shot_kernel : two_shot_kernel, (uint4 *)x.at, (int)(bytes / 16));
    clock_part(d, TOKA_OP_ALL_REDUCE);
}

static void cuda_send(toka_device *d, toka_dev_ptr x, int rows) {
    if (!op_begins(d, "send")) return;
    sum_norm(d, NULL); /* in a graph, where the step is one */
    if (d->graphs.capturing) return;
    graph_launch(d);
    toka_group *g = d->group;
    group_link *l = &g->links[d->rank - g->ranks];
    const group_rank *to = d->rank + g->tp_size;
    const size_t bytes = (size_t)rows * d->E * sizeof(bf16), room = (size_t)d->options.max_tokens * d->E * sizeof(bf16);
    const int64_t i = l->sent;
    const int at = (int)(i % TOKA_GPU_LINK_BUFFERS);
    if (i) latch(d, cudaStreamWaitEvent(d->stream, l->sent_at[(i - 1) % TOKA_GPU_LINK_BUFFERS], 0), "send");
    latch(d, cudaMemcpyAsync(l->outbox, (const void *)x.at, bytes, cudaMemcpyDeviceToDevice, d->stream), "send");
    latch(d, cudaEventRecord(l->ready, d->stream), "send");
    if (!group_wait(d, GROUP_WAITS_NEXT, &l->taken, i + 1 - TOKA_GPU_LINK_BUFFERS)) return;
    latch(d, cudaStreamWaitEvent(d->copies, l->ready, 0), "send");
    if (i >= TOKA_GPU_LINK_BUFFERS) latch(d, cudaStreamWaitEvent(d->copies, l->taken_at[at], 0), "send");
    latch(d, cudaMemcpyPeerAsync(to->slots + at * room, to->ordinal, l->outbox, d->ordinal, bytes, d->copies), "send");
    latch(d, cudaEventRecord(l->sent_at[at], d->copies), "send");
    l->rows[at] = rows;
    group_raise(g, &l->sent, i + 1);
    clock_part(d, TOKA_OP_SEND_RECEIVE);
}

static void cuda_receive(toka_device *d, toka_dev_ptr x, int rows) {
    if (!op_begins(d, "receive") || d->graphs.capturing) return;
    toka_group *g = d->group;
    group_link *l = &g->links[d->rank - g->ranks - g->tp_size];
    const size_t bytes = (size_t)rows * d->E * sizeof(bf16), room = (size_t)d->options.max_tokens * d->E * sizeof(bf16);
    const int64_t i = l->taken;
    const int at = (int)(i % TOKA_GPU_LINK_BUFFERS);
    if (!group_wait(d, GROUP_WAITS_BEFORE, &l->sent, i + 1)) return;
    assert(l->rows[at] == rows);
    group_ask(d, l->sent_at[at], 0);
    latch(d, cudaMemcpyAsync((void *)x.at, d->rank->slots + at * room, bytes, cudaMemcpyDeviceToDevice, d->stream), "receive");
    latch(d, cudaEventRecord(l->taken_at[at], d->stream), "receive");
    group_raise(g, &l->taken, i + 1);
    clock_part(d, TOKA_OP_SEND_RECEIVE);
}

/* ---- Draws, from the last stage to the first ---- */

/* Behind the sampling of a step: the table of drawn ids to the first stage. */
static void group_send_drawn(toka_device *d, const toka_step *s) {
    toka_group *g = d->group;
    if (pp_size(d) == 1 || d->options.tp_rank || d->error.code || group_is_broken(g)) return;
    latch(d, cudaEventRecord(d->drawn, d->stream), "drawn ids");
    latch(d, cudaStreamWaitEvent(d->copies, d->drawn, 0), "drawn ids");
    for (int r = 0; r < g->tp_size; r++)
        latch(d, cudaMemcpyPeerAsync(g->ranks[r].last, g->ranks[r].ordinal, d->last, d->ordinal,
                                     (size_t)d->options.n_seqs * sizeof(int), d->copies), "drawn ids");
    latch(d, cudaEventRecord(g->drawn_at[s->number % DRAW_EVENTS], d->copies), "drawn ids");
    group_raise(g, &g->drawn, s->number);
}

/* Before a step is embedded: what it needs has been drawn. False: it never will. */
static bool group_wait_drawn(toka_device *d, const toka_step *s) {
    toka_group *g = d->group;
    if (pp_size(d) == 1 || !s->needs_step) return true;
    assert(s->number - s->needs_step < DRAW_EVENTS);
    if (!group_wait(d, GROUP_WAITS_DRAWN, &g->drawn, s->needs_step)) return false;
    group_ask(d, g->drawn_at[s->needs_step % DRAW_EVENTS], s->needs_step);
    return !d->error.code;
}

/* ===========================================================================
 * MARK: 11. LM head, and sampling of plain rows [kernel]
 * Chosen rows of x to tokens: the op norm_logits_sample. The order of work on a row and every rule (ties, NaN, -inf, what a filter
 * keeps, the last resort) are those of chapter 18 of toka.c; only the draw is made another way, so that it needs no pass over
 * stored logits:
 *
 *   group   the vocabulary is cut, by index alone, into blocks of 256 ids, and a block into four groups: ids with the same
 *           (id / 2) % 4, which are the 64 columns that one thread owns of a row in a 64 x 256 tile of wgmma accumulators
 *   key     log2(sum of the group's weights) + Gumbel noise, one number per (row, group). The group with the highest key is an
 *           exact draw of a group: the maximum of Gumbel variables shifted by their log-weights
 *   id      inside the group the inverse of the cumulative distribution, at a uniform number that all groups of a row share: only
 *           one group wins, and which one does not depend on it
 *
 * Noise is Philox's as in chapter 18: key = seed, counter = (sample, position, 1 + block, 0), word g for group g; word 0 of block
 * -1 is the uniform. So the draw is a pure function of (logits, parameters, seed, sample, position): not of the batch, the slot,
 * the tile shape, nor of which kernel computed the logits. Logits, keys and sums are float32; uniforms use all 32 bits.
 *
 * Rows come in two kinds. A plain row (greedy, drawn at a temperature, or scored; no filter, list, penalty or top
 * log-probabilities) needs nothing but its groups. A filtered row has its logits stored, too, and of these the few that can count
 * are worked over; what is left of them goes the same way. In graphs (chapter 15) and in steps of up to FOLD_ROWS, all rows of a
 * step are of one kind. A row whose rank is wanted is filtered. A step:
 *
 *   rmsnorm             x -> xn: wanted rows
 *   LM head             xn -> parts, one samp_part per (row, block): on Hopper the epilogue of the wgmma GEMM, from which only
 *                       filtered rows' logits leave. Up to SAMP_FEW rows, on other cards, and where the caller wants them, all
 *                       logits are stored (EPI_LOGITS) and samp_blocks_kernel reads them
 *   samp_reduce_kernel  parts -> results, plain rows
 *   samp_filter_kernel  parts and logits -> results, filtered rows: lists, penalties, top log-probabilities, the cut, the draw
 * =========================================================================== */

enum {
    SAMP_BLOCK = 256,           /* ids of a block */
    SAMP_OWN = 64,              /* of a group */
    SAMP_LANES = 64,            /* threads that merge a row's parts: they say in which order that is done */
    SAMP_REDUCE_ROWS = 4,       /* rows of a reducing CTA */
    FILTER_THREADS = 256,
    FILTER_WINDOW = 16384,      /* ids counted together for penalties; as bits, 524,288 ids of allowed_ids */
    FILTER_NEAR = 8192,         /* ids that are gathered in shared memory */
    FILTER_BINS = 8192,         /* parts of a range in which a row's ids are counted */
    FILTER_MANY = 32,           /* blocks, from which on a draw does not look at all; four times that if their mass is not known */
    SAMP_DRAW = -1,             /* samp_ask.forced: nothing is forced */
    SAMP_DRAW_ONLY = -2         /* nor is the raw log-probability wanted */
};
#define SAMP_LOG2E 1.4426950408889634f
#define SAMP_LN2 0.6931471805599453f
/* a weight of 1 in fixed point: sums of up to 2^18 weights are exact and come out the same in any order */
#define SAMP_ONE 0x1p44f

typedef struct samp_ask { /* a toka_sample_row, as all kernels need it: 32 bytes */
    uint32_t key[2], sample, position; /* of Philox */
    uint32_t u;                        /* the row's uniform */
    float scale;                       /* log2(e) / temperature; 0: greedy */
    int forced;                        /* >= 0: score this id; else SAMP_DRAW or SAMP_DRAW_ONLY */
    int slot;                          /* >= 0: the id becomes this slot's last */
} samp_ask;

typedef struct samp_part { /* what some ids of a row come to */
    float max;             /* highest logit; -inf: none may be drawn */
    float key;             /* the candidate's, less max * scale */
    int id;                /* the candidate, INT_MAX: none */
    float x;               /* its logit */
    float sum, raw_sum;    /* of 2^((x - max) * scale), and the same at temperature 1, where that is wanted */
} samp_part;

typedef struct samp_result { /* what comes down for every row */
    int id;
    float logprob, sampled_logprob;
    int rank; /* of a filtered row that asks for it, else 0 */
} samp_result;

typedef struct samp_best { /* and for rows that ask for top log-probabilities */
    int ids[TOKA_MAX_LOGPROBS];
    float logprobs[TOKA_MAX_LOGPROBS];
} samp_best;

typedef struct samp_filter { /* what a filtered row asks besides; lists are on the device */
    const int *history, *bias_ids, *allowed, *forbidden;
    const float *bias;
    double min_p_drop;                       /* logits more than this below the best go: temperature * log(min_p); -inf: off */
    float temperature, top_p;                /* 1: off */
    float repetition, frequency, presence;   /* penalties */
    int top_k;                               /* 0: off */
    int n_top, best;                         /* ids wanted, and where in tops; 0: none */
    int n_history, n_prompt, n_bias, n_allowed, n_forbidden, last_resort;
    int ranked;                              /* the forced id's rank is wanted */
} samp_filter;

typedef struct samp_down { /* what comes down of a step, until it is finished */
    samp_result *results;  /* [max_out] pinned */
    samp_best *tops;       /* [max_out] pinned */
    int *order;            /* [max_out] ask i is s->samples[order[i]]; plain rows first */
    int n_tops;
    toka_sample_result *picks;      /* the caller's; NULL: the step has none */
} samp_down;

struct samp_plan {
    int n_blocks, ldl;       /* ceil(V_all / 256); row stride of logits */
    int chunk, part_rows;    /* rows whose logits, and whose parts, are held together */
    float *logits;           /* [chunk][ldl] */
    samp_part *parts;        /* [n_blocks][part_rows] */
    float *own;              /* [chunk][own_ldl] logits of the rank's own ids; alone: logits */
    int own_blocks, own_ldl;
    bool whole_blocks;       /* the ranks' ids begin at blocks, so each rank can make the parts of its own */
    samp_part *merged;       /* with tensor ranks: [part_rows] what the rank's own ids come to */
    size_t exchange;         /* where in the inbox the others' are */
    uint32_t *reached;       /* [part_rows] samp_logit_to_key of the highest key of the row so far; 0, none, between launches of the head */
    samp_result *far_results; /* [max_out] on the device */
    samp_best *tops;         /* [max_out] */
    stage lists;             /* of one that is launched: filters, and as many of their lists as there is room for */
    samp_down down[STEP_RING];
    /* of the step: */
    samp_ask *ask;           /* device, [n_out] */
    int *rows;               /* device, [n_out] of x */
    int n_plain;
    samp_filter *filters;    /* device, [n_out] if it is a graph; NULL: no row has one */
    samp_result *results;    /* where they go: see samp_plan_step */
    bool in_order;           /* ask i is row i of s->out; all rows are plain, or all go as filtered ones */
};

/* ---- A group: 64 logits in one thread's registers ---- */

/* Philox4x32-10, as samp_philox of toka.c. */
__host__ __device__ static inline void philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c[0], b = (uint64_t)0xCD9E8D57u * c[2];
        c[0] = (uint32_t)(b >> 32) ^ c[1] ^ k0;
        c[2] = (uint32_t)(a >> 32) ^ c[3] ^ k1;
        c[1] = (uint32_t)b;
        c[3] = (uint32_t)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

/* log2 of an exponential variable: E = -ln(1 - v) with v uniform, the middle of one of 2^32 cells. Small v, where the high Gumbel
 * keys come from, by the series, since 1 - v would round; the largest key is 33 ln 2 = 22.9. */
__device__ static inline float samp_log2_exponential(uint32_t word) {
    float v = __fmul_rn(__fadd_rn((float)word, 0.5f), 0x1p-32f), rest = __fmul_rn(__fadd_rn((float)~word, 0.5f), 0x1p-32f);
    float series = __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, 1 / 6.0f, 0.2f), 0.25f), 1 / 3.0f), 0.5f), 1);
    return lg2(v < 0.0625f ? __fmul_rn(v, series) : __fmul_rn(-SAMP_LN2, lg2(rest)));
}

/* Order-preserving map of floats to integers and back (-0 counts as +0). */
__device__ static inline uint32_t samp_logit_to_key(float x) {
    uint32_t u = __float_as_uint(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ static inline float samp_key_to_logit(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

__device__ static inline float samp_clean(float x) { return x > FLT_MAX ? FLT_MAX : x >= -FLT_MAX ? x : -INFINITY; }

/* Which of the eight weights holds u's place. u's upper half counts from the far end: a place close to either end is known
 * as finely as its 32 bits say. *target: u times the sum of all, from that end; on return what is left of it inside. */
__device__ static inline int samp_place(const float (&w)[8], bool flip, float *target) {
    int at = -1, last = 0;
    float left = *target;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float wk = flip ? w[7 - k] : w[k];
        if (wk > 0 && at < 0) last = flip ? 7 - k : k;
        if (at < 0 && left < wk) at = last, *target = left;
        left = __fsub_rn(left, wk);
    }
    return at < 0 ? last : at; /* rounding may lead past the end */
}

/* What a thread knows of its group. */
typedef struct samp_group {
    float max, sums[8], sum, raw_sum; /* of 2^(v * scale - top), by eight ids and of all; of all at temperature 1, if wanted */
    float scale, top, down;           /* down: v is the logit, cleaned, less this, where `rough` */
    int highest;                      /* which eight have the maximum first */
    bool rough;
} samp_group;

__device__ static inline float samp_add_8(const float (&x)[8]) {
    float low = __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3]));
    float high = __fadd_rn(__fadd_rn(x[4], x[5]), __fadd_rn(x[6], x[7]));
    return __fadd_rn(low, high);
}

/* Rest of rounding base * scale: what the group's sums are too large by, in log2. */
__device__ static inline float samp_rest(float base, float scale) { return __fmaf_rn(base, scale, -__fmul_rn(base, scale)); }

/* v[2j + b]: logit of id0 + 8j + b. One maximum, multiply-add, ex2 and sum per id, the last three twice if the raw sum is apart.
 * UNROLL 8, or 1 for v in memory. */
template <int UNROLL>
__device__ static inline void samp_highest(const float (&v)[SAMP_OWN], float scale, samp_group &g) {
    g.max = -INFINITY, g.highest = 0, g.scale = scale;
#pragma unroll UNROLL
    for (int s = 0; s < 8; s++) {
        float highest = v[8 * s];
#pragma unroll UNROLL
        for (int k = 1; k < 8; k++) highest = fmaxf(highest, v[8 * s + k]);
        if (highest > g.max) g.max = highest, g.highest = s;
    }
    g.top = __fmul_rn(g.max > -INFINITY ? g.max : 0, scale);
}
/* 2^(v * scale - top), added up by eight ids; returns the sum of all. */
template <int UNROLL>
__device__ static inline float samp_add_up(const float (&v)[SAMP_OWN], float scale, float top, float (&sums)[8]) {
#pragma unroll UNROLL
    for (int s = 0; s < 8; s++) {
        sums[s] = ex2(__fmaf_rn(v[8 * s], scale, -top));
#pragma unroll UNROLL
        for (int k = 1; k < 8; k++) sums[s] = __fadd_rn(sums[s], ex2(__fmaf_rn(v[8 * s + k], scale, -top)));
    }
    return samp_add_8(sums);
}
template <int UNROLL> __device__ static inline void samp_add_weights(const float (&v)[SAMP_OWN], samp_group &g) {
    float sums[8];
    g.sum = samp_add_up<UNROLL>(v, g.scale, g.top, sums);
#pragma unroll
    for (int s = 0; s < 8; s++) g.sums[s] = sums[s];
}
__device__ static inline float samp_raw_top(const samp_group &g) { return __fmul_rn(g.max > -INFINITY ? g.max : 0, SAMP_LOG2E); }
template <int UNROLL> __device__ static inline void samp_add_raw(const float (&v)[SAMP_OWN], samp_group &g) {
    float sums[8];
    g.raw_sum = samp_add_up<UNROLL>(v, SAMP_LOG2E, samp_raw_top(g), sums);
}
/* Behind the sums. True if a NaN or infinity was among the logits, or the maximum is so high that rounding it when scaled, here or
 * at temperature 1, would matter: `apart` or not makes no difference. */
__device__ static inline bool samp_is_rough(bool apart, samp_group &g) {
    if (!apart) g.raw_sum = g.sum;
    return !(g.sum >= 0 && fabsf(g.top) < 0x1p23f && fabsf(samp_raw_top(g)) < 0x1p23f);
}

/* Where v[i] is, less id0. */
__device__ static inline int samp_column(int i) { return i / 2 * 8 + i % 2; }

/* The sums again where they are rough. Such rare v are worked over in a copy, so that v itself, which may be accumulators of
 * wgmma, is only read: else the compiler would keep another 64 registers. The copy, and sums of eight where loops are not
 * unrolled, are the stack frame of 320 bytes that ptxas reports for kernels which inline this; only those rare ones touch it. */
__device__ static inline void samp_smooth(const float (&v)[SAMP_OWN], float scale, bool apart, samp_group &g) {
    if (!g.rough) return;
    float copy[SAMP_OWN];
#pragma unroll
    for (int i = 0; i < SAMP_OWN; i++) copy[i] = v[i];
    for (int round = 0; round < 2; round++) {
#pragma unroll 1
        for (int i = 0; i < SAMP_OWN; i++) copy[i] = __fsub_rn(samp_clean(copy[i]), g.down);
        samp_highest<1>(copy, scale, g);
        if (apart) samp_add_raw<1>(copy, g);
        samp_add_weights<1>(copy, g);
        if (!samp_is_rough(apart, g) || round) break;
        g.down = g.max;
    }
}
/* Any v. apart: the raw sum is wanted and another one. */
__device__ static inline samp_group samp_sums(const float (&v)[SAMP_OWN], float scale, bool apart) {
    samp_group g;
    g.down = 0;
    samp_highest<8>(v, scale, g);
    if (apart) samp_add_raw<8>(v, g);
    samp_add_weights<8>(v, g);
    g.rough = samp_is_rough(apart, g);
    samp_smooth(v, scale, apart, g);
    return g;
}
/* The same for two rows: the maxima of b while the exponentials of a, which bound it, are made. */
__device__ static inline void samp_sums_2(const float (&v)[SAMP_OWN], float scale_a, bool apart_a, samp_group &a,
                                          const float (&other)[SAMP_OWN], float scale_b, bool apart_b, samp_group &b) {
    a.down = b.down = 0;
    samp_highest<8>(v, scale_a, a), samp_add_weights<8>(v, a);
    samp_highest<8>(other, scale_b, b);
    if (apart_a) samp_add_raw<8>(v, a);
    samp_add_weights<8>(other, b);
    if (apart_b) samp_add_raw<8>(other, b);
    a.rough = samp_is_rough(apart_a, a), b.rough = samp_is_rough(apart_b, b);
    samp_smooth(v, scale_a, apart_a, a), samp_smooth(other, scale_b, apart_b, b);
}

/* Where the row's uniform number lies in a sum, from the end that samp_place counts from. */
__device__ static inline float samp_target(const samp_ask &a, bool flip, float sum) {
    return __fmul_rn(__fmul_rn(__fadd_rn((float)(flip ? ~a.u : a.u), 0.5f), 0x1p-32f), sum);
}

/* The group's candidate: its id less id0, and *x = its v. own: place of the forced id in the group, -1: it is not here. */
__device__ static inline int samp_candidate(const float (&v)[SAMP_OWN], const samp_group &g, const samp_ask &a, int own,
                                            float *x) {
    bool flip = a.u >> 31, draw = a.forced < 0 && a.scale > 0;
    float target = samp_target(a, flip, g.sum), y[8];
    int sub = draw ? samp_place(g.sums, flip, &target) : a.forced < 0 ? g.highest : own / 8 & 7, at = own & 7;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        y[k] = v[k];
#pragma unroll
        for (int s = 1; s < 8; s++) y[k] = sub == s ? v[8 * s + k] : y[k];
        if (g.rough) y[k] = __fsub_rn(samp_clean(y[k]), g.down);
    }
    if (draw) {
        float w[8];
#pragma unroll
        for (int k = 0; k < 8; k++) w[k] = ex2(__fmaf_rn(y[k], g.scale, -g.top));
        at = samp_place(w, flip, &target);
    } else if (a.forced < 0) {
#pragma unroll
        for (int k = 7; k >= 0; k--) at = y[k] == g.max ? k : at;
    }
    *x = y[0];
#pragma unroll
    for (int k = 1; k < 8; k++) *x = at == k ? y[k] : *x;
    return 32 * sub + samp_column(at);
}

__device__ static inline float samp_quad_sum(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

/* The best candidate of four lanes becomes p's. */
__device__ static inline void samp_quad_best(samp_part &p, float rank, int id, float x) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        float rank_b = __shfl_xor_sync(~0u, rank, lanes), x_b = __shfl_xor_sync(~0u, x, lanes);
        int id_b = __shfl_xor_sync(~0u, id, lanes);
        if (rank_b > rank || (rank_b == rank && id_b < id)) rank = rank_b, x = x_b, id = id_b;
    }
    p.key = rank, p.id = id, p.x = x;
}

/* A block on its way to its part: what one of its four lanes knows. */
typedef struct samp_weight {
    samp_part p;
    float max, below, key; /* the group's maximum, less the block's, scaled noise and sum */
    int own;               /* place of the forced id in the group, -1: it is not here */
    bool draw, forced, wanted;
} samp_weight;

/* word: the group's noise. best: a key that some block of the row has reached, in log2, NaN: none known; a block whose key is
 * certainly lower is not wanted. `inside` false: nothing is wanted of this row. */
__device__ static inline samp_weight samp_weigh(const samp_group &g, const samp_ask &a, uint32_t word, int id0, float best,
                                                bool inside) {
    samp_weight w;
    w.forced = a.forced >= 0, w.draw = !w.forced && a.scale > 0;
    float base = g.max > -INFINITY ? g.max : 0;
    float rest = samp_rest(base, g.scale), raw_rest = samp_rest(base, SAMP_LOG2E);
    w.max = __fadd_rn(g.max, g.down);
    w.key = w.draw ? __fsub_rn(__fsub_rn(lg2(g.sum), rest), samp_log2_exponential(word)) : 0;
    float reached = __fmaf_rn(w.max, g.scale, w.key);
    int rel = a.forced - id0;
    w.own = w.forced && rel >= 0 && rel < SAMP_BLOCK && (rel & 6) == 0 ? rel / 8 * 2 + rel % 2 : -1;
    float enough = best - 0.01f - 1e-6f * fabsf(best), top = quad_max(w.max), high = top > -INFINITY ? top : 0;
    w.below = __fsub_rn(w.max, high);
    w.p = samp_part{top, -INFINITY, INT_MAX, -INFINITY, 0, 0};
    w.p.sum = samp_quad_sum(__fmul_rn(g.sum, ex2(__fsub_rn(__fmul_rn(w.below, g.scale), rest))));
    w.p.raw_sum = samp_quad_sum(__fmul_rn(g.raw_sum, ex2(__fsub_rn(__fmul_rn(w.below, SAMP_LOG2E), raw_rest))));
    w.wanted = inside && (w.forced ? w.own >= 0 : !(reached < enough));
    return w;
}
/* The part of a block, which four lanes side by side hold a group of each (v as in samp_sums) and all return. It gets a candidate
 * where that is wanted of it or of another row in the warp: else the search for its id is spared. The arithmetic is pinned down to
 * the rounding, so that every kernel that inlines this draws alike. */
__device__ static inline samp_part samp_choose(const float (&v)[SAMP_OWN], const samp_group &g, const samp_ask &a, int id0,
                                               const samp_weight &w) {
    samp_part p = w.p;
    if (!__any_sync(~0u, w.wanted)) return p;
    float x, rank = w.forced ? w.own >= 0 ? 1 : 0 : w.draw ? __fmaf_rn(w.below, g.scale, w.key) : w.max;
    int id = id0 + samp_candidate(v, g, a, w.own, &x);
    x = __fadd_rn(x, g.down);
    if (w.forced ? w.own < 0 : w.max == -INFINITY) id = INT_MAX;
    samp_quad_best(p, rank, id, x);
    return p;
}
/* The scale of the weights that count: for scores those at temperature 1. */
__device__ static inline float samp_scale(const samp_ask &a) { return a.forced < 0 && a.scale > 0 ? a.scale : SAMP_LOG2E; }
/* Is the raw sum wanted, and another one? */
__device__ static inline bool samp_apart(const samp_ask &a) {
    return a.forced == SAMP_DRAW && a.scale > 0 && a.scale != SAMP_LOG2E;
}
/* All of it, where no other block's key is known. */
__device__ static inline samp_part samp_block(const float (&v)[SAMP_OWN], const samp_ask &a, bool apart, uint32_t word, int id0) {
    const samp_group g = samp_sums(v, samp_scale(a), apart);
    return samp_choose(v, g, a, id0, samp_weigh(g, a, word, id0, NAN, true));
}

__device__ static inline samp_part samp_nothing() { return samp_part{-INFINITY, -INFINITY, INT_MAX, -INFINITY, 0, 0}; }

/* a and b, of the same row, become one: bitwise the same whichever comes first. */
__device__ static inline samp_part samp_merge(const samp_part &a, const samp_part &b, const samp_ask &ask) {
    float scale = ask.scale > 0 && ask.forced < 0 ? ask.scale : SAMP_LOG2E;
    float max = fmaxf(a.max, b.max), base = fmaxf(max, -FLT_MAX);
    float below_a = __fsub_rn(a.max, base), below_b = __fsub_rn(b.max, base);
    float key_a = __fadd_rn(a.key, __fmul_rn(below_a, scale)), key_b = __fadd_rn(b.key, __fmul_rn(below_b, scale));
    bool second = b.id < a.id; /* forced: only one has it. Else the tie */
    if (ask.forced < 0) {
        float rank_a = ask.scale > 0 ? key_a : a.max, rank_b = ask.scale > 0 ? key_b : b.max;
        second = rank_b > rank_a || (rank_b == rank_a && second);
    }
    samp_part r = second ? b : a;
    r.max = max, r.key = second ? key_b : key_a;
    r.sum = __fadd_rn(__fmul_rn(a.sum, ex2(__fmul_rn(below_a, scale))), __fmul_rn(b.sum, ex2(__fmul_rn(below_b, scale))));
    r.raw_sum = __fadd_rn(__fmul_rn(a.raw_sum, ex2(__fmul_rn(below_a, SAMP_LOG2E))),
                          __fmul_rn(b.raw_sum, ex2(__fmul_rn(below_b, SAMP_LOG2E))));
    return r;
}

/* Noise of group g of a block. */
__device__ static inline uint32_t samp_noise(const samp_ask &a, int block, int g) {
    uint32_t c[4] = {a.sample, a.position, 1 + (uint32_t)block, 0};
    philox(c, a.key[0], a.key[1]);
    return g < 2 ? g ? c[1] : c[0] : g == 2 ? c[2] : c[3];
}

/* ---- Sums and maxima over a CTA ---- */

struct op_max { template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; } };
struct op_add { template <class T> __device__ T operator()(T a, T b) const { return a + b; } };

/* x of all threads, folded in a fixed order; every thread gets it. scratch: [33] in shared memory. */
template <class T, class F> __device__ static inline T block_fold(T x, T *scratch, F op) {
    int warp = (int)threadIdx.x / 32, warps = (int)blockDim.x / 32;
    for (int lanes = 16; lanes; lanes /= 2) x = op(x, __shfl_xor_sync(~0u, x, lanes));
    __syncthreads(); /* an earlier fold's result has been read */
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < warps; i++) x = op(x, scratch[i]);
        scratch[32] = x;
    }
    __syncthreads();
    return scratch[32];
}

/* ---- Stored logits to parts ----
 *
 * in   logits float32 [n][ldl] of the V ids from v0 on, ldl and v0 multiples of 256      out  parts[block][ld], columns 0 .. n-1
 * A thread loads what it would own in a wgmma tile: four threads side by side read 32 bytes, a warp eight blocks of a row.
 * grid: (ceil(blocks / 32), n); block: 128. Reads V * 4 bytes a row, writes 24 bytes a block. */
__global__ static void __launch_bounds__(128) samp_blocks_kernel(const samp_ask *ask, const float *logits, int ldl, int v0, int V,
                                                                 samp_part *parts, int ld) {
    int g = (int)threadIdx.x % 4, block = (int)(blockIdx.x * 32 + threadIdx.x / 4), id0 = block * SAMP_BLOCK + 2 * g;
    int row = (int)blockIdx.y;
    float v[SAMP_OWN];
    grid_launch_dependents();
    grid_wait();
    const samp_ask a = ask[row];
    bool inside = block * SAMP_BLOCK < V;
    const float *from = logits + (size_t)row * ldl + id0;
#pragma unroll
    for (int j = 0; j < SAMP_OWN / 2; j++) {
        float2 pair = inside ? *(const float2 *)(from + 8 * j) : float2{-INFINITY, -INFINITY};
        v[2 * j] = id0 + 8 * j < V ? pair.x : -INFINITY;
        v[2 * j + 1] = id0 + 8 * j + 1 < V ? pair.y : -INFINITY;
    }
    samp_part p = samp_block(v, a, samp_apart(a), samp_noise(a, v0 / SAMP_BLOCK + block, g), v0 + id0);
    if (inside && g == 0) parts[(size_t)block * ld + row] = p;
}

/* ---- The LM head's epilogue on wgmma (chapter 6) ----
 *
 * Accumulators -> parts[block][ld]; nothing else leaves the multiprocessor but the logits of filtered rows. A tile of 256 columns
 * is a block, and a thread has two rows of one group. Per logit: maximum, multiply-add, ex2, sum, and the last three again if the
 * raw log-probability is asked for at a temperature other than 1, by any of the eight rows that a warp works over side by side.
 * The 16 results a clock of the special function unit bound it: 128 x 256 / 16 = 2,048 clocks a tile, twice that with the second
 * ones, beside 16 K for the products. What is asked of the rows is fetched and the noise made beside the products; one Philox
 * call serves both rows of a thread: its four words are the noise of the row's four groups. The search for a group's id comes
 * only where its key may be the row's highest so far (reached), in about a tenth of a warp's tiles; the other warps wait for it at
 * the ring. One warpgroup's epilogue goes beside the other's last or first products (gemm_lead).
 *
 * Where a tile's clocks went when both warpgroups ended together (V 151936, E 896, 512 rows, T = 1, H200 at 1.66 GHz, 2026-11-23):
 * products 14,900, sums 2,800, weights 750, search and parts 1,100, until the next products are asked for 650. Of 231 us 7 are the
 * searches, 13 the exponentials; the same products and no epilogue take 193.
 *
 * Retired: differences to the maximum, then a product, instead of one multiply-add, and a candidate from every group: LM head and
 * sampling together against cuBLAS's LM head alone, H200, November 2026, temperature 1 / 0.6: 1.15 / 1.20 (V 151936, E 896, 512
 * rows), 1.06 / 1.21 (1024), 1.18 / 1.24 (4096). Both warpgroups at the end of a tile together: 2 to 3 % slower (E 896), 1 %
 * (E 2048). Warpgroups started three blocks of K apart, and nothing to hold them apart at a tile's end: no gain at temperature 1,
 * 5 % slower at 0.6. A lead of two blocks: the same as three; of four: up to 1 % slower. Half of the second exponentials by a
 * polynomial on the other units, ten instructions each: 3 % slower (V 151936, 512 rows): there are not that many free. One loop
 * over both rows, for half the code: 1 % slower. */

typedef struct samp_fused {
    const samp_ask *ask; /* [M] */
    samp_part *parts;
    uint32_t *reached; /* [M] */
    float *logits;     /* [M - stored][ldl]: those of rows from `stored` on */
    int ld, ldl, v0, V, stored; /* columns are the ids v0 .. v0+V-1 */
} samp_fused;

struct epi_sample;
template <> constexpr int gemm_lead<epi_sample> = 3;
template <int C> struct gemm_held<epi_sample, C> {
    uint4 noise;   /* Philox's key, sample and position of one row of this thread; then the noise of both: x, y */
    uint4 how[2];  /* the other half of samp_ask of both rows: u, scale, forced */
};

struct epi_sample {
    typedef samp_fused params;
    template <int C> using held = gemm_held<epi_sample, C>;
    __host__ __device__ static constexpr int out(int) { return 0; }
#if HOPPER
    /* Lanes 0 and 1 of four make the first row's noise, 2 and 3 the second's. */
    template <int C> __device__ static inline void begin(const gemm_tile &t, held<C> &h, const params &p) {
        const uint4 *ask = (const uint4 *)p.ask;
        int first = min(t.row0 + t.lane / 4, t.M - 1), second = min(t.row0 + t.lane / 4 + 8, t.M - 1);
        h.noise = ask[2 * (t.lane % 4 < 2 ? first : second)], h.how[0] = ask[2 * first + 1], h.how[1] = ask[2 * second + 1];
    }
    template <int C> __device__ static inline void later(const gemm_tile &t, held<C> &h, const params &p) {
        int g = t.lane % 4;
        uint32_t c[4] = {h.noise.z, h.noise.w, 1 + (uint32_t)((p.v0 + t.col0) / SAMP_BLOCK), 0};
        philox(c, h.noise.x, h.noise.y);
        uint32_t keep = g < 2 ? g ? c[1] : c[0] : g == 2 ? c[2] : c[3], give = g < 2 ? g ? c[3] : c[2] : g == 2 ? c[0] : c[1];
        uint32_t got = __shfl_xor_sync(~0u, give, 2);
        h.noise.x = g < 2 ? keep : got, h.noise.y = g < 2 ? got : keep;
    }

    __device__ static inline samp_ask ask_of(uint4 how) {
        return samp_ask{.u = how.x, .scale = __uint_as_float(how.y), .forced = (int)how.z};
    }
    __device__ static inline float reached(int row, const gemm_tile &t, const params &p) {
        return samp_key_to_logit(__ldcg(p.reached + min(row, t.M - 1)));
    }
    /* One of this thread's two rows is put out. */
    __device__ static inline void put(const float (&v)[SAMP_OWN], int row, const gemm_tile &t, const params &p, const samp_ask &a,
                                      float before, const samp_part &part) {
        int g = t.lane % 4, id0 = t.col0 + 2 * g;
        if (row >= t.M) return;
        if (row >= p.stored) { /* each 32-byte sector is written by four lanes */
            float2 *to = (float2 *)(p.logits + (size_t)(row - p.stored) * p.ldl + id0);
#pragma unroll
            for (int j = 0; j < SAMP_OWN / 2; j++) to[4 * j] = float2{v[2 * j], v[2 * j + 1]};
        }
        if (g == 0 && part.id != INT_MAX && a.forced < 0) {
            float reached = a.scale > 0 ? part.max * a.scale + part.key : part.max * SAMP_LOG2E;
            if (!(reached <= before)) atomicMax(p.reached + row, samp_logit_to_key(reached));
        }
        float2 piece = g == 0   ? float2{part.max, part.key}
                       : g == 1 ? float2{__int_as_float(part.id), part.x} : float2{part.sum, part.raw_sum};
        if (g < 3) ((float2 *)(p.parts + (size_t)(t.col0 / SAMP_BLOCK) * p.ld + row))[g] = piece;
    }

    template <int C> __device__ static inline void run(float (&acc)[C / 2], const gemm_tile &t, held<C> &h, const params &p) {
        static_assert(C == SAMP_BLOCK, "a tile's columns are one block");
        if (t.row0 >= t.M || t.col0 >= p.V) return; /* the warp's */
        int g = t.lane % 4, row0 = t.row0 + t.lane / 4;
        if (t.col0 + SAMP_BLOCK > p.V) {
#pragma unroll
            for (int i = 0; i < SAMP_BLOCK / 2; i++)
                if (t.col0 + 2 * g + i / 4 * 8 + i % 2 >= p.V) acc[i] = -INFINITY;
        }
        float v[SAMP_OWN], other[SAMP_OWN];
#pragma unroll
        for (int i = 0; i < SAMP_OWN; i++) v[i] = acc[i / 2 * 4 + i % 2], other[i] = acc[i / 2 * 4 + 2 + i % 2];
        /* Both rows' sums, then what comes of either side by side: chains of few instructions that wait for each other. */
        const samp_ask a = ask_of(h.how[0]), b = ask_of(h.how[1]);
        float before_a = reached(row0, t, p), before_b = reached(row0 + 8, t, p);
        samp_group of_a, of_b;
        samp_sums_2(v, samp_scale(a), samp_apart(a), of_a, other, samp_scale(b), samp_apart(b), of_b);
        int id0 = p.v0 + t.col0 + 2 * g;
        samp_weight w = samp_weigh(of_a, a, h.noise.x, id0, before_a, row0 < t.M);
        samp_weight x = samp_weigh(of_b, b, h.noise.y, id0, before_b, row0 + 8 < t.M);
        put(v, row0, t, p, a, before_a, samp_choose(v, of_a, a, id0, w));
        put(other, row0 + 8, t, p, b, before_b, samp_choose(other, of_b, b, id0, x));
    }
#endif
};

static const gemm_variant samp_head_variant = GEMM_VARIANT(0, epi_sample, 256, 1);

/* ---- Parts to results ----
 *
 * in   parts [n_blocks][ld], columns 0 .. n-1, plain rows
 * out  merged [n], or if that is NULL results [n] and last; reached is 0 again
 * A row's parts are merged in an order that the number of blocks alone fixes, also where its step has filtered rows.
 * grid: ceil(n / 4); block: 256, thread t merges blocks t/4, t/4 + 64 ... of row t%4. Reads 24 bytes a part. */
__device__ static inline samp_result samp_finish(const samp_ask &a, const samp_part &p, float raw_max, float raw_log_sum,
                                                 int last_resort) {
    samp_result out = {p.id, p.x == -INFINITY ? -INFINITY : p.x - raw_max - raw_log_sum, 0, 0};
    if (a.forced >= 0) out.sampled_logprob = out.logprob;
    else if (p.max == -INFINITY) out.id = last_resort, out.logprob = -INFINITY;
    else if (a.scale > 0) out.sampled_logprob = ((p.x - p.max) * a.scale - log2f(p.sum)) * SAMP_LN2;
    return out;
}

/* What all ids of a plain row come to is its result. */
__device__ static inline void samp_settle(const samp_ask &a, const samp_part &p, int row, samp_result *results, int *last) {
    samp_result out = samp_finish(a, p, p.max, logf(p.raw_sum), 0);
    results[row] = out;
    if (a.slot >= 0) last[a.slot] = out.id;
}

/* What a row's parts come to, so far as lane k of SAMP_LANES has them: blocks k, k + SAMP_LANES ... in turn. parts: the row's
 * column. maxes: where the blocks' maxima go, too, or NULL. */
__device__ static inline samp_part samp_lane(const samp_ask &a, const samp_part *parts, int ld, int n_blocks, int k,
                                             float *maxes) {
    constexpr int AHEAD = 10;
    samp_part p = samp_nothing();
    for (int b = k; b < n_blocks; b += SAMP_LANES * AHEAD) {
        samp_part next[AHEAD]; /* all on their way at once */
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            next[i] = b + SAMP_LANES * i < n_blocks ? parts[(size_t)(b + SAMP_LANES * i) * ld] : samp_nothing();
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (maxes && b + SAMP_LANES * i < n_blocks) maxes[b + SAMP_LANES * i] = next[i].max;
            p = samp_merge(p, next[i], a);
        }
    }
    return p;
}

__global__ static void __launch_bounds__(256) samp_reduce_kernel(const samp_ask *ask, const samp_part *parts, int ld, int n_blocks,
                                                                 int n, uint32_t *reached, samp_part *merged,
                                                                 samp_result *results, int *last) {
    __shared__ samp_part all[SAMP_LANES][SAMP_REDUCE_ROWS];
    int r = (int)threadIdx.x % SAMP_REDUCE_ROWS, k = (int)threadIdx.x / SAMP_REDUCE_ROWS;
    int row = (int)blockIdx.x * SAMP_REDUCE_ROWS + r;
    grid_launch_dependents();
    grid_wait();
    int from = min(row, n - 1);
    const samp_ask a = ask[from];
    samp_part p = samp_lane(a, parts + from, ld, n_blocks, k, NULL);
    all[k][r] = p;
    for (int half = SAMP_LANES / 2; half; half /= 2) {
        __syncthreads();
        if (k < half) all[k][r] = p = samp_merge(p, all[k + half][r], a);
    }
    if (k || row >= n) return;
    reached[row] = 0;
    if (merged) merged[row] = p;
    else samp_settle(a, p, row, results, last);
}

/* ---- Tensor ranks: one part a row from each, or whole rows of logits ----
 *
 * Plain rows: each rank sends what its own ids come to and merges what all sent, in the order of the ranks: 24 bytes a row.
 * Filtered rows need all logits: each rank pushes its columns into the others' rows and goes on as if it were alone. Two meetings
 * there: before it writes, all must be done with the rows before. */

__global__ static void __launch_bounds__(MEET_THREADS, 1) samp_exchange_kernel(meeting m, size_t at, const samp_ask *ask,
                                                                               const samp_part *merged, int n,
                                                                               samp_result *results, int *last) {
    const int first = (int)(blockIdx.x * MEET_THREADS + threadIdx.x), stride = (int)gridDim.x * MEET_THREADS;
    grid_wait();
    const unsigned c = meet_count(m) + 1;
    const size_t half = (size_t)(c & 1) * m.n;
    for (int row = first; row < n; row += stride)
        for (int q = 0; q < m.n; q++)
            if (q != m.me) ((samp_part *)(m.inbox[q] + at + (half + m.me) * EXCHANGE_BYTES))[row] = merged[row];
    meet(m, c, NULL);
    grid_launch_dependents();
    for (int row = first; row < n; row += stride) {
        const samp_ask a = ask[row];
        samp_part all = samp_nothing();
        for (int q = 0; q < m.n; q++) {
            const samp_part p = q == m.me ? merged[row] : ((samp_part *)(m.inbox[m.me] + at + (half + q) * EXCHANGE_BYTES))[row];
            all = q ? samp_merge(all, p, a) : p;
        }
        samp_settle(a, all, row, results, last);
    }
    meet_done(m, c);
}

typedef struct samp_everybody { /* each rank's samp_plan.logits */
    float *logits[MEET_RANKS];
} samp_everybody;

__global__ static void __launch_bounds__(MEET_THREADS, 1)
    samp_gather_kernel(meeting m, const __grid_constant__ samp_everybody to, int ldl, const float *own, int own_ldl, int v0, int V,
                       int n) {
    grid_wait();
    const unsigned c = meet_count(m) + 1;
    if (!meet(m, c, NULL)) n = 0;
    for (int row = (int)blockIdx.x; row < n; row += (int)gridDim.x)
        for (int id = (int)threadIdx.x; id < V; id += MEET_THREADS) {
            const float x = own[(size_t)row * own_ldl + id];
            for (int q = 0; q < m.n; q++) to.logits[q][(size_t)row * ldl + v0 + id] = x;
        }
    meet(m, c + 1, NULL);
    grid_launch_dependents();
    meet_done(m, c + 1);
}

/* ===========================================================================
 * MARK: 12. Sampling of filtered rows, and the op [kernel]
 * Steps 1 to 5 of chapter 18 of toka.c on a stored row with its parts: top log-probabilities, bias, allowed and forbidden ids,
 * penalties, the cut, the draw among what is left. Everything a filter keeps is the head of one order (logit falling, id rising),
 * so a cut is a logit and the last id of it that stays.
 * in   logits float32 [n][ldl], overwritten where lists and penalties say so; parts [n_blocks][ld], columns 0 .. n-1, of the raw
 *      logits
 * out  results [n], tops, last; reached is 0 again
 * The parts tell which blocks can have an id that counts (the k-th highest of the blocks' maxima bounds the k-th highest logit,
 * top-p and min-p bound by weight), and only those are read, usually a few per cent of the row. Their ids that can count are
 * gathered in shared memory: up to one a thread, each adds up what lies above its own; more are searched there. Where they are too
 * many, the part of the range that decides is found by sweeps over the blocks, a 256th at a time, until what is left fits. Of
 * blocks that lists and penalties have changed, the maxima are made anew. Sums that decide are integers: no order of threads
 * shows.
 * grid: n; block: 256; shared: samp_filter_smem.
 *
 * NVIDIA H200, 2026-11-23, V 128,256, us for 1, 64 and 512 rows of Gaussian logits (gpu_samp filters). Deviation 4.4, 1 to 3
 * nats at temperature 1, as of real models: temperature 0.6 and top_p 0.9: 16, 22, 47; 0.7, top_k 20 and top_p 0.8: 16, 20, 42,
 * and with a penalty over 1,000 ids 49, 53, 182; min_p 0.05: 6, 16, 35; five log-probabilities: 8, 10, 24. Where of one row
 * top_p keeps more than fits: 190 to 200, of all: 520 to 550; where nearly flat ones (deviation 1): 151, 158, 438, with min_p 0.05
 * instead 69, 94, 209. Retired: no count ahead of what is gathered, all kept blocks drawn from: flat 280, 285, 758, and 63, 75,
 * 185, rows of real models 1 us less, with penalties 44, 49, 164; the k-th maximum exactly, a search of what is
 * gathered however little it is, all maxima anew after a penalty, a draw by four lanes a block also where few are left: 26, 28,
 * 60; 30, 32, 68; 124, 144, 439.
 * =========================================================================== */

typedef unsigned long long samp_mass; /* weight in fixed point; also counts */

typedef struct samp_dist { /* a row as a distribution */
    const float *x;
    float *maxes;         /* [n_blocks] in shared memory: no logit of the block is higher */
    float *sums;          /* [n_blocks] of the block's weights, less that maximum, where they are needed; at the end bounds of its
                           * keys. There, too */
    int *list;            /* [n_list] of [n_blocks], rising: blocks that are looked at; in shared memory */
    float *near;          /* [n_near] of [FILTER_NEAR] logits gathered from them, in any order, and their ids */
    int *near_ids;
    int V, n_blocks, n_list, n_near; /* n_near < 0: nothing is gathered */
    uint32_t near_low, near_high;    /* gathered is what was kept and has a key in this range */
    float max, scale, at; /* highest logit; log2(e) / temperature; the cut: kept are logits above it, ... */
    int last;             /* ... and of those equal to it the ids up to this */
} samp_dist;

__device__ static inline bool samp_is_kept(const samp_dist &r, float x, int id) { return x > r.at || (x == r.at && id <= r.last); }
__device__ static inline samp_mass samp_mass_of(const samp_dist &r, float x) {
    return (samp_mass)(ex2(__fmul_rn(__fsub_rn(x, r.max), r.scale)) * SAMP_ONE);
}

/* Sum over the CTA, in all threads. scratch: [FILTER_THREADS / 32] in shared memory. */
__device__ static samp_mass samp_all(samp_mass x, samp_mass *scratch) {
    const uint32_t low = (1u << 21) - 1;
    samp_mass sum = __reduce_add_sync(~0u, (uint32_t)x & low);
    sum += (samp_mass)__reduce_add_sync(~0u, (uint32_t)(x >> 21) & low) << 21;
    sum += (samp_mass)__reduce_add_sync(~0u, (uint32_t)(x >> 42)) << 42;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int i = 0; i < FILTER_THREADS / 32; i++) sum += scratch[i];
    __syncthreads();
    return sum;
}

/* each(logits, ids) for the listed blocks, for a warp until it returns false: SAMP_AT_ONCE times four ids side by side, of which
 * ids has the first. A warp takes half as many blocks at a time. All lanes come each time; an id may be V or more. */
enum { SAMP_AT_ONCE = 8 };
template <class F> __device__ static inline void samp_sweep_4(const samp_dist &r, F each) {
    const int SWEEP = SAMP_AT_ONCE / 2, warps = FILTER_THREADS / 32;
    int lane = (int)threadIdx.x % 32;
    for (int i = (int)threadIdx.x / 32; i < r.n_list; i += SWEEP * warps) {
        int id[2 * SWEEP];
        float4 p[2 * SWEEP];
#pragma unroll
        for (int k = 0; k < 2 * SWEEP; k++) {
            int at = i + k / 2 * warps;
            id[k] = at < r.n_list ? r.list[at] * SAMP_BLOCK + k % 2 * 128 + 4 * lane : r.V;
            p[k] = id[k] < r.V ? *(const float4 *)(r.x + id[k]) : float4{};
        }
#pragma unroll
        for (int k = 0; k < 2 * SWEEP; k++)
            p[k] = float4{samp_clean(p[k].x), samp_clean(p[k].y), samp_clean(p[k].z), samp_clean(p[k].w)};
        if (!each(p, id)) break;
    }
}
/* each(logit, id) for all ids of the listed blocks. */
template <class F> __device__ static inline void samp_sweep(const samp_dist &r, F each) {
    samp_sweep_4(r, [&](const float4 (&p)[SAMP_AT_ONCE], const int (&id)[SAMP_AT_ONCE]) {
#pragma unroll
        for (int k = 0; k < SAMP_AT_ONCE; k++) {
            const float x[4] = {p[k].x, p[k].y, p[k].z, p[k].w};
#pragma unroll
            for (int c = 0; c < 4; c++)
                if (id[k] + c < r.V) each(x[c], id[k] + c);
        }
        return true;
    });
}
/* The same for what is gathered, or else for the listed blocks. */
template <class F> __device__ static inline void samp_each(const samp_dist &r, F each) {
    if (r.n_near < 0) samp_sweep(r, each);
    else
        for (int i = (int)threadIdx.x; i < r.n_near; i += FILTER_THREADS) each(r.near[i], r.near_ids[i]);
}

/* Lists the blocks among n of which wanted(block) is true; block_of(i) is the i-th of them, and rises. */
template <class B, class W> __device__ static inline void samp_list(samp_dist &r, int n, B block_of, W wanted) {
    __shared__ int counts[FILTER_THREADS / 32];
    int t = (int)threadIdx.x, lane = t % 32, have = 0;
    for (int from = 0; from < n; from += FILTER_THREADS) {
        int block = from + t < n ? block_of(from + t) : 0; /* read before any of these is overwritten */
        bool in = from + t < n && wanted(block);
        unsigned all = __ballot_sync(~0u, in);
        __syncthreads();
        if (lane == 0) counts[t / 32] = __popc(all);
        __syncthreads();
        int before = have;
#pragma unroll
        for (int i = 0; i < FILTER_THREADS / 32; i++) before += i < t / 32 ? counts[i] : 0, have += counts[i];
        if (in) r.list[before + __popc(all & ((1u << lane) - 1))] = block;
    }
    __syncthreads();
    r.n_list = have;
}
/* Lists the blocks that may have a logit of `at` or more. */
__device__ static void samp_look_at(samp_dist &r, float at) {
    samp_list(r, r.n_blocks, [](int i) { return i; }, [&](int block) { return r.maxes[block] >= at; });
}

/* Is what is kept with a key in low .. high gathered? */
__device__ static inline bool samp_has(const samp_dist &r, uint32_t low, uint32_t high) {
    return r.n_near >= 0 && r.near_low <= low && r.near_high >= high;
}

/* Gathers what is kept with a key in low .. high, unless it is gathered already; false if it is too much, seen as soon as it is.
 * Lists its blocks. With `above` it is not there yet, and each(logit) is called for all above high. */
template <class F>
__device__ static inline bool samp_gather_and(samp_dist &r, uint32_t low, uint32_t high, bool above, F each) {
    __shared__ int n;
    int lane = (int)threadIdx.x % 32;
    if (!above && samp_has(r, low, high)) return true;
    if (threadIdx.x == 0) n = 0;
    samp_look_at(r, samp_key_to_logit(low)); /* its barriers are those of n, too */
    float least = samp_key_to_logit(low), most = samp_key_to_logit(high);
    samp_sweep_4(r, [&](const float4 (&p)[SAMP_AT_ONCE], const int (&id)[SAMP_AT_ONCE]) {
        uint32_t own = 0; /* a bit for each logit */
        int at = 0;
        bool full;
#pragma unroll
        for (int k = 0; k < SAMP_AT_ONCE; k++) {
            const float x[4] = {p[k].x, p[k].y, p[k].z, p[k].w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                if (id[k] + c < r.V && x[c] >= least && x[c] <= most && samp_is_kept(r, x[c], id[k] + c)) own |= 1u << (4 * k + c);
                if (above && id[k] + c < r.V && x[c] > most) each(x[c]);
            }
        }
        int count = __popc(own), upto = count;
        if (!__any_sync(~0u, count)) return true;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            int other = __shfl_up_sync(~0u, upto, lanes);
            if (lane >= lanes) upto += other;
        }
        if (lane == 31) at = atomicAdd(&n, upto);
        at = __shfl_sync(~0u, at, 31), full = at > FILTER_NEAR, at += upto - count;
#pragma unroll
        for (int k = 0; k < SAMP_AT_ONCE; k++) {
            const float x[4] = {p[k].x, p[k].y, p[k].z, p[k].w};
#pragma unroll
            for (int c = 0; c < 4; c++) {
                bool in = own >> (4 * k + c) & 1;
                if (in && at < FILTER_NEAR) r.near[at] = x[c], r.near_ids[at] = id[k] + c;
                at += in;
            }
        }
        return above || !full;
    });
    __syncthreads();
    r.n_near = n <= FILTER_NEAR ? n : -1, r.near_low = low, r.near_high = high;
    __syncthreads();
    return r.n_near >= 0;
}
__device__ static bool samp_gather(samp_dist &r, uint32_t low, uint32_t high) {
    return samp_gather_and(r, low, high, false, [](float) {});
}
/* Is all that is kept gathered? */
__device__ static inline bool samp_has_kept(const samp_dist &r) {
    return samp_has(r, samp_logit_to_key(r.at), samp_logit_to_key(r.max));
}

/* A range of keys in `last` + 1 parts, numbered from above: of as many keys each or, of floats, as wide. */
typedef struct samp_parts {
    uint32_t from;
    int shift, last;
    float top, per; /* per > 0: as wide, so many to 1 */
} samp_parts;
__device__ static inline uint32_t samp_wide_part(const samp_parts &s, float x) {
    return (uint32_t)fminf(__fmul_rn(__fsub_rn(s.top, x), s.per), (float)s.last);
}
__device__ static inline uint32_t samp_part_of(const samp_parts &s, uint32_t key) {
    return s.per > 0 ? samp_wide_part(s, samp_key_to_logit(key)) : (uint32_t)s.last - (key - s.from >> s.shift);
}
/* The lowest key of low .. high whose part is `part` or lower in number; high's is. */
__device__ static inline uint32_t samp_part_from(const samp_parts &s, uint32_t low, uint32_t high, uint32_t part) {
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (samp_part_of(s, middle) <= part) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* One step of a search from above: each(add) calls add(key, mass) for what this thread has; only keys in *low .. *high count. The
 * range becomes the one of its 256 parts with the highest key from which on up the sum, with *over from beyond the range, reaches
 * `want`, or the lowest part with any mass if there is none; *over becomes the sum beyond the new range. wide: the parts of the
 * range, of finite floats, are as wide as each other. Keys crowd about 0 and at low powers of two: with parts of as many keys,
 * most ids of a row would wait for each other to be added to three or four parts. */
template <class F>
__device__ static inline void samp_narrow(uint32_t *low, uint32_t *high, samp_mass want, samp_mass *over, samp_mass *scratch,
                                          bool wide, F each) {
    __shared__ uint32_t bins[4][FILTER_THREADS]; /* twelve bits each, so that none runs over; the highest part first */
    __shared__ int found;
    __shared__ samp_mass before;
    uint32_t from = *low, to = *high, t = threadIdx.x;
    int lane = (int)t % 32;
    float extent = samp_key_to_logit(to) - samp_key_to_logit(from);
    samp_parts parts = {from, max(0, 24 - __clz((int)(to - from))), FILTER_THREADS - 1, samp_key_to_logit(to), 0};
    if (wide && extent > 1e-30f && extent < 1e30f) parts.per = FILTER_THREADS / extent;
    bins[0][t] = bins[1][t] = bins[2][t] = bins[3][t] = 0;
    if (t == 0) found = -1, before = 0;
    __syncthreads();
    each([&](uint32_t key, samp_mass mass) {
        if (key < from || key > to) return;
        uint32_t bin = samp_part_of(parts, key); /* four additions whose result nobody waits for cost less than one */
        atomicAdd(&bins[0][bin], (uint32_t)mass & 0xfff);
        if (mass >> 12) {
            atomicAdd(&bins[1][bin], (uint32_t)(mass >> 12) & 0xfff), atomicAdd(&bins[2][bin], (uint32_t)(mass >> 24) & 0xfff);
            atomicAdd(&bins[3][bin], (uint32_t)(mass >> 36));
        }
    });
    __syncthreads();
    samp_mass own = bins[0][t] + ((samp_mass)bins[1][t] << 12) + ((samp_mass)bins[2][t] << 24) + ((samp_mass)bins[3][t] << 36);
    samp_mass upto = own;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        samp_mass other = __shfl_up_sync(~0u, upto, lanes);
        if (lane >= lanes) upto += other;
    }
    if (lane == 31) scratch[t / 32] = upto;
    __syncthreads();
    upto += *over;
    for (uint32_t i = 0; i < t / 32; i++) upto += scratch[i];
    bool last = t == FILTER_THREADS - 1;
    if (own && upto >= want && upto - own < want) found = (int)t, before = upto - own;
    if (last && upto < want) found = -2;
    __syncthreads();
    if (found == -2) { /* the lowest in use: the one that reaches the sum of all */
        if (last) scratch[0] = upto;
        __syncthreads();
        if (own && upto == scratch[0]) found = (int)t, before = upto - own;
        __syncthreads();
    }
    uint32_t bin = (uint32_t)max(found, 0);
    *over = before;
    if (parts.per > 0) {
        *low = samp_part_from(parts, from, to, bin);
        if (bin) *high = samp_part_from(parts, from, to, bin - 1) - 1;
    } else {
        *low = from + (FILTER_THREADS - 1 - bin << parts.shift);
        *high = *low + min(to - *low, (1u << parts.shift) - 1);
    }
    __syncthreads();
}

/* The key to which samp_narrow narrows low .. high in the end. */
template <class F>
__device__ static inline uint32_t samp_search(uint32_t low, uint32_t high, samp_mass want, samp_mass *over, samp_mass *scratch,
                                              F each) {
    while (low < high) samp_narrow(&low, &high, want, over, scratch, false, each);
    return low;
}

/* A bound of the k-th highest logit from below: the k-th highest of the blocks' maxima, or less by up to 2^16 keys, a 128th: the
 * search is stopped there, after two steps. */
__device__ static float samp_bound(const samp_dist &r, int k, samp_mass *scratch) {
    uint32_t low = samp_logit_to_key(-INFINITY), high = samp_logit_to_key(r.max);
    samp_mass over = 0;
    if (k > r.n_blocks) return -INFINITY;
    while (high - low > 0xffff)
        samp_narrow(&low, &high, (samp_mass)k, &over, scratch, false, [&](auto add) {
            for (int i = (int)threadIdx.x; i < r.n_blocks; i += FILTER_THREADS) add(samp_logit_to_key(r.maxes[i]), 1);
        });
    return samp_key_to_logit(low);
}

/* The end of samp_find_threshold, where no more than an id a thread is gathered: each adds up what lies above its own. *over: what lies
 * above low .. high. */
__device__ static float samp_rank(const samp_dist &r, bool by_count, uint32_t low, uint32_t high, samp_mass want,
                                  samp_mass *over) {
    __shared__ samp_mass mass[FILTER_THREADS], before;
    __shared__ float found;
    int t = (int)threadIdx.x;
    float x = t < r.n_near ? r.near[t] : 0;
    bool in = t < r.n_near && samp_is_kept(r, x, r.near_ids[t]) && samp_logit_to_key(x) >= low && samp_logit_to_key(x) <= high, lowest = true;
    samp_mass own = in ? by_count ? 1 : samp_mass_of(r, x) : 0, above = *over, same = 0;
    mass[t] = own;
    if (t == 0) found = samp_key_to_logit(low), before = *over;
    __syncthreads();
    bool first = own;
    for (int i = 0; i < r.n_near && own; i++) {
        float other = r.near[i];
        samp_mass more = mass[i];
        above += other > x ? more : 0, same += other == x ? more : 0;
        lowest &= !(other < x && more), first &= !(other == x && more && i < t);
    }
    if (first && above < want && (lowest || above + same >= want)) found = x, before = above; /* one thread */
    __syncthreads();
    *over = before;
    return found;
}

/* Narrows low .. high, where all ids are kept, by a sweep that only counts, one addition an id and no weight: the ids of
 * FILTER_BINS parts, each at the weight of its part's lower end or at that of the upper one, bound where the sum reaches `want`.
 * What lies beyond the new range stays to be added up. False, and nothing is changed, if the parts cannot be made or the sum does
 * not get there. Of 128,256 Gaussian logits the new range has 40 to 400, where none are equal. */
__device__ static bool samp_tally(samp_dist &r, uint32_t *low, uint32_t *high, samp_mass want) {
    constexpr int OWN = FILTER_BINS / FILTER_THREADS, WARPS = FILTER_THREADS / 32;
    static_assert(OWN == 32, "a thread's bins lie in the 32 banks");
    __shared__ float sums[2][WARPS];
    __shared__ int first, last;
    const int t = (int)threadIdx.x, lane = t % 32;
    const float least = samp_key_to_logit(*low), top = samp_key_to_logit(*high), extent = top - least;
    if (!(extent > 1e-30f && extent < 1e30f && extent * r.scale < 64)) return false;
    uint32_t *bins = (uint32_t *)r.near; /* nothing is gathered */
    const samp_parts parts = {0, 0, FILTER_BINS - 1, top, FILTER_BINS / extent};
    for (int i = t; i < FILTER_BINS; i += FILTER_THREADS) bins[i] = 0;
    if (t == 0) first = last = FILTER_BINS;
    __syncthreads();
    samp_sweep(r, [&](float x, int) {
        if (x >= least) atomicAdd(&bins[samp_wide_part(parts, x)], 1u);
    });
    __syncthreads();
    /* Rounding comes to less than 2^-15: a part's end is known to 2^-10 parts, of 64 / FILTER_BINS in log2 at most, weights to
     * 2^-17, a sum to 2^-18. */
    const float slack = 0x1p-14f, step = r.scale / parts.per;
    const float begin = (top - r.max) * r.scale, enough = (float)want / SAMP_ONE;
    float sum[2] = {0, 0}; /* at most, at least */
    auto add = [&](int bin, float (&to)[2]) {
        float n = (float)bins[bin], at = begin - (float)bin * step;
        to[0] += n * ex2(at) * (1 + slack), to[1] += n * ex2(at - step) * (1 - slack);
    };
    for (int i = 0; i < OWN; i++) add(t * OWN + (i + t) % OWN, sum); /* each lane from another bank */
    float before[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        float upto = sum[side];
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            float other = __shfl_up_sync(~0u, upto, lanes);
            if (lane >= lanes) upto += other;
        }
        if (lane == 31) sums[side][t / 32] = upto;
        before[side] = __shfl_up_sync(~0u, upto, 1);
        if (lane == 0) before[side] = 0;
    }
    __syncthreads();
    for (int i = 0; i < t / 32; i++) before[0] += sums[0][i], before[1] += sums[1][i];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        if (before[side] + sum[side] < enough) continue;
        float so_far[2] = {before[0], before[1]};
        int i = 0;
        for (; i < OWN - 1; i++) {
            add(t * OWN + i, so_far);
            if (so_far[side] >= enough) break;
        }
        atomicMin(side ? &last : &first, t * OWN + i);
    }
    __syncthreads();
    const int from = first, to = max(first, last);
    if (from == FILTER_BINS) return false;
    const uint32_t lowest = to < FILTER_BINS ? samp_part_from(parts, *low, *high, (uint32_t)to) : *low;
    if (from) *high = samp_part_from(parts, *low, *high, (uint32_t)from - 1) - 1;
    *low = lowest;
    return true;
}

/* From the highest logit down to `floor`, adds up 1 for each kept id (by_count) or its weight; returns the logit at which the sum
 * reaches `want` (the lowest of them if it never does), *over: the sum before the first id of that logit. */
__device__ static float samp_find_threshold(samp_dist &r, bool by_count, samp_mass want, float floor, samp_mass *over, samp_mass *scratch) {
    uint32_t low = samp_logit_to_key(floor), high = samp_logit_to_key(r.max);
    bool fits = false;
    *over = 0;
    for (bool first = true; low < high; first = false) {
        if (!fits) fits = samp_gather(r, low, high);
        const bool tallied = !fits && first && !by_count && (floor > r.at || r.last == INT_MAX);
        if (tallied && samp_tally(r, &low, &high, want)) {
            samp_mass own = 0;
            fits = samp_gather_and(r, low, high, true, [&](float x) { own += samp_mass_of(r, x); });
            *over = samp_all(own, scratch);
            if (low == high) break;
        }
        if (fits && r.n_near <= FILTER_THREADS) return samp_rank(r, by_count, low, high, want, over);
        samp_narrow(&low, &high, want, over, scratch, first, [&](auto add) {
            samp_each(r, [&](float x, int id) {
                if (samp_is_kept(r, x, id)) add(samp_logit_to_key(x), by_count ? 1 : samp_mass_of(r, x));
            });
        });
    }
    samp_gather(r, low, high); /* all of that logit are there for samp_nth, or their blocks listed */
    return samp_key_to_logit(low);
}

/* The *n-th id, counted from 1, among those with logit `at`, which samp_find_threshold has found; INT_MAX if there are not more than *n,
 * which becomes their number. */
__device__ static int samp_nth(const samp_dist &r, float at, samp_mass *n, samp_mass *scratch) {
    samp_mass count = 0, over = 0;
    samp_each(r, [&](float x, int) { count += x == at; });
    count = samp_all(count, scratch);
    if (count <= *n) return *n = count, INT_MAX;
    return (int)~samp_search(~(uint32_t)(r.V - 1), ~0u, *n, &over, scratch, [&](auto add) {
        samp_each(r, [&](float x, int id) {
            if (x == at) add(~(uint32_t)id, 1);
        });
    });
}

/* The n best ids by logit, best first, of equal ones the lowest first. -inf counts too. */
__device__ static void samp_top_logprobs(samp_dist r, int n, float log_sum, samp_best *best, samp_mass *scratch) {
    __shared__ float x[TOKA_MAX_LOGPROBS];
    __shared__ int ids[TOKA_MAX_LOGPROBS], have;
    samp_mass over;
    r.at = -INFINITY, r.last = INT_MAX;
    float at = samp_find_threshold(r, true, (samp_mass)n, samp_bound(r, n, scratch), &over, scratch);
    samp_mass more = (samp_mass)n - over;
    int last = samp_nth(r, at, &more, scratch);
    if (threadIdx.x == 0) have = 0;
    samp_gather(r, samp_logit_to_key(at), samp_logit_to_key(r.max));
    r.at = at, r.last = last;
    __syncthreads();
    samp_each(r, [&](float v, int id) {
        if (!samp_is_kept(r, v, id)) return;
        int i = atomicAdd(&have, 1); /* n of them, in any order */
        x[i] = v, ids[i] = id;
    });
    __syncthreads();
    if ((int)threadIdx.x < n) {
        float v = x[threadIdx.x];
        int id = ids[threadIdx.x], rank = 0;
        for (int i = 0; i < n; i++) rank += x[i] > v || (x[i] == v && ids[i] < id);
        best->ids[rank] = id;
        best->logprobs[rank] = v == -INFINITY ? -INFINITY : v - r.max - log_sum;
    }
    __syncthreads();
}

/* Where id stands among all ids: 1 is the best. The order is that of samp_top_logprobs. */
__device__ static int samp_rank(samp_dist r, int id, samp_mass *scratch) {
    const float at = samp_clean(r.x[id]);
    samp_mass before = 0;
    samp_look_at(r, at);
    samp_sweep(r, [&](float x, int other) { before += x > at || (x == at && other < id); });
    return 1 + (int)samp_all(before, scratch);
}

/* Bias, lists and penalties tell of each block in which they change logits: touched[block]. */

/* logit_bias; an id named twice gets both, in the list's order. One warp, 32 entries at a time. */
__device__ static void samp_bias(const samp_filter &f, float *x, int *touched) {
    int lane = (int)threadIdx.x;
    for (int from = 0; from < f.n_bias; from += 32) {
        int i = from + lane, id = i < f.n_bias ? f.bias_ids[i] : -1 - lane;
        unsigned same = __match_any_sync(~0u, id);
        if (id >= 0 && (same & ((1u << lane) - 1)) == 0) { /* the first of them does all */
            float v = samp_clean(x[id]);
            for (unsigned left = same; left; left &= left - 1) v = samp_clean(__fadd_rn(v, f.bias[from + __ffs((int)left) - 1]));
            x[id] = v, touched[id / SAMP_BLOCK] = 1;
        }
        __threadfence_block();
        __syncwarp();
    }
}

/* Everything but allowed ids becomes -inf. bits: [FILTER_WINDOW], a bit per id. */
__device__ static void samp_apply_allowed(const samp_filter &f, float *x, int V, uint32_t *bits) {
    for (int from = 0; from < V; from += 32 * FILTER_WINDOW) {
        int n = min(32 * FILTER_WINDOW, V - from);
        for (int i = (int)threadIdx.x; i < FILTER_WINDOW; i += FILTER_THREADS) bits[i] = 0;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < f.n_allowed; i += FILTER_THREADS) {
            int at = f.allowed[i] - from;
            if (at >= 0 && at < n) atomicOr(&bits[at / 32], 1u << at % 32);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n; i += FILTER_THREADS)
            if (!(bits[i / 32] >> i % 32 & 1)) x[from + i] = -INFINITY;
        __syncthreads();
    }
}

/* The penalties of an id that the history has, `count` times in the output. */
__device__ static void samp_penalize(const samp_filter &f, float *x, int id, uint32_t count, int *touched) {
    float v = samp_clean(x[id]);
    v = v < 0 ? __fmul_rn(v, f.repetition) : __fdiv_rn(v, f.repetition);
    v = __fsub_rn(v, __fmul_rn(f.frequency, (float)count));
    if (count > 0) v = __fsub_rn(v, f.presence);
    x[id] = samp_clean(v), touched[id / SAMP_BLOCK] = 1;
}

/* Penalties, once for each id of a history of up to FILTER_WINDOW / 4 ids, by a hash table of twice as many: id + 1, 0 where there
 * is none, then counts. */
__device__ static void samp_penalties_few(const samp_filter &f, float *x, int V, uint32_t *table, int *touched) {
    const uint32_t shift = __clz(2 * f.n_history - 1), n = 1u << (32 - shift);
    for (uint32_t i = threadIdx.x; i < 2 * n; i += FILTER_THREADS) table[i] = 0;
    __syncthreads();
    for (int i = (int)threadIdx.x; i < f.n_history; i += FILTER_THREADS) {
        uint32_t key = (uint32_t)f.history[i] + 1, at = key * 0x9E3779B1u >> shift;
        if (key - 1 >= (uint32_t)V) continue;
        for (uint32_t old; (old = atomicCAS(&table[at], 0u, key)) && old != key;) at = at + 1 & n - 1;
        if (i >= f.n_prompt) atomicAdd(&table[n + at], 1u);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n; i += FILTER_THREADS)
        if (table[i]) samp_penalize(f, x, (int)table[i] - 1, table[n + i], touched);
    __syncthreads();
}

/* The same for any history: counts of a window of the vocabulary at a time. Bit 31: the id is there. */
__device__ static void samp_apply_penalties(const samp_filter &f, float *x, int V, uint32_t *counts, int *touched) {
    for (int from = 0; from < V; from += FILTER_WINDOW) {
        int n = min((int)FILTER_WINDOW, V - from);
        for (int i = (int)threadIdx.x; i < n; i += FILTER_THREADS) counts[i] = 0;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < f.n_history; i += FILTER_THREADS) {
            int at = f.history[i] - from;
            if (at < 0 || at >= n) continue;
            if (i >= f.n_prompt) atomicAdd(&counts[at], 1u);
            atomicOr(&counts[at], 0x80000000u);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n; i += FILTER_THREADS)
            if (counts[i]) samp_penalize(f, x, from + i, counts[i] & 0x7fffffffu, touched);
        __syncthreads();
    }
}

/* The maxima of blocks that were touched anew, and the row's; their sums too, if wanted. A warp takes SWEEP blocks at a time. */
__device__ static void samp_survey(samp_dist &r, const int *touched, bool sums, samp_mass *scratch) {
    const int SWEEP = 4, warps = FILTER_THREADS / 32;
    int lane = (int)threadIdx.x % 32;
    float max = -INFINITY;
    for (int from = (int)threadIdx.x / 32; from < r.n_blocks; from += SWEEP * warps) {
        float4 p[2 * SWEEP];
#pragma unroll
        for (int k = 0; k < 2 * SWEEP; k++) {
            int b = from + k / 2 * warps, id = b * SAMP_BLOCK + k % 2 * 128 + 4 * lane;
            p[k] = b < r.n_blocks && touched[b] && id < r.V ? *(const float4 *)(r.x + id) : float4{};
        }
#pragma unroll
        for (int k = 0; k < SWEEP; k++) {
            int b = from + k * warps, id = b * SAMP_BLOCK + 4 * lane;
            float x[8], highest = -INFINITY, sum = 0;
            if (b >= r.n_blocks || !touched[b]) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float4 v = p[2 * k + i / 4];
                const float y = i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
                x[i] = id + i / 4 * 128 + i % 4 < r.V ? samp_clean(y) : -INFINITY, highest = fmaxf(highest, x[i]);
            }
            highest = samp_key_to_logit(__reduce_max_sync(~0u, samp_logit_to_key(highest)));
            if (lane == 0) r.maxes[b] = highest;
            if (!sums) continue;
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum = __fadd_rn(sum, x[i] > -INFINITY ? ex2(__fmul_rn(__fsub_rn(x[i], highest), r.scale)) : 0);
            for (int lanes = 16; lanes; lanes /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, lanes));
            if (lane == 0) r.sums[b] = sum;
        }
    }
    __syncthreads();
    for (int b = (int)threadIdx.x; b < r.n_blocks; b += FILTER_THREADS) max = fmaxf(max, r.maxes[b]);
    r.max = block_fold(max, (float *)scratch, op_max{});
}

/* Step 2 of chapter 18. sums: see samp_survey. */
__device__ static void samp_adjust(samp_dist &r, const samp_filter &f, float *x, bool sums, uint32_t *window,
                                   samp_mass *scratch) {
    int *touched = r.list;
    __syncthreads();
    for (int b = (int)threadIdx.x; b < r.n_blocks; b += FILTER_THREADS) touched[b] = f.n_allowed > 0;
    __syncthreads();
    if (threadIdx.x < 32) samp_bias(f, x, touched);
    __syncthreads();
    if (f.n_allowed) samp_apply_allowed(f, x, r.V, window);
    for (int i = (int)threadIdx.x; i < f.n_forbidden; i += FILTER_THREADS) /* end ids may lie outside the vocabulary */
        if (f.forbidden[i] >= 0 && f.forbidden[i] < r.V) x[f.forbidden[i]] = -INFINITY, touched[f.forbidden[i] / SAMP_BLOCK] = 1;
    __syncthreads();
    if (f.n_history > FILTER_WINDOW / 4) samp_apply_penalties(f, x, r.V, window, touched);
    else if (f.n_history) samp_penalties_few(f, x, r.V, window, touched);
    samp_survey(r, touched, sums, scratch);
}

/* Logits more than `drop` (<= 0) below the best go. */
__device__ static void samp_min_p(samp_dist &r, double drop) {
    float at = __double2float_ru(fmax((double)r.max + drop, -(double)FLT_MAX));
    if (at > r.at) r.at = at, r.last = INT_MAX;
}

/* The weights of all ids together, from the blocks' sums. */
__device__ static samp_mass samp_total(const samp_dist &r, samp_mass *scratch) {
    samp_mass sum = 0;
    for (int b = (int)threadIdx.x; b < r.n_blocks; b += FILTER_THREADS)
        sum += (samp_mass)(__fmul_rn(ex2(__fmul_rn(__fsub_rn(r.maxes[b], r.max), r.scale)), r.sums[b]) * SAMP_ONE);
    return samp_all(sum, scratch);
}

/* The same of what is kept, of which all is gathered, or its blocks are listed. */
__device__ static samp_mass samp_kept_mass(const samp_dist &r, samp_mass *scratch) {
    samp_mass sum = 0;
    samp_each(r, [&](float x, int id) { sum += samp_is_kept(r, x, id) ? samp_mass_of(r, x) : 0; });
    return samp_all(sum, scratch);
}

/* A logit that the one at which the sum of weights reaches `want` does not lie below: usually few ids have that much together, so
 * the best 32 or 256 blocks tell already. Where 32 have less than a 16th of it, eight times as many rarely have enough
 * either, and are not tried. */
__device__ static float samp_floor(samp_dist &r, samp_mass want, samp_mass *scratch) {
    for (int k = 32; k < r.n_blocks && !samp_has_kept(r); k *= 8) {
        float at = samp_bound(r, k, scratch);
        if (at <= r.at || !samp_gather(r, samp_logit_to_key(at), samp_logit_to_key(r.max))) break;
        samp_mass sum = samp_kept_mass(r, scratch);
        if (sum >= want) return at;
        if (sum < want / 16) break;
    }
    return r.at;
}

/* Keeps an id if those before it, from the highest down, have less than p of the mass. A weight of at most 1/V of the mass that
 * may be dropped is dropped ahead of the search: even V of them are not too much, and few ids remain. total: mass of what is kept
 * so far; returns that of what stays. */
__device__ static samp_mass samp_top_p(samp_dist &r, const samp_filter &f, samp_mass total, samp_mass *scratch) {
    samp_mass over, want = (samp_mass)ceil((double)f.top_p * (double)total);
    float at = samp_floor(r, want, scratch);
    if (at == r.at && !samp_has_kept(r)) {
        double small = (1 - (double)f.top_p) * ((double)total / (double)SAMP_ONE) / r.V;
        samp_min_p(r, small < 1 ? f.temperature * log(small) : 0);
        at = r.at;
    }
    at = samp_find_threshold(r, false, want, at, &over, scratch);
    samp_mass each = samp_mass_of(r, at), more = want > over ? want - over : 1;
    more = each ? (more + each - 1) / each : 1;
    r.last = samp_nth(r, at, &more, scratch), r.at = at;
    return over + more * each;
}

/* Step 4 of chapter 18. Returns the mass of what is kept, 0 if that is not known. sum: of the row's weights, 0: not known. */
__device__ static samp_mass samp_truncate(samp_dist &r, const samp_filter &f, float sum, samp_mass *scratch) {
    const bool cuts = f.top_k > 0 || f.min_p_drop > -INFINITY;
    samp_mass total = (samp_mass)(sum * SAMP_ONE), over;
    if (f.top_k > 0) {
        float at = samp_find_threshold(r, true, (samp_mass)f.top_k, samp_bound(r, f.top_k, scratch), &over, scratch);
        r.at = at, r.last = INT_MAX, total = 0;
        if (f.top_p < 1) samp_gather(r, samp_logit_to_key(r.at), samp_logit_to_key(r.max)), total = samp_kept_mass(r, scratch);
    } else if (sum == 0 && (f.top_p < 1 || !cuts)) total = samp_total(r, scratch);
    if (f.top_p < 1) total = samp_top_p(r, f, total, scratch);
    if (f.min_p_drop > -INFINITY) {
        float before = r.at;
        samp_min_p(r, f.min_p_drop);
        if (r.at > before) total = 0;
    }
    return total;
}

__device__ static inline samp_part samp_part_at(const samp_part &p, int lanes) { /* the one that lane ^ lanes has */
    samp_part q;
    q.max = __shfl_xor_sync(~0u, p.max, lanes), q.key = __shfl_xor_sync(~0u, p.key, lanes);
    q.id = __shfl_xor_sync(~0u, p.id, lanes), q.x = __shfl_xor_sync(~0u, p.x, lanes);
    q.sum = __shfl_xor_sync(~0u, p.sum, lanes), q.raw_sum = __shfl_xor_sync(~0u, p.raw_sum, lanes);
    return q;
}

/* A part of each of the first n threads, at most 64, to one for all, in the order of samp_reduce_kernel. all: [n], a power of
 * two, in shared memory. */
__device__ static samp_part samp_fold(samp_part p, const samp_ask &a, samp_part *all, int n) {
    int t = (int)threadIdx.x;
    __syncthreads();
    if (t < n) all[t] = p;
    __syncthreads();
    if (t < 32) {
        p = t < n ? all[t] : samp_nothing();
        if (n > 32) p = samp_merge(p, all[t + 32], a);
        for (int half = min(n, 32) / 2; half; half /= 2) p = samp_merge(p, samp_part_at(p, half), a);
        if (t == 0) all[0] = p;
    }
    __syncthreads();
    return all[0];
}

/* The part of a block that a warp has, and in all its lanes: as samp_block, to the bit, but lane 4s + g has the s-th eight ids of
 * group g, so that v is short and so is the code; no raw sums; logits are clean. A row has few blocks, and what counts is how long
 * one takes. id0: of the group. */
__device__ static samp_part samp_block_of_warp(float (&v)[8], const samp_ask &a, uint32_t word, int id0) {
    const int g = (int)threadIdx.x % 4;
    samp_group group;
    float y[8], own, x = 0;
    group.scale = samp_scale(a), group.down = 0, group.rough = false;
#pragma unroll 1
    for (int round = 0; round < 2; round++) {
        float highest = v[0], base, raw_top;
#pragma unroll
        for (int k = 1; k < 8; k++) highest = fmaxf(highest, v[k]);
        group.max = fmaxf(highest, __shfl_xor_sync(~0u, highest, 4));
        group.max = fmaxf(group.max, __shfl_xor_sync(~0u, group.max, 8));
        group.max = fmaxf(group.max, __shfl_xor_sync(~0u, group.max, 16));
        group.highest = (__ffs((int)(__ballot_sync(~0u, highest == group.max) & 0x11111111u << g)) - 1) / 4;
        base = group.max > -INFINITY ? group.max : 0;
        group.top = __fmul_rn(base, group.scale), raw_top = __fmul_rn(base, SAMP_LOG2E);
        own = ex2(__fmaf_rn(v[0], group.scale, -group.top));
#pragma unroll
        for (int k = 1; k < 8; k++) own = __fadd_rn(own, ex2(__fmaf_rn(v[k], group.scale, -group.top)));
        group.sum = __fadd_rn(own, __shfl_xor_sync(~0u, own, 4));
        group.sum = __fadd_rn(group.sum, __shfl_xor_sync(~0u, group.sum, 8));
        group.sum = __fadd_rn(group.sum, __shfl_xor_sync(~0u, group.sum, 16));
        bool rough = !(group.sum >= 0 && fabsf(group.top) < 0x1p23f && fabsf(raw_top) < 0x1p23f);
        if (round || !__any_sync(~0u, rough)) break;
        group.down = rough ? group.max : 0;
#pragma unroll
        for (int k = 0; k < 8; k++) v[k] = rough ? __fsub_rn(samp_clean(v[k]), group.down) : v[k];
    }
    group.raw_sum = group.sum;
#pragma unroll
    for (int i = 0; i < 8; i++) group.sums[i] = __shfl_sync(~0u, own, 4 * i + g);
    samp_weight w = samp_weigh(group, a, word, id0, NAN, true);
    bool flip = a.u >> 31;
    float target = samp_target(a, flip, group.sum);
    int sub = w.draw ? samp_place(group.sums, flip, &target) : group.highest, at = 0;
#pragma unroll
    for (int k = 0; k < 8; k++) y[k] = ex2(__fmaf_rn(v[k], group.scale, -group.top));
    if (w.draw) at = samp_place(y, flip, &target);
    else
#pragma unroll
        for (int k = 7; k >= 0; k--) at = v[k] == group.max ? k : at;
#pragma unroll
    for (int k = 0; k < 8; k++) x = at == k ? v[k] : x;
    x = __fadd_rn(__shfl_sync(~0u, x, 4 * sub + g), group.down), at = __shfl_sync(~0u, at, 4 * sub + g);
    float rank = w.draw ? __fmaf_rn(w.below, group.scale, w.key) : w.max;
    int id = w.max == -INFINITY ? INT_MAX : id0 + 32 * sub + samp_column(at);
    samp_quad_best(w.p, rank, id, x);
    return w.p;
}

/* What the listed blocks come to, without what is cut and without raw sums: those are known. A warp takes each in turn. */
__device__ static samp_part samp_draw_of(const samp_dist &r, const samp_ask &a, samp_part *all) {
    const int warp = (int)threadIdx.x / 32, warps = FILTER_THREADS / 32;
    const int g = (int)threadIdx.x % 4, first = (int)threadIdx.x % 32 / 4 * 32 + 2 * g; /* of the lane's ids in a block */
    samp_part p = samp_nothing();
    float2 next[4];
    auto fetch = [&](int i) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            next[j] = i < r.n_list ? *(const float2 *)(r.x + r.list[i] * SAMP_BLOCK + first + 8 * j) : float2{};
    };
    fetch(warp);
    for (int i = warp; i < r.n_list; i += warps) {
        const int block = r.list[i], id0 = block * SAMP_BLOCK + 2 * g;
        float v[8];
#pragma unroll
        for (int j = 0; j < 4; j++) v[2 * j] = samp_clean(next[j].x), v[2 * j + 1] = samp_clean(next[j].y);
        fetch(i + warps);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            int id = block * SAMP_BLOCK + first + samp_column(k);
            if (id >= r.V || !samp_is_kept(r, v[k], id)) v[k] = -INFINITY;
        }
        p = samp_merge(p, samp_block_of_warp(v, a, samp_noise(a, block, g), id0), a);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) all[SAMP_LANES + warp] = p;
    __syncthreads();
    return samp_fold(all[SAMP_LANES + threadIdx.x % warps], a, all, warps);
}

/* Step 5 over the listed blocks. Where they are many, a block's key is bounded by its sum before the cut, sum_of(block), and the
 * highest of its four groups' noise. Each warp makes the block with the highest bound of an eighth of them, then come those whose
 * bound is not below the highest of these eight keys: a handful, for a bound is too high by two bits, since a group has but a
 * fourth of the sum, and by what the cut takes. The result's sum is then of these few alone. */
template <class S>
__device__ static inline samp_part samp_draw(samp_dist &r, const samp_ask &a, bool many, samp_part *all, S sum_of) {
    constexpr int WARPS = FILTER_THREADS / 32;
    __shared__ int first[WARPS];
    const int t = (int)threadIdx.x, lane = t % 32;
    int *list = r.list, n = r.n_list;
    if (many) {
        float highest = -INFINITY;
        int best = 0;
        for (int i = lane * WARPS + t / 32; i < n; i += FILTER_THREADS) {
            const int block = list[i];
            uint32_t c[4]; /* by one call of Philox */
#pragma unroll
            for (int g = 0; g < 4; g++) c[g] = samp_noise(a, block, g);
            const float noise = samp_log2_exponential(min(min(c[0], c[1]), min(c[2], c[3])));
            const float bound = __fmaf_rn(__fsub_rn(r.maxes[block], r.max), a.scale, __fsub_rn(lg2(sum_of(block)), noise));
            r.sums[block] = bound;
            if (!(bound <= highest) || i < FILTER_THREADS) highest = bound, best = block;
        }
        const uint32_t key = samp_logit_to_key(highest), top = __reduce_max_sync(~0u, lane * WARPS + t / 32 < n ? key : 0);
        if (lane == __ffs((int)__ballot_sync(~0u, key == top)) - 1) first[t / 32] = best, r.sums[best] = -INFINITY;
        __syncthreads();
        r.list = first, r.n_list = WARPS;
    }
    samp_part p = samp_nothing();
    for (bool again = many;; again = false) {
        p = samp_merge(p, samp_draw_of(r, a, all), a);
        if (!again) return p;
        const float key = __fmaf_rn(__fsub_rn(p.max, r.max), a.scale, p.key), enough = key - 0.01f - 1e-6f * fabsf(key);
        r.list = list;
        samp_list(r, n, [&](int i) { return list[i]; }, [&](int block) { return !(r.sums[block] < enough); });
        if (!r.n_list) return p;
    }
}

/* The raw logit at the picked id from the adjusted one, less the raw log-sum-exp: samp_unadjust of toka.c. */
__device__ static float samp_undo(const samp_filter &f, int id, double x, float raw_max, float raw_log_sum, int *scratch) {
    int seen = 0, count = 0;
    for (int i = (int)threadIdx.x; i < f.n_history; i += FILTER_THREADS) {
        bool hit = f.history[i] == id;
        seen |= hit, count += hit && i >= f.n_prompt;
    }
    seen = block_fold(seen, scratch, op_max{});
    count = block_fold(count, scratch, op_add{});
    if (count) x += (double)f.frequency * count + f.presence;
    if (seen) x = x < 0 ? x / f.repetition : x * f.repetition;
    for (int i = 0; i < f.n_bias; i++)
        if (f.bias_ids[i] == id) x -= f.bias[i];
    x = fmin(x, (double)raw_max);
    return x == -INFINITY ? -INFINITY : (float)(x - raw_max - raw_log_sum);
}

typedef struct samp_filtering { /* rows 0 .. n-1 of a launch */
    const samp_ask *ask;
    const samp_filter *filters;
    float *logits;
    const samp_part *parts;
    int ldl, ld, V, n_blocks;
    uint32_t *reached;
    samp_best *tops;
    samp_result *results;
    int *last;
} samp_filtering;

static size_t samp_filter_smem(int n_blocks) { return FILTER_WINDOW * sizeof(uint32_t) + (size_t)n_blocks * 3 * sizeof(float); }

/* Blocks on a multiprocessor: shared memory of other cards has room for one of 128,256 ids; older toolkits spill with two. */
enum { FILTER_BLOCKS = HOPPER && NVCC_VERSION >= 1208 ? 2 : 1 };
__global__ static void __launch_bounds__(FILTER_THREADS, FILTER_BLOCKS)
    samp_filter_kernel(const __grid_constant__ samp_filtering s) {
    extern __shared__ __align__(16) uint32_t window[]; /* [FILTER_WINDOW] counts, bits, gathered ids; 3 x [n_blocks] */
    __shared__ samp_part all[FILTER_THREADS];
    __shared__ samp_mass scratch[33];
    __shared__ samp_filter f;
    static_assert(FILTER_THREADS == 256, "samp_narrow: eight bits");
    static_assert(sizeof f % 4 == 0 && sizeof f / 4 <= FILTER_THREADS, "a word a thread");
    static_assert(2 * FILTER_NEAR <= FILTER_WINDOW && FILTER_BINS <= FILTER_WINDOW, "they take its place");
    float *maxes = (float *)(window + FILTER_WINDOW), *sums = maxes + s.n_blocks, *x = s.logits + (size_t)blockIdx.x * s.ldl;
    grid_launch_dependents();
    grid_wait();
    const samp_ask a = s.ask[blockIdx.x];
    if (threadIdx.x < sizeof f / 4) ((uint32_t *)&f)[threadIdx.x] = ((const uint32_t *)(s.filters + blockIdx.x))[threadIdx.x];
    samp_part p = samp_nothing();
    if (threadIdx.x < SAMP_LANES) p = samp_lane(a, s.parts + blockIdx.x, s.ld, s.n_blocks, (int)threadIdx.x, maxes);
    p = samp_fold(p, a, all, SAMP_LANES); /* as samp_reduce_kernel does, to the bit */
    float raw_max = p.max, raw_log_sum = logf(p.raw_sum);
    samp_dist r = {x, maxes, sums, (int *)(sums + s.n_blocks), (float *)window, (int *)window + FILTER_NEAR, s.V, s.n_blocks, 0,
                   -1, 0, 0, p.max, samp_scale(a), -INFINITY, -1};
    if (f.n_top) samp_top_logprobs(r, f.n_top, raw_log_sum, s.tops + f.best, scratch);
    const int rank = f.ranked ? samp_rank(r, a.forced, scratch) : 0;
    bool adjusted = a.forced < 0 && (f.n_bias || f.n_allowed || f.n_forbidden || f.n_history);
    bool draws = a.forced < 0 && a.scale > 0, cut = draws && (f.top_k > 0 || f.top_p < 1 || f.min_p_drop > -INFINITY);
    const bool summed = adjusted && draws && !f.top_k; /* of top-k only bounds of keys are made, if anything */
    const samp_part *parts = s.parts + blockIdx.x;
    for (int b = (int)threadIdx.x; b < s.n_blocks && summed; b += FILTER_THREADS) sums[b] = parts[(size_t)b * s.ld].sum;
    if (adjusted) samp_adjust(r, f, x, summed, window, scratch);
    if (adjusted && r.max == -INFINITY) p = samp_nothing();
    else if ((cut || adjusted) && r.max > -INFINITY) {
        samp_mass mass = 0;
        if (draws) mass = samp_truncate(r, f, adjusted ? 0 : p.sum, scratch);
        else r.at = r.max, r.last = INT_MAX; /* the best alone counts */
        samp_look_at(r, r.at);
        const bool many = draws && r.n_list > (mass ? FILTER_MANY : 4 * FILTER_MANY);
        if (many && !mass) {
            if (!samp_has_kept(r)) r.n_near = -1;
            mass = samp_kept_mass(r, scratch);
        }
        p = samp_draw(r, a, many, all, [&](int block) {
            return !adjusted ? parts[(size_t)block * s.ld].sum : summed ? sums[block] : (float)SAMP_BLOCK; /* no sum is above */
        });
        if (many) p.max = r.max, p.sum = (float)mass / SAMP_ONE;
    }
    samp_result out = samp_finish(a, p, raw_max, raw_log_sum, f.last_resort);
    if (adjusted && a.forced == SAMP_DRAW && (unsigned)out.id < (unsigned)s.V) /* a broken group's logits can lead anywhere */
        out.logprob = samp_undo(f, out.id, samp_clean(x[out.id]), raw_max, raw_log_sum, (int *)scratch);
    if (threadIdx.x) return;
    out.rank = rank;
    s.results[blockIdx.x] = out, s.reached[blockIdx.x] = 0;
    if (a.slot >= 0) s.last[a.slot] = out.id;
}

/* ---- The plan of a step ---- */

enum { SAMP_LOGITS_BYTES = 320 << 20, SAMP_LIST_BYTES = 16 << 20, SAMP_PART_ROWS = 4096,
       SAMP_GRAPH_BYTES = 4 << 20 /* of filters and lists of a step that is a graph */ };
static_assert(SAMP_PART_ROWS * sizeof(samp_part) <= EXCHANGE_BYTES, "as chapter 10 has it");
static_assert((int)SAMP_BLOCK == (int)TOKA_ID_BLOCK, "as the ranks' parts have it");

static size_t samp_stage_bytes(const toka_device *d) {
    return (size_t)d->options.max_samples * (sizeof(samp_ask) + sizeof(int)) + 32 + SAMP_GRAPH_BYTES;
}

static void *samp_pinned(toka_device *d, size_t bytes, const char *what) {
    void *p = NULL;
    if (!d->error.code) latch(d, cudaHostAlloc(&p, bytes, cudaHostAllocDefault), what);
    return p;
}

/* No row has reached any key. */
static void samp_forget(toka_device *d) {
    samp_plan *p = d->samp;
    latch(d, cudaMemsetAsync(p->reached, 0, (size_t)p->part_rows * sizeof *p->reached, d->stream), "keys of sampling");
}

/* Takes all memory of this chapter; failures are latched. Needs options, shape and n_sms. */
static void samp_open(toka_device *d) {
    samp_plan *p = (samp_plan *)calloc(1, sizeof *p);
    size_t max_out = (size_t)d->options.max_samples, V = (size_t)d->shape->V_all;
    const bool ranks = tp_size(d) > 1;
    if (!p) abort();
    d->samp = p;
    p->n_blocks = ceil_div(d->shape->V_all, SAMP_BLOCK), p->ldl = p->n_blocks * SAMP_BLOCK;
    p->own_blocks = ceil_div(d->shape->V, SAMP_BLOCK), p->own_ldl = p->own_blocks * SAMP_BLOCK;
    p->whole_blocks = !ranks || d->shape->V_all >= tp_size(d) * SAMP_BLOCK;
    size_t fit = SAMP_LOGITS_BYTES / ((size_t)p->ldl * sizeof(float));
    p->chunk = (int)(fit < SAMP_FEW ? SAMP_FEW : fit > max_out ? max_out : fit > 256 ? fit & ~(size_t)255 : fit); /* whole tiles */
    p->part_rows = (int)(max_out < SAMP_PART_ROWS ? max_out : SAMP_PART_ROWS);
    const int most = ranks ? SAMP_PART_ROWS : 32768; /* of blockIdx.y there are 65,535 */
    if (p->chunk > most) p->chunk = most;
    if (p->part_rows < p->chunk) p->part_rows = p->chunk;
    p->logits = (float *)dev_alloc(d, (size_t)p->chunk * (size_t)p->ldl * sizeof(float), "logits");
    p->parts = (samp_part *)dev_alloc(d, (size_t)p->n_blocks * (size_t)p->part_rows * sizeof(samp_part), "parts of sampling");
    p->reached = (uint32_t *)dev_alloc(d, (size_t)p->part_rows * sizeof(uint32_t), "keys of sampling");
    if (!d->error.code) samp_forget(d);
    p->own = ranks ? (float *)dev_alloc(d, (size_t)p->chunk * (size_t)p->own_ldl * sizeof(float), "logits") : p->logits;
    if (ranks) p->merged = (samp_part *)dev_alloc(d, (size_t)p->part_rows * sizeof(samp_part), "parts of sampling");
    if (ranks) group_inbox_bytes(d, &p->exchange), d->rank->logits = p->logits;
    p->results = p->far_results = (samp_result *)dev_alloc(d, max_out * sizeof(samp_result), "picks");
    p->tops = (samp_best *)dev_alloc(d, max_out * sizeof(samp_best), "top log-probabilities");
    for (samp_down &down : p->down) {
        down.results = (samp_result *)samp_pinned(d, max_out * sizeof(samp_result), "pinned picks");
        down.tops = (samp_best *)samp_pinned(d, max_out * sizeof(samp_best), "pinned top log-probabilities");
        down.order = (int *)malloc(max_out * sizeof(int));
        if (!down.order) abort();
    }
    const gemm_variant *h = &samp_head_variant;
    if (d->hopper) latch(d, cudaFuncSetAttribute(h->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, h->smem), "LM head");
    const size_t longest = 4 * ((size_t)d->shape->max_len + 4 * V); /* lists of a row */
    stage_open(d, &p->lists, max_out * sizeof(samp_filter) + SAMP_LIST_BYTES + longest + 64, false);
}

static void samp_close(toka_device *d) {
    samp_plan *p = d->samp;
    if (!p) return;
    for (samp_down &down : p->down) {
        cudaFreeHost(down.results);
        cudaFreeHost(down.tops);
        free(down.order);
    }
    stage_close(&p->lists);
    free(p);
    d->samp = NULL;
}

static bool samp_penalized(const toka_sampling *s) {
    return s->repetition_penalty != 1 || s->frequency_penalty != 0 || s->presence_penalty != 0;
}
static bool samp_filtered(const toka_sample_row *row, int V) {
    const toka_sampling *s = row->sampling;
    if (!s) return false;
    if (s->logprobs > 0 || row->ranked) return true;
    if (row->forced_id >= 0) return false;
    if (s->n_bias || s->n_allowed || row->n_forbidden || samp_penalized(s)) return true;
    return s->temperature > 0 && ((s->top_k > 0 && s->top_k < V) || s->top_p < 1 || s->min_p > 0);
}

static int samp_n_top(const toka_sampling *s, int V) { return max(0, min(min(s->logprobs, TOKA_MAX_LOGPROBS), V)); }

/* The part of the history that penalties look at. */
static int samp_history_from(const toka_sample_row *row) {
    if (row->forced_id >= 0 || !samp_penalized(row->sampling)) return row->n_history;
    return row->sampling->repetition_penalty == 1 ? row->n_prompt : 0;
}

static size_t samp_list_bytes(const toka_sample_row *row) {
    const toka_sampling *s = row->sampling;
    const size_t history = (size_t)(row->n_history - samp_history_from(row));
    return 4 * (history + 2 * (size_t)s->n_bias + (size_t)s->n_allowed + (size_t)row->n_forbidden) + 5 * 16;
}

/* Is a row of the step filtered? */
static bool samp_filters(const toka_device *d, const toka_step *s) {
    for (int i = 0; i < s->n_samples; i++)
        if (samp_filtered(&s->samples[i], d->shape->V_all)) return true;
    return false;
}

/* Can the step, filled up to n rows, go as one of filtered rows all at once: in its own order, with all filters and lists in the
 * stage? Tensor ranks would exchange the logits of plain rows, too. */
static bool samp_fits(const toka_device *d, const toka_step *s, int n) {
    const samp_plan *p = d->samp;
    size_t bytes = (size_t)n * sizeof(samp_filter) + 16;
    for (int i = 0; i < s->n_samples; i++)
        if (samp_filtered(&s->samples[i], d->shape->V_all)) bytes += samp_list_bytes(&s->samples[i]);
    return tp_size(d) == 1 && n <= p->chunk && bytes <= SAMP_GRAPH_BYTES;
}

/* Are the last kernels of such a step's graph kept, to become those of other steps? Tensor ranks end otherwise, and more rows than
 * logits are stored for go in parts. */
static bool samp_keeps(const toka_device *d, const toka_step *s) {
    return tp_size(d) == 1 && s->n_samples <= GRAPH_ROWS && s->n_samples <= d->samp->chunk;
}

/* Chooses which rows go which way and puts what all rows need into the stage, at the start of a step; filters and their lists
 * follow in samp_plan_filters or samp_launch. Plain rows come first, but where the order of a step with filtered ones is to be its
 * own: in a graph, and where a folded norm needs it. There all go as filtered ones, plain ones with a filter that asks nothing;
 * their results are the same.
 *
 * Results of few rows are stored into the host's memory by whoever makes them, and are there when the step is done. Then nothing
 * comes between a step's last kernel and the next step: 5 us of 760 less (1B, one row, H200, 2026-11-23), 5 of 1,570 (256 rows).
 * Tensor ranks make them by a kernel of their own, which graphs do not change. */
static void samp_plan_step(toka_device *d, const toka_step *s) {
    samp_plan *p = d->samp;
    samp_down *down = &p->down[d->newest];
    samp_ask *ask;
    int *rows;
    assert(s->n_samples <= d->options.max_samples);
    const bool filters = samp_filters(d, s), few = s->n_samples <= FOLD_ROWS && samp_fits(d, s, s->n_samples);
    int n = 0, last = s->n_samples;
    p->in_order = !filters || graph_runs(d) || few;
    for (int i = 0; i < s->n_samples && !p->in_order; i++) down->order[samp_filtered(&s->samples[i], d->shape->V_all) ? --last : n++] = i;
    for (int i = 0; i < s->n_samples && p->in_order; i++) down->order[i] = i;
    p->n_plain = filters ? n : s->n_samples, down->n_tops = 0, down->picks = NULL;
    p->results = samp_keeps(d, s) ? down->results : p->far_results;
    p->ask = (samp_ask *)stage_room(&d->up, (size_t)s->n_samples * sizeof *ask, (void **)&ask);
    p->rows = (int *)stage_room(&d->up, (size_t)s->n_samples * sizeof *rows, (void **)&rows);
    for (int i = 0; i < s->n_samples; i++) {
        const toka_sample_row *row = &s->samples[down->order[i]];
        const toka_sampling *how = row->sampling;
        uint64_t seed = how ? how->seed : 0;
        float T = how ? how->temperature : 0;
        assert(row->row >= 0 && row->row < s->T && row->forced_id < d->shape->V_all && (how || row->forced_id >= 0));
        double scale = T > 0 ? 1.4426950408889634 / T : 0;
        uint32_t c[4] = {row->sample, row->position, 0, 0};
        philox(c, (uint32_t)seed, (uint32_t)(seed >> 32));
        rows[i] = row->row;
        ask[i] = samp_ask{{(uint32_t)seed, (uint32_t)(seed >> 32)}, row->sample, row->position, c[0],
                          scale > 3e38 ? 3e38f : (float)scale,
                          row->forced_id >= 0 ? row->forced_id : toka_wants_logprob(row) ? SAMP_DRAW : SAMP_DRAW_ONLY,
                          row->seq < d->options.n_seqs ? row->seq : -1};
    }
}

/* Fills in the filter of one row; lists that its request shares with the row before are sent once. */
static void samp_fill(toka_device *d, stage *to, const toka_sample_row *row, const toka_sample_row *before, const samp_filter *old,
                      samp_filter *f) {
    const toka_sampling *s = row->sampling;
    int V = d->shape->V_all, from = samp_history_from(row);
    bool shared = before && before->sampling == s;
    *f = samp_filter{};
    f->history = (const int *)stage_put(to, row->history + from, (size_t)(row->n_history - from) * 4);
    f->n_history = row->n_history - from, f->n_prompt = row->n_prompt > from ? row->n_prompt - from : 0;
    f->bias_ids = shared ? old->bias_ids : (const int *)stage_put(to, s->bias_ids, (size_t)s->n_bias * 4);
    f->bias = shared ? old->bias : (const float *)stage_put(to, s->bias_values, (size_t)s->n_bias * 4);
    f->allowed = shared ? old->allowed : (const int *)stage_put(to, s->allowed_ids, (size_t)s->n_allowed * 4);
    f->forbidden = (const int *)stage_put(to, row->forbidden, (size_t)row->n_forbidden * 4);
    f->n_bias = s->n_bias, f->n_allowed = s->n_allowed, f->n_forbidden = row->n_forbidden;
    f->last_resort = row->forced_id < 0 ? toka_fallback_id(row, V) : 0;
    f->temperature = s->temperature, f->top_p = s->top_p, f->top_k = s->top_k < V ? s->top_k : 0;
    f->min_p_drop = s->min_p > 0 ? s->temperature * log((double)s->min_p) : -INFINITY;
    f->repetition = s->repetition_penalty, f->frequency = s->frequency_penalty, f->presence = s->presence_penalty;
    f->n_top = samp_n_top(s, V), f->ranked = row->ranked;
    if (f->n_top) f->best = d->samp->down[d->newest].n_tops++;
}

/* Filters of rows first .. of the plan, with their lists, to a stage: as many as fit, at most `most`. Returns how many. */
static int samp_fill_rows(toka_device *d, const toka_step *s, stage *to, int first, int most, samp_filter **filters) {
    const int *order = d->samp->down[d->newest].order;
    samp_filter *f;
    int n = 0;
    *filters = (samp_filter *)stage_room(to, (size_t)most * sizeof *f, (void **)&f);
    for (const toka_sample_row *before = NULL; n < most; n++) {
        const toka_sample_row *row = &s->samples[order[first + n]];
        if (!samp_filtered(row, d->shape->V_all)) {
            f[n] = samp_filter{.min_p_drop = -INFINITY, .temperature = 1, .top_p = 1, .repetition = 1};
            before = NULL;
            continue;
        }
        if (to->used + samp_list_bytes(row) > to->cap) break;
        samp_fill(d, to, row, before, f + n - 1, f + n);
        before = row;
    }
    return n;
}
/* Of a step that is a graph, all: with the rest of the step. */
static void samp_plan_filters(toka_device *d, const toka_step *s) {
    samp_plan *p = d->samp;
    p->filters = NULL;
    if (p->n_plain < s->n_samples && samp_fill_rows(d, s, &d->up, 0, s->n_samples, &p->filters) < s->n_samples) assert(false);
}
/* Of a step that is launched: sends them as samp_fill_rows has it. Returns 0 after a failure. */
static int samp_send_filters(toka_device *d, const toka_step *s, int first, int most, samp_filter **filters) {
    stage *to = &d->samp->lists;
    stage_begin(d, to);
    const int n = samp_fill_rows(d, s, to, first, most, filters);
    if (!n && !d->error.code) {
        d->error.code = TOKA_E_DEVICE;
        snprintf(d->error.msg, sizeof d->error.msg, "GPU: one row's sampling lists take %zu bytes, expected at most %zu",
                 samp_list_bytes(&s->samples[d->samp->down[d->newest].order[first]]), to->cap - to->used);
    }
    stage_send(d, to);
    return d->error.code ? 0 : n;
}

/* ---- The op ---- */

/* From here on, or no longer, kernels are launched that a graph has otherwise for filtered rows: the LM head, if it makes parts,
 * and the one that makes results of them. */
static void graph_draws(toka_device *d, bool on) {
    const bool keeps = d->graphs.capturing && samp_keeps(d, d->step);
    d->graphs.role = !on ? GRAPH_LAUNCHES : graph_runs(d) ? GRAPH_RENEWS : keeps ? GRAPH_KEEPS : GRAPH_LAUNCHES;
}

/* Parts to results: rows first .. first+n-1 of the plan, whose parts are columns 0 .. n-1; the first n_plain are plain, the rest
 * have filters, and their logits. */
static void samp_finish_rows(toka_device *d, int first, int n, int n_plain, const samp_filter *filters, float *logits) {
    samp_plan *p = d->samp;
    const samp_ask *ask = p->ask + first;
    samp_result *results = p->results + first;
    graph_draws(d, true);
    if (n_plain)
        launch_dependent(d, "picks", samp_reduce_kernel, dim3((unsigned)ceil_div(n_plain, SAMP_REDUCE_ROWS)), 256, 0, 1, ask,
                         p->parts, p->part_rows, p->n_blocks, n_plain, p->reached, NULL, results, d->last);
    samp_filtering rest = {ask + n_plain, filters, logits, p->parts + n_plain, p->ldl, p->part_rows, d->shape->V_all, p->n_blocks,
                           p->reached + n_plain, p->tops, results + n_plain, d->last};
    if (n > n_plain)
        launch_dependent(d, "filters", samp_filter_kernel, dim3((unsigned)(n - n_plain)), FILTER_THREADS,
                         samp_filter_smem(p->n_blocks), 1, rest);
    graph_draws(d, false);
}

/* The same for rows whose raw logits are stored, without parts yet. */
static void samp_from_logits(toka_device *d, int first, int n, int n_plain, const samp_filter *filters) {
    samp_plan *p = d->samp;
    launch_dependent(d, "groups", samp_blocks_kernel, dim3((unsigned)ceil_div(p->n_blocks, 32), (unsigned)n), 128, 0, 1,
                     p->ask + first, p->logits, p->ldl, 0, d->shape->V_all, p->parts, p->part_rows);
    samp_finish_rows(d, first, n, n_plain, filters, p->logits + (size_t)n_plain * (size_t)p->ldl);
}

/* Plain rows of tensor ranks: the parts of each rank's own ids to results; !there: from the logits of these. */
static void samp_exchange(toka_device *d, int first, int n, bool there) {
    samp_plan *p = d->samp;
    const samp_ask *ask = p->ask + first;
    if (!there)
        launch_dependent(d, "groups", samp_blocks_kernel, dim3((unsigned)ceil_div(p->own_blocks, 32), (unsigned)n), 128, 0, 1, ask,
                         p->own, p->own_ldl, d->shape->v0, d->shape->V, p->parts, p->part_rows);
    launch_dependent(d, "picks", samp_reduce_kernel, dim3((unsigned)ceil_div(n, SAMP_REDUCE_ROWS)), 256, 0, 1, ask, p->parts,
                     p->part_rows, p->own_blocks, n, p->reached, p->merged, p->results + first, d->last);
    launch_meeting(d, "picks", 1, samp_exchange_kernel, p->exchange, ask, p->merged, n, p->results + first, d->last);
}

/* Logits of n rows, which each tensor rank has for its own ids from row `from` of p->own on, to everybody's p->logits. */
static void samp_gather_ranks(toka_device *d, int from, int n) {
    samp_plan *p = d->samp;
    samp_everybody to = {};
    for (int q = 0; q < tp_size(d); q++) to.logits[q] = d->rank[q - d->options.tp_rank].logits;
    launch_meeting(d, "logits of all ranks", 2, samp_gather_kernel, to, p->ldl, p->own + (size_t)from * (size_t)p->own_ldl,
                   p->own_ldl, d->shape->v0, d->shape->V, n);
}

/* The LM head over rows first .. first+n-1 with wgmma: parts of all, and the logits of those from `stored` on. */
static void samp_head(toka_device *d, int first, int n, int stored) {
    samp_plan *p = d->samp;
    gemm_args a = {.M = n, .x = d->xn + (size_t)first * d->E, .ldx = d->E, .w = &d->lm_head};
    samp_fused fused = {p->ask + first, p->parts, p->reached, p->own, p->part_rows, p->own_ldl, d->shape->v0, d->shape->V, stored};
    gemm_plan plan = {&samp_head_variant, n > 128 ? 2 : 1, 8};
    graph_draws(d, true);
    gemm_start(d, plan, &a, &fused);
    graph_draws(d, false);
}

/* The LM head of n rows puts out parts. */
static bool samp_fuses(const toka_device *d, const toka_step *s, int n) { return d->hopper && !s->logits && n > SAMP_FEW; }

/* The raw logits of n rows that a test wants, from p->logits. */
static void samp_show(toka_device *d, const toka_step *s, int first, int n) {
    samp_plan *p = d->samp;
    const size_t V = (size_t)d->shape->V_all;
    for (int i = 0; s->logits && !d->options.tp_rank && i < n; i++) {
        float *to = s->logits + (size_t)p->down[d->newest].order[first + i] * V;
        const float *from = p->logits + (size_t)i * p->ldl;
        latch(d, cudaMemcpyAsync(to, from, V * sizeof(float), cudaMemcpyDeviceToHost, d->stream), "logits");
    }
}

/* Rows first .. first+n-1 of the plan from d->xn to results; the first n_plain are plain. Of tensor ranks each has its own ids:
 * plain rows go by samp_exchange, unless blocks straddle ranks or the logits are wanted; the others by gathered logits. */
static void samp_rows(toka_device *d, const toka_step *s, int first, int n, int n_plain, const samp_filter *filters) {
    samp_plan *p = d->samp;
    const bool ranks = tp_size(d) > 1, fused = samp_fuses(d, s, n);
    const int apart = !ranks || s->logits || !p->whole_blocks ? 0 : n_plain; /* rows that are exchanged */
    const int stored = fused && (!ranks || p->whole_blocks) ? n_plain : 0;
    gemm_args product = {n, d->xn + (size_t)first * d->E, d->E, &d->lm_head, (bf16 *)p->own, p->own_ldl, EPI_LOGITS};
    product.folded = fold_take(d);
    if (fused) samp_head(d, first, n, stored);
    else gemm(d, &product);
    if (apart) samp_exchange(d, first, apart, fused);
    if (apart == n && ranks) return;
    if (ranks) samp_gather_ranks(d, apart - stored, n - apart);
    samp_show(d, s, first, n);
    if (ranks && fused) samp_forget(d);
    if (fused && !ranks) samp_finish_rows(d, first, n, n_plain, filters, p->logits + (size_t)(n_plain - stored) * (size_t)p->ldl);
    else samp_from_logits(d, first + apart, n - apart, n_plain - apart, filters);
}

/* Queues the results' way down. */
static void samp_bring(toka_device *d, const toka_step *s, toka_sample_result *picks) {
    samp_plan *p = d->samp;
    samp_down *down = &p->down[d->newest];
    size_t bytes = (size_t)s->n_samples * sizeof(samp_result), top_bytes = (size_t)down->n_tops * sizeof(samp_best);
    down->picks = picks;
    if (p->results != down->results)
        latch(d, cudaMemcpyAsync(down->results, p->results, bytes, cudaMemcpyDeviceToHost, d->stream), "picks");
    if (top_bytes) latch(d, cudaMemcpyAsync(down->tops, p->tops, top_bytes, cudaMemcpyDeviceToHost, d->stream), "picks");
}

/* What came down of a step that is done, into the caller's picks, in the caller's order. */
static void samp_collect(toka_device *d, const toka_step *s, const samp_down *down) {
    for (int i = 0, best = 0; down->picks && i < s->n_samples; i++) {
        const toka_sample_row *row = &s->samples[down->order[i]];
        toka_sample_result *pick = &down->picks[down->order[i]];
        pick->id = down->results[i].id;
        pick->logprob = toka_wants_logprob(row) ? down->results[i].logprob : NAN;
        pick->sampled_logprob = down->results[i].sampled_logprob;
        pick->rank = down->results[i].rank;
        pick->n_top = row->sampling ? samp_n_top(row->sampling, d->shape->V_all) : 0;
        if (!pick->n_top) continue;
        const samp_best *b = &down->tops[best++];
        memcpy(pick->top_ids, b->ids, sizeof b->ids);
        memcpy(pick->top_logprobs, b->logprobs, sizeof b->logprobs);
        for (int j = 0; j < pick->n_top; j++) /* the same figure in both places, also where undoing costs a rounding */
            if (pick->top_ids[j] == pick->id) pick->logprob = pick->top_logprobs[j];
    }
}

/* The op up to the results, which lie where samp_plan_step said: on the device or, of few rows, in the host's memory. The stage
 * has been sent. Uses d->xn. As many rows at a time as there is room for parts, and for the logits of those that have to be
 * stored; plain and filtered rows share a pass over the weights. Filters are sent for all rows at once, if their lists fit: a
 * third transfer of a step would wait for the first, and the host could not run ahead. */
static void samp_launch(toka_device *d, const toka_step *s, const bf16 *x) {
    samp_plan *p = d->samp;
    int most = d->hopper && !s->logits && p->whole_blocks ? p->part_rows : p->chunk;
    assert(s->n_samples <= d->options.max_tokens);
    if (!d->folded) rmsnorm(d, x, p->rows, d->norm, d->xn, s->n_samples);
    samp_filter *filters = NULL;
    for (int i = 0, n, first = 0, end = 0; i < s->n_samples && !d->error.code; i += n) {
        const int n_plain = max(0, min(most, p->n_plain - i)), at = i + n_plain;
        const int more = min(min(most - n_plain, p->chunk), s->n_samples - at);
        if (more > 0 && at >= end) first = at, end = at + samp_send_filters(d, s, at, s->n_samples - at, &filters);
        n = n_plain + max(0, min(more, end - at));
        if (!d->error.code) samp_rows(d, s, i, n, n_plain, more > 0 ? filters + (at - first) : NULL);
    }
}

/* The same for a step that a graph runs, ahead of it: the last kernels become those of filtered rows, if there are any, else of
 * plain ones. */
static void samp_graph(toka_device *d, const toka_step *s) {
    samp_plan *p = d->samp;
    if (!samp_keeps(d, s)) return;
    if (samp_fuses(d, s, s->n_samples)) samp_head(d, 0, s->n_samples, p->n_plain);
    samp_finish_rows(d, 0, s->n_samples, p->n_plain, p->filters, p->logits);
}

/* ===========================================================================
 * MARK: 13. The card, opening and closing [host]
 * =========================================================================== */

/* ---- The card ---- */

static int cuda_count(void) {
    int n = 0;
    if (cudaGetDeviceCount(&n)) n = 0;
    cudaGetLastError();
    return gpus_shared() && n ? GROUP_RANKS : n;
}

/* Has this program code for that compute capability? Code for x.y runs on x.z, z >= y; that for 9.0, the only one of its kind,
 * is sm_90a's. There is no PTX in it that a driver could translate for others. */
static bool cuda_has_code(int major, int minor) {
    static const int archs[] = {__CUDA_ARCH_LIST__}; /* 100 x + 10 y */
    for (int arch : archs)
        if (arch / 100 == major && arch / 10 % 10 <= minor) return true;
    return false;
}

/* What the driver says about GPU i in one line; 0 when there is none that can be used, with the reason in the line. */
static int cuda_probe(int i, char *line, size_t bytes) {
    int n = 0, driver = 0;
    cudaDeviceProp p;
    cudaError_t code = cudaGetDeviceCount(&n);
    if (!code && i >= n) code = cudaErrorNoDevice;
    if (!code) code = cudaGetDeviceProperties(&p, i);
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    if (code) {
        snprintf(line, bytes, "%s", driver ? cudaGetErrorString(code) : "no NVIDIA driver is installed");
        return 0;
    }
    int n_chars = snprintf(line, bytes, "%s, %.0f GB, %d multiprocessors, compute capability %d.%d, driver for CUDA %d.%d", p.name,
                           p.totalGlobalMem / 1e9, p.multiProcessorCount, p.major, p.minor, driver / 1000, driver % 1000 / 10);
    if (cuda_has_code(p.major, p.minor)) return 1;
    size_t at = min((size_t)n_chars, bytes);
    if (p.major < 8) snprintf(line + at, bytes - at, ": too old, 8.0 or later is needed");
    else
        snprintf(line + at, bytes - at, ": ARCHS=%d%d%s ./build.sh makes a program for it, this one is not", p.major, p.minor,
                 p.major == 9 ? "a" : "");
    return 0;
}

/* Which kernels can run, and the encoder of tensor maps from the driver (libcuda is not linked). */
static void card_open(toka_device *d) {
    cudaDeviceProp p;
    latch(d, cudaSetDevice(d->ordinal), "cudaSetDevice");
    latch(d, cudaGetDeviceProperties(&p, d->ordinal), "cudaGetDeviceProperties");
    if (d->error.code) return;
    d->arch = 10 * p.major + p.minor, d->hopper = d->arch == 90;
    d->n_sms = p.multiProcessorCount, d->smem_most = (int)p.sharedMemPerBlockOptin;
    snprintf(d->about, sizeof d->about, "%s, %.0f GB, %s kernels", p.name, p.totalGlobalMem / 1e9,
             d->hopper ? "wgmma" : "mma.sync");
    latch(d, cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking), "cudaStreamCreate");
    latch(d, cudaMemGetInfo(&d->free_at_open, &p.totalGlobalMem), "cudaMemGetInfo");
    if (!d->hopper) return;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    latch(d, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&d->encode_map, 12000, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
#else
    latch(d, cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", (void **)&d->encode_map, cudaEnableDefault, &found),
          "cuTensorMapEncodeTiled");
#endif
    if (found != cudaDriverEntryPointSuccess) latch(d, cudaErrorNotSupported, "cuTensorMapEncodeTiled");
}

/* ---- Memory, counted before it is taken ---- */

static int cuda_ordinal(const toka_device_options *o) { return gpus_shared() ? o->index % gpus_shared() : o->index; }

static size_t weights_bytes(const toka_shape *s, const toka_weights *w) {
    size_t n = toka_gpu_matrix_bytes(&w->embed) * (w->lm_head.data != w->embed.data ? 2 : 1);
    for (int i = 0; i < s->L; i++) n += toka_gpu_layer_bytes(&w->layers[i]);
    return n;
}

/* Bytes that the KV pool may take on this card beside the model and a step of this size. Only asks. */
static int64_t cuda_kv_bytes(const toka_shape *s, const toka_weights *w, const toka_device_options *o) {
    size_t free_bytes = 0, total = 0;
    cudaGetLastError();
    if (cudaSetDevice(cuda_ordinal(o)) || cudaMemGetInfo(&free_bytes, &total)) return 0;
    if (gpus_shared() && o->n_devices > 1) free_bytes /= (size_t)ceil_div(o->n_devices, gpus_shared());
    const size_t scratch = toka_gpu_scratch_bytes(s, o->max_tokens);
    const size_t group = toka_gpu_group_bytes(s, o->max_tokens, o->tp_size, o->pp_size);
    return (int64_t)(toka_gpu_utilization(o->memory_utilization) * free_bytes) - (int64_t)(weights_bytes(s, w) + scratch + group);
}

/* ---- The device's own view of its time ---- */

static void clock_open(toka_device *d) {
    step_clock *c = &d->clock;
    size_t n = 6 * (size_t)d->shape->L + 8; /* every op, with sums and messages (chapter 10) */
    c->timed = -1, c->cap_at = (int)n;
    c->at = (cudaEvent_t *)calloc(n, sizeof *c->at), c->part = (char *)malloc(n);
    if (!c->at || !c->part) abort();
    for (int i = 0; i < STEP_RING; i++) {
        latch(d, cudaEventCreate(&c->begun[i]), "events");
        latch(d, cudaEventCreateWithFlags(&c->done[i], cudaEventBlockingSync), "events");
    }
    for (size_t i = 0; i < n; i++) latch(d, cudaEventCreate(&c->at[i]), "events");
}
static void clock_close(toka_device *d) {
    step_clock *c = &d->clock;
    for (int i = 0; i < STEP_RING; i++) {
        if (c->begun[i]) cudaEventDestroy(c->begun[i]);
        if (c->done[i]) cudaEventDestroy(c->done[i]);
    }
    for (int i = 0; c->at && i < c->cap_at; i++)
        if (c->at[i]) cudaEventDestroy(c->at[i]);
    free(c->at), free(c->part);
}

/* FLOP and the least bytes of the parts of a step. */
static void clock_count(toka_device *d, const toka_step *s) {
    const toka_shape *sh = d->shape;
    double T = s->T, E = sh->E, HD = (double)sh->H * sh->D, KD = (double)sh->K * sh->D, L = sh->L, pairs = 0, kv = 0;
    double sums = sum_scatters(d, s->T) ? L : 2 * L; /* half of their bytes leave with the products */
    for (int i = 0; i < s->n_spans; i++) {
        const toka_span *sp = &s->spans[i];
        kv += sp->n_kv;
        for (int r = sp->row0; r < sp->row0 + sp->n_rows; r++) pairs += max(0, min(sp->n_kv, s->pos[r] + 1 - sp->kv0));
    }
    const toka_op_times add[TOKA_N_OPS] = {
        {0, 0, 4 * T * E},
        {0, 2 * T * E * (HD + 2 * KD) * L, 2 * (E * (HD + 2 * KD) + T * (E + HD + 2 * KD)) * L},
        {0, 4 * HD * pairs * L, (4 * KD * kv + 4 * T * HD) * L},
        {0, 2 * T * E * HD * L, 2 * (E * HD + T * (HD + 2 * E)) * L},
        {0, 6 * T * E * sh->F * L, 2 * (3 * E * sh->F + T * (2 * E + 2.0 * sh->F)) * L},
        {0, 2.0 * s->n_samples * E * sh->V, 2 * (s->n_samples ? E * sh->V + s->n_samples * E : 0)},
        {0, 0, 4 * T * E * (1 - 1.0 / tp_size(d)) * (sums + first_stage(d))},
        {0, 0, last_stage(d) ? 0 : 2 * T * E}};
    for (int i = 0; i < TOKA_N_OPS; i++) d->clock.t.op[i].flop += add[i].flop, d->clock.t.op[i].bytes += add[i].bytes;
}

/* To time the next step's parts; could it be a graph? */
static bool clock_is_due(const toka_device *d, bool graph) {
    const int64_t n = d->clock.n_begun, every = graph ? TIME_GRAPHS * TIME_EVERY : TIME_EVERY;
    return n % every == TIME_EVERY / 2;
}

/* Where a step begins; due: its parts are timed. Two of these are never under way at once. */
static void clock_begin(toka_device *d, const toka_step *s, bool due) {
    step_clock *c = &d->clock;
    latch(d, cudaEventRecord(c->begun[d->newest], d->stream), "step");
    c->n_begun++;
    if (!due) return;
    c->timed = d->newest, c->n_at = 0;
    clock_count(d, s);
}

static double clock_between(toka_device *d, cudaEvent_t from, cudaEvent_t to) { /* seconds */
    float ms = 0;
    if (!d->error.code) latch(d, cudaEventElapsedTime(&ms, from, to), "step");
    return ms * 1e-3;
}

/* The step at `oldest` is done. */
static void clock_done(toka_device *d) {
    step_clock *c = &d->clock;
    toka_times *t = &c->t;
    int i = d->oldest;
    if (!c->n_done++) return; /* the rehearsal */
    if (t->steps++) {
        double idle = clock_between(d, c->done[(i + STEP_RING - 1) % STEP_RING], c->begun[i]);
        t->idle_s += idle, t->begin_s = t->end_s + idle;
    }
    double busy = clock_between(d, c->begun[i], c->done[i]);
    t->busy_s += busy, t->end_s = t->begin_s + busy;
    if (c->timed != i) return;
    for (int k = 0; k < c->n_at; k++) t->op[(int)c->part[k]].seconds += clock_between(d, k ? c->at[k - 1] : c->begun[i], c->at[k]);
    t->n_timed++, c->timed = -1;
}

static void cuda_times(toka_device *d, toka_times *t) { *t = d->clock.t, t->graphs = d->graphs.n_run; }

static void cuda_memory(const toka_device *d, toka_memory *m) {
    size_t free_bytes = 0, total;
    if (cudaSetDevice(d->ordinal) || cudaMemGetInfo(&free_bytes, &total)) cudaGetLastError();
    m->weights = d->weight_bytes, m->kv = (int64_t)d->shape->L * (int64_t)d->kv_layer * (int64_t)sizeof(bf16);
    m->other = (int64_t)d->free_at_open - (int64_t)free_bytes - m->weights - m->kv;
}

/* ---- Open and close ---- */

static int cuda_check(const toka_device_options *o, const toka_shape *s, toka_err *e) {
    e->code = 0;
    if (s->D % 8 || s->D > 256)
        snprintf(e->msg, sizeof e->msg, "GPU: head size %d, expected a multiple of 8 up to 256", s->D), e->code = TOKA_E_INPUT;
    else if (o->max_tokens < 1 || o->max_samples < 1 || o->n_pages < 1 || o->n_pages > INT_MAX / s->B)
        snprintf(e->msg, sizeof e->msg, "GPU: %d tokens and %d outputs a step, %d pages: out of range", o->max_tokens, o->max_samples,
                 o->n_pages), e->code = TOKA_E_USE;
    return e->code;
}

static void graphs_close(toka_device *d) {
    for (step_graph &g : d->graphs.all) {
        if (g.exec) cudaGraphExecDestroy(g.exec);
        if (g.graph) cudaGraphDestroy(g.graph);
        free(g.nodes);
        for (int i = 0; i < g.n_readers; i++) free(g.readers[i].block);
        free(g.readers);
        g = step_graph{};
    }
}

static void cuda_close(toka_device *d) {
    if (!d) return;
    if (d->group && !group_leave(d)) return; /* its GPU hangs: what that may touch stays */
    if (d->stream) cudaStreamSynchronize(d->stream);
    for (int i = 0; i < d->n_blocks; i++) cudaFree(d->blocks[i]);
    stage_close(&d->up);
    graphs_close(d);
    clock_close(d);
    attn_close(d);
    samp_close(d);
    if (d->stream) cudaStreamDestroy(d->stream);
    free(d->layers);
    free(d->blocks);
    free(d);
}

static void cuda_take_memory(toka_device *d) {
    const toka_shape *s = d->shape;
    size_t T = (size_t)d->options.max_tokens, HD = (size_t)(s->H + 2 * s->K) * s->D, read = T + GEMM_ROOM; /* rows */
    if (d->options.progress) d->options.progress(d->options.user, "taking memory", 0);
    d->xn = (bf16 *)dev_alloc(d, read * d->E * sizeof(bf16), "activations");
    d->qkv = (bf16 *)dev_alloc(d, T * HD * sizeof(bf16), "activations");
    d->act = (bf16 *)dev_alloc(d, read * d->F * sizeof(bf16), "activations");
    d->squares = (float *)dev_alloc(d, FOLD_ROWS * (size_t)ceil_div(d->E, FOLD_N) * sizeof(float), "activations");
    d->kv_layer = (size_t)(d->options.n_pages + 1) * s->K * 2 * s->B * s->D; /* the last page is for rows that are nobody's */
    d->kv = (bf16 *)dev_alloc(d, (size_t)s->L * d->kv_layer * sizeof(bf16), "KV cache");
    if (!d->error.code) latch(d, cudaMemsetAsync(d->kv, 0, (size_t)s->L * d->kv_layer * sizeof(bf16), d->stream), "KV cache");
    if (!d->error.code) attn_open(d);
    if (!d->error.code && last_stage(d)) samp_open(d);
    const size_t rows = T * (3 * sizeof(int) + sizeof(toka_copy));
    if (!d->error.code) stage_open(d, &d->up, rows + attn_stage_bytes(d) + samp_stage_bytes(d) + 4096, true);
    d->last = (int *)dev_alloc(d, (size_t)d->options.n_seqs * sizeof(int), "last tokens");
    if (!d->error.code) clock_open(d);
    if (!d->error.code && d->group) group_take_memory(d);
}

/* The number in a variable of the environment that breaks a device with this place: "N", for the first stage, or "N@R". */
static int cuda_debug(const char *name, const toka_device_options *o) {
    const char *value = getenv(name), *at = value ? strchr(value, '@') : NULL;
    if (!value || (at ? atoi(at + 1) != o->pp_rank * (o->tp_size > 1 ? o->tp_size : 1) + o->tp_rank : o->pp_rank > 0)) return 0;
    return atoi(value);
}

static int cuda_open(toka_device **out, const toka_device_options *o, const toka_shape *shape, const toka_weights *weights,
                     toka_err *e) {
    if (cuda_check(o, shape, e)) return e->code;
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    if (!d) abort();
    d->options = *o, d->shape = shape, d->weights = weights;
    d->E = up_8(shape->E), d->F = up_8(shape->F), d->V = up_8(shape->V), d->ordinal = cuda_ordinal(o);
    d->fault_in = cuda_debug("TOKA_DEBUG_FAULT", o), d->stall_in = cuda_debug("TOKA_DEBUG_STALL", o);
    d->capture_fails = cuda_debug("TOKA_DEBUG_CAPTURE", o);
    if (o->group) group_place(d);
    card_open(d);
    if (!d->error.code) gemm_open(d);
    if (!d->error.code) weights_open(d);
    for (int i = 0; i < shape->L && qkv_fuses(d, shape->D) && !d->error.code; i++) qkv_order(d, &d->layers[i].qkv, shape->D);
    if (!d->error.code) rope_open(d);
    if (!d->error.code) cuda_take_memory(d);
    if (!d->error.code) latch(d, cudaStreamSynchronize(d->stream), "opening the model");
    if (!d->error.code && d->group) group_join(d);
    if (d->error.code) {
        *e = d->error;
        if (d->group) group_fail(d->group, e);
        cuda_close(d);
        return e->code;
    }
    *out = d;
    return 0;
}

static const char *cuda_describe(const toka_device *d) { return d->group ? d->group->about : d->about; }

static int cuda_status(toka_device *d, toka_err *e) {
    if (!d->error.code && d->group && group_is_broken(d->group)) group_latch(d);
    else if (d->error.code && d->group) group_doubt(d);
    if (d->error.code) *e = d->error;
    return d->error.code;
}
static toka_dev_ptr cuda_alloc(toka_device *d, size_t bytes) { /* what it is for may be a product's x, in rows of H * D */
    const size_t room = (size_t)GEMM_ROOM * d->shape->H * d->shape->D * sizeof(bf16);
    return toka_dev_ptr{(uint64_t)dev_alloc(d, bytes + room, "activations")};
}
static void cuda_upload(toka_device *d, toka_dev_ptr to, const void *from, size_t bytes) {
    d->folded = false;
    latch(d, cudaMemcpyAsync((void *)to.at, from, bytes, cudaMemcpyHostToDevice, d->stream), "upload");
    latch(d, cudaStreamSynchronize(d->stream), "upload");
}
static void cuda_download(toka_device *d, void *to, toka_dev_ptr from, size_t bytes) {
    latch(d, cudaMemcpyAsync(to, (const void *)from.at, bytes, cudaMemcpyDeviceToHost, d->stream), "download");
    latch(d, cudaStreamSynchronize(d->stream), "download");
}

/* ===========================================================================
 * MARK: 14. Measuring the ops [host]
 * `toka bench ops`: each op at the shapes of well-known models, inside a captured graph, on buffers that together are larger than
 * the L2 cache and filled with random numbers. What the caller gets is time, arithmetic and bytes; it draws the table.
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
static void bench_tell(bench *b, const char *op, const char *model, const char *shape, double us, double flop, double bytes) {
    toka_bench_row r = {op, model, shape, us, flop, bytes};
    if (!b->d->error.code) b->row(b->user, &r);
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
    LAUNCHED(a->d, "reading");
}
static void bench_read(bench *b) {
    size_t n = (size_t)2 << 30;
    int keep = b->d->n_blocks;
    bench_read_arg a = {b->d, (const uint4 *)bench_random(b->d, n / 2, 1), n / 16, (uint32_t *)dev_alloc(b->d, 4, "buffers")};
    if (!b->d->error.code) {
        double us = bench_time(b->d, 1, bench_read_op, &a);
        bench_tell(b, "read", "", "2 GiB", us, 0, (double)n);
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
        bf16 *x = bench_random(d, (size_t)(M + GEMM_ROOM) * K, 1.7f);
        a.g[i] = gemm_args{M, x, K, &w[i], bench_random(d, (size_t)M * ldy, 1), ldy, epi};
    }
    if (!d->error.code) {
        char shape[64];
        double us = bench_time(d, a.n < 8 ? 8 : a.n, bench_gemm_op, &a);
        snprintf(shape, sizeof shape, "M=%d %dx%d", M, N, K);
        double bytes = ((double)N * K + (double)M * K + (double)M * ldy * (epi == EPI_RESIDUAL ? 2 : 1)) * sizeof(bf16);
        bench_tell(b, name, model, shape, us, 2.0 * M * N * K, bytes);
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

/* ---- Attention ----
 * A step of `seqs` sequences. Each feeds `rows` tokens, the last of `len`; the first `shared` positions are the same pages for all
 * and one span, as chapter 17 of toka.c would make it. */

typedef struct bench_step {
    const char *name;
    int seqs, rows, len, shared;
} bench_step;
static const bench_step bench_steps[] = {
    {"decode", 4096, 1, 150, 0},      {"decode", 2048, 1, 900, 0},       {"decode", 64, 1, 4096, 0},
    {"decode", 1, 1, 4096, 0},        {"shared decode", 4096, 1, 1050, 896}, {"prefill", 1, 4096, 4096, 0},
    {"prefill", 1, 16384, 16384, 0},  {"prefill", 16, 512, 512, 0}};

typedef struct bench_attn_arg {
    toka_device *d;
    toka_step s;
    bf16 *q, *o;
    int L;
} bench_attn_arg;
static void bench_attn_op(void *arg, int i) {
    bench_attn_arg *a = (bench_attn_arg *)arg;
    attention(a->d, i % a->L, a->q, a->o);
}

/* Rows, pages and spans of the step in one block of host memory; returns the pages in use. */
static int bench_plan(toka_step *s, const bench_step *b, int B, int **block) {
    int T = b->seqs * b->rows, own = ceil_div(b->len - b->shared, B), common = b->shared / B, n = 0;
    size_t ints = (size_t)(2 * T + common + b->seqs * own) * sizeof(int);
    int *p = *block = (int *)calloc(ints + (size_t)(b->seqs + 1) * sizeof(toka_span), 1);
    if (!p) abort();
    int *pages = p + 2 * T;
    toka_span *spans = (toka_span *)(pages + common + b->seqs * own);
    *s = toka_step{.T = T, .ids = p, .pos = p + T, .kv_slot = p, .pages = pages, .spans = spans};
    for (; n < common + b->seqs * own; n++) pages[n] = (int)((n * 7919LL + 13) % (common + b->seqs * own)); /* anywhere */
    if (common) spans[s->n_spans++] = toka_span{0, T, 0, 0, b->shared};
    for (int q = 0; q < b->seqs; q++) {
        spans[s->n_spans++] = toka_span{q * b->rows, b->rows, common + q * own, b->shared, b->len - b->shared};
        for (int r = 0; r < b->rows; r++) p[T + q * b->rows + r] = b->len - b->rows + r;
    }
    return n;
}

static void bench_attention(bench *b, const bench_shape *m, const bench_step *step) {
    toka_device *d = b->d;
    toka_shape shape = {.H = m->H, .K = m->K, .D = m->D, .E = m->E, .F = m->F, .V = m->V};
    shape.B = toka_cuda.page_tok, shape.max_len = step->len;
    layer_weights layers[BENCH_MAX_SETS] = {};
    bench_attn_arg a = {.d = d};
    int keep = d->n_blocks, *block, n_pages = bench_plan(&a.s, step, shape.B, &block);
    size_t heads = (size_t)a.s.T * m->H * m->D;
    d->shape = &shape, d->layers = layers, d->options.max_tokens = a.s.T, d->options.n_pages = n_pages;
    d->kv_layer = (size_t)n_pages * 2 * m->K * shape.B * m->D;
    a.L = (int)(BENCH_CACHE_BYTES / (d->kv_layer * sizeof(bf16))) + 1;
    if (a.L > BENCH_MAX_SETS) a.L = BENCH_MAX_SETS;
    shape.L = a.L;
    d->kv = bench_random(d, d->kv_layer * a.L, 1), a.q = bench_random(d, heads, 2), a.o = bench_random(d, heads, 1);
    if (!d->error.code) attn_open(d);
    if (!d->error.code) stage_open(d, &d->up, (size_t)a.s.T * sizeof(int) + attn_stage_bytes(d) + 4096, false);
    if (!d->error.code) {
        stage_begin(d, &d->up);
        d->rows.T = a.s.T, d->rows.pos = (const int *)stage_put(&d->up, a.s.pos, (size_t)a.s.T * sizeof(int));
        attn_plan_step(d, &a.s);
        stage_send(d, &d->up);
        char text[64];
        double us = bench_time(d, a.L < 4 ? 4 : a.L, bench_attn_op, &a), seen = 0, T = a.s.T;
        for (int r = 0; r < step->rows; r++) seen += (double)step->seqs * (step->len - r);
        snprintf(text, sizeof text, step->shared ? "%d x %d, %d shared" : step->rows > 1 ? "%d x %d tokens" : "%d x %d",
                 step->seqs, step->len, step->shared);
        double kv = step->shared + (double)step->seqs * (step->len - step->shared);
        bench_tell(b, step->name, m->model, text, us, 4.0 * m->H * m->D * seen,
                   (kv * 2 * m->K * m->D + T * 2 * m->H * m->D) * sizeof(bf16));
    }
    attn_close(d);
    stage_close(&d->up);
    d->attn = NULL, d->layers = NULL;
    bench_free(d, keep);
    free(block);
}

/* ---- LM head with sampling: norm, logits, one draw a row at temperature 1; picks are not brought ---- */

typedef struct bench_head_arg {
    toka_device *d;
    toka_step s;
    bf16 *x;
} bench_head_arg;
static void bench_head_op(void *arg, int) {
    bench_head_arg *a = (bench_head_arg *)arg;
    samp_launch(a->d, &a->s, a->x);
}
static void bench_head(bench *b, const bench_shape *m, int M) {
    toka_device *d = b->d;
    toka_shape shape = {.L = 1, .H = m->H, .K = m->K, .D = m->D, .E = m->E, .F = m->F, .V = m->V, .V_all = m->V, .eps = 1e-5f};
    toka_sampling sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    toka_sample_row *rows = (toka_sample_row *)calloc((size_t)M, sizeof *rows);
    bench_head_arg a = {.d = d};
    int keep = d->n_blocks;
    if (!rows) abort();
    for (int i = 0; i < M; i++) rows[i] = toka_sample_row{.row = i, .forced_id = -1, .position = (uint32_t)i, .sampling = &sampling};
    a.s = toka_step{.T = M, .n_samples = M, .samples = rows};
    d->shape = &shape, d->E = m->E, d->F = m->F, d->V = up_8(m->V), d->options.max_tokens = d->options.max_samples = M;
    d->lm_head = weight{bench_random(d, (size_t)d->V * m->E, sqrtf(3.0f / m->E)), NULL, d->V, m->E};
    a.x = bench_random(d, (size_t)M * m->E, 1.7f), d->xn = bench_random(d, (size_t)(M + GEMM_ROOM) * m->E, 1.7f);
    float *norm = vector_room(d, m->E);
    if (norm) latch(d, cudaMemset(norm, 0x3F, (size_t)m->E * sizeof *norm), "bench"); /* 0.747 each */
    d->norm = norm;
    if (!d->error.code) samp_open(d);
    if (!d->error.code) stage_open(d, &d->up, samp_stage_bytes(d) + 4096, false);
    if (!d->error.code) {
        stage_begin(d, &d->up);
        samp_plan_step(d, &a.s);
        stage_send(d, &d->up);
        char text[64];
        double us = bench_time(d, 3, bench_head_op, &a);
        snprintf(text, sizeof text, "M=%d %dx%d", M, m->V, m->E);
        bench_tell(b, "lm_head+sample", m->model, text, us, 2.0 * M * m->V * m->E,
                   ((double)m->V * m->E + 2.0 * M * m->E) * sizeof(bf16));
    }
    samp_close(d);
    stage_close(&d->up);
    d->samp = NULL;
    bench_free(d, keep);
    free(rows);
}

/* Runs every measurement; row is told of each as it is done. */
static int cuda_bench(toka_bench_fn *row, void *user, toka_err *e) {
    toka_device *d = (toka_device *)calloc(1, sizeof *d);
    if (!d) abort();
    bench b = {d, row, user};
    card_open(d);
    if (!d->error.code) gemm_open(d);
    if (!d->error.code) bench_read(&b);
    for (int i = 0; i < 2; i++)
        for (const bench_step &step : bench_steps)
            if (!d->error.code) bench_attention(&b, &bench_shapes[i], &step);
    for (const bench_shape &m : bench_shapes)
        for (int M : bench_rows)
            if (!d->error.code && m.V && M <= 4096) bench_head(&b, &m, M);
    if (!d->error.code) bench_gemms(&b);
    *e = d->error;
    cuda_close(d);
    return e->code;
}

/* ===========================================================================
 * MARK: 15. The op table [host]
 * =========================================================================== */

/* ---- The ops. After a failure they do nothing: the engine learns of it from status() ---- */

static bf16 *dev_bf16(toka_dev_ptr a) { return (bf16 *)a.at; }

/* A kernel that fails as a bug or a broken card would, for the test of what happens then. */
__global__ static void fault_kernel() { __trap(); }

/* One that does not end before the group does; alone never. */
__global__ static void stall_kernel(volatile int *over) {
    while (!over || !*over) {}
}

static void cuda_break(toka_device *d) {
    if (d->fault_in && !--d->fault_in) fault_kernel<<<1, 1, 0, d->stream>>>();
    if (d->stall_in && !--d->stall_in) stall_kernel<<<1, 1, 0, d->stream>>>(d->group ? d->group->over : NULL);
}

/* As op_begins; also false where the step's graph has the op. */
static bool op_launches(toka_device *d, const char *op) { return op_begins(d, op) && !graph_runs(d); }

/* ---- Captured steps ----
 *
 * A step in which each row draws is a graph, unless it is timed (chapter 13). A size in between runs as the next larger: the
 * added rows have token 0, see no keys, store theirs in a page of nobody's, and their draws are dropped. All kernels treat up to
 * 8, 16, 32 and 64 rows alike, and each further 128, so a row's result does not depend on whether its step is a graph; and as a
 * GEMM tile has 128 rows, those that fill it up cost nothing. Capturing runs nothing: the plan is made up.
 *
 * A graph has so many attention nodes a layer, and each becomes whatever kernel the step's work list has there, with its grid: so
 * one graph serves all lengths, groups and levels of shared prefixes that need so many launches. Grids are set from the host,
 * which the GPU does not wait for, and fit the lists; kernels that read from the device how much there is would be launched for
 * the most there can be.
 *
 * The last nodes become others, too. Where a row of the step is filtered, all rows go the filtered way, a plain one with a filter
 * that asks nothing: the LM head stores all logits, and samp_filter_kernel stands for samp_reduce_kernel, with the same result to
 * the bit. Filters and lists go up with the rest of the step. Launched one by one are steps whose logits or lists do not fit at
 * once (V 128,256: more than 512 rows), and those of tensor ranks, which would exchange all rows' logits.
 *
 * Tensor ranks meet by counts that their GPUs keep, so sums are in the graphs; the choice between graph and launches is the same
 * on all ranks of a stage, as it follows from the step and what they agreed on (group_agree). Messages of a pipeline, and what
 * waits for other stages, lie before and behind the graph.
 *
 * What a graph gains: launches that lie closer, 40 to 50 us a step of 16 layers up to 512 rows and 100 from 768 on; and the host
 * is busy for 60 to 250 us a step instead of 500 to 800. NVIDIA H200, 2026-11-22, 1B, every other step a graph, us a step with and
 * without; apart: each sequence has its own prompt of 128, samples: of 16 prompts of 520:
 *
 *      rows     64            96            128           256           384           512           768           1,024
 *      apart    1,279  1,322  1,496  1,546  1,577  1,624  2,138  2,177  2,966  3,008  3,470  3,518  4,903  5,004  5,761  5,882
 *      samples  1,706  1,798  2,034  2,092  1,785  1,832  2,161  2,192  2,915  2,951  3,156  3,196  4,469  4,570  5,163  5,278
 *
 * 192 rows, as 256: 2,009 and 2,303, 2,101 and 2,385. With 8,192 rows nothing is gained. Filtered rows (top_k 20, top_p
 * 0.95), 2026-11-23: 1 row 814 and 863, 64 rows 1,424 and 1,488. To capture 86 graphs (now, with squads, 91) took 0.11 to
 * 0.18 s and 36 MB. */

static const int graph_sizes[GRAPH_SIZES] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 640, 768, 896, GRAPH_ROWS};

/* Rows `from` .. T-1 of d->graphs.step, which are nobody's. */
static void graph_fill(toka_device *d, int from, int T) {
    static const toka_sampling nobody = {.top_p = 1, .repetition_penalty = 1};
    step_graphs *g = &d->graphs;
    for (int i = from; i < T; i++) {
        g->ids[i] = g->pos[i] = 0, g->slot[i] = d->options.n_pages * d->shape->B;
        g->out[i] = toka_sample_row{.row = i, .seq = -1, .forced_id = -1, .sampling = &nobody};
    }
    g->step.T = g->step.n_samples = T;
    g->step.ids = g->ids, g->step.pos = g->pos, g->step.kv_slot = g->slot, g->step.samples = g->out;
}

/* The place in graph_sizes of the graphs that the step may be run by; -1: none. */
static int graph_size(const toka_device *d, const toka_step *s) {
    int size = 0;
    if (!d->graphs.n || s->n_samples != s->T || s->T > GRAPH_ROWS || s->logits) return -1;
    if (d->group && __atomic_load_n(&d->group->no_graphs, __ATOMIC_ACQUIRE)) return -1;
    for (int i = 0; i < s->n_samples; i++)
        if (s->samples[i].row != i) return -1;
    while (graph_sizes[size] < s->T) size++;
    if (d->samp && samp_filters(d, s) && !samp_fits(d, s, graph_sizes[size])) return -1;
    return d->graphs.all[size * GRAPH_KINDS + 1].exec ? size : -1;
}

/* The step filled up to T rows. */
static const toka_step *graph_step(toka_device *d, const toka_step *s, int T) {
    step_graphs *g = &d->graphs;
    g->step = *s;
    memcpy(g->ids, s->ids, (size_t)s->T * sizeof *g->ids);
    memcpy(g->pos, s->pos, (size_t)s->T * sizeof *g->pos);
    memcpy(g->slot, s->kv_slot, (size_t)s->T * sizeof *g->slot);
    memcpy(g->out, s->samples, (size_t)s->n_samples * sizeof *g->out);
    graph_fill(d, s->T, T);
    return &g->step;
}

/* Of that size the one for attention's plan; NULL: there is none. */
static step_graph *graph_of(toka_device *d, int size) {
    const int n = attn_launches(d->attn);
    if (n < 1 || n > GRAPH_ATTENTIONS) return NULL;
    step_graph *g = &d->graphs.all[size * GRAPH_KINDS + (attn_is_squad(d->attn) ? 0 : n)];
    return g->exec ? g : NULL;
}

static size_t graph_free_bytes(void) {
    size_t free_bytes = 0, total;
    if (cudaMemGetInfo(&free_bytes, &total)) cudaGetLastError();
    return free_bytes;
}

/* Adds to what describe says. */
static void graph_say(toka_device *d, const char *fmt, ...) {
    va_list args;
    char *about = d->group ? d->group->about : d->about;
    if (d->group) pthread_mutex_lock(&d->group->lock);
    size_t at = strlen(about);
    va_start(args, fmt);
    vsnprintf(about + at, sizeof d->about - at, fmt, args);
    va_end(args);
    if (d->group) pthread_mutex_unlock(&d->group->lock);
}

/* The next step to be captured: sizes up to what max_num_seqs rows are filled up to. One row has no more than a kernel and its
 * merge. */
static const toka_step *cuda_capture(toka_device *d) {
    step_graphs *g = &d->graphs;
    const int most = min(d->options.max_tokens, d->options.max_samples);
    if (!g->next) g->free_before = graph_free_bytes();
    for (; !d->options.eager && !d->error.code && g->next < GRAPH_SIZES * GRAPH_KINDS; g->next++) {
        const int size = g->next / GRAPH_KINDS, kind = g->next % GRAPH_KINDS, T = graph_sizes[size];
        if (T > most || (size && graph_sizes[size - 1] >= d->options.n_seqs)) break;
        if ((T == 1 && kind > 2) || (!kind && !attn_has_squads(d->attn, size ? graph_sizes[size - 1] + 1 : 1))) continue;
        g->now = &g->all[g->next++], g->capturing = true;
        g->step = toka_step{};
        graph_fill(d, 0, T);
        return &g->step;
    }
    const size_t free_now = graph_free_bytes(), took = g->free_before > free_now ? g->free_before - free_now : 0;
    if (g->n && (!d->group || d->rank == d->group->ranks))
        graph_say(d, ", %d graphs captured in %.2f s, %.0f MB", g->n, g->seconds, took / 1e6);
    return NULL;
}

/* Bytes of the stage that rows and sampling take. */
static size_t step_rows_bytes(const toka_device *d, int T, int n_out) {
    auto whole = [](size_t bytes) { return (bytes + 15) & ~(size_t)15; };
    size_t draws = d->samp ? whole((size_t)n_out * sizeof(samp_ask)) + whole((size_t)n_out * sizeof(int)) : 0;
    return 3 * whole((size_t)T * sizeof(int)) + draws;
}

/* Everything that the step needs into the stage, rows and sampling first: where those lie depends on the number of rows alone.
 * size: up to which of graph_sizes it is filled up, if there is a graph that fits attention's plan; -1: there is none. */
static void step_plan(toka_device *d, const toka_step *s, int size) {
    const int T = size < 0 ? s->T : graph_sizes[size];
    d->up.used = step_rows_bytes(d, T, size < 0 ? s->n_samples : T);
    attn_plan_step(d, s);
    d->rows.copies = (const toka_copy *)stage_put(&d->up, s->copies, (size_t)s->n_copies * sizeof *s->copies);
    d->graphs.now = size < 0 ? NULL : graph_of(d, size);
    if (d->graphs.now) s = graph_step(d, s, T);
    const size_t end = d->up.used;
    d->up.used = 0, d->step = s, d->rows.T = s->T;
    d->rows.ids = (const int *)stage_put(&d->up, s->ids, (size_t)s->T * sizeof(int));
    d->rows.pos = (const int *)stage_put(&d->up, s->pos, (size_t)s->T * sizeof(int));
    d->rows.slot = (const int *)stage_put(&d->up, s->kv_slot, (size_t)s->T * sizeof(int));
    if (d->samp) samp_plan_step(d, s);
    assert(d->up.used <= step_rows_bytes(d, s->T, s->n_samples));
    d->up.used = end;
    if (d->samp && d->graphs.now) samp_plan_filters(d, s);
}

/* Stand-ins for attention's kernels, which are not known yet: three a level. */
static void graph_begin(toka_device *d, const toka_step *s) {
    step_graph *g = d->graphs.now;
    attn_plan *p = d->attn;
    const int n = (int)(g - d->graphs.all) % GRAPH_KINDS;
    d->up.turn = 0;
    step_plan(d, s, -1);
    d->graphs.now = g;
    p->n_levels = ceil_div(n, 3);
    for (int i = 0; i < p->n_levels; i++)
        p->levels[i] = attn_level{.n_tiles = n > 3 * i, .n_small = n > 3 * i + 1, .n_merges = n > 3 * i + 2, .merge_nq = 1};
    if (!n) p->n_levels = 1, p->n_both = 0, *p->levels = attn_level{.n_gangs = 1, .gang_warps = 1};
    assert(n || attn_is_squad(p));
    g->nodes = (cudaGraphNode_t *)malloc(((size_t)d->shape->L * (size_t)max(n, 1) + GRAPH_DRAWS) * sizeof *g->nodes);
    if (!g->nodes) abort();
    latch(d, cudaStreamBeginCapture(d->stream, cudaStreamCaptureModeRelaxed), "capture");
    if (d->capture_fails && !--d->capture_fails)
        latch(d, cudaStreamSynchronize(d->stream), "capture"); /* which a capture forbids */
}
/* A capture failed: there are to be no graphs, and no failure, if the device works. Of ranks none uses its graphs then, as their
 * steps must be alike; all have captured theirs before the first real step. */
static void graphs_give_up(toka_device *d) {
    const toka_err why = d->error;
    graphs_close(d);
    d->graphs.n = 0, d->graphs.next = GRAPH_SIZES * GRAPH_KINDS, d->folded = false;
    cudaGetLastError();
    d->error.code = 0;
    latch(d, cudaStreamSynchronize(d->stream), "capture");
    if (!d->group || !__atomic_exchange_n(&d->group->no_graphs, true, __ATOMIC_ACQ_REL)) graph_say(d, ", no graphs (%s)", why.msg);
}

/* Bytes of each argument of a kernel, which the next node often is, too. */
static const graph_kernel *graph_kernel_of(toka_device *d, const void *function) {
    step_graphs *g = &d->graphs;
    for (const graph_kernel &k : g->known)
        if (k.function == function) return &k;
    graph_kernel *k = &g->known[g->n_known++ % GRAPH_KNOWN];
    cudaError_t code = cudaSuccess;
    size_t at;
    *k = graph_kernel{.function = function};
    while (k->n < GRAPH_ARGUMENTS && !(code = cudaFuncGetParamInfo(function, (size_t)k->n, &at, &k->bytes[k->n]))) k->n++;
    cudaGetLastError(); /* there is no argument n */
    if (!k->n) latch(d, code, "capture"); /* every kernel of a step has arguments */
    return k;
}
/* Keeps a node of the graph, if it reads the stage, which is seen by its arguments: a word among them that is an address there. */
static void graph_add_reader(toka_device *d, step_graph *g, cudaGraphNode_t node) {
    const char *from = d->up.dev[0], *end = from + d->up.cap;
    cudaKernelNodeParams p;
    latch(d, cudaGraphKernelNodeGetParams(node, &p), "capture");
    const graph_kernel *k = d->error.code ? NULL : graph_kernel_of(d, p.func);
    if (d->error.code) return;
    assert(k->n < GRAPH_ARGUMENTS);
    size_t n = 0; /* words */
    for (int i = 0; i < k->n; i++) n += (k->bytes[i] + 7) / 8;
    graph_reader r = {.node = node, .params = p, .block = (char **)malloc(((size_t)k->n + n) * sizeof(char *))};
    if (!r.block) abort();
    char **word = r.block + k->n;
    r.params.kernelParams = (void **)r.block;
    for (int i = 0; i < k->n; word += (k->bytes[i++] + 7) / 8) {
        memcpy(word, p.kernelParams[i], k->bytes[i]);
        r.params.kernelParams[i] = word;
        for (size_t j = 0; j < k->bytes[i] / 8; j++) {
            if (word[j] < from || word[j] >= end) continue;
            assert(r.n_words < GRAPH_WORDS);
            r.words[r.n_words++] = word + j;
        }
    }
    if (r.n_words) g->readers[g->n_readers++] = r;
    else free(r.block);
}
/* Finds the nodes that read the stage, besides those that become other kernels. */
static void graph_find_readers(toka_device *d, step_graph *g) {
    size_t n = 0;
    latch(d, cudaGraphGetNodes(g->graph, NULL, &n), "capture");
    cudaGraphNode_t *nodes = (cudaGraphNode_t *)malloc((n + 1) * sizeof *nodes);
    g->readers = (graph_reader *)malloc((n + 1) * sizeof *g->readers);
    if (!nodes || !g->readers) abort();
    latch(d, cudaGraphGetNodes(g->graph, nodes, &n), "capture");
    for (size_t i = 0; i < n && !d->error.code; i++) {
        cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        latch(d, cudaGraphNodeGetType(nodes[i], &type), "capture");
        bool other = type != cudaGraphNodeTypeKernel;
        for (int k = 0; k < g->n_nodes && !other; k++) other = g->nodes[k] == nodes[i];
        if (!other) graph_add_reader(d, g, nodes[i]);
    }
    free(nodes);
}
/* Has the graph of the step that is begun read the stage's buffers whose turn it is. Costs the host 0.6 us a node, the GPU
 * nothing, even if it were all nodes (1 and 64 sequences, H200). */
static void graph_take_turn(toka_device *d) {
    step_graph *g = d->graphs.now;
    const ptrdiff_t by = d->up.dev[d->up.turn] - d->up.dev[g->turn];
    if (!by) return;
    for (graph_reader *r = g->readers; r < g->readers + g->n_readers; r++) {
        for (int i = 0; i < r->n_words; i++) *r->words[i] += by;
        latch(d, cudaGraphExecKernelNodeSetParams(g->exec, r->node, &r->params), "step");
    }
    g->turn = d->up.turn;
}
static void graph_end(toka_device *d) {
    step_graph *g = d->graphs.now;
    const cudaError_t code = cudaStreamEndCapture(d->stream, &g->graph); /* also behind a failure */
    latch(d, code, "capture");
    if (!d->error.code) graph_find_readers(d, g);
    if (!d->error.code) latch(d, cudaGraphInstantiate(&g->exec, g->graph, 0), "capture");
    if (!d->error.code) latch(d, cudaGraphUpload(g->exec, d->stream), "capture");
    d->graphs.capturing = false, d->graphs.now = NULL, d->graphs.n++;
    if (d->error.code) graphs_give_up(d);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void cuda_begin(toka_device *d, const toka_step *s) {
    if (d->graphs.capturing) {
        d->graphs.seconds -= seconds_now();
        graph_begin(d, s);
        return;
    }
    d->newest = (d->newest + 1) % STEP_RING;
    if (!op_begins(d, NULL)) return;
    const int size = graph_size(d, s);
    const bool timed = clock_is_due(d, size >= 0);
    stage_begin(d, &d->up);
    step_plan(d, s, timed ? -1 : size);
    stage_send(d, &d->up);
    clock_begin(d, s, timed);
    if (d->graphs.now) graph_take_turn(d);
    cuda_break(d);
    d->graphs.at = 0, d->graphs.n_run += d->graphs.now != NULL;
}

static void cuda_end(toka_device *d, const toka_step *) {
    sum_norm(d, NULL); /* of a step without outputs */
    if (d->graphs.capturing) {
        graph_end(d);
        d->graphs.seconds += seconds_now();
        return;
    }
    d->graphs.now = NULL;
    latch(d, cudaEventRecord(d->clock.done[d->newest], d->stream), "step");
}

/* Also behind a failure: what was launched before it may still run. */
static void cuda_finish(toka_device *d, const toka_step *s) {
    d->oldest = (d->oldest + 1) % STEP_RING;
    if (d->group) group_sync(d, d->clock.done[d->oldest]);
    else latch(d, cudaEventSynchronize(d->clock.done[d->oldest]), "step");
    if (d->error.code || (d->group && group_is_broken(d->group))) return;
    clock_done(d);
    if (d->samp) samp_collect(d, s, &d->samp->down[d->oldest]);
}

static void cuda_copy_pages(toka_device *d, const toka_step *s) {
    const toka_shape *sh = d->shape;
    if (!op_begins(d, NULL)) return; /* the step is seen in what follows; ahead of a graph */
    launch_dependent(d, "copies of pages", copy_pages_kernel, dim3((unsigned)s->n_copies, (unsigned)sh->L), 256, 0, 1,
                     d->rows.copies, d->kv, d->kv_layer, sh->K * 2 * sh->B * sh->D);
}

/* Of the tensor ranks, whose results are added up, one has the old x. */
static enum epilogue rest_epilogue(const toka_device *d) { return d->options.tp_rank ? EPI_STORE : EPI_RESIDUAL; }

static void cuda_embed(toka_device *d, const toka_step *s, toka_dev_ptr x) {
    if (!op_begins(d, "embed") || !group_wait_drawn(d, s) || graph_runs(d)) return;
    s = d->step;
    d->folded = s->T <= FOLD_ROWS && tp_size(d) == 1;
    launch_dependent(d, "embedding", embed_kernel, dim3(s->T), 128, 0, 1, d->rows.ids, d->last, d->embed, d->shape->v0,
                     d->shape->V, dev_bf16(x), d->E, fold_for(d, d->folded ? d->layers->attn_norm : NULL, false));
    clock_part(d, TOKA_OP_EMBED);
}

/* The norm of the op that follows can be folded into this GEMM (chapter 4). */
static const float *fold_norm(toka_device *d, const gemm_args *g, const float *norm) {
    d->folded = g->M <= FOLD_ROWS && tp_size(d) == 1 && gemm_way(d, g->M, g->w) == BY_THIN;
    return d->folded ? norm : NULL;
}
/* The rows that are drawn are all, in their order; then the norm before the LM head can be folded, too. */
static bool fold_draws(const toka_device *d, const toka_step *s) {
    bool all = d->hopper && d->samp && s->T <= FOLD_ROWS && s->n_samples == s->T && d->samp->in_order &&
               s->n_samples <= d->samp->chunk;
    for (int i = 0; all && i < s->n_samples; i++) all = s->samples[i].row == i;
    return all;
}

static void norm_qkv_rope_kv(toka_device *d, int n, int layer, const bf16 *x, bf16 *q) {
    const toka_shape *sh = d->shape;
    const layer_weights *l = &d->layers[layer];
    const step_rows *rows = &d->rows;
    bf16 *kv = d->kv + (size_t)layer * d->kv_layer;
    const bool folded = fold_take(d);
    if (!folded && !sum_norm(d, l->attn_norm)) rmsnorm(d, x, NULL, l->attn_norm, d->xn, n);
    qkv_params p = {l->qkv.bias, l->q_norm, l->k_norm, sh->eps, sh->H, sh->K, sh->B, rows->pos, rows->slot, d->rope, q, kv, sh->D};
    if (qkv_fuses(d, sh->D) && n > FEW_MAX && gemm_qkv_pays(d, n, &l->qkv, &p)) {
        gemm_wgmma_qkv(d, n, d->xn, d->E, &l->qkv, &p); /* all in the epilogue */
        return;
    }
    gemm_args g = {n, d->xn, d->E, &l->qkv, d->qkv, l->qkv.N, EPI_STORE, NULL, folded};
    if (qkv_fuses(d, sh->D) && gemm_turns(d, n, &l->qkv, &p)) g.epi = EPI_QKV, g.qkv = &p;
    gemm(d, &g);
    if (g.epi == EPI_QKV) return;
    rope_args a = {d->qkv, q, kv, rows->pos, rows->slot, d->rope,
                   l->q_norm, l->k_norm, n, sh->H, sh->K, sh->D, sh->B, sh->eps, qkv_fuses(d, sh->D)};
    launch_dependent(d, "RoPE", rope_kernel, dim3(ceil_div(n * (sh->H + 2 * sh->K), 8)), 256, 0, 1, a);
}
static void cuda_norm_qkv_rope_kv(toka_device *d, const toka_step *, int layer, toka_dev_ptr x, toka_dev_ptr q) {
    if (!op_launches(d, "norm_qkv_rope_kv")) return;
    norm_qkv_rope_kv(d, d->step->T, layer, dev_bf16(x), dev_bf16(q));
    clock_part(d, TOKA_OP_QKV);
}

static void cuda_attention(toka_device *d, const toka_step *, int layer, toka_dev_ptr q, toka_dev_ptr o) {
    if (!op_begins(d, "attention")) return;
    d->graphs.role = graph_runs(d) ? GRAPH_RENEWS : d->graphs.capturing ? GRAPH_KEEPS : GRAPH_LAUNCHES;
    attention(d, layer, dev_bf16(q), dev_bf16(o));
    d->graphs.role = GRAPH_LAUNCHES;
    clock_part(d, TOKA_OP_ATTENTION);
}

static void cuda_out_residual(toka_device *d, const toka_step *, int layer, toka_dev_ptr o, toka_dev_ptr x) {
    if (!op_launches(d, "out_residual")) return;
    const weight *w = &d->layers[layer].o;
    gemm_args g = {d->step->T, dev_bf16(o), w->K, w, dev_bf16(x), d->E, rest_epilogue(d)};
    g.norm = fold_norm(d, &g, d->layers[layer].mlp_norm);
    if (!sum_scatter(d, &g)) gemm(d, &g);
    clock_part(d, TOKA_OP_OUT);
}

static void cuda_norm_mlp_residual(toka_device *d, const toka_step *, int layer, toka_dev_ptr x) {
    if (!op_launches(d, "norm_mlp_residual")) return;
    const layer_weights *l = &d->layers[layer];
    const int n = d->step->T;
    const bool folded = fold_take(d);
    if (!folded && !sum_norm(d, l->mlp_norm)) rmsnorm(d, dev_bf16(x), NULL, l->mlp_norm, d->xn, n);
    gemm_args up = {n, d->xn, d->E, &l->gate_up, d->act, d->F, EPI_SWIGLU, NULL, folded};
    gemm(d, &up);
    gemm_args down = {n, d->act, d->F, &l->down, dev_bf16(x), d->E, rest_epilogue(d)};
    if (layer + 1 < d->shape->L) down.norm = fold_norm(d, &down, d->layers[layer + 1].attn_norm);
    else if (fold_draws(d, d->step)) down.norm = fold_norm(d, &down, d->norm);
    if (!sum_scatter(d, &down)) gemm(d, &down);
    clock_part(d, TOKA_OP_MLP);
}

static void cuda_norm_logits_sample(toka_device *d, const toka_step *s, toka_dev_ptr x, toka_sample_result *picks) {
    if (!op_begins(d, "norm_logits_sample")) return;
    sum_norm(d, NULL);
    if (d->graphs.capturing) d->graphs.now->meetings = 0;
    if (graph_runs(d)) samp_graph(d, d->step);
    else samp_launch(d, d->step, dev_bf16(x));
    if (d->graphs.capturing) return;
    graph_launch(d);
    if (graph_runs(d) && d->rank) d->rank->n_meetings += (unsigned)d->graphs.now->meetings;
    samp_bring(d, s, picks);
    group_send_drawn(d, s);
    clock_part(d, TOKA_OP_HEAD);
}

extern "C" const toka_backend toka_cuda = {
    .name = "cuda",
    .probe = cuda_probe,
    .count = cuda_count,
    .kv_bytes = cuda_kv_bytes,
    .open = cuda_open,
    .close = cuda_close,
    .describe = cuda_describe,
    .memory = cuda_memory,
    .status = cuda_status,
    .alloc = cuda_alloc,
    .upload = cuda_upload,
    .download = cuda_download,
    .group_open = group_open,
    .group_close = group_close,
    .group_abort = group_abort,
    .group_watchdog = group_watch,
    .all_reduce = cuda_all_reduce,
    .send = cuda_send,
    .receive = cuda_receive,
    .begin = cuda_begin,
    .end = cuda_end,
    .finish = cuda_finish,
    .capture = cuda_capture,
    .times = cuda_times,
    .copy_pages = cuda_copy_pages,
    .embed = cuda_embed,
    .norm_qkv_rope_kv = cuda_norm_qkv_rope_kv,
    .attention = cuda_attention,
    .out_residual = cuda_out_residual,
    .norm_mlp_residual = cuda_norm_mlp_residual,
    .norm_logits_sample = cuda_norm_logits_sample,
    .bench = cuda_bench,
    .activation_bytes = sizeof(bf16),
    .page_tok = TOKA_GPU_PAGE_TOK,
    .warm_up = true,
    .default_tokens = TOKA_GPU_MAX_TOKENS,
    .default_seqs = TOKA_GPU_MAX_SEQS,
    .n_ahead = STEPS_AHEAD,
    .merge_tok = 8, /* these three: how attention's time grows, measured on an H100 (chapter 9) */
    .span_tok = 512,
    .tile_rows = 32,
    .span_align_tok = 8, /* what a copy to attn_small fetches at least */
};
