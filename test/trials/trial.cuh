/* trial.cuh - what the trials of this folder share: PTX wrappers, tensor maps, the ring buffer of
 * stages, random data, timing and checks. A trial is one .cu file that asks one question about the
 * hardware. It prints a table and fails (exit code 1) if a sampled output differs from float64 by
 * more than its bound. Build each one alone:
 *
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o trial_NAME test/trials/NAME.cu
 *
 * Letters: A [rows_a][K] and B [rows_b][K] are the operands of D[a][b] = sum over k of A[a][k]
 * B[b][k]. */
#pragma once
#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include <unistd.h>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <cudaTypedefs.h>

typedef __nv_bfloat16 bf16;
typedef __nv_fp8_e4m3 fp8;

#define CUDA_OK(call)                                                   \
    do {                                                                \
        cudaError_t cuda_code = (call);                                 \
        if (cuda_code) {                                                \
            printf("FAILED %s:%d: %s: %s\n", __FILE__, __LINE__, #call, \
                   cudaGetErrorString(cuda_code));                      \
            exit(2);                                                    \
        }                                                               \
    } while (0)

__host__ __device__ constexpr int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

/* ---- PTX: addresses, arithmetic, ordinary shared memory ---- */

__device__ static inline uint32_t smem_at(const void *p) {
    return (uint32_t)__cvta_generic_to_shared(p);
}
__device__ static inline uint32_t pack_bf16(float low, float high) {
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
__device__ static inline uint4 smem_load_16(uint32_t at) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
__device__ static inline void smem_store_16(uint32_t at, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z),
                 "r"(v.w)
                 : "memory");
}
__device__ static inline float smem_load_float(uint32_t at) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
    return v;
}
__device__ static inline float2 smem_load_pair(uint32_t at) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(at) : "memory");
    return v;
}
/* Four 8x8 matrices of 2-byte elements. Lane 8i+j gives the address of row j of matrix i. */
__device__ static inline void stmatrix_x4(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2,
                                          uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(r0),
                 "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
__device__ static inline void stmatrix_x4_trans(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2,
                                                uint32_t r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(at),
                 "r"(r0), "r"(r1), "r"(r2), "r"(r3)
                 : "memory");
}
__device__ static inline void stmatrix_x2_trans(uint32_t at, uint32_t r0, uint32_t r1) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(at), "r"(r0),
                 "r"(r1)
                 : "memory");
}
__device__ static inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}
__device__ static inline void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ static inline void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/* Makes ordinary stores to shared memory visible to wgmma and TMA. */
__device__ static inline void fence_async_smem() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- PTX: mbarrier, cp.async, TMA ---- */

__device__ static inline void mbar_init(uint32_t bar, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ static inline void mbar_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ static inline void mbar_arrive(uint32_t bar) {
    asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
/* Orders only earlier reads before the arrival. */
__device__ static inline void mbar_arrive_remote(uint32_t bar, int cta) {
    asm volatile("{.reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; "
                 "mbarrier.arrive.shared::cluster.b64 _, [r];}" ::"r"(bar),
                 "r"(cta)
                 : "memory");
}
__device__ static inline void mbar_expect_tx(uint32_t bar, int bytes) { /* also arrives */
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(bar),
                 "r"(bytes)
                 : "memory");
}
__device__ static inline void mbar_wait(uint32_t bar,
                                        int parity) { /* a new barrier has completed parity 1 */
    asm volatile("{.reg .pred p;\n"
                 "again: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%0], %1;\n"
                 "@!p bra again;}" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}
__device__ static inline void cp_async_16(uint32_t to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ static inline void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> __device__ static inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
/* Arrives at the barrier when all earlier cp.async of this thread have completed. */
__device__ static inline void cp_async_arrive(uint32_t bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
__device__ static inline void tma_load_2d(uint32_t to, const CUtensorMap *m, uint32_t bar, int c0,
                                          int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
                 "l"(m), "r"(bar), "r"(c0), "r"(c1)
                 : "memory");
}
__device__ static inline void tma_load_2d_multicast(uint32_t to, const CUtensorMap *m, uint32_t bar,
                                                    int c0, int c1, uint16_t mask) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(to),
                 "l"(m), "r"(bar), "r"(c0), "r"(c1), "h"(mask)
                 : "memory");
}
__device__ static inline void bulk_load(uint32_t to, const void *from, int bytes, uint32_t bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(bytes), "r"(bar)
        : "memory");
}

/* ---- PTX: warpgroups and clusters ---- */

template <int N> __device__ static inline void regs_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N> __device__ static inline void regs_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
__device__ static inline int cluster_rank() {
    int r;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
    return r;
}
__device__ static inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
__device__ static inline void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ static inline void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> __device__ static inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving reads of d before the wgmma_wait. */
template <int N> __device__ static inline void wgmma_keep(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i]));
}
/* Descriptor of a K-major tile of 128-byte rows with 128-byte swizzle. 32 bytes further along K:
 * add 2. */
__device__ static inline uint64_t wgmma_desc(uint32_t at) {
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)1 << 16 | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* d[64][N] (+)= a[64][k] b[N][k]^T. Warp w of the warpgroup has rows 16 w ... Of block j of 8
 * columns, lane l has in d[4j .. 4j+3] (row l/4, columns 8j + 2 (l%4) + {0,1}) and the same columns
 * of row l/4 + 8. */
#define REGS_4 "%0,%1,%2,%3"
#define REGS_8 REGS_4 ",%4,%5,%6,%7"
#define REGS_16 REGS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define REGS_32 REGS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define REGS_64                                                                \
    REGS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47" \
            ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define REGS_128                                                                           \
    REGS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"             \
            ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"             \
            ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111" \
            ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define ACC_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define ACC_8(i) ACC_4(i), ACC_4(i + 4)
#define ACC_16(i) ACC_8(i), ACC_8(i + 8)
#define ACC_32(i) ACC_16(i), ACC_16(i + 16)
#define ACC_64(i) ACC_32(i), ACC_32(i + 32)
#define ACC_128(i) ACC_64(i), ACC_64(i + 64)
/* n columns, H = n / 2 registers. A, B, S: the numbers of the operands after the registers. */
#define WGMMA_SS(n, H, KIND, TAIL, A, B, S)                                     \
    if constexpr (N == n)                                                       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S                           \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #n KIND " {" REGS_##H \
                 "}, %" #A ", %" #B ", p, 1, 1" TAIL ";}"                       \
                 : ACC_##H(0)                                                   \
                 : "l"(a), "l"(b), "r"(scale_d))
#define WGMMA_RS(n, H, KIND, TAIL, A0, A1, A2, A3, B, S)                                \
    if constexpr (N == n)                                                               \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #S                                   \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #n KIND " {" REGS_##H         \
                 "}, {%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", p, 1, 1" TAIL ";}" \
                 : ACC_##H(0)                                                           \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(scale_d))
#define BF16_KIND "k16.f32.bf16.bf16"
#define FP8_KIND "k32.f32.e4m3.e4m3"

/* bf16, k = 16. scale_d 0: d is overwritten, not added to. */
template <int N>
__device__ static inline void wgmma_bf16(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
    WGMMA_SS(8, 4, BF16_KIND, ", 0, 0", 4, 5, 6);
    WGMMA_SS(16, 8, BF16_KIND, ", 0, 0", 8, 9, 10);
    WGMMA_SS(32, 16, BF16_KIND, ", 0, 0", 16, 17, 18);
    WGMMA_SS(64, 32, BF16_KIND, ", 0, 0", 32, 33, 34);
    WGMMA_SS(128, 64, BF16_KIND, ", 0, 0", 64, 65, 66);
    WGMMA_SS(256, 128, BF16_KIND, ", 0, 0", 128, 129, 130);
}
/* bf16, k = 16, a from registers. */
template <int N>
__device__ static inline void wgmma_bf16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                            int scale_d) {
    static_assert(N == 16 || N == 32 || N == 64 || N == 128 || N == 256);
    WGMMA_RS(16, 8, BF16_KIND, ", 0", 8, 9, 10, 11, 12, 13);
    WGMMA_RS(32, 16, BF16_KIND, ", 0", 16, 17, 18, 19, 20, 21);
    WGMMA_RS(64, 32, BF16_KIND, ", 0", 32, 33, 34, 35, 36, 37);
    WGMMA_RS(128, 64, BF16_KIND, ", 0", 64, 65, 66, 67, 68, 69);
    WGMMA_RS(256, 128, BF16_KIND, ", 0", 128, 129, 130, 131, 132, 133);
}
/* e4m3, k = 32. */
template <int N>
__device__ static inline void wgmma_fp8(float (&d)[N / 2], uint64_t a, uint64_t b, int scale_d) {
    static_assert(N == 64 || N == 128);
    WGMMA_SS(64, 32, FP8_KIND, "", 32, 33, 34);
    WGMMA_SS(128, 64, FP8_KIND, "", 64, 65, 66);
}

/* e4m3, k = 32, a from registers. */
template <int N>
__device__ static inline void wgmma_fp8_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                           int scale_d) {
    static_assert(N == 64);
    WGMMA_RS(64, 32, FP8_KIND, "", 32, 33, 34, 35, 36, 37);
}

/* ---- The ring buffer of stages and the order of tiles ---- */

struct ring {
    int s, parity; /* the next stage and its parity */
};
template <int STAGES> __device__ static inline void ring_next(ring &r) {
    if (++r.s == STAGES) r.s = 0, r.parity ^= 1;
}

/* Tiles go down `group` rows of tiles, then right, so that the operands of a wave stay in L2. */
struct tile_order {
    int tiles_a, tiles_b, group;
};
struct tile {
    int a, b;
};
__device__ static inline tile tile_at(const tile_order &o, int u) {
    int size = o.group * o.tiles_b, g = u / size, i = u - g * size,
        height = min(o.group, o.tiles_a - g * o.group);
    return {g * o.group + i % height, i / height};
}

/* Stores the 16 rows x 64 columns of one warp to y through 2 KB of staging, 128 bytes of a row at a
 * time. `acc` holds the accumulators of these columns. Rows from n_rows and columns from n_cols on
 * do not exist. */
__device__ static inline void store_panel(const float *acc, uint32_t staging, bf16 *y, int row0,
                                          int col0, int n_rows, int n_cols) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
#pragma unroll
    for (int jj = 0; jj < 4; jj++) {
        const float *v = acc + 8 * jj;
        int row = lane & 15, chunk = 2 * jj + (lane >> 4);
        stmatrix_x4(staging + row * 128 + ((chunk ^ (row & 7)) << 4), pack_bf16(v[0], v[1]),
                    pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = lane / 8 + 4 * i, chunk = lane % 8, col = col0 + 8 * chunk;
        uint4 v = smem_load_16(staging + row * 128 + ((chunk ^ (row & 7)) << 4));
        if (row0 + row < n_rows && col < n_cols)
            *(uint4 *)(y + (size_t)(row0 + row) * n_cols + col) = v;
    }
}

/* ---- Host: tensor maps, launches ---- */

/* Tensor map of [rows][cols] elements of `bytes` each. A box is 128 bytes of a row by `box_rows`
 * rows, swizzled. */
static CUtensorMap map_of(const void *p, int rows, int cols, int bytes, int box_rows) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = NULL;
    cudaDriverEntryPointQueryResult found;
    if (!encode)
        CUDA_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&encode, 12000,
                                                 cudaEnableDefault, &found));
    CUtensorMap m;
    cuuint64_t size[2] = {(cuuint64_t)cols, (cuuint64_t)rows},
               stride[1] = {(cuuint64_t)cols * bytes};
    cuuint32_t box[2] = {(cuuint32_t)(128 / bytes), (cuuint32_t)box_rows}, step[2] = {1, 1};
    CUresult code =
        encode(&m, bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
               (void *)p, size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code) printf("FAILED: tensor map, code %d\n", (int)code), exit(2);
    return m;
}
static int sm_count() {
    int n;
    CUDA_OK(cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, 0));
    return n;
}
template <class... P, class... Q>
static void launch(void (*kernel)(P...), int grid, int block, int smem, int cluster,
                   cudaStream_t stream, Q... args) {
    cudaLaunchConfig_t c = {};
    cudaLaunchAttribute at;
    c.gridDim = dim3((unsigned)grid), c.blockDim = dim3((unsigned)block);
    c.dynamicSmemBytes = (size_t)smem, c.stream = stream;
    at.id = cudaLaunchAttributeClusterDimension;
    at.val.clusterDim.x = (unsigned)cluster, at.val.clusterDim.y = at.val.clusterDim.z = 1;
    c.attrs = &at, c.numAttrs = 1;
    CUDA_OK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
    CUDA_OK(cudaLaunchKernelEx(&c, kernel, P(args)...));
}

/* ---- Random data: splitmix64 over a counter ---- */

__host__ __device__ static inline uint64_t mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
__host__ __device__ static inline float uniform(uint64_t seed, uint64_t i) { /* in (0,1) */
    return ((float)(mix(seed * 0x100000001B3ull + i) >> 41) + 0.5f) * (1.0f / 8388608.0f);
}
__device__ static inline float normal(uint64_t seed, uint64_t i) {
    return sqrtf(-2 * logf(uniform(seed, 2 * i))) * cospif(2 * uniform(seed, 2 * i + 1));
}
template <class T>
__global__ static void fill_normal_kernel(T *p, size_t n, uint64_t seed, float scale,
                                          bool positive) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x) {
        float v = scale * normal(seed, i);
        p[i] = T(positive ? fabsf(v) : v);
    }
}
__global__ static void fill_uniform_kernel(float *p, size_t n, uint64_t seed, float low,
                                           float high) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = low + (high - low) * uniform(seed, i);
}
__global__ static void fill_words_kernel(uint32_t *p, size_t n, uint64_t seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        p[i] = (uint32_t)(mix(seed * 0x100000001B3ull + i) >> 32);
}

/* Device memory, 1 KB more than requested, so that a box may begin at its end. */
template <class T> struct buffer {
    size_t n;
    T *p;
    explicit buffer(size_t n_) : n(n_) {
        CUDA_OK(cudaMalloc(&p, n * sizeof(T) + 1024));
    }
    buffer(const buffer &) = delete;
    ~buffer() {
        cudaFree(p);
    }
    void poison() {
        CUDA_OK(cudaMemset(p, 0xFF, n * sizeof(T)));
    } /* NaN in every type */
    void normal(uint64_t seed, float scale = 1, bool positive = false) {
        fill_normal_kernel<<<1056, 256>>>(p, n, seed, scale, positive);
        CUDA_OK(cudaGetLastError());
    }
    void set(const std::vector<T> &v) {
        CUDA_OK(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> host() {
        std::vector<T> v(n);
        CUDA_OK(cudaMemcpy(v.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
};

/* ---- Checks ---- */

static int checks_passed, checks_failed;
static bool check(bool ok, const char *fmt, ...) { /* prints only failures */
    va_list ap;
    ok ? checks_passed++ : checks_failed++;
    if (ok) return true;
    va_start(ap, fmt);
    printf("FAILED ");
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    return false;
}
static int report() {
    printf("%d checks passed, %d failed\n", checks_passed, checks_failed);
    return checks_failed != 0;
}
__global__ static void count_nan_kernel(const bf16 *y, size_t n, int *count) {
    int found = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
         i += (size_t)gridDim.x * blockDim.x)
        found += __hisnan(y[i]);
    if (found) atomicAdd(count, found);
}
/* The number of elements that were not written. */
static int count_nan(const buffer<bf16> &y, size_t n) {
    buffer<int> count(1);
    CUDA_OK(cudaMemset(count.p, 0, sizeof(int)));
    count_nan_kernel<<<1056, 256>>>(y.p, n, count.p);
    CUDA_OK(cudaGetLastError());
    return count.host()[0];
}
__device__ static inline double warp_sum(double v) {
    for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
    return v;
}

/* ---- Timing ---- */

/* Median microseconds of one op(i, stream), i = 0, 1, ... per_graph - 1, captured into a graph that
 * is replayed. */
static double time_us(int per_graph, int replays,
                      const std::function<void(int, cudaStream_t)> &op) {
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    CUDA_OK(cudaStreamCreate(&stream));
    CUDA_OK(cudaEventCreate(&from));
    CUDA_OK(cudaEventCreate(&to));
    CUDA_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < per_graph; i++) op(i, stream);
    CUDA_OK(cudaStreamEndCapture(stream, &graph));
    CUDA_OK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> ms((size_t)replays);
    for (int i = 0; i < 2; i++) CUDA_OK(cudaGraphLaunch(exec, stream));
    for (float &t : ms) {
        CUDA_OK(cudaEventRecord(from, stream));
        CUDA_OK(cudaGraphLaunch(exec, stream));
        CUDA_OK(cudaEventRecord(to, stream));
        CUDA_OK(cudaEventSynchronize(to));
        CUDA_OK(cudaEventElapsedTime(&t, from, to));
    }
    CUDA_OK(cudaGraphExecDestroy(exec));
    CUDA_OK(cudaGraphDestroy(graph));
    CUDA_OK(cudaEventDestroy(from));
    CUDA_OK(cudaEventDestroy(to));
    CUDA_OK(cudaStreamDestroy(stream));
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e3 / per_graph;
}
/* Median microseconds of one op(i, stream) on a GPU that was idle: the power limit does not yet
 * lower its clock. */
__global__ static void spin_kernel(long long clocks) {
    for (long long begin = clock64(); clock64() - begin < clocks;) {
    }
}
static double time_rested_us(int n, const std::function<void(int, cudaStream_t)> &op) {
    cudaEvent_t from, to;
    CUDA_OK(cudaEventCreate(&from));
    CUDA_OK(cudaEventCreate(&to));
    std::vector<float> ms((size_t)n);
    for (int i = 0; i < n; i++) {
        usleep(30000);
        spin_kernel<<<1, 1>>>(200000); /* meanwhile the host queues the rest */
        CUDA_OK(cudaEventRecord(from, 0));
        op(i, 0);
        CUDA_OK(cudaEventRecord(to, 0));
        CUDA_OK(cudaEventSynchronize(to));
        CUDA_OK(cudaEventElapsedTime(&ms[(size_t)i], from, to));
    }
    CUDA_OK(cudaEventDestroy(from));
    CUDA_OK(cudaEventDestroy(to));
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2] * 1e3;
}
static void print_card() {
    cudaDeviceProp p;
    CUDA_OK(cudaGetDeviceProperties(&p, 0));
    printf("%s, %d multiprocessors\n", p.name, p.multiProcessorCount);
}
