/* linear.h - one layer with a linear mixer on the CPU backend, with random weights and inputs: for the unit tests and for
 * bench_cpu.c. */

enum { LIN_STATES = 33, LIN_E = 16 };

typedef struct lin {
    toka_shape shape;
    toka_layer layer;
    toka_linear linear;
    toka_weights weights;
    toka_device *d;
    toka_step step;
    toka_state_span span[2 * LIN_STATES];
    int T, width, o_width;
    float *rows; /* [T][width] inputs: q, k, v, z, b, a of each token */
    float *q, *o; /* [T][width], [T][o_width] of the op */
    int32_t *pos;
    float *memory;
    uint64_t seed;
} lin;

static float lin_real(uint64_t *seed) { /* -1 to 1 */
    *seed ^= *seed >> 12, *seed ^= *seed << 25, *seed ^= *seed >> 27;
    return (float)((double)(int64_t)(*seed * 0x2545F4914F6CDD1Du) * 0x1p-63);
}
static toka_tensor lin_tensor(lin *l, float **at, int rows, int cols, double base, double scale) {
    const toka_tensor tensor = {.data = *at, .dtype = TOKA_F32, .rows = rows, .cols = cols, .stride = cols};
    for (int i = 0; i < rows * cols; i++) *(*at)++ = (float)(base + scale * lin_real(&l->seed));
    return tensor;
}

/* shape: only of the mixer. Its matrices are not used, so they share their numbers. */
static void lin_open(lin *l, const toka_linear_shape *shape, int T, int threads, const cpu_kernels *set) {
    const int keys = shape->key_heads * shape->key_size, values = shape->value_heads * shape->value_size;
    toka_err e;
    *l = (lin){.T = T, .seed = 0x9E3779B97F4A7C15u + (uint64_t)T, .width = toka_linear_width(shape), .o_width = values};
    l->shape = (toka_shape){.L = 1, .H = 1, .K = 1, .D = 16, .E = LIN_E, .F = 16, .V = 16, .V_all = 16, .B = 16, .eps = 1e-6f, .max_len = 4096, .linear = *shape};
    l->shape.linear.n_layers = 1;
    float *at = l->memory = mem_zalloc(((size_t)(2 * keys + values) * ((size_t)shape->taps + LIN_E) + (size_t)(shape->value_heads * 2 * (1 + LIN_E)) + (size_t)(values * (1 + 2 * LIN_E)) + 4096) * sizeof *at);
    l->linear = (toka_linear){
        .conv_q = lin_tensor(l, &at, keys, shape->taps, 0, 0.8), .conv_k = lin_tensor(l, &at, keys, shape->taps, 0, 0.8),
        .conv_v = lin_tensor(l, &at, values, shape->taps, 0, 0.8), .a_log = lin_tensor(l, &at, 1, shape->value_heads, -1.5, 1.5),
        .dt_bias = lin_tensor(l, &at, 1, shape->value_heads, 0, 1), .norm = lin_tensor(l, &at, 1, shape->value_size, 1, 0.3)};
    float *matrix = at;
    l->linear.q = l->linear.k = lin_tensor(l, &at, keys, LIN_E, 0, 1), at = matrix;
    l->linear.v = l->linear.z = lin_tensor(l, &at, values, LIN_E, 0, 1), at = matrix;
    l->linear.a = l->linear.b = lin_tensor(l, &at, shape->value_heads, LIN_E, 0, 1), at = matrix;
    l->linear.o = lin_tensor(l, &at, LIN_E, values, 0, 1), at = matrix;
    l->weights = (toka_weights){.embed = lin_tensor(l, &at, 16, LIN_E, 0, 1), .norm = lin_tensor(l, &at, 1, LIN_E, 0, 1), .layers = &l->layer};
    l->weights.lm_head = l->weights.embed;
    l->layer = (toka_layer){.linear = &l->linear, .attn_norm = l->weights.norm, .mlp_norm = l->weights.norm};
    l->layer.mlp.gate = l->layer.mlp.up = l->layer.mlp.down = l->weights.embed;
    const toka_device_options options = {.n_threads = threads, .max_tokens = T, .max_samples = 1, .n_pages = 2, .n_states = LIN_STATES};
    if (toka_cpu.open(&l->d, &options, &l->shape, &l->weights, &e)) fprintf(stderr, "%s\n", e.msg), abort();
    l->d->kernels = set;
    l->rows = mem_alloc((size_t)T * (size_t)l->width * sizeof *l->rows), l->q = mem_alloc((size_t)T * (size_t)l->width * sizeof *l->q);
    l->o = mem_alloc((size_t)T * (size_t)values * sizeof *l->o), l->pos = mem_alloc((size_t)T * sizeof *l->pos);
    for (int i = 0; i < T * l->width; i++) l->rows[i] = 2 * lin_real(&l->seed);
    for (int i = 0; i < T; i++) l->pos[i] = i;
    l->step = (toka_step){.pos = l->pos, .states = l->span};
}

static void lin_close(lin *l) {
    toka_cpu.close(l->d);
    free(l->memory), free(l->rows), free(l->q), free(l->o), free(l->pos);
}

/* Rows t .. t+n-1 of one sequence, whose state is `state`. */
static void lin_run(lin *l, int t, int n, int state) {
    const size_t from = (size_t)t * (size_t)l->width;
    memcpy(l->q + from, l->rows + from, (size_t)n * (size_t)l->width * sizeof *l->q);
    l->span[0] = (toka_state_span){0, n, t ? state : -1, state};
    l->step.T = n, l->step.n_states = 1, l->step.pos = l->pos + t;
    toka_cpu.attention(l->d, &l->step, 0, (toka_dev_ptr){(uintptr_t)(l->q + from)}, (toka_dev_ptr){(uintptr_t)(l->o + (size_t)t * (size_t)l->o_width)});
}
