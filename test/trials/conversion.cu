/* conversion.cu - the cost of unpacking 8-bit and 4-bit numbers in registers.
 *
 * Question. How many clocks does a value cost: e4m3 to f16 and bf16, int4 to bf16, MXFP4 (e2m1 with
 * a power of two as scale) to bf16? Is unpacking hidden by wgmma with A from registers? Does it
 * keep up with memory when decode attention reads K and V as e4m3?
 *
 * Method. (1) Each conversion of random words is compared with the host's, bit for bit. (2) 1,024
 * threads of one CTA on each SM convert in a loop; the result is clocks for a value. (3) Two
 * warpgroups multiply 64 rows each. A comes from packed shared memory through registers; B has 16
 * to 256 columns. The stages do not change, so that only shared memory, conversion and MMAs are
 * timed: clocks for a block of 64 columns of K, compared with SS and with RS by ldmatrix, for one
 * or two CTAs on an SM. One tile is compared with float64. (4) 2 GB are read from memory, converted
 * and multiplied by mma.sync as decode attention does, compared with reading alone and with 2-byte
 * numbers that need no conversion. One part is compared with float64.
 *
 * A word of 4-bit numbers holds the low and the high half of operand register i in nibbles i and i
 * + 4. A word of e4m3 bytes b0 .. b3 holds the pairs (b0, b2) and (b1, b3), but for cvt, which
 * takes (b0, b1) and (b2, b3).
 *
 * Build:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o trial_conversion \
 *        test/trials/conversion.cu
 * Run: ./trial_conversion (some seconds; exit code 1 if a check fails)
 *
 * Decides: whether toka's int4, MXFP4 and FP8 K/V kernels may unpack in the consumer warps, and
 * with which instructions. Results: test/results/trials-conversion.md. */
#include "trial.cuh"

#include <cmath>
#include <cstring>

/* ---- The conversions: one word to OUT registers of two numbers ---- */

__device__ static inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ static inline uint32_t sub_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ static inline uint32_t mul_f16x2(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}
__device__ static inline uint32_t cvt_e4m3x2(uint16_t pair) {
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(pair));
    return r;
}
__device__ static inline uint32_t and_or(uint32_t a, uint32_t mask, uint32_t b) { /* one LOP3 */
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(mask), "r"(b));
    return r;
}

struct e4m3_f16_cvt {
    static constexpr int OUT = 2;
    static constexpr bool HALF = true;
    __device__ static void run(uint32_t (&r)[2], uint32_t w, uint32_t) {
        r[0] = cvt_e4m3x2((uint16_t)w), r[1] = cvt_e4m3x2((uint16_t)(w >> 16));
    }
};
struct e4m3_f16_bits { /* times 2^-8; a scale can include this factor */
    static constexpr int OUT = 2;
    static constexpr bool HALF = true;
    __device__ static void run(uint32_t (&r)[2], uint32_t w, uint32_t) {
        r[0] = and_or(w << 8, 0x80008000u, w << 7 & 0x3f803f80u);
        r[1] = and_or(w, 0x80008000u, w >> 1 & 0x3f803f80u);
    }
};
struct e4m3_f16_bits_mul { /* the same, times 2^8 */
    static constexpr int OUT = 2;
    static constexpr bool HALF = true;
    __device__ static void run(uint32_t (&r)[2], uint32_t w, uint32_t) {
        e4m3_f16_bits::run(r, w, 0);
        r[0] = mul_f16x2(r[0], 0x5c005c00u), r[1] = mul_f16x2(r[1], 0x5c005c00u);
    }
};
struct e4m3_bf16_bits { /* seven bits << 4, times 2^120 */
    static constexpr int OUT = 2;
    static constexpr bool HALF = false;
    __device__ static void run(uint32_t (&r)[2], uint32_t w, uint32_t) {
        r[0] = mul_bf16x2(and_or(w << 8, 0x80008000u, w << 4 & 0x07f007f0u), 0x7b807b80u);
        r[1] = mul_bf16x2(and_or(w, 0x80008000u, w >> 4 & 0x07f007f0u), 0x7b807b80u);
    }
};
struct int4_bf16 { /* 128 + n as bits, minus 128 + zero */
    static constexpr int OUT = 4;
    static constexpr bool HALF = false;
    __device__ static void run(uint32_t (&r)[4], uint32_t w, uint32_t) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            r[i] = sub_bf16x2(and_or(w >> 4 * i, 0x000f000fu, 0x43004300u), 0x43084308u);
    }
};
struct int4_bf16_scaled { /* the same times a scale, rounded to bf16 */
    static constexpr int OUT = 4;
    static constexpr bool HALF = false;
    __device__ static void run(uint32_t (&r)[4], uint32_t w, uint32_t scale) {
        int4_bf16::run(r, w, scale);
#pragma unroll
        for (int i = 0; i < 4; i++) r[i] = mul_bf16x2(r[i], scale);
    }
};
struct mxfp4_bf16 { /* three bits << 6, sign << 12, times 2^126 and the block's scale */
    static constexpr int OUT = 4;
    static constexpr bool HALF = false;
    __device__ static void run(uint32_t (&r)[4], uint32_t w, uint32_t scale) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t bits = i < 2 ? w << (6 - 4 * i) : w >> (4 * i - 6);
            r[i] = mul_bf16x2(and_or(w << (12 - 4 * i), 0x80008000u, bits & 0x01c001c0u), scale);
        }
    }
};
/* Scale operands, pairs of bf16: 0.25 (int4), 2^126 (MXFP4 with a block scale of 1). */
static const uint32_t SCALE_QUARTER = 0x3e803e80u, SCALE_MXFP4 = 0x7e807e80u;

/* The host's value of number i of a word, in the order of the registers' halves. */
static double e4m3_value(uint32_t w, int byte) {
    fp8 v;
    v.__x = (__nv_fp8_storage_t)(w >> 8 * byte);
    return (double)float(v);
}
static double nibble_value(uint32_t w, int reg, int half, bool mxfp4) {
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    int n = w >> 4 * (reg + 4 * half) & 15;
    return mxfp4 ? (n & 8 ? -1 : 1) * e2m1[n & 7] : n - 8;
}

/* ---- 1. and 2. Each conversion alone ---- */

template <class C>
__global__ static void convert_kernel(const uint32_t *words, uint32_t *out, int n, uint32_t scale) {
    int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    uint32_t r[C::OUT];
    if (i >= n) return;
    C::run(r, words[i], scale);
    for (int k = 0; k < C::OUT; k++) out[i * C::OUT + k] = r[k];
}
/* The result of each word is the next input, so that the compiler cannot drop anything. This costs
 * one LOP3 for a word (two for 4-bit numbers) in addition to the conversion. */
template <class C>
__global__ static void __launch_bounds__(1024)
    convert_loop_kernel(uint32_t *out, long long *clocks, int n, uint32_t scale) {
    uint32_t w[8];
    for (int j = 0; j < 8; j++) w[j] = (uint32_t)mix(threadIdx.x * 8 + j);
    __syncthreads();
    long long begin = clock64();
    for (int i = 0; i < n; i++)
#pragma unroll
        for (int j = 0; j < 8; j++) {
            uint32_t r[C::OUT];
            C::run(r, w[j], scale);
            w[j] = r[0] ^ r[1] ^ (C::OUT == 4 ? r[2] ^ r[3] ^ 0x12345678u : 0x12345678u);
        }
    __syncthreads();
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
    for (int j = 0; j < 8; j++) out[(blockIdx.x * 1024 + threadIdx.x) * 8 + j] = w[j];
}
static double pair_half(uint32_t pair, int half, bool f16) {
    uint16_t bits = (uint16_t)(pair >> 16 * half);
    __half h;
    bf16 b;
    memcpy(&h, &bits, 2), memcpy(&b, &bits, 2);
    return f16 ? (double)__half2float(h) : (double)__bfloat162float(b);
}
template <class C>
static void try_conversion(const char *name, uint32_t scale,
                           const std::function<double(uint32_t, int, int)> &value) {
    const int n = 1 << 16, loops = 2000, sms = sm_count();
    buffer<uint32_t> words(n), out((size_t)n * C::OUT), sink((size_t)sms * 8192);
    buffer<long long> clocks((size_t)sms);
    fill_words_kernel<<<64, 256>>>(words.p, n, 41);
    convert_kernel<C><<<n / 256, 256>>>(words.p, out.p, n, scale);
    CUDA_OK(cudaGetLastError());
    std::vector<uint32_t> hw = words.host(), ho = out.host();
    int wrong = 0, nans = 0;
    for (int i = 0; i < n; i++)
        for (int k = 0; k < 2 * C::OUT; k++) {
            double want = value(hw[i], k / 2, k % 2);
            nans += want != want;
            wrong +=
                want == want && pair_half(ho[(size_t)i * C::OUT + k / 2], k % 2, C::HALF) != want;
        }
    check(wrong == 0, "%s: %d of %d numbers are wrong", name, wrong, n * 2 * C::OUT);
    for (int i = 0; i < 2; i++)
        convert_loop_kernel<C><<<sms, 1024>>>(sink.p, clocks.p, loops, scale);
    CUDA_OK(cudaGetLastError());
    double sum = 0;
    for (long long c : clocks.host()) sum += (double)c;
    double values = 1024.0 * 8 * loops * 2 * C::OUT;
    printf("%-34s %6.1f values a clock and multiprocessor, %5.2f issue clocks of a warp for 8 "
           "values a lane\n",
           name, values / (sum / sms), sum / sms / values * 8 * 32 * 4);
}
static void conversions() {
    auto e4m3_pairs = [](uint32_t w, int reg, int half) { return e4m3_value(w, 2 * reg + half); };
    auto e4m3_turns = [](uint32_t w, int reg, int half) { return e4m3_value(w, reg + 2 * half); };
    auto e4m3_small = [](uint32_t w, int reg, int half) {
        return e4m3_value(w, reg + 2 * half) / 256;
    };
    printf("\nconversion alone, 32 warps\n");
    try_conversion<e4m3_f16_cvt>("e4m3 to f16, cvt", 0, e4m3_pairs);
    try_conversion<e4m3_f16_bits>("e4m3 to f16, bits (times 2^-8)", 0, e4m3_small);
    try_conversion<e4m3_f16_bits_mul>("e4m3 to f16, bits and multiply", 0, e4m3_turns);
    try_conversion<e4m3_bf16_bits>("e4m3 to bf16, bits and multiply", 0, e4m3_turns);
    try_conversion<int4_bf16>(
        "int4 to bf16", 0, [](uint32_t w, int r, int h) { return nibble_value(w, r, h, false); });
    try_conversion<int4_bf16_scaled>(
        "int4 to bf16, times scale", SCALE_QUARTER,
        [](uint32_t w, int r, int h) { return nibble_value(w, r, h, false) / 4; });
    try_conversion<mxfp4_bf16>("MXFP4 to bf16", SCALE_MXFP4, [](uint32_t w, int r, int h) {
        return nibble_value(w, r, h, true);
    });
}

/* ---- 3. Concurrently with MMAs ---- */

enum { SS, RS_LDMATRIX, RS_INT4, RS_INT4_SCALED, RS_MXFP4, RS_E4M3 };
enum { STILL_STAGES = 4 };

template <int WAY>
constexpr int a_bytes = WAY <= RS_LDMATRIX ? 16384
                        : WAY == RS_E4M3   ? 8192
                                           : 4096; /* 128 rows of a stage */

/* The operand of four steps of 16 columns, from this warpgroup's packed A of a stage. */
template <int WAY> __device__ static inline void load_a(uint32_t (&f)[4][4], uint32_t at) {
    const int t = threadIdx.x & 127, lane = t & 31, row = t / 32 * 16 + (lane & 15);
    if constexpr (WAY == RS_LDMATRIX) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            ldmatrix_x4(f[i], at + row * 128 + (((2 * i + (lane >> 4)) ^ (row & 7)) << 4));
    } else if constexpr (WAY == RS_E4M3) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 v = smem_load_16(at + half * 2048 + 16 * t);
            uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t r[2];
                e4m3_bf16_bits::run(r, w[i], 0);
                f[2 * half + i / 2][i % 2 * 2] = r[0], f[2 * half + i / 2][i % 2 * 2 + 1] = r[1];
            }
        }
    } else {
        uint4 v = smem_load_16(at + 16 * t);
        uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (WAY == RS_INT4) int4_bf16::run(f[i], w[i], 0);
            if (WAY == RS_INT4_SCALED) int4_bf16_scaled::run(f[i], w[i], SCALE_QUARTER);
            if (WAY == RS_MXFP4) mxfp4_bf16::run(f[i], w[i], SCALE_MXFP4);
        }
    }
}
template <int WAY, int N>
__device__ static inline void issue_still(float (&acc)[N / 2], uint32_t (&f)[4][4], uint32_t a,
                                          uint32_t b) {
    if constexpr (WAY != SS) load_a<WAY>(f, a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (WAY == SS)
            wgmma_bf16<N>(acc, wgmma_desc(a) + 2 * i, wgmma_desc(b) + 2 * i, 1);
        else wgmma_bf16_rs<N>(acc, f[i], wgmma_desc(b) + 2 * i, 1);
    }
    wgmma_commit();
}
/* d[128][N] = A B^T over `rounds` times the four stages. images: STILL_STAGES times [A's bytes][B:
 * N rows of 128 bytes, swizzled]. */
template <int WAY, int N, int CTAS>
__global__ static void __launch_bounds__(256, CTAS)
    still_kernel(const uint4 *images, float *d, float *clocks, int rounds) {
    extern __shared__ __align__(1024) char smem[];
    constexpr int STAGE_BYTES = 16384 + N * 128;
    const uint32_t base = smem_at(smem);
    const int t = threadIdx.x, group = t / 128;
    for (int i = t; i < STILL_STAGES * STAGE_BYTES / 16; i += 256)
        smem_store_16(base + 16 * i, images[i]);
    fence_async_smem();
    __syncthreads();
    float acc[N / 2] = {};
    uint32_t f[2][4][4];
    long long begin = clock64();
    for (int r = 0; r < rounds; r++) {
        const uint32_t a = base + group * (a_bytes<WAY> / 2);
        issue_still<WAY, N>(acc, f[0], a, base + 16384);
#pragma unroll
        for (int s = 1; s < STILL_STAGES; s++) {
            issue_still<WAY, N>(acc, f[s % 2], a + s * STAGE_BYTES, base + s * STAGE_BYTES + 16384);
            wgmma_wait<1>();
        }
        wgmma_wait<0>();
        wgmma_keep(acc);
    }
    __syncthreads();
    if (t == 0)
        clocks[blockIdx.x] = (float)(clock64() - begin) / (float)(rounds * STILL_STAGES) / CTAS;
    if (blockIdx.x) return;
    int row = t / 32 * 16 + t % 32 / 4;
    for (int i = 0; i < N / 2; i++)
        d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + t % 4 * 2 + i % 2] = acc[i];
}
/* The value of A at (row of 128, column of 64): the inverse of load_a. */
static double still_value(int way, const unsigned char *a, int row, int col) {
    if (way <= RS_LDMATRIX) {
        bf16 v;
        memcpy(&v, a + row * 128 + ((col / 8 ^ (row & 7)) << 4) + col % 8 * 2, 2);
        return (double)__bfloat162float(v);
    }
    int r = row % 64, step = col / 16, c = col % 16, thread = r / 16 * 32 + r % 8 * 4 + c % 8 / 2;
    int reg = r / 8 % 2 + c / 8 * 2, half = c % 2;
    uint32_t w;
    if (way == RS_E4M3) {
        memcpy(&w,
               a + row / 64 * 4096 + step / 2 * 2048 + 16 * thread + (step % 2 * 2 + reg / 2) * 4,
               4);
        return e4m3_value(w, reg % 2 + 2 * half);
    }
    memcpy(&w, a + row / 64 * 2048 + 16 * thread + 4 * step, 4);
    return nibble_value(w, reg, half, way == RS_MXFP4) * (way == RS_INT4_SCALED ? 0.25 : 1);
}
static uint16_t random_bf16(uint64_t i) {
    bf16 v = __float2bfloat16(2 * uniform(51, i) - 1);
    uint16_t bits;
    memcpy(&bits, &v, 2);
    return bits;
}
static std::vector<unsigned char> still_images(int way, int N) {
    const int stage = 16384 + N * 128;
    std::vector<unsigned char> images((size_t)STILL_STAGES * stage);
    for (int s = 0; s < STILL_STAGES; s++)
        for (int i = 0; i < stage; i += 2) {
            uint16_t v = random_bf16((uint64_t)s * stage + i);
            if (i < 16384 && way > RS_LDMATRIX)
                v = (uint16_t)mix((uint64_t)s * stage + i) & (way == RS_E4M3 ? 0xBFBF : 0xFFFF);
            memcpy(&images[(size_t)s * stage + i], &v, 2);
        }
    return images; /* e4m3: no NaN code, no number above 1.875 */
}
template <int WAY, int N>
static void check_still(const std::vector<unsigned char> &images, const std::vector<float> &d,
                        int rounds) {
    const int stage = 16384 + N * 128;
    double worst = 0;
    for (int i = 0; i < 512; i++) {
        int row = (int)(mix(6 * i) % 128), n = (int)(mix(6 * i + 1) % N);
        double ref = 0, mag = 0;
        for (int k = 0; k < 64 * STILL_STAGES; k++) {
            const unsigned char *at = &images[(size_t)(k / 64) * stage];
            bf16 b;
            memcpy(&b, at + 16384 + n * 128 + ((k % 64 / 8 ^ (n & 7)) << 4) + k % 8 * 2, 2);
            double p = still_value(WAY, at, row, k % 64) * (double)__bfloat162float(b);
            ref += p, mag += fabs(p);
        }
        double e = fabs(d[(size_t)row * N + n] - rounds * ref) / (rounds * mag);
        worst = e == e ? std::max(worst, e) : 1;
    }
    check(worst < 1.0 / 65536, "products, way %d, N %d: error %g of sum |a b|", WAY, N, worst);
}
template <int WAY, int N, int CTAS> static double time_still() {
    const int sms = sm_count(), grid = sms * CTAS, smem = STILL_STAGES * (16384 + N * 128);
    std::vector<unsigned char> images = still_images(WAY, N);
    buffer<unsigned char> di(images.size());
    buffer<float> d((size_t)128 * N), clocks((size_t)grid);
    di.set(images);
    auto run = [&](int rounds) {
        launch(still_kernel<WAY, N, CTAS>, grid, 256, smem, 1, (cudaStream_t)0, (const uint4 *)di.p,
               d.p, clocks.p, rounds);
        CUDA_OK(cudaDeviceSynchronize());
    };
    CUDA_OK(cudaMemset(d.p, 0xFF, d.n * sizeof(float)));
    run(2);
    check_still<WAY, N>(images, d.host(), 2);
    run(500), run(500);
    std::vector<float> h = clocks.host();
    std::sort(h.begin(), h.end());
    return h[h.size() / 2];
}
template <int WAY> static void still_row(const char *name) {
    printf("%-26s%8.0f%8.0f%8.0f%8.0f%8.0f%12.0f%8.0f%8.0f\n", name, time_still<WAY, 16, 1>(),
           time_still<WAY, 32, 1>(), time_still<WAY, 64, 1>(), time_still<WAY, 128, 1>(),
           time_still<WAY, 256, 1>(), time_still<WAY, 16, 2>(), time_still<WAY, 32, 2>(),
           time_still<WAY, 64, 2>());
}
static void beside_products() {
    printf("\nclocks of a multiprocessor for a block of 64 columns of K, 128 rows by N; the "
           "products alone: 4 N\n");
    printf("%-26s%8s%8s%8s%8s%8s%12s%8s%8s\n", "N (last three: two CTAs)", "16", "32", "64", "128",
           "256", "16", "32", "64");
    still_row<SS>("SS");
    still_row<RS_LDMATRIX>("RS, bf16 by ldmatrix");
    still_row<RS_INT4>("RS, int4");
    still_row<RS_INT4_SCALED>("RS, int4 times scale");
    still_row<RS_MXFP4>("RS, MXFP4");
    still_row<RS_E4M3>("RS, e4m3 to bf16");
}

/* ---- 4. Concurrently with memory: decode attention reads K and V ---- */

enum { READ_ONLY, TWO_BYTES, E4M3_CVT, E4M3_BITS };

__device__ static inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                      uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
                 "{%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <int WAY>
__device__ static inline void use_chunk(float (&d)[4], const uint32_t (&q)[4], uint4 v) {
    uint32_t w[4] = {v.x, v.y, v.z, v.w}, r[2];
    if (WAY == READ_ONLY) d[0] = __uint_as_float(__float_as_uint(d[0]) ^ w[0] ^ w[1] ^ w[2] ^ w[3]);
    if (WAY == TWO_BYTES) mma_f16(d, q, w[0], w[1]), mma_f16(d, q, w[2], w[3]);
#pragma unroll
    for (int i = 0; i < (WAY >= E4M3_CVT ? 4 : 0); i++) {
        if (WAY == E4M3_CVT) e4m3_f16_cvt::run(r, w[i], 0);
        else e4m3_f16_bits::run(r, w[i], 0);
        mma_f16(d, q, r[0], r[1]);
    }
}
/* Each warp accumulates q[16][16] times what it reads. Warps take chunks of 8 times 512 bytes in
 * turn. */
template <int WAY>
__global__ static void __launch_bounds__(512)
    read_kernel(const uint4 *kv, size_t n_chunks, float *out) {
    const int lane = threadIdx.x & 31;
    const size_t warp = (blockIdx.x * (size_t)blockDim.x + threadIdx.x) / 32,
                 warps = gridDim.x * (size_t)blockDim.x / 32;
    const uint32_t q[4] = {0x3c003c00u, 0x40003c00u, 0x3c00bc00u,
                           0x38003c00u}; /* f16: 1 1, 1 2, -1 1, 1 0.5 */
    float d[4] = {};
    for (size_t c = warp; c < n_chunks; c += warps) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = __ldcs(kv + (c * 8 + i) * 32 + lane);
#pragma unroll
        for (int i = 0; i < 8; i++) use_chunk<WAY>(d, q, v[i]);
    }
    for (int i = 0; i < 4; i++) out[(warp * 32 + lane) * 4 + i] = d[i];
}
/* Lane l's d[0], d[1] are row l/4 of q times columns 2 (l%4) + {0,1}; d[2], d[3] are row l/4 + 8.
 * Column n comes from lanes 4 n .. 4 n + 3. All rows of q below 8 are equal, and so are all from 8
 * on. */
template <int WAY>
static void check_read(const buffer<uint32_t> &kv, size_t n_chunks, std::vector<float> &out) {
    static const double q[4][2] = {{1, 1}, {1, 2}, {-1, 1}, {1, 0.5}};
    std::vector<uint32_t> words(n_chunks * 1024);
    CUDA_OK(cudaMemcpy(words.data(), kv.p, words.size() * 4, cudaMemcpyDeviceToHost));
    double worst = 0;
    for (int warp = 0; warp < 4; warp++) /* n_chunks = warps: one chunk each */
        for (int n = 0; n < 8; n++)
            for (int below = 0; below < 2; below++) {
                double ref = 0, mag = 0;
                for (int i = 0; i < 8; i++)
                    for (int lane = 4 * n; lane < 4 * n + 4; lane++)
                        for (int w = 0; w < 4; w++) {
                            uint32_t word = words[(size_t)warp * 1024 + i * 128 + lane * 4 + w];
                            for (int b = 0; b < 4; b++) {
                                int reg = WAY == E4M3_CVT ? b / 2 : b % 2,
                                    half = WAY == E4M3_CVT ? b % 2 : b / 2;
                                double p = e4m3_value(word, b) * q[2 * reg + below][half] /
                                           (WAY == E4M3_BITS ? 256 : 1);
                                ref += p, mag += fabs(p);
                            }
                        }
                float got = out[(size_t)(warp * 32 + n / 2) * 4 + below * 2 + n % 2];
                double e = fabs(got - ref) / mag;
                worst = e == e ? std::max(worst, e) : 1;
            }
    check(worst < 1e-5, "reading, way %d: error %g of sum |q k|", WAY, worst);
}
template <int WAY> static void time_read(const char *name, const buffer<uint32_t> &kv) {
    const int grid = sm_count() * 4;
    buffer<float> out((size_t)grid * 512 * 4);
    if (WAY >= E4M3_CVT) {
        CUDA_OK(cudaMemset(out.p, 0xFF, out.n * sizeof(float)));
        read_kernel<WAY><<<grid, 512>>>((const uint4 *)kv.p, (size_t)grid * 16, out.p);
        CUDA_OK(cudaGetLastError());
        std::vector<float> h = out.host();
        check_read<WAY>(kv, (size_t)grid * 16, h);
    }
    printf("%-42s", name);
    for (size_t bytes : {(size_t)2 << 30, (size_t)24 << 20}) {
        int launches = bytes > 1u << 30 ? 2 : 64;
        double us = time_us(launches, 9, [&](int, cudaStream_t s) {
            read_kernel<WAY><<<grid, 512, 0, s>>>((const uint4 *)kv.p, bytes / 4096, out.p);
        });
        printf("%12.2f", (double)bytes / us * 1e-6);
    }
    printf("\n");
}
__global__ static void clear_bits_kernel(uint32_t *p, size_t n, uint32_t keep) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] &= keep;
}
static void beside_memory() {
    buffer<uint32_t> kv((size_t)512 << 20);
    fill_words_kernel<<<1056, 256>>>(kv.p, kv.n, 61);
    clear_bits_kernel<<<1056, 256>>>(kv.p, kv.n, 0xBFBFBFBFu); /* no NaN, as e4m3 or as f16 */
    CUDA_OK(cudaGetLastError());
    printf("\nTB/s of reading            from memory (2 GB), from the L2 cache (24 MB)\n");
    time_read<READ_ONLY>("read only", kv);
    time_read<TWO_BYTES>("f16, mma.sync", kv);
    time_read<E4M3_CVT>("e4m3 to f16 by cvt, mma.sync", kv);
    time_read<E4M3_BITS>("e4m3 to f16 by bits, mma.sync", kv);
}

int main() {
    print_card();
    conversions();
    beside_products();
    beside_memory();
    return report();
}
