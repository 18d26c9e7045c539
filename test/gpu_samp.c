/* gpu_samp.c - the CPU's sampling (chapter 18 of toka.c) and its random cases, against which
 * gpu_samp.cu compares. They are C, and this file makes them callable from C++. */
#include "../toka.c"

#include "check.h"
#include "test_samp.c"

typedef struct toka_test_case {
    toka_sample_row row;
    const int32_t *history; /* [row.n_history] */
    float *raw; /* [V] */
} toka_test_case;

void toka_test_row(const toka_sample_row *row, const int32_t *history, float *logits, int V, toka_sample_result *result);
void toka_test_distribution(const toka_sample_row *row, const int32_t *history, float *logits, int V, double *p);
toka_test_case toka_test_random(uint64_t seed, int V);
double toka_test_g(const int *seen, const double *p, int n_cells, double n);

/* Calls samp_row. The logits are overwritten. */
void toka_test_row(const toka_sample_row *row, const int32_t *history, float *logits, int V, toka_sample_result *result) {
    samp_row(row, history, logits, V, result);
}

/* p[V]: the probability of each id; all 0 if no id may be sampled. The logits become the adjusted
 * ones. */
void toka_test_distribution(const toka_sample_row *row, const int32_t *history, float *logits, int V, double *p) {
    const toka_sampling *s = row->sampling;
    double total = 0;
    for (int i = 0; i < V; i++) logits[i] = samp_clean(logits[i]), p[i] = 0;
    samp_adjust(row, history, logits, V);
    samp_dist d = {logits, V, samp_max(logits, V), s->temperature > 0 ? 1 / (double)s->temperature : 1, {-INFINITY, -1}};
    if (d.max == -INFINITY) return;
    if (s->temperature == 0) {
        int id = 0;
        while (logits[id] != d.max) id++;
        p[id] = 1;
        return;
    }
    samp_truncate(&d, s);
    for (int i = 0; i < V; i++) total += p[i] = samp_is_kept(&d, i) ? samp_weight(&d, logits[i]) : 0;
    for (int i = 0; i < V; i++) p[i] /= total;
}

/* Makes a row with random logits and random filters. Its memory is never freed. */
toka_test_case toka_test_random(uint64_t seed, int V) {
    uint64_t s = seed * 0x9E3779B97F4A7C15u;
    samp_case *c = mem_zalloc(sizeof *c);
    for (int i = 0; i < 8; i++) rnd(&s);
    *c = random_case(&s, V);
    return (toka_test_case){case_row(c), c->history, c->raw};
}

/* The p-value of a G-test: seen[], the counts of n samples, against p[]. */
double toka_test_g(const int *seen, const double *p, int n_cells, double n) { return g_test(seen, p, n_cells, n); }
