/* Tests of chapters 31 to 33: whole models against Hugging Face transformers, and the life of a
 * request. */

#include "late.h"

static toka *eng_must_open(const char *model, int max_num_seqs, int max_tokens, int n_threads) {
    toka_err e = {0};
    toka *t = NULL;
    toka_options o = toka_options_default();
    o.model = model, o.max_num_seqs = max_num_seqs, o.max_num_batched_tokens = max_tokens, o.n_threads = n_threads;
    if (toka_open(&t, &o, &e)) printf("%s: %s\n", model, e.msg), abort();
    return t;
}

static const json *eng_parse_file(arena *a, const char *path, str *text) {
    toka_err e = {0};
    *text = read_copy(path);
    const json *v = json_parse(a, *text, json_trusted, &e);
    if (!v) printf("%s: %s\n", path, e.msg), abort();
    return v;
}

static int eng_int_array(const json *array, int32_t *out, int cap) {
    int n = 0;
    JSON_EACH(it, array) if (n < cap) out[n++] = (int32_t)json_int(it, -1);
    return n;
}

typedef struct eng_collected { /* what the events of a request contained */
    ids id[64];
    buf text[64];
    float logprob[64][512], sampled[64][512];
    int n_ended, stop_id[64], n_top;
    toka_finish finish[64];
    int cancel_after; /* > 0: cancel at that event */
    int n_events, n_cancelled;
    int more; /* of the last event */
} eng_collected;

static int eng_collect(void *user, const toka_event *ev) {
    eng_collected *g = user;
    size_t k = g->id[ev->sample].n;
    g->more = ev->more;
    if (ev->id < 0 && ev->finish != TOKA_STOP) return g->n_cancelled++, g->n_ended++, 0;
    if (k < 512) g->logprob[ev->sample][k] = ev->logprob, g->sampled[ev->sample][k] = ev->sampled_logprob;
    if (ev->id >= 0) ids_push(&g->id[ev->sample], ev->id);
    buf_put(&g->text[ev->sample], ev->text, ev->text_bytes);
    g->finish[ev->sample] = ev->finish, g->stop_id[ev->sample] = ev->stop_id, g->n_top = ev->n_top;
    g->n_ended += ev->finish != TOKA_RUNNING;
    return ++g->n_events == g->cancel_after;
}

static void eng_collected_free(eng_collected *g) {
    for (int i = 0; i < 64; i++) ids_free(&g->id[i]), buf_free(&g->text[i]);
    free(g);
}

/* Runs one request of ids or of text. Greedy unless `s` is given. */
static eng_collected *eng_ask(toka *t, const char *text, const int32_t *prompt, size_t n_prompt, int n, const toka_sampling *s, int *code,
                        toka_err *e) {
    eng_collected *g = mem_zalloc(sizeof *g);
    toka_request r = toka_request_default();
    r.text = text, r.text_bytes = text ? strlen(text) : 0, r.ids = prompt, r.n_ids = n_prompt, r.n = n, r.sampling = *s;
    *code = toka_generate(t, &r, eng_collect, g, NULL, e);
    return g;
}

static toka_sampling eng_greedy(int max_tokens) {
    toka_sampling s = toka_request_default().sampling;
    s.temperature = 0, s.max_tokens = max_tokens;
    return s;
}

/* ---- Fixtures: logits of prompts in one mixed batch, and greedy continuations ---- */

static double eng_rel_l2(const float *a, const float *b, int n) {
    double d = 0, r = 0;
    for (int i = 0; i < n; i++) d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), r += (double)b[i] * b[i];
    return sqrt(d / r);
}

/* Runs all prompts in one step, a batch of mixed lengths, in pages that the test chooses. Some rows
 * ask for logits. */
static void eng_check_logits(toka *t, const char *name, const json *cases, const char *bin, int V) {
    enum { ROWS = 1024, CASES = 16 };
    eng *g = t->engine;
    toka_err e = {0};
    int32_t id[ROWS], pos[ROWS], kv_slot[ROWS], pages[ROWS], at[8];
    toka_span spans[CASES];
    toka_sample_row out[8 * CASES];
    toka_step s = {.ids = id, .pos = pos, .kv_slot = kv_slot, .pages = pages, .spans = spans, .samples = out};
    /* scattered over the pool: 7 and 251 are coprime */
    for (int i = 0; i < ROWS; i++) pages[i] = (int32_t)((i * 7 + 3) % 251);
    int page = 0;
    JSON_EACH(it, cases) {
        int n = eng_int_array(json_get(it, "prompt_ids"), id + s.T, ROWS - s.T);
        int m = eng_int_array(json_get(it, "logit_positions"), at, 8);
        for (int i = 0; i < m; i++) out[s.n_samples++] = (toka_sample_row){.row = s.T + at[i], .scored_id = 0};
        spans[s.n_spans++] = (toka_span){s.T, n, page, 0, n};
        for (int p = 0; p < n; p++, s.T++) pos[s.T] = p,
            kv_slot[s.T] = pages[page + p / toka_cpu.page_tok] * toka_cpu.page_tok + p % toka_cpu.page_tok;
        page += (n + toka_cpu.page_tok - 1) / toka_cpu.page_tok;
    }
    float *logits = mem_alloc((size_t)s.n_samples * V * sizeof(float)), *want = mem_alloc((size_t)V * sizeof(float)), *row = logits;
    s.logits = logits;
    CHECK(g->replicas[0].sched.config.n_pages >= 251 && model_run_step(&g->replicas[0].model, &s, g->replicas[0].inflight[0].results, &e) == 0);
    int n_case = 0;
    JSON_EACH(it, cases) {
        const char *gold = bin + json_int(json_get(it, "logits_offset"), 0);
        int m = eng_int_array(json_get(it, "logit_positions"), at, 8);
        for (int i = 0; i < m; i++, gold += (size_t)V * 4, row += V) {
            memcpy(want, gold, (size_t)V * 4);
            double err = eng_rel_l2(row, want, V);
            CHECK_MSG(err <= 1e-4, "%s case %d position %d: relative L2 %.3g", name, n_case, (int)at[i], err);
        }
        n_case++;
    }
    free(logits), free(want);
}

static void eng_check_greedy(toka *t, const char *name, const json *cases) {
    int32_t prompt[512], want[64];
    int n_case = 0;
    JSON_EACH(it, cases) {
        toka_err e = {0};
        int n = eng_int_array(json_get(it, "prompt_ids"), prompt, 512), m = eng_int_array(json_get(it, "greedy_ids"), want, 64), code;
        toka_sampling s = eng_greedy(m);
        s.ignore_eos = 1;
        eng_collected *g = eng_ask(t, NULL, prompt, (size_t)n, 1, &s, &code, &e);
        CHECK_MSG(code == 0, "%s: %s", name, e.msg);
        CHECK_MSG((int)g->id[0].n == m && !memcmp(g->id[0].p, want, (size_t)m * 4), "%s case %d: greedy ids differ", name, n_case);
        n_case++;
        eng_collected_free(g);
    }
}

static void eng_fixture(const char *name) {
    char path[300];
    arena a = {0};
    str text, bin;
    snprintf(path, sizeof path, "test/fixtures/%s/golden.json", name);
    const json *golden = eng_parse_file(&a, path, &text), *cases = json_get(golden, "cases");
    snprintf(path, sizeof path, "test/fixtures/%s/golden.bin", name);
    bin = read_copy(path);
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    toka *whole = eng_must_open(path, 64, 1024, 2), *chunked = eng_must_open(path, 1, 7, 1);
    CHECK(whole->shape.V == json_int(json_get(golden, "vocab"), 0));
    eng_check_logits(whole, name, cases, bin.p, whole->shape.V);
    eng_check_greedy(whole, name, cases);
    eng_check_greedy(chunked, name, cases); /* prefill in chunks of 7 tokens, on one thread */
    toka_close(whole), toka_close(chunked);
    free((void *)text.p), free((void *)bin.p);
    arena_free(&a);
}

static void test_fixtures(void) {
    DIR *d = opendir("test/fixtures");
    int n = 0;
    CHECK(d != NULL);
    for (struct dirent *it; d && (it = readdir(d));)
        if (it->d_name[0] != '.') eng_fixture(it->d_name), n++;
    if (d) closedir(d);
    CHECK(n >= 12);
}

/* ---- The small real weights of the public data ---- */

static void eng_check_golden(toka *t, const char *name, const json *golden) {
    int32_t prompt[512], want[512];
    JSON_EACH(it, golden) {
        toka_err e = {0};
        int code, n = eng_int_array(json_get(it, "prompt_ids"), prompt, 512), m = eng_int_array(json_get(it, "greedy_ids"), want, 512);
        str p = json_str(json_get(it, "prompt")), text = json_str(json_get(it, "greedy_text"));
        toka_sampling s = eng_greedy(m);
        char *z = mem_zalloc(p.n + 1);
        memcpy(z, p.p, p.n);
        eng_collected *g = eng_ask(t, z, NULL, 0, 1, &s, &code, &e);
        CHECK_MSG(code == 0, "%s: %s", name, e.msg);
        CHECK_MSG((int)g->id[0].n == m && !memcmp(g->id[0].p, want, (size_t)m * 4), "%s '%s': ids differ", name, z);
        str got = buf_view(&g->text[0]);
        CHECK_MSG(str_ends(got, text) || str_ends(text, got), "%s '%s': text differs: %.*s", name, z, STRF(got));
        int32_t *enc = NULL;
        size_t n_enc = 0;
        CHECK(!toka_encode(t, z, p.n, TOKA_ADD_SPECIAL, &enc, &n_enc, &e));
        CHECK_MSG((int)n_enc == n && !memcmp(enc, prompt, n_enc * 4), "%s '%s': prompt ids differ", name, z);
        free(enc), free(z), eng_collected_free(g);
    }
}

static void test_real_weights(void) {
    static const char *const names[] = {"stories260K", "babyllama-tok105"};
    for (int i = 0; i < COUNT(names); i++) {
        char folder[64], file[80];
        snprintf(folder, sizeof folder, "weights/%s", names[i]);
        snprintf(file, sizeof file, "%s/golden.json", folder);
        if (!data_path(file)) {
            SKIP(1, "no public test data");
            continue;
        }
        arena a = {0};
        str text;
        toka *t = eng_must_open(data_path(folder), 8, 64, 2);
        eng_check_golden(t, names[i], eng_parse_file(&a, data_path(file), &text));
        toka_close(t);
        free((void *)text.p);
        arena_free(&a);
    }
}

/* ---- The embedded model ---- */

static const char eng_model[] = "test/model";

/* The ids of a problem in the model's chat template; the caller frees them. */
static int32_t *eng_problem_ids(toka *t, str problem, size_t *n) {
    buf chat = {0};
    char *prompt = NULL;
    size_t bytes = 0;
    toka_err e = {0};
    buf_c(&chat, "{\"messages\":[");
    api_put_text_message(&chat, "user", problem);
    buf_c(&chat, "],\"add_generation_prompt\":true}");
    CHECK_MSG(toka_apply_chat_template(t, chat.p, chat.n, NULL, &prompt, &bytes, &e) == 0, "%s", e.msg);
    int32_t *v = NULL;
    CHECK(toka_encode(t, prompt, bytes, TOKA_PARSE_SPECIAL, &v, n, &e) == 0);
    free(prompt), buf_free(&chat);
    return v;
}
/* Sends a problem to the model through its chat template. */
static eng_collected *eng_ask_problem(toka *t, str problem, int n, const toka_sampling *s) {
    size_t n_v = 0;
    toka_err e = {0};
    int code;
    int32_t *v = eng_problem_ids(t, problem, &n_v);
    eng_collected *g = eng_ask(t, NULL, v, n_v, n, s, &code, &e);
    CHECK_MSG(code == 0, "%s", e.msg);
    free(v);
    return g;
}

/* The last number in an answer. */
static long eng_answer(str text) {
    size_t i = text.n;
    while (i && !isdigit((unsigned char)text.p[i - 1])) i--;
    size_t end = i;
    while (i && isdigit((unsigned char)text.p[i - 1])) i--;
    char z[32] = "";
    if (end - i < sizeof z) memcpy(z, text.p + i, end - i);
    return *z ? atol(z) : LONG_MIN;
}

/* Prompts as text and as ids, with the greedy answers of transformers in float32. */
static void test_embedded_golden(void) {
    arena a = {0};
    str file;
    int32_t prompt[512], want[512];
    toka *t = eng_must_open(eng_model, 8, 64, 2);
    const json *cases = json_get(eng_parse_file(&a, "test/model/golden.json", &file), "cases");
    CHECK(json_is(cases, JSON_ARRAY) && cases->n >= 20);
    JSON_EACH(it, cases) {
        toka_err e = {0};
        str text = json_str(json_get(it, "prompt_text")), answer = json_str(json_get(it, "text"));
        int n = eng_int_array(json_get(it, "prompt_ids"), prompt, 512), m = eng_int_array(json_get(it, "greedy_ids"), want, 512), code;
        toka_sampling s = eng_greedy(0);
        ids v = {0};
        CHECK(!tok_encode(t->tokenizer, text, TOKA_PARSE_SPECIAL, &v, &e));
        CHECK_MSG((int)v.n == n && !memcmp(v.p, prompt, v.n * 4), "prompt ids differ: %.*s", STRF(text));
        eng_collected *g = eng_ask(t, NULL, prompt, (size_t)n, 1, &s, &code, &e);
        CHECK_MSG((int)g->id[0].n == m && !memcmp(g->id[0].p, want, (size_t)m * 4), "greedy ids differ: %.*s", STRF(text));
        CHECK_MSG(str_starts(answer, buf_view(&g->text[0])) && answer.n - g->text[0].n < 40, "text differs: %.*s", STRF(answer));
        ids_free(&v), eng_collected_free(g);
    }
    free((void *)file.p);
    arena_free(&a);
    toka_close(t);
}

static void test_embedded_accuracy(void) {
    toka *t = eng_must_open(eng_model, 64, 512, 0);
    str lines = read_copy("test/model/heldout.jsonl");
    toka_sampling s = eng_greedy(160);
    int n = 0, right = 0, limit = SANITIZED ? 10 : 500;
    for (size_t at = 0, end; at < lines.n && n < limit; at = end + 1) {
        arena a = {0};
        toka_err e;
        ptrdiff_t nl = str_find(lines, STR("\n"), at);
        end = nl < 0 ? lines.n : (size_t)nl;
        const json *v = json_parse(&a, str_sub(lines, at, end), json_trusted, &e);
        const json *answer = json_get(v, "answer");
        eng_collected *g = eng_ask_problem(t, json_str(json_get(v, "prompt")), 1, &s);
        long want = json_is(answer, JSON_STRING) ? eng_answer(json_str(answer)) : (long)json_int(answer, -1);
        right += eng_answer(buf_view(&g->text[0])) == want && g->finish[0] == TOKA_STOP;
        n++;
        eng_collected_free(g);
        arena_free(&a);
    }
    printf("embedded model: %d of %d held-out problems right, greedy\n", right, n);
    CHECK(n >= limit);
    CHECK_MSG(right >= (SANITIZED ? 8 * n / 10 : 95 * n / 100), "%d of %d", right, n);
    toka_close(t);
    free((void *)lines.p);
}

/* ---- The life of a request, on the embedded model ---- */

static const char eng_problem[] = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?";

static void test_request_ends(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(0);
    eng_collected *whole = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    str text = buf_view(&whole->text[0]);
    CHECK(whole->finish[0] == TOKA_STOP && whole->stop_id[0] >= 0 && text.n > 8);

    s.max_tokens = 5; /* ends by length; the text begins as before */
    eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK(g->finish[0] == TOKA_LENGTH && g->id[0].n == 5 && !memcmp(g->id[0].p, whole->id[0].p, 20) && g->stop_id[0] == -1);
    CHECK(str_starts(text, buf_view(&g->text[0])));
    eng_collected_free(g);

    /* a stop string from the middle of the text, so that it spans several tokens */
    char word[8] = {0};
    memcpy(word, text.p + text.n / 2, 5);
    const char *stops[] = {"never to be seen", word};
    s = eng_greedy(0), s.stop = stops, s.n_stop = 2;
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    size_t cut = (size_t)str_find(text, str_c(word), 0);
    CHECK(g->finish[0] == TOKA_STOP && g->stop_id[0] == -1 && str_eq(buf_view(&g->text[0]), str_sub(text, 0, cut)));
    eng_collected_free(g);
    s.include_stop = 1;
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK(str_eq(buf_view(&g->text[0]), str_sub(text, 0, cut + 5)));
    eng_collected_free(g);

    /* a stop id: its text is not output */
    s = eng_greedy(0), s.stop_ids = &whole->id[0].p[3], s.n_stop_ids = 1;
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK(g->finish[0] == TOKA_STOP && g->stop_id[0] == whole->id[0].p[3] && g->id[0].n <= 4);
    size_t n_before = g->text[0].n;
    eng_collected_free(g);
    s.include_stop = 1; /* unless the request asks for it */
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK(g->stop_id[0] == whole->id[0].p[3] && g->text[0].n > n_before && str_starts(text, buf_view(&g->text[0])));
    eng_collected_free(g);

    /* min_tokens and ignore_eos continue after the natural end */
    int longer = (int)whole->id[0].n + 6;
    s = eng_greedy(longer + 10), s.min_tokens = longer;
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK((int)g->id[0].n >= longer);
    for (int i = 0; i < longer - 1; i++)
        for (int k = 0; k < t->files->config.n_eos_ids; k++) CHECK(g->id[0].p[i] != t->files->config.eos_ids[k]);
    eng_collected_free(g);
    s = eng_greedy(longer), s.ignore_eos = 1;
    g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK((int)g->id[0].n == longer && g->finish[0] == TOKA_LENGTH && !memcmp(g->id[0].p, whole->id[0].p, whole->id[0].n * 4));
    eng_collected_free(g);
    eng_collected_free(whole);
    toka_close(t);
}

/* Equal seeds give equal samples, for any number of concurrent sequences, prefill chunk size and
 * number of threads. */
static void test_reproducible(void) {
    static const struct {
        int seqs, tokens, threads;
    } set[] = {{64, 512, 2}, {1, 1, 1}, {3, 5, 2}, {7, 64, 1}};
    eng_collected *first = NULL;
    toka_sampling s = eng_greedy(40);
    s.temperature = 3, s.seed = 77, s.top_p = 0.99f;
    for (int k = 0; k < COUNT(set); k++) {
        toka *t = eng_must_open(eng_model, set[k].seqs, set[k].tokens, set[k].threads);
        eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 12, &s);
        CHECK(g->n_ended == 12);
        for (int i = 0; i < 12 && first; i++) {
            CHECK(first->id[i].n == g->id[i].n && !memcmp(first->id[i].p, g->id[i].p, g->id[i].n * 4));
            /* equal to the last bit */
            CHECK(!memcmp(first->logprob[i], g->logprob[i], sizeof g->logprob[i]));
        }
        if (first) eng_collected_free(g);
        else first = g;
        toka_close(t);
    }
    int differ = 0;
    for (int i = 1; i < 12; i++) differ += !str_eq(buf_view(&first->text[i]), buf_view(&first->text[0]));
    CHECK(differ > 0); /* samples differ from each other */
    /* without log-probabilities in the request there are none, and the samples are equal */
    toka *t = eng_must_open(eng_model, 7, 64, 2);
    s.logprobs = TOKA_NO_LOGPROBS;
    eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 12, &s);
    for (int i = 0; i < 12; i++) {
        CHECK(first->id[i].n == g->id[i].n && !memcmp(first->id[i].p, g->id[i].p, g->id[i].n * 4));
        CHECK(!memcmp(first->sampled[i], g->sampled[i], sizeof g->sampled[i]) && g->n_top == 0);
        for (size_t k = 0; k < g->id[i].n; k++) CHECK(isnan(g->logprob[i][k]) && !isnan(first->logprob[i][k]));
    }
    toka_close(t);
    eng_collected_free(g), eng_collected_free(first);
}

static void test_greedy_samples_equal(void) {
    toka *t = eng_must_open(eng_model, 5, 33, 2);
    toka_sampling s = eng_greedy(0);
    eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 17, &s);
    for (int i = 1; i < 17; i++) CHECK(str_eq(buf_view(&g->text[i]), buf_view(&g->text[0])));
    CHECK(g->n_ended == 17);
    eng_collected_free(g);
    toka_close(t);
}

/* Scoring a generated text gives the same log-probabilities as its generation did. */
static void test_score(void) {
    toka *t = eng_must_open(eng_model, 4, 16, 2);
    toka_err e = {0};
    toka_sampling s = eng_greedy(30);
    int32_t *v = NULL, all[512];
    size_t n = 0;
    int code;
    CHECK(!toka_encode(t, eng_problem, strlen(eng_problem), TOKA_ADD_SPECIAL, &v, &n, &e));
    s.temperature = 1, s.seed = 5, s.logprobs = 3;
    eng_collected *g = eng_ask(t, NULL, v, n, 1, &s, &code, &e);
    CHECK(code == 0 && g->n_top == 3);
    memcpy(all, v, n * 4), memcpy(all + n, g->id[0].p, g->id[0].n * 4);
    float lp[512];
    CHECK(!toka_score(t, all, n + g->id[0].n, lp, &e));
    for (size_t i = 0; i < g->id[0].n; i++) CHECK(fabsf(lp[n + i] - g->logprob[0][i]) <= 1e-5f);
    eng_collected_free(g), free(v);
    toka_close(t);
}

static void test_request_errors(void) {
    toka *t = eng_must_open(eng_model, 4, 16, 1);
    toka_err e = {0};
    toka_sampling s = eng_greedy(4), bad = s;
    int code, n_long = t->shape.max_len;
    int32_t wrong[] = {1, 1 << 30}, *much = mem_zalloc((size_t)n_long * 4);
    eng_collected_free(eng_ask(t, NULL, wrong, 2, 1, &s, &code, &e));
    CHECK(code == TOKA_E_USE && strstr(e.msg, "token 1"));
    eng_collected_free(eng_ask(t, NULL, much, (size_t)n_long, 1, &s, &code, &e));
    CHECK(code == TOKA_E_USE && strstr(e.msg, "max_model_len"));
    eng_collected_free(eng_ask(t, NULL, wrong, SIZE_MAX, 1, &s, &code, &e));
    CHECK(code == TOKA_E_USE && strstr(e.msg, "max_model_len"));
    eng_collected_free(eng_ask(t, NULL, wrong, 1, 0, &s, &code, &e));
    CHECK(code == TOKA_E_USE);
    bad.top_p = 2;
    eng_collected_free(eng_ask(t, NULL, wrong, 1, 1, &bad, &code, &e));
    CHECK(code == TOKA_E_USE && strstr(e.msg, "top_p"));
    /* cancelled from the callback; the next request works */
    eng_collected *g = mem_zalloc(sizeof *g);
    toka_request r = toka_request_default();
    r.ids = wrong, r.n_ids = 1, r.n = 6, r.sampling = eng_greedy(50), r.sampling.ignore_eos = 1;
    g->cancel_after = 9;
    CHECK(toka_generate(t, &r, eng_collect, g, NULL, &e) == TOKA_E_CANCELLED && g->n_events == 9);
    CHECK(g->n_ended == 6 && g->n_cancelled == 6);
    eng_collected_free(g);
    CHECK(kv_n_available(&t->engine->replicas[0].sched.kv) == t->engine->replicas[0].sched.config.n_pages && !t->engine->n_active && !sched_check(&t->engine->replicas[0].sched));
    g = eng_ask(t, NULL, wrong, 1, 2, &s, &code, &e);
    CHECK(code == 0 && g->n_ended == 2);
    eng_collected_free(g);
    toka_close(t), free(much);
}

/* ---- Many requests at once, from many threads ---- */

typedef struct eng_thread {
    toka *t;
    int no;
    bool ok;
} eng_thread;

static char *eng_thread_prompt(int no) {
    char *z = mem_alloc(128);
    snprintf(z, 128, "Tom has %d apples. He buys %d more apples. How many apples does Tom have now?", 3 + no * 7, 2 + no);
    return z;
}

static void *eng_thread_main(void *arg) {
    eng_thread *me = arg;
    char *problem = eng_thread_prompt(me->no);
    toka_sampling s = eng_greedy(60);
    for (int i = 0; i < 5; i++) {
        eng_collected *g = eng_ask_problem(me->t, str_c(problem), 1 + i, &s);
        for (int k = 0; k <= i; k++) me->ok &= eng_answer(buf_view(&g->text[k])) == 5 + me->no * 8;
        me->ok &= g->n_ended == 1 + i;
        eng_collected_free(g);
    }
    free(problem);
    return NULL;
}

static void test_threads(void) {
    enum { N = 6 };
    toka *t = eng_must_open(eng_model, 5, 40, 2);
    pthread_t thread[N];
    eng_thread arg[N];
    for (int i = 0; i < N; i++) {
        arg[i] = (eng_thread){t, i, true};
        CHECK(!pthread_create(&thread[i], NULL, eng_thread_main, &arg[i]));
    }
    for (int i = 0; i < N; i++) CHECK(!pthread_join(thread[i], NULL) && arg[i].ok);
    toka_stats s = toka_get_stats(t);
    CHECK(s.requests_done == 5 * N && !s.running && !s.waiting && !sched_check(&t->engine->replicas[0].sched));
    toka_close(t);
}

static void *eng_run_forever(void *arg) {
    toka_err e;
    CHECK(toka_run(arg, 1, &e) == 0);
    return NULL;
}

static int eng_count(void *user, const toka_event *ev) {
    int *count = user; /* [0] ended samples, [1] cancelled samples, [2] tokens */
    count[0] += ev->finish != TOKA_RUNNING, count[1] += ev->finish == TOKA_CANCELLED, count[2] += ev->id >= 0;
    return 0;
}

static void *eng_run_out(void *arg) {
    toka_err e;
    CHECK(toka_run(arg, 0, &e) == 0);
    return NULL;
}

static void *eng_one_of_many(void *arg) {
    eng_thread *me = arg;
    int32_t prompt[] = {5 + me->no % 40, 6, 7};
    toka_sampling s = eng_greedy(40);
    s.ignore_eos = 1;
    toka_err e;
    int code;
    eng_collected *g = eng_ask(me->t, NULL, prompt, 3, 1, &s, &code, &e);
    me->ok = !code && g->n_ended == 1;
    eng_collected_free(g);
    return NULL;
}

/* Threads in toka_generate sleep until their own requests end. Steps and the ends of other requests
 * do not wake them. */
static void test_many_threads(void) {
    enum { N = SANITIZED ? 100 : 300 };
    toka *t = eng_must_open(eng_model, N, 2 * N, 1);
    static pthread_t thread[N];
    static eng_thread arg[N];
    struct rusage before, after;
    getrusage(RUSAGE_SELF, &before);
    for (int i = 0; i < N; i++) {
        arg[i] = (eng_thread){t, i, false};
        CHECK(!pthread_create(&thread[i], NULL, eng_one_of_many, &arg[i]));
    }
    for (int i = 0; i < N; i++) CHECK(!pthread_join(thread[i], NULL) && arg[i].ok);
    getrusage(RUSAGE_SELF, &after);
    const long sleeps = after.ru_nvcsw - before.ru_nvcsw;
    /* if each of the 40 steps woke all threads: over 40 * N. On a busy machine locks are waited for, too */
    CHECK_MSG(sleeps < 20 * N, "%ld times a thread went to sleep, of %d", sleeps, N);
    CHECK(!t->engine->waiters);
    toka_close(t);
}

/* A thread that runs steps until no work is left must notice the end, even if another thread made
 * the last step. When the driver leaves, a sleeping thread must take over. */
static void test_drivers_leave(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    int32_t prompt[] = {5, 6, 7};
    alarm(300); /* a thread that is not woken would sleep forever */
    for (int round = 0; round < (SANITIZED ? 10 : 20); round++) {
        pthread_t forever, out[2], askers[2];
        eng_thread arg[2] = {{t, 0, false}, {t, 1, false}};
        int count[3] = {0};
        toka_err e;
        toka_request r = toka_request_default();
        r.ids = prompt, r.n_ids = 3, r.sampling = eng_greedy(60), r.sampling.ignore_eos = 1;
        CHECK(!toka_submit(t, &r, eng_count, count, NULL, &e));
        CHECK(!pthread_create(&forever, NULL, eng_run_forever, t));
        for (int i = 0; i < 2; i++) {
            CHECK(!pthread_create(&out[i], NULL, eng_run_out, t));
            CHECK(!pthread_create(&askers[i], NULL, eng_one_of_many, &arg[i]));
        }
        if (round % 2) usleep(100 * (unsigned)round), toka_stop(t);
        for (int i = 0; i < 2; i++) CHECK(!pthread_join(out[i], NULL));
        for (int i = 0; i < 2; i++) CHECK(!pthread_join(askers[i], NULL) && arg[i].ok);
        CHECK(count[0] == 1);
        toka_stop(t);
        CHECK(!pthread_join(forever, NULL));
        t->engine->stopping = false;
    }
    alarm(0);
    toka_close(t);
}

/* One thread drives; this one submits and cancels. Every sample ends exactly once. */
static void test_submit_cancel(void) {
    enum { N = 24, SAMPLES = 7, TOKENS = 16 };
    toka *t = eng_must_open(eng_model, 16, 64, 1);
    pthread_t driver;
    CHECK(!pthread_create(&driver, NULL, eng_run_forever, t));
    int count[N][3] = {0};
    int64_t id[N];
    uint64_t seed = 99;
    toka_err e;
    for (int i = 0; i < N; i++) {
        toka_request r = toka_request_default();
        char *prompt = eng_thread_prompt(i % 6);
        r.text = prompt, r.text_bytes = strlen(prompt), r.n = SAMPLES, r.sampling = eng_greedy(TOKENS), r.sampling.ignore_eos = 1;
        r.priority = (int)(rnd(&seed) % 3) - 1;
        CHECK(!toka_submit(t, &r, eng_count, count[i], &id[i], &e));
        memset(prompt, 'x', strlen(prompt)); /* the engine has copied all of it */
        free(prompt);
        if (i % 3 == 0) toka_cancel(t, id[rnd(&seed) % (uint64_t)(i + 1)]);
        if (i % 5 == 0) usleep(2000);
    }
    toka_cancel(t, 123456789); /* no request has this id */
    for (toka_stats s = {.waiting = 1}; s.requests_done < N; s = toka_get_stats(t)) usleep(1000);
    toka_stop(t);
    CHECK(!pthread_join(driver, NULL));
    for (int i = 0; i < N; i++) {
        CHECK_MSG(count[i][0] == SAMPLES, "request %d: %d ends", i, count[i][0]);
        CHECK(count[i][1] == SAMPLES || count[i][2] == TOKENS * SAMPLES || count[i][1] > 0);
    }
    CHECK(kv_n_available(&t->engine->replicas[0].sched.kv) == t->engine->replicas[0].sched.config.n_pages && !sched_check(&t->engine->replicas[0].sched));
    toka_close(t);
}

/* ---- A device that fails, an engine that is closed or stopped ---- */

static int eng_steps_left;

static int eng_faulty_status(toka_device *d, toka_err *e) {
    if (eng_steps_left-- > 0) return toka_cpu.status(d, e);
    return fail(e, TOKA_E_DEVICE, "injected fault");
}

static void *eng_fault_main(void *arg) {
    eng_thread *me = arg;
    int32_t prompt[] = {5, 6, 7};
    toka_sampling s = eng_greedy(100);
    toka_err e = {0};
    int code;
    s.ignore_eos = 1;
    eng_collected *g = eng_ask(me->t, NULL, prompt, 3, 3, &s, &code, &e);
    me->ok = code == TOKA_E_DEVICE && strstr(e.msg, "injected");
    /* either refused at once, or all samples have ended */
    for (int i = 0; i < 3; i++) me->ok &= g->n_events == 0 || g->n_ended == 3;
    eng_collected_free(g);
    return NULL;
}

/* All requests of all threads fail with the device's error, each sample once. Later requests are
 * refused. */
static void test_device_fault(void) {
    enum { N = 4 };
    toka *t = eng_must_open(eng_model, 16, 64, 1);
    toka_backend faulty = toka_cpu;
    faulty.status = eng_faulty_status, eng_steps_left = 5;
    t->engine->replicas[0].model.backend = &faulty;
    pthread_t thread[N];
    eng_thread arg[N];
    for (int i = 0; i < N; i++) {
        arg[i] = (eng_thread){t, i, false};
        CHECK(!pthread_create(&thread[i], NULL, eng_fault_main, &arg[i]));
    }
    for (int i = 0; i < N; i++) CHECK(!pthread_join(thread[i], NULL) && arg[i].ok);
    int32_t prompt[] = {5, 6};
    float logprobs[2];
    toka_err e = {0};
    CHECK(toka_score(t, prompt, 2, logprobs, &e) == TOKA_E_DEVICE && toka_run(t, 1, &e) == TOKA_E_DEVICE);
    toka_close(t);
}

static atomic_int eng_not_interrupted;

/* Reads a results file and counts its lines. The last line must be complete. */
static buf eng_read_lines(const char *path, int *n_lines) {
    str text;
    toka_err e;
    buf b = {0};
    *n_lines = 0;
    CHECK_MSG(!os_map(path, &text, &e), "%s", e.msg);
    buf_str(&b, text);
    os_unmap(text);
    for (size_t i = 0; i < b.n; i++) *n_lines += b.p[i] == '\n';
    CHECK(!b.n || b.p[b.n - 1] == '\n');
    return b;
}

static bool eng_has_line_once(str all, str line) {
    ptrdiff_t at = str_find(all, line, 0);
    return at >= 0 && str_find(all, line, (size_t)at + 1) < 0;
}

/* A device fails twice during a batch. The batch ends with the device's error. The results file has
 * complete lines and no error record. The same command on a working device adds the rest, so each
 * line is there once, as in a run without a fault. */
static void test_batch_device_fault(void) {
    enum { N = 12 };
    char folder[] = "/tmp/toka_fault_XXXXXX", in[64], out[64], clean[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(in, sizeof in, "%s/in.jsonl", folder), snprintf(out, sizeof out, "%s/out.jsonl", folder);
    snprintf(clean, sizeof clean, "%s/clean.jsonl", folder);
    FILE *f = fopen(in, "w");
    for (int i = 0; i < N && f; i++)
        fprintf(f, "{\"prompt\":\"Tom has %d apples\",\"n\":2,\"temperature\":1.5,\"max_tokens\":10}\n", i);
    CHECK(f && !fclose(f));
    run_options o = {.in = in, .out = clean, .defaults = toka_request_default(), .quiet = true, .interrupted = &eng_not_interrupted};
    toka_backend faulty = toka_cpu;
    faulty.status = eng_faulty_status;
    toka_err e = {0};
    int n_lines, before = 0;
    /* no fault; two runs with a fault after some steps; no fault */
    for (int run = 0; run < 4; run++) {
        toka *t = eng_must_open(eng_model, 8, 64, 2);
        bool fault = run == 1 || run == 2;
        eng_steps_left = 14;
        if (fault) t->engine->replicas[0].model.backend = &faulty;
        int code = run_batch(t, &o, &e);
        CHECK_MSG(fault ? code == TOKA_E_DEVICE && strstr(e.msg, "injected fault") : !code, "run %d: %d, %s", run, code, e.msg);
        buf b = eng_read_lines(o.out, &n_lines);
        CHECK(!memmem(b.p ? b.p : "", b.n, "\"code\"", 6)); /* no error record */
        int min_lines = run == 2 ? before + 1 : fault ? 1 : N;
        CHECK_MSG(n_lines >= min_lines && n_lines <= N - fault, "run %d: %d lines", run, n_lines);
        before = n_lines;
        buf_free(&b);
        toka_close(t);
        o.out = out;
    }
    buf want = eng_read_lines(clean, &n_lines), got = eng_read_lines(out, &n_lines);
    for (size_t i = 0, end; i < want.n; i = end) {
        end = (size_t)((char *)memchr(want.p + i, '\n', want.n - i) - want.p) + 1;
        CHECK(eng_has_line_once(buf_view(&got), str_sub(buf_view(&want), i, end)));
    }
    CHECK(want.n == got.n);
    buf_free(&want), buf_free(&got);
    CHECK(!unlink(in) && !unlink(out) && !unlink(clean) && !rmdir(folder));
}

/* The system does not start the first or the second thread of a batch. No request may stay in the
 * engine. */
static void test_batch_no_threads(void) {
    enum { N = 200 };
    char folder[] = "/tmp/toka_threads_XXXXXX", in[64], out[64];
    CHECK(mkdtemp(folder) != NULL);
    snprintf(in, sizeof in, "%s/in.jsonl", folder), snprintf(out, sizeof out, "%s/out.jsonl", folder);
    FILE *f = fopen(in, "w");
    for (int i = 0; i < N && f; i++) fprintf(f, "{\"prompt\":\"Tom has %d apples\",\"max_tokens\":2}\n", i);
    CHECK(f && !fclose(f));
    run_options o = {.in = in, .out = out, .defaults = toka_request_default(), .quiet = true, .interrupted = &eng_not_interrupted};
    for (int left = 0; left < 3; left++) {
        toka *t = eng_must_open(eng_model, 8, 64, 1);
        toka_err e = {0};
        unit_threads_left = left;
        int code = run_batch(t, &o, &e);
        unit_threads_left = -1;
        CHECK_MSG(left < 2 ? code == TOKA_E_IO && strstr(e.msg, "cannot start a thread") : !code, "%d: %d, %s", left, code, e.msg);
        CHECK(!t->engine->n_active && !t->engine->inbox);
        int n_lines;
        buf b = eng_read_lines(out, &n_lines);
        CHECK_MSG(n_lines == (left < 2 ? 0 : N), "%d: %d lines", left, n_lines);
        buf_free(&b);
        toka_close(t);
    }
    CHECK(!unlink(in) && !unlink(out) && !rmdir(folder));
}

/* A request succeeds if all its events came, even if the next step fails. Otherwise it fails with
 * the device's error. */
static void test_fault_after_the_end(void) {
    /* it ends by itself: by then the step after its last one is in flight */
    const toka_sampling s = eng_greedy(0);
    int n_whole = 0;
    for (int step = 1; n_whole < 3 && step < 100; step++) {
        char text[16];
        toka_err e = {0};
        int code;
        snprintf(text, sizeof text, "%d", step);
        setenv("TOKA_DEBUG_FAULT", text, 1);
        toka *t = eng_must_open(eng_model, 4, 64, 1);
        unsetenv("TOKA_DEBUG_FAULT");
        eng_collected *g = eng_ask(t, eng_problem, NULL, 0, 1, &s, &code, &e);
        CHECK_MSG(code == (g->n_cancelled ? TOKA_E_DEVICE : 0), "step %d: %d", step, code);
        CHECK(g->n_ended == 1 && (g->n_cancelled || g->finish[0] == TOKA_STOP));
        n_whole += !g->n_cancelled;
        eng_collected_free(g);
        toka_close(t);
    }
    CHECK(n_whole == 3);
}

typedef struct eng_resubmit { /* a request that is submitted again when it is cancelled */
    toka *t;
    int n_ended, n_refused;
} eng_resubmit;

static int eng_resubmit_on_cancel(void *user, const toka_event *ev) {
    eng_resubmit *a = user;
    toka_request r = toka_request_default();
    toka_err e = {0};
    int64_t id;
    a->n_ended += ev->finish != TOKA_RUNNING;
    if (ev->finish == TOKA_CANCELLED) a->n_refused += toka_submit(a->t, &r, eng_resubmit_on_cancel, a, &id, &e) == TOKA_E_CANCELLED;
    return 0;
}

static void test_close_and_stop(void) {
    toka *t = eng_must_open(eng_model, 4, 16, 1);
    eng_resubmit resubmit = {.t = t};
    int32_t prompt[] = {5, 6, 7};
    int count[2][3] = {0};
    int64_t id;
    toka_err e;
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 2, r.sampling = eng_greedy(5);
    CHECK(!toka_submit(t, &r, eng_count, count[0], &id, &e));
    toka_stop(t);
    CHECK(!toka_run(t, 1, &e) && count[0][0] == 0); /* stopped before it started */
    CHECK(!toka_run(t, 0, &e) && count[0][0] == 2 && count[0][1] == 0);
    CHECK(!toka_submit(t, &r, eng_count, count[1], NULL, &e)); /* the id pointer may be NULL */
    CHECK(!toka_submit(t, &r, eng_resubmit_on_cancel, &resubmit, &id, &e));
    toka_close(t);
    CHECK(count[1][0] == 2 && count[1][1] == 2);
    /* a request that was accepted now would never end */
    CHECK(resubmit.n_ended == 2 && resubmit.n_refused == 2);
}

/* A completion continues where the prompt ended: prompt and output together are the text of all
 * ids. */
static void test_text_continues(void) {
    if (!data_path("weights/stories260K")) {
        SKIP(1, "no public test data");
        return;
    }
    toka *t = eng_must_open(data_path("weights/stories260K"), 4, 64, 1);
    toka_sampling s = eng_greedy(12);
    toka_err e;
    int code;
    eng_collected *g = eng_ask(t, "Once upon", NULL, 0, 1, &s, &code, &e);
    CHECK_MSG(code == 0 && str_starts(buf_view(&g->text[0]), STR(" a time, there was")), "%s", g->text[0].p);
    eng_collected_free(g);
    g = eng_ask(t, "", NULL, 0, 1, &s, &code, &e);
    CHECK_MSG(code == 0 && str_starts(buf_view(&g->text[0]), STR("Once upon a time")), "%s", g->text[0].p);
    eng_collected_free(g);
    toka_close(t);
}

/* ---- A backend that cannot run a model ---- */

static int refuse_model(const toka_shape *shape, const toka_weights *weights, toka_err *e) {
    return fail(e, TOKA_E_INPUT, "layer %d of %d: experts", weights->layers ? 0 : -1, shape->L);
}
static int accept_model(const toka_shape *shape, const toka_weights *weights, toka_err *e) {
    (void)shape, (void)weights, (void)e;
    return 0;
}
static void test_backend_refuses(void) {
    toka_layer layer = {0};
    mf_model files = {.shape = {.L = 1}, .weights = {.layers = &layer}};
    toka_backend gpu = toka_cpu;
    gpu.supports = refuse_model;
    const char *const autos[] = {NULL, "auto"};
    for (int i = 0; i < COUNT(autos); i++) {
        toka t = {.files = &files};
        const toka_backend *backend = &gpu;
        toka_err e;
        CHECK(lib_check_backend(&t, autos[i], &backend, &e) == 0 && backend == &toka_cpu);
        CHECK(t.not_on_gpu.code == TOKA_E_INPUT && !strcmp(t.not_on_gpu.msg, "layer 0 of 1: experts"));
    }
    toka named = {.files = &files};
    const toka_backend *backend = &gpu;
    toka_err e;
    CHECK(lib_check_backend(&named, "cuda", &backend, &e) == TOKA_E_INPUT && strstr(e.msg, "device cuda: layer 0 of 1: experts"));
    gpu.supports = accept_model;
    toka t = {.files = &files};
    CHECK(lib_check_backend(&t, "auto", &backend, &e) == 0 && backend == &gpu && t.not_on_gpu.code == 0);
    gpu.supports = NULL;
    CHECK(lib_check_backend(&t, "cuda", &backend, &e) == 0 && backend == &gpu);
}

static bool eng_one_pool; /* eng_open_ahead: layers with a window have no pages of their own */

/* An engine on the CPU with another run-ahead. late: on the asynchronous backend of late.h. */
static toka *eng_open_ahead(toka_options o, int n_ahead, bool late) {
    static toka_backend be[2][ENG_MAX_IN_FLIGHT + 1];
    toka_backend *b = &be[late][n_ahead];
    toka *t;
    toka_err e;
    if (toka_open(&t, &o, &e)) printf("%s\n", e.msg), abort();
    eng_close(t->engine);
    /* a warm-up step would be counted by TOKA_DEBUG_FAULT */
    *b = late ? late_backend(n_ahead) : toka_cpu, b->has_windowed = !eng_one_pool, b->max_in_flight = n_ahead, b->warm_up = late && !getenv("TOKA_DEBUG_FAULT");
    t->shape = t->files->shape;
    setenv("TOKA_DEBUG_DRAFTS", "1", 1);
    if (eng_open(&t->engine, b, t->files, &t->shape, t->tokenizer, &o, &e)) printf("%s\n", e.msg), abort();
    unsetenv("TOKA_DEBUG_DRAFTS");
    return t;
}

enum { AHEAD_REQUESTS = 7 };
static bool eng_long_answers; /* eng_ask_mixed: answers are long, and few end early */

/* Runs requests of many kinds together: with penalties, bad words, stop strings, a constraint,
 * prompt scores, few and many samples. */
static void eng_ask_mixed(toka *t, eng_collected **got, eng_scores *scores) {
    static const char *const stop[] = {"6", " is"};
    static const int32_t bad[] = {300, 7};
    static const int lengths[] = {1, 1};
    toka_err e;
    int64_t id;
    for (int i = 0; i < AHEAD_REQUESTS; i++) {
        toka_request r = toka_request_default();
        toka_sampling *s = &r.sampling;
        const char *text = i % 2 ? "Tom has 12 apples and eats 3. How many are left?" : eng_problem;
        r.text = text, r.text_bytes = strlen(text), r.n = i == 3 ? 20 : 1 + i;
        s->max_tokens = eng_long_answers ? 70 : 10 + 9 * i, s->ignore_eos = eng_long_answers, s->temperature = i == 1 ? 0 : 1.5f, s->seed = (uint64_t)i;
        if (i == 2) s->repetition_penalty = 1.6f, s->presence_penalty = 0.5f, s->min_tokens = 12;
        if (i == 3) s->stop = stop, s->n_stop = 2, s->min_tokens = 3;
        if (i == 4) s->bad_ids = bad, s->bad_lengths = lengths, s->n_bad = 2, s->frequency_penalty = 1;
        const float end_bias = 9; /* it ends as soon as it may */
        if (i == 5) s->min_tokens = 15, s->bias_ids = t->files->config.eos_ids, s->bias_values = &end_bias, s->n_bias = 1;
        static const toka_grammar grammar = {.kind = TOKA_GRAMMAR_JSON_OBJECT};
        if (i == 6) CHECK_MSG(!toka_constraint_new(&s->constraint, t, &grammar, &e), "%s", e.msg);
        got[i] = mem_zalloc(sizeof **got);
        CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
        toka_constraint_del(s->constraint);
    }
    toka_request r = toka_request_default();
    r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = 0, r.prompt_logprobs = 1;
    CHECK(!toka_submit(t, &r, eng_on_score, scores, &id, &e));
    CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
}

static bool eng_close_to(const float *a, const float *b, size_t n, float max_error) {
    for (size_t i = 0; i < n; i++)
        if (!(fabsf(a[i] - b[i]) <= max_error)) return false;
    return true;
}

/* Makes a folder with the files of the embedded model; in its config.json `from` is replaced by `to`. folder: "/tmp/..._XXXXXX". */
static const char *const eng_links[] = {"model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"};
static void eng_derive(char *folder, const char *from, const char *to) {
    char path[128], target[PATH_MAX + 64], config[4096], cwd[PATH_MAX];
    CHECK(mkdtemp(folder) != NULL && getcwd(cwd, sizeof cwd) != NULL);
    FILE *in = fopen("test/model/config.json", "r");
    size_t n = in ? fread(config, 1, sizeof config - 1, in) : 0;
    CHECK(n > 100 && n < sizeof config - 1);
    if (in) fclose(in);
    config[n] = 0;
    char *place = strstr(config, from);
    snprintf(path, sizeof path, "%s/config.json", folder);
    FILE *out = fopen(path, "w");
    CHECK(place && out);
    if (!place || !out) return;
    fprintf(out, "%.*s%s%s", (int)(place - config), config, to, place + strlen(from));
    fclose(out);
    for (int i = 0; i < COUNT(eng_links); i++) {
        snprintf(path, sizeof path, "%s/%s", folder, eng_links[i]), snprintf(target, sizeof target, "%s/test/model/%s", cwd, eng_links[i]);
        CHECK(!symlink(target, path));
    }
}
static void eng_remove(const char *folder) {
    char path[128];
    for (int i = 0; i < COUNT(eng_links); i++) snprintf(path, sizeof path, "%s/%s", folder, eng_links[i]), unlink(path);
    snprintf(path, sizeof path, "%s/config.json", folder), unlink(path), rmdir(folder);
}

/* The first two of the embedded model's six layers: a draft model that is right now and then. */
static char eng_small_model[] = "/tmp/toka_small_XXXXXX";
static void eng_make_small(void) {
    strcpy(eng_small_model + strlen(eng_small_model) - 6, "XXXXXX");
    eng_derive(eng_small_model, "\"num_hidden_layers\": 6", "\"num_hidden_layers\": 2");
}

/* The number of steps in flight, replicas and ranks must not change any token or text.
 * Log-probabilities are equal, too, but tensor ranks sum in another order. windowed: the model has
 * windows, and all but the first engine give their pages back. */
static void ahead_compare(const char *model, bool windowed, const char *kv_dtype) {
    static const char ngram[] = "{\"method\":\"ngram\",\"num_speculative_tokens\":5,\"prompt_lookup_max\":3,\"prompt_lookup_min\":1}";
    static const char suffix[] = "{\"method\":\"suffix\",\"num_speculative_tokens\":16}";
    static const char eagle3[] = "{\"method\":\"eagle3\",\"model\":\"test/model_head\",\"num_speculative_tokens\":4}";
    static const struct {
        int n_ahead, dp, kv_tokens, tp, pp;
        bool late;
    } cases[] = {{1, 1, 0, 1, 1, false}, {2, 1, 0, 1, 1, false},   {4, 1, 0, 1, 1, false}, {2, 1, 192, 1, 1, false},
                 {3, 1, 192, 1, 1, true}, {4, 1, 192, 1, 1, false}, {1, 3, 0, 1, 1, false}, {2, 3, 192, 1, 1, false},
                 {2, 1, 0, 1, 1, true},  {4, 2, 0, 1, 1, false},   {2, 1, 0, 2, 1, false}, {4, 1, 192, 4, 1, false},
                 {2, 1, 192, 2, 3, true}, {1, 1, 0, 1, 2, false},   {2, 1, 0, 1, 3, false}, {4, 1, 192, 1, 4, false},
                 {2, 3, 192, 1, 1, true}, {1, 1, 0, 1, 1, true},    {2, 1, 192, 2, 2, false}, {2, 2, 192, 2, 2, false},
                 /* with drafts, of either kind in turn: */
                 {2, 1, 0, 1, 1, false}, {1, 1, 192, 1, 1, false},  {2, 2, 192, 1, 2, false}, {2, 1, 192, 1, 1, true},
                 {2, 3, 0, 1, 1, false}, {2, 1, 0, 2, 1, false},    {2, 1, 192, 1, 1, false}, {2, 1, 0, 1, 3, false},
                 /* with a draft model: */
                 {1, 1, 0, 1, 1, false}, {2, 1, 192, 1, 1, false},  {2, 2, 192, 2, 1, false}, {4, 3, 0, 1, 1, false},
                 {2, 1, 192, 1, 1, true}, {1, 2, 192, 1, 1, false},
                 /* with a head: */
                 {1, 1, 0, 1, 1, false}, {2, 1, 192, 1, 1, true},   {2, 2, 192, 1, 1, false}, {4, 3, 0, 1, 1, false},
                 {2, 1, 192, 1, 1, false}, {1, 2, 192, 1, 1, true}};
    eng_collected *want[AHEAD_REQUESTS] = {0}, *got[AHEAD_REQUESTS];
    float want_scores[512], scores[512];
    int64_t preempted = 0, accepted = 0, rejected = 0, by_head = 0;
    for (int k = 0; k < COUNT(cases); k++) {
        toka_options o = toka_options_default();
        o.model = model, o.n_threads = 1, o.max_num_seqs = windowed ? 12 : 24, o.max_num_batched_tokens = 40, o.max_model_len = 160;
        const int turn = k && windowed && kv_dtype ? 3 : 0; /* of those that FP8 allows below, two preempt */
        if (SANITIZED && k % (THREAD_SANITIZED && !windowed ? 8 : 4) != turn && k + 1 < COUNT(cases)) continue;
        if (windowed && k % 3 != 0) continue;
        /* what tensor ranks sum in another order may be rounded to another FP8 number */
        if (kv_dtype && (cases[k].tp > 1 || (!windowed && k % 2 != 0))) continue;
        o.kv_cache_dtype = kv_dtype;
        o.speculative_config = k < 20 ? NULL : k >= 34 ? eagle3 : k >= 28 ? "{\"num_speculative_tokens\":5}" : k % 2 ? suffix : ngram;
        o.draft_model = k >= 28 && k < 34 ? eng_small_model : NULL;
        o.data_parallel_size = cases[k].dp, o.kv_tokens = windowed && cases[k].kv_tokens ? 39 * 16 : cases[k].kv_tokens;
        o.tensor_parallel_size = cases[k].tp, o.pipeline_parallel_size = cases[k].pp;
        const float max_error = cases[k].tp > 1 ? 1e-3f : 0;
        eng_one_pool = windowed && !k;
        toka *t = eng_open_ahead(o, cases[k].n_ahead, cases[k].late);
        eng_one_pool = false;
        /* 12 sequences of 1 to 2 pages and one more, and 40 rows */
        CHECK(t->engine->replicas[0].sched.kv.n_windowed == (windowed && k ? 12 * 3 + 2 : 0));
        for (int i = 0; i < t->engine->n_replicas && o.kv_tokens; i++) /* so that samples are preempted */
            t->engine->replicas[i].sched.config.reserve_steps = 0;
        late_max_in_flight = 0;
        eng_scores s = {k ? scores : want_scores, 0};
        eng_ask_mixed(t, k ? got : want, &s);
        CHECK(s.n_logprobs > 20 && eng_close_to(want_scores, s.logprobs, s.n_logprobs, max_error));
        for (int i = 0; i < AHEAD_REQUESTS && k; i++) {
            CHECK(got[i]->n_ended == want[i]->n_ended && !got[i]->n_cancelled);
            for (int j = 0; j < 64; j++) {
                const ids *a = &want[i]->id[j], *b = &got[i]->id[j];
                CHECK(a->n == b->n && (!a->n || !memcmp(a->p, b->p, a->n * 4)));
                CHECK(eng_close_to(want[i]->logprob[j], got[i]->logprob[j], got[i]->id[j].n, max_error));
                CHECK(eng_close_to(want[i]->sampled[j], got[i]->sampled[j], got[i]->id[j].n, max_error));
                CHECK(want[i]->finish[j] == got[i]->finish[j] && str_eq(buf_view(&want[i]->text[j]), buf_view(&got[i]->text[j])));
            }
            eng_collected_free(got[i]);
        }
        const toka_stats stats = toka_get_stats(t);
        preempted += stats.preemptions;
        accepted += stats.draft_tokens_accepted, rejected += stats.draft_tokens - stats.draft_tokens_accepted;
        if (k >= 34) by_head += stats.draft_tokens_accepted;
        CHECK((stats.drafts > 0) == (k >= 20) && (stats.draft_tokens > 0) == (k >= 20));
        for (int i = 0; i < t->engine->n_replicas; i++) {
            const eng_replica *p = &t->engine->replicas[i];
            CHECK(!sched_check(&p->sched) && kv_n_available(&p->sched.kv) == p->sched.config.n_pages && !p->n_requests && !p->n_in_flight && fabs(p->work_tokens) < 1e-3);
            CHECK(p->sched.kv.n_windowed_free + p->sched.kv.n_windowed_cached == p->sched.kv.n_windowed);
            CHECK(p->sched.n_prompt_tokens > 0); /* each replica did a part of the work */
        }
        CHECK(!t->engine->n_active && !t->engine->n_samples);
        toka_close(t);
        CHECK_MSG(late_max_in_flight == (cases[k].late ? cases[k].n_ahead : 0), "case %d: %d steps at once", k, late_max_in_flight);
        CHECK(!late_violations);
    }
    CHECK(preempted > 0);
    CHECK_MSG(accepted > 20 && rejected > 20, "%d drafts accepted, %d rejected", (int)accepted, (int)rejected);
    /* TSan runs one of these cases in non-windowed models, where few may be accepted */
    CHECK_MSG(THREAD_SANITIZED || by_head > 20, "%d drafts of a head accepted", (int)by_head);
    for (int i = 0; i < AHEAD_REQUESTS; i++) eng_collected_free(want[i]);
}
static void test_ahead(void) {
    eng_make_small();
    ahead_compare(eng_model, false, NULL);
    eng_remove(eng_small_model);
}
static void test_ahead_fp8(void) {
    eng_make_small();
    ahead_compare(eng_model, false, "fp8");
    eng_remove(eng_small_model);
}

/* The same with a model that has windows of 12 tokens in every second layer. */
static void test_ahead_windows(void) {
    char folder[] = "/tmp/toka_windows_XXXXXX", head[1024] = "\"architectures\":[\"MistralForCausalLM\"],\"model_type\":\"mistral\",\"sliding_window\":12,\"layer_types\":[";
    for (int i = 0; i < 6; i++) snprintf(head + strlen(head), sizeof head - strlen(head), "%s\"%s_attention\"", i ? "," : "", i % 2 ? "sliding" : "full");
    strcat(head, "],");
    eng_make_small();
    eng_derive(folder, "\"architectures\": [\n    \"LlamaForCausalLM\"\n  ],\n  \"model_type\": \"llama\",", head);
    eng_long_answers = true;
    if (!SANITIZED) ahead_compare(folder, true, NULL);
    ahead_compare(folder, true, "fp8_e4m3");
    eng_long_answers = false;
    eng_remove(folder), eng_remove(eng_small_model);
}

/* ---- Drafts (20) ---- */

/* The options of vLLM's JSON, and what is refused. */
static void test_draft_options(void) {
    static const struct {
        const char *text, *error; /* error: a part of it, or NULL */
        int n, method, n_tokens, min_match, max_match;
        const char *flag, *model; /* toka_options.draft_model; the model that is found */
    } cases[] = {
        {NULL, NULL, 0, DRAFT_NONE, 0, 0, 0},
        {NULL, NULL, 3, DRAFT_NGRAM, 3, 2, 4},
        {NULL, "num_speculative_tokens: 17, expected 0 to 16", 17, 0, 0, 0, 0},
        {"{\"method\":\"ngram\"}", NULL, 0, DRAFT_NGRAM, 4, 2, 4},
        {"{\"method\":\"ngram\",\"num_speculative_tokens\":7,\"prompt_lookup_max\":6,\"prompt_lookup_min\":3}", NULL, 7, DRAFT_NGRAM, 7, 3, 6},
        {"{\"method\":\"ngram\",\"prompt_lookup_max\":1}", NULL, 5, DRAFT_NGRAM, 5, 1, 1},
        {"{\"method\":\"suffix\"}", NULL, 0, DRAFT_SUFFIX, 8, 2, 24},
        {"{\"method\":\"ngram\",\"num_speculative_tokens\":7}", "num_speculative_tokens is 6, but speculative_config says 7", 6, 0, 0, 0, 0},
        {"{\"method\":\"ngram\",\"prompt_lookup_max\":3,\"prompt_lookup_min\":4}", "prompt_lookup_min is 4, expected at most prompt_lookup_max, 3", 0, 0, 0, 0, 0},
        {"{\"method\":\"eagle3\",\"model\":\"x\"}", NULL, 0, DRAFT_EAGLE3, 4, 0, 0, NULL, "x"},
        {"{\"method\":\"eagle3\"}", "speculative_config: model is missing", 0, 0, 0, 0, 0},
        {"{\"method\":\"eagle3\",\"prompt_lookup_max\":4,\"model\":\"x\"}", "\"prompt_lookup_max\" is not an option of this method", 0, 0, 0, 0, 0},
        {"{\"method\":\"medusa\",\"model\":\"x\"}", "method \"medusa\", expected ngram, suffix, draft_model or eagle3", 0, 0, 0, 0, 0},
        {"{\"method\":\"draft_model\",\"model\":\"x\"}", NULL, 0, DRAFT_MODEL, 4, 0, 0, NULL, "x"},
        {"{\"model\":\"x\",\"num_speculative_tokens\":7}", NULL, 7, DRAFT_MODEL, 7, 0, 0, "x", "x"},
        {NULL, NULL, 0, DRAFT_MODEL, 4, 0, 0, "y", "y"},
        {NULL, NULL, 2, DRAFT_MODEL, 2, 0, 0, "y", "y"},
        {"{\"num_speculative_tokens\":5}", NULL, 0, DRAFT_MODEL, 5, 0, 0, "y", "y"},
        {"{\"model\":\"x\"}", "draft_model is y, but speculative_config says x", 0, 0, 0, 0, 0, "y"},
        {"{\"method\":\"ngram\"}", "draft_model is y, but speculative_config has another method", 0, 0, 0, 0, 0, "y"},
        {"{\"method\":\"draft_model\"}", "speculative_config: model is missing", 0, 0, 0, 0, 0},
        {"{\"method\":\"suffix\",\"model\":\"x\"}", "\"model\" is not an option of this method", 0, 0, 0, 0, 0},
        {"{\"num_speculative_tokens\":4}", "method is missing", 0, 0, 0, 0, 0},
        {"{\"method\":\"suffix\",\"prompt_lookup_max\":4}", "\"prompt_lookup_max\" is not an option of this method", 0, 0, 0, 0, 0},
        {"{\"method\":\"ngram\",\"num_speculative_tokens\":0}", "num_speculative_tokens: 0, expected 1 to 16", 0, 0, 0, 0, 0},
        {"{\"method\":\"ngram\",\"num_speculative_tokens\":2.5}", "expected an integer", 0, 0, 0, 0, 0},
        {"[]", "expected a JSON object", 0, 0, 0, 0, 0},
        {"{\"method\":", "speculative_config: ", 0, 0, 0, 0, 0}};
    for (int i = 0; i < COUNT(cases); i++) {
        draft_config c;
        toka_err e = {0};
        const toka_options from = {.speculative_config = cases[i].text, .num_speculative_tokens = cases[i].n, .draft_model = cases[i].flag};
        const int code = draft_read_config(&from, &c, &e);
        if (cases[i].error) CHECK_MSG(code == TOKA_E_USE && strstr(e.msg, cases[i].error), "case %d: %d %s", i, code, e.msg);
        else CHECK_MSG(!code && (int)c.method == cases[i].method && c.n_tokens == cases[i].n_tokens && c.min_match == cases[i].min_match &&
                       c.max_match == cases[i].max_match && !strcmp(c.model, cases[i].model ? cases[i].model : ""), "case %d: %s", i, e.msg);
    }
    toka_options o = toka_options_default();
    toka_backend gpu = toka_cpu;
    toka_err e = {0};
    eng *engine = NULL;
    toka_shape shape = {0};
    gpu.has_drafts = false, gpu.name = "cuda";
    for (int i = 0; i < 2; i++) {
        if (i) o.draft_model = eng_model;
        else o.num_speculative_tokens = 4;
        CHECK(eng_open(&engine, &gpu, NULL, &shape, NULL, &o, &e) == TOKA_E_USE && !strcmp(e.msg, "speculative_config: device cuda has no speculative decoding"));
    }
}

/* How many drafts: all where rows are free, none where each row takes its share of the step or where
 * they cost more tokens than they bring, and in between as acceptance and the cost of a row say. */
static void test_draft_choice(void) {
    static const double row_shares[] = {0, 0.3, 1, 0, 0}, costs[] = {0, 0, 0, 1.15, 1.15};
    static const int right_of_10[] = {7, 7, 7, 7, 3};
    for (int i = 0; i < COUNT(row_shares); i++) {
        drafter d;
        sched_seq sequence = {.generation = 1};
        int n_drafts = 0, n_steps = 400, chosen = 0;
        uint64_t rng = 1;
        draft_init(&d, &(draft_config){DRAFT_NGRAM, 8, 2, 4, false, ""}, 1);
        for (int step = 0; step < n_steps; step++) {
            chosen = MIN(draft_choose(&d, &sequence, 0, 1, 8, costs[i]), draft_most_rows(&d, 1));
            n_drafts += chosen;
            int right = 0;
            while (right < chosen && (int)(rnd(&rng) % 10) < right_of_10[i]) right++;
            if (chosen) draft_learn(&d, 0, chosen, right);
            draft_time(&d, 1, 1 + chosen, 1 + right, 1 - row_shares[i] + row_shares[i] * (1 + chosen), 0, 0);
        }
        if (i == 0 || i == 3) CHECK_MSG(chosen == 8, "%d of 8 where rows are free", chosen);
        if (i == 1) CHECK_MSG(chosen >= 1 && chosen <= 6, "%d of 8", chosen);
        if (i == 2 || i == 4) CHECK_MSG(n_drafts < n_steps / 5, "%d drafts where none pays", n_drafts);
        draft_free(&d);
    }
}

typedef struct draft_world { /* what draft_simulate simulates */
    const char *name;
    double step_s, row_s, own_step_s, own_row_s; /* seconds of a step and of each of its rows, also of a draft model's; 0: there is none */
    int n_seqs, n_answers, n_output, n_prompt;
    double match, right;   /* how often there is a match, and how often a draft is right */
    double at_least, most; /* the bounds of what draft_simulate returns */
} draft_world;

/* Decodes answers whose steps take what the world says, give or take `noise` of it. Returns the seconds without drafts / with. */
static double draft_simulate(const draft_world *w, double noise, uint64_t rng) {
    enum { MOST = 4 };
    const bool by_model = w->own_step_s > 0;
    double seconds[2] = {0};
    int n_waiting = w->n_answers, n_seqs, left[256] = {0}, missing[256] = {0}, drafts[256] = {0};
    sched_seq seqs[256] = {0};
    drafter d;
    draft_init(&d, &(draft_config){.method = by_model ? DRAFT_MODEL : DRAFT_NGRAM, .n_tokens = MOST}, w->n_seqs);
    do {
        n_seqs = 0;
        for (int i = 0; i < w->n_seqs; i++) {
            if (left[i] <= 0 && n_waiting > 0) n_waiting--, seqs[i].generation++, missing[i] = w->n_prompt, left[i] = w->n_output / 2 + (int)(rnd(&rng) % (uint64_t)w->n_output);
            n_seqs += left[i] > 0;
        }
        if (!n_seqs) break;
        int n_left = draft_most_rows(&d, n_seqs), n_rows = 0, n_tokens = 0;
        double own_s = 0, catch_s = 0;
        for (int i = 0; i < w->n_seqs; i++) {
            const int most = MIN(MOST, left[i] - 1);
            drafts[i] = 0;
            if (most < 1 || !n_left || (double)(rnd(&rng) % 1000) >= 1000 * w->match) continue;
            drafts[i] = MIN(draft_choose(&d, &seqs[i], i, n_seqs, most, 0), n_left);
            n_left -= drafts[i];
        }
        for (int n_drawn = 0; by_model && n_drawn < MOST; n_drawn++) {
            double budget_s = d.budget_s;
            int n_own = 0, n_caught_up = 0;
            for (int i = 0; i < w->n_seqs; i++) {
                if (drafts[i] <= n_drawn) continue;
                const int n = n_drawn ? 0 : draft_catch_up(&d, missing[i], left[i], &budget_s);
                if (n_drawn || n == missing[i]) n_own++;
                else drafts[i] = 0;
                if (!n_drawn) missing[i] -= n;
                n_own += n, n_caught_up += n;
            }
            if (!n_own) break;
            const double step_s = (w->own_step_s + w->own_row_s * n_own) * (1 + noise * ((double)(rnd(&rng) % 2001) / 1000 - 1));
            draft_add(&d.own, 0.95, n_own, step_s);
            own_s += step_s, catch_s += step_s * n_caught_up / n_own;
        }
        d.budget_s -= own_s;
        for (int i = 0; i < w->n_seqs; i++) {
            if (left[i] <= 0) continue;
            int n_right = 0;
            while (n_right < drafts[i] && (double)(rnd(&rng) % 1000) < 1000 * w->right) n_right++;
            if (drafts[i]) draft_learn(&d, i, drafts[i], n_right);
            missing[i] = !drafts[i] ? missing[i] + 1 : n_right == drafts[i];
            n_rows += 1 + drafts[i], n_tokens += 1 + n_right, left[i] -= 1 + n_right;
        }
        const double step_s = w->step_s + w->row_s * n_rows;
        draft_time(&d, n_seqs, n_rows, n_tokens, own_s + step_s * (1 + noise * ((double)(rnd(&rng) % 2001) / 1000 - 1)), own_s, catch_s);
        seconds[0] += (w->step_s / n_seqs + w->row_s) * n_tokens, seconds[1] += own_s + step_s;
    } while (true);
    draft_free(&d);
    return seconds[0] / seconds[1];
}

/* Whatever drafts and rows cost and however often drafts are right, drafts take at most 2 % of the time; where they pay, they are
 * used. The seconds are those of the embedded model on a CPU, in milliseconds, and of devices whose rows are nearly free. */
static void test_draft_budget(void) {
    static const draft_world worlds[] = {
        {"the model itself, 16 sequences", 1, 0.37, 1, 0.37, 16, 16, 350, 33, 1, 1, 0.98, 1.001},
        {"the model itself, one sequence", 1, 0.37, 1, 0.37, 1, 6, 325, 33, 1, 1, 0.98, 1.001},
        {"a bad draft model, long prompts", 1, 0.37, 0.35, 0.13, 64, 64, 200, 200, 1, 0.05, 0.98, 1.001},
        {"a bad draft model, one sequence", 1, 0.37, 0.35, 0.13, 1, 6, 325, 33, 1, 0.1, 0.98, 1.001},
        {"a good draft model, one answer", 1, 0.1, 0.1, 0.01, 1, 1, 325, 33, 1, 0.8, 1.4, 2.5},
        {"matches, 150 sequences", 1, 0.32, 0, 0, 150, 150, 85, 0, 0.3, 0.4, 0.98, 1.02},
        {"matches, 16 sequences", 1, 0.37, 0, 0, 16, 16, 350, 0, 0.6, 0.65, 0.98, 1.05},
        {"matches, one sequence", 1, 0.37, 0, 0, 1, 6, 325, 0, 0.6, 0.6, 1.1, 1.4},
        {"good matches, rows nearly free", 5, 0.01, 0, 0, 64, 256, 300, 0, 0.5, 0.6, 1.2, 1.5},
        {"bad matches, rows nearly free", 5, 0.01, 0, 0, 64, 256, 300, 0, 0.5, 0.02, 0.98, 1.02},
        {"bad matches, 16 sequences", 5, 0.1, 0, 0, 16, 64, 300, 0, 0.5, 0.1, 0.98, 1.02}};
    for (int i = 0; i < COUNT(worlds); i++)
        for (int run = 0; run < 20; run++) {
            const double found = draft_simulate(&worlds[i], run % 2 ? 0.1 : 0, (uint64_t)run + 1);
            CHECK_MSG(found >= worlds[i].at_least && found <= worlds[i].most, "%s, run %d: %.3f times as fast", worlds[i].name, run, found);
            if (getenv("VERBOSE") && run < 2) printf("%-40s %.3f\n", worlds[i].name, found);
        }
}

/* Runs one request on t. Returns what came, and in *steps the steps that it took. */
static eng_collected *eng_draft_ask(toka *t, const int32_t *problem, size_t n_problem, const toka_sampling *s, int64_t *steps) {
    toka_err e = {0};
    int code;
    const int64_t before = toka_get_stats(t).steps;
    eng_collected *g = eng_ask(t, NULL, problem, n_problem, 1, s, &code, &e);
    CHECK_MSG(!code, "%s", e.msg);
    *steps = toka_get_stats(t).steps - before;
    return g;
}

/* An answer that was given before is drafted from the prefix tree, and ends inside of accepted
 * drafts: at max_tokens, an end id, a stop string, or not before min_tokens. All is as without
 * drafts, and so are K and V of the pages that answers leave in the tree. */
static void test_draft_ends(void) {
    static const char *const stop[] = {"apples"};
    static const char *const devices[] = {"cpu", "plain"};
    for (int device = 0; device < COUNT(devices); device++) {
        toka_options o = toka_options_default();
        toka_err e = {0};
        toka *t[2];
        size_t n_problem;
        int64_t steps[2], saved = 0, n_output = 0;
        o.model = eng_model, o.device = devices[device], o.n_threads = 1, o.max_num_seqs = 4, o.max_num_batched_tokens = 64, o.max_model_len = 256;
        CHECK_MSG(!toka_open(&t[0], &o, &e), "%s", e.msg);
        o.speculative_config = "{\"method\":\"suffix\",\"num_speculative_tokens\":16}";
        CHECK_MSG(!toka_open(&t[1], &o, &e), "%s", e.msg);
        t[1]->engine->replicas[0].drafts.config.always = true;
        int32_t *problem = eng_problem_ids(t[0], str_c(eng_problem), &n_problem);
        for (int i = 0; i < (device ? 6 : 36); i++) {
            toka_sampling s = eng_greedy(1 + (29 + i * 7) % 30);
            if (i >= 20) s.temperature = 0.8f, s.seed = 5;
            if (i % 5 == 1) s.stop = stop, s.n_stop = 1;
            if (i % 5 == 2) s.min_tokens = s.max_tokens, s.logprobs = 3;
            if (i % 5 == 3) s.repetition_penalty = 1.3f;
            if (i == 35) s.max_tokens = 120;
            eng_collected *want = eng_draft_ask(t[0], problem, n_problem, &s, &steps[0]), *got = eng_draft_ask(t[1], problem, n_problem, &s, &steps[1]);
            const size_t n = want->id[0].n;
            CHECK_MSG(got->id[0].n == n && !memcmp(want->id[0].p, got->id[0].p, n * 4) && !memcmp(want->logprob[0], got->logprob[0], n * 4) &&
                      !memcmp(want->sampled[0], got->sampled[0], n * 4), "request %d", i);
            CHECK(want->finish[0] == got->finish[0] && want->stop_id[0] == got->stop_id[0] && want->n_events == got->n_events && got->n_ended == 1 && !got->more);
            CHECK(str_eq(buf_view(&want->text[0]), buf_view(&got->text[0])));
            CHECK(steps[1] <= steps[0] && !sched_check(&t[1]->engine->replicas[0].sched));
            saved += steps[0] - steps[1], n_output += (int64_t)n;
            eng_collected_free(want), eng_collected_free(got);
        }
        CHECK_MSG(saved > n_output / 3, "%s: %d of %d steps saved", devices[device], (int)saved, (int)n_output);
        /* goes on behind an answer: the prompt is found in the tree, in pages that drafts have written */
        toka_sampling s = eng_greedy(30);
        s.ignore_eos = 1;
        eng_collected *answer = eng_draft_ask(t[0], problem, n_problem, &s, &steps[0]);
        int32_t prompt[256];
        memcpy(prompt, problem, n_problem * 4), memcpy(prompt + n_problem, answer->id[0].p, answer->id[0].n * 4);
        eng_collected_free(eng_draft_ask(t[1], problem, n_problem, &s, &steps[1]));
        const int64_t hits = toka_get_stats(t[1]).prompt_tokens_shared;
        eng_collected *want = eng_draft_ask(t[0], prompt, n_problem + 30, &s, &steps[0]), *got = eng_draft_ask(t[1], prompt, n_problem + 30, &s, &steps[1]);
        CHECK(toka_get_stats(t[1]).prompt_tokens_shared - hits >= (int64_t)n_problem);
        CHECK(!memcmp(want->id[0].p, got->id[0].p, 30 * 4) && !memcmp(want->logprob[0], got->logprob[0], 30 * 4));
        const toka_stats stats = toka_get_stats(t[1]);
        CHECK(stats.drafts > 0 && stats.draft_accepted_at[0] >= stats.draft_accepted_at[1] && stats.draft_accepted_at[15] > 0);
        eng_collected_free(answer), eng_collected_free(want), eng_collected_free(got);
        free(problem);
        toka_close(t[0]), toka_close(t[1]);
    }
}

/* How often drafts of the draft model, or of a head, are right: text, log-probabilities and all else are those without drafts, whatever the
 * parameters. Where the draft model is the model itself, each draft is right, as it is drawn like the token. */
static void test_draft_model(void) {
    static const char *const stop[] = {"apples"};
    static const int32_t bad[] = {300, 7};
    static const int lengths[] = {1, 1};
    const float bias = 2;
    eng_make_small();
    for (int run = 0; run < 5; run++) {
        const char *smaller = run > 2 ? "test/model_head" : run == 1 ? eng_small_model : eng_model;
        const bool is_plain = run == 2 || run == 4;
        toka_options o = toka_options_default();
        toka_err e = {0};
        toka *t[2];
        size_t n_problem;
        o.model = eng_model, o.device = is_plain ? "plain" : "cpu", o.n_threads = 2, o.max_num_seqs = 6, o.max_num_batched_tokens = 64, o.max_model_len = 256;
        o.kv_tokens = 160, o.max_model_len = 160;
        CHECK_MSG(!toka_open(&t[0], &o, &e), "%s", e.msg);
        o.draft_model = smaller, o.num_speculative_tokens = 5 + 11 * (run == 0);
        if (run > 2) o.speculative_config = "{\"method\":\"eagle3\"}";
        CHECK_MSG(!toka_open(&t[1], &o, &e), "%s", e.msg);
        t[1]->engine->replicas[0].drafts.config.always = true;
        t[1]->engine->replicas[0].sched.config.reserve_steps = 0;
        int32_t *problem = eng_problem_ids(t[0], str_c(eng_problem), &n_problem);
        int64_t steps[2] = {0};
        for (int i = 0; i < (is_plain ? 3 : SANITIZED ? 8 : 20); i++) {
            toka_sampling s = eng_greedy(1 + (29 + i * 7) % 40);
            toka_stats before[2] = {toka_get_stats(t[0]), toka_get_stats(t[1])};
            int code;
            s.seed = (uint64_t)i;
            s.ignore_eos = i % 4 == 3; /* long answers */
            if (i % 3) s.temperature = 0.9f * (float)(i % 3);
            if (s.ignore_eos) s.temperature = 3; /* other texts, so no pages are shared */
            if (i % 4 == 1) s.top_p = 0.9f, s.top_k = 20;
            if (i % 5 == 1) s.stop = stop, s.n_stop = 1;
            if (i % 5 == 2) s.min_tokens = s.max_tokens, s.logprobs = 3;
            if (i % 5 == 3) s.repetition_penalty = 1.3f, s.presence_penalty = 0.5f;
            if (i % 5 == 4) s.bad_ids = bad, s.bad_lengths = lengths, s.n_bad = 2, s.bias_ids = bad + 1, s.bias_values = &bias, s.n_bias = 1, s.min_p = 0.05f;
            /* up to 12 samples, 6 at once, share a prompt, and preempt each other */
            eng_collected *want = eng_ask(t[0], NULL, problem, n_problem, 1 + i % 12, &s, &code, &e);
            CHECK_MSG(!code, "%s", e.msg);
            eng_collected *got = eng_ask(t[1], NULL, problem, n_problem, 1 + i % 12, &s, &code, &e);
            CHECK_MSG(!code, "%s", e.msg);
            for (int j = 0; j < 1 + i % 12; j++) {
                const size_t n = want->id[j].n;
                CHECK_MSG(got->id[j].n == n && !memcmp(want->id[j].p, got->id[j].p, n * 4) && !memcmp(want->logprob[j], got->logprob[j], n * 4) &&
                          !memcmp(want->sampled[j], got->sampled[j], n * 4), "run %d, request %d, sample %d", run, i, j);
                CHECK(want->finish[j] == got->finish[j] && want->stop_id[j] == got->stop_id[j] && str_eq(buf_view(&want->text[j]), buf_view(&got->text[j])));
            }
            CHECK(!sched_check(&t[1]->engine->replicas[0].sched) && got->n_ended == 1 + i % 12);
            for (int j = 0; j < 2; j++) steps[j] += toka_get_stats(t[j]).steps - before[j].steps;
            eng_collected_free(want), eng_collected_free(got);
        }
        const toka_stats stats = toka_get_stats(t[1]);
        const double rate = (double)stats.draft_tokens_accepted / (double)stats.draft_tokens;
        CHECK(stats.draft_tokens > 30 && stats.draft_s > 0 && stats.draft_s < 60);
        if (smaller == eng_model) CHECK_MSG(stats.draft_tokens_accepted == stats.draft_tokens, "%d: %.3f of the drafts are right", run, rate);
        else CHECK_MSG(rate > 0.05 && rate < 0.9, "%.3f of the drafts are right", rate);
        CHECK_MSG(steps[1] < steps[0], "%d steps, %d without drafts", (int)steps[1], (int)steps[0]);
        if (!is_plain && !SANITIZED) CHECK(stats.preemptions > 0 && stats.prompt_tokens_shared > 0);
        if (getenv("VERBOSE")) printf("drafter %s: %.3f right, %d steps for %d, %d preempted, %d shared\n", smaller, rate, (int)steps[1], (int)steps[0], (int)stats.preemptions, (int)stats.prompt_tokens_shared);
        free(problem);
        toka_close(t[0]), toka_close(t[1]);
    }
    eng_remove(eng_small_model);
}

/* The draws of a request with output_ids are replaced, whatever runs ahead; each next row reads the text. */
static void test_output_ids(void) {
    static const struct { int n_ahead, pp; bool late; const char *draft; } cases[] = {
        {1, 1, false, NULL}, {4, 1, true, NULL}, {4, 2, false, NULL}, {2, 1, false, "{\"method\":\"synthetic\",\"synthetic_acceptance_rate\":0.6}"}};
    enum { N = 40 };
    float want[N];
    for (int k = 0; k < COUNT(cases); k++) {
        toka_options o = toka_options_default();
        toka_err e = {0};
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 4, o.max_num_batched_tokens = 64, o.max_model_len = 160;
        o.pipeline_parallel_size = cases[k].pp, o.speculative_config = cases[k].draft;
        toka *t = eng_open_ahead(o, cases[k].n_ahead, cases[k].late);
        int32_t text[N + 64], *problem;
        size_t n_problem;
        problem = eng_problem_ids(t, str_c(eng_problem), &n_problem);
        memcpy(text, problem, n_problem * 4);
        for (int i = 0; i < N; i++) text[n_problem + (size_t)i] = 10 + i * 29 % 900;
        toka_request r = toka_request_default();
        r.ids = problem, r.n_ids = n_problem, r.n = 6, r.sampling.temperature = 0, r.sampling.max_tokens = 100, r.sampling.logprobs = 1;
        r.sampling.repetition_penalty = 1.2f, r.output_ids = text + n_problem, r.n_output_ids = N;
        eng_collected *g = mem_zalloc(sizeof *g);
        CHECK_MSG(!toka_generate(t, &r, eng_collect, g, NULL, &e), "%s", e.msg);
        for (int j = 0; j < r.n; j++) {
            CHECK(g->id[j].n == N && !memcmp(g->id[j].p, text + n_problem, N * 4) && g->finish[j] == TOKA_LENGTH);
            if (!k && !j) memcpy(want, g->logprob[0], sizeof want);
            CHECK_MSG(!memcmp(g->logprob[j], want, sizeof want), "case %d, sample %d", k, j);
        }
        eng_collected_free(g);
        for (int i = 0; i < N && !k; i += 13) { /* the draw behind the text up to here */
            int code;
            toka_sampling s = r.sampling;
            s.max_tokens = 1, s.repetition_penalty = 1;
            g = eng_ask(t, NULL, text, n_problem + (size_t)i, 1, &s, &code, &e);
            CHECK_MSG(!code && (g->logprob[0][0] == want[i] || (want[i] < g->logprob[0][0] && i)), "token %d: %g, %g", i, (double)want[i], (double)g->logprob[0][0]);
            eng_collected_free(g);
        }
        r.n_output_ids = 0;
        CHECK(toka_generate(t, &r, eng_collect, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "output_ids: expected at least one id"));
        if (cases[k].draft) {
            const toka_stats stats = toka_get_stats(t);
            CHECK_MSG(stats.draft_accepted_at[0] * 10 > stats.drafts * 4 && stats.draft_accepted_at[0] * 10 < stats.drafts * 8, "%d of %d", (int)stats.draft_accepted_at[0], (int)stats.drafts);
        }
        free(problem);
        toka_close(t);
    }
}

/* Draft models that cannot be used, and the memory that one takes. */
static void test_draft_model_open(void) {
    char other[] = "/tmp/toka_other_XXXXXX", path[128];
    toka_options o = toka_options_default();
    toka_err e = {0};
    toka *t;
    o.model = eng_model, o.device = "cpu", o.n_threads = 1, o.draft_model = other;
    CHECK(toka_open(&t, &o, &e) && strstr(e.msg, "draft_model: ") == e.msg);
    eng_derive(other, "\"vocab_size\": 1024", "\"vocab_size\": 1000");
    CHECK(toka_open(&t, &o, &e)); /* its weights have 1024 */
    eng_remove(other), strcpy(other + strlen(other) - 6, "XXXXXX");
    eng_make_small();
    o.draft_model = eng_small_model, o.pipeline_parallel_size = 2;
    CHECK(toka_open(&t, &o, &e) == TOKA_E_USE && strstr(e.msg, "draft_model: not with pipeline_parallel_size 2") == e.msg);
    o.pipeline_parallel_size = 1;
    /* the same ids with other texts */
    snprintf(path, sizeof path, "%s/tokenizer.json", eng_small_model);
    buf text = {0};
    const int fd = open("test/model/tokenizer.json", O_RDONLY);
    CHECK(fd >= 0 && !os_read_all(fd, "tokenizer.json", 1 << 24, &text, &e) && !close(fd));
    buf_char(&text, 0);
    char *words[] = {strstr(text.p, "\"!\": 4,"), strstr(text.p, "\"#\": 6,")};
    CHECK(words[0] && words[1]);
    if (words[0] && words[1]) {
        words[0][5] = '6', words[1][5] = '4';
        unlink(path);
        FILE *out = fopen(path, "w");
        CHECK(out && fwrite(text.p, 1, text.n - 1, out) == text.n - 1 && !fclose(out));
        CHECK_MSG(toka_open(&t, &o, &e), "opened with another tokenizer");
        CHECK_MSG(strstr(e.msg, "draft_model ") == e.msg && strstr(e.msg, ": its tokenizer is not that of "), "%s", e.msg);
    }
    buf_free(&text);
    eng_remove(eng_small_model);
    /* a third of the layers takes a third of the bytes: a quarter of the tokens goes */
    eng_make_small();
    int64_t tokens[2];
    o.max_num_seqs = 65536, o.max_num_batched_tokens = 65536;
    for (int i = 0; i < 2; i++) {
        o.draft_model = i ? eng_small_model : NULL;
        toka_device_options device = {.n_devices = 1};
        eng engine = {.backend = &toka_cpu, .n_replicas = 1};
        mf_model *files, *small;
        CHECK(!mf_open(&files, eng_model, NULL, NULL, &e) && !mf_open(&small, eng_small_model, NULL, NULL, &e));
        engine.replicas = mem_zalloc(sizeof *engine.replicas);
        engine.draft_files = i ? small : NULL, engine.draft_shape = small->shape;
        CHECK(!model_shard(&engine.replicas[0].model, &toka_cpu, &files->shape, &files->weights, 1, 1, &e));
        const sched_config config = {.B = 16, .max_seqs = 1 << 30, .max_tokens = 64};
        tokens[i] = eng_kv_capacity(&engine, device, 1024, &config, &(int){0});
        model_close(&engine.replicas[0].model), free(engine.replicas), mf_close(files), mf_close(small);
    }
    CHECK_MSG(fabs((double)tokens[1] / (double)tokens[0] - 0.75) < 0.001, "%lld and %lld tokens", (long long)tokens[0], (long long)tokens[1]);
    eng_remove(eng_small_model);
}

/* An asynchronous device fails while later steps are in flight. All requests get the device's
 * error, and all steps are retired. */
static void test_ahead_fault(void) {
    for (int step = 1; step < 12; step += 2) {
        char text[16];
        snprintf(text, sizeof text, "%d", step + 1); /* the first step is the warm-up */
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 24, o.max_num_batched_tokens = 40, o.max_model_len = 160;
        o.pipeline_parallel_size = step % 4 == 1 ? 2 : 1;
        setenv("TOKA_DEBUG_FAULT", text, 1);
        toka *t = eng_open_ahead(o, 1 + step % 3, true);
        unsetenv("TOKA_DEBUG_FAULT");
        eng_collected *got[4];
        toka_err e = {0};
        int64_t id;
        for (int i = 0; i < 4; i++) {
            toka_request r = toka_request_default();
            r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.n = 5, r.sampling = eng_greedy(100), r.sampling.ignore_eos = 1;
            got[i] = mem_zalloc(sizeof **got);
            CHECK(!toka_submit(t, &r, eng_collect, got[i], &id, &e));
        }
        CHECK_MSG(toka_run(t, 0, &e) == TOKA_E_DEVICE && strstr(e.msg, "TOKA_DEBUG_FAULT"), "step %d: %s", step, e.msg);
        for (int i = 0; i < 4; i++) {
            CHECK_MSG(got[i]->n_ended == 5 && got[i]->n_cancelled == 5, "step %d: %d ended", step, got[i]->n_ended);
            eng_collected_free(got[i]);
        }
        toka_close(t);
        CHECK(!late_violations);
    }
}

/* Equal requests are spread evenly over the replicas. A prompt goes to the replica that has it
 * cached, unless that one has much more work than others. */
static void test_replicas(void) {
    toka_options o = toka_options_default();
    o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 16, o.data_parallel_size = 4, o.max_model_len = 256;
    toka *t = eng_open_ahead(o, 2, false);
    eng_replica *p = t->engine->replicas;
    toka_request r = toka_request_default();
    toka_err e;
    int64_t id, before[4];
    int32_t prompt[100];
    r.ids = prompt, r.n_ids = 100, r.sampling.max_tokens = 8, r.sampling.ignore_eos = 1;
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 100; k++) prompt[k] = 5 + (i * 31 + k * (i + 1)) % 200;
        CHECK(!toka_submit(t, &r, NULL, NULL, &id, &e));
    }
    CHECK(!toka_run(t, 0, &e));
    for (int i = 0; i < 4; i++) CHECK_MSG((before[i] = p[i].sched.n_prompt_tokens) == 200, "replica %d: %lld", i, (long long)before[i]);
    /* the prompt of request 7 again and again, with no other work */
    for (int round = 0; round < 3; round++) {
        CHECK(!toka_submit(t, &r, NULL, NULL, &id, &e) && !toka_run(t, 0, &e));
    }
    int n_moved = 0;
    for (int i = 0; i < 4; i++) n_moved += p[i].sched.n_prompt_tokens != before[i], before[i] = p[i].sched.n_prompt_tokens;
    CHECK(n_moved == 1 && toka_get_stats(t).prompt_tokens_shared >= 3 * 96);
    /* a crowd is spread although one replica has the prompt cached */
    for (int i = 0; i < 40; i++) CHECK(!toka_submit(t, &r, NULL, NULL, &id, &e));
    CHECK(!toka_run(t, 0, &e));
    for (int i = 0; i < 4; i++) CHECK_MSG(p[i].sched.n_prompt_tokens - before[i] >= 300, "replica %d: %lld", i, (long long)before[i]);
    toka_close(t);
}

/* A pool that is much too small for all samples at once: they are preempted, and every token and
 * log-probability is as without preemption. */
static void test_page_pressure(void) {
    toka_sampling s = eng_greedy(60);
    s.temperature = 3, s.seed = 4, s.ignore_eos = 1;
    toka_options o = toka_options_default();
    o.model = eng_model, o.n_threads = 2, o.max_num_seqs = 40, o.max_model_len = 256;
    eng_collected *want = NULL;
    int64_t preempted = 0;
    for (int k = 0; k < (SANITIZED ? 3 : 6); k++) {
        toka *t;
        toka_err e;
        o.kv_tokens = k % 3 == 0 ? 0 : k % 3 == 1 ? 256 : 700;
        if (k == 3) { /* the same with FP8 K and V */
            eng_collected_free(want);
            want = NULL, o.kv_cache_dtype = "fp8";
        }
        CHECK_MSG(!toka_open(&t, &o, &e), "%s", e.msg);
        s.ignore_eos = 0;
        eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 40, &s);
        CHECK(g->n_ended == 40 && !sched_check(&t->engine->replicas[0].sched));
        for (int i = 0; i < 40 && want; i++) {
            CHECK(want->id[i].n == g->id[i].n && !memcmp(want->id[i].p, g->id[i].p, g->id[i].n * 4));
            CHECK(!memcmp(want->logprob[i], g->logprob[i], sizeof g->logprob[i]));
        }
        preempted += toka_get_stats(t).preemptions;
        if (want) eng_collected_free(g);
        else want = g;
        toka_close(t);
    }
    CHECK_MSG(preempted > 0, "no preemption, the test is not one");
    eng_collected_free(want);
}

/* ---- Prompts with log-probabilities, events without text, runs of events, bad words ---- */

/* The contents of TOKA_PROMPT events, and the order of all events. */
typedef struct eng_add_prompt_rows {
    ids id;
    float logprob[600], top0[600];
    /* early: tokens of sample 0 before the prompt's end */
    int n, n_top, n_ended, n_ranks_wrong, n_samples_early;
    int32_t first_of_sample[8];
    int cancel_at;
    bool ranks; /* the request asks for ranks */
    toka_finish finish;
    int n_cached[8], n_text, n_prompt;
    ids out[8];
} eng_prompt_rows_seen;

static int eng_on_place(void *user, const toka_event *ev) {
    eng_prompt_rows_seen *g = user;
    if (ev->finish != TOKA_RUNNING) g->n_ended++, g->finish = ev->finish;
    g->n_text += ev->text != NULL;
    if (ev->id < 0) return 0;
    if (ev->sample != TOKA_PROMPT) {
        if (!ev->sample && g->n < g->n_prompt) g->n_samples_early++;
        ids_push(&g->out[ev->sample], ev->id), g->n_cached[ev->sample] = ev->n_cached;
        return 0;
    }
    ids_push(&g->id, ev->id);
    g->logprob[g->n] = ev->logprob, g->top0[g->n] = ev->n_top ? ev->top_logprobs[0] : 0;
    if (g->n) g->n_top = ev->n_top;
    bool ranked = ev->rank <= ev->n_top ? ev->rank > 0 && ev->top_ids[ev->rank - 1] == ev->id : !samp_is_listed(ev->top_ids, ev->n_top, ev->id);
    g->n_ranks_wrong += g->n && g->ranks ? !ranked : ev->rank != 0;
    g->n++;
    return g->n == g->cancel_at;
}

static void eng_prompt_rows_free(eng_prompt_rows_seen *g) {
    ids_free(&g->id);
    for (int i = 0; i < 8; i++) ids_free(&g->out[i]);
    free(g);
}

static eng_prompt_rows_seen *eng_ask_prompt_rows(toka *t, const int32_t *prompt, int n_prompt, int n, int top, int max_tokens, int *code) {
    eng_prompt_rows_seen *g = mem_zalloc(sizeof *g);
    toka_request r = toka_request_default();
    toka_err e;
    g->n_prompt = n_prompt;
    r.ids = prompt, r.n_ids = (size_t)n_prompt, r.n = n, r.sampling = eng_greedy(max_tokens);
    r.prompt_logprobs = 1, r.prompt_top = top, r.ids_only = 1, r.prompt_ranks = g->ranks = n != 3;
    *code = toka_generate(t, &r, eng_on_place, g, NULL, &e);
    return g;
}

/* A sample that is preempted again and again, in its prompt and after it, scores each token
 * once. */
static void eng_check_preempted_scores(toka *t, const int32_t *v, int n, const float *want) {
    eng_prompt_rows_seen *g = mem_zalloc(sizeof *g);
    toka_request r = toka_request_default();
    toka_err e;
    int64_t id;
    int n_preemptions = 0;
    g->n_prompt = n;
    r.ids = v, r.n_ids = (size_t)n, r.sampling = eng_greedy(8), r.prompt_logprobs = 1;
    CHECK(!toka_submit(t, &r, eng_on_place, g, &id, &e));
    for (int i = 1; !g->n_ended && i < 200; i++) {
        eng_step(t->engine);
        if (i % 3 || t->engine->replicas[0].sched.next_to_preempt < 0 || i > 60) continue;
        sched_preempt(&t->engine->replicas[0].sched), n_preemptions++;
    }
    CHECK(g->n_ended == 1 && n_preemptions > 2 && g->n == n && !memcmp(g->logprob, want, (size_t)n * sizeof *want));
    eng_prompt_rows_free(g);
}

/* Every token of a prompt is reported in order, before sample 0 begins, with the values of
 * toka_score; also in small steps and when pages run out. */
static void test_prompt_logprobs(void) {
    toka_err e;
    int32_t *v = NULL;
    size_t n;
    float want[600];
    toka *t = eng_must_open(eng_model, 8, 16, 2);
    CHECK(!toka_encode(t, eng_problem, strlen(eng_problem), TOKA_ADD_SPECIAL, &v, &n, &e) && n > 20);
    CHECK(!toka_score(t, v, n, want, &e) && want[0] == 0);
    toka_close(t);
    for (int k = 0; k < 3; k++) {
        toka_options o = toka_options_default();
        o.model = eng_model, o.n_threads = 2, o.max_num_seqs = 8, o.max_model_len = 96, o.kv_tokens = k == 2 ? 96 : 0;
        o.max_num_batched_tokens = k ? 9 : 64;
        CHECK_MSG(!toka_open(&t, &o, &e), "%s", e.msg);
        for (int top = k == 1 ? 3 : 0; top < 33; top += 16)
            for (int samples = 0; samples < 6; samples += 5) {
                int code, count[3] = {0};
                int64_t id;
                /* other requests at the same time, which need pages */
                toka_request r = toka_request_default();
                r.ids = v, r.n_ids = 8, r.n = 6, r.sampling = eng_greedy(60), r.sampling.temperature = 3;
                CHECK(!toka_submit(t, &r, eng_count, count, &id, &e));
                eng_prompt_rows_seen *g = eng_ask_prompt_rows(t, v, (int)n, samples, top, 20, &code);
                CHECK(!code && g->n == (int)n && !memcmp(g->id.p, v, n * 4) && g->n_top == top && !g->n_samples_early && !g->n_text);
                CHECK(!g->n_ranks_wrong);
                CHECK(!memcmp(g->logprob, want, n * sizeof *want) && g->n_ended == MAX(samples, 1));
                for (int i = 1; i < (int)n && top; i++) CHECK(g->top0[i] >= g->logprob[i]);
                for (int i = 1; i < samples; i++) CHECK(g->out[i].n == g->out[0].n && !memcmp(g->out[i].p, g->out[0].p, 4 * g->out[0].n));
                CHECK(!toka_run(t, 0, &e) && count[0] == 6);
                eng_prompt_rows_free(g);
            }
        CHECK(!sched_check(&t->engine->replicas[0].sched) && kv_n_available(&t->engine->replicas[0].sched.kv) == t->engine->replicas[0].sched.config.n_pages);
        if (k) eng_check_preempted_scores(t, v, (int)n, want);
        toka_close(t);
    }
    free(v);
}

/* The shortest and the longest text, and callbacks that ask to end. */
static void test_score_edges(void) {
    toka *t = eng_must_open(eng_model, 4, 16, 1);
    int32_t *long_text = mem_zalloc((size_t)t->shape.max_len * 4 + 4);
    float *lp = mem_zalloc((size_t)t->shape.max_len * 4 + 4);
    toka_err e;
    int code;
    for (int i = 0; i <= t->shape.max_len; i++) long_text[i] = 5 + i % 50;
    for (int n = 1; n < 40; n += n < 4 ? 1 : n < 15 ? 11 : 2) { /* steps have at most 16 tokens */
        eng_prompt_rows_seen *g = eng_ask_prompt_rows(t, long_text, n, 0, 0, 1, &code);
        CHECK(!code && g->n == n && g->n_ended == 1 && g->finish == TOKA_LENGTH && !g->n_ranks_wrong);
        eng_prompt_rows_free(g);
        g = eng_ask_prompt_rows(t, long_text, n, 3, 0, 2, &code); /* now followed by samples */
        CHECK(!code && g->n == n && g->n_ended == 3 && !g->n_samples_early && g->out[2].n == 2);
        eng_prompt_rows_free(g);
        for (int at = 1; at <= n; at += MAX(1, n / 2)) {
            toka_request r = {.ids = long_text, .n_ids = (size_t)n, .prompt_logprobs = 1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
            g = mem_zalloc(sizeof *g);
            g->cancel_at = at;
            code = toka_generate(t, &r, eng_on_place, g, NULL, &e);
            CHECK(g->n_ended == 1 && (code == TOKA_E_CANCELLED) == (g->finish == TOKA_CANCELLED));
            eng_prompt_rows_free(g);
        }
    }
    CHECK(!toka_score(t, long_text, (size_t)t->shape.max_len, lp, &e) && lp[t->shape.max_len - 1] < 0);
    CHECK(toka_score(t, long_text, (size_t)t->shape.max_len + 1, lp, &e) == TOKA_E_USE);
    toka_request r = toka_request_default();
    r.ids = long_text, r.n_ids = 3, r.n = 0;
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "n is 0"));
    CHECK(!sched_check(&t->engine->replicas[0].sched) && kv_n_available(&t->engine->replicas[0].sched.kv) == t->engine->replicas[0].sched.config.n_pages);
    free(long_text), free(lp);
    toka_close(t);
}

/* ---- Embeddings ---- */

enum { EMB_MAX = 300, EMB_E = 256 };

/* The same vectors come out of any chunks, pages, stages, tensor ranks and replicas, whatever runs beside them. */
typedef struct emb_seen {
    float v[EMB_E];
    int n, n_events;
    toka_finish finish;
} emb_seen;
static int emb_collect(void *user, const toka_event *ev) {
    emb_seen *seen = user;
    seen->n_events++, seen->n = ev->n_vector, seen->finish = ev->finish;
    CHECK(ev->sample == TOKA_PROMPT && ev->id == -1 && (ev->vector != NULL) == (ev->finish == TOKA_LENGTH));
    if (ev->vector) memcpy(seen->v, ev->vector, (size_t)ev->n_vector * sizeof *ev->vector);
    return 0;
}
static toka_request emb_request(const int32_t *tokens, int n, int pooling) {
    toka_request r = toka_request_default();
    r.ids = tokens, r.n_ids = (size_t)n, r.n = 0, r.pooling = pooling;
    return r;
}
static const int emb_lengths[] = {1, 2, 16, 33, 83};

static void emb_fill(int32_t *tokens) {
    uint64_t seed = 11;
    for (int i = 0; i < EMB_MAX; i++) tokens[i] = (int32_t)(5 + rnd(&seed) % 1000);
}

/* Embeds every length by every pooling at the same time, beside requests that sample. */
static void emb_run(toka_options o, emb_seen seen[COUNT(emb_lengths)][4]) {
    int32_t tokens[EMB_MAX];
    toka_err e = {0};
    toka *t = NULL;
    int64_t id;
    emb_fill(tokens);
    o.model = eng_model;
    if (toka_open(&t, &o, &e)) printf("%s\n", e.msg), abort();
    memset(seen, 0, COUNT(emb_lengths) * sizeof *seen);
    for (int i = 0; i < COUNT(emb_lengths); i++)
        for (int pooling = TOKA_POOL_NONE; pooling <= TOKA_POOL_CLS; pooling++) {
            toka_request r = emb_request(tokens, emb_lengths[i], pooling);
            if (!pooling) r.n = 2, r.sampling = eng_greedy(10), r.sampling.ignore_eos = 1, r.prompt_logprobs = i % 2;
            CHECK_MSG(!toka_submit(t, &r, pooling ? emb_collect : NULL, &seen[i][pooling], &id, &e), "%s", e.msg);
        }
    CHECK_MSG(!toka_run(t, 0, &e), "%s", e.msg);
    for (int i = 0; i < COUNT(emb_lengths); i++)
        for (int pooling = TOKA_POOL_LAST; pooling <= TOKA_POOL_CLS; pooling++)
            CHECK(seen[i][pooling].n_events == 1 && seen[i][pooling].finish == TOKA_LENGTH && seen[i][pooling].n == EMB_E);
    for (int i = 0; i < t->engine->n_replicas; i++) {
        scheduler *s = &t->engine->replicas[i].sched;
        CHECK(!sched_check(s) && kv_n_available(&s->kv) == s->config.n_pages);
    }
    toka_close(t);
}

static void test_embeddings(void) {
    static emb_seen want[COUNT(emb_lengths)][4], got[COUNT(emb_lengths)][4];
    toka_options plain = toka_options_default(), cases[8];
    plain.max_num_seqs = 16, plain.max_num_batched_tokens = 512, plain.n_threads = 2;
    for (int i = 0; i < COUNT(cases); i++) cases[i] = plain;
    cases[0].max_num_batched_tokens = 16;
    cases[1].max_num_batched_tokens = 37, cases[1].kv_tokens = 128;
    cases[2].pipeline_parallel_size = 2, cases[2].max_num_batched_tokens = 48;
    cases[3].data_parallel_size = 2;
    cases[4].no_prefix_caching = true, cases[4].n_threads = 1;
    cases[5].max_num_seqs = 1, cases[5].max_num_batched_tokens = 64;
    cases[6].tensor_parallel_size = 2;
    cases[7].device = "plain", cases[7].max_num_batched_tokens = 100;
    emb_run(plain, want);
    for (int k = 0; k < COUNT(cases); k++) {
        emb_run(cases[k], got);
        for (int i = 0; i < COUNT(emb_lengths); i++)
            for (int pooling = TOKA_POOL_LAST; pooling <= TOKA_POOL_CLS; pooling++) {
                const float *a = want[i][pooling].v, *b = got[i][pooling].v;
                bool same = k < 6 ? !memcmp(a, b, sizeof want[i][pooling].v) : eng_rel_l2(b, a, EMB_E) < 1e-5;
                CHECK_MSG(same, "case %d, %d tokens, pooling %d: %g", k, emb_lengths[i], pooling, eng_rel_l2(b, a, EMB_E));
            }
    }
    for (int i = 0; i < COUNT(emb_lengths); i++) { /* one token is its own mean; causal: the first token is the same in all */
        const bool single = emb_lengths[i] == 1;
        CHECK(single == !memcmp(want[i][TOKA_POOL_LAST].v, want[i][TOKA_POOL_MEAN].v, sizeof want[i][1].v));
        CHECK(!memcmp(want[i][TOKA_POOL_CLS].v, want[0][TOKA_POOL_LAST].v, sizeof want[i][1].v));
    }
}

/* The LM head on the vector of a text gives the log-probability of the next token; the mean is that of the last tokens of
 * its prefixes. Dimensions are cut before the norm. */
static void test_embeddings_mean_what_they_say(void) {
    enum { N = 21 };
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    int32_t tokens[EMB_MAX];
    float row[EMB_E], v[EMB_E], mean[EMB_E] = {0};
    toka_err e = {0};
    emb_fill(tokens);
    for (int n = 1; n <= N; n++) {
        emb_seen seen = {0};
        toka_request r = emb_request(tokens, n, TOKA_POOL_LAST);
        CHECK(!toka_generate(t, &r, emb_collect, &seen, NULL, &e) && seen.n == EMB_E);
        for (int i = 0; i < EMB_E; i++) mean[i] += seen.v[i] / N, v[i] = seen.v[i];
    }
    toka_sampling greedy = eng_greedy(1);
    int code;
    eng_collected *g = eng_ask(t, NULL, tokens, N, 1, &greedy, &code, &e);
    double sum = 0, best = -1e30;
    for (int id = 0; id < t->shape.V; id++) {
        double logit = 0;
        toka_weight_row(&t->files->weights.lm_head, id, row);
        for (int i = 0; i < EMB_E; i++) logit += (double)row[i] * v[i];
        sum += exp(logit), best = MAX(best, logit);
    }
    CHECK_MSG(fabs(best - log(sum) - g->logprob[0][0]) < 1e-4, "%g, %g", best - log(sum), (double)g->logprob[0][0]);
    eng_collected_free(g);
    emb_seen seen = {0};
    toka_request r = emb_request(tokens, N, TOKA_POOL_MEAN);
    CHECK(!toka_generate(t, &r, emb_collect, &seen, NULL, &e));
    CHECK_MSG(eng_rel_l2(seen.v, mean, EMB_E) < 1e-5, "%g", eng_rel_l2(seen.v, mean, EMB_E));
    r.dimensions = 10, r.normalize = 1;
    CHECK(!toka_generate(t, &r, emb_collect, &seen, NULL, &e) && seen.n == 10);
    double norm = 0;
    for (int i = 0; i < 10; i++) norm += (double)mean[i] * mean[i];
    for (int i = 0; i < 10; i++) CHECK(fabs(seen.v[i] - mean[i] / sqrt(norm)) < 1e-5);
    toka_close(t);
}

/* An embedding that is preempted in the middle of its prompt computes it again, but adds no row twice. */
static void test_embeddings_preempted(void) {
    int32_t tokens[EMB_MAX];
    toka_options o = toka_options_default();
    toka_err e = {0};
    toka *t;
    emb_seen seen[4] = {0};
    int64_t id;
    emb_fill(tokens);
    o.model = eng_model, o.max_num_seqs = o.max_num_batched_tokens = 5, o.kv_tokens = 512;
    CHECK(!toka_open(&t, &o, &e));
    toka_request r = toka_request_default();
    r.ids = tokens, r.n_ids = 10, r.n = 4, r.sampling = eng_greedy(100), r.sampling.ignore_eos = 1, r.sampling.temperature = 2;
    for (int run = 0; run < 2; run++) {
        if (!run) CHECK(!toka_submit(t, &r, NULL, NULL, &id, &e));
        for (int pooling = TOKA_POOL_MEAN; pooling >= TOKA_POOL_LAST; pooling--) { /* the first is preempted */
            toka_request text = emb_request(tokens + pooling, 257, pooling);
            CHECK(!toka_submit(t, &text, emb_collect, &seen[2 * run + pooling - 1], &id, &e));
        }
        CHECK(!toka_run(t, 0, &e) && (run || toka_get_stats(t).preemptions > 0));
    }
    for (int i = 0; i < 2; i++) CHECK_MSG(!memcmp(seen[i].v, seen[2 + i].v, sizeof seen[i].v), "%d: %g", i, eng_rel_l2(seen[i].v, seen[2 + i].v, EMB_E));
    toka_close(t);
}

static void test_embeddings_edges(void) {
    toka *t = eng_must_open(eng_model, 4, 64, 1);
    const size_t max_len = (size_t)t->shape.max_len;
    int32_t *tokens = mem_alloc((max_len + 1) * sizeof *tokens);
    float v[EMB_E], twice[EMB_E], marked[EMB_E];
    toka_err e = {0};
    int n = 0;
    for (size_t i = 0; i <= max_len; i++) tokens[i] = (int32_t)(5 + i % 50);
    CHECK_MSG(!toka_embed(t, tokens, max_len, 0, v, &n, &e) && n == EMB_E, "%s", e.msg);
    const int64_t rows = toka_get_stats(t).rows;
    CHECK(!toka_embed(t, tokens, max_len, 0, twice, NULL, &e) && !memcmp(v, twice, sizeof v));
    CHECK(toka_get_stats(t).rows - rows == 16); /* of the last page; the others are cached */
    memcpy(marked, v, sizeof v);
    CHECK(toka_embed(t, tokens, max_len + 1, 0, v, &n, &e) == TOKA_E_USE && strstr(e.msg, "at most"));
    CHECK(toka_embed(t, tokens, 0, 0, v, &n, &e) == TOKA_E_USE && strstr(e.msg, "no tokens"));
    CHECK(toka_embed(t, tokens, 3, EMB_E + 1, v, &n, &e) == TOKA_E_USE && strstr(e.msg, "dimensions"));
    CHECK(toka_embed(t, tokens, 3, -1, v, &n, &e) == TOKA_E_USE && strstr(e.msg, "dimensions"));
    CHECK(!memcmp(marked, v, sizeof v));
    double norm = 0;
    CHECK(!toka_embed(t, tokens, 3, 7, v, &n, &e) && n == 7);
    for (int i = 0; i < 7; i++) norm += (double)v[i] * v[i];
    CHECK(fabs(norm - 1) < 1e-6);
    toka_request r = emb_request(tokens, 3, TOKA_POOL_CLS + 1);
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "pooling"));
    r.pooling = TOKA_POOL_LAST, r.n = 1;
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "n 0"));
    r.n = 0, r.prompt_logprobs = 1;
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "prompt_logprobs"));
    emb_seen seen = {0};
    int64_t id;
    r = emb_request(tokens, (int)max_len, TOKA_POOL_MEAN); /* cancelled before its first step, and by closing */
    CHECK(!toka_submit(t, &r, emb_collect, &seen, &id, &e));
    toka_cancel(t, id);
    CHECK(!toka_run(t, 0, &e) && seen.n_events == 1 && seen.finish == TOKA_CANCELLED);
    CHECK(!toka_submit(t, &r, emb_collect, &seen, &id, &e));
    toka_backend no_pool = toka_cpu;
    no_pool.norm_pool = NULL;
    t->engine->backend = &no_pool;
    CHECK(toka_embed(t, tokens, 3, 0, v, &n, &e) == TOKA_E_USE && strstr(e.msg, "device cpu has no embeddings"));
    CHECK(toka_submit(t, &r, NULL, NULL, &id, &e) == TOKA_E_USE && strstr(e.msg, "device cpu has no embeddings"));
    t->engine->backend = &toka_cpu;
    toka_close(t);
    CHECK(seen.n_events == 2 && seen.finish == TOKA_CANCELLED);
    free(tokens);
}

static atomic_int eng_n_ended;
/* The driver must stand still in an event, however little CPU time the test gets; it stands
 * still now. */
static atomic_bool eng_hold_driver, eng_driver_held;
static int eng_count_ends(void *user, const toka_event *ev) {
    (void)user;
    for (; eng_hold_driver; eng_driver_held = true) usleep(100);
    eng_driver_held = false;
    if (ev->finish != TOKA_RUNNING) atomic_fetch_add(&eng_n_ended, 1);
    return 0;
}
static int eng_hold_at_end(void *user, const toka_event *ev) {
    if (ev->finish == TOKA_RUNNING) return 0;
    eng_hold_driver = true;
    atomic_fetch_add((atomic_int *)user, 1);
    return 0;
}

/* A score is finished while other requests run. */
static void test_score_does_not_wait(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    int32_t prompt[] = {5, 6, 7, 8, 9, 10};
    float lp[6];
    int64_t id;
    toka_err e;
    pthread_t driver;
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 4, r.n = 6, r.sampling = eng_greedy(t->shape.max_len - 4), r.sampling.ignore_eos = 1;
    atomic_int n_scored = 0;
    eng_n_ended = 0;
    eng_hold_driver = true;
    CHECK(!toka_submit(t, &r, eng_count_ends, NULL, &id, &e));
    CHECK(!pthread_create(&driver, NULL, eng_run_forever, t));
    for (int i = 0; i < 5; i++) {
        while (!eng_driver_held && eng_n_ended < 6) usleep(100);
        toka_request score = {.ids = prompt, .n_ids = 6, .prompt_logprobs = 1, .sampling = {.top_p = 1, .repetition_penalty = 1}};
        int64_t unused;
        CHECK(!toka_submit(t, &score, eng_hold_at_end, &n_scored, &unused, &e));
        for (eng_hold_driver = false; n_scored <= i;) usleep(100);
    }
    CHECK_MSG(eng_n_ended == 0, "%d samples ended before the score", (int)eng_n_ended);
    toka_cancel(t, id);
    eng_hold_driver = false;
    CHECK(!toka_score(t, prompt, 6, lp, &e));
    toka_stop(t);
    CHECK(!pthread_join(driver, NULL));
    toka_close(t);
}

/* toka_stop ends toka_run at once, also while a thread in toka_generate drives; that thread
 * continues. */
static atomic_bool eng_returned;
static void *eng_run_on_thread(void *arg) {
    eng_run_forever(arg);
    eng_returned = true;
    return NULL;
}
static void *eng_generate_held(void *arg) {
    toka_err e;
    int32_t prompt[] = {5, 6, 7};
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.sampling = eng_greedy(30), r.sampling.ignore_eos = 1;
    CHECK(!toka_generate(arg, &r, eng_count_ends, NULL, NULL, &e));
    return NULL;
}
static void test_stop_while_another_drives(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    pthread_t askers, runs;
    eng_n_ended = 0;
    eng_hold_driver = true;
    eng_returned = false;
    CHECK(!pthread_create(&askers, NULL, eng_generate_held, t));
    while (!eng_driver_held) usleep(100);
    CHECK(!pthread_create(&runs, NULL, eng_run_on_thread, t));
    usleep(2000);
    toka_stop(t);
    for (int i = 0; i < 20000 && !eng_returned; i++) usleep(1000);
    CHECK(eng_returned && eng_n_ended == 0);
    eng_hold_driver = false;
    CHECK(!pthread_join(runs, NULL) && !pthread_join(askers, NULL) && eng_n_ended == 1);
    toka_close(t);
}

/* A replica without work gets a request while the other one is in a long step. */
static int eng_note_end(void *user, const toka_event *ev) {
    if (ev->finish != TOKA_RUNNING) *(int *)user = atomic_fetch_add(&eng_n_ended, 1) + 1;
    return 0;
}
static void test_idle_replica(void) {
    toka *t = NULL;
    toka_err e;
    toka_options o = toka_options_default();
    o.model = eng_model, o.n_threads = 2, o.data_parallel_size = 2, o.max_num_seqs = 8, o.max_num_batched_tokens = 2048;
    CHECK(!toka_open(&t, &o, &e));
    pthread_t driver;
    CHECK(!pthread_create(&driver, NULL, eng_run_forever, t));
    uint64_t seed = 7;
    int32_t prompt[1000];
    bool first = false;
    /* on a busy machine the long step may already be over */
    for (int round = 0; round < 8 && !first; round++) {
        toka_request r = toka_request_default();
        int ends[2] = {0};
        for (int i = 0; i < 1000; i++) prompt[i] = 5 + (int32_t)(rnd(&seed) % 100);
        eng_n_ended = 0;
        r.ids = prompt, r.n_ids = 1000, r.sampling = eng_greedy(1);
        CHECK(!toka_submit(t, &r, eng_note_end, &ends[0], NULL, &e));
        usleep(4000);
        r.n_ids = 3;
        CHECK(!toka_submit(t, &r, eng_note_end, &ends[1], NULL, &e));
        while (eng_n_ended < 2) usleep(100);
        first = ends[1] == 1;
    }
    toka_stop(t);
    CHECK(!pthread_join(driver, NULL) && first);
    toka_close(t);
}

/* At each step, running and waiting samples together are all samples that have not ended. This
 * includes samples that wait for a shared prompt. */
static struct {
    toka *t;
    int64_t step;
    int open, n_steps, n_wrong;
} eng_sum;
static int eng_check_sum(void *user, const toka_event *ev) {
    const toka_stats s = toka_get_stats(eng_sum.t);
    (void)user;
    if (s.steps != eng_sum.step) eng_sum.n_steps++, eng_sum.n_wrong += s.running + s.waiting != eng_sum.open;
    eng_sum.step = s.steps, eng_sum.open -= ev->finish != TOKA_RUNNING;
    return 0;
}
static void test_preempted_wait(void) {
    toka_err e;
    toka_options o = toka_options_default();
    o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 64, o.kv_tokens = 1500, o.max_model_len = 500;
    eng_sum.step = -1, eng_sum.open = 80, eng_sum.n_steps = eng_sum.n_wrong = 0;
    CHECK(!toka_open(&eng_sum.t, &o, &e));
    for (int i = 0; i < 80; i++) {
        toka_request r = toka_request_default();
        r.text = "Once upon a time", r.text_bytes = 16, r.sampling.max_tokens = 400, r.sampling.seed = (uint64_t)i;
        CHECK(!toka_submit(eng_sum.t, &r, eng_check_sum, NULL, NULL, &e));
    }
    CHECK(!toka_run(eng_sum.t, 0, &e));
    CHECK_MSG(!eng_sum.n_wrong && toka_get_stats(eng_sum.t).preemptions, "%d of %d steps", eng_sum.n_wrong, eng_sum.n_steps);
    toka_close(eng_sum.t);
}

/* A row attends to itself and the positions before it, in whatever chunks its prompt was
 * computed. */
static void test_attended_positions(void) {
    for (int most = 7; most <= 64; most += 57) {
        toka *t = eng_must_open(eng_model, 4, most, 1);
        int32_t prompt[40];
        toka_err e;
        for (int i = 0; i < 40; i++) prompt[i] = 5 + i;
        toka_request r = toka_request_default();
        r.ids = prompt, r.n_ids = 40, r.sampling = eng_greedy(1);
        CHECK(!toka_generate(t, &r, NULL, NULL, NULL, &e));
        const toka_stats s = toka_get_stats(t);
        CHECK_MSG(s.attended == 40 * 41 / 2 && !s.attended_shared, "%lld", (long long)s.attended);
        toka_close(t);
    }
}

static struct {
    const void *expected; /* the request of which the next event must be; NULL: any */
    int n_runs, n_more;
} eng_runs;

static int eng_on_run(void *user, const toka_event *ev) {
    CHECK(!eng_runs.expected || eng_runs.expected == user);
    eng_runs.expected = ev->more ? user : NULL;
    eng_runs.n_runs += !ev->more, eng_runs.n_more += ev->more;
    return ev->sample == 3 && ev->finish == TOKA_RUNNING && user == (void *)((char *)&eng_runs + 1);
}

/* An event with `more` is followed by an event of the same request; samples of one prompt come in
 * runs. */
static void test_runs_of_events(void) {
    toka *t = eng_must_open(eng_model, 24, 64, 1);
    int32_t prompt[40];
    toka_err e;
    int64_t id;
    memset(&eng_runs, 0, sizeof eng_runs);
    for (int i = 0; i < 40; i++) prompt[i] = 5 + i % 9;
    for (int i = 0; i < 3; i++) {
        toka_request r = toka_request_default();
        prompt[0] = 5 + i;
        r.ids = prompt, r.n_ids = 40, r.n = 8, r.sampling = eng_greedy(20), r.sampling.temperature = 2, r.prompt_logprobs = i == 2;
        /* the second request cancels itself in the middle */
        CHECK(!toka_submit(t, &r, eng_on_run, (char *)&eng_runs + i, &id, &e));
    }
    CHECK(!toka_run(t, 0, &e) && !eng_runs.expected);
    CHECK_MSG(eng_runs.n_more > 4 * eng_runs.n_runs, "%d runs, %d more", eng_runs.n_runs, eng_runs.n_more);
    toka_close(t);
}

/* Events without text have the same ids. With stop strings there is text, and it says which string
 * ended the sample. */
static void test_ids_only(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_request r = toka_request_default();
    toka_err e;
    static const char *const stop[] = {"zzz", "apples"};
    toka_sampling s = eng_greedy(40);
    int code;
    eng_collected *want = eng_ask(t, eng_problem, NULL, 0, 1, &s, &code, &e);
    for (int stops = 0; stops < 3; stops += 2) {
        eng_prompt_rows_seen *g = mem_zalloc(sizeof *g);
        r.text = eng_problem, r.text_bytes = strlen(eng_problem), r.sampling = s, r.ids_only = 1;
        r.sampling.stop = stop, r.sampling.n_stop = stops;
        CHECK(!toka_generate(t, &r, eng_on_place, g, NULL, &e));
        CHECK((g->n_text > 0) == (stops > 0) && !memcmp(g->out[0].p, want->id[0].p, g->out[0].n * 4));
        CHECK(stops || g->out[0].n == want->id[0].n);
        CHECK(stops == 0 || g->n_cached[0] > 0); /* the same prompt for the second time */
        eng_prompt_rows_free(g);
    }
    eng_collected_free(want);
    toka_close(t);
}

/* The place where greedy text ends by a stop string that counts after the first `min_tokens`
 * tokens: the string's first byte, or the text's length. *n_tok: the tokens until then. */
static size_t eng_stop_place(const toka *t, const eng_collected *whole, const char *stop, int min_tokens, int *n_tok) {
    buf text = {0};
    size_t at = SIZE_MAX;
    *n_tok = 0;
    for (int i = 0; i < (int)whole->id[0].n && at == SIZE_MAX; i++) {
        size_t from = text.n;
        tok_put_bytes(t->tokenizer, whole->id[0].p[i], &text), ++*n_tok;
        for (size_t end = from + 1; i >= min_tokens && end <= text.n && at == SIZE_MAX; end++)
            if (str_ends((str){text.p, end}, str_c(stop))) at = end - strlen(stop);
    }
    at = MIN(at, text.n);
    buf_free(&text);
    return at;
}

/* A stop string counts only after the first min_tokens tokens, as an end id does. It may begin
 * inside them. */
static int eng_end_early(void *user, const toka_event *ev) { /* sample k ends with its token k, sample 0 never */
    int *count = user; /* [sample] its tokens; [8] events with an end */
    count[ev->sample]++, count[8] += ev->finish != TOKA_RUNNING;
    return ev->sample && count[ev->sample] == ev->sample ? TOKA_END_SAMPLE : 0;
}

/* A callback ends single samples; the others go on, and what is in flight is dropped. */
static void test_callback_ends_samples(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    const int32_t prompt[] = {5, 6, 7};
    int count[9] = {0};
    toka_err e;
    toka_usage usage;
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 8, r.sampling = eng_greedy(20), r.sampling.ignore_eos = 1;
    CHECK(!toka_generate(t, &r, eng_end_early, count, &usage, &e));
    for (int k = 1; k < 8; k++) CHECK_MSG(count[k] == k, "sample %d: %d tokens", k, count[k]);
    CHECK(count[0] == 20 && count[8] == 1 && usage.output_tokens == 20 + 28);
    toka_stats stats = toka_get_stats(t);
    CHECK(!stats.running && !stats.waiting);
    toka_close(t);
}

static void test_min_tokens_and_stops(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(12);
    s.ignore_eos = 1;
    eng_collected *whole = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    str text = buf_view(&whole->text[0]);
    CHECK(whole->id[0].n == 12 && text.n >= 17);
    for (int i = 0; i < 5 * 6 * 2 * 2; i++) {
        char stop[16] = {0};
        const char *stops[] = {"never to be seen", stop};
        int min_lines = i % 5, n_tok;
        memcpy(stop, text.p + i / 5 % 6 * 2, i / 60 ? 7 : 2);
        s.stop = stops, s.n_stop = 2, s.min_tokens = min_lines, s.include_stop = i / 30 % 2;
        size_t at = eng_stop_place(t, whole, stop, min_lines, &n_tok), shown = MIN(text.n, at + (s.include_stop ? strlen(stop) : 0));
        eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 3, &s);
        for (int k = 0; k < 3; k++)
            CHECK_MSG(g->finish[k] == (at < text.n ? TOKA_STOP : TOKA_LENGTH) && (int)g->id[k].n == n_tok &&
                      str_eq(buf_view(&g->text[k]), str_sub(text, 0, shown)),
                      "'%s' behind %d: %d tokens, not %d: '%s'", stop, min_lines, (int)g->id[k].n, n_tok, g->text[k].p);
        eng_collected_free(g);
    }
    eng_collected_free(whole);
    toka_close(t);
}

/* If only end ids are allowed, min_tokens cannot hold: the request is refused. */
static void test_only_end_ids_allowed(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(9);
    toka_request r = toka_request_default();
    toka_err e;
    s.allowed_ids = t->files->config.eos_ids, s.n_allowed = t->files->config.n_eos_ids;
    eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK_MSG((int)g->id[0].n == 1 && g->finish[0] == TOKA_STOP, "%d", (int)g->id[0].n);
    eng_collected_free(g);
    s.min_tokens = 1, r.sampling = s, r.text = "Tom", r.text_bytes = 3;
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_USE && strstr(e.msg, "nothing is left to draw, as min_tokens forbids"));
    toka_close(t);
}

/* A sample for which no token is allowed ends without a token, and never contains a bad word. T is
 * allowed, TTT is not; or of four ids any two in a row are forbidden. */
static void test_no_token_allowed(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(9);
    toka_err e;
    const int32_t allowed[] = {55, 56, 57, 58};
    const char *words[16] = {"TTT"};
    char pair[16][3] = {{0}};
    const int orders[] = {1, 3};
    for (int k = 0; k < 16; k++) pair[k][0] = (char)('T' + k / 4), pair[k][1] = (char)('T' + k % 4);
    for (int i = 0; i < 8; i++) {
        for (int k = 0; k < 16 && i >= 4; k++) words[k] = pair[k];
        s.allowed_ids = allowed, s.n_allowed = i < 4 ? 1 : 4, s.temperature = (float)(i % 2), s.min_tokens = i % 4 / 2 * 9;
        CHECK_MSG(!toka_words_new(&s.bad_words, t, words, i < 4 ? 1 : 16, &e), "%s", e.msg);
        eng_collected *g = eng_ask_problem(t, str_c(eng_problem), orders[i % 2], &s);
        toka_words_del(s.bad_words);
        for (int k = 0; k < orders[i % 2]; k++) {
            const int n = i < 4 ? 2 : 1;
            CHECK_MSG(g->finish[k] == TOKA_STOP && (int)g->id[k].n == n && (int)g->text[k].n == n && g->stop_id[k] == -1,
                      "%d: finish %d, %d tokens: '%s'", i, g->finish[k], (int)g->id[k].n, g->text[k].p);
        }
        eng_collected_free(g);
    }
    toka_close(t);
}

/* A word that the model says does not occur again once it is forbidden: with or without a space
 * before it, alone or with the words after it, greedy or at a high temperature, however it is
 * tokenized. */
static void test_bad_texts(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(30);
    toka_err e;
    s.ignore_eos = 1;
    eng_collected *whole = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    const str text = buf_view(&whole->text[0]);
    for (size_t at = 0, end; at < text.n; at = end + 1) {
        while (at < text.n && text.p[at] == ' ') at++;
        for (end = at; end < text.n && text.p[end] != ' ';) end++;
        for (int k = 0; k < 4; k++) {
            char word[64] = " ";
            const char *words[] = {"never to be seen", k % 2 ? word : word + 1};
            size_t next = end;
            while (k / 2 && next < text.n && (next == end || text.p[next] != ' ')) next++;
            memcpy(word + 1, text.p + at, MIN(next - at, (size_t)40));
            s.temperature = k == 3 ? 2.0f : 0;
            CHECK_MSG(!toka_words_new(&s.bad_words, t, words, 2, &e), "%s", e.msg);
            eng_collected *g = eng_ask_problem(t, str_c(eng_problem), k == 3 ? 8 : 1, &s);
            for (int i = 0; i < (k == 3 ? 8 : 1); i++)
                for (size_t p = 0; p < g->text[i].n; p++)
                    CHECK_MSG(!samp_is_word_at(&t->tokenizer->uni, buf_view(&g->text[i]), p, str_c(word + 1)), "'%s' is in '%s'", word, g->text[i].p);
            eng_collected_free(g), toka_words_del(s.bad_words);
        }
    }
    eng_collected_free(whole);
    toka_close(t);
}

/* What greedy decoding says is forbidden piece by piece, first a token, then a pair. None of it
 * occurs again. */
static void test_bad_words(void) {
    toka *t = eng_must_open(eng_model, 8, 64, 1);
    toka_sampling s = eng_greedy(40);
    eng_collected *g = eng_ask_problem(t, str_c(eng_problem), 1, &s);
    CHECK(g->id[0].n > 8);
    int32_t bad[] = {g->id[0].p[5], g->id[0].p[0], g->id[0].p[1]};
    int lengths[] = {1, 2};
    s.bad_ids = bad, s.bad_lengths = lengths, s.n_bad = 2, s.min_tokens = 30;
    eng_collected *h = eng_ask_problem(t, str_c(eng_problem), 4, &s);
    CHECK(h->id[0].n >= 30 && h->id[0].p[0] == bad[1] && h->id[0].p[1] != bad[2]);
    for (int i = 0; i < 4; i++)
        for (size_t k = 0; k < h->id[i].n; k++)
            CHECK(h->id[i].p[k] != bad[0] && (!k || h->id[i].p[k - 1] != bad[1] || h->id[i].p[k] != bad[2]));
    eng_collected_free(g), eng_collected_free(h);
    toka_close(t);
}

/* Penalties and bad words, as ids or as texts, need no token on the host: such requests take as many
 * steps as others. */
static void test_history_never_waits(void) {
    static const int32_t bad[] = {300, 7, 9};
    static const int lengths[] = {1, 2};
    int64_t want = 0;
    static const char *const texts[] = {"never to be seen", "apples"};
    toka_err e;
    for (int kind = 0; kind < 6; kind++) {
        toka *t = eng_must_open(eng_model, 8, 64, 1);
        toka_sampling s = eng_greedy(30);
        s.temperature = 1, s.ignore_eos = 1;
        if (kind == 1) s.repetition_penalty = 1.05f;
        if (kind == 2) s.presence_penalty = 0.5f;
        if (kind == 3) s.frequency_penalty = 0.5f;
        if (kind == 4) s.bad_ids = bad, s.bad_lengths = lengths, s.n_bad = 2;
        if (kind == 5) CHECK(!toka_words_new(&s.bad_words, t, texts, 2, &e));
        eng_collected_free(eng_ask_problem(t, str_c(eng_problem), 20, &s));
        toka_words_del(s.bad_words);
        const int64_t steps = toka_get_stats(t).steps;
        if (!kind) want = steps;
        CHECK_MSG(steps == want && want > 60, "kind %d: %lld steps, expected %lld", kind, (long long)steps, (long long)want);
        toka_close(t);
    }
}

/* Penalties see the ids of shared and of copied pages: samples of one prompt, which share its pages
 * and copy its last one, are equal to samples that compute everything themselves. */
static void test_penalties_shared(void) {
    eng_collected *got[2];
    for (int alone = 0; alone < 2; alone++) {
        toka_options o = toka_options_default();
        toka *t;
        toka_err e;
        o.model = eng_model, o.n_threads = 1, o.max_num_seqs = 8, o.no_prefix_caching = alone;
        CHECK(!toka_open(&t, &o, &e));
        toka_sampling s = eng_greedy(30);
        s.temperature = 1, s.repetition_penalty = 1.3f, s.presence_penalty = 0.4f, s.frequency_penalty = 0.2f, s.ignore_eos = 1;
        got[alone] = eng_ask_problem(t, str_c("Tom has 12 apples and eats 3. How many are left?"), 12, &s);
        CHECK(alone || toka_get_stats(t).prompt_tokens_shared > 0);
        toka_close(t);
    }
    for (int i = 0; i < 12; i++) {
        const ids *a = &got[0]->id[i], *b = &got[1]->id[i];
        CHECK_MSG(a->n == 30 && b->n == 30 && !memcmp(a->p, b->p, 30 * sizeof *a->p), "sample %d", i);
        CHECK_MSG(eng_close_to(got[0]->sampled[i], got[1]->sampled[i], 30, 0), "sample %d", i);
    }
    eng_collected_free(got[0]), eng_collected_free(got[1]);
}

/* A cache that is sized by the longest sequences has whole pages for each: all run at once, and
 * none is preempted. */
static void test_short_sequences(void) {
    for (int len = 4; len <= 20; len += 14) {
        toka_options o = toka_options_default();
        toka *t;
        toka_err e;
        o.model = eng_model, o.device = "cpu", o.max_model_len = len, o.max_num_seqs = 40;
        CHECK(!toka_open(&t, &o, &e));
        toka_sampling s = eng_greedy(len - 2);
        toka_request r = toka_request_default();
        s.ignore_eos = 1, r.sampling = s, r.n = 1, r.n_ids = 2;
        for (int i = 0; i < 40; i++) {
            r.ids = (int32_t[]){20 + i, 21};
            CHECK(!toka_submit(t, &r, NULL, NULL, &(int64_t){0}, &e));
        }
        CHECK(!toka_run(t, 0, &e));
        const toka_stats stats = toka_get_stats(t);
        CHECK_MSG(!stats.preemptions && stats.steps <= len, "%d: %d steps, %d preemptions", len, (int)stats.steps, (int)stats.preemptions);
        toka_close(t);
    }
}

typedef struct eng_stats_seen { /* statistics during the events */
    toka *t;
    int64_t tokens;
    int n_late;
} eng_stats_seen;

static int eng_count_now(void *user, const toka_event *ev) {
    eng_stats_seen *c = user;
    c->tokens += ev->id >= 0;
    c->n_late += toka_get_stats(c->t).output_tokens < c->tokens;
    return 0;
}

/* When a token's event comes, the statistics count the token. When a request has ended, they count
 * its end. */
static void test_statistics_are_current(void) {
    toka *t = eng_must_open("test/model", 8, 64, 2);
    eng_stats_seen c = {.t = t};
    toka_err e = {0};
    CHECK(toka_get_stats(t).kv_pages > 0 && !toka_get_stats(t).steps); /* before the first step */
    toka_request r = toka_request_default();
    r.text = "Tom has", r.text_bytes = 7, r.n = 20, r.sampling.max_tokens = 9, r.sampling.ignore_eos = 1;
    for (int i = 1; i <= 3; i++) {
        CHECK(toka_generate(t, &r, eng_count_now, &c, NULL, &e) == 0);
        toka_stats s = toka_get_stats(t);
        CHECK(s.output_tokens == c.tokens && s.requests_done == i);
    }
    CHECK_MSG(c.tokens == 3 * 180 && !c.n_late, "%lld tokens, %d times behind", (long long)c.tokens, c.n_late);
    toka_close(t);
}

/* A backend that takes time to load and on which the group of the second replica cannot be
 * opened. */
static int eng_slow_open(toka_device **out, const toka_device_options *o, const toka_shape *s, const toka_weights *w, toka_err *e) {
    for (int i = 0; i < 20 && o->progress; i++) {
        o->progress(o->user, i < 10 ? "loading weights" : "taking memory", i / 20.0);
        usleep(2000);
    }
    return toka_cpu.open(out, o, s, w, e);
}
static int eng_one_group(toka_group **out, int tp, int pp, toka_err *e) {
    static int n;
    return n++ ? fail(e, TOKA_E_DEVICE, "no second group") : toka_cpu.group_open(out, tp, pp, e);
}

typedef struct eng_phase_calls { /* progress of the phases, for the caller of toka_open */
    atomic_int at_once;
    int n, n_phase_ends, n_late; /* all calls; calls that end a phase; calls after that end */
} eng_phase_calls;
static void eng_on_phase(void *user, const char *what, double done) {
    eng_phase_calls *t = user;
    CHECK_MSG(!atomic_fetch_add(&t->at_once, 1), "two threads report %s at once", what);
    usleep(500);
    t->n++, t->n_late += t->n_phase_ends > 0, t->n_phase_ends += done >= 1;
    atomic_fetch_sub(&t->at_once, 1);
}

/* While the first replica's ranks load, only one thread at a time reports a phase, and none after
 * its end. The thread sanitizer checks more. */
static void test_open_that_fails(void) {
    toka_backend be = toka_cpu;
    toka_options o = toka_options_default();
    eng_phase_calls phase_calls = {0};
    toka *t = eng_must_open(eng_model, 4, 16, 1);
    toka_err e = {0};
    be.open = eng_slow_open, be.group_open = eng_one_group;
    o.tensor_parallel_size = o.data_parallel_size = 2, o.max_num_seqs = 4, o.progress = eng_on_phase, o.progress_user = &phase_calls;
    eng *g;
    t->shape = t->files->shape;
    CHECK(eng_open(&g, &be, t->files, &t->shape, t->tokenizer, &o, &e) == TOKA_E_DEVICE && !strcmp(e.msg, "no second group"));
    CHECK_MSG(phase_calls.n > 20 && phase_calls.n_phase_ends == 1 && !phase_calls.n_late,
        "%d calls, %d ends, %d after the end", phase_calls.n, phase_calls.n_phase_ends, phase_calls.n_late);
    toka_close(t);
}

/* A rank hangs in the largest step, during open. Memory and files that it may still read must
 * stay. */
static void test_open_that_hangs(void) {
    toka_backend be = toka_cpu;
    toka_options o = toka_options_default();
    toka *t = eng_must_open("test/fixtures/llama-tied", 4, 16, 1);
    toka_err e = {0};
    static const mf_model *files;
    files = t->files;
    eng_close(t->engine);
    be.warm_up = true, o.max_num_seqs = 4, o.tensor_parallel_size = 2;
    t->shape = files->shape, t->engine = NULL;
    setenv("TOKA_DEBUG_STALL", "1", 1), setenv("TOKA_DEBUG_PATIENCE", "1", 1);
    int code = eng_open(&t->engine, &be, files, &t->shape, t->tokenizer, &o, &e);
    unsetenv("TOKA_DEBUG_STALL"), unsetenv("TOKA_DEBUG_PATIENCE");
    CHECK_MSG(code == TOKA_E_DEVICE && t->engine, "%d: %s", code, e.msg);
    toka_close(t);
    const volatile char *weights = files->weights.embed.data;
    CHECK(weights[0] == weights[0]);
}

/* A KV cache of any size that can be asked for. */
static void test_kv_sizes(void) {
    static const struct {
        int64_t asked;
        int code, len, pages;
    } cases[] = {{1, TOKA_E_USE, 0, 0}, {2, 0, 2, 1}, {16, 0, 16, 1}, {17, 0, 17, 2}, {999, 0, 96, 63},
                 {(int64_t)INT_MAX + 1, 0, 96, INT_MAX / 16}, {INT64_MAX, 0, 96, INT_MAX / 16}};
    for (int i = 0; i < COUNT(cases); i++) {
        toka_shape s = {.B = 16, .max_len = 96};
        toka_err e;
        int n = 0, code = eng_size_kv(&s, 0, cases[i].asked, 0, &n, &e);
        CHECK_MSG(code == cases[i].code && n == cases[i].pages && (code || s.max_len == cases[i].len), "case %d: %d, %d pages", i, code, n);
    }
}

/* ---- Weights that change ---- */

typedef struct eng_user { /* a thread that generates until it is stopped */
    toka *t;
    atomic_int *stop;
    const eng_collected *want;
    int n_same, n_other;
} eng_user;

static void *eng_use(void *user) {
    eng_user *u = user;
    toka_err e;
    int code;
    while (!*u->stop) {
        toka_sampling s = eng_greedy(12);
        eng_collected *g = eng_ask(u->t, "Tom has 12 apples. He buys 7 more apples. How many?", NULL, 0, 2, &s, &code, &e);
        const bool same = !code && g->id[1].n == u->want->id[1].n && !memcmp(g->id[1].p, u->want->id[1].p, 4 * g->id[1].n);
        u->n_same += same, u->n_other += !same;
        eng_collected_free(g);
    }
    return NULL;
}

/* Threads generate, and drive by turns, while others pause, update with the same weights, and resume: no answer changes. */
static void test_updates(void) {
    toka *t = eng_must_open("test/model", 4, 16, 1);
    toka_err e = {0};
    int code;
    atomic_int stop = 0;
    toka_sampling s = eng_greedy(12);
    eng_collected *want = eng_ask(t, "Tom has 12 apples. He buys 7 more apples. How many?", NULL, 0, 2, &s, &code, &e);
    eng_user users[3];
    pthread_t threads[3];
    CHECK(!code && !toka_pause(t, 0, &e) && toka_get_stats(t).paused); /* no thread drives */
    CHECK(!toka_update_weights(t, "test/model", &e) && toka_get_stats(t).weight_updates == 1);
    for (int i = 0; i < 3; i++) {
        users[i] = (eng_user){t, &stop, want, 0, 0};
        pthread_create(&threads[i], NULL, eng_use, &users[i]);
    }
    usleep(20000);
    CHECK(toka_get_stats(t).paused && users[0].n_same == 0);
    CHECK(!toka_resume(t, &e) && !toka_resume(t, &e));
    for (int i = 0; i < (SANITIZED ? 6 : 20); i++) {
        if (i % 3) CHECK(!toka_pause(t, i % 3 == 2, &e) && !toka_pause(t, i % 2, &e));
        CHECK_MSG(!toka_update_weights(t, "test/model", &e), "%s", e.msg);
        CHECK(toka_update_weights(t, "test/fixtures/qwen3", &e) == TOKA_E_INPUT && e.msg[0]);
        if (i % 4 == 0) CHECK(!toka_reset_prefix_cache(t, &e));
        CHECK(!toka_resume(t, &e));
        usleep(2000);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CHECK_MSG(users[i].n_same > 0 && !users[i].n_other, "%d same, %d other", users[i].n_same, users[i].n_other);
    }
    CHECK(toka_get_stats(t).weight_updates == 1 + (SANITIZED ? 6 : 20) && !sched_check(&t->engine->replicas[0].sched));
    eng_collected_free(want);
    toka_close(t);
}

typedef struct eng_versions {
    int first, last, n, cancelled;
} eng_versions;

static int eng_note_version(void *user, const toka_event *ev) {
    eng_versions *v = user;
    if (ev->id >= 0 && !v->n++) v->first = ev->version;
    v->last = ev->version;
    v->cancelled += ev->finish == TOKA_CANCELLED;
    return 0;
}

static char eng_was_overtaken;

/* Returns NULL; &eng_was_overtaken; or t for another error. */
static void *eng_pause_waits(void *t) {
    toka_err e;
    if (!toka_pause(t, 1, &e)) return NULL;
    return e.code == TOKA_E_CANCELLED ? &eng_was_overtaken : t;
}

/* A pause that waits for long requests ends when the engine shall go on, or pause at once. */
static void test_pause_is_overtaken(void) {
    toka *t = eng_must_open("test/model", 4, 64, 1);
    toka_err e = {0};
    pthread_t driver, pauser;
    eng_versions seen = {0};
    int32_t prompt[] = {5, 6, 7};
    int64_t id;
    void *result;
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 1000, r.sampling = eng_greedy(200), r.sampling.ignore_eos = 1;
    CHECK(!toka_submit(t, &r, eng_note_version, &seen, &id, &e));
    CHECK(!pthread_create(&driver, NULL, eng_run_forever, t));
    for (int pauses = 0; pauses < 2; pauses++) {
        CHECK(!pthread_create(&pauser, NULL, eng_pause_waits, t));
        for (bool waits = false; !waits; usleep(100)) {
            pthread_mutex_lock(&t->engine->lock);
            waits = t->engine->order != NULL;
            pthread_mutex_unlock(&t->engine->lock);
        }
        CHECK(!(pauses ? toka_pause(t, 0, &e) : toka_resume(t, &e)));
        CHECK(!pthread_join(pauser, &result) && result == &eng_was_overtaken);
        CHECK(toka_get_stats(t).paused == pauses && !toka_get_stats(t).requests_done);
    }
    CHECK(!toka_pause(t, 1, &e)); /* it is paused */
    toka_cancel(t, id);
    CHECK(!toka_resume(t, &e) && !toka_pause(t, 1, &e));
    CHECK(toka_get_stats(t).requests_done == 1 && seen.cancelled > 0);
    toka_stop(t);
    CHECK(!pthread_join(driver, NULL));
    toka_close(t);
}

/* A request that no step has seen came before the pause all the same. */
static void test_pause_after_submit(void) {
    toka *t = eng_must_open("test/model", 4, 64, 1);
    toka_err e = {0};
    eng_versions seen = {0};
    int32_t prompt[] = {5, 6, 7};
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 2, r.sampling = eng_greedy(5), r.sampling.ignore_eos = 1;
    CHECK(!toka_submit(t, &r, eng_note_version, &seen, NULL, &e));
    CHECK(!toka_pause(t, 1, &e) && toka_get_stats(t).paused);
    CHECK(seen.n == 10 && toka_get_stats(t).requests_done == 1);
    CHECK(!toka_submit(t, &r, eng_note_version, &seen, NULL, &e) && !toka_pause(t, 1, &e));
    CHECK(seen.n == 10 && toka_get_stats(t).requests_done == 1);
    toka_close(t);
}

/* One thread drives. While it waits for the end of a request, later ones stay in the inbox, and can be cancelled there. */
static void test_pause_waits(void) {
    enum { TOKENS = SANITIZED ? 20 : 100 };
    toka *t = eng_must_open("test/model", 4, 16, 1);
    toka_err e = {0};
    pthread_t driver, pauser;
    eng_versions early = {0}, cancelled = {0}, late = {0};
    int32_t prompt[] = {5, 6, 7};
    int64_t id;
    void *failed;
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 6, r.sampling = eng_greedy(TOKENS), r.sampling.ignore_eos = 1;
    CHECK(!pthread_create(&driver, NULL, eng_run_forever, t));
    CHECK(!toka_pause(t, 0, &e)); /* so that the order of the next three is certain */
    CHECK(!toka_submit(t, &r, eng_note_version, &early, NULL, &e) && !toka_resume(t, &e));
    CHECK(!pthread_create(&pauser, NULL, eng_pause_waits, t));
    for (bool waits = false; !waits; usleep(100)) {
        pthread_mutex_lock(&t->engine->lock);
        waits = t->engine->order || t->engine->paused;
        pthread_mutex_unlock(&t->engine->lock);
    }
    CHECK(!toka_submit(t, &r, eng_note_version, &cancelled, &id, &e));
    toka_cancel(t, id);
    CHECK(!toka_submit(t, &r, eng_note_version, &late, NULL, &e));
    CHECK(!pthread_join(pauser, &failed) && !failed);
    CHECK(early.n == 6 * TOKENS && !late.n && !early.last && toka_get_stats(t).paused);
    CHECK_MSG(!toka_update_weights(t, "test/model", &e), "%s", e.msg);
    while (toka_get_stats(t).requests_done < 2) usleep(100);
    CHECK(cancelled.cancelled == 6 && !cancelled.n && !late.n);
    CHECK(!toka_resume(t, &e));
    while (toka_get_stats(t).requests_done < 3) usleep(100);
    CHECK(late.n == 6 * TOKENS && late.first == 1 && late.last == 1);
    toka_stop(t);
    CHECK(!pthread_join(driver, NULL));
    toka_close(t);
}

static int eng_refuse_rebind(toka_device *d, const toka_weights *weights, bool commit, toka_err *e) {
    return eng_steps_left-- > 0 ? toka_cpu.rebind(d, weights, commit, e) : fail(e, TOKA_E_INPUT, "injected refusal");
}

/* A device that refuses the weights at the last moment, after other ranks took them: the old ones stay, in all ranks. */
static void test_update_refused(void) {
    toka_options o = toka_options_default();
    toka_err e = {0};
    toka *t;
    int code;
    o.model = "test/model", o.tensor_parallel_size = 2, o.data_parallel_size = 2, o.max_num_seqs = 4, o.n_threads = 2;
    CHECK(!toka_open(&t, &o, &e));
    toka_backend faulty = toka_cpu;
    faulty.rebind = eng_refuse_rebind;
    toka_sampling s = eng_greedy(20);
    eng_collected *want = eng_ask(t, "Tom has 12 apples.", NULL, 0, 1, &s, &code, &e);
    t->engine->backend = &faulty;
    for (int i = 0; i < 2; i++) t->engine->replicas[i].model.backend = &faulty;
    for (int n = 0; n < 5; n++) { /* four ranks are asked; with n 4 all agree, and then must succeed */
        const void *before = t->files->weights.layers[0].q.data;
        eng_steps_left = n < 4 ? n : 100;
        code = toka_update_weights(t, "test/model", &e);
        CHECK_MSG(code == (n < 4 ? TOKA_E_INPUT : 0), "%d ranks: %s", n, e.msg);
        CHECK((t->files->weights.layers[0].q.data == before) == (n < 4) && toka_get_stats(t).weight_updates == (n == 4));
        CHECK((t->files->source != NULL) == (n == 4));
        eng_collected *got = eng_ask(t, "Tom has 12 apples.", NULL, 0, 1, &s, &code, &e);
        CHECK(!code && got->id[0].n == want->id[0].n && !memcmp(got->logprob[0], want->logprob[0], got->id[0].n * sizeof(float)));
        eng_collected_free(got);
    }
    eng_collected_free(want);
    toka_close(t);
}

/* Threads generate, and drive by turns, while parts of the memory are given back and taken again: running samples lose their K
 * and V, the prefix cache is empty, files are unmapped. No answer changes. */
static void test_sleep(void) {
    static const struct { int parts, drops, wake[2]; } cases[] = {
        {TOKA_PART_ALL, 0, {TOKA_PART_ALL}}, {TOKA_PART_ALL, 1, {TOKA_PART_ALL}}, {TOKA_PART_KV, 0, {TOKA_PART_KV}},
        {TOKA_PART_WEIGHTS, 1, {TOKA_PART_WEIGHTS}}, {TOKA_PART_ALL, 1, {TOKA_PART_WEIGHTS, TOKA_PART_KV}},
        {TOKA_PART_ALL, 1, {TOKA_PART_KV, TOKA_PART_WEIGHTS}}};
    toka *t = eng_must_open("test/model", 4, 16, 1);
    toka_err e = {0};
    int code;
    atomic_int stop = 0;
    toka_sampling s = eng_greedy(12);
    eng_collected *want = eng_ask(t, "Tom has 12 apples. He buys 7 more apples. How many?", NULL, 0, 2, &s, &code, &e);
    eng_user users[3];
    pthread_t threads[3];
    CHECK(!code);
    for (int i = 0; i < 3; i++) {
        users[i] = (eng_user){t, &stop, want, 0, 0};
        pthread_create(&threads[i], NULL, eng_use, &users[i]);
    }
    for (int i = 0; i < (SANITIZED ? 6 : 24); i++) {
        const int which = i % COUNT(cases), parts = cases[which].parts;
        usleep(3000);
        CHECK_MSG(!toka_sleep(t, parts, cases[which].drops, &e), "%s", e.msg);
        const toka_stats before = toka_get_stats(t);
        CHECK(before.sleeping == parts && before.paused && t->files->dropped == cases[which].drops);
        CHECK(!(parts & TOKA_PART_KV) || (!before.running && !t->engine->replicas[0].sched.n_running));
        CHECK(toka_resume(t, &e) == TOKA_E_USE && strstr(e.msg, "sleeps"));
        CHECK(!toka_sleep(t, TOKA_PART_KV, 0, &e) && !toka_wake_up(t, TOKA_PART_KV & ~parts, &e));
        CHECK(toka_sleep(t, 4, 0, &e) == TOKA_E_USE && toka_get_stats(t).steps == before.steps);
        if (i % 5 == 1) CHECK_MSG(!toka_update_weights(t, "test/model", &e), "%s", e.msg);
        CHECK(!sched_check(&t->engine->replicas[0].sched));
        for (int k = 0; k < 2; k++)
            if (cases[which].wake[k]) CHECK_MSG(!toka_wake_up(t, cases[which].wake[k], &e), "%s", e.msg);
        CHECK(!toka_wake_up(t, TOKA_PART_ALL, &e) && !toka_get_stats(t).sleeping && !toka_get_stats(t).paused && !t->files->dropped);
    }
    stop = 1;
    for (int i = 0; i < 3; i++) {
        pthread_join(threads[i], NULL);
        CHECK_MSG(users[i].n_same > 0 && !users[i].n_other, "%d same, %d other", users[i].n_same, users[i].n_other);
    }
    eng_collected_free(want);
    toka_close(t);
}

static int eng_refuse_sleep(toka_device *d, int parts, bool drops, toka_err *e) {
    return eng_steps_left-- > 0 ? toka_cpu.sleep(d, parts, drops, e) : fail(e, TOKA_E_MEMORY, "injected refusal");
}
static int eng_refuse_wake(toka_device *d, int parts, toka_err *e) {
    return eng_steps_left-- > 0 ? toka_cpu.wake(d, parts, e) : fail(e, TOKA_E_MEMORY, "injected refusal");
}

/* A rank that cannot give its memory back: all ranks go on. One that gets none: the engine sleeps until it does. */
static void test_sleep_refused(void) {
    toka_options o = toka_options_default();
    toka_err e = {0};
    toka *t;
    int code;
    o.model = "test/model", o.tensor_parallel_size = 2, o.data_parallel_size = 2, o.max_num_seqs = 4, o.n_threads = 2;
    CHECK(!toka_open(&t, &o, &e));
    toka_backend faulty = toka_cpu;
    faulty.sleep = eng_refuse_sleep, faulty.wake = eng_refuse_wake;
    toka_sampling s = eng_greedy(20);
    eng_collected *want = eng_ask(t, "Tom has 12 apples.", NULL, 0, 1, &s, &code, &e);
    t->engine->backend = &faulty;
    for (int i = 0; i < 2; i++) t->engine->replicas[i].model.backend = &faulty;
    for (int n = 0; n < 5; n++) { /* four ranks are asked */
        eng_steps_left = n < 4 ? n : 100;
        code = toka_sleep(t, TOKA_PART_ALL, 1, &e);
        CHECK(code == (n < 4 ? TOKA_E_MEMORY : 0) && toka_get_stats(t).sleeping == (n < 4 ? 0 : TOKA_PART_ALL));
        if (n == 4) {
            eng_steps_left = 3;
            CHECK(toka_wake_up(t, TOKA_PART_ALL, &e) == TOKA_E_MEMORY && t->files->dropped && toka_get_stats(t).sleeping == TOKA_PART_ALL);
            eng_steps_left = 5; /* the weights come back, K and V do not */
            CHECK(toka_wake_up(t, TOKA_PART_ALL, &e) == TOKA_E_MEMORY && !t->files->dropped && toka_get_stats(t).sleeping == TOKA_PART_KV);
            eng_steps_left = 4;
            CHECK(!toka_wake_up(t, TOKA_PART_ALL, &e));
        }
        eng_collected *got = eng_ask(t, "Tom has 12 apples.", NULL, 0, 1, &s, &code, &e);
        CHECK(!code && got->id[0].n == want->id[0].n && !memcmp(got->logprob[0], want->logprob[0], got->id[0].n * sizeof(float)));
        eng_collected_free(got);
    }
    eng_collected_free(want);
    faulty.sleep = NULL;
    CHECK(toka_sleep(t, TOKA_PART_ALL, 0, &e) == TOKA_E_USE && strstr(e.msg, "cannot give its memory back"));
    toka_close(t);
}

/* What a GPU refuses if it was not opened for that: to give memory back and to take other weights. */
static void test_gpu_refuses(void) {
    const toka_backend *const cpu = &toka_cpu;
    toka_backend gpu = *cpu; /* with the properties of toka_cuda */
    gpu.name = "cuda", gpu.reads_files = gpu.has_drafts = false;
    toka *t = eng_must_open("test/model", 4, 16, 1);
    toka_err e = {0};
    t->engine->backend = &gpu;
    CHECK(toka_sleep(t, TOKA_PART_ALL, 0, &e) == TOKA_E_USE && strstr(e.msg, "device cuda cannot give its memory back (--enable-sleep-mode)"));
    CHECK(toka_update_weights(t, "test/model", &e) == TOKA_E_USE && strstr(e.msg, "open model (--enable-sleep-mode)"));
    CHECK(toka_patch_weights(t, "test/model", NULL, &e) == TOKA_E_USE && !toka_get_stats(t).sleeping);
    t->engine->can_sleep = true;
    CHECK(!toka_sleep(t, TOKA_PART_ALL, 0, &e) && !toka_wake_up(t, TOKA_PART_ALL, &e) && !toka_update_weights(t, "test/model", &e));
    t->engine->backend = cpu;
    toka_close(t);
}

/* Closing a paused model ends its requests; a device that failed gives its error to an order. */
static void test_pause_ends(void) {
    toka *t = eng_must_open("test/model", 4, 16, 1);
    toka_err e = {0};
    eng_versions open = {0};
    int32_t prompt[] = {5, 6, 7};
    toka_request r = toka_request_default();
    r.ids = prompt, r.n_ids = 3, r.n = 2;
    CHECK(!toka_pause(t, 1, &e) && !toka_submit(t, &r, eng_note_version, &open, NULL, &e));
    toka_close(t);
    CHECK(open.cancelled == 2);
    t = eng_must_open("test/model", 4, 16, 1);
    toka_backend faulty = toka_cpu;
    faulty.status = eng_faulty_status, faulty.rebind = NULL, eng_steps_left = 1;
    t->engine->backend = t->engine->replicas[0].model.backend = &faulty;
    CHECK(toka_update_weights(t, "test/model", &e) == TOKA_E_USE && strstr(e.msg, "cannot replace"));
    CHECK(toka_generate(t, &r, NULL, NULL, NULL, &e) == TOKA_E_DEVICE);
    CHECK(toka_pause(t, 1, &e) == TOKA_E_DEVICE && strstr(e.msg, "injected"));
    toka_close(t);
}

static const struct test eng_tests[] = {
    {"fixtures: logits and greedy ids equal transformers", test_fixtures},
    {"real weights give the reference's text", test_real_weights},
    {"embedded model: golden answers", test_embedded_golden},
    {"embedded model: held-out accuracy", test_embedded_accuracy},
    {"request: every way to end", test_request_ends},
    {"request: reproducible to the last bit", test_reproducible},
    {"request: greedy samples are equal", test_greedy_samples_equal},
    {"score equals generate", test_score},
    {"request: errors and cancel", test_request_errors},
    {"engine: six threads at once", test_threads},
    {"engine: hundreds of threads sleep until their request is done", test_many_threads},
    {"engine: drivers leave, others take over", test_drivers_leave},
    {"engine: toka_stop while another drives", test_stop_while_another_drives},
    {"engine: an idle replica does not wait for the other", test_idle_replica},
    {"engine: preempted samples wait", test_preempted_wait},
    {"engine: what rows attend to", test_attended_positions},
    {"engine: a device that fails", test_device_fault},
    {"batch: a device that fails, and the next run continues", test_batch_device_fault},
    {"batch: threads that do not start", test_batch_no_threads},
    {"engine: a step fails after a request's end", test_fault_after_the_end},
    {"engine: closed and stopped", test_close_and_stop},
    {"engine: sizes of the KV cache", test_kv_sizes},
    {"engine: an open that fails while ranks load", test_open_that_fails},
    {"engine: a backend that cannot run the model", test_backend_refuses},
    {"engine: an open that hangs", test_open_that_hangs},
    {"engine: weights that change", test_updates},
    {"engine: a pause that waits", test_pause_waits},
    {"engine: a pause that waits is overtaken", test_pause_is_overtaken},
    {"engine: a pause right after a request", test_pause_after_submit},
    {"engine: weights that a rank refuses", test_update_refused},
    {"engine: memory that is given back", test_sleep},
    {"engine: memory that a rank does not give or get", test_sleep_refused},
    {"engine: what a GPU refuses", test_gpu_refuses},
    {"engine: paused or failed at the end", test_pause_ends},
    {"engine: text continues after the prompt", test_text_continues},
    {"engine: page pressure changes nothing", test_page_pressure},
    {"engine: run-ahead, replicas and ranks change nothing", test_ahead},
    {"engine: the same with FP8 K and V", test_ahead_fp8},
    {"drafts: options", test_draft_options},
    {"drafts: how many", test_draft_choice},
    {"drafts: what they may cost", test_draft_budget},
    {"drafts: ends inside of accepted drafts", test_draft_ends},
    {"drafts: of a model", test_draft_model},
    {"drafts: models that do not fit", test_draft_model_open},
    {"drafts: ids that replace the draws", test_output_ids},
    {"engine: windows that give pages back change nothing", test_ahead_windows},
    {"engine: a device fails, with steps in flight", test_ahead_fault},
    {"engine: requests find a replica", test_replicas},
    {"engine: one drives, one submits and cancels", test_submit_cancel},
    {"log-probabilities of prompts", test_prompt_logprobs},
    {"embeddings in any steps", test_embeddings},
    {"engine: embeddings mean what they say", test_embeddings_mean_what_they_say},
    {"engine: embeddings that are preempted", test_embeddings_preempted},
    {"engine: embeddings at their limits", test_embeddings_edges},
    {"engine: scores, short, long, cancelled", test_score_edges},
    {"engine: a score does not wait", test_score_does_not_wait},
    {"engine: runs of events", test_runs_of_events},
    {"engine: statistics are current", test_statistics_are_current},
    {"engine: events without text", test_ids_only},
    {"engine: a callback ends single samples", test_callback_ends_samples},
    {"engine: min_tokens and stop strings", test_min_tokens_and_stops},
    {"engine: bad words", test_bad_words},
    {"engine: penalties and bad words never wait", test_history_never_waits},
    {"engine: penalties of shared pages", test_penalties_shared},
    {"engine: bad words as texts", test_bad_texts},
    {"engine: no token is allowed", test_no_token_allowed},
    {"engine: only end ids are allowed", test_only_end_ids_allowed},
    {"engine: pages for short sequences", test_short_sequences},
    {0}};
