/* swapped_tile.cu - which operand of wgmma the weight should be.
 *
 * Question. A weight that is unpacked in registers must be operand A of wgmma. Then the tile is 128
 * rows of W by up to 256 tokens, and the result is D^T. Today the tile is 128 tokens by 256 rows of
 * W. What does the swapped tile cost for plain bf16, which does not need it? What does it cost to
 * take A through registers (ldmatrix, RS) instead of by descriptor (SS)? How fast does the swapped
 * tile read W for 8 to 64 tokens?
 *
 * Method. One kernel (tile_bf16.cuh) in both orientations, with and without pairs of CTAs that
 * share B by multicast, at the four matrices of Llama-3.1-8B. W rotates over copies that exceed the
 * L2 cache. The forms of one shape are timed in turn, three times; the table shows medians. Then 64
 * or 128 rows of W by 8, 16, 32, 64 tokens with one to four CTAs on an SM, compared with the bytes
 * of W. No split-K.
 *
 * Build:
 *   nvcc -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -o trial_swapped_tile \
 *        test/trials/swapped_tile.cu
 * Run: ./trial_swapped_tile (about a minute; exit code 1 if a check fails)
 *
 * Decides: whether one orientation can serve all weight formats, and whether bf16 weights may go
 * through registers. Results: test/results/trials-swapped-tile.md. */
#include "tile_bf16.cuh"

struct entry {
    const char *name;
    double (*time)(const tile_problem &, buffer<bf16> &, const char *);
};
#define ENTRY(name, ...) {name, time_tile<tile_form<__VA_ARGS__>>}

static const entry many[] = {
    ENTRY("straight 128 tokens x 256", 128, 256, false),
    ENTRY("straight 128 tokens x 256, pair", 128, 256, false, 2),
    ENTRY("straight 128 tokens x 128", 128, 128, false),
    ENTRY("swapped 128 x 256 tokens", 128, 256, true),
    ENTRY("swapped 128 x 256 tokens, pair", 128, 256, true, 2),
    ENTRY("swapped 128 x 128 tokens", 128, 128, true),
    ENTRY("swapped 128 x 256 tokens, RS", 128, 256, true, 1, true),
    ENTRY("swapped 128 x 256 tokens, RS, pair", 128, 256, true, 2, true),
    ENTRY("swapped 128 x 128 tokens, RS", 128, 128, true, 1, true),
};
struct few_entry {
    int tokens;
    entry e;
};
#define FEW(tokens)                                                                   \
    {tokens, ENTRY("64 rows, 4 CTAs", 64, tokens, true, 1, false, DENSE, 4)},         \
        {tokens, ENTRY("64 rows, 2 CTAs", 64, tokens, true, 1, false, DENSE, 2)},     \
        {tokens, ENTRY("128 rows, 2 CTAs", 128, tokens, true, 1, false, DENSE, 2)}, { \
        tokens, ENTRY("128 rows, 1 CTA", 128, tokens, true, 1, false, DENSE, 1)       \
    }
static const few_entry few[] = {FEW(8), FEW(16), FEW(32), FEW(64)};

static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

static void many_tokens(buffer<bf16> &x, buffer<bf16> &w, buffer<bf16> &y) {
    const int shapes[4][2] = {{6144, 4096}, {4096, 4096}, {28672, 4096}, {4096, 14336}},
              Ms[5] = {512, 1024, 2048, 4096, 8192};
    const int n_entries = sizeof many / sizeof *many, turns = 3;
    for (auto &shape : shapes) {
        int N = shape[0], K = shape[1];
        std::vector<std::vector<double>> us((size_t)n_entries * 5);
        for (int m = 0; m < 5; m++)
            for (int turn = 0; turn < turns; turn++)
                for (int e = 0; e < n_entries; e++) {
                    tile_problem p = {1,     Ms[m], N,   K,
                                      Ms[m], x.p,   w.p, std::min(8, (int)(w.n / ((size_t)N * K))),
                                      NULL};
                    usleep(30000);
                    us[(size_t)e * 5 + m].push_back(many[e].time(p, y, many[e].name));
                }
        printf("\n%d x %d, TFLOP/s      M = %8d%6d%6d%6d%6d\n", N, K, Ms[0], Ms[1], Ms[2], Ms[3],
               Ms[4]);
        for (int e = 0; e < n_entries; e++) {
            printf("%-36s", many[e].name);
            for (int m = 0; m < 5; m++)
                printf("%6.0f", 2.0 * Ms[m] * N * K / median(us[(size_t)e * 5 + m]) * 1e-6);
            printf("\n");
        }
    }
}
static void few_tokens(buffer<bf16> &x, buffer<bf16> &w, buffer<bf16> &y) {
    const int shapes[3][2] = {{6144, 4096}, {28672, 4096}, {128256, 4096}};
    printf("\nfew tokens: TB/s of W\n%-34s%14s%14s%14s\n", "", "6144 x 4096", "28672 x 4096",
           "128256 x 4096");
    for (const few_entry &f : few) {
        printf("%2d tokens, %-22s", f.tokens, f.e.name);
        for (auto &shape : shapes) {
            int N = shape[0], K = shape[1];
            tile_problem p = {1,        f.tokens, N,   K,
                              f.tokens, x.p,      w.p, std::min(8, (int)(w.n / ((size_t)N * K))),
                              NULL};
            printf("%14.2f", 2.0 * N * K / f.e.time(p, y, f.e.name) * 1e-6);
        }
        printf("\n");
    }
}

int main() {
    print_card();
    buffer<bf16> x((size_t)8192 * 14336), w((size_t)128256 * 4096), y((size_t)8192 * 28672);
    x.normal(21), w.normal(22, 0.05f);
    few_tokens(x, w, y);
    many_tokens(x, w, y);
    return report();
}
