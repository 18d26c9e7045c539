/* test_cpu.c - tests chapters 28 and 30 against plain float64 arithmetic, op by op, for every
 * instruction set of this machine.
 *
 * A random model of odd sizes is made in memory. Weights start 1 to 3 bytes after an aligned
 * address, in heap blocks of the exact size, so that ASan reports any read past the end. Every op
 * writes to poisoned outputs between guard bands, K and V start as NaN, and pages are assigned at
 * random. The second half runs whole steps, divided in many ways, and compares bytes. */

enum { CPU_GUARD = 64 }; /* floats before and after every buffer */

typedef struct cpu_case {
    toka_shape sh;
    toka_weights w;
    toka_layer layers[2];
    float freq[320];
    void *heap[400];
    int n_heap;
    uint64_t seed;
    toka_rope rope;
    toka_mla mla[2];
    toka_moe moe[2];
    toka_mlp experts[2][12];
    toka_quant quants[200];
    double *numbers[200]; /* of each quantized weight */
    int n_quants, format; /* the format of the next matrices; 0: plain */
} cpu_case;

/* ---- Number formats, by their definition ---- */

static double ref_half(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 0 ? ldexp(m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexp(1024 + m, e - 25);
    return h & 0x8000 ? -v : v;
}
static cpu_case *ref_case; /* whose quantized weights ref_element looks up */

static double ref_element(const toka_tensor *t, size_t i) {
    const unsigned char *p = t->data;
    if (t->quant) return ref_case->numbers[t->quant - ref_case->quants][i];
    if (t->dtype == TOKA_F32) {
        float f;
        memcpy(&f, p + 4 * i, 4);
        return f;
    }
    uint16_t h = (uint16_t)(p[2 * i] | p[2 * i + 1] << 8);
    if (t->dtype == TOKA_F16) return ref_half(h);
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
/* Rounds to nearest for normal values, toward zero for subnormal ones. */
static uint16_t to_half(double v) {
    int e;
    double m = frexp(fabs(v), &e);
    uint16_t sign = v < 0 ? 0x8000 : 0;
    if (e < -13) return (uint16_t)(sign | (int)ldexp(fabs(v), 24));
    int bits = (int)lrint(m * 2048) + ((e + 13) << 10);
    return (uint16_t)(sign | bits);
}

static int rnd_range(uint64_t *s, int from, int to) { return from + (int)(rnd(s) % (uint64_t)(to - from + 1)); }

/* ---- Quantized weights: random codes, packed by the formats' definitions in toka.h ---- */

enum { FMT_PLAIN, FMT_FP8_BLOCK, FMT_FP8_ROW, FMT_INT4, FMT_INT4_ZERO, FMT_GPTQ, FMT_GPTQ_ORDER, FMT_AWQ, FMT_MXFP4, FMT_ODD, FMT_COUNT };

static double ref_fp8(unsigned b) {
    int e = b >> 3 & 15, m = b & 7;
    double v = (b & 127) == 127 ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return b & 128 ? -v : v;
}
static void put_nibble(unsigned char *p, size_t word, int place, int v) {
    p[4 * word + (size_t)place / 2] |= (unsigned char)(v << (place % 2 * 4));
}
static int awq_place(int row) { return (int[]){0, 4, 1, 5, 2, 6, 3, 7}[row % 8]; }

static void *case_alloc(cpu_case *c, size_t n) {
    size_t odd = 1 + (size_t)c->n_heap % 3;
    char *p = mem_zalloc(n + odd);
    c->heap[c->n_heap++] = p;
    return p + odd;
}

/* A matrix in c->format, as wide as `scale` says, one block of scales a column group. */
static toka_tensor make_quant(cpu_case *c, int rows, int cols, double width) {
    static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    toka_quant *q = &c->quants[c->n_quants];
    double *numbers = c->numbers[c->n_quants++] = mem_alloc((size_t)rows * (size_t)cols * sizeof *numbers);
    const int f = c->format, group = f == FMT_FP8_BLOCK ? 24 : f == FMT_FP8_ROW ? cols : f == FMT_ODD ? 20 : 32;
    const bool fp8 = f == FMT_FP8_BLOCK || f == FMT_FP8_ROW, mx = f == FMT_MXFP4, column_first = f == FMT_GPTQ || f == FMT_GPTQ_ORDER || f == FMT_AWQ;
    const int groups = (cols + group - 1) / group, block_rows = f == FMT_FP8_BLOCK ? 16 : 1, row_words = (rows + 7) / 8;
    unsigned char *data = case_alloc(c, (size_t)(fp8 ? rows * cols : mx ? rows * cols / 2 + 1 : (rows + 7) * (cols + 7) / 2 + 64));
    const int n_scales = (rows + block_rows - 1) / block_rows * groups;
    char *scales = case_alloc(c, (size_t)n_scales * 4);
    unsigned char *zeros = f == FMT_INT4_ZERO || column_first || f == FMT_ODD ? case_alloc(c, (size_t)(row_words * groups * 4)) : NULL;
    int32_t *order = f == FMT_GPTQ_ORDER ? case_alloc(c, 4 * (size_t)cols) : NULL;
    *q = (toka_quant){.packing = f == FMT_AWQ ? TOKA_PACK_AWQ : column_first ? TOKA_PACK_GPTQ : TOKA_PACK_ROWS, .rows = rows, .cols = cols,
                      .block_rows = block_rows, .block_cols = group, .scale = scales, .scale_dtype = mx ? TOKA_E8M0 : c->n_quants % 2 ? TOKA_F16 : TOKA_F32,
                      .scale_row_step = column_first ? 1 : groups, .scale_col_step = column_first ? rows : 1, .zero = zeros,
                      .zero_add = f == FMT_GPTQ, .group = order};
    double scale[2048];
    int zero[4096];
    assert(n_scales <= COUNT(scale) && rows * groups <= COUNT(zero));
    for (int i = 0; i < n_scales; i++) {
        float s = (float)(width * (0.5 + rnd_unit(&c->seed)) / (fp8 ? 100 : 6));
        uint16_t h = to_half(s);
        unsigned char e = (unsigned char)(127 + (int)lrint(log2(s)));
        if (q->scale_dtype == TOKA_F16) memcpy(scales + 2 * i, &h, 2), scale[i] = ref_half(h);
        else if (mx) scales[i] = (char)e, scale[i] = ldexp(1, e - 127);
        else memcpy(scales + 4 * i, &s, 4), scale[i] = s;
    }
    for (int r = 0; r < rows; r++)
        for (int g = 0; g < groups; g++) {
            int v = rnd_range(&c->seed, 4, 11);
            zero[r * groups + g] = zeros ? v + q->zero_add : 8;
            if (zeros) put_nibble(zeros, q->packing == TOKA_PACK_ROWS ? (size_t)(r / 8 * groups + g) : (size_t)(g * row_words + r / 8),
                                  f == FMT_AWQ ? awq_place(r) : r % 8, v);
        }
    for (int i = 0; order && i < cols; i++) {
        int32_t g = (i * 7 + 3) % groups;
        memcpy((char *)order + 4 * i, &g, 4);
    }
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < cols; k++) {
            const int g = order ? (k * 7 + 3) % groups : k / group, v = rnd_range(&c->seed, 0, 15);
            const double s = scale[r / block_rows * q->scale_row_step + g * q->scale_col_step];
            double *to = &numbers[r * cols + k];
            if (fp8) {
                do data[r * cols + k] = (unsigned char)rnd_range(&c->seed, 0, 255);
                while ((data[r * cols + k] & 127) > 0x6C); /* no NaN, and few large numbers */
                *to = ref_fp8(data[r * cols + k]) * s;
            } else if (mx) {
                data[(r * cols + k) / 2] |= (unsigned char)(v << ((r * cols + k) % 2 * 4));
                *to = e2m1[v & 7] * (v & 8 ? -1 : 1) * s;
            } else {
                if (q->packing == TOKA_PACK_GPTQ) put_nibble(data, (size_t)(k / 8 * rows + r), k % 8, v);
                else if (q->packing == TOKA_PACK_AWQ) put_nibble(data, (size_t)(k * row_words + r / 8), awq_place(r), v);
                else put_nibble(data, (size_t)(r * ((cols + 7) / 8) + k / 8), k % 8, v);
                *to = (v - zero[r * groups + g]) * s;
            }
            *to = (float)*to;
        }
    return (toka_tensor){.data = data, .dtype = fp8 ? TOKA_FP8 : mx ? TOKA_MXFP4 : TOKA_INT4, .rows = rows, .cols = cols, .quant = q, .row_step = 1};
}

static toka_tensor make_tensor(cpu_case *c, int rows, int cols, toka_dtype type, double mean, double scale) {
    if (c->format && rows > 1) return make_quant(c, rows, cols, scale);
    size_t n = (size_t)rows * (size_t)cols, size = type == TOKA_F32 ? 4 : 2;
    size_t odd = 1 + (size_t)c->n_heap % 3; /* in a file they may start at any byte */
    char *p = mem_alloc(n * size + odd);
    c->heap[c->n_heap++] = p;
    for (size_t i = 0; i < n; i++) {
        float f = (float)(mean + scale * rnd_normal(&c->seed));
        uint32_t u;
        memcpy(&u, &f, 4);
        uint16_t h = type == TOKA_F16 ? to_half(f) : (uint16_t)(u >> 16);
        memcpy(p + odd + i * size, type == TOKA_F32 ? (void *)&f : (void *)&h, size);
    }
    return (toka_tensor){.data = p + odd, .dtype = type, .rows = rows, .cols = cols, .stride = cols};
}

typedef struct cpu_sizes {
    int H, K, D, E, F, V, B;
    toka_dtype type;
    int extras; /* has biases, has QK-norm */
    int window; /* window of layer 1 */
    int Dv;     /* 0: D */
    int kinds;  /* a sum of the kinds below */
    int format; /* of the layers' matrices and the LM head; 0: plain */
    int kv_fp8; /* layers 0 to kv_fp8-1 have FP8 K and V */
} cpu_sizes;

enum { /* kinds of layers and models */
    KIND_GEMMA = 1,    /* norms 1 + w, caps, scales of embedding and scores, gelu */
    KIND_POST = 2,     /* post norms */
    KIND_SINKS = 4,    /* sinks */
    KIND_CLAMPED = 8,  /* clamped SwiGLU, biases of MLPs */
    KIND_ALL_NORM = 16, /* one norm of all heads, clipped q, k and v, no norms before mixer and feed-forward */
    KIND_COHERE = 32,  /* LayerNorm, logit scale, RoPE on neighbours, mixer and feed-forward side by side */
    KIND_GRANITE = 64, /* residual scale, partial RoPE, layer 1 without RoPE */
    KIND_MLA = 128,    /* with q_a in layer 0, without in layer 1 */
    KIND_MOE = 256,    /* experts in layer 1, softmax before the choice, gated shared expert */
    KIND_TOPK = 512,   /* experts in both layers, softmax after the choice, biases */
    KIND_GROUPS = 1024, /* experts in layer 1, sigmoid, groups by top 2, choice bias, shared expert */
    KIND_GROUP_MAX = 2048 /* with MOE: groups by their highest score */
};
enum { X_COUNT = 12, MLA_LATENT = 24, MLA_ROPE = 8, MLA_NOPE = 12, MLA_V = 10 };

static toka_mlp make_mlp(cpu_case *c, const cpu_sizes *z, int F, bool biases) {
    toka_mlp mlp = {.gate = make_tensor(c, F, z->E, z->type, 0, 1 / sqrt(z->E)), .up = make_tensor(c, F, z->E, z->type, 0, 1 / sqrt(z->E)),
                    .down = make_tensor(c, z->E, F, z->type, 0, 1 / sqrt(F))};
    if (biases) {
        mlp.gate_bias = make_tensor(c, 1, F, z->type, 0, 0.5), mlp.up_bias = make_tensor(c, 1, F, z->type, 0, 0.5);
        mlp.down_bias = make_tensor(c, 1, z->E, z->type, 0, 0.5);
    }
    return mlp;
}

/* Never quantized. Two experts have equal scores. */
static toka_tensor make_router(cpu_case *c, int E) {
    const int format = c->format;
    c->format = 0;
    toka_tensor router = make_tensor(c, X_COUNT, E, TOKA_F32, 0, 2 / sqrt(E));
    memcpy((char *)(uintptr_t)router.data + 9 * 4 * E, (const char *)router.data + 2 * 4 * E, 4 * (size_t)E);
    c->format = format;
    return router;
}

static void make_moe(cpu_case *c, const cpu_sizes *z, int l) {
    toka_moe *moe = &c->moe[l];
    const int F = z->F / 2 + 3 * l;
    const bool groups = z->kinds & (KIND_GROUPS | KIND_GROUP_MAX);
    *moe = (toka_moe){.n_experts = X_COUNT, .top_k = 3, .scale = l ? 1.5f : 1, .router = make_router(c, z->E),
                      .experts = c->experts[l], .kind = z->kinds & KIND_TOPK ? TOKA_ROUTER_TOPK
                                                        : z->kinds & KIND_GROUPS ? TOKA_ROUTER_SIGMOID : TOKA_ROUTER_SOFTMAX,
                      .renormalize = !(z->kinds & KIND_GROUP_MAX) && !(z->kinds & KIND_TOPK),
                      .groups_by_top2 = z->kinds & KIND_GROUPS};
    if (groups) moe->n_groups = 4, moe->top_groups = 2;
    if (z->kinds & KIND_TOPK) moe->router_bias = make_tensor(c, 1, X_COUNT, z->type, 0, 1);
    if (z->kinds & KIND_GROUPS) moe->choice_bias = make_tensor(c, 1, X_COUNT, TOKA_F32, 0, 0.3);
    for (int i = 0; i < X_COUNT; i++) c->experts[l][i] = make_mlp(c, z, F, z->kinds & KIND_TOPK);
    if (!(z->kinds & KIND_TOPK)) moe->shared = make_mlp(c, z, F + 5, false);
    if (z->kinds & KIND_MOE) moe->shared_gate = make_tensor(c, 1, z->E, z->type, 0, 1 / sqrt(z->E));
    c->layers[l].moe = moe, c->layers[l].mlp = (toka_mlp){0};
}

static void make_mla(cpu_case *c, const cpu_sizes *z, int l) {
    toka_mla *mla = &c->mla[l];
    const int rank = l ? z->E : 20;
    *mla = (toka_mla){.latent = MLA_LATENT, .rope = MLA_ROPE, .nope = MLA_NOPE, .v = MLA_V, .eps = c->sh.eps};
    if (!l) mla->q_a = make_tensor(c, rank, z->E, z->type, 0, 1 / sqrt(z->E)), mla->q_a_norm = make_tensor(c, 1, rank, z->type, 1, 0.2);
    mla->q_b = make_tensor(c, z->H * (MLA_NOPE + MLA_ROPE), rank, z->type, 0, 2 / sqrt(rank));
    mla->kv_a = make_tensor(c, MLA_LATENT + MLA_ROPE, z->E, z->type, 0, 1 / sqrt(z->E));
    mla->kv_a_norm = make_tensor(c, 1, MLA_LATENT, z->type, 1, 0.2);
    mla->kv_b = make_tensor(c, z->H * (MLA_NOPE + MLA_V), MLA_LATENT, z->type, 0, 1 / sqrt(MLA_LATENT));
    c->layers[l].mla = mla, c->layers[l].q.rows = c->layers[l].k.rows = c->layers[l].v.rows = 0;
    c->layers[l].o = make_tensor(c, z->E, z->H * MLA_V, z->type, 0, 1 / sqrt(z->H * MLA_V));
}

/* The numbers of a model of these kinds that are not tensors. */
static void case_kinds(cpu_case *c, const cpu_sizes *z) {
    toka_shape *s = &c->sh;
    if (z->kinds & KIND_GEMMA)
        s->norm_offset = 1, s->attn_cap = 3, s->logit_cap = 5, s->embed_scale = 7.5f, s->attn_scale = 0.3f;
    if (z->kinds & KIND_CLAMPED) s->swiglu_limit = 1.5f;
    if (z->kinds & KIND_ALL_NORM) s->qkv_limit = 0.9f;
    if (z->kinds & KIND_COHERE) s->layer_norm = true, s->logit_scale = 0.25f, c->rope.neighbours = true;
    if (z->kinds & KIND_GRANITE) s->residual_scale = 0.22f, c->rope.dims = z->D / 4 * 2;
    if (z->kinds & KIND_MLA) c->rope.dims = MLA_ROPE;
    for (int l = 0; l < 2; l++) {
        toka_layer *y = &c->layers[l];
        const double mean = z->kinds & KIND_GEMMA ? 0 : 1;
        if (z->kinds & KIND_GEMMA) y->activation = TOKA_GELU_TANH;
        if (z->kinds & KIND_CLAMPED) y->activation = TOKA_SWIGLU_CLAMPED, y->mlp = make_mlp(c, z, z->F, true);
        if (z->kinds & KIND_POST)
            y->attn_post_norm = make_tensor(c, 1, z->E, z->type, mean, 0.2), y->mlp_post_norm = make_tensor(c, 1, z->E, z->type, mean, 0.2);
        if (z->kinds & KIND_SINKS) y->sinks = make_tensor(c, 1, z->H, z->type, 0, 2);
        if (z->kinds & KIND_ALL_NORM) {
            y->q_norm = make_tensor(c, 1, z->H * z->D, z->type, 1, 0.2), y->k_norm = make_tensor(c, 1, z->K * z->D, z->type, 1, 0.2);
            y->attn_norm.rows = y->mlp_norm.rows = 0;
        }
        if (z->kinds & KIND_COHERE) y->parallel = true, y->mlp_norm = y->attn_norm;
        if (z->kinds & KIND_GRANITE && l) y->rope = NULL;
        if (z->kinds & KIND_MLA) make_mla(c, z, l);
        if (z->kinds & KIND_TOPK || (l && z->kinds & (KIND_MOE | KIND_GROUPS))) make_moe(c, z, l);
    }
}

static void case_open(cpu_case *c, cpu_sizes z, uint64_t seed) {
    *c = (cpu_case){.seed = seed, .format = z.format};
    ref_case = c;
    if (z.kinds & KIND_MLA) z.K = 1, z.D = MLA_LATENT + MLA_ROPE, z.Dv = MLA_LATENT;
    c->sh = (toka_shape){.L = 2, .H = z.H, .K = z.K, .D = z.D, .E = z.E, .F = z.F, .V = z.V, .V_all = z.V, .B = z.B, .eps = 1e-5f,
                         .Dv = z.Dv, .max_len = 1000};
    c->rope = (toka_rope){c->freq, z.D, z.extras ? 1.25f : 1.0f, false};
    for (int i = 0; i < z.D / 2; i++) c->freq[i] = (float)pow(10000, -2.0 * i / z.D);
    int HD = z.H * z.D, KD = z.K * z.D, KDv = z.K * toka_value_size(&c->sh), HDv = z.H * toka_value_size(&c->sh);
    for (int l = 0; l < 2; l++) {
        toka_layer *y = &c->layers[l];
        *y = (toka_layer){.window = l ? z.window : 0, .rope = &c->rope, .kv_fp8 = l < z.kv_fp8};
        y->attn_norm = make_tensor(c, 1, z.E, z.type, 1, 0.2), y->mlp_norm = make_tensor(c, 1, z.E, z.type, 1, 0.2);
        y->q = make_tensor(c, HD, z.E, z.type, 0, 2 / sqrt(z.E)), y->k = make_tensor(c, KD, z.E, z.type, 0, 2 / sqrt(z.E));
        y->v = make_tensor(c, KDv, z.E, z.type, 0, 1 / sqrt(z.E)), y->o = make_tensor(c, z.E, HDv, z.type, 0, 1 / sqrt(HDv));
        y->mlp = make_mlp(c, &z, z.F, false);
        if (!z.extras) continue;
        y->q_bias = make_tensor(c, 1, HD, z.type, 0, 1), y->k_bias = make_tensor(c, 1, KD, z.type, 0, 1);
        y->v_bias = make_tensor(c, 1, KDv, z.type, 0, 1), y->o_bias = make_tensor(c, 1, z.E, z.type, 0, 1);
        y->q_norm = make_tensor(c, 1, z.D, z.type, 1, 0.2), y->k_norm = make_tensor(c, 1, z.D, z.type, 1, 0.2);
    }
    c->format = 0;
    c->w.embed = make_tensor(c, z.V, z.E, z.type, 0, 1), c->w.norm = make_tensor(c, 1, z.E, z.type, 1, 0.2);
    c->format = z.format;
    c->w.lm_head = make_tensor(c, z.V, z.E, z.type, 0, 2 / sqrt(z.E));
    c->w.layers = c->layers;
    case_kinds(c, &z);
}
static void case_close(cpu_case *c) {
    for (int i = 0; i < c->n_heap; i++) free(c->heap[i]);
    for (int i = 0; i < c->n_quants; i++) free(c->numbers[i]);
}

/* ---- Reference arithmetic ---- */

/* w absent: y = x. */
static void ref_norm(const toka_shape *s, double *y, const double *x, const toka_tensor *w, int n) {
    double sum = 0, mean = 0;
    for (int i = 0; s->layer_norm && i < n; i++) mean += x[i] / n;
    for (int i = 0; i < n; i++) sum += (x[i] - mean) * (x[i] - mean);
    for (int i = 0; i < n; i++)
        y[i] = w->rows ? (x[i] - mean) / sqrt(sum / n + s->eps) * (ref_element(w, (size_t)i) + s->norm_offset) : x[i];
}
static void ref_add(double *y, const toka_tensor *bias, int n) {
    for (int i = 0; bias->rows && i < n; i++) y[i] += ref_element(bias, (size_t)i);
}
static double ref_cap(double x, double cap) { return cap ? cap * tanh(x / cap) : x; }
static double ref_sigmoid(double x) { return 1 / (1 + exp(-x)); }
static void ref_rope(const toka_rope *rope, double *x, int pos) {
    const int half = rope ? rope->dims / 2 : 0;
    for (int i = 0; i < half; i++) {
        double *a = rope->neighbours ? &x[2 * i] : &x[i], *b = rope->neighbours ? &x[2 * i + 1] : &x[i + half];
        double angle = (float)pos * rope->freq[i], first = *a, second = *b;
        *a = (first * cos(angle) - second * sin(angle)) * rope->scale;
        *b = (second * cos(angle) + first * sin(angle)) * rope->scale;
    }
}
static void ref_matvec(double *y, const double *x, const toka_tensor *w) {
    for (int n = 0; n < w->rows; n++) {
        y[n] = 0;
        for (int k = 0; k < w->cols; k++) y[n] += x[k] * ref_element(w, (size_t)n * (size_t)w->cols + (size_t)k);
    }
}
/* q, k or v of one token: norm, product, bias; then the norm and RoPE of each head, unless it is
 * v (norm_w and rotate are off). */
static void ref_heads(const cpu_case *c, double *y, const double *x, const toka_layer *l, const toka_tensor *w,
                      const toka_tensor *bias, const toka_tensor *head_norm, int pos, bool rotate) {
    const toka_shape *s = &c->sh;
    double *xn = mem_alloc((size_t)s->E * sizeof *xn);
    ref_norm(s, xn, x, &l->attn_norm, s->E);
    ref_matvec(y, xn, w);
    free(xn);
    ref_add(y, bias, w->rows);
    for (int i = 0; rotate && head_norm->rows && i < w->rows; i += head_norm->cols) ref_norm(s, y + i, y + i, head_norm, head_norm->cols);
    for (int i = 0; s->qkv_limit && i < w->rows; i++) y[i] = MAX(-s->qkv_limit, MIN(y[i], s->qkv_limit));
    if (!rotate) return;
    for (int h = 0; h < w->rows / s->D; h++) ref_rope(l->rope, y + h * s->D, pos);
}

/* The absorbed q, K and V of one token with MLA. */
static void ref_mla(const cpu_case *c, double *q, double *k, double *v, const double *x, const toka_layer *l, int pos) {
    const toka_shape *s = &c->sh;
    const toka_mla *mla = l->mla;
    double xn[600], qa[600], qs[600];
    const int head_rows = mla->nope + mla->v;
    ref_norm(s, xn, x, &l->attn_norm, s->E);
    if (mla->q_a.rows) {
        ref_matvec(qa, xn, &mla->q_a);
        ref_norm(s, qa, qa, &mla->q_a_norm, mla->q_a.rows);
    } else memcpy(qa, xn, sizeof qa);
    ref_matvec(qs, qa, &mla->q_b);
    for (int h = 0; h < s->H; h++) {
        double *from = qs + h * (mla->nope + mla->rope), *to = q + h * s->D;
        for (int i = 0; i < mla->latent; i++) {
            to[i] = 0;
            for (int n = 0; n < mla->nope; n++)
                to[i] += from[n] * ref_element(&mla->kv_b, (size_t)((h * head_rows + n) * mla->latent + i));
        }
        ref_rope(l->rope, from + mla->nope, pos);
        memcpy(to + mla->latent, from + mla->nope, (size_t)mla->rope * sizeof *to);
    }
    ref_matvec(k, xn, &mla->kv_a);
    ref_norm(s, k, k, &mla->kv_a_norm, mla->latent);
    ref_rope(l->rope, k + mla->latent, pos);
    memcpy(v, k, (size_t)mla->latent * sizeof *v);
}

/* y [E] = the MLP of x [E]. */
static void ref_mlp(const cpu_case *c, double *y, const double *x, const toka_mlp *mlp, toka_activation kind) {
    double g[1200], u[1200];
    const double limit = c->sh.swiglu_limit;
    const int F = mlp->gate.rows;
    ref_matvec(g, x, &mlp->gate), ref_matvec(u, x, &mlp->up);
    ref_add(g, &mlp->gate_bias, F), ref_add(u, &mlp->up_bias, F);
    for (int i = 0; i < F; i++) {
        if (kind == TOKA_SILU) g[i] = g[i] * ref_sigmoid(g[i]) * u[i];
        else if (kind == TOKA_GELU_TANH) g[i] = 0.5 * g[i] * (1 + tanh(sqrt(2 / M_PI) * (g[i] + 0.044715 * pow(g[i], 3)))) * u[i];
        else {
            double gate = MIN(g[i], limit), up = MAX(MIN(u[i], limit), -limit);
            g[i] = gate * ref_sigmoid(1.702 * gate) * (up + 1);
        }
    }
    ref_matvec(y, g, &mlp->down);
    ref_add(y, &mlp->down_bias, c->sh.E);
}

/* Marks the k highest; among equal ones the first. */
static void ref_highest(const double *score, bool *mark, int n, int k) {
    for (int i = 0; i < n; i++) {
        int better = 0;
        for (int j = 0; j < n; j++) better += score[j] > score[i] || (score[j] == score[i] && j < i);
        mark[i] = better < k;
    }
}
static void ref_weights(double *score, const bool *mark, int n) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += !mark || mark[i] ? exp(score[i]) : 0;
    for (int i = 0; i < n; i++) score[i] = exp(score[i]) / sum;
}
/* weight[X]: of each expert for this x, 0 for those that are not chosen. */
static void ref_route(const toka_moe *m, const double *x, double *weight) {
    double score[X_COUNT], choice[X_COUNT], group[X_COUNT], sum = 0;
    bool mark[X_COUNT], kept[X_COUNT];
    const int X = m->n_experts, size = m->n_groups > 1 ? X / m->n_groups : X;
    ref_matvec(score, x, &m->router);
    ref_add(score, &m->router_bias, X);
    if (m->kind == TOKA_ROUTER_SOFTMAX) ref_weights(score, NULL, X);
    for (int i = 0; i < X; i++) choice[i] = score[i] = m->kind == TOKA_ROUTER_SIGMOID ? ref_sigmoid(score[i]) : score[i];
    ref_add(choice, &m->choice_bias, X);
    for (int g = 0; g * size < X; g++) {
        double best = -INFINITY, second = -INFINITY;
        for (int i = g * size; i < (g + 1) * size; i++)
            if (choice[i] > best) second = best, best = choice[i];
            else second = MAX(second, choice[i]);
        group[g] = m->groups_by_top2 ? best + second : best;
    }
    ref_highest(group, kept, X / size, m->n_groups > 1 ? m->top_groups : 1);
    for (int i = 0; i < X; i++) choice[i] = kept[i / size] ? choice[i] : -INFINITY;
    ref_highest(choice, mark, X, m->top_k);
    if (m->kind == TOKA_ROUTER_TOPK) ref_weights(score, mark, X);
    for (int i = 0; i < X; i++) sum += mark[i] ? score[i] : 0;
    for (int i = 0; i < X; i++) weight[i] = mark[i] ? score[i] / (m->renormalize ? sum : 1) * m->scale : 0;
}
/* y [E] = the feed-forward of x [E], of a layer with experts or without. */
static void ref_feed_forward(const cpu_case *c, double *y, const double *x, const toka_layer *l) {
    const toka_moe *m = l->moe;
    double weight[X_COUNT], part[1200], gate = 0;
    if (!m) {
        ref_mlp(c, y, x, &l->mlp, l->activation);
        return;
    }
    ref_route(m, x, weight);
    for (int i = 0; i < c->sh.E; i++) y[i] = 0;
    for (int e = 0; e <= m->n_experts; e++) {
        const bool shared = e == m->n_experts;
        if (shared ? !m->shared.gate.rows : !weight[e]) continue;
        if (shared && m->shared_gate.rows) ref_matvec(&gate, x, &m->shared_gate);
        const double factor = !shared ? weight[e] : m->shared_gate.rows ? ref_sigmoid(gate) : 1;
        ref_mlp(c, part, x, shared ? &m->shared : &m->experts[e], l->activation);
        for (int i = 0; i < c->sh.E; i++) y[i] += factor * part[i];
    }
}
/* x += scale * norm(delta) */
static void ref_residual(const cpu_case *c, double *x, const double *delta, const toka_tensor *post_norm) {
    double normed[1200];
    ref_norm(&c->sh, normed, delta, post_norm, c->sh.E);
    for (int i = 0; i < c->sh.E; i++) x[i] += normed[i] * (c->sh.residual_scale ? c->sh.residual_scale : 1);
}

/* ---- Sequences, their pages and steps ---- */

enum { CPU_SEQS = 12, CPU_LEN = 100, CPU_PAGES = 400 };

typedef struct cpu_seqs { /* sequences with their tokens; a device has their K and V */
    cpu_case *c;
    toka_device *d;
    toka_device_options o;
    /* the first `shared` positions (whole pages) are on the same pages for all */
    int n_seq, len[CPU_SEQS], shared;
    int32_t table[CPU_SEQS][CPU_LEN]; /* page of position / B */
    int32_t token[CPU_SEQS][CPU_LEN];
    uint64_t seed;
    /* the step */
    int T, n_spans, n_pages, seq[CPU_SEQS * CPU_LEN];
    int32_t ids[CPU_SEQS * CPU_LEN], pos[CPU_SEQS * CPU_LEN], kv_slot[CPU_SEQS * CPU_LEN], pages[20000];
    toka_span spans[8000];
    toka_step step;
} cpu_seqs;

static int rnd_int(uint64_t *s, int from, int to) { return rnd_range(s, from, to); }

/* Opens a new device with K and V full of NaN, and assigns new random pages. */
static void seqs_open_device(cpu_seqs *w, const cpu_kernels *kernels, int threads, int chunk) {
    toka_err e;
    int B = w->c->sh.B, deck[CPU_PAGES], at = 0;
    if (w->d) toka_cpu.close(w->d);
    w->o = (toka_device_options){.n_threads = threads, .max_tokens = CPU_SEQS * CPU_LEN, .max_samples = 300,
                                 .n_pages = CPU_PAGES, .bf16 = kernels->x_type == TOKA_BF16};
    if (toka_cpu.open(&w->d, &w->o, &w->c->sh, &w->c->w, &e)) {
        CHECK_MSG(0, "%s", e.msg);
        abort();
    }
    const toka_tensor *o = &w->d->weights->layers[0].o;
    if (o->quant && !o->quant->group) CHECK(o->quant->packing == TOKA_PACK_ROWS);
    w->d->pool.serial_cost = 0;
    w->d->kernels = kernels, w->d->scratch_rows = MIN(w->d->scratch_rows, chunk);
    w->d->scratch_samples = MIN(w->d->scratch_samples, MAX(1, chunk / 2));
    memset(w->d->kv_cache, 0xFF, w->d->layer_at[w->c->sh.L]); /* NaN as float32, FP8 and bf16 */
    for (int i = 0; i < CPU_PAGES; i++) {
        int j = rnd_int(&w->seed, 0, i);
        deck[i] = deck[j], deck[j] = i;
    }
    for (int s = 0; s < w->n_seq; s++)
        for (int p = 0; p * B < w->len[s]; p++)
            w->table[s][p] = s && p * B < w->shared ? w->table[0][p] : deck[at++ % CPU_PAGES];
}

static void step_begin(cpu_seqs *w) { w->T = w->n_spans = w->n_pages = 0; }

static void step_row(cpu_seqs *w, int seq, int pos) {
    int B = w->c->sh.B, t = w->T++;
    w->seq[t] = seq, w->ids[t] = w->token[seq][pos], w->pos[t] = pos;
    w->kv_slot[t] = w->table[seq][pos / B] * B + pos % B;
}
/* Adds spans for rows t0 .. t1-1, all of one sequence with the pages of `seq`, and positions from
 * .. to-1, cut at random page boundaries. */
static void step_spans(cpu_seqs *w, int seq, int t0, int t1, int from, int to, int cuts) {
    int B = w->c->sh.B;
    while (from < to) {
        int n_pages = (to - from + B - 1) / B, n = cuts ? rnd_int(&w->seed, 1, n_pages) : n_pages;
        toka_span sp = {t0, t1 - t0, w->n_pages, from, MIN(n * B, to - from)};
        for (int i = 0; i < n; i++) w->pages[w->n_pages++] = w->table[seq][from / B + i];
        w->spans[w->n_spans++] = sp;
        from += sp.n_kv;
    }
}
static void step_end(cpu_seqs *w) {
    w->step = (toka_step){.T = w->T, .n_spans = w->n_spans, .ids = w->ids, .pos = w->pos, .kv_slot = w->kv_slot,
                          .pages = w->pages,
                          .spans = w->spans};
}

/* Builds a step with positions from[s] .. to[s]-1 of every sequence. group: the rows after the
 * shared prefix get it as one span. */
static void seqs_make_step(cpu_seqs *w, const int *from, const int *to, bool group, int cuts) {
    int first[CPU_SEQS];
    step_begin(w);
    for (int s = 0; s < w->n_seq; s++) {
        first[s] = w->T;
        for (int p = from[s]; p < to[s]; p++) step_row(w, s, p);
        group = group && (from[s] >= to[s] || from[s] >= w->shared);
    }
    if (group) step_spans(w, 0, 0, w->T, 0, w->shared, cuts);
    for (int s = 0; s < w->n_seq; s++)
        if (from[s] < to[s]) step_spans(w, s, first[s], first[s] + to[s] - from[s], group ? w->shared : 0, to[s], cuts);
    step_end(w);
}

/* A buffer on the device between guard bands, all NaN. */
static toka_dev_ptr guarded(toka_device *d, size_t n) {
    float *p = mem_alloc((n + 2 * CPU_GUARD) * sizeof *p);
    (void)d;
    for (size_t i = 0; i < n + 2 * CPU_GUARD; i++) p[i] = NAN;
    return (toka_dev_ptr){(uintptr_t)(p + CPU_GUARD)};
}
/* Also checks that the guard bands are unchanged. */
static void guarded_free(toka_dev_ptr a, size_t n) {
    float *p = plain_ptr(a);
    for (int i = 1; i <= CPU_GUARD; i++) CHECK(isnan(p[-i]) && isnan(p[n + (size_t)i - 1]));
    free(p - CPU_GUARD);
}

static double rel_error(const float *got, const double *want, size_t n) {
    double a = 0, b = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(got[i])) return INFINITY;
        a += (got[i] - want[i]) * (got[i] - want[i]), b += want[i] * want[i];
    }
    return sqrt(a / (b + 1e-30));
}

/* ---- Op tests ---- */

#define WHOLE(x) (&(toka_hidden){(x), TOKA_HIDDEN_WHOLE, NULL}) /* x that the test has written */

typedef struct cpu_ref { /* K and V of every stored position in float64, for one layer */
    double *k, *v;       /* [seq][pos][K*D], [seq][pos][K*Dv] */
} cpu_ref;

static void check_embed(cpu_seqs *w) {
    size_t n = (size_t)w->T * (size_t)w->c->sh.E;
    toka_dev_ptr x = guarded(w->d, n);
    double *want = mem_alloc(n * sizeof *want);
    for (size_t i = 0; i < n; i++)
        want[i] = ref_element(&w->c->w.embed,
                              (size_t)w->ids[i / (size_t)w->c->sh.E] * (size_t)w->c->sh.E + i % (size_t)w->c->sh.E) *
                  (w->c->sh.embed_scale ? w->c->sh.embed_scale : 1);
    toka_cpu.embed(w->d, &w->step, &(toka_hidden){.data = x});
    CHECK(rel_error(plain_ptr(x), want, n) <= (w->c->sh.embed_scale ? 1e-7 : 0));
    guarded_free(x, n), free(want);
}

/* K (v false) or V of one head and token, as the device stored it. */
static void stored_head(const toka_device *d, int layer, int kv_slot, int head, bool v, float *to) {
    const toka_shape *s = d->shape;
    const int n = v ? toka_value_size(s) : s->D, off = kv_slot % s->B;
    char *page = cpu_page(d, layer, kv_slot / s->B);
    for (int i = 0; i < n; i++) {
        const size_t at = v ? (size_t)(s->K * s->D * d->B_pad + (head * s->B + off) * d->Dv_pad + i) : (size_t)((head * s->D + i) * d->B_pad + off);
        if (!d->weights->layers[layer].kv_fp8) memcpy(to + i, page + 4 * at, 4);
        else to[i] = weight_fp8((unsigned char)page[at]) * toka_kv_scale_value(cpu_page_scales(d, page)[(head * s->B + off) * 2 + v]);
    }
}
/* FP8: `got` is `want` rounded, with a scale that fits. `want` becomes what is stored. */
static void check_stored(const float *got, double *want, int n, bool fp8) {
    double largest = 0, scaled = 0;
    if (!fp8) CHECK(rel_error(got, want, (size_t)n) < 1e-5);
    for (int i = 0; i < n; i++) largest = MAX(largest, fabs(want[i])), scaled = MAX(scaled, fabs(got[i]));
    CHECK(!fp8 || fabs(scaled - largest) <= largest / 15.9);
    for (int i = 0; i < n && fp8; i++) {
        CHECK(fabs(got[i] - want[i]) <= fabs(want[i]) / 15.9 + largest * (2 / 448.0 / 512 + 2e-5));
        want[i] = got[i];
    }
}

/* Runs norm_qkv_rope_kv on random x. Checks q, and K and V in their kv_slots. Fills ref. */
static void check_qkv(cpu_seqs *w, int layer, cpu_ref *ref) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    int HD = s->H * s->D, KD = s->K * s->D, Dv = toka_value_size(s);
    size_t nx = (size_t)w->T * (size_t)s->E, nq = (size_t)w->T * (size_t)HD;
    toka_dev_ptr x = guarded(w->d, nx), q = guarded(w->d, nq);
    double *xd = mem_alloc(nx * sizeof *xd), *qd = mem_alloc(nq * sizeof *qd);
    for (size_t i = 0; i < nx; i++) xd[i] = plain_ptr(x)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.norm_qkv_rope_kv(w->d, &w->step, layer, WHOLE(x), q);
    float got[CPU_MAX_HEAD_SIZE];
    for (int t = 0; t < w->T; t++) {
        const double *row = xd + (size_t)t * (size_t)s->E;
        size_t pos = (size_t)(w->seq[t] * CPU_LEN + w->pos[t]);
        double *k = ref->k + pos * (size_t)KD, *v = ref->v + pos * (size_t)(s->K * Dv);
        if (l->mla) ref_mla(w->c, qd + (size_t)t * (size_t)HD, k, v, row, l, w->pos[t]);
        else {
            ref_heads(w->c, qd + (size_t)t * (size_t)HD, row, l, &l->q, &l->q_bias, &l->q_norm, w->pos[t], true);
            ref_heads(w->c, k, row, l, &l->k, &l->k_bias, &l->k_norm, w->pos[t], true);
            ref_heads(w->c, v, row, l, &l->v, &l->v_bias, &l->v_bias, w->pos[t], false);
        }
        for (int h = 0; h < s->K; h++) {
            stored_head(w->d, layer, w->kv_slot[t], h, false, got);
            check_stored(got, k + h * s->D, s->D, l->kv_fp8);
            stored_head(w->d, layer, w->kv_slot[t], h, true, got);
            check_stored(got, v + h * Dv, Dv, l->kv_fp8);
        }
    }
    double err = rel_error(plain_ptr(q), qd, nq);
    CHECK_MSG(err < 2e-6, "%g", err);
    guarded_free(x, nx), guarded_free(q, nq), free(xd), free(qd);
}

static void check_attention(cpu_seqs *w, int layer, const cpu_ref *ref) {
    const toka_shape *s = &w->c->sh;
    const int Dv = toka_value_size(s);
    const toka_tensor *sinks = &w->c->layers[layer].sinks;
    size_t nq = (size_t)(w->T * s->H * s->D), n = (size_t)(w->T * s->H * Dv);
    int window = w->c->layers[layer].window;
    toka_dev_ptr q = guarded(w->d, nq), o = guarded(w->d, n);
    double *want = mem_zalloc(n * sizeof *want), p[CPU_LEN];
    for (size_t i = 0; i < nq; i++) plain_ptr(q)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.attention(w->d, &w->step, layer, q, o);
    for (int t = 0; t < w->T; t++)
        for (int h = 0; h < s->H; h++) {
            const float *qh = plain_ptr(q) + (t * s->H + h) * s->D;
            const double sink = sinks->rows ? ref_element(sinks, (size_t)h) : -INFINITY;
            double *oh = want + (t * s->H + h) * Dv, best = sink, sum;
            int from = window ? MAX(0, w->pos[t] - window + 1) : 0, head = h / (s->H / s->K);
            /* sequence 0 stored the prefix, once */
#define REF_AT(j) ((size_t)((((j) < w->shared ? 0 : w->seq[t]) * CPU_LEN + (j)) * s->K + head))
            for (int j = from; j <= w->pos[t]; j++) {
                p[j] = 0;
                for (int i = 0; i < s->D; i++) p[j] += qh[i] * ref->k[REF_AT(j) * (size_t)s->D + (size_t)i];
                p[j] = ref_cap(p[j] * (s->attn_scale ? s->attn_scale : 1 / sqrt(s->D)), s->attn_cap);
                best = MAX(best, p[j]);
            }
            sum = exp(sink - best);
            for (int j = from; j <= w->pos[t]; j++) sum += p[j] = exp(p[j] - best);
            for (int j = from; j <= w->pos[t]; j++)
                for (int i = 0; i < Dv; i++) oh[i] += p[j] / sum * ref->v[REF_AT(j) * (size_t)Dv + (size_t)i];
#undef REF_AT
        }
    double err = rel_error(plain_ptr(o), want, n);
    CHECK_MSG(err < 3e-6, "%g: T %d, layer %d, spans %d", err, w->T, layer, w->n_spans);
    guarded_free(q, nq), guarded_free(o, n), free(want);
}

static void check_out_residual(cpu_seqs *w, int layer) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    int HD = s->H * toka_value_size(s);
    size_t nx = (size_t)(w->T * s->E), no = (size_t)(w->T * HD);
    toka_dev_ptr x = guarded(w->d, nx), o = guarded(w->d, no);
    double *want = mem_alloc(nx * sizeof *want), *in = mem_alloc((size_t)HD * sizeof *in),
        *y = mem_alloc((size_t)s->E * sizeof *y), values[600];
    for (size_t i = 0; i < nx; i++) want[i] = plain_ptr(x)[i] = (float)rnd_normal(&w->seed);
    for (size_t i = 0; i < no; i++) plain_ptr(o)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.out_residual(w->d, &w->step, layer, o, WHOLE(x));
    for (int t = 0; t < w->T; t++) {
        for (int i = 0; i < HD; i++) in[i] = plain_ptr(o)[t * HD + i];
        for (int h = 0; l->mla && h < s->H; h++)
            for (int i = 0; i < MLA_V; i++) {
                double *value = &values[h * MLA_V + i];
                *value = 0;
                for (int j = 0; j < MLA_LATENT; j++)
                    *value += in[h * MLA_LATENT + j] *
                              ref_element(&l->mla->kv_b, (size_t)((h * (MLA_NOPE + MLA_V) + MLA_NOPE + i) * MLA_LATENT + j));
            }
        ref_matvec(y, l->mla ? values : in, &l->o);
        ref_add(y, &l->o_bias, s->E);
        ref_residual(w->c, want + t * s->E, y, &l->attn_post_norm);
    }
    CHECK(rel_error(plain_ptr(x), want, nx) < 1e-6);
    guarded_free(x, nx), guarded_free(o, no), free(want), free(in), free(y);
}

static void check_mlp(cpu_seqs *w, int layer) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    size_t nx = (size_t)(w->T * s->E);
    toka_dev_ptr x = guarded(w->d, nx);
    double *want = mem_alloc(nx * sizeof *want), *in = mem_alloc((size_t)s->E * sizeof *in), delta[1200];
    for (size_t i = 0; i < nx; i++) want[i] = plain_ptr(x)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.norm_mlp_residual(w->d, &w->step, layer, WHOLE(x));
    for (int t = 0; t < w->T; t++) {
        ref_norm(s, in, want + t * s->E, &l->mlp_norm, s->E);
        ref_feed_forward(w->c, delta, in, l);
        ref_residual(w->c, want + t * s->E, delta, &l->mlp_post_norm);
    }
    double err = rel_error(plain_ptr(x), want, nx);
    CHECK_MSG(err < 1e-6, "%g", err);
    guarded_free(x, nx), free(want), free(in);
}

static void check_logits(cpu_seqs *w) {
    const toka_shape *s = &w->c->sh;
    int n_out = rnd_int(&w->seed, 1, MIN(w->T, 40));
    size_t nx = (size_t)(w->T * s->E), nl = (size_t)(n_out * s->V);
    toka_dev_ptr x = guarded(w->d, nx), logits = guarded(w->d, nl);
    toka_sample_row rows[40];
    toka_sample_result results[41];
    double *in = mem_alloc((size_t)s->E * sizeof *in), *y = mem_alloc((size_t)s->V * sizeof *y);
    for (size_t i = 0; i < nx; i++) plain_ptr(x)[i] = (float)rnd_normal(&w->seed);
    for (int i = 0; i < n_out; i++)
        rows[i] = (toka_sample_row){.row = rnd_int(&w->seed, 0, w->T - 1), .scored_id = rnd_int(&w->seed, 0, s->V - 1)};
    memset(results, 0x5A, sizeof results);
    w->step.n_samples = n_out, w->step.samples = rows, w->step.logits = plain_ptr(logits);
    toka_cpu.norm_logits_sample(w->d, &w->step, WHOLE(x), results);
    for (int i = 0; i < n_out; i++) {
        double best = -INFINITY, sum = 0;
        for (int j = 0; j < s->E; j++) in[j] = plain_ptr(x)[rows[i].row * s->E + j];
        ref_norm(s, in, in, &w->c->w.norm, s->E);
        ref_matvec(y, in, &w->c->w.lm_head);
        for (int j = 0; j < s->V; j++) y[j] = ref_cap(y[j] * (s->logit_scale ? s->logit_scale : 1), s->logit_cap);
        for (int j = 0; j < s->V; j++) best = MAX(best, y[j]);
        for (int j = 0; j < s->V; j++) sum += exp(y[j] - best);
        CHECK(rel_error(plain_ptr(logits) + i * s->V, y, (size_t)s->V) < 1e-6);
        CHECK(results[i].id == rows[i].scored_id);
        CHECK(fabs(results[i].logprob - (y[results[i].id] - best - log(sum))) < 1e-4);
    }
    CHECK(((unsigned char *)&results[n_out])[0] == 0x5A);
    w->step.n_samples = 0, w->step.logits = NULL;
    guarded_free(x, nx), guarded_free(logits, nl), free(in), free(y);
}

/* An op that reads x in a state that it cannot read must abort; x that is whole is read by the tests
 * above. */
static void check_hidden_states(cpu_seqs *w, toka_dev_ptr data) {
    static const toka_hidden_state wrong[] = {TOKA_HIDDEN_EMPTY, TOKA_HIDDEN_PARTIAL, TOKA_HIDDEN_SCATTERED, TOKA_HIDDEN_SHARDED};
    toka_sample_row row = {.row = 0, .scored_id = 0};
    toka_sample_result result;
    w->step.n_samples = 1, w->step.samples = &row;
    for (int i = 0; i < COUNT(wrong); i++)
        for (int op = 0; op < 4; op++) {
            toka_hidden x = {data, wrong[i], NULL};
            pid_t pid;
            if (child_begins(&pid)) {
                if (op == 0) toka_cpu.norm_qkv_rope_kv(w->d, &w->step, 0, &x, data);
                if (op == 1) toka_cpu.out_residual(w->d, &w->step, 0, data, &x);
                if (op == 2) toka_cpu.norm_mlp_residual(w->d, &w->step, 0, &x);
                if (op == 3) toka_cpu.norm_logits_sample(w->d, &w->step, &x, &result);
                _exit(0);
            }
            CHECK_MSG(child_aborts(pid), "op %d reads x in state %d", op, (int)wrong[i]);
        }
    w->step.n_samples = 0, w->step.samples = NULL;
}
static void test_cpu_hidden(void) {
    cpu_sizes z = {.H = 2, .K = 1, .D = 16, .E = 48, .F = 100, .V = 30, .B = 16};
    cpu_case c;
    cpu_seqs *w = mem_zalloc(sizeof *w);
    case_open(&c, z, 5);
    w->c = &c, w->seed = 5, w->n_seq = 1, w->len[0] = 3;
    seqs_open_device(w, &cpu_kernel_sets[0], 1, 512);
    int from[CPU_SEQS] = {0};
    seqs_make_step(w, from, w->len, false, 1);
    toka_dev_ptr data = guarded(w->d, 512);
    check_hidden_states(w, data);
    guarded_free(data, 512);
    toka_cpu.close(w->d);
    case_close(&c), free(w);
}

/* Tests one model with one instruction set: a prefill step, then a step that mixes prefill and
 * decode; every op in both. */
static void check_ops(cpu_sizes z, int set, int threads, uint64_t seed) {
    static cpu_case c;
    cpu_seqs *w = mem_zalloc(sizeof *w);
    case_open(&c, z, seed);
    w->c = &c, w->seed = seed * 77 + 1, w->n_seq = rnd_int(&w->seed, 1, 5);
    w->shared = rnd_int(&w->seed, 0, 20 / z.B) * z.B;
    for (int s = 0; s < w->n_seq; s++) w->len[s] = w->shared + rnd_int(&w->seed, 2, 24);
    seqs_open_device(w, &cpu_kernel_sets[set], threads, rnd_int(&w->seed, 0, 1) ? 5 : 512);
    for (int s = 0; s < w->n_seq; s++)
        for (int p = 0; p < w->len[s]; p++) w->token[s][p] = rnd_int(&w->seed, 0, z.V - 1);
    int start[CPU_SEQS], mid[CPU_SEQS];
    for (int s = 0; s < w->n_seq; s++) {
        start[s] = s ? w->shared : 0;
        mid[s] = rnd_int(&w->seed, 0, 1) ? w->len[s] - 1 : rnd_int(&w->seed, w->shared, w->len[s] - 1);
    }
    for (int layer = 0; layer < 2; layer++) {
        cpu_ref ref;
        size_t n = (size_t)(CPU_SEQS * CPU_LEN * c.sh.K * MAX(c.sh.D, toka_value_size(&c.sh)));
        ref.k = mem_zalloc(n * sizeof(double)), ref.v = mem_zalloc(n * sizeof(double));
        for (int round = 0; round < 2; round++) {
            if (!round) seqs_make_step(w, start, mid, false, 1);
            else seqs_make_step(w, mid, w->len, rnd_int(&w->seed, 0, 1), rnd_int(&w->seed, 0, 1));
            if (!w->T) continue;
            check_embed(w);
            check_qkv(w, layer, &ref);
            check_attention(w, layer, &ref);
            check_out_residual(w, layer);
            check_mlp(w, layer);
            check_logits(w);
        }
        free(ref.k), free(ref.v);
    }
    toka_err e;
    CHECK(toka_cpu.status(w->d, &e) == 0);
    toka_cpu.close(w->d);
    case_close(&c), free(w);
}

static void test_cpu_ops(void) {
    static const int heads[][2] = {{1, 1}, {3, 1}, {7, 1}, {6, 2}, {4, 4}}, sizes[] = {8, 64, 80, 96, 128};
    uint64_t seed = 1;
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        for (int type = 0; type < 3; type++)
            for (int i = 0; i < 5; i++, seed++) {
                cpu_sizes z = {.H = heads[i][0], .K = heads[i][1], .D = sizes[(i + type + set) % 5], .E = i % 2 ? 72 : 48,
                               .F = 100, .V = 263, .B = (int[]){16, 4, 1, 20, 32}[seed % 5], .type = (toka_dtype)type,
                               .extras = i & 1, .window = (int[]){0, 1, 7, 30}[seed % 4], .kv_fp8 = (int)(seed % 7 % 3)};
                int before = check_failed;
                check_ops(z, set, 1 + (int)(seed % 3), seed);
                CHECK_MSG(check_failed == before, "%s, dtype %d, H %d K %d D %d B %d, seed %d", cpu_kernel_sets[set].name, type,
                          z.H, z.K,
                          z.D, z.B, (int)seed);
            }
}

/* Every kind of layer and model, alone and with others. */
static const int cpu_kinds[] = {KIND_GEMMA, KIND_GEMMA | KIND_POST, KIND_SINKS | KIND_CLAMPED, KIND_SINKS | KIND_TOPK | KIND_CLAMPED,
                                KIND_ALL_NORM | KIND_POST, KIND_COHERE, KIND_GRANITE, KIND_GRANITE | KIND_MOE, KIND_MOE | KIND_GROUP_MAX,
                                KIND_MLA, KIND_MLA | KIND_GROUPS, KIND_GROUPS | KIND_POST};
static void test_cpu_kinds(void) {
    uint64_t seed = 7;
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        for (int i = 0; i < COUNT(cpu_kinds); i++, seed++) {
            cpu_sizes z = {.H = 6, .K = i % 2 ? 2 : 3, .D = 12 + 8 * (i % 4), .E = 56, .F = 70, .V = 61, .B = (int[]){16, 4, 20}[seed % 3],
                           .type = (toka_dtype)(seed % 3), .extras = i == 5, .window = (int[]){0, 5}[seed % 2],
                           .Dv = i % 3 ? 0 : 20 + 12 * (i % 4), .kinds = cpu_kinds[i], .kv_fp8 = (int)(seed % 5 % 3)};
            int before = check_failed;
            check_ops(z, set, 1 + (int)(seed % 3), seed);
            CHECK_MSG(check_failed == before, "%s, kinds %d, dtype %d, seed %d", cpu_kernel_sets[set].name, z.kinds, z.type, (int)seed);
        }
}

/* How FP8 K and V are rounded, by its definition: a scale is the smallest power of two that is at least largest / 448; a number becomes the
 * e4m3 number that is nearest to it / scale, of two the even one. */
static void test_cpu_kv_rounding(void) {
    uint64_t seed = 3;
    for (int round = 0; round < 3000; round++) {
        const int n = rnd_int(&seed, 1, 40), unit = rnd_int(&seed, 0, 9) ? rnd_int(&seed, -20, 12) : rnd_int(&seed, -140, 40);
        float x[40];
        double largest = 0;
        for (int i = 0; i < n; i++)
            x[i] = (float)ldexp(rnd_int(&seed, 0, 7) ? rnd_normal(&seed) : rnd_int(&seed, -64, 64) / 16.0, unit - rnd_int(&seed, 0, 1) * rnd_int(&seed, 0, 12));
        for (int i = 0; i < n; i++) largest = MAX(largest, fabs(x[i]));
        unsigned char codes[80];
        const double scale = toka_kv_scale_value(toka_kv_store(codes, 2, x, n));
        CHECK(scale >= 0x1p-100 && scale <= 128);
        CHECK_MSG(scale == 0x1p-100 || largest > 224 * scale, "%g, scale %g", largest, scale);
        CHECK_MSG(scale == 128 || largest <= 448 * scale, "%g, scale %g", largest, scale);
        for (int i = 0; i < n; i++) {
            const double want = fmin(fmax(x[i] / scale, -448), 448);
            unsigned best = 0;
            for (unsigned code = 0; code < 256; code++) {
                const double d = fabs(ref_fp8(code) - want), old = fabs(ref_fp8(best) - want);
                if (d < old || (d == old && !(code & 1) && best & 1)) best = code;
            }
            CHECK_MSG(ref_fp8(codes[2 * i]) == ref_fp8(best), "%g / %g: %g, not %g", x[i], scale, ref_fp8(codes[2 * i]), ref_fp8(best));
            CHECK(toka_from_fp8(codes[2 * i]) == (float)ref_fp8(codes[2 * i]));
        }
    }
    unsigned char codes[3];
    const float odd[][3] = {{1, NAN, 2}, {-NAN, 0, 0}, {INFINITY, 1, -INFINITY}, {0, -0.0f, 0}};
    CHECK(isnan(toka_kv_scale_value(toka_kv_store(codes, 1, odd[0], 3))) && isnan(toka_kv_scale_value(toka_kv_store(codes, 1, odd[1], 3))));
    CHECK(toka_kv_store(codes, 1, odd[2], 3) == 134 && codes[0] == 0x7E && codes[2] == 0xFE && codes[1] == 4);
    CHECK(toka_kv_store(codes, 1, odd[3], 3) == 27 && !codes[0] && codes[1] == 0x80);
}

/* Every format: the rows of toka_weight_row, and those that a GEMM reads with and without a panel, are
 * exactly the numbers of the definition. x is a unit vector, so y is a column of the weight. */
static void check_format(int format, int set, int rows, int cols) {
    cpu_case c = {.seed = 5 + (uint64_t)format, .format = format};
    cpu_pool pool;
    toka_err e;
    ref_case = &c;
    if (cpu_pool_open(&pool, 2, &e)) abort();
    const toka_tensor whole = make_tensor(&c, rows, cols, TOKA_BF16, 0, 1);
    toka_tensor w = whole; /* all but the first rows, every second one, without the first columns */
    w.row0 = 2, w.row_step = 2, w.rows = (rows - 2) / 2, w.col0 = cols > 128 ? 64 : cols > 64 ? 32 : 0, w.cols = cols - w.col0;
    const size_t ldx = (size_t)cpu_round_up32(cols);
    const cpu_kernels *k = &cpu_kernel_sets[set];
    const cpu_order *order = cpu_order_of(k, &w);
    const size_t panel = CPU_PANEL_FLOATS + 2 * CPU_PANEL_ROWS * (size_t)cols;
    float *x = mem_zalloc(8 * ldx * 4), *pairs = mem_zalloc(8 * ldx * 4), *y = mem_alloc(8 * (size_t)rows * 4), *panels = mem_alloc(2 * panel * 4);
    float *row = mem_alloc((size_t)cols * 4);
    int wrong = 0, wrong_row = 0;
    for (int r = 0; r < w.rows; r++) {
        toka_weight_row(&w, r, row);
        for (int j = 0; j < w.cols; j++) wrong_row += row[j] != ref_element(&whole, (size_t)((2 + 2 * r) * cols + w.col0 + j));
    }
    CHECK_MSG(!wrong_row, "format %d: %d numbers of toka_weight_row differ", format, wrong_row);
    for (int T = 1; T <= 8; T += 7)
        for (int j = 0; j < w.cols; j++) {
            memset(x, 0, 8 * ldx * 4);
            for (int t = 0; t < T; t++) x[(size_t)t * ldx + (size_t)j] = 1;
            for (int t = 0; t < T && order && order->from; t++) cpu_pair_row(pairs + (size_t)t * ldx, x + (size_t)t * ldx, w.cols, order, NULL, T);
            cpu_gemm_args args = {.kernels = k, .pool = &pool, .panels = panels, .panel_floats = panel, .x = x, .ldx = ldx, .order = order, .x_pairs = pairs,
                                  .ld_pairs = ldx, .T = T, .n_weights = 1, .weights = {&w}, .y = {y}, .ldy = {(size_t)rows}};
            cpu_gemm_run(&args);
            for (int t = 0; t < T; t++)
                for (int r = 0; r < w.rows; r++)
                    wrong += y[t * rows + r] != ref_element(&whole, (size_t)((2 + 2 * r) * cols + w.col0 + j));
        }
    CHECK_MSG(!wrong, "%s, format %d, %d x %d: %d numbers differ", k->name, format, rows, cols, wrong);
    cpu_pool_close(&pool);
    free(x), free(pairs), free(y), free(panels), free(row);
    case_close(&c);
}
/* Weights with act-order: their columns are sorted by group at open, if their GEMM's other weights have the same list; a product with
 * unit vectors, with and without a panel, still gives the numbers of the definition. */
static void check_sorted(int set) {
    enum { ROWS = 40, COLS = 96 };
    cpu_case c = {.seed = 11, .format = FMT_GPTQ_ORDER};
    ref_case = &c;
    toka_device *d = mem_zalloc(sizeof *d);
    toka_err e;
    d->kernels = &cpu_kernel_sets[set];
    if (cpu_pool_open(&d->pool, 2, &e)) abort();
    const toka_tensor whole = make_tensor(&c, ROWS, COLS, TOKA_BF16, 0, 1);
    toka_tensor q = whole, k = make_tensor(&c, 16, COLS, TOKA_BF16, 0, 1), other = k, cut = whole;
    int32_t list[COLS];
    memcpy(list, k.quant->group, sizeof list);
    const int32_t group = list[0];
    list[0] = list[1], list[1] = group;
    toka_quant swapped = *k.quant;
    swapped.group = list;
    other.quant = &swapped, cut.cols = 64;
    cpu_repack(d, &q, &q), cpu_repack(d, &k, &q), cpu_repack(d, &other, &q), cpu_repack(d, &cut, &cut);
    CHECK(q.quant->columns && !q.quant->group && q.quant->packing == TOKA_PACK_ROWS && k.quant->columns == q.quant->columns);
    CHECK(group != list[0] && other.quant == &swapped && cut.quant == whole.quant);
    const cpu_order *order = cpu_order_of(d->kernels, &q);
    float *x = mem_zalloc(8 * COLS * 4), *pairs = mem_zalloc(8 * COLS * 4), *y = mem_alloc(8 * ROWS * 4), *panels = mem_alloc(2 * (CPU_PANEL_FLOATS + 2 * CPU_PANEL_ROWS * COLS) * 4);
    int wrong = 0;
    for (int T = 1; T <= 8 && order && q.quant->columns; T += 7)
        for (int j = 0; j < COLS; j++) {
            memset(x, 0, 8 * COLS * 4);
            for (int t = 0; t < T; t++) x[t * COLS + j] = 1, cpu_pair_row(pairs + t * COLS, x + t * COLS, COLS, order, q.quant->columns, T);
            cpu_gemm_args args = {.kernels = d->kernels, .pool = &d->pool, .panels = panels, .panel_floats = CPU_PANEL_FLOATS + 2 * CPU_PANEL_ROWS * COLS,
                                  .x = x, .ldx = COLS, .order = order, .columns = q.quant->columns, .x_pairs = pairs, .ld_pairs = COLS, .T = T,
                                  .n_weights = 1, .weights = {&q}, .y = {y}, .ldy = {ROWS}};
            cpu_gemm_run(&args);
            for (int i = 0; i < T * ROWS; i++) wrong += y[i] != ref_element(&whole, (size_t)(i % ROWS * COLS + j));
        }
    CHECK_MSG(!wrong && order, "%s: %d numbers differ", d->kernels->name, wrong);
    free(x), free(pairs), free(y), free(panels);
    cpu_close(d);
    case_close(&c);
}
static void test_cpu_formats(void) {
    for (int set = 0; set < cpu_n_kernel_sets(); set++) check_sorted(set);
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        for (int format = 1; format < FMT_COUNT; format++)
            check_format(format, set, 40, 192), check_format(format, set, 40, 96), check_format(format, set, 27, format == FMT_MXFP4 ? 64 : 40);
    /* whole models, and experts and MLA in each format */
    uint64_t seed = 3;
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        for (int format = 1; format < FMT_COUNT; format++, seed++) {
            cpu_sizes z = {.H = 4, .K = 2, .D = 16, .E = 64, .F = format % 2 ? 64 : 96, .V = 61, .B = 16, .type = TOKA_BF16, .format = format,
                           .kinds = (int[]){0, KIND_MOE, KIND_MLA, KIND_SINKS | KIND_TOPK | KIND_CLAMPED}[seed % 4]};
            int before = check_failed;
            check_ops(z, set, 1 + (int)(seed % 3), seed);
            CHECK_MSG(check_failed == before, "%s, format %d, kinds %d", cpu_kernel_sets[set].name, format, z.kinds);
        }
}

/* The heads of DeepSeek's cache, the largest. */
static void test_cpu_large_heads(void) {
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        check_ops((cpu_sizes){.H = 5, .K = 1, .D = 576, .Dv = 512, .E = 32, .F = 40, .V = 30, .B = 16, .kinds = KIND_SINKS}, set, 2,
                  (uint64_t)(40 + set));
}

/* So wide that a product has several blocks of k and uses tiles of every height. */
static void test_cpu_wide(void) {
    for (int set = 0; set < cpu_n_kernel_sets(); set++) {
        cpu_sizes z = {.H = 2, .K = 1, .D = 16, .E = 528, .F = 1100, .V = 30, .B = 16, .type = (toka_dtype)(set % 3)};
        check_ops(z, set, 2, (uint64_t)(90 + set));
    }
}

static void test_cpu_unpack(void) {
    uint16_t all[65536];
    float *got = mem_alloc(65536 * sizeof *got);
    for (int i = 0; i < 65536; i++) all[i] = (uint16_t)i;
    for (int set = 0; set < cpu_n_kernel_sets(); set++)
        for (int type = TOKA_BF16; type <= TOKA_F16; type++)
            for (int off = 0; off < 3; off++) {
                int n = 65536 - off - 7, wrong = 0;
                toka_tensor t = {.data = all + off, .dtype = (toka_dtype)type, .rows = 1, .cols = n, .stride = n};
                cpu_kernel_sets[set].convert(got, all + off, t.dtype, n);
                for (int i = 0; i < n; i++) {
                    double want = ref_element(&t, (size_t)i);
                    wrong += !(got[i] == want || (isnan(got[i]) && isnan(want)));
                }
                CHECK_MSG(!wrong, "%s type %d: %d wrong", cpu_kernel_sets[set].name, type, wrong);
            }
    free(got);
}

static float exp_of(float x) { return cpu_exp4(cpu_splat4(x))[3]; }
static void test_cpu_exp(void) {
    double max_error = 0;
    for (double x = -87; x <= 88; x += 1e-4) max_error = MAX(max_error, fabs(exp_of((float)x) / exp((float)x) - 1));
    CHECK_MSG(max_error < 3e-7, "%g", max_error);
    CHECK(exp_of(0) == 1 && exp_of(-INFINITY) == 0 && exp_of(-88) == 0 && isnan(exp_of(NAN)));
}

/* ---- Equal bytes, however the work is divided ---- */

/* Runs one step through the whole model. The logits of every row go to [seq][pos][V]. */
static void run_step(cpu_seqs *w, float *logits) {
    const toka_shape *s = &w->c->sh;
    size_t T = (size_t)w->T, E = (size_t)s->E, HD = (size_t)(s->H * s->D), V = (size_t)s->V;
    size_t HDv = (size_t)(s->H * toka_value_size(s));
    toka_dev_ptr x = guarded(w->d, T * E), q = guarded(w->d, T * HD), o = guarded(w->d, T * HDv);
    toka_sample_row *rows = mem_zalloc(T * sizeof *rows);
    toka_sample_result *results = mem_zalloc(T * sizeof *results);
    float *out = mem_alloc(T * V * sizeof *out);
    for (int t = 0; t < w->T; t++) rows[t] = (toka_sample_row){.row = t, .scored_id = 0};
    w->step.n_samples = w->T, w->step.samples = rows, w->step.logits = out;
    toka_hidden hidden = {.data = x};
    toka_cpu.embed(w->d, &w->step, &hidden);
    for (int l = 0; l < s->L; l++) {
        toka_cpu.norm_qkv_rope_kv(w->d, &w->step, l, &hidden, q);
        toka_cpu.attention(w->d, &w->step, l, q, o);
        toka_cpu.out_residual(w->d, &w->step, l, o, &hidden);
        toka_cpu.norm_mlp_residual(w->d, &w->step, l, &hidden);
    }
    toka_cpu.norm_logits_sample(w->d, &w->step, &hidden, results);
    for (int t = 0; t < w->T; t++)
        memcpy(logits + (size_t)(w->seq[t] * CPU_LEN + w->pos[t]) * V, out + (size_t)t * V, V * sizeof *out);
    guarded_free(x, T * E), guarded_free(q, T * HD), guarded_free(o, T * HDv);
    free(rows), free(results), free(out);
}

/* Runs all sequences to their ends. Each step takes a random number of tokens of each, up to
 * `max_tokens`. Sequence 0 stores the shared prefix first. */
static void run_seqs(cpu_seqs *w, float *logits, int max_tokens) {
    int from[CPU_SEQS] = {0}, to[CPU_SEQS], left = 1;
    for (int s = 1; s < w->n_seq; s++) from[s] = w->shared;
    while (left) {
        left = 0;
        for (int s = 0; s < w->n_seq; s++) {
            int n = max_tokens ? rnd_int(&w->seed, 0, max_tokens) : CPU_LEN;
            if (s && from[0] < w->shared && max_tokens) n = 0; /* the prefix is not stored yet */
            to[s] = MIN(w->len[s], from[s] + n);
            left += w->len[s] - to[s];
        }
        seqs_make_step(w, from, to, rnd_int(&w->seed, 0, 1), rnd_int(&w->seed, 0, 1));
        if (w->T) run_step(w, logits);
        memcpy(from, to, sizeof from);
    }
}

static void check_invariance(const cpu_kernels *set, cpu_sizes z, uint64_t seed) {
    cpu_case c;
    cpu_seqs *w = mem_zalloc(sizeof *w);
    case_open(&c, z, seed);
    w->c = &c, w->seed = seed * 31 + 7, w->n_seq = 6, w->shared = 16 / z.B * z.B * 2;
    for (int s = 0; s < w->n_seq; s++) {
        w->len[s] = w->shared + rnd_int(&w->seed, 1, 30);
        for (int p = 0; p < CPU_LEN; p++)
            w->token[s][p] = p < w->shared && s ? w->token[0][p] : rnd_int(&w->seed, 0, z.V - 1);
    }
    size_t n = (size_t)(CPU_SEQS * CPU_LEN * z.V);
    float *first = mem_zalloc(n * sizeof *first), *again = mem_zalloc(n * sizeof *again);
    seqs_open_device(w, set, 1, 512);
    run_seqs(w, first, 0);
    for (int round = 0; round < (FEWER ? 3 : 6); round++) {
        memset(again, 0, n * sizeof *again);
        seqs_open_device(w, set, 1 + round % 3, round % 2 ? 3 : 512);
        run_seqs(w, again, (int[]){1, 2, 5, 20, 40, 7}[round]);
        size_t differ = 0;
        for (size_t i = 0; i < n; i++) differ += memcmp(&first[i], &again[i], sizeof *first) != 0;
        CHECK_MSG(!differ, "%s, dtype %d, B %d, turn %d: %zu of %zu logits differ", set->name, (int)z.type, z.B, round, differ, n);
    }
    CHECK(isfinite(first[0]) && first[0] != 0);
    if (set->x_type == TOKA_BF16) { /* another arithmetic, as near to float32 as README and --help say */
        double error = 0, norm = 0;
        seqs_open_device(w, &cpu_kernel_sets[cpu_n_kernel_sets() - 1], 1, 512);
        run_seqs(w, again, 0);
        for (size_t i = 0; i < n; i++) error += pow(first[i] - again[i], 2), norm += pow(again[i], 2);
        const double most = z.kinds || z.kv_fp8 ? 0.1 : 0.01; /* some kinds are steep: caps, other experts for nearly equal scores */
        CHECK_MSG(error > 0 && sqrt(error / norm) < most, "dtype %d: relative error of the logits %g", (int)z.type, sqrt(error / norm));
    }
    toka_cpu.close(w->d);
    case_close(&c), free(w), free(first), free(again);
}

static void test_cpu_invariance(void) {
    const int n_sets = cpu_n_kernel_sets();
    for (int set = 0; set < n_sets + (cpu_bf16_kernels() != NULL); set++)
        for (int i = 0; i < 4; i++) {
            cpu_sizes z = {.H = (int[]){8, 7, 3, 4}[i], .K = (int[]){2, 1, 3, 1}[i], .D = (int[]){8, 64, 20, 80}[i],
                           .E = (int[]){64, 560, 72, 128}[i], .F = (int[]){96, 100, 600, 128}[i], .V = 37,
                           .B = (int[]){16, 4, 8, 32}[i], .type = (toka_dtype)(i % 3), .extras = i & 1,
                               .window = i == 2 ? 9 : 0};
            check_invariance(set < n_sets ? &cpu_kernel_sets[set] : cpu_bf16_kernels(), z, (uint64_t)(i + 1));
            z.kv_fp8 = 1 + i % 2;
            check_invariance(set < n_sets ? &cpu_kernel_sets[set] : cpu_bf16_kernels(), z, (uint64_t)(i + 1));
        }
    for (int set = 0; set < n_sets + (cpu_bf16_kernels() != NULL); set++)
        for (int i = 0; i < COUNT(cpu_kinds); i++) {
            cpu_sizes z = {.H = 4, .K = 2, .D = 20, .E = 40, .F = 70, .V = 37, .B = 8, .kinds = cpu_kinds[i], .window = i % 2 ? 9 : 0,
                           .type = (toka_dtype)((i + set) % 3), .Dv = i % 4 ? 0 : 12};
            check_invariance(set < n_sets ? &cpu_kernel_sets[set] : cpu_bf16_kernels(), z, (uint64_t)(i + 11));
        }
    for (int set = 0; set < n_sets + (cpu_bf16_kernels() != NULL); set++)
        for (int format = 1; format < FMT_COUNT; format++) {
            cpu_sizes z = {.H = 4, .K = 2, .D = 16, .E = 64, .F = 96, .V = 37, .B = 8, .format = format, .type = TOKA_BF16,
                           .kinds = (int[]){0, KIND_MOE, KIND_MLA}[format % 3]};
            check_invariance(set < n_sets ? &cpu_kernel_sets[set] : cpu_bf16_kernels(), z, (uint64_t)(format + 31));
        }
}

/* ---- bf16 arithmetic, against its definition in chapter 28 ---- */

static uint16_t ref_bf16(float f) { /* to nearest, ties to even; subnormal numbers are not tested */
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}
static float ref_from_bf16(uint16_t h) { return cpu_bits_to_f32((uint32_t)h << 16); }

/* The sum over k of x w, in the order of vdpbf16ps and of rule 1. The products are exact in float32. */
static float ref_dot_bf16(const uint16_t *x, const uint16_t *w, int n_k) {
    float sum = 0;
    for (int k0 = 0; k0 < n_k; k0 += 2048) {
        float lane[16] = {0}, four[8];
        for (int k = k0; k < MIN(n_k, k0 + 2048); k++) { /* the odd one of each pair comes first */
            int term = (k ^ 1) < n_k ? k ^ 1 : k;
            lane[k / 2 % 16] += ref_from_bf16(x[term]) * ref_from_bf16(w[term]);
        }
        for (int i = 0; i < 8; i++) four[i] = lane[i] + lane[i + 8];
        float block = ((four[0] + four[1]) + (four[2] + four[3])) + ((four[4] + four[5]) + (four[6] + four[7]));
        sum = k0 ? sum + block : block;
    }
    return sum;
}

static void check_gemm_bf16(toka_dtype type, int n_x, int n_k, uint64_t seed) {
    enum { COLUMNS = 70 };
    cpu_case c = {.seed = seed};
    cpu_pool pool;
    toka_err e;
    CHECK(cpu_pool_open(&pool, 2, &e) == 0);
    toka_tensor w = make_tensor(&c, COLUMNS, n_k, type, 0, 1);
    const size_t ldx = (size_t)cpu_round_up32(n_k);
    uint16_t *x = mem_zalloc((size_t)n_x * ldx * 2), *row = mem_alloc((size_t)n_k * 2);
    float *from = mem_alloc((size_t)n_k * 4), *y = mem_alloc((size_t)n_x * COLUMNS * 4);
    float *panels = mem_alloc(2 * CPU_PANEL_FLOATS * 4);
    int wrong = 0;
    for (int i = 0; i < n_x; i++) {
        for (int k = 0; k < n_k; k++) from[k] = (float)rnd_normal(&c.seed);
        cpu_bf16_kernels()->pack(x + (size_t)i * ldx, from, TOKA_F32, n_k);
        for (int k = 0; k < n_k; k++) wrong += x[(size_t)i * ldx + (size_t)k] != ref_bf16(from[k]);
    }
    CHECK_MSG(!wrong, "%d numbers are rounded wrongly", wrong);
    cpu_gemm_args args = {.kernels = cpu_bf16_kernels(), .pool = &pool, .panels = panels, .panel_floats = CPU_PANEL_FLOATS, .x = x,
                          .ldx = ldx, .T = n_x, .n_weights = 1, .weights = {&w}, .y = {y}, .ldy = {COLUMNS}};
    cpu_gemm_run(&args);
    for (int n = 0; n < COLUMNS; n++) {
        for (int k = 0; k < n_k; k++) row[k] = ref_bf16((float)ref_element(&w, (size_t)n * (size_t)n_k + (size_t)k));
        for (int i = 0; i < n_x; i++) {
            float want = ref_dot_bf16(x + (size_t)i * ldx, row, n_k);
            wrong += memcmp(&want, &y[i * COLUMNS + n], 4) != 0;
        }
    }
    CHECK_MSG(!wrong, "dtype %d, %d rows, k %d: %d sums differ", (int)type, n_x, n_k, wrong);
    cpu_pool_close(&pool);
    free(x), free(row), free(from), free(y), free(panels);
    case_close(&c);
}

static void test_cpu_bf16(void) {
    static const int rows[] = {1, 2, 3, 4, 5, 6, 7, 13, 70}, widths[] = {40, 64, 2144, 4128};
    for (int i = 0; cpu_bf16_kernels() && i < COUNT(rows); i++)
        for (int j = 0; j < COUNT(widths); j++)
            for (int type = 0; type < 3; type++)
                check_gemm_bf16((toka_dtype)type, rows[i], widths[j], (uint64_t)(100 * i + 10 * j + type + 1));
}

/* ---- The thread pool, and what open refuses ---- */

static void count_item(void *arg, int thread, int item) {
    (void)thread;
    atomic_fetch_add((atomic_int *)arg + item, 1);
}
static void test_cpu_pool(void) {
    for (int n = 1; n <= 7; n += 3) {
        cpu_pool p;
        toka_err e;
        atomic_int hits[50] = {0};
        CHECK(cpu_pool_open(&p, n, &e) == 0);
        for (int round = 0; round < 3000; round++) cpu_parallel_for(&p, count_item, hits, 1 + round % 50, INT64_MAX);
        if (n == 4) usleep(20000); /* let the threads fall asleep */
        cpu_parallel_for(&p, count_item, hits, 50, INT64_MAX);
        cpu_pool_close(&p);
        for (int i = 0; i < 50; i++) CHECK(hits[i] == 3000 - 60 * i + 1);
    }
}

static void test_cpu_refuses(void) {
    cpu_case c;
    toka_device *d;
    toka_err e;
    toka_device_options o = {.n_threads = 1, .max_tokens = 8, .max_samples = 8, .n_pages = 8};
    case_open(&c, (cpu_sizes){.H = 2, .K = 1, .D = 8, .E = 16, .F = 16, .V = 20, .B = 4}, 3);
    c.sh.D = 7;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_INPUT && strstr(e.msg, "head size 7"));
    c.sh.D = 8, c.sh.K = 0;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_INPUT);
    /* more memory than there are addresses */
    c.sh.H = c.sh.K = 1 << 20, o.n_pages = INT_MAX / 4;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_MEMORY);
    o.n_pages = INT_MAX;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_USE);
    o.n_pages = 8, c.sh.H = 2, c.sh.K = 1;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == 0);
    CHECK(toka_cpu.status(d, &e) == 0 && strstr(toka_cpu.describe(d), "1 thread"));
    toka_dev_ptr a = toka_cpu.alloc(d, 100);
    char back[4] = "";
    memcpy((void *)(uintptr_t)a.at, "abc", 4), memcpy(back, (const void *)(uintptr_t)a.at, 4);
    CHECK(strcmp(back, "abc") == 0);
    CHECK(toka_cpu.alloc(d, SIZE_MAX - 5).at == 0 && toka_cpu.status(d, &e) == TOKA_E_MEMORY);
    toka_cpu.close(d), toka_cpu.close(NULL);
    o.bf16 = true;
    if (!cpu_bf16_kernels())
        CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_DEVICE && strstr(e.msg, "AVX512_BF16"));
    else {
        CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == 0);
        CHECK(strstr(toka_cpu.describe(d), "AVX512_BF16"));
        toka_cpu.close(d);
    }
    case_close(&c);
}

static const struct test cpu_tests[] = {{"cpu_unpack", test_cpu_unpack},         {"cpu_kv_rounding", test_cpu_kv_rounding},
                                        {"cpu_exp", test_cpu_exp},
                                        {"cpu_ops", test_cpu_ops},               {"cpu_wide", test_cpu_wide},
                                        {"cpu_formats", test_cpu_formats},
                                        {"cpu_kinds", test_cpu_kinds},           {"cpu_large_heads", test_cpu_large_heads},
                                        {"cpu_invariance", test_cpu_invariance}, {"cpu_bf16", test_cpu_bf16},
                                        {"cpu_pool", test_cpu_pool},             {"cpu_hidden", test_cpu_hidden},
                                        {"cpu_refuses", test_cpu_refuses},       {0}};
