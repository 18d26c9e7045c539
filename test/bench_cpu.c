/* bench_cpu.c - how near the CPU backend comes to the machine's limits, as ratios within one run.
 *   cc -O3 -o /tmp/bench_cpu test/bench_cpu.c -lm -lpthread
 *   /tmp/bench_cpu [threads [set [bf16|f16|f32|fp8|int4|mxfp4 [rows]]]]
 *   /tmp/bench_cpu THREADS SET formats
 *   /tmp/bench_cpu THREADS SET linear
 * Decode: bytes of weights per second of a one-token step, against a plain read loop over the same
 * bytes with the same threads. Prefill: multiply-adds per second of a 512-token step, against a
 * loop of multiply-adds with the same instruction set. Sharing: attention of 256 rows over one
 * 1000-token prefix, read once for all rows, against once for each row. The model has the layer
 * shapes of Llama-3.2-1B, random weights and fewer layers. With `rows`, only: microseconds a row of
 * an MLP with 1 to 256 rows. A `!` marks a row that costs 3 % more than one of a smaller step. With
 * `formats`, only: the time of the layers' decode of one token in each format, in turns, how many
 * times as fast as bf16 it is, and the share of a loop that only reads the bytes; medians of the
 * rounds. fp8 has blocks of 128 x 128, int4 groups of 128 and zero points. With `linear`, only: a
 * linear mixer of Qwen3.5's shape, its rule in chunks and in the recurrent form, in turns. */
#include "../toka.c"
#include "linear.h"

enum { BENCH_LAYERS = 4, BENCH_ROWS = 256, BENCH_PREFIX = 1008, BENCH_PREFILL = 512 };

static toka_shape bench_shape = {.L = BENCH_LAYERS, .H = 32, .K = 8, .D = 64, .E = 2048, .F = 8192, .V = 32000, .V_all = 32000, .B = 16,
                                 .eps = 1e-5f, .max_len = 2048};
static float bench_freq[32];
static const toka_rope bench_rope = {bench_freq, 64, 1, false};
static const char *const bench_types[] = {"bf16", "f16", "f32", "fp8", "int4", "mxfp4"};
static volatile float bench_sink;
/* With one thread its CPU time, so that other processes do not count. */
static int bench_clock = CLOCK_MONOTONIC;

static double bench_now(void) {
    struct timespec t;
    clock_gettime(bench_clock, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

typedef struct bench { /* one open model */
    toka_layer layers[BENCH_LAYERS];
    toka_weights w;
    toka_device *d;
    toka_quant quants[BENCH_LAYERS * 7 + 1];
    int n_quants;
    char *bytes; /* all weights in one block */
    size_t n_bytes, n_layer_bytes, used;
    toka_dev_ptr x, q, o;
} bench;

static toka_tensor bench_quant(bench *b, int rows, int cols, toka_dtype type) {
    toka_quant *q = &b->quants[b->n_quants++];
    const int block = type == TOKA_MXFP4 ? 32 : 128;
    const size_t n_scales = (size_t)(type == TOKA_FP8 ? rows / block : rows) * (size_t)(cols / block);
    char *data = b->bytes ? b->bytes + b->used : NULL, *scale;
    b->used += (size_t)rows * (size_t)cols / (type == TOKA_FP8 ? 1 : 2);
    scale = b->bytes ? b->bytes + b->used : NULL;
    b->used += n_scales * 2;
    *q = (toka_quant){.rows = rows, .cols = cols, .block_rows = type == TOKA_FP8 ? block : 1, .block_cols = block, .scale = scale,
                      .scale_dtype = type == TOKA_MXFP4 ? TOKA_E8M0 : TOKA_BF16, .scale_row_step = cols / block, .scale_col_step = 1};
    if (type == TOKA_INT4) q->zero = b->bytes ? b->bytes + b->used : NULL, b->used += n_scales / 2;
    return (toka_tensor){.data = data, .dtype = type, .rows = rows, .cols = cols, .quant = q, .row_step = 1};
}
/* Random codes would be NaN in places, random scales infinite. */
static void bench_fill_quants(bench *b) {
    for (int i = 0; i < b->n_quants; i++) {
        const toka_quant *q = &b->quants[i];
        uint16_t scale = 0x3C00; /* 2^-7 */
        const size_t n = (size_t)(q->rows / q->block_rows) * (size_t)(q->cols / q->block_cols);
        for (size_t j = 0; j < n; j++)
            if (q->scale_dtype == TOKA_E8M0) ((unsigned char *)(uintptr_t)q->scale)[j] = (unsigned char)(117 + j * 7 % 8);
            else memcpy((char *)(uintptr_t)q->scale + 2 * j, &scale, 2);
    }
}

static toka_tensor bench_tensor(bench *b, int rows, int cols, toka_dtype type) {
    if (type > TOKA_F32 && rows > 1) return bench_quant(b, rows, cols, type);
    if (type > TOKA_F32) type = TOKA_BF16;
    toka_tensor t = {.data = b->bytes ? b->bytes + b->used : NULL, .dtype = type, .rows = rows, .cols = cols, .stride = cols};
    b->used += (size_t)rows * (size_t)cols * toka_number_bytes(type);
    return t;
}

/* Assigns the place of every tensor. The first call only counts bytes. */
static void bench_place(bench *b, toka_dtype type) {
    const toka_shape *s = &bench_shape;
    b->used = 0, b->n_quants = 0;
    for (int l = 0; l < s->L; l++) {
        toka_layer *y = &b->layers[l];
        y->rope = &bench_rope;
        y->q = bench_tensor(b, s->H * s->D, s->E, type), y->k = bench_tensor(b, s->K * s->D, s->E, type);
        y->v = bench_tensor(b, s->K * s->D, s->E, type), y->o = bench_tensor(b, s->E, s->H * s->D, type);
        y->mlp.gate = bench_tensor(b, s->F, s->E, type), y->mlp.up = bench_tensor(b, s->F, s->E, type);
        y->mlp.down = bench_tensor(b, s->E, s->F, type);
        y->attn_norm = bench_tensor(b, 1, s->E, type), y->mlp_norm = bench_tensor(b, 1, s->E, type);
    }
    b->n_layer_bytes = b->used;
    b->w = (toka_weights){.embed = bench_tensor(b, s->V, s->E, type), .norm = bench_tensor(b, 1, s->E, type),
                          .layers = b->layers};
    b->w.lm_head = b->w.embed;
    b->n_bytes = b->used;
}

static void bench_open(bench *b, toka_dtype type, int threads, const cpu_kernels *set) {
    toka_err e;
    *b = (bench){0};
    bench_place(b, type);
    b->bytes = mmap(NULL, b->n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    bench_place(b, type);
    uint32_t r = 1;
    /* values of about 0.01 to 0.03 with either sign */
    for (size_t i = 0; i < b->n_bytes; i += type == TOKA_F32 ? 4 : 2) {
        r = r * 1664525u + 1013904223u;
        uint32_t sign = r & 0x80000000u, mantissa = r >> 9 & 0x7FFFFF;
        uint32_t f = sign | 0x3C800000 | mantissa;
        uint16_t h = type == TOKA_BF16 ? (uint16_t)(f >> 16) : (uint16_t)(sign >> 16 | 0x2400 | mantissa >> 13);
        if (type == TOKA_FP8) h = (uint16_t)((h & 0xB7B7) | 0x2020); /* codes of exponents 4 to 6 */
        memcpy(b->bytes + i, type == TOKA_F32 ? (void *)&f : (void *)&h, type == TOKA_F32 ? 4 : 2);
    }
    bench_fill_quants(b);
    toka_device_options o = {.n_threads = threads, .max_tokens = 512, .max_samples = 8, .n_pages = 256 * 64 + 64,
                             .bf16 = set->x_type == TOKA_BF16};
    if (toka_cpu.open(&b->d, &o, &bench_shape, &b->w, &e)) {
        fprintf(stderr, "%s\n", e.msg);
        exit(2);
    }
    b->d->kernels = set;
    b->x = toka_cpu.alloc(b->d, 512 * 2048 * 4), b->q = toka_cpu.alloc(b->d, 512 * 2048 * 4);
    b->o = toka_cpu.alloc(b->d, 512 * 2048 * 4);
}
static void bench_close(bench *b) {
    toka_cpu.close(b->d);
    munmap(b->bytes, b->n_bytes);
}

/* T tokens of one sequence, from position pos on, with one row of logits. */
static double bench_step(bench *b, int T, int pos) {
    static int32_t ids[512], at[512], kv_slot[512], pages[128];
    static toka_sample_row row;
    toka_sample_result result;
    toka_span span = {0, T, 0, 0, pos + T};
    for (int t = 0; t < T; t++) ids[t] = (t * 37 + pos) % bench_shape.V, at[t] = kv_slot[t] = pos + t;
    for (int i = 0; i < 128; i++) pages[i] = i;
    row = (toka_sample_row){.row = T - 1, .scored_id = 5};
    toka_step s = {.T = T, .n_spans = 1, .n_samples = 1, .ids = ids, .pos = at, .kv_slot = kv_slot, .pages = pages, .spans = &span,
                   .samples = &row};
    toka_hidden x = {.data = b->x};
    double t0 = bench_now();
    toka_cpu.embed(b->d, &s, &x);
    for (int l = 0; l < bench_shape.L; l++) {
        toka_cpu.norm_qkv_rope_kv(b->d, &s, l, &x, b->q);
        toka_cpu.attention(b->d, &s, l, b->q, b->o);
        toka_cpu.out_residual(b->d, &s, l, b->o, &x);
        toka_cpu.norm_mlp_residual(b->d, &s, l, &x);
    }
    toka_cpu.norm_logits_sample(b->d, &s, &x, &result);
    return bench_now() - t0;
}

/* ---- The machine's limits ---- */

static void read_item(void *arg, int thread, int item) { /* reads 1 MB */
    const bench *b = arg;
    (void)thread;
    const uint64_t *p = (const void *)(b->bytes + ((size_t)item << 20)), *end = p + (1 << 17);
    uint64_t s[8] = {0};
    for (; p < end; p += 8)
        for (int i = 0; i < 8; i++) s[i] += p[i];
    bench_sink = (float)(s[0] ^ s[1] ^ s[2] ^ s[3] ^ s[4] ^ s[5] ^ s[6] ^ s[7]);
}
static double bench_read(bench *b) {
    double t0 = bench_now();
    cpu_parallel_for(&b->d->pool, read_item, b, (int)(b->n_bytes >> 20), INT64_MAX);
    return bench_now() - t0;
}

enum { FMA_ROUNDS = 1000000 };

/* Independent chains of multiply-adds: as many as the registers and the latency require; 8 *
 * FMA_ROUNDS in all. */
static void fma_c(void) {
    cpu_f32x4 a[14], m = {0.999f, 0.999f, 0.999f, 0.999f};
    for (int i = 0; i < 14; i++) a[i] = m * (float)i;
    for (int k = 0; k < FMA_ROUNDS * 8 / 14; k++)
        _Pragma("GCC unroll 14") for (int i = 0; i < 14; i++) a[i] = a[i] * m + m;
    for (int i = 0; i < 14; i++) bench_sink = a[i][0];
}
#ifdef __x86_64__
CPU_AVX2 static void fma_avx2(void) {
    __m256 a[8], m = _mm256_set1_ps(0.999f);
    CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_set1_ps((float)i);
    for (int k = 0; k < FMA_ROUNDS; k++)
        CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm256_fmadd_ps(a[i], m, m);
    CPU_UNROLL for (int i = 0; i < 8; i++) bench_sink = _mm256_cvtss_f32(a[i]);
}
CPU_AVX512 static void fma_avx512(void) {
    __m512 a[8], m = _mm512_set1_ps(0.999f);
    CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm512_set1_ps((float)i);
    for (int k = 0; k < FMA_ROUNDS; k++)
        CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm512_fmadd_ps(a[i], m, m);
    CPU_UNROLL for (int i = 0; i < 8; i++) bench_sink = _mm512_cvtss_f32(a[i]);
}
CPU_AVX512_BF16 static void fma_avx512_bf16(void) {
    __m512 a[8];
    __m512i m = _mm512_set1_epi32(0x3F803F80);
    CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm512_set1_ps((float)i);
    for (int k = 0; k < FMA_ROUNDS; k++)
        CPU_UNROLL for (int i = 0; i < 8; i++) a[i] = _mm512_dpbf16_ps(a[i], (__m512bh)m, (__m512bh)m);
    CPU_UNROLL for (int i = 0; i < 8; i++) bench_sink = _mm512_cvtss_f32(a[i]);
}
static void (*const fma_loops[])(void) = {fma_c, fma_avx2, fma_avx512, fma_avx512_bf16};
#else
static void (*const fma_loops[])(void) = {fma_c};
#endif

static void fma_item(void *arg, int thread, int item) {
    (void)thread, (void)item;
    fma_loops[*(int *)arg]();
}
static double bench_peak(bench *b, int set) { /* multiply-adds per second */
    int items = 4 * b->d->pool.n_threads, lanes = 4 << set; /* 32 for bf16: pairs */
    double t0 = bench_now();
    cpu_parallel_for(&b->d->pool, fma_item, &set, items, INT64_MAX);
    return (double)items * FMA_ROUNDS * 8 * lanes / (bench_now() - t0);
}

/* ---- Attention of many rows over one prefix ---- */

/* 256 sequences, each at its own last position after a prefix of BENCH_PREFIX tokens. mode 0: one
 * span over the prefix for all. 1: a span for each over the same pages. 2: a span for each over its
 * own copy. */
static double bench_share(bench *b, int mode) {
    static int32_t ids[BENCH_ROWS], pos[BENCH_ROWS], kv_slot[BENCH_ROWS], pages[BENCH_ROWS * 64];
    static toka_span spans[2 * BENCH_ROWS];
    int per = BENCH_PREFIX / 16, n_spans = 0, n_pages = 0;
    if (!mode) spans[n_spans++] = (toka_span){0, BENCH_ROWS, 0, 0, BENCH_PREFIX};
    for (int i = 0; i < (mode == 2 ? BENCH_ROWS : 1) * per; i++) pages[n_pages++] = i;
    for (int r = 0; r < BENCH_ROWS; r++) {
        if (mode) spans[n_spans++] = (toka_span){r, 1, mode == 2 ? r * per : 0, 0, BENCH_PREFIX};
        spans[n_spans++] = (toka_span){r, 1, n_pages, BENCH_PREFIX, 1};
        pages[n_pages++] = b->d->options.n_pages - 1 - r % 32;
        ids[r] = 1, pos[r] = BENCH_PREFIX, kv_slot[r] = 0;
    }
    toka_step s = {.T = BENCH_ROWS, .n_spans = n_spans, .ids = ids, .pos = pos, .kv_slot = kv_slot, .pages = pages,
                   .spans = spans};
    toka_cpu.attention(b->d, &s, 0, b->q, b->o);
    double t0 = bench_now();
    toka_cpu.attention(b->d, &s, 0, b->q, b->o);
    return bench_now() - t0;
}

static void bench_run(int threads, int set, int type) {
    static bench b;
    bench_open(&b, (toka_dtype)type, threads, &cpu_kernel_sets[set]);
    const toka_shape *s = &bench_shape;
    double read = 1e9, decode = 1e9, prefill = 1e9, peak = 0;
    double layer = (double)s->E * (2.0 * s->H * s->D + 2.0 * s->K * s->D + 3.0 * s->F);
    bench_step(&b, BENCH_PREFILL, 0);
    for (int i = 0; i < 12; i++) {
        read = MIN(read, bench_read(&b));
        decode = MIN(decode, bench_step(&b, 1, BENCH_PREFILL + i));
    }
    for (int i = 0; i < 2; i++) {
        peak = MAX(peak, bench_peak(&b, set));
        prefill = MIN(prefill, bench_step(&b, BENCH_PREFILL, 0));
    }
    double products = BENCH_PREFILL * layer * s->L + (double)s->E * s->V; /* without attention */
    printf("%-10s %-4s %d threads: decode %6.2f GB/s of %6.2f read: %5.1f %%; prefill %6.1f GFLOP/s of %6.1f: %5.1f %%",
           cpu_kernel_sets[set].name,
           bench_types[type], b.d->pool.n_threads, (double)b.n_bytes / decode / 1e9,
               (double)b.n_bytes / read / 1e9,
           100 * read / decode, 2 * products / prefill / 1e9, 2 * peak / 1e9, 100 * products / prefill / peak);
    if (type == 0) {
        float *kv = (float *)(void *)b.d->kv_cache;
        for (size_t i = 0; i < b.d->layer_at[1] / sizeof *kv; i++) kv[i] = 0.01f;
        double one = bench_share(&b, 0), same = bench_share(&b, 1), own = bench_share(&b, 2);
        double work = 2.0 * BENCH_ROWS * s->H * BENCH_PREFIX * s->D;
        printf("; 256 x 1008: shared %.2f ms (%.0f %% of peak), span each %.2f, copies %.2f", 1e3 * one,
               100 * work / one / peak,
               1e3 * same, 1e3 * own);
    }
    puts("");
    bench_close(&b);
}

/* The MLPs of all layers, which do not fit in any cache; the least time of several rounds. */
static void bench_rows(int threads, int set, int type) {
    static const int rows[] = {1, 2, 3, 4, 6, 7, 8, 10, 12, 13, 16, 19, 24, 28, 32, 48, 64, 65, 96, 127, 128, 192, 256};
    static bench b;
    double best[COUNT(rows)], least = 1e9;
    bench_open(&b, (toka_dtype)type, threads, &cpu_kernel_sets[set]);
    for (int i = 0; i < COUNT(rows); i++) best[i] = 1e9;
    for (int round = 0; round < 5; round++)
        for (int i = 0; i < COUNT(rows); i++) {
            toka_step s = {.T = rows[i]};
            toka_hidden x = {.data = b.x, .state = TOKA_HIDDEN_WHOLE};
            double t0 = bench_now();
            for (int l = 0; l < bench_shape.L; l++) toka_cpu.norm_mlp_residual(b.d, &s, l, &x);
            best[i] = MIN(best[i], (bench_now() - t0) / rows[i] / bench_shape.L);
            memset(plain_ptr(b.x), 0, 512 * 2048 * 4); /* or it would grow without end */
        }
    printf("%-10s %-4s %d threads, us a row:", cpu_kernel_sets[set].name, bench_types[type], b.d->pool.n_threads);
    for (int i = 0; i < COUNT(rows); least = MIN(least, best[i]), i++)
        printf(" %d:%.0f%s", rows[i], 1e6 * best[i], best[i] > 1.03 * least ? "!" : "");
    puts("");
    bench_close(&b);
}

/* One token through all layers, without embedding and LM head. */
static double bench_layers(bench *b) {
    static int32_t id, pos, kv_slot, page;
    toka_span span = {0, 1, 0, 0, 1};
    toka_step s = {.T = 1, .n_spans = 1, .ids = &id, .pos = &pos, .kv_slot = &kv_slot, .pages = &page, .spans = &span};
    toka_hidden x = {.data = b->x};
    toka_cpu.embed(b->d, &s, &x);
    double t0 = bench_now();
    for (int l = 0; l < bench_shape.L; l++) {
        toka_cpu.norm_qkv_rope_kv(b->d, &s, l, &x, b->q);
        toka_cpu.attention(b->d, &s, l, b->q, b->o);
        toka_cpu.out_residual(b->d, &s, l, b->o, &x);
        toka_cpu.norm_mlp_residual(b->d, &s, l, &x);
    }
    return bench_now() - t0;
}
/* Sorts n times; returns the middle one. */
static double bench_median(double *times, int n) {
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && times[j] < times[j - 1]; j--) {
            const double swap = times[j];
            times[j] = times[j - 1], times[j - 1] = swap;
        }
    return times[n / 2];
}
static void bench_formats(int threads, int set) {
    enum { ROUNDS = 41 };
    static const toka_dtype types[] = {TOKA_BF16, TOKA_FP8, TOKA_INT4, TOKA_MXFP4};
    static bench b[COUNT(types)];
    static double times[COUNT(types)][ROUNDS], ratios[COUNT(types)][ROUNDS], reads[COUNT(types)][ROUNDS];
    for (int i = 0; i < COUNT(types); i++) bench_open(&b[i], types[i], threads, &cpu_kernel_sets[set]);
    for (int round = 0; round < ROUNDS; round++)
        for (int i = 0; i < COUNT(types); i++) {
            times[i][round] = bench_layers(&b[i]);
            reads[i][round] = bench_read(&b[i]);
            ratios[i][round] = times[0][round] / times[i][round];
        }
    printf("%-10s %d threads, layers of one token:", cpu_kernel_sets[set].name, b[0].d->pool.n_threads);
    for (int i = 0; i < COUNT(types); i++) {
        const double time = bench_median(times[i], ROUNDS), layers = (double)b[i].n_layer_bytes;
        printf(" %s %.2f ms (%.2fx, %.0f %% of read)", bench_types[types[i]], 1e3 * time, bench_median(ratios[i], ROUNDS),
               100 * bench_median(reads[i], ROUNDS) * layers / (double)b[i].n_bytes / time);
        bench_close(&b[i]);
    }
    puts("");
}

/* The recurrent form: S changes with each token. kq: [2][J_pad] k and q; found: [2][U_pad]. */
static void bench_delta_rule(const toka_device *dev, const float *kq, float *found, float *S, const float *v, float decay, float beta) {
    const int J = dev->shape->linear.key_size, U = dev->shape->linear.value_size, J_pad = cpu_round_up16(J), U_pad = dev->U_pad;
    float *change = found, *o = found + U_pad, qk = 0;
    const cpu_small_gemm_args args = {.a = kq, .lda = (size_t)J_pad, .b = S, .ldb = (size_t)U_pad, .c = found, .ldc = (size_t)U_pad, .rows = 2,
                                      .k = J, .n = U_pad};
    dev->kernels->small_gemm(&args);
    for (int i = 0; i < J; i++) qk += kq[i] * kq[J_pad + i];
    for (int j = 0; j < U_pad; j++) {
        change[j] = j < U ? beta * (v[j] - decay * change[j]) : 0;
        o[j] = decay * o[j] + qk * change[j];
    }
    for (int i = 0; i < J; i++, S += U_pad)
        for (int j = 0; j < U_pad; j += 4) cpu_store4(S + j, cpu_load4(S + j) * decay + cpu_load4(change + j) * kq[i]);
}
static void bench_recurrent_item(void *arg, int thread, int head) {
    const cpu_linear_job *job = arg;
    const toka_device *dev = job->dev;
    const toka_linear_shape *shape = &dev->shape->linear;
    const int per_key = shape->value_heads / shape->key_heads, key = head / per_key, J = shape->key_size, J_pad = cpu_round_up16(J);
    float *kq = dev->scratch + (size_t)thread * dev->scratch_floats, *found = kq + 2 * J_pad, *z = found + 2 * dev->U_pad;
    for (int i = 0; i < job->step->n_states; i++) {
        const toka_state_span *span = &job->step->states[i];
        float *S = cpu_begin_span(job, span, (size_t)head * dev->head_floats, J * dev->U_pad);
        for (int t = span->row0; t < span->row0 + span->n_rows; t++) {
            const float *row = job->q + (size_t)t * (size_t)toka_linear_width(shape), *gates = row + key * job->at.gate_step + head % per_key;
            const float *values = row + key * job->at.value_step + head % per_key * shape->value_size, a = gates[job->at.a] + job->dt_bias[head];
            cpu_set_length(kq, row + job->at.k + key * job->at.key_step, J, 1);
            cpu_set_length(kq + J_pad, row + job->at.q + key * job->at.key_step, J, 1 / sqrtf((float)J));
            bench_delta_rule(dev, kq, found, S, values + job->at.v, expf(-expf(job->a_log[head]) * (a > 20 ? a : log1pf(expf(a)))),
                             1 / (1 + expf(-gates[job->at.b])));
            memcpy(z, values + job->at.z, (size_t)shape->value_size * sizeof *z);
            cpu_gated_norm(job, head, t, found + dev->U_pad, z);
        }
    }
}

/* The mixer's op without its convolutions, for one prompt of T rows, or (decode) for a row of each of 32 sequences. */
static double bench_rule(lin *l, void (*item)(void *, int, int), bool decode, int at) {
    l->step.T = decode ? 32 : l->T, l->step.n_states = decode ? 32 : 1;
    for (int i = 0; i < l->step.n_states; i++) {
        l->span[i] = decode ? (toka_state_span){i, 1, i, i} : (toka_state_span){0, l->T, -1, 0};
    }
    for (int i = 0; i < l->T; i++) l->pos[i] = decode ? at : i;
    cpu_linear_job job = {.dev = l->d, .step = &l->step, .weights = &l->linear, .at = toka_linear_places(&l->shape.linear, &l->linear),
                          .q = l->rows, .o = l->o, .states = l->d->states, .a_log = cpu_vector_f32(l->d, 0, &l->linear.a_log),
                          .dt_bias = cpu_vector_f32(l->d, 1, &l->linear.dt_bias), .norm = cpu_vector_f32(l->d, 2, &l->linear.norm)};
    const double t0 = bench_now();
    cpu_parallel_for(&l->d->pool, item, &job, l->shape.linear.value_heads, 1 << 30);
    return bench_now() - t0;
}
static void bench_linear(int threads, int set) {
    const toka_linear_shape shape = {1, 16, 32, 128, 128, 4};
    lin l;
    lin_open(&l, &shape, BENCH_PREFILL, threads, &cpu_kernel_sets[set]);
    double chunked[2] = {1e9, 0}, recurrent[2] = {1e9, 0};
    for (int round = 0; round < 5; round++) {
        chunked[0] = MIN(chunked[0], bench_rule(&l, cpu_linear_item, false, 0));
        recurrent[0] = MIN(recurrent[0], bench_rule(&l, bench_recurrent_item, false, 0));
    }
    for (int i = 0; i < 16 * 4; i++) { /* whole chunks */
        chunked[1] += bench_rule(&l, cpu_linear_item, true, i);
        recurrent[1] += bench_rule(&l, bench_recurrent_item, true, i);
    }
    printf("%-10s %d threads, a linear mixer's rule: prefill of %d tokens %.2f ms in chunks, %.2f recurrent (%.2fx); "
           "32 sequences, a token each, %.3f and %.3f ms (%.2fx)\n", cpu_kernel_sets[set].name, l.d->pool.n_threads, l.T, 1e3 * chunked[0],
           1e3 * recurrent[0], recurrent[0] / chunked[0], 1e3 * chunked[1] / 64, 1e3 * recurrent[1] / 64, recurrent[1] / chunked[1]);
    lin_close(&l);
}

int main(int argc, char **argv) {
    int threads = argc > 1 ? atoi(argv[1]) : 0;
    for (int i = 0; i < 32; i++) bench_freq[i] = (float)pow(500000, -2.0 * i / 64);
    if (threads == 1) bench_clock = CLOCK_THREAD_CPUTIME_ID;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int set = cpu_n_kernel_sets() - 1; argc > 3 && set >= 0 && !strcmp(argv[3], "formats"); set--)
        if (atoi(argv[2]) == set) bench_formats(threads, set);
    for (int set = cpu_n_kernel_sets() - 1; argc > 3 && set >= 0 && !strcmp(argv[3], "linear"); set--)
        if (atoi(argv[2]) == set) bench_linear(threads, set);
    for (int set = cpu_n_kernel_sets() - (cpu_bf16_kernels() ? 0 : 1); set >= 0; set--)
        for (int type = 0; type < COUNT(bench_types); type++)
            if ((argc < 3 || atoi(argv[2]) == set) && (argc < 4 || !strcmp(argv[3], bench_types[type])))
                (argc < 5 ? bench_run : bench_rows)(threads, set, type);
    return 0;
}
