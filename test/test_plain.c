/* test_plain.c - tests chapter "Weight formats" and the plain backend.
 *
 * Formats: random numbers are packed here, by the layouts that toka.h describes; toka_weight_row must
 * return them. Models: random ones, with every kind of layer and weights in every format, run in
 * random chunks over random pages. Their logits are compared with the formulas of toka.h in
 * float64, computed here without pages, chunks or absorbed weights. Last, the embedded model beside
 * the CPU backend. */

enum { PL_MAX_HEAP = 4000, PL_EXPERTS = 12 };

typedef struct pl_matrix { /* a whole quantized matrix; toka_tensor.quant points to its first field */
    toka_quant quant;
    void *data;
    toka_dtype dtype;
    float *values; /* [rows][cols] what toka_weight_row must return */
} pl_matrix;

typedef struct pl_case {
    cpu_case c; /* sh, w and layers of the model */
    toka_mla mla[2];
    toka_linear linear[2];
    toka_moe moe[2];
    toka_mlp experts[2][PL_EXPERTS];
    toka_rope rope[2];
    float freq[64];
    uint64_t seed;
    void *heap[PL_MAX_HEAP];
    int n_heap;
    bool for_cpu; /* D is even */
    bool kv_fp8;  /* any layer has FP8 K and V */
} pl_case;

static bool pl_chance(pl_case *p, int one_in) { return rnd_int(&p->seed, 1, one_in) == 1; }

/* n zero bytes that begin 1 to 3 bytes after an aligned address, as in a file, and end where the
 * heap block ends: ASan reports a read past the end. */
static void *pl_bytes(pl_case *p, size_t n) {
    size_t odd = 1 + (size_t)p->n_heap % 3;
    if (p->n_heap == PL_MAX_HEAP) abort();
    char *block = p->heap[p->n_heap++] = mem_zalloc(n + odd);
    return block + odd;
}
static void pl_close(pl_case *p) {
    for (int i = 0; i < p->n_heap; i++) free(p->heap[i]);
    free(p);
}

/* ---- Number formats, by their definition ---- */

/* 8-bit e4m3 and 4-bit e2m1 */
static double pl_fp8(unsigned code) {
    int sign = code & 128 ? -1 : 1, exponent = code >> 3 & 15, mantissa = code & 7;
    if ((code & 127) == 127) return NAN;
    return sign * (exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6));
}
static double pl_e2m1(unsigned code) {
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return code & 8 ? -values[code & 7] : values[code & 7];
}

/* Stores a number as element i and returns what was stored: `value` rounded to the type. E8M0: the
 * power of two below. */
static float pl_put(void *data, toka_dtype type, size_t i, double value) {
    float f = (float)value;
    uint32_t u;
    memcpy(&u, &f, 4);
    uint16_t half = type == TOKA_F16 ? to_half(f) : (uint16_t)(u >> 16);
    if (type == TOKA_E8M0) {
        ((unsigned char *)data)[i] = (unsigned char)(u >> 23 & 255);
        return ldexpf(1, (int)(u >> 23 & 255) - 127);
    }
    memcpy((char *)data + i * (type == TOKA_F32 ? 4 : 2), type == TOKA_F32 ? (void *)&f : (void *)&half, type == TOKA_F32 ? 4 : 2);
    toka_tensor t = {.data = data, .dtype = type};
    return (float)ref_element(&t, i);
}

/* ---- Packing ---- */

/* Nibble i of a 32-bit word, 0 is the lowest. */
static void pl_set_nibble(void *data, size_t word, int i, unsigned value) {
    unsigned char *byte = (unsigned char *)data + 4 * word + i / 2;
    *byte = (unsigned char)(*byte | value << (i % 2 * 4));
}
static int pl_awq_nibble(int row) { /* nibble i of a word has row order[i] */
    static const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7};
    for (int i = 0;; i++)
        if (order[i] == row % 8) return i;
}
static size_t pl_div(int a, int b) { return (size_t)((a + b - 1) / b); }

static void pl_put_int4(pl_matrix *m, int r, int c, unsigned value) {
    const toka_quant *q = &m->quant;
    if (q->packing == TOKA_PACK_ROWS) pl_set_nibble(m->data, (size_t)r * pl_div(q->cols, 8) + (size_t)c / 8, c % 8, value);
    if (q->packing == TOKA_PACK_GPTQ) pl_set_nibble(m->data, (size_t)(c / 8 * q->rows + r), c % 8, value);
    if (q->packing == TOKA_PACK_AWQ) pl_set_nibble(m->data, (size_t)c * pl_div(q->rows, 8) + (size_t)r / 8, pl_awq_nibble(r), value);
}
static void pl_put_zero(pl_matrix *m, int r, int group, int n_groups, unsigned value) {
    const toka_quant *q = &m->quant;
    size_t word = (size_t)group * pl_div(q->rows, 8) + (size_t)r / 8;
    if (q->packing == TOKA_PACK_ROWS) word = (size_t)(r / 8 * n_groups + group);
    pl_set_nibble((void *)q->zero, word, q->packing == TOKA_PACK_AWQ ? pl_awq_nibble(r) : r % 8, value);
}

/* Chooses the blocks and makes their scales: scales[i][j]. */
static float *pl_make_scales(pl_case *p, pl_matrix *m, double size) {
    toka_quant *q = &m->quant;
    q->block_rows = m->dtype != TOKA_FP8 || pl_chance(p, 3) ? 1 : pl_chance(p, 3) ? q->rows : rnd_int(&p->seed, 1, q->rows);
    q->block_cols = pl_chance(p, 3) ? q->cols : rnd_int(&p->seed, 1, q->cols);
    int n_i = (int)pl_div(q->rows, q->block_rows), n_j = (int)pl_div(q->cols, q->block_cols);
    bool by_rows = pl_chance(p, 2); /* else one block column after the other */
    q->scale_dtype = m->dtype == TOKA_MXFP4 ? TOKA_E8M0 : (toka_dtype)rnd_int(&p->seed, TOKA_BF16, TOKA_F32);
    q->scale_row_step = by_rows ? n_j : 1, q->scale_col_step = by_rows ? 1 : n_i;
    size_t bytes = q->scale_dtype == TOKA_E8M0 ? 1 : q->scale_dtype == TOKA_F32 ? 4 : 2;
    void *scale = pl_bytes(p, (size_t)(n_i * n_j) * bytes);
    float *scales = pl_bytes(p, (size_t)(n_i * n_j) * 4 + 16);
    scales = (float *)(((uintptr_t)scales + 7) / 8 * 8);
    for (int i = 0; i < n_i; i++)
        for (int j = 0; j < n_j; j++)
            scales[i * n_j + j] = pl_put(scale, q->scale_dtype, (size_t)(i * q->scale_row_step + j * q->scale_col_step),
                                         size * (0.5 + rnd_unit(&p->seed)));
    q->scale = scale;
    return scales;
}

/* size: the root mean square of the values, about */
static pl_matrix *pl_quantized(pl_case *p, toka_dtype dtype, int rows, int cols, double size) {
    pl_matrix *m = (pl_matrix *)(((uintptr_t)pl_bytes(p, sizeof *m + 16) + 15) / 16 * 16);
    toka_quant *q = &m->quant;
    m->dtype = dtype, q->rows = rows, q->cols = cols;
    q->packing = dtype == TOKA_INT4 ? (toka_packing)rnd_int(&p->seed, TOKA_PACK_ROWS, TOKA_PACK_AWQ) : TOKA_PACK_ROWS;
    float *scales = pl_make_scales(p, m, size / (dtype == TOKA_FP8 ? 150 : dtype == TOKA_INT4 ? 6 : 3));
    int n_groups = (int)pl_div(cols, q->block_cols);
    size_t words = q->packing == TOKA_PACK_ROWS ? (size_t)rows * pl_div(cols, 8)
                   : q->packing == TOKA_PACK_GPTQ ? pl_div(cols, 8) * (size_t)rows : (size_t)cols * pl_div(rows, 8);
    m->data = pl_bytes(p, dtype == TOKA_FP8 ? (size_t)(rows * cols) : dtype == TOKA_MXFP4 ? (size_t)(rows * cols / 2) : 4 * words);
    m->values = (float *)(((uintptr_t)pl_bytes(p, (size_t)(rows * cols) * 4 + 16) + 7) / 8 * 8);
    int32_t *group = mem_alloc((size_t)cols * sizeof *group);
    unsigned char *zero = mem_alloc((size_t)(rows * n_groups));
    bool shuffled = dtype == TOKA_INT4 && pl_chance(p, 2), has_zero = dtype == TOKA_INT4 && pl_chance(p, 2);
    for (int c = 0; c < cols; c++) group[c] = shuffled ? rnd_int(&p->seed, 0, n_groups - 1) : c / q->block_cols;
    if (shuffled) q->group = memcpy(pl_bytes(p, (size_t)cols * 4), group, (size_t)cols * 4);
    if (has_zero) q->zero = pl_bytes(p, 4 * pl_div(rows, 8) * (size_t)n_groups), q->zero_add = rnd_int(&p->seed, 0, 1);
    for (int r = 0; has_zero && r < rows; r++)
        for (int g = 0; g < n_groups; g++) pl_put_zero(m, r, g, n_groups, zero[r * n_groups + g] = (unsigned char)rnd_int(&p->seed, 0, 15));
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < cols; c++) {
            float scale = scales[r / q->block_rows * n_groups + group[c]], *value = &m->values[r * cols + c];
            unsigned code = (unsigned)rnd(&p->seed) >> 3 & (dtype == TOKA_FP8 ? 255 : 15);
            size_t i = (size_t)(r * cols + c);
            if (dtype == TOKA_FP8) code = (code & 127) == 127 ? code - 1 : code, ((unsigned char *)m->data)[i] = (unsigned char)code;
            if (dtype == TOKA_MXFP4) pl_set_nibble(m->data, i / 8, (int)(i % 8), code);
            if (dtype == TOKA_INT4) pl_put_int4(m, r, c, code);
            *value = dtype == TOKA_FP8 ? (float)pl_fp8(code) * scale
                     : dtype == TOKA_MXFP4 ? (float)pl_e2m1(code) * scale
                     : (float)((int)code - (has_zero ? zero[r * n_groups + group[c]] + q->zero_add : 8)) * scale;
        }
    free(group), free(zero);
    return m;
}

/* A slice of a random matrix in this format: every row_step-th row from row0 on, from column col0. */
static toka_tensor pl_slice(pl_case *p, toka_dtype dtype, int rows, int cols, double size) {
    int step = rnd_int(&p->seed, 1, 3), row0 = rnd_int(&p->seed, 0, 3), col0 = pl_chance(p, 2) ? 0 : rnd_int(&p->seed, 1, 9);
    int all_rows = row0 + (rows - 1) * step + 1 + rnd_int(&p->seed, 0, 3), all_cols = col0 + cols + rnd_int(&p->seed, 0, 3);
    if (dtype == TOKA_MXFP4) all_cols += all_cols % 2;
    pl_matrix *m = pl_quantized(p, dtype, all_rows, all_cols, size);
    return (toka_tensor){.data = m->data, .dtype = dtype, .rows = rows, .cols = cols, .quant = &m->quant, .row0 = row0, .row_step = step,
                         .col0 = col0};
}
/* A plain tensor; its rows may be parts of longer rows. */
static toka_tensor pl_plain(pl_case *p, int rows, int cols, double mean, double size) {
    toka_dtype type = (toka_dtype)rnd_int(&p->seed, TOKA_BF16, TOKA_F32);
    int stride = rows > 1 && pl_chance(p, 2) ? cols + 3 : cols;
    toka_tensor t = {.dtype = type, .rows = rows, .cols = cols, .stride = stride};
    char *data = pl_bytes(p, (size_t)((rows - 1) * stride + cols) * (type == TOKA_F32 ? 4 : 2));
    for (int i = 0; i < (rows - 1) * stride + cols; i++) pl_put(data, type, (size_t)i, mean + size * rnd_normal(&p->seed));
    t.data = data;
    return t;
}
static toka_tensor pl_any(pl_case *p, int rows, int cols, double size) {
    static const toka_dtype types[] = {TOKA_FP8, TOKA_INT4, TOKA_MXFP4};
    return pl_chance(p, 2) ? pl_plain(p, rows, cols, 0, size) : pl_slice(p, types[rnd_int(&p->seed, 0, 2)], rows, cols, size);
}

/* Returns an element of a tensor as float64. */
static double pl_at(const toka_tensor *t, int row, int col) {
    if (!t->quant) return ref_element(t, (size_t)row * (size_t)t->stride + (size_t)col);
    const pl_matrix *m = (const pl_matrix *)(const void *)t->quant;
    return m->values[(t->row0 + row * t->row_step) * t->quant->cols + t->col0 + col];
}

/* ---- Tests of the formats ---- */

static void pl_check_rows(const toka_tensor *t, const char *what, uint64_t seed) {
    float *row = mem_alloc((size_t)(t->cols + 1) * sizeof *row);
    int wrong = 0;
    for (int r = 0; r < t->rows; r++) {
        row[t->cols] = 77;
        toka_weight_row(t, r, row);
        for (int c = 0; c < t->cols; c++) wrong += row[c] != (float)pl_at(t, r, c);
        wrong += row[t->cols] != 77;
    }
    const toka_quant *q = t->quant;
    CHECK_MSG(!wrong, "%s [%d][%d]: %d wrong, seed %llu, packing %d, block %dx%d, zero %d, group %d", what, t->rows, t->cols, wrong,
              (unsigned long long)seed, q ? q->packing : 0, q ? q->block_rows : 0, q ? q->block_cols : 0, q && q->zero, q && q->group);
    free(row);
}

static void test_weight_formats(void) {
    static const char *const names[] = {"FP8", "INT4", "MXFP4"};
    for (uint64_t seed = 1; seed <= 400; seed++) {
        pl_case *p = mem_zalloc(sizeof *p);
        p->seed = seed;
        for (int i = 0; i < 3; i++) {
            toka_tensor t = pl_slice(p, (toka_dtype)(TOKA_FP8 + i), rnd_int(&p->seed, 1, 40), rnd_int(&p->seed, 1, 70), 1);
            pl_check_rows(&t, names[i], seed);
        }
        toka_tensor t = pl_plain(p, rnd_int(&p->seed, 1, 9), rnd_int(&p->seed, 1, 70), 0, 1);
        pl_check_rows(&t, "plain", seed);
        pl_close(p);
    }
}

/* Every code of the small formats, and the ends of the large ones. */
static void test_weight_codes(void) {
    static float row[65536];
    static uint16_t halves[65536];
    unsigned char bytes[256], one[4], nibbles[8];
    int wrong = 0;
    for (int i = 0; i < 256; i++) bytes[i] = (unsigned char)i;
    for (int i = 0; i < 8; i++) nibbles[i] = (unsigned char)(2 * i | (2 * i + 1) << 4);
    pl_put(one, TOKA_F32, 0, 1);
    toka_quant q = {.rows = 1, .cols = 256, .block_rows = 1, .block_cols = 256, .scale = one, .scale_dtype = TOKA_F32};
    toka_weight_row(&(toka_tensor){.data = bytes, .dtype = TOKA_FP8, .rows = 1, .cols = 256, .quant = &q, .row_step = 1}, 0, row);
    for (unsigned i = 0; i < 256; i++) wrong += (i & 127) == 127 ? !isnan(row[i]) : row[i] != (float)pl_fp8(i) || !!signbit(row[i]) != (i > 127);
    CHECK(!wrong && row[0x7E] == 448 && row[1] == 0x1p-9f);
    q.cols = q.block_cols = 16;
    toka_weight_row(&(toka_tensor){.data = nibbles, .dtype = TOKA_MXFP4, .rows = 1, .cols = 16, .quant = &q, .row_step = 1}, 0, row);
    for (unsigned i = 0; i < 16; i++) CHECK(row[i] == (float)pl_e2m1(i));
    for (unsigned i = 0; i < 256; i++) { /* E8M0, as the scale of the number 1 */
        unsigned char scale = (unsigned char)i, number = 2;
        toka_quant e8m0 = {.rows = 1, .cols = 2, .block_rows = 1, .block_cols = 2, .scale = &scale, .scale_dtype = TOKA_E8M0};
        toka_weight_row(&(toka_tensor){.data = &number, .dtype = TOKA_MXFP4, .rows = 1, .cols = 1, .quant = &e8m0, .row_step = 1}, 0, row);
        CHECK(i == 255 ? isnan(row[0]) : row[0] == (float)ldexp(1, (int)i - 127));
    }
    for (int i = 0; i < 65536; i++) halves[i] = (uint16_t)i;
    for (toka_dtype type = TOKA_BF16; type <= TOKA_F16; type++) {
        toka_tensor t = {.data = halves, .dtype = type, .rows = 1, .cols = 65536, .stride = 65536};
        toka_weight_row(&t, 0, row);
        for (size_t i = 0, n_wrong = 0; i < 65536; i++) {
            double want = ref_element(&t, i);
            bool same = isnan(want) ? isnan(row[i]) : row[i] == want && !!signbit(row[i]) == !!signbit(want);
            CHECK_MSG(same || n_wrong++, "type %d, code %zx: %g, expected %g", (int)type, i, row[i], want);
        }
    }
}

/* ---- Random models ---- */

static void pl_make_mlp(pl_case *p, toka_mlp *mlp, int F) {
    const int E = p->c.sh.E;
    p->c.sh.F = MAX(p->c.sh.F, F);
    mlp->gate = pl_any(p, F, E, 1.5 / sqrt(E)), mlp->up = pl_any(p, F, E, 1.5 / sqrt(E)), mlp->down = pl_any(p, E, F, 1 / sqrt(F));
    if (pl_chance(p, 2)) return;
    mlp->gate_bias = pl_plain(p, 1, F, 0, 1), mlp->up_bias = pl_plain(p, 1, F, 0, 1), mlp->down_bias = pl_plain(p, 1, E, 0, 1);
}

static void pl_make_moe(pl_case *p, int l) {
    toka_moe *moe = &p->moe[l];
    const int E = p->c.sh.E, groups = rnd_int(&p->seed, 1, 4), X = groups * rnd_int(&p->seed, 2, 3), F = rnd_int(&p->seed, 3, 20);
    const int top_groups = rnd_int(&p->seed, 1, groups);
    *moe = (toka_moe){.n_experts = X, .kind = (toka_router_kind)rnd_int(&p->seed, 0, 2), .renormalize = pl_chance(p, 2),
                      .scale = pl_chance(p, 2) ? 0 : 1.7f, .n_groups = pl_chance(p, 2) ? 0 : groups, .top_groups = top_groups,
                      .groups_by_top2 = pl_chance(p, 2), .experts = p->experts[l]};
    moe->top_k = rnd_int(&p->seed, 1, moe->n_groups > 1 ? top_groups * (X / groups) : X);
    moe->router = pl_plain(p, X, E, 0, 2 / sqrt(E));
    if (pl_chance(p, 3)) moe->router_bias = pl_plain(p, 1, X, 0, 1);
    if (pl_chance(p, 2)) moe->choice_bias = pl_plain(p, 1, X, 0, 0.5);
    if (!moe->router_bias.rows && !moe->choice_bias.rows) /* equal rows: each token has ties */
        moe->router.stride = pl_chance(p, 2) ? moe->router.stride : 0;
    for (int i = 0; i < X; i++) pl_make_mlp(p, &p->experts[l][i], F);
    if (pl_chance(p, 2)) pl_make_mlp(p, &moe->shared, rnd_int(&p->seed, 3, 30));
    if (moe->shared.gate.rows && pl_chance(p, 2)) moe->shared_gate = pl_plain(p, 1, E, 0, 2 / sqrt(E));
}

static void pl_make_mla(pl_case *p, int l, int rope, int latent) {
    const toka_shape *s = &p->c.sh;
    toka_mla *mla = &p->mla[l];
    const int low = rnd_int(&p->seed, 3, 20), size = rope + rnd_int(&p->seed, 1, 9);
    *mla = (toka_mla){.latent = latent, .rope = rope, .nope = size - rope, .v = rnd_int(&p->seed, 1, 11), .eps = 0.1f};
    if (pl_chance(p, 2)) mla->q_a = pl_any(p, low, s->E, 1 / sqrt(s->E)), mla->q_a_norm = pl_plain(p, 1, low, 1, 0.3);
    const int in = mla->q_a.rows ? low : s->E;
    mla->q_b = pl_any(p, s->H * size, in, 2 / sqrt(in));
    mla->kv_a = pl_any(p, latent + rope, s->E, 2 / sqrt(s->E)), mla->kv_a_norm = pl_plain(p, 1, latent, 1, 0.3);
    mla->kv_b = pl_any(p, s->H * (mla->nope + mla->v), latent, 2 / sqrt(latent));
    p->c.layers[l].o = pl_any(p, s->E, s->H * mla->v, 1 / sqrt(s->H * mla->v));
}

static void pl_make_linear(pl_case *p, int l) {
    const toka_linear_shape *s = &p->c.sh.linear;
    toka_linear *y = &p->linear[l];
    const int E = p->c.sh.E, keys = s->key_heads * s->key_size, values = s->value_heads * s->value_size;
    if (pl_chance(p, 2)) {
        y->qkvz = pl_any(p, 2 * (keys + values), E, 1 / sqrt(E)), y->ba = pl_any(p, 2 * s->value_heads, E, 1 / sqrt(E));
    } else {
        y->q = pl_any(p, keys, E, 1 / sqrt(E)), y->k = pl_any(p, keys, E, 1 / sqrt(E)), y->v = pl_any(p, values, E, 1 / sqrt(E));
        y->z = pl_any(p, values, E, 1 / sqrt(E)), y->b = pl_any(p, s->value_heads, E, 1 / sqrt(E)), y->a = pl_any(p, s->value_heads, E, 1 / sqrt(E));
    }
    y->conv_q = pl_plain(p, keys, s->taps, 0, 0.6), y->conv_k = pl_plain(p, keys, s->taps, 0, 0.6), y->conv_v = pl_plain(p, values, s->taps, 0, 0.6);
    y->a_log = pl_plain(p, 1, s->value_heads, -1.5, 1), y->dt_bias = pl_plain(p, 1, s->value_heads, 0, 1);
    y->norm = pl_plain(p, 1, s->value_size, 1, 0.3), y->o = pl_any(p, E, values, 1 / sqrt(values));
    p->c.layers[l].linear = y, p->c.sh.linear.n_layers++;
}

static void pl_make_heads(pl_case *p, toka_layer *y) {
    const toka_shape *s = &p->c.sh;
    y->q_gate = !s->Dv && pl_chance(p, 3);
    const int E = s->E, HD = s->H * s->D * (y->q_gate ? 2 : 1), KD = s->K * s->D, Dv = toka_value_size(s);
    const int norms = rnd_int(&p->seed, 0, y->q_gate ? 1 : 2);
    y->q = pl_any(p, HD, E, 2 / sqrt(E)), y->k = pl_any(p, KD, E, 2 / sqrt(E)), y->v = pl_any(p, s->K * Dv, E, 1 / sqrt(E));
    y->o = pl_any(p, E, s->H * Dv, 1 / sqrt(s->H * Dv));
    if (pl_chance(p, 2)) y->q_bias = pl_plain(p, 1, HD, 0, 1), y->k_bias = pl_plain(p, 1, KD, 0, 1);
    if (pl_chance(p, 2)) y->v_bias = pl_plain(p, 1, s->K * Dv, 0, 1), y->o_bias = pl_plain(p, 1, E, 0, 1);
    if (norms == 1) y->q_norm = pl_plain(p, 1, s->D, 1, 0.3), y->k_norm = pl_plain(p, 1, s->D, 1, 0.3);
    if (norms == 2) y->q_norm = pl_plain(p, 1, HD, 1, 0.3), y->k_norm = pl_plain(p, 1, KD, 1, 0.3);
}

static void pl_make_layer(pl_case *p, int l, int mla_rope) {
    const toka_shape *s = &p->c.sh;
    toka_layer *y = &p->c.layers[l];
    *y = (toka_layer){.window = pl_chance(p, 2) ? 0 : rnd_int(&p->seed, 1, 12), .parallel = pl_chance(p, 4),
                      .activation = (toka_activation)rnd_int(&p->seed, TOKA_SILU, TOKA_SWIGLU_CLAMPED)};
    if (p->kv_fp8) y->kv_fp8 = !l || pl_chance(p, 2);
    if (!pl_chance(p, 5)) y->attn_norm = pl_plain(p, 1, s->E, 1, 0.3);
    if (!pl_chance(p, 5)) y->mlp_norm = pl_plain(p, 1, s->E, 1, 0.3);
    if (y->parallel) y->mlp_norm = y->attn_norm;
    if (mla_rope) pl_make_mla(p, l, mla_rope, s->Dv), y->mla = &p->mla[l];
    else if (s->linear.taps && !pl_chance(p, 3)) pl_make_linear(p, l);
    else pl_make_heads(p, y);
    if (!y->linear && pl_chance(p, 3)) y->sinks = pl_plain(p, 1, s->H, 0, 2);
    if (pl_chance(p, 3)) y->attn_post_norm = pl_plain(p, 1, s->E, 1, 0.3);
    if (pl_chance(p, 3)) y->mlp_post_norm = pl_plain(p, 1, s->E, 1, 0.3);
    p->rope[l] = (toka_rope){.freq = p->freq, .dims = mla_rope ? mla_rope : s->D - (pl_chance(p, 2) && s->D > 3 ? 2 : 0),
                             .scale = pl_chance(p, 2) ? 1 : 1.25f, .neighbours = pl_chance(p, 2)};
    p->rope[l].dims -= p->rope[l].dims % 2;
    if (!y->linear && !pl_chance(p, 5)) y->rope = &p->rope[l];
    if (pl_chance(p, 2)) {
        pl_make_moe(p, l), y->moe = &p->moe[l];
        /* without a norm x may be so large that all scores are 0 in float32 */
        if (!y->mlp_norm.rows) p->moe[l].renormalize = false;
    } else pl_make_mlp(p, &y->mlp, rnd_int(&p->seed, 3, 50));
}

static float pl_maybe(pl_case *p, float value) { return pl_chance(p, 2) ? 0 : value; }

static pl_case *pl_open(uint64_t seed, bool for_cpu, bool kv_fp8) {
    pl_case *p = mem_zalloc(sizeof *p);
    p->seed = seed * 7919, p->for_cpu = for_cpu, p->kv_fp8 = kv_fp8;
    for (int i = 0; i < 3; i++) rnd(&p->seed);
    toka_shape *s = &p->c.sh;
    const int mla_rope = pl_chance(p, 4) ? 2 * rnd_int(&p->seed, 1, 4) : 0;
    *s = (toka_shape){.L = 2, .K = mla_rope ? 1 : rnd_int(&p->seed, 1, 3), .E = rnd_int(&p->seed, 8, 60), .V = rnd_int(&p->seed, 3, 90),
                      .B = rnd_int(&p->seed, 1, 20), .max_len = CPU_LEN, .eps = 1e-5f, .layer_norm = pl_chance(p, 3),
                      .norm_offset = pl_maybe(p, 1), .attn_scale = pl_maybe(p, 0.3f), .attn_cap = pl_maybe(p, 3),
                      .embed_scale = pl_maybe(p, 1.5f), .residual_scale = pl_maybe(p, 0.6f), .qkv_limit = pl_maybe(p, 0.8f), .swiglu_limit = 1.5f,
                      .logit_scale = pl_maybe(p, 0.7f), .logit_cap = pl_maybe(p, 2)};
    s->H = s->K * rnd_int(&p->seed, 1, 4), s->V_all = s->V;
    s->D = rnd_int(&p->seed, 2, 24), s->Dv = pl_chance(p, 2) ? 0 : rnd_int(&p->seed, 1, 24);
    if (p->for_cpu) s->D += s->D % 2;
    if (mla_rope) s->Dv = rnd_int(&p->seed, 1, 10) * 2, s->D = s->Dv + mla_rope;
    for (int i = 0; i < COUNT(p->freq); i++) p->freq[i] = (float)pow(50, -i / 5.0);
    if (!mla_rope && pl_chance(p, 2)) {
        const int key_heads = rnd_int(&p->seed, 1, 3);
        s->linear = (toka_linear_shape){.key_heads = key_heads, .value_heads = key_heads * rnd_int(&p->seed, 1, 3), .taps = rnd_int(&p->seed, 2, 5),
                                        .key_size = rnd_int(&p->seed, 1, pl_chance(p, 4) ? 70 : 20), .value_size = rnd_int(&p->seed, 1, 20)};
    }
    for (int l = 0; l < 2; l++) pl_make_layer(p, l, mla_rope);
    p->c.w = (toka_weights){.embed = pl_any(p, s->V, s->E, 1), .norm = pl_plain(p, 1, s->E, 1, 0.3),
                            .lm_head = pl_any(p, s->V, s->E, 1 / sqrt(s->E)), .layers = p->c.layers};
    return p;
}

/* ---- The formulas of toka.h in float64 ---- */

static double pl_or(float value, double absent) { return value != 0 ? value : absent; }

static void pl_norm_eps(const toka_shape *s, double eps, const toka_tensor *w, const double *x, int n, double *y) {
    double mean = 0, square = 0;
    for (int i = 0; i < n; i++) mean += s->layer_norm ? x[i] / n : 0;
    for (int i = 0; i < n; i++) square += pow(x[i] - mean, 2) / n;
    for (int i = 0; i < n; i++)
        y[i] = w->rows ? (x[i] - mean) / sqrt(square + eps) * (pl_at(w, 0, i) + s->norm_offset) : x[i];
}
static void pl_norm(const toka_shape *s, const toka_tensor *w, const double *x, int n, double *y) { pl_norm_eps(s, s->eps, w, x, n, y); }
static void pl_linear(const toka_tensor *w, const toka_tensor *bias, const double *x, double *y) {
    for (int r = 0; r < w->rows; r++) {
        y[r] = bias && bias->rows ? pl_at(bias, 0, r) : 0;
        for (int c = 0; c < w->cols; c++) y[r] += pl_at(w, r, c) * x[c];
    }
}
static void pl_clip(double *x, int n, double limit) {
    for (int i = 0; limit && i < n; i++) x[i] = MAX(-limit, MIN(x[i], limit));
}
static void pl_rotate(const toka_rope *rope, int pos, double *head) {
    for (int i = 0; rope && i < rope->dims / 2; i++) {
        int a = rope->neighbours ? 2 * i : i, b = rope->neighbours ? 2 * i + 1 : i + rope->dims / 2;
        double angle = (float)pos * rope->freq[i], x = head[a], y = head[b];
        head[a] = (x * cos(angle) - y * sin(angle)) * rope->scale;
        head[b] = (y * cos(angle) + x * sin(angle)) * rope->scale;
    }
}

typedef struct pl_head { /* one query head of one layer, over a whole sequence */
    const double *q, *k, *v; /* of position j from j * step on */
    int q_step, k_step, v_step, size, v_size;
    double scale;
    int head;
} pl_head;

static void pl_attend(const toka_shape *s, const toka_layer *l, const pl_head *h, int pos, double *o) {
    double score[CPU_LEN], sink = l->sinks.rows ? pl_at(&l->sinks, 0, h->head) : -INFINITY, max = sink;
    for (int i = 0; i < h->v_size; i++) o[i] = 0;
    for (int j = 0; j <= pos; j++) {
        score[j] = 0;
        for (int i = 0; i < h->size; i++) score[j] += h->scale * h->q[pos * h->q_step + i] * h->k[j * h->k_step + i];
        if (s->attn_cap > 0) score[j] = s->attn_cap * tanh(score[j] / s->attn_cap);
        if (l->window && j <= pos - l->window) score[j] = -INFINITY;
        max = score[j] > max ? score[j] : max;
    }
    double sum = exp(sink - max);
    for (int j = 0; j <= pos; j++) sum += score[j] = exp(score[j] - max);
    for (int j = 0; j <= pos; j++)
        for (int i = 0; i < h->v_size; i++) o[i] += score[j] / sum * h->v[j * h->v_step + i];
}

static double pl_sigmoid(double x) { return 1 / (1 + exp(-x)); }

/* Row i of a linear mixer's matrix for part 0 to 5: q, k, v, z, b, a. */
static double pl_linear_row(const pl_case *p, const toka_linear *l, int part, int i, const double *x) {
    const toka_linear_shape *s = &p->c.sh.linear;
    const toka_tensor *own[] = {&l->q, &l->k, &l->v, &l->z, &l->b, &l->a}, *w = own[part];
    const int per_key = s->value_heads / s->key_heads, values = per_key * s->value_size;
    const int size[] = {s->key_size, s->key_size, values, values, per_key, per_key};
    if (l->qkvz.rows) {
        const int head = i / size[part], first = part < 4 ? 0 : 4, end = part < 4 ? 4 : 6;
        int row = i % size[part];
        for (int j = first; j < part; j++) row += size[j];
        for (int j = first; j < end; j++) row += head * size[j];
        w = part < 4 ? &l->qkvz : &l->ba, i = row;
    }
    double sum = 0;
    for (int c = 0; c < w->cols; c++) sum += pl_at(w, i, c) * x[c];
    return sum;
}

/* Element i of q, k or v of token t: convolution and SiLU. x: [t + 1][E]. */
static double pl_conv(const pl_case *p, const toka_linear *l, int part, int i, const double *x, int t) {
    const toka_tensor *weights[] = {&l->conv_q, &l->conv_k, &l->conv_v};
    double sum = 0;
    for (int tap = 0; tap < p->c.sh.linear.taps; tap++) {
        int from = t - (p->c.sh.linear.taps - 1) + tap;
        if (from >= 0) sum += pl_at(weights[part], i, tap) * pl_linear_row(p, l, part, i, x + from * p->c.sh.E);
    }
    return sum * pl_sigmoid(sum);
}

/* A linear mixer, head by head, token by token. */
static double *pl_linear_mixer(const pl_case *p, const toka_linear *l, const double *x, int n) {
    const toka_linear_shape *s = &p->c.sh.linear;
    const int J = s->key_size, U = s->value_size, M = s->value_heads;
    double *o = mem_zalloc((size_t)(n * M * U) * 8), S[70 * 20], q[70], k[70], v[20];
    for (int h = 0; h < M; h++) {
        const int key = h * s->key_heads / M;
        memset(S, 0, sizeof S);
        for (int t = 0; t < n; t++) {
            const double *xt = x + t * p->c.sh.E, beta = pl_sigmoid(pl_linear_row(p, l, 4, h, xt));
            const double decay = exp(-exp(pl_at(&l->a_log, 0, h)) * log1p(exp(pl_linear_row(p, l, 5, h, xt) + pl_at(&l->dt_bias, 0, h))));
            double q2 = 1e-6, k2 = 1e-6, o2 = 0, *ot = o + (t * M + h) * U;
            for (int i = 0; i < J; i++) q[i] = pl_conv(p, l, 0, key * J + i, x, t), k[i] = pl_conv(p, l, 1, key * J + i, x, t);
            for (int i = 0; i < J; i++) q2 += q[i] * q[i], k2 += k[i] * k[i];
            for (int j = 0; j < U; j++) {
                v[j] = pl_conv(p, l, 2, h * U + j, x, t);
                for (int i = 0; i < J; i++) S[i * U + j] *= decay, v[j] -= S[i * U + j] * k[i] / sqrt(k2);
                for (int i = 0; i < J; i++) S[i * U + j] += beta * v[j] * k[i] / sqrt(k2), ot[j] += S[i * U + j] * q[i] / sqrt(q2 * J);
                o2 += ot[j] * ot[j] / U;
            }
            for (int j = 0; j < U; j++) {
                double z = pl_linear_row(p, l, 3, h * U + j, xt);
                ot[j] *= pl_at(&l->norm, 0, j) / sqrt(o2 + p->c.sh.eps) * z * pl_sigmoid(z);
            }
        }
    }
    return o;
}

/* Rounds a head as FP8 K and V are stored. */
static void pl_round_head(double *x, int n) {
    double largest = 0;
    for (int i = 0; i < n; i++) largest = fmax(largest, fabs(x[i]));
    if (largest == 0) return;
    const double scale = exp2(ceil(log2(largest / 448)));
    for (int i = 0; i < n; i++) {
        const int last = fabs(x[i] / scale) < 0x1p-6 ? -9 : ilogb(x[i] / scale) - 3;
        x[i] = ldexp(rint(ldexp(x[i] / scale, -last)), last) * scale;
    }
}

/* x: [n][E] of norm(x). Returns o before W_o: [n][H*Dv], or with mla [n][H*v]; the caller frees it.
 * With mla the keys and values of each head are made from c, as in the paper. */
static double *pl_mixer(const pl_case *p, const toka_layer *l, const double *x, int n) {
    const toka_shape *s = &p->c.sh;
    const toka_mla *m = l->mla;
    if (l->linear) return pl_linear_mixer(p, l->linear, x, n);
    const int H = s->H, K = m ? H : s->K, D = m ? m->nope + m->rope : s->D, Dv = m ? m->v : toka_value_size(s);
    const int step = l->q_gate ? 2 * D : D; /* of a head in q */
    double *q = mem_zalloc((size_t)(n * H * step) * 8), *k = mem_zalloc((size_t)(n * K * D) * 8), *v = mem_zalloc((size_t)(n * K * Dv) * 8);
    double *o = mem_zalloc((size_t)(n * H * Dv) * 8), tmp[600], kv[600], latent[600], kv2[600];
    for (int t = 0; t < n; t++) {
        double *qt = q + t * H * step, *kt = k + t * K * D, *vt = v + t * K * Dv;
        const double *xt = x + t * s->E;
        if (m) {
            if (m->q_a.rows) pl_linear(&m->q_a, NULL, xt, tmp), pl_norm_eps(s, m->eps, &m->q_a_norm, tmp, m->q_a.rows, tmp);
            pl_linear(&m->q_b, NULL, m->q_a.rows ? tmp : xt, qt);
            pl_linear(&m->kv_a, NULL, xt, tmp);
            pl_norm_eps(s, m->eps, &m->kv_a_norm, tmp, m->latent, tmp);
            pl_rotate(l->rope, t, tmp + m->latent);
            memcpy(latent, tmp, sizeof latent);
            if (l->kv_fp8) pl_round_head(tmp, m->latent + m->rope), pl_round_head(latent, m->latent);
            pl_linear(&m->kv_b, NULL, tmp, kv), pl_linear(&m->kv_b, NULL, latent, kv2);
            for (int h = 0; h < H; h++) {
                pl_rotate(l->rope, t, qt + h * D + m->nope);
                memcpy(kt + h * D, kv + h * (m->nope + m->v), (size_t)m->nope * 8);
                memcpy(kt + h * D + m->nope, tmp + m->latent, (size_t)m->rope * 8);
                memcpy(vt + h * Dv, kv2 + h * (m->nope + m->v) + m->nope, (size_t)m->v * 8);
            }
            continue;
        }
        pl_linear(&l->q, &l->q_bias, xt, qt), pl_linear(&l->k, &l->k_bias, xt, kt), pl_linear(&l->v, &l->v_bias, xt, vt);
        for (int i = 0; l->q_norm.rows && i < H * step; i += l->q_gate ? step : l->q_norm.cols) pl_norm(s, &l->q_norm, qt + i, l->q_norm.cols, qt + i);
        for (int i = 0; l->k_norm.rows && i < K * D; i += l->k_norm.cols) pl_norm(s, &l->k_norm, kt + i, l->k_norm.cols, kt + i);
        pl_clip(qt, H * step, s->qkv_limit), pl_clip(kt, K * D, s->qkv_limit), pl_clip(vt, K * Dv, s->qkv_limit);
        for (int h = 0; h < H; h++) pl_rotate(l->rope, t, qt + h * step);
        for (int h = 0; h < K; h++) pl_rotate(l->rope, t, kt + h * D);
        for (int h = 0; h < K && l->kv_fp8; h++) pl_round_head(kt + h * D, D), pl_round_head(vt + h * Dv, Dv);
    }
    for (int h = 0; h < H; h++) {
        pl_head head = {q + h * step, k + h * K / H * D, v + h * K / H * Dv, H * step, K * D, K * Dv, D, Dv,
                        pl_or(s->attn_scale, 1 / sqrt(s->D)), h};
        for (int t = 0; t < n; t++) {
            pl_attend(s, l, &head, t, o + (t * H + h) * Dv);
            for (int i = 0; l->q_gate && i < D; i++) o[(t * H + h) * Dv + i] *= pl_sigmoid(q[(t * H + h) * step + D + i]);
        }
    }
    free(q), free(k), free(v);
    return o;
}

static void pl_mlp(const pl_case *p, const toka_mlp *mlp, toka_activation kind, const double *x, double *y) {
    double gate[64], up[64], limit = p->c.sh.swiglu_limit;
    pl_linear(&mlp->gate, &mlp->gate_bias, x, gate), pl_linear(&mlp->up, &mlp->up_bias, x, up);
    for (int i = 0; i < mlp->gate.rows; i++) {
        double g = gate[i], u = up[i];
        if (kind == TOKA_SILU) gate[i] = g * pl_sigmoid(g) * u;
        if (kind == TOKA_GELU_TANH) gate[i] = g / 2 * (1 + tanh(sqrt(2 / 3.14159265358979324) * (g + 0.044715 * pow(g, 3)))) * u;
        if (kind == TOKA_SWIGLU_CLAMPED)
            g = g > limit ? limit : g, u = u > limit ? limit : u < -limit ? -limit : u, gate[i] = g * pl_sigmoid(1.702 * g) * (u + 1);
    }
    pl_linear(&mlp->down, &mlp->down_bias, gate, y);
}

/* Sorts indices 0 .. n-1 by falling score; of equal scores the lower index is first. */
static void pl_sort(const float *score, int n, int *order) {
    for (int i = 0; i < n; i++) {
        int j = i;
        for (; j && score[order[j - 1]] < score[i]; j--) order[j] = order[j - 1];
        order[j] = i;
    }
}

/* From logits of the router to weights, 0 for an expert that is not chosen. */
static void pl_route(const toka_moe *moe, const double *logit, double *weight) {
    const int X = moe->n_experts, size = moe->n_groups > 1 ? X / moe->n_groups : X;
    double score[PL_EXPERTS], sum = 0, max = logit[0];
    float choice[PL_EXPERTS], group[PL_EXPERTS]; /* scores are float32 numbers, so that all agree what is equal */
    int order[PL_EXPERTS];
    bool masked[PL_EXPERTS] = {0};
    for (int i = 0; i < X; i++) max = logit[i] > max ? logit[i] : max;
    for (int i = 0; i < X; i++) sum += exp(logit[i] - max);
    for (int i = 0; i < X; i++) {
        score[i] = moe->kind == TOKA_ROUTER_SOFTMAX ? exp(logit[i] - max) / sum : moe->kind == TOKA_ROUTER_SIGMOID ? pl_sigmoid(logit[i]) : logit[i];
        choice[i] = (float)score[i] + (moe->choice_bias.rows ? (float)pl_at(&moe->choice_bias, 0, i) : 0);
        weight[i] = 0;
    }
    for (int g = 0; moe->n_groups > 1 && g < moe->n_groups; g++) {
        pl_sort(choice + g * size, size, order);
        group[g] = choice[g * size + order[0]] + (moe->groups_by_top2 ? choice[g * size + order[1]] : 0);
    }
    if (moe->n_groups > 1) {
        pl_sort(group, moe->n_groups, order);
        for (int i = moe->top_groups; i < moe->n_groups; i++)
            for (int j = 0; j < size; j++) masked[order[i] * size + j] = true;
    }
    pl_sort(choice, X, order);
    sum = 0;
    for (int i = 0, n = 0; i < X && n < moe->top_k; i++)
        if (!masked[order[i]]) {
            n++;
            sum += weight[order[i]] = moe->kind == TOKA_ROUTER_TOPK ? exp(logit[order[i]] - max) : score[order[i]];
        }
    for (int i = 0; i < X; i++) weight[i] *= pl_or(moe->scale, 1) / (moe->renormalize || moe->kind == TOKA_ROUTER_TOPK ? sum : 1);
}

static void pl_feed_forward(const pl_case *p, const toka_layer *l, const double *x, double *y) {
    const toka_moe *moe = l->moe;
    const int E = p->c.sh.E;
    double logit[PL_EXPERTS], weight[PL_EXPERTS], out[64], gate = 0;
    if (!moe) {
        pl_mlp(p, &l->mlp, l->activation, x, y);
        return;
    }
    pl_linear(&moe->router, &moe->router_bias, x, logit);
    pl_route(moe, logit, weight);
    for (int i = 0; i < E; i++) y[i] = 0;
    for (int e = 0; e < moe->n_experts; e++) {
        pl_mlp(p, &moe->experts[e], l->activation, x, out);
        for (int i = 0; i < E; i++) y[i] += weight[e] * out[i];
    }
    if (!moe->shared.gate.rows) return;
    pl_mlp(p, &moe->shared, l->activation, x, out);
    if (moe->shared_gate.rows) pl_linear(&moe->shared_gate, NULL, x, &gate);
    for (int i = 0; i < E; i++) y[i] += (moe->shared_gate.rows ? pl_sigmoid(gate) : 1) * out[i];
}

/* Logits of all n positions of a sequence: [n][V]. */
static void pl_logits(const pl_case *p, const int32_t *tokens, int n, double *logits) {
    const toka_shape *s = &p->c.sh;
    const int E = s->E;
    double *x = mem_zalloc((size_t)(n * E) * 8), *in = mem_zalloc((size_t)(n * E) * 8), y[64], z[64];
    for (int i = 0; i < n * E; i++) x[i] = pl_at(&p->c.w.embed, tokens[i / E], i % E) * pl_or(s->embed_scale, 1);
    for (int layer = 0; layer < s->L; layer++) {
        const toka_layer *l = &p->c.layers[layer];
        for (int t = 0; t < n; t++) pl_norm(s, &l->attn_norm, x + t * E, E, in + t * E);
        double *o = pl_mixer(p, l, in, n);
        for (int t = 0; t < n; t++) {
            const toka_tensor *w_o = l->linear ? &l->linear->o : &l->o;
            pl_linear(w_o, &l->o_bias, o + t * w_o->cols, y);
            pl_norm(s, &l->attn_post_norm, y, E, y);
            for (int i = 0; i < E; i++) z[i] = x[t * E + i] + pl_or(s->residual_scale, 1) * y[i];
            pl_norm(s, &l->mlp_norm, l->parallel ? x + t * E : z, E, in);
            pl_feed_forward(p, l, in, y);
            pl_norm(s, &l->mlp_post_norm, y, E, y);
            for (int i = 0; i < E; i++) x[t * E + i] = z[i] + pl_or(s->residual_scale, 1) * y[i];
        }
        free(o);
    }
    for (int t = 0; t < n; t++) {
        double *row = logits + t * s->V;
        pl_norm(s, &p->c.w.norm, x + t * E, E, in);
        pl_linear(&p->c.w.lm_head, NULL, in, row);
        for (int i = 0; i < s->V; i++) {
            row[i] *= pl_or(s->logit_scale, 1);
            if (s->logit_cap > 0) row[i] = s->logit_cap * tanh(row[i] / s->logit_cap);
        }
    }
    free(x), free(in);
}

/* ---- Whole models ---- */

/* Opens the device, with K and V full of NaN, and gives the sequences random pages. */
static void pl_open_device(const toka_backend *backend, pl_case *p, cpu_seqs *w, model_rank *rank) {
    const toka_shape *s = &p->c.sh;
    toka_err e;
    int deck[CPU_PAGES], at = 0;
    w->o = (toka_device_options){.max_tokens = CPU_SEQS * CPU_LEN, .max_samples = CPU_SEQS * CPU_LEN, .n_pages = CPU_PAGES,
                                 .n_threads = rnd_int(&w->seed, 1, 3), .n_states = CPU_SEQS + 1};
    if (backend->open(&w->d, &w->o, s, &p->c.w, &e)) {
        CHECK_MSG(0, "%s", e.msg);
        abort();
    }
    if (backend == &toka_plain) {
        plain_device *dev = plain_of(w->d);
        for (int i = 0; i < s->L; i++) {
            plain_layer *kept = &dev->layers[i];
            const size_t n = kept->states ? 0 : (size_t)(CPU_PAGES * s->B * s->K);
            const size_t n_states = kept->states ? (size_t)w->o.n_states * (size_t)toka_state_elements(&s->linear, 0) : 0;
            for (size_t j = 0; j < n_states; j++) kept->states[j] = NAN;
            for (size_t j = 0; j < n * (size_t)(s->D + toka_value_size(s)); j++) kept->kv[j] = NAN;
        }
    } else {
        w->d->pool.serial_cost = 0, w->d->kernels = &cpu_kernel_sets[rnd_int(&w->seed, 0, cpu_n_kernel_sets() - 1)];
        w->d->scratch_rows = MIN(w->d->scratch_rows, rnd_int(&w->seed, 1, 20));
        w->d->scratch_samples = MIN(w->d->scratch_samples, rnd_int(&w->seed, 1, 20));
        memset(w->d->kv_cache, 0xFF, w->d->layer_at[s->L]);
        for (size_t i = 0; i < (size_t)(s->linear.n_layers * w->o.n_states) * w->d->state_floats; i++) w->d->states[i] = NAN;
    }
    for (int i = 0; i < CPU_PAGES; i++) {
        int j = rnd_int(&w->seed, 0, i);
        deck[i] = deck[j], deck[j] = i;
    }
    for (int q = 0; q < w->n_seq; q++)
        for (int i = 0; i * s->B < w->len[q]; i++) w->table[q][i] = q && i * s->B < w->shared ? w->table[0][i] : deck[at++];
    rank->shape = *s, rank->weights = p->c.w, rank->device = w->d;
}

/* The state spans of a step: sequence q has state q. Sequence 0 copies its state at the end of the shared prefix to state n_seq, from which
 * the others begin. Spans are cut at random. */
static void pl_make_states(cpu_seqs *w, const int *from, const int *to, toka_state_span *spans) {
    int n = 0, row = 0;
    for (int q = 0; q < w->n_seq; q++)
        for (int pos = from[q], end; pos < to[q]; row += end - pos, pos = end) {
            end = rnd_int(&w->seed, 0, 2) ? to[q] : rnd_int(&w->seed, pos + 1, to[q]);
            if (!q && pos < w->shared) end = MIN(end, w->shared);
            const int begin = q && pos == w->shared ? w->n_seq : q;
            spans[n++] = (toka_state_span){row, end - pos, pos ? begin : -1, q};
            if (!q && end == w->shared) spans[n++] = (toka_state_span){0, 0, 0, w->n_seq};
        }
    w->step.n_states = n, w->step.states = spans;
}

/* Runs one step of the layer loop. Its logits go to [seq][pos][V]. */
static void pl_run_step(cpu_seqs *w, model_rank *rank, float *logits) {
    const toka_shape *s = &rank->shape;
    const size_t T = (size_t)w->T, E = (size_t)s->E, V = (size_t)s->V;
    size_t HD = 0, HDv = 0;
    for (int i = 0; i < s->L; i++) {
        HD = MAX(HD, (size_t)toka_q_width(s, &rank->weights.layers[i])), HDv = MAX(HDv, (size_t)toka_o_width(s, &rank->weights.layers[i]));
    }
    toka_sample_row *rows = mem_zalloc(T * sizeof *rows);
    toka_sample_result *results = mem_zalloc(T * sizeof *results);
    float *out = mem_alloc(T * V * sizeof *out);
    rank->x = guarded(w->d, T * E), rank->q = guarded(w->d, T * HD), rank->o = guarded(w->d, T * HDv);
    for (int t = 0; t < w->T; t++) rows[t] = (toka_sample_row){.row = w->T - 1 - t, .seq = -1, .scored_id = 0};
    w->step.n_samples = w->T, w->step.samples = rows, w->step.logits = out;
    rank_step(rank, &w->step, results);
    for (int t = 0; t < w->T; t++) {
        int row = w->T - 1 - t;
        memcpy(logits + (size_t)(w->seq[row] * CPU_LEN + w->pos[row]) * V, out + (size_t)t * V, V * sizeof *out);
    }
    guarded_free(rank->x, T * E), guarded_free(rank->q, T * HD), guarded_free(rank->o, T * HDv);
    free(rows), free(results), free(out);
}

static void pl_run_seqs(cpu_seqs *w, model_rank *rank, float *logits) {
    int from[CPU_SEQS] = {0}, to[CPU_SEQS], left = 1;
    for (int q = 1; q < w->n_seq; q++) from[q] = w->shared;
    while (left) {
        left = 0;
        for (int q = 0; q < w->n_seq; q++) {
            int n = q && from[0] < w->shared ? 0 : rnd_int(&w->seed, 0, 9); /* sequence 0 stores the shared prefix first */
            to[q] = MIN(w->len[q], from[q] + n);
            left += w->len[q] - to[q];
        }
        seqs_make_step(w, from, to, rnd_int(&w->seed, 0, 1), rnd_int(&w->seed, 0, 1));
        toka_state_span states[CPU_SEQS * CPU_LEN];
        pl_make_states(w, from, to, states);
        if (w->T) pl_run_step(w, rank, logits);
        memcpy(from, to, sizeof from);
    }
}

static void pl_check_model(const toka_backend *backend, uint64_t seed, bool kv_fp8) {
    pl_case *p = pl_open(seed, backend == &toka_cpu, kv_fp8);
    cpu_seqs *w = mem_zalloc(sizeof *w);
    model_grid model = {.backend = backend, .tp = 1, .pp = 1};
    model_rank rank = {.model = &model};
    const toka_shape *s = &p->c.sh;
    w->c = &p->c, w->seed = p->seed, w->n_seq = rnd_int(&w->seed, 1, 4), w->shared = rnd_int(&w->seed, 0, 20 / s->B) * s->B;
    for (int q = 0; q < w->n_seq; q++) {
        w->len[q] = w->shared + rnd_int(&w->seed, 1, 20);
        for (int i = 0; i < w->len[q]; i++) w->token[q][i] = q && i < w->shared ? w->token[0][i] : rnd_int(&w->seed, 0, s->V - 1);
    }
    pl_open_device(backend, p, w, &rank);
    size_t V = (size_t)s->V;
    float *got = mem_zalloc(CPU_SEQS * CPU_LEN * V * sizeof *got);
    double *want = mem_zalloc(CPU_LEN * V * sizeof *want);
    pl_run_seqs(w, &rank, got);
    for (int q = 0; q < w->n_seq; q++) {
        int first = q ? w->shared : 0;
        pl_logits(p, w->token[q], w->len[q], want);
        double err = rel_error(got + (size_t)(q * CPU_LEN + first) * V, want + (size_t)first * V, (size_t)(w->len[q] - first) * V);
        CHECK_MSG(err < (kv_fp8 ? 5e-3 : backend == &toka_plain ? 5e-5 : 1e-3), "%s, seed %llu, seq %d: relative L2 %.3g, H %d K %d D %d Dv %d E %d, mla %d, linear %d %d, moe %d %d, kind %d, parallel %d %d",
                  backend->name, (unsigned long long)seed, q, err, s->H, s->K, s->D, s->Dv, s->E, p->c.layers[0].mla != NULL, p->c.layers[0].linear != NULL, p->c.layers[1].linear != NULL, p->c.layers[0].moe != NULL,
                  p->c.layers[1].moe != NULL, (int)p->moe[0].kind, p->c.layers[0].parallel, p->c.layers[1].parallel);
    }
    toka_err e;
    CHECK(backend->status(w->d, &e) == 0);
    backend->close(w->d);
    free(got), free(want), free(w);
    pl_close(p);
}

static void test_plain_models(void) {
    for (uint64_t seed = 1; seed <= 120; seed++) pl_check_model(&toka_plain, seed, false);
    uint64_t fresh = (uint64_t)time(NULL);
    for (int i = 0; i < 10; i++) pl_check_model(&toka_plain, fresh * 64 + (uint64_t)i, false);
}

/* The CPU backend, with every instruction set of this machine. */
static void test_plain_models_cpu(void) {
    uint64_t fresh = (uint64_t)time(NULL);
    for (uint64_t seed = 1; seed <= 150; seed++) pl_check_model(&toka_cpu, seed, false);
    for (int i = 0; i < 20; i++) pl_check_model(&toka_cpu, fresh * 64 + (uint64_t)i, false);
}
/* The same with FP8 K and V. A number between two FP8 numbers may be rounded to another one than in float64. */
static void test_plain_models_fp8(void) {
    for (uint64_t seed = 1; seed <= 120; seed++) pl_check_model(seed % 2 ? &toka_plain : &toka_cpu, seed, true);
}

/* ---- The router, with many ties ---- */

static void test_plain_router(void) {
    uint64_t seed = (uint64_t)time(NULL);
    for (int round = 0; round < 20000; round++) {
        const uint64_t first = seed;
        pl_case *p = mem_zalloc(sizeof *p);
        p->seed = rnd(&seed);
        const int groups = rnd_int(&p->seed, 1, 4), X = groups * rnd_int(&p->seed, 2, 3), top_groups = rnd_int(&p->seed, 1, groups);
        toka_moe moe = {.n_experts = X, .kind = (toka_router_kind)rnd_int(&p->seed, 0, 2), .renormalize = pl_chance(p, 2),
                        .scale = pl_maybe(p, 2.5f), .n_groups = pl_maybe(p, 1) != 0 ? groups : 0, .top_groups = top_groups,
                        .groups_by_top2 = pl_chance(p, 2)};
        double logit[PL_EXPERTS], want[PL_EXPERTS];
        float weight[PL_EXPERTS], choice[2 * PL_EXPERTS], bias[PL_EXPERTS] = {0};
        moe.top_k = rnd_int(&p->seed, 1, moe.n_groups > 1 ? top_groups * (X / groups) : X);
        if (pl_chance(p, 2)) { /* as large as the scores */
            for (int i = 0; i < X; i++) bias[i] = (float)rnd_int(&p->seed, -1, 1);
            moe.choice_bias = (toka_tensor){.data = bias, .dtype = TOKA_F32, .rows = 1, .cols = X, .stride = X};
        }
        for (int i = 0; i < X; i++) logit[i] = weight[i] = (float)rnd_int(&p->seed, -2, 2);
        pl_route(&moe, logit, want);
        plain_route(&moe, moe.choice_bias.rows ? bias : NULL, weight, choice);
        for (int i = 0; i < X; i++)
            CHECK_MSG(fabs(weight[i] - want[i]) < 1e-6 && (want[i] != 0) == (weight[i] != 0), "seed %llu: expert %d of %d: %g, expected %g",
                      (unsigned long long)first, i, X, weight[i], want[i]);
        pl_close(p);
    }
}

/* ---- Errors ---- */

static void test_plain_errors(void) {
    pl_case *p = pl_open(3, false, false);
    toka_err e;
    toka_device *d = NULL;
    toka_device_options o = {.max_tokens = 8, .max_samples = 8, .n_pages = 4};
    const toka_shape *s = &p->c.sh;
    float x[64 * 8] = {0};
    CHECK(toka_plain.open(&d, &o, s, &p->c.w, &e) == 0 && toka_plain.status(d, &e) == 0);
    toka_dev_ptr a = toka_plain.alloc(d, 100);
    char back[4];
    memcpy((void *)(uintptr_t)a.at, "abc", 4), memcpy(back, (const void *)(uintptr_t)a.at, 4);
    CHECK(!strcmp(back, "abc"));
    for (int op = 0; op < 4; op++) { /* x that is not whole */
        toka_hidden hidden = {{(uintptr_t)x}, TOKA_HIDDEN_PARTIAL, NULL};
        toka_step step = {0};
        pid_t pid;
        if (child_begins(&pid)) {
            if (op == 0) toka_plain.norm_qkv_rope_kv(d, &step, 0, &hidden, a);
            if (op == 1) toka_plain.out_residual(d, &step, 0, a, &hidden);
            if (op == 2) toka_plain.norm_mlp_residual(d, &step, 0, &hidden);
            if (op == 3) toka_plain.norm_logits_sample(d, &step, &hidden, NULL);
            _exit(0);
        }
        CHECK(child_aborts(pid));
    }
    CHECK(toka_plain.alloc(d, SIZE_MAX - 5).at == 0 && toka_plain.status(d, &e) == TOKA_E_MEMORY && strstr(e.msg, "plain backend"));
    toka_plain.close(d), toka_plain.close(NULL);
    o.bf16 = true;
    CHECK(toka_plain.open(&d, &o, s, &p->c.w, &e) == TOKA_E_USE && strstr(e.msg, "bfloat16"));
    o.bf16 = false, o.n_pages = 0;
    CHECK(toka_plain.open(&d, &o, s, &p->c.w, &e) == TOKA_E_USE);
    o.n_pages = INT_MAX / s->B;
    p->c.sh.D = 1 << 20;
    CHECK(toka_plain.open(&d, &o, s, &p->c.w, &e) == TOKA_E_MEMORY);
    pl_close(p);
    CHECK(lib_find_backend("plain") == &toka_plain && lib_find_backend(NULL) != &toka_plain && lib_find_backend("auto") != &toka_plain);
    toka_options options = toka_options_default();
    toka *t;
    options.model = "test/model", options.device = "plan";
    CHECK(toka_open(&t, &options, &e) == TOKA_E_USE && strstr(e.msg, "did you mean plain?"));
    options.device = "plain", options.data_parallel_size = 2;
    CHECK(toka_open(&t, &options, &e) == TOKA_E_USE && strstr(e.msg, "plain backend: it has one rank"));
    options.data_parallel_size = 1, options.tensor_parallel_size = 2;
    CHECK(toka_open(&t, &options, &e) == TOKA_E_USE && strstr(e.msg, "plain backend: it has one rank"));
}

/* ---- The embedded model beside the CPU backend ---- */

static toka *pl_open_toka(const char *device, const char *kv_dtype) {
    toka_options o = toka_options_default();
    toka_err e;
    toka *t;
    o.model = "test/model", o.device = device, o.max_num_seqs = 5, o.max_num_batched_tokens = 23, o.kv_tokens = 1024;
    o.kv_cache_dtype = kv_dtype;
    if (toka_open(&t, &o, &e)) {
        printf("%s\n", e.msg);
        abort();
    }
    return t;
}

/* Logits of 20 positions of a prompt from position `from` on, in one step. The positions before them have been computed. */
static void pl_step_logits(toka *t, int from, const int32_t *tokens, float *logits) {
    enum { N = 20 };
    int32_t pos[N], kv_slot[N], pages[10] = {9, 4, 0, 1, 11, 7, 3, 2, 12, 5};
    toka_span span = {0, N, 0, 0, from + N};
    toka_sample_row rows[N];
    toka_err e;
    for (int i = 0; i < N; i++)
        pos[i] = from + i, kv_slot[i] = pages[pos[i] / 16] * 16 + pos[i] % 16, rows[i] = (toka_sample_row){.row = i, .scored_id = 0};
    toka_step step = {.T = N, .n_spans = 1, .n_samples = N, .ids = tokens + from, .pos = pos, .kv_slot = kv_slot, .pages = pages, .spans = &span,
                      .samples = rows, .logits = logits};
    eng_replica *replica = &t->engine->replicas[0];
    CHECK(t->shape.B == 16 && model_run_step(&replica->model, &step, replica->inflight[0].results, &e) == 0);
}

static void test_plain_beside_cpu(void) {
    static const char *const prompts[] = {"Tom has 12 apples and buys 7 more. How many apples does he have?", "In the end, 3"};
    toka *t[2] = {pl_open_toka("cpu", NULL), pl_open_toka("plain", NULL)};
    uint64_t seed = (uint64_t)time(NULL);
    int32_t tokens[20];
    float *logits[2];
    CHECK(strstr(toka_get_info(t[1]).device, "plain"));
    for (int i = 0; i < 20; i++) tokens[i] = rnd_int(&seed, 0, 1023);
    for (int i = 0; i < 2; i++) pl_step_logits(t[i], 0, tokens, logits[i] = mem_alloc(20 * 1024 * sizeof(float)));
    double err = eng_rel_l2(logits[1], logits[0], 20 * 1024);
    CHECK_MSG(err < 1e-5, "relative L2 of the logits %.3g", err);
    for (int i = 0; i < 4; i++) { /* greedy; drawn: copied pages, penalties and bad ids, which read ids from pages */
        toka_sampling s = eng_greedy(12);
        const int32_t bad[] = {tokens[0], tokens[1]};
        const int two = 2;
        if (i >= 2) s.temperature = 0.9f, s.seed = 5, s.repetition_penalty = 1.3f, s.presence_penalty = 0.4f, s.frequency_penalty = 0.2f;
        if (i >= 2) s.bad_ids = bad, s.bad_lengths = &two, s.n_bad = 1;
        eng_collected *got[2];
        for (int j = 0; j < 2; j++) {
            int code;
            toka_err e;
            got[j] = eng_ask(t[j], prompts[i % 2], NULL, 0, i < 2 ? 1 : 4, &s, &code, &e);
            CHECK_MSG(code == 0, "%s", e.msg);
        }
        for (int n = 0; n < 4; n++)
            if (!n || i >= 2)
                CHECK_MSG(got[0]->id[n].n > 0 && got[0]->id[n].n == got[1]->id[n].n &&
                              !memcmp(got[0]->id[n].p, got[1]->id[n].p, got[0]->id[n].n * 4), "prompt %d, sample %d: ids differ", i, n);
        eng_collected_free(got[0]), eng_collected_free(got[1]);
    }
    for (int i = 0; i < 2; i++) toka_close(t[i]), free(logits[i]);
}

/* Sigmoids that are all 0 in float32, with renormalize: no expert has a weight, and none is NaN. */
static void test_plain_underflow(void) {
    const toka_moe moe = {.n_experts = 4, .top_k = 2, .kind = TOKA_ROUTER_SIGMOID, .renormalize = true, .scale = 2.5f};
    float plain[4] = {-200, -300, -200, -900}, choice[8], scores[12] = {-200, -300, -200, -900}, weights[2] = {9, 9};
    int chosen[2];
    toka_device dev = {.experts = {.scores = scores, .ld_scores = 12, .chosen = chosen, .weights = weights}};
    cpu_moe_job job = {.dev = &dev, .moe = &moe};
    plain_route(&moe, NULL, plain, choice);
    for (int i = 0; i < 4; i++) CHECK(plain[i] == 0);
    cpu_route_item(&job, 0, 0);
    CHECK(chosen[0] == 0 && chosen[1] == 1); /* equal scores: the first ones */
    for (int i = 0; i < 2; i++) CHECK_MSG(fabsf(weights[i]) < 1e-15f, "%g", weights[i]);
}

typedef struct pl_change { /* sums over n tokens */
    int n, n_top;
    double kl, change;
} pl_change;

/* Adds the change from logits a to b: KL divergence, change of the next token's log-probability, another top token. */
static void pl_add_change(pl_change *sum, const float *a, const float *b, int V, int next) {
    double sum_a = 0, sum_b = 0;
    int top_a = 0, top_b = 0;
    for (int j = 0; j < V; j++) {
        sum_a += exp(a[j]), sum_b += exp(b[j]);
        top_a = a[j] > a[top_a] ? j : top_a, top_b = b[j] > b[top_b] ? j : top_b;
    }
    for (int j = 0; j < V; j++) sum->kl += exp(a[j]) / sum_a * (a[j] - log(sum_a) - b[j] + log(sum_b));
    sum->change += fabs(a[next] - log(sum_a) - b[next] + log(sum_b));
    sum->n_top += top_a != top_b, sum->n++;
}

/* FP8 K and V beside float32 K and V, on held-out problems and answers that the model draws. */
static void test_kv_fp8_accuracy(void) {
    enum { V = 1024 };
    toka *t[3] = {pl_open_toka("cpu", NULL), pl_open_toka("cpu", "fp8"), pl_open_toka("plain", "fp8")};
    str lines = read_copy("test/model/heldout.jsonl");
    float *logits[3];
    pl_change change = {0};
    double most = 0;
    toka_sampling s = eng_greedy(100);
    s.temperature = 1;
    for (int i = 0; i < 3; i++) logits[i] = mem_alloc(20 * V * sizeof(float));
    for (size_t at = 0, end; at < lines.n && change.n < (SANITIZED ? 200 : 1000); at = end + 1) {
        arena memory = {0};
        toka_err e;
        ptrdiff_t nl = str_find(lines, STR("\n"), at);
        end = nl < 0 ? lines.n : (size_t)nl;
        const str problem = json_str(json_get(json_parse(&memory, str_sub(lines, at, end), json_trusted, &e), "prompt"));
        size_t n = 0;
        int32_t *prompt = eng_problem_ids(t[0], problem, &n), tokens[160];
        eng_collected *answer = eng_ask_problem(t[0], problem, 1, &s);
        for (size_t i = 0; i < COUNT(tokens); i++) tokens[i] = i < n ? prompt[i] : i < n + answer->id[0].n ? answer->id[0].p[i - n] : 0;
        n = MIN(n + answer->id[0].n, (size_t)COUNT(tokens));
        for (int from = 0; from + 21 <= (int)n; from += 20) {
            for (int i = 0; i < 3; i++) pl_step_logits(t[i], from, tokens, logits[i]);
            most = MAX(most, eng_rel_l2(logits[2], logits[1], 20 * V));
            for (int i = 0; i < 20; i++) pl_add_change(&change, logits[0] + i * V, logits[1] + i * V, V, tokens[from + i + 1]);
        }
        eng_collected_free(answer), free(prompt), arena_free(&memory);
    }
    printf("FP8 K and V on the embedded model, %d tokens: KL %.2g nats, log-probabilities change by %.2g on average, the top token in %.2f %%; "
           "plain and CPU differ by %.1g\n", change.n, change.kl / change.n, change.change / change.n, 100.0 * change.n_top / change.n, most);
    CHECK(change.kl > 0 && change.kl < 2e-3 * change.n && change.change < 0.02 * change.n && change.n_top <= 0.01 * change.n && most < 0.01);
    for (int i = 0; i < 3; i++) toka_close(t[i]), free(logits[i]);
    free((void *)lines.p);
}

/* ---- The chunked form of a linear mixer's rule ---- */

/* Element i of part q, k or v (0 to 2), after convolution and SiLU, of token t. */
static double lin_conv(const lin *l, int part, int i, int t) {
    const toka_linear_shape *s = &l->shape.linear;
    const toka_tensor *weight = (const toka_tensor *[]){&l->linear.conv_q, &l->linear.conv_k, &l->linear.conv_v}[part];
    const int first = part * s->key_heads * s->key_size;
    double sum = 0;
    for (int tap = MAX(0, s->taps - 1 - t); tap < s->taps; tap++)
        sum += pl_at(weight, i, tap) * l->rows[(t - s->taps + 1 + tap) * l->width + first + i];
    return sum * pl_sigmoid(sum);
}

/* o of value head h for all tokens, by the recurrent form in float64. o: [T][value_size]. */
static void lin_recurrent(const lin *l, int h, double *o) {
    const toka_linear_shape *s = &l->shape.linear;
    const int J = s->key_size, U = s->value_size, key = h / (s->value_heads / s->key_heads), values = s->value_heads * U;
    const int z = toka_linear_channels(s), b = z + values, a = b + s->value_heads;
    double *S = mem_zalloc((size_t)(J * U) * sizeof *S), *k = mem_zalloc((size_t)J * 2 * sizeof *k), *q = k + J;
    for (int t = 0; t < l->T; t++, o += U) {
        const float *row = l->rows + t * l->width;
        double kk = 1e-6, qq = 1e-6, square = l->shape.eps;
        for (int i = 0; i < J; i++) q[i] = lin_conv(l, 0, key * J + i, t), k[i] = lin_conv(l, 1, key * J + i, t), qq += q[i] * q[i], kk += k[i] * k[i];
        const double decay = exp(-exp(pl_at(&l->linear.a_log, 0, h)) * log1p(exp(row[a + h] + pl_at(&l->linear.dt_bias, 0, h))));
        for (int j = 0; j < U; j++) {
            double found = 0, sum = 0;
            for (int i = 0; i < J; i++) found += decay * S[i * U + j] * k[i] / sqrt(kk);
            const double change = pl_sigmoid(row[b + h]) * (lin_conv(l, 2, h * U + j, t) - found);
            for (int i = 0; i < J; i++) S[i * U + j] = decay * S[i * U + j] + k[i] / sqrt(kk) * change, sum += S[i * U + j] * q[i] / sqrt(qq * J);
            o[j] = sum, square += sum * sum / U;
        }
        for (int j = 0; j < U; j++) o[j] = o[j] / sqrt(square) * pl_at(&l->linear.norm, 0, j) * row[z + h * U + j] * pl_sigmoid(row[z + h * U + j]);
    }
    free(S), free(k);
}

/* A prompt in chunks of any length and an answer give the same bytes, and those of the recurrent form in float64 within 1e-5. */
static void test_linear_chunks(void) {
    static const toka_linear_shape shapes[] = {{1, 1, 2, 128, 128, 4}, {1, 2, 6, 20, 12, 3}, {1, 1, 1, 5, 33, 2}};
    for (int i = 0; i < COUNT(shapes) * cpu_n_kernel_sets(); i++) {
        const toka_linear_shape *s = &shapes[i % COUNT(shapes)];
        lin l;
        lin_open(&l, s, i % COUNT(shapes) ? 150 : 300, 2, &cpu_kernel_sets[i / COUNT(shapes)]);
        double *want = mem_alloc((size_t)(l.T * s->value_size) * sizeof *want), worst = 0;
        float *whole = mem_alloc((size_t)(l.T * l.o_width) * sizeof *whole);
        lin_run(&l, 0, l.T, 0);
        memcpy(whole, l.o, (size_t)(l.T * l.o_width) * sizeof *whole);
        for (int h = 0; h < s->value_heads; h++) {
            lin_recurrent(&l, h, want);
            for (int t = 0; t < l.T; t++) {
                double error = 0, norm = 0;
                for (int j = 0; j < s->value_size; j++) {
                    const double x = want[t * s->value_size + j], d = whole[t * l.o_width + h * s->value_size + j] - x;
                    error += d * d, norm += x * x;
                }
                worst = MAX(worst, sqrt(error / norm));
            }
        }
        CHECK_MSG(worst < 1e-5, "%s, shape %d: relative L2 %.2g", l.d->kernels->name, i % COUNT(shapes), worst);
        for (int most = 1; most < 60; most += most < 3 ? 1 : 19) {
            memset(l.o, 0xFF, (size_t)(l.T * l.o_width) * sizeof *l.o);
            for (int t = 0, n; t < l.T; t += n) {
                n = rnd_int(&l.seed, 1, MIN(most, l.T - t));
                lin_run(&l, t, n, most % LIN_STATES);
            }
            CHECK_MSG(!memcmp(whole, l.o, (size_t)(l.T * l.o_width) * sizeof *l.o), "%s, shape %d, at most %d rows", l.d->kernels->name, i % COUNT(shapes), most);
        }
        lin_close(&l), free(want), free(whole);
    }
}

static const struct test plain_tests[] = {{"weight_formats", test_weight_formats}, {"weight_codes", test_weight_codes},
                                          {"plain_models", test_plain_models}, {"plain_models_cpu", test_plain_models_cpu},
                                          {"plain_models_fp8", test_plain_models_fp8},
                                          {"linear_chunks", test_linear_chunks}, {"plain_router", test_plain_router}, {"plain_underflow", test_plain_underflow},
                                          {"plain_errors", test_plain_errors}, {"kv_fp8_accuracy", test_kv_fp8_accuracy}, {"plain_beside_cpu", test_plain_beside_cpu},
                                          {NULL, NULL}};
