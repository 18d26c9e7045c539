/* bench_plan.c - what a step costs before any model runs: plan, batch building and commit at 8,192 running sequences.
 * The monkeys shape: 128 prompts x 1,024 samples, 715-token prompts of which the first 600 tokens are shared by all,
 * outputs lognormal with mean 150, max_tokens 1,024, a pool of 1.5 M tokens, results two steps late. The backend does
 * nothing. Times are CPU time of the one thread. Then with 65,536 requests queued, and with half the pool (full then).
 *   cc -O3 -o /tmp/bench_plan test/bench_plan.c -lm -lpthread && /tmp/bench_plan [STEPS]     from the repository root */
#include "../toka.c"

enum { BP_LAG = 2, BP_PROMPTS = 128, BP_SAMPLES = 1024, BP_PROMPT = 715, BP_SHARED = 600, BP_MEAN = 150, BP_MAX = 1024 };

typedef struct bp_late {
    batch_out *out; /* [max_seqs] */
    int n;
} bp_late;

typedef struct bp {
    sched s;
    batch b;
    bp_late late[BP_LAG];
    int *length; /* [max_seqs] of the sequence in each slot, drawn when it starts */
    uint32_t *started;
    uint64_t rng;
    int64_t n_out, n_done;
    double plan_s, build_s, commit_s;
} bp;

/* CPU time of this thread: the machine has other work too. */
static double bp_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double bp_unit(bp *t) {
    t->rng ^= t->rng >> 12, t->rng ^= t->rng << 25, t->rng ^= t->rng >> 27;
    return (double)((t->rng * 0x2545F4914F6CDD1Du) >> 11) * 0x1p-53;
}

static int bp_draw_length(bp *t) {
    double normal = sqrt(-2 * log(1 - bp_unit(t))) * cos(6.283185307179586 * bp_unit(t)), sigma = 0.7;
    return (int)MAX(1.0, MIN(exp(log(BP_MEAN) - sigma * sigma / 2 + sigma * normal) + 0.5, (double)BP_MAX));
}

static void bp_submit(bp *t, int prompt_no, int n) {
    int32_t prompt[BP_PROMPT];
    toka_err e;
    for (int i = 0; i < BP_PROMPT; i++) prompt[i] = i < BP_SHARED ? 1000 + i : (prompt_no * 7919 + i * 31) % 100000;
    if (sched_submit(&t->s, &(sched_job){.prompt = prompt, .n_prompt = BP_PROMPT, .n = n, .max_tokens = BP_MAX}, &e) < 0) {
        printf("%s\n", e.msg);
        exit(1);
    }
}

static int bp_step(bp *t, int64_t step) {
    double t0 = bp_now();
    int rows = sched_plan(&t->s);
    double t1 = bp_now();
    batch_build(&t->b, &t->s);
    double t2 = bp_now();
    bp_late *l = &t->late[step % BP_LAG]; /* what was planned BP_LAG steps ago comes back, the new takes its place */
    for (int i = 0; i < l->n; i++) {
        batch_out o = l->out[i];
        const sched_seq *x = &t->s.seqs[o.q];
        if (x->ticket != o.ticket) continue;
        if (t->started[o.q] != x->ticket + 1) t->started[o.q] = x->ticket + 1, t->length[o.q] = bp_draw_length(t);
        int n = x->n_known - x->n_prompt + 1;
        int32_t token = (int32_t)((t->rng + (uint64_t)o.q * 0x9E3779B9u + (uint64_t)n) % 100000);
        t->n_out++;
        t->n_done += sched_commit(&t->s, o.q, o.ticket, token, n >= t->length[o.q]) == SCHED_DONE;
    }
    l->n = t->b.n_out;
    memcpy(l->out, t->b.outs, (size_t)l->n * sizeof *l->out);
    double t3 = bp_now();
    t->plan_s += t1 - t0, t->build_s += t2 - t1, t->commit_s += t3 - t2;
    return rows;
}

static int bp_compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void bp_open(bp *t, int n_pages) {
    sched_config c = {16, n_pages, .max_seqs = 8192, .max_tokens = 32768, .max_len = 2048, .n_classes = 1024};
    *t = (bp){.rng = 12345};
    sched_init(&t->s, &c);
    batch_init(&t->b, &t->s, (batch_cost){.merge_tok = 4, .span_tok = 64, .tile_rows = 64});
    t->length = mem_zalloc(8192 * sizeof(int)), t->started = mem_zalloc(8192 * sizeof(uint32_t));
    for (int i = 0; i < BP_LAG; i++) t->late[i].out = mem_alloc(8192 * sizeof(batch_out));
}

static void bp_close(bp *t) {
    for (int i = 0; i < BP_LAG; i++) free(t->late[i].out);
    free(t->length), free(t->started);
    batch_free(&t->b), sched_free(&t->s);
}

static void bp_line(const bp *t, int step, int rows, double ms) {
    const sched *s = &t->s;
    printf("  step %4d: %5d running, %5d rows, %6.2f ms, %7zu bytes up, %3d groups; pages %6d, foreseen %6d of %d\n",
           step, s->n_running, rows, ms, batch_upload_bytes(&t->b.up), t->b.up.n_groups, s->c.n_pages - kv_room(&s->kv),
           cal_peak(&s->cal), s->c.n_pages);
}

/* extra: further requests of one sample each, queued behind. lines: show single steps. */
static void run_bench_plan(int n_steps, int extra, int n_pages, bool lines) {
    enum { WARM = 100 };
    bp t;
    bp_open(&t, n_pages);
    double s0 = bp_now();
    for (int i = 0; i < BP_PROMPTS; i++) bp_submit(&t, i, BP_SAMPLES);
    for (int i = 0; i < extra; i++) bp_submit(&t, BP_PROMPTS + i, 1);
    printf("%d requests queued in %.1f ms, %d pages of 16 tokens\n", BP_PROMPTS + extra, (bp_now() - s0) * 1e3, n_pages);
    double *ms = mem_alloc((size_t)n_steps * sizeof(double)), sum = 0, bytes = 0, most = 0, running = 0;
    int n = 0;
    for (int i = 0; i < n_steps && t.s.n_waiting; i++) {
        if (i == WARM) t.plan_s = t.build_s = t.commit_s = 0;
        double t0 = bp_now();
        int rows = bp_step(&t, i);
        double took = (bp_now() - t0) * 1000, up = (double)batch_upload_bytes(&t.b.up);
        if (lines && (i < 5 || (i < 100 && i % 20 == 0) || i % 250 == 0)) bp_line(&t, i, rows, took);
        if (i < WARM) continue;
        ms[n++] = took, sum += took, bytes += up, most = MAX(most, up), running += t.s.n_running;
    }
    qsort(ms, (size_t)n, sizeof *ms, bp_compare);
    printf("  %d steps, %.0f running: mean %.3f ms (plan %.3f, build %.3f, commit %.3f), p50 %.3f, p99 %.3f\n", n,
           running / n, sum / n, t.plan_s * 1e3 / n, t.build_s * 1e3 / n, t.commit_s * 1e3 / n, ms[n / 2],
           ms[n * 99 / 100]);
    printf("  upload mean %.0f bytes a step, most %.0f\n", bytes / n, most);
    printf("  %lld tokens, %lld sequences done, %lld preempted, %lld futures rewritten, %lld pages evicted, "
           "%.1f %% of prompt tokens found\n",
           (long long)t.n_out, (long long)t.n_done, (long long)t.s.n_preempted, (long long)t.s.n_repredicted,
           (long long)t.s.kv.n_evicted, 100.0 * (double)t.s.n_prompt_hits / (double)t.s.n_prompt_tokens);
    free(ms);
    bp_close(&t);
}

int main(int argc, char **argv) {
    int n_steps = argc > 1 ? MAX(200, atoi(argv[1])) : 1500;
    run_bench_plan(n_steps, 0, 1572864 / 16, true);
    run_bench_plan(n_steps, 65536 - BP_PROMPTS, 1572864 / 16, false);
    run_bench_plan(n_steps, 0, 1572864 / 32, false);
    return 0;
}
