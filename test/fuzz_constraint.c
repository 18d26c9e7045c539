/* fuzz_constraint.c - libFuzzer entry: byte 0 is the kind of grammar and flags, then comes the grammar up
 * to a NUL (kind 5: GBNF or Lark), then a text. For any grammar that compiles, each byte of the text is read within the
 * limits, and the mask of every node on the way is what the tokens say one by one. */

static const char *const fuzz_tokens[] = {
    "a", "b", "c", "ab", "abc", "abcabc", "aaaaaaaaaaaaaaaaaaaaaaaa", "1", "12", "0", "-", ".", "-1", "1e5", "\"", "\"a", "a\"", "\":", "\",\"",
    "\": \"", "{", "}", "{\"", "\"}", "[", "]", "[]", "{}", "},{", ",", ", ", ":", " ", "\n", "\n  ", "  ", "true", "null", "\\", "\\n", "\\u00",
    "\xC3", "\xA9", "\xC3\xA9", "\xF0\x9F\x98\x80", "\xF0\x9F", "x", "xyz", "(", ")"};

static con_vocab *fuzz_vocab(void) {
    static con_vocab *vocab;
    con_spelling list[COUNT(fuzz_tokens)];
    for (int i = 0; i < COUNT(fuzz_tokens); i++) list[i] = (con_spelling){fuzz_tokens[i], strlen(fuzz_tokens[i]), i};
    if (!vocab) vocab = con_vocab_of(list, COUNT(list), COUNT(list));
    return vocab;
}

/* Compares a mask with each token alone. If a limit was reached there is nothing to compare. */
static void fuzz_check_mask(toka_constraint *c, int node) {
    con_machine *m = &c->machine;
    uint32_t mask[(COUNT(fuzz_tokens) + 31) / 32];
    const bool made = con_mask(m, c->vocab, node, mask);
    for (int i = 0; made && i < COUNT(fuzz_tokens); i++) {
        const bool want = con_advance(m, node, str_c(fuzz_tokens[i])) != CON_DEAD;
        if (m->failed) return;
        if (want != (mask[i / 32] >> i % 32 & 1)) abort();
    }
}

static int fuzz_constraint(const uint8_t *data, size_t size) {
    if (!size) return 0;
    toka_err e;
    toka_constraint *c;
    const uint8_t *end = memchr(data + 1, 0, size - 1);
    const size_t n_grammar = end ? (size_t)(end - data) - 1 : size - 1;
    char *grammar = mem_alloc(n_grammar); /* of the exact size: a read past the end is noticed */
    if (n_grammar) memcpy(grammar, data + 1, n_grammar);
    const toka_grammar g = {.kind = data[0] % 8, .text = grammar, .text_bytes = n_grammar,
                            .no_whitespace = data[0] >> 3 & 1, .no_additional = data[0] >> 4 & 1};
    const int code = con_new(&c, &g, NULL, fuzz_vocab(), &e);
    free(grammar); /* a constraint does not point into it */
    if (code && (code != TOKA_E_USE || !*e.msg || c)) abort();
    if (code) return 0;
    con_machine *m = &c->machine;
    int node = con_begin(m, c->grammar.root);
    for (size_t i = n_grammar + 2; i < size && node != CON_DEAD && i < n_grammar + 100; i++) {
        if (con_is_full(m)) break;
        fuzz_check_mask(c, node);
        if (!m->nodes[node].n && node != CON_DEAD && !con_accepts(m, node)) abort();
        if (!m->n_nodes || node >= m->n_nodes) break; /* con_mask has reset the machine at a limit */
        node = con_advance(m, node, (str){(const char *)data + i, 1});
    }
    con_del(c);
    return 0;
}
