/* bench_con.c - what the masks of a step cost one worker, without a model.
 *   cc -O3 -o /tmp/bench_con test/bench_con.c -lm -lpthread
 *   /tmp/bench_con TOKENIZER.json DATASET [STEPS]        DATASET: make_dataset.py json
 * 64, 1,024 and 4,096 rows share the schemas of the dataset. Each row writes valid texts of its schema,
 * one after the other, from a text of its own on; each step makes all their masks as the engine does.
 * In microseconds of CPU time a step: the reading of the tokens, the masks; what share of the masks was
 * kept; and how many of a step differ, as a device gets each of them once. */
#include "../toka.c"

enum { BENCH_SCHEMAS = 16, BENCH_ROWS = 4096, BENCH_TEXTS = 64 };

typedef struct bench_schema {
    toka_constraint *constraint;
    ids texts[BENCH_TEXTS]; /* the tokens of each text, with a comma after it */
    int n_texts;
} bench_schema;

typedef struct bench_row {
    int schema, text, at, node;
    ids past;
} bench_row;

static tok *tokenizer;
static con_vocab *vocab;
static bench_schema schemas[BENCH_SCHEMAS];
static int n_schemas;
static bench_row rows[BENCH_ROWS];
static int64_t n_masks, n_kept, n_distinct;
static const con_bits *step_masks[BENCH_ROWS]; /* of the rows of a step */
static double read_s, mask_s;
static buf token_text;

static double bench_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int bench_advance(con_machine *machine, int node, int32_t id) {
    return con_advance_id(machine, tokenizer, node, id, &token_text);
}

/* Keeps the texts that the items of the schema's array may be, each in its usual tokens. */
static void bench_add_texts(bench_schema *schema, const json *texts) {
    con_machine *machine = &schema->constraint->machine;
    JSON_EACH(it, texts) {
        buf text = {0};
        toka_err e;
        buf_char(&text, '['), buf_str(&text, json_str(it)), buf_char(&text, ',');
        const int node = con_advance(machine, con_begin(machine, schema->constraint->grammar.root), buf_view(&text));
        if (node != CON_DEAD && schema->n_texts < BENCH_TEXTS && !tok_encode(tokenizer, str_sub(buf_view(&text), 1, text.n), 0, &schema->texts[schema->n_texts], &e))
            schema->n_texts++;
        buf_free(&text);
    }
}

static void bench_add_schema(const json *line) {
    bench_schema *schema = &schemas[n_schemas];
    buf text = {0};
    toka_err e;
    json_put_value(&text, json_get(line, "json_schema"));
    const toka_grammar grammar = {.kind = TOKA_GRAMMAR_JSON_SCHEMA, .text = text.p, .text_bytes = text.n};
    if (n_schemas == BENCH_SCHEMAS || con_new(&schema->constraint, &grammar, tokenizer, vocab, &e)) return;
    bench_add_texts(schema, json_get(line, "texts"));
    n_schemas += schema->n_texts > 0;
    buf_free(&text);
}

/* The row's node, again if the machine was reset. */
static void bench_read_again(bench_row *row) {
    con_machine *machine = &schemas[row->schema].constraint->machine;
    row->node = con_advance(machine, con_begin(machine, schemas[row->schema].constraint->grammar.root), STR("["));
    for (size_t i = 0; i < row->past.n; i++) row->node = bench_advance(machine, row->node, row->past.p[i]);
}

static int bench_compare(const void *a, const void *b) { return memcmp(a, b, sizeof(con_bits *)); }

static void bench_mask(const bench_row *row) {
    con_machine *machine = &schemas[row->schema].constraint->machine;
    n_masks++;
    n_kept += machine->nodes[con_near(machine, row->node)].bits[CON_PARTS] != NULL;
    con_bits *bits = con_mask_with_ends(machine, vocab, row->node, &(ids){0});
    if (!bits) abort();
    step_masks[row - rows] = bits;
    con_bits_drop(bits); /* a mask that is not kept may be counted twice */
}

/* The row writes the next token of its text; after the last one comes another text. */
static void bench_token(bench_row *row) {
    bench_schema *schema = &schemas[row->schema];
    con_machine *machine = &schema->constraint->machine;
    const int32_t id = schema->texts[row->text].p[row->at++];
    row->node = bench_advance(machine, row->node, id);
    ids_push(&row->past, id);
    if (row->node == CON_DEAD) abort();
    if (row->at < (int)schema->texts[row->text].n) return;
    row->text = (row->text + 1) % schema->n_texts, row->at = 0;
}

static void bench_step(int n_rows) {
    double t0 = bench_now();
    for (int i = 0; i < n_rows; i++) {
        con_machine *machine = &schemas[rows[i].schema].constraint->machine;
        if (!con_is_full(machine)) continue;
        con_reset(machine);
        for (int k = 0; k < n_rows; k++)
            if (rows[k].schema == rows[i].schema) bench_read_again(&rows[k]);
    }
    double t1 = bench_now();
    for (int i = 0; i < n_rows; i++) bench_mask(&rows[i]);
    double t2 = bench_now();
    qsort(step_masks, (size_t)n_rows, sizeof *step_masks, bench_compare);
    for (int i = 0; i < n_rows; i++) n_distinct += !i || step_masks[i] != step_masks[i - 1];
    const double t3 = bench_now();
    for (int i = 0; i < n_rows; i++) bench_token(&rows[i]);
    read_s += t1 - t0 + bench_now() - t3;
    mask_s += t2 - t1;
}

static void bench_rows(int n_rows, int n_steps) {
    n_masks = n_kept = n_distinct = 0;
    read_s = mask_s = 0;
    for (int i = 0; i < n_rows; i++) {
        rows[i].schema = i % n_schemas;
        rows[i].text = i / n_schemas % schemas[rows[i].schema].n_texts;
        rows[i].at = 0, rows[i].past.n = 0;
        bench_read_again(&rows[i]);
        /* so that rows are at different places of a text */
        for (int k = i / n_schemas % 97; k > 0; k--) bench_token(&rows[i]);
    }
    for (int i = 0; i < n_steps; i++) bench_step(n_rows);
    printf("%5d rows: %.0f us a step to read tokens, %.0f us for masks (%.2f us a row); %.1f %% kept, %.1f %% made; %.0f distinct masks\n", n_rows,
           1e6 * read_s / n_steps, 1e6 * mask_s / n_steps, 1e6 * (mask_s + read_s) / n_steps / n_rows, 100.0 * (double)n_kept / (double)n_masks,
           100.0 * (double)(n_masks - n_kept) / (double)n_masks, (double)n_distinct / n_steps);
}

int main(int argc, char **argv) {
    static const int sizes[] = {64, 1024, 4096};
    toka_err e;
    str file;
    if (argc < 3) return fprintf(stderr, "usage: bench_con TOKENIZER.json DATASET [STEPS]\n"), 1;
    if (os_map(argv[1], &file, &e) || tok_load(&tokenizer, file, STR(""), &e)) return fprintf(stderr, "%s\n", e.msg), 1;
    const int V = tokenizer->n_ids;
    vocab = con_vocab_new(tokenizer, V);
    if (os_map(argv[2], &file, &e)) return fprintf(stderr, "%s\n", e.msg), 1;
    arena memory = {0};
    for (str rest = file, line; str_split_next(&rest, '\n', &line);) {
        const json *root = json_parse(&memory, line, json_trusted, &e);
        if (root) bench_add_schema(root);
    }
    printf("%d schemas, %d ids\n", n_schemas, V);
    for (int i = 0; i < 3; i++) bench_rows(sizes[i], argc > 3 ? atoi(argv[3]) : 200);
    return 0;
}
