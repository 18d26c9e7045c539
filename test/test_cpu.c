/* test_cpu.c - tests chapters 19 and 20 against plain float64 arithmetic, op by op, for every
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
    float freq[128];
    void *heap[64];
    int n_heap;
    uint64_t seed;
    toka_rope rope;
} cpu_case;

/* ---- Number formats, by their definition ---- */

static double ref_half(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 0 ? ldexp(m, -24) : e == 31 ? (m ? NAN : INFINITY) : ldexp(1024 + m, e - 25);
    return h & 0x8000 ? -v : v;
}
static double ref_element(const toka_tensor *t, size_t i) {
    const unsigned char *p = t->data;
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

static toka_tensor make_tensor(cpu_case *c, int rows, int cols, toka_dtype type, double mean, double scale) {
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
} cpu_sizes;

static void case_open(cpu_case *c, cpu_sizes z, uint64_t seed) {
    *c = (cpu_case){.seed = seed};
    c->sh = (toka_shape){.L = 2, .H = z.H, .K = z.K, .D = z.D, .E = z.E, .F = z.F, .V = z.V, .V_all = z.V, .B = z.B, .eps = 1e-5f,
                         .max_len = 1000};
    c->rope = (toka_rope){c->freq, z.D, z.extras ? 1.25f : 1.0f, false};
    for (int i = 0; i < z.D / 2; i++) c->freq[i] = (float)pow(10000, -2.0 * i / z.D);
    int HD = z.H * z.D, KD = z.K * z.D;
    for (int l = 0; l < 2; l++) {
        toka_layer *y = &c->layers[l];
        *y = (toka_layer){.window = l ? z.window : 0, .rope = &c->rope};
        y->attn_norm = make_tensor(c, 1, z.E, z.type, 1, 0.2), y->mlp_norm = make_tensor(c, 1, z.E, z.type, 1, 0.2);
        y->q = make_tensor(c, HD, z.E, z.type, 0, 2 / sqrt(z.E)), y->k = make_tensor(c, KD, z.E, z.type, 0, 2 / sqrt(z.E));
        y->v = make_tensor(c, KD, z.E, z.type, 0, 1 / sqrt(z.E)), y->o = make_tensor(c, z.E, HD, z.type, 0, 1 / sqrt(HD));
        y->mlp.gate = make_tensor(c, z.F, z.E, z.type, 0, 1 / sqrt(z.E));
        y->mlp.up = make_tensor(c, z.F, z.E, z.type, 0, 1 / sqrt(z.E));
        y->mlp.down = make_tensor(c, z.E, z.F, z.type, 0, 1 / sqrt(z.F));
        if (!z.extras) continue;
        y->q_bias = make_tensor(c, 1, HD, z.type, 0, 1), y->k_bias = make_tensor(c, 1, KD, z.type, 0, 1);
        y->v_bias = make_tensor(c, 1, KD, z.type, 0, 1), y->o_bias = make_tensor(c, 1, z.E, z.type, 0, 1);
        y->q_norm = make_tensor(c, 1, z.D, z.type, 1, 0.2), y->k_norm = make_tensor(c, 1, z.D, z.type, 1, 0.2);
    }
    c->w.embed = make_tensor(c, z.V, z.E, z.type, 0, 1), c->w.norm = make_tensor(c, 1, z.E, z.type, 1, 0.2);
    c->w.lm_head = make_tensor(c, z.V, z.E, z.type, 0, 2 / sqrt(z.E));
    c->w.layers = c->layers;
}
static void case_close(cpu_case *c) {
    for (int i = 0; i < c->n_heap; i++) free(c->heap[i]);
}

/* ---- Reference arithmetic ---- */

static void ref_norm(double *y, const double *x, const toka_tensor *w, int n, double eps) {
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    for (int i = 0; i < n; i++) y[i] = x[i] / sqrt(sum / n + eps) * ref_element(w, (size_t)i);
}
static void ref_matvec(double *y, const double *x, const toka_tensor *w) {
    for (int n = 0; n < w->rows; n++) {
        y[n] = 0;
        for (int k = 0; k < w->cols; k++) y[n] += x[k] * ref_element(w, (size_t)n * (size_t)w->cols + (size_t)k);
    }
}
/* q, k or v of one token: RMSNorm, product, bias; then the norm and RoPE of each head, unless it is
 * v (norm_w and rotate are off). */
static void ref_heads(const cpu_case *c, double *y, const double *x, const toka_layer *l, const toka_tensor *w,
                      const toka_tensor *bias, const toka_tensor *head_norm, int pos, bool rotate) {
    const toka_shape *s = &c->sh;
    double *xn = mem_alloc((size_t)s->E * sizeof *xn), pair[256];
    ref_norm(xn, x, &l->attn_norm, s->E, s->eps);
    ref_matvec(y, xn, w);
    free(xn);
    for (int i = 0; bias->rows && i < w->rows; i++) y[i] += ref_element(bias, (size_t)i);
    for (int h = 0; rotate && h < w->rows / s->D; h++) {
        double *a = y + h * s->D;
        if (head_norm->rows) ref_norm(a, a, head_norm, s->D, s->eps);
        memcpy(pair, a, (size_t)s->D * sizeof *a);
        for (int i = 0; i < s->D; i++) {
            int f = i % (s->D / 2);
            double angle = (float)pos * c->freq[f], other = i < s->D / 2 ? -pair[i + s->D / 2] : pair[i - s->D / 2];
            a[i] = (pair[i] * cos(angle) + other * sin(angle)) * c->rope.scale;
        }
    }
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

static int rnd_int(uint64_t *s, int from, int to) { return from + (int)(rnd(s) % (uint64_t)(to - from + 1)); }

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
    w->d->pool.serial_cost = 0;
    w->d->kernels = kernels, w->d->scratch_rows = MIN(w->d->scratch_rows, chunk);
    w->d->scratch_samples = MIN(w->d->scratch_samples, MAX(1, chunk / 2));
    size_t pages = 2 * CPU_PAGES;
    for (size_t i = 0; i < pages * w->d->k_page_floats; i++) w->d->k_cache[i] = NAN;
    for (size_t i = 0; i < pages * w->d->v_page_floats; i++) w->d->v_cache[i] = NAN;
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
    float *p = cpu_ptr(a);
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
    double *k, *v;       /* [seq][pos][K*D] */
} cpu_ref;

static void check_embed(cpu_seqs *w) {
    size_t n = (size_t)w->T * (size_t)w->c->sh.E;
    toka_dev_ptr x = guarded(w->d, n);
    double *want = mem_alloc(n * sizeof *want);
    for (size_t i = 0; i < n; i++)
        want[i] = ref_element(&w->c->w.embed,
                              (size_t)w->ids[i / (size_t)w->c->sh.E] * (size_t)w->c->sh.E + i % (size_t)w->c->sh.E);
    toka_cpu.embed(w->d, &w->step, &(toka_hidden){.data = x});
    CHECK(rel_error(cpu_ptr(x), want, n) == 0);
    guarded_free(x, n), free(want);
}

/* Runs norm_qkv_rope_kv on random x. Checks q, and K and V in their kv_slots. Fills ref. */
static void check_qkv(cpu_seqs *w, int layer, cpu_ref *ref) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    int HD = s->H * s->D, KD = s->K * s->D;
    size_t nx = (size_t)w->T * (size_t)s->E, nq = (size_t)w->T * (size_t)HD;
    toka_dev_ptr x = guarded(w->d, nx), q = guarded(w->d, nq);
    double *xd = mem_alloc(nx * sizeof *xd), *qd = mem_alloc(nq * sizeof *qd);
    for (size_t i = 0; i < nx; i++) xd[i] = cpu_ptr(x)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.norm_qkv_rope_kv(w->d, &w->step, layer, WHOLE(x), q);
    float got[2][256];
    for (int t = 0; t < w->T; t++) {
        const double *row = xd + (size_t)t * (size_t)s->E;
        size_t at = (size_t)(w->seq[t] * CPU_LEN + w->pos[t]) * (size_t)KD;
        ref_heads(w->c, qd + (size_t)t * (size_t)HD, row, l, &l->q, &l->q_bias, &l->q_norm, w->pos[t], true);
        ref_heads(w->c, ref->k + at, row, l, &l->k, &l->k_bias, &l->k_norm, w->pos[t], true);
        ref_heads(w->c, ref->v + at, row, l, &l->v, &l->v_bias, &l->v_bias, w->pos[t], false);
        int page = layer * CPU_PAGES + w->kv_slot[t] / s->B, off = w->kv_slot[t] % s->B;
        for (int h = 0; h < s->K; h++) {
            for (int i = 0; i < s->D; i++) {
                got[0][i] = w->d->k_cache[(size_t)page * w->d->k_page_floats + (size_t)((h * s->D + i) * w->d->B_pad + off)];
                got[1][i] = w->d->v_cache[(size_t)page * w->d->v_page_floats + (size_t)((h * s->B + off) * w->d->D_pad + i)];
            }
            CHECK(rel_error(got[0], ref->k + at + h * s->D, (size_t)s->D) < 1e-5);
            CHECK(rel_error(got[1], ref->v + at + h * s->D, (size_t)s->D) < 1e-5);
        }
    }
    double err = rel_error(cpu_ptr(q), qd, nq);
    CHECK_MSG(err < 2e-6, "%g", err);
    guarded_free(x, nx), guarded_free(q, nq), free(xd), free(qd);
}

static void check_attention(cpu_seqs *w, int layer, const cpu_ref *ref) {
    const toka_shape *s = &w->c->sh;
    size_t n = (size_t)(w->T * s->H * s->D);
    int window = w->c->layers[layer].window;
    toka_dev_ptr q = guarded(w->d, n), o = guarded(w->d, n);
    double *want = mem_zalloc(n * sizeof *want), p[CPU_LEN];
    for (size_t i = 0; i < n; i++) cpu_ptr(q)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.attention(w->d, &w->step, layer, q, o);
    for (int t = 0; t < w->T; t++)
        for (int h = 0; h < s->H; h++) {
            const float *qh = cpu_ptr(q) + (t * s->H + h) * s->D;
            double *oh = want + (t * s->H + h) * s->D, best = -INFINITY, sum = 0;
            size_t at = (size_t)((w->seq[t] * CPU_LEN * s->K + h / (s->H / s->K)) * s->D), step = (size_t)(s->K * s->D);
            int from = window ? MAX(0, w->pos[t] - window + 1) : 0;
            for (int j = from; j <= w->pos[t]; j++) {
                /* sequence 0 stored the prefix, once */
                int owner = w->seq[t] && j < w->shared ? w->seq[t] : 0;
                size_t src = j < w->shared ? at - (size_t)(owner * CPU_LEN * s->K * s->D) : at;
                p[j] = 0;
                for (int i = 0; i < s->D; i++) p[j] += qh[i] * ref->k[src + (size_t)j * step + (size_t)i] / sqrt(s->D);
                best = MAX(best, p[j]);
            }
            for (int j = from; j <= w->pos[t]; j++) sum += p[j] = exp(p[j] - best);
            for (int j = from; j <= w->pos[t]; j++) {
                size_t src = j < w->shared ? at - (size_t)(w->seq[t] * CPU_LEN * s->K * s->D) : at;
                for (int i = 0; i < s->D; i++) oh[i] += p[j] / sum * ref->v[src + (size_t)j * step + (size_t)i];
            }
        }
    double err = rel_error(cpu_ptr(o), want, n);
    CHECK_MSG(err < 3e-6, "%g: T %d, layer %d, spans %d", err, w->T, layer, w->n_spans);
    guarded_free(q, n), guarded_free(o, n), free(want);
}

static void check_out_residual(cpu_seqs *w, int layer) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    int HD = s->H * s->D;
    size_t nx = (size_t)(w->T * s->E), no = (size_t)(w->T * HD);
    toka_dev_ptr x = guarded(w->d, nx), o = guarded(w->d, no);
    double *want = mem_alloc(nx * sizeof *want), *in = mem_alloc((size_t)HD * sizeof *in),
        *y = mem_alloc((size_t)s->E * sizeof *y);
    for (size_t i = 0; i < nx; i++) want[i] = cpu_ptr(x)[i] = (float)rnd_normal(&w->seed);
    for (size_t i = 0; i < no; i++) cpu_ptr(o)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.out_residual(w->d, &w->step, layer, o, WHOLE(x));
    for (int t = 0; t < w->T; t++) {
        for (int i = 0; i < HD; i++) in[i] = cpu_ptr(o)[t * HD + i];
        ref_matvec(y, in, &l->o);
        for (int i = 0; i < s->E; i++)
            want[t * s->E + i] += y[i] + (l->o_bias.rows ? ref_element(&l->o_bias, (size_t)i) : 0);
    }
    CHECK(rel_error(cpu_ptr(x), want, nx) < 1e-6);
    guarded_free(x, nx), guarded_free(o, no), free(want), free(in), free(y);
}

static void check_mlp(cpu_seqs *w, int layer) {
    const toka_shape *s = &w->c->sh;
    const toka_layer *l = &w->c->layers[layer];
    size_t nx = (size_t)(w->T * s->E);
    toka_dev_ptr x = guarded(w->d, nx);
    double *want = mem_alloc(nx * sizeof *want), *in = mem_alloc((size_t)s->E * sizeof *in);
    double *g = mem_alloc((size_t)s->F * sizeof *g), *u = mem_alloc((size_t)s->F * sizeof *u);
    for (size_t i = 0; i < nx; i++) want[i] = cpu_ptr(x)[i] = (float)rnd_normal(&w->seed);
    toka_cpu.norm_mlp_residual(w->d, &w->step, layer, WHOLE(x));
    for (int t = 0; t < w->T; t++) {
        double *row = want + t * s->E;
        ref_norm(in, row, &l->mlp_norm, s->E, s->eps);
        ref_matvec(g, in, &l->mlp.gate), ref_matvec(u, in, &l->mlp.up);
        for (int i = 0; i < s->F; i++) g[i] = g[i] / (1 + exp(-g[i])) * u[i];
        ref_matvec(in, g, &l->mlp.down);
        for (int i = 0; i < s->E; i++) row[i] += in[i];
    }
    CHECK(rel_error(cpu_ptr(x), want, nx) < 1e-6);
    guarded_free(x, nx), free(want), free(in), free(g), free(u);
}

static void check_logits(cpu_seqs *w) {
    const toka_shape *s = &w->c->sh;
    int n_out = rnd_int(&w->seed, 1, MIN(w->T, 40));
    size_t nx = (size_t)(w->T * s->E), nl = (size_t)(n_out * s->V);
    toka_dev_ptr x = guarded(w->d, nx), logits = guarded(w->d, nl);
    toka_sample_row rows[40];
    toka_sample_result results[41];
    double *in = mem_alloc((size_t)s->E * sizeof *in), *y = mem_alloc((size_t)s->V * sizeof *y);
    for (size_t i = 0; i < nx; i++) cpu_ptr(x)[i] = (float)rnd_normal(&w->seed);
    for (int i = 0; i < n_out; i++)
        rows[i] = (toka_sample_row){.row = rnd_int(&w->seed, 0, w->T - 1), .scored_id = rnd_int(&w->seed, 0, s->V - 1)};
    memset(results, 0x5A, sizeof results);
    w->step.n_samples = n_out, w->step.samples = rows, w->step.logits = cpu_ptr(logits);
    toka_cpu.norm_logits_sample(w->d, &w->step, WHOLE(x), results);
    for (int i = 0; i < n_out; i++) {
        double best = -INFINITY, sum = 0;
        for (int j = 0; j < s->E; j++) in[j] = cpu_ptr(x)[rows[i].row * s->E + j];
        ref_norm(in, in, &w->c->w.norm, s->E, s->eps);
        ref_matvec(y, in, &w->c->w.lm_head);
        for (int j = 0; j < s->V; j++) best = MAX(best, y[j]);
        for (int j = 0; j < s->V; j++) sum += exp(y[j] - best);
        CHECK(rel_error(cpu_ptr(logits) + i * s->V, y, (size_t)s->V) < 1e-6);
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
    cpu_case c;
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
        size_t n = (size_t)(CPU_SEQS * CPU_LEN * z.K * z.D);
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
                               .extras = i & 1, .window = (int[]){0, 1, 7, 30}[seed % 4]};
                int before = check_failed;
                check_ops(z, set, 1 + (int)(seed % 3), seed);
                CHECK_MSG(check_failed == before, "%s, dtype %d, H %d K %d D %d B %d, seed %d", cpu_kernel_sets[set].name, type,
                          z.H, z.K,
                          z.D, z.B, (int)seed);
            }
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
    toka_dev_ptr x = guarded(w->d, T * E), q = guarded(w->d, T * HD), o = guarded(w->d, T * HD);
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
    guarded_free(x, T * E), guarded_free(q, T * HD), guarded_free(o, T * HD);
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
    for (int round = 0; round < 6; round++) {
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
        CHECK_MSG(error > 0 && sqrt(error / norm) < 0.01, "dtype %d: relative error of the logits %g", (int)z.type, sqrt(error / norm));
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
        }
}

/* ---- bf16 arithmetic, against its definition in chapter 19 ---- */

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
    c.sh.K = 1, o.n_pages = INT_MAX / 4, c.sh.L = INT_MAX;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_MEMORY);
    o.n_pages = INT_MAX;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_USE);
    o.n_pages = 8, c.sh.L = 2;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == 0);
    CHECK(toka_cpu.status(d, &e) == 0 && strstr(toka_cpu.describe(d), "1 thread"));
    toka_dev_ptr a = toka_cpu.alloc(d, 100);
    char back[4] = "";
    toka_cpu.upload(d, a, "abc", 4), toka_cpu.download(d, back, a, 4);
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

static const struct test cpu_tests[] = {{"cpu_unpack", test_cpu_unpack},         {"cpu_exp", test_cpu_exp},
                                        {"cpu_ops", test_cpu_ops},               {"cpu_wide", test_cpu_wide},
                                        {"cpu_invariance", test_cpu_invariance}, {"cpu_bf16", test_cpu_bf16},
                                        {"cpu_pool", test_cpu_pool},             {"cpu_hidden", test_cpu_hidden},
                                        {"cpu_refuses", test_cpu_refuses},       {0}};
