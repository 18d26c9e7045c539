/* admission.c - which rule of admission makes a workload end sooner?
 *
 * Question. A scheduler can admit a request only if a forecast says that the pages suffice at every
 * later step: a length predictor, and a calendar of the pages that will be held. Is that better
 * than to admit while some pages stay free, and to preempt the newest sequence when none is left?
 *
 * Method. Chapters 17 to 21 plan, build and commit every step of whole workloads; no model runs.
 * The time of a step is modelled as `toka plan` does it, from the spans and rows that were built:
 *
 *     overhead                0.15 ms
 *     + matrix products       max(rows * P / F, P / R), P: bytes of the layers = FLOP of one row
 *     + LM head               max(samples * V / F, V / R), V: its bytes
 *     + attention of one row  max(4 H D L * pairs / F, bytes of K and V / R), spans of one row
 *     + other attention       the same, spans of many rows; K and V are read once a span
 *
 * F FLOP/s and R bytes/s are those of the table run_gpus. The pool is what `toka plan` says for the
 * card and the model. Limits of a step are the defaults: 8,192 sequences, 8,448 tokens. All
 * requests are there at the start. A step's tokens arrive two steps later.
 *
 * Workloads. max_tokens in brackets; an output ends by itself, so that the scheduler does not know
 * its length.
 *     monkeys N    128 problems of GSM8K x N samples; prompts have 600 tokens in common and as many
 *                  of their own as the question is long. A problem's mean output follows the length
 *                  of its published answer, over all problems 150; a sample is lognormal around it,
 *                  sigma 0.4 [1,024]
 *     chat         2,000 consecutive conversations of Azure's trace, lengths of prompt and output
 *                  from there [2,048]
 *     mix          600 of these conversations, 32 problems x 24, 100 requests of 8,192 tokens with
 *                  outputs of mean 1,024, sigma 0.4 [2,048], in random order
 *     thinking     256 prompts of 200 tokens x 4 samples, mean output 3,000, sigma 0.8 [8,192]
 *
 * Build for toka.c as it is:
 *   cc -std=c11 -D_GNU_SOURCE -O2 -o test/.build/admission test/trials/admission.c -lm -lpthread
 * Build for all variants, with the last toka.c that had the forecast:
 *   git show b7e294a:toka.c >test/.build/admission_toka.c
 *   patch test/.build/admission_toka.c test/trials/admission.patch
 *   cc -std=c11 -D_GNU_SOURCE -DVARIANTS -I. -O2 -o test/.build/admission_variants \
 *      test/trials/admission.c -lm -lpthread
 * Run: test/.build/admission DATA SEEDS [WORKLOAD [CARD MODEL]] > FILE; DATA is the folder of
 * public data (test/make_dataset.py --help). A line of FILE is one run:
 *   workload,card,model,pool,seed,variant,steps,decode_rows,prefill_rows,recomputed,preemptions,
 *   model_s,plan_us,build_us
 * with plan_us = CPU time of sched_plan and sched_commit a step. Results:
 * test/results/trials-admission.md. */
#define TOKA_SERVER
#ifdef VARIANTS
#include "../.build/admission_toka.c"
#else
#include "../../toka.c"
#endif

#ifdef VARIANTS
enum { LAST_OF_CONFIG = 4096 }; /* classes of the predictor */
#else
enum { LAST_OF_CONFIG = SCHED_RESERVE_STEPS };
#endif
enum { AHEAD = 2, SEQS = TOKA_GPU_DEFAULT_SEQS, MAX_PROMPT = 16384 };

typedef struct job {
    int n_prompt, n_shared, n, max_tokens, first_len; /* first_len: in work.lens */
    uint64_t seed;                                    /* of its own prompt tokens */
} job;

typedef struct work {
    job *jobs;
    int *lens, n_jobs, n_lens;
} work;

typedef struct card_model {
    const run_gpu *gpu;
    int64_t kv_tokens;
    int max_len;
    double layer_bytes, head_bytes, token_bytes, pair_flop;
} card_model;

typedef struct pending {
    batch_sample *samples;
    int n;
} pending;

typedef struct result {
    int64_t steps, decode_rows, prefill_rows, recomputed, preemptions;
    double model_s, plan_s, build_s;
} result;

/* ---- Workloads ---- */

static uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static double uniform(uint64_t *state) { return (double)(mix64((*state)++) >> 11) * 0x1p-53; }

/* A lognormal length of this mean, at least 1. */
static int random_length(uint64_t *state, double mean, double sigma) {
    double normal = sqrt(-2 * log(1 - uniform(state))) * cos(6.283185307179586 * uniform(state));
    return (int)MAX(1, exp(log(mean) - sigma * sigma / 2 + sigma * normal) + 0.5);
}

/* Adds a request; its output lengths follow by work_add_len. */
static void work_add(work *all, job one) {
    one.first_len = all->n_lens;
    one.n_prompt = MIN(one.n_prompt, MAX_PROMPT);
    one.seed = (uint64_t)all->n_jobs + 1;
    all->jobs = mem_realloc(all->jobs, (size_t)(all->n_jobs + 1) * sizeof *all->jobs);
    all->jobs[all->n_jobs++] = one;
    all->lens = mem_realloc(all->lens, (size_t)(all->n_lens + one.n) * sizeof(int));
}

static void work_add_len(work *all, int len) {
    all->lens[all->n_lens++] = MAX(1, MIN(len, all->jobs[all->n_jobs - 1].max_tokens));
}

static FILE *open_data(const char *folder, const char *name) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "r");
    if (!file) perror(path), exit(1);
    return file;
}

static void add_monkeys(work *all, const char *data, int n_problems, int n, uint64_t *state) {
    FILE *file = open_data(data, "datasets/gsm8k_test.jsonl");
    static char line[65536];
    int skip = (int)(uniform(state) * 1000);
    for (int i = 0; i < skip + n_problems && fgets(line, sizeof line, file); i++) {
        char *answer = strstr(line, "\"answer\"");
        if (i < skip || !answer) continue;
        /* some 4.3 bytes are a token; a published answer has 292 bytes on average */
        double mean = 150 * (double)strlen(answer) / 310;
        work_add(all, (job){600 + (int)((double)(answer - line) / 4.3) % 400, 600, n, 1024, 0, 0});
        for (int k = 0; k < n; k++) work_add_len(all, random_length(state, mean, 0.4));
    }
    fclose(file);
}

static void add_chat(work *all, const char *data, int n, uint64_t *state) {
    FILE *file = open_data(data, "traces/AzureLLMInferenceTrace_conv.csv");
    char line[256];
    int skip = 1 + (int)(uniform(state) * (19000 - n)), n_in, n_out;
    for (int i = 0; i < skip + n && fgets(line, sizeof line, file); i++)
        if (i >= skip && sscanf(line, "%*[^,],%d,%d", &n_in, &n_out) == 2 && n_in && n_out) {
            work_add(all, (job){n_in, 0, 1, 2048, 0, 0});
            work_add_len(all, n_out);
        }
    fclose(file);
}

static void add_random(work *all, int n_jobs, job one, double mean, double sigma,
                       uint64_t *state) {
    for (int i = 0; i < n_jobs; i++) {
        work_add(all, one);
        for (int k = 0; k < one.n; k++) work_add_len(all, random_length(state, mean, sigma));
    }
}

static work make_work(const char *name, const char *data, uint64_t seed) {
    work all = {0};
    uint64_t state = mix64(seed);
    if (!strcmp(name, "monkeys 24")) add_monkeys(&all, data, 128, 24, &state);
    if (!strcmp(name, "monkeys 1024")) add_monkeys(&all, data, 128, 1024, &state);
    if (!strcmp(name, "chat")) add_chat(&all, data, 2000, &state);
    if (!strcmp(name, "thinking"))
        add_random(&all, 256, (job){200, 0, 4, 8192, 0, 0}, 3000, 0.8, &state);
    if (!strcmp(name, "mix")) {
        add_chat(&all, data, 600, &state);
        add_monkeys(&all, data, 32, 24, &state);
        add_random(&all, 100, (job){8192, 0, 1, 2048, 0, 0}, 1024, 0.4, &state);
        for (int i = all.n_jobs - 1; i > 0; i--) {
            int other = (int)(uniform(&state) * (i + 1));
            job swap = all.jobs[i];
            all.jobs[i] = all.jobs[other], all.jobs[other] = swap;
        }
    }
    return all;
}

/* ---- One run ---- */

static double op_s(const card_model *on, double flop, double bytes) {
    return MAX(flop / on->gpu->flops, bytes / on->gpu->memory_rate);
}

static double step_s(const card_model *on, const batch_step *built) {
    double pairs[2] = {0}, reads[2] = {0};
    for (int i = 0; i < built->step.n_spans; i++) {
        const toka_span *span = &built->spans[i];
        double rows = span->n_rows, kv = span->n_kv;
        bool own = i >= built->step.n_spans - built->n_chunks, many = span->n_rows > 1;
        pairs[many] += rows * kv - (own ? rows * (rows - 1) / 2 : 0);
        reads[many] += kv;
    }
    double s = 0.15e-3 + op_s(on, built->step.T * on->layer_bytes, on->layer_bytes) +
               op_s(on, built->n_samples * on->head_bytes, on->head_bytes);
    for (int many = 0; many < 2; many++)
        s += op_s(on, pairs[many] * on->pair_flop, reads[many] * on->token_bytes);
    return s;
}

static void count_rows(const scheduler *sched, const batch_step *built, result *out) {
    int n_prefill = 0;
    for (int i = 0; i < sched->n_prefill_seqs; i++) {
        const sched_seq *sequence = &sched->seqs[sched->prefill_seqs[i]];
        n_prefill += sequence->n_rows;
        if (sequence->was_preempted) out->recomputed += sequence->n_rows;
    }
    out->prefill_rows += n_prefill;
    out->decode_rows += built->step.T - n_prefill;
}

static void commit(scheduler *sched, const work *all, pending *arrived) {
    for (int i = 0; i < arrived->n; i++) {
        batch_sample sample = arrived->samples[i];
        const sched_seq *sequence = &sched->seqs[sample.seq];
        if (sequence->generation != sample.generation) continue;
        int at = all->jobs[sequence->request].first_len + sequence->sample;
        int n_out = sequence->n_known - sequence->n_prompt + 1;
        int32_t token = (int32_t)(mix64((uint64_t)at << 20 | (uint64_t)n_out) % 100000);
        sched_commit(sched, sample.seq, sample.generation, token, n_out >= all->lens[at]);
    }
}

static int32_t *make_prompt(const job *one) {
    int32_t *prompt = mem_alloc((size_t)one->n_prompt * sizeof *prompt);
    for (int i = 0; i < one->n_prompt; i++)
        prompt[i] = i < one->n_shared ? 1000 + i
                                      : (int32_t)(mix64(one->seed << 20 | (uint64_t)i) % 100000);
    return prompt;
}

static void submit_all(scheduler *sched, const work *all) {
    toka_err e;
    for (int i = 0; i < all->n_jobs; i++) {
        const job *one = &all->jobs[i];
        int32_t *prompt = make_prompt(one);
        sched_job asked = {.prompt = prompt, .n_prompt = one->n_prompt, .n = one->n,
                           .max_tokens = one->max_tokens};
        if (sched_submit(sched, &asked, &e) != i) fprintf(stderr, "%s\n", e.msg), exit(1);
        free(prompt);
    }
}

static result run(const card_model *on, const work *all) {
    static scheduler sched;
    static batch_builder builder;
    static batch_step built;
    pending ring[AHEAD];
    toka_err e;
    result out = {0};
    sched_config config = {TOKA_GPU_PAGE_TOK, (int)(on->kv_tokens / TOKA_GPU_PAGE_TOK), SEQS,
                           TOKA_GPU_DEFAULT_TOKENS, on->max_len, LAST_OF_CONFIG};
    if (sched_init(&sched, &config, &e)) fprintf(stderr, "%s\n", e.msg), exit(1);
    batch_init(&builder, &sched, (batch_cost){8, 512, 32, 8});
    if (batch_step_init(&built, &sched, &e)) fprintf(stderr, "%s\n", e.msg), exit(1);
    for (int i = 0; i < AHEAD; i++)
        ring[i] = (pending){mem_alloc(SEQS * sizeof(batch_sample)), 0};
    submit_all(&sched, all);
    for (int step = 0; sched.n_unstarted || sched.n_seqs_free < SEQS; step++) {
        double t0 = run_cpu_now();
        int n_rows = sched_plan(&sched);
        double t1 = run_cpu_now();
        batch_build(&builder, &built, &sched);
        double t2 = run_cpu_now();
        count_rows(&sched, &built, &out);
        pending *slot = &ring[step % AHEAD];
        double t3 = run_cpu_now();
        commit(&sched, all, slot);
        out.plan_s += t1 - t0 + run_cpu_now() - t3;
        out.build_s += t2 - t1;
        slot->n = built.n_samples;
        memcpy(slot->samples, built.samples, (size_t)slot->n * sizeof *slot->samples);
        if (!n_rows) continue;
        out.steps++;
        out.model_s += step_s(on, &built);
    }
    out.preemptions = sched.n_preempted;
    for (int i = 0; i < AHEAD; i++) free(ring[i].samples);
    batch_step_free(&built), batch_free(&builder), sched_free(&sched);
    return out;
}

/* ---- All runs ---- */

static card_model make_card(const char *gpu, const char *model) {
    arena memory = {0};
    toka_err e;
    const mf_known_model *known;
    plan_query query = {0};
    int n, must_hold;
    plan_options options = {.gpu = gpu, .n_gpus = 1, .input_len = 715, .output_len = 150,
                            .n_samples = 1};
    if (run_find_model("models.txt", model, &memory, &known, &n, &e)) exit(1);
    query.model = &known->config;
    if (plan_check(&options, &query, &must_hold, &e)) exit(1);
    plan_rank rank = plan_make_rank(&query, 1, 1, 0, 0);
    toka_layer layer = plan_layer_shapes(query.model, &rank.shape);
    return (card_model){
        .gpu = query.gpu, .kv_tokens = rank.kv_tokens,
        .max_len = MIN(query.max_len, (int)rank.kv_tokens),
        .layer_bytes = (double)toka_gpu_layer_bytes(&layer) * rank.shape.L,
        .head_bytes = 2.0 * rank.shape.V * rank.shape.E,
        .token_bytes = (double)rank.token_bytes,
        .pair_flop = 4.0 * rank.shape.H * rank.shape.D * rank.shape.L};
}

#ifndef VARIANTS
static struct sched_trial {
    int unused;
} sched_trial;
#endif
static const struct {
    const char *name;
    struct sched_trial rule;
} variants[] = {
#ifndef VARIANTS
    {"toka.c", {0}},
#else
    {"forecast", {0}},
    {"forecast, one class", {.one_class = true}},
    {"forecast, prior only", {.no_learning = true}},
    {"forecast, max_tokens", {.max_len = true}},
    {"watermark 1 %", {.plain = true, .watermark = 0.01}},
    {"watermark 5 %", {.plain = true, .watermark = 0.05}},
    {"watermark 10 %", {.plain = true, .watermark = 0.10}},
    {"watermark 20 %", {.plain = true, .watermark = 0.20}},
    {"next 8 steps", {.plain = true, .steps = 8}},
    {"next 16 steps", {.plain = true, .steps = 16}},
    {"next 24 steps", {.plain = true, .steps = 24}},
    {"next 32 steps", {.plain = true, .steps = 32}},
#endif
};
static const char *const workloads[] = {"monkeys 24", "chat", "mix", "thinking", "monkeys 1024"};
static const char *const cards[][2] = {{"H100", "llama-3.2-1b"}, {"H100", "llama-3.1-8b"},
                                       {"RTX-4090", "llama-3.2-1b"},
                                       {"RTX-4090", "llama-3.1-8b"}};

int main(int argc, char **argv) {
    if (argc < 3)
        return fprintf(stderr, "usage: admission DATA SEEDS [WORKLOAD [CARD MODEL]]\n"), 1;
    for (int w = 0; w < COUNT(workloads); w++)
        for (int c = 0; c < COUNT(cards); c++) {
            if (argc > 3 && strcmp(argv[3], workloads[w])) continue;
            if (argc > 5 && (strcmp(argv[4], cards[c][0]) || strcmp(argv[5], cards[c][1])))
                continue;
            card_model on = make_card(cards[c][0], cards[c][1]);
            for (int seed = 1; seed <= atoi(argv[2]); seed++) {
                work all = make_work(workloads[w], argv[1], (uint64_t)seed);
                for (int v = 0; v < COUNT(variants); v++) {
                    sched_trial = variants[v].rule;
                    result r = run(&on, &all);
                    printf("%s;%s;%s;%lld;%d;%s;%lld;%lld;%lld;%lld;%lld;%.4f;%.2f;%.2f\n",
                           workloads[w], cards[c][0], cards[c][1], (long long)on.kv_tokens, seed,
                           variants[v].name, (long long)r.steps, (long long)r.decode_rows,
                           (long long)r.prefill_rows, (long long)r.recomputed,
                           (long long)r.preemptions, r.model_s, 1e6 * r.plan_s / (double)r.steps,
                           1e6 * r.build_s / (double)r.steps);
                    fflush(stdout);
                }
                free(all.jobs), free(all.lens);
            }
        }
    return 0;
}
