/* gpu_lora.cu - tests the adapters (chapter 7c) against float64: what they add to q, k and v, to o, to gate and up with their activation,
 * and to down, for steps of many rows and adapters; the order of the rows; how an adapter lies on the device.
 *   gpu_lora            all tests
 *   gpu_lora small      fewer shapes (for compute-sanitizer)
 *   gpu_lora bench      microseconds of the kernels of a layer of 8B, and of its GEMMs */
#include "../toka_kernels.cu"

#include "gpu.cuh"

static bool quick;

static std::vector<bf16> random_bf16(size_t n, uint64_t seed, float scale) {
    std::vector<bf16> v(n);
    for (size_t i = 0; i < n; i++) v[i] = __float2bfloat16(scale * gpu_normal(seed, i));
    return v;
}
static float value(bf16 b) { return __bfloat162float(b); }

/* ---- Models and adapters ---- */

enum { N_LAYERS = 2, MATRICES = 16 }; /* of a layer, as in toka.c */

typedef struct sizes {
    int E, H, K, D, F, rope_dims;
    bool neighbours, fused; /* fused: the files have one matrix of q, k and v, and one of gate and up */
} sizes;

typedef struct adapter { /* its numbers, by matrix of the files */
    std::vector<std::vector<bf16>> a, b;
    std::vector<std::vector<float>> a32; /* what the adapter's file has, if that is float32 */
    std::vector<toka_low_rank> parts;
} adapter;

typedef struct model {
    sizes z;
    toka_shape shape;
    toka_rope rope;
    toka_layer layers[N_LAYERS];
    toka_adapters room;
    toka_weights weights;
    std::vector<adapter> adapters; /* number i + 1 */
} model;

static toka_tensor *matrix_of(toka_layer *layer, int kind) {
    toka_tensor *const all[] = {&layer->q, &layer->k, &layer->v, &layer->o, &layer->mlp.gate, &layer->mlp.up, &layer->mlp.down};
    return all[kind];
}
static void make_model(toka_device *d, model *m, sizes z, int max_rank, int max_tokens) {
    m->z = z;
    m->shape = toka_shape{};
    m->shape.L = N_LAYERS, m->shape.E = z.E, m->shape.H = z.H, m->shape.K = z.K, m->shape.D = z.D, m->shape.F = z.F;
    m->rope = toka_rope{NULL, z.rope_dims, 1, z.neighbours};
    m->room = toka_adapters{max_rank};
    const int rows[] = {z.H * z.D, z.K * z.D, z.K * z.D, z.E, z.F, z.F, z.E}, cols[] = {z.E, z.E, z.E, z.H * z.D, z.E, z.E, z.F};
    for (int l = 0; l < N_LAYERS; l++) {
        m->layers[l] = toka_layer{};
        m->layers[l].rope = &m->rope;
        for (int k = 0; k < LORA_N_PARTS; k++) {
            toka_tensor *t = matrix_of(&m->layers[l], k);
            t->rows = rows[k], t->cols = cols[k];
            t->matrix = l * MATRICES + (!z.fused ? k : k < 3 ? 0 : k == LORA_UP ? LORA_GATE : k) + 1;
            if (z.fused) t->matrix_row = k == LORA_K ? rows[0] : k == LORA_V ? rows[0] + rows[1] : k == LORA_UP ? z.F : 0;
        }
    }
    m->weights = toka_weights{.layers = m->layers, .adapters = &m->room};
    d->shape = &m->shape, d->weights = &m->weights, d->E = round_up_8(z.E), d->F = round_up_8(z.F), d->options.max_tokens = max_tokens;
    lora_open(d);
    upload_open(d, &d->upload, lora_upload_bytes(d) + 256, true);
    gpu_done(d, "open");
}
static void close_model(toka_device *d) {
    lora_close(d), upload_close(&d->upload);
    d->lora = NULL;
    while (d->n_allocations) cudaFree(d->allocations[--d->n_allocations]);
}
/* Adds an adapter with a rank of 1 to max_rank for each matrix; every fifth matrix has none. */
static void add_adapter(toka_device *d, model *m, int max_rank, bool all_equal, toka_dtype type) {
    const int number = (int)m->adapters.size() + 1, n = N_LAYERS * MATRICES + 1;
    m->adapters.emplace_back();
    adapter *to = &m->adapters.back();
    to->a.resize((size_t)n), to->b.resize((size_t)n), to->a32.resize((size_t)n), to->parts.resize((size_t)n);
    for (int l = 0; l < N_LAYERS; l++)
        for (int k = 0; k < LORA_N_PARTS; k++) {
            const toka_tensor *w = matrix_of(&m->layers[l], k);
            const size_t i = (size_t)w->matrix;
            const uint64_t seed = gpu_seed * 7919 + (uint64_t)number * 1000 + i;
            int rows = 0;
            for (int j = 0; j < LORA_N_PARTS; j++)
                if (matrix_of(&m->layers[l], j)->matrix == w->matrix) rows += matrix_of(&m->layers[l], j)->rows;
            if (to->parts[i].a.rows || (!all_equal && gpu_mix(seed) % 5 == 0)) continue;
            const int r = all_equal ? max_rank : 1 + (int)(gpu_mix(seed + 1) % (uint64_t)max_rank);
            to->a[i] = random_bf16((size_t)r * w->cols, seed + 2, 1 / sqrtf((float)w->cols));
            to->b[i] = random_bf16((size_t)rows * r, seed + 3, 1 / sqrtf((float)r));
            for (bf16 x : to->a[i]) to->a32[i].push_back(value(x));
            const void *a = type == TOKA_F32 ? (const void *)to->a32[i].data() : to->a[i].data();
            to->parts[i] = toka_low_rank{{a, type, r, w->cols, w->cols}, {to->b[i].data(), TOKA_BF16, rows, r, r}, 0.5f + 0.25f * (float)(number % 7)};
        }
    toka_err e = {};
    if (cuda_set_adapter(d, number, to->parts.data(), &e)) gpu_check(false, "load of an adapter: %s", e.msg), exit(gpu_report());
}

/* The column of y of row `row` of a part. */
static int column_of(const toka_device *d, const sizes &z, int kind, int row) {
    if (kind == LORA_O || kind == LORA_DOWN) return row;
    if (kind == LORA_GATE || kind == LORA_UP) return row / 8 * 16 + row % 8 + (kind == LORA_UP ? 8 : 0);
    const int first = kind == LORA_Q ? 0 : kind == LORA_K ? z.H * z.D : (z.H + z.K) * z.D, half = z.D / 2;
    int i = row % z.D;
    if (kind != LORA_V && (z.rope_dims < z.D || z.neighbours)) { /* pairs of RoPE D/2 apart; the others where there is room */
        std::vector<int> place((size_t)z.D, -1), owner((size_t)z.D, -1);
        for (int pair = 0; pair < z.rope_dims / 2; pair++) {
            const int low = z.neighbours ? 2 * pair : pair, high = z.neighbours ? low + 1 : pair + z.rope_dims / 2;
            place[(size_t)low] = pair, place[(size_t)high] = pair + half;
            owner[(size_t)pair] = low, owner[(size_t)(pair + half)] = high;
        }
        for (int e = z.rope_dims, at = 0; e < z.D; e++, at++) {
            while (owner[(size_t)at] >= 0) at++;
            place[(size_t)e] = at;
        }
        i = place[(size_t)i];
    }
    if (d->hopper && (z.D == 64 || z.D == 128)) i = i < half ? i / 8 * 16 + i % 8 : (i - half) / 8 * 16 + 8 + (i - half) % 8;
    return first + row / z.D * z.D + i;
}

/* ---- A product ---- */

typedef struct product { /* the GEMM whose output adapters change */
    int layer, first_kind, n_parts;
    weight w;
} product;
static product product_of(const model *m, int layer, int kind) {
    const sizes &z = m->z;
    const int E = round_up_8(z.E), F = round_up_8(z.F);
    const int N = kind == LORA_Q ? (z.H + 2 * z.K) * z.D : kind == LORA_GATE ? 2 * F : E;
    product p = {layer, kind, kind == LORA_Q ? 3 : kind == LORA_GATE ? 2 : 1, {NULL, NULL, N, kind == LORA_O ? z.H * z.D : kind == LORA_DOWN ? F : E}};
    layer_weights all = {};
    lora_number_parts(&all, layer);
    p.w.first_part = (kind == LORA_Q ? all.qkv : kind == LORA_GATE ? all.gate_up : kind == LORA_O ? all.o : all.down).first_part;
    return p;
}

/* x and y of the rows of a step. Columns that the model does not have are 0. */
typedef struct rows_of {
    std::vector<bf16> x, y;
    std::vector<uint8_t> adapters;
    int ldx, ldy;
} rows_of;
static rows_of make_rows(const product &p, const model *m, int T, const std::vector<uint8_t> &adapters) {
    rows_of r = {{}, {}, adapters, p.w.K + 8, p.w.N + (p.first_kind == LORA_GATE ? 0 : 16)};
    const int cols = matrix_of((toka_layer *)&m->layers[p.layer], p.first_kind)->cols;
    r.x = random_bf16((size_t)T * r.ldx, gpu_seed + 11, 1), r.y = random_bf16((size_t)T * r.ldy, gpu_seed + 12, 1);
    for (size_t i = 0; i < r.x.size(); i++)
        if ((int)(i % (size_t)r.ldx) >= cols) r.x[i] = __float2bfloat16(0);
    return r;
}
static rows_of one_row(const rows_of &all, int t) {
    auto part = [](const std::vector<bf16> &v, int t, int ld) { return std::vector<bf16>(v.begin() + (ptrdiff_t)t * ld, v.begin() + (ptrdiff_t)(t + 1) * ld); };
    return {part(all.x, t, all.ldx), part(all.y, t, all.ldy), {all.adapters[(size_t)t]}, all.ldx, all.ldy};
}

typedef struct outcome {
    std::vector<bf16> y; /* [T][ldy], of gate and up [T][F] */
    bool guards;
} outcome;
/* Runs the kernels as a step does; `repeats` times, and checks that each gives the same bits. */
static outcome run(toka_device *d, const product &p, const rows_of &r, bool is_gelu = false, int repeats = 1) {
    const int T = (int)r.adapters.size(), ld_act = d->F + 8;
    const bool pairs = p.first_kind == LORA_GATE;
    gpu_buf<bf16> x(r.x.size()), y(r.y.size()), act((size_t)T * ld_act);
    toka_step step = {};
    outcome out = {{}, true};
    step.T = T, step.adapters = r.adapters.data();
    x.set(r.x);
    upload_begin(d, &d->upload);
    lora_plan_step(d, &step);
    upload_send(d, &d->upload);
    gpu_buf<float> low((size_t)ceil_div(p.w.K, LORA_SLICE) * p.n_parts * d->lora->n_chunks * T * LORA_RANKS + 4);
    d->lora->low = low.p();
    const int F = d->F;
    for (int i = 0; i < repeats; i++) {
        y.set(r.y);
        act.poison();
        d->act = act.p(), d->F = ld_act;
        const gemm_args gemm = {.M = T, .x = x.p(), .ldx = r.ldx, .w = &p.w, .y = y.p(), .ldy = r.ldy};
        if (!pairs) lora_add(d, &gemm);
        else if (d->lora->n_rows) lora_gate_up(d, &gemm, is_gelu);
        d->F = F;
        gpu_done(d, "adapters");
        const std::vector<bf16> got = pairs ? act.host() : y.host();
        if (i && !gpu_same_bits(got, out.y)) out.guards = gpu_check(false, "repeat %d differs", i);
        out.y = got;
        out.guards = out.guards && act.guards_hold() && y.guards_hold() && x.guards_hold() && low.guards_hold();
        if (pairs && !gpu_same_bits(y.host(), r.y)) out.guards = gpu_check(false, "gate and up are overwritten");
    }
    if (!pairs) return out;
    std::vector<bf16> packed;
    for (int t = 0; t < T; t++)
        for (int f = 0; f < ld_act; f++) {
            uint16_t bits;
            memcpy(&bits, &out.y[(size_t)t * ld_act + f], 2);
            if (f < F) packed.push_back(out.y[(size_t)t * ld_act + f]);
            else if (bits != 0xFFFF && d->lora->n_rows) out.guards = false;
        }
    out.y = packed;
    return out;
}

/* What the adapter of a row adds to y, and how far rounding may take it, by column. */
static void reference(toka_device *d, const model *m, const product &p, const rows_of &r, int t, std::vector<double> *add, std::vector<double> *slack) {
    add->assign((size_t)p.w.N, 0), slack->assign((size_t)p.w.N, 0);
    const int number = r.adapters[(size_t)t];
    for (int k = p.first_kind; k < p.first_kind + p.n_parts && number; k++) {
        const toka_tensor *w = matrix_of((toka_layer *)&m->layers[p.layer], k);
        const adapter *from = &m->adapters[(size_t)number - 1];
        const toka_low_rank *part = &from->parts[(size_t)w->matrix];
        const std::vector<bf16> &a = from->a[(size_t)w->matrix], &b = from->b[(size_t)w->matrix];
        std::vector<double> low, size;
        for (int i = 0; i < part->a.rows; i++) {
            double sum = 0, all = 0;
            for (int c = 0; c < w->cols; c++) {
                const double term = (double)value(a[(size_t)i * w->cols + c]) * value(r.x[(size_t)t * r.ldx + c]);
                sum += term, all += fabs(term);
            }
            low.push_back(sum * part->scale), size.push_back(all * part->scale);
        }
        for (int row = 0; row < w->rows; row++) {
            const size_t at = (size_t)column_of(d, m->z, k, row);
            for (size_t i = 0; i < low.size(); i++) {
                const double w_b = value(b[(size_t)(w->matrix_row + row) * low.size() + i]);
                (*add)[at] += low[i] * w_b;
                (*slack)[at] += fabs(low[i] * w_b) * 0x1.02p-8 + fabs(size[i] * w_b) * 0x1p-20;
            }
        }
    }
}
static double silu(double g) { return g / (1 + exp(-g)); }
static double gelu(double g) { return g * 0.5 * (1 + tanh(sqrt(2 / M_PI) * (g + 0.044715 * g * g * g))); }

/* Returns the worst error over what is allowed. */
static double worst_error(toka_device *d, const model *m, const product &p, const rows_of &r, const outcome &got, bool is_gelu) {
    double worst = 0;
    for (int t = 0; t < (int)r.adapters.size(); t++) {
        std::vector<double> add, slack;
        reference(d, m, p, r, t, &add, &slack);
        const bf16 *y = &r.y[(size_t)t * r.ldy];
        if (p.first_kind != LORA_GATE) {
            for (int n = 0; n < r.ldy; n++) {
                const double want = value(y[n]) + (n < p.w.N ? add[(size_t)n] : 0), unit = n < p.w.N ? slack[(size_t)n] : 0;
                worst = gpu_worse(worst, fabs(value(got.y[(size_t)t * r.ldy + n]) - want) / (fabs(want) * 0x1.02p-8 + unit + 1e-30));
            }
            continue;
        }
        for (int f = 0; f < d->F; f++) {
            const size_t at = (size_t)(f / 8 * 16 + f % 8);
            const double g = value(y[at]) + add[at], u = value(y[at + 8]) + add[at + 8], s = is_gelu ? gelu(g) : silu(g), want = s * u;
            /* the slope of SiLU and of GELU is at most 1.13 */
            const double allowed = fabs(want) * 0x1.08p-8 + 1.13 * slack[at] * (fabs(u) + slack[at + 8]) + fabs(s) * slack[at + 8] + 1e-6 * fabs(g * u) + 1e-30;
            worst = gpu_worse(worst, fabs(value(got.y[(size_t)t * d->F + f]) - want) / allowed);
        }
    }
    return worst;
}

static const char *kind_name(int kind) { return kind == LORA_Q ? "q, k, v" : kind == LORA_O ? "o" : kind == LORA_GATE ? "gate, up" : "down"; }

/* T rows of n adapters and some of none, in random order. */
static std::vector<uint8_t> choose(int T, int n, int share_without, uint64_t seed) {
    std::vector<uint8_t> v((size_t)T);
    for (int t = 0; t < T; t++) {
        const uint64_t z = gpu_mix(gpu_seed * 131 + seed * 7 + (uint64_t)t);
        v[(size_t)t] = (int)(z % 100) < share_without ? 0 : (uint8_t)(1 + z / 100 % (uint64_t)n);
    }
    v[(size_t)T / 2] = (uint8_t)n; /* at least one */
    return v;
}

static void test_product(toka_device *d, const model *m, int kind, int layer, const std::vector<uint8_t> &adapters, int repeats, const char *what, bool is_gelu) {
    const product p = product_of(m, layer, kind);
    const int T = (int)adapters.size(), width = kind == LORA_GATE ? d->F : p.w.N + 16;
    rows_of r = make_rows(p, m, T, adapters);
    const outcome all = run(d, p, r, is_gelu, repeats);
    const double worst = worst_error(d, m, p, r, all, is_gelu);
    gpu_check(worst <= 1 && all.guards, "adapters of %s %s, %d rows%s: worst %.3g of what is allowed%s", kind_name(kind), what, T, is_gelu ? ", GELU" : "", worst,
              all.guards ? "" : ", or written outside");
    auto row = [&](const outcome &o, int t) { return std::vector<bf16>(o.y.begin() + (ptrdiff_t)t * width, o.y.begin() + (ptrdiff_t)(t + 1) * width); };
    int n_other = 0;
    for (int i = 0; i < (quick ? 2 : 6); i++) { /* a row alone */
        const int t = i == 0 ? T / 2 : (int)(gpu_mix(gpu_seed + 99 + (uint64_t)i) % (uint64_t)T);
        if (!adapters[(size_t)t]) continue; /* such a step launches nothing */
        n_other += !gpu_same_bits(row(run(d, p, one_row(r, t), is_gelu), 0), row(all, t));
    }
    gpu_check(!n_other, "adapters of %s %s: %d rows of %d alone have other bits", kind_name(kind), what, n_other, T);
    for (int i = 0; i < r.ldx && T > 1; i++) r.x[(size_t)(T / 2) * r.ldx + i] = __float2bfloat16(NAN);
    const outcome with_nan = run(d, p, r, is_gelu);
    n_other = 0;
    for (int t = 0; t < T; t++) n_other += t != T / 2 && !gpu_same_bits(row(with_nan, t), row(all, t));
    gpu_check(!n_other && with_nan.guards, "adapters of %s %s: a row of NaN changes %d rows of %d", kind_name(kind), what, n_other, T);
}

static void test_model(toka_device *d, sizes z, int n_adapters, int max_rank, toka_dtype type, const std::vector<int> &row_counts) {
    model m;
    char what[160];
    snprintf(what, sizeof what, "E=%d H=%d K=%d D=%d F=%d RoPE %d%s%s, %d adapters of rank <= %d", z.E, z.H, z.K, z.D, z.F, z.rope_dims, z.neighbours ? " neighbours" : "",
             z.fused ? ", fused" : "", n_adapters, max_rank);
    make_model(d, &m, z, max_rank, 600);
    m.adapters.reserve((size_t)n_adapters);
    for (int i = 0; i < n_adapters; i++) add_adapter(d, &m, max_rank, false, type);
    for (int T : row_counts)
        for (int kind : {LORA_Q, LORA_O, LORA_GATE, LORA_DOWN}) {
            test_product(d, &m, kind, T % 2, choose(T, n_adapters, 25, (uint64_t)kind), 2, what, false);
            if (kind == LORA_GATE) test_product(d, &m, kind, 1, choose(T, n_adapters, 25, 5), 1, what, true);
        }
    close_model(d);
}

/* ---- The whole GEMM, on Hopper with more than 64 rows by its epilogue ---- */

/* y = x W^T before the adapters, in float64, and its slack. */
static void base_product(const rows_of &r, const std::vector<bf16> &w, int t, int N, int K, std::vector<double> *y, std::vector<double> *slack) {
    y->assign((size_t)N, 0), slack->assign((size_t)N, 0);
    for (int n = 0; n < N; n++) {
        double sum = 0, all = 0;
        for (int k = 0; k < K; k++) {
            const double term = (double)value(r.x[(size_t)t * r.ldx + k]) * value(w[(size_t)n * K + k]);
            sum += term, all += fabs(term);
        }
        (*y)[(size_t)n] = sum, (*slack)[(size_t)n] = all * 0x1p-20;
    }
}
static std::vector<bf16> run_gemm(toka_device *d, const product &p, const rows_of &r, enum epilogue epi, gpu_buf<bf16> &w, bool *guards) {
    const int T = (int)r.adapters.size(), ldy = epi == EPI_SWIGLU ? d->F : p.w.N;
    gpu_buf<bf16> x((size_t)(T + GEMM_PAD_ROWS) * r.ldx), y((size_t)T * ldy), stored((size_t)T * p.w.N);
    toka_step step = {};
    step.T = T, step.adapters = r.adapters.data();
    x.set(r.x);
    if (epi == EPI_RESIDUAL) y.set(r.y);
    upload_begin(d, &d->upload);
    lora_plan_step(d, &step);
    upload_send(d, &d->upload);
    gpu_buf<float> low((size_t)ceil_div(p.w.K, LORA_SLICE) * p.n_parts * d->lora->n_chunks * T * LORA_RANKS + 4);
    d->lora->low = low.p(), d->act = y.p(), d->gate_up = stored.p();
    product own = p;
    own.w.data = w.p();
    gemm_args args = {.M = T, .x = x.p(), .ldx = r.ldx, .w = &own.w, .y = y.p(), .ldy = ldy, .epi = epi};
    if (epi == EPI_SWIGLU) {
        layer_weights layer = {};
        layer.gate_up = own.w;
        mlp_gate_up(d, &layer, args);
    } else lora_gemm(d, &args);
    gpu_done(d, "GEMM with adapters");
    *guards = y.guards_hold() && x.guards_hold() && low.guards_hold() && stored.guards_hold() && w.guards_hold();
    return y.host();
}
static std::vector<uint8_t> sorted(std::vector<uint8_t> adapters) {
    std::sort(adapters.begin(), adapters.end());
    return adapters;
}
static void test_gemm(toka_device *d, const model *m, int kind, const std::vector<uint8_t> &adapters, const char *what) {
    const product p = product_of(m, 1, kind);
    const int T = (int)adapters.size(), N = p.w.N, K = p.w.K;
    const enum epilogue epi = kind == LORA_GATE ? EPI_SWIGLU : kind == LORA_Q ? EPI_STORE : EPI_RESIDUAL;
    const int ldy = epi == EPI_SWIGLU ? d->F : N;
    rows_of r = make_rows(p, m, T, adapters);
    r.ldy = N, r.y = random_bf16((size_t)T * N, gpu_seed + 14, 1);
    const std::vector<bf16> w = random_bf16((size_t)N * K, gpu_seed + 15, 1 / sqrtf((float)K));
    gpu_buf<bf16> w_dev(w.size());
    w_dev.set(w);
    bool guards, alone_guards;
    const std::vector<bf16> got = run_gemm(d, p, r, epi, w_dev, &guards);
    gpu_check(gpu_same_bits(got, run_gemm(d, p, r, epi, w_dev, &alone_guards)) && alone_guards, "GEMM with adapters of %s %s: again", kind_name(kind), what);
    const bool rounds = !lora_joins_gemm(d, T, &p.w); /* y once more, to bf16, before what adapters add */
    double worst = 0;
    for (int t = 0; t < T; t += T > 200 ? 3 : 1) {
        std::vector<double> y, y_slack, add, slack;
        base_product(r, w, t, N, K, &y, &y_slack);
        reference(d, m, p, r, t, &add, &slack);
        for (int n = 0; n < N; n++) {
            const double old = epi == EPI_RESIDUAL ? value(r.y[(size_t)t * N + n]) : 0;
            slack[(size_t)n] += y_slack[(size_t)n] + (rounds ? fabs(y[(size_t)n] + old) * 0x1.02p-8 : 0);
            y[(size_t)n] += old + add[(size_t)n];
        }
        for (int n = 0; n < ldy; n++) {
            double want = y[(size_t)n], allowed = fabs(want) * 0x1.02p-8 + slack[(size_t)n] + 1e-30;
            if (epi == EPI_SWIGLU) {
                const size_t at = (size_t)(n / 8 * 16 + n % 8);
                const double g = y[at], u = y[at + 8], s = silu(g);
                want = s * u;
                allowed = fabs(want) * 0x1.08p-8 + 1.13 * slack[at] * (fabs(u) + slack[at + 8]) + fabs(s) * slack[at + 8] + 1e-6 * fabs(g * u) + 1e-30;
            }
            worst = gpu_worse(worst, fabs(value(got[(size_t)t * ldy + n]) - want) / allowed);
        }
    }
    gpu_check(worst <= 1 && guards, "GEMM with adapters of %s %s, %d rows: worst %.3g of what is allowed", kind_name(kind), what, T, worst);
}
/* The QKV epilogue against the GEMM that stores, and rope_kernel. */
static void test_qkv(toka_device *d, const model *m, const std::vector<uint8_t> &adapters, bool has_norm) {
    const sizes &z = m->z;
    const product p = product_of(m, 0, LORA_Q);
    const int T = (int)adapters.size(), N = p.w.N, B = 64, n_pages = T / B + 1, max_len = 200;
    if (!d->hopper || (z.D != 64 && z.D != 128)) return;
    const rows_of r = make_rows(p, m, T, adapters);
    gpu_buf<bf16> x((size_t)(T + GEMM_PAD_ROWS) * r.ldx), w((size_t)N * p.w.K), y((size_t)T * N);
    gpu_buf<float2> table((size_t)max_len * z.D / 2);
    gpu_buf<float> norm((size_t)z.D);
    gpu_buf<int> pos((size_t)T), kv_slot((size_t)T);
    std::vector<float2> cs;
    std::vector<int> ps, slots;
    for (int i = 0; i < max_len * z.D / 2; i++) cs.push_back({cosf(0.1f * (float)i), sinf(0.1f * (float)i)});
    for (int t = 0; t < T; t++) ps.push_back((t * 7) % max_len), slots.push_back(t);
    x.set(r.x), table.set(cs), pos.set(ps), kv_slot.set(slots), norm.set(std::vector<float>((size_t)z.D, 1.1f));
    w.set(random_bf16(w.n, gpu_seed + 16, 1 / sqrtf((float)p.w.K)));
    gpu_buf<bf16> q[2] = {gpu_buf<bf16>((size_t)T * z.H * z.D), gpu_buf<bf16>((size_t)T * z.H * z.D)};
    gpu_buf<bf16> kv[2] = {gpu_buf<bf16>((size_t)n_pages * B * 2 * z.K * z.D), gpu_buf<bf16>((size_t)n_pages * B * 2 * z.K * z.D)};
    toka_step step = {};
    step.T = T, step.adapters = adapters.data();
    upload_begin(d, &d->upload);
    lora_plan_step(d, &step);
    upload_send(d, &d->upload);
    gpu_buf<float> low((size_t)ceil_div(p.w.K, LORA_SLICE) * 3 * d->lora->n_chunks * T * LORA_RANKS + 4);
    d->lora->low = low.p();
    product own = p;
    own.w.data = w.p();
    const gemm_args args = {.M = T, .x = x.p(), .ldx = r.ldx, .w = &own.w, .y = y.p(), .ldy = N, .epi = EPI_STORE};
    const float *weights = has_norm ? norm.p() : NULL;
    for (int i = 0; i < 2; i++) {
        const qkv_params params = {NULL, weights, weights, 1e-5f, z.H, z.K, B, pos.p(), kv_slot.p(), table.p(), q[i].p(), kv[i].p(), z.D};
        if (i) {
            const lora_addend add = lora_addend_of(d, &args);
            gemm_wgmma_qkv(d, T, x.p(), r.ldx, &own.w, &params, &add);
            continue;
        }
        lora_gemm(d, &args);
        launch_dependent(d, "RoPE", rope_kernel<false>, {dim3((unsigned)ceil_div(T * (z.H + 2 * z.K), 8)), 256}, rope_args{params, y.p(), T, true});
    }
    gpu_done(d, "QKV with adapters");
    double worst = 0;
    size_t n_outside = 0;
    auto compare = [&](std::vector<bf16> a, std::vector<bf16> b) {
        for (size_t i = 0; i < a.size(); i++) {
            uint16_t bits[2];
            memcpy(&bits[0], &a[i], 2), memcpy(&bits[1], &b[i], 2);
            if (bits[0] == 0xFFFF || bits[1] == 0xFFFF) n_outside += bits[0] != bits[1];
            else worst = gpu_worse(worst, fabs(value(a[i]) - value(b[i])) / (0.02 + 0x1p-6 * fabs(value(a[i]))));
        }
    };
    compare(q[0].host(), q[1].host()), compare(kv[0].host(), kv[1].host());
    gpu_check(worst <= 1 && !n_outside && q[1].guards_hold() && kv[1].guards_hold(), "GEMM with adapters and RoPE H=%d K=%d D=%d, %d rows%s: worst %.3g of what is allowed",
              z.H, z.K, z.D, T, has_norm ? ", norm" : "", worst);
}
static void test_gemms(toka_device *d, sizes z, int n_adapters, int max_rank, const std::vector<int> &row_counts) {
    model m;
    char what[160];
    snprintf(what, sizeof what, "E=%d H=%d K=%d D=%d F=%d, %d adapters of rank <= %d", z.E, z.H, z.K, z.D, z.F, n_adapters, max_rank);
    make_model(d, &m, z, max_rank, 600);
    m.adapters.reserve((size_t)n_adapters);
    for (int i = 0; i < n_adapters; i++) add_adapter(d, &m, max_rank, n_adapters == 1, TOKA_BF16);
    for (int T : row_counts) {
        for (int kind : {LORA_Q, LORA_O, LORA_GATE, LORA_DOWN}) { /* mixed, and sorted as a batch has them: the epilogue adds */
            const std::vector<uint8_t> mixed = choose(T, n_adapters, 20, (uint64_t)kind + 20);
            for (const std::vector<uint8_t> &adapters : {mixed, sorted(mixed)}) test_gemm(d, &m, kind, adapters, what);
        }
        for (bool has_norm : {false, true}) test_qkv(d, &m, sorted(choose(T, n_adapters, 20, 30)), has_norm);
    }
    close_model(d);
}

/* The same step a hundred times; all rows of one adapter; no row of any. */
static void test_repeats(toka_device *d) {
    model m;
    make_model(d, &m, sizes{264, 4, 2, 64, 2056, 64, false, false}, 24, 600);
    m.adapters.reserve(9);
    for (int i = 0; i < 9; i++) add_adapter(d, &m, 24, false, TOKA_BF16);
    for (int kind : {LORA_Q, LORA_O, LORA_GATE, LORA_DOWN}) {
        test_product(d, &m, kind, 0, choose(quick ? 40 : 201, 9, 10, 3), quick ? 5 : 100, "again", false);
        test_product(d, &m, kind, 1, std::vector<uint8_t>((size_t)97, 4), 1, "of one adapter", false);
        const product p = product_of(&m, 0, kind);
        const rows_of r = make_rows(p, &m, 33, std::vector<uint8_t>(33, 0));
        const outcome none = run(d, p, r);
        gpu_check(!lora_in_step(d) && none.guards && (kind == LORA_GATE || gpu_same_bits(none.y, r.y)), "no adapter in the step: %s is not changed", kind_name(kind));
    }
    toka_err e = {};
    gpu_check(!cuda_set_adapter(d, 3, NULL, &e) && !cuda_set_adapter(d, 3, NULL, &e) && !d->lora->of[3].parts, "an adapter is dropped, and again");
    gpu_check(!cuda_set_adapter(d, 3, m.adapters[2].parts.data(), &e), "it is loaded again");
    test_product(d, &m, LORA_O, 0, choose(40, 9, 0, 8), 1, "after a load", false);
    close_model(d);
}

static void test_sort() {
    int slot_of[TOKA_MAX_ADAPTERS + 1], rows[300], slots[300];
    for (int n : {1, 5, 128})
        for (int T : {1, 2, 33, 300}) {
            std::vector<uint8_t> adapters;
            for (int t = 0; t < T; t++) adapters.push_back((uint8_t)(gpu_mix(gpu_seed + (uint64_t)(t * n)) % (uint64_t)(n + 1)));
            for (int i = 0; i <= TOKA_MAX_ADAPTERS; i++) slot_of[i] = i && i <= n ? i - 1 : -1;
            const int n_rows = lora_sort_rows(adapters.data(), T, slot_of, rows, slots);
            std::vector<int> order((size_t)T);
            for (int t = 0; t < T; t++) order[(size_t)t] = t;
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
                return (adapters[(size_t)a] ? adapters[(size_t)a] : 999) < (adapters[(size_t)b] ? adapters[(size_t)b] : 999);
            });
            bool ok = n_rows == (int)std::count_if(adapters.begin(), adapters.end(), [](uint8_t a) { return a != 0; });
            for (int i = 0; i < T; i++) ok = ok && rows[i] == order[(size_t)i] && slots[i] == slot_of[adapters[(size_t)rows[i]]];
            gpu_check(ok, "order of %d rows of %d adapters", T, n);
        }
}

/* ---- Times ---- */

static void bench_layer(toka_device *d) {
    const int T = 512;
    model m;
    d->options.max_tokens = T;
    gemm_open(d);
    for (int n : {1, 16, 64})
        for (int rank : {16, 64}) {
            m = model{};
            make_model(d, &m, sizes{4096, 32, 8, 128, 14336, 128, false, false}, rank, T);
            m.adapters.reserve(64);
            for (int i = 0; i < n; i++) add_adapter(d, &m, rank, true, TOKA_BF16);
            std::vector<uint8_t> adapters;
            for (int t = 0; t < T; t++) adapters.push_back((uint8_t)(1 + t * n / T));
            toka_step step = {};
            step.T = T, step.adapters = adapters.data();
            upload_begin(d, &d->upload);
            lora_plan_step(d, &step);
            upload_send(d, &d->upload);
            gpu_buf<bf16> x((size_t)(T + GEMM_PAD_ROWS) * 14336), y((size_t)T * 28672), act((size_t)T * 14336);
            gpu_random(x, 1, 1), gpu_random(y, 2, 1);
            d->act = act.p();
            double sum = 0;
            gpu_buf<bf16> w((size_t)28672 * 4096);
            gpu_random(w, 3, 0.02f);
            printf("%2d adapters of rank %2d, %d rows, us of a GEMM with and without adapters (A x alone):\n", n, rank, T);
            for (int kind : {LORA_Q, LORA_O, LORA_GATE, LORA_DOWN}) {
                product p = product_of(&m, 0, kind);
                p.w.data = w.p();
                const enum epilogue epi = kind == LORA_GATE ? EPI_SWIGLU : kind == LORA_Q ? EPI_STORE : EPI_RESIDUAL;
                const gemm_args gemm_of = {.M = T, .x = x.p(), .ldx = p.w.K, .w = &p.w, .y = y.p(), .ldy = kind == LORA_GATE ? 14336 : p.w.N, .epi = epi};
                const double plain = gpu_time_us(d->stream, 20, 20, [&](int) { gemm(d, &gemm_of); });
                const double with = gpu_time_us(d->stream, 20, 20, [&](int) {
                    gemm_args args = gemm_of;
                    const lora_addend add = lora_addend_of(d, &args);
                    args.lora = &add;
                    gemm(d, &args);
                });
                const double shrink = gpu_time_us(d->stream, 20, 20, [&](int) { lora_addend_of(d, &gemm_of); });
                printf("    %-8s %7.1f %7.1f (%.1f)\n", kind_name(kind), with, plain, shrink);
                sum += with - plain;
            }
            gpu_done(d, "bench");
            printf("    in all %.1f us a layer\n", sum);
            fflush(stdout);
            close_model(d);
        }
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    quick = argc > 1 && !strcmp(argv[1], "small");
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        bench_layer(d);
        return 0;
    }
    const sizes plain = {136, 3, 1, 24, 200, 24, false, false}, wide = {1032, 4, 2, 64, 1160, 64, false, false},
                fused = {72, 2, 1, 128, 104, 128, false, true}, odd = {51, 5, 2, 40, 51, 20, true, false}, part = {520, 9, 3, 64, 2056, 32, false, false};
    test_sort();
    gemm_open(d);
    test_gemms(d, sizes{136, 4, 2, 64, 120, 64, false, false}, 3, 17, {7, 65, 129});
    if (!quick) {
        test_gemms(d, sizes{1032, 6, 2, 128, 2056, 128, false, false}, 16, 40, {129, 512});
        test_gemms(d, sizes{2048, 32, 8, 64, 1024, 64, false, false}, 1, 16, {200, 512});
        test_gemms(d, sizes{512, 5, 1, 64, 520, 64, false, false}, 64, 8, {65, 300});
    }
    test_repeats(d);
    if (quick) {
        test_model(d, odd, 3, 17, TOKA_F32, {1, 33});
        test_model(d, part, 40, 8, TOKA_BF16, {45});
        test_model(d, fused, 2, 8, TOKA_BF16, {20});
    } else {
        for (int rank : {1, 8, 16, 64}) {
            test_model(d, plain, 1, rank, TOKA_BF16, {1, 7, 64});
            test_model(d, wide, 3, rank, TOKA_F32, {7, 129});
            test_model(d, fused, 16, rank, TOKA_BF16, {1, 64, 129});
            test_model(d, odd, 64, rank, TOKA_BF16, {7, 129});
        }
        test_model(d, part, 64, 64, TOKA_BF16, {1, 512});
        test_model(d, fused, 128, 512, TOKA_F32, {129});
    }
    if (d->error.code) gpu_check(false, "%s", d->error.msg);
    return gpu_report();
}
