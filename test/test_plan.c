/* test_plan.c - `toka plan`: figures computed by hand, measured figures, and properties that must
 * hold for every known model and split. */

/* The models of models.txt, and a query with the program's defaults. */
typedef struct plan_fixture {
    arena a;
    mf_known_model *known;
    int n;
    plan_query query;
} plan_fixture;

static plan_fixture plan_fixture_open(const char *model, const char *gpu) {
    plan_fixture f = {0};
    toka_err e = {0};
    const mf_known_model *found = NULL;
    int must_hold, n;
    CHECK(!mf_read_models_file("models.txt", &f.a, &f.known, &f.n, &e) && !run_find_model("models.txt", model, &f.a, &found, &n, &e) && found && n == f.n);
    CHECK_MSG(!plan_open_model(&f.query, &found->config, &e), "%s: %s", model, e.msg);
    plan_options o = {.gpu = gpu, .n_gpus = 1, .input_len = 715, .output_len = 150, .n_samples = 1};
    CHECK_MSG(!plan_check(&o, &f.query, &must_hold, &e) && must_hold == 865, "%s", e.msg);
    return f;
}

static void plan_fixture_close(plan_fixture *f) { plan_close_model(&f->query), arena_free(&f->a); }

static bool plan_near(double x, double want, double share) { return fabs(x - want) <= share * want; }

/* Elements of the norms and biases: plan leaves them out, as the backend does. */
static int64_t plan_vectors(const mf_config *c) {
    int64_t n = 0;
    for (int layer = 0; layer < c->shape.L; layer++)
        for (mf_cursor at = {c, layer, 0, NULL}; mf_next(&at);)
            if (!mf_slot_is_matrix(&mf_slots[at.binding->slot])) n += mf_binding_size(at.binding, c);
    return n + c->shape.E;
}

static void plan_test_memory(void) {
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H200");
    plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
    /* a layer has 2048*2048 * 2 + 2*512*2048 + 3*2048*8192 = 60,817,408 elements; 16 layers, and
     * 128256*2048 once because the LM head is tied; 2 bytes each */
    CHECK(p.weight_bytes == 2471493632 && p.bytes.all == 2 * 16 * 8 * 64 * 2);
    /* 8448 rows of 2*2048 + 2*32*64 + 48*64 + 8192 elements, a table of 131072 * 32 pairs of
     * floats, 1.5 GiB */
    CHECK(p.scratch_bytes == 8448 * (19456 * 2 + 32 * 65 * 4) + 131072 * 32 * 8 + 1610612736);
    CHECK(p.kv_tokens == ((int64_t)(0.9 * (139.8 * 0x1p30 - 0x1p29)) - p.weight_bytes - p.scratch_bytes) / 32768);
    plan_fixture_close(&f);

    /* by its hub id; the LM head is not tied */
    f = plan_fixture_open("meta-llama/Llama-3.1-8B", "h200");
    CHECK(plan_make_rank(&f.query, 1, 1, 0, 0).weight_bytes == 16059990016);
    p = plan_make_rank(&f.query, 2, 1, 0, 1);
    /* half of each: 32 * (2048*4096 * 2 + 2*512*4096 + 3*7168*4096) + 2 * 64256*4096; 64256 ids are
     * 251 of 501 blocks */
    CHECK(p.shape.H == 16 && p.shape.K == 4 && p.shape.F == 7168 && p.shape.V == 64256 && p.weight_bytes == 8032092160 && p.bytes.all == 65536);
    plan_fixture_close(&f);

    f = plan_fixture_open("llama-3.1-70b", "H200");
    CHECK(plan_make_rank(&f.query, 1, 1, 0, 0).weight_bytes == 141104775168);
    /* a layer has 855,638,016 elements, the embedding and the LM head 1,050,673,152 each */
    for (int stage = 0; stage < 8; stage++) {
        p = plan_make_rank(&f.query, 1, 8, stage, 0);
        CHECK(p.first_layer == 10 * stage && p.shape.L == 10);
        CHECK(p.weight_bytes == 2 * ((int64_t)p.shape.L * 855638016 + (stage == 0 || stage == 7 ? 1050673152 : 0)));
    }
    p = plan_make_rank(&f.query, 8, 1, 0, 3);
    /* of the vocabulary 63 of 501 blocks: 16,128 ids, 96 more than an eighth */
    CHECK(p.shape.H == 8 && p.shape.K == 1 && p.weight_bytes == 141104775168 / 8 + 2 * 2 * 96 * 8192 && p.bytes.all == 327680 / 8);
    p = plan_make_rank(&f.query, 16, 1, 0, 3); /* 8 kv heads on 16 ranks */
    CHECK(p.shape.H == 4 && p.shape.K == 1 && p.bytes.all == 327680 / 8);
    plan_fixture_close(&f);

    f = plan_fixture_open("qwen2.5-0.5b", "L4"); /* 14 query heads, 2 kv heads */
    p = plan_make_rank(&f.query, 14, 1, 0, 0);
    /* F is 347, padded to 352; V is 42 of 594 blocks: 24 * (64*896 * 2 + 2*64*896 + 3*352*896) +
     * 10752*896 */
    CHECK(p.shape.H == 1 && p.shape.K == 1 && p.shape.F == 347 && p.shape.V == 10752 && p.weight_bytes == 75694080);
    plan_fixture_close(&f);
}

/* K and V, weights and active parameters as the models' papers and capacity notes have them. */
static void plan_test_known(void) {
    static const struct {
        const char *name;
        int64_t kv, bytes, active; /* 0: not checked */
    } cases[] = {
        {"llama-2-7b", 524288, 2 * 6738149376, 0}, {"llama-2-13b", 819200, 0, 0}, {"llama-2-70b", 327680, 0, 0},
        {"mistral-7b-v0.1", 131072, 0, 0}, {"llama-3-8b", 131072, 0, 0}, {"llama-3-70b", 327680, 0, 0},
        {"llama-3.1-405b", 516096, 811702550528, 405853388800},
        /* 8 bits, and a float for each block of 128 x 128: experts, attention; 16 bits: router, embedding, LM head */
        {"qwen3-30b-a3b-fp8", 98304, 48 * (128LL * 3 * (768 * 2048 + 6 * 16 * 4) + 2 * (4096 * 2048 + 32 * 16 * 4) +
                                           2 * (512 * 2048 + 4 * 16 * 4) + 2 * 128 * 2048) + 4LL * 151936 * 2048, 0},
        /* experts: 17 bytes for 32 numbers */
        {"gpt-oss-20b", 49152, 24 * (32LL * 3 * 2880 * 2880 / 32 * 17 + 2 * (2LL * 2880 * 4096 + 2 * 512 * 2880 + 32 * 2880)) +
                                   4LL * 201088 * 2880, 0},
        {"gpt-oss-120b", 73728, 0, 0},
        /* AWQ: 4 bits a number, 2 bytes of scale and half a byte of zero point for each 128 */
        {"qwen3-8b-awq", 147456, 36LL * (2LL * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 12288 * 4096) / 256 * 133 + 4LL * 151936 * 4096, 0},
        {"qwen3-30b-a3b", 98304, 0, 30532122624 - 48LL * 120 * 3 * 2048 * 768},
        {"mixtral-8x7b", 131072, 0, 12879925248}, {"deepseek-v3", 70272, 0, 0}};
    toka_err e = {0};
    for (int i = 0; i < COUNT(cases); i++) {
        plan_fixture f = plan_fixture_open(cases[i].name, "H100");
        const int64_t kv = plan_kv_bytes(&f.query), bytes = plan_file_bytes(&f.query), active = plan_active_parameters(&f.query);
        CHECK_MSG(kv == cases[i].kv, "%s: %lld", cases[i].name, (long long)kv);
        CHECK_MSG(!cases[i].bytes || llabs(bytes - cases[i].bytes) < bytes / 100000, "%s: %lld of %lld", cases[i].name,
                  (long long)bytes, (long long)cases[i].bytes);
        CHECK_MSG(!cases[i].active || active == cases[i].active, "%s: %lld", cases[i].name, (long long)active);
        plan_fixture_close(&f);
    }
    /* of the FP8 form of 405B the first and the last layer are bf16, and so is attention */
    plan_fixture f = plan_fixture_open("llama-3.1-405b-instruct-fp8", "H200");
    const double mlp = 3.0 * 53248 * 16384, all = 2.0 * 405853388800;
    CHECK(fabs((double)plan_weight_bytes(&f.query) - (all - 124 * mlp)) < 1e-3 * all);
    /* tensor ranks cut each expert between blocks of 32 columns: 4 ranks have 22 or 23 of 90 */
    plan_fixture gpt = plan_fixture_open("gpt-oss-120b", "H200");
    CHECK(plan_rank_costs(&gpt.query, 4, 3, &e) && plan_rank_costs(&gpt.query, 2, 1, &e));
    const plan_cost whole = plan_make_rank(&gpt.query, 1, 1, 0, 0).costs.experts, half = plan_make_rank(&gpt.query, 2, 1, 0, 1).costs.experts;
    CHECK(half.bytes == whole.bytes / 2 && half.flop == whole.flop / 2 && whole.fp8_flop == 0);
    plan_fixture_close(&f), plan_fixture_close(&gpt);
}

/* How many experts T rows use, by drawing; and a step's time by hand. */
static void plan_test_experts(void) {
    plan_fixture f = plan_fixture_open("qwen3-30b-a3b-fp8", "H200");
    const toka_moe *moe = &f.query.model->moe;
    uint64_t seed = 3;
    for (int rows = 1; rows <= 256; rows *= 4) {
        double used = 0;
        for (int round = 0; round < 300; round++) {
            bool seen[128] = {false};
            for (int row = 0; row < rows; row++) { /* 8 different ones */
                bool own[128] = {false};
                for (int k = 0; k < 8;) {
                    const int x = (int)(hash_mix(seed++) % 128);
                    k += !own[x], own[x] = seen[x] = true;
                }
            }
            for (int x = 0; x < 128; x++) used += seen[x] / 300.0;
        }
        CHECK_MSG(plan_near(128 * plan_touched(moe, rows), used, 0.02), "%d rows: %g, drawn %g", rows, 128 * plan_touched(moe, rows), used);
    }
    /* one row: dense matrices, an eighth of a half of the experts, and K and V at 4.1 TB/s */
    f.query.max_seqs = 1, f.query.input_len = 715, f.query.output_len = 150;
    const plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
    const double read = p.costs.dense.bytes + p.costs.experts.bytes / 16 + 2.0 * 151936 * 2048 + 790 * 98304.0;
    CHECK(plan_near(plan_make_layout(&f.query, 1, 1, 1, 865).decode.step_s, read / 4.1e12, 1e-6));
    /* many rows: 8 of 128 experts a row; FP8 products at twice the rate, on an A100 at that of bf16 */
    plan_load l = {8192, 0, 0};
    const double flop = 8192 * (p.costs.dense.flop + (p.costs.dense.fp8_flop + p.costs.experts.fp8_flop / 16) / 2);
    CHECK(plan_near(plan_rank_time(&f.query, &p, 1, &l).tensor, flop / 790e12, 1e-6));
    toka_err e;
    CHECK(!plan_find_gpu("A100-80G", &f.query.gpu, &e));
    CHECK(plan_near(plan_rank_time(&f.query, &p, 1, &l).tensor,
                    8192 * (p.costs.dense.flop + p.costs.dense.fp8_flop + p.costs.experts.fp8_flop / 16) / 312e12, 1e-6));
    plan_fixture_close(&f);
    /* stages: a layer's work counts the experts that a token uses, not all and not the widest */
    f = plan_fixture_open("mixtral-8x7b", "H200");
    CHECK(f.query.model->shape.layer_work == 4096 * (2 * 4096 + 2 * 1024 + 8) + 2 * 3LL * 4096 * 14336);
    plan_fixture_close(&f);
    f = plan_fixture_open("deepseek-v2-lite", "H200"); /* 1 dense layer of 27 */
    const int64_t mla = 2048LL * (16 * 192 + 576) + 512 * 16 * 256 + 2048 * 2048, expert = 3LL * 2048 * 1408;
    CHECK(f.query.model->shape.layer_work == mla + (3LL * 2048 * 10944 + 26 * (8 * expert + 64 * 2048)) / 27);
    plan_fixture_close(&f);
}

/* Layers with states have no K and V. A state is float32: in a layer 32 matrices of 128 x 128 and 3 inputs of 8,192 elements. */
static void plan_test_states(void) {
    static const struct { const char *model; int n_layers, n_linear; } cases[] = {
        {"qwen3-next-80b-a3b-instruct", 48, 36}, {"qwen3.5-35b-a3b", 40, 30}};
    for (int i = 0; i < COUNT(cases); i++) {
        plan_fixture f = plan_fixture_open(cases[i].model, "H200");
        const toka_shape *s = &f.query.model->shape;
        f.query.max_seqs = 100;
        plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0), half = plan_make_rank(&f.query, 2, 1, 0, 1);
        CHECK(s->L == cases[i].n_layers && s->linear.n_layers == cases[i].n_linear);
        CHECK(eng_state_bytes(s, 0) == cases[i].n_linear * (32 * 128 * 128 + 3 * 8192) * 4LL);
        CHECK(p.bytes.all == 2 * (cases[i].n_layers - cases[i].n_linear) * 2 * 2 * 256);
        CHECK(eng_state_bytes(&half.shape, 0) * 2 == eng_state_bytes(s, 0) && half.bytes.all * 2 == p.bytes.all);
        f.query.max_seqs = 50; /* what 50 states fewer leave */
        int64_t more = plan_make_rank(&f.query, 4, 1, 0, 0).kv_tokens;
        f.query.max_seqs = 100;
        p = plan_make_rank(&f.query, 4, 1, 0, 0);
        CHECK(more - p.kv_tokens == 50 * eng_state_bytes(&p.shape, 0) / p.bytes.all || p.kv_tokens == 100 * (int64_t)f.query.max_len);
        p = plan_make_rank(&f.query, 1, cases[i].n_layers, 0, 0); /* a stage of one layer, without K and V */
        CHECK(p.bytes.all == 0 && p.shape.linear.n_layers == 1 && p.kv_tokens > 0);
        plan_fixture_close(&f);
    }
}
/* As many sequences run as the start of the engine would choose: all states take half of the memory that the weights leave, and a
 * quarter of them are snapshots. */
static void plan_test_chosen_states(void) {
    plan_fixture f = plan_fixture_open("qwen3.5-9b", "H100");
    plan_query *query = &f.query;
    query->max_seqs = 8192;
    plan_layout one = plan_make_layout(query, 1, 1, 1, 865), two = plan_make_layout(query, 2, 1, 1, 865);
    const plan_rank rank = plan_make_rank(query, 1, 1, 0, 0);
    const int64_t state_bytes = eng_state_bytes(&query->model->shape, 0);
    const int64_t half = (rank.kv_bytes + 8192 * state_bytes) / 2, n_states = half / state_bytes;
    CHECK(one.fits && one.max_seqs == n_states - n_states / 4 && one.max_seqs > 100 && two.max_seqs > 2 * one.max_seqs);
    CHECK(llabs(one.kv_tokens * rank.bytes.all - half) <= state_bytes + TOKA_GPU_PAGE_TOK * rank.bytes.all);
    query->max_seqs = query->chosen_seqs = 100; /* then each of them has a snapshot, too */
    one = plan_make_layout(query, 1, 1, 1, 865);
    CHECK(one.max_seqs == 100 && llabs(one.kv_tokens * rank.bytes.all - (2 * half - 200 * state_bytes)) <= TOKA_GPU_PAGE_TOK * rank.bytes.all);
    plan_fixture_close(&f);
}

/* What the start on a GPU refuses is no split: experts, MLA and norms behind attention over tensor ranks. */
static void plan_test_refused_ranks(void) {
    static const struct { const char *model, *missing; } cases[] = {
        {"qwen3-30b-a3b", "experts"}, {"gpt-oss-20b", "experts"}, {"deepseek-v2-lite", "multi-head latent attention (MLA)"},
        {"gemma-2-9b", "norms behind attention and MLP"}, {"olmo-2-7b", "norms behind attention and MLP"}, {"llama-3.1-8b", NULL}, {"qwen3-8b", NULL}};
    for (int i = 0; i < COUNT(cases); i++) {
        plan_fixture f = plan_fixture_open(cases[i].model, "H100");
        toka_err e = {0};
        const int code = plan_check_split(&f.query, 2, 1, &e);
        CHECK_MSG(!!code == !!cases[i].missing && (!code || strstr(e.msg, cases[i].missing)), "%s: %s", cases[i].model, e.msg);
        CHECK(!plan_check_split(&f.query, 1, 2, &e));
        plan_fixture_close(&f);
    }
}

static void plan_test_allowed(void) {
    static const struct { int H, K, tp; bool divides; } cases[] = {{14, 2, 1, true}, {14, 2, 2, true}, {14, 2, 3, false}, {14, 2, 4, false},
        {14, 2, 6, false}, {14, 2, 14, true}, {14, 2, 28, false}, {64, 8, 3, true}, {64, 8, 16, true}, {64, 8, 12, false}, {64, 8, 128, false},
        {32, 32, 32, true}, {32, 32, 64, false}, {9, 3, 9, true}, {9, 3, 6, false}};
    toka_err e;
    for (int i = 0; i < COUNT(cases); i++) {
        toka_shape s = {.L = 24, .H = cases[i].H, .K = cases[i].K, .D = 64, .E = 896, .F = 4864, .V = 1000, .V_all = 1000};
        bool can = !plan_check_layout(&s, cases[i].tp, 1, &e);
        CHECK_MSG(can == (cases[i].divides && cases[i].tp <= 8), "H %d K %d tp %d", s.H, s.K, cases[i].tp);
        if (!can) CHECK(strstr(e.msg, cases[i].divides ? "8 tensor ranks at most" : "kv heads"));
        CHECK(plan_check_layout(&s, 1, 25, &e) == TOKA_E_USE && !plan_check_layout(&s, 1, 24, &e));
    }
}

/* The stages have all layers without a gap, the ranks all heads and columns, and every byte of the
 * model is somewhere. */
static void plan_check_complete(const plan_query *a, int tp, int pp, int64_t whole) {
    const toka_shape *all = &a->model->shape;
    int64_t weights = 0;
    int layer = 0;
    for (int stage = 0; stage < pp; stage++) {
        int H = 0, K = 0, F = 0, V = 0, L = 0;
        for (int r = 0; r < tp; r++) {
            plan_rank p = plan_make_rank(a, tp, pp, stage, r);
            CHECK(p.first_layer == layer && p.shape.L >= 1 && p.shape.H % p.shape.K == 0 && p.is_first_stage == !stage && p.is_last_stage == (stage == pp - 1));
            H += p.shape.H, K += p.shape.K, F += p.shape.F, V += p.shape.V, L = p.shape.L, weights += p.weight_bytes;
        }
        CHECK(H == all->H && K == MAX(all->K, tp) && F == all->F && V == all->V);
        layer += L;
    }
    CHECK(layer == all->L);
    CHECK_MSG(weights >= whole && (tp * pp > 1 || weights == whole), "tp %d pp %d: %lld of %lld bytes", tp, pp, (long long)weights, (long long)whole);
}

static void plan_test_properties(void) {
    plan_fixture f = plan_fixture_open("llama-3.1-8b", "H100");
    toka_err e;
    for (int m = 0; m < f.n; m++) {
        plan_close_model(&f.query);
        CHECK_MSG(!plan_open_model(&f.query, &f.known[m].config, &e), "%s: %s", f.known[m].name, e.msg);
        f.query.max_len = f.query.model->shape.max_len;
        int64_t whole = plan_weight_bytes(&f.query), by_tp = 0, by_pp = 0;
        /* plain numbers: two bytes a parameter. Rows are padded to 8: of the vocabulary, of routers, and of the gate
         * of a shared expert, which has one; columns of a convolution */
        const mf_config *c = f.query.model;
        const int64_t odd = (int64_t)c->shape.E * ((8 - c->shape.V % 8) % 8 * (c->features & MF_LM_HEAD ? 2 : 1) +
                                                   ((8 - c->moe.n_experts % 8) % 8 + (c->features & MF_SHARED_GATED ? 7 : 0)) * c->shape.L) +
                            (int64_t)c->shape.linear.n_layers * toka_linear_channels(&c->shape.linear) * (8 - c->shape.linear.taps);
        if (!f.query.model->quantization)
            CHECK_MSG(whole == 2 * (mf_n_parameters(c) - plan_vectors(c) + odd), "%s", f.known[m].name);
        for (int n = 1; n <= 32; n++) {
            for (int pp = 1; pp <= n; pp++)
                if (n % pp == 0 && !plan_check_split(&f.query, n / pp, pp, &e)) plan_check_complete(&f.query, n / pp, pp, whole);
            /* more GPUs for a replica, as stages or as tensor ranks, never hold fewer tokens; with windows or states, the
             * layers without them may be dealt out less evenly over more stages */
            for (int pp = 0; pp < 2; pp++) {
                if (plan_check_split(&f.query, pp ? 1 : n, pp ? n : 1, &e)) continue;
                plan_layout s = plan_make_layout(&f.query, pp ? 1 : n, pp ? n : 1, 1, 865);
                const double least = pp && (s.n_windowed || c->shape.linear.n_layers) ? 0.8 : 1, before = (double)(pp ? by_pp : by_tp);
                CHECK_MSG((double)s.kv_tokens >= least * before, "%s: %d: %g", f.known[m].name, n, (double)s.kv_tokens / before);
                *(pp ? &by_pp : &by_tp) = s.kv_tokens;
            }
            /* more replicas: everything grows in proportion */
            plan_layout one = plan_make_layout(&f.query, 1, 1, 1, 865);
            if (!one.fits) continue;
            plan_layout more = plan_make_layout(&f.query, 1, 1, n, 865);
            CHECK(more.kv_tokens == n * one.kv_tokens && more.workload.n_running == n * one.workload.n_running);
            CHECK(fabs(more.workload.output_rate - n * one.workload.output_rate) <= 1e-9 * more.workload.output_rate && more.decode.output_rate >= one.decode.output_rate);
        }
    }
    plan_fixture_close(&f);
}

/* The engine sizes its cache by the same rule. */
static void plan_test_engine(void) {
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H100");
    toka_shape whole = f.query.model->shape;
    for (int seqs = 1; seqs < 5000; seqs *= 4) {
        f.query.max_seqs = seqs;
        plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
        int64_t free_bytes = (int64_t)(0.9 * (f.query.gpu->memory - PLAN_CONTEXT_BYTES)) - p.weight_bytes - p.scratch_bytes;
        CHECK(p.kv_tokens == eng_kv_tokens((eng_token_bytes){p.bytes.all, 0}, whole.max_len, &(sched_config){.B = TOKA_GPU_PAGE_TOK, .max_seqs = seqs}, free_bytes));
    }
    plan_fixture_close(&f);
    /* windows of 128 in 12 of 24 layers: 256 sequences hold at most 4 pages each there, and a step of 8,448 rows 132 more. With
     * many sequences, windowed pages take 2/5 of what one pool would have: as 4 times as much as a window takes is in the others. */
    f = plan_fixture_open("gpt-oss-20b", "H200");
    for (int seqs = 256; seqs <= 65536; seqs *= 256) {
        f.query.max_seqs = seqs;
        const plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
        const int64_t free_bytes = (int64_t)(0.9 * (f.query.gpu->memory - PLAN_CONTEXT_BYTES)) - p.weight_bytes - p.scratch_bytes;
        const int64_t few = (256 * 4 + 132) * TOKA_GPU_PAGE_TOK, many = free_bytes / p.bytes.all / TOKA_GPU_PAGE_TOK * 2 / 5 * TOKA_GPU_PAGE_TOK, half = p.bytes.all / 2;
        const int64_t expected = MIN(seqs * (int64_t)f.query.max_len, (free_bytes - (seqs == 256 ? few : many) * half) / half);
        CHECK_MSG(llabs(p.kv_tokens - expected) <= (seqs == 256 ? 0 : 2 * TOKA_GPU_PAGE_TOK),
                  "%d sequences: %lld", seqs, (long long)p.kv_tokens);
    }
    plan_fixture_close(&f);
}


static void plan_test_time(void) {
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H200");
    /* 4,096 samples; 1,024 each share a prompt of 900 tokens; 150 own tokens at a time. GEMMs: 2 *
     * 4096 * 1,235,746,816 at 790e12 = 12.815 ms. Shared prompt: 4 * 2048 * 4096 * 900 * 16 at
     * 790e12 = 0.612 ms. Own K and V: 4096 * 150 * 32768 at 4.1e12 = 4.910 ms */
    f.query.input_len = 900, f.query.output_len = 300, f.query.n_samples = 1024, f.query.max_seqs = 4096;
    plan_layout s = plan_make_layout(&f.query, 1, 1, 1, 1200);
    CHECK_MSG(plan_near(s.decode.step_s, 18.337e-3, 1e-3) && plan_near(s.decode.output_rate, 4096 / 18.337e-3, 1e-3), "%g", s.decode.step_s);
    CHECK(!strcmp(s.decode.bound, "tensor cores") && s.decode.n_running == 4096);
    /* each sample has its own prompt: half of the KV cache is not enough for 4,096; reading K and V
     * takes longest */
    f.query.n_samples = 1;
    s = plan_make_layout(&f.query, 1, 1, 1, 1200);
    CHECK(!strcmp(s.decode.bound, "HBM, KV") && s.decode.n_running == (int64_t)((double)s.kv_tokens / (900 + 150 + 32)));
    /* one sequence: 2,471,493,632 bytes of weights and 16 layers of K and V of 715 + 75 tokens, at
     * 4.1e12 */
    f.query.max_seqs = 1, f.query.input_len = 715, f.query.output_len = 150;
    s = plan_make_layout(&f.query, 1, 1, 1, 865);
    CHECK(plan_near(s.decode.step_s, (2471493632 + 790 * 32768.0) / 4.1e12, 1e-6) && !strcmp(s.decode.bound, "HBM, weights"));
    /* with two stages it passes through both in turn, so only one of them works in a step */
    plan_layout two = plan_make_layout(&f.query, 1, 2, 1, 865);
    CHECK(two.decode.step_s > s.decode.step_s && two.decode.step_s < 1.5 * s.decode.step_s && two.decode.n_running == 1);
    plan_fixture_close(&f);

    f = plan_fixture_open("mistral-7b-v0.1", "H200"); /* a window of 4,096 */
    f.query.input_len = 20000, f.query.output_len = 2000, f.query.max_seqs = 8;
    plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
    plan_load l = {8, 8, 0};
    plan_time t = plan_rank_time(&f.query, &p, 1, &l);
    CHECK(plan_near(t.kv, 8 * 4096 * 131072.0 / 4.1e12, 1e-6));
    l.n_prompts = 1, t = plan_rank_time(&f.query, &p, 1, &l); /* pairs: 4096 * 20000 - 4096^2 / 2 */
    CHECK(plan_near(t.tensor, 4.0 * 4096 * (4096 * 20000.0 - 4096 * 2048) * 32 / 790e12, 1e-6));
    plan_fixture_close(&f);

    /* all-reduces over tensor ranks: with many rows half of those of a layer run concurrently with
     * the GEMMs */
    f = plan_fixture_open("llama-3.2-1b", "H200");
    f.query.input_len = 315, f.query.output_len = 120;
    p = plan_make_rank(&f.query, 2, 1, 0, 0), l = (plan_load){4096, 4096, 0}, t = plan_rank_time(&f.query, &p, 2, &l);
    CHECK(plan_near(t.kv, 4096 * 375 * 16384.0 / 4.1e12, 1e-6));
    CHECK(plan_near(t.send, 32 * 4096 * 4096 * 0.5 / 300e9, 1e-6));
    CHECK(plan_near(t.link + t.send, 33 * plan_all_reduce_s(f.query.gpu, 2, 4096 * 4096.0), 1e-6));
    l = (plan_load){1023, 1023, 0}, t = plan_rank_time(&f.query, &p, 2, &l); /* less than 4 MB */
    CHECK(t.send == 0 && plan_near(t.link, 33 * plan_all_reduce_s(f.query.gpu, 2, 1023 * 4096.0), 1e-6));
    plan_fixture_close(&f);
    f = plan_fixture_open("llama-3.2-1b", "A100-80G"); /* not a Hopper GPU */
    p = plan_make_rank(&f.query, 2, 1, 0, 0), l = (plan_load){4096, 4096, 0}, t = plan_rank_time(&f.query, &p, 2, &l);
    CHECK(t.send == 0);
    plan_fixture_close(&f);

    /* little memory for KV is left beside the weights, so the batch is small */
    f = plan_fixture_open("llama-3.1-70b", "L40S");
    s = plan_make_layout(&f.query, 1, 8, 1, 865);
    CHECK(!strcmp(s.decode.bound, "KV capacity") && s.decode.n_running < 1000);
    s = plan_make_layout(&f.query, 8, 1, 1, 865); /* connected by PCIe */
    CHECK(!strcmp(s.workload.bound, "link"));
    plan_fixture_close(&f);
}

/* Compared with measurements: NCCL on 8 and 2 H200 (8192 bf16 a token), and a run of many samples
 * of few prompts on an H100. */
static void plan_test_measured(void) {
    static const double tokens[] = {64, 256, 1024, 4096, 8192}, us[2][5] = {{54, 80, 166, 405, 767}, {53, 55, 92, 271, 534}};
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H200");
    for (int i = 0; i < 10; i++) {
        double found = 1e6 * plan_all_reduce_s(f.query.gpu, i < 5 ? 8 : 2, tokens[i % 5] * 16384);
        CHECK_MSG(plan_near(found, us[i / 5][i % 5], 0.2), "%g tokens: %g us", tokens[i % 5], found);
    }
    CHECK(plan_near(1e6 * plan_send_s(f.query.gpu, 1024 * 16384), 84, 0.2));
    plan_fixture_close(&f);
    f = plan_fixture_open("llama-3.2-1b", "H100");
    f.query.n_samples = 96, f.query.max_seqs = 8192;
    plan_layout s = plan_make_layout(&f.query, 1, 1, 1, 865);
    CHECK_MSG(s.workload.output_rate > 128891 && s.workload.output_rate < 2 * 128891, "%g", s.workload.output_rate);
    f.query.max_seqs = 4096;
    CHECK(plan_make_layout(&f.query, 1, 1, 1, 865).workload.output_rate > 123617);
    plan_fixture_close(&f);
}

/* The search for splits, the choice, and the smallest number of GPUs. */
static void plan_test_choice(void) {
    plan_fixture f = plan_fixture_open("llama-3.1-70b", "H100");
    plan_layout s[PLAN_MAX_GPUS];
    f.query.n_gpus = 8;
    int n = plan_layouts(&f.query, 865, s);
    CHECK(n == 10 && s[0].tp == 1 && s[0].pp == 1 && s[0].dp == 8 && !s[0].fits && s[9].tp == 8);
    for (int i = 0; i < n; i++) CHECK(s[i].tp * s[i].pp * s[i].dp == 8 && (s[i].fits || !s[i].kv_tokens));
    const plan_layout *best = plan_best_layout(s, n);
    CHECK(best && best->fits);
    for (int i = 0; i < n; i++) CHECK(!s[i].fits || s[i].workload.output_rate <= 1.02 * best->workload.output_rate);
    /* GPUs without peer access: the start refuses tensor ranks, so no layout has any */
    plan_fixture pcie = plan_fixture_open("llama-3.1-70b", "L40S");
    toka_err e = {0};
    pcie.query.n_gpus = 8;
    n = plan_layouts(&pcie.query, 865, s);
    CHECK(n == 4);
    for (int i = 0; i < n; i++) CHECK(s[i].tp == 1 && s[i].pp * s[i].dp == 8);
    best = plan_best_layout(s, n);
    CHECK(best && best->fits && best->pp == 8);
    CHECK(plan_check_split(&pcie.query, 2, 4, &e) == TOKA_E_USE && strstr(e.msg, "tensor parallel size 2: ") && strstr(e.msg, "L40S"));
    CHECK(!plan_check_split(&pcie.query, 1, 8, &e) && !plan_check_split(&f.query, 2, 4, &e));
    plan_fixture_close(&pcie);
    /* 2 x (0.9 * 78.6 GiB - 2.4 GB) are 147 GB: the weights fit with a little KV, the full context
     * length does not */
    f.query.n_gpus = 2;
    CHECK(plan_best_layout(s, plan_layouts(&f.query, 865, s)) && !plan_best_layout(s, plan_layouts(&f.query, 131072, s)));
    CHECK(plan_min_gpus(f.query, 865) == 2 && plan_min_gpus(f.query, 131072) == 3 && f.query.n_gpus == 2);
    f.query.n_gpus = 60;
    plan_close_model(&f.query), plan_open_model(&f.query, &f.known[0].config, &e);
    CHECK(plan_layouts(&f.query, 865, s) <= PLAN_MAX_GPUS);
    plan_fixture_close(&f);
}

static void plan_test_words(void) {
    char z[32];
    CHECK(!strcmp(plan_format_int(0, z), "0") && !strcmp(plan_format_int(999, z), "999") && !strcmp(plan_format_int(1234567, z), "1,234,567"));
    CHECK(!strcmp(plan_format_3_digits(0.4, z), "0") && !strcmp(plan_format_3_digits(7, z), "7") && !strcmp(plan_format_3_digits(239912.3, z), "240,000"));
    CHECK(!strcmp(plan_format_3_digits(999.6, z), "1,000") && !strcmp(plan_format_3_digits(28.04, z), "28") && !strcmp(plan_format_3_digits(1234, z), "1,230"));
    CHECK(plan_same_name("RTX-4090", "rtx 4090") && plan_same_name("A100-80G", "a10080g") && !plan_same_name("A100-80G", "A100"));
    CHECK(!strcmp(run_find_gpu("NVIDIA H200, 150 GB, wgmma kernels")->name, "H200"));
    CHECK(!strcmp(run_find_gpu("NVIDIA H100 80GB HBM3, 85 GB, wgmma kernels")->name, "H100"));
    CHECK(!strcmp(run_find_gpu("NVIDIA GeForce RTX 4090, 25 GB, mma.sync kernels")->name, "RTX-4090"));
    CHECK(!run_find_gpu("NVIDIA GH200 480GB, 102 GB, wgmma kernels") && !run_find_gpu("CPU, avx512, 2 threads"));
    CHECK(!plan_same_name("H200", "") && !plan_same_name("L4", "L40S"));
}

/* ---- Plans backwards ---- */

/* Expected times of steps beside steps that were measured on one H200 by the GPU's clock
 * (test/results/gpu-h200.md). n: mean sequences of a step, which is the output rate times the step's time; rows: of
 * prompts in a step, likewise. */
static void plan_test_expected(void) {
    static const struct { const char *model; double n, rows; int in, out, samples; double ms; } steps[] = {
        {"llama-3.2-1b", 1, 0, 128, 1024, 1, 0.730}, {"llama-3.2-1b", 8, 0, 128, 1024, 1, 0.838}, {"llama-3.2-1b", 64, 0, 128, 1024, 1, 1.300},
        {"llama-3.2-1b", 504, 0, 128, 1024, 1, 4.375}, {"llama-3.2-1b", 6, 0, 880, 150, 24, 0.827}, {"llama-3.2-1b", 48, 0, 880, 150, 24, 1.000},
        {"llama-3.2-1b", 256, 64, 64, 256, 1, 1.88}, {"llama-3.2-1b", 1024, 256, 64, 256, 1, 6.26}, {"llama-3.2-1b", 0, 5049, 16000, 16, 1, 27.65},
        {"llama-3.1-8b", 1, 0, 128, 512, 1, 3.749}, {"llama-3.1-8b", 6, 0, 880, 150, 24, 4.087}, {"llama-3.1-8b", 22, 0, 880, 150, 24, 4.536},
        {"llama-3.1-8b", 48, 0, 880, 150, 24, 5.063}, {"llama-3.1-8b", 0, 5055, 16000, 16, 1, 151.1},
        {"qwen2.5-0.5b", 1, 0, 128, 512, 1, 0.523}, {"qwen2.5-0.5b", 48, 0, 880, 150, 24, 0.857}, {"qwen2.5-1.5b", 1, 0, 128, 512, 1, 1.204},
        {"qwen2.5-1.5b", 48, 0, 880, 150, 24, 1.658}, {"qwen2.5-3b", 6, 0, 880, 150, 24, 2.189}, {"qwen2.5-7b", 1, 0, 128, 512, 1, 3.538},
        {"qwen2.5-7b", 48, 0, 880, 150, 24, 4.546}, {"qwen3-4b", 1, 0, 128, 512, 1, 2.520}, {"qwen3-8b", 1, 0, 128, 512, 1, 3.914},
        {"qwen3-14b", 1, 0, 128, 512, 1, 7.269}, {"qwen3-14b", 48, 0, 880, 150, 24, 9.211}};
    double sum = 0, most = 0;
    for (int i = 0; i < COUNT(steps); i++) {
        plan_fixture f = plan_fixture_open(steps[i].model, "H200");
        f.query.input_len = steps[i].in, f.query.output_len = steps[i].out, f.query.n_samples = steps[i].samples;
        const plan_layout layout = plan_make_layout(&f.query, 1, 1, 1, 865);
        const plan_rank rank = plan_make_rank(&f.query, 1, 1, 0, 0);
        const double ms = 1e3 * plan_step_of(&f.query, &rank, &layout, steps[i].n, steps[i].rows), off = ms / steps[i].ms - 1;
        printf("       %-13s %4g sequences, %4g rows of prompts: %7.3f ms, measured %7.3f, %+3.0f %%\n", steps[i].model, steps[i].n,
               steps[i].rows, ms, steps[i].ms, 100 * off);
        sum += fabs(off) / COUNT(steps), most = MAX(most, fabs(off));
        plan_fixture_close(&f);
    }
    /* what the manual page says */
    CHECK_MSG(sum < 0.10 && most < 0.35, "mean %.1f %%, most %.1f %%", 100 * sum, 100 * most);
}

/* The queue beside theory: a step computes one prompt, an answer has one token, so the replica is an M/D/1 queue. */
static void plan_test_queue(void) {
    plan_fixture f = plan_fixture_open("llama-3.1-8b", "H100");
    f.query.input_len = 2048, f.query.output_len = 1, f.query.max_tokens = 2048, f.query.max_seqs = 64;
    f.query.ttft_s = f.query.itl_s = f.query.e2e_s = INFINITY;
    const plan_layout layout = plan_make_layout(&f.query, 1, 1, 1, 2049);
    plan_grid grid;
    plan_fill_grid(&f.query, &layout, &grid);
    const double service_s = plan_grid_s(&grid, 0, 2048);
    for (double load = 0.2; load < 0.85; load += 0.3) {
        double mean = 0;
        for (int i = 0; i < 4; i++) { /* other numbers of requests: other parts of the arrivals count */
            f.query.rate = load / service_s, f.query.max_seqs = 64 + 400 * i;
            mean += plan_simulate(&f.query, &layout, &grid).ttft_s / 4;
        }
        const double want = service_s * (1 + load / (2 * (1 - load)));
        CHECK_MSG(plan_near(mean, want, 0.12), "load %g: %g s, M/D/1 %g s", load, mean, want);
    }
    plan_fixture_close(&f);
}

/* Many sequences: the time between tokens is that of a step with as many sequences and prompts as there are. */
static void plan_test_service(void) {
    plan_fixture f = plan_fixture_open("llama-3.1-8b", "H200");
    plan_offer offers[PLAN_MAX_GPUS];
    plan_grid grid;
    toka_err e = {0};
    int best;
    f.query.rate = 30, f.query.ttft_s = 0.5, f.query.itl_s = 0.05, f.query.e2e_s = INFINITY;
    plan_layout layout = plan_make_layout(&f.query, 1, 1, 1, 865);
    plan_fill_grid(&f.query, &layout, &grid);
    const plan_service service = plan_simulate(&f.query, &layout, &grid);
    const plan_rank rank = plan_make_rank(&f.query, 1, 1, 0, 0);
    /* a step with a prompt comes 30 times a second */
    const double alone_s = plan_step_of(&f.query, &rank, &layout, service.n_running, 0);
    const double step_s = alone_s / (1 - 30 * (plan_step_of(&f.query, &rank, &layout, service.n_running, 715) - alone_s));
    CHECK_MSG(plan_near(service.itl_s, step_s, 0.1) && plan_near(service.n_running, 30 * 149 * service.itl_s, 0.02), "%g s, a step %g s",
              service.itl_s, step_s);
    CHECK(service.ttft_s > step_s / 2 && service.ttft_s < service.ttft_p99_s && service.in_time > 0.99 && service.busy > 0.9);
    /* between its points the grid is near the formula */
    for (int n = 3; n < 3000; n = n * 3 + 7)
        for (int rows = 0; rows < 3000; rows = rows * 5 + 50) {
            const double want = plan_step_of(&f.query, &rank, &layout, n, rows);
            CHECK_MSG(plan_near(plan_grid_s(&grid, n, rows), want, 0.15), "%d, %d: %g, %g", n, rows, plan_grid_s(&grid, n, rows), want);
        }
    /* the fewest GPUs: with one less no layout holds the rate. More requests need more GPUs */
    int last = 1;
    for (double rate = 20; rate < 400; rate *= 2) {
        plan_query query = f.query;
        query.rate = rate, query.any_gpus = true, query.n_gpus = 1;
        plan_find_gpus(&query, 865, offers, &best);
        CHECK(best >= 0 && offers[best].holds && query.n_gpus >= last && offers[best].capacity > rate);
        last = query.n_gpus;
        const int n_gpus = query.n_gpus;
        while (--query.n_gpus > 0) CHECK_MSG((plan_offers(&query, 865, offers, &best), best < 0), "rate %g: %d, and not %d", rate, query.n_gpus, n_gpus);
    }
    CHECK(last > 4);
    /* a limit that no GPU holds */
    f.query.itl_s = 1e-4, f.query.any_gpus = true, f.query.n_gpus = 1;
    plan_find_gpus(&f.query, 865, offers, &best);
    CHECK(best < 0 && f.query.n_gpus == PLAN_MAX_GPUS);
    /* samples of a prompt run together: the prompt is computed once */
    f.query.itl_s = 0.05, f.query.n_samples = 8, f.query.rate = 5;
    layout = plan_make_layout(&f.query, 1, 1, 1, 865);
    plan_fill_grid(&f.query, &layout, &grid);
    const plan_service samples = plan_simulate(&f.query, &layout, &grid);
    CHECK(plan_near(samples.n_running, 5 * 8 * 149 * samples.itl_s, 0.02) && samples.ttft_s < service.ttft_s);
    CHECK(plan_read_goodput("ttft:500, itl:50", &f.query, &e) == 0 && f.query.ttft_s == 0.5 && f.query.itl_s == 0.05);
    CHECK(plan_read_goodput("tpot:20 e2el:3000", &f.query, &e) == 0 && f.query.itl_s == 0.02 && f.query.e2e_s == 3 && isinf(f.query.ttft_s));
    static const char *const bad[] = {"ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:5x", "rate:5", "ttft:nan", ":5"};
    for (int i = 0; i < COUNT(bad); i++) CHECK(plan_read_goodput(bad[i], &f.query, &e) == TOKA_E_USE && strstr(e.msg, "--goodput: '"));
    plan_fixture_close(&f);
}

/* The memory of a batch, as capacity notes print it. */
static void plan_test_batch_memory(void) {
    plan_memory_row rows[PLAN_MEMORY_ROWS];
    plan_fixture f = plan_fixture_open("llama-3.1-405b", "H100");
    plan_make_memory(&f.query, 4, 8192, rows);
    CHECK(llabs(rows[0].bytes - 811700000000) < 50000000 && rows[1].bytes == (int64_t)(15.75 * 0x1p30));
    CHECK(!rows[2].bytes && !rows[6].bytes); /* no windows, no states */
    plan_make_memory(&f.query, 4, 131072, rows);
    CHECK(rows[1].bytes == (int64_t)252 << 30);
    CHECK(!strcmp(rows[1].formula, "4 sequences * 131072 tokens * 126 layers * 8 kv heads * (128 + 128) * 2 bytes"));
    plan_fixture_close(&f);
    /* each kind of layers has its own row; activations and tables are what the start reserves */
    static const struct { const char *model; int64_t kept, windowed, states; } cases[] = {
        {"gpt-oss-20b", 16 * 32768 * 12 * (int64_t)2048, (16 * 4 + 132) * 64 * 12 * 2048, 0},
        {"gemma-3-27b-it", 16 * 32768 * 10 * (int64_t)8192, (16 * 18 + 132) * 64 * 52 * (int64_t)8192, 0},
        {"mistral-7b-v0.1", 0, (16 * 66 + 132) * 64 * 32 * (int64_t)4096, 0},
        {"qwen3-next-80b-a3b-instruct", 16 * 32768 * (int64_t)24576, 0, 2 * 16 * (int64_t)79036416},
        {"deepseek-v3", 16 * 32768 * 61 * (int64_t)1152, 0, 0}, {"qwen3-30b-a3b", 16 * 32768 * 48 * (int64_t)2048, 0, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        f = plan_fixture_open(cases[i].model, "H200");
        f.query.max_tokens = 8448;
        plan_make_memory(&f.query, 16, 32768, rows);
        CHECK_MSG(rows[1].bytes == cases[i].kept && rows[2].bytes == cases[i].windowed && rows[6].bytes == cases[i].states, "%s: %lld, %lld, %lld",
                  cases[i].model, (long long)rows[1].bytes, (long long)rows[2].bytes, (long long)rows[6].bytes);
        CHECK_MSG(rows[3].bytes + rows[5].bytes == plan_make_rank(&f.query, 1, 1, 0, 0).scratch_bytes, "%s", cases[i].model);
        /* sequences that are not longer than a window takes: one pool */
        plan_make_memory(&f.query, 16, 200, rows);
        CHECK_MSG(rows[1].bytes == 16 * 200 * plan_kv_bytes(&f.query) && !rows[2].bytes, "%s", cases[i].model);
        plan_fixture_close(&f);
    }
}

/* ---- Dummy weights ---- */

#define PLAN_TINY "{\"architectures\": [\"%s\"], \"num_hidden_layers\": %d, \"hidden_size\": 256, \"num_attention_heads\": 8, " \
    "\"num_key_value_heads\": 4, \"head_dim\": 32, \"intermediate_size\": 384, \"vocab_size\": 1000, \"max_position_embeddings\": 1024%s}"

/* Makes the weights of a small model. Returns NULL after an error, which fails the test. */
static mf_model *plan_dummy(const char *arch, int n_layers, const char *more) {
    mf_model *m = mem_zalloc(sizeof *m);
    char text[2000];
    toka_err e = {0};
    snprintf(text, sizeof text, PLAN_TINY, arch, n_layers, more);
    m->name = arena_cstr(&m->memory, STR("tiny"));
    int code = mf_config_parse(str_c(text), "tiny", &m->memory, &m->config, &e);
    m->shape = m->config.shape;
    if (!code) code = run_dummy_weights(m, &e);
    CHECK_MSG(!code, "%s%s: %s", arch, more, e.msg);
    if (!code) return m;
    mf_close(m);
    return NULL;
}

/* Root mean square of a matrix, times the root of its columns; NAN if a number is not finite. */
static double plan_gain(const toka_tensor *t) {
    float row[2048];
    double sum = 0;
    for (int i = 0; i < t->rows; i++) {
        toka_weight_row(t, i, row);
        for (int j = 0; j < t->cols; j++) sum += (double)row[j] * row[j];
    }
    return sqrt(sum / t->rows);
}

/* Each format, by the names that checkpoints have for it: every matrix has the type that it would
 * have from a file, finite numbers, and an output as large as its input. */
static void plan_test_dummy_formats(void) {
    #define COMPRESSED(format, weights) ", \"quantization_config\": {\"quant_method\": \"compressed-tensors\", \"format\": \"" format \
        "\", \"ignore\": [\"lm_head\", \"re:.*layers.1.mlp.down.*\"], \"config_groups\": {\"a\": {\"targets\": [\"Linear\"], \"weights\": {" weights "}}}}"
    #define METHOD(fields) ", \"quantization_config\": {" fields "}"
    static const struct { const char *more; toka_dtype dtype; int block_rows, block_cols; bool zero, skips; } cases[] = {
        {"", TOKA_BF16, 0, 0, false, false},
        {METHOD("\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]"), TOKA_FP8, 128, 128, false, false},
        {METHOD("\"quant_method\": \"fp8\", \"activation_scheme\": \"static\""), TOKA_FP8, 256, 256, false, false},
        {METHOD("\"quant_method\": \"fbgemm_fp8\", \"modules_to_not_convert\": [\"model.layers.1.mlp.down_proj\"]"), TOKA_FP8, 1, 256, false, true},
        {METHOD("\"quant_method\": \"modelopt\", \"quant_algo\": \"FP8\""), TOKA_FP8, 256, 256, false, false},
        {COMPRESSED("float-quantized", "\"num_bits\": 8, \"type\": \"float\", \"strategy\": \"channel\""), TOKA_FP8, 1, 256, false, true},
        {COMPRESSED("pack-quantized", "\"num_bits\": 4, \"type\": \"int\", \"group_size\": 32, \"symmetric\": false"), TOKA_INT4, 1, 32, true, true},
        {COMPRESSED("pack-quantized", "\"num_bits\": 4, \"type\": \"int\", \"group_size\": 64"), TOKA_INT4, 1, 64, false, true},
        {METHOD("\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 128"), TOKA_INT4, 1, 128, true, false},
        {METHOD("\"quant_method\": \"gptq\", \"bits\": 4, \"group_size\": -1"), TOKA_INT4, 1, 256, true, false},
        {METHOD("\"quant_method\": \"mxfp4\""), TOKA_MXFP4, 1, 32, false, false}};
    for (int i = 0; i < COUNT(cases); i++) {
        mf_model *m = plan_dummy("LlamaForCausalLM", 2, cases[i].more);
        if (!m) continue;
        const toka_layer *l = m->weights.layers;
        const toka_tensor *all[] = {&l->q, &l->k, &l->o, &l->mlp.gate, &l->mlp.down, &l[1].v, &l[1].mlp.up};
        for (int j = 0; j < COUNT(all); j++) {
            const double gain = plan_gain(all[j]);
            CHECK_MSG(all[j]->dtype == cases[i].dtype && fabs(gain - 1) < (cases[i].dtype == TOKA_MXFP4 ? 0.45 : 0.05), "%s: %g", cases[i].more, gain);
        }
        CHECK((l[1].mlp.down.dtype != cases[i].dtype) == cases[i].skips && l->attn_norm.dtype == TOKA_BF16);
        CHECK(toka_is_plain(&m->weights.embed) && toka_is_plain(&m->weights.lm_head) && plan_near(plan_gain(&m->weights.lm_head), 1, 0.05));
        if (cases[i].block_cols)
            CHECK_MSG(l->q.quant->block_rows == cases[i].block_rows && l->q.quant->block_cols == cases[i].block_cols &&
                      !l->q.quant->zero == !cases[i].zero, "%s", cases[i].more);
        mf_close(m);
    }
    /* a format that cannot hold a matrix is an error, as from a file */
    mf_config c;
    arena a = {0};
    toka_weights w;
    toka_err e = {0};
    char text[2000];
    snprintf(text, sizeof text, PLAN_TINY, "LlamaForCausalLM", 1, METHOD("\"quant_method\": \"awq\", \"bits\": 4, \"group_size\": 100"));
    CHECK(!mf_config_parse(str_c(text), "tiny", &a, &c, &e) && mf_shape_weights(&c, &w, &a, &e) == TOKA_E_INPUT);
    CHECK_MSG(strstr(e.msg, "model.layers.0.self_attn.q_proj: groups of 100 columns"), "%s", e.msg);
    arena_free(&a);
}

/* The experts that 512 tokens of one sequence get in the last layer of a model with n_layers:
 * chosen [512][4]. */
static void plan_dummy_chosen(int n_layers, int *chosen) {
    mf_model *m = plan_dummy("Qwen3MoeForCausalLM", n_layers, ", \"num_experts\": 32, \"num_experts_per_tok\": 4, \"moe_intermediate_size\": 64");
    enum { T = 512 };
    toka_shape shape = m->shape;
    toka_device *dev = NULL;
    toka_err e = {0};
    shape.B = 16;
    const toka_device_options o = {.n_threads = 1, .max_tokens = T, .max_samples = 1, .n_pages = T / 16};
    CHECK_MSG(!toka_cpu.open(&dev, &o, &shape, &m->weights, &e), "%s", e.msg);
    int32_t tokens[T], pos[T], pages[T / 16];
    for (int i = 0; i < T; i++) tokens[i] = (int32_t)(hash_mix((uint64_t)i) % 1000), pos[i] = i, pages[i / 16] = i / 16;
    const toka_span span = {0, T, 0, 0, T};
    toka_step step = {.T = T, .n_spans = 1, .ids = tokens, .pos = pos, .kv_slot = pos, .pages = pages, .spans = &span};
    toka_hidden x = {.data = toka_cpu.alloc(dev, sizeof(float) * T * 256)};
    const toka_dev_ptr q = toka_cpu.alloc(dev, sizeof(float) * T * 256), out = toka_cpu.alloc(dev, sizeof(float) * T * 256);
    toka_cpu.embed(dev, &step, &x);
    for (int i = 0; i < n_layers; i++) {
        toka_cpu.norm_qkv_rope_kv(dev, &step, i, &x, q);
        toka_cpu.attention(dev, &step, i, q, out);
        toka_cpu.out_residual(dev, &step, i, out, &x);
        toka_cpu.norm_mlp_residual(dev, &step, i, &x);
    }
    memcpy(chosen, dev->experts.chosen, sizeof(int) * T * 4);
    toka_cpu.close(dev);
    mf_close(m);
}

/* Each expert gets as many tokens as if they were drawn, and a token gets other experts in other
 * layers. */
static void plan_test_dummy_routers(void) {
    static int chosen[3][512 * 4];
    for (int layer = 0; layer < 3; layer++) {
        int n[32] = {0}, most = 0, same = 0;
        plan_dummy_chosen(layer + 1, chosen[layer]);
        for (int i = 0; i < 512 * 4; i++) n[chosen[layer][i]]++;
        for (int x = 0; x < 32; x++) most = MAX(most, n[x]);
        /* 64 are expected; a drawn number is over 64 + 5 * sqrt(64) once in a million experts */
        CHECK_MSG(most < 104, "layer %d: %d tokens use one of 32 experts", layer, most);
        for (int x = 0; x < 32; x++) CHECK_MSG(n[x] > 24, "layer %d: %d tokens use expert %d", layer, n[x], x);
        for (int i = 0; layer && i < 512; i++)
            for (int j = 0; j < 16; j++) same += chosen[layer][4 * i + j / 4] == chosen[layer - 1][4 * i + j % 4];
        CHECK_MSG(same < 512, "layer %d: %d of 2048 choices are those of the layer before, 256 are expected", layer, same);
    }
}

static const struct test plan_tests[] = {{"plan: memory by hand", plan_test_memory}, {"plan: states", plan_test_states}, {"plan: chosen states", plan_test_chosen_states},
    {"plan: splits that the start refuses", plan_test_refused_ranks}, {"plan: which splits a model allows", plan_test_allowed},
                                         {"plan: known figures of models", plan_test_known}, {"plan: experts", plan_test_experts},
                                         {"plan: every model and split", plan_test_properties}, {"plan: KV as the engine sizes it", plan_test_engine},
                                         {"plan: time by hand", plan_test_time}, {"plan: measured figures", plan_test_measured},
                                         {"plan: choice", plan_test_choice},
                                         {"plan: expected steps beside measured ones", plan_test_expected},
                                         {"plan: the queue beside M/D/1", plan_test_queue}, {"plan: service", plan_test_service},
                                         {"plan: memory of a batch", plan_test_batch_memory},
                                         {"dummy weights: every format", plan_test_dummy_formats}, {"dummy weights: routers", plan_test_dummy_routers}, {"plan: words", plan_test_words}, {NULL, NULL}};
