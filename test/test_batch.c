/* test_batch.c - steps and shared spans, read as attention reads them by the machine of test_sched.c. */

typedef struct bt {
    smt m;
    batch_builder b;
    batch_step built, last;              /* this step; the one before, which is still on its way */
    uint64_t last_hash;
    batch_micros parts;
    toka_sample_row *out;                   /* of the step: those that yield, and some more */
    uint64_t rng;
    int *drawn, n_drawn;                 /* slot of every draw so far, and number of its part */
    int64_t n_parts, n_needs, n_halves;  /* parts; with needs; chunks that go on in the next one */
    int64_t n_shared, n_nested, kv_read; /* shared spans; rows under two or more of them; tokens of K and V read */
    int64_t n_within;                    /* spans that begin within a page */
} bt;

static int bt_groups(const bt *t) { return t->built.step.n_spans - t->built.n_chunks; } /* shared spans of the step */
static int bt_span_pages(const toka_span *sp, int B) { return (sp->kv0 + sp->n_kv + B - 1) / B - sp->kv0 / B; }

/* Every row's spans: from 0 to its position without a gap, in rising order, and right content in every slot they name. row_q:
 * the slot of each row. Returns how many rows are under more than two spans. */
static int bt_check_spans(bt *t, const toka_step *st, const int *row_q, const uint64_t *mem, int32_t *device) {
    const scheduler *s = &t->m.s;
    int *upto = mem_zalloc((size_t)st->T * sizeof *upto), *n_spans = mem_zalloc((size_t)st->T * sizeof *n_spans), n_nested = 0;
    for (int i = 0; i < st->n_spans && !check_failed; i++) {
        toka_span sp = st->spans[i];
        CHECK(sp.n_rows > 0 && sp.n_kv > 0 && sp.row0 >= 0 && sp.row0 + sp.n_rows <= st->T);
        t->kv_read += sp.n_kv, t->n_within += sp.kv0 % s->config.B != 0;
        for (int r = sp.row0; r < sp.row0 + sp.n_rows; r++) {
            CHECK(upto[r] == sp.kv0);
            for (int p = sp.kv0; p < sp.kv0 + sp.n_kv && p <= st->pos[r]; p++) {
                int slot = st->pages[sp.page0 + p / s->config.B - sp.kv0 / s->config.B] * s->config.B + p % s->config.B;
                CHECK(mem[slot] == smt_hash(device + (size_t)row_q[r] * (size_t)s->config.max_len, p + 1));
            }
            upto[r] = MIN(sp.kv0 + sp.n_kv, st->pos[r] + 1), n_spans[r]++;
        }
    }
    for (int r = 0; r < st->T && !check_failed; r++) {
        CHECK(upto[r] == st->pos[r] + 1);
        CHECK(st->kv_slot[r] == kv_block_table(&s->kv, row_q[r])[st->pos[r] / s->config.B] * s->config.B + st->pos[r] % s->config.B);
        int32_t id = device[(size_t)row_q[r] * (size_t)s->config.max_len + (size_t)st->pos[r]];
        CHECK(st->ids[r] == id || (st->ids[r] == -1 - row_q[r] && st->pos[r] >= s->seqs[row_q[r]].n_known));
        n_nested += n_spans[r] > 2;
    }
    free(upto), free(n_spans);
    return n_nested;
}

/* The slot of each row of the step; to be freed. */
static int *bt_row_q(bt *t) {
    const batch_step *d = &t->built;
    int *row_q = mem_alloc((size_t)d->step.T * sizeof *row_q), row = 0;
    for (int e = 0; e < d->n_chunks; e++) {
        CHECK(d->chunk_row0[e] == row && d->chunk_row0[e + 1] > row);
        while (row < d->chunk_row0[e + 1]) row_q[row++] = d->chunk_seq[e];
    }
    CHECK(row == d->step.T && d->chunk_row0[d->n_chunks] == row);
    return row_q;
}

/* ---- Parts ---- */

/* Parts run one behind the other; each sees only what is written by then. */
static void bt_check_order(const bt *t, const int *row_q) {
    const toka_step *st = &t->built.step;
    int B = t->m.s.config.B;
    char *missing = mem_zalloc((size_t)t->m.s.config.n_pages * (size_t)B);
    for (int r = 0; r < st->T; r++) missing[st->kv_slot[r]] = 1;
    for (int k = 0; k < t->parts.n && !check_failed; k++) {
        const batch_micro *a = &t->parts.micro[k];
        for (int r = 0; r < a->step.T; r++) missing[a->step.kv_slot[r]] = 0;
        for (int r = 0; r < a->step.T; r++)
            for (int p = 0; p <= a->step.pos[r]; p++)
                CHECK(!missing[kv_block_table(&t->m.s.kv, row_q[a->row0 + r])[p / B] * B + p % B]);
    }
    free(missing);
}

/* Prompts fill the lanes like water: no part with rows of one is above another by more than what whole rows make of it. */
static void bt_check_balance(const bt *t, const int *row_q) {
    int64_t most = 0, highest = 0, lowest = INT64_MAX;
    const batch_work w = t->b.work;
    for (int k = 0; k < t->parts.n; k++) {
        const batch_micro *a = &t->parts.micro[k];
        int64_t cost = 0;
        bool fed = false;
        for (int r = 0; r < a->step.T; r++) {
            const bool chunk = t->m.s.seqs[row_q[a->row0 + r]].is_prefill;
            int64_t c = w.row + (w.pair + (chunk ? 0 : w.read)) * (a->step.pos[r] + 1);
            cost += c, most = MAX(most, c), fed |= chunk;
        }
        lowest = MIN(lowest, cost);
        if (fed) highest = MAX(highest, cost);
    }
    CHECK(t->parts.n >= 1 && t->parts.n <= t->b.n_stages + (t->b.n_stages > 1));
    CHECK_MSG(highest <= lowest + t->parts.n * (most + 1), "%lld beside %lld, rows of up to %lld", (long long)highest, (long long)lowest,
              (long long)most);
}

static void bt_check_outs(const bt *t, const batch_micro *a) {
    const toka_step *st = &t->built.step;
    int n = 0;
    for (int i = 0; i < st->n_samples; i++) {
        int k = t->parts.sample_at[i] - a->sample0, row = st->samples[i].row - a->row0;
        CHECK((k >= 0 && k < a->step.n_samples) == (row >= 0 && row < a->step.T));
        if (k < 0 || k >= a->step.n_samples) continue;
        CHECK(a->step.samples[k].row == row && a->step.samples[k].seq == st->samples[i].seq && a->step.samples[k].position == st->samples[i].position);
        n++;
    }
    CHECK(n == a->step.n_samples);
}

/* The number of the part that drew the tokens which this one is fed, the last of them; looked up in the log of all draws. */
static void bt_check_needs(bt *t, const batch_micro *a) {
    int64_t needs = 0;
    for (int r = 0; r < a->step.T; r++)
        for (int i = t->n_drawn - 1; i >= 0 && a->step.ids[r] < 0; i--)
            if (t->drawn[2 * i] == -1 - a->step.ids[r]) {
                needs = MAX(needs, (int64_t)t->drawn[2 * i + 1]);
                break;
            }
    CHECK(a->step.needs_step == needs && (!needs || needs < t->parts.micro[0].step.number));
    t->n_needs += needs > 0;
}

static void bt_check_parts(bt *t, const int *row_q, const uint64_t *mem, int32_t *device) {
    const batch_step *d = &t->built;
    int row = 0;
    int64_t number = t->n_parts;
    batch_make_micros(&t->b, &t->parts, d);
    for (int k = 0; k < t->parts.n && !check_failed; k++) {
        const batch_micro *a = &t->parts.micro[k];
        int end = row + a->step.T;
        CHECK(a->row0 == row && a->step.T > 0 && end <= d->step.T && a->step.number == ++number);
        CHECK(!memcmp(a->step.ids, d->ids + row, (size_t)a->step.T * sizeof *d->ids));
        CHECK(d->chunk_seq[d->micro_chunk0[k]] == row_q[row] && d->chunk_seq[d->micro_chunk0[k + 1] - 1] == row_q[end - 1] && d->chunk_row0[d->micro_chunk0[k + 1]] == end);
        bt_check_spans(t, &a->step, row_q + row, mem, device);
        bt_check_outs(t, a), bt_check_needs(t, a);
        row = end;
    }
    for (int e = 0; e < d->n_chunks; e++) {
        const sched_seq *x = &t->m.s.seqs[d->chunk_seq[e]];
        t->n_halves += d->pos[d->chunk_row0[e + 1] - 1] + 1 < x->from + x->n_rows;
    }
    CHECK(row == d->step.T);
    bt_check_order(t, row_q), bt_check_balance(t, row_q);
    t->n_parts = number;
    for (int i = 0; i < d->n_samples; i++)
        for (int k = 0; k < t->parts.n; k++) {
            int r = d->samples[i].row - t->parts.micro[k].row0;
            if (r < 0 || r >= t->parts.micro[k].step.T) continue;
            t->drawn = mem_realloc(t->drawn, (size_t)(t->n_drawn + 1) * 2 * sizeof *t->drawn);
            t->drawn[2 * t->n_drawn] = d->samples[i].seq, t->drawn[2 * t->n_drawn++ + 1] = (int)t->parts.micro[k].step.number;
        }
}

/* As an engine does: rows that yield, then others in rising order. */
static void bt_out_rows(bt *t) {
    batch_step *d = &t->built;
    int n = 0;
    for (; n < d->n_samples; n++) t->out[n] = (toka_sample_row){.row = d->samples[n].row, .seq = d->samples[n].seq, .position = (uint32_t)n};
    for (int r = 0; r < d->step.T && n < t->m.s.config.max_tokens; r++)
        if (rnd(&t->rng) % 4 == 0) t->out[n] = (toka_sample_row){.row = r, .seq = -1, .position = (uint32_t)n}, n++;
    d->step.samples = t->out, d->step.n_samples = n;
}

/* All that is in a step. Its pages lie there span by span, without a gap. */
static uint64_t bt_hash(const batch_step *d, int B) {
    const toka_step *st = &d->step;
    size_t T = (size_t)st->T * sizeof(int32_t);
    int n_pages = 0;
    for (int i = 0; i < st->n_spans; n_pages += bt_span_pages(&st->spans[i++], B)) CHECK(st->spans[i].page0 == n_pages);
    CHECK(n_pages == d->n_pages);
    uint64_t h = hash_bytes(st->ids, T) + hash_bytes(st->pos, T) * 3 + hash_bytes(st->kv_slot, T) * 5;
    h += hash_bytes(st->spans, (size_t)st->n_spans * sizeof *st->spans) * 7;
    h += hash_bytes(st->pages, (size_t)n_pages * sizeof *st->pages) * 9;
    return h + hash_bytes(d->samples, (size_t)d->n_samples * sizeof *d->samples) * 11 + hash_bytes(d->chunk_seq, (size_t)d->n_chunks * sizeof *d->chunk_seq);
}

static void bt_on_run(void *user, const uint64_t *mem, int32_t *device) {
    bt *t = user;
    batch_step turn = t->last;
    t->last = t->built, t->built = turn;
    batch_build(&t->b, &t->built, &t->m.s);
    CHECK(!t->last.step.T || bt_hash(&t->last, t->m.s.config.B) == t->last_hash); /* whatever was committed, planned and built since */
    t->last_hash = bt_hash(&t->built, t->m.s.config.B);
    int *row_q = bt_row_q(t);
    t->n_nested += bt_check_spans(t, &t->built.step, row_q, mem, device);
    t->n_shared += bt_groups(t);
    int64_t kv_read = t->kv_read;
    bt_out_rows(t);
    if (t->built.step.T) bt_check_parts(t, row_q, mem, device);
    t->kv_read = kv_read;
    free(row_q);
    int n_yield = 0;
    for (int q = 0; q < t->m.s.config.max_seqs; q++) n_yield += t->m.s.seqs[q].n_rows && t->m.s.seqs[q].is_sampled;
    CHECK(n_yield == t->built.n_samples);
    for (int i = 0; i < t->built.n_samples; i++) {
        const sched_seq *x = &t->m.s.seqs[t->built.samples[i].seq];
        CHECK(x->is_sampled && x->generation == t->built.samples[i].generation && t->built.pos[t->built.samples[i].row] == x->from + x->n_rows - 1);
    }
}

static bt *bt_open(sched_config c, batch_cost cost, int vocab, int end_one_in, int lag, int stages) {
    static const batch_work weights[] = {{1, 0, 0}, {1000, 1, 5}, {3, 7, 0}, {1, 1, 20}};
    bt *t = mem_zalloc(sizeof *t);
    toka_err e;
    smt_open(&t->m, c, vocab, end_one_in, lag);
    CHECK(!batch_step_init(&t->built, &t->m.s, &e) && !batch_step_init(&t->last, &t->m.s, &e) && !batch_micros_init(&t->parts, &t->m.s, &e));
    batch_init(&t->b, &t->m.s, cost);
    t->b.n_stages = stages, t->b.compute_bound_rows = stages, t->b.work = weights[(stages + lag) % COUNT(weights)];
    t->out = mem_alloc((size_t)c.max_tokens * sizeof *t->out), t->rng = 7;
    t->m.on_run = bt_on_run, t->m.on_run_user = t;
    return t;
}

static void bt_close(bt *t) {
    free(t->out), free(t->drawn);
    batch_free(&t->b), batch_step_free(&t->built), batch_step_free(&t->last), batch_micros_free(&t->parts), smt_close(&t->m);
    free(t);
}

static void bt_random(void) {
    batch_cost costs[] = {{0, 0, 1 << 20, 1}, {1, 0, 4, 0}, {1, 4, 16, 2}, {1000, 0, 64, 1}};
    int64_t n_shared = 0, n_nested = 0, n_within = 0, n_parts = 0, n_needs = 0, n_halves = 0;
    for (uint64_t seed = 1; seed <= 80 && !check_failed; seed++) {
        uint64_t rng = seed;
        sched_config c = {seed % 3 ? 2 : 4, seed % 2 ? 60 : 12, 12, 16, 24, 8};
        bt *t = bt_open(c, costs[seed % 4], 2, 30, (int)(seed % 3), seed / 4 % 2 ? 1 : 2 + (int)(seed / 8 % 5));
        for (int i = 0; i < 80 && !check_failed; i++) {
            int n_prompt = 1 + (int)(rnd(&rng) % 12), max_tokens = 1 + (int)(rnd(&rng) % 12);
            if (t->m.s.n_unstarted < 20) smt_submit(&t->m, &rng, n_prompt, 1 + (int)(rnd(&rng) % 4), max_tokens, 0);
            if (rnd(&rng) % 16 == 0 && t->m.s.newest >= 0) sched_cancel(&t->m.s, t->m.s.seqs[t->m.s.newest].request);
            if (rnd(&rng) % 8 == 0 && t->m.s.newest >= 0) sched_preempt(&t->m.s);
            smt_step(&t->m, false);
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        CHECK(seed % 4 != 3 || !t->n_shared); /* merging that dear is never worth it */
        n_shared += t->n_shared, n_nested += t->n_nested, n_within += t->n_within;
        n_parts += t->n_parts, n_needs += t->n_needs, n_halves += t->n_halves;
        bt_close(t);
    }
    CHECK_MSG(n_shared > 1000 && n_nested > 1000 && n_within > 1000, "%d %d %d", (int)n_shared, (int)n_nested, (int)n_within);
    CHECK_MSG(n_parts > 10000 && n_needs > 3000 && n_halves > 1000, "%d %d %d", (int)n_parts, (int)n_needs, (int)n_halves);
}

/* With free merging every page is read once per step, however many hold it. */
static void bt_each_page_once(void) {
    uint64_t rng = 21;
    bt *t = bt_open((sched_config){2, 300, 24, 400, 40, 8}, (batch_cost){0, 0, 1 << 20, 0}, 2, 1 << 30, 0, 1);
    for (int i = 0; i < 8; i++) smt_submit(&t->m, &rng, 16 + i % 3, 3, 20, 0);
    for (int i = 0; i < 19 && !check_failed; i++) {
        t->kv_read = 0;
        smt_step(&t->m, false);
        if (t->m.s.n_prefill_seqs) continue;
        int want = 0;
        char *seen = mem_zalloc(300);
        for (int e = 0; e < t->built.n_chunks; e++)
            for (int k = 0, from = t->built.pos[e]; k <= from / 2; k++) { /* one row each; the last page may be half full */
                int page = kv_block_table(&t->m.s.kv, t->built.chunk_seq[e])[k];
                if (!seen[page] || k == from / 2) want += k == from / 2 ? from % 2 + 1 : 2;
                seen[page] = 1;
            }
        free(seen);
        CHECK_MSG(t->kv_read == want, "step %d: %d tokens read, %d different ones", i, (int)t->kv_read, want);
    }
    bt_close(t);
}

/* Families of prompts with common beginnings, queued behind one that takes the whole first step; some of those who would have
 * computed a beginning for the others are cancelled before they could, or parked. */
static void bt_random_families(void) {
    int64_t n_halves = 0;
    for (uint64_t seed = 1; seed <= 300 && !check_failed; seed++) {
        uint64_t rng = seed;
        toka_err e;
        bt *t = bt_open((sched_config){2, 80, 12, 24, 64, 8}, (batch_cost){(int)seed % 2, 0, 4, (int)seed % 3}, 2, 8, (int)(seed % 3), 2 + (int)(seed % 5));
        for (int wave = 0; wave < 12 && !check_failed; wave++) {
            int32_t prompt[23];
            for (int i = 0; i < 23; i++) prompt[i] = 100 + wave;
            while (t->m.s.n_unstarted) sched_cancel(&t->m.s, t->m.s.first_queued);
            for (int q = 0; q < 12; q++) {
                const sched_seq *x = &t->m.s.seqs[q];
                if (x->state == SCHED_PREFILL || (x->state != SCHED_FREE && rnd(&rng) % 2)) sched_cancel(&t->m.s, x->request);
            }
            sched_submit(&t->m.s, &(sched_job){.prompt = prompt, .n_prompt = 23, .n = 1, .max_tokens = 1}, &e);
            for (int k = 3 + (int)(rnd(&rng) % 8); k; k--) {
                prompt[0] = 200 + wave;
                for (int i = 1; i < 14; i++) prompt[i] = rnd(&rng) % 4 == 0;
                int n = 3 + (int)(rnd(&rng) % 12);
                sched_submit(&t->m.s, &(sched_job){.prompt = prompt, .n_prompt = n, .n = 1 + n % 2, .max_tokens = 2}, &e);
            }
            for (int i = 0; i < 4 && !check_failed; i++) {
                smt_step(&t->m, false);
                for (int k = (int)(rnd(&rng) % 8); k && i < 2; k--) {
                    const sched_seq *x = &t->m.s.seqs[rnd(&rng) % 12];
                    if (x->state == SCHED_PREFILL) sched_cancel(&t->m.s, x->request);
                }
                if (rnd(&rng) % 8 == 0 && t->m.s.newest >= 0) sched_preempt(&t->m.s);
            }
        }
        if (check_failed) printf("seed %d\n", (int)seed);
        n_halves += t->n_halves;
        bt_close(t);
    }
    CHECK_MSG(n_halves > 1000, "%d", (int)n_halves);
}

/* u and x have pages 0 and 1 in common, v only page 0. The one that was to compute page 0 is cancelled, so v, which stands behind
 * u and x, computes it in the step in which u computes page 1. So it must be in a part before u and x, though it stands behind them. */
static void bt_third_writer(void) {
    bt *t = bt_open((sched_config){2, 100, 8, 24, 64, 8}, (batch_cost){0, 0, 1 << 20, 0}, 1000, 1 << 30, 0, 5);
    scheduler *s = &t->m.s;
    toka_err e;
    int32_t z[25] = {9}, a[7] = {1, 1, 2, 2, 3, 3, 3}, v[7] = {1, 1, 5, 5, 5, 5, 5}, u[7] = {1, 1, 2, 2, 6, 6, 6}, x[7] = {1, 1, 2, 2, 7, 7, 7};
    sched_submit(s, &(sched_job){.prompt = z, .n_prompt = 25, .n = 1, .max_tokens = 9}, &e); /* takes the whole first step */
    int first = sched_submit(s, &(sched_job){.prompt = a, .n_prompt = 7, .n = 1, .max_tokens = 9}, &e);
    int32_t *others[] = {v, u, x};
    for (int i = 0; i < 3; i++) sched_submit(s, &(sched_job){.prompt = others[i], .n_prompt = 7, .n = 1, .max_tokens = 9}, &e);
    smt_step(&t->m, false);
    CHECK(s->n_running == 5 && t->built.step.T == 24);
    sched_cancel(s, first);
    smt_step(&t->m, false);
    CHECK(s->n_running == 4 && t->built.step.T == 16 && t->parts.n == 5); /* bt_check_order looked at it */
    bt_close(t);
}

/* Two prompts with one beginning, many samples: levels are shared where it pays. */
static void bt_levels(void) {
    struct {
        batch_cost cost;
        int n_spans; /* shared ones */
    } cases[] = {{{0, 0, 1 << 20, 0}, 3}, {{100, 0, 1 << 20, 0}, 2}, {{100000, 0, 1 << 20, 0}, 0}, {{100, 100000, 1 << 20, 0}, 0},
                 {{4, 0, 1, 0}, 0},       {{0, 0, 1 << 20, 4}, 3}, {{100, 0, 1 << 20, 1}, 2}};
    for (int k = 0; k < COUNT(cases); k++) {
        bt *t = bt_open((sched_config){16, 400, 64, 2048, 400, 8}, cases[k].cost, 1000, 1 << 30, 0, 1);
        int32_t prompt[300];
        toka_err e;
        for (int i = 0; i < 300; i++) prompt[i] = 1;
        for (int second = 0; second < 2; second++) {
            for (int i = 100; i < 300; i++) prompt[i] = 2 + second;
            sched_submit(&t->m.s, &(sched_job){.prompt = prompt, .n_prompt = 300, .n = 16, .max_tokens = 40}, &e);
        }
        for (int i = 0; i < 3; i++) smt_step(&t->m, i == 2); /* no page is filled by generation yet */
        CHECK(t->built.n_chunks == 32);
        CHECK_MSG(bt_groups(t) == cases[k].n_spans, "case %d: %d groups", k, bt_groups(t));
        if (k == 0) CHECK(t->built.step.spans[0].n_rows == 32 && t->built.step.spans[0].n_kv == 96);
        if (k == 0) CHECK(t->built.step.spans[1].n_rows == 16 && t->built.step.spans[1].n_kv == 192);
        if (k == 1) CHECK(t->built.step.spans[0].n_rows == 16 && t->built.step.spans[0].n_kv == 288);
        if (k == 5) CHECK(t->built.step.spans[1].n_kv == 200 && t->built.step.spans[3].kv0 == 296); /* of 299 tokens and the last */
        if (k == 6) CHECK(t->built.step.spans[0].n_kv == 299 && t->built.step.spans[2].kv0 == 299);
        bt_close(t);
    }
}

/* Samples that are to share nothing do not share the tail of a short prompt either. */
static void bt_alone(void) {
    for (int alone = 0; alone < 2; alone++) {
        bt *t = bt_open((sched_config){16, 400, 64, 2048, 400, 8}, (batch_cost){0, 0, 1 << 20, 1}, 1000, 1 << 30, 0, 1);
        int32_t prompt[10] = {1, 2, 3};
        toka_err e;
        sched_submit(&t->m.s, &(sched_job){.prompt = prompt, .n_prompt = 10, .n = 8, .max_tokens = 40, .n_unshared = alone * 8}, &e);
        for (int i = 0; i < 3; i++) smt_step(&t->m, false);
        CHECK_MSG(t->built.n_chunks == 8 && bt_groups(t) == !alone, "alone %d: %d groups", alone, bt_groups(t));
        bt_close(t);
    }
}

/* So do requests that ask for the same, and only those. */
static void bt_alike(void) {
    bt *t = bt_open((sched_config){16, 400, 64, 2048, 400, 8}, (batch_cost){0, 0, 1 << 20, 1}, 1000, 1 << 30, 0, 1);
    for (int i = 0; i < 24; i++) { /* three prompts that part in their second page, eight times each */
        int32_t prompt[28] = {[20] = i / 8};
        toka_err e;
        sched_submit(&t->m.s, &(sched_job){.prompt = prompt, .n_prompt = 28, .n = 1, .max_tokens = 40}, &e);
    }
    for (int i = 0; i < 4; i++) smt_step(&t->m, false);
    CHECK_MSG(t->built.n_chunks == 24 && bt_groups(t) == 4, "%d groups", bt_groups(t)); /* the first page and three tails */
    bt_close(t);
}

static const struct test batch_tests[] = {{"batch: random steps and spans", bt_random},
                                          {"batch: every page read once", bt_each_page_once},
                                          {"batch: levels by cost", bt_levels},
                                          {"batch: samples alone", bt_alone},
                                          {"batch: requests alike", bt_alike},
                                          {"batch: random families, parts", bt_random_families},
                                          {"batch: two that skip pages, a writer behind both", bt_third_writer},
                                          {0}};
