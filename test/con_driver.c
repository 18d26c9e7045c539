/* con_driver.c - lets a Python test drive the constraints of toka.c. Each line of standard input is
 * an object; for each, one line of standard output.
 *   {"kind":K,"grammar":TEXT,"texts":[...]}  K as in toka_grammar; also "no_whitespace",
 *       "no_additional" and "whitespace_pattern". Answer: {"error":MESSAGE}, or
 *       {"accepted":[...],"compile_us":N}: for each text -1 if it is accepted, else the byte at which it is
 *       refused; its length if it ends too early; -2 if a limit was reached
 *   con_driver TOKENIZER.json: compiles for this vocabulary, reads the texts token by token, each
 *       of which must be in the mask, and adds "mask_us":[...], one time for each mask */
#include "../toka.c"
#include "check.h"

static const tok *tokenizer;
static con_vocab *vocab;

/* Reads a text in its usual tokens. Returns the byte at which a token is not in the mask, -1 if the text is
 * accepted, its length if it ends too early. */
static int read_tokens(toka_constraint *c, str text, buf *times) {
    ids tokens = {0};
    buf bytes = {0};
    toka_err e;
    con_machine *m = &c->machine;
    int node = con_begin(m, c->grammar.root), at = 0, refused = -1;
    if (tok_encode(tokenizer, text, 0, &tokens, &e)) abort();
    for (size_t i = 0; i < tokens.n && refused < 0; i++) {
        const double t0 = cpu_now();
        if (con_is_full(m)) {
            con_reset(m);
            node = con_advance(m, con_begin(m, c->grammar.root), str_sub(text, 0, (size_t)at));
        }
        static uint32_t mask[1 << 16];
        const bool made = con_mask(m, vocab, node, mask);
        json_put_num(times, 1e6 * (cpu_now() - t0), true);
        buf_clear(&bytes);
        tok_put_bytes(tokenizer, tokens.p[i], &bytes);
        if (!made || !(mask[tokens.p[i] / 32] >> tokens.p[i] % 32 & 1)) refused = at;
        at += (int)bytes.n;
        node = con_advance(m, node, buf_view(&bytes));
        if (refused < 0 && node == CON_DEAD) abort();
    }
    if (refused < 0 && !con_accepts(m, node)) refused = at;
    ids_free(&tokens), buf_free(&bytes);
    return refused;
}

static int read_bytes(con_machine *m, int root, str text) {
    int node = con_begin(m, root);
    for (size_t i = 0; i < text.n; i++)
        if ((node = con_advance(m, node, str_sub(text, i, i + 1))) == CON_DEAD) return m->failed ? -2 : (int)i;
    return con_accepts(m, node) ? -1 : (int)text.n;
}

static void answer(const json *line, arena *memory, buf *out) {
    toka_err e;
    toka_constraint *c;
    const str text = json_str(json_get(line, "grammar")), space = json_str(json_get(line, "whitespace_pattern"));
    const toka_grammar g = {(int)json_int(json_get(line, "kind"), 0), text.p, text.n,
                            json_is_true(json_get(line, "no_whitespace")), json_is_true(json_get(line, "no_additional")),
                            space.n ? arena_cstr(memory, space) : NULL};
    const double t0 = cpu_now();
    int code = con_new(&c, &g, tokenizer, vocab, &e);
    const double us = 1e6 * (cpu_now() - t0);
    json_put_open(out, '{');
    if (code) {
        json_put_key(out, "error"), json_put_str(out, str_c(e.msg));
    } else {
        buf times = {0};
        json_put_open(&times, '[');
        json_put_key(out, "accepted"), json_put_open(out, '[');
        JSON_EACH(it, json_get(line, "texts"))
            json_put_int(out, tokenizer ? read_tokens(c, json_str(it), &times) : read_bytes(&c->machine, c->grammar.root, json_str(it)));
        json_put_close(out, ']');
        json_put_key(out, "compile_us"), json_put_num(out, us, true);
        json_put_close(&times, ']');
        if (tokenizer) json_put_key(out, "mask_us"), buf_str(out, buf_view(&times));
        con_del(c);
        buf_free(&times);
    }
    json_put_close(out, '}');
}

int main(int argc, char **argv) {
    toka_err e;
    arena memory = {0};
    char *line = NULL;
    size_t cap = 0;
    str map = {NULL, 0};
    tok *loaded = NULL;
    if (argc > 1 && (os_map(argv[1], &map, &e) || tok_load(&loaded, map, STR(""), &e))) return puts(e.msg), 1;
    tokenizer = loaded;
    static con_vocab none = {.words = 1};
    vocab = loaded ? con_vocab_new(loaded, loaded->n_ids) : &none;
    for (ssize_t n; (n = getline(&line, &cap, stdin)) > 0;) {
        buf out = {0};
        const json *root = json_parse(&memory, (str){line, (size_t)n}, json_trusted, &e);
        if (!root) return puts(e.msg), 1;
        answer(root, &memory, &out);
        puts(out.p);
        buf_free(&out);
        arena_free(&memory);
    }
    if (loaded) con_vocab_del(vocab), tok_del(loaded), os_unmap(map);
    free(line);
    return 0;
}
