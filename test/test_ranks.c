/* test_ranks.c - models spread over ranks. Which slice of the weights each rank gets (chapter 15).
 * Then all ranks together must compute what one rank computes alone (chapter 30): every fixture
 * under every split that it allows, with the same program of microbatches. Then ranks that are
 * lost, and groups that are asked to end. */

/* ---- Slices of a model: every element must be in exactly the ranks where it belongs ---- */

enum { RK_MAX_RANKS = 16 }; /* the largest number of ranks of a test */

/* For each element of one tensor: the number of ranks of its stage that have it. */
typedef struct rk_coverage {
    const toka_tensor *whole;
    uint8_t *count;
} rk_coverage;

static void rk_count(rk_coverage *p, const toka_tensor *slice) {
    const toka_tensor *w = p->whole;
    const size_t size = w->dtype == TOKA_F32 ? 4 : 2, all = (size_t)w->rows * (size_t)w->cols;
    for (int r = 0; r < slice->rows; r++)
        for (int c = 0; c < slice->cols; c++) {
            const char *at = (const char *)slice->data + size * ((size_t)r * (size_t)slice->stride + (size_t)c);
            const size_t i = (size_t)(at - (const char *)w->data) / size;
            if (i < all) p->count[i]++;
            else check_failed++;
        }
}

/* Checks one tensor of a stage in all tp ranks: each element is in `times` of them, and the slice
 * of the rank has `n` rows or columns. */
static void rk_check_tensor(const char *what, const toka_tensor *whole, const toka_tensor *const *slices, int tp, int times) {
    rk_coverage p = {whole, mem_zalloc((size_t)whole->rows * (size_t)whole->cols)};
    int wrong = 0;
    for (int r = 0; r < tp; r++) rk_count(&p, slices[r]);
    for (size_t i = 0; i < (size_t)whole->rows * (size_t)whole->cols; i++) wrong += p.count[i] != times;
    CHECK_MSG(!wrong, "%s: %d elements are not in %d of %d ranks", what, wrong, times, tp);
    free(p.count);
}

static void rk_check_field(const char *what, const void *whole, void *const *slices, size_t field, int tp, int times) {
    const toka_tensor *at[RK_MAX_RANKS];
    for (int r = 0; r < tp; r++) at[r] = (const toka_tensor *)(const void *)((const char *)slices[r] + field);
    rk_check_tensor(what, (const toka_tensor *)(const void *)((const char *)whole + field), at, tp, times);
}

/* Independent of chapter 15's own check: can a model be split so? */
static bool rk_splits(const toka_shape *s, int tp, int pp) {
    bool heads = s->K >= tp || (tp % s->K == 0 && s->H / s->K % (tp / s->K) == 0);
    return heads && s->F >= tp && s->V >= tp && s->L >= pp;
}

static void rk_check_slices(const toka_shape *s, const toka_weights *w, int tp, int pp) {
    toka_shape shape[RK_MAX_RANKS];
    toka_weights slice[RK_MAX_RANKS];
    toka_err e = {0};
    arena a = {0};
    int layers = 0;
    for (int stage = 0; stage < pp; stage++) {
        void *model[RK_MAX_RANKS], *layer[RK_MAX_RANKS];
        int H = 0, V = 0, F = 0;
        for (int r = 0; r < tp; r++) {
            mf_rank rank = {r, tp, stage, pp};
            int code = mf_shard(s, w, &rank, &a, &shape[r], &slice[r], &e);
            bool names_it = !code || (code == TOKA_E_USE && strstr(e.msg, "parallel size"));
            CHECK_MSG(!code == rk_splits(s, tp, pp) && names_it, "%s", e.msg);
            if (code) {
                arena_free(&a);
                return;
            }
            CHECK(shape[r].v0 == V && shape[r].V_all == s->V && shape[r].L == shape[0].L);
            CHECK(tp > s->K ? shape[r].K == 1 && shape[r].H == s->H / tp : shape[r].H == s->H / s->K * shape[r].K);
            H += shape[r].H, V += shape[r].V, F += shape[r].F;
            model[r] = &slice[r];
        }
        CHECK(H == s->H && V == s->V && F == s->F && shape[0].L >= 1);
        for (int l = 0; l < shape[0].L; l++) {
            const toka_layer *whole = &w->layers[layers + l];
            const int kv = tp > s->K ? tp / s->K : 1;
            for (int r = 0; r < tp; r++) {
                layer[r] = &slice[r].layers[l];
                CHECK(slice[r].layers[l].window == whole->window);
            }
#define RK_FIELD(name, times) rk_check_field(#name, whole, layer, offsetof(toka_layer, name), tp, times)
            RK_FIELD(attn_norm, tp), RK_FIELD(mlp_norm, tp), RK_FIELD(q_norm, tp), RK_FIELD(k_norm, tp), RK_FIELD(o_bias, tp);
            RK_FIELD(q, 1), RK_FIELD(q_bias, 1), RK_FIELD(o, 1), RK_FIELD(mlp.gate, 1), RK_FIELD(mlp.up, 1), RK_FIELD(mlp.down, 1);
            RK_FIELD(k, kv), RK_FIELD(v, kv), RK_FIELD(k_bias, kv), RK_FIELD(v_bias, kv);
#undef RK_FIELD
        }
        rk_check_field("embed", w, model, offsetof(toka_weights, embed), tp, stage == 0);
        rk_check_field("norm", w, model, offsetof(toka_weights, norm), tp, stage == pp - 1 ? tp : 0);
        rk_check_field("lm_head", w, model, offsetof(toka_weights, lm_head), tp, stage == pp - 1);
        layers += shape[0].L;
    }
    CHECK(layers == s->L);
    arena_free(&a);
}

static void test_ranks_slices(void) {
    static const int heads[][2] = {{1, 1}, {8, 1}, {8, 2}, {6, 3}, {9, 3}, {12, 6}, {4, 4}};
    for (int i = 0; i < COUNT(heads); i++) {
        cpu_case c;
        case_open(&c, (cpu_sizes){.H = heads[i][0], .K = heads[i][1], .D = 4, .E = 10, .F = 13, .V = 17, .B = 4, .extras = i & 1,
                                  .type = (toka_dtype)(i % 3), .window = 3}, (uint64_t)i + 1);
        for (int tp = 1; tp <= 9; tp++)
            for (int pp = 1; pp <= 3; pp++) rk_check_slices(&c.sh, &c.w, tp, pp);
        case_close(&c);
    }
}

/* The time of the busiest stage, for a load of conversations plus one of many samples, if the last
 * stage has `last` layers and the others `others`. */
static double rk_two_loads(const toka_shape *s, int others, int last) {
    const double layer = s->E * (2.0 * (s->H + s->K) * s->D + 3.0 * s->F), head = (double)s->V * s->E,
        other_stages = others * layer, last_stage = last * layer;
    return MAX(other_stages, last_stage + head / 5) + MAX(other_stages, last_stage + head * 2 / 3);
}

/* The division into layers must take as little time, for both loads together, as any other one.
 * Tries every number of layers of the last stage. */
static void test_ranks_stages(void) {
    uint64_t seed = 5;
    for (int round = 0; round < 300; round++) {
        toka_shape s = {.L = rnd_int(&seed, 1, 90), .H = 4, .K = 2, .D = 8, .E = 32, .F = rnd_int(&seed, 8, 200)};
        s.V = s.V_all = rnd_int(&seed, 10, 9000);
        int pp = rnd_int(&seed, 1, MIN(s.L, 9)), at = 0, max_other = 0, last = 0;
        double least_time = INFINITY;
        for (int i = 0; i < pp; i++) {
            mf_range r = mf_stage_layers(&s, i, pp);
            CHECK(r.first == at && r.count >= 1);
            at += r.count, last = r.count, max_other = i < pp - 1 ? MAX(max_other, r.count) : max_other;
        }
        for (int n = 1; n <= s.L - pp + 1; n++)
            if (pp > 1 || n == s.L) least_time = MIN(least_time, rk_two_loads(&s, pp > 1 ? (s.L - n + pp - 2) / (pp - 1) : 0, n));
        CHECK_MSG(at == s.L && rk_two_loads(&s, max_other, last) <= least_time * (1 + 1e-12), "L %d, %d stages: %d, %d",
            s.L, pp, max_other, last);
    }
    /* Llama-3.1-70B */
    toka_shape big = {.L = 80, .H = 64, .K = 8, .D = 128, .E = 8192, .F = 28672, .V = 128256, .V_all = 128256};
    /* its LM head is worth 1.2 layers */
    for (int i = 0; i < 8; i++) CHECK(mf_stage_layers(&big, i, 8).count == 10 && mf_stage_layers(&big, i / 2, 4).count == 20);
    /* Llama-3.1-8B: the LM head is worth 2.4 layers */
    toka_shape small = {.L = 32, .H = 32, .K = 8, .D = 128, .E = 4096, .F = 14336, .V = 128256, .V_all = 128256};
    CHECK(mf_stage_layers(&small, 0, 2).count == 17 && mf_stage_layers(&small, 3, 4).count == 7);
}

/* ---- A program of microbatches, on one rank and on many ---- */

enum { RK_SEQS = 5, RK_LEN = 40, RK_STEPS = 16, RK_ROWS = 64, RK_MAX_SAMPLES = 8, RK_B = 4, RK_SEQ_PAGES = RK_LEN / RK_B };

/* a microbatch: positions from .. to-1 of some sequences; sampled where draws[] */
typedef struct rk_batch {
    int n, seq[RK_SEQS], from[RK_SEQS], to[RK_SEQS], draws[RK_SEQS];
    int scored; /* index of the sequence whose second token is scored, too, or -1 */
} rk_batch;

typedef struct rk_step { /* the microbatch as a toka_step, with the arrays it points to */
    toka_step s;
    int32_t ids[RK_ROWS], pos[RK_ROWS], kv_slot[RK_ROWS], pages[RK_SEQS * RK_SEQ_PAGES];
    toka_span spans[RK_SEQS];
    toka_sample_row out[RK_MAX_SAMPLES];
    toka_sample_result results[RK_MAX_RANKS][RK_MAX_SAMPLES]; /* results of each rank */
    float *logits;                                            /* [n_samples][V] */
} rk_step;

enum { RK_PEEKS = 256 };
typedef struct rk_peeks { /* of one rank */
    double sum[RK_PEEKS];
    int n, n_aborts;
} rk_peeks;

typedef struct rk_world {
    toka_shape sh;
    const toka_weights *w;
    rk_batch batch[RK_STEPS];
    int n_prompt[RK_SEQS];
    int32_t token[RK_SEQS][RK_LEN]; /* prompts, then the tokens that one rank sampled */
    int32_t allowed[40], bias_ids[2];
    float bias[2];
    toka_sampling sampling[RK_SEQS];
    rk_step single[RK_STEPS], step[RK_STEPS];
    rk_peeks *peeks; /* [1 + RK_MAX_RANKS]: one rank alone, then each of several; or NULL */
    uint64_t seed;
    bool kinds; /* has layers of other kinds than a Llama's: the test cuts them */
} rk_world;

static void rk_add(rk_batch *b, int seq, int from, int to, int draws) {
    b->seq[b->n] = seq, b->from[b->n] = from, b->to[b->n] = to, b->draws[b->n++] = draws;
}

/* A prefill in two chunks (the first is a microbatch without samples), prefills together with
 * decodes, then decodes of the two halves of the sequences in turn. */
static void rk_make_program(rk_world *w) {
    const int *n = w->n_prompt;
    int at[RK_SEQS] = {0};
    for (int i = 0; i < RK_STEPS; i++) w->batch[i] = (rk_batch){.scored = -1};
    rk_add(&w->batch[0], 0, 0, n[0] / 2, 0);
    rk_add(&w->batch[1], 0, n[0] / 2, n[0], 1), rk_add(&w->batch[1], 1, 0, n[1], 1);
    w->batch[1].scored = 1;
    rk_add(&w->batch[2], 2, 0, n[2] - 1, 0);
    rk_add(&w->batch[3], 0, n[0], n[0] + 1, 1), rk_add(&w->batch[3], 2, n[2] - 1, n[2], 1), rk_add(&w->batch[3], 3, 0, n[3], 1);
    rk_add(&w->batch[4], 1, n[1], n[1] + 1, 1), rk_add(&w->batch[4], 4, 0, n[4], 1);
    for (int q = 0; q < RK_SEQS; q++) at[q] = n[q] + (q < 2);
    for (int i = 5; i < RK_STEPS; i++)
        for (int q = i % 2 ? 0 : 3; q < (i % 2 ? 3 : RK_SEQS); q++) rk_add(&w->batch[i], q, at[q], at[q] + 1, 1), at[q]++;
}

static void rk_world_init(rk_world *w, const toka_shape *sh, const toka_weights *weights, uint64_t seed) {
    *w = (rk_world){.sh = *sh, .w = weights, .seed = seed};
    w->sh.B = RK_B;
    for (int q = 0; q < RK_SEQS; q++) {
        w->n_prompt[q] = rnd_int(&w->seed, 4, 12);
        for (int p = 0; p < w->n_prompt[q]; p++) w->token[q][p] = rnd_int(&w->seed, 0, sh->V - 1);
        toka_sampling *s = &w->sampling[q];
        *s = toka_request_default().sampling;
        s->seed = seed + 100 + (uint64_t)q, s->temperature = 0.8f;
    }
    toka_sampling *s = w->sampling;
    s[0].temperature = 0, s[0].logprobs = 5;
    s[1].top_k = 20, s[1].top_p = 0.9f;
    s[2].repetition_penalty = 1.2f, s[2].presence_penalty = 0.5f, s[2].frequency_penalty = 0.3f, s[2].min_p = 0.05f;
    s[3].logprobs = 3, s[3].temperature = 1;
    for (int i = 0; i < COUNT(w->allowed); i++) w->allowed[i] = (i * 37 + 5) % sh->V;
    for (int i = 0; i < 2; i++) w->bias_ids[i] = w->allowed[7 * i + 3], w->bias[i] = 2;
    s[4].allowed_ids = w->allowed, s[4].n_allowed = COUNT(w->allowed);
    s[4].bias_ids = w->bias_ids, s[4].bias_values = w->bias, s[4].n_bias = 2;
    rk_make_program(w);
}

static void rk_world_free(rk_world *w) {
    for (int i = 0; i < RK_STEPS; i++) free(w->single[i].logits), free(w->step[i].logits);
    free(w);
}

/* Builds microbatch i as a step. by_seq: a sampled token is given as -1 - seq, otherwise as its
 * id. */
static void rk_build(rk_world *w, int i, bool by_seq, rk_step *t) {
    const rk_batch *b = &w->batch[i];
    float *logits = t->logits;
    *t = (rk_step){.logits = logits};
    toka_step *s = &t->s;
    int n_pages = 0;
    for (int k = 0; k < b->n; k++) {
        const int q = b->seq[k], row0 = s->T;
        for (int p = b->from[k]; p < b->to[k]; p++, s->T++) {
            t->ids[s->T] = p >= w->n_prompt[q] && by_seq ? -1 - q : w->token[q][p];
            t->pos[s->T] = p, t->kv_slot[s->T] = (q * RK_SEQ_PAGES + p / RK_B) * RK_B + p % RK_B;
            if (p >= w->n_prompt[q] && by_seq)
                for (int j = 0; j < i; j++)
                    for (int m = 0; m < w->batch[j].n; m++)
                        if (w->batch[j].seq[m] == q && w->batch[j].draws[m]) s->needs_step = MAX(s->needs_step, j + 1);
        }
        t->spans[s->n_spans++] = (toka_span){row0, s->T - row0, n_pages, 0, b->to[k]};
        const int first_page = n_pages;
        for (int p = 0; p < b->to[k]; p += RK_B) t->pages[n_pages++] = q * RK_SEQ_PAGES + p / RK_B;
        if (b->scored == k) t->out[s->n_samples++] = (toka_sample_row){.row = row0, .seq = -1, .scored_id = w->token[q][1]};
        if (b->draws[k])
            t->out[s->n_samples++] = (toka_sample_row){.row = s->T - 1, .seq = q, .scored_id = -1, .sample = (uint32_t)q,
                                                .position = (uint32_t)b->to[k], .sampling = &w->sampling[q], .pages = t->pages + first_page,
                                                .n_prompt = w->n_prompt[q], .n_history = b->to[k], .forbidden = w->token[q],
                                                .n_forbidden = 1};
    }
    assert(s->T <= RK_ROWS && s->n_samples <= RK_MAX_SAMPLES);
    if (!t->logits) t->logits = mem_alloc((size_t)RK_MAX_SAMPLES * (size_t)w->sh.V_all * sizeof *t->logits);
    s->ids = t->ids, s->pos = t->pos, s->kv_slot = t->kv_slot, s->pages = t->pages, s->spans = t->spans, s->samples = t->out;
    s->logits = t->logits, s->number = i + 1;
}

typedef struct rk_rank { /* one rank with its thread */
    toka_shape sh;
    toka_weights w;
    toka_device *d;
    toka_dev_ptr x, q, o;
    rk_step *steps;
    mf_rank place;
    int number, ops;
    int lost_after; /* number of ops after which the rank is lost; -1: never */
    int delay_us;   /* delay before each op */
    int n_done;     /* steps done */
    rk_peeks *peeks; /* NULL, or what an op of the test reads */
    toka_err error;
    pthread_t thread;
} rk_rank;

/* An op that a newcomer inserts into a step: it reads x, as a router would. If x is not whole it
 * must abort; else it notes the sum of the first row. */
static void rk_peek(rk_rank *r, const toka_hidden *x, bool whole) {
    pid_t pid;
    if (!r->peeks) return;
    if (!whole && r->place.tp_size > 1) {
        if (child_begins(&pid)) toka_hidden_read(x), _exit(0);
        r->peeks->n_aborts += child_aborts(pid);
        return;
    }
    if (!whole) return;
    const float *row = plain_ptr(toka_hidden_read(x));
    double *sum = &r->peeks->sum[r->peeks->n++];
    assert(r->peeks->n <= RK_PEEKS);
    for (int i = 0; i < r->sh.E; i++) *sum += fabs(row[i]);
}

static bool rk_continues(rk_rank *r) {
    if (r->delay_us) usleep((useconds_t)r->delay_us);
    return r->ops++ != r->lost_after;
}

/* Runs one step as chapter 31 does. Returns false if this rank was lost. */
static bool rk_run_step(rk_rank *r, const toka_step *s, toka_sample_result *results) {
    toka_hidden x = {.data = r->x};
#define RK_OP(call) if (!rk_continues(r)) return false; else toka_cpu.call
    if (r->place.pp_rank == 0) {
        RK_OP(embed(r->d, s, &x));
        rk_peek(r, &x, false);
        RK_OP(all_reduce(r->d, &x, s->T));
        rk_peek(r, &x, true);
    } else {
        RK_OP(receive(r->d, &x, s->T));
    }
    if (r->place.pp_rank == r->place.pp_size - 1) {
        RK_OP(keep_ids(r->d, s));
    }
    for (int l = 0; l < r->sh.L; l++) {
        RK_OP(norm_qkv_rope_kv(r->d, s, l, &x, r->q));
        RK_OP(attention(r->d, s, l, r->q, r->o));
        for (int part = 0; part < 2; part++) {
            if (part == r->w.layers[l].parallel) {
                RK_OP(out_residual(r->d, s, l, r->o, &x));
            } else {
                RK_OP(norm_mlp_residual(r->d, s, l, &x));
            }
            rk_peek(r, &x, false);
            RK_OP(all_reduce(r->d, &x, s->T));
            rk_peek(r, &x, true);
        }
    }
    if (r->place.pp_rank < r->place.pp_size - 1) {
        RK_OP(send(r->d, &x, s->T));
    } else if (s->n_samples) {
        RK_OP(norm_logits_sample(r->d, s, &x, results));
    }
#undef RK_OP
    return true;
}

static void *rk_thread(void *arg) {
    rk_rank *r = arg;
    for (; r->n_done < RK_STEPS; r->n_done++) {
        rk_step *t = &r->steps[r->n_done];
        if (!rk_run_step(r, &t->s, t->results[r->number]) || toka_cpu.status(r->d, &r->error)) break;
    }
    toka_cpu.close(r->d);
    return NULL;
}

static void rk_rank_open(rk_rank *r, const rk_world *w, toka_group *g) {
    toka_device_options o = {.n_threads = 1 + r->number % 2, .max_tokens = RK_ROWS, .max_samples = RK_MAX_SAMPLES, .n_seqs = RK_SEQS,
                             .n_pages = RK_SEQS * RK_SEQ_PAGES, .group = g, .tp_rank = r->place.tp_rank, .tp_size = r->place.tp_size,
                             .pp_rank = r->place.pp_rank, .pp_size = r->place.pp_size};
    toka_err e;
    if (toka_cpu.open(&r->d, &o, &r->sh, &r->w, &e)) printf("%s\n", e.msg), abort();
    size_t heads = (size_t)(RK_ROWS * r->sh.H * MAX(r->sh.D, toka_value_size(&r->sh))) * sizeof(float);
    r->x = toka_cpu.alloc(r->d, (size_t)(RK_ROWS * w->sh.E) * sizeof(float));
    r->q = toka_cpu.alloc(r->d, heads), r->o = toka_cpu.alloc(r->d, heads);
    /* small, so that all loops run more than once */
    r->d->pool.serial_cost = 0, r->d->scratch_rows = MIN(r->d->scratch_rows, 7 - r->number % 3), r->d->scratch_samples = 2;
}

/* A row draws from the ids that the device keeps in the pages as samp_row does from the ids that
 * the host knows. */
static void rk_check_history(const rk_world *w, const rk_step *t) {
    const int V = w->sh.V_all;
    float *x = mem_alloc((size_t)V * sizeof *x);
    for (int k = 0; k < t->s.n_samples; k++) {
        const toka_sample_row *row = &t->out[k];
        const toka_sample_result *got = &t->results[0][k];
        toka_sample_result want;
        if (row->seq < 0) continue;
        memcpy(x, t->logits + (size_t)k * (size_t)V, (size_t)V * sizeof *x);
        samp_row(row, w->token[row->seq], x, V, &want);
        CHECK_MSG(got->id == want.id && got->logprob == want.logprob, "sequence %d, position %u: id %d, expected %d", row->seq,
                  row->position, got->id, want.id);
    }
    free(x);
}

static void rk_run_single(rk_world *w) {
    rk_rank r = {.sh = w->sh, .w = *w->w, .place = {0, 1, 0, 1}, .lost_after = -1, .peeks = w->peeks};
    rk_rank_open(&r, w, NULL);
    for (int i = 0; i < RK_STEPS; i++) {
        rk_step *t = &w->single[i];
        rk_build(w, i, false, t);
        rk_run_step(&r, &t->s, t->results[0]);
        rk_check_history(w, t);
        for (int k = 0; k < t->s.n_samples; k++)
            if (t->out[k].seq >= 0) w->token[t->out[k].seq][t->out[k].position] = t->results[0][k].id;
    }
    toka_cpu.close(r.d);
}

/* ---- Layers of every kind, cut for tensor ranks as toka.h says ---- */

static toka_tensor rk_rows(toka_tensor t, int first, int n) {
    t.data = (const char *)t.data + (size_t)first * (size_t)t.stride * (t.dtype == TOKA_F32 ? 4 : 2);
    t.rows = t.rows ? n : 0;
    return t;
}
static toka_tensor rk_cols(toka_tensor t, int first, int n) {
    t.data = (const char *)t.data + (size_t)first * (t.dtype == TOKA_F32 ? 4 : 2);
    t.cols = n;
    return t;
}
static toka_mlp rk_mlp(const toka_mlp *m, const mf_rank *place) {
    const mf_range F = mf_even_share(m->gate.rows, place->tp_rank, place->tp_size);
    toka_mlp cut = *m;
    cut.gate = rk_rows(m->gate, F.first, F.count), cut.up = rk_rows(m->up, F.first, F.count);
    cut.down = rk_cols(m->down, F.first, F.count);
    cut.gate_bias = rk_cols(m->gate_bias, F.first, F.count), cut.up_bias = rk_cols(m->up_bias, F.first, F.count);
    return cut;
}
/* Replaces a rank's layer by its share of `whole`. */
static void rk_cut_layer(const toka_shape *s, const toka_layer *whole, const mf_rank *place, toka_layer *cut, arena *a) {
    mf_tp_ranges r;
    toka_err e;
    const int Dv = toka_value_size(s), D = s->D;
    if (mf_split_tp(s, place->tp_rank, place->tp_size, &r, &e)) abort();
    *cut = *whole;
    cut->q = rk_rows(whole->q, r.H.first * D, r.H.count * D), cut->k = rk_rows(whole->k, r.K.first * D, r.K.count * D);
    cut->v = rk_rows(whole->v, r.K.first * Dv, r.K.count * Dv), cut->o = rk_cols(whole->o, r.H.first * Dv, r.H.count * Dv);
    cut->q_bias = rk_cols(whole->q_bias, r.H.first * D, r.H.count * D), cut->k_bias = rk_cols(whole->k_bias, r.K.first * D, r.K.count * D);
    cut->v_bias = rk_cols(whole->v_bias, r.K.first * Dv, r.K.count * Dv), cut->sinks = rk_cols(whole->sinks, r.H.first, r.H.count);
    if (whole->q_norm.cols > D) {
        cut->q_norm = rk_cols(whole->q_norm, r.H.first * D, r.H.count * D), cut->q_norm_all = s->H * D;
        cut->k_norm = rk_cols(whole->k_norm, r.K.first * D, r.K.count * D), cut->k_norm_all = s->K * D;
    }
    if (whole->mla) {
        toka_mla *mla = arena_alloc(a, sizeof *mla);
        *mla = *whole->mla;
        const int q = mla->nope + mla->rope, kv = mla->nope + mla->v;
        mla->q_b = rk_rows(mla->q_b, r.H.first * q, r.H.count * q), mla->kv_b = rk_rows(mla->kv_b, r.H.first * kv, r.H.count * kv);
        cut->mla = mla, cut->o = rk_cols(whole->o, r.H.first * mla->v, r.H.count * mla->v);
    }
    if (whole->moe) {
        toka_moe *moe = arena_alloc(a, sizeof *moe);
        toka_mlp *experts = arena_alloc(a, (size_t)whole->moe->n_experts * sizeof *experts);
        *moe = *whole->moe;
        moe->shared = rk_mlp(&moe->shared, place), moe->experts = experts;
        for (int i = 0; i < moe->n_experts; i++) experts[i] = rk_mlp(&whole->moe->experts[i], place);
        cut->moe = moe;
    } else cut->mlp = rk_mlp(&whole->mlp, place);
}

/* Starts threads for all ranks. Each runs the whole program at its own pace. ranks: [tp*pp];
 * lost_after and delay_us are set. */
static void rk_start(rk_world *w, int tp, int pp, toka_group *g, rk_rank *ranks, arena *a) {
    toka_err e;
    for (int i = 0; i < tp * pp; i++) {
        rk_rank *r = &ranks[i];
        r->place = (mf_rank){i % tp, tp, i / tp, pp}, r->number = i, r->steps = w->step;
        r->peeks = w->peeks ? &w->peeks[1 + i] : NULL;
        if (mf_shard(&w->sh, w->w, &r->place, a, &r->sh, &r->w, &e)) printf("%s\n", e.msg), abort();
        for (int l = 0, first = mf_stage_layers(&w->sh, r->place.pp_rank, pp).first; w->kinds && l < r->sh.L; l++)
            rk_cut_layer(&w->sh, &w->w->layers[first + l], &r->place, &r->w.layers[l], a);
        rk_rank_open(r, w, g);
    }
    for (int i = 0; i < tp * pp; i++)
        if (pthread_create(&ranks[i].thread, NULL, rk_thread, &ranks[i])) abort();
}

static void rk_compare_result(const toka_sample_result *got, const toka_sample_result *want, const char *what, int step, int row) {
    CHECK_MSG(got->id == want->id, "%s, step %d, row %d: id %d, alone %d", what, step, row, (int)got->id, (int)want->id);
    CHECK_MSG(fabsf(got->logprob - want->logprob) < 1e-4 && fabsf(got->sampled_logprob - want->sampled_logprob) < 1e-4,
              "%s, step %d, row %d: %g %g, alone %g %g", what, step, row, got->logprob, got->sampled_logprob, want->logprob,
              want->sampled_logprob);
    CHECK(got->n_top == want->n_top);
    for (int i = 0; i < want->n_top; i++)
        CHECK_MSG(got->top_ids[i] == want->top_ids[i] && fabsf(got->top_logprobs[i] - want->top_logprobs[i]) < 1e-4,
                  "%s, step %d, row %d: top %d is %d, alone %d", what, step, row, i, (int)got->top_ids[i], (int)want->top_ids[i]);
}

static double rk_rel_l2(const float *got, const float *want, int n) {
    double d = 0, all = 0;
    for (int i = 0; i < n; i++) d += ((double)got[i] - want[i]) * ((double)got[i] - want[i]), all += (double)want[i] * want[i];
    return sqrt(d / all);
}

static void rk_compare(const rk_world *w, int tp, int pp, const char *what) {
    const int V = w->sh.V_all;
    for (int i = 0; i < RK_STEPS; i++)
        for (int k = 0; k < w->single[i].s.n_samples; k++) {
            double err = rk_rel_l2(w->step[i].logits + (size_t)k * (size_t)V, w->single[i].logits + (size_t)k * (size_t)V, V);
            /* a NaN fails */
            CHECK_MSG(err <= 1e-5, "%s, step %d, row %d: relative L2 %.3g", what, i, k, err);
            for (int r = (pp - 1) * tp; r < pp * tp; r++) rk_compare_result(&w->step[i].results[r][k],
                &w->single[i].results[0][k], what, i, k);
        }
}

/* Runs the program on tp x pp ranks. by_seq: the host does not know sampled ids, and many
 * microbatches are in flight. */
static void rk_check_split(rk_world *w, int tp, int pp, bool by_seq, const char *name) {
    rk_rank ranks[RK_MAX_RANKS] = {0};
    toka_group *g;
    toka_err e;
    arena a = {0};
    char what[200];
    snprintf(what, sizeof what, "%s, tp %d x pp %d%s", name, tp, pp, by_seq ? ", by seq" : "");
    CHECK(toka_cpu.group_open(&g, tp, pp, &e) == 0);
    for (int i = 0; i < RK_STEPS; i++) {
        rk_build(w, i, by_seq, &w->step[i]);
        for (size_t k = 0; k < (size_t)RK_MAX_SAMPLES * (size_t)w->sh.V_all; k++) w->step[i].logits[k] = NAN;
    }
    for (int i = 0; i < tp * pp; i++) ranks[i].lost_after = -1;
    rk_start(w, tp, pp, g, ranks, &a);
    for (int i = 0; i < tp * pp; i++) {
        pthread_join(ranks[i].thread, NULL);
        CHECK_MSG(!ranks[i].error.code, "%s: %s", what, ranks[i].error.msg);
    }
    rk_compare(w, tp, pp, what);
    toka_cpu.group_close(g);
    arena_free(&a);
}

/* Runs all splits of a model. Returns their number. */
static int rk_check_model(const toka_shape *sh, const toka_weights *weights, uint64_t seed, const char *name, bool kinds) {
    static const int splits[][2] = {{2, 1}, {3, 1}, {4, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}, {3, 2}};
    rk_world *w = mem_alloc(sizeof *w);
    int n = 0;
    rk_world_init(w, sh, weights, seed);
    w->kinds = kinds;
    rk_run_single(w);
    for (int i = 0; i < COUNT(splits); i++) {
        const int tp = splits[i][0], pp = splits[i][1];
        if (!rk_splits(sh, tp, pp)) continue;
        rk_check_split(w, tp, pp, true, name);
        if (i % 2 == 0) rk_check_split(w, tp, pp, false, name);
        n++;
    }
    rk_world_free(w);
    return n;
}

static int rk_check_folder(const char *path) {
    mf_model *m;
    toka_err e;
    if (mf_open(&m, path, NULL, NULL, &e)) printf("%s\n", e.msg), abort();
    int n = rk_check_model(&m->shape, &m->weights, 7, path, false);
    CHECK_MSG(n >= 1, "%s: no split", path);
    mf_close(m);
    return n;
}

static void test_ranks_fixtures(void) {
    DIR *d = opendir("test/fixtures");
    int models = 0, splits = 0;
    CHECK(d != NULL);
    for (struct dirent *it; d && (it = readdir(d));) {
        char path[300];
        if (it->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "test/fixtures/%s", it->d_name);
        splits += rk_check_folder(path), models++;
    }
    if (d) closedir(d);
    CHECK(models >= 12 && splits >= 40);
    /* 6 layers, 4 heads, 2 kv heads: all splits but those with three tensor ranks */
    CHECK(rk_check_folder("test/model") == 6);
}

/* An op that reads x, inserted between any two ops: on two tensor ranks it aborts where x is a
 * partial sum, and behind each all-reduce it reads what a single rank has there. */
static void test_ranks_hidden(void) {
    cpu_case c;
    rk_world *w = mem_alloc(sizeof *w);
    rk_peeks *peeks = mem_zalloc((1 + RK_MAX_RANKS) * sizeof *peeks);
    case_open(&c, (cpu_sizes){.H = 4, .K = 2, .D = 8, .E = 72, .F = 101, .V = 131, .B = RK_B}, 77);
    rk_world_init(w, &c.sh, &c.w, 9);
    w->peeks = peeks;
    rk_run_single(w);
    rk_check_split(w, 2, 1, false, "with an inserted op");
    CHECK(peeks->n == RK_STEPS * (1 + 2 * c.sh.L) && !peeks->n_aborts);
    for (int r = 1; r <= 2; r++) {
        CHECK_MSG(peeks[r].n_aborts == peeks->n && peeks[r].n == peeks->n, "rank %d: %d aborts, %d sums", r - 1, peeks[r].n_aborts, peeks[r].n);
        for (int i = 0; i < peeks->n; i++)
            CHECK_MSG(fabs(peeks[r].sum[i] - peeks->sum[i]) <= 1e-5 * peeks->sum[i], "%g, alone %g", peeks[r].sum[i], peeks->sum[i]);
    }
    rk_world_free(w), free(peeks);
    case_close(&c);
}

/* Shapes that no fixture has: biases and head norms under tensor ranks, unevenly divided heads, kv
 * heads that several ranks have. */
static void test_ranks_shapes(void) {
    static const int heads[][2] = {{8, 2}, {12, 6}, {10, 5}, {12, 1}};
    for (int i = 0; i < COUNT(heads); i++) {
        cpu_case c;
        char name[64];
        snprintf(name, sizeof name, "%d heads, %d kv heads", heads[i][0], heads[i][1]);
        case_open(&c, (cpu_sizes){.H = heads[i][0], .K = heads[i][1], .D = 8, .E = 72, .F = 101, .V = 131, .B = RK_B, .extras = 1,
                                  .type = (toka_dtype)(i % 3), .window = i & 1 ? 5 : 0, .kv_fp8 = i & 1}, 40 + (uint64_t)i);
        CHECK(rk_check_model(&c.sh, &c.w, 9, name, false) >= 3);
        case_close(&c);
    }
}

/* Every kind of layer under tensor ranks and stages. A norm of all heads also where several ranks
 * have the same kv head, and in passes of a few rows (rk_rank_open). */
static void test_ranks_kinds(void) {
    for (int i = 0; i < 2 * COUNT(cpu_kinds); i++) {
        const int kinds = cpu_kinds[i / 2], K = i % 2 ? 2 : 4;
        cpu_case c;
        char name[64];
        if (K == 2 && !(kinds & KIND_ALL_NORM)) continue;
        snprintf(name, sizeof name, "kinds %d, %d kv heads", kinds, K);
        case_open(&c, (cpu_sizes){.H = 8, .K = K, .D = 8, .Dv = i / 2 % 2 ? 0 : 12, .E = 72, .F = 101, .V = 131, .B = RK_B, .kinds = kinds,
                                  .window = i / 2 & 1 ? 5 : 0}, 60 + (uint64_t)(i / 2));
        CHECK(rk_check_model(&c.sh, &c.w, 9, name, true) >= 3);
        case_close(&c);
    }
}

/* ---- Ranks that are lost ---- */

/* Rank `who` is lost after so many ops; the others must end and report it. */
typedef struct rk_lost {
    int tp, pp, who, after;
    bool by_seq;
    /* the op in which the rank was seen last; the op in which another rank waits, NULL: it depends
     * on timing */
    const char *last, *waiting;
} rk_lost;

static void rk_check_lost(rk_world *w, const rk_lost *l) {
    rk_rank ranks[RK_MAX_RANKS] = {0};
    toka_group *g;
    toka_err e;
    arena a = {0};
    char want[128], end[64] = "";
    const int n = l->tp * l->pp;
    for (int i = 0; i < RK_STEPS; i++) rk_build(w, i, l->by_seq, &w->step[i]);
    CHECK(toka_cpu.group_open(&g, l->tp, l->pp, &e) == 0);
    g->watchdog_s = 2; /* long enough for every thread to make progress on a busy machine */
    for (int i = 0; i < n; i++) ranks[i].lost_after = i == l->who ? l->after : -1;
    double t0 = os_now();
    rk_start(w, l->tp, l->pp, g, ranks, &a);
    for (int i = 0; i < n; i++) pthread_join(ranks[i].thread, NULL);
    CHECK_MSG(os_now() - t0 < 100, "took %g s", os_now() - t0);
    snprintf(want, sizeof want, "rank %d (stage %d, tensor rank %d) has not moved for 2 s, last seen in %s;", l->who, l->who / l->tp,
             l->who % l->tp, l->last);
    if (l->waiting) snprintf(end, sizeof end, " waits for it in %s", l->waiting);
    for (int i = 0; i < n; i++) {
        const toka_err *err = &ranks[i].error;
        if (i == l->who || ranks[i].n_done == RK_STEPS) continue;
        bool names_it = strstr(err->msg, want) && str_ends(str_c(err->msg), str_c(end));
        CHECK_MSG(err->code == TOKA_E_DEVICE && names_it, "rank %d: %s", i, err->msg);
    }
    toka_cpu.group_close(g);
    arena_free(&a);
}

static void rk_check_all_lost(const toka_shape *sh, const toka_weights *weights, const rk_lost *lost, int n) {
    rk_world *w = mem_alloc(sizeof *w);
    rk_world_init(w, sh, weights, 3);
    rk_run_single(w);
    for (int i = 0; i < n; i++) {
        int before = check_failed;
        rk_check_lost(w, &lost[i]);
        CHECK_MSG(check_failed == before, "case %d, %d layers", i, sh->L);
    }
    rk_world_free(w);
}

/* Ops of a step, counted from 0, for one stage of 2 layers: embed, all_reduce, keep_ids, 6 a layer,
 * and the logits except in the first and third step, which have none. */
static void test_ranks_lost(void) {
    static const rk_lost two_layers[] = {
        {2, 1, 1, 0, true, "no op", "all_reduce"},
        {2, 1, 0, 6, true, "out_residual", "all_reduce"},
        {3, 1, 2, 30, true, "all_reduce", "norm_logits_sample"},
        {1, 2, 0, 1, true, "embed", "receive"},
        {1, 2, 1, 0, false, "no op", "send"}, /* the ring buffer fills up */
        /* the first stage waits for the samples of step 5 */
        {1, 2, 1, 42, true, "norm_mlp_residual", "embed"},
        {2, 2, 3, 34, true, "norm_logits_sample", NULL},
        {2, 2, 0, 3, true, "norm_qkv_rope_kv", NULL},
    };
    static const rk_lost six_layers[] = {
        {1, 3, 1, 20, true, "norm_mlp_residual", NULL},
        /* step 14; the first stage has run all its steps and is not the cause */
        {1, 3, 1, 187, false, "out_residual", "receive"},
        {1, 4, 0, 30, false, "norm_qkv_rope_kv", NULL},
    };
    cpu_case c;
    mf_model *m;
    toka_err e;
    case_open(&c, (cpu_sizes){.H = 4, .K = 4, .D = 8, .E = 24, .F = 40, .V = 61, .B = RK_B}, 77);
    rk_check_all_lost(&c.sh, &c.w, two_layers, COUNT(two_layers));
    case_close(&c);
    if (mf_open(&m, "test/model", NULL, NULL, &e)) printf("%s\n", e.msg), abort();
    rk_check_all_lost(&m->shape, &m->weights, six_layers, COUNT(six_layers));
    mf_close(m);
}

static rk_world *rk_small_world(cpu_case *c) {
    rk_world *w = mem_alloc(sizeof *w);
    case_open(c, (cpu_sizes){.H = 4, .K = 4, .D = 8, .E = 24, .F = 40, .V = 61, .B = RK_B}, 77);
    rk_world_init(w, &c->sh, &c->w, 3);
    rk_run_single(w);
    for (int i = 0; i < RK_STEPS; i++) rk_build(w, i, true, &w->step[i]);
    return w;
}

/* A slow rank is not lost, however long it takes in total. */
static void test_ranks_slow(void) {
    cpu_case c;
    rk_world *w = rk_small_world(&c);
    rk_rank ranks[4] = {0};
    toka_group *g;
    toka_err e;
    arena a = {0};
    CHECK(toka_cpu.group_open(&g, 2, 2, &e) == 0);
    g->watchdog_s = 1;
    for (int i = 0; i < 4; i++) ranks[i].lost_after = -1;
    ranks[1].delay_us = 15000;
    double t0 = os_now();
    rk_start(w, 2, 2, g, ranks, &a);
    for (int i = 0; i < 4; i++) {
        pthread_join(ranks[i].thread, NULL);
        CHECK_MSG(!ranks[i].error.code, "%s", ranks[i].error.msg);
    }
    CHECK(os_now() - t0 > 2 * g->watchdog_s);
    rk_compare(w, 2, 2, "slow");
    toka_cpu.group_close(g);
    arena_free(&a);
    rk_world_free(w);
    case_close(&c);
}

/* The group is asked to end while one rank is lost and the others wait: they end at once and report
 * the op that each was in. */
static void test_ranks_abort(void) {
    cpu_case c;
    rk_world *w = rk_small_world(&c);
    for (int round = 0; round < 20; round++) {
        rk_rank ranks[4] = {0};
        toka_group *g;
        toka_err e;
        arena a = {0};
        CHECK(toka_cpu.group_open(&g, 2, 2, &e) == 0);
        for (int i = 0; i < 4; i++) ranks[i].lost_after = i == 1 ? 10 + round : -1;
        rk_start(w, 2, 2, g, ranks, &a);
        usleep((useconds_t)(round * 1000));
        double t0 = os_now();
        toka_group_abort(g);
        for (int i = 0; i < 4; i++) pthread_join(ranks[i].thread, NULL);
        CHECK(os_now() - t0 < GROUP_WATCHDOG_S / 2); /* no rank has waited for the watchdog */
        for (int i = 0; i < 4; i++) {
            char want[96];
            snprintf(want, sizeof want, "asked to end; rank %d (stage %d, tensor rank %d) was in ", i, i / 2, i % 2);
            const toka_err *err = &ranks[i].error;
            CHECK_MSG(i == 1 || (err->code == TOKA_E_DEVICE && strstr(err->msg, want)), "%s", err->msg);
        }
        toka_cpu.group_close(g);
        arena_free(&a);
    }
    rk_world_free(w);
    case_close(&c);
}

/* ---- The rank runtime with a device that works behind its thread, as a GPU does ---- */

typedef struct rk_gpus { /* begins with the toka_group of the runtime */
    toka_group g;
    unsigned barrier[4][2]; /* [rank][departed] */
    const char *device_op[4];
    bool released;
} rk_gpus;

/* An event is a bool: true while it is pending. */
static bool rk_is_pending(void *event) { return *(bool *)event; }
static unsigned rk_barrier(toka_group *g, int rank, bool departed) { return ((rk_gpus *)g)->barrier[rank][departed]; }
static const char *rk_device_op(toka_group *g, int rank) { return ((rk_gpus *)g)->device_op[rank]; }
static void rk_release(toka_group *g) { ((rk_gpus *)g)->released = true; }
static const toka_group_kind rk_gpu_kind = {.name = "GPU", .max_tp = 2, .n_messages = 3, .is_pending = rk_is_pending,
                                            .barrier = rk_barrier, .device_op = rk_device_op, .release = rk_release};

static rk_gpus *rk_gpus_new(void) { /* 2 stages of 2 tensor ranks */
    rk_gpus *gpus = mem_zalloc(sizeof *gpus);
    toka_err e;
    CHECK(toka_group_init(&gpus->g, &rk_gpu_kind, 2, 2, &e) == 0);
    for (int i = 0; i < 4; i++) {
        CHECK(toka_group_join(&gpus->g, i, &e) == 0);
        gpus->barrier[i][0] = gpus->barrier[i][1] = 7;
        CHECK(toka_group_begin_op(&gpus->g, i, i < 2 ? "send" : "receive"));
    }
    return gpus;
}

/* The watchdog times out while the driver waits for `rank`: the error must be this one. */
static void rk_check_diagnosis(rk_gpus *gpus, int rank, const char *want) {
    toka_err e = {0};
    int code = 0;
    gpus->g.watchdog_s = 3;
    for (int i = 0; i < 4 && !code; i++) {
        CHECK(!gpus->released);
        code = toka_group_watchdog(&gpus->g, rank, 1, &e);
    }
    CHECK_MSG(code == TOKA_E_DEVICE && !strcmp(e.msg, want), "%s", e.msg);
    CHECK(gpus->released && toka_group_is_broken(&gpus->g) && !toka_group_begin_op(&gpus->g, 0, "embed"));
    toka_err other = {0};
    toka_group_error(&gpus->g, 1, &other);
    CHECK(!strcmp(other.msg, want));
    toka_group_free(&gpus->g);
    free(gpus);
}

static void test_ranks_device(void) {
    bool done = false, pending = true;
    rk_gpus *gpus = rk_gpus_new();
    toka_err e = {0};
    /* The stream of rank 3 waits for a message of rank 1. The GPU of rank 1 is in barrier 8, which rank 0 has not reached. The earlier
     * waits of rank 3 are over, and its first one was overwritten. */
    toka_group_note_wait(&gpus->g, 3, (toka_stream_wait){&done, &pending, 2});
    for (int i = 0; i < 2; i++) toka_group_note_wait(&gpus->g, 3, (toka_stream_wait){&done, &done, 2});
    toka_group_note_wait(&gpus->g, 3, (toka_stream_wait){&done, &pending, 1});
    gpus->barrier[1][0] = 8;
    gpus->device_op[0] = "attention";
    rk_check_diagnosis(gpus, 3, "GPU: rank 0 (stage 0, tensor rank 0) has not moved for 3 s, last seen in attention; rank 3 (stage 1, tensor rank "
                            "1) waits for it in receive");
    /* A stream that has not come to its wait does not wait; the numbers of barriers wrap around. */
    gpus = rk_gpus_new();
    toka_group_note_wait(&gpus->g, 0, (toka_stream_wait){&pending, &pending, 2});
    gpus->barrier[0][0] = 0, gpus->barrier[0][1] = gpus->barrier[1][0] = gpus->barrier[1][1] = UINT_MAX;
    rk_check_diagnosis(gpus, 0, "GPU: rank 1 (stage 0, tensor rank 1) has not moved for 3 s, last seen in send; rank 0 (stage 0, tensor rank 0) "
                            "waits for it in send");
    gpus = rk_gpus_new();
    toka_group_note_wait(&gpus->g, 0, (toka_stream_wait){&done, &pending, 2});
    toka_group_note_wait(&gpus->g, 2, (toka_stream_wait){&done, &pending, 0});
    rk_check_diagnosis(gpus, 2, "GPU: all ranks have waited for each other for 3 s, rank 2 (stage 1, tensor rank 0) in receive");
    /* Barriers that a GPU passes are progress, and so is an op. */
    gpus = rk_gpus_new();
    gpus->g.watchdog_s = 3;
    for (int i = 0; i < 20; i++) {
        if (i % 4 == 1) gpus->barrier[i % 3][1]++, gpus->barrier[i % 3][0]++;
        if (i % 4 == 3) CHECK(toka_group_begin_op(&gpus->g, 2, "mlp"));
        CHECK(!toka_group_watchdog(&gpus->g, 2, 1, &e));
    }
    rk_check_diagnosis(gpus, 2, "GPU: rank 2 (stage 1, tensor rank 0) has not moved for 3 s, last seen in mlp");
}

typedef struct rk_leaver {
    toka_group *g;
    int rank;
    bool idle, left;
} rk_leaver;
static void *rk_leave(void *arg) {
    rk_leaver *r = arg;
    r->left = toka_group_wait_joined(r->g, r->rank) && toka_group_leave(r->g, r->rank, r->idle);
    return NULL;
}

/* All ranks leave at once. If the device of one of them does not end its work, no rank frees memory.
 * A rank that cannot open ends the others' wait for it. */
static void test_ranks_leave(void) {
    for (int round = 0; round < 3; round++) {
        toka_group *g = mem_zalloc(sizeof *g);
        toka_err e = {0}, why = {0};
        pthread_t threads[4];
        rk_leaver ranks[4];
        CHECK(toka_group_init(g, &rk_gpu_kind, 3, 1, &e) == TOKA_E_USE && strstr(e.msg, "at most 2 ranks a stage and 64 in all"));
        CHECK(toka_group_init(g, &cpu_group_kind, 2, 2, &e) == 0);
        for (int i = 0; i < 4; i++) {
            ranks[i] = (rk_leaver){g, i, round != 1 || i != 2, false};
            if (round != 2 || i != 3) CHECK(toka_group_join(g, i, &e) == 0);
        }
        CHECK(toka_group_join(g, 1, &e) == TOKA_E_USE && strstr(e.msg, "rank 1 (stage 0, tensor rank 1) has been there before"));
        for (int i = 0; i < 3; i++)
            if (pthread_create(&threads[i], NULL, rk_leave, &ranks[i])) abort();
        usleep(20000);
        fail(&why, TOKA_E_MEMORY, "no memory");
        if (round == 2) toka_group_fail(g, &why);
        else rk_leave(&ranks[3]);
        for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
        for (int i = 0; i < 3 + (round < 2); i++) CHECK_MSG(ranks[i].left == (round == 0), "round %d, rank %d", round, i);
        toka_group_error(g, 0, &e);
        if (round == 2) CHECK(e.code == TOKA_E_MEMORY && !strcmp(e.msg, "no memory"));
        toka_group_free(g);
        free(g);
    }
}

static void test_ranks_refuses(void) {
    cpu_case c;
    toka_group *g;
    toka_device *d, *d2;
    toka_err e;
    toka_device_options o = {.n_threads = 1, .max_tokens = 8, .max_samples = 8, .n_pages = 8, .tp_size = 2, .pp_size = 1};
    case_open(&c, (cpu_sizes){.H = 2, .K = 1, .D = 8, .E = 16, .F = 16, .V = 20, .B = 4}, 3);
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_USE && strstr(e.msg, "expected a place among 1 stages of 1"));
    CHECK(toka_cpu.group_open(&g, 0, 1, &e) == TOKA_E_USE && toka_cpu.group_open(&g, 9, 9, &e) == TOKA_E_USE);
    CHECK(toka_cpu.group_open(&g, 2, 1, &e) == 0);
    o.group = g, o.tp_rank = 2;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_USE && strstr(e.msg, "tensor rank 2 of 2"));
    o.tp_rank = 1;
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == 0);
    CHECK(toka_cpu.open(&d2, &o, &c.sh, &c.w, &e) == TOKA_E_USE && strstr(e.msg, "tensor rank 1) has been there before"));
    toka_cpu.close(d);
    toka_group_abort(g), toka_cpu.group_close(g), toka_cpu.group_close(NULL);
    CHECK(toka_cpu.group_open(&g, 1, 2, &e) == 0);
    o = (toka_device_options){.n_threads = 1, .max_tokens = 8, .max_samples = 8, .n_pages = 8, .group = g, .pp_size = 2, .n_seqs = 4};
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == 0);
    o.pp_rank = 1, o.n_seqs = 5;
    CHECK(toka_cpu.open(&d2, &o, &c.sh, &c.w, &e) == TOKA_E_USE && strstr(e.msg, "5 sequences, expected 4"));
    toka_cpu.close(d), toka_cpu.group_close(g);
    c.sh.v0 = 1;
    o = (toka_device_options){.n_threads = 1, .max_tokens = 8, .max_samples = 8, .n_pages = 8};
    CHECK(toka_cpu.open(&d, &o, &c.sh, &c.w, &e) == TOKA_E_INPUT && strstr(e.msg, "20 ids from 1 on"));
    case_close(&c);
}

static const struct test ranks_tests[] = {{"ranks_slices", test_ranks_slices},       {"ranks_stages", test_ranks_stages},
                                          {"ranks_fixtures", test_ranks_fixtures}, {"ranks_shapes", test_ranks_shapes},
                                          {"ranks_lost", test_ranks_lost},         {"ranks_slow", test_ranks_slow},
                                          {"ranks_abort", test_ranks_abort},       {"ranks_refuses", test_ranks_refuses},
                                          {"ranks_device", test_ranks_device},     {"ranks_leave", test_ranks_leave},
                                          {"ranks_kinds", test_ranks_kinds},
                                        {"ranks_hidden", test_ranks_hidden},     {0}};
