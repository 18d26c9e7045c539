/* test_pipe.c - checks that a pipeline stays busy. It runs the real scheduler and batch building
 * against a model of the stages. A stage takes as long for a microbatch as with an 8B model on
 * H200s, and sampled tokens go back to the first stage. A stage starts a microbatch when the stage
 * before it has sent it and its own last microbatch is done. The first stage also waits until the
 * microbatch's needs_step is sampled. */

enum { PIPE_STAGES = 20, PIPE_AHEAD = 2, PIPE_MICROS = 1 << 16 };

typedef struct pipe_model { /* seconds */
    int stages;
    int layers[PIPE_STAGES];
    /* of a layer: reading its weights; a row; a position that a prefill row attends to; one that a
     * decode row reads */
    double weights, row, seen, read;
    /* of the last stage: reading the LM head; a sampled row. hop: sending to the next stage, or
     * back to the first */
    double head, per_sample, hop;
    batch_work weight;
    /* commit, plan and launch of the first microbatch; for each sampled row */
    double host, host_row;
} pipe_model;

typedef struct pipe_load {
    const char *name;
    int n_requests, n, in_from, in_to, out_from, out_to, max_tokens, max_seqs;
    /* limits of the idle share: of any stage; of the busiest one; of the busiest one in pure
     * decode */
    double any, busiest, later;
} pipe_load;

typedef struct pipe_idle { /* shares of the time */
    double any, busiest;
} pipe_idle;

typedef struct pipe_sim {
    scheduler s;
    batch_builder b;
    batch_step step[PIPE_AHEAD];
    batch_micros micros;
    toka_sample_row *sample_rows;
    /* [PIPE_MICROS] when the samples of a microbatch are back at the first stage */
    double *sampled_at;
    double free_at[PIPE_STAGES];
    double busy[PIPE_STAGES], begin; /* busy: seconds since `begin` */
    /* microbatches whose needs_step is less than `stages` microbatches before them */
    int64_t n_micros, n_near;
} pipe_sim;

static double pipe_micro_s(const pipe_model *m, const toka_step *a, int stage) {
    double s = 0;
    for (int i = 0; i < a->T; i++) s += m->row + (a->ids[i] < 0 ? m->read : m->seen) * (a->pos[i] + 1);
    s = m->layers[stage] * fmax(s, m->weights);
    return stage == m->stages - 1 ? s + m->head + m->per_sample * a->n_samples : s;
}

/* Runs the microbatches of a step that is posted at `now`. Returns when the last one is sampled. */
static double pipe_run(pipe_sim *p, const pipe_model *m, double now) {
    double done = 0;
    for (int k = 0; k < p->micros.n; k++) {
        const toka_step *a = &p->micros.micro[k].step;
        double at = a->needs_step ? fmax(now, p->sampled_at[a->needs_step % PIPE_MICROS]) : now;
        p->n_micros++, p->n_near += a->needs_step && a->number - a->needs_step < m->stages;
        for (int i = 0; i < m->stages; i++) {
            const double begin = fmax(at, p->free_at[i]), seconds = pipe_micro_s(m, a, i);
            p->free_at[i] = done = begin + seconds, p->busy[i] += seconds;
            at = done + m->hop;
        }
        p->sampled_at[a->number % PIPE_MICROS] = at;
    }
    return done;
}

static void pipe_add_sample_rows(pipe_sim *p, batch_step *d) {
    for (int i = 0; i < d->n_samples; i++) p->sample_rows[i] = (toka_sample_row){.row = d->samples[i].row, .seq = d->samples[i].seq};
    d->step.samples = p->sample_rows, d->step.n_samples = d->n_samples;
}

static void pipe_submit(pipe_sim *p, const pipe_load *l, uint64_t *seed) {
    int32_t *prompt = mem_alloc((size_t)l->in_to * sizeof *prompt);
    toka_err e;
    for (int i = 0; i < l->n_requests; i++) {
        const int n = rnd_int(seed, l->in_from, l->in_to), n_out = rnd_int(seed, l->out_from, l->out_to);
        for (int k = 0; k < n; k++) prompt[k] = rnd_int(seed, 0, 100000);
        CHECK(sched_submit(&p->s, &(sched_job){.prompt = prompt, .n_prompt = n, .n = l->n, .max_tokens = n_out}, &e) >= 0);
    }
    free(prompt);
}

/* The measurement starts here. */
static void pipe_start_measuring(pipe_sim *p, const pipe_model *m) {
    p->begin = p->free_at[0], p->n_micros = p->n_near = 0;
    for (int i = 0; i < m->stages; i++) p->busy[i] = 0, p->begin = fmax(p->begin, p->free_at[i]);
    for (int i = 0; i < m->stages; i++) p->busy[i] = p->free_at[i] - p->begin;
}

/* How idle the stages were since `begin`. The busiest stage is idle only because of dependencies;
 * the others also because layers cannot be divided evenly and the LM head does not equal a number
 * of layers. */
static pipe_idle pipe_idle_shares(const pipe_sim *p, const pipe_model *m, const char *name) {
    pipe_idle is = {0, 1};
    printf("       %-28s pp %d, idle", name, m->stages);
    for (int i = 0; i < m->stages; i++) {
        const double idle = MAX(0, 1 - p->busy[i] / (p->free_at[i] - p->begin));
        printf(" %.1f %%", 100 * idle), is.any = fmax(is.any, idle), is.busiest = fmin(is.busiest, idle);
    }
    printf("; %.2f s, %d of %d microbatches need one that is too near\n", p->free_at[0] - p->begin, (int)p->n_near, (int)p->n_micros);
    return is;
}

static void pipe_close(pipe_sim *p) {
    for (int i = 0; i < PIPE_AHEAD; i++) batch_step_free(&p->step[i]);
    batch_free(&p->b), batch_micros_free(&p->micros), sched_free(&p->s), free(p->sample_rows), free(p->sampled_at), free(p);
}

static pipe_sim *pipe_open(const pipe_model *m, const pipe_load *l) {
    pipe_sim *p = mem_zalloc(sizeof *p);
    sched_config c = {64, 1 << 14, l->max_seqs, l->max_tokens, 2048, 0, 0, {0}};
    toka_err e;
    CHECK(!sched_init(&p->s, &c, &e) && !batch_micros_init(&p->micros, &p->s, &e));
    batch_init(&p->b, &p->s, (batch_cost){8, 512, 32, 8});
    for (int i = 0; i < PIPE_AHEAD; i++) CHECK(!batch_step_init(&p->step[i], &p->s, &e));
    p->b.n_stages = m->stages, p->b.work = m->weight;
    p->sample_rows = mem_alloc((size_t)c.max_tokens * sizeof *p->sample_rows),
        p->sampled_at = mem_zalloc(PIPE_MICROS * sizeof *p->sampled_at);
    return p;
}

/* Measures while prefill and decode mix; then from the last prompt on, until a tenth of the largest
 * number of sequences is left. */
static void pipe_case(const pipe_model *m, const pipe_load *l) {
    pipe_sim *p = pipe_open(m, l);
    uint64_t seed = 11;
    double done[PIPE_AHEAD] = {0};
    int phase = 0, max_running = 0;
    pipe_idle mixed = {1, 1}, later = {1, 1};
    pipe_submit(p, l, &seed);
    for (int64_t i = 0;; i++) {
        batch_step *d = &p->step[i % PIPE_AHEAD];
        /* the step before in this place of the ring is committed by then */
        const double now = done[i % PIPE_AHEAD] + m->host + m->host_row * d->n_samples;
        for (int k = 0; k < d->n_samples; k++) sched_commit(&p->s, d->samples[k].seq, d->samples[k].generation, 7, false);
        const int rows = sched_plan(&p->s);
        max_running = MAX(max_running, p->s.n_running);
        if (phase == 0 && i == 8) phase = 1, pipe_start_measuring(p, m);
        if (phase == 1 && !p->s.n_unstarted) phase = 2, mixed = pipe_idle_shares(p, m, l->name);
        if (phase == 2 && !p->s.n_prefill_seqs) phase = 3, pipe_start_measuring(p, m);
        if (!rows || p->s.n_running < max_running / 10) break;
        batch_build(&p->b, d, &p->s);
        pipe_add_sample_rows(p, d);
        batch_make_micros(&p->b, &p->micros, d);
        done[i % PIPE_AHEAD] = pipe_run(p, m, now);
    }
    if (phase == 3) later = pipe_idle_shares(p, m, "  then only answers");
    CHECK_MSG(mixed.any <= l->any && mixed.busiest <= l->busiest && later.busiest <= l->later, "%s, pp %d: %.1f %%, %.1f %%, %.1f %% idle", l->name,
              m->stages, 100 * mixed.any, 100 * mixed.busiest, 100 * later.busiest);
    pipe_close(p);
}

/* Llama-3.1-8B, with a stage's time as measured on one H200: see test/results. */
static void test_pipe(void) {
    static const pipe_load loads[] = {{"200-600 in, 60-140 out", 1500, 1, 200, 600, 60, 140, 8448, 4096, 0.2, 0.01, 0.03},
                                      {"the same, 256 at once", 600, 1, 200, 600, 60, 140, 8448, 256, 0.25, 0.08, 0.08},
                                      {"24 prompts of 1024 samples", 24, 1024, 60, 180, 60, 100, 8448, 4096, 0.12, 0.01, 0.01},
                                      {"the same, 40 at once", 200, 1, 200, 600, 60, 140, 8448, 40, 0.3, 0.06, 0.06}};
    const toka_shape shape = {.L = 32, .H = 32, .K = 8, .D = 128, .E = 4096, .F = 14336, .V = 128256, .V_all = 128256};
    static const toka_layer layers[32];
    for (int pp = 2; pp <= 4; pp += 2) {
        pipe_model m = {.stages = pp, .weights = 0.11e-3, .row = 0.73e-6, .seen = 41e-12, .read = 1.17e-9,
            .head = 0.27e-3, .per_sample = 1e-6,
                        .hop = 60e-6, .host = 0.2e-3, .host_row = 0.3e-6, .weight = eng_batch_work(&shape, layers)};
        for (int k = 0; k < pp; k++) m.layers[k] = mf_stage_layers(&shape, k, pp).count;
        for (int i = 0; i < COUNT(loads); i++) pipe_case(&m, &loads[i]);
    }
}

/* 16 microbatches for 20 stages, so at least a fifth of the time is lost. No more is lost if
 * sequences keep their microbatch. */
static void test_pipe_long(void) {
    static const pipe_load load = {"20 stages", 1500, 1, 200, 600, 60, 140, 8448, 2048, 0.27, 0.27, 0.42};
    const toka_shape shape = {.L = 40, .H = 32, .K = 8, .D = 128, .E = 4096, .F = 14336, .V = 128256, .V_all = 128256};
    static const toka_layer layers[40];
    pipe_model m = {.stages = 20, .weights = 0.11e-3, .row = 0.73e-6, .seen = 41e-12, .read = 1.17e-9, .hop = 60e-6, .host = 0.2e-3,
                    .host_row = 0.3e-6, .weight = eng_batch_work(&shape, layers)};
    for (int k = 0; k < 20; k++) m.layers[k] = 2;
    pipe_case(&m, &load);
}

static const struct test pipe_tests[] = {{"pipeline: stages stay busy", test_pipe},
    {"pipeline: more stages than microbatches", test_pipe_long}, {0}};
