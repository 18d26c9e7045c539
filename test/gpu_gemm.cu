/* gpu_gemm.cu - tests the wgmma GEMM: every instance and epilogue against float64. It also times
 * them.
 *   gpu_gemm               all checks
 *   gpu_gemm small         a few launches of every instance (for compute-sanitizer)
 *   gpu_gemm quick         a few more
 *   gpu_gemm tiny          one launch of each (for racecheck)
 *   gpu_gemm bench [--json, --paced] [SHAPE ...]
 *       a table of times. --json: one line of JSON for each shape. --paced: the next shape at each
 *       line of input (for test/bench_peers.py). SHAPE: part of a line like "Llama-3.1-8B qkv+ M=512"
 *   gpu_gemm sweep [SHAPE ...]
 *       times of every instance, from which gemm_cost was fitted. From M = 4096 on also with other
 *       raster_m. For qkv+ also the plain GEMM followed by rope_kernel */
#include "../toka_kernels.cu"
#include "gpu.cuh"
#include <memory>

/* ---- References ---- */

/* acc[i][n] = sum over k of x[rows[i]][k] w[n][k] in float64; size[i][n]: the same sum of absolute
 * values. Grid (N/16, rows/16), block 16x16. */
__global__ static void ref_gemm(const bf16 *x, int ldx, const bf16 *w, const int *rows, int n_rows, int N, int K, double *acc,
                                double *size) {
    __shared__ double xs[16][17], ws[16][17];
    int n = blockIdx.x * 16 + threadIdx.x, i = blockIdx.y * 16 + threadIdx.y, wn = blockIdx.x * 16 + threadIdx.y;
    double a = 0, s = 0;
    for (int k0 = 0; k0 < K; k0 += 16) {
        int k = k0 + threadIdx.x;
        xs[threadIdx.y][threadIdx.x] = i < n_rows && k < K ? (double)__bfloat162float(x[(size_t)rows[i] * ldx + k]) : 0;
        ws[threadIdx.y][threadIdx.x] = wn < N && k < K ? (double)__bfloat162float(w[(size_t)wn * K + k]) : 0;
        __syncthreads();
        for (int q = 0; q < 16; q++) {
            double p = xs[threadIdx.y][q] * ws[threadIdx.x][q];
            a += p, s += fabs(p);
        }
        __syncthreads();
    }
    if (i < n_rows && n < N) acc[(size_t)i * N + n] = a, size[(size_t)i * N + n] = s;
}

struct ref_args { /* what the checks below need to compute the expected y */
    const double *acc, *size;
    const int *rows;
    int n_rows, M, N, ldy;
    const bf16 *y, *before; /* before: y before the call (EPI_RESIDUAL) */
    const float *bias;
    int epi, D;
    qkv_params qkv;
    bool twice; /* qkv was rounded to bf16 before norm and RoPE */
};
struct ref_result {
    unsigned long long wrong, seen;
    float worst; /* the largest |error| / allowed error */
};
/* rounding: the relative rounding error of the output type. */
__device__ static void ref_compare(ref_result *r, float got, double want, double allowed_error, double rounding = 0x1.01p-8) {
    double allowed = fabs(want) * rounding + allowed_error + 1e-30, over = fabs((double)got - want) / allowed;
    atomicAdd(&r->seen, 1ull);
    if (!(over <= 1)) atomicAdd(&r->wrong, 1ull);
    if (over == over) atomicMax((int *)&r->worst, __float_as_int((float)over));
    else r->worst = NAN;
}
/* The relative error of float32 accumulation, of the sum of absolute values. */
static const double REF_SUM = 4e-6;
__device__ static double ref_sum(const ref_args &a, int i, int n) {
    return a.acc[(size_t)i * a.N + n] + (a.bias ? (double)a.bias[n] : 0);
}
/* Checks one head of one row after norm and RoPE. */
__device__ static void ref_head(const ref_args &a, int i, int head, ref_result *r) {
    const qkv_params &p = a.qkv;
    int D = a.D, row = a.rows[i], kv = head - p.H, kv_slot = p.kv_slot[row];
    const float *w = head < p.H ? p.q_norm : head < p.H + p.K ? p.k_norm : NULL;
    double v[256], allowed_error[256], scale = 1;
    for (int e = 0; e < D; e++) v[e] = ref_sum(a, i, head * D + e), allowed_error[e] = REF_SUM * a.size[(size_t)i * a.N + head * D + e];
    for (int e = 0; e < D && a.twice; e++) allowed_error[e] += 0x1.01p-8 * fabs(v[e]);
    if (w) {
        double sum = 0;
        for (int e = 0; e < D; e++) sum += v[e] * v[e];
        scale = 1 / sqrt(sum / D + p.eps);
        for (int e = 0; e < D; e++) {
            allowed_error[e] = 3 * allowed_error[e] * scale * fabs(w[e]) + 1e-5 * fabs(v[e] * scale * w[e]);
            v[e] *= scale * w[e];
        }
    }
    const bf16 *at = p.q + ((size_t)row * p.H + head) * D;
    if (kv >= 0) at = p.kv + ((((size_t)(kv_slot / p.B) * p.K + kv % p.K) * 2 + kv / p.K) * p.B + kv_slot % p.B) * D;
    for (int e = 0; e < D / 2; e++) {
        double x = v[e], y = v[e + D / 2], s = allowed_error[e] + allowed_error[e + D / 2] + 1e-6 * (fabs(x) + fabs(y));
        if (kv < p.K) {
            float2 c = p.rope[(size_t)p.pos[row] * (D / 2) + e];
            v[e] = x * c.x - y * c.y, v[e + D / 2] = y * c.x + x * c.y;
        }
        ref_compare(r, __bfloat162float(at[e]), v[e], s);
        ref_compare(r, __bfloat162float(at[e + D / 2]), v[e + D / 2], s);
    }
}
__global__ static void ref_check(ref_args a, ref_result *r) {
    int cols = a.D ? a.N / a.D : a.epi == EPI_SWIGLU ? a.N / 2 : a.N;
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t e = first; e < (size_t)a.n_rows * cols; e += step) {
        int i = (int)(e / cols), n = (int)(e % cols), row = a.rows[i];
        if (a.D) {
            ref_head(a, i, n, r);
            continue;
        }
        size_t at = (size_t)row * a.ldy + n;
        double want, allowed_error;
        if (a.epi == EPI_SWIGLU) {
            int g = n / 8 * 16 + n % 8;
            double gate = ref_sum(a, i, g), up = ref_sum(a, i, g + 8), silu = gate / (1 + exp(-gate));
            want = silu * up;
            const double *size = a.size + (size_t)i * a.N + g;
            allowed_error = REF_SUM * (1.1 * size[0] * fabs(up) + size[8] * fabs(silu)) + 1e-6 * fabs(want);
        } else {
            want = ref_sum(a, i, n), allowed_error = REF_SUM * a.size[(size_t)i * a.N + n];
            if (a.epi == EPI_RESIDUAL) want += (double)__bfloat162float(a.before[at]);
        }
        if (a.epi == EPI_LOGITS) ref_compare(r, ((const float *)a.y)[at], want, allowed_error, 1e-7);
        else ref_compare(r, __bfloat162float(a.y[at]), want, allowed_error);
    }
}
/* Checks that y is unchanged in columns from `cols` on. */
__global__ static void ref_untouched(const bf16 *y, int M, int cols, int ldy, ref_result *r) {
    size_t first = blockIdx.x * (size_t)blockDim.x + threadIdx.x, step = (size_t)gridDim.x * blockDim.x;
    for (size_t e = first; e < (size_t)M * (ldy - cols); e += step) {
        size_t at = e / (ldy - cols) * ldy + cols + e % (ldy - cols);
        if (((const unsigned short *)y)[at] != 0xFFFF) atomicAdd(&r->wrong, 1ull);
    }
}

/* ---- One case ---- */

struct gemm_case {
    int M, N, K, kind; /* an epilogue, or GEMM_QKV64, GEMM_QKV128, GEMM_SCATTER */
    bool bias, norm; /* norm: with QK-norm */
    gemm_plan plan; /* v NULL: gemm_choose selects it */
    int pad = 8; /* columns after the rows of x and y that the GEMM must neither read nor write */
};

static std::string case_name(const gemm_case &c, const gemm_plan &p) {
    static const char *const kinds[] = {"store", "residual", "swiglu", "logits", "qkv64", "qkv128", "scatter"};
    char s[200];
    snprintf(s, sizeof s, "%s M %d N %d K %d%s%s: %sBN %d split %d mc %d group %d", kinds[c.kind], c.M, c.N, c.K,
             c.bias ? " bias" : "", c.norm ? " norm" : "", p.variant && p.variant->pingpong ? "ping-pong " : "", p.variant ? p.variant->bn : 0,
             p.variant ? p.variant->split : 0, p.multicast, p.raster_m);
    return s;
}
static int case_cols(const gemm_case &c) { return c.kind == EPI_SWIGLU ? c.N / 2 : c.N; }

/* Inputs and outputs of one case. x, W and y end where their shapes end; NaN follows. */
struct gemm_data {
    gemm_case c;
    int D, H, K, B = 16, ldx, ldy;
    gpu_buf<bf16> x, w, y, before, q, kv, ordered; /* ordered: w after qkv_reorder */
    gpu_buf<float> bias, ordered_bias, q_norm, k_norm;
    gpu_buf<float2> rope;
    gpu_buf<int> pos, kv_slot;
    weight W;
    qkv_params qkv = {};
    explicit gemm_data(const gemm_case &c_)
        : c(c_), D(c_.kind == GEMM_QKV64 ? 64 : c_.kind == GEMM_QKV128 ? 128 : 0),
          H(D ? c_.N / D - 2 * kv_heads() : 0), K(kv_heads()),
          ldx(c_.K + c_.pad), ldy(case_cols(c_) + c_.pad), x((size_t)c_.M * ldx, (size_t)GEMM_PAD_ROWS * ldx), w((size_t)c_.N * c_.K),
          y((size_t)c_.M * ldy * (c_.kind == EPI_LOGITS ? 2 : 1)),
          before(y.n), q(D ? (size_t)c_.M * H * D : 1), kv(D ? (size_t)(c_.M / B + 2) * B * 2 * K * D : 1), ordered(D ? w.n : 1),
          bias(c_.N), ordered_bias(c_.N), q_norm(256), k_norm(256), rope(64 * 1024), pos(c_.M), kv_slot(c_.M) {
        static uint64_t n;
        uint64_t s = gpu_seed * 1000 + 10 * ++n;
        gpu_random(x, s, 1);
        if (c.pad) GPU_OK(cudaMemset2D(x.p() + c.K, (size_t)ldx * 2, 0xFF, (size_t)c.pad * 2, c.M));
        gpu_random(w, s + 1, 1 / sqrtf((float)c.K));
        gpu_random(bias, s + 2, 1), gpu_random(q_norm, s + 3, 1), gpu_random(k_norm, s + 4, 1);
        W = {w.p(), c.bias ? bias.p() : NULL, c.N, c.K};
        gpu_random(before, s + 5, 1);
        if (!D) return;
        GPU_OK(cudaMemcpy(ordered.p(), w.p(), w.n * 2, cudaMemcpyDeviceToDevice));
        GPU_OK(cudaMemcpy(ordered_bias.p(), bias.p(), bias.n * 4, cudaMemcpyDeviceToDevice));
        W = {ordered.p(), c.bias ? ordered_bias.p() : NULL, c.N, c.K};
        qkv_reorder(gpu_device(), &W, D);
        rows(s + 6);
    }
    int kv_heads() const {
        int heads = c.N / (c.kind == GEMM_QKV64 ? 64 : 128);
        return c.kind < GEMM_QKV64 ? 1 : heads > 8 ? heads / 6 : 1;
    }
    void rows(uint64_t s) { /* positions, permuted kv_slots, the RoPE table */
        std::vector<int> p(c.M), t((c.M / B + 2) * B);
        std::vector<float2> cs(rope.n);
        for (size_t i = 0; i < t.size(); i++) t[i] = (int)i;
        for (size_t i = t.size() - 1; i > 0; i--) std::swap(t[i], t[gpu_mix(s + i) % (i + 1)]);
        for (int i = 0; i < c.M; i++) p[i] = (int)(gpu_mix(s * 7 + i) % (rope.n / (D / 2)));
        for (size_t i = 0; i < cs.size(); i++) {
            double a = (double)(i / (D / 2)) * pow(10000, -(double)(i % (D / 2)) / (D / 2));
            cs[i] = {(float)cos(a), (float)sin(a)};
        }
        t.resize(c.M);
        pos.set(p), kv_slot.set(t), rope.set(cs);
        qkv = {W.bias, c.norm ? q_norm.p() : NULL, c.norm ? k_norm.p() : NULL, 1e-6f, H, K, B, pos.p(), kv_slot.p(), rope.p(),
               q.p(), kv.p(), D};
    }
    gemm_plan plan(const toka_device *d) const {
        return c.plan.variant ? c.plan : gemm_choose(d, c.kind, c.M, c.N, c.K, c.norm);
    }
    void fresh() { /* sets y to its value before a call */
        y.poison(), q.poison(), kv.poison();
        if (c.kind == EPI_RESIDUAL)
            GPU_OK(cudaMemcpy2D(y.p(), (size_t)ldy * 2, before.p(), (size_t)ldy * 2, (size_t)case_cols(c) * 2, c.M,
                                cudaMemcpyDeviceToDevice));
        GPU_OK(cudaDeviceSynchronize());
    }
    void launch(toka_device *d, int M) {
        gemm_args a = {M, x.p(), ldx, &W, y.p(), ldy, (enum epilogue)c.kind};
        if (D) gemm_wgmma_qkv_with(d, M, x.p(), ldx, &W, &qkv, plan(d));
        else if (c.kind == GEMM_SCATTER) launch_scattered(d, M, &a);
        else gemm_wgmma_with(d, &a, plan(d));
    }
    /* scatters to three receive buffers that lie one after another */
    void launch_scattered(toka_device *d, int M, const gemm_args *a) {
        int share = ceil_div(M, 48) * 16;
        bf16 *boxes[3];
        for (int i = 0; i < 3; i++) boxes[i] = y.p() + (size_t)i * share * ldy;
        gemm_wgmma_scatter_with(d, a, boxes, 3, share, plan(d));
    }
    void launch_apart(toka_device *d, int M) { /* the plain GEMM into y, then rope_kernel */
        gemm_args a = {M, x.p(), ldx, &W, y.p(), c.N, EPI_STORE};
        rope_args r = {qkv, y.p(), M, true};
        r.to.q = q.p(), r.to.kv = kv.p();
        gemm_wgmma(d, &a);
        launch_dependent(d, "RoPE", rope_kernel<false>, {dim3(ceil_div(M * (H + 2 * K), 8)), 256}, r);
    }
    bool guards() {
        return x.guards_hold() && w.guards_hold() && y.guards_hold() && q.guards_hold() && kv.guards_hold() && ordered.guards_hold() &&
               ordered_bias.guards_hold();
    }
};

/* Compares rows of the last launch with the reference: all rows, or about 64 of them if all would
 * take long. */
static bool case_check(toka_device *d, gemm_data &g, int M, const char *what, bool twice = false) {
    std::vector<int> list;
    bool all = (double)M * g.c.N * g.c.K < 4e9;
    for (int i = 0; i < M; i++)
        if (all || i < 4 || i >= M - 4 || gpu_mix(gpu_seed + i) % M < 56) list.push_back(i);
    int n = (int)list.size();
    gpu_buf<int> rows(n);
    gpu_buf<double> acc((size_t)n * g.c.N), size((size_t)n * g.c.N);
    gpu_buf<ref_result> r(1);
    rows.set(list), r.set({ref_result{}});
    dim3 grid((unsigned)ceil_div(g.c.N, 16), (unsigned)ceil_div(n, 16));
    ref_gemm<<<grid, dim3(16, 16)>>>(g.x.p(), g.ldx, g.w.p(), rows.p(), n, g.c.N, g.c.K, acc.p(), size.p());
    ref_args a = {acc.p(), size.p(), rows.p(), n, M, g.c.N, g.ldy, g.y.p(), g.before.p(), g.c.bias ? g.bias.p() : NULL, g.c.kind, g.D, g.qkv,
                  twice};
    ref_check<<<264, 256>>>(a, r.p());
    int wide = g.c.kind == EPI_LOGITS ? 2 : 1; /* a float takes the place of two bf16 */
    if (!g.D && g.c.pad) ref_untouched<<<264, 256>>>(g.y.p(), M, wide * case_cols(g.c), wide * g.ldy, r.p());
    GPU_OK(cudaDeviceSynchronize());
    ref_result got = r.host()[0];
    size_t want = (size_t)n * (g.D ? g.c.N : case_cols(g.c));
    return gpu_check(!got.wrong && got.seen == want && g.guards(),
                     "%s%s: %llu of %llu wrong, worst %.3g of what is allowed, guards %s", what,
                     case_name(g.c, g.plan(d)).c_str(), got.wrong, got.seen, got.worst, g.guards() ? "hold" : "BROKEN");
}
static void test_case(toka_device *d, const gemm_case &c) {
    gemm_data g(c);
    g.fresh();
    g.launch(d, c.M);
    GPU_OK(cudaStreamSynchronize(d->stream));
    if (d->error.code) gpu_check(false, "%s", d->error.msg), exit(gpu_report());
    case_check(d, g, c.M, "");
    if (!g.D || c.plan.variant) return;
    g.fresh();
    g.launch_apart(d, c.M);
    GPU_OK(cudaStreamSynchronize(d->stream));
    case_check(d, g, c.M, "apart, ", true);
}

/* ---- The tests ---- */

/* Every instance, with and without multicast, at shapes whose edges cut tiles, K blocks and panels.
 * In the last two shapes a CTA has several tiles: of one K block, and of more. rows: only shapes
 * with one of these numbers of rows; empty: all. */
static void test_variants(toka_device *d, const std::vector<int> &rows) {
    static const int shapes[][3] = {{1, 128, 64},   {17, 256, 200},   {127, 384, 896}, {128, 128, 1024}, {129, 640, 72},
                                    {257, 896, 520}, {385, 1152, 256}, {513, 2176, 648}, {1025, 3072, 1024},
                                    {257, 16384, 64}, {1025, 8192, 264}};
    for (const gemm_variant &v : gemm_variants)
        for (const int *s : shapes)
            for (int mc = 1; mc <= 2; mc++) {
                if (mc * v.split > 4 || (!rows.empty() && !std::count(rows.begin(), rows.end(), s[0]))) continue;
                int kblocks = ceil_div(s[2], 64), cut = v.kind < GEMM_QKV64 ? 48 : v.kind == GEMM_QKV64 ? 64 : 0;
                if (v.split > kblocks || (v.kind == GEMM_QKV128 && s[1] < 384)) continue;
                int N = s[1] - (s[1] > 384 ? cut : 0) + (v.kind == GEMM_QKV64 && s[1] == 128 ? 64 : 0);
                bool bias = s[0] % 4 == 1 && v.kind != EPI_SWIGLU && v.kind != EPI_LOGITS, norm = s[0] % 3 == 0 && gemm_whole_heads(&v);
                gemm_case c = {s[0], N, s[2], v.kind, bias, norm, {&v, mc, s[0] > 500 ? 2 : 8}};
                if (v.kind == GEMM_SCATTER) c.pad = 0, c.norm = false;
                test_case(d, c);
            }
}
/* Every instance once, at one small shape. Only the last result of a kind is checked. */
static void test_tiny(toka_device *d) {
    for (int kind = EPI_STORE; kind <= GEMM_SCATTER; kind++) {
        gemm_data g({129, 384, 264, kind, kind == EPI_STORE || kind >= GEMM_QKV64, false, {}, kind == GEMM_SCATTER ? 0 : 8});
        for (const gemm_variant &v : gemm_variants)
            for (int mc = 1; v.kind == kind && mc <= 2 && mc * v.split <= 4; mc++) {
                g.c.plan = {&v, mc, 8};
                g.fresh();
                g.launch(d, g.c.M);
                GPU_OK(cudaStreamSynchronize(d->stream));
            }
        case_check(d, g, g.c.M, "last of its kind, ");
    }
}
/* The instance that gemm_choose selects, at odd M and the models' N and K. */
static void test_sweep(toka_device *d) {
    static const int Ms[] = {1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257, 4095, 4224};
    static const struct { int N, K, kind; bool bias, norm; } gemms[] = {
        {3072, 2048, GEMM_QKV64, false, false}, {2048, 2048, EPI_RESIDUAL, false, false}, {16384, 2048, EPI_SWIGLU, false, false},
        {2048, 8192, EPI_RESIDUAL, false, false}, {6144, 4096, GEMM_QKV128, true, true}, {1152, 896, GEMM_QKV64, true, false},
        {1152, 896, EPI_STORE, true, false}, {896, 896, EPI_RESIDUAL, true, false}, {9728, 896, EPI_SWIGLU, false, false},
        {896, 4864, EPI_RESIDUAL, false, false}, {151936, 896, EPI_STORE, false, false},
        {151936, 896, EPI_LOGITS, false, false}, {56, 56, EPI_STORE, true, false},
        {8, 8, EPI_STORE, true, false}, {16, 72, EPI_SWIGLU, false, false}};
    for (auto &m : gemms)
        for (int M : Ms)
            if ((double)M * m.N < 2e8) test_case(d, {M, m.N, m.K, m.kind, m.bias, m.norm, {}});
}
/* 100 launches must give the same bits. A launch of fewer rows must not change the others. */
static void test_repeats(toka_device *d) {
    for (const gemm_variant &v : gemm_variants)
        for (int mc = 1; mc <= 2 && mc * v.split <= 4; mc++) {
            gemm_case c = {641, 1920, 1088, v.kind, false, gemm_whole_heads(&v), {&v, mc, 3}, v.kind == GEMM_SCATTER ? 0 : 8};
            gemm_data g(c);
            std::vector<bf16> first[3], now[3];
            bool same = true;
            for (int i = 0; i < 100 && same; i++) {
                g.fresh();
                g.launch(d, c.M);
                GPU_OK(cudaStreamSynchronize(d->stream));
                auto &to = i ? now : first;
                to[0] = g.y.host(), to[1] = g.q.host(), to[2] = g.kv.host();
                for (int b = 0; b < 3 && i; b++) same &= !memcmp(first[b].data(), now[b].data(), first[b].size() * 2);
            }
            gpu_check(same, "100 repeats of %s", case_name(c, c.plan).c_str());
            g.launch(d, 130);
            g.fresh();
            g.launch(d, 130);
            GPU_OK(cudaStreamSynchronize(d->stream));
            case_check(d, g, 130, "fewer rows, ");
            gemm_data h(c);
            h.fresh();
            std::vector<bf16> was = h.y.host();
            h.launch(d, 130);
            GPU_OK(cudaStreamSynchronize(d->stream));
            size_t from = (size_t)130 * h.ldy * (v.kind == EPI_LOGITS ? 2 : 1);
            now[0] = h.y.host();
            gpu_check(!memcmp(now[0].data() + from, was.data() + from, (was.size() - from) * 2),
                      "rows behind M of %s", case_name(c, c.plan).c_str());
        }
}

/* ---- Timings ---- */

/* qkv+: with RoPE and the store to the KV cache. o+ and down: with the residual. */
struct gemm_shape { const char *model, *gemm; int N, K, kind; };
static const gemm_shape gemm_shapes[] = {
    {"Llama-3.2-1B", "qkv", 3072, 2048, EPI_STORE},             {"Llama-3.2-1B", "qkv+", 3072, 2048, GEMM_QKV64},
    {"Llama-3.2-1B", "o", 2048, 2048, EPI_STORE},               {"Llama-3.2-1B", "o+", 2048, 2048, EPI_RESIDUAL},
    {"Llama-3.2-1B", "gate_up", 16384, 2048, EPI_SWIGLU},       {"Llama-3.2-1B", "down", 2048, 8192, EPI_RESIDUAL},
    {"Llama-3.2-1B", "lm_head", 128256, 2048, EPI_STORE},       {"Llama-3.1-8B", "qkv", 6144, 4096, EPI_STORE},
    {"Llama-3.1-8B", "qkv+", 6144, 4096, GEMM_QKV128},          {"Llama-3.1-8B", "o", 4096, 4096, EPI_STORE},
    {"Llama-3.1-8B", "o+", 4096, 4096, EPI_RESIDUAL},           {"Llama-3.1-8B", "gate_up", 28672, 4096, EPI_SWIGLU},
    {"Llama-3.1-8B", "down", 4096, 14336, EPI_RESIDUAL},        {"Llama-3.1-8B", "lm_head", 128256, 4096, EPI_STORE},
    {"Llama-3.1-70B", "qkv", 10240, 8192, EPI_STORE},           {"Llama-3.1-70B", "qkv+", 10240, 8192, GEMM_QKV128},
    {"Llama-3.1-70B", "o", 8192, 8192, EPI_STORE},              {"Llama-3.1-70B", "o+", 8192, 8192, EPI_RESIDUAL},
    {"Llama-3.1-70B", "gate_up", 57344, 8192, EPI_SWIGLU},      {"Llama-3.1-70B", "down", 8192, 28672, EPI_RESIDUAL},
    {"Qwen2.5-0.5B", "gate_up", 9728, 896, EPI_SWIGLU},         {"Qwen2.5-0.5B", "lm_head", 151936, 896, EPI_STORE}};
static const int bench_M[] = {256, 512, 1024, 4096, 8192};

/* Buffers of one shape, as many as together do not fit into L2. */
struct bench_data {
    gemm_shape r;
    int M, n, D;
    std::vector<std::unique_ptr<gpu_buf<bf16>>> x, w, y;
    gpu_buf<int> pos, kv_slot;
    gpu_buf<float2> rope;
    gpu_buf<bf16> scratch; /* [M][N]: the output of a plain GEMM, which rope_kernel reads */
    std::vector<weight> W;
    qkv_params qkv = {};
    bench_data(const gemm_shape &r_, int M_)
        : r(r_), M(M_), D(r_.kind == GEMM_QKV64 ? 64 : r_.kind == GEMM_QKV128 ? 128 : 0), pos(M_), kv_slot(M_), rope(8192 * 64),
          scratch(D ? (size_t)M_ * r_.N : 1) {
        size_t bytes = 2 * ((size_t)r.N * r.K + (size_t)M * r.K + (size_t)M * r.N);
        n = (int)std::min<size_t>(24, 1 + (200 << 20) / bytes);
        std::vector<int> p(M);
        for (int i = 0; i < M; i++) p[i] = i;
        pos.set(p), kv_slot.set(p);
        gpu_fill_f32<<<264, 256>>>((float *)rope.p(), rope.n * 2, 3, 1);
        for (int i = 0; i < n; i++) {
            x.emplace_back(new gpu_buf<bf16>((size_t)M * r.K, (size_t)GEMM_PAD_ROWS * r.K)), w.emplace_back(new gpu_buf<bf16>((size_t)r.N * r.K));
            y.emplace_back(new gpu_buf<bf16>((size_t)M * r.N));
            gpu_random(*x[i], gpu_seed + i, 1), gpu_random(*w[i], gpu_seed + i + 1000, 1 / sqrtf((float)r.K));
            gpu_random(*y[i], gpu_seed + i + 2000, 1);
            W.push_back({w[i]->p(), NULL, r.N, r.K});
        }
        int heads = D ? r.N / D : 0, kv = heads / 6;
        qkv = {NULL, NULL, NULL, 1e-5f, heads - 2 * kv, kv, 16, pos.p(), kv_slot.p(), rope.p(), NULL, NULL, D};
    }
    /* One call with buffer set b. apart: the plain GEMM and rope_kernel. */
    void call(toka_device *d, int b, gemm_plan plan, bool apart) {
        gemm_args a = {M, x[b]->p(), r.K, &W[b], y[b]->p(), r.kind == EPI_SWIGLU ? r.N / 2 : r.N, (enum epilogue)r.kind};
        if (!D) {
            gemm_wgmma_with(d, &a, plan);
            return;
        }
        qkv.q = y[b]->p(), qkv.kv = y[b]->p() + (size_t)M * qkv.H * D;
        if (!apart) {
            gemm_wgmma_qkv_with(d, M, x[b]->p(), r.K, &W[b], &qkv, plan);
            return;
        }
        rope_args f = {qkv, scratch.p(), M, true};
        a.y = scratch.p(), a.epi = EPI_STORE;
        gemm_wgmma(d, &a);
        launch_dependent(d, "RoPE", rope_kernel<false>, {dim3(ceil_div(M * (qkv.H + 2 * qkv.K), 8)), 256}, f);
    }
    double us(toka_device *d, gemm_plan plan, bool apart = false) {
        double flop = 2.0 * M * r.N * r.K;
        int per_graph = std::max(n, std::min(200, (int)(1.5e-3 / (flop / 6e14 + 3e-6)) / n * n));
        return gpu_time_us(d->stream, per_graph, 9, [&](int i) { call(d, i % n, plan, apart); });
    }
};
static double bench_tflops(const gemm_shape &r, int M, double us) { return 2.0 * M * r.N * r.K / us * 1e-6; }

static std::vector<std::string> bench_only; /* parts of names of shapes; empty: all */
static bool bench_has(const gemm_shape &r, int M) {
    std::string name = std::string(r.model) + " " + r.gemm + " M=" + std::to_string(M) + ";";
    bool asked = bench_only.empty();
    for (const std::string &part : bench_only) asked |= name.find(part) != std::string::npos;
    return asked && (M <= 4096 || strcmp(r.gemm, "lm_head"));
}
static void bench_table(toka_device *d, bool json, bool paced) {
    if (!json && !paced) printf("%-14s %-8s %7s %6s %6s %9s %8s  instance\n", "model", "GEMM", "N", "K", "M", "us", "TFLOP/s");
    for (const gemm_shape &r : gemm_shapes)
        for (int M : bench_M) {
            if (!bench_has(r, M) || (paced && getchar() == EOF)) continue;
            bench_data b(r, M);
            gemm_plan p = gemm_choose(d, r.kind, M, r.N, r.K, false);
            bool apart = b.D && !gemm_qkv_worth_fusing(d, M, &b.W[0], &b.qkv);
            if (apart) p = gemm_choose(d, EPI_STORE, M, r.N, r.K, false);
            double us = b.us(d, p, apart);
            printf(json || paced ? "{\"model\":\"%s\",\"gemm\":\"%s\",\"N\":%d,\"K\":%d,\"M\":%d,\"us\":%.2f,\"tflops\":%.1f,\"bn\":%d,"
                                   "\"split\":%d,\"mc\":%d,\"apart\":%d}\n"
                                 : "%-14s %-8s %7d %6d %6d %9.2f %8.1f  %d/%d/%d%.*s\n",
                   r.model, r.gemm, r.N, r.K, M, us, bench_tflops(r, M, us), p.variant->bn, p.variant->split, p.multicast, (json || paced ? 1 : 6) * apart, " apart");
            fflush(stdout);
        }
    if (!paced) return;
    printf("no more\n"); /* a program that paces this one still writes a line */
    fflush(stdout);
    while (getchar() != EOF) continue;
}
static void sweep(toka_device *d) {
    for (const gemm_shape &r : gemm_shapes)
        for (int M : bench_M) {
            if (!bench_has(r, M)) continue;
            bench_data b(r, M);
            gemm_plan chosen = gemm_choose(d, r.kind, M, r.N, r.K, false), best = chosen;
            /* the least of three runs in turn: the GPU's clock falls under load */
            double least[N_GEMM_VARIANTS][2] = {}, all = 0;
            for (int turn = 0; turn < 3; turn++)
                for (int i = 0; i < N_GEMM_VARIANTS; i++)
                    for (int mc = 1; mc <= 2; mc++) {
                        const gemm_variant &v = gemm_variants[i];
                        if (v.kind != r.kind || mc * v.split > 4 || (v.split > 1 && M > 1024)) continue;
                        usleep(20000);
                        double us = b.us(d, {&v, mc, 8}), &to = least[i][mc - 1];
                        if (!to || us < to) to = us;
                        if (!all || us < all) all = us, best = {&v, mc, 8};
                    }
            printf("%s %s N %d K %d M %d:", r.model, r.gemm, r.N, r.K, M);
            for (int i = 0; i < 2 * N_GEMM_VARIANTS; i++) {
                const gemm_variant &v = gemm_variants[i / 2];
                if (!least[i / 2][i % 2]) continue;
                printf(" %s%d%s/%d/%d=%.2f", chosen.variant == &v && chosen.multicast == i % 2 + 1 ? "*" : "", v.bn,
                    v.pingpong ? "pp" : "", v.split,
                       i % 2 + 1, least[i / 2][i % 2]);
            }
            for (int group = 2; group <= 32 && M >= 4096; group *= 2) {
                usleep(20000);
                printf(" group %d=%.2f", group, b.us(d, {best.variant, best.multicast, group}));
            }
            if (b.D) printf(" apart=%.2f%s", b.us(d, chosen, true), gemm_qkv_worth_fusing(d, M, &b.W[0], &b.qkv) ? "" : "*");
            printf("\n");
            fflush(stdout);
        }
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    std::string what = argc > 1 ? argv[1] : "";
    gemm_open(d);
    bool json = false, paced = false;
    for (int i = 2; i < argc; i++) {
        std::string a = argv[i];
        if (a == "--json") json = true;
        else if (a == "--paced") paced = true;
        else bench_only.push_back(a);
    }
    if (what == "bench") bench_table(d, json, paced);
    else if (what == "sweep") sweep(d);
    else if (what == "small") test_variants(d, {257});
    else if (what == "tiny") test_tiny(d);
    else if (what == "quick") test_variants(d, {129, 257});
    else test_variants(d, {}), test_sweep(d), test_repeats(d);
    if (d->error.code) gpu_check(false, "%s", d->error.msg);
    return gpu_report();
}
