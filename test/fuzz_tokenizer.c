/* fuzz_tokenizer.c - libFuzzer entry: one input has a tokenizer.json, a byte 0, flags, and a text
 * to encode. A file that loads must encode and decode any text, and a stream must give the same
 * text as decode. Try it by hand with -max_len=8192. */

static int fuzz_tokenizer(const uint8_t *data, size_t n) {
    const uint8_t *zero = memchr(data, 0, n);
    size_t json_n = zero ? (size_t)(zero - data) : n;
    /* of their exact sizes: a read past the end is noticed */
    char *file = mem_alloc(json_n), *tail = mem_alloc(n - json_n);
    memcpy(file, data, json_n);
    size_t tail_n = n - json_n > 2 ? n - json_n - 2 : 0;
    memcpy(tail, data + n - tail_n, tail_n);
    int flags = tail_n ? zero[1] & 7 : 0;
    toka_err e;
    tok *t;
    if (tok_load(&t, (str){file, json_n}, STR(""), &e) == 0) {
        ids v = {0};
        buf whole = {0}, streamed = {0};
        free(file), file = NULL; /* the tokenizer must not point into the file */
        if (tok_encode(t, (str){tail, tail_n}, flags, &v, &e)) abort();
        for (size_t i = 0; i + 1 < tail_n; i += 2) /* ids that no text is encoded to */
            ids_push(&v, (tail[i] & 255) * (tail[i + 1] & 255) % MAX(1, t->n_ids));
        if (v.n && t->n_ids && tok_decode(t, v.p, v.n, flags, &whole, &e)) abort();
        tok_stream s;
        tok_stream_init(&s, t, flags);
        for (size_t i = 0; i < v.n; i++) tok_stream_put(&s, v.p[i], &streamed);
        tok_stream_end(&s, &streamed);
        tok_stream_free(&s);
        if (!str_eq(buf_view(&whole), buf_view(&streamed))) abort();
        for (size_t i = 0; i < whole.n;) {
            int k = utf8_len(whole.p + i, whole.p + whole.n);
            if (!k) abort();
            i += (size_t)k;
        }
        if (t->n_ids && tok_id(t, (str){tail, tail_n}) >= t->n_ids) abort();
        ids_free(&v), buf_free(&whole), buf_free(&streamed);
        tok_del(t);
    }
    free(file), free(tail);
    return 0;
}
