/* gpu_fp8.cu - tests the FP8 GEMMs: quantized rows of x bit by bit, every instance and epilogue
 * against float64 of the same e4m3 numbers, and that a row has the same bits in every instance.
 *   gpu_fp8                  all checks
 *   gpu_fp8 quick            fewer shapes
 *   gpu_fp8 small            still fewer (for compute-sanitizer)
 *   gpu_fp8 bench            times of the GEMMs of Llama-3.1-8B beside bf16
 *   gpu_fp8 sweep            times of every instance that stores */
#include "../toka_kernels.cu"

#include "gpu.cuh"

/* ---- References ---- */

/* The 127 numbers >= 0 of e4m3, by definition. */
static double fp8_number(int code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 0x80 ? -size : size;
}
/* The nearest e4m3 number, the even one of two. */
static int fp8_nearest(float value) {
    int best = 0;
    for (int code = 1; code < 127; code++) {
        const double now = fabs(fabs((double)value) - fp8_number(code)), then = fabs(fabs((double)value) - fp8_number(best));
        if (now < then || (now == then && code % 2 == 0)) best = code;
    }
    return best | (signbit(value) ? 0x80 : 0);
}
/* acc[m][n] = sum of x w with all scales, size: of absolute values. One thread a number. */
__global__ static void reference(const uint8_t *x, size_t x_row_bytes, const float *x_scale, weight w, int M, double *acc, double *size) {
    const int n = (int)(blockIdx.x * blockDim.x + threadIdx.x), m = (int)blockIdx.y, blocks_n = (w.N + 127) / 128;
    if (n >= w.N || m >= M) return;
    double a = 0, s = 0;
    for (int k = 0; k < w.K; k++) {
        const double scale = w.is_blocked ? w.scale[((size_t)(k / 128) * blocks_n + n / 128) * 2 + n / 8 % 2] : w.scale[n];
        const double p = gpu_fp8_value(x[m * x_row_bytes + k]) * gpu_fp8_value(((const uint8_t *)w.data)[(size_t)n * ((w.K + 15) / 16 * 16) + k]) * scale * x_scale[m];
        a += p, s += fabs(p);
    }
    acc[(size_t)m * w.N + n] = a, size[(size_t)m * w.N + n] = s;
}
struct finding {
    unsigned bad;
    int m, n;
    float got, want, worst; /* worst: the largest error / allowed error */
};
/* Compares y with the reference; what lies outside of M x N must equal y0. sum_error: allowed part
 * of the sum of absolute values. */
__global__ static void compare(const bf16 *y, const bf16 *y0, weight w, const double *acc, const double *size, int rows, int M,
                               int ldy, enum epilogue epi, double sum_error, finding *f) {
    const int n_out = epi == EPI_SWIGLU ? w.N / 2 : w.N;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (size_t)rows * ldy; i += (size_t)gridDim.x * blockDim.x) {
        const int m = (int)(i / ldy), n = (int)(i % ldy);
        double got = __bfloat162float(y[i]), want, tol;
        if (m >= M || n >= n_out) {
            tol = 1, want = 0, got = *(const uint16_t *)&y[i] == *(const uint16_t *)&y0[i] ? 0 : NAN;
        } else if (epi == EPI_SWIGLU) {
            const size_t at = (size_t)m * w.N + n / 8 * 16 + n % 8;
            const double g = acc[at], u = acc[at + 8], s = g / (1 + exp(-g));
            want = s * u;
            tol = fabs(want) / 250 + sum_error * (1.1 * size[at] * fabs(u) + fabs(s) * size[at + 8] + sum_error * size[at] * size[at + 8]) + 1e-30;
        } else {
            const size_t at = (size_t)m * w.N + n;
            want = acc[at] + (w.bias ? w.bias[n] : 0) + (epi == EPI_RESIDUAL ? (double)__bfloat162float(y0[i]) : 0);
            tol = fabs(want) / 250 + sum_error * size[at] + 1e-6 * (fabs(acc[at]) + 1) + 1e-30;
        }
        const float ratio = (float)(fabs(got - want) / tol);
        if (ratio <= 1) atomicMax((int *)&f->worst, __float_as_int(ratio));
        else if (atomicAdd(&f->bad, 1) == 0) f->m = m, f->n = n, f->got = (float)got, f->want = (float)want;
    }
}
__global__ static void differ(const uint16_t *a, const uint16_t *b, size_t n, finding *f) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        if (a[i] != b[i]) atomicAdd(&f->bad, 1);
}

/* ---- Loading ---- */

/* Loads gate and up, or q, k and v, of a file in one of the forms, as e4m3 and (not Hopper) as bf16, and compares each number. */
enum form { BY_TENSOR, BY_ROW, BY_BLOCK, BY_GROUP, N_FORMS };
static void test_load(toka_device *d, enum form form, bool gate_up, bool reorder, int part_rows, int cols, int row0, int col0) {
    const int whole_rows = part_rows + row0, whole_cols = cols + col0, n_parts = gate_up ? 2 : 3;
    const int block_rows = form == BY_TENSOR ? whole_rows : form == BY_ROW ? 1 : form == BY_BLOCK ? 128 : 4,
              block_cols = form == BY_BLOCK ? 128 : form == BY_GROUP ? 32 : whole_cols;
    const int scale_cols = ceil_div(whole_cols, block_cols), n_scales = ceil_div(whole_rows, block_rows) * scale_cols;
    std::vector<uint8_t> codes[3];
    std::vector<float> scales[3];
    toka_quant quant[3] = {};
    toka_layer layer = {};
    toka_tensor *parts[3] = {gate_up ? &layer.mlp.gate : &layer.q, gate_up ? &layer.mlp.up : &layer.k, &layer.v};
    for (int i = 0; i < n_parts; i++) {
        for (size_t k = 0; k < (size_t)whole_rows * whole_cols; k++)
            codes[i].push_back((uint8_t)(gpu_mix(gpu_seed + 17 * (uint64_t)i + (k << 8)) % 127 + (k % 3 ? 0 : 128)));
        for (int k = 0; k < n_scales; k++) scales[i].push_back(1 + gpu_uniform(gpu_seed + 40 + (uint64_t)i, (uint64_t)k));
        quant[i] = toka_quant{.rows = whole_rows, .cols = whole_cols, .block_rows = block_rows, .block_cols = block_cols, .scale = scales[i].data(),
                              .scale_dtype = TOKA_F32, .scale_row_step = scale_cols, .scale_col_step = 1, .input_scale = 0.25f * (float)(i + 1)};
        *parts[i] = toka_tensor{.data = codes[i].data(), .dtype = TOKA_FP8, .rows = part_rows, .cols = cols, .stride = whole_cols, .quant = &quant[i],
                                .row0 = row0, .row_step = 1, .col0 = col0};
    }
    for (int hopper = 0; hopper < 2; hopper++) {
        weight_loader loader = {};
        toka_shape shape = {};
        shape.D = 64;
        loader.dev = d, d->hopper = hopper, d->shape = &shape;
        const weight_parts mlp = weight_mlp_parts(&layer.mlp, true);
        weight w = gate_up ? weight_load_parts(d, &loader, &mlp) : weight_load_qkv(d, &loader, &layer);
        GPU_OK(cudaStreamSynchronize(cudaStreamLegacy));
        load_run(&loader);
        d->hopper = true, d->shape = NULL;
        if (reorder && !d->error.code) qkv_reorder(d, &w, 64);
        GPU_OK(cudaStreamSynchronize(d->stream));
        const int pitch = w.scale ? fp8_row_bytes(w.K) : 2 * w.K, blocks_n = ceil_div(w.N, 128);
        std::vector<uint8_t> got((size_t)w.N * pitch);
        std::vector<float> got_scales(!w.scale ? 0 : w.is_blocked ? (size_t)ceil_div(w.K, 128) * blocks_n * 2 : (size_t)w.N);
        GPU_OK(cudaMemcpy(got.data(), w.data, got.size(), cudaMemcpyDeviceToHost));
        if (w.scale) GPU_OK(cudaMemcpy(got_scales.data(), w.scale, got_scales.size() * 4, cudaMemcpyDeviceToHost));
        int wrong = 0;
        for (int i = 0; i < n_parts; i++)
            for (int row = 0; row < part_rows; row++) {
                int at = gate_up ? row / 8 * 16 + 8 * i + row % 8 : i * part_rows + row;
                if (reorder) at = at / 64 * 64 + qkv_interleave(at % 64, 32);
                for (int col = 0; col < cols; col++) {
                    const int r = row0 + row, c = col0 + col;
                    const uint8_t code = codes[i][(size_t)r * whole_cols + c];
                    const float scale = scales[i][(size_t)(r / block_rows) * scale_cols + c / block_cols];
                    if (w.scale) {
                        const float s = w.is_blocked ? got_scales[((size_t)(col / 128) * blocks_n + at / 128) * 2 + at / 8 % 2] : got_scales[(size_t)at];
                        wrong += got[(size_t)at * pitch + col] != code || s != scale;
                    } else {
                        bf16 number;
                        memcpy(&number, &got[(size_t)at * pitch + 2 * col], 2);
                        wrong += __bfloat162float(number) != __bfloat162float(__float2bfloat16((float)fp8_number(code) * scale));
                    }
                }
            }
        const bool stays = hopper && form != BY_GROUP && !(form == BY_BLOCK && !gate_up && part_rows % 128);
        gpu_check(!wrong && (w.scale != NULL) == stays && (!stays || w.x_scale == 0.25f * (float)n_parts),
                  "load form %d %s rows=%d cols=%d from (%d, %d)%s%s: %d wrong %s", form, gate_up ? "gate and up" : "q, k, v", part_rows, cols, row0, col0,
                  reorder ? " reordered" : "", hopper ? "" : " as bf16", wrong, d->error.msg);
        while (d->n_allocations) cudaFree(d->allocations[--d->n_allocations]);
    }
}

/* ---- The rows of x ---- */

static void test_quantize(toka_device *d, int M, int K, float static_scale) {
    const int ldx = K + 8;
    gpu_buf<bf16> x((size_t)M * ldx);
    gpu_buf<float> scale((size_t)M);
    gpu_random(x, gpu_seed, 1);
    GPU_OK(cudaDeviceSynchronize());
    std::vector<bf16> before = x.host();
    for (int m = 0; m < M; m++)
        for (int k = 0; k < K; k++) {
            bf16 &v = before[(size_t)m * ldx + k];
            if (m % 5 == 1) v = __float2bfloat16(0);
            if (m % 5 == 2) v = __float2bfloat16(k == K - 1 ? -1e4f : 1e-3f * (float)(k % 97));
            if (m % 5 == 3) v = __float2bfloat16(448.0f * (float)(k % 31 - 15) / 16); /* ties */
        }
    x.set(before);
    launch_dependent(d, "quantization", quantize_rows_kernel, {dim3((unsigned)M), 256}, x.p(), ldx, K, static_scale, scale.p());
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> after = x.host();
    std::vector<float> scales = scale.host();
    int wrong = 0, moved = 0;
    for (int m = 0; m < M; m++) {
        float largest = 0;
        const uint8_t *codes = (const uint8_t *)&after[(size_t)m * ldx];
        for (int k = 0; k < K; k++) largest = fmaxf(largest, fabsf(__bfloat162float(before[(size_t)m * ldx + k])));
        const float want = static_scale != 0 ? static_scale : largest > 0 ? largest / 448 : 1;
        wrong += scales[(size_t)m] != want;
        for (int k = 0; k < K; k++) wrong += codes[k] != fp8_nearest(__bfloat162float(before[(size_t)m * ldx + k]) * (1 / want));
        for (int k = K; k < ldx; k++)
            moved += memcmp(&after[(size_t)m * ldx + k], &before[(size_t)m * ldx + k], 2) != 0;
    }
    gpu_check(!wrong && !moved && x.guards_hold() && scale.guards_hold(), "quantize M=%d K=%d static %g: %d wrong, %d moved %s", M, K,
              static_scale, wrong, moved, d->error.msg);
}

/* The norm that quantizes gives the bits of rmsnorm followed by the quantization. */
static void test_norm(toka_device *d, int M, int E, float static_scale) {
    toka_shape shape = {.E = E, .eps = 1e-5f};
    gpu_buf<bf16> x((size_t)M * E), y((size_t)M * E), z((size_t)M * E);
    gpu_buf<float> w((size_t)E), scale((size_t)M), scale2((size_t)M);
    weight W = {NULL, NULL, 8, E, scale.p(), false, static_scale};
    d->shape = &shape, d->E = E, d->x_scale = scale.p();
    gpu_random(x, gpu_seed, 3), gpu_random(w, gpu_seed + 1, 1);
    GPU_OK(cudaDeviceSynchronize());
    rmsnorm(d, x.p(), NULL, w.p(), y.p(), M);
    launch_dependent(d, "quantization", quantize_rows_kernel, {dim3((unsigned)M), 256}, y.p(), E, E, static_scale, scale.p());
    d->x_scale = scale2.p();
    rmsnorm(d, x.p(), NULL, w.p(), z.p(), M, &W);
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> want = y.host(), got = z.host();
    int wrong = memcmp(scale.host().data(), scale2.host().data(), (size_t)M * 4) != 0;
    for (int m = 0; m < M; m++) wrong += memcmp(&want[(size_t)m * E], &got[(size_t)m * E], (size_t)E) != 0;
    gpu_check(!wrong && z.guards_hold() && scale2.guards_hold(), "norm and quantize M=%d E=%d static %g: %d rows differ %s", M, E, static_scale, wrong,
              d->error.msg);
    d->shape = NULL;
}

/* ---- The GEMMs ---- */

struct problem { /* random operands of a GEMM */
    gpu_buf<bf16> x; /* e4m3 in place, rows of 2 ldx bytes */
    gpu_buf<uint8_t> w;
    gpu_buf<float> scale, x_scale, bias;
    int rows, ldx;
    weight W;
    problem(int rows_, int N, int K, bool blocked, bool one_sign)
        : x((size_t)rows_ * (K + 8), (size_t)GEMM_PAD_ROWS * (K + 8)), w((size_t)N * fp8_row_bytes(K)),
          scale(blocked ? (size_t)ceil_div(K, 128) * ceil_div(N, 128) * 2 : (size_t)N), x_scale((size_t)rows_), bias((size_t)N),
          rows(rows_), ldx(K + 8) {
        std::vector<float> scales(scale.n), x_scales(x_scale.n);
        for (size_t i = 0; i < scales.size(); i++) scales[i] = ldexpf(1 + gpu_uniform(gpu_seed + 5, i), (int)(i * 7 % 5) - 14);
        for (size_t i = 0; i < x_scales.size(); i++) x_scales[i] = ldexpf(1 + gpu_uniform(gpu_seed + 6, i), (int)(i % 3) - 8) / sqrtf((float)K);
        scale.set(scales), x_scale.set(x_scales);
        gpu_fill_fp8<<<1056, 256>>>((uint8_t *)x.p(), (size_t)rows * 2 * ldx, gpu_seed + 1, one_sign);
        gpu_fill_fp8<<<1056, 256>>>(w.p(), w.n, gpu_seed + 2, one_sign);
        gpu_random(bias, gpu_seed + 3, 0.5f);
        W = weight{(bf16 *)w.p(), NULL, N, K, scale.p(), blocked};
        GPU_OK(cudaDeviceSynchronize());
    }
};
static const char *kind_name(int kind) {
    return kind == EPI_STORE ? "store" : kind == EPI_RESIDUAL ? "residual" : kind == EPI_SWIGLU ? "swiglu" : "other";
}
static void launch_variant(toka_device *d, problem &p, const gemm_variant *v, int M, bf16 *y, int ldy, const weight *w) {
    gemm_args a = {M, p.x.p(), p.ldx, w, y, ldy, (enum epilogue)v->kind};
    gemm_wgmma_with(d, &a, gemm_plan{v, v->rows == 128 && M > 128 && M % 2 ? 2 : 1, 8});
}
static void test_shape(toka_device *d, int N, int K, bool blocked, bool one_sign, const std::vector<int> &counts) {
    const int rows = counts.back() + 1, ldy = N + 8;
    problem p(rows, N, K, blocked, one_sign);
    gpu_buf<bf16> y((size_t)rows * ldy), y0((size_t)rows * ldy), first((size_t)rows * ldy);
    gpu_buf<double> acc((size_t)rows * N), size((size_t)rows * N);
    gpu_buf<finding> found(4000);
    std::vector<std::string> names;
    /* all of one sign: what the tensor cores cut adds up */
    const double sum_error = one_sign ? 1.0 / 512 : 1e-3 / sqrt(std::max(1.0, K / 128.0));
    GPU_OK(cudaMemset(found.p(), 0, found.n * sizeof(finding)));
    d->x_scale = p.x_scale.p();
    reference<<<dim3((unsigned)ceil_div(N, 128), (unsigned)rows), 128>>>((uint8_t *)p.x.p(), 2 * (size_t)p.ldx, p.x_scale.p(), p.W, rows, acc.p(), size.p());
    GPU_OK(cudaDeviceSynchronize());
    for (int kind : {(int)EPI_STORE, (int)EPI_RESIDUAL, (int)EPI_SWIGLU}) {
        if (kind == EPI_SWIGLU && N % 16) continue;
        if (kind == EPI_RESIDUAL) gpu_random(y0, gpu_seed + 4, 1);
        else y0.poison();
        GPU_OK(cudaDeviceSynchronize());
        for (int M : counts) {
            const gemm_variant *before = NULL;
            weight W = p.W;
            W.bias = M % 3 && kind != EPI_SWIGLU ? p.bias.p() : NULL;
            const int stride = kind == EPI_SWIGLU ? N / 2 + 8 : ldy;
            for (const gemm_variant &v : gemm_fp8_variants) {
                if (v.kind != kind || v.blocked != blocked || M > (v.rows == 64 ? 64 : M)) continue;
                GPU_OK(cudaMemcpyAsync(y.p(), y0.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
                launch_variant(d, p, &v, M, y.p(), stride, &W);
                finding *f = found.p() + names.size();
                compare<<<264, 256, 0, d->stream>>>(y.p(), y0.p(), W, acc.p(), size.p(), rows, M, stride, (enum epilogue)kind, sum_error, f);
                if (before) differ<<<132, 256, 0, d->stream>>>((uint16_t *)y.p(), (uint16_t *)first.p(), y.n, f);
                else GPU_OK(cudaMemcpyAsync(first.p(), y.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
                before = &v;
                names.push_back(std::string(kind_name(kind)) + " " + std::to_string(v.rows) + "x" + std::to_string(v.bn) + " M=" + std::to_string(M));
            }
        }
    }
    GPU_OK(cudaStreamSynchronize(d->stream));
    gpu_check(!d->error.code, "N=%d K=%d: %s", N, K, d->error.msg);
    std::vector<finding> f = found.host();
    for (size_t i = 0; i < names.size(); i++)
        gpu_check(!f[i].bad, "N=%d K=%d%s%s %s: %u wrong or unlike the first instance, (%d, %d): %g, expected %g (worst of the right ones %.2f)", N, K,
                  blocked ? " blocks" : "", one_sign ? " one sign" : "", names[i].c_str(), f[i].bad, f[i].m, f[i].n, f[i].got, f[i].want, f[i].worst);
    gpu_check(y.guards_hold() && p.x.guards_hold() && p.x_scale.guards_hold(), "N=%d K=%d: guard bands", N, K);
}
/* A row has the same bits for every M, through gemm. 100 equal launches give the same bits. */
static void test_rows(toka_device *d, int N, int K, bool blocked, int repeats) {
    const std::vector<int> counts = {1, 8, 9, 33, 64, 65, 129, 300};
    const int rows = counts.back();
    gpu_buf<bf16> x((size_t)rows * K), x0((size_t)rows * K, (size_t)GEMM_PAD_ROWS * K), y((size_t)rows * N), first((size_t)rows * N);
    gpu_buf<finding> found(1);
    problem p(rows, N, K, blocked, false);
    gpu_random(x, gpu_seed + 9, 1);
    GPU_OK(cudaMemset(found.p(), 0, sizeof(finding)));
    GPU_OK(cudaDeviceSynchronize());
    d->x_scale = p.x_scale.p();
    for (size_t i = counts.size(); i--;)
        for (int repeat = 0; repeat < repeats; repeat++) {
            GPU_OK(cudaMemcpyAsync(x0.p(), x.p(), x.n * 2, cudaMemcpyDeviceToDevice, d->stream));
            gemm_args a = {counts[i], x0.p(), K, &p.W, y.p(), N, EPI_STORE};
            gemm(d, &a);
            if (counts[i] == rows && !repeat) GPU_OK(cudaMemcpyAsync(first.p(), y.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
            differ<<<132, 256, 0, d->stream>>>((uint16_t *)y.p(), (uint16_t *)first.p(), (size_t)counts[i] * N, found.p());
        }
    GPU_OK(cudaStreamSynchronize(d->stream));
    gpu_check(!found.host()[0].bad, "rows N=%d K=%d%s: %u numbers depend on M %s", N, K, blocked ? " blocks" : "", found.host()[0].bad, d->error.msg);
}
/* gemm_smallm_fp8 gives the same bits as the norm or the quantization, and then gemm_wgmma. */
static void test_few(toka_device *d, int M, int N, int K, bool blocked, bool norm, float static_scale) {
    const int ldx = norm ? K : K + 8, ldy = N + 8; /* rmsnorm has rows of E */
    toka_shape shape = {};
    problem p(M, N, K, blocked, false);
    gpu_buf<bf16> x((size_t)M * ldx), xn((size_t)M * ldx, (size_t)GEMM_PAD_ROWS * ldx), y0((size_t)M * ldy), y((size_t)M * ldy), want((size_t)M * ldy);
    gpu_buf<float> norm_w((size_t)K);
    gpu_buf<finding> found(3);
    gpu_random(x, gpu_seed + 9, 1), gpu_random(y0, gpu_seed + 10, 1), gpu_random(norm_w, gpu_seed + 11, 1);
    GPU_OK(cudaMemset(found.p(), 0, found.n * sizeof(finding)));
    shape.E = norm ? K - 1 : K, shape.eps = 1e-5f, d->shape = &shape, d->E = ldx, d->x_scale = p.x_scale.p();
    p.W.x_scale = static_scale;
    GPU_OK(cudaDeviceSynchronize());
    int n = 0;
    for (enum epilogue epi : {EPI_STORE, EPI_RESIDUAL, EPI_SWIGLU}) {
        if (epi == EPI_SWIGLU && N % 16) continue;
        p.W.bias = M % 2 && epi != EPI_SWIGLU ? p.bias.p() : NULL;
        for (bf16 *to : {y.p(), want.p()}) GPU_OK(cudaMemcpyAsync(to, y0.p(), y.n * 2, cudaMemcpyDeviceToDevice, d->stream));
        gemm_args a = {.M = M, .x = x.p(), .ldx = ldx, .w = &p.W, .y = y.p(), .ldy = ldy, .epi = epi, .norm = norm ? norm_w.p() : NULL};
        gemm_smallm_fp8(d, &a);
        GPU_OK(cudaMemcpyAsync(xn.p(), x.p(), x.n * 2, cudaMemcpyDeviceToDevice, d->stream));
        if (norm) rmsnorm(d, x.p(), NULL, norm_w.p(), xn.p(), M, &p.W);
        a.norm = NULL, a.x = xn.p(), a.y = want.p(), a.x_quantized = norm;
        gemm_fp8_quantize(d, &a);
        a.x_quantized = true;
        gemm_wgmma_with(d, &a, gemm_fp8_choose(d, epi, M, &p.W, false));
        differ<<<132, 256, 0, d->stream>>>((uint16_t *)y.p(), (uint16_t *)want.p(), y.n, found.p() + n++);
    }
    GPU_OK(cudaStreamSynchronize(d->stream));
    d->shape = NULL;
    const std::vector<finding> f = found.host();
    for (int i = 0; i < n; i++)
        gpu_check(!f[(size_t)i].bad && !d->error.code, "few M=%d N=%d K=%d%s%s static %g %s: %u numbers differ %s", M, N, K, blocked ? " blocks" : "",
                  norm ? " norm" : "", static_scale, i == 0 ? "store" : i == 1 ? "residual" : "swiglu", f[(size_t)i].bad, d->error.msg);
    gpu_check(y.guards_hold(), "few M=%d N=%d K=%d: guard bands", M, N, K);
}
/* q, K and V by the epilogue against rope_kernel after EPI_STORE: they differ by one rounding. */
static void test_qkv(toka_device *d, int E, int H, int K, int D, int M, bool blocked, bool norm) {
    const int N = (H + 2 * K) * D, B = 16, slots = 512, positions = 64;
    const size_t kv_size = (size_t)slots * K * 2 * D;
    problem p(M, N, E, blocked, false);
    gpu_buf<bf16> y((size_t)M * N), q((size_t)M * H * D), q2((size_t)M * H * D), kv(kv_size), kv2(kv_size);
    gpu_buf<float> q_norm((size_t)D), k_norm((size_t)D);
    gpu_buf<float2> table((size_t)positions * D / 2);
    gpu_buf<int> pos((size_t)M), kv_slot((size_t)M);
    std::vector<int> at, where;
    std::vector<float2> cs;
    for (int m = 0; m < M; m++) at.push_back(m * 29 % positions), where.push_back(m * 41 % slots);
    for (int i = 0; i < positions * D / 2; i++) cs.push_back(make_float2(cosf((float)i), sinf((float)i)));
    gpu_random(kv, gpu_seed + 3, 1), gpu_random(q_norm, gpu_seed + 4, 2), gpu_random(k_norm, gpu_seed + 5, 2);
    GPU_OK(cudaMemcpy(kv2.p(), kv.p(), kv_size * sizeof(bf16), cudaMemcpyDeviceToDevice));
    pos.set(at), kv_slot.set(where), table.set(cs);
    p.W.bias = p.bias.p();
    d->x_scale = p.x_scale.p();
    qkv_params params = {p.bias.p(), norm ? q_norm.p() : NULL, norm ? k_norm.p() : NULL, 0.1f, H, K, B, pos.p(), kv_slot.p(), table.p(),
                         q.p(), kv.p(), D};
    const gemm_variant *store = NULL;
    for (const gemm_variant &v : gemm_fp8_variants)
        if (!store && v.kind == EPI_STORE && v.blocked == blocked && v.rows == 128) store = &v;
    launch_variant(d, p, store, M, y.p(), N, &p.W);
    rope_args r = {params, y.p(), M, true};
    launch_dependent(d, "RoPE", rope_kernel<false>, {dim3((unsigned)ceil_div(M * (H + 2 * K), 8)), 256}, r);
    GPU_OK(cudaStreamSynchronize(d->stream));
    std::vector<bf16> want[2] = {q.host(), kv.host()};
    params.q = q2.p(), params.kv = kv2.p();
    for (const gemm_variant &v : gemm_fp8_variants) {
        if (v.kind != (D == 64 ? GEMM_QKV64 : GEMM_QKV128) || v.blocked != blocked || (v.rows == 64 && M > 64)) continue;
        if (norm && !gemm_whole_heads(&v)) continue;
        q2.poison(), kv2.set(kv.host());
        GPU_OK(cudaDeviceSynchronize());
        gemm_wgmma_qkv_with(d, M, p.x.p(), p.ldx, &p.W, &params, gemm_plan{&v, 1, 8});
        GPU_OK(cudaStreamSynchronize(d->stream));
        std::vector<bf16> got[2] = {q2.host(), kv2.host()};
        double off = 0, all = 0, worst = 0;
        for (int i = 0; i < 2; i++)
            for (size_t k = 0; k < want[i].size(); k++) {
                const double u = (double)__bfloat162float(want[i][k]), g = (double)__bfloat162float(got[i][k]);
                off += (u - g) * (u - g), all += u * u, worst = std::max(worst, fabs(u - g) / (1 + fabs(u)));
            }
        gpu_check(sqrt(off / all) < 5e-3 && worst < 0.05 && q2.guards_hold() && kv2.guards_hold(),
                  "qkv %dx%d E=%d H=%d K=%d D=%d M=%d%s%s: relative L2 %.2e, most %.2e %s", v.rows, v.bn, E, H, K, D, M, blocked ? " blocks" : "",
                  norm ? " normed" : "", sqrt(off / all), worst, d->error.msg);
    }
}

/* ---- Times ---- */

struct matrix {
    const char *name;
    int N, K;
    enum epilogue epi;
};
static const matrix matrices[] = {{"qkv", 6144, 4096, EPI_STORE}, {"o", 4096, 4096, EPI_RESIDUAL},
                                  {"gate_up", 28672, 4096, EPI_SWIGLU}, {"down", 4096, 14336, EPI_RESIDUAL}};
struct timing { /* buffers that rotate, so that W comes from memory */
    gpu_buf<bf16> x, w, y;
    gpu_buf<float> scale, x_scale;
    int M, copies, per_graph;
    const matrix &shape;
    timing(const matrix &s, int M_)
        : x((size_t)M_ * s.K, (size_t)GEMM_PAD_ROWS * s.K), w(std::max((size_t)s.N * s.K, (size_t)(200 << 20) / 2)), y((size_t)M_ * s.N),
          scale((size_t)s.N * (s.K / 128)), x_scale((size_t)M_), M(M_), shape(s) {
        const size_t bytes = (size_t)s.N * s.K;
        copies = std::max(1, (int)(w.n * 2 / bytes)), per_graph = std::max(2, std::min(40, (int)(4e13 / (2.0 * M * s.N * s.K * 10))));
        gpu_random(x, 1, 1), gpu_random(w, 2, 1), gpu_random(y, 3, 1), gpu_random(scale, 4, 1e-4f), gpu_random(x_scale, 5, 1e-3f);
        GPU_OK(cudaDeviceSynchronize());
    }
    gemm_args args(const weight *W) { return {M, x.p(), shape.K, W, y.p(), shape.epi == EPI_SWIGLU ? shape.N / 2 : shape.N, shape.epi}; }
    weight fp8(int i, bool blocked) {
        return {w.p() + (size_t)(i % copies) * shape.N * shape.K / 2, NULL, shape.N, shape.K, scale.p(), blocked};
    }
    double time(toka_device *d, const std::function<void(int)> &op) { return gpu_time_us(d->stream, per_graph, 5, op); }
};
static void bench_times(toka_device *d) {
    printf("us (TFLOP/s) of a GEMM; fp8: x is quantized; + quantize: with its kernel\n%-8s %5s %16s %16s %16s %16s\n", "W", "M", "bf16", "fp8", "fp8 blocks",
           "fp8 + quantize");
    for (const matrix &s : matrices)
        for (int M : {1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192}) {
            timing t(s, M);
            const double flop = 2.0 * M * s.N * s.K;
            d->x_scale = t.x_scale.p();
            const int halves = std::max(1, t.copies / 2);
            double us[4] = {t.time(d, [&](int i) {
                weight W = {t.w.p() + (size_t)(i % halves) * s.N * s.K, NULL, s.N, s.K};
                gemm_args a = t.args(&W);
                gemm(d, &a);
            })};
            for (int blocked = 0; blocked < 2; blocked++)
                us[1 + blocked] = t.time(d, [&](int i) {
                    weight W = t.fp8(i, blocked);
                    gemm_args a = t.args(&W);
                    gemm_wgmma_with(d, &a, gemm_fp8_choose(d, s.epi, M, &W, false));
                });
            us[3] = t.time(d, [&](int i) {
                weight W = t.fp8(i, false);
                gemm_args a = t.args(&W);
                gemm(d, &a);
            });
            printf("%-8s %5d", s.name, M);
            for (double u : us) printf(" %8.1f (%5.0f)", u, flop / u * 1e-6);
            printf("\n");
            gpu_check(!d->error.code, "bench: %s", d->error.msg);
        }
}
static void sweep(toka_device *d) {
    for (const matrix &s : matrices)
        for (int M : {1, 8, 16, 64, 128, 256, 512, 1024, 4096, 8192}) {
            timing t(s, M);
            d->x_scale = t.x_scale.p();
            printf("%-8s M=%-5d", s.name, M);
            for (const gemm_variant &v : gemm_fp8_variants)
                for (int multicast = 1; multicast <= 2; multicast++) {
                    if (v.kind != EPI_STORE || v.blocked || (v.rows == 64 && M > 64) || (multicast == 2 && (M <= 128 || v.rows == 64)) ||
                        (v.bn < 128 && M > 1024))
                        continue;
                    printf("  %dx%d%s %.1f", v.rows, v.bn, multicast == 2 ? "m" : "", t.time(d, [&](int i) {
                        weight W = t.fp8(i, false);
                        gemm_args a = t.args(&W);
                        a.epi = EPI_STORE, a.ldy = s.N;
                        gemm_wgmma_with(d, &a, gemm_plan{&v, multicast, 8});
                    }));
                }
            printf("\n");
        }
}

int main(int argc, char **argv) {
    toka_device *d = gpu_device();
    const std::string mode = argc > 1 ? argv[1] : "";
    const bool small = mode == "small", quick = small || mode == "quick";
    if (!d->hopper) return printf("0 passed, 0 failed, 1 skipped: no Hopper GPU\n"), 0;
    gemm_open(d);
    if (mode == "bench") return bench_times(d), gpu_report();
    if (mode == "sweep") return sweep(d), gpu_report();
    for (int form = 0; form < N_FORMS; form++)
        for (int gate_up = 0; gate_up < 2; gate_up++) {
            test_load(d, (enum form)form, gate_up, !gate_up, 128, 272, 0, 0), test_load(d, (enum form)form, gate_up, false, 192, 200, 0, 0);
            test_load(d, (enum form)form, gate_up, false, 128, 128, 128, 128);
            if (!small) test_load(d, (enum form)form, gate_up, !gate_up, 1024, 4096, 0, 0);
        }
    for (int K : {8, 24, 896, 4096, 4104, 14336, 16384, 28672})
        if (!quick || K == 24 || K == 4104) test_quantize(d, 7, K, 0), test_quantize(d, 7, K, 0.01f);
    for (int E : {8, 896, 4096, 8192})
        if (!small || E == 896) test_norm(d, 5, E, 0), test_norm(d, 5, E, 0.02f);
    const std::vector<int> all = {1, 7, 8, 9, 16, 17, 33, 64, 65, 127, 128, 129, 257, 300}, few = {1, 9, 64, 65, 200};
    for (int blocked = 0; blocked < 2; blocked++) {
        for (auto nk : {std::pair<int, int>{8, 8}, {16, 24}, {136, 1000}, {208, 2056}, {272, 640}, {1008, 72}, {640, 384}})
            if (!quick || nk.first == 136) test_shape(d, nk.first, nk.second, blocked, false, quick ? few : all);
        if (!small) test_shape(d, 64, 16384, blocked, true, few);
        if (!quick) test_shape(d, 4096, 4096, blocked, false, few), test_shape(d, 2048, 14336, blocked, false, few);
        for (int M : {1, 2, 3, 7, 8})
            for (auto nk : {std::pair<int, int>{8, 8}, {136, 1000}, {208, 72}, {48, 4096}, {1536, 2048}, {4096, 4096}, {2064, 14336}})
                for (int norm = 0; norm < 2 && M * (nk.second + 127) / 128 * 128 <= SMALLM8_X_BYTES - 1024; norm++)
                    if (!small || (M < 4 && nk.first < 256))
                        test_few(d, M, nk.first, nk.second, blocked, norm, 0), test_few(d, M, nk.first, nk.second, blocked, norm, 0.02f);
        test_rows(d, small ? 160 : 1536, small ? 136 : 2048, blocked, small ? 1 : quick ? 10 : 100);
        for (int M : {1, 33, 64, 150})
            if (!small || M == 33)
                for (int norm = 0; norm < 2; norm++)
                    test_qkv(d, 512, 8, 2, 64, M, blocked, norm), test_qkv(d, 640, 4, 2, 128, M, blocked, norm);
    }
    return gpu_report();
}
