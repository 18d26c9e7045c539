/* fuzz_batch.c - libFuzzer entry: lines of a batch file. Any line is parsed into a request, or gets
 * an error code and a message. */

static int fuzz_batch(const uint8_t *data, size_t size) {
    static toka *t;
    toka_err e = {0};
    static toka_options open;
    if (!t) {
        open = toka_options_default(), open.model = "test/model";
        if (lib_open_text(&t, &open, true, &e)) abort();
    }
    run_options o = {.defaults = toka_request_default(), .now = "2025-01-01 00:00:00"};
    run_state r = {.options = &o, .toka = t, .warned_model = true};
    arena a = {0};
    run_result result = {0};
    buf id = {0}, once = {0}, twice = {0};
    /* the list of warnings is full: no warning about unknown fields or models */
    for (int i = 0; i < 5000; i++) buf_char(&r.warned_fields, '\n');
    run_init_configs(&r);
    const json *root = json_parse(&a, (str){(const char *)data, size}, run_limits, &e);
    run_get_custom_id(root, 7, &id);
    if (root) { /* if a value is written and read again, writing it again gives the same text */
        json_put_value(&once, root);
        const json *again = json_parse(&a, buf_view(&once), run_limits, &e);
        if (!again) abort();
        json_put_value(&twice, again);
        if (run_line_hash(root, STR("")) != run_line_hash(again, STR(""))) abort();
        if (!str_eq(buf_view(&once), buf_view(&twice))) abort();
    }
    run_line *line = run_line_new(&r, buf_view(&id), run_hash_text(buf_view(&id)), size);
    int code = run_parse_line(line, root, &e);
    if (code && (!line->error || !e.msg[0])) abort();
    if (!code && (!line->request.n_prompts || !line->request.prompts[0].engine_request.ids)) abort();
    if (code) {
        line->message = mem_check(strdup(e.msg));
        buf_clear(&once);
        line->line_hash = run_line_hash(root, (str){(const char *)data, size});
        run_put_result(line, &once); /* an error record is a valid line and names the request */
        str text = str_sub(buf_view(&once), 0, once.n - 1);
        if (memchr(text.p, '\n', text.n)) abort();
        /* of a line that is too long only the beginning is read */
        for (int too_long = 0; too_long < 2; too_long++) {
            run_input in = {.too_long = too_long};
            if (!run_read_result(&r, &in, text, &a, &result) || !str_eq(buf_view(&result.custom_id), line->custom_id)) abort();
            if (result.line_hash != line->line_hash) abort();
        }
    }
    run_input in = {0}; /* the same bytes as a line of an output file: a result or not */
    run_read_result(&r, &in, (str){(const char *)data, size}, &a, &result);
    run_begins_as_result((str){(const char *)data, size});
    run_line_free(line), arena_free(&a);
    buf_free(&id), buf_free(&once), buf_free(&twice), buf_free(&r.warned_fields), buf_free(&r.other_model), buf_free(&result.custom_id);
    return 0;
}
