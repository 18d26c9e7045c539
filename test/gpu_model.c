/* gpu_model.c - tests whole models on the GPU. Includes toka.c; is linked with the object of
 * toka_kernels.cu. Run it from the repository root.
 *
 *   gpu_model [only NAME ... [made-up]]
 *                               all fixtures, or some: logits against the float64 reference, graphs
 *                               against single launches; made-up: graphs of the made-up models
 *   gpu_model logits DIR IDS OUT [cpu]
 *                               runs the prompt IDS (text with blanks between ids) through a model
 *                               folder in one prefill step and writes raw float32 logits of every
 *                               position to OUT (a tool for test/gpu_hf.py) */
#define TOKA_SERVER
#include "../toka.c"
#include "check.h"
#include "gpu_host.h"
#include "gpu_graphs.h"

static toka *must_open(const char *model, const char *device, int max_seqs, int max_tokens) {
    toka_err e = {0};
    toka *t = NULL;
    toka_options o = toka_options_default();
    o.model = model, o.device = device, o.max_num_seqs = max_seqs, o.max_num_batched_tokens = max_tokens;
    if (toka_open(&t, &o, &e)) printf("%s: %s\n", model ? model : "embedded", e.msg), exit(2);
    return t;
}

static double rel_l2(const float *a, const float *b, int n) {
    double d = 0, r = 0;
    for (int i = 0; i < n; i++) d += ((double)a[i] - b[i]) * ((double)a[i] - b[i]), r += (double)b[i] * b[i];
    return sqrt(d / r);
}

static int int_array(const json *array, int32_t *out, int cap) {
    int n = 0;
    JSON_EACH(it, array) if (n < cap) out[n++] = (int32_t)json_int(it, -1);
    return n;
}

/* Many sequences in one step, as the engine would arrange them, in pages that the test chooses. */
enum { ROWS = 2048, CASES = 32 };

typedef struct mix {
    int32_t id[ROWS], pos[ROWS], kv_slot[ROWS], pages[ROWS], windowed_slot[ROWS], windowed_pages[ROWS];
    toka_span spans[CASES];
    toka_sample_row out[8 * CASES];
    int n_pages;
    toka_step s;
} mix;

static mix *mix_new(void) {
    mix *m = mem_zalloc(sizeof *m);
    m->s = (toka_step){.ids = m->id, .pos = m->pos, .kv_slot = m->kv_slot, .pages = m->pages, .spans = m->spans, .samples = m->out};
    /* scattered over the pool: 7 and 251 are coprime, and so are 5 and 113 */
    for (int i = 0; i < ROWS; i++) m->pages[i] = (int32_t)((i * 7 + 3) % 251), m->windowed_pages[i] = (int32_t)((i * 5 + 2) % 113);
    return m;
}
static void mix_add(mix *m, const int32_t *ids, int n, const int32_t *at, int n_at, int B) {
    toka_step *s = &m->s;
    for (int i = 0; i < n_at; i++) m->out[s->n_samples++] = (toka_sample_row){.row = s->T + at[i], .scored_id = 0};
    m->spans[s->n_spans++] = (toka_span){s->T, n, m->n_pages, 0, n};
    for (int p = 0; p < n; p++, s->T++)
        m->id[s->T] = ids[p], m->pos[s->T] = p, m->kv_slot[s->T] = m->pages[m->n_pages + p / B] * B + p % B,
        m->windowed_slot[s->T] = m->windowed_pages[m->n_pages + p / B] * B + p % B;
    m->n_pages += (n + B - 1) / B;
}

/* Runs all prompts of a fixture in one step and compares with the reference in float64. The bounds
 * are the precision that bf16 has on such small networks with large activations: transformers' own
 * bf16 forward has errors of 1.2e-2 to 4.7e-2 on them (test/gpu_hf.py), toka of 0.7e-2 to
 * 1.2e-2. */
static void fixture(const char *name) {
    char path[300];
    arena a = {0};
    toka_err e = {0};
    snprintf(path, sizeof path, "test/fixtures/%s/golden.json", name);
    str text = read_copy(path);
    const json *golden = json_parse(&a, text, json_trusted, &e), *cases = json_get(golden, "cases");
    snprintf(path, sizeof path, "test/fixtures/%s/golden.bin", name);
    str bin = read_copy(path);
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    toka *t = must_open(path, "cuda", 64, 2048);
    eng *g = t->engine;
    int V = t->shape.V, n_rows = 0;
    int32_t ids[512], at[8];
    mix *m = mix_new();
    JSON_EACH(it, cases) {
        int n = int_array(json_get(it, "prompt_ids"), ids, 512), n_at = int_array(json_get(it, "logit_positions"), at, 8);
        mix_add(m, ids, n, at, n_at, t->shape.B);
    }
    float *got = mem_alloc((size_t)m->s.n_samples * V * sizeof(float)), *want = mem_alloc((size_t)m->s.n_samples * V * sizeof(float));
    memset(got, 0xFF, (size_t)m->s.n_samples * V * sizeof(float));
    m->s.logits = got;
    const kv_cache *kv = &g->replicas[0].sched.kv;
    if (kv->window) m->s.windowed_slot = m->windowed_slot, m->s.windowed_pages = m->windowed_pages;
    bool ran = g->replicas[0].sched.config.n_pages >= 251 && (!kv->window || (kv->n_windowed >= 113 && m->n_pages <= 113)) && model_run_step(&g->replicas[0].model, &m->s, g->replicas[0].inflight[0].results, &e) == 0;
    JSON_EACH(it, cases) {
        int n_at = int_array(json_get(it, "logit_positions"), at, 8);
        memcpy(want + (size_t)n_rows * V, bin.p + json_int(json_get(it, "logits_offset"), 0), (size_t)n_at * V * 4);
        n_rows += n_at;
    }
    double worst = 0, all = ran ? rel_l2(got, want, n_rows * V) : NAN;
    for (int i = 0; i < n_rows && ran; i++) worst = fmax(worst, rel_l2(got + (size_t)i * V, want + (size_t)i * V, V));
    verdict(ran && all <= 1.5e-2 && worst <= 3e-2, "%-22s logits: relative L2 %.2e, worst of %d rows %.2e %s", name, all, n_rows, worst, e.msg);
    free(got), free(want), free(m), free((void *)text.p), free((void *)bin.p);
    toka_close(t);
    arena_free(&a);
}

/* The sizes of DeepSeek-V2's attention. */
#define MLA_CONFIG(q_rank)                                                                                                     \
    "{\"model_type\": \"deepseek_v2\", \"num_hidden_layers\": 3, \"hidden_size\": 512, \"num_attention_heads\": 16, "                   \
    "\"num_key_value_heads\": 16, \"intermediate_size\": 1024, \"vocab_size\": 2100, \"rms_norm_eps\": 1e-6, "                       \
    "\"max_position_embeddings\": 4096, \"q_lora_rank\": " q_rank ", \"kv_lora_rank\": 512, \"qk_nope_head_dim\": 128, "             \
    "\"qk_rope_head_dim\": 64, \"v_head_dim\": 128, \"moe_intermediate_size\": 256, \"n_routed_experts\": 8, "                      \
    "\"n_shared_experts\": 1, \"num_experts_per_tok\": 2, \"first_k_dense_replace\": 1, \"topk_method\": \"greedy\", "              \
    "\"scoring_func\": \"softmax\", \"norm_topk_prob\": false, \"routed_scaling_factor\": 1.0, \"rope_theta\": 10000}"

static void graphs(const char *name) {
    char path[300];
    toka_options o = g_options(path);
    snprintf(path, sizeof path, "test/fixtures/%s", name);
    g_compare(name, &o);
}

/* A made-up model with random weights. */
static void graphs_of(const char *what, const char *config) {
    char path[] = "/tmp/gpu_model_XXXXXX", folder[300];
    FILE *f = fdopen(mkstemp(path), "w");
    if (!f) abort();
    fprintf(f, "made-up made-up/model - %s\n", config);
    fclose(f);
    toka_options o = g_options(folder);
    o.model = "made-up/model", o.models_file = path;
    g_compare(what, &o);
    unlink(path);
}
/* Layers with windows of a page or none, on the kernels for Hopper; and MLA with experts. */
static void graphs_of_kinds(void) {
    graphs_of("windows in some layers",
              "{\"model_type\": \"ministral\", \"num_hidden_layers\": 4, \"hidden_size\": 512, \"num_attention_heads\": 16, "
              "\"num_key_value_heads\": 2, \"head_dim\": 64, \"intermediate_size\": 1024, \"vocab_size\": 2100, \"rms_norm_eps\": 1e-5, "
              "\"max_position_embeddings\": 4096, \"sliding_window\": 64, \"layer_types\": [\"sliding_attention\", \"full_attention\", "
              "\"sliding_attention\", \"full_attention\"]}");
    for (int q_rank = 0; q_rank < 2; q_rank++)
        graphs_of(q_rank ? "MLA with a latent vector of q" : "MLA", q_rank ? MLA_CONFIG("192") : MLA_CONFIG("null"));
}

/* ---- logits DIR IDS OUT ---- */

static int logits_main(int argc, char **argv) {
    toka_err e = {0};
    str text = read_copy(argv[3]);
    ids id = {0};
    char *copy = mem_zalloc(text.n + 1), *next = memcpy(copy, text.p, text.n);
    for (char *end; strtol(next, &end, 10), end != next; next = end) ids_push(&id, (int32_t)strtol(next, &end, 10));
    toka *t = must_open(argv[2], argc > 5 ? argv[5] : "cuda", 16, MAX(64, (int)id.n));
    int n = (int)id.n, V = t->shape.V;
    int32_t *pos = mem_alloc((size_t)n * 4), *kv_slot = mem_alloc((size_t)n * 4), *pages = mem_alloc((size_t)n * 4);
    toka_sample_row *out = mem_zalloc((size_t)n * sizeof *out);
    for (int i = 0; i < n; i++) pos[i] = i, kv_slot[i] = i, pages[i] = i, out[i] = (toka_sample_row){.row = i};
    toka_span span = {0, n, 0, 0, n};
    float *logits = mem_alloc((size_t)n * V * sizeof(float));
    toka_step s = {.T = n, .n_spans = 1, .n_samples = n, .ids = id.p, .pos = pos, .kv_slot = kv_slot, .pages = pages,
        .spans = &span, .samples = out,
                   .logits = logits};
    if (model_run_step(&t->engine->replicas[0].model, &s, t->engine->replicas[0].inflight[0].results, &e)) return printf("%s\n", e.msg), 2;
    FILE *f = fopen(argv[4], "wb");
    bool ok = f && fwrite(logits, sizeof(float), (size_t)n * V, f) == (size_t)n * V;
    if (f) ok = fclose(f) == 0 && ok;
    toka_close(t);
    return ok ? 0 : 2;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 4 && !strcmp(argv[1], "logits")) return logits_main(argc, argv);
    bool only = argc > 2 && !strcmp(argv[1], "only");
    for (int i = 2; i < argc && only && strcmp(argv[i], "made-up"); i++) fixture(argv[i]), graphs(argv[i]);
    toka_options o = g_options("test/model");
    if (!only) g_failing("test/model", &o, "3");
    if (!only || !strcmp(argv[argc - 1], "made-up")) graphs_of_kinds();
    DIR *d = only ? NULL : opendir("test/fixtures");
    for (struct dirent *it; d && (it = readdir(d));)
        if (it->d_name[0] != '.') fixture(it->d_name), graphs(it->d_name);
    if (d) closedir(d);
    printf("%d passed, %d failed, 0 skipped\n", n_passed, n_failed);
    return n_failed != 0;
}
