/* gpu.cuh - what the GPU's op tests share: random inputs, poisoned outputs between guard bands,
 * float64 references, timing of captured graphs. A test file includes ../toka_kernels.cu and then
 * this file. Each test prints one line; gpu_report ends the run. */
#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <dlfcn.h>

static int gpu_passed, gpu_failed;
static uint64_t gpu_seed = 1; /* seed of the run; it is printed, and TOKA_TEST_SEED sets it */

#define GPU_OK(call)                                                                                                          \
    do {                                                                                                                      \
        cudaError_t gpu_code = (call);                                                                                        \
        if (gpu_code) {                                                                                                       \
            printf("FAILED %s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(gpu_code));                        \
            exit(2);                                                                                                          \
        }                                                                                                                     \
    } while (0)

/* Counts one comparison. Prints it if it failed, or always with TOKA_TEST_VERBOSE. */
/* The larger of two errors; NaN if one of them is NaN (std::max and fmax may lose it). */
static inline double gpu_worse(double a, double b) { return isnan(a) || b <= a ? a : b; }
static bool gpu_check(bool ok, const char *fmt, ...) {
    static const bool verbose = getenv("TOKA_TEST_VERBOSE");
    va_list ap;
    ok ? gpu_passed++ : gpu_failed++;
    if (ok && !verbose) return ok;
    va_start(ap, fmt);
    printf(ok ? "ok     " : "FAILED ");
    vprintf(fmt, ap);
    printf("\n");
    va_end(ap);
    return ok;
}
static int gpu_report() {
    printf("%d passed, %d failed, 0 skipped (seed %llu)\n", gpu_passed, gpu_failed, (unsigned long long)gpu_seed);
    return gpu_failed != 0;
}

/* Waits for the device. If a step on it failed, that is a failed comparison, and the run ends. */
static inline void gpu_done(toka_device *d, const char *what) {
    GPU_OK(cudaStreamSynchronize(d->stream));
    if (d->error.code) gpu_check(false, "%s: %s", what, d->error.msg), exit(gpu_report());
}
template <class T> static bool gpu_same_bits(const std::vector<T> &a, const std::vector<T> &b) {
    return a.size() == b.size() && !memcmp(a.data(), b.data(), a.size() * sizeof(T));
}

/* ---- Random numbers: splitmix64 over a counter, equal on host and device ---- */

__host__ __device__ static inline uint64_t gpu_mix(uint64_t z) {
    z += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
}
__host__ __device__ static inline float gpu_uniform(uint64_t seed, uint64_t i) { /* (0,1) */
    return ((float)(gpu_mix(seed * 0x100000001B3ull + i) >> 41) + 0.5f) * (1.0f / 8388608.0f);
}
__host__ __device__ static inline float gpu_normal(uint64_t seed, uint64_t i) {
    return sqrtf(-2 * logf(gpu_uniform(seed, 2 * i))) * cospif(2 * gpu_uniform(seed, 2 * i + 1));
}
__global__ static void gpu_fill_bf16(bf16 *p, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = __float2bfloat16(scale * gpu_normal(seed, i));
}
__global__ static void gpu_fill_f32(float *p, size_t n, uint64_t seed, float scale) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = scale * gpu_normal(seed, i);
}

/* ---- FP8 (e4m3) ---- */

__device__ static double gpu_fp8_value(uint8_t code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(8.0 + mantissa, exponent - 10) : ldexp((double)mantissa, -9);
    return code & 0x80 ? -size : size;
}
/* Numbers between -448 and 448 whose sizes spread over some powers of two; one_sign: all positive. */
__global__ static void gpu_fill_fp8(uint8_t *p, size_t n, uint64_t seed, bool one_sign) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
        const uint64_t r = gpu_mix(seed * 0x100000001B3ull + i);
        p[i] = (uint8_t)(0x20 + r % 0x28 + (one_sign ? 0 : r >> 32 & 0x80));
    }
}

/* ---- Device buffers with guard bands ---- */

/* Bytes before and after the buffer; 0xFF like all memory that was not written: NaN in every
 * type. */
enum { GPU_GUARD = 1024 };

template <class T> struct gpu_buf {
    size_t n = 0;
    char *base = nullptr;
    size_t bytes = 0; /* of all buffers */
    /* room: extra elements after the n */
    explicit gpu_buf(size_t n_, size_t room = 0) : n(n_), bytes((n_ + room) * sizeof(T) + 2 * GPU_GUARD) {
        GPU_OK(cudaMalloc(&base, bytes));
        poison();
    }
    gpu_buf(const gpu_buf &) = delete;
    ~gpu_buf() { cudaFree(base); }
    T *p() { return (T *)(base + GPU_GUARD); }
    void poison() { GPU_OK(cudaMemset(base, 0xFF, bytes)); }
    bool guards_hold() {
        std::vector<unsigned char> g(2 * GPU_GUARD);
        GPU_OK(cudaMemcpy(g.data(), base, GPU_GUARD, cudaMemcpyDeviceToHost));
        GPU_OK(cudaMemcpy(g.data() + GPU_GUARD, base + GPU_GUARD + n * sizeof(T), GPU_GUARD, cudaMemcpyDeviceToHost));
        for (unsigned char c : g)
            if (c != 0xFF) return false;
        return true;
    }
    std::vector<T> host() {
        std::vector<T> v(n);
        GPU_OK(cudaMemcpy(v.data(), p(), n * sizeof(T), cudaMemcpyDeviceToHost));
        return v;
    }
    void set(const std::vector<T> &v) { GPU_OK(cudaMemcpy(p(), v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice)); }
};
static void gpu_random(gpu_buf<bf16> &b, uint64_t seed, float scale) {
    gpu_fill_bf16<<<1056, 256>>>(b.p(), b.n, seed, scale);
    GPU_OK(cudaGetLastError());
}
static void gpu_random(gpu_buf<float> &b, uint64_t seed, float scale) {
    gpu_fill_f32<<<1056, 256>>>(b.p(), b.n, seed, scale);
    GPU_OK(cudaGetLastError());
}

/* ---- Timing ---- */

/* Median microseconds of one call of `op`, which launches on `stream`. A graph of `per_graph` calls
 * op(0), op(1), ... is captured, so that op can rotate among buffers that together do not fit into
 * the cache. The graph is replayed `replays` times after a warm-up. */
static double gpu_time_us(cudaStream_t stream, int per_graph, int replays, const std::function<void(int)> &op) {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t from, to;
    GPU_OK(cudaEventCreate(&from));
    GPU_OK(cudaEventCreate(&to));
    op(0); /* sets kernel attributes, loads code */
    GPU_OK(cudaStreamSynchronize(stream));
    GPU_OK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < per_graph; i++) op(i);
    GPU_OK(cudaStreamEndCapture(stream, &graph));
    GPU_OK(cudaGraphInstantiate(&exec, graph, 0));
    std::vector<float> ms((size_t)replays);
    for (int i = 0; i < 3; i++) GPU_OK(cudaGraphLaunch(exec, stream));
    for (float &m : ms) {
        GPU_OK(cudaEventRecord(from, stream));
        GPU_OK(cudaGraphLaunch(exec, stream));
        GPU_OK(cudaEventRecord(to, stream));
        GPU_OK(cudaEventSynchronize(to));
        GPU_OK(cudaEventElapsedTime(&m, from, to));
    }
    std::sort(ms.begin(), ms.end());
    GPU_OK(cudaGraphExecDestroy(exec));
    GPU_OK(cudaGraphDestroy(graph));
    GPU_OK(cudaEventDestroy(from));
    GPU_OK(cudaEventDestroy(to));
    return ms[ms.size() / 2] * 1000.0 / per_graph;
}

/* A device for op tests: the properties of the GPU and a stream, without a model. */
static toka_device *gpu_device() {
    static toka_device d;
    int major, minor;
    cudaDriverEntryPointQueryResult found;
    if (d.stream) return &d;
    GPU_OK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    GPU_OK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, 0));
    GPU_OK(cudaDeviceGetAttribute(&d.n_sms, cudaDevAttrMultiProcessorCount, 0));
    GPU_OK(cudaDeviceGetAttribute(&d.max_smem, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0));
    d.arch = 10 * major + minor, d.hopper = d.arch == 90;
    GPU_OK(cudaStreamCreate(&d.stream));
    GPU_OK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void **)&d.encode_map, 12000, cudaEnableDefault, &found));
    const char *seed = getenv("TOKA_TEST_SEED");
    gpu_seed = seed ? strtoull(seed, NULL, 10) : (uint64_t)time(NULL);
    return &d;
}
