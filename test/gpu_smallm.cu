/* gpu_smallm.cu - tests the GEMMs of chapters 5 and 7 against a float64 reference: every tile
 * forced, all epilogues, many row counts, the shapes of real models and odd shapes.
 *   gpu_smallm                   all tests
 *   gpu_smallm quick             fewer shapes and rows
 *   gpu_smallm small             still fewer (for compute-sanitizer)
 *   gpu_smallm bench [--json]    timings of what gemm selects
 *   gpu_smallm sweep ["NAME, ..."]   timings of every tile, for the cost model of this selection */
#include "../toka_kernels.cu"

#include "gpu.cuh"

/* ---- What is tested ---- */

enum { MAX_M = 257 };
struct variant {
    const char *name;
    int max_m;
    bool hopper; /* needs a Hopper GPU */
    bool plain;  /* no bias with SWIGLU */
    void (*run)(toka_device *, const gemm_args *);
};
template <int ROWS, int SPLIT> static void smallm(toka_device *d, const gemm_args *a) { gemm_smallm_tile<ROWS>(d, a, SPLIT); }
#define SMALLM(rows, split) {#rows "/" #split, rows, true, false, smallm<rows, split>}
#define SMALLM_SPLITS(rows) SMALLM(rows, 1), SMALLM(rows, 2), SMALLM(rows, 4), SMALLM(rows, 8)
static const variant variants[] = {
    SMALLM_SPLITS(8), SMALLM_SPLITS(16), SMALLM_SPLITS(32), SMALLM_SPLITS(64),
    {"gemv 8", 8, false, false, gemm_gemv_tile<8>}, {"gemv 16", 16, false, false, gemm_gemv_tile<16>},
    {"mma 128x128", INT_MAX, false, false, gemm_mma_tile<128, 128, 64, 32>},
    {"mma 64x64", INT_MAX, false, false, gemm_mma_tile<64, 64, 32, 32>},
    {"mma", INT_MAX, false, false, gemm_mma},
    {"wgmma", INT_MAX, true, true, gemm_wgmma},
    {"gemm", INT_MAX, false, true, gemm},
};
static bool runs(const toka_device *d, const variant &v, int M) { return M <= v.max_m && (d->hopper || !v.hopper); }
static const std::vector<int> row_counts = {1,  2,  3,  4,  7,  8,  9,   15,  16,  17,  31,  32, 33,
                                            63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 257};
static const std::vector<int> quick_counts = {1, 2, 7, 8, 9, 15, 16, 17, 33, 64, 65, 129}, tiny_counts = {1, 9, 33};
struct shape {
    const char *name;
    int N, K;
};
static const shape models[] = {
    {"Llama-1B qkv", 3072, 2048},       {"Llama-1B o", 2048, 2048},      {"Llama-1B gate_up", 16384, 2048},
    {"Llama-1B down", 2048, 8192},      {"Llama-1B head", 128256, 2048}, {"Llama-8B qkv", 6144, 4096},
    {"Llama-8B o", 4096, 4096},         {"Llama-8B gate_up", 28672, 4096}, {"Llama-8B down", 4096, 14336},
    {"Llama-70B qkv", 10240, 8192},     {"Llama-70B o", 8192, 8192},     {"Llama-70B gate_up", 57344, 8192},
    {"Llama-70B down", 8192, 28672},    {"Qwen-0.5B qkv", 1152, 896},    {"Qwen-0.5B o", 896, 896},
    {"Qwen-0.5B gate_up", 9728, 896},   {"Qwen-0.5B down", 896, 4864},   {"Qwen-0.5B head", 151936, 896},
};
static const shape odd_shapes[] = {{"odd", 8, 8},      {"odd", 16, 24},    {"odd", 72, 40},   {"odd", 136, 1000},
                                   {"odd", 1008, 72},  {"odd", 208, 2056}, {"odd", 64, 64},   {"odd", 2064, 136},
                                   {"odd", 144, 8200}, {"odd", 4112, 520}};

/* ---- The reference ---- acc = x W^T and the sum of |x||W| in float64. Rows do not depend on each
 * other. */

__global__ static void reference(const bf16 *x, int ldx, const bf16 *w, int N, int K, double *acc, double *mass) {
    __shared__ double xs[32][33], ws[32][33];
    /* 256 threads, 4 rows each */
    int m0 = blockIdx.y * 32, n0 = blockIdx.x * 32, tn = threadIdx.x % 32, tm = threadIdx.x / 32;
    double s[4] = {}, a[4] = {};
    for (int k0 = 0; k0 < K; k0 += 32) {
        for (int i = 0; i < 4; i++) {
            int r = tm + 8 * i, k = k0 + tn;
            xs[r][tn] = m0 + r < MAX_M && k < K ? (double)__bfloat162float(x[(size_t)(m0 + r) * ldx + k]) : 0;
            ws[r][tn] = n0 + r < N && k < K ? (double)__bfloat162float(w[(size_t)(n0 + r) * K + k]) : 0;
        }
        __syncthreads();
        for (int k = 0; k < 32; k++)
            for (int i = 0; i < 4; i++) {
                double p = xs[tm + 8 * i][k] * ws[tn][k];
                s[i] += p, a[i] += fabs(p);
            }
        __syncthreads();
    }
    for (int i = 0; i < 4; i++) {
        int m = m0 + tm + 8 * i, n = n0 + tn;
        if (m < MAX_M && n < N) acc[(size_t)m * N + n] = s[i], mass[(size_t)m * N + n] = a[i];
    }
}

struct finding {
    unsigned bad;
    int m, n;
    float got, want, worst; /* worst: the largest error / allowed error */
};

/* Compares every element of y [MAX_M][ldy]: inside M x Nout with the reference; all others must
 * still equal y0. */
__global__ static void compare(const bf16 *y, const bf16 *y0, const float *bias, const double *acc, const double *mass, int M,
                               int N, int ldy, enum epilogue epi, finding *f) {
    int n_out = epi == EPI_SWIGLU ? N / 2 : N;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)MAX_M * ldy; i += (size_t)gridDim.x * blockDim.x) {
        int m = (int)(i / ldy), n = (int)(i % ldy);
        double got = __bfloat162float(y[i]), want, tol;
        if (m >= M || n >= n_out) {
            tol = 1, want = 0, got = *(const uint16_t *)&y[i] == *(const uint16_t *)&y0[i] ? 0 : NAN;
        } else if (epi == EPI_SWIGLU) {
            size_t at = (size_t)m * N + n / 8 * 16 + n % 8;
            double g = acc[at] + (bias ? bias[n / 8 * 16 + n % 8] : 0), u = acc[at + 8] + (bias ? bias[n / 8 * 16 + n % 8 + 8] : 0);
            double s = g / (1 + exp(-g));
            want = s * u;
            tol = fabs(want) / 250 + 1e-5 * (1.1 * mass[at] * fabs(u) + fabs(s) * mass[at + 8]) + 1e-30;
        } else {
            size_t at = (size_t)m * N + n;
            want = acc[at] + (bias ? bias[n] : 0) + (epi == EPI_RESIDUAL ? (double)__bfloat162float(y0[i]) : 0);
            tol = fabs(want) / 250 + 1e-5 * mass[at] + 1e-30;
        }
        float ratio = (float)(fabs(got - want) / tol);
        if (ratio <= 1) atomicMax((int *)&f->worst, __float_as_int(ratio));
        else if (atomicAdd(&f->bad, 1) == 0) f->m = m, f->n = n, f->got = (float)got, f->want = (float)want;
    }
}
__global__ static void differ(const uint16_t *a, const uint16_t *b, size_t n, finding *f) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        if (a[i] != b[i]) atomicAdd(&f->bad, 1);
}

/* ---- The tests of one shape ---- */

static const char *epi_name(enum epilogue e) { return e == EPI_STORE ? "store" : e == EPI_RESIDUAL ? "residual" : "swiglu"; }

static void test_shape(toka_device *d, const shape &s, const std::vector<int> &rows) {
    int N = s.N, K = s.K, ldx = K + 8, ldy = N + 8;
    gpu_buf<bf16> x((size_t)MAX_M * ldx, (size_t)GEMM_PAD_ROWS * ldx), w((size_t)N * K), y((size_t)MAX_M * ldy), y0((size_t)MAX_M * ldy);
    gpu_buf<float> bias((size_t)N);
    gpu_buf<double> acc((size_t)MAX_M * N), mass((size_t)MAX_M * N);
    std::vector<std::string> names;
    gpu_buf<finding> found(20000);
    GPU_OK(cudaMemset(found.p(), 0, 20000 * sizeof(finding)));
    /* the padding of the last row stays NaN */
    gpu_fill_bf16<<<1056, 256>>>(x.p(), (size_t)(MAX_M - 1) * ldx + K, gpu_seed, 1);
    /* and so does the padding of all other rows */
    GPU_OK(cudaMemset2D(x.p() + K, (size_t)ldx * 2, 0xFF, 16, MAX_M));
    gpu_random(w, gpu_seed + 1, 1 / sqrtf((float)K));
    gpu_random(bias, gpu_seed + 2, 0.5f);
    reference<<<dim3((unsigned)ceil_div(N, 32), (unsigned)ceil_div(MAX_M, 32)), 256>>>(x.p(), ldx, w.p(), N, K, acc.p(), mass.p());
    GPU_OK(cudaDeviceSynchronize());
    for (int e = 0; e < 3; e++) {
        enum epilogue epi = (enum epilogue)e;
        if (epi == EPI_SWIGLU && N % 16) continue;
        if (epi == EPI_RESIDUAL) gpu_random(y0, gpu_seed + 3, 1);
        else y0.poison();
        GPU_OK(cudaDeviceSynchronize());
        for (const variant &v : variants)
            for (int M : rows) {
                if (!runs(d, v, M)) continue;
                bool with_bias = M % 3 != 0 && !(v.plain && epi == EPI_SWIGLU);
                weight W = {w.p(), with_bias ? bias.p() : NULL, N, K};
                int row_stride = epi == EPI_SWIGLU ? N / 2 + 8 : ldy;
                gemm_args a = {M, x.p(), ldx, &W, y.p(), row_stride, epi};
                GPU_OK(cudaMemcpyAsync(y.p(), y0.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
                v.run(d, &a);
                compare<<<264, 256, 0, d->stream>>>(y.p(), y0.p(), W.bias, acc.p(), mass.p(), M, N, row_stride, epi,
                                                    found.p() + names.size());
                names.push_back(std::string(v.name) + " " + epi_name(epi) + " M=" + std::to_string(M));
            }
    }
    GPU_OK(cudaStreamSynchronize(d->stream));
    gpu_check(!d->error.code, "%s N=%d K=%d: %s", s.name, N, K, d->error.msg);
    std::vector<finding> f = found.host();
    for (size_t i = 0; i < names.size(); i++)
        gpu_check(!f[i].bad, "%s N=%d K=%d %s: %u wrong, one at (%d, %d): %g, expected %g (worst of the right ones %.2f)", s.name,
                  N, K, names[i].c_str(), f[i].bad, f[i].m, f[i].n, f[i].got, f[i].want, f[i].worst);
    gpu_check(y.guards_hold(), "%s N=%d K=%d: guard bands", s.name, N, K);
}

/* A hundred equal launches must give the same bits. */
static void test_repeats(toka_device *d, const shape &s, int M) {
    int N = s.N, K = s.K;
    gpu_buf<bf16> x((size_t)M * K, (size_t)GEMM_PAD_ROWS * K), w((size_t)N * K), y0((size_t)M * N), y((size_t)M * N), first((size_t)M * N);
    gpu_buf<finding> found(1);
    weight W = {w.p(), NULL, N, K};
    gemm_args a = {M, x.p(), K, &W, y.p(), N, EPI_RESIDUAL};
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 1 / sqrtf((float)K)), gpu_random(y0, gpu_seed + 2, 1);
    GPU_OK(cudaMemset(found.p(), 0, sizeof(finding)));
    GPU_OK(cudaDeviceSynchronize());
    for (const variant &v : variants) {
        if (!runs(d, v, M)) continue;
        for (int i = 0; i < 100; i++) {
            GPU_OK(cudaMemcpyAsync(y.p(), y0.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
            v.run(d, &a);
            v.run(d, &a); /* reads what the first launch wrote: the dependent launch must wait */
            if (i == 0) GPU_OK(cudaMemcpyAsync(first.p(), y.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
            differ<<<132, 256, 0, d->stream>>>((uint16_t *)y.p(), (uint16_t *)first.p(), y.n, found.p());
        }
        GPU_OK(cudaStreamSynchronize(d->stream));
        gpu_check(!found.host()[0].bad, "%s N=%d K=%d M=%d %s: 100 repeats differ", s.name, N, K, M, v.name);
    }
}

/* A fused RMSNorm: x += product, then norm(x) is the input of the next product. Checks the relative
 * L2 distance from float64. The reference starts from x in memory and, as the GPU, rounds x w to
 * bf16. */
static void test_fused_norm(toka_device *d, int E, int K, int N, int M, bool gated, bool smallm) {
    toka_shape shape = {.E = E, .eps = 0.01f};
    gpu_buf<bf16> x((size_t)M * K, (size_t)GEMM_PAD_ROWS * K), w((size_t)E * K), y((size_t)M * E), next((size_t)N * E),
        xn((size_t)FUSE_NORM_MAX_ROWS * E, (size_t)GEMM_PAD_ROWS * E), out((size_t)M * N);
    gpu_buf<float> norm((size_t)E), bias((size_t)N), squares((size_t)FUSE_NORM_MAX_ROWS * ceil_div(E, FUSE_NORM_COLS));
    weight W = {w.p(), NULL, E, K}, V = {next.p(), bias.p(), N, E};
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 0.1f / sqrtf((float)K)), gpu_random(y, gpu_seed + 2, 0.1f);
    gpu_random(next, gpu_seed + 3, 1 / sqrtf((float)E)), gpu_random(norm, gpu_seed + 4, 1), gpu_random(bias, gpu_seed + 5, 0.5f);
    GPU_OK(cudaDeviceSynchronize());
    d->shape = &shape, d->E = E, d->xn = xn.p(), d->row_sumsq = squares.p();
    gemm_args first = {M, x.p(), K, &W, y.p(), E, EPI_RESIDUAL, norm.p()};
    gemm_args second = {M, d->xn, E, &V, out.p(), gated ? N / 2 : N, gated ? EPI_SWIGLU : EPI_STORE, NULL, true};
    gemm_gemv(d, &first);
    smallm ? gemm_smallm(d, &second) : gemm_gemv(d, &second);
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> h = y.host(), v = next.host(), got = out.host();
    std::vector<float> g = norm.host(), b = bias.host();
    double off = 0, all = 0;
    for (int m = 0; m < M; m++) {
        std::vector<double> normed((size_t)E), sums((size_t)N);
        double squared = 0;
        for (int k = 0; k < E; k++) squared += pow((double)__bfloat162float(h[(size_t)m * E + k]), 2);
        for (int k = 0; k < E; k++) {
            float xw = __bfloat162float(__float2bfloat16(__bfloat162float(h[(size_t)m * E + k]) * g[k]));
            normed[k] = xw / sqrt(squared / E + shape.eps);
        }
        for (int n = 0; n < N; n++) {
            sums[n] = b[n];
            for (int k = 0; k < E; k++) sums[n] += normed[k] * __bfloat162float(v[(size_t)n * E + k]);
        }
        for (int n = 0; n < second.ldy; n++) {
            double gate = sums[gated ? n / 8 * 16 + n % 8 : n];
            double want = gated ? gate / (1 + exp(-gate)) * sums[n / 8 * 16 + n % 8 + 8] : gate;
            off += pow(want - (double)__bfloat162float(got[(size_t)m * second.ldy + n]), 2), all += want * want;
        }
    }
    gpu_check(sqrt(off / all) < 2.5e-3, "fused norm E=%d N=%d M=%d%s%s: relative L2 %.2e %s", E, N, M, gated ? " swiglu" : "",
        smallm ? " smallm" : "",
              sqrt(off / all), d->error.msg);
    d->shape = NULL, d->xn = NULL, d->row_sumsq = NULL;
}

/* q, K and V of M rows, rotated in the GEMM's epilogue, against rope_kernel after a plain GEMM. The
 * two differ by one rounding. Other kv_slots must not change. by: gemm_smallm or gemm_gemv. */
static void test_rotated(toka_device *d, int E, int H, int K, int D, int M, bool bias_too, bool norm, const char *name,
                        void (*by)(toka_device *, const gemm_args *)) {
    const int N = (H + 2 * K) * D, B = 16, slots = 96, positions = 64;
    const size_t kv_size = (size_t)slots * K * 2 * D;
    gpu_buf<bf16> x((size_t)M * E, (size_t)GEMM_PAD_ROWS * E), w((size_t)N * E), y((size_t)M * N), q((size_t)M * H * D), q2((size_t)M * H * D), kv(kv_size),
        kv2(kv_size);
    gpu_buf<float> bias((size_t)N), q_norm((size_t)D), k_norm((size_t)D);
    gpu_buf<float2> table((size_t)positions * D / 2);
    gpu_buf<int> pos((size_t)M), kv_slot((size_t)M);
    std::vector<int> at, where;
    std::vector<float2> cs;
    /* 41 and 96 are coprime: no kv_slot is used twice */
    for (int m = 0; m < M; m++) at.push_back(m * 29 % positions), where.push_back(m * 41 % slots);
    for (int i = 0; i < positions * D / 2; i++) cs.push_back(make_float2(cosf((float)i), sinf((float)i)));
    gpu_random(x, gpu_seed, 1), gpu_random(w, gpu_seed + 1, 1 / sqrtf((float)E)), gpu_random(bias, gpu_seed + 2, 1);
    gpu_random(kv, gpu_seed + 3, 1), gpu_random(q_norm, gpu_seed + 4, 2), gpu_random(k_norm, gpu_seed + 5, 2);
    GPU_OK(cudaMemcpy(kv2.p(), kv.p(), kv_size * sizeof(bf16), cudaMemcpyDeviceToDevice));
    pos.set(at), kv_slot.set(where), table.set(cs);
    weight W = {w.p(), bias_too ? bias.p() : NULL, N, E};
    gemm_args a = {M, x.p(), E, &W, y.p(), N, EPI_STORE};
    by(d, &a);
    qkv_params p = {W.bias, norm ? q_norm.p() : NULL, norm ? k_norm.p() : NULL, 0.1f, H, K, B, pos.p(), kv_slot.p(), table.p(),
        q.p(), kv.p(), D};
    rope_args r = {p, y.p(), M, true};
    launch_dependent(d, "RoPE", rope_kernel<false>, {dim3((unsigned)ceil_div(M * (H + 2 * K), 8)), 256}, r);
    p.q = q2.p(), p.kv = kv2.p();
    a.epi = EPI_QKV, a.qkv = &p;
    by(d, &a);
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> want[2] = {q.host(), kv.host()}, got[2] = {q2.host(), kv2.host()};
    double off = 0, all = 0, max_error = 0;
    for (int i = 0; i < 2; i++)
        for (size_t k = 0; k < want[i].size(); k++) {
            double u = (double)__bfloat162float(want[i][k]), v = (double)__bfloat162float(got[i][k]);
            off += (u - v) * (u - v), all += u * u, max_error = std::max(max_error, fabs(u - v) / (1 + fabs(u)));
        }
    gpu_check(sqrt(off / all) < 5e-3 && max_error < 0.05 && q2.guards_hold() && kv2.guards_hold(),
        "%s rotated%s E=%d H=%d K=%d D=%d M=%d%s: relative L2 %.2e, most %.2e %s",
              name, norm ? " normed" : "", E, H, K, D, M, bias_too ? " bias" : "", sqrt(off / all), max_error, d->error.msg);
}

/* ---- Timing ---- */

__global__ static void read_all(const uint4 *p, size_t n, uint32_t *out) {
    uint32_t s = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        uint4 v = p[i];
        s ^= v.x ^ v.y ^ v.z ^ v.w;
    }
    if (s == 0x12345678) *out = s;
}
static double read_bandwidth(toka_device *d) { /* TB/s */
    gpu_buf<bf16> b((size_t)1 << 30);
    gpu_buf<uint32_t> out(1);
    gpu_random(b, 1, 1);
    double us = gpu_time_us(d->stream, 1, 7, [&](int) {
        read_all<<<d->n_sms * 8, 512, 0, d->stream>>>((const uint4 *)b.p(), b.n / 8, out.p());
    });
    return (double)b.n * 2 / us * 1e-6;
}

/* Launches of the same GEMM in sequence, with weights that together do not fit into the L2
 * cache. */
struct timed_shape {
    toka_device *d;
    int N, K, copies;
    gpu_buf<bf16> w, x, y;
    static int how_many(int N, int K) { return (int)std::max<size_t>(2, ((size_t)400 << 20) / ((size_t)N * K * 2) + 1); }
    timed_shape(toka_device *d_, int N_, int K_)
        : d(d_), N(N_), K(K_), copies(how_many(N_, K_)), w((size_t)copies * N * K), x((size_t)MAX_M * K, (size_t)GEMM_PAD_ROWS * K), y((size_t)MAX_M * N) {
        gpu_random(w, 5, 1 / sqrtf((float)K)), gpu_random(x, 6, 1);
    }
    double us(const variant &v, int M, enum epilogue epi) {
        std::vector<weight> ws;
        for (int i = 0; i < copies; i++) ws.push_back({w.p() + (size_t)i * N * K, NULL, N, K});
        int launches = std::max(copies, 12);
        return gpu_time_us(d->stream, launches, 5, [&](int i) {
            gemm_args a = {M, x.p(), K, &ws[(size_t)(i % copies)], y.p(), epi == EPI_SWIGLU ? N / 2 : N, epi};
            v.run(d, &a);
        });
    }
};
static enum epilogue usual_epilogue(const shape &s) {
    return strstr(s.name, "gate_up") ? EPI_SWIGLU : strstr(s.name, " o") || strstr(s.name, "down") ? EPI_RESIDUAL : EPI_STORE;
}
/* Some fill only half of a box of rows. */
static const int timed_rows[] = {1, 8, 16, 32, 33, 64, 96, 128, 160, 224};

static void time_gemm(toka_device *d, const char *only, bool json) {
    double tbs = read_bandwidth(d);
    cudaDeviceProp prop;
    GPU_OK(cudaGetDeviceProperties(&prop, 0));
    if (!json) printf("%s, reads %.2f TB/s; microseconds and share of the time to read W\n", prop.name, tbs);
    for (const shape &s : models) {
        timed_shape b(d, s.N, s.K);
        if (!json) printf("%-18s %6dx%-5d", s.name, s.N, s.K);
        for (int M : timed_rows) {
            for (const variant &v : variants) {
                if (!runs(d, v, M) || strcmp(v.name, only)) continue;
                double us = b.us(v, M, usual_epilogue(s)), share = (double)s.N * s.K * 2 / us * 1e-6 / tbs;
                if (json)
                    printf("{\"op\":\"gemm %s\",\"gpu\":\"%s\",\"M\":%d,\"N\":%d,\"K\":%d,\"us\":%.2f,\"tflops\":%.1f,\"tbs\":%.3f,"
                           "\"read_share\":%.3f}\n", s.name, prop.name, M, s.N, s.K, us, 2.0 * M * s.N * s.K / us * 1e-6,
                           (double)s.N * s.K * 2 / us * 1e-6, share);
                else printf("  %7.2f %3.0f%%", us, 100 * share);
            }
        }
        if (!json) printf("\n");
        fflush(stdout);
    }
}
static void sweep(toka_device *d, const char *only) {
    double tbs = read_bandwidth(d);
    printf("reads %.2f TB/s; share of the time to read W\n", tbs);
    for (const shape &s : models) {
        if (only && !strstr(only, s.name)) continue;
        timed_shape b(d, s.N, s.K);
        for (int M : {1, 8, 16, 32, 64, 96, 128}) {
            printf("%-18s M=%-3d", s.name, M);
            for (const variant &v : variants)
                if (runs(d, v, M) && (v.max_m == INT_MAX ? M >= 64 : v.max_m < 2 * std::max(M, 8)))
                    printf(" %s:%.0f", v.name, 100 * (double)s.N * s.K * 2 / b.us(v, M, usual_epilogue(s)) * 1e-6 / tbs);
            printf("\n");
            fflush(stdout);
        }
    }
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    gemm_open(d);
    const char *what = argc > 1 ? argv[1] : "";
    if (!strcmp(what, "bench")) {
        time_gemm(d, "gemm", argc > 2);
        return d->error.code;
    }
    if (!strcmp(what, "sweep")) {
        sweep(d, argc > 2 ? argv[2] : NULL);
        return d->error.code;
    }
    bool tiny = !strcmp(what, "small"), quick = !strcmp(what, "quick");
    for (const shape &s : odd_shapes)
        if (!tiny || s.K == 24 || s.K == 1000) test_shape(d, s, tiny ? tiny_counts : quick ? quick_counts : row_counts);
    for (int M : {1, 3, 8})
        for (int i = 0; i < (d->hopper ? 4 : 2); i++) {
            test_fused_norm(d, 1000, 264, 96, M, i % 2, i / 2);
            test_fused_norm(d, 2048, 512, 208, M, i % 2, i / 2);
        }
    for (int M : {1, 5, 8, 9, 17, 40, 64})
        for (int D : {64, 128})
            /* gemm_gemv, gemm_smallm, gemm_smallm with QK-norm */
            for (int family = 0; family <= 2 * d->hopper; family++) {
                static const int max_rows[] = {16, 64, 8};
                const char *name = family ? "smallm" : "gemv";
                if (M > max_rows[family]) continue;
                test_rotated(d, 264, 5, 2, D, M, M % 2, family == 2, name, family ? gemm_smallm : gemm_gemv);
                if (!tiny) test_rotated(d, 2048, 32, 8, D, M, M % 2, family == 2, name, family ? gemm_smallm : gemm_gemv);
            }
    if (!quick && !tiny) {
        for (const shape &s : models) test_shape(d, s, row_counts);
        for (int M : {1, 16, 64, 128, 257}) test_repeats(d, {"repeats", 2048, 2048}, M);
        test_repeats(d, {"repeats", 208, 2056}, 33);
        test_repeats(d, {"repeats", 896, 4864}, 64);
    }
    return gpu_report();
}
