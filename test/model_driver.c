/* model_driver.c - lets a Python test see the raw logits of a model.
 *   model_driver MODEL DEVICE MAX_LEN OUT [HEAD]
 *                                           standard input: cases, each n_prompt, n_positions and
 *                                           n_greedy, then the ids of the prompt and the
 *                                           positions, all as text with blanks between; MAX_LEN 0:
 *                                           the model's own
 * With HEAD, the folder of a draft head, OUT has for each case n_greedy rows of V float32 and then
 * n_greedy int32: the logits and the ids of its drafts behind the prompt, of which the model has
 * computed all but the last token. The head computes the prompt in steps of three rows.
 * Else OUT: for each case n_positions rows of V float32, the logits after the token at each position of
 * the prompt, and then n_greedy int32, the ids of greedy continuation. The prompt is one step, and
 * so is each further token. If the model cannot be opened, the message goes to standard error, and
 * the exit status is 1. */
#include "../toka.c"

enum { MAX_LEN = 512, MAX_POSITIONS = 16 };

typedef struct sequence { /* one sequence in contiguous pages */
    int32_t id[MAX_LEN], pos[MAX_LEN], kv_slot[MAX_LEN], pages[MAX_LEN];
    toka_sample_row rows[MAX_POSITIONS];
    float *logits; /* [MAX_POSITIONS][V] */
} sequence;

static void stop(int status, const char *what) {
    fprintf(stderr, "%s\n", what);
    exit(status);
}

static toka *open_model(char **argv) {
    toka_err e = {0};
    toka *t = NULL;
    toka_options o = toka_options_default();
    o.model = argv[1], o.device = argv[2], o.max_model_len = atoi(argv[3]);
    char config[1200];
    if (argv[5]) snprintf(config, sizeof config, "{\"method\":\"eagle3\",\"model\":\"%s\"}", argv[5]);
    if (argv[5]) o.speculative_config = config;
    o.n_threads = 1, o.max_num_seqs = 1, o.max_num_batched_tokens = MAX_LEN, o.kv_tokens = 2 * MAX_LEN;
    if (toka_open(&t, &o, &e)) stop(1, e.msg);
    return t;
}

static void run_step(toka *t, sequence *s, int first, int n, int n_rows) {
    toka_err e = {0};
    eng_replica *replica = &t->engine->replicas[0];
    toka_span span = {0, n, 0, 0, first + n};
    toka_state_span state = {0, n, first ? 0 : -1, 0};
    toka_step step = {.T = n, .n_spans = 1, .n_samples = n_rows, .ids = s->id + first,
                      .pos = s->pos + first, .kv_slot = s->kv_slot + first, .pages = s->pages,
                      .spans = &span, .samples = s->rows, .logits = s->logits, .n_states = 1,
                      .states = &state};
    if (model_run_step(&replica->model, &step, replica->inflight[0].results, &e)) stop(2, e.msg);
}

static int32_t highest(const float *logits, int V) {
    int best = 0;
    for (int i = 1; i < V; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

static int read_int(int low, int high) {
    int value;
    if (scanf("%d", &value) != 1 || value < low || value > high) stop(2, "bad case");
    return value;
}

/* Runs a step of the head: rows first .. first + n - 1. */
static void run_head(toka *t, sequence *s, int first, int n, const int32_t *aux_from) {
    toka_err e = {0};
    eng_draft_model *draft = &t->engine->replicas[0].draft;
    toka_span span = {0, n, 0, 0, first + n};
    toka_sample_row row = {.row = n - 1, .seq = -1, .scored_id = 0};
    toka_step step = {.T = n, .n_spans = 1, .n_samples = 1, .ids = s->id + first,
                      .pos = s->pos + first, .kv_slot = s->kv_slot + first, .pages = s->pages,
                      .spans = &span, .samples = &row, .logits = s->logits, .aux_from = aux_from};
    if (model_run_step(&draft->model, &step, draft->step.results, &e)) stop(2, e.msg);
}

/* Writes the drafts of a head behind n tokens. */
static void run_drafts(toka *t, sequence *s, int n, int n_drafts, FILE *out) {
    int32_t drafts[MAX_LEN];
    const int32_t of_last = -1;
    s->rows[0] = (toka_sample_row){0};
    run_step(t, s, 0, n - 1, 1);
    for (int first = 1; first < n; first += 3)
        run_head(t, s, first, MIN(3, n - first), s->kv_slot + first - 1);
    for (int i = 0; i < n_drafts; i++) {
        fwrite(s->logits, sizeof(float), (size_t)t->shape.V, out);
        s->id[n + i] = drafts[i] = highest(s->logits, t->shape.V);
        if (i + 1 < n_drafts) run_head(t, s, n + i, 1, &of_last);
    }
    fwrite(drafts, sizeof *drafts, (size_t)n_drafts, out);
}

/* Runs one case. Returns false if there is no further one. */
static bool run_case(toka *t, sequence *s, FILE *out) {
    int n, V = t->shape.V;
    if (scanf("%d", &n) != 1) return false;
    int n_rows = read_int(1, MAX_POSITIONS), n_greedy = read_int(0, MAX_LEN - n);
    for (int i = 0; i < n; i++) s->id[i] = read_int(0, V - 1);
    for (int i = 0; i < n_rows; i++) s->rows[i] = (toka_sample_row){.row = read_int(0, n - 1)};
    if (t->engine->draft_files) {
        run_drafts(t, s, n, n_greedy, out);
        return true;
    }
    run_step(t, s, 0, n, n_rows);
    fwrite(s->logits, sizeof(float), (size_t)n_rows * V, out);
    const float *last = s->logits + (size_t)(n_rows - 1) * V; /* the last position is the prompt's */
    s->rows[0] = (toka_sample_row){0};
    for (int i = 0; i < n_greedy; i++, last = s->logits) {
        s->id[n + i] = highest(last, V);
        fwrite(&s->id[n + i], sizeof(int32_t), 1, out);
        if (i + 1 < n_greedy) run_step(t, s, n + i, 1, 1);
    }
    return true;
}

int main(int argc, char **argv) {
    if (argc != 5 && argc != 6) stop(2, "usage: model_driver MODEL DEVICE MAX_LEN OUT [HEAD]");
    toka *t = open_model(argv);
    sequence *s = mem_zalloc(sizeof *s);
    s->logits = mem_alloc((size_t)MAX_POSITIONS * t->shape.V * sizeof(float));
    for (int i = 0; i < MAX_LEN; i++) s->pos[i] = s->kv_slot[i] = s->pages[i] = i;
    FILE *out = fopen(argv[4], "wb");
    if (!out) stop(2, "cannot write");
    while (run_case(t, s, out)) continue;
    if (fclose(out)) stop(2, "cannot write");
    free(s->logits), free(s);
    toka_close(t);
    return 0;
}
