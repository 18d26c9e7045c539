/* toka_kernels.cu - toka's CUDA backend. SPDX-License-Identifier: Apache-2.0
 *
 * WHAT IT IS. The second instance of `struct toka_backend` (toka.h); the first is chapter 30 of
 * toka.c. All its kernels are written here: it calls the CUDA runtime and no other library. One
 * binary holds code for sm_80, sm_89 and sm_90a. Hopper (sm_90a) runs the wgmma and TMA kernels.
 * Other GPUs run the mma.sync kernels; the tests run these on Hopper too, as a cross-check.
 *
 * HOW A STEP RUNS. toka.c decides what a step computes (its chapters 19 and 21).
 *
 *   begin    writes the step's inputs and the work lists of attention (chapter 8) and sampling
 *            (chapter 12) into a pinned upload buffer. One host-to-device copy uploads them on a
 *            stream of its own, while the previous step runs (struct upload_buffer).
 *   the ops  launch kernels on one stream. Decode steps of up to 1,024 rows run as CUDA graphs,
 *            which are captured when the device is opened (chapter 15). The ops of such a step
 *            launch nothing: they adapt the graph to the step, and the last op launches it.
 *   end      records an event.
 *   finish   waits for the event of the oldest in-flight step and returns its sampled tokens.
 *
 * A step can begin while the previous one runs, because the last sampled token of each sequence
 * stays on the device (toka_device.last_tokens), where `embed` of the next step reads it. Each
 * buffer that the host fills for a step exists STEPS_IN_FLIGHT times.
 *
 * NUMBERS. Weights and activations are bf16. On Hopper FP8 weights stay e4m3, and x of their GEMMs
 * is rounded to e4m3; other GPUs unpack them to bf16. Accumulators, norms, softmax and
 * log-probabilities are float32. The residual stream x is rounded to bf16 between ops. Every sum
 * has a fixed order, so the same step gives the same bits again. With more or fewer rows in a step,
 * a row's result can differ by rounding, because another tile shape sums in another order (not with
 * an e4m3 W).
 *
 * MEMORY. cuda_open and cuda_alloc allocate everything. Layouts:
 *
 *   weights     W [N][K] row-major bf16 or, on Hopper, e4m3 with float32 scales of rows or of
 *               blocks of 128 x 128; E, F, V are padded with zeros to multiples of 8. q, k and
 *               v are one matrix [(H+2K)*D][E]; on Hopper with D 64 or 128 the rows of each head
 *               are in the order of qkv_interleave (chapter 4). gate and up are one matrix [2F][E]:
 *               rows 0 to 7 of gate, rows 0 to 7 of up, rows 8 to 15 of gate, and so on. So one
 *               thread gets both operands of SwiGLU.
 *   x           [T][E] bf16; the columns from the model's E to the padded E are zero
 *   q, o        [T][H][D] bf16
 *   K and V     pool[layer][page][kv head][K, V][B tokens][D] bf16; or FP8 numbers, and behind
 *               those of a page their scales (kv_layout). Layers with a window can have fewer pages
 *               than the others: windowed pages, which toka.c frees when no row will see them.
 *               With MLA pool[layer][page][B tokens][D]: K alone, whose first Dv elements are V
 *   kv_ids      [page][B tokens] int32: the id of each token, in the last stage. Penalties and bad
 *               words read the tokens of a sequence there
 *   norms       float32
 *
 * LETTERS as in toka.h: T tokens (rows) of a step, S sequences, L layers, H query heads, K kv
 * heads, D head size, E width, F mlp width, V vocabulary, B tokens per page; G = H / K. A GEMM
 * y[M][N] = x[M][K] W[N][K]^T has its own M, N, K.
 *
 * WORDS, one meaning each
 *
 *   row            one token of the step
 *   query          one query head of one row. The G query heads of a kv head are packed: head g of
 *                  them in row r is query r*G + g
 *   span           consecutive rows and a run of KV positions that all of them read (toka_span).
 *                  The spans of a step form a tree, because prompts share prefixes (Hydragen).
 *   level          depth of a span in that tree; levels run one after another (cascade attention)
 *   item           attention's unit of work: a range of the queries of a span, and a range of its
 *                  KV positions, for every kv head. A small item has at most 16 queries and is
 *                  bound by memory. A larger one is a tile of 64, 128 or 192 queries and is bound
 *                  by the tensor cores.
 *   own            the own positions of a row are the KV positions that no other row reads. They
 *                  are its last span.
 *   split          one piece of an item's KV range (split-KV), or of a GEMM's K (split-K)
 *   state          (O, LSE), float32, of a row and head in global memory: the attention over the
 *                  levels so far. One level writes it, the next one merges it in its epilogue.
 *   prefix group   up to six rows, mostly of one prompt. One CTA computes all spans of these rows.
 *   unit           the tiles that one cluster of gemm_wgmma computes together
 *   buffer, BUFS   of a ring in shared memory: one of its entries (CUTLASS: stage). BUFS is their
 *                  number. Buffers of other kinds have a name: upload, split, receive buffer.
 *   staging        shared memory through which an epilogue loads and stores a tile
 *   stage          a pipeline stage of the model
 *   rank           a GPU of a model (tensor rank, stage). cta_rank and k_rank: a CTA's number in
 *                  its cluster. A token's rank: how many tokens have a higher logit, plus one
 *   id block       256 consecutive ids of the vocabulary. It has four id groups of 64 ids. A thread
 *                  holds the logits of a group in its registers.
 *   partial        the sampling result of some ids of one row (samp_partial). Two partials of a row
 *                  merge into one.
 *   plain row      needs no stored logits. A filtered row needs them: it has top-k, top-p, min-p,
 *                  penalties or id lists, or wants top log-probabilities or a rank. A penalized row
 *                  has a repetition or presence penalty only; it is sampled as a plain row where
 *                  that is possible (chapter 11).
 *
 * HOW KERNELS WAIT
 *
 *   previous kernel   Programmatic dependent launch: a kernel starts while the previous one ends.
 *                     It reads weights at once and calls grid_wait() before it reads activations.
 *   inside a CTA      Rings of buffers. Each buffer has two mbarriers, full and empty. A wait names
 *                     the parity of the phase that has to complete. Named barriers (bar_sync) are
 *                     for some of the warps.
 *   inside a cluster  Cluster barriers, and st.async, which writes into another CTA's shared memory
 *                     and signals its mbarrier.
 *   between GPUs      The rank barrier (chapter 10): CTA b of a kernel waits for CTA b of the same
 *                     kernel on every tensor rank.
 *
 * GEMM FAMILIES (chapters 5 to 7; gemm_family and gemm choose)
 *
 *   family      used for                                  MMA          CTA tile         threads
 *   gemm_gemv   M <= 8 at some shapes; M <= 16 on other   mma.sync,    16 of N x        256
 *               GPUs than Hopper                          swapped      8 or 16 of M
 *   gemm_smallm other M <= 32; M <= 64 if K >= 1024 and   wgmma,       64 of N x        192
 *               W is not large; logits of M <= 16         swapped      8, 16, 32, 64
 *   gemm_wgmma  the rest on Hopper                        wgmma        128 of M x       384
 *                                                                      64 to 256 of N
 *     FP8       e4m3 W: every M                           wgmma        64 or 128 of M   256, 384
 *                                                                      x 32 to 256 of N
 *   gemm_mma    the rest on other GPUs                    mma.sync     128 x 128 or     256, 128
 *                                                                      64 x 64
 *
 *   family      split-K                          loads                     epilogues
 *   gemm_gemv   8 warps, summed in shared        a cp.async ring per warp  STORE, RESIDUAL, SWIGLU,
 *               memory                                                     QKV without QK-norm
 *   gemm_smallm 1, 2, 4, 8 CTAs of a cluster,    TMA, up to 12 buffers     STORE, RESIDUAL, SWIGLU,
 *               reduce-scatter by st.async                                 LOGITS, QKV
 *   gemm_wgmma  1, 2, 4 CTAs of a cluster        TMA, up to 8 buffers,     all; also epi_scatter
 *                                                persistent CTAs           (ranks), epi_sample
 *                                                                          (LM head)
 *     FP8       none: a row has the same bits    TMA, up to 11 buffers     STORE, RESIDUAL, SWIGLU,
 *               for every M                                                  QKV, epi_scatter
 *   gemm_mma    none                             cp.async, 4 buffers       STORE, RESIDUAL, SWIGLU,
 *                                                                          LOGITS
 *
 *   STORE and so on are the values EPI_... of enum epilogue. "Swapped": the kernel computes
 *   y^T = W x^T, so that rows of W fill the 16 or 64 rows of the MMA.
 *   For M <= 8 without tensor parallelism RMSNorm is fused: the kernel that writes x also writes
 *   the sums of squares of each row, and the next GEMM scales its result by 1 / rms (struct
 *   fused_norm).
 *
 * ATTENTION KERNELS (chapters 8 and 9)
 *
 *   kernel              standard name                threads a CTA    grid           queries a CTA
 *   attn_mma            FlashAttention-2, any GPU    32 or 128        items x K      16 or 64
 *   attn_small          decode attention, one warp   32               items x K      <= 16
 *   attn_cta_split      split-KV inside a CTA        <= 14 warps      (items or      <= 16
 *                                                    (D > 64: 12)     groups) x K
 *   attn_cluster_split  split-KV inside a cluster    <= 4 warps       4 x the grid   <= 16 a
 *                       of 4 CTAs                    (D > 64: 3)      above          cluster
 *   attn_wgmma          FlashAttention-3 prefill     512              tiles x K      192
 *                                                    (D > 64: 384)                   (D > 64: 128)
 *   attn_fused          Hydragen: shared prefix and  512, persistent  <= SMs         128 of the
 *                       own positions in one kernel                                  prefix
 *   attn_merge_splits   merge of split-KV            128              merges x K     1
 *   attn_unpack         FP8 pages to bf16            256              pages x K      none
 *   attn_latent         MLA with absorbed weights    384              items          64
 *   attn_no_work        none: fills a graph's node   32               1              none
 *
 *   kernel              loads of K and V by          products         merge by, and where
 *   attn_mma            all threads, cp.async        mma.sync         epilogue: with the state
 *   attn_small          lane 0, TMA                  mma.sync         epilogue: with the state
 *   attn_cta_split      lane 0 of each warp, TMA     mma.sync         the CTA, in shared memory,
 *                                                                     then with the state
 *   attn_cluster_split  lane 0 of each warp, TMA     mma.sync         CTA r of the cluster for the
 *                                                                     queries i with i % 4 = r, by
 *                                                                     st.async; then with the state
 *   attn_wgmma          a producer warp, TMA         wgmma            epilogue: with the state
 *   attn_fused, prefix  warp 0, TMA                  wgmma            none: writes (O, LSE) to the
 *                                                                     exchange buffer
 *     own positions     7 warps, TMA, evict-first    mma.sync         the warp of the row: prefix
 *                                                                     with own positions
 *   attn_merge_splits   reads no K or V              none             one CTA a query, fixed order
 *   attn_latent         a producer warp, TMA         wgmma            epilogue: with the state
 *
 *   How a step chooses (attn_plan_lists), on Hopper with B >= 64 and 64 <= D <= 256; all other
 *   steps use attn_mma and attn_merge_splits:
 *   1. Prefix groups, if the step has at least two levels and little work: one launch of
 *      attn_cta_split for all levels (attn_choose_prefix_groups).
 *   2. Else attn_fused for the shared prefixes after which each row has only its own positions. It
 *      needs rows enough for every SM, and is for layers without a window and without a soft cap
 *      (attn_plan_fused).
 *   3. Everything else level by level: attn_wgmma for tiles, attn_small or attn_cta_split for small
 *      items, then attn_merge_splits if a range was split.
 *   4. attn_cluster_split replaces attn_cta_split if it is the only kernel of the step and its
 *      clusters of four CTAs all fit on the GPU at once (attn_uses_cluster).
 *   Layers with a window have lists of their own, in which spans begin with the window.
 *   FP8 K and V: attn_small, attn_cta_split and attn_cluster_split read the FP8 pages, attn_wgmma
 *   reads copies that attn_unpack makes. attn_fused and attn_mma cannot read them.
 *
 * SAMPLING KERNELS (chapters 11 and 12)
 *
 *   kernel                     from -> to                                used for
 *   gemm_wgmma, epi_sample     accumulators -> a partial per row and     Hopper, M > 16
 *                              id block; logits of filtered rows
 *   samp_presence_kernel       history -> two bits for each id           penalized rows
 *   samp_partials_kernel       stored logits -> the same partials        M <= 16, other GPUs
 *   samp_reduce_kernel         partials -> token, log-probabilities      plain rows
 *   samp_filter_kernel         partials and logits -> token              filtered rows
 *   samp_merge_ranks_kernel    a partial per row and rank -> token       ranks, plain rows
 *   samp_gather_logits_kernel  logits of a rank -> every rank            ranks, filtered rows
 *
 *   Method: Gumbel-max over id groups, then the inverse CDF inside the group that won.
 *
 * WHAT THEY REACH. Without a mark: NVIDIA H200, 2026-11-22 to 24; test/results/gpu-h200.md has
 * tables, with commits and commands. (H100): 2026-11-26, `toka bench ops`, the table is
 * test/results/ops-h100.txt. For ops bound by reading, 100 % is the card's read bandwidth: 4.4 TB/s
 * on the H200, 3.1 TB/s on the H100. 1B is Llama-3.2-1B, 8B is Llama-3.1-8B.
 *
 *   op                        bound by      reaches
 *   gemm_wgmma                arithmetic    M >= 512: 1.04 times as fast as cuBLAS (61 shapes)
 *   gemm_smallm               reading W     M = 64: 90 % (gate_up of 1B), 49 % (o of 1B) (H100)
 *   gemm_gemv                 reading W     M = 1: 96 % (down of 8B), 77 % (o of 1B) (H100)
 *   gemm_mma                  arithmetic    60 % of wgmma's rate (H100)
 *   decode attention          reading K, V  91 % (64 sequences of 4,096 positions), 96 % (2,048
 *                                           sequences of 900), both at D 64 (H100)
 *     of a shared prefix      reading K, V  93 % at D 64, 87 % at D 128 (4,096 sequences of 1,050
 *                                           positions, 896 of them shared) (H100)
 *   prefix groups             launches      64 samples: 10.4 us a layer; without them 15.5
 *   attn_wgmma                arithmetic    16,384 rows: 487 TFLOP/s at D 64 (cuDNN 437), 579 at
 *                                           D 128 (cuDNN 566)
 *   all-reduce of ranks       links         285 GB/s of the 450 of two H200; at least 6.2 us
 *     in the GEMM's epilogue  links         257 GB/s for the half that the GEMM does not hide
 *   LM head with sampling     arithmetic    takes 1.04 to 1.13 times as long as cuBLAS's GEMM alone
 *   filtered rows             depends       top_p 0.9: 16 us for one row, 47 us for 512
 *
 * CONTENTS (build.sh checks it against the banners)
 *
 *   1. Types and the device [host]
 *   2. PTX [device]
 *   3. Memory, transfers, weights [host]
 *   4. Embedding, norms, RoPE [kernel]
 *   5. GEMM on mma.sync [kernel]
 *   6. GEMM on wgmma [kernel]
 *   7. GEMM for small M, and choosing a GEMM [kernel]
 *   7b. Experts [kernel]
 *   7c. Adapters [kernel]
 *   8. Attention: the work list [host]
 *   9. Attention: the kernels [kernel]
 *   9b. Multi-head latent attention [kernel]
 *  10. Ranks: groups and transfers [kernel]
 *  11. LM head, and sampling of plain rows [kernel]
 *  12. Sampling of filtered rows, and the op [kernel]
 *  13. The GPU, opening and closing [host]
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
/* Bodies of kernels that need sm_90a. For other GPUs they compile to a trap and never run. */
#define HOPPER 1
#define IN_CLUSTERS(n) __cluster_dims__(n, 1, 1)
#else
#define HOPPER 0
#define IN_CLUSTERS(n)
#endif
#ifndef NVCC_VERSION /* test/nvcc_versions.py sets it, to compile as with another nvcc */
#define NVCC_VERSION (__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__)
#endif

/* ===========================================================================
 * MARK: 1. Types and the device [host]
 * The types of the backend, the device object with the first error, and the launch of a kernel:
 * directly, or as a node of a CUDA graph.
 * =========================================================================== */

typedef __nv_bfloat16 bf16;

/* STEPS_IN_FLIGHT: at most two steps are in flight (begun and not finished). One runs, the other is
 * queued on the stream. So the host spends the 0.5 to 0.9 ms for the launch of a step while the GPU
 * runs the previous one. A third step gains nothing: test/results/kernel-choices.md.
 *
 * STEP_RING_SIZE: per-step rings have one more entry, because the idle time before a step is
 * measured from the end of the previous step, which may be finished. */
enum { STEPS_IN_FLIGHT = 2, STEP_RING_SIZE = STEPS_IN_FLIGHT + 1 };

/* The upload buffer: double-buffered pinned host memory, and device buffers of the same layout. A
 * half is the host and the device buffer of one step. One copy uploads all inputs of a step (9 KB
 * for 64 sequences, 726 KB for 8,192) while the previous step runs. So the upload costs no time
 * (chapter 3). upload_put returns a device address. Kernels that are launched after upload_send can
 * read the data there. */
typedef struct upload_buffer {
    char *host[STEPS_IN_FLIGHT], *device[STEPS_IN_FLIGHT];
    /* The copy stream. NULL: there is one device buffer, and copies run on dev->stream. */
    cudaStream_t stream;
    int current;                       /* index of the half that is being filled */
    size_t used, cap;                  /* bytes of one half */
    cudaEvent_t sent[STEPS_IN_FLIGHT]; /* end of the copy: the host buffer may be filled again */
} upload_buffer;

typedef struct weight { /* a matrix on the device; N and K are multiples of 8 */
    bf16 *data;         /* [N][K]; with scale: e4m3, a byte an element, rows of fp8_row_bytes(K) */
    const float *bias;  /* [N] or NULL */
    int N, K;
    /* NULL: bf16. Else e4m3: [N] a scale for each row, or with is_blocked [ceil(K/128)]
     * [ceil(N/128)][2]: for 128 columns of K and 128 rows a scale of the even groups of 8 rows
     * (gate), and one of the odd groups (up). In other matrices both are equal */
    const float *scale;
    bool is_blocked;
    float x_scale;      /* e4m3: the static scale of x; 0: each row of x has its own */
    bool is_mxfp4;      /* data: blocks of 128 rows x 64 columns (chapter 7b); only of experts */
    int first_part;     /* of its matrices, number of the first one in lora_block (chapter 7c) */
} weight;

typedef struct expert_router { /* how a token's experts are chosen (toka_moe) */
    int n_experts, top_k;
    toka_router_kind kind;
    int n_groups, top_groups; /* n_groups 1: no groups */
    bool renormalize, groups_by_top2;
    float scale;
    const float *bias, *choice_bias; /* [n_experts] or NULL */
} expert_router;
typedef struct layer_experts { /* the feed-forward of a layer with experts (chapter 7b) */
    expert_router router;
    weight logits;              /* [n_experts][E], and one more row if there is a shared gate */
    weight gate_up, down;       /* of all experts, one below the other; N: rows of one */
    weight shared_gate_up, shared_down; /* data NULL: there is no shared expert */
    bool has_shared_gate;
    float limit;                /* of TOKA_SWIGLU_CLAMPED; 0: the activation is TOKA_SILU */
} layer_experts;

typedef struct latent_weights { /* of a layer with MLA (chapter 9b) */
    const toka_mla *sizes;     /* its sizes and eps; NULL: the layer has plain attention */
    weight q_b;                /* [H*(nope+rope)][q_rank]; data NULL: q has no latent vector */
    const float *q_norm;       /* [q_rank] or NULL */
    const float *kv_norm;      /* [latent] */
    /* [H] a block for each head: W_uk^T [latent][nope], then W_uv [v][latent] */
    bf16 *up;
} latent_weights;

typedef struct layer_weights {
    /* With MLA qkv is q_a and kv_a, or q_b and kv_a; else q, k and v. */
    weight qkv, o, gate_up, down;
    latent_weights mla;
    layer_experts *experts;            /* NULL: gate_up and down are the layer's MLP */
    const float *attn_norm, *mlp_norm; /* [E] or NULL: the op reads x itself */
    const float *attn_post_norm, *mlp_post_norm; /* [E] or NULL: of their outputs */
    const float *q_norm, *k_norm;      /* [D] or NULL */
    const float *q_norm_all, *k_norm_all; /* [H*D], [K*D]: one norm of all heads; or NULL */
    const float2 *rope;                /* its RoPE table (chapter 4) */
    bool is_gelu;                      /* its MLP has GELU in place of SiLU */
    const float *sinks;                /* [H] or NULL: attention sinks (chapter 9) */
    int window;                        /* positions of the sliding window; 0: all positions */
} layer_weights;

typedef struct step_rows { /* rows of the current step; device pointers into the upload buffer */
    int T;
    const int *ids, *pos, *kv_slot; /* [T] token ids, positions, cache positions */
    const toka_copy *copies;        /* pages to copy before the step stores any K or V */
    /* the same in the layers with a window; without windowed pages equal to kv_slot and copies */
    const int *windowed_slot;
    const toka_copy *windowed_copies;
} step_rows;

/* Events of the steps in flight, in rings. cuda_finish waits for `done` with blocking sync: the
 * thread sleeps. Spinning was not faster, with 1 sequence and with 64.
 *
 * Every CLOCK_STEP_INTERVAL-th step is a timed step: an event follows each op. A timed step is
 * launched kernel by kernel and takes 0.4 ms longer than a graph. So among steps that could run as
 * graphs only every (CLOCK_STEP_INTERVAL * CLOCK_GRAPH_FACTOR)-th is timed. */
enum { CLOCK_STEP_INTERVAL = 64, CLOCK_GRAPH_FACTOR = 4 };
typedef struct step_clock {
    cudaEvent_t begun[STEP_RING_SIZE], done[STEP_RING_SIZE];
    cudaEvent_t *op_ends; /* [n_op_ends] one event after each op of the timed step */
    char *op_kind;        /* [n_op_ends] the op before that event: 0 .. TOKA_N_OPS-1 */
    /* timed_index: ring index of the timed step; -1: no timed step is in flight */
    int n_op_ends, cap_op_ends, timed_index;
    int64_t n_begun, n_done; /* steps since open */
    toka_times times;
} step_clock;

/* Decode steps run as CUDA graphs, captured at open (chapter 15). There is one graph for each graph
 * size and graph kind, and without tensor ranks one more that has only the body of the step, for
 * held steps (toka.h): their LM head is launched kernel by kernel, once it may. A graph size is a
 * number of rows: a smaller step is padded to it with padding rows. The graph kind is the number of
 * attention launches per layer, except for kind 0. If layers with and without a window need
 * different numbers, it is the larger one; the others have nodes without work (attn_no_work).
 *
 * Kind 0 has one launch of attn_cluster_split per layer; only small sizes have this kind. It is a
 * kind of its own because a kernel node keeps its cluster size when it gets another kernel. A
 * kernel without clusters would lose the CTAs that do not fill a cluster.
 *
 * Before each replay a graph is adapted to the step:
 *   - The variable nodes get another kernel, grid and arguments. The attention nodes get the
 *     kernels of the step's work list. The last one or two nodes get the sampling kernels for plain
 *     rows or for filtered rows.
 *   - The upload nodes (graph_upload_node) keep their kernels. Their inputs lie at fixed offsets in
 *     the upload buffer. Their pointers into it are set to its current half.
 *   - All other nodes stay as captured. */
enum {
    GRAPH_MAX_ROWS = 1024,
    GRAPH_N_SIZES = 15,
    GRAPH_MAX_ATTENTION = 6,
    GRAPH_N_KINDS = GRAPH_MAX_ATTENTION + 1,
    GRAPH_N_WHOLE = GRAPH_N_SIZES * GRAPH_N_KINDS, /* graphs of whole steps; then those of bodies */
    GRAPH_SAMPLE_NODES = 2
};
/* What launch_by_role does with a kernel:
 *   LAUNCH   launches it
 *   RECORD   launches it and records its node as a variable node (during capture)
 *   UPDATE   launches nothing and stores it in the next variable node (before a replay) */
enum graph_role { GRAPH_ROLE_LAUNCH, GRAPH_ROLE_RECORD, GRAPH_ROLE_UPDATE };
/* Limits of the kernels in graphs. A kernel has fewer than GRAPH_MAX_ARGUMENTS arguments, which
 * hold at most GRAPH_MAX_POINTERS pointers into the upload buffer. The argument sizes of
 * GRAPH_CACHED_KERNELS kernels are cached. */
enum { GRAPH_MAX_ARGUMENTS = 24, GRAPH_MAX_POINTERS = 8, GRAPH_CACHED_KERNELS = 16 };
typedef struct graph_upload_node { /* a node that keeps its kernel and reads the upload buffer */
    cudaGraphNode_t node;
    cudaKernelNodeParams params;
    char **arg_block; /* addresses of the arguments, then the arguments, each 8-byte aligned */
    /* [n_upload_ptrs] the words of arg_block that point into the upload buffer */
    char **upload_ptrs[GRAPH_MAX_POINTERS];
    int n_upload_ptrs;
} graph_upload_node;
typedef struct graph_kernel { /* a kernel and the sizes of its arguments */
    const void *function;
    size_t arg_bytes[GRAPH_MAX_ARGUMENTS]; /* [n_args] */
    int n_args;
} graph_kernel;
typedef struct step_graph {
    cudaGraph_t cuda_graph;
    cudaGraphExec_t exec; /* NULL: not captured */
    /* [n_variable_nodes] in launch order: attention of all layers, then the nodes of the last op
     * (at most GRAPH_SAMPLE_NODES) */
    cudaGraphNode_t *variable_nodes;
    int n_variable_nodes;
    graph_upload_node *upload_nodes; /* [n_upload_nodes] */
    /* upload_current: the half of the upload buffer that the upload nodes read now */
    int n_upload_nodes, upload_current;
    int n_barriers; /* rank barriers in the last op (chapter 10) */
} step_graph;
typedef struct step_graphs {
    bool capturing;       /* the current step is being captured */
    enum graph_role role; /* the role of the kernels that are launched now */
    step_graph *current;  /* graph of the current step; NULL: it is launched kernel by kernel */
    int next_node;        /* index of the next variable node to update */
    /* next_capture: index in `all` of the next graph to capture. n_captured: captured graphs. */
    int next_capture, n_captured;
    double capture_s;         /* seconds that all captures took */
    size_t free_bytes_before; /* free memory of the GPU before the first capture */
    int64_t n_graph_steps;    /* steps that ran as graphs */
    graph_kernel kernels[GRAPH_CACHED_KERNELS];
    int n_kernels;         /* entries written so far to `kernels`, which is a ring */
    toka_step padded_step; /* the current step, padded to a graph size; its arrays follow */
    int ids[GRAPH_MAX_ROWS], pos[GRAPH_MAX_ROWS], kv_slot[GRAPH_MAX_ROWS];
    int windowed_slot[GRAPH_MAX_ROWS];
    toka_sample_row samples[GRAPH_MAX_ROWS];
    step_graph all[2 * GRAPH_N_WHOLE]; /* [whole, body][size][kind] */
} step_graphs;

struct expert_scratch; /* chapter 7b */
struct lora_state; /* chapter 7c */
struct attn_plan;  /* chapter 8 */
struct samp_plan;  /* chapter 11 */
struct cuda_group; /* chapter 10 */
struct group_rank; /* chapter 10 */

enum { BARRIER_MAX_RANKS = TOKA_GPU_MAX_TP };

struct signal_flag; /* chapter 10 */
/* What a kernel needs for a rank barrier: CTA b of a kernel waits for CTA b of the same kernel on
 * every tensor rank (chapter 10). Each CTA numbers its rank barriers. */
typedef struct rank_barrier {
    int tp_rank, tp_size;
    unsigned *counts;      /* [BARRIER_CTAS] of this rank: number of the last barrier of each CTA */
    volatile int *aborted; /* host memory; not 0: the group is broken */
    /* [2] in host memory. [0]: number of the last barrier at which CTA 0 arrived. [1]: number of
     * the last barrier that CTA 0 passed. */
    volatile unsigned *progress;
    /* [rank] array [BARRIER_CTAS][BARRIER_MAX_RANKS] in the memory of that rank */
    signal_flag *signal_flags[BARRIER_MAX_RANKS];
    char *recv_buffers[BARRIER_MAX_RANKS]; /* [rank] group_recv_bytes() bytes in its memory */
} rank_barrier;

/* Memory that can be given back (--enable-sleep-mode): addresses that stay, so that CUDA graphs and
 * tensor maps stay valid, and blocks of GPU memory behind them (chapter 3). */
typedef struct sleep_block {
    size_t at, bytes; /* from the pool's base */
    CUmemGenericAllocationHandle memory;
} sleep_block;
typedef struct sleep_pool {
    const char *what;        /* for messages */
    char *base;              /* NULL: nothing was allocated */
    size_t reserved;         /* bytes of addresses */
    size_t mapped, used;     /* bytes that have blocks; that are allocated */
    sleep_block *blocks;     /* [n_blocks] */
    int n_blocks, n_present; /* the first n_present blocks have memory */
    bool keeps;              /* a copy is kept while the pool sleeps */
    char *copy;              /* [mapped] pinned host memory; it is kept for the next time */
    bool is_copied;          /* copy has what the pool had */
} sleep_pool;
typedef struct sleep_driver { /* functions of libcuda, which is not linked */
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*free)(CUdeviceptr, size_t);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
} sleep_driver;

struct toka_device {
    toka_device_options options;
    const toka_shape *shape;
    const toka_weights *weights;
    toka_err error;        /* the first error; code 0: none */
    char description[320]; /* what cuda_describe returns */
    int E, F, V;           /* the shape's, rounded up to multiples of 8; the padding is zero */
    int ordinal;           /* number of the GPU in the CUDA runtime */
    int arch, n_sms;       /* arch: 80, 89, 90 ... */
    int max_smem;          /* bytes of shared memory that a CTA can have */
    int max_clusters_of_4; /* Hopper: clusters of four GEMM CTAs that can be resident at once */
    bool hopper;           /* the wgmma and TMA kernels are used */
    bool has_fp8;          /* some matrices are e4m3 */
    bool has_mxfp4;        /* the experts are MXFP4 */
    bool unpacks_fp8;      /* some FP8 matrices of the files are bf16 here */
    bool unpacks_int4;     /* the same of int4 */
    cudaStream_t stream;
    cudaStream_t nccl_stream; /* of NCCL's calls; only with options.can_sleep */
    /* cuTensorMapEncodeTiled of the driver */
    CUresult (*encode_map)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
    layer_weights *layers;       /* [L], host */
    bf16 *embed;                 /* [V][E] */
    const float *norm;           /* [E] */
    weight lm_head;              /* [V][E] */
    bf16 *kv_pool;               /* [L][page][kv head][K, V][B][D]; of layers with FP8 K and V
                                    pages of kv_page_bytes */
    size_t kv_layer_elems;       /* elements of one layer of kv_pool without FP8 */
    size_t kv_windowed_elems;    /* of one with windowed pages */
    uint32_t kv_fp8[8];          /* a bit for each layer: it has FP8 K and V */
    uint32_t kv_windowed[8];     /* the same: its pages are windowed pages (toka.h) */
    int *kv_ids;                 /* [page][B] id of the token of each kv_slot; NULL before the last
                                    stage */
    bf16 *xn, *qkv, *act;        /* scratch: [T][E] normed rows, [T][(H+2K)*D], [T][F] */
    bf16 *gate_up;               /* scratch [T][2F] of layers with GELU, and with adapters; NULL:
                                    there are none */
    /* Scratch of layers with MLA, or NULL: [T][q_rank] q's normed latent vectors,
     * [T][H*(nope+rope)] q, [T][H*v] values. Rows are as long as the next GEMM needs. */
    bf16 *mla_low, *mla_q, *mla_values;
    float *row_sumsq;            /* scratch: [FUSE_NORM_MAX_ROWS][ceil(E / 16)] */
    float *x_scale;              /* scratch: [T] scales of the rows of x of an FP8 GEMM */
    expert_scratch *experts;     /* NULL: the model has no experts */
    lora_state *lora;            /* NULL: no adapters can be loaded */
    upload_buffer upload;
    step_rows rows;
    int *last_tokens;            /* [n_seqs] the last sampled token of each seq */
    step_clock clock;
    step_graphs graphs;
    const toka_step *step;       /* the current step; for a graph, padded to the graph size */
    int last_begun, last_finished; /* ring indices of the step begun last, and finished last */
    attn_plan *attn;             /* of the layers without a window; of all layers if all have one */
    attn_plan *attn_windowed;    /* of the layers with a window, if there are others; else NULL */
    samp_plan *samp;
    size_t free_at_open;         /* bytes of GPU memory that were free when the device was opened */
    int64_t weight_bytes;        /* bytes of GPU memory that the weights take */
    void **allocations;          /* [n_allocations] pointers from cudaMalloc */
    int n_allocations;
    sleep_pool sleep_pools[2];   /* of the weights, of K and V; only with options.can_sleep */
    sleep_pool *pool;            /* dev_alloc allocates from it; NULL: from cudaMalloc */
    sleep_driver driver;
    /* Debugging. Steps until a kernel traps (fault) or does not end (stall); 0: never. */
    int steps_to_fault, steps_to_stall;
    int captures_to_fault;       /* debugging: captures until one fails; 0: never */
    const void *prepared_kernels[64]; /* [n_prepared_kernels] done by launch_prepare */
    int n_prepared_kernels;
    cuda_group *group;           /* NULL: the model has one rank */
    group_rank *rank;            /* this rank's entry in the group */
    char rank_prefix[72];        /* "rank 1 (stage 0, tensor rank 1): ", or empty */
    rank_barrier barrier;        /* used if there are several tensor ranks */
    int barrier_ctas;            /* grid of every kernel with a rank barrier */
    /* group_n_barriers when an op was last written to rank->op_ring */
    unsigned barriers_at_last_op;
    cudaStream_t send_stream;    /* pipeline stages: DMA copies to other ranks */
    cudaEvent_t sampled_event;   /* tensor rank 0 of the last stage: end of sampling, after which
                                    last_tokens can be sent */
};

/* Stores the first error. Later errors are consequences of it and are dropped. */
static void latch_error(toka_device *dev, cudaError_t code, const char *what) {
    if (code == cudaSuccess || dev->error.code) return;
    dev->error.code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(dev->error.msg, sizeof dev->error.msg, "GPU: %s%s: %s", dev->rank_prefix, what,
             cudaGetErrorString(code));
}
#define CHECK_LAUNCH(dev, what) latch_error(dev, cudaGetLastError(), what) /* after every <<<>>> */

/* Called after an op or a part of an op. Records an event if the step is timed (chapter 13). */
static void clock_record_op(toka_device *dev, int op) {
    step_clock *clk = &dev->clock;
    if (clk->timed_index != dev->last_begun || dev->error.code) return;
    assert(clk->n_op_ends < clk->cap_op_ends);
    clk->op_kind[clk->n_op_ends] = (char)op;
    latch_error(dev, cudaEventRecord(clk->op_ends[clk->n_op_ends++], dev->stream), "step");
}

/* Prepares a kernel before its first launch on a device. Allows it all the shared memory that a CTA
 * can have: CUDA requires this opt-in above 48 KB. All devices (toka_device) of this process that
 * use the same GPU share the setting, so all of them set the same maximum.
 *
 * On Hopper it also sets the largest shared memory carveout, the same for all kernels. An SM must
 * be empty before its carveout can change, so kernels with different carveouts could not
 * overlap. */
static void launch_prepare(toka_device *dev, const char *what, const void *kernel) {
    int index = 0, capacity = sizeof dev->prepared_kernels / sizeof *dev->prepared_kernels;
    while (index < dev->n_prepared_kernels && dev->prepared_kernels[index] != kernel) index++;
    if (index < dev->n_prepared_kernels) return;
    cudaFuncAttributes attributes = {};
    latch_error(dev, cudaFuncGetAttributes(&attributes, kernel), what);
    const int max_dynamic = dev->max_smem - (int)attributes.sharedSizeBytes;
    latch_error(dev,
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     max_dynamic),
                what);
    const cudaFuncAttribute carveout = cudaFuncAttributePreferredSharedMemoryCarveout;
    if (dev->hopper)
        latch_error(dev, cudaFuncSetAttribute(kernel, carveout, cudaSharedmemCarveoutMaxShared),
                    what);
    /* if the list is full, the attributes are set at each launch */
    if (index < capacity) dev->prepared_kernels[dev->n_prepared_kernels++] = kernel;
}

/* True if the current step runs as a graph. Its ops launch nothing but copies of pages and between
 * stages, and its last op launches the graph. */
static bool graph_is_replay(const toka_device *dev) {
    return dev->graphs.current && !dev->graphs.capturing;
}

/* Is the current graph one of the body of a step? */
static bool graph_is_body(const toka_device *dev) {
    return dev->graphs.current && dev->graphs.current - dev->graphs.all >= GRAPH_N_WHOLE;
}

/* True if the current step runs as a graph, its LM head, too. */
static bool graph_has_head(const toka_device *dev) {
    return graph_is_replay(dev) && !graph_is_body(dev);
}

/* Returns the attention launches per layer of the current graph (graph kinds: enum above). */
static int graph_n_attention(const toka_device *dev) {
    return max(1, (int)(dev->graphs.current - dev->graphs.all) % GRAPH_N_KINDS);
}

/* Launches the graph of the current step, if the step has one. Called in the last op. */
static void graph_launch(toka_device *dev) {
    if (graph_is_replay(dev) && !dev->error.code)
        latch_error(dev, cudaGraphLaunch(dev->graphs.current->exec, dev->stream), "step");
}

/* During capture: records the node of the kernel that was captured last as a variable node. */
static void graph_record_node(toka_device *dev) {
    cudaStreamCaptureStatus status;
    const cudaGraphNode_t *last;
    const cudaGraphEdgeData *edges;
    size_t n = 0;
#if CUDART_VERSION >= 13000
    latch_error(dev, cudaStreamGetCaptureInfo(dev->stream, &status, NULL, NULL, &last, &edges, &n),
                "capture");
#else
    latch_error(dev,
                cudaStreamGetCaptureInfo_v3(dev->stream, &status, NULL, NULL, &last, &edges, &n),
                "capture");
#endif
    assert(dev->error.code || n == 1);
    if (!dev->error.code)
        dev->graphs.current->variable_nodes[dev->graphs.current->n_variable_nodes++] = *last;
}
/* Before a replay: sets kernel, grid and arguments of the next variable node. */
static void graph_update_node(toka_device *dev, const cudaLaunchConfig_t *config,
                              const void *kernel, void **arguments) {
    step_graph *graph = dev->graphs.current;
    cudaKernelNodeParams params = {};
    params.func = (void *)kernel, params.gridDim = config->gridDim,
    params.blockDim = config->blockDim;
    params.sharedMemBytes = (unsigned)config->dynamicSmemBytes, params.kernelParams = arguments;
    assert(dev->graphs.next_node < graph->n_variable_nodes);
    latch_error(dev,
                cudaGraphExecKernelNodeSetParams(
                    graph->exec, graph->variable_nodes[dev->graphs.next_node++], &params),
                "step");
}
/* Launches a kernel or stores it in a graph node, as graph_role says. */
static void launch_by_role(toka_device *dev, const char *what, const cudaLaunchConfig_t *config,
                           const void *kernel, void **arguments) {
    if (dev->graphs.role == GRAPH_ROLE_UPDATE) graph_update_node(dev, config, kernel, arguments);
    else latch_error(dev, cudaLaunchKernelExC(config, kernel, arguments), what);
    if (dev->graphs.role == GRAPH_ROLE_RECORD && !dev->error.code) graph_record_node(dev);
}

/* Keeps a parameter out of template argument deduction (std::type_identity of C++20). */
template <class T> struct type_identity { typedef T type; };

/* The CTAs and threads of a launch. */
typedef struct launch_shape {
    dim3 grid;
    int threads;     /* per CTA */
    size_t smem = 0; /* bytes of dynamic shared memory per CTA */
    int cluster = 1; /* CTAs per cluster; 1: no clusters */
} launch_shape;

/* Launches a kernel.
 *
 * On Hopper kernels use programmatic dependent launch: a kernel may start while the previous kernel
 * still runs. Therefore these rules hold:
 *   - A thread calls grid_wait() before it reads data that an earlier kernel writes, and before it
 *     overwrites data that an earlier kernel reads.
 *   - Every kernel calls grid_wait(), even one that reads no data of an earlier kernel. Otherwise
 *     kernel n could end while kernel n-1 still runs, and grid_wait() of kernel n+1 would not wait
 *     for kernel n-1.
 *   - Only data that no kernel of the stream writes, mostly weights, may be read before
 *     grid_wait().
 *
 * Clusters are placed by the load balancing policy. With the default policy and dependent launches
 * the CTAs of a kernel end up two per SM on half of the SMs, and the CTAs of the next kernel on the
 * other half. Load balancing makes the small-M GEMMs (gemm_smallm_kernel) 23 to 44 % faster:
 * test/results/kernel-choices.md. */
template <class... P>
static void launch_dependent(toka_device *dev, const char *what, void (*kernel)(P...),
                             launch_shape shape, typename type_identity<P>::type... args) {
    cudaLaunchAttribute attributes[3] = {};
    cudaLaunchConfig_t config = {};
    void *pointers[] = {(void *)&args...};
    launch_prepare(dev, what, (const void *)kernel);
    config.gridDim = shape.grid, config.blockDim = dim3((unsigned)shape.threads);
    config.dynamicSmemBytes = shape.smem, config.stream = dev->stream, config.attrs = attributes;
    if (dev->hopper) {
        attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[0].val.programmaticStreamSerializationAllowed = 1;
        config.numAttrs = 1;
    }
    if (shape.cluster > 1) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {(unsigned)shape.cluster, 1, 1};
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
        attributes[config.numAttrs++].val.clusterSchedulingPolicyPreference =
            cudaClusterSchedulingPolicyLoadBalancing;
    }
    launch_by_role(dev, what, &config, (const void *)kernel, pointers);
}

/* For tests on few GPUs: TOKA_DEBUG_SHARE_GPU=n places the ranks round-robin on the first n GPUs.
 * Returns n; 0: each rank has its own GPU. */
static int debug_shared_gpus(void) {
    const char *value = getenv("TOKA_DEBUG_SHARE_GPU");
    return value ? max(0, atoi(value)) : 0;
}
/* For tests: TOKA_DEBUG_NO_PEER=1: the GPU of a rank cannot access the memory of other ranks. */
static bool debug_no_peer(void) {
    const char *value = getenv("TOKA_DEBUG_NO_PEER");
    return value && atoi(value);
}

/* The number in the CUDA runtime of the GPU that a device with these options uses. */
static int cuda_ordinal(const toka_device_options *options) {
    return debug_shared_gpus() ? options->index % debug_shared_gpus() : options->index;
}

static inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
static inline int round_up_8(int n) { return (n + 7) & ~7; }
/* Returns the bytes from one row of an e4m3 matrix with K columns to the next. */
static inline int fp8_row_bytes(int K) { return (K + 15) & ~15; }

/* ===========================================================================
 * MARK: 2. PTX [device]
 * One small function per PTX instruction. Most functions have the name of their instruction.
 * Addresses of shared memory are 32-bit integers (smem_addr).
 * =========================================================================== */

__device__ static inline uint32_t smem_addr(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- Arithmetic ---- */

__device__ static inline float ex2(float x) { /* 2^x, relative error 2^-22, 0 for -inf */
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/* tanh, absolute error 2^-21: 1 - 2 / (1 + e^2x). */
__device__ static inline float tanh_of(float x) {
    return 1 - __fdividef(2, 1 + ex2(2 * (float)M_LOG2E * x));
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
__device__ static inline float bf16_high(uint32_t pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

/* ---- mma.sync and the loads of its operands (sm_80 and later) ---- */

/* d[16][8] += a[16][16] b[16][8]. Lane l holds the columns 2(l%4) + {0,1} of d: of row l/4 in
 * d[0] and d[1], of row l/4 + 8 in d[2] and d[3]. */
__device__ static inline void mma_16816(float d[4], const uint32_t a[4], const uint32_t b[2]) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
/* Loads four 8x8 matrices of 2-byte elements. Lane 8i+j gives the address of row j of matrix i. A
 * row has 16 bytes. */
__device__ static inline void ldmatrix_x4(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
/* ldmatrix_x4 that also transposes each matrix. */
__device__ static inline void ldmatrix_x4_trans(uint32_t r[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
/* Transposes an 8x8 matrix of 2-byte elements. Lane l holds the elements (l/4, 2(l%4)+{0,1}),
 * before and after. */
__device__ static inline uint32_t movmatrix_trans(uint32_t x) {
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(x));
    return x;
}
/* Copies 16 bytes to shared memory. Only the bytes 0 .. n-1 are read (n: 0 to 16); the others
 * become zero. */
__device__ static inline void cp_async_16(uint32_t to, const void *from, int n) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(n)
                 : "memory");
}
/* cp_async_16 for data that is read once: with policy = l2_evict_first_policy() L2 evicts it
 * first. */
__device__ static inline void cp_async_16_evict_first(uint32_t to, const void *from, int n,
                                                      uint64_t policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(n), "l"(policy) : "memory");
}
__device__ static inline uint64_t l2_evict_first_policy() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
/* Prefetches one cache line to L2. Used for small data that a kernel reads late, for example a
 * bias. The other weights of the step have evicted it from L2. Prefetching the biases of QKV makes
 * a step 0.3 to 1.5 % faster: test/results/kernel-choices.md. */
__device__ static inline void l2_prefetch(const void *from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}
__device__ static inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

/* ---- Programmatic dependent launch: a kernel may start before the previous one has ended ---- */

/* Waits until the previous kernel of the stream has ended and its writes are visible. Every kernel
 * calls this, so all earlier kernels have ended, too (launch_dependent). */
__device__ static inline void grid_wait() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/* The next kernel may start when every CTA of this kernel has called this or has ended. */
__device__ static inline void grid_launch_dependents() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Arrives at the named barrier `id` and waits for `threads` threads (whole warps) of the CTA. */
__device__ static inline void bar_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

#if HOPPER
/* ---- mbarrier ---- */

/* count: number of arrivals that complete a phase. */
__device__ static inline void mbar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
/* Makes mbar_init visible to the other CTAs of the cluster and to TMA. */
__device__ static inline void mbar_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Arrives, and makes the phase wait for `bytes` more bytes. */
__device__ static inline void mbar_expect_tx(uint32_t bar, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}
/* Arrives at the mbarrier at the same offset in CTA `cta` of the cluster. Used after wgmma that
 * have finished reading a buffer. The default semantics are .release.cta: writes of this thread do
 * not become visible to the other CTA, and none have to. .release.cluster would make them visible,
 * but its fence takes as long as the wgmma of one K block. */
__device__ static inline void mbar_arrive_remote(uint32_t bar, int cta) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r];}"
                 ::"r"(bar), "r"(cta) : "memory");
}
/* Waits until the phase with this parity has completed. On a new mbarrier a wait for parity 1
 * returns at once. */
__device__ static inline void mbar_wait(uint32_t bar, int parity) {
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(bar), "r"(parity) : "memory");
}

/* ---- TMA ---- */

__device__ static inline void tma_prefetch_map(const CUtensorMap *m) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(m) : "memory");
}
/* Loads a box of a tensor map to shared memory. c0, c1: coordinates of the first element of the
 * box, innermost dimension first. When the box has arrived, its bytes count on the mbarrier
 * `bar`. */
__device__ static inline void tma_load_2d(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0,
                                          int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1) : "memory");
}
/* The cache policy evict_first as TMA takes it: the value that createpolicy.fractional makes for
 * all of the data (CUTLASS: TMA::CacheHintSm90::EVICT_FIRST). As a constant it costs no
 * instruction. */
constexpr uint64_t TMA_EVICT_FIRST = 0x12F0000000000000ull;

/* tma_load_2d for data that is read once: L2 evicts it first. */
__device__ static inline void tma_load_2d_evict_first(uint32_t to, const CUtensorMap *m,
                                                      uint32_t bar, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1),
                 "l"(TMA_EVICT_FIRST)
                 : "memory");
}
typedef struct tma_coords5 {
    int c[5]; /* coordinates of the first element of a box, innermost dimension first */
} tma_coords5;
/* tma_load_2d for five dimensions. */
__device__ static inline void tma_load_5d(uint32_t to, const CUtensorMap *m, uint32_t bar,
                                          tma_coords5 at) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(m), "r"(bar), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]),
                 "r"(at.c[4])
                 : "memory");
}
/* tma_load_2d_evict_first for five dimensions. */
__device__ static inline void tma_load_5d_evict_first(uint32_t to, const CUtensorMap *m,
                                                      uint32_t bar, tma_coords5 at) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
        "l"(m), "r"(bar), "r"(at.c[0]), "r"(at.c[1]), "r"(at.c[2]), "r"(at.c[3]), "r"(at.c[4]),
        "l"(TMA_EVICT_FIRST)
        : "memory");
}
/* TMA multicast: loads the box to the same offset of the shared memory of every CTA in `mask`, and
 * signals the mbarrier at the same offset in each of these CTAs. */
__device__ static inline void tma_load_2d_multicast(uint32_t to, const CUtensorMap *m, uint32_t bar,
                                                    int c0, int c1, uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 " [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(m), "r"(bar), "r"(c0), "r"(c1),
                 "h"(mask) : "memory");
}
/* Loads n bytes to shared memory; n is a multiple of 16. They count on the mbarrier `bar`. */
__device__ static inline void bulk_load(uint32_t to, const void *from, int n, uint32_t bar) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(from), "r"(n), "r"(bar) : "memory");
}
/* Prefetches n bytes to L2; n is a multiple of 16. */
__device__ static inline void bulk_prefetch(const void *from, int n) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(n) : "memory");
}
/* Stores a box from shared memory to global memory. */
__device__ static inline void tma_store_2d(const CUtensorMap *m, uint32_t from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(m), "r"(from), "r"(c0), "r"(c1) : "memory");
}
__device__ static inline void tma_store_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Waits until at most N committed groups of this thread still read shared memory. After N = 0 the
 * thread may overwrite the shared memory of all its stores. */
template <int N> __device__ static inline void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Waits until all committed stores of this thread have been written to global memory. */
__device__ static inline void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/* Makes ordinary stores to shared memory visible to wgmma and TMA (the async proxy). Each thread
 * that has stored calls this before the barrier that orders the stores and the wgmma or TMA. */
__device__ static inline void fence_async_smem() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- Warpgroups and clusters ---- */

/* setmaxnreg_dec and setmaxnreg_inc set the registers per thread of this warpgroup to N. _dec
 * releases registers. _inc waits until enough registers are free. */
template <int N> __device__ static inline void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ static inline void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
/* Arrives at a named barrier without waiting (see bar_sync). */
__device__ static inline void bar_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* True in one lane of the warp. All 32 lanes must call it. The compiler knows that only one lane is
 * active then, which it does not know of `lane == 0`. So it makes no loop over the lanes for
 * instructions with uniform registers, for example TMA. */
__device__ static inline bool elect_one() {
    uint32_t one;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
    return one != 0;
}
/* Index of this CTA in its cluster. */
__device__ static inline int cluster_rank() {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ static inline float4 smem_load_float4(uint32_t at) { /* 16 bytes */
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
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
__device__ static inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ static inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Arrives at a barrier when this thread's copies by cp.async so far have completed. */
__device__ static inline void cp_async_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
/* Stores an 8 x 8 matrix transposed: lane l < 8 has the address of column l. */
__device__ static inline void stmatrix_trans(uint32_t at, uint32_t values) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(at),
                 "r"(values)
                 : "memory");
}

/* Matrix descriptor of a K-major tile at `at`: rows of 128 bytes, 128-byte swizzle, base aligned to
 * 1,024 bytes. Each group of 8 rows takes 1,024 bytes. The next 16 columns start 32 bytes later.
 * Their descriptor is this one + 2, because it counts in units of 16 bytes. */
__device__ static inline uint64_t wgmma_desc(uint32_t at) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* Matrix descriptor of 8 rows at `at` without a swizzle: their first 16 bytes, one row behind the
 * other, then `step` bytes further their next 16 bytes ... */
__device__ static inline uint64_t wgmma_desc_8_rows(uint32_t at, int step) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(step >> 4) << 16 | (uint64_t)1 << 32;
}

/* ---- wgmma: d[64][N] (+)= a[64][16] b[N][16]^T by one warpgroup ----
 *
 * Accumulators: warp w of the warpgroup holds the rows 16w .. 16w+15. Block j of columns is 8
 * columns wide. Lane l holds of it
 *
 *   d[4j], d[4j+1]     row 16w + l/4,     columns 8j + 2(l%4) + {0,1}
 *   d[4j+2], d[4j+3]   row 16w + l/4 + 8, the same columns
 *
 * Attention needs P as the A operand of the product P V. The accumulators of two blocks j (even)
 * and j + 1, packed to bf16, are the registers a[4] for 16 columns of P.
 *
 * Order of the calls: wgmma_fence, any number of wgmma_ss and wgmma_rs, wgmma_commit, wgmma_wait.
 * No other instruction may use d (or a in registers) between wgmma_fence and the end of wgmma_wait.
 * scale_d 0: d is overwritten; scale_d 1: the product is added to d. */

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
#define WG_AT_8(i)                                                                                 \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),    \
        "+f"(d[i + 6]), "+f"(d[i + 7])
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
/* The operands %0 .. %(H-1) are the H = n / 2 accumulator registers. The other arguments are the
 * numbers of the operands after them. A: descriptor of a; A0 .. A3: registers of a; B: descriptor
 * of b; S: scale_d; T: TRANS_B. */
#define WG_SS(n, H, A, B, S, T)                                                                    \
    if constexpr (N == n)                                                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S ", 0; wgmma.mma_async.sync.aligned.m64n" #n  \
                 "k16.f32.bf16.bf16"                                                               \
                 " {" WG_REGS_##H "}, %" #A ", %" #B ", p, 1, 1, 0, %" #T ";}"                     \
                 : WG_ACC_##H                                                                      \
                 : "l"(a), "l"(b), "r"(scale_d), "n"(TRANS_B))
#define WG_RS(n, H, A0, A1, A2, A3, B, S, T)                                                       \
    if constexpr (N == n)                                                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S ", 0; wgmma.mma_async.sync.aligned.m64n" #n  \
                 "k16.f32.bf16.bf16"                                                               \
                 " {" WG_REGS_##H "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B                 \
                                  ", p, 1, 1, %" #T ";}"                                           \
                 : WG_ACC_##H                                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d), "n"(TRANS_B))

#define WG_SS_FP8(n, H, A, B, S)                                                                   \
    if constexpr (N == n)                                                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S ", 0; wgmma.mma_async.sync.aligned.m64n" #n  \
                 "k32.f32.e4m3.e4m3"                                                               \
                 " {" WG_REGS_##H "}, %" #A ", %" #B ", p, 1, 1;}"                                 \
                 : WG_ACC_##H                                                                      \
                 : "l"(a), "l"(b), "r"(scale_d))

/* a and b are descriptors of tiles in shared memory. TRANS_B 0: b is stored as [N][16]
 * (wgmma_desc). TRANS_B 1: b is stored as [16][N] in panels of 64 columns (wgmma_desc_trans). */
template <int N, int TRANS_B = 0>
__device__ static inline void wgmma_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 ||
                  N == 160 || N == 192 || N == 224 || N == 256);
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
/* d[64][N] (+)= a[64][32] b[N][32]^T with e4m3 operands: the same bytes as 16 columns of bf16. The
 * sum of such an instruction keeps 14 bits and is cut, not rounded
 * (test/results/trials-fp8-promotion.md). */
template <int N>
__device__ static inline void wgmma_ss_fp8(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128);
    WG_SS_FP8(8, 4, 4, 5, 6);
    WG_SS_FP8(16, 8, 8, 9, 10);
    WG_SS_FP8(32, 16, 16, 17, 18);
    WG_SS_FP8(64, 32, 32, 33, 34);
    WG_SS_FP8(128, 64, 64, 65, 66);
}
/* wgmma_ss with a in registers. */
template <int N, int TRANS_B = 0>
__device__ static inline void wgmma_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                       int scale_d) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 80 || N == 96 || N == 128 ||
                  N == 160 || N == 192 || N == 224 || N == 256);
    WG_RS(8, 4, 4, 5, 6, 7, 8, 9, 10);
    WG_RS(16, 8, 8, 9, 10, 11, 12, 13, 14);
    WG_RS(32, 16, 16, 17, 18, 19, 20, 21, 22);
    WG_RS(64, 32, 32, 33, 34, 35, 36, 37, 38);
    WG_RS(80, 40, 40, 41, 42, 43, 44, 45, 46);
    WG_RS(96, 48, 48, 49, 50, 51, 52, 53, 54);
    WG_RS(128, 64, 64, 65, 66, 67, 68, 69, 70);
    WG_RS(160, 80, 80, 81, 82, 83, 84, 85, 86);
    WG_RS(192, 96, 96, 97, 98, 99, 100, 101, 102);
    WG_RS(224, 112, 112, 113, 114, 115, 116, 117, 118);
    WG_RS(256, 128, 128, 129, 130, 131, 132, 133, 134);
}
/* Keeps the compiler from moving reads of d above the preceding wgmma_wait (CUTLASS:
 * warpgroup_fence_operand). */
template <int N> __device__ static inline void wgmma_fence_operand(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
/* Matrix descriptor of b for TRANS_B = 1: panels of 64 columns, rows of 128 bytes, 128-byte
 * swizzle, base aligned to 1,024 bytes. Each group of 8 rows takes 1,024 bytes. Panels lie
 * `panel_bytes` apart. The next 16 rows start 2,048 bytes later: add 128 to the descriptor. */
__device__ static inline uint64_t wgmma_desc_trans(uint32_t at, int panel_bytes) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(panel_bytes >> 4) << 16 |
           (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
}
/* The barrier of all threads of a cluster: arrive, wait, and both. The relaxed arrival orders no
 * memory accesses. barrier.cluster.arrive.release would add a fence for the whole GPU. */
__device__ static inline void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ static inline void cluster_wait() {
    asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}
__device__ static inline void cluster_sync_relaxed() { cluster_arrive_relaxed(), cluster_wait(); }
/* Maps a shared memory address of this CTA to the same offset in CTA `cta` of the cluster. */
__device__ static inline uint32_t mapa(uint32_t at, int cta) {
    uint32_t r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(at), "r"(cta));
    return r;
}
/* Stores 16 bytes from registers to the shared memory of another CTA and signals the mbarrier `bar`
 * there. `to` and `bar` are addresses from mapa, both in the same CTA. */
__device__ static inline void st_async_16(uint32_t to, const float v[4], uint32_t bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];"
                 ::"r"(to), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(bar) : "memory");
}
/* st_async_16 with 8 bytes. */
__device__ static inline void st_async_8(uint32_t to, float x, float y, uint32_t bar) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1,%2}, [%3];"
                 ::"r"(to), "f"(x), "f"(y), "r"(bar) : "memory");
}
__device__ static inline void smem_store_16(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
/* Stores four accumulators from their registers, without copying them first. */
__device__ static inline void smem_store_float4(uint32_t at, const float v[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(at), "f"(v[0]), "f"(v[1]), "f"(v[2]),
                 "f"(v[3])
                 : "memory");
}
__device__ static inline uint4 smem_load_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
/* Stores four 8x8 matrices of 2-byte elements. Lane 8i+j gives the address of row j of matrix i. A
 * row has 16 bytes. */
__device__ static inline void stmatrix_x4(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2,
                                          uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                 ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
#endif

/* ===========================================================================
 * MARK: 3. Memory, transfers, weights [host]
 * Allocation of GPU memory, the upload of a step's inputs, and the loading of the weights.
 * =========================================================================== */

/* Stores in *function a function of libcuda, which is not linked. */
static void driver_find(toka_device *dev, const char *name, void **function) {
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    latch_error(dev,
                cudaGetDriverEntryPointByVersion(name, function, 12000, cudaEnableDefault, &found),
                name);
#else
    latch_error(dev, cudaGetDriverEntryPoint(name, function, cudaEnableDefault, &found), name);
#endif
    if (found != cudaDriverEntryPointSuccess) latch_error(dev, cudaErrorNotSupported, name);
}

/* ---- Memory that can be given back ----
 *
 * A sleep_pool reserves as many addresses as the GPU has memory, and maps blocks of memory to them
 * as it grows. To sleep unmaps and releases the blocks; to wake creates blocks of the same sizes
 * and maps them to the same addresses. Allocations are never freed one by one. */

enum { SLEEP_BLOCK_BYTES = 64 << 20, SLEEP_ALIGN = 512 };

static void sleep_open(toka_device *dev, size_t gpu_bytes) {
    sleep_driver *driver = &dev->driver;
    const struct {
        const char *name;
        void **function;
    } functions[] = {{"cuMemAddressReserve", (void **)&driver->reserve},
                     {"cuMemAddressFree", (void **)&driver->free},
                     {"cuMemCreate", (void **)&driver->create},
                     {"cuMemRelease", (void **)&driver->release},
                     {"cuMemMap", (void **)&driver->map},
                     {"cuMemUnmap", (void **)&driver->unmap},
                     {"cuMemSetAccess", (void **)&driver->set_access}};
    for (const auto &function : functions)
        if (!dev->error.code) driver_find(dev, function.name, function.function);
    for (sleep_pool &pool : dev->sleep_pools)
        pool.reserved = (gpu_bytes + SLEEP_BLOCK_BYTES) / SLEEP_BLOCK_BYTES * SLEEP_BLOCK_BYTES;
    dev->sleep_pools[0].what = "weights", dev->sleep_pools[0].keeps = true;
    dev->sleep_pools[1].what = "KV cache";
}

/* Creates the memory of a block and maps it. */
static CUresult sleep_map(toka_device *dev, sleep_pool *pool, sleep_block *block) {
    const CUdeviceptr at = (CUdeviceptr)(pool->base + block->at);
    CUmemAllocationProp properties = {};
    CUmemAccessDesc access = {};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = access.location.id = dev->ordinal;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CUresult code = dev->driver.create(&block->memory, block->bytes, &properties, 0);
    if (code) return code;
    code = dev->driver.map(at, block->bytes, 0, block->memory, 0);
    const bool is_mapped = !code;
    if (!code) code = dev->driver.set_access(at, block->bytes, &access, 1);
    if (!code) return code;
    if (is_mapped) dev->driver.unmap(at, block->bytes);
    dev->driver.release(block->memory);
    return code;
}

/* Unmaps and releases all blocks of the pool. */
static void sleep_unmap(toka_device *dev, sleep_pool *pool) {
    while (pool->n_present) {
        const sleep_block *block = &pool->blocks[--pool->n_present];
        dev->driver.unmap((CUdeviceptr)(pool->base + block->at), block->bytes);
        dev->driver.release(block->memory);
    }
}

/* Maps the blocks that have no memory. After an error the pool has none. */
static CUresult sleep_map_all(toka_device *dev, sleep_pool *pool) {
    CUresult code = CUDA_SUCCESS;
    for (; pool->n_present < pool->n_blocks && !code; pool->n_present += !code)
        code = sleep_map(dev, pool, &pool->blocks[pool->n_present]);
    if (code) sleep_unmap(dev, pool);
    return code;
}

/* Adds a block of at least `bytes`. */
static CUresult sleep_grow(toka_device *dev, sleep_pool *pool, size_t bytes) {
    CUdeviceptr base = (CUdeviceptr)pool->base;
    CUresult code = base ? CUDA_SUCCESS
                         : dev->driver.reserve(&base, pool->reserved, SLEEP_BLOCK_BYTES, 0, 0);
    if (code) return code;
    pool->base = (char *)base;
    bytes = (bytes + SLEEP_BLOCK_BYTES - 1) / SLEEP_BLOCK_BYTES * SLEEP_BLOCK_BYTES;
    if (bytes > pool->reserved - pool->mapped) return CUDA_ERROR_OUT_OF_MEMORY;
    pool->blocks = (sleep_block *)realloc(pool->blocks,
                                          (size_t)(pool->n_blocks + 1) * sizeof *pool->blocks);
    if (!pool->blocks) abort();
    pool->blocks[pool->n_blocks] = sleep_block{pool->mapped, bytes, 0};
    code = sleep_map(dev, pool, &pool->blocks[pool->n_blocks]);
    if (!code) pool->n_blocks++, pool->n_present++, pool->mapped += bytes;
    return code;
}

/* Allocates from the pool. The same allocations after `used` was set to 0 have the same
 * addresses. */
static cudaError_t sleep_alloc(toka_device *dev, sleep_pool *pool, void **out, size_t bytes) {
    bytes = (bytes + SLEEP_ALIGN - 1) / SLEEP_ALIGN * SLEEP_ALIGN;
    if (bytes > pool->mapped - pool->used) {
        const CUresult code = sleep_grow(dev, pool, pool->used + bytes - pool->mapped);
        if (code)
            return code == CUDA_ERROR_OUT_OF_MEMORY ? cudaErrorMemoryAllocation : cudaErrorUnknown;
    }
    *out = pool->base + pool->used;
    pool->used += bytes;
    return cudaSuccess;
}

static void sleep_close(toka_device *dev) {
    for (sleep_pool &pool : dev->sleep_pools) {
        if (pool.base) sleep_unmap(dev, &pool);
        if (pool.base) dev->driver.free((CUdeviceptr)pool.base, pool.reserved);
        if (pool.copy) cudaFreeHost(pool.copy);
        free(pool.blocks);
    }
}

/* Fills an error without latching it: the device stays as it is. */
static int sleep_fail(const toka_device *dev, const sleep_pool *pool, bool no_memory,
                      const char *doing, toka_err *e) {
    size_t free_bytes = 0, total = 0;
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total);
    e->code = no_memory ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(e->msg, sizeof e->msg,
             "GPU: %s%s: cannot %s: %.2f GB, and %.2f of %.2f GB of the GPU are free",
             dev->rank_prefix, pool->what, doing, pool->mapped / 1e9, free_bytes / 1e9,
             total / 1e9);
    return e->code;
}

/* Copies the pool to pinned host memory. */
static int sleep_copy(toka_device *dev, sleep_pool *pool, toka_err *e) {
    if (!pool->copy && cudaHostAlloc((void **)&pool->copy, pool->mapped, cudaHostAllocDefault)) {
        pool->copy = NULL;
        return sleep_fail(dev, pool, true, "allocate pinned memory of the host for a copy", e);
    }
    if (cudaMemcpy(pool->copy, pool->base, pool->used, cudaMemcpyDeviceToHost))
        return sleep_fail(dev, pool, false, "copy them to the host", e);
    pool->is_copied = true;
    return 0;
}

/* Returns the pool if `parts` has it and it is used, else NULL. */
static sleep_pool *sleep_pool_of(toka_device *dev, int parts, int i) {
    sleep_pool *pool = &dev->sleep_pools[i];
    return parts & (i ? TOKA_PART_KV : TOKA_PART_WEIGHTS) && pool->base ? pool : NULL;
}

static int cuda_sleep(toka_device *dev, int parts, bool drop_weights, toka_err *e) {
    if (cudaSetDevice(dev->ordinal) || cudaStreamSynchronize(dev->stream))
        return sleep_fail(dev, &dev->sleep_pools[0], false, "wait for the GPU", e);
    for (int i = 0; i < 2; i++) {
        sleep_pool *pool = sleep_pool_of(dev, parts, i);
        if (!pool) continue;
        if (pool->n_present && pool->keeps && !drop_weights && sleep_copy(dev, pool, e))
            return e->code;
        sleep_unmap(dev, pool);
        if (!drop_weights || !pool->keeps) continue;
        if (pool->copy) cudaFreeHost(pool->copy);
        pool->copy = NULL, pool->is_copied = false;
    }
    return 0;
}

static int cuda_wake(toka_device *dev, int parts, toka_err *e) {
    if (cudaSetDevice(dev->ordinal))
        return sleep_fail(dev, &dev->sleep_pools[0], false, "reach the GPU", e);
    for (int i = 0; i < 2; i++) {
        sleep_pool *pool = sleep_pool_of(dev, parts, i);
        if (!pool || pool->n_present) continue;
        const CUresult code = sleep_map_all(dev, pool);
        if (code)
            return sleep_fail(dev, pool, code == CUDA_ERROR_OUT_OF_MEMORY, "take the memory again",
                              e);
        if (pool->keeps ? pool->is_copied && cudaMemcpy(pool->base, pool->copy, pool->used,
                                                        cudaMemcpyHostToDevice)
                        : cudaMemset(pool->base, 0, pool->used)) {
            sleep_unmap(dev, pool);
            return sleep_fail(dev, pool, false, "fill the memory", e);
        }
        pool->is_copied = false;
    }
    return cudaDeviceSynchronize() ? sleep_fail(dev, &dev->sleep_pools[0], false, "wake up", e) : 0;
}

/* Allocates GPU memory. cuda_close frees it. On failure stores the error and returns NULL. */
static void *dev_alloc(toka_device *dev, size_t bytes, const char *what) {
    void *memory = NULL;
    if (dev->error.code) return NULL;
    cudaError_t code = dev->pool ? sleep_alloc(dev, dev->pool, &memory, bytes ? bytes : 1)
                                 : cudaMalloc(&memory, bytes ? bytes : 1);
    if (code == cudaErrorMemoryAllocation) {
        size_t free_bytes = 0, total = 0;
        cudaGetLastError();
        cudaMemGetInfo(&free_bytes, &total);
        dev->error.code = TOKA_E_MEMORY;
        snprintf(dev->error.msg, sizeof dev->error.msg,
                 "GPU: %s%s: %.2f GB asked for, %.2f of %.2f GB are free", dev->rank_prefix, what,
                 bytes / 1e9, free_bytes / 1e9, total / 1e9);
        return NULL;
    }
    latch_error(dev, code, what);
    if (code) return NULL;
    if (dev->pool) return memory;
    void **allocations = (void **)realloc(dev->allocations,
                                          (size_t)(dev->n_allocations + 1) * sizeof *allocations);
    if (!allocations) abort();
    dev->allocations = allocations;
    dev->allocations[dev->n_allocations++] = memory;
    return memory;
}

/* ---- Upload of a step's inputs ---- */

/* own_stream: copies run on a copy stream, and dev->stream waits for them. Step n is uploaded to
 * half n % 2 while step n-1 still reads the other half. Step n-2 has read this half, but it is
 * finished. Without own_stream both halves use one device buffer, and copies run on dev->stream. */
static void upload_open(toka_device *dev, upload_buffer *upload, size_t cap, bool own_stream) {
    *upload = upload_buffer{.cap = cap};
    if (own_stream && !dev->error.code)
        latch_error(dev, cudaStreamCreateWithFlags(&upload->stream, cudaStreamNonBlocking),
                    "step buffer");
    for (int i = 0; i < STEPS_IN_FLIGHT && !dev->error.code; i++) {
        upload->device[i] = i && !own_stream ? upload->device[0]
                                             : (char *)dev_alloc(dev, cap, "step buffer");
        latch_error(dev, cudaHostAlloc((void **)&upload->host[i], cap, cudaHostAllocDefault),
                    "pinned step buffer");
        latch_error(dev,
                    cudaEventCreateWithFlags(&upload->sent[i],
                                             cudaEventDisableTiming | cudaEventBlockingSync),
                    "pinned step buffer");
    }
}
/* Frees the host memory, the events and the stream. cuda_close frees the device buffers. */
static void upload_close(upload_buffer *upload) {
    if (upload->stream) cudaStreamDestroy(upload->stream);
    for (int i = 0; i < STEPS_IN_FLIGHT; i++) {
        cudaFreeHost(upload->host[i]);
        if (upload->sent[i]) cudaEventDestroy(upload->sent[i]);
    }
    *upload = upload_buffer{};
}
/* Switches to the other half and waits until the last copy from its host buffer has ended. */
static void upload_begin(toka_device *dev, upload_buffer *upload) {
    upload->current = (upload->current + 1) % STEPS_IN_FLIGHT;
    latch_error(dev, cudaEventSynchronize(upload->sent[upload->current]), "step upload");
    upload->used = 0;
}

/* Allocates `bytes` in the current half, 16-byte aligned. Sets *host to the memory to fill and
 * returns the device address. The bytes always fit, because `cap` is computed for the largest
 * step. */
static void *upload_alloc(upload_buffer *upload, size_t bytes, void **host) {
    size_t offset = (upload->used + 15) & ~(size_t)15;
    assert(offset + bytes <= upload->cap);
    upload->used = offset + bytes;
    *host = upload->host[upload->current] + offset;
    return upload->device[upload->current] + offset;
}
/* Copies `bytes` into the upload buffer and returns their device address. */
static void *upload_put(upload_buffer *upload, const void *from, size_t bytes) {
    void *host, *device_addr = upload_alloc(upload, bytes, &host);
    if (bytes) memcpy(host, from, bytes);
    return device_addr;
}

/* Starts the upload of the current half, in one copy.
 *
 * With a copy stream the upload runs concurrently with the previous step and costs no time: steps
 * without any upload are not faster (test/results/kernel-choices.md). So nothing is gained if the
 * state of each sequence stays on the device and less is uploaded. Retired: sampling parameters
 * that stayed on the device made small steps 2 us longer, because of one more dependent read.
 *
 * dev->stream waits for the upload before the first kernel of the step. So all kernels of the step
 * may read the upload buffer before grid_wait(). */
static void upload_send(toka_device *dev, upload_buffer *upload) {
    const cudaStream_t stream = upload->stream ? upload->stream : dev->stream;
    latch_error(dev,
                cudaMemcpyAsync(upload->device[upload->current], upload->host[upload->current],
                                upload->used, cudaMemcpyHostToDevice, stream),
                "step upload");
    latch_error(dev, cudaEventRecord(upload->sent[upload->current], stream), "step upload");
    if (upload->stream)
        latch_error(dev, cudaStreamWaitEvent(dev->stream, upload->sent[upload->current], 0),
                    "step upload");
}

/* ---- Weights: mapped file -> pinned buffers -> device ----
 *
 * Each tensor is split into pieces of at most LOAD_PIECE_BYTES. LOAD_THREADS threads take pieces
 * from one queue (half as many threads if more than four devices load at the same time). For each
 * piece a thread does this:
 *   - It copies the piece from the mapped file into one of its two pinned buffers. Page faults
 *     happen in this copy. As there are several threads, several page faults are served at once.
 *   - It enqueues two operations on its own stream: the copy to the device, and, if the piece has
 *     to be converted or rearranged, the kernel that does this and stores it in the target.
 *
 * The host holds no copy of the weights but these buffers. Loading is as fast as the page cache or
 * the bus, whichever is slower. */

enum { LOAD_THREADS = 8, LOAD_PIECE_BYTES = 2 << 20 };

/* The order in which the elements of a head of q and k are on the device: those of pair p of RoPE
 * are at p and p + D/2. The elements that do not rotate have the places that are left, in their
 * order. So the kernels know one kind of RoPE. A score is the same in any order. */
typedef struct head_order {
    int D;           /* 0: the model's order */
    int dims;        /* elements that rotate */
    bool neighbours; /* as in toka_rope */
} head_order;
static head_order head_order_of(const toka_rope *rope, int D) {
    const bool same = !rope || (rope->dims == D && !rope->neighbours);
    return same ? head_order{} : head_order{D, rope->dims, rope->neighbours};
}
/* Returns the place on the device of row `row` of q or k: element row % D of a head. */
__host__ __device__ static inline int head_place(const head_order &order, int row) {
    if (!order.D) return row;
    const int half = order.D / 2, pairs = order.dims / 2, i = row % order.D, head0 = row - i;
    if (i >= order.dims) {
        const int rest = i - order.dims, low = half - pairs;
        return head0 + (rest < low ? pairs + rest : half + pairs + rest - low);
    }
    const int pair = order.neighbours ? i / 2 : i % pairs,
              is_high = order.neighbours ? i % 2 : i / pairs;
    return head0 + pair + is_high * half;
}

/* How kv_b of MLA lies on the device: latent_weights.up. nope 0: the matrix is not a kv_b. */
typedef struct up_blocks {
    int nope, v, latent;
} up_blocks;
/* Returns the elements of a head's block. */
__host__ __device__ static inline size_t up_block_size(const up_blocks &up) {
    return (size_t)(up.nope + up.v) * up.latent;
}
/* Returns the place of element (row, col) of kv_b. */
__host__ __device__ static inline size_t up_place(const up_blocks &up, int row, int col) {
    const int head = row / (up.nope + up.v), i = row % (up.nope + up.v);
    return head * up_block_size(up) + (i < up.nope ? (size_t)col * up.nope + i
                                                   : (size_t)i * up.latent + col);
}

typedef struct load_job { /* a tensor, or a slice of a tensor, and its target */
    const toka_tensor *from;
    void *to;         /* the target: a matrix bf16 [.][stride], or a vector float32 */
    int stride;       /* columns of the target; for a matrix rounded up to a multiple of 8 */
    bool f32;         /* the target is float32 */
    int row0;         /* first row in the target */
    bool interleaved; /* row r goes to row0 + r/8*16 + r%8: 8 rows of gate, then 8 rows of up */
    bool fp8;         /* the target is e4m3: the bytes of the file, stride bytes a row */
    bool mxfp4;       /* the target is MXFP4 in blocks (load_mxfp4_kernel), stride columns wide */
    /* e4m3 to bf16: device memory [rows][n_groups], a scale for each group_cols columns; the tensor
     * begins at column first_col of a group */
    float *scales;
    int n_groups, group_cols, first_col;
    head_order heads; /* of q and k: their rows are moved; of their vectors, the columns */
    up_blocks up;     /* of kv_b */
    float add, factor; /* f32: a number v becomes (v + add) * factor; factor 0: 1 */
} load_job;

typedef struct weight_loader {
    toka_device *dev;
    load_job *jobs; /* [n_jobs] */
    int n_jobs, cap_jobs;
    /* bytes in the file of all jobs, and of the pieces that threads have taken. `lock` guards
     * done_bytes and the fields below. */
    size_t total_bytes, done_bytes;
    int next_job;     /* index of the job that the next piece is from */
    size_t next_elem; /* first element of the next piece in the tensor of that job */
    toka_err error;   /* the first error of any thread */
    pthread_mutex_t lock;
} weight_loader;

/* The loader counts in elements of the file. An element of MXFP4 is a byte, which holds two
 * columns. int4 becomes bf16 when a thread of the loader reads it, so its elements are bf16. */
static bool load_is_mxfp4(const toka_tensor *tensor) { return tensor->dtype == TOKA_MXFP4; }
static bool load_is_int4(const toka_tensor *tensor) { return tensor->dtype == TOKA_INT4; }
/* Returns the bytes of an element in the file. */
static size_t load_elem_bytes(const toka_tensor *tensor) {
    return tensor->dtype == TOKA_F32                              ? 4
           : tensor->dtype == TOKA_FP8 || load_is_mxfp4(tensor) ? 1
                                                                  : 2;
}
/* Returns the elements of `cols` columns. */
static size_t load_elems(const toka_tensor *tensor, int cols) {
    return (size_t)cols / (load_is_mxfp4(tensor) ? 2 : 1);
}
/* Returns the elements of all rows. */
static size_t load_all_elems(const toka_tensor *tensor) {
    return (size_t)tensor->rows * load_elems(tensor, tensor->cols);
}
/* Returns the elements from one row of a tensor to the next, and the bytes of row 0. */
static size_t load_row_stride(const toka_tensor *tensor) {
    return tensor->quant ? load_elems(tensor, tensor->quant->cols) * tensor->row_step
                         : (size_t)tensor->stride;
}
static const char *load_first_row(const toka_tensor *tensor) {
    const size_t first = tensor->quant ? tensor->row0 * load_elems(tensor, tensor->quant->cols) +
                                             load_elems(tensor, tensor->col0)
                                       : 0;
    return (const char *)tensor->data + first * load_elem_bytes(tensor);
}
/* Returns number i of an array in the file. type: F32, F16 or BF16. */
static float load_number(const void *array, size_t i, toka_dtype type) {
    const char *at = (const char *)array + i * (type == TOKA_F32 ? 4 : 2);
    float value;
    bf16 value_bf16;
    __half value_f16;
    if (type == TOKA_F32) return memcpy(&value, at, 4), value;
    if (type == TOKA_F16) return memcpy(&value_f16, at, 2), __half2float(value_f16);
    return memcpy(&value_bf16, at, 2), __bfloat162float(value_bf16);
}
/* Returns the scale of row `row` and group `group` of an e4m3 tensor. The groups are those of the
 * whole matrix: group_cols columns each. */
static float load_scale(const toka_tensor *tensor, int row, int group) {
    const toka_quant *quant = tensor->quant;
    const size_t block_row = (size_t)(tensor->row0 + row * tensor->row_step) / quant->block_rows,
                 i = block_row * quant->scale_row_step + (size_t)group * quant->scale_col_step;
    return load_number(quant->scale, i, quant->scale_dtype);
}
/* Uploads the scales with which an e4m3 tensor becomes bf16. */
static void load_upload_scales(toka_device *dev, load_job *job) {
    const toka_tensor *from = job->from;
    job->group_cols = from->quant->block_cols, job->first_col = from->col0 % job->group_cols;
    job->n_groups = ceil_div(job->first_col + from->cols, job->group_cols);
    const size_t n = (size_t)from->rows * job->n_groups;
    float *scales = (float *)malloc(n * sizeof *scales);
    if (!scales) abort();
    for (size_t i = 0; i < n; i++)
        scales[i] = load_scale(from, (int)(i / job->n_groups),
                               from->col0 / job->group_cols + (int)(i % job->n_groups));
    if (!dev->error.code)
        latch_error(dev, cudaMalloc((void **)&job->scales, n * sizeof *scales), "weights");
    if (!dev->error.code)
        latch_error(dev,
                    cudaMemcpy(job->scales, scales, n * sizeof *scales, cudaMemcpyHostToDevice),
                    "weights");
    free(scales);
}

/* Adds a job and returns it, until the next call; NULL: the tensor is absent. */
static load_job *load_add_job(weight_loader *loader, const toka_tensor *from, void *to, int stride,
                              bool f32, int row0, bool interleaved, bool fp8 = false) {
    if (!from->rows) return NULL;
    if (loader->n_jobs == loader->cap_jobs) {
        loader->cap_jobs = loader->cap_jobs ? 2 * loader->cap_jobs : 256;
        loader->jobs = (load_job *)realloc(loader->jobs,
                                           (size_t)loader->cap_jobs * sizeof *loader->jobs);
        if (!loader->jobs) abort();
    }
    load_job *job = &loader->jobs[loader->n_jobs++];
    *job = load_job{from, to, stride, f32, row0, interleaved, fp8};
    if (from->dtype == TOKA_FP8 && !fp8) load_upload_scales(loader->dev, job);
    loader->total_bytes += load_all_elems(from) * load_elem_bytes(from);
    return job;
}

/* Returns the value of an e4m3 number: its bits are those of a half with another bias. */
__device__ static inline float fp8_value(uint8_t code) {
    const float value = __half2float(__ushort_as_half((uint16_t)(code << 8 & 0x8000 |
                                                                 (code & 0x7F) << 7)));
    return (code & 0x7F) == 0x7F ? NAN : value * 256;
}

/* raw holds the elements first_elem .. first_elem+n_elems-1 of a tensor with `cols` columns. The
 * kernel converts them to the type of the target and stores them in its rows. Grid
 * ceil(n_elems / 256), block 256: one element per thread. */
__global__ static void __launch_bounds__(256)
    load_convert_kernel(const void *raw, size_t first_elem, size_t n_elems, int cols,
                        toka_dtype dtype, load_job job) {
    size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_elems) return;
    int row = (int)((first_elem + i) / cols), col = (int)((first_elem + i) % cols);
    const int to_row = job.interleaved ? row / 8 * 16 + row % 8
                                       : head_place(job.f32 ? head_order{} : job.heads, row);
    const size_t to = job.up.nope ? up_place(job.up, row, col)
                                  : (size_t)(job.row0 + to_row) * job.stride +
                                        head_place(job.f32 ? job.heads : head_order{}, col);
    if (job.fp8) {
        ((uint8_t *)job.to)[to] = ((const uint8_t *)raw)[i];
        return;
    }
    if (dtype == TOKA_FP8) {
        const float scale = job.scales[(size_t)row * job.n_groups +
                                       (job.first_col + col) / job.group_cols];
        ((bf16 *)job.to)[to] = __float2bfloat16(fp8_value(((const uint8_t *)raw)[i]) * scale);
        return;
    }
    float value = dtype == TOKA_F32   ? ((const float *)raw)[i]
                  : dtype == TOKA_F16 ? __half2float(((const __half *)raw)[i])
                                      : __bfloat162float(((const bf16 *)raw)[i]);
    if (job.f32) ((float *)job.to)[to] = (value + job.add) * (job.factor != 0 ? job.factor : 1);
    else ((bf16 *)job.to)[to] = __float2bfloat16(value);
}

/* A block of MXFP4 on the device: 128 rows x 64 columns. First come 16 bytes for each of the 256
 * threads that unpack it (mxfp4_unpack), then the scales: those of rows r and r + 8 side by side.
 *
 *   bytes of thread t     rows 16 (t/32) + t/4%8 (words 0, 1) and the row + 8 (words 2, 3); a word
 *                         has 8 of 32 columns: 2q, 2q+1, 2q+8, 2q+9 and these + 16, q = t%4. These
 *                         are the A operands of two wgmmas
 *   a word                4 pairs of columns. The even column of each is in the low half. In a half
 *                         the sizes of pairs 0 .. 3 have their lowest bits at 6, 3, 0, 9, and the
 *                         signs are bits 15, 12, 13, 14 */
enum { MXFP4_ROWS = 128, MXFP4_COLS = 64, MXFP4_SCALES_AT = 4096, MXFP4_BLOCK_BYTES = 4096 + 256 };
/* Largest E8M0 scale that mxfp4_unpack can apply: 2. */
enum { MXFP4_MAX_SCALE = 128 };

/* Returns a pair of codes, a byte of the file, at its place in a word. */
__device__ static inline uint32_t mxfp4_place_pair(uint32_t codes, int pair) {
    const int size_at = pair == 3 ? 9 : 6 - 3 * pair, sign_at = pair == 0 ? 15 : 11 + pair;
    const uint32_t low = (codes & 7) << size_at | (codes >> 3 & 1) << sign_at,
                   high = (codes >> 4 & 7) << size_at | (codes >> 7 & 1) << sign_at;
    return low | high << 16;
}
/* Stores n blocks of 32 columns of an MXFP4 tensor, from the first_block-th on. codes: 16 bytes
 * each, as in the file. Block 256: a block of columns per thread. */
__global__ static void __launch_bounds__(256)
    load_mxfp4_kernel(const uint4 *codes, const uint8_t *scales, size_t first_block, size_t n,
                      int cols, load_job job) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const int row = (int)((first_block + i) / (cols / 32)),
              block = (int)((first_block + i) % (cols / 32)),
              to_row = job.row0 + (job.interleaved ? row / 8 * 16 + row % 8 : row),
              r = to_row % MXFP4_ROWS, word = r / 8 % 2 * 2 + block % 2;
    char *to = (char *)job.to + ((size_t)(to_row / MXFP4_ROWS) * (job.stride / MXFP4_COLS) +
                                 block / 2) * MXFP4_BLOCK_BYTES;
    const uint4 from = codes[i];
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
    for (int q = 0; q < 4; q++) {
        uint32_t packed = 0;
        for (int pair = 0; pair < 4; pair++)
            packed |= mxfp4_place_pair(words[pair] >> 8 * q & 0xFF, pair);
        ((uint32_t *)to)[(r / 16 * 32 + r % 8 * 4 + q) * 4 + word] = packed;
    }
    ((uint8_t *)to)[MXFP4_SCALES_AT + (r / 16 * 8 + r % 8) * 4 + word] = scales[i];
}

/* Takes the next piece from the queue: n_elems elements of the job's tensor, from first_elem on. If
 * the tensor is int4 or a slice of the columns of a wider one, a piece is a whole number of rows.
 * Returns false if no piece is left or if a thread failed. */
static bool load_next(weight_loader *loader, load_job *job, size_t *first_elem, size_t *n_elems) {
    pthread_mutex_lock(&loader->lock);
    bool more = loader->next_job < loader->n_jobs && !loader->error.code;
    if (more) {
        *job = loader->jobs[loader->next_job], *first_elem = loader->next_elem;
        const toka_tensor *tensor = job->from;
        size_t elem_bytes = load_elem_bytes(tensor),
               total = load_all_elems(tensor), row = load_elems(tensor, tensor->cols),
               max_elems = load_is_mxfp4(tensor) ? LOAD_PIECE_BYTES / 17 * 16 /* and scales */
                                                 : LOAD_PIECE_BYTES / elem_bytes;
        const bool is_slice = tensor->rows > 1 && load_row_stride(tensor) != row,
                   by_rows = is_slice || load_is_int4(tensor);
        assert(!by_rows || max_elems >= row);
        if (by_rows) max_elems -= max_elems % row;
        *n_elems = total - *first_elem < max_elems ? total - *first_elem : max_elems;
        loader->next_elem += *n_elems, loader->done_bytes += *n_elems * elem_bytes;
        if (loader->next_elem == total) loader->next_job++, loader->next_elem = 0;
        if (loader->dev->options.progress)
            loader->dev->options.progress(loader->dev->options.user, "loading weights",
                                          (double)loader->done_bytes / loader->total_bytes);
    }
    pthread_mutex_unlock(&loader->lock);
    return more;
}

/* Unpacks n rows of an int4 tensor to bf16, from the first-th on. */
static void load_read_int4(const toka_tensor *tensor, size_t first, size_t n, bf16 *to) {
    float *row = (float *)malloc((size_t)tensor->cols * sizeof *row);
    if (!row) abort();
    for (size_t i = 0; i < n; i++) {
        toka_weight_row(tensor, (int)(first + i), row);
        for (int col = 0; col < tensor->cols; col++) *to++ = __float2bfloat16(row[col]);
    }
    free(row);
}
/* Copies the elements first_elem .. first_elem+n_elems-1 of a tensor from the mapped file to `to`,
 * without the gaps between the rows of a slice. */
static void load_read(const toka_tensor *tensor, size_t first_elem, size_t n_elems, char *to) {
    size_t elem_bytes = load_elem_bytes(tensor), cols = load_elems(tensor, tensor->cols);
    const char *data = load_first_row(tensor);
    if (load_is_int4(tensor)) load_read_int4(tensor, first_elem / cols, n_elems / cols, (bf16 *)to);
    else if (tensor->rows == 1 || load_row_stride(tensor) == cols)
        memcpy(to, data + first_elem * elem_bytes, n_elems * elem_bytes);
    else
        for (size_t i = 0; i < n_elems; i += cols)
            memcpy(to + i * elem_bytes,
                   data + (first_elem + i) / cols * load_row_stride(tensor) * elem_bytes,
                   cols * elem_bytes);
}

/* Copies the scales of n blocks of an MXFP4 tensor, from the first-th on. Returns whether a scale
 * is too large. */
static bool load_read_scales(const toka_tensor *tensor, size_t first, size_t n, uint8_t *to) {
    const toka_quant *quant = tensor->quant;
    const size_t blocks = (size_t)tensor->cols / 32;
    bool too_large = false;
    for (size_t i = 0; i < n; i++) {
        const size_t row = tensor->row0 + (first + i) / blocks * tensor->row_step,
                     block = tensor->col0 / 32 + (first + i) % blocks;
        to[i] = ((const uint8_t *)quant->scale)[row * quant->scale_row_step +
                                                block * quant->scale_col_step];
        too_large |= to[i] > MXFP4_MAX_SCALE;
    }
    return too_large;
}
/* Loads one piece of an MXFP4 tensor: codes, then their scales. */
static cudaError_t load_mxfp4_piece(const load_job *job, size_t first_elem, size_t n_elems,
                                    char *host_buf, char *dev_buf, cudaStream_t stream,
                                    bool *too_large) {
    const size_t first = first_elem / 16, n = n_elems / 16;
    load_read(job->from, first_elem, n_elems, host_buf);
    *too_large |= load_read_scales(job->from, first, n, (uint8_t *)host_buf + n_elems);
    cudaError_t code = cudaMemcpyAsync(dev_buf, host_buf, n_elems + n, cudaMemcpyHostToDevice,
                                       stream);
    if (code) return code;
    load_mxfp4_kernel<<<(unsigned)((n + 255) / 256), 256, 0, stream>>>(
        (const uint4 *)dev_buf, (const uint8_t *)dev_buf + n_elems, first, n, job->from->cols,
        *job);
    return cudaGetLastError();
}

/* Loads one piece. host_buf is pinned. If the elements need no conversion, padding or interleaving,
 * they are copied straight to the target. Otherwise they are copied to dev_buf, and
 * load_convert_kernel stores them. */
static cudaError_t load_piece(const load_job *job, size_t first_elem, size_t n_elems,
                              char *host_buf, char *dev_buf, cudaStream_t stream) {
    size_t elem_bytes = load_elem_bytes(job->from);
    const toka_dtype dtype = load_is_int4(job->from) ? TOKA_BF16 : job->from->dtype;
    load_read(job->from, first_elem, n_elems, host_buf);
    if ((dtype == TOKA_BF16 || job->fp8) && !job->f32 && !job->interleaved &&
        !job->heads.D && !job->up.nope && job->stride == job->from->cols)
        return cudaMemcpyAsync(
            (char *)job->to + ((size_t)job->row0 * job->stride + first_elem) * elem_bytes, host_buf,
            n_elems * elem_bytes, cudaMemcpyHostToDevice, stream);
    cudaError_t code = cudaMemcpyAsync(dev_buf, host_buf, n_elems * elem_bytes,
                                       cudaMemcpyHostToDevice, stream);
    if (code) return code;
    load_convert_kernel<<<(unsigned)((n_elems + 255) / 256), 256, 0, stream>>>(
        dev_buf, first_elem, n_elems, job->from->cols, dtype, *job);
    return cudaGetLastError();
}

/* Keeps the error if it is the first. */
static void load_fail(weight_loader *loader, int code, const char *what) {
    pthread_mutex_lock(&loader->lock);
    if (!loader->error.code) {
        loader->error.code = code;
        snprintf(loader->error.msg, sizeof loader->error.msg, "GPU: loading weights: %s", what);
    }
    pthread_mutex_unlock(&loader->lock);
}

/* A thread of the loader: loads pieces until none is left. Event reusable[i] is recorded after the
 * copy and the kernel that use buffer i. */
static void *load_thread(void *arg) {
    weight_loader *loader = (weight_loader *)arg;
    cudaStream_t stream = NULL;
    cudaEvent_t reusable[2] = {NULL, NULL};
    char *host_buf = NULL, *dev_buf = NULL;
    load_job job;
    size_t first_elem, n_elems;
    bool too_large = false;
    cudaError_t code = cudaSetDevice(loader->dev->ordinal);
    if (!code) code = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && !code; i++)
        code = cudaEventCreateWithFlags(&reusable[i], cudaEventDisableTiming);
    if (!code) code = cudaHostAlloc((void **)&host_buf, 2 * LOAD_PIECE_BYTES, cudaHostAllocDefault);
    if (!code) code = cudaMalloc((void **)&dev_buf, 2 * LOAD_PIECE_BYTES);
    for (int i = 0; !code && load_next(loader, &job, &first_elem, &n_elems); i ^= 1) {
        code = cudaEventSynchronize(reusable[i]);
        char *host = host_buf + i * LOAD_PIECE_BYTES, *device = dev_buf + i * LOAD_PIECE_BYTES;
        if (!code)
            code = job.mxfp4 ? load_mxfp4_piece(&job, first_elem, n_elems, host, device, stream,
                                                &too_large)
                             : load_piece(&job, first_elem, n_elems, host, device, stream);
        if (!code) code = cudaEventRecord(reusable[i], stream);
    }
    if (!code) code = cudaStreamSynchronize(stream);
    if (code)
        load_fail(loader, code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE,
                  cudaGetErrorString(code));
    else if (too_large) load_fail(loader, TOKA_E_INPUT, "an MXFP4 scale above 2");
    cudaFree(dev_buf), cudaFreeHost(host_buf);
    for (cudaEvent_t event : reusable)
        if (event) cudaEventDestroy(event);
    if (stream) cudaStreamDestroy(stream);
    return NULL;
}

/* Runs all jobs and frees the list. If no thread can be created, the calling thread loads. */
static void load_run(weight_loader *loader) {
    pthread_t threads[LOAD_THREADS];
    int n_started = 0;
    /* all devices load at the same time */
    const int n_threads = loader->dev->options.n_devices > 4 ? LOAD_THREADS / 2 : LOAD_THREADS;
    pthread_mutex_init(&loader->lock, NULL);
    while (n_started < n_threads && !pthread_create(&threads[n_started], NULL, load_thread, loader))
        n_started++;
    if (!n_started) load_thread(loader);
    for (int i = 0; i < n_started; i++) pthread_join(threads[i], NULL);
    pthread_mutex_destroy(&loader->lock);
    if (loader->error.code && !loader->dev->error.code) loader->dev->error = loader->error;
    for (int i = 0; i < loader->n_jobs; i++) cudaFree(loader->jobs[i].scales);
    free(loader->jobs);
}

/* ---- The model on the device ----
 *
 * The functions weight_load_* allocate GPU memory and add jobs to the loader. load_run runs the
 * jobs. */

/* Allocates n floats, rounded up to a multiple of 8, all zero. */
static float *vector_alloc(toka_device *dev, int n) {
    float *vector = (float *)dev_alloc(dev, (size_t)round_up_8(n) * sizeof(float), "weights");
    dev->weight_bytes += (int64_t)round_up_8(n) * (int64_t)sizeof(float);
    if (vector)
        latch_error(dev, cudaMemset(vector, 0, (size_t)round_up_8(n) * sizeof(float)), "weights");
    return vector;
}
/* Loads a norm or a bias. Returns NULL if the model does not have it. */
static float *weight_load_vector(toka_device *dev, weight_loader *loader,
                                 const toka_tensor *tensor) {
    if (!tensor->rows) return NULL;
    float *vector = vector_alloc(dev, tensor->cols);
    load_add_job(loader, tensor, vector, tensor->cols, true, 0, false);
    return vector;
}
/* The same of a norm, with shape.norm_offset, times factor. heads: of a norm of q or k. */
static float *weight_load_norm(toka_device *dev, weight_loader *loader, const toka_tensor *tensor,
                               float factor = 1, head_order heads = {}) {
    float *vector = weight_load_vector(dev, loader, tensor);
    if (!vector) return NULL;
    load_job *job = &loader->jobs[loader->n_jobs - 1];
    job->add = dev->shape->norm_offset, job->factor = factor, job->heads = heads;
    return vector;
}

/* The matrices of the model that one matrix on the device holds, one below the other or with their
 * rows in turns of 8 (gate and up). */
typedef struct weight_parts {
    const toka_tensor *part[3];
    int n_parts;
    bool interleaved;
    head_order heads; /* of parts 0 and 1, q and k */
} weight_parts;
/* Returns the order of the rows of part i. */
static head_order weight_part_heads(const weight_parts *parts, int i) {
    return i < 2 ? parts->heads : head_order{};
}

/* Returns the row on the device of row `row` of part i. */
static int weight_row_at(const weight_parts *parts, int i, int row) {
    if (parts->interleaved) return row / 8 * 16 + 8 * i + row % 8;
    row = head_place(weight_part_heads(parts, i), row);
    while (i--) row += parts->part[i]->rows;
    return row;
}
static int weight_rows(const weight_parts *parts) {
    int rows = 0;
    for (int i = 0; i < parts->n_parts; i++)
        rows += parts->interleaved ? round_up_8(parts->part[i]->rows) : parts->part[i]->rows;
    return round_up_8(rows);
}
/* Returns whether all parts have one scale for at least a row of all columns. */
static bool weight_has_row_scales(const weight_parts *parts) {
    for (int i = 0; i < parts->n_parts; i++)
        if (parts->part[i]->quant->block_cols < parts->part[i]->quant->cols) return false;
    return true;
}
/* Returns whether all parts have scales of blocks of 128 x 128, and each 128 rows on the device
 * have one row of blocks (gate and up: one each). */
static bool weight_has_block_scales(const weight_parts *parts) {
    const int n_slots = ceil_div(weight_rows(parts), 128) * 2;
    int *owner = (int *)calloc((size_t)n_slots, sizeof *owner); /* 0: none, else a row of blocks */
    bool ok = owner != NULL;
    for (int i = 0; i < parts->n_parts && ok; i++) {
        const toka_tensor *part = parts->part[i];
        ok = part->quant->block_rows == 128 && part->quant->block_cols == 128 &&
             part->col0 % 128 == 0;
        for (int row = 0; row < part->rows && ok; row++) {
            const int at = weight_row_at(parts, i, row), slot = at / 128 * 2 + at / 8 % 2,
                      block = (part->row0 + row * part->row_step) / 128 * 4 + i + 1;
            ok = !owner[slot] || owner[slot] == block;
            owner[slot] = block;
        }
    }
    free(owner);
    return ok;
}
/* Returns whether the parts stay e4m3 on a Hopper GPU. Else they become bf16 when they are
 * loaded. */
static bool weight_stays_fp8(const weight_parts *parts) {
    for (int i = 0; i < parts->n_parts; i++)
        if (parts->part[i]->dtype != TOKA_FP8) return false;
    return weight_has_row_scales(parts) || weight_has_block_scales(parts);
}
/* Returns the bytes of the numbers and scales of a matrix on the device. */
static size_t weight_bytes(const weight_parts *parts, bool fp8) {
    const size_t rows = (size_t)weight_rows(parts);
    const int cols = parts->part[0]->cols;
    if (!fp8) return rows * round_up_8(cols) * sizeof(bf16);
    const size_t n_scales = weight_has_row_scales(parts)
                                ? rows
                                : (size_t)ceil_div(cols, 128) * ceil_div((int)rows, 128) * 2;
    return rows * fp8_row_bytes(cols) + n_scales * sizeof(float);
}

/* Returns the number of scales of an e4m3 matrix (struct weight). */
static size_t weight_n_scales(const weight *w) {
    const size_t blocks = (size_t)ceil_div(w->K, 128) * ceil_div(w->N, 128);
    return w->is_blocked ? blocks * 2 : (size_t)w->N;
}
/* Writes the scales of an e4m3 matrix, and the static scale of x: the largest of the parts, because
 * they share x. */
static void weight_put_scales(weight *to, const weight_parts *parts, float *scales) {
    const int blocks_n = ceil_div(to->N, 128);
    for (int i = 0; i < parts->n_parts; i++) {
        const toka_tensor *part = parts->part[i];
        for (int row = 0; row < part->rows; row++) {
            const int at = weight_row_at(parts, i, row);
            if (!to->is_blocked) scales[at] = load_scale(part, row, 0);
            else if (row % 8 == 0 || parts->heads.D)
                for (int k = 0; k < ceil_div(part->cols, 128); k++)
                    scales[((size_t)k * blocks_n + at / 128) * 2 + at / 8 % 2] =
                        load_scale(part, row, part->col0 / 128 + k);
        }
        to->x_scale = fmaxf(to->x_scale, part->quant->input_scale);
    }
}
/* Sets the scales of n matrices of equal sizes, one below the other. */
static void weight_set_scales(toka_device *dev, weight *to, const weight_parts *parts, int n = 1) {
    to->is_blocked = !weight_has_row_scales(parts);
    const size_t each = weight_n_scales(to), bytes = (size_t)n * each * sizeof(float);
    float *scales = (float *)calloc((size_t)n * each, sizeof *scales);
    if (!scales) abort();
    for (int i = 0; i < n; i++) weight_put_scales(to, &parts[i], scales + (size_t)i * each);
    float *memory = (float *)dev_alloc(dev, bytes, "weights");
    if (memory)
        latch_error(dev, cudaMemcpy(memory, scales, bytes, cudaMemcpyHostToDevice), "weights");
    to->scale = memory;
    free(scales);
}

/* Allocates a matrix for the parts and adds the jobs that load it. Rows and columns are rounded up
 * to multiples of 8; the padding is zero. */
static weight weight_load_parts(toka_device *dev, weight_loader *loader,
                                const weight_parts *parts) {
    const bool fp8 = dev->hopper && weight_stays_fp8(parts);
    const int cols = parts->part[0]->cols;
    weight to = {NULL, NULL, weight_rows(parts), round_up_8(cols)};
    const int stride = fp8 ? fp8_row_bytes(cols) : to.K;
    const size_t bytes = (size_t)to.N * stride * (fp8 ? 1 : sizeof(bf16));
    bool is_padded = stride > cols;
    to.data = (bf16 *)dev_alloc(dev, bytes, "weights");
    dev->weight_bytes += (int64_t)weight_bytes(parts, fp8);
    for (int i = 0, n = 0; i < parts->n_parts; i++) {
        n += parts->part[i]->rows;
        if (i == parts->n_parts - 1) is_padded |= n < to.N;
    }
    if (to.data && is_padded) latch_error(dev, cudaMemset(to.data, 0, bytes), "weights");
    if (fp8) weight_set_scales(dev, &to, parts), dev->has_fp8 = true;
    for (int i = 0; i < parts->n_parts; i++)
        dev->unpacks_fp8 |= !fp8 && parts->part[i]->dtype == TOKA_FP8,
            dev->unpacks_int4 |= load_is_int4(parts->part[i]);
    for (int i = 0; i < parts->n_parts; i++) {
        load_job *job = load_add_job(loader, parts->part[i], to.data, stride, false,
                                     weight_row_at(parts, i, 0), parts->interleaved, fp8);
        if (job) job->heads = weight_part_heads(parts, i); /* a stage may lack the matrix */
    }
    return to;
}
/* Loads a matrix. bias: NULL, or a tensor that the model may not have. */
static weight weight_load_matrix(toka_device *dev, weight_loader *loader, const toka_tensor *from,
                                 const toka_tensor *bias) {
    const weight_parts parts = {{from}, 1, false};
    weight to = weight_load_parts(dev, loader, &parts);
    if (bias) to.bias = weight_load_vector(dev, loader, bias);
    return to;
}

static weight_parts weight_qkv_parts(const toka_shape *shape, const toka_layer *layer) {
    const toka_mla *mla = layer->mla;
    if (mla) return weight_parts{{mla->q_a.rows ? &mla->q_a : &mla->q_b, &mla->kv_a}, 2, false};
    return weight_parts{{&layer->q, &layer->k, &layer->v}, 3, false,
                        head_order_of(layer->rope, shape->D)};
}
/* Loads q, k and v into one matrix, one below the other, and their biases into one vector. If only
 * some of the three have a bias, the bias of the others is zero. */
static weight weight_load_qkv(toka_device *dev, weight_loader *loader, const toka_layer *from) {
    const weight_parts parts = weight_qkv_parts(dev->shape, from);
    const toka_tensor *biases[3] = {&from->q_bias, &from->k_bias, &from->v_bias};
    weight to = weight_load_parts(dev, loader, &parts);
    float *bias =
        biases[0]->rows || biases[1]->rows || biases[2]->rows ? vector_alloc(dev, to.N) : NULL;
    for (int i = 0; i < 3 && bias; i++) {
        load_job *job = load_add_job(loader, biases[i], bias + weight_row_at(&parts, i, 0),
                                     biases[i]->cols, true, 0, false);
        if (job) job->heads = weight_part_heads(&parts, i);
    }
    to.bias = bias;
    return to;
}
/* Loads the rest of the matrices and norms of MLA. */
static latent_weights weight_load_mla(toka_device *dev, weight_loader *loader,
                                      const toka_mla *mla) {
    latent_weights to = {.sizes = mla};
    if (mla->q_a.rows) to.q_b = weight_load_matrix(dev, loader, &mla->q_b, NULL);
    to.q_norm = weight_load_norm(dev, loader, &mla->q_a_norm);
    to.kv_norm = weight_load_norm(dev, loader, &mla->kv_a_norm);
    const size_t bytes = (size_t)mla->kv_b.rows * mla->kv_b.cols * sizeof(bf16);
    to.up = (bf16 *)dev_alloc(dev, bytes, "weights");
    dev->weight_bytes += (int64_t)bytes;
    dev->unpacks_fp8 |= mla->kv_b.dtype == TOKA_FP8;
    dev->unpacks_int4 |= load_is_int4(&mla->kv_b);
    load_add_job(loader, &mla->kv_b, to.up, mla->latent, false, 0, false)->up =
        up_blocks{mla->nope, mla->v, mla->latent};
    return to;
}
/* The matrices of an MLP or expert: gate and up, interleaved in groups of 8 rows, or down. If F was
 * rounded up, the last group of either is padded with zero rows. */
static weight_parts weight_mlp_parts(const toka_mlp *mlp, bool gate_up) {
    return gate_up ? weight_parts{{&mlp->gate, &mlp->up}, 2, true}
                   : weight_parts{{&mlp->down}, 1, false};
}
/* Returns the format of the experts' matrices of one kind on a Hopper GPU: that of the file if all
 * experts have it, and FP8 scales are of the same kind; else bf16. */
static toka_dtype weight_experts_format(const toka_moe *moe, bool gate_up) {
    const weight_parts first = weight_mlp_parts(&moe->experts[0], gate_up);
    const toka_dtype format = first.part[0]->dtype;
    for (int i = 0; i < moe->n_experts; i++) {
        const weight_parts parts = weight_mlp_parts(&moe->experts[i], gate_up);
        for (int k = 0; k < parts.n_parts; k++)
            if (parts.part[k]->dtype != format) return TOKA_BF16;
        if (format == TOKA_FP8 &&
            (!weight_stays_fp8(&parts) ||
             weight_has_row_scales(&parts) != weight_has_row_scales(&first)))
            return TOKA_BF16;
    }
    return format == TOKA_FP8 || format == TOKA_MXFP4 ? format : TOKA_BF16;
}
/* Returns the bytes of one expert's numbers on the device; e4m3 without the scales. */
static size_t weight_expert_bytes(const weight_parts *parts, toka_dtype format) {
    const size_t rows = (size_t)weight_rows(parts);
    const int cols = parts->part[0]->cols;
    if (format == TOKA_FP8) return rows * fp8_row_bytes(cols);
    if (format == TOKA_BF16) return rows * round_up_8(cols) * sizeof(bf16);
    return (size_t)ceil_div((int)rows, MXFP4_ROWS) * ceil_div(cols, MXFP4_COLS) *
           MXFP4_BLOCK_BYTES;
}
/* Loads the biases of the experts, in the order of their rows. n_rows: of an expert's matrix. */
static const float *weight_load_expert_bias(toka_device *dev, const toka_moe *moe, bool gate_up,
                                            int n_rows) {
    const toka_mlp *experts = moe->experts;
    if (!(gate_up ? experts->gate_bias : experts->down_bias).rows) return NULL;
    const size_t n = (size_t)moe->n_experts * n_rows;
    float *host = (float *)calloc(n, sizeof *host), *bias = vector_alloc(dev, (int)n);
    if (!host) abort();
    for (int i = 0; i < moe->n_experts; i++) {
        const toka_tensor *biases[2] = {gate_up ? &experts[i].gate_bias : &experts[i].down_bias,
                                        &experts[i].up_bias};
        const weight_parts parts = weight_mlp_parts(&experts[i], gate_up);
        for (int k = 0; k < parts.n_parts; k++)
            for (int row = 0; row < parts.part[k]->rows; row++)
                host[(size_t)i * n_rows + weight_row_at(&parts, k, row)] =
                    load_number(biases[k]->data, (size_t)row, biases[k]->dtype);
    }
    if (bias)
        latch_error(dev, cudaMemcpy(bias, host, n * sizeof *host, cudaMemcpyHostToDevice),
                    "weights");
    free(host);
    return bias;
}
/* Allocates one matrix for the experts, one below the other, and adds the jobs that load it. */
static weight weight_load_experts(toka_device *dev, weight_loader *loader, const toka_moe *moe,
                                  bool gate_up) {
    const int X = moe->n_experts;
    weight_parts *parts = (weight_parts *)malloc((size_t)X * sizeof *parts);
    if (!parts) abort();
    for (int i = 0; i < X; i++) parts[i] = weight_mlp_parts(&moe->experts[i], gate_up);
    const toka_dtype format = weight_experts_format(moe, gate_up);
    const bool fp8 = format == TOKA_FP8, mxfp4 = format == TOKA_MXFP4;
    const int cols = parts->part[0]->cols;
    weight to = {NULL, NULL, weight_rows(parts), round_up_8(cols)};
    const int stride = fp8     ? fp8_row_bytes(cols)
                       : mxfp4 ? ceil_div(cols, MXFP4_COLS) * MXFP4_COLS
                               : to.K;
    const size_t each = weight_expert_bytes(parts, format), bytes = (size_t)X * each;
    to.data = (bf16 *)dev_alloc(dev, bytes, "weights");
    to.is_mxfp4 = mxfp4;
    dev->weight_bytes += (int64_t)bytes;
    if (to.data) latch_error(dev, cudaMemset(to.data, 0, bytes), "weights");
    if (fp8) weight_set_scales(dev, &to, parts, X), dev->has_fp8 = true;
    for (int i = 0; i < X; i++)
        for (int part = 0; part < parts[i].n_parts; part++)
            load_add_job(loader, parts[i].part[part], (char *)to.data + (size_t)i * each, stride,
                         false, weight_row_at(&parts[i], part, 0), gate_up, fp8)
                ->mxfp4 = mxfp4;
    to.bias = weight_load_expert_bias(dev, moe, gate_up, to.N);
    dev->has_mxfp4 |= mxfp4;
    dev->unpacks_fp8 |= !fp8 && parts->part[0]->dtype == TOKA_FP8;
    dev->unpacks_int4 |= load_is_int4(parts->part[0]);
    free(parts);
    return to;
}
static layer_experts *weight_load_moe(toka_device *dev, weight_loader *loader,
                                      const toka_layer *layer) {
    const toka_moe *moe = layer->moe;
    layer_experts *to = (layer_experts *)calloc(1, sizeof *to);
    if (!to) abort();
    to->router = expert_router{moe->n_experts, moe->top_k, moe->kind,
                               moe->n_groups > 1 ? moe->n_groups : 1, moe->top_groups,
                               moe->renormalize, moe->groups_by_top2,
                               moe->scale != 0 ? moe->scale : 1,
                               weight_load_vector(dev, loader, &moe->router_bias),
                               weight_load_vector(dev, loader, &moe->choice_bias)};
    to->limit = layer->activation == TOKA_SWIGLU_CLAMPED ? dev->shape->swiglu_limit : 0;
    to->has_shared_gate = moe->shared_gate.rows > 0;
    const weight_parts logits = {{&moe->router, &moe->shared_gate}, to->has_shared_gate ? 2 : 1,
                                 false};
    to->logits = weight_load_parts(dev, loader, &logits);
    to->gate_up = weight_load_experts(dev, loader, moe, true);
    to->down = weight_load_experts(dev, loader, moe, false);
    if (!moe->shared.gate.rows) return to;
    const weight_parts gate_up = {{&moe->shared.gate, &moe->shared.up}, 2, true};
    to->shared_gate_up = weight_load_parts(dev, loader, &gate_up);
    to->shared_down = weight_load_matrix(dev, loader, &moe->shared.down, NULL);
    /* xn is quantized once, for the experts and the shared expert */
    if (to->gate_up.x_scale != 0 && to->shared_gate_up.x_scale != 0)
        to->gate_up.x_scale = fmaxf(to->gate_up.x_scale, to->shared_gate_up.x_scale);
    return to;
}

/* Adds the formats of the weights to the device's description. */
static void weights_describe(toka_device *dev) {
    const struct {
        bool used;
        const char *text;
    } formats[] = {
        {dev->has_mxfp4, "MXFP4 experts"},
        {dev->has_fp8, "FP8 weights"},
        {dev->unpacks_fp8, dev->has_fp8 ? "some unpacked to bf16" : "FP8 weights unpacked to bf16"},
        {dev->unpacks_int4, "int4 weights unpacked to bf16"},
    };
    for (const auto &format : formats) {
        const size_t length = strlen(dev->description);
        if (format.used)
            snprintf(dev->description + length, sizeof dev->description - length, ", %s",
                     format.text);
    }
}

/* Loads all weights to the device. A tied LM head uses the memory of the embedding. Only tensor
 * rank 0 loads the bias of o, because the all-reduce adds up the results of all ranks. */
static void weights_load(toka_device *dev) {
    const toka_weights *weights = dev->weights;
    weight_loader loader = {};
    loader.dev = dev;
    dev->layers = (layer_weights *)calloc((size_t)dev->shape->L, sizeof *dev->layers);
    if (!dev->layers) abort();
    dev->embed = weight_load_matrix(dev, &loader, &weights->embed, NULL).data;
    dev->norm = weight_load_norm(dev, &loader, &weights->norm,
                                 dev->shape->logit_scale != 0 ? dev->shape->logit_scale : 1);
    bool tied = weights->lm_head.data == weights->embed.data;
    dev->lm_head = tied ? weight{dev->embed, NULL, dev->V, dev->E}
                        : weight_load_matrix(dev, &loader, &weights->lm_head, NULL);
    for (int i = 0; i < dev->shape->L && !dev->error.code; i++) {
        const toka_layer *from = &weights->layers[i];
        layer_weights *to = &dev->layers[i];
        const head_order heads = head_order_of(from->rope, dev->shape->D);
        to->attn_norm = weight_load_norm(dev, &loader, &from->attn_norm),
        to->mlp_norm = weight_load_norm(dev, &loader, &from->mlp_norm);
        to->attn_post_norm = weight_load_norm(dev, &loader, &from->attn_post_norm),
        to->mlp_post_norm = weight_load_norm(dev, &loader, &from->mlp_post_norm);
        (from->q_norm.cols == dev->shape->D ? to->q_norm : to->q_norm_all) =
            weight_load_norm(dev, &loader, &from->q_norm, 1, heads);
        (from->k_norm.cols == dev->shape->D ? to->k_norm : to->k_norm_all) =
            weight_load_norm(dev, &loader, &from->k_norm, 1, heads);
        to->sinks = weight_load_vector(dev, &loader, &from->sinks);
        to->qkv = weight_load_qkv(dev, &loader, from);
        if (from->mla) to->mla = weight_load_mla(dev, &loader, from->mla);
        if (from->moe) to->experts = weight_load_moe(dev, &loader, from);
        else {
            const weight_parts gate_up = weight_mlp_parts(&from->mlp, true);
            to->gate_up = weight_load_parts(dev, &loader, &gate_up);
            to->is_gelu = from->activation == TOKA_GELU_TANH;
        }
        to->o = weight_load_matrix(dev, &loader, &from->o,
                                   dev->options.tp_rank ? NULL : &from->o_bias);
        if (!from->moe) to->down = weight_load_matrix(dev, &loader, &from->mlp.down, NULL);
        to->window = from->window;
    }
    /* Wait for the memsets: the streams of the loader do not. */
    latch_error(dev, cudaStreamSynchronize(cudaStreamLegacy), "weights");
    if (dev->error.code) free(loader.jobs);
    else load_run(&loader);
}

/* ===========================================================================
 * MARK: 4. Embedding, norms, RoPE [kernel]
 * Small kernels that are bound by memory bandwidth, and the arguments of the fused RMSNorm.
 * =========================================================================== */

/* ---- The pool of K and V ----
 *
 * A layer's pages are bf16, or FP8 with a scale for each token and head (toka.h):
 *
 *     bf16   [kv head][K, V][B][D]
 *     FP8    [kv head][K, V][B][D] e4m3, then [kv head][B][K, V] E8M0
 *     MLA    [B][D] bf16: a latent vector of Dv elements, which is V, and a rotated key
 *
 * A layer has as many pages as the pool, or as many as there are windowed pages. */
typedef struct kv_layout {
    char *pool;
    size_t layer_bytes[2][2];     /* of a layer, by [has windowed pages][is FP8] */
    int page_bytes[2];            /* of bf16, of FP8; multiples of 16 */
    uint32_t fp8[8], windowed[8]; /* a bit for each layer */
} kv_layout;

/* Returns the layer's bit of toka_device.kv_windowed or kv_fp8. */
__host__ __device__ static inline bool kv_layer_bit(const uint32_t bits[8], int layer) {
    return bits[layer / 32] >> layer % 32 & 1;
}
__host__ __device__ static inline bool kv_is_fp8(const uint32_t fp8[8], int layer) {
    return kv_layer_bit(fp8, layer);
}
__host__ __device__ static inline size_t kv_layer_bytes(const kv_layout &kv, int layer) {
    return kv.layer_bytes[kv_layer_bit(kv.windowed, layer)][kv_is_fp8(kv.fp8, layer)];
}
__host__ __device__ static inline char *kv_layer_at(const kv_layout &kv, int layer) {
    size_t at = 0;
    for (int i = 0; i < layer; i++) at += kv_layer_bytes(kv, i);
    return kv.pool + at;
}
/* Bytes of the numbers of an FP8 page; the scales follow. */
__host__ __device__ static inline int kv_fp8_scales_at(int K, int B, int D) {
    return 2 * K * B * D;
}
/* Is V a part of K? So it is with MLA, the only kind of layer whose values have another size. */
static bool kv_is_latent(const toka_shape *shape) { return toka_value_size(shape) != shape->D; }
/* Returns the elements of a page of a layer. */
static int kv_page_elems(const toka_shape *shape) {
    return (kv_is_latent(shape) ? 1 : 2) * shape->K * shape->B * shape->D;
}
/* The fields of dev that begin with kv_, and shape, must be set. */
static kv_layout kv_layout_of(const toka_device *dev) {
    const toka_shape *shape = dev->shape;
    const int n = kv_page_elems(shape);
    const size_t n_pages[2] = {dev->kv_layer_elems / n, dev->kv_windowed_elems / n};
    kv_layout kv = {(char *)dev->kv_pool, {}, {2 * n, n + 2 * shape->K * shape->B}};
    memcpy(kv.fp8, dev->kv_fp8, sizeof kv.fp8);
    memcpy(kv.windowed, dev->kv_windowed, sizeof kv.windowed);
    for (int i = 0; i < 4; i++)
        kv.layer_bytes[i / 2][i % 2] = n_pages[i / 2] * (size_t)kv.page_bytes[i % 2];
    return kv;
}
static bool kv_any_fp8(const toka_device *dev) {
    uint32_t any = 0;
    for (uint32_t bits : dev->kv_fp8) any |= bits;
    return any;
}

/* ---- Copies of KV pages ----
 *
 * kv[layer][copy.to] = kv[layer][copy.from], for each copy and layer, and the same for kv_ids.
 *
 *   copies   [n_copies] pairs of page numbers; windowed_copies: the same pairs of windowed pages
 *   kv_ids   [page][B] ids of the tokens, B <= 256; NULL: this stage has none
 *
 * Grid (n_copies, L), block 256, 16 bytes per thread and iteration. Moves twice the bytes of a page
 * per copy and layer: bound by copy bandwidth. */
__global__ static void __launch_bounds__(256)
    copy_pages_kernel(const toka_copy *copies, const toka_copy *windowed_copies,
                      const kv_layout kv, int *kv_ids, int B) {
    grid_launch_dependents();
    grid_wait();
    const bool is_windowed = kv_layer_bit(kv.windowed, (int)blockIdx.y);
    const toka_copy copy = (is_windowed ? windowed_copies : copies)[blockIdx.x];
    char *pages = kv_layer_at(kv, (int)blockIdx.y);
    const int bytes = kv.page_bytes[kv_is_fp8(kv.fp8, (int)blockIdx.y)];
    const uint4 *from = (const uint4 *)(pages + (size_t)copy.from * bytes);
    uint4 *to = (uint4 *)(pages + (size_t)copy.to * bytes);
    for (int i = threadIdx.x; i < bytes / 16; i += 256) to[i] = from[i];
    if (!kv_ids || blockIdx.y || (int)threadIdx.x >= B) return;
    const toka_copy ids = copies[blockIdx.x];
    kv_ids[ids.to * B + (int)threadIdx.x] = kv_ids[ids.from * B + (int)threadIdx.x];
}

__device__ static inline void unpack_8(uint4 v, float f[8]) {
    uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) f[2 * i] = bf16_low(w[i]), f[2 * i + 1] = bf16_high(w[i]);
}
__device__ static inline uint4 pack_8(const float f[8]) {
    return make_uint4(pack_bf16(f[0], f[1]), pack_bf16(f[2], f[3]), pack_bf16(f[4], f[5]),
                      pack_bf16(f[6], f[7]));
}
/* Returns 8 bf16, times scale. */
__device__ static inline uint4 scale_8(uint4 v, float scale) {
    float f[8];
    unpack_8(v, f);
#pragma unroll
    for (int i = 0; i < 8; i++) f[i] *= scale;
    return pack_8(f);
}
/* ---- Rows of x as e4m3, for FP8 GEMMs ----
 *
 *   scale      the static scale of W, if it has one; else max |x[t]| / 448, or 1 for a row of zeros
 *   e4m3       x[t][k] times the rounded 1 / scale, to the nearest number, at most 448
 *
 * The e4m3 numbers of a row lie where its bf16 numbers lay: the row stride in bytes stays 2 ldx. */
enum { FP8_MAX = 448 };
/* Returns the largest of `largest` and the sizes of 8 bf16. */
__device__ static inline float fp8_largest_8(uint4 vec, float largest) {
    float values[8];
    unpack_8(vec, values);
#pragma unroll
    for (int i = 0; i < 8; i++) largest = fmaxf(largest, fabsf(values[i]));
    return largest;
}
/* Returns the maximum of v over the WARPS warps of the block, to every thread. */
template <int WARPS> __device__ static inline float block_max(float v) {
    __shared__ float warp_max[WARPS];
    for (int s = 16; s; s >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) v = fmaxf(v, warp_max[i]);
    return v;
}
__device__ static inline float fp8_scale(float static_scale, float largest) {
    return static_scale != 0 ? static_scale : largest > 0 ? largest / FP8_MAX : 1;
}
#if HOPPER
/* Two floats as e4m3, a in the low byte: rounded to nearest even; larger numbers become 448. */
__device__ static inline uint32_t pack_fp8(float a, float b) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}
/* Returns 8 bf16, times inverse, as e4m3. */
__device__ static inline uint2 fp8_quantize_8(uint4 vec, float inverse) {
    float values[8];
    unpack_8(vec, values);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] *= inverse;
    return make_uint2(pack_fp8(values[0], values[1]) | pack_fp8(values[2], values[3]) << 16,
                      pack_fp8(values[4], values[5]) | pack_fp8(values[6], values[7]) << 16);
}
#endif

/* ---- residual_scale ----
 *
 * x is kept divided by residual_scale. Then what a layer adds to x needs no factor. A norm does not
 * change with the scale of x, but for its eps. Returns that of the norms of x. */
static float hidden_eps(const toka_shape *shape) {
    const float scale = shape->residual_scale != 0 ? shape->residual_scale : 1;
    return shape->eps / (scale * scale);
}
/* Returns the factor on the embedding; 0: 1. */
static float hidden_embed_scale(const toka_shape *shape) {
    const float scale = shape->embed_scale != 0 ? shape->embed_scale : 1;
    return shape->residual_scale != 0 ? scale / shape->residual_scale : shape->embed_scale;
}

/* ---- RMSNorm ----
 *
 * y[t][i] = x[r][i] * w[i] / sqrt(mean(x[r]^2) + eps), with r = row_index ? row_index[t] : t.
 *
 *   x, y        bf16 [.][E]; y is rounded once, at the end
 *   w           float32 [E]
 *   FP8         the bf16 numbers of y become e4m3; x_scale [T]
 *   row_index   [T] or NULL
 *   E, inv_E    E is rounded up to a multiple of 8; inv_E is 1 / the model's E
 *
 * Grid T, block 128. Reads 2*T*E bytes, writes 2*T*E bytes: bound by copy bandwidth.
 *
 * A vector is 8 columns. Each thread holds its first NORM_CACHED_VECS vectors of x and w in
 * registers. It loads these vectors of w before grid_wait(). The columns of x from 4,096 on are not
 * held; they are read twice, once for the sum and once for y.
 *
 * Order of the sums: each thread adds up its own elements, then a tree adds up lanes and warps. The
 * order is the same for every T. */
enum { NORM_CACHED_VECS = 4 }; /* 4 * 128 threads * 8 columns: all of x is cached for E <= 4,096 */
/* Returns the sum of v over the 128 threads of the block, to every thread. */
__device__ static inline float block_sum_128(float v) {
    __shared__ float warp_sums[4];
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = v;
    __syncthreads();
    return (warp_sums[0] + warp_sums[1]) + (warp_sums[2] + warp_sums[3]);
}
/* Returns sum + the squares of 8 bf16. */
__device__ static inline float norm_add_squares(uint4 v, float sum) {
    float f[8];
    unpack_8(v, f);
#pragma unroll
    for (int j = 0; j < 8; j++) sum += f[j] * f[j];
    return sum;
}
/* Multiplies 8 bf16 by scale and by the 8 weights in a and b. */
__device__ static inline uint4 norm_scale_8(uint4 v, float scale, float4 a, float4 b) {
    float f[8];
    unpack_8(v, f);
    return make_uint4(pack_bf16(f[0] * scale * a.x, f[1] * scale * a.y),
                      pack_bf16(f[2] * scale * a.z, f[3] * scale * a.w),
                      pack_bf16(f[4] * scale * b.x, f[5] * scale * b.y),
                      pack_bf16(f[6] * scale * b.z, f[7] * scale * b.w));
}
template <bool FP8>
__global__ static void __launch_bounds__(128)
    rmsnorm_kernel(const bf16 *x, const int *row_index, const float *w, bf16 *y, int E,
                   float inv_E, float eps, float static_scale, float *x_scale) {
    const int n_vecs = E / 8, thread = (int)threadIdx.x;
    const float4 *w_vecs = (const float4 *)w;
    float4 w_cached[NORM_CACHED_VECS][2] = {};
    uint4 x_cached[NORM_CACHED_VECS] = {};
    float sum = 0;
    grid_launch_dependents();
#pragma unroll
    for (int k = 0; k < NORM_CACHED_VECS; k++)
        if (thread + 128 * k < n_vecs)
            w_cached[k][0] = w_vecs[2 * (thread + 128 * k)],
            w_cached[k][1] = w_vecs[2 * (thread + 128 * k) + 1];
    grid_wait();
    const uint4 *from =
        (const uint4 *)(x + (size_t)(row_index ? row_index[blockIdx.x] : blockIdx.x) * E);
    uint4 *to = (uint4 *)(y + (size_t)blockIdx.x * E);
#pragma unroll
    for (int k = 0; k < NORM_CACHED_VECS; k++)
        if (thread + 128 * k < n_vecs) x_cached[k] = from[thread + 128 * k];
#pragma unroll
    for (int k = 0; k < NORM_CACHED_VECS; k++) sum = norm_add_squares(x_cached[k], sum);
    for (int i = thread + 128 * NORM_CACHED_VECS; i < n_vecs; i += 128)
        sum = norm_add_squares(from[i], sum);
    float scale = rsqrtf(block_sum_128(sum) * inv_E + eps);
    if constexpr (FP8) {
#if HOPPER
        float largest = 0;
#pragma unroll
        for (int k = 0; k < NORM_CACHED_VECS; k++)
            x_cached[k] = norm_scale_8(x_cached[k], scale, w_cached[k][0], w_cached[k][1]),
            largest = fp8_largest_8(x_cached[k], largest);
        for (int i = thread + 128 * NORM_CACHED_VECS; i < n_vecs; i += 128)
            largest = fp8_largest_8(norm_scale_8(from[i], scale, w_vecs[2 * i], w_vecs[2 * i + 1]),
                                    largest);
        const float row_scale = fp8_scale(static_scale, block_max<4>(largest)),
                    inverse = 1 / row_scale;
        if (thread == 0) x_scale[blockIdx.x] = row_scale;
#pragma unroll
        for (int k = 0; k < NORM_CACHED_VECS; k++)
            if (thread + 128 * k < n_vecs)
                ((uint2 *)to)[thread + 128 * k] = fp8_quantize_8(x_cached[k], inverse);
        for (int i = thread + 128 * NORM_CACHED_VECS; i < n_vecs; i += 128)
            ((uint2 *)to)[i] = fp8_quantize_8(
                norm_scale_8(from[i], scale, w_vecs[2 * i], w_vecs[2 * i + 1]), inverse);
#else
        __trap();
#endif
    } else {
#pragma unroll
        for (int k = 0; k < NORM_CACHED_VECS; k++)
            if (thread + 128 * k < n_vecs)
                to[thread + 128 * k] = norm_scale_8(x_cached[k], scale, w_cached[k][0],
                                                    w_cached[k][1]);
        for (int i = thread + 128 * NORM_CACHED_VECS; i < n_vecs; i += 128)
            to[i] = norm_scale_8(from[i], scale, w_vecs[2 * i], w_vecs[2 * i + 1]);
    }
}
/* next: NULL, or the e4m3 matrix that multiplies y: then y is quantized. */
static void rmsnorm(toka_device *dev, const bf16 *x, const int *row_index, const float *w, bf16 *y,
                    int n_rows, const weight *next = NULL) {
    const float inv_E = 1.0f / dev->shape->E;
    launch_dependent(dev, "RMSNorm", next ? rmsnorm_kernel<true> : rmsnorm_kernel<false>,
                     {dim3(n_rows), 128}, x, row_index, w, y, dev->E, inv_E, hidden_eps(dev->shape),
                     next ? next->x_scale : 0, dev->x_scale);
}

/* ---- Norms behind attention and MLP, and layers without a norm before them ----
 *
 * x[t] += norm(y[t]) * w: y is what attention or an MLP returns. x is rounded once.
 *
 *   x, y     bf16 [T][E]
 *   w        float32 [E]
 *
 * Grid T, block 128. Reads y twice, the second time from cache. Moves 6*T*E bytes: bound by copy
 * bandwidth. Order of the sums: as in rmsnorm_kernel. */
__global__ static void __launch_bounds__(128)
    add_norm_kernel(bf16 *x, const bf16 *y, const float *w, int E, float inv_E, float eps) {
    const uint4 *from = (const uint4 *)(y + (size_t)blockIdx.x * E);
    uint4 *to = (uint4 *)(x + (size_t)blockIdx.x * E);
    float sum = 0;
    grid_launch_dependents();
    grid_wait();
    for (int i = threadIdx.x; i < E / 8; i += 128) sum = norm_add_squares(from[i], sum);
    const float scale = rsqrtf(block_sum_128(sum) * inv_E + eps);
    for (int i = threadIdx.x; i < E / 8; i += 128) {
        float f[8], old[8];
        unpack_8(from[i], f);
        unpack_8(to[i], old);
#pragma unroll
        for (int j = 0; j < 8; j++) old[j] += f[j] * scale * w[8 * i + j];
        to[i] = pack_8(old);
    }
}
/* to = from, n vectors of 16 bytes. Grid ceil(n / 256), block 256. */
__global__ static void __launch_bounds__(256)
    copy_rows_kernel(const uint4 *from, uint4 *to, size_t n) {
    const size_t i = (size_t)blockIdx.x * 256 + threadIdx.x;
    grid_launch_dependents();
    grid_wait();
    if (i < n) to[i] = from[i];
}

/* Returns gelu(gate) * up. */
__device__ static inline float geglu(float gate, float up) {
    const float g = gate;
    /* (1 + tanh z) / 2 is the sigmoid of 2 z */
    return up * (g / (1 + expf(-1.59576912f * (g + 0.044715f * g * g * g))));
}
/* ---- gelu_kernel: GELU after a GEMM of gate and up ----
 *
 * y[t][i] = gelu(gate[t][i]) * up[t][i], gelu by its tanh approximation, in float32.
 *
 *   gate_up   bf16 [T][2F]: 8 columns of gate, then their 8 of up, and so on
 *   y         bf16 [T][ldy]
 *
 * Grid (ceil(F / 2048), T), block 256: 8 columns of y per thread. Moves 6*T*F bytes: bound by copy
 * bandwidth. SiLU is in the epilogues of the GEMMs (EPI_SWIGLU). */
__global__ static void __launch_bounds__(256)
    gelu_kernel(const bf16 *gate_up, bf16 *y, int F, int ldy) {
    const int i = (int)(blockIdx.x * 256 + threadIdx.x);
    grid_launch_dependents();
    grid_wait();
    if (8 * i >= F) return;
    const uint4 *from = (const uint4 *)(gate_up + (size_t)blockIdx.y * 2 * F) + 2 * i;
    float gate[8], up[8];
    unpack_8(from[0], gate);
    unpack_8(from[1], up);
#pragma unroll
    for (int j = 0; j < 8; j++) up[j] = geglu(gate[j], up[j]);
    *(uint4 *)(y + (size_t)blockIdx.y * ldy + 8 * i) = pack_8(up);
}

/* ---- RMSNorm fused into GEMMs, for up to 8 rows ----
 *
 * norm(x) W^T = (x * w) W^T / rms(x). So the norm is split over two kernels:
 *   - Output side: embed_kernel or gemm_gemv_kernel writes x. It also writes x * w, and one sum of
 *     squares for every FUSE_NORM_COLS columns of a row.
 *   - Input side: gemm_gemv_kernel or gemm_smallm_kernel reads x * w, and multiplies its
 *     accumulators by 1 / rms(x) in the epilogue.
 *
 * On the input side every CTA adds up the sums of squares again. That costs less than one more
 * kernel launch. */
enum {
    FUSE_NORM_MAX_ROWS = 8,
    FUSE_NORM_COLS = 16,
    /* sums of squares that a lane holds in registers; enough for E <= 4,096 */
    FUSE_NORM_LANE_SUMS = 8
};
typedef struct fused_norm {
    /* output side */
    const float *w;           /* [E] weights of the norm that follows; NULL: no output side */
    bf16 *xw;                 /* [M][E], x * w */
    float *row_sumsq;         /* [M][n_sums], sums of squares of x */
    /* input side */
    const float *input_sumsq; /* [M][n_sums], sums of squares of the input; NULL: no input side */
    /* both */
    int n_sums;               /* ceil(E / FUSE_NORM_COLS) */
    float inv_E, eps;         /* inv_E: 1 / the model's E */
} fused_norm;
/* norm_w: weights of the norm that follows, or NULL: the kernel is no output side. reads_sumsq: the
 * kernel is an input side. */
static fused_norm fuse_norm_args(const toka_device *dev, const float *norm_w, bool reads_sumsq) {
    if (!norm_w && !reads_sumsq) return fused_norm{};
    return fused_norm{norm_w,
                      dev->xn,
                      dev->row_sumsq,
                      reads_sumsq ? dev->row_sumsq : NULL,
                      ceil_div(dev->E, FUSE_NORM_COLS),
                      1.0f / dev->shape->E,
                      hidden_eps(dev->shape)};
}
/* Returns whether the op that left x was the output side of this norm (state NORMED). If so, the
 * caller is the input side, and x is WHOLE from now on. */
static bool fuse_norm_consume(toka_hidden *x, const float *norm_w) {
    const bool fused = x->state == TOKA_HIDDEN_NORMED && x->normed_for == norm_w;
    if (fused) toka_hidden_set_sum(x, 1);
    return fused;
}

/* ---- embed ----
 *
 * x[t][:] = table.rows[ids[t] - table.v0][:] * table.scale. An id -1 - i stands for the last
 * sampled token of sequence i. The row of x is zero if the table of this rank does not have the
 * id. If fused.w is not NULL, the kernel is the output side of a fused norm and writes fused.xw
 * and fused.row_sumsq, too. If kept.kv_ids is not NULL, it stores the id of token t in
 * kept.kv_ids[kept.kv_slot[t]]: this is the op keep_ids of a model with one stage.
 *
 *   ids           [T]
 *   last_tokens   [n_seqs]
 *   x             bf16 [T][E]
 *
 * Grid T, block 128, 32 bytes per thread and iteration. Moves 4*T*E bytes: bound by copy
 * bandwidth. */
typedef struct embed_table {
    const bf16 *rows; /* [V][E]: the ids v0 .. v0+V-1, those of this rank */
    int v0, V;
    float scale;      /* 0: 1 */
} embed_table;
typedef struct kept_ids { /* where keep_ids stores the id of each token */
    const int *kv_slot;   /* [T] */
    int *kv_ids;          /* [page][B]; NULL: nowhere */
} kept_ids;

__global__ static void __launch_bounds__(128)
    embed_kernel(const int *ids, const int *last_tokens, const embed_table table, bf16 *x, int E,
                 const fused_norm fused, const kept_ids kept) {
    grid_launch_dependents();
    grid_wait();
    int id = ids[blockIdx.x];
    id = id < 0 ? last_tokens[-1 - id] : id;
    if (kept.kv_ids && threadIdx.x == 0) kept.kv_ids[kept.kv_slot[blockIdx.x]] = id;
    const int table_row = id - table.v0;
    const uint4 *from = (const uint4 *)(table.rows + (size_t)table_row * E);
    const float4 *norm_w = (const float4 *)fused.w;
    const size_t to = (size_t)blockIdx.x * (E / 8);
    for (int k = threadIdx.x; k * FUSE_NORM_COLS < E; k += blockDim.x) {
        float sum = 0;
#pragma unroll
        for (int i = 2 * k; i < 2 * k + 2; i++) {
            if (i == E / 8) break;
            uint4 vec = table_row >= 0 && table_row < table.V ? from[i] : make_uint4(0, 0, 0, 0);
            if (table.scale != 0) vec = scale_8(vec, table.scale);
            ((uint4 *)x)[to + i] = vec;
            sum = norm_add_squares(vec, sum);
            if (norm_w)
                ((uint4 *)fused.xw)[to + i] =
                    norm_scale_8(vec, 1, norm_w[2 * i], norm_w[2 * i + 1]);
        }
        if (norm_w) fused.row_sumsq[blockIdx.x * fused.n_sums + k] = sum;
    }
}

/* kv_ids[kv_slot[t]] = the id of token t: the op keep_ids in the last of several stages, which does
 * not embed. A negative ids[t] is replaced by the last token that it stands for.
 * Arguments as in embed_kernel. Grid ceil(T / 256), block 256. */
__global__ static void __launch_bounds__(256)
    keep_ids_kernel(const int *ids, const int *last_tokens, const int *kv_slot, int *kv_ids,
                    int T) {
    const int t = (int)(blockIdx.x * 256 + threadIdx.x);
    grid_launch_dependents();
    grid_wait();
    if (t >= T) return;
    const int id = ids[t];
    kv_ids[kv_slot[t]] = id < 0 ? last_tokens[-1 - id] : id;
}

/* ---- RoPE ---- */

/* A table [max_len][half] of cosine and sine; half = D/2 and n = max_len * half:
 *
 *     table[p][i] = (cos, sin)(p * freq[i]) * scale for i < pairs, else (1, 0): no rotation
 *
 * The angle is rounded to float32, as Hugging Face and the CPU backend do. Any grid. */
__global__ static void rope_table_kernel(float2 *table, const float *freq, float scale, int half,
                                         int pairs, size_t n) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        const int pair = (int)(i % half);
        double s = 0, c = 1;
        if (pair < pairs) sincos((float)(i / half) * freq[pair], &s, &c);
        const float factor = pair < pairs ? scale : 1;
        table[i] = make_float2((float)c * factor, (float)s * factor);
    }
}
/* Returns the table of a kind of RoPE; NULL: of layers without one. */
static const float2 *rope_open(toka_device *dev, const toka_rope *rope) {
    static const toka_rope none = {NULL, 0, 1, false};
    const toka_shape *shape = dev->shape;
    const int half = (kv_is_latent(shape) ? shape->D - toka_value_size(shape) : shape->D) / 2;
    size_t n = (size_t)dev->shape->max_len * half;
    if (!rope) rope = &none;
    float *freq = (float *)dev_alloc(dev, (size_t)half * sizeof(float), "RoPE");
    float2 *table = (float2 *)dev_alloc(dev, n * sizeof *table, "RoPE table");
    if (dev->error.code) return NULL;
    /* This copy runs on the stream of the kernel that reads freq. cudaMemcpy from pageable memory
     * may return before its copy on the default stream has ended. */
    latch_error(dev,
                cudaMemcpyAsync(freq, rope->freq, (size_t)rope->dims / 2 * sizeof *freq,
                                cudaMemcpyHostToDevice, dev->stream),
                "RoPE");
    rope_table_kernel<<<1024, 256, 0, dev->stream>>>(table, freq, rope->scale, half,
                                                     rope->dims / 2, n);
    CHECK_LAUNCH(dev, "RoPE table");
    return table;
}
/* Opens the tables of all layers: one for each kind of RoPE. */
static void ropes_open(toka_device *dev, const toka_layer *layers) {
    for (int i = 0; i < dev->shape->L; i++) {
        int same = 0;
        while (layers[same].rope != layers[i].rope) same++;
        dev->layers[i].rope = same < i ? dev->layers[same].rope : rope_open(dev, layers[i].rope);
    }
}

/* ---- What is done with q, k and v after their GEMM ----
 *
 * For each head of q and k: RMSNorm over D if the model has QK-norm, then each pair (i, i + D/2) is
 * rotated by its angle at position pos[t]. v is copied. q is stored to q[t][h]. k and v are stored
 * to the cache position kv_slot[t] = page * B + offset of the layer's pool. All arithmetic is
 * float32.
 *
 * The parts are defined here, for rope_kernel and for the QKV epilogues of the GEMMs (chapters 6
 * and 7). "head" counts the heads of q, then those of k, then those of v: 0 .. H + 2K - 1. */

/* Returns the index of element i of a head after interleaving: 8 elements of the first half of the
 * head, then the 8 elements of the second half with which RoPE pairs them, and so on. The rows of W
 * are in this order for the GEMMs with RoPE in the epilogue (chapters 6 and 7). Then the elements
 * of a pair are 8 columns apart, and one thread has the accumulators of both. Any 16 aligned
 * columns can be rotated without the rest of the head. */
__host__ __device__ static inline int qkv_interleave(int i, int half) {
    return i < half ? i / 8 * 16 + i % 8 : (i - half) / 8 * 16 + 8 + (i - half) % 8;
}

__device__ static inline void store_bf16x2(bf16 *to, float a, float b) {
    *(uint32_t *)to = pack_bf16(a, b);
}

struct qkv_params {
    const float *bias;            /* [(H+2K)*D] or NULL */
    const float *q_norm, *k_norm; /* QK-norm: [D] each, or NULL */
    float eps;
    int H, K, B;                  /* B is a power of two */
    const int *pos,               /* [T] positions */
        *kv_slot;                 /* [T] page * B + offset in the page */
    const float2 *rope;           /* [max_len][D/2] cosine and sine */
    bf16 *q;                      /* [T][H][D] */
    bf16 *kv;                     /* the layer's pages: [page][kv head][K, V][B][D] */
    int D;                        /* for kernels that do not have D as a template parameter */
};
static bool qkv_has_norms(const qkv_params *qkv) { return qkv->q_norm || qkv->k_norm; }

/* Returns the weights [D] of the head's QK-norm; NULL: it has none, as each head of v. */
__device__ static inline const float *qkv_norm_weights(const qkv_params &qkv, int head) {
    const float *weights = head < qkv.H ? qkv.q_norm : qkv.k_norm;
    return head >= qkv.H + qkv.K ? NULL : weights;
}
/* Returns the factor of the QK-norm. sum: the sum of the squares of a head. */
__device__ static inline float qk_norm_scale(float sum, int D, float eps) {
    return rsqrtf(sum / D + eps);
}
/* Rotates the pair of elements (i, i + D/2) of a head of q or k. */
__device__ static inline void rope_rotate(float &lo, float &hi, float cosine, float sine) {
    const float old_lo = lo;
    lo = old_lo * cosine - hi * sine, hi = hi * cosine + old_lo * sine;
}
/* Where the elements of a head are stored: in q if it is a query head, else in the pages. Both are
 * arrays of rows of D elements. The row is the sum of a term of the token (qkv_q_row or qkv_kv_row)
 * and a term of the head (qkv_head_row). Rows fit in 32 bits: with D 8 they would be 64 GB. */
__device__ static inline uint32_t qkv_q_row(const qkv_params &qkv, int m) {
    return (uint32_t)(m * qkv.H);
}
__device__ static inline uint32_t qkv_kv_row(const qkv_params &qkv, int kv_slot) {
    const int log2_B = 31 - __clz(qkv.B);
    return ((uint32_t)(kv_slot >> log2_B) * (uint32_t)(2 * qkv.K) << log2_B) +
           (uint32_t)(kv_slot & (qkv.B - 1));
}
__device__ static inline uint32_t qkv_head_row(const qkv_params &qkv, int head) {
    const int log2_B = 31 - __clz(qkv.B), kv_head = head - qkv.H, is_v = kv_head >= qkv.K;
    return kv_head < 0 ? (uint32_t)head
                       : (uint32_t)((kv_head - is_v * qkv.K) * 2 + is_v) << log2_B;
}
/* Returns where element 0 of head `head` of token m is stored. */
__device__ static inline bf16 *qkv_head_at(const qkv_params &qkv, int m, int kv_slot, int head) {
    const bool is_q = head < qkv.H;
    const uint32_t row = (is_q ? qkv_q_row(qkv, m) : qkv_kv_row(qkv, kv_slot)) +
                         qkv_head_row(qkv, head);
    return (is_q ? qkv.q : qkv.kv) + (size_t)row * qkv.D;
}
static_assert((TOKA_GPU_PAGE_TOK & (TOKA_GPU_PAGE_TOK - 1)) == 0, "B is a power of two");

/* ---- heads_norm_kernel: one norm of all heads of q, and one of all heads of k, before RoPE ----
 *
 * from[t][i] = from[t][i] * w[i] / sqrt(mean(from[t]^2) + eps), over the heads of q or k.
 *
 *   qkv             bf16 [T][(H+2K)*D], as rope_kernel reads it
 *   q_norm, k_norm  float32 [H*D], [K*D]; NULL: no norm
 *
 * Grid (T, 2): q and k; block 128. Moves 4*T*(H+K)*D bytes: bound by copy bandwidth. */
__global__ static void __launch_bounds__(128)
    heads_norm_kernel(bf16 *qkv, const float *q_norm, const float *k_norm, int H, int K, int D,
                      float eps, bool interleaved) {
    const float *w = blockIdx.y ? k_norm : q_norm;
    const int n = (blockIdx.y ? K : H) * D;
    uint4 *row = (uint4 *)(qkv + (size_t)blockIdx.x * (H + 2 * K) * D + (blockIdx.y ? H * D : 0));
    float sum = 0;
    grid_launch_dependents();
    grid_wait();
    if (!w) return;
    for (int i = threadIdx.x; i < n / 8; i += 128) sum = norm_add_squares(row[i], sum);
    const float scale = rsqrtf(block_sum_128(sum) / n + eps);
    for (int i = threadIdx.x; i < n / 8; i += 128) {
        const int head0 = 8 * i / D * D, element = 8 * i % D;
        const int at = head0 + (interleaved ? qkv_interleave(element, D / 2) : element);
        const float4 *weights = (const float4 *)(w + 8 * i);
        row[at / 8] = norm_scale_8(row[at / 8], scale, weights[0], weights[1]);
    }
}

/* ---- rope_kernel: QK-norm, RoPE, and the stores of K and V, after a GEMM without them ----
 *
 *   from     bf16 [T][(H+2K)*D]: q [H][D], k [K][D], v [K][D] of each row; the biases are added
 *   to       q bf16 [T][H][D]; kv bf16 [page][kv head][K, V][B][D], the pool of this layer. With
 *            KV_FP8 its FP8 pages: the warp finds the scale of its head. The QKV epilogues of the
 *            GEMMs do not have this
 *
 * Grid ceil(T*(H+2K) / 8), block 256: one warp per head. Moves 4*T*(H+2K)*D bytes: bound by copy
 * bandwidth. D/2 is even, D is at most 256.
 *
 * Lane l has the pairs i = 2l, 2l+1, 2l+64, 2l+65. So a warp reads 128 contiguous bytes of each
 * half of the head at once.
 *
 * No kernel of this step writes positions, KV slots, the table or the norm weights. So they are
 * loaded before grid_wait(), which makes small steps faster: test/results/kernel-choices.md. */
typedef struct rope_args {
    qkv_params to;    /* bias is not used */
    const bf16 *from; /* qkv */
    int T;
    bool interleaved; /* element i of a head is at qkv_interleave(i, D/2) of the head in `from` */
} rope_args;
/* Stores a head of K or V as FP8. x: the lane's elements 2 lane, 2 lane + 1, then those 64 behind,
 * of the first and of the second half of the head; 0 where the head has none. */
__device__ static inline void rope_store_fp8(const qkv_params &qkv, int kv_slot, int head,
                                             const float (&x)[2][4]) {
    const int log2_B = 31 - __clz(qkv.B), is_v = head >= qkv.H + qkv.K, half = qkv.D / 2;
    const int kv_head = head - qkv.H - is_v * qkv.K, offset = kv_slot & (qkv.B - 1);
    const int scales_at = kv_fp8_scales_at(qkv.K, qkv.B, qkv.D), i = 2 * (threadIdx.x % 32);
    unsigned char *page = (unsigned char *)qkv.kv +
                          (size_t)(kv_slot >> log2_B) * (scales_at + 2 * qkv.K * qkv.B);
    unsigned char *to = page + (size_t)(((kv_head * 2 + is_v) << log2_B) + offset) * qkv.D;
    uint32_t largest = 0;
    for (int k = 0; k < 8; k++)
        largest = max(largest, toka_float_bits(x[k / 4][k % 4]) & 0x7FFFFFFF);
    const unsigned char scale = toka_kv_scale(__reduce_max_sync(~0u, largest));
    for (int k = 0; k < 4; k++) {
        const float *pair = &x[k / 2][k % 2 * 2];
        if (i + k % 2 * 64 < half)
            *(uint16_t *)(to + k / 2 * half + i + k % 2 * 64) =
                (uint16_t)(toka_kv_round(pair[0], scale) | toka_kv_round(pair[1], scale) << 8);
    }
    if (i == 0) page[scales_at + toka_kv_scale_at(qkv.B, kv_head, offset) + is_v] = scale;
}

template <bool KV_FP8>
__global__ static void __launch_bounds__(256) rope_kernel(const rope_args args) {
    const qkv_params &qkv = args.to;
    int n_heads = qkv.H + 2 * qkv.K, warp = blockIdx.x * 8 + threadIdx.x / 32,
        lane = threadIdx.x % 32;
    int row = warp / n_heads, head = warp % n_heads, half = qkv.D / 2;
    /* each float4: cosine and sine of two pairs */
    float4 cos_sin[2] = {make_float4(1, 0, 1, 0), make_float4(1, 0, 1, 0)};
    const float *norm = qkv_norm_weights(qkv, head);
    float2 norm_lo[2] = {}, norm_hi[2] = {};
    grid_launch_dependents();
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        if (norm && i < half)
            norm_lo[k] = *(const float2 *)(norm + i),
            norm_hi[k] = *(const float2 *)(norm + half + i);
    }
    if (row < args.T && head < qkv.H + qkv.K) {
        const float2 *table = qkv.rope + (size_t)qkv.pos[row] * half;
#pragma unroll
        for (int k = 0; k < 2; k++)
            if (2 * lane + 64 * k < half) cos_sin[k] = *(const float4 *)(table + 2 * lane + 64 * k);
    }
    /* computed before grid_wait(), as it needs no result of the GEMM */
    bf16 *out = qkv_head_at(qkv, row, row < args.T ? qkv.kv_slot[row] : 0, head);
    grid_wait();
    if (row >= args.T) return;
    const bf16 *from = args.from + (size_t)warp * qkv.D;
    float x[2][4], (&lo)[4] = x[0], (&hi)[4] = x[1], sum = 0;
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        int lo_index = args.interleaved ? qkv_interleave(i, half) : i,
            hi_index = lo_index + (args.interleaved ? 8 : half);
        uint32_t lo0 = i < half ? *(const uint32_t *)(from + lo_index) : 0,
                 hi0 = i < half ? *(const uint32_t *)(from + hi_index) : 0;
        lo[2 * k] = bf16_low(lo0), lo[2 * k + 1] = bf16_high(lo0),
        hi[2 * k] = bf16_low(hi0), hi[2 * k + 1] = bf16_high(hi0);
    }
    if (norm) {
#pragma unroll
        for (int k = 0; k < 4; k++) sum += lo[k] * lo[k] + hi[k] * hi[k];
        for (int xor_mask = 16; xor_mask; xor_mask >>= 1)
            sum += __shfl_xor_sync(~0u, sum, xor_mask);
        float scale = qk_norm_scale(sum, qkv.D, qkv.eps);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            lo[2 * k] *= scale * norm_lo[k].x, lo[2 * k + 1] *= scale * norm_lo[k].y;
            hi[2 * k] *= scale * norm_hi[k].x, hi[2 * k + 1] *= scale * norm_hi[k].y;
        }
    }
#pragma unroll
    for (int k = 0; k < 2; k++) {
        int i = 2 * lane + 64 * k;
        if (i >= half) break;
        float4 cs = cos_sin[k];
        rope_rotate(lo[2 * k], hi[2 * k], cs.x, cs.y);
        rope_rotate(lo[2 * k + 1], hi[2 * k + 1], cs.z, cs.w);
        if (KV_FP8 && head >= qkv.H) continue;
        store_bf16x2(out + i, lo[2 * k], lo[2 * k + 1]);
        store_bf16x2(out + half + i, hi[2 * k], hi[2 * k + 1]);
    }
    if (KV_FP8 && head >= qkv.H) rope_store_fp8(qkv, qkv.kv_slot[row], head, x);
}

/* ===========================================================================
 * MARK: 5. GEMM on mma.sync [kernel]
 *
 * The chapter begins with the code that the GEMMs of chapters 5, 6 and 7 share: the kinds of
 * epilogues, the arguments, and the input side of the fused RMSNorm (chapter 4). Then comes
 * gemm_mma, the GEMM for GPUs other than Hopper.
 * =========================================================================== */

/* Every GEMM computes y[M][N] = x[M][K] W[N][K]^T with float32 accumulators and applies an
 * epilogue to the accumulators. K is a multiple of 8. */
enum epilogue {
    EPI_STORE,    /* y = acc + bias, bf16 [M][N] */
    EPI_RESIDUAL, /* y += acc + bias, bf16 [M][N]; the sum is float32 and is rounded once */
    /* y[M][N/2] = silu(gate) * up, computed in float32 and rounded to bf16 once. The rows of W are
     * gate and up, interleaved in groups of 8. */
    EPI_SWIGLU,
    EPI_LOGITS, /* y = acc, float32 [M][N]; y points to floats */
    /* W is q, k and v, with the rows of each head in the order of qkv_interleave. The epilogue
     * applies QK-norm and RoPE and writes q and the KV pages. Only gemm_gemv (without QK-norm) and
     * gemm_smallm use this value. gemm_wgmma has GEMM_QKV64 and GEMM_QKV128 (chapter 6) for the
     * same epilogue. */
    EPI_QKV
};

/* Number of rows that must be allocated after the last row of x.
 *
 * TMA loads x in boxes of up to 128 rows. The more rows of a box lie outside the tensor map, the
 * slower TMA is (test/results/kernel-choices.md). So the map of x extends to the end of the last
 * box. TMA then reads the rows after the last row of x. They may hold any data, because the GEMM
 * discards their outputs. */
enum { GEMM_PAD_ROWS = 127 };

typedef struct gemm_args {
    int M;
    const bf16 *x; /* [M][K], row stride ldx, 16-byte aligned; GEMM_PAD_ROWS more rows follow */
    int ldx;
    const weight *w;
    bf16 *y; /* row stride ldy */
    int ldy;
    enum epilogue epi;
    /* Fused norm, output side: the weights of the RMSNorm that follows, or NULL. If it is not NULL,
     * the GEMM also writes y * next_norm to dev->xn, and the sums of squares of the rows of y to
     * dev->row_sumsq. Allowed only for EPI_RESIDUAL of gemm_gemv with M <= 8. */
    const float *next_norm;
    /* Fused norm, input side. True: x is dev->xn, which embed or a GEMM with next_norm has written.
     * The GEMM scales its accumulators by 1 / rms, computed from dev->row_sumsq. M <= 8. */
    bool norm_ready;
    const struct qkv_params *qkv; /* only for EPI_QKV */
    bool x_quantized; /* x is e4m3 already, with dev->x_scale; rows of 2 ldx bytes */
    /* Weights of the RMSNorm of x that the GEMM applies itself, or NULL. Only if gemm_is_smallm_fp8
     * says so. */
    const float *norm;
} gemm_args;

/* ---- Fused norm, input side: 1 / rms of a row from its sums of squares ---- */

/* The sums of squares that one lane holds. The 32 lanes of a warp hold all sums of a row. */
typedef struct lane_sumsq {
    float sum[FUSE_NORM_LANE_SUMS]; /* in the order of their columns */
} lane_sumsq;
/* Loads this lane's sums of row m. Called before the main loop, which hides the latency. */
__device__ static inline lane_sumsq rms_prefetch(const fused_norm &f, int m, int lane) {
    lane_sumsq p = {};
#pragma unroll
    for (int k = 0; k < FUSE_NORM_LANE_SUMS; k++)
        if (lane + 32 * k < f.n_sums) p.sum[k] = f.input_sumsq[m * f.n_sums + lane + 32 * k];
    return p;
}
/* Returns 1 / rms of row m. All 32 lanes of a warp must call it, and all get the result. Called
 * after the main loop. The order of the additions is fixed. */
__device__ static inline float rms_inverse(const fused_norm &f, int m, int lane,
                                           const lane_sumsq &p) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < FUSE_NORM_LANE_SUMS; k++) sum += p.sum[k];
    for (int i = lane + 32 * FUSE_NORM_LANE_SUMS; i < f.n_sums; i += 32)
        sum += f.input_sumsq[m * f.n_sums + i];
    for (int s = 16; s; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
    return rsqrtf(sum * f.inv_E + f.eps);
}
static fused_norm gemm_fuse_norm_args(const toka_device *dev, const gemm_args *args) {
    assert((!args->next_norm && !args->norm_ready) ||
           (args->M <= FUSE_NORM_MAX_ROWS && (!args->next_norm || args->w->N == dev->E)));
    return fuse_norm_args(dev, args->next_norm, args->norm_ready);
}

/* ---- Epilogues, shared by all GEMMs ---- */

typedef struct gemm_kernel_args { /* gemm_args in the form that kernels take */
    const bf16 *x, *w;
    const float *bias; /* [N] or NULL */
    bf16 *y;
    int M, N, K, ldx, ldy;
    enum epilogue epi;
    fused_norm norm;
} gemm_kernel_args;

/* Each family holds its accumulators in another layout. So a family finds the columns that belong
 * together, and the arithmetic on them is defined once: here and, for q, k and v, in chapter 4. */

/* EPI_SWIGLU: returns silu(gate) * up. */
__device__ static inline float swiglu(float gate, float up) {
    return __fdividef(gate * up, 1 + ex2(-1.4426950408889634f * gate));
}
/* EPI_RESIDUAL: adds the bf16 of y in two neighbouring columns to their float32 sums. */
__device__ static inline void add_residual(float &sum0, float &sum1, uint32_t y) {
    sum0 += bf16_low(y), sum1 += bf16_high(y);
}
/* Adds the bias to the sums of the neighbouring columns n .. n + COLS - 1. */
template <int COLS>
__device__ static inline void add_bias(float *sums, const float *bias, int n) {
    if (!bias) return;
#pragma unroll
    for (int i = 0; i < COLS; i++) sums[i] += bias[n + i];
}

/* For EPI_RESIDUAL returns the two bf16 of y at row m, columns n and n + 1; else 0. */
__device__ static inline uint32_t gemm_residual_pair(const gemm_kernel_args &args, int m, int n) {
    return args.epi == EPI_RESIDUAL ? *(uint32_t *)(args.y + (size_t)m * args.ldy + n) : 0;
}
/* EPI_STORE, EPI_RESIDUAL and EPI_LOGITS: writes columns n and n + 1 (n even) of row m. a0, a1:
 * their accumulators. residual: from gemm_residual_pair. */
__device__ static inline void gemm_store_pair(const gemm_kernel_args &args, int m, int n, float a0,
                                              float a1, uint32_t residual) {
    if (args.epi == EPI_LOGITS) {
        *(float2 *)((float *)args.y + (size_t)m * args.ldy + n) = float2{a0, a1};
        return;
    }
    float sums[2] = {a0, a1};
    add_bias<2>(sums, args.bias, n);
    if (args.epi == EPI_RESIDUAL) add_residual(sums[0], sums[1], residual);
    *(uint32_t *)(args.y + (size_t)m * args.ldy + n) = pack_bf16(sums[0], sums[1]);
}
/* EPI_SWIGLU: writes two outputs of row m. Accumulator columns n and n + 1 are their gate (g0, g1),
 * columns n + 8 and n + 9 their up (u0, u1). n is even and n % 16 < 8. */
__device__ static inline void gemm_store_swiglu(const gemm_kernel_args &args, int m, int n,
                                                float g0, float g1, float u0, float u1) {
    float gate[2] = {g0, g1}, up[2] = {u0, u1};
    add_bias<2>(gate, args.bias, n), add_bias<2>(up, args.bias, n + 8);
    *(uint32_t *)(args.y + (size_t)m * args.ldy + (n / 16 * 8 + n % 8)) =
        pack_bf16(swiglu(gate[0], up[0]), swiglu(gate[1], up[1]));
}

static gemm_kernel_args gemm_checked_args(const gemm_args *args) {
    const weight *w = args->w;
    assert(args->M > 0 && w->N > 0 && w->K > 0 && w->N % 8 == 0 && w->K % 8 == 0 &&
           args->ldx % 8 == 0 && args->ldy % 8 == 0);
    assert(((uintptr_t)args->x | (uintptr_t)w->data | (uintptr_t)args->y) % 16 == 0);
    assert(args->ldx >= w->K && args->ldy >= (args->epi == EPI_SWIGLU ? w->N / 2 : w->N) &&
           (args->epi != EPI_SWIGLU || w->N % 16 == 0));
    return gemm_kernel_args{args->x, w->data, w->bias, args->y, args->M, w->N, w->K, args->ldx,
                            args->ldy, args->epi};
}

/* ---- gemm_mma_kernel: y[M][N] = x[M][K] W[N][K]^T on mma.sync m16n8k16 ----
 *
 * In    x bf16 [M][ldx]; W bf16 [N][K]; bias float32 [N] or NULL. Any M; N and K multiples of 8.
 * Out   y of EPI_STORE, EPI_RESIDUAL, EPI_SWIGLU or EPI_LOGITS (enum epilogue)
 *
 * Grid: one CTA per tile of BM x BN. Block: 32 threads per warp tile of WM x WN.
 * Shared memory: MMA_BUFS * (BM + BN) * 64 bytes. Work: 2MNK FLOP.
 *
 * The main loop runs over K in slices of 32 columns. cp.async fills a ring of four buffers and
 * writes zeros for rows and columns outside the matrices. A buffer holds BM rows of x, then BN
 * rows of W, 64 bytes each. Swizzle: the 16-byte chunk c of row r lies at c ^ (r/2 % 4). So
 * ldmatrix, which reads eight rows at a time, has no bank conflicts.
 *
 * Rasterization: CTAs are numbered along MMA_RASTER tiles of M before the next tile of N, so that
 * the x and W tiles of the CTAs that run at the same time (a wave) fit in L2.
 *
 * Tile 128 x 128, warp tile 64 x 32: 64 accumulators per thread, and two CTAs fit on an SM.
 * Tile 64 x 64, warp tile 32 x 32: used if there are fewer tiles of 128 x 128 than SMs.
 * sm_80 and sm_89 use this kernel. On Hopper it is a reference for the tests: there mma.sync
 * reaches about 60 % of the rate of wgmma.
 *
 * The launcher asserts (gemm_checked_args): M > 0; N, K, ldx and ldy are multiples of 8 (N of 16
 * for EPI_SWIGLU); x, W and y are 16-byte aligned; ldx and ldy are not less than the length of a
 * row. */

enum { MMA_K = 32, MMA_BUFS = 4, MMA_RASTER = 8 };

/* All threads copy rows row0 .. row0 + ROWS - 1, columns k0 .. k0 + 31, of the matrix `from`
 * ([n_rows][ld], K columns) into a buffer. */
template <int ROWS, int THREADS>
__device__ static inline void mma_load(uint32_t to, const bf16 *from, int row0, int n_rows, int ld,
                                       int k0, int K) {
    int chunk = (int)threadIdx.x % 4, k = k0 + 8 * chunk;
#pragma unroll
    for (int i = 0; i < ROWS / (THREADS / 4); i++) {
        int row = (int)threadIdx.x / 4 + i * (THREADS / 4);
        bool inside = row0 + row < n_rows && k < K;
        cp_async_16(to + row * 64 + (chunk ^ (row / 2 % 4)) * 16,
                    inside ? from + (size_t)(row0 + row) * ld + k : from, inside ? 16 : 0);
    }
}

/* acc += x W^T for the warp's tile and the 32 columns of K of one buffer. x_at and w_at: the first
 * row of the warp tile in the buffer. */
template <int WM, int WN>
__device__ static inline void mma_multiply(float acc[WM / 16][WN / 8][4], uint32_t x_at,
                                           uint32_t w_at, int lane) {
    /* The rows that this lane addresses for ldmatrix. The tiles start at multiples of 16 rows, so
     * the swizzle depends only on x_row and w_row. */
    int x_row = lane % 16, w_row = lane % 8 + lane / 16 * 8;
#pragma unroll
    for (int k16 = 0; k16 < MMA_K / 16; k16++) {
        uint32_t a[WM / 16][4], b[WN / 16][4];
        uint32_t x_chunk = ((2 * k16 + lane / 16) ^ (x_row / 2 % 4)) * 16,
                 w_chunk = ((2 * k16 + lane / 8 % 2) ^ (w_row / 2 % 4)) * 16;
#pragma unroll
        for (int i = 0; i < WM / 16; i++) ldmatrix_x4(a[i], x_at + (16 * i + x_row) * 64 + x_chunk);
#pragma unroll
        for (int j = 0; j < WN / 16; j++) ldmatrix_x4(b[j], w_at + (16 * j + w_row) * 64 + w_chunk);
#pragma unroll
        for (int i = 0; i < WM / 16; i++)
#pragma unroll
            for (int j = 0; j < WN / 8; j++) mma_16816(acc[i][j], a[i], b[j / 2] + j % 2 * 2);
    }
}

/* Applies the epilogue to the accumulators of a warp tile, which begins at row m0, column n0. */
template <int WM, int WN>
__device__ static inline void mma_epilogue(const gemm_kernel_args &args,
                                           float acc[WM / 16][WN / 8][4], int m0, int n0,
                                           int lane) {
#pragma unroll
    for (int i = 0; i < 2 * (WM / 16); i++) {
        int m = m0 + 8 * i + lane / 4, half = i % 2 * 2;
        if (m >= args.M) continue;
#pragma unroll
        for (int j = 0; j < WN / 8; j++) {
            int n = n0 + 8 * j + lane % 4 * 2;
            const float *values = acc[i / 2][j] + half, *up = acc[i / 2][j | 1] + half;
            if (n >= args.N) continue;
            if (args.epi != EPI_SWIGLU)
                gemm_store_pair(args, m, n, values[0], values[1], gemm_residual_pair(args, m, n));
            else if (j % 2 == 0) gemm_store_swiglu(args, m, n, values[0], values[1], up[0], up[1]);
        }
    }
}

/* Computes tile number blockIdx.x of y. */
template <int BM, int BN, int WM, int WN>
__device__ static inline void mma_tile(const gemm_kernel_args &args) {
    constexpr int THREADS = BM / WM * (BN / WN) * 32, BUF_BYTES = (BM + BN) * MMA_K * 2;
    extern __shared__ __align__(128) char smem[];
    int tiles_m = (args.M + BM - 1) / BM, tiles_n = (args.N + BN - 1) / BN,
        band = (int)blockIdx.x / (MMA_RASTER * tiles_n);
    int in_band = (int)blockIdx.x - band * MMA_RASTER * tiles_n,
        height = min(MMA_RASTER, tiles_m - band * MMA_RASTER);
    int m0 = (band * MMA_RASTER + in_band % height) * BM, n0 = in_band / height * BN;
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, warp_m = warp / (BN / WN) * WM,
        warp_n = warp % (BN / WN) * WN;
    int n_slices = (args.K + MMA_K - 1) / MMA_K;
    uint32_t ring = smem_addr(smem);
    float acc[WM / 16][WN / 8][4] = {};

    grid_launch_dependents();
    /* Weights do not depend on the previous kernel, so they are loaded before grid_wait(). */
    for (int slice = 0; slice < MMA_BUFS - 1; slice++)
        mma_load<BN, THREADS>(ring + slice * BUF_BYTES + BM * 64, args.w, n0, args.N, args.K,
                              slice * MMA_K, args.K);
    grid_wait();
    for (int slice = 0; slice < MMA_BUFS - 1; slice++) {
        mma_load<BM, THREADS>(ring + slice * BUF_BYTES, args.x, m0, args.M, args.ldx, slice * MMA_K,
                              args.K);
        cp_async_commit();
    }
    for (int slice = 0; slice < n_slices; slice++) {
        uint32_t buf_at = ring + slice % MMA_BUFS * BUF_BYTES,
                 next_at = ring + (slice + MMA_BUFS - 1) % MMA_BUFS * BUF_BYTES;
        int k = (slice + MMA_BUFS - 1) * MMA_K;
        cp_async_wait<MMA_BUFS - 2>();
        /* After this barrier all threads see this slice, and all warps have read the previous
         * slice. So the next loads may overwrite the buffer of the previous slice. */
        __syncthreads();
        mma_load<BM, THREADS>(next_at, args.x, m0, args.M, args.ldx, k, args.K);
        mma_load<BN, THREADS>(next_at + BM * 64, args.w, n0, args.N, args.K, k, args.K);
        cp_async_commit();
        mma_multiply<WM, WN>(acc, buf_at + warp_m * 64, buf_at + (BM + warp_n) * 64, lane);
    }
    mma_epilogue<WM, WN>(args, acc, m0 + warp_m, n0 + warp_n, lane);
}
template <int BM, int BN, int WM, int WN>
__global__ static void __launch_bounds__(BM / WM * (BN / WN) * 32)
    gemm_mma_kernel(const gemm_kernel_args args) {
    mma_tile<BM, BN, WM, WN>(args);
}

template <int BM, int BN, int WM, int WN>
static void gemm_mma_tile(toka_device *dev, const gemm_args *args) {
    gemm_kernel_args kernel_args = gemm_checked_args(args);
    launch_dependent(dev, "GEMM (mma)", gemm_mma_kernel<BM, BN, WM, WN>,
                     {dim3((unsigned)(ceil_div(kernel_args.M, BM) * ceil_div(kernel_args.N, BN))),
                      BM / WM * (BN / WN) * 32, MMA_BUFS * (BM + BN) * MMA_K * 2},
                     kernel_args);
}
static void gemm_mma(toka_device *dev, const gemm_args *args) {
    if (ceil_div(args->M, 128) * ceil_div(args->w->N, 128) >= dev->n_sms)
        gemm_mma_tile<128, 128, 64, 32>(dev, args);
    else gemm_mma_tile<64, 64, 32, 32>(dev, args);
}

/* ===========================================================================
 * MARK: 6. GEMM on wgmma [kernel]
 *
 * y[M][N] = x[M][K] W[N][K]^T on wgmma, with an epilogue on the accumulators (types epi_*). Hopper
 * uses it for M >= 65, for M >= 33 with some W (gemm_family), and for the LM head with M >= 17
 * (SAMP_STORED_MAX). For e4m3 operands (gemm_fp8) it is used for every M.
 *
 * In      x bf16 [M][ldx], W bf16 [N][K], bias float32 [N] or NULL; gemm_fp8: both e4m3, with
 *         scales (struct weight, x_scale)
 * Out     epi_store, epi_residual, epi_swiglu: y bf16; epi_logits: y float32; epi_qkv: q and the KV
 *         pages; epi_scatter: receive buffers of the tensor ranks; epi_sample: see chapter 11
 * Sizes   any M >= 1; N a multiple of 8 (EPI_SWIGLU 16), K a multiple of 8. TMA fills in zeros
 *         beyond the last row of W and the last column of K. Beyond the last row of x it reads
 *         padding rows (GEMM_PAD_ROWS), whose outputs are discarded. Nothing is stored beyond the
 *         edges of y.
 * Grid    min(units, SMs / cluster size) clusters; with SPLIT > 1 one cluster per unit. Block: 384.
 *         Shared memory: gemm_smem.
 * Work    2MNK FLOP. L2 to shared memory: (128 + BN/multicast) * K * 2 bytes per tile.
 *
 * A CTA computes tiles of 128 rows by BN columns. The main loop runs over K in K blocks of 64
 * columns: 128 bytes, the width of the swizzle. The CTA has three warpgroups:
 *
 *   warpgroup 0   producer, 40 registers a thread. One thread of warp 0 loads W by TMA, one thread
 *                 of warp 1 loads x. Both fill the same ring of buffers.
 *   warpgroup 1   consumer 0, 232 registers a thread: the first 64 rows of the tile. A thread holds
 *                 BN/2 float32 accumulators.
 *   warpgroup 2   consumer 1: the other 64 rows
 *
 * Shared memory:
 *
 *   ring          n_bufs buffers of one K block each: [128 rows of x][64], then [BN rows of W][64],
 *                 128-byte swizzle
 *   full[buf]     mbarrier that the consumers wait on. A phase completes after the mbar_expect_tx
 *                 of both producers and all bytes of the buffer.
 *   empty[buf]    mbarrier that the producers wait on. A phase completes when the buffer has been
 *                 read by its consumers (two; with ping-pong one) in each of the `multicast` CTAs
 *                 that share W.
 *   staging       16 rows of output for each of the 8 consumer warps. A warp stores its own rows by
 *                 TMA. For epi_residual it also loads y into them by TMA (mbarrier
 *                 load_bars[warp]). So no warp waits for another warp.
 *
 * Persistent CTAs: there is at most one CTA per SM. A unit is `multicast` tiles adjacent along M.
 * With multicast = 2, the two CTAs of a cluster that compute a unit share the W tile: each CTA
 * loads half of the rows of W into both CTAs. Rasterization: units are numbered along raster_m
 * units of M before the next tile of N, so that the x and W tiles of a wave stay in L2. The ring
 * continues across tiles: during an epilogue the producers already load the next tile.
 *
 * PINGPONG: the consumers take tiles alternately. A consumer computes all 128 rows of its tiles
 * with two wgmma of 64 rows for each 16 columns of K. A thread holds BN float32 accumulators. While
 * one consumer is in its epilogue, the other has the full tensor core rate.
 *
 *   producers    tile 0      | tile 1      | tile 2      | tile 3 ...
 *   consumer 0   main loop 0 | epilogue 0  | main loop 2 | epilogue 2 ...
 *   consumer 1               | main loop 1 | epilogue 1  | main loop 3 ...
 *
 * There is one ring for both consumers. Each consumer reads the buffers of its own tiles and skips
 * the buffers of the other tiles. A consumer starts the main loop of a tile when the other consumer
 * has issued the last wgmma of the tile before (named barriers 2 and 3).
 *
 * gemm_stagger is for epilogues that are long compared with the main loop (only epi_sample). Each
 * consumer computes its 64 rows of every tile, but consumer 0 finishes first. Consumer 1 pauses a
 * few K blocks before the end of the tile and computes these blocks during the epilogue of consumer
 * 0. Consumer 0 begins the next tile during the epilogue of consumer 1.
 *
 *   consumer 0   main loop ........... | epilogue              | main loop (alone) | main loop ...
 *   consumer 1   main loop ... (pause) | last K blocks (alone) | epilogue          | main loop ...
 *
 * SPLIT > 1: split-K, for launches of few tiles. SPLIT CTAs of a cluster share one tile, and each
 * computes the products of a part of K. A reduce-scatter through distributed shared memory
 * (st.async) gives each CTA the sums of BN/SPLIT columns, added in the order of K. The CTA runs the
 * epilogue on them. A cluster computes only one unit.
 *
 * Why this shape (figures: test/results/kernel-choices.md):
 *   The main loop runs within 4 % of the tensor core rate.
 *   A launch costs about 3 us more than its main loops: the end of the previous kernel (0.6 us on
 *   an H100), the wait for the first x (1.2 us), the last epilogue and its store.
 *   Above 600 TFLOP/s, power limits the GPU. Reading less from L2 saves power: BN 192 is 4 to 5 %
 *   faster than BN 128, and multicast 2 is faster than 1.
 *   cuBLAS takes 1.04 times as long (geometric mean of 61 bare GEMMs, M >= 512, H200).
 *
 * The launchers assert:
 *   all          M > 0; N, K and ldx are multiples of 8; x and W are 16-byte aligned; fewer than
 *                2^22 units; if y is stored by TMA, ldy is a multiple of 8 and y 16-byte aligned
 *   EPI_SWIGLU   no bias; N is a multiple of 16
 *   EPI_LOGITS   no bias; ldy is even
 *   QKV          N = (H + 2K) * D; page size B is a power of two; QK-norm: whole heads in a tile
 *   scatter      at most BARRIER_MAX_RANKS ranks; rows_per_rank is a multiple of 16; n_ranks times
 *                rows_per_rank is at least M
 *
 * Retired (all figures: test/results/kernel-choices.md):
 *   mbarrier.arrive.release.cluster to release a buffer of the other CTA: it fences the whole GPU,
 *   and the GEMM has half the speed
 *   BN 256 with 64 KB of staging and only 3 buffers: 1,090 clocks a K block instead of 1,030
 *   residual y loaded through the ring: 2,400 clocks of waiting after the last K block
 *   split-K exchange by st.shared::cluster and cluster barriers: 3.4 us; by bulk copies: 1.4 us
 *   (now, by st.async: 0.9 us)
 *   one producer thread for x and W: each load keeps the thread busy for 150 to 240 clocks
 *   W of QKV in the model's order, loaded in six pieces of heads: 150 to 260 clocks more a K block
 *   gemm_stagger 2, 3, 4 for QKV, o, down: 0.99 to 1.02 of the time without
 *   ping-pong for epi_residual: 1 to 8 % slower than BN 256 without it; for QKV at BN 128: 4 to 6 %
 *   slower
 *   ping-pong for the LM head with sampling: 0 to 3 % faster at K = 2048, 10 to 12 % slower at 896
 *   fused norm for many rows: 8,192 samples 0.2 % faster, 128 samples 3.6 % slower
 *   for o of Llama-3.2-1B at M = 512, which takes 9.6 us now:
 *     two CTAs per SM, so that the next kernel loads W concurrently: 12.3 us
 *     each column of tiles starts at another K block, with less L2 reuse: 12.8 us
 *     two tiles adjacent along N share x: 10.4 us
 *     the rest of W prefetched into L2: 12.4 us; the rest of x: 10.1 us
 *     tensor maps prefetched: 9.6 to 10.0 us
 * Not tried: a split-K exchange during the main loop of the next columns. A CTA would exchange 96
 * KB, which takes longer than that main loop (12 KB take 1.3 us).
 * =========================================================================== */

/* Kernel argument: the sizes and the rasterization. A band is raster_m rows of units. */
struct gemm_problem {
    int M, N, K;
    int units_m,            /* units along M: ceil(M / (128 * multicast)) */
        tiles_n;            /* tiles along N: ceil(N / BN) */
    int raster_m,           /* rows of units in a band; the last band may have fewer */
        multicast;          /* 1 or 2: number of tiles in a unit, and of CTAs that share a W tile */
    float inv_band,         /* 1 / (raster_m * tiles_n) */
          inv_height,       /* 1 / raster_m */
          inv_last_height;  /* 1 / rows of units in the last band */
    /* FP8 only: x_rows: rows of x in a TMA box; x_scale [M]; w_scale: scale of struct weight */
    int x_rows;
    const float *x_scale, *w_scale;
};

/* The most shared memory that a CTA can have on Hopper: 228 KB an SM, of which CUDA keeps 1 KB for
 * each CTA. */
constexpr int HOPPER_CTA_SMEM = 227 * 1024;

/* Shared memory of one instance. It starts at a multiple of 1,024 bytes and holds, in this order:
 * the ring; the staging of OUT_COLS columns (0: no staging); with SPLIT > 1 the partial sums that
 * the other CTAs send; the mbarriers full[n_bufs], empty[n_bufs], partials_bar[2], load_bars[8]. */
template <int BN, int SPLIT, int OUT_COLS, int ROWS = 128> struct gemm_smem {
    static constexpr int buf_bytes = (ROWS + BN) * 128;
    static constexpr int out_bytes = ROWS * OUT_COLS * 2;
    static constexpr int partial_bytes = 128 * (BN / SPLIT) * 4 * (SPLIT - 1);
    static constexpr int fixed_bytes = 1024 + 256 + out_bytes + partial_bytes;
    static constexpr int max_bytes = ROWS == 128 ? HOPPER_CTA_SMEM : HOPPER_CTA_SMEM / 2,
                         max_bufs = ROWS == 128 ? 8 : 11;
    static constexpr int n_bufs = (max_bytes - fixed_bytes) / buf_bytes < max_bufs
                                      ? (max_bytes - fixed_bytes) / buf_bytes
                                      : max_bufs;
    static constexpr int bytes = fixed_bytes + n_bufs * buf_bytes;
    static constexpr int out_at = n_bufs * buf_bytes, partials_at = out_at + out_bytes,
                         bars_at = partials_at + partial_bytes;
};

/* The operands of the main loop.
 *
 * gemm_fp8: e4m3. A K block has 128 columns: as many bytes as 64 columns of bf16, so the ring is
 * the same. The tensor cores keep 14 bits of a sum and cut the rest. So a K block gives one partial
 * sum from zero, which is then added to float32 accumulators (promotion). No instance splits K. So
 * the order of every sum depends on K alone: a row has the same bits whatever M and the tile are.
 * BLOCKED: the partial sum is multiplied by the scale of its block of W as it is added. All other
 * scales are applied to the finished sums (gemm_apply_scales).
 * ROWS 64: for M <= 64. One consumer warpgroup; two CTAs fit on an SM. TMA loads only x_rows rows
 * of x. The others of the 64 hold old bytes, whose sums are not stored. */
struct gemm_bf16 {
    static constexpr bool is_bf16 = true, is_fp8 = false, blocked = false, is_mxfp4 = false;
    static constexpr int rows = 128, k_cols = 64;
};
template <int ROWS, bool BLOCKED> struct gemm_fp8 {
    static constexpr bool is_bf16 = false, is_fp8 = true, blocked = BLOCKED, is_mxfp4 = false;
    static constexpr int rows = ROWS, k_cols = 128;
};

/* Returns the columns of a round. The epilogue stages 256 columns in two rounds of 128, and fewer
 * columns in one round. So the staging leaves space for a ring of four buffers. */
__host__ __device__ constexpr int gemm_round_cols(int cols) {
    return cols > 128 && cols % 128 == 0 ? 128 : cols;
}
/* Returns the columns of a panel. In the staging `cols` columns lie in panels of 16 rows by 64, 32
 * or 16 columns, with the 128-byte, 64-byte or 32-byte swizzle. */
__host__ __device__ constexpr int gemm_panel_cols(int cols) {
    return cols % 64 == 0 ? 64 : cols % 32 == 0 ? 32 : 16;
}

/* The part of a tile that one warp passes to its epilogue: rows row0 .. row0 + 15 and COLS columns
 * from col0. Lane l holds the columns col0 + 8j + 2(l%4) + {0,1}: of row row0 + l/4 in acc[4j] and
 * acc[4j+1], of row row0 + l/4 + 8 in acc[4j+2] and acc[4j+3] (see wgmma). */
struct gemm_tile {
    int M, N;          /* rows and columns of the matrix; the tile may reach beyond them */
    int row0, col0;
    int lane;
    uint32_t out;      /* the warp's staging: 16 rows of staged_cols(COLS) columns */
    uint32_t load_bar; /* mbarrier of the TMA loads into the staging */
    int tile_count;    /* tiles that this warp has done; the low bit is the parity of load_bar */
};
/* Number of K blocks that consumer 1 still has to compute when consumer 0 has issued its last wgmma
 * of a tile. 0: the consumers are not staggered. epi_sample has 3 (chapter 11). */
template <class EPI> constexpr int gemm_stagger = 0;
/* Inputs that an epilogue loads during the main loop and keeps in registers. Most epilogues have
 * none. */
template <class EPI, int COLS> struct gemm_prefetched {};
/* True if gemm_prefetched is not empty. An empty struct has size 1. */
template <class EPI, int C>
constexpr bool gemm_has_prefetched = sizeof(gemm_prefetched<EPI, C>) > 1;

#if HOPPER
/* ---- Staging of the output ---- */

/* Returns the address that a lane passes to stmatrix_x4 or ldmatrix_x4 for block `block` of 16 x 16
 * in a staging of COLS columns. The four 8 x 8 matrices are rows 0-7 and rows 8-15 of the left 8
 * columns, then the same rows of the right 8 columns. */
template <int COLS>
__device__ static inline uint32_t gemm_staging_at(uint32_t out, int lane, int block) {
    constexpr int PANEL = gemm_panel_cols(COLS);
    int row = lane & 15, col = 16 * block + (lane >> 4) * 8;
    uint32_t byte = (uint32_t)(col / PANEL * (32 * PANEL) + row * (2 * PANEL) + col % PANEL * 2);
    return out + (byte ^ (byte >> 7 & (PANEL / 8 - 1)) << 4);
}
/* Rounds the accumulators of COLS columns to bf16 and writes them to the staging. */
template <int COLS>
__device__ static inline void gemm_staging_write(const float *acc, const gemm_tile &tile) {
#pragma unroll
    for (int block = 0; block < COLS / 16; block++) {
        const float *values = acc + 8 * block;
        stmatrix_x4(gemm_staging_at<COLS>(tile.out, tile.lane, block),
                    pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
                    pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7]));
    }
}
/* Stores the warp's 16 rows of COLS staged columns by TMA to y at row tile.row0, column col0. y has
 * n_cols columns. */
template <int COLS>
__device__ static inline void gemm_staging_store(const gemm_tile &tile, const CUtensorMap *map_y,
                                                 int col0, int n_cols) {
    constexpr int PANEL = gemm_panel_cols(COLS);
    fence_async_smem();
    __syncwarp();
    if (tile.lane == 0 && tile.row0 < tile.M) {
#pragma unroll
        for (int panel = 0; panel < COLS / PANEL; panel++)
            if (col0 + panel * PANEL < n_cols)
                tma_store_2d(map_y, tile.out + panel * 32 * PANEL, col0 + panel * PANEL, tile.row0);
        tma_store_commit();
    }
}
/* Waits until the TMA stores have read the staging, so that the warp may write it again. */
__device__ static inline void gemm_staging_wait(const gemm_tile &tile) {
    if (tile.lane == 0) tma_store_wait_read<0>();
    __syncwarp();
}

template <int COLS>
__device__ static inline void gemm_add_bias(float (&acc)[COLS / 2], const gemm_tile &tile,
                                            const float *bias) {
    if (!bias) return;
#pragma unroll
    for (int j = 0; j < COLS / 8; j++) {
        int col = tile.col0 + 8 * j;
        if (col >= tile.N) continue;
        float2 b = *(const float2 *)(bias + col + 2 * (tile.lane & 3));
        acc[4 * j] += b.x, acc[4 * j + 1] += b.y, acc[4 * j + 2] += b.x, acc[4 * j + 3] += b.y;
    }
}
#endif

/* ---- Epilogues ----
 *
 * An epilogue is a type with these members:
 *   params                    the last argument of the kernel
 *   staged_cols(COLS)         number of columns to stage at a time if the tile has COLS columns
 *   prefetch<COLS>            issues loads of the epilogue's inputs in the middle of the main loop.
 *                             At its start they would delay the loads of the first ring buffers.
 *   prefetch_indirect<COLS>   issues loads whose addresses come from the results of prefetch, at
 *                             3/4 of the main loop. Only epilogues with a gemm_prefetched have it.
 *   run<COLS>                 processes the accumulators of COLS columns. All 32 lanes call it,
 *                             also if rows or columns lie beyond the edge of the matrix.
 *
 * With ping-pong all three run after the main loop, one after the other, for each 64 rows of the
 * tile. The main loop of the other consumer hides their latency. */

struct epi_store { /* y = acc + bias */
    struct params {
        const float *bias; /* [N] or NULL */
        const bf16 *y;     /* read by epi_residual only: [M][N], row stride ldy */
        int ldy;
    };
    __host__ __device__ static constexpr int staged_cols(int cols) { return gemm_round_cols(cols); }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &, const CUtensorMap *, const params &) {
    }
    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      const CUtensorMap *map_y, const params &epi_args) {
        constexpr int ROUND = gemm_round_cols(COLS);
        gemm_add_bias<COLS>(acc, tile, epi_args.bias);
#pragma unroll
        for (int i = 0; i < COLS / ROUND; i++) {
            gemm_staging_wait(tile);
            gemm_staging_write<ROUND>(acc + i * (ROUND / 2), tile);
            gemm_staging_store<ROUND>(tile, map_y, tile.col0 + i * ROUND, tile.N);
        }
    }
#endif
};

/* Fused reduce-scatter over the tensor ranks. acc + bias of this rank is a partial sum of y. Rows
 * r * rows_per_rank .. (r + 1) * rows_per_rank - 1 are stored in the receive buffer of rank r. Rank
 * r adds the partial sums of all ranks later (chapter 10). The stores overlap with the main loops
 * of other tiles. */
struct epi_scatter {
    struct params {
        /* [rank] map of its receive buffer [rows_per_rank][N], with boxes of 16 rows */
        CUtensorMap recv_maps[BARRIER_MAX_RANKS];
        const float *bias; /* [N] or NULL */
        /* a multiple of 16, so that all rows of a warp go to one rank */
        int rows_per_rank;
    };
    __host__ __device__ static constexpr int staged_cols(int cols) { return gemm_round_cols(cols); }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &, const CUtensorMap *, const params &) {
    }
    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      const CUtensorMap *, const params &epi_args) {
        const int rank = tile.row0 / epi_args.rows_per_rank;
        gemm_tile rank_tile = tile;
        rank_tile.row0 -= rank * epi_args.rows_per_rank,
            rank_tile.M -= rank * epi_args.rows_per_rank;
        epi_store::run<COLS>(acc, rank_tile, epi_args.recv_maps + rank, {epi_args.bias, NULL, 0});
    }
#endif
};
/* True if the epilogue stores to the memory of other GPUs. Then each CTA waits at its end until
 * these stores are complete. */
template <class EPI> constexpr bool gemm_stores_remote = false;
template <> constexpr bool gemm_stores_remote<epi_scatter> = true;

/* y += acc + bias. prefetch loads the y of the first round into the staging by TMA. BN 256 has two
 * rounds: run begins with the loads of the second round's y into registers, so that adding up the
 * first round hides them. */
struct epi_residual {
    typedef epi_store::params params;
    __host__ __device__ static constexpr int staged_cols(int cols) { return gemm_round_cols(cols); }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &tile, const CUtensorMap *map_y,
                                           const params &) {
        constexpr int ROUND = gemm_round_cols(COLS), PANEL = gemm_panel_cols(ROUND);
        if (tile.lane != 0) return;
        tma_store_wait_read<0>();
        mbar_expect_tx(tile.load_bar, 32 * ROUND);
        for (int i = 0; i < ROUND / PANEL; i++)
            tma_load_2d(tile.out + i * 32 * PANEL, map_y, tile.load_bar, tile.col0 + i * PANEL,
                        tile.row0);
    }
    /* Adds acc to the ROUND columns of y in the staging, and stores them at col0. */
    template <int ROUND>
    __device__ static inline void add(float *acc, const gemm_tile &tile,
                                      const CUtensorMap *map_y, int col0) {
#pragma unroll
        for (int block = 0; block < ROUND / 16; block++) {
            float *values = acc + 8 * block;
            uint32_t staged_at = gemm_staging_at<ROUND>(tile.out, tile.lane, block), pairs[4];
            ldmatrix_x4(pairs, staged_at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                add_residual(values[2 * i], values[2 * i + 1], pairs[i]);
                pairs[i] = pack_bf16(values[2 * i], values[2 * i + 1]);
            }
            stmatrix_x4(staged_at, pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        gemm_staging_store<ROUND>(tile, map_y, col0, tile.N);
    }
    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      const CUtensorMap *map_y, const params &epi_args) {
        constexpr int ROUND = gemm_round_cols(COLS), per_row = ROUND / 8,
                      n_chunks = COLS > ROUND ? 16 * per_row / 32 : 0;
        uint4 y[n_chunks + 1];
        int row = tile.lane / per_row, chunk = tile.lane % per_row,
            col = tile.col0 + ROUND + 8 * chunk;
#pragma unroll
        for (int i = 0; i < n_chunks; i++) {
            int r = tile.row0 + i * (32 / per_row) + row;
            y[i] = r < tile.M && col < tile.N
                       ? *(const uint4 *)(epi_args.y + (size_t)r * epi_args.ldy + col)
                       : uint4{};
        }
        gemm_add_bias<COLS>(acc, tile, epi_args.bias);
        mbar_wait(tile.load_bar, tile.tile_count & 1);
        add<ROUND>(acc, tile, map_y, tile.col0);
        if constexpr (n_chunks > 0) {
            static_assert(COLS == 2 * ROUND && ROUND == 128,
                          "two rounds of two panels of 64 columns");
            gemm_staging_wait(tile);
#pragma unroll
            for (int i = 0; i < n_chunks; i++) {
                uint32_t byte = (uint32_t)(chunk / 8 * 2048 + (i * (32 / per_row) + row) * 128 +
                                           chunk % 8 * 16);
                smem_store_16(tile.out + (byte ^ (byte >> 7 & 7) << 4), y[i]);
            }
            __syncwarp();
            add<ROUND>(acc + ROUND / 2, tile, map_y, tile.col0 + ROUND);
        }
    }
#endif
};

/* y[M][N/2] = silu(gate) * up. Of each 16 accumulator columns the left 8 are gate, the right 8 are
 * up. */
struct epi_swiglu {
    struct params {
        int unused;
    };
    __host__ __device__ static constexpr int staged_cols(int cols) { return cols / 2; }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &, const CUtensorMap *, const params &) {
    }
    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      const CUtensorMap *map_y, const params &) {
        gemm_staging_wait(tile);
#pragma unroll
        for (int block = 0; block < COLS / 32; block++) {
            uint32_t r[4];
            /* The 8 x 8 matrices of stmatrix_x4: i = 0 and 1 are rows 0-7 and 8-15 of the left 8
             * output columns, i = 2 and 3 the same rows of the right 8. */
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *logits_a = acc + 16 * block + 8 * (i >> 1) + 2 * (i & 1);
                r[i] = pack_bf16(swiglu(logits_a[0], logits_a[4]),
                                 swiglu(logits_a[1], logits_a[5]));
            }
            stmatrix_x4(gemm_staging_at<COLS / 2>(tile.out, tile.lane, block), r[0], r[1], r[2],
                        r[3]);
        }
        gemm_staging_store<COLS / 2>(tile, map_y, tile.col0 / 2, tile.N / 2);
    }
#endif
};

/* y = acc, float32, without staging. Four lanes together write a whole 32-byte sector. */
struct epi_logits {
    struct params {
        float *y; /* [M][N], row stride ld */
        int ld;
    };
    __host__ __device__ static constexpr int staged_cols(int) { return 0; }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &, const CUtensorMap *, const params &) {
    }
    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      const CUtensorMap *, const params &epi_args) {
        int row = tile.row0 + tile.lane / 4, col = tile.col0 + 2 * (tile.lane & 3);
        float *y = epi_args.y + (size_t)row * epi_args.ld + col;
#pragma unroll
        for (int j = 0; j < COLS / 8; j++) {
            if (tile.col0 + 8 * j >= tile.N) continue;
            if (row < tile.M) *(float2 *)(y + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
            if (row + 8 < tile.M)
                *(float2 *)(y + (size_t)8 * epi_args.ld + 8 * j) =
                    make_float2(acc[4 * j + 2], acc[4 * j + 3]);
        }
    }
#endif
};

/* ---- QKV epilogue: bias, QK-norm, RoPE; writes q and the pages of K and V (qkv_params) ----
 *
 * The rows of W and the bias are in the order of qkv_interleave, so that one thread holds both
 * elements of a RoPE pair. A tile may begin or end inside a head, at any multiple of 16 columns,
 * without cutting a pair. Only QK-norm needs whole heads in a tile (gemm_whole_heads).
 *
 * All arithmetic is float32 on the accumulators, and the result is rounded to bf16 once. The bf16
 * rows pass through the warp's staging. From there each lane writes chunks of 16 bytes, and
 * neighbouring lanes write neighbouring chunks of a row. */
template <int D> struct epi_qkv;
template <int D, int COLS> struct gemm_prefetched<epi_qkv<D>, COLS> {
    /* Number of blocks of 16 columns with different cosines and sines. They repeat in each head. */
    static constexpr int rope_blocks = (COLS < D ? COLS : D) / 16;
    /* True: prefetch_indirect loads the cosines and sines of all blocks. False: there are too few
     * registers, and run loads them block by block. */
    static constexpr bool preload_rope = COLS + D <= 320;
    static constexpr int /* for send; a chunk is 8 columns */
        panel_chunks = gemm_panel_cols(gemm_round_cols(COLS)) / 8, /* chunks in a row of a panel */
        row_step = 32 / panel_chunks, /* rows of a panel that the 32 lanes cover at a time */
        chunks = 16 / row_step;       /* chunks of a panel that a lane writes */
    int pos[2],  /* positions of the lane's two rows */
        kv_slot; /* kv_slot of row row0 + lane % 16 */
    /* of each row that the lane writes: qkv_q_row and qkv_kv_row. send adds qkv_head_row. */
    uint32_t q_row[chunks], kv_row[chunks];
    /* [block][row] cosines and sines of the lane's two pairs in a block, for each of its rows */
    float4 rope_table[preload_rope ? rope_blocks : 1][2];
};

template <int D> struct epi_qkv {
    typedef qkv_params params;
    template <int COLS> using prefetched = gemm_prefetched<epi_qkv<D>, COLS>;
    __host__ __device__ static constexpr int staged_cols(int cols) { return gemm_round_cols(cols); }
#if HOPPER
    template <int COLS>
    __device__ static inline void prefetch(const gemm_tile &tile, prefetched<COLS> &fetched,
                                           const params &epi_args) {
        int row = tile.row0 + tile.lane / 4, last_row = tile.M - 1;
        fetched.pos[0] = epi_args.pos[min(row, last_row)],
        fetched.pos[1] = epi_args.pos[min(row + 8, last_row)];
        fetched.kv_slot = epi_args.kv_slot[min(tile.row0 + (tile.lane & 15), last_row)];
        if (epi_args.bias && 32 * tile.lane < min(COLS, tile.N - tile.col0))
            l2_prefetch(epi_args.bias + tile.col0 + 32 * tile.lane);
    }
    /* Loads the cosines and sines of the lane's two pairs in block `block`, for its two rows. */
    template <int COLS>
    __device__ static inline void load_rope(float4 to[2], int block, const gemm_tile &tile,
                                            const prefetched<COLS> &fetched,
                                            const params &epi_args) {
        int elem = (tile.col0 + 16 * block) % D / 2 + 2 * (tile.lane & 3);
#pragma unroll
        for (int i = 0; i < 2; i++)
            to[i] = *(const float4 *)(epi_args.rope + (size_t)fetched.pos[i] * (D / 2) + elem);
    }
    template <int COLS>
    __device__ static inline void prefetch_indirect(const gemm_tile &tile,
                                                    prefetched<COLS> &fetched,
                                                    const params &epi_args) {
#pragma unroll
        for (int i = 0; i < prefetched<COLS>::chunks; i++) {
            int row = tile.lane / prefetched<COLS>::panel_chunks + i * prefetched<COLS>::row_step,
                kv_slot = __shfl_sync(~0u, fetched.kv_slot, row);
            fetched.q_row[i] = qkv_q_row(epi_args, tile.row0 + row);
            fetched.kv_row[i] = qkv_kv_row(epi_args, kv_slot);
        }
        if constexpr (prefetched<COLS>::preload_rope) {
            if (tile.col0 >= (epi_args.H + epi_args.K) * D) return;
#pragma unroll
            for (int block = 0; block < prefetched<COLS>::rope_blocks; block++)
                load_rope<COLS>(fetched.rope_table[block], block, tile, fetched, epi_args);
        }
    }

    /* QK-norm: RMSNorm over each head of q and k. Four lanes hold a row and add their squares. */
    template <int COLS>
    __device__ static inline void norm(float (&acc)[COLS / 2], const gemm_tile &tile,
                                       const params &epi_args) {
#pragma unroll
        for (int local_head = 0; local_head < COLS / D; local_head++) {
            int head = tile.col0 / D + local_head;
            const float *weights = qkv_norm_weights(epi_args, head);
            if (!weights) continue;
            float *values = acc + local_head * (D / 2), sum0 = 0, sum1 = 0;
#pragma unroll
            for (int i = 0; i < D / 2; i += 4)
                sum0 += values[i] * values[i] + values[i + 1] * values[i + 1],
                    sum1 += values[i + 2] * values[i + 2] + values[i + 3] * values[i + 3];
            sum0 += __shfl_xor_sync(~0u, sum0, 1), sum1 += __shfl_xor_sync(~0u, sum1, 1);
            sum0 += __shfl_xor_sync(~0u, sum0, 2), sum1 += __shfl_xor_sync(~0u, sum1, 2);
            sum0 = qk_norm_scale(sum0, D, epi_args.eps);
            sum1 = qk_norm_scale(sum1, D, epi_args.eps);
#pragma unroll
            for (int i = 0; i < D / 2; i += 4) {
                float2 gain = *(const float2 *)(weights + i / 8 * 8 + i / 4 % 2 * (D / 2) +
                                                2 * (tile.lane & 3));
                values[i] *= sum0 * gain.x, values[i + 1] *= sum0 * gain.y,
                    values[i + 2] *= sum1 * gain.x, values[i + 3] *= sum1 * gain.y;
            }
        }
    }

    /* Rotates the lane's pairs of one block: two pairs in each of its two rows. c0: cosines and
     * sines of the first row; c1: of the second row. */
    __device__ static inline void rotate_block(float *values, float4 c0, float4 c1) {
        rope_rotate(values[0], values[4], c0.x, c0.y);
        rope_rotate(values[1], values[5], c0.z, c0.w);
        rope_rotate(values[2], values[6], c1.x, c1.y);
        rope_rotate(values[3], values[7], c1.z, c1.w);
    }
    template <int COLS>
    __device__ static inline void rope(float (&acc)[COLS / 2], const gemm_tile &tile,
                                       prefetched<COLS> &fetched, const params &epi_args) {
        /* The first rope_cols columns of the tile are q or k. The others are v, without RoPE. */
        int rope_cols = (epi_args.H + epi_args.K) * D - tile.col0;
#pragma unroll
        for (int rope_block = 0; rope_block < prefetched<COLS>::rope_blocks; rope_block++) {
            float4 *cos_sin = fetched.rope_table[prefetched<COLS>::preload_rope ? rope_block : 0];
            if (!prefetched<COLS>::preload_rope)
                load_rope<COLS>(cos_sin, rope_block, tile, fetched, epi_args);
#pragma unroll
            for (int block = rope_block; block < COLS / 16; block += D / 16)
                if (16 * block < rope_cols) rotate_block(acc + 8 * block, cos_sin[0], cos_sin[1]);
        }
    }

    /* Writes the ROUND staged columns, which begin at column col0, to q and the pages, panel by
     * panel. In a panel a lane writes the same chunk of 8 columns of every row_step-th row. */
    template <int COLS, int ROUND>
    __device__ static inline void send(const gemm_tile &tile, const prefetched<COLS> &fetched,
                                       const params &epi_args, int col0) {
        constexpr int PANEL = gemm_panel_cols(ROUND);
        int chunk = tile.lane % (PANEL / 8), row = tile.lane / (PANEL / 8);
#pragma unroll
        for (int panel = 0; panel < ROUND / PANEL; panel++) {
            int col = col0 + panel * PANEL + 8 * chunk, head = col / D;
            int elem = col % D / 16 * 8 + col / 8 % 2 * (D / 2);
            const bool is_q = head < epi_args.H;
            const uint32_t head_row = qkv_head_row(epi_args, head);
            bf16 *to = (is_q ? epi_args.q : epi_args.kv) + elem;
#pragma unroll
            for (int i = 0; i < prefetched<COLS>::chunks; i++) {
                uint32_t byte = (uint32_t)((row + i * prefetched<COLS>::row_step) * (2 * PANEL) +
                                           chunk * 16);
                uint32_t from = tile.out + panel * 32 * PANEL +
                                (byte ^ (byte >> 7 & (PANEL / 8 - 1)) << 4);
                if (col < tile.N && tile.row0 + row + i * prefetched<COLS>::row_step < tile.M)
                    *(uint4 *)(to + (size_t)(head_row + (is_q ? fetched.q_row[i]
                                                              : fetched.kv_row[i])) * D) =
                        smem_load_16(from);
            }
        }
    }

    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      prefetched<COLS> &fetched, const params &epi_args) {
        constexpr int ROUND = gemm_round_cols(COLS);
        gemm_add_bias<COLS>(acc, tile, epi_args.bias);
        if constexpr (COLS % D == 0) norm<COLS>(acc, tile, epi_args);
        rope<COLS>(acc, tile, fetched, epi_args);
#pragma unroll
        for (int i = 0; i < COLS / ROUND; i++) {
            __syncwarp();
            gemm_staging_write<ROUND>(acc + i * (ROUND / 2), tile);
            __syncwarp();
            send<COLS, ROUND>(tile, fetched, epi_args, tile.col0 + i * ROUND);
        }
    }
#endif
};

/* ---- qkv_reorder_kernel ----
 *
 * Moves the rows of q, k and v and their biases from the model's order to that of qkv_interleave,
 * in place. It runs once, after the weights are loaded. A CTA moves 64 columns of one head through
 * shared memory.
 *
 * W bf16 [N][K], bias float32 [N] or NULL, scale [N] of an e4m3 W or NULL. Grid (N / D,
 * ceil(K / 64)), block 256. D is at most 128, K is a multiple of 8. Two columns of an e4m3 W count
 * as one. */
__global__ static void __launch_bounds__(256)
    qkv_reorder_kernel(bf16 *w, float *bias, float *scale, int K, int D) {
    __shared__ uint4 old_rows[128 * 8];
    __shared__ float old_bias[128], old_scale[128];
    bf16 *head = w + (size_t)blockIdx.x * D * K + blockIdx.y * 64;
    int n_chunks = (K - (int)blockIdx.y * 64) / 8, tid = (int)threadIdx.x;
    for (int chunk = tid; chunk < D * 8; chunk += 256)
        if (chunk % 8 < n_chunks)
            old_rows[chunk] = *(uint4 *)(head + (size_t)(chunk / 8) * K + chunk % 8 * 8);
    bool has_bias = bias && blockIdx.y == 0 && tid < D;
    bool has_scale = scale && blockIdx.y == 0 && tid < D;
    if (has_bias) old_bias[tid] = bias[blockIdx.x * D + tid];
    if (has_scale) old_scale[tid] = scale[blockIdx.x * D + tid];
    __syncthreads();
    for (int chunk = tid; chunk < D * 8; chunk += 256)
        if (chunk % 8 < n_chunks)
            *(uint4 *)(head + (size_t)qkv_interleave(chunk / 8, D / 2) * K + chunk % 8 * 8) =
                old_rows[chunk];
    if (has_bias) bias[blockIdx.x * D + qkv_interleave(tid, D / 2)] = old_bias[tid];
    if (has_scale) scale[blockIdx.x * D + qkv_interleave(tid, D / 2)] = old_scale[tid];
}
/* True if the rows of q, k and v are in the order of qkv_interleave. */
static bool qkv_is_interleaved(const toka_device *dev, int D) {
    return dev->hopper && (D == 64 || D == 128);
}
static void qkv_reorder(toka_device *dev, const weight *w, int D) {
    const int K = w->scale ? fp8_row_bytes(w->K) / 2 : w->K;
    const dim3 grid((unsigned)(w->N / D), (unsigned)ceil_div(K, 64));
    qkv_reorder_kernel<<<grid, 256, 0, dev->stream>>>(
        w->data, (float *)w->bias, w->is_blocked ? NULL : (float *)w->scale, K, D);
    CHECK_LAUNCH(dev, "order of q, k and v");
}

#if HOPPER
/* ---- The work of a CTA, and the current buffer of the ring ---- */

struct gemm_maps {
    const CUtensorMap *x, *w, *y;
};
struct gemm_cta {
    gemm_problem problem;
    gemm_maps maps;
    /* addresses in shared memory: the ring of buffers, then the mbarriers (gemm_smem) */
    uint32_t ring, full, empty, partials_bar, load_bars;
    int k_rank,         /* index among the SPLIT CTAs that share a tile */
        multicast_rank; /* index among the CTAs that share a W tile; selects the tile in a unit */
    int k_block0, n_k_blocks; /* this CTA's K blocks: k_block0 .. k_block0 + n_k_blocks - 1 */
    /* This CTA computes the units first_unit, first_unit + unit_stride ... below n_units. */
    int first_unit, unit_stride, n_units;
};

/* Returns a / b, rounded down, for 0 <= a < 2^22 and 0 < b < 2^22. per_b = 1 / b. The rounded
 * product is off by at most one, which the last line corrects. */
__device__ static inline int gemm_divide(int a, int b, float per_b) {
    int q = (int)((float)a * per_b), r = a - q * b;
    return q + (r >= b) - (r < 0);
}
struct gemm_coord {
    int m, n; /* indices of a tile: its first row is 128 * m, its first column is BN * n */
};
/* Returns the tile of this CTA in a unit. */
__device__ static inline gemm_coord gemm_tile_coord(const gemm_cta &cta, int unit) {
    const gemm_problem &problem = cta.problem;
    int band_units = problem.raster_m * problem.tiles_n,
        band = gemm_divide(unit, band_units, problem.inv_band), in_band = unit - band * band_units,
        units_left = problem.units_m - band * problem.raster_m;
    int height = min(problem.raster_m, units_left),
        n = gemm_divide(in_band, height,
                        units_left < problem.raster_m ? problem.inv_last_height
                                                      : problem.inv_height);
    return {(band * problem.raster_m + in_band - n * height) * problem.multicast +
                cta.multicast_rank,
            n};
}

struct gemm_ring {
    int buf,    /* index of the next buffer */
        parity; /* parity of the phase of full[buf] that the consumer waits for */
};
template <int BUFS> __device__ static inline void gemm_ring_next(gemm_ring &ring) {
    if (++ring.buf == BUFS) ring.buf = 0, ring.parity ^= 1;
}
/* Skips n buffers, because they belong to a tile of the other consumer. */
template <int BUFS> __device__ static inline void gemm_ring_skip(gemm_ring &ring, int n) {
    unsigned index = (unsigned)(ring.buf + n);
    ring.buf = (int)(index % BUFS);
    ring.parity ^= (int)(index / BUFS & 1);
}

/* ---- The producers: one thread of warp 0 and one of warp 1 ---- */

/* Warp 0 loads W. No kernel of a step writes W, so there is no grid_wait(). */
template <class FMT, int BN, int BUFS>
__device__ static inline void gemm_produce_w(const gemm_cta &cta) {
    uint16_t multicast_mask = (uint16_t)(3 << cta.k_rank * 2);
    gemm_ring ring = {0, 0};
    for (int unit = cta.first_unit; unit < cta.n_units; unit += cta.unit_stride) {
        int n = gemm_tile_coord(cta, unit).n;
        for (int k = cta.k_block0; k < cta.k_block0 + cta.n_k_blocks; k++) {
            uint32_t full = cta.full + 8 * ring.buf,
                     buf_at = cta.ring + ring.buf * ((FMT::rows + BN) * 128) + FMT::rows * 128;
            mbar_wait(cta.empty + 8 * ring.buf, ring.parity ^ 1);
            mbar_expect_tx(full, BN * 128);
            if (FMT::rows == 64)
                tma_load_2d_evict_first(buf_at, cta.maps.w, full, k * FMT::k_cols, n * BN);
            else if (cta.problem.multicast == 1)
                tma_load_2d(buf_at, cta.maps.w, full, k * FMT::k_cols, n * BN);
            else
                tma_load_2d_multicast(buf_at + cta.multicast_rank * (BN / 2 * 128), cta.maps.w,
                                      full, k * FMT::k_cols, n * BN + cta.multicast_rank * (BN / 2),
                                      multicast_mask);
            gemm_ring_next<BUFS>(ring);
        }
    }
    /* With multicast the other CTA arrives at the empty barriers of this CTA. So this CTA waits for
     * all of these arrivals before it exits. */
    for (int i = 0; i < BUFS && cta.problem.multicast > 1; i++) {
        mbar_wait(cta.empty + 8 * ring.buf, ring.parity ^ 1);
        gemm_ring_next<BUFS>(ring);
    }
}
/* Warp 1 loads x. */
template <class FMT, int BN, int BUFS>
__device__ static inline void gemm_produce_x(const gemm_cta &cta) {
    gemm_ring ring = {0, 0};
    grid_wait();
    for (int unit = cta.first_unit; unit < cta.n_units; unit += cta.unit_stride) {
        gemm_coord coord = gemm_tile_coord(cta, unit);
        /* at its last unit the CTA lets the next kernel start */
        if (unit + cta.unit_stride >= cta.n_units) grid_launch_dependents();
        for (int k = cta.k_block0; k < cta.k_block0 + cta.n_k_blocks; k++) {
            uint32_t full = cta.full + 8 * ring.buf;
            mbar_wait(cta.empty + 8 * ring.buf, ring.parity ^ 1);
            mbar_expect_tx(full, FMT::is_fp8 ? cta.problem.x_rows * 128 : 128 * 128);
            tma_load_2d(cta.ring + ring.buf * ((FMT::rows + BN) * 128), cta.maps.x, full,
                        k * FMT::k_cols, coord.m * FMT::rows);
            gemm_ring_next<BUFS>(ring);
        }
    }
}

/* ---- The consumers: warpgroups 1 and 2 ---- */

struct gemm_consumer {
    int index;      /* 0: warpgroup 1; 1: warpgroup 2 */
    gemm_ring ring; /* where it reads next */
};

/* Releases a buffer that this consumer has read: arrives at empty[buf] of each CTA that shares
 * W. */
__device__ static inline void gemm_release(const gemm_cta &cta, int buf) {
    int tid = threadIdx.x & 127;
    if (cta.problem.multicast == 1) {
        if (tid == 0) mbar_arrive(cta.empty + 8 * buf);
    } else if (tid < 2) mbar_arrive_remote(cta.empty + 8 * buf, cta.k_rank * 2 + tid);
}

template <class EPI, int COLS>
__device__ static inline void gemm_prefetch(const gemm_tile &tile,
                                            gemm_prefetched<EPI, COLS> &fetched,
                                            const gemm_cta &cta,
                                            const typename EPI::params &epi_args) {
    if constexpr (gemm_has_prefetched<EPI, COLS>)
        EPI::template prefetch<COLS>(tile, fetched, epi_args);
    else EPI::template prefetch<COLS>(tile, cta.maps.y, epi_args);
}
template <class EPI, int COLS>
__device__ static inline void gemm_prefetch_indirect(const gemm_tile &tile,
                                                     gemm_prefetched<EPI, COLS> &fetched,
                                                     const typename EPI::params &epi_args) {
    if constexpr (gemm_has_prefetched<EPI, COLS>)
        EPI::template prefetch_indirect<COLS>(tile, fetched, epi_args);
}

/* The main loop of one consumer over the tile of `unit`: 64 rows (HALVES = 1) or, in ping-pong, 128
 * rows (HALVES = 2).
 *
 * In ping-pong the consumers also read the buffers in order. A consumer waits at a named barrier
 * until the other one has issued the last wgmma of its tile (which may still be in flight). Without
 * this order a consumer could wait on full[buf] when the last completed phase of that mbarrier is
 * two phases before the phase it waits for. Both have the same parity, so the wait would return too
 * early. */
template <class EPI, int BN, int COLS, int BUFS, int HALVES>
__device__ static inline void gemm_mainloop(float (&acc)[HALVES][BN / 2], const gemm_cta &cta,
                                            gemm_consumer &consumer, int unit,
                                            const gemm_tile &tile,
                                            gemm_prefetched<EPI, COLS> &fetched,
                                            const typename EPI::params &epi_args) {
    constexpr int buf_bytes = (128 + BN) * 128;
    gemm_ring &ring = consumer.ring;
    int last_buf = 0;
    /* The accumulators are set to zero here, and the first wgmma has scale_d = 1. With scale_d = 0
     * ptxas before 12.9 takes the old values of acc for an input of that wgmma (C7515). */
#pragma unroll
    for (int i = 0; i < HALVES * (BN / 2); i++) acc[i / (BN / 2)][i % (BN / 2)] = 0;
    if (HALVES == 2 && unit != cta.first_unit) bar_sync(2 + consumer.index, 256);
    for (int k = 0; k < cta.n_k_blocks; k++) {
        mbar_wait(cta.full + 8 * ring.buf, ring.parity);
        uint32_t buf_at = cta.ring + ring.buf * buf_bytes;
        uint64_t a_desc = wgmma_desc(buf_at + (HALVES == 1 ? consumer.index * 64 * 128 : 0)),
                 b_desc = wgmma_desc(buf_at + 128 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                wgmma_ss<BN>(acc[half], a_desc + half * (64 * 128 / 16) + 2 * i, b_desc + 2 * i, 1);
        wgmma_commit();
        if (HALVES == 1 && k == cta.n_k_blocks / 2)
            gemm_prefetch<EPI, COLS>(tile, fetched, cta, epi_args);
        if (HALVES == 1 && k == cta.n_k_blocks * 3 / 4)
            gemm_prefetch_indirect<EPI, COLS>(tile, fetched, epi_args);
        if (k) {
            wgmma_wait<1>();
            gemm_release(cta, last_buf);
        }
        last_buf = ring.buf;
        gemm_ring_next<BUFS>(ring);
    }
    if (HALVES == 2 && unit + cta.unit_stride < cta.n_units) bar_arrive(3 - consumer.index, 256);
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < HALVES; half++) wgmma_fence_operand(acc[half]);
    gemm_release(cta, last_buf);
}

/* The main loop of staggered consumers (gemm_stagger). Consumer 1 pauses STAGGER K blocks before
 * the end of a tile, until consumer 0 has issued all its wgmma of the tile. Then consumer 1 issues
 * its remaining wgmma during the epilogue of consumer 0. Consumer 0 begins the next tile during the
 * epilogue of consumer 1.
 *
 * While one consumer is in its epilogue, the other one alone must keep the tensor cores busy. So a
 * consumer releases buffers and computes the position of its tile while its wgmma are in flight. */
template <class EPI, int BN, int COLS, int BUFS>
__device__ static inline void gemm_mainloop_staggered(float (&acc)[BN / 2], const gemm_cta &cta,
                                                      gemm_consumer &consumer, int unit,
                                                      gemm_tile &tile,
                                                      gemm_prefetched<EPI, COLS> &fetched,
                                                      const typename EPI::params &epi_args) {
    constexpr int buf_bytes = (128 + BN) * 128, STAGGER = gemm_stagger<EPI>;
    gemm_ring &ring = consumer.ring;
    static_assert(STAGGER <= BUFS, "the ring holds what one warpgroup is ahead");
    /* There is no pause if all K blocks of a tile fit in the ring. Consumer 0 could then be a whole
     * tile ahead and arrive at named barrier 2 twice before consumer 1 arrives once. */
    const int pause_block = cta.n_k_blocks > BUFS ? cta.n_k_blocks - STAGGER : -1;
    /* True: the accumulators are set to zero, for the reason given in gemm_mainloop. */
    constexpr bool zero_acc = NVCC_VERSION < 1209;
    int last_buf = 0;
#pragma unroll
    for (int i = 0; zero_acc && i < BN / 2; i++) acc[i] = 0;
    for (int k = 0; k < cta.n_k_blocks; k++) {
        const bool pause = consumer.index && k == pause_block;
        if (pause) {
            wgmma_wait<0>();
            gemm_release(cta, last_buf);
            bar_sync(2, 256);
        }
        mbar_wait(cta.full + 8 * ring.buf, ring.parity);
        uint32_t buf_at = cta.ring + ring.buf * buf_bytes;
        uint64_t a_desc = wgmma_desc(buf_at + consumer.index * 64 * 128),
                 b_desc = wgmma_desc(buf_at + 128 * 128);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; i++)
            wgmma_ss<BN>(acc, a_desc + 2 * i, b_desc + 2 * i, zero_acc || k > 0 || i > 0);
        wgmma_commit();
        wgmma_wait<1>(); /* not only if k: in a branch ptxas would serialize the wgmma (C7520) */
        if (k && !pause) gemm_release(cta, last_buf);
        wgmma_fence();
#pragma unroll
        for (int i = 2; i < 4; i++) wgmma_ss<BN>(acc, a_desc + 2 * i, b_desc + 2 * i, 1);
        wgmma_commit();
        if (k == cta.n_k_blocks / 2) {
            gemm_coord coord = gemm_tile_coord(cta, unit);
            tile.row0 = coord.m * 128 + ((int)threadIdx.x / 32 - 4) * 16;
            tile.col0 = coord.n * BN;
            gemm_prefetch<EPI, COLS>(tile, fetched, cta, epi_args);
        }
        if (k == cta.n_k_blocks * 3 / 4) gemm_prefetch_indirect<EPI, COLS>(tile, fetched, epi_args);
        last_buf = ring.buf;
        gemm_ring_next<BUFS>(ring);
    }
    if (pause_block >= 0 && !consumer.index) bar_arrive(2, 256);
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
    gemm_release(cta, last_buf);
}

/* ---- The main loop of FP8 (gemm_fp8) ---- */

/* Issues the wgmma of one K block; part becomes its product. b_step: from one 32 columns of b to
 * the next, in units of 16 bytes. */
template <int PART>
__device__ static inline void fp8_issue(float (&part)[PART / 2], uint64_t a_desc, uint64_t b_desc,
                                        int b_step = 2) {
    constexpr bool zero_part = NVCC_VERSION < 1209; /* see gemm_mainloop */
#pragma unroll
    for (int i = 0; zero_part && i < PART / 2; i++) part[i] = 0;
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
        wgmma_ss_fp8<PART>(part, a_desc + 2 * i, b_desc + b_step * i, zero_part || i > 0);
    wgmma_commit();
}
/* The same for PART columns of the tile, from col0 on. */
template <class FMT, int BN, int PART>
__device__ static inline void gemm_fp8_issue(float (&part)[PART / 2], const gemm_cta &cta, int buf,
                                             int consumer, int col0) {
    const uint32_t buf_at = cta.ring + buf * ((FMT::rows + BN) * 128);
    fp8_issue<PART>(part, wgmma_desc(buf_at + consumer * 64 * 128),
                    wgmma_desc(buf_at + (FMT::rows + col0) * 128));
}
/* Returns the scales of the K block for the columns from col0 on, at most 128: of their even and of
 * their odd groups of 8 columns. */
template <class FMT>
__device__ static inline float2 gemm_fp8_block_scales(const gemm_cta &cta, int k, int col0) {
    if constexpr (!FMT::blocked) return float2{1, 1};
    const int blocks_n = (cta.problem.N + 127) / 128, block = min(col0 / 128, blocks_n - 1);
    return __ldg((const float2 *)cta.problem.w_scale + (size_t)k * blocks_n + block);
}
/* Adds a finished partial sum to the accumulators. */
template <class FMT, int PART>
__device__ static inline void gemm_fp8_promote(float *acc, float (&part)[PART / 2], float2 scales) {
    wgmma_fence_operand(part);
#pragma unroll
    for (int i = 0; i < PART / 2; i++)
        if constexpr (FMT::blocked) acc[i] += part[i] * (i / 4 % 2 ? scales.y : scales.x);
        else acc[i] += part[i];
}
/* The main loop of one consumer over a tile. There are two sets of partial sums: the next K block's
 * wgmma run during a promotion. ptxas allows that only inside an iteration of the loop (C7514), so
 * an iteration has UNROLL K blocks. Without registers for two sets there is one, of at most 128
 * columns, and the other consumers have the tensor cores during a promotion. */
template <class EPI, class FMT, int BN, int BUFS>
__device__ static inline void gemm_mainloop_fp8(float (&acc)[BN / 2], const gemm_cta &cta,
                                                gemm_consumer &consumer, const gemm_tile &tile,
                                                gemm_prefetched<EPI, BN> &fetched,
                                                const typename EPI::params &epi_args) {
    constexpr bool two_sets = BN < 64 || !(gemm_has_prefetched<EPI, BN> || FMT::rows == 64 ||
                                           BN > 128);
    constexpr int UNROLL = two_sets ? 4 : 1, PART = BN < 128 ? BN : 128;
    float part[two_sets ? 2 : 1][PART / 2];
    gemm_ring &ring = consumer.ring;
    auto wait_full = [&]() {
        const int buf = ring.buf;
        mbar_wait(cta.full + 8 * buf, ring.parity);
        gemm_ring_next<BUFS>(ring);
        return buf;
    };
    auto prefetch = [&](int k, int step) { /* K blocks k .. k+step-1 have been issued */
        const int half = cta.n_k_blocks / 2;
        if (!gemm_has_prefetched<EPI, BN> && k <= half && half < k + step)
            gemm_prefetch<EPI, BN>(tile, fetched, cta, epi_args);
    };
#pragma unroll
    for (int i = 0; i < BN / 2; i++) acc[i] = 0;
    int k = 0;
    for (; two_sets && k + UNROLL <= cta.n_k_blocks; k += UNROLL) {
        float2 scales[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++)
            scales[i] = gemm_fp8_block_scales<FMT>(cta, k + i, tile.col0);
        int buf = wait_full();
        gemm_fp8_issue<FMT, BN, PART>(part[0], cta, buf, consumer.index, 0);
#pragma unroll
        for (int i = 1; i < UNROLL; i++) {
            const int next = wait_full();
            gemm_fp8_issue<FMT, BN, PART>(part[i % 2], cta, next, consumer.index, 0);
            wgmma_wait<1>();
            gemm_release(cta, buf);
            gemm_fp8_promote<FMT, PART>(acc, part[(i - 1) % 2], scales[i - 1]);
            buf = next;
        }
        wgmma_wait<0>();
        gemm_release(cta, buf);
        gemm_fp8_promote<FMT, PART>(acc, part[(UNROLL - 1) % 2], scales[UNROLL - 1]);
        prefetch(k, UNROLL);
    }
    for (; k < cta.n_k_blocks; k++) {
        const int buf = wait_full();
#pragma unroll
        for (int col = 0; col < BN; col += PART) {
            const float2 scales = gemm_fp8_block_scales<FMT>(cta, k, tile.col0 + col);
            gemm_fp8_issue<FMT, BN, PART>(part[0], cta, buf, consumer.index, col);
            wgmma_wait<0>();
            if (col + PART == BN) gemm_release(cta, buf);
            gemm_fp8_promote<FMT, PART>(acc + col / 2, part[0], scales);
        }
        prefetch(k, 1);
    }
}
/* Multiplies the sums of FP8 by the scales of their rows of x, and by those of their rows of W. */
template <class FMT, int COLS>
__device__ static inline void gemm_apply_scales(float (&acc)[COLS / 2], const gemm_tile &tile,
                                                const gemm_problem &problem) {
    const int row = tile.row0 + tile.lane / 4, last_row = tile.M - 1;
    const float low = problem.x_scale[min(row, last_row)],
                high = problem.x_scale[min(row + 8, last_row)];
#pragma unroll
    for (int j = 0; j < COLS / 8; j++) {
        const int col = tile.col0 + 8 * j;
        float2 w = {1, 1};
        if (!FMT::blocked && col < tile.N)
            w = *(const float2 *)(problem.w_scale + col + 2 * (tile.lane & 3));
        /* rounded before a bias or a residual is added, as in gemm_smallm_fp8 */
        acc[4 * j] = __fmul_rn(acc[4 * j], low * w.x);
        acc[4 * j + 1] = __fmul_rn(acc[4 * j + 1], low * w.y);
        acc[4 * j + 2] = __fmul_rn(acc[4 * j + 2], high * w.x);
        acc[4 * j + 3] = __fmul_rn(acc[4 * j + 3], high * w.y);
    }
}

/* Split-K: reduce-scatter over the SPLIT CTAs that share a tile. This CTA gets the sums of columns
 * k_rank * COLS .. (k_rank + 1) * COLS - 1 of the tile, added in the order of K. It sends its
 * partial sums of the other columns from registers to the shared memory of the other CTAs. They lie
 * at partials_at there, as [SPLIT-1 senders][consumer][COLS/8][128 threads] x 16 bytes.
 * partials_bar[consumer] counts the bytes that arrive. */
template <int BN, int SPLIT>
__device__ static inline void gemm_reduce_split(const float (&acc)[BN / 2],
                                                float (&sum)[BN / SPLIT / 2], const gemm_cta &cta,
                                                uint32_t partials_at, int consumer) {
    constexpr int COLS = BN / SPLIT, bytes = COLS / 8 * 2048;
    int tid = threadIdx.x & 127, k_rank = cta.k_rank;
    float own[COLS / 2];
#pragma unroll
    for (int to_rank = 0; to_rank < SPLIT; to_rank++)
        if (to_rank == k_rank) {
#pragma unroll
            for (int i = 0; i < COLS / 2; i++) own[i] = acc[to_rank * (COLS / 2) + i];
        } else {
            int peer = to_rank * cta.problem.multicast + cta.multicast_rank;
            uint32_t to = mapa(
                partials_at + (2 * (k_rank - (k_rank > to_rank)) + consumer) * bytes + tid * 16,
                peer);
            uint32_t bar = mapa(cta.partials_bar + 8 * consumer, peer);
#pragma unroll
            for (int i = 0; i < COLS / 8; i++)
                st_async_16(to + i * 2048, acc + to_rank * (COLS / 2) + 4 * i, bar);
        }
    mbar_wait(cta.partials_bar + 8 * consumer, 0);
#pragma unroll
    for (int i = 0; i < COLS / 2; i++) sum[i] = 0;
#pragma unroll 1
    for (int from_rank = 0; from_rank < SPLIT; from_rank++) {
        uint32_t from = partials_at + (2 * (from_rank - (from_rank > k_rank)) + consumer) * bytes +
                        tid * 16;
#pragma unroll
        for (int i = 0; i < COLS / 8; i++) {
            float *values = own + 4 * i, *to = sum + 4 * i;
            uint4 other = from_rank == k_rank ? uint4{} : smem_load_16(from + i * 2048);
            to[0] += from_rank == k_rank ? values[0] : __uint_as_float(other.x),
                to[1] += from_rank == k_rank ? values[1] : __uint_as_float(other.y);
            to[2] += from_rank == k_rank ? values[2] : __uint_as_float(other.z),
                to[3] += from_rank == k_rank ? values[3] : __uint_as_float(other.w);
        }
    }
}

/* Runs the epilogue on the accumulators of a tile. With ping-pong the two halves of a tile (64 rows
 * each) use the same staging one after the other. */
template <class EPI, int COLS, int HALVES>
__device__ static inline void gemm_epilogue(float (&acc)[HALVES][COLS / 2], gemm_tile &tile,
                                            gemm_prefetched<EPI, COLS> &fetched,
                                            const gemm_cta &cta,
                                            const typename EPI::params &epi_args) {
#pragma unroll
    for (int half = 0; half < HALVES; half++) {
        if (half) tile.row0 += 64, tile.tile_count++;
        if (HALVES == 2)
            gemm_prefetch<EPI, COLS>(tile, fetched, cta, epi_args),
                gemm_prefetch_indirect<EPI, COLS>(tile, fetched, epi_args);
        if constexpr (gemm_has_prefetched<EPI, COLS>)
            EPI::template run<COLS>(acc[half], tile, fetched, epi_args);
        else EPI::template run<COLS>(acc[half], tile, cta.maps.y, epi_args);
    }
}

/* Runs the main loops and epilogues of all units of one consumer. */
template <class EPI, class FMT, int BN, int SPLIT, bool PINGPONG>
__device__ static inline void gemm_consume(const gemm_cta &cta, int index,
                                           const typename EPI::params &epi_args) {
    constexpr int COLS = BN / SPLIT, HALVES = PINGPONG ? 2 : 1;
    typedef gemm_smem<BN, SPLIT, EPI::staged_cols(COLS), FMT::rows> layout;
    int warp = threadIdx.x / 32 - 4;
    gemm_consumer consumer = {index, {0, 0}};
    uint32_t out = cta.ring + layout::out_at + warp * (layout::out_bytes / (FMT::rows / 16));
    gemm_tile tile = {cta.problem.M, cta.problem.N, 0, 0, (int)threadIdx.x & 31, out,
                      cta.load_bars + 8 * warp, 0};
    if (PINGPONG && consumer.index)
        gemm_ring_skip<layout::n_bufs>(consumer.ring, cta.n_k_blocks);
    grid_wait();
    for (int unit = cta.first_unit + (PINGPONG ? consumer.index * cta.unit_stride : 0);
         unit < cta.n_units; unit += HALVES * cta.unit_stride, tile.tile_count++) {
        float acc[HALVES][BN / 2];
        gemm_prefetched<EPI, COLS> fetched;
        if constexpr (gemm_stagger<EPI>) {
            static_assert(SPLIT == 1 && !PINGPONG, "both warpgroups have their part of each tile");
            gemm_mainloop_staggered<EPI, BN, COLS, layout::n_bufs>(acc[0], cta, consumer, unit,
                                                                   tile, fetched, epi_args);
        } else {
            gemm_coord coord = gemm_tile_coord(cta, unit);
            tile.row0 = coord.m * FMT::rows + (PINGPONG ? warp & 3 : warp) * 16;
            tile.col0 = coord.n * BN + cta.k_rank * COLS;
            if constexpr (FMT::is_fp8) {
                static_assert(SPLIT == 1 && !PINGPONG, "a row has the same bits for every M");
                gemm_mainloop_fp8<EPI, FMT, BN, layout::n_bufs>(acc[0], cta, consumer, tile,
                                                                fetched, epi_args);
                gemm_apply_scales<FMT, BN>(acc[0], tile, cta.problem);
                /* the main loop has no registers for it */
                if constexpr (gemm_has_prefetched<EPI, COLS>) {
                    gemm_prefetch<EPI, COLS>(tile, fetched, cta, epi_args);
                    gemm_prefetch_indirect<EPI, COLS>(tile, fetched, epi_args);
                }
            } else
                gemm_mainloop<EPI, BN, COLS, layout::n_bufs, HALVES>(acc, cta, consumer, unit, tile,
                                                                     fetched, epi_args);
        }
        if (PINGPONG) gemm_ring_skip<layout::n_bufs>(consumer.ring, cta.n_k_blocks);
        if constexpr (SPLIT == 1)
            gemm_epilogue<EPI, COLS, HALVES>(acc, tile, fetched, cta, epi_args);
        else {
            float sum[1][COLS / 2];
            gemm_reduce_split<BN, SPLIT>(acc[0], sum[0], cta, cta.ring + layout::partials_at,
                                         consumer.index);
            gemm_epilogue<EPI, COLS, 1>(sum, tile, fetched, cta, epi_args);
        }
    }
    if (tile.lane == 0) {
        if constexpr (gemm_stores_remote<EPI>) tma_store_wait();
        else tma_store_wait_read<0>();
    }
    __syncwarp();
}
#endif

/* The kernel: see the head of the chapter. A cluster has multicast * SPLIT CTAs. The CTA with
 * cluster rank r has k_rank r / multicast and multicast_rank r % multicast. */
template <class EPI, int BN, int SPLIT, bool PINGPONG = false, class FMT = gemm_bf16>
__global__ void __launch_bounds__(128 + 2 * FMT::rows, FMT::rows == 128 ? 1 : 2)
    gemm_wgmma_kernel(const __grid_constant__ CUtensorMap map_x,
                      const __grid_constant__ CUtensorMap map_w,
                      const __grid_constant__ CUtensorMap map_y,
                      const __grid_constant__ gemm_problem problem,
                      const __grid_constant__ typename EPI::params epi_args) {
#if HOPPER
    extern __shared__ char smem[];
    typedef gemm_smem<BN, SPLIT, EPI::staged_cols(BN / SPLIT), FMT::rows> layout;
    constexpr int THREADS = 128 + 2 * FMT::rows, CONSUMERS = FMT::rows / 64;
    int cta_rank = cluster_rank(), k_rank = cta_rank / problem.multicast,
        per_cluster = problem.multicast * SPLIT, warp = threadIdx.x / 32;
    int k_blocks = (problem.K + FMT::k_cols - 1) / FMT::k_cols,
        k_block0 = k_blocks * k_rank / SPLIT,
        n_k_blocks = k_blocks * (k_rank + 1) / SPLIT - k_block0;
    uint32_t ring = (smem_addr(smem) + 1023) & ~1023u, full = ring + layout::bars_at,
             empty = full + 8 * layout::n_bufs;
    uint32_t partials_bar = empty + 8 * layout::n_bufs;
    gemm_cta cta = {problem, {&map_x, &map_w, &map_y},
                    ring, full, empty, partials_bar, partials_bar + 16,
                    k_rank, cta_rank - k_rank * problem.multicast,
                    k_block0, n_k_blocks,
                    (int)blockIdx.x / per_cluster, (int)gridDim.x / per_cluster,
                    problem.units_m * problem.tiles_n};
    if (threadIdx.x == 0) {
        for (int buf = 0; buf < layout::n_bufs; buf++)
            mbar_init(full + 8 * buf, 2),
                mbar_init(empty + 8 * buf, (PINGPONG ? 1 : CONSUMERS) * problem.multicast);
        for (int i = 0; i < 8; i++) mbar_init(cta.load_bars + 8 * i, 1);
        for (int consumer = 0; consumer < 2 && SPLIT > 1; consumer++)
            mbar_init(partials_bar + 8 * consumer, 1),
                mbar_expect_tx(partials_bar + 8 * consumer, layout::partial_bytes / 2);
        mbar_init_fence();
    }
    __syncwarp();
    if (per_cluster > 1) cluster_sync_relaxed();
    /* warp 0 initialized the mbarriers: it need not wait */
    else if (warp == 0) bar_arrive(1, THREADS);
    else bar_sync(1, THREADS);
    if (warp < 4) {
        if constexpr (CONSUMERS == 2) setmaxnreg_dec<40>();
        if (warp == 1) {
            if (elect_one()) gemm_produce_x<FMT, BN, layout::n_bufs>(cta);
        } else if (warp == 0) {
            if (elect_one()) gemm_produce_w<FMT, BN, layout::n_bufs>(cta);
        }
        __syncwarp();
    } else {
        if constexpr (CONSUMERS == 2) setmaxnreg_inc<232>();
        gemm_consume<EPI, FMT, BN, SPLIT, PINGPONG>(cta, warp / 4 - 1, epi_args);
    }
    /* A CTA may exit before the other CTAs of its cluster. It has waited for everything that they
     * write to it: W tiles, partial sums and arrivals at the empty barriers. */
#else
    __trap();
#endif
}

/* ---- All instances, and the selection by a cost model ---- */

/* Kinds of epilogue in addition to those of enum epilogue. GEMM_QKV64 takes the value of EPI_QKV,
 * which is never passed to gemm_wgmma. */
enum { GEMM_QKV64 = EPI_LOGITS + 1, GEMM_QKV128, GEMM_SCATTER };

typedef struct gemm_variant {
    int kind,        /* enum epilogue, or one of the kinds above */
        bn, split;   /* the template arguments BN and SPLIT */
    bool pingpong;
    int staged_cols, /* columns of output that are staged at a time; 0: no staging */
        smem_bytes;  /* dynamic shared memory */
    const void *kernel;
    int rows = 128;        /* rows of x of a tile */
    bool blocked = false;  /* FP8: for matrices with is_blocked */
} gemm_variant;

#define GEMM_INSTANCE(kind, EPI, BN, SPLIT, PINGPONG)              \
    {kind, BN, SPLIT, PINGPONG, EPI::staged_cols(BN / SPLIT),      \
     gemm_smem<BN, SPLIT, EPI::staged_cols(BN / SPLIT)>::bytes,    \
     (const void *)gemm_wgmma_kernel<EPI, BN, SPLIT, PINGPONG>}
#define GEMM_VARIANT(kind, EPI, BN, SPLIT) GEMM_INSTANCE(kind, EPI, BN, SPLIT, false)
#define GEMM_PINGPONG(kind, EPI, BN) GEMM_INSTANCE(kind, EPI, BN, 1, true)
static const gemm_variant gemm_variants[] = {
    GEMM_VARIANT(EPI_STORE, epi_store, 64, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 64, 2),
    GEMM_VARIANT(EPI_STORE, epi_store, 96, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 2),
    GEMM_VARIANT(EPI_STORE, epi_store, 128, 4),
    GEMM_VARIANT(EPI_STORE, epi_store, 160, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 192, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 256, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 2),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 2),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 128, 4),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 192, 1),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 256, 1),
    GEMM_VARIANT(EPI_STORE, epi_store, 64, 4),
    GEMM_VARIANT(EPI_RESIDUAL, epi_residual, 64, 4),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 96, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 128, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 160, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 224, 1),
    GEMM_VARIANT(EPI_SWIGLU, epi_swiglu, 256, 1),
    GEMM_VARIANT(EPI_LOGITS, epi_logits, 192, 1),
    GEMM_VARIANT(EPI_LOGITS, epi_logits, 256, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 64, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 96, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 128, 2),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 192, 1),
    GEMM_VARIANT(GEMM_QKV64, epi_qkv<64>, 256, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 96, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 128, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 128, 2),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 160, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 192, 1),
    GEMM_VARIANT(GEMM_QKV128, epi_qkv<128>, 256, 1),
    GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 128, 1),
    GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 192, 1),
    GEMM_VARIANT(GEMM_SCATTER, epi_scatter, 256, 1),
    GEMM_PINGPONG(EPI_STORE, epi_store, 192),
    GEMM_PINGPONG(EPI_SWIGLU, epi_swiglu, 160),
    GEMM_PINGPONG(EPI_SWIGLU, epi_swiglu, 192),
};
enum { N_GEMM_VARIANTS = sizeof gemm_variants / sizeof *gemm_variants };

/* The instances of FP8: without and with scales of blocks. */
#define GEMM_FP8_INSTANCE(kind, EPI, ROWS, BN, BLOCKED)                         \
    {kind, BN, 1, false, EPI::staged_cols(BN),                                  \
     gemm_smem<BN, 1, EPI::staged_cols(BN), ROWS>::bytes,                       \
     (const void *)gemm_wgmma_kernel<EPI, BN, 1, false, gemm_fp8<ROWS, BLOCKED>>,\
     ROWS, BLOCKED}
#define GEMM_FP8(kind, EPI, ROWS, BN) \
    GEMM_FP8_INSTANCE(kind, EPI, ROWS, BN, false), GEMM_FP8_INSTANCE(kind, EPI, ROWS, BN, true)
static const gemm_variant gemm_fp8_variants[] = {
    GEMM_FP8(EPI_STORE, epi_store, 64, 32),
    GEMM_FP8(EPI_STORE, epi_store, 64, 64),
    GEMM_FP8(EPI_STORE, epi_store, 128, 32),
    GEMM_FP8(EPI_STORE, epi_store, 128, 64),
    GEMM_FP8(EPI_STORE, epi_store, 128, 128),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 64, 32),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 64, 64),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 128, 32),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 128, 64),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 128, 128),
    GEMM_FP8(EPI_SWIGLU, epi_swiglu, 64, 64),
    GEMM_FP8(EPI_SWIGLU, epi_swiglu, 128, 64),
    GEMM_FP8(EPI_SWIGLU, epi_swiglu, 128, 128),
    GEMM_FP8(GEMM_QKV64, epi_qkv<64>, 64, 32),
    GEMM_FP8(GEMM_QKV64, epi_qkv<64>, 128, 64),
    GEMM_FP8(GEMM_QKV64, epi_qkv<64>, 128, 128),
    GEMM_FP8(GEMM_QKV128, epi_qkv<128>, 64, 32),
    GEMM_FP8(GEMM_QKV128, epi_qkv<128>, 64, 64),
    GEMM_FP8(GEMM_QKV128, epi_qkv<128>, 128, 64),
    GEMM_FP8(GEMM_QKV128, epi_qkv<128>, 128, 128),
#if NVCC_VERSION >= 1209 /* older ones have no registers left for these */
    GEMM_FP8(EPI_STORE, epi_store, 128, 256),
    GEMM_FP8(EPI_RESIDUAL, epi_residual, 128, 256),
    GEMM_FP8(EPI_SWIGLU, epi_swiglu, 128, 256),
    GEMM_FP8(GEMM_QKV64, epi_qkv<64>, 64, 64),
    GEMM_FP8(GEMM_QKV128, epi_qkv<128>, 128, 256),
#endif
    GEMM_FP8(GEMM_SCATTER, epi_scatter, 128, 128),
};
enum { N_GEMM_FP8_VARIANTS = sizeof gemm_fp8_variants / sizeof *gemm_fp8_variants };

typedef struct gemm_plan { /* how to launch a GEMM */
    const gemm_variant *variant;
    int multicast, raster_m; /* as in gemm_problem */
} gemm_plan;

/* What the GPU can do, per clock of its SMs. The costs of GEMMs are derived from these rates. They
 * are those of an H100 and an H200, which have the same SMs and L2; only these use gemm_wgmma. */
typedef struct gpu_rates {
    double flop;        /* bf16 FLOP of an SM's tensor cores */
    double port_bytes;  /* bytes that an SM reads from L2, or stores */
    double dsmem_bytes; /* bytes that an SM exchanges with the SMs of its cluster */
    double l2_bytes;    /* bytes that all SMs together read from L2 */
    double copy_bytes;  /* bytes that all SMs together read from and write to global memory */
    double launch;      /* clocks of one more kernel launch: 2.3 us */
} gpu_rates;
static gpu_rates gpu_rates_of(const toka_device *dev) {
    assert(dev->hopper);
    return gpu_rates{.flop = 4096, .port_bytes = 64, .dsmem_bytes = 16.516, .l2_bytes = 8192,
                     .copy_bytes = 1500, .launch = 4000};
}

/* What the rates do not explain: corrections of gemm_cost, in clocks or as factors. They come from
 * sweeps of all variants over the shapes of `toka bench ops` on an H100 and an H200
 * (test/gpu_gemm.cu sweep). */
constexpr double GEMM_WAIT = 45,        /* of the tensor cores, in each K block */
    GEMM_WAVE = 1500,                   /* first x of a wave, and last store of its epilogue */
    GEMM_EXCHANGE = 1000,               /* latency of the exchange of split-K */
    GEMM_MULTICAST = 300,               /* of a launch in clusters that share W */
    /* With K from GEMM_LONG_K on, CTAs that read the same rows drift apart. L2 then delivers this
     * part of its rate. */
    GEMM_DRIFT = 6154.0 / 8192, GEMM_LONG_K = 4096,
    /* Power limits the GPU if there are several waves, and reading from L2 takes part of the power.
     * So this part of the time of the reads adds to the time of a K block. */
    GEMM_POWER = 0.3;

/* Returns the clocks of a K block, in which `ctas` CTAs work at a time: the longest of the times of
 * the tensor cores, of an SM's port, and of L2. */
static double gemm_block_clocks(const gpu_rates &rates, int bn, int multicast, double ctas, int K,
                                bool many_waves) {
    const double tile_flop = 2.0 * 128 * bn * 64, tile_bytes = (128.0 + bn) * 64 * sizeof(bf16),
                 l2_bytes = (128.0 + bn / multicast) * 64 * sizeof(bf16) * ctas;
    const double tensor_clocks = tile_flop / rates.flop + GEMM_WAIT,
                 port_clocks = tile_bytes / rates.port_bytes,
                 l2_clocks = l2_bytes / (rates.l2_bytes * (K >= GEMM_LONG_K ? GEMM_DRIFT : 1));
    return fmax(fmax(tensor_clocks, port_clocks), l2_clocks) +
           (many_waves ? GEMM_POWER * l2_bytes / rates.l2_bytes : 0);
}
/* Returns the clocks of an epilogue: 128 rows by BN columns, stored in bf16 through the SM's port.
 * In ping-pong one consumer does all 128 rows, at half the speed. Split-K exchanges float32 sums
 * before. */
static double gemm_epilogue_clocks(const gpu_rates &rates, const gemm_variant *variant) {
    const double tile = 128.0 * variant->bn;
    return GEMM_WAVE +
           tile * sizeof(bf16) * (variant->pingpong ? 2 : 1) / rates.port_bytes +
           (variant->split > 1 ? GEMM_EXCHANGE + tile * sizeof(float) / rates.dsmem_bytes : 0);
}
/* Estimates the clocks of a variant: K blocks and an epilogue for each wave. In ping-pong all
 * epilogues but the last one are hidden. */
static double gemm_cost(const toka_device *dev, const gemm_variant *variant, int multicast, int M,
                        int N, int K) {
    const gpu_rates rates = gpu_rates_of(dev);
    const int per_cluster = multicast * variant->split,
              n_units = ceil_div(M, 128 * multicast) * ceil_div(N, variant->bn),
              max_clusters = per_cluster == 4 ? dev->max_clusters_of_4 : dev->n_sms / per_cluster,
              waves = ceil_div(n_units, max_clusters),
              k_blocks = ceil_div(ceil_div(K, 64), variant->split);
    const double ctas = (double)min(n_units, max_clusters) * per_cluster;
    return waves * k_blocks *
               gemm_block_clocks(rates, variant->bn, multicast, ctas, K, waves > 1) +
           (variant->pingpong ? 1 : waves) * gemm_epilogue_clocks(rates, variant) +
           (multicast == 2 ? GEMM_MULTICAST : 0);
}

/* True if the columns on which a CTA runs the epilogue are whole heads, as QK-norm needs. */
static bool gemm_whole_heads(const gemm_variant *variant) {
    return variant->bn / variant->split % (variant->kind == GEMM_QKV64 ? 64 : 128) == 0;
}

/* Returns the cheapest variant of a kind. whole_heads: only variants that allow QK-norm. */
static gemm_plan gemm_choose(const toka_device *dev, int kind, int M, int N, int K,
                             bool whole_heads) {
    gemm_plan best = {.raster_m = 8};
    double least_cost = 0;
    for (int i = 0; i < N_GEMM_VARIANTS; i++)
        for (int multicast = 1; multicast <= 2; multicast++) {
            const gemm_variant *variant = &gemm_variants[i];
            if (variant->kind != kind || variant->split > ceil_div(K, 64) ||
                multicast * variant->split > 4 || (multicast == 2 && M <= 128))
                continue;
            if (multicast * variant->split == 4 && !dev->max_clusters_of_4) continue;
            if (whole_heads && !gemm_whole_heads(variant)) continue;
            double cost = gemm_cost(dev, variant, multicast, M, N, K);
            if (!best.variant || cost < least_cost)
                best.variant = variant, best.multicast = multicast, least_cost = cost;
        }
    return best;
}

/* Returns the tensor map of a row-major bf16 matrix, for boxes of box_rows x box_cols. box_cols is
 * 64, 32 or 16; the swizzle spans one row of the box (128, 64 or 32 bytes). */
static CUtensorMap gemm_tensor_map(toka_device *dev, const bf16 *data, int rows, int cols, int ld,
                                   int box_rows, int box_cols) {
    CUtensorMap map;
    cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {(cuuint64_t)ld * 2};
    cuuint32_t box[2] = {(cuuint32_t)box_cols, (cuuint32_t)box_rows}, elem_strides[2] = {1, 1};
    CUtensorMapSwizzle swizzle = box_cols == 64   ? CU_TENSOR_MAP_SWIZZLE_128B
                                 : box_cols == 32 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                  : CU_TENSOR_MAP_SWIZZLE_32B;
    CUresult result = dev->encode_map(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, (void *)data, dims,
                                      strides, box, elem_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch_error(dev, result ? cudaErrorInvalidValue : cudaSuccess, "tensor map of a GEMM");
    return map;
}

/* Returns the tensor map of an e4m3 matrix, for boxes of box_rows x 128 columns. */
static CUtensorMap gemm_fp8_map(toka_device *dev, const void *data, int rows, int cols,
                                size_t row_bytes, int box_rows) {
    CUtensorMap map;
    cuuint64_t dims[2] = {(cuuint64_t)cols, (cuuint64_t)rows}, strides[1] = {row_bytes};
    cuuint32_t box[2] = {128, (cuuint32_t)box_rows}, elem_strides[2] = {1, 1};
    CUresult result = dev->encode_map(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, (void *)data, dims,
                                      strides, box, elem_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                      CU_TENSOR_MAP_SWIZZLE_128B,
                                      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch_error(dev, result ? cudaErrorInvalidValue : cudaSuccess, "tensor map of a GEMM");
    return map;
}
/* Returns the rows of x in a TMA box of an FP8 variant. */
static int gemm_fp8_box_rows(const gemm_variant *variant, int M) {
    int rows = variant->rows;
    while (variant->rows == 64 && rows > 8 && rows / 2 >= M) rows /= 2;
    return rows;
}

/* Launches any instance of gemm_wgmma_kernel, also the one of the LM head (epi_sample, chapter 11).
 * `params` are the params of its epilogue. Only epilogues that store y by TMA use args->y; for
 * others it may be NULL. */
static void gemm_launch(toka_device *dev, gemm_plan plan, const gemm_args *args,
                        const void *params) {
    const gemm_variant *variant = plan.variant;
    int M = args->M, N = args->w->N, K = args->w->K, cols = variant->kind == EPI_SWIGLU ? N / 2 : N,
        per_cluster = plan.multicast * variant->split;
    assert(M > 0 && N % 8 == 0 && K % 8 == 0 && args->ldx % 8 == 0 &&
           (uintptr_t)args->x % 16 == 0 && (uintptr_t)args->w->data % 16 == 0);
    const bool fp8 = args->w->scale != NULL;
    assert(!fp8 || (variant->blocked == args->w->is_blocked && plan.multicast <= M));
    gemm_problem problem = {M, N, K, ceil_div(M, variant->rows * plan.multicast),
                            ceil_div(N, variant->bn), plan.raster_m, plan.multicast, 0, 0, 0,
                            fp8 ? gemm_fp8_box_rows(variant, M) : 0, dev->x_scale, args->w->scale};
    int last_height = problem.units_m % problem.raster_m ? problem.units_m % problem.raster_m
                                                         : problem.raster_m;
    int n_units = problem.units_m * problem.tiles_n,
        max_clusters = dev->n_sms * (128 / variant->rows) / per_cluster,
        n_clusters = variant->split > 1 ? n_units : min(n_units, max_clusters);
    problem.inv_band = 1.0f / ((float)problem.raster_m * problem.tiles_n),
    problem.inv_height = 1.0f / problem.raster_m, problem.inv_last_height = 1.0f / last_height;
    assert(n_units < 1 << 22);
    CUtensorMap map_x, map_w, map_y;
    if (fp8) {
        const int x_rows = problem.x_rows;
        map_x = gemm_fp8_map(dev, args->x, ceil_div(M, x_rows) * x_rows, K,
                             (size_t)args->ldx * sizeof(bf16), x_rows);
        map_w = gemm_fp8_map(dev, args->w->data, N, K, (size_t)fp8_row_bytes(K),
                             variant->bn / plan.multicast);
    } else {
        map_x = gemm_tensor_map(dev, args->x, ceil_div(M, 128) * 128, K, args->ldx, 128, 64);
        map_w = gemm_tensor_map(dev, args->w->data, N, K, K, variant->bn / plan.multicast, 64);
    }
    map_y = map_x;
    if (variant->staged_cols && args->y) {
        assert(args->ldy % 8 == 0 && (uintptr_t)args->y % 16 == 0 && cols % 8 == 0);
        map_y = gemm_tensor_map(dev, args->y, M, cols, args->ldy, 16,
                                gemm_panel_cols(variant->staged_cols));
    }
    cudaLaunchAttribute attr[2] = {};
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = (unsigned)per_cluster,
    attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t cfg = {};
    cfg.gridDim = dim3((unsigned)(n_clusters * per_cluster)),
    cfg.blockDim = dim3((unsigned)(128 + 2 * variant->rows)),
    cfg.dynamicSmemBytes = (size_t)variant->smem_bytes;
    cfg.stream = dev->stream, cfg.attrs = attr, cfg.numAttrs = 2;
    void *kernel_args[] = {&map_x, &map_w, &map_y, &problem, (void *)params};
    if (dev->error.code) return;
    launch_by_role(dev, "GEMM", &cfg, (const void *)variant->kernel, kernel_args);
}

static void gemm_allow_smem(toka_device *dev, const gemm_variant *variant) {
    latch_error(dev,
                cudaFuncSetAttribute(variant->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     variant->smem_bytes),
                "shared memory of a GEMM");
}
/* Called once per device, before the first launch. Allows all instances their shared memory, and
 * asks CUDA how many clusters of four CTAs can be resident (max_clusters_of_4). No carveout is set
 * as in launch_prepare: CUDA has carveouts of 196 and 228 KB, and each instance needs more than 195
 * KB, so it gets the largest one. Only epi_logits with BN 256 needs less (193 KB). Tiles of 64 rows
 * of FP8 need half, so FP8 instances ask for it. */
static void gemm_open(toka_device *dev) {
    for (int i = 0; i < N_GEMM_FP8_VARIANTS && dev->hopper; i++) {
        gemm_allow_smem(dev, &gemm_fp8_variants[i]);
        latch_error(dev,
                    cudaFuncSetAttribute(gemm_fp8_variants[i].kernel,
                                         cudaFuncAttributePreferredSharedMemoryCarveout,
                                         cudaSharedmemCarveoutMaxShared),
                    "shared memory of a GEMM");
    }
    for (int i = 0; i < N_GEMM_VARIANTS && dev->hopper; i++) {
        const gemm_variant *variant = &gemm_variants[i];
        gemm_allow_smem(dev, variant);
        if (variant->split != 4 || dev->max_clusters_of_4) continue;
        cudaLaunchAttribute cluster4 = {};
        cluster4.id = cudaLaunchAttributeClusterDimension;
        cluster4.val.clusterDim.x = 4, cluster4.val.clusterDim.y = cluster4.val.clusterDim.z = 1;
        cudaLaunchConfig_t cfg = {};
        cfg.gridDim = dim3(4), cfg.blockDim = dim3(384),
        cfg.dynamicSmemBytes = (size_t)variant->smem_bytes;
        cfg.attrs = &cluster4, cfg.numAttrs = 1;
        latch_error(dev,
                    cudaOccupancyMaxActiveClusters(&dev->max_clusters_of_4, variant->kernel, &cfg),
                    "clusters of a GEMM");
    }
}

/* y = epilogue(x W^T) for EPI_STORE, EPI_RESIDUAL, EPI_SWIGLU and EPI_LOGITS. */
static void gemm_wgmma_with(toka_device *dev, const gemm_args *args, gemm_plan plan) {
    /* the params of epi_store and epi_residual; epi_swiglu ignores its params */
    epi_store::params store_args = {args->w->bias, args->y, args->ldy};
    epi_logits::params logits_args = {(float *)args->y, args->ldy};
    assert(args->epi != EPI_SWIGLU || (!args->w->bias && args->w->N % 16 == 0));
    assert(args->epi != EPI_LOGITS || (!args->w->bias && args->ldy % 2 == 0));
    gemm_launch(dev, plan, args,
                args->epi == EPI_LOGITS ? (void *)&logits_args : (void *)&store_args);
}
static void gemm_wgmma(toka_device *dev, const gemm_args *args) {
    gemm_wgmma_with(dev, args, gemm_choose(dev, args->epi, args->M, args->w->N, args->w->K, false));
}

/* Selects the variant for the QKV epilogue of M rows. The head size is 64 or 128. */
static gemm_plan gemm_choose_qkv(const toka_device *dev, int M, const weight *w,
                                 const qkv_params *qkv) {
    int heads = qkv->H + 2 * qkv->K;
    return gemm_choose(dev, w->N == 64 * heads ? GEMM_QKV64 : GEMM_QKV128, M, w->N, w->K,
                       qkv_has_norms(qkv));
}
/* True if the QKV epilogue is faster than EPI_STORE followed by rope_kernel. EPI_STORE can choose
 * among more tile widths, but rope_kernel reads and writes the result once more. */
static bool gemm_qkv_worth_fusing(const toka_device *dev, int M, const weight *w,
                                  const qkv_params *qkv) {
    gemm_plan fused = gemm_choose_qkv(dev, M, w, qkv),
              plain = gemm_choose(dev, EPI_STORE, M, w->N, w->K, false);
    /* M is rounded up to whole tiles, as in gemm_cost. So the choice depends only on the number of
     * tiles. */
    const gpu_rates rates = gpu_rates_of(dev);
    double rope_bytes = 2.0 * sizeof(bf16) * ceil_div(M, 128) * 128 * w->N,
           rope_clocks = rates.launch + rope_bytes / rates.copy_bytes;
    return gemm_cost(dev, fused.variant, fused.multicast, M, w->N, w->K) <
           gemm_cost(dev, plain.variant, plain.multicast, M, w->N, w->K) + rope_clocks;
}
static void gemm_wgmma_qkv_with(toka_device *dev, int M, const bf16 *x, int ldx, const weight *w,
                                const qkv_params *qkv, gemm_plan plan) {
    gemm_args args = {.M = M, .x = x, .ldx = ldx, .w = w};
    int D = plan.variant->kind == GEMM_QKV64 ? 64 : 128;
    assert(w->N == (qkv->H + 2 * qkv->K) * D && (qkv->B & (qkv->B - 1)) == 0 &&
           (!qkv_has_norms(qkv) || gemm_whole_heads(plan.variant)));
    (void)D;
    gemm_launch(dev, plan, &args, qkv);
}
static void gemm_wgmma_qkv(toka_device *dev, int M, const bf16 *x, int ldx, const weight *w,
                           const qkv_params *qkv) {
    gemm_wgmma_qkv_with(dev, M, x, ldx, w, qkv, gemm_choose_qkv(dev, M, w, qkv));
}

/* Computes x W^T + bias and stores rows_per_rank rows of the result in each of n_ranks receive
 * buffers (epi_scatter). args->y and args->epi are not used. */
static void gemm_wgmma_scatter_with(toka_device *dev, const gemm_args *args,
                                    bf16 *const *recv_buffers, int n_ranks, int rows_per_rank,
                                    gemm_plan plan) {
    const int M = args->M, N = args->w->N;
    gemm_args product_args = *args;
    product_args.y = NULL;
    epi_scatter::params epi_args = {};
    assert(n_ranks <= BARRIER_MAX_RANKS && rows_per_rank % 16 == 0 && n_ranks * rows_per_rank >= M);
    /* The last buffer that gets rows may get fewer than the buffers before it. The buffers after it
     * get none. */
    for (int rank = 0; rank < n_ranks && rank * rows_per_rank < M; rank++)
        epi_args.recv_maps[rank] = gemm_tensor_map(dev, recv_buffers[rank],
                                                   min(rows_per_rank, M - rank * rows_per_rank), N,
                                                   N, 16,
                                                   gemm_panel_cols(plan.variant->staged_cols));
    epi_args.bias = args->w->bias, epi_args.rows_per_rank = rows_per_rank;
    gemm_launch(dev, plan, &product_args, &epi_args);
}

/* ===========================================================================
 * MARK: 7. GEMM for small M, and choosing a GEMM [kernel]
 *
 * Two GEMMs for small M, and the functions that choose a GEMM by M and by the shape of W. Both
 * GEMMs swap the operands: they compute y^T = W x^T, so W has the large dimension of the MMA.
 *
 *      gemm_smallm   M <= 64, wgmma, split-K over the CTAs of a cluster; Hopper only
 *      gemm_gemv     M <= 16, mma.sync, split-K over the warps of a CTA; any GPU
 *
 * For an e4m3 W the chapter quantizes x and chooses the instance of gemm_wgmma.
 * =========================================================================== */

/* ---- gemm_smallm: y[M][N] = x[M][K] W[N][K]^T for M <= 64, on wgmma with swapped operands ----
 *
 * Computes y^T = W x^T. 64 rows of W are the A operand of wgmma, and ROWS rows of x are the B
 * operand. ROWS is the smallest of 8, 16, 32 and 64 that is at least M, so little of a tile is
 * padding. The accumulators are y^T, [n][m].
 *
 * Inputs and outputs are those of chapter 5. The kernel has all epilogues of enum epilogue. With
 * M <= 8 it also applies a fused RMSNorm (norm_ready), and with EPI_QKV the QK-norm.
 *
 * Main loop: one CTA has 64 rows of W, one consumer warpgroup and two producer warps. The producers
 * keep a ring of n_bufs buffers full. A buffer holds a K block of 64 columns: 64 rows of W, then
 * ROWS rows of x, 128 bytes each, both with the 128-byte swizzle. TMA writes zeros for columns
 * beyond K and for rows of W beyond N. It reads the padding rows of x (GEMM_PAD_ROWS) as they are;
 * their results are not stored.
 *
 * Split-K: if W has too few rows for all SMs, the `split` CTAs of a cluster share the K of a tile.
 * The partial sums are reduced by a reduce-scatter over DSMEM. Each CTA reduces 1/split of the rows
 * of x: it receives their partials from the registers of the other CTAs, adds them in the order of
 * K (so the same input gives the same bits), and stores the result. A CTA exits only after it has
 * received all partials that the others send to it. So no CTA sends to one that has exited.
 *
 * Grid: (tiles of 64 rows of W) * split, in clusters of `split` CTAs. With QK-norm at D = 128 a
 * cluster has the 2 * split CTAs of a head's two tiles. Block: 192. Shared: ring and receive
 * buffer, at most 112 KB, and the barriers. Bytes: the kernel is bound by reading W once, 2NK
 * bytes.
 *
 * Why this shape:
 * - The ring fills with W before grid_wait(), while the previous kernel still runs.
 * - 112 KB allow two CTAs per SM, so a CTA of the next kernel prefetches its W in the same way.
 * - The barriers are in dynamic shared memory. 256 bytes of static shared memory in front of the
 *   ring, which is aligned to 1 KB, would take 1 KB. With ROWS = 64 only one CTA per SM would fit.
 * - A launch in a chain of kernels has about 2.5 us that nothing hides (H200): 1 us from the end of
 *   the last CTA until grid_wait() returns in the next kernel; 0.3 to 0.5 us for the first x; the
 *   rest for the reduction over the cluster, the stores and the end.
 *
 * The launcher asserts: M <= ROWS; at most 8 CTAs in a cluster; no next_norm; ROWS = 8 with QK-norm
 * (and what gemm_checked_args asserts).
 *
 * Speed: 95 to 99 % of the read bandwidth where reading W takes 20 us or more and M is small.
 *
 * Retired or tried (figures: test/results/kernel-choices.md):
 * - Partials in own shared memory, read by the other CTAs between cluster barriers: slower.
 * - Bulk copies of the partials, to the ring or to the receive buffer: not faster.
 * - Separate rings for W and x, so that more of W is prefetched: slower.
 * - A kernel for 128 rows of x: slower than gemm_wgmma.
 * - 128 rows of W per CTA: fewer reads of x, but slower, because fewer SMs work.
 * - Multicast of x to two or four neighbouring tiles: not faster.
 * - Rings of 54 or 72 KB, for three CTAs per SM: slower. Separate rings of 72 KB: slower except for
 *   one shape.
 * - L2 prefetch of the next kernel's W: no gain, its ring already holds it.
 * - L2 prefetch of the CTA's own W while it waits for x: slower.
 * - Each tile begins at another K block: slower, because CTAs no longer read the same x together.
 * - Four warps load the first x: not faster.
 * - Four accumulator chains (CHAINS) also for ROWS = 32 and 64: not faster.
 * - K blocks of 128 columns, loaded as two TMA boxes or as one three-dimensional box: not faster.
 * - x as the 64-row operand, with 16 or 32 rows of W and all of K, so without split-K: slower.
 * - One producer thread for W and x: half the speed, its loop took longer than the copies.
 * - Fused RMSNorm for M > 8 (this kernel writes sums of squares per 64 columns): slower. */

/* gemm_smallm_kernel has two kinds of instances: with qkv_params for EPI_QKV, with smallm_no_qkv
 * for all other epilogues. EPI_QKV as a runtime branch of one kernel slowed down steps that never
 * take the branch. */
typedef struct smallm_no_qkv {
} smallm_no_qkv;
template <class P> constexpr bool smallm_has_qkv = false;
template <> constexpr bool smallm_has_qkv<qkv_params> = true;

enum {
    SMALLM_K = 64,        /* columns of a K block */
    SMALLM_N = 64,        /* rows of W of a tile */
    SMALLM_MAX = 64,      /* rows of x of the largest tile: the largest M */
    SMALLM_THREADS = 192, /* the consumer warpgroup and two producer warps */
    SMALLM_W_BYTES = SMALLM_N * SMALLM_K * 2 /* W in one buffer of the ring; x follows it */
};
enum {
    SMALLM_ROW_BYTES = SMALLM_N * 4,          /* float32 sums of one row of x */
    SMALLM_BLOCK_BYTES = 8 * SMALLM_ROW_BYTES /* float32 sums of a block of 8 rows of x */
};
enum { SMALLM_MAX_BUFS = 12 /* maximum number of buffers in the ring */ };
enum {
    /* Maximum CTAs of a cluster with QK-norm. Clusters of eight would not all be resident at once,
     * and the rest would run in a second wave. */
    SMALLM_NORM_CTAS = 4
};
template <int ROWS> struct smallm_ring {
    enum {
        BUF_BYTES = SMALLM_W_BYTES + ROWS * SMALLM_K * 2,
        /* full and empty barriers of each buffer, then partials_bar and norm_bar */
        BAR_BYTES = 16 * SMALLM_MAX_BUFS + 16
    };
    /* after the main loop the ring's memory holds the output staging and this CTA's own partials */
    static_assert(3 * BUF_BYTES >= 2 * ROWS * SMALLM_ROW_BYTES,
                  "the partial sums and the staged output reuse the ring's memory");
};
/* Bytes of the receive buffer for the partials of the other CTAs, for up to `rows` rows of x. */
__host__ __device__ constexpr int smallm_partial_bytes(int rows, int split) {
    return (split - 1) * ((rows + 8 * split - 1) / (8 * split)) * SMALLM_BLOCK_BYTES;
}
/* Number of ring buffers that fit in 112 KB together with the receive buffer. */
template <int ROWS> __host__ __device__ constexpr int smallm_n_bufs(int split) {
    int fit = (112 * 1024 - smallm_partial_bytes(ROWS, split)) / smallm_ring<ROWS>::BUF_BYTES;
    return fit < SMALLM_MAX_BUFS ? fit : SMALLM_MAX_BUFS;
}

#if HOPPER
typedef struct smallm_cta { /* the work and the shared memory of one CTA */
    /* n0: first row of W of the tile. k_block0, n_k_blocks: first K block of this CTA, and how many
     * K blocks it has. */
    int n0, k_block0, n_k_blocks;
    int k_rank, split; /* split-K rank of this CTA; number of ranks of a tile */
    /* blocks_per_rank: blocks of 8 rows of x that a rank reduces and stores. m0, rows: first row of
     * x that this rank reduces and stores, and how many rows it has. */
    int blocks_per_rank, m0, rows;
    int n_bufs; /* buffers of the ring */
    /* Shared memory addresses. ring: the ring. partials: the receive buffer. full, empty: barriers,
     * one of each per buffer, 8 bytes apart. */
    uint32_t ring, partials, full, empty;
    uint32_t partials_bar; /* barrier: all partials of the other ranks have arrived */
    /* Cluster rank of the tile's first CTA. It differs from 0 only in the second tile of a head:
     * with QK-norm at D = 128 a cluster has the two tiles of a head. */
    int first_rank;
    /* Only with QK-norm at D = 128. peer_sumsq: receives the row sums of squares of the head's
     * other tile, one float in 8 bytes per row. norm_bar: barrier, they have arrived. */
    uint32_t norm_bar, peer_sumsq;
} smallm_cta;

template <int ROWS>
__device__ static inline smallm_cta smallm_cta_init(uint32_t ring, int M, int K, int split) {
    int k_blocks = (K + SMALLM_K - 1) / SMALLM_K;
    smallm_cta cta;
    cta.k_rank = (int)blockIdx.x % split, cta.split = split,
    cta.n0 = (int)blockIdx.x / split * SMALLM_N;
    cta.k_block0 = k_blocks * cta.k_rank / split,
    cta.n_k_blocks = k_blocks * (cta.k_rank + 1) / split - cta.k_block0;
    cta.n_bufs = smallm_n_bufs<ROWS>(split), cta.ring = ring,
    cta.partials = ring + cta.n_bufs * smallm_ring<ROWS>::BUF_BYTES;
    cta.full = cta.partials + smallm_partial_bytes(ROWS, split),
    cta.empty = cta.full + 8 * SMALLM_MAX_BUFS, cta.partials_bar = cta.empty + 8 * SMALLM_MAX_BUFS;
    cta.norm_bar = cta.partials_bar + 8, cta.peer_sumsq = cta.partials_bar + 16, cta.first_rank = 0;
    cta.blocks_per_rank = (M + 8 * split - 1) / (8 * split),
    cta.m0 = 8 * cta.blocks_per_rank * cta.k_rank,
    cta.rows = max(min(8 * cta.blocks_per_rank, M - cta.m0), 0);
    return cta;
}

/* Producer of W, one thread. It does not call grid_wait(), because no kernel writes W. So it can
 * fill the whole ring while the previous kernel runs. It also announces the bytes of x to the full
 * barriers. */
template <int ROWS>
__device__ static inline void smallm_produce_w(const CUtensorMap *map, const smallm_cta &cta) {
    int buf = 0, parity = 1;
    for (int i = 0; i < cta.n_k_blocks; i++) {
        mbar_wait(cta.empty + 8 * buf, parity);
        mbar_expect_tx(cta.full + 8 * buf, smallm_ring<ROWS>::BUF_BYTES);
        tma_load_2d_evict_first(cta.ring + buf * smallm_ring<ROWS>::BUF_BYTES, map,
                                cta.full + 8 * buf, (cta.k_block0 + i) * SMALLM_K, cta.n0);
        if (++buf == cta.n_bufs) buf = 0, parity ^= 1;
    }
}
/* Producer of x, one thread of another warp. It waits for no buffer in the first round of the ring
 * (n_prefetch buffers), because they begin empty. */
template <int ROWS>
__device__ static inline void smallm_produce_x(const CUtensorMap *map, const smallm_cta &cta) {
    int buf = 0, parity = 0, n_prefetch = min(cta.n_bufs, cta.n_k_blocks);
    uint32_t ring = cta.ring + SMALLM_W_BYTES;
    tma_prefetch_map(map);
    grid_wait();
    for (int i = 0; i < n_prefetch; i++)
        tma_load_2d(ring + i * smallm_ring<ROWS>::BUF_BYTES, map, cta.full + 8 * i,
                    (cta.k_block0 + i) * SMALLM_K, 0);
    for (int i = n_prefetch; i < cta.n_k_blocks; i++) {
        mbar_wait(cta.empty + 8 * buf, parity);
        tma_load_2d(ring + buf * smallm_ring<ROWS>::BUF_BYTES, map, cta.full + 8 * buf,
                    (cta.k_block0 + i) * SMALLM_K, 0);
        if (++buf == cta.n_bufs) buf = 0, parity ^= 1;
    }
}

/* Main loop of the consumer warpgroup: acc[n][m] = W x^T for this CTA's rows of W and K blocks. A
 * small wgmma can be issued faster than the previous one finishes its accumulation. So the loop
 * keeps CHAINS independent sets of accumulators and adds them at the end. */
template <int ROWS, int CHAINS>
__device__ static inline void smallm_mainloop(float (&acc)[CHAINS][ROWS / 2],
                                              const smallm_cta &cta) {
    int buf = 0, parity = 0, last_buf = 0;
    for (int i = 0; i < cta.n_k_blocks; i++) {
        uint32_t buf_at = cta.ring + buf * smallm_ring<ROWS>::BUF_BYTES;
        uint64_t a_desc = wgmma_desc(buf_at), b_desc = wgmma_desc(buf_at + SMALLM_W_BYTES);
        mbar_wait(cta.full + 8 * buf, parity);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < SMALLM_K / 16; k++)
            wgmma_ss<ROWS>(acc[k % CHAINS], a_desc + 2 * k, b_desc + 2 * k, 1);
        wgmma_commit();
        wgmma_wait<1>(); /* the MMAs of the previous K block are complete */
        if (i > 0 && threadIdx.x == 0) mbar_arrive(cta.empty + 8 * last_buf);
        last_buf = buf;
        if (++buf == cta.n_bufs) buf = 0, parity ^= 1;
    }
    wgmma_wait<0>();
#pragma unroll
    for (int k = 0; k < CHAINS; k++) wgmma_fence_operand(acc[k]);
#pragma unroll
    for (int i = 0; i < ROWS / 2 * (CHAINS - 1); i++)
        acc[0][i % (ROWS / 2)] += acc[1 + i / (ROWS / 2)][i % (ROWS / 2)];
}

/* ---- Split-K: reduce-scatter of the partial sums ----
 *
 * Block j is 8 rows of x by 64 rows of W: the accumulators acc[4j .. 4j+3] of 128 threads. A rank
 * reduces blocks_per_rank consecutive blocks: its blocks. It receives their partials as
 * [sender][block][thread] x 16 bytes. The receive buffer is not part of the ring, so it is free
 * from the start, and a sender does not wait until the receiver has left its main loop.
 *
 * The output staging is [rows][SMALLM_N] floats. In row m the groups of 8 columns are swizzled (XOR
 * with m / 2 % 4), so that the 32 lanes of a store hit 32 different banks. */

__device__ static inline uint32_t smallm_staging_at(int m, int n) {
    return (uint32_t)(m * SMALLM_ROW_BYTES + (n ^ (m >> 1 & 3) << 3) * 4);
}

/* Address of this thread's partials of the first block that from_rank sends to to_rank. */
__device__ static inline uint32_t smallm_partial_at(const smallm_cta &cta, int from_rank,
                                                    int to_rank) {
    return cta.partials +
           (uint32_t)((from_rank - (from_rank > to_rank)) * cta.blocks_per_rank *
                      SMALLM_BLOCK_BYTES) +
           threadIdx.x * 16;
}
/* Sends every other rank the partials of its blocks. */
template <int ROWS>
__device__ static inline void smallm_send_partials(const float (&acc)[ROWS / 2],
                                                   const smallm_cta &cta, int M) {
    int to_rank = 0, first_block = 0;
#pragma unroll
    for (int block = 0; block < ROWS / 8; block++) {
        if (block == first_block + cta.blocks_per_rank) to_rank++, first_block = block;
        if (to_rank != cta.k_rank && 8 * block < M)
            st_async_16(mapa(smallm_partial_at(cta, cta.k_rank, to_rank) +
                                 (block - first_block) * SMALLM_BLOCK_BYTES,
                             cta.first_rank + to_rank),
                        acc + 4 * block, mapa(cta.partials_bar, cta.first_rank + to_rank));
    }
}
/* Stores four sums of this rank's block `block` to the output staging. */
__device__ static inline void smallm_staging_write(const smallm_cta &cta, int block,
                                                   const float values[4]) {
    int lane = (int)threadIdx.x % 32, n = (int)threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++)
        smem_store_float(cta.ring +
                             smallm_staging_at(block * 8 + lane % 4 * 2 + i % 2, n + i / 2 * 8),
                         values[i]);
}
/* Reduces this rank's blocks over the split-K ranks, in rank order, into the output staging. The
 * rank's own partials are stored in the memory of the ring. */
template <int ROWS>
__device__ static inline void smallm_reduce_split(const float (&acc)[ROWS / 2],
                                                  const smallm_cta &cta) {
    uint32_t own = cta.ring + ROWS * SMALLM_ROW_BYTES + threadIdx.x * 16;
    int first_block = cta.k_rank * cta.blocks_per_rank;
#pragma unroll
    for (int block = 0; block < ROWS / 8; block++) {
        if (cta.split == 1) smallm_staging_write(cta, block, acc + 4 * block);
        else if (block >= first_block && block < first_block + cta.blocks_per_rank)
            smem_store_float4(own + (block - first_block) * SMALLM_BLOCK_BYTES, acc + 4 * block);
    }
    if (cta.split == 1) return;
    mbar_wait(cta.partials_bar, 0);
    for (int block = 0; 8 * block < cta.rows; block++) {
        float values[4] = {};
#pragma unroll 4
        for (int k_rank = 0; k_rank < cta.split; k_rank++) {
            float4 partial = smem_load_float4(
                (k_rank == cta.k_rank ? own : smallm_partial_at(cta, k_rank, cta.k_rank)) +
                block * SMALLM_BLOCK_BYTES);
            values[0] += partial.x, values[1] += partial.y, values[2] += partial.z,
                values[3] += partial.w;
        }
        smallm_staging_write(cta, block, values);
    }
}

/* ---- Epilogue of gemm_smallm ----
 *
 * All 192 threads store. An item is what one thread stores at a time: 8 neighbouring columns of the
 * tile in one row. For EPI_SWIGLU it is 16 columns (8 of gate, then their 8 of up), and so it is
 * for EPI_QKV (8 of the low half of a head, then the 8 of the high half that RoPE pairs with
 * them). */

/* Finds the item-th item of this thread: row *m of x and first column *n in the tile. Returns false
 * if the thread has no such item. */
template <class QKV>
__device__ static inline bool smallm_item_at(const gemm_kernel_args &args, const smallm_cta &cta,
                                             int item, int *m, int *n) {
    int paired = smallm_has_qkv<QKV> || args.epi == EPI_SWIGLU, per_row_log2 = 3 - paired,
        index = item * SMALLM_THREADS + (int)threadIdx.x;
    *m = cta.m0 + (index >> per_row_log2), *n = (index & (1 << per_row_log2) - 1) * (8 << paired);
    return index < cta.rows << per_row_log2 && cta.n0 + *n < args.N;
}
/* values = columns n .. n+7 of row m, times scale. */
__device__ static inline void smallm_staging_read(float values[8], const smallm_cta &cta, int m,
                                                  int n, float scale) {
    uint32_t at = cta.ring + smallm_staging_at(m - cta.m0, n);
    float4 a = smem_load_float4(at), b = smem_load_float4(at + 16);
    values[0] = a.x, values[1] = a.y, values[2] = a.z, values[3] = a.w, values[4] = b.x,
    values[5] = b.y, values[6] = b.z, values[7] = b.w;
#pragma unroll
    for (int k = 0; k < 8; k++) values[k] *= scale;
}
/* values = the 8 sums of an item; for EPI_SWIGLU: its 8 outputs. */
__device__ static inline void smallm_outputs(float values[8], const gemm_kernel_args &args,
                                             const smallm_cta &cta, int m, int n, float scale) {
    float up[8];
    smallm_staging_read(values, cta, m, n, scale);
    if (args.epi != EPI_SWIGLU) return;
    smallm_staging_read(up, cta, m, n + 8, scale);
    add_bias<8>(values, args.bias, cta.n0 + n);
    add_bias<8>(up, args.bias, cta.n0 + n + 8);
#pragma unroll
    for (int k = 0; k < 8; k++) values[k] = swiglu(values[k], up[k]);
}
/* Stores an item of EPI_STORE, EPI_RESIDUAL or EPI_SWIGLU. */
__device__ static inline void smallm_store(float values[8], const gemm_kernel_args &args,
                                           const smallm_cta &cta, int m, int n, uint4 residual) {
    int gated = args.epi == EPI_SWIGLU;
    if (!gated) add_bias<8>(values, args.bias, cta.n0 + n);
    if (args.epi == EPI_RESIDUAL) {
        add_residual(values[0], values[1], residual.x);
        add_residual(values[2], values[3], residual.y);
        add_residual(values[4], values[5], residual.z);
        add_residual(values[6], values[7], residual.w);
    }
    *(uint4 *)(args.y + (size_t)m * args.ldy + (cta.n0 + n >> gated)) = pack_8(values);
}
/* EPI_QKV: where the elements of an item are stored and how they are rotated. */
typedef struct smallm_rope_pairs {
    bf16 *to;              /* first of the eight elements of the low half */
    const float4 *cos_sin; /* (cosine, sine) of each pair; NULL: a V head, which is not rotated */
} smallm_rope_pairs;
/* n: first column of an item, in the order of qkv_interleave. May run before grid_wait(): it reads
 * nothing that a kernel of the step writes. */
__device__ static inline smallm_rope_pairs smallm_rope_pairs_at(const qkv_params &qkv, int m,
                                                                int n) {
    const int head = n / qkv.D, elem = n % qkv.D / 16 * 8;
    bf16 *to = qkv_head_at(qkv, m, qkv.kv_slot[m], head) + elem;
    const float4 *cos_sin = (const float4 *)(qkv.rope + (size_t)qkv.pos[m] * (qkv.D / 2) + elem);
    return smallm_rope_pairs{to, head < qkv.H + qkv.K ? cos_sin : NULL};
}
/* lo = columns n .. n+7 of row m, hi = the next eight; times scale, plus bias. */
__device__ static inline void smallm_load_halves(float lo[8], float hi[8],
                                                 const gemm_kernel_args &args,
                                                 const smallm_cta &cta, int m, int n, float scale) {
    smallm_staging_read(lo, cta, m, n, scale);
    smallm_staging_read(hi, cta, m, n + 8, scale);
    add_bias<8>(lo, args.bias, cta.n0 + n);
    add_bias<8>(hi, args.bias, cta.n0 + n + 8);
}
/* Rotates the pairs and stores them. half: D/2, the distance of the two halves in elements. */
__device__ static inline void smallm_store_rope(float lo[8], float hi[8],
                                                const smallm_rope_pairs &rope,
                                                const float4 cos_sin[4], int half) {
#pragma unroll
    for (int k = 0; k < 8; k++) {
        const float cosine = k % 2 ? cos_sin[k / 2].z : cos_sin[k / 2].x,
                    sine = k % 2 ? cos_sin[k / 2].w : cos_sin[k / 2].y;
        rope_rotate(lo[k], hi[k], cosine, sine);
    }
    *(uint4 *)rope.to = pack_8(lo), *(uint4 *)(rope.to + half) = pack_8(hi);
}
__device__ static inline void smallm_store_logits(const float values[8],
                                                  const gemm_kernel_args &args,
                                                  const smallm_cta &cta, int m, int n) {
    float4 *to = (float4 *)((float *)args.y + (size_t)m * args.ldy + cta.n0 + n);
    to[0] = make_float4(values[0], values[1], values[2], values[3]),
    to[1] = make_float4(values[4], values[5], values[6], values[7]);
}

/* QK-norm, for M <= 8: the norm weights of a thread's columns. A thread has at most one item, and
 * four neighbouring threads hold the 64 columns of a row. */
typedef struct smallm_qk_norm {
    const float *w;     /* norm weights [D] of the tile's head; NULL: the head has no norm (V) */
    float lo[8], hi[8]; /* weights of the item's low and high half */
} smallm_qk_norm;
/* n: first column of an item, in the order of qkv_interleave. May run before grid_wait(). */
__device__ static inline smallm_qk_norm smallm_qk_norm_at(const qkv_params &qkv, int n) {
    const int head = n / qkv.D, elem = n % qkv.D / 16 * 8;
    smallm_qk_norm norm = {qkv_norm_weights(qkv, head)};
#pragma unroll
    for (int k = 0; k < 8; k++)
        norm.lo[k] = norm.w ? norm.w[elem + k] : 1,
        norm.hi[k] = norm.w ? norm.w[qkv.D / 2 + elem + k] : 1;
    return norm;
}
/* Normalizes the item of this thread. At D = 128 a head has two tiles in two CTAs of the cluster,
 * and these exchange their row sums of squares through DSMEM. All threads of the CTA call this.
 * valid: the thread has an item, which is in row m. */
__device__ static inline void smallm_apply_qk_norm(float lo[8], float hi[8], bool valid, int m,
                                                   const smallm_qk_norm &norm,
                                                   const qkv_params &qkv, const smallm_cta &cta) {
    /* cluster rank of the CTA with the same k_rank in the other tile of the head */
    const int peer = cta.split - cta.first_rank + cta.k_rank;
    const uint32_t sumsq_at = cta.peer_sumsq + 8 * (m - cta.m0);
    const bool two_tiles = qkv.D > SMALLM_N;
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 8 && valid; k++) sum += lo[k] * lo[k] + hi[k] * hi[k];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (two_tiles && valid && threadIdx.x % 4 == 0)
        st_async_8(mapa(sumsq_at, peer), sum, 0, mapa(cta.norm_bar, peer));
    if (two_tiles) mbar_wait(cta.norm_bar, 0);
    if (two_tiles && valid) sum += smem_load_float(sumsq_at);
    const float scale = qk_norm_scale(sum, qkv.D, qkv.eps);
#pragma unroll
    for (int k = 0; k < 8; k++) lo[k] *= scale * norm.lo[k], hi[k] *= scale * norm.hi[k];
}
#endif

template <int ROWS, class QKV, bool QK_NORM>
__global__ static void __launch_bounds__(SMALLM_THREADS, 2)
    gemm_smallm_kernel(const __grid_constant__ CUtensorMap map_w,
                       const __grid_constant__ CUtensorMap map_x, const gemm_kernel_args args,
                       int split, const QKV qkv) {
#if HOPPER
    constexpr int ITEMS = (ROWS * SMALLM_N / 8 + SMALLM_THREADS - 1) / SMALLM_THREADS;
    /* items of EPI_QKV per thread; 0 for other epilogues */
    constexpr int ROPE_ITEMS = smallm_has_qkv<QKV>
                                   ? (ROWS * SMALLM_N / 16 + SMALLM_THREADS - 1) / SMALLM_THREADS
                                   : 0;
    extern __shared__ __align__(1024) char smallm_smem[];
    smallm_cta cta = smallm_cta_init<ROWS>(smem_addr(smallm_smem), args.M, args.K, split);
    int m, n, tid = (int)threadIdx.x, warp = tid / 32, lane = tid % 32;
    uint4 residual[ITEMS]; /* the residual of EPI_RESIDUAL, loaded before the main loop */
    smallm_rope_pairs rope[ROPE_ITEMS + 1];
    float4 cos_sin[ROPE_ITEMS + 1][4];
    __shared__ float row_scale[FUSE_NORM_MAX_ROWS];
    int cluster_ctas = split;
    if constexpr (QK_NORM)
        cluster_ctas = qkv.D / SMALLM_N * split,
        cta.first_rank = (int)blockIdx.x % cluster_ctas - cta.k_rank;

    if (tid == 0) {
        for (int i = 0; i < cta.n_bufs; i++)
            mbar_init(cta.full + 8 * i, 1), mbar_init(cta.empty + 8 * i, 1);
        mbar_init(cta.partials_bar, 1), mbar_init(cta.norm_bar, 1);
        mbar_init_fence();
        mbar_expect_tx(cta.partials_bar, (split - 1) * ((cta.rows + 7) / 8) * SMALLM_BLOCK_BYTES);
        if (QK_NORM) mbar_expect_tx(cta.norm_bar, 8 * cta.rows);
    }
    __syncthreads();
    grid_launch_dependents();
    /* tells the other CTAs of the cluster that the barriers of this CTA are initialized */
    if (cluster_ctas > 1) cluster_arrive_relaxed();
    if (warp == 4 && lane == 0) smallm_produce_w<ROWS>(&map_w, cta);
    if (warp == 5 && lane == 0) smallm_produce_x<ROWS>(&map_x, cta);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROPE_ITEMS; i++)
        if constexpr (smallm_has_qkv<QKV>)
            if (smallm_item_at<QKV>(args, cta, i, &m, &n))
                rope[i] = smallm_rope_pairs_at(qkv, m, cta.n0 + n);
    smallm_qk_norm norm;
    if constexpr (QK_NORM) norm = smallm_qk_norm_at(qkv, cta.n0 + tid % 4 * 16);
    if (args.bias && tid < SMALLM_N / 32 && cta.n0 + 32 * tid < args.N)
        l2_prefetch(args.bias + cta.n0 + 32 * tid);
    grid_wait();
#pragma unroll
    for (int i = 0; i < ITEMS; i++)
        if (args.epi == EPI_RESIDUAL && smallm_item_at<QKV>(args, cta, i, &m, &n))
            residual[i] = *(uint4 *)(args.y + (size_t)m * args.ldy + cta.n0 + n);
    lane_sumsq sumsq = {};
    if (ROWS == FUSE_NORM_MAX_ROWS && args.norm.input_sumsq && warp < args.M)
        sumsq = rms_prefetch(args.norm, warp, lane);
    constexpr int CHAINS = ROWS <= 16 ? 4 : 2;
    float acc[CHAINS][ROWS / 2] = {};
    if (warp < 4) smallm_mainloop<ROWS, CHAINS>(acc, cta);
    for (int i = warp; ROWS == FUSE_NORM_MAX_ROWS && args.norm.input_sumsq && i < args.M;
         i += SMALLM_THREADS / 32) {
        if (i > warp) sumsq = rms_prefetch(args.norm, i, lane);
        float scale = rms_inverse(args.norm, i, lane, sumsq);
        if (lane == 0) row_scale[i] = scale;
    }
    __syncwarp();
    if (cluster_ctas > 1) cluster_wait();
    if (split > 1 && warp < 4) smallm_send_partials<ROWS>(acc[0], cta, args.M);
#pragma unroll
    for (int i = 0; i < 4 * ROPE_ITEMS; i++) /* loads the table while the partials are in flight */
        if (smallm_item_at<QKV>(args, cta, i / 4, &m, &n))
            cos_sin[i / 4][i % 4] = rope[i / 4].cos_sin ? rope[i / 4].cos_sin[i % 4]
                                                        : make_float4(1, 0, 1, 0);
    __syncthreads(); /* no wgmma reads the ring any more, and no TMA load into it is pending */
    if (warp < 4) smallm_reduce_split<ROWS>(acc[0], cta);
    __syncthreads();
    const bool scaled = ROWS == FUSE_NORM_MAX_ROWS && args.norm.input_sumsq;
    if constexpr (smallm_has_qkv<QKV>) {
#pragma unroll
        for (int i = 0; i < ROPE_ITEMS; i++) {
            float values[8], values_hi[8];
            const bool valid = smallm_item_at<QKV>(args, cta, i, &m, &n);
            if (valid)
                smallm_load_halves(values, values_hi, args, cta, m, n, scaled ? row_scale[m] : 1);
            if constexpr (QK_NORM)
                if (norm.w) smallm_apply_qk_norm(values, values_hi, valid, m, norm, qkv, cta);
            if (valid) smallm_store_rope(values, values_hi, rope[i], cos_sin[i], qkv.D / 2);
        }
    } else {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            float values[8];
            if (!smallm_item_at<QKV>(args, cta, i, &m, &n)) continue;
            smallm_outputs(values, args, cta, m, n, scaled ? row_scale[m] : 1);
            if (args.epi == EPI_LOGITS) smallm_store_logits(values, args, cta, m, n);
            else smallm_store(values, args, cta, m, n, residual[i]);
        }
    }
#else
    __trap();
#endif
}

template <int ROWS, class QKV, bool QK_NORM>
static void gemm_smallm_launch(toka_device *dev, const gemm_args *args, int split,
                               int tiles_per_head, const QKV &qkv) {
    gemm_kernel_args kernel_args = gemm_checked_args(args);
    kernel_args.norm = gemm_fuse_norm_args(dev, args);
    assert(kernel_args.M <= ROWS && split * tiles_per_head <= 8 && !args->next_norm);
    const int smem_bytes = smallm_n_bufs<ROWS>(split) * smallm_ring<ROWS>::BUF_BYTES +
                           smallm_partial_bytes(ROWS, split) + smallm_ring<ROWS>::BAR_BYTES +
                           (QK_NORM ? 8 * ROWS : 0);
    launch_dependent(dev, "GEMM (small M)", gemm_smallm_kernel<ROWS, QKV, QK_NORM>,
                     {dim3((unsigned)(ceil_div(kernel_args.N, SMALLM_N) * split)), SMALLM_THREADS,
                      (size_t)smem_bytes, split * tiles_per_head},
                     gemm_tensor_map(dev, kernel_args.w, kernel_args.N, kernel_args.K,
                                     kernel_args.K, SMALLM_N, SMALLM_K),
                     gemm_tensor_map(dev, kernel_args.x, ROWS, kernel_args.K, kernel_args.ldx, ROWS,
                                     SMALLM_K),
                     kernel_args, split, qkv);
}
template <int ROWS>
static void gemm_smallm_tile(toka_device *dev, const gemm_args *args, int split) {
    const bool qk_norm = args->epi == EPI_QKV && qkv_has_norms(args->qkv);
    assert(!qk_norm || ROWS == FUSE_NORM_MAX_ROWS);
    if (args->epi != EPI_QKV)
        gemm_smallm_launch<ROWS, smallm_no_qkv, false>(dev, args, split, 1, smallm_no_qkv{});
    else if (!qk_norm) gemm_smallm_launch<ROWS, qkv_params, false>(dev, args, split, 1, *args->qkv);
    else
        gemm_smallm_launch<FUSE_NORM_MAX_ROWS, qkv_params, true>(dev, args, split,
                                                                 args->qkv->D / SMALLM_N,
                                                                 *args->qkv);
}
/* ---- Split-K of gemm_smallm ----
 *
 * The split is a power of two from 1 to 8. The rules, in this order:
 *
 * 1. Take the largest split with tiles * split <= 2 * SMs, because two CTAs per SM are resident.
 *    Split 8 is taken only if tiles * 8 <= SMs.
 * 2. Reduce the split until each CTA has at least SPLIT_MIN_BLOCKS K blocks.
 * 3. If SMs < tiles < 1.5 * SMs and K has SPLIT_TAIL_BLOCKS: split 2. Without it fewer than half of
 *    the SMs would have a second tile, and the others would idle.
 * 4. If tiles <= SMs, K has SPLIT8_BLOCKS, and split 8 has a clearly higher utilization than the
 *    split of rules 1 and 2: split 8.
 *
 * The figures are in test/results/kernel-choices.md. */
enum {
    SPLIT_MIN_BLOCKS = 3,
    SPLIT_TAIL_BLOCKS = 64, /* K of about 4,096 */
    SPLIT8_BLOCKS = 128,    /* K of about 8,192 */
    /* A cluster lies in one GPC, so some SMs of a GPC stay empty: with clusters of eight CTAs so
     * many CTAs fewer are resident. */
    SPLIT8_LOST_CTAS = 24
};
#define SPLIT8_GAIN 0.075 /* "clearly higher": the exchange of eight CTAs takes longer */

/* Share of the CTA slots of all waves that `ctas` CTAs fill, if max_ctas CTAs are resident at
 * once. */
static double smallm_utilization(int ctas, int max_ctas) {
    return (double)ctas / (ceil_div(ctas, max_ctas) * max_ctas);
}
static int gemm_smallm_split(const toka_device *dev, int N, int K) {
    int tiles = ceil_div(N, SMALLM_N), k_blocks = ceil_div(K, SMALLM_K), split = 1,
        two_per_sm = 2 * dev->n_sms;
    while (split < 8 && 2 * split * tiles <= dev->n_sms * (split < 4 ? 2 : 1)) split *= 2;
    while (split > 1 && k_blocks < SPLIT_MIN_BLOCKS * split) split /= 2;
    if (tiles > dev->n_sms)
        return 2 * tiles < 3 * dev->n_sms && k_blocks >= SPLIT_TAIL_BLOCKS ? 2 : split;
    const int max_ctas_8 = max(two_per_sm - SPLIT8_LOST_CTAS, 8);
    return k_blocks >= SPLIT8_BLOCKS &&
                   smallm_utilization(8 * tiles, max_ctas_8) >
                       smallm_utilization(split * tiles, two_per_sm) + SPLIT8_GAIN
               ? 8
               : split;
}
static void gemm_smallm(toka_device *dev, const gemm_args *args) {
    int split = gemm_smallm_split(dev, args->w->N, args->w->K);
    if (args->epi == EPI_QKV && qkv_has_norms(args->qkv))
        split = min(split, SMALLM_NORM_CTAS / (args->qkv->D / SMALLM_N));
    if (args->M <= 8) gemm_smallm_tile<8>(dev, args, split);
    else if (args->M <= 16) gemm_smallm_tile<16>(dev, args, split);
    else if (args->M <= 32) gemm_smallm_tile<32>(dev, args, split);
    else gemm_smallm_tile<SMALLM_MAX>(dev, args, split);
}

/* ---- gemm_gemv: y[M][N] = x[M][K] W[N][K]^T for M <= 16, on mma.sync with swapped operands ----
 *
 * Computes y^T = W x^T, like gemm_smallm. Inputs and outputs are those of chapter 5; M <= ROWS (8
 * or 16). Epilogues: all of enum epilogue except EPI_LOGITS. To save launches at small M the kernel
 * also does the work around the GEMM: RoPE and the KV append (EPI_QKV); for M <= 8 the RMSNorm
 * before the GEMM (norm_ready), and what the RMSNorm after the GEMM needs (next_norm).
 *
 * Main loop: a CTA has 16 rows of W (the m16 side of mma.sync) and all of K. The K blocks of 64
 * columns go to its eight warps in turn. Each warp has its own ring of K blocks. A buffer holds 16
 * rows of W, then ROWS rows of x, 128 bytes each. The 16-byte chunk c of row r is stored at
 * c ^ (r % 8). At the end the sums of the eight warps are added in shared memory, in the order of
 * the warps.
 *
 * Grid: one CTA per 16 rows of W. Block: 256. Shared: 96 KB for the rings; after the main loop the
 * same memory holds the sums of the warps. Bytes: 2NK, W is read once.
 *
 * Why this shape:
 * - If W is small, the kernel reads it in a few microseconds. Then most of its time is latency
 *   between the end of the previous kernel and its own end. So it has no cluster, and few steps
 *   that wait for one another.
 * - The warps are independent until the final reduction.
 * - The rings hold up to 2,048 columns of K (ROWS 8) or 1,536 (ROWS 16). They are filled with W
 *   before grid_wait().
 * - The main loop issues no loads beyond the end of K: zero-fill copies cost as much as real ones.
 *   Only the first fill of the rings has zero-fill copies, if K is smaller than the rings.
 * - W is loaded with evict_first, so everything else stays in the L2 cache. A step takes 3 % less
 *   time.
 *
 * The launcher asserts: M <= ROWS; not EPI_LOGITS; next_norm only with EPI_RESIDUAL; EPI_QKV has
 * qkv (and what gemm_checked_args asserts).
 *
 * Retired or tried (figures: test/results/kernel-choices.md):
 * - x loaded from the L2 cache to registers, and rings of six buffers of W alone: slower.
 * - Rings of 48 KB, for four CTAs per SM: slower, except where many CTAs read little each. For
 *   those shapes gemm_smallm is faster still. */

enum {
    GEMV_N = 16,    /* rows of W of a CTA */
    GEMV_K = 64,    /* columns of a K block */
    GEMV_WARPS = 8, /* the K blocks go to them in turn */
    GEMV_PITCH = GEMV_N + 4 /* floats from one row of the sums to the next; 4 are padding */
};
template <int ROWS> struct gemv_ring {
    enum {
        BUF_BYTES = (GEMV_N + ROWS) * GEMV_K * 2,
        BUFS = 96 * 1024 / GEMV_WARPS / BUF_BYTES, /* 96 KB: two CTAs fit on an SM */
        SMEM_BYTES = GEMV_WARPS * BUFS * BUF_BYTES
    };
};

/* gemv_load_w: one warp loads the rows row0 .. row0+15 of W, columns k0 .. k0+63 of K.
 * gemv_load_x: one warp loads the same columns of x. Both fill zeros outside the matrices. */
__device__ static inline void gemv_load_w(uint32_t to, const gemm_kernel_args &args, int row0,
                                          int k0, int lane, uint64_t policy) {
    int k = k0 + lane % 8 * 8;
#pragma unroll
    for (int row = lane / 8; row < GEMV_N; row += 4) {
        bool inside = row0 + row < args.N && k < args.K;
        cp_async_16_evict_first(to + row * 128 + ((lane ^ row) % 8) * 16,
                                inside ? args.w + (size_t)(row0 + row) * args.K + k : args.w,
                                inside ? 16 : 0, policy);
    }
}
template <int ROWS>
__device__ static inline void gemv_load_x(uint32_t to, const gemm_kernel_args &args, int k0,
                                          int lane) {
    int k = k0 + lane % 8 * 8;
#pragma unroll
    for (int row = lane / 8; row < ROWS; row += 4) {
        bool inside = row < args.M && k < args.K;
        cp_async_16(to + row * 128 + ((lane ^ row) % 8) * 16,
                    inside ? args.x + (size_t)row * args.ldx + k : args.x, inside ? 16 : 0);
    }
}
/* acc[block of 8 rows of x][.] += the product of one K block. */
template <int ROWS>
__device__ static inline void gemv_multiply(float acc[ROWS / 8][4], uint32_t buf_at, int lane) {
    uint32_t a[4][4], b[ROWS / 4][4];
#pragma unroll
    for (int k = 0; k < 4; k++)
        ldmatrix_x4(a[k], buf_at + lane % 16 * 128 + (((2 * k + lane / 16) ^ lane) % 8) * 16);
#pragma unroll
    for (int i = 0; i < ROWS / 8; i++) /* an ldmatrix loads 8 rows of x, 32 columns */
#pragma unroll
        for (int k = 0; k < 2; k++)
            ldmatrix_x4(b[2 * i + k], buf_at + (GEMV_N + 8 * i + lane % 8) * 128 +
                                          (((4 * k + lane / 8) ^ lane) % 8) * 16);
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int i = 0; i < ROWS / 8; i++) mma_16816(acc[i], a[k], b[2 * i + k / 2] + k % 2 * 2);
}

/* EPI_RESIDUAL with next_norm: stores columns n and n+1 of row m of y, and what the next RMSNorm
 * needs: y times norm_w (the norm weights of the two columns), and the row's sum of squares over
 * the CTA's 16 columns. All threads of the CTA call this; the 8 threads of a row are neighbours.
 * valid: row m and column n exist. */
__device__ static inline void gemv_store_normed(const gemm_kernel_args &args, bool valid, int m,
                                                int n, float2 values, uint32_t residual,
                                                float2 norm_w) {
    uint32_t y = 0;
    if (valid) {
        float sums[2] = {values.x, values.y};
        add_bias<2>(sums, args.bias, n);
        add_residual(sums[0], sums[1], residual);
        y = pack_bf16(sums[0], sums[1]);
        *(uint32_t *)(args.y + (size_t)m * args.ldy + n) = y;
        *(uint32_t *)(args.norm.xw + (size_t)m * args.N + n) =
            pack_bf16(bf16_low(y) * norm_w.x, bf16_high(y) * norm_w.y);
    }
    float sum = bf16_low(y) * bf16_low(y) + bf16_high(y) * bf16_high(y);
    for (int delta = 4; delta; delta >>= 1) sum += __shfl_xor_sync(~0u, sum, delta);
    if (threadIdx.x % 8 == 0 && m < args.M)
        args.norm.row_sumsq[m * args.norm.n_sums + (int)blockIdx.x] = sum;
}

/* EPI_QKV: two RoPE pairs of a head, (i, i + D/2) and (i + 1, i + 1 + D/2): where they are stored
 * and how they are rotated. */
typedef struct gemv_rope_pairs {
    bf16 *to;       /* element i */
    float4 cos_sin; /* (cosine, sine) of each pair; (1, 0) for V heads, which are not rotated */
} gemv_rope_pairs;
/* The pairs of row m that begin in column n, a column of a low half in the order of qkv_interleave.
 * May run before grid_wait(): reads nothing that a kernel of the step writes. */
__device__ static inline gemv_rope_pairs gemv_rope_pairs_at(const qkv_params &qkv, int m, int n) {
    int head = n / qkv.D, elem = n % qkv.D / 16 * 8 + n % 8;
    bf16 *to = qkv_head_at(qkv, m, qkv.kv_slot[m], head) + elem;
    float4 cos_sin = head < qkv.H + qkv.K
                         ? *(const float4 *)(qkv.rope + (size_t)qkv.pos[m] * (qkv.D / 2) + elem)
                         : make_float4(1, 0, 1, 0);
    return gemv_rope_pairs{to, cos_sin};
}
/* Rotates and stores the pairs. lo, hi: their elements of the low and of the high half; half:
 * D/2. */
__device__ static inline void gemv_store_rope(const gemv_rope_pairs &rope, int half, float lo[2],
                                              float hi[2]) {
    rope_rotate(lo[0], hi[0], rope.cos_sin.x, rope.cos_sin.y);
    rope_rotate(lo[1], hi[1], rope.cos_sin.z, rope.cos_sin.w);
    store_bf16x2(rope.to, lo[0], lo[1]), store_bf16x2(rope.to + half, hi[0], hi[1]);
}

template <int ROWS>
__global__ static void __launch_bounds__(32 * GEMV_WARPS, 2)
    gemm_gemv_kernel(const gemm_kernel_args args, const qkv_params qkv) {
    constexpr int BUF_BYTES = gemv_ring<ROWS>::BUF_BYTES, BUFS = gemv_ring<ROWS>::BUFS;
    extern __shared__ __align__(128) char gemv_smem[];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n0 = (int)blockIdx.x * GEMV_N,
        k_step = GEMV_WARPS * GEMV_K; /* from a warp's K block to its next one */
    uint32_t ring = smem_addr(gemv_smem) + warp * BUFS * BUF_BYTES;
    /* W leaves the L2 cache first: x, K, V and instructions stay there */
    const uint64_t policy = l2_evict_first_policy();
    float acc[ROWS / 8][4] = {}, *sums = (float *)gemv_smem;
    __shared__ float row_scale[GEMV_WARPS];
    /* paired: the thread also has the columns n + 8 and n + 9. n is a column of gate (or of a low
     * half), n + 8 is the column of up (or of the high half) that belongs to it. */
    bool is_qkv = args.epi == EPI_QKV, paired = is_qkv || args.epi == EPI_SWIGLU;
    int pairs_per_row = paired ? 4 : 8, m = (int)threadIdx.x / pairs_per_row,
        n = (int)threadIdx.x % pairs_per_row * 2;
    bool valid = m < args.M && n0 + n < args.N;

    grid_launch_dependents();
#pragma unroll
    for (int i = 0; i < BUFS; i++)
        gemv_load_w(ring + i * BUF_BYTES, args, n0, warp * GEMV_K + i * k_step, lane, policy);
    gemv_rope_pairs rope = {};
    float2 norm_w = {};
    if (valid && is_qkv) rope = gemv_rope_pairs_at(qkv, m, n0 + n);
    if (valid && args.norm.w) norm_w = *(const float2 *)(args.norm.w + n0 + n);
    if (args.bias && threadIdx.x == 0) l2_prefetch(args.bias + n0);
    grid_wait();
#pragma unroll
    for (int i = 0; i < BUFS; i++) {
        gemv_load_x<ROWS>(ring + i * BUF_BYTES + GEMV_N * 128, args, warp * GEMV_K + i * k_step,
                          lane);
        cp_async_commit();
    }
    uint32_t residual = valid ? gemm_residual_pair(args, m, n0 + n) : 0;
    bool has_scale_row = args.norm.input_sumsq && warp < args.M; /* warp i computes row_scale[i] */
    lane_sumsq sumsq = {};
    if (has_scale_row) sumsq = rms_prefetch(args.norm, warp, lane);
    for (int k = warp * GEMV_K, buf = 0; k < args.K; k += k_step) {
        uint32_t buf_at = ring + buf * BUF_BYTES;
        cp_async_wait<BUFS - 1>();
        __syncwarp();
        gemv_multiply<ROWS>(acc, buf_at, lane);
        __syncwarp();
        if (k + BUFS * k_step < args.K) { /* zero-fill copies would cost as much as real ones */
            gemv_load_w(buf_at, args, n0, k + BUFS * k_step, lane, policy);
            gemv_load_x<ROWS>(buf_at + GEMV_N * 128, args, k + BUFS * k_step, lane);
        }
        cp_async_commit();
        if (++buf == BUFS) buf = 0;
    }
    cp_async_wait<0>();
    if (has_scale_row) {
        float scale = rms_inverse(args.norm, warp, lane, sumsq);
        if (lane == 0) row_scale[warp] = scale;
    }
    __syncthreads(); /* now the memory of the rings holds the sums */
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++)
        sums[(warp * ROWS + i / 4 * 8 + lane % 4 * 2 + i % 2) * GEMV_PITCH + lane / 4 +
             i % 4 / 2 * 8] = acc[i / 4][i % 4];
    __syncthreads();
    if (!valid && !args.norm.w) return; /* with next_norm all threads add sums of squares */
    float2 first = {}, second = {}; /* second: columns n + 8 and n + 9, if paired */
#pragma unroll
    for (int i = 0; i < GEMV_WARPS && valid; i++) {
        const float *warp_sum = sums + (i * ROWS + m) * GEMV_PITCH + n;
        first.x += warp_sum[0], first.y += warp_sum[1];
        if (paired) second.x += warp_sum[8], second.y += warp_sum[9];
    }
    if (valid && args.norm.input_sumsq)
        first.x *= row_scale[m], first.y *= row_scale[m], second.x *= row_scale[m],
            second.y *= row_scale[m];
    if (args.norm.w) {
        gemv_store_normed(args, valid, m, n0 + n, first, residual, norm_w);
    } else if (is_qkv) {
        float lo[2] = {first.x, first.y}, hi[2] = {second.x, second.y};
        add_bias<2>(lo, args.bias, n0 + n), add_bias<2>(hi, args.bias, n0 + n + 8);
        gemv_store_rope(rope, qkv.D / 2, lo, hi);
    } else if (paired) gemm_store_swiglu(args, m, n0 + n, first.x, first.y, second.x, second.y);
    else gemm_store_pair(args, m, n0 + n, first.x, first.y, residual);
}

template <int ROWS>
static void gemm_gemv_tile(toka_device *dev, const gemm_args *args) {
    gemm_kernel_args kernel_args = gemm_checked_args(args);
    kernel_args.norm = gemm_fuse_norm_args(dev, args);
    assert(kernel_args.M <= ROWS && kernel_args.epi != EPI_LOGITS &&
           (!args->next_norm || kernel_args.epi == EPI_RESIDUAL) &&
           (kernel_args.epi != EPI_QKV || args->qkv));
    launch_dependent(dev, "GEMM (GEMV)", gemm_gemv_kernel<ROWS>,
                     {dim3((unsigned)ceil_div(kernel_args.N, GEMV_N)), 32 * GEMV_WARPS,
                      gemv_ring<ROWS>::SMEM_BYTES},
                     kernel_args, args->qkv ? *args->qkv : qkv_params{});
}
static void gemm_gemv(toka_device *dev, const gemm_args *args) {
    if (args->M <= 8) gemm_gemv_tile<8>(dev, args);
    else gemm_gemv_tile<16>(dev, args);
}

/* ---- FP8: x is quantized, then multiplied by gemm_wgmma with gemm_fp8 ---- */

enum { QUANTIZE_CACHED_VECS = 8 };
/* Quantizes rows of x to e4m3 in place (chapter 4).
 *
 * In: x bf16 [T][K], K a multiple of 8. Out: x_scale [T]. Grid T, block 256. A row of up to 16,384
 * columns is held in registers. Of a longer one the rest is read twice; a thread writes behind what
 * the others still read. Moves 3*T*K bytes: bound by copy bandwidth. */
__global__ static void __launch_bounds__(256)
    quantize_rows_kernel(bf16 *x, int ldx, int K, float static_scale, float *x_scale) {
#if HOPPER
    const int n_vecs = K / 8, thread = (int)threadIdx.x;
    uint4 cached[QUANTIZE_CACHED_VECS] = {};
    float largest = 0;
    grid_launch_dependents();
    grid_wait();
    const uint4 *from = (const uint4 *)(x + (size_t)blockIdx.x * ldx);
    uint2 *to = (uint2 *)(x + (size_t)blockIdx.x * ldx);
#pragma unroll
    for (int i = 0; i < QUANTIZE_CACHED_VECS; i++)
        if (thread + 256 * i < n_vecs) cached[i] = from[thread + 256 * i];
#pragma unroll
    for (int i = 0; i < QUANTIZE_CACHED_VECS; i++) largest = fp8_largest_8(cached[i], largest);
    for (int i = thread + 256 * QUANTIZE_CACHED_VECS; i < n_vecs; i += 256)
        largest = fp8_largest_8(from[i], largest);
    const float scale = fp8_scale(static_scale, block_max<8>(largest)), inverse = 1 / scale;
    if (thread == 0) x_scale[blockIdx.x] = scale;
#pragma unroll
    for (int i = 0; i < QUANTIZE_CACHED_VECS; i++)
        if (thread + 256 * i < n_vecs) to[thread + 256 * i] = fp8_quantize_8(cached[i], inverse);
    for (int i = thread + 256 * QUANTIZE_CACHED_VECS; i < n_vecs; i += 256)
        to[i] = fp8_quantize_8(from[i], inverse);
#else
    __trap();
#endif
}

/* Estimates the clocks of an FP8 variant, for M > 64. The clocks of a K block and the rest come
 * from a sweep on an H100 (test/gpu_fp8.cu sweep). */
static double gemm_fp8_cost(const toka_device *dev, const gemm_variant *variant, int multicast,
                            int M, const weight *w) {
    /* 256 columns read less from L2, which counts where power limits: in whole steps they win */
    const double block = variant->bn == 32    ? 230
                         : variant->bn == 64  ? 340
                         : variant->bn == 128 ? 620
                                              : 1130;
    const int n_units = ceil_div(M, 128 * multicast) * ceil_div(w->N, variant->bn),
              waves = ceil_div(n_units, dev->n_sms / multicast);
    const bool shares = multicast == 2 && variant->bn <= 128; /* 256 columns gain nothing by it */
    return waves * (ceil_div(w->K, 128) * (shares ? 0.94 * block : block) + 1000 +
                    4 * variant->bn) +
           (multicast == 2 ? GEMM_MULTICAST : 0);
}
/* Returns the FP8 variant of a kind for M rows and this W. M <= 64: tiles of 64 rows of x, as
 * narrow as one wave of CTAs allows, so that all SMs read W. Above: the cheapest. whole_heads: only
 * variants that allow QK-norm. */
static gemm_plan gemm_fp8_choose(const toka_device *dev, int kind, int M, const weight *w,
                                 bool whole_heads) {
    gemm_plan best = {.raster_m = 8};
    double least_cost = 0;
    for (int i = 0; i < N_GEMM_FP8_VARIANTS; i++)
        for (int multicast = 1; multicast <= 2; multicast++) {
            const gemm_variant *variant = &gemm_fp8_variants[i];
            const bool small_m = variant->rows == 64;
            if (variant->kind != kind || variant->blocked != w->is_blocked ||
                (small_m && (M > 64 || multicast > 1)) || (multicast == 2 && M <= 128) ||
                (whole_heads && !gemm_whole_heads(variant)))
                continue;
            const bool in_one_wave = ceil_div(w->N, variant->bn) <= dev->n_sms;
            const double cost = small_m ? (in_one_wave ? variant->bn : 1000 - variant->bn)
                                        : gemm_fp8_cost(dev, variant, multicast, M, w) + 1000;
            if (!best.variant || cost < least_cost)
                best.variant = variant, best.multicast = multicast, least_cost = cost;
        }
    return best;
}
/* Quantizes x of a GEMM in place, if the norm has not. x is not needed afterwards. */
static void gemm_fp8_quantize(toka_device *dev, const gemm_args *args) {
    if (args->x_quantized) return;
    launch_dependent(dev, "quantization of x", quantize_rows_kernel,
                     {dim3((unsigned)args->M), 256}, (bf16 *)args->x, args->ldx, args->w->K,
                     args->w->x_scale, dev->x_scale);
}
/* ---- gemm_smallm_fp8: an e4m3 W; the kernel norms and quantizes the few rows of x itself ----
 *
 * y^T = W x^T, with the epilogues EPI_STORE, EPI_RESIDUAL and EPI_SWIGLU
 *
 *   x, y     bf16 [M][ldx], [M][ldy]; M <= 8 and M K <= SMALLM8_X_BYTES
 *   W        e4m3 [N][K], with scales as in struct weight
 *   norm     NULL, or [K]: x is normed first (RMSNorm)
 *
 * With few rows the time goes by launches. This kernel replaces two: rmsnorm_kernel or
 * quantize_rows_kernel, and gemm_wgmma_kernel. It gives the same bits as they.
 *
 * Grid: at most one CTA per SM, persistent. A tile is tile_rows rows of W (16 .. 64, as even for
 * all CTAs as possible) and all of K. Block: the consumer warpgroup and a producer warp.
 *
 * The producer fills the ring with W before grid_wait(), while the kernel before still runs. When
 * that has ended, every CTA norms and quantizes all rows of x for itself: they are a few KB. They
 * stay in shared memory, as wgmma's b without a swizzle: [K / 16][M] pieces of 16 bytes. b has 8
 * rows; those from M on are pieces of the next columns, and their sums are not stored. a has 64
 * rows; those from tile_rows on are what lies behind in the ring, and not stored, too.
 *
 * Shared memory: half of an SM's, so that the ring of the next kernel fills early. */
enum {
    SMALLM8_ROWS = 8,
    SMALLM8_X_BYTES = 32 << 10,
    SMALLM8_RING_BYTES = 80 << 10, SMALLM8_MAX_BUFS = SMALLM8_RING_BYTES / (16 * 128),
    SMALLM8_VECS = 16, /* pieces of 8 numbers of x that a thread holds: K <= 16,384 */
    SMALLM8_NORM_VECS = 4, /* pieces of norm weights that it loads before grid_wait() */
    SMALLM8_THREADS = 160
};
typedef struct smallm8_args {
    const bf16 *x;
    bf16 *y;
    const float *norm, *bias, *w_scale;
    int M, N, K, ldx, ldy;
    int tile_rows, n_bufs; /* n_bufs: buffers of the ring, each [tile_rows][128] of W */
    float inv_E, eps, static_scale;
    enum epilogue epi;
} smallm8_args;

#if HOPPER
/* Returns the sum or the maximum over the 128 consumer threads; the sum in the order of
 * block_sum_128. */
__device__ static inline float smallm8_sum(float v, float *warp_values) {
    for (int s = 16; s; s >>= 1) v += __shfl_xor_sync(~0u, v, s);
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = v;
    bar_sync(1, 128);
    return (warp_values[0] + warp_values[1]) + (warp_values[2] + warp_values[3]);
}
__device__ static inline float smallm8_max(float v, float *warp_values) {
    for (int s = 16; s; s >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, s));
    if (threadIdx.x % 32 == 0) warp_values[threadIdx.x / 32] = v;
    bar_sync(1, 128);
    return fmaxf(fmaxf(warp_values[0], warp_values[1]), fmaxf(warp_values[2], warp_values[3]));
}
/* Norms row m of x, quantizes it to codes and sets scales[m]. norm_cached: this thread's first
 * pieces of norm weights. warp_values: [2][4], for the sum and for the maximum. */
__device__ static inline void smallm8_load_row(const smallm8_args &args, int m,
                                               const float4 (&norm_cached)[SMALLM8_NORM_VECS][2],
                                               char *codes, float *scales, float *warp_values) {
    const int thread = (int)threadIdx.x, n_vecs = args.K / 8,
              n_padded = (args.K + 127) / 128 * 16; /* the last K block is filled with zeros */
    const uint4 *from = (const uint4 *)(args.x + (size_t)m * args.ldx);
    const float4 *norm = (const float4 *)args.norm;
    uint4 x[SMALLM8_VECS];
    float sum = 0, largest = 0;
#pragma unroll
    for (int i = 0; i < SMALLM8_VECS; i++)
        x[i] = thread + 128 * i < n_vecs ? from[thread + 128 * i] : uint4{};
    if (norm) {
#pragma unroll
        for (int i = 0; i < SMALLM8_VECS; i++) sum = norm_add_squares(x[i], sum);
        const float scale = rsqrtf(smallm8_sum(sum, warp_values) * args.inv_E + args.eps);
#pragma unroll
        for (int i = 0; i < SMALLM8_VECS; i++)
            if (i < SMALLM8_NORM_VECS)
                x[i] = norm_scale_8(x[i], scale, norm_cached[i][0], norm_cached[i][1]);
            else if (thread + 128 * i < n_vecs)
                x[i] = norm_scale_8(x[i], scale, norm[2 * (thread + 128 * i)],
                                    norm[2 * (thread + 128 * i) + 1]);
    }
#pragma unroll
    for (int i = 0; i < SMALLM8_VECS; i++) largest = fp8_largest_8(x[i], largest);
    const float scale = fp8_scale(args.static_scale, smallm8_max(largest, warp_values + 4)),
                inverse = 1 / scale;
    if (thread == 0) scales[m] = scale;
#pragma unroll
    for (int i = 0; i < SMALLM8_VECS; i++) {
        const int vec = thread + 128 * i;
        if (vec < n_padded)
            *(uint2 *)(codes + (vec / 2 * args.M + m) * 16 + vec % 2 * 8) =
                fp8_quantize_8(x[i], inverse);
    }
}
__device__ static inline void smallm8_produce(const smallm8_args &args, const CUtensorMap *map_w,
                                              uint32_t ring, uint32_t bars, int n_tiles) {
    const int n_k = (args.K + 127) / 128;
    int buf = 0, parity = 1;
    for (int tile = (int)blockIdx.x; tile < n_tiles; tile += (int)gridDim.x)
        for (int k = 0; k < n_k; k++) {
            const uint32_t full = bars + 8 * buf;
            mbar_wait(full + 8 * SMALLM8_MAX_BUFS, parity);
            mbar_expect_tx(full, args.tile_rows * 128);
            tma_load_2d(ring + buf * args.tile_rows * 128, map_w, full, 128 * k,
                        tile * args.tile_rows);
            if (++buf == args.n_bufs) buf = 0, parity ^= 1;
        }
}
/* The consumer's place in the ring, and what it multiplies. */
struct smallm8_ring {
    uint32_t ring, bars;
    int n_bufs, buf_bytes;
    uint64_t x_desc; /* of the first K block of x */
    int x_step;      /* from 32 columns of x to the next, in units of 16 bytes */
    int buf, parity;
};
/* Issues K block k, and returns its buffer. */
__device__ static inline int smallm8_issue(smallm8_ring &ring, float (&part)[4], int k) {
    const int buf = ring.buf;
    mbar_wait(ring.bars + 8 * buf, ring.parity);
    fp8_issue<8>(part, wgmma_desc(ring.ring + buf * ring.buf_bytes),
                 ring.x_desc + (uint64_t)(4 * ring.x_step * k), ring.x_step);
    if (++ring.buf == ring.n_bufs) ring.buf = 0, ring.parity ^= 1;
    return buf;
}
/* Adds a finished K block. scales: of its blocks of W. */
template <bool BLOCKED>
__device__ static inline void smallm8_promote(const smallm8_ring &ring, float (&acc)[4],
                                              float (&part)[4], int buf, float2 scales) {
    wgmma_fence_operand(part);
    if (threadIdx.x == 0) mbar_arrive(ring.bars + 8 * SMALLM8_MAX_BUFS + 8 * buf);
#pragma unroll
    for (int i = 0; i < 4; i++)
        if constexpr (BLOCKED) acc[i] += part[i] * (i / 2 ? scales.y : scales.x);
        else acc[i] += part[i];
}
/* Adds up a tile. An iteration of the loop has four K blocks, as in gemm_mainloop_fp8. */
template <bool BLOCKED>
__device__ static inline void smallm8_multiply(const smallm8_args &args, smallm8_ring &ring, int n0,
                                               float (&acc)[4]) {
    const int n_k = (args.K + 127) / 128, blocks_n = (args.N + 127) / 128;
    const int block = min((n0 + (int)threadIdx.x / 32 * 16) / 128, blocks_n - 1);
    auto scale_of = [&](int k) {
        return BLOCKED ? __ldg((const float2 *)args.w_scale + (size_t)k * blocks_n + block)
                       : float2{1, 1};
    };
    float part[2][4];
    int k = 0;
    for (; k + 4 <= n_k; k += 4) {
        float2 scales[4];
#pragma unroll
        for (int i = 0; i < 4; i++) scales[i] = scale_of(k + i);
        int buf = smallm8_issue(ring, part[0], k);
#pragma unroll
        for (int i = 1; i < 4; i++) {
            const int next = smallm8_issue(ring, part[i % 2], k + i);
            wgmma_wait<1>();
            smallm8_promote<BLOCKED>(ring, acc, part[(i - 1) % 2], buf, scales[i - 1]);
            buf = next;
        }
        wgmma_wait<0>();
        smallm8_promote<BLOCKED>(ring, acc, part[1], buf, scales[3]);
    }
    for (; k < n_k; k++) {
        const float2 scales = scale_of(k);
        const int buf = smallm8_issue(ring, part[0], k);
        wgmma_wait<0>();
        smallm8_promote<BLOCKED>(ring, acc, part[0], buf, scales);
    }
}
/* Stores the sums of a tile. A thread has rows n and n + 8 of W, and rows 2q and 2q + 1 of x. */
template <bool BLOCKED>
__device__ static inline void smallm8_store(const smallm8_args &args, int n0, const float (&acc)[4],
                                            const float *x_scales) {
    const int lane = (int)threadIdx.x % 32, row = (int)threadIdx.x / 32 * 16 + lane / 4;
    const int n = n0 + row;
    if (row >= args.tile_rows || n >= args.N) return;
    const bool has_upper = n + 8 < args.N;
    float w[2] = {1, 1};
    if (!BLOCKED) w[0] = args.w_scale[n], w[1] = has_upper ? args.w_scale[n + 8] : 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int m = lane % 4 * 2 + i;
        if (m >= args.M) break;
        float low = __fmul_rn(acc[i], x_scales[m] * w[0]),
              high = __fmul_rn(acc[i + 2], x_scales[m] * w[1]);
        if (args.bias) low += args.bias[n], high += has_upper ? args.bias[n + 8] : 0;
        bf16 *y = args.y + (size_t)m * args.ldy;
        if (args.epi == EPI_SWIGLU) {
            y[n0 / 2 + (row - lane / 4) / 2 + lane / 4] = __float2bfloat16(swiglu(low, high));
            continue;
        }
        if (args.epi == EPI_RESIDUAL) {
            low += __bfloat162float(y[n]);
            if (has_upper) high += __bfloat162float(y[n + 8]);
        }
        y[n] = __float2bfloat16(low);
        if (has_upper) y[n + 8] = __float2bfloat16(high);
    }
}
#endif
template <bool BLOCKED>
__global__ static void __launch_bounds__(SMALLM8_THREADS)
    gemm_smallm_fp8_kernel(const __grid_constant__ CUtensorMap map_w, const smallm8_args args) {
#if HOPPER
    extern __shared__ __align__(1024) char smallm8_smem[];
    __shared__ float x_scales[SMALLM8_ROWS], warp_values[SMALLM8_ROWS][2 * 4];
    __shared__ uint64_t barriers[2 * SMALLM8_MAX_BUFS];
    const uint32_t ring = smem_addr(smallm8_smem), bars = smem_addr(barriers);
    const int n_tiles = (args.N + args.tile_rows - 1) / args.tile_rows;
    char *codes = smallm8_smem + SMALLM8_RING_BYTES;
    for (int i = (int)threadIdx.x; i < 2 * SMALLM8_MAX_BUFS; i += SMALLM8_THREADS)
        mbar_init(bars + 8 * i, 1);
    mbar_init_fence();
    __syncthreads();
    grid_launch_dependents();
    if (threadIdx.x >= 128) {
        if (elect_one()) smallm8_produce(args, &map_w, ring, bars, n_tiles);
        return;
    }
    float4 norm[SMALLM8_NORM_VECS][2] = {};
#pragma unroll
    for (int i = 0; i < SMALLM8_NORM_VECS; i++)
        if (args.norm && threadIdx.x + 128 * i < args.K / 8)
            norm[i][0] = ((const float4 *)args.norm)[2 * (threadIdx.x + 128 * i)],
            norm[i][1] = ((const float4 *)args.norm)[2 * (threadIdx.x + 128 * i) + 1];
    grid_wait();
    for (int m = 0; m < args.M; m++)
        smallm8_load_row(args, m, norm, codes, x_scales, warp_values[m]);
    fence_async_smem();
    bar_sync(1, 128);
    smallm8_ring place = {ring, bars, args.n_bufs, args.tile_rows * 128,
                      wgmma_desc_8_rows(smem_addr(codes), 16 * args.M), 2 * args.M, 0, 0};
    for (int tile = (int)blockIdx.x; tile < n_tiles; tile += (int)gridDim.x) {
        float acc[4] = {};
        smallm8_multiply<BLOCKED>(args, place, tile * args.tile_rows, acc);
        smallm8_store<BLOCKED>(args, tile * args.tile_rows, acc, x_scales);
    }
#else
    __trap();
#endif
}

/* Returns whether gemm_smallm_fp8 runs M rows and this W. */
static bool gemm_is_smallm_fp8(const toka_device *dev, int M, const weight *w) {
    return dev->hopper && w->scale && M <= SMALLM8_ROWS && w->K <= SMALLM8_VECS * 1024 &&
           M * ((w->K + 127) / 128 * 128) <= SMALLM8_X_BYTES;
}
/* Returns the rows of a tile: a multiple of 16, so that the busiest CTA has the fewest rows. */
static int smallm8_tile_rows(int N, int n_ctas) {
    int best = 64, fewest = INT_MAX;
    for (int rows = 64; rows >= 16; rows -= 16) {
        const int most = ceil_div(ceil_div(N, rows), n_ctas) * rows;
        if (most < fewest) best = rows, fewest = most;
    }
    return best;
}
static void gemm_smallm_fp8(toka_device *dev, const gemm_args *args) {
    const weight *w = args->w;
    const int tile_rows = smallm8_tile_rows(w->N, dev->n_sms), n_tiles = ceil_div(w->N, tile_rows);
    const smallm8_args kernel_args = {args->x, args->y, args->norm, w->bias, w->scale,
                                      args->M, w->N, w->K, args->ldx, args->ldy, tile_rows,
                                      SMALLM8_RING_BYTES / (tile_rows * 128),
                                      args->norm ? 1.0f / dev->shape->E : 0,
                                      args->norm ? hidden_eps(dev->shape) : 0, w->x_scale,
                                      args->epi};
    assert(args->epi == EPI_STORE || args->epi == EPI_RESIDUAL || args->epi == EPI_SWIGLU);
    const CUtensorMap map_w = gemm_fp8_map(dev, w->data, w->N, w->K, (size_t)fp8_row_bytes(w->K),
                                           tile_rows);
    if (dev->error.code) return;
    /* 128 bytes more: b's last rows without data */
    launch_dependent(dev, "GEMM (few rows, FP8)",
                     w->is_blocked ? gemm_smallm_fp8_kernel<true> : gemm_smallm_fp8_kernel<false>,
                     {dim3((unsigned)min(n_tiles, dev->n_sms)), SMALLM8_THREADS,
                      SMALLM8_RING_BYTES + SMALLM8_X_BYTES + 128},
                     map_w, kernel_args);
}

/* y = epilogue(x W^T) with an e4m3 W, for EPI_STORE, EPI_RESIDUAL and EPI_SWIGLU. */
static void gemm_fp8_run(toka_device *dev, const gemm_args *args) {
    assert(!args->norm_ready && !args->next_norm);
    if (!args->x_quantized && gemm_is_smallm_fp8(dev, args->M, args->w)) {
        gemm_smallm_fp8(dev, args);
        return;
    }
    assert(!args->norm);
    gemm_fp8_quantize(dev, args);
    gemm_wgmma_with(dev, args, gemm_fp8_choose(dev, args->epi, args->M, args->w, false));
}
/* The same with the QKV epilogue. The head size is 64 or 128. */
static void gemm_fp8_qkv(toka_device *dev, const gemm_args *args, const qkv_params *qkv) {
    const int kind = args->w->N == 64 * (qkv->H + 2 * qkv->K) ? GEMM_QKV64 : GEMM_QKV128;
    gemm_fp8_quantize(dev, args);
    gemm_wgmma_qkv_with(dev, args->M, args->x, args->ldx, args->w, qkv,
                        gemm_fp8_choose(dev, kind, args->M, args->w, qkv_has_norms(qkv)));
}
/* Returns whether the QKV epilogue is faster than EPI_STORE and rope_kernel. With QK-norm at
 * D = 128 only tiles of 128 columns have it: too few tiles for small M. */
static bool gemm_fp8_fuses_qkv(int M, const qkv_params *qkv) {
    return !qkv_has_norms(qkv) || qkv->D == 64 || M > 512;
}
/* gemm_wgmma_scatter_with, by the cheapest variant. */
static void gemm_wgmma_scatter(toka_device *dev, const gemm_args *args, bf16 *const *recv_buffers,
                               int n_ranks, int rows_per_rank) {
    const weight *w = args->w;
    const gemm_plan plan = w->scale
                               ? gemm_fp8_choose(dev, GEMM_SCATTER, args->M, w, false)
                               : gemm_choose(dev, GEMM_SCATTER, args->M, w->N, w->K, false);
    if (w->scale) gemm_fp8_quantize(dev, args);
    gemm_wgmma_scatter_with(dev, args, recv_buffers, n_ranks, rows_per_rank, plan);
}

/* ---- Which GEMM ---- */

/* The limits of gemm_family, from times of whole steps (test/results/kernel-choices.md). */
enum {
    SMALLM_ALWAYS = 32,          /* Hopper: up to this M no W uses gemm_wgmma. Above it, up to
                                  * SMALLM_MAX, gemm_smallm is used for some W ... */
    SMALLM_MIN_K = 1024,         /* ... with at least this K ... */
    SMALLM_MAX_ELEMS = 64 << 20, /* ... and fewer elements, if W has more 64-row tiles than SMs */
    /* W with more 64-row tiles than SMs: gemm_gemv from this K on; with more than four waves of
     * CTAs, two an SM, from the second one on */
    GEMV_MIN_K = 4096, GEMV_MIN_K_WAVES = 2048
};
/* LM head: up to this M, gemm_smallm that stores all logits is faster than gemm_wgmma with its
 * sampling epilogue, because gemm_wgmma has tiles of 128 rows. */
enum { SAMP_STORED_MAX = 16 };
enum gemm_family {
    BY_GEMV,
    BY_SMALLM, /* the families up to here have EPI_QKV; gemm_fuses_qkv relies on this order */
    BY_MMA,
    BY_WGMMA,
    BY_FP8 /* an e4m3 W: gemm_fp8_run */
};

/* The GEMM for M rows and this W, for all epilogues except EPI_LOGITS. The rules for Hopper:
 *
 *      gemm_gemv     M <= 8, and one of: at most two CTAs (16 rows of W each) per SM; N and K are
 *                    large; N = E
 *      gemm_smallm   other M <= 32; and M <= 64 if K >= 1024 and W is not large
 *      gemm_wgmma    all others
 *
 * - N = E (o and down): an RMSNorm follows, and gemm_gemv also writes what that norm needs. This
 *   saves a kernel. Steps are faster, even for shapes at which a single gemm_smallm is faster.
 * - large_n_k and large_weights: these limits were chosen by the times of whole steps, not by those
 *   of single GEMMs.
 * - If the 64-row tiles of W need slightly more than one wave, a single gemm_wgmma is faster at
 *   M = 64, but whole steps are not. Probably the next kernel starts later.
 *
 * Other GPUs: gemm_gemv up to M = 16, above it gemm_mma.
 *
 * Tried: a persistent gemm_smallm with two CTAs per SM (single GEMMs faster, whole steps not); a
 * gemm_smallm for M = 128 (slower than gemm_wgmma). All figures: test/results/kernel-choices.md. */
static enum gemm_family gemm_family(const toka_device *dev, int M, const weight *w) {
    const int tiles = ceil_div(w->N, SMALLM_N), gemv_tiles = ceil_div(w->N, GEMV_N);
    const bool large_n_k = tiles > dev->n_sms &&
                           w->K >= (gemv_tiles > 4 * 2 * dev->n_sms ? GEMV_MIN_K_WAVES
                                                                    : GEMV_MIN_K);
    const bool large_weights = tiles > dev->n_sms && (int64_t)w->N * w->K >= SMALLM_MAX_ELEMS;
    if (w->scale) return BY_FP8;
    if (!dev->hopper) return M <= 16 ? BY_GEMV : BY_MMA;
    /* N = E: an RMSNorm follows */
    if (M <= 8 && (gemv_tiles <= 2 * dev->n_sms || large_n_k || w->N == dev->E)) return BY_GEMV;
    return M <= SMALLM_ALWAYS || (M <= SMALLM_MAX && w->K >= SMALLM_MIN_K && !large_weights)
               ? BY_SMALLM
               : BY_WGMMA;
}
/* Returns true if EPI_QKV is available for this GEMM and faster than EPI_STORE and rope_kernel.
 * With QK-norm only gemm_smallm supports it, and only for M <= 8. Above 8 rows it would be slower,
 * because a head of D = 128 has two tiles that exchange their sums of squares
 * (test/results/kernel-choices.md). */
static bool gemm_fuses_qkv(const toka_device *dev, int M, const weight *w, const qkv_params *qkv) {
    const enum gemm_family family = gemm_family(dev, M, w);
    return qkv_has_norms(qkv) ? family == BY_SMALLM && M <= FUSE_NORM_MAX_ROWS
                              : family <= BY_SMALLM;
}
/* Runs the GEMM, with the family that gemm_family chooses. Only for EPI_LOGITS the limit is
 * SAMP_STORED_MAX. */
static void gemm(toka_device *dev, const gemm_args *args) {
    if (args->w->scale) {
        gemm_fp8_run(dev, args);
        return;
    }
    enum gemm_family family = gemm_family(dev, args->M, args->w);
    if (args->epi == EPI_LOGITS)
        family = !dev->hopper ? BY_MMA : args->M <= SAMP_STORED_MAX ? BY_SMALLM : BY_WGMMA;
    if (family == BY_GEMV) gemm_gemv(dev, args);
    else if (family == BY_SMALLM) gemm_smallm(dev, args);
    else if (family == BY_MMA) gemm_mma(dev, args);
    else gemm_wgmma(dev, args);
}

/* ===========================================================================
 * MARK: 7b. Experts [kernel]
 *
 * The feed-forward of a mixture of experts (toka_moe), on Hopper:
 *
 *     router_gemm_kernel    logits = xn W_router^T, float32; one more column for the gate of the
 *                           shared expert, if there is one
 *     route_kernel          logits -> the experts of each token, their weights, and for each expert
 *                           a bit for each token
 *     pair_kernel           bits -> the pairs (token, expert) sorted by expert, then by token; for
 *                           up to 32 tokens route_kernel does that
 *     expert_gemm_kernel    act[pair] = activation of gate and up of the pair's row of xn: the rows
 *                           of an expert are gathered
 *     expert_gemm_kernel    out[pair] = W_down act[pair]
 *     expert_sum_kernel     x[token] += sum over its experts, in rising order, of weight *
 *                           out[pair], then the shared expert
 *
 * The host does not know how many rows an expert gets. The grids depend on T only, and the kernels
 * read the counts on the device. So the launches can be captured into a graph.
 *
 * Every order is fixed: the pairs of an expert are in the order of the tokens, all sums over K have
 * the same order in tiles of any width, and a token's experts are added in rising order. So a
 * token's result does not depend on the other tokens of the step, and equal steps give equal bits.
 * =========================================================================== */

enum {
    EXPERTS_MAX = 512,  /* most experts of a layer */
    EXPERTS_MAX_K = 16, /* most experts of a token */
    ROUTE_TOKENS = 32,  /* tokens of a CTA of route_kernel: one bit of a word each */
    ROUTE_WARPS = 16
};

/* The lists of a step's pairs, in device memory. X experts, k of them a token. A pair's index is
 * its place in the sorted list. */
typedef struct expert_lists {
    float *weights;   /* [T][k] of the token's experts, in rising order of the experts */
    short *chosen;    /* [T][k] these experts */
    int *pairs;       /* [T][k] and the indices of their pairs */
    uint32_t *tokens; /* [X][n_words] a bit for each token: it has chosen the expert */
    int *counts;      /* [X] pairs of each expert; zero between two layers */
    int *first;       /* [X+1] index of an expert's first pair */
    int *first_tile;  /* [X+1] number of tiles of all experts before */
    int *rows;        /* [T*k] the token of each pair */
    int n_words;      /* ceil(T / 32) */
} expert_lists;

/* ---- router_gemm_kernel: the logits ----
 *
 * logits[t][n] = sum over k of x[t][k] W[n][k], on mma.sync
 *
 *   x        bf16 [T][ldx], K columns, a multiple of 8
 *   W        bf16 [N][K]
 *   logits   float32 [T][N]
 *
 * Grid: tiles of 16 MT rows of W x tiles of 8 NT rows of x. Block 256. Warp w adds up every eighth
 * 32 columns, from 32 w on; then the sums of the warps are added in their order. So the order of
 * the sum over K does not depend on the tile, as it does in the GEMMs of chapter 7.
 *
 * A quad of lanes loads 64 bytes of a row, 16 a lane. These 8 columns are columns 2q, 2q+1, 2q+8
 * and 2q+9 of two MMAs: a sum may take its columns in any order, if x and W take the same. A warp
 * loads UNROLL blocks of 32 columns before it multiplies: the time goes by latency. */
enum { ROUTER_WARPS = 8 };
struct router_gemm_args {
    const bf16 *x, *w;
    float *logits;
    int T, N, K, ldx;
};
/* Returns 8 columns of a row of n_rows, from col on; 0 beyond the matrix. */
__device__ static inline uint4 router_load(const bf16 *from, int row, int n_rows, int ld, int col,
                                           int K) {
    return row < n_rows && col < K ? *(const uint4 *)(from + (size_t)row * ld + col) : uint4{};
}
template <int MT, int NT>
__device__ static inline void router_multiply(float (&acc)[MT][NT][4], const uint4 (&w)[MT][2],
                                              const uint4 (&x)[NT]) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
            const uint32_t a[2][4] = {{w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y},
                                      {w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w}},
                           b[2][2] = {{x[j].x, x[j].y}, {x[j].z, x[j].w}};
            mma_16816(acc[i][j], a[0], b[0]);
            mma_16816(acc[i][j], a[1], b[1]);
        }
}
template <int MT, int NT>
__global__ static void __launch_bounds__(32 * ROUTER_WARPS)
    router_gemm_kernel(const router_gemm_args args) {
    constexpr int UNROLL = MT * NT == 1 ? 8 : MT == 1 ? 4 : 2;
    __shared__ float4 parts[ROUTER_WARPS][MT * NT][32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32, quad = lane % 4;
    const int n0 = (int)blockIdx.x * 16 * MT, t0 = (int)blockIdx.y * 8 * NT;
    float acc[MT][NT][4] = {};
    grid_launch_dependents();
    for (int row = warp; blockIdx.y == 0 && row < 16 * MT && n0 + row < args.N; row += ROUTER_WARPS)
        for (int col = 64 * lane; col < args.K; col += 64 * 32)
            l2_prefetch(args.w + (size_t)(n0 + row) * args.K + col);
    grid_wait();
    for (int col0 = 32 * warp; col0 < args.K; col0 += 32 * ROUTER_WARPS * UNROLL) {
        uint4 w[UNROLL][MT][2], x[UNROLL][NT];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const int col = col0 + 32 * ROUTER_WARPS * k + 8 * quad;
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                w[k][i / 2][i % 2] = router_load(args.w, n0 + lane / 4 + 8 * i, args.N, args.K, col,
                                                 args.K);
#pragma unroll
            for (int j = 0; j < NT; j++)
                x[k][j] = router_load(args.x, t0 + 8 * j + lane / 4, args.T, args.ldx, col, args.K);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (col0 + 32 * ROUTER_WARPS * k < args.K) router_multiply(acc, w[k], x[k]);
    }
#pragma unroll
    for (int i = 0; i < MT * NT; i++) parts[warp][i][lane] = *(const float4 *)acc[i / NT][i % NT];
    __syncthreads();
    for (int i = warp; i < MT * NT; i += ROUTER_WARPS) {
        float4 sum = parts[0][i][lane];
#pragma unroll
        for (int k = 1; k < ROUTER_WARPS; k++) {
            const float4 part = parts[k][i][lane];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
        const int n = n0 + 16 * (i / NT) + lane / 4, t = t0 + 8 * (i % NT) + 2 * quad;
#pragma unroll
        for (int k = 0; k < 4; k++)
            if (t + k % 2 < args.T && n + k / 2 * 8 < args.N)
                args.logits[(size_t)(t + k % 2) * args.N + n + k / 2 * 8] = sums[k];
    }
}
template <int MT, int NT>
static void router_gemm_with(toka_device *dev, const router_gemm_args &args) {
    const dim3 grid((unsigned)ceil_div(args.N, 16 * MT), (unsigned)ceil_div(args.T, 8 * NT));
    launch_dependent(dev, "router's GEMM", router_gemm_kernel<MT, NT>, {grid, 32 * ROUTER_WARPS},
                     args);
}
static void router_gemm(toka_device *dev, const router_gemm_args &args) {
    assert(args.K % 8 == 0 && args.ldx % 8 == 0);
    if (args.T <= 8) router_gemm_with<1, 1>(dev, args);
    else if (args.T <= 256) router_gemm_with<1, 4>(dev, args);
    else router_gemm_with<2, 4>(dev, args);
}

/* ---- route_kernel: which experts a token uses ----
 *
 * In    logits [T][ld] float32 (columns 0 .. X-1), biases [X] or NULL
 * Out   weights, chosen, tokens and counts of expert_lists; of up to 32 tokens weights, chosen, and
 *       what pair_kernel writes, which then does not run
 * Grid ceil(T / 32), block 512: a warp takes two tokens. Lane l holds the scores of the experts l,
 * l + 32 ... Work: k passes over the scores; bytes 4TX. */

/* Returns the largest score of the warp and its expert; of equal scores the lowest expert. */
__device__ static inline void route_best(float &score, int &expert) {
#pragma unroll
    for (int step = 16; step; step >>= 1) {
        const float other = __shfl_xor_sync(~0u, score, step);
        const int other_expert = __shfl_xor_sync(~0u, expert, step);
        if (other > score || (other == score && other_expert < expert))
            score = other, expert = other_expert;
    }
}
/* Marks the k best of the n scores that the warp holds: bit i of a lane is its score i. */
template <int PER_LANE>
__device__ static inline uint32_t route_mark(const float (&scores)[PER_LANE], int n, int k,
                                             int lane) {
    uint32_t marked = 0;
    for (; k > 0; k--) {
        float best = -INFINITY;
        int expert = INT_MAX;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (lane + 32 * i < n && !(marked >> i & 1) &&
                (expert == INT_MAX || scores[i] > best))
                best = scores[i], expert = lane + 32 * i;
        route_best(best, expert);
        if (expert % 32 == lane) marked |= 1u << expert / 32;
    }
    return marked;
}
/* Replaces the marked scores by their softmax. */
template <int PER_LANE>
__device__ static inline void route_softmax(float (&scores)[PER_LANE], uint32_t marked) {
    float largest = -INFINITY, sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (marked >> i & 1) largest = fmaxf(largest, scores[i]);
    for (int step = 16; step; step >>= 1)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (marked >> i & 1) sum += scores[i] = expf(scores[i] - largest);
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) scores[i] /= sum;
}
/* Sets the scores of the experts outside the best groups to -infinity. Lane g finds the score of
 * group g in `all`, the warp's scores in shared memory. */
template <int PER_LANE>
__device__ static inline void route_drop_groups(float (&scores)[PER_LANE], float *all,
                                                const expert_router &router, int lane) {
    const int size = router.n_experts / router.n_groups;
    float first = -INFINITY, second = -INFINITY, group[1];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (lane + 32 * i < router.n_experts) all[lane + 32 * i] = scores[i];
    __syncwarp();
    for (int i = lane * size; lane < router.n_groups && i < (lane + 1) * size; i++)
        second = fmaxf(second, fminf(first, all[i])), first = fmaxf(first, all[i]);
    group[0] = router.groups_by_top2 && size > 1 ? first + second : first;
    const uint32_t kept = __ballot_sync(~0u, route_mark(group, router.n_groups, router.top_groups,
                                                        lane));
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
        if (lane + 32 * i < router.n_experts && !(kept >> (lane + 32 * i) / size & 1))
            scores[i] = -INFINITY;
    __syncwarp();
}

/* Writes the marked experts of a token in rising order, and their weights. */
template <int PER_LANE>
__device__ static inline void route_store(const float (&scores)[PER_LANE], uint32_t marked,
                                          float factor, int token, int lane, int k,
                                          const expert_lists &lists, uint32_t *bits) {
    int n = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const uint32_t lanes = __ballot_sync(~0u, marked >> i & 1);
        if (marked >> i & 1) {
            const size_t at = (size_t)token * k + n + __popc(lanes & ((1u << lane) - 1));
            lists.chosen[at] = (short)(lane + 32 * i);
            lists.weights[at] = scores[i] * factor;
            atomicOr(&bits[lane + 32 * i], 1u << token % ROUTE_TOKENS);
        }
        n += __popc(lanes);
    }
}
template <int PER_LANE>
__device__ static void route_token(const float *logits, const expert_router &router, int token,
                                   const expert_lists &lists, float *all, uint32_t *bits) {
    const int lane = (int)threadIdx.x % 32, X = router.n_experts;
    uint32_t valid = 0;
    float scores[PER_LANE], choice[PER_LANE], sum = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        const int expert = lane + 32 * i;
        scores[i] = -INFINITY;
        if (expert >= X) continue;
        valid |= 1u << i;
        scores[i] = logits[expert] + (router.bias ? router.bias[expert] : 0);
    }
    if (router.kind == TOKA_ROUTER_SOFTMAX) route_softmax(scores, valid);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        if (router.kind == TOKA_ROUTER_SIGMOID) scores[i] = 1 / (1 + expf(-scores[i]));
        choice[i] = scores[i];
        if (router.choice_bias && valid >> i & 1) choice[i] += router.choice_bias[lane + 32 * i];
        if (isnan(choice[i])) choice[i] = -INFINITY; /* so that k experts are chosen in any case */
    }
    if (router.n_groups > 1) route_drop_groups(choice, all, router, lane);
    const uint32_t marked = route_mark(choice, X, router.top_k, lane);
    if (router.kind == TOKA_ROUTER_TOPK) route_softmax(scores, marked);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) sum += marked >> i & 1 ? scores[i] : 0;
    for (int step = 16; step; step >>= 1) sum += __shfl_xor_sync(~0u, sum, step);
    /* 1e-20: if all chosen scores are 0, so are the weights */
    const float factor = router.scale / (router.renormalize ? sum + 1e-20f : 1);
    route_store(scores, marked, factor, token, lane, router.top_k, lists, bits);
}
/* Returns the sum of `value` over the threads before this one in the block. *total: over all
 * threads. */
template <int THREADS> __device__ static inline int block_scan(int value, int *total) {
    __shared__ int warp_sums[THREADS / 32];
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int sum = value, before = 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
    }
    __syncthreads();
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    *total = 0;
#pragma unroll
    for (int i = 0; i < THREADS / 32; i++) {
        before += i < warp ? warp_sums[i] : 0;
        *total += warp_sums[i];
    }
    return before + sum - value;
}
/* Writes the pair of a token with this expert. */
__device__ static inline void pair_store(const expert_lists &lists, int token, int expert, int k,
                                         int pair) {
    lists.rows[pair] = token;
    for (int i = 0; i < k; i++)
        if (lists.chosen[(size_t)token * k + i] == expert)
            lists.pairs[(size_t)token * k + i] = pair;
}
/* Sorts the pairs of at most 32 tokens, as pair_kernel does. bits: of the tokens of each expert. */
__device__ static inline void route_sort(const expert_lists &lists, const uint32_t *bits, int X,
                                         int k, int tile_rows) {
    const int expert = (int)threadIdx.x;
    uint32_t mine = expert < X ? bits[expert] : 0;
    const int count = __popc(mine), n_tiles = (count + tile_rows - 1) / tile_rows;
    int n_pairs, all_tiles;
    int pair = block_scan<32 * ROUTE_WARPS>(count, &n_pairs);
    const int first_tile = block_scan<32 * ROUTE_WARPS>(n_tiles, &all_tiles);
    if (expert < X) lists.first[expert] = pair, lists.first_tile[expert] = first_tile;
    if (expert == 0) lists.first[X] = n_pairs, lists.first_tile[X] = all_tiles;
    for (; mine; mine &= mine - 1, pair++) pair_store(lists, __ffs((int)mine) - 1, expert, k, pair);
}
template <int PER_LANE>
__global__ static void __launch_bounds__(32 * ROUTE_WARPS, 1)
    route_kernel(const float *logits, int ld, int T, expert_router router, expert_lists lists,
                 int tile_rows) {
    extern __shared__ float smem_scores[]; /* [ROUTE_WARPS][X], only with groups */
    __shared__ uint32_t bits[EXPERTS_MAX];
    const int X = router.n_experts, warp = (int)threadIdx.x / 32,
              token0 = (int)blockIdx.x * ROUTE_TOKENS;
    for (int i = (int)threadIdx.x; i < X; i += (int)blockDim.x) bits[i] = 0;
    grid_launch_dependents();
    grid_wait();
    __syncthreads();
    for (int token = token0 + warp; token < min(T, token0 + ROUTE_TOKENS); token += ROUTE_WARPS)
        route_token<PER_LANE>(logits + (size_t)token * ld, router, token, lists,
                              smem_scores + warp * X, bits);
    __syncthreads();
    if (gridDim.x == 1) {
        route_sort(lists, bits, X, router.top_k, tile_rows);
        return;
    }
    for (int i = (int)threadIdx.x; i < X; i += (int)blockDim.x) {
        lists.tokens[(size_t)i * lists.n_words + blockIdx.x] = bits[i];
        if (bits[i]) atomicAdd(&lists.counts[i], __popc(bits[i]));
    }
}

/* ---- pair_kernel: sorts the pairs by expert ----
 *
 * In    tokens, counts, chosen. Out: first, first_tile, rows, pairs. tile_rows: rows of x in a tile
 * Grid X, block 256: CTA e writes the pairs of expert e. Each thread takes a word of 32 tokens. */

__global__ static void __launch_bounds__(256)
    pair_kernel(expert_lists lists, int X, int k, int tile_rows) {
    const int expert = (int)blockIdx.x, tid = (int)threadIdx.x;
    int n_before = 0, tiles_before = 0, first, first_tile, total;
    grid_launch_dependents();
    grid_wait();
    for (int i = tid; i < expert; i += 256) {
        const int count = lists.counts[i];
        n_before += count, tiles_before += (count + tile_rows - 1) / tile_rows;
    }
    block_scan<256>(n_before, &first);
    block_scan<256>(tiles_before, &first_tile);
    if (tid == 0) {
        lists.first[expert] = first, lists.first_tile[expert] = first_tile;
        if (expert == X - 1) {
            const int count = lists.counts[expert];
            lists.first[X] = first + count;
            lists.first_tile[X] = first_tile + (count + tile_rows - 1) / tile_rows;
        }
    }
    const uint32_t *words = lists.tokens + (size_t)expert * lists.n_words;
    for (int word0 = 0; word0 < lists.n_words; word0 += 256, first += total) {
        uint32_t bits = word0 + tid < lists.n_words ? words[word0 + tid] : 0;
        int pair = first + block_scan<256>(__popc(bits), &total);
        for (; bits; bits &= bits - 1, pair++)
            pair_store(lists, 32 * (word0 + tid) + __ffs((int)bits) - 1, expert, k, pair);
    }
}

/* ---- expert_gemm_kernel: the products of all experts in one launch ----
 *
 * In      x bf16 [.][ldx], of which an expert's rows are gathered (rows of expert_lists; NULL: row
 *         `pair` itself); W bf16 [X*N][K]: the experts' matrices one below the other; or e4m3, or
 *         MXFP4 in blocks (MXFP4_BLOCK_BYTES); a bias [X][N] or none
 * Out     y bf16 [pair][ldy]: W x + bias of the pair's expert; with SWIGLU the activation of gate
 *         and up, which are rows of W in turns of 8
 * Sizes   K a multiple of 8, N of 64 (of 128 with SWIGLU)
 * Grid    one CTA per SM, persistent (MXFP4 with narrow tiles: two). A tile is 128 rows of W, with
 *         MXFP4 256, by at most BN pairs of one expert; wide tiles with fewer pairs are only as
 *         wide as they need (expert_width). Block 384.
 *
 * y^T = W x^T, so the rows of W are the A operand and the pairs the B operand: few pairs waste
 * nothing. A tile's pairs are anywhere in x, and TMA loads only neighbouring rows. So the producer
 * threads copy them by cp.async, 16 bytes each, and thread 0 loads W by TMA. cp.async
 * writes through the generic proxy and wgmma reads through the async proxy, so each consumer thread
 * runs fence_async_smem after it has waited for a buffer. On an H100 this is as fast as dense boxes
 * (test/results/trials-gathered-rows.md).
 *
 * MXFP4 stays 4 bits in shared memory. Each consumer thread unpacks what it needs of an A operand
 * in registers; a bf16 holds such a number exactly. For few pairs these instructions are what
 * limits: 2.5 TB/s of W on an H200 instead of 3.7 without them.
 *
 * Each buffer of the ring: [128 rows of W][64] or two blocks of MXFP4, then [BN pairs][64]; bf16
 * and e4m3 with the 128-byte swizzle. full[buf] completes after the copies of the producer threads
 * and of TMA; empty[buf] after both consumers.
 * The epilogue turns D^T into rows of pairs by stmatrix.trans, 64 pairs at a time. */

struct expert_firsts { /* copies of the lists in shared memory */
    int pair[EXPERTS_MAX + 4];
    uint16_t tile[EXPERTS_MAX + 8];
};
/* The format of W: this, gemm_bf16, or gemm_fp8 for e4m3 operands. */
struct gemm_mxfp4 {
    static constexpr bool is_bf16 = false, is_fp8 = false, blocked = false, is_mxfp4 = true;
    static constexpr int k_cols = MXFP4_COLS;
};
template <class FMT, int BN, bool SWIGLU> struct expert_smem {
    /* m_tiles: blocks of 64 rows of W of a consumer. With two of MXFP4 the rows of x are read half
     * as often: the bandwidth of L2 is what limits. */
    static constexpr int m_tiles = FMT::is_mxfp4 ? 2 : 1, tile_n = 128 * m_tiles;
    static constexpr int w_bytes = FMT::is_mxfp4 ? 2 * MXFP4_BLOCK_BYTES : 128 * 128,
                         x_at = (w_bytes + 1023) / 1024 * 1024;
    static constexpr int round = BN < 64 ? BN : 64; /* pairs that are staged at a time */
    static constexpr int out_cols = SWIGLU ? 32 : 64; /* columns of y of a consumer */
    static constexpr int buf_bytes = x_at + BN * 128, staging_bytes = round * out_cols * 2;
    static constexpr int list_bytes = sizeof(expert_firsts);
    static constexpr int fixed_bytes = 1024 + 4 * staging_bytes + 256 + list_bytes;
    static constexpr int n_producers = BN <= 16 ? 32 : 128;
    static constexpr int ctas = FMT::is_mxfp4 && BN <= 16 ? 2 : 1; /* per SM */
    static constexpr int smem = HOPPER_CTA_SMEM / ctas - 1024 * (ctas - 1),
                         fit = (smem - fixed_bytes) / buf_bytes,
                         most = FMT::is_mxfp4 ? 16 : 12, n_bufs = fit < most ? fit : most;
    static constexpr int staging_at = n_bufs * buf_bytes,
                         bars_at = staging_at + 4 * staging_bytes, list_at = bars_at + 256,
                         bytes = fixed_bytes + n_bufs * buf_bytes;
};
struct expert_gemm_args {
    const bf16 *x;
    bf16 *y;
    const int *rows;               /* [pairs] row of x of each pair, or NULL: row `pair` */
    const int *first, *first_tile; /* [X+1] of expert_lists */
    int X, N, K, ldx, ldy;
    /* FP8: a scale for each row of x; those of struct weight, one expert behind the other */
    const float *x_scale, *w_scale;
    const void *w;     /* MXFP4: the blocks of all experts */
    const float *bias; /* [X][N] or NULL */
    float limit;       /* of TOKA_SWIGLU_CLAMPED; 0: the activation is TOKA_SILU */
    int n_pairs;       /* of all experts */
};
/* A tile: pairs `pair0 ..` of the expert, of which n_pairs exist; rows n0 .. of its W. */
struct expert_tile {
    int expert, pair0, n_pairs, n0;
};
/* Returns how many pairs of a tile are loaded and multiplied: quarters of BN if BN is large, but
 * 96 only with MXFP4. */
template <class FMT, int BN> __device__ static inline int expert_width(int n_pairs) {
    constexpr int STEP = BN >= 128 ? BN / 4 : BN;
    return BN == 128 && !FMT::is_mxfp4 && n_pairs > 64 ? 128 : (n_pairs + STEP - 1) / STEP * STEP;
}
#if HOPPER
template <int BN, int TILE_N>
__device__ static inline expert_tile expert_tile_at(const expert_gemm_args &args,
                                                    const expert_firsts *first, int tiles_n,
                                                    int unit) {
    const int tile = unit / tiles_n;
    int low = 0, high = args.X; /* first->tile[low] <= tile < first->tile[high] */
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (first->tile[middle] <= tile) low = middle;
        else high = middle;
    }
    const int pair0 = first->pair[low] + (tile - first->tile[low]) * BN;
    return {low, pair0, min(BN, first->pair[low + 1] - pair0), (unit - tile * tiles_n) * TILE_N};
}

/* Loads the blocks of MXFP4 of a tile at K block k of n_k: one for each consumer that has rows. */
__device__ static inline void mxfp4_load_blocks(const expert_gemm_args &args,
                                                const expert_tile &tile, int k, int n_k,
                                                uint32_t at, uint32_t full) {
    const int per_expert = (args.N + MXFP4_ROWS - 1) / MXFP4_ROWS, first = tile.n0 / MXFP4_ROWS,
              n = min(2, per_expert - first);
    mbar_expect_tx(full, n * MXFP4_BLOCK_BYTES);
    for (int i = 0; i < n; i++) {
        const size_t block = ((size_t)tile.expert * per_expert + first + i) * n_k + k;
        bulk_load(at + i * MXFP4_BLOCK_BYTES, (const char *)args.w + block * MXFP4_BLOCK_BYTES,
                  MXFP4_BLOCK_BYTES, full);
    }
}

template <class FMT, int BN, bool SWIGLU>
__device__ static inline void expert_produce(const expert_gemm_args &args, const CUtensorMap *map_w,
                                             const expert_firsts *first, uint32_t ring,
                                             uint32_t bars) {
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    constexpr int ROWS = smem::n_producers / 8, PER_THREAD = (BN + ROWS - 1) / ROWS;
    const int tid = (int)threadIdx.x, chunk = tid % 8,
              tiles_n = (args.N + smem::tile_n - 1) / smem::tile_n,
              n_k = (args.K + FMT::k_cols - 1) / FMT::k_cols;
    if (tid >= smem::n_producers) return;
    const uint32_t to = smem::x_at + tid / 8 * 128 + ((chunk ^ (tid / 8 & 7)) << 4);
    /* the swizzle of rows 4 below, modulo 8 */
    const uint32_t to_odd = smem::x_at + tid / 8 * 128 + ((chunk ^ ((tid / 8 + 4) & 7)) << 4);
    int buf = 0, parity = 1;
    for (int unit = (int)blockIdx.x; unit < first->tile[args.X] * tiles_n;
         unit += (int)gridDim.x) {
        const expert_tile tile = expert_tile_at<BN, smem::tile_n>(args, first, tiles_n, unit);
        const int width = expert_width<FMT, BN>(tile.n_pairs);
        uint32_t from[PER_THREAD]; /* in units of 8 elements, from the column `chunk` on */
#pragma unroll
        for (int i = 0; i < PER_THREAD; i++) {
            /* rows that do not exist are copies of the last one; their sums are not stored */
            const int pair = tile.pair0 + min(tid / 8 + ROWS * i, tile.n_pairs - 1);
            from[i] = (uint32_t)(args.rows ? args.rows[pair] : pair) * (uint32_t)(args.ldx / 8) +
                      (uint32_t)chunk;
        }
        for (int k = 0; k < n_k; k++) {
            const uint32_t at = ring + buf * smem::buf_bytes, full = bars + 8 * buf;
            /* bytes of the chunk before the end of K; the rest becomes zero */
            const int left = FMT::is_fp8 ? args.K - 128 * k - 16 * chunk
                                         : 2 * (args.K - 64 * k - 8 * chunk),
                      n_bytes = max(0, min(16, left));
            mbar_wait(bars + 128 + 8 * buf, parity);
            if (tid == 0) {
                if constexpr (FMT::is_mxfp4) mxfp4_load_blocks(args, tile, k, n_k, at, full);
                else {
                    mbar_expect_tx(full, smem::w_bytes);
                    tma_load_2d(at, map_w, full, FMT::k_cols * k, tile.expert * args.N + tile.n0);
                }
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
                if (tid / 8 + ROWS * i < width)
                    cp_async_16(at + (ROWS == 4 && i % 2 ? to_odd : to) + i * ROWS * 128,
                                (const uint4 *)args.x + (n_bytes ? from[i] + 8 * k : 0), n_bytes);
            cp_async_arrive(full);
            if (++buf == smem::n_bufs) buf = 0, parity ^= 1;
        }
    }
}

/* TOKA_SWIGLU_CLAMPED */
__device__ static inline float swiglu_clamped(float gate, float up, float limit) {
    gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit);
    return __fdividef(gate * (up + 1), 1 + ex2(-1.702f * 1.4426950408889634f * gate));
}
/* Replaces each gate by the activation of gate and up. */
template <int BN>
__device__ static inline void expert_activate(float (&acc)[BN / 2], float limit) {
#pragma unroll
    for (int i = 0; i < BN / 2; i++)
        if (limit == 0 && i / 2 % 2 == 0) acc[i] = swiglu(acc[i], acc[i + 2]);
#pragma unroll
    for (int i = 0; i < BN / 2; i++)
        if (limit != 0 && i / 2 % 2 == 0) acc[i] = swiglu_clamped(acc[i], acc[i + 2], limit);
}
/* Adds the biases to the sums of 64 rows of W, from n0 on. */
template <int BN>
__device__ static inline void expert_add_bias(float (&acc)[BN / 2], const expert_gemm_args &args,
                                              const expert_tile &tile, int n0) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x % 128 / 32,
              n = n0 + 16 * warp + lane / 4;
    const float *bias = args.bias + (size_t)tile.expert * args.N,
                lower = __ldg(bias + min(n, args.N - 1)),
                upper = __ldg(bias + min(n + 8, args.N - 1));
#pragma unroll
    for (int i = 0; i < BN / 2; i++) acc[i] += i / 2 % 2 ? upper : lower;
}
/* Stages `round` pairs of D^T from `acc` and stores them. n0: the first of their 64 rows of W. */
template <class FMT, int BN, bool SWIGLU>
__device__ static inline void expert_store(const float (&acc)[BN / 2], const expert_gemm_args &args,
                                           const expert_tile &tile, int n0, int consumer,
                                           uint32_t ring) {
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    const uint32_t staging = ring + smem::staging_at + consumer * 2 * smem::staging_bytes;
    constexpr int ROW = smem::out_cols * 2, CHUNKS = ROW / 16, ROWS_A_PASS = 128 / CHUNKS;
    const int tid = (int)threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    const int n_out = SWIGLU ? args.N / 2 : args.N,
              col0 = SWIGLU ? n0 / 2 : n0;
    auto place = [](int row, int chunk) {
        return row * ROW + ((chunk ^ (SWIGLU ? row / 2 & 3 : row & 7)) << 4);
    };
#pragma unroll
    for (int round = 0; round < BN / smem::round; round++) {
        const uint32_t at = staging + round % 2 * smem::staging_bytes;
#pragma unroll
        for (int j = 0; j < smem::round / 8; j++) {
            const float *v = acc + round * (smem::round / 2) + 4 * j;
            const int row = 8 * j + (lane & 7);
            if constexpr (SWIGLU)
                stmatrix_trans(at + place(row, warp), pack_bf16(v[0], v[1]));
            else {
                stmatrix_trans(at + place(row, 2 * warp), pack_bf16(v[0], v[1]));
                stmatrix_trans(at + place(row, 2 * warp + 1), pack_bf16(v[2], v[3]));
            }
        }
        bar_sync(1 + consumer, 128);
        for (int row = tid / CHUNKS; row < smem::round; row += ROWS_A_PASS) {
            const int chunk = tid % CHUNKS, pair = round * smem::round + row,
                      col = col0 + 8 * chunk;
            const uint4 values = smem_load_16(at + place(row, chunk));
            if (pair < tile.n_pairs && col < n_out)
                *(uint4 *)(args.y + (size_t)(tile.pair0 + pair) * args.ldy + col) = values;
        }
    }
    /* the next tile begins with the buffer that an odd number of rounds ends with */
    if (BN / smem::round % 2) bar_sync(1 + consumer, 128);
}

/* The scales of a tile that a thread needs: of rows of W, and of the first pairs. They are loaded
 * before the main loop. */
template <class FMT, int BN> struct expert_scales {
    static constexpr int N_FIRST = BN < 32 ? BN / 4 : 8;
    float w[2], first[N_FIRST];
};
/* The scale of pair i of a thread. */
__device__ static inline float expert_pair_scale(const expert_gemm_args &args,
                                                 const expert_tile &tile, int i) {
    const int pair = tile.pair0 + min(8 * (i / 2) + 2 * ((int)threadIdx.x & 3) + i % 2,
                                      tile.n_pairs - 1);
    return args.x_scale[args.rows ? args.rows[pair] : pair];
}
template <class FMT, int BN>
__device__ static inline expert_scales<FMT, BN> expert_load_scales(const expert_gemm_args &args,
                                                                   const expert_tile &tile,
                                                                   int consumer) {
    const int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x % 128 / 32,
              n = tile.n0 + 64 * consumer + 16 * warp + lane / 4;
    expert_scales<FMT, BN> to = {{1, 1}};
    if constexpr (!FMT::blocked) {
        const float *scales = args.w_scale + (size_t)tile.expert * args.N;
        to.w[0] = scales[min(n, args.N - 1)], to.w[1] = scales[min(n + 8, args.N - 1)];
    }
#pragma unroll
    for (int i = 0; i < to.N_FIRST; i++) to.first[i] = expert_pair_scale(args, tile, i);
    return to;
}
/* FP8: multiplies the sums by the scales of the rows of x, and of W if it has them. */
template <class FMT, int BN>
__device__ static inline void expert_scale(float (&acc)[BN / 2], const expert_gemm_args &args,
                                           const expert_tile &tile,
                                           const expert_scales<FMT, BN> &scales) {
#pragma unroll
    for (int i = 0; i < BN / 4; i++) {
        const float x_scale = i < scales.N_FIRST ? scales.first[min(i, scales.N_FIRST - 1)]
                                                 : expert_pair_scale(args, tile, i);
        const int at = i / 2 * 4 + i % 2;
        acc[at] *= scales.w[0] * x_scale, acc[at + 2] *= scales.w[1] * x_scale;
    }
}

/* The place of a consumer in the ring. */
struct expert_ring {
    uint32_t ring;
    int buf, parity;
};
/* Waits for the next K block and moves on. Returns its buffer. */
template <class SMEM> __device__ static inline int expert_next(expert_ring &at) {
    const int buf = at.buf;
    mbar_wait(at.ring + SMEM::bars_at + 8 * buf, at.parity);
    fence_async_smem();
    if (++at.buf == SMEM::n_bufs) at.buf = 0, at.parity ^= 1;
    return buf;
}
template <class SMEM>
__device__ static inline void expert_release(const expert_ring &at, int buf) {
    if (threadIdx.x % 128 == 0) mbar_arrive(at.ring + SMEM::bars_at + 128 + 8 * buf);
}
/* Adds up the first WIDTH pairs of a tile. */
template <class FMT, int BN, int WIDTH, bool SWIGLU>
__device__ static inline void expert_multiply_bf16(float (&sums)[WIDTH / 2], int n_k, int consumer,
                                                   expert_ring &at) {
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    int last = 0;
    for (int k = 0; k < n_k; k++) {
        const int buf = expert_next<smem>(at);
        const uint32_t buf_at = at.ring + buf * smem::buf_bytes;
        const uint64_t a_desc = wgmma_desc(buf_at + consumer * 64 * 128),
                       b_desc = wgmma_desc(buf_at + smem::x_at);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; i++) wgmma_ss<WIDTH>(sums, a_desc + 2 * i, b_desc + 2 * i, 1);
        wgmma_commit();
        if (k) {
            wgmma_wait<1>();
            expert_release<smem>(at, last);
        }
        last = buf;
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums);
    expert_release<smem>(at, last);
}
/* A thread's share of 64 rows of a block of MXFP4: word i has 32 columns, half i % 2 of the block,
 * of the lower (i < 2) or upper of its two rows. Byte i of scales is the scale of word i. */
struct mxfp4_words {
    uint32_t word[4], scales;
};
/* rows 0: the first 64 rows of the block; 1: the others. */
__device__ static inline mxfp4_words mxfp4_load(uint32_t block_at, int rows) {
    const int thread = 128 * rows + (int)threadIdx.x % 128;
    const uint4 v = smem_load_16(block_at + 16 * thread);
    return {{v.x, v.y, v.z, v.w},
            __float_as_uint(smem_load_float(block_at + MXFP4_SCALES_AT + thread / 4 * 4))};
}
/* Multiplies two bf16. volatile: ptxas then keeps it out of the wgmmas that run. */
__device__ static inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm volatile("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
/* Unpacks columns 16 step .. as the A operand of a wgmma. The bits of a code stand for its value
 * times 2^-126 if they are the sign, the lowest bits of the exponent and the highest bit of the
 * mantissa of a bf16. So the codes of MXFP4_BLOCK_BYTES are moved there, and multiplied by 2^126
 * times the scale. */
__device__ static inline void mxfp4_unpack(const mxfp4_words &from, int step, uint32_t (&a)[4]) {
    constexpr uint32_t SIZES = 0x01C001C0, SIGNS = 0x80008000;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int i = step / 2 + 2 * row;
        const uint32_t word = from.word[i],
                       scale = (from.scales >> 8 * i & 0xFF) * 0x00800080 + 0x3F003F00;
        const bool even = step % 2 == 0; /* pairs 0 and 1; else 2 and 3 */
        a[row] = mul_bf16x2(even ? word & (SIZES | SIGNS)
                                 : (word << 6 & SIZES) | (word << 2 & SIGNS), scale);
        a[2 + row] = mul_bf16x2(even ? word << 3 & (SIZES | SIGNS)
                                     : (word >> 3 & SIZES) | (word << 1 & SIGNS), scale);
    }
}
/* Adds up the first WIDTH pairs of a tile with W in MXFP4, which becomes bf16 in registers. A
 * consumer has the 128 rows of a block. The columns of the next wgmmas are unpacked while those of
 * the last ones run. */
template <int BN, int WIDTH, bool SWIGLU>
__device__ static inline void expert_multiply_mxfp4(float (&sums)[2][WIDTH / 2], int n_k,
                                                    int consumer, expert_ring &at) {
    typedef expert_smem<gemm_mxfp4, BN, SWIGLU> smem;
    constexpr int STEPS = WIDTH < 96 ? 2 : 1; /* of 16 columns that are unpacked at a time */
    auto previous = [](int buf) { return (buf ? buf : smem::n_bufs) - 1; };
    uint32_t a[2][2 * STEPS][4]; /* [set][m_tile and step] */
    for (int k = 0; k < n_k; k++) {
        const int buf = expert_next<smem>(at);
        const uint32_t buf_at = at.ring + buf * smem::buf_bytes,
                       block_at = buf_at + consumer * MXFP4_BLOCK_BYTES;
        const uint64_t b_desc = wgmma_desc(buf_at + smem::x_at);
        const mxfp4_words words[2] = {mxfp4_load(block_at, 0), mxfp4_load(block_at, 1)};
#pragma unroll
        for (int step = 0; step < 4; step += STEPS) {
            const int set = step / STEPS % 2;
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++)
                mxfp4_unpack(words[i / STEPS], step + i % STEPS, a[set][i]);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < 2 * STEPS; i++)
                wgmma_rs<WIDTH>(sums[i / STEPS], a[set][i], b_desc + 2 * (step + i % STEPS), 1);
            wgmma_commit();
            wgmma_wait<1>();
            if (!step && k) expert_release<smem>(at, previous(buf));
        }
    }
    wgmma_wait<0>();
    wgmma_fence_operand(sums[0]), wgmma_fence_operand(sums[1]);
    expert_release<smem>(at, previous(at.buf));
}
/* Adds up the first WIDTH pairs of a tile in FP8. scales: those of K blocks 0, 1 ... of this tile
 * of W, `step` apart; NULL: none. Narrow tiles have two sets of partial sums, as
 * gemm_mainloop_fp8 has. */
template <class FMT, int BN, int WIDTH, bool SWIGLU>
__device__ static inline void expert_multiply_fp8(float (&sums)[WIDTH / 2], int n_k, int consumer,
                                                  const float2 *scales, int step, expert_ring &at) {
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    constexpr int SETS = WIDTH <= 32 ? 2 : 1;
    const int lane = (int)threadIdx.x % 32;
    float2 lane_scales = {1, 1}; /* of one of 32 K blocks */
    float part[SETS][WIDTH / 2];
    int buf[SETS];
    auto issue = [&](int set) {
        buf[set] = expert_next<smem>(at);
        const uint32_t buf_at = at.ring + buf[set] * smem::buf_bytes;
        fp8_issue<WIDTH>(part[set], wgmma_desc(buf_at + consumer * 64 * 128),
                         wgmma_desc(buf_at + smem::x_at));
    };
    auto promote = [&](int set, int k) {
        const float even = __shfl_sync(~0u, lane_scales.x, k % 32),
                    odd = __shfl_sync(~0u, lane_scales.y, k % 32);
        wgmma_fence_operand(part[set]);
        expert_release<smem>(at, buf[set]);
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) sums[i] += part[set][i] * (i / 2 % 2 ? odd : even);
    };
    int k = 0;
    for (; k < n_k; k += SETS) {
        if (k % 32 == 0 && scales) lane_scales = __ldg(scales + min(k + lane, n_k - 1) * step);
        if (k + SETS > n_k) break;
        issue(0);
        if constexpr (SETS == 2) {
            issue(1);
            wgmma_wait<1>();
            promote(0, k);
        }
        wgmma_wait<0>();
        promote(SETS - 1, k + SETS - 1);
    }
    if (k < n_k) {
        issue(0);
        wgmma_wait<0>();
        promote(0, k);
    }
}
template <class FMT, int BN, int WIDTH, bool SWIGLU, int M_TILES>
__device__ static inline void expert_multiply(float (&acc)[M_TILES][BN / 2],
                                              const expert_gemm_args &args,
                                              const expert_tile &tile, int consumer,
                                              expert_ring &at) {
    const int tiles_n = (args.N + 127) / 128, n_k = (args.K + FMT::k_cols - 1) / FMT::k_cols;
    if constexpr (FMT::is_mxfp4) {
        float sums[M_TILES][WIDTH / 2] = {};
        expert_multiply_mxfp4<BN, WIDTH, SWIGLU>(sums, n_k, consumer, at);
#pragma unroll
        for (int i = 0; i < M_TILES * WIDTH / 2; i++)
            acc[i / (WIDTH / 2)][i % (WIDTH / 2)] = sums[i / (WIDTH / 2)][i % (WIDTH / 2)];
        return;
    }
    float (&sums)[WIDTH / 2] = reinterpret_cast<float (&)[WIDTH / 2]>(acc);
    const float2 *scales = (const float2 *)args.w_scale + (size_t)tile.expert * n_k * tiles_n +
                           tile.n0 / 128;
    if constexpr (FMT::is_fp8)
        expert_multiply_fp8<FMT, BN, WIDTH, SWIGLU>(sums, n_k, consumer,
                                                    FMT::blocked ? scales : NULL, tiles_n, at);
    else if constexpr (!FMT::is_mxfp4)
        expert_multiply_bf16<FMT, BN, WIDTH, SWIGLU>(sums, n_k, consumer, at);
}
template <class FMT, int BN, bool SWIGLU>
__device__ static inline void expert_consume(const expert_gemm_args &args,
                                             const expert_firsts *first, uint32_t ring) {
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    /* MOST: the largest width of expert_width below BN */
    constexpr int M_TILES = smem::m_tiles,
                  MOST = BN == 128 && !FMT::is_mxfp4 ? BN : BN * 3 / 4;
    const int consumer = (int)threadIdx.x / 128 - 1,
              tiles_n = (args.N + smem::tile_n - 1) / smem::tile_n,
              n_k = (args.K + FMT::k_cols - 1) / FMT::k_cols;
    expert_ring at = {ring, 0, 0};
    for (int unit = (int)blockIdx.x; unit < first->tile[args.X] * tiles_n;
         unit += (int)gridDim.x) {
        const expert_tile tile = expert_tile_at<BN, smem::tile_n>(args, first, tiles_n, unit);
        const int width = expert_width<FMT, BN>(tile.n_pairs);
        if (tile.n0 + 64 * M_TILES * consumer >= args.N) { /* there are no such rows */
            for (int k = 0; k < n_k; k++) {
                const int buf = expert_next<smem>(at);
                bar_sync(1 + consumer, 128); /* no warp may miss a phase of the barrier */
                expert_release<smem>(at, buf);
            }
            continue;
        }
        float acc[M_TILES][BN / 2];
        expert_scales<FMT, BN> scales;
        if constexpr (FMT::is_fp8) scales = expert_load_scales<FMT, BN>(args, tile, consumer);
#pragma unroll
        for (int i = 0; i < M_TILES * BN / 2; i++) acc[i / (BN / 2)][i % (BN / 2)] = 0;
        if constexpr (BN >= 128) {
            if (width == BN / 4)
                expert_multiply<FMT, BN, BN / 4, SWIGLU>(acc, args, tile, consumer, at);
            else if (width == BN / 2)
                expert_multiply<FMT, BN, BN / 2, SWIGLU>(acc, args, tile, consumer, at);
            else if (MOST != BN && width == MOST)
                expert_multiply<FMT, BN, MOST, SWIGLU>(acc, args, tile, consumer, at);
            else expert_multiply<FMT, BN, BN, SWIGLU>(acc, args, tile, consumer, at);
        } else expert_multiply<FMT, BN, BN, SWIGLU>(acc, args, tile, consumer, at);
        if constexpr (FMT::is_fp8) expert_scale<FMT, BN>(acc[0], args, tile, scales);
#pragma unroll
        for (int i = 0; i < M_TILES; i++) {
            const int n0 = tile.n0 + 64 * (M_TILES * consumer + i);
            if (args.bias) expert_add_bias<BN>(acc[i], args, tile, n0);
            if constexpr (SWIGLU) expert_activate<BN>(acc[i], args.limit);
            expert_store<FMT, BN, SWIGLU>(acc[i], args, tile, n0, consumer, ring);
        }
    }
}
#endif

template <class FMT, int BN, bool SWIGLU>
__global__ static void __launch_bounds__(384, (expert_smem<FMT, BN, SWIGLU>::ctas))
    expert_gemm_kernel(const __grid_constant__ CUtensorMap map_w, const expert_gemm_args args) {
#if HOPPER
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    extern __shared__ __align__(128) char smem_base[];
    const uint32_t base = smem_addr(smem_base), ring = (base + 1023) & ~1023u,
                   bars = ring + smem::bars_at;
    expert_firsts *first = (expert_firsts *)(smem_base + (ring - base) + smem::list_at);
    if (threadIdx.x == 0) {
        for (int i = 0; i < smem::n_bufs; i++) {
            mbar_init(bars + 8 * i, smem::n_producers + 1);
            mbar_init(bars + 128 + 8 * i, 2);
        }
        mbar_init_fence();
    }
    grid_launch_dependents();
    grid_wait();
    for (int i = (int)threadIdx.x; i <= args.X; i += 384)
        first->pair[i] = args.first[i], first->tile[i] = (uint16_t)args.first_tile[i];
    __syncthreads();
    if (threadIdx.x < 128) {
        if constexpr (BN > 64) setmaxnreg_dec<FMT::is_mxfp4 ? 40 : 56>();
        if constexpr (smem::ctas == 2) setmaxnreg_dec<40>();
        expert_produce<FMT, BN, SWIGLU>(args, &map_w, first, ring, bars);
    } else {
        if constexpr (BN > 64) setmaxnreg_inc<FMT::is_mxfp4 ? 232 : 224>();
        if constexpr (smem::ctas == 2) setmaxnreg_inc<96>();
        expert_consume<FMT, BN, SWIGLU>(args, first, ring);
    }
#else
    __trap();
#endif
}

/* ---- expert_sum_kernel: adds the outputs of a token's experts ----
 *
 * x[t][.] (+)= sum of weights[t][i] * out[pairs[t][i]], in rising order of the experts, then the
 * shared expert's row times the sigmoid of its gate (NULL: times 1). adds: x is added to; else it
 * is overwritten. E is a multiple of 8. Grid T, block 128. Sets the counts to zero for the next
 * layer. */
typedef struct expert_sum_args {
    bf16 *x;
    const bf16 *out, *shared; /* [pairs][E]; [T][E] or NULL */
    const float *gate;        /* gate of token t: gate[t * ld_gate]; or NULL */
    int ld_gate, E, k, X;
    bool adds;
} expert_sum_args;
__device__ static inline void add_weighted_8(float (&sum)[8], const bf16 *from, float weight) {
    const uint4 v = *(const uint4 *)from;
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++)
        sum[2 * i] += weight * bf16_low(words[i]), sum[2 * i + 1] += weight * bf16_high(words[i]);
}
__global__ static void __launch_bounds__(128)
    expert_sum_kernel(const expert_sum_args args, expert_lists lists) {
    const int token = (int)blockIdx.x, k = args.k;
    __shared__ float weights[EXPERTS_MAX_K];
    __shared__ int pairs[EXPERTS_MAX_K];
    grid_launch_dependents();
    grid_wait();
    if ((int)threadIdx.x < k) {
        weights[threadIdx.x] = lists.weights[(size_t)token * k + threadIdx.x];
        pairs[threadIdx.x] = lists.pairs[(size_t)token * k + threadIdx.x];
    }
    for (int i = (int)threadIdx.x; token == 0 && i < args.X; i += 128) lists.counts[i] = 0;
    __syncthreads();
    const float gate =
        args.gate ? 1 / (1 + expf(-args.gate[(size_t)token * args.ld_gate])) : 1;
    for (int col = 8 * (int)threadIdx.x; col < args.E; col += 8 * 128) {
        bf16 *x = args.x + (size_t)token * args.E + col;
        float sum[8] = {};
        for (int i = 0; i < k; i++)
            add_weighted_8(sum, args.out + (size_t)pairs[i] * args.E + col, weights[i]);
        if (args.shared) add_weighted_8(sum, args.shared + (size_t)token * args.E + col, gate);
        if (args.adds) add_weighted_8(sum, x, 1);
        *(uint4 *)x = uint4{pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]),
                            pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    }
}

/* ---- Host: the launches ---- */

static bool weight_is_bf16(const weight *w) { return !w->scale && !w->is_mxfp4; }
/* Returns the pairs of a tile: the width that wastes little if the experts are equally busy. */
static int expert_tile_rows(int T, int k, int X, bool is_bf16) {
    const int mean = ceil_div(T * k, X), most = T; /* most: an expert has each token once */
    int rows = 8;
    while (rows < (is_bf16 ? 256 : 128) && rows < most && rows < mean + mean / 4) rows *= 2;
    return rows;
}
template <class FMT, int BN, bool SWIGLU>
static void expert_gemm_with(toka_device *dev, const weight *w, const expert_gemm_args &args) {
    const int rows = args.X * args.N;
    const CUtensorMap map_w =
        FMT::is_mxfp4 ? CUtensorMap{}
        : FMT::is_fp8
            ? gemm_fp8_map(dev, w->data, rows, args.K, (size_t)fp8_row_bytes(args.K), 128)
            : gemm_tensor_map(dev, w->data, rows, args.K, args.K, 128, 64);
    typedef expert_smem<FMT, BN, SWIGLU> smem;
    /* Where each SM has a tile at most, a second CTA must not take it: a CTA that comes while the
     * kernel before runs goes where that has none, and two would share an SM while others idle. */
    const int most_tiles = std::min(args.n_pairs, args.X) * ceil_div(args.N, smem::tile_n),
              ctas = most_tiles > dev->n_sms ? smem::ctas : 1;
    const size_t bytes = ctas == smem::ctas ? smem::bytes : HOPPER_CTA_SMEM;
    if (dev->error.code) return;
    launch_dependent(dev, "GEMM of experts", expert_gemm_kernel<FMT, BN, SWIGLU>,
                     {dim3((unsigned)(dev->n_sms * ctas)), 384, bytes}, map_w, args);
}
template <class FMT, bool SWIGLU>
static void expert_gemm_of(toka_device *dev, const weight *w, int tile_rows,
                           const expert_gemm_args &args) {
    switch (tile_rows) {
    case 8: return expert_gemm_with<FMT, 8, SWIGLU>(dev, w, args);
    case 16: return expert_gemm_with<FMT, 16, SWIGLU>(dev, w, args);
    case 32: return expert_gemm_with<FMT, 32, SWIGLU>(dev, w, args);
    case 64: return expert_gemm_with<FMT, 64, SWIGLU>(dev, w, args);
    case 128: return expert_gemm_with<FMT, 128, SWIGLU>(dev, w, args);
    default: return expert_gemm_with<FMT, FMT::is_bf16 ? 256 : 128, SWIGLU>(dev, w, args);
    }
}
/* tile_rows: pairs of a tile, 8 .. 256 (FP8 and MXFP4: 128). */
template <bool SWIGLU>
static void expert_gemm(toka_device *dev, const weight *w, int tile_rows,
                        const expert_gemm_args &args) {
    assert(args.K % 8 == 0 && args.N % (SWIGLU ? 16 : 8) == 0 && args.X <= EXPERTS_MAX &&
           (tile_rows <= 128 || !(w->scale || w->is_mxfp4)));
    if (w->is_mxfp4) expert_gemm_of<gemm_mxfp4, SWIGLU>(dev, w, tile_rows, args);
    else if (!w->scale) expert_gemm_of<gemm_bf16, SWIGLU>(dev, w, tile_rows, args);
    else if (w->is_blocked) expert_gemm_of<gemm_fp8<128, true>, SWIGLU>(dev, w, tile_rows, args);
    else expert_gemm_of<gemm_fp8<128, false>, SWIGLU>(dev, w, tile_rows, args);
}
static void expert_route(toka_device *dev, const float *logits, int ld, int T,
                         const expert_router &router, const expert_lists &lists, int tile_rows) {
    const int X = router.n_experts;
    const launch_shape shape = {dim3((unsigned)lists.n_words), 32 * ROUTE_WARPS,
                                router.n_groups > 1 ? ROUTE_WARPS * X * sizeof(float) : 0};
    assert(X <= EXPERTS_MAX && router.top_k <= EXPERTS_MAX_K && router.top_k <= X &&
           router.n_groups <= 32 && T / tile_rows * router.top_k + X < 1 << 16);
    launch_dependent(dev, "router",
                     X <= 32    ? route_kernel<1>
                     : X <= 128 ? route_kernel<4>
                                : route_kernel<16>,
                     shape, logits, ld, T, router, lists, tile_rows);
    if (T > ROUTE_TOKENS)
        launch_dependent(dev, "pairs of experts", pair_kernel, {dim3((unsigned)X), 256}, lists, X,
                         router.top_k, tile_rows);
}

/* ---- The op ---- */

typedef struct expert_scratch {
    expert_lists lists; /* for max_tokens tokens */
    float *logits;      /* [T][X and the shared gate, rounded up to 8] */
    bf16 *act, *out;    /* [pairs][F], [pairs][E] */
    bf16 *shared;       /* [T][E] */
    float *act_scale;   /* [pairs] scales of the rows of act, for FP8 */
} expert_scratch;

/* Returns the bytes of a layer's router, experts and shared expert on the device. */
static size_t experts_weight_bytes(const toka_moe *moe, bool hopper) {
    size_t n = (size_t)round_up_8(moe->n_experts + 1) * round_up_8(moe->router.cols) * sizeof(bf16);
    for (int gate_up = 0; gate_up < 2; gate_up++) {
        const toka_dtype format = hopper ? weight_experts_format(moe, gate_up) : TOKA_BF16;
        const weight_parts parts = weight_mlp_parts(moe->experts, gate_up),
                           shared = weight_mlp_parts(&moe->shared, gate_up);
        const size_t each = format == TOKA_MXFP4 ? weight_expert_bytes(&parts, format)
                                                 : weight_bytes(&parts, format == TOKA_FP8),
                     bias = moe->experts->down_bias.rows ? weight_rows(&parts) * sizeof(float) : 0;
        n += (size_t)moe->n_experts * (each + bias);
        if (moe->shared.gate.rows)
            n += weight_bytes(&shared, hopper && weight_stays_fp8(&shared));
    }
    return n;
}

/* Allocates the scratch memory for the largest of all layers, if the model has experts. */
static void experts_open(toka_device *dev) {
    size_t X = 0, k = 0, F = 0, n_logits = 0;
    const size_t T = (size_t)dev->options.max_tokens, E = (size_t)dev->E;
    for (int i = 0; i < dev->shape->L; i++) {
        const layer_experts *experts = dev->layers[i].experts;
        if (!experts) continue;
        X = std::max(X, (size_t)experts->router.n_experts);
        k = std::max(k, (size_t)experts->router.top_k);
        F = std::max(F, (size_t)experts->down.K);
        n_logits = std::max(n_logits, (size_t)experts->logits.N);
    }
    if (!X) return;
    expert_scratch *to = dev->experts = (expert_scratch *)calloc(1, sizeof *to);
    if (!to) abort();
    to->lists.n_words = ceil_div((int)T, ROUTE_TOKENS);
    const size_t n_words = (size_t)to->lists.n_words;
    auto ints = [&](size_t n) { return (int *)dev_alloc(dev, n * sizeof(int), "activations"); };
    to->lists.weights = (float *)ints(T * k);
    to->lists.chosen = (short *)ints(T * k);
    to->lists.pairs = ints(T * k), to->lists.rows = ints(T * k);
    to->lists.tokens = (uint32_t *)ints(X * n_words);
    to->lists.counts = ints(X);
    to->lists.first = ints(X + 1), to->lists.first_tile = ints(X + 1);
    to->logits = (float *)ints((T + GEMM_PAD_ROWS) * n_logits);
    to->act_scale = (float *)ints(T * k);
    to->act = (bf16 *)dev_alloc(dev, T * k * F * sizeof(bf16), "activations");
    to->out = (bf16 *)dev_alloc(dev, T * k * E * sizeof(bf16), "activations");
    to->shared = (bf16 *)dev_alloc(dev, T * E * sizeof(bf16), "activations");
    if (!dev->error.code)
        latch_error(dev, cudaMemsetAsync(to->lists.counts, 0, X * sizeof(int), dev->stream),
                    "activations");
}

/* Runs the shared expert on dev->xn. x_quantized: xn is e4m3. */
static void experts_run_shared(toka_device *dev, const layer_experts *layer, bool x_quantized) {
    const int T = dev->step->T;
    const gemm_args first = {.M = T, .x = dev->xn, .ldx = dev->E, .w = &layer->shared_gate_up,
                             .y = dev->act, .ldy = dev->F, .epi = EPI_SWIGLU,
                             .x_quantized = x_quantized};
    const gemm_args second = {.M = T, .x = dev->act, .ldx = dev->F, .w = &layer->shared_down,
                              .y = dev->experts->shared, .ldy = dev->E, .epi = EPI_STORE};
    gemm(dev, &first);
    gemm(dev, &second);
}

static expert_gemm_args experts_up_args(const toka_device *dev, const layer_experts *layer) {
    const expert_lists *lists = &dev->experts->lists;
    const weight *up = &layer->gate_up;
    return {dev->xn, dev->experts->act, lists->rows, lists->first, lists->first_tile,
            layer->router.n_experts, up->N, up->K, dev->E, layer->down.K, dev->x_scale, up->scale,
            up->data, up->bias, layer->limit, dev->step->T * layer->router.top_k};
}
static expert_gemm_args experts_down_args(const toka_device *dev, const layer_experts *layer) {
    const expert_scratch *scratch = dev->experts;
    const weight *down = &layer->down;
    return {scratch->act, scratch->out, NULL, scratch->lists.first, scratch->lists.first_tile,
            layer->router.n_experts, down->N, down->K, down->K, dev->E, scratch->act_scale,
            down->scale, down->data, down->bias, 0, dev->step->T * layer->router.top_k};
}
/* x += experts of dev->xn, for the T rows of the step. The experts come before the shared expert:
 * that may quantize xn in place, by a scale of its own. */
static void experts_run(toka_device *dev, const layer_experts *layer, bf16 *x) {
    const expert_scratch *scratch = dev->experts;
    const expert_router *router = &layer->router;
    const weight *up = &layer->gate_up, *down = &layer->down;
    const int T = dev->step->T, X = router->n_experts, k = router->top_k,
              tile_rows = expert_tile_rows(T, k, X, weight_is_bf16(up) && weight_is_bf16(down));
    expert_lists lists = scratch->lists;
    lists.n_words = ceil_div(T, ROUTE_TOKENS);
    router_gemm(dev, {dev->xn, (const bf16 *)layer->logits.data, scratch->logits, T,
                      layer->logits.N, layer->logits.K, dev->E});
    expert_route(dev, scratch->logits, layer->logits.N, T, *router, lists, tile_rows);
    if (layer->shared_down.data && !layer->shared_gate_up.scale)
        experts_run_shared(dev, layer, false);
    if (up->scale)
        launch_dependent(dev, "quantization of x", quantize_rows_kernel, {dim3((unsigned)T), 256},
                         dev->xn, dev->E, up->K, up->x_scale, dev->x_scale);
    expert_gemm<true>(dev, up, tile_rows, experts_up_args(dev, layer));
    if (down->scale)
        launch_dependent(dev, "quantization of x", quantize_rows_kernel,
                         {dim3((unsigned)(T * k)), 256}, scratch->act, down->K, down->K,
                         down->x_scale, scratch->act_scale);
    expert_gemm<false>(dev, down, tile_rows, experts_down_args(dev, layer));
    if (layer->shared_down.data && layer->shared_gate_up.scale)
        experts_run_shared(dev, layer, up->scale != NULL);
    const expert_sum_args sum = {x, scratch->out, layer->shared_down.data ? scratch->shared : NULL,
                                 layer->has_shared_gate ? scratch->logits + X : NULL,
                                 layer->logits.N, dev->E, k, X, true};
    launch_dependent(dev, "sum of experts", expert_sum_kernel, {dim3((unsigned)T), 128}, sum,
                     lists);
}

/* ===========================================================================
 * MARK: 7c. Adapters [kernel]
 *
 * What the adapters (LoRA, toka_low_rank) of a step's rows add to a GEMM y = x W^T:
 *
 *     y[t] += scale B (A x[t])    A [r][K] and B [N][r] of the adapter of row t
 *
 *     lora_shrink_kernel    low = A x, float32
 *     lora_expand_kernel    y += scale B low; or, after the GEMM of gate and up, what B adds to
 *                           them and their activation
 *
 * Which steps: only a step in which a row has an adapter launches these kernels. It is launched
 * kernel by kernel, without fused norms, and its GEMMs of q, k, v and of gate, up have the epilogue
 * EPI_STORE, because RoPE and the activation come after what is added. All other steps run as if
 * adapters did not exist.
 *
 * Rows: lora_plan_step sorts the rows of the step by their adapters; rows without one are last. A
 * CTA has LORA_ROWS rows in this order. It computes all of them with each adapter that one of them
 * has, one adapter after the other, and keeps the results of the rows of this adapter. Most CTAs
 * have rows of one or two adapters.
 *
 * Every sum has an order that depends on K and on the rank alone. So what is added to a row does
 * not depend on the other rows of the step.
 *
 * Memory: an adapter is allocated in one block when it is loaded, and freed when it is dropped. Its
 * numbers are bf16. Ranks are padded with zeros to multiples of LORA_RANKS.
 * =========================================================================== */

enum {
    LORA_ROWS = 32,      /* rows of a CTA: two tiles of 16 rows of the MMA */
    LORA_RANKS = 16,     /* a chunk of a rank: K of one MMA */
    LORA_SLICE = 1024,   /* columns of x that a CTA of lora_shrink_kernel adds up */
    LORA_SHRINK_WARPS = 8,
    LORA_SLICE_STEPS = LORA_SLICE / LORA_SHRINK_WARPS / 32,
    LORA_SUMS_STRIDE = 24, /* no bank conflicts between rows of 16 floats */
    LORA_EXPAND_WARPS = 4,
    LORA_COLS = 32,      /* columns of y that a warp of lora_expand_kernel computes at a time */
    LORA_EXPAND_COLS = 4 * LORA_EXPAND_WARPS * LORA_COLS /* of a CTA */
};

/* The matrices of a layer that adapters change, in the order of lora_block. */
enum { LORA_Q, LORA_K, LORA_V, LORA_O, LORA_GATE, LORA_UP, LORA_DOWN, LORA_N_PARTS };

typedef struct lora_part { /* an adapter's part of one matrix */
    const bf16 *a; /* [rank][K], K as in struct weight */
    const bf16 *b; /* [N][rank]; the rows of q, k and v in the order of W, those of gate and of up
                      in their own order */
    float scale;
    int rank;      /* a multiple of LORA_RANKS; 0: the adapter does not change the matrix */
} lora_part;

typedef struct lora_block { /* an adapter on the device */
    lora_part *parts; /* [L * LORA_N_PARTS], device memory, the numbers follow; NULL: not loaded */
    int rank;         /* the highest of all parts */
} lora_block;

typedef struct lora_source { /* where a part is in the adapter's files (toka_tensor) */
    int matrix, matrix_row, matrix_col; /* matrix 0: adapters do not change it */
    int rows, cols;
} lora_source;

typedef struct lora_rows { /* of a step; device memory in the upload buffer */
    const int *rows;  /* [T] the rows of the step, sorted by adapter */
    const int *slots; /* [T] of each of them, index of its adapter in blocks; -1: it has none */
    const lora_part *const *blocks;
} lora_rows;

struct lora_state {
    /* By number. Any thread sets an entry that no step uses (toka_backend.set_adapter). */
    lora_block of[TOKA_MAX_ADAPTERS + 1];
    lora_source *sources; /* [L * LORA_N_PARTS] */
    float *low;           /* scratch of lora_shrink_kernel */
    /* The current step. n_rows: rows that have an adapter; n_chunks: of its highest rank. */
    lora_rows step;
    int n_rows, n_chunks;
};

/* Returns whether a row of the current step has an adapter. */
static bool lora_in_step(const toka_device *dev) { return dev->lora && dev->lora->n_rows > 0; }

/* ---- The kernels ---- */

struct lora_args {
    lora_rows step;
    int n_rows;       /* the first rows of the order that the kernel computes */
    int n_low_rows;   /* rows of low: those that have an adapter, rounded up to LORA_ROWS */
    const bf16 *x;    /* [T][ldx] */
    int ldx, K;
    float *low;       /* [slice][part][chunk][n_low_rows][LORA_RANKS] */
    int first_part, n_parts, n_chunks, n_slices;
    bf16 *y;          /* [T][ldy]; with PAIRS the activation's output */
    int ldy;
    int width[3];     /* columns of y of each part; with PAIRS [0]: columns of gate_up */
    const bf16 *gate_up; /* PAIRS: [T][width[0]] */
    bool is_gelu;
};

typedef struct lora_tile { /* the rows of a CTA. With PAIRS two parts: gate and up */
    int rows[LORA_ROWS]; /* of the step; those behind the last one are equal to the first one */
    int slots[LORA_ROWS];
    int ranks[2][LORA_ROWS]; /* of the part of the row's adapter; 0 without an adapter */
    float scales[2][LORA_ROWS];
    const bf16 *matrices[2][LORA_ROWS]; /* A or B */
} lora_tile;

/* Loads the tile of the rows from `first` on. No kernel writes what this reads. */
__device__ static inline void lora_load_tile(lora_tile &tile, const lora_args &args, int first,
                                             int part, int n_parts, bool wants_b) {
    const int i = (int)threadIdx.x % LORA_ROWS, k = (int)threadIdx.x / LORA_ROWS;
    if (k >= n_parts) return;
    const bool exists = first + i < args.n_rows;
    const int slot = exists ? args.step.slots[first + i] : -1;
    if (k == 0) {
        tile.rows[i] = args.step.rows[exists ? first + i : first];
        tile.slots[i] = slot;
    }
    tile.ranks[k][i] = 0;
    if (slot < 0) return;
    const lora_part from = args.step.blocks[slot][part + k];
    tile.ranks[k][i] = from.rank;
    tile.scales[k][i] = from.scale;
    tile.matrices[k][i] = wants_b ? from.b : from.a;
}
/* Returns the end of the run of rows that have the adapter of row `begin` of the tile. */
__device__ static inline int lora_run_end(const lora_tile &tile, int begin) {
    int end = begin + 1;
    while (end < LORA_ROWS && tile.slots[end] == tile.slots[begin]) end++;
    return end;
}
/* Does the run have rows of tile m of the MMA? */
__device__ static inline bool lora_run_has(int begin, int end, int m) {
    return begin < 16 * m + 16 && end > 16 * m;
}

/* ---- lora_shrink_kernel: low = A x ----
 *
 *   x      bf16 [T][ldx], K columns, a multiple of 8
 *   A      bf16 [rank][K]
 *   low    float32 [slice][part][chunk][n_low_rows][16], of the slices of K
 *
 * Grid (tiles of LORA_ROWS rows, parts x chunks of 16 of the rank, slices of LORA_SLICE columns of
 * x), block 256. Reads x once for each part and chunk: bound by L2 and latency.
 *
 * Warp w has columns 128 w .. 128 w + 127 of the slice, 32 at a time. Lane (g, q) = (l / 4, l % 4)
 * loads 8 neighbouring columns, 8 q .. 8 q + 7, of its rows of x and A: the operands of two MMAs.
 * The MMA adds columns up in any order, as long as x and A have the same. Then the sums of the
 * warps are added in the order of the warps; lora_expand_kernel adds the slices. */
__device__ static inline void lora_multiply_slice(float (&acc)[2][2][4], const lora_args &args,
                                                  const lora_tile &tile, const bf16 *a, int k0) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int i = 0; i < LORA_SLICE_STEPS; i++) {
        const int k = k0 + 32 * i + lane % 4 * 8;
        const bool exists = k < args.K;
        uint4 x[4], w[2]; /* x: rows g, g + 8, g + 16, g + 24 */
#pragma unroll
        for (int j = 0; j < 4; j++)
            x[j] = exists ? *(const uint4 *)(args.x + (size_t)tile.rows[8 * j + g] * args.ldx + k)
                          : uint4{};
#pragma unroll
        for (int j = 0; j < 2; j++)
            w[j] = exists ? *(const uint4 *)(a + (size_t)(8 * j + g) * args.K + k) : uint4{};
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const uint4 low = x[2 * m], high = x[2 * m + 1];
            const uint32_t first[4] = {low.x, high.x, low.y, high.y},
                           second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint32_t b_first[2] = {w[j].x, w[j].y}, b_second[2] = {w[j].z, w[j].w};
                mma_16816(acc[m][j], first, b_first);
                mma_16816(acc[m][j], second, b_second);
            }
        }
    }
}
__global__ static void __launch_bounds__(32 * LORA_SHRINK_WARPS)
    lora_shrink_kernel(const lora_args args) {
    __shared__ lora_tile tile;
    __shared__ float sums[LORA_SHRINK_WARPS][LORA_ROWS][LORA_SUMS_STRIDE];
    const int first = (int)blockIdx.x * LORA_ROWS, warp = (int)threadIdx.x / 32,
              lane = (int)threadIdx.x % 32;
    const int part = (int)blockIdx.y / args.n_chunks, chunk = (int)blockIdx.y % args.n_chunks;
    const int row = (int)threadIdx.x / 8, column = (int)threadIdx.x % 8 * 2; /* to add up */
    float *low = args.low + (((size_t)blockIdx.z * gridDim.y + blockIdx.y) * args.n_low_rows +
                             first + row) * LORA_RANKS + column;
    grid_launch_dependents();
    lora_load_tile(tile, args, first, args.first_part + part, 1, false);
    __syncthreads();
    grid_wait();
    for (int begin = 0, end; begin < LORA_ROWS && tile.slots[begin] >= 0; begin = end) {
        end = lora_run_end(tile, begin);
        if (tile.ranks[0][begin] <= chunk * LORA_RANKS) continue;
        float acc[2][2][4] = {};
        lora_multiply_slice(acc, args, tile,
                            tile.matrices[0][begin] + (size_t)chunk * LORA_RANKS * args.K,
                            (int)blockIdx.z * LORA_SLICE + warp * 32 * LORA_SLICE_STEPS);
#pragma unroll
        for (int i = 0; i < 8; i++) /* tile m = i / 4, row half i / 2 % 2, column half i % 2 */
            *(float2 *)&sums[warp][i / 2 * 8 + lane / 4][i % 2 * 8 + lane % 4 * 2] =
                float2{acc[i / 4][i % 2][i / 2 % 2 * 2], acc[i / 4][i % 2][i / 2 % 2 * 2 + 1]};
        __syncthreads();
        if (row >= begin && row < end) {
            float2 sum = {};
#pragma unroll
            for (int w = 0; w < LORA_SHRINK_WARPS; w++)
                sum.x += sums[w][row][column], sum.y += sums[w][row][column + 1];
            *(float2 *)low = sum;
        }
        __syncthreads();
    }
}

/* ---- lora_expand_kernel: what B adds ----
 *
 *   y[t][n] += scale B[n] low[t]                            PAIRS false
 *   y[t][f] = activation(gate_up[t], with what B adds)      PAIRS true, of every row of the step
 *
 *   low      of lora_shrink_kernel; times scale it is rounded to bf16
 *   B        bf16 [N][rank]
 *   gate_up  bf16 [T][2F]: 8 columns of gate, then their 8 of up, and so on
 *
 * Grid (tiles of LORA_ROWS rows, groups of LORA_EXPAND_COLS columns of the parts), block 128.
 * Shared memory: low of the tile, [part][row][lora_low_stride]. Moves 4 M N bytes (PAIRS: 3 M N):
 * bound by copy bandwidth.
 *
 * A warp computes 32 columns at a time, as four MMAs of 8. Which columns an MMA has is chosen such
 * that lane (g, q) gets 8 neighbouring columns of y, or 4 of gate and the same 4 of up:
 *
 *   column c of MMA j      PAIRS false    8 (c / 2) + 2 j + c % 2
 *                          PAIRS true     f = 4 (c / 2) + 2 (j % 2) + c % 2, of gate for j < 2 */
__host__ __device__ static inline int lora_low_stride(int n_chunks) {
    return (n_chunks | 1) * LORA_RANKS; /* an odd number of chunks: no bank conflicts */
}
/* Adds up the slices of low, times scale, for all rows of the tile and n_parts parts. */
__device__ static inline void lora_load_low(bf16 *to, const lora_args &args, const lora_tile &tile,
                                            int first, int part, int n_parts) {
    const int stride = lora_low_stride(args.n_chunks);
    const size_t slice = (size_t)args.n_parts * args.n_chunks * args.n_low_rows * LORA_RANKS;
    for (int i = (int)threadIdx.x; i < n_parts * args.n_chunks * LORA_ROWS * 4;
         i += 32 * LORA_EXPAND_WARPS) {
        const int column = i % 4 * 4, row = i / 4 % LORA_ROWS, chunk = i / (4 * LORA_ROWS);
        const int k = chunk / args.n_chunks, in_part = chunk % args.n_chunks * LORA_RANKS;
        float4 sum = {};
        if (in_part < tile.ranks[k][row]) {
            const float *from = args.low +
                                ((size_t)(part * args.n_chunks + chunk) * args.n_low_rows + first +
                                 row) * LORA_RANKS + column;
            for (int s = 0; s < args.n_slices; s++) {
                const float4 more = *(const float4 *)(from + s * slice);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
            const float scale = tile.scales[k][row];
            sum.x *= scale, sum.y *= scale, sum.z *= scale, sum.w *= scale;
        }
        *(uint2 *)(to + (k * LORA_ROWS + row) * stride + in_part + column) =
            make_uint2(pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w));
    }
}
/* Computes what the adapter of the rows begin .. end-1 adds to a warp's columns from col0 on. */
template <bool PAIRS>
__device__ static inline void lora_multiply_run(float (&sum)[2][4][4], const lora_args &args,
                                                const lora_tile &tile, const bf16 *low, int begin,
                                                int end, int col0, int width) {
    constexpr int N_MMA = PAIRS ? 2 : 4; /* of a part */
    const int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int stride = lora_low_stride(args.n_chunks);
    const int row0 = (PAIRS ? col0 / 2 : col0) + g / 2 * 2 * N_MMA + g % 2, /* of B, for MMA 0 */
              n_rows = PAIRS ? width / 2 : width;
#pragma unroll
    for (int part = 0; part < (PAIRS ? 2 : 1); part++) {
        const int rank = tile.ranks[part][begin];
        const bf16 *b = tile.matrices[part][begin] + 4 * q;
        for (int r = 0; r < rank; r += LORA_RANKS) {
            uint2 w[N_MMA];
#pragma unroll
            for (int j = 0; j < N_MMA; j++)
                w[j] = row0 + 2 * j < n_rows
                           ? *(const uint2 *)(b + (size_t)(row0 + 2 * j) * rank + r)
                           : uint2{};
#pragma unroll
            for (int m = 0; m < 2; m++) {
                if (!lora_run_has(begin, end, m)) continue;
                const bf16 *from = low + (part * LORA_ROWS + 16 * m + g) * stride + r + 4 * q;
                const uint2 first = *(const uint2 *)from,
                            second = *(const uint2 *)(from + 8 * stride);
                const uint32_t a[4] = {first.x, second.x, first.y, second.y};
#pragma unroll
                for (int j = 0; j < N_MMA; j++) {
                    const uint32_t pair[2] = {w[j].x, w[j].y};
                    mma_16816(sum[m][part * N_MMA + j], a, pair);
                }
            }
        }
    }
}
/* Computes what all adapters of the tile add to a warp's columns. */
template <bool PAIRS>
__device__ static inline void lora_multiply_tile(float (&acc)[2][4][4], const lora_args &args,
                                                 const lora_tile &tile, const bf16 *low, int col0,
                                                 int width) {
    const int g = (int)threadIdx.x % 32 / 4;
    for (int begin = 0, end; begin < LORA_ROWS && tile.slots[begin] >= 0; begin = end) {
        end = lora_run_end(tile, begin);
        float sum[2][4][4] = {};
        lora_multiply_run<PAIRS>(sum, args, tile, low, begin, end, col0, width);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            const int m = i / 16, j = i / 4 % 4, row = 16 * m + i / 2 % 2 * 8 + g;
            if (row >= begin && row < end) acc[m][j][i % 4] = sum[m][j][i % 4];
        }
    }
}
/* Adds acc, the lane's 8 columns of MMAs 0 to 3 of row half `half`, to y. */
__device__ static inline uint4 lora_add_8(uint4 y, const float (&acc)[4][4], int half) {
    float sums[8];
    unpack_8(y, sums);
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] += acc[i / 2][2 * half + i % 2];
    return pack_8(sums);
}
/* Returns the activation of 4 columns of gate and of up, with acc added. */
__device__ static inline uint2 lora_activate_4(uint2 gate, uint2 up, const float (&acc)[4][4],
                                               int half, bool is_gelu) {
    float g[4] = {bf16_low(gate.x), bf16_high(gate.x), bf16_low(gate.y), bf16_high(gate.y)},
          u[4] = {bf16_low(up.x), bf16_high(up.x), bf16_low(up.y), bf16_high(up.y)};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        g[i] += acc[i / 2][2 * half + i % 2];
        u[i] += acc[2 + i / 2][2 * half + i % 2];
        u[i] = is_gelu ? geglu(g[i], u[i]) : swiglu(g[i], u[i]);
    }
    return make_uint2(pack_bf16(u[0], u[1]), pack_bf16(u[2], u[3]));
}
/* Computes a warp's columns from col0 on. y: column 0 of the part. */
template <bool PAIRS>
__device__ static inline void lora_expand_columns(const lora_args &args, const lora_tile &tile,
                                                  const bf16 *low, bf16 *y, int n_rows, int col0,
                                                  int width) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const bool exists = PAIRS ? col0 / 2 + 4 * q < width / 2 : col0 + 8 * q < width;
    float acc[2][4][4] = {};
    uint4 old[4] = {}; /* of rows g, g + 8, g + 16, g + 24: 8 columns of y, or 4 of gate, 4 of up */
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (!exists || 8 * i + g >= n_rows) continue;
        const size_t row = (size_t)tile.rows[8 * i + g];
        if constexpr (PAIRS) {
            const bf16 *from = args.gate_up + row * width + col0 + q / 2 * 16 + q % 2 * 4;
            const uint2 gate = *(const uint2 *)from, up = *(const uint2 *)(from + 8);
            old[i] = make_uint4(gate.x, gate.y, up.x, up.y);
        } else old[i] = *(const uint4 *)(y + row * args.ldy + col0 + 8 * q);
    }
    lora_multiply_tile<PAIRS>(acc, args, tile, low, col0, width);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (!exists || 8 * i + g >= n_rows) continue;
        bf16 *to = y + (size_t)tile.rows[8 * i + g] * args.ldy;
        if constexpr (PAIRS)
            *(uint2 *)(to + col0 / 2 + 4 * q) =
                lora_activate_4(make_uint2(old[i].x, old[i].y), make_uint2(old[i].z, old[i].w),
                                acc[i / 2], i % 2, args.is_gelu);
        else if (tile.ranks[0][8 * i + g])
            *(uint4 *)(to + col0 + 8 * q) = lora_add_8(old[i], acc[i / 2], i % 2);
    }
}
template <bool PAIRS>
__global__ static void __launch_bounds__(32 * LORA_EXPAND_WARPS)
    lora_expand_kernel(const lora_args args) {
    extern __shared__ __align__(16) bf16 lora_low[];
    __shared__ lora_tile tile;
    const int first = (int)blockIdx.x * LORA_ROWS, n_rows = min(LORA_ROWS, args.n_rows - first);
    const int n_parts = PAIRS ? 2 : 1;
    int part = 0, group = (int)blockIdx.y, width = args.width[0];
    bf16 *y = args.y;
#pragma unroll
    for (int i = 0; i < (PAIRS ? 0 : 2); i++) { /* finds the part of the group */
        if (part < i || group * LORA_EXPAND_COLS < width) continue;
        group -= (width + LORA_EXPAND_COLS - 1) / LORA_EXPAND_COLS;
        y += width, width = args.width[i + 1], part = i + 1;
    }
    grid_launch_dependents();
    lora_load_tile(tile, args, first, args.first_part + part, n_parts, true);
    __syncthreads();
    grid_wait();
    if (tile.slots[0] >= 0) lora_load_low(lora_low, args, tile, first, part, n_parts);
    __syncthreads();
    for (int i = 0; i < LORA_EXPAND_COLS / (LORA_EXPAND_WARPS * LORA_COLS); i++) {
        const int col0 = group * LORA_EXPAND_COLS +
                         (i * LORA_EXPAND_WARPS + (int)threadIdx.x / 32) * LORA_COLS;
        if (col0 >= width) return;
        lora_expand_columns<PAIRS>(args, tile, lora_low, y, n_rows, col0, width);
    }
}

/* ---- Their launches ---- */

/* Launches lora_shrink_kernel for the input of a GEMM whose W has n_parts matrices. Returns the
 * arguments, to which the caller adds those of lora_expand_kernel. */
static lora_args lora_shrink(toka_device *dev, const gemm_args *gemm, int n_parts) {
    const lora_state *lora = dev->lora;
    const int n_tiles = ceil_div(lora->n_rows, LORA_ROWS);
    const lora_args args = {.step = lora->step, .n_rows = lora->n_rows,
                            .n_low_rows = n_tiles * LORA_ROWS, .x = gemm->x, .ldx = gemm->ldx,
                            .K = gemm->w->K, .low = lora->low, .first_part = gemm->w->first_part,
                            .n_parts = n_parts, .n_chunks = lora->n_chunks,
                            .n_slices = ceil_div(gemm->w->K, LORA_SLICE)};
    launch_dependent(dev, "adapters: A x", lora_shrink_kernel,
                     {dim3((unsigned)n_tiles, (unsigned)(n_parts * args.n_chunks),
                           (unsigned)args.n_slices),
                      32 * LORA_SHRINK_WARPS},
                     args);
    return args;
}
static size_t lora_expand_smem(int n_chunks, int n_parts) {
    return (size_t)n_parts * LORA_ROWS * lora_low_stride(n_chunks) * sizeof(bf16);
}
/* Adds what the adapters of the step's rows add to the output of a GEMM that has run. Its x is
 * still there. Launches nothing if no row has an adapter. */
static void lora_add(toka_device *dev, const gemm_args *gemm) {
    if (!lora_in_step(dev)) return;
    const int kind = gemm->w->first_part % LORA_N_PARTS, n_parts = kind == LORA_Q ? 3 : 1;
    lora_args args = lora_shrink(dev, gemm, n_parts);
    const lora_source *sources = dev->lora->sources + gemm->w->first_part;
    int n_groups = 0;
    args.y = gemm->y, args.ldy = gemm->ldy;
    for (int i = 0; i < n_parts; i++) {
        args.width[i] = n_parts == 1 ? gemm->w->N : sources[i].rows;
        n_groups += ceil_div(args.width[i], LORA_EXPAND_COLS);
    }
    launch_dependent(dev, "adapters: B", lora_expand_kernel<false>,
                     {dim3((unsigned)(args.n_low_rows / LORA_ROWS), (unsigned)n_groups),
                      32 * LORA_EXPAND_WARPS, lora_expand_smem(args.n_chunks, 1)},
                     args);
}
/* act = activation of gate and up, with what the adapters add to them. gemm: it has stored gate and
 * up. */
static void lora_gate_up(toka_device *dev, const gemm_args *gemm, bool is_gelu) {
    lora_args args = lora_shrink(dev, gemm, 2);
    args.n_rows = gemm->M;
    args.gate_up = gemm->y, args.width[0] = gemm->w->N, args.is_gelu = is_gelu;
    args.y = dev->act, args.ldy = dev->F;
    assert(gemm->ldy == gemm->w->N);
    launch_dependent(dev, "adapters: gate and up", lora_expand_kernel<true>,
                     {dim3((unsigned)ceil_div(gemm->M, LORA_ROWS),
                           (unsigned)ceil_div(gemm->w->N, LORA_EXPAND_COLS)),
                      32 * LORA_EXPAND_WARPS, lora_expand_smem(args.n_chunks, 2)},
                     args);
}

/* ---- The rows of a step ---- */

/* Sorts the rows of a step by adapter. slot_of: [TOKA_MAX_ADAPTERS + 1] index of an adapter's
 * block, in rising order of the adapters; -1: the row has none. Returns the number of rows that
 * have one. */
static int lora_sort_rows(const uint8_t *adapters, int T, const int *slot_of, int *rows,
                          int *slots) {
    int place[TOKA_MAX_ADAPTERS + 2] = {}; /* [slot + 1] rows of the slots before; then of none */
    for (int t = 0; t < T; t++)
        if (slot_of[adapters[t]] >= 0) place[slot_of[adapters[t]] + 1]++;
    for (int i = 1; i < TOKA_MAX_ADAPTERS + 2; i++) place[i] += place[i - 1];
    const int n = place[TOKA_MAX_ADAPTERS + 1];
    for (int t = 0, n_none = n; t < T; t++) {
        const int slot = slot_of[adapters[t]], to = slot < 0 ? n_none++ : place[slot]++;
        rows[to] = t, slots[to] = slot;
    }
    return n;
}
static size_t lora_upload_bytes(const toka_device *dev) {
    return dev->lora ? (size_t)dev->options.max_tokens * 2 * sizeof(int) +
                           (TOKA_MAX_ADAPTERS + 1) * sizeof(lora_part *) + 64
                     : 0;
}
/* Uploads the rows of the step in the order of their adapters. */
static void lora_plan_step(toka_device *dev, const toka_step *step) {
    lora_state *lora = dev->lora;
    int slot_of[TOKA_MAX_ADAPTERS + 1], n_slots = 0;
    const lora_part *blocks[TOKA_MAX_ADAPTERS];
    bool used[TOKA_MAX_ADAPTERS + 1] = {};
    lora->n_rows = lora->n_chunks = 0;
    if (!step->adapters) return;
    for (int t = 0; t < step->T; t++) used[step->adapters[t]] = true;
    for (int i = 0; i <= TOKA_MAX_ADAPTERS; i++) {
        slot_of[i] = i && used[i] ? n_slots : -1;
        if (slot_of[i] < 0) continue;
        assert(lora->of[i].parts);
        blocks[n_slots++] = lora->of[i].parts;
        lora->n_chunks = max(lora->n_chunks, lora->of[i].rank / LORA_RANKS);
    }
    void *rows, *slots;
    lora->step.rows = (const int *)upload_alloc(&dev->upload, (size_t)step->T * sizeof(int), &rows);
    lora->step.slots = (const int *)upload_alloc(&dev->upload, (size_t)step->T * sizeof(int),
                                                 &slots);
    lora->step.blocks = (const lora_part *const *)upload_put(
        &dev->upload, blocks, (size_t)n_slots * sizeof *blocks);
    lora->n_rows = lora_sort_rows(step->adapters, step->T, slot_of, (int *)rows, (int *)slots);
}

/* ---- Loading an adapter ---- */

/* Returns what the GPU does not have of adapters for this layer; NULL: it has all of it. */
static const char *lora_missing(const toka_layer *layer) {
    const toka_tensor *const matrices[] = {&layer->q, &layer->k, &layer->v, &layer->o,
                                           &layer->mlp.gate, &layer->mlp.up, &layer->mlp.down};
    if (layer->mla) return "adapters (LoRA) of multi-head latent attention (MLA)";
    if (layer->moe) return "adapters (LoRA) of models with experts";
    for (const toka_tensor *matrix : matrices)
        if (matrix->dtype == TOKA_FP8) return "adapters (LoRA) of FP8 weights";
    return NULL;
}
static void lora_number_parts(layer_weights *layer, int i) {
    layer->qkv.first_part = i * LORA_N_PARTS + LORA_Q;
    layer->o.first_part = i * LORA_N_PARTS + LORA_O;
    layer->gate_up.first_part = i * LORA_N_PARTS + LORA_GATE;
    layer->down.first_part = i * LORA_N_PARTS + LORA_DOWN;
}
/* Returns the most floats of low that a row needs. */
static size_t lora_low_width(const toka_shape *shape, int max_rank) {
    const size_t chunks = (size_t)ceil_div(max_rank, LORA_RANKS);
    const int E = ceil_div(shape->E, LORA_SLICE), F = ceil_div(shape->F, LORA_SLICE),
              o = ceil_div(shape->H * toka_value_size(shape), LORA_SLICE);
    return (size_t)max(3 * E, max(o, F)) * chunks * LORA_RANKS;
}
static size_t lora_low_bytes(const toka_shape *shape, int max_rank, int max_tokens) {
    const size_t rows = (size_t)ceil_div(max_tokens, LORA_ROWS) * LORA_ROWS;
    return rows * lora_low_width(shape, max_rank) * sizeof(float);
}
/* Returns the bytes of the scratch of adapters: low, and gate and up. */
static size_t lora_scratch_bytes(const toka_shape *shape, const toka_weights *weights,
                                 int max_tokens) {
    if (!weights->adapters) return 0;
    return lora_low_bytes(shape, weights->adapters->max_rank, max_tokens) +
           (size_t)max_tokens * 2 * round_up_8(shape->F) * sizeof(bf16);
}
static void lora_open(toka_device *dev) {
    const toka_shape *shape = dev->shape;
    lora_state *lora = (lora_state *)calloc(1, sizeof *lora);
    if (!lora) abort();
    lora->sources = (lora_source *)calloc((size_t)shape->L * LORA_N_PARTS, sizeof *lora->sources);
    if (!lora->sources) abort();
    for (int i = 0; i < shape->L; i++) {
        const toka_layer *layer = &dev->weights->layers[i];
        const toka_tensor *const matrices[LORA_N_PARTS] = {
            &layer->q, &layer->k, &layer->v, &layer->o, &layer->mlp.gate, &layer->mlp.up,
            &layer->mlp.down};
        for (int k = 0; k < LORA_N_PARTS; k++)
            lora->sources[i * LORA_N_PARTS + k] = lora_source{
                matrices[k]->matrix, matrices[k]->matrix_row, matrices[k]->matrix_col,
                matrices[k]->rows, matrices[k]->cols};
    }
    dev->lora = lora;
    lora->low = (float *)dev_alloc(
        dev, lora_low_bytes(shape, dev->weights->adapters->max_rank, dev->options.max_tokens),
        "adapters");
}
static void lora_close(toka_device *dev) {
    lora_state *lora = dev->lora;
    if (!lora) return;
    for (const lora_block &block : lora->of) cudaFree(block.parts);
    free(lora->sources);
    free(lora);
}

/* Copies n numbers as bf16. */
static void lora_copy_numbers(bf16 *to, const toka_tensor *from, size_t at, int n) {
    if (from->dtype == TOKA_BF16) memcpy((void *)to, (const bf16 *)from->data + at, n * sizeof *to);
    else
        for (int i = 0; i < n; i++)
            to[i] = __float2bfloat16(load_number(from->data, at + (size_t)i, from->dtype));
}
/* Returns the row on the device of row `row` of a part. */
static int lora_row_at(const toka_device *dev, int part, int row) {
    const int kind = part % LORA_N_PARTS, D = dev->shape->D;
    if (kind > LORA_V) return row;
    if (kind < LORA_V)
        row = head_place(head_order_of(dev->weights->layers[part / LORA_N_PARTS].rope, D), row);
    return qkv_is_interleaved(dev, D) ? row / D * D + qkv_interleave(row % D, D / 2) : row;
}
/* Returns the bytes of the numbers of a part. */
static size_t lora_part_bytes(const lora_source *source, int rank) {
    return (size_t)rank * (size_t)(round_up_8(source->rows) + round_up_8(source->cols)) *
           sizeof(bf16);
}
/* Writes A and B of a part, padded with zeros. */
static void lora_write_part(const toka_device *dev, int part, const toka_low_rank *from, int rank,
                            bf16 *a, bf16 *b) {
    const lora_source *source = &dev->lora->sources[part];
    const int K = round_up_8(source->cols);
    memset((void *)a, 0, lora_part_bytes(source, rank));
    for (int i = 0; i < from->a.rows; i++)
        lora_copy_numbers(a + (size_t)i * K, &from->a,
                          (size_t)i * from->a.cols + source->matrix_col, source->cols);
    for (int i = 0; i < source->rows; i++)
        lora_copy_numbers(b + (size_t)lora_row_at(dev, part, i) * rank, &from->b,
                          (size_t)(source->matrix_row + i) * from->b.cols, from->b.cols);
}
/* Lists the parts of an adapter for a block at address `at`, and with host their numbers in a copy
 * of it. Returns the bytes of the block. */
static size_t lora_write_block(const toka_device *dev, const toka_low_rank *from, char *at,
                               char *host, int *max_rank) {
    const int n = dev->shape->L * LORA_N_PARTS;
    size_t bytes = ((size_t)n * sizeof(lora_part) + 15) / 16 * 16;
    for (int i = 0; i < n; i++) {
        const lora_source *source = &dev->lora->sources[i];
        const toka_low_rank *part = &from[source->matrix];
        lora_part to = {};
        if (source->matrix && part->a.rows) {
            to.rank = ceil_div(part->a.rows, LORA_RANKS) * LORA_RANKS;
            const size_t a_bytes = (size_t)to.rank * round_up_8(source->cols) * sizeof(bf16);
            to.a = (const bf16 *)(at + bytes), to.b = (const bf16 *)(at + bytes + a_bytes);
            to.scale = part->scale;
            if (host)
                lora_write_part(dev, i, part, to.rank, (bf16 *)(host + bytes),
                                (bf16 *)(host + bytes + a_bytes));
            bytes += lora_part_bytes(source, to.rank);
            *max_rank = max(*max_rank, to.rank);
        }
        if (host) ((lora_part *)host)[i] = to;
    }
    return bytes;
}
/* Loads an adapter while steps run. Its memory is allocated here, not when the device is opened:
 * what adapters need is not known before. */
static int cuda_set_adapter(toka_device *dev, int number, const toka_low_rank *parts,
                            toka_err *e) {
    lora_block block = {}, *entry = &dev->lora->of[number];
    if (!parts) {
        cudaFree(entry->parts); /* waits for the GPU */
        *entry = block;
        return 0;
    }
    size_t free_bytes = 0, total = 0;
    const size_t bytes = lora_write_block(dev, parts, NULL, NULL, &block.rank);
    cudaError_t code = cudaSetDevice(dev->ordinal);
    if (!code) code = cudaMalloc((void **)&block.parts, bytes);
    char *host = code ? NULL : (char *)malloc(bytes);
    if (!code && !host) abort();
    if (!code) {
        lora_write_block(dev, parts, (char *)block.parts, host, &block.rank);
        code = cudaMemcpy(block.parts, host, bytes, cudaMemcpyHostToDevice);
    }
    free(host);
    if (!code) {
        *entry = block;
        return 0;
    }
    cudaGetLastError();
    cudaMemGetInfo(&free_bytes, &total);
    cudaFree(block.parts);
    e->code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(e->msg, sizeof e->msg,
             "GPU: %s%s: the adapter needs %.3f GB, %.3f of %.3f GB are free "
             "(--gpu-memory-utilization)",
             dev->rank_prefix, cudaGetErrorString(code), bytes / 1e9, free_bytes / 1e9,
             total / 1e9);
    return e->code;
}

/* ===========================================================================
 * MARK: 8. Attention: the work list [host]
 *
 * Turns the spans of a step into lists of work items for the kernels of chapter 9. The lists are
 * arrays of integers. They are made once per step and kind of layers, on the host.
 *
 * Words:
 *   span         consecutive rows that all read one run of KV positions (toka_span). A row can lie
 *                in several spans: first the prefixes that it shares, then the rest.
 *   own span     the last span of a row, if it has no other row: the KV positions that this row
 *                alone reads. (The last span of a prefill chunk has all rows of the chunk.)
 *   own item     the item of an own span
 *   query        one (row, query head) pair inside a kv head. The G query heads of a kv head read
 *                the same K and V, so they are packed: query q of kv head h is row q / G, query
 *                head h*G + q % G.
 *   item         some queries of one span x some KV positions, for every kv head
 *   small item   an item with at most 16 queries: one warp, bound by the bytes of K and V
 *   tile         an item with up to tile_q queries: one CTA, bound by the tensor cores. A span with
 *                more than 16 queries becomes tiles. (Chapter 9 also has tiles of KV positions.)
 *   level        depth of a span in the tree of spans. Levels run one after another on the stream.
 *   state        the (O, LSE) of a row and head, float32, in global memory
 *   split        a part of the KV positions of an item (split-KV)
 *
 * LEVELS. A row that lies in several spans is done level by level. Its first span writes the state.
 * Each later span computes an (O, LSE) from zero, and its epilogue merges the state into it. The
 * last span writes o. So each row has one state, whatever the number of its spans, and the order of
 * all sums is fixed.
 *
 * FUSED. Many rows can share one prefix span and have only their own span after it (samples of one
 * prompt). Then one kernel does the prefix and the own spans (attn_fused: cascade attention,
 * Hydragen). No second level is launched.
 *
 * SPLIT-KV. If the items of a level are too few to fill the GPU, their KV ranges are split. Each
 * split writes its (O, LSE) to split_o and split_lse, and one merge per item follows in the same
 * level (attn_merge_splits). The length of the splits depends on the KV positions of the level; for
 * tiles also on the number of tiles.
 *
 * CTA SPLITS (attn_cta_split). On Hopper the splits of a small item can be in one CTA: one warp per
 * split, merged in shared memory, no merge kernel. A level uses them if each of its small items
 * fits in attn_cta_split_max short splits (attn_cta_split_len) and at least one item needs two.
 *
 * PREFIX GROUPS (attn_plan_prefix_groups). If few rows share prefixes (samples of a few prompts),
 * one CTA takes up to six rows with their own spans and all their shared spans, again one warp per
 * split. One launch replaces the two or three launches of each level. The rows of a group belong to
 * one prompt. If such groups need more CTAs than SMs, and groups of neighbouring rows of any
 * prompts (mixed groups) do not, the groups are mixed.
 *
 * CLUSTER SPLITS (attn_cluster_split). If the step is one level that has only CTA splits, and few
 * CTAs of them, the warps of each CTA are spread over the four CTAs of a cluster.
 *
 * FP8 K AND V. Tiles read bf16 copies of their pages. The pages of all tiles are the first entries
 * of the page table (attn_plan_pages), so that one kernel can unpack them. If they are more than
 * there is space for, each span is unpacked before its tiles (attn_launch_spans). No step runs
 * attn_fused.
 *
 * WINDOWS. Layers with a window have a plan of their own (attn_plan), if there are others. In it
 * each span begins where the window of its rows begins, so that no item is made for positions that
 * no row sees, and splits have equal work (attn_clip_step). A shared span of which little is left
 * becomes a part of the spans below it. So a row of a short window has one span, which reads the
 * window and at most one page more. The pages of these spans are windowed pages (toka.h) if the
 * layers have these. Both plans use the same buffers, because layers run one after another.
 *
 * CHOICE (attn_plan_lists).
 *   1. Prefix groups do the whole step if it has two or more levels, the last span of each row is
 *      an own span, the KV work is at most group_max_work, and each group fits in one CTA.
 *   2. Else attn_fused does prefixes and the own spans of their rows, if the layers have no window
 *      and there are enough rows (fused_min_row_heads).
 *   3. All other spans are done level by level: tiles, small items or CTA splits, merges.
 * On the stream attn_fused comes after all levels. Where the Hopper kernels cannot run (other GPUs,
 * B < 64, D < 64 or D > 256), there are only levels, with attn_mma and attn_merge_splits. For
 * D > 128 there are levels without CTA splits.
 *
 * What toka.c guarantees: the spans of a row come in rising kv0. Of two spans that share a row, the
 * earlier one has all rows of the later one (a tree of intervals).
 *
 * Cost of a plan: O(levels * (spans + rows) + pages in use); for 8,192 sequences with a shared
 * prefix 0.15 to 0.3 ms.
 * =========================================================================== */

enum {
    ATTN_TILE_Q = 64,     /* queries of a tile on mma.sync */
    ATTN_SMALL_Q = 16,    /* maximum queries of a small item, and of a split buffer */
    ATTN_MIN_SPLIT = 128, /* minimum KV positions of a split of a small item */
    ATTN_LONG_SPLIT = 2048, /* splits of small items that are longer are made shorter */
    /* If the small items of a level have fewer positions than this on average, attn_small uses two
     * ring buffers instead of three at D > 64 (attn_level.short_items). */
    ATTN_SHORT_KV = 128,
    /* If the spans of a level's tiles have at least this many positions on average, attn_wgmma uses
     * tiles of 192 positions at D > 96 (attn_level.long_tiles), unless a window is shorter. */
    ATTN_LONG_KV = 3000,
    /* maximum rows and maximum queries of an item of attn_fused */
    ATTN_FUSED_ROWS = 32, ATTN_FUSED_Q = 128,
    /* largest D of attn_fused (the comment of the kernel says why) */
    ATTN_FUSED_D = NVCC_VERSION < 1208 ? 64 : 128,
    /* maximum positions of an own span of attn_fused: one warp processes them serially */
    ATTN_FUSED_OWN = 1024,
    /* fixed cost of an own span of attn_fused, estimated, in KV positions */
    ATTN_OWN_COST = 24,
    /* The cost of merging splits of tiles, in KV positions of a tile: fixed; and how many queries,
     * and how many queries times splits, cost as much as one position. */
    ATTN_MERGE_COST = 250, ATTN_MERGE_QUERIES = 10, ATTN_MERGE_SPLITS = 70,
    ATTN_SM_WARPS = 16,       /* small items that are in flight on an SM, estimated */
    ATTN_CTA_SPLIT_MIN = 64,  /* minimum KV positions of a CTA split */
    ATTN_CTA_SPLIT_STEP = 32, /* the length of a CTA split is a multiple of this */
    ATTN_PREFIX_GROUP = 6,    /* maximum rows of a prefix group; each row has at least one split */
    /* Prefix groups are used up to this many KV positions read, times kv heads, per SM: with
     * D <= 64, with larger D, and with larger D if attn_fused could do the step. Above it the other
     * kernels are faster. */
    ATTN_GROUP_WORK_64 = 2400, ATTN_GROUP_WORK_128 = 1900, ATTN_GROUP_WORK_FUSED = 900,
    /* attn_fused is used from this many rows, times kv heads, per SM. With eight kv heads and 132
     * SMs that is from 66 rows on (test/results/kernel-choices.md). */
    ATTN_FUSED_ROW_HEADS = 4,
    ATTN_CLUSTER = 4,         /* CTAs of a cluster of attn_cluster_split */
    ATTN_FP8_TOK = 32,        /* positions of a tile of attn_small with FP8 K and V */
    ATTN_PREFETCH_ROWS = 8,   /* maximum rows of a step for attn_can_prefetch */
};

/* Maximum warps (splits) of a CTA of attn_cta_split. The limit is shared memory for D <= 64, and
 * registers for larger D. */
__host__ __device__ static constexpr int attn_cta_split_max(int D) {
    return D <= 64 ? 14 : 12;
}
/* Older nvcc spill one register of attn_cta_split<128, ..., FP8>, so they do not compile it. */
enum {
    ATTN_FP8_CTA_SPLIT_D = NVCC_VERSION < 1209 ? 64 : 128,
    ATTN_FP8_BUFS = NVCC_VERSION < 1209 ? 3 : 2 /* of its ring */
};

/* The tensor maps of a layer. Their names give the rows of a box. PAIR: one box has K and V
 * (attn_open_pair_map). */
enum { ATTN_MAP_8, ATTN_MAP_16, ATTN_MAP_32, ATTN_MAP_64, ATTN_MAP_PAIR, ATTN_MAPS };
/* The bits of attn_item.flags and attn_merge.flags. An item with neither TO_O nor TO_STATE is a
 * split: it writes to split_o and split_lse. The kernels of CTA splits read only the flags of the
 * merge, not those of the splits. The bits from ATTN_INDEX_SHIFT up hold an index. */
enum {
    ATTN_MERGE_STATE = 1, /* merge the state of the rows in the epilogue */
    ATTN_TO_O = 2,        /* write o */
    ATTN_TO_STATE = 4,    /* write state_o and state_lse */
    ATTN_INDEX_SHIFT = 3  /* position of the index in flags */
};

typedef struct attn_item {
    int q0;             /* first query, row*G + g; the same for every kv head */
    short nq, skip;     /* number of queries; positions kv0 .. kv0+skip-1 are not of this span */
    int kv0, kv1;       /* positions kv0 .. kv1-1; kv0 is a multiple of B */
    int page0;          /* index in attn_plan.dev_pages of the page of kv0 */
    int pos_lo, pos_hi; /* lowest and highest position of the rows */
    /* ATTN_* bits, and from ATTN_INDEX_SHIFT up an index. For a split: its first split buffer. For
     * an item of attn_fused: the own item of its first row, counted from attn_plan.fused0. */
    int flags;
} attn_item;

typedef struct attn_merge { /* merges the splits of one item, or of the rows of a prefix group */
    int q0, nq;             /* first query, number of queries */
    /* n_splits: number of splits. Their buffers or items follow one another. first: split buffer of
     * the first split; for CTA splits: its index among the small items of the level. */
    int first, n_splits;
    int flags; /* bits as in attn_item.flags; no index */
} attn_merge;

typedef struct attn_level {
    /* Ranges of attn_plan.items (tiles, small items) and of attn_plan.merges. */
    int tile0, n_tiles, small0, n_small, merge0, n_merges;
    int merge_nq; /* largest nq of these merges */
    /* short_items: the small items have fewer than ATTN_SHORT_KV positions on average. long_tiles:
     * the spans of the tiles have at least ATTN_LONG_KV positions on average. */
    bool short_items, long_tiles;
    /* cta_split0, n_cta_splits: the merges of CTA splits, a range of attn_plan.merges; there is one
     * CTA per merge and kv head. If there are any, all small items of the level are CTA splits, and
     * n_small is 0. cta_split_warps: the largest number of splits of one CTA. */
    int cta_merge0, n_cta_merges, cta_split_warps;
    int cta_split_len; /* while planning: KV positions of a CTA split; 0: no CTA splits */
} attn_level;

typedef struct attn_span_plan { /* one toka_span, while planning */
    /* level: level of the span. page0: index of its first page in dev_pages. flags: those of its
     * items, without an index. */
    int level, page0, flags;
    int parent; /* the previous span of its rows; -1: none */
    /* small: the span is one small item. fused: attn_fused does the span. */
    bool small, fused;
    int n_items; /* number of items of attn_fused that this span becomes */
    int tile0, n_tiles; /* its tiles, a range of attn_plan.items */
    int n_pages;        /* entries of dev_pages */
} attn_span_plan;

/* A span of a step, for layers with a window (attn_clip_step). */
typedef struct attn_clip {
    int from; /* its first position: kv0, or that of its parent if the parent is no span any more */
    bool kept;
} attn_clip;

/* While planning attn_fused: the load of CTA `id` so far, or the negated cost of job `id`. */
typedef struct attn_cta_load {
    int load, id;
} attn_cta_load;

struct attn_plan {
    toka_device *dev;
    int B, D;     /* as in toka_shape; D is the size of a value */
    bool is_latent; /* MLA: attn_latent does all items, as tiles */
    int window;   /* the widest window of the layers of this plan; 0: they have none */
    int K, n_sms; /* kv heads and SMs for which the work is split: see attn_agree */
    /* G: query heads of a kv head. small_rows: maximum rows of a small item. tile_q: queries of a
     * tile. */
    int G, small_rows, tile_q;
    /* capacities of the lists; max_split_bufs: number of split buffers */
    int max_items, max_merges, max_spans, max_levels, max_split_bufs;
    bool hopper;                /* the Hopper kernels (TMA) can run */
    bool any_fp8;               /* any layer has FP8 K and V */
    /* With any_fp8 (attn_unpack): bf16 copies of up to max_unpacked pages, and the numbers 0, 1, 2
     * ... as their page table. */
    bf16 *unpacked;
    int *unpacked_pages;
    int max_unpacked;
    bool has_fused;             /* attn_fused can run */
    CUtensorMap *maps;          /* [L][ATTN_MAPS] or NULL */
    size_t max_pages;           /* capacity of dev_pages */
    float *state_o, *state_lse; /* [T][H][D], [T][H]: the states; base-2 LSE */
    float *split_o, *split_lse; /* [max_split_bufs][K][16][D], [max_split_bufs][K][16] */
    float *exchange;            /* attn_fused, D = 128: [n_sms][2][ATTN_FUSED_Q][D] */
    attn_span_plan *spans;      /* [max_spans] */
    attn_level *levels;         /* [max_levels] */
    uint16_t *row_level;        /* [max_tokens] while planning: number of spans of the row */
    int *row_span;              /* [max_tokens] the last span of the row */
    /* Of the current step. n_split_bufs: split buffers that the level being planned uses so far. */
    int n_levels, n_items, n_merges, n_split_bufs;
    /* Number of items that are still to be emitted, if none of them is split. Splitting must leave
     * space for them in the list. */
    int n_unsplit;
    int n_spans;      /* of the step */
    int n_tile_pages; /* entries of dev_pages that tiles read; they are the first ones */
    /* limits of all SMs: ATTN_GROUP_WORK_*, ATTN_FUSED_ROW_HEADS */
    int64_t group_max_work, group_max_work_fused;
    int fused_min_row_heads;
    /* prefix_groups: the step uses prefix groups. mixed_groups: they may mix rows of different
     * prompts. */
    bool prefix_groups, mixed_groups;
    int group_min_split;              /* minimum KV positions of a split of a prefix group */
    bool allow_clusters, allow_mixed; /* allow cluster splits, mixed groups; false only in tests */
    int fused0, n_fused;              /* range of `items` for attn_fused; own items follow it */
    attn_cta_load *ctas, *round_jobs; /* [n_sms] */
    int grid, n_rounds;               /* attn_fused: number of CTAs; number of rounds of jobs */
    /* [n_rounds][grid] the job of each CTA: item * K + kv head, or -1 (only in the last round) */
    const int *dev_jobs;
    attn_merge *merges;           /* [max_merges] the merges of this step, on the host */
    attn_item *items;             /* the items of this step, in dev->upload's host buffer */
    const attn_item *dev_items;   /* the same items on the device */
    const attn_merge *dev_merges; /* the same merges on the device */
    const int *dev_pages;         /* page table entries of all spans, on the device */
    bool prefetch;                /* result of attn_can_prefetch */
    bool is_alone;                /* no other plan of the step has more than one launch */
    /* With a window, the step as the layers see it (attn_clip_step): its spans [max_spans], its
     * pages [max_pages], and by span of the original step what became of it [max_spans]. */
    toka_step clipped_step;
    toka_span *clipped_spans;
    int *clipped_pages;
    attn_clip *clips;
};

/* Sets the capacities, the limits and the properties of the shape. */
static void attn_plan_sizes(const toka_device *dev, attn_plan *plan) {
    const toka_shape *shape = dev->shape;
    int T = dev->options.max_tokens, G = shape->H / shape->K,
        seq_pages = ceil_div(shape->max_len, shape->B);
    /* one more page per row: a shared span and an own span can both list the page in which the
     * shared prefix ends */
    int64_t pages = (int64_t)T * (seq_pages + 1);
    plan->is_latent = kv_is_latent(shape);
    plan->hopper = dev->hopper && shape->B >= 64 && shape->D >= 64 && shape->D <= 256 &&
                   dev->kv_layer_elems / shape->D < INT_MAX && !plan->is_latent;
    plan->B = shape->B, plan->D = toka_value_size(shape);
    plan->any_fp8 = kv_any_fp8(dev);
    plan->max_unpacked = (int)(toka_gpu_unpacked_bytes(shape) /
                               (4 * (size_t)shape->K * shape->B * shape->D));
    plan->has_fused = plan->hopper && !plan->any_fp8 && !plan->window && G <= 8 &&
                      shape->attn_cap == 0 &&
                      (shape->D == 64 || shape->D == ATTN_FUSED_D);
    plan->G = G, plan->small_rows = plan->is_latent ? 0 : ATTN_SMALL_Q / G;
    plan->tile_q = !plan->hopper ? ATTN_TILE_Q : shape->D == 64 ? 192 : 128;
    plan->max_spans = 2 * T + 64;
    plan->max_levels = seq_pages + 1;
    plan->max_pages = (size_t)(pages < 1 << 24 ? pages : 1 << 24);
    if (plan->window)
        plan->max_pages = min(plan->max_pages, (size_t)plan->max_spans *
                                                   (size_t)(plan->window / shape->B + 3));
    /* 1.5 times the number of split buffers that attn_small_split_len and attn_tile_split_len aim
     * at, plus 64. If no split buffer is left, ranges are not split. */
    plan->max_split_bufs = plan->n_sms * (ATTN_SM_WARPS + plan->tile_q / ATTN_SMALL_Q) * 3 / 2 /
                               plan->K +
                           64;
    plan->max_merges = 2 * plan->max_split_bufs;
    const int64_t n_sms = plan->n_sms;
    plan->group_max_work = n_sms * (shape->D <= 64 ? ATTN_GROUP_WORK_64 : ATTN_GROUP_WORK_128);
    plan->group_max_work_fused = n_sms *
                                 (shape->D <= 64 ? ATTN_GROUP_WORK_64 : ATTN_GROUP_WORK_FUSED);
    plan->fused_min_row_heads = plan->n_sms * ATTN_FUSED_ROW_HEADS;
    plan->allow_clusters = plan == dev->attn, plan->allow_mixed = true;
    /* `levels` bounds the number of shared spans per row, on average over all rows:
     * 1. Chapter 21 of toka.c shares a span of R rows only if this saves reading more than
     *    merge_tok * R positions.
     * 2. Shared spans can be nested. If a span has g positions, and r of its R rows are in no
     *    deeper shared span, it saves at most about r g positions. So r g > merge_tok R.
     * 3. It follows that the sum of R over all shared spans is at most T sqrt(max_len /
     *    merge_tok). */
    const int max_shared_spans = 12 + (int)sqrt((double)shape->max_len / toka_cuda.merge_cost);
    plan->max_items = plan->max_spans + plan->max_split_bufs +
                      max_shared_spans * ceil_div(T * G, plan->tile_q);
}

/* Allocates a plan and its host memory. window: of its layers. */
static attn_plan *attn_plan_new(toka_device *dev, int window) {
    attn_plan *plan = (attn_plan *)calloc(1, sizeof *plan);
    if (!plan) abort();
    if (!dev->attn) dev->attn = plan;
    plan->dev = dev, plan->window = window;
    plan->K = dev->shape->K, plan->n_sms = dev->n_sms;
    attn_plan_sizes(dev, plan);
    const size_t T = (size_t)dev->options.max_tokens, n_spans = (size_t)plan->max_spans;
    plan->spans = (attn_span_plan *)malloc(n_spans * sizeof *plan->spans);
    plan->levels = (attn_level *)malloc((size_t)plan->max_levels * sizeof *plan->levels);
    plan->merges = (attn_merge *)malloc((size_t)plan->max_merges * sizeof *plan->merges);
    plan->row_level = (uint16_t *)malloc(T * sizeof *plan->row_level);
    plan->row_span = (int *)malloc(T * sizeof *plan->row_span);
    plan->ctas = (attn_cta_load *)malloc((size_t)dev->n_sms * sizeof *plan->ctas);
    plan->round_jobs = (attn_cta_load *)malloc((size_t)dev->n_sms * sizeof *plan->round_jobs);
    if (!plan->spans || !plan->levels || !plan->merges || !plan->row_level || !plan->row_span ||
        !plan->ctas || !plan->round_jobs)
        abort();
    if (!window) return plan;
    plan->clipped_spans = (toka_span *)malloc(n_spans * sizeof *plan->clipped_spans);
    plan->clipped_pages = (int *)malloc(plan->max_pages * sizeof *plan->clipped_pages);
    plan->clips = (attn_clip *)malloc(n_spans * sizeof *plan->clips);
    if (!plan->clipped_spans || !plan->clipped_pages || !plan->clips) abort();
    return plan;
}

/* Makes the plans of the device: one, or two if some layers have a window and others have none. The
 * caller has set shape, options, n_sms, hopper, kv_layer_elems, and layers or NULL (no windows). */
static void attn_plan_open(toka_device *dev) {
    const toka_shape *shape = dev->shape;
    assert(shape->D % 8 == 0 && (kv_is_latent(shape) || shape->D <= 256) &&
           shape->H % shape->K == 0 && shape->B >= 16 && (shape->B & (shape->B - 1)) == 0);
    int widest = 0, n_windowed = 0;
    for (int i = 0; i < shape->L && dev->layers; i++)
        n_windowed += dev->layers[i].window > 0, widest = max(widest, dev->layers[i].window);
    const bool both = n_windowed && n_windowed < shape->L;
    dev->attn = NULL;
    attn_plan_new(dev, both ? 0 : widest);
    dev->attn_windowed = both ? attn_plan_new(dev, widest) : NULL;
}

/* Makes all tensor ranks plan alike. K: the largest number of kv heads of a rank; n_sms: the
 * smallest number of SMs. Otherwise the ranks could need different numbers of attention launches
 * and so choose different graphs (chapter 15). Then their all-reduces would add up different rows.
 * The buffers of this rank were sized for at most K heads and at least n_sms SMs, so they are large
 * enough. */
static void attn_agree(toka_device *dev, int K, int n_sms) {
    for (attn_plan *plan : {dev->attn, dev->attn_windowed}) {
        if (!plan) continue;
        assert(K >= plan->K && n_sms <= plan->n_sms);
        plan->K = K, plan->n_sms = n_sms;
        attn_plan_sizes(dev, plan);
    }
}

/* Frees the host memory. The device memory is freed with all other allocations. */
static void attn_close(toka_device *dev) {
    if (dev->attn) free(dev->attn->maps);
    for (attn_plan *plan : {dev->attn, dev->attn_windowed}) {
        if (!plan) continue;
        free(plan->spans), free(plan->levels), free(plan->merges), free(plan->row_level);
        free(plan->row_span), free(plan->ctas), free(plan->round_jobs);
        free(plan->clipped_spans), free(plan->clipped_pages), free(plan->clips);
        free(plan);
    }
    dev->attn = dev->attn_windowed = NULL;
}

/* Maximum bytes of dev->upload that attn_plan_step takes. */
static size_t attn_upload_bytes(const toka_device *dev) {
    size_t bytes = 0;
    for (const attn_plan *plan : {dev->attn, dev->attn_windowed}) {
        if (!plan) continue;
        bytes += (size_t)plan->max_items * sizeof(attn_item) +
                 (size_t)plan->max_merges * sizeof(attn_merge) + plan->max_pages * sizeof(int) + 64;
        /* the jobs of attn_fused, in the worst case one item per row */
        if (plan->has_fused)
            bytes += ((size_t)dev->options.max_tokens * dev->shape->K + (size_t)dev->n_sms) *
                     sizeof(int);
    }
    return bytes;
}

/* Finds the level of each span, and whether it is the last span of its rows. All small spans that
 * are the last of their rows move to the last level, so that one launch does them. */
static void attn_plan_levels(attn_plan *plan, const toka_step *step) {
    memset(plan->row_level, 0, (size_t)step->T * sizeof *plan->row_level);
    plan->n_levels = 0;
    for (int i = 0; i < step->n_spans; i++) {
        const toka_span *span = &step->spans[i];
        int level = plan->row_level[span->row0];
        plan->spans[i].parent = level ? plan->row_span[span->row0] : -1;
        for (int row = span->row0; row < span->row0 + span->n_rows; row++) {
            assert(plan->row_level[row] == level);
            plan->row_level[row] = (uint16_t)(level + 1), plan->row_span[row] = i;
        }
        plan->spans[i].level = level, plan->spans[i].small = span->n_rows <= plan->small_rows;
        plan->n_levels = max(plan->n_levels, level + 1);
    }
    assert(plan->n_levels <= plan->max_levels);
    for (int i = 0; i < step->n_spans; i++) {
        const toka_span *span = &step->spans[i];
        attn_span_plan *span_plan = &plan->spans[i];
        bool last = plan->row_level[span->row0] == span_plan->level + 1;
        span_plan->flags = (span_plan->level ? ATTN_MERGE_STATE : 0) |
                           (last ? ATTN_TO_O : ATTN_TO_STATE);
        if (last && span_plan->small) span_plan->level = plan->n_levels - 1;
    }
}

/* log2 of the maximum rows of an item of attn_fused. The maximum is a power of two, so that the
 * kernel finds a row by a shift. */
static int attn_fused_log2_rows(const attn_plan *plan) {
    int n = 0;
    while (2 << n <= ATTN_FUSED_ROWS && 2 * plan->G << n <= ATTN_FUSED_Q) n++;
    return n;
}

/* Can attn_fused do this span as a prefix, together with the own spans of its rows? After it each
 * row must have exactly one more span, an own span of at most ATTN_FUSED_OWN positions. All rows
 * must see the whole prefix. */
static bool attn_fits_fused(const attn_plan *plan, const toka_step *step, int span_id) {
    const toka_span *span = &step->spans[span_id];
    if (plan->spans[span_id].flags & ATTN_TO_O || !span->n_kv) return false;
    for (int row = span->row0; row < span->row0 + span->n_rows; row++) {
        const toka_span *own_span = &step->spans[plan->row_span[row]];
        if (plan->row_level[row] != plan->spans[span_id].level + 2 || own_span->n_rows > 1 ||
            own_span->n_kv > ATTN_FUSED_OWN)
            return false;
        if (step->pos[row] < span->kv0 + span->n_kv) return false;
    }
    return true;
}
/* Is this the only span of its only row, and short enough for one warp? Then attn_fused can do it
 * as an own span without a prefix (a single row). */
static bool attn_single_row(const attn_plan *plan, const toka_step *step, int span_id) {
    return step->spans[span_id].n_rows == 1 &&
           plan->row_level[step->spans[span_id].row0] == 1 &&
           step->spans[span_id].n_kv <= ATTN_FUSED_OWN;
}

/* Chooses the spans that attn_fused does: all that it can, if they have enough rows to fill the
 * SMs. Small prefix spans and single rows are included only if they have at most a quarter as many
 * items as the other spans. Otherwise they are done level by level, in one to four more
 * launches. */
static void attn_plan_fused(attn_plan *plan, const toka_step *step) {
    int n_large = 0, n_small = 0, rows = 0; /* items of large and small spans; rows of large ones */
    for (int i = 0; i < step->n_spans; i++) {
        attn_span_plan *span_plan = &plan->spans[i];
        span_plan->fused = plan->has_fused &&
                           (attn_fits_fused(plan, step, i) || attn_single_row(plan, step, i));
        span_plan->n_items = span_plan->fused
                                 ? ceil_div(step->spans[i].n_rows, 1 << attn_fused_log2_rows(plan))
                                 : 0;
        *(span_plan->small ? &n_small : &n_large) += span_plan->n_items;
        rows += span_plan->fused && !span_plan->small ? step->spans[i].n_rows : 0;
    }
    bool enough = rows * plan->K >= plan->fused_min_row_heads,
         with_small = enough && n_small * 4 <= n_large;
    plan->n_fused = enough ? n_large + with_small * n_small : 0;
    for (int i = 0; i < step->n_spans; i++) {
        attn_span_plan *span_plan = &plan->spans[i];
        /* an own span below a prefix: the loop over the rows of its prefix span sets it */
        if ((span_plan->flags & ATTN_TO_O) && (span_plan->flags & ATTN_MERGE_STATE)) continue;
        span_plan->fused = span_plan->fused && (span_plan->small ? with_small : enough);
        for (int row = step->spans[i].row0;
             !(span_plan->flags & ATTN_TO_O) && row < step->spans[i].row0 + step->spans[i].n_rows;
             row++)
            plan->spans[plan->row_span[row]].fused = span_plan->fused &&
                                                     plan->row_level[row] == span_plan->level + 2;
    }
}

/* True for the spans from which the items of attn_fused are made: prefixes, and single rows without
 * a prefix. False for the own spans below a prefix. */
static bool attn_is_fused_prefix(const attn_plan *plan, int span_id) {
    return plan->spans[span_id].fused && !((plan->spans[span_id].flags & ATTN_TO_O) &&
                                           (plan->spans[span_id].flags & ATTN_MERGE_STATE));
}

/* Divides the rows of prefix spans into more items, until every SM also has a job in the last
 * round, or until every item has only one row. Each pass gives one more item to the span with the
 * most rows per item. A job is an item and a kv head (attn_plan_jobs). */
static void attn_plan_rounds(attn_plan *plan, const toka_step *step) {
    auto rows_per_item = [&](int i) {
        return (float)step->spans[i].n_rows / (float)plan->spans[i].n_items;
    };
    while (plan->n_fused * plan->dev->shape->K % plan->dev->n_sms) {
        int largest = -1;
        for (int i = 0; i < step->n_spans; i++)
            if (!plan->spans[i].small && attn_is_fused_prefix(plan, i) &&
                (largest < 0 || rows_per_item(i) > rows_per_item(largest)))
                largest = i;
        if (largest < 0 || rows_per_item(largest) < 2) return;
        plan->spans[largest].n_items++, plan->n_fused++;
    }
}

/* Uploads the page table entries of all spans, one span after the other. Returns false, with
 * dev->error set, if there are too many. */
static bool attn_plan_pages(attn_plan *plan, const toka_step *step) {
    int64_t n_pages = 0;
    void *host;
    int B = plan->B, log2_B = __builtin_ctz(B);
    auto span_pages = [&](const toka_span *span) {
        return ((span->kv0 & (B - 1)) + span->n_kv + B - 1) >> log2_B;
    };
    for (bool small : {false, true}) {
        for (int i = 0; i < step->n_spans; i++) {
            if (plan->spans[i].small != small) continue;
            attn_span_plan *span = &plan->spans[i];
            span->page0 = (int)n_pages, span->n_pages = span_pages(&step->spans[i]);
            span->n_tiles = 0;
            n_pages += span->n_pages;
        }
        if (!small) plan->n_tile_pages = plan->prefix_groups ? 0 : (int)n_pages;
    }
    if (n_pages > (int64_t)plan->max_pages) {
        plan->dev->error.code = TOKA_E_DEVICE;
        snprintf(plan->dev->error.msg, sizeof plan->dev->error.msg,
                 "GPU: attention: the step names %lld pages, there is room for %zu",
                 (long long)n_pages, plan->max_pages);
        return false;
    }
    plan->dev_pages = (const int *)upload_alloc(&plan->dev->upload, (size_t)n_pages * sizeof(int),
                                                &host);
    for (int i = 0; i < step->n_spans; i++) {
        if (i + 8 < step->n_spans) __builtin_prefetch(step->pages + step->spans[i + 8].page0);
        memcpy((int *)host + plan->spans[i].page0, step->pages + step->spans[i].page0,
               (size_t)span_pages(&step->spans[i]) * sizeof(int));
    }
    return true;
}

/* KV positions of a split of small items: the KV work of all small items of the level (positions
 * times kv heads) divided by the warps that are in flight, at least ATTN_MIN_SPLIT. If that is much
 * work, 3/5 of it: the merge costs less than the warps that are idle at the end. */
static int attn_small_split_len(const attn_plan *plan, int64_t kv_positions) {
    int64_t len = kv_positions * plan->K / (plan->n_sms * ATTN_SM_WARPS);
    if (len > ATTN_LONG_SPLIT) len = len * 3 / 5;
    return len < ATTN_MIN_SPLIT ? ATTN_MIN_SPLIT : len < INT_MAX / 2 ? (int)len : INT_MAX / 2;
}
/* KV positions of a split of tiles. Tiles run one per SM, in waves. The function finds the number
 * of splits per tile for which this cost is lowest. Its unit is the time of one KV position of a
 * tile; len is the mean number of positions of a tile:
 *
 *      waves * len / n_splits + merge cost
 *      merge cost = ATTN_MERGE_COST + queries / ATTN_MERGE_QUERIES
 *                   + queries * n_splits / ATTN_MERGE_SPLITS; 0 without splits
 *
 * A split has at least 2 * ATTN_MIN_SPLIT positions. More than two waves of tiles are not split.
 * Returns INT_MAX / 2 if the tiles are not split. The merge cost is fitted to measurements
 * (test/results/kernel-choices.md). */
static int attn_tile_split_len(const attn_plan *plan, int64_t kv_positions, int n_tiles) {
    int64_t items = (int64_t)n_tiles * plan->K, len = kv_positions / max(n_tiles, 1),
            best_splits = 1;
    int64_t queries = items * plan->tile_q,
            min_cost = (items + plan->n_sms - 1) / plan->n_sms * len;
    if (items > 2 * plan->n_sms) return INT_MAX / 2;
    for (int64_t n_splits = 2; n_splits <= len / (2 * ATTN_MIN_SPLIT); n_splits++) {
        int64_t waves = (items * n_splits + plan->n_sms - 1) / plan->n_sms,
                merge_cost = ATTN_MERGE_COST + queries / ATTN_MERGE_QUERIES +
                             queries * n_splits / ATTN_MERGE_SPLITS;
        int64_t cost = waves * ((len + n_splits - 1) / n_splits) + merge_cost;
        if (cost < min_cost) best_splits = n_splits, min_cost = cost;
    }
    return best_splits == 1 ? INT_MAX / 2 : (int)((len + best_splits - 1) / best_splits);
}

/* Appends an item. If the list is full, the item is only counted; attn_plan_lists reports the
 * error. */
static void attn_add_item(attn_plan *plan, const attn_item *item) {
    if (plan->n_items < plan->max_items) plan->items[plan->n_items] = *item;
    plan->n_items++;
}

/* Emits n_splits splits of split_len positions (split_pages pages), and their merge. */
static void attn_emit_splits(attn_plan *plan, attn_level *level, const attn_item *item,
                             int n_splits, int split_len, int split_pages) {
    plan->merges[plan->n_merges++] =
        attn_merge{item->q0, item->nq, plan->n_split_bufs, n_splits, item->flags};
    level->merge_nq = max(level->merge_nq, item->nq);
    for (int i = 0; i < n_splits; i++, plan->n_split_bufs += ceil_div(item->nq, ATTN_SMALL_Q)) {
        attn_item *split = &plan->items[plan->n_items++];
        *split = *item;
        split->kv0 = item->kv0 + i * split_len, split->kv1 = min(split->kv0 + split_len, item->kv1),
        split->skip = i ? 0 : item->skip;
        split->page0 = item->page0 + i * split_pages,
        split->flags = plan->n_split_bufs << ATTN_INDEX_SHIFT;
    }
}

/* For D > 128 the ring of a warp is so large that a CTA would have room for few of them. */
static bool attn_has_cta_split(const attn_plan *plan) {
    return plan->D <= (plan->any_fp8 ? (int)ATTN_FP8_CTA_SPLIT_D : 128);
}
/* KV positions of a CTA split of a level. The level has n_items small items with kv_positions in
 * total; the longest item has max_len. Returns 0 if the level has no CTA splits. A CTA split has at
 * most 128 positions. One warp takes too long for more: splits over all SMs and attn_merge_splits
 * are then faster (test/results/kernel-choices.md). */
static int attn_cta_split_len(const attn_plan *plan, int64_t kv_positions, int n_items,
                              int max_len) {
    const int max_split = 128, multiple = ATTN_CTA_SPLIT_STEP,
              max_warps = attn_cta_split_max(plan->D);
    int split_len = (int)(kv_positions * plan->K / (plan->n_sms * ATTN_SM_WARPS));
    split_len = max((int)ATTN_CTA_SPLIT_MIN,
                    ceil_div(min(split_len, max_split), multiple) * multiple);
    if (n_items * plan->K <= plan->n_sms)
        split_len = max(split_len, ceil_div(ceil_div(max_len, max_warps), multiple) * multiple);
    bool fits = plan->hopper && attn_has_cta_split(plan) && split_len <= max_split &&
                max_len > split_len &&
                max_len <= split_len * max_warps && n_items <= plan->max_merges - plan->n_merges;
    return fits && n_items * ceil_div(max_len, split_len) <=
                       plan->max_items - plan->n_items - (plan->n_unsplit - n_items)
               ? split_len
               : 0;
}
/* Emits the CTA splits of one item. kv0 of a split is the start of a page, as for every item. If
 * the split begins within a page, `skip` covers the positions before it. */
static void attn_emit_cta_splits(attn_plan *plan, const attn_item *item, int split_len) {
    for (int i = 0, n_splits = max(1, ceil_div(item->kv1 - item->kv0, split_len)); i < n_splits;
         i++) {
        attn_item *split = &plan->items[plan->n_items++];
        *split = *item;
        const int offset = i * split_len, page = offset / plan->B;
        split->kv0 = item->kv0 + page * plan->B,
        split->kv1 = min(item->kv0 + offset + split_len, item->kv1);
        split->skip = (short)(i ? offset % plan->B : item->skip),
        split->page0 = item->page0 + page;
    }
}
/* Emits the merge of the CTA splits that were emitted from first_item on. They run in one CTA. */
static void attn_emit_cta_merge(attn_plan *plan, attn_level *level, int first_item, int q0, int nq,
                                int flags) {
    const int n_splits = plan->n_items - first_item;
    plan->merges[plan->n_merges++] =
        attn_merge{q0, nq, first_item - level->small0, n_splits, flags};
    level->n_cta_merges++, level->cta_split_warps = max(level->cta_split_warps, n_splits);
}

/* Emits one item: as CTA splits if the level has them, else whole or in splits of about target_len
 * positions. */
static void attn_emit_item(attn_plan *plan, attn_level *level, const attn_item *item,
                           int target_len) {
    int len = item->kv1 - item->kv0;
    plan->n_unsplit--;
    if (level->cta_split_len) {
        const int first_item = plan->n_items;
        attn_emit_cta_splits(plan, item, level->cta_split_len);
        attn_emit_cta_merge(plan, level, first_item, item->q0, item->nq, item->flags);
        return;
    }
    if (len >= target_len + target_len / 2) {
        int split_pages = ceil_div(ceil_div(len, (len + target_len / 2) / target_len),
                                   plan->B),
            split_len = split_pages * plan->B;
        int n_splits = ceil_div(len, split_len),
            n_bufs = plan->n_split_bufs + n_splits * ceil_div(item->nq, ATTN_SMALL_Q);
        bool fits = n_bufs <= plan->max_split_bufs &&
                    plan->n_items + n_splits <= plan->max_items - plan->n_unsplit &&
                    plan->n_merges < plan->max_merges;
        if (n_splits > 1 && fits) {
            attn_emit_splits(plan, level, item, n_splits, split_len, split_pages);
            return;
        }
    }
    attn_add_item(plan, item);
}

/* The item of nq queries of a span, from q0 on, before splitting. first_row .. last_row are the
 * rows of the queries. */
static attn_item attn_item_of(const attn_plan *plan, const toka_step *step, int span_id, int q0,
                              int nq, int first_row, int last_row) {
    const toka_span *span = &step->spans[span_id];
    const attn_span_plan *span_plan = &plan->spans[span_id];
    attn_item item = {.q0 = q0,
                      .nq = (short)nq,
                      .pos_lo = INT_MAX,
                      .pos_hi = -1,
                      .flags = span_plan->flags};
    for (int row = first_row; row <= last_row; row++) {
        item.pos_lo = min(item.pos_lo, step->pos[row]);
        item.pos_hi = max(item.pos_hi, step->pos[row]);
    }
    item.kv1 = max(span->kv0, min(span->kv0 + span->n_kv, item.pos_hi + 1));
    int from = span->kv0; /* a tile may begin behind its span: only its own rows' window counts */
    if (plan->window) from = min(max(from, item.pos_lo - plan->window + 1), item.kv1);
    item.skip = (short)(from & (plan->B - 1)), item.kv0 = from - item.skip;
    item.page0 = span_plan->page0 + item.kv0 / plan->B - span->kv0 / plan->B;
    return item;
}
/* The most KV positions of an item of the span, before splitting. */
static int attn_item_len(const attn_plan *plan, const toka_step *step, int span_id) {
    const int n_kv = step->spans[span_id].n_kv, tile_rows = ceil_div(plan->tile_q, plan->G) + 1;
    return plan->window && !plan->spans[span_id].small ? min(n_kv, plan->window + tile_rows) : n_kv;
}

/* Number of items of a span before splitting. */
static int attn_span_items(const attn_plan *plan, const toka_step *step, int span_id) {
    return plan->spans[span_id].small
               ? 1
               : ceil_div(step->spans[span_id].n_rows * plan->G, plan->tile_q);
}

/* Emits the items of one span. The last rows come first: with a causal mask they see the most
 * positions and take longest. */
static void attn_emit_span(attn_plan *plan, const toka_step *step, int span_id, attn_level *level,
                           int target_len) {
    const toka_span *span = &step->spans[span_id];
    bool small = plan->spans[span_id].small;
    int G = plan->G, q_end = (span->row0 + span->n_rows) * G;
    int tile_q = small ? ATTN_SMALL_Q : plan->tile_q;
    for (int tile = attn_span_items(plan, step, span_id) - 1; tile >= 0; tile--) {
        int q0 = span->row0 * G + tile * tile_q, nq = min(tile_q, q_end - q0);
        int first_row = small ? span->row0 : q0 / G; /* saves a division for each small span */
        int last_row = small ? span->row0 + span->n_rows - 1 : (q0 + nq - 1) / G;
        attn_item item = attn_item_of(plan, step, span_id, q0, nq, first_row, last_row);
        attn_emit_item(plan, level, &item, target_len);
    }
}

/* Emits all items of one kind, small items or tiles, of a level. */
static void attn_plan_kind(attn_plan *plan, const toka_step *step, int level, bool small) {
    int64_t work = 0;
    int n_items = 0, max_len = 0, target_len;
    for (int i = 0; i < step->n_spans; i++) {
        if (plan->spans[i].level != level || plan->spans[i].small != small || plan->spans[i].fused)
            continue;
        int span_items = attn_span_items(plan, step, i);
        work += (int64_t)attn_item_len(plan, step, i) * span_items, n_items += span_items;
        max_len = max(max_len, step->spans[i].n_kv + (step->spans[i].kv0 & (plan->B - 1)));
    }
    plan->levels[level].cta_split_len =
        small ? attn_cta_split_len(plan, work, n_items, max_len) : 0;
    target_len = small ? attn_small_split_len(plan, work)
                       : attn_tile_split_len(plan, work, n_items);
    if (small) plan->levels[level].short_items = work < (int64_t)n_items * ATTN_SHORT_KV;
    else plan->levels[level].long_tiles = work >= (int64_t)n_items * ATTN_LONG_KV;
    for (int i = 0; work && i < step->n_spans; i++) {
        attn_span_plan *span_plan = &plan->spans[i];
        if (span_plan->level != level || span_plan->small != small || span_plan->fused) continue;
        span_plan->tile0 = plan->n_items;
        attn_emit_span(plan, step, i, &plan->levels[level], target_len);
        span_plan->n_tiles = plan->n_items - span_plan->tile0;
    }
}

/* Number of rows, from `row` on, that form one prefix group. Unless `mixed` is set, they have all
 * spans but their own in common. A group has no more rows than a small item. */
static int attn_prefix_group_rows(const attn_plan *plan, const toka_step *step, int row,
                                  bool mixed) {
    const int parent = plan->spans[plan->row_span[row]].parent,
              max_rows = min(min(plan->small_rows, (int)ATTN_PREFIX_GROUP), step->T - row);
    int n_rows = 1;
    while (n_rows < max_rows &&
           (mixed || (parent >= 0 && plan->spans[plan->row_span[row + n_rows]].parent == parent)))
        n_rows++;
    return n_rows;
}
/* Calls visit(span, its first row in the group, number of its rows in the group) once for every
 * span of the group, the rows first_row .. first_row + n_rows - 1. */
template <class Visit>
static void attn_prefix_group_spans(const attn_plan *plan, const toka_step *step, int first_row,
                                    int n_rows, Visit visit) {
    for (int row = first_row; row < first_row + n_rows; row++)
        for (int span_id = plan->row_span[row]; span_id >= 0;
             span_id = plan->spans[span_id].parent) {
            const toka_span *span = &step->spans[span_id];
            if (row == max(first_row, span->row0))
                visit(span_id, row, min(first_row + n_rows, span->row0 + span->n_rows) - row);
        }
}
/* KV positions of a split of the prefix group of n_rows rows from `row` on: the smallest length,
 * from min_len on, for which the warps of one CTA are enough. 0: more than max_len. */
static int attn_prefix_group_split(const attn_plan *plan, const toka_step *step, int row,
                                   int n_rows, int min_len) {
    if (!attn_has_cta_split(plan)) return 0;
    const int B = plan->B, max_len = 256, multiple = ATTN_CTA_SPLIT_STEP;
    for (int split_len = ceil_div(min_len, multiple) * multiple; split_len <= max_len;
         split_len += multiple) {
        int n_splits = 0;
        attn_prefix_group_spans(plan, step, row, n_rows, [&](int span_id, int, int) {
            n_splits += max(1, ceil_div((step->spans[span_id].kv0 & (B - 1)) +
                                            step->spans[span_id].n_kv,
                                        split_len));
        });
        if (n_splits <= attn_cta_split_max(plan->D)) return split_len;
    }
    return 0;
}

/* Can prefix groups do the step? The last span of each row must be an own span, the KV work must
 * not exceed a limit, and each group must fit in one CTA. Sets mixed_groups and group_min_split. */
static bool attn_prefix_groups_fit(attn_plan *plan, const toka_step *step, bool mixed) {
    const int64_t max_work = plan->has_fused && step->T * plan->K >= plan->fused_min_row_heads
                                 ? min(plan->group_max_work, plan->group_max_work_fused)
                                 : plan->group_max_work;
    int64_t work = 0;
    int n_groups = 0;
    plan->mixed_groups = mixed;
    for (int row = 0, n_rows; row < step->T; row += n_rows, n_groups++) {
        n_rows = attn_prefix_group_rows(plan, step, row, mixed);
        attn_prefix_group_spans(plan, step, row, n_rows,
                                [&](int span_id, int, int) { work += step->spans[span_id].n_kv; });
        for (int group_row = row; group_row < row + n_rows; group_row++)
            if (step->spans[plan->row_span[group_row]].n_rows > 1) return false;
        if (work * plan->K > max_work) return false;
    }
    if (n_groups > plan->max_merges ||
        n_groups * attn_cta_split_max(plan->D) > plan->max_items)
        return false;
    plan->group_min_split = max((int)ATTN_CTA_SPLIT_MIN,
                                (int)(work * plan->K / (plan->n_sms * ATTN_SM_WARPS)));
    for (int row = 0, n_rows; row < step->T; row += n_rows) {
        n_rows = attn_prefix_group_rows(plan, step, row, mixed);
        if (!attn_prefix_group_split(plan, step, row, n_rows, plan->group_min_split)) return false;
    }
    return true;
}
/* Chooses between groups of one prompt and mixed groups. Mixed groups are chosen if groups of one
 * prompt need more CTAs than SMs and mixed groups do not. They need fewer: the last group of each
 * prompt is often not full, but mixed groups are. Returns false if the step is not done by prefix
 * groups. */
static bool attn_choose_prefix_groups(attn_plan *plan, const toka_step *step) {
    const int max_rows = min(plan->small_rows, (int)ATTN_PREFIX_GROUP);
    if (!plan->hopper || plan->n_levels < 2 || !max_rows) return false;
    int n_groups = 0;
    const bool may_mix = plan->allow_mixed && ceil_div(step->T, max_rows) * plan->K <= plan->n_sms;
    for (int row = 0; may_mix && row < step->T; n_groups++)
        row += attn_prefix_group_rows(plan, step, row, false);
    return (n_groups * plan->K > plan->n_sms && attn_prefix_groups_fit(plan, step, true)) ||
           attn_prefix_groups_fit(plan, step, false);
}

/* Plans the whole step as prefix groups, in one level. */
static void attn_plan_prefix_groups(attn_plan *plan, const toka_step *step) {
    const int G = plan->G;
    attn_level *level = plan->levels;
    plan->n_levels = 1, *level = attn_level{};
    for (int row = 0, n_rows; row < step->T; row += n_rows) {
        n_rows = attn_prefix_group_rows(plan, step, row, plan->mixed_groups);
        const int first_item = plan->n_items,
                  split_len = attn_prefix_group_split(plan, step, row, n_rows,
                                                      plan->group_min_split);
        attn_prefix_group_spans(plan, step, row, n_rows, [&](int span_id, int first_row, int rows) {
            const attn_item item = attn_item_of(plan, step, span_id, first_row * G, rows * G,
                                                first_row, first_row + rows - 1);
            attn_emit_cta_splits(plan, &item, split_len);
        });
        attn_emit_cta_merge(plan, level, first_item, row * G, n_rows * G, ATTN_TO_O);
    }
}

/* Emits the items of attn_fused, then the own items of their rows, in the same order. The loops go
 * from the last span to the first, so single rows come first: they stand after the shared spans and
 * take longest. The prefix of a single row's item is empty. */
static void attn_plan_fused_items(attn_plan *plan, const toka_step *step) {
    int G = plan->G, own_item = plan->n_fused;
    plan->fused0 = plan->n_items;
    for (int i = step->n_spans - 1; i >= 0 && plan->n_fused; i--) {
        const toka_span *span = &step->spans[i];
        if (!attn_is_fused_prefix(plan, i)) continue;
        for (int row = span->row0, n_items = plan->spans[i].n_items, j = 0, n_rows; j < n_items;
             row += n_rows, own_item += n_rows, j++) {
            n_rows = span->row0 + (j + 1) * span->n_rows / n_items - row;
            attn_item item = attn_item_of(plan, step, i, row * G, n_rows * G, row,
                                          row + n_rows - 1);
            item.flags |= own_item << ATTN_INDEX_SHIFT;
            if (item.flags & ATTN_TO_O) item.kv1 = item.kv0, item.skip = 0;
            attn_add_item(plan, &item);
        }
    }
    for (int i = step->n_spans - 1; i >= 0 && plan->n_fused; i--) {
        const toka_span *span = &step->spans[i];
        if (!attn_is_fused_prefix(plan, i)) continue;
        for (int row = span->row0; row < span->row0 + span->n_rows; row++) {
            attn_item item = attn_item_of(plan, step, plan->row_span[row], row * G, G, row, row);
            attn_add_item(plan, &item);
        }
    }
}

static int attn_compare_load(const void *a, const void *b) {
    const attn_cta_load *x = (const attn_cta_load *)a, *y = (const attn_cta_load *)b;
    return x->load != y->load ? (x->load < y->load ? -1 : 1) : x->id < y->id ? -1 : x->id > y->id;
}
/* Makes the static schedule of attn_fused. In each round a CTA has one job: an item and a kv head.
 * The longest jobs of the round go to the CTAs with the least load so far. So the busiest of 132
 * CTAs has 1 % more work than the mean; without balancing it had 10 % more. The cost of a job is
 * the number of own positions, plus ATTN_OWN_COST per row. The rounds take the jobs in the order of
 * the items, so that the items of a span run together while its K and V are in the L2 cache. */
static void attn_plan_jobs(attn_plan *plan) {
    const attn_item *items = plan->items + plan->fused0;
    int K = plan->dev->shape->K, n_jobs = plan->n_fused * K, *jobs;
    plan->grid = min(plan->dev->n_sms, n_jobs),
    plan->n_rounds = n_jobs ? ceil_div(n_jobs, plan->grid) : 0;
    plan->dev_jobs = (const int *)upload_alloc(&plan->dev->upload,
                                               (size_t)plan->grid * plan->n_rounds * sizeof(int),
                                               (void **)&jobs);
    for (int i = 0; i < plan->grid; i++) plan->ctas[i] = attn_cta_load{0, i};
    for (int first_job = 0, n_round; first_job < n_jobs; first_job += n_round, jobs += plan->grid) {
        n_round = min(plan->grid, n_jobs - first_job);
        for (int i = 0; i < n_round; i++) {
            const attn_item *item = items + (first_job + i) / K,
                            *own_items = items + (item->flags >> ATTN_INDEX_SHIFT);
            plan->round_jobs[i] = attn_cta_load{0, first_job + i};
            if (i && (first_job + i) % K) plan->round_jobs[i].load = plan->round_jobs[i - 1].load;
            else
                for (int row = 0; row < item->nq / plan->G; row++)
                    plan->round_jobs[i].load -= own_items[row].kv1 - own_items[row].kv0 -
                                                own_items[row].skip + ATTN_OWN_COST;
        }
        qsort(plan->round_jobs, (size_t)n_round, sizeof *plan->round_jobs, attn_compare_load);
        qsort(plan->ctas, (size_t)plan->grid, sizeof *plan->ctas, attn_compare_load);
        for (int i = 0; i < plan->grid; i++)
            jobs[plan->ctas[i].id] = i < n_round ? plan->round_jobs[i].id : -1;
        /* the cost of a job is negated, so that qsort puts the longest first */
        for (int i = 0; i < n_round; i++) plan->ctas[i].load -= plan->round_jobs[i].load;
    }
}

/* Returns true if the step may load K and V before grid_wait() (attn_small). This needs that all K
 * and V that a row reads are stored before the first kernel of the step starts, except the row's
 * own position. It is so if the step copies no pages and no row stores into a page that another row
 * reads. Only steps of up to ATTN_PREFETCH_ROWS rows are checked. For D > 128 a warp cannot load
 * that position again at once. */
static bool attn_can_prefetch(const attn_plan *plan, const toka_step *step) {
    const int B = plan->B;
    if (plan->D > 128 || step->T > ATTN_PREFETCH_ROWS || step->n_copies || !step->kv_slot)
        return false;
    for (int i = 0; i < step->n_spans; i++) {
        const toka_span *span = &step->spans[i];
        for (int row = 0; row < step->T; row++)
            for (int page = 0; page < ((span->kv0 & (B - 1)) + span->n_kv + B - 1) / B; page++)
                if (step->pages[span->page0 + page] == step->kv_slot[row] / B &&
                    (row != span->row0 || span->n_rows > 1))
                    return false;
    }
    return true;
}

/* Appends a span of the clipped step: positions from .. end-1 for the rows of span span_id. A page
 * is taken from that span, or from the first span above it that lists the page. Returns false, and
 * appends nothing, if a page is not there. */
static bool attn_clip_add(attn_plan *plan, const toka_step *step, const int *pages, int span_id,
                          int from, int end, int *n_pages) {
    const int first_page = from / plan->B, last_page = (end - 1) / plan->B;
    const toka_span *span = &step->spans[span_id], *source = span;
    if (*n_pages + last_page - first_page >= (int)plan->max_pages) return false;
    for (int page = last_page; page >= first_page; page--) {
        for (; page < source->kv0 / plan->B; source = &step->spans[span_id])
            span_id = plan->spans[span_id].parent;
        const int id = pages[source->page0 + page - source->kv0 / plan->B];
        if (id < 0) return false;
        plan->clipped_pages[*n_pages + page - first_page] = id;
    }
    plan->clipped_spans[plan->clipped_step.n_spans++] =
        toka_span{span->row0, span->n_rows, *n_pages, from, end - from};
    *n_pages += last_page - first_page + 1;
    return true;
}
/* Is it worth while that the rows of a shared span read positions from .. end-1 together, although
 * the window hides some of them from some rows? By the costs of chapter 21 of toka.c. */
static bool attn_clip_pays(const attn_plan *plan, const toka_step *step, const toka_span *span,
                           int from, int end) {
    int64_t visible = 0; /* (row, position) pairs */
    for (int row = span->row0; row < span->row0 + span->n_rows; row++)
        visible += max(0, end - max(from, step->pos[row] - plan->window + 1));
    return visible - (int64_t)ceil_div(span->n_rows, toka_cuda.rows_per_read) * (end - from) >
           (int64_t)toka_cuda.merge_cost * span->n_rows + toka_cuda.span_cost;
}

/* Returns the step as layers with a window see it. Its spans begin where the window of their rows
 * begins. Shared spans of which too little is left are no spans any more: the spans below them have
 * their positions. The page table is that of the layers with a window. In it, a page that no row
 * sees may be -1, and so may the page of a shared prompt tail, because it belongs to one of the
 * rows. Then each row reads the tail from its own page. Sets dev->error if there are too many
 * pages. */
static const toka_step *attn_clip_step(attn_plan *plan, const toka_step *step) {
    const int *pages = step->windowed_pages ? step->windowed_pages : step->pages;
    toka_step *to = &plan->clipped_step;
    int n_pages = 0;
    attn_plan_levels(plan, step);
    *to = *step;
    to->spans = plan->clipped_spans, to->n_spans = 0, to->pages = plan->clipped_pages;
    if (step->windowed_slot) to->kv_slot = step->windowed_slot;
    for (int i = 0; i < step->n_spans; i++) {
        const toka_span *span = &step->spans[i];
        const int parent = plan->spans[i].parent, end = span->kv0 + span->n_kv;
        attn_clip *clip = &plan->clips[i];
        clip->from = parent < 0 || plan->clips[parent].kept ? span->kv0 : plan->clips[parent].from;
        int lowest = INT_MAX;
        for (int row = span->row0; row < span->row0 + span->n_rows; row++)
            lowest = min(lowest, step->pos[row]);
        const int from = min(max(clip->from, lowest - plan->window + 1), end);
        const bool is_last = plan->spans[i].flags & ATTN_TO_O;
        clip->kept = (is_last || attn_clip_pays(plan, step, span, from, end)) &&
                     attn_clip_add(plan, step, pages, i, from, end, &n_pages);
        if (clip->kept || !is_last) continue;
        plan->dev->error.code = TOKA_E_DEVICE;
        snprintf(plan->dev->error.msg, sizeof plan->dev->error.msg,
                 "GPU: attention: a page that a window needs is not there, or the step names more "
                 "than %zu", plan->max_pages);
        break;
    }
    return to;
}

/* Emits the items of all levels. */
static void attn_emit_levels(attn_plan *plan, const toka_step *step) {
    for (int i = 0; i < plan->n_levels; i++) {
        attn_level *level = &plan->levels[i];
        *level = attn_level{.tile0 = plan->n_items, .merge0 = plan->n_merges};
        plan->n_split_bufs = 0;
        attn_plan_kind(plan, step, i, false);
        level->n_tiles = plan->n_items - level->tile0, level->small0 = plan->n_items,
        level->cta_merge0 = plan->n_merges;
        attn_plan_kind(plan, step, i, true);
        level->n_small = level->n_cta_merges ? 0 : plan->n_items - level->small0,
        level->n_merges = plan->n_merges - level->merge0 - level->n_cta_merges;
    }
}

/* Makes the work lists of one plan and puts them into dev->upload. */
static void attn_plan_lists(attn_plan *plan, const toka_step *step) {
    toka_device *dev = plan->dev;
    assert(step->n_spans <= plan->max_spans && step->T <= dev->options.max_tokens);
    if (plan->window) step = attn_clip_step(plan, step);
    plan->prefetch = attn_can_prefetch(plan, step), plan->is_alone = true;
    plan->n_spans = step->n_spans;
    attn_plan_levels(plan, step);
    plan->prefix_groups = attn_choose_prefix_groups(plan, step), plan->n_fused = 0;
    if (!plan->prefix_groups) attn_plan_fused(plan, step), attn_plan_rounds(plan, step);
    if (dev->error.code || !attn_plan_pages(plan, step)) return;
    plan->dev_items = (const attn_item *)upload_alloc(&dev->upload,
                                                      (size_t)plan->max_items * sizeof *plan->items,
                                                      (void **)&plan->items);
    plan->n_items = plan->n_merges = 0, plan->n_unsplit = plan->n_fused;
    for (int i = 0; i < step->n_spans && !plan->prefix_groups; i++)
        plan->n_unsplit += attn_is_fused_prefix(plan, i) ? step->spans[i].n_rows
                           : plan->spans[i].fused        ? 0
                                                         : attn_span_items(plan, step, i);
    if (plan->prefix_groups) attn_plan_prefix_groups(plan, step);
    else attn_emit_levels(plan, step);
    attn_plan_fused_items(plan, step);
    /* gives back the space of the items that were not emitted */
    dev->upload.used -= (size_t)(plan->max_items - min(plan->n_items, plan->max_items)) *
                        sizeof *plan->items;
    plan->dev_merges = (const attn_merge *)upload_put(
        &dev->upload, plan->merges, (size_t)plan->n_merges * sizeof *plan->merges);
    if (plan->n_items <= plan->max_items) {
        attn_plan_jobs(plan);
        return;
    }
    dev->error.code = TOKA_E_DEVICE;
    snprintf(dev->error.msg, sizeof dev->error.msg,
             "GPU: attention: the step has %d items of work, there is room for %d", plan->n_items,
             plan->max_items);
}

static int attn_launches(const attn_plan *plan);
/* Makes the work lists of this step, for each kind of layers. Runs before upload_send. */
static void attn_plan_step(toka_device *dev, const toka_step *step) {
    attn_plan_lists(dev->attn, step);
    if (!dev->attn_windowed) return;
    attn_plan_lists(dev->attn_windowed, step);
    dev->attn->is_alone = attn_launches(dev->attn_windowed) == 1;
}

/* ===========================================================================
 * MARK: 9. Attention: the kernels [kernel]
 *
 * Computes, for each row and query head,
 *
 *      o = sum over t of p[t] V[t],   p = softmax over t of (q . K[t] / sqrt(D)),
 *
 * where t runs over the KV positions that the row sees. The unit of work is an item of chapter 8.
 * For each of its queries an item yields O, the weighted mean of V, and LSE = log2 of the sum of
 * 2^score. Scores include the factor log2(e) / sqrt(D). If a query sees no key of the item, LSE is
 * -inf and O is 0. Two results of one query over different positions merge exactly:
 *
 *      m = max(LSE1, LSE2), w1 = 2^(LSE1 - m), w2 = 2^(LSE2 - m)
 *      O = (w1 O1 + w2 O2) / (w1 + w2),   LSE = m + log2(w1 + w2)
 *
 * Sinks. A layer can have a sink, a number for each query head. It joins the softmax like the score
 * of one more key without a value: p[t] is multiplied by 2^LSE / (2^LSE + 2^(log2(e) sink)). This
 * happens exactly once for a query, when its o is written: the LSE is then that of all positions.
 * States, split buffers and exchange buffers know nothing of sinks.
 *
 * Each kernel computes the (O, LSE) of its item from zero. Its epilogue merges the stored state
 * of the query if the item has the flag ATTN_MERGE_STATE. It then writes o (flag ATTN_TO_O), the
 * state (ATTN_TO_STATE), or a split buffer (neither flag; attn_merge_splits follows).
 *
 *   kernel              method                                threads of a CTA    queries of a CTA
 *   attn_mma            FlashAttention-2 on mma.sync          32; 128             16; 64
 *   attn_small          decode: one warp, ring filled by TMA  32                  at most 16
 *   attn_cta_split      split-KV inside a CTA                 at most 14 warps    at most 16
 *                       (12 warps if D > 64)
 *   attn_cluster_split  split-KV inside a cluster of 4 CTAs   at most 4 warps     at most 16
 *                       (3 warps if D > 64)                                       per cluster
 *   attn_wgmma          FlashAttention-3                      512; D > 64: 384    192; D > 64: 128
 *   attn_fused          cascade (Hydragen), persistent        512                 128 per item
 *   attn_merge_splits   split-KV merge                        128                 1
 *   attn_unpack         FP8 pages to bf16, for attn_wgmma     256                 none
 *   attn_no_work        none: a node of a graph               32                  none
 *
 * Order on the stream: for each level the tiles, then the small items or the CTA splits, then
 * attn_merge_splits; attn_fused comes last. If attn_plan.hopper is false, attn_mma and
 * attn_merge_splits do everything.
 *
 * Tiles. In chapter 8 a tile is an item of many queries. In the kernels a tile is TOK or N KV
 * positions of K and V: what one buffer of the ring holds.
 *
 * Scores. row_max and row_sum of a query are those of the online softmax: the largest score so far,
 * and the sum of 2^(score - row_max). So LSE = row_max + log2(row_sum).
 *
 * Pages. In the pool, K and V of one page and kv head are each a plain [B][D] matrix, so a kernel
 * that stores a token writes plain rows. TMA swizzles them on the way to shared memory. Its tensor
 * map sees all pages of a layer as one matrix of rows of D elements; columns beyond D become 0.
 * Storing the pages in swizzled form would gain nothing: decode already reaches 95 % of the read
 * bandwidth (4,096 sequences). B = 64 is the usual page size: a TMA box of 64 rows is one page, and
 * the block table stays short. Steps with smaller pages, down to 16, run on attn_mma.
 *
 * Figures of all kernels, with cuDNN's for prefill: test/results/kernel-choices.md, chapter 9.
 * =========================================================================== */

typedef struct attn_args {
    const bf16 *q;          /* [T][H][D] */
    bf16 *o;                /* [T][H][D] */
    const bf16 *kv;         /* K and V of this layer: [page][kv head][K, V][B][D] */
    const int *pages, *pos; /* page ids of all spans (attn_plan.dev_pages); [T] positions */
    const attn_item *items; /* items of this launch */
    float *state_o, *state_lse, *split_o, *split_lse; /* shapes: see attn_plan */
    int K, G, D, log2_B, window; /* window: length of the sliding window; 0: none */
    int key_size; /* attn_latent: elements of a query and of a key; D is the size of a value */
    uint32_t inv_G; /* 2^31 / G, rounded up */
    float scale;     /* of scores, times log2(e): 1/sqrt(D); with a soft cap, the cap */
    float cap_scale; /* 1 / (sqrt(D) cap), see attn_cap_scores; 0: no soft cap */
    const float *sinks; /* [H]; NULL: the layer has none */
    bool prefetch;  /* attn_can_prefetch: load K and V before grid_wait() */
} attn_args;

/* ---- FP8 K and V ----
 * The numbers of an e4m3 word times powers of two are exact in bf16. So attention over FP8 pages is
 * attention over bf16 pages whose operands of mma.sync are made from bytes when they are loaded
 * (attn_small), or from copies of the pages in bf16 (attn_unpack, for tiles). Shifts and one
 * multiplication make two numbers: cvt would be twice as fast, but it makes f16, whose range is too
 * small (test/results/trials-conversion.md). */

/* Returns the factor, as bf16, that turns moved e4m3 bits (fp8_to_bf16) into numbers of this scale.
 * They are 2^-120 times as large as the number. */
__device__ static inline uint32_t fp8_factor(uint32_t scale) {
    return scale == 255 ? 0x7FC0 : (scale + 120) << 7;
}
#if HOPPER /* other GPUs have no mul.bf16x2 */
/* Turns the bytes b0 .. b3 of a word into the pairs (b0, b2) and (b1, b3). factors: of the first
 * and of the second number of a pair. */
__device__ static inline void fp8_to_bf16(uint32_t word, uint32_t factors, uint32_t &even,
                                          uint32_t &odd) {
    const uint32_t even_bits = (word << 8 & 0x80008000u) | (word << 4 & 0x07F007F0u);
    const uint32_t odd_bits = (word & 0x80008000u) | (word >> 4 & 0x07F007F0u);
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(even) : "r"(even_bits), "r"(factors));
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(odd) : "r"(odd_bits), "r"(factors));
}
#endif
/* Where piece `piece`, 16 bytes, of a row of D bytes is in shared memory: TMA's swizzle of 128
 * bytes for D = 128, of 64 bytes for D = 64. */
template <int D> __device__ static inline int attn_fp8_piece_at(int row, int piece) {
    return row * D + ((piece ^ (D == 128 ? row & 7 : row >> 1 & 3)) << 4);
}
/* Address of a position of K or V in an FP8 page, and of its two scales. */
__device__ static inline const unsigned char *attn_fp8_page(const attn_args &args, int page) {
    const int B = 1 << args.log2_B;
    return (const unsigned char *)args.kv +
           (size_t)page * (kv_fp8_scales_at(args.K, B, args.D) + 2 * args.K * B);
}
__device__ static inline const unsigned char *attn_fp8_row(const attn_args &args, int page,
                                                           int kv_head, int is_v, int offset) {
    return attn_fp8_page(args, page) +
           (size_t)(((kv_head * 2 + is_v) << args.log2_B) + offset) * args.D;
}
__device__ static inline const unsigned char *attn_fp8_scales(const attn_args &args, int page,
                                                              int kv_head, int offset) {
    const int B = 1 << args.log2_B;
    return attn_fp8_page(args, page) + kv_fp8_scales_at(args.K, B, args.D) +
           toka_kv_scale_at(B, kv_head, offset);
}

/* ---- attn_unpack: FP8 pages to bf16, for the tiles ----
 *
 * In: args.pages [n_pages] pages of FP8. Out: to [n_pages], the same pages as bf16.
 * Grid: page x kv head (at least 1); CTA: 256 threads, 16 numbers per thread and iteration. Bytes:
 * 6 K D a position, so 2 % of a prompt's attention. */
__global__ static void __launch_bounds__(256)
    attn_unpack(const __grid_constant__ attn_args args, int n_pages, bf16 *to) {
#if HOPPER
    const int at = blockIdx.x / args.K, kv_head = blockIdx.x % args.K, D = args.D;
    const int log2_B = args.log2_B;
    grid_launch_dependents();
    grid_wait();
    if (at >= n_pages) return;
    const int page = args.pages[at];
    const unsigned char *from = attn_fp8_row(args, page, kv_head, 0, 0);
    const unsigned char *scales = attn_fp8_scales(args, page, kv_head, 0);
    to += (size_t)(at * args.K + kv_head) * (2 * D << log2_B);
    for (int i = threadIdx.x * 16; i < 2 * D << log2_B; i += 256 * 16) {
        const int row = i / D, is_v = row >> log2_B, offset = row & ((1 << log2_B) - 1);
        const uint32_t factor = fp8_factor(scales[offset * 2 + is_v]) * 0x10001;
        const uint4 in = *(const uint4 *)(from + i);
        const uint32_t words[4] = {in.x, in.y, in.z, in.w};
        uint32_t out[8];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            uint32_t even, odd;
            fp8_to_bf16(words[k], factor, even, odd);
            out[2 * k] = __byte_perm(even, odd, 0x5410);
            out[2 * k + 1] = __byte_perm(even, odd, 0x7632);
        }
        *(uint4 *)(to + i) = make_uint4(out[0], out[1], out[2], out[3]);
        *(uint4 *)(to + i + 8) = make_uint4(out[4], out[5], out[6], out[7]);
    }
#else
    __trap();
#endif
}

/* quad_max, quad_sum: maximum and sum of x over the four threads of a quad, which hold one row of
 * an mma tile. */
__device__ static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* q / G without a division, exact for q < 2^31 / G. A thread of attn_wgmma needs up to nine such
 * quotients before its first wgmma. */
__device__ static inline int attn_row(const attn_args &args, int q) {
    return (int)__umulhi(2u * (uint32_t)q, args.inv_G);
}
/* Index of query q of kv head kv_head in [T][H]. */
__device__ static inline size_t attn_head_at(const attn_args &args, int q, int kv_head) {
    const int row = attn_row(args, q);
    return (size_t)row * (args.K * args.G) + kv_head * args.G + q - row * args.G;
}
/* The query head of query q of kv head kv_head. */
__device__ static inline int attn_head(const attn_args &args, int q, int kv_head) {
    return kv_head * args.G + q - attn_row(args, q) * args.G;
}
/* Index of the item's query in split_lse, and of its row of D in split_o. buf: first split buffer
 * of the item. */
__device__ static inline size_t attn_split_at(const attn_args &args, int buf, int query,
                                              int kv_head) {
    return ((size_t)(buf + query / ATTN_SMALL_Q) * args.K + kv_head) * ATTN_SMALL_Q +
           query % ATTN_SMALL_Q;
}

/* A finished query of an item: where its O goes, and the weights of the LSE merge. */
typedef struct attn_output {
    bf16 *o;            /* destination, a row of D; NULL: the destination is o_f32 */
    float *o_f32;       /* destination in a state or split buffer, a row of D */
    const float *state; /* O of the stored state; NULL: the query merges no state */
    /* new_weight: factor of the item's unnormalized O, includes 1 / row_sum; state_weight: factor
     * of the state's O */
    float new_weight, state_weight;
    float lse; /* LSE of the merged result */
} attn_output;

/* LSE of the stored state of the item's query; -inf if the item merges no state. If a thread of the
 * query will write LSE (writes_lse of attn_finish_query), the caller synchronizes all threads of
 * the query after this read, because the new LSE overwrites the value. */
__device__ static inline float attn_state_lse(const attn_args &args, const attn_item &item,
                                              int query, int kv_head) {
    return item.flags & ATTN_MERGE_STATE
               ? args.state_lse[attn_head_at(args, item.q0 + query, kv_head)]
               : -INFINITY;
}

/* What the LSE of a query is merged from: the item's keys, and the stored state. */
typedef struct attn_query_sums {
    float row_max;   /* largest score of the item's keys; -inf: the query sees none of them */
    float row_sum;   /* sum of 2^(score - row_max) over the item's keys */
    float state_lse; /* result of attn_state_lse; -inf: there is no state to merge */
} attn_query_sums;

/* Merges the (row_max, row_sum) of an item with a state of LSE state_lse: sets the weights and LSE
 * of the output. */
__device__ static inline attn_output attn_merge_lse(float row_max, float row_sum, float state_lse) {
    attn_output out = {};
    out.new_weight = row_sum > 0 ? 1 / row_sum : 0;
    out.lse = row_sum > 0 ? row_max + log2f(row_sum) : -INFINITY;
    if (state_lse == -INFINITY) return out;
    float max_lse = fmaxf(out.lse, state_lse), new_weight = ex2(out.lse - max_lse),
          state_weight = ex2(state_lse - max_lse), sum = new_weight + state_weight;
    out.new_weight *= new_weight / sum;
    out.state_weight = state_weight / sum;
    out.lse = max_lse + log2f(sum);
    return out;
}
/* Merges the sink of the query's head. If lse is -inf, all weights are 0 and stay 0. */
__device__ static inline void attn_merge_sink(attn_output &out, float sink) {
    const float weight = __fdividef(1, 1 + ex2(sink * (float)M_LOG2E - out.lse));
    out.new_weight *= weight, out.state_weight *= weight;
}
/* Finishes one query of the item. Returns destination and weights of O. If writes_lse is set, LSE
 * is written to the state or split buffer; the caller sets it in one of the threads that hold the
 * query. */
__device__ static inline attn_output attn_finish_query(const attn_args &args, const attn_item &item,
                                                       int query, int kv_head,
                                                       const attn_query_sums &sums,
                                                       bool writes_lse) {
    bool is_split = !(item.flags & (ATTN_TO_O | ATTN_TO_STATE));
    attn_output out = attn_merge_lse(sums.row_max, sums.row_sum,
                                     is_split ? -INFINITY : sums.state_lse);
    size_t head_index = attn_head_at(args, item.q0 + query, kv_head);
    if (is_split) {
        size_t split_index = attn_split_at(args, item.flags >> ATTN_INDEX_SHIFT, query, kv_head);
        if (writes_lse) args.split_lse[split_index] = out.lse;
        out.o_f32 = args.split_o + split_index * args.D;
        return out;
    }
    if (sums.state_lse > -INFINITY) out.state = args.state_o + head_index * args.D;
    if (item.flags & ATTN_TO_O) {
        out.o = args.o + head_index * args.D;
        if (args.sinks) attn_merge_sink(out, args.sinks[attn_head(args, item.q0 + query, kv_head)]);
        return out;
    }
    out.o_f32 = args.state_o + head_index * args.D;
    if (writes_lse) args.state_lse[head_index] = out.lse;
    return out;
}
/* Merged values of columns col and col + 1 of O. has_state: the state has these columns. */
__device__ static inline float2 attn_merge_pair(const attn_output &out, bool has_state, int col,
                                                float x, float y) {
    x *= out.new_weight, y *= out.new_weight;
    if (has_state) {
        float2 state = *(const float2 *)(out.state + col);
        x += out.state_weight * state.x, y += out.state_weight * state.y;
    }
    return make_float2(x, y);
}
/* Stores columns col and col + 1 of the merged O to the destination. */
__device__ static inline void attn_store_pair(const attn_output &out, int col, float x, float y) {
    const float2 v = attn_merge_pair(out, out.state, col, x, y);
    if (out.o) *(uint32_t *)(out.o + col) = pack_bf16(v.x, v.y);
    else *(float2 *)(out.o_f32 + col) = v;
}

/* ---- attn_mma: items on mma.sync; any D, any GPU ----
 *
 * In: items; grid: item x kv head; CTA: WARPS x 32 threads. WARPS 1: small items; WARPS 4: items of
 * up to 64 queries. Out: o, state or split buffer, see the head of the chapter.
 * Each warp of the CTA computes 16 queries of the item. All warps share the tiles of K and V.
 * DP is D rounded up to 64, 128 or 256. Columns beyond D are zero; whole blocks of 16 columns
 * beyond D are not computed.
 * Shared memory: a ring of BUFS tiles, each TOK positions of K and V (layout: attn_piece_at).
 * Bytes: K and V once per item. FLOPs: 4 * 16 * WARPS * D * kv; kv: KV positions of the item.
 *
 * Why this shape:
 * - The accumulators of S from m16n8k16 already have the layout of the A operand of P V.
 * - ldmatrix.trans transposes V while it loads V.
 * - Only barriers inside the CTA are needed.
 * attn_plan_open asserts D % 8 == 0, D <= 256, B >= 16. */
template <int DP, int WARPS> struct attn_tile_shape {
    static constexpr int TOK = DP == 256 ? 16 : WARPS == 1 ? 2048 / DP : 64; /* positions */
    static constexpr int BUFS = WARPS == 1 ? 3 : 2;
    static constexpr int BYTES = BUFS * 2 * TOK * DP * 2; /* of the ring: all shared memory */
};

/* In shared memory a matrix of K, V or Q consists of panels of 64 columns, each [rows][64] in rows
 * of 128 bytes. A piece is 16 bytes, 8 columns. Piece p (0 .. 7) of a row of a panel lies at
 * p ^ (row % 8). This is the 128-byte swizzle that TMA writes and wgmma reads, and ldmatrix has no
 * bank conflicts with it. Returns the element index of a piece; `piece` counts over all panels. */
__device__ static inline int attn_piece_at(int rows, int row, int piece) {
    return ((piece >> 3) * rows + row) * 64 + ((piece ^ row) & 7) * 8;
}

/* Loads positions kv .. kv+TOK-1 of K and V to the ring buffer `to`. Positions from item.kv1 on
 * and columns beyond D become zero. */
template <int DP, int WARPS>
__device__ static inline void attn_load_tile(const attn_args &args, const attn_item &item,
                                             int kv_head, int kv, bf16 *to) {
    constexpr int TOK = attn_tile_shape<DP, WARPS>::TOK;
    int pieces = (args.D + 15) / 16 * 2, page_mask = (1 << args.log2_B) - 1;
    for (int i = threadIdx.x; i < 2 * TOK * pieces; i += WARPS * 32) {
        int piece = i % pieces, kv_row = i / pieces, row = kv_row % TOK, is_v = kv_row / TOK,
            offset = kv + row - item.kv0;
        bool valid = kv + row < item.kv1 && piece * 8 < args.D;
        const bf16 *from = args.kv;
        if (valid) {
            size_t matrix =
                ((size_t)args.pages[item.page0 + (offset >> args.log2_B)] * args.K + kv_head) * 2 +
                is_v;
            from += ((matrix << args.log2_B) + (offset & page_mask)) * args.D + piece * 8;
        }
        cp_async_16(smem_addr(to + is_v * TOK * DP + attn_piece_at(TOK, row, piece)), from,
                    valid ? 16 : 0);
    }
}

/* scores[8-column block][4] = Q K^T of one warp: 16 queries x TOK positions, not yet scaled. */
template <int DP, int TOK>
__device__ static inline void attn_qk(float (&scores)[TOK / 2], const uint32_t (&q)[DP / 16][4],
                                      const bf16 *k, int D) {
    int lane = threadIdx.x % 32, row = (lane & 7) + (lane >> 4) * 8, piece = lane >> 3 & 1;
#pragma unroll
    for (int n = 0; n < TOK / 2; n++) scores[n] = 0;
#pragma unroll
    for (int c = 0; c < DP / 16; c++) {
        if (c * 16 >= D) break;
#pragma unroll
        for (int n = 0; n < TOK / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, smem_addr(k + attn_piece_at(TOK, n * 16 + row, c * 2 + piece)));
            mma_16816(scores + 8 * n, q[c], b);
            mma_16816(scores + 8 * n + 4, q[c], b + 2);
        }
    }
}

/* Packs P as the A operand of P V. */
template <int N>
__device__ static inline void attn_pack(uint32_t (&probs)[N / 8][4], const float (&scores)[N]) {
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            probs[n][i] = pack_bf16(scores[8 * n + 2 * i], scores[8 * n + 2 * i + 1]);
}

/* acc[8-column block][4] += P V of one warp. */
template <int DP, int TOK>
__device__ static inline void attn_pv(float (&acc)[DP / 2], const float (&scores)[TOK / 2],
                                      const bf16 *v, int D) {
    int lane = threadIdx.x % 32, row = lane & 15, piece = lane >> 4;
    uint32_t probs[TOK / 16][4];
    attn_pack(probs, scores);
#pragma unroll
    for (int n = 0; n < TOK / 16; n++)
#pragma unroll
        for (int c = 0; c < DP / 16; c++) {
            if (c * 16 >= D) break;
            uint32_t b[4];
            ldmatrix_x4_trans(b, smem_addr(v + attn_piece_at(TOK, n * 16 + row, c * 2 + piece)));
            mma_16816(acc + 8 * c, probs[n], b);
            mma_16816(acc + 8 * c + 4, probs[n], b + 2);
        }
}

/* Position of the row of the item's query; -1 if the item has no such query. */
__device__ static inline int attn_pos(const attn_args &args, const attn_item &item, int query) {
    return query < item.nq ? args.pos[attn_row(args, item.q0 + query)] : -1;
}
/* Soft cap: replaces the scores s by tanh(s cap_scale). Must come before the mask, because the tanh
 * of -inf is finite. */
template <int N>
__device__ static inline void attn_cap_scores(float (&scores)[N], float cap_scale) {
    if (cap_scale == 0) return;
#pragma unroll
    for (int i = 0; i < N; i++) scores[i] = tanh_of(scores[i] * cap_scale);
}

/* Applies a soft cap, and sets the scores of positions that a query does not see to -inf. q_pos:
 * positions of the thread's two queries; kv: position of column 0 of the tile. FUSED: for
 * attn_fused, which no model with a soft cap uses. */
template <bool FUSED = false, int N>
__device__ static inline void attn_mask(const attn_args &args, const attn_item &item,
                                        float (&scores)[N], int2 q_pos, int kv) {
    if (!FUSED) attn_cap_scores(scores, args.cap_scale);
    const int pos[2] = {q_pos.x, q_pos.y};
    int from[2], to[2]; /* query r sees the positions from[r] .. to[r]-1 */
    kv += threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++)
        from[r] = max(item.kv0 + item.skip, args.window ? pos[r] - args.window + 1 : 0),
        to[r] = min(pos[r] + 1, item.kv1);
#pragma unroll
    for (int j = 0; j < N; j++) {
        int kv_pos = kv + j / 4 * 8 + (j & 1), r = j >> 1 & 1;
        if (kv_pos < from[r] || kv_pos >= to[r]) scores[j] = -INFINITY;
    }
}

/* Replaces the scores s of the thread's query r by 2^(scale s - row_max). Returns the sum over
 * the columns of this thread. */
template <int N>
__device__ static inline float attn_exp_sum(float (&scores)[N], int r, float row_max, float scale) {
    const float base = row_max == -INFINITY ? 0 : row_max;
    float sum = 0;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4) {
        scores[i] = ex2(fmaf(scores[i], scale, -base)),
        scores[i + 1] = ex2(fmaf(scores[i + 1], scale, -base));
        sum += scores[i] + scores[i + 1];
    }
    return sum;
}
/* The largest score of the thread's query r over all columns of the tile, not scaled. */
template <int N>
__device__ static inline float attn_row_max(const float (&scores)[N], int r) {
    float max_score = -INFINITY;
#pragma unroll
    for (int i = 2 * r; i < N; i += 4)
        max_score = fmaxf(max_score, fmaxf(scores[i], scores[i + 1]));
    return quad_max(max_score);
}
/* Online-softmax update of the thread's two queries (of the first only, if rows is 1). Updates
 * row_max and row_sum, and replaces the scores s by 2^(scale s - row_max). The caller multiplies
 * the O accumulated so far by rescale[r]. row_sum covers the columns of this thread only: quad_sum
 * completes it. */
template <int N>
__device__ static inline void attn_softmax_update(float (&scores)[N], float row_max[2],
                                                  float row_sum[2], float rescale[2], float scale,
                                                  int rows = 2) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rescale[r] = 1;
        if (r >= rows) break;
        const float new_max = fmaxf(row_max[r], attn_row_max(scores, r) * scale);
        rescale[r] = ex2(row_max[r] - (new_max == -INFINITY ? 0 : new_max));
        row_max[r] = new_max,
        row_sum[r] = row_sum[r] * rescale[r] + attn_exp_sum(scores, r, new_max, scale);
    }
}
/* The same with lazy rescaling, as in FlashAttention-4: row_max changes only if the tile's
 * maximum exceeds it by more than 8. So 2^(scale s - row_max) is at most 256, and the
 * accumulated O seldom needs rescaling. Returns true if any thread of the warp must rescale. */
template <int N>
__device__ static inline bool attn_softmax_update_lazy(float (&scores)[N], float row_max[2],
                                                       float row_sum[2], float rescale[2],
                                                       float scale) {
    const float new_max[2] = {attn_row_max(scores, 0) * scale, attn_row_max(scores, 1) * scale};
    bool must_rescale = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bool exceeds = new_max[r] > row_max[r] + 8;
        rescale[r] = exceeds ? ex2(row_max[r] - new_max[r]) : 1,
        row_max[r] = exceeds ? new_max[r] : row_max[r], must_rescale = must_rescale || exceeds;
        row_sum[r] = row_sum[r] * rescale[r] + attn_exp_sum(scores, r, row_max[r], scale);
    }
    return __any_sync(~0u, must_rescale);
}
template <int N>
__device__ static inline void attn_rescale(float (&acc)[N], const float rescale[2]) {
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] *= rescale[i >> 1 & 1];
}

/* First position that any row of the item sees, rounded down: a multiple of `tile` after kv0. */
__device__ static inline int attn_first_kv(const attn_args &args, const attn_item &item, int tile) {
    int first = max((int)item.skip, args.window ? item.pos_lo - args.window + 1 - item.kv0 : 0);
    return item.kv0 + first / tile * tile;
}
/* Returns (x, y): the tiles x .. y-1, counted from first_kv, need no attn_mask, because all rows of
 * the item see all positions of these tiles. With a soft cap, which attn_mask applies, all tiles
 * need it. */
__device__ static inline int2 attn_unmasked_tiles(const attn_args &args, const attn_item &item,
                                                  int first_kv, int tile) {
    if (args.cap_scale != 0) return make_int2(INT_MAX, INT_MAX);
    /* The last position, counted from first_kv, that some row does not see, because the position
     * belongs to another span or lies before the row's window. */
    int last_hidden = max(item.kv0 + item.skip - 1, args.window ? item.pos_hi - args.window : -1) -
                      first_kv;
    return make_int2(last_hidden >= 0 ? last_hidden / tile + 1 : 0,
                     max(0, min(item.pos_lo + 1, item.kv1) - first_kv) / tile);
}

/* First of the two columns in acc[4 c + 2 r], acc[4 c + 2 r + 1] of a thread. FP8: as attn_fp8_pv
 * leaves them. */
template <bool FP8> __device__ static inline int attn_pair_col(int c, int quad) {
    return FP8 ? c / 2 * 16 + quad * 4 + c % 2 * 2 : c * 8 + quad * 2;
}

/* A thread's two queries: `query` and `query` + 8 of the item. row_sum covers only the columns of
 * this thread; quad_sum gives the query's sum. */
typedef struct attn_row_stats {
    int query;
    float row_max[2], row_sum[2];
} attn_row_stats;

/* Epilogue of one warp: merges the state and stores O and LSE. All 32 threads must call it. */
template <int N, bool FP8 = false>
__device__ static inline void attn_store_rows(const attn_args &args, const attn_item &item,
                                              const attn_row_stats &stats, int kv_head,
                                              const float (&acc)[N]) {
    int quad = threadIdx.x % 4;
    float state_lse[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (stats.query + 8 * r < item.nq)
            state_lse[r] = attn_state_lse(args, item, stats.query + 8 * r, kv_head);
    __syncwarp(); /* all lanes have read the old LSE; attn_finish_query may overwrite it */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = quad_sum(stats.row_sum[r]);
        if (stats.query + 8 * r >= item.nq) continue;
        attn_output out = attn_finish_query(args, item, stats.query + 8 * r, kv_head,
                                            {stats.row_max[r], sum, state_lse[r]}, quad == 0);
#pragma unroll
        for (int c = 0; c < N / 4; c++)
            if (c * 8 < args.D)
                attn_store_pair(out, attn_pair_col<FP8>(c, quad), acc[4 * c + 2 * r],
                                acc[4 * c + 2 * r + 1]);
    }
}

/* Loads Q of one warp's 16 queries from global memory as the A operand of Q K^T. Missing queries
 * and columns beyond D are 0. */
template <int DP>
__device__ static inline void attn_load_q(const attn_args &args, const attn_item &item, int query,
                                          int kv_head, uint32_t (&q)[DP / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bf16 *from = args.q + attn_head_at(args, item.q0 + query + 8 * r, kv_head) * args.D +
                           threadIdx.x % 4 * 2;
        bool valid = query + 8 * r < item.nq;
#pragma unroll
        for (int c = 0; c < DP / 8; c++)
            q[c / 2][r + c % 2 * 2] =
                valid && c * 8 < args.D ? *(const uint32_t *)(from + c * 8) : 0;
    }
}

template <int DP, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, 1)
    attn_mma(const __grid_constant__ attn_args args) {
    typedef attn_tile_shape<DP, WARPS> shape;
    constexpr int TOK = shape::TOK, BUFS = shape::BUFS;
    extern __shared__ __align__(1024) char attn_smem[];
    bf16 *ring = (bf16 *)attn_smem;
    grid_launch_dependents();
    grid_wait();
    const attn_item item = args.items[blockIdx.x / args.K];
    int kv_head = blockIdx.x % args.K, query0 = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
    int first_kv = attn_first_kv(args, item, TOK),
        n_tiles = item.kv1 > first_kv ? (item.kv1 - first_kv + TOK - 1) / TOK : 0;
    int2 unmasked = attn_unmasked_tiles(args, item, first_kv, TOK);
    for (int i = 0; i < BUFS - 1; i++) {
        if (i < n_tiles)
            attn_load_tile<DP, WARPS>(args, item, kv_head, first_kv + i * TOK,
                                      ring + i * 2 * TOK * DP);
        cp_async_commit();
    }
    uint32_t q[DP / 16][4];
    float acc[DP / 2] = {}, rescale[2];
    attn_row_stats stats = {query0, {-INFINITY, -INFINITY}};
    attn_load_q<DP>(args, item, query0, kv_head, q);
    for (int i = 0; i < n_tiles; i++) {
        int next = i + BUFS - 1, kv = first_kv + i * TOK;
        if (next < n_tiles)
            attn_load_tile<DP, WARPS>(args, item, kv_head, first_kv + next * TOK,
                                      ring + next % BUFS * 2 * TOK * DP);
        cp_async_commit();
        cp_async_wait<BUFS - 1>();
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
        const bf16 *k = ring + i % BUFS * 2 * TOK * DP;
        float scores[TOK / 2];
        attn_qk<DP, TOK>(scores, q, k, args.D);
        if (i < unmasked.x || i >= unmasked.y)
            attn_mask(args, item, scores,
                      make_int2(attn_pos(args, item, stats.query),
                                attn_pos(args, item, stats.query + 8)),
                      kv);
        attn_softmax_update(scores, stats.row_max, stats.row_sum, rescale, args.scale);
        attn_rescale(acc, rescale);
        attn_pv<DP, TOK>(acc, scores, k + TOK * DP, args.D);
        if (WARPS > 1) __syncthreads();
        else __syncwarp();
    }
    attn_store_rows(args, item, stats, kv_head, acc);
}

template <int DP, int WARPS>
static void attn_mma_launch(toka_device *dev, const attn_args &args, int n_items) {
    launch_dependent(
        dev, "attention", attn_mma<DP, WARPS>,
        {dim3((unsigned)(n_items * args.K)), WARPS * 32, attn_tile_shape<DP, WARPS>::BYTES}, args);
}

/* ---- attn_small: small items on Hopper; one warp with TMA ----
 *
 * In and out as attn_mma. Grid: item x kv head; CTA: 32 threads.
 * Shared memory: BUFS tiles of TOK positions, K and V, each [panels][TOK][64].
 * Bytes: K and V of the item's positions; both ends are rounded outwards to multiples of 8.
 * FLOPs: 4 * 16 * D * kv; for one row G/16 of them are useful.
 *
 * Why this shape:
 * - The kernel is bound by the bytes of K and V, so many of them must be in flight. An SM holds 9
 *   CTAs with rings of 24 KB, or 13 with rings of 16 KB.
 * - A CTA is one warp, so no warp ever waits for another. The hardware scheduler balances the load.
 * - One lane issues the TMA loads. A full tile is one copy (D = 72 .. 120: four, one per matrix and
 *   panel). The first and the last tile, if partial, are loaded in boxes of 8 positions.
 * - Page ids are kept in registers: each lane holds one of 32 consecutive ids.
 * - An item also costs latency, besides the time for its bytes. More resident warps hide this
 *   latency better than a longer ring. So the ring has two buffers at D = 64 and for short items
 *   (ATTN_SHORT_KV), else three.
 *
 * Retired: one copy per matrix and panel for every tile (prefix groups, D = 128: 23 us, now 20).
 * Retired: partial tiles loaded whole. This reads positions that no row sees: 4,096 sequences of 10
 * to 300 positions are 6 % slower.
 *
 * Figures: test/results/kernel-choices.md, chapter 9. */
/* Bytes of a tile: TOK positions of K and V. */
template <int DP, int TOK, bool FP8> constexpr int attn_small_tile = TOK * DP * (FP8 ? 2 : 4);

#if HOPPER
/* FP8: Q as the A operand, with the columns of each 16 in the order in which fp8_to_bf16 gives
 * those of K: a thread has 4 quad + {0, 2} and 4 quad + {1, 3}. */
template <int DP>
__device__ static inline void attn_fp8_load_q(const attn_args &args, const attn_item &item,
                                              int query, int kv_head, uint32_t (&q)[DP / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const bf16 *from = args.q + attn_head_at(args, item.q0 + query + 8 * r, kv_head) * DP +
                           threadIdx.x % 4 * 4;
        const bool valid = query + 8 * r < item.nq;
#pragma unroll
        for (int c = 0; c < DP / 16; c++) {
            const uint2 x = valid ? *(const uint2 *)(from + c * 16) : uint2{};
            q[c][r] = __byte_perm(x.x, x.y, 0x5410);
            q[c][r + 2] = __byte_perm(x.x, x.y, 0x7632);
        }
    }
}
/* attn_qk for a tile of FP8: k [TOK][DP], scales [TOK][K, V] in shared memory. */
template <int DP, int TOK>
__device__ static inline void attn_fp8_qk(float (&scores)[TOK / 2], const uint32_t (&q)[DP / 16][4],
                                          const unsigned char *k, const unsigned char *scales) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < TOK / 2; n++) scores[n] = 0;
#pragma unroll
    for (int n = 0; n < TOK / 8; n++) {
        const uint32_t factors = fp8_factor(scales[(n * 8 + lane / 4) * 2]) * 0x10001;
#pragma unroll
        for (int c = 0; c < DP / 16; c += 4) {
            uint32_t words[4];
            ldmatrix_x4(words,
                        smem_addr(k + attn_fp8_piece_at<DP>(n * 8 + lane % 8, c + lane / 8)));
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t b[2];
                fp8_to_bf16(words[i], factors, b[0], b[1]);
                mma_16816(scores + 4 * n, q[c + i], b);
            }
        }
    }
}
/* attn_pv for a tile of FP8. Of 16 columns the accumulators first get the even, then the odd ones:
 * attn_fp8_sort puts them into pairs. */
template <int DP, int TOK>
__device__ static inline void attn_fp8_pv(float (&acc)[DP / 2], const float (&scores)[TOK / 2],
                                          const unsigned char *v, const unsigned char *scales) {
    const int lane = threadIdx.x % 32;
    uint32_t probs[TOK / 16][4];
    attn_pack(probs, scores);
#pragma unroll
    for (int n = 0; n < TOK / 16; n++) {
        uint32_t factors[2];
#pragma unroll
        for (int i = 0; i < 2; i++) { /* of positions 2 quad, 2 quad + 1 of each 8 */
            const uint32_t pair = *(const uint32_t *)(scales + (n * 16 + i * 8 + lane % 4 * 2) * 2);
            factors[i] = fp8_factor(pair >> 8 & 255) | fp8_factor(pair >> 24) << 16;
        }
#pragma unroll
        for (int c = 0; c < DP / 16; c += 2) {
            uint32_t words[4];
            ldmatrix_x4_trans(words, smem_addr(v + attn_fp8_piece_at<DP>(n * 16 + lane % 16,
                                                                         c + lane / 16)));
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t even[2], odd[2];
                fp8_to_bf16(words[2 * i], factors[0], even[0], odd[0]);
                fp8_to_bf16(words[2 * i + 1], factors[1], even[1], odd[1]);
                mma_16816(acc + 8 * (c + i), probs[n], even);
                mma_16816(acc + 8 * (c + i) + 4, probs[n], odd);
            }
        }
    }
}
template <int N> __device__ static inline void attn_fp8_sort(float (&acc)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 8)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float even = acc[i + 2 * r + 1];
            acc[i + 2 * r + 1] = acc[i + 4 + 2 * r];
            acc[i + 4 + 2 * r] = even;
        }
}

/* The ring of one warp, and the tensor maps that fill it. */
typedef struct attn_small_ring {
    bf16 *tiles;                 /* [BUFS] tiles of TOK positions, in shared memory */
    uint64_t *full;              /* [BUFS] mbarriers, in shared memory: the tile has arrived */
    const CUtensorMap *tile_map; /* of full tiles (attn_tile_map) */
    const CUtensorMap *map_8;    /* of boxes of 8 positions */
    unsigned char *scales;       /* FP8: [BUFS][TOK][K, V], in shared memory */
} attn_small_ring;

/* Main loop of one warp: computes O (not normalized, in acc) and stats of an item. The caller does
 * the epilogue. Initializes the mbarriers. Calls grid_launch_dependents() and grid_wait(). */
template <int DP, int TOK, int BUFS, bool FP8>
__device__ static inline void attn_small_mainloop(const attn_args &args, const attn_item &item,
                                                  int kv_head, const attn_small_ring &ring,
                                                  attn_row_stats &stats, float (&acc)[DP / 2]) {
    /* K's or V's tile, in units of bf16 */
    constexpr int HALF = attn_small_tile<DP, TOK, FP8> / 4;
    int lane = threadIdx.x % 32, first_kv = attn_first_kv(args, item, TOK);
    /* page_ids: ids of the item's pages first_page .. first_page + 31, one per lane */
    int page_ids = 0, first_page = -32;
    int n_tiles = item.kv1 > first_kv ? (item.kv1 - first_kv + TOK - 1) / TOK : 0;
    int2 unmasked = attn_unmasked_tiles(args, item, first_kv, TOK);
    if (lane == 0) {
        for (int i = 0; i < BUFS; i++) mbar_init(smem_addr(&ring.full[i]), 1);
        mbar_init_fence();
    }
    __syncwarp();
    grid_launch_dependents();
    auto request_tile = [&](int i) {
        int offset = first_kv + i * TOK - item.kv0, n_kv = min(TOK, item.kv1 - item.kv0 - offset),
            page = offset >> args.log2_B;
        if (page - first_page >= 32) {
            first_page = page;
            page_ids =
                args.pages[item.page0 + min(page + lane, (item.kv1 - item.kv0 - 1) >> args.log2_B)];
        }
        const int page_id = __shfl_sync(~0u, page_ids, page - first_page);
        const int in_page = offset & ((1 << args.log2_B) - 1);
        int row = (((FP8 ? 0 : page_id * args.K) + kv_head) * 2 << args.log2_B) + in_page;
        if (lane) return;
        uint32_t to = smem_addr(ring.tiles + i % BUFS * 2 * HALF),
                 bar = smem_addr(&ring.full[i % BUFS]);
        const bool is_full = n_kv == TOK && item.skip <= offset;
        if constexpr (FP8) {
            const int from = is_full ? 0 : max(0, item.skip - offset) / 8;
            const int pieces = is_full ? TOK / 8 : (n_kv + 7) / 8;
            mbar_expect_tx(bar, (pieces - from) * 8 * (2 * DP + 2));
            bulk_load(smem_addr(ring.scales + i % BUFS * 2 * TOK) + from * 16,
                      attn_fp8_scales(args, page_id, kv_head, in_page + from * 8),
                      (pieces - from) * 16, bar);
            if (is_full) tma_load_5d(to, ring.tile_map, bar, {0, row, 0, page_id, 0});
            for (int j = from; j < pieces && !is_full; j++)
                for (int k_or_v = 0; k_or_v < 2; k_or_v++)
                    tma_load_5d(to + k_or_v * HALF * 2 + j * 8 * DP, ring.map_8, bar,
                                {0, row + j * 8, k_or_v, page_id, 0});
            return;
        }
        if (is_full && (DP == 64 || args.D == DP)) { /* tile_map covers K and V in one copy */
            mbar_expect_tx(bar, 2 * HALF * 2);
            tma_load_5d(to, ring.tile_map, bar, {0, 0, row, 0, 0});
            return;
        }
        const int from = max(0, item.skip - offset) / 8, pieces = (n_kv + 7) / 8;
        mbar_expect_tx(bar, 2 * DP * 2 * (pieces - from) * 8);
        for (int k_or_v = 0; k_or_v < 2; k_or_v++)
            for (int panel = 0; panel < DP / 64; panel++)
                for (int j = from; j < (is_full ? 1 : pieces); j++)
                    tma_load_2d(to + (k_or_v * HALF + panel * TOK * 64 + j * 8 * 64) * 2,
                                is_full ? ring.tile_map : ring.map_8, bar, panel * 64,
                                row + (k_or_v << args.log2_B) + j * 8);
    };
    const int offset = first_kv - item.kv0, last_offset = item.kv1 - item.kv0 - 1,
              page_offset = offset & ((1 << args.log2_B) - 1);
    /* With args.prefetch the first BUFS tiles are requested before grid_wait(). If the tile of the
     * row's own (last) position is among them, the step may not have stored K and V of that
     * position yet. reload_last: load K and V of that position again after grid_wait(). */
    const bool reload_last = args.prefetch && n_tiles && n_tiles <= BUFS &&
                             item.kv1 == item.pos_hi + 1;
    int page = 0; /* id of the page of the last position */
    /* L2 prefetch before grid_wait(). Page ids may be read here, because no kernel of the step
     * writes them. K and V may still change, but they come only to the L2 cache, which sees later
     * writes, so no stale value is used. */
    if (n_tiles) {
        first_page = offset >> args.log2_B;
        page_ids = args.pages[item.page0 + min(first_page + lane, last_offset >> args.log2_B)];
        /* Lanes 0 and 1: K and V of the item's first page. With args.prefetch lanes 2 and 3: those
         * of the next page. Longer items are prefetched only in part. */
        int page_bit = lane / 2 % 2,
            from = page_bit ? (offset | ((1 << args.log2_B) - 1)) + 1 : offset;
        size_t row =
            (((size_t)__shfl_sync(~0u, page_ids, page_bit) * args.K + kv_head) * 2 + lane % 2
             << args.log2_B) +
            (page_bit ? 0 : page_offset);
        const int n_kv = min((1 << args.log2_B) - (page_bit ? 0 : page_offset),
                             last_offset + 1 - from);
        const void *first = args.kv + row * args.D;
        if constexpr (FP8)
            first = attn_fp8_row(args, __shfl_sync(~0u, page_ids, page_bit), kv_head, lane % 2,
                                 page_bit ? 0 : page_offset);
        if (lane < (args.prefetch ? 4 : 2) && from <= last_offset)
            bulk_prefetch(first, n_kv * args.D * (FP8 ? 1 : 2));
        page = __shfl_sync(~0u, page_ids, min((last_offset >> args.log2_B) - first_page, 31));
    }
    for (int i = 0; args.prefetch && i < BUFS && i < n_tiles; i++) request_tile(i);
    grid_wait();
    for (int i = 0; !args.prefetch && i < BUFS && i < n_tiles; i++) request_tile(i);
    uint4 last_row = {};
    uint16_t last_scales = 0;
    constexpr int PIECES = DP / (FP8 ? 16 : 8);
    const int is_v = lane / PIECES, piece = lane % PIECES;
    if (FP8 && reload_last && is_v < 2) {
        const int in_page = last_offset & ((1 << args.log2_B) - 1);
        last_row = *((const uint4 *)attn_fp8_row(args, page, kv_head, is_v, in_page) + piece);
        last_scales = *(const uint16_t *)attn_fp8_scales(args, page, kv_head, in_page);
    } else if (reload_last && is_v < 2 && piece * 8 < args.D) {
        const size_t row = ((((size_t)page * args.K + kv_head) * 2 + is_v) << args.log2_B) +
                           (last_offset & ((1 << args.log2_B) - 1));
        last_row = *(const uint4 *)(args.kv + row * args.D + piece * 8);
    }
    uint32_t q[DP / 16][4];
    float rescale[2];
    stats = attn_row_stats{lane / 4, {-INFINITY, -INFINITY}};
    if constexpr (FP8) attn_fp8_load_q<DP>(args, item, lane / 4, kv_head, q);
    else attn_load_q<DP>(args, item, lane / 4, kv_head, q);
    int rows = item.nq > 8 ? 2 : 1;
    for (int i = 0; i < n_tiles; i++) {
        int kv = first_kv + i * TOK, n_kv = item.kv1 - kv;
        bf16 *k = ring.tiles + i % BUFS * 2 * HALF;
        unsigned char *scales = FP8 ? ring.scales + i % BUFS * 2 * TOK : NULL;
        float scores[TOK / 2];
        /* where 16 bytes of K are, in units of bf16; those of V are HALF behind */
        auto piece_at = [](int row, int piece_of_row) {
            return FP8 ? attn_fp8_piece_at<DP>(row, piece_of_row) / 2
                       : attn_piece_at(TOK, row, piece_of_row);
        };
        mbar_wait(smem_addr(&ring.full[i % BUFS]), i / BUFS & 1);
        if (reload_last && i == n_tiles - 1) {
            if (is_v < 2) *(uint4 *)(k + is_v * HALF + piece_at(n_kv - 1, piece)) = last_row;
            if (FP8 && lane == 0) *(uint16_t *)(scales + 2 * (n_kv - 1)) = last_scales;
            __syncwarp();
        }
        if constexpr (FP8) attn_fp8_qk<DP, TOK>(scores, q, (unsigned char *)k, scales);
        else attn_qk<DP, TOK>(scores, q, k, DP == 64 ? 64 : args.D);
        int from = max(0, item.kv0 + item.skip - kv) / 8 * 8;
        /* P is 0 outside of the loaded positions, but 0 * NaN is NaN: zero the rows of V there */
        if (n_kv < TOK || from) {
            for (int j = lane; j < TOK * PIECES; j += 32)
                if (j / PIECES < from || j / PIECES >= n_kv)
                    *(uint4 *)(k + HALF + piece_at(j / PIECES, j % PIECES)) = uint4{};
            for (int j = lane; FP8 && j < TOK; j += 32) /* a scale may be NaN, too */
                if (j < from || j >= n_kv) *(uint16_t *)(scales + 2 * j) = 0;
            fence_async_smem(); /* orders these stores before the next TMA write to this buffer */
            __syncwarp();
        }
        if (i < unmasked.x || i >= unmasked.y)
            attn_mask(args, item, scores,
                      make_int2(attn_pos(args, item, stats.query),
                                attn_pos(args, item, stats.query + 8)),
                      kv);
        attn_softmax_update(scores, stats.row_max, stats.row_sum, rescale, args.scale, rows);
        attn_rescale(acc, rescale);
        if constexpr (FP8)
            attn_fp8_pv<DP, TOK>(acc, scores, (unsigned char *)(k + HALF), scales);
        else attn_pv<DP, TOK>(acc, scores, k + HALF, DP == 64 ? 64 : args.D);
        __syncwarp();
        if (i + BUFS < n_tiles) request_tile(i + BUFS);
    }
    if constexpr (FP8) attn_fp8_sort(acc);
}
#endif

template <int DP, int TOK, int BUFS, bool FP8>
__global__ void __launch_bounds__(32)
    attn_small(const __grid_constant__ attn_args args, const __grid_constant__ CUtensorMap tile_map,
               const __grid_constant__ CUtensorMap map_8) {
#if HOPPER
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[BUFS];
    __shared__ __align__(16) unsigned char scales[FP8 ? BUFS * TOK * 2 : 16];
    const attn_item item = args.items[blockIdx.x / args.K];
    attn_row_stats stats;
    float acc[DP / 2] = {};
    attn_small_mainloop<DP, TOK, BUFS, FP8>(args, item, blockIdx.x % args.K,
                                            {(bf16 *)attn_smem, full, &tile_map, &map_8, scales},
                                            stats, acc);
    attn_store_rows<DP / 2, FP8>(args, item, stats, blockIdx.x % args.K, acc);
#else
    __trap();
#endif
}

/* ---- attn_cta_split: split-KV of a small item inside one CTA ----
 *
 * In: merges (attn_merge) and small items; grid: merge x kv head; CTA: at most
 * attn_cta_split_max(D) warps. Warp j computes split j of the merge: item merge.first + j. A split
 * has all queries of the merge, or only some of them if the merge is a prefix group
 * (attn_plan_prefix_groups). Out as attn_mma.
 * Shared memory: BUFS tiles per warp. After the main loop a warp's ring holds the O of its split.
 * Bytes and FLOPs: as attn_small, for each split.
 *
 * Why this shape:
 * - With few sequences every launch counts. Splits that are merged in shared memory need no
 *   attn_merge_splits, which takes 3 us a layer.
 * - One launch with prefix groups replaces two or three launches per level. It is faster than
 *   attn_fused and than launches by level while there is little KV work (attn_plan.group_max_work).
 *   attn_choose_prefix_groups decides if groups mix rows of different prompts.
 * - Splits are added in their order, so results are deterministic.
 *
 * Figures: test/results/kernel-choices.md, chapter 9. */
#if HOPPER
/* Merges the splits of one query of `merge`, in their order, and stores O and LSE. THREADS threads
 * share the query; thread t of them merges columns 2 t, 2 t + 1, 2 t + 2 THREADS ... max_sum(j):
 * (row_max, row_sum) of split j; split_o(j): its O, not normalized. All threads of the warp must
 * call. */
template <int MAX_SPLITS, int THREADS, class MaxSum, class SplitO>
__device__ static inline void attn_merge_query(const attn_args &args, const attn_merge &merge,
                                               int query, int kv_head, const MaxSum &max_sum,
                                               const SplitO &split_o) {
    const int thread = threadIdx.x % THREADS;
    attn_item item = {};
    item.q0 = merge.q0;
    item.nq = (short)merge.nq;
    item.flags = merge.flags;
    bool valid = query < merge.nq;
    float state_lse = valid ? attn_state_lse(args, item, query, kv_head) : -INFINITY,
          row_max = -INFINITY, row_sum = 0;
    __syncwarp(); /* all lanes have read the old LSE; attn_finish_query may overwrite it */
    if (!valid) return;
    float2 split[MAX_SPLITS];
#pragma unroll
    for (int j = 0; j < MAX_SPLITS; j++) {
        split[j] = j < merge.n_splits ? max_sum(j) : make_float2(-INFINITY, 0);
        row_max = fmaxf(row_max, split[j].x);
    }
    float base = row_max == -INFINITY ? 0 : row_max;
#pragma unroll
    for (int j = 0; j < MAX_SPLITS; j++) {
        split[j].x = ex2(split[j].x - base);
        row_sum += split[j].y * split[j].x;
    }
    attn_output out = attn_finish_query(args, item, query, kv_head, {row_max, row_sum, state_lse},
                                        thread == 0);
    for (int col = 2 * thread; col < args.D; col += 2 * THREADS) {
        float x = 0, y = 0;
#pragma unroll
        for (int j = 0; j < MAX_SPLITS; j++) {
            if (j >= merge.n_splits) break;
            if (split[j].x == 0) continue; /* a split without this query has written no O for it */
            float2 v = *(const float2 *)(split_o(j) + col);
            x += split[j].x * v.x, y += split[j].x * v.y;
        }
        attn_store_pair(out, col, x, y);
    }
}
#endif

template <int DP, int TOK, int BUFS, bool FP8>
__global__ void __launch_bounds__(32 * attn_cta_split_max(DP), 1)
    attn_cta_split(const __grid_constant__ attn_args args,
                   const __grid_constant__ CUtensorMap tile_map,
                   const __grid_constant__ CUtensorMap map_8, const attn_merge *merges) {
#if HOPPER
    /* RING: elements of a warp's ring */
    constexpr int RING = BUFS * attn_small_tile<DP, TOK, FP8> / 2;
    constexpr int MAX_SPLITS = attn_cta_split_max(DP);
    static_assert(RING * sizeof(bf16) >= ATTN_SMALL_Q * DP * sizeof(float),
                  "the sums reuse the ring's memory");
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[MAX_SPLITS][BUFS];
    __shared__ __align__(16) unsigned char scales[FP8 ? MAX_SPLITS : 1][FP8 ? BUFS * TOK * 2 : 16];
    __shared__ float2 max_sum[MAX_SPLITS][ATTN_SMALL_Q]; /* (row_max, row_sum) of each query */
    const attn_merge merge = merges[blockIdx.x / args.K];
    int kv_head = blockIdx.x % args.K, warp = threadIdx.x / 32, quad = threadIdx.x % 4;
    if (warp < merge.n_splits) {
        const attn_item item = args.items[merge.first + warp];
        attn_row_stats stats;
        float acc[DP / 2] = {}, *split_o = (float *)((bf16 *)attn_smem + warp * RING);
        if (threadIdx.x % 32 < ATTN_SMALL_Q) max_sum[warp][threadIdx.x % 32] = float2{-INFINITY, 0};
        const attn_small_ring ring = {(bf16 *)attn_smem + warp * RING, full[warp], &tile_map,
                                      &map_8, scales[FP8 ? warp : 0]};
        attn_small_mainloop<DP, TOK, BUFS, FP8>(args, item, kv_head, ring, stats, acc);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(stats.row_sum[r]);
            const int query = item.q0 - merge.q0 + stats.query + 8 * r; /* within the merge */
            if (stats.query + 8 * r >= item.nq) continue;
            if (quad == 0) max_sum[warp][query] = float2{stats.row_max[r], sum};
#pragma unroll
            for (int c = 0; c < DP / 8; c++) {
                const float2 pair = {acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]};
                *(float2 *)(split_o + query * DP + attn_pair_col<FP8>(c, quad)) = pair;
            }
        }
    } else {
        grid_launch_dependents();
        grid_wait();
    }
    __syncthreads();
    for (int query0 = 0; query0 < merge.nq; query0 += blockDim.x / 16) {
        const int query = query0 + threadIdx.x / 16;
        attn_merge_query<MAX_SPLITS, 16>(
            args, merge, query, kv_head, [&](int j) { return max_sum[j][query]; },
            [&](int j) { return (const float *)((bf16 *)attn_smem + j * RING) + query * DP; });
    }
#else
    __trap();
#endif
}

/* ---- attn_cluster_split: split-KV of a small item inside a cluster ----
 *
 * In and out as attn_cta_split. Grid: merge x kv head x CTA rank, in clusters of ATTN_CLUSTER CTAs.
 * Warp w of CTA c computes split w * ATTN_CLUSTER + c. CTA i % ATTN_CLUSTER merges query i: the
 * warps of all splits send (row_max, row_sum) and O of query i to it through DSMEM.
 * Shared memory: BUFS tiles per warp, then the received O as [split][row][DP]; row: the queries
 * that this CTA merges.
 * Splits are added in their order: the result equals that of attn_cta_split to the bit.
 *
 * Why this shape: 10 splits in one CTA need 160 KB. Such a CTA cannot start before the previous
 * kernel has left its SM, so it prefetches no K and V, and one SM must load everything. The CTAs of
 * a cluster are small and use four SMs.
 * The launch bound of one CTA per SM is needed: without it ptxas assumes that all CTAs of a cluster
 * are on one SM, and spills.
 *
 * attn_uses_cluster decides whether a step uses this kernel.
 *
 * Retired: clusters of two where clusters of four do not fit (slower); clusters of eight (as fast
 * as clusters of four).
 *
 * Figures: test/results/kernel-choices.md, chapter 9. */
template <int DP> __host__ __device__ static constexpr int attn_cluster_split_max() { /* splits */
    return (attn_cta_split_max(DP) + ATTN_CLUSTER - 1) / ATTN_CLUSTER * ATTN_CLUSTER;
}
#if HOPPER
/* Number of queries among 0 .. n-1 that CTA cta_rank merges. */
__device__ static inline int attn_cluster_queries(int n, int cta_rank) {
    return (n - cta_rank + ATTN_CLUSTER - 1) / ATTN_CLUSTER;
}
#endif
template <int DP, int TOK, int BUFS, bool FP8> IN_CLUSTERS(ATTN_CLUSTER)
__global__ void __launch_bounds__(32 * (attn_cluster_split_max<DP>() / ATTN_CLUSTER), 1)
    attn_cluster_split(const __grid_constant__ attn_args args,
                       const __grid_constant__ CUtensorMap tile_map,
                       const __grid_constant__ CUtensorMap map_8, const attn_merge *merges) {
#if HOPPER
    constexpr int CTAS = ATTN_CLUSTER, ROWS = ATTN_SMALL_Q / CTAS,
                  MAX_SPLITS = attn_cluster_split_max<DP>();
    /* elements of a warp's ring */
    constexpr int RING = BUFS * attn_small_tile<DP, TOK, FP8> / 2;
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t full[MAX_SPLITS / CTAS][BUFS], recv_bar;
    __shared__ __align__(16)
        unsigned char scales[FP8 ? MAX_SPLITS / CTAS : 1][FP8 ? BUFS * TOK * 2 : 16];
    __shared__ float2 max_sum[MAX_SPLITS][ROWS]; /* (row_max, row_sum) of each query */
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
              cta_rank = cluster_rank();
    if (threadIdx.x == 0) mbar_init(smem_addr(&recv_bar), 1), mbar_init_fence();
    __syncthreads();
    cluster_arrive_relaxed(); /* recv_bar is initialized: after cluster_wait() others may send */
    const int kv_head = blockIdx.x / CTAS % args.K,
              split = warp * CTAS + cta_rank; /* of this warp */
    const attn_merge merge = merges[blockIdx.x / CTAS / args.K];
    /* Bytes that this CTA will receive from each split: (row_max, row_sum) of every query that this
     * CTA merges, and O of those among them that the split covers. */
    if (warp == 0) {
        int bytes = 0;
        if (lane < merge.n_splits) {
            const attn_item split_item = args.items[merge.first + lane];
            const int at = split_item.q0 - merge.q0,
                      n_queries = attn_cluster_queries(at + split_item.nq, cta_rank) -
                                  attn_cluster_queries(at, cta_rank);
            bytes = attn_cluster_queries(merge.nq, cta_rank) * 8 + n_queries * DP * 4;
        }
        bytes = __reduce_add_sync(~0u, bytes);
        if (lane == 0) mbar_expect_tx(smem_addr(&recv_bar), bytes);
    }
    const bool has_split = split < merge.n_splits;
    const uint32_t recv_smem = smem_addr(attn_smem) + warps * RING * 2;
    attn_item item = {};
    attn_row_stats stats;
    float acc[DP / 2] = {};
    if (has_split) {
        item = args.items[merge.first + split];
        const attn_small_ring ring = {(bf16 *)attn_smem + warp * RING, full[warp], &tile_map,
                                      &map_8, scales[FP8 ? warp : 0]};
        attn_small_mainloop<DP, TOK, BUFS, FP8>(args, item, kv_head, ring, stats, acc);
    } else {
        grid_launch_dependents();
        grid_wait();
    }
    __syncwarp();
    cluster_wait();
    const int query0 = item.q0 - merge.q0;
    if (has_split) {
        /* queries that the split does not cover: row_max -inf, row_sum 0 */
        if (lane < merge.nq && (lane < query0 || lane >= query0 + item.nq))
            st_async_8(mapa(smem_addr(&max_sum[split][lane / CTAS]), lane % CTAS), -INFINITY, 0,
                       mapa(smem_addr(&recv_bar), lane % CTAS));
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float sum = quad_sum(stats.row_sum[r]);
            const int query = query0 + stats.query + 8 * r, to_rank = query % CTAS;
            if (stats.query + 8 * r >= item.nq) continue;
            const uint32_t bar = mapa(smem_addr(&recv_bar), to_rank);
            const uint32_t at = mapa(recv_smem + (split * ROWS + query / CTAS) * DP * 4, to_rank);
            if (lane % 4 == 0)
                st_async_8(mapa(smem_addr(&max_sum[split][query / CTAS]), to_rank),
                           stats.row_max[r], sum, bar);
#pragma unroll
            for (int c = 0; c < DP / 8; c++)
                st_async_8(at + attn_pair_col<FP8>(c, lane % 4) * 4, acc[4 * c + 2 * r],
                           acc[4 * c + 2 * r + 1], bar);
        }
    }
    /* all splits have arrived; the wait also keeps this CTA alive until the last remote store */
    mbar_wait(smem_addr(&recv_bar), 0);
    const float *split_o = (const float *)(attn_smem + warps * RING * 2);
    for (int row = warp; row * CTAS + cta_rank < merge.nq; row += warps)
        attn_merge_query<MAX_SPLITS, 32>(
            args, merge, row * CTAS + cta_rank, kv_head, [&](int j) { return max_sum[j][row]; },
            [&](int j) { return split_o + (j * ROWS + row) * DP; });
#else
    __trap();
#endif
}

/* ---- attn_wgmma: tiles on Hopper, after FlashAttention-3 ----
 *
 * In and out as attn_mma. Grid: item x kv head; CTA: WGS consumer warpgroups of 64 queries each,
 * and one producer warpgroup. Only its first warp works: it issues the TMA loads of K and V.
 * Shared memory: Q [panels][64 WGS][64], then BUFS tiles of N positions of K and BUFS of V, each
 * [panels][N][64].
 * FLOPs: 4 * 64 WGS * D * kv. Bytes: Q, and K and V once per item.
 *
 * Why this shape:
 * - S = Q K^T of tile j and P V of tile j-1 are in flight together. The softmax of tile j overlaps
 *   P V of tile j-1. P goes from accumulators to the A operand in registers.
 * - The consumer warpgroups issue their wgmma in turn (ping-pong by named barriers). So one
 *   computes exponentials while the tensor cores work for another.
 * - A warpgroup spends over 30 % of a tile's time on issuing its own wgmma. It does nothing else
 *   meanwhile, probably because P is read from its registers. About 40 % go to exponentials. The
 *   rest is barriers, rescaling and packing, so every instruction counts. Therefore rescaling is
 *   lazy (attn_softmax_update_lazy), and tiles are larger (N = 192) for long spans at D > 96.
 * - For short spans the fixed cost of an item was as large as its main loop. So there are no
 *   divisions before Q is loaded, positions are loaded along with Q, and o is stored through shared
 *   memory with 16-byte writes.
 *
 * Retired, with H100 TFLOP/s for causal prefill of 4,096 rows at D = 64 / 128 (then 406 / 500):
 * - No producer warp; warp 0 issues the loads between its wgmma: 290 / 323.
 * - Persistent CTAs that take items in turn: 384 / 484. The hardware scheduler balances unequal
 *   items better. With jobs sorted by length and the next item prefetched: 2 to 8 % slower for
 *   4,096 and 16,384 rows.
 *
 * Retired, with H200 us for causal prefill of 16,384 rows, D = 64 / 128:
 * - P in shared memory, so that a warpgroup need not wait for the wgmma that reads P: 2,567 / 4,383
 *   (the latter with N = 128, for lack of space), now 2,288 / 3,803.
 * - Ping-pong turns that end before P V: 2,252 / 3,732. No turns: 2,246 / 3,755. Now 2,222 / 3,675.
 * - A polynomial for 1/8, 1/4, 1/3 of the exponentials, D = 64: 2,386, 2,475, 2,535, now 2,249.
 * - Two consumer warpgroups with N = 192, D = 64: 2,456, now 2,222.
 * - N = 192 for short spans, D = 128 (16 prompts of 512 rows): 197, now 178.
 *
 * All figures: test/results/kernel-choices.md, chapter 9. */
template <int DP, int WGS, int N, int BUFS> struct attn_wgmma_shape {
    static constexpr int PANELS = (DP + 63) / 64, THREADS = WGS * 128 + 128;
    /* registers of a thread of the consumer warpgroups, and of the producer warpgroup */
    static constexpr int REGS = WGS == 2 ? 240 : 160, PRODUCER_REGS = WGS == 2 ? 24 : 32;
    /* bytes of shared memory: Q, a tile of K or of V, all */
    static constexpr int Q = PANELS * WGS * 64 * 128, TILE = PANELS * N * 128,
                         BYTES = Q + BUFS * 2 * TILE;
};

/* The KV tiles of an item, N positions each. */
typedef struct attn_tiles {
    int first_kv; /* position where the first tile begins (attn_first_kv) */
    int n_tiles;  /* 0: the item has no positions */
    int n_before; /* tiles that have gone through the ring before this item */
} attn_tiles;
/* The shared memory of a CTA. */
typedef struct attn_wgmma_smem {
    char *base;    /* Q, then the ring: BUFS tiles of K, BUFS tiles of V */
    uint32_t q;    /* shared address of base */
    uint32_t bars; /* shared address of mbarriers, BUFS each: full K, full V, empty K, empty V */
    int *pos;      /* [64 WGS] positions of the item's queries; attn_fused: NULL */
} attn_wgmma_smem;

/* Issues S = Q K^T of one warpgroup, 64 queries x N positions, as one commit group. q, k: shared
 * addresses; q_panel: bytes of a panel of Q. */
template <int DP, int N>
__device__ static inline void attn_wgmma_qk(float (&scores)[N / 2], uint32_t q, int q_panel,
                                            uint32_t k) {
#if HOPPER
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < DP / 16; c++)
        wgmma_ss<N>(scores, wgmma_desc(q + c / 4 * q_panel) + c % 4 * 2,
                    wgmma_desc(k + c / 4 * N * 128) + c % 4 * 2, c > 0);
    wgmma_commit();
#endif
}
/* Issues acc += P V of one warpgroup, as one commit group. v: shared address. */
template <int DP, int N>
__device__ static inline void attn_wgmma_pv(float (&acc)[DP / 2],
                                            const uint32_t (&probs)[N / 16][4], uint32_t v) {
#if HOPPER
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < N / 16; n++)
        wgmma_rs<DP, 1>(acc, probs[n], wgmma_desc_trans(v, N * 128) + n * 128, 1);
    wgmma_commit();
#endif
}

/* The producer warp: loads K and V of all tiles, in the order of their use, in boxes of 64
 * positions. It skips boxes after the last position of the item. */
template <int DP, int WGS, int N, int BUFS>
__device__ static inline void attn_wgmma_producer(const attn_args &args, const CUtensorMap *map,
                                                  const attn_item &item, int kv_head,
                                                  const attn_tiles &tiles, attn_wgmma_smem smem) {
#if HOPPER
    typedef attn_wgmma_shape<DP, WGS, N, BUFS> shape;
    int lane = threadIdx.x % 32, last_offset = item.kv1 - item.kv0 - 1;
    /* page_ids: ids of the item's pages first_page .. first_page + 31, one per lane */
    int page_ids = 0, first_page = -32;
    for (int i = 0; i < 2 * tiles.n_tiles; i++) { /* order: K0, K1, V0, K2, V1 ... */
        int is_v = i == 2 * tiles.n_tiles - 1 || (i > 1 && i % 2 == 0),
            tile = is_v ? (i - 1) / 2 : (i + 1) / 2, ring_tile = tiles.n_before + tile;
        int buf = is_v * BUFS + ring_tile % BUFS;
        int offset = tiles.first_kv + tile * N - item.kv0,
            n_boxes = min(N / 64, (last_offset - offset) / 64 + 1);
        uint32_t to = smem.q + shape::Q + buf * shape::TILE, full = smem.bars + 8 * buf;
        mbar_wait(full + 16 * BUFS, (ring_tile / BUFS & 1) ^ 1);
        if (lane == 0) mbar_expect_tx(full, n_boxes * 64 * shape::PANELS * 128);
        for (int box = 0; box < n_boxes; box++, offset += 64, to += 64 * 128) {
            int page = offset >> args.log2_B;
            if (page - first_page >= 32 || page < first_page) {
                first_page = page;
                page_ids = args.pages[item.page0 + min(page + lane, last_offset >> args.log2_B)];
            }
            int row =
                (((__shfl_sync(~0u, page_ids, page - first_page) * args.K + kv_head) * 2 + is_v)
                 << args.log2_B) +
                (offset & ((1 << args.log2_B) - 1));
            for (int panel = 0; panel < shape::PANELS && lane == 0; panel++)
                tma_load_2d(to + panel * N * 128, map, full, panel * 64, row);
        }
    }
#endif
}

/* Copies Q of one warpgroup to shared memory, swizzled, and with LOAD_POS the positions of its
 * queries to pos. Missing queries and columns beyond D become 0, missing positions -1. */
template <int DP, int WGS, bool LOAD_POS>
__device__ static inline void attn_wgmma_load_q(const attn_args &args, const attn_item &item,
                                                int kv_head, int wg, bf16 *to, int *pos) {
#if HOPPER
    constexpr int PIECES = (DP + 63) / 64 * 8;
    if (LOAD_POS && threadIdx.x % 128 < 64)
        pos[wg * 64 + threadIdx.x % 128] = attn_pos(args, item, wg * 64 + threadIdx.x % 128);
    int piece = threadIdx.x % PIECES, row0 = wg * 64 + threadIdx.x % 128 / PIECES;
    uint4 x[PIECES / 2];
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++) {
        int row = row0 + i * (128 / PIECES);
        x[i] = uint4{};
        if (row < item.nq && piece * 8 < args.D)
            x[i] = *(const uint4 *)(args.q + attn_head_at(args, item.q0 + row, kv_head) * args.D +
                                    piece * 8);
    }
#pragma unroll
    for (int i = 0; i < PIECES / 2; i++)
        *(uint4 *)(to + attn_piece_at(WGS * 64, row0 + i * (128 / PIECES), piece)) = x[i];
    fence_async_smem();
    bar_sync(1 + wg, 128);
#endif
}

/* Zeroes rows n_kv .. N-1 of a tile of V: P is 0 there, but 0 * NaN is NaN. All threads of a
 * warpgroup call this. Each warpgroup does it for itself; they write the same zeros. */
template <int DP, int N>
__device__ static inline void attn_wgmma_zero_tail(bf16 *v, int n_kv, int wg) {
#if HOPPER
    for (int i = threadIdx.x % 128 + n_kv * 8; i < N * 8; i += 128)
        for (int panel = 0; panel < (DP + 63) / 64; panel++)
            *(uint4 *)(v + attn_piece_at(N, i / 8, panel * 8 + i % 8)) = uint4{};
    fence_async_smem();
    bar_sync(1 + wg, 128);
#endif
}

/* Keeps ptxas from moving the softmax below the wgmma_wait that follows: there it would overlap no
 * wgmma. The predicated store never happens, because x is at least 0. But the store needs x, and
 * ptxas may not move it past the wait. at: any shared address. */
__device__ static inline void attn_pin_softmax(float x, uint32_t at) {
    asm volatile("{.reg .pred p; setp.lt.f32 p, %0, 0f00000000; @p st.shared.b32 [%1], %1;}"
                 ::"f"(x), "r"(at) : "memory");
}

/* Main loop of one consumer warpgroup: its 64 queries against all tiles of the item. store(stats,
 * acc) is the epilogue.
 * FUSED: for attn_fused. All its queries see the whole span, so smem.pos is not used. It rescales
 * after every tile: the tensor cores are not its bottleneck, so lazy rescaling would cost more than
 * it saves.
 * Named barriers: 1 + wg: the 128 threads of this warpgroup. 1 + WGS + wg: the turn of warpgroup wg
 * to issue wgmma. It waits there, and the warpgroup before it arrives. */
template <int DP, int WGS, int N, int BUFS, bool FUSED, class Store>
__device__ static inline void attn_wgmma_mainloop(const attn_args &args, const attn_item &item,
                                                  int kv_head, int wg, const attn_tiles &tiles,
                                                  attn_wgmma_smem smem, const Store &store) {
#if HOPPER
    typedef attn_wgmma_shape<DP, WGS, N, BUFS> shape;
    /* buf, parity: ring buffer of the tile whose P V comes next, and its mbarrier phase parity */
    int lane = threadIdx.x % 32, buf = tiles.n_before % BUFS, parity = tiles.n_before / BUFS & 1;
    const int first_kv = tiles.first_kv, n_tiles = tiles.n_tiles;
    uint32_t q_smem = smem.q, k_smem = q_smem + shape::Q, v_smem = k_smem + BUFS * shape::TILE,
             full_k = smem.bars, full_v = full_k + 8 * BUFS;
    uint32_t empty_k = full_v + 8 * BUFS, empty_v = empty_k + 8 * BUFS;
    attn_row_stats stats = {wg * 64 + (int)threadIdx.x % 128 / 32 * 16 + lane / 4,
                            {-INFINITY, -INFINITY}};
    float scores[N / 2], acc[DP / 2] = {}, rescale[2];
    uint32_t probs[N / 16][4];
    int2 unmasked = attn_unmasked_tiles(args, item, first_kv, N);
    bool must_rescale = true;
    auto softmax_update = [&](int j) {
        if (j < unmasked.x || j >= unmasked.y)
            attn_mask<FUSED>(args, item, scores,
                             FUSED ? make_int2(item.kv1, item.kv1)
                                   : make_int2(smem.pos[stats.query], smem.pos[stats.query + 8]),
                             first_kv + j * N);
        if (FUSED) attn_softmax_update(scores, stats.row_max, stats.row_sum, rescale, args.scale);
        else
            must_rescale = attn_softmax_update_lazy(scores, stats.row_max, stats.row_sum, rescale,
                                                    args.scale);
    };
    attn_wgmma_load_q<DP, WGS, !FUSED>(args, item, kv_head, wg, (bf16 *)smem.base, smem.pos);
    q_smem += wg * 64 * 128;
    if (n_tiles) {
        mbar_wait(full_k + 8 * buf, parity);
        attn_wgmma_qk<DP, N>(scores, q_smem, WGS * 64 * 128, k_smem + buf * shape::TILE);
        wgmma_wait<0>();
        wgmma_fence_operand(scores);
        if (lane == 0) mbar_arrive(empty_k + 8 * buf);
        softmax_update(0);
        attn_pack(probs, scores);
    }
    /* gives warpgroup 0 the first turn; later items continue the turns of the item before */
    if (wg == WGS - 1 && !tiles.n_before) bar_arrive(1 + WGS, 256);
    for (int j = 1; j < n_tiles; j++) {
        int prev_buf = buf, prev_parity = parity;
        if (++buf == BUFS) buf = 0, parity ^= 1;
        mbar_wait(full_k + 8 * buf, parity);
        bar_sync(1 + WGS + wg, 256); /* waits for this warpgroup's turn to issue wgmma */
        attn_wgmma_qk<DP, N>(scores, q_smem, WGS * 64 * 128, k_smem + buf * shape::TILE);
        mbar_wait(full_v + 8 * prev_buf, prev_parity);
        attn_wgmma_pv<DP, N>(acc, probs, v_smem + prev_buf * shape::TILE);
        bar_arrive(wg == WGS - 1 ? 1 + WGS : 2 + WGS + wg, 256);
        wgmma_wait<1>();
        wgmma_fence_operand(scores);
        if (lane == 0) mbar_arrive(empty_k + 8 * buf);
        softmax_update(j);
        attn_pin_softmax(stats.row_sum[0] + stats.row_sum[1], empty_k);
        wgmma_wait<0>();
        wgmma_fence_operand(acc);
        if (lane == 0) mbar_arrive(empty_v + 8 * prev_buf);
        if (must_rescale) attn_rescale(acc, rescale);
        attn_pack(probs, scores);
    }
    if (n_tiles) {
        int n_kv = item.kv1 - first_kv - (n_tiles - 1) * N;
        mbar_wait(full_v + 8 * buf, parity);
        if (n_kv < N)
            attn_wgmma_zero_tail<DP, N>((bf16 *)(smem.base + shape::Q + (BUFS + buf) * shape::TILE),
                                        n_kv, wg);
        attn_wgmma_pv<DP, N>(acc, probs, v_smem + buf * shape::TILE);
        wgmma_wait<0>();
        wgmma_fence_operand(acc);
        if (lane == 0) mbar_arrive(empty_v + 8 * buf);
    }
    store(stats, acc);
#endif
}

/* Epilogue of one warpgroup for items that write o: O goes through the shared memory that held Q
 * and is stored with 16-byte writes. No LSE is written. */
template <int DP, int WGS>
__device__ static inline void attn_wgmma_store(const attn_args &args, const attn_item &item,
                                               const attn_row_stats &stats, int kv_head, int wg,
                                               const float (&acc)[DP / 2], bf16 *o_smem) {
#if HOPPER
    constexpr int PIECES = (DP + 63) / 64 * 8;
    const int lane = threadIdx.x % 32, quad = lane % 4,
              row0 = wg * 64 + threadIdx.x % 128 / 32 * 16;
    bar_sync(1 + wg, 128); /* all four warps have read Q */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = stats.query + 8 * r;
        const float sum = quad_sum(stats.row_sum[r]);
        if (query >= item.nq) continue;
        const float state_lse = attn_state_lse(args, item, query, kv_head);
        const attn_output out = attn_finish_query(args, item, query, kv_head,
                                                  {stats.row_max[r], sum, state_lse}, false);
#pragma unroll
        for (int c = 0; c < DP / 8; c++) {
            const float2 pair = attn_merge_pair(out, out.state && c * 8 < args.D, c * 8 + quad * 2,
                                                acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]);
            *((uint32_t *)(o_smem + attn_piece_at(WGS * 64, query, c)) + quad) =
                pack_bf16(pair.x, pair.y);
        }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < PIECES / 2; k++) {
        const int row = row0 + k * (32 / PIECES) + lane / PIECES, piece = lane % PIECES;
        if (row < item.nq && piece * 8 < args.D)
            *(uint4 *)(args.o + attn_head_at(args, item.q0 + row, kv_head) * args.D + piece * 8) =
                *(const uint4 *)(o_smem + attn_piece_at(WGS * 64, row, piece));
    }
#endif
}

template <int DP, int WGS, int N, int BUFS>
__global__ void __launch_bounds__(attn_wgmma_shape<DP, WGS, N, BUFS>::THREADS, 1)
    attn_wgmma(const __grid_constant__ attn_args args, const __grid_constant__ CUtensorMap map) {
#if HOPPER
    typedef attn_wgmma_shape<DP, WGS, N, BUFS> shape;
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t bars[4 * BUFS]; /* BUFS each: full K, full V, empty K, empty V */
    __shared__ attn_item item;          /* not in registers, which are scarce */
    __shared__ int pos[WGS * 64];
    const attn_wgmma_smem smem = {attn_smem, smem_addr(attn_smem), smem_addr(bars), pos};
    int kv_head = blockIdx.x % args.K;
    if (threadIdx.x == 0) {
        item = args.items[blockIdx.x / args.K];
        for (int i = 0; i < 2 * BUFS; i++) {
            mbar_init(smem.bars + 8 * i, 1);
            mbar_init(smem.bars + 8 * (2 * BUFS + i), 4 * WGS);
        }
        mbar_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_wait();
    int first_kv = attn_first_kv(args, item, N),
        n_tiles = item.kv1 > first_kv ? (item.kv1 - first_kv + N - 1) / N : 0;
    const attn_tiles tiles = {first_kv, n_tiles, 0};
    if (threadIdx.x < 128) {
        setmaxnreg_dec<shape::PRODUCER_REGS>();
        if (threadIdx.x < 32)
            attn_wgmma_producer<DP, WGS, N, BUFS>(args, &map, item, kv_head, tiles, smem);
    } else {
        setmaxnreg_inc<shape::REGS>();
        const int wg = threadIdx.x / 128 - 1;
        auto store = [&](const attn_row_stats &stats, const float(&acc)[DP / 2]) {
            if (item.flags & ATTN_TO_O)
                attn_wgmma_store<DP, WGS>(args, item, stats, kv_head, wg, acc, (bf16 *)attn_smem);
            else attn_store_rows(args, item, stats, kv_head, acc);
        };
        attn_wgmma_mainloop<DP, WGS, N, BUFS, false>(args, item, kv_head, wg, tiles, smem, store);
    }
#else
    __trap();
#endif
}

/* ---- attn_fused: a shared prefix and its rows' own spans in one CTA; Hopper, D = 64, 128 ----
 *
 * Cascade attention (Hydragen) in one launch.
 * In: n_fused prefix items, then the own items, one per row. A prefix item has at most 128 queries
 * of at most 1 << log2_rows rows. All these rows see the whole prefix span, and the next and last
 * span of each is its own span. A single row without a prefix has an empty prefix item. Out: o.
 * Grid: min(SMs, jobs) persistent CTAs. attn_plan_jobs gives each its jobs, (prefix item, kv head)
 * pairs.
 * CTA: 512 threads. Warp 0 is the producer for the prefix. Warps 4 .. 11 are two consumer
 * warpgroups, which compute the prefix as in attn_wgmma. Warps 1 .. 3 and 12 .. 15 are the own
 * warps: they compute own items on mma.sync, one row at a time. Each takes its next row from a
 * counter of the CTA and loads K and V itself.
 * Shared memory: Q, prefix ring, seven own rings, LSE, and at D = 64 the exchange buffers; see
 * attn_fused_shape.
 * Bytes: K and V of the own positions. FLOPs: 4 * 128 * D * prefix positions for each job.
 *
 * Why this shape:
 * - The prefix is bound by the tensor cores, own items by the bytes of K and V. Run at the same
 *   time, they take as long as the slower of the two.
 * - The consumer warpgroups give (O, LSE) of the prefix to the own warps through two exchange
 *   buffers per CTA. At D = 64 these are in shared memory. At D = 128 there is no space for 2 x 64
 *   KB besides Q (32 KB), prefix ring (64 KB) and own rings (112 KB). With items of half the
 *   queries they would fit, but then K and V of the prefix would be read twice as often. So the
 *   exchange buffers are in global memory: 17 MB, a third of the L2 cache.
 * - An own warp merges the prefix after its own positions, because prefix and own items of a CTA's
 *   first job begin at the same time.
 * - Own K and V are loaded with evict_first: they are read once, K and V of the prefix many times.
 * - The merge order is fixed. It is as fast to merge the prefix first where it is ready, but then
 *   the last bit of the result depends on timing.
 * - A row's queries are the 8 columns of the mma, not its 16 rows. This halves the products.
 *
 * ptxas before 12.8 spills with 112 registers per prefix thread at D = 64 (so it gets 120), and
 * with any division of the registers at D = 128. With those compilers D = 128 runs level by level,
 * as other head sizes do (ATTN_FUSED_D).
 *
 * Retired, H200 us for 8,192 samples of eight prompts at D = 64 (this kernel then: 401 to 403):
 * - Own K and V without evict_first: 431.
 * - Own tiles loaded in copies of 8, 16 or 32 positions, separately for K and V: 463.
 * - The same, but in loops over 8 positions, with three divisions per row and six own warps: 541.
 * - The same, but with four own warps that take every fourth row, and one exchange buffer: 652.
 * - Rows with little or no prefix in separate launches (29 prompts): 448; this kernel then: 414.
 * - Jobs given to the CTAs in turn, without balancing: 406.
 * - Looking up a row, or loading its queries, while the previous row is computed: no gain.
 *
 * Retired, as above, but measured when this kernel took 395 (D = 64) / 851 (D = 128):
 * - The prefix merged before the own positions: 399 / 854; worse for few rows (35, now 30).
 * - L2 promotion of 256 bytes in the tensor map: 401 / 873.
 *
 * All figures: test/results/kernel-choices.md, chapter 9. */
enum {
    ATTN_FUSED_N = 64, /* positions of a prefix tile */
    ATTN_OWN_BUFS = 2, /* buffers of an own warp's ring */
    ATTN_OWN_WARPS = 7
};
template <int DP> struct attn_fused_shape {
    static constexpr int WGS = 2, N = ATTN_FUSED_N, BUFS = 2, THREADS = 512;
    /* Registers of a thread, which starts with 128 (setmaxnreg): REGS in the consumer warpgroups,
     * OWN_REGS in all other warps. */
    static constexpr int REGS = DP == 128 ? 144 : NVCC_VERSION < 1208 ? 120 : 112;
    static constexpr int OWN_REGS = 256 - REGS;
    typedef attn_wgmma_shape<DP, WGS, N, BUFS> shared; /* of the prefix */
    static constexpr int TOK = 2048 / DP;                         /* positions of an own tile */
    static constexpr int OWN_TILE = TOK * DP * 2;                 /* bytes of its K or V */
    static constexpr int OWN_RING = ATTN_OWN_BUFS * 2 * OWN_TILE; /* bytes, per own warp */
    static constexpr int EXCHANGE = ATTN_FUSED_Q * DP;            /* floats of an exchange buffer */
    /* offsets in shared memory, and its size */
    static constexpr int OWN_AT = shared::BYTES, LSE_AT = OWN_AT + ATTN_OWN_WARPS * OWN_RING;
    static constexpr int EXCHANGE_AT = LSE_AT + 2 * ATTN_FUSED_Q * 4,
                         BYTES = EXCHANGE_AT + (DP == 64 ? 2 * EXCHANGE * 4 : 0);
};

/* The two exchange buffers of a CTA. Buffer i % 2 takes (O, LSE) of the prefix in round i, from
 * the consumer warpgroups to the own warps. */
typedef struct attn_exchange {
    /* o: [2][ATTN_FUSED_Q][DP], columns in the order of attn_exchange_at; lse: [2][ATTN_FUSED_Q] */
    float *o, *lse;
    uint32_t full;  /* two mbarriers: one arrival per thread of the consumer warpgroups */
    uint32_t empty; /* two mbarriers: one arrival per thread of the own warps, after its reads */
} attn_exchange;
/* Address of the columns 32 j + g + {0, 8, 16, 24} of a query, which lie together (g: 0 .. 7). The
 * thread that writes them holds all four, and so does the thread that reads them. Writes and reads
 * have no bank conflicts in shared memory, and use whole sectors of global memory. */
template <int DP>
__device__ static inline float4 *attn_exchange_at(const attn_exchange &exchange, int round,
                                                  int query, int j, int g) {
    return (float4 *)(exchange.o + (round & 1) * attn_fused_shape<DP>::EXCHANGE + query * DP +
                      j * 32 + ((g ^ query) & 7) * 4);
}
__device__ static inline float *attn_exchange_lse(const attn_exchange &exchange, int round) {
    return exchange.lse + (round & 1) * ATTN_FUSED_Q;
}

/* Epilogue of the prefix, called by each warp of the consumer warpgroups: puts (O, LSE) of its
 * queries into the exchange buffer of `round`. If the prefix item has ATTN_MERGE_STATE, it merges
 * the state of the earlier levels first. */
template <int DP>
__device__ static inline void attn_exchange_put(const attn_args &args, const attn_item &item,
                                                const attn_row_stats &stats, int kv_head,
                                                const float (&acc)[DP / 2],
                                                const attn_exchange &exchange, int round) {
#if HOPPER
    int quad = threadIdx.x % 4;
    mbar_wait(exchange.empty + 8 * (round & 1), (round >> 1 & 1) ^ 1);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int query = stats.query + 8 * r;
        float sum = quad_sum(stats.row_sum[r]);
        if (query >= item.nq) continue;
        const float state_lse = attn_state_lse(args, item, query, kv_head);
        attn_output out = attn_finish_query(args, item, query, kv_head,
                                            {stats.row_max[r], sum, state_lse}, false);
        if (quad == 0) attn_exchange_lse(exchange, round)[query] = out.lse;
#pragma unroll
        for (int j = 0; j < DP / 16; j++) {
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                int c = j / 2 * 4 + k;
                x[k] = acc[4 * c + 2 * r + j % 2] * out.new_weight;
                if (out.state) x[k] += out.state_weight * out.state[c * 8 + quad * 2 + j % 2];
            }
            *attn_exchange_at<DP>(exchange, round, query, j / 2, quad * 2 + j % 2) =
                float4{x[0], x[1], x[2], x[3]};
        }
    }
    mbar_arrive(exchange.full + 8 * (round & 1));
#endif
}

typedef struct attn_own_row { /* a row that an own warp has taken */
    int round; /* of its prefix item in this CTA */
    /* query: the row's first query in that item. head: its first query head. */
    unsigned short query, head;
    int q_offset;     /* of its queries in q and in o, in elements */
    unsigned short kv_from, kv_to; /* its positions, counted from the first one of its first page */
} attn_own_row;

/* Instead of attn_exchange_put, for the empty prefix item of a single row: puts LSE = -inf. */
__device__ static inline void attn_exchange_put_none(const attn_item &item,
                                                     const attn_exchange &exchange, int round) {
#if HOPPER
    mbar_wait(exchange.empty + 8 * (round & 1), (round >> 1 & 1) ^ 1);
    if ((int)threadIdx.x - 128 < item.nq)
        attn_exchange_lse(exchange, round)[threadIdx.x - 128] = -INFINITY;
    mbar_arrive(exchange.full + 8 * (round & 1));
#endif
}

/* The jobs of the CTAs, round by round (attn_plan.dev_jobs). */
typedef struct attn_jobs {
    const int *job_ids; /* [n_rounds][gridDim.x] item * K + kv head; -1: none (last round only) */
    int n_rounds;
    __device__ inline int at(int round) const { return job_ids[round * gridDim.x + blockIdx.x]; }
    /* number of rounds of this CTA */
    __device__ inline int rounds() const { return n_rounds - (at(n_rounds - 1) < 0); }
} attn_jobs;

/* Number of positions of the own tile that begins at `offset`. All lie in one page. */
template <int TOK>
__device__ static inline int attn_own_tile_len(const attn_args &args, int offset, int end) {
    return min(min(TOK, end - offset), (1 << args.log2_B) - (offset & (1 << args.log2_B) - 1));
}

/* Producer part of an own warp: takes rows from the CTA's counter, in their order, and issues the
 * TMA loads of their tiles one after another. The warp computes nothing meanwhile, so the code must
 * be short: no divisions per row, and one copy per tile (attn_open_pair_map). A tile can have fewer
 * than TOK positions. Its n positions are then in the last n rows of the K half and of the V half
 * of its buffer, and the rows before them are zeros. */
template <int DP> struct attn_own_producer {
    typedef attn_fused_shape<DP> shape;
    const attn_args &args;
    const CUtensorMap *map;
    attn_jobs jobs;
    int n_rounds, log2_rows; /* rounds of this CTA; log2 of the maximum rows of an item */
    int *row_counter;        /* of the CTA: next row, as round << log2_rows | row within the item */
    /* [4] in shared memory: the i-th row that this warp took is at i % 4. At most the row being
     * computed and ATTN_OWN_BUFS later ones are in use. */
    attn_own_row *taken;
    uint32_t ring, full;     /* shared addresses of this warp's ring and of its full mbarriers */
    /* of the prefix item of the row taken last: its round, the index of its first own item, its
     * queries, its kv head */
    int round, own_item0, nq, kv_head;
    int n_taken, n_requested; /* rows taken, tiles requested so far */
    /* of the row taken last: offset of its next tile, offset of its end, id of its page `lane` */
    int next_kv, end_kv, page_ids;

    /* Takes the next row of the CTA. Returns false if none is left. */
    __device__ inline bool take_row() {
#if HOPPER
        for (int lane = threadIdx.x % 32;;) {
            int index = __shfl_sync(~0u, lane ? 0 : atomicAdd(row_counter, 1), 0);
            int item_round = index >> log2_rows, row = index & (1 << log2_rows) - 1;
            if (item_round != round) {
                if (item_round >= n_rounds) return false;
                int job = jobs.at(item_round);
                const attn_item &item = args.items[job / args.K];
                round = item_round, kv_head = job % args.K,
                own_item0 = item.flags >> ATTN_INDEX_SHIFT, nq = item.nq;
            }
            if (row * args.G >= nq) continue; /* the item has fewer rows */
            const attn_item &item = args.items[own_item0 + row];
            next_kv = item.skip, end_kv = item.kv1 - item.kv0;
            page_ids = args.pages[item.page0 + min(lane, (end_kv - 1) >> args.log2_B)];
            if (lane == 0)
                taken[n_taken % 4] = attn_own_row{
                    item_round,
                    (unsigned short)(row * args.G),
                    (unsigned short)(kv_head * args.G),
                    (item.q0 * args.K + kv_head * args.G) * DP,
                    (unsigned short)next_kv,
                    (unsigned short)end_kv};
            __syncwarp();
            n_taken++;
            return true;
        }
#else
        return false;
#endif
    }
    /* Loads the next tile of the row taken last. If that row has no tile left, takes a row first.
     * Does nothing if no row is left. */
    __device__ inline void request_tile() {
#if HOPPER
        if (next_kv >= end_kv && !take_row()) return;
        const int page_offset = next_kv & (1 << args.log2_B) - 1,
                  n_kv = attn_own_tile_len<shape::TOK>(args, next_kv, end_kv),
                  buf = n_requested % ATTN_OWN_BUFS;
        const int row = ((__shfl_sync(~0u, page_ids, next_kv >> args.log2_B) * args.K + kv_head) * 2
                         << args.log2_B) +
                        page_offset;
        const uint32_t to = ring + buf * 2 * shape::OWN_TILE, bar = full + 8 * buf;
        if (elect_one()) {
            mbar_expect_tx(bar, 2 * shape::OWN_TILE); /* rows that TMA fills with zeros count too */
            tma_load_5d_evict_first(to, map, bar, {0, n_kv - shape::TOK, row, 0, 0});
        }
        n_requested++, next_kv += n_kv;
#endif
    }
};

/* ---- attn_fused: own items on mma.sync with swapped operands ----
 *
 * S^T = K Q^T and O^T = V^T P^T: a row's queries are the eight columns of the mma, of which G are
 * valid. A thread holds queries 2 (lane % 4) + {0, 1}: of S^T the positions lane/4 + 8 i, of O^T
 * the columns lane/4 + 8 i. If the queries were the 16 rows of the mma, it would need twice the
 * products and, at D = 128, more registers than there are.
 *
 * Addresses in attn_own_qk and attn_own_pv: because of the swizzle, piece 2 c + i (i: 0 or 1) of a
 * row lies at the address of piece i XOR c * 32. */

/* Loads query lane/4 of a row as the B operand of K Q^T. */
template <int DP>
__device__ static inline void attn_own_load_q(const attn_args &args, int q_offset,
                                              uint32_t (&q)[DP / 16][2]) {
    const bf16 *from = args.q + q_offset + threadIdx.x % 32 / 4 * DP + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < DP / 8; c++)
        q[c / 2][c % 2] = threadIdx.x % 32 / 4 < args.G ? *(const uint32_t *)(from + c * 8) : 0;
}

/* scores[16-position block][4] = K Q^T, in two independent chains of mma: one chain has twice the
 * latency. */
template <int DP, int TOK>
__device__ static inline void attn_own_qk(float (&scores)[TOK / 4], const uint32_t (&q)[DP / 16][2],
                                          const bf16 *k) {
    const uint32_t at = smem_addr(k + attn_piece_at(TOK, threadIdx.x % 16, threadIdx.x % 32 / 16));
    float odd_scores[TOK / 4];
#pragma unroll
    for (int i = 0; i < TOK / 4; i++) scores[i] = odd_scores[i] = 0;
#pragma unroll
    for (int i = 0; i < DP * TOK / 256; i += 4) { /* four ldmatrix at a time are in flight */
        uint32_t x[4][4];
#pragma unroll
        for (int c = 0; c < 4; c++) ldmatrix_x4(x[c], (at ^ c * 32) + i * 512);
#pragma unroll
        for (int c = 0; c < 4; c++)
            mma_16816((c % 2 ? odd_scores : scores) + (DP == 64 ? i : 0), x[c],
                      q[DP == 64 ? c : i + c]);
    }
#pragma unroll
    for (int i = 0; i < TOK / 4; i++) scores[i] += odd_scores[i];
}

/* Sets the scores of a tile's first TOK - n_kv positions, which are not valid, to -inf. */
template <int TOK>
__device__ static inline void attn_own_mask(float (&scores)[TOK / 4], int n_kv) {
#pragma unroll
    for (int i = 0; i < TOK / 4; i++)
        if ((int)threadIdx.x % 32 / 4 + i / 2 * 8 < TOK - n_kv) scores[i] = -INFINITY;
}

/* attn_softmax_update for the thread's two queries (columns). Every tile has a valid position, so
 * the maximum is finite. row_sum covers this thread's positions only. */
template <int N>
__device__ static inline void attn_own_softmax_update(float (&scores)[N], float (&row_max)[2],
                                                      float (&row_sum)[2], float (&rescale)[2],
                                                      float scale) {
#pragma unroll
    for (int col = 0; col < 2; col++) {
        float new_max = scores[col];
#pragma unroll
        for (int i = col + 2; i < N; i += 2) new_max = fmaxf(new_max, scores[i]);
#pragma unroll
        for (int k = 4; k < 32; k *= 2) new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, k));
        new_max = fmaxf(row_max[col], new_max * scale);
        rescale[col] = ex2(row_max[col] - new_max), row_sum[col] *= rescale[col],
        row_max[col] = new_max;
#pragma unroll
        for (int i = col; i < N; i += 2)
            scores[i] = ex2(fmaf(scores[i], scale, -new_max)), row_sum[col] += scores[i];
    }
}

/* acc[16-column block of O][4] += V^T P^T. */
template <int DP, int TOK>
__device__ static inline void attn_own_pv(float (&acc)[DP / 4], const float (&scores)[TOK / 4],
                                          const bf16 *v) {
    const uint32_t at = smem_addr(
        v + attn_piece_at(TOK, threadIdx.x % 8 + threadIdx.x % 32 / 16 * 8, threadIdx.x / 8 % 2));
#pragma unroll
    for (int n = 0; n < TOK / 16; n++) {
        uint32_t probs[2];
#pragma unroll
        for (int i = 0; i < 2; i++)
            probs[i] = movmatrix_trans(pack_bf16(scores[4 * n + 2 * i], scores[4 * n + 2 * i + 1]));
#pragma unroll
        for (int i = 0; i < DP / 16; i += 4) {
            uint32_t x[4][4];
#pragma unroll
            for (int c = 0; c < 4; c++)
                ldmatrix_x4_trans(x[c], (at ^ c * 32) + i * TOK * 32 + n * 2048);
#pragma unroll
            for (int c = 0; c < 4; c++) mma_16816(acc + 4 * (i + c), x[c], probs);
        }
    }
}

/* Merges (O, LSE) of the prefix into the row's acc, row_max and row_sum, like one more key with
 * score LSE and value O. */
template <int DP>
__device__ static inline void attn_own_merge_state(const attn_args &args, const attn_own_row &row,
                                                   float (&acc)[DP / 4], float (&row_max)[2],
                                                   float (&row_sum)[2],
                                                   const attn_exchange &exchange) {
    int lane_group = threadIdx.x % 32 / 4;
#pragma unroll
    for (int col = 0; col < 2; col++) {
        int head = threadIdx.x % 4 * 2 + col, query = row.query + min(head, args.G - 1);
        float lse = head < args.G ? attn_exchange_lse(exchange, row.round)[query] : -INFINITY,
              new_max = fmaxf(row_max[col], lse);
        bool valid = lse > -INFINITY; /* else O in the exchange buffer may be NaN: not written */
        float own_weight = valid ? ex2(row_max[col] - new_max) : 1,
              state_weight = valid ? ex2(lse - new_max) : 0;
        /* row_sum of a query is spread over eight threads; only one adds the state's weight */
        row_max[col] = new_max,
        row_sum[col] = row_sum[col] * own_weight + (lane_group == 0 ? state_weight : 0);
#pragma unroll
        for (int j = 0; j < DP / 32; j++) {
            const float4 *from = attn_exchange_at<DP>(exchange, row.round, query, j, lane_group),
                         x = DP == 64 ? *from : __ldcg(from);
            float *to = acc + 8 * j + col;
            to[0] = to[0] * own_weight + (valid ? state_weight * x.x : 0),
            to[2] = to[2] * own_weight + (valid ? state_weight * x.y : 0);
            to[4] = to[4] * own_weight + (valid ? state_weight * x.z : 0),
            to[6] = to[6] * own_weight + (valid ? state_weight * x.w : 0);
        }
    }
}

/* Normalizes O of the row, with the sinks of its heads, and stores it to o. */
template <int DP>
__device__ static inline void attn_own_store(const attn_args &args, const attn_own_row &row,
                                             const float (&acc)[DP / 4], const float (&row_max)[2],
                                             float (&row_sum)[2]) {
    const int head = threadIdx.x % 32 / 4;
#pragma unroll
    for (int col = 0; col < 2; col++) {
#pragma unroll
        for (int k = 4; k < 32; k *= 2) row_sum[col] += __shfl_xor_sync(~0u, row_sum[col], k);
        const int sum_head = threadIdx.x % 4 * 2 + col;
        if (args.sinks && sum_head < args.G)
            row_sum[col] += ex2(args.sinks[row.head + sum_head] * (float)M_LOG2E - row_max[col]);
        row_sum[col] = __fdividef(1, row_sum[col]);
    }
    bf16 *o = args.o + row.q_offset + head * DP + threadIdx.x % 4 * 2;
#pragma unroll
    for (int c = 0; c < DP / 8; c++) {
        uint32_t x = movmatrix_trans(
            pack_bf16(acc[2 * c] * row_sum[0], acc[2 * c + 1] * row_sum[1]));
        if (head < args.G) *(uint32_t *)(o + c * 8) = x;
    }
}

/* Releases the exchange buffers of rounds n_released .. until - 1: this warp reads them no more.
 * Every own warp waits for the full phase of every round, also if it has no rows in that round. If
 * it skipped round i, its wait for round i + 2 could return too early: the phase of round i - 2 has
 * the same parity as that of round i + 2. */
__device__ static inline void attn_exchange_release(const attn_exchange &exchange, int &n_released,
                                                    int until) {
#if HOPPER
    for (; n_released < until; n_released++) {
        mbar_wait(exchange.full + 8 * (n_released & 1), n_released >> 1 & 1);
        mbar_arrive(exchange.empty + 8 * (n_released & 1));
    }
#endif
}

/* Main loop of an own warp: its rows, tile by tile. Loads are issued ATTN_OWN_BUFS tiles ahead. So
 * when a row is done, the warp has already taken the next row; if it has not, no row is left. */
template <int DP>
__device__ static inline void attn_own_process_rows(attn_own_producer<DP> &producer,
                                                    const attn_exchange &exchange, bf16 *ring) {
#if HOPPER
    typedef attn_fused_shape<DP> shape;
    constexpr int TOK = shape::TOK;
    const attn_args &args = producer.args;
    int n_released = 0;
    for (int i = 0; i < ATTN_OWN_BUFS; i++) producer.request_tile();
    for (int row_index = 0, n_used = 0; row_index < producer.n_taken; row_index++) {
        const attn_own_row row = producer.taken[row_index % 4];
        uint32_t q[DP / 16][2];
        float acc[DP / 4] = {}, row_max[2] = {-INFINITY, -INFINITY}, row_sum[2] = {}, rescale[2];
        attn_own_load_q<DP>(args, row.q_offset, q);
        for (int offset = row.kv_from, n_kv; offset < row.kv_to; offset += n_kv, n_used++) {
            int buf = n_used % ATTN_OWN_BUFS;
            bf16 *k_tile = ring + buf * shape::OWN_TILE, *v_tile = k_tile + shape::OWN_TILE / 2;
            float scores[TOK / 4];
            n_kv = attn_own_tile_len<TOK>(args, offset, row.kv_to);
            mbar_wait(producer.full + 8 * buf, n_used / ATTN_OWN_BUFS & 1);
            attn_own_qk<DP, TOK>(scores, q, k_tile);
            if (n_kv < TOK) attn_own_mask<TOK>(scores, n_kv);
            attn_own_softmax_update(scores, row_max, row_sum, rescale, args.scale);
#pragma unroll
            for (int i = 0; i < DP / 4; i++) acc[i] *= rescale[i & 1];
            attn_own_pv<DP, TOK>(acc, scores, v_tile);
            __syncwarp();
            producer.request_tile();
        }
        /* the rounds before this one in which the warp had no rows */
        attn_exchange_release(exchange, n_released, row.round);
        mbar_wait(exchange.full + 8 * (row.round & 1), row.round >> 1 & 1);
        attn_own_merge_state<DP>(args, row, acc, row_max, row_sum, exchange);
        attn_own_store<DP>(args, row, acc, row_max, row_sum);
        if (row_index + 1 == producer.n_taken ||
            producer.taken[(row_index + 1) % 4].round > row.round)
            attn_exchange_release(exchange, n_released, row.round + 1);
    }
    attn_exchange_release(exchange, n_released, producer.n_rounds);
#endif
}

/* Calls visit for each prefix item of this CTA, round by round. The consumer warpgroups and the
 * producer warp use it. n_before of the tiles it passes: prefix tiles of all rounds before. */
template <class Visit>
__device__ static inline void attn_fused_each_item(const attn_args &args, const attn_jobs &jobs,
                                                   const Visit &visit) {
    for (int round = 0, n_before = 0, n_rounds = jobs.rounds(); round < n_rounds; round++) {
        const int job = jobs.at(round);
        const attn_item &item = args.items[job / args.K];
        constexpr int N = ATTN_FUSED_N;
        int first_kv = attn_first_kv(args, item, N), n_tiles = (item.kv1 - first_kv + N - 1) / N;
        visit(item, job % args.K, attn_tiles{first_kv, n_tiles, n_before}, round);
        n_before += n_tiles;
    }
}

template <int DP>
__global__ void __launch_bounds__(attn_fused_shape<DP>::THREADS, 1)
    attn_fused(const __grid_constant__ attn_args args, const attn_jobs jobs, int log2_rows,
               float *global_exchange, const __grid_constant__ CUtensorMap shared_map,
               const __grid_constant__ CUtensorMap own_map) {
#if HOPPER
    typedef attn_fused_shape<DP> shape;
    constexpr int WGS = shape::WGS, N = shape::N, BUFS = shape::BUFS,
                  OWN_BARS = ATTN_OWN_BUFS * ATTN_OWN_WARPS;
    extern __shared__ __align__(1024) char attn_smem[];
    /* prefix ring: BUFS each of full K, full V, empty K, empty V; full of the own rings; exchange
     * buffers: two full, two empty */
    __shared__ uint64_t bars[4 * BUFS + OWN_BARS + 4];
    __shared__ attn_own_row taken[ATTN_OWN_WARPS][4];
    __shared__ int row_counter;
    uint32_t q_smem = smem_addr(attn_smem), full_k = smem_addr(bars), own_full = full_k + 32 * BUFS,
             exchange_bars = own_full + 8 * OWN_BARS;
    attn_exchange exchange = {DP == 64 ? (float *)(attn_smem + shape::EXCHANGE_AT)
                                       : global_exchange + (size_t)blockIdx.x * 2 * shape::EXCHANGE,
                              (float *)(attn_smem + shape::LSE_AT), exchange_bars,
                              exchange_bars + 16};
    /* role: the warpgroup; 1 and 2 are the consumer warpgroups */
    int warpgroup = threadIdx.x / 128, warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * BUFS; i++) {
            mbar_init(full_k + 8 * i, 1);
            mbar_init(full_k + 8 * (2 * BUFS + i), 4 * WGS);
        }
        for (int i = 0; i < OWN_BARS; i++) mbar_init(own_full + 8 * i, 1);
        for (int i = 0; i < 2; i++) {
            mbar_init(exchange.full + 8 * i, WGS * 128);
            mbar_init(exchange.empty + 8 * i, ATTN_OWN_WARPS * 32);
        }
        row_counter = 0;
        mbar_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_wait();
    if (warpgroup == 1 || warpgroup == 2) {
        if constexpr (DP == 64) setmaxnreg_dec<shape::REGS>();
        else setmaxnreg_inc<shape::REGS>();
        attn_fused_each_item(
            args, jobs,
            [&](const attn_item &item, int kv_head, const attn_tiles &tiles, int round) {
                if (!tiles.n_tiles) return attn_exchange_put_none(item, exchange, round);
                auto put = [&](const attn_row_stats &stats, const float(&acc)[DP / 2]) {
                    attn_exchange_put<DP>(args, item, stats, kv_head, acc, exchange, round);
                };
                attn_wgmma_mainloop<DP, WGS, N, BUFS, true>(args, item, kv_head, warpgroup - 1,
                                                            tiles,
                                                            {attn_smem, q_smem, full_k, NULL}, put);
                bar_sync(warpgroup, 128); /* all four warps have read Q */
            });
    } else {
        if constexpr (DP == 64) setmaxnreg_inc<shape::OWN_REGS>();
        else setmaxnreg_dec<shape::OWN_REGS>();
        int own_warp = warp < 4 ? warp - 1 : warp - 9; /* warps 1, 2, 3 and 12 .. 15 */
        char *ring = attn_smem + shape::OWN_AT + own_warp * shape::OWN_RING;
        attn_own_producer<DP> producer = {args,
                                          &own_map,
                                          jobs,
                                          jobs.rounds(),
                                          log2_rows,
                                          &row_counter,
                                          taken[max(own_warp, 0)],
                                          smem_addr(ring),
                                          own_full + 8 * ATTN_OWN_BUFS * own_warp,
                                          -1};
        if (own_warp >= 0) attn_own_process_rows<DP>(producer, exchange, (bf16 *)ring);
        if (warp == 0)
            attn_fused_each_item(args, jobs,
                                 [&](const attn_item &item, int kv_head, const attn_tiles &tiles,
                                     int) {
                                     attn_wgmma_producer<DP, WGS, N, BUFS>(
                                         args, &shared_map, item, kv_head, tiles,
                                         {attn_smem, q_smem, full_k, NULL});
                                 });
    }
#else
    __trap();
#endif
}

template <int DP>
static void attn_fused_launch(const attn_plan *plan, const attn_args &args,
                              const CUtensorMap *map) {
    typedef attn_fused_shape<DP> room;
    launch_dependent(plan->dev, "attention", attn_fused<DP>,
                     {dim3((unsigned)plan->grid), room::THREADS, room::BYTES}, args,
                     attn_jobs{plan->dev_jobs, plan->n_rounds}, attn_fused_log2_rows(plan),
                     plan->exchange, map[ATTN_MAP_64], map[ATTN_MAP_PAIR]);
}

/* ---- Launchers of the Hopper kernels ---- */

/* The tensor map for full tiles of TOK positions. If D fills the panels, one copy loads both K and
 * V. */
template <int DP, int TOK>
static const CUtensorMap &attn_tile_map(const attn_args &args, const CUtensorMap *map) {
    return map[args.D == DP ? ATTN_MAP_PAIR : TOK == 16 ? ATTN_MAP_16 : ATTN_MAP_32];
}
template <int DP, int TOK, int BUFS, bool FP8 = false>
static void attn_small_launch(toka_device *dev, const attn_args &args, int n_items,
                              const CUtensorMap *map) {
    launch_dependent(dev, "attention", attn_small<DP, TOK, BUFS, FP8>,
                     {dim3((unsigned)(n_items * args.K)), 32,
                      BUFS * attn_small_tile<DP, TOK, FP8>},
                     args,
                     attn_tile_map<DP, TOK>(args, map), map[ATTN_MAP_8]);
}
template <int DP, int TOK, int BUFS, bool FP8 = false>
static void attn_cta_split_launch(const attn_plan *plan, const attn_args &args,
                                  const attn_level *level, const CUtensorMap *map) {
    launch_dependent(plan->dev, "attention", attn_cta_split<DP, TOK, BUFS, FP8>,
                     {dim3((unsigned)(level->n_cta_merges * args.K)), 32 * level->cta_split_warps,
                      (size_t)level->cta_split_warps * BUFS * attn_small_tile<DP, TOK, FP8>},
                     args, attn_tile_map<DP, TOK>(args, map), map[ATTN_MAP_8],
                     plan->dev_merges + level->cta_merge0);
}
template <int DP, int TOK, int BUFS, bool FP8 = false>
static void attn_cluster_split_launch(const attn_plan *plan, const attn_args &args,
                                      const attn_level *level, const CUtensorMap *map) {
    const int warps = ceil_div(level->cta_split_warps, ATTN_CLUSTER);
    launch_dependent(plan->dev, "attention", attn_cluster_split<DP, TOK, BUFS, FP8>,
                     {dim3((unsigned)(level->n_cta_merges * args.K * ATTN_CLUSTER)), 32 * warps,
                      (size_t)warps *
                          (BUFS * attn_small_tile<DP, TOK, FP8> + ATTN_SMALL_Q * DP * 4)},
                     args, attn_tile_map<DP, TOK>(args, map), map[ATTN_MAP_8],
                     plan->dev_merges + level->cta_merge0);
}
template <int DP, int WGS, int N, int BUFS>
static void attn_wgmma_launch(toka_device *dev, const attn_args &args, int n_items,
                              const CUtensorMap *map) {
    typedef attn_wgmma_shape<DP, WGS, N, BUFS> room;
    launch_dependent(dev, "attention", attn_wgmma<DP, WGS, N, BUFS>,
                     {dim3((unsigned)(n_items * args.K)), room::THREADS, room::BYTES}, args,
                     map[ATTN_MAP_64]);
}

/* ---- attn_merge_splits: merge of split-KV ----
 *
 * In: merges, split buffers; grid: (merge x kv head, query); CTA: 128 threads. Out: what the item
 * would have written if it had not been split.
 * Shared memory: four columns of O and a row_sum per thread.
 * Bytes: n_splits * D * 4 per query.
 *
 * Why this shape: D/4 threads read one row of D floats. So a CTA has 128 / (D/4) groups of threads,
 * and each group reads one split at a time. The sums of the groups are added in a fixed order.
 *
 * Retired: one warp per query, the merges of an item one after another: 57 us. This kernel and the
 * tiles together take 12. */
__global__ static void __launch_bounds__(128)
    attn_merge_splits(const __grid_constant__ attn_args args, const attn_merge *merges) {
    __shared__ float4 o_sums[128];
    __shared__ float warp_max[4], weight_sums[128];
    const attn_merge merge = merges[blockIdx.x / args.K];
    int kv_head = blockIdx.x % args.K, query = blockIdx.y;
    int row_threads = args.D / 4, groups = 128 / row_threads, group = threadIdx.x / row_threads,
        col = threadIdx.x % row_threads * 4;
    grid_launch_dependents();
    grid_wait();
    if (query >= merge.nq) return;
    size_t first_split = attn_split_at(args, merge.first, query, kv_head),
           split_stride = attn_split_at(args, (merge.nq + ATTN_SMALL_Q - 1) / ATTN_SMALL_Q, 0, 0);
    attn_item item = {};
    item.q0 = merge.q0;
    item.nq = merge.nq;
    item.flags = merge.flags;
    float row_max = -INFINITY, row_sum = 0, state_lse = attn_state_lse(args, item, query, kv_head);
    float4 acc = {};
    for (int j = threadIdx.x; j < merge.n_splits; j += 128)
        row_max = fmaxf(row_max, args.split_lse[first_split + j * split_stride]);
    for (int k = 16; k; k /= 2) row_max = fmaxf(row_max, __shfl_xor_sync(~0u, row_max, k));
    if (threadIdx.x % 32 == 0) warp_max[threadIdx.x / 32] = row_max;
    __syncthreads(); /* also: all have read the old LSE; attn_finish_query may overwrite it */
    row_max = fmaxf(fmaxf(warp_max[0], warp_max[1]), fmaxf(warp_max[2], warp_max[3]));
#pragma unroll 4
    for (int j = group; j < merge.n_splits; j += groups) {
        if (group >= groups || row_max == -INFINITY) break;
        float weight = ex2(args.split_lse[first_split + j * split_stride] - row_max);
        float4 x = *(const float4 *)(args.split_o + (first_split + j * split_stride) * args.D +
                                     col);
        row_sum += weight;
        acc.x += weight * x.x, acc.y += weight * x.y, acc.z += weight * x.z, acc.w += weight * x.w;
    }
    o_sums[threadIdx.x] = acc;
    weight_sums[threadIdx.x] = row_sum;
    __syncthreads();
    if (group) return;
    for (int j = 1; j < groups; j++) {
        float4 x = o_sums[j * row_threads + threadIdx.x];
        row_sum += weight_sums[j * row_threads];
        acc.x += x.x, acc.y += x.y, acc.z += x.z, acc.w += x.w;
    }
    attn_output out = attn_finish_query(args, item, query, kv_head, {row_max, row_sum, state_lse},
                                        threadIdx.x == 0);
    attn_store_pair(out, col, acc.x, acc.y);
    attn_store_pair(out, col + 2, acc.z, acc.w);
}

/* ---- The op ---- */

/* Encodes a tensor map of bf16 with the 128-byte swizzle. */
static void attn_open_map(toka_device *dev, CUtensorMap *map, const bf16 *kv, int n_dims,
                          const cuuint64_t *size, const cuuint64_t *strides,
                          const cuuint32_t *box) {
    const cuuint32_t elem_strides[5] = {1, 1, 1, 1, 1};
    CUresult code = dev->encode_map(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, (cuuint32_t)n_dims,
                                    (void *)kv, size, strides, box, elem_strides,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    latch_error(dev, code ? cudaErrorInvalidValue : cudaSuccess, "tensor map of the KV cache");
}
/* Tensor map that loads n <= TOK positions of K and V, from any position of a page on, in one copy.
 * TOK is 32 for D = 64, and 16 for D = 128 and 256.
 * Coordinates: (0, n - TOK, row, 0, 0). row: the first of the n positions, as a row of K in the
 * layer's pool. Dimensions 1 and 2 both step by one row. If n < TOK, the start n - TOK in dimension
 * 1 is negative and puts the first TOK - n rows of the box out of bounds: TMA does not read them
 * and writes zeros to shared memory. So the n positions are the last n rows of the box, and the
 * first of them lies at coordinate 0 of dimension 1. Dimension 3 steps by one panel, dimension 4
 * from K to V (within the page). */
static void attn_open_pair_map(toka_device *dev, CUtensorMap *map, const bf16 *kv,
                               cuuint64_t n_rows) {
    const cuuint64_t D = (cuuint64_t)dev->shape->D, row = D * sizeof(bf16),
                     n_pos = D == 64 ? 32 : 16, size[5] = {64, n_pos, n_rows, D / 64, 2};
    const cuuint64_t strides[4] = {row, row, 128, row * (cuuint64_t)dev->shape->B};
    const cuuint32_t box[5] = {64, (cuuint32_t)n_pos, 1, (cuuint32_t)D / 64, 2};
    attn_open_map(dev, map, kv, 5, size, strides, box);
}

/* The maps of a layer with FP8 K and V, D = 64 or 128: ATTN_MAP_PAIR, of a full tile of K and V,
 * and ATTN_MAP_8. Their coordinates are (0, row, V, page, 0). row: the first position, as a row of
 * K in its page. V: 0 begins with K, 1 with V. ATTN_MAP_64 is that of the unpacked pages. */
static void attn_open_fp8_maps(toka_device *dev, CUtensorMap *maps, const kv_layout &layout,
                               int layer) {
    const char *kv = kv_layer_at(layout, layer);
    const cuuint64_t D = (cuuint64_t)dev->shape->D, B = (cuuint64_t)dev->shape->B;
    const cuuint64_t page = (cuuint64_t)layout.page_bytes[1];
    const cuuint64_t n_pages = kv_layer_bytes(layout, layer) / page;
    const cuuint64_t size[5] = {D, (2 * dev->shape->K - 1) * B, 2, n_pages, 1};
    const cuuint64_t strides[4] = {D, D * B, page, page};
    const cuuint32_t elem_strides[5] = {1, 1, 1, 1, 1};
    for (int i : {ATTN_MAP_PAIR, ATTN_MAP_8}) {
        const cuuint32_t rows = i == ATTN_MAP_8 ? 8 : ATTN_FP8_TOK;
        const cuuint32_t box[5] = {(cuuint32_t)D, rows, i == ATTN_MAP_8 ? 1u : 2u, 1, 1};
        CUresult code = dev->encode_map(
            maps + i, CU_TENSOR_MAP_DATA_TYPE_UINT8, 5, (void *)kv, size, strides, box,
            elem_strides, CU_TENSOR_MAP_INTERLEAVE_NONE,
            D == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
            CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        latch_error(dev, code ? cudaErrorInvalidValue : cudaSuccess,
                    "tensor map of the FP8 KV cache");
    }
    const cuuint64_t unpacked[2] = {D, (cuuint64_t)dev->attn->max_unpacked * 2 * B *
                                           (cuuint64_t)dev->shape->K};
    const cuuint64_t stride = D * sizeof(bf16);
    const cuuint32_t box[2] = {64, 64};
    attn_open_map(dev, maps + ATTN_MAP_64, dev->attn->unpacked, 2, unpacked, &stride, box);
}

/* Makes the tensor maps of all layers, if the Hopper kernels can run: four maps with boxes of 64
 * columns and 8, 16, 32 or 64 rows, and the map of attn_open_pair_map. attn_latent uses that of 64
 * rows. */
static void attn_open_maps(toka_device *dev) {
    const toka_shape *shape = dev->shape;
    attn_plan *plan = dev->attn;
    if (!(plan->hopper || plan->is_latent) || dev->error.code) return;
    plan->maps = (CUtensorMap *)aligned_alloc(64,
                                              (size_t)shape->L * ATTN_MAPS * sizeof *plan->maps);
    if (!plan->maps) abort();
    const kv_layout layout = kv_layout_of(dev);
    for (int i = 0; i < shape->L * ATTN_MAPS; i++) {
        const int layer = i / ATTN_MAPS;
        const bf16 *kv = (const bf16 *)kv_layer_at(layout, layer);
        if (kv_is_fp8(dev->kv_fp8, layer)) {
            if (i % ATTN_MAPS == 0) attn_open_fp8_maps(dev, plan->maps + i, layout, layer);
            continue;
        }
        const cuuint64_t stride = (cuuint64_t)shape->D * sizeof(bf16),
                         size[2] = {(cuuint64_t)shape->D, kv_layer_bytes(layout, layer) / stride};
        const cuuint32_t box[2] = {64, 8u << i % ATTN_MAPS};
        if (i % ATTN_MAPS != ATTN_MAP_PAIR)
            attn_open_map(dev, plan->maps + i, kv, 2, size, &stride, box);
        else if (plan->hopper && (shape->D == 64 || shape->D == 128 || shape->D == 256))
            attn_open_pair_map(dev, plan->maps + i, kv, size[1]);
    }
}

static void attn_open_unpacked(toka_device *dev) {
    attn_plan *plan = dev->attn;
    const size_t bytes = (size_t)plan->max_unpacked * sizeof(int);
    int *pages = (int *)malloc(bytes);
    if (!pages) abort();
    for (int i = 0; i < plan->max_unpacked; i++) pages[i] = i;
    plan->unpacked = (bf16 *)dev_alloc(dev, toka_gpu_unpacked_bytes(dev->shape), "unpacked pages");
    plan->unpacked_pages = (int *)dev_alloc(dev, bytes, "unpacked pages");
    if (!dev->error.code)
        latch_error(dev, cudaMemcpy(plan->unpacked_pages, pages, bytes, cudaMemcpyHostToDevice),
                    "unpacked pages");
    free(pages);
}

/* Allocates all memory of attention. dev->kv_pool and dev->stream must be set, and all that
 * attn_plan_open needs. Failures are latched. */
static void attn_open(toka_device *dev) {
    const toka_shape *shape = dev->shape;
    attn_plan_open(dev);
    attn_plan *plan = dev->attn;
    size_t rows = (size_t)dev->options.max_tokens * shape->H,
           split_rows = (size_t)plan->max_split_bufs * shape->K * ATTN_SMALL_Q;
    plan->state_o = (float *)dev_alloc(dev, rows * plan->D * sizeof(float), "attention state");
    plan->state_lse = (float *)dev_alloc(dev, rows * sizeof(float), "attention state");
    plan->split_o = (float *)dev_alloc(dev, split_rows * plan->D * sizeof(float),
                                       "attention splits");
    plan->split_lse = (float *)dev_alloc(dev, split_rows * sizeof(float), "attention splits");
    if (plan->has_fused && shape->D == 128) /* at D = 64 they are in shared memory */
        plan->exchange = (float *)dev_alloc(dev,
                                            (size_t)dev->n_sms * 2 *
                                                attn_fused_shape<128>::EXCHANGE * sizeof(float),
                                            "attention exchange");
    if (plan->any_fp8) attn_open_unpacked(dev);
    attn_open_maps(dev);
    attn_plan *other = dev->attn_windowed;
    if (!other) return;
    /* a layer is done before the next one begins, so both plans use the same buffers */
    other->state_o = plan->state_o, other->state_lse = plan->state_lse;
    other->split_o = plan->split_o, other->split_lse = plan->split_lse;
    other->unpacked = plan->unpacked, other->unpacked_pages = plan->unpacked_pages;
    other->maps = plan->maps;
}

static void attn_latent_launch(toka_device *dev, const attn_args &args, int n_items,
                               const CUtensorMap *map); /* chapter 9b */
/* Launches the tiles or the small items of a level. Kernel and tile shape depend on the GPU, on D
 * and on the length of the items. */
static void attn_launch_items(const attn_plan *plan, int layer, attn_args args,
                              const attn_level *level, bool small) {
    toka_device *dev = plan->dev;
    const CUtensorMap *map = plan->maps ? plan->maps + ATTN_MAPS * layer : NULL;
    const int n_items = small ? level->n_small : level->n_tiles;
    if (!n_items) return;
    args.items = plan->dev_items + (small ? level->small0 : level->tile0);
    if (plan->is_latent) attn_latent_launch(dev, args, n_items, map);
    else if (small && kv_is_fp8(dev->kv_fp8, layer)) /* else they read unpacked pages */
        args.D <= 64 ? attn_small_launch<64, ATTN_FP8_TOK, 4, true>(dev, args, n_items, map)
        : level->short_items
            ? attn_small_launch<128, ATTN_FP8_TOK, 2, true>(dev, args, n_items, map)
            : attn_small_launch<128, ATTN_FP8_TOK, 3, true>(dev, args, n_items, map);
    else if (map && small && args.D <= 64) attn_small_launch<64, 32, 2>(dev, args, n_items, map);
    else if (map && small && args.D > 128) attn_small_launch<256, 16, 2>(dev, args, n_items, map);
    else if (map && small)
        level->short_items ? attn_small_launch<128, 16, 2>(dev, args, n_items, map)
                           : attn_small_launch<128, 16, 3>(dev, args, n_items, map);
    else if (map && args.D <= 64) attn_wgmma_launch<64, 3, 128, 3>(dev, args, n_items, map);
    else if (map && args.D <= 96) attn_wgmma_launch<96, 2, 128, 3>(dev, args, n_items, map);
    else if (map && args.D > 128) attn_wgmma_launch<256, 2, 64, 2>(dev, args, n_items, map);
    else if (map && level->long_tiles && !(args.window && args.window < ATTN_LONG_KV))
        attn_wgmma_launch<128, 2, 192, 2>(dev, args, n_items, map);
    else if (map) attn_wgmma_launch<128, 2, 128, 3>(dev, args, n_items, map);
    else if (args.D <= 64)
        small ? attn_mma_launch<64, 1>(dev, args, n_items)
              : attn_mma_launch<64, 4>(dev, args, n_items);
    else if (args.D <= 128)
        small ? attn_mma_launch<128, 1>(dev, args, n_items)
              : attn_mma_launch<128, 4>(dev, args, n_items);
    else
        small ? attn_mma_launch<256, 1>(dev, args, n_items)
              : attn_mma_launch<256, 4>(dev, args, n_items);
}

/* Does the plan use attn_cluster_split? Yes if it has only CTA splits, all their clusters are
 * resident at once, and layers with another plan have one launch, as in graphs of kind 0. All
 * tensor ranks have the same plan->K and plan->n_sms (attn_agree), so all decide alike. */
static bool attn_uses_cluster(const attn_plan *plan) {
    const attn_level *level = plan->levels;
    bool only_splits = plan->allow_clusters && plan->is_alone && plan->n_levels == 1 &&
                       level->n_cta_merges && !level->n_tiles && !level->n_merges && !plan->n_fused;
    return only_splits && level->n_cta_merges * plan->K * ATTN_CLUSTER <= plan->n_sms;
}

/* Launches the CTA splits of a level, spread over clusters if attn_uses_cluster says so. */
static void attn_launch_cta_splits(const attn_plan *plan, int layer, attn_args args,
                                   const attn_level *level) {
    const CUtensorMap *map = plan->maps + ATTN_MAPS * layer;
    args.items = plan->dev_items + level->small0;
    if (kv_is_fp8(plan->dev->kv_fp8, layer) && attn_uses_cluster(plan))
        args.D <= 64
            ? attn_cluster_split_launch<64, ATTN_FP8_TOK, 4, true>(plan, args, level, map)
            : attn_cluster_split_launch<128, ATTN_FP8_TOK, 2, true>(plan, args, level, map);
    else if (kv_is_fp8(plan->dev->kv_fp8, layer))
        args.D <= 64 ? attn_cta_split_launch<64, ATTN_FP8_TOK, 3, true>(plan, args, level, map)
                     : attn_cta_split_launch<ATTN_FP8_CTA_SPLIT_D, ATTN_FP8_TOK, ATTN_FP8_BUFS,
                                             true>(plan, args, level, map);
    else if (attn_uses_cluster(plan))
        args.D <= 64 ? attn_cluster_split_launch<64, 32, 2>(plan, args, level, map)
                     : attn_cluster_split_launch<128, 16, 2>(plan, args, level, map);
    else
        args.D <= 64 ? attn_cta_split_launch<64, 32, 2>(plan, args, level, map)
                     : attn_cta_split_launch<128, 16, 2>(plan, args, level, map);
}

/* Is a graph with attn_cluster_split worth capturing for T rows? Yes if the fewest clusters that T
 * rows can need (small_rows rows each) are resident at once. */
static bool attn_may_use_cluster(const attn_plan *plan, int T) {
    if (!plan || !plan->hopper || !plan->allow_clusters || !plan->small_rows) return false;
    return ceil_div(T, plan->small_rows) * plan->K * ATTN_CLUSTER <= plan->n_sms;
}

/* Are there more pages for tiles than can be unpacked at once? Then each span is unpacked and done
 * by itself. */
static bool attn_unpacks_spans(const attn_plan *plan) {
    return plan->any_fp8 && plan->n_tile_pages > plan->max_unpacked;
}

/* Unpacks n entries of the page table, from page0 on. Returns the arguments for tiles that read
 * them. In a layer without FP8 the kernel does nothing: all layers launch the same kernels. */
static attn_args attn_unpack_pages(const attn_plan *plan, int layer, attn_args args, int page0,
                                   int n) {
    const bool kv_fp8 = kv_is_fp8(plan->dev->kv_fp8, layer);
    if (!plan->any_fp8 || !n) return args;
    args.pages += page0;
    launch_dependent(plan->dev, "attention, FP8 pages", attn_unpack,
                     {dim3((unsigned)((kv_fp8 ? n : 1) * args.K)), 256}, args, kv_fp8 ? n : 0,
                     plan->unpacked);
    args.pages -= page0;
    if (kv_fp8) args.kv = plan->unpacked, args.pages = plan->unpacked_pages - page0;
    return args;
}

/* Launches the tiles of a level, span by span. */
static void attn_launch_spans(const attn_plan *plan, int layer, const attn_args &args, int level) {
    for (int i = 0; i < plan->n_spans; i++) {
        const attn_span_plan *span = &plan->spans[i];
        if (span->level != level || span->small || !span->n_tiles) continue;
        attn_level part = plan->levels[level];
        part.tile0 = span->tile0, part.n_tiles = span->n_tiles;
        const int n_pages = span->n_pages;
        attn_launch_items(plan, layer, attn_unpack_pages(plan, layer, args, span->page0, n_pages),
                          &part, false);
    }
}

/* Number of kernels that attention() launches per layer for this plan. */
static int attn_launches(const attn_plan *plan) {
    int n_kernels = plan->n_fused > 0;
    if (attn_unpacks_spans(plan)) return INT_MAX; /* no graph has so many */
    n_kernels += plan->any_fp8 && plan->n_tile_pages > 0;
    for (int i = 0; i < plan->n_levels; i++) {
        const attn_level *level = &plan->levels[i];
        n_kernels += (level->n_tiles > 0) + (level->n_small > 0) + (level->n_cta_merges > 0) +
                     (level->n_merges > 0);
    }
    return n_kernels;
}

/* Launches the levels of a plan, in their order. */
static void attn_launch_levels(const attn_plan *plan, int layer, const attn_args &args) {
    const bool by_span = attn_unpacks_spans(plan);
    const attn_args tile_args =
        by_span ? args : attn_unpack_pages(plan, layer, args, 0, plan->n_tile_pages);
    for (int i = 0; i < plan->n_levels; i++) {
        const attn_level *level = &plan->levels[i];
        if (by_span) attn_launch_spans(plan, layer, args, i);
        else attn_launch_items(plan, layer, tile_args, level, false);
        attn_launch_items(plan, layer, args, level, true);
        if (level->n_cta_merges) attn_launch_cta_splits(plan, layer, args, level);
        if (!level->n_merges) continue;
        launch_dependent(plan->dev, "attention, merge", attn_merge_splits,
                         {dim3((unsigned)(level->n_merges * args.K), (unsigned)level->merge_nq),
                          128},
                         args, plan->dev_merges + level->merge0);
    }
}

/* Stands for a launch that the plan of a layer does not have, but the step's graph has. */
__global__ static void attn_no_work(const __grid_constant__ attn_args) {
    grid_launch_dependents();
    grid_wait();
}

static double attn_score_scale(const toka_shape *shape) {
    return shape->attn_scale != 0 ? shape->attn_scale : 1 / sqrt((double)shape->D);
}
/* Attention of one layer. q [T][H][D], o [T][H][Dv], on the device, not the same buffer. Pages and
 * work lists are those of attn_plan_step. */
static void attention(toka_device *dev, int layer, const bf16 *q, bf16 *o) {
    const toka_shape *shape = dev->shape;
    const attn_plan *plan = dev->layers[layer].window && dev->attn_windowed ? dev->attn_windowed
                                                                            : dev->attn;
    const int G = shape->H / shape->K;
    const double scale = attn_score_scale(shape), cap = shape->attn_cap;
    attn_args args = {.q = q,
                      .o = o,
                      .kv = (const bf16 *)kv_layer_at(kv_layout_of(dev), layer),
                      .pages = plan->dev_pages,
                      .pos = dev->rows.pos,
                      .state_o = plan->state_o,
                      .state_lse = plan->state_lse,
                      .split_o = plan->split_o,
                      .split_lse = plan->split_lse,
                      .K = shape->K,
                      .G = G,
                      .D = plan->D,
                      .log2_B = __builtin_ctz(shape->B),
                      .window = dev->layers[layer].window,
                      .key_size = shape->D,
                      .inv_G = (uint32_t)(((1ll << 31) - 1) / G + 1),
                      .scale = (float)(M_LOG2E * (cap != 0 ? cap : scale)),
                      .cap_scale = (float)(cap != 0 ? scale / cap : 0),
                      .sinks = dev->layers[layer].sinks,
                      .prefetch = plan->prefetch};
    if (dev->error.code) return;
    attn_launch_levels(plan, layer, args);
    if (plan->n_fused) {
        const CUtensorMap *map = plan->maps + ATTN_MAPS * layer;
        args.items = plan->dev_items + plan->fused0;
        args.D == 64 ? attn_fused_launch<64>(plan, args, map)
                     : attn_fused_launch<ATTN_FUSED_D>(plan, args, map);
    }
    const int n_nodes = dev->attn_windowed && graph_is_replay(dev) ? graph_n_attention(dev) : 0;
    for (int i = attn_launches(plan); i < n_nodes; i++)
        launch_dependent(dev, "attention", attn_no_work, {dim3(1), 32}, args);
}

/* ===========================================================================
 * MARK: 9b. Multi-head latent attention [kernel]
 *
 * MLA (DeepSeek-V2, arXiv 2405.04434). The cache has one latent vector c and one rotated key r for
 * a token; all heads share them. A head's key is (W_uk c, r), its value W_uv c. The weights are
 * absorbed: W_uk is applied to the query instead of all keys, W_uv to the result of attention
 * instead of all values. So attention has H queries, one key head and one value head:
 *
 *     q_h = (W_uk^T q_nope, RoPE(q_rope))     key = (c, r)     value = c     output = W_uv o_h
 *
 *   letters        D = latent + rope, Dv = latent; 512 + 64 in all models of DeepSeek
 *   norm_qkv_rope_kv
 *     gemm                 q_a and kv_a of norm(x); without q_a: q_b and kv_a
 *     latent_rows_kernel   norm(c) and RoPE(r) to the page of the token; norm of q's latent vector
 *     gemm                 q_b, if there is a q_a
 *     latent_rope_kernel   RoPE(q_rope) to q
 *     gemm_heads_kernel    W_uk^T q_nope of each head to q
 *   attention              attn_latent, by the work list of chapter 8; attn_merge_splits
 *   out_residual           gemm_heads_kernel: W_uv o of each head; then the GEMM of W_o
 *
 * Absorbed weights make decoding cheap in bytes: 2 (latent + rope) bytes a position for all heads.
 * They need 3.4 times as many products as plain attention with heads of 192 and 128 elements, so
 * long prompts are slower than they could be.
 * =========================================================================== */

/* ---- Products of each head ---- */

/* From one head to the next, in elements. */
typedef struct head_strides {
    size_t x, w, y;
} head_strides;
/* y_h[M][N] = x_h[M][K] W_h[N][K]^T for each head h = blockIdx.y, with the tiles of gemm_mma. N is
 * even. In: x, w and y of head 0. Grid: tiles of y_h x heads. Work: 2 H M N K FLOP. For few rows it
 * is bound by reading W: 2 H N K bytes. */
template <int BM, int BN, int WM, int WN>
__global__ static void __launch_bounds__(BM / WM * (BN / WN) * 32)
    gemm_heads_kernel(gemm_kernel_args args, const head_strides strides) {
    const size_t head = blockIdx.y;
    args.x += head * strides.x, args.w += head * strides.w, args.y += head * strides.y;
    mma_tile<BM, BN, WM, WN>(args);
}
template <int BM, int BN, int WM, int WN>
static void gemm_heads_tile(toka_device *dev, const gemm_kernel_args &args,
                            const head_strides &strides, int n_heads) {
    launch_dependent(dev, "GEMM of heads", gemm_heads_kernel<BM, BN, WM, WN>,
                     {dim3((unsigned)(ceil_div(args.M, BM) * ceil_div(args.N, BN)),
                           (unsigned)n_heads),
                      BM / WM * (BN / WN) * 32, MMA_BUFS * (BM + BN) * MMA_K * 2},
                     args, strides);
}
static void gemm_heads(toka_device *dev, const gemm_kernel_args &args, const head_strides &strides,
                       int n_heads) {
    assert(args.N % 2 == 0 && args.K % 8 == 0 && args.ldx % 8 == 0 && strides.x % 8 == 0 &&
           strides.w % 8 == 0 && strides.y % 2 == 0);
    if (ceil_div(args.M, 128) * ceil_div(args.N, 128) * n_heads >= dev->n_sms)
        gemm_heads_tile<128, 128, 64, 32>(dev, args, strides, n_heads);
    else gemm_heads_tile<64, 64, 32, 32>(dev, args, strides, n_heads);
}

/* ---- latent_rows_kernel: what a token stores, and the norm of q's latent vector ----
 *
 *   from   bf16 [T][ld]: with a q_rank q's latent vector, at column c_at c [latent], then r [rope]
 *   kv     bf16 [page][B][latent + rope]: norm(c), RoPE(r) of each row, at its kv_slot
 *   low    bf16 [T][ld_low]: norm of q's latent vector, then zeros
 *
 * Grid (T, 2 with a q_rank, else 1), block 128. Bound by latency: a row has some KB. */
typedef struct latent_rows_args {
    const bf16 *from;
    int ld, c_at, latent, rope, q_rank;
    bool neighbours; /* pairs of RoPE are neighbours (toka_rope) */
    const float *q_norm, *kv_norm;
    float eps;
    const float2 *table; /* [max_len][rope / 2] cosine and sine */
    const int *pos, *kv_slot;
    bf16 *kv, *low;
    int ld_low;
} latent_rows_args;

/* to = from * w / rms(from), for `size` elements. All 128 threads call it. */
__device__ static inline void latent_norm(const bf16 *from, const float *w, int size, float eps,
                                          bf16 *to) {
    float sum = 0;
    for (int i = threadIdx.x; i < size; i += 128) {
        const float value = __bfloat162float(from[i]);
        sum += value * value;
    }
    const float scale = rsqrtf(block_sum_128(sum) / size + eps);
    for (int i = threadIdx.x; i < size; i += 128)
        to[i] = __float2bfloat16(__bfloat162float(from[i]) * scale * w[i]);
}
/* Rotates pair number `pair` of `from`. The first elements of all pairs come first in `to`. */
__device__ static inline void latent_rotate(const bf16 *from, bool neighbours, int half, int pair,
                                            float2 cos_sin, bf16 *to) {
    float low = __bfloat162float(from[neighbours ? 2 * pair : pair]),
          high = __bfloat162float(from[neighbours ? 2 * pair + 1 : pair + half]);
    rope_rotate(low, high, cos_sin.x, cos_sin.y);
    to[pair] = __float2bfloat16(low), to[pair + half] = __float2bfloat16(high);
}
__global__ static void __launch_bounds__(128) latent_rows_kernel(const latent_rows_args args) {
    const int row = blockIdx.x, half = args.rope / 2;
    const bf16 *from = args.from + (size_t)row * args.ld;
    grid_launch_dependents();
    grid_wait();
    if (blockIdx.y) {
        bf16 *low = args.low + (size_t)row * args.ld_low;
        latent_norm(from, args.q_norm, args.q_rank, args.eps, low);
        for (int i = args.q_rank + threadIdx.x; i < args.ld_low; i += 128)
            low[i] = __float2bfloat16(0);
        return;
    }
    bf16 *key = args.kv + (size_t)args.kv_slot[row] * (args.latent + args.rope);
    const float2 *table = args.table + (size_t)args.pos[row] * half;
    from += args.c_at;
    latent_norm(from, args.kv_norm, args.latent, args.eps, key);
    for (int pair = threadIdx.x; pair < half; pair += 128)
        latent_rotate(from + args.latent, args.neighbours, half, pair, table[pair],
                      key + args.latent);
}

/* ---- latent_rope_kernel: RoPE of the queries ----
 *
 *   from   bf16 [T][ld]: for each head q_nope [nope], q_rope [rope]
 *   q      bf16 [T][H][latent + rope]: RoPE(q_rope) to the last rope elements of each head
 *
 * Grid ceil(T*H / 8), block 256: a warp for each head. Moves 4*T*H*rope bytes. */
typedef struct latent_rope_args {
    const bf16 *from;
    int ld, T, H, nope, rope, latent;
    bool neighbours;
    const float2 *table;
    const int *pos;
    bf16 *q;
} latent_rope_args;
__global__ static void __launch_bounds__(256) latent_rope_kernel(const latent_rope_args args) {
    const int i = blockIdx.x * 8 + threadIdx.x / 32, row = i / args.H, head = i % args.H;
    const int half = args.rope / 2;
    grid_launch_dependents();
    grid_wait();
    if (row >= args.T) return;
    const bf16 *from = args.from + (size_t)row * args.ld + head * (args.nope + args.rope) +
                       args.nope;
    bf16 *to = args.q + (size_t)i * (args.latent + args.rope) + args.latent;
    const float2 *table = args.table + (size_t)args.pos[row] * half;
    for (int pair = threadIdx.x % 32; pair < half; pair += 32)
        latent_rotate(from, args.neighbours, half, pair, table[pair], to);
}

/* ---- The ops around attention ---- */

/* Allocates the scratch memory of layers with MLA, if the model has any. */
static void latent_open(toka_device *dev) {
    const size_t rows = (size_t)dev->options.max_tokens + GEMM_PAD_ROWS;
    size_t low = 0, q = 0, values = 0;
    for (int i = 0; i < dev->shape->L; i++) {
        const layer_weights *layer = &dev->layers[i];
        if (!layer->mla.sizes) continue;
        low = std::max(low, (size_t)layer->mla.q_b.K);
        q = std::max(q, (size_t)layer->mla.q_b.N);
        values = std::max(values, (size_t)layer->o.K);
    }
    if (!values) return;
    const size_t bytes = rows * values * sizeof(bf16);
    dev->mla_low = (bf16 *)dev_alloc(dev, rows * low * sizeof(bf16), "activations");
    dev->mla_q = (bf16 *)dev_alloc(dev, rows * q * sizeof(bf16), "activations");
    dev->mla_values = (bf16 *)dev_alloc(dev, bytes, "activations");
    /* the columns behind the last head stay zero */
    if (!dev->error.code)
        latch_error(dev, cudaMemsetAsync(dev->mla_values, 0, bytes, dev->stream), "activations");
}

/* Stores the latent vectors and rotated keys of the step's rows; norms q's latent vectors. */
static void latent_store_rows(toka_device *dev, int layer, bf16 *kv, const int *kv_slot) {
    const layer_weights *weights = &dev->layers[layer];
    const latent_weights *mla = &weights->mla;
    const toka_mla *sizes = mla->sizes;
    const bool has_low = mla->q_b.data != NULL;
    latent_rows_args args = {.from = dev->qkv, .ld = weights->qkv.N, .latent = sizes->latent,
                             .rope = sizes->rope, .q_norm = mla->q_norm, .kv_norm = mla->kv_norm,
                             .eps = sizes->eps, .table = weights->rope, .pos = dev->rows.pos,
                             .kv_slot = kv_slot, .kv = kv};
    args.c_at = has_low ? sizes->q_a.rows : sizes->q_b.rows;
    args.q_rank = has_low ? sizes->q_a.rows : 0;
    args.neighbours = dev->weights->layers[layer].rope->neighbours;
    args.low = dev->mla_low, args.ld_low = mla->q_b.K;
    launch_dependent(dev, "latent vectors", latent_rows_kernel,
                     {dim3((unsigned)dev->step->T, has_low ? 2 : 1), 128}, args);
}
/* q of all heads: (W_uk^T q_nope, RoPE(q_rope)). from: rows of ld elements, for each head q_nope
 * and q_rope. */
static void latent_absorb(toka_device *dev, int layer, const bf16 *from, int ld, bf16 *q) {
    const layer_weights *weights = &dev->layers[layer];
    const toka_mla *sizes = weights->mla.sizes;
    const int T = dev->step->T, H = dev->shape->H, D = dev->shape->D;
    const up_blocks blocks = {sizes->nope, sizes->v, sizes->latent};
    latent_rope_args rope = {.from = from, .ld = ld, .T = T, .H = H, .nope = sizes->nope,
                             .rope = sizes->rope, .latent = sizes->latent,
                             .table = weights->rope, .pos = dev->rows.pos, .q = q};
    rope.neighbours = dev->weights->layers[layer].rope->neighbours;
    launch_dependent(dev, "RoPE", latent_rope_kernel, {dim3((unsigned)ceil_div(T * H, 8)), 256},
                     rope);
    const gemm_kernel_args args = {.x = from, .w = weights->mla.up, .y = q, .M = T,
                                   .N = sizes->latent, .K = sizes->nope, .ldx = ld, .ldy = H * D,
                                   .epi = EPI_STORE};
    gemm_heads(dev, args,
               {(size_t)(sizes->nope + sizes->rope), up_block_size(blocks), (size_t)D}, H);
}
/* The op norm_qkv_rope_kv of a layer with MLA, from its first GEMM on. args: of that GEMM. */
static void latent_qkv(toka_device *dev, int layer, gemm_args args, const qkv_params &params) {
    const layer_weights *weights = &dev->layers[layer];
    const weight *q_b = &weights->mla.q_b;
    const bf16 *heads = dev->qkv;
    int ld = weights->qkv.N;
    args.y = dev->qkv, args.ldy = ld, args.epi = EPI_STORE;
    gemm(dev, &args);
    latent_store_rows(dev, layer, params.kv, params.kv_slot);
    if (q_b->data) {
        const gemm_args second = {.M = args.M, .x = dev->mla_low, .ldx = q_b->K, .w = q_b,
                                  .y = dev->mla_q, .ldy = q_b->N, .epi = EPI_STORE};
        gemm(dev, &second);
        heads = dev->mla_q, ld = q_b->N;
    }
    latent_absorb(dev, layer, heads, ld, params.q);
}
/* Returns W_uv o of all heads: [T][K of W_o]. Launches nothing in a replay. */
static const bf16 *latent_values(toka_device *dev, int layer, const bf16 *o) {
    const layer_weights *weights = &dev->layers[layer];
    const toka_mla *sizes = weights->mla.sizes;
    const up_blocks blocks = {sizes->nope, sizes->v, sizes->latent};
    const int H = dev->shape->H, latent = sizes->latent;
    const gemm_kernel_args args = {.x = o, .w = weights->mla.up + (size_t)latent * sizes->nope,
                                   .y = dev->mla_values, .M = dev->step->T, .N = sizes->v,
                                   .K = latent, .ldx = H * latent, .ldy = weights->o.K,
                                   .epi = EPI_STORE};
    if (!graph_is_replay(dev))
        gemm_heads(dev, args, {(size_t)latent, up_block_size(blocks), (size_t)sizes->v}, H);
    return dev->mla_values;
}

/* ---- attn_latent: attention over latent vectors, on wgmma ----
 *
 * In and out as attn_mma (chapter 9): items of up to 64 queries, which are heads of one or several
 * rows. A query and a key have key_size elements, at most 576; a value is the first D elements of
 * the key, at most 512. Shorter ones are padded with zeros: by TMA in K, by latent_load_q in Q.
 * Grid: items; CTA: two consumer warpgroups and a producer warpgroup, of which one thread works.
 * Shared memory: Q and two tiles of K, each 9 panels [64][64]: 3 * 72 KB.
 * Bytes: K once per item: 2 * 576 a position. FLOPs: 2 * 64 * (576 + 512) a position.
 *
 * Why this shape:
 * - V is K: a tile is read once and multiplied twice, by Q as rows, and by P as columns.
 * - O has 64 x 512 float32, twice what the registers of one warpgroup hold. So each warpgroup has
 *   half of its columns. Both need all of P. So each computes the scores of half of the tile's
 *   positions, and stores its half of P in shared memory.
 * - P lies in the tile's last panel. It holds the rotated keys, which the values do not have: only
 *   the scores need them. There would be no other space for P.
 *
 *   one tile            warpgroup 0                     warpgroup 1
 *     scores            positions 0 .. 31               positions 32 .. 63
 *     barrier: largest score of each query in both halves
 *     P to panel 8      columns 0 .. 31                 columns 32 .. 63
 *     barrier: P is there
 *     O += P V          columns 0 .. 255: panels 0-3    columns 256 .. 511: panels 4-7
 *
 * The products of the scores do not overlap the exponentials. The loads of the next tile overlap
 * both. */
enum {
    LATENT_KEY = 576, LATENT_VALUE = 512, /* largest sizes */
    LATENT_Q = 64, LATENT_TOK = 64,       /* queries of an item, positions of a tile */
    LATENT_BUFS = 2,
    LATENT_PANEL = LATENT_TOK * 128,      /* bytes of a panel of 64 columns, of a tile, of all */
    LATENT_TILE = LATENT_KEY / 64 * LATENT_PANEL,
    LATENT_BYTES = (1 + LATENT_BUFS) * LATENT_TILE,
    LATENT_CONSUMERS = 256, LATENT_THREADS = LATENT_CONSUMERS + 128,
    LATENT_REGS = 240, LATENT_PRODUCER_REGS = 24 /* registers of a thread */
};
#if HOPPER
typedef struct latent_smem {
    char *base;               /* Q, then the ring of tiles */
    uint32_t at, full, empty; /* shared addresses: of base, of the mbarriers [LATENT_BUFS] */
    float (*exchange)[LATENT_Q]; /* [2] a number of each query from each warpgroup */
} latent_smem;

/* The producer: loads the tiles of the item. One thread calls it. */
__device__ static inline void latent_produce(const attn_args &args, const CUtensorMap *map,
                                             const attn_item &item, const attn_tiles &tiles,
                                             const latent_smem &smem) {
    const int log2_B = args.log2_B;
    for (int i = 0; i < tiles.n_tiles; i++) {
        const int offset = tiles.first_kv - item.kv0 + i * LATENT_TOK, buf = i % LATENT_BUFS;
        const int page = args.pages[item.page0 + (offset >> log2_B)];
        const int row = (page << log2_B) + (offset & ((1 << log2_B) - 1));
        const uint32_t to = smem.at + (1 + buf) * LATENT_TILE, full = smem.full + 8 * buf;
        mbar_wait(smem.empty + 8 * buf, (i / LATENT_BUFS & 1) ^ 1);
        mbar_expect_tx(full, LATENT_TILE);
        for (int panel = 0; panel < LATENT_KEY / 64; panel++)
            tma_load_2d(to + panel * LATENT_PANEL, map, full, 64 * panel, row);
    }
}

/* Copies Q to shared memory, swizzled. Missing queries and columns become 0. */
__device__ static inline void latent_load_q(const attn_args &args, const attn_item &item,
                                            bf16 *to) {
    constexpr int PIECES = LATENT_KEY / 8;
#pragma unroll 6
    for (int i = threadIdx.x; i < LATENT_Q * PIECES; i += LATENT_CONSUMERS) {
        const int query = i / PIECES, piece = i % PIECES;
        uint4 x = {};
        if (query < item.nq && piece * 8 < args.key_size)
            x = *(const uint4 *)(args.q + attn_head_at(args, item.q0 + query, 0) * args.key_size +
                                 piece * 8);
        *(uint4 *)(to + attn_piece_at(LATENT_Q, query, piece)) = x;
    }
    fence_async_smem();
    bar_sync(1, LATENT_CONSUMERS);
}

/* scores = Q K^T of 64 queries and of 32 positions, the rows of the tile from k on. */
__device__ static inline void latent_scores(float (&scores)[LATENT_TOK / 4], uint32_t q,
                                            uint32_t k) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < LATENT_KEY / 16; c++)
        wgmma_ss<LATENT_TOK / 2>(scores, wgmma_desc(q + c / 4 * LATENT_PANEL) + c % 4 * 2,
                                 wgmma_desc(k + c / 4 * LATENT_PANEL) + c % 4 * 2, c > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(scores);
}

/* Turns the scores into P. Both warpgroups have the same row_max, so that they can add up O of all
 * positions. row_max changes only if the tile's maximum exceeds it by more than 8, as in
 * attn_softmax_update_lazy. Returns whether the warp must rescale O. */
__device__ static inline bool latent_softmax(const attn_args &args, const latent_smem &smem, int wg,
                                             float (&scores)[LATENT_TOK / 4], attn_row_stats &stats,
                                             float (&rescale)[2]) {
    const float own_max[2] = {attn_row_max(scores, 0), attn_row_max(scores, 1)};
    bool must_rescale = false;
    if (threadIdx.x % 4 == 0)
        for (int r = 0; r < 2; r++) smem.exchange[wg][stats.query + 8 * r] = own_max[r];
    bar_sync(1, LATENT_CONSUMERS);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float other_max = smem.exchange[1 - wg][stats.query + 8 * r],
                    new_max = fmaxf(own_max[r], other_max) * args.scale;
        const bool exceeds = new_max > stats.row_max[r] + 8;
        rescale[r] = exceeds ? ex2(stats.row_max[r] - new_max) : 1;
        stats.row_max[r] = exceeds ? new_max : stats.row_max[r];
        must_rescale = must_rescale || exceeds;
        stats.row_sum[r] = stats.row_sum[r] * rescale[r] +
                           attn_exp_sum(scores, r, stats.row_max[r], args.scale);
    }
    return __any_sync(~0u, must_rescale);
}

/* Stores the warpgroup's half of P: columns 32 wg .. 32 wg + 31. */
__device__ static inline void latent_store_p(const float (&scores)[LATENT_TOK / 4], int query,
                                             int wg, bf16 *to) {
#pragma unroll
    for (int c = 0; c < LATENT_TOK / 16; c++)
#pragma unroll
        for (int r = 0; r < 2; r++)
            *((uint32_t *)(to + attn_piece_at(LATENT_Q, query + 8 * r, wg * 4 + c)) +
              threadIdx.x % 4) = pack_bf16(scores[4 * c + 2 * r], scores[4 * c + 2 * r + 1]);
}
/* Zeroes rows n_kv .. 63 of the warpgroup's columns of V: P is 0 there, but 0 * NaN is NaN. */
__device__ static inline void latent_zero_tail(bf16 *tile, int n_kv, int wg) {
    for (int i = n_kv * 32 + threadIdx.x % 128; i < LATENT_TOK * 32; i += 128)
        *(uint4 *)(tile + attn_piece_at(LATENT_TOK, i / 32, wg * 32 + i % 32)) = uint4{};
}
/* acc += P V for the warpgroup's 256 columns. p, v: shared addresses. */
__device__ static inline void latent_pv(float (&acc)[LATENT_VALUE / 4], uint32_t p, uint32_t v) {
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < LATENT_TOK / 16; n++)
        wgmma_ss<LATENT_VALUE / 2, 1>(acc, wgmma_desc(p) + n * 2,
                                      wgmma_desc_trans(v, LATENT_PANEL) + n * 128, 1);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
}

/* Epilogue of a warpgroup: merges the state and stores its columns of O. Warpgroup 0 writes LSE. */
__device__ static inline void latent_store(const attn_args &args, const attn_item &item,
                                           const latent_smem &smem, int wg,
                                           const attn_row_stats &stats,
                                           const float (&acc)[LATENT_VALUE / 4]) {
    const int quad = threadIdx.x % 4;
    float state_lse[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = stats.query + 8 * r;
        const float sum = quad_sum(stats.row_sum[r]);
        if (quad == 0) smem.exchange[wg][query] = sum;
        if (query < item.nq) state_lse[r] = attn_state_lse(args, item, query, 0);
    }
    bar_sync(1, LATENT_CONSUMERS); /* also: all have read the old LSE */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int query = stats.query + 8 * r;
        if (query >= item.nq) continue;
        const float sum = smem.exchange[0][query] + smem.exchange[1][query];
        const attn_output out = attn_finish_query(args, item, query, 0,
                                                  {stats.row_max[r], sum, state_lse[r]},
                                                  quad == 0 && wg == 0);
#pragma unroll
        for (int c = 0; c < LATENT_VALUE / 16; c++) {
            const int col = wg * (LATENT_VALUE / 2) + c * 8;
            if (col < args.D)
                attn_store_pair(out, col + quad * 2, acc[4 * c + 2 * r], acc[4 * c + 2 * r + 1]);
        }
    }
}

/* The consumers. */
__device__ static inline void latent_consume(const attn_args &args, const attn_item &item,
                                             const attn_tiles &tiles, const latent_smem &smem) {
    const int wg = threadIdx.x / 128, lane = threadIdx.x % 32;
    attn_row_stats stats = {(int)threadIdx.x % 128 / 32 * 16 + lane / 4, {-INFINITY, -INFINITY}};
    float acc[LATENT_VALUE / 4] = {}, scores[LATENT_TOK / 4], rescale[2];
    const int2 pos = make_int2(attn_pos(args, item, stats.query),
                               attn_pos(args, item, stats.query + 8)),
               unmasked = attn_unmasked_tiles(args, item, tiles.first_kv, LATENT_TOK);
    latent_load_q(args, item, (bf16 *)smem.base);
    for (int i = 0; i < tiles.n_tiles; i++) {
        const int buf = i % LATENT_BUFS, kv = tiles.first_kv + i * LATENT_TOK;
        const uint32_t tile = smem.at + (1 + buf) * LATENT_TILE;
        bf16 *rows = (bf16 *)(smem.base + (1 + buf) * LATENT_TILE),
             *probs = rows + 8 * LATENT_PANEL / 2;
        mbar_wait(smem.full + 8 * buf, i / LATENT_BUFS & 1);
        latent_scores(scores, smem.at, tile + wg * (LATENT_PANEL / 2));
        if (i < unmasked.x || i >= unmasked.y)
            attn_mask(args, item, scores, pos, kv + wg * (LATENT_TOK / 2));
        const bool max_grew = latent_softmax(args, smem, wg, scores, stats, rescale);
        /* both warpgroups have their scores: the last panel of the tile is free */
        latent_store_p(scores, stats.query, wg, probs);
        if (item.kv1 - kv < LATENT_TOK) latent_zero_tail(rows, item.kv1 - kv, wg);
        fence_async_smem();
        if (max_grew) attn_rescale(acc, rescale);
        bar_sync(1, LATENT_CONSUMERS);
        latent_pv(acc, tile + 8 * LATENT_PANEL, tile + wg * 4 * LATENT_PANEL);
        if (lane == 0) mbar_arrive(smem.empty + 8 * buf);
    }
    latent_store(args, item, smem, wg, stats, acc);
}
#endif

__global__ static void __launch_bounds__(LATENT_THREADS, 1)
    attn_latent(const __grid_constant__ attn_args args, const __grid_constant__ CUtensorMap map) {
#if HOPPER
    extern __shared__ __align__(1024) char attn_smem[];
    __shared__ uint64_t bars[2 * LATENT_BUFS];
    __shared__ float exchange[2][LATENT_Q];
    const latent_smem smem = {attn_smem, smem_addr(attn_smem), smem_addr(bars),
                              smem_addr(bars + LATENT_BUFS), exchange};
    if (threadIdx.x == 0) {
        for (int i = 0; i < LATENT_BUFS; i++)
            mbar_init(smem.full + 8 * i, 1), mbar_init(smem.empty + 8 * i, LATENT_CONSUMERS / 32);
        mbar_init_fence();
    }
    __syncthreads();
    grid_launch_dependents();
    grid_wait();
    const attn_item item = args.items[blockIdx.x];
    const int first_kv = attn_first_kv(args, item, LATENT_TOK);
    const attn_tiles tiles = {first_kv, (item.kv1 - first_kv + LATENT_TOK - 1) / LATENT_TOK, 0};
    if (threadIdx.x < LATENT_CONSUMERS) {
        setmaxnreg_inc<LATENT_REGS>();
        latent_consume(args, item, tiles, smem);
    } else {
        setmaxnreg_dec<LATENT_PRODUCER_REGS>();
        if (threadIdx.x / 32 == LATENT_CONSUMERS / 32 && elect_one())
            latent_produce(args, &map, item, tiles, smem);
    }
#else
    __trap();
#endif
}
static void attn_latent_launch(toka_device *dev, const attn_args &args, int n_items,
                               const CUtensorMap *map) {
    assert(args.K == 1 && args.key_size <= LATENT_KEY && args.D <= LATENT_VALUE &&
           1 << args.log2_B >= LATENT_TOK);
    launch_dependent(dev, "attention (MLA)", attn_latent,
                     {dim3((unsigned)n_items), LATENT_THREADS, LATENT_BYTES}, args,
                     map[ATTN_MAP_64]);
}

/* ===========================================================================
 * MARK: 10. Ranks: groups and transfers [kernel]
 * All communication between the ranks of a model. Each rank is a GPU with a thread of its own in
 * this process. This chapter adds up x over the tensor ranks of a stage, sends x from a stage to
 * the next one, and sends sampled tokens from the last stage to the first one. No op waits for a
 * GPU: if an op needs the work of another rank, it enqueues a stream wait.
 *
 * Words, the same as in chapter 29 of toka.c: a group is all ranks of one model, stages x tensor
 * ranks (tp ranks). A tp group is the tp ranks of one stage. A peer is another rank of the same tp
 * group.
 *
 *   rank barrier   Synchronizes CTA b of a kernel with CTA b of the same kernel on all peers. A CTA
 *                  first stores its data into the memory of the peers. Then it arrives: it writes
 *                  the barrier's number into its signal flag on each peer (st.release.sys). Then it
 *                  polls the peers' flags in its own memory (ld.acquire.sys). When all flags have
 *                  this number or a higher one, it departs: it has passed the barrier. The numbers
 *                  only rise. All kernels with rank barriers have the same number of CTAs, so
 *                  between two kernels all CTAs of a rank have passed the same number of barriers.
 *   share          One of tp_size parts of x, about equally large. Rank q adds up share q.
 *   all-reduce     One-shot: each rank stores its x into the receive buffers of all peers, passes a
 *                  barrier and adds up all x in rank order. Two-shot is a reduce-scatter and an
 *                  all-gather: each rank stores share q of its x into the receive buffer of rank q,
 *                  passes a barrier, adds up its own share, stores the sum into the x of all ranks
 *                  and passes a second barrier. Both methods add in float32 and round once, so all
 *                  ranks get the same bits. One-shot has one barrier. Two-shot sends 2/n of the
 *                  bytes of one-shot, n = tp_size.
 *   scattered x    x between the two halves of a large all-reduce on Hopper (the state
 *                  TOKA_HIDDEN_SCATTERED). The epilogue of the GEMM does the reduce-scatter, so its
 *                  stores overlap with the main loop: partial sums lie in the receive buffers. Then
 *                  reduce_norm_kernel completes the all-reduce: rank q adds up its share of the
 *                  rows, and only rank q keeps x of these rows (TOKA_HIDDEN_SHARDED). It sends all
 *                  ranks the input of the next op: the RMSNorm of the rows, or x itself if no norm
 *                  follows (at the end of a stage and before the LM head).
 *   channel        The queue of steps from a rank to the same tp rank of the next stage. x is
 *                  copied three times: on the sender's compute stream into its send buffer; on the
 *                  sender's send stream, by a DMA copy, into one of the receiver's
 *                  TOKA_GPU_LINK_BUFFERS channel buffers; on the receiver's compute stream into x.
 *                  One event marks that a channel buffer is full, another one that it is free
 *                  again. So a stage computes while its result is copied, and it may be some steps
 *                  ahead of the next stage.
 *   host channel   A channel to a GPU whose memory the sender cannot access (no peer access). The
 *                  second copy becomes two DMA copies with pinned host memory between them: on the
 *                  send stream to the host, and on a stream of the receiver's GPU from the host.
 *                  They run in parts of CHANNEL_PART_BYTES, so that both links work at once.
 *   last_tokens    [n_seqs] the last sampled token of each seq, in the memory of the last stage.
 *                  After each step that samples, tp rank 0 of the last stage sends the whole table
 *                  to all ranks of the first stage and records an event for this step. The embed of
 *                  a step with needs_step = k waits for the event of step k. At that time a later
 *                  step m may already have overwritten the token of a seq. This is harmless: only
 *                  steps up to m read the overwritten token, and step m samples only after all
 *                  ranks of the first stage have embedded step m. Without peer access the table
 *                  goes through pinned host memory: each rank of the first stage copies it from
 *                  there before it embeds.
 *
 * Double buffering. A one-shot kernel with barrier number c stores into half c % 2 of the peers'
 * receive buffers. samp_merge_ranks_kernel (chapter 11) does the same. The next kernel that stores
 * into the same half has a barrier number of at least c + 2. It starts after all ranks have arrived
 * at barrier c + 1. Barrier c + 1 belongs to a later kernel than barrier c, so a rank that arrives
 * at it has ended the kernel with barrier c and has read the half. Two-shot and scattered x need no
 * halves: their last barrier is after their last read.
 *
 * No deadlock. All work has one order: by step, then by stage, then in the order of the layer loop
 * (all ranks of a tp group run the same ops). A thread waits until another thread has enqueued
 * earlier work:
 *     receive of step j, stage s   waits for send of step j, stage s - 1
 *     send of step j, stage s      waits for receive of step j - TOKA_GPU_LINK_BUFFERS, stage s + 1
 *     embed of step j              waits for the sampled tokens of step needs_step < j
 * A GPU waits for the same work and, in a rank barrier, for the same op on its peers. The peers
 * themselves wait only for earlier work, or in this barrier. So the earliest work that is not done
 * can always run. A kernel that polls occupies SMs of its own GPU only, and no peer needs these SMs
 * to arrive. If TOKA_DEBUG_SHARE_GPU puts several ranks on one GPU, the kernels with rank barriers
 * have so few CTAs that the CTAs of all ranks are resident at the same time. All kernels with rank
 * barriers start their dependents only after the barrier, so dependents do not take their SMs.
 *
 * Failure. The rank runtime (chapter 29 of toka.c) has the waits of host threads, the watchdog and
 * the search for the rank that hangs. cuda_group_kind answers what only a GPU knows: the barrier
 * numbers in barrier_progress, events, and the op that the GPU is in. `aborted` lies in host memory
 * that all GPUs can read; it is set when the group breaks. A polling thread reads it at every
 * 1024th poll and stops waiting if it is set. Waiting host threads are woken, and ops return at
 * once. So all streams drain, and their results are discarded.
 * =========================================================================== */

enum {
    BARRIER_CTAS = 96,            /* CTAs of every kernel with rank barriers */
    BARRIER_SHARED_CTAS = 8,      /* the same if several ranks share a GPU (debugging) */
    BARRIER_THREADS = 512,        /* threads of each of these CTAs */
    OP_RING = 1024,               /* entries of group_rank.op_ring: more than the rank barriers of
                                     all in-flight steps */
    ONE_SHOT_MAX_BYTES = 1 << 20, /* largest x of a one-shot all-reduce. Must be less than
                                     TOKA_GPU_SCATTER_BYTES: when a graph replays, cuda_all_reduce
                                     counts the two barriers of reduce_norm_kernel as if they were
                                     those of a two-shot */
    SAMP_RECV_BYTES = 4096 * 24,  /* sampling partials that one rank sends to another at once:
                                     SAMP_PARTIAL_ROWS of 24 bytes (chapter 12) */
    CHANNEL_PART_BYTES = 4 << 20, /* part of a message in a host channel: some 0.2 ms on PCIe */
    SAMPLED_EVENTS = 128          /* entries of sampled_events: more than the in-flight steps */
};

typedef struct signal_flag {   /* written by CTA b of one rank, polled by CTA b of another rank */
    unsigned last_arrived;        /* number of the last rank barrier at which the writer arrived */
    unsigned unused;
    unsigned long long x_addr; /* address of x on the writer's rank */
} signal_flag;

typedef struct group_rank { /* the GPU of one rank, as other ranks need it */
    int K, n_sms, arch;     /* set when the rank joins: kv heads; SMs; 80, 89, 90 ... */
    bool has_peer_access;   /* its GPU can access the memory of another rank. Then a fault of the
                               other GPU also fails this one */
    bool peer_fault_noted;  /* group_note_peer_fault has added its note to the error message */
    signal_flag *signal_flags;           /* [BARRIER_CTAS][BARRIER_MAX_RANKS] flags from peers */
    char *recv_buffer, *channel_buffers; /* recv_buffer: data from peers, see group_recv_bytes.
                                            channel_buffers: [TOKA_GPU_LINK_BUFFERS][max_tokens][E]
                                            bf16, x from the previous stage */
    int *last_tokens;       /* [n_seqs] last sampled tokens. In the first stage of several, the last
                               stage writes them */
    float *logits;          /* last stage with tp ranks: logits of all ids. All peers write them */

    const char *op_ring[OP_RING]; /* atomic. [i % OP_RING] first op after rank barrier i */
    /* [i % TOKA_GPU_LINK_BUFFERS] the GPU has reached stream wait i. There are more entries than
     * in-flight steps */
    cudaEvent_t wait_events[TOKA_GPU_LINK_BUFFERS];
} group_rank;

typedef struct group_channel { /* from a rank to the same tp rank of the next stage */
    /* A message is x of one step. Message i uses channel buffer i % TOKA_GPU_LINK_BUFFERS. */
    bf16 *send_buffer;       /* [max_tokens][E] in the sender's memory */
    cudaEvent_t send_ready;  /* the send buffer is full */
    cudaEvent_t left;        /* the message, or its last part so far, has left the send buffer */
    char *host_buffers;      /* [TOKA_GPU_LINK_BUFFERS][max_tokens][E] bf16 in pinned host memory;
                                NULL: not a host channel */
    cudaStream_t landing_stream; /* host channel: copies from host_buffers, on the receiver's GPU */
    /* sent_events: the channel buffer is full; received_events: it is free again. They belong to
     * the GPU whose stream records them */
    cudaEvent_t sent_events[TOKA_GPU_LINK_BUFFERS], received_events[TOKA_GPU_LINK_BUFFERS];
} group_channel;

struct cuda_group : toka_group { /* toka_group is the rank runtime's part */
    group_rank gpu_ranks[TOKA_MAX_RANKS];   /* [pp_size][tp_size] */
    group_channel channels[TOKA_MAX_RANKS]; /* [pp_size][tp_size], index of the sending rank */
    cudaEvent_t sampled_events[SAMPLED_EVENTS]; /* [step % SAMPLED_EVENTS] the tokens of this step
                                                   are in last_tokens of the first stage */
    int *host_tokens;           /* [n_seqs] last_tokens in pinned host memory, if the last stage
                                   cannot access the memory of all ranks of the first one; else
                                   NULL */
    int *aborted;               /* pinned host memory that all GPUs can read; 1: stop waiting */
    unsigned *barrier_progress; /* in the same memory: [ranks][2] number of the rank barrier at
                                   which CTA 0 arrived last, and from which it departed last */
    char description[1024];     /* guarded by the lock */
    bool no_graphs;             /* atomic. A rank could not capture its graphs, so no rank uses
                                   graphs */
};

static int tp_size(const toka_device *dev) { return dev->group ? dev->group->tp_size : 1; }
static int pp_size(const toka_device *dev) { return dev->group ? dev->group->pp_size : 1; }
static bool is_first_stage(const toka_device *dev) { return dev->options.pp_rank == 0; }
static bool is_last_stage(const toka_device *dev) {
    return dev->options.pp_rank == pp_size(dev) - 1;
}
/* The number of the device's rank in its group. */
static int rank_index(const toka_device *dev) { return (int)(dev->rank - dev->group->gpu_ranks); }
/* The number in the CUDA runtime of the GPU of a rank. */
static int rank_ordinal(const toka_device *dev, int rank) {
    toka_device_options options = dev->options;
    options.index += rank - rank_index(dev);
    return cuda_ordinal(&options);
}

/* ---- Rank barriers ---- */

__device__ static inline void st_release_sys(unsigned *to, unsigned v) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ static inline unsigned ld_acquire_sys(const unsigned *from) {
    unsigned v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}

/* Rank barrier `number` of this CTA. After the barrier, all threads of all participating CTAs see
 * the writes that any of these CTAs made before the barrier. Also sends the address x to the peers
 * (rank_barrier_peer_x). Returns false if the group was aborted: then a peer may not have arrived.
 * All threads of the CTA must call it. Thread `rank` waits for that rank. */
__device__ static __forceinline__ bool rank_barrier_sync(const rank_barrier &barrier,
                                                         unsigned number, const void *x) {
    const int rank = (int)threadIdx.x, cta = (int)blockIdx.x;
    int aborted = 0;
    __syncthreads();
    if (cta == 0 && rank == 0) barrier.progress[0] = number;
    if (rank < barrier.tp_size && rank != barrier.tp_rank) {
        signal_flag *to = barrier.signal_flags[rank] + cta * BARRIER_MAX_RANKS + barrier.tp_rank;
        const signal_flag *from =
            barrier.signal_flags[barrier.tp_rank] + cta * BARRIER_MAX_RANKS + rank;
        *(volatile unsigned long long *)&to->x_addr = (unsigned long long)x;
        st_release_sys(&to->last_arrived, number);
        for (unsigned spins = 1;
             (int)(ld_acquire_sys(&from->last_arrived) - number) < 0 && !aborted; spins++)
            aborted = spins % 1024 == 0 && *barrier.aborted;
    }
    aborted = __syncthreads_or(aborted);
    if (cta == 0 && rank == 0) barrier.progress[1] = number;
    return !aborted;
}
/* Returns the x that `rank` passed to its last rank barrier. Only thread `rank` may call it,
 * because only this thread has acquired that rank's flag. */
__device__ static inline uint4 *rank_barrier_peer_x(const rank_barrier &barrier, int rank) {
    return (uint4 *)*(volatile unsigned long long *)&barrier
        .signal_flags[barrier.tp_rank][blockIdx.x * BARRIER_MAX_RANKS + rank]
        .x_addr;
}
__device__ static inline unsigned rank_barrier_count(const rank_barrier &barrier) {
    return barrier.counts[blockIdx.x];
}
/* Stores the number of the kernel's last barrier for the next kernel. */
__device__ static inline void rank_barrier_finish(const rank_barrier &barrier, unsigned number) {
    if (threadIdx.x == 0) barrier.counts[blockIdx.x] = number;
}

/* ---- all_reduce: one_shot_kernel, two_shot_kernel ----
 *
 * x = sum of x over the tp ranks, added in rank order in float32 and rounded once.
 *
 * in/out  x bf16, n_vectors vectors of 8 elements. All ranks of the tp group call it at the same
 *         point of the op order.
 * grid    BARRIER_CTAS, or BARRIER_SHARED_CTAS if ranks share a GPU
 * block   BARRIER_THREADS; static shared memory only
 * bytes   that each GPU sends over its links, for n ranks and B bytes of x:
 *             one-shot (n - 1) B, two-shot 2 (n - 1) / n B
 *         Local memory is about ten times as fast as the links, so it is not the bottleneck.
 * why     One-shot has one barrier and is faster for small x; two-shot sends less (one_shot_pays).
 *         96 CTAs: 48 CTAs are slower for large x.
 *         No NCCL: it was slower at every size on two H200 (test/results/kernel-choices.md).
 * asserts nothing; one_shot_pays limits one-shot to ONE_SHOT_MAX_BYTES */

typedef struct sum_8 { /* eight sums in float32 */
    float sums[8];
} sum_8;
__device__ static inline void sum_8_add(sum_8 &s, uint4 x) {
    float f[8];
    unpack_8(x, f);
#pragma unroll
    for (int i = 0; i < 8; i++) s.sums[i] += f[i];
}

/* Returns where `sender` stores its x in the receive buffer of `rank`: in half number % 2. */
__device__ static inline uint4 *one_shot_buffer(const rank_barrier &barrier, int rank,
                                                unsigned number, int sender) {
    return (uint4 *)barrier.recv_buffers[rank] +
           ((size_t)(number & 1) * barrier.tp_size + sender) * (ONE_SHOT_MAX_BYTES / 16);
}
/* Returns the receive buffers of `rank` for two-shot and scattered x, one share for each sender.
 * They lie after the two halves of one-shot. */
__host__ __device__ static inline uint4 *two_shot_buffers(const rank_barrier &barrier, int rank) {
    return (uint4 *)barrier.recv_buffers[rank] +
           (size_t)2 * barrier.tp_size * (ONE_SHOT_MAX_BYTES / 16);
}
__global__ static void __launch_bounds__(BARRIER_THREADS, 1)
    one_shot_kernel(rank_barrier barrier, uint4 *x, int n_vectors) {
    const int first = (int)(blockIdx.x * BARRIER_THREADS + threadIdx.x),
              stride = (int)gridDim.x * BARRIER_THREADS;
    grid_wait();
    const unsigned number = rank_barrier_count(barrier) + 1;
    for (int i = first; i < n_vectors; i += stride) {
        const uint4 own = x[i];
        for (int rank = 0; rank < barrier.tp_size; rank++)
            if (rank != barrier.tp_rank)
                one_shot_buffer(barrier, rank, number, barrier.tp_rank)[i] = own;
    }
    rank_barrier_sync(barrier, number, x);
    grid_launch_dependents();
    for (int i = first; i < n_vectors; i += stride) {
        sum_8 sum = {};
        for (int rank = 0; rank < barrier.tp_size; rank++)
            sum_8_add(sum,
                      rank == barrier.tp_rank
                          ? x[i]
                          : __ldcg(one_shot_buffer(barrier, barrier.tp_rank, number, rank) + i));
        x[i] = pack_8(sum.sums);
    }
    rank_barrier_finish(barrier, number);
}

enum { TWO_SHOT_VECTORS = 4 }; /* vectors that a thread loads before it uses the first one */

/* Adds up this rank's share and stores the sums into x of all ranks.
 * share       vectors of a share; also the stride of the senders in recv_buffer
 * offset      index in x of the first vector of this rank's share
 * n_vectors   vectors of this rank's share; the last ranks may have fewer than `share` */
__device__ static inline void two_shot_add(const rank_barrier &barrier, const uint4 *recv_buffer,
                                           uint4 *const *x_of_rank, int share, int offset,
                                           int n_vectors) {
    const int first = (int)(blockIdx.x * BARRIER_THREADS + threadIdx.x),
              stride = (int)gridDim.x * BARRIER_THREADS;
    for (int i = first; i < n_vectors; i += TWO_SHOT_VECTORS * stride) {
        sum_8 sum[TWO_SHOT_VECTORS] = {};
        for (int rank = 0; rank < barrier.tp_size; rank++) {
            const uint4 *from = rank == barrier.tp_rank ? x_of_rank[barrier.tp_rank] + offset
                                                        : recv_buffer + (size_t)rank * share;
#pragma unroll
            for (int k = 0; k < TWO_SHOT_VECTORS; k++)
                if (i + k * stride < n_vectors) sum_8_add(sum[k], __ldcg(from + i + k * stride));
        }
        for (int rank = 0; rank < barrier.tp_size; rank++)
#pragma unroll
            for (int k = 0; k < TWO_SHOT_VECTORS; k++)
                if (i + k * stride < n_vectors)
                    x_of_rank[rank][offset + i + k * stride] = pack_8(sum[k].sums);
    }
}
__global__ static void __launch_bounds__(BARRIER_THREADS, 1)
    two_shot_kernel(rank_barrier barrier, uint4 *x, int n_vectors) {
    __shared__ uint4 *x_of_rank[BARRIER_MAX_RANKS];
    const int first = (int)(blockIdx.x * BARRIER_THREADS + threadIdx.x),
              stride = (int)gridDim.x * BARRIER_THREADS;
    const int share = (n_vectors + barrier.tp_size - 1) / barrier.tp_size;
    grid_wait();
    const unsigned number = rank_barrier_count(barrier) + 1;
    /* each rank begins with a different peer, so that no peer receives from all ranks at once */
    for (int shift = 1; shift < barrier.tp_size; shift++) {
        const int rank = (barrier.tp_rank + shift) % barrier.tp_size, offset = rank * share,
                  size = min(share, n_vectors - offset);
        uint4 *to = two_shot_buffers(barrier, rank) + (size_t)barrier.tp_rank * share;
        for (int i = first; i < size; i += TWO_SHOT_VECTORS * stride) {
            uint4 vectors[TWO_SHOT_VECTORS];
#pragma unroll
            for (int k = 0; k < TWO_SHOT_VECTORS; k++)
                if (i + k * stride < size) vectors[k] = x[offset + i + k * stride];
#pragma unroll
            for (int k = 0; k < TWO_SHOT_VECTORS; k++)
                if (i + k * stride < size) to[i + k * stride] = vectors[k];
        }
    }
    const bool complete = rank_barrier_sync(barrier, number, x);
    if ((int)threadIdx.x < barrier.tp_size)
        x_of_rank[threadIdx.x] = (int)threadIdx.x == barrier.tp_rank
                                     ? x
                                     : rank_barrier_peer_x(barrier, (int)threadIdx.x);
    __syncthreads();
    if (complete)
        two_shot_add(barrier, two_shot_buffers(barrier, barrier.tp_rank), x_of_rank, share,
                     barrier.tp_rank * share, min(share, n_vectors - barrier.tp_rank * share));
    rank_barrier_sync(barrier, number + 1, x);
    grid_launch_dependents();
    rank_barrier_finish(barrier, number + 1);
}

/* ---- Scattered x: sum, RMSNorm and all-gather ----
 *
 * x[row] += sum over the tp ranks of partials[rank][row], for the rows of this rank's share;
 * y[row] = RMSNorm(x[row]) * norm_weight, or x[row] if norm_weight is NULL, on all ranks.
 *
 * in      partials bf16 [tp_size][share_rows][E], this rank's receive buffers: the partial sums
 *         that the GEMM epilogues of all ranks, this one included, stored there
 *         norm_weight float32 [E] or NULL
 * in/out  x bf16 [.][E]. This rank's share is n_rows rows from row tp_rank * share_rows on. The
 *         partial sums are added to these rows in float32, and the result is rounded once. The
 *         other rows of x stay old
 * out     y bf16 [.][E] of all ranks: the same rows. The sum of squares has the order of
 *         rmsnorm_kernel. If norm_weight is NULL, y is x
 * grid    BARRIER_CTAS, or BARRIER_SHARED_CTAS if ranks share a GPU
 * block   BARRIER_THREADS; 128 threads work on a row; static shared memory only
 * bytes   for n ranks and B bytes of x: sends (n - 1) / n B over the links, half of what two-shot
 *         sends; local reads and writes (1 + 3 / n) B
 * why     The reduce-scatter, which is half of the bytes, is hidden by the GEMM. What remains here
 *         is bound by the stores over the links.
 * asserts nothing
 * Retired: rows built in shared memory and sent by bulk copies, and 128 CTAs. Both were no faster.
 * Figures: test/results/kernel-choices.md. */
typedef struct reduce_norm_args {
    uint4 *x, *y;
    const uint4 *partials;
    int share_rows, n_rows;
    const float *norm_weight;
    int E;
    float inv_E, eps;
} reduce_norm_args;

__global__ static void __launch_bounds__(BARRIER_THREADS, 1)
    reduce_norm_kernel(rank_barrier barrier, const reduce_norm_args args) {
    uint4 *const x = args.x, *const y = args.y;
    const int share_rows = args.share_rows;
    int n_rows = args.n_rows;
    __shared__ float warp_sums_of[2][BARRIER_THREADS / 128][4];
    __shared__ uint4 *y_of_rank[BARRIER_MAX_RANKS];
    const int row_group = (int)threadIdx.x / 128, thread = (int)threadIdx.x % 128,
              n_row_groups = (int)gridDim.x * (BARRIER_THREADS / 128);
    const int row_vectors = args.E / 8;
    grid_wait();
    const unsigned number = rank_barrier_count(barrier) + 1;
    if (!rank_barrier_sync(barrier, number, y)) n_rows = 0;
    if ((int)threadIdx.x < barrier.tp_size)
        y_of_rank[threadIdx.x] = (int)threadIdx.x == barrier.tp_rank
                                     ? y
                                     : rank_barrier_peer_x(barrier, (int)threadIdx.x);
    __syncthreads();
    for (int row = (int)blockIdx.x * (BARRIER_THREADS / 128) + row_group, parity = 0; row < n_rows;
         row += n_row_groups, parity ^= 1) {
        const size_t offset = ((size_t)barrier.tp_rank * share_rows + row) * row_vectors;
        float row_sumsq = 0;
        for (int i = thread; i < row_vectors; i += TWO_SHOT_VECTORS * 128) {
            sum_8 sum[TWO_SHOT_VECTORS] = {};
            for (int rank = -1; rank < barrier.tp_size; rank++) {
                const uint4 *from =
                    rank < 0 ? x + offset
                             : args.partials + ((size_t)rank * share_rows + row) * row_vectors;
#pragma unroll
                for (int k = 0; k < TWO_SHOT_VECTORS; k++)
                    if (i + k * 128 < row_vectors) sum_8_add(sum[k], __ldcg(from + i + k * 128));
            }
#pragma unroll
            for (int k = 0; k < TWO_SHOT_VECTORS; k++) {
                const uint4 vector = pack_8(sum[k].sums);
                if (i + k * 128 >= row_vectors) break;
                x[offset + i + k * 128] = vector;
                row_sumsq = norm_add_squares(vector, row_sumsq);
            }
        }
        for (int lanes = 16; lanes; lanes >>= 1)
            row_sumsq += __shfl_xor_sync(~0u, row_sumsq, lanes);
        float *warp_sums = warp_sums_of[parity][row_group];
        if (thread % 32 == 0) warp_sums[thread / 32] = row_sumsq;
        /* Barrier of the row's 128 threads. One barrier per row is enough, because warp_sums_of has
         * two buffers. The sums of row i are overwritten by those of row i + 2, and every thread
         * has read them before it arrives at the barrier of row i + 1. */
        bar_sync(1 + row_group, 128);
        const float scale = rsqrtf(
            (warp_sums[0] + warp_sums[1] + (warp_sums[2] + warp_sums[3])) * args.inv_E + args.eps);
        for (int i = thread; i < row_vectors; i += 128) {
            const float4 *weight8 = (const float4 *)args.norm_weight + 2 * i;
            const uint4 vector = args.norm_weight
                                     ? norm_scale_8(x[offset + i], scale, weight8[0], weight8[1])
                                     : x[offset + i];
            for (int rank = 0; rank < barrier.tp_size; rank++) y_of_rank[rank][offset + i] = vector;
        }
    }
    rank_barrier_sync(barrier, number + 1, y);
    grid_launch_dependents();
    rank_barrier_finish(barrier, number + 1);
}

/* Returns whether one-shot is faster than two-shot for x of B = `bytes` bytes on n ranks:
 *     one-shot takes (n - 1) B / rate + t       t: time of a barrier; rate: bytes per second of the
 *     two-shot takes 2 (n - 1) / n B / rate + 2 t                     links; t * rate = 800 KB
 * For n = 2 both methods send the same bytes. Measured, two-shot is then faster from about 1.5 MB
 * on, because each rank adds up only half of x. The receive buffer limits one-shot to less anyway.
 * Figures: test/results/kernel-choices.md. */
static bool one_shot_pays(int n, size_t bytes) {
    /* (n - 1) B - 2 (n - 1) / n B <= t * rate, multiplied by n */
    const size_t two = (size_t)(n - 1) * (n - 2) * bytes, one = (size_t)n * 800000;
    return bytes <= ONE_SHOT_MAX_BYTES && two <= one;
}

/* Bytes of a rank's receive buffer. Its layout:
 *     one-shot               2 halves x tp_size senders x ONE_SHOT_MAX_BYTES
 *     two-shot, scattered x  tp_size senders x one share of x; 16 rows more for each, because a
 *                            share is rounded up
 *     from *samp_offset on   sampling partials (chapter 11): 2 halves x tp_size senders x
 *                            SAMP_RECV_BYTES; last stage only */
static size_t group_recv_bytes(const toka_device *dev, size_t *samp_offset) {
    const size_t n = (size_t)tp_size(dev);
    *samp_offset = 2 * n * ONE_SHOT_MAX_BYTES +
                   ((size_t)dev->options.max_tokens + 16 * n) * dev->E * sizeof(bf16);
    return *samp_offset + 2 * n * (is_last_stage(dev) ? SAMP_RECV_BYTES : 0);
}

/* ---- Opening and closing a group; what the rank runtime asks of a GPU ---- */

/* Number of the rank barrier at which CTA 0 of the rank arrived last, or from which it departed
 * last. */
static unsigned group_barrier(toka_group *group, int rank, bool departed) {
    volatile unsigned *progress = static_cast<cuda_group *>(group)->barrier_progress;
    return progress[2 * rank + departed];
}

/* Returns whether the event has not happened yet. On a failed GPU all events count as happened. */
static bool group_event_pending(void *event) {
    return cudaEventQuery((cudaEvent_t)event) == cudaErrorNotReady;
}

/* Returns the op that the rank's GPU is in, as far as this is known: all_reduce if it is in a rank
 * barrier, else the first op after the barrier from which it departed last. NULL: not known. */
static const char *group_device_op(toka_group *group, int rank) {
    group_rank *state = &static_cast<cuda_group *>(group)->gpu_ranks[rank];
    const unsigned departed = group_barrier(group, rank, true);
    const int64_t n_barriers = __atomic_load_n(&group->ranks[rank].n_barriers, __ATOMIC_ACQUIRE);
    if (group_barrier(group, rank, false) != departed) return "all_reduce";
    if (group->tp_size == 1 || departed >= (unsigned)n_barriers) return NULL;
    return __atomic_load_n(&state->op_ring[departed % OP_RING], __ATOMIC_ACQUIRE);
}

static void group_release(toka_group *group) {
    *(volatile int *)static_cast<cuda_group *>(group)->aborted = 1;
}

static const toka_group_kind cuda_group_kind = {
    .name = "GPU",
    .max_tp = BARRIER_MAX_RANKS,
    .n_messages = TOKA_GPU_LINK_BUFFERS,
    .is_pending = group_event_pending,
    .barrier = group_barrier,
    .device_op = group_device_op,
    .release = group_release,
};

static void group_close(toka_group *ranks) {
    cuda_group *group = static_cast<cuda_group *>(ranks);
    if (!group || group->hung) return;
    if (group->aborted) cudaFreeHost(group->aborted);
    toka_group_free(group);
    free(group);
}

static int group_open(toka_group **out, int tp, int pp, toka_err *e) {
    cuda_group *group = (cuda_group *)calloc(1, sizeof *group);
    if (!group) abort();
    e->code = 0;
    if (toka_group_init(group, &cuda_group_kind, tp, pp, e)) {
        free(group);
        return e->code;
    }
    const size_t bytes = sizeof(int) * 16 + sizeof(unsigned) * 2 * (size_t)(tp * pp);
    cudaError_t code = cudaHostAlloc((void **)&group->aborted, bytes,
                                     cudaHostAllocPortable | cudaHostAllocMapped);
    if (code) {
        e->code = TOKA_E_DEVICE;
        snprintf(e->msg, sizeof e->msg, "GPU: memory that the ranks share: %s",
                 cudaGetErrorString(code));
        group_close(group);
        return e->code;
    }
    memset(group->aborted, 0, bytes);
    group->barrier_progress = (unsigned *)(group->aborted + 16);
    *out = group;
    return 0;
}

/* ---- Ops and waits ---- */

/* Returns how many rank barriers the thread of this device has enqueued. Only the thread itself
 * calls it. */
static unsigned group_n_barriers(const toka_device *dev) {
    return (unsigned)__atomic_load_n(&dev->group->ranks[rank_index(dev)].n_barriers,
                                     __ATOMIC_RELAXED);
}
static void group_count_barriers(toka_device *dev, int n) {
    __atomic_fetch_add(&dev->group->ranks[rank_index(dev)].n_barriers, n, __ATOMIC_RELEASE);
}

/* Notes the first op after a rank barrier, for group_device_op. */
static void group_note_op(toka_device *dev, const char *op) {
    const unsigned n_barriers = group_n_barriers(dev);
    if (dev->barriers_at_last_op == n_barriers) return;
    dev->barriers_at_last_op = n_barriers;
    __atomic_store_n(&dev->rank->op_ring[n_barriers % OP_RING], op, __ATOMIC_RELEASE);
}

/* Every op calls this first. op: its name for the deadlock diagnosis; NULL: the op is not noted.
 * Returns false if the device or the group has failed: then the op does nothing. */
static bool op_begin(toka_device *dev, const char *op) {
    if (dev->error.code) return false;
    if (!dev->group) return true;
    if (!op || dev->graphs.capturing) return !toka_group_is_broken(dev->group);
    if (!toka_group_begin_op(dev->group, rank_index(dev), op)) return false;
    group_note_op(dev, op);
    return true;
}

/* Enqueues a wait of the device's stream for another rank's event. For the diagnosis: `ended` is an
 * event that is pending as long as the stream waits; `other` is the rank for which it waits. After
 * the wait it records the event of the step's begin again. So the step clock counts the wait, which
 * is the pipeline bubble, as idle time. */
static void group_stream_wait(toka_device *dev, cudaEvent_t event, cudaEvent_t ended, int other) {
    const int rank = rank_index(dev);
    const int64_t n_waits = dev->group->ranks[rank].n_stream_waits;
    cudaEvent_t reached = dev->rank->wait_events[n_waits % TOKA_GPU_LINK_BUFFERS];
    latch_error(dev, cudaEventRecord(reached, dev->stream), "wait for a rank");
    toka_group_note_wait(dev->group, rank, {reached, ended, other});
    latch_error(dev, cudaStreamWaitEvent(dev->stream, event, 0), "wait for a rank");
    latch_error(dev, cudaEventRecord(dev->clock.begun[dev->last_begun], dev->stream), "step");
}

/* Launches a kernel with n_barriers rank barriers. The kernel can be part of a graph, because the
 * GPU counts the barriers itself. The host also counts them (toka_rank.n_barriers), only for the
 * diagnosis. When a graph replays, this function launches nothing but still counts. The barriers of
 * the last op are counted by cuda_norm_logits_sample when it launches the graph. */
template <class... P> static void launch_barrier_kernel(toka_device *dev, const char *what,
                                                        int n_barriers,
                                                        void (*kernel)(rank_barrier, P...),
                                                        typename type_identity<P>::type... args) {
    if (!graph_is_replay(dev))
        launch_dependent(dev, what, kernel, {dim3((unsigned)dev->barrier_ctas), BARRIER_THREADS},
                         dev->barrier, args...);
    if (dev->graphs.capturing) dev->graphs.current->n_barriers += n_barriers;
    else group_count_barriers(dev, n_barriers);
}

/* ---- Opening: a rank joins ---- */

/* Returns whether this GPU can access the memory of a rank. */
static bool group_can_access(toka_device *dev, int rank) {
    const int other = rank_ordinal(dev, rank);
    int can_access = other == dev->ordinal;
    if (debug_no_peer()) return rank == rank_index(dev);
    if (!can_access)
        latch_error(dev, cudaDeviceCanAccessPeer(&can_access, dev->ordinal, other), "peer access");
    return can_access;
}

static cudaEvent_t group_event_create(toka_device *dev) {
    cudaEvent_t event = NULL;
    if (!dev->error.code)
        latch_error(dev, cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "an event");
    return event;
}

static void *pinned_alloc(toka_device *dev, size_t bytes, const char *what) {
    void *memory = NULL;
    if (!dev->error.code)
        latch_error(dev, cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), what);
    return memory;
}

/* Opens the sender's side of the channel to the next stage. Streams and events belong to the GPU
 * that is current when they are created. */
static void channel_open(toka_device *dev, size_t x_bytes) {
    const int receiver = rank_index(dev) + dev->group->tp_size;
    group_channel *channel = &dev->group->channels[rank_index(dev)];
    channel->send_buffer = (bf16 *)dev_alloc(dev, x_bytes, "send buffers");
    channel->send_ready = group_event_create(dev);
    channel->left = group_event_create(dev);
    if (!group_can_access(dev, receiver)) {
        channel->host_buffers =
            (char *)pinned_alloc(dev, TOKA_GPU_LINK_BUFFERS * x_bytes, "send buffers of the host");
        latch_error(dev, cudaSetDevice(rank_ordinal(dev, receiver)), "cudaSetDevice");
        latch_error(dev,
                    cudaStreamCreateWithFlags(&channel->landing_stream, cudaStreamNonBlocking),
                    "cudaStreamCreate");
    }
    for (cudaEvent_t &event : channel->sent_events) event = group_event_create(dev);
    latch_error(dev, cudaSetDevice(dev->ordinal), "cudaSetDevice");
}

/* Tensor rank 0 of the last stage: opens what sends sampled tokens to the first stage. */
static void sampled_open(toka_device *dev) {
    cuda_group *group = dev->group;
    bool can_access = true;
    for (int rank = 0; rank < group->tp_size; rank++) can_access &= group_can_access(dev, rank);
    if (!can_access)
        group->host_tokens = (int *)pinned_alloc(
            dev, (size_t)max(dev->options.n_seqs, 1) * sizeof(int), "last tokens");
    dev->sampled_event = group_event_create(dev);
    for (cudaEvent_t &event : group->sampled_events) event = group_event_create(dev);
}

/* Allocates the buffers, the events and the streams for transfers between this rank and others. */
static void group_alloc(toka_device *dev) {
    cuda_group *group = dev->group;
    group_rank *state = dev->rank;
    const size_t x_bytes = (size_t)dev->options.max_tokens * dev->E * sizeof(bf16);
    if (group->tp_size > 1) {
        size_t samp_offset, bytes = group_recv_bytes(dev, &samp_offset);
        size_t flags_bytes = (size_t)BARRIER_CTAS * BARRIER_MAX_RANKS * sizeof(signal_flag);
        state->recv_buffer = (char *)dev_alloc(dev, bytes, "receive buffers");
        state->signal_flags = (signal_flag *)dev_alloc(dev, flags_bytes, "receive buffers");
        dev->barrier.counts = (unsigned *)dev_alloc(dev, BARRIER_CTAS * sizeof(unsigned),
                                                    "receive buffers");
        if (dev->error.code) return;
        latch_error(dev, cudaMemsetAsync(state->signal_flags, 0, flags_bytes, dev->stream),
                    "receive buffers");
        latch_error(dev,
                    cudaMemsetAsync(dev->barrier.counts, 0, BARRIER_CTAS * sizeof(unsigned),
                                    dev->stream),
                    "receive buffers");
    }
    state->last_tokens = dev->last_tokens;
    if (group->pp_size > 1)
        latch_error(dev, cudaStreamCreateWithFlags(&dev->send_stream, cudaStreamNonBlocking),
                    "cudaStreamCreate");
    for (cudaEvent_t &event : state->wait_events)
        if (group->pp_size > 1) event = group_event_create(dev);
    if (!is_first_stage(dev)) {
        group_channel *channel = &group->channels[rank_index(dev) - group->tp_size];
        state->channel_buffers = (char *)dev_alloc(dev, TOKA_GPU_LINK_BUFFERS * x_bytes,
                                                   "send buffers");
        for (cudaEvent_t &event : channel->received_events) event = group_event_create(dev);
    }
    if (!is_last_stage(dev)) channel_open(dev, x_bytes);
    else if (group->pp_size > 1 && dev->options.tp_rank == 0) sampled_open(dev);
}

/* Frees what group_alloc created, but for device memory, which cuda_close frees. */
static void group_free_transfers(toka_device *dev) {
    cuda_group *group = dev->group;
    const int rank = rank_index(dev);
    group_channel *channel = &group->channels[rank];
    auto destroy = [&](cudaEvent_t &event) {
        if (event) cudaEventDestroy(event);
        event = NULL;
    };
    if (!is_first_stage(dev))
        for (cudaEvent_t &event : group->channels[rank - group->tp_size].received_events)
            destroy(event);
    destroy(channel->send_ready);
    destroy(channel->left);
    for (cudaEvent_t &event : channel->sent_events) destroy(event);
    for (cudaEvent_t &event : dev->rank->wait_events) destroy(event);
    if (dev->sampled_event) {
        for (cudaEvent_t &event : group->sampled_events) destroy(event);
        if (group->host_tokens) cudaFreeHost(group->host_tokens);
        group->host_tokens = NULL;
    }
    destroy(dev->sampled_event);
    if (channel->host_buffers) cudaFreeHost(channel->host_buffers);
    if (channel->landing_stream) cudaStreamDestroy(channel->landing_stream);
    if (dev->send_stream) cudaStreamDestroy(dev->send_stream);
}

/* Enables peer access from this GPU to the GPUs of all ranks, where possible. */
static void group_enable_peers(toka_device *dev) {
    cuda_group *group = dev->group;
    for (int rank = 0; rank < group->tp_size * group->pp_size && !dev->error.code; rank++) {
        if (rank == rank_index(dev) || !group_can_access(dev, rank)) continue;
        dev->rank->has_peer_access = true;
        if (rank_ordinal(dev, rank) == dev->ordinal) continue;
        cudaError_t code = cudaDeviceEnablePeerAccess(rank_ordinal(dev, rank), 0);
        if (code != cudaErrorPeerAccessAlreadyEnabled) latch_error(dev, code, "peer access");
        cudaGetLastError();
    }
}

/* Latches an error if this GPU cannot access the memory of another tensor rank of its stage. */
static void group_require_peers(toka_device *dev) {
    const int rank0 = dev->options.pp_rank * dev->group->tp_size;
    for (int rank = rank0; rank < rank0 + dev->group->tp_size && !dev->error.code; rank++) {
        if (group_can_access(dev, rank) || dev->error.code) continue;
        dev->error.code = TOKA_E_DEVICE;
        snprintf(dev->error.msg, sizeof dev->error.msg,
                 "GPU: GPUs %d and %d cannot reach each other's memory (no peer access), which "
                 "tensor ranks need; --pipeline-parallel-size and --data-parallel-size do not",
                 dev->ordinal, rank_ordinal(dev, rank));
    }
}

/* All ranks of a tp group must make the same choices for a step. So all of them plan attention for
 * the largest K and the smallest n_sms of the tp group, and either all or none of them must have
 * compute capability 9.0. All ranks have joined. */
static void group_agree(toka_device *dev) {
    const cuda_group *group = dev->group;
    const group_rank *ranks = dev->rank - dev->options.tp_rank;
    const int rank0 = rank_index(dev) - dev->options.tp_rank;
    int K = 0, n_sms = INT_MAX, other = 0;
    for (int rank = 0; rank < group->tp_size; rank++) {
        K = max(K, ranks[rank].K), n_sms = min(n_sms, ranks[rank].n_sms);
        if ((ranks[rank].arch == 90) != (ranks[0].arch == 90)) other = rank;
    }
    attn_agree(dev, K, n_sms);
    if (!other) return;
    dev->error.code = TOKA_E_DEVICE;
    snprintf(dev->error.msg, sizeof dev->error.msg,
             "GPU: GPUs %d and %d have compute capability %d.%d and %d.%d, expected 9.0 of all "
             "tensor ranks or of none; --pipeline-parallel-size and --data-parallel-size take both",
             rank_ordinal(dev, rank0), rank_ordinal(dev, rank0 + other), ranks->arch / 10,
             ranks->arch % 10, ranks[other].arch / 10, ranks[other].arch % 10);
}

/* Describes all GPUs that this process opens: "4 x NVIDIA H200, 150 GB, wgmma kernels, peer
 * access". Called by rank 0. */
static void group_describe(toka_device *dev) {
    cuda_group *group = dev->group;
    const int n_devices = dev->options.n_devices;
    bool all_peers = true;
    for (int rank = 0; rank < group->tp_size * group->pp_size; rank++)
        all_peers &= group_can_access(dev, rank);
    /* text that faster ranks have already added (graph_add_description) */
    char others[sizeof dev->description] = {};
    pthread_mutex_lock(&group->lock);
    memcpy(others, group->description, sizeof others - 1);
    snprintf(group->description, sizeof group->description, "%d x %s%s%s%s", n_devices,
             dev->description, debug_shared_gpus() ? ", which ranks share" : "",
             group->tp_size * group->pp_size == 1
                 ? ""
                 : all_peers ? ", peer access" : ", no peer access: messages go through the host",
             others);
    pthread_mutex_unlock(&group->lock);
}

/* Last step of opening: joins the group, waits until all ranks have joined, and collects the
 * addresses of the peers' buffers. */
static void group_join(toka_device *dev) {
    cuda_group *group = dev->group;
    const int tp = group->tp_size, me = rank_index(dev), rank0 = dev->options.pp_rank * tp;
    dev->rank->K = dev->shape->K, dev->rank->n_sms = dev->n_sms, dev->rank->arch = dev->arch;
    if (toka_group_join(group, me, &dev->error)) return;
    if (toka_group_wait_joined(group, me)) group_agree(dev);
    else toka_group_error(group, me, &dev->error);
    if (!dev->error.code) group_enable_peers(dev);
    dev->barrier.tp_rank = dev->options.tp_rank, dev->barrier.tp_size = tp,
    dev->barrier.aborted = group->aborted,
    dev->barrier.progress = group->barrier_progress + 2 * me;
    for (int rank = 0; rank < tp; rank++)
        dev->barrier.signal_flags[rank] = group->gpu_ranks[rank0 + rank].signal_flags,
        dev->barrier.recv_buffers[rank] = group->gpu_ranks[rank0 + rank].recv_buffer;
    dev->barrier_ctas = debug_shared_gpus() ? BARRIER_SHARED_CTAS : BARRIER_CTAS;
    if (me == 0) group_describe(dev);
}

/* First step of opening: assigns the rank that the options of the device name. Refuses tensor ranks
 * without peer access before any weight is loaded. */
static void group_assign_rank(toka_device *dev) {
    cuda_group *group = dev->group = static_cast<cuda_group *>(dev->options.group);
    const int rank = dev->options.pp_rank * group->tp_size + dev->options.tp_rank;
    assert(rank < group->tp_size * group->pp_size && dev->options.tp_rank < group->tp_size);
    dev->rank = &group->gpu_ranks[rank], dev->barriers_at_last_op = ~0u;
    char name[64];
    toka_rank_name(group, rank, name);
    snprintf(dev->rank_prefix, sizeof dev->rank_prefix, "%s: ", name);
    group_require_peers(dev);
}

/* ---- Failure, and closing ---- */

/* Adds a note to the device's error. A GPU fault also fails all GPUs with peer access. The rank
 * that notices the fault first reports it, and this need not be the rank at fault. The note names
 * the rank at fault if it is known: if all peers have arrived at later rank barriers than one rank,
 * that rank is at fault. */
static void group_note_peer_fault(toka_device *dev) {
    cuda_group *group = dev->group;
    group_rank *state = dev->rank;
    const int me = rank_index(dev), rank0 = me / group->tp_size * group->tp_size;
    const cudaError_t code = dev->stream ? cudaStreamQuery(dev->stream) : cudaSuccess;
    if (state->peer_fault_noted || !state->has_peer_access || code == cudaSuccess ||
        code == cudaErrorNotReady)
        return;
    int late_rank = rank0, n_ahead = 0;
    char name[64];
    for (int other = rank0; other < rank0 + group->tp_size; other++)
        if ((int)(group_barrier(group, other, false) - group_barrier(group, late_rank, false)) < 0)
            late_rank = other;
    for (int other = rank0; other < rank0 + group->tp_size; other++)
        n_ahead += group_barrier(group, other, false) != group_barrier(group, late_rank, false);
    const bool is_known = n_ahead > 0 && n_ahead == group->tp_size - 1;
    state->peer_fault_noted = true;
    if (is_known && late_rank == me) return;
    const size_t length = strlen(dev->error.msg);
    toka_rank_name(group, late_rank, name);
    snprintf(
        dev->error.msg + length, sizeof dev->error.msg - length,
        "; it may be another rank's fault, GPUs that reach each other's memory fail together%s%s%s",
        is_known ? ": " : "", is_known ? name : "",
        is_known ? " is behind, the others waited for it" : "");
}

/* Waits for an event of this rank's stream. Stops waiting if the group is broken: after a failure
 * of another rank the event may never happen. */
static void group_sync(toka_device *dev, cudaEvent_t event) {
    cudaError_t code;
    for (int n_polls = 0;
         (code = cudaEventQuery(event)) == cudaErrorNotReady && !toka_group_is_broken(dev->group);
         n_polls++)
        if (n_polls < 64) sched_yield();
        else usleep(20);
    if (code != cudaErrorNotReady) latch_error(dev, code, "step");
    toka_group_progress(dev->group);
}

/* Called before anything of a device is freed. Waits until the streams of this device are idle and
 * until all other ranks that joined have called it, too. Then no rank uses the memory of another.
 * Returns false if a GPU does not finish, or if a rank does not call it in time. Then no rank frees
 * anything. In a broken group a device waits at most 4 s for its streams; toka_group_leave gives
 * the other ranks more time than that. */
static bool group_leave(toka_device *dev) {
    cudaStream_t landing_stream = dev->group->channels[rank_index(dev)].landing_stream;
    bool idle = true;
    int ms = 0;
    for (cudaStream_t stream : {dev->stream, dev->send_stream, landing_stream})
        for (; idle && stream && cudaStreamQuery(stream) == cudaErrorNotReady;
             ms += toka_group_is_broken(dev->group))
            idle = ms < 4000, usleep(1000);
    if (!toka_group_leave(dev->group, rank_index(dev), idle)) return false;
    group_free_transfers(dev);
    return true;
}

/* ---- Ops: all_reduce, send, receive ---- */

/* Returns whether the GEMM does the reduce-scatter for x of this many rows (scattered x). */
static bool reduce_scatter_pays(const toka_device *dev, int rows) {
    /* Rows are rounded up to a multiple of 128, as graphs of more than 64 rows are padded. So a
     * step makes the same choice with a graph as without one. */
    const size_t bytes = (size_t)ceil_div(rows, 128) * 128 * dev->E * sizeof(bf16);
    return tp_size(dev) > 1 && dev->hopper && rows > SMALLM_MAX && bytes >= TOKA_GPU_SCATTER_BYTES;
}
/* Returns the rows of a rank's share, a multiple of 16. The last ranks may have fewer rows. */
static int reduce_share_rows(const toka_device *dev, int rows) {
    return ceil_div(rows, 16 * tp_size(dev)) * 16;
}
/* Reduce-scatter in the GEMM: computes args->x W^T, and the epilogue stores the rows of each share
 * into the receive buffer of the rank that adds them up. args->y becomes scattered x. */
static void gemm_reduce_scatter(toka_device *dev, const gemm_args *args) {
    const int n_ranks = tp_size(dev), share_rows = reduce_share_rows(dev, args->M);
    bf16 *buffers[BARRIER_MAX_RANKS];
    for (int rank = 0; rank < n_ranks; rank++)
        buffers[rank] = (bf16 *)two_shot_buffers(dev->barrier, rank) +
                        (size_t)dev->barrier.tp_rank * share_rows * dev->E;
    gemm_wgmma_scatter(dev, args, buffers, n_ranks, share_rows);
}
/* Completes the all-reduce of scattered x. Each rank adds up its own rows of x. Their RMSNorm goes
 * into xn of all ranks; if norm_weight is NULL, x itself goes into x of all ranks. Returns false,
 * and does nothing, if x is not scattered. If the step replays a graph, the kernel is in the graph,
 * and cuda_all_reduce has counted its barriers. */
static bool reduce_norm(toka_device *dev, toka_hidden *x, const float *norm_weight) {
    if (x->state != TOKA_HIDDEN_SCATTERED) return false;
    x->state = norm_weight ? TOKA_HIDDEN_SHARDED : TOKA_HIDDEN_WHOLE;
    if (graph_is_replay(dev)) return true;
    const int T = dev->step->T, share_rows = reduce_share_rows(dev, T),
              rows = min(share_rows, T - dev->barrier.tp_rank * share_rows);
    uint4 *rows_of_x = (uint4 *)x->data.at;
    const reduce_norm_args args = {
        rows_of_x,
        norm_weight ? (uint4 *)dev->xn : rows_of_x,
        (const uint4 *)two_shot_buffers(dev->barrier, dev->barrier.tp_rank),
        share_rows,
        rows,
        norm_weight,
        dev->E,
        1.0f / dev->shape->E,
        hidden_eps(dev->shape)};
    launch_barrier_kernel(dev, "sum", 2, reduce_norm_kernel, args);
    /* the running op is the first one after these barriers */
    if (!dev->graphs.capturing)
        group_note_op(dev, __atomic_load_n(&dev->group->ranks[rank_index(dev)].op,
                                           __ATOMIC_RELAXED));
    clock_record_op(dev, TOKA_OP_ALL_REDUCE);
    return true;
}

static void cuda_all_reduce(toka_device *dev, toka_hidden *x, int rows) {
    /* a graph also has padding rows: they count, too */
    const size_t bytes = (size_t)(dev->graphs.current ? dev->step->T : rows) * dev->E *
                         sizeof(bf16);
    if (tp_size(dev) == 1 || !op_begin(dev, "all_reduce")) return;
    if (x->state == TOKA_HIDDEN_SCATTERED) {
        /* reduce_norm completes the sum; in a graph its barriers are counted below */
        if (!graph_is_replay(dev)) return;
    } else {
        assert(x->state == TOKA_HIDDEN_PARTIAL);
        x->state = TOKA_HIDDEN_WHOLE;
    }
    const bool one_shot = one_shot_pays(dev->barrier.tp_size, bytes);
    launch_barrier_kernel(dev, "all-reduce", one_shot ? 1 : 2,
                          one_shot ? one_shot_kernel : two_shot_kernel, (uint4 *)x->data.at,
                          (int)(bytes / 16));
    clock_record_op(dev, TOKA_OP_ALL_REDUCE);
}

/* Copies message number `message` from the send buffer to the receiver's channel buffer, on streams
 * for copies. */
static void channel_copy(toka_device *dev, group_channel *channel, int64_t message, size_t bytes) {
    const int index = (int)(message % TOKA_GPU_LINK_BUFFERS),
              receiver = rank_index(dev) + dev->group->tp_size;
    const size_t buffer_bytes = (size_t)dev->options.max_tokens * dev->E * sizeof(bf16);
    char *to = dev->group->gpu_ranks[receiver].channel_buffers + index * buffer_bytes;
    if (!channel->host_buffers) {
        latch_error(dev,
                    cudaMemcpyPeerAsync(to, rank_ordinal(dev, receiver), channel->send_buffer,
                                        dev->ordinal, bytes, dev->send_stream),
                    "send");
        latch_error(dev, cudaEventRecord(channel->left, dev->send_stream), "send");
        latch_error(dev, cudaEventRecord(channel->sent_events[index], dev->send_stream), "send");
        return;
    }
    char *host = channel->host_buffers + index * buffer_bytes;
    const char *from = (const char *)channel->send_buffer;
    for (size_t at = 0; at < bytes; at += CHANNEL_PART_BYTES) {
        const size_t n = min((size_t)CHANNEL_PART_BYTES, bytes - at);
        latch_error(dev,
                    cudaMemcpyAsync(host + at, from + at, n, cudaMemcpyDeviceToHost,
                                    dev->send_stream),
                    "send");
        latch_error(dev, cudaEventRecord(channel->left, dev->send_stream), "send");
        latch_error(dev, cudaStreamWaitEvent(channel->landing_stream, channel->left, 0), "send");
        latch_error(dev,
                    cudaMemcpyAsync(to + at, host + at, n, cudaMemcpyHostToDevice,
                                    channel->landing_stream),
                    "send");
    }
    latch_error(dev, cudaEventRecord(channel->sent_events[index], channel->landing_stream), "send");
}

static void cuda_send(toka_device *dev, toka_hidden *x, int rows) {
    if (!op_begin(dev, "send")) return;
    reduce_norm(dev, x, NULL); /* if the step runs as a graph, this kernel is part of the graph */
    const void *from = (const void *)toka_hidden_read(x).at;
    if (dev->graphs.capturing) return;
    graph_launch(dev);
    cuda_group *group = dev->group;
    group_channel *channel = &group->channels[rank_index(dev)];
    const size_t bytes = (size_t)rows * dev->E * sizeof(bf16);
    /* Once there is room, the receive of the last message in this message's channel buffer has been
     * enqueued, so received_events is valid. */
    const int64_t message = toka_channel_begin_send(group, rank_index(dev));
    if (message < 0) return;
    /* the send buffer is free when the previous message has left it */
    if (message) latch_error(dev, cudaStreamWaitEvent(dev->stream, channel->left, 0), "send");
    latch_error(dev,
                cudaMemcpyAsync(channel->send_buffer, from, bytes, cudaMemcpyDeviceToDevice,
                                dev->stream),
                "send");
    latch_error(dev, cudaEventRecord(channel->send_ready, dev->stream), "send");
    latch_error(dev, cudaStreamWaitEvent(dev->send_stream, channel->send_ready, 0), "send");
    /* The channel buffer, and that of the host, is free when the receive of its last message is
     * done. */
    if (message >= TOKA_GPU_LINK_BUFFERS)
        latch_error(dev,
                    cudaStreamWaitEvent(dev->send_stream,
                                        channel->received_events[message % TOKA_GPU_LINK_BUFFERS],
                                        0),
                    "send");
    channel_copy(dev, channel, message, bytes);
    toka_channel_end_send(group, rank_index(dev), rows);
    clock_record_op(dev, TOKA_OP_SEND_RECEIVE);
}

static void cuda_receive(toka_device *dev, toka_hidden *x, int rows) {
    if (!op_begin(dev, "receive")) return;
    toka_hidden_set_sum(x, 1);
    if (dev->graphs.capturing) return;
    cuda_group *group = dev->group;
    const int rank = rank_index(dev), sender = rank - group->tp_size;
    group_channel *channel = &group->channels[sender];
    const size_t bytes = (size_t)rows * dev->E * sizeof(bf16),
                 buffer_bytes = (size_t)dev->options.max_tokens * dev->E * sizeof(bf16);
    const int64_t message = toka_channel_begin_receive(group, rank, rows);
    const int index = (int)(message % TOKA_GPU_LINK_BUFFERS);
    if (message < 0) return;
    group_stream_wait(dev, channel->sent_events[index], channel->received_events[index], sender);
    latch_error(dev,
                cudaMemcpyAsync((void *)x->data.at,
                                dev->rank->channel_buffers + index * buffer_bytes, bytes,
                                cudaMemcpyDeviceToDevice, dev->stream),
                "receive");
    latch_error(dev, cudaEventRecord(channel->received_events[index], dev->stream), "receive");
    toka_channel_end_receive(group, rank);
    clock_record_op(dev, TOKA_OP_SEND_RECEIVE);
}

/* ---- Sampled tokens, from the last stage to the first ---- */

/* Called after the sampling of a step. tp rank 0 of the last stage sends last_tokens to all ranks
 * of the first stage. */
static void group_send_sampled(toka_device *dev, const toka_step *step) {
    cuda_group *group = dev->group;
    if (pp_size(dev) == 1 || dev->options.tp_rank || dev->error.code || toka_group_is_broken(group))
        return;
    latch_error(dev, cudaEventRecord(dev->sampled_event, dev->stream), "sampled ids");
    latch_error(dev, cudaStreamWaitEvent(dev->send_stream, dev->sampled_event, 0), "sampled ids");
    const size_t bytes = (size_t)dev->options.n_seqs * sizeof(int);
    if (group->host_tokens)
        latch_error(dev,
                    cudaMemcpyAsync(group->host_tokens, dev->last_tokens, bytes,
                                    cudaMemcpyDeviceToHost, dev->send_stream),
                    "sampled ids");
    for (int rank = 0; rank < group->tp_size && !group->host_tokens; rank++)
        latch_error(dev,
                    cudaMemcpyPeerAsync(group->gpu_ranks[rank].last_tokens, rank_ordinal(dev, rank),
                                        dev->last_tokens, dev->ordinal, bytes, dev->send_stream),
                    "sampled ids");
    latch_error(dev,
                cudaEventRecord(group->sampled_events[step->number % SAMPLED_EVENTS],
                                dev->send_stream),
                "sampled ids");
    toka_group_set_sampled(group, step->number);
}

/* Called before a step is embedded. Makes the stream wait for the sampled tokens that the step
 * needs. Returns false if the device or the group has failed. */
static bool group_wait_sampled(toka_device *dev, const toka_step *step) {
    cuda_group *group = dev->group;
    if (pp_size(dev) == 1 || !step->needs_step) return true;
    assert(step->number - step->needs_step < SAMPLED_EVENTS);
    cudaEvent_t sampled = group->sampled_events[step->needs_step % SAMPLED_EVENTS];
    if (!toka_group_wait_sampled(group, rank_index(dev), step->needs_step)) return false;
    group_stream_wait(dev, sampled, sampled, (group->pp_size - 1) * group->tp_size);
    if (group->host_tokens)
        latch_error(dev,
                    cudaMemcpyAsync(dev->last_tokens, group->host_tokens,
                                    (size_t)dev->options.n_seqs * sizeof(int),
                                    cudaMemcpyHostToDevice, dev->stream),
                    "sampled ids");
    return !dev->error.code;
}

/* ===========================================================================
 * MARK: 11. LM head, and sampling of plain rows [kernel]
 * The op norm_logits_sample takes chosen rows of x and returns one sampled token for each. The
 * order of work on a row, every rule (ties, NaN, -inf, what a filter keeps, the fallback id) and
 * the draw are those of chapter 22 of toka.c. The draw fits into the epilogue of the LM head's
 * GEMM. The words of its definition here:
 *
 *   block        an id block (SAMP_BLOCK): the columns of one tile of the LM head
 *   group        an id group. In a 64 x 256 tile of wgmma accumulators, it is the 64 columns of a
 *                row that one thread holds
 *   weight       of an id: 2^(logit * scale), with scale = log2(e) / temperature
 *   Gumbel key   log2 of the key of a group: log2(sum of the group's weights) + noise, where the
 *                noise is -log2(E). A sum is relative to a maximum of logits, which the partial or
 *                the caller knows
 *   candidate    of a group: the id that is sampled if the group wins
 *   partial      result of some ids of a row (struct samp_partial)
 *
 * The sampled id does not depend on the batch, on the sequence index, on the tile shape, or on
 * which kernel computed the logits. Logits, Gumbel keys and sums are float32. The sums of a group
 * have the order that the definition gives. Each step rounds explicitly, so that all kernels draw
 * the same ids.
 *
 * There are three kinds of rows:
 *   plain row      It is greedy, sampled at a temperature, or scored (its id is given, and only the
 *                  log-probability is wanted). It has no filter, list or penalty, and wants no top
 *                  log-probabilities and no rank. Its partials suffice.
 *   filtered row   Any other row. Its logits are stored, too. samp_filter_kernel (chapter 12) works
 *                  only on the few ids that can matter, and samples from the kept ids with the same
 *                  groups and noise.
 *   penalized row  A plain row but for a repetition or presence penalty, whose log-probability is
 *                  not wanted. It is handled as a plain row: the kernel that makes its partials
 *                  applies the penalties first. In the cases below it is handled as a filtered row.
 * In a graph (chapter 15) all rows of a step are handled alike: if one row is filtered, all rows
 * are handled as filtered rows. The same holds in steps of up to FUSE_NORM_MAX_ROWS rows, if there
 * are no tensor ranks and the lists of the step fit into its upload buffer.
 *
 * The kernels of a step:
 *   rmsnorm              x -> xn: the sampled rows
 *   samp_presence_kernel the histories of penalized rows -> their presence bits
 *   LM head              xn -> partials, one per (row, block). On Hopper the epilogue of the wgmma
 *                        GEMM makes them, and stores the logits of filtered rows only. In three
 *                        cases the GEMM stores all logits instead (EPI_LOGITS): up to
 *                        SAMP_STORED_MAX rows, on other GPUs, and if the caller wants the logits
 *   samp_partials_kernel stored logits -> partials
 *   samp_reduce_kernel   partials -> results of plain rows
 *   samp_filter_kernel   partials and logits -> results of filtered rows: lists, penalties, top
 *                        log-probabilities, threshold, draw
 * With tensor ranks, samp_merge_ranks_kernel exchanges the partials of plain rows, and
 * samp_gather_logits_kernel the logits of filtered rows.
 * =========================================================================== */

enum {
    SAMP_BLOCK = 256,        /* ids of an id block */
    SAMP_GROUP_IDS = 64,     /* ids of an id group */
    SAMP_MERGE_THREADS = 64, /* threads that merge a row's partials; the number fixes the order */
    SAMP_REDUCE_ROWS = 4,    /* rows per CTA of samp_reduce_kernel */
    FILTER_THREADS = 256,    /* threads per CTA of samp_filter_kernel */
    /* words of the workspace: counts of 16,384 ids for penalties, or one bit for each of 524,288
     * ids (allowed or not) */
    FILTER_WORKSPACE_WORDS = 16384,
    FILTER_CANDIDATES = 8192, /* most ids that are gathered in shared memory */
    FILTER_BINS = 8192,       /* bins of samp_narrow_by_counts */
    /* If more blocks than this may have kept ids, the draw skips blocks by upper bounds of their
     * Gumbel keys. If the sum of the kept weights is not known, the limit is four times as high. */
    FILTER_MANY_BLOCKS = 32,
    SAMP_DRAW = -1,           /* samp_params.forced_id: sample an id */
    SAMP_DRAW_NO_LOGPROB = -2, /* the same, and its raw log-probability is not needed */
    SAMP_DRAW_PENALIZED = -3   /* and lower: the same for penalized row SAMP_DRAW_PENALIZED minus
                                  this; it is an index in samp_plan.penalized */
};
#define SAMP_LOG2E 1.4426950408889634f
#define SAMP_LN2 0.6931471805599453f
/* A weight of 1 in fixed point (samp_mass). Sums of up to 2^18 weights are exact, so the order of
 * the additions does not change them. */
#define SAMP_MASS_ONE 0x1p44f

typedef struct samp_params { /* the fields of a toka_sample_row that all kernels need: 32 bytes */
    /* Philox: its key; sample and position are words 0 and 1 of its counter */
    uint32_t philox_key[2], sample, position;
    uint32_t uniform; /* the row's uniform number, as 32 random bits */
    float scale;      /* log2(e) / temperature; 0: greedy */
    int forced_id;    /* >= 0: score this id; else SAMP_DRAW ... */
    int seq;          /* >= 0: the sampled id goes to last_tokens[seq]; -1: to no entry */
} samp_params;

/* The partial result of a set of ids of one row. Two partials of a row merge into one. */
typedef struct samp_partial {
    float max;          /* highest logit; -inf: none of the ids may be drawn */
    float gumbel;       /* Gumbel key of the winning group of this set, minus max * scale */
    int id;             /* the candidate of this group; INT_MAX: none */
    float logit;        /* logit of the candidate */
    float sum, raw_sum; /* sum: of 2^((logit - max) * scale). raw_sum: the same at temperature 1,
                           if the row needs it */
} samp_partial;

typedef struct samp_penalized { /* the penalties of a penalized row, and where its history is */
    const int *pages;         /* device; of the first n_history tokens */
    int first, n_history;     /* the penalties look at the tokens first .. n_history-1 */
    int n_prompt;             /* those from n_prompt on are the output */
    float repetition, presence;
} samp_penalized;

typedef struct samp_presence { /* of the 64 ids of an id group: bit i is for logits[i] */
    uint64_t seen, output;     /* the id is in the history; in the output */
} samp_presence;

typedef struct samp_penalties { /* of the penalized rows of a pass over the weights */
    const samp_penalized *rows;    /* [first + n], indexed as by SAMP_DRAW_PENALIZED; NULL: none */
    const samp_presence *presence; /* [n][n_blocks][4]; that of row `first` is the first one */
    int first, n_blocks;
} samp_penalties;

typedef struct samp_result { /* result of a row; the host gets one for every row */
    int id;
    /* of the id: raw log-probability, and that in the distribution from which it was sampled */
    float logprob, sampled_logprob;
    int rank; /* rank of the forced id, if a filtered row wants it; else 0 */
} samp_result;

typedef struct samp_top { /* the host gets one for each row that wants top log-probabilities */
    int ids[TOKA_MAX_LOGPROBS];
    float logprobs[TOKA_MAX_LOGPROBS];
} samp_top;

typedef struct samp_filter { /* more parameters of a filtered row */
    /* Lists, on the device. pages: of the first n_history tokens, the row's history. bad_ids: the
     * bad words, one after the other; word i ends before bad_ids[bad_ends[i]]. */
    const int *pages, *bias_ids, *allowed, *forbidden, *bad_ids, *bad_ends;
    const float *bias;
    const uint32_t *mask; /* NULL, or a bit for each id that may be drawn (toka_sample_row) */
    /* temperature * log(min_p); -inf: off. min-p removes logits below the highest one plus this. */
    double min_p_drop;
    float temperature, top_p;              /* top_p 1: off */
    float repetition, frequency, presence; /* penalties */
    int top_k;                             /* 0: off */
    int n_top, top_index;                  /* n_top: top log-probabilities that the row wants; 0:
                                              none. top_index: index of the row in tops */
    int n_history, n_prompt;               /* n_history 0: the row does not need its history */
    int first_penalized; /* penalties look at the tokens first_penalized .. n_history-1; n_history:
                            the row has no penalties */
    int n_bias, n_allowed, n_forbidden, n_bad, fallback_id;
    int ranked; /* the row wants the rank of its forced id */
    toka_word_table words; /* bad words as texts, its lists on the device; n_ends 0: none */
    int keep_special;      /* toka_sample_row's */
} samp_filter;

typedef struct samp_host_results { /* results of one step on the host, until it is finished */
    samp_result *results; /* [max_samples] pinned */
    samp_top *tops;       /* [max_samples] pinned */
    /* [max_samples] samp_params i belongs to sample row order[i] of the step; plain rows first */
    int *order;
    int n_tops;           /* rows of the step that want top log-probabilities */
    toka_sample_result *caller_results; /* the caller's array; NULL: the step has no results */
} samp_host_results;

typedef struct samp_mask { /* a mask that a list of filters uploads, once for all its rows */
    const uint32_t *host, *device;
    int fallback_id;  /* of a row without other lists of ids; -1: not computed yet */
    unsigned list;    /* number of the list of filters; of another list: the place is free */
} samp_mask;

struct samp_plan {
    int n_blocks, ld_logits; /* ceil(V_all / 256); row stride of logits */
    /* most rows that fit in memory: chunk_rows with logits, partial_rows with partials */
    int chunk_rows, partial_rows;
    float *logits;           /* [chunk_rows][ld_logits] */
    samp_partial *partials;  /* [n_blocks][partial_rows] */
    float *own_logits;       /* [chunk_rows][ld_own] logits of this rank's own ids; one rank: the
                                same as logits */
    int own_blocks, ld_own;  /* blocks of this rank's own ids; row stride of own_logits */
    bool ranks_own_blocks;   /* the ids of each rank begin at a block boundary, so each rank can
                                make the partials of its own ids */
    samp_partial *merged;    /* tensor ranks: [partial_rows] merged partials of the own ids */
    size_t recv_offset;      /* bytes: where the partials of peers begin in the receive buffer */
    /* [partial_rows] The highest Gumbel key of each row so far, as an integer (samp_logit_to_key);
     * 0: none. All are 0 when the LM head starts. */
    uint32_t *best_keys;
    samp_result *dev_results; /* device, [max_samples] */
    samp_top *tops;           /* device, [max_samples] */
    /* For a step that is launched kernel by kernel: as many filters as fit with their lists. */
    upload_buffer list_upload;
    samp_mask *masks;         /* host, [n_mask_places] hash table by `host`, at most half full */
    int n_mask_places;        /* a power of 2 */
    unsigned mask_list;       /* number of the current list of filters */
    samp_host_results host_results[STEP_RING_SIZE];
    /* The fields below are of the current step. The memory of penalized_index and presence is that
     * of the plan. */
    samp_params *params;  /* device, [n_samples] */
    int *rows;            /* device, [n_samples] row of x */
    int n_plain;          /* rows that are handled as plain rows */
    samp_penalized *penalized; /* device, [n_penalized], in the order of the step's samples */
    int n_penalized;           /* penalized rows that are handled as plain rows */
    int *penalized_index;      /* host, [max_samples] index in penalized of each sample; -1: none */
    samp_penalties penalties;  /* of the current pass over the weights */
    samp_presence *presence;   /* [partial_rows][n_blocks][4] of the penalized rows of a pass */
    samp_filter *filters; /* of a step that runs as a graph: device, [n_samples]; NULL: the step has
                             no filtered row */
    samp_result *results; /* where the kernels write results: see samp_plan_step */
    bool in_order;        /* order[i] is i: all rows are plain, or all are handled as filtered */
};

/* ---- Presence bits of penalized rows ----
 *
 * in   rows [n], kv_ids           out  presence [n][n_blocks][4]
 * Grid n, block 256, shared 64 bytes per block of ids: the bits of one row. They are made anew in
 * each step: a history is at most as long as the keys and values that attention has just read, and
 * an id has 4 bytes. Writes 64 * n_blocks bytes a row. */
__global__ static void __launch_bounds__(256)
    samp_presence_kernel(const samp_penalized *rows, const int *kv_ids, samp_presence *presence,
                         int n_blocks) {
    extern __shared__ __align__(16) uint32_t bits[]; /* [n_blocks][4] of samp_presence */
    const int n_quads = n_blocks * 4;                /* vectors of 16 bytes */
    for (int i = (int)threadIdx.x; i < n_quads; i += 256) ((uint4 *)bits)[i] = uint4{};
    grid_launch_dependents();
    grid_wait();
    const samp_penalized row = rows[blockIdx.x];
    __syncthreads();
    for (int i = row.first + (int)threadIdx.x; i < row.n_history; i += 256) {
        const int id = kv_ids[row.pages[i / TOKA_GPU_PAGE_TOK] * TOKA_GPU_PAGE_TOK +
                              i % TOKA_GPU_PAGE_TOK];
        const int column = id % SAMP_BLOCK, index = column / 8 * 2 + column % 2,
                  word = (id / SAMP_BLOCK * 4 + column / 2 % 4) * 4 + index / 32;
        if ((unsigned)id >= (unsigned)(n_blocks * SAMP_BLOCK)) continue;
        atomicOr(&bits[word], 1u << index % 32);
        if (i >= row.n_prompt) atomicOr(&bits[word + 2], 1u << index % 32);
    }
    __syncthreads();
    uint4 *to = (uint4 *)(presence + (size_t)blockIdx.x * n_quads);
    for (int i = (int)threadIdx.x; i < n_quads; i += 256) to[i] = ((const uint4 *)bits)[i];
}

/* ---- An id group: 64 logits in one thread's registers ---- */

/* Philox4x32-10, the same as samp_philox of toka.c. */
__host__ __device__ static inline void philox(uint32_t counter[4], uint32_t k0, uint32_t k1) {
#pragma unroll
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * counter[0], b = (uint64_t)0xCD9E8D57u * counter[2];
        counter[0] = (uint32_t)(b >> 32) ^ counter[1] ^ k0;
        counter[2] = (uint32_t)(a >> 32) ^ counter[3] ^ k1;
        counter[1] = (uint32_t)b;
        counter[3] = (uint32_t)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

/* Returns log2(E) of an exponential variable E = -ln(1 - v). v is uniform: the middle of one of
 * 2^32 cells. A small v gives a high Gumbel key, but 1 - v would round v away. So a series is used
 * for a small v. The Gumbel noise -log2(E) is at most 33, which is 22.9 as a natural logarithm. */
__device__ static inline float samp_log2_exponential(uint32_t word) {
    float v = __fmul_rn(__fadd_rn((float)word, 0.5f), 0x1p-32f),
          rest = __fmul_rn(__fadd_rn((float)~word, 0.5f), 0x1p-32f);
    float series = __fmaf_rn(
        v,
        __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, __fmaf_rn(v, 1 / 6.0f, 0.2f), 0.25f), 1 / 3.0f),
                  0.5f),
        1);
    return lg2(v < 0.0625f ? __fmul_rn(v, series) : __fmul_rn(-SAMP_LN2, lg2(rest)));
}

/* Order-preserving map of floats to integers, and back. -0 counts as +0. */
__device__ static inline uint32_t samp_logit_to_key(float x) {
    uint32_t u = __float_as_uint(x + 0.0f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ static inline float samp_key_to_logit(uint32_t key) {
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

/* Step 1 of chapter 18: NaN becomes -inf, +inf becomes FLT_MAX. */
__device__ static inline float samp_clean(float x) {
    return x > FLT_MAX ? FLT_MAX : x >= -FLT_MAX ? x : -INFINITY;
}

/* x / r for r in 0.01 .. 100, rounded as a division; inverse is 1 / r. The second step removes the
 * rounding error of the first one. It is left out where x * inverse is not a small number. */
__device__ static inline float samp_divide(float x, float r, float inverse) {
    const float quotient = __fmul_rn(x, inverse);
    const float refined = __fmaf_rn(__fmaf_rn(-quotient, r, x), inverse, quotient);
    return fabsf(quotient) < 0x1p100f ? refined : quotient;
}
typedef struct samp_group_penalty { /* of a row, for an id group */
    uint4 bits; /* a samp_presence; 0: the row has no penalty */
    float repetition, presence;
} samp_group_penalty;

/* block: of all ids. */
__device__ static inline samp_group_penalty samp_load_penalty(const samp_penalties &penalties,
                                                              int forced_id, int block,
                                                              int group) {
    if (forced_id > SAMP_DRAW_PENALIZED) return samp_group_penalty{{}, 1, 0};
    const int index = SAMP_DRAW_PENALIZED - forced_id;
    const samp_penalized *row = penalties.rows + index;
    const samp_presence *presence = penalties.presence +
                                    (size_t)(index - penalties.first) * penalties.n_blocks * 4;
    return samp_group_penalty{__ldcg((const uint4 *)(presence + block * 4 + group)),
                              row->repetition, row->presence};
}
/* Applies penalties to the 64 logits of an id group: at(i) is a reference to logits[i]. All lanes
 * of a warp must call it: the warp skips the octets (eight ids of a group) in which no lane has an
 * id of the history. Without these branches, the compiler would work on all octets at once and
 * spill registers. */
template <class A>
__device__ static inline void samp_penalize_group(const samp_group_penalty &penalty, A at) {
    const float repetition = penalty.repetition, inverse = __frcp_rn(repetition);
#pragma unroll
    for (int octet = 0; octet < 8; octet++) {
        const uint32_t shift = octet % 4 * 8,
                       seen = (octet < 4 ? penalty.bits.x : penalty.bits.y) >> shift & 255,
                       output = (octet < 4 ? penalty.bits.z : penalty.bits.w) >> shift;
        if (!__any_sync(~0u, seen)) continue;
#pragma unroll
        for (int k = 0; k < 8; k++) {
            float &logit = at(8 * octet + k);
            float x = samp_clean(logit);
            x = x < 0 ? __fmul_rn(x, repetition) : samp_divide(x, repetition, inverse);
            if (output >> k & 1) x = __fsub_rn(x, penalty.presence);
            if (seen >> k & 1) logit = samp_clean(x);
        }
    }
}

/* Soft cap of a logit: the same bits in the epilogue of the LM head and in samp_cap_kernel. */
__device__ static inline float samp_cap(float logit, float cap) {
    return __fmul_rn(cap, tanh_of(__fdividef(logit, cap)));
}

/* Inverse CDF, as samp_inverse_cdf of toka.c: returns the index of the weight in which *target
 * lies. *target is measured from the end where the sums begin (samp_target). So numbers close to 0
 * and close to 1 both keep the precision of their 32 bits. On return *target is the distance from
 * the start of the weight that was found. */
__device__ static inline int samp_inverse_cdf(const float (&weights)[8], bool from_end,
                                              float *target) {
    int found = -1, last = 0;
    float remaining = *target;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        float wk = from_end ? weights[7 - k] : weights[k];
        if (wk > 0 && found < 0) last = from_end ? 7 - k : k;
        if (found < 0 && remaining < wk) found = last, *target = remaining;
        remaining = __fsub_rn(remaining, wk);
    }
    return found < 0 ? last : found; /* by rounding, *target may lie past the end */
}

/* Maximum and sums of the 64 logits of an id group. An octet is eight of the logits, consecutive in
 * the registers of the thread. The sums are of 2^(logit * scale - scaled_max). */
typedef struct samp_id_group {
    /* sums: of each octet; sum: of all; raw_sum: of all, at temperature 1 */
    float max, sums[8], sum, raw_sum;
    /* scaled_max: max * scale, rounded; shift: inexact groups use cleaned logits minus this */
    float scale, scaled_max, shift;
    int max_octet; /* the first octet with the maximum */
    bool inexact;  /* the sums had to be recomputed (samp_recompute) */
} samp_id_group;

__device__ static inline float samp_add_8(const float (&x)[8]) {
    float low = __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3]));
    float high = __fadd_rn(__fadd_rn(x[4], x[5]), __fadd_rn(x[6], x[7]));
    return __fadd_rn(low, high);
}

/* The rounding error of base * scale: exact minus rounded. The group's sum uses the rounded product
 * (scaled_max), so its log2 is too large by this error. */
__device__ static inline float samp_round_error(float base, float scale) {
    return __fmaf_rn(base, scale, -__fmul_rn(base, scale));
}

/* Finds the maximum of a group. Here and below logits[2j + b] is the logit of id0 + 8j + b, where
 * id0 is the first id of the group. Maximum and sums cost one max, multiply-add, ex2 and add per
 * id. The last three are needed twice if the row needs a separate raw_sum. UNROLL is 8, or 1 for
 * logits in local memory. */
template <int UNROLL>
__device__ static inline void samp_group_max(const float (&logits)[SAMP_GROUP_IDS], float scale,
                                             samp_id_group &group) {
    group.max = -INFINITY, group.max_octet = 0, group.scale = scale;
#pragma unroll UNROLL
    for (int octet = 0; octet < 8; octet++) {
        float octet_max = logits[8 * octet];
#pragma unroll UNROLL
        for (int k = 1; k < 8; k++) octet_max = fmaxf(octet_max, logits[8 * octet + k]);
        if (octet_max > group.max) group.max = octet_max, group.max_octet = octet;
    }
    group.scaled_max = __fmul_rn(group.max > -INFINITY ? group.max : 0, scale);
}
/* sums becomes the sum of 2^(logit * scale - scaled_max) of each octet. Returns the sum of all. */
template <int UNROLL>
__device__ static inline float samp_sum_exp(const float (&logits)[SAMP_GROUP_IDS], float scale,
                                            float scaled_max, float (&sums)[8]) {
#pragma unroll UNROLL
    for (int octet = 0; octet < 8; octet++) {
        sums[octet] = ex2(__fmaf_rn(logits[8 * octet], scale, -scaled_max));
#pragma unroll UNROLL
        for (int k = 1; k < 8; k++)
            sums[octet] = __fadd_rn(sums[octet],
                                    ex2(__fmaf_rn(logits[8 * octet + k], scale, -scaled_max)));
    }
    return samp_add_8(sums);
}
template <int UNROLL>
__device__ static inline void samp_group_sum(const float (&logits)[SAMP_GROUP_IDS],
                                             samp_id_group &group) {
    float sums[8];
    group.sum = samp_sum_exp<UNROLL>(logits, group.scale, group.scaled_max, sums);
#pragma unroll
    for (int octet = 0; octet < 8; octet++) group.sums[octet] = sums[octet];
}
__device__ static inline float samp_raw_scaled_max(const samp_id_group &group) {
    return __fmul_rn(group.max > -INFINITY ? group.max : 0, SAMP_LOG2E);
}
template <int UNROLL>
__device__ static inline void samp_group_raw_sum(const float (&logits)[SAMP_GROUP_IDS],
                                                 samp_id_group &group) {
    float sums[8];
    group.raw_sum = samp_sum_exp<UNROLL>(logits, SAMP_LOG2E, samp_raw_scaled_max(group), sums);
}
/* To be called after the sums. Returns true if a logit is NaN or infinite, or if the maximum is so
 * large that the rounding of max * scale matters, at the row's temperature or at temperature 1. The
 * result does not depend on two_sums. If !two_sums, raw_sum becomes sum. */
__device__ static inline bool samp_is_inexact(bool two_sums, samp_id_group &group) {
    if (!two_sums) group.raw_sum = group.sum;
    return !(group.sum >= 0 && fabsf(group.scaled_max) < 0x1p23f &&
             fabsf(samp_raw_scaled_max(group)) < 0x1p23f);
}

/* The column of logits[i] in its block, minus that of logits[0]. */
__device__ static inline int samp_column(int i) { return i / 2 * 8 + i % 2; }

/* Recomputes the sums of an inexact group from cleaned logits. If the maximum is still too large,
 * it uses cleaned logits minus the maximum. Inexact groups are rare. The function works on a copy
 * and only reads `logits`, which may be wgmma accumulators: else the compiler would keep another 64
 * registers. ptxas reports a stack frame of 320 bytes for kernels that inline this function: the
 * copy, and the sums per octet where loops are not unrolled. Only inexact groups use the frame. */
__device__ static inline void samp_recompute(const float (&logits)[SAMP_GROUP_IDS], float scale,
                                             bool two_sums, samp_id_group &group) {
    if (!group.inexact) return;
    float copy[SAMP_GROUP_IDS];
#pragma unroll
    for (int i = 0; i < SAMP_GROUP_IDS; i++) copy[i] = logits[i];
    for (int pass = 0; pass < 2; pass++) {
#pragma unroll 1
        for (int i = 0; i < SAMP_GROUP_IDS; i++)
            copy[i] = __fsub_rn(samp_clean(copy[i]), group.shift);
        samp_group_max<1>(copy, scale, group);
        if (two_sums) samp_group_raw_sum<1>(copy, group);
        samp_group_sum<1>(copy, group);
        if (!samp_is_inexact(two_sums, group) || pass) break;
        group.shift = group.max;
    }
}
/* Computes maximum and sums of a group, inexact or not. two_sums: the row needs a sum at its
 * temperature and another one at temperature 1. */
__device__ static inline samp_id_group samp_group_sums(const float (&logits)[SAMP_GROUP_IDS],
                                                       float scale, bool two_sums) {
    samp_id_group group;
    group.shift = 0;
    samp_group_max<8>(logits, scale, group);
    if (two_sums) samp_group_raw_sum<8>(logits, group);
    samp_group_sum<8>(logits, group);
    group.inexact = samp_is_inexact(two_sums, group);
    samp_recompute(logits, scale, two_sums, group);
    return group;
}
/* One row of samp_group_sums_2. */
typedef struct samp_group_row {
    const float (&logits)[SAMP_GROUP_IDS]; /* of the id group */
    float scale;                           /* samp_scale of the row */
    bool two_sums;                         /* samp_needs_two_sums of the row */
    samp_id_group &group;                  /* the result */
} samp_group_row;
/* samp_group_sums for two rows. The maxima of b overlap with the exponentials of a, which are the
 * bottleneck. */
__device__ static inline void samp_group_sums_2(const samp_group_row &a, const samp_group_row &b) {
    a.group.shift = b.group.shift = 0;
    samp_group_max<8>(a.logits, a.scale, a.group);
    samp_group_sum<8>(a.logits, a.group);
    samp_group_max<8>(b.logits, b.scale, b.group);
    if (a.two_sums) samp_group_raw_sum<8>(a.logits, a.group);
    samp_group_sum<8>(b.logits, b.group);
    if (b.two_sums) samp_group_raw_sum<8>(b.logits, b.group);
    a.group.inexact = samp_is_inexact(a.two_sums, a.group);
    b.group.inexact = samp_is_inexact(b.two_sums, b.group);
    samp_recompute(a.logits, a.scale, a.two_sums, a.group);
    samp_recompute(b.logits, b.scale, b.two_sums, b.group);
}

/* Returns the uniform number times `sum`, measured from the end where samp_inverse_cdf begins. */
__device__ static inline float samp_target(const samp_params &params, bool from_end, float sum) {
    return __fmul_rn(
        __fmul_rn(__fadd_rn((float)(from_end ? ~params.uniform : params.uniform), 0.5f), 0x1p-32f),
        sum);
}

/* Returns the candidate of the group, as its id minus id0. A greedy row has the id of the maximum
 * as candidate, a scored row its forced id. *logit becomes the candidate's logit; if the group is
 * inexact: minus shift. forced_index: index of the forced id in the group; -1: it is not in it. */
__device__ static inline int samp_candidate(const float (&logits)[SAMP_GROUP_IDS],
                                            const samp_id_group &group, const samp_params &params,
                                            int forced_index, float *logit) {
    bool from_end = params.uniform >> 31, is_drawn = params.forced_id < 0 && params.scale > 0;
    float target = samp_target(params, from_end, group.sum), octet_logits[8];
    int octet = is_drawn               ? samp_inverse_cdf(group.sums, from_end, &target)
                : params.forced_id < 0 ? group.max_octet
                                       : forced_index / 8 & 7,
        index = forced_index & 7;
#pragma unroll
    for (int k = 0; k < 8; k++) {
        octet_logits[k] = logits[k];
#pragma unroll
        for (int i = 1; i < 8; i++)
            octet_logits[k] = octet == i ? logits[8 * i + k] : octet_logits[k];
        if (group.inexact) octet_logits[k] = __fsub_rn(samp_clean(octet_logits[k]), group.shift);
    }
    if (is_drawn) {
        float weights[8];
#pragma unroll
        for (int k = 0; k < 8; k++)
            weights[k] = ex2(__fmaf_rn(octet_logits[k], group.scale, -group.scaled_max));
        index = samp_inverse_cdf(weights, from_end, &target);
    } else if (params.forced_id < 0) {
#pragma unroll
        for (int k = 7; k >= 0; k--) index = octet_logits[k] == group.max ? k : index;
    }
    *logit = octet_logits[0];
#pragma unroll
    for (int k = 1; k < 8; k++) *logit = index == k ? octet_logits[k] : *logit;
    return 32 * octet + samp_column(index);
}

__device__ static inline float samp_quad_sum(float x) {
    x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
    return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

/* Finds the best candidate of a quad (four adjacent lanes) and stores it in `partial`. */
__device__ static inline void samp_quad_best(samp_partial &partial, float score, int id,
                                             float logit) {
#pragma unroll
    for (int lanes = 1; lanes < 4; lanes *= 2) {
        float other_score = __shfl_xor_sync(~0u, score, lanes),
              other_logit = __shfl_xor_sync(~0u, logit, lanes);
        int other_id = __shfl_xor_sync(~0u, id, lanes);
        if (other_score > score || (other_score == score && other_id < id))
            score = other_score, logit = other_logit, id = other_id;
    }
    partial.gumbel = score, partial.id = id, partial.logit = logit;
}

/* Intermediate result between the sums of a group and the partial of its block. Four adjacent lanes
 * (a quad) work on a block. Each of them holds one group and has such a state. */
typedef struct samp_block_state {
    samp_partial partial; /* of the block; its candidate is not known yet */
    float max, rel_max,   /* maximum of the group; the same minus the maximum of the block */
        log2_sum_noise;           /* log2 of the group's sum, plus its noise */
    int forced_index;     /* index of the forced id in the group; -1: the id is not in the group */
    bool is_drawn, is_forced, needs_id; /* needs_id: the group needs an id search */
} samp_block_state;

/* Computes the block's maximum and sums, and the group's Gumbel key. noise: the random word of the
 * group. best_gumbel: a Gumbel key that some block of the row has reached, in log2; NaN: none is
 * known. A group whose Gumbel key is certainly lower needs no id search. row_valid: false for a row
 * beyond M, which needs no search either. */
__device__ static inline samp_block_state samp_block_sums(const samp_id_group &group,
                                                          const samp_params &params, uint32_t noise,
                                                          int id0, float best_gumbel,
                                                          bool row_valid) {
    samp_block_state state;
    state.is_forced = params.forced_id >= 0, state.is_drawn = !state.is_forced && params.scale > 0;
    float base = group.max > -INFINITY ? group.max : 0;
    float round_error = samp_round_error(base, group.scale),
          raw_round_error = samp_round_error(base, SAMP_LOG2E);
    state.max = __fadd_rn(group.max, group.shift);
    state.log2_sum_noise = state.is_drawn ? __fsub_rn(__fsub_rn(lg2(group.sum), round_error),
                                              samp_log2_exponential(noise))
                                  : 0;
    float gumbel = __fmaf_rn(state.max, group.scale, state.log2_sum_noise);
    int forced_offset = params.forced_id - id0;
    state.forced_index = state.is_forced && forced_offset >= 0 && forced_offset < SAMP_BLOCK &&
                                 (forced_offset & 6) == 0
                             ? forced_offset / 8 * 2 + forced_offset % 2
                             : -1;
    float min_gumbel = best_gumbel - 0.01f - 1e-6f * fabsf(best_gumbel),
          block_max = quad_max(state.max), finite_max = block_max > -INFINITY ? block_max : 0;
    state.rel_max = __fsub_rn(state.max, finite_max);
    state.partial = samp_partial{block_max, -INFINITY, INT_MAX, -INFINITY, 0, 0};
    state.partial.sum = samp_quad_sum(
        __fmul_rn(group.sum, ex2(__fsub_rn(__fmul_rn(state.rel_max, group.scale), round_error))));
    state.partial.raw_sum = samp_quad_sum(__fmul_rn(
        group.raw_sum, ex2(__fsub_rn(__fmul_rn(state.rel_max, SAMP_LOG2E), raw_round_error))));
    state.needs_id = row_valid &&
                     (state.is_forced ? state.forced_index >= 0 : !(gumbel < min_gumbel));
    return state;
}
/* Returns the partial of a block to all four lanes of a quad. Each lane holds one group (`logits`
 * as in samp_group_max). If no group of the warp needs an id search, the search is skipped, and the
 * partial has no candidate. All arithmetic has explicit rounding, so that every kernel that inlines
 * this function samples the same ids. */
__device__ static inline samp_partial samp_block_partial(const float (&logits)[SAMP_GROUP_IDS],
                                                         const samp_id_group &group,
                                                         const samp_params &params, int id0,
                                                         const samp_block_state &state) {
    samp_partial partial = state.partial;
    if (!__any_sync(~0u, state.needs_id)) return partial;
    float logit, score = state.is_forced ? state.forced_index >= 0 ? 1 : 0
                         : state.is_drawn
                             ? __fmaf_rn(state.rel_max, group.scale, state.log2_sum_noise)
                             : state.max;
    int id = id0 + samp_candidate(logits, group, params, state.forced_index, &logit);
    logit = __fadd_rn(logit, group.shift);
    if (state.is_forced ? state.forced_index < 0 : state.max == -INFINITY) id = INT_MAX;
    samp_quad_best(partial, score, id, logit);
    return partial;
}
/* The scale of the weights in `sum`. Greedy and scored rows use the scale of temperature 1. */
__device__ static inline float samp_scale(const samp_params &params) {
    return params.forced_id < 0 && params.scale > 0 ? params.scale : SAMP_LOG2E;
}
/* Returns whether the row needs two sums: one at its temperature, another one at temperature 1. */
__device__ static inline bool samp_needs_two_sums(const samp_params &params) {
    return params.forced_id == SAMP_DRAW && params.scale > 0 && params.scale != SAMP_LOG2E;
}
/* All steps from logits to the partial of a block, if no Gumbel key of another block is known. */
__device__ static inline samp_partial samp_make_partial(const float (&logits)[SAMP_GROUP_IDS],
                                                        const samp_params &params, bool two_sums,
                                                        uint32_t noise, int id0) {
    const samp_id_group group = samp_group_sums(logits, samp_scale(params), two_sums);
    return samp_block_partial(logits, group, params, id0,
                              samp_block_sums(group, params, noise, id0, NAN, true));
}

__device__ static inline samp_partial samp_empty_partial() {
    return samp_partial{-INFINITY, -INFINITY, INT_MAX, -INFINITY, 0, 0};
}

/* Merges two partials of the same row. The result is bitwise the same in either order. */
__device__ static inline samp_partial samp_merge(const samp_partial &partial_a,
                                                 const samp_partial &partial_b,
                                                 const samp_params &params) {
    float scale = params.scale > 0 && params.forced_id < 0 ? params.scale : SAMP_LOG2E;
    float max = fmaxf(partial_a.max, partial_b.max), base = fmaxf(max, -FLT_MAX);
    float rel_max_a = __fsub_rn(partial_a.max, base), rel_max_b = __fsub_rn(partial_b.max, base);
    float gumbel_a = __fadd_rn(partial_a.gumbel, __fmul_rn(rel_max_a, scale)),
          gumbel_b = __fadd_rn(partial_b.gumbel, __fmul_rn(rel_max_b, scale));
    /* right for ties, and for forced ids: only one partial has the id, the other has INT_MAX */
    bool take_b = partial_b.id < partial_a.id;
    if (params.forced_id < 0) {
        float score_a = params.scale > 0 ? gumbel_a : partial_a.max,
              score_b = params.scale > 0 ? gumbel_b : partial_b.max;
        take_b = score_b > score_a || (score_b == score_a && take_b);
    }
    samp_partial merged = take_b ? partial_b : partial_a;
    merged.max = max, merged.gumbel = take_b ? gumbel_b : gumbel_a;
    merged.sum = __fadd_rn(__fmul_rn(partial_a.sum, ex2(__fmul_rn(rel_max_a, scale))),
                           __fmul_rn(partial_b.sum, ex2(__fmul_rn(rel_max_b, scale))));
    merged.raw_sum = __fadd_rn(__fmul_rn(partial_a.raw_sum, ex2(__fmul_rn(rel_max_a, SAMP_LOG2E))),
                               __fmul_rn(partial_b.raw_sum, ex2(__fmul_rn(rel_max_b, SAMP_LOG2E))));
    return merged;
}

/* The random word of a group of a block. */
__device__ static inline uint32_t samp_noise(const samp_params &params, int block, int group) {
    uint32_t counter[4] = {params.sample, params.position, 1 + (uint32_t)block, 0};
    philox(counter, params.philox_key[0], params.philox_key[1]);
    return group < 2 ? group ? counter[1] : counter[0] : group == 2 ? counter[2] : counter[3];
}

/* ---- Sums and maxima over a CTA ---- */

struct op_max {
    template <class T> __device__ T operator()(T a, T b) const { return a > b ? a : b; }
};
struct op_add { template <class T> __device__ T operator()(T a, T b) const { return a + b; } };

/* Reduces the x of all threads of the CTA in a fixed order; every thread gets the result.
 * scratch: [33] in shared memory. */
template <class T, class F> __device__ static inline T block_reduce(T x, T *scratch, F op) {
    int warp = (int)threadIdx.x / 32, n_warps = (int)blockDim.x / 32;
    for (int lanes = 16; lanes; lanes /= 2) x = op(x, __shfl_xor_sync(~0u, x, lanes));
    __syncthreads(); /* the result of an earlier reduction has been read */
    if (threadIdx.x % 32 == 0) scratch[warp] = x;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < n_warps; i++) x = op(x, scratch[i]);
        scratch[32] = x;
    }
    __syncthreads();
    return scratch[32];
}

/* ---- Stored logits to partials ----
 *
 * in   stored; params [n]
 * out  partials [block][ld_partials], columns 0 .. n-1
 * A thread loads the same group that it would hold in a wgmma tile. Four adjacent threads read 32
 * bytes at a time; a warp reads eight blocks of a row.
 * grid: (ceil(blocks / 32), n); block: 128; shared: 0. Reads V * 4 bytes a row, writes 24 bytes a
 * block. */
typedef struct samp_stored { /* stored logits of the V ids from v0 on */
    const float *logits;     /* [n][ld] */
    int ld, v0, V;           /* ld and v0 are multiples of 256 */
} samp_stored;

__global__ static void __launch_bounds__(128)
    samp_partials_kernel(const samp_params *params, const samp_stored stored,
                         samp_partial *partials, int ld_partials, const samp_penalties penalties) {
    const int v0 = stored.v0, V = stored.V;
    int group = (int)threadIdx.x % 4, block = (int)(blockIdx.x * 32 + threadIdx.x / 4),
        id0 = block * SAMP_BLOCK + 2 * group;
    int row = (int)blockIdx.y;
    float own[SAMP_GROUP_IDS];
    grid_launch_dependents();
    grid_wait();
    const samp_params row_params = params[row];
    bool in_range = block * SAMP_BLOCK < V;
    const float *from = stored.logits + (size_t)row * stored.ld + id0;
#pragma unroll
    for (int j = 0; j < SAMP_GROUP_IDS / 2; j++) {
        float2 pair = in_range ? *(const float2 *)(from + 8 * j) : float2{-INFINITY, -INFINITY};
        own[2 * j] = id0 + 8 * j < V ? pair.x : -INFINITY;
        own[2 * j + 1] = id0 + 8 * j + 1 < V ? pair.y : -INFINITY;
    }
    if (row_params.forced_id <= SAMP_DRAW_PENALIZED)
        samp_penalize_group(samp_load_penalty(penalties,
                                              in_range ? row_params.forced_id : SAMP_DRAW,
                                              v0 / SAMP_BLOCK + block, group),
                            [&](int i) -> float & { return own[i]; });
    samp_partial partial = samp_make_partial(own, row_params, samp_needs_two_sums(row_params),
                                             samp_noise(row_params, v0 / SAMP_BLOCK + block, group),
                                             v0 + id0);
    if (in_range && group == 0) partials[(size_t)block * ld_partials + row] = partial;
}

/* ---- The LM head's epilogue on wgmma (chapter 6) ----
 *
 * in   accumulators of a tile of 256 columns, which is an id block; params [M]
 * out  partials [block][ld_partials]; of filtered rows the logits, too
 * A thread holds one id group of each of two rows. Per logit it computes max, multiply-add, ex2 and
 * add. A row that wants its raw log-probability and has a temperature other than 1 needs the last
 * three twice. A warp works on eight rows at a time, so one such row makes all eight take longer.
 * Clocks per tile: the special function unit gives 16 results a clock, so the exponentials take
 * 128 * 256 / 16 = 2,048 clocks, or 4,096 if they are needed twice. The MMAs take 16 * K clocks,
 * where K is the width of x.
 * Bytes written: 24 per row and tile, and 4 per logit of a filtered row.
 *
 * Why this shape:
 *   - Row parameters are prefetched and the noise is computed during the main loop. One Philox call
 *     serves both rows of a thread: its four words are the noise of the four groups of a row.
 *   - A warp searches for ids only if the Gumbel key of one of its groups may be the highest of its
 *     row so far (best_keys). This is the case in about a tenth of its tiles. The other warps of
 *     the consumer then wait for it.
 *   - The consumers are staggered (gemm_stagger): the epilogue of one overlaps with the last or the
 *     first MMAs of the other. A stagger of 2 K blocks is as fast as the 3 used here; 4 are up to
 *     1 % slower.
 * Times of the parts of a tile and of the retired versions: test/results/kernel-choices.md.
 *
 * Retired:
 *   - (logit - max) * scale as a subtraction and a multiplication, and a candidate from each group:
 *     1.06 to 1.24 of the time of cuBLAS's LM head without sampling.
 *   - Consumers that end a tile at the same time: 1 to 3 % slower.
 *   - Consumers that start three K blocks apart, but are not held apart at the end of a tile: as
 *     fast as without a stagger, or 5 % slower than that.
 *   - Half of the second exponentials by a polynomial on the other units: 3 % slower. These units
 *     have too few free slots.
 *   - One loop over both rows, which halves the code: 1 % slower. */

typedef struct samp_fused {
    const samp_params *params; /* [M] */
    samp_partial *partials;    /* [blocks][ld_partials] */
    uint32_t *best_keys;       /* [M] */
    float *logits;             /* [M - first_stored][ld_logits] of the rows from first_stored on */
    /* The columns are the ids v0 .. v0+V-1. first_stored: first row whose logits are stored. */
    int ld_partials, ld_logits, v0, V, first_stored;
    float logit_cap; /* as in toka_shape */
    samp_penalties penalties;
} samp_fused;

struct epi_sample;
template <> constexpr int gemm_stagger<epi_sample> = 3;
template <int COLS> struct gemm_prefetched<epi_sample, COLS> {
    /* After prefetch: Philox key, sample and position of one of this thread's two rows. After
     * prefetch_indirect: x and y are the noise of the first and of the second row. */
    uint4 noise;
    uint4 param_words[2]; /* second half of samp_params of both rows: uniform, scale, forced_id */
    samp_group_penalty penalties[2]; /* of both rows, if the pass has penalized rows */
};

struct epi_sample {
    typedef samp_fused params;
    template <int C> using prefetched = gemm_prefetched<epi_sample, C>;
    __host__ __device__ static constexpr int staged_cols(int) { return 0; }
#if HOPPER
    /* Lanes 0 and 1 of a quad compute the noise of the first row, lanes 2 and 3 that of the second
     * row. prefetch_indirect exchanges it: each lane needs the noise of its group in both rows. */
    template <int COLS> __device__ static inline void prefetch(const gemm_tile &tile,
                                                               prefetched<COLS> &fetched,
                                                               const params &epi_args) {
        const uint4 *param_words = (const uint4 *)epi_args.params;
        int first = min(tile.row0 + tile.lane / 4, tile.M - 1),
            second = min(tile.row0 + tile.lane / 4 + 8, tile.M - 1);
        fetched.noise = param_words[2 * (tile.lane % 4 < 2 ? first : second)],
        fetched.param_words[0] = param_words[2 * first + 1],
        fetched.param_words[1] = param_words[2 * second + 1];
    }
    template <int COLS> __device__ static inline void prefetch_indirect(const gemm_tile &tile,
                                                                        prefetched<COLS> &fetched,
                                                                        const params &epi_args) {
        int group = tile.lane % 4;
        uint32_t counter[4] = {fetched.noise.z, fetched.noise.w,
                               1 + (uint32_t)((epi_args.v0 + tile.col0) / SAMP_BLOCK), 0};
        philox(counter, fetched.noise.x, fetched.noise.y);
        uint32_t own = group < 2    ? group ? counter[1] : counter[0]
                       : group == 2 ? counter[2]
                                    : counter[3],
                 for_peer = group < 2    ? group ? counter[3] : counter[2]
                            : group == 2 ? counter[0]
                                         : counter[1];
        uint32_t from_peer = __shfl_xor_sync(~0u, for_peer, 2);
        fetched.noise.x = group < 2 ? own : from_peer,
        fetched.noise.y = group < 2 ? from_peer : own;
        if (!epi_args.penalties.rows) return;
#pragma unroll
        for (int b = 0; b < 2; b++)
            fetched.penalties[b] = samp_load_penalty(
                epi_args.penalties, (int)fetched.param_words[b].z,
                min((epi_args.v0 + tile.col0) / SAMP_BLOCK, epi_args.penalties.n_blocks - 1),
                group);
    }

    __device__ static inline samp_params unpack_params(uint4 words) {
        return samp_params{.uniform = words.x,
                           .scale = __uint_as_float(words.y),
                           .forced_id = (int)words.z};
    }
    /* The highest Gumbel key that the row has reached so far; NaN if there is none (0). */
    __device__ static inline float best_key(int row, const gemm_tile &tile,
                                            const params &epi_args) {
        return samp_key_to_logit(__ldcg(epi_args.best_keys + min(row, tile.M - 1)));
    }
    /* Stores the results of one of this thread's two rows. */
    __device__ static inline void store_row(const float (&logits)[SAMP_GROUP_IDS], int row,
                                            const gemm_tile &tile, const params &epi_args,
                                            const samp_params &row_params, float old_best,
                                            const samp_partial &partial) {
        int group = tile.lane % 4, id0 = tile.col0 + 2 * group;
        if (row >= tile.M) return;
        if (row >= epi_args.first_stored) { /* four lanes write each sector of 32 bytes */
            float2 *to = (float2 *)(epi_args.logits +
                                    (size_t)(row - epi_args.first_stored) * epi_args.ld_logits +
                                    id0);
#pragma unroll
            for (int j = 0; j < SAMP_GROUP_IDS / 2; j++)
                to[4 * j] = float2{logits[2 * j], logits[2 * j + 1]};
        }
        if (group == 0 && partial.id != INT_MAX && row_params.forced_id < 0) {
            float gumbel = row_params.scale > 0 ? partial.max * row_params.scale + partial.gumbel
                                                : partial.max * SAMP_LOG2E;
            if (!(gumbel <= old_best))
                atomicMax(epi_args.best_keys + row, samp_logit_to_key(gumbel));
        }
        float2 words = group == 0   ? float2{partial.max, partial.gumbel}
                       : group == 1 ? float2{__int_as_float(partial.id), partial.logit}
                                    : float2{partial.sum, partial.raw_sum};
        if (group < 3)
            ((float2 *)(epi_args.partials +
                        (size_t)(tile.col0 / SAMP_BLOCK) * epi_args.ld_partials +
                        row))[group] = words;
    }

    template <int COLS>
    __device__ static inline void run(float (&acc)[COLS / 2], const gemm_tile &tile,
                                      prefetched<COLS> &fetched, const params &epi_args) {
        static_assert(COLS == SAMP_BLOCK, "a tile's columns are one block");
        if (tile.row0 >= tile.M || tile.col0 >= epi_args.V) return; /* the warp has no row or id */
        int group = tile.lane % 4, row0 = tile.row0 + tile.lane / 4;
        if (epi_args.logit_cap != 0)
#pragma unroll
            for (int i = 0; i < SAMP_BLOCK / 2; i++)
                acc[i] = samp_cap(acc[i], epi_args.logit_cap);
        if (tile.col0 + SAMP_BLOCK > epi_args.V) {
#pragma unroll
            for (int i = 0; i < SAMP_BLOCK / 2; i++)
                if (tile.col0 + 2 * group + i / 4 * 8 + i % 2 >= epi_args.V) acc[i] = -INFINITY;
        }
        if (epi_args.penalties.rows)
#pragma unroll
            for (int b = 0; b < 2; b++)
                samp_penalize_group(fetched.penalties[b], [&](int i) -> float & {
                    return acc[i / 2 * 4 + i % 2 + 2 * b];
                });
        float logits_a[SAMP_GROUP_IDS], logits_b[SAMP_GROUP_IDS];
#pragma unroll
        for (int i = 0; i < SAMP_GROUP_IDS; i++)
            logits_a[i] = acc[i / 2 * 4 + i % 2], logits_b[i] = acc[i / 2 * 4 + 2 + i % 2];
        /* First the sums of both rows, then the block sums of both rows, and so on. For one row
         * each of these is a chain of dependent instructions. The chains of two rows overlap. */
        const samp_params params_a = unpack_params(fetched.param_words[0]),
                          params_b = unpack_params(fetched.param_words[1]);
        float best_a = best_key(row0, tile, epi_args), best_b = best_key(row0 + 8, tile, epi_args);
        samp_id_group group_a, group_b;
        samp_group_sums_2({logits_a, samp_scale(params_a), samp_needs_two_sums(params_a), group_a},
                          {logits_b, samp_scale(params_b), samp_needs_two_sums(params_b), group_b});
        int id0 = epi_args.v0 + tile.col0 + 2 * group;
        samp_block_state state_a = samp_block_sums(group_a, params_a, fetched.noise.x, id0, best_a,
                                                   row0 < tile.M);
        samp_block_state state_b = samp_block_sums(group_b, params_b, fetched.noise.y, id0, best_b,
                                                   row0 + 8 < tile.M);
        store_row(logits_a, row0, tile, epi_args, params_a, best_a,
                  samp_block_partial(logits_a, group_a, params_a, id0, state_a));
        store_row(logits_b, row0 + 8, tile, epi_args, params_b, best_b,
                  samp_block_partial(logits_b, group_b, params_b, id0, state_b));
    }
#endif
};

static const gemm_variant samp_lm_head_variant = GEMM_VARIANT(0, epi_sample, 256, 1);

/* ---- Partials to results ----
 *
 * in   partials [n_blocks][ld_partials], columns 0 .. n-1, of plain rows; params [n]
 * out  merged [n]; if merged is NULL, results [n] and last_tokens. best_keys [n] are set to 0
 * The order of the merge depends only on the number of blocks. samp_filter_kernel merges in the
 * same order, so a plain row that is handled as a filtered row has bitwise the same result.
 * grid: ceil(n / 4); block: 256; shared: 256 partials. Thread t merges the blocks t/4, t/4 + 64 ...
 * of row t%4. Reads 24 bytes a partial. */

/* Makes the result of a row from the merged partial of all its ids. The raw log-sum-exp of the row
 * is raw_max + raw_log_sum. */
__device__ static inline samp_result samp_make_result(const samp_params &params,
                                                      const samp_partial &partial, float raw_max,
                                                      float raw_log_sum, int fallback_id) {
    samp_result result = {partial.id,
                          partial.logit == -INFINITY ? -INFINITY
                                                     : partial.logit - raw_max - raw_log_sum,
                          0, 0};
    if (params.forced_id >= 0) result.sampled_logprob = result.logprob;
    else if (partial.max == -INFINITY) result.id = fallback_id, result.logprob = -INFINITY;
    else if (params.scale > 0)
        result.sampled_logprob = ((partial.logit - partial.max) * params.scale -
                                  log2f(partial.sum)) *
                                 SAMP_LN2;
    return result;
}

/* Writes the result of a plain row, and its id to last_tokens. */
__device__ static inline void samp_write_result(const samp_params &params,
                                                const samp_partial &partial, int row,
                                                samp_result *results, int *last_tokens) {
    samp_result result = samp_make_result(params, partial, partial.max, logf(partial.raw_sum), 0);
    results[row] = result;
    if (params.seq >= 0) last_tokens[params.seq] = result.id;
}

/* Thread `thread` of SAMP_MERGE_THREADS merges the partials of the blocks thread, thread +
 * SAMP_MERGE_THREADS ... of a row, in this order. partials: the column of the row. maxes, if not
 * NULL: [n_blocks] becomes the maximum of each block. */
__device__ static inline samp_partial samp_merge_strided(const samp_params &params,
                                                         const samp_partial *partials,
                                                         int ld_partials, int n_blocks, int thread,
                                                         float *maxes) {
    constexpr int PREFETCH = 10;
    samp_partial merged = samp_empty_partial();
    for (int block = thread; block < n_blocks; block += SAMP_MERGE_THREADS * PREFETCH) {
        samp_partial next[PREFETCH]; /* all these loads are in flight at the same time */
#pragma unroll
        for (int i = 0; i < PREFETCH; i++)
            next[i] = block + SAMP_MERGE_THREADS * i < n_blocks
                          ? partials[(size_t)(block + SAMP_MERGE_THREADS * i) * ld_partials]
                          : samp_empty_partial();
#pragma unroll
        for (int i = 0; i < PREFETCH; i++) {
            if (maxes && block + SAMP_MERGE_THREADS * i < n_blocks)
                maxes[block + SAMP_MERGE_THREADS * i] = next[i].max;
            merged = samp_merge(merged, next[i], params);
        }
    }
    return merged;
}

typedef struct samp_reduce_args {
    const samp_params *params;    /* [n_rows] */
    const samp_partial *partials; /* [n_blocks][ld_partials] */
    int ld_partials, n_blocks, n_rows;
    uint32_t *best_keys;  /* [n_rows], set to 0 */
    samp_partial *merged; /* [n_rows]; NULL: the results are written instead */
    samp_result *results; /* [n_rows] */
    int *last_tokens;
} samp_reduce_args;

__global__ static void __launch_bounds__(256) samp_reduce_kernel(const samp_reduce_args args) {
    __shared__ samp_partial shared[SAMP_MERGE_THREADS][SAMP_REDUCE_ROWS];
    int row_in_cta = (int)threadIdx.x % SAMP_REDUCE_ROWS,
        thread = (int)threadIdx.x / SAMP_REDUCE_ROWS;
    int row = (int)blockIdx.x * SAMP_REDUCE_ROWS + row_in_cta;
    grid_launch_dependents();
    grid_wait();
    int safe_row = min(row, args.n_rows - 1);
    const samp_params row_params = args.params[safe_row];
    samp_partial partial = samp_merge_strided(row_params, args.partials + safe_row,
                                              args.ld_partials, args.n_blocks, thread, NULL);
    shared[thread][row_in_cta] = partial;
    for (int half = SAMP_MERGE_THREADS / 2; half; half /= 2) {
        __syncthreads();
        if (thread < half)
            shared[thread][row_in_cta] = partial = samp_merge(partial,
                                                              shared[thread + half][row_in_cta],
                                                              row_params);
    }
    if (thread || row >= args.n_rows) return;
    args.best_keys[row] = 0;
    if (args.merged) args.merged[row] = partial;
    else samp_write_result(row_params, partial, row, args.results, args.last_tokens);
}

/* ---- Tensor ranks: one partial per row from each rank, or whole rows of logits ----
 *
 * samp_merge_ranks_kernel (plain rows) sends the merged partial of the rank's own ids to all peers,
 * 24 bytes a row. Then each rank merges the partials of all ranks in rank order.
 * in   merged [n] of this rank; params [n]      out  results [n], last_tokens, on every rank
 *
 * samp_gather_logits_kernel (filtered rows, which need all logits) stores the columns of this rank
 * into the logits of all ranks. Then each rank continues as if it were alone. The kernel has two
 * rank barriers. After the first barrier, all ranks have read the logits of the previous rows, so
 * these may be overwritten. After the second barrier, all columns have arrived.
 * in   own_logits float32 [n][ld_own]           out  logits float32 [n][ld_logits] of every rank
 *
 * Both: grid: barrier_ctas; block: BARRIER_THREADS; shared: 0. */

__global__ static void __launch_bounds__(BARRIER_THREADS, 1)
    samp_merge_ranks_kernel(rank_barrier barrier, size_t recv_offset, const samp_params *params,
                            const samp_partial *merged, int n_rows, samp_result *results,
                            int *last_tokens) {
    const int first = (int)(blockIdx.x * BARRIER_THREADS + threadIdx.x),
              stride = (int)gridDim.x * BARRIER_THREADS;
    grid_wait();
    const unsigned number = rank_barrier_count(barrier) + 1;
    const size_t buffer0 = (size_t)(number & 1) * barrier.tp_size;
    for (int row = first; row < n_rows; row += stride)
        for (int rank = 0; rank < barrier.tp_size; rank++)
            if (rank != barrier.tp_rank)
                ((samp_partial *)(barrier.recv_buffers[rank] + recv_offset +
                                  (buffer0 + barrier.tp_rank) *
                                      SAMP_RECV_BYTES))[row] = merged[row];
    rank_barrier_sync(barrier, number, NULL);
    grid_launch_dependents();
    for (int row = first; row < n_rows; row += stride) {
        const samp_params row_params = params[row];
        samp_partial total = samp_empty_partial();
        for (int rank = 0; rank < barrier.tp_size; rank++) {
            const samp_partial partial =
                rank == barrier.tp_rank
                    ? merged[row]
                    : ((samp_partial *)(barrier.recv_buffers[barrier.tp_rank] + recv_offset +
                                        (buffer0 + rank) * SAMP_RECV_BYTES))[row];
            total = rank ? samp_merge(total, partial, row_params) : partial;
        }
        samp_write_result(row_params, total, row, results, last_tokens);
    }
    rank_barrier_finish(barrier, number);
}

typedef struct samp_gather_args {
    float *logits[BARRIER_MAX_RANKS]; /* samp_plan.logits of each rank: [n_rows][ld_logits] */
    const float *own_logits;          /* [n_rows][ld_own]: the ids v0 .. v0+V-1 */
    int ld_logits, ld_own, v0, V, n_rows;
} samp_gather_args;

__global__ static void __launch_bounds__(BARRIER_THREADS, 1)
    samp_gather_logits_kernel(rank_barrier barrier,
                              const __grid_constant__ samp_gather_args args) {
    grid_wait();
    const unsigned number = rank_barrier_count(barrier) + 1;
    const int n_rows = rank_barrier_sync(barrier, number, NULL) ? args.n_rows : 0;
    for (int row = (int)blockIdx.x; row < n_rows; row += (int)gridDim.x)
        for (int id = (int)threadIdx.x; id < args.V; id += BARRIER_THREADS) {
            const float logit = args.own_logits[(size_t)row * args.ld_own + id];
            for (int rank = 0; rank < barrier.tp_size; rank++)
                args.logits[rank][(size_t)row * args.ld_logits + args.v0 + id] = logit;
        }
    rank_barrier_sync(barrier, number + 1, NULL);
    grid_launch_dependents();
    rank_barrier_finish(barrier, number + 1);
}

/* ===========================================================================
 * MARK: 12. Sampling of filtered rows, and the op [kernel]
 * Two parts:
 *   The kernel   samp_filter_kernel and its device functions. In: stored logits of filtered rows,
 *                and their partials (chapter 11). Out: their results.
 *   The op       norm_logits_sample on the host. In: the sample rows of a step, and x. Out: their
 *                results. It divides the rows into plain and filtered ones, uploads their
 *                parameters, launches the kernels and downloads the results.
 *
 * Words: those of chapter 22 of toka.c (raw and adjusted logit, weight, kept id, threshold) and of
 * chapter 11 (group, partial, Gumbel key, plain and filtered row). Also:
 *   block           256 consecutive ids (SAMP_BLOCK); a block of CUDA threads is called a CTA
 *   mass            a sum of weights as an integer with 44 fraction bits, or a count of ids
 *   key             a logit as an integer of the same order (samp_logit_to_key)
 *   bin             one part of a range of keys or of logits; bin 0 has the highest ones
 *   quad            four consecutive logits (in chapter 11: four adjacent lanes)
 *   listed block    a block that the next sweep over the logits reads (samp_dist.blocks)
 *   gather          to collect ids and their logits in shared memory
 *   candidates      the kept ids with a key in some range, gathered (not those of chapter 11)
 *
 * ---- samp_filter_kernel ----
 *
 * Steps 1 to 5 of chapter 22 of toka.c on a row of stored logits with its partials: top
 * log-probabilities, bias, allowed and forbidden ids, the mask of a constraint, penalties, the
 * threshold, the draw among the kept ids. The draw is that of chapter 11. In the order (logit
 * falling, id rising), each of top-k, top-p and min-p keeps the first ids. So one threshold
 * (min_logit, last_tied) describes the kept ids, and nothing has to be sorted.
 *
 * in    logits float32 [n][ld_logits], overwritten by the adjusted logits; partials
 *       [n_blocks][ld_partials] of the raw logits, columns 0 .. n-1; params and filters [n]
 * out   results [n], tops, last_tokens; best_keys [n] are set to 0
 * grid: n; block: 256; shared: samp_filter_smem.
 * Reads 24 * n_blocks bytes of partials for each row, and 1 KB for each listed block in each sweep:
 * usually a few per cent of the row. A row with allowed ids or a mask also reads all blocks once, a
 * row with bias or penalties the blocks whose logits these have changed.
 * Launcher: samp_launch_results. samp_plan_step asserts the number of rows, row indices and forced
 * ids.
 *
 * Why this kernel:
 * - The partials show which blocks can contain kept ids, and only those blocks are read. The k-th
 *   highest of the block maxima is a lower bound of the k-th highest logit; top-p and min-p have
 *   bounds by weight. Block maxima are recomputed where lists or penalties have changed logits.
 * - The ids among which the threshold lies are gathered. If there are at most 256 of them, each
 *   thread has one and adds up the mass above it (samp_threshold_small). For more of them there is
 *   a radix search (samp_narrow).
 * - If there are more than 8,192 of them, they are not gathered yet. The range of keys is narrowed
 *   first: by one sweep that counts ids in 8,192 bins (samp_narrow_by_counts), or by sweeps that
 *   each choose 1 of 256 bins (samp_narrow).
 * - Masses are integers, so sums do not depend on the order of the threads.
 *
 * On logits like those of real models, top_p 0.9 takes 16, 22 and 47 us for 1, 64 and 512 rows of
 * 128,256 ids. A row takes 190 us or more if top-p keeps more than 8,192 of its ids (H200,
 * 2026-11-23; all figures: test/results/kernel-choices.md).
 * Retired: no counting sweep, and a draw that evaluates all kept blocks: 1.7 to 1.9 times slower
 * with top-p on nearly flat rows, a little faster on other rows.
 * Retired: the k-th highest block maximum found exactly, a radix search of even few candidates, all
 * block maxima recomputed after a penalty, and a draw with four lanes for each block even where few
 * blocks are kept: together 1.3 to 2.7 times slower on rows like those of real models.
 * =========================================================================== */

/* ---- A row as a distribution ---- */

typedef unsigned long long samp_mass; /* a sum of weights in fixed point, or a count of ids */

/* A row as a distribution: the weight of a kept id is 2^((x - max) * scale), that of other ids 0.
 * All arrays but x lie in shared memory. */
typedef struct samp_dist {
    const float *x;     /* [V] raw logits; adjusted logits after samp_adjust; global memory */
    float *block_maxes; /* [n_blocks] no logit of the block is higher */
    /* [n_blocks] If with_sums (samp_adjust): sum of the block's weights, relative to its maximum.
     * In samp_draw: upper bound of the block's Gumbel keys. */
    float *block_sums;
    int *blocks;        /* [n_listed] of [n_blocks]: the listed blocks, in rising order */
    float *candidates;  /* [n_candidates] of [FILTER_CANDIDATES]: their logits, in any order */
    int *candidate_ids; /* [n_candidates] their ids */
    int V, n_blocks, n_listed, n_candidates; /* n_candidates < 0: no ids are gathered */
    /* the candidates are the kept ids with keys from gathered_low to gathered_high */
    uint32_t gathered_low, gathered_high;
    /* max: highest logit; scale: log2(e) / temperature. min_logit and last_tied are the threshold:
     * an id is kept if its logit is above min_logit, or equal to it and the id is at most
     * last_tied. */
    float max, scale, min_logit;
    int last_tied;
} samp_dist;

__device__ static inline bool samp_is_kept(const samp_dist &dist, float x, int id) {
    return x > dist.min_logit || (x == dist.min_logit && id <= dist.last_tied);
}
/* The weight of logit x, as a mass. */
__device__ static inline samp_mass samp_mass_of(const samp_dist &dist, float x) {
    return (samp_mass)(ex2(__fmul_rn(__fsub_rn(x, dist.max), dist.scale)) * SAMP_MASS_ONE);
}

/* Returns the sum of x over the CTA, in all threads. A warp adds 21, 21 and 22 bits of x in three
 * 32-bit reductions. scratch: [FILTER_THREADS / 32] in shared memory. */
__device__ static samp_mass samp_cta_sum(samp_mass x, samp_mass *scratch) {
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

/* ---- Sweeps over listed blocks, and candidates ---- */

/* Calls each(quads, ids) for all ids of the listed blocks, SAMP_AT_ONCE quads at a time. The logits
 * are cleaned; ids[k] is the id of the first logit of quads[k]. Some or all ids of a quad may be V
 * or more: each() must ignore them. A warp reads SAMP_AT_ONCE / 2 blocks at a time: each lane has
 * two quads of a block. All lanes of a warp make each call, and each() must return the same value
 * in all of them; the warp stops when it returns false. */
enum { SAMP_AT_ONCE = 8 }; /* quads */
template <class F> __device__ static inline void samp_sweep_4(const samp_dist &dist, F each) {
    const int BLOCKS = SAMP_AT_ONCE / 2, n_warps = FILTER_THREADS / 32;
    int lane = (int)threadIdx.x % 32;
    for (int i = (int)threadIdx.x / 32; i < dist.n_listed; i += BLOCKS * n_warps) {
        int ids[2 * BLOCKS];
        float4 quads[2 * BLOCKS];
#pragma unroll
        for (int k = 0; k < 2 * BLOCKS; k++) {
            int index = i + k / 2 * n_warps;
            ids[k] = index < dist.n_listed
                         ? dist.blocks[index] * SAMP_BLOCK + k % 2 * 128 + 4 * lane
                         : dist.V;
            quads[k] = ids[k] < dist.V ? *(const float4 *)(dist.x + ids[k]) : float4{};
        }
#pragma unroll
        for (int k = 0; k < 2 * BLOCKS; k++)
            quads[k] = float4{samp_clean(quads[k].x), samp_clean(quads[k].y),
                              samp_clean(quads[k].z), samp_clean(quads[k].w)};
        if (!each(quads, ids)) break;
    }
}
/* Calls each(logit, id) for all ids of the listed blocks. */
template <class F> __device__ static inline void samp_sweep(const samp_dist &dist, F each) {
    samp_sweep_4(dist, [&](const float4 (&quads)[SAMP_AT_ONCE], const int (&ids)[SAMP_AT_ONCE]) {
#pragma unroll
        for (int k = 0; k < SAMP_AT_ONCE; k++) {
            const float logits[4] = {quads[k].x, quads[k].y, quads[k].z, quads[k].w};
#pragma unroll
            for (int j = 0; j < 4; j++)
                if (ids[k] + j < dist.V) each(logits[j], ids[k] + j);
        }
        return true;
    });
}
/* Calls each(logit, id) for all candidates. If no ids are gathered: for all ids of the listed
 * blocks. */
template <class F> __device__ static inline void samp_for_each(const samp_dist &dist, F each) {
    if (dist.n_candidates < 0) samp_sweep(dist, each);
    else
        for (int i = (int)threadIdx.x; i < dist.n_candidates; i += FILTER_THREADS)
            each(dist.candidates[i], dist.candidate_ids[i]);
}

/* Lists the blocks among block_of(0) .. block_of(n_blocks - 1) for which wanted(block) is true.
 * block_of(i) must rise with i. block_of may read the old list, dist.blocks. */
template <class B, class W>
__device__ static inline void samp_list_blocks(samp_dist &dist, int n_blocks, B block_of,
                                               W wanted) {
    __shared__ int counts[FILTER_THREADS / 32];
    int thread = (int)threadIdx.x, lane = thread % 32, n_listed = 0;
    for (int first = 0; first < n_blocks; first += FILTER_THREADS) {
        /* block_of is called before this round overwrites the old list */
        int block = first + thread < n_blocks ? block_of(first + thread) : 0;
        bool listed = first + thread < n_blocks && wanted(block);
        unsigned ballot = __ballot_sync(~0u, listed);
        __syncthreads();
        if (lane == 0) counts[thread / 32] = __popc(ballot);
        __syncthreads();
        int index = n_listed;
#pragma unroll
        for (int i = 0; i < FILTER_THREADS / 32; i++)
            index += i < thread / 32 ? counts[i] : 0, n_listed += counts[i];
        if (listed) dist.blocks[index + __popc(ballot & ((1u << lane) - 1))] = block;
    }
    __syncthreads();
    dist.n_listed = n_listed;
}
/* Lists the blocks that may have a logit of min_logit or more. */
__device__ static void samp_list_above(samp_dist &dist, float min_logit) {
    samp_list_blocks(
        dist, dist.n_blocks, [](int i) { return i; },
        [&](int block) { return dist.block_maxes[block] >= min_logit; });
}

/* Returns whether all kept ids with a key in low .. high are gathered. */
__device__ static inline bool samp_has_gathered(const samp_dist &dist, uint32_t low,
                                                uint32_t high) {
    return dist.n_candidates >= 0 && dist.gathered_low <= low && dist.gathered_high >= high;
}

/* Gathers the kept ids with a key in low .. high, unless they are gathered already; lists their
 * blocks. Returns false if there are more than FILTER_CANDIDATES of them: then nothing is gathered,
 * and a warp stops reading as soon as it sees this.
 * With visit_above, each(logit) is also called for all logits above the range, kept or not. Then no
 * warp stops early, and the ids must not be gathered yet. */
template <class F>
__device__ static inline bool samp_gather_range(samp_dist &dist, uint32_t low, uint32_t high,
                                                bool visit_above, F each) {
    __shared__ int n_gathered;
    int lane = (int)threadIdx.x % 32;
    if (!visit_above && samp_has_gathered(dist, low, high)) return true;
    if (threadIdx.x == 0) n_gathered = 0;
    /* its barriers also make n_gathered = 0 visible */
    samp_list_above(dist, samp_key_to_logit(low));
    float min_logit = samp_key_to_logit(low), max_logit = samp_key_to_logit(high);
    samp_sweep_4(dist, [&](const float4 (&quads)[SAMP_AT_ONCE], const int (&ids)[SAMP_AT_ONCE]) {
        uint32_t kept_bits = 0; /* one bit for each logit, at 4 * quad + j */
        int index = 0;
        bool full;
#pragma unroll
        for (int quad = 0; quad < SAMP_AT_ONCE; quad++) {
            const float logits[4] = {quads[quad].x, quads[quad].y, quads[quad].z, quads[quad].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (ids[quad] + j < dist.V && logits[j] >= min_logit && logits[j] <= max_logit &&
                    samp_is_kept(dist, logits[j], ids[quad] + j))
                    kept_bits |= 1u << (4 * quad + j);
                if (visit_above && ids[quad] + j < dist.V && logits[j] > max_logit) each(logits[j]);
            }
        }
        int count = __popc(kept_bits), prefix = count;
        if (!__any_sync(~0u, count)) return true;
#pragma unroll
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            int other = __shfl_up_sync(~0u, prefix, lanes);
            if (lane >= lanes) prefix += other;
        }
        if (lane == 31) index = atomicAdd(&n_gathered, prefix);
        index = __shfl_sync(~0u, index, 31), full = index > FILTER_CANDIDATES,
        index += prefix - count;
#pragma unroll
        for (int quad = 0; quad < SAMP_AT_ONCE; quad++) {
            const float logits[4] = {quads[quad].x, quads[quad].y, quads[quad].z, quads[quad].w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                bool is_kept = kept_bits >> (4 * quad + j) & 1;
                if (is_kept && index < FILTER_CANDIDATES)
                    dist.candidates[index] = logits[j], dist.candidate_ids[index] = ids[quad] + j;
                index += is_kept;
            }
        }
        return visit_above || !full;
    });
    __syncthreads();
    dist.n_candidates = n_gathered <= FILTER_CANDIDATES ? n_gathered : -1, dist.gathered_low = low,
    dist.gathered_high = high;
    __syncthreads();
    return dist.n_candidates >= 0;
}
/* samp_gather_range without calls for the logits above the range. */
__device__ static bool samp_gather(samp_dist &dist, uint32_t low, uint32_t high) {
    return samp_gather_range(dist, low, high, false, [](float) {});
}
/* Returns whether all kept ids are gathered. */
__device__ static inline bool samp_has_all_kept(const samp_dist &dist) {
    return samp_has_gathered(dist, samp_logit_to_key(dist.min_logit), samp_logit_to_key(dist.max));
}

/* ---- Searches for a threshold ---- */

/* Divides a range of keys into bins 0 .. last_bin; bin 0 has the highest keys. The bins have either
 * equally many keys, or equal widths in logits. */
typedef struct samp_bin_map {
    uint32_t low_key;    /* lowest key of the range; used by bins of equally many keys */
    int shift, last_bin; /* shift: a bin of equally many keys has 2^shift keys */
    float max_logit,     /* highest logit of the range; used by bins of equal widths */
        bins_per_logit;  /* > 0: equal widths, bins per unit of logit; 0: equally many keys */
} samp_bin_map;
__device__ static inline uint32_t samp_width_bin(const samp_bin_map &map, float x) {
    return (uint32_t)fminf(__fmul_rn(__fsub_rn(map.max_logit, x), map.bins_per_logit),
                           (float)map.last_bin);
}
__device__ static inline uint32_t samp_bin_of(const samp_bin_map &map, uint32_t key) {
    return map.bins_per_logit > 0 ? samp_width_bin(map, samp_key_to_logit(key))
                                  : (uint32_t)map.last_bin - (key - map.low_key >> map.shift);
}
/* Returns the lowest key of low .. high whose bin number is at most `bin`, by a binary search. The
 * bin number of `high` must be at most `bin`, too. */
__device__ static inline uint32_t samp_bin_low_key(const samp_bin_map &map, uint32_t low,
                                                   uint32_t high, uint32_t bin) {
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (samp_bin_of(map, middle) <= bin) high = middle;
        else low = middle + 1;
    }
    return low;
}

/* One step of a radix search from the highest key down. each(add) calls add(key, mass) for the ids
 * of this thread; keys outside *low .. *high are ignored. *sum_above is the mass of the keys above
 * the range. The range is divided into 256 bins and becomes one of them: going down from the
 * highest key, the bin in which the sum of *sum_above and the masses reaches the target. If the sum
 * never reaches it, the range becomes the lowest bin with any mass. *sum_above becomes the mass
 * above the new range.
 * by_width: the bins have equal widths in logits, if the range is finite. Bins of equally many keys
 * would be narrow and nearly empty for logits near 0, because keys are dense there. Most ids of a
 * row would fall into three or four wide bins, and their atomic additions would wait for each
 * other. */
template <class F>
__device__ static inline void samp_narrow(uint32_t *low, uint32_t *high, samp_mass target,
                                          samp_mass *sum_above, samp_mass *scratch, bool by_width,
                                          F each) {
    /* each of the four words adds up 12 bits of the masses, so that no sum of 2^18 ids overflows */
    __shared__ uint32_t bins[4][FILTER_THREADS];
    __shared__ int found;
    __shared__ samp_mass found_above;
    uint32_t first_key = *low, last_key = *high, thread = threadIdx.x;
    int lane = (int)thread % 32;
    float width = samp_key_to_logit(last_key) - samp_key_to_logit(first_key);
    samp_bin_map map = {first_key, max(0, 24 - __clz((int)(last_key - first_key))),
                        FILTER_THREADS - 1, samp_key_to_logit(last_key), 0};
    if (by_width && width > 1e-30f && width < 1e30f) map.bins_per_logit = FILTER_THREADS / width;
    bins[0][thread] = bins[1][thread] = bins[2][thread] = bins[3][thread] = 0;
    if (thread == 0) found = -1, found_above = 0;
    __syncthreads();
    each([&](uint32_t key, samp_mass mass) {
        if (key < first_key || key > last_key) return;
        /* Four 32-bit additions whose result is not used are faster than one 64-bit addition. */
        uint32_t bin = samp_bin_of(map, key);
        atomicAdd(&bins[0][bin], (uint32_t)mass & 0xfff);
        if (mass >> 12) {
            atomicAdd(&bins[1][bin], (uint32_t)(mass >> 12) & 0xfff),
                atomicAdd(&bins[2][bin], (uint32_t)(mass >> 24) & 0xfff);
            atomicAdd(&bins[3][bin], (uint32_t)(mass >> 36));
        }
    });
    __syncthreads();
    samp_mass bin_mass = bins[0][thread] + ((samp_mass)bins[1][thread] << 12) +
                         ((samp_mass)bins[2][thread] << 24) + ((samp_mass)bins[3][thread] << 36);
    samp_mass prefix_mass = bin_mass;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        samp_mass other = __shfl_up_sync(~0u, prefix_mass, lanes);
        if (lane >= lanes) prefix_mass += other;
    }
    if (lane == 31) scratch[thread / 32] = prefix_mass;
    __syncthreads();
    prefix_mass += *sum_above;
    for (uint32_t i = 0; i < thread / 32; i++) prefix_mass += scratch[i];
    bool is_last = thread == FILTER_THREADS - 1;
    if (bin_mass && prefix_mass >= target && prefix_mass - bin_mass < target)
        found = (int)thread, found_above = prefix_mass - bin_mass;
    if (is_last && prefix_mass < target) found = -2;
    __syncthreads();
    /* The target is not reached: take the lowest bin with mass. Its prefix sum is that of all. */
    if (found == -2) {
        if (is_last) scratch[0] = prefix_mass;
        __syncthreads();
        if (bin_mass && prefix_mass == scratch[0])
            found = (int)thread, found_above = prefix_mass - bin_mass;
        __syncthreads();
    }
    uint32_t bin = (uint32_t)max(found, 0);
    *sum_above = found_above;
    if (map.bins_per_logit > 0) {
        *low = samp_bin_low_key(map, first_key, last_key, bin);
        if (bin) *high = samp_bin_low_key(map, first_key, last_key, bin - 1) - 1;
    } else {
        *low = first_key + (FILTER_THREADS - 1 - bin << map.shift);
        *high = *low + min(last_key - *low, (1u << map.shift) - 1);
    }
    __syncthreads();
}

/* Repeats samp_narrow until the range is one key, and returns that key. */
template <class F>
__device__ static inline uint32_t samp_find_key(uint32_t low, uint32_t high, samp_mass target,
                                                samp_mass *sum_above, samp_mass *scratch, F each) {
    while (low < high) samp_narrow(&low, &high, target, sum_above, scratch, false, each);
    return low;
}

/* Returns a lower bound of the k-th highest logit: the k-th highest of the block maxima, or a value
 * up to 2^16 keys lower, which is up to a 128th of the logit. This tolerance ends the search after
 * two steps. Returns -inf if there are fewer than k blocks. */
__device__ static float samp_kth_bound(const samp_dist &dist, int k, samp_mass *scratch) {
    uint32_t low = samp_logit_to_key(-INFINITY), high = samp_logit_to_key(dist.max);
    samp_mass sum_above = 0;
    if (k > dist.n_blocks) return -INFINITY;
    while (high - low > 0xffff)
        samp_narrow(&low, &high, (samp_mass)k, &sum_above, scratch, false, [&](auto add) {
            for (int i = (int)threadIdx.x; i < dist.n_blocks; i += FILTER_THREADS)
                add(samp_logit_to_key(dist.block_maxes[i]), 1);
        });
    return samp_key_to_logit(low);
}

/* The last step of samp_find_threshold if each thread has at most one candidate: each thread adds
 * up the mass above its candidate. Returns the logit at which the mass reaches the target, or if it
 * never does, the lowest candidate with any mass. Only candidates with a key in low .. high count.
 * *sum_above: at first the mass above the range, on return the mass above the returned logit. */
__device__ static float samp_threshold_small(const samp_dist &dist, bool by_count, uint32_t low,
                                        uint32_t high, samp_mass target, samp_mass *sum_above) {
    __shared__ samp_mass mass[FILTER_THREADS], before;
    __shared__ float found;
    int thread = (int)threadIdx.x;
    float logit = thread < dist.n_candidates ? dist.candidates[thread] : 0;
    bool is_candidate = thread < dist.n_candidates &&
                        samp_is_kept(dist, logit, dist.candidate_ids[thread]) &&
                        samp_logit_to_key(logit) >= low && samp_logit_to_key(logit) <= high,
         lowest = true;
    samp_mass own_mass = is_candidate ? by_count ? 1 : samp_mass_of(dist, logit) : 0,
              mass_above = *sum_above, mass_tied = 0;
    mass[thread] = own_mass;
    if (thread == 0) found = samp_key_to_logit(low), before = *sum_above;
    __syncthreads();
    bool first = own_mass;
    for (int i = 0; i < dist.n_candidates && own_mass; i++) {
        float other = dist.candidates[i];
        samp_mass other_mass = mass[i];
        mass_above += other > logit ? other_mass : 0, mass_tied += other == logit ? other_mass : 0;
        lowest &= !(other < logit && other_mass),
            first &= !(other == logit && other_mass && i < thread);
    }
    /* true in one thread only */
    if (first && mass_above < target && (lowest || mass_above + mass_tied >= target))
        found = logit, before = mass_above;
    __syncthreads();
    *sum_above = before;
    return found;
}

/* Narrows the range low .. high by one sweep that counts its ids in FILTER_BINS bins of equal width
 * in logits. This costs one 32-bit addition for each id, and no weight is computed. All ids of the
 * range must be kept, and their blocks must be listed.
 *
 * The mass of a bin is at most its count times the weight at its upper end, and at least its count
 * times the weight at its lower end. Going down from the highest logit, the mass reaches the target
 * between two bins: at the earliest where the sum of the upper bounds reaches it, at the latest
 * where the sum of the lower bounds reaches it. The new range is from the first of these bins to
 * the second. The caller must still add up the mass above the new range.
 *
 * Returns false, and changes nothing, if the range is too wide or too narrow for bins, or if the
 * upper bounds do not reach the target. Of 128,256 Gaussian logits, all different, 40 to 400 remain
 * in the new range. */
__device__ static bool samp_narrow_by_counts(samp_dist &dist, uint32_t *low, uint32_t *high,
                                             samp_mass target) {
    constexpr int THREAD_BINS = FILTER_BINS / FILTER_THREADS, WARPS = FILTER_THREADS / 32;
    static_assert(THREAD_BINS == 32, "a thread's bins lie in the 32 banks");
    __shared__ float warp_sums[2][WARPS];
    __shared__ int upper_bin, lower_bin;
    const int thread = (int)threadIdx.x, lane = thread % 32;
    const float min_logit = samp_key_to_logit(*low), max_logit = samp_key_to_logit(*high),
                width = max_logit - min_logit;
    if (!(width > 1e-30f && width < 1e30f && width * dist.scale < 64)) return false;
    uint32_t *bins = (uint32_t *)dist.candidates; /* no ids are gathered yet */
    const samp_bin_map map = {0, 0, FILTER_BINS - 1, max_logit, FILTER_BINS / width};
    for (int i = thread; i < FILTER_BINS; i += FILTER_THREADS) bins[i] = 0;
    if (thread == 0) upper_bin = lower_bin = FILTER_BINS;
    __syncthreads();
    samp_sweep(dist, [&](float logit, int) {
        if (logit >= min_logit) atomicAdd(&bins[samp_width_bin(map, logit)], 1u);
    });
    __syncthreads();
    /* The relative rounding error of a bound is below 2^-15: the ends of a bin are known to 2^-10
     * of its width, which is at most 64 / FILTER_BINS = 2^-7 in log2; a weight is known to 2^-17, a
     * sum to 2^-18. */
    const float margin = 0x1p-14f, bin_step = dist.scale / map.bins_per_logit;
    const float first_log2 = (max_logit - dist.max) * dist.scale,
                target_sum = (float)target / SAMP_MASS_ONE;
    float sum[2] = {0, 0}; /* an upper bound, a lower bound */
    auto add_bin = [&](int bin, float (&to)[2]) {
        float count = (float)bins[bin], log2_weight = first_log2 - (float)bin * bin_step;
        to[0] += count * ex2(log2_weight) * (1 + margin),
            to[1] += count * ex2(log2_weight - bin_step) * (1 - margin);
    };
    /* Each lane begins at another bank. */
    for (int i = 0; i < THREAD_BINS; i++)
        add_bin(thread * THREAD_BINS + (i + thread) % THREAD_BINS, sum);
    float sum_before[2];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        float prefix = sum[side];
        for (int lanes = 1; lanes < 32; lanes *= 2) {
            float other = __shfl_up_sync(~0u, prefix, lanes);
            if (lane >= lanes) prefix += other;
        }
        if (lane == 31) warp_sums[side][thread / 32] = prefix;
        sum_before[side] = __shfl_up_sync(~0u, prefix, 1);
        if (lane == 0) sum_before[side] = 0;
    }
    __syncthreads();
    for (int i = 0; i < thread / 32; i++)
        sum_before[0] += warp_sums[0][i], sum_before[1] += warp_sums[1][i];
#pragma unroll
    for (int side = 0; side < 2; side++) {
        if (sum_before[side] + sum[side] < target_sum) continue;
        float running[2] = {sum_before[0], sum_before[1]};
        int i = 0;
        for (; i < THREAD_BINS - 1; i++) {
            add_bin(thread * THREAD_BINS + i, running);
            if (running[side] >= target_sum) break;
        }
        atomicMin(side ? &lower_bin : &upper_bin, thread * THREAD_BINS + i);
    }
    __syncthreads();
    const int from = upper_bin, to = max(upper_bin, lower_bin);
    if (from == FILTER_BINS) return false;
    const uint32_t low_key = to < FILTER_BINS ? samp_bin_low_key(map, *low, *high, (uint32_t)to)
                                              : *low;
    if (from) *high = samp_bin_low_key(map, *low, *high, (uint32_t)from - 1) - 1;
    *low = low_key;
    return true;
}

/* Adds up the kept ids from the highest logit down to min_logit, each as 1 (by_count) or as its
 * weight. Returns the logit at which the sum reaches the target. If it never does, returns the
 * lowest of these logits. *sum_above becomes the sum of the ids with higher logits.
 *
 * While the range does not fit into shared memory, sweeps over the listed blocks narrow it: the
 * first one by counts (samp_narrow_by_counts, if weights are added up and all ids of the range are
 * kept), the others by samp_narrow. As soon as the range fits, it is gathered, and samp_narrow goes
 * on over the candidates. If each thread has at most one candidate, samp_threshold_small ends the
 * search. */
__device__ static float samp_find_threshold(samp_dist &dist, bool by_count, samp_mass target,
                                            float min_logit, samp_mass *sum_above,
                                            samp_mass *scratch) {
    uint32_t low = samp_logit_to_key(min_logit), high = samp_logit_to_key(dist.max);
    bool fits = false;
    *sum_above = 0;
    for (bool first = true; low < high; first = false) {
        if (!fits) fits = samp_gather(dist, low, high);
        const bool counted = !fits && first && !by_count &&
                             (min_logit > dist.min_logit || dist.last_tied == INT_MAX);
        if (counted && samp_narrow_by_counts(dist, &low, &high, target)) {
            samp_mass own_mass = 0;
            fits = samp_gather_range(dist, low, high, true,
                                     [&](float logit) { own_mass += samp_mass_of(dist, logit); });
            *sum_above = samp_cta_sum(own_mass, scratch);
            if (low == high) break;
        }
        if (fits && dist.n_candidates <= FILTER_THREADS)
            return samp_threshold_small(dist, by_count, low, high, target, sum_above);
        samp_narrow(&low, &high, target, sum_above, scratch, first, [&](auto add) {
            samp_for_each(dist, [&](float logit, int id) {
                if (samp_is_kept(dist, logit, id))
                    add(samp_logit_to_key(logit), by_count ? 1 : samp_mass_of(dist, logit));
            });
        });
    }
    /* samp_nth_tied needs all ids with this logit gathered, or their blocks listed */
    samp_gather(dist, low, high);
    return samp_key_to_logit(low);
}

/* min_logit: a result of samp_find_threshold. Returns id number *nth, counted from 1, of the ids
 * with this logit. If there are at most *nth such ids, returns INT_MAX and sets *nth to their
 * number. The keys of the search are ~id, so that the lowest id comes first. */
__device__ static int samp_nth_tied(const samp_dist &dist, float min_logit, samp_mass *nth,
                                    samp_mass *scratch) {
    samp_mass count = 0, sum_above = 0;
    samp_for_each(dist, [&](float logit, int) { count += logit == min_logit; });
    count = samp_cta_sum(count, scratch);
    if (count <= *nth) return *nth = count, INT_MAX;
    return (int)~samp_find_key(
        ~(uint32_t)(dist.V - 1), ~0u, *nth, &sum_above, scratch, [&](auto add) {
            samp_for_each(dist, [&](float logit, int id) {
                if (logit == min_logit) add(~(uint32_t)id, 1);
            });
        });
}

/* ---- Top log-probabilities and ranks ---- */

/* Writes the n_top ids with the highest logits and their log-probabilities to *top, best first; of
 * equal logits the lowest id comes first. -inf is a logit like any other. The raw log-sum-exp is
 * dist.max + log_sum. */
__device__ static void samp_top_logprobs(samp_dist dist, int n_top, float log_sum, samp_top *top,
                                         samp_mass *scratch) {
    __shared__ float top_logits[TOKA_MAX_LOGPROBS];
    __shared__ int top_ids[TOKA_MAX_LOGPROBS], n_found;
    samp_mass sum_above;
    dist.min_logit = -INFINITY, dist.last_tied = INT_MAX;
    float min_logit = samp_find_threshold(dist, true, (samp_mass)n_top,
                                          samp_kth_bound(dist, n_top, scratch), &sum_above,
                                          scratch);
    samp_mass n_tied = (samp_mass)n_top - sum_above;
    int last_tied = samp_nth_tied(dist, min_logit, &n_tied, scratch);
    if (threadIdx.x == 0) n_found = 0;
    samp_gather(dist, samp_logit_to_key(min_logit), samp_logit_to_key(dist.max));
    dist.min_logit = min_logit, dist.last_tied = last_tied;
    __syncthreads();
    samp_for_each(dist, [&](float logit, int id) {
        if (!samp_is_kept(dist, logit, id)) return;
        int i = atomicAdd(&n_found, 1); /* n_top ids, in any order */
        top_logits[i] = logit, top_ids[i] = id;
    });
    __syncthreads();
    if ((int)threadIdx.x < n_top) {
        float logit = top_logits[threadIdx.x];
        int id = top_ids[threadIdx.x], index = 0;
        for (int i = 0; i < n_top; i++)
            index += top_logits[i] > logit || (top_logits[i] == logit && top_ids[i] < id);
        top->ids[index] = id;
        top->logprobs[index] = logit == -INFINITY ? -INFINITY : logit - dist.max - log_sum;
    }
    __syncthreads();
}

/* Returns the rank of an id among all ids, in the order of samp_top_logprobs; 1 is the best. */
__device__ static int samp_rank(samp_dist dist, int id, samp_mass *scratch) {
    const float id_logit = samp_clean(dist.x[id]);
    samp_mass before = 0;
    samp_list_above(dist, id_logit);
    samp_sweep(dist, [&](float logit, int other) {
        before += logit > id_logit || (logit == id_logit && other < id);
    });
    return 1 + (int)samp_cta_sum(before, scratch);
}

/* ---- Step 2: bias, masks, penalties ---- */

/* The next functions set touched[block] for each block in which they change logits, except
 * samp_apply_allowed and samp_apply_mask: for these, samp_adjust marks all blocks. */

/* Adds the bias values (logit_bias). An id that is listed twice gets both values, in the order of
 * the list. Runs in one warp, 32 entries at a time. */
__device__ static void samp_apply_bias(const samp_filter &filter, float *logits, int *touched) {
    int lane = (int)threadIdx.x;
    for (int first = 0; first < filter.n_bias; first += 32) {
        int i = first + lane, id = i < filter.n_bias ? filter.bias_ids[i] : -1 - lane;
        unsigned same_id = __match_any_sync(~0u, id);
        /* the first lane with this id adds all its values */
        if (id >= 0 && (same_id & ((1u << lane) - 1)) == 0) {
            float logit = samp_clean(logits[id]);
            for (unsigned remaining = same_id; remaining; remaining &= remaining - 1)
                logit = samp_clean(
                    __fadd_rn(logit, filter.bias[first + __ffs((int)remaining) - 1]));
            logits[id] = logit, touched[id / SAMP_BLOCK] = 1;
        }
        __threadfence_block();
        __syncwarp();
    }
}

/* Sets the logits of all ids except the allowed ids to -inf. bits: [FILTER_WORKSPACE_WORDS] in
 * shared memory, one bit for each id of a range. */
__device__ static void samp_apply_allowed(const samp_filter &filter, float *logits, int V,
                                          uint32_t *bits) {
    for (int first_id = 0; first_id < V; first_id += 32 * FILTER_WORKSPACE_WORDS) {
        int n_ids = min(32 * FILTER_WORKSPACE_WORDS, V - first_id);
        for (int i = (int)threadIdx.x; i < FILTER_WORKSPACE_WORDS; i += FILTER_THREADS) bits[i] = 0;
        __syncthreads();
        for (int i = (int)threadIdx.x; i < filter.n_allowed; i += FILTER_THREADS) {
            int index = filter.allowed[i] - first_id;
            if (index >= 0 && index < n_ids) atomicOr(&bits[index / 32], 1u << index % 32);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n_ids; i += FILTER_THREADS)
            if (!(bits[i / 32] >> i % 32 & 1)) logits[first_id + i] = -INFINITY;
        __syncthreads();
    }
}

/* Sets the logits of all ids that the mask does not have to -inf. */
__device__ static void samp_apply_mask(const uint32_t *mask, float *logits, int V) {
    for (int id = (int)threadIdx.x; id < V; id += FILTER_THREADS)
        if (!(mask[id / 32] >> id % 32 & 1)) logits[id] = -INFINITY;
    __syncthreads();
}

/* Returns token i of the row's history. */
__device__ static inline int samp_history_id(const samp_filter &filter, const int *kv_ids, int i) {
    return kv_ids[filter.pages[i / TOKA_GPU_PAGE_TOK] * TOKA_GPU_PAGE_TOK + i % TOKA_GPU_PAGE_TOK];
}

/* Forbids the ids that would complete one of the bad words given as ids: the output ends in all ids
 * of the word but the last. */
__device__ static void samp_apply_bad_ids(const samp_filter &filter, const int *kv_ids,
                                          float *logits, int *touched) {
    for (int i = (int)threadIdx.x; i < filter.n_bad; i += FILTER_THREADS) {
        const int first = i ? filter.bad_ends[i - 1] : 0, last = filter.bad_ends[i] - 1,
                  at = filter.n_history - (last - first); /* where the word would begin */
        bool open = at >= filter.n_prompt;
        for (int k = first; k < last && open; k++)
            open = samp_history_id(filter, kv_ids, at + k - first) == filter.bad_ids[k];
        if (open)
            logits[filter.bad_ids[last]] = -INFINITY,
            touched[filter.bad_ids[last] / SAMP_BLOCK] = 1;
    }
}

/* These functions are those of chapter 22 of toka.c with the same names. */
__device__ static int samp_find_steps(const toka_word_table &table, int id) {
    int low = 0, high = table.n_steps;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (table.steps[middle].id < id) low = middle + 1;
        else high = middle;
    }
    return low;
}
__device__ static bool samp_has_steps(const toka_word_table &table, int first, int id) {
    return first < table.n_steps && table.steps[first].id == id;
}
__device__ static bool samp_has_no_text(const samp_filter &filter, int first, int id) {
    const toka_word_table &table = filter.words;
    return id >= table.n_ids ||
           (samp_has_steps(table, first, id) && table.steps[first].from == TOKA_WORD_SKIP &&
            !(table.steps[first].to && filter.keep_special));
}
/* Each warp looks back for itself, at 32 ids at a time, so it may begin up to 31 ids too early,
 * which changes nothing. */
__device__ static int samp_words_begin(const samp_filter &filter, const int *kv_ids) {
    int begin = filter.n_history, n_left = filter.words.max_ids;
    for (int n_passed = 32; n_passed == 32 && n_left > 0; begin -= n_passed) {
        const int at = begin - 1 - (int)threadIdx.x % 32;
        const bool in_output = at >= filter.n_prompt;
        const int id = in_output ? samp_history_id(filter, kv_ids, at) : 0,
                  first = samp_find_steps(filter.words, id);
        const bool no_text = samp_has_no_text(filter, first, id);
        const unsigned stops = __ballot_sync(
            ~0u, !in_output || !(no_text || samp_has_steps(filter.words, first, id)));
        n_passed = stops ? __ffs((int)stops) - 1 : 32;
        n_left -= __popc(__ballot_sync(~0u, !no_text));
    }
    return begin;
}
__device__ static bool samp_is_at(const uint32_t *places, int from) {
    return from == TOKA_WORD_ANY || (from >= 0 && places[from / 32] >> from % 32 & 1);
}

/* Forbids the ids that would complete one of the bad words given as texts. places: two arrays of a
 * bit a place, in shared memory. */
__device__ __noinline__ static void samp_apply_words(const samp_filter &filter, const int *kv_ids,
                                                     float *logits, int V, uint32_t *places,
                                                     int *touched) {
    const toka_word_table &table = filter.words;
    const int n_words = (table.n_places + 31) / 32, begin = samp_words_begin(filter, kv_ids);
    uint32_t *next = places + n_words;
    for (int i = (int)threadIdx.x; i < n_words; i += FILTER_THREADS) places[i] = 0;
    __syncthreads();
    for (int at = begin; at < filter.n_history; at++) {
        const int id = samp_history_id(filter, kv_ids, at),
                  first = samp_find_steps(table, id);
        if (samp_has_no_text(filter, first, id)) continue;
        for (int i = (int)threadIdx.x; i < n_words; i += FILTER_THREADS) next[i] = 0;
        __syncthreads();
        for (int i = first + (int)threadIdx.x; samp_has_steps(table, i, id); i += FILTER_THREADS) {
            const toka_word_rule step = table.steps[i];
            if (samp_is_at(places, step.from)) atomicOr(&next[step.to / 32], 1u << step.to % 32);
        }
        __syncthreads();
        uint32_t *const last = places;
        places = next, next = last;
    }
    const int n_ends = begin < filter.n_history ? table.n_ends : table.n_whole;
    for (int i = (int)threadIdx.x; i < n_ends; i += FILTER_THREADS) {
        const toka_word_rule end = table.ends[i];
        if (end.id < V && samp_is_at(places, end.from))
            logits[end.id] = -INFINITY, touched[end.id / SAMP_BLOCK] = 1;
    }
    __syncthreads();
}

/* Applies the penalties to the logit of an id that is in the history, `count` times in the
 * output. */
__device__ static void samp_penalize(const samp_filter &filter, float *logits, int id,
                                     uint32_t count, int *touched) {
    float logit = samp_clean(logits[id]);
    logit = logit < 0 ? __fmul_rn(logit, filter.repetition) : __fdiv_rn(logit, filter.repetition);
    logit = __fsub_rn(logit, __fmul_rn(filter.frequency, (float)count));
    if (count > 0) logit = __fsub_rn(logit, filter.presence);
    logits[id] = samp_clean(logit), touched[id / SAMP_BLOCK] = 1;
}

/* Applies the penalties once to each id of a history of which they look at up to
 * FILTER_WORKSPACE_WORDS / 4 ids. table: a hash table in shared memory. It has n_entries entries,
 * at least twice that number: first [n_entries] id + 1 (0: the entry is empty), then [n_entries]
 * counts in the output. */
__device__ static void samp_hash_penalties(const samp_filter &filter, const int *kv_ids,
                                           float *logits, int V, uint32_t *table, int *touched) {
    const uint32_t shift = __clz(2 * (filter.n_history - filter.first_penalized) - 1),
                   n_entries = 1u << (32 - shift);
    for (uint32_t i = threadIdx.x; i < 2 * n_entries; i += FILTER_THREADS) table[i] = 0;
    __syncthreads();
    for (int i = filter.first_penalized + (int)threadIdx.x; i < filter.n_history;
         i += FILTER_THREADS) {
        uint32_t key = (uint32_t)samp_history_id(filter, kv_ids, i) + 1,
                 index = key * 0x9E3779B1u >> shift;
        if (key - 1 >= (uint32_t)V) continue;
        for (uint32_t previous; (previous = atomicCAS(&table[index], 0u, key)) && previous != key;)
            index = index + 1 & n_entries - 1;
        if (i >= filter.n_prompt) atomicAdd(&table[n_entries + index], 1u);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < n_entries; i += FILTER_THREADS)
        if (table[i])
            samp_penalize(filter, logits, (int)table[i] - 1, table[n_entries + i], touched);
    __syncthreads();
}

/* The same for a history of any length, for one range of ids at a time. counts:
 * [FILTER_WORKSPACE_WORDS] in shared memory: how often each id of the range is in the output; bit
 * 31 is set if the id is in the history. Reads n_history * V / FILTER_WORKSPACE_WORDS ids. */
__device__ static void samp_apply_penalties(const samp_filter &filter, const int *kv_ids,
                                            float *logits, int V, uint32_t *counts, int *touched) {
    for (int first_id = 0; first_id < V; first_id += FILTER_WORKSPACE_WORDS) {
        int n_ids = min((int)FILTER_WORKSPACE_WORDS, V - first_id);
        for (int i = (int)threadIdx.x; i < n_ids; i += FILTER_THREADS) counts[i] = 0;
        __syncthreads();
        for (int i = filter.first_penalized + (int)threadIdx.x; i < filter.n_history;
             i += FILTER_THREADS) {
            int index = samp_history_id(filter, kv_ids, i) - first_id;
            if (index < 0 || index >= n_ids) continue;
            if (i >= filter.n_prompt) atomicAdd(&counts[index], 1u);
            atomicOr(&counts[index], 0x80000000u);
        }
        __syncthreads();
        for (int i = (int)threadIdx.x; i < n_ids; i += FILTER_THREADS)
            if (counts[i])
                samp_penalize(filter, logits, first_id + i, counts[i] & 0x7fffffffu, touched);
        __syncthreads();
    }
}

/* Recomputes the maxima of the touched blocks and the maximum of the row; with_sums: also the sums
 * of the touched blocks. A warp reads BLOCKS blocks at a time. */
__device__ static void samp_update_blocks(samp_dist &dist, const int *touched, bool with_sums,
                                          samp_mass *scratch) {
    const int BLOCKS = 4, n_warps = FILTER_THREADS / 32;
    int lane = (int)threadIdx.x % 32;
    float row_max = -INFINITY;
    for (int first_block = (int)threadIdx.x / 32; first_block < dist.n_blocks;
         first_block += BLOCKS * n_warps) {
        float4 quads[2 * BLOCKS];
#pragma unroll
        for (int k = 0; k < 2 * BLOCKS; k++) {
            int block = first_block + k / 2 * n_warps,
                id = block * SAMP_BLOCK + k % 2 * 128 + 4 * lane;
            quads[k] = block < dist.n_blocks && touched[block] && id < dist.V
                           ? *(const float4 *)(dist.x + id)
                           : float4{};
        }
#pragma unroll
        for (int k = 0; k < BLOCKS; k++) {
            int block = first_block + k * n_warps, id = block * SAMP_BLOCK + 4 * lane;
            float logits[8], block_max = -INFINITY, sum = 0;
            if (block >= dist.n_blocks || !touched[block]) continue;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float4 quad = quads[2 * k + i / 4];
                const float logit = i % 4 == 0   ? quad.x
                                    : i % 4 == 1 ? quad.y
                                    : i % 4 == 2 ? quad.z
                                                 : quad.w;
                logits[i] = id + i / 4 * 128 + i % 4 < dist.V ? samp_clean(logit) : -INFINITY,
                block_max = fmaxf(block_max, logits[i]);
            }
            block_max = samp_key_to_logit(__reduce_max_sync(~0u, samp_logit_to_key(block_max)));
            if (lane == 0) dist.block_maxes[block] = block_max;
            if (!with_sums) continue;
#pragma unroll
            for (int i = 0; i < 8; i++)
                sum = __fadd_rn(sum,
                                logits[i] > -INFINITY
                                    ? ex2(__fmul_rn(__fsub_rn(logits[i], block_max), dist.scale))
                                    : 0);
            for (int lanes = 16; lanes; lanes /= 2)
                sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, lanes));
            if (lane == 0) dist.block_sums[block] = sum;
        }
    }
    __syncthreads();
    for (int block = (int)threadIdx.x; block < dist.n_blocks; block += FILTER_THREADS)
        row_max = fmaxf(row_max, dist.block_maxes[block]);
    dist.max = block_reduce(row_max, (float *)scratch, op_max{});
}

/* Step 2 of chapter 22 of toka.c: adjusts the logits. with_sums: see samp_update_blocks. workspace:
 * [FILTER_WORKSPACE_WORDS] in shared memory. No blocks are listed during it: the memory of their
 * list holds `touched`. */
__device__ static void samp_adjust(samp_dist &dist, const samp_filter &filter, const int *kv_ids,
                                   float *logits, bool with_sums, uint32_t *workspace,
                                   samp_mass *scratch) {
    const int n_penalized = filter.n_history - filter.first_penalized;
    int *touched = dist.blocks;
    __syncthreads();
    for (int block = (int)threadIdx.x; block < dist.n_blocks; block += FILTER_THREADS)
        touched[block] = filter.n_allowed > 0 || (filter.mask != NULL);
    __syncthreads();
    if (threadIdx.x < 32) samp_apply_bias(filter, logits, touched);
    __syncthreads();
    if (filter.n_allowed) samp_apply_allowed(filter, logits, dist.V, workspace);
    if (filter.mask) samp_apply_mask(filter.mask, logits, dist.V);
    /* end ids may lie outside the vocabulary */
    for (int i = (int)threadIdx.x; i < filter.n_forbidden; i += FILTER_THREADS)
        if (filter.forbidden[i] >= 0 && filter.forbidden[i] < dist.V)
            logits[filter.forbidden[i]] = -INFINITY, touched[filter.forbidden[i] / SAMP_BLOCK] = 1;
    samp_apply_bad_ids(filter, kv_ids, logits, touched);
    if (filter.words.n_ends)
        samp_apply_words(filter, kv_ids, logits, dist.V, workspace, touched);
    __syncthreads();
    if (n_penalized > FILTER_WORKSPACE_WORDS / 4)
        samp_apply_penalties(filter, kv_ids, logits, dist.V, workspace, touched);
    else if (n_penalized)
        samp_hash_penalties(filter, kv_ids, logits, dist.V, workspace, touched);
    samp_update_blocks(dist, touched, with_sums, scratch);
}

/* ---- Step 4: top-k, top-p, min-p ---- */

/* Removes the ids with logits below dist.max + drop (drop <= 0). If this limit is below the
 * threshold, nothing changes. */
__device__ static void samp_min_p(samp_dist &dist, double drop) {
    float min_logit = __double2float_ru(fmax((double)dist.max + drop, -(double)FLT_MAX));
    if (min_logit > dist.min_logit) dist.min_logit = min_logit, dist.last_tied = INT_MAX;
}

/* Returns the mass of all ids, from the sums of the blocks. */
__device__ static samp_mass samp_total_mass(const samp_dist &dist, samp_mass *scratch) {
    samp_mass sum = 0;
    for (int block = (int)threadIdx.x; block < dist.n_blocks; block += FILTER_THREADS)
        sum += (samp_mass)(__fmul_rn(ex2(__fmul_rn(__fsub_rn(dist.block_maxes[block], dist.max),
                                                   dist.scale)),
                                     dist.block_sums[block]) *
                           SAMP_MASS_ONE);
    return samp_cta_sum(sum, scratch);
}

/* Returns the mass of the kept ids. All of them must be gathered, or their blocks listed. */
__device__ static samp_mass samp_kept_mass(const samp_dist &dist, samp_mass *scratch) {
    samp_mass sum = 0;
    samp_for_each(dist, [&](float logit, int id) {
        sum += samp_is_kept(dist, logit, id) ? samp_mass_of(dist, logit) : 0;
    });
    return samp_cta_sum(sum, scratch);
}

/* Returns a lower bound of the logit at which the sum of weights reaches the target, or
 * dist.min_logit if none is found. Usually a few ids already have that much mass, so the k-th
 * highest block maximum is such a bound, with k = 32 or 256. If the ids above the 32nd maximum have
 * less than a 16th of the target, those above the 256th rarely reach it either: then k = 256 is not
 * tried. */
__device__ static float samp_top_p_bound(samp_dist &dist, samp_mass target, samp_mass *scratch) {
    for (int k = 32; k < dist.n_blocks && !samp_has_all_kept(dist); k *= 8) {
        float bound = samp_kth_bound(dist, k, scratch);
        if (bound <= dist.min_logit ||
            !samp_gather(dist, samp_logit_to_key(bound), samp_logit_to_key(dist.max)))
            break;
        samp_mass sum = samp_kept_mass(dist, scratch);
        if (sum >= target) return bound;
        if (sum < target / 16) break;
    }
    return dist.min_logit;
}

/* top-p. total_mass: the mass of the ids kept so far. Going down from the highest logit, an id
 * stays kept if the ids before it have less than top_p * total_mass. Returns the mass of the ids
 * that stay.
 * So the removed ids may have up to (1 - top_p) * total_mass. If samp_top_p_bound finds no bound,
 * all ids that each have less than 1/V of this are removed first, by samp_min_p: there are at most
 * V of them. This leaves few ids for the search. */
__device__ static samp_mass samp_top_p(samp_dist &dist, const samp_filter &filter,
                                       samp_mass total_mass, samp_mass *scratch) {
    samp_mass sum_above, target = (samp_mass)ceil((double)filter.top_p * (double)total_mass);
    float min_logit = samp_top_p_bound(dist, target, scratch);
    if (min_logit == dist.min_logit && !samp_has_all_kept(dist)) {
        double small_weight = (1 - (double)filter.top_p) *
                              ((double)total_mass / (double)SAMP_MASS_ONE) / dist.V;
        samp_min_p(dist, small_weight < 1 ? filter.temperature * log(small_weight) : 0);
        min_logit = dist.min_logit;
    }
    min_logit = samp_find_threshold(dist, false, target, min_logit, &sum_above, scratch);
    samp_mass tied_mass = samp_mass_of(dist, min_logit),
              n_tied = target > sum_above ? target - sum_above : 1;
    n_tied = tied_mass ? (n_tied + tied_mass - 1) / tied_mass : 1;
    dist.last_tied = samp_nth_tied(dist, min_logit, &n_tied, scratch), dist.min_logit = min_logit;
    return sum_above + n_tied * tied_mass;
}

/* Step 4 of chapter 22 of toka.c: top-k, top-p and min-p set the threshold of dist. sum: the sum of
 * the weights of all ids, 0 if it is not known. Returns the mass of the kept ids, 0 if it is not
 * known. */
__device__ static samp_mass samp_truncate(samp_dist &dist, const samp_filter &filter, float sum,
                                          samp_mass *scratch) {
    const bool has_cut = filter.top_k > 0 || filter.min_p_drop > -INFINITY;
    samp_mass mass = (samp_mass)(sum * SAMP_MASS_ONE), sum_above;
    if (filter.top_k > 0) {
        float min_logit = samp_find_threshold(dist, true, (samp_mass)filter.top_k,
                                              samp_kth_bound(dist, filter.top_k, scratch),
                                              &sum_above, scratch);
        dist.min_logit = min_logit, dist.last_tied = INT_MAX, mass = 0;
        if (filter.top_p < 1)
            samp_gather(dist, samp_logit_to_key(dist.min_logit), samp_logit_to_key(dist.max)),
                mass = samp_kept_mass(dist, scratch);
    } else if (sum == 0 && (filter.top_p < 1 || !has_cut)) mass = samp_total_mass(dist, scratch);
    if (filter.top_p < 1) mass = samp_top_p(dist, filter, mass, scratch);
    if (filter.min_p_drop > -INFINITY) {
        float old_min_logit = dist.min_logit;
        samp_min_p(dist, filter.min_p_drop);
        if (dist.min_logit > old_min_logit) mass = 0;
    }
    return mass;
}

/* ---- Step 5: the draw ---- */

/* Returns the partial of lane (lane ^ lane_mask). */
__device__ static inline samp_partial samp_partial_shuffle(const samp_partial &partial,
                                                           int lane_mask) {
    samp_partial other;
    other.max = __shfl_xor_sync(~0u, partial.max, lane_mask),
    other.gumbel = __shfl_xor_sync(~0u, partial.gumbel, lane_mask);
    other.id = __shfl_xor_sync(~0u, partial.id, lane_mask),
    other.logit = __shfl_xor_sync(~0u, partial.logit, lane_mask);
    other.sum = __shfl_xor_sync(~0u, partial.sum, lane_mask),
    other.raw_sum = __shfl_xor_sync(~0u, partial.raw_sum, lane_mask);
    return other;
}

/* Merges the partials of the first n_partials threads, a power of two up to 64, in the order of
 * samp_reduce_kernel. All threads get the result. shared: [n_partials] in shared memory. */
__device__ static samp_partial samp_merge_cta(samp_partial partial, const samp_params &params,
                                              samp_partial *shared, int n_partials) {
    int thread = (int)threadIdx.x;
    __syncthreads();
    if (thread < n_partials) shared[thread] = partial;
    __syncthreads();
    if (thread < 32) {
        partial = thread < n_partials ? shared[thread] : samp_empty_partial();
        if (n_partials > 32) partial = samp_merge(partial, shared[thread + 32], params);
        for (int half = min(n_partials, 32) / 2; half; half /= 2)
            partial = samp_merge(partial, samp_partial_shuffle(partial, half), params);
        if (thread == 0) shared[0] = partial;
    }
    __syncthreads();
    return shared[0];
}

/* Returns the partial of a block in all lanes of the warp that computes it. It is bitwise that of
 * samp_make_partial, but without the raw sum. Lane 4 * octet + g has one octet of group g, whereas
 * a thread of samp_make_partial has all 64 ids of a group. So the array of logits and the code are
 * short. This matters because a row has few such blocks, and the latency of one block counts. The
 * logits must be clean. id0: first id of the lane's group. */
__device__ static samp_partial samp_warp_partial(float (&logits)[8], const samp_params &params,
                                                 uint32_t noise, int id0) {
    const int group_index = (int)threadIdx.x % 4;
    samp_id_group group;
    float weights[8], octet_sum, logit = 0;
    group.scale = samp_scale(params), group.shift = 0, group.inexact = false;
#pragma unroll 1
    for (int pass = 0; pass < 2; pass++) {
        float octet_max = logits[0], base, raw_scaled_max;
#pragma unroll
        for (int k = 1; k < 8; k++) octet_max = fmaxf(octet_max, logits[k]);
        group.max = fmaxf(octet_max, __shfl_xor_sync(~0u, octet_max, 4));
        group.max = fmaxf(group.max, __shfl_xor_sync(~0u, group.max, 8));
        group.max = fmaxf(group.max, __shfl_xor_sync(~0u, group.max, 16));
        group.max_octet = (__ffs((int)(__ballot_sync(~0u, octet_max == group.max) &
                                       0x11111111u << group_index)) -
                           1) /
                          4;
        base = group.max > -INFINITY ? group.max : 0;
        group.scaled_max = __fmul_rn(base, group.scale),
        raw_scaled_max = __fmul_rn(base, SAMP_LOG2E);
        octet_sum = ex2(__fmaf_rn(logits[0], group.scale, -group.scaled_max));
#pragma unroll
        for (int k = 1; k < 8; k++)
            octet_sum = __fadd_rn(octet_sum,
                                  ex2(__fmaf_rn(logits[k], group.scale, -group.scaled_max)));
        group.sum = __fadd_rn(octet_sum, __shfl_xor_sync(~0u, octet_sum, 4));
        group.sum = __fadd_rn(group.sum, __shfl_xor_sync(~0u, group.sum, 8));
        group.sum = __fadd_rn(group.sum, __shfl_xor_sync(~0u, group.sum, 16));
        bool inexact = !(group.sum >= 0 && fabsf(group.scaled_max) < 0x1p23f &&
                         fabsf(raw_scaled_max) < 0x1p23f);
        if (pass || !__any_sync(~0u, inexact)) break;
        group.shift = inexact ? group.max : 0;
#pragma unroll
        for (int k = 0; k < 8; k++)
            logits[k] = inexact ? __fsub_rn(samp_clean(logits[k]), group.shift) : logits[k];
    }
    group.raw_sum = group.sum;
#pragma unroll
    for (int i = 0; i < 8; i++) group.sums[i] = __shfl_sync(~0u, octet_sum, 4 * i + group_index);
    samp_block_state state = samp_block_sums(group, params, noise, id0, NAN, true);
    bool from_end = params.uniform >> 31;
    float target = samp_target(params, from_end, group.sum);
    int octet = state.is_drawn ? samp_inverse_cdf(group.sums, from_end, &target) : group.max_octet,
        index = 0;
#pragma unroll
    for (int k = 0; k < 8; k++)
        weights[k] = ex2(__fmaf_rn(logits[k], group.scale, -group.scaled_max));
    if (state.is_drawn) index = samp_inverse_cdf(weights, from_end, &target);
    else
#pragma unroll
        for (int k = 7; k >= 0; k--) index = logits[k] == group.max ? k : index;
#pragma unroll
    for (int k = 0; k < 8; k++) logit = index == k ? logits[k] : logit;
    logit = __fadd_rn(__shfl_sync(~0u, logit, 4 * octet + group_index), group.shift),
    index = __shfl_sync(~0u, index, 4 * octet + group_index);
    float score = state.is_drawn ? __fmaf_rn(state.rel_max, group.scale, state.log2_sum_noise)
                                 : state.max;
    int id = state.max == -INFINITY ? INT_MAX : id0 + 32 * octet + samp_column(index);
    samp_quad_best(state.partial, score, id, logit);
    return state.partial;
}

/* Returns the merged partials of the listed blocks. Logits of ids that are not kept count as -inf.
 * Raw sums are not computed, because they are already known. A warp takes one block at a time. */
__device__ static samp_partial samp_draw_blocks(const samp_dist &dist, const samp_params &params,
                                                samp_partial *shared) {
    const int warp = (int)threadIdx.x / 32, n_warps = FILTER_THREADS / 32;
    /* the lane's group, and the first of its ids in a block */
    const int group = (int)threadIdx.x % 4, first_id = (int)threadIdx.x % 32 / 4 * 32 + 2 * group;
    samp_partial partial = samp_empty_partial();
    float2 next[4];
    auto fetch = [&](int i) {
#pragma unroll
        for (int j = 0; j < 4; j++)
            next[j] = i < dist.n_listed ? *(const float2 *)(dist.x + dist.blocks[i] * SAMP_BLOCK +
                                                            first_id + 8 * j)
                                        : float2{};
    };
    fetch(warp);
    for (int i = warp; i < dist.n_listed; i += n_warps) {
        const int block = dist.blocks[i], id0 = block * SAMP_BLOCK + 2 * group;
        float logits[8];
#pragma unroll
        for (int j = 0; j < 4; j++)
            logits[2 * j] = samp_clean(next[j].x), logits[2 * j + 1] = samp_clean(next[j].y);
        fetch(i + n_warps);
#pragma unroll
        for (int k = 0; k < 8; k++) {
            int id = block * SAMP_BLOCK + first_id + samp_column(k);
            if (id >= dist.V || !samp_is_kept(dist, logits[k], id)) logits[k] = -INFINITY;
        }
        partial = samp_merge(
            partial, samp_warp_partial(logits, params, samp_noise(params, block, group), id0),
            params);
    }
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[SAMP_MERGE_THREADS + warp] = partial;
    __syncthreads();
    return samp_merge_cta(shared[SAMP_MERGE_THREADS + threadIdx.x % n_warps], params, shared,
                          n_warps);
}

/* Step 5: draws an id from the listed blocks. With use_bounds, most of these blocks are skipped:
 *   - For each block it computes an upper bound of its Gumbel keys, relative to dist.max * scale,
 *     from the block's sum without the threshold, block_sum(block), and from the highest noise of
 *     its four groups.
 *   - Each of the 8 warps takes an eighth of the blocks and evaluates the one with the highest
 *     bound. This gives the highest Gumbel key of 8 blocks.
 *   - Then only the blocks with bounds not below this key are evaluated: a handful.
 * Bounds are not tight: a group has about a fourth of its block's sum, so a bound is too high by
 * about 2 in log2, and by the mass that the threshold removes. With use_bounds the sum in the
 * result is that of the evaluated blocks only; the caller replaces it. */
template <class S>
__device__ static inline samp_partial samp_draw(samp_dist &dist, const samp_params &params,
                                                bool use_bounds, samp_partial *shared,
                                                S block_sum) {
    constexpr int WARPS = FILTER_THREADS / 32;
    __shared__ int first_blocks[WARPS];
    const int thread = (int)threadIdx.x, lane = thread % 32;
    int *blocks = dist.blocks, n_blocks = dist.n_listed;
    if (use_bounds) {
        float max_bound = -INFINITY;
        int best_block = 0;
        for (int i = lane * WARPS + thread / 32; i < n_blocks; i += FILTER_THREADS) {
            const int block = blocks[i];
            uint32_t counter[4]; /* these four calls compile to one call of Philox */
#pragma unroll
            for (int group = 0; group < 4; group++)
                counter[group] = samp_noise(params, block, group);
            const float noise = samp_log2_exponential(
                min(min(counter[0], counter[1]), min(counter[2], counter[3])));
            const float bound = __fmaf_rn(__fsub_rn(dist.block_maxes[block], dist.max),
                                          params.scale, __fsub_rn(lg2(block_sum(block)), noise));
            dist.block_sums[block] = bound;
            if (!(bound <= max_bound) || i < FILTER_THREADS) max_bound = bound, best_block = block;
        }
        const uint32_t key = samp_logit_to_key(max_bound),
                       max_key = __reduce_max_sync(~0u,
                                                   lane * WARPS + thread / 32 < n_blocks ? key : 0);
        if (lane == __ffs((int)__ballot_sync(~0u, key == max_key)) - 1)
            first_blocks[thread / 32] = best_block, dist.block_sums[best_block] = -INFINITY;
        __syncthreads();
        dist.blocks = first_blocks, dist.n_listed = WARPS;
    }
    samp_partial partial = samp_empty_partial();
    for (bool has_more = use_bounds;; has_more = false) {
        partial = samp_merge(partial, samp_draw_blocks(dist, params, shared), params);
        if (!has_more) return partial;
        const float key = __fmaf_rn(__fsub_rn(partial.max, dist.max), params.scale, partial.gumbel),
                    min_bound = key - 0.01f - 1e-6f * fabsf(key); /* margin for rounding */
        dist.blocks = blocks;
        samp_list_blocks(
            dist, n_blocks, [&](int i) { return blocks[i]; },
            [&](int block) { return !(dist.block_sums[block] < min_bound); });
        if (!dist.n_listed) return partial;
    }
}

/* Returns the raw log-probability of the sampled id from its adjusted logit. It undoes the
 * adjustments, as samp_unadjust of toka.c does, and subtracts the raw log-sum-exp. */
__device__ static float samp_unadjust(const samp_filter &filter, const int *kv_ids, int id,
                                      double logit, float raw_max, float raw_log_sum,
                                      int *scratch) {
    int seen = 0, count = 0;
    for (int i = filter.first_penalized + (int)threadIdx.x; i < filter.n_history;
         i += FILTER_THREADS) {
        bool hit = samp_history_id(filter, kv_ids, i) == id;
        seen |= hit, count += hit && i >= filter.n_prompt;
    }
    seen = block_reduce(seen, scratch, op_max{});
    count = block_reduce(count, scratch, op_add{});
    if (count) logit += (double)filter.frequency * count + filter.presence;
    if (seen) logit = logit < 0 ? logit / filter.repetition : logit * filter.repetition;
    for (int i = 0; i < filter.n_bias; i++)
        if (filter.bias_ids[i] == id) logit -= filter.bias[i];
    logit = fmin(logit, (double)raw_max);
    return logit == -INFINITY ? -INFINITY : (float)(logit - raw_max - raw_log_sum);
}

/* ---- The kernel: see the head of this chapter ---- */

typedef struct samp_filter_args { /* arguments of a launch for n rows */
    const samp_params *params;    /* [n] */
    const samp_filter *filters;   /* [n] */
    float *logits;                /* [n][ld_logits] raw; adjusted in place */
    const samp_partial *partials; /* [n_blocks][ld_partials] */
    int ld_logits, ld_partials, V, n_blocks;
    uint32_t *best_keys;          /* [n] set to 0 */
    samp_top *tops;               /* tops of the step; the index of a row is filter.top_index */
    samp_result *results;         /* [n] */
    int *last_tokens;             /* [n_seqs] */
    const int *kv_ids;            /* ids of the tokens in the pages */
} samp_filter_args;

/* Dynamic shared memory of samp_filter_kernel. */
static size_t samp_filter_smem(int n_blocks) {
    return FILTER_WORKSPACE_WORDS * sizeof(uint32_t) + (size_t)n_blocks * 3 * sizeof(float);
}

/* CTAs per SM. On GPUs other than Hopper, shared memory has room for only one CTA with V 128,256;
 * toolkits before 12.8 spill registers if there are two CTAs. */
enum { FILTER_CTAS_PER_SM = HOPPER && NVCC_VERSION >= 1208 ? 2 : 1 };
__global__ static void __launch_bounds__(FILTER_THREADS, FILTER_CTAS_PER_SM)
    samp_filter_kernel(const __grid_constant__ samp_filter_args args) {
    /* [FILTER_WORKSPACE_WORDS] words: counts, bits, bins or candidates with their ids; then
     * block_maxes, block_sums and blocks of [n_blocks] each */
    extern __shared__ __align__(16) uint32_t workspace[];
    __shared__ samp_partial partials[FILTER_THREADS];
    __shared__ samp_mass scratch[33];
    __shared__ samp_filter filter;
    static_assert(FILTER_THREADS == 256, "samp_narrow: eight bits");
    static_assert(sizeof filter % 4 == 0 && sizeof filter / 4 <= FILTER_THREADS, "a word a thread");
    static_assert(2 * FILTER_CANDIDATES <= FILTER_WORKSPACE_WORDS &&
                      FILTER_BINS <= FILTER_WORKSPACE_WORDS,
                  "they reuse its memory");
    float *block_maxes = (float *)(workspace + FILTER_WORKSPACE_WORDS),
          *block_sums = block_maxes + args.n_blocks,
          *logits = args.logits + (size_t)blockIdx.x * args.ld_logits;
    grid_launch_dependents();
    grid_wait();
    const samp_params params = args.params[blockIdx.x];
    if (threadIdx.x < sizeof filter / 4)
        ((uint32_t *)&filter)[threadIdx.x] = ((const uint32_t *)(args.filters +
                                                                 blockIdx.x))[threadIdx.x];
    samp_partial partial = samp_empty_partial();
    if (threadIdx.x < SAMP_MERGE_THREADS)
        partial = samp_merge_strided(params, args.partials + blockIdx.x, args.ld_partials,
                                     args.n_blocks, (int)threadIdx.x, block_maxes);
    /* the result is bitwise that of samp_reduce_kernel */
    partial = samp_merge_cta(partial, params, partials, SAMP_MERGE_THREADS);
    float raw_max = partial.max, raw_log_sum = logf(partial.raw_sum);
    samp_dist dist = {logits, block_maxes, block_sums, (int *)(block_sums + args.n_blocks),
                      (float *)workspace, (int *)workspace + FILTER_CANDIDATES, args.V,
                      args.n_blocks, 0, -1, 0, 0, partial.max, samp_scale(params), -INFINITY, -1};
    if (filter.n_top)
        samp_top_logprobs(dist, filter.n_top, raw_log_sum, args.tops + filter.top_index, scratch);
    const int rank = filter.ranked ? samp_rank(dist, params.forced_id, scratch) : 0;
    bool adjusted = params.forced_id < 0 &&
                    (filter.n_bias || filter.n_allowed || filter.n_forbidden || filter.n_bad ||
                     filter.words.n_ends || filter.n_history || filter.mask);
    bool is_drawn = params.forced_id < 0 && params.scale > 0,
         has_cut = is_drawn &&
                   (filter.top_k > 0 || filter.top_p < 1 || filter.min_p_drop > -INFINITY);
    /* With top-k, only samp_draw could use the block sums, for its bounds. So they are not made. */
    const bool with_sums = adjusted && is_drawn && !filter.top_k;
    const samp_partial *row_partials = args.partials + blockIdx.x;
    for (int block = (int)threadIdx.x; block < args.n_blocks && with_sums; block += FILTER_THREADS)
        block_sums[block] = row_partials[(size_t)block * args.ld_partials].sum;
    if (adjusted)
        samp_adjust(dist, filter, args.kv_ids, logits, with_sums, workspace, scratch);
    if (adjusted && dist.max == -INFINITY) partial = samp_empty_partial();
    else if ((has_cut || adjusted) && dist.max > -INFINITY) {
        samp_mass mass = 0;
        if (is_drawn) mass = samp_truncate(dist, filter, adjusted ? 0 : partial.sum, scratch);
        else /* greedy: only the best logit is kept */
            dist.min_logit = dist.max, dist.last_tied = INT_MAX;
        samp_list_above(dist, dist.min_logit);
        const bool use_bounds = is_drawn && dist.n_listed > (mass ? FILTER_MANY_BLOCKS
                                                                  : 4 * FILTER_MANY_BLOCKS);
        if (use_bounds && !mass) {
            if (!samp_has_all_kept(dist)) dist.n_candidates = -1;
            mass = samp_kept_mass(dist, scratch);
        }
        partial = samp_draw(dist, params, use_bounds, partials, [&](int block) {
            /* if sums were not made: a weight is at most 1, so a sum is at most SAMP_BLOCK */
            return !adjusted   ? row_partials[(size_t)block * args.ld_partials].sum
                   : with_sums ? block_sums[block]
                               : (float)SAMP_BLOCK;
        });
        if (use_bounds) partial.max = dist.max, partial.sum = (float)mass / SAMP_MASS_ONE;
    }
    samp_result result = samp_make_result(params, partial, raw_max, raw_log_sum,
                                          filter.fallback_id);
    /* After a failed barrier between ranks the logits may be garbage: check the id. */
    if (adjusted && params.forced_id == SAMP_DRAW && (unsigned)result.id < (unsigned)args.V)
        result.logprob = samp_unadjust(filter, args.kv_ids, result.id,
                                       samp_clean(logits[result.id]), raw_max, raw_log_sum,
                                       (int *)scratch);
    if (threadIdx.x) return;
    result.rank = rank;
    args.results[blockIdx.x] = result, args.best_keys[blockIdx.x] = 0;
    if (params.seq >= 0) args.last_tokens[params.seq] = result.id;
}

/* ---- The plan of a step ---- */

enum {
    SAMP_LOGITS_BYTES = 320 << 20,  /* memory for stored logits, at least of SAMP_STORED_MAX rows */
    SAMP_LIST_BYTES = 16 << 20,     /* memory for lists in list_upload, besides that for the longest
                                       lists of one row */
    SAMP_PARTIAL_ROWS = 4096,       /* most rows whose partials fit; more if chunk_rows is more */
    SAMP_GRAPH_LIST_BYTES = 4 << 20 /* memory in the step's upload buffer: for filters and lists of
                                       a step that runs as a graph, for penalized rows of others */
};
static_assert(SAMP_PARTIAL_ROWS * sizeof(samp_partial) <= SAMP_RECV_BYTES, "as chapter 10 has it");
static_assert((int)SAMP_BLOCK == (int)TOKA_ID_BLOCK, "the ranks' partials assume it");

/* Returns the most bytes of the step's upload buffer that sampling needs. */
static size_t samp_upload_bytes(const toka_device *dev) {
    return (size_t)dev->options.max_samples * (sizeof(samp_params) + sizeof(int)) + 32 +
           SAMP_GRAPH_LIST_BYTES;
}

static void *samp_alloc_pinned(toka_device *dev, size_t bytes, const char *what) {
    void *memory = NULL;
    if (!dev->error.code)
        latch_error(dev, cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), what);
    return memory;
}

/* Sets best_keys of all rows to 0: no block has been evaluated yet. */
static void samp_reset_best_keys(toka_device *dev) {
    samp_plan *plan = dev->samp;
    latch_error(dev,
                cudaMemsetAsync(plan->best_keys, 0,
                                (size_t)plan->partial_rows * sizeof *plan->best_keys, dev->stream),
                "keys of sampling");
}

/* Allocates the plan and all memory of sampling (chapters 11 and 12). Errors are latched. Options,
 * shape and `hopper` of the device must be set, and with tensor ranks also its group. */
static void samp_open(toka_device *dev) {
    samp_plan *plan = (samp_plan *)calloc(1, sizeof *plan);
    size_t max_samples = (size_t)dev->options.max_samples, V = (size_t)dev->shape->V_all;
    const bool has_ranks = tp_size(dev) > 1;
    if (!plan) abort();
    dev->samp = plan;
    plan->n_blocks = ceil_div(dev->shape->V_all, SAMP_BLOCK),
    plan->ld_logits = plan->n_blocks * SAMP_BLOCK;
    plan->own_blocks = ceil_div(dev->shape->V, SAMP_BLOCK),
    plan->ld_own = plan->own_blocks * SAMP_BLOCK;
    plan->ranks_own_blocks = !has_ranks || dev->shape->V_all >= tp_size(dev) * SAMP_BLOCK;
    size_t fitting_rows = SAMP_LOGITS_BYTES / ((size_t)plan->ld_logits * sizeof(float));
    /* Above 256 rows a multiple of 256, so that the GEMM has whole tiles. */
    plan->chunk_rows = (int)(fitting_rows < SAMP_STORED_MAX ? SAMP_STORED_MAX
                             : fitting_rows > max_samples   ? max_samples
                             : fitting_rows > 256           ? fitting_rows & ~(size_t)255
                                                            : fitting_rows);
    plan->partial_rows = (int)(max_samples < SAMP_PARTIAL_ROWS ? max_samples : SAMP_PARTIAL_ROWS);
    /* With ranks, the receive buffers have room for the partials of SAMP_PARTIAL_ROWS rows. Without
     * ranks, rows are dimension y of a grid, which has at most 65,535 CTAs. */
    const int max_rows = has_ranks ? SAMP_PARTIAL_ROWS : 32768;
    if (plan->chunk_rows > max_rows) plan->chunk_rows = max_rows;
    if (plan->partial_rows < plan->chunk_rows) plan->partial_rows = plan->chunk_rows;
    plan->logits = (float *)dev_alloc(
        dev, (size_t)plan->chunk_rows * (size_t)plan->ld_logits * sizeof(float), "logits");
    plan->partials = (samp_partial *)dev_alloc(dev,
                                               (size_t)plan->n_blocks * (size_t)plan->partial_rows *
                                                   sizeof(samp_partial),
                                               "sampling partials");
    plan->best_keys = (uint32_t *)dev_alloc(dev, (size_t)plan->partial_rows * sizeof(uint32_t),
                                            "keys of sampling");
    if (!dev->error.code) samp_reset_best_keys(dev);
    plan->own_logits = has_ranks ? (float *)dev_alloc(dev,
                                                      (size_t)plan->chunk_rows *
                                                          (size_t)plan->ld_own * sizeof(float),
                                                      "logits")
                                 : plan->logits;
    if (has_ranks)
        plan->merged = (samp_partial *)dev_alloc(dev,
                                                 (size_t)plan->partial_rows * sizeof(samp_partial),
                                                 "sampling partials");
    if (has_ranks) group_recv_bytes(dev, &plan->recv_offset), dev->rank->logits = plan->logits;
    plan->results = plan->dev_results = (samp_result *)dev_alloc(dev,
                                                                 max_samples * sizeof(samp_result),
                                                                 "sampling");
    plan->tops = (samp_top *)dev_alloc(dev, max_samples * sizeof(samp_top),
                                       "top log-probabilities");
    plan->presence = (samp_presence *)dev_alloc(dev,
                                                (size_t)plan->partial_rows *
                                                    (size_t)plan->n_blocks * 4 *
                                                    sizeof(samp_presence),
                                                "presence bits");
    plan->penalized_index = (int *)malloc(max_samples * sizeof(int));
    for (plan->n_mask_places = 2; (size_t)plan->n_mask_places < 2 * max_samples;)
        plan->n_mask_places *= 2;
    plan->masks = (samp_mask *)calloc((size_t)plan->n_mask_places, sizeof *plan->masks);
    if (!plan->penalized_index || !plan->masks) abort();
    for (samp_host_results &host : plan->host_results) {
        host.results = (samp_result *)samp_alloc_pinned(dev, max_samples * sizeof(samp_result),
                                                        "pinned sampling results");
        host.tops = (samp_top *)samp_alloc_pinned(dev, max_samples * sizeof(samp_top),
                                                  "pinned top log-probabilities");
        host.order = (int *)malloc(max_samples * sizeof(int));
        if (!host.order) abort();
    }
    const gemm_variant *head = &samp_lm_head_variant;
    if (dev->hopper)
        latch_error(dev,
                    cudaFuncSetAttribute(head->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         head->smem_bytes),
                    "LM head");
    /* the longest lists of one row */
    const size_t row_list_bytes = 4 * ((size_t)dev->shape->max_len / TOKA_GPU_PAGE_TOK + 1 + 4 * V +
                                       (size_t)ceil_div((int)V, 32) + 2 * TOKA_MAX_BAD_IDS) +
                                  TOKA_MAX_WORD_RULES * sizeof(toka_word_rule);
    upload_open(dev, &plan->list_upload,
                max_samples * sizeof(samp_filter) + SAMP_LIST_BYTES + row_list_bytes + 64, false);
}

static void samp_close(toka_device *dev) {
    samp_plan *plan = dev->samp;
    if (!plan) return;
    for (samp_host_results &host : plan->host_results) {
        cudaFreeHost(host.results);
        cudaFreeHost(host.tops);
        free(host.order);
    }
    upload_close(&plan->list_upload);
    free(plan->penalized_index);
    free(plan->masks);
    free(plan);
    dev->samp = NULL;
}

static bool samp_has_penalties(const toka_sampling *sampling) {
    return sampling->repetition_penalty != 1 || sampling->frequency_penalty != 0 ||
           sampling->presence_penalty != 0;
}
/* Returns whether a row is filtered, penalties left aside. */
static bool samp_has_filter(const toka_sample_row *row, int V) {
    const toka_sampling *sampling = row->sampling;
    if (sampling->logprobs > 0 || row->wants_rank) return true;
    if (row->scored_id >= 0) return false;
    if (sampling->n_bias || sampling->n_allowed || row->n_forbidden || sampling->n_bad ||
        row->words || toka_has_mask(row))
        return true;
    return sampling->temperature > 0 && ((sampling->top_k > 0 && sampling->top_k < V) ||
                                         sampling->top_p < 1 || sampling->min_p > 0);
}
/* Returns whether a row is filtered or penalized, by the definition of chapter 11. */
static bool samp_is_filtered(const toka_sample_row *row, int V) {
    return row->sampling && (samp_has_filter(row, V) ||
                             (row->scored_id < 0 && samp_has_penalties(row->sampling)));
}
/* Returns whether a row is penalized. */
static bool samp_is_penalized(const toka_sample_row *row, int V) {
    const toka_sampling *sampling = row->sampling;
    return sampling && row->scored_id < 0 && samp_has_penalties(sampling) &&
           sampling->frequency_penalty == 0 && !toka_wants_logprob(row) && !samp_has_filter(row, V);
}

static int samp_n_top(const toka_sampling *sampling, int V) {
    return max(0, min(min(sampling->logprobs, TOKA_MAX_LOGPROBS), V));
}

/* Returns how many tokens of its history the row needs: all or none. */
static int samp_n_history(const toka_sample_row *row) {
    const toka_sampling *sampling = row->sampling;
    return row->scored_id < 0 && (samp_has_penalties(sampling) || sampling->n_bad || row->words)
               ? row->n_history
               : 0;
}
/* Returns the number of ids of all bad words. */
static int samp_n_bad_ids(const toka_sampling *sampling) {
    int n_ids = 0;
    for (int i = 0; i < sampling->n_bad; i++) n_ids += sampling->bad_lengths[i];
    return n_ids;
}

static size_t samp_mask_bytes(int V) { return 4 * (size_t)ceil_div(V, 32); }

/* Returns the place of a mask in the hash table. If the current list of filters does not have the
 * mask yet, the place is free. */
static samp_mask *samp_find_mask(samp_plan *plan, const uint32_t *mask) {
    const size_t last = (size_t)plan->n_mask_places - 1;
    size_t at = (size_t)((uint64_t)(uintptr_t)mask * 0x9E3779B97F4A7C15u >> 32) & last;
    while (plan->masks[at].list == plan->mask_list && plan->masks[at].host != mask)
        at = (at + 1) & last;
    return &plan->masks[at];
}
/* Returns the most bytes of an upload buffer that the mask of a row needs: 0 if another row of the
 * current list of filters has it. A row that awaits its mask may need one of its own. */
static size_t samp_row_mask_bytes(samp_plan *plan, const toka_sample_row *row, int V) {
    const bool is_new = row->mask ? samp_find_mask(plan, row->mask)->list != plan->mask_list
                                  : row->awaits_mask;
    return is_new ? samp_mask_bytes(V) + 16 : 0;
}

/* Returns the most bytes of an upload buffer that the lists of a row need, without its mask.
 * prev_row: the filtered row before it, with which it may share lists (samp_fill_filter), or NULL.
 * V: V_all. */
static size_t samp_list_bytes(const toka_sample_row *row, const toka_sample_row *prev_row) {
    const toka_sampling *sampling = row->sampling;
    size_t n = (size_t)ceil_div(samp_n_history(row), TOKA_GPU_PAGE_TOK) + (size_t)row->n_forbidden;
    if (!prev_row || prev_row->sampling != sampling)
        n += 2 * (size_t)sampling->n_bias + (size_t)sampling->n_allowed +
             (size_t)samp_n_bad_ids(sampling) + (size_t)sampling->n_bad;
    if (row->words && (!prev_row || prev_row->words != row->words))
        n += ((size_t)row->words->n_steps + (size_t)row->words->n_ends) *
             (sizeof(toka_word_rule) / 4);
    return 4 * n + 9 * 16;
}

/* Returns whether any row of the step is filtered or penalized. */
static bool samp_any_filtered(const toka_device *dev, const toka_step *step) {
    for (int i = 0; i < step->n_samples; i++)
        if (samp_is_filtered(&step->samples[i], dev->shape->V_all)) return true;
    return false;
}

/* Returns whether the step, padded to n_rows rows, can run as one pass in which all rows are
 * handled as filtered rows: in the order of its samples, with all filters and lists in the step's
 * upload buffer. With tensor ranks it cannot: the ranks would have to exchange the logits of plain
 * rows, too. */
static bool samp_fits_one_pass(const toka_device *dev, const toka_step *step, int n_rows) {
    samp_plan *plan = dev->samp;
    size_t bytes = (size_t)n_rows * sizeof(samp_filter) + 16;
    const int V = dev->shape->V_all;
    const toka_sample_row *prev_row = NULL;
    plan->mask_list++;
    for (int i = 0; i < step->n_samples; i++) {
        const toka_sample_row *row = &step->samples[i];
        const bool filtered = samp_is_filtered(row, V);
        if (filtered) {
            bytes += samp_list_bytes(row, prev_row) + samp_row_mask_bytes(plan, row, V);
            if (row->mask)
                *samp_find_mask(plan, row->mask) = samp_mask{row->mask, NULL, -1, plan->mask_list};
        }
        prev_row = filtered ? row : NULL;
    }
    return tp_size(dev) == 1 && n_rows <= plan->chunk_rows && bytes <= SAMP_GRAPH_LIST_BYTES;
}

/* Returns whether the graph of a step of this size has sampling nodes, which are updated before
 * each launch (graph_sampling_role). With tensor ranks it has none, because the sampling kernels of
 * ranks are not updated. If the logits of all rows do not fit in memory, the step runs in several
 * passes, which graphs cannot do. */
static bool samp_has_graph_nodes(const toka_device *dev, const toka_step *step) {
    return tp_size(dev) == 1 && step->n_samples <= GRAPH_MAX_ROWS &&
           step->n_samples <= dev->samp->chunk_rows;
}

/* Chooses the penalized rows that are handled as plain rows: if `allowed`, as many as fit into the
 * part of the step's upload buffer that graphs use for filters. Returns whether any other row must
 * be handled as filtered. */
static bool samp_choose_penalized(toka_device *dev, const toka_step *step, bool allowed) {
    samp_plan *plan = dev->samp;
    const int V = dev->shape->V_all;
    size_t bytes = 16;
    bool any_filtered = false;
    plan->n_penalized = 0, plan->penalties = samp_penalties{};
    for (int i = 0; i < step->n_samples; i++) {
        const toka_sample_row *row = &step->samples[i];
        const size_t row_bytes = sizeof(samp_penalized) + 16 +
                                 4 * (size_t)ceil_div(row->n_history, TOKA_GPU_PAGE_TOK);
        const bool chosen = allowed && samp_is_penalized(row, V) &&
                            bytes + row_bytes <= SAMP_GRAPH_LIST_BYTES;
        plan->penalized_index[i] = chosen ? plan->n_penalized++ : -1;
        bytes += chosen ? row_bytes : 0;
        any_filtered |= !chosen && samp_is_filtered(row, V);
    }
    return any_filtered;
}
/* Writes the penalized rows that are handled as plain rows into the step's upload buffer. */
static void samp_plan_penalized(toka_device *dev, const toka_step *step) {
    samp_plan *plan = dev->samp;
    samp_penalized *penalized;
    plan->penalized = (samp_penalized *)upload_alloc(&dev->upload,
                                                     (size_t)plan->n_penalized * sizeof *penalized,
                                                     (void **)&penalized);
    for (int i = 0; i < step->n_samples && plan->n_penalized; i++) {
        const toka_sample_row *row = &step->samples[i];
        const float repetition = row->sampling ? row->sampling->repetition_penalty : 1;
        if (plan->penalized_index[i] < 0) continue;
        penalized[plan->penalized_index[i]] = samp_penalized{
            (const int *)upload_put(&dev->upload, row->pages,
                                    4 * (size_t)ceil_div(row->n_history, TOKA_GPU_PAGE_TOK)),
            repetition == 1 ? row->n_prompt : 0, row->n_history, row->n_prompt, repetition,
            row->sampling->presence_penalty};
    }
}

/* Decides at the start of a step which rows are handled as plain and which as filtered, and writes
 * the parameters of all rows into the step's upload buffer. samp_plan_filters or samp_launch adds
 * the filters and their lists.
 * Plain rows come first, then filtered rows. In two cases the rows keep the order of the step's
 * samples: in a graph, and because of the fused RMSNorm in steps of up to FUSE_NORM_MAX_ROWS rows
 * that fit in one pass. If a row is filtered there, all rows are handled as filtered, and a plain
 * row gets a filter that does nothing; its result is the same.
 *
 * If samp_has_graph_nodes is true, the kernels store the results into pinned host memory. So the
 * host has them when the step is done. A copy after the last kernel would delay the next step by
 * 5 us (test/results/kernel-choices.md). Each in-flight step has its own pinned memory, so a graph
 * must update the kernel that stores the results. With tensor ranks samp_merge_ranks_kernel stores
 * them, which graphs do not update. So its results are stored on the device and copied. */
static void samp_plan_step(toka_device *dev, const toka_step *step) {
    samp_plan *plan = dev->samp;
    samp_host_results *host = &plan->host_results[dev->last_begun];
    samp_params *params;
    int *rows;
    assert(step->n_samples <= dev->options.max_samples);
    const bool one_pass = step->n_samples <= FUSE_NORM_MAX_ROWS &&
                          samp_fits_one_pass(dev, step, step->n_samples),
               any_filtered = samp_choose_penalized(dev, step, !graph_has_head(dev) && !one_pass);
    int n_plain = 0, end = step->n_samples;
    plan->in_order = !any_filtered || graph_has_head(dev) || one_pass;
    for (int i = 0; i < step->n_samples && !plan->in_order; i++)
        host->order[plan->penalized_index[i] < 0 &&
                            samp_is_filtered(&step->samples[i], dev->shape->V_all)
                        ? --end
                        : n_plain++] = i;
    for (int i = 0; i < step->n_samples && plan->in_order; i++) host->order[i] = i;
    plan->n_plain = any_filtered ? n_plain : step->n_samples, host->n_tops = 0,
    host->caller_results = NULL;
    plan->results = samp_has_graph_nodes(dev, step) ? host->results : plan->dev_results;
    plan->params = (samp_params *)upload_alloc(&dev->upload,
                                               (size_t)step->n_samples * sizeof *params,
                                               (void **)&params);
    plan->rows = (int *)upload_alloc(&dev->upload, (size_t)step->n_samples * sizeof *rows,
                                     (void **)&rows);
    for (int i = 0; i < step->n_samples; i++) {
        const toka_sample_row *row = &step->samples[host->order[i]];
        const toka_sampling *sampling = row->sampling;
        const int penalized_index = plan->penalized_index[host->order[i]];
        uint64_t seed = sampling ? sampling->seed : 0;
        float temperature = sampling ? sampling->temperature : 0;
        assert(row->row >= 0 && row->row < step->T && row->scored_id < dev->shape->V_all &&
               (sampling || row->scored_id >= 0));
        double scale = temperature > 0 ? 1.4426950408889634 / temperature : 0;
        uint32_t counter[4] = {row->sample, row->position, 0, 0};
        philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
        rows[i] = row->row;
        params[i] = samp_params{{(uint32_t)seed, (uint32_t)(seed >> 32)},
                                row->sample,
                                row->position,
                                counter[0],
                                scale > 3e38 ? 3e38f : (float)scale,
                                row->scored_id >= 0       ? row->scored_id
                                : toka_wants_logprob(row) ? SAMP_DRAW
                                : penalized_index >= 0    ? SAMP_DRAW_PENALIZED - penalized_index
                                                          : SAMP_DRAW_NO_LOGPROB,
                                row->seq < dev->options.n_seqs ? row->seq : -1};
    }
}

/* Uploads the bad words given as ids. */
static void samp_put_bad_ids(upload_buffer *upload, const toka_sampling *sampling,
                             samp_filter *filter) {
    int *ends, n_ids = 0;
    filter->bad_ids = (const int *)upload_put(upload, sampling->bad_ids,
                                              (size_t)samp_n_bad_ids(sampling) * 4);
    filter->bad_ends = (const int *)upload_alloc(upload, (size_t)sampling->n_bad * 4,
                                                 (void **)&ends);
    for (int i = 0; i < sampling->n_bad; i++) ends[i] = n_ids += sampling->bad_lengths[i];
}

/* Uploads the bad words given as texts, unless the previous row has the same. */
static void samp_put_words(upload_buffer *upload, const toka_sample_row *row,
                           const toka_sample_row *prev_row, const samp_filter *prev_filter,
                           samp_filter *filter) {
    const toka_word_table *table = row->words;
    if (!table) return;
    filter->words = *table, filter->keep_special = row->keep_special;
    if (prev_row && prev_row->words == table) {
        filter->words = prev_filter->words;
        return;
    }
    filter->words.steps = (const toka_word_rule *)upload_put(
        upload, table->steps, (size_t)table->n_steps * sizeof *table->steps);
    filter->words.ends = (const toka_word_rule *)upload_put(
        upload, table->ends, (size_t)table->n_ends * sizeof *table->ends);
}

/* Uploads the mask of a row, if it has one and no row before it has the same. Sets the filter's
 * fallback id, too, unless other lists of ids than the mask take part in it. */
static void samp_put_mask(toka_device *dev, upload_buffer *upload, const toka_sample_row *row,
                          samp_filter *filter) {
    samp_plan *plan = dev->samp;
    const int V = dev->shape->V_all;
    if (!row->mask) return;
    samp_mask *mask = samp_find_mask(plan, row->mask);
    if (mask->list != plan->mask_list)
        *mask = samp_mask{row->mask,
                          (const uint32_t *)upload_put(upload, row->mask, samp_mask_bytes(V)), -1,
                          plan->mask_list};
    filter->mask = mask->device;
    if (row->scored_id >= 0 || row->sampling->n_allowed || row->n_forbidden) return;
    if (mask->fallback_id < 0) mask->fallback_id = toka_fallback_id(row, V);
    filter->fallback_id = mask->fallback_id;
}

/* Fills in the filter of one row. If the previous row belongs to the same request, both use the
 * same uploaded lists of bias, allowed ids and bad words. */
static void samp_fill_filter(toka_device *dev, upload_buffer *upload, const toka_sample_row *row,
                             const toka_sample_row *prev_row, const samp_filter *prev_filter,
                             samp_filter *filter) {
    const toka_sampling *sampling = row->sampling;
    int V = dev->shape->V_all;
    bool same_request = prev_row && prev_row->sampling == sampling;
    *filter = samp_filter{};
    filter->n_history = samp_n_history(row), filter->n_prompt = row->n_prompt;
    filter->pages = (const int *)upload_put(
        upload, row->pages, (size_t)ceil_div(filter->n_history, TOKA_GPU_PAGE_TOK) * 4);
    /* only the repetition penalty looks at the prompt */
    filter->first_penalized = !samp_has_penalties(sampling)       ? filter->n_history
                              : sampling->repetition_penalty == 1 ? min(row->n_prompt,
                                                                        filter->n_history)
                                                                  : 0;
    if (same_request)
        filter->bad_ids = prev_filter->bad_ids, filter->bad_ends = prev_filter->bad_ends;
    else samp_put_bad_ids(upload, sampling, filter);
    filter->n_bad = row->scored_id < 0 ? sampling->n_bad : 0;
    samp_put_words(upload, row, prev_row, prev_filter, filter);
    filter->bias_ids = same_request ? prev_filter->bias_ids
                              : (const int *)upload_put(upload, sampling->bias_ids,
                                                        (size_t)sampling->n_bias * 4);
    filter->bias = same_request ? prev_filter->bias
                          : (const float *)upload_put(upload, sampling->bias_values,
                                                      (size_t)sampling->n_bias * 4);
    filter->allowed = same_request ? prev_filter->allowed
                             : (const int *)upload_put(upload, sampling->allowed_ids,
                                                       (size_t)sampling->n_allowed * 4);
    filter->forbidden = (const int *)upload_put(upload, row->forbidden,
                                                (size_t)row->n_forbidden * 4);
    filter->n_bias = sampling->n_bias, filter->n_allowed = sampling->n_allowed,
    filter->n_forbidden = row->n_forbidden;
    const bool same_ids = same_request && prev_row->mask == row->mask && prev_row->scored_id < 0 &&
                          !prev_row->n_forbidden && !row->n_forbidden;
    filter->fallback_id = -1;
    samp_put_mask(dev, upload, row, filter);
    if (filter->fallback_id < 0)
        filter->fallback_id = row->scored_id >= 0 ? 0
                              : same_ids          ? prev_filter->fallback_id
                                                  : toka_fallback_id(row, V);
    filter->temperature = sampling->temperature, filter->top_p = sampling->top_p,
    filter->top_k = sampling->top_k < V ? sampling->top_k : 0;
    filter->min_p_drop = sampling->min_p > 0 ? sampling->temperature * log((double)sampling->min_p)
                                             : -INFINITY;
    filter->repetition = sampling->repetition_penalty,
    filter->frequency = sampling->frequency_penalty, filter->presence = sampling->presence_penalty;
    filter->n_top = samp_n_top(sampling, V), filter->ranked = row->wants_rank;
    if (filter->n_top) filter->top_index = dev->samp->host_results[dev->last_begun].n_tops++;
}

/* Writes the filters of rows first, first + 1 .. of the plan, with their lists, into an upload
 * buffer: as many as fit, at most max_rows. Returns their number. */
static int samp_fill_filters(toka_device *dev, const toka_step *step, upload_buffer *upload,
                             int first, int max_rows, samp_filter **filters) {
    const int *order = dev->samp->host_results[dev->last_begun].order;
    samp_filter *row_filters;
    const int V = dev->shape->V_all;
    int n_filled = 0;
    dev->samp->mask_list++;
    *filters = (samp_filter *)upload_alloc(upload, (size_t)max_rows * sizeof *row_filters,
                                           (void **)&row_filters);
    for (const toka_sample_row *prev_row = NULL; n_filled < max_rows; n_filled++) {
        const toka_sample_row *row = &step->samples[order[first + n_filled]];
        if (!samp_is_filtered(row, V)) {
            row_filters[n_filled] = samp_filter{
                .min_p_drop = -INFINITY, .temperature = 1, .top_p = 1, .repetition = 1};
            prev_row = NULL;
            continue;
        }
        const size_t bytes = samp_list_bytes(row, prev_row) +
                             samp_row_mask_bytes(dev->samp, row, V);
        if (upload->used + bytes > upload->cap) break;
        samp_fill_filter(dev, upload, row, prev_row, row_filters + n_filled - 1,
                         row_filters + n_filled);
        prev_row = row;
    }
    return n_filled;
}
/* For a step that runs as a graph: writes the filters of all rows into the step's upload buffer.
 * There is room: see samp_fits_one_pass. */
static void samp_plan_filters(toka_device *dev, const toka_step *step) {
    samp_plan *plan = dev->samp;
    plan->filters = NULL;
    if (plan->n_plain < step->n_samples &&
        samp_fill_filters(dev, step, &dev->upload, 0, step->n_samples, &plan->filters) <
            step->n_samples)
        assert(false);
}
/* For a step that is launched kernel by kernel: writes filters by samp_fill_filters and uploads
 * them. Returns their number, or 0 after an error. If the lists of one row do not fit, this is an
 * error. */
static int samp_upload_filters(toka_device *dev, const toka_step *step, int first, int max_rows,
                               samp_filter **filters) {
    upload_buffer *upload = &dev->samp->list_upload;
    upload_begin(dev, upload);
    const int n_filled = samp_fill_filters(dev, step, upload, first, max_rows, filters);
    if (!n_filled && !dev->error.code) {
        dev->error.code = TOKA_E_DEVICE;
        snprintf(dev->error.msg, sizeof dev->error.msg,
                 "GPU: one row's sampling lists take %zu bytes, expected at most %zu",
                 samp_list_bytes(
                     &step->samples[dev->samp->host_results[dev->last_begun].order[first]], NULL) +
                     samp_mask_bytes(dev->shape->V_all),
                 upload->cap - upload->used);
    }
    upload_send(dev, upload);
    return dev->error.code ? 0 : n_filled;
}

/* ---- The op ---- */

/* Sets the role of the kernels that are launched next. on = true: they are sampling nodes, which
 * depend on whether the step has filtered rows: the LM head, if it writes partials, and the kernel
 * that turns partials into results. In a replay, a launch of them updates the next node of the
 * graph. In a capture, it launches the kernel and records its node. on = false: ordinary
 * launches. */
static void graph_sampling_role(toka_device *dev, bool on) {
    const bool records = dev->graphs.capturing && samp_has_graph_nodes(dev, dev->step);
    dev->graphs.role = !on                    ? GRAPH_ROLE_LAUNCH
                       : graph_is_replay(dev) ? GRAPH_ROLE_UPDATE
                       : records              ? GRAPH_ROLE_RECORD
                                              : GRAPH_ROLE_LAUNCH;
}

/* Launches the kernels that turn partials into results, for rows first .. first + n_rows - 1 of the
 * plan. Their partials are the columns 0 .. n_rows - 1. The first n_plain rows are plain. The
 * others are filtered: filters[0] and the first row of logits belong to row first + n_plain. */
static void samp_launch_results(toka_device *dev, int first, int n_rows, int n_plain,
                                const samp_filter *filters, float *logits) {
    samp_plan *plan = dev->samp;
    const samp_params *params = plan->params + first;
    samp_result *results = plan->results + first;
    graph_sampling_role(dev, true);
    const samp_reduce_args reduce = {params,         plan->partials, plan->partial_rows,
                                     plan->n_blocks, n_plain,        plan->best_keys,
                                     NULL,           results,        dev->last_tokens};
    if (n_plain)
        launch_dependent(dev, "sampling", samp_reduce_kernel,
                         {dim3((unsigned)ceil_div(n_plain, SAMP_REDUCE_ROWS)), 256}, reduce);
    samp_filter_args args = {params + n_plain, filters, logits, plan->partials + n_plain,
                             plan->ld_logits, plan->partial_rows, dev->shape->V_all, plan->n_blocks,
                             plan->best_keys + n_plain, plan->tops, results + n_plain,
                             dev->last_tokens, dev->kv_ids};
    if (n_rows > n_plain)
        launch_dependent(dev, "filters", samp_filter_kernel,
                         {dim3((unsigned)(n_rows - n_plain)), FILTER_THREADS,
                          samp_filter_smem(plan->n_blocks)},
                         args);
    graph_sampling_role(dev, false);
}

/* Sets plan->penalties for the plain rows of a pass, first .. first + n_rows - 1 of the plan, and
 * launches the kernel that makes their presence bits. */
static void samp_launch_presence(toka_device *dev, int first, int n_rows) {
    samp_plan *plan = dev->samp;
    const int *order = plan->host_results[dev->last_begun].order;
    int first_index = 0, n_penalized = 0;
    for (int i = 0; i < first + n_rows && plan->n_penalized; i++)
        (i < first ? first_index : n_penalized) += plan->penalized_index[order[i]] >= 0;
    plan->penalties = samp_penalties{};
    if (!n_penalized) return;
    launch_dependent(dev, "presence bits", samp_presence_kernel,
                     {dim3((unsigned)n_penalized), 256,
                      (size_t)plan->n_blocks * 4 * sizeof(samp_presence)},
                     plan->penalized + first_index, dev->kv_ids, plan->presence, plan->n_blocks);
    plan->penalties =
        samp_penalties{plan->penalized, plan->presence, first_index, plan->n_blocks};
}

/* As samp_launch_results, for rows with stored raw logits but without partials: makes the partials
 * first. */
static void samp_from_logits(toka_device *dev, int first, int n_rows, int n_plain,
                             const samp_filter *filters) {
    samp_plan *plan = dev->samp;
    launch_dependent(dev, "groups", samp_partials_kernel,
                     {dim3((unsigned)ceil_div(plan->n_blocks, 32), (unsigned)n_rows), 128},
                     plan->params + first,
                     samp_stored{plan->logits, plan->ld_logits, 0, dev->shape->V_all},
                     plan->partials, plan->partial_rows, plan->penalties);
    samp_launch_results(dev, first, n_rows, n_plain, filters,
                        plan->logits + (size_t)n_plain * (size_t)plan->ld_logits);
}

/* For plain rows with tensor ranks: launches the kernels that turn the partials of each rank's own
 * ids into results. If !has_partials, makes these partials first, from the stored logits of the own
 * ids. */
static void samp_merge_ranks(toka_device *dev, int first, int n_rows, bool has_partials) {
    samp_plan *plan = dev->samp;
    const samp_params *params = plan->params + first;
    const samp_reduce_args reduce = {
        params,          plan->partials, plan->partial_rows,    plan->own_blocks, n_rows,
        plan->best_keys, plan->merged,   plan->results + first, dev->last_tokens};
    if (!has_partials)
        launch_dependent(dev, "groups", samp_partials_kernel,
                         {dim3((unsigned)ceil_div(plan->own_blocks, 32), (unsigned)n_rows), 128},
                         params,
                         samp_stored{plan->own_logits, plan->ld_own, dev->shape->v0, dev->shape->V},
                         plan->partials, plan->partial_rows, plan->penalties);
    launch_dependent(dev, "sampling", samp_reduce_kernel,
                     {dim3((unsigned)ceil_div(n_rows, SAMP_REDUCE_ROWS)), 256}, reduce);
    launch_barrier_kernel(dev, "sampling", 1, samp_merge_ranks_kernel, plan->recv_offset, params,
                          plan->merged, n_rows, plan->results + first, dev->last_tokens);
}

/* All-gather of the logits of n_rows rows: each tensor rank stores the logits of its own ids, rows
 * first_row .. of plan->own_logits, into plan->logits of all ranks. */
static void samp_gather_logits(toka_device *dev, int first_row, int n_rows) {
    samp_plan *plan = dev->samp;
    samp_gather_args args = {};
    for (int rank = 0; rank < tp_size(dev); rank++)
        args.logits[rank] = dev->rank[rank - dev->options.tp_rank].logits;
    args.own_logits = plan->own_logits + (size_t)first_row * (size_t)plan->ld_own;
    args.ld_logits = plan->ld_logits, args.ld_own = plan->ld_own;
    args.v0 = dev->shape->v0, args.V = dev->shape->V, args.n_rows = n_rows;
    launch_barrier_kernel(dev, "logits of all ranks", 2, samp_gather_logits_kernel, args);
}

/* ---- samp_cap_kernel: soft caps of stored logits ----
 *
 *   logits   float32 [n][ld], of V ids; replaced by cap * tanh(logits / cap)
 *
 * Grid (ceil(V / 1024), n), block 256: 4 ids per thread. Moves 8*n*V bytes: bound by copy
 * bandwidth. Where the LM head makes partials, its epilogue applies the cap. */
__global__ static void __launch_bounds__(256)
    samp_cap_kernel(float *logits, int ld, int V, float cap) {
    float *row = logits + (size_t)blockIdx.y * (size_t)ld;
    grid_launch_dependents();
    grid_wait();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int id = (int)(blockIdx.x * 1024 + 256 * k + threadIdx.x);
        if (id < V) row[id] = samp_cap(row[id], cap);
    }
}
/* Caps the logits of n_rows rows, of this rank's ids, if the model has soft-capped logits. */
static void samp_cap_logits(toka_device *dev, int n_rows) {
    const float cap = dev->shape->logit_cap;
    if (cap == 0) return;
    launch_dependent(dev, "soft cap", samp_cap_kernel,
                     {dim3((unsigned)ceil_div(dev->V, 1024), (unsigned)n_rows), 256},
                     dev->samp->own_logits, dev->samp->ld_own, dev->V, cap);
}

/* The LM head on wgmma, for rows first .. first + n_rows - 1 of the plan. It makes the partials of
 * all these rows, and stores the logits of rows first + first_stored and later ones. */
static void samp_lm_head(toka_device *dev, int first, int n_rows, int first_stored) {
    samp_plan *plan = dev->samp;
    gemm_args args = {
        .M = n_rows, .x = dev->xn + (size_t)first * dev->E, .ldx = dev->E, .w = &dev->lm_head};
    samp_fused fused = {plan->params + first, plan->partials, plan->best_keys, plan->own_logits,
                        plan->partial_rows, plan->ld_own, dev->shape->v0, dev->shape->V,
                        first_stored, dev->shape->logit_cap, {}};
    /* Else a tile is not a block, and the partials come from gathered logits. */
    if (plan->ranks_own_blocks) fused.penalties = plan->penalties;
    gemm_plan head_plan = {&samp_lm_head_variant, n_rows > 128 ? 2 : 1, 8};
    graph_sampling_role(dev, true);
    gemm_launch(dev, head_plan, &args, &fused);
    graph_sampling_role(dev, false);
}

/* Returns whether the LM head of n_rows rows writes partials. */
static bool samp_is_fused(const toka_device *dev, const toka_step *step, int n_rows) {
    return dev->hopper && !step->logits && n_rows > SAMP_STORED_MAX;
}

/* If the caller (a test) wants the raw logits: copies those of n_rows rows from plan->logits to the
 * host. */
static void samp_copy_raw_logits(toka_device *dev, const toka_step *step, int first, int n_rows) {
    samp_plan *plan = dev->samp;
    const size_t V = (size_t)dev->shape->V_all;
    for (int i = 0; step->logits && !dev->options.tp_rank && i < n_rows; i++) {
        float *to = step->logits + (size_t)plan->host_results[dev->last_begun].order[first + i] * V;
        const float *from = plan->logits + (size_t)i * plan->ld_logits;
        latch_error(
            dev, cudaMemcpyAsync(to, from, V * sizeof(float), cudaMemcpyDeviceToHost, dev->stream),
            "logits");
    }
}

/* All kernels from dev->xn to results, for rows first .. first + n_rows - 1 of the plan. The first
 * n_plain of them are plain. norm_ready: as in gemm_args; then first is 0. With tensor ranks, each
 * rank has the logits of its own ids. Plain rows use samp_merge_ranks, unless a block straddles two
 * ranks or the caller wants the logits. Other rows use gathered logits. */
static void samp_launch_rows(toka_device *dev, const toka_step *step, int first, int n_rows,
                             int n_plain, const samp_filter *filters, bool norm_ready) {
    samp_plan *plan = dev->samp;
    const bool has_ranks = tp_size(dev) > 1, fused = samp_is_fused(dev, step, n_rows);
    /* plain rows whose partials the ranks exchange */
    const int n_exchanged = !has_ranks || step->logits || !plan->ranks_own_blocks ? 0 : n_plain;
    const int first_stored = fused && (!has_ranks || plan->ranks_own_blocks) ? n_plain : 0;
    gemm_args args = {n_rows, dev->xn + (size_t)first * dev->E, dev->E, &dev->lm_head,
                      (bf16 *)plan->own_logits, plan->ld_own, EPI_LOGITS};
    args.norm_ready = norm_ready;
    assert(!norm_ready || (!first && !fused));
    samp_launch_presence(dev, first, n_plain);
    if (fused) samp_lm_head(dev, first, n_rows, first_stored);
    else gemm(dev, &args), samp_cap_logits(dev, n_rows);
    if (n_exchanged) samp_merge_ranks(dev, first, n_exchanged, fused);
    if (n_exchanged == n_rows && has_ranks) return;
    if (has_ranks) samp_gather_logits(dev, n_exchanged - first_stored, n_rows - n_exchanged);
    samp_copy_raw_logits(dev, step, first, n_rows);
    /* The LM head has raised best_keys of all n_rows rows. samp_merge_ranks and samp_from_logits
     * both clear entries from 0 on, for their own numbers of rows, so some would stay raised. */
    if (has_ranks && fused) samp_reset_best_keys(dev);
    if (fused && !has_ranks)
        samp_launch_results(dev, first, n_rows, n_plain, filters,
                            plan->logits +
                                (size_t)(n_plain - first_stored) * (size_t)plan->ld_logits);
    else
        samp_from_logits(dev, first + n_exchanged, n_rows - n_exchanged, n_plain - n_exchanged,
                         filters);
}

/* Enqueues the download of the results. */
static void samp_download(toka_device *dev, const toka_step *step, toka_sample_result *results) {
    samp_plan *plan = dev->samp;
    samp_host_results *host = &plan->host_results[dev->last_begun];
    size_t bytes = (size_t)step->n_samples * sizeof(samp_result),
           top_bytes = (size_t)host->n_tops * sizeof(samp_top);
    host->caller_results = results;
    if (plan->results != host->results)
        latch_error(dev,
                    cudaMemcpyAsync(host->results, plan->results, bytes, cudaMemcpyDeviceToHost,
                                    dev->stream),
                    "sampling");
    if (top_bytes)
        latch_error(dev,
                    cudaMemcpyAsync(host->tops, plan->tops, top_bytes, cudaMemcpyDeviceToHost,
                                    dev->stream),
                    "sampling");
}

/* Copies the downloaded results of a finished step to the caller's results, in the caller's
 * order. */
static void samp_collect(toka_device *dev, const toka_step *step, const samp_host_results *host) {
    for (int i = 0, top_index = 0; host->caller_results && i < step->n_samples; i++) {
        const toka_sample_row *row = &step->samples[host->order[i]];
        toka_sample_result *result = &host->caller_results[host->order[i]];
        result->id = host->results[i].id;
        result->logprob = toka_wants_logprob(row) ? host->results[i].logprob : NAN;
        result->sampled_logprob = host->results[i].sampled_logprob;
        result->rank = host->results[i].rank;
        result->n_top = row->sampling ? samp_n_top(row->sampling, dev->shape->V_all) : 0;
        if (!result->n_top) continue;
        const samp_top *top = &host->tops[top_index++];
        memcpy(result->top_ids, top->ids, sizeof top->ids);
        memcpy(result->top_logprobs, top->logprobs, sizeof top->logprobs);
        /* If the sampled id is also a top id, both get the same number, without the rounding error
         * of samp_unadjust. */
        for (int j = 0; j < result->n_top; j++)
            if (result->top_ids[j] == result->id) result->logprob = result->top_logprobs[j];
    }
}

/* Launches the op for a step that does not replay a graph. The kernels store the results where
 * samp_plan_step has chosen: on the device, or in pinned host memory. The step's upload buffer must
 * have been sent. x is NULL if the norm is fused: then dev->xn is ready, and one pass does.
 * The rows run in passes over the weights; a pass can have plain and filtered rows. Its size is
 * limited by the memory for partials (partial_rows) and by that for logits (chunk_rows), where
 * logits are stored. The filters of all rows are uploaded at once if their lists fit: a third
 * upload in a step would wait for the first one, and the host could not run ahead of the GPU. */
static void samp_launch(toka_device *dev, const toka_step *step, const bf16 *x) {
    samp_plan *plan = dev->samp;
    int max_rows = dev->hopper && !step->logits && plan->ranks_own_blocks ? plan->partial_rows
                                                                          : plan->chunk_rows;
    assert(step->n_samples <= dev->options.max_tokens);
    if (x) rmsnorm(dev, x, plan->rows, dev->norm, dev->xn, step->n_samples);
    samp_filter *filters = NULL;
    for (int row0 = 0, n_rows, filters_first = 0, filters_end = 0;
         row0 < step->n_samples && !dev->error.code; row0 += n_rows) {
        const int n_plain = max(0, min(max_rows, plan->n_plain - row0)),
                  first_filtered = row0 + n_plain;
        const int n_filtered = min(min(max_rows - n_plain, plan->chunk_rows),
                                   step->n_samples - first_filtered);
        if (n_filtered > 0 && first_filtered >= filters_end)
            filters_first = first_filtered,
            filters_end = first_filtered + samp_upload_filters(dev, step, first_filtered,
                                                       step->n_samples - first_filtered, &filters);
        n_rows = n_plain + max(0, min(n_filtered, filters_end - first_filtered));
        if (!dev->error.code)
            samp_launch_rows(dev, step, row0, n_rows, n_plain,
                             n_filtered > 0 ? filters + (first_filtered - filters_first) : NULL,
                             !x);
    }
}

/* The same for a step that replays a graph, called before the graph is launched. If the step has a
 * filtered row, the sampling nodes get the kernels and arguments for filtered rows, else those for
 * plain rows. */
static void samp_update_graph(toka_device *dev, const toka_step *step) {
    samp_plan *plan = dev->samp;
    if (!samp_has_graph_nodes(dev, step)) return;
    if (samp_is_fused(dev, step, step->n_samples))
        samp_lm_head(dev, 0, step->n_samples, plan->n_plain);
    samp_launch_results(dev, 0, step->n_samples, plan->n_plain, plan->filters, plan->logits);
}

/* ===========================================================================
 * MARK: 13. The GPU, opening and closing [host]
 * Implements the functions of the backend table (toka.h) that find, open and close a device, return
 * its state, and copy memory. This chapter also has the step clock, which measures steps and ops by
 * events on the stream. cuda_open and cuda_alloc allocate all memory; steps allocate none. The
 * first error is latched in dev->error. After an error ops do nothing, and cuda_status returns the
 * error.
 * =========================================================================== */

/* ---- The GPU ---- */

static int cuda_count(void) {
    int n = 0;
    if (cudaGetDeviceCount(&n)) n = 0;
    cudaGetLastError();
    return debug_shared_gpus() && n ? TOKA_MAX_RANKS : n;
}

/* Returns whether this program contains code for the compute capability. Code for x.y also runs on
 * x.z with z >= y. Code for 9.0 is built as sm_90a. The program contains no PTX that a driver could
 * compile for other capabilities. */
static bool cuda_has_code(int major, int minor) {
    static const int archs[] = {__CUDA_ARCH_LIST__}; /* 100 x + 10 y */
    for (int arch : archs)
        if (arch / 100 == major && arch / 10 % 10 <= minor) return true;
    return false;
}

/* Describes GPU number `index` in one line. Returns 1, or 0 if the GPU cannot be used; then the
 * line has the reason. */
static int cuda_probe(int index, char *line, size_t bytes) {
    int n_gpus = 0, driver = 0;
    cudaDeviceProp props;
    cudaError_t code = cudaGetDeviceCount(&n_gpus);
    if (!code && index >= n_gpus) code = cudaErrorNoDevice;
    if (!code) code = cudaGetDeviceProperties(&props, index);
    cudaGetLastError();
    cudaDriverGetVersion(&driver);
    if (code) {
        snprintf(line, bytes, "%s",
                 driver ? cudaGetErrorString(code) : "no NVIDIA driver is installed");
        return 0;
    }
    int n_chars = snprintf(
        line, bytes,
        "%s, %.0f GB, %d multiprocessors, compute capability %d.%d, driver for CUDA %d.%d",
        props.name, props.totalGlobalMem / 1e9, props.multiProcessorCount, props.major, props.minor,
        driver / 1000, driver % 1000 / 10);
    if (cuda_has_code(props.major, props.minor)) return 1;
    size_t length = min((size_t)n_chars, bytes);
    if (props.major < 8)
        snprintf(line + length, bytes - length, ": too old, 8.0 or later is needed");
    else
        snprintf(line + length, bytes - length,
                 ": ARCHS=%d%d%s ./build.sh makes a program for it, this one is not", props.major,
                 props.minor, props.major == 9 ? "a" : "");
    return 0;
}

/* Selects the GPU, reads its properties and creates the stream. On Hopper it also looks up the
 * driver's encoder of tensor maps, because libcuda is not linked. */
static void gpu_open(toka_device *dev) {
    cudaDeviceProp props;
    latch_error(dev, cudaSetDevice(dev->ordinal), "cudaSetDevice");
    latch_error(dev, cudaGetDeviceProperties(&props, dev->ordinal), "cudaGetDeviceProperties");
    if (dev->error.code) return;
    dev->arch = 10 * props.major + props.minor, dev->hopper = dev->arch == 90;
    dev->n_sms = props.multiProcessorCount, dev->max_smem = (int)props.sharedMemPerBlockOptin;
    snprintf(dev->description, sizeof dev->description, "%s, %.0f GB, %s kernels", props.name,
             props.totalGlobalMem / 1e9, dev->hopper ? "wgmma" : "mma.sync");
    latch_error(dev, cudaStreamCreateWithFlags(&dev->stream, cudaStreamNonBlocking),
                "cudaStreamCreate");
    /* the second result is not used */
    latch_error(dev, cudaMemGetInfo(&dev->free_at_open, &props.totalGlobalMem), "cudaMemGetInfo");
    if (dev->options.can_sleep) {
        sleep_open(dev, props.totalGlobalMem);
        latch_error(dev, cudaStreamCreateWithFlags(&dev->nccl_stream, cudaStreamNonBlocking),
                    "cudaStreamCreate");
    }
    if (!dev->hopper) return;
    driver_find(dev, "cuTensorMapEncodeTiled", (void **)&dev->encode_map);
}

/* ---- Memory, computed before it is allocated ---- */

/* hopper: FP8 stays FP8 where it can. */
static size_t weights_bytes(const toka_shape *shape, const toka_weights *weights, bool hopper) {
    size_t n = toka_gpu_matrix_bytes(&weights->embed) *
               (weights->lm_head.data != weights->embed.data ? 2 : 1);
    for (int i = 0; i < shape->L; i++) {
        const toka_layer *layer = &weights->layers[i];
        const weight_parts matrices[] = {weight_qkv_parts(shape, layer), {{&layer->o}, 1, false},
                                         weight_mlp_parts(&layer->mlp, true),
                                         {{&layer->mlp.down}, 1, false}};
        for (const weight_parts &parts : matrices)
            n += weight_bytes(&parts, hopper && weight_stays_fp8(&parts));
        if (layer->moe) n += experts_weight_bytes(layer->moe, hopper);
        if (!layer->mla) continue;
        const weight_parts q_b = {{&layer->mla->q_b}, 1, false},
                           up = {{&layer->mla->kv_b}, 1, false};
        n += weight_bytes(&up, false);
        if (layer->mla->q_a.rows) n += weight_bytes(&q_b, hopper && weight_stays_fp8(&q_b));
    }
    return n;
}

/* Returns the bytes of GPU memory that are left for the KV pool after the weights and the buffers
 * of a step of max_tokens. The result is negative if weights and buffers do not fit, and 0 if the
 * GPU cannot be used. Allocates nothing. */
static int64_t cuda_kv_bytes(const toka_shape *shape, const toka_weights *weights,
                             const toka_device_options *options) {
    size_t free_bytes = 0, total = 0;
    cudaGetLastError();
    int major = 0;
    if (cudaSetDevice(cuda_ordinal(options)) || cudaMemGetInfo(&free_bytes, &total) ||
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda_ordinal(options)))
        return 0;
    if (debug_shared_gpus() && options->n_devices > 1)
        free_bytes /= (size_t)ceil_div(options->n_devices, debug_shared_gpus());
    bool any_fp8 = false;
    for (int i = 0; i < shape->L; i++) any_fp8 |= weights->layers[i].kv_fp8;
    const size_t scratch = toka_gpu_scratch_bytes(shape, options->max_tokens) +
                           toka_gpu_kinds_bytes(shape, weights->layers, options->max_tokens) +
                           (any_fp8 ? toka_gpu_unpacked_bytes(shape) : 0) +
                           lora_scratch_bytes(shape, weights, options->max_tokens);
    const size_t group = toka_gpu_group_bytes(shape, options->max_tokens, options->tp_size,
                                              options->pp_size);
    return (int64_t)(toka_gpu_utilization(options->memory_utilization) * free_bytes) -
           (int64_t)(weights_bytes(shape, weights, major == 9) + scratch + group);
}

/* ---- The step clock ---- */

static void clock_open(toka_device *dev) {
    step_clock *clk = &dev->clock;
    /* at least one for each op of a step, with all-reduces, send and receive (chapter 10) */
    size_t n_events = 6 * (size_t)dev->shape->L + 8;
    clk->timed_index = -1, clk->cap_op_ends = (int)n_events;
    clk->op_ends = (cudaEvent_t *)calloc(n_events, sizeof *clk->op_ends),
    clk->op_kind = (char *)malloc(n_events);
    if (!clk->op_ends || !clk->op_kind) abort();
    for (int i = 0; i < STEP_RING_SIZE; i++) {
        latch_error(dev, cudaEventCreate(&clk->begun[i]), "events");
        latch_error(dev, cudaEventCreateWithFlags(&clk->done[i], cudaEventBlockingSync), "events");
    }
    for (size_t i = 0; i < n_events; i++)
        latch_error(dev, cudaEventCreate(&clk->op_ends[i]), "events");
}
static void clock_close(toka_device *dev) {
    step_clock *clk = &dev->clock;
    for (int i = 0; i < STEP_RING_SIZE; i++) {
        if (clk->begun[i]) cudaEventDestroy(clk->begun[i]);
        if (clk->done[i]) cudaEventDestroy(clk->done[i]);
    }
    for (int i = 0; clk->op_ends && i < clk->cap_op_ends; i++)
        if (clk->op_ends[i]) cudaEventDestroy(clk->op_ends[i]);
    free(clk->op_ends), free(clk->op_kind);
}

/* Bytes of a matrix; of a matrix of experts those of one. */
static double clock_weight_bytes(const weight *w) {
    return (double)w->N * w->K * (w->is_mxfp4 ? 17.0 / 32 : w->scale ? 1 : sizeof(bf16));
}
/* Experts that T tokens are expected to choose, if all are equally likely. */
static double clock_touched(const expert_router *router, double T) {
    return router->n_experts * (1 - pow(1 - (double)router->top_k / router->n_experts, T));
}
/* FLOPs and bytes of the feed-forward of all layers. Of the experts only those that are chosen are
 * read. */
static toka_op_times clock_mlp_work(const toka_device *dev, double T) {
    const double E = dev->shape->E;
    toka_op_times work = {};
    double touched = 0;
    int X = 0, k = 0; /* of which touched holds */
    for (int i = 0; i < dev->shape->L; i++) {
        const layer_experts *experts = dev->layers[i].experts;
        const weight *up = experts ? &experts->shared_gate_up : &dev->layers[i].gate_up,
                     *down = experts ? &experts->shared_down : &dev->layers[i].down;
        work.flop += 2 * T * ((double)up->N * up->K + (double)down->N * down->K);
        work.bytes += clock_weight_bytes(up) + clock_weight_bytes(down) + 4 * T * (E + down->K);
        if (!experts) continue;
        if (experts->router.n_experts != X || experts->router.top_k != k)
            touched = clock_touched(&experts->router, T);
        X = experts->router.n_experts, k = experts->router.top_k;
        up = &experts->gate_up, down = &experts->down;
        work.flop += 2 * T * k * ((double)up->N * up->K + (double)down->N * down->K);
        work.bytes += touched * (clock_weight_bytes(up) + clock_weight_bytes(down)) +
                      4 * T * k * (E + down->K);
    }
    return work;
}
/* What the attention of a step must compute and read: (row, position) pairs with a score, of all
 * layers, and the bytes of K and V. A position that several rows of a span see is read once. */
typedef struct {
    double pairs, bytes;
} clock_attention;
/* pairs and positions of a layer with this window (0: none) */
static void clock_add_spans(const toka_step *step, int window, double *pairs, double *positions) {
    for (int i = 0; i < step->n_spans; i++) {
        const toka_span *span = &step->spans[i];
        const int end = span->kv0 + span->n_kv;
        int first = end, last = span->kv0; /* of the positions that a row sees */
        for (int row = span->row0; row < span->row0 + span->n_rows; row++) {
            const int to = min(end, step->pos[row] + 1),
                      from = max(span->kv0, window ? step->pos[row] + 1 - window : 0);
            if (to <= from) continue;
            *pairs += to - from, first = min(first, from), last = max(last, to);
        }
        *positions += max(0, last - first);
    }
}
static clock_attention clock_attention_work(const toka_device *dev, const toka_step *step) {
    clock_attention work = {};
    double pairs[2] = {}, positions[2] = {}; /* of a layer, by [it has a window] */
    int windows[2] = {-1, -1};               /* of which these hold */
    for (int i = 0; i < dev->shape->L; i++) {
        const int window = dev->layers[i].window, k = window > 0;
        if (windows[k] != window) {
            windows[k] = window, pairs[k] = positions[k] = 0;
            clock_add_spans(step, window, &pairs[k], &positions[k]);
        }
        work.pairs += pairs[k];
        work.bytes +=
            positions[k] * (double)toka_kv_row_bytes(dev->shape, kv_is_fp8(dev->kv_fp8, i),
                                                     sizeof(bf16), true);
    }
    return work;
}
/* Adds the FLOPs and bytes of the step's ops to the sums. Bytes are the least that an op must
 * move. */
static void clock_add_work(toka_device *dev, const toka_step *step) {
    const toka_shape *shape = dev->shape;
    const clock_attention attention = clock_attention_work(dev, step);
    double T = step->T, E = shape->E, HD = (double)shape->H * shape->D,
           HDv = (double)shape->H * toka_value_size(shape), KD = (double)shape->K * shape->D,
           L = shape->L;
    /* n_reduces: all-reduces of the layers, two each. If GEMMs do the reduce-scatter, they send
     * half of the bytes, and only the other half counts here. */
    double n_reduces = reduce_scatter_pays(dev, step->T) ? L : 2 * L;
    /* of the matrices of all layers */
    double qkv_bytes = 0, out_bytes = 0, mla_q_flop = 0, mla_out_flop = 0;
    for (int i = 0; i < shape->L; i++) {
        const latent_weights *mla = &dev->layers[i].mla;
        qkv_bytes += clock_weight_bytes(&dev->layers[i].qkv) + clock_weight_bytes(&mla->q_b);
        out_bytes += clock_weight_bytes(&dev->layers[i].o);
        if (!mla->sizes) continue;
        const double up = 2.0 * shape->H * mla->sizes->latent;
        qkv_bytes += up * mla->sizes->nope, out_bytes += up * mla->sizes->v;
        mla_q_flop += 2 * T * (double)mla->q_b.N * mla->q_b.K + T * up * mla->sizes->nope +
                      2 * T * ((double)dev->layers[i].qkv.N - HD - 2 * KD) * E;
        mla_out_flop += T * up * mla->sizes->v +
                        2 * T * E * ((double)dev->layers[i].o.K - HD);
    }
    const toka_op_times work[TOKA_N_OPS] = {
        {0, 0, 4 * T * E}, /* rows in the order of TOKA_OP_EMBED, TOKA_OP_QKV ... */
        {0, 2 * T * E * (HD + 2 * KD) * L + mla_q_flop, qkv_bytes + 2 * T * (E + HD + 2 * KD) * L},
        {0, 2 * (HD + HDv) * attention.pairs, attention.bytes + 2 * T * (HD + HDv) * L},
        {0, 2 * T * E * HD * L + mla_out_flop, out_bytes + 2 * T * (HDv + 2 * E) * L},
        clock_mlp_work(dev, T),
        {0, 2.0 * step->n_samples * E * shape->V,
         2 * (step->n_samples ? E * shape->V + step->n_samples * E : 0)},
        {0, 0, 4 * T * E * (1 - 1.0 / tp_size(dev)) * (n_reduces + is_first_stage(dev))},
        {0, 0, is_last_stage(dev) ? 0 : 2 * T * E}};
    for (int i = 0; i < TOKA_N_OPS; i++)
        dev->clock.times.op[i].flop += work[i].flop, dev->clock.times.op[i].bytes += work[i].bytes;
}

/* Returns whether the next step is a timed step. may_be_graph: it could run as a graph. Such steps
 * are timed less often, because a timed step is launched kernel by kernel. */
static bool clock_is_due(const toka_device *dev, bool may_be_graph) {
    const int64_t n = dev->clock.n_begun,
                  every = may_be_graph ? CLOCK_GRAPH_FACTOR * CLOCK_STEP_INTERVAL
                                       : CLOCK_STEP_INTERVAL;
    return n % every == CLOCK_STEP_INTERVAL / 2;
}

/* Called where the work of a step begins on the stream. timed: it is a timed step. At most one
 * timed step is in flight. */
static void clock_begin(toka_device *dev, const toka_step *step, bool timed) {
    step_clock *clk = &dev->clock;
    latch_error(dev, cudaEventRecord(clk->begun[dev->last_begun], dev->stream), "step");
    clk->n_begun++;
    if (!timed) return;
    clk->timed_index = dev->last_begun, clk->n_op_ends = 0;
    clock_add_work(dev, step);
}

/* Returns the seconds from one event to the other; 0 after an error. */
static double clock_seconds(toka_device *dev, cudaEvent_t from, cudaEvent_t to) {
    float ms = 0;
    if (!dev->error.code) latch_error(dev, cudaEventElapsedTime(&ms, from, to), "step");
    return ms * 1e-3;
}

/* Adds the times of the step that has just finished (dev->last_finished) to the sums. */
static void clock_finish_step(toka_device *dev) {
    step_clock *clk = &dev->clock;
    toka_times *times = &clk->times;
    int index = dev->last_finished;
    if (!clk->n_done++) return; /* the first step is a warm-up */
    if (times->steps++) {
        double idle_s = clock_seconds(dev, clk->done[(index + STEP_RING_SIZE - 1) % STEP_RING_SIZE],
                                      clk->begun[index]);
        times->idle_s += idle_s, times->begin_s = times->end_s + idle_s;
    }
    double busy_s = clock_seconds(dev, clk->begun[index], clk->done[index]);
    times->busy_s += busy_s, times->end_s = times->begin_s + busy_s;
    if (clk->timed_index != index) return;
    for (int k = 0; k < clk->n_op_ends; k++)
        times->op[(int)clk->op_kind[k]].seconds += clock_seconds(
            dev, k ? clk->op_ends[k - 1] : clk->begun[index], clk->op_ends[k]);
    times->n_timed++, clk->timed_index = -1;
}

static void cuda_times(toka_device *dev, toka_times *times) {
    *times = dev->clock.times, times->graphs = dev->graphs.n_graph_steps;
}

static void cuda_memory(const toka_device *dev, toka_memory *memory) {
    size_t free_bytes = 0, total;
    if (cudaSetDevice(dev->ordinal) || cudaMemGetInfo(&free_bytes, &total)) cudaGetLastError();
    memory->weights = dev->weight_bytes;
    const kv_layout kv = kv_layout_of(dev);
    memory->kv = (int64_t)(kv_layer_at(kv, dev->shape->L) - kv.pool);
    memory->other = (int64_t)dev->free_at_open - (int64_t)free_bytes - memory->weights - memory->kv;
}

/* ---- Open and close ---- */

static int cuda_check_options(const toka_device_options *options, const toka_shape *shape,
                              toka_err *e) {
    e->code = 0;
    if (options->max_tokens < 1 || options->max_samples < 1 || options->n_pages < 1 ||
             options->n_pages > INT_MAX / shape->B)
        snprintf(e->msg, sizeof e->msg,
                 "GPU: %d tokens and %d sample rows a step, %d pages: out of range",
                 options->max_tokens, options->max_samples, options->n_pages),
            e->code = TOKA_E_USE;
    return e->code;
}

/* ---- What models these kernels can run ---- */

/* Returns what the kernels do not have of the model's shape; NULL: they have all of it. */
static const char *missing_of_shape(const toka_shape *shape) {
    const struct {
        bool used;
        const char *name;
    } features[] = {
        {shape->linear.n_layers > 0, "layers with a state (Gated DeltaNet)"},
        {!kv_is_latent(shape) && (shape->D % 8 || shape->D > 256),
         "heads whose size is above 256 or no multiple of 8"},
        {shape->layer_norm, "LayerNorm"},
        {shape->qkv_limit != 0, "clipped q, k and v"},
    };
    for (const auto &feature : features)
        if (feature.used) return feature.name;
    return NULL;
}

/* The same of the formats of a layer's experts. */
static const char *missing_of_experts(const toka_moe *moe) {
    for (int gate_up = 0; gate_up < 2; gate_up++) {
        const bool all_mxfp4 = weight_experts_format(moe, gate_up) == TOKA_MXFP4;
        for (int i = -1; i < moe->n_experts; i++) {
            const bool is_shared = i < 0;
            const weight_parts parts =
                weight_mlp_parts(is_shared ? &moe->shared : &moe->experts[i], gate_up);
            for (int k = 0; k < parts.n_parts; k++) {
                if (parts.part[k]->dtype == TOKA_MXFP4 && (is_shared || !all_mxfp4))
                    return "MXFP4 in only some of the matrices of the experts";
            }
        }
    }
    return NULL;
}
static int n_biases(const toka_mlp *mlp) {
    return !!mlp->gate_bias.rows + !!mlp->up_bias.rows + !!mlp->down_bias.rows;
}
/* Do the kernels of chapter 9b have these sizes? */
static bool latent_has_sizes(const toka_shape *shape, const toka_mla *mla) {
    return shape->K == 1 && shape->D == mla->latent + mla->rope &&
           toka_value_size(shape) == mla->latent && shape->D <= LATENT_KEY &&
           mla->latent <= LATENT_VALUE && mla->latent % 8 == 0 && mla->rope % 8 == 0 &&
           mla->rope > 0 && mla->nope % 8 == 0 && mla->v % 2 == 0;
}
/* The same of a layer. */
static const char *missing_of_layer(const toka_shape *shape, const toka_layer *layer) {
    const toka_mlp *mlp = &layer->mlp, *expert = layer->moe ? layer->moe->experts : mlp;
    const struct {
        bool used;
        const char *name;
    } features[] = {
        {layer->mla && !latent_has_sizes(shape, layer->mla),
         "multi-head latent attention (MLA) of these sizes"},
        {!layer->mla && kv_is_latent(shape), "values of another head size than keys"},
        {layer->q_gate, "attention with an output gate"},
        {layer->moe && layer->moe->n_experts > EXPERTS_MAX, "more than 512 experts"},
        {layer->moe && layer->moe->top_k > EXPERTS_MAX_K, "more than 16 experts a token"},
        {layer->moe && layer->moe->n_groups > 32, "more than 32 groups of experts"},
        {layer->moe && n_biases(expert) % 3, "biases in only some of the matrices of the experts"},
        {layer->moe && n_biases(&layer->moe->shared), "biases in the shared expert"},
        {layer->window && shape->L > 256, "windows in a model of more than 256 layers"},
        {layer->kv_fp8 && ((shape->D != 64 && shape->D != 128) || shape->L > 256),
         "FP8 K and V with heads of another size than 64 and 128"},
        {layer->parallel, "an MLP beside attention"},
        {layer->moe && layer->mlp_post_norm.rows, "a norm behind experts"},
        {(!layer->attn_norm.rows || !layer->mlp_norm.rows) && shape->residual_scale != 0,
         "a scaled residual without norms before attention and MLP"},
        {layer->q_norm.rows > 1 || layer->k_norm.rows > 1, "a norm with weights for each head"},
        {head_order_of(layer->rope, shape->D).D &&
             (layer->q.dtype == TOKA_FP8 || layer->k.dtype == TOKA_FP8),
         "FP8 weights with RoPE on a part of the head or on neighbours"},
        {layer->activation == TOKA_SWIGLU_CLAMPED &&
             !(layer->moe && !layer->moe->shared.gate.rows),
         "the activation of GPT-OSS in an MLP"},
        {layer->activation == TOKA_GELU_TANH && layer->moe, "experts with GELU"},
        {n_biases(mlp) > 0, "biases in the MLP"},
    };
    for (const auto &feature : features)
        if (feature.used) return feature.name;
    static const toka_mla none = {};
    const toka_mla *mla = layer->mla ? layer->mla : &none;
    const toka_tensor *matrices[] = {&layer->q,  &layer->k, &layer->v, &layer->o,
                                     &mlp->gate, &mlp->up,  &mlp->down, &mla->q_a,
                                     &mla->q_b,  &mla->kv_a, &mla->kv_b};
    for (const toka_tensor *matrix : matrices)
        if (matrix->dtype == TOKA_MXFP4) return "MXFP4 weights but of experts";
    return layer->moe ? missing_of_experts(layer->moe) : NULL;
}

/* Latches an error if this GPU cannot compute a layer with so many tensor ranks. */
static void check_layers(toka_device *dev) {
    for (int i = 0; i < dev->shape->L && !dev->error.code; i++) {
        const toka_layer *layer = &dev->weights->layers[i];
        const char *needed = dev->hopper ? NULL : toka_gpu_needs_hopper(layer);
        const char *missing = dev->options.tp_size == 1 ? NULL
                              : dev->weights->adapters
                                  ? "adapters (LoRA)"
                                  : toka_gpu_missing_of_ranks(dev->shape, layer);
        if (!needed && !missing) continue;
        dev->error.code = TOKA_E_INPUT;
        if (needed)
            snprintf(dev->error.msg, sizeof dev->error.msg,
                     "%s a GPU of compute capability 9.0", needed);
        else
            snprintf(dev->error.msg, sizeof dev->error.msg,
                     "the GPU does not have %s over several tensor ranks", missing);
    }
}

static int cuda_supports(const toka_shape *shape, const toka_weights *weights, toka_err *e) {
    const char *missing = missing_of_shape(shape);
    e->code = 0;
    if (missing) {
        snprintf(e->msg, sizeof e->msg, "the GPU does not have %s", missing);
        return e->code = TOKA_E_INPUT;
    }
    for (int i = 0; i < shape->L; i++) {
        missing = missing_of_layer(shape, &weights->layers[i]);
        if (!missing && weights->adapters) missing = lora_missing(&weights->layers[i]);
        if (!missing) continue;
        snprintf(e->msg, sizeof e->msg, "layer %d: the GPU does not have %s", i, missing);
        return e->code = TOKA_E_INPUT;
    }
    if (!toka_is_plain(&weights->embed) || !toka_is_plain(&weights->lm_head)) {
        snprintf(e->msg, sizeof e->msg, "the GPU does not have a quantized embedding or LM head");
        return e->code = TOKA_E_INPUT;
    }
    return 0;
}

static void graphs_close(toka_device *dev) {
    for (step_graph &graph : dev->graphs.all) {
        if (graph.exec) cudaGraphExecDestroy(graph.exec);
        if (graph.cuda_graph) cudaGraphDestroy(graph.cuda_graph);
        free(graph.variable_nodes);
        for (int i = 0; i < graph.n_upload_nodes; i++) free(graph.upload_nodes[i].arg_block);
        free(graph.upload_nodes);
        graph = step_graph{};
    }
}

static void cuda_close(toka_device *dev) {
    if (!dev) return;
    /* if a GPU or a rank hangs, it may still use this memory, so nothing is freed */
    if (dev->group && !group_leave(dev)) return;
    if (dev->stream) cudaStreamSynchronize(dev->stream);
    for (int i = 0; i < dev->n_allocations; i++) cudaFree(dev->allocations[i]);
    sleep_close(dev);
    upload_close(&dev->upload);
    graphs_close(dev);
    clock_close(dev);
    attn_close(dev);
    samp_close(dev);
    lora_close(dev);
    if (dev->stream) cudaStreamDestroy(dev->stream);
    if (dev->nccl_stream) cudaStreamDestroy(dev->nccl_stream);
    for (int i = 0; dev->layers && i < dev->shape->L; i++) free(dev->layers[i].experts);
    free(dev->layers);
    free(dev->experts);
    free(dev->allocations);
    free(dev);
}

static void cuda_alloc_buffers(toka_device *dev) {
    const toka_shape *shape = dev->shape;
    /* gemm_rows: rows of a GEMM input, padding included */
    size_t T = (size_t)dev->options.max_tokens, qkv_width = 0, gemm_rows = T + GEMM_PAD_ROWS;
    for (int i = 0; i < shape->L; i++)
        qkv_width = std::max(qkv_width, (size_t)dev->layers[i].qkv.N);
    if (dev->options.progress) dev->options.progress(dev->options.user, "allocating memory", 0);
    dev->xn = (bf16 *)dev_alloc(dev, gemm_rows * dev->E * sizeof(bf16), "activations");
    dev->qkv = (bf16 *)dev_alloc(dev, T * qkv_width * sizeof(bf16), "activations");
    dev->act = (bf16 *)dev_alloc(dev, gemm_rows * dev->F * sizeof(bf16), "activations");
    for (int i = 0; i < shape->L && !dev->gate_up; i++)
        if (dev->weights->adapters || toka_gpu_has_gelu(&dev->weights->layers[i]))
            dev->gate_up = (bf16 *)dev_alloc(dev, T * 2 * dev->F * sizeof(bf16), "activations");
    dev->x_scale = (float *)dev_alloc(dev, T * sizeof(float), "activations");
    experts_open(dev);
    latent_open(dev);
    if (dev->weights->adapters) lora_open(dev);
    dev->row_sumsq = (float *)dev_alloc(
        dev, FUSE_NORM_MAX_ROWS * (size_t)ceil_div(dev->E, FUSE_NORM_COLS) * sizeof(float),
        "activations");
    /* the last page is the dummy page: padding rows store their K and V there */
    dev->kv_layer_elems = (size_t)(dev->options.n_pages + 1) * kv_page_elems(shape);
    dev->kv_windowed_elems = (size_t)(dev->options.n_windowed + 1) * kv_page_elems(shape);
    for (int i = 0; i < shape->L; i++) {
        const toka_layer *layer = &dev->weights->layers[i];
        if (layer->kv_fp8) dev->kv_fp8[i / 32] |= 1u << i % 32;
        if (layer->window && dev->options.n_windowed) dev->kv_windowed[i / 32] |= 1u << i % 32;
    }
    const kv_layout kv = kv_layout_of(dev);
    const size_t kv_bytes = (size_t)(kv_layer_at(kv, shape->L) - kv.pool);
    dev->pool = dev->options.can_sleep ? &dev->sleep_pools[1] : NULL;
    dev->kv_pool = (bf16 *)dev_alloc(dev, kv_bytes, "KV cache");
    if (!dev->error.code)
        latch_error(dev, cudaMemsetAsync(dev->kv_pool, 0, kv_bytes, dev->stream), "KV cache");
    if (is_last_stage(dev))
        dev->kv_ids = (int *)dev_alloc(
            dev, (size_t)(dev->options.n_pages + 1) * (size_t)shape->B * sizeof(int), "KV cache");
    dev->pool = NULL;
    if (!dev->error.code && dev->kv_ids)
        latch_error(dev,
                    cudaMemsetAsync(dev->kv_ids, 0,
                                    (size_t)(dev->options.n_pages + 1) * (size_t)shape->B *
                                        sizeof(int),
                                    dev->stream),
                    "KV cache");
    if (!dev->error.code) attn_open(dev);
    if (!dev->error.code && is_last_stage(dev)) samp_open(dev);
    const size_t row_bytes = T * (4 * sizeof(int) + 2 * sizeof(toka_copy));
    if (!dev->error.code)
        upload_open(dev, &dev->upload,
                    row_bytes + attn_upload_bytes(dev) + samp_upload_bytes(dev) +
                        lora_upload_bytes(dev) + 4096,
                    true);
    dev->last_tokens = (int *)dev_alloc(dev, (size_t)dev->options.n_seqs * sizeof(int),
                                        "last tokens");
    if (!dev->error.code) clock_open(dev);
    if (!dev->error.code && dev->group) group_alloc(dev);
}

/* Loads the weights, and brings the rows of q, k and v into the order of the GEMMs. */
static void weights_put(toka_device *dev) {
    const int D = dev->shape->D;
    dev->pool = dev->options.can_sleep ? &dev->sleep_pools[0] : NULL;
    weights_load(dev);
    dev->pool = NULL;
    const bool interleaved = qkv_is_interleaved(dev, D) && !kv_is_latent(dev->shape);
    for (int i = 0; i < dev->shape->L && interleaved && !dev->error.code; i++)
        qkv_reorder(dev, &dev->layers[i].qkv, D);
    for (int i = 0; i < dev->shape->L && !dev->error.code; i++)
        lora_number_parts(&dev->layers[i], i);
}

/* Does the layer have a static scale of x? CUDA graphs have its value. */
static bool has_static_scale(const layer_weights *layer) {
    const weight *const all[] = {&layer->qkv, &layer->mla.q_b, &layer->o, &layer->gate_up,
                                 &layer->down};
    bool found = false;
    for (const weight *one : all) found |= one->x_scale != 0;
    if (!layer->experts) return found;
    const layer_experts *experts = layer->experts;
    return found || experts->gate_up.x_scale != 0 || experts->down.x_scale != 0 ||
           experts->shared_gate_up.x_scale != 0 || experts->shared_down.x_scale != 0;
}

/* The new weights go to the addresses of the old ones, as the same functions allocate them in the
 * same order. So CUDA graphs and tensor maps stay valid. A failure of the GPU is latched. */
static int cuda_rebind(toka_device *dev, const toka_weights *weights, bool commit, toka_err *e) {
    sleep_pool *pool = &dev->sleep_pools[0];
    const size_t used = pool->used;
    layer_weights *old = dev->layers;
    if (!commit) {
        bool is_static = false;
        for (int i = 0; i < dev->shape->L; i++) is_static |= has_static_scale(&old[i]);
        if (!is_static && !dev->has_mxfp4) return 0;
        snprintf(e->msg, sizeof e->msg, "GPU: %s cannot be replaced",
                 is_static ? "FP8 weights with static scales of their inputs" : "MXFP4 weights");
        return e->code = TOKA_E_USE;
    }
    latch_error(dev, cudaSetDevice(dev->ordinal), "cudaSetDevice");
    dev->options.progress = NULL; /* of cuda_open */
    dev->weights = weights, dev->weight_bytes = 0;
    pool->used = 0, pool->is_copied = false;
    weights_put(dev);
    assert(dev->error.code || pool->used == used);
    for (int i = 0; i < dev->shape->L; i++) {
        dev->layers[i].rope = old[i].rope;
        free(old[i].experts);
    }
    free(old);
    latch_error(dev, cudaStreamSynchronize(dev->stream), "weights");
    return 0;
}

static int cuda_open(toka_device **out, const toka_device_options *options, const toka_shape *shape,
                     const toka_weights *weights, toka_err *e) {
    if (cuda_supports(shape, weights, e) || cuda_check_options(options, shape, e)) return e->code;
    toka_device *dev = (toka_device *)calloc(1, sizeof *dev);
    if (!dev) abort();
    dev->options = *options, dev->shape = shape, dev->weights = weights;
    dev->E = round_up_8(shape->E), dev->F = round_up_8(shape->F), dev->V = round_up_8(shape->V),
    dev->ordinal = cuda_ordinal(options);
    dev->steps_to_fault = toka_debug_option("TOKA_DEBUG_FAULT", options),
    dev->steps_to_stall = toka_debug_option("TOKA_DEBUG_STALL", options);
    dev->captures_to_fault = toka_debug_option("TOKA_DEBUG_CAPTURE", options);
    if (options->group) group_assign_rank(dev);
    if (!dev->error.code) gpu_open(dev);
    check_layers(dev);
    if (!dev->error.code) gemm_open(dev);
    if (!dev->error.code) weights_put(dev);
    if (!dev->error.code) weights_describe(dev);
    if (!dev->error.code) ropes_open(dev, weights->layers);
    if (!dev->error.code) cuda_alloc_buffers(dev);
    if (!dev->error.code) latch_error(dev, cudaStreamSynchronize(dev->stream), "opening the model");
    if (!dev->error.code && dev->group) group_join(dev);
    if (dev->error.code) {
        *e = dev->error;
        if (dev->group) toka_group_fail(dev->group, e);
        cuda_close(dev);
        return e->code;
    }
    *out = dev;
    return 0;
}

static const char *cuda_describe(const toka_device *dev) {
    return dev->group ? dev->group->description : dev->description;
}

static int cuda_status(toka_device *dev, toka_err *e) {
    if (!dev->error.code && dev->group && toka_group_is_broken(dev->group))
        toka_group_error(dev->group, rank_index(dev), &dev->error);
    else if (dev->error.code && dev->group) group_note_peer_fault(dev);
    if (dev->error.code) *e = dev->error;
    return dev->error.code;
}

/* The buffer may be the input of a GEMM with rows of H * D elements. So it gets GEMM_PAD_ROWS rows
 * of padding. */
static toka_dev_ptr cuda_alloc(toka_device *dev, size_t bytes) {
    const size_t padding = (size_t)GEMM_PAD_ROWS * dev->shape->H * dev->shape->D * sizeof(bf16);
    return toka_dev_ptr{(uint64_t)dev_alloc(dev, bytes + padding, "activations")};
}
static void cuda_upload(toka_device *dev, toka_dev_ptr to, const void *from, size_t bytes) {
    latch_error(dev,
                cudaMemcpyAsync((void *)to.at, from, bytes, cudaMemcpyHostToDevice, dev->stream),
                "upload");
    latch_error(dev, cudaStreamSynchronize(dev->stream), "upload");
}
static void cuda_download(toka_device *dev, void *to, toka_dev_ptr from, size_t bytes) {
    latch_error(
        dev, cudaMemcpyAsync(to, (const void *)from.at, bytes, cudaMemcpyDeviceToHost, dev->stream),
        "download");
    latch_error(dev, cudaStreamSynchronize(dev->stream), "download");
}

/* NCCL takes host memory that is page-locked. Its calls run on a stream of their own, for which no
 * other waits. */
static int nccl_fail(cudaError_t code, toka_err *e) {
    cudaGetLastError();
    e->code = code == cudaErrorMemoryAllocation ? TOKA_E_MEMORY : TOKA_E_DEVICE;
    snprintf(e->msg, sizeof e->msg, "weights over NCCL: %s", cudaGetErrorString(code));
    return e->code;
}
static int cuda_nccl_poll(const toka_device *dev, toka_err *e) {
    cudaError_t code = cudaSetDevice(dev->ordinal);
    if (!code) code = cudaStreamQuery(dev->nccl_stream);
    if (code == cudaErrorNotReady) return 0;
    return code ? nccl_fail(code, e) : 1;
}
static void *cuda_nccl_memory(const toka_device *dev, size_t bytes, toka_err *e) {
    void *memory = nullptr;
    cudaError_t code = cudaSetDevice(dev->ordinal);
    if (!code) code = cudaHostAlloc(&memory, bytes, cudaHostAllocDefault);
    if (!code) return memory;
    nccl_fail(code, e);
    return nullptr;
}
static void cuda_nccl_free(void *memory) { cudaFreeHost(memory); }
static void *cuda_nccl_stream(const toka_device *dev) { return dev->nccl_stream; }

/* ===========================================================================
 * MARK: 14. Measuring the ops [host]
 * `toka bench ops`: measures each op at the shapes of well-known models. Several calls of an op are
 * captured in a graph. Their buffers hold random numbers and are too large for the L2 cache.
 * In:  a callback (toka_bench_fn).
 * Out: the callback is called once per measurement, with the time, FLOPs and bytes of one call of
 *      the op. The callback prints the table.
 * =========================================================================== */

enum {
    /* The calls of a graph use several sets of buffers in turn. There are so many sets that they
     * exceed this size, which is more than any L2 cache, but at most BENCH_MAX_SETS. */
    BENCH_CACHE_BYTES = 256 << 20,
    BENCH_MAX_SETS = 64,
    BENCH_REPLAYS = 15 /* timed replays of a graph */
};

typedef struct bench {
    toka_device *dev;
    toka_bench_fn *on_row;
    void *user;
} bench;

/* p[i] becomes a hash of (seed, i), uniform in (-scale, scale). */
__global__ static void bench_fill_kernel(bf16 *p, size_t n, uint64_t seed, float scale) {
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint64_t z = (seed << 40) + i * 0x9E3779B97F4A7C15ull;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ z >> 27) * 0x94D049BB133111EBull;
        p[i] = __float2bfloat16(scale * ((float)(z >> 40) * 0x1p-23f - 1));
    }
}
static bf16 *bench_random(toka_device *dev, size_t n, float scale) {
    bf16 *p = (bf16 *)dev_alloc(dev, n * sizeof(bf16), "buffers");
    if (!p) return NULL;
    bench_fill_kernel<<<1024, 256, 0, dev->stream>>>(p, n, (uint64_t)dev->n_allocations, scale);
    CHECK_LAUNCH(dev, "random numbers");
    return p;
}
static void bench_report(bench *ctx, const char *op, const char *model, const char *shape,
                         double us, double flop, double bytes) {
    toka_bench_row row = {op, model, shape, us, flop, bytes};
    if (!ctx->dev->error.code) ctx->on_row(ctx->user, &row);
}
/* Frees all allocations after the first n_before. */
static void bench_free(toka_device *dev, int n_before) {
    latch_error(dev, cudaStreamSynchronize(dev->stream), "bench");
    while (dev->n_allocations > n_before) cudaFree(dev->allocations[--dev->n_allocations]);
}

/* Returns the median time of one call of op(arg, i) in microseconds. The calls i = 0 .. per_graph-1
 * are captured once. The first three replays of the graph are not timed. */
static double bench_time(toka_device *dev, int per_graph, void (*op)(void *arg, int i), void *arg) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaEvent_t events[2] = {NULL, NULL};
    float ms[BENCH_REPLAYS] = {0};
    op(arg, 0);
    for (cudaEvent_t &event : events) latch_error(dev, cudaEventCreate(&event), "bench");
    latch_error(dev, cudaStreamSynchronize(dev->stream), "bench");
    latch_error(dev, cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeThreadLocal),
                "capture");
    for (int i = 0; i < per_graph; i++) op(arg, i);
    latch_error(dev, cudaStreamEndCapture(dev->stream, &graph), "capture");
    if (!dev->error.code) latch_error(dev, cudaGraphInstantiate(&exec, graph, 0), "capture");
    for (int i = -3; i < BENCH_REPLAYS && !dev->error.code; i++) {
        latch_error(dev, cudaEventRecord(events[0], dev->stream), "bench");
        latch_error(dev, cudaGraphLaunch(exec, dev->stream), "bench");
        latch_error(dev, cudaEventRecord(events[1], dev->stream), "bench");
        latch_error(dev, cudaEventSynchronize(events[1]), "bench");
        if (i >= 0) latch_error(dev, cudaEventElapsedTime(&ms[i], events[0], events[1]), "bench");
    }
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
    for (cudaEvent_t event : events) cudaEventDestroy(event);
    for (int i = 1; i < BENCH_REPLAYS; i++) /* insertion sort */
        for (int j = i; j && ms[j] < ms[j - 1]; j--) {
            float swap = ms[j];
            ms[j] = ms[j - 1], ms[j - 1] = swap;
        }
    return ms[BENCH_REPLAYS / 2] * 1000.0 / per_graph;
}

/* ---- Read bandwidth: the limit of every op that is bound by memory ---- */

__global__ static void __launch_bounds__(512)
    bench_read_kernel(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t sum = 0;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = __ldcs(p + i);
        sum ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    /* If the sum were not used, the compiler would remove the loads. With random data this store is
     * rare, and it does no harm. */
    if (sum == 0x12345678u) *out = sum;
}
typedef struct bench_read_arg {
    toka_device *dev;
    const uint4 *data;
    size_t n_vecs;
    uint32_t *out;
} bench_read_arg;
static void bench_read_op(void *arg, int) {
    bench_read_arg *a = (bench_read_arg *)arg;
    bench_read_kernel<<<a->dev->n_sms * 4, 512, 0, a->dev->stream>>>(a->data, a->n_vecs, a->out);
    CHECK_LAUNCH(a->dev, "reading");
}
static void bench_read(bench *ctx) {
    size_t n_bytes = (size_t)2 << 30;
    int n_before = ctx->dev->n_allocations;
    bench_read_arg arg = {ctx->dev, (const uint4 *)bench_random(ctx->dev, n_bytes / 2, 1),
                          n_bytes / 16, (uint32_t *)dev_alloc(ctx->dev, 4, "buffers")};
    if (!ctx->dev->error.code) {
        double us = bench_time(ctx->dev, 1, bench_read_op, &arg);
        bench_report(ctx, "read", "", "2 GiB", us, 0, (double)n_bytes);
    }
    bench_free(ctx->dev, n_before);
}

/* ---- GEMM ----
 * FLOPs: 2MNK. Bytes: W, x and y once; EPI_RESIDUAL also reads y. */

/* The dimensions of a model. N and K of qkv, o, gate_up, down and lm_head follow from them. If V is
 * 0, the LM head is not measured. */
typedef struct bench_shape {
    const char *model;
    int E, H, K, D, F, V;
} bench_shape;
static const bench_shape bench_shapes[] = {{"Llama-3.2-1B", 2048, 32, 8, 64, 8192, 128256},
                                           {"Llama-3.1-8B", 4096, 32, 8, 128, 14336, 128256},
                                           {"Llama-3.1-70B", 8192, 64, 8, 128, 28672, 0},
                                           {"Qwen2.5-0.5B", 896, 14, 2, 64, 4864, 151936}};
static const int bench_rows[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192};

typedef struct bench_gemm_arg {
    toka_device *dev;
    gemm_args args[BENCH_MAX_SETS];
    int n_sets;
} bench_gemm_arg;
static void bench_gemm_op(void *arg, int i) {
    bench_gemm_arg *a = (bench_gemm_arg *)arg;
    gemm(a->dev, &a->args[i % a->n_sets]);
}
static void bench_gemm(bench *ctx, const char *name, const char *model, int M, int N, int K,
                       enum epilogue epi) {
    toka_device *dev = ctx->dev;
    int n_before = dev->n_allocations, ldy = epi == EPI_SWIGLU ? N / 2 : N;
    size_t set_bytes = ((size_t)N * K + (size_t)M * K + (size_t)M * ldy) * sizeof(bf16);
    bench_gemm_arg arg = {};
    weight weights[BENCH_MAX_SETS];
    arg.dev = dev, arg.n_sets = (int)(BENCH_CACHE_BYTES / set_bytes) + 1;
    if (arg.n_sets > BENCH_MAX_SETS) arg.n_sets = BENCH_MAX_SETS;
    for (int i = 0; i < arg.n_sets; i++) {
        weights[i] = weight{bench_random(dev, (size_t)N * K, sqrtf(3.0f / K)), NULL, N, K};
        bf16 *x = bench_random(dev, (size_t)(M + GEMM_PAD_ROWS) * K, 1.7f);
        arg.args[i] = gemm_args{M,   x,  K, &weights[i], bench_random(dev, (size_t)M * ldy, 1),
                                ldy, epi};
    }
    if (!dev->error.code) {
        char shape[64];
        double us = bench_time(dev, arg.n_sets < 8 ? 8 : arg.n_sets, bench_gemm_op, &arg);
        snprintf(shape, sizeof shape, "M=%d %dx%d", M, N, K);
        double bytes = ((double)N * K + (double)M * K +
                        (double)M * ldy * (epi == EPI_RESIDUAL ? 2 : 1)) *
                       sizeof(bf16);
        bench_report(ctx, name, model, shape, us, 2.0 * M * N * K, bytes);
    }
    bench_free(dev, n_before);
}
static void bench_gemms(bench *ctx) {
    for (const bench_shape &model : bench_shapes)
        for (int M : bench_rows) {
            if (ctx->dev->error.code) return;
            bench_gemm(ctx, "qkv", model.model, M, (model.H + 2 * model.K) * model.D, model.E,
                       EPI_STORE);
            bench_gemm(ctx, "o", model.model, M, model.E, model.H * model.D, EPI_RESIDUAL);
            bench_gemm(ctx, "gate_up", model.model, M, 2 * model.F, model.E, EPI_SWIGLU);
            bench_gemm(ctx, "down", model.model, M, model.E, model.F, EPI_RESIDUAL);
        }
}

/* ---- Attention ----
 * One step of n_seqs sequences. Each sequence has rows_per_seq rows: the last of its seq_len
 * tokens. The first `shared` positions of all sequences are in the same pages, and one span covers
 * them, like the spans of chapter 21 of toka.c.
 * FLOPs: 4 * H * D for each pair of a row and a position that it sees. Bytes: K and V of every
 * position once, q and o. */

typedef struct bench_step {
    const char *name;
    int n_seqs, rows_per_seq, seq_len, shared;
} bench_step;
static const bench_step bench_steps[] = {{"decode", 4096, 1, 150, 0},
                                         {"decode", 2048, 1, 900, 0},
                                         {"decode", 64, 1, 4096, 0},
                                         {"decode", 1, 1, 4096, 0},
                                         {"shared decode", 4096, 1, 1050, 896},
                                         {"prefill", 1, 4096, 4096, 0},
                                         {"prefill", 1, 16384, 16384, 0},
                                         {"prefill", 16, 512, 512, 0}};

typedef struct bench_attn_arg {
    toka_device *dev;
    toka_step step;
    bf16 *q, *o;
    int L;
} bench_attn_arg;
static void bench_attn_op(void *arg, int i) {
    bench_attn_arg *a = (bench_attn_arg *)arg;
    attention(a->dev, i % a->L, a->q, a->o);
}

/* Makes the rows, pages and spans of the step in one block of host memory, *memory, which the
 * caller frees. Returns the number of pages in use. */
static int bench_make_step(toka_step *step, const bench_step *config, int B, int **memory) {
    int T = config->n_seqs * config->rows_per_seq,
        own_pages = ceil_div(config->seq_len - config->shared, B),
        shared_pages = config->shared / B, n_pages = 0;
    size_t n_bytes = (size_t)(2 * T + shared_pages + config->n_seqs * own_pages) * sizeof(int);
    int *rows = *memory = (int *)calloc(n_bytes + (size_t)(config->n_seqs + 1) * sizeof(toka_span),
                                        1);
    if (!rows) abort();
    int *pages = rows + 2 * T;
    toka_span *spans = (toka_span *)(pages + shared_pages + config->n_seqs * own_pages);
    *step = toka_step{
        .T = T, .ids = rows, .pos = rows + T, .kv_slot = rows, .pages = pages, .spans = spans};
    /* The pages are in a scattered order: 7919 is a prime. */
    for (; n_pages < shared_pages + config->n_seqs * own_pages; n_pages++)
        pages[n_pages] = (int)((n_pages * 7919LL + 13) %
                               (shared_pages + config->n_seqs * own_pages));
    if (shared_pages) spans[step->n_spans++] = toka_span{0, T, 0, 0, config->shared};
    for (int seq = 0; seq < config->n_seqs; seq++) {
        spans[step->n_spans++] = toka_span{seq * config->rows_per_seq, config->rows_per_seq,
                                           shared_pages + seq * own_pages, config->shared,
                                           config->seq_len - config->shared};
        for (int row = 0; row < config->rows_per_seq; row++)
            rows[T + seq * config->rows_per_seq + row] = config->seq_len - config->rows_per_seq +
                                                         row;
    }
    return n_pages;
}

static void bench_attention(bench *ctx, const bench_shape *model, const bench_step *step) {
    toka_device *dev = ctx->dev;
    toka_shape shape = {
        .H = model->H, .K = model->K, .D = model->D, .E = model->E, .F = model->F, .V = model->V};
    shape.B = toka_cuda.page_tok, shape.max_len = step->seq_len;
    layer_weights layers[BENCH_MAX_SETS] = {};
    bench_attn_arg arg = {.dev = dev};
    int n_before = dev->n_allocations, *memory,
        n_pages = bench_make_step(&arg.step, step, shape.B, &memory);
    size_t q_elems = (size_t)arg.step.T * model->H * model->D;
    dev->shape = &shape, dev->layers = layers, dev->options.max_tokens = arg.step.T,
    dev->options.n_pages = n_pages;
    dev->kv_layer_elems = (size_t)n_pages * 2 * model->K * shape.B * model->D;
    arg.L = (int)(BENCH_CACHE_BYTES / (dev->kv_layer_elems * sizeof(bf16))) + 1;
    if (arg.L > BENCH_MAX_SETS) arg.L = BENCH_MAX_SETS;
    shape.L = arg.L;
    dev->kv_pool = bench_random(dev, dev->kv_layer_elems * arg.L, 1),
    arg.q = bench_random(dev, q_elems, 2), arg.o = bench_random(dev, q_elems, 1);
    if (!dev->error.code) attn_open(dev);
    if (!dev->error.code)
        upload_open(dev, &dev->upload,
                    (size_t)arg.step.T * sizeof(int) + attn_upload_bytes(dev) + 4096, false);
    if (!dev->error.code) {
        upload_begin(dev, &dev->upload);
        dev->rows.T = arg.step.T,
        dev->rows.pos = (const int *)upload_put(&dev->upload, arg.step.pos,
                                                (size_t)arg.step.T * sizeof(int));
        attn_plan_step(dev, &arg.step);
        upload_send(dev, &dev->upload);
        char label[64];
        double us = bench_time(dev, arg.L < 4 ? 4 : arg.L, bench_attn_op, &arg), n_pairs = 0,
               T = arg.step.T;
        for (int row = 0; row < step->rows_per_seq; row++)
            n_pairs += (double)step->n_seqs * (step->seq_len - row);
        snprintf(label, sizeof label,
                 step->shared             ? "%d x %d, %d shared"
                 : step->rows_per_seq > 1 ? "%d x %d tokens"
                                          : "%d x %d",
                 step->n_seqs, step->seq_len, step->shared);
        double kv_tok = step->shared + (double)step->n_seqs * (step->seq_len - step->shared);
        bench_report(ctx, step->name, model->model, label, us, 4.0 * model->H * model->D * n_pairs,
                   (kv_tok * 2 * model->K * model->D + T * 2 * model->H * model->D) * sizeof(bf16));
    }
    attn_close(dev);
    upload_close(&dev->upload);
    dev->attn = NULL, dev->layers = NULL;
    bench_free(dev, n_before);
    free(memory);
}

/* ---- LM head with sampling ----
 * RMSNorm, logits, and one sampled token per row at temperature 1. Results are not downloaded. One
 * set of buffers is enough, as each W is larger than the L2 cache.
 * FLOPs: 2MVE. Bytes: W, x and xn once. */

typedef struct bench_head_arg {
    toka_device *dev;
    toka_step step;
    bf16 *x;
} bench_head_arg;
static void bench_head_op(void *arg, int) {
    bench_head_arg *a = (bench_head_arg *)arg;
    samp_launch(a->dev, &a->step, a->x);
}
static void bench_head(bench *ctx, const bench_shape *model, int M) {
    toka_device *dev = ctx->dev;
    toka_shape shape = {.L = 1,
                        .H = model->H,
                        .K = model->K,
                        .D = model->D,
                        .E = model->E,
                        .F = model->F,
                        .V = model->V,
                        .V_all = model->V,
                        .eps = 1e-5f};
    toka_sampling sampling = {.temperature = 1, .top_p = 1, .repetition_penalty = 1};
    toka_sample_row *rows = (toka_sample_row *)calloc((size_t)M, sizeof *rows);
    bench_head_arg arg = {.dev = dev};
    int n_before = dev->n_allocations;
    if (!rows) abort();
    for (int i = 0; i < M; i++)
        rows[i] = toka_sample_row{
            .row = i, .scored_id = -1, .position = (uint32_t)i, .sampling = &sampling};
    arg.step = toka_step{.T = M, .n_samples = M, .samples = rows};
    dev->shape = &shape, dev->E = model->E, dev->F = model->F, dev->V = round_up_8(model->V),
    dev->options.max_tokens = dev->options.max_samples = M;
    dev->lm_head = weight{bench_random(dev, (size_t)dev->V * model->E, sqrtf(3.0f / model->E)),
                          NULL, dev->V, model->E};
    arg.x = bench_random(dev, (size_t)M * model->E, 1.7f),
    dev->xn = bench_random(dev, (size_t)(M + GEMM_PAD_ROWS) * model->E, 1.7f);
    float *norm = vector_alloc(dev, model->E);
    /* Each weight of the norm is 0x3F3F3F3F, which is 0.747. */
    if (norm) latch_error(dev, cudaMemset(norm, 0x3F, (size_t)model->E * sizeof *norm), "bench");
    dev->norm = norm;
    if (!dev->error.code) samp_open(dev);
    if (!dev->error.code) upload_open(dev, &dev->upload, samp_upload_bytes(dev) + 4096, false);
    if (!dev->error.code) {
        upload_begin(dev, &dev->upload);
        samp_plan_step(dev, &arg.step);
        upload_send(dev, &dev->upload);
        char label[64];
        double us = bench_time(dev, 3, bench_head_op, &arg);
        snprintf(label, sizeof label, "M=%d %dx%d", M, model->V, model->E);
        bench_report(ctx, "lm_head+sample", model->model, label, us, 2.0 * M * model->V * model->E,
                     ((double)model->V * model->E + 2.0 * M * model->E) * sizeof(bf16));
    }
    samp_close(dev);
    upload_close(&dev->upload);
    dev->samp = NULL;
    bench_free(dev, n_before);
    free(rows);
}

/* Runs all measurements and calls on_row after each of them. */
static int cuda_bench(toka_bench_fn *on_row, void *user, toka_err *e) {
    toka_device *dev = (toka_device *)calloc(1, sizeof *dev);
    if (!dev) abort();
    bench ctx = {dev, on_row, user};
    gpu_open(dev);
    if (!dev->error.code) gemm_open(dev);
    if (!dev->error.code) bench_read(&ctx);
    for (int i = 0; i < 2; i++)
        for (const bench_step &step : bench_steps)
            if (!dev->error.code) bench_attention(&ctx, &bench_shapes[i], &step);
    for (const bench_shape &model : bench_shapes)
        for (int M : bench_rows)
            if (!dev->error.code && model.V && M <= 4096) bench_head(&ctx, &model, M);
    if (!dev->error.code) bench_gemms(&ctx);
    *e = dev->error;
    cuda_close(dev);
    return e->code;
}

/* ===========================================================================
 * MARK: 15. The op table [host]
 * The ops of struct toka_backend (toka.h), CUDA graphs of decode steps, and the table toka_cuda.
 * After a failure the ops do nothing. The thread of the rank calls status() to get the error.
 * =========================================================================== */

/* ---- Before an op ---- */

static bf16 *dev_bf16(toka_dev_ptr a) { return (bf16 *)a.at; }

/* For tests: traps, like a kernel with a bug. */
__global__ static void fault_kernel() { __trap(); }

/* For tests: does not end before the group is aborted. Without a group it never ends. */
__global__ static void stall_kernel(volatile int *aborted) {
    while (!aborted || !*aborted) {}
}

/* Launches one of these kernels if a test has chosen this step (toka_debug_option). */
static void cuda_inject_fault(toka_device *dev) {
    if (dev->steps_to_fault && !--dev->steps_to_fault) fault_kernel<<<1, 1, 0, dev->stream>>>();
    if (dev->steps_to_stall && !--dev->steps_to_stall)
        stall_kernel<<<1, 1, 0, dev->stream>>>(dev->group ? dev->group->aborted : NULL);
}

/* ---- Captured steps ----
 *
 * Which steps: a step runs as a CUDA graph if all of its rows are sampled, in their order, unless
 * it is a timed step (chapter 13). There are graphs for GRAPH_N_SIZES sizes; a step is padded to
 * the next larger size. A padding row has token 0 and sees no keys. Its K and V go to the dummy
 * page, and its sampled id is dropped. Padding does not change the result of a row, because all
 * kernels compute a row in the same way for 1 to 8, 9 to 16, 17 to 32 and 33 to 64 rows, and then
 * within each 128 rows. Padding costs nothing in the GEMMs, as their tiles have 128 rows. Capture
 * runs no kernel; it uses a placeholder plan of attention (graph_capture_begin).
 *
 * Attention nodes: a graph has a fixed number of attention launches per layer, at most
 * GRAPH_MAX_ATTENTION, the same for layers with and without a window. Before each replay the host
 * gives every attention node the kernel and the grid of the step's work list. So one graph serves
 * all lengths, groups and levels of shared prefixes that need its number of launches. The GPU does
 * not wait for these updates. The alternative is kernels that read the amount of work from device
 * memory, but these would always need the largest grid.
 *
 * Sampling nodes: the last nodes of a graph are updated, too. If a row of the step is filtered, all
 * rows are handled as filtered rows; a plain row gets a filter that does nothing. Then the LM head
 * stores all logits, and samp_filter_kernel takes the place of samp_reduce_kernel. Plain rows get
 * bitwise the same result. Filters and lists are uploaded with the rest of the step. A step with a
 * filtered row is launched kernel by kernel in two cases: if its logits or lists do not fit at once
 * (V 128,256: more than 512 rows), or if there are tensor ranks, which would have to exchange the
 * logits of all rows. Of a held step (toka.h) only the body runs as a graph: the op of the last
 * layer launches it. With tensor ranks a held step is launched kernel by kernel.
 *
 * Tensor ranks: rank barriers use counts in GPU memory, so all-reduces are part of the graphs. All
 * ranks of a stage make the same choice between a graph and launches, because it depends only on
 * the step and on the values of group_agree. Messages between stages, and waits for other stages,
 * come before and after the graph. The last op of a step launches the graph: norm_logits_sample, or
 * send in a stage that is not the last.
 *
 * Gain on an H200: kernels start closer to each other, which saves 40 to 50 us a step up to 512
 * rows, and 100 us from 768 rows on; a graph of 8,192 rows would save nothing. The host works 60 to
 * 250 us a step instead of 500 to 800. Capture of all graphs takes about 0.2 s and 60 MB.
 * Tables: test/results/kernel-choices.md. */

static const int graph_sizes[GRAPH_N_SIZES] = {1,   2,   4,   8,   16,
                                               32,  64,  128, 256, 384,
                                               512, 640, 768, 896, GRAPH_MAX_ROWS};

/* Gives graphs.padded_step T rows, of which rows row0 .. T-1 become padding rows. */
static void graph_pad_step(toka_device *dev, int row0, int T) {
    static const toka_sampling padding = {.top_p = 1, .repetition_penalty = 1};
    step_graphs *graphs = &dev->graphs;
    for (int i = row0; i < T; i++) {
        graphs->ids[i] = graphs->pos[i] = 0,
        graphs->kv_slot[i] = dev->options.n_pages * dev->shape->B;
        graphs->windowed_slot[i] = dev->options.n_windowed * dev->shape->B;
        graphs->samples[i] = toka_sample_row{
            .row = i, .seq = -1, .scored_id = -1, .sampling = &padding};
    }
    graphs->padded_step.T = graphs->padded_step.n_samples = T;
    graphs->padded_step.ids = graphs->ids, graphs->padded_step.pos = graphs->pos,
    graphs->padded_step.kv_slot = graphs->kv_slot, graphs->padded_step.samples = graphs->samples;
    graphs->padded_step.windowed_slot = dev->options.n_windowed ? graphs->windowed_slot : NULL;
}

/* Returns whether the step is held on this rank: some of its rows get their masks after begin. */
static bool step_is_held(const toka_device *dev, const toka_step *step) {
    for (int i = 0; i < step->n_samples && dev->samp; i++)
        if (step->samples[i].awaits_mask) return true;
    return false;
}

static step_graph *graph_at(const toka_device *dev, bool is_body, int size, int kind) {
    const int index = is_body * GRAPH_N_WHOLE + size * GRAPH_N_KINDS + kind;
    return (step_graph *)&dev->graphs.all[index];
}

/* Returns the index in graph_sizes of the size to which the step is padded if it runs as a graph;
 * -1: it cannot run as a graph. */
static int graph_find_size(const toka_device *dev, const toka_step *step) {
    int size = 0;
    if (!dev->graphs.n_captured || step->n_samples != step->T || step->T > GRAPH_MAX_ROWS ||
        step->logits || step->adapters)
        return -1;
    if (dev->group && __atomic_load_n(&dev->group->no_graphs, __ATOMIC_ACQUIRE)) return -1;
    for (int i = 0; i < step->n_samples; i++)
        if (step->samples[i].row != i) return -1;
    while (graph_sizes[size] < step->T) size++;
    const bool is_held = step_is_held(dev, step);
    /* in the body of a small step, the last GEMM is fused with the norm before the LM head */
    if (dev->samp && (!is_held || graph_sizes[size] <= FUSE_NORM_MAX_ROWS) &&
        samp_any_filtered(dev, step) && !samp_fits_one_pass(dev, step, graph_sizes[size]))
        return -1;
    /* If a size was captured, it has a graph with one attention launch. */
    return graph_at(dev, is_held, size, 1)->exec ? size : -1;
}

/* Returns the step, padded to T rows. */
static const toka_step *graph_padded_step(toka_device *dev, const toka_step *step, int T) {
    step_graphs *graphs = &dev->graphs;
    graphs->padded_step = *step;
    memcpy(graphs->ids, step->ids, (size_t)step->T * sizeof *graphs->ids);
    memcpy(graphs->pos, step->pos, (size_t)step->T * sizeof *graphs->pos);
    memcpy(graphs->kv_slot, step->kv_slot, (size_t)step->T * sizeof *graphs->kv_slot);
    if (dev->options.n_windowed)
        memcpy(graphs->windowed_slot, step->windowed_slot ? step->windowed_slot : step->kv_slot,
               (size_t)step->T * sizeof *graphs->windowed_slot);
    memcpy(graphs->samples, step->samples, (size_t)step->n_samples * sizeof *graphs->samples);
    graph_pad_step(dev, step->T, T);
    return &graphs->padded_step;
}

/* Returns the graph of this size for the step's number of attention launches, that of its body if
 * it is held; NULL: there is none. */
static step_graph *graph_find(toka_device *dev, int size_index, bool is_held) {
    int n_launches = attn_launches(dev->attn);
    if (dev->attn_windowed) n_launches = max(n_launches, attn_launches(dev->attn_windowed));
    if (n_launches < 1 || n_launches > GRAPH_MAX_ATTENTION) return NULL;
    const int kind = attn_uses_cluster(dev->attn) ? 0 : n_launches;
    step_graph *graph = graph_at(dev, is_held, size_index, kind);
    return graph->exec ? graph : NULL;
}

static size_t graph_free_bytes(void) {
    size_t free_bytes = 0, total;
    if (cudaMemGetInfo(&free_bytes, &total)) cudaGetLastError();
    return free_bytes;
}

/* Appends to the text that describe() returns. */
static void graph_add_description(toka_device *dev, const char *fmt, ...) {
    va_list args;
    char *about = dev->group ? dev->group->description : dev->description;
    const size_t bytes =
        dev->group ? sizeof dev->group->description : sizeof dev->description;
    if (dev->group) pthread_mutex_lock(&dev->group->lock);
    size_t length = strlen(about);
    va_start(args, fmt);
    vsnprintf(about + length, bytes - length, fmt, args);
    va_end(args);
    if (dev->group) pthread_mutex_unlock(&dev->group->lock);
}

/* Returns the next step to capture, or NULL after the last one. The largest size is that to which
 * n_seqs rows are padded. Size 1 has at most two attention launches: a kernel and its merge. */
static const toka_step *cuda_capture(toka_device *dev) {
    step_graphs *graphs = &dev->graphs;
    const int max_rows = min(dev->options.max_tokens, dev->options.max_samples),
              end = dev->samp && tp_size(dev) == 1 ? 2 * GRAPH_N_WHOLE : GRAPH_N_WHOLE;
    if (!graphs->next_capture) graphs->free_bytes_before = graph_free_bytes();
    for (; !dev->options.eager && !dev->error.code && graphs->next_capture < end;
         graphs->next_capture++) {
        const int size = graphs->next_capture / GRAPH_N_KINDS % GRAPH_N_SIZES,
                  kind = graphs->next_capture % GRAPH_N_KINDS, T = graph_sizes[size];
        if (T > max_rows || (size && graph_sizes[size - 1] >= dev->options.n_seqs) ||
            (T == 1 && kind > 2) ||
            (!kind && !attn_may_use_cluster(dev->attn, size ? graph_sizes[size - 1] + 1 : 1)))
            continue;
        graphs->current = &graphs->all[graphs->next_capture++], graphs->capturing = true;
        graphs->padded_step = toka_step{};
        graph_pad_step(dev, 0, T);
        return &graphs->padded_step;
    }
    const size_t free_now = graph_free_bytes(),
                 used_bytes = graphs->free_bytes_before > free_now
                                  ? graphs->free_bytes_before - free_now
                                  : 0;
    if (graphs->n_captured && (!dev->group || !rank_index(dev)))
        graph_add_description(dev, ", %d graphs captured in %.2f s, %.0f MB", graphs->n_captured,
                              graphs->capture_s, used_bytes / 1e6);
    return NULL;
}

/* Returns the bytes of the upload buffer for the rows of a step and their sampling parameters. */
static size_t step_rows_bytes(const toka_device *dev, int T, int n_samples) {
    auto round_up = [](size_t bytes) { return (bytes + 15) & ~(size_t)15; };
    size_t sample_bytes = dev->samp ? round_up((size_t)n_samples * sizeof(samp_params)) +
                                          round_up((size_t)n_samples * sizeof(int))
                                    : 0;
    const size_t n_lists = dev->options.n_windowed ? 4 : 3;
    return n_lists * round_up((size_t)T * sizeof(int)) + sample_bytes;
}

/* Writes all inputs of the step to the upload buffer, and decides whether the step runs as a graph.
 * Rows and sampling parameters are at the beginning of the buffer. So their offsets depend only on
 * the number of rows, and graphs rely on this. They are written last, because only the plan of
 * attention shows whether there is a graph, and a graph needs a padded step.
 * size: index in graph_sizes of the size to which the step is padded if graph_find finds a graph;
 * -1: the step is launched kernel by kernel. */
static void step_write_upload(toka_device *dev, const toka_step *step, int size) {
    const int T = size < 0 ? step->T : graph_sizes[size];
    const toka_step *given = step;
    dev->upload.used = step_rows_bytes(dev, T, size < 0 ? step->n_samples : T);
    attn_plan_step(dev, step);
    const size_t copies_bytes = (size_t)step->n_copies * sizeof *step->copies;
    dev->rows.copies = (const toka_copy *)upload_put(&dev->upload, step->copies, copies_bytes);
    dev->rows.windowed_copies =
        step->windowed_copies
            ? (const toka_copy *)upload_put(&dev->upload, step->windowed_copies, copies_bytes)
            : dev->rows.copies;
    if (dev->lora) lora_plan_step(dev, step);
    dev->graphs.current = size < 0 ? NULL : graph_find(dev, size, step_is_held(dev, step));
    if (dev->graphs.current) step = graph_padded_step(dev, step, T);
    const size_t end_offset = dev->upload.used;
    dev->upload.used = 0, dev->step = step, dev->rows.T = step->T;
    dev->rows.ids = (const int *)upload_put(&dev->upload, step->ids, (size_t)step->T * sizeof(int));
    dev->rows.pos = (const int *)upload_put(&dev->upload, step->pos, (size_t)step->T * sizeof(int));
    dev->rows.kv_slot = (const int *)upload_put(&dev->upload, step->kv_slot,
                                                (size_t)step->T * sizeof(int));
    dev->rows.windowed_slot = step->windowed_slot
                                  ? (const int *)upload_put(&dev->upload, step->windowed_slot,
                                                            (size_t)step->T * sizeof(int))
                                  : dev->rows.kv_slot;
    /* a head that is launched kernel by kernel needs no padding */
    const toka_step *sampled = graph_is_body(dev) ? given : step;
    if (dev->samp) samp_plan_step(dev, sampled);
    assert(dev->upload.used <= step_rows_bytes(dev, step->T, step->n_samples));
    dev->upload.used = end_offset;
    if (dev->samp && graph_has_head(dev)) samp_plan_filters(dev, sampled);
    else if (dev->samp) samp_plan_penalized(dev, sampled);
}

/* Gives a plan of attention n_launches placeholders, three per level. */
static void graph_plan_placeholders(attn_plan *plan, int n_launches) {
    plan->n_fused = plan->n_tile_pages = 0;
    plan->n_levels = ceil_div(n_launches, 3);
    for (int i = 0; i < plan->n_levels; i++)
        plan->levels[i] = attn_level{.n_tiles = n_launches > 3 * i,
                                     .n_small = n_launches > 3 * i + 1,
                                     .n_merges = n_launches > 3 * i + 2,
                                     .merge_nq = 1};
}
/* Begins to capture a step. The attention kernels of later steps are not known yet. So the plans of
 * attention get placeholders; for kind 0 that of the layers without a window gets one launch of
 * cluster split-KV. */
static void graph_capture_begin(toka_device *dev, const toka_step *step) {
    step_graph *graph = dev->graphs.current;
    const int kind = (int)(graph - dev->graphs.all) % GRAPH_N_KINDS;
    dev->upload.current = 0;
    step_write_upload(dev, step, -1);
    dev->graphs.current = graph;
    graph_plan_placeholders(dev->attn, max(kind, 1));
    if (dev->attn_windowed) graph_plan_placeholders(dev->attn_windowed, max(kind, 1));
    if (!kind) {
        *dev->attn->levels = attn_level{.n_cta_merges = 1, .cta_split_warps = 1};
        dev->attn->is_alone = true;
        assert(attn_uses_cluster(dev->attn));
    }
    graph->variable_nodes = (cudaGraphNode_t *)malloc(
        ((size_t)dev->shape->L * (size_t)max(kind, 1) + GRAPH_SAMPLE_NODES) *
        sizeof *graph->variable_nodes);
    if (!graph->variable_nodes) abort();
    latch_error(dev, cudaStreamBeginCapture(dev->stream, cudaStreamCaptureModeRelaxed), "capture");
    if (dev->captures_to_fault && !--dev->captures_to_fault)
        /* a capture forbids synchronization, so this fails */
        latch_error(dev, cudaStreamSynchronize(dev->stream), "capture");
}
/* Called after a failed capture. If the device still works, the error is dropped, and the engine
 * runs without graphs. Then no rank of the group uses its graphs, because all ranks must run a step
 * in the same way. All ranks have ended their captures before the first real step. */
static void graphs_disable(toka_device *dev) {
    const toka_err error = dev->error;
    graphs_close(dev);
    dev->graphs.n_captured = 0, dev->graphs.next_capture = 2 * GRAPH_N_WHOLE;
    cudaGetLastError();
    dev->error.code = 0;
    latch_error(dev, cudaStreamSynchronize(dev->stream), "capture");
    if (!dev->group || !__atomic_exchange_n(&dev->group->no_graphs, true, __ATOMIC_ACQ_REL))
        graph_add_description(dev, ", no graphs (%s)", error.msg);
}

/* Returns the number of arguments of a kernel and the bytes of each. The result is cached, as the
 * next node often has the same kernel. */
static const graph_kernel *graph_kernel_info(toka_device *dev, const void *function) {
    step_graphs *graphs = &dev->graphs;
    for (const graph_kernel &kernel : graphs->kernels)
        if (kernel.function == function) return &kernel;
    graph_kernel *kernel = &graphs->kernels[graphs->n_kernels++ % GRAPH_CACHED_KERNELS];
    cudaError_t code = cudaSuccess;
    size_t offset;
    *kernel = graph_kernel{.function = function};
    while (kernel->n_args < GRAPH_MAX_ARGUMENTS &&
           !(code = cudaFuncGetParamInfo(function, (size_t)kernel->n_args, &offset,
                                         &kernel->arg_bytes[kernel->n_args])))
        kernel->n_args++;
    cudaGetLastError(); /* clears the error that argument n_args does not exist */
    /* Every kernel of a step has arguments. */
    if (!kernel->n_args) latch_error(dev, code, "capture");
    return kernel;
}
/* Records a node of the graph if it reads the upload buffer: if an 8-byte word of its arguments is
 * an address in the upload buffer. */
static void graph_add_upload_node(toka_device *dev, step_graph *graph, cudaGraphNode_t node) {
    const char *from = dev->upload.device[0], *end = from + dev->upload.cap;
    cudaKernelNodeParams params;
    latch_error(dev, cudaGraphKernelNodeGetParams(node, &params), "capture");
    const graph_kernel *kernel = dev->error.code ? NULL : graph_kernel_info(dev, params.func);
    if (dev->error.code) return;
    assert(kernel->n_args < GRAPH_MAX_ARGUMENTS);
    size_t n_words = 0; /* 8-byte words of all arguments */
    for (int i = 0; i < kernel->n_args; i++) n_words += (kernel->arg_bytes[i] + 7) / 8;
    graph_upload_node reader = {.node = node,
                                .params = params,
                                .arg_block = (char **)malloc(((size_t)kernel->n_args + n_words) *
                                                             sizeof(char *))};
    if (!reader.arg_block) abort();
    char **word = reader.arg_block + kernel->n_args;
    reader.params.kernelParams = (void **)reader.arg_block;
    for (int i = 0; i < kernel->n_args; word += (kernel->arg_bytes[i++] + 7) / 8) {
        memcpy(word, params.kernelParams[i], kernel->arg_bytes[i]);
        reader.params.kernelParams[i] = word;
        for (size_t j = 0; j < kernel->arg_bytes[i] / 8; j++) {
            if (word[j] < from || word[j] >= end) continue;
            assert(reader.n_upload_ptrs < GRAPH_MAX_POINTERS);
            reader.upload_ptrs[reader.n_upload_ptrs++] = word + j;
        }
    }
    if (reader.n_upload_ptrs) graph->upload_nodes[graph->n_upload_nodes++] = reader;
    else free(reader.arg_block);
}
/* Records the nodes that read the upload buffer. Variable nodes are left out: they are updated
 * before each replay anyway. */
static void graph_find_upload_nodes(toka_device *dev, step_graph *graph) {
    size_t n_nodes = 0;
    latch_error(dev, cudaGraphGetNodes(graph->cuda_graph, NULL, &n_nodes), "capture");
    cudaGraphNode_t *nodes = (cudaGraphNode_t *)malloc((n_nodes + 1) * sizeof *nodes);
    graph->upload_nodes = (graph_upload_node *)malloc((n_nodes + 1) * sizeof *graph->upload_nodes);
    if (!nodes || !graph->upload_nodes) abort();
    latch_error(dev, cudaGraphGetNodes(graph->cuda_graph, nodes, &n_nodes), "capture");
    for (size_t i = 0; i < n_nodes && !dev->error.code; i++) {
        cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
        latch_error(dev, cudaGraphNodeGetType(nodes[i], &type), "capture");
        bool is_skipped = type != cudaGraphNodeTypeKernel;
        for (int k = 0; k < graph->n_variable_nodes && !is_skipped; k++)
            is_skipped = graph->variable_nodes[k] == nodes[i];
        if (!is_skipped) graph_add_upload_node(dev, graph, nodes[i]);
    }
    free(nodes);
}
/* Makes the graph of the current step read the current half of the upload buffer. This costs the
 * host 0.6 us per node and the GPU nothing. */
static void graph_switch_upload(toka_device *dev) {
    step_graph *graph = dev->graphs.current;
    const ptrdiff_t delta = dev->upload.device[dev->upload.current] -
                            dev->upload.device[graph->upload_current];
    if (!delta) return;
    for (graph_upload_node *reader = graph->upload_nodes;
         reader < graph->upload_nodes + graph->n_upload_nodes; reader++) {
        for (int i = 0; i < reader->n_upload_ptrs; i++) *reader->upload_ptrs[i] += delta;
        latch_error(dev,
                    cudaGraphExecKernelNodeSetParams(graph->exec, reader->node, &reader->params),
                    "step");
    }
    graph->upload_current = dev->upload.current;
}
static void graph_capture_end(toka_device *dev) {
    step_graph *graph = dev->graphs.current;
    /* called after a failure, too, because the capture must end */
    const cudaError_t code = cudaStreamEndCapture(dev->stream, &graph->cuda_graph);
    latch_error(dev, code, "capture");
    if (!dev->error.code) graph_find_upload_nodes(dev, graph);
    if (!dev->error.code)
        latch_error(dev, cudaGraphInstantiate(&graph->exec, graph->cuda_graph, 0), "capture");
    if (!dev->error.code) latch_error(dev, cudaGraphUpload(graph->exec, dev->stream), "capture");
    dev->graphs.capturing = false, dev->graphs.current = NULL, dev->graphs.n_captured++;
    if (dev->error.code) graphs_disable(dev);
}

static double seconds_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- The steps ---- */

static void cuda_begin(toka_device *dev, const toka_step *step) {
    if (dev->graphs.capturing) {
        dev->graphs.capture_s -= seconds_now();
        graph_capture_begin(dev, step);
        return;
    }
    dev->last_begun = (dev->last_begun + 1) % STEP_RING_SIZE;
    if (!op_begin(dev, NULL)) return;
    const int size = graph_find_size(dev, step);
    const bool timed = clock_is_due(dev, size >= 0);
    upload_begin(dev, &dev->upload);
    step_write_upload(dev, step, timed ? -1 : size);
    upload_send(dev, &dev->upload);
    clock_begin(dev, step, timed);
    if (dev->graphs.current) graph_switch_upload(dev);
    cuda_inject_fault(dev);
    dev->graphs.next_node = 0, dev->graphs.n_graph_steps += dev->graphs.current != NULL;
}

static void cuda_end(toka_device *dev, const toka_step *, toka_hidden *x) {
    reduce_norm(dev, x, NULL); /* x may still be scattered in a step without sample rows */
    if (dev->graphs.capturing) {
        graph_capture_end(dev);
        dev->graphs.capture_s += seconds_now();
        return;
    }
    dev->graphs.current = NULL;
    latch_error(dev, cudaEventRecord(dev->clock.done[dev->last_begun], dev->stream), "step");
}

/* Waits after a failure, too: kernels that were launched before the failure may still run. */
static void cuda_finish(toka_device *dev, const toka_step *step) {
    dev->last_finished = (dev->last_finished + 1) % STEP_RING_SIZE;
    if (dev->group) group_sync(dev, dev->clock.done[dev->last_finished]);
    else latch_error(dev, cudaEventSynchronize(dev->clock.done[dev->last_finished]), "step");
    if (dev->error.code || (dev->group && toka_group_is_broken(dev->group))) return;
    clock_finish_step(dev);
    if (dev->samp) samp_collect(dev, step, &dev->samp->host_results[dev->last_finished]);
}

/* ---- The ops ----
 * An op sets the state of x also if the step replays a graph: then the graph contains the op's
 * kernels, and x has the same states as in the capture. */

static void cuda_copy_pages(toka_device *dev, const toka_step *step) {
    const toka_shape *shape = dev->shape;
    /* No name: the next op is noted instead. Copies are no part of a graph: they run before it. */
    if (!op_begin(dev, NULL)) return;
    launch_dependent(dev, "copies of pages", copy_pages_kernel,
                     {dim3((unsigned)step->n_copies, (unsigned)shape->L), 256}, dev->rows.copies,
                     dev->rows.windowed_copies, kv_layout_of(dev), dev->kv_ids, shape->B);
}

/* Sets the state after an op that has written x. next_norm: the fused norm of which the op was the
 * output side, or NULL. */
static void hidden_set_sum(const toka_device *dev, toka_hidden *x, const float *next_norm) {
    toka_hidden_set_sum(x, tp_size(dev));
    if (next_norm) x->state = TOKA_HIDDEN_NORMED, x->normed_for = next_norm;
}

/* What hidden_norm leaves in dev->xn. */
enum normed {
    NORMED,           /* norm(x), bf16; of a layer without a norm before the op x itself */
    NORMED_FUSED,     /* the op's first GEMM is the input side of the fused norm */
    NORMED_QUANTIZED, /* norm(x), e4m3 with dev->x_scale */
    NORMED_BY_GEMM    /* nothing: the GEMM takes x, and norms it */
};
/* Prepares dev->xn for the op that begins with this norm, or NULL, and then multiplies by w.
 * may_be_smallm: the op does that by gemm(), with hidden_gemm_args. */
static enum normed hidden_norm(toka_device *dev, toka_hidden *x, const float *norm, const weight *w,
                               bool may_be_smallm) {
    if (norm && fuse_norm_consume(x, norm)) return NORMED_FUSED;
    if (norm && reduce_norm(dev, x, norm)) return NORMED;
    const bf16 *rows = dev_bf16(toka_hidden_read(x));
    if (!norm) {
        const size_t n = (size_t)dev->step->T * dev->E / 8;
        if (!graph_is_replay(dev))
            launch_dependent(dev, "copy of x", copy_rows_kernel,
                             {dim3((unsigned)((n + 255) / 256)), 256}, (const uint4 *)rows,
                             (uint4 *)dev->xn, n);
        return NORMED;
    }
    const weight *next = w->scale ? w : NULL;
    if (may_be_smallm && gemm_is_smallm_fp8(dev, dev->step->T, w)) return NORMED_BY_GEMM;
    if (!graph_is_replay(dev)) rmsnorm(dev, rows, NULL, norm, dev->xn, dev->step->T, next);
    return next ? NORMED_QUANTIZED : NORMED;
}
/* Returns the arguments of the op's first GEMM; the caller adds y, ldy and epi. normed: what
 * hidden_norm has returned. */
static gemm_args hidden_gemm_args(const toka_device *dev, const toka_hidden *x, enum normed normed,
                                  const float *norm, const weight *w) {
    const bool by_gemm = normed == NORMED_BY_GEMM;
    return gemm_args{.M = dev->step->T, .x = by_gemm ? dev_bf16(x->data) : dev->xn, .ldx = dev->E,
                     .w = w, .norm_ready = normed == NORMED_FUSED,
                     .x_quantized = normed == NORMED_QUANTIZED, .norm = by_gemm ? norm : NULL};
}

/* In a model with one stage the kernel of embed has kept the ids. In the last of several stages the
 * sampled tokens are in its own last_tokens. */
static void cuda_keep_ids(toka_device *dev, const toka_step *) {
    if (pp_size(dev) == 1 || !op_begin(dev, "keep_ids") || graph_is_replay(dev)) return;
    launch_dependent(dev, "ids of tokens", keep_ids_kernel,
                     {dim3((unsigned)ceil_div(dev->step->T, 256)), 256}, dev->rows.ids,
                     dev->last_tokens, dev->rows.kv_slot, dev->kv_ids, dev->step->T);
}

/* Returns the norm of the next op if it can be fused into this GEMM (chapter 4); else NULL. */
static const float *fuse_norm_enable(const toka_device *dev, const weight *w, const float *norm) {
    const int M = dev->step->T;
    return M <= FUSE_NORM_MAX_ROWS && tp_size(dev) == 1 && !dev->has_fp8 &&
                   !lora_in_step(dev) && gemm_family(dev, M, w) == BY_GEMV
               ? norm
               : NULL;
}

/* x += in W^T (+ bias), in [T][K]. next_norm: the norm of the next op, or NULL. With tensor ranks
 * the all-reduce adds up the results of all. So only tensor rank 0 adds the old x; the other ranks
 * store plain partial sums. A reduce-scatter adds the old x itself. */
static void hidden_add(toka_device *dev, toka_hidden *x, const bf16 *in, const weight *w,
                       const float *next_norm) {
    const bool scatters = reduce_scatter_pays(dev, dev->step->T);
    gemm_args args = {.M = dev->step->T, .x = in, .ldx = w->K, .w = w, .y = dev_bf16(x->data),
                      .ldy = dev->E, .epi = dev->options.tp_rank ? EPI_STORE : EPI_RESIDUAL};
    assert(toka_hidden_is_whole(x) || (scatters && x->state == TOKA_HIDDEN_SHARDED));
    args.next_norm = fuse_norm_enable(dev, w, next_norm);
    hidden_set_sum(dev, x, args.next_norm);
    if (scatters) x->state = TOKA_HIDDEN_SCATTERED;
    if (graph_is_replay(dev)) return;
    if (scatters) gemm_reduce_scatter(dev, &args);
    else gemm(dev, &args);
    lora_add(dev, &args);
}

/* x += norm(in W^T (+ bias)). dev->xn is free: the op's first GEMM has read it. */
static void hidden_add_norm(toka_device *dev, toka_hidden *x, const bf16 *in, const weight *w,
                            const float *norm) {
    const gemm_args args = {.M = dev->step->T, .x = in, .ldx = w->K, .w = w, .y = dev->xn,
                            .ldy = dev->E, .epi = EPI_STORE};
    assert(toka_hidden_is_whole(x) && tp_size(dev) == 1);
    hidden_set_sum(dev, x, NULL);
    if (graph_is_replay(dev)) return;
    gemm(dev, &args);
    lora_add(dev, &args);
    launch_dependent(dev, "norm of what is added", add_norm_kernel, {dim3(dev->step->T), 128},
                     dev_bf16(x->data), dev->xn, norm, dev->E, 1.0f / dev->shape->E,
                     dev->shape->eps);
}

static void cuda_embed(toka_device *dev, const toka_step *step, toka_hidden *x) {
    if (!op_begin(dev, "embed") || !group_wait_sampled(dev, step)) return;
    step = dev->step;
    const bool fuses = step->T <= FUSE_NORM_MAX_ROWS && tp_size(dev) == 1 && !dev->has_fp8 &&
                       !lora_in_step(dev);
    hidden_set_sum(dev, x, fuses ? dev->layers->attn_norm : NULL);
    if (graph_is_replay(dev)) return;
    launch_dependent(dev, "embedding", embed_kernel, {dim3(step->T), 128}, dev->rows.ids,
                     dev->last_tokens, embed_table{dev->embed, dev->shape->v0, dev->shape->V,
                                                   hidden_embed_scale(dev->shape)},
                     dev_bf16(x->data), dev->E,
                     fuse_norm_args(dev, fuses ? dev->layers->attn_norm : NULL, false),
                     kept_ids{dev->rows.kv_slot, dev->kv_ids});
    clock_record_op(dev, TOKA_OP_EMBED);
}

/* Returns whether the norm before the LM head can be fused into the last `down` GEMM: all rows must
 * be sampled, in their order. */
static bool fuse_norm_for_head(const toka_device *dev, const toka_step *step) {
    bool all = dev->hopper && dev->samp && step->T <= FUSE_NORM_MAX_ROWS &&
               step->n_samples == step->T && dev->samp->in_order &&
               samp_fits_one_pass(dev, step, step->T);
    for (int i = 0; all && i < step->n_samples; i++) all = step->samples[i].row == i;
    return all;
}

static qkv_params qkv_params_of(const toka_device *dev, int layer, bf16 *q) {
    const toka_shape *shape = dev->shape;
    const layer_weights *weights = &dev->layers[layer];
    const step_rows *rows = &dev->rows;
    bf16 *kv = (bf16 *)kv_layer_at(kv_layout_of(dev), layer);
    const int *kv_slot = weights->window ? rows->windowed_slot : rows->kv_slot;
    return qkv_params{
        weights->qkv.bias, weights->q_norm, weights->k_norm, shape->eps, shape->H, shape->K,
        shape->B,          rows->pos,       kv_slot,         weights->rope, q,     kv,
        shape->D};
}
/* Returns whether a GEMM may have the QKV epilogue: it stores bf16 K and V, and norms one head. */
static bool qkv_may_fuse(const toka_device *dev, int layer) {
    const layer_weights *weights = &dev->layers[layer];
    return !kv_is_fp8(dev->kv_fp8, layer) && qkv_is_interleaved(dev, dev->shape->D) &&
           !weights->q_norm_all && !weights->k_norm_all;
}
/* Returns whether the step's GEMM is gemm_fp8_qkv. */
static bool qkv_is_fused_fp8(const toka_device *dev, int layer, const qkv_params *params) {
    return dev->layers[layer].qkv.scale && qkv_may_fuse(dev, layer) &&
           gemm_fp8_fuses_qkv(dev->step->T, params);
}
/* q = RoPE(xn W_q), and the stores of K and V. args: of the GEMM. */
static void qkv_rope_kv(toka_device *dev, int layer, gemm_args args, const qkv_params &params) {
    const int n_rows = dev->step->T;
    const toka_shape *shape = dev->shape;
    const layer_weights *weights = &dev->layers[layer];
    const bool fp8 = weights->qkv.scale != NULL,
               fuses = qkv_may_fuse(dev, layer) && !lora_in_step(dev);
    if (qkv_is_fused_fp8(dev, layer, &params)) {
        gemm_fp8_qkv(dev, &args, &params);
        return;
    }
    if (!fp8 && fuses && n_rows > SMALLM_MAX &&
        gemm_qkv_worth_fusing(dev, n_rows, &weights->qkv, &params)) {
        /* the epilogue does everything: bias, QK norm, RoPE, q, the pages of K and V */
        gemm_wgmma_qkv(dev, n_rows, dev->xn, dev->E, &weights->qkv, &params);
        return;
    }
    args.y = dev->qkv, args.ldy = weights->qkv.N, args.epi = EPI_STORE;
    if (fuses && gemm_fuses_qkv(dev, n_rows, &weights->qkv, &params))
        args.epi = EPI_QKV, args.qkv = &params;
    gemm(dev, &args);
    if (args.epi == EPI_QKV) return;
    lora_add(dev, &args);
    if (weights->q_norm_all || weights->k_norm_all)
        launch_dependent(dev, "norm of all heads", heads_norm_kernel, {dim3(n_rows, 2), 128},
                         dev->qkv, weights->q_norm_all, weights->k_norm_all, shape->H, shape->K,
                         shape->D, shape->eps, qkv_is_interleaved(dev, shape->D));
    rope_args rope = {params, dev->qkv, n_rows, qkv_is_interleaved(dev, shape->D)};
    launch_dependent(dev, "RoPE",
                     kv_is_fp8(dev->kv_fp8, layer) ? rope_kernel<true> : rope_kernel<false>,
                     {dim3(ceil_div(n_rows * (shape->H + 2 * shape->K), 8)), 256}, rope);
}
static void cuda_norm_qkv_rope_kv(toka_device *dev, const toka_step *, int layer, toka_hidden *x,
                                  toka_dev_ptr q) {
    if (!op_begin(dev, "norm_qkv_rope_kv")) return;
    const layer_weights *weights = &dev->layers[layer];
    const qkv_params params = qkv_params_of(dev, layer, dev_bf16(q));
    const bool is_latent = weights->mla.sizes != NULL;
    const enum normed normed = hidden_norm(dev, x, weights->attn_norm, &weights->qkv,
                                           is_latent || !qkv_is_fused_fp8(dev, layer, &params));
    if (graph_is_replay(dev)) return;
    (is_latent ? latent_qkv : qkv_rope_kv)(
        dev, layer, hidden_gemm_args(dev, x, normed, weights->attn_norm, &weights->qkv), params);
    clock_record_op(dev, TOKA_OP_QKV);
}

static void cuda_attention(toka_device *dev, const toka_step *, int layer, toka_dev_ptr q,
                           toka_dev_ptr o) {
    if (!op_begin(dev, "attention")) return;
    dev->graphs.role = graph_is_replay(dev)    ? GRAPH_ROLE_UPDATE
                       : dev->graphs.capturing ? GRAPH_ROLE_RECORD
                                               : GRAPH_ROLE_LAUNCH;
    attention(dev, layer, dev_bf16(q), dev_bf16(o));
    dev->graphs.role = GRAPH_ROLE_LAUNCH;
    clock_record_op(dev, TOKA_OP_ATTENTION);
}

static void cuda_out_residual(toka_device *dev, const toka_step *, int layer, toka_dev_ptr o,
                              toka_hidden *x) {
    if (!op_begin(dev, "out_residual")) return;
    const layer_weights *weights = &dev->layers[layer];
    const bf16 *in = weights->mla.sizes ? latent_values(dev, layer, dev_bf16(o)) : dev_bf16(o);
    if (weights->attn_post_norm)
        hidden_add_norm(dev, x, in, &weights->o, weights->attn_post_norm);
    else hidden_add(dev, x, in, &weights->o, weights->experts ? NULL : weights->mlp_norm);
    clock_record_op(dev, TOKA_OP_OUT);
}

/* act = activation(gate) * up. args: of the GEMM that computes gate and up. */
static void mlp_gate_up(toka_device *dev, const layer_weights *weights, gemm_args args) {
    const int F = weights->gate_up.N / 2;
    const bool stores = weights->is_gelu || lora_in_step(dev);
    args.y = stores ? dev->gate_up : dev->act;
    args.ldy = stores ? 2 * F : dev->F;
    args.epi = stores ? EPI_STORE : EPI_SWIGLU;
    gemm(dev, &args);
    if (lora_in_step(dev)) lora_gate_up(dev, &args, weights->is_gelu);
    else if (weights->is_gelu)
        launch_dependent(dev, "GELU", gelu_kernel,
                         {dim3((unsigned)ceil_div(F, 2048), (unsigned)args.M), 256},
                         dev->gate_up, dev->act, F, dev->F);
}

/* Launches the graph of a body after the op of the last layer. The head is launched kernel by
 * kernel. */
static void graph_end_body(toka_device *dev, int layer) {
    if (layer + 1 < dev->shape->L || !graph_is_replay(dev) || !graph_is_body(dev)) return;
    graph_launch(dev);
    dev->graphs.current = NULL;
}

static void cuda_norm_mlp_residual(toka_device *dev, const toka_step *, int layer, toka_hidden *x) {
    if (!op_begin(dev, "norm_mlp_residual")) return;
    const layer_weights *weights = &dev->layers[layer];
    if (weights->experts) {
        if (hidden_norm(dev, x, weights->mlp_norm, &weights->experts->logits, false) != NORMED)
            assert(!"the router reads bf16");
        hidden_set_sum(dev, x, NULL);
        if (!graph_is_replay(dev)) experts_run(dev, weights->experts, dev_bf16(x->data));
        clock_record_op(dev, TOKA_OP_MLP);
        graph_end_body(dev, layer);
        return;
    }
    const enum normed normed = hidden_norm(dev, x, weights->mlp_norm, &weights->gate_up, true);
    gemm_args gate_up = hidden_gemm_args(dev, x, normed, weights->mlp_norm, &weights->gate_up);
    if (!graph_is_replay(dev)) mlp_gate_up(dev, weights, gate_up);
    if (weights->mlp_post_norm)
        hidden_add_norm(dev, x, dev->act, &weights->down, weights->mlp_post_norm);
    else
        hidden_add(dev, x, dev->act, &weights->down,
                   layer + 1 < dev->shape->L            ? dev->layers[layer + 1].attn_norm
                   : fuse_norm_for_head(dev, dev->step) ? dev->norm
                                                        : NULL);
    clock_record_op(dev, TOKA_OP_MLP);
    graph_end_body(dev, layer);
}

static void cuda_norm_logits_sample(toka_device *dev, const toka_step *step, toka_hidden *x,
                                    toka_sample_result *results) {
    if (!op_begin(dev, "norm_logits_sample") || (dev->graphs.capturing && graph_is_body(dev)))
        return;
    const bool fused = fuse_norm_consume(x, dev->norm);
    reduce_norm(dev, x, NULL);
    const bf16 *rows = dev_bf16(toka_hidden_read(x));
    /* In a replay, cuda_all_reduce counts the barriers of reduce_norm. */
    if (dev->graphs.capturing) dev->graphs.current->n_barriers = 0;
    if (graph_is_replay(dev)) samp_update_graph(dev, dev->step);
    else samp_launch(dev, step, fused ? NULL : rows);
    if (dev->graphs.capturing) return;
    graph_launch(dev);
    if (graph_is_replay(dev) && dev->group)
        group_count_barriers(dev, dev->graphs.current->n_barriers);
    samp_download(dev, step, results);
    group_send_sampled(dev, step);
    clock_record_op(dev, TOKA_OP_HEAD);
}

/* ---- The table ---- */

extern "C" const toka_backend toka_cuda = {
    .name = "cuda",
    .probe = cuda_probe,
    .count = cuda_count,
    .supports = cuda_supports,
    .kv_bytes = cuda_kv_bytes,
    .open = cuda_open,
    .close = cuda_close,
    .rebind = cuda_rebind,
    .set_adapter = cuda_set_adapter,
    .sleep = cuda_sleep,
    .wake = cuda_wake,
    .describe = cuda_describe,
    .memory = cuda_memory,
    .status = cuda_status,
    .alloc = cuda_alloc,
    .upload = cuda_upload,
    .download = cuda_download,
    .nccl_memory = cuda_nccl_memory,
    .nccl_stream = cuda_nccl_stream,
    .nccl_free = cuda_nccl_free,
    .nccl_poll = cuda_nccl_poll,
    .group_open = group_open,
    .group_close = group_close,
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
    .keep_ids = cuda_keep_ids,
    .norm_qkv_rope_kv = cuda_norm_qkv_rope_kv,
    .attention = cuda_attention,
    .out_residual = cuda_out_residual,
    .norm_mlp_residual = cuda_norm_mlp_residual,
    .norm_logits_sample = cuda_norm_logits_sample,
    .bench = cuda_bench,
    .activation_bytes = sizeof(bf16),
    .page_tok = TOKA_GPU_PAGE_TOK,
    .has_windowed = true,
    .v_in_k = true,
    .warm_up = true,
    .default_tokens = TOKA_GPU_DEFAULT_TOKENS,
    .default_seqs = TOKA_GPU_DEFAULT_SEQS,
    .max_in_flight = STEPS_IN_FLIGHT,
    /* For chapter 21 of toka.c, from measurements of chapter 9 on an H100; units in toka.h. */
    .merge_cost = 8,
    .span_cost = 512,
    .rows_per_read = 32,
    .span_align_tok = 8, /* the smallest TMA box of attn_small has 8 positions */
};
