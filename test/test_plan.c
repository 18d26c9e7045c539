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
    f.query.model = &found->config;
    plan_options o = {.gpu = gpu, .n_gpus = 1, .input_len = 715, .output_len = 150, .n_samples = 1};
    CHECK_MSG(!plan_check(&o, &f.query, &must_hold, &e) && must_hold == 865, "%s", e.msg);
    return f;
}

/* Elements of the norms and biases: plan leaves them out, as the backend does. */
static int64_t plan_vectors(const mf_config *c) {
    int64_t n = 0;
    for (int layer = 0; layer < c->shape.L; layer++)
        for (mf_cursor at = {c, layer, 0, NULL}; mf_next(&at);)
            if (!*mf_slots[at.binding->slot].rows) n += mf_binding_size(at.binding, c);
    return n + c->shape.E;
}

static void plan_test_memory(void) {
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H200");
    plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
    /* a layer has 2048*2048 * 2 + 2*512*2048 + 3*2048*8192 = 60,817,408 elements; 16 layers, and
     * 128256*2048 once because the LM head is tied; 2 bytes each */
    CHECK(p.weight_bytes == 2471493632 && p.token_bytes == 2 * 16 * 8 * 64 * 2);
    /* 8448 rows of 2*2048 + 2*32*64 + 48*64 + 8192 elements, a table of 131072 * 32 pairs of
     * floats, 1.5 GiB */
    CHECK(p.scratch_bytes == 8448 * (19456 * 2 + 32 * 65 * 4) + 131072 * 32 * 8 + 1610612736);
    CHECK(p.kv_tokens == ((int64_t)(0.9 * (139.8 * 0x1p30 - 0x1p29)) - p.weight_bytes - p.scratch_bytes) / 32768);
    arena_free(&f.a);

    /* by its hub id; the LM head is not tied */
    f = plan_fixture_open("meta-llama/Llama-3.1-8B", "h200");
    CHECK(plan_make_rank(&f.query, 1, 1, 0, 0).weight_bytes == 16059990016);
    p = plan_make_rank(&f.query, 2, 1, 0, 1);
    /* half of each: 32 * (2048*4096 * 2 + 2*512*4096 + 3*7168*4096) + 2 * 64256*4096; 64256 ids are
     * 251 of 501 blocks */
    CHECK(p.shape.H == 16 && p.shape.K == 4 && p.shape.F == 7168 && p.shape.V == 64256 && p.weight_bytes == 8032092160 && p.token_bytes == 65536);
    arena_free(&f.a);

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
    CHECK(p.shape.H == 8 && p.shape.K == 1 && p.weight_bytes == 141104775168 / 8 + 2 * 2 * 96 * 8192 && p.token_bytes == 327680 / 8);
    p = plan_make_rank(&f.query, 16, 1, 0, 3); /* 8 kv heads on 16 ranks */
    CHECK(p.shape.H == 4 && p.shape.K == 1 && p.token_bytes == 327680 / 8);
    arena_free(&f.a);

    f = plan_fixture_open("qwen2.5-0.5b", "L4"); /* 14 query heads, 2 kv heads */
    p = plan_make_rank(&f.query, 14, 1, 0, 0);
    /* F is 347, padded to 352; V is 42 of 594 blocks: 24 * (64*896 * 2 + 2*64*896 + 3*352*896) +
     * 10752*896 */
    CHECK(p.shape.H == 1 && p.shape.K == 1 && p.shape.F == 347 && p.shape.V == 10752 && p.weight_bytes == 75694080);
    arena_free(&f.a);
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
        f.query.model = &f.known[m].config, f.query.max_len = f.query.model->shape.max_len;
        int64_t whole = 2 * (mf_n_parameters(f.query.model) - plan_vectors(f.query.model)), by_tp = 0, by_pp = 0;
        for (int n = 1; n <= 32; n++) {
            for (int pp = 1; pp <= n; pp++)
                if (n % pp == 0 && !plan_check_layout(&f.query.model->shape, n / pp, pp,
                    &e)) plan_check_complete(&f.query, n / pp, pp, whole);
            /* more GPUs for a replica, as stages or as tensor ranks, never hold fewer tokens */
            for (int pp = 0; pp < 2; pp++) {
                if (plan_check_layout(&f.query.model->shape, pp ? 1 : n, pp ? n : 1, &e)) continue;
                plan_layout s = plan_make_layout(&f.query, pp ? 1 : n, pp ? n : 1, 1, 865);
                CHECK_MSG(s.kv_tokens >= (pp ? by_pp : by_tp), "%s: %d", f.known[m].name, n);
                *(pp ? &by_pp : &by_tp) = s.kv_tokens;
            }
            /* more replicas: everything grows in proportion */
            plan_layout one = plan_make_layout(&f.query, 1, 1, 1, 865), more = plan_make_layout(&f.query, 1, 1, n, 865);
            CHECK(more.kv_tokens == n * one.kv_tokens && more.workload.n_running == n * one.workload.n_running);
            CHECK(fabs(more.workload.output_rate - n * one.workload.output_rate) <= 1e-9 * more.workload.output_rate && more.decode.output_rate >= one.decode.output_rate);
        }
    }
    arena_free(&f.a);
}

/* The engine sizes its cache by the same rule. */
static void plan_test_engine(void) {
    plan_fixture f = plan_fixture_open("llama-3.2-1b", "H100");
    const toka_backend be = {.activation_bytes = 2, .page_tok = TOKA_GPU_PAGE_TOK};
    toka_shape whole = f.query.model->shape;
    for (int seqs = 1; seqs < 5000; seqs *= 4) {
        f.query.max_seqs = seqs;
        plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
        int64_t free_bytes = (int64_t)(0.9 * (f.query.gpu->memory - PLAN_CONTEXT_BYTES)) - p.weight_bytes - p.scratch_bytes;
        CHECK(p.kv_tokens == eng_kv_tokens(&whole, 0, &(sched_config){.B = be.page_tok, .max_seqs = seqs}, &be, free_bytes));
    }
    arena_free(&f.a);
}

static bool plan_near(double x, double want, double share) { return fabs(x - want) <= share * want; }

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
    arena_free(&f.a);

    f = plan_fixture_open("mistral-7b-v0.1", "H200"); /* a window of 4,096 */
    f.query.input_len = 20000, f.query.output_len = 2000, f.query.max_seqs = 8;
    plan_rank p = plan_make_rank(&f.query, 1, 1, 0, 0);
    plan_load l = {8, 8, 0};
    plan_time t = plan_rank_time(&f.query, &p, 1, &l);
    CHECK(plan_near(t.kv, 8 * 4096 * 131072.0 / 4.1e12, 1e-6));
    l.n_prompts = 1, t = plan_rank_time(&f.query, &p, 1, &l); /* pairs: 4096 * 20000 - 4096^2 / 2 */
    CHECK(plan_near(t.tensor, 4.0 * 4096 * (4096 * 20000.0 - 4096 * 2048) * 32 / 790e12, 1e-6));
    arena_free(&f.a);

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
    arena_free(&f.a);
    f = plan_fixture_open("llama-3.2-1b", "A100-80G"); /* not a Hopper GPU */
    p = plan_make_rank(&f.query, 2, 1, 0, 0), l = (plan_load){4096, 4096, 0}, t = plan_rank_time(&f.query, &p, 2, &l);
    CHECK(t.send == 0);
    arena_free(&f.a);

    /* little memory for KV is left beside the weights, so the batch is small */
    f = plan_fixture_open("llama-3.1-70b", "L40S");
    s = plan_make_layout(&f.query, 1, 8, 1, 865);
    CHECK(!strcmp(s.decode.bound, "KV capacity") && s.decode.n_running < 1000);
    s = plan_make_layout(&f.query, 8, 1, 1, 865); /* connected by PCIe */
    CHECK(!strcmp(s.workload.bound, "link"));
    arena_free(&f.a);
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
    arena_free(&f.a);
    f = plan_fixture_open("llama-3.2-1b", "H100");
    f.query.n_samples = 96, f.query.max_seqs = 8192;
    plan_layout s = plan_make_layout(&f.query, 1, 1, 1, 865);
    CHECK_MSG(s.workload.output_rate > 128891 && s.workload.output_rate < 2 * 128891, "%g", s.workload.output_rate);
    f.query.max_seqs = 4096;
    CHECK(plan_make_layout(&f.query, 1, 1, 1, 865).workload.output_rate > 123617);
    arena_free(&f.a);
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
    arena_free(&pcie.a);
    /* 2 x (0.9 * 78.6 GiB - 2.4 GB) are 147 GB: the weights fit with a little KV, the full context
     * length does not */
    f.query.n_gpus = 2;
    CHECK(plan_best_layout(s, plan_layouts(&f.query, 865, s)) && !plan_best_layout(s, plan_layouts(&f.query, 131072, s)));
    CHECK(plan_min_gpus(f.query, 865) == 2 && plan_min_gpus(f.query, 131072) == 3 && f.query.n_gpus == 2);
    f.query.n_gpus = 60, f.query.model = &f.known[0].config;
    CHECK(plan_layouts(&f.query, 865, s) <= PLAN_MAX_GPUS);
    arena_free(&f.a);
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

static const struct test plan_tests[] = {{"plan: memory by hand", plan_test_memory}, {"plan: which splits a model allows", plan_test_allowed},
                                         {"plan: every model and split", plan_test_properties}, {"plan: KV as the engine sizes it", plan_test_engine},
                                         {"plan: time by hand", plan_test_time}, {"plan: measured figures", plan_test_measured},
                                         {"plan: choice", plan_test_choice}, {"plan: words", plan_test_words}, {NULL, NULL}};
