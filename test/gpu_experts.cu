/* gpu_experts.cu - tests the kernels of experts: the choice of every kind of router against float64, the sorted pairs, the grouped
 * GEMMs against float64 with every tile width, and the sum.
 *   gpu_experts              all checks
 *   gpu_experts quick        fewer shapes
 *   gpu_experts small        still fewer (for compute-sanitizer)
 *   gpu_experts bench        times of whole layers: Qwen3-30B-A3B and Mixtral-8x7B */
#include "../toka_kernels.cu"

#include <memory>

#include "gpu.cuh"

/* ---- The lists of a step, with guard bands ---- */

struct lists_memory {
    int T, X, k;
    gpu_buf<float> weights;
    gpu_buf<short> chosen;
    gpu_buf<int> pairs, counts, first, first_tile, rows;
    gpu_buf<uint32_t> tokens;
    lists_memory(int T_, int X_, int k_)
        : T(T_), X(X_), k(k_), weights((size_t)T * k), chosen((size_t)T * k), pairs((size_t)T * k), counts((size_t)X), first((size_t)X + 1),
          first_tile((size_t)X + 1), rows((size_t)T * k), tokens((size_t)X * ceil_div(T, ROUTE_TOKENS)) {
        GPU_OK(cudaMemset(counts.p(), 0, counts.n * sizeof(int)));
    }
    expert_lists lists() {
        return {weights.p(), chosen.p(), pairs.p(), tokens.p(), counts.p(), first.p(), first_tile.p(), rows.p(), ceil_div(T, ROUTE_TOKENS)};
    }
    bool guards_hold() {
        return weights.guards_hold() && chosen.guards_hold() && pairs.guards_hold() && counts.guards_hold() && first.guards_hold() &&
               first_tile.guards_hold() && rows.guards_hold() && tokens.guards_hold();
    }
};

/* ---- The router, by definition ---- */

static bool is_in_top(const std::vector<double> &score, int n, int i, int k) {
    int before = 0;
    for (int j = 0; j < n; j++) before += score[(size_t)j] > score[(size_t)i] || (score[(size_t)j] == score[(size_t)i] && j < i);
    return before < k;
}
static void ref_softmax(std::vector<double> &s) {
    double largest = -INFINITY, sum = 0;
    for (double v : s) largest = fmax(largest, v);
    for (double &v : s) sum += v = exp(v - largest);
    for (double &v : s) v /= sum;
}
/* The weight of each expert; -1: not chosen. */
static std::vector<double> ref_route(const expert_router &r, const float *logits, const std::vector<float> &bias, const std::vector<float> &choice_bias) {
    std::vector<double> w((size_t)r.n_experts), choice, group((size_t)r.n_groups);
    const int size = r.n_experts / r.n_groups;
    double sum = 0;
    for (int i = 0; i < r.n_experts; i++) w[(size_t)i] = logits[i] + (r.bias ? bias[(size_t)i] : 0);
    if (r.kind == TOKA_ROUTER_SOFTMAX) ref_softmax(w);
    if (r.kind == TOKA_ROUTER_SIGMOID)
        for (double &v : w) v = 1 / (1 + exp(-v));
    choice = w;
    for (int i = 0; i < r.n_experts && r.choice_bias; i++) choice[(size_t)i] += choice_bias[(size_t)i];
    for (int g = 0; g < r.n_groups; g++) {
        std::vector<double> s(choice.begin() + g * size, choice.begin() + (g + 1) * size);
        std::sort(s.rbegin(), s.rend());
        group[(size_t)g] = r.groups_by_top2 && size > 1 ? s[0] + s[1] : s[0];
    }
    for (int i = 0; i < r.n_experts && r.n_groups > 1; i++)
        if (!is_in_top(group, r.n_groups, i / size, r.top_groups)) choice[(size_t)i] = -INFINITY;
    std::vector<bool> in((size_t)r.n_experts);
    for (int i = 0; i < r.n_experts; i++) in[(size_t)i] = is_in_top(choice, r.n_experts, i, r.top_k);
    for (int i = 0; i < r.n_experts && r.kind == TOKA_ROUTER_TOPK; i++)
        if (!in[(size_t)i]) w[(size_t)i] = -INFINITY;
    if (r.kind == TOKA_ROUTER_TOPK) ref_softmax(w);
    for (int i = 0; i < r.n_experts; i++) sum += in[(size_t)i] ? w[(size_t)i] : 0;
    for (int i = 0; i < r.n_experts; i++) w[(size_t)i] = in[(size_t)i] ? w[(size_t)i] * r.scale / (r.renormalize ? sum + 1e-20 : 1) : -1;
    return w;
}
/* The logits against float64; a row alone gives the same bits. */
static void test_router_gemm(toka_device *d, int T, int N, int K) {
    const int ldx = K + 8;
    gpu_buf<bf16> x((size_t)T * ldx), w((size_t)N * K);
    gpu_buf<float> y((size_t)T * N), alone((size_t)N);
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 1);
    GPU_OK(cudaDeviceSynchronize());
    const std::vector<bf16> hx = x.host(), hw = w.host();
    const int last = T - 1;
    router_gemm(d, {x.p(), w.p(), y.p(), T, N, K, ldx});
    router_gemm(d, {x.p() + (size_t)last * ldx, w.p(), alone.p(), 1, N, K, ldx});
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<float> got = y.host(), one = alone.host();
    int wrong = 0;
    for (int t = 0; t < T; t += T > 64 ? 37 : 1)
        for (int n = 0; n < N; n++) {
            double sum = 0, size = 0;
            for (int k = 0; k < K; k++) {
                const double p = (double)__bfloat162float(hx[(size_t)t * ldx + k]) * __bfloat162float(hw[(size_t)n * K + k]);
                sum += p, size += fabs(p);
            }
            wrong += !(fabs(got[(size_t)t * N + n] - sum) <= size * 1e-6 + 1e-6);
        }
    const bool same = !memcmp(&got[(size_t)last * N], one.data(), one.size() * sizeof(float));
    gpu_check(!wrong && same && y.guards_hold() && alone.guards_hold(), "router's GEMM T=%d N=%d K=%d: %d wrong%s %s", T, N, K, wrong,
              same ? "" : ", the last row alone differs", d->error.msg);
}
static void test_route(toka_device *d, int T, expert_router r, bool has_bias, bool has_choice_bias, const char *name) {
    const int X = r.n_experts, k = r.top_k, ld = X + 3, tile_rows = 16;
    std::vector<float> logits((size_t)T * ld), bias((size_t)X), choice_bias((size_t)X);
    /* steps of 1/8, so that equal scores occur and unequal ones are far apart */
    for (size_t i = 0; i < logits.size(); i++) logits[i] = roundf(8 * gpu_normal(gpu_seed + 1, i)) / 8;
    for (size_t i = 0; i < bias.size(); i++) bias[i] = roundf(8 * gpu_normal(gpu_seed + 2, i)) / 8, choice_bias[i] = roundf(gpu_normal(gpu_seed + 3, i));
    gpu_buf<float> dl(logits.size()), db(bias.size()), dc(bias.size());
    dl.set(logits), db.set(bias), dc.set(choice_bias);
    r.bias = has_bias ? db.p() : NULL, r.choice_bias = has_choice_bias ? dc.p() : NULL;
    lists_memory m(T, X, k);
    expert_route(d, dl.p(), ld, T, r, m.lists(), tile_rows);
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<float> weights = m.weights.host();
    const std::vector<short> chosen = m.chosen.host();
    const std::vector<int> pairs = m.pairs.host(), first = m.first.host(), first_tile = m.first_tile.host(), rows = m.rows.host(), counts = m.counts.host();
    int wrong = 0, misplaced = 0;
    std::vector<std::vector<int>> of((size_t)X);
    for (int t = 0; t < T; t++) {
        const std::vector<double> want = ref_route(r, &logits[(size_t)t * ld], bias, choice_bias);
        int n = 0;
        for (int i = 0; i < X; i++) {
            if (want[(size_t)i] < 0) continue;
            const size_t at = (size_t)t * k + n++;
            wrong += chosen[at] != i || !(fabs(weights[at] - want[(size_t)i]) <= 2e-6 * fabs(want[(size_t)i]) + 1e-9);
            of[(size_t)i].push_back(t);
        }
        wrong += n != k;
    }
    for (int i = 0, n = 0, tiles = 0; i < X; i++) {
        misplaced += first[(size_t)i] != n || first_tile[(size_t)i] != tiles || counts[(size_t)i] != (T > ROUTE_TOKENS ? (int)of[(size_t)i].size() : 0);
        for (int t : of[(size_t)i]) {
            misplaced += rows[(size_t)n] != t;
            int found = 0;
            for (int j = 0; j < k; j++) found += chosen[(size_t)t * k + j] == i && pairs[(size_t)t * k + j] == n;
            misplaced += found != 1;
            n++;
        }
        tiles += ceil_div((int)of[(size_t)i].size(), tile_rows);
        if (i == X - 1) misplaced += first[(size_t)X] != n || first_tile[(size_t)X] != tiles;
    }
    gpu_check(!wrong && !misplaced && m.guards_hold(), "route %s T=%d X=%d k=%d: %d wrong, %d misplaced %s", name, T, X, k, wrong, misplaced, d->error.msg);
}
/* Logits that are NaN or infinite still give k experts a token. */
static void test_route_nan(toka_device *d) {
    const int T = 64, X = 40, k = 5;
    for (int kind = 0; kind < 3; kind++) {
        std::vector<float> logits((size_t)T * X);
        for (size_t i = 0; i < logits.size(); i++) logits[i] = i % 3 == 0 || i / X == 7 ? NAN : i % 5 == 0 ? INFINITY : -INFINITY;
        gpu_buf<float> dl(logits.size());
        dl.set(logits);
        lists_memory m(T, X, k);
        expert_route(d, dl.p(), X, T, expert_router{X, k, (toka_router_kind)kind, 1, 1, true, false, 1, NULL, NULL}, m.lists(), 8);
        GPU_OK(cudaStreamSynchronize(d->stream));
        const std::vector<short> chosen = m.chosen.host();
        int wrong = m.first.host()[(size_t)X] != T * k;
        for (int i = 0; i < T * k; i++) wrong += chosen[(size_t)i] < 0 || chosen[(size_t)i] >= X || (i % k && chosen[(size_t)i] <= chosen[(size_t)i - 1]);
        gpu_check(!wrong, "route kind %d of NaN: %d wrong %s", kind, wrong, d->error.msg);
    }
}

/* ---- The grouped GEMM ---- */

/* One thread a number of y. scale: NULL, or W and x are e4m3 (struct weight). */
__global__ static void ref_experts(expert_gemm_args a, const void *w, bool blocked, bool swiglu_rows, int n_pairs, double *value, double *size) {
    const int n_out = swiglu_rows ? a.N / 2 : a.N, n = (int)(blockIdx.x * blockDim.x + threadIdx.x), pair = (int)blockIdx.y;
    if (n >= n_out || pair >= n_pairs) return;
    int e = 0;
    while (a.first[e + 1] <= pair) e++;
    double sum[2] = {}, abs_sum[2] = {};
    for (int part = 0; part < (swiglu_rows ? 2 : 1); part++) {
        const int n_row = swiglu_rows ? n / 8 * 16 + n % 8 + 8 * part : n, row_x = a.rows ? a.rows[pair] : pair, blocks_n = (a.N + 127) / 128;
        const size_t at = (size_t)e * a.N + n_row;
        for (int k = 0; k < a.K; k++) {
            double p;
            if (a.w_scale) {
                const double scale = blocked ? a.w_scale[((size_t)e * ((a.K + 127) / 128) * blocks_n + (size_t)(k / 128) * blocks_n + n_row / 128) * 2 +
                                                         n_row / 8 % 2]
                                             : a.w_scale[at];
                p = gpu_fp8_value(((const uint8_t *)a.x)[(size_t)row_x * 2 * a.ldx + k]) *
                    gpu_fp8_value(((const uint8_t *)w)[at * ((a.K + 15) / 16 * 16) + k]) * scale * a.x_scale[row_x];
            } else p = (double)__bfloat162float(a.x[(size_t)row_x * a.ldx + k]) * (double)__bfloat162float(((const bf16 *)w)[at * a.K + k]);
            sum[part] += p, abs_sum[part] += fabs(p);
        }
        if (a.bias) sum[part] += a.bias[at], abs_sum[part] += fabs(a.bias[at]);
    }
    double gate = sum[0], up = sum[1], slope = 1;
    if (a.limit != 0) gate = fmin(gate, (double)a.limit), up = fmax(-(double)a.limit, fmin(up, (double)a.limit)) + 1, slope = 1.702;
    const double s = gate / (1 + exp(-slope * gate));
    value[(size_t)pair * n_out + n] = swiglu_rows ? s * up : sum[0];
    size[(size_t)pair * n_out + n] = swiglu_rows ? 1.1 * abs_sum[0] * fabs(up) + fabs(s) * abs_sum[1] : abs_sum[0];
}
/* Codes 8 .. 15 of e2m1 are the negative ones. */
__device__ static const float e2m1[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
/* Random codes, and scales between 2^-14 and 2; the values that they stand for, which bf16 holds exactly. One thread a block of 32 columns. */
__global__ static void fill_mxfp4(uint8_t *codes, uint8_t *scales, bf16 *values, size_t n, uint64_t seed) {
    const size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    scales[i] = (uint8_t)(113 + gpu_mix(seed + i) % 16);
    for (size_t k = 0; k < 16; k++) {
        const uint8_t pair = codes[16 * i + k] = (uint8_t)gpu_mix(seed + 77 + 16 * i + k);
        for (int half = 0; half < 2; half++) {
            const int code = pair >> 4 * half & 15;
            values[32 * i + 2 * k + (size_t)half] = __float2bfloat16(ldexpf(code & 8 ? -e2m1[code & 7] : e2m1[code & 7], scales[i] - 127));
        }
    }
}
static size_t mxfp4_bytes(int N, int K) { return (size_t)ceil_div(N, MXFP4_ROWS) * ceil_div(K, MXFP4_COLS) * MXFP4_BLOCK_BYTES; }
/* Writes X random matrices [N][K] as the loader stores them to `to`, and their values. */
static void make_mxfp4(int X, int N, int K, uint8_t *to, bf16 *values) {
    const size_t each = (size_t)N * K / 32;
    gpu_buf<uint8_t> codes(16 * each), scales(each);
    GPU_OK(cudaMemset(to, 0, X * mxfp4_bytes(N, K)));
    for (int i = 0; i < X; i++) {
        load_job job = {};
        job.to = to + (size_t)i * mxfp4_bytes(N, K), job.stride = ceil_div(K, MXFP4_COLS) * MXFP4_COLS;
        fill_mxfp4<<<(unsigned)((each + 255) / 256), 256>>>(codes.p(), scales.p(), values + 32 * each * (size_t)i, each, gpu_seed + 100 * (uint64_t)i);
        load_mxfp4_kernel<<<(unsigned)((each + 255) / 256), 256>>>((const uint4 *)codes.p(), scales.p(), 0, each, K, job);
    }
    GPU_OK(cudaDeviceSynchronize());
}
enum weights_kind { W_BF16, W_ROWS, W_BLOCKS, W_MXFP4 };
static const char *const kind_names[] = {"bf16", "FP8 rows", "FP8 blocks", "MXFP4"};
/* counts[e]: rows of expert e. gathered: the rows are scattered over x. */
static void test_gemm(toka_device *d, const std::vector<int> &counts, int N, int K, bool swiglu_rows, bool gathered, weights_kind kind, bool biased) {
    if (kind == W_MXFP4) K = K / 32 * 32; /* a scale for each 32 columns */
    const bool fp8 = kind == W_ROWS || kind == W_BLOCKS;
    const int X = (int)counts.size(), n_out = swiglu_rows ? N / 2 : N, ldx = K + 8, ldy = n_out + 8;
    std::vector<int> first(1), rows;
    for (int c : counts) first.push_back(first.back() + c);
    const int n_pairs = first.back(), T = gathered ? std::max(1, *std::max_element(counts.begin(), counts.end())) + 5 : std::max(1, n_pairs);
    for (int e = 0; e < X; e++)
        for (int i = 0; i < counts[(size_t)e]; i++) rows.push_back((i * 7 + e * 3) % T);
    const size_t each = kind == W_BLOCKS ? (size_t)ceil_div(K, 128) * ceil_div(N, 128) * 2 : (size_t)N;
    gpu_buf<float> w_scale((size_t)X * each), x_scale((size_t)T);
    gpu_buf<uint8_t> codes(fp8 ? (size_t)X * N * fp8_row_bytes(K) : kind == W_MXFP4 ? X * mxfp4_bytes(N, K) : 1);
    gpu_buf<float> bias((size_t)X * N);
    gpu_buf<bf16> x((size_t)T * ldx), w((size_t)X * N * K), y((size_t)std::max(1, n_pairs) * ldy);
    gpu_buf<int> dfirst(first.size()), dtile(first.size()), drows(std::max<size_t>(1, rows.size()));
    gpu_buf<double> value((size_t)std::max(1, n_pairs) * n_out), size(value.n);
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 1 / sqrtf((float)K));
    dfirst.set(first), drows.set(rows);
    gpu_random(bias, gpu_seed + 8, 1);
    if (kind == W_MXFP4) make_mxfp4(X, N, K, codes.p(), w.p());
    if (fp8) {
        std::vector<float> ws(w_scale.n), xs(x_scale.n);
        for (size_t i = 0; i < ws.size(); i++) ws[i] = ldexpf(1 + gpu_uniform(gpu_seed + 5, i), (int)(i * 7 % 5) - 12);
        for (size_t i = 0; i < xs.size(); i++) xs[i] = ldexpf(1 + gpu_uniform(gpu_seed + 6, i), (int)(i % 3) - 8) / sqrtf((float)K);
        w_scale.set(ws), x_scale.set(xs);
        gpu_fill_fp8<<<1056, 256>>>((uint8_t *)x.p(), x.n * 2, gpu_seed + 1, false);
        gpu_fill_fp8<<<1056, 256>>>(codes.p(), codes.n, gpu_seed + 2, false);
    }
    weight W = {kind ? (bf16 *)codes.p() : w.p(), NULL, N, K, fp8 ? w_scale.p() : NULL, kind == W_BLOCKS};
    W.is_mxfp4 = kind == W_MXFP4;
    expert_gemm_args a = {x.p(), y.p(), gathered ? drows.p() : NULL, dfirst.p(), dtile.p(), X, N, K, ldx, ldy, x_scale.p(), W.scale, W.data,
                          biased ? bias.p() : NULL, biased && swiglu_rows ? 1.5f : 0, n_pairs};
    ref_experts<<<dim3((unsigned)ceil_div(n_out, 128), (unsigned)std::max(1, n_pairs)), 128>>>(a, fp8 ? (void *)W.data : w.p(), kind == W_BLOCKS, swiglu_rows, n_pairs, value.p(),
                                                                                               size.p());
    GPU_OK(cudaDeviceSynchronize());
    const std::vector<double> want = value.host(), bound = size.host();
    std::vector<bf16> before;
    /* FP8: what the tensor cores cut of a sum (test/results/trials-fp8-promotion.md) */
    const double sum_error = fp8 ? 1e-3 / sqrt(std::max(1.0, K / 128.0)) : 4e-6;
    for (int tile_rows = 8; tile_rows <= (kind ? 128 : 256); tile_rows *= 2) {
        std::vector<int> tiles(1);
        for (int c : counts) tiles.push_back(tiles.back() + ceil_div(c, tile_rows));
        dtile.set(tiles);
        y.poison();
        swiglu_rows ? expert_gemm<true>(d, &W, tile_rows, a) : expert_gemm<false>(d, &W, tile_rows, a);
        GPU_OK(cudaStreamSynchronize(d->stream));
        const std::vector<bf16> got = y.host();
        int wrong = 0, unlike = 0;
        for (int p = 0; p < n_pairs; p++)
            for (int n = 0; n < n_out; n++) {
                const size_t at = (size_t)p * n_out + n;
                const double v = __bfloat162float(got[(size_t)p * ldy + n]), error = fabs(v - want[at]);
                wrong += !(error <= fabs(want[at]) / 250 + sum_error * bound[at] + 1e-30);
            }
        for (int p = 0; p < n_pairs; p++)
            for (int n = n_out; n < ldy; n++) wrong += *(const uint16_t *)&got[(size_t)p * ldy + n] != 0xFFFF;
        if (!before.empty()) unlike = memcmp(before.data(), got.data(), got.size() * 2) != 0;
        before = got;
        gpu_check(!wrong && !unlike && y.guards_hold(), "experts %s X=%d pairs=%d N=%d K=%d %s%s%s, tiles of %d: %d wrong, %d unlike %s",
                  kind_names[kind], X, n_pairs, N, K, swiglu_rows ? "swiglu" : "store", gathered ? " gathered" : "", biased ? " biased" : "", tile_rows, wrong,
                  unlike, d->error.msg);
    }
}

/* ---- The sum, and the counts ---- */

static void test_sum(toka_device *d, int T, int E, int k, bool shared, bool gate, bool adds) {
    const int X = 37;
    gpu_buf<bf16> x((size_t)T * E), out((size_t)T * k * E), sh((size_t)T * E);
    gpu_buf<float> gates((size_t)T * 3);
    lists_memory m(T, X, k);
    std::vector<int> pairs;
    for (int i = 0; i < T * k; i++) pairs.push_back((int)(gpu_mix(gpu_seed + (uint64_t)i) % (uint64_t)(T * k)));
    m.pairs.set(pairs);
    gpu_random(m.weights, gpu_seed + 5, 1), gpu_random(x, gpu_seed, 1), gpu_random(out, gpu_seed + 1, 1), gpu_random(sh, gpu_seed + 2, 1);
    gpu_random(gates, gpu_seed + 3, 2);
    GPU_OK(cudaMemset(m.counts.p(), 1, m.counts.n * sizeof(int)));
    GPU_OK(cudaDeviceSynchronize());
    const std::vector<bf16> x0 = x.host(), o = out.host(), s = sh.host();
    const std::vector<float> w = m.weights.host(), g = gates.host();
    const expert_sum_args args = {x.p(), out.p(), shared ? sh.p() : NULL, gate ? gates.p() + 1 : NULL, 3, E, k, X, adds};
    launch_dependent(d, "sum", expert_sum_kernel, {dim3((unsigned)T), 128}, args, m.lists());
    GPU_OK(cudaStreamSynchronize(d->stream));
    const std::vector<bf16> got = x.host();
    int wrong = 0;
    for (int t = 0; t < T; t++)
        for (int c = 0; c < E; c++) {
            double want = adds ? __bfloat162float(x0[(size_t)t * E + c]) : 0;
            for (int i = 0; i < k; i++) want += (double)w[(size_t)t * k + i] * __bfloat162float(o[(size_t)pairs[(size_t)t * k + i] * E + c]);
            if (shared) want += (gate ? 1 / (1 + exp(-(double)g[(size_t)t * 3 + 1])) : 1) * __bfloat162float(s[(size_t)t * E + c]);
            wrong += !(fabs(__bfloat162float(got[(size_t)t * E + c]) - want) <= fabs(want) / 250 + 1e-5);
        }
    for (int c : m.counts.host()) wrong += c != 0;
    gpu_check(!wrong && x.guards_hold(), "sum T=%d E=%d k=%d%s%s%s: %d wrong %s", T, E, k, shared ? " shared" : "", gate ? " gate" : "", adds ? " adds" : "",
              wrong, d->error.msg);
}

/* ---- A whole layer: sizes begin with the largest ---- */

struct layer_memory {
    gpu_buf<bf16> router, gate_up, down, xn, x;
    std::unique_ptr<gpu_buf<uint8_t>> up_codes, down_codes; /* MXFP4 */
    layer_experts layer = {};
    int T, E;
    layer_memory(toka_device *d, int T_, int E_, int F, int X, int k, bool mxfp4 = false)
        : router((size_t)X * E_), gate_up((size_t)X * 2 * F * E_), down((size_t)X * E_ * F), xn((size_t)T_ * E_, (size_t)GEMM_PAD_ROWS * E_),
          x((size_t)T_ * E_), T(T_), E(E_) {
        gpu_random(router, gpu_seed, 4 / sqrtf((float)E)), gpu_random(gate_up, gpu_seed + 1, 1 / sqrtf((float)E));
        gpu_random(down, gpu_seed + 2, 1 / sqrtf((float)F)), gpu_random(xn, gpu_seed + 3, 1), gpu_random(x, gpu_seed + 4, 1);
        layer.router = expert_router{X, k, TOKA_ROUTER_SOFTMAX, 1, 1, true, false, 1, NULL, NULL};
        layer.logits = weight{router.p(), NULL, X, E};
        layer.gate_up = weight{gate_up.p(), NULL, 2 * F, E}, layer.down = weight{down.p(), NULL, E, F};
        if (mxfp4) {
            up_codes = std::make_unique<gpu_buf<uint8_t>>(X * mxfp4_bytes(2 * F, E)), down_codes = std::make_unique<gpu_buf<uint8_t>>(X * mxfp4_bytes(E, F));
            make_mxfp4(X, 2 * F, E, up_codes->p(), gate_up.p()), make_mxfp4(X, E, F, down_codes->p(), down.p());
            layer.gate_up.data = (bf16 *)up_codes->p(), layer.down.data = (bf16 *)down_codes->p();
            layer.gate_up.is_mxfp4 = layer.down.is_mxfp4 = true;
        }
        d->E = E, d->xn = xn.p(), d->options.max_tokens = T;
        GPU_OK(cudaDeviceSynchronize());
    }
};
static void run_layer(toka_device *d, layer_memory &m, int T, toka_shape *shape, toka_step *step) {
    layer_weights layers[1] = {};
    layers[0].experts = &m.layer;
    *shape = toka_shape{.L = 1};
    d->shape = shape, d->layers = layers;
    if (!d->experts) experts_open(d);
    *step = toka_step{.T = T};
    d->step = step;
    experts_run(d, &m.layer, m.x.p());
    d->layers = NULL;
}
/* A row's result does not depend on its neighbours: it has the same bits in steps of all sizes. */
static void test_layer(toka_device *d, int E, int F, int X, int k, const std::vector<int> &sizes, bool mxfp4 = false) {
    toka_shape shape;
    toka_step step;
    const int most = *std::max_element(sizes.begin(), sizes.end());
    layer_memory m(d, most, E, F, X, k, mxfp4);
    const std::vector<bf16> x0 = m.x.host();
    std::vector<bf16> all;
    for (int T : sizes) {
        for (int repeat = 0; repeat < 3; repeat++) {
            m.x.set(x0);
            run_layer(d, m, T, &shape, &step);
            GPU_OK(cudaStreamSynchronize(d->stream));
            const std::vector<bf16> got = m.x.host();
            int unlike = 0, same = 0;
            for (int t = 0; t < T; t++) {
                unlike += !all.empty() && memcmp(&all[(size_t)t * E], &got[(size_t)t * E], (size_t)E * 2);
                same += !memcmp(&x0[(size_t)t * E], &got[(size_t)t * E], (size_t)E * 2);
            }
            if (all.empty()) all = got;
            gpu_check(!unlike && !same && m.x.guards_hold(), "layer E=%d F=%d X=%d k=%d T=%d: %d rows differ, %d unchanged %s", E, F, X, k, T, unlike, same,
                      d->error.msg);
        }
    }
    while (d->n_allocations) cudaFree(d->allocations[--d->n_allocations]);
    free(d->experts), d->experts = NULL;
}

static void bench_layer(toka_device *d, const char *name, int E, int F, int X, int k, bool mxfp4 = false) {
    printf("%s%s: E %d F %d X %d k %d\n      T  us a layer     gate/up        down  TFLOP/s  TB/s of weights that are touched\n", name, mxfp4 ? " in MXFP4" : "", E, F, X, k);
    for (int T : {1, 8, 64, 512, 4096, 8192}) {
        toka_shape shape;
        toka_step step;
        layer_memory m(d, T, E, F, X, k, mxfp4);
        const double us = gpu_time_us(d->stream, 8, 9, [&](int) { run_layer(d, m, T, &shape, &step); });
        const int tile_rows = expert_tile_rows(T, k, X, !mxfp4);
        const double up_us = gpu_time_us(d->stream, 8, 9, [&](int) { expert_gemm<true>(d, &m.layer.gate_up, tile_rows, experts_up_args(d, &m.layer)); }),
                     down_us = gpu_time_us(d->stream, 8, 9, [&](int) { expert_gemm<false>(d, &m.layer.down, tile_rows, experts_down_args(d, &m.layer)); });
        const double touched = X * (1 - pow(1 - (double)k / X, T)), bytes = touched * (mxfp4 ? 3.0 * 17 / 32 : 6.0) * E * F, flop = 6.0 * T * k * (double)E * F;
        printf("%7d  %10.1f  %10.1f  %10.1f  %7.0f  %.2f\n", T, us, up_us, down_us, flop / (up_us + down_us) * 1e-6, bytes / (up_us + down_us) * 1e-6);
        while (d->n_allocations) cudaFree(d->allocations[--d->n_allocations]);
        free(d->experts), d->experts = NULL;
    }
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    const bool small = argc > 1 && !strcmp(argv[1], "small"), quick = small || (argc > 1 && !strcmp(argv[1], "quick"));
    if (!d->hopper) return printf("0 passed, 0 failed, 1 skipped: experts need a Hopper GPU\n"), 0;
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        setlinebuf(stdout);
        bench_layer(d, "Qwen3-30B-A3B", 2048, 768, 128, 8);
        bench_layer(d, "Mixtral-8x7B", 4096, 14336, 8, 2);
        bench_layer(d, "GPT-OSS-20B", 2880, 2880, 32, 4, true);
        bench_layer(d, "GPT-OSS-120B", 2880, 2880, 128, 4, true);
        return 0;
    }
    for (int T : small ? std::vector<int>{9, 530} : std::vector<int>{1, 8, 9, 33, 512, 513, 1100})
        for (int N : {8, 136, 72})
            for (int K : small ? std::vector<int>{264} : std::vector<int>{8, 72, 128, 2048}) test_router_gemm(d, T, N, K);
    for (int T : small ? std::vector<int>{33} : std::vector<int>{1, 31, 33, 300, 9000}) {
        test_route(d, T, expert_router{128, 8, TOKA_ROUTER_SOFTMAX, 1, 1, true, false, 1, NULL, NULL}, false, false, "softmax");
        test_route(d, T, expert_router{32, 4, TOKA_ROUTER_TOPK, 1, 1, false, false, 1, NULL, NULL}, true, false, "topk");
        test_route(d, T, expert_router{256, 8, TOKA_ROUTER_SIGMOID, 8, 4, true, true, 2.5f, NULL, NULL}, false, true, "sigmoid, groups by two");
        test_route(d, T, expert_router{160, 6, TOKA_ROUTER_SOFTMAX, 8, 3, false, false, 16, NULL, NULL}, false, false, "softmax, groups");
        if (T <= 300) test_route(d, T, expert_router{512, 10, TOKA_ROUTER_SOFTMAX, 1, 1, true, false, 1, NULL, NULL}, false, false, "softmax");
        test_route(d, T, expert_router{8, 2, TOKA_ROUTER_SOFTMAX, 1, 1, true, false, 1, NULL, NULL}, false, false, "softmax");
        test_route(d, T, expert_router{5, 5, TOKA_ROUTER_SIGMOID, 1, 1, false, false, 1, NULL, NULL}, true, true, "all");
    }
    test_route_nan(d);
    for (weights_kind kind : {W_BF16, W_ROWS, W_BLOCKS, W_MXFP4})
        for (int form = 0; form < 8; form++) {
            const bool swiglu_rows = form & 1, gathered = form & 2, biased = form & 4;
            if (biased && (kind == W_ROWS || kind == W_BLOCKS) && form != 7) continue;
            test_gemm(d, {3, 0, 1, 9}, 128, 128, swiglu_rows, gathered, kind, biased);
            if (small) continue;
            test_gemm(d, {0, 0, 0, 0, 0}, 128, 64, swiglu_rows, gathered, kind, biased);
            test_gemm(d, {0, 0, 65, 0}, 256, 72, swiglu_rows, gathered, kind, biased);
            test_gemm(d, {8, 9, 16, 17, 31, 64, 65, 0, 128, 129, 1, 0}, 208, 520, swiglu_rows, gathered, kind, biased);
            if (quick) continue;
            test_gemm(d, {256, 257, 300, 0, 7, 1}, 1536, 2048, swiglu_rows, gathered, kind, biased);
            test_gemm(d, {1000}, 400, 768, swiglu_rows, gathered, kind, biased);
        }
    for (int i = 0; i < 8; i++) test_sum(d, 1 + 9 * i, i % 2 ? 1032 : 64, 1 + i, i & 1, i & 2, i & 4);
    test_layer(d, 256, 128, 16, 4, small ? std::vector<int>{5} : std::vector<int>{64, 1, 7, 63});
    if (!small) test_layer(d, 320, 192, 8, 4, {200, 64, 1, 7, 63}, true);
    if (!quick) test_layer(d, 2880, 2880, 32, 4, {1030, 64, 1, 8, 33, 513}, true);
    if (!quick) test_layer(d, 2048, 768, 128, 8, {1030, 64, 1, 8, 9, 33, 65, 512, 513});
    return gpu_report();
}
