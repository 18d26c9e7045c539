/* test_pipe.c - does a pipeline stay busy? Scheduler and batch building as they are, against a model of stages that take so long for
 * a part as those of an 8B model on H200s, and of the draws that go back to the first stage. A stage begins a part when the one before
 * has handed it over and it is done with the part before; the first one also not before what the part needs was drawn. */

enum { PIPE_STAGES = 20, PIPE_AHEAD = 2, PIPE_PARTS = 1 << 16 };

typedef struct pipe_model { /* seconds */
    int stages;
    int layers[PIPE_STAGES];
    double weights, row, seen, read; /* of a layer: reading its weights; a row; a position that a row of a prompt sees; that a decode reads */
    double head, draw, hop;          /* the last stage's: reading the head, a row drawn; from a stage to the next, or back to the first */
    batch_work weight;
    double host, host_row;           /* committing and planning, launching the first part; for each row that draws */
} pipe_model;

typedef struct pipe_load {
    const char *name;
    int n_requests, n, in_from, in_to, out_from, out_to, max_tokens, max_seqs;
    double any, busiest, later; /* at most so idle are all stages; the busiest; and that where only answers are left */
} pipe_load;

typedef struct pipe_idle { /* shares of the time */
    double any, busiest;
} pipe_idle;

typedef struct pipe_sim {
    scheduler s;
    batch_builder b;
    batch_step step[PIPE_AHEAD];
    batch_micros parts;
    toka_sample_row *out;
    double *drawn;             /* [PIPE_PARTS] when the draws of a part are back at the first stage */
    double free_at[PIPE_STAGES];
    double busy[PIPE_STAGES], begin; /* busy: since `begin` */
    int64_t n_parts, n_near; /* parts that need one less than `stages` parts before them */
} pipe_sim;

static double pipe_part_s(const pipe_model *m, const toka_step *a, int stage) {
    double s = 0;
    for (int i = 0; i < a->T; i++) s += m->row + (a->ids[i] < 0 ? m->read : m->seen) * (a->pos[i] + 1);
    s = m->layers[stage] * fmax(s, m->weights);
    return stage == m->stages - 1 ? s + m->head + m->draw * a->n_samples : s;
}

/* Runs the parts of a step that is posted at `now`; returns when the last one is drawn. */
static double pipe_run(pipe_sim *p, const pipe_model *m, double now) {
    double done = 0;
    for (int k = 0; k < p->parts.n; k++) {
        const toka_step *a = &p->parts.micro[k].step;
        double at = a->needs_step ? fmax(now, p->drawn[a->needs_step % PIPE_PARTS]) : now;
        p->n_parts++, p->n_near += a->needs_step && a->number - a->needs_step < m->stages;
        for (int i = 0; i < m->stages; i++) {
            const double begin = fmax(at, p->free_at[i]), took = pipe_part_s(m, a, i);
            p->free_at[i] = done = begin + took, p->busy[i] += took;
            at = done + m->hop;
        }
        p->drawn[a->number % PIPE_PARTS] = at;
    }
    return done;
}

static void pipe_out_rows(pipe_sim *p, batch_step *d) {
    for (int i = 0; i < d->n_samples; i++) p->out[i] = (toka_sample_row){.row = d->samples[i].row, .seq = d->samples[i].seq};
    d->step.samples = p->out, d->step.n_samples = d->n_samples;
}

static void pipe_submit(pipe_sim *p, const pipe_load *l, uint64_t *seed) {
    int32_t *prompt = mem_alloc((size_t)l->in_to * sizeof *prompt);
    toka_err e;
    for (int i = 0; i < l->n_requests; i++) {
        const int n = rnd_int(seed, l->in_from, l->in_to), out = rnd_int(seed, l->out_from, l->out_to);
        for (int k = 0; k < n; k++) prompt[k] = rnd_int(seed, 0, 100000);
        CHECK(sched_submit(&p->s, &(sched_job){.prompt = prompt, .n_prompt = n, .n = l->n, .max_tokens = out, .fixed_len = true}, &e) >= 0);
    }
    free(prompt);
}

static void pipe_mark(pipe_sim *p, const pipe_model *m) { /* from here on it is counted */
    p->begin = p->free_at[0], p->n_parts = p->n_near = 0;
    for (int i = 0; i < m->stages; i++) p->busy[i] = 0, p->begin = fmax(p->begin, p->free_at[i]);
    for (int i = 0; i < m->stages; i++) p->busy[i] = p->free_at[i] - p->begin;
}

/* How idle the stages were since `begin`. The busiest one is idle by dependencies alone; the others also by layers that cannot be dealt out
 * evenly and a head that is more or less work. */
static pipe_idle pipe_idles(const pipe_sim *p, const pipe_model *m, const char *name) {
    pipe_idle is = {0, 1};
    printf("       %-28s pp %d, idle", name, m->stages);
    for (int i = 0; i < m->stages; i++) {
        const double idle = MAX(0, 1 - p->busy[i] / (p->free_at[i] - p->begin));
        printf(" %.1f %%", 100 * idle), is.any = fmax(is.any, idle), is.busiest = fmin(is.busiest, idle);
    }
    printf("; %.2f s, %d of %d parts need one too near\n", p->free_at[0] - p->begin, (int)p->n_near, (int)p->n_parts);
    return is;
}

static void pipe_close(pipe_sim *p) {
    for (int i = 0; i < PIPE_AHEAD; i++) batch_step_free(&p->step[i]);
    batch_free(&p->b), batch_micros_free(&p->parts), sched_free(&p->s), free(p->out), free(p->drawn), free(p);
}

static pipe_sim *pipe_open(const pipe_model *m, const pipe_load *l) {
    pipe_sim *p = mem_zalloc(sizeof *p);
    sched_config c = {64, 1 << 14, l->max_seqs, l->max_tokens, 2048, 8};
    toka_err e;
    CHECK(!sched_init(&p->s, &c, &e) && !batch_micros_init(&p->parts, &p->s, &e));
    batch_init(&p->b, &p->s, (batch_cost){8, 512, 32, 8});
    for (int i = 0; i < PIPE_AHEAD; i++) CHECK(!batch_step_init(&p->step[i], &p->s, &e));
    p->b.n_stages = m->stages, p->b.work = m->weight;
    p->out = mem_alloc((size_t)c.max_tokens * sizeof *p->out), p->drawn = mem_zalloc(PIPE_PARTS * sizeof *p->drawn);
    return p;
}

/* While prompts and answers mix, and from the last prompt on until a tenth of the most sequences is left. */
static void pipe_case(const pipe_model *m, const pipe_load *l) {
    pipe_sim *p = pipe_open(m, l);
    uint64_t seed = 11;
    double done[PIPE_AHEAD] = {0};
    int phase = 0, most = 0;
    pipe_idle mixed = {1, 1}, later = {1, 1};
    pipe_submit(p, l, &seed);
    for (int64_t i = 0;; i++) {
        batch_step *d = &p->step[i % PIPE_AHEAD];
        const double now = done[i % PIPE_AHEAD] + m->host + m->host_row * d->n_samples; /* the step that had this place is committed then */
        for (int k = 0; k < d->n_samples; k++) sched_commit(&p->s, d->samples[k].seq, d->samples[k].generation, 7, false);
        const int rows = sched_plan(&p->s);
        most = MAX(most, p->s.n_running);
        if (phase == 0 && i == 8) phase = 1, pipe_mark(p, m);
        if (phase == 1 && !p->s.n_unstarted) phase = 2, mixed = pipe_idles(p, m, l->name);
        if (phase == 2 && !p->s.n_prefill_seqs) phase = 3, pipe_mark(p, m);
        if (!rows || p->s.n_running < most / 10) break;
        batch_build(&p->b, d, &p->s);
        pipe_out_rows(p, d);
        batch_make_micros(&p->b, &p->parts, d);
        done[i % PIPE_AHEAD] = pipe_run(p, m, now);
    }
    if (phase == 3) later = pipe_idles(p, m, "  then only answers");
    CHECK_MSG(mixed.any <= l->any && mixed.busiest <= l->busiest && later.busiest <= l->later, "%s, pp %d: %.1f %%, %.1f %%, %.1f %% idle", l->name,
              m->stages, 100 * mixed.any, 100 * mixed.busiest, 100 * later.busiest);
    pipe_close(p);
}

/* Llama-3.1-8B; a stage's time as measured on one H200, see test/results. */
static void test_pipe(void) {
    static const pipe_load loads[] = {{"200-600 in, 60-140 out", 1500, 1, 200, 600, 60, 140, 8448, 4096, 0.2, 0.01, 0.03},
                                      {"the same, 256 at once", 600, 1, 200, 600, 60, 140, 8448, 256, 0.25, 0.08, 0.08},
                                      {"24 prompts of 1024 samples", 24, 1024, 60, 180, 60, 100, 8448, 4096, 0.12, 0.01, 0.01},
                                      {"the same, 40 at once", 200, 1, 200, 600, 60, 140, 8448, 40, 0.3, 0.06, 0.06}};
    const toka_shape shape = {.L = 32, .H = 32, .K = 8, .D = 128, .E = 4096, .F = 14336, .V = 128256, .V_all = 128256};
    for (int pp = 2; pp <= 4; pp += 2) {
        pipe_model m = {.stages = pp, .weights = 0.11e-3, .row = 0.73e-6, .seen = 41e-12, .read = 1.17e-9, .head = 0.27e-3, .draw = 1e-6,
                        .hop = 60e-6, .host = 0.2e-3, .host_row = 0.3e-6, .weight = eng_batch_work(&shape)};
        for (int k = 0; k < pp; k++) m.layers[k] = mf_stage_layers(&shape, k, pp).count;
        for (int i = 0; i < COUNT(loads); i++) pipe_case(&m, &loads[i]);
    }
}

/* 16 parts go round 20 stages, so a fifth of the time is lost at least; no more, if sequences keep their lanes. */
static void test_pipe_long(void) {
    static const pipe_load load = {"20 stages", 1500, 1, 200, 600, 60, 140, 8448, 2048, 0.27, 0.27, 0.42};
    const toka_shape shape = {.L = 40, .H = 32, .K = 8, .D = 128, .E = 4096, .F = 14336, .V = 128256, .V_all = 128256};
    pipe_model m = {.stages = 20, .weights = 0.11e-3, .row = 0.73e-6, .seen = 41e-12, .read = 1.17e-9, .hop = 60e-6, .host = 0.2e-3,
                    .host_row = 0.3e-6, .weight = eng_batch_work(&shape)};
    for (int k = 0; k < 20; k++) m.layers[k] = 2;
    pipe_case(&m, &load);
}

static const struct test pipe_tests[] = {{"pipeline: stages stay busy", test_pipe}, {"pipeline: more stages than parts", test_pipe_long}, {0}};
