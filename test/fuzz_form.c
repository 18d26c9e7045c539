/* fuzz_form.c - libFuzzer entry: multipart forms. The first line is the Content-Type, the rest the
 * body. Cut anywhere, it gives the same parts. */

/* The parts as text, from pieces of `step` bytes. False: the form was refused. */
static bool parts(str type, str body, size_t step, buf *out) {
    files_form f;
    bool good = files_form_init(&f, type);
    for (size_t n; body.n && good; body = str_sub(body, n, body.n)) {
        n = step < body.n ? step : body.n;
        for (str piece = str_sub(body, 0, n), part; piece.n && good;) {
            size_t used;
            enum files_form_event event = files_form_next(&f, piece, &used, &part);
            if (used > piece.n) abort();
            if (event == FILES_FORM_PART)
                buf_c(out, "\nPART "), buf_str(out, buf_view(&f.name)), buf_char(out, '\n'), buf_str(out, buf_view(&f.filename));
            if (event == FILES_FORM_DATA) buf_str(out, part);
            if (event == FILES_FORM_PART_END) buf_c(out, "\nEND\n");
            if (event == FILES_FORM_END) buf_c(out, "\nWHOLE\n");
            good = event != FILES_FORM_BAD;
            piece = str_sub(piece, used, piece.n);
        }
    }
    files_form_free(&f);
    return good;
}

static int fuzz_form(const uint8_t *data, size_t size) {
    str in = {(const char *)data, size};
    ptrdiff_t line = str_find(in, STR("\n"), 0);
    if (line < 0) return 0;
    str type = str_sub(in, 0, (size_t)line), body = str_sub(in, (size_t)line + 1, in.n);
    buf whole = {0}, pieces = {0};
    bool good = parts(type, body, (size_t)-1, &whole);
    if (parts(type, body, 1 + size % 7, &pieces) != good) abort();
    if (good && !str_eq(buf_view(&whole), buf_view(&pieces))) abort();
    buf_free(&whole), buf_free(&pieces);
    return 0;
}
